"""Checks of an entry. A problem is one sentence that begins with the file that is wrong.

Hashes protect the files, and every figure is recomputed. `verify.py --rerun` finds what hashes cannot.
"""

import math
from pathlib import Path

import entry
import numpy as np
import tracks

# Entries of "machine" that all starts and runs of an entry share.
SAME_MACHINE = (
    "script_sha256", "device", "num_devices", "platform", "python", "torch", "triton", "cuda", "numpy",
)  # fmt: skip
MINOR = ("python", "numpy")  # whose patch versions may differ
# TFLOP/s that an MFU of 1 stands for, the largest of several models of a card.
PEAKS = {"H100": 989, "H200": 989, "A100": 312, "T4": 65}
FEWEST_FLOPS = 0.7  # of the estimate in check_speed(): some layers lack attention


def problems(folder: Path) -> list[str]:
    """An empty list is a good entry."""
    out = []
    try:
        record = entry.read_record(folder)
        logs = entry.read_logs(folder, record)
        runs = entry.read_run_files(folder)
        if record["format"] == 1:
            if entry.sha256(folder / "record.json") != tracks.read()["format_1"].get(folder.name):
                out.append("record.json: it is of format 1, and records/tracks.json does not hold its sha256")
            runs = [{"config": record["config"], "machine": record["hardware"]} for _ in logs]
        else:
            out += check_runs(folder, record, runs)
        for run, log, file in zip(record["runs"], logs, runs, strict=True):
            found = check_log(log, file["config"], file["machine"])
            out += [f"{run['log']}: {text}" for text in found]
        tables = [folder / run["core_table"] for run in record["runs"] if run["core_table"]]
        for table in tables:
            if entry.read_core(table)[0] != entry.read_core(tables[0])[0]:
                out.append(f"{table.name}: it is of other examples than {tables[0].name}; use the same CORE files")
        out += check_copies(folder, record, logs)
        out += check_metrics(folder, record, logs)
    except (entry.UserError, OSError) as error:
        out.append(str(error))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        out.append(f"record.json, README.md or a file of a run has another form ({error!r})")
    return out


# ==== runs and their starts


def comparable(machine: dict) -> dict:
    """What must be equal for times and bits per byte of one recipe to be comparable."""
    out = {key: machine.get(key) for key in SAME_MACHINE}
    for key in MINOR:
        out[key] = ".".join(str(out[key]).split(".")[:2])
    return out


def recipe_of(config: dict) -> dict:
    free = (*entry.PLACE_FIELDS, *entry.INTERVAL_FIELDS)
    return {key: value for key, value in config.items() if key not in free}


def identity(run: dict) -> dict:
    """What all runs of an entry share, and all starts of a run."""
    out = {"machine": comparable(run["machine"]), "dataset_fingerprint": run["dataset_fingerprint"]}
    return {**out, "flags": " ".join(entry.recipe_flags(run["flags"]))}


def check_runs(folder: Path, record: dict, runs: list[dict]) -> list[str]:
    """The runs differ in seed, place and intervals only, and they scored the text of their track."""
    out = []
    script = folder / record["script"]
    first = runs[0]
    other = f"run_{first['seed']}.json states"
    for run in runs:
        name = f"run_{run['seed']}.json"
        if run["machine"]["script_sha256"] != entry.sha256(script):
            out.append(f"{name}: script_sha256 is not that of {script.name}, which was changed after the run")
        out += entry.unequal(identity(run), identity(first), name, other)
        recipes = [recipe_of(file["config"]) for file in (run, first)]
        out += entry.unequal(*recipes, f"{name}.config", other)
        out += entry.unequal(run["scored"], first["scored"], f"{name}.scored", other)
        out += start_problems(run, name)
    if not folder.name.startswith((".", record["date"])):
        out.append(f"record.json: date is {record['date']}, the folder is {folder.name}")
    out += flag_problems(folder, record, first["flags"])
    return out + tracks.scoring_problems(record, record["config"], record["scored"], tracks.read())


def start_problems(run: dict, name: str) -> list[str]:
    """How the starts of a run differ from what it states."""
    out = entry.unequal(run["starts"][0]["step"], 0, f"{name}: the step of its first start", "it must be")
    for number, start in enumerate(run["starts"], 1):
        where = f"{name}: start {number}"
        if start.get("changed"):
            out.append(f"{where}: the run was changed: {'; '.join(start['changed'])}")
        # The script itself names what a resumed run changes.
        flags = run["flags"] if number > 1 else start["flags"]
        found = identity({**start, "flags": flags})
        out += entry.unequal(found, identity(run), where, "the run states")
    day = run["starts"][0]["date"][:10]
    return out + entry.unequal(run["date"], day, f"{name}.date", "its first start was on")


def overrides(given: list[str]) -> bool:
    """Whether a flag changes the recipe; in older entries only --set did."""
    known = {"--steps", "--tokens", "--micro-batch-tokens", "--attention", "--dtype", "--no-compile"}
    return bool(set(given) - known)


