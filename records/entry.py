"""What an entry of baselines/ is: its files, the figures that follow from its logs, and the statistics on them.

README.md beside it says what the figures mean. Entries of format 1 are from before 2026-11-23; those of format 2 also
hold run_SEED.json, what config.json of each run stated.
"""

import argparse
import csv
import difflib
import functools
import gzip
import hashlib
import json
import math
import os
import re
import zlib
from pathlib import Path, PurePath
from statistics import fmean, stdev

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ROOT / "baselines"
TRACKS = ("small", "medium")
CORE_TASKS = 22
BEGIN = "<!-- figures: written by records/add.py, checked by records/verify.py; do not edit -->"
END = "<!-- /figures -->"

# Metrics of a run: title and format in tables.
METRICS = {
    "val_bpb": ("val bpb", ".5f"), "core": ("CORE", ".4f"), "steps": ("steps", ",.0f"), "tokens": ("tokens", ",.0f"),
    "train_seconds": ("training seconds", ",.2f"), "tokens_per_second": ("tokens/s", ",.0f"), "mfu": ("MFU", ".1%"),
    "peak_memory_gib": ("peak memory GiB", ".2f"),
}  # fmt: skip

# Classes of cards. Free: what notebook services offer without charge.
CLASSES = {
    "Hopper": r"\b(H100|H200|H800|H20|GH200)\b", "Ampere": r"\b(A100|A800|A40|A30|A10|A6000|RTX 30\d\d)\b",
    "free GPU": r"\b(T4|P100)\b",
}  # fmt: skip


class UserError(SystemExit):
    """Something the user can fix, in one sentence. Uncaught, it ends the program with it and exit code 1."""

    def __init__(self, message: str):
        super().__init__(f"error: {message}")
        self.message = message

    def __str__(self) -> str:
        return self.message


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def device_class(device: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, device)), "other")


def read_json(path: Path) -> dict:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path.parent.name}/{path.name} cannot be read ({error})") from None


def write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def dump(value: dict) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def refuse(problems: list[str]) -> None:
    if problems:
        raise UserError(problems[0])


def unequal(stated, found, where: str, giver: str = "the files give") -> list[str]:
    """Where two JSON values differ; floats may differ in the last digits."""
    if isinstance(stated, dict) and isinstance(found, dict):
        out = []
        for key in dict.fromkeys((*stated, *found)):
            if key in stated and key in found:
                out += unequal(stated[key], found[key], f"{where}.{key}", giver)
            else:
                out.append(f"{where}.{key} is {'missing' if key in found else 'not expected'}")
        return out
    if isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        pairs = enumerate(zip(stated, found, strict=True), 1)
        return [text for i, pair in pairs for text in unequal(*pair, f"{where}, {i}", giver)]
    same = stated == found and isinstance(stated, bool) == isinstance(found, bool)
    if isinstance(stated, float) and isinstance(found, float):
        same = math.isclose(stated, found, rel_tol=1e-9)
    return [] if same else [f"{where} is {stated}, {giver} {found}"]


# ==== flags

# Flags for the place and the seed of a run are no part of an entry, nor are these fields of the Config.
PLACE_FLAGS = ("--data", "--run-dir", "--seed", "--wandb", "--rank-timeout", "--resume")
PLACE_FIELDS = ("data", "seed", "wandb")
# These may differ from run to run, from start to start, and from an args file.
INTERVALS = ("--eval-every", "--save-every", "--log-every")
INTERVAL_FIELDS = ("eval_every", "save_every", "log_every")


def args_words(text: str) -> list[str]:
    """The flags of an args file, as the training script reads them."""
    return [word for line in text.splitlines() for word in line.split("#")[0].split()]


