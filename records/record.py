"""What a record is: its files, the figures that follow from its logs, and the statistics on them.

add.py, verify.py and compare.py compute every figure with this file, from log.jsonl and core.csv of the runs alone.
A record is a folder of baselines/; README.md beside this file explains what it holds and what the figures mean.
Records of format 1 are those from before 2026-11-23. Those of format 2 also hold run_SEED.json, what config.json of
each run stated, and everything in record.json follows from these files.
"""

import csv
import difflib
import functools
import gzip
import hashlib
import json
import math
import re
import zlib
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NoReturn

from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ROOT / "baselines"
TRACKS = ("small", "medium")
CORE_TASKS = 22
BEGIN = "<!-- figures: written by records/add.py, checked by records/verify.py; do not edit -->"
END = "<!-- /figures -->"

# Figures of a run: title and format in tables.
FIGURES = {
    "val_bpb": ("val bpb", ".5f"), "core": ("CORE", ".4f"), "steps": ("steps", ",.0f"), "tokens": ("tokens", ",.0f"),
    "train_seconds": ("training seconds", ",.2f"), "tokens_per_second": ("tokens/s", ",.0f"), "mfu": ("MFU", ".1%"),
    "peak_memory_gib": ("peak memory GiB", ".2f"),
}  # fmt: skip

# Classes of cards. Free: what notebook services offer without charge.
CLASSES = {
    "Hopper": r"\b(H100|H200|H800|H20|GH200)\b", "Ampere": r"\b(A100|A800|A40|A30|A10|A6000|RTX 30\d\d)\b",
    "free GPU": r"\b(T4|P100)\b",
}  # fmt: skip


class Unreadable(Exception):
    """A file of a run or a record that is not what it should be. The message is one sentence."""


def fail(message: str) -> NoReturn:
    """Ends the program with one sentence on stderr and exit code 1."""
    raise SystemExit(f"error: {message}")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def device_class(device: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, device)), "other")


# ---- logs and what follows from them


