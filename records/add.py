"""Writes an entry to baselines/ from finished runs that differ only in their seed.

    python records/add.py out/a_0 out/a_1 out/a_2 --slug wider-mlp --baseline 2026-11-26_p34-h100 \\
        --hypothesis "..." --change "..." --dropped "..."

Nothing is written unless the entry verifies and the script reproduces the Config of the runs from
their flags. Until the entry is committed, you may edit its README.md, except the figures
between the markers. CORE is read from core.csv of runs/score_core.py. Rules: records/README.md.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import entry
import files
import flags
import metrics
import rules
import text
import tracks
from files import UserError

MAX_BYTES = 1_000_000
# What run_SEED.json keeps of each start.
START = ("date", "step", "flags", "machine", "dataset_fingerprint")
# The Config that a script makes of each list of flags. It runs the script's import, so only of
# one's own runs.
PRINT_CONFIGS = """
import dataclasses, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
module = sys.modules["script"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for words in json.loads(sys.argv[2]):
    config = module.make_config(module.build_parser().parse_args(words))
    stages = [dataclasses.astuple(stage) for stage in config.stage_table]
    print(json.dumps({**dataclasses.asdict(config), "stages": stages}))
"""


# ==== runs


def model_of(run_dir: Path) -> str:
    """Whose training script a run directory keeps: "small" or "medium"."""
    for model in entry.SCRIPTS:
        if (run_dir / f"train_{model}.py").is_file():
            return model
    raise UserError(f"{run_dir} has no training script; pass the directory of a run")


def read_run(run_dir: Path, script: str) -> dict:
    """A finished run: {"dir", "flags" as given, "config", "file": its future run_SEED.json}."""
    for name in ("config.json", "log.jsonl", script):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} has no {name}; pass directories of runs of one script")
    description = entry.read_description(run_dir)
    if description["command"] != "pretrain":
        raise UserError(f"{run_dir} is a run of {description['command']}; an entry is made of pretraining runs")
    if not description.get("starts"):
        raise UserError(f"{run_dir}/config.json has no starts, which {script} writes there")
    if not description["dataset_fingerprint"]:
        raise UserError(f"the dataset of {run_dir} has no fingerprint; make it with data/pretrain.py")
    log = metrics.read_log(run_dir / "log.jsonl")
    problems = rules.check_log(log, description["config"])
    files.raise_first([f"{run_dir}/log.jsonl: {problem}" for problem in problems])
    file = run_file(description, log)
    file["commit"], file["script_changed"] = find_commit(script, file["machine"])
    file["date"] = file["starts"][0]["date"][:10]
    given = description["starts"][0]["flags"]
    return {"dir": run_dir, "flags": given, "config": description["config"], "file": file}


def run_file(description: dict, log: list[dict]) -> dict:
    """run_SEED.json: what config.json states, without the folders of a run."""
    starts = [{key: start[key] for key in START} for start in description["starts"]]
    for start in starts:
        start["flags"] = flags.entry_flags(start["flags"])
    config = description["config"]
    return {
        "seed": config["seed"],
        "data": Path(config["data"]).name,
        "dataset_fingerprint": description["dataset_fingerprint"],
        "flags": starts[0]["flags"],
        "config": {key: value for key, value in config.items() if key not in flags.RUN_FIELDS},
        "machine": description["machine"],
        "starts": starts,
        "scored": metrics.split_log(log)[1][-1].get("scored"),  # older scripts do not state it
    }


def committed(path: str, commit: str | None) -> str | None:
    """The committed content of a file of this repository; None if it is not committed."""
    done = subprocess.run(["git", "-C", files.ROOT, "show", f"{commit}:{path}"], capture_output=True)
    return done.stdout.decode() if done.returncode == 0 else None


def find_commit(script: str, machine: dict) -> tuple[str | None, bool]:
    """(commit of the run, whether its script differs from that)."""
    commit = machine["git_commit"] or None
    source = committed(script, commit) or ""
    return commit, hashlib.sha256(source.encode()).hexdigest() != machine["script_sha256"]


def check_datasets(runs: list[dict], baseline: Path | None) -> None:
    """Raises UserError unless all runs and the baseline have read one dataset."""
    read = {}
    for run in runs:
        fingerprint = run["file"]["dataset_fingerprint"]
        read[fingerprint] = f"{run['dir']} read {run['config']['data']} ({fingerprint[:12]})"
    if baseline:
        data = entry.read_record(baseline)["dataset"]
        read[data["fingerprint"]] = f"{baseline.name} read {data['name']} ({data['fingerprint'][:12]})"
    if len(read) > 1:
        raise UserError(f"{' and '.join(read.values())}; an entry and its baseline need one dataset, so pass others")


def check_configs(runs: list[dict], args: str, script: str) -> None:
    """Raises UserError unless each Config is what the script makes of the flags.

    Args: runs as read_run() gives them; args the text of the args file; script the name of the
    training script
    """
    lists = []
    for run in runs:
        own = [word for word in run["flags"] if not word.startswith("@")]
        lists.append([*flags.parse_args_file(args), *own])
    first = runs[0]["dir"].resolve()
    command = [sys.executable, "-c", PRINT_CONFIGS, str(first / script), json.dumps(lists)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=first)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed no error"]
        raise UserError(f"{first / script} does not print its Config: {lines[-1]}")
    made = [json.loads(line) for line in done.stdout.splitlines()[-len(runs) :]]
    # The tokenizer gives vocab_size, and intervals may change when a run is resumed.
    free = ("data", "wandb", "vocab_size", *flags.INTERVAL_FIELDS)
    for run, config in zip(runs, made, strict=True):
        pair = [{k: v for k, v in c.items() if k not in free} for c in (config, run["config"])]
        files.raise_first(files.mismatches(*pair, f"{run['dir']}: config", "script and flags give"))


# ==== the entry


def build(runs: list[dict], model: str, args: argparse.Namespace, folder: Path, title: str) -> None:
    """Writes the entry to a temporary folder. Raises UserError if it does not verify."""
    first = runs[0]
    script = f"train_{model}.py"
    shutil.copyfile(first["dir"] / script, folder / script)
    args_files = [word[1:] for word in first["file"]["flags"] if word.startswith("@")]
    args_text = ""
    for name in args_files[:1]:
        # In a changed working tree, the args file may have been committed after the runs.
        commit = "HEAD" if first["file"]["machine"]["git_dirty"] else first["file"]["commit"]
        args_text = committed(f"runs/{name}", commit) or committed(f"runs/{name}", "HEAD")
        if args_text is None:
            raise UserError(f"runs/{name} is not committed; the args file of an entry is part of the repository")
        (folder / name).write_text(args_text, encoding="utf-8")
    for run in runs:
        copy_run(run, folder)
    logs = [metrics.read_log(folder / f"log_{run['file']['seed']}.jsonl.gz") for run in runs]
    (folder / "curve.csv").write_text(text.curve_csv(logs), encoding="utf-8")

    baseline = args.baseline and Path(args.baseline).name
    check_datasets(runs, baseline and folder.parent / baseline)
    record = entry.make_record(folder, model, baseline)
    (folder / "record.json").write_text(files.to_json(record), encoding="utf-8")
    parts = {"Hypothesis": args.hypothesis, "Change": args.change}
    parts |= {"Runs": text.figures_text(record, folder), "Tried and dropped": args.dropped}
    sections = [f"## {part}\n\n{words or '(not stated)'}" for part, words in parts.items()]
    page = "\n\n".join([f"# {title}", *sections]) + "\n"
    (folder / "README.md").write_text(page, encoding="utf-8")

    size = sum(p.stat().st_size for p in folder.iterdir())
    if size > MAX_BYTES:
        raise UserError(f"the entry would take {size:,} bytes, more than {MAX_BYTES:,}; raise --log-every")
    files.raise_first([f"these runs cannot make an entry: {problem}" for problem in rules.problems(folder)])
    check_configs(runs, args_text, script)


def copy_run(run: dict, folder: Path) -> None:
    """Writes run_SEED.json, the log and core.csv of a run. Raises UserError if its seed is taken."""
    seed = run["file"]["seed"]
    file = folder / f"run_{seed}.json"
    if file.exists():
        raise UserError(f"{run['dir']} has the seed {seed}, like another run; an entry needs different seeds")
    file.write_text(files.to_json(run["file"]), encoding="utf-8")
    log = (run["dir"] / "log.jsonl").read_bytes()
    (folder / f"log_{seed}.jsonl.gz").write_bytes(gzip.compress(log, 9, mtime=0))
    if (run["dir"] / "core.csv").is_file():
        shutil.copyfile(run["dir"] / "core.csv", folder / f"core_{seed}.csv")


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="finished runs, one for each seed")
    add("--slug", required=True, help="short name in lower case, e.g. wider-mlp")
    add("--baseline", metavar="ENTRY", help="entry to compare with, a folder of baselines/")
    add("--hypothesis", default="", help="what was expected, and why")
    add("--change", default="", help="what differs from the baseline")
    add("--dropped", default="", help="what was tried and dropped")
    add("--out", type=Path, default=files.BASELINES, help="folder of entries (default baselines/)")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", args.slug):
        raise UserError(f"--slug {args.slug} must be lower-case words and digits joined by -, e.g. wider-mlp")
    if args.baseline and not (args.out / Path(args.baseline).name / "record.json").is_file():
        raise UserError(f"--baseline {args.baseline} is not an entry in {args.out}; pass the name of a folder there")
    model = model_of(args.run_dirs[0])
    runs = [read_run(run_dir, f"train_{model}.py") for run_dir in args.run_dirs]
    runs.sort(key=lambda run: run["file"]["seed"])
    final = args.out / f"{max(run['file']['date'] for run in runs)}_{args.slug}"
    if final.exists():
        raise UserError(f"{final} exists; entries are never edited, so choose another --slug")
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        build(runs, model, args, temporary, final.name)
        os.rename(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    path = os.path.relpath(final)
    print(f"{path} holds {len(runs)} run(s): read its README.md, edit its words, then")
    print(f"    python records/verify.py {path}\n    python records/leaderboard.py")
    if not tracks.tracks_of(entry.read_record(final), tracks.read()):
        print("No track of records/tracks.json has this dataset, script and hardware, so it gets no rank.")


if __name__ == "__main__":
    main()
