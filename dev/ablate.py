"""What each technique is worth: a run without it against a run with all, in bits per byte and milliseconds a step.

    python dev/ablate.py @runs/b34.args                      all techniques, on every GPU of the machine
    python dev/ablate.py --only smear,backout @runs/b34.args --seed 1

Other arguments go to train_small.py. Every GPU first trains the whole recipe and then fetches techniques from one
queue, one run at a time. Differences are against the whole recipe on the same GPU, because cards differ by some
percent. Prints a table as runs end and writes it, sorted, to OUT/ablations.md. A run that exists already is not
repeated if its flags and its script are those of this call. With one seed, a difference below twice the spread of seeds
(0.0006 on B34) means little.
"""

import argparse
import hashlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "whole recipe"
TECHNIQUES = {  # name: what switches it off, or replaces it by the common alternative
    "value embeddings": "value_embed_layers=()",
    "long windows": "long_layers=()",
    "key offset": "key_offset_layers=()",
    "bigram embedding": "bigram_rows=0",
    "x0 in every layer": "x0_injection=False",
    "attention gates": "attention_gates=False",
    "one input for the last attentions": "shared_input_from=99",
    "prefix targets": "prefix_weight=0.0",
    "offset softcap (tanh 15 instead)": "softcap=(30.0,0.0,7.5)",
    "smear": "smear=False",
    "backout": "backout_layer=-1",
    "no attention in layer 6": "no_attention_layers=()",
    "fp8 layers": "fp8=False",
    "fp8 head": "fp8_head=False",
}
TABLE_HEAD = "| without | bpb | ms a step |\n| --- | ---: | ---: |\n"


class RunError(Exception):
    """A run that failed, or that cannot be used; the message says why."""


@dataclass
class Run:
    bpb: float
    ms: float  # median of a step


@dataclass
class Row:
    loss: float  # bits per byte without the technique; infinite if the run failed
    text: str


def train(run_dir: Path, flags: list[str], gpu: str) -> None:
    """Trains train_small.py on a GPU ("": the CPU). Raises RunError with its last message if it fails."""
    command = [sys.executable, str(ROOT / "train_small.py"), *flags]
    command += ["--run-dir", str(run_dir), "--save-every", "-1"]
    env = dict(os.environ)
    if gpu:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        message = done.stderr.strip() or "no message"
        raise RunError(message.splitlines()[-1])


def read_run(run_dir: Path) -> Run:
    """Final bits per byte, and the median time of a step without the first fifth of them."""
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    lines = (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    times = [entry["step_ms"] for entry in entries if "step_ms" in entry]
    return Run(result["val_bpb"], statistics.median(times[len(times) // 5 :]))


def run(out: Path, name: str, flags: list[str], gpu: str) -> Run:
    """Trains the recipe without a technique, or reads what an earlier call left. Raises RunError."""
    if name in TECHNIQUES:
        flags = [*flags, "--set", TECHNIQUES[name]]
    script = hashlib.sha256((ROOT / "train_small.py").read_bytes()).hexdigest()
    wanted = {"flags": flags, "script": script}

    run_dir = out / name.replace(" ", "_").replace("(", "").replace(")", "")
    made = run_dir / "ablation.json"
    if not (run_dir / "result.json").is_file():
        train(run_dir, flags, gpu)
        made.write_text(json.dumps(wanted), encoding="utf-8")
    elif not made.is_file() or json.loads(made.read_text(encoding="utf-8")) != wanted:
        raise RunError(f"{run_dir} has other flags or another script; choose another --out")
    return read_run(run_dir)


def compare(out: Path, name: str, flags: list[str], gpu: str, whole: Run) -> Row:
    """A row of the table: the run without a technique minus the whole recipe."""
    try:
        found = run(out, name, flags, gpu)
    except RunError as error:
        return Row(float("inf"), f"| {name} | failed: {error} | |")
    bpb = found.bpb - whole.bpb
    ms = found.ms - whole.ms
    return Row(found.bpb, f"| {name} | {bpb:+.4f} | {ms:+.2f} |")


def work(out: Path, flags: list[str], gpu: str, todo: queue.Queue, rows: list[Row]) -> None:
    """Trains the whole recipe on a GPU, then techniques from the queue until it is empty; appends to rows."""
    name = f"{WHOLE} {gpu}".strip()
    try:
        whole = run(out, name, flags, gpu)
    except RunError as error:
        rows.append(Row(float("inf"), f"| {name} | failed: {error} | |"))
        return
    print(f"{WHOLE} on GPU {gpu or '-'}: {whole.bpb:.4f} bpb, {whole.ms:.2f} ms a step", flush=True)

    while True:
        try:
            technique = todo.get_nowait()
        except queue.Empty:
            return
        row = compare(out, technique, flags, gpu, whole)
        rows.append(row)
        print(row.text, flush=True)


def choose(only: str | None) -> list[str]:
    """Techniques whose names begin with one of the words in --only, or all."""
    if not only:
        return list(TECHNIQUES)
    beginnings = tuple(word.strip() for word in only.split(","))
    return [name for name in TECHNIQUES if name.startswith(beginnings)]


def find_gpus() -> list[str]:
    """Numbers of the GPUs of this machine, or [""] without one. Asks another process, which lets go of them."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    count = int(done.stdout or 0)
    return [str(index) for index in range(count)] or [""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "out" / "ablations", help="folder of runs and table")
    add("--only", help="beginnings of the names of some techniques, separated by commas")
    args, flags = parser.parse_known_args()
    names = choose(args.only)
    if not names:
        print(
            f"error: --only {args.only} matches no technique; choose from {', '.join(TECHNIQUES)}",
            file=sys.stderr,
        )
        return 1

    todo: queue.Queue = queue.Queue()
    for name in names:
        todo.put(name)
    rows: list[Row] = []
    threads = []
    for gpu in find_gpus():
        threads.append(threading.Thread(target=work, args=(args.out, flags, gpu, todo, rows)))
        threads[-1].start()
    for thread in threads:
        thread.join()

    # The most valuable technique first: without it the loss is highest.
    rows.sort(key=lambda row: row.loss, reverse=True)
    table = TABLE_HEAD + "".join(f"{row.text}\n" for row in rows)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ablations.md").write_text(table, encoding="utf-8")
    print(table, end="")
    return int(any("failed" in row.text for row in rows))


if __name__ == "__main__":
    sys.exit(main())
