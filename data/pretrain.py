"""Text to a dataset directory in one command: trains a tokenizer, encodes in parallel, writes token shards.

    python data/pretrain.py --source stdlib --vocab-size 4096 --out data/shards/stdlib
    python data/pretrain.py --source pypi:p34 --out data/shards/p34
    python data/pretrain.py --source climbmix --out data/shards/climbmix
    python data/pretrain.py --source "text/*.jsonl.zst" --val-source val.jsonl --out data/shards/mine
    python data/pretrain.py --source "shards:hosted/*.bin" --tokenizer gpt2.json --out data/shards/fineweb

Every document starts with BOS and lies whole in one shard. progress.json records each finished shard: the
same command continues after the last one and gives the bytes that an uninterrupted run gives. dataset.json
comes last. A second process that would write to the same directory meanwhile is refused.
"""

import argparse
import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import pypi
import tokenizer
from format import (
    LISTED_NAME,
    SHA256,
    entry_of,
    fail,
    is_count,
    lock_folder,
    read_dataset,
    read_header,
    read_json,
    read_shard,
    remove_leftovers,
    run,
    sha256_file,
    write_atomic,
    write_dataset,
    write_json,
    write_shard,
)
from sources import (
    Source,
    add_source_flags,
    check_positive,
    identify,
    local_paths,
    open_source,
)
from tqdm import tqdm

BATCH_CHARS = (
    500_000  # text given to a worker at once: large enough to hide the hand-over, small in memory
)
SHARD_TOKENS = 100_000_000
MAX_WORKERS = 256
# Flags that make another dataset than the lock of data/pypi.py states, unless they have these values.
LOCKED_FLAGS = {
    **dict.fromkeys(("max_documents", "max_bytes", "val_source", "val_documents")),
    **dict.fromkeys(("tokenizer", "vocab_size")),
    "tokenizer_chars": tokenizer.MAX_CHARS,
    "shard_tokens": SHARD_TOKENS,
}


# --- encoding ---------------------------------------------------------------------------------------------

worker_encoding = None  # the tokenizer of a worker process