def flag_problems(folder: Path, record: dict, flags: list[str]) -> list[str]:
    """Rule 1: nothing is overridden but by the args file, and no flag of that is given again."""
    args = record["args"]
    given = entry.flag_names(entry.recipe_flags(flags))
    if overrides(given):
        way = "change the script itself, or commit an args file in runs/"
        return [f"record.json: {' '.join(record['flags'])} overrides the recipe, which voids record status; {way}"]
    text = (folder / args).read_text(encoding="utf-8") if args else ""
    fixed = entry.flag_names(entry.args_words(text))
    if "--steps" in fixed or "--tokens" in fixed:
        fixed += ["--steps", "--tokens"]
    again = [flag for flag in given if flag in fixed]
    return [f"record.json: {flag} is given, which {args} fixes; leave it out" for flag in again]


# ==== logs


def planned_steps(config: dict) -> int:
    """Steps that a Config asks for: Config.num_steps of the training scripts, without importing one."""
    mean_packs = sum(row[0] * row[1] for row in config["stages"])
    return max(1, round(config["tokens"] / (mean_packs * config["pack_tokens"])))


def check_log(entries: list[dict], config: dict | None, machine: dict) -> list[str]:
    """What is wrong with a log: it must be complete, and its speeds must agree with each other."""
    train, val = entry.split(entries)
    if not train or not val:
        return [f"no {'validation' if train else 'training step'} is logged"]
    out = []
    first = train[0]["step"]
    last = train[-1]["step"]
    if first != 1:
        out.append(f"it begins at step {first}; the first steps are missing")
    if config and last != planned_steps(config):
        out.append(f"it ends at step {last} of {planned_steps(config)}: the run is not finished")
    if val[-1]["step"] != last:
        out.append(f"the last validation is of step {val[-1]['step']}, the last training step is {last}")

    # From line to line.
    columns = [[e["step"], e["tokens"], e["train_seconds"]] for e in train]
    steps, tokens, seconds = np.diff(columns, axis=0, prepend=0).T
    if min(steps.min(), tokens.min(), seconds.min()) <= 0:
        return [*out, "step, tokens and train_seconds do not all grow from line to line"]
    clock = {"tokens_per_second": tokens / seconds, "step_ms": seconds / steps * 1e3}
    for key, expected in clock.items():
        for line, value in zip(train, expected, strict=True):
            stated = line.get(key, value)
            if not math.isclose(stated, value, rel_tol=1e-8):
                out.append(f"step {line['step']}: {key} is {stated:.1f}, since the line before it was {value:.1f}")
    return out + check_speed(entry.metrics(entries), config, machine)


def check_speed(metrics: dict, config: dict | None, machine: dict) -> list[str]:
    """MFU and tokens/s must allow for the FLOPs of a token: 6 for each weight of attention, MLP and head."""
    sizes = ("num_layers", "width", "mlp_width", "vocab_size")
    peak = next((peak for card, peak in PEAKS.items() if card in machine["device"]), None)
    if not peak or not metrics["mfu"] or not config or not all(key in config for key in sizes):
        return []
    layers, width, mlp_width, vocab_size = (config[key] for key in sizes)
    needed = 6 * width * (layers * (4 * width + 2 * mlp_width) + vocab_size)
    spent = metrics["mfu"] * peak * 1e12 * machine["num_devices"] / metrics["tokens_per_second"]
    if spent >= FEWEST_FLOPS * needed:
        return []
    stated = f"{metrics['tokens_per_second']:,.0f} tokens/s at {metrics['mfu']:.1%} MFU"
    return [f"{stated} are {spent:.3g} FLOPs a token, and a Config of this size needs about {needed:.3g}"]


def losses(log: list[dict]) -> list[float]:
    return [line["loss"] for line in entry.split(log)[0]]


def check_copies(folder: Path, record: dict, logs: list[list[dict]]) -> list[str]:
    """No log is that of another seed or of another entry."""
    known = {}
    for path in sorted(folder.parent.glob("*/log_*.jsonl.gz")):
        if path.parent != folder and not path.parent.name.startswith("."):
            known[f"{path.parent.name}/{path.name}"] = losses(entry.read_log(path))
    out = []
    for run, log in zip(record["runs"], logs, strict=True):
        for name, other in known.items():
            if losses(log) == other:
                out.append(f"{run['log']}: its losses are those of {name}, so one of them is a copy")
        known[run["log"]] = losses(log)
    return out


# ==== metrics


def check_metrics(folder: Path, record: dict, logs: list[list[dict]]) -> list[str]:
    """record.json, curve.csv and README.md state what the other files give."""
    found = {**record, **entry.recompute(folder, record), "files": entry.hashes(folder)}
    if record["format"] != 1:
        found = entry.make_record(folder, record["track"], record["against"])
    # Sections of the script, which older entries state, follow from its sha256.
    stated = {key: value for key, value in record.items() if key != "sections"}
    found.pop("sections", None)
    out = entry.unequal(stated, found, "record.json")
    curve = (folder / "curve.csv").read_text(encoding="utf-8")
    out += entry.unequal(curve.splitlines(), entry.curve_csv(logs).splitlines(), "curve.csv")
    readme = (folder / "README.md").read_text(encoding="utf-8")
    part = readme[readme.index(entry.BEGIN) : readme.index(entry.END) + len(entry.END)]
    wanted = entry.figures_text(found, folder)
    return out + entry.unequal(part.splitlines(), wanted.splitlines(), "README.md")