def read_log(path: Path) -> list[dict]:
    """Entries of a log.jsonl or log.jsonl.gz. Raises Unreadable if it cannot be read."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Unreadable(f"{path.name} cannot be read ({error})") from None
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entries.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise Unreadable(f"{path.name}: line {number} is not a JSON object") from None
    return entries


def split(entries: list[dict]) -> tuple[list[dict], list[dict]]:
    """(training steps, validations) of a log."""
    train = [e for e in entries if "loss" in e]
    val = [e for e in entries if "val_bpb" in e]
    return train, val


def planned_steps(config: dict) -> int:
    """Steps that a Config asks for: Config.num_steps of the training scripts, without importing one."""
    mean_packs = sum(row[0] * row[1] for row in config["stages"])
    return max(1, round(config["tokens"] / (mean_packs * config["pack_tokens"])))


def whole_steps(step_ms: float | None, seconds: float) -> bool:
    """Whether the time between two lines is a whole number of steps of the stated length."""
    if step_ms is None:
        return True
    if not isinstance(step_ms, int | float) or not step_ms > 0:
        return False
    steps = seconds * 1e3 / step_ms
    return steps >= 0.5 and math.isclose(steps, round(steps), rel_tol=1e-8)


def check_log(entries: list[dict], config: dict | None = None) -> list[str]:
    """What is wrong with a log: it must be complete, it must grow, and it must agree with the totals and the Config."""
    train, val = split(entries)
    if not train or not val:
        return [f"no {'validation' if train else 'training step'} is logged"]
    keys = {"step", "tokens", "train_seconds"}
    for entry in entries:
        needed = keys | (
            {"loss", "bpb", "tokens_per_second", "mfu", "memory_gib"}
            if "loss" in entry
            else {"val_bpb"}
        )
        for key in sorted(needed):
            value = entry.get(key)
            if not isinstance(value, int | float) or not math.isfinite(value):
                return [f"step {entry.get('step')}: {key} is {value}"]
    out, last = [], train[-1]["step"]
    if config and last != planned_steps(config):
        out.append(f"it ends at step {last} of {planned_steps(config)}: the run is not finished")
    if val[-1]["step"] != last:
        out.append(
            f"the last validation is of step {val[-1]['step']}, the last training step is {last}"
        )
    before, at = dict.fromkeys(keys, 0), {e["step"]: e for e in train}
    bpb_per_nat = median(entry["bpb"] / entry["loss"] for entry in train if entry["loss"])
    for entry in train:
        where = f"step {entry['step']}"
        steps, tokens, seconds = (
            entry[key] - before[key] for key in ("step", "tokens", "train_seconds")
        )
        if min(steps, tokens, seconds) <= 0:
            out.append(f"{where}: step, tokens and train_seconds do not all grow")
        elif not math.isclose(entry["tokens_per_second"], tokens / seconds, rel_tol=1e-8):
            out.append(f"{where}: {entry['tokens_per_second']:.1f} tokens/s are stated, tokens and seconds since "
                       f"the line before give {tokens / seconds:.1f}")  # fmt: skip
        elif not whole_steps(entry.get("step_ms"), seconds):
            out.append(
                f"{where}: {entry['step_ms']} ms a step are stated, but no number of steps of that length takes "
                f"{seconds:.6f} s"
            )
        if not math.isclose(entry["bpb"], entry["loss"] * bpb_per_nat, rel_tol=1e-8):
            out.append(
                f"{where}: bpb {entry['bpb']:.5f} does not belong to the loss {entry['loss']:.5f}"
            )
        if config and steps > 0:
            sizes = [row[1] * config["pack_tokens"] for row in config["stages"]]
            if not min(sizes) <= tokens / steps <= max(sizes):
                out.append(
                    f"{where}: {tokens / steps:,.0f} tokens a step, the stage table has {sizes}"
                )
        before = entry
    for entry in val:
        trained = at.get(entry["step"], {})
        if any(entry[key] != trained.get(key) for key in keys):
            out.append(
                f"validation at step {entry['step']}: its tokens or seconds are not those of that step"
            )
    return out


def figures(entries: list[dict]) -> dict:
    """The figures of a finished run. MFU is the mean over the run, weighted by time."""
    train, val = split(entries)
    last, seconds = train[-1], [0.0, *(e["train_seconds"] for e in train)]
    busy = sum(
        e["mfu"] * (e["train_seconds"] - start) for e, start in zip(train, seconds, strict=False)
    )
    return {
        "val_bpb": val[-1]["val_bpb"], "core": None, "steps": last["step"], "tokens": last["tokens"],
        "train_seconds": last["train_seconds"], "tokens_per_second": last["tokens"] / last["train_seconds"],
        "mfu": busy / last["train_seconds"], "peak_memory_gib": max(e["memory_gib"] for e in train),
    }  # fmt: skip


def core_score(path: Path) -> float | None:
    """CORE from core.csv: the mean of the centered accuracies; None if there are not all 22 tasks."""
    try:
        centered = [float(row["centered"]) for row in core_rows(path)]
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{path.name} cannot be read ({error!r})") from None
    return fmean(centered) if len(centered) == CORE_TASKS else None


def core_items(path: Path) -> dict[str, str]:
    """How many items of each task core.csv covers."""
    try:
        return {row["task"]: row["items"] for row in core_rows(path)}
    except KeyError as error:
        raise Unreadable(f"{path.name} cannot be read ({error!r})") from None


def core_rows(path: Path) -> list[dict]:
    """The rows of the tasks in core.csv, which runs/score_core.py writes; pretraining wrote it up to 2026-11-22."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if row["task"] != "CORE"]
    except (OSError, KeyError, ValueError) as error:
        raise Unreadable(f"{path.name} cannot be read ({error!r})") from None


def summary(runs: list[dict]) -> dict:
    """{figure: {"mean", "sd"}} over the runs; sd is None for a single run."""
    out = {}
    for key in FIGURES:
        values = [run[key] for run in runs]
        if None not in values:
            out[key] = {"mean": fmean(values), "sd": stdev(values) if len(values) > 1 else None}
    return out


def loss_curve(logs: list[list[dict]]) -> list[dict]:
    """Means over the runs at each step that all of them logged; loss_sd is None for a single run."""
    trains = [{e["step"]: e for e in split(log)[0]} for log in logs]
    vals = [{e["step"]: e["val_bpb"] for e in split(log)[1]} for log in logs]
    rows = []
    for step in sorted(set.intersection(*map(set, trains))):
        entries = [train[step] for train in trains]
        losses = [e["loss"] for e in entries]
        rows.append({
            "step": step, "tokens": entries[0]["tokens"], "train_seconds": fmean(e["train_seconds"] for e in entries),
            "loss": fmean(losses), "loss_sd": stdev(losses) if len(losses) > 1 else None,
            "bpb": fmean(e["bpb"] for e in entries),
            "val_bpb": fmean(val[step] for val in vals) if all(step in val for val in vals) else None,
        })  # fmt: skip
    return rows


