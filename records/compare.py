"""Compares entries, run directories and the logs of other projects: table, differences, plot.

    python records/compare.py                                         baselines/, by dataset and hardware
    python records/compare.py out/a_* out/b_* --baseline "a*"         runs that differ in their seed only are one row
    python records/compare.py baselines/2026-11-23_first-p34 --target 0.738 --price 3.50 --plot curves.png
    python records/compare.py baselines/2026-11-23_first-p34 logs/*.txt --tokens-per-step 524288 --bytes-per-token 4.6

Logs of modded-nanogpt state neither tokens nor bits per byte: --tokens-per-step gives the former
(comma-separated for equal parts of the run), --bytes-per-token of its validation text the latter.
Logs of nanochat state both; their clock starts after step 10. Bits per byte of different texts are
not comparable. In a folder of runs, finished ones count.
"""

import argparse
import fnmatch
import json
import math
import os
import re
from pathlib import Path

import entry
import files
import numpy as np
import plots
import rules
import text
import tracks
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
    if problems := rules.check_log(log, config, machine):
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


def number(pattern: str, log: str) -> float | None:
    """The number that a pattern finds in a log, with or without commas."""
    found = re.search(pattern, log, re.M)
    return float(found[1].replace(",", "")) if found else None


def modded_row(path: Path, log: str, args: argparse.Namespace) -> tuple[str, Row]:
    """A log of modded-nanogpt: `step:250/1285 val_loss:4.4890 train_time:7925ms step_avg:31.70ms`."""
    sizes = [int(size) for size in args.tokens_per_step.split(",") if size]
    bytes_per_token = args.bytes_per_token
    found = re.findall(r"^step:(\d+)/(\d+) (?:val_loss:([\d.]+) )?train_time:(\d+)ms", log, re.M)
    last, total, loss, milliseconds = found[-1]
    if last != total or not loss:
        raise UserError(f"{path} is the log of a run that did not finish: step {last} of {total}")
    total = int(total)
    seconds = int(milliseconds) / 1e3

    def tokens(step: int) -> int:
        """Steps in equal parts, one for each number of tokens."""
        part = total / len(sizes)
        steps = np.clip(step - part * np.arange(len(sizes)), 0, part)
        return round(float(steps @ sizes))

    def bpb(nats: str) -> float | None:
        return float(nats) / math.log(2) / bytes_per_token if bytes_per_token else None

    count = tokens(total) if sizes else None
    memory = number(r"^peak memory allocated: (\d+) MiB", log)
    run = dict.fromkeys(METRICS)
    run |= {"val_bpb": bpb(loss), "steps": total, "tokens": count, "train_seconds": seconds}
    run |= {"tokens_per_second": count and count / seconds}
    run |= {"peak_memory_gib": memory and memory / 1024}
    curve = []
    for step, _, nats, ms in found:
        if nats and sizes and bytes_per_token:
            curve.append((tokens(int(step)), int(ms) / 1e3, None, bpb(nats)))
    devices = re.findall(r"^\|\s+\d+\s+(\S.*?)\s+(?:On|Off)\s+\|", log, re.M) or ["unknown"]
    row = Row(path.stem, devices[0], len(devices), "modded-nanogpt", [run], [curve])
    return json.dumps(["modded-nanogpt", str(path.parent), total, row.device, row.num_devices]), row


