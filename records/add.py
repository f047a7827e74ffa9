"""Writes a record to baselines/ from finished runs that differ in their seed only.

    python records/add.py out/a_0 out/a_1 out/a_2 --track small --slug wider-mlp --against 2026-11-21_first-b34 \\
        --hypothesis "..." --change "..." --dropped "..."

Nothing is written unless everything is right: one script, dataset, Config, hardware and set of versions, different
seeds, no --set except those of an args file that is committed in runs/, and complete logs that agree with their
totals. The folder appears in one rename. The words of its README.md may be edited until it is committed; the figures
between the markers may not. CORE is read from core.csv where runs/score_core.py, or an older script, has written it.
Rules: records/README.md.
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
from pathlib import Path

import record as rec

MAX_BYTES = 1_000_000
# Flags for the place and the seed of a run, and whether a value follows. They are not part of a record.
PLACE_FLAGS = {"--data": 1, "--run-dir": 1, "--seed": 1, "--wandb": 1, "--resume": 0}
PLACE_FIELDS = ("data", "seed", "wandb")  # the same in the Config
# The one --set that is free. Scripts up to 2026-11-22 scored CORE at the end of training; not each seed needs it.
NO_CORE = "core_items=-1"
LOG_FLAGS = {"--eval-every", "--save-every", "--log-every"}  # may replace those of an args file


def read_run(run_dir: Path, script: str) -> dict:
    """{"config", "log", ...} of a run directory; ends the program if it is not a finished run of the script."""
    for name in ("config.json", "log.jsonl", script, "report.md"):
        if not (run_dir / name).is_file():
            what = {"report.md": "the run is not finished", script: "it is of another track"}
            rec.fail(f"{run_dir} has no {name}; {what.get(name, 'name the directory of a run')}")
    try:
        run = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        if run["command"] != "pretrain":
            rec.fail(
                f"{run_dir} is a run of {run['command']}; a record is made of pretraining runs"
            )
        run |= {"dir": run_dir, "script": script, "fingerprint": run["dataset_fingerprint"],
                "set": [text for text in run["overridden"] if text != NO_CORE]}  # fmt: skip
        if NO_CORE in run["overridden"]:  # the recipe is that of the runs that were scored
            given = dict(text.split("=", 1) for text in run["set"])
            run["config"]["core_items"] = int(given.get("core_items", 0))
        table = run_dir / "core.csv"
        run["core_items"] = rec.core_items(table) if table.is_file() else None
        log, hashed = rec.read_log(run_dir / "log.jsonl"), run["machine"]["script_sha256"]
        problems = rec.check_log(log, run["config"])
    except (ValueError, KeyError, TypeError, rec.Unreadable) as error:
        rec.fail(f"{run_dir} cannot be read: {error}")
    if problems:
        rec.fail(f"{run_dir}/log.jsonl is not the log of a finished run: {problems[0]}")
    if problem := check_totals(run_dir, rec.figures(log)):
        rec.fail(f"{run_dir}: {problem}")
    if rec.sha256(run_dir / script) != hashed:
        rec.fail(f"{run_dir}/{script} was changed after the run: config.json states another sha256")
    return run


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
    """Runs of one record differ in seed, place and commit only."""
    first = runs[0]
    seeds = {}
    for run in runs:
        seed = run["config"]["seed"]
        if seed in seeds:
            rec.fail(
                f"{seeds[seed]} and {run['dir']} have the same seed {seed}; a record needs different seeds"
            )
        seeds[seed] = run["dir"]
        for part, skip in (("machine", ("git_commit", "git_dirty")), ("config", PLACE_FIELDS)):
            for key in dict.fromkeys((*first[part], *run[part])):
                a, b = (r[part].get(key) for r in (first, run))
                if a != b and key not in skip:
                    what = {"script_sha256": "script"}.get(key, key)
                    a, b = (str(v)[: 12 if what == "script" else 80] for v in (a, b))
                    rec.fail(f"{first['dir']} and {run['dir']} differ in {what}: {a} and {b}; a record is made of runs "
                             f"that differ in their seed only")  # fmt: skip
        if run["fingerprint"] != first["fingerprint"]:
            rec.fail(f"{first['dir']} and {run['dir']} ran on different datasets: their fingerprints are "
                     f"{first['fingerprint']} and {run['fingerprint']}")  # fmt: skip
        if strip(run["flags"]) != strip(first["flags"]) or run["set"] != first["set"]:
            rec.fail(f"{first['dir']} and {run['dir']} were started with different flags: "
                     f"{' '.join(strip(first['flags']))} and {' '.join(strip(run['flags']))}")  # fmt: skip
    scored = [run for run in runs if run["core_items"] is not None]
    for run in scored:
        if run["core_items"] != scored[0]["core_items"]:
            rec.fail(f"{scored[0]['dir']} and {run['dir']} were scored on different items of CORE; score both with the "
                     f"same --items")  # fmt: skip
    if not first["fingerprint"]:
        rec.fail(
            f"the dataset of {first['dir']} has no fingerprint; make it with data/pretrain.py, and train on that"
        )


def strip(flags: list[str]) -> list[str]:
    """Flags of the recipe: those given, without the command, seeds, places and NO_CORE."""
    out, skip = [], False
    for word, following in zip(flags, [*flags, ""][1:], strict=True):
        name = word.split("=")[0]
        if not skip and word in ("--set", f"--set={NO_CORE}") and NO_CORE in (following, word[6:]):
            skip = word == "--set"
        elif skip or name in PLACE_FLAGS:
            skip = not skip and "=" not in word and PLACE_FLAGS[name] == 1
        elif word != "pretrain":
            out.append(word)
    return out


def git(*words: str) -> str | None:
    """Output of a git command in this repository; None if it fails."""
    try:
        done = subprocess.run(["git", "-C", rec.ROOT, *words], capture_output=True)
    except OSError:
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None


def find_commit(run: dict) -> tuple[str | None, bool]:
    """(commit, whether the script differs from it): of the run, or else the newest one that holds its script."""
    stated, script = run["machine"]["git_commit"], run["script"]
    for commit in [stated, *(git("log", "--format=%H", "--", script) or "").split()]:
        text = git("show", f"{commit}:{script}") if commit else None
        if (
            text is not None
            and hashlib.sha256(text.encode()).hexdigest() == run["machine"]["script_sha256"]
        ):
            return commit, False
    return stated or None, True


def args_file(run: dict, flags: list[str], commit: str | None) -> tuple[str | None, str]:
    """(name, text) of the args file that the run used, as it is committed. No other --set may have been given."""
    files = [word[1:] for word in flags if word.startswith("@")]
    if len(files) > 1:
        rec.fail(
            f"{run['dir']} used several args files ({', '.join(files)}); a track has one at most"
        )
    given = rec.overrides(flags)
    if not files:
        if run["set"]:
            rec.fail(
                f"{run['dir']} overrides {', '.join(run['set'])} with --set, which voids record status; "
                f"change {run['script']} itself, or commit an args file in runs/, which makes a track of its own"
            )
        return None, ""
    name = Path(files[0]).name
    text = git("show", f"{commit}:runs/{name}") if commit else None
    if text is None:
        text = git("show", f"HEAD:runs/{name}")
    if text is None:
        rec.fail(f"{run['dir']} used {files[0]}, and runs/{name} is not committed; a track's args file is part of the "
                 f"repository, so commit it first")  # fmt: skip
    words = rec.args_words(text)
    if given or run["set"] != rec.overrides(words):
        extra = (
            given or [o for o in run["set"] if o not in rec.overrides(words)] or ["fewer fields"]
        )
        rec.fail(f"{run['dir']} overrides {', '.join(extra)}, which the committed runs/{name} does not; --set voids "
                 f"record status")  # fmt: skip
    if twice := (rec.flag_names(flags) & rec.flag_names(words)) - LOG_FLAGS:
        rec.fail(f"{run['dir']} was started with {', '.join(sorted(twice))}, which runs/{name} fixes for this track; "
                 f"leave it out, or make the change in {run['script']}")  # fmt: skip
    return name, text


def readme(record: dict, folder: Path, texts: dict[str, str]) -> str:
    parts = [f"# {texts['name']}"]
    for title in ("Hypothesis", "Change"):
        parts.append(f"## {title}\n\n{texts[title.lower()] or '(not stated)'}")
    parts.append(f"## Runs\n\n{rec.figures_text(record, folder)}")
    parts.append(f"## Tried and dropped\n\n{texts['dropped'] or '(not stated)'}")
    return "\n\n".join(parts) + "\n"


def build(runs: list[dict], args: argparse.Namespace, folder: Path, name: str) -> None:
    """Fills a folder that nobody sees yet."""
    first, script, flags = runs[0], runs[0]["script"], strip(runs[0]["flags"])
    commit, changed = find_commit(first)
    args_name, args_text = args_file(first, flags, commit)
    shutil.copyfile(first["dir"] / script, folder / script)
    if args_name:
        (folder / args_name).write_text(args_text, encoding="utf-8")
    listed = []
    for run in sorted(runs, key=lambda run: run["config"]["seed"]):
        seed = run["config"]["seed"]
        entry = {"seed": seed, "log": f"log_{seed}.jsonl.gz", "core_table": None}
        (folder / entry["log"]).write_bytes(
            gzip.compress((run["dir"] / "log.jsonl").read_bytes(), 9, mtime=0)
        )
        if (run["dir"] / "core.csv").is_file():
            entry["core_table"] = f"core_{seed}.csv"
            shutil.copyfile(run["dir"] / "core.csv", folder / entry["core_table"])
        listed.append(entry)
    (folder / "curve.csv").write_text(
        rec.curve_csv([rec.read_log(folder / e["log"]) for e in listed])
    )
    machine = first["machine"]
    record = {
        "format": 1, "track": args.track, "script": script, "args": args_name,
        "flags": [word for word in flags if not word.startswith("@")],
        "dataset": {"name": Path(first["config"]["data"]).name, "fingerprint": first["fingerprint"],
                    "vocab_size": first["config"]["vocab_size"]},
        "hardware": {key: machine[key] for key in ("device", "num_devices", "platform")},
        "versions": {key: machine[key] for key in ("python", "torch", "cuda", "numpy")},
        "commit": commit, "script_changed": changed,
        "config": {key: value for key, value in first["config"].items() if key not in PLACE_FIELDS},
        "absent": [], "against": args.against and Path(args.against).name, "runs": listed,
    }  # fmt: skip
    if record["against"]:
        other = rec.read_record(folder.parent / record["against"])
        if other["dataset"]["fingerprint"] != record["dataset"]["fingerprint"]:
            a, b = (r["dataset"]["fingerprint"][:12] for r in (other, record))
            rec.fail(f"{record['against']} was trained on the dataset {a}, these runs on {b}; bits per byte are "
                     f"compared on the same one only")  # fmt: skip
    sections = rec.section_hashes((folder / script).read_text(encoding="utf-8"))
    record |= {**rec.recompute(folder, record), "sections": sections, "files": rec.hashes(folder)}
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
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
    if problems := rec.problems(folder):
        rec.fail(f"the record does not verify: {problems[0]}")


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
        "--date", help="YYYY-MM-DD of the runs (default: when the last log was written)"
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
    runs = [read_run(run_dir, f"train_{args.track}.py") for run_dir in args.run_dirs]
    check_alike(runs)
    newest = max((run["dir"] / "log.jsonl").stat().st_mtime for run in runs)
    try:
        date = (
            datetime.date.fromisoformat(args.date)
            if args.date
            else datetime.date.fromtimestamp(newest)
        )
    except ValueError:
        rec.fail(f"--date {args.date} is not a day like 2026-11-21")
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
    if len(runs) < 3:
        print("It has fewer than 3 seeds, so it is listed without a rank.")


if __name__ == "__main__":
    main()
