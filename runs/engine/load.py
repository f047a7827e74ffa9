"""Loading a run: the training script that lies in its directory, a checkpoint, and the tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lib.checkpoint import newest_checkpoint
from lib.command import RunError, first_line
from safetensors.torch import load_file

INTERFACE = 10  # of the training scripts that this package can read


def import_script(run_dir: str | Path) -> ModuleType:
    """Imports the training script that lies in a run directory, which executes its code.

    Raises: RunError if there is not exactly one, or if its interface is not INTERFACE
    """
    run_dir = Path(run_dir)
    scripts = sorted(run_dir.glob("train_*.py"))
    if len(scripts) != 1:
        problem = f"it has {len(scripts)} training scripts" if run_dir.is_dir() else "it does not exist"
        hint = "; --step chooses a checkpoint" if run_dir.name.startswith("step_") else ""
        raise RunError(f"{run_dir} is not a run directory: {problem}; pass another{hint}")
    # A name of its own for each path, as a second run must not replace the module of the first.
    name = re.sub(r"\W+", "_", f"run {scripts[0].resolve().with_suffix('')}")
    spec = importlib.util.spec_from_file_location(name, scripts[0])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)

    interface = getattr(module, "INTERFACE", 1)
    if interface != INTERFACE:
        description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        commit = description.get("machine", {}).get("git_commit") or "(not in config.json)"
        problem = f"the script in {run_dir} has interface {interface} but this tool reads {INTERFACE}"
        raise RunError(f"{problem}; use the tools of the commit that made the run: {commit}")
    return module


@dataclass(frozen=True)
class Run:
    script: ModuleType  # of the run directory
    model: Any  # GPT of the script, on the device, in eval mode
    tokenizer: Any  # Tokenizer of the script
    config: Any  # Config of the script
    step: int  # of the checkpoint


def load_run(run_dir: str | Path, step: int | None = None, device: str | None = None, **changes) -> Run:
    """Loads the newest checkpoint of a run, or that of a step.

    Args:   device "cuda", "mps" or "cpu", by default the best there is; changes are fields of the
            script's Config that may differ between machines, such as dtype; None changes nothing
    Raises: RunError if the run, the step or the device is missing; UserError of the script, see lib/command.py
    """
    run_dir = Path(run_dir)
    script = import_script(run_dir)
    checkpoint = choose_checkpoint(script, run_dir, step)
    changes = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(script.read_config(run_dir), **changes)
    device = choose_device(device)
    try:
        model = load_model(script, config, checkpoint, device)
    except RuntimeError as error:  # torch's, if memory runs out or the weights do not fit config.json
        raise RunError(f"{run_dir} cannot be loaded ({first_line(error)})") from None
    model.attention = script.choose_attention(model, lambda text: None)
    tokenizer = script.Tokenizer(run_dir / "tokenizer.json")
    return Run(script, model, tokenizer, config, int(checkpoint.name[5:]))


def choose_checkpoint(script: ModuleType, run_dir: Path, step: int | None) -> Path:
    """The folder of a step's checkpoint, or of the newest complete one. Raises: as load_run"""
    files = ("model.safetensors",)
    if step is None:
        return newest_checkpoint(script, run_dir, files)
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    found = script.checkpoints(run_dir)
    if folder not in found:
        steps = ", ".join(str(int(path.name[5:])) for path in found) or "none"
        problem = f"{run_dir} has no checkpoint at step {step} (its steps: {steps})"
        raise RunError(f"{problem}; choose another --step, or omit it")
    script.check_checkpoint(folder, files)
    return folder


def load_model(script: ModuleType, config, checkpoint: Path, device: torch.device):
    """The GPT of a script with the weights of a checkpoint, in eval mode. Raises: RuntimeError, torch's"""
    model = script.GPT(config, device, script.choose_dtype(config, device))
    weights = load_file(checkpoint / "model.safetensors")
    if device.type == "cpu" and model.embed.dtype == torch.float32:
        # Most of the memory is n-gram tables. Those of a GPU stay in bf16, mapped from the file.
        for name in weights.keys() & {"bigram_embed", "trigram_embed"}:
            setattr(model, name, torch.nn.Parameter(weights[name]))
    model.load_state_dict(weights)
    return model.eval()


def choose_device(name: str | None) -> torch.device:
    """The device of a name, or the best there is, under torchrun the rank's GPU.

    Raises: RunError if this machine or this PyTorch lacks it
    """
    if name is None and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.set_num_threads(1)  # spinning OpenMP threads slow down other runs on the host
        name = "cuda"
    name = name or ("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"--device {name} does not work here ({first_line(error)}); omit it") from None
