"""Writes a record to baselines/ from finished runs that differ in their seed only.

    python records/add.py out/a_0 out/a_1 out/a_2 --track small --slug wider-mlp --against 2026-11-23_first-p34 \\
        --hypothesis "..." --change "..." --dropped "..."

Nothing is written unless everything is right: one script, dataset, Config, hardware and set of versions in every start
of every run, different seeds, weights and logs, no --set except those of an args file that is committed in runs/, a
Config that is the script's own with these flags, and complete logs that agree with their totals. The folder appears in
one rename. The words of its README.md may be edited until it is committed; the figures between the markers may not.
CORE is read from core.csv where runs/score_core.py, or an older script, has written it. Rules: records/README.md.
"""

import argparse
import datetime
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check
import recipe
import record as rec
import tracks

MAX_BYTES = 1_000_000
START = ("date", "step", "flags", "machine", "dataset_fingerprint", "changed")
# Prints the Config that a script makes of flags. It runs the script's import, so only of one's own runs.
PRINT_CONFIG = """
import dataclasses, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
module = sys.modules["script"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
args = module.build_parser().parse_args(sys.argv[2:])
print(json.dumps(dataclasses.asdict(module.make_config(args))))
"""


def read_run(run_dir: Path, script: str, day: str | None) -> dict:
    """A run directory: {"dir", "script", "log", "core_items", "file": what its run_SEED.json will hold}.

    Ends the program if it is not a finished run of the script.
    """
    for name in ("config.json", "log.jsonl", script, "report.md"):
        if not (run_dir / name).is_file():
            what = {"report.md": "the run is not finished", script: "it is of another track"}
            rec.fail(f"{run_dir} has no {name}; {what.get(name, 'name the directory of a run')}")
    try:
        stated = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        if stated["command"] != "pretrain":
            rec.fail(
                f"{run_dir} is a run of {stated['command']}; a record is made of pretraining runs"
            )
        log = rec.read_log(run_dir / "log.jsonl")
        file = run_file(stated, log)
        problems = rec.check_log(log, file["config"])
        table = run_dir / "core.csv"
        core_items = rec.core_items(table) if table.is_file() else None
    except (ValueError, KeyError, TypeError, AttributeError, rec.Unreadable) as error:
        rec.fail(f"{run_dir} cannot be read: {error}")
    if problems:
        rec.fail(f"{run_dir}/log.jsonl is not the log of a finished run: {problems[0]}")
    if problem := check_totals(run_dir, rec.figures(log)):
        rec.fail(f"{run_dir}: {problem}")
    if rec.sha256(run_dir / script) != file["machine"]["script_sha256"]:
        rec.fail(f"{run_dir}/{script} was changed after the run: config.json states another sha256")
    if problems := check.start_problems(file):
        rec.fail(f"{run_dir}/config.json: {problems[0]}")

    run = {"dir": run_dir, "script": script, "log": log, "core_items": core_items, "file": file}
    file["commit"], file["script_changed"] = find_commit(run)
    file["date"] = day_of(run, day)
    return run


def run_file(stated: dict, log: list[dict]) -> dict:
    """What config.json states, without places and names of folders."""
    config = dict(stated["config"])
    overridden = [text for text in stated["overridden"] if text != recipe.NO_CORE]
    if recipe.NO_CORE in stated["overridden"]:  # the recipe is that of the runs that were scored
        given = dict(text.split("=", 1) for text in overridden)
        config["core_items"] = int(given.get("core_items", 0))
    starts = stated.get("starts")
    if starts is not None:
        starts = [{key: start[key] for key in START} for start in starts]
        starts = [{**start, "flags": recipe.strip(start["flags"])} for start in starts]
    return {
        "seed": config["seed"],
        "seeds_asked": recipe.values_of(stated["flags"], "--seed"),
        "data": Path(config["data"]).name,
        "dataset_fingerprint": stated["dataset_fingerprint"],
        "flags": recipe.strip(stated["flags"]),
        "overridden": overridden,
        "config": {key: value for key, value in config.items() if key not in recipe.PLACE_FIELDS},
        "machine": stated["machine"],
        "starts": starts,
        "scored": check.logged_score(log),
    }


def day_of(run: dict, day: str | None) -> str:
    """The day of a run: of its first start, or for old runs the one that is given, or of its log's last line."""
    started = check.first_date(run["file"])
    if started and day and day != started:
        rec.fail(
            f"--date {day} is not the day of {run['dir']}: its first start was on {started}; leave --date out"
        )
    written = datetime.date.fromtimestamp((run["dir"] / "log.jsonl").stat().st_mtime)
    return started or day or written.isoformat()


