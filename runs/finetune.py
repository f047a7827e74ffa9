"""Finetunes a pretrained run on conversations, so that its model answers questions.

    python runs/finetune.py out/RUN                        one pass over the conversations of its dataset
    python runs/finetune.py out/RUN --packs 16 --lr 0.5 --steps 200 --max-epochs 3
    python runs/finetune.py --resume --run-dir out/SFT     continue an interrupted run
    torchrun --standalone --nproc_per_node=8 runs/finetune.py out/RUN

RUN comes first, then any training flags (`runs/finetune.py RUN --help` lists them) and

    --packs N       packs per step (default 8 for train_small.py, 16 for train_medium.py)
    --lr X          initial learning rate as a fraction of pretraining's (default 0.8 and 0.3)

data/sft.py adds conversations to a dataset: RUN's own, or one with the same tokenizer given by --data. The loss
covers only what the assistant writes. The script saved in RUN does the training, so the model is exactly the pretrained
one. Bits per byte of held-out answers are logged before the first step. Talk to the model with runs/chat.py; score it
with runs/chat_eval.py.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
from lib.checkpoint import (
    describe_run,
    describe_tool,
    load_source,
    newest_checkpoint,
    open_dataset,
    stage_config,
)
from lib.command import RunError, run_command, say
from lib.packing import best_fit

# Packs per step: fewer than in pretraining, as there are few conversations.
PACKS = {"train_small": 8, "train_medium": 16}
# Initial rates as a fraction of the base rate: nanochat's, and less for an eighth of the batch.
RATES = {"train_small": 0.8, "train_medium": 0.3}
MIN_STEPS = 20  # fewer deserve a note


# ---- conversations


class Conversations:
    """One split of the conversations of data/sft.py, in memory, and a reader of their packs for PackLoader.

    The packs of all epochs are planned in advance; each epoch shuffles the conversations again.

    Raises: RunError if a shard or mask is not the listed one, or if a conversation is too long
    """

    def __init__(self, dataset, split: str, config):
        self.bos_id = dataset.tokenizer.bos_id
        paths = dataset.files(split, "sft")
        self.tokens = np.concatenate([dataset.read(path) for path in paths])
        masks = [dataset.read(path.with_suffix(".mask.bin")) for path in paths]
        self.loss_mask = np.concatenate(masks) == 1  # which tokens are targets
        starts = np.flatnonzero(self.tokens == self.bos_id)
        self.boundaries = np.append(starts, len(self.tokens))

        # The last token of a conversation is a target only.
        lengths = np.diff(self.boundaries) - 1
        limit = config.max_seq_len
        if lengths.max() > limit:
            problem = f"a conversation of {lengths.max() + 1:,} tokens, but the model's context is {limit:,}"
            advice = f"make shorter ones with python data/sft.py --max-len {limit + 1}"
            raise RunError(f"{dataset.root}/sft contains {problem}; {advice}")
        self.count = len(lengths)
        self.inputs = int(lengths.sum())  # tokens, padding excluded

        self.packs = []
        for epoch in range(config.max_epochs):
            order = np.random.default_rng([config.seed, epoch]).permutation(self.count)
            self.packs += best_fit(lengths, order, config.pack_tokens, config.max_docs_per_pack)
        self.seek({"pack": 0})

    def seek(self, reader_state: dict) -> None:
        self.reader_state = dict(reader_state)

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """A conversation, int32 (n,), and the loss mask of its n - 1 targets, bool."""
        start, end = self.boundaries[i : i + 2]
        return self.tokens[start:end].astype(np.int32), self.loss_mask[start + 1 : end]

    def pack(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The conversations of the next pack; none after the last one, to fill up the last step."""
        number = self.reader_state["pack"]
        self.reader_state["pack"] += 1
        members = self.packs[number] if number < len(self.packs) else []
        for i in members:
            yield self.read(i)


# ---- the run


