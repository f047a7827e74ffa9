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
Every write goes to a temporary file that is renamed at the end, so a file is either complete or
does not exist.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import filelock
import numpy as np

MAGIC, VERSION = 20240520, 1
HEADER_WORDS, HEADER_BYTES = 256, 1024
MAX_VOCAB = 65_536  # tokens are uint16
DATASET_FORMAT = "decoderstack-dataset-1"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FOLDERS = ("pretrain", "sft", "core")  # of what dataset.json lists
# What the splits of a folder count.
COUNTS = {
    "pretrain": ("tokens", "documents", "text_bytes"),
    "sft": ("tokens", "counted_tokens", "conversations"),
}


def fail(message: str) -> NoReturn:
    """Every error of a user in data/: raises SystemExit, a sentence on stderr and exit code 1."""
    raise SystemExit(f"error: {' '.join(message.split())}")


def run(main: Callable[[], None]) -> None:
    """Runs a script's main function, and turns errors of the system into an error message."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console may lack letters of a text or a name
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; repeat the same command to continue") from None
    except BrokenPipeError:
        # The reader of the output, such as head, has ended, so what follows is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as problem:
        if problem.errno in FULL_DISK:
            fail(f"the disk is full ({problem}); free some space and run again")
        fail(f"{problem}; check the path and its permissions")


# ==== files


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_matches(path: Path, sha256: str) -> bool:
    """Whether a file exists and has this sha256."""
    return path.is_file() and sha256_file(path) == sha256


def write_atomic(path: str | Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Writes the pieces to `path` through a temporary file beside it; returns the hex sha256.

    The old file is untouched until the rename; a failure leaves no temporary file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The dot and the ending keep a file left by kill -9 out of every *.bin or *.json pattern, until it is overwritten.
    temporary = path.with_name(f".{path.name}.tmp")
    digest = hashlib.sha256()
    try:
        with open(temporary, "wb") as f:
            for piece in pieces:
                f.write(piece)
                digest.update(piece)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks a dataset directory for the duration of a `with`, and makes it if it does not exist.

    The file .lock is kept, as deleting it would let two processes in, but a new folder in which nothing
    was made is removed. Where the file cannot be locked, as on some network file systems, a warning says so.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        fail(f"another process is writing to {folder}; wait until it ends")
    except (OSError, NotImplementedError) as problem:
        hint = "make sure that no other command writes to it"
        print(f"warning: {folder} cannot be locked ({problem}); {hint}", file=sys.stderr)
    try:
        yield
    finally:
        lock.release()
        if is_new and {path.name for path in folder.iterdir()} <= {".lock"}:
            # Nothing was made. `hf download` without a network would take this folder for a finished download.
            shutil.rmtree(folder)


def write_json(path: str | Path, value: Any) -> str:
    """Writes JSON atomically, indented by one, in ASCII, with a line end; returns the hex sha256 of the file."""
    return write_atomic(path, [(json.dumps(value, indent=1) + "\n").encode()])


def read_json(path: str | Path) -> Any:
    """Reads a JSON file; a missing or broken one ends the script."""
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        fail(f"{path} does not exist; check the path")
    except (ValueError, OSError, RecursionError) as problem:
        fail(f"{path} is not a readable JSON file ({problem}); check the path, or restore the file")


def check_format(value: Any, path: str | Path, expected: str, hint: str) -> None:
    """Ends the script unless a JSON value is an object that states a format."""
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if found != expected:
        fail(f"{path} has format {found!r}, expected {expected!r}; {hint}")


def file_entry(path: str | Path, sha256: str) -> dict[str, Any]:
    """{"bytes", "sha256"} of a file, as dataset.json lists it."""
    return {"bytes": os.path.getsize(path), "sha256": sha256}


# ==== shards


def write_shard(
    path: str | Path, tokens: np.ndarray, bos_id: int | None = None, vocab_size: int = 0, tokenizer_sha256: str = ""
) -> str:
    """Writes tokens (uint16 [n], n > 0) as one shard; returns the hex sha256 of the whole file.

    None, 0 and "" are written as "not stated".
    """
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
    """Checks the header against the file's size and returns {"tokens", "bos_id", "vocab_size",
    "tokenizer_sha256", "payload_sha256"}; None, 0 or "": not stated.
    """
    hint = "rebuild or download the dataset"
    with open(path, "rb") as f:
        raw = f.read(HEADER_BYTES)
        size = os.fstat(f.fileno()).st_size
    header = np.frombuffer(raw.ljust(HEADER_BYTES, b"\0"), dtype="<i4")
    magic, version, count = map(int, header[:3])
    if magic != MAGIC or version != VERSION:
        fail(f"{path} is not a token shard: it has magic {magic}, version {version}; {hint}")
    expected = HEADER_BYTES + 2 * count
    if count <= 0 or size != expected:
        kind = "truncated" if size < expected else "too long"
        fail(f"shard {path} is {kind}: expected {expected} bytes for {count} tokens, found {size}; {hint}")
    words = [header[5:13].tobytes(), header[13:21].tobytes()]
    tokenizer_sha256, payload_sha256 = (w.hex() if any(w) else "" for w in words)
    bos_id = int(header[3]) - 1
    return {
        "tokens": count,
        "bos_id": None if bos_id < 0 else bos_id,
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
    expected = header["payload_sha256"]
    if verify and expected:
        actual = hashlib.sha256(tokens.data).hexdigest()
        if actual != expected:
            fail(f"shard {path} is damaged: expected {expected}, found {actual}; rebuild the dataset")
    return tokens


def read_documents(paths: Iterable[Path], bos_id: int) -> Iterator[bytes]:
    """The bytes of each document's tokens, from its BOS to the next."""
    for path in paths:
        tokens = read_shard(path)
        starts = np.flatnonzero(tokens == bos_id).tolist()
        for start, end in itertools.pairwise([*starts, len(tokens)]):
            yield tokens[start:end].tobytes()


