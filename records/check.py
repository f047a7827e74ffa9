"""Everything that must be true of a record, and of runs that are to become one.

A problem is one sentence that begins with the file, and where there is one the line or the entry, that is wrong.
add.py, verify.py and leaderboard.py use this file.
"""

import datetime
import json
import math
from pathlib import Path

import recipe
import record as rec
import tracks

# Entries of "machine" that all starts of a run must share. Others, such as the commit, may differ.
SAME_MACHINE = (
    "script_sha256", "device", "num_devices", "platform", "python", "torch", "triton", "cuda", "numpy",
)  # fmt: skip
FREE_MACHINE = ("git_commit", "git_dirty")  # may differ between the runs of a record


# ---- starts and likeness of runs


def start_problems(run: dict) -> list[str]:
    """How the starts of a run differ in what matters. A run without starts is from before scripts wrote them."""
    starts = run["starts"]
    if starts is None:
        return []
    if not isinstance(starts, list) or not starts:
        return ["starts is empty, so nothing says how the run was made"]
    out = []
    last = 0
    for number, start in enumerate(starts, 1):
        try:
            out += [f"start {number}: {text}" for text in one_start(run, start)]
            step = start["step"]
            if not isinstance(step, int) or step < last or (number == 1 and step != 0):
                wanted = "0" if number == 1 else f"at least {last}"
                out.append(f"start {number}: its step is {step}, it must be {wanted}")
            last = step
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            out.append(f"start {number} does not have the form of a start ({error!r})")
            return out
    return out


def one_start(run: dict, start: dict) -> list[str]:
    """How one start differs from what config.json states of the run."""
    out = []
    datetime.datetime.fromisoformat(start["date"])
    for key in SAME_MACHINE:
        stated = run["machine"].get(key)
        if start["machine"].get(key) != stated:
            out.append(f"machine.{key} is {start['machine'].get(key)}, the run states {stated}")
    if start["dataset_fingerprint"] != run["dataset_fingerprint"]:
        out.append(
            f"dataset_fingerprint is {start['dataset_fingerprint']}, the run states {run['dataset_fingerprint']}"
        )
    if start["changed"]:
        out.append(f"changed is not empty: {'; '.join(start['changed'])}")
    # A resumed run may be given other intervals and nothing else: a new length would be another schedule.
    is_first = start is run["starts"][0]
    given = start["flags"] if is_first else recipe.recipe_flags(start["flags"])
    wanted = run["flags"] if is_first else recipe.recipe_flags(run["flags"])
    if given != wanted and (given or is_first):
        out.append(
            f"its flags are {' '.join(given) or 'none'}, those of the run are {' '.join(wanted) or 'none'}"
        )
    return out


def first_date(run: dict) -> str | None:
    """The day of a run's first start; None if its script did not write starts."""
    if not run["starts"]:
        return None
    return datetime.datetime.fromisoformat(run["starts"][0]["date"]).date().isoformat()


def difference(first: dict, other: dict) -> tuple[str, object, object] | None:
    """(what, value of the first, value of the other) where two runs of a record must agree and do not."""
    if first["dataset_fingerprint"] != other["dataset_fingerprint"]:
        return "dataset_fingerprint", first["dataset_fingerprint"], other["dataset_fingerprint"]
    for part, free in (("machine", FREE_MACHINE), ("config", recipe.INTERVAL_FIELDS)):
        for key in dict.fromkeys((*first[part], *other[part])):
            a = first[part].get(key)
            b = other[part].get(key)
            if a != b and key not in free:
                return f"{part}.{key}", a, b
    # Each run may log, validate and save as often as it likes.
    a = recipe.recipe_flags(first["flags"])
    b = recipe.recipe_flags(other["flags"])
    if a != b:
        return "flags", a, b
    for key in ("data", "overridden", "scored"):
        if first[key] != other[key]:
            return key, first[key], other[key]
    if (first["starts"] is None) != (other["starts"] is None):
        return "starts", first["starts"], other["starts"]
    return None


def copied(first: list[dict], other: list[dict]) -> str | None:
    """Why two logs cannot be of two runs: the clock, or the loss, is the same to the last digit."""
    for key in ("train_seconds", "loss"):
        a = {entry["step"]: entry[key] for entry in rec.split(first)[0]}
        b = {entry["step"]: entry[key] for entry in rec.split(other)[0]}
        common = a.keys() & b.keys()
        equal = sum(a[step] == b[step] for step in common)
        if equal > len(common) / 2:
            return f"{key} is the same to the last digit at {equal} of {len(common)} steps"
    return None


def schedule_problems(names: list[str], logs: list[list[dict]]) -> list[str]:
    """Lines where runs of one recipe differ although the schedule is the same: rate and tokens of a step."""
    out = []
    first = {entry["step"]: entry for entry in rec.split(logs[0])[0]}
    for name, log in zip(names[1:], logs[1:], strict=True):
        for entry in rec.split(log)[0]:
            for key in ("lr", "tokens"):
                known = first.get(entry["step"], {})
                if key in known and known[key] != entry.get(key):
                    out.append(
                        f"{name}: step {entry['step']}: {key} is {entry.get(key)}, {names[0]} has {known[key]}"
                    )
    return out


