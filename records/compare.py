"""Compares records, run directories and the logs of other projects: table, differences, picture, leaderboard.

    python records/compare.py                                         all of baselines/
    python records/compare.py out/a_* out/b_* --against "a*"          runs that differ in their seed only are one row
    python records/compare.py baselines/2026-11-23_first-p34 --target 0.738 --price 3.50 --plot curves.png
    python records/compare.py baselines/2026-11-23_first-p34 logs/*.txt --tokens-per-step 524288 --bytes-per-token 4.6
    python records/compare.py --write                   the leaderboard in records/README.md, its pictures

A log of modded-nanogpt states neither tokens nor bits per byte: --tokens-per-step gives the one (several numbers with
commas: equal parts of the run), --bytes-per-token of its validation text the other. A log of nanochat states both; its
clock starts after step 10. Bits per byte of different texts only look comparable.
"""

import argparse
import fnmatch
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import check
import leaderboard
import recipe
import record as rec


@dataclass
class Row:
    """Runs that differ in their seed only. A point of a curve is (tokens, seconds, training bpb, val bpb) or None."""

    name: str
    device: str
    num_devices: int
    data: str | None = (
        None  # fingerprint of the dataset, or what else says that bits per byte may be compared
    )
    runs: list[dict] = field(default_factory=list)  # figures, None where a log does not state them
    curves: list[list[tuple]] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        values = [run[key] for run in self.runs]
        return [] if None in values else values

    def mean(self, key: str) -> float | None:
        return fmean(self.values(key)) if self.values(key) else None


# ---- reading


def points(log: list[dict]) -> list[tuple]:
    val = {e["step"]: e["val_bpb"] for e in rec.split(log)[1]}
    return [
        (e["tokens"], e["train_seconds"], e["bpb"], val.get(e["step"])) for e in rec.split(log)[0]
    ]


def record_row(folder: Path) -> Row:
    record = rec.read_record(folder)
    row = Row(folder.name, record["hardware"]["device"], record["hardware"]["num_devices"],
              record["dataset"]["fingerprint"], record["runs"])  # fmt: skip
    row.curves = [points(rec.read_log(folder / run["log"])) for run in record["runs"]]
    return row


def run_row(run_dir: Path) -> tuple[str, Row]:
    """(what runs of one row share, a row of this run alone)."""
    log = rec.read_log(run_dir / "log.jsonl")
    try:
        run = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        machine, config = run["machine"], run["config"]
        if problems := rec.check_log(log, config):
            raise rec.Unreadable(problems[0])
        core = rec.core_score(run_dir / "core.csv") if (run_dir / "core.csv").is_file() else None
        # What a record allows to differ: see check.difference().
        free = (*recipe.PLACE_FIELDS, *recipe.INTERVAL_FIELDS)
        shared = {k: v for k, v in config.items() if k not in free}
        versions = [machine.get(k) for k in check.SAME_MACHINE]
        key = json.dumps([shared, run["dataset_fingerprint"], *versions])
        data = run["dataset_fingerprint"] or config["data"]
        figures = {"seed": config["seed"], **rec.figures(log), "core": core}
    except (OSError, KeyError, TypeError, ValueError, rec.Unreadable) as error:
        raise rec.Unreadable(f"{run_dir} is not a finished run ({error})") from None
    return key, Row(
        run_dir.name, machine["device"], machine["num_devices"], data, [figures], [points(log)]
    )


