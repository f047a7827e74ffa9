"""Makes token files of the 22 CORE tasks (DCLM): few-shot prompts, rendered and tokenized, with the spans to score.

    python data/core.py --bundle eval_bundle.zip --data data/shards/climbmix     a folder, .zip or .tar.zst
    python data/core.py --download --data data/shards/climbmix                   fetches the public bundle

It writes core/TASK.npz into the dataset directory and lists the files with their checksums in dataset.json;
runs/score_core.py scores them. The files hold plain arrays, no pickle. An item is what all its choices have in common,
stored once, and then the rest of each choice:

    tokens  uint16 (n,)      item 0: common tokens, rest of choice 0, rest of choice 1, ...; item 1: ...
    shared  int32 (items,)   length of the common tokens; BOS is the first unless the row was cut
    choices int32 (items,)   number of choices; 1 in language modelling
    gold    int32 (items,)   the right choice
    rest    int32 (rows,)    length of each choice's rest; a row is common tokens + rest
    start   int32 (rows,)    the tokens row[start:end] are scored, each given all before it; start >= 1
    end     int32 (rows,)
    meta    uint8 (m,)       JSON: task, type, shots, random_baseline in percent, max_seq_len

Items are in the shuffled order of the definition, and their shots are drawn from the whole task. So the first N items
are a fair subset, which a full run scores in the same way.
"""

import argparse
import csv
import io
import json
import random
import re
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizer
from format import fail, read_dataset, remove_leftovers, sha256_file, write_atomic, write_dataset

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
NUM_TASKS = 22
TYPES = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


# --- the bundle -------------------------------------------------------------------------------------------


def open_bundle(path: Path | None, archive: bytes | None = None) -> dict[str, Any]:
    """{name inside the bundle: bytes or Path} of a folder, a .zip or a .tar.zst; the top folder is stripped."""
    files: dict[str, Any] = {}
    try:
        if archive is not None or (path and path.suffix == ".zip"):
            with zipfile.ZipFile(io.BytesIO(archive) if archive is not None else path) as z:
                files = {name: z.read(name) for name in z.namelist() if wanted(name)}
        elif path and path.is_dir():
            files = {
                str(p.relative_to(path).as_posix()): p
                for p in sorted(path.rglob("*"))
                if wanted(p.name)
            }
        elif path and path.name.endswith((".tar.zst", ".tar.gz", ".tar")):
            files = read_tar(path)
        else:
            fail(f"--bundle {path} is no folder, .zip or .tar.zst; check the path")
    except FileNotFoundError:
        fail(f"--bundle {path} does not exist; check the path")
    except (OSError, EOFError, zipfile.BadZipFile, ValueError) as problem:
        fail(f"the bundle {path or URL} cannot be read ({problem}); fetch it again")
    top = [name for name in files if name.endswith("core.yaml") and "__MACOSX" not in name]
    if not top:
        fail(f"{path or URL} holds no core.yaml, so it is no CORE bundle; check the path")
    prefix = min(top, key=len).removesuffix("core.yaml")
    return {
        name.removeprefix(prefix): value for name, value in files.items() if name.startswith(prefix)
    }


def wanted(name: str) -> bool:
    return name.endswith((".jsonl", ".csv", "core.yaml"))


def read_tar(path: Path) -> dict[str, bytes]:
    import tarfile

    if path.name.endswith(".zst"):
        import zstandard

        with open(path, "rb") as f:
            try:
                data = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(f).read()
            except zstandard.ZstdError as problem:
                raise ValueError(str(problem)) from None
    else:
        data = path.read_bytes()
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            return {m.name: tar.extractfile(m).read() for m in tar if m.isfile() and wanted(m.name)}
    except tarfile.TarError as problem:
        raise ValueError(str(problem)) from None


def download() -> bytes:
    try:
        with urllib.request.urlopen(URL, timeout=60) as reply:
            return reply.read()
    except (OSError, urllib.error.URLError) as problem:
        fail(
            f"{URL} cannot be fetched ({problem}); download it in another way and pass it with --bundle"
        )


def read_bytes(bundle: dict[str, Any], name: str) -> bytes:
    value = bundle.get(name)
    if value is None:
        fail(f"the bundle has no {name}, so it is incomplete; fetch it again")
    return value.read_bytes() if isinstance(value, Path) else value