def nanochat_row(path: Path, log: str) -> tuple[str, Row]:
    """A log of nanochat: `step 00250/02520 (9.92%) | loss: 3.1 | ... | dt: 31.70ms | tok/sec: 1,234 | ...`."""
    step_line = r"^step (\d+)/(\d+) .*?\| dt: ([\d.]+)ms \| tok/sec: [\d,]+ \| (?:bf16_)?mfu: ([\d.]+)"
    found = re.findall(step_line, log, re.M)
    batch = number(r"^Total batch size ([\d,]+)", log)
    if not found or not batch:
        what = "total batch size" if found else "step with loss, dt, tok/sec and mfu"
        raise UserError(f"{path} has no {what}; give the whole log")
    batch = int(batch)
    steps, totals, milliseconds, mfu = np.array(found, float).T
    total = int(totals[0])

    # The clock by finished steps; a line is numbered by the steps before it.
    taken = np.where(steps > 10, milliseconds / 1e3, 0.0)
    seconds = {0: 0.0, **dict(zip((steps + 1).tolist(), np.cumsum(taken).tolist(), strict=True))}
    clock = float(taken.sum())
    vals = re.findall(r"^Step (\d+) \| Validation bpb: ([\d.]+)", log, re.M)
    ends = [i for i, (step, _) in enumerate(vals) if int(step) == total]
    if not ends or not clock or total not in seconds:
        raise UserError(f"{path} is the log of a run that did not finish, or of less than 11 steps")
    vals = vals[: ends[0] + 1]  # finetuning behind it counts from 0 again

    memory = number(r"^Peak memory usage: ([\d.]+)MiB", log)
    of_all = number(r"^Tokens / micro-batch: .*?([\d,]+)$", log)
    of_one = number(r"^Tokens / micro-batch / rank: .*?([\d,]+)$", log)
    core = number(rf"^Step 0*{total} \| CORE metric: ([-\d.]+)", log)
    run = {"val_bpb": float(vals[-1][1]), "core": core, "steps": total, "tokens": total * batch}
    run |= {"train_seconds": clock, "tokens_per_second": (total - 11) * batch / clock}
    run |= {"mfu": float(mfu @ taken) / 100 / clock, "peak_memory_gib": memory and memory / 1024}
    curve = []
    for step, bpb in vals:
        if int(step) in seconds:
            curve.append((int(step) * batch, seconds[int(step)], None, float(bpb)))
    gpu = re.search(r"^GPU: (.+?) \|", log, re.M)
    ranks = int(of_all // of_one) if of_all and of_one else 1
    row = Row(path.stem, gpu[1] if gpu else "unknown", ranks, "nanochat", [run], [curve])
    return json.dumps(["nanochat", str(path.parent), total, batch, row.device, ranks]), row


def foreign_row(path: Path, args: argparse.Namespace) -> tuple[str, Row]:
    log = path.read_text(encoding="utf-8", errors="replace")
    if re.search(r"^step:\d+/\d+ (val_loss:[\d.]+ )?train_time:", log, re.M):
        return modded_row(path, log, args)
    if re.search(r"^step \d+/\d+ \(.*\| dt: ", log, re.M):
        return nanochat_row(path, log)
    raise UserError(f"{path} is no log of modded-nanogpt or nanochat, and no run directory or entry")


def read_rows(paths: list[Path], args: argparse.Namespace) -> list[Row]:
    """One row for each entry, and one for each set of runs that differ in their seed only."""
    rows = []
    groups = {}
    for path in paths:
        # Entries, and finished runs: a run writes its result last.
        inside = sorted(p.parent for p in [*path.glob("*/record.json"), *path.glob("*/result.json")])
        if (path / "record.json").is_file():
            rows.append(record_row(path))
        elif path.is_dir() and not (path / "log.jsonl").is_file() and inside:
            rows += read_rows(inside, args)
        else:
            key, row = foreign_row(path, args) if path.is_file() else run_row(path)
            groups.setdefault(key, []).append(row)
    return rows + [merge_seeds(group) for group in groups.values()]


def merge_seeds(group: list[Row]) -> Row:
    """One row of several with a run each. Raises UserError if two of them have the same seed."""
    names = [row.name for row in group]
    first = group[0]
    name = os.path.commonprefix(names).rstrip("_-. ") or f"{first.name} and more"
    runs = [row.runs[0] for row in group]
    curves = [row.curves[0] for row in group]
    seeds = [run["seed"] for run in runs if "seed" in run]  # logs of other projects state none
    if len(set(seeds)) < len(seeds):
        raise UserError(f"{', '.join(names)} are runs of one recipe, some with the same seed; name one of each")
    session = None
    if all(row.session for row in group) and len({row.session[0] for row in group}) == 1:
        gpus = [gpu for row in group for gpu in row.session[1:]]
        session = entry.session(first.session[0], first.device, gpus)
    return Row(name, first.device, first.num_devices, first.data, runs, curves, session)


# ==== tables


def main_table(rows: list[Row], price: float | None, target: float | None) -> str:
    """A line for each row, with the means of its runs.

    Args: price of a GPU in USD per hour; target in bits per byte
    """
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
        if price:
            line["cost"] = f"${row.mean('train_seconds') * row.num_devices / 3600 * price:.4f}"
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
    if reason or not row.values(metric) or not base.values(metric):
        return f"not compared: {reason or 'not stated'}"
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
    add("folders", metavar="FOLDER", type=Path, nargs="*", help="entries, run directories, logs (default baselines/)")
    add("--baseline", metavar="NAME", help='row to compare the others with, e.g. "*first*"')
    add("--price", type=float, metavar="USD", help="price of one GPU for an hour, for a column of costs")
    add("--target", type=float, metavar="BPB", help="bits per byte, for a column with the p of a lower mean")
    add("--plot", type=Path, metavar="FILE", help="file for a plot of bits per byte (.png, .svg)")
    add("--tokens-per-step", metavar="N[,N]", default="", help="tokens of a step in logs of modded-nanogpt")
    add("--bytes-per-token", type=float, metavar="X", help="bytes of a validation token in logs of modded-nanogpt")
    args = parser.parse_args(argv)
    if missing := [str(path) for path in args.folders if not path.exists()]:
        raise UserError(f"{', '.join(missing)} does not exist; name entries, run directories or logs")
    rows = read_rows(args.folders or [files.BASELINES], args)
    base = find_row(rows, args.baseline) if args.baseline else None
    if base and base not in rows:
        rows.insert(0, base)
    # Of all entries, those of one dataset and hardware share a table, since others do not compare.
    datasets = {dataset["fingerprint"]: name for name, dataset in tracks.read()["datasets"].items()}
    groups = {}
    for row in rows:
        hardware = f"{row.num_devices} x {row.device}"
        title = "" if args.folders else f"{datasets.get(row.data, row.data)} on {hardware}\n\n"
        groups.setdefault(title, []).append(row)
    blocks = [title + main_table(group, args.price, args.target) for title, group in groups.items()]
    if base:
        blocks.append(differences(rows, base))
    if args.plot:
        plots.draw_rows(rows, args.plot)
        blocks.append(f"plot: {args.plot}")
    print("\n\n".join(blocks))


if __name__ == "__main__":
    main()