def modded_row(
    path: Path, text: str, tokens_per_step: list[int], bytes_per_token: float | None
) -> tuple[str, Row]:
    """A log of modded-nanogpt: `step:250/1285 val_loss:4.4890 train_time:7925ms step_avg:31.70ms`."""
    steps = [(int(a), int(b), loss and float(loss), int(ms) / 1e3) for a, b, loss, ms in re.findall(
        r"^step:(\d+)/(\d+) (?:val_loss:([\d.]+) )?train_time:(\d+)ms", text, re.M)]  # fmt: skip
    last, total, loss, seconds = steps[-1]
    if last != total or not loss:
        raise rec.Unreadable(
            f"{path} is the log of a run that did not finish: step {last} of {total}"
        )
    cards = re.findall(r"^\|\s+\d+\s+(\S.*?)\s+(?:On|Off)\s+\|", text, re.M)
    memory = re.search(r"^peak memory allocated: (\d+) MiB", text, re.M)

    def tokens(step: int) -> int:
        """Steps in equal parts, one for each number of tokens."""
        part = total / len(tokens_per_step)
        return round(
            sum(n * min(max(step - i * part, 0), part) for i, n in enumerate(tokens_per_step))
        )

    def bpb(nats: float) -> float | None:
        return nats / math.log(2) / bytes_per_token if bytes_per_token else None

    count = tokens(total) if tokens_per_step else None
    run = {**dict.fromkeys(rec.FIGURES), "val_bpb": bpb(loss), "steps": total, "tokens": count,
           "train_seconds": seconds, "tokens_per_second": count and count / seconds,
           "peak_memory_gib": int(memory[1]) / 1024 if memory else None}  # fmt: skip
    curve = [
        (tokens(a), s, None, bpb(nats))
        for a, _, nats, s in steps
        if nats and tokens_per_step and bytes_per_token
    ]
    row = Row(
        path.stem,
        cards[0] if cards else "unknown",
        len(cards) or 1,
        "modded-nanogpt",
        [run],
        [curve],
    )
    return json.dumps(["modded-nanogpt", str(path.parent), total, row.device, row.num_devices]), row


def nanochat_row(path: Path, text: str) -> tuple[str, Row]:
    """A log of nanochat: `step 00250/02520 (9.92%) | loss: 3.1 | ... | dt: 31.70ms | tok/sec: 1,234 | ...`."""
    found = re.findall(r"^step (\d+)/(\d+) .*?\| loss: ([\d.]+) .*?\| dt: ([\d.]+)ms \| tok/sec: ([\d,]+) "
                       r"\| (?:bf16_)?mfu: ([\d.]+)", text, re.M)  # fmt: skip
    if not found:
        raise rec.Unreadable(
            f"{path} has no step with loss, dt, tok/sec and mfu; give the whole log"
        )
    total, batch = int(found[0][1]), re.search(r"^Total batch size ([\d,]+)", text, re.M)
    if not batch:
        raise rec.Unreadable(f"{path} does not state its total batch size; give the whole log")
    batch = int(batch[1].replace(",", ""))
    seconds, clock, busy = (
        {0: 0.0},
        0.0,
        0.0,
    )  # by finished steps; a line is numbered by the steps before it
    for step, *_, dt, _, mfu in found:
        if int(step) > 10:
            clock, busy = clock + float(dt) / 1e3, busy + float(mfu) / 100 * float(dt) / 1e3
        seconds[int(step) + 1] = clock
    vals = [
        (int(step), float(bpb))
        for step, bpb in re.findall(r"^Step (\d+) \| Validation bpb: ([\d.]+)", text, re.M)
    ]
    ends = [
        i for i, (step, _) in enumerate(vals) if step == total
    ]  # finetuning behind it counts from 0 again
    if not ends or not clock or total not in seconds:
        raise rec.Unreadable(
            f"{path} is the log of a run that did not finish, or of less than 11 steps"
        )
    core = re.findall(rf"^Step 0*{total} \| CORE metric: ([-\d.]+)", text, re.M)
    memory = re.search(r"^Peak memory usage: ([\d.]+)MiB", text, re.M)
    card = re.search(r"^GPU: (.+?) \|", text, re.M)
    sizes = [
        re.search(rf"^Tokens / micro-batch{rank}: .*?([\d,]+)$", text, re.M)
        for rank in ("", " / rank")
    ]
    ranks = (
        int(sizes[0][1].replace(",", "")) // int(sizes[1][1].replace(",", "")) if all(sizes) else 1
    )
    run = {"val_bpb": vals[ends[0]][1], "core": float(core[0]) if core else None, "steps": total,
           "tokens": total * batch, "train_seconds": clock, "tokens_per_second": (total - 11) * batch / clock,
           "mfu": busy / clock, "peak_memory_gib": float(memory[1]) / 1024 if memory else None}  # fmt: skip
    curve = [
        (step * batch, seconds[step], None, bpb)
        for step, bpb in vals[: ends[0] + 1]
        if step in seconds
    ]
    row = Row(path.stem, card[1] if card else "unknown", ranks, "nanochat", [run], [curve])
    return json.dumps(["nanochat", str(path.parent), total, batch, row.device, ranks]), row