def check_totals(run_dir: Path, figures: dict) -> str:
    """What the report, or the last checkpoint if it still exists, states differently from the log."""
    text = (run_dir / "report.md").read_text(encoding="utf-8")
    report = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.M))
    stated = {"validation": f"{figures['val_bpb']:.4f} bits per byte", "tokens": f"{figures['tokens']:,}",
              "steps": f"{figures['steps']:,}", "training time": f"{figures['train_seconds']:.1f} s"}  # fmt: skip
    for key, value in stated.items():
        if report.get(key) != value:
            return f"report.md states {key} {report.get(key)}, the log gives {value}"
    path = run_dir / "checkpoints" / f"step_{figures['steps']:06d}" / "state.json"
    if path.is_file():
        state = json.loads(path.read_text(encoding="utf-8"))
        for key in ("tokens", "train_seconds", "val_bpb"):
            if state[key] is not None and not math.isclose(state[key], figures[key], rel_tol=1e-12):
                return (
                    f"its last checkpoint states {key} {state[key]}, the log gives {figures[key]}"
                )
    return ""


def check_alike(runs: list[dict]) -> None:
    """Runs of one record differ in seed, place and commit only, and are different runs."""
    first = runs[0]
    seeds = {}
    for run in runs:
        seed = run["file"]["seed"]
        if seed in seeds:
            rec.fail(
                f"{seeds[seed]} and {run['dir']} have the same seed {seed}; a record needs different seeds"
            )
        seeds[seed] = run["dir"]
        if unlike := check.difference(first["file"], run["file"]):
            rec.fail(unlike_text(first["dir"], run["dir"], *unlike))
    for i, run in enumerate(runs):
        for other in runs[i + 1 :]:
            if why := check.copied(run["log"], other["log"]) or same_weights(run, other):
                rec.fail(f"{run['dir']} and {other['dir']} are copies of one run: {why}")
    scored = [run for run in runs if run["core_items"] is not None]
    for run in scored:
        if run["core_items"] != scored[0]["core_items"]:
            rec.fail(
                f"{scored[0]['dir']} and {run['dir']} were scored on different items of CORE; score both with the "
                f"same --items"
            )
    if not first["file"]["dataset_fingerprint"]:
        rec.fail(
            f"the dataset of {first['dir']} has no fingerprint; make it with data/pretrain.py, and train on that"
        )


def unlike_text(first: Path, other: Path, what: str, a, b) -> str:
    if what == "dataset_fingerprint":
        return f"{first} and {other} ran on different datasets: their fingerprints are {a} and {b}"
    if what in ("flags", "overridden"):
        return f"{first} and {other} were started with different flags: {' '.join(a)} and {' '.join(b)}"
    name = what.split(".")[-1].replace("script_sha256", "script")
    a = str(a)[: 12 if name == "script" else 80]
    b = str(b)[: 12 if name == "script" else 80]
    return f"{first} and {other} differ in {name}: {a} and {b}; a record is made of runs that differ in their seed only"


def same_weights(run: dict, other: dict) -> str | None:
    """Why two runs ended with the same weights, where both still have their last checkpoint."""
    steps = rec.figures(run["log"])["steps"]
    paths = [
        r["dir"] / "checkpoints" / f"step_{steps:06d}" / "model.safetensors" for r in (run, other)
    ]
    if not all(path.is_file() for path in paths):
        return None
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return "their last weights are equal" if digests[0] == digests[1] else None


def git(*words: str) -> str | None:
    """Output of a git command in this repository; None if it fails."""
    try:
        done = subprocess.run(["git", "-C", rec.ROOT, *words], capture_output=True)
    except OSError:
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None


def find_commit(run: dict) -> tuple[str | None, bool]:
    """(commit, whether the script differs from it): of the run, or else the newest one that holds its script."""
    machine = run["file"]["machine"]
    stated = machine["git_commit"]
    script = run["script"]
    for commit in [stated, *(git("log", "--format=%H", "--", script) or "").split()]:
        text = git("show", f"{commit}:{script}") if commit else None
        if (
            text is not None
            and hashlib.sha256(text.encode()).hexdigest() == machine["script_sha256"]
        ):
            return commit, False
    return stated or None, True


def args_file(run: dict, commit: str | None) -> tuple[str | None, str]:
    """(name, text) of the args file that the run used, as it is committed. No other --set may have been given."""
    flags = run["file"]["flags"]
    overridden = run["file"]["overridden"]
    files = [word[1:] for word in flags if word.startswith("@")]
    if len(files) > 1:
        rec.fail(
            f"{run['dir']} used several args files ({', '.join(files)}); a record has one at most"
        )
    given = recipe.overrides(flags)
    if not files:
        if overridden:
            rec.fail(
                f"{run['dir']} overrides {', '.join(overridden)} with --set, which voids record status; "
                f"change {run['script']} itself, or commit an args file in runs/"
            )
        return None, ""
    name = files[0]
    text = git("show", f"{commit}:runs/{name}") if commit else None
    if text is None:
        text = git("show", f"HEAD:runs/{name}")
    if text is None:
        rec.fail(
            f"{run['dir']} used {name}, and runs/{name} is not committed; the args file of a record is part of the "
            f"repository, so commit it first"
        )
    words = recipe.args_words(text)
    known = recipe.overrides(words)
    if given or overridden != known:
        extra = given or [o for o in overridden if o not in known] or ["fewer fields"]
        rec.fail(
            f"{run['dir']} overrides {', '.join(extra)}, which the committed runs/{name} does not; --set voids "
            f"record status"
        )
    check_repeated(run, flags, words, name)
    return name, text


