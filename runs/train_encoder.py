"""Pretrains an encoder as a masked language model.

    python runs/train_encoder.py --data data/shards/mine --run-dir out/encoder
    python runs/train_encoder.py --resume --run-dir out/encoder         continue a run that was stopped
    torchrun --standalone --nproc_per_node=8 runs/train_encoder.py --data data/shards/mine

It masks 20 % of the tokens of a dataset of data/pretrain.py and predicts them from both sides. --size is small (12
layers, width 768) or neobert (28 layers, width 768, as in arXiv 2502.19587). Loop, loader, optimizer, log and
checkpoints are those of train_small.py. The architecture is EuroBERT's (pre-norm, rotary positions, SwiGLU, no
biases), which transformers knows. runs/finetune_encoder.py finetunes it for retrieval, runs/export.py exports it.

Letters in shape comments: T packed tokens, M masked tokens, D width, H heads, K head width, V vocabulary, N texts.
"""

import argparse
import dataclasses
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from lib.checkpoint import describe_run, describe_tool, read_data
from lib.command import RunError, add_flags, check_settings, read_flags
from pydantic import Field
from pydantic.dataclasses import dataclass

NORM_EPS = 1e-6
CE_ROWS = 8192  # rows of logits that exist at the same time

# ---- config


@dataclass(frozen=True)
class Config:
    """Every number of a run; fields with a description are flags. Unknown names are ignored."""

    num_layers: int = Field(12, description="overrides --size")
    width: int = Field(768, description="of the hidden states")
    # Faster than 64, with the same loss.
    head_dim: int = Field(128, description="width of an attention head")
    mlp_width: int = Field(2048, description="hidden width of the SwiGLU")
    max_seq_len: int = Field(1024, description="longest document; longer ones are split")
    rotary_base: float = 10000.0
    vocab_size: int = 0  # entries of the tokenizer, and the mask token

    data: str = Field("data/shards/climbmix", description="dataset directory")
    mask_rate: float = Field(0.2, description="share of tokens to mask")
    pack_tokens: int = Field(8192, description="tokens in a pack of documents")
    # Attention costs time for this many, present or not.
    max_docs_per_pack: int = Field(64, description="documents in a pack, at most")
    packs: int = Field(16, description="packs per step, over all GPUs")
    max_epochs: int = Field(1, description="passes over the text, at most")
    val_tokens: int = Field(1_048_576, description="held-out tokens to score")

    steps: int = Field(2600, description="length of the run")
    muon_lr: float = Field(0.02, description="rate of matrices")
    adam_lr: float = Field(0.006, description="rate of the embedding")
    muon_beta2: float = 0.9
    adam_eps: float = 1e-10
    momentum: tuple = (0.85, 0.95, 300, 50)  # from, to, warm-up steps, cool-down steps
    cooldown: float = 0.6  # share of the run over which the rates fall
    lr_floor: float = 0.0  # what they fall to, as a share of the first

    seed: int = Field(0, description="of weights and masks")
    eval_every: int = Field(250, description="steps between evaluations, 0: only at the end")
    save_every: int = Field(0, description="steps between checkpoints, 0: only at the end")
    log_every: int = Field(10, description="steps between lines of the log")
    keep_checkpoints: int = 2
    micro_batch_tokens: int = Field(0, description="0: 65,536 on a GPU, else 8,192")
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto, bfloat16 or float32")
    compile: bool = True

    # Not fields: train_small.py reads them from its own Config.
    wandb = ""
    average = 0.0
    bigram_rows = 0
    prefix_weight = 0.0

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // 64) * 64

    @property
    def num_steps(self) -> int:
        return self.steps

    @property
    def step_tokens(self) -> int:
        return self.packs * self.pack_tokens

    @property
    def tokens(self) -> int:
        return self.steps * self.step_tokens

    @property
    def stages(self) -> tuple:
        """What the schedule and the loader of train_small.py ask for: an encoder's run has one stage."""
        return (script.Stage(1.0, self.packs, 1.0),)

    stage_table = stages


SIZES = {"small": {}, "neobert": {"num_layers": 28, "head_dim": 64}}


def add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="number of layers (default small)")
    add_flags(parser, Config.__pydantic_fields__)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="quicker start")


if __name__ == "__main__":
    read_flags(None, __doc__, add_new)  # --help and wrong flags need not wait for PyTorch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
script = importlib.import_module("train_small")
script.UserError = RunError  # what its functions raise