def curve_csv(logs: list[list[dict]]) -> str:
    def cell(value: float | None) -> str:
        if value is None:
            return ""
        return str(value) if isinstance(value, int) else f"{value:.6g}"

    rows = loss_curve(logs)
    lines = [",".join(rows[0])]
    for row in rows:
        lines.append(",".join(cell(value) for value in row.values()))
    return "\n".join(lines) + "\n"


def loss_noise(logs: list[list[dict]]) -> float | None:
    """Distance between seeds: sd of the loss over the runs divided by its mean, root mean square over steps."""
    if len(logs) < 2:
        return None
    return math.sqrt(fmean((row["loss_sd"] / row["loss"]) ** 2 for row in loss_curve(logs)))


# ---- statistics


def welch(new: list[float], old: list[float]) -> dict:
    """mean(new) - mean(old), its 95 % interval and the two-sided p of Welch's t-test.

    None where the test is not defined: a single run on one side, or no spread on both.
    """
    out = {"difference": fmean(new) - fmean(old), "low": None, "high": None, "p": None}
    if min(len(new), len(old)) > 1 and max(stdev(new), stdev(old)) > 0:
        test = stats.ttest_ind(new, old, equal_var=False)
        interval = test.confidence_interval(0.95)
        out |= {"low": float(interval.low), "high": float(interval.high), "p": float(test.pvalue)}
    return out


def below(values: list[float], target: float) -> float | None:
    """One-sided p of a t-test that the mean is below the target; None for a single run or without spread."""
    if len(values) < 2 or stdev(values) == 0:
        return None
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)


# ---- scripts


def sections(text: str) -> dict[str, str]:
    """Sections of a training script by name: the shared ones between their markers, the others behind their banner.

    Raises Unreadable if the markers are not intact.
    """
    parts, name, outer, shared = {}, "docstring", "between sections", False
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        marker = re.fullmatch(r" *# (>>>|<<<) shared: (.+)\n?", line)
        banner = re.match(r"# \d+\. ([A-Z ]+) -- ", line)
        if marker and marker[1] == ">>>":
            if shared or marker[2] in parts:
                raise Unreadable(
                    f"line {number}: the section {marker[2]} begins inside {name}, or for the second time"
                )
            name, shared = marker[2], True
        elif banner and not shared:
            name = outer = banner[1].strip().lower()
        if marker and marker[1] == "<<<" and (not shared or marker[2] != name):
            raise Unreadable(
                f"line {number}: the section {marker[2]} ends, but it is not the one that is open"
            )
        parts.setdefault(name, []).append(line)
        if marker and marker[1] == "<<<":
            name, shared = outer, False  # a section may share a part only
    if shared or len(parts) < 2:
        raise Unreadable(
            f"the section {name} has no end" if shared else "it has no shared sections"
        )
    return {name: "".join(lines) for name, lines in parts.items()}


@functools.lru_cache(maxsize=16)  # 15 ms; a check asks for those of one script several times
def section_hashes(text: str) -> dict[str, str]:
    return {
        name: hashlib.sha256(part.encode()).hexdigest() for name, part in sections(text).items()
    }


@functools.lru_cache(maxsize=16)  # some 50 ms for two scripts
def changed_lines(old: str, new: str) -> list[str]:
    """For each section that differs, e.g. "optimizer (+3 -1)"."""
    before = sections(old)
    after = sections(new)
    out = []
    for name in dict.fromkeys((*before, *after)):
        a = before.get(name, "").splitlines()
        b = after.get(name, "").splitlines()
        added = 0
        removed = 0
        codes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        for kind, a_start, a_end, b_start, b_end in codes:
            if kind != "equal":
                added += b_end - b_start
                removed += a_end - a_start
        if added or removed:
            out.append(f"{name} (+{added} -{removed})")
    return out


# ---- records


