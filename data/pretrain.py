"""Turns text into a dataset directory: trains a tokenizer, encodes in threads, writes token shards.

    python data/pretrain.py --source stdlib --vocab-size 4096 --out data/shards/stdlib
    python data/pretrain.py --source pypi:p34 --out data/shards/p34
    python data/pretrain.py --source climbmix --out data/shards/climbmix
    python data/pretrain.py --source climbmix --pattern qwen2 --out data/shards/climbmix_q2
    python data/pretrain.py --source "text/*.jsonl.zst" --val-source val.jsonl --out data/shards/mine
    python data/pretrain.py --source "shards:hosted/*.bin" --tokenizer gpt2.json --out data/shards/fineweb

Every document starts with BOS and is never split across shards. progress.json records each finished shard: the same
command continues after the last one, with the same bytes as an uninterrupted run. If a source file was corrected in
between, the tokenizer and the shards up to the first changed text are kept. dataset.json comes last. A second process
that writes to the same directory is refused.
"""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pypi
import tokenizer
from dataset import (
    count_shard,
    entry_of,
    fail,
    is_right,
    lock_folder,
    read_dataset,
    read_documents,
    read_header,
    read_json,
    remove_leftovers,
    run,
    sha256_file,
    tell_shared,
    write_atomic,
    write_dataset,
    write_json,
    write_shard,
)
from sources import (
    Source,
    TextSettings,
    add_source_flags,
    check_flags,
    identify,
    in_threads,
    local_paths,
    open_text,
)
from tqdm import tqdm

BATCH_CHARS = 500_000  # of text given to a thread at once
SHARD_TOKENS = 100_000_000
# Flags that must have these values for the dataset that data/pypi.py locks.
LOCKED_FLAGS = {
    **dict.fromkeys(("max_documents", "max_bytes", "val_source", "val_documents")),
    **dict.fromkeys(("tokenizer", "vocab_size", "pattern")),
    "tokenizer_chars": tokenizer.MAX_CHARS,
    "shard_tokens": SHARD_TOKENS,
}


# ==== encoding