def foreign_row(path: Path, args: argparse.Namespace) -> tuple[str, Row]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if re.search(r"^step:\d+/\d+ (val_loss:[\d.]+ )?train_time:", text, re.M):
        return modded_row(path, text, args.tokens_per_step, args.bytes_per_token)
    if re.search(r"^step \d+/\d+ \(.*\| dt: ", text, re.M):
        return nanochat_row(path, text)
    raise rec.Unreadable(
        f"{path} is no log of modded-nanogpt or nanochat, and no run directory or record"
    )


def finished(folder: Path) -> bool:
    """A record, or a run with a report, which is written last; says so if it is neither."""
    if (folder / "record.json").is_file() or (folder / "report.md").is_file():
        return True
    print(f"left out: {folder} has no report.md, so its run is not finished", file=sys.stderr)
    return False


def check_seeds(group: list[Row]) -> None:
    """Ends the program if two runs of a row have one seed: a run and its copy are no two samples."""
    names = {}
    for row in group:
        seed = row.runs[0].get("seed")  # logs of other projects state none
        if seed is not None and seed in names:
            rec.fail(
                f"{names[seed]} and {row.name} are runs of one recipe with the same seed {seed}; name one of them"
            )
        names[seed] = row.name


def read_rows(paths: list[Path], args: argparse.Namespace) -> list[Row]:
    """One row for each record, and one for each set of runs that differ in their seed only."""
    rows, groups = [], {}
    for path in paths:
        inside = sorted(
            p.parent for name in ("record.json", "log.jsonl") for p in path.glob(f"*/{name}")
        )
        if (path / "record.json").is_file():
            rows.append(record_row(path))
        elif path.is_dir() and not (path / "log.jsonl").is_file() and inside:
            rows += read_rows([folder for folder in inside if finished(folder)], args)
        else:
            key, row = foreign_row(path, args) if path.is_file() else run_row(path)
            groups.setdefault(key, []).append(row)
    for group in groups.values():
        check_seeds(group)
        first = group[0]
        name = (
            os.path.commonprefix([row.name for row in group]).rstrip("_-. ")
            or f"{first.name} and more"
        )
        runs, curves = (
            [x for row in group for x in getattr(row, part)] for part in ("runs", "curves")
        )
        rows.append(Row(name, first.device, first.num_devices, first.data, runs, curves))
    return rows


# ---- tables


def cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main_table(rows: list[Row], price: float | None, target: float | None) -> str:
    shown = [
        key
        for key in rec.FIGURES
        if key != "steps" and any(row.mean(key) is not None for row in rows)
    ]
    titles, lines = ["", "runs"], []
    for key in shown:
        titles += [rec.FIGURES[key][0], *(["sd"] if key == "val_bpb" else [])]
    titles += [
        "hardware",
        *(["cost"] if price else []),
        *([f"p (below {target:g})"] if target else []),
    ]
    for row in rows:
        line = [row.name, str(len(row.runs))]
        for key in shown:
            line.append(cell(row.mean(key), rec.FIGURES[key][1]))
            if key == "val_bpb":
                line.append(
                    cell(stdev(row.values(key)) if len(row.values(key)) > 1 else None, ".5f")
                )
        line.append(f"{row.num_devices} x {row.device}")
        if price:
            line.append(f"${row.mean('train_seconds') * row.num_devices / 3600 * price:.4f}")
        if target:
            line.append(rec.p_text(rec.below(row.values("val_bpb"), target)).removeprefix("= "))
        lines.append(line)
    return rec.table(titles, lines)


def differences(rows: list[Row], base: Row) -> str:
    """Each row against one: bits per byte on the same dataset, seconds on the same cards."""
    lines = []
    for row in rows:
        if row is base:
            continue
        words = []
        same = row.data == base.data
        for key, digits, ok, why in (
            ("val_bpb", 5, same, "on another dataset"),
            (
                "train_seconds",
                2,
                (row.device, row.num_devices) == (base.device, base.num_devices),
                "other hardware",
            ),
        ):
            values = row.values(key), base.values(key)
            if not ok or not all(values):
                words.append(f"not compared: {why if not ok else 'not stated'}")
            else:
                words.append(rec.difference_text(rec.welch(*values), digits))
        lines.append([row.name, *words])
    return rec.table([f"minus {base.name}", "val bpb", "training seconds"], lines, 3)