def new_job(script: ModuleType, args: argparse.Namespace):
    """The job of a run that starts from args.run."""
    run_dir = Path(args.run)
    checkpoint = newest_checkpoint(script, run_dir)
    name = Path(script.__file__).stem
    packs = PACKS.get(name, 8) if args.packs is None else args.packs
    lr = RATES.get(name, 0.8) if args.lr is None else args.lr
    if packs < 1:
        raise RunError(f"--packs must be at least 1, found {packs}")
    if not 0 <= lr <= 1000:
        raise RunError(f"--lr must be from 0 to 1000, found {lr}")
    settings = {"run": args.run, "checkpoint": checkpoint.name, "packs": packs, "lr": lr}
    base = stage_config(script, checkpoint, packs, lr)
    config = script.change_config(base, args)
    dataset = open_dataset(script, config.data, run_dir)
    job = make_job(script, config, dataset, settings)
    if args.steps is None and config.tokens == base.tokens:
        job.config = dataclasses.replace(job.config, tokens=job.available)
        steps = job.config.num_steps
        if steps < MIN_STEPS:
            fewer = max(1, packs * steps // MIN_STEPS)
            ways = f"--packs {fewer} or --max-epochs" if fewer < packs else "--max-epochs"
            say(f"note: few steps ({steps}); make more of them with {ways}")
    return job


def resumed_job(script: ModuleType, args: argparse.Namespace):
    """The job of the run in args.run_dir, with the flags that may change on resume."""
    run_dir = Path(args.run_dir)
    settings = describe_run(script, run_dir, "finetune")["finetune"]
    for name, old in settings.items():
        new = getattr(args, name, None)
        if new not in (None, old):
            problem = f"the run has {old}, the flags ask for {new}"
            raise RunError(f"--resume cannot change {name}: {problem}; omit it, or start a new run")
    config = script.resumed_config(args)
    return make_job(script, config, script.Dataset.open(config.data), settings)


def make_job(script: ModuleType, config, dataset, settings: dict):
    """Finetuning, as a kind of the script's pretraining; settings are the entry "finetune" of config.json."""

    class Finetuning(script.Pretraining):
        command = "finetune"

        def __init__(self):
            self.tokenizer = dataset.tokenizer
            self.config = dataclasses.replace(config, vocab_size=self.tokenizer.vocab_size)
            self.reader = conversations = Conversations(dataset, "train", self.config)
            self.fingerprint = dataset.info.get("sft", {}).get("fingerprint", "")  # older datasets have none

            # The last step of an epoch is filled up with empty packs.
            steps = math.ceil(len(conversations.packs) * config.pack_tokens / config.step_tokens)
            self.available = round(steps * config.step_tokens)

            padding = 1 - conversations.inputs * config.max_epochs / self.available
            targets = conversations.tokens[conversations.loss_mask]
            self.bytes_per_token = int(self.tokenizer.token_bytes[targets].sum()) / len(targets)
            notes = f"{len(targets):,} target tokens in {conversations.count:,} conversations"
            self.note = f"{notes}, {padding:.1%} padding"

            held_out = Conversations(dataset, "val", self.config)
            self.set_validation(held_out.read(i) for i in range(held_out.count))
            describe_tool(self, {"finetune": settings}, __file__)

        def start_weights(self, state) -> bool:
            """With the moments of the source: "slightly better" in nanochat."""
            source = Path(settings["run"]) / "checkpoints" / settings["checkpoint"]
            load_source(script, state, source, moments=True)
            return True

    return Finetuning()


# ---- the command line


def script_directory(argv: list[str]) -> Path:
    """The run directory whose script trains: RUN, or with --resume that of --run-dir."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run-dir", nargs="?")
    args, _ = parser.parse_known_args(argv)
    if "--resume" in argv and not args.run_dir:
        raise RunError("--resume needs --run-dir, the run to continue")
    if "--resume" in argv:
        return Path(args.run_dir)
    if not argv or argv[0].startswith(("-", "@")):
        advice = "pass it first, as in python runs/finetune.py RUN"
        raise RunError(f"finetuning needs a run directory with a checkpoint to start from; {advice}")
    return Path(argv[0])


def build_parser(script: ModuleType) -> argparse.ArgumentParser:
    """The flags of training and those of finetuning."""
    parser = script.build_parser()
    parser.usage = "%(prog)s RUN [flags], or %(prog)s --resume --run-dir DIR [flags]"
    parser.description = __doc__.splitlines()[0]
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="run directory to start from, as the first argument")
    add("--packs", type=int, metavar="N", help="packs per step")
    add("--lr", type=float, metavar="X", help="initial learning rate as a fraction of pretraining's")
    return parser


def finetune(argv: list[str]) -> dict:
    """Runs or resumes; returns the result that is printed last."""
    from engine import import_script  # with PyTorch, for which --help need not wait

    script = import_script(script_directory(argv))
    args = build_parser(script).parse_args(argv)
    args.flags = list(argv)
    job = resumed_job(script, args) if args.resume else new_job(script, args)
    return script.train(job, args)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    return run_command(lambda: finetune(argv))


if __name__ == "__main__":
    sys.exit(main())
