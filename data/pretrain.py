"""Turns text into a dataset directory: trains a tokenizer, encodes in threads, writes token shards.

    python data/pretrain.py --source stdlib --vocab-size 4096 --out data/shards/stdlib
    python data/pretrain.py --source pypi:p34 --out data/shards/p34
    python data/pretrain.py --source climbmix --out data/shards/climbmix
    python data/pretrain.py --source climbmix --pattern qwen2 --out data/shards/climbmix_q2
    python data/pretrain.py --source "text/*.jsonl.zst" --val-source val.jsonl --out data/shards/mine
    python data/pretrain.py --source "shards:hosted/*.bin" --tokenizer gpt2.json --out data/shards/fineweb

Every document starts with BOS and is never split across shards. progress.json records each finished
shard (see Progress): the same command continues after the last one, with the same bytes as an
uninterrupted run. dataset.json comes last. A second process that writes to the same directory is
refused.
"""

import argparse
import os
import re
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
    fail,
    file_entry,
    group_shards,
    lock_folder,
    overlap_note,
    read_dataset,
    read_header,
    read_json,
    run,
    sha256_file,
    sha256_matches,
    write_atomic,
    write_dataset,
    write_json,
    write_shard,
)
from sources import Source, add_source_flags, check_flags, identify, in_threads, local_paths
from tiktoken import Encoding
from tqdm import tqdm

BATCH_CHARS = 500_000  # of text given to a thread at once
SHARD_TOKENS = 100_000_000
LITTLE_VAL = 50_000  # bytes of validation text
# Flags that must have these values for the dataset that data/pypi.py locks.
LOCKED_FLAGS = {
    **dict.fromkeys("max_documents max_bytes val_source val_documents tokenizer vocab_size pattern".split()),
    "shard_tokens": SHARD_TOKENS,
}


# ==== encoding


def encode_documents(documents: Iterable[str], encoding: Encoding, workers: int) -> Iterator[tuple[np.ndarray, int]]:
    """(tokens uint16 [n] from BOS on, bytes of text) of each document, in order.

    In threads, as the tokenizer runs without Python's lock.
    """
    bos = np.array([tokenizer.bos_id(encoding)], dtype=np.uint16)

    def encode_batch(texts: list[str]) -> list[tuple[np.ndarray, int]]:
        encode = lambda text: np.concatenate((bos, tokenizer.encode(encoding, text)))
        return [(encode(text), len(text.encode())) for text in texts]

    for batch in in_threads(encode_batch, make_batches(documents), workers, max_pending=3 * workers):
        yield from batch


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


# ==== progress.json


@dataclass
class Progress:
    """progress.json: what of a dataset directory is finished, and with which settings. The states
    of a build:

        no progress.json           nothing is done
        tokenizer_sha256 is None   begun; a tokenizer.json, if there is one, was made by this command
        tokenizer_sha256 is set    tokenizer.json is finished
        shards[split] grows        a finished shard each: {"path", "tokens", "documents", "text_bytes", "sha256"}
        complete holds a split     all of its documents are in shards
        dataset.json exists        the dataset is complete, and is never changed again

    In each state a command with other settings or other source files is refused.
    """

    out: Path
    settings: dict[str, Any]
    tokenizer_sha256: str | None = None
    shards: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "val": []})
    complete: list[str] = field(default_factory=list)

    def save(self) -> None:
        """Writes progress.json."""
        value = {key: value for key, value in vars(self).items() if key != "out"}
        write_json(self.out / "progress.json", value)

    def all_shards(self) -> list[dict[str, Any]]:
        """The finished shards of both splits."""
        return self.shards["train"] + self.shards["val"]


def read_progress(out: Path, settings: dict[str, Any]) -> Progress:
    """The progress of an earlier run with these settings, or a new one."""
    path = out / "progress.json"
    if not path.exists():
        if (out / "dataset.json").exists() or any((out / "pretrain").glob("*.bin")):
            fail(f"{out} already holds a dataset that this command did not write; choose another --out")
        return Progress(out, settings)
    progress = Progress(out, **read_json(path))
    if not progress.tokenizer_sha256 and not (out / "tokenizer.json").exists():
        # Stopped before anything was made, such as by a text too small for the tokenizer.
        return Progress(out, settings)
    check_settings(out, progress.settings, settings)
    return progress