def group_shards(documents: Iterable[tuple], shard_tokens: int) -> Iterator[list[tuple]]:
    """The documents of each shard: tuples that begin with the tokens, uint16 [n].

    A shard ends before a document that would exceed shard_tokens; only a single larger document
    makes a larger shard.
    """
    shard: list[tuple] = []
    size = 0
    for document in documents:
        length = len(document[0])
        if shard and size + length > shard_tokens:
            yield shard
            shard = []
            size = 0
        shard.append(document)
        size += length
    if shard:
        yield shard


# ==== dataset.json


def fingerprint(files: dict[str, dict[str, Any]], folder: str = "pretrain") -> str:
    """Hex sha256 of the sorted lines "path sha256" of the files of a folder and of tokenizer.json.

    That of pretrain/ identifies the dataset. Evaluation and finetuning files may be added later and
    have fingerprints of their own.
    """
    paths = [path for path in files if path == "tokenizer.json" or path.startswith(f"{folder}/")]
    lines = sorted(f"{path} {files[path]['sha256']}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sum_splits(files: dict[str, dict[str, Any]], folder: str) -> dict[str, dict[str, int]]:
    """The sums of COUNTS over the shards of a folder, by split."""
    splits = {}
    for split in ("train", "val"):
        entries = [files[name] for name in shard_names(files, f"{folder}/{split}_")]
        name = split if folder == "pretrain" else f"{folder}_{split}"
        splits[name] = {key: sum(entry.get(key, 0) for entry in entries) for key in COUNTS[folder]}
    return splits


def shard_names(files: Iterable[str], prefix: str) -> list[str]:
    """The shards of a split, such as "pretrain/train_", without masks."""
    return [name for name in files if name.startswith(prefix) and not name.endswith(".mask.bin")]


def write_dataset(folder: str | Path, dataset: dict[str, Any]) -> None:
    """Writes folder/dataset.json from {"name", "sources", "tokenizer_sha256", "vocab_size",
    "bos_id", "special_tokens", "files", ...}; the format, the split totals and the fingerprints are
    filled in here.
    """
    files = dict(sorted(dataset["files"].items()))
    value = {"format": DATASET_FORMAT, **dataset, "splits": sum_splits(files, "pretrain")}
    value |= {"files": files, "fingerprint": fingerprint(files)}
    for name in FOLDERS[1:]:
        if any(path.startswith(f"{name}/") for path in files):
            value[name] = {**value.get(name, {}), "fingerprint": fingerprint(files, name)}
        else:
            value.pop(name, None)
    if "sft" in value:
        value["splits"] |= sum_splits(files, "sft")
    write_json(Path(folder) / "dataset.json", value | {"sha256": seal_of(value)})


def seal_of(value: dict[str, Any]) -> str:
    """The last entry of dataset.json, by which its readers notice damage: the sha256 of the JSON without it."""
    return hashlib.sha256(json.dumps(value, indent=1).encode()).hexdigest()


def read_dataset(folder: str | Path) -> dict[str, Any]:
    """Reads folder/dataset.json; ends the script unless it is a consistent one of this format."""
    path = Path(folder) / "dataset.json"
    if not path.exists():
        fail(f"{folder} has no dataset.json, so it is not a complete dataset; build it")
    value = read_json(path)
    check_format(value, path, DATASET_FORMAT, "rebuild the dataset")
    seal = value.pop("sha256", None)  # older datasets have none
    if seal not in (None, seal_of(value)):
        fail(f"{path} is damaged; restore or rebuild it")
    files = value.get("files")
    if not isinstance(files, dict) or "tokenizer.json" not in files:
        fail(f"{path} lists no tokenizer.json; rebuild the dataset")
    return value


@contextlib.contextmanager
def new_folder(root: Path, name: str, **more: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields (a folder to fill, a dict to fill with its entries in dataset.json). After the `with`
    they replace those of root/NAME, and `more` goes into dataset.json too.

    The old folder stays until the new one is complete; in between dataset.json lists neither.
    """
    dataset = read_dataset(root)
    files = dataset["files"]
    others = {path: files[path] for path in files if not path.startswith(f"{name}/")}
    new = root / f".{name}.new.tmp"
    old = root / f".{name}.old.tmp"
    written: dict[str, Any] = {}
    for leftover in (new, old):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        yield new, written
        write_dataset(root, {**dataset, "files": others})
        if (root / name).exists():
            (root / name).rename(old)
        new.rename(root / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    write_dataset(root, {**dataset, **more, "files": {**others, **written}})


# ==== checks


def check_file(path: Path, entry: dict[str, Any]) -> None:
    """Ends the script unless a listed file is there, with its size and its sha256."""
    if not path.is_file():
        fail(f"{path} is missing, but dataset.json lists it; restore it")
    if path.suffix == ".bin":
        read_header(path)
    size = path.stat().st_size
    if sha256_file(path) != entry["sha256"] or size != entry.get("bytes", size):
        fail(f"{path} was changed: dataset.json lists a different size or sha256; restore it")


def count_shard(path: Path, tokenizer_sha256: str, bos: int, lengths: np.ndarray) -> dict[str, int]:
    """Tokens, documents and bytes of text of a shard; ends the script if its tokenizer is another.

    lengths int32 [vocabulary]: the bytes of text of each token.
    """
    hint = "pass the tokenizer it was made with, or build it again"
    header = read_header(path)
    made_with = header["tokenizer_sha256"]
    if made_with not in ("", tokenizer_sha256):
        fail(f"{path} was made with another tokenizer (sha256 {made_with}, not {tokenizer_sha256}); {hint}")
    tokens = read_shard(path, verify=True)
    if tokens.max() >= len(lengths):
        fail(f"{path} holds token {tokens.max()} but the tokenizer has {len(lengths)} entries; {hint}")
    # A piece at a time, as bincount widens to int64.
    pieces = [tokens[start : start + 2**24] for start in range(0, len(tokens), 2**24)]
    counts = sum(np.bincount(piece, minlength=len(lengths)) for piece in pieces)
    header_bos = header["bos_id"]
    entries = header["vocab_size"]
    if header_bos not in (None, bos) or entries not in (0, len(lengths)) or not counts[bos]:
        fail(
            f"{path} lacks the tokenizer's BOS {bos}, or states another vocabulary "
            f"(BOS {header_bos}, {entries} entries); {hint}"
        )
    return {"tokens": len(tokens), "documents": int(counts[bos]), "text_bytes": int(counts @ lengths)}


def overlap_note(folder: Path, bos_id: int, kind: str = "pretrain") -> str:
    """A message if documents of the validation split are also in the training split, else ""."""
    files = read_dataset(folder)["files"]
    unit = "conversations" if kind == "sft" else "documents"
    train = shard_names(files, f"{kind}/train_")
    val = shard_names(files, f"{kind}/val_")
    held_out = Counter(read_documents([folder / name for name in val], bos_id))
    documents = read_documents([folder / name for name in train], bos_id)
    in_both = {document for document in documents if document in held_out}
    if not in_both:
        return ""
    count = sum(held_out[document] for document in in_both)
    total = sum(files[name][unit] for name in val)
    return f"{count:,} of {total:,} {unit} of the validation split are also in the training split"
