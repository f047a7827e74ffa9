"""Recomputes every figure of a record from its logs and names everything that does not agree.

    python records/verify.py all
    python records/verify.py baselines/2026-11-23_first-p34
    python records/verify.py baselines/2026-11-23_first-p34 --rerun 100 --data data/shards/p34

Checked: hashes of all files, completeness and consistency of the logs, that no two logs are of one run, that the starts
of each run agree in what matters, the Config against the script's own defaults and the flags, the markers and hash of
each section of the script, every entry of record.json, p-values included, curve.csv, and every line between the markers
in README.md. Each problem names the file and the entry or line.
Nothing in the folder is executed, except with --rerun: it trains with the folder's script and flags until step N and
compares the loss with that of the record.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import check
import recipe
import record as rec

SPREADS = 4  # how many sd of the seeds a rerun may differ from the mean of the record
UNKNOWN_NOISE = 0.01  # relative, for a record with a single run


def rerun(folder: Path, steps: int, data: Path, processes: int) -> list[str]:
    """Trains with the first seed until step `steps` and compares each logged loss with the record's."""
    record = rec.read_record(folder)
    try:
        found = json.loads((data / "dataset.json").read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError) as error:
        rec.fail(f"{data} is not a dataset with a fingerprint ({error!r})")
    if found != record["dataset"]["fingerprint"]:
        rec.fail(f"{data} is another dataset: its fingerprint is {found[:12]}, the record ran on "
                 f"{record['dataset']['fingerprint'][:12]}")  # fmt: skip
    curve = {
        row["step"]: row
        for row in rec.loss_curve([rec.read_log(folder / r["log"]) for r in record["runs"]])
    }
    last, noise = max(curve), record["loss_noise"] or UNKNOWN_NOISE
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary) / "run"
        out = []
        starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        args = [f"@{folder.resolve() / record['args']}"] if record["args"] else []
        flags = [
            *record["flags"],
            "--seed",
            record["runs"][0]["seed"],
            "--data",
            data.resolve(),
            "--run-dir",
            run_dir,
        ]
        words = [
            *(starter if processes > 1 else []),
            folder.resolve() / record["script"],
            *args,
            *flags,
        ]
        line = [sys.executable, *map(str, words)]
        log = train_until(steps, last, line, run_dir / "log.jsonl", Path(temporary) / "stderr")
        made = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["config"]
    for key in (
        recipe.RULED
    ):  # a script may derive these by a rule, which only the script itself can compute
        stated = (record["config"] or {}).get(key)
        if record["config"] and stated != made.get(key):
            out.append(f"rerun: config.{key} is {made.get(key)}, record.json states {stated}")
    pairs = [(f"the loss at step {e['step']}", e["loss"], curve[e["step"]]["loss"], noise)
             for e in rec.split(log)[0] if e["step"] in curve and e["step"] <= steps]  # fmt: skip
    if steps >= last:
        val = record["summary"]["val_bpb"]
        spread = val["sd"] / val["mean"] if val["sd"] else UNKNOWN_NOISE
        pairs.append(("val bpb", rec.split(log)[1][-1]["val_bpb"], val["mean"], spread))
    for what, value, mean, spread in pairs:
        off, allowed = value / mean - 1, SPREADS * spread
        print(
            f"  {what}: {value:.4f}, record {mean:.4f} ({off:+.3%}, allowed {allowed:.3%})",
            flush=True,
        )
        if not abs(off) <= allowed:
            out.append(f"rerun: {what} is {value:.4f}, the record has {mean:.4f}; that is {off:+.2%}, and {SPREADS} sd "
                       f"of its seeds are {allowed:.2%}")  # fmt: skip
    return out


def train_until(steps: int, last: int, command: list[str], log: Path, errors: Path) -> list[dict]:
    """Starts a run and stops it once it has logged the step, because --steps would change its schedules.

    Returns the entries of its log. If the step is the last one the run is left to finish.
    """
    with errors.open("w") as stderr:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, cwd=rec.ROOT)
    try:
        while True:
            ended = run.poll() is not None  # asked before reading, so that its last lines are seen
            text = log.read_text(encoding="utf-8") if log.is_file() else ""
            lines = text.splitlines(keepends=True)
            entries = [json.loads(line) for line in lines if line.endswith("\n")]
            reached = bool(entries) and entries[-1]["step"] >= min(steps, last)
            if reached and (steps < last or ended):
                return entries
            if ended:
                said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                rec.fail(
                    f"the rerun ended before step {steps}: {said[-1] if said else 'it said nothing'}"
                )
            time.sleep(0.2)
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
        run.wait()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER|all", help="a record, or all in baselines/")
    parser.add_argument(
        "--rerun", type=int, metavar="N", help="also train until step N and compare the loss"
    )
    parser.add_argument("--data", type=Path, help="with --rerun: the dataset directory")
    parser.add_argument(
        "--processes", type=int, default=1, help="with --rerun: GPUs to use (default 1)"
    )
    args = parser.parse_args(argv)
    if args.rerun is not None and (args.folder == "all" or not args.data or args.rerun < 1):
        rec.fail(
            "--rerun needs one record, a step of at least 1, and --data with the dataset it was trained on"
        )
    folders = [Path(args.folder)]
    if args.folder == "all":
        folders = sorted(
            p for p in rec.BASELINES.iterdir() if p.is_dir() and not p.name.startswith(".")
        )
    bad = 0
    for folder in folders:
        if not folder.is_dir():
            rec.fail(f"{folder} is not a folder; name a record, or all")
        found = check.problems(folder)
        if args.rerun and not found:
            print(f"{folder.name}: training until step {args.rerun}", flush=True)
            found = rerun(folder, args.rerun, args.data, args.processes)
        print(f"{folder.name}: {'ok' if not found else f'{len(found)} problem(s)'}")
        for text in found:
            print(f"  {text}")
        bad += bool(found)
    if bad:
        rec.fail(f"{bad} of {len(folders)} record(s) do not verify, see above")


if __name__ == "__main__":
    main()