def without(flags: list[str], names: tuple[str, ...]) -> list[str]:
    """Flags without those named and their values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, **({"action": "store_true"} if name == "--resume" else {}))
    return parser.parse_known_args(flags)[1]


def kept_flags(flags: list[str]) -> list[str]:
    """The flags that an entry states: without seed and places, and args files without their folder."""
    words = [word for word in without(flags, PLACE_FLAGS) if word != "pretrain"]
    return ["@" + PurePath(word[1:]).name if word.startswith("@") else word for word in words]


def recipe_flags(flags: list[str]) -> list[str]:
    """The same without intervals of logging, validation and saving."""
    return without(kept_flags(flags), INTERVALS)


def flag_names(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if word.startswith("--")]


# ==== logs and what follows from them


def read_log(path: Path) -> list[dict]:
    """Entries of a log.jsonl or log.jsonl.gz."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{path.name} cannot be read ({error})") from None


def split(entries: list[dict]) -> tuple[list[dict], list[dict]]:
    """(training steps, validations) of a log."""
    return [e for e in entries if "loss" in e], [e for e in entries if "val_bpb" in e]


def metrics(entries: list[dict]) -> dict:
    """The metrics of a finished run. MFU is the mean over the run, weighted by time."""
    train, val = split(entries)
    last = train[-1]
    seconds = np.diff([0.0, *(e["train_seconds"] for e in train)])
    return {
        "val_bpb": val[-1]["val_bpb"],
        "core": None,
        "steps": last["step"],
        "tokens": last["tokens"],
        "train_seconds": last["train_seconds"],
        "tokens_per_second": last["tokens"] / last["train_seconds"],
        "mfu": float(np.average([e["mfu"] for e in train], weights=seconds)),
        "peak_memory_gib": max(e["memory_gib"] for e in train),
    }


def read_core(path: Path) -> tuple[dict[str, str], float | None]:
    """(examples of each task, CORE) of a core.csv, which runs/score_core.py writes.

    CORE is the mean of the centered accuracies; None if there are not all 22 tasks.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] != "CORE"]
    examples = {row["task"]: row["examples"] for row in rows}
    centered = [float(row["centered"]) for row in rows]
    return examples, fmean(centered) if len(centered) == CORE_TASKS else None


def summary(runs: list[dict]) -> dict:
    """{metric: {"mean", "sd"}} over the runs."""
    out = {}
    for key in METRICS:
        values = [run[key] for run in runs]
        if None not in values:
            out[key] = {"mean": fmean(values), "sd": spread(values)}
    return out


def spread(values: list[float]) -> float | None:
    """The sd; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def loss_curve(logs: list[list[dict]]) -> list[dict]:
    """Means over the runs at each step that all of them logged."""
    trains = [{e["step"]: e for e in split(log)[0]} for log in logs]
    vals = [{e["step"]: e["val_bpb"] for e in split(log)[1]} for log in logs]
    rows = []
    for step in sorted(set.intersection(*map(set, trains))):
        entries = [train[step] for train in trains]
        losses = [e["loss"] for e in entries]
        validated = all(step in val for val in vals)
        row = {
            "step": step,
            "tokens": entries[0]["tokens"],
            "train_seconds": fmean(e["train_seconds"] for e in entries),
            "loss": fmean(losses),
            "loss_sd": spread(losses),
            "bpb": fmean(e["bpb"] for e in entries),
            "val_bpb": fmean(val[step] for val in vals) if validated else None,
        }
        rows.append(row)
    return rows


def curve_csv(logs: list[list[dict]]) -> str:
    rows = loss_curve(logs)
    lines = [",".join(rows[0])]
    for row in rows:
        cells = [cell(value, "" if isinstance(value, int) else ".6g") for value in row.values()]
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def loss_noise(logs: list[list[dict]]) -> float | None:
    """Distance between seeds: sd of the loss over the runs divided by its mean, root mean square over steps."""
    if len(logs) < 2:
        return None
    return math.sqrt(fmean((row["loss_sd"] / row["loss"]) ** 2 for row in loss_curve(logs)))


# ==== statistics


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
    if not spread(values):
        return None
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)


# ==== scripts


