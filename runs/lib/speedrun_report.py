"""Writes OUT/report.md of runs/speedrun_small.sh, from what its stages left in OUT, and prints it.

    python runs/lib/speedrun_report.py OUT
"""

import json
import sys
from pathlib import Path

STAGES = ("data", "core", "base", "score_core", "conversations", "sft", "chat_eval")


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def main(out: Path) -> None:
    base = read_json(out / "base/result.json")
    sft = read_json(out / "sft/result.json")
    machine = read_json(out / "base/config.json")["machine"]
    lines = (out / "logs/chat_eval.log").read_text(encoding="utf-8").splitlines()
    chat = json.loads([line for line in lines if line.startswith("{")][-1])

    rows = {
        "val bpb after pretraining": f"{base['val_bpb']:.4f}",
        "CORE": f"{base['core']:.4f}" if "core" in base else "skipped",
        "val bpb of the answers after finetuning": f"{sft['val_bpb']:.4f}",
        f"ChatCORE, {len(chat['tasks'])} tasks": f"{chat['chatcore']:.4f}",
        **{f"- {task}, accuracy": f"{accuracy:.4f}" for task, accuracy in chat["tasks"].items()},
        "pretraining tokens": f"{base['tokens']:,}",
        "training seconds, pretraining + finetuning": f"{base['train_seconds']:.1f} + {sft['train_seconds']:.1f}",
    }
    # The time of a stage is the sum over all attempts, with start, compilation and evaluation.
    files = {stage: out / f"logs/{stage}.seconds" for stage in STAGES}
    seconds = {stage: sum(map(int, file.read_text().split())) for stage, file in files.items() if file.exists()}
    rows |= {f"seconds of {stage}": value for stage, value in seconds.items()}
    rows["seconds in total"] = sum(seconds.values())
    rows["device"] = f"{machine['num_devices']} x {machine['device']}"
    rows["torch"] = machine["torch"]

    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    text = f"# {out.name}\n\n| | |\n| --- | ---: |\n{table}\n\nRuns: [base](base/report.md), [sft](sft/report.md)\n"
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
