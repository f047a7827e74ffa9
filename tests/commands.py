"""Commands that run in this process, whole runs of train_small.py, and the run directories that they leave."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  (a run imports it late)
import train_small as ts
from safetensors.torch import load_file

from tiny import TINY, random_model, script, tiny_config

# Wide enough for most parameters to be shared out over ranks; one table has an odd number of rows.
RUN = {**TINY, "width": 128, "head_dim": 32, "bigram_rows": 1501, "keep_checkpoints": 4}
EVERY = ("--save-every", "3", "--eval-every", "6", "--log-every", "1")


def sets(values: dict) -> list[str]:
    """The flag of every field but tokens, since --steps or --tokens says how long a run is."""
    flags = []
    for key, value in values.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif key != "tokens":
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            flags.append(f"--{name}={text}".replace(" ", ""))
    return flags


def flags(data, run_dir, *more, steps=12, **overrides) -> list[str]:
    where = ["--data", str(data), "--run-dir", str(run_dir)]
    return [*where, *sets({**RUN, **overrides}), "--steps", str(steps), *EVERY, *more]


def call(main, *argv) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 2
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        code = main([str(arg) for arg in argv])
    return code, out.getvalue(), err.getvalue()


def main(*argv) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of train_small.py."""
    return call(ts.main, *argv)


def ran(main, *argv) -> dict:
    """The result that a command prints last; it must end well."""
    code, out, err = call(main, *argv)
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def stops(main, *argv) -> str:
    """The one sentence that a command ends with; argparse writes its usage before."""
    code, _, err = call(main, *argv)
    assert code == 2 or code == 1 and err.startswith("error: ") and err.count("\n") == 1, err
    return err.splitlines()[-1]


def sentence(action, *args, **options) -> str:
    """The sentence with which an action of data/ ends the script."""
    with pytest.raises(SystemExit) as end:
        action(*args, **options)
    message = end.value.code
    assert message.startswith("error: ") and "\n" not in message
    return message


def passes(*argv) -> str:
    """What train_small.py prints; it must end well."""
    code, out, err = main(*argv)
    assert code == 0, err
    return out


def refused(*argv) -> str:
    """The one sentence that train_small.py ends with."""
    return stops(ts.main, *argv)


# ---- what a run leaves


def entries(run_dir) -> list[dict]:
    """The log of a run."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


def entries_without_clocks(run_dir) -> list[dict]:
    """The log without what depends on time and memory."""
    clocks = ("seconds", "_ms", "per_second", "memory", "mfu")
    return [{k: v for k, v in e.items() if not any(word in k for word in clocks)} for e in entries(run_dir)]


def losses(run_dir) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in entries(run_dir) if "loss" in e}


def saved(run_dir) -> list[int]:
    return [int(p.name[5:]) for p in ts.checkpoints(run_dir)]


def tensors(run_dir, step=12) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    return {f"{name}/{k}": v for name in ts.CHECKPOINT_FILES for k, v in load_file(folder / name).items()}


def snapshot(folder) -> dict:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def write_run(folder: Path, bpe: Path, chat: bool = False, model=None, config=None, **overrides) -> Path:
    """A run directory with a model of random weights, as pretraining or (chat) finetuning leaves it."""
    if config is None:
        config = tiny_config(**{"vocab_size": 900, "dtype": "float32", "data": "/home/me/secret", **overrides})
    model = model or random_model(config)
    folder.mkdir(parents=True)
    state = {"step": 7, "scores": {"val_bpb": 1.25}}
    script(config).write_checkpoint(folder, (model.state_dict(), {}), state)
    description = {"config": dataclasses.asdict(config), "command": "finetune" if chat else "pretrain", "flags": []}
    (folder / "config.json").write_bytes(ts.seal(description))
    scored = {"step": 7, "val_bpb": 1.25, "tokens": 4096, "scored": {"bytes": 54321}}
    entries = [{"step": 5, "loss": 2.0}, scored, {"step": 9, "val_bpb": 9.0}]
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    shutil.copy(script(config).__file__, folder)
    shutil.copy(bpe, folder / "tokenizer.json")
    return folder


# ---- runs that are stopped


def at_step(monkeypatch, step: int, action, script=ts) -> None:
    """Runs action(state) after the given optimizer step."""
    original = script.train_step

    def train_step(state, batch):
        loss = original(state, batch)
        if state.step == step:
            action(state)
        return loss

    monkeypatch.setattr(script, "train_step", train_step)


def stop_at(monkeypatch, step: int, number=signal.SIGTERM, script=ts) -> None:
    at_step(monkeypatch, step, lambda state: os.kill(os.getpid(), number), script)
