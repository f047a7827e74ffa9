"""Scores a pretrained run on CORE, the 22 tasks of DCLM (arXiv 2406.11794).

    python runs/score_core.py out/RUN
    python runs/score_core.py out/RUN --limit 200           the first 200 examples of each task, an estimate of CORE
    torchrun --standalone --nproc_per_node=8 runs/score_core.py out/RUN

data/core_tasks.py adds the tasks to the run's dataset. CORE is the mean over the tasks of
(accuracy - chance) / (1 - chance), where chance is the accuracy of a random guess. The table goes to core.csv in the
run directory, the score to its result.json and, as one JSON object, to the last line on stdout. For an earlier
checkpoint or an unfinished run there is only a table, core_step_N.csv; so it is with --limit (core_limit_N.csv), as the
mean is no CORE then. This executes the training script in the run directory.
"""

import argparse
import hashlib
import io
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from lib.command import RunError, run_command, say


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score a pretrained run on the CORE tasks.")
    add = parser.add_argument
    add("run_dir", metavar="RUN", type=Path, help="directory of a pretrained run")
    add("--data", metavar="DIR", help="dataset with CORE tasks (default: the run's)")
    add("--limit", type=int, metavar="N", help="number of examples per task, for a quick estimate (default: all)")
    add("--batch-tokens", type=int, metavar="N", help="tokens per batch (default: by free memory)")
    add("--step", type=int, metavar="N", help="step of the checkpoint to score (default: the newest)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="dtype of weights (default: the run's)")
    add("--no-compile", action="store_true", help="plain PyTorch: quicker start, slower scoring")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit must be at least 1, found {args.limit}")
    return args


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import engine
import numpy as np
import torch
from lib.checkpoint import open_dataset
from lib.choices import ChoiceBatch, ChoiceTask, default_batch_tokens, score_task, scorer
from lib.score_table import TaskScore, make_table, score_path, write_table

NUM_TASKS = 22


def core_files(dataset) -> dict[str, str]:
    """Path and sha256 of the dataset's CORE files, in the order of dataset.json."""
    files = dataset.info.get("files", {})
    return {name: entry["sha256"] for name, entry in files.items() if name.startswith("core/")}


def read_task(path: Path, sha256: str, limit: int | None, max_seq_len: int) -> ChoiceTask:
    """Reads a file of data/core_tasks.py.

    Args:   limit: number of examples to keep, None: all; max_seq_len: longer choices lose their beginning
    Raises: RunError if the file is missing or not the one listed in dataset.json
    """
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != sha256:
        state = "corrupt: its sha256 is not the one in dataset.json" if content else "missing"
        raise RunError(f"{path} is {state}; make the CORE files again with python data/core_tasks.py")
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = dict(file)
    meta = json.loads(arrays["meta"].tobytes())
    examples = []
    spans = []

    # The file holds once what the choices of an example share, then what each has of its own.
    tokens = arrays["tokens"].astype(np.int32)
    own_parts = zip(*(arrays[name].tolist() for name in ("rest", "start", "end")), strict=True)
    cursor = 0  # in tokens
    counts = arrays["choices"][:limit].tolist()
    for shared, count in zip(arrays["shared"].tolist(), counts, strict=False):
        prefix = tokens[cursor : cursor + shared]
        cursor += shared
        examples.append([])
        spans.append([])
        for length, start, end in islice(own_parts, count):
            choice = np.concatenate((prefix, tokens[cursor : cursor + length]))
            cursor += length
            truncated = max(0, len(choice) - max_seq_len)
            examples[-1].append(choice[truncated:])
            spans[-1].append((max(1, start - truncated), max(1, end - truncated)))
    gold = arrays["gold"][: len(examples)]
    return ChoiceTask(meta["task"], meta["type"], meta["random_baseline"] / 100, gold, examples, spans)


def write_scores(run: engine.Run, args: argparse.Namespace, rows: list[TaskScore]) -> None:
    """core.csv and result.json describe the finished model; everything else gets a table of its own."""
    run_dir = args.run_dir
    newest = run.script.checkpoints(run_dir)[-1]
    result = run_dir / "result.json"  # the run writes it when it has finished
    finished = newest.name == f"step_{run.step:06d}" and result.is_file()
    write_table(score_path(run_dir / "core.csv", None if finished else run.step, args.limit), rows)
    if finished and not args.limit:
        scores = {"core": rows[-1].centered, "core_seconds": rows[-1].seconds}
        content = json.loads(result.read_text(encoding="utf-8")) | scores
        result.write_text(json.dumps(content, indent=1), encoding="utf-8")


def score_run(args: argparse.Namespace) -> dict:
    """Scores the model of a run and writes the files. Returns what is printed last."""
    run = engine.load_run(args.run_dir, args.step, dtype=args.dtype)
    ranks = run.script.start_ranks()
    model = run.model
    dataset = open_dataset(run.script, args.data or run.config.data, args.run_dir)
    if not core_files(dataset):
        command = f"python data/core_tasks.py --download --data {dataset.root}"
        raise RunError(f"{dataset.root} has no CORE tasks; run {command}, or pass another dataset with --data")
    limits = args.limit, dataset.info.get("core", {}).get("limit")  # the files may have been limited
    args.limit = min(filter(None, limits), default=None)
    bos_id = dataset.tokenizer.bos_id
    max_seq_len = model.config.max_seq_len
    size = args.batch_tokens or default_batch_tokens(ranks)
    size = max(size, 2 * max_seq_len)  # a choice and its targets fit
    score = scorer(model, ranks.device.type == "cuda" and not args.no_compile)

    ranks.sync()
    start = time.perf_counter()
    with torch.no_grad():
        score(ChoiceBatch(size, model.windows, bos_id).inputs(ranks.device))
    ranks.sync()
    say(f"core: {size:,} tokens a batch, compiled in {time.perf_counter() - start:.1f} s")

    def tasks() -> Iterator[tuple]:
        for name, sha256 in core_files(dataset).items():
            task = read_task(dataset.root / name, sha256, args.limit, max_seq_len)
            correct = score_task(score, task, size, model.windows, bos_id, ranks)
            yield task.name, correct, task.chance

    name = f"mean of {args.limit} each" if args.limit else "CORE"
    rows = make_table(tasks(), name, NUM_TASKS)
    if ranks.is_main:
        write_scores(run, args, rows)
    key = "core_estimate" if args.limit else "core"
    return {key: rows[-1].centered, "core_seconds": rows[-1].seconds, "run_dir": str(args.run_dir)}


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: score_run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