def sections(text: str) -> dict[str, list[str]]:
    """Lines of a training script by section: behind its banner, or between markers that name one."""
    parts = {}
    outer = "between sections"
    name = "docstring"
    shared = False
    for line in text.splitlines():
        marker = re.fullmatch(r" *# (>>>|<<<) shared: (.+)", line)
        banner = re.match(r"# \d+\. ([A-Z ]+) -- ", line)
        if marker and marker[1] == ">>>":
            name = marker[2]
            shared = not name.startswith("section")  # as sections_5_to_8
        elif banner and not shared:
            name = outer = banner[1].strip().lower()
        parts.setdefault(name, []).append(line)
        if marker and marker[1] == "<<<":  # a section may share a part only
            name = outer
            shared = False
    return parts


@functools.lru_cache(maxsize=16)  # some 50 ms for two scripts
def changed_lines(old: str, new: str) -> list[str]:
    """For each section that differs, e.g. "optimizer (+3 -1)"."""
    before = sections(old)
    after = sections(new)
    out = []
    for name in dict.fromkeys((*before, *after)):
        a = before.get(name, [])
        b = after.get(name, [])
        blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
        if same < max(len(a), len(b)):
            out.append(f"{name} (+{len(b) - same} -{len(a) - same})")
    return out


# ==== entries


def folders() -> list[Path]:
    """The folders of baselines/, by name."""
    return sorted(p for p in BASELINES.iterdir() if p.is_dir() and not p.name.startswith("."))


def read_record(folder: Path) -> dict:
    return read_json(folder / "record.json")


def read_logs(folder: Path, record: dict) -> list[list[dict]]:
    return [read_log(folder / run["log"]) for run in record["runs"]]


def logged_score(log: list[dict]) -> dict | None:
    """What the last validation scored, as the log states it; None in logs of scripts that do not."""
    return split(log)[1][-1].get("scored")


def read_run_files(folder: Path) -> list[dict]:
    """All run_SEED.json of an entry, in the order of their seeds."""
    return sorted(map(read_json, folder.glob("run_*.json")), key=lambda run: run["seed"])


def make_record(folder: Path, track: str, against: str | None) -> dict:
    """record.json of format 2, from the other files and the entry that it is compared with."""
    files = read_run_files(folder)
    first = files[0]
    machine = first["machine"]
    runs = []
    for file in files:
        seed = file["seed"]
        core = f"core_{seed}.csv"
        run = {"seed": seed, "log": f"log_{seed}.jsonl.gz", "run": f"run_{seed}.json"}
        run["core_table"] = core if (folder / core).is_file() else None
        run["starts"] = len(file["starts"])
        runs.append(run)
    data = {"name": first["data"], "fingerprint": first["dataset_fingerprint"]}
    versions = ("python", "torch", "triton", "cuda", "numpy")
    args = [word[1:] for word in first["flags"] if word.startswith("@")]
    record = {
        "format": 2,
        "track": track,
        "script": f"train_{track}.py",
        "args": args[0] if args else None,
        "date": max(file["date"] for file in files),
        "flags": [word for word in first["flags"] if not word.startswith("@")],
        "dataset": {**data, "vocab_size": first["config"]["vocab_size"]},
        "hardware": {key: machine.get(key) for key in ("device", "num_devices", "platform")},
        "versions": {key: machine[key] for key in versions if key in machine},
        "commit": first["commit"],
        "script_changed": first["script_changed"],
        "max_epochs": first["config"].get("max_epochs", 1),
        "config": first["config"],
        "scored": first["scored"],
        "absent": [],
        "against": against,
        "runs": runs,
    }
    return {**record, **recompute(folder, record), "files": hashes(folder)}


