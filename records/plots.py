"""Plots of bits per byte: any rows for compare.py --plot, today's entries for the leaderboard."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import entry
from metrics import split_log

COLORS = {"small": "C0", "medium": "C1", "6x512": "C2", "4x256": "C3", "portable": "C4", "plain": "C5", "16x768": "C6"}
# Lines and text of these colors are readable on a light page and on a dark one.
BLUE = "#3d85d8"
ORANGE = "#d9622b"
GREY = "#808080"
GREY_TEXT = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)


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


class Curve(NamedTuple):
    """Bits per byte over training seconds or tokens, for one line of a picture."""

    name: str
    color: str
    points: list[tuple[float, float]]


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


def draw_seconds(curves: list[Curve], title: str, path: Path) -> None:
    """Validation over training seconds, with the results as dots, cut off far above them."""
    import matplotlib

    with matplotlib.rc_context({**GREY_TEXT, "font.size": 12}):
        figure, (axes,) = new_figure(1, (9, 4.8))
        ends = [curve.points[-1] for curve in curves]
        last = max(seconds for seconds, _ in ends)
        lowest = min(bpb for _, bpb in ends)
        span = max(bpb for _, bpb in ends) - lowest or 0.01
        axes.set(xlim=(0, 1.4 * last), ylim=(lowest - 0.6 * span, lowest + 5 * span))

        labels = []
        for curve in sorted(curves, key=lambda curve: curve.points[-1][1]):
            seconds, bpb = curve.points[-1]
            axes.plot(*zip(*curve.points, strict=True), color=curve.color, lw=2)
            axes.plot(seconds, bpb, "o", color=curve.color, ms=8)
            # Labels of curves that end side by side are stacked, right of all of them.
            right = max(other for other, _ in ends if abs(other - seconds) < last / 8)
            height = max([bpb, *(y + 0.65 * span for x, y in labels if x == right)])
            labels.append((right, height))
            text = f"{curve.name}\n{bpb:.4f} in {seconds:.1f} s"
            axes.text(right + last / 60, height, text, color=curve.color, va="top", fontsize=11)

        axes.set(xlabel="training seconds", ylabel="validation, bits per byte")
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120, transparent=True)


def draw_tokens(curves: list[Curve], path: Path) -> None:
    """Results over training tokens, both axes logarithmic, and the exponent between each and the next."""
    import matplotlib
    from matplotlib.ticker import EngFormatter, FixedLocator, MultipleLocator, NullLocator

    with matplotlib.rc_context({**GREY_TEXT, "font.size": 12}):
        figure, (axes,) = new_figure(1, (9, 4.8))
        axes.set(xscale="log", yscale="log", xlabel="training tokens", ylabel="validation, bits per byte")
        for curve, side in zip(curves, (1, -1), strict=False):  # figures above the first, below the second
            style = {"color": curve.color, "textcoords": "offset points", "va": "center", "fontsize": 11}
            axes.plot(*zip(*curve.points, strict=True), "o-", color=curve.color, lw=2, ms=8)
            for tokens, bpb in curve.points:
                axes.annotate(f"{bpb:.4f}", (tokens, bpb), (0, 15 * side), ha="center", **style)
            for (tokens, bpb), (more, lower) in itertools.pairwise(curve.points):
                exponent = math.log(lower / bpb) / math.log(more / tokens)
                middle = math.sqrt(tokens * more), math.sqrt(bpb * lower)
                where = {"xytext": (8 * side, 10 * side), "ha": "left" if side > 0 else "right"}
                axes.annotate(f"exponent {exponent:.3f}", middle, **where, **style)
            axes.annotate(curve.name, curve.points[0], (0, 33 * side), ha="center", **style)
        axes.margins(0.12, 0.3)
        axes.xaxis.set(major_locator=FixedLocator([3e7, 1e8, 3e8]), major_formatter=EngFormatter())
        axes.yaxis.set(major_locator=MultipleLocator(0.05), major_formatter="{x:.2f}")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120, transparent=True)
