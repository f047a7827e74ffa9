"""Checks a dataset directory: reads every file that dataset.json lists, and prints a line for each problem.

    python data/check.py data/shards/mine
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizer
from dataset import (
    FOLDERS,
    check_file,
    count_shard,
    fail,
    overlap_note,
    read_dataset,
    read_shard,
    run,
)


def error_of(action: Callable, *args) -> str:
    """The error message with which an action ends the script, or ""."""
    try:
        action(*args)
    except SystemExit as end:
        return str(end.code).removeprefix("error: ")
    return ""


def find_problems(folder: Path) -> list[str]:
    """Reads every listed file of a dataset directory; returns a line for each problem."""
    dataset = read_dataset(folder)
    files = dataset["files"]
    # Without hidden files, such as what a killed command leaves.
    on_disk = sorted(path for name in FOLDERS for path in (folder / name).glob("[!.]*"))
    unlisted = [path for path in on_disk if path.relative_to(folder).as_posix() not in files]
    problems = [f"{path} is not listed in dataset.json; remove it" for path in unlisted]

    path = folder / "tokenizer.json"
    errors = {name: error_of(check_file, folder / name, files[name]) for name in files}
    errors["tokenizer.json"] = errors["tokenizer.json"] or error_of(tokenizer.load, path)
    problems += filter(None, errors.values())
    if errors["tokenizer.json"]:
        return problems

    description = tokenizer.describe(path)
    for key, value in description.items():
        # Datasets made by hand state none.
        if dataset.get(key, value) != value:
            problems.append(f"dataset.json has a different {key} from {path}; rebuild the dataset")
    lengths = tokenizer.token_bytes(path)
    sha256 = dataset["tokenizer_sha256"]
    for name, entry in files.items():
        shard = name.replace(".mask.bin", ".bin")
        if name.endswith(".bin") and not errors[name] and not errors.get(shard):
            arguments = (folder / name, entry, sha256, description["bos_id"], lengths)
            problems.append(error_of(check_shard, *arguments))
    return list(filter(None, problems))


def check_shard(path: Path, entry: dict, sha256: str, bos: int, lengths: np.ndarray) -> None:
    """Ends the script unless a shard is valid and matches what dataset.json says about it."""
    if path.name.endswith(".mask.bin"):
        mask = read_shard(path)
        masked = path.with_name(path.name.replace(".mask.bin", ".bin"))
        if not masked.exists() or len(mask) != len(read_shard(masked)) or mask.max() > 1:
            fail(f"{path} is not a mask of the shard beside it; run data/sft.py again")
        return
    for key, value in count_shard(path, sha256, bos, lengths).items():
        if entry.get(key, value) != value:
            fail(f"{path} holds {value:,} {key}, dataset.json lists {entry[key]:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", metavar="DIR", type=Path, help="dataset directory")
    args = parser.parse_args()
    problems = find_problems(args.data)
    if problems:
        print("\n".join(problems))
        raise SystemExit(1)

    dataset = read_dataset(args.data)
    fingerprint = dataset["fingerprint"][:12]
    print(f"{args.data} is complete: {len(dataset['files'])} files, fingerprint {fingerprint}")
    bos = tokenizer.bos_id(tokenizer.load(args.data / "tokenizer.json"))
    for kind in ("pretrain", "sft"):
        if note := overlap_note(args.data, bos, kind):
            print(f"note: {note}")


if __name__ == "__main__":
    run(main)
