"""Pretrains an encoder as a masked language model.

    python runs/encoder/train_encoder.py --data data/shards/mine --run-dir out/encoder
    python runs/encoder/train_encoder.py --resume --run-dir out/encoder         continue a run that was stopped
    torchrun --standalone --nproc_per_node=8 runs/encoder/train_encoder.py --data data/shards/mine

It masks 20 % of the tokens of a dataset of data/pretrain.py and predicts them from both sides. --size is small (12
layers, width 768) or neobert (28 layers, width 768, as in arXiv 2502.19587). Loop, loader, optimizer, log and
checkpoints are those of train_small.py. The architecture is EuroBERT's (pre-norm, rotary positions, SwiGLU, no
biases), which transformers knows. finetune_encoder.py finetunes it for retrieval, and runs/export.py exports it.

Letters in shape comments: T packed tokens, M masked tokens, D width, H heads, K head width, V vocabulary, N texts.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from encoder_config import Config
from lib.command import RunError, add_flags, check_settings, read_flags, run_command
from lib.tuning import read_data, tool_entries

SIZES = {"small": {}, "neobert": {"num_layers": 28, "head_dim": 64}}


def add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="12 or 28 layers (default small)")
    add_flags(parser, Config.__pydantic_fields__)
    note = "plain PyTorch: quicker start, slower steps"
    parser.add_argument("--no-compile", dest="compile", action="store_false", help=note)


if __name__ == "__main__":
    read_flags(None, __doc__, add_new)  # --help and wrong flags need not wait for PyTorch

import encoder_config
import encoder_model
import torch
from encoder_model import build_state, read_run, script
from torch import Tensor

# ---- data


def mask_tokens(batch, config: Config, is_text_V: np.ndarray, seed: list[int]):
    """A Batch with the same fraction of text tokens masked in every pack, and targets there.

    Args: is_text_V bool, which tokens of the vocabulary may be masked; seed of this batch
    """
    tokens = batch.tokens.numpy().copy()
    targets = np.full_like(tokens, -1)
    is_text = is_text_V[tokens]
    noise = np.random.default_rng(seed).random(tokens.shape)
    noise[~is_text] = 2.0  # so that they come last
    order = noise.argsort(1)
    for row in range(len(tokens)):
        chosen = order[row, : int(config.mask_rate * is_text[row].sum())]
        targets[row, chosen] = tokens[row, chosen]
    tokens[targets >= 0] = config.vocab_size - 1
    tensors = {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
    return dataclasses.replace(batch, **tensors, total_targets=int((targets >= 0).sum()))


class MaskedPacks(script.PackLoader):
    """The masked packs of each step; the masks are the same for any number of ranks."""

    def __init__(self, reader, config: Config, ranks, is_text_V: np.ndarray, first_step: int = 0):
        self.sharing = ranks
        self.is_text_V = is_text_V
        super().__init__(reader, config, script.Ranks(0, 1, ranks.device), first_step)

    def batch(self, step: int):
        """This rank's packs. Every rank reads and masks all of them."""
        whole = super().batch(step)
        masked = mask_tokens(whole, self.config, self.is_text_V, [self.config.seed, step])
        return script.share_of_rank(masked, 1, self.sharing)


def flops_per_token(config: Config, positions: Tensor) -> float:
    """Training FLOPs: 6 per matrix weight (the head counts masked tokens only), 12 x width per token attended to."""
    c = config
    layer = 4 * c.width**2 + 3 * c.width * c.mlp_width
    head = c.mask_rate * c.width * c.padded_vocab
    is_first = (positions == 0).flatten().numpy()
    lengths = np.diff(np.flatnonzero(np.append(is_first, True)))
    seen = float((lengths.astype(float) ** 2).sum() / lengths.sum())
    return 6 * (c.num_layers * layer + head) + 12 * c.num_layers * c.width * seen


# ---- pretraining


def pretrain(args: argparse.Namespace) -> dict:
    """Runs or resumes; returns the result that is printed last."""
    if args.resume:
        config, _ = read_run(args.run_dir, "train_encoder")
    else:
        config = check_settings(Config, {**SIZES[args.size], **vars(args)})
    if config.width % config.head_dim or config.head_dim % 2:
        raise RunError(f"--width {config.width} must be a multiple of an even --head-dim, found {config.head_dim}")
    if config.max_seq_len > config.pack_tokens:
        found = f"--max-seq-len {config.max_seq_len} is above --pack-tokens {config.pack_tokens}"
        raise RunError(f"{found}, but a document must fit into a pack; change one of them")
    job = make_job(config, read_data(script.Dataset.open, config.data))
    return script.train(job.config, args, job)


def make_job(config: Config, dataset):
    """What train_small.py needs to know to pretrain an encoder."""
    tokenizer = dataset.tokenizer
    vocab_size = tokenizer.vocab_size
    config = dataclasses.replace(config, vocab_size=vocab_size + 1)
    reader = script.ShardReader(dataset, config)

    # Specials carry no text and are never masked; the mask token is no token of the dataset.
    token_bytes = np.zeros(config.padded_vocab, np.int64)
    token_bytes[:vocab_size] = tokenizer.token_bytes
    is_text = token_bytes > 0
    # On a dataset, equal --pack-tokens, --pack-docs and --max-seq-len give equal masks.
    documents = script.scored_documents(script.validation_documents(dataset, config), config)
    validation = script.validation_batch(documents, config, tokenizer.bos_id)
    validation = mask_tokens(validation, config, is_text, [0])

    def evaluate(run) -> dict:
        """Bits per byte of masked tokens."""
        bytes_V = torch.from_numpy(token_bytes).to(run.ranks.device)
        state = run.state
        return {"val_bpb": script.bits_per_byte(state.model, validation, state.micro_packs, bytes_V, run.ranks)}

    tokens = dataset.total("train", "tokens")
    return script.Job(
        config=config,
        tokenizer=tokenizer,
        fingerprint=dataset.info["fingerprint"],
        note=f"{tokens:,} training tokens",
        available=tokens * config.max_epochs,
        reader=reader,
        bytes_per_token=dataset.total("train", "text_bytes") / max(tokens, 1),
        build=build_state,
        loader=lambda run: MaskedPacks(reader, config, run.ranks, is_text, run.state.step),
        evaluate=evaluate,
        flops=flops_per_token,
        **tool_entries("train_encoder", {}, __file__, encoder_model.__file__, encoder_config.__file__),
    )


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: pretrain(read_flags(argv, __doc__, add_new)))


if __name__ == "__main__":
    sys.exit(main())
