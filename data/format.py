"""The dataset directory on disk: token shards, checksums, dataset.json.

    python data/format.py check data/shards/mine      reads all of it: a line for each problem, or one that all is well

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
or does not exist. Mistakes of the user end the script through fail(): one sentence on stderr, exit code 1.
"""

import argparse
import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What dataset.json may list: one level of folders, and no name that begins with a dot.
FOLDERS = ("pretrain", "sft", "core", "chat_eval")
LISTED_NAME = re.compile(
    rf"tokenizer\.json|({'|'.join(FOLDERS)})/[A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}}"
)
SHA256 = re.compile(r"[0-9a-f]{64}")


def fail(message: str) -> NoReturn:
    """Ends the script with one sentence on stderr and exit code 1."""
    raise SystemExit(f"error: {' '.join(message.split())}")


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
    except OSError as problem:
        if problem.errno in FULL_DISK:
            fail(f"the disk is full ({problem}); free some space and run again")
        fail(f"{problem}; check the path and its permissions")


# ==== files


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_atomic(path: str | Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Writes the pieces to `path` through a temporary file in the same folder; returns the hex sha256.

    Until the rename the old file, if there is one, stays as it was; a failure leaves no temporary file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The leading dot and the ending keep a file left by kill -9 out of every *.bin or *.json pattern.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()
    try:
        with open(temporary, "wb") as f:
            for piece in pieces:
                f.write(piece)
                digest.update(piece)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        if problem.errno in FULL_DISK:
            fail(f"the disk of {path.parent} is full while writing {path.name}; free some space and run again")
        fail(f"cannot write {path} ({problem.strerror}); check the folder and its permissions")
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()


def remove_leftovers(folder: str | Path) -> None:
    """Deletes the temporary files and folders that a killed run left in a folder."""
    for path in Path(folder).glob(".*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            continue
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keeps every other process out of a dataset directory: for `with`, and at the latest until this process ends.

    The folder is made if it does not exist, and goes if an error leaves nothing in it. Otherwise its file .lock stays,
    as deleting it would let two processes in.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    path = folder / ".lock"
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in (errno.EACCES, errno.EAGAIN):
                fail(f"another process is writing to {folder}; wait until it ends, or name another folder")
            print(f"{folder} is not locked ({problem.strerror}); let no second process write there")
        try:
            yield
        except BaseException:
            if is_new and list(folder.iterdir()) == [path]:
                path.unlink()
                folder.rmdir()
            raise


def replace_folder(new: Path, target: Path) -> None:
    """Puts a folder in the place of another one, which is deleted. dataset.json must not list either meanwhile."""
    old = target.with_name(f".{target.name}.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()


def write_json(path: str | Path, value: Any) -> str:
    """Writes JSON atomically; returns the hex sha256 of the file."""
    return write_atomic(path, [json_bytes(value)])


def read_json(path: str | Path) -> Any:
    """Reads a JSON file; a missing or broken one ends the script."""
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        fail(f"{path} does not exist; check the path")
    except (ValueError, OSError, RecursionError) as problem:
        fail(f"{path} is not a readable JSON file ({problem}); restore or delete it")


def is_count(value: Any, least: int = 0) -> bool:
    """True for a whole number from `least` up to what 64 bits hold; JSON's true is none."""
    return type(value) is int and least <= value < 2**63


def entry_of(path: str | Path, sha256: str) -> dict[str, Any]:
    """What dataset.json says about every file: its size in bytes and its sha256."""
    return {"bytes": os.path.getsize(path), "sha256": sha256}


# ==== shards


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
    again = "write or download it again"
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as f:
            raw = f.read(HEADER_BYTES)
    except OSError as problem:
        fail(f"cannot read shard {path} ({problem.strerror}); check the path")
    if len(raw) < HEADER_BYTES:
        fail(f"shard {path} is truncated: expected a header of {HEADER_BYTES} bytes, found {size}; {again}")
    header = np.frombuffer(raw, dtype="<i4")
    magic, version, count = map(int, header[:3])
    if magic != MAGIC or version != VERSION:
        fail(f"{path} is not a token shard: expected magic {MAGIC} version {VERSION}, found {magic} {version}; {again}")
    if count <= 0:
        fail(f"shard {path} states {count} tokens, expected at least 1; {again}")
    expected = HEADER_BYTES + 2 * count
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        fail(f"shard {path} is {kind}: expected {expected} bytes for {count} tokens, found {size}; {again}")
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
    stated = header["payload_sha256"]
    if verify and stated:
        found = hashlib.sha256(tokens.data).hexdigest()
        if found != stated:
            fail(f"shard {path} is damaged: expected token sha256 {stated}, found {found}; write or download it again")
    return tokens


def read_documents(paths: Iterable[Path], bos_id: int) -> Iterator[bytes]:
    """The bytes of each document's tokens, from its BOS to the next."""
    for path in paths:
        tokens = read_shard(path)
        starts = np.flatnonzero(tokens == bos_id).tolist()
        for start, end in itertools.pairwise([*starts, len(tokens)]):
            yield tokens[start:end].tobytes()


def count_shared(train: Iterable[Path], val: Iterable[Path], bos_id: int) -> int:
    """How many documents of the validation shards are also in a training shard, token for token."""
    held_out = Counter(read_documents(val, bos_id))
    seen = {document for document in read_documents(train, bos_id) if document in held_out}
    return sum(held_out[document] for document in seen)


# ==== dataset.json


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
    if not path.exists():
        fail(f"{folder} holds no dataset.json, so it is not a complete dataset; build it with data/pretrain.py")
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
        if problem := entry_problem(name, entry):
            fail(f"{path} lists the file {name!r} {problem}; build the dataset again")
    problem = splits_problem(value) or vocabulary_problem(value) or fingerprint_problem(value)
    if problem:
        fail(f"{path} does not agree with itself: {problem}; build the dataset again")
    return value


def entry_problem(name: str, entry: Any) -> str | None:
    """What is wrong with a file that dataset.json lists."""
    # The names come from outside when a dataset is downloaded: none may point out of the folder.
    if not LISTED_NAME.fullmatch(name):
        return "with a bad path"
    sha256 = entry.get("sha256") if isinstance(entry, dict) else None
    if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
        return "without its sha256"
    needed = ("tokens", "documents", "text_bytes") if name.startswith("pretrain/") else ()
    # Datasets of earlier versions state no "bytes".
    for key in ("bytes", "tokens", "documents", "text_bytes"):
        if (key in needed or key in entry) and not is_count(entry.get(key)):
            return f"with {key} that are no whole number"
    return None


def splits_problem(value: dict[str, Any]) -> str | None:
    """Both splits need tokens and text, as rates per byte divide by them; what is stated is the sum of the files."""
    stated = value.get("splits", {})
    if not isinstance(stated, dict):
        return "it has no table of splits"
    for split, total in sum_splits(value["files"]).items():
        # Datasets made by hand state none.
        if split in stated and stated[split] != total:
            return f"its split {split!r} is not the sum of its files"
        for key in ("tokens", "text_bytes"):
            if not total[key]:
                return f"there are no {key} of the split {split!r}"
    return None


def vocabulary_problem(value: dict[str, Any]) -> str | None:
    """The vocabulary ends with the special tokens, as that of every tokenizer.json does."""
    # Datasets made by hand state none.
    if "special_tokens" not in value:
        return None
    special = value["special_tokens"]
    ids = list(special.values()) if isinstance(special, dict) else []
    known = bool(ids) and all(map(is_count, ids))
    if not known or value.get("vocab_size") != max(ids) + 1 or value.get("bos_id") not in ids:
        return "its vocab_size or bos_id does not belong to its special_tokens"
    return None


def fingerprint_problem(value: dict[str, Any]) -> str | None:
    """The fingerprints are those of the listed files, and the tokenizer is one and the same."""
    files = value["files"]
    stated = value.get("tokenizer_sha256")
    listed = files.get("tokenizer.json", {"sha256": stated})["sha256"]
    if not isinstance(stated, str) or stated != listed:
        return "its tokenizer_sha256 is not that of its tokenizer.json"
    if value.get("fingerprint") != fingerprint(files):
        return "its fingerprint is not that of its files"
    for name in FOLDERS[1:]:
        notes = value.get(name, {})
        right = fingerprint(files, name)
        # Datasets of earlier versions state none for these.
        if not isinstance(notes, dict) or notes.get("fingerprint", right) != right:
            return f"the fingerprint of {name}/ is not that of its files"
    return None


# ==== python data/format.py check


def problem_of(action: Callable, *args: Any) -> str | None:
    """The sentence with which an action ends the script, or None."""
    try:
        action(*args)
    except SystemExit as end:
        return str(end.code).removeprefix("error: ")
    return None


def find_problems(folder: Path) -> list[str]:
    """All that is wrong with a dataset directory, from reading every file that dataset.json lists."""
    # It imports this module.
    import tokenizer

    if problem := problem_of(read_dataset, folder):
        return [problem]
    dataset = read_dataset(folder)
    files = dataset["files"]
    problems = [problem for name in files if (problem := file_problem(folder, name, files[name]))]
    listed = {folder / name for name in files}
    for path in sorted(folder.glob("*/*.bin")):
        if path not in listed and path.parent.name in FOLDERS:
            problems.append(f"{path} is not listed in dataset.json; remove it")
    if problems:
        return problems

    path = folder / "tokenizer.json"
    if problem := problem_of(tokenizer.load, path):
        return [problem]
    encoding = tokenizer.load(path)
    found = {
        "vocab_size": encoding.n_vocab,
        "bos_id": tokenizer.bos_id(encoding),
        "special_tokens": tokenizer.special_tokens(encoding),
    }
    for key, value in found.items():
        # Datasets made by hand state none.
        if dataset.get(key, value) != value:
            problems.append(f"{folder}/dataset.json has another {key} than {path}; build the dataset again")
    lengths = tokenizer.token_bytes(path)
    shards = [name for name in files if name.endswith(".bin")]
    for name in shards:
        problems += shard_problems(folder, name, dataset, found["bos_id"], lengths)
    return problems


def file_problem(folder: Path, name: str, entry: dict[str, Any]) -> str | None:
    """Whether a listed file is there, with its size and its sha256."""
    path = folder / name
    if not path.is_file():
        return f"{path} is missing, but dataset.json lists it; restore it or build the dataset again"
    if name.endswith(".bin") and (problem := problem_of(read_header, path)):
        return problem
    found = sha256_file(path)
    if found != entry["sha256"]:
        return f"{path} was changed: its sha256 is {found}, dataset.json lists {entry['sha256']}; restore it"
    if path.stat().st_size != entry.get("bytes", path.stat().st_size):
        return f"{path} does not have the {entry['bytes']:,} bytes that dataset.json lists; build the dataset again"
    return None


def shard_problems(
    folder: Path, name: str, dataset: dict[str, Any], bos: int, lengths: np.ndarray
) -> Iterator[str]:
    """What is wrong inside a shard whose sha256 is right: its header, its tokens, or what dataset.json says of them."""
    path = folder / name
    again = "make it again with the tokenizer of the dataset"
    if problem := problem_of(read_shard, path, True):
        yield problem
        return
    header = read_header(path)
    if header["tokenizer_sha256"] not in ("", dataset["tokenizer_sha256"]):
        yield f"{path} was made with another tokenizer (sha256 {header['tokenizer_sha256']}); {again}"
    if name.endswith(".mask.bin"):
        mask, tokens = read_shard(path), read_shard(path.with_name(f"{path.name[:-9]}.bin"))
        if len(mask) != len(tokens) or mask.max() > 1:
            yield f"{path} is not a mask of the shard beside it; run data/sft.py again"
        return

    if header["bos_id"] not in (None, bos) or header["vocab_size"] not in (0, len(lengths)):
        stated = f"BOS {header['bos_id']}, {header['vocab_size']} entries"
        yield f"{path} states another vocabulary ({stated}) than tokenizer.json; {again}"
    counts = count_tokens(read_shard(path), len(lengths))
    if len(counts) > len(lengths):
        yield f"{path} holds token {len(counts) - 1}, but tokenizer.json has {len(lengths)} entries; {again}"
        return
    if not counts[bos]:
        yield f"{path} holds no BOS {bos}, with which every document begins; {again}"
    found = {"tokens": int(counts.sum()), "documents": int(counts[bos])}
    found["text_bytes"] = int(counts @ lengths)
    for key, value in found.items():
        if dataset["files"][name].get(key, value) != value:
            listed = dataset["files"][name][key]
            yield f"{path} holds {value:,} {key}, dataset.json lists {listed:,}; build the dataset again"


def count_tokens(tokens: np.ndarray, entries: int) -> np.ndarray:
    """int64: how often each token occurs; longer than `entries` if a larger token does."""
    counts = np.zeros(max(entries, int(tokens.max()) + 1), dtype=np.int64)
    # A piece at a time, as bincount widens to int64.
    for start in range(0, len(tokens), 2**24):
        counts += np.bincount(tokens[start : start + 2**24], minlength=len(counts))
    return counts


def split_paths(folder: Path, dataset: dict[str, Any], prefix: str) -> list[Path]:
    """The shards of a split, such as "pretrain/train_", without masks."""
    names = [name for name in dataset["files"] if name.startswith(prefix)]
    return [folder / name for name in names if not name.endswith(".mask.bin")]


def tell_shared(folder: Path, bos_id: int, kind: str = "pretrain") -> str:
    """How many documents of the validation split are also in the training split, as a sentence; "" if none is."""
    dataset = read_dataset(folder)
    what = "conversations" if kind == "sft" else "documents"
    val = split_paths(folder, dataset, f"{kind}/val_")
    total = sum(dataset["files"][f"{kind}/{path.name}"][what] for path in val)
    shared = count_shared(split_paths(folder, dataset, f"{kind}/train_"), val, bos_id)
    if not shared:
        return ""
    return f"{shared:,} of {total:,} {what} of the validation split are also in the training split"


def main() -> None:
    parser = argparse.ArgumentParser(description="Check a dataset directory.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("check", help="read every file of a dataset, and print what is wrong")
    p.add_argument("data", metavar="DIR", type=Path, help="dataset directory")
    args = parser.parse_args()
    problems = find_problems(args.data)
    for problem in problems:
        print(problem)
    if problems:
        raise SystemExit(1)
    # It imports this module.
    import tokenizer

    dataset = read_dataset(args.data)
    print(f"{args.data} is whole: {len(dataset['files'])} files, fingerprint {dataset['fingerprint'][:12]}")
    bos = tokenizer.bos_id(tokenizer.load(args.data / "tokenizer.json"))
    for kind in ("pretrain", "sft"):
        if split_paths(args.data, dataset, f"{kind}/") and (line := tell_shared(args.data, bos, kind)):
            print(line)


if __name__ == "__main__":
    run(main)