def read_tasks(bundle: dict[str, Any]) -> list[dict[str, Any]]:
    """The tasks of core.yaml with their random baselines: label, file, shots, type, delimiter, baseline.

    Reads no YAML but that of this file: a list of flat maps, plain or quoted strings, one-element lists.
    """
    tasks: list[dict[str, Any]] = []
    for line in read_bytes(bundle, "core.yaml").decode().splitlines():
        line = line.split(" #")[0].rstrip()
        if re.match(r"\s*-(\s|$)", line):
            tasks.append({})
            line = re.sub(r"^(\s*)-", r"\1 ", line)
        if match := re.match(r"\s+(\w+):\s*(.+)$", line):
            key, value = match.groups()
            if not tasks:
                fail(
                    f"core.yaml has the line {line.strip()!r} before its first task; fetch the bundle again"
                )
            if value.startswith('"'):
                value = json.loads(value)
            elif value.startswith("'"):
                value = value.strip("'")
            tasks[-1][key] = value
    table = csv.DictReader(
        io.StringIO(read_bytes(bundle, "eval_meta_data.csv").decode("utf-8-sig"))
    )
    baselines = {row["Eval Task"]: row["Random baseline"] for row in table}
    found = []
    for task in tasks:
        label = task.get("label")
        try:
            found.append({
                "label": label, "file": f"eval_data/{task['dataset_uri']}", "type": task["icl_task_type"],
                "shots": int(task["num_fewshot"].strip("[] ")), "delimiter": task.get("continuation_delimiter", " "),
                "baseline": float(baselines[label]),
            })  # fmt: skip
        except (KeyError, ValueError) as problem:
            fail(f"core.yaml and eval_meta_data.csv do not describe the task {label} fully ({problem}); "
                 f"fetch the bundle again")  # fmt: skip
        if task["icl_task_type"] not in TYPES or not re.fullmatch(r"\w+", label):
            fail(
                f"core.yaml names a task {label!r} of type {task['icl_task_type']!r}, which this script does not know"
            )
    if not found:
        fail("core.yaml lists no tasks; fetch the bundle again")
    return found