def check_repeated(run: dict, flags: list[str], words: list[str], name: str) -> None:
    """A flag that the args file gives may not be given again; --steps and --tokens both set the length."""
    fixed = recipe.flag_names(words)
    for flag in sorted(recipe.flag_names(flags) - set(recipe.INTERVALS)):
        other = {"--steps": "--tokens", "--tokens": "--steps"}.get(flag)
        found = flag if flag in fixed else other if other in fixed else None
        if found:
            how = "fixes" if found == flag else f"fixes by {found}"
            rec.fail(
                f"{run['dir']} was started with {flag}, which runs/{name} {how}; leave it out, or make the change "
                f"in {run['script']}"
            )


def check_config(run: dict, args_text: str) -> None:
    """The Config is what the script makes of its flags, and the seed is the one that was asked for."""
    file = run["file"]
    script = (run["dir"] / run["script"]).read_text(encoding="utf-8")
    words = [*recipe.args_words(args_text), *(w for w in file["flags"] if not w.startswith("@"))]
    vocab_size = file["config"]["vocab_size"]
    found = recipe.check_config(file["config"], script, words, vocab_size)
    if found:
        rec.fail(
            f"{run['dir']}/config.json: {found[0]}; a number of the recipe is changed in the script"
        )
    seeds = file["seeds_asked"] or recipe.values_of(words, "--seed") or ["0"]
    if str(file["seed"]) != seeds[-1]:
        rec.fail(
            f"{run['dir']}/config.json: the seed is {file['seed']}, its flags ask for {seeds[-1]}"
        )
    if file["starts"] and recipe.has_rules(script):
        check_rules(run, words)


def check_rules(run: dict, words: list[str]) -> None:
    """Fields that the script derives by a rule, against what the script itself makes of the flags."""
    path = (run["dir"] / run["script"]).resolve()
    command = [sys.executable, "-c", PRINT_CONFIG, str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=run["dir"])
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        rec.fail(f"{path} could not be asked for its Config: {said[-1]}")
    made = json.loads(done.stdout.splitlines()[-1])
    for key in recipe.RULED:
        stated = run["file"]["config"].get(key)
        if stated != made.get(key):
            rec.fail(
                f"{run['dir']}/config.json: config.{key} is {stated}, the script's rules give {made.get(key)}"
            )


def readme(record: dict, folder: Path, texts: dict[str, str]) -> str:
    parts = [f"# {texts['name']}"]
    for title in ("Hypothesis", "Change"):
        parts.append(f"## {title}\n\n{texts[title.lower()] or '(not stated)'}")
    parts.append(f"## Runs\n\n{rec.figures_text(record, folder)}")
    parts.append(f"## Tried and dropped\n\n{texts['dropped'] or '(not stated)'}")
    return "\n\n".join(parts) + "\n"


def build(runs: list[dict], args: argparse.Namespace, folder: Path, name: str) -> None:
    """Fills a folder that nobody sees yet."""
    runs = sorted(runs, key=lambda run: run["file"]["seed"])
    first = runs[0]
    script = first["script"]
    args_name, args_text = args_file(first, first["file"]["commit"])
    for run in runs:
        check_config(run, args_text)
    shutil.copyfile(first["dir"] / script, folder / script)
    if args_name:
        (folder / args_name).write_text(args_text, encoding="utf-8")
    listed = [copy_run(run, folder) for run in runs]
    logs = [rec.read_log(folder / entry["log"]) for entry in listed]
    (folder / "curve.csv").write_text(rec.curve_csv(logs))

    files = [rec.read_run_file(folder / entry["run"]) for entry in listed]
    against = args.against and Path(args.against).name
    record = {"format": 2, "track": args.track, "script": script, "args": args_name}
    record |= {**rec.facts(files), "against": against, "runs": listed}
    check_scored(record)
    if record["against"]:
        check_against(record, folder.parent)
    sections = rec.section_hashes((folder / script).read_text(encoding="utf-8"))
    record |= {**rec.recompute(folder, record), "sections": sections, "files": rec.hashes(folder)}
    (folder / "record.json").write_text(check.dump(record), encoding="utf-8")
    texts = {
        "name": name,
        "hypothesis": args.hypothesis,
        "change": args.change,
        "dropped": args.dropped,
    }
    (folder / "README.md").write_text(readme(record, folder, texts), encoding="utf-8")
    if (size := sum(p.stat().st_size for p in folder.iterdir())) > MAX_BYTES:
        rec.fail(
            f"the record would take {size:,} bytes of at most {MAX_BYTES:,}; log less often (--log-every)"
        )
    if problems := check.problems(folder):
        rec.fail(f"the record does not verify: {problems[0]}")


