"""Makes token files of the 22 CORE tasks (DCLM): few-shot prompts with the spans to score.

    python data/core_tasks.py --bundle eval_bundle.zip --data data/shards/climbmix   a folder, .zip, .tar.zst
    python data/core_tasks.py --download --data data/shards/climbmix               fetches the public one

It writes core/TASK.npz into the dataset directory and lists the files with their checksums in dataset.json;
runs/score_core.py scores them. The files hold plain arrays, no pickle. An item is the common prefix of its choices,
stored once, followed by the rest of each choice:

    tokens  uint16 (n,)      item 0: common tokens, rest of choice 0, rest of choice 1, ...; item 1: ...
    shared  int32 (items,)   length of the common tokens; BOS is the first unless the row was cut
    choices int32 (items,)   number of choices; 1 in language modelling
    gold    int32 (items,)   the right choice
    rest    int32 (rows,)    length of each choice's rest; a row is common tokens + rest
    start   int32 (rows,)    the tokens row[start:end] are scored, each given all before it; start >= 1
    end     int32 (rows,)
    meta    uint8 (m,)       JSON: task, type, shots, random_baseline in percent, max_seq_len

Items are in the shuffled order of the definition, and shots are picked from the whole task, so the first N items are a
fair subset that a full run scores the same way.
"""

import argparse
import csv
import http.client
import io
import json
import random
import re
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizer
import yaml
import zstandard
from dataset import entry_of, fail, lock_folder, new_folder, read_dataset, run, write_atomic
from sources import check_flags, clean
from tqdm import tqdm

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
NUM_TASKS = 22
AGAIN = "fetch the bundle again"
TYPES = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


# ==== the bundle


def open_bundle(path: Path, unpacked: Path) -> Path:
    """The folder with core.yaml in a bundle: a folder, or a .zip or tar archive, which goes into `unpacked`."""
    try:
        if path.is_dir():
            unpacked = path
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(unpacked)
        else:
            unpack_tar(path, unpacked)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, tarfile.TarError, zstandard.ZstdError) as problem:
        fail(f"the bundle {path} cannot be read ({problem}); check the path or fetch it again")
    found = sorted(unpacked.rglob("core.yaml"), key=lambda file: len(file.parts))
    if not found:
        fail(f"{path} has no core.yaml, so it is not a CORE bundle; check the path")
    return found[0].parent


def unpack_tar(path: Path, folder: Path) -> None:
    with open(path, "rb") as file:
        if path.suffix == ".zst":
            decompressor = zstandard.ZstdDecompressor(max_window_size=2**27)
            file = decompressor.stream_reader(file, read_across_frames=True)
        with tarfile.open(fileobj=file, mode="r|*") as archive:
            archive.extractall(folder, filter="data")


def download(path: Path) -> None:
    try:
        urllib.request.urlretrieve(URL, path)
    except (OSError, http.client.HTTPException) as problem:
        fail(f"cannot fetch {URL} ({problem}); get it some other way and pass --bundle")


def read_tasks(bundle: Path) -> list[dict[str, Any]]:
    """The tasks of core.yaml with their random baselines."""
    table = csv.DictReader(io.StringIO(read_text(bundle, "eval_meta_data.csv"), newline=""))
    try:
        baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in table}
        tasks = [
            {
                "label": str(task["label"]),
                "file": f"eval_data/{task['dataset_uri']}",
                "type": task["icl_task_type"],
                "shots": int(task["num_fewshot"][0]),
                "delimiter": str(task.get("continuation_delimiter", " ")),
                "baseline": baselines[task["label"]],
            }
            for task in yaml.safe_load(read_text(bundle, "core.yaml"))["icl_tasks"]
        ]
    except (yaml.YAMLError, csv.Error, KeyError, IndexError, ValueError, TypeError, AttributeError) as problem:
        fail(f"core.yaml or eval_meta_data.csv is damaged ({problem!r}); {AGAIN}")
    for task in tasks:
        if task["type"] not in TYPES or not re.fullmatch(r"[A-Za-z0-9_]{1,100}", task["label"]):
            fail(f"core.yaml names a task {task['label']!r} of type {task['type']!r}; {AGAIN}")
    return tasks


