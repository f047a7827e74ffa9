"""Pictures of bits per byte: against tokens and seconds for compare.py --plot, and those beside the leaderboard."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import entry

FAR = 1.1  # an entry whose bits per byte are this many times those of the best is not drawn
NOTE = (
    "Thin: loss of the training batches, in bits per byte by the average bytes of a token. Dots: validation.\n"
    "The two are of different text; only the dots on the right are ranked."
)


@dataclass
class Row:
    """Runs that differ in their seed only. A point of a curve is (tokens, seconds, training bpb, val bpb) or None."""

    name: str
    device: str
    num_devices: int
    data: str  # bits per byte of rows with the same text here may be compared
    runs: list[dict]  # metrics, None where a log does not state them
    curves: list[list[tuple]]

    def values(self, key: str) -> list[float]:
        values = [run[key] for run in self.runs]
        return [] if None in values else values

    def mean(self, key: str) -> float | None:
        values = self.values(key)
        return fmean(values) if values else None


def points(log: list[dict]) -> list[tuple]:
    train, val = entry.split(log)
    bpb = {e["step"]: e["val_bpb"] for e in val}
    return [(e["tokens"], e["train_seconds"], e["bpb"], bpb.get(e["step"])) for e in train]


def record_row(folder: Path) -> Row:
    record = entry.read_record(folder)
    hardware = record["hardware"]
    curves = [points(log) for log in entry.read_logs(folder, record)]
    about = hardware["device"], hardware["num_devices"], record["dataset"]["fingerprint"]
    return Row(folder.name, *about, record["runs"], curves)


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple:
    """(figure, panels); not known to pyplot, so that nothing needs to be closed."""
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw_curves(panels, rows: list[Row]) -> None:
    """Bits per byte against tokens and against seconds: training as thin lines, validation as dots."""
    from matplotlib.ticker import EngFormatter

    heights = []
    for i, row in enumerate(rows):
        style = {"color": f"C{i % 10}", "ms": 4}
        best = row.mean("val_bpb")
        name = f"{row.name}, {row.num_devices} x {row.device}" + (f": {best:.4f}" if best else "")
        panels[0].plot([], [], marker="o", label=name, **style)
        for curve in row.curves:
            train = [p for p in curve if p[2] is not None]
            val = [p for p in curve if p[3] is not None]
            for x, axes in enumerate(panels):
                axes.plot([p[x] for p in train], [p[2] for p in train], lw=0.8, alpha=0.45, **style)
                width = 1.2 if len(val) > 1 else 0
                axes.plot([p[x] for p in val], [p[3] for p in val], marker="o", lw=width, **style)
            # The first eighth of a run is far above the rest, which is what one wants to see.
            late = [p for p in curve if p[0] >= curve[-1][0] / 8]
            heights += [y for p in late for y in p[2:] if y is not None]
    for axes, label in zip(panels, ("training tokens", "training seconds"), strict=True):
        axes.set(xlabel=label, ylabel="bits per byte")
        axes.grid(alpha=0.3)
        if heights:
            margin = 0.05 * (max(heights) - min(heights)) or 0.1
            axes.set_ylim(min(heights) - margin, max(heights) + margin)
    panels[0].xaxis.set_major_formatter(EngFormatter())


def draw_boards(boards: dict[str, list[str]], found: dict, quotes: list[dict], path: Path) -> None:
    """The boards of one dataset, a row of panels each.

    Args: boards {name without -bpb and -seconds: names of entries}; found tracks.json; quotes runs without logs
    """
    figure, panels = new_figure(len(boards), 3, (16, 4.3 * len(boards) + 0.5))
    for (board, names), three in zip(boards.items(), panels, strict=True):
        bpb = found["tracks"][f"{board}-bpb"]
        seconds = found["tracks"][f"{board}-seconds"]
        rows = [record_row(entry.BASELINES / name) for name in names]
        best = min(row.mean("val_bpb") for row in rows)
        near = [row for row in rows if row.mean("val_bpb") <= FAR * best]
        draw_curves(three[:2], near)
        for quote in quotes:
            if quote["track"] == f"{board}-bpb":
                cross = {"color": "0.25", "label": f"{quote['what'].split(',')[0]}, quoted"}
                three[0].plot(bpb["tokens"], quote["val_bpb"], "x", **cross)
                three[1].plot(quote["train_seconds"], quote["val_bpb"], "x", **cross)
        far = len(rows) - len(near)
        title = f"{far} more, {FAR - 1:.0%} or more above the best" if far else None
        three[0].legend(frameon=False, fontsize=8, loc="upper right", title=title)
        three[0].set_title(board, loc="left")

        # The last panel: a dot for each seed.
        for i, row in enumerate(near):
            x = row.values("train_seconds")
            three[2].plot(x, row.values("val_bpb"), "o", color=f"C{i % 10}", mec="white")
        if target := seconds["target_bpb"]:
            three[2].axhline(target, color="0.4", ls="--", label=f"target by seconds: {target}")
        if limit := bpb["max_seconds"]:
            label = f"limit with fixed tokens: {limit} s"
            three[2].axvline(limit, color="0.4", ls=":", label=label)
        three[2].margins(0.15)
        three[2].set(xlabel="training seconds of the whole run", ylabel="val bpb")
        three[2].set_title("what is ranked: one dot a seed", loc="left", fontsize=10)
        three[2].legend(frameon=False, fontsize=8)
        three[2].grid(alpha=0.3)
    figure.supxlabel(NOTE, fontsize=9)
    figure.savefig(path, dpi=110)