def logged_score(log: list[dict]) -> dict | None:
    """What validation scored, as the log states it; None in logs of scripts that do not.

    Raises Unreadable if two validations differ.
    """
    found = [entry.get("scored") for entry in rec.split(log)[1]]
    for scored in found:
        if scored != found[0]:
            raise rec.Unreadable(f"one validation scored {found[0]}, another {scored}")
    return found[0]


# ---- records


def problems(folder: Path) -> list[str]:
    """Sentences, each beginning with the file that is wrong; an empty list is a good record."""
    out = []
    try:
        record = rec.read_record(folder)
        out += check_files(folder, record)
        out += check_script(folder, record)
        out += check_flags(folder, record)
        out += check_format(folder, record)
        out += check_logs(folder, record)
        out += check_figures(folder, record)
        for run in record["runs"]:  # what was dropped or added beside the figures
            wanted = {"seed", "log", "core_table", *rec.FIGURES}
            wanted |= {"run", "starts"} if record["format"] == 2 else set()
            out += [f"record.json: runs has the entry {key}" for key in run.keys() - wanted]
        out += unknown_entries(record)
    except rec.Unreadable as error:
        out.append(str(error))
    except (OSError, KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        out.append(
            f"record.json, or a file that it names, does not have the form of a record ({error!r})"
        )
    return out


ENTRIES = (
    "format", "track", "script", "args", "flags", "dataset", "hardware", "versions", "commit", "script_changed",
    "config", "absent", "against", "runs", "summary", "loss_noise", "comparison", "sections", "files",
)  # fmt: skip
ENTRIES_2 = ("date", "max_epochs", "scored")


def unknown_entries(record: dict) -> list[str]:
    known = ENTRIES if record["format"] == 1 else (*ENTRIES, *ENTRIES_2)
    return [f"record.json: the entry {key} is not expected" for key in record if key not in known]


def check_files(folder: Path, record: dict) -> list[str]:
    """Every file is there, listed, and has the stated sha256."""
    stated = record["files"]
    found = rec.hashes(folder)
    out = [f"{name} is not there" for name in stated if name not in found]
    out += [f"{name} is not listed in record.json" for name in found if name not in stated]
    for name in stated:
        if name in found and stated[name] != found[name]:
            out.append(
                f"{name} was changed: its sha256 is {found[name][:12]}..., record.json states {stated[name][:12]}..."
            )
    return out


def check_script(folder: Path, record: dict) -> list[str]:
    """The script is that of the track, its markers are intact, and each section has the stated sha256."""
    if record["script"] != f"train_{record['track']}.py":
        return [
            f"record.json: the track {record['track']} does not belong to the script {record['script']}"
        ]
    try:
        found = rec.section_hashes((folder / record["script"]).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, rec.Unreadable) as error:
        return [f"{record['script']}: {error}"]
    out = []
    for name in dict.fromkeys((*record["sections"], *found)):
        if record["sections"].get(name) != found.get(name):
            out.append(
                f"{record['script']}: the section {name} is not the one whose sha256 record.json states"
            )
    return out


def check_flags(folder: Path, record: dict) -> list[str]:
    """No --set was given besides the args file, and the Config is what script, args file and flags give."""
    given = recipe.overrides(record["flags"])
    out = [f"record.json: flags override {text} with --set" for text in given]
    if not record["config"]:
        return out
    words = []
    if record["args"]:
        words = recipe.args_words((folder / record["args"]).read_text(encoding="utf-8"))
    script = (folder / record["script"]).read_text(encoding="utf-8")
    vocab_size = record["dataset"]["vocab_size"]
    found = recipe.check_config(record["config"], script, [*words, *record["flags"]], vocab_size)
    return out + [f"record.json: {text}" for text in found]


def check_format(folder: Path, record: dict) -> list[str]:
    """Format 1: the record is one of the known ones, unchanged. Format 2: it states what its run files state."""
    found = tracks.read()
    if record["format"] == 1:
        if rec.sha256(folder / "record.json") != found["format_1"].get(folder.name):
            return [
                "record.json: it is of format 1 and not one of those whose sha256 records/tracks.json holds"
            ]
        return []
    names = [run["run"] for run in record["runs"]]
    runs = [rec.read_run_file(folder / name) for name in names]
    out = []
    for name, run, entry in zip(names, runs, record["runs"], strict=True):
        seed = run["seed"]
        count = len(run["starts"]) if run["starts"] else None
        wanted = {
            "seed": seed,
            "log": f"log_{seed}.jsonl.gz",
            "run": f"run_{seed}.json",
            "starts": count,
        }
        stated = {key: entry[key] for key in wanted}
        out += unequal(stated, wanted, f"record.json: runs ({name})")
        out += [f"{name}: {text}" for text in start_problems(run)]
        day = first_date(run)
        if day and day != run["date"]:
            out.append(f"{name}: date is {run['date']}, its first start was on {day}")
        if run["machine"]["script_sha256"] != rec.sha256(folder / record["script"]):
            out.append(f"{name}: machine.script_sha256 is not that of {record['script']}")
        if unlike := difference(runs[0], run):
            what, a, b = unlike
            out.append(f"{name}: {what} is {b}, {names[0]} states {a}")
    seeds = [run["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        out.append(f"record.json: runs have the seeds {seeds}; each must be another")
    for key, value in rec.facts(runs).items():
        out += unequal(record[key], value, f"record.json: {key}")
    args = [Path(word[1:]).name for word in runs[0]["flags"] if word.startswith("@")]
    if args != ([record["args"]] if record["args"] else []):
        out.append(f"record.json: args is {record['args']}, {names[0]} was started with {args}")
    if not folder.name.startswith(".") and not folder.name.startswith(record["date"]):
        out.append(f"record.json: date is {record['date']}, the folder is {folder.name}")
    if record["config"]:
        text = tracks.scoring_problems(record, record["config"], record["scored"], found)
        out += [f"record.json: {sentence}" for sentence in text]
    return out


def check_logs(folder: Path, record: dict) -> list[str]:
    """Each log is complete and consistent, and no two of them are of one run."""
    out = []
    names = [run["log"] for run in record["runs"]]
    logs = [rec.read_log(folder / name) for name in names]
    for run, log in zip(record["runs"], logs, strict=True):
        where = f"{run['log']} (seed {run['seed']})"
        out += [f"{where}: {text}" for text in rec.check_log(log, record["config"])]
    if out:
        return out
    for i, first in enumerate(logs):
        for name, other in zip(names[i + 1 :], logs[i + 1 :], strict=True):
            if why := copied(first, other):
                out.append(f"{name}: it is the log of one run with {names[i]}: {why}")
    out += schedule_problems(names, logs)
    if record["format"] == 2:
        for run, log in zip(record["runs"], logs, strict=True):
            try:
                scored = logged_score(log)
            except rec.Unreadable as error:
                out.append(f"{run['log']}: {error}")
                continue
            out += unequal(record["scored"], scored, f"record.json: scored ({run['log']})")
    return out


def check_figures(folder: Path, record: dict) -> list[str]:
    """record.json, curve.csv and README.md state what the logs give."""
    found = rec.recompute(folder, record)
    out = []
    for i, (run, true) in enumerate(zip(record["runs"], found["runs"], strict=True)):
        out += unequal(run, true, f"record.json: runs[{i}] (seed {run['seed']})")
    for key in ("summary", "loss_noise", "comparison"):
        out += unequal(record[key], found[key], f"record.json: {key}")
    curve = rec.curve_csv([rec.read_log(folder / run["log"]) for run in record["runs"]])
    stated = (folder / "curve.csv").read_text(encoding="utf-8")
    out += different_lines("curve.csv", stated, curve)
    return out + check_readme(folder, {**record, **found})


def unequal(stated, found, where: str) -> list[str]:
    """Where two JSON values differ; floats may differ in the last digits."""
    if isinstance(stated, dict) and isinstance(found, dict):
        out = []
        for key in dict.fromkeys((*stated, *found)):
            if key not in found or key not in stated:
                out.append(f"{where}.{key} is {'not expected' if key not in found else 'missing'}")
            else:
                out += unequal(stated[key], found[key], f"{where}.{key}")
        return out
    if isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        pairs = enumerate(zip(stated, found, strict=True))
        return [text for i, pair in pairs for text in unequal(*pair, f"{where}[{i}]")]
    if same_value(stated, found):
        return []
    return [f"{where} is stated as {stated}, the files give {found}"]


def same_value(stated, found) -> bool:
    if isinstance(stated, bool) or isinstance(found, bool):
        return stated is found
    if isinstance(stated, int) and isinstance(found, int):
        return stated == found
    if isinstance(stated, int | float) and isinstance(found, int | float):
        return math.isclose(stated, found, rel_tol=1e-9)
    return stated == found


def different_lines(name: str, stated: str, found: str) -> list[str]:
    """Lines of a text that are not those which the logs give."""
    a = stated.splitlines()
    b = found.splitlines()
    if len(a) != len(b):
        return [f"{name}: {len(a)} lines, the logs give {len(b)}"]
    pairs = zip(a, b, strict=True)
    return [
        f"{name}: '{x.strip()}' is stated, the logs give '{y.strip()}'" for x, y in pairs if x != y
    ]


def check_readme(folder: Path, record: dict) -> list[str]:
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except OSError:
        return ["README.md is not there"]
    once = text.count(rec.BEGIN) == 1 and text.count(rec.END) == 1
    if not once or text.index(rec.BEGIN) > text.index(rec.END):
        return ["README.md: the markers around the figures are not there once each"]
    part = text[text.index(rec.BEGIN) : text.index(rec.END) + len(rec.END)]
    return different_lines("README.md", part, rec.figures_text(record, folder))


def dump(value: dict) -> str:
    return json.dumps(value, indent=1) + "\n"