def read_record(folder: Path) -> dict:
    """record.json of a folder. Raises Unreadable if it is none."""
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        if record["format"] not in (1, 2):
            raise Unreadable(f"its format is {record['format']}, this program reads 1 and 2")
        names = [record["script"], *record["files"], *(run["log"] for run in record["runs"])]
        if record["format"] == 2:
            names += [run["run"] for run in record["runs"]]
        names += [run["core_table"] for run in record["runs"] if run["core_table"]]
        if record["args"]:
            names.append(record["args"])
        for name in (*names, *([record["against"]] if record["against"] else [])):
            if not isinstance(name, str) or Path(name).name != name:
                raise Unreadable(f"{name} is not the name of a file beside it")
        if not record["runs"]:
            raise Unreadable("it holds no runs")
    except (OSError, KeyError, TypeError, ValueError, Unreadable) as error:
        why = error if isinstance(error, Unreadable) else repr(error)
        raise Unreadable(f"{folder.name}/record.json cannot be read ({why})") from None
    return record


def track_name(record: dict) -> str:
    return record["track"] + (f", {record['args']}" if record["args"] else "")


def compare_records(record: dict, other: dict) -> dict:
    """Differences to another record: bits per byte, and seconds where both ran on the same cards."""
    out = {
        "val_bpb": welch(*([run["val_bpb"] for run in r["runs"]] for r in (record, other))),
        "train_seconds": None,
    }
    if all(record["hardware"][key] == other["hardware"][key] for key in ("device", "num_devices")):
        out["train_seconds"] = welch(
            *([run["train_seconds"] for run in r["runs"]] for r in (record, other))
        )
    return out


def facts(runs: list[dict]) -> dict:
    """What a record of format 2 states about its runs, from their run_SEED.json in the order of the seeds."""
    first = runs[0]
    machine = first["machine"]
    return {
        "date": max(run["date"] for run in runs),
        "flags": [word for word in first["flags"] if not word.startswith("@")],
        "dataset": {
            "name": first["data"],
            "fingerprint": first["dataset_fingerprint"],
            "vocab_size": first["config"]["vocab_size"],
        },
        "hardware": {key: machine.get(key) for key in ("device", "num_devices", "platform")},
        "versions": {
            key: machine[key]
            for key in ("python", "torch", "triton", "cuda", "numpy")
            if key in machine
        },
        "commit": first["commit"],
        "script_changed": first["script_changed"],
        "max_epochs": first["config"].get("max_epochs", 1),
        "config": first["config"],
        "scored": first["scored"],
        "absent": []
        if first["starts"]
        else ["the starts of each run, which its script did not write"],
    }


def read_run_file(path: Path) -> dict:
    """A run_SEED.json. Raises Unreadable if it cannot be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise Unreadable(f"{path.name} cannot be read ({error})") from None


def recompute(folder: Path, record: dict) -> dict:
    """Every figure of record.json, from the logs in the folder and the record it is compared with.

    Raises Unreadable if one of them cannot be read.
    """
    logs = [read_log(folder / run["log"]) for run in record["runs"]]
    runs = []
    for run, log in zip(record["runs"], logs, strict=True):
        core = core_score(folder / run["core_table"]) if run["core_table"] else None
        kept = {
            key: run[key] for key in ("seed", "log", "core_table", "run", "starts") if key in run
        }
        runs.append({**kept, **figures(log), "core": core})
    comparison = None
    if record["against"]:
        comparison = compare_records(
            {**record, "runs": runs}, read_record(folder.parent / record["against"])
        )
    return {
        "runs": runs,
        "summary": summary(runs),
        "loss_noise": loss_noise(logs),
        "comparison": comparison,
    }


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file of a record except record.json, which holds them, and README.md, whose words may change."""
    return {
        p.name: sha256(p)
        for p in sorted(folder.iterdir())
        if p.name not in ("record.json", "README.md")
    }


# ---- text