def find_row(rows: list[Row], pattern: str, args: argparse.Namespace) -> Row:
    """The row whose name matches; records of baselines/ may be named even if they are not among the rows."""

    def matching(names):
        return [n for n in names if fnmatch.fnmatchcase(n, pattern) or n == Path(pattern).name]

    found = [row for row in rows if matching([row.name])]
    if not found:
        folders = [
            p.parent
            for p in sorted(rec.BASELINES.glob("*/record.json"))
            if matching([p.parent.name])
        ]
        found = read_rows(folders, args)
    if len(found) != 1:
        names = ", ".join(row.name for row in found or rows)
        rec.fail(
            f"--against {pattern} matches {len(found)} rows and must match one; there are {names}"
        )
    return found[0]


# ---- picture


def plot(rows: list[Row], path: Path) -> None:
    """Bits per byte against tokens and against seconds: training as thin lines, validation as dots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8), sharey=True, layout="constrained")
    colours, heights = plt.get_cmap("tab10").colors, []
    for number, row in enumerate(rows):
        colour, best = colours[number % len(colours)], row.mean("val_bpb")
        name = f"{row.name}, {row.num_devices} x {row.device}" + (f": {best:.4f}" if best else "")
        panels[0].plot([], [], color=colour, marker="o", ms=4, label=name)
        for curve in row.curves:
            for x, axes in enumerate(panels):
                train, val = ([(p[x], p[i]) for p in curve if p[i] is not None] for i in (2, 3))
                if train:
                    axes.plot(*zip(*train, strict=True), color=colour, lw=0.8, alpha=0.45)
                if val:
                    axes.plot(
                        *zip(*val, strict=True),
                        color=colour,
                        lw=1.2 if len(val) > 1 else 0,
                        marker="o",
                        ms=4,
                    )
            # The first twelfth of a run is far above the rest, which is what one wants to see.
            heights += [
                y for p in curve if p[0] >= curve[-1][0] / 12 for y in p[2:] if y is not None
            ]
    if heights:
        margin = 0.05 * (max(heights) - min(heights)) or 0.1
        panels[0].set_ylim(min(heights) - margin, max(heights) + margin)
    for axes, label in zip(panels, ("training tokens", "training seconds"), strict=True):
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    panels[0].xaxis.set_major_formatter(EngFormatter())
    panels[0].set_ylabel("bits per byte (dots: validation, thin: training)")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no such folder, or an ending that is no picture
        rec.fail(f"{path} cannot be written: {error}")
    plt.close(figure)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", metavar="FOLDER", type=Path, nargs="*", help="default: baselines/")
    add("--against", metavar="NAME", help='row to compare the others with, e.g. "*first*"')
    add("--price", type=float, metavar="USD", help="of one GPU for an hour: adds the cost")
    add("--target", type=float, metavar="BPB", help="adds the one-sided p of a lower mean")
    add("--plot", type=Path, metavar="FILE", help="picture of bits per byte (.png, .svg)")
    add("--tokens-per-step", type=numbers, default=[], metavar="N[,N]", help="modded-nanogpt")
    add("--bytes-per-token", type=float, metavar="X", help="modded-nanogpt: of validation text")
    add("--write", action="store_true", help="update records/README.md and the pictures beside it")
    args = parser.parse_args(argv)
    if args.write:
        try:
            leaderboard.write()
        except rec.Unreadable as error:
            rec.fail(str(error))
        return
    try:
        if missing := [str(path) for path in args.folders if not path.exists()]:
            rec.fail(f"{', '.join(missing)} does not exist; name records, run directories or logs")
        rows = read_rows(args.folders or [rec.BASELINES], args)
        base = find_row(rows, args.against, args) if args.against else None
    except (OSError, rec.Unreadable) as error:
        rec.fail(str(error))
    if base and base not in rows:
        rows.insert(0, base)
    blocks = [main_table(rows, args.price, args.target)]
    if base:
        blocks.append(differences(rows, base))
        blocks.append(
            "Differences of means, 95 % intervals and two-sided p of Welch's t-test; negative is better."
        )
    if args.plot:
        plot(rows, args.plot)
        blocks.append(f"picture: {args.plot}")
    print("\n\n".join(blocks))


if __name__ == "__main__":
    main()
