"""A copy of P34 or P100 with other validation text, on which no setting was ever chosen.

    python records/rivals/fresh_text.py data/shards/p34 --seen data/shards/p100 --unseen data/shards/p400 \
        --out data/shards/p34_fresh

Its validation documents, as many as before, are the first of `--unseen` that `--seen` does not train on: those of P400
that are not in P100, so from other projects than P34's and P100's. The order of documents in P400 is that of their
hashes, which mixes its 475 other projects, and near duplicates of documents of P100 are not in P400. Training shards
stay the same; conversations and CORE tasks are not copied.
"""

import argparse
import hashlib
import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))
import tokenizer
from dataset import (
    count_shard,
    fail,
    file_entry,
    read_dataset,
    read_documents,
    run,
    write_dataset,
    write_shard,
)

VAL = "pretrain/val_000000.bin"


def train_documents(folder: Path, dataset: dict) -> Iterator[bytes]:
    """The bytes of each training document's tokens."""
    shards = [folder / name for name in dataset["files"] if name.startswith("pretrain/train_")]
    return read_documents(shards, dataset["bos_id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="DIR", help="dataset directory to copy")
    parser.add_argument("--seen", type=Path, required=True, metavar="DIR", help="dataset whose training text it avoids")
    parser.add_argument("--unseen", type=Path, required=True, metavar="DIR", help="dataset to take documents from")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new dataset directory")
    args = parser.parse_args()

    folders = (args.base, args.seen, args.unseen)
    base, seen, unseen = (read_dataset(folder) for folder in folders)
    if len({dataset["tokenizer_sha256"] for dataset in (base, seen, unseen)}) > 1:
        fail(f"{', '.join(map(str, folders))} have different tokenizers; build them with the same one")
    if args.out.exists():
        fail(f"{args.out} already exists; choose another --out")

    trained = {hashlib.sha256(document).digest() for document in train_documents(args.seen, seen)}
    others = train_documents(args.unseen, unseen)
    fresh = (document for document in others if hashlib.sha256(document).digest() not in trained)
    count = base["splits"]["val"]["documents"]
    documents = list(itertools.islice(fresh, count))
    if len(documents) < count:
        fail(f"{args.unseen} has {len(documents):,} documents that {args.seen} has not, but {count:,} are needed")

    ignored = shutil.ignore_patterns("val_*", "sft", "core", "progress.json", ".lock")
    shutil.copytree(args.base, args.out, ignore=ignored)
    tokens = np.frombuffer(b"".join(documents), dtype=np.uint16)
    header = base["bos_id"], base["vocab_size"], base["tokenizer_sha256"]
    sha256 = write_shard(args.out / VAL, tokens, *header)
    lengths = tokenizer.token_bytes(args.out / "tokenizer.json")
    counts = count_shard(args.out / VAL, base["tokenizer_sha256"], base["bos_id"], lengths)
    not_copied = ("pretrain/val_", "sft/", "core/")
    files = {name: entry for name, entry in base["files"].items() if not name.startswith(not_copied)}
    files[VAL] = counts | file_entry(args.out / VAL, sha256)
    write_dataset(args.out, {**base, "name": args.out.name, "files": files})
    print(f"{args.out}: {counts['documents']:,} documents, {counts['tokens']:,} tokens to validate on")


if __name__ == "__main__":
    run(main)
