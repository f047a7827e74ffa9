"""Checks of an entry. A problem is one sentence that begins with the file that is wrong.

Hashes protect the files, and every figure is recomputed. `verify.py --rerun` finds what hashes
cannot.
"""

import itertools
import math
from pathlib import Path

import entry
import files
import flags
import metrics
import numpy as np
import text
import tracks

# Entries of "machine" that all starts and runs of an entry share.
SAME_MACHINE = (
    "script_sha256", "device", "num_devices", "platform", "python", "torch", "triton", "cuda", "numpy",
)  # fmt: skip


def problems(folder: Path) -> list[str]:
    """An empty list is a good entry."""
    out = []
    try:
        record = entry.read_record(folder)
        logs = entry.read_logs(folder, record)
        runs = entry.read_run_files(folder)
        if record["format"] == 1:
            if files.sha256(folder / "record.json") != tracks.read()["format_1"].get(folder.name):
                out.append("record.json: it is of format 1, and records/tracks.json does not hold its sha256")
            runs = [{"config": record["config"]} for _ in logs]
        else:
            out += check_runs(folder, record, runs)
        for run, log, file in zip(record["runs"], logs, runs, strict=True):
            found = check_log(log, file["config"])
            out += [f"{run['log']}: {problem}" for problem in found]
        core_tables = [folder / run["core_table"] for run in record["runs"] if run["core_table"]]
        for path in core_tables:
            if metrics.read_core(path)[0] != metrics.read_core(core_tables[0])[0]:
                out.append(f"{path.name}: it scores other examples than {core_tables[0].name}; score all runs alike")
        out += check_metrics(folder, record, logs)
    except (files.UserError, OSError) as error:
        out.append(str(error))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        out.append(f"record.json, README.md or a file of a run is malformed ({error!r})")
    return out


# ==== runs and their starts


def comparable(machine: dict) -> dict:
    """What must be equal for times and bits per byte of one recipe to be comparable."""
    return entry.without_patches({key: machine.get(key) for key in SAME_MACHINE})


def recipe_of(config: dict) -> dict:
    """A Config without what may differ between the runs of a recipe."""
    free = (*flags.RUN_FIELDS, *flags.INTERVAL_FIELDS)
    return {key: value for key, value in config.items() if key not in free}


def identity(run: dict) -> dict:
    """What all runs of an entry share, and all starts of a run."""
    out = {"machine": comparable(run["machine"]), "dataset_fingerprint": run["dataset_fingerprint"]}
    return {**out, "flags": " ".join(flags.recipe_flags(run["flags"]))}


def check_runs(folder: Path, record: dict, runs: list[dict]) -> list[str]:
    """The runs differ in seed, place and intervals only, and scored what their track scores."""
    out = []
    script = folder / record["script"]
    first = runs[0]
    source = f"run_{first['seed']}.json states"
    for run in runs:
        name = f"run_{run['seed']}.json"
        if run["machine"]["script_sha256"] != files.sha256(script):
            out.append(f"{name}: script_sha256 is not that of {script.name}, which was changed after the run")
        out += files.mismatches(identity(first), identity(run), name, source)
        recipes = [recipe_of(each["config"]) for each in (first, run)]
        out += files.mismatches(*recipes, f"{name}.config", source)
        out += files.mismatches(first["scored"], run["scored"], f"{name}.scored", source)
        out += start_problems(run, name)
    if not folder.name.startswith((".", record["date"])):
        out.append(f"record.json: date is {record['date']}, the folder is {folder.name}")
    out += flag_problems(folder, record, first["flags"])
    return out + tracks.scoring_problems(record, record["config"], record["scored"], tracks.read())


