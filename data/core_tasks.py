"""Makes token files of the 22 CORE tasks (DCLM): few-shot prompts with the spans to score.

    python data/core_tasks.py --bundle eval_bundle.zip --data data/shards/climbmix   a folder, .zip, .tar.zst
    python data/core_tasks.py --download --data data/shards/climbmix                 fetches the public one

It writes core/TASK.npz into the dataset directory and lists the files with their checksums in
dataset.json; runs/score_core.py scores them. If the text of a task is not the original, a note says
so. The files hold plain arrays, no pickle. An item is the common prefix of its choices, stored
once, followed by the rest of each choice:

    tokens  uint16 (n,)      item 0: common tokens, rest of choice 0, rest of choice 1, ...; item 1: ...
    shared  int32 (items,)   length of the common tokens; BOS is the first unless the row was truncated
    choices int32 (items,)   number of choices; 1 in language modelling
    gold    int32 (items,)   the right choice
    rest    int32 (rows,)    length of each choice's rest; a row is common tokens + rest
    start   int32 (rows,)    the tokens row[start:end] are scored, each given all before it; start >= 1
    end     int32 (rows,)
    meta    uint8 (m,)       JSON: task, type, shots, random_baseline in percent, max_seq_len

Items are in the shuffled order of the definition, and shots are picked from the whole task, so the
first N items are a fair subset that a full run scores the same way.
"""

import argparse
import csv
import hashlib
import http.client
import io
import json
import random
import re
import shutil
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
from dataset import fail, file_entry, lock_folder, new_folder, read_dataset, run, write_atomic
from sources import check_flags, clean, open_lines
from tqdm import tqdm

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
SECONDS = 30  # without an answer, the server counts as missing
NUM_TASKS = 22
HINT = "download the bundle again"
TYPES = ("multiple_choice", "schema", "language_modeling")
# The original texts of the tasks lie in scripts/eval/local_data of mosaicml/llm-foundry on GitHub.
# Beside each file is the id that git gives to its content (git hash-object FILE).
ORIGINALS = {
    "commonsense_reasoning/commonsense_qa.jsonl": "f1cc16a88b05ab0934aab2ec2d02a6869e6e5520",
    "commonsense_reasoning/copa.jsonl": "b22f96e08ae9d0e97e1ae58f67b6425c77ef200a",
    "commonsense_reasoning/openbook_qa.jsonl": "a8aff255a64cbc72a85252acf00df25a315686c2",
    "commonsense_reasoning/piqa.jsonl": "a9992adfdefde366fe7ccff871f5aa62449a09cf",
    "language_understanding/bigbench_language_identification.jsonl": "1f132fbbb12a67ce267b7b92b458175632c265f3",
    "language_understanding/hellaswag.jsonl": "448321079fdc140bd8566b16b24eda9ceacd3501",
    "language_understanding/lambada_openai.jsonl": "4da02dd53b9e7385871d06ab855471d77b2f7dda",
    "language_understanding/winograd_wsc.jsonl": "762fe030ac6938ecba438c47a04057247c6ab891",
    "language_understanding/winogrande.jsonl": "316e87ae4659f0c402b0f00551fdec83ab0a0986",
    "reading_comprehension/boolq.jsonl": "f42083a58713d00ef4600118cfdf79618c269190",
    "reading_comprehension/coqa.jsonl": "028bd4e51326cc43f8394987ae47fbb271aeba9d",
    "reading_comprehension/squad.jsonl": "dc733b8f58ec666c53fd946198c434b819a00680",
    "symbolic_problem_solving/agi_eval_lsat_ar.jsonl": "d663b427ba310d3f877f09a6830198ca7c856189",
    "symbolic_problem_solving/bigbench_cs_algorithms.jsonl": "7ecee0f270f3de8b6558da14ae02181f3d950a40",
    "symbolic_problem_solving/bigbench_dyck_languages.jsonl": "27a4ac2b3b18716add92f4ecd62475c4f8d77768",
    "symbolic_problem_solving/bigbench_operators.jsonl": "a982dc4f962725c9dc4abb07d3cc333c99959290",
    "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl": "86621f10e7124ed6f3a61fb91493c1256c008f60",
    "world_knowledge/arc_challenge.jsonl": "ce66b8dcfb4bac892a404a0dda8b4e8ed0f84b89",
    "world_knowledge/arc_easy.jsonl": "b5fd1bf87a24246a6be67230b721541688f5c349",
    "world_knowledge/bigbench_qa_wikidata.jsonl": "5e1be72797ba082fd4f6efa42f7d759d2d23339a",
    "world_knowledge/jeopardy_all.jsonl": "2f771918dbc8b68550df204171b14d2648b5d494",
}


# ==== the bundle