class Encoder:
    """Encodes documents in threads: the tokenizer runs without Python's lock."""

    def __init__(self, tokenizer_path: Path, workers: int):
        self.encoding = tokenizer.load(tokenizer_path)
        self.bos_id = tokenizer.bos_id(self.encoding)
        self.workers = workers
        # For the headers of shards.
        self.stated = {
            "bos_id": self.bos_id,
            "vocab_size": self.encoding.n_vocab,
            "tokenizer_sha256": sha256_file(tokenizer_path),
        }

    def encode(self, documents: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
        """(tokens uint16 [n] from BOS on, bytes of text) of each document, in the stream's order."""
        batches = make_batches(documents)
        for batch in in_threads(self.encode_batch, batches, self.workers, 3 * self.workers):
            yield from batch

    def encode_batch(self, texts: list[str]) -> list[tuple[np.ndarray, int]]:
        bos = np.array([self.bos_id], dtype=np.uint16)
        encode = lambda text: np.concatenate((bos, tokenizer.encode(self.encoding, text)))
        return [(encode(text), len(text.encode())) for text in texts]


def make_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups of about BATCH_CHARS characters."""
    batch = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


# ==== shards


@dataclass
class ShardWriter:
    """Puts encoded documents into the shards of a split, after those that progress lists.

    A shard closes before a document that would exceed shard_tokens; only a single larger document makes a larger
    shard. progress.json is updated after each shard.
    """

    out: Path
    split: str
    encoder: Encoder
    progress: dict[str, Any]
    shard_tokens: int
    tokens: int = 0  # in the buffer, like the next two
    documents: int = 0
    text_bytes: int = 0
    buffer: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = np.empty(self.shard_tokens, dtype=np.uint16)

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """A document."""
        if self.tokens + len(tokens) > self.shard_tokens:
            self.close()
        if len(tokens) > len(self.buffer):
            self.buffer = np.empty(len(tokens), dtype=np.uint16)
        self.buffer[self.tokens : self.tokens + len(tokens)] = tokens
        self.tokens += len(tokens)
        self.documents += 1
        self.text_bytes += text_bytes

    def close(self) -> None:
        """Writes what is in the buffer, if anything is."""
        if not self.tokens:
            return
        done = self.progress["shards"][self.split]
        path = f"pretrain/{self.split}_{len(done):06d}.bin"
        content = self.buffer[: self.tokens]
        sha = write_shard(self.out / path, content, **self.encoder.stated)
        counts = {key: getattr(self, key) for key in ("tokens", "documents", "text_bytes")}
        done.append({"path": path, **counts, "sha256": sha})
        write_json(self.out / "progress.json", self.progress)
        line = f"wrote {path}: {self.tokens:,} tokens, {self.documents:,} documents"
        tqdm.write(line, file=sys.stdout)
        self.tokens = self.documents = self.text_bytes = 0


def write_split(writer: ShardWriter, documents: Iterable[str]) -> None:
    """Encodes the documents of a split that are not in a shard yet."""
    progress = writer.progress
    split = writer.split
    already = sum(entry["documents"] for entry in progress["shards"][split])
    with tqdm(unit="B", unit_scale=True, desc=split, disable=None, mininterval=1) as bar:
        for tokens, text_bytes in writer.encoder.encode(islice(documents, already, None)):
            writer.add(tokens, text_bytes)
            bar.update(text_bytes)
        writer.close()
    progress["complete"].append(split)
    write_json(writer.out / "progress.json", progress)


def keep_matching(out: Path, source: Source, progress: dict[str, Any], encoder: Encoder) -> None:
    """After the source has changed, keeps the first shards whose documents are still the same."""
    for split, documents in (("val", source.val()), ("train", source.train())):
        entries = progress["shards"][split]
        kept = 0
        while kept < len(entries) and is_same(out / entries[kept]["path"], documents, encoder):
            kept += 1
        # The last shard of a complete split may have room for the documents that follow now.
        if kept and split in progress["complete"] and next(documents, None) is not None:
            kept -= 1
        print(f"the source has changed: {kept} of {len(entries)} {split} shards still hold its text")
        progress["shards"][split] = entries[:kept]
        for entry in entries[kept:]:
            (out / entry["path"]).unlink(missing_ok=True)
    progress["complete"] = []
    write_json(out / "progress.json", progress)


def is_same(path: Path, documents: Iterator[str], encoder: Encoder) -> bool:
    """Whether a shard holds the next documents, which it takes."""
    for found in read_documents([path], encoder.bos_id):
        tokens = np.frombuffer(found, dtype="<u2")[1:].tolist()
        text = next(documents, None)
        if text is None or encoder.encoding.decode_bytes(tokens) != text.encode():
            return False
    return True


# ==== the dataset directory


def read_progress(out: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """(progress.json of an earlier run with these settings, or a new one; whether the source is another one now)."""
    path = out / "progress.json"
    shards = {"train": [], "val": []}
    new = {"settings": settings, "tokenizer_sha256": None, "shards": shards, "complete": []}
    if not path.exists():
        if (out / "dataset.json").exists() or any((out / "pretrain").glob("*.bin")):
            fail(f"{out} already holds a dataset that this command did not write; choose another --out")
        return new, False
    progress = read_json(path)
    # Stopped before anything was made, for example as the text was too small for the tokenizer.
    if not progress["tokenizer_sha256"] and not (out / "tokenizer.json").exists():
        return new, False
    compare_settings(out, progress["settings"], settings)
    return progress, progress["settings"]["inputs"] != settings["inputs"]


def compare_settings(out: Path, old: dict[str, Any], settings: dict[str, Any]) -> None:
    """Ends the script if a setting differs, or the source of a complete dataset."""
    for key in settings:
        # Without --name it is that of the folder, which may be renamed.
        is_free = key == "inputs" or (key == "name" and not settings["name"])
        if not is_free and old.get(key) != settings[key]:
            flag = f"--{key.replace('_', '-')}"
            wrong = f"{out} was built with other settings: {flag} was {old.get(key)!r} before"
            fail(f"{wrong} and is {settings[key]!r} now; choose another --out or the same settings")
    if old["inputs"] != settings["inputs"] and (out / "dataset.json").exists():
        wrong = f"{out} is complete, and the source files (names, sizes or content) are not as before"
        fail(f"{wrong}; choose another --out")


def is_complete(out: Path, progress: dict[str, Any]) -> bool:
    """Whether dataset.json and every shard are there; fails if a shard vanished or shrank."""
    for entry in progress["shards"]["train"] + progress["shards"]["val"]:
        path = out / entry["path"]
        if read_header(path)["tokens"] != entry["tokens"]:
            fail(f"{path} does not hold the {entry['tokens']} tokens noted; delete {out} and run again")
    if not (out / "dataset.json").exists():
        return False
    read_dataset(out)
    return True


def get_tokenizer(
    out: Path, args: argparse.Namespace, source: Source | None, progress: dict[str, Any]
) -> None:
    """Puts tokenizer.json into the directory: kept, copied or trained."""
    path = out / "tokenizer.json"
    noted = progress["tokenizer_sha256"]
    if noted and not is_right(path, noted):
        fail(f"{path} is not the tokenizer that this dataset was begun with; delete {out} and run again")
    if args.tokenizer and not path.exists():
        tokenizer.read_spec(args.tokenizer)
        write_atomic(path, [args.tokenizer.read_bytes()])
    elif not path.exists():
        # First, so that a stop from here on is recognised as this command's.
        write_json(out / "progress.json", progress)
        start = time.perf_counter()
        documents = (source.tokenizer_text or source.train)()
        entries = args.vocab_size or tokenizer.VOCAB_SIZE
        pattern = tokenizer.PATTERNS[args.pattern or "gpt4"]
        write_json(path, tokenizer.train(documents, entries, args.tokenizer_chars, pattern=pattern))
        print(f"trained the tokenizer in {time.perf_counter() - start:.1f} s")
    sha = sha256_file(path)
    if args.tokenizer and sha != sha256_file(args.tokenizer):
        fail(f"{path} differs from --tokenizer {args.tokenizer}; choose another --out")
    found = tokenizer.describe(path)
    for key in ("vocab_size", "pattern"):
        asked = getattr(args, key)
        if asked and found[key] != asked:
            flag = f"--{key.replace('_', '-')}"
            fail(f"{path} has {flag} {found[key]}, not {asked}; leave the flag out or train anew")
    progress["tokenizer_sha256"] = sha
    write_json(out / "progress.json", progress)


def finish(out: Path, progress: dict[str, Any]) -> None:
    """Writes dataset.json, the sign that the dataset is whole, and prints the totals."""
    path = out / "tokenizer.json"
    sha256 = progress["tokenizer_sha256"]
    settings = progress["settings"]
    inputs = settings["inputs"]
    sources = [f"{entry[1]} (val)" if entry[0] == "val" else entry[0] for entry in inputs]
    files = {"tokenizer.json": entry_of(path, sha256)}
    for entry in progress["shards"]["train"] + progress["shards"]["val"]:
        counts = {key: entry[key] for key in ("tokens", "documents", "text_bytes")}
        files[entry["path"]] = {**counts, **entry_of(out / entry["path"], entry["sha256"])}
    dataset = {
        "name": settings["name"] or out.resolve().name,
        "sources": sources,
        "tokenizer_sha256": sha256,
        **tokenizer.describe(path),
        "files": files,
    }
    write_dataset(out, dataset)
    for split, total in read_dataset(out)["splits"].items():
        documents, tokens, size = (total[key] for key in ("documents", "tokens", "text_bytes"))
        rate = f"{size / tokens:.3f} bytes per token"
        print(f"{split}: {documents:,} documents, {tokens:,} tokens, {size:,} bytes of text ({rate})")
    if line := tell_shared(out, dataset["bos_id"]):
        print(f"note: {line}")
    print(f"wrote {out / 'dataset.json'}")


def build(args: argparse.Namespace) -> None:
    """The main path: text to shards."""
    out = args.out
    source = open_text(TextSettings.of(args))
    flags = ["name", "text_field", "val_fraction", "val_documents", "max_documents", "max_bytes"]
    flags += ["shard_tokens", "vocab_size", "tokenizer_chars"]
    settings = {
        "inputs": source.inputs,
        **{flag: getattr(args, flag) for flag in flags},
        # None in directories from before these flags.
        "interleave": args.interleave or None,
        "pattern": args.pattern,
        "tokenizer": sha256_file(args.tokenizer) if args.tokenizer else None,
    }
    progress, is_changed = read_progress(out, settings)
    if is_complete(out, progress):
        print(f"{out} is already complete")
    else:
        if not progress["tokenizer_sha256"]:
            for split, documents in (("train", source.train), ("val", source.val)):
                if next(documents(), None) is None:
                    way = "give at least two documents, or --val-source for separate validation text"
                    fail(f"the source gives no {split} document with text in it; {way}")
        progress["settings"]["inputs"] = settings["inputs"]
        for folder in (out, out / "pretrain"):
            remove_leftovers(folder)
        get_tokenizer(out, args, source, progress)
        write_shards(args, source, progress, is_changed)
        finish(out, progress)
    if args.source.startswith("pypi:"):
        pypi.compare_build(args, LOCKED_FLAGS)


def write_shards(
    args: argparse.Namespace, source: Source, progress: dict[str, Any], is_changed: bool
) -> None:
    """All shards that progress does not list."""
    start = time.perf_counter()
    encoder = Encoder(args.out / "tokenizer.json", args.workers)
    if is_changed:
        keep_matching(args.out, source, progress, encoder)
    for split, documents in (("val", source.val), ("train", source.train)):
        if split not in progress["complete"]:
            writer = ShardWriter(args.out, split, encoder, progress, args.shard_tokens)
            write_split(writer, documents())
    print(f"encoded in {time.perf_counter() - start:.1f} s in {args.workers} threads")
    empty = sum(source.empty.values())
    if empty:
        print(f"skipped {empty:,} empty documents")


# ==== hosted shards


def adopt(args: argparse.Namespace) -> None:
    """Makes a dataset directory from shards that others tokenized."""
    out = args.out
    spec = args.source.removeprefix("shards:")
    if args.interleave:
        fail("--interleave is for text, --source shards: names shards; leave it out")
    if not args.tokenizer:
        wrong = "--source shards: needs --tokenizer, the tokenizer.json the shards were made with"
        fail(f"{wrong}; for GPT-2's vocabulary make it with data/tokenizer.py gpt2")
    if Path(spec).is_dir():
        spec = str(Path(spec) / "*.bin")
    paths = local_paths(spec, (".bin",))
    by_split = sort_hosted(paths, spec)
    settings = {
        "inputs": [identify(path) for path in paths],
        "name": args.name,
        "tokenizer": sha256_file(args.tokenizer),
        "hosted_shards": True,
    }
    progress, _ = read_progress(out, settings)
    if is_complete(out, progress):
        print(f"{out} is already complete")
        return
    # Everything is checked before the first file is made.
    encoding, lengths = tokenizer.load(args.tokenizer), tokenizer.token_bytes(args.tokenizer)
    bos, sha = tokenizer.bos_id(encoding), settings["tokenizer"]
    counts = {path: count_shard(path, sha, bos, lengths) for path in paths}
    progress |= {"settings": settings, "shards": {"train": [], "val": []}}
    get_tokenizer(out, args, None, progress)
    for split, found in by_split.items():
        for i, path in enumerate(tqdm(found, desc=split, disable=None)):
            name = f"pretrain/{split}_{i:06d}.bin"
            link_or_copy(path, out / name)
            entry = {"path": name, **counts[path], "sha256": sha256_file(out / name)}
            progress["shards"][split].append(entry)
    write_json(out / "progress.json", progress)
    finish(out, progress)


def sort_hosted(paths: list[Path], spec: str) -> dict[str, list[Path]]:
    """The shards of each split, by a word of their names: "retrieval_train_01" is training."""
    by_split: dict[str, list[Path]] = {"train": [], "val": []}
    for path in paths:
        words = re.findall("[a-z]+", path.stem.lower())
        found = [split for split in by_split if split in words]
        if len(found) == 1:
            by_split[found[0]].append(path)
        else:
            print(f"left out {path.name}: its name must say either train or val")
    for split, found in by_split.items():
        if not found:
            wrong = f"none of the {len(paths)} files of {spec} has the word {split!r} in its name"
            fail(f"{wrong}; name the shards *_train_* and *_val_*")
    return by_split


def link_or_copy(path: Path, target: Path) -> None:
    """A hard link costs no space; across file systems it is a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, target)