def parameter_table(config: Config) -> dict:
    """NorMuon for matrices, Adam for the embedding, with the decays of train_small.py."""
    head_pair = min(2, config.num_heads) * config.head_dim
    return {
        "qk_bank": script.Policy("normuon", 1.0, weight_decay=0.0276, rows=head_pair),
        "vo_bank": script.Policy("normuon", 1.0, weight_decay=0.0276),
        "mlp_bank": script.Policy("normuon", 1.0, weight_decay=0.0276),
        "embed": script.Policy("adam", 1.0, (0.9, 0.95), 0.006),
    }


# ---- model


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last axis, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding of whole heads; cos_TK and sin_TK are (T, 1, K)."""
    first, second = x_THK.chunk(2, -1)
    return x_THK * cos_TK + torch.cat((-second, first), -1) * sin_TK


class Encoder(nn.Module):
    """Transformer that sees both sides of a token. Weights lie in banks, as in train_small.py."""

    def __init__(self, config: Config, device="cpu", dtype=torch.float32):
        super().__init__()
        self.config = c = config
        D = c.width
        L = c.num_layers

        def weight(*shape):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.embed = weight(c.padded_vocab, D)  # one table for input and output
        self.qk_bank = weight(L, 2 * D, D)
        self.vo_bank = weight(2 * L, D, D)  # v0, o0, v1, o1, ...
        self.mlp_bank = weight(3 * L, c.mlp_width, D)  # gate0, up0, down0, ...; down like up

        positions = torch.arange(c.max_seq_len)
        exponents = torch.arange(0, c.head_dim, 2) / c.head_dim
        angles = torch.outer(positions, 1.0 / c.rotary_base**exponents).repeat(1, 2)
        rotary = torch.stack((angles.cos(), angles.sin()))
        self.register_buffer("rotary", rotary.to(device), persistent=False)
        # One target a token; train_step() of train_small.py asks for the number.
        self.register_buffer("loss_weights", torch.ones(1, device=device), persistent=False)
        self.attention: Callable = sdpa_attention

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        rng = torch.Generator(device=self.embed.device).manual_seed(seed)
        bound = 0.5 * math.sqrt(3 / self.config.width)  # uniform, standard deviation 0.5 / sqrt(D)
        self.embed.normal_(0, 0.005, generator=rng)  # as a head; as an input it is normalised
        self.qk_bank.uniform_(-bound, bound, generator=rng)
        self.vo_bank.uniform_(-bound, bound, generator=rng)
        self.mlp_bank.uniform_(-bound, bound, generator=rng)
        self.mlp_bank[2::3].zero_()

    def hidden(self, tokens_T, positions_T, cu_seqlens, max_doc: int) -> Tensor:
        """Normalised last hidden states (T, D) of packed documents, each blind to the others.

        Args: positions_T in the document; cu_seqlens int32 borders of documents, padded with T;
              max_doc bound on a document's length
        """
        c = self.config
        cos, sin = (table[positions_T][:, None].to(self.embed.dtype) for table in self.rotary)
        attend = self.attention(positions_T, cu_seqlens, max_doc)
        qk = self.qk_bank.unbind(0)
        vo = self.vo_bank.unbind(0)
        mlp = self.mlp_bank.unflatten(0, (c.num_layers, 3)).unbind(0)

        x = norm(F.embedding(tokens_T, self.embed))
        for layer in range(c.num_layers):
            a = norm(x)
            q_and_k = rotate(F.linear(a, qk[layer]).view(-1, 2 * c.num_heads, c.head_dim), cos, sin)
            q, k = q_and_k.chunk(2, 1)
            v = F.linear(a, vo[2 * layer]).view(-1, c.num_heads, c.head_dim)
            x = x + F.linear(attend(q, k, v).reshape(x.shape), vo[2 * layer + 1])

            # Two products: one for both would first copy their gradients side by side.
            gate, up, down = mlp[layer].unbind(0)
            a = norm(x)
            x = x + (F.silu(F.linear(a, gate)) * F.linear(a, up)) @ down
        return norm(x)

    def forward(self, tokens_T, targets_T, positions_T, cu_seqlens, max_doc: int):
        """The loss of masked tokens, for train_step() and bits_per_byte() of train_small.py.

        Args:    targets_T the original token where one was masked, else -1
        Returns: the sum of nats, to be differentiated, and the nats of each target, fp32 (T,)
        """
        hidden_TD = self.hidden(tokens_T, positions_T, cu_seqlens, max_doc)

        # A fixed number of rows, masked ones first, so that shapes stay the same in each step.
        T = len(tokens_T)
        M = min(T, math.ceil(T * self.config.mask_rate))
        picked_M = torch.argsort((targets_T < 0).int(), stable=True)[:M]
        inputs = (hidden_TD[picked_M], self.embed, targets_T[picked_M][None])
        total, nats_M = script.linear_cross_entropy(*inputs, cap=(), chunk=CE_ROWS)
        return total, nats_M.new_zeros(T).scatter(0, picked_M, nats_M)

    def embed_texts(self, tokens_T, positions_T, cu_seqlens, max_doc: int) -> Tensor:
        """Embeddings of packed texts, fp32 (N, D), each of length 1."""
        hidden_TD = self.hidden(tokens_T, positions_T, cu_seqlens, max_doc).float()
        text_T = (positions_T == 0).cumsum(0) - 1
        lengths_N = cu_seqlens.diff()[:, None]
        sums_ND = hidden_TD.new_zeros(len(lengths_N), hidden_TD.size(1))
        return F.normalize(sums_ND.index_add(0, text_T, hidden_TD) / lengths_N, dim=-1)


# -- attention(positions, cu_seqlens, max_doc) prepares what all layers share and returns
# attend(q, k, v (T, H, K)) -> (T, H, K). A token sees its whole document and nothing else.


def sdpa_attention(positions_T, cu_seqlens, max_doc: int) -> Callable:
    """Plain torch, on any device: blocks as long as the longest document see their neighbours."""
    T = positions_T.numel()
    block = min(max_doc, T)
    padding = -T % block
    starts = torch.arange(T, device=positions_T.device) - positions_T  # where a document begins
    queries = F.pad(starts, (0, padding), value=-1).view(-1, block)
    keys = F.pad(starts, (block, block + padding), value=-1).unfold(0, 3 * block, block)
    mask = (queries[:, :, None] == keys[:, None, :])[:, None]

    def attend(q, k, v):
        q = F.pad(q, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, block)).transpose(1, 2)
        k, v = (F.pad(x, (0, 0, 0, 0, block, block + padding)) for x in (k, v))
        k, v = (x.unfold(0, 3 * block, block).transpose(2, 3) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return y.transpose(1, 2).flatten(0, 1)[:T]

    return attend


def varlen_attention(positions_T, cu_seqlens, max_doc: int) -> Callable:
    """FlashAttention 2 inside torch (Ampere or newer, 16 bits)."""
    from torch.nn.attention.varlen import varlen_attn

    sizes = (cu_seqlens, cu_seqlens, max_doc, max_doc)
    return lambda q, k, v: varlen_attn(q, k, v, *sizes, window_size=(-1, -1))


# ---- data


def mask_tokens(batch, config: Config, is_text_V: np.ndarray, seed: list[int]):
    """A Batch with the same share of text tokens masked in every pack, and targets there.

    Args: is_text_V which tokens of the vocabulary may be masked; seed of this batch
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