def start_worker(tokenizer_path: str) -> None:
    """Loads the tokenizer once in each worker."""
    global worker_encoding
    worker_encoding = tokenizer.load(tokenizer_path)
    parent = parent_process()
    if parent is not None:
        # A parent that was killed cannot stop its workers, and they would wait for work forever.
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_batch(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encodes documents: (tokens uint16 [n], tokens of each and text bytes of each, int64 [documents])."""
    bos = np.array([tokenizer.bos_id(worker_encoding)], dtype=np.uint16)
    pieces, lengths, sizes = [], [], []
    for text in texts:
        tokens = tokenizer.encode(worker_encoding, text)
        pieces += [bos, tokens]
        lengths.append(len(tokens) + 1)
        sizes.append(len(text.encode()))
    return (
        np.concatenate(pieces),
        np.array(lengths, dtype=np.int64),
        np.array(sizes, dtype=np.int64),
    )


def make_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups of about BATCH_CHARS characters."""
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(
    documents: Iterable[str], pool: ProcessPoolExecutor | None, workers: int
) -> Iterator[tuple]:
    """encode_batch over a stream, results in the stream's order; at most 3 batches a worker are under way, so
    memory does not grow with the corpus."""
    if pool is None:
        yield from map(encode_batch, make_batches(documents))
        return
    waiting: deque = deque()
    for batch in make_batches(documents):
        waiting.append(pool.submit(encode_batch, batch))
        if len(waiting) >= 3 * workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def write_split(
    out: Path,
    split: str,
    documents: Iterable[str],
    encode: Any,
    progress: dict[str, Any],
    tokenizer_sha256: str,
    encoding: Any,
    shard_tokens: int,
) -> None:
    """Encodes one split into shards, after those that progress lists; updates progress.json at each shard.

    A shard closes before the document that would take it over shard_tokens; only a document that is larger
    than that on its own makes a larger shard.
    """
    done = progress["shards"][split]
    already = sum(entry["documents"] for entry in done)
    buffer = np.empty(shard_tokens, dtype=np.uint16)
    held = {"tokens": 0, "documents": 0, "text_bytes": 0}
    bar = tqdm(unit="B", unit_scale=True, desc=split, disable=None, mininterval=1)

    def close() -> None:
        path = f"pretrain/{split}_{len(done):06d}.bin"
        sha = write_shard(
            out / path,
            buffer[: held["tokens"]],
            tokenizer.bos_id(encoding),
            encoding.n_vocab,
            tokenizer_sha256,
        )
        done.append({"path": path, **held, "sha256": sha})
        write_json(out / "progress.json", progress)
        bar.write(
            f"wrote {path}: {held['tokens']:,} tokens, {held['documents']:,} documents",
            file=sys.stdout,
        )
        held.update(tokens=0, documents=0, text_bytes=0)

    for tokens, lengths, sizes in encode(islice(documents, already, None)):
        ends = np.cumsum(lengths)
        first = 0  # first document of the batch that is not in the buffer yet
        while first < len(lengths):
            begin = int(ends[first] - lengths[first])
            room = shard_tokens - held["tokens"]
            last = int(
                np.searchsorted(ends, begin + room, side="right")
            )  # documents first..last-1 fit
            if last <= first:  # below it after a document that was larger than a shard
                if held["tokens"]:
                    close()
                    continue
                last = first + 1
                if lengths[first] > len(buffer):
                    buffer = np.empty(int(lengths[first]), dtype=np.uint16)
            part = tokens[begin : int(ends[last - 1])]
            buffer[held["tokens"] : held["tokens"] + len(part)] = part
            held["tokens"] += len(part)
            held["documents"] += last - first
            held["text_bytes"] += int(sizes[first:last].sum())
            first = last
        bar.update(int(sizes.sum()))
    if held["tokens"]:
        close()
    bar.close()
    progress["complete"].append(split)
    write_json(out / "progress.json", progress)


# --- the dataset directory --------------------------------------------------------------------------------


def compare_settings(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """progress.json of an earlier run of the same command, or None in a fresh directory; else an error."""
    path = out / "progress.json"
    if not path.exists():
        if (out / "dataset.json").exists() or any((out / "pretrain").glob("*.bin")):
            fail(
                f"{out} already holds a dataset that this command did not write; choose another --out"
            )
        return None
    progress = read_json(path)
    check_progress(progress, path)
    if not progress.get("tokenizer_sha256") and not (out / "tokenizer.json").exists():
        return None  # stopped before anything was made, for example as the text was too small for the tokenizer
    old = progress.get("settings", {})
    for key in settings:
        if old.get(key) != settings[key]:
            name = (
                f"--{key.replace('_', '-')}"
                if key != "inputs"
                else "the source files (names, sizes or content)"
            )
            was = (
                f" {old.get(key)!r} before and {settings[key]!r} now"
                if key != "inputs"
                else " not as before"
            )
            fail(
                f"{out} was built with other settings: {name} is{was}; choose another --out or delete that "
                f"folder"
            )
    return progress


def check_progress(progress: Any, path: Path) -> None:
    """Ends the script if progress.json is not what write_split left there."""
    shards = progress.get("shards") if isinstance(progress, dict) else None
    valid = isinstance(shards, dict) and isinstance(progress.get("settings"), dict)
    valid = valid and isinstance(progress.get("complete", []), list)
    for split in ("train", "val"):
        entries = shards.get(split) if valid else None
        valid = isinstance(entries, list) and all(map(is_shard_entry, entries))
    sha256 = progress.get("tokenizer_sha256") if valid else None
    if not valid or not (sha256 is None or isinstance(sha256, str)):
        fail(f"{path} is damaged; delete {path.parent} and run again")


def is_shard_entry(entry: Any) -> bool:
    """True for a shard's entry in progress.json."""
    if not isinstance(entry, dict):
        return False
    texts = [entry.get("path"), entry.get("sha256")]
    if not all(isinstance(text, str) for text in texts):
        return False
    counts = [entry.get(key) for key in ("tokens", "documents", "text_bytes")]
    named = LISTED_NAME.fullmatch(texts[0]) and SHA256.fullmatch(texts[1])
    return bool(named) and all(map(is_count, counts))


def check_complete(out: Path, progress: dict[str, Any]) -> bool:
    """True if dataset.json is there and every shard is; a shard that vanished or shrank ends the script."""
    for entry in progress["shards"]["train"] + progress["shards"]["val"]:
        if read_header(out / entry["path"])["tokens"] != entry["tokens"]:
            fail(
                f"{out / entry['path']} does not hold the {entry['tokens']} tokens noted; delete {out} and "
                f"run again"
            )
    if not (out / "dataset.json").exists():
        return False
    read_dataset(out)
    return True


def get_tokenizer(
    out: Path, args: argparse.Namespace, source: Source | None, progress: dict[str, Any]
) -> str:
    """Puts tokenizer.json into the directory: kept, copied or trained; returns its sha256."""
    path = out / "tokenizer.json"
    noted = progress["tokenizer_sha256"]
    if path.exists():
        sha = sha256_file(path)
        if noted and sha != noted:
            fail(
                f"{path} is not the tokenizer that this dataset was begun with; delete {out} and run again"
            )
        if not noted and args.tokenizer and sha != sha256_file(args.tokenizer):
            fail(f"{path} differs from --tokenizer {args.tokenizer}; choose another --out")
    elif noted:
        fail(f"{path} is missing but shards were written with it; delete {out} and run again")
    elif args.tokenizer:
        tokenizer.read_spec(args.tokenizer)
        sha = write_atomic(path, [args.tokenizer.read_bytes()])
    else:
        start = time.perf_counter()
        # First, so that a stop from here on is recognised as this command's.
        write_json(out / "progress.json", progress)
        spec = tokenizer.train(
            (source.tokenizer_text or source.train)(),
            args.vocab_size or tokenizer.VOCAB_SIZE,
            args.tokenizer_chars,
        )
        sha = write_json(path, spec)
        print(f"trained the tokenizer in {time.perf_counter() - start:.1f} s")
    vocab_size = tokenizer.load(path).n_vocab
    if args.vocab_size and vocab_size != args.vocab_size:
        fail(
            f"{path} has {vocab_size} entries but --vocab-size is {args.vocab_size}; leave the flag out or "
            f"train anew"
        )
    progress["tokenizer_sha256"] = sha
    write_json(out / "progress.json", progress)
    return sha


def source_names(inputs: list[list[Any]]) -> list[str]:
    """What dataset.json calls the sources: file names without the folders of this computer."""
    return [f"{entry[1]} (val)" if entry[0] == "val" else entry[0] for entry in inputs]


def finish(out: Path, name: str, sources: list[str], progress: dict[str, Any]) -> None:
    """Writes dataset.json, the sign that the dataset is whole, and prints the totals."""
    encoding = tokenizer.load(out / "tokenizer.json")
    sha256 = progress["tokenizer_sha256"]
    files = {"tokenizer.json": entry_of(out / "tokenizer.json", sha256)}
    for entry in progress["shards"]["train"] + progress["shards"]["val"]:
        counts = {key: entry[key] for key in ("tokens", "documents", "text_bytes")}
        files[entry["path"]] = {**counts, **entry_of(out / entry["path"], entry["sha256"])}
    dataset = {
        "name": name,
        "sources": sources,
        "tokenizer_sha256": sha256,
        "vocab_size": encoding.n_vocab,
        "bos_id": tokenizer.bos_id(encoding),
        "special_tokens": tokenizer.special_tokens(encoding),
        "files": files,
    }
    write_dataset(out, dataset)
    for split, total in read_dataset(out)["splits"].items():
        print(
            f"{split}: {total['documents']:,} documents, {total['tokens']:,} tokens, {total['text_bytes']:,} "
            f"bytes of text ({total['text_bytes'] / total['tokens']:.3f} bytes per token)"
        )
    print(f"wrote {out / 'dataset.json'}")


def build(args: argparse.Namespace) -> None:
    """The main path: text to shards."""
    out = args.out
    source = open_source(
        args.source,
        args.val_source,
        args.text_field,
        args.val_fraction,
        args.max_files,
        args.max_documents,
        args.max_bytes,
        args.val_documents,
        args.workers,
        args.interleave,
    )
    settings = {
        "inputs": source.inputs,
        "name": args.name,
        "text_field": args.text_field,
        "val_fraction": args.val_fraction,
        "val_documents": args.val_documents,
        "max_documents": args.max_documents,
        "max_bytes": args.max_bytes,
        "interleave": args.interleave or None,  # None in directories from before the flag
        "shard_tokens": args.shard_tokens,
        "vocab_size": args.vocab_size,
        "tokenizer_chars": args.tokenizer_chars,
        "tokenizer": sha256_file(args.tokenizer) if args.tokenizer else None,
    }
    progress = compare_settings(out, settings)
    if progress and check_complete(out, progress):
        if args.source.startswith("pypi:"):
            pypi.compare_build(args, LOCKED_FLAGS)
        print(f"{out} is already complete")
        return
    if progress is None:
        # Before anything is made: both splits need a document.
        for split, documents in (("train", source.train), ("val", source.val)):
            if next(documents(), None) is None:
                fail(
                    f"the source gives no {split} document with text in it; give at least two documents, or "
                    "--val-source for separate validation text"
                )
        progress = {
            "settings": settings,
            "tokenizer_sha256": None,
            "shards": {"train": [], "val": []},
            "complete": [],
        }
    for folder in (out, out / "pretrain"):
        remove_leftovers(folder)
    sha = get_tokenizer(out, args, source, progress)
    encoding = tokenizer.load(out / "tokenizer.json")
    # spawn, as forking a process with threads (the tokenizer trainer's, Arrow's) can deadlock.
    pool = None
    if args.workers > 1:
        path = str(out / "tokenizer.json")
        pool = ProcessPoolExecutor(args.workers, get_context("spawn"), start_worker, (path,))
    else:
        start_worker(str(out / "tokenizer.json"))
    try:
        start = time.perf_counter()
        for split, documents in (("val", source.val), ("train", source.train)):
            if split not in progress["complete"]:
                write_split(
                    out,
                    split,
                    documents(),
                    lambda docs: encode_all(docs, pool, args.workers),
                    progress,
                    sha,
                    encoding,
                    args.shard_tokens,
                )
        seconds = time.perf_counter() - start
    except BrokenProcessPool:
        fail(
            "an encoding process was killed, most likely as memory ran out; repeat the command with fewer --workers"
        )
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    empty = sum(source.empty.values())
    if empty:
        print(f"skipped {empty:,} empty documents")
    finish(out, args.name, source_names(source.inputs), progress)
    if args.source.startswith("pypi:"):
        pypi.compare_build(args, LOCKED_FLAGS)
    print(f"encoded in {seconds:.1f} s with {args.workers} workers")


# --- hosted shards ----------------------------------------------------------------------------------------


def adopt(args: argparse.Namespace) -> None:
    """Makes a dataset directory of shards that others tokenized: checks, links or copies, and counts them."""
    out = args.out
    spec = args.source.removeprefix("shards:")
    if args.interleave:
        fail("--interleave is for text, --source shards: names shards; leave it out")
    if not args.tokenizer:
        fail(
            "--source shards: needs --tokenizer, the tokenizer.json the shards were made with; for GPT-2's "
            "vocabulary "
            "make it with data/tokenizer.py gpt2"
        )
    if Path(spec).is_dir():
        spec = str(Path(spec) / "*.bin")
    paths = local_paths(spec, (".bin",))
    by_split = sort_hosted(paths, spec)
    lengths = tokenizer.token_bytes(args.tokenizer)
    encoding = tokenizer.load(args.tokenizer)
    bos = tokenizer.bos_id(encoding)
    sha = sha256_file(args.tokenizer)
    inputs = [identify(path) for path in paths]
    settings = {"inputs": inputs, "name": args.name, "tokenizer": sha, "hosted_shards": True}
    progress = compare_settings(out, settings)
    if progress and check_complete(out, progress):
        print(f"{out} is already complete")
        return
    # Everything is checked before the first file is made, so that a wrong set leaves nothing behind.
    for path in paths:
        header = read_header(path)
        if header["tokenizer_sha256"] not in ("", sha):
            fail(
                f"{path} was made with another tokenizer (sha256 {header['tokenizer_sha256']}, given "
                f"{sha}); give that one"
            )
        tokens = read_shard(path)
        largest = int(tokens.max())
        if largest >= len(lengths):
            fail(
                f"{path} holds token {largest} but {args.tokenizer} has {len(lengths)} entries; give the "
                f"tokenizer it was "
                "made with"
            )
        # A piece at a time, as the comparison makes a copy.
        pieces = (tokens[start : start + 2**24] for start in range(0, len(tokens), 2**24))
        others = header["bos_id"] not in (None, bos) or header["vocab_size"] not in (
            0,
            len(lengths),
        )
        if others or not any(bos in piece for piece in pieces):
            fail(
                f"{path} holds no BOS {bos} of {args.tokenizer}, or states another vocabulary (BOS "
                f"{header['bos_id']}, {header['vocab_size']} entries); give the tokenizer it was made with"
            )
    progress = {
        "settings": settings,
        "tokenizer_sha256": None,
        "shards": {"train": [], "val": []},
        "complete": [],
    }
    get_tokenizer(out, args, None, progress)
    for split, found in by_split.items():
        for i, path in enumerate(tqdm(found, desc=split, disable=None)):
            tokens = read_shard(path, verify=True)
            counts = np.zeros(len(lengths), dtype=np.int64)
            for start in range(
                0, len(tokens), 2**24
            ):  # bincount widens to int64: a piece at a time
                counts += np.bincount(tokens[start : start + 2**24], minlength=len(lengths))
            name = f"pretrain/{split}_{i:06d}.bin"
            link_or_copy(path, out / name)
            entry = {
                "path": name,
                "tokens": len(tokens),
                "documents": int(counts[bos]),
                "text_bytes": int(counts @ lengths),
                "sha256": sha256_file(out / name),
            }
            progress["shards"][split].append(entry)
        if not sum(entry["text_bytes"] for entry in progress["shards"][split]):
            fail(f"the {split} shards of {spec} hold no text, only special tokens; give others")
    write_json(out / "progress.json", progress)
    finish(out, args.name, source_names(inputs), progress)


def sort_hosted(paths: list[Path], spec: str) -> dict[str, list[Path]]:
    """The shards of each split, by a whole word of their names: "retrieval_train_01" is training."""
    by_split: dict[str, list[Path]] = {"train": [], "val": []}
    for path in paths:
        words = re.findall("[a-z]+", path.stem.lower())
        found = [split for split in by_split if split in words]
        if len(found) == 2:
            fail(f"{path} has both 'train' and 'val' in its name; name it *_train_* or *_val_*")
        if found:
            by_split[found[0]].append(path)
        else:
            print(f"left out {path.name}: its name says neither train nor val")
    for split, found in by_split.items():
        if not found:
            fail(
                f"none of the {len(paths)} files of {spec} has the word {split!r} in its name; name the "
                f"shards *_train_* and *_val_*"
            )
    return by_split


def link_or_copy(path: Path, target: Path) -> None:
    """A hard link costs no space; across file systems it is a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        os.replace(temporary, target)
    except OSError as problem:
        fail(
            f"cannot link or copy {path} to {target} ({problem.strerror}); free some space and run again"
        )
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Text to a dataset directory of token shards.")
    add_source_flags(parser)
    parser.add_argument(
        "--val-source", help="separate validation text; without it a part of the source is held out"
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.01,
        help="held-out part of local files: 1 document in round(1 / F)",
    )
    parser.add_argument("--val-documents", type=int, help="at most this many validation documents")
    parser.add_argument(
        "--out", required=True, type=Path, help="dataset directory, e.g. data/shards/mine"
    )
    parser.add_argument("--name", help="name in dataset.json (default: that of the directory)")
    parser.add_argument(
        "--vocab-size",
        type=int,
        help=f"entries of a new tokenizer (default {tokenizer.VOCAB_SIZE})",
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="use this tokenizer.json instead of training one"
    )
    parser.add_argument(
        "--tokenizer-chars", type=int, default=tokenizer.MAX_CHARS, help="characters to train it on"
    )
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens in a shard")
    parser.add_argument(
        "--workers",
        type=int,
        default=available_cores(),
        help="encoding processes (default: all cores, up to 16)",
    )
    args = parser.parse_args()
    args.name = args.name or args.out.resolve().name
    check_positive(args, "shard_tokens", "workers", "val_documents", "tokenizer_chars")
    if args.workers > MAX_WORKERS:
        fail(
            f"--workers must be at most {MAX_WORKERS}, found {args.workers}; give one for each core"
        )
    if args.shard_tokens >= 2**31:
        fail(
            f"--shard-tokens {args.shard_tokens} does not fit the header's int32; give less than {2**31}"
        )
    if args.vocab_size:
        tokenizer.check_vocab_size(args.vocab_size)
    if args.tokenizer and not os.path.isfile(args.tokenizer):
        fail(
            f"--tokenizer {args.tokenizer} does not exist; give a tokenizer.json or leave it out to train one"
        )
    # From here on: reading the source alone may take minutes, and a second process should not learn it after them.
    with lock_folder(args.out):
        if args.source.startswith("shards:"):
            adopt(args)
        else:
            build(args)


def available_cores() -> int:
    """Cores this process may use, at most 16: one reader feeds no more, and each encoder takes 0.1 GiB."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, 16)


if __name__ == "__main__":
    run(main)
