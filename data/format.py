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

What is read may come from strangers. So limits are checked before memory is taken, and dataset.json may list
no file outside the four folders of a dataset.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MAGIC, VERSION = 20240520, 1
HEADER_WORDS, HEADER_BYTES = 256, 1024
MAX_VOCAB = 65_536  # tokens are uint16
DATASET_FORMAT = "decoderstack-dataset-1"
MAX_JSON = 2**26  # bytes of a JSON file; a tokenizer of 65,536 entries has 2 million
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What dataset.json may list: one level of folders, and no name that begins with a dot.
FOLDERS = ("pretrain", "sft", "core", "chat_eval")
LISTED_NAME = re.compile(
    rf"tokenizer\.json|({'|'.join(FOLDERS)})/[A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}}"
)
SHA256 = re.compile(r"[0-9a-f]{64}")


def fail(message: str) -> NoReturn:
    """Ends the script with one sentence on stderr and exit code 1."""
    # Names and contents of files stand in it: they may hold line breaks, and may be huge.
    line = " ".join(message.split())
    if len(line) > 2000:
        line = f"{line[:1000]} ... {line[-990:]}"
    raise SystemExit(f"error: {line}")


def run(main: Callable[[], None]) -> None:
    """Runs a script's main function: what the system refuses becomes a sentence too."""
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; repeat the same command to go on") from None
    except BrokenPipeError:
        # What read the output, such as head, has ended. The rest of it must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except MemoryError:
        fail("this computer's memory is used up; give fewer --workers or smaller shards")
    except OSError as problem:
        if problem.errno in FULL_DISK:
            fail(f"the disk is full ({problem}); free some space and run again")
        fail(f"{problem}; check the path and its permissions")
    except ValueError as problem:
        # The only one that a path can cause. Any other is our own mistake.
        if "null byte" not in str(problem):
            raise
        fail("a path holds a NUL character; check the paths")


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
            if problem.errno in FULL_DISK:
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
    """Deletes the temporary files and folders that a killed run left in a folder."""
    for path in Path(folder).glob(".*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            continue
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def lock_folder(folder: Path) -> contextlib.AbstractContextManager:
    """Keeps every other process out of a dataset directory: for `with`, and at the latest until this process ends.

    The folder is made if it does not exist. Its file .lock stays, as deleting it would let two processes in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        return contextlib.nullcontext()
    file = (folder / ".lock").open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno in (errno.EACCES, errno.EAGAIN):
            fail(
                f"another process is writing to {folder}; wait until it ends, or name another folder"
            )
        print(
            f"{folder} is not locked: its file system supports no locks ({problem.strerror}); let no second "
            f"process write there"
        )
    return file


def replace_folder(new: Path, target: Path) -> None:
    """Puts a folder in the place of another one, which is deleted. dataset.json must not list either meanwhile."""
    old = target.with_name(f".{target.name}.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if target.exists():
            target.rename(old)
        new.rename(target)
    except OSError as problem:
        fail(
            f"cannot put {target} in place ({problem.strerror}); check the folder's permissions and run again"
        )
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: str | Path, value: Any) -> str:
    """Writes JSON atomically; returns the hex sha256 of the file."""
    return write_atomic(path, [(json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()])


def read_json(path: str | Path) -> Any:
    """Reads a JSON file; a missing, broken or huge one ends the script."""
    try:
        with open(path, "rb") as f:
            raw = f.read(MAX_JSON + 1)
        if len(raw) > MAX_JSON:
            fail(
                f"{path} is larger than {MAX_JSON:,} bytes, so it is not ours; restore or delete it"
            )
        return json.loads(raw)
    except FileNotFoundError:
        fail(f"{path} does not exist; check the path")
    except RecursionError:
        fail(f"{path} is nested too deeply to be ours; restore or delete it")
    except (ValueError, OSError) as problem:
        fail(f"{path} is not a readable JSON file ({problem}); restore or delete it")


def is_count(value: Any, least: int = 0) -> bool:
    """True for a whole number from `least` up to what 64 bits hold; JSON's true is none."""
    return type(value) is int and least <= value < 2**63


def entry_of(path: str | Path, sha256: str) -> dict[str, Any]:
    """What dataset.json says about every file: its size in bytes and its sha256."""
    return {"bytes": os.path.getsize(path), "sha256": sha256}


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
    except ValueError:
        fail(f"cannot read shard {str(path)!r}: its path holds a NUL character; check the path")
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
    bos_id, vocab_size = int(header[3]) - 1, int(header[4])
    if not -1 <= bos_id < MAX_VOCAB or not 0 <= vocab_size <= MAX_VOCAB:
        fail(
            f"shard {path} states BOS {bos_id} and a vocabulary of {vocab_size}, expected at most "
            f"{MAX_VOCAB}; write or download it again"
        )
    words = [header[5:13].tobytes(), header[13:21].tobytes()]
    tokenizer_sha256, payload_sha256 = (w.hex() if any(w) else "" for w in words)
    return {
        "tokens": count,
        "bos_id": None if bos_id < 0 else bos_id,
        "vocab_size": vocab_size,
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


def fingerprint(files: dict[str, dict[str, Any]], folder: str = "pretrain") -> str:
    """One hex sha256 for all that is read from a folder: over the sorted lines "path sha256" of its files and of
    the tokenizer.

    That of pretrain/ names the dataset. Evaluation and finetuning files, which may be added later, do not make it
    another one: they have fingerprints of their own.
    """
    read = {
        path: entry
        for path, entry in files.items()
        if path == "tokenizer.json" or path.startswith(f"{folder}/")
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
    "special_tokens", "files", ...}; the format, the split totals and the fingerprints are filled in here.
    """
    files = dict(sorted(dataset["files"].items()))
    splits = {**dataset.get("splits", {}), **sum_splits(files)}
    value = {"format": DATASET_FORMAT, **dataset, "splits": splits, "files": files}
    value["fingerprint"] = fingerprint(files)
    for name in FOLDERS[1:]:
        if any(path.startswith(f"{name}/") for path in files):
            value[name] = {**value.get(name, {}), "fingerprint": fingerprint(files, name)}
        else:
            value.pop(name, None)
    write_json(Path(folder) / "dataset.json", value)


def read_dataset(folder: str | Path) -> dict[str, Any]:
    """Reads and checks folder/dataset.json."""
    path = Path(folder) / "dataset.json"
    if not os.path.exists(path):
        fail(
            f"{folder} holds no dataset.json, so it is not a complete dataset; build it with data/pretrain.py"
        )
    return check_dataset(read_json(path), path)


def check_dataset(value: Any, path: str | Path) -> dict[str, Any]:
    """Ends the script unless value is a dataset.json of this format that agrees with itself."""
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if found != DATASET_FORMAT:
        fail(f"{path} has format {found!r}, expected {DATASET_FORMAT!r}; build the dataset again")
    files = value.get("files")
    if not isinstance(files, dict) or not files:
        fail(f"{path} lists no files; build the dataset again")
    for name, entry in files.items():
        check_entry(name, entry, path)
    check_splits(value, path)
    check_vocabulary(value, path)
    check_fingerprints(value, path)
    return value


def check_entry(name: str, entry: Any, path: str | Path) -> None:
    """Ends the script unless a file that dataset.json lists lies in the folder and has a sha256 and true numbers."""
    # The names come from outside when a dataset is downloaded: none may point out of the folder.
    if not LISTED_NAME.fullmatch(name):
        fail(f"{path} lists the file {name[:200]!r}, which has a bad path; build the dataset again")
    sha256 = entry.get("sha256") if isinstance(entry, dict) else None
    if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
        fail(f"{path} lists the file {name!r} without its sha256; build the dataset again")
    needed = ("tokens", "documents", "text_bytes") if name.startswith("pretrain/") else ()
    # Datasets of earlier versions state no "bytes".
    for key in ("bytes", "tokens", "documents", "text_bytes"):
        if (key in needed or key in entry) and not is_count(entry.get(key)):
            fail(
                f"{path} lists the file {name!r} with {key} that are no whole number; build the dataset again"
            )


def check_splits(value: dict[str, Any], path: str | Path) -> None:
    """Ends the script unless both splits have tokens and text, as rates per byte are divided by them, and what is
    stated of them is the sum of their files."""
    stated = value.get("splits", {})
    if not isinstance(stated, dict):
        fail(f"{path} has no table of splits; build the dataset again")
    for split, total in sum_splits(value["files"]).items():
        # Datasets made by hand state none.
        if split in stated and stated[split] != total:
            fail(
                f"{path} does not agree with itself: its split {split!r} is not the sum of its files; "
                f"build the dataset again"
            )
        for key in ("tokens", "text_bytes"):
            if not total[key]:
                fail(f"{path} lists no {key} of the split {split!r}; build the dataset again")


def check_vocabulary(value: dict[str, Any], path: str | Path) -> None:
    """Ends the script unless the vocabulary ends with the special tokens, as that of every tokenizer.json does."""
    if "special_tokens" not in value:  # in datasets made by hand
        return
    special = value["special_tokens"]
    ids = list(special.values()) if isinstance(special, dict) else []
    known = bool(ids) and all(map(is_count, ids))
    if not known or value.get("vocab_size") != max(ids) + 1 or value.get("bos_id") not in ids:
        fail(
            f"{path} does not agree with itself: its vocab_size or bos_id does not belong to its special_tokens; "
            f"build the dataset again"
        )


def check_fingerprints(value: dict[str, Any], path: str | Path) -> None:
    """Ends the script unless the fingerprints are those of the listed files, and the tokenizer is one and the same."""
    files = value["files"]
    stated = value.get("tokenizer_sha256")
    listed = files.get("tokenizer.json", {"sha256": stated})["sha256"]
    if not isinstance(stated, str) or stated != listed:
        fail(
            f"{path} does not agree with itself: its tokenizer_sha256 is not that of its tokenizer.json; "
            f"build the dataset again"
        )
    if value.get("fingerprint") != fingerprint(files):
        fail(
            f"{path} does not agree with itself: its fingerprint is not that of its files; "
            f"build the dataset again"
        )
    for name in FOLDERS[1:]:
        notes = value.get(name, {})
        # Datasets of earlier versions state none for these.
        if not isinstance(notes, dict) or (
            "fingerprint" in notes and notes["fingerprint"] != fingerprint(files, name)
        ):
            fail(
                f"{path} does not agree with itself: the fingerprint of {name}/ is not that of its files; "
                f"make them again"
            )
