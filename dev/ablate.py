"""What each technique is worth: a run without it against a run with all, in bits per byte and milliseconds a step.

    python dev/ablate.py @runs/b34.args                      all techniques, on every GPU of the machine
    python dev/ablate.py --only smear,backout @runs/b34.args --seed 1

Other arguments go to train_small.py. Every GPU first trains the whole recipe and then takes techniques from one queue,
one run at a time; differences are against the whole recipe on the same GPU, because cards differ by some percent.
Prints a table as runs end and writes it, sorted, to OUT/ablations.md. Runs that are there already, with the same flags
and the same script, are read, not repeated. One seed says little about differences below twice the spread of seeds
(0.0006 on B34).
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "whole recipe"
TECHNIQUES = {  # name: what switches it off, or puts the common alternative in its place
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


def run(out: Path, name: str, flags: list[str], gpu: str) -> dict:
    """Trains once on a GPU ("": the CPU), or reads what an earlier call left; returns bpb and ms a step."""
    run_dir = out / name.replace(" ", "_").replace("(", "").replace(")", "")
    change = ["--set", TECHNIQUES[name]] if name in TECHNIQUES else []
    script = hashlib.sha256((ROOT / "train_small.py").read_bytes()).hexdigest()
    made, wanted = run_dir / "ablation.json", {"flags": [*flags, *change], "script": script}
    if (run_dir / "result.json").is_file():
        if not made.is_file() or json.loads(made.read_text(encoding="utf-8")) != wanted:
            return {
                "name": name,
                "error": f"{run_dir} is of other flags or another script; take another --out",
            }
    else:
        command = [sys.executable, str(ROOT / "train_small.py"), *flags, *change, "--run-dir", str(run_dir),
                   "--set", "core_items=-1", "--save-every", "-1"]  # fmt: skip
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            lines = (done.stderr.strip() or "no message").splitlines()
            return {"name": name, "error": lines[-1]}
        made.write_text(json.dumps(wanted), encoding="utf-8")
    entries = [
        json.loads(line)
        for line in (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = [e["step_ms"] for e in entries if "step_ms" in e]
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return {
        "name": name,
        "bpb": result["val_bpb"],
        "ms": statistics.median(steps[len(steps) // 5 :]),
    }


def row(found: dict, whole: dict) -> str:
    if "error" in found:
        return f"| {found['name']} | failed: {found['error']} | |"
    return f"| {found['name']} | {found['bpb'] - whole['bpb']:+.4f} | {found['ms'] - whole['ms']:+.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "ablations", help="where runs and table go"
    )
    parser.add_argument(
        "--only", help="some of the techniques, by the beginnings of their names, with commas"
    )
    args, flags = parser.parse_known_args()
    names = [
        n
        for n in TECHNIQUES
        if not args.only or any(n.startswith(o.strip()) for o in args.only.split(","))
    ]
    if not names:
        print(f"error: --only {args.only} names none of {', '.join(TECHNIQUES)}", file=sys.stderr)
        return 1
    seen = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
    )
    gpus = [str(i) for i in range(int(seen.stdout or 0))] or [""]
    todo: queue.Queue = queue.Queue()
    for name in names:
        todo.put(name)
    rows: list[tuple] = []

    def work(gpu: str) -> None:
        whole = run(args.out, f"{WHOLE} {gpu}".strip(), flags, gpu)
        if "error" in whole:
            rows.append((0, row(whole, whole)))
            return
        print(
            f"{WHOLE} on GPU {gpu or '-'}: {whole['bpb']:.4f} bpb, {whole['ms']:.2f} ms a step",
            flush=True,
        )
        while not todo.empty():
            try:
                found = run(args.out, todo.get_nowait(), flags, gpu)
            except queue.Empty:
                return
            rows.append((-found.get("bpb", 99), row(found, whole)))
            print(rows[-1][1], flush=True)

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = [
        "| without | bpb | ms a step |",
        "| --- | ---: | ---: |",
        *(line for _, line in sorted(rows)),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ablations.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n".join(table))
    return int(any("failed" in line for line in table))


if __name__ == "__main__":
    sys.exit(main())
