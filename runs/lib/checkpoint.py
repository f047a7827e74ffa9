"""The start from another run: its checkpoint and its settings."""

import dataclasses
import hashlib
from pathlib import Path
from types import ModuleType

from lib.command import RunError, print_note


def open_dataset(script: ModuleType, path: str | Path, run_dir: Path):
    """The script's Dataset at a path, for a run. Raises: RunError if it has another tokenizer"""
    dataset = script.Dataset.open(path)
    if (run_dir / "tokenizer.json").read_bytes() != dataset.tokenizer.path.read_bytes():
        advice = f"pass the --data of that run, or make one with data/pretrain.py --tokenizer {run_dir}/tokenizer.json"
        raise RunError(f"{dataset.root} has a different tokenizer from {run_dir}; {advice}")
    return dataset


def newest_checkpoint(script: ModuleType, run_dir: Path, names: tuple[str, ...] | None = None) -> Path:
    """The newest complete checkpoint of a run; says which ones are skipped.

    Args:   names: files that the tool reads, whose hashes are checked; None: all
    Raises: RunError if there is none
    """
    folder = script.newest_whole(run_dir, print_note, names or script.CHECKPOINT_FILES)
    if folder is None:
        raise RunError(f"{run_dir} has no complete checkpoint; wait until the run saves one, or use another run")
    return folder


def describe_run(script: ModuleType, run_dir: Path, command: str) -> dict:
    """config.json of a run to resume. Raises: RunError if it is no run of runs/COMMAND.py"""
    description = script.read_description(run_dir)
    own = description.get("command")
    if own != command:
        folder = "runs/encoder" if own.endswith("_encoder") else "runs"
        tool = f"{folder}/{own}.py" if own != "pretrain" else next(run_dir.glob("train_*.py")).name
        raise RunError(f"{run_dir} is a run of {tool}; continue it with python {tool} --resume --run-dir {run_dir}")
    return description


def stage_config(script: ModuleType, checkpoint: Path, packs: int, lr: float):
    """The Config of the run that finetuning starts from, with a schedule of one stage."""
    base = script.read_config(checkpoint.parent.parent)
    full_momentum = base.momentum[1]
    return dataclasses.replace(
        base,
        average=0.0,  # weights are averaged in pretraining only
        stages=((1.0, packs, lr),),
        max_epochs=1,
        # The rate falls from the first step to the last, down to 0.
        cooldown=1.0,
        lr_floor=0.0,
        # No warm-up of momentum: finetuning begins with the buffers of pretraining.
        momentum=(full_momentum, full_momentum, 0, 0),
        # One target for each token, as in validation.
        mtp_weights=(1.0,),
        prefix_weight=0.0,
        # A short conversation has 32 tokens.
        max_docs_per_pack=max(base.max_docs_per_pack, base.pack_tokens // 32),
        wandb="",
    )


def load_source(script: ModuleType, state, checkpoint: Path, moments: bool) -> None:
    """Gives a new state the weights of another run, and its optimizer moments if asked for."""
    script.load_checkpoint(state, checkpoint)
    state.step = 0
    if not moments:
        for slot in state.optimizer.slots:
            slot.updates = 0
            for moment in slot.moments.values():
                moment.zero_()


def describe_tool(job, settings: dict, *files: str) -> None:
    """Gives a subclass of Pretraining what its run directory keeps of a tool: settings, scripts and their hashes."""
    job.scripts = tuple(Path(file).resolve() for file in files)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in job.scripts}
    job.description = {**settings, "scripts": digests}
