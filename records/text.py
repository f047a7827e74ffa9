"""Text of tables, and of an entry: curve.csv and the generated part of its README.md."""

import difflib
import functools
import re
from pathlib import Path

import entry
from metrics import METRICS, loss_curve

BEGIN = "<!-- figures: written by records/add.py, checked by records/verify.py; do not edit -->"
END = "<!-- /figures -->"
# Why there is no p.
FEW_RUNS = "a single run or no spread"
OTHER_SESSION = "other GPU or session"


# ==== tables


def table(titles: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table with even columns; the first `left` are text, the others figures."""
    widths = [max(3, *(len(row[i]) for row in [titles, *rows])) for i in range(len(titles))]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def line(cells):
        padded = []
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            padded.append(cell.ljust(width) if i < left else cell.rjust(width))
        return "| " + " | ".join(padded) + " |"

    return "\n".join(line(row) for row in [titles, rule, *rows])


def format_value(value: float | None, form: str) -> str:
    """format(), and nothing for None."""
    return "" if value is None else format(value, form)


def p_text(p: float | None) -> str:
    """p with its sign, to stand behind "p": "= 0.02", "< 0.0001" or "not defined"."""
    if p is None:
        return "not defined"
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}"


def difference_text(test: dict, digits: int, no_test: str = FEW_RUNS) -> str:
    """Difference, interval and p of welch() in words; `no_test` says why there is no p."""
    text = f"{test['difference']:+.{digits}f}"
    if test["p"] is None:
        return f"{text} (no test: {no_test})"
    return f"{text}, 95 % interval {test['low']:+.{digits}f} to {test['high']:+.{digits}f}, p {p_text(test['p'])}"


# ==== training scripts


def script_sections(text: str) -> dict[str, list[str]]:
    """Lines of a training script by section: behind a banner, or between markers."""
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
def changed_sections(old: str, new: str) -> list[str]:
    """For each section of two scripts that differs, e.g. "optimizer (+3 -1)"."""
    before = script_sections(old)
    after = script_sections(new)
    out = []
    for name in dict.fromkeys((*before, *after)):
        old_lines = before.get(name, [])
        new_lines = after.get(name, [])
        blocks = difflib.SequenceMatcher(None, old_lines, new_lines, autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
        if same < max(len(old_lines), len(new_lines)):
            out.append(f"{name} (+{len(new_lines) - same} -{len(old_lines) - same})")
    return out


# ==== an entry


def curve_csv(logs: list[list[dict]]) -> str:
    """curve.csv: the rows of loss_curve(), with six digits."""
    rows = loss_curve(logs)
    lines = [",".join(rows[0])]
    for row in rows:
        cells = [format_value(value, "" if isinstance(value, int) else ".6g") for value in row.values()]
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


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
        baseline_text(record, folder) if record["against"] else "Not compared with another record.",
    ]
    return "\n\n".join([BEGIN, *blocks, END])


def about_text(record: dict) -> str:
    """What ran where, as a list."""
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
        "hardware": f"{hardware['num_devices']} x {hardware['device']} ({entry.device_class(hardware['device'])})",
        "versions": ", ".join(versions),
        "script": f"{record['script']}, sha256 {digest}, commit {commit}{changed}",
        "command": f"`{command}`",
    }
    if record.get("gpus"):
        about["GPU"] = ", ".join(record["gpus"])
    if starts:
        about["date"] = f"{record['date']}, starts of each run: {', '.join(starts)}"
    if record["absent"]:
        about["not kept"] = "; ".join(record["absent"])
    return "\n".join(f"- {key}: {value}" for key, value in about.items())


def runs_table(record: dict) -> str:
    """A row for each run, then mean and sd if there are several."""
    runs = record["runs"]
    shown = [key for key in METRICS if any(run[key] is not None for run in runs)]
    rows = []
    for run in runs:
        rows.append([str(run["seed"]), *(format_value(run[key], METRICS[key][1]) for key in shown)])
    if len(runs) > 1:
        for which in ("mean", "sd"):
            row = {key: value[which] for key, value in record["summary"].items()}
            if which == "sd":
                row |= {"steps": None, "tokens": None}
            rows.append([which, *(format_value(row.get(key), METRICS[key][1]) for key in shown)])
    return table(["seed", *(METRICS[key][0] for key in shown)], rows)


def baseline_text(record: dict, folder: Path) -> str:
    """How an entry differs from the one that it names as its baseline."""
    baseline = folder.parent / record["against"]
    other = entry.read_record(baseline)
    tests = record["comparison"]
    seconds = "not compared, it ran on other hardware"
    if tests["train_seconds"] is not None:
        # Entries that do not name their GPUs are frozen with a test.
        elsewhere = record.get("gpus") and not entry.same_session(record, other)
        seconds = difference_text(tests["train_seconds"], 2, OTHER_SESSION if elsewhere else FEW_RUNS)
    old = (baseline / other["script"]).read_text(encoding="utf-8")
    new = (folder / record["script"]).read_text(encoding="utf-8")
    counts = f"n = {len(record['runs'])} and {len(other['runs'])}"
    lines = [
        f"- val bpb: {difference_text(tests['val_bpb'], 5)}",
        f"- training seconds: {seconds}",
        f"- sections of the script that differ: {', '.join(changed_sections(old, new)) or 'none'}",
    ]
    short = [entry.without_patches(r["versions"]) for r in (record, other)]
    names = [name for name in record["versions"] if short[0].get(name) != short[1].get(name)]
    if names:
        ours = record["versions"]
        theirs = other["versions"]
        pairs = [f"{name} {ours[name]} and {theirs.get(name)}" for name in names]
        lines.append(f"- versions that differ: {', '.join(pairs)}")
    head = f"Against `{record['against']}` ({counts}, Welch, two-sided; negative is better):"
    return head + "\n\n" + "\n".join(lines)
