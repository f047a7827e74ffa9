"""Recomputes every figure of an entry from its logs and lists all differences.

    python records/verify.py all
    python records/verify.py 2026-11-23_first-p34
    python records/verify.py 2026-11-23_first-p34 --rerun 100 --data data/shards/p34

records/README.md says what is checked. Only --rerun executes what is in the folder: it trains with
its script and flags until step N and compares Config and loss with those of the entry, and on the
same model of GPU also seconds and MFU.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import entry
import files
import metrics
import rules
from files import UserError

sys.path.insert(0, str(Path(__file__).parent / "rivals"))
import rivals

MAX_SIGMA = 4  # how many sd of the seeds a rerun may differ from the mean of the entry
UNKNOWN_NOISE = 0.01  # relative, for an entry with a single run
TIME_TOLERANCE = 0.05  # two GPUs of one model differ by 3 %, equal code by 2 % between sessions


def rerun(folder: Path, steps: int, data: Path, processes: int) -> list[str]:
    """Trains the first seed until step `steps` and compares its log with the entry: the problems."""
    record = entry.read_record(folder)
    device = record["hardware"]["device"]
    if not device.startswith(("cpu", "mps")) and not rivals.ask_gpu("name", None):
        raise UserError(f"the entry ran on {device}, and nvidia-smi finds no GPU here; --rerun needs one")
    fingerprint = record["dataset"]["fingerprint"]
    given = files.read_json(data / "dataset.json").get("fingerprint")
    if given != fingerprint:
        wanted = f"{record['dataset']['name']} with {fingerprint}"
        raise UserError(f"{data} is another dataset: its fingerprint is {given}, the entry ran on {wanted}")
    logs = entry.read_logs(folder, record)
    last = metrics.split_log(logs[0])[0][-1]["step"]
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary) / "run"
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command.append(str(folder.resolve() / record["script"]))
        if record["args"]:
            command.append(f"@{folder.resolve() / record['args']}")
        command += [*record["flags"], "--seed", str(record["runs"][0]["seed"])]
        command += ["--data", str(data.resolve()), "--run-dir", str(run_dir)]
        log = train_until(steps, last, command, run_dir / "log.jsonl", Path(temporary) / "stderr")
        made = entry.read_description(run_dir)
    log = [line for line in log if line["step"] <= steps]
    problems = compare_loss(record, logs, log, steps >= last)
    if record["config"]:
        recipes = [rules.recipe_of(config) for config in (made["config"], record["config"])]
        problems += files.mismatches(*recipes, "rerun: config", "the script makes")
    hardware = [(m["num_devices"], m["device"]) for m in (made["machine"], record["hardware"])]
    if hardware[0] == hardware[1]:
        return problems + compare_speed(logs, log)
    ran, stated = (f"{number} x {device}" for number, device in hardware)
    print(f"  seconds and MFU are not compared: this is {ran}, the entry ran on {stated}")
    return problems


def compare_loss(record: dict, logs: list, log: list[dict], finished: bool) -> list[str]:
    """Losses, and at the end val bpb, may differ from the mean by MAX_SIGMA sd of the seeds."""
    mine = {line["step"]: line["loss"] for line in metrics.split_log(log)[0]}
    noise = record["loss_noise"] or UNKNOWN_NOISE
    pairs = []
    for row in metrics.loss_curve(logs):
        step = row["step"]
        if step in mine:
            pairs.append((f"the loss at step {step}", mine[step], row["loss"], noise))
    if finished:
        bpb = record["summary"]["val_bpb"]
        sigma = bpb["sd"] / bpb["mean"] if bpb["sd"] else UNKNOWN_NOISE
        pairs.append(("val bpb", metrics.run_metrics(log)["val_bpb"], bpb["mean"], sigma))
    out = []
    for what, value, mean, sigma in pairs:
        off = value / mean - 1
        allowed = MAX_SIGMA * sigma
        text = f"{what} is {value:.4f}, the entry has {mean:.4f} ({off:+.3%}, allowed {allowed:.3%})"
        print(f"  {text}", flush=True)
        if not abs(off) <= allowed:
            out.append(f"rerun: {text}")
    return out


def compare_speed(logs: list[list[dict]], log: list[dict]) -> list[str]:
    """On the same hardware, MFU and tokens/s imply equal FLOPs of a token; seconds are similar."""
    stated = {line["step"]: line for line in metrics.split_log(logs[0])[0]}
    mine = [line for line in metrics.split_log(log)[0] if line["step"] in stated]
    out = []
    for line in mine:
        other = stated[line["step"]]
        flops = line["mfu"] / line["tokens_per_second"]
        if not math.isclose(flops, other["mfu"] / other["tokens_per_second"], rel_tol=1e-6):
            out.append(f"rerun: step {line['step']} of the log states an MFU that does not belong to its tokens/s")
    # The first line may hold what a process does once.
    first = mine[0]
    last = mine[-1]
    span = last["train_seconds"] - first["train_seconds"]
    old = stated[last["step"]]["train_seconds"] - stated[first["step"]]["train_seconds"]
    text = f"steps {first['step']} to {last['step']} took {span:.2f} s, in the entry {old:.2f} s"
    print(f"  {text}", flush=True)
    if span > (1 + TIME_TOLERANCE) * old:
        out.append(f"rerun: {text}; that is {span / old - 1:.0%} slower")
    return out


def train_until(steps: int, last: int, command: list[str], log: Path, errors: Path) -> list[dict]:
    """Starts a run and stops it once it has logged the step, as --steps would change its schedules.

    Returns the lines of its log. If the step is the last one, the run finishes.
    """
    with errors.open("w") as stderr:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, cwd=files.ROOT)
    try:
        while True:
            ended = run.poll() is not None  # asked before reading, so that its last lines are seen
            text = log.read_text(encoding="utf-8") if log.is_file() else ""
            lines = text.splitlines(keepends=True)
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            reached = bool(whole) and whole[-1]["step"] >= min(steps, last)
            if reached and (steps < last or ended):
                return whole
            if ended:
                lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise UserError(f"the rerun ended before step {steps}: {lines[-1] if lines else 'it printed no error'}")
            time.sleep(0.2)
    finally:
        run.terminate()
        run.wait()


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("folder", metavar="ENTRY|all", help="name or folder of an entry, or all in baselines/")
    add("--rerun", type=int, metavar="N", help="train until step N and compare with the entry")
    add("--data", type=Path, help="dataset directory for --rerun")
    add("--processes", type=int, default=1, help="GPUs for --rerun (default 1)")
    args = parser.parse_args(argv)
    if args.rerun is not None and (args.folder == "all" or not args.data or args.rerun < 1):
        raise UserError("--rerun needs one entry, a step of at least 1, and --data with its dataset")
    folders = entry.folders() if args.folder == "all" else [entry.find(args.folder)]
    bad = 0
    for folder in folders:
        problems = rules.problems(folder)
        if args.rerun and not problems:
            print(f"{folder.name}: training until step {args.rerun}", flush=True)
            problems = rerun(folder, args.rerun, args.data, args.processes)
        print(f"{folder.name}: {'ok' if not problems else f'{len(problems)} problem(s)'}")
        for problem in problems:
            print(f"  {problem}")
        bad += bool(problems)
    if bad:
        raise UserError(f"{bad} of {len(folders)} entries do not verify, see above")
    if args.folder == "all":
        runs = rivals.grouped(files.ROOT / "records" / "rivals" / "logs")
        print(f"rivals: {sum(map(len, runs.values()))} logs ok")


if __name__ == "__main__":
    main()