def main() -> None:
    args = parse_arguments()
    # From here on: reading the source alone may take minutes.
    with lock_folder(args.out):
        if args.source.startswith("shards:"):
            adopt(args)
        else:
            build(args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Turn text, or shards:GLOB, into a dataset directory.")
    add_source_flags(parser)
    add = parser.add_argument
    add("--val-source", help="validation text (default: a part of --source)")
    held_out = "held-out part of local files: 1 document in round(1 / F)"
    add("--val-fraction", type=float, default=0.01, help=held_out)
    add("--val-documents", type=int, help="most validation documents")
    add("--out", required=True, type=Path, help="dataset directory, e.g. data/shards/mine")
    add("--name", help="name in dataset.json (default: that of the directory)")
    size = f"entries of a new tokenizer (default {tokenizer.VOCAB_SIZE})"
    add("--vocab-size", type=int, help=size)
    tokenizer.add_pattern_flag(parser)
    add("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    characters = "characters to train a new tokenizer on"
    add("--tokenizer-chars", type=int, default=tokenizer.MAX_CHARS, help=characters)
    add("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens in a shard [%(default)s]")
    threads = "encoding threads (default: all cores, up to 16)"
    add("--workers", type=int, default=available_cores(), help=threads)
    args = parser.parse_args()

    check_flags(args, shard_tokens=1, workers=1, val_documents=1, tokenizer_chars=1)
    if args.vocab_size:
        tokenizer.check_vocab_size(args.vocab_size)
    return args


def available_cores() -> int:
    """Cores this process may use, at most 16: one reader feeds no more."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), 16)
    return min(os.cpu_count() or 1, 16)


if __name__ == "__main__":
    run(main)
