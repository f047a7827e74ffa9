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
    read_dataset,
    read_shard,
    run,
    tell_shared,
)


def problem_of(action: Callable, *args) -> str:
    """The sentence with which an action ends the script, or ""."""
    try:
        action(*args)
    except SystemExit as end:
        return str(end.code).removeprefix("error: ")
    return ""


def find_problems(folder: Path) -> list[str]:
    """Reads every listed file of a dataset directory and returns what is wrong."""
    dataset = read_dataset(folder)
    files = dataset["files"]
    listed = {folder / name for name in files}
    shards = [path for path in sorted(folder.glob("*/*.bin")) if path.parent.name in FOLDERS]
    unlisted = [path for path in shards if path not in listed]
    problems = [f"{path} is not listed in dataset.json; remove it" for path in unlisted]

    path = folder / "tokenizer.json"
    of_file = {name: problem_of(check_file, folder / name, files[name]) for name in files}
    of_file["tokenizer.json"] = of_file["tokenizer.json"] or problem_of(tokenizer.load, path)
    problems += filter(None, of_file.values())
    if of_file["tokenizer.json"]:
        return problems

    found = tokenizer.describe(path)
    # Datasets made by hand state none.
    wrong = [key for key in found if dataset.get(key, found[key]) != found[key]]
    problems += [f"dataset.json has another {key} than {path}; build it again" for key in wrong]
    lengths = tokenizer.token_bytes(path)
    for name in files:
        masked = name.replace(".mask.bin", ".bin")
        if name.endswith(".bin") and not of_file[name] and not of_file.get(masked):
            stated = (files[name], dataset["tokenizer_sha256"], found["bos_id"], lengths)
            problems.append(problem_of(check_shard, folder / name, *stated))
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
    print(f"{args.data} is whole: {len(dataset['files'])} files, fingerprint {dataset['fingerprint'][:12]}")
    bos = tokenizer.bos_id(tokenizer.load(args.data / "tokenizer.json"))
    for kind in ("pretrain", "sft"):
        if line := tell_shared(args.data, bos, kind):
            print(line)


if __name__ == "__main__":
    run(main)
