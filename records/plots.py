"""Plots of bits per byte: any rows for compare.py --plot, today's entries for the leaderboard."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import entry
import numpy as np
from metrics import split_log

COLORS = {"small": "C0", "medium": "C1", "6x512": "C2", "4x256": "C3", "portable": "C4"}


class Point(NamedTuple):
    """A training line of a log; val_bpb is None where the run did not validate."""

    tokens: int
    seconds: float
    bpb: float
    val_bpb: float | None


@dataclass
class Row:
    """Runs that differ in their seed only."""

    name: str
    device: str
    num_devices: int
    data: str  # bits per byte of rows with the same text here may be compared
    runs: list[dict]  # metrics, None where a log does not state them
    curves: list[list[Point]]
    session: tuple | None = None  # entry.session(): rows with the same one may compare their seconds

    def values(self, key: str) -> list[float]:
        """A metric of each run; empty if one of them does not state it."""
        values = [run[key] for run in self.runs]
        return [] if None in values else values

    def mean(self, key: str) -> float | None:
        """The mean of a metric; None if a run does not state it."""
        values = self.values(key)
        return fmean(values) if values else None


def points(log: list[dict]) -> list[Point]:
    """The curve of a run."""
    train, val = split_log(log)
    bpb = {line["step"]: line["val_bpb"] for line in val}
    return [Point(line["tokens"], line["train_seconds"], line["bpb"], bpb.get(line["step"])) for line in train]


def record_row(folder: Path) -> Row:
    """The row of an entry."""
    record = entry.read_record(folder)
    hardware = record["hardware"]
    curves = [points(log) for log in entry.read_logs(folder, record)]
    about = hardware["device"], hardware["num_devices"], record["dataset"]["fingerprint"]
    return Row(folder.name, *about, record["runs"], curves, entry.session_of(record))


def new_figure(columns: int, size: tuple[float, float]) -> tuple:
    """(figure, its panels side by side), without pyplot, so that nothing needs to be closed."""
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def draw_rows(rows: list[Row], path: Path) -> None:
    """Bits per byte over tokens and over seconds: training as thin lines, validation as dots."""
    from matplotlib.ticker import EngFormatter

    figure, panels = new_figure(2, (12, 4.8))
    heights = []
    for i, row in enumerate(rows):
        style = {"color": COLORS.get(row.name, f"C{i % 10}"), "ms": 4}
        name = f"{row.name}, {row.num_devices} x {row.device}: {row.mean('val_bpb'):.4f}"
        panels[0].plot([], [], marker="o", label=name, **style)
        for curve in row.curves:
            val = [p for p in curve if p.val_bpb is not None]
            for x, axes in enumerate(panels):  # over tokens, over seconds
                axes.plot([p[x] for p in curve], [p.bpb for p in curve], lw=0.8, alpha=0.45, **style)
                width = 1.2 if len(val) > 1 else 0
                axes.plot([p[x] for p in val], [p.val_bpb for p in val], marker="o", lw=width, **style)
            # The first eighth of a run is far above the rest, which is what one wants to see.
            late = [p for p in curve if p.tokens >= curve[-1].tokens / 8]
            heights += [y for p in late for y in (p.bpb, p.val_bpb) if y is not None]
    for axes, label in zip(panels, ("training tokens", "training seconds"), strict=True):
        axes.set(xlabel=label, ylabel="bits per byte")
        axes.grid(alpha=0.3)
        margin = 0.05 * (max(heights) - min(heights))
        axes.set_ylim(min(heights) - margin, max(heights) + margin)
    panels[0].xaxis.set_major_formatter(EngFormatter())
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)


def draw_today(panels: dict[str, tuple[list[Row], list[dict]]], path: Path) -> None:
    """Validation over training seconds: the mean of the seeds in a band from lowest to highest.

    Args: panels {title: (rows, runs without logs, drawn as crosses)}; each has text of its own
    """
    figure, all_axes = new_figure(len(panels), (3 + 4.5 * len(panels), 4.2))  # small, so that letters are large
    for axes, (title, (rows, quotes)) in zip(all_axes, panels.items(), strict=True):
        ends = [(q["train_seconds"], q["val_bpb"], q["name"], q["device"], "X") for q in quotes]
        for row in rows:
            # By tokens, as seeds may be validated at different steps, or only at the end.
            validated = [{p.tokens: p for p in curve if p.val_bpb is not None} for curve in row.curves]
            validated = [run for run in validated if len(run) > 1] or validated
            tokens = sorted(set.intersection(*map(set, validated)))
            seconds = np.array([[run[n].seconds for n in tokens] for run in validated])
            bpb = np.array([[run[n].val_bpb for n in tokens] for run in validated])
            color = COLORS.get(row.name, "0.3")
            axes.plot(seconds.mean(0), bpb.mean(0), color=color, lw=2)
            axes.fill_between(seconds.mean(0), bpb.min(0), bpb.max(0), color=color, alpha=0.3, lw=0)
            x = row.mean("train_seconds")
            last = row.values("val_bpb")
            axes.vlines(x, min(last), max(last), color=color, alpha=0.3, lw=5)
            ends.append((x, row.mean("val_bpb"), row.name, row.device, "o"))
        for x, y, name, device, marker in ends:
            color = COLORS.get(name, "0.3")
            axes.plot(x, y, marker, color=color, ms=9)
            text = f"{name}\n{y:.4f} in {x:.1f} s, {device.removeprefix('NVIDIA ').split()[0]}"
            behind = {"color": "white", "alpha": 0.7, "pad": 1}
            axes.annotate(text, (x, y), (9, 0), textcoords="offset points", va="center", color=color, bbox=behind)
        ticks = (5, 10, 20, 50, 100, 200, 500)
        axes.set(xscale="log", xticks=ticks, xticklabels=ticks)
        axes.minorticks_off()
        x = [end[0] for end in ends]
        y = [end[1] for end in ends]
        margin = 0.2 * (max(y) - min(y)) or 0.01
        axes.set(xlim=(min(x) / 1.6, max(x) * 5), ylim=(min(y) - margin, max(y) + margin))
        axes.set(xlabel="training seconds", ylabel="validation, bits per byte")
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