def recompute(folder: Path, record: dict) -> dict:
    """Every figure of record.json, from the logs and the entry it is compared with."""
    logs = read_logs(folder, record)
    runs = []
    for run, log in zip(record["runs"], logs, strict=True):
        core = read_core(folder / run["core_table"])[1] if run["core_table"] else None
        kept = {key: value for key, value in run.items() if key not in METRICS}
        runs.append({**kept, **metrics(log), "core": core})
    comparison = None
    if record["against"]:
        other = read_record(folder.parent / record["against"])
        comparison = {}
        for key in ("val_bpb", "train_seconds"):
            comparison[key] = welch([run[key] for run in runs], [run[key] for run in other["runs"]])
        if any(record["hardware"][key] != other["hardware"][key] for key in ("device", "num_devices")):
            comparison["train_seconds"] = None
    totals = {"runs": runs, "summary": summary(runs), "loss_noise": loss_noise(logs)}
    return {**totals, "comparison": comparison}


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file of an entry except record.json, which holds them, and README.md, whose words may change."""
    free = ("record.json", "README.md")
    return {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.name not in free}


# ==== text


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


def cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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


def figures_text(record: dict, folder: Path) -> str:
    """The generated part of an entry's README.md, markers included."""
    runs = record["runs"]
    noise = record["loss_noise"]
    noise_text = "unknown, there is one run" if noise is None else f"{noise:.3%} of the loss"
    raw = []
    for key in ("val_bpb", "train_seconds"):
        raw.append(f"- {METRICS[key][0]}: {', '.join(repr(run[key]) for run in runs)}")
    blocks = [
        about_text(record),
        runs_table(record),
        "Raw lists, in the order of the table:\n\n" + "\n".join(raw),
        f"Noise of the training loss between seeds: {noise_text}.",
        against_text(record, folder) if record["against"] else "Not compared with another record.",
    ]
    return "\n\n".join([BEGIN, *blocks, END])


def about_text(record: dict) -> str:
    hardware = record["hardware"]
    data = record["dataset"]
    versions = [f"{name} {version}" for name, version in record["versions"].items() if version]
    changed = " and changes to the script" if record["script_changed"] else ""
    starts = [str(run["starts"]) for run in record["runs"] if run.get("starts")]
    count = hardware["num_devices"]
    start = "python" if count == 1 else f"torchrun --standalone --nproc_per_node={count}"
    args = f" @runs/{record['args']}" if record["args"] else ""
    command = " ".join([f"{start} {record['script']}{args}", *record["flags"], "--seed S"])
    digest = record["files"][record["script"]][:12]
    commit = (record["commit"] or "unknown")[:12]
    about = {
        "track": record["track"] + (f", {record['args']}" if record["args"] else ""),
        "dataset": f"{data['name']}, fingerprint {data['fingerprint'][:12]}, vocabulary {data['vocab_size']:,}",
        "hardware": f"{hardware['num_devices']} x {hardware['device']} ({device_class(hardware['device'])})",
        "versions": ", ".join(versions),
        "script": f"{record['script']}, sha256 {digest}, commit {commit}{changed}",
        "command": f"`{command}`",
    }
    if starts:
        about["date"] = f"{record['date']}, starts of each run: {', '.join(starts)}"
    if record["absent"]:
        about["not kept"] = "; ".join(record["absent"])
    return "\n".join(f"- {key}: {value}" for key, value in about.items())


def runs_table(record: dict) -> str:
    """A row for each run, then mean and sd if there are several."""
    runs = record["runs"]
    shown = [key for key in METRICS if any(run[key] is not None for run in runs)]
    rows = [[str(run["seed"]), *(cell(run[key], METRICS[key][1]) for key in shown)] for run in runs]
    if len(runs) > 1:
        for which in ("mean", "sd"):
            known = {key: value[which] for key, value in record["summary"].items()}
            if which == "sd":
                known |= {"steps": None, "tokens": None}
            rows.append([which, *(cell(known.get(key), METRICS[key][1]) for key in shown)])
    return table(["seed", *(METRICS[key][0] for key in shown)], rows)


def against_text(record: dict, folder: Path) -> str:
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
