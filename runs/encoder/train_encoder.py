"""Pretrains an encoder as a masked language model.

    python runs/encoder/train_encoder.py --data data/shards/mine --run-dir out/encoder
    python runs/encoder/train_encoder.py --resume --run-dir out/encoder
    torchrun --standalone --nproc_per_node=8 runs/encoder/train_encoder.py --data data/shards/mine

It masks 20 % of the tokens of a dataset of data/pretrain.py and predicts them from both sides.
--size is small (12 layers, width 768) or neobert (28 layers, width 768, as in arXiv 2502.19587).
Loop, loader, optimizer, log and checkpoints are those of train_small.py. The architecture is
EuroBERT's (pre-norm, rotary positions, SwiGLU, no biases), which transformers knows.
finetune_encoder.py finetunes it for retrieval, and runs/export.py exports it.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from encoder_config import Config
from lib.checkpoint import describe_tool
from lib.command import RunError, add_flags, check_settings, read_flags, run_command

SIZES = {"small": {}, "neobert": {"num_layers": 28, "head_dim": 64}}


def add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="12 or 28 layers (default small)")
    add_flags(parser, Config.__pydantic_fields__)


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
        batch = super().batch(step)
        masked = mask_tokens(batch, self.config, self.is_text_V, [self.config.seed, step])
        return script.share_of_rank(masked, 1, self.sharing)


def flops_per_token(config: Config, positions: Tensor) -> float:
    """Training FLOPs: 6 per matrix weight, 12 x width per token attended to; the head for masked tokens only."""
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
        problem = f"--max-seq-len {config.max_seq_len} exceeds --pack-tokens {config.pack_tokens}"
        raise RunError(f"{problem}, but a document must fit into a pack; change one of them")
    return script.train(MaskedPretraining(config, script.Dataset.open(config.data)), args)


class MaskedPretraining(script.Pretraining):
    """Pretraining of an encoder, with the loop of train_small.py."""

    command = "train_encoder"

    def __init__(self, config: Config, dataset):
        self.tokenizer = dataset.tokenizer
        vocab_size = self.tokenizer.vocab_size
        self.config = config = dataclasses.replace(config, vocab_size=vocab_size + 1)
        self.fingerprint = dataset.info["fingerprint"]
        tokens = dataset.total("train", "tokens")
        self.note = f"{tokens:,} training tokens"
        self.available = tokens * config.max_epochs
        self.bytes_per_token = dataset.total("train", "text_bytes") / max(tokens, 1)
        self.reader = script.ShardReader(dataset, config)

        # Specials carry no text and are never masked; the mask token is no token of the dataset.
        token_bytes = np.zeros(config.padded_vocab, np.int64)
        token_bytes[:vocab_size] = self.tokenizer.token_bytes
        self.token_bytes = torch.from_numpy(token_bytes)
        self.is_text = token_bytes > 0
        # On a dataset, equal --pack-tokens, --max-docs-per-pack and --max-seq-len give equal masks.
        documents = script.scored_documents(script.validation_documents(dataset, config), config)
        packs = script.validation_batch(documents, config, self.tokenizer.bos_id)
        self.validation = mask_tokens(packs, config, self.is_text, [0])
        describe_tool(self, {}, __file__, encoder_model.__file__, encoder_config.__file__)

    def build(self, ranks, say: Callable):
        return build_state(self.config, ranks, say)

    def loader(self, run):
        return MaskedPacks(self.reader, self.config, run.ranks, self.is_text, run.state.step)

    def flops(self, positions: Tensor) -> float:
        return flops_per_token(self.config, positions)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: pretrain(read_flags(argv, __doc__, add_new)))


if __name__ == "__main__":
    sys.exit(main())
