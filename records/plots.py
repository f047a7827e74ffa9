"""Plots of bits per byte: any rows for compare.py --plot, today's entries for the leaderboard."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import entry
from metrics import split_log

COLORS = {"small": "C0", "medium": "C1", "6x512": "C2", "4x256": "C3", "portable": "C4"}
NAMES = {
    "small": "train_small.py",
    "medium": "train_medium.py",
    "6x512": "6 layers of width 512",
    "4x256": "4 layers of width 256",
}


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


def draw_today(rows: list[Row], rivals: list[tuple[str, str, float, float]], title: str, path: Path) -> None:
    """Validation over training seconds: a dot for each row, a cross for each rival.

    Args: rivals (name, device, seconds, bits per byte)
    """
    import matplotlib

    grey = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "0.5")
    with matplotlib.rc_context({**grey, "font.size": 11}):  # readable on a light page and on a dark one
        figure, (axes,) = new_figure(1, (9, 4.8))
        for row in rows:
            color = COLORS.get(row.name, "0.5")
            end = (row.mean("train_seconds"), row.mean("val_bpb"))
            axes.plot(*end, "o", color=color, ms=9)
            label(axes, NAMES.get(row.name, row.name), row.device, *end, color, "right")
        for name, device, *end in rivals:
            axes.plot(*end, "X", color="0.5", ms=9)
            label(axes, name, device, *end, "0.5", "left")
        ticks = (5, 10, 20, 50, 100, 200, 500)
        axes.set(xscale="log", xticks=ticks, xticklabels=ticks)
        axes.minorticks_off()
        x = [row.mean("train_seconds") for row in rows] + [seconds for _, _, seconds, _ in rivals]
        y = [row.mean("val_bpb") for row in rows] + [bpb for *_, bpb in rivals]
        margin = 0.15 * (max(y) - min(y)) or 0.01
        axes.set(xlim=(min(x) / 4, max(x) * 2), ylim=(min(y) - margin, max(y) + margin))
        axes.set(xlabel="training seconds", ylabel="validation, bits per byte")
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120, transparent=True)


def label(axes, name: str, device: str, seconds: float, bpb: float, color: str, side: str) -> None:
    """Two lines beside a point: `side` is the end of the text that lies at the point."""
    gpu = device.removeprefix("NVIDIA ").split()[0]
    shift = -9 if side == "right" else 9
    axes.annotate(
        f"{name}\n{bpb:.4f} in {seconds:.1f} s, {gpu}",
        (seconds, bpb), (shift, 0), textcoords="offset points", va="center", ha=side, color=color, fontsize=10,
    )  # fmt: skip
