"""An entry: a folder of baselines/ with a training script as it ran, logs of its seeds, and results.

Entries of format 1 are from before 2026-11-23; those of format 2 also hold run_SEED.json, what
config.json of each run stated. Every figure of record.json can be recomputed from the other files.
"""

import re
from pathlib import Path

import files
from files import UserError, read_json
from metrics import METRICS, loss_noise, read_core, read_log, run_metrics, summarize
from significance import welch

SCRIPTS = ("small", "medium")

# Kinds of GPUs. Free: what notebook services offer without charge.
DEVICE_CLASSES = {
    "Hopper": r"\b(H100|H200|H800|H20|GH200)\b",
    "Ampere": r"\b(A100|A800|A40|A30|A10|A6000|RTX 30\d\d)\b",
    "free GPU": r"\b(T4|P100)\b",
}
# Versions whose patches may differ: a run on numpy 2.5.1 compares with one on 2.5.2, and not with
# one on 2.3.5.
FREE_PATCHES = ("python", "numpy")


def device_class(device: str) -> str:
    """The kind of a GPU: "Hopper" for "NVIDIA H200", "other" if it is not known."""
    for name, pattern in DEVICE_CLASSES.items():
        if re.search(pattern, device):
            return name
    return "other"


# ==== reading


def folders() -> list[Path]:
    """The folders of baselines/, by name."""
    paths = sorted(files.BASELINES.glob("*"))  # none where there is no folder, as git keeps no empty one
    return [path for path in paths if path.is_dir() and not path.name.startswith(".")]


def find(name: str) -> Path:
    """A folder by its path, or an entry of baselines/ by its name. Raises UserError if there is neither."""
    for path in (Path(name), files.BASELINES / name):
        if path.is_dir():
            return path
    raise UserError(f"{name} is neither a folder nor an entry in baselines/; check its spelling")


def read_record(folder: Path) -> dict:
    """record.json of an entry. Raises UserError if it cannot be read."""
    return read_json(folder / "record.json")


def read_logs(folder: Path, record: dict) -> list[list[dict]]:
    """The log lines of each run of an entry."""
    return [read_log(folder / run["log"]) for run in record["runs"]]


def read_run_files(folder: Path) -> list[dict]:
    """All run_SEED.json of an entry, in the order of their seeds."""
    return sorted(map(read_json, folder.glob("run_*.json")), key=lambda run: run["seed"])


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file but record.json, which holds them, and README.md, which may change."""
    paths = [path for path in sorted(folder.iterdir()) if path.name not in ("record.json", "README.md")]
    return {path.name: files.sha256(path) for path in paths}


def read_description(run_dir: Path) -> dict:
    """config.json of a run. Its Config holds every stage in use, also those that the script derived.

    Scripts after 2026-11-27 list these apart, under "stage_table". Raises UserError if it cannot be read.
    """
    description = read_json(run_dir / "config.json")
    if "stage_table" in description:
        stages = [list(stage.values()) for stage in description["stage_table"]]
        description["config"]["stages"] = stages
    return description


# ==== what an entry is compared with


def values(record: dict, metric: str) -> list[float]:
    """A metric of each run, in the order of the seeds."""
    return [run[metric] for run in record["runs"]]


def day_of(record: dict) -> str:
    """The day on which the last of an entry's runs first started, e.g. "2026-11-23"."""
    return record.get("date") or record["name"][:10]


def session(day: str, device: str, gpus: list[str] | None) -> tuple | None:
    """What the times of two recipes must share: one day, and the same GPUs by their UUIDs.

    Two H100s of one host differed by 3 %, and equal code by 2 % between sessions, which the spread of an
    entry's seeds does not show. None if the UUIDs are not known, as in older entries. A CPU is known by its name.
    """
    if not gpus and device.startswith(("cpu", "mps")):
        gpus = [device]
    return (day, *sorted(set(gpus))) if gpus else None


def session_of(record: dict) -> tuple | None:
    """The session of an entry's runs; entries of format 1, which state no day, have none."""
    return session(record.get("date", ""), record["hardware"]["device"], record.get("gpus"))


def without_patches(versions: dict) -> dict:
    """Versions by name, of Python and numpy the first two numbers only."""
    short = {key: ".".join(str(versions.get(key)).split(".")[:2]) for key in FREE_PATCHES}
    return {**versions, **short}


def same_session(record: dict, other: dict) -> bool:
    """Whether the seconds of two entries may be compared by a t-test."""
    return session_of(record) is not None and session_of(record) == session_of(other)


def compare_entries(record: dict, other: dict) -> dict:
    """Welch's test on bits per byte and seconds, as record.json states it under "comparison".

    "train_seconds" is None on other hardware. On another GPU or in another session it has a
    difference and no p; only entries that do not name their GPUs are frozen with one.
    """
    metrics = ("val_bpb", "train_seconds")
    comparison = {key: welch(values(record, key), values(other, key)) for key in metrics}
    if any(record["hardware"][key] != other["hardware"][key] for key in ("device", "num_devices")):
        comparison["train_seconds"] = None
    elif record.get("gpus") and not same_session(record, other):
        comparison["train_seconds"] |= {"low": None, "high": None, "p": None}
    return comparison


# ==== record.json


def make_record(folder: Path, script: str, baseline: str | None) -> dict:
    """record.json of format 2, from the other files of an entry.

    Args: script "small" or "medium"; baseline the name of the entry that it is compared with
    """
    run_files = read_run_files(folder)
    first = run_files[0]
    machine = first["machine"]
    runs = []
    for file in run_files:
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
        "track": script,
        "script": f"train_{script}.py",
        "args": args[0] if args else None,
        "date": max(file["date"] for file in run_files),
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
        "against": baseline,
        "runs": runs,
    }
    gpus = {start["machine"].get("gpu_uuid") for file in run_files for start in file["starts"]}
    if all(gpus):  # a CPU has none, nor have older scripts
        record["gpus"] = sorted(gpus)
    return {**record, **recompute(folder, record), "files": hashes(folder)}


def recompute(folder: Path, record: dict) -> dict:
    """Every figure of record.json, from the logs and the entry it is compared with."""
    logs = read_logs(folder, record)
    runs = []
    for run, log in zip(record["runs"], logs, strict=True):
        core = read_core(folder / run["core_table"])[1] if run["core_table"] else None
        kept = {key: value for key, value in run.items() if key not in METRICS}
        runs.append({**kept, **run_metrics(log), "core": core})
    totals = {"runs": runs, "summary": summarize(runs), "loss_noise": loss_noise(logs)}
    comparison = None
    if record["against"]:
        baseline = read_record(folder.parent / record["against"])
        comparison = compare_entries({**record, "runs": runs}, baseline)
    return {**totals, "comparison": comparison}