def check_settings(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Ends the script if a setting or a source file differs."""
    if old["inputs"] != new["inputs"]:
        hint = "choose another --out, or delete it"
        fail(f"{out} was built from different source files (names, sizes or content); {hint}")
    for key in new:
        # Without --name it is that of the folder, which may be renamed.
        if old.get(key) != new[key] and not (key == "name" and not new["name"]):
            before, now = ("not given" if value is None else repr(value) for value in (old.get(key), new[key]))
            was = f"--{key.replace('_', '-')} was {before} before and is {now} now"
            fail(f"{out} was built with different settings: {was}; choose another --out or the same settings")


def is_complete(progress: Progress) -> bool:
    """Whether dataset.json and every shard are there; ends the script if a shard is missing or was changed."""
    out = progress.out
    for entry in progress.all_shards():
        path = out / entry["path"]
        if read_header(path)["tokens"] != entry["tokens"]:
            fail(f"{path} does not hold the {entry['tokens']} tokens recorded for it; delete {out} and run again")
    if not (out / "dataset.json").exists():
        return False
    read_dataset(out)
    return True


# ==== shards


def write_split(split: str, documents: Iterable[str], progress: Progress, args: argparse.Namespace) -> None:
    """Encodes the documents of a split that are not in a shard yet, and writes their shards."""
    encoding = tokenizer.load(progress.out / "tokenizer.json")
    num_written = sum(entry["documents"] for entry in progress.shards[split])
    documents = islice(documents, num_written, None)
    with tqdm(unit="B", unit_scale=True, desc=split, disable=None, mininterval=1) as bar:

        def encoded() -> Iterator[tuple[np.ndarray, int]]:
            for tokens, text_bytes in encode_documents(documents, encoding, args.workers):
                bar.update(text_bytes)
                yield tokens, text_bytes

        for shard in group_shards(encoded(), args.shard_tokens):
            add_shard(split, shard, encoding, progress)
    progress.complete.append(split)
    progress.save()


def add_shard(split: str, documents: list[tuple], encoding: Encoding, progress: Progress) -> None:
    """Writes documents, as encode_documents gives them, as the next shard of a split."""
    path = f"pretrain/{split}_{len(progress.shards[split]):06d}.bin"
    tokens = np.concatenate([tokens for tokens, _ in documents])
    header = (tokenizer.bos_id(encoding), encoding.n_vocab, progress.tokenizer_sha256)
    sha256 = write_shard(progress.out / path, tokens, *header)
    text_bytes = sum(size for _, size in documents)
    counts = {"tokens": len(tokens), "documents": len(documents), "text_bytes": text_bytes}
    progress.shards[split].append({"path": path, **counts, "sha256": sha256})
    progress.save()
    tqdm.write(f"wrote {path}: {len(tokens):,} tokens, {len(documents):,} documents", file=sys.stdout)


# ==== text to a dataset directory


def build(args: argparse.Namespace) -> None:
    """The main path: text to shards."""
    source = Source.of(args)
    flags = ["name", "text_field", "val_documents", "max_documents", "max_bytes"]
    flags += ["shard_tokens", "vocab_size"]
    settings = {
        "inputs": source.inputs,
        "val_fraction": source.val_fraction,
        **{flag: getattr(args, flag) for flag in flags},
        # None in directories from before these flags.
        "interleave": args.interleave or None,
        "pattern": args.pattern,
        "tokenizer": sha256_file(args.tokenizer) if args.tokenizer else None,
    }
    progress = read_progress(args.out, settings)
    if is_complete(progress):
        print(f"{args.out} is already complete")
    else:
        if not progress.tokenizer_sha256:
            check_documents(source)
        make_tokenizer(args, source, progress)
        write_shards(args, source, progress)
        finish(progress)
    if source.corpus:
        changed = [flag for flag, value in LOCKED_FLAGS.items() if getattr(args, flag) != value]
        if changed:
            names = ", ".join(f"--{flag.replace('_', '-')}" for flag in changed)
            print(f"not compared with the lock, which is for a dataset built without {names}")
        else:
            pypi.compare_dataset(args.out, args.source[0].removeprefix("pypi:"))


def check_documents(source: Source) -> None:
    """Ends the script unless both splits have a document, before anything is written."""
    for split, documents in (("train", source.train()), ("val", source.val())):
        if next(documents, None) is None:
            hint = "text files are split between lines, every 12,000 characters and at lines of <|endoftext|>"
            fail(f"the source has no {split} document; provide two or more, or --val-source ({hint})")


def make_tokenizer(args: argparse.Namespace, source: Source | None, progress: Progress) -> None:
    """tokenizer.json of the directory: the one that is there, that of --tokenizer, or a new one."""
    path = args.out / "tokenizer.json"
    if progress.tokenizer_sha256 and not sha256_matches(path, progress.tokenizer_sha256):
        fail(f"{path} is not the tokenizer that this dataset was started with; delete {args.out} and run again")
    if args.tokenizer and not path.exists():
        tokenizer.read_spec(args.tokenizer)
        write_atomic(path, [args.tokenizer.read_bytes()])
    elif not path.exists():
        # First, so that a stop from here on is recognised as this command's.
        progress.save()
        start = time.perf_counter()
        pattern = tokenizer.PATTERNS[args.pattern or "gpt4"]
        text = source.tokenizer_text()
        write_json(path, tokenizer.train(text, args.vocab_size, pattern))
        print(f"trained the tokenizer in {time.perf_counter() - start:.1f} s")

    sha256 = sha256_file(path)
    if args.tokenizer and sha256 != sha256_file(args.tokenizer):
        fail(f"{path} differs from --tokenizer {args.tokenizer}; choose another --out")
    description = tokenizer.describe(path)
    for flag, key in (("--vocab-size", "vocab_size"), ("--pattern", "pattern")):
        wanted = getattr(args, key)
        if wanted and description[key] != wanted:
            fail(f"{path} has {flag} {description[key]}, not {wanted}; omit the flag or train a new tokenizer")
    progress.tokenizer_sha256 = sha256
    progress.save()


def write_shards(args: argparse.Namespace, source: Source, progress: Progress) -> None:
    """All shards that progress does not list."""
    start = time.perf_counter()
    if "val" not in progress.complete:
        write_split("val", source.val(), progress, args)
    if "train" not in progress.complete:
        write_split("train", source.train(), progress, args)
    print(f"encoded in {time.perf_counter() - start:.1f} s in {args.workers} threads")
    if skipped := sum(source.skipped.values()):
        what = "documents or malformed lines" if args.skip_bad else "documents"
        print(f"skipped {skipped:,} empty {what}")


def finish(progress: Progress) -> None:
    """Writes dataset.json, the sign that the dataset is complete, and prints the totals."""
    out = progress.out
    path = out / "tokenizer.json"
    settings = progress.settings
    sources = [f"{entry[1]} (val)" if entry[0] == "val" else entry[0] for entry in settings["inputs"]]
    files = {"tokenizer.json": file_entry(path, progress.tokenizer_sha256)}
    for entry in progress.all_shards():
        counts = {key: entry[key] for key in ("tokens", "documents", "text_bytes")}
        files[entry["path"]] = {**counts, **file_entry(out / entry["path"], entry["sha256"])}
    dataset = {
        "name": settings["name"] or out.resolve().name,
        "sources": sources,
        "tokenizer_sha256": progress.tokenizer_sha256,
        **tokenizer.describe(path),
        "files": files,
    }
    write_dataset(out, dataset)
    splits = read_dataset(out)["splits"]
    for split, total in splits.items():
        documents, tokens, size = (total[key] for key in ("documents", "tokens", "text_bytes"))
        rate = f"{size / tokens:.3f} bytes per token"
        print(f"{split}: {documents:,} documents, {tokens:,} tokens, {size:,} bytes of text ({rate})")
    share = splits["val"]["text_bytes"] / (splits["train"]["text_bytes"] + splits["val"]["text_bytes"])
    if share > 0.2 and not any(entry[0] == "val" for entry in settings["inputs"]):
        print(f"note: whole documents are held out, here {share:.0%} of the text; add text, or use --val-source")
    elif splits["val"]["text_bytes"] < LITTLE_VAL:
        print("note: scores on so little validation text are rough; raise --val-fraction or use --val-source")
    if note := overlap_note(out, dataset["bos_id"]):
        print(f"note: {note}")
    print(f"wrote {out / 'dataset.json'}")


# ==== pretokenized shards


def import_shards(args: argparse.Namespace) -> None:
    """Makes a dataset directory from shards that others tokenized."""
    out = args.out
    specs = [spec.removeprefix("shards:") for spec in args.source]
    for flag in ("interleave", "max_documents", "max_bytes", "val_source", "val_documents", "val_fraction"):
        if getattr(args, flag):
            fail(f"--{flag.replace('_', '-')} is for text, not for --source shards:; omit it")
    if not args.tokenizer:
        hint = "for GPT-2's vocabulary make it with data/tokenizer.py gpt2"
        fail(f"--source shards: needs --tokenizer, the tokenizer.json the shards were made with; {hint}")
    specs = [str(Path(spec) / "*.bin") if Path(spec).is_dir() else spec for spec in specs]
    paths = local_paths(specs, (".bin",))
    by_split = sort_by_split(paths, ", ".join(specs))
    settings = {
        "inputs": [identify(path) for path in paths],
        "name": args.name,
        "tokenizer": sha256_file(args.tokenizer),
        "hosted_shards": True,
    }
    progress = read_progress(out, settings)
    if is_complete(progress):
        print(f"{out} is already complete")
        return
    # Everything is checked before the first file is made.
    bos_id = tokenizer.bos_id(tokenizer.load(args.tokenizer))
    lengths = tokenizer.token_bytes(args.tokenizer)
    counts = {path: count_shard(path, settings["tokenizer"], bos_id, lengths) for path in paths}
    progress.settings = settings
    progress.shards = {"train": [], "val": []}
    make_tokenizer(args, None, progress)
    (out / "pretrain").mkdir(exist_ok=True)
    for split, split_paths in by_split.items():
        for i, path in enumerate(tqdm(split_paths, desc=split, disable=None)):
            name = f"pretrain/{split}_{i:06d}.bin"
            link_or_copy(path, out / name)
            entry = {"path": name, **counts[path], "sha256": sha256_file(out / name)}
            progress.shards[split].append(entry)
    progress.save()
    finish(progress)


def sort_by_split(paths: list[Path], spec: str) -> dict[str, list[Path]]:
    """The shards of each split, by a word of their names: "retrieval_train_01" is training."""
    by_split: dict[str, list[Path]] = {"train": [], "val": []}
    for path in paths:
        words = re.findall("[a-z]+", path.stem.lower())
        splits = [split for split in by_split if split in words]
        if len(splits) == 1:
            by_split[splits[0]].append(path)
        else:
            print(f"skipped {path.name}: its name must contain either train or val")
    for split, split_paths in by_split.items():
        if not split_paths:
            found = f"none of the {len(paths)} files of {spec} has the word {split!r} in its name"
            fail(f"{found}; name the shards *_train_* and *_val_*")
    return by_split


def link_or_copy(path: Path, target: Path) -> None:
    """A hard link, which takes no space; across file systems a copy."""
    target.unlink(missing_ok=True)
    try:
        os.link(path, target)
    except OSError:
        with open(path, "rb") as f:
            write_atomic(target, iter(lambda: f.read(2**24), b""))


def main() -> None:
    args = parse_arguments()
    # From here on: reading the source alone may take minutes.
    with lock_folder(args.out):
        if args.source[0].startswith("shards:"):
            import_shards(args)
        else:
            build(args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Turn text or pretokenized shards into a dataset directory.")
    add_source_flags(parser)
    add = parser.add_argument
    add("--val-source", help="validation text (default: a part of --source)")
    add("--val-documents", type=int, help="maximum number of validation documents (default: all)")
    add("--out", required=True, type=Path, help="dataset directory, e.g. data/shards/mine")
    add("--name", help="name in dataset.json (default: the directory's)")
    tokenizer.add_training_flags(parser)
    add("--tokenizer", type=Path, help="tokenizer.json to use (default: a new one is trained)")
    add("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens per shard [%(default)s]")
    threads = "number of encoding threads (default: all cores, up to 16)"
    add("--workers", type=int, default=available_cores(), help=threads)
    args = parser.parse_args()

    check_flags(args, shard_tokens=1, workers=1, val_documents=1)
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