def read_text(bundle: Path, name: str) -> str:
    try:
        return (bundle / name).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        fail(f"{name} of the bundle is missing or damaged ({problem}); {AGAIN}")


def read_items(bundle: Path, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a task in their shuffled order."""
    items = []
    for number, line in enumerate(read_text(bundle, task["file"]).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            item = {key: value[key] for key in TYPES[task["type"]]}
            solved(item, task)
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            fail(f"{task['file']} line {number} is no item of type {task['type']} ({problem!r}); {AGAIN}")
        items.append(item)
    if len(items) <= task["shots"]:
        fail(f"{task['file']} has {len(items)} items, too few for {task['shots']} shots; {AGAIN}")
    random.Random(1337).shuffle(items)
    return items


# ==== prompts


def pick_shots(count: int, index: int, shots: int) -> list[int]:
    """The items shown before item `index`, picked from all items even if only some are scored."""
    # The definition samples from a list of the other items; a range gives the same picks.
    return [i + (i >= index) for i in random.Random(1234 + index).sample(range(count - 1), shots)]


def solved(item: dict[str, Any], task: dict[str, Any]) -> str:
    """An item with its answer, as shown in a shot."""
    if task["type"] == "multiple_choice":
        return item["query"] + task["delimiter"] + item["choices"][item["gold"]]
    if task["type"] == "schema":
        return item["context_options"][item["gold"]] + task["delimiter"] + item["continuation"]
    return item["context"].strip() + task["delimiter"] + item["continuation"]


def render(item: dict[str, Any], shown: str, task: dict[str, Any]) -> list[str]:
    """A text for each choice; in language modelling, without and with the continuation."""
    if task["type"] == "multiple_choice":
        return [shown + item["query"] + task["delimiter"] + choice for choice in item["choices"]]
    if task["type"] == "schema":
        return [
            shown + context + task["delimiter"] + item["continuation"]
            for context in item["context_options"]
        ]
    question = shown + item["context"].strip() + task["delimiter"]
    # Stripped, because a blank before the border usually belongs to the token after it.
    return [question.strip(), question + item["continuation"]]


def common_length(rows: list[np.ndarray], backwards: bool = False) -> int:
    """Length of the common prefix or suffix of all rows, in tokens."""
    length = min(map(len, rows))
    first = rows[0][::-1] if backwards else rows[0]
    for row in rows[1:]:
        row = row[::-1] if backwards else row
        different = np.flatnonzero(first[:length] != row[:length])
        length = int(different[0]) if different.size else length
    return length


def spans(rows: list[np.ndarray], kind: str) -> tuple[list[np.ndarray], list[int]]:
    """The rows that are scored and where scoring starts in each; it ends with the row."""
    if kind == "language_modeling":
        without, full = rows
        # All of `without`, unless a token lies across the border.
        return [full], [common_length([without, full])]
    if kind == "schema":
        suffix = common_length(rows, backwards=True)
        return rows, [max(1, len(row) - suffix) for row in rows]
    # If one choice is the beginning of all others, its last token counts in each.
    return rows, [min(common_length(rows), min(map(len, rows)) - 1)] * len(rows)


# ==== files


def build_task(
    task: dict[str, Any], items: list[dict[str, Any]], encoding: Any, max_seq_len: int, limit: int
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays of a task's file, and counts for the messages."""
    bos = np.array([tokenizer.bos_id(encoding)], np.uint16)
    pieces: list[np.ndarray] = []
    names = ("shared", "choices", "gold", "rest", "start", "end")
    columns: dict[str, list[int]] = {name: [] for name in names}
    counts = {"cut": 0, "merged": 0}
    texts = [solved(item, task) + "\n\n" for item in items] if task["shots"] else []
    for index, item in enumerate(items[:limit] if limit else items):
        shown = "".join(texts[i] for i in pick_shots(len(items), index, task["shots"]))
        prompts = render(item, shown, task)
        encoded = [tokenizer.encode(encoding, clean(text)) for text in prompts]
        encoded = [np.concatenate((bos, tokens)) for tokens in encoded]
        rows, starts = spans(encoded, task["type"])
        if task["type"] == "language_modeling":
            counts["merged"] += starts[0] < len(encoded[0])
        cut = [max(0, len(row) - max_seq_len) for row in rows]
        counts["cut"] += sum(c > 0 for c in cut)
        rows = [row[c:] for row, c in zip(rows, cut, strict=True)]
        starts = [max(1, start - c) for start, c in zip(starts, cut, strict=True)]
        shared = min(common_length(rows), min(map(len, rows)) - 1) if len(rows) > 1 else starts[0]
        shared = min(shared, len(rows[0]))
        pieces += [rows[0][:shared], *(row[shared:] for row in rows)]
        columns["shared"].append(shared)
        columns["choices"].append(len(rows))
        columns["gold"].append(item.get("gold", 0))
        columns["rest"] += [len(row) - shared for row in rows]
        columns["start"] += starts
        columns["end"] += [len(row) for row in rows]
    meta = {
        "task": task["label"],
        "type": task["type"],
        "shots": task["shots"],
        "random_baseline": task["baseline"],
        "max_seq_len": max_seq_len,
    }
    arrays = {key: np.array(value, np.int32) for key, value in columns.items()}
    arrays = {"tokens": np.concatenate(pieces).astype(np.uint16), **arrays}
    arrays["meta"] = np.frombuffer(json.dumps(meta, sort_keys=True).encode(), np.uint8)
    return arrays, counts


def build(bundle: Path, root: Path, max_seq_len: int, limit: int = 0) -> None:
    """Writes core/*.npz for all tasks; old files are kept until all new ones are complete."""
    encoding = tokenizer.load(root / "tokenizer.json")
    lengths = tokenizer.token_bytes(root / "tokenizer.json")
    tasks = read_tasks(bundle)
    with new_folder(root, "core") as (folder, files):
        for task in tqdm(tasks, "CORE", disable=None):
            items = read_items(bundle, task)
            arrays, counts = build_task(task, items, encoding, max_seq_len, limit)
            target = folder / f"{task['label']}.npz"
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)
            sha256 = write_atomic(target, [buffer.getvalue()])
            tokens = arrays["tokens"]
            files[f"core/{target.name}"] = {
                "items": len(arrays["gold"]),
                "tokens": len(tokens),
                "text_bytes": int(lengths[tokens].sum()),
                **entry_of(target, sha256),
            }
            line = f"{task['label']}: {len(arrays['gold']):,} items, {len(tokens):,} tokens"
            # A token may lie across the border of context and continuation; scoring begins with it.
            merged = f"{counts['merged']:,} borders inside a token"
            tqdm.write(f"{line}, {counts['cut']:,} rows cut, {merged}")
    if len(tasks) != NUM_TASKS:
        print(f"note: the bundle has {len(tasks)} tasks; CORE is the mean over {NUM_TASKS}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Add the CORE tasks to a dataset, as tokens.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--bundle", type=Path, help="CORE bundle: a folder, a .zip or a .tar.zst")
    source.add_argument("--download", action="store_true", help=f"fetch {URL}")
    add = parser.add_argument
    add("--data", required=True, type=Path, help="dataset directory, e.g. data/shards/climbmix")
    add("--max-seq-len", type=int, default=2048, help="longer rows lose their beginning [%(default)s]")
    add("--items", type=int, default=0, help="items to take of each task (default: all)")
    args = parser.parse_args()
    check_flags(args, max_seq_len=2, items=0)
    read_dataset(args.data)
    with lock_folder(args.data), tempfile.TemporaryDirectory() as temporary:
        if args.download:
            args.bundle = Path(temporary) / "bundle.zip"
            download(args.bundle)
        bundle = open_bundle(args.bundle, Path(temporary) / "bundle")
        build(bundle, args.data, args.max_seq_len, args.items)


if __name__ == "__main__":
    run(main)