def read_items(bundle: dict[str, Any], task: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a task in their shuffled order."""
    items = []
    for number, line in enumerate(read_bytes(bundle, task["file"]).decode().split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            missing = [key for key in TYPES[task["type"]] if key not in item]
        except (ValueError, TypeError) as problem:
            fail(
                f"{task['file']} line {number} is no JSON object ({problem}); fetch the bundle again"
            )
        if missing:
            fail(f"{task['file']} line {number} has no {missing[0]!r}; fetch the bundle again")
        options = item.get("choices") or item.get("context_options")
        if task["type"] != "language_modeling" and (
            not options or not 0 <= item["gold"] < len(options)
        ):
            fail(
                f"{task['file']} line {number} has no choice {item['gold']}; fetch the bundle again"
            )
        items.append(item)
    if len(items) <= task["shots"]:
        fail(
            f"{task['file']} has {len(items)} items, too few for {task['shots']} shots; fetch the bundle again"
        )
    random.Random(1337).shuffle(items)
    return items


# --- prompts ----------------------------------------------------------------------------------------------


def draw_shots(count: int, index: int, shots: int) -> list[int]:
    """The items that are shown before item `index`, drawn from all `count` even if only a part is scored."""
    # The definition samples from a list of the other items; a range gives the same picks without the list.
    return [i + (i >= index) for i in random.Random(1234 + index).sample(range(count - 1), shots)]


def solved(item: dict[str, Any], task: dict[str, Any]) -> str:
    """An item with its answer, as it is shown in a shot."""
    if task["type"] == "multiple_choice":
        return item["query"] + task["delimiter"] + item["choices"][item["gold"]]
    if task["type"] == "schema":
        return item["context_options"][item["gold"]] + task["delimiter"] + item["continuation"]
    return item["context"].strip() + task["delimiter"] + item["continuation"]


def render(item: dict[str, Any], shown: str, task: dict[str, Any]) -> list[str]:
    """The texts to tokenize: one for each choice; in language modelling, one without and one with the continuation."""
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
    """How many tokens all rows share at their beginning, or at their end."""
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
        return [full], [
            common_length([without, full])
        ]  # all of `without`, unless a token lies across the border
    if kind == "schema":
        suffix = common_length(rows, backwards=True)
        return rows, [max(1, len(row) - suffix) for row in rows]
    # If one choice is the beginning of all others, nothing of it is left to score. Then its last token counts in each.
    return rows, [min(common_length(rows), min(map(len, rows)) - 1)] * len(rows)


# --- files ------------------------------------------------------------------------------------------------


def build_task(
    task: dict[str, Any], items: list[dict[str, Any]], encoding: Any, max_seq_len: int, limit: int
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays of a task's file, and counts for the messages."""
    bos = np.array([tokenizer.bos_id(encoding)], np.uint16)
    pieces: list[np.ndarray] = []
    columns: dict[str, list[int]] = {
        key: [] for key in ("shared", "choices", "gold", "rest", "start", "end")
    }
    counts = {"cut": 0, "merged": 0, "unshared": 0}
    texts = [solved(item, task) + "\n\n" for item in items] if task["shots"] else []
    for index, item in enumerate(items[:limit] if limit else items):
        shown = "".join(texts[i] for i in draw_shots(len(items), index, task["shots"]))
        prompts = render(item, shown, task)
        encoded = [np.concatenate((bos, tokenizer.encode(encoding, text))) for text in prompts]
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
        counts["unshared"] += sum(map(len, rows))
        columns["shared"].append(shared)
        columns["choices"].append(len(rows))
        columns["gold"].append(item.get("gold", 0))
        columns["rest"] += [len(row) - shared for row in rows]
        columns["start"] += starts
        columns["end"] += [len(row) for row in rows]
    meta = {
        "task": task["label"], "type": task["type"], "shots": task["shots"], "random_baseline": task["baseline"],
        "max_seq_len": max_seq_len,
    }  # fmt: skip
    arrays = {key: np.array(value, np.int32) for key, value in columns.items()}
    arrays = {"tokens": np.concatenate(pieces).astype(np.uint16), **arrays}
    arrays["meta"] = np.frombuffer(json.dumps(meta, sort_keys=True).encode(), np.uint8)
    return arrays, counts


def pack_npz(arrays: dict[str, np.ndarray]) -> Iterator[bytes]:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    yield buffer.getvalue()


def build(bundle: dict[str, Any], root: Path, max_seq_len: int, limit: int = 0) -> None:
    """Writes core/*.npz of all tasks, then dataset.json once, so that a run that fails leaves the old one valid."""
    dataset = read_dataset(root)
    path = root / "tokenizer.json"
    if sha256_file(path) != dataset["tokenizer_sha256"]:
        fail(
            f"{path} is not the tokenizer of {root}/dataset.json; restore it or build the dataset again"
        )
    encoding, tasks = tokenizer.load(path), read_tasks(bundle)
    remove_leftovers(root / "core")
    files = {
        name: entry for name, entry in dataset["files"].items() if not name.startswith("core/")
    }
    begin, totals = time.perf_counter(), [0, 0, 0]
    print(
        f"{'task':34} {'items':>7} {'rows':>7} {'tokens':>11} {'unshared':>11} {'cut':>6} {'seconds':>8}"
    )
    for task in tasks:
        start = time.perf_counter()
        arrays, counts = build_task(task, read_items(bundle, task), encoding, max_seq_len, limit)
        name = f"core/{task['label']}.npz"
        numbers = {"items": len(arrays["gold"]), "tokens": len(arrays["tokens"])}
        files[name] = {**numbers, "sha256": write_atomic(root / name, pack_npz(arrays))}
        totals = [
            a + b for a, b in zip(totals, (*numbers.values(), counts["unshared"]), strict=True)
        ]
        print(f"{task['label']:34} {numbers['items']:7,} {len(arrays['rest']):7,} {numbers['tokens']:11,} "
              f"{counts['unshared']:11,} {counts['cut']:6,} {time.perf_counter() - start:8.1f}",
              flush=True)  # fmt: skip
        if counts["merged"]:
            print(f"  {counts['merged']} items have a token across the border of context and continuation; "
                  f"scoring begins with it")  # fmt: skip
    write_dataset(root, {**dataset, "files": files})
    for old in (root / "core").glob("*.npz"):
        if f"core/{old.name}" not in files:
            old.unlink()
    print(
        f"{'all':34} {totals[0]:7,} {'':7} {totals[1]:11,} {totals[2]:11,} {'':6} {time.perf_counter() - begin:8.1f}"
    )
    if len(tasks) != NUM_TASKS:
        print(f"note: the bundle has {len(tasks)} tasks; CORE is the mean over {NUM_TASKS}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Render and tokenize the CORE tasks into a dataset directory."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--bundle", type=Path, help="CORE bundle: a folder, a .zip or a .tar.zst")
    source.add_argument("--download", action="store_true", help=f"fetch {URL}")
    parser.add_argument(
        "--data", required=True, type=Path, help="dataset directory, e.g. data/shards/climbmix"
    )
    parser.add_argument(
        "--max-seq-len", type=int, default=2048, help="longer rows lose their beginning"
    )
    parser.add_argument(
        "--items", type=int, default=0, metavar="N", help="write N items a task (default all)"
    )
    args = parser.parse_args()
    if args.max_seq_len < 2 or args.items < 0:
        fail(
            f"--max-seq-len {args.max_seq_len} must be at least 2 and --items {args.items} at least 0"
        )
    read_dataset(args.data)
    bundle = open_bundle(args.bundle, download() if args.download else None)
    build(bundle, args.data, args.max_seq_len, args.items)


if __name__ == "__main__":
    main()