# ---- run


def micro_batch_limit(config: Config, device: torch.device) -> int:
    return config.micro_batch_tokens or (65536 if device.type == "cuda" else 8192)


def build_state(config: Config, ranks, say: Callable = print):
    """Model and optimizer with the weights of config.seed."""
    dtype = script.choose_dtype(config, ranks.device)
    if dtype == torch.float16:
        dtype = torch.float32  # GPUs without bf16 need no loss scale then
    model = Encoder(config, ranks.device, dtype)
    if dtype == torch.bfloat16 and ranks.device.type == "cuda":
        model.attention = varlen_attention
    model.init_weights(config.seed)
    forward = model
    if config.compile and ranks.device.type == "cuda":
        forward = torch.compile(model, dynamic=False)
    optimizer = script.build_optimizer(model, config, parameter_table(config), ranks)
    limit = micro_batch_limit(config, ranks.device)
    packs = script.choose_packs(dataclasses.replace(config, micro_batch_tokens=limit), ranks)
    return script.TrainState(config, ranks, model, forward, optimizer, packs)


def read_run(run_dir: Path, command: str = "") -> tuple[Config, dict]:
    """The Config and config.json of an encoder run, or of one to resume. Raises: RunError if another command made it"""
    description = describe_run(script, run_dir, command) if command else script.read_description(run_dir)
    if description.get("command") not in ("train_encoder", "finetune_encoder"):
        raise RunError(f"{run_dir} is not an encoder run; name one that is")
    return Config(**description["config"]), description


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
    return script.train(MaskedPretraining(config, read_data(script.Dataset.open, config.data)), args)


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
        describe_tool(self, {}, __file__)

    def build(self, ranks, say: Callable):
        return build_state(self.config, ranks, say)

    def loader(self, run):
        return MaskedPacks(self.reader, self.config, run.ranks, self.is_text, run.state.step)

    def flops(self, positions: Tensor) -> float:
        return flops_per_token(self.config, positions)


def main(argv: list[str] | None = None) -> int:
    return script.run_command(lambda: pretrain(read_flags(argv, __doc__, add_new)))


if __name__ == "__main__":
    sys.exit(main())