def start_problems(run: dict, name: str) -> list[str]:
    """How the starts of a run differ from what it states."""
    out = files.mismatches(0, run["starts"][0]["step"], f"{name}: the step of its first start", "it must be")
    for number, start in enumerate(run["starts"], 1):
        where = f"{name}: start {number}"
        # A resumed run keeps its recipe without repeating the flags.
        if number > 1 and not flags.recipe_flags(start["flags"]):
            start = {**start, "flags": run["flags"]}
        out += files.mismatches(identity(run), identity(start), where, "the run states")
    day = run["starts"][0]["date"][:10]
    return out + files.mismatches(day, run["date"], f"{name}.date", "its first start was on")


def flag_problems(folder: Path, record: dict, run_flags: list[str]) -> list[str]:
    """Rule 1: nothing is overridden but by the args file, and no flag of that is given again."""
    args = record["args"]
    names = flags.flag_names(flags.recipe_flags(run_flags))
    if overrides := [name for name in names if name not in flags.FREE_FLAGS]:
        hint = "change the script itself, or commit an args file in runs/"
        given = " ".join(record["flags"])
        return [f"record.json: {overrides[0]} in {given} overrides the recipe, which voids record status; {hint}"]
    fixed = []
    if args:
        fixed = flags.flag_names(flags.parse_args_file((folder / args).read_text(encoding="utf-8")))
    if set(fixed) & set(flags.LENGTH_FLAGS):
        fixed += flags.LENGTH_FLAGS
    repeated = [name for name in names if name in fixed]
    return [f"record.json: {name} is given, but {args} fixes it; omit the flag" for name in repeated]


# ==== logs


def planned_steps(config: dict) -> int:
    """Steps that a Config asks for, as Config.num_steps of the training scripts."""
    mean_packs = sum(row[0] * row[1] for row in config["stages"])
    return max(1, round(config["tokens"] / (mean_packs * config["pack_tokens"])))


def check_log(log: list[dict], config: dict | None) -> list[str]:
    """What is wrong with a log: it must be complete, and its speeds must agree with each other."""
    train, val = metrics.split_log(log)
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
        out.append(f"the last validation is at step {val[-1]['step']}, the last training step is {last}")

    # From line to line.
    columns = [[line["step"], line["tokens"], line["train_seconds"]] for line in train]
    steps, tokens, seconds = np.diff(columns, axis=0, prepend=0).T
    if min(steps.min(), tokens.min(), seconds.min()) <= 0:
        return [*out, "step, tokens and train_seconds do not all grow from line to line"]
    clock = {"tokens_per_second": tokens / seconds, "step_ms": seconds / steps * 1e3}
    for key, expected in clock.items():
        for line, value in zip(train, expected, strict=True):
            stated = line.get(key, value)
            if not math.isclose(stated, value, rel_tol=1e-8):
                out.append(f"step {line['step']}: {key} is {stated:.1f}, since the line before it was {value:.1f}")
    return out


# ==== metrics


def check_metrics(folder: Path, record: dict, logs: list[list[dict]]) -> list[str]:
    """record.json, curve.csv and README.md state what the other files give."""
    expected = {**record, **entry.recompute(folder, record), "files": entry.hashes(folder)}
    if record["format"] != 1:
        expected = entry.make_record(folder, record["track"], record["against"])
    # Sections of the script, which older entries state, follow from its sha256.
    stated = {key: value for key, value in record.items() if key != "sections"}
    expected.pop("sections", None)
    out = files.mismatches(expected, stated, "record.json")
    curve = (folder / "curve.csv").read_text(encoding="utf-8")
    out += compare_lines(text.curve_csv(logs), curve, "curve.csv")
    readme = (folder / "README.md").read_text(encoding="utf-8")
    generated = readme[readme.index(text.BEGIN) : readme.index(text.END) + len(text.END)]
    return out + compare_lines(text.figures_text(expected, folder), generated, "README.md")


def compare_lines(expected: str, actual: str, name: str) -> list[str]:
    """The lines in which a text is not what it should be."""
    out = []
    pairs = itertools.zip_longest(expected.splitlines(), actual.splitlines(), fillvalue="missing")
    for number, (wanted, line) in enumerate(pairs, 1):
        if line != wanted:
            out.append(f"{name}, line {number} is {line}, the files give {wanted}")
    return out