def copy_run(run: dict, folder: Path) -> dict:
    """Puts log, CORE table and run_SEED.json of a run into the folder; returns its entry in record.json."""
    seed = run["file"]["seed"]
    starts = run["file"]["starts"]
    entry = {"seed": seed, "log": f"log_{seed}.jsonl.gz", "core_table": None}
    entry |= {"run": f"run_{seed}.json", "starts": len(starts) if starts else None}
    log = (run["dir"] / "log.jsonl").read_bytes()
    (folder / entry["log"]).write_bytes(gzip.compress(log, 9, mtime=0))
    kept = {key: value for key, value in run["file"].items() if key != "seeds_asked"}
    (folder / entry["run"]).write_text(check.dump(kept), encoding="utf-8")
    if (run["dir"] / "core.csv").is_file():
        entry["core_table"] = f"core_{seed}.csv"
        shutil.copyfile(run["dir"] / "core.csv", folder / entry["core_table"])
    return entry


def check_scored(record: dict) -> None:
    """The runs scored the text that the tracks of their dataset are about."""
    found = tracks.read()
    if wrong := tracks.scoring_problems(record, record["config"], record["scored"], found):
        rec.fail(wrong[0])


def check_against(record: dict, baselines: Path) -> None:
    other = rec.read_record(baselines / record["against"])
    if other["dataset"]["fingerprint"] != record["dataset"]["fingerprint"]:
        a, b = (r["dataset"]["fingerprint"][:12] for r in (other, record))
        rec.fail(
            f"{record['against']} was trained on the dataset {a}, these runs on {b}; bits per byte are compared on "
            f"the same one only"
        )


def standing_lines(folder: Path) -> list[str]:
    """The tracks that a new record is on, and why it is not ranked there."""
    record = rec.read_record(folder)
    found = tracks.read()
    lines = []
    for name in tracks.tracks_of(record, found):
        why = tracks.refusal(record, found["tracks"][name])
        lines.append(f"track {name}: {why or 'ranked by records/compare.py --write'}")
    return lines or [
        "No track of records/tracks.json has this dataset, script and hardware, so the record is listed without a rank."
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="finished runs, one for each seed"
    )
    parser.add_argument("--track", required=True, choices=rec.TRACKS, help="which training script")
    parser.add_argument("--slug", required=True, help="short name in lower case, e.g. wider-mlp")
    parser.add_argument("--against", help="the record to compare with, a folder of baselines/")
    parser.add_argument("--hypothesis", default="", help="what was expected, and why")
    parser.add_argument("--change", default="", help="what is different")
    parser.add_argument("--dropped", default="", help="what was tried and dropped")
    parser.add_argument(
        "--date", help="YYYY-MM-DD, only of runs whose config.json does not state their starts"
    )
    parser.add_argument("--out", type=Path, default=rec.BASELINES, help="default baselines/")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", args.slug):
        rec.fail(
            f"--slug {args.slug} must be lower-case words and figures with - between, e.g. wider-mlp"
        )
    if args.against and not (args.out / Path(args.against).name / "record.json").is_file():
        rec.fail(
            f"--against {args.against} is no record in {args.out}; name a folder there, or leave it out"
        )
    try:
        day = args.date and datetime.date.fromisoformat(args.date).isoformat()
    except ValueError:
        rec.fail(f"--date {args.date} is not a day like 2026-11-21")
    runs = [read_run(run_dir, f"train_{args.track}.py", day) for run_dir in args.run_dirs]
    check_alike(runs)
    date = max(run["file"]["date"] for run in runs)
    final = args.out / f"{date}_{args.slug}"
    if final.exists():
        rec.fail(f"{final} exists; records are never edited, so choose another --slug")
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        build(runs, args, temporary, final.name)
        os.rename(temporary, final)
    except (OSError, rec.Unreadable) as error:
        rec.fail(f"{final} could not be written: {error}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shown = os.path.relpath(final)
    print(f"{shown} holds {len(runs)} run(s): read its README.md, edit its words, then\n"
          f"    python records/verify.py {shown}\n    python records/compare.py --write")  # fmt: skip
    print("\n".join(standing_lines(final)))


if __name__ == "__main__":
    main()
