"""Metrics of a run and of several seeds, from log.jsonl and core.csv; README.md defines them."""

import csv
import gzip
import json
import math
import zlib
from pathlib import Path
from statistics import fmean

import numpy as np
from files import UserError
from significance import sample_sd

CORE_TASKS = 22

# Metrics of a run: title and format in tables.
METRICS = {
    "val_bpb": ("val bpb", ".5f"),
    "core": ("CORE", ".4f"),
    "steps": ("steps", ",.0f"),
    "tokens": ("tokens", ",.0f"),
    "train_seconds": ("training seconds", ",.2f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "peak_memory_gib": ("peak memory GiB", ".2f"),
}


def read_log(path: Path) -> list[dict]:
    """The lines of a log.jsonl or log.jsonl.gz. Raises UserError if it cannot be read."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{path.name} cannot be read ({error})") from None


def split_log(log: list[dict]) -> tuple[list[dict], list[dict]]:
    """(training lines, validation lines) of a log."""
    return [line for line in log if "loss" in line], [line for line in log if "val_bpb" in line]


def run_metrics(log: list[dict]) -> dict:
    """The metrics of a finished run, by the keys of METRICS; "core" is None.

    val_bpb is in bits per byte, peak_memory_gib in GiB; mfu is a fraction, the mean over the run
    weighted by time. Raises KeyError if a training line lacks one of them, e.g. memory_gib.
    """
    train, val = split_log(log)
    last = train[-1]
    seconds = np.diff([0.0, *(line["train_seconds"] for line in train)])
    return {
        "val_bpb": val[-1]["val_bpb"],
        "core": None,
        "steps": last["step"],
        "tokens": last["tokens"],
        "train_seconds": last["train_seconds"],
        "tokens_per_second": last["tokens"] / last["train_seconds"],
        "mfu": float(np.average([line["mfu"] for line in train], weights=seconds)),
        "peak_memory_gib": max(line["memory_gib"] for line in train),
    }


def read_core(path: Path) -> tuple[dict[str, str], float | None]:
    """(number of examples by task, CORE) of a core.csv, which runs/score_core.py writes.

    CORE is the mean of the centered accuracies; None if there are not all 22 tasks.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] != "CORE"]
    examples = {row["task"]: row["examples"] for row in rows}
    centered = [float(row["centered"]) for row in rows]
    return examples, fmean(centered) if len(centered) == CORE_TASKS else None


def summarize(runs: list[dict]) -> dict:
    """{metric: {"mean", "sd"}} over several runs; a metric that one of them lacks is skipped."""
    out = {}
    for key in METRICS:
        values = [run[key] for run in runs]
        if None not in values:
            out[key] = {"mean": fmean(values), "sd": sample_sd(values)}
    return out


def loss_curve(logs: list[list[dict]]) -> list[dict]:
    """Means over the runs at steps that all logged; "val_bpb" is None unless all validated."""
    trains = [{line["step"]: line for line in split_log(log)[0]} for log in logs]
    vals = [{line["step"]: line["val_bpb"] for line in split_log(log)[1]} for log in logs]
    rows = []
    for step in sorted(set.intersection(*map(set, trains))):
        lines = [train[step] for train in trains]
        step_losses = [line["loss"] for line in lines]
        validated = all(step in val for val in vals)
        row = {
            "step": step,
            "tokens": lines[0]["tokens"],
            "train_seconds": fmean(line["train_seconds"] for line in lines),
            "loss": fmean(step_losses),
            "loss_sd": sample_sd(step_losses),
            "bpb": fmean(line["bpb"] for line in lines),
            "val_bpb": fmean(val[step] for val in vals) if validated else None,
        }
        rows.append(row)
    return rows


def loss_noise(logs: list[list[dict]]) -> float | None:
    """Sd of the loss over the runs divided by its mean, as a root mean square over steps."""
    if len(logs) < 2:
        return None
    return math.sqrt(fmean((row["loss_sd"] / row["loss"]) ** 2 for row in loss_curve(logs)))