def open_bundle(path: Path, unpacked: Path) -> Path:
    """The folder with core.yaml in a bundle: a folder, or a .zip or tar archive, which goes into `unpacked`."""
    if not path.exists():
        fail(f"the bundle {path} does not exist; check the path")
    try:
        if path.is_dir():
            unpacked = path
        elif path.suffix == ".zip":
            shutil.unpack_archive(path, unpacked)
        else:
            with open_lines(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
                archive.extractall(unpacked, filter="data")
    except (OSError, EOFError, shutil.ReadError, zipfile.BadZipFile, zlib.error, tarfile.TarError) as problem:
        fail(f"the bundle {path} cannot be read ({problem}); check the path or download it again")
    found = sorted(unpacked.rglob("core.yaml"), key=lambda file: len(file.parts))
    if not found:
        fail(f"{path} has no core.yaml, so it is not a CORE bundle; check the path")
    return found[0].parent


def download(path: Path) -> None:
    """Fetches the public bundle."""
    try:
        with urllib.request.urlopen(URL, timeout=SECONDS) as response, open(path, "wb") as file:
            shutil.copyfileobj(response, file)
    except (OSError, http.client.HTTPException) as problem:
        fail(f"cannot download {URL} ({problem}); download it another way and pass --bundle")


def read_tasks(bundle: Path) -> list[dict[str, Any]]:
    """The tasks of core.yaml with their random baselines."""
    try:
        table = csv.DictReader(io.StringIO(read_text(bundle, "eval_meta_data.csv"), newline=""))
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
    except (ValueError, LookupError, TypeError, csv.Error, yaml.YAMLError) as problem:
        found = f"{type(problem).__name__}: {problem}"
        fail(f"core.yaml or eval_meta_data.csv of the bundle is damaged ({found}); {HINT}")
    for task in tasks:
        if task["type"] not in TYPES or not re.fullmatch(r"[A-Za-z0-9_]{1,100}", task["label"]):
            fail(f"core.yaml has a bad task name {task['label']!r} or type {task['type']!r}; {HINT}")
    return tasks


def read_text(bundle: Path, name: str) -> str:
    """A file of the bundle."""
    return (bundle / name).read_bytes().decode("utf-8-sig")


def is_original(bundle: Path, task: dict[str, Any]) -> bool:
    """Whether the file of a task is that of llm-foundry, by the id that git gives it."""
    content = (bundle / task["file"]).read_bytes()
    blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return ORIGINALS.get(task["file"].removeprefix("eval_data/")) == blob_id


def read_items(bundle: Path, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a task in their shuffled order."""
    items = []
    for number, line in enumerate((bundle / task["file"]).read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line.decode("utf-8-sig"))
            render(item, solved(item, task), task)  # raises if something is missing or no text
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            fail(f"{task['file']} line {number} is not an item of type {task['type']} ({reason}); {HINT}")
        items.append(item)
    if len(items) <= task["shots"]:
        fail(f"{task['file']} has {len(items)} items, too few for {task['shots']} shots; {HINT}")
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
    # Stripped, because a blank before the boundary usually belongs to the token after it.
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
        context, full = rows
        # All of the context, unless a token lies across its boundary with the continuation.
        return [full], [common_length([context, full])]
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
    counts = {"truncated": 0, "across_boundary": 0}
    texts = [solved(item, task) + "\n\n" for item in items] if task["shots"] else []
    for index, item in enumerate(items[:limit] if limit else items):
        shown = "".join(texts[i] for i in pick_shots(len(items), index, task["shots"]))
        prompts = render(item, shown, task)
        encoded = [tokenizer.encode(encoding, clean(text)) for text in prompts]
        encoded = [np.concatenate((bos, tokens)) for tokens in encoded]
        rows, starts = spans(encoded, task["type"])
        if task["type"] == "language_modeling":
            counts["across_boundary"] += starts[0] < len(encoded[0])
        # Tokens to remove from the beginning of each row.
        removed = [max(0, len(row) - max_seq_len) for row in rows]
        counts["truncated"] += sum(n > 0 for n in removed)
        rows = [row[n:] for row, n in zip(rows, removed, strict=True)]
        starts = [max(1, start - n) for start, n in zip(starts, removed, strict=True)]
        shared = min(common_length(rows), min(map(len, rows)) - 1) if len(rows) > 1 else starts[0]
        shared = min(shared, len(rows[0]))
        pieces += [rows[0][:shared], *(row[shared:] for row in rows)]
        columns["shared"].append(shared)
        columns["choices"].append(len(rows))
        columns["gold"].append(0 if task["type"] == "language_modeling" else item["gold"])
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
    with new_folder(root, "core", core={"limit": limit} if limit else {}) as (folder, files):
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
                **file_entry(target, sha256),
            }
            # A token may lie across the boundary of context and continuation; it is scored.
            tqdm.write(
                f"{task['label']}: {len(arrays['gold']):,} items, {len(tokens):,} tokens, "
                f"{counts['truncated']:,} rows truncated, "
                f"{counts['across_boundary']:,} tokens across the context/continuation boundary"
            )
    changed = [task["label"] for task in tasks if not is_original(bundle, task)]
    if changed:
        print(f"note: the text differs from the original, so published scores do not compare: {', '.join(changed)}")
    if len(tasks) != NUM_TASKS:
        print(f"note: the bundle has {len(tasks)} tasks; CORE is the mean over {NUM_TASKS}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenize the CORE tasks and add them to a dataset.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--bundle", type=Path, help="CORE bundle: a folder, a .zip or a .tar.zst")
    source.add_argument("--download", action="store_true", help=f"download the public bundle, {URL}")
    add = parser.add_argument
    add("--data", required=True, type=Path, help="dataset directory, e.g. data/shards/climbmix")
    max_seq_len = "maximum tokens per row; longer rows lose their beginning [%(default)s]"
    add("--max-seq-len", type=int, default=2048, help=max_seq_len)
    add("--limit", type=int, default=0, help="number of examples per task (default: all)")
    args = parser.parse_args()
    check_flags(args, max_seq_len=2, limit=0)
    read_dataset(args.data)
    with lock_folder(args.data), tempfile.TemporaryDirectory() as temporary:
        if args.download:
            args.bundle = Path(temporary) / "bundle.zip"
            download(args.bundle)
        bundle = open_bundle(args.bundle, Path(temporary) / "bundle")
        build(bundle, args.data, args.max_seq_len, args.limit)


if __name__ == "__main__":
    run(main)