def table(titles: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table with columns of even width; the first `left` columns are text, the others figures."""
    widths = [max(3, *(len(row[i]) for row in [titles, *rows])) for i in range(len(titles))]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def line(cells):
        padded = []
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            padded.append(cell.ljust(width) if i < left else cell.rjust(width))
        return "| " + " | ".join(padded) + " |"

    return "\n".join(line(row) for row in [titles, rule, *rows])


def p_text(p: float | None) -> str:
    if p is None:
        return "not defined"
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}"


def difference_text(test: dict, digits: int) -> str:
    """Difference, interval and p of welch() in words."""
    text = f"{test['difference']:+.{digits}f}"
    if test["p"] is None:
        return f"{text} (no test: a single run or no spread)"
    return f"{text}, 95 % interval {test['low']:+.{digits}f} to {test['high']:+.{digits}f}, p {p_text(test['p'])}"


def command(record: dict) -> str:
    count = record["hardware"]["num_devices"]
    start = "python" if count == 1 else f"torchrun --standalone --nproc_per_node={count}"
    args = f" @runs/{record['args']}" if record["args"] else ""
    return " ".join([f"{start} {record['script']}{args}", *record["flags"], "--seed S"])


def figures_text(record: dict, folder: Path) -> str:
    """The generated part of a record's README.md, markers included."""
    runs = record["runs"]
    noise = record["loss_noise"]
    words = "unknown, there is one run" if noise is None else f"{noise:.3%} of the loss"
    raw = []
    for key in ("val_bpb", "train_seconds"):
        raw.append(f"- {FIGURES[key][0]}: {', '.join(repr(run[key]) for run in runs)}")
    blocks = [
        about_text(record),
        runs_table(record),
        "Raw lists, in the order of the table:\n\n" + "\n".join(raw),
        f"Noise of the training loss between seeds: {words}.",
        against_text(record, folder) if record["against"] else "Not compared with another record.",
    ]
    return "\n\n".join([BEGIN, *blocks, END])


def about_text(record: dict) -> str:
    """Where the runs come from, as a list."""
    hardware = record["hardware"]
    data = record["dataset"]
    versions = [f"{name} {version}" for name, version in record["versions"].items() if version]
    changed = " and changes to the script" if record["script_changed"] else ""
    starts = [str(run["starts"]) for run in record["runs"] if run.get("starts")]
    about = {
        "track": track_name(record),
        "dataset": f"{data['name']}, fingerprint {data['fingerprint'][:12]}, vocabulary {data['vocab_size']:,}",
        "hardware": f"{hardware['num_devices']} x {hardware['device']} ({device_class(hardware['device'])})",
        "versions": ", ".join(versions),
        "script": f"{record['script']}, sha256 {record['files'][record['script']][:12]}, "
                  f"commit {(record['commit'] or 'unknown')[:12]}{changed}",
        "command": f"`{command(record)}`",
    }  # fmt: skip
    if starts:
        about["date"] = f"{record['date']}, starts of each run: {', '.join(starts)}"
    if record["absent"]:
        about["not kept"] = "; ".join(record["absent"])
    return "\n".join(f"- {key}: {value}" for key, value in about.items())


def runs_table(record: dict) -> str:
    """A row for each run, then mean and sd if there are several."""
    runs = record["runs"]
    shown = [key for key in FIGURES if any(run[key] is not None for run in runs)]

    def cell(key: str, value: float | None) -> str:
        return "" if value is None else format(value, FIGURES[key][1])

    rows = [[str(run["seed"]), *(cell(key, run[key]) for key in shown)] for run in runs]
    if len(runs) > 1:
        known = {key: record["summary"].get(key, {"mean": None, "sd": None}) for key in shown}
        means = [cell(key, known[key]["mean"]) for key in shown]
        sds = ["" if key in ("steps", "tokens") else cell(key, known[key]["sd"]) for key in shown]
        rows += [["mean", *means], ["sd", *sds]]
    return table(["seed", *(FIGURES[key][0] for key in shown)], rows)


def against_text(record: dict, folder: Path) -> str:
    """The differences from the record that this one names."""
    other_folder = folder.parent / record["against"]
    other = read_record(other_folder)
    tests = record["comparison"]
    seconds = "not compared, it ran on other hardware"
    if tests["train_seconds"] is not None:
        seconds = difference_text(tests["train_seconds"], 2)
    old = (other_folder / other["script"]).read_text(encoding="utf-8")
    new = (folder / record["script"]).read_text(encoding="utf-8")
    counts = f"n = {len(record['runs'])} and {len(other['runs'])}"
    return (
        f"Against `{record['against']}` ({counts}, Welch, two-sided; negative is better):\n\n"
        f"- val bpb: {difference_text(tests['val_bpb'], 5)}\n- training seconds: {seconds}\n"
        f"- sections of the script that differ: {', '.join(changed_lines(old, new)) or 'none'}"
    )
