"""The dataset directory on disk: token shards, checksums, dataset.json.

A shard is a header of 256 little-endian int32 words, then uint16 tokens:

    word 0       20240520, the magic number of llm.c and modded-nanogpt
    word 1       1, the version
    word 2       number of tokens that follow
    word 3       BOS id + 1        (0: not stated)
    word 4       vocabulary size   (0: not stated)
    words 5-12   sha256 of tokenizer.json (zeros: not stated)
    words 13-20  sha256 of the token bytes (zeros: not stated)

Words 3 to 20 are ours. Readers of the original format ignore them, and its files have zeros there.
Every write goes to a temporary file beside the target and is renamed, so a name either holds a whole file
or does not exist. Mistakes end the script through fail(): one sentence on stderr, exit code 1.
"""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MAGIC, VERSION = 20240520, 1
HEADER_WORDS, HEADER_BYTES = 256, 1024
MAX_VOCAB = 65_536  # tokens are uint16
DATASET_FORMAT = "decoderstack-dataset-1"


def fail(message: str) -> NoReturn:
    """Ends the script with one sentence on stderr and exit code 1."""
    raise SystemExit(f"error: {message}")


# --- files ------------------------------------------------------------------------------------------------


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_atomic(path: str | Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Writes the pieces to `path` through a temporary file in the same folder; returns the hex sha256.

    Until the rename the old file, if there is one, stays as it was; a failure leaves no temporary file.
    """
    path = Path(path)
    digest = hashlib.sha256()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The leading dot and the ending keep a file left by kill -9 out of every *.bin or *.json pattern.
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
        )
        with open(handle, "wb") as f:
            for piece in pieces:
                f.write(piece)
                digest.update(piece)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(
            temporary, 0o666 & ~current_umask()
        )  # mkstemp makes 0600, which others could not read
        os.replace(temporary, path)
    except BaseException as problem:
        if temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        if isinstance(problem, OSError):
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                fail(
                    f"the disk of {path.parent} is full while writing {path.name}; free some space and run "
                    f"again"
                )
            fail(f"cannot write {path} ({problem.strerror}); check the folder and its permissions")
        raise
    return digest.hexdigest()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def remove_leftovers(folder: str | Path) -> None:
    """Deletes the temporary files that a killed run left in a folder."""
    for path in Path(folder).glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def write_json(path: str | Path, value: Any) -> str:
    """Writes JSON atomically; returns the hex sha256 of the file."""
    return write_atomic(path, [(json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()])


def read_json(path: str | Path) -> Any:
    """Reads a JSON file; a missing or broken one ends the script."""
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        fail(f"{path} does not exist; check the path")
    except (ValueError, OSError) as problem:
        fail(f"{path} is not a readable JSON file ({problem}); restore or delete it")


# --- shards -----------------------------------------------------------------------------------------------


def write_shard(
    path: str | Path,
    tokens: np.ndarray,
    bos_id: int | None = None,
    vocab_size: int = 0,
    tokenizer_sha256: str = "",
) -> str:
    """Writes tokens (uint16 [n], n > 0) as one shard; returns the hex sha256 of the whole file.

    bos_id None, vocab_size 0 and tokenizer_sha256 "" are written as "not stated". ValueError on wrong input.
    """
    if tokens.ndim != 1 or tokens.dtype != np.uint16:
        raise ValueError(
            f"tokens must be uint16 of shape [n], not {tokens.dtype} of shape {list(tokens.shape)}"
        )
    if not 0 < len(tokens) < 2**31:
        raise ValueError(f"a shard holds 1 to {2**31 - 1} tokens, not {len(tokens)}")
    payload = np.ascontiguousarray(tokens, dtype="<u2")
    header = np.zeros(HEADER_WORDS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    header[3] = 0 if bos_id is None else bos_id + 1
    header[4] = vocab_size
    if tokenizer_sha256:
        header[5:13] = np.frombuffer(bytes.fromhex(tokenizer_sha256), dtype="<i4")
    header[13:21] = np.frombuffer(hashlib.sha256(payload.data).digest(), dtype="<i4")
    return write_atomic(path, [header.tobytes(), payload.data])


def read_header(path: str | Path) -> dict[str, Any]:
    """Checks the header against the file's size and returns
    {"tokens", "bos_id" (None: not stated), "vocab_size" (0), "tokenizer_sha256" (""), "payload_sha256" ("")}.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as f:
            raw = f.read(HEADER_BYTES)
    except OSError as problem:
        fail(f"cannot read shard {path} ({problem.strerror}); check the path")
    if len(raw) < HEADER_BYTES:
        fail(
            f"shard {path} is truncated: expected a header of {HEADER_BYTES} bytes, found {size}; write it "
            f"again"
        )
    header = np.frombuffer(raw, dtype="<i4")
    if header[0] != MAGIC or header[1] != VERSION:
        fail(
            f"{path} is not a token shard: expected magic {MAGIC} version {VERSION}, found {header[0]} "
            f"{header[1]}; "
            "choose a file that data/pretrain.py wrote"
        )
    count = int(header[2])
    if count <= 0:
        fail(f"shard {path} states {count} tokens, expected at least 1; write it again")
    expected = HEADER_BYTES + 2 * count
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        fail(
            f"shard {path} is {kind}: expected {expected} bytes for {count} tokens, found {size}; write it "
            f"again"
        )
    words = [header[5:13].tobytes(), header[13:21].tobytes()]
    tokenizer_sha256, payload_sha256 = (w.hex() if any(w) else "" for w in words)
    return {
        "tokens": count,
        "bos_id": int(header[3]) - 1 if header[3] > 0 else None,
        "vocab_size": int(header[4]),
        "tokenizer_sha256": tokenizer_sha256,
        "payload_sha256": payload_sha256,
    }


def read_shard(path: str | Path, verify: bool = False) -> np.ndarray:
    """The tokens of a shard as a read-only memory map, uint16 [n].

    verify=True also compares the payload's sha256 with the header, where the header states one.
    """
    header = read_header(path)
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(header["tokens"],))
    if verify and header["payload_sha256"]:
        found = hashlib.sha256(tokens.data).hexdigest()
        if found != header["payload_sha256"]:
            fail(
                f"shard {path} is damaged: expected token sha256 {header['payload_sha256']}, found {found}; "
                "write or download it again"
            )
    return tokens


