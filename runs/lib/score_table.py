"""The accuracy of each task, and the mean over the tasks, as a table and a csv file."""

import csv
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from lib.command import RunError, say


class TaskScore(NamedTuple):
    """A row of the table and the csv file; the last one, the mean over tasks, has no accuracy."""

    task: str
    examples: int
    accuracy: float | None
    centered: float | None  # (accuracy - chance) / (1 - chance); None for the mean if a task is missing
    seconds: float

    def line(self) -> str:
        accuracy = "" if self.accuracy is None else f"{self.accuracy:.4f}"
        centered = "" if self.centered is None else f"{self.centered:.4f}"
        return f"{self.task:34} {self.examples:8,} {accuracy:>9} {centered:>9} {self.seconds:8.2f}"


def make_table(tasks: Iterable[tuple[str, np.ndarray, float]], name: str, num_tasks: int) -> list[TaskScore]:
    """Prints a row for each task as it comes, and one for the mean, empty if a task is missing.

    Args:    tasks: name, which examples are answered correctly, bool (examples,), and accuracy of a
             random guess; name: of the mean; num_tasks: how many tasks the mean is defined over
    Returns: the rows
    Raises:  RunError if there is no task
    """
    say(f"{'task':34} {'examples':>8} {'accuracy':>9} {'centered':>9} {'seconds':>8}")
    start = time.perf_counter()
    rows = []
    for task, correct, chance in tasks:
        accuracy = float(correct.mean())
        seconds = time.perf_counter() - start - sum(row.seconds for row in rows)
        rows.append(TaskScore(task, len(correct), accuracy, (accuracy - chance) / (1 - chance), seconds))
        say(rows[-1].line())
    if not rows:
        raise RunError("no task could be scored; pass files with --files")

    mean = None
    if len(rows) == num_tasks:
        mean = float(np.mean([row.centered for row in rows]))
    else:
        say(f"note: no {name}, which is the mean of {num_tasks} tasks; {len(rows)} were scored")
    examples = sum(row.examples for row in rows)
    rows.append(TaskScore(name, examples, None, mean, time.perf_counter() - start))
    say(rows[-1].line())
    return rows


def score_path(path: Path, step: int | None, limit: int | None = None, tasks: Iterable[str] = ()) -> Path:
    """The path of a full result of the newest checkpoint; with step, limit or tasks in its name for any other one."""
    parts = [path.stem]
    if step is not None:
        parts.append(f"step_{step}")
    if limit is not None:
        parts.append(f"limit_{limit}")
    return path.with_stem("_".join([*parts, *tasks]))


def write_table(path: Path, rows: list[TaskScore]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([TaskScore._fields, *rows])
