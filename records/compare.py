"""Compares entries and run directories: table, differences, plot.

    python records/compare.py out/a_* out/b_* --baseline "a*"         runs that differ only in their seed form one row
    python records/compare.py 2026-11-23_first-p34 --target 0.738 --plot curves.png

In a folder of runs, only finished ones count.
"""

import argparse
import fnmatch
import json
import os
from pathlib import Path

import entry
import plots
import rules
import text
from files import UserError
from metrics import METRICS, read_core, read_log, run_metrics
from plots import Row, points, record_row
from significance import p_below, sample_sd, welch

# ==== reading


def run_row(run_dir: Path) -> tuple[str, Row]:
    """(what runs of one row share, a row of this run alone)."""
    log = read_log(run_dir / "log.jsonl")
    run = entry.read_description(run_dir)
    machine = run["machine"]
    config = run["config"]
    if problems := rules.check_log(log, config):
        raise UserError(f"{run_dir} is not a finished run ({problems[0]})")
    data = run["dataset_fingerprint"] or config["data"]
    shared = rules.recipe_of(config), run["dataset_fingerprint"], rules.comparable(machine)
    table = run_dir / "core.csv"
    core = read_core(table)[1] if table.is_file() else None
    metrics = {"seed": config["seed"], **run_metrics(log), "core": core}
    about = run_dir.name, machine["device"], machine["num_devices"], data
    gpus = [machine["gpu_uuid"]] if machine.get("gpu_uuid") else None
    session = entry.session(run["starts"][0]["date"][:10], machine["device"], gpus)
    return json.dumps(shared), Row(*about, [metrics], [points(log)], session)


def read_rows(paths: list[Path]) -> list[Row]:
    """One row for each entry, and one for each set of runs that differ in their seed only."""
    rows = []
    groups = {}
    for path in paths:
        # Entries, and finished runs: a run writes its result last.
        inside = sorted(p.parent for p in [*path.glob("*/record.json"), *path.glob("*/result.json")])
        if (path / "record.json").is_file():
            rows.append(record_row(path))
        elif (path / "log.jsonl").is_file():
            key, row = run_row(path)
            groups.setdefault(key, []).append(row)
        elif inside:
            rows += read_rows(inside)
        else:
            raise UserError(f"{path} holds no entry and no finished run; pass the folder of one")
    return rows + [merge_seeds(group) for group in groups.values()]


def merge_seeds(group: list[Row]) -> Row:
    """One row of several with a run each. Raises UserError if two of them have the same seed."""
    names = [row.name for row in group]
    first = group[0]
    name = os.path.commonprefix(names).rstrip("_-. ") or f"{first.name} and more"
    runs = [row.runs[0] for row in group]
    curves = [row.curves[0] for row in group]
    if len({run["seed"] for run in runs}) < len(runs):
        raise UserError(f"{', '.join(names)} are runs of one recipe, some with the same seed; pass one of each")
    session = None
    if all(row.session for row in group) and len({row.session[0] for row in group}) == 1:
        gpus = [gpu for row in group for gpu in row.session[1:]]
        session = entry.session(first.session[0], first.device, gpus)
    return Row(name, first.device, first.num_devices, first.data, runs, curves, session)


# ==== tables


def main_table(rows: list[Row], target: float | None) -> str:
    """A line for each row, with the means of its runs, and the p that they are below a target in bits per byte."""
    logged = {key for key in METRICS for row in rows if row.values(key)}
    columns = [key for key in METRICS if key in logged and key != "steps"]
    lines = []
    for row in rows:
        line = {"": row.name, "runs": str(len(row.runs))}
        for key in columns:
            title, form = METRICS[key]
            line[title] = text.format_value(row.mean(key), form)
            if key == "val_bpb":
                line["sd"] = text.format_value(sample_sd(row.values(key)), form)
        line["hardware"] = f"{row.num_devices} x {row.device}"
        if target:
            p = p_below(row.values("val_bpb"), target)
            line[f"p (below {target:g})"] = text.p_text(p).removeprefix("= ")
        lines.append(line)
    return text.table(list(lines[0]), [list(line.values()) for line in lines])


def differences(rows: list[Row], base: Row) -> str:
    """Each row against one: bits per byte on the same dataset, seconds on the same hardware.

    Seconds are tested where both rows ran on one GPU in one session; elsewhere the test would find
    the GPU or the day.
    """
    lines = []
    for row in rows:
        if row is base:
            continue
        same_hardware = (row.device, row.num_devices) == (base.device, base.num_devices)
        same_data = row.data == base.data
        bpb = difference(row, base, "val_bpb", "" if same_data else "on another dataset")
        seconds = difference(row, base, "train_seconds", "" if same_hardware else "other hardware")
        lines.append([row.name, bpb, seconds])
    table = text.table([f"minus {base.name}", "val bpb", "training seconds"], lines, 3)
    note = "Differences of means, 95 % intervals and two-sided p of Welch's t-test; negative is better."
    return f"{table}\n\n{note}"


def difference(row: Row, base: Row, metric: str, reason: str) -> str:
    """A cell of differences(); `reason` says why two rows do not compare."""
    if reason:
        return f"not compared: {reason}"
    test = welch(row.values(metric), base.values(metric))
    if metric == "val_bpb":
        return text.difference_text(test, 5)
    if row.session is None or row.session != base.session:
        return text.difference_text({**test, "p": None}, 2, text.OTHER_SESSION)
    return text.difference_text(test, 2)


def find_row(rows: list[Row], pattern: str) -> Row:
    """The row whose name matches; if there is none, the entry of baselines/ that does."""

    def matches(name: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern) or name == Path(pattern).name

    matching = [row for row in rows if matches(row.name)]
    if not matching:
        matching = [record_row(folder) for folder in entry.folders() if matches(folder.name)]
    if len(matching) != 1:
        names = ", ".join(row.name for row in matching or rows)
        raise UserError(f"--baseline {pattern} matches {len(matching)} rows and must match one; there are {names}")
    return matching[0]


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("folders", metavar="FOLDER", type=entry.find, nargs="+", help="entries, run directories, or folders of them")
    add("--baseline", metavar="NAME", help='row to compare the others with, e.g. "*first*" (default: the first)')
    add("--target", type=float, metavar="BPB", help="bits per byte, for a column with the p of a lower mean")
    add("--plot", type=Path, metavar="FILE", help="file for a plot of bits per byte (.png, .svg)")
    args = parser.parse_args(argv)
    rows = read_rows(args.folders)
    base = find_row(rows, args.baseline) if args.baseline else rows[0]
    if base not in rows:
        rows.insert(0, base)
    blocks = [main_table(rows, args.target)]
    if len(rows) > 1:
        blocks.append(differences(rows, base))
    if args.plot:
        plots.draw_rows(rows, args.plot)
        blocks.append(f"plot: {args.plot}")
    print("\n\n".join(blocks))


if __name__ == "__main__":
    main()