# --- dataset.json -----------------------------------------------------------------------------------------


def fingerprint(files: dict[str, dict[str, Any]]) -> str:
    """One hex sha256 for what pretraining reads: over the sorted lines "path sha256" of its tokenizer and shards.

    Evaluation and finetuning files may be added later without making it another dataset.
    """
    read = {
        path: entry
        for path, entry in files.items()
        if path == "tokenizer.json" or path.startswith("pretrain/")
    }
    lines = sorted(f"{path} {entry['sha256']}\n" for path, entry in read.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sum_splits(files: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Tokens, documents and text bytes of the pretrain shards, by split."""
    splits = {}
    for split in ("train", "val"):
        entries = [entry for path, entry in files.items() if path.startswith(f"pretrain/{split}_")]
        splits[split] = {
            key: sum(e[key] for e in entries) for key in ("tokens", "documents", "text_bytes")
        }
    return splits


def write_dataset(folder: str | Path, dataset: dict[str, Any]) -> None:
    """Writes folder/dataset.json from {"name", "sources", "tokenizer_sha256", "vocab_size", "bos_id",
    "special_tokens", "files", ...}; the format, the split totals and the fingerprint are filled in here.
    """
    files = dict(sorted(dataset["files"].items()))
    splits = {**dataset.get("splits", {}), **sum_splits(files)}
    value = {"format": DATASET_FORMAT, **dataset, "splits": splits, "files": files}
    value["fingerprint"] = fingerprint(files)
    write_json(Path(folder) / "dataset.json", value)


def read_dataset(folder: str | Path) -> dict[str, Any]:
    """Reads and checks folder/dataset.json."""
    path = Path(folder) / "dataset.json"
    if not path.exists():
        fail(
            f"{folder} holds no dataset.json, so it is not a complete dataset; build it with data/pretrain.py"
        )
    return check_dataset(read_json(path), path)


def check_dataset(value: Any, path: str | Path) -> dict[str, Any]:
    """Ends the script unless value is a dataset.json of this format whose fingerprint is right."""
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if found != DATASET_FORMAT:
        fail(f"{path} has format {found!r}, expected {DATASET_FORMAT!r}; build the dataset again")
    files = value.get("files")
    if not isinstance(files, dict) or not files:
        fail(f"{path} lists no files; build the dataset again")
    for name, entry in files.items():
        # The names come from outside when a dataset is downloaded: none may point out of the folder.
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts and "\\" not in name
        if not inside or not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            fail(
                f"{path} lists the file {name!r} with a bad path or no sha256; build the dataset again"
            )
    if value.get("fingerprint") != fingerprint(files):
        fail(
            f"{path} does not agree with itself: fingerprint {value.get('fingerprint')} is not that of its "
            f"files; "
            "build the dataset again"
        )
    return value
