"""DecoderStack-medium: the whole training stack of a 24-layer, 1536-wide GPT of 1.4 billion parameters in one file.

    torchrun --standalone --nproc_per_node=8 train_medium.py   eight GPUs (runs/speedrun_medium.sh: from text to chat)
    python train_medium.py                                     one GPU, same recipe, same tokens per step
    python train_medium.py --set recompute=True                one GPU of 24 GiB, as README says
    python train_medium.py --set num_layers=12                 another size: width, tokens, batch and rates follow
    python train_medium.py sample --from out/RUN --prompt "Once upon a time"
    python train_medium.py core --from out/RUN                 score the CORE tasks of the run's dataset (data/core.py)

Reads a dataset directory (binary shards + tokenizer.json, see data/README.md) and writes a run directory that
holds this script, config.json, log.jsonl, checkpoints, report.md and curve.png. Results: README.md.

Sections
     1. CONFIG         every recipe number, rules that scale them, the stage table, the parameter table
     2. MODEL          one trunk for packed training and for decoding with a KV cache
     3. OPTIMIZER      NorMuon and Adam, state sharded over ranks
     4. SCHEDULE       learning rate, momentum, windows, rotary frequencies: pure functions of the step
     5. DATA           shards -> packs of documents -> micro-batches
     6. ATTENTION      FlashAttention 3, a Triton kernel, torch varlen, or blocked SDPA behind one signature
     7. KERNELS        Triton: head and loss, symmetric products, relu^2, attention; fp8 products
     8. EVALUATION     bits per byte; CORE, with the prefix that choices share computed once
     9. GENERATION     KV cache, sampling, streaming text
    10. RUN UTILITIES  devices, ranks, log, checkpoints, report
    11. MAIN           train_step, warm-up, the loop, the command line

Sections 3 to 11, and what lies between other `shared` marks, are those of train_small.py (dev/sync.py compares them).
Speeds and shapes in their comments are those of the small model. What differs, and why:

    small                            here                             because
    -----                            ----                             -------
    numbers tuned one by one         rules from depth and horizon     one recipe for all sizes of a scaling series
    batch and windows in 3 stages    one stage                        1 M tokens a step keep 8 GPUs busy; a ramp gained
                                                                      nanochat little
    one table for input and output   two; `tied` makes them one       one is better up to 94 M tokens; longer recipes
                                                                      part them (modded-nanogpt medium after 360 M)
    5 value embedding tables         one in every other layer (12)    nanochat's best transfer; sharing them all failed
    tables updated a step late       at once                          a step of 1 s hides it; 1.2 GB less on one GPU
    bigram embedding                 off                              its gain fades: none for nanochat at 25 layers
    layer 6 without attention        attention in all layers          would save 1.4 % here; banks shard evenly
    one input for last 3 attentions  each its own                     found at 11 layers, for 0.002 bpb
    2 long windows of 10             every fourth layer and the last  nanochat's SSSL; a deep model has room for them
    scalars on V, O and down         none                             worth 1e-4 there
    residual scalar per sub-layer    one per layer, 1.15 to 1.05,     nanochat's at this depth: shares of x0 start at
                                     x0 from 0.20 to 0.05             once, residual scalars learn slowly
    O random, V and QK at half size  O zero, others at full size      both medium recipes; the gain of a random O was
                                                                      seen at 11 layers only
    Q and K by pairs of heads        whole matrices                   worth 0.003 bpb at 11 layers; one bank for Q, K
                                                                      and V saves a copy in every layer
    down moves twice as far as up    as far as up                     between modded-nanogpt (4 x a square matrix) and
                                                                      nanochat (1 x)
    fp8 in head, qkv and MLP         and in o                         computed: at width 768 casts cost what that saves

Letters in shape comments: T packed tokens, D width, H heads, K head width, F MLP hidden width, V vocabulary,
L layers, A layers with attention, G documents in a micro-batch, B rows of a decoding batch, S cache length.
"""
# >>> shared: imports
from __future__ import annotations

import argparse
import ast
import base64
import bisect
import codecs
import csv
import dataclasses
import datetime
import difflib
import errno
import gc
import hashlib
import io
import json
import math
import operator
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:  # CPUs, Macs and Windows do without: every kernel has a plain path
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = tl = TensorDescriptor = None
jit = triton.jit if triton else (lambda function: function)


INTERFACE = 2  # rises when what runs/*.py use of this script changes its meaning


class UserError(Exception):
    """Something the user can mend; printed as one sentence, without a traceback."""


# <<< shared: imports
# ===============================================================================
# 1. CONFIG -- every recipe number with its unit or reason
# A field is changed here, or for a try-out with --set NAME=VALUE (which voids record status).
# A 0 where a rule is named means "by the rule". Numbers of modded-nanogpt and nanochat are credited where they stand.


@dataclass(frozen=True)
class Stage:
    """One row of the stage table. Windows and lengths are in tokens."""

    share: float  # of the run's steps
    packs: int  # packs of a step, over all ranks and micro-batches
    window_short: int  # keys a query sees behind itself in most layers
    window_long: int  # the same in Config.long_layers
    max_doc: int  # a longer document continues as a new segment behind a fresh BOS
    lr_mult: float  # about sqrt(batch / batch of the first stage)


@dataclass(frozen=True)
class Config:
    # -- model
    num_layers: int = 24  # the one number that sets the size
    width: int = 0  # 0: 64 a layer, in whole heads; aspect ratio 64 beat 128 in nanochat
    head_dim: int = 128
    mlp_width: int = 0  # 0: 4 x width
    vocab_size: int = 32768  # taken from the dataset's tokenizer; rules use this one, so with another --set it too
    max_seq_len: int = 2048  # longest document in validation and generation
    window_pattern: str = "SSSL"  # short and long windows, repeated over the layers; the last layer is long anyway
    key_offset: bool = True  # in long layers half of each key comes from the previous token
    value_embeds: bool = True  # a table in every other layer, the last included
    tied: bool = False  # one table for input and output: better up to about 100 M tokens
    attention_gates: bool = True
    bigram_rows: int = 0  # 163,840 is 5 x 32,768; 0 switches the bigram embedding off
    smear: bool = True
    x0_injection: bool = True
    backout: bool = True  # a share of the middle layer's output is subtracted before the head
    gate_width: int = 12  # channels that the small gates read
    attention_scale: float = 0.12  # modded-nanogpt record 20; nanochat's is 0.127
    rotary_base: float = 1024.0
    frequencies: tuple = ()  # of the rotary embedding; (): by rotary_base; finetuning takes over its source's
    softcap: tuple = (23.0, 5.0, 7.5)  # logits = a * sigmoid((z + b) / c), modded-nanogpt record 54
    fp8: bool = True  # products of the layers, in training only, from compute capability 8.9 on
    fp8_head: bool = True  # the same for the head
    recompute: bool = False  # layers run again in the backward: 0.2 MB a token, not 1; a third more FLOPs, no fp8
    ahead: tuple = (1.0,)  # loss weights of the next tokens; more than one: multi-token prediction (record 53)
    ahead_until: float = 0.5  # share of the run over which all weights but the first fall to 0
    prefix_weight: float = 0.25  # of a second target in the loss, see Tokenizer.prefixes(); 0: off
    # -- data
    pack_tokens: int = 8192  # unit of the loader; a step is a fixed number of packs
    pack_docs: int = 64  # most documents in a pack; a pack that would hold more is padded
    tokens: int = 0  # length of the run; 0: tokens_per_weight x matmul_weights; in finetuning all of max_epochs
    tokens_per_weight: float = 8.0  # nanochat's at this size; compute-optimal is about 10 there
    max_epochs: int = 1  # more than 1 allows repeated text
    val_tokens: int = 10_485_760  # validation stops after this many tokens
    # -- stages: share, packs (0: batch_rule), window_short, window_long, max_doc, lr_mult
    stages: tuple = ((1.0, 0, 512, 2048, 2048, 1.0),)
    # -- optimizer: base rates, multiplied by the parameter table and the schedule
    muon_lr: float = 0.0  # 0: 0.0283 x rate_rule
    adam_lr: float = 0.0  # 0: 0.0064 x rate_rule
    muon_decay: float = 0.06  # at most, see decay_rule
    table_decay: float = 0.015  # the same for value and bigram embeddings
    muon_beta2: float = 0.9
    adam_eps: float = 1e-10  # 1e-8 costs 0.0014 nats in modded-nanogpt record 20
    momentum: tuple = (0.85, 0.95, 300, 50)  # from, to, warm-up steps, cool-down steps
    cooldown: float = 0.65  # share of the run over which the rate falls; nanochat
    lr_floor: float = 0.1  # rate at the end, as a fraction of the base rate
    # -- finetuning: what sft_config builds its one stage from
    source: str = ""  # the checkpoint it starts from, set by --from; "": pretraining
    sft_packs: int = 16  # packs of a step; conversations are few, so this is less than in pretraining
    sft_lr: float = 0.3  # rate at the start, as a fraction of the base rate: nanochat's 0.8, for an eighth of the batch
    sft_moments: bool = True  # keep the optimizer's moments of the source; "slightly better" in nanochat
    # -- evaluation and sampling
    core_items: int = 0  # scored items of each CORE task; 0: all, -1: no CORE at the end of pretraining
    sample_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    # -- run knobs (flags of their own, no part of the recipe)
    data: str = "data/shards/climbmix"
    seed: int = 0
    eval_every: int = 250  # steps; 0: only at the end
    save_every: int = 0  # steps; 0: only at the end, -1: not even then
    log_every: int = 10
    keep_checkpoints: int = 2  # newest ones, besides the best
    micro_batch_tokens: int = 0  # 0: from free memory
    attention: str = "auto"
    dtype: str = "auto"
    compile: bool = True
    cuda_graphs: bool = True  # where compiled; False launches kernel by kernel and takes less memory
    wandb: str = ""

    no_attention_layers, shared_input_from = (), -1  # no fields: shared code asks for what the small model has

    def __post_init__(self):
        """Fills in what is 0, so that the config of a run holds every number in use."""

        def derive(field: str, value) -> None:
            if not getattr(self, field):
                object.__setattr__(self, field, value)

        derive("width", -(-64 * self.num_layers // max(self.head_dim, 1)) * self.head_dim)
        derive("mlp_width", 4 * self.width)
        if self.source:  # the rest is that of the run it starts from; 0 tokens are all conversations, a rate may be 0
            return
        derive("tokens", round(self.tokens_per_weight * matmul_weights(self)))
        if self.bad_stage() is None:
            packs = max(1, batch_rule(self.tokens) // max(self.pack_tokens, 1))
            object.__setattr__(self, "stages", tuple((row[0], row[1] or packs, *row[2:]) for row in self.stages))
            factor = rate_rule(self.tokens, self.stages[0][1] * self.pack_tokens)
            derive("muon_lr", float(f"{0.0283 * factor:.3g}"))
            derive("adam_lr", float(f"{0.0064 * factor:.3g}"))

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim

    @property
    def attention_layers(self) -> tuple:
        return tuple(range(self.num_layers))

    @property
    def long_layers(self) -> tuple:
        pattern, last = self.window_pattern, self.num_layers - 1
        return tuple(i for i in range(last + 1) if pattern[i % len(pattern)] == "L" or i == last)

    @property
    def key_offset_layers(self) -> tuple:
        return self.long_layers if self.key_offset else ()

    @property
    def value_embed_layers(self) -> tuple:
        return tuple(range(1 - self.num_layers % 2, self.num_layers, 2)) if self.value_embeds else ()

    @property
    def backout_layer(self) -> int:
        return self.num_layers // 2 if self.backout else -1

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // 64) * 64  # tensor cores and the loss kernel like multiples of 64

    @property
    def step_tokens(self) -> float:
        return sum(s.share * s.packs for s in self.stage_table) * self.pack_tokens  # mean over the stages

    @property
    def num_steps(self) -> int:
        return max(1, round(self.tokens / self.step_tokens))

    @property
    def stage_table(self) -> tuple[Stage, ...]:
        return tuple(Stage(*row) for row in self.stages)

    def bad_stage(self):
        """The first row of the stage table that is none, or None."""
        def good(row) -> bool:
            return isinstance(row, tuple) and len(row) == 6 and all(isinstance(value, int | float) for value in row)

        return next((row for row in self.stages or ((),) if not good(row)), None)

    def validate(self) -> None:
        """Raises UserError on values that contradict each other."""
        for field, length in (("momentum", 4), ("softcap", 3)):
            if len(getattr(self, field)) != length:
                raise UserError(f"{field}={getattr(self, field)} must have {length} values")
        if not 0 < self.softcap[0] <= 100:  # the loss takes exp(logit - bound) in fp32
            raise UserError(f"softcap={self.softcap}: the bound, its first value, must be above 0 and at most 100")
        if (row := self.bad_stage()) is not None:
            names = [field.name for field in dataclasses.fields(Stage)]
            raise UserError(f"stages: the row {row} must hold {len(names)} numbers: {', '.join(names)}")
        if self.num_layers < 2:
            raise UserError(f"num_layers={self.num_layers} is too few; the table of scalars needs at least 2")
        if self.width % self.head_dim:
            raise UserError(f"width={self.width} is not a multiple of head_dim={self.head_dim}; change one of them")
        if self.head_dim % 4:
            raise UserError(f"head_dim={self.head_dim} is not a multiple of 4, which the rotary embedding needs")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise UserError(f"window_pattern={self.window_pattern} must be made of the letters S and L, e.g. SSSL")
        if self.vocab_size > 65536:
            raise UserError(f"vocab_size={self.vocab_size} does not fit the 16-bit shards; use at most 65,536 entries")
        if abs(sum(s.share for s in self.stage_table) - 1) > 1e-6:
            raise UserError(f"the shares of the stages add up to {sum(s.share for s in self.stage_table):.4f}, not 1")
        for stage in self.stage_table:
            least = min(stage.packs, stage.window_short, stage.window_long)
            if not 2 <= stage.max_doc <= self.max_seq_len or least < 1:
                raise UserError(f"a stage has max_doc={stage.max_doc}, which must be 2 to max_seq_len="
                                f"{self.max_seq_len}, and packs and windows of at least 1")  # fmt: skip
        if self.max_seq_len > self.pack_tokens:
            raise UserError(f"max_seq_len={self.max_seq_len} does not fit into a pack of {self.pack_tokens} tokens")
        least = {"tokens": int(not self.source), "pack_tokens": 1, "pack_docs": 1, "log_every": 1, "max_epochs": 1,
                 "sample_tokens": 1, "val_tokens": 1, "keep_checkpoints": 1, "eval_every": 0, "save_every": -1,
                 "seed": 0, "top_k": 0}  # fmt: skip
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise UserError(f"{field}={getattr(self, field)} must be at least {bound}")
        if min(self.top_p, self.ahead_until) <= 0 or self.temperature < 0:
            raise UserError(f"top_p={self.top_p} and ahead_until={self.ahead_until} must be above 0, "
                            f"temperature={self.temperature} at least 0")  # fmt: skip


# -- rules: from depth and horizon to batch, rates and decay. They meet nanochat's numbers at 24 layers (5.84 billion
# tokens, 2 ** 20 a step), where its CORE was measured, and B34's at 34 million tokens.


def matmul_weights(config: Config) -> int:
    """Weights that are multiplied for every token: all matrices and the head, no embedding; 730 M at 24 layers."""
    c = config
    return c.num_layers * (4 * c.width + 2 * c.mlp_width) * c.width + c.padded_vocab * c.width


def batch_rule(tokens: int) -> int:
    """Tokens of a step for a run of so many tokens: the power 0.383 (arXiv 2505.13738), to the nearest power of two.

    Not sharp: one nanochat run reached its CORE sooner with half of it.
    """
    return 2 ** round(20 + 0.383 * math.log2(max(tokens, 1) / 5.84e9))


def rate_rule(tokens: int, batch: int) -> float:
    """Factor on all rates: the root of the batch (arXiv 2205.10287) times the power -0.2 of the horizon.

    The power is computed from recipes that others or we tuned (tokens, batch, rate of the matrices, by this rule):
    B34 34 M, 65,536, 0.020, 0.020; modded-nanogpt small 340 M, 131,072, 0.023, 0.018, medium 2.2 B, 131,072, 0.015,
    0.012; nanochat 5.84 B, 2 ** 20, 0.028, 0.028. arXiv 2409.19913 finds -0.3. At 24 layers half and double of B34's
    rates cost 0.016 and 0.006 bpb.
    """
    return (batch / 2**20) ** 0.5 * (max(tokens, 1) / 5.84e9) ** -0.2


def decay_rule(most: float, lr: float, steps: int, total: float) -> float:
    """Weight decay by which lr x decay adds up to `total` over the run (arXiv 2405.13698), if that is not above `most`.

    With rates as the root of the batch this is nanochat's rule, root of the batch over tokens. Its value for short
    runs (0.28 at 12 layers) is far above what modded-nanogpt uses there (0.03 to 0.05), hence the bound.
    """
    return min(most, total / max(lr * steps, 1e-12))


@dataclass(frozen=True)
class Policy:
    """How one parameter is updated: a row of the parameter table."""

    optimizer: str  # "normuon" for matrices, "adam" for the rest
    lr_mult: float  # times Config.muon_lr or Config.adam_lr
    betas: tuple = ()  # Adam only
    weight_decay: float = 0.0  # cautious and tied to the schedule: p -= lr * weight_decay * schedule * p
    rows: int = 0  # NorMuon: rows of one orthogonalised matrix; 0: the bank's own
    odd_mult: float = 1.0  # NorMuon: factor on lr_mult of every second matrix of a bank
    late: bool = False  # gradients are reduced while the next step computes and applied at its end, see Optimizer.step


def parameter_table(config: Config) -> dict[str, Policy]:
    """All optimizer policy on one screen. The order is the order of communication.

    Betas and multipliers follow modded-nanogpt (record 89), and nanochat where it has what modded-nanogpt has not. An
    orthogonal step needs no factor for the width; tables and head take nanochat's, the root of 768 / width. A table
    for input and output has the head's policy.
    """
    c = config
    narrow = (768 / c.width) ** 0.5
    matrices = decay_rule(c.muon_decay, c.muon_lr, c.num_steps, 9.4)
    tables = decay_rule(c.table_decay, c.adam_lr * 75 * narrow, c.num_steps, 8.0)
    return {
        # name                       optimizer  lr_mult        betas         weight_decay  rows
        "qkv_bank":         Policy("normuon",   1.00,           (),           matrices,     c.width),
        "o_bank":           Policy("normuon",   1.00,           (),           matrices),
        "mlp_bank":         Policy("normuon",   1.00,           (),           matrices),
        "residual":         Policy("adam",      1.00,           (0.90, 0.99)),
        "scalars":          Policy("adam",      5.00,           (0.90, 0.99)),
        "smear_gate":       Policy("adam",      0.01,           (0.90, 0.99)),
        "value_gate":       Policy("adam",      1.00,           (0.90, 0.99)),
        "attention_gate":   Policy("adam",      1.00,           (0.90, 0.99)),
        "unembed":          Policy("adam",      1.00 * narrow,  (0.50, 0.95), 0.0060),
        "bigram_embed":     Policy("adam",     75.00 * narrow,  (0.75, 0.95), tables),
        "value_embed":      Policy("adam",     75.00 * narrow,  (0.75, 0.95), tables),
        "embed":            Policy("adam",      1.00 * narrow,  (0.50, 0.95), 0.0060) if c.tied else
                            Policy("adam",     15.00 * narrow,  (0.80, 0.95), 0.0010),
    }  # fmt: skip


def micro_batch_limit(config: Config, free: int) -> float:
    """The most tokens of a micro-batch that fit into `free` bytes of GPU memory and help speed.

    What the backward needs of a token and a layer, in bytes, when torch.compile has chosen what to keep; F = 4 D:

        residual stream at three points           6 D     after relu^2                                      8 D
        inputs of qkv, o and up                   4 D     value embedding, in every other layer             1 D
        q and k, before and after norm, rotary    8 D     sum 31 D: 48 kB, 1.14 MB for 24 layers
        v, and the output of attention            4 D

    fp8 products take 26 D, their inputs being 3 D and the activation 4 D. With micro-batches of 32,768 tokens an H200
    measured 52.1 GiB allocated and 57.2 reserved, with fp8 and one table for input and output.
    With `recompute` the stream, 2 D, and 1 D of value embeddings are kept, and all of one layer at a time,
    with gradients: 0.2 MB. Besides, gradients of this and of earlier micro-batches take 4 bytes a parameter, 5.5 GB;
    fp8 copies of weights 0.7 GB; the loss 6 bytes a logit of a chunk, 3.2 GB. Weights, masters and moments are no
    longer in `free`: 10 bytes a matrix weight and 14 a table entry, 16.7 GB on one GPU, of which 13.9 GB are shared out
    over all.
    """
    c = config
    layer = 23 * c.width + 2 * c.mlp_width
    if not (c.compile and bf16_is_native()):
        layer *= 3
    if c.recompute:
        layer = 3 * c.width + 2 * layer / c.num_layers
    matrices, tables = matmul_weights(c), (1 + len(c.value_embed_layers)) * c.padded_vocab * c.width
    others = 5 * matrices + 4 * (tables + c.bigram_rows * c.width) + 6 * 16384 * c.padded_vocab
    return min(32768, (0.9 * free - others) / (c.num_layers * layer + 16 * c.width))


# ===============================================================================
# 2. MODEL -- one trunk; attention is passed in, so that training and cached decoding share every line
# Weights live in banks of equal shape (qkv, o, mlp): NorMuon works on whole banks, and ranks own slices of them.
# Everything but attention and the previous token's id is per token, which is what makes the KV cache small.


# >>> shared: layers
def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last axis, without a gain (nothing to learn, nothing to decay)."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding on the first half of the head; the second half carries no position (sine 0, cosine 1).

    Swapping quarters by flip() keeps the compiled kernel free of branches: with norms 0.16 ms forward and 0.27 ms
    backward a layer at T = 65,536 on an H200, against 0.30 and 0.40 with cat().

    Args:  x_THK (T, H, K); cos_TK, sin_TK (T, 1, K) as laid out by GPT.set_stage      Returns: (T, H, K)
    """
    swapped = x_THK.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)
    return x_THK * cos_TK + swapped * sin_TK


def softcap(z: Tensor, cap: tuple) -> Tensor:
    """a * sigmoid((z + b) / c): bounded logits, asymmetric because most logits are negative."""
    a, b, c = cap
    return a * torch.sigmoid((z + b) / c)


# <<< shared: layers
class Linear8(torch.autograd.Function):
    """x w^T and its gradients by fp8 products (section 7); for the backward the fp8 input is kept, not x."""

    @staticmethod
    def forward(ctx, x, w):
        row_x, row_w = largest_row(x), largest_row(w)
        x8, w8 = cast8(x, E4M3_MAX / row_x), cast8(w, E4M3_MAX / row_w)
        ctx.save_for_backward(x8, w8, row_x, row_w)
        return product8(x8, w8, row_x * row_w / E4M3_MAX**2, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, g):
        x8, w8, row_x, row_w = ctx.saved_tensors
        row_g = largest_row(g)
        g8 = cast8(g.contiguous(), E5M2_MAX / row_g, E5M2)
        unit = row_g / (E4M3_MAX * E5M2_MAX)
        dx = product8(g8, transpose8(w8), unit * row_w, g.dtype)
        return dx, product8(transpose8(g8), transpose8(x8), unit * row_x, g.dtype)


def linear8(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """F.linear(x, w) in fp8: (T, N) in the dtype of x; gradients are in the dtypes of x and w."""
    return Linear8.apply(x_TK, w_NK)


class GPT(nn.Module):
    """Decoder-only transformer. Parameters are listed in parameter_table; all others are fixed buffers."""

    def __init__(self, config: Config, device="cpu", dtype=torch.float32):
        super().__init__()
        self.config = config
        c, D, V, L, E = config, config.width, config.padded_vocab, config.num_layers, len(config.value_embed_layers)

        def weight(*shape, dtype=dtype):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.embed = weight(V, D)
        if not c.tied:
            self.unembed = weight(V, D)
        self.qkv_bank, self.o_bank = weight(L, 3 * D, D), weight(L, D, D)
        self.mlp_bank = weight(2 * L, c.mlp_width, D)  # up0, down0, ...; down is stored (F, D) like up
        self.residual = weight(L, dtype=torch.float32)
        self.scalars = weight(3, L, dtype=torch.float32)  # rows: share of x0, share of bigram, whole-model scalars
        if E:
            self.value_embed = weight(E * V, D)
            self.value_gate = weight(E, c.num_heads, c.gate_width)
        if c.bigram_rows:
            self.bigram_embed = weight(c.bigram_rows, D)
            self.register_buffer("bigram_signs", torch.empty(SIGN_ROWS, D, device=device, dtype=dtype))
        if c.smear:
            self.smear_gate = weight(1, c.gate_width)
        if c.attention_gates:
            self.attention_gate = weight(L, c.num_heads, c.gate_width)
        for name, shape, kind in (
            ("rotary", (2, c.max_seq_len, c.head_dim), torch.float32),  # cosines, sines
            ("attention_scale", (), torch.float32),  # tensors, because a python number would recompile the model
            ("window_sizes", (2,), torch.int32),
            ("loss_weights", (len(loss_weights(c, 0)),), torch.float32),
            ("prefixes", (V,), torch.int32),  # set from the tokenizer where there is a prefix loss
        ):
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=kind), persistent=False)
        self.loss_weights.copy_(torch.tensor(loss_weights(c, 0)))
        self.prefixes.fill_(-1)
        self.attention: Callable | None = None  # set by choose_attention
        self.set_stage(stage_attention(config, 0))

    @property
    def head(self) -> Tensor:
        return self.embed if self.config.tied else self.unembed

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """All initialisation in one table. Zero projections make each block start as the identity.

        Shares and residual scalars start as in nanochat, whose 24 layers they were found for.
        """
        rng = torch.Generator(device=self.embed.device).manual_seed(seed)
        bound = math.sqrt(3 / self.config.width)  # uniform with standard deviation 1 / sqrt(D)
        self.embed.normal_(0, 0.8, generator=rng)
        self.head.normal_(0, 0.005, generator=rng)  # if tied, of the input too, which is normalised anyway
        self.qkv_bank.uniform_(-bound, bound, generator=rng)
        self.o_bank.zero_()
        self.mlp_bank.uniform_(-0.4 * bound, 0.4 * bound, generator=rng)
        self.mlp_bank[1::2].zero_()
        self.residual.copy_(torch.linspace(1.15, 1.05, self.config.num_layers))
        self.scalars[0] = torch.linspace(0.20, 0.05, self.config.num_layers)
        self.scalars[1:] = torch.tensor(((0.05,), (0.0,)))
        self.scalars[2, 1] = 0.2  # backout; smear before it starts at 0
        for name in ("value_gate", "attention_gate", "bigram_embed", "smear_gate"):
            if hasattr(self, name):
                getattr(self, name).zero_()
        if self.config.value_embed_layers:
            self.value_embed.normal_(0, 0.01, generator=rng)
        if self.config.bigram_rows:  # signs are saved with the weights, so they need no stable generator
            signs = torch.randint(0, 2, self.bigram_signs.shape, generator=torch.Generator().manual_seed(0))
            self.bigram_signs.copy_(signs * 2 - 1)

    # >>> shared: stage
    def set_stage(self, attention: dict) -> None:
        """Sets windows, attention scale and rotary table; the dict is part of every checkpoint."""
        self.windows = (attention["window_short"], attention["window_long"])
        self.window_sizes.copy_(torch.tensor(self.windows))
        self.attention_scale.fill_(attention["scale"])
        angles = torch.outer(torch.arange(self.config.max_seq_len), torch.tensor(attention["frequencies"]))
        still, sine = torch.zeros_like(angles).repeat(1, 2), angles.sin()
        self.rotary[0] = torch.cat((angles.cos(), angles.cos(), still + 1), 1)
        self.rotary[1] = torch.cat((sine, -sine, still), 1)

    # <<< shared: stage
    def layer_weights(self) -> list[tuple]:
        """(qkv (3 D, D), o (D, D), up (F, D), down (F, D)) of each layer."""
        up_down = self.mlp_bank.unbind(0)
        return list(zip(self.qkv_bank.unbind(0), self.o_bank.unbind(0), up_down[::2], up_down[1::2], strict=True))

    def trunk(self, tokens_T: Tensor, previous_T: Tensor, positions_T: Tensor, attend: Callable, weights=None):
        """Everything between token ids and the head.

        Args:    tokens_T ids; previous_T id of the token before in the same document (any value at position 0);
                 positions_T position in the document; attend(index, layer, q, k, v, gate (T, H) or None) -> y, all
                 others (T, H, K), q scaled, y gated; weights what layer_weights() gave
        Returns: normalised hidden state (T, D)
        """
        c, T = self.config, tokens_T.size(0)
        first_T = positions_T == 0  # nothing may leak from the document before
        share_x0, share_bigram, whole = self.scalars.unbind(0)
        weights = weights or self.layer_weights()
        cos_TK, sin_TK = (t[positions_T][:, None].to(self.embed.dtype) for t in self.rotary)

        x = F.embedding(tokens_T, self.embed)
        if c.smear:  # a learned share of the previous token's embedding: -15 steps in modded-nanogpt record 34
            gate = torch.sigmoid(F.linear(x[:, : c.gate_width], self.smear_gate)) * whole[0]
            x = x + F.embedding(previous_T, self.embed) * gate.masked_fill(first_T[:, None], 0)
        x = x0 = norm(x)
        bigram = None
        if c.bigram_rows:  # hashed token pairs, signed so that colliding pairs are nearly orthogonal (records 62, 83)
            t, p = tokens_T.long(), previous_T.long()
            pair = ((36313 * t) ^ (27191 * p)) % (c.bigram_rows - 1)
            bigram = F.embedding(pair.masked_fill(first_T, c.bigram_rows - 1), self.bigram_embed)
            bigram = bigram * F.embedding(((t ^ p) % SIGN_ROWS).masked_fill(first_T, 0), self.bigram_signs)
        if c.value_embed_layers:  # all tables in one lookup; one scatter in the backward
            offsets = torch.arange(len(c.value_embed_layers), device=x.device)[:, None] * c.padded_vocab
            values = F.embedding(tokens_T + offsets, self.value_embed)  # (E, T, D)
        # torch 2.11 keeps what an autograd.Function saves even if told to recompute: hence plain products there.
        recompute = c.recompute and torch.is_grad_enabled()
        fp8 = c.fp8 and torch.is_grad_enabled() and not recompute and fits_fp8(x, T, c.width, c.mlp_width)

        def block(x: Tensor, layer: int) -> Tensor:
            qkv_weight, o_weight, up, down = weights[layer]
            x = self.residual[layer] * x
            if c.x0_injection:
                x = x + share_x0[layer] * x0
            if bigram is not None:
                x = x + share_bigram[layer] * bigram
            a = norm(x)
            rotary = cos_TK, sin_TK, self.attention_scale
            if recompute:
                q, k, v = norm_rotate_ref(F.linear(a, qkv_weight).view(T, 3, c.num_heads, c.head_dim), *rotary)
            else:
                q, k, v = project_qkv(a, qkv_weight, *rotary, fp8)
            if layer in c.value_embed_layers:  # record 14; the gate reads the token's hidden state
                e = c.value_embed_layers.index(layer)
                gate = 2 * torch.sigmoid(F.linear(a[:, : c.gate_width], self.value_gate[e]))  # (T, H)
                v = v + gate[..., None] * values[e].view_as(v)
            gate = None
            if c.attention_gates:  # a head can say nothing (record 28); -0.004 bpb in the small model
                gate = 2 * torch.sigmoid(F.linear(a[:, : c.gate_width], self.attention_gate[layer]))
            y = attend(layer, layer, q, k, v, gate).reshape(T, c.width)
            x = x + (linear8(y, o_weight) if fp8 else F.linear(y, o_weight))
            return x + (linear_relu2_ref(norm(x), up) @ down if recompute else mlp_relu2(norm(x), up, down, fp8))

        backout = x0
        for layer in range(c.num_layers):
            if recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, layer, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, layer)
            if layer == c.backout_layer:
                backout = x
        if c.backout_layer >= 0:  # what the middle of the network wrote for itself is not for the head (record 40)
            x = x - whole[1] * backout
        return norm(x)

    # >>> shared: forward
    def forward(self, tokens_T, targets_T, positions_T, cu_seqlens, max_doc: int, row_weight_T=None) -> Tensor:
        """Packed documents, each blind to the others.

        Args:    tokens_T, targets_T, positions_T int (T,), target -1 is ignored; cu_seqlens int32 (G + 1,) document
                 borders padded with T; max_doc bound on a document's length, a python int; row_weight_T fp32 (T,)
                 factor on the loss of each target
        Returns: the sum of the loss, to be differentiated, and the nats of each target, fp32 (T,), detached, 0 where
                 ignored; logits (T, V) if targets_T is None
        """
        c, training = self.config, torch.is_grad_enabled()
        previous_T = torch.cat((tokens_T[:1], tokens_T[:-1]))
        first_T = (positions_T == 0)[:, None, None]
        attention = self.attention(self, positions_T, cu_seqlens, max_doc)

        def attend(index, layer, q, k, v, gate):
            if layer in c.key_offset_layers:
                k = offset_keys(k, torch.cat((k[:1], k[:-1])), first_T)
            return attention(q, k, v, int(layer in c.long_layers), gate)

        hidden = self.trunk(tokens_T, previous_T, positions_T, attend)
        if targets_T is None:
            return softcap(F.linear(hidden, self.head).float(), c.softcap)
        weights, prefix = (self.loss_weights, None) if training else (None, None)
        if training and c.prefix_weight:
            prefix = torch.where(targets_T < 0, -1, self.prefixes[targets_T.clamp(min=0)])
        return linear_cross_entropy(hidden, self.head, targets_T, c.softcap, weights, prefix, row_weight_T,
                                    fp8=c.fp8_head and training)  # fmt: skip

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Softcapped logits (T, V), fp32, of what trunk returned."""
        return softcap(F.linear(hidden_TD, self.head).float(), self.config.softcap)

    @staticmethod
    def offset_keys(k_THK: Tensor, previous_THK: Tensor, first_T11: Tensor) -> Tensor:
        return offset_keys(k_THK, previous_THK, first_T11)

    def prefill(self, cache: KVCache, rows: list[int], starts: list[int], texts: list[list[int]], weights=None) -> None:
        """Brings rows of the cache up to the given texts, all in one packed forward.

        Args:  starts[i] how many ids of texts[i] row rows[i] already holds, fewer than all; weights as for trunk
        """
        c, n, half = self.config, len(rows), self.config.head_dim // 2
        pairs = list(zip(starts, texts, strict=True))
        tokens = [i for start, text in pairs for i in text[start:]]
        previous = [i for start, text in pairs for i in [0, *text][start:-1]]
        pad = -len(tokens) % 128  # a text of its own, never stored: sdpa_attention likes blocks of equal size
        rows, starts, ends = np.array([*rows, 0]), np.array([*starts, 0]), np.array([*map(len, texts), pad])
        borders = np.cumsum([0, *(ends - starts)])[: n + 1]

        def tensor(array) -> Tensor:
            return torch.as_tensor(array, device=self.embed.device)

        def plan(window: int, slots: int) -> tuple:
            """Attention over packs that hold, before the new keys of a row, those of its ring within the window."""
            held = np.minimum(starts, window)
            lengths = held + ends - starts
            text, cu_seqlens = np.repeat(np.arange(n + 1), lengths), np.cumsum([0, *lengths])
            place = np.arange(len(text)) - cu_seqlens[text]
            position, old = place + (starts - held)[text], place < held[text]
            order = np.where(old, np.cumsum(old), old.sum() + np.cumsum(~old)) - 1
            attention = self.attention(self, tensor(place), tensor(cu_seqlens).int(), int(lengths.max()))
            read = rows[text[old]], position[old] % slots
            text, position = text[~old], position[~old]
            kept = (text < n) & (position > ends[text] - slots)  # the last slot is for the still half of the next key
            write = rows[text[kept]], position[kept] % slots
            edges = rows[:n], starts[:n] % slots, ends[:n] % slots
            arrays = (~old).nonzero()[0], order, *read, kept.nonzero()[0], *write, *edges
            return attention, position, *map(tensor, arrays)

        plans = [plan(*sizes) for sizes in zip(self.windows, cache.slots, strict=True)]
        positions_T = tensor(plans[0][1]).clamp(max=c.max_seq_len - 1)  # only padding can lie beyond
        begin, last = tensor(borders[:-1]), tensor(borders[1:] - 1)
        first_T11 = (positions_T == 0)[:, None, None]

        def attend(index, layer, q, k, v, gate):
            long, keys, values = int(layer in c.long_layers), cache.keys[index], cache.values[index]
            attention, _, new, order, *read, kept, row, slot, rows, start, end = plans[long]
            if layer in c.key_offset_layers:
                own, before = k, torch.cat((k[:1], k[:-1]))
                before[begin] = keys[rows, start]
                k = offset_keys(k, before, first_T11)
            if any(starts):  # old keys stand in for queries, whose results nobody reads
                old_k, old_v = keys[*read], values[*read]
                packed = (torch.cat(pair)[order] for pair in ((old_k, q), (old_k, k), (old_v, v)))
                y = attention(*packed, long, None)[new]
            else:
                y = attention(q, k, v, long, None)
            keys[row, slot], values[row, slot] = k[kept], v[kept]
            if layer in c.key_offset_layers:
                keys[rows, end, :, half:] = own[last, :, half:]
            return gated(y, gate)

        self.trunk(tensor(tokens + [0] * pad), tensor(previous + [0] * pad), positions_T, attend, weights)

    def decode(self, cache: KVCache, tokens_B: Tensor, previous_B: Tensor, positions_B: Tensor, weights=None) -> Tensor:
        """Appends one token to each row of the cache; rows at position -1 rest and stay as they are.

        Args:    ids, the ids before them, and int32 positions of the ids, (B,); weights as for trunk
        Returns: logits (B, V) fp32
        """
        c = self.config

        def attend(index, layer, q, k, v, gate):
            offset = layer in c.key_offset_layers
            return gated(decode_attention(q, k, v, cache.keys[index], cache.values[index], positions_B, offset), gate)

        hidden = self.trunk(tokens_B, previous_B, positions_B.clamp(min=0), attend, weights)
        return softcap(F.linear(hidden, self.head).float(), c.softcap)


SIGN_ROWS = 8192  # 500 to 15,000 are equally good in modded-nanogpt record 83


def offset_keys(k_THK: Tensor, previous_THK: Tensor, first_T11: Tensor) -> Tensor:
    """Takes the still half of each key from the previous token (modded-nanogpt record 49, -50 steps).

    One attention layer can then look for "the token after the last X", which otherwise takes two.
    """
    still = torch.arange(k_THK.size(-1), device=k_THK.device) >= k_THK.size(-1) // 2
    return torch.where(still & ~first_T11, previous_THK, k_THK)


# <<< shared: forward
# >>> shared: optimizer
# ===============================================================================
# 3. OPTIMIZER -- NorMuon for matrices, Adam for the rest; state sharded over ranks
# Each rank owns a slice of every bank and table: it holds the fp32 master weights and fp32 moments of that slice.
# A step: reduce-scatter all gradients, update own slices in the same order, all-gather the compute-dtype weights.
# Gradients of `late` tables travel while the next step computes, and their weights while matrices are orthogonalised.
# One process is the same code with slices that are whole and communication that does nothing.

# Five polynomials (a, b, c) of Polar Express (arXiv 2505.16932), for a safety factor and a cushion of 0.02.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(matrices_NRC: Tensor) -> Tensor:
    """Nearly orthogonal matrices with the singular vectors of the given ones: all singular values become about 1.

    Args:    matrices_NRC (N, R, C) in the dtype to compute in
    Returns: the same shape and dtype
    """
    x = matrices_NRC / (matrices_NRC.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR_EXPRESS:  # x <- x (a I + b A + c A A); a I joins the small factor, so nothing is added after
        poly = sym_mm(sym_mm(x.mT if tall else x), c, b, a)
        x = x @ poly if tall else poly @ x
    return x


def normuon_update(master, grad, momentum_buffer, row_square, mult, lr, momentum, beta2, decay, grad_scale, dtype):
    """One NorMuon step (arXiv 2510.05491) with cautious weight decay (arXiv 2510.12402), in place.

    Args: master, grad, momentum_buffer (N, R, C); row_square (N, R, 1), or (N, 1, C) for wide matrices; mult (N, 1, 1)
          factors on lr; lr, momentum, beta2, decay, grad_scale 0-D tensors; dtype of the orthogonalisation
    """
    grad = grad.float() * grad_scale
    momentum_buffer.lerp_(grad, 1 - momentum)
    update = polar_express(grad.lerp(momentum_buffer, momentum).to(dtype)).float()  # Nesterov
    length = update.norm(dim=(-2, -1), keepdim=True)
    axis = -1 if update.size(-2) >= update.size(-1) else -2
    row_square.lerp_(update.square().mean(axis, keepdim=True), 1 - beta2)
    update = update * row_square.clamp_min(1e-10).rsqrt()  # every neuron moves by a like amount ...
    update = update * (length / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))  # ... and the sum is kept
    agrees = update * master >= 0  # decay only where the step already shrinks the weight
    master.sub_(lr * mult * (update + decay * master * agrees))


def adam_update(master, grad, exp_avg, exp_avg_sq, lr, beta1, beta2, eps, decay, correction1, correction2, grad_scale):
    """One Adam step with cautious weight decay, in place. All arguments after exp_avg_sq are 0-D tensors."""
    grad = grad.float() * grad_scale
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    update = exp_avg / correction1 / ((exp_avg_sq / correction2).sqrt() + eps)
    agrees = update * master > 0
    master.sub_(lr * (update + decay * master * agrees))


# Their names until torch 2.12, which later versions call deprecated.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class Slot:
    """One parameter with this rank's slice of its optimizer state."""

    name: str
    param: Tensor
    policy: Policy
    view: tuple  # the parameter as (N, R, C) or (N, ...): the leading axis is what ranks share out
    sharded: bool
    rows: int  # leading rows of a slice; the last ranks' slices may reach into padding
    master: Tensor  # fp32
    moments: dict[str, Tensor]
    mult: Tensor | None  # per matrix
    together: int = 0  # matrices in one call of NorMuon
    grad: Tensor | None = None  # this rank's slice of the sum over ranks; of a late table it stays for the next step
    full: Tensor | None = None  # what communication under way reads or writes
    work: object = None


class Optimizer:
    """NorMuon and Adam over the rows of parameter_table(config)."""

    def __init__(self, model: nn.Module, config: Config, ranks: Ranks):
        self.config, self.ranks, self.count = config, ranks, 0
        self.slots = []
        params = dict(model.named_parameters())
        table = parameter_table(config)
        assert set(params) <= set(table), f"parameters without a policy: {set(params) - set(table)}"
        for name, policy in table.items():
            if name not in params:
                continue
            param = params[name]
            view = tuple(param.shape)
            if policy.optimizer == "normuon":
                view = (-1, policy.rows or param.size(-2), param.size(-1))
                view = (param.numel() // (view[1] * view[2]), *view[1:])
            sharded = ranks.world > 1 and param.numel() >= 65536  # smaller ones are updated by every rank alike
            rows = -(-view[0] // ranks.world) if sharded else view[0]
            self.slots.append(Slot(name, param, policy, view, sharded, rows, param, {}, None))
        fast = config.compile and ranks.device.type == "cuda"
        self.normuon_update = torch.compile(normuon_update, dynamic=False, fullgraph=True) if fast else normuon_update
        self.adam_update = torch.compile(adam_update, dynamic=False, fullgraph=True) if fast else adam_update
        self.muon_dtype = torch.bfloat16 if ranks.device.type == "cuda" and bf16_is_native() else torch.float32
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Takes the master weights from the model and zeroes the moments."""
        self.count = 0
        for slot in self.slots:
            slot.moments, slot.grad, slot.full, slot.work = {}, None, None, None
            weights = slot.param.detach().view(slot.view)
            alias = weights.dtype == torch.float32 and not slot.sharded
            slot.master = weights if alias else self.slice(slot, weights).float()
            names = ("exp_avg", "exp_avg_sq")
            shapes = [slot.master.shape, slot.master.shape]
            if slot.policy.optimizer == "normuon":
                N, R, C = slot.master.shape
                names, shapes = ("momentum", "row_square"), [(N, R, C), (N, R, 1) if R >= C else (N, 1, C)]
                # sqrt(rows / columns) makes a step of a tall matrix as large per neuron as of a square one.
                mult = torch.full((slot.view[0], 1, 1), max(1, R / C) ** 0.5, device=slot.master.device)
                mult[1::2] *= slot.policy.odd_mult
                slot.mult = self.slice(slot, mult)
                # At most 2 ** 27 entries at once: each takes about 12 bytes of temporary memory (computed).
                slot.together = max(n for n in range(1, N + 1) if N % n == 0 and (n == 1 or n * R * C <= 2**27))
            slot.moments = {
                n: torch.zeros(s, device=slot.master.device) for n, s in zip(names, shapes, strict=True)
            }

    def slice(self, slot: Slot, full: Tensor) -> Tensor:
        """This rank's rows of a full (N, ...) tensor, padded with zeros."""
        if not slot.sharded:
            return full.clone()
        start = self.ranks.rank * slot.rows
        part = full[start : start + slot.rows]
        return torch.cat((part, part.new_zeros(slot.rows - part.size(0), *part.shape[1:])))

    def gather(self, slot: Slot, part: Tensor) -> Tensor:
        """The full (N, ...) tensor from every rank's slice."""
        if not slot.sharded:
            return part
        full = part.new_empty(slot.rows * self.ranks.world, *part.shape[1:])
        all_gather(full, part.contiguous())
        return full[: slot.view[0]]

    def start_reduce(self, slot: Slot) -> None:
        grad = slot.param.grad.view(slot.view)
        if slot.policy.late:
            grad = grad.clone()  # replay() writes the next gradient into the same memory
        slot.param.grad = None
        slot.grad, slot.work = grad, None
        if self.ranks.world == 1:
            return
        if not slot.sharded:
            slot.work = dist.all_reduce(grad, async_op=True)
            return
        if slot.rows * self.ranks.world != slot.view[0]:
            pad = slot.rows * self.ranks.world - slot.view[0]
            grad = torch.cat((grad, grad.new_zeros(pad, *grad.shape[1:])))
        slot.grad = grad.new_empty(slot.rows, *grad.shape[1:])
        slot.full = grad  # kept alive until the reduction is done
        slot.work = reduce_scatter(slot.grad, grad, async_op=True)

    def start_gather(self, slot: Slot) -> None:
        slot.work = slot.full = None
        weights = slot.param.detach().view(slot.view)
        if not slot.sharded:
            if weights.data_ptr() != slot.master.data_ptr():
                weights.copy_(slot.master)
            return
        part = slot.master.to(weights.dtype)
        padded = slot.rows * self.ranks.world
        slot.full = weights if padded == slot.view[0] else part.new_empty(padded, *part.shape[1:])
        slot.work = all_gather(slot.full, part, async_op=True)

    def finish_gather(self, slot: Slot) -> None:
        if slot.work is not None:
            slot.work.wait()
            if slot.full.size(0) != slot.view[0]:
                slot.param.detach().view(slot.view).copy_(slot.full[: slot.view[0]])
        slot.work = slot.full = slot.grad = None

    @torch.no_grad()
    def step(self, lr_mult: float, momentum: float, loss_scale: float = 1.0) -> bool:
        """Reduces gradients (summed over ranks), updates, gathers. Returns False if a scaled gradient overflowed.

        A late table takes the gradient of the step before, so that nobody waits for it: on 4 H200s, where such tables
        are four fifths of all bytes, they were most of the 2.7 ms a step that no computation hid.
        """
        late = [slot for slot in self.slots if slot.policy.late and loss_scale == 1.0]  # a scale must look at all
        now = [slot for slot in self.slots if slot not in late]
        for slot in now:
            self.start_reduce(slot)
        if loss_scale != 1.0:
            for slot in self.slots:
                if slot.work is not None:
                    slot.work.wait()
            finite = torch.stack([slot.grad.isfinite().all() for slot in self.slots]).all().float()
            if self.ranks.world > 1:
                dist.all_reduce(finite, op=dist.ReduceOp.MIN)
            if not finite.item():
                for slot in self.slots:
                    slot.work = slot.full = slot.grad = None
                return False
        self.count += 1
        scalar = torch.tensor  # 0-D CPU tensors: a python float would recompile the update at every change
        for slot in [*late, *now]:
            if slot.grad is None:  # a late table in the first step
                continue
            if slot.work is not None:
                slot.work.wait()
            policy, c = slot.policy, self.config
            decay, inverse = scalar(policy.weight_decay * lr_mult), scalar(1.0 / loss_scale)
            if policy.optimizer == "normuon":
                lr = scalar(c.muon_lr * policy.lr_mult * lr_mult)
                state = (slot.master, slot.grad, slot.moments["momentum"], slot.moments["row_square"], slot.mult)
                for part in zip(*(t.split(slot.together) for t in state), strict=True):
                    self.normuon_update(*part, lr, scalar(momentum), scalar(c.muon_beta2), decay, inverse,
                                        self.muon_dtype)  # fmt: skip
            else:
                lr = scalar(c.adam_lr * policy.lr_mult * lr_mult)
                corrections = [scalar(1 - beta ** (self.count - (slot in late))) for beta in policy.betas]
                betas = [scalar(beta) for beta in policy.betas]
                tensors = (slot.master, slot.grad, slot.moments["exp_avg"], slot.moments["exp_avg_sq"])
                flat = (t.view(-1) for t in tensors)
                self.adam_update(*flat, lr, *betas, scalar(c.adam_eps), decay, *corrections, inverse)
            self.start_gather(slot)
        for slot in self.slots:
            self.finish_gather(slot)
        for slot in late:
            self.start_reduce(slot)
        return True

    def weights(self) -> dict[str, Tensor]:
        """The fp32 master weights, whole, by parameter name. Every rank must call it."""
        return {s.name: self.gather(s, s.master).view(s.param.shape).cpu() for s in self.slots}

    def state(self) -> dict[str, Tensor]:
        """The moments and late gradients, whole, so that any number of ranks can load them. Every rank must call it."""
        state = {f"{s.name}.{k}": self.gather(s, v).cpu() for s in self.slots for k, v in s.moments.items()}
        for slot in self.slots:
            if slot.work is not None:
                slot.work.wait()
            if slot.grad is not None:
                state[f"{slot.name}.grad"] = self.gather(slot, slot.grad).cpu()
        return state

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], state: dict[str, Tensor], count: int) -> None:
        """Takes over fp32 weights and moments as saved by weights() and state()."""
        self.count = count
        for slot in self.slots:
            full = weights[slot.name].to(slot.master.device).view(slot.view)
            slot.master.copy_(self.slice(slot, full.float()))
            slot.param.copy_(full.view(slot.param.shape))
            for key, moment in slot.moments.items():
                moment.copy_(self.slice(slot, state[f"{slot.name}.{key}"].to(moment.device)))
            if f"{slot.name}.grad" in state:
                slot.grad = self.slice(slot, state[f"{slot.name}.grad"].to(slot.param))


def build_optimizer(model: nn.Module, config: Config, ranks: Ranks | None = None) -> Optimizer:
    """The optimizer of a model in the state of its first step."""
    return Optimizer(model, config, ranks or Ranks(0, 0, 1, model.embed.device))


# <<< shared: optimizer
# >>> shared: schedule
# ===============================================================================
# 4. SCHEDULE -- pure functions of (config, step)


def stage_index(config: Config, step: int) -> int:
    """Which row of the stage table a step belongs to."""
    progress, passed = step / config.num_steps, 0.0
    for index, stage in enumerate(config.stage_table):
        passed += stage.share
        if progress < passed - 1e-9:
            return index
    return len(config.stages) - 1


def lr_multiplier(config: Config, step: int) -> float:
    """The stage's factor, then a straight line down to lr_floor over the last `cooldown` of the run. No warm-up."""
    mult = config.stage_table[stage_index(config, step)].lr_mult
    fall = (step / config.num_steps - (1 - config.cooldown)) / config.cooldown if config.cooldown else 0.0
    fall = min(max(fall, 0.0), 1.0)
    return mult * (1 - fall) + config.lr_floor * fall


def muon_momentum(config: Config, step: int) -> float:
    """Rises over the first steps, when gradients still turn quickly, and falls over the last ones."""
    low, high, warm, cool = config.momentum
    warm, cool = min(warm, config.num_steps // 3), min(cool, config.num_steps // 10)
    rise = min(1.0, step / warm) if warm else 1.0
    fall = min(1.0, (config.num_steps - step) / cool) if cool else 1.0
    return low + (high - low) * min(rise, fall)


def loss_weights(config: Config, step: int) -> list[float]:
    """Weights of the next tokens in the loss, of which the first stays and the others fade out, and of the prefix."""
    fade = max(0.0, 1 - step / (config.num_steps * config.ahead_until))
    weights = [config.ahead[0], *(weight * fade for weight in config.ahead[1:])]
    if config.prefix_weight:  # whole for a third of the run, gone after two
        weights.append(config.prefix_weight * min(1.0, max(0.0, 2 - 3 * step / config.num_steps)))
    return weights


def stage_attention(config: Config, index: int) -> dict:
    """Windows, attention scale and rotary frequencies of a stage, by YaRN (arXiv 2309.00071) from stage to stage.

    When the long window grows from `old` to `new`, slow rotations are stretched by old / new, fast ones are kept, and
    the scale grows with log(new / old). Replayed from the first stage, so that it is a pure function.
    """
    quarter = config.head_dim // 4
    frequencies = np.array(config.frequencies or (1 / config.rotary_base) ** np.linspace(0, 1, quarter))
    scale = config.attention_scale
    table = config.stage_table
    for before, after in zip(table[:index], table[1 : index + 1], strict=True):
        old, new = before.window_long, after.window_long
        if new > old:
            keep = np.clip((old * frequencies / (2 * np.pi) - 1) / (32 - 1), 0, 1)
            frequencies = frequencies * (old / new + keep * (1 - old / new))
            scale *= 0.2 * math.log(new / old) + 1
    stage = table[index]
    windows = {"window_short": stage.window_short, "window_long": stage.window_long}
    return {**windows, "scale": scale, "frequencies": frequencies.tolist()}


# <<< shared: schedule
# >>> shared: data
# ===============================================================================
# 5. DATA -- shards -> packs of documents -> micro-batches
# A pack is a fixed number of tokens that starts with a BOS and holds whole documents, as far as they fit. A document
# that is longer than the stage allows, or than what is left of the pack, goes on as a new segment behind a BOS of its
# own, so that no text is thrown away (nanochat's cropping loses 35 %). Packs are numbered over
# the whole run; rank r of W takes the r-th of W equal parts of each step. So the tokens of a step depend neither on
# the number of ranks nor on the micro-batch, and (epoch, shard, offset) says exactly where the loader stands.
#
#     tokens    B a a a a B b b B c c c | B c c c c c B d ...      two packs of 12; document c is continued
#     targets   a a a a B b b B c c c c | c c c c c B d ...        the last target of a document is the next BOS
#     positions 0 1 2 3 4 0 1 2 0 1 2 3 | 0 1 2 3 4 5 0 ...
#
# Finetuning packs whole conversations instead, in an order drawn for each epoch, and pads what is left of a pack; a
# target that is not the assistant's is -1. Its position is the number of the next pack.

SHARD_MAGIC = 20240520


class Tokenizer:
    """Reads tokenizer.json: split pattern, base64 ranks, special tokens. Encoding needs tiktoken, decoding does not."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            spec = json.loads(self.path.read_text(encoding="utf-8"))
            self.pattern, self.specials = spec["pattern"], spec["special_tokens"]
            ranks = [base64.b64decode(rank) for rank in spec["ranks"]]
        except FileNotFoundError:
            raise UserError(f"no tokenizer at {path}; make one with python data/tokenizer.py train") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a tokenizer.json of this project ({error!r}); make it again") from None
        self.vocab_size = max(len(ranks) - 1, *self.specials.values()) + 1
        self.bytes = ranks + [b""] * (self.vocab_size - len(ranks))  # of the raw token, never of decoded text
        for text, index in self.specials.items():
            self.bytes[index] = text.encode()
        self.token_bytes = np.array([len(b) for b in self.bytes], np.int32)
        self.token_bytes[list(self.specials.values())] = 0  # specials carry no text
        self.bos_id = self.specials.get("<|bos|>", self.specials.get("<|endoftext|>"))
        self.mergeable = {rank: i for i, rank in enumerate(ranks)}

    def prefixes(self) -> list[int]:
        """For each token the longest other one that its bytes begin with, or -1: a second, coarser target.

        modded-nanogpt record 88; here on B34 -0.002 bpb.
        """
        ids = {rank: i for i, rank in enumerate(self.bytes[: len(self.mergeable)])}
        best = [max((n for n in range(1, len(b)) if b[:n] in ids), default=0) for b in self.bytes]
        return [ids.get(b[:n], -1) for b, n in zip(self.bytes, best, strict=True)]

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it stay text."""
        if not hasattr(self, "encoding"):
            import tiktoken

            self.encoding = tiktoken.Encoding(
                "decoderstack", pat_str=self.pattern, mergeable_ranks=self.mergeable, special_tokens=self.specials
            )
        return self.encoding.encode_ordinary(text)

    def decode_bytes(self, ids) -> bytes:
        return b"".join(self.bytes[i] for i in ids)

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


@dataclass
class Dataset:
    """A dataset directory: its shards, tokenizer and description."""

    root: Path
    info: dict
    tokenizer: Tokenizer

    @staticmethod
    def open(root: str | Path) -> Dataset:
        """Raises UserError if anything that training needs is missing or does not belong together."""
        root = Path(root)
        if not (root / "dataset.json").is_file():
            raise UserError(
                f"no dataset at {root}: download or make the default one with "
                f"`python data/pretrain.py --source climbmix --out data/shards/climbmix`, or make the embedded one, "
                f"which needs no network, with `python data/pretrain.py --source stdlib --vocab-size 4096 "
                f"--out data/shards/stdlib` and pass --data data/shards/stdlib"
            )
        try:
            info = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
            tokenizer_hash, _ = info["tokenizer_sha256"], info["splits"]["train"]["text_bytes"]
        except (ValueError, KeyError) as error:
            raise UserError(f"{root}/dataset.json cannot be read ({error!r}); make the dataset again") from None
        tokenizer = Tokenizer(root / "tokenizer.json")
        found = hashlib.sha256((root / "tokenizer.json").read_bytes()).hexdigest()
        if found != tokenizer_hash:
            raise UserError(
                f"{root}/tokenizer.json does not belong to the shards beside it: its sha256 is {found[:12]}..., "
                f"dataset.json states {tokenizer_hash[:12]}...; restore the file or make the dataset again"
            )
        return Dataset(root, info, tokenizer)

    def files(self, split: str, folder: str = "pretrain") -> list[Path]:
        files = sorted(p for p in (self.root / folder).glob(f"{split}_*.bin") if not p.name.endswith(".mask.bin"))
        if not files:
            way = f"add them with python data/sft.py --data {self.root} --source FILE"
            way = way if folder == "sft" else "make the dataset again"
            raise UserError(f"{self.root}/{folder} has no {split}_*.bin shards; {way}")
        return files

    def read(self, path: Path) -> np.ndarray:
        """Tokens of a shard, uint16, checked against its header.

        Raises UserError if it is truncated, corrupt, of another format or of another tokenizer.
        """
        size = path.stat().st_size
        header = np.fromfile(path, "<i4", 256)
        again = f"make or download it again with the scripts in data/ ({self.root})"
        if header.size < 256 or header[0] != SHARD_MAGIC or header[1] != 1:
            raise UserError(f"{path} is not a token shard of version 1; {again}")
        count = int(header[2])
        if count < 1 or size != 1024 + 2 * count:
            raise UserError(f"{path} is truncated: its header says {count} tokens, the file holds "
                            f"{(size - 1024) // 2}; {again}")  # fmt: skip
        tokens = np.fromfile(path, "<u2", count, offset=1024)
        if header[5:13].any() and header[5:13].tobytes().hex() != self.info["tokenizer_sha256"]:
            raise UserError(f"{path} was made with another tokenizer than {self.root}/tokenizer.json; {again}")
        if header[13:21].any() and hashlib.sha256(tokens.tobytes()).digest() != header[13:21].tobytes():
            raise UserError(f"{path} is corrupt: the checksum in its header does not fit its tokens; {again}")
        if tokens.max() >= self.tokenizer.vocab_size:
            raise UserError(f"{path} holds token {tokens.max()}, the tokenizer has {self.tokenizer.vocab_size} "
                            f"entries; use the tokenizer that the shards were made with")  # fmt: skip
        return tokens


def best_fit(lengths: np.ndarray, order: np.ndarray, room: int, most: int) -> list[list[int]]:
    """Puts each index of `order` into the fullest pack that has room for its length and fewer than `most` in it."""
    packs, unfilled, smallest = [], [], lengths.min()  # unfilled: (room left, pack), sorted
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect.bisect_left(unfilled, (length, 0))
        left, pack = unfilled.pop(at) if at < len(unfilled) else (room, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(i)
        if left - length >= smallest and len(packs[pack]) < most:
            bisect.insort(unfilled, (left - length, pack))
    return packs


class Conversations:
    """The conversations of data/sft.py, a split of them in memory, and the packs they go into, epoch after epoch."""

    def __init__(self, dataset: Dataset, split: str, config: Config):
        shards = []
        for path in dataset.files(split, "sft"):
            mask_path = path.with_suffix(".mask.bin")
            if not mask_path.is_file():
                raise UserError(f"{path} has no loss mask {mask_path.name} beside it; run data/sft.py again")
            tokens, mask = dataset.read(path), dataset.read(mask_path)
            bos = tokens == dataset.tokenizer.bos_id
            if not bos[0] or len(mask) != len(tokens) or mask.max() > 1 or mask[bos].any():
                raise UserError(f"{mask_path} is not the loss mask of {path.name}; run data/sft.py again")
            shards.append((tokens, mask == 1, bos))
        self.tokens, self.counted, bos = (np.concatenate(part) for part in zip(*shards, strict=True))
        self.borders = np.append(np.flatnonzero(bos), len(bos))
        lengths, most = np.diff(self.borders) - 1, min(stage.max_doc for stage in config.stage_table)
        if lengths.max() > most:
            raise UserError(f"{dataset.root}/sft holds a conversation of {lengths.max() + 1:,} tokens, the model reads "
                            f"{most:,}; make shorter ones with python data/sft.py --max-len {most + 1}")  # fmt: skip
        self.packs, self.inputs = [], int(lengths.sum())
        for epoch in range(config.max_epochs):
            order = np.random.default_rng([config.seed, epoch]).permutation(len(lengths))
            self.packs += best_fit(lengths, order, config.pack_tokens, config.pack_docs)

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """A conversation, int32 (n,), and which of its n - 1 targets count."""
        start, end = self.borders[i : i + 2]
        return self.tokens[start:end].astype(np.int32), self.counted[start + 1 : end]


@dataclass
class Batch:
    """The packs of one step that belong to this rank, on the host: int32 (P, pack_tokens), ends (P, most documents)."""

    tokens: Tensor
    targets: Tensor  # -1 is ignored
    positions: Tensor
    ends: Tensor  # where each document of a pack ends; padded with pack_tokens
    max_doc: int
    total_tokens: int  # of the step, over all ranks
    total_targets: int  # of those, how many are not ignored
    position: dict | None = None  # where the loader stands after this batch

    def micro_batches(self, packs: int, device: torch.device) -> Iterator[tuple]:
        """(tokens_T, targets_T, positions_T, cu_seqlens, max_doc) on the device, `packs` packs at a time."""
        P, pack_tokens = self.tokens.shape
        assert P % packs == 0, f"{P} packs do not divide into micro-batches of {packs}"
        starts = torch.arange(packs, dtype=torch.int32)[:, None] * pack_tokens
        for i in range(0, P, packs):
            ends = (self.ends[i : i + packs] + starts).flatten()
            cu_seqlens = torch.cat((ends.new_zeros(1), ends))
            tensors = [t[i : i + packs].flatten() for t in (self.tokens, self.targets, self.positions)]
            if device.type == "cuda":
                tensors, cu_seqlens = [t.pin_memory() for t in tensors], cu_seqlens.pin_memory()
            moved = [t.to(device, non_blocking=True) for t in (*tensors, cu_seqlens)]
            yield (*moved, self.max_doc)


def empty_packs(count: int, config: Config, bos_id: int) -> tuple[np.ndarray, ...]:
    """Packs to be filled: tokens (all BOS), targets (all ignored), positions (count, pack_tokens), and ends."""
    shape = (count, config.pack_tokens)
    spare = -(-config.pack_tokens // min(stage.max_doc for stage in config.stage_table))  # for pad_pack
    ends = np.full((count, config.pack_docs + spare), config.pack_tokens, np.int32)
    return np.full(shape, bos_id, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32), ends


def place(packs: tuple, row: int, doc: int, start: int, sequence: np.ndarray, counted=True) -> int:
    """Writes inputs sequence[:-1] and targets sequence[1:], where counted, at `start` of a pack; returns the end."""
    tokens, targets, positions, ends = packs
    end = start + len(sequence) - 1
    tokens[row, start:end], targets[row, start:end] = sequence[:-1], np.where(counted, sequence[1:], -1)
    positions[row, start:end] = np.arange(end - start)
    ends[row, doc] = end
    return end


def pad_pack(packs: tuple, row: int, doc: int, start: int, max_doc: int) -> None:
    """Closes a pack early: what is left becomes documents of ignored BOS tokens, none longer than max_doc."""
    _, _, positions, ends = packs
    rest = positions.shape[1] - start
    positions[row, start:] = np.arange(rest) % max_doc
    for i in range(-(-rest // max_doc)):
        ends[row, doc + i] = min(start + (i + 1) * max_doc, positions.shape[1])


def fill_pack(packs: tuple, row: int, documents: Iterable, max_doc: int) -> int:
    """Puts (sequence, counted) of whole documents behind each other into a pack; returns how many targets count."""
    doc = filled = targets = 0
    for sequence, counted in documents:
        filled, doc = place(packs, row, doc, filled, sequence, counted), doc + 1
        targets += int(counted.sum())
    pad_pack(packs, row, doc, filled, max_doc)
    return targets


class PackLoader:
    """Yields one Batch for each step, prepared ahead by a thread.

    Args: position {"epoch", "shard", "offset"}, or {"pack"} with conversations, as left in a batch of an earlier run;
          first_step where to begin; conversations to train on in place of the dataset's documents
    """

    def __init__(self, dataset: Dataset, config: Config, ranks: Ranks, position: dict | None = None, first_step=0,
                 conversations: Conversations | None = None):  # fmt: skip
        self.dataset, self.config, self.ranks, self.conversations = dataset, config, ranks, conversations
        self.position = dict(position or ({"pack": 0} if conversations else {"epoch": 0, "shard": 0, "offset": 0}))
        self.first_step = first_step
        self.queue: queue.Queue = queue.Queue(maxsize=2)
        self.closing = threading.Event()
        if not conversations:
            self.files = dataset.files("train")
            self.open_shard()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def open_shard(self) -> None:
        self.tokens = self.dataset.read(self.files[self.position["shard"]])
        self.bos_at = np.flatnonzero(self.tokens == self.dataset.tokenizer.bos_id)

    def segment(self, room: int, max_doc: int) -> np.ndarray:
        """The next segment with at most min(room, max_doc) inputs: its inputs and one more token, the last target."""
        offset, bos_id = self.position["offset"], self.dataset.tokenizer.bos_id
        if offset == len(self.tokens):
            self.position["shard"] += 1
            if self.position["shard"] == len(self.files):
                self.position = {"epoch": self.position["epoch"] + 1, "shard": 0, "offset": 0}
                if self.position["epoch"] >= self.config.max_epochs:
                    raise UserError(
                        f"{self.dataset.root} ran out of text after {self.config.max_epochs} epoch(s); "
                        f"train on fewer tokens (--tokens) or allow repeats with --set "
                        f"max_epochs={self.config.max_epochs + 1}"
                    )
            self.position["offset"] = offset = 0
            self.open_shard()
        continued = self.tokens[offset] != bos_id
        after = np.searchsorted(self.bos_at, offset, side="right")
        end = self.bos_at[after] if after < len(self.bos_at) else len(self.tokens)
        take = min(end - offset, min(room, max_doc) - continued)
        self.position["offset"] = int(offset + take)
        last = self.tokens[offset + take] if offset + take < len(self.tokens) else bos_id
        body = self.tokens[offset : offset + take]
        return np.concatenate(([bos_id] if continued else [], body, [last])).astype(np.int32)

    def pack(self, max_doc: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What the next pack holds: sequences, and which of their targets count. No conversation twice in an epoch."""
        if self.conversations:
            packs, number = self.conversations.packs, self.position["pack"]
            self.position["pack"] += 1
            yield from map(self.conversations.read, packs[number] if number < len(packs) else ())
            return
        room, docs = self.config.pack_tokens, 0
        while room and docs < self.config.pack_docs:
            sequence = self.segment(room, max_doc)
            room, docs = room - len(sequence) + 1, docs + 1
            yield sequence, np.ones(len(sequence) - 1, bool)

    def batch(self, step: int) -> Batch:
        config, ranks = self.config, self.ranks
        stage = config.stage_table[stage_index(config, step)]
        mine = stage.packs // ranks.world
        packs = empty_packs(mine, config, self.dataset.tokenizer.bos_id)
        scratch, targets = empty_packs(1, config, self.dataset.tokenizer.bos_id), 0
        for pack in range(stage.packs):  # every rank walks over all packs: walking is cheap, talking is not
            row = pack - ranks.rank * mine
            target, row = (packs, row) if 0 <= row < mine else (scratch, 0)
            targets += fill_pack(target, row, self.pack(stage.max_doc), stage.max_doc)
        tensors = [torch.from_numpy(array) for array in packs]
        return Batch(*tensors, stage.max_doc, stage.packs * config.pack_tokens, targets, dict(self.position))

    def run(self) -> None:
        try:
            for step in range(self.first_step, self.config.num_steps):
                if self.closing.is_set():
                    return
                self.put(self.batch(step))
        except BaseException as error:
            self.put(error)

    def put(self, item) -> None:
        while not self.closing.is_set():
            try:
                return self.queue.put(item, timeout=0.1)
            except queue.Full:
                pass

    def next(self) -> Batch:
        item = self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self.closing.set()
        self.thread.join()


def validation_documents(dataset: Dataset, config: Config) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Documents from their BOS, cut at max_seq_len, or conversations; and which of their targets count."""
    if config.source:
        conversations = Conversations(dataset, "val", config)
        yield from map(conversations.read, range(len(conversations.borders) - 1))
        return
    for path in dataset.files("val"):
        tokens = dataset.read(path).astype(np.int32)
        starts = np.flatnonzero(tokens == dataset.tokenizer.bos_id)
        if not starts.size:
            raise UserError(f"{path} has no BOS token ({dataset.tokenizer.bos_id}), so no documents; make it again")
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            end = min(end, start + config.max_seq_len)
            yield tokens[start:end], np.ones(end - start - 1, bool)


def validation_batch(dataset: Dataset, config: Config) -> Batch:
    """Validation documents up to val_tokens, whole in their packs: the same for every run."""
    rows, room, total = [[]], config.pack_tokens, 0
    for sequence, counted in validation_documents(dataset, config):
        if len(counted) and total < config.val_tokens:
            if len(counted) > room or len(rows[-1]) == config.pack_docs:
                rows.append([])
                room = config.pack_tokens
            rows[-1].append((sequence, counted))
            room, total = room - len(counted), total + len(counted)
    packs = empty_packs(len(rows), config, dataset.tokenizer.bos_id)
    targets = sum(fill_pack(packs, row, rows[row], config.max_seq_len) for row in range(len(rows)))
    return Batch(*(torch.from_numpy(array) for array in packs), config.max_seq_len, packs[0].size, targets)


# <<< shared: data
# >>> shared: attention
# ===============================================================================
# 6. ATTENTION -- causal, inside documents, over a window; one signature for all backends
# attention(model, positions (T,), cu_seqlens (G + 1,), max_doc) prepares what all layers share and returns
# attend(q, k, v (T, H, K), long 0 or 1, gate (T, H) or None) -> (T, H, K), where q already carries the scale.
# Query i sees keys j of its own document with i - window <= j <= i.


def gated(y_THK: Tensor, gate_TH: Tensor | None) -> Tensor:
    return y_THK if gate_TH is None else y_THK * gate_TH[..., None]


def block_mask(positions_T: Tensor, reach: int) -> Tensor:
    """Who sees whom, bool (T / block, 1, block, block or 2 block), in blocks that are no shorter than the reach.

    Queries of a block look at their own and the previous block; before the first block lies nothing.
    """
    T = positions_T.numel()
    block = next((b for b in range(max(reach, 1), T) if T % b == 0), T)
    index = torch.arange(T, device=positions_T.device)
    first = torch.maximum(index - positions_T, index - reach).view(-1, 1, block, 1)
    queries, keys = index.view(-1, 1, block, 1), index.view(-1, 1, 1, block)
    keys = torch.cat((keys - block, keys), 3) if block < T else keys
    return (keys >= first) & (keys <= queries)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q, k, v (T, H, K) and a block_mask -> (T, H, K), by scaled_dot_product_attention."""
    (T, H, K), (blocks, _, block, width) = q.shape, mask.shape
    q, k, v = (t.view(blocks, block, H, K).transpose(1, 2) for t in (q, k, v))
    if width > block:
        k, v = (torch.cat((torch.cat((torch.zeros_like(t[:1]), t[:-1])), t), 2) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
    return y.transpose(1, 2).reshape(T, H, K)


def sdpa_attention(model, positions_T, cu_seqlens, max_doc) -> Callable:
    """Plain torch, on any device and in any dtype."""
    masks = [block_mask(positions_T, min(window, max_doc)) for window in model.windows]
    return lambda q, k, v, long, gate: gated(blocked_attention(q, k, v, masks[long]), gate)


def varlen_attention(model, positions_T, cu_seqlens, max_doc) -> Callable:
    """FlashAttention 2 inside torch (Ampere and newer, 16 bits). Every pair of windows is a graph of its own."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(q, k, v, long, gate):
        window = (model.windows[long], 0)
        y = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_doc, max_doc, scale=1.0, window_size=window)
        return gated(y, gate)

    return attend


def triton_attention(model, positions_T, cu_seqlens, max_doc) -> Callable:
    """window_attention of section 7 (Ampere and newer, 16 bits); windows are data, so one graph serves all stages."""
    bounds = [attention_bounds(cu_seqlens, positions_T.numel(), size) for size in model.window_sizes.unbind()]
    return lambda q, k, v, long, gate: window_attention(q, k, v, bounds[long], 1.0, gate)


def load_fa3_attention() -> Callable:
    """FlashAttention 3 from the Hugging Face hub through `kernels` (Hopper). Not measured by this project yet."""
    from kernels import get_kernel

    flash = get_kernel("kernels-community/flash-attn3").flash_attn_varlen_func

    def fa3_attention(model, positions_T, cu_seqlens, max_doc):
        def attend(q, k, v, long, gate):
            y = flash(q, k, v, cu_seqlens, cu_seqlens, max_doc, max_doc, softmax_scale=1.0, causal=True,
                      window_size=(model.windows[long], 0))  # fmt: skip
            return gated(y[0] if isinstance(y, tuple) else y, gate)

        return attend

    return fa3_attention


ATTENTION = {
    "fa3": load_fa3_attention, "triton": lambda: triton_attention, "varlen": lambda: varlen_attention,
    "sdpa": lambda: sdpa_attention,
}  # fmt: skip


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


def choose_attention(model: nn.Module, say: Callable = print) -> Callable:
    """The first backend that runs a tiny case forward and backward; one named in the config must run."""
    config, device, dtype = model.config, model.embed.device, model.embed.dtype
    if config.attention != "auto" and config.attention not in ATTENTION:
        raise UserError(f"--attention {config.attention} is none of auto, {', '.join(ATTENTION)}")
    names = [config.attention]
    if config.attention == "auto":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        names = ["sdpa"] if dtype == torch.float32 or capability < (8, 0) else ["triton", "varlen", "sdpa"]
        names = ["fa3", *names] if capability == (9, 0) and dtype != torch.float32 else names
    for name in names:
        try:
            attention = ATTENTION[name]()
            q, k, v = 0.1 * torch.randn(3, 256, config.num_heads, config.head_dim, device=device, dtype=dtype)
            q.requires_grad_()
            gate = q.new_ones(256, config.num_heads) if config.attention_gates else None
            ends = torch.tensor([0, 100, 256, 256], device=device, dtype=torch.int32)
            positions = torch.cat((torch.arange(100), torch.arange(156))).to(device)
            with torch.enable_grad():
                attention(model, positions, ends, 256)(q, k, v, 0, gate).float().sum().backward()
            if not q.grad.isfinite().all():
                raise RuntimeError("its gradient is not finite")
            say(f"attention: {name}")
            return attention
        except Exception as error:  # a backend may fail in any way, also when the hub cannot be reached
            reason = first_line(error)
            if config.attention != "auto":
                raise UserError(f"--attention {name} cannot run here ({reason}); try --attention auto") from None
            say(f"attention: {name} skipped ({reason})")
    raise UserError("no attention backend runs on this device; try --dtype float32 --attention sdpa")


# <<< shared: attention
# >>> shared: kernels
# ===============================================================================
# 7. KERNELS -- Triton, each beside its plain reference of the same signature (name_ref)
# The references are the path of CPUs, of fp32 and of GPUs before Ampere, and the oracle of tests/test_kernels.py.
# Times are for one H200 at T = 65,536 (dev/bench_kernels.py), against what torch.compile made of the plain code.


def use_triton(x: Tensor, capability: tuple = (8, 0)) -> bool:
    """Kernels run on CUDA tensors of 16 or 8 bits from Ampere on; everything else takes the plain path."""
    fits = triton is not None and x.is_cuda and x.itemsize <= 2
    return fits and torch.cuda.get_device_capability(x.device) >= capability


# Operators have global names: a second copy of this file in a process (that of a run directory) takes the next one.
OPS = next(f"decoderstack{n}" for n in range(1000) if not hasattr(getattr(torch.ops, f"decoderstack{n}"), "sym_mm"))

# -- softcapped cross-entropy: head, loss and gradient in one pass over the logits; 17.3 ms, in fp8 12.9, against 21.0
# z = a sigmoid((x + b) / c); lse = log sum_j exp z_j; row t has the terms targets[t + k] with weight w_k and prefix[t]
# with the last weight; a term past the end or with a negative target drops out; S is the sum of the row's weights.
#   loss_t = S lse - sum_k w_k z[target_k];  dloss_t/dx_j = a/c s_j (1 - s_j) (S softmax_j - sum_k w_k [j = target_k])


def softcap_ce_ref(logits, targets, weights, prefix, row_weight, cap, row0=0, grad=True):
    """Rows row0.. of the loss: logits (n, V) -> losses (n,) and nats of the next token (n,), fp32, and
    row_weight * gradient (n, V) or None."""
    n, n_pred, (a, b, c) = len(logits), len(weights) - (prefix is not None), cap
    # z <= a, so exp needs no maximum. Few passes, most in place: 43 ms against 180 on two CPU cores, 2,048 x 4,096.
    s = torch.add(torch.full((), b / c, device=logits.device), logits.float(), alpha=1 / c).sigmoid_()
    e = torch.add(torch.full((), -a, device=logits.device), s, alpha=a).exp_()
    total = e.sum(1)
    pick = torch.full((n, len(weights)), -1, dtype=torch.int64, device=logits.device)
    for k in range(n_pred):
        shifted = targets[row0 + k : row0 + k + n]
        pick[: len(shifted), k] = shifted
    if prefix is not None:
        pick[:, -1] = prefix[row0 : row0 + n]
    real, pick = pick >= 0, pick.clamp(min=0)
    w, z, lse = weights * real, a * s.gather(1, pick), a + total.log()
    losses, nats = w.sum(1) * lse - (w * z).sum(1), (lse - z[:, 0]) * real[:, 0]
    if not grad:
        return losses, nats, None
    g = (a / c) * w if row_weight is None else (a / c) * w * row_weight[row0 : row0 + n, None]
    e.mul_((g.sum(1) / total)[:, None]).scatter_add_(1, pick, -g)
    return losses, nats, e.mul_(s.addcmul_(s, s, value=-1)).to(logits.dtype)


@jit
def fast_sigmoid(x, FAST: tl.constexpr):
    """With FAST one instruction, wrong by up to 2.5e-4, which bf16 logits cannot tell; 0.4 ms of 88 a step."""
    if FAST:
        half = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], tl.float32, True, 1)
        return 0.5 + 0.5 * half
    return tl.sigmoid(x)


@jit
def softcap_ce_kernel(logits, grad, losses, nats, targets, weights, prefix, row_weight, row0, T, a, b, c,
                      V: tl.constexpr, N_PRED: tl.constexpr, TERMS: tl.constexpr, PAD: tl.constexpr,
                      PREFIX: tl.constexpr, ROW_W: tl.constexpr, GRAD: tl.constexpr, FAST: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """One row a program. z <= a bounds the exponentials, so lse needs no running maximum, and the softmax part of the
    gradient is const * v with v = e s (1 - s) known at the first look: with BLOCK >= V the row is read once and v waits
    in registers, else a second sweep reads the row again from L2. Target columns are rewritten at the end."""
    row = tl.program_id(0)
    t, logits, grad = row0 + row, logits + row.to(tl.int64) * V, grad + row.to(tl.int64) * V
    k = tl.arange(0, PAD)
    target = tl.load(targets + t + k, mask=(k < N_PRED) & (t + k < T), other=-1).to(tl.int32)
    if PREFIX:
        target = tl.where(k == N_PRED, tl.load(prefix + t).to(tl.int32), target)
    w = tl.where(target >= 0, tl.load(weights + k, mask=k < TERMS, other=0.0), 0.0)
    z_t = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32)
    s_t = fast_sigmoid((z_t + b) / c, FAST)
    W, scale, log2e = tl.sum(w), 1.0 / c, 1.4426950408889634
    if BLOCK >= V:
        j = tl.arange(0, BLOCK)
        s = fast_sigmoid((tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32) + b) * scale, FAST)
        e = tl.where(j < V, tl.exp2(a * log2e * (s - 1.0)), 0.0)
        v = e * s * (1.0 - s)
        v = v if logits.dtype.element_ty == tl.float32 else v.to(tl.bfloat16)
        total = tl.sum(e)
    else:
        acc = tl.zeros([BLOCK], tl.float32)
        for j0 in range(0, V, BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            s = fast_sigmoid((tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32) + b) * scale, FAST)
            acc += tl.where(j < V, tl.exp2(a * log2e * (s - 1.0)), 0.0)
        total = tl.sum(acc)
    lse = a + tl.log(total)
    tl.store(losses + t, W * lse - a * tl.sum(w * s_t))
    tl.store(nats + t, tl.sum(tl.where((k == 0) & (target >= 0), lse - a * s_t, 0.0)))
    if GRAD:
        g = a / c
        if ROW_W:
            g = g * tl.load(row_weight + t)
        if BLOCK >= V:
            tl.store(grad + j, (v.to(tl.float32) * (g * W / total)).to(grad.dtype.element_ty), mask=j < V)
        else:
            for j0 in range(0, V, BLOCK):
                j = j0 + tl.arange(0, BLOCK)
                s = fast_sigmoid((tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32) + b) * scale, FAST)
                v = tl.exp2(a * log2e * (s - 1.0)) * s * (1.0 - s)
                tl.store(grad + j, (v * (g * W / total)).to(grad.dtype.element_ty), mask=j < V)
        w = tl.sum(tl.where(target[:, None] == target[None, :], w[None, :], 0.0), 1)  # equal targets share a column
        g_t = g * s_t * (1.0 - s_t) * (W * tl.exp2(a * log2e * (s_t - 1.0)) / total - w)
        tl.debug_barrier()
        tl.store(grad + target, g_t.to(grad.dtype.element_ty), mask=target >= 0)


def softcap_ce(logits, targets, weights, prefix, row_weight, cap, row0=0, grad=True, out=None, block=32768):
    """As softcap_ce_ref on contiguous logits, one read and one write: the gradient replaces the logits or fills `out`.

    4 bytes moved an element; 3.1 TB/s with whole rows in registers (block 32768, 16 warps, H200).
    """
    n, V = logits.shape
    out = logits if out is None else out
    losses, nats = torch.empty(2, row0 + n, dtype=torch.float32, device=logits.device)
    block = min(block if grad else 4096, triton.next_power_of_2(V))
    softcap_ce_kernel[(n,)](
        logits, out, losses, nats, targets, weights, targets if prefix is None else prefix,
        weights if row_weight is None else row_weight, row0, len(targets), *cap, V=V, TERMS=len(weights),
        N_PRED=len(weights) - (prefix is not None), PAD=max(2, triton.next_power_of_2(len(weights))),
        PREFIX=prefix is not None, ROW_W=row_weight is not None, GRAD=grad, BLOCK=block, num_warps=16 if grad else 8,
        FAST=grad and logits.is_cuda and logits.dtype != torch.float32,
    )  # fmt: skip
    return losses[row0:], nats[row0:], out if grad else None


@jit
def transpose_kernel(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    tile = tl.load(x + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N))
    tl.store(y + n[:, None] * M + m[None, :], tl.trans(tile), mask=(n[:, None] < N) & (m[None, :] < M))


@torch.library.custom_op(f"{OPS}::transpose8", mutates_args=())
def transpose8(x: Tensor) -> Tensor:
    """(M, N) of one-byte items -> contiguous (N, M) at 3.9 TB/s; _scaled_mm takes its operands in one layout only."""
    if not use_triton(x):
        return x.T.contiguous()
    y = x.new_empty(x.shape[::-1])
    grid = (triton.cdiv(x.shape[0], 128), triton.cdiv(x.shape[1], 128))
    transpose_kernel[grid](x.view(torch.uint8), y.view(torch.uint8), *x.shape, BM=128, BN=128, num_warps=8)
    return y


transpose8.register_fake(lambda x: x.new_empty(x.shape[::-1]))

# -- fp8 products of the layers; a step of B34 74.6 ms for 89.7 in bf16, 0.0005 bpb worse (11 runs)
# Weights and activations are e4m3, gradients e5m2, sums fp32. A tensor has one scale, made from norms of rows where
# they bound what is to be cast: nothing is looked for in what is large, and nothing is carried from step to step, so a
# resumed run goes on exactly. A bound may be far off: e4m3 has 18 binades, e5m2 32, nearly all of them with all bits.

E4M3, E5M2, E4M3_MAX, E5M2_MAX = torch.float8_e4m3fn, torch.float8_e5m2, 448.0, 57344.0


def fits_fp8(x: Tensor, *sizes: int) -> bool:
    """The products need compute capability 8.9 and sizes that are multiples of 16; x says device and dtype."""
    return use_triton(x, (8, 9)) and x.dtype == torch.bfloat16 and all(n % 16 == 0 for n in sizes)


def largest_row(x: Tensor) -> Tensor:
    """The largest norm of a row of x (N, K), fp32, 0-D."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).amax().clamp(min=1e-20)


def cast8(x: Tensor, factor: Tensor | float, dtype: torch.dtype = E4M3) -> Tensor:
    return (x * factor).to(dtype)


def product8(a_MK: Tensor, b_NK: Tensor, scale: Tensor, dtype: torch.dtype, fast=False) -> Tensor:
    """a b^T times a 0-D fp32 scale, (M, N) in dtype, of contiguous fp8 operands; on other devices by fp32 products."""
    if a_MK.is_cuda:  # of capability 8.9, see fits_fp8
        one = torch.ones((), device=scale.device)
        return torch._scaled_mm(a_MK, b_NK.T, scale, one, out_dtype=dtype, use_fast_accum=fast)
    product = a_MK.float() @ b_NK.float().T * scale
    # An idle .to() as the result of an autograd.Function makes its compiled gradients 0 in torch 2.11.
    return product if dtype == torch.float32 else product.to(dtype)


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """An e4m3 copy and its scale, largest magnitude / 448."""
    scale = torch.linalg.vector_norm(x, float("inf")).float().clamp_(min=1e-12) / E4M3_MAX
    return cast8(x, 1 / scale), scale


@torch.library.custom_op(f"{OPS}::linear_ce", mutates_args=())
def linear_ce(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, prefix: Tensor | None, row_weight: Tensor | None,
    cap: list[float], chunk: int, grad: bool, fp8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, nats, dx and dw of linear_cross_entropy, chunk by chunk over the tokens."""
    T, V, kernel = len(x), len(w), use_triton(x)
    losses, nats = torch.empty(T, device=x.device), torch.empty(T, device=x.device)
    dx, dw = x.new_empty(x.shape if grad else 0), None if grad else w.new_empty(0)
    # More than one chunk is summed in fp32: a 16-bit running sum would round once a chunk.
    g8, rows, wide = None, row_weight, x.is_cuda and x.dtype != torch.float32 and T > chunk
    if fp8:
        (x8, x_s), (w8, w_s) = to_fp8(x), to_fp8(w)
        if grad:  # |gradient| <= a / (4 c) * sum of weights * row weight: a scale known without a look at the logits
            g_s = weights.abs().sum() * (cap[0] / (4 * cap[2]) / 57344)
            g_s = (g_s if rows is None else g_s * rows.abs().max()).clamp(min=1e-30)
            rows = (torch.ones(T, device=x.device) if rows is None else rows) / g_s
            g8 = torch.empty(min(chunk, T), V, dtype=torch.float8_e5m2, device=x.device)
            w8t = transpose8(w8)
    for i in range(0, T, chunk):
        xc, n = x[i : i + chunk], min(chunk, T - i)
        if fp8:
            logits = torch._scaled_mm(x8[i : i + n], w8.T, x_s, w_s, out_dtype=x.dtype, use_fast_accum=True)
        else:
            logits = xc @ w.T
        function, into = (softcap_ce, {"out": None if g8 is None else g8[:n]}) if kernel else (softcap_ce_ref, {})
        own = slice(i, i + n)
        losses[own], nats[own], g = function(logits, targets, weights, prefix, rows, tuple(cap), i, grad, **into)
        if not grad:
            continue
        if fp8:
            dx[i : i + n] = torch._scaled_mm(g, w8t.T, g_s, w_s, out_dtype=x.dtype)
            part = torch._scaled_mm(transpose8(g), transpose8(x8[i : i + n]).T, g_s, x_s,
                                    out_dtype=torch.float32 if wide else w.dtype)  # fmt: skip
        else:
            torch.mm(g, w, out=dx[i : i + n])
            part = torch.mm(g.T, xc, out_dtype=torch.float32) if wide else g.T @ xc
        dw = part if dw is None else dw.add_(part)
        del logits, g
    total = losses.sum() if row_weight is None else losses @ row_weight
    return total, nats, dx, dw.to(w.dtype)


@linear_ce.register_fake
def _(x, w, targets, weights, prefix, row_weight, cap, chunk, grad, fp8):
    nats = x.new_empty(len(x), dtype=torch.float32)
    return nats.new_empty(()), nats, x.new_empty(x.shape if grad else 0), w.new_empty(w.shape if grad else 0)


def save_linear_ce(ctx, inputs, output):
    ctx.save_for_backward(*output[2:])
    ctx.set_materialize_grads(False)


def linear_ce_backward(ctx, g, *unused):
    dx, dw = ctx.saved_tensors
    return (None,) * 10 if g is None else (dx * g, dw * g) + (None,) * 8


linear_ce.register_autograd(linear_ce_backward, setup_context=save_linear_ce)


def linear_cross_entropy(x, w, targets, cap, weights=None, prefix=None, row_weight=None, chunk=16384, fp8=False):
    """Softcapped head and loss.

    Args:    x (T, D), w (V, D), targets int (T,), negative: none; cap as in softcap(); weights fp32 (n_pred,) of the
             targets ahead, with prefix int (T,) one more, last; row_weight fp32 (T,); fp8: e4m3 operands with dynamic
             scales and an e5m2 gradient with an exact bound for scale, switched off below compute capability 8.9
    Returns: sum over t of row_weight_t * loss_t; nats of targets_t alone, fp32 (T,), detached, 0 where there is none

    Gradients are made in the forward, a chunk of logits at a time, and the backward multiplies them by the gradient of
    the sum, so they are exact for whatever flows in. A weighting by token goes into row_weight: the nats carry no
    gradient, so nothing can be silently wrong.
    """
    weights = torch.ones(1, device=x.device) if weights is None else weights
    grad = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    if not use_triton(x):  # the plain path holds several fp32 copies of a chunk's logits: 256 MiB each
        chunk = min(chunk, max(2**26 // len(w), 1))
    fp8 = fp8 and use_triton(x, (8, 9)) and all(n % 16 == 0 for n in (*x.shape, len(w), chunk))
    total, nats, _, _ = linear_ce(x, w, targets, weights, prefix, row_weight, list(cap), chunk, grad, fp8)
    return total, nats.detach()


# -- symmetric products for Polar Express: half the tiles; the MLP bank's step 1.66 ms against 2.44


def sym_mm_ref(x: Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Tensor:
    """alpha x x^T + beta x + gamma I: x (b, m, k) -> (b, m, m); beta needs a symmetric x. X^T X is sym_mm(x.mT)."""
    out = alpha * (x @ x.mT)
    out = out + beta * x if beta else out
    return out + gamma * torch.eye(out.shape[-1], dtype=x.dtype, device=x.device) if gamma else out


@jit
def sym_mm_kernel(x, out, M, K, sb, sm, sk, alpha, beta, gamma, BETA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    i, j = tl.program_id(0) // tl.cdiv(M, BN), tl.program_id(0) % tl.cdiv(M, BN)
    if j * BN < (i + 1) * BM:  # on or below the diagonal; the store mirrors it
        x, out = x + tl.program_id(1).to(tl.int64) * sb, out + tl.program_id(1).to(tl.int64) * M * M
        m, n, k = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
        left, right = x + m[:, None] * sm + k[None, :] * sk, x + n[:, None] * sm + k[None, :] * sk
        acc = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            in_k = k[None, :] < K - k0
            a = tl.load(left, mask=(m[:, None] < M) & in_k, other=0.0)
            b = tl.load(right, mask=(n[:, None] < M) & in_k, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
            left += BK * sk
            right += BK * sk
        acc *= alpha
        inside = (m[:, None] < M) & (n[None, :] < M)
        if BETA:
            tile = tl.load(x + m[:, None] * sm + n[None, :] * sk, mask=inside, other=0.0)
            acc += beta * tile.to(tl.float32)
        acc = (acc + tl.where(m[:, None] == n[None, :], gamma, 0.0)).to(out.dtype.element_ty)
        tl.store(out + m[:, None] * M + n[None, :], acc, mask=inside)
        tl.store(out + n[:, None] * M + m[None, :], tl.trans(acc), mask=(n[:, None] < M) & (m[None, :] < M))


SYM_TILES = dict(BM=128, BN=128, BK=64, num_warps=8, num_stages=3)  # best of five on an H200, all four shapes


@torch.library.custom_op(f"{OPS}::sym_mm", mutates_args=())
def sym_mm(x: Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Tensor:
    """As sym_mm_ref with half the products: tiles below the diagonal, stored twice; x in any strides.

    m (m + 1) k FLOP and 2 (m k + m m) bytes a matrix; 1,007 TFLOP/s counted as a full product of 24 x 768 x 3072.
    """
    if not use_triton(x):
        return sym_mm_ref(x, alpha, beta, gamma)
    b, m, k = x.shape
    out = x.new_empty(b, m, m)
    grid = (triton.cdiv(m, SYM_TILES["BM"]) * triton.cdiv(m, SYM_TILES["BN"]), b)
    sym_mm_kernel[grid](x, out, m, k, *x.stride(), alpha, beta, gamma, BETA=beta != 0, **SYM_TILES)
    return out


@sym_mm.register_fake
def _(x, alpha=1.0, beta=0.0, gamma=0.0):
    return x.new_empty(x.shape[0], x.shape[1], x.shape[1])


# -- relu(x w^T)^2 in the epilogue of a product; the MLP forward and backward 2.89 ms against 3.1, in fp8 2.04
# Only the activation after the square is kept: its root is relu(x w^T), which is all that the backward needs.


def linear_relu2_ref(x: Tensor, w: Tensor) -> Tensor:
    """x (T, D), w (F, D) -> relu(x w^T)^2, (T, F)."""
    return F.relu(x @ w.T).square()


def linear_relu2_grad_ref(g: Tensor, w: Tensor, post: Tensor) -> Tensor:
    """g (T, D), w (F, D), post = relu(pre)^2 (T, F) -> gradient of pre, 2 (g w^T) sqrt(post)."""
    return 2 * (g @ w.T) * post.sqrt()


@jit
def relu2_epilogue(acc, aux, factor, BWD: tl.constexpr):
    if BWD:
        acc = 2.0 * acc * tl.sqrt(aux.to(tl.float32))
    else:
        acc = tl.maximum(acc, 0.0)
        acc = acc * acc
    return acc * factor


@jit
def linear_relu2_kernel(a, b, aux, out, factor, M, N, K, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, BWD: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out = relu(a b^T)^2 factor, or with BWD 2 (a b^T) sqrt(aux) factor; descriptors of a (M, K), b (N, K), aux, out.

    Programs persist, so that the loads of a tile overlap the stores of the one before."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        first = tile // (GROUP * tiles_n) * GROUP
        rows = min(tiles_m - first, GROUP)
        m0 = (first + tile % (GROUP * tiles_n) % rows) * BM
        n0 = tile % (GROUP * tiles_n) // rows * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            acc = tl.dot(a.load([m0, k0]), b.load([n0, k0]).T, acc)
        lo, hi = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))  # halves: less shared memory
        lo = relu2_epilogue(lo, aux.load([m0, n0]) if BWD else lo, factor, BWD)
        out.store([m0, n0], lo.to(out.dtype))
        hi = relu2_epilogue(hi, aux.load([m0, n0 + BN // 2]) if BWD else hi, factor, BWD)
        out.store([m0, n0 + BN // 2], hi.to(out.dtype))


RELU2_TILES = dict(BM=128, BN=256, BK=64, GROUP=8, num_warps=8, num_stages=3)  # best of twelve on an H200; fp8: 2 BK


def fused_relu2(x: Tensor, w: Tensor) -> bool:
    """Hopper and B200 can: 208 KiB of shared memory, of which an RTX 50 (12.0) has 99, and rows of whole 16 bytes."""
    return use_triton(x, (9, 0)) and not use_triton(x, (12, 0)) and x.size(1) % 8 == 0 and w.size(0) % 8 == 0


def launch_relu2(a: Tensor, b: Tensor, aux: Tensor | None, factor: float = 1.0) -> Tensor:
    """The result has the dtype of a. 2 M N K FLOP; moves M K + N K + M N items, with aux M N more. On an H200 710
    TFLOP/s forward and 491 backward in bf16, 1,194 and 810 in fp8."""
    a, b, aux = a.contiguous(), b.contiguous(), None if aux is None else aux.contiguous()
    (M, K), N, tiles = a.shape, len(b), dict(RELU2_TILES)
    tiles["BK"] *= 2 if a.itemsize == 1 else 1
    out = a.new_empty(M, N)
    blocks = ([tiles["BM"], tiles["BK"]], [tiles["BN"], tiles["BK"]], *[[tiles["BM"], tiles["BN"] // 2]] * 2)
    tensors = (a, b, out if aux is None else aux, out)
    arguments = [TensorDescriptor.from_tensor(x, block) for x, block in zip(tensors, blocks, strict=True)]
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 3
    programs = min(triton.cdiv(M, tiles["BM"]) * triton.cdiv(N, tiles["BN"]), programs)
    linear_relu2_kernel[(programs,)](*arguments, factor, M, N, K, PROGRAMS=programs, BWD=aux is not None, **tiles)
    return out


@torch.library.custom_op(f"{OPS}::linear_relu2", mutates_args=())
def linear_relu2(x: Tensor, w: Tensor, factor: float = 1.0) -> Tensor:
    return launch_relu2(x, w, None, factor)


@torch.library.custom_op(f"{OPS}::linear_relu2_grad", mutates_args=())
def linear_relu2_grad(g: Tensor, w: Tensor, post: Tensor, factor: float = 1.0) -> Tensor:
    return launch_relu2(g, w, post, factor)


linear_relu2.register_fake(lambda x, w, factor=1.0: x.new_empty(len(x), len(w)))
linear_relu2_grad.register_fake(lambda g, w, post, factor=1.0: g.new_empty(post.shape))


class MLPRelu2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, down):
        post = linear_relu2(x, up)
        ctx.save_for_backward(x, up, down, post)
        return post @ down

    @staticmethod
    def backward(ctx, g):
        x, up, down, post = ctx.saved_tensors
        before = linear_relu2_grad(g, down, post)
        return before @ up, before.T @ x, post.T @ g


def relu2_8(x8: Tensor, w8: Tensor) -> Tensor:
    """e4m3 of relu(x w^T)^2, scaled as MLP8 says."""
    if fused_relu2(x8, w8):
        return linear_relu2(x8, w8, E4M3_MAX**-3)
    one, dtype = torch.ones((), device=x8.device), torch.bfloat16 if x8.is_cuda else torch.float32
    post = F.relu(product8(x8, w8, one, dtype).float()).square() * E4M3_MAX**-3
    return post.clamp(max=E4M3_MAX).to(E4M3)  # torch rounds to NaN what is too large, Triton to the largest number


def relu2_grad8(g8: Tensor, w8: Tensor, post8: Tensor) -> Tensor:
    """e5m2 of 2 (g w^T) sqrt(post), scaled as MLP8 says."""
    if fused_relu2(g8, w8):
        return linear_relu2_grad(g8, w8, post8, E4M3_MAX**-1.5 / 2)
    one, dtype = torch.ones((), device=g8.device), torch.bfloat16 if g8.is_cuda else torch.float32
    before = product8(g8, w8, one, dtype) * post8.float().sqrt() * E4M3_MAX**-1.5
    return before.clamp(-E5M2_MAX, E5M2_MAX).to(E5M2)


class MLP8(torch.autograd.Function):
    """MLPRelu2 with all six products in fp8, for an x whose rows have norm sqrt(D), as norm() makes them.

    Nothing of size (T, F) exists in more than 8 bits. |x w^T| <= |x| |w| bounds the activation, and in the same way the
    gradient before it, so their scales are known; between operands and result only constants do not cancel.
    """

    @staticmethod
    def forward(ctx, x, up, down):
        row_x, row_up, row_down = math.sqrt(x.size(1)), largest_row(up), largest_row(down)
        x8, up8, down8 = cast8(x, E4M3_MAX / row_x), cast8(up, E4M3_MAX / row_up), cast8(down, E4M3_MAX / row_down)
        post8 = relu2_8(x8, up8)  # in units of (row_x row_up)^2 / 448
        ctx.save_for_backward(x8, up8, down8, post8, row_up, row_down)
        scale = (row_x * row_up / E4M3_MAX) ** 2 * row_down
        return product8(post8, transpose8(down8), scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, g):
        x8, up8, down8, post8, row_up, row_down = ctx.saved_tensors
        row_x, row_g = math.sqrt(x8.size(1)), largest_row(g)
        g8 = cast8(g.contiguous(), E5M2_MAX / row_g, E5M2)
        before8 = relu2_grad8(g8, down8, post8)  # in units of 2 row_g row_down row_x row_up / 57344
        unit = 2 * row_g * row_down * row_up * (row_x / E5M2_MAX / E4M3_MAX)
        dx = product8(before8, transpose8(up8), unit * row_up, g.dtype)
        dup = product8(transpose8(before8), transpose8(x8), unit * row_x, g.dtype)
        scale = (row_x * row_up) ** 2 * row_g / (E4M3_MAX * E5M2_MAX)
        return dx, dup, product8(transpose8(post8), transpose8(g8), scale, g.dtype)


def mlp_relu2(x_TD: Tensor, up_FD: Tensor, down_FD: Tensor, fp8: bool = False) -> Tensor:
    """relu(x up^T)^2 down, (T, D); for the backward only x and the squared activation are kept. fp8: see MLP8."""
    if fp8:
        return MLP8.apply(x_TD, up_FD, down_FD)
    if fused_relu2(x_TD, up_FD) and torch.is_grad_enabled():
        return MLPRelu2.apply(x_TD, up_FD, down_FD)
    return linear_relu2_ref(x_TD, up_FD) @ down_FD


# -- sliding-window attention on packed documents; at windows 128, 384, 896 forward and backward in 0.66, 0.99, 1.44 ms
# against 1.10, 1.50, 1.92 of torch varlen. Row i sees keys bounds[0, i] <= j <= i; key j is seen by rows
# j <= i <= bounds[1, j]; both only ever rise. Windows are data, so a change of window compiles nothing. A gate is a
# positive factor of each row and head; in here it saves the 1.2 ms of 90 that it takes outside.


def attention_bounds(cu_seqlens: Tensor, T: int, window: int | Tensor) -> Tensor:
    """cu_seqlens int32 (G + 1,) from 0, padded with T -> int32 (2, T): first key seen, last row seeing."""
    t = torch.arange(T, dtype=torch.int32, device=cu_seqlens.device)
    doc = torch.searchsorted(cu_seqlens, t, right=True, out_int32=True)
    first, last = torch.maximum(cu_seqlens[doc - 1], t - window), torch.minimum(cu_seqlens[doc] - 1, t + window)
    return torch.stack([first, last]).to(torch.int32)


def window_attention_ref(q, k, v, bounds: Tensor, scale: float, gate: Tensor | None = None) -> Tensor:
    """q, k, v (T, H, K), gate (T, H) -> (T, H, K) with dense scores (H, T, T); only for tests."""
    t = torch.arange(len(q), device=q.device)
    seen = (t >= bounds[0, :, None]) & (t <= t[:, None])
    scores = torch.einsum("ihd,jhd->hij", q, k).mul(scale).masked_fill(~seen, float("-inf"))
    p = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return gated(torch.einsum("hij,jhd->ihd", p.to(v.dtype), v), gate)


@jit
def load_rows(x, index, stride, T, D: tl.constexpr):
    x += index.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(x, mask=index[:, None] < T, other=0.0)


@jit
def load_gate(gate, m, h, T, H, GATED: tl.constexpr):
    return tl.load(gate + m * H + h, mask=m < T, other=1.0).to(tl.float32) if GATED else 1.0


@jit
def attention_forward_kernel(q, k, v, o, lse, gate, bounds, T, sq, sk, sv, so, scale_log2, GATED: tl.constexpr,
                             D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One block of BM rows and one head a program; keys from the first that its first row sees."""
    m0, h = tl.program_id(0) * BM, tl.program_id(1)
    m = m0 + tl.arange(0, BM)
    first = tl.load(bounds + m, mask=m < T, other=0)
    Q = load_rows(q + h * D, m, sq, T, D)
    top, total = tl.full([BM], -1e30, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for n0 in range(tl.load(bounds + m0) // BN * BN, min(m0 + BM, T), BN):
        n = n0 + tl.arange(0, BN)
        s = tl.dot(Q, tl.trans(load_rows(k + h * D, n, sk, T, D)), input_precision="ieee") * scale_log2
        s = tl.where((n[None, :] >= first[:, None]) & (n[None, :] <= m[:, None]), s, -1e30)
        new = tl.maximum(top, tl.max(s, 1))  # the first true maximum wipes what all-masked blocks left
        p, shrink, top = tl.exp2(s - new[:, None]), tl.exp2(top - new), new
        total = total * shrink + tl.sum(p, 1)
        V = load_rows(v + h * D, n, sv, T, D)
        acc = tl.dot(p.to(V.dtype), V, acc * shrink[:, None], input_precision="ieee")
    factor = load_gate(gate, m, h, T, so // D, GATED) / total
    tl.store(o + m.to(tl.int64)[:, None] * so + h * D + tl.arange(0, D)[None, :],
             (acc * factor[:, None]).to(o.dtype.element_ty), mask=m[:, None] < T)  # fmt: skip
    tl.store(lse + h * T + m, top + tl.log2(total), mask=m < T)


@jit
def attention_dq_kernel(q, k, v, o, do, dq, lse, delta, gate, gated_lse, bounds, T, sq, sk, sv, so, scale,
                        GATED: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """As the forward; also leaves delta = rowsum(o do) for the other kernel.

    With a gate G: ds = p (G dp - delta) = p' (dp - delta / G), where p' = G p = exp2(s - (lse - log2 G)) is what dv
    takes too. So both kernels see another lse and another delta, which is the gradient of the gate.
    """
    m0, h = tl.program_id(0) * BM, tl.program_id(1)
    m = m0 + tl.arange(0, BM)
    first, L = tl.load(bounds + m, mask=m < T, other=0), tl.load(lse + h * T + m, mask=m < T, other=0.0)
    Q, dO = load_rows(q + h * D, m, sq, T, D), load_rows(do + h * D, m, so, T, D)
    row = tl.sum(dO.to(tl.float32) * load_rows(o + h * D, m, so, T, D).to(tl.float32), 1)
    if GATED:  # a gate of exactly 0 has a sigmoid of slope 0 behind it
        G = load_gate(gate, m, h, T, so // D, GATED)
        row, L = tl.where(G == 0.0, 0.0, row / G), L - tl.log2(G)
        tl.store(gated_lse + h * T + m, L, mask=m < T)
    tl.store(delta + h * T + m, row, mask=m < T)
    acc = tl.zeros([BM, D], tl.float32)
    for n0 in range(tl.load(bounds + m0) // BN * BN, min(m0 + BM, T), BN):
        n = n0 + tl.arange(0, BN)
        K = load_rows(k + h * D, n, sk, T, D)
        s = tl.dot(Q, tl.trans(K), input_precision="ieee") * (scale * 1.4426950408889634)
        s = tl.where((n[None, :] >= first[:, None]) & (n[None, :] <= m[:, None]), s, float("-inf"))
        p = tl.exp2(s - L[:, None])
        dp = tl.dot(dO, tl.trans(load_rows(v + h * D, n, sv, T, D)), input_precision="ieee")
        acc = tl.dot((p * (dp - row[:, None])).to(K.dtype), K, acc, input_precision="ieee")
    tl.store(dq + m.to(tl.int64)[:, None] * so + h * D + tl.arange(0, D)[None, :],
             (acc * scale).to(dq.dtype.element_ty), mask=m[:, None] < T)  # fmt: skip


@jit
def attention_dkv_kernel(q, k, v, do, dk, dv, lse, delta, bounds, T, sq, sk, sv, so, scale, D: tl.constexpr,
                         BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One block of BN keys and one head a program; rows up to the last that sees its last key."""
    n0, h = tl.program_id(0) * BN, tl.program_id(1)
    n = n0 + tl.arange(0, BN)
    last = tl.load(bounds + T + n, mask=n < T, other=-1)
    K, V = load_rows(k + h * D, n, sk, T, D), load_rows(v + h * D, n, sv, T, D)
    dK, dV = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    for m0 in range(n0 // BM * BM, tl.load(bounds + T + min(n0 + BN, T) - 1) + 1, BM):
        m = m0 + tl.arange(0, BM)
        Q, dO = load_rows(q + h * D, m, sq, T, D), load_rows(do + h * D, m, so, T, D)
        L = tl.load(lse + h * T + m, mask=m < T, other=0.0)
        row = tl.load(delta + h * T + m, mask=m < T, other=0.0)
        s = tl.dot(K, tl.trans(Q), input_precision="ieee") * (scale * 1.4426950408889634)
        s = tl.where((m[None, :] >= n[:, None]) & (m[None, :] <= last[:, None]), s, float("-inf"))
        p = tl.exp2(s - L[None, :])
        dV = tl.dot(p.to(dO.dtype), dO, dV, input_precision="ieee")
        dp = tl.dot(V, tl.trans(dO), input_precision="ieee")
        dK = tl.dot((p * (dp - row[None, :])).to(Q.dtype), Q, dK, input_precision="ieee")
    offset = n.to(tl.int64)[:, None] * so + h * D + tl.arange(0, D)[None, :]
    tl.store(dk + offset, (dK * scale).to(dk.dtype.element_ty), mask=n[:, None] < T)
    tl.store(dv + offset, dV.to(dv.dtype.element_ty), mask=n[:, None] < T)


ATTENTION_TILES = dict(BM=64, BN=64, num_warps=4, num_stages=2)  # best for all three kernels and windows on an H200


def adjacent_heads(x: Tensor) -> Tensor:
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@torch.library.custom_op(f"{OPS}::window_attention", mutates_args=())
def window_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    (T, H, D), (q, k, v) = q.shape, map(adjacent_heads, (q, k, v))
    o, lse = q.new_empty(T, H, D), torch.empty(H, T, dtype=torch.float32, device=q.device)
    strides = (T, q.stride(0), k.stride(0), v.stride(0), H * D, scale * math.log2(math.e))
    factor = lse if gate is None else gate.contiguous()
    grid = (triton.cdiv(T, ATTENTION_TILES["BM"]), H)
    attention_forward_kernel[grid](q, k, v, o, lse, factor, bounds, *strides, gate is not None, D, **ATTENTION_TILES)
    return o, lse


@torch.library.custom_op(f"{OPS}::window_attention_grad", mutates_args=())
def window_attention_grad(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, bounds: Tensor, scale: float,
    gate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (T, H, D), (q, k, v), do = q.shape, map(adjacent_heads, (q, k, v)), do.contiguous()
    (dq, dk, dv), delta = (q.new_empty(T, H, D) for _ in range(3)), torch.empty_like(lse)
    strides = (T, q.stride(0), k.stride(0), v.stride(0), H * D, scale)
    factors = (lse, lse) if gate is None else (gate.contiguous(), torch.empty_like(lse))
    grid = (triton.cdiv(T, ATTENTION_TILES["BM"]), H)
    attention_dq_kernel[grid](q, k, v, o, do, dq, lse, delta, *factors, bounds, *strides, gate is not None, D,
                              **ATTENTION_TILES)  # fmt: skip
    grid = (triton.cdiv(T, ATTENTION_TILES["BN"]), H)
    attention_dkv_kernel[grid](q, k, v, do, dk, dv, factors[1], delta, bounds, *strides, D, **ATTENTION_TILES)
    return dq, dk, dv, q.new_empty(0) if gate is None else delta.T.to(gate.dtype).contiguous()


@window_attention_forward.register_fake
def _(q, k, v, bounds, scale, gate):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@window_attention_grad.register_fake
def _(q, k, v, o, do, lse, bounds, scale, gate):
    return *(q.new_empty(q.shape) for _ in "qkv"), q.new_empty(0) if gate is None else gate.new_empty(gate.shape)


def save_window_attention(ctx, inputs, output):
    *tensors, ctx.scale, gate = inputs
    ctx.save_for_backward(*tensors, gate, *output)
    ctx.set_materialize_grads(False)


def window_attention_backward(ctx, do, dlse):
    q, k, v, bounds, gate, o, lse = ctx.saved_tensors
    dq, dk, dv, dgate = window_attention_grad(q, k, v, o, do, lse, bounds, ctx.scale, gate)
    return dq, dk, dv, None, None, None if gate is None else dgate


window_attention_forward.register_autograd(window_attention_backward, setup_context=save_window_attention)


def window_attention(q_THK, k_THK, v_THK, bounds: Tensor, scale: float, gate_TH: Tensor | None = None) -> Tensor:
    """As window_attention_ref, for 16-bit tensors with K a power of two; views of a packed qkv are fine. Gate above 0.

    4 / 10 T H K window FLOP forward / backward; 4 / 11 T H K values moved at the least.
    """
    return window_attention_forward(q_THK, k_THK, v_THK, bounds, scale, gate_TH)[0]


# -- queries and keys: norm, scale and rotary embedding in one pass over qkv, and the way back in another; 0.11 and
# 0.20 ms at 6 heads, 90 and 99 % of the speed of a copy. torch.compile took 0.16 and 0.27, with two passes for the way
# back and fp32 gradients of the normalised in memory between them, in the medium model 31 ms of 504, now 14.


def norm_rotate_ref(qkv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(1)
    return rotate(norm(q) * scale, cos, sin), rotate(norm(k), cos, sin), v


NORM_EPS = torch.finfo(torch.float32).eps  # what F.rms_norm adds in 16 and 32 bits


@jit
def load_quarters(x, K: tl.constexpr, live):
    """The four quarters of rows of K values, fp32; in this way loads stay wide although two quarters are turned."""
    a, b = tl.load(x, mask=live, other=0.0), tl.load(x + K // 4, mask=live, other=0.0)
    c, d = tl.load(x + K // 2, mask=live, other=0.0), tl.load(x + 3 * (K // 4), mask=live, other=0.0)
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@jit
def store_quarters(x, a, b, c, d, K: tl.constexpr, live):
    tl.store(x, a.to(x.dtype.element_ty), mask=live)
    tl.store(x + K // 4, b.to(x.dtype.element_ty), mask=live)
    tl.store(x + K // 2, c.to(x.dtype.element_ty), mask=live)
    tl.store(x + 3 * (K // 4), d.to(x.dtype.element_ty), mask=live)


@jit
def norm_rotate_kernel(qkv, q, k, v, dqkv, cos, sin, scale, scale_out, rows, H, every, eps, BWD: tl.constexpr,
                       K: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """BR rows n H + head of K values: from qkv to q and k, or with BWD from the gradients q, k, v to dqkv, divided by
    scale_out if there is one. Row n of the results is of token n * every."""
    row, column = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, K // 4)[None, :]
    live, head, n = (row < rows)[:, None], row % H, row // H
    t = n * every
    C = tl.load(cos + (t * K)[:, None] + column, mask=live, other=0.0).to(tl.float32)
    S = tl.load(sin + (t * K)[:, None] + column, mask=live, other=0.0).to(tl.float32)
    for part in tl.static_range(3 if BWD else 2):
        packed = qkv + ((t * 3 + part) * H + head)[:, None] * K + column
        other = (q if part == 0 else (k if part == 1 else v)) + (t * H + head)[:, None] * K + column
        if part == 2:
            a, b, c, d = load_quarters(other, K, live)
        else:
            a, b, c, d = load_quarters(packed, K, live)
            shrink = tl.rsqrt(tl.sum(a * a + b * b + c * c + d * d, 1) / K + eps)[:, None]
            factor = shrink * tl.load(scale) if part == 0 else shrink
            if BWD:
                e, f, g, h = load_quarters(other, K, live)
                e, f = e * C - f * S, e * S + f * C
                along = (tl.sum(a * e + b * f + c * g + d * h, 1) / K)[:, None] * shrink * shrink
                a, b, c, d = e - a * along, f - b * along, g - c * along, h - d * along
            else:
                a, b = a * C + b * S, b * C - a * S
            a, b, c, d = a * factor, b * factor, c * factor, d * factor
        if scale_out is not None:
            inverse = 1.0 / tl.load(scale_out)
            a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse
        out = dqkv + ((n * 3 + part) * H + head)[:, None] * K + column if BWD else other
        store_quarters(out, a, b, c, d, K, live)


ROTATE_ROWS = 32  # of a program


def launch_norm_rotate(qkv, q, k, v, dqkv, cos, sin, scale, scale_out=None, every=1) -> None:
    """Writes q and k, or with v and dqkv the latter from the gradients q, k, v of every so many-th token."""
    T, _, H, K = (qkv if dqkv is None else dqkv).shape
    norm_rotate_kernel[(triton.cdiv(T * H, ROTATE_ROWS),)](
        qkv, q, k, v, dqkv, cos.contiguous(), sin.contiguous(), scale, scale_out, T * H, H, every, NORM_EPS,
        dqkv is not None, K, ROTATE_ROWS
    )  # fmt: skip


@torch.library.custom_op(f"{OPS}::norm_rotate", mutates_args=())
def norm_rotate_forward(qkv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    qkv = qkv.contiguous()
    q, k = (qkv.new_empty(qkv[:, 0].shape) for _ in "qk")
    launch_norm_rotate(qkv, q, k, None, None, cos, sin, scale)
    return q, k


@torch.library.custom_op(f"{OPS}::norm_rotate_grad", mutates_args=())
def norm_rotate_grad(
    qkv: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor
) -> Tensor:
    tensors = [t.contiguous() for t in (qkv, dq, dk, dv)]
    dqkv = torch.empty_like(tensors[0])
    launch_norm_rotate(*tensors, dqkv, cos, sin, scale)
    return dqkv


@torch.library.custom_op(f"{OPS}::norm_rotate_grad8", mutates_args=())
def norm_rotate_grad8(
    qkv: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """norm_rotate_grad in e5m2, and its scale, 256 times that of every 64th token: e5m2 has 32 binades, so other tokens
    may exceed those by 8 of them (what exceeds more becomes the largest number) and fall below by 20."""
    tensors = [t.contiguous() for t in (qkv, dq, dk, dv)]
    few, dqkv8 = qkv.new_empty(-(-len(qkv) // 64), *qkv.shape[1:]), torch.empty_like(tensors[0], dtype=E5M2)
    launch_norm_rotate(*tensors, few, cos, sin, scale, every=64)
    scale8 = torch.linalg.vector_norm(few, float("inf"), dtype=torch.float32).clamp(min=1e-30) * (256 / E5M2_MAX)
    launch_norm_rotate(*tensors, dqkv8, cos, sin, scale, scale8)
    return dqkv8, scale8


norm_rotate_forward.register_fake(lambda qkv, *rest: tuple(qkv.new_empty(qkv[:, 0].shape) for _ in "qk"))
norm_rotate_grad.register_fake(lambda qkv, *rest: qkv.new_empty(qkv.shape))
norm_rotate_grad8.register_fake(
    lambda qkv, *rest: (qkv.new_empty(qkv.shape, dtype=E5M2), qkv.new_empty((), dtype=torch.float32))
)


class NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, scale):
        ctx.save_for_backward(qkv, cos, sin, scale)
        return *norm_rotate_forward(qkv, cos, sin, scale), qkv[:, 2]

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, *rest = ctx.saved_tensors
        return norm_rotate_grad(qkv, dq, dk, dv, *rest), None, None, None


def norm_rotate(qkv: Tensor, cos_TK: Tensor, sin_TK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (T, 3, H, K) -> q, normalised, times the scale and rotated; k, normalised and rotated; v: each (T, H, K).

    cos_TK and sin_TK (T, 1, K) as for rotate, of which the kernel reads the first quarter; scale 0-D, without a
    gradient. 4 / 8 T H K values moved.
    """
    K = qkv.size(-1)
    if use_triton(qkv) and torch.is_grad_enabled() and K & (K - 1) == 0:
        return NormRotate.apply(qkv, cos_TK, sin_TK, scale)
    return norm_rotate_ref(qkv, cos_TK, sin_TK, scale)


class QKV8(torch.autograd.Function):
    """project_qkv with its three products in fp8, for an x whose rows have norm sqrt(D), as norm() makes them."""

    @staticmethod
    def forward(ctx, x, w, cos, sin, scale):
        row_x, row_w = math.sqrt(x.size(1)), largest_row(w)
        x8, w8 = cast8(x, E4M3_MAX / row_x), cast8(w, E4M3_MAX / row_w)
        qkv = product8(x8, w8, row_w * (row_x / E4M3_MAX**2), x.dtype, fast=True).view(len(x), 3, -1, cos.size(-1))
        ctx.save_for_backward(x8, w8, row_w, qkv, cos, sin, scale)
        return *norm_rotate_forward(qkv, cos, sin, scale), qkv[:, 2]

    @staticmethod
    def backward(ctx, dq, dk, dv):
        x8, w8, row_w, qkv, *rest = ctx.saved_tensors
        g8, unit = norm_rotate_grad8(qkv, dq, dk, dv, *rest)
        g8, row_x = g8.view(len(x8), -1), math.sqrt(x8.size(1))
        dx = product8(g8, transpose8(w8), unit * row_w / E4M3_MAX, dq.dtype)
        dw = product8(transpose8(g8), transpose8(x8), unit * (row_x / E4M3_MAX), dq.dtype)
        return dx, dw, None, None, None


def project_qkv(x_TD: Tensor, w: Tensor, cos_TK: Tensor, sin_TK: Tensor, scale: Tensor, fp8: bool = False):
    """x w^T, w (3 H K, D), as q, k, v, each (T, H, K), through norm_rotate; fp8: see QKV8."""
    K = cos_TK.size(-1)
    if fp8 and use_triton(x_TD) and K & (K - 1) == 0:
        return QKV8.apply(x_TD, w, cos_TK, sin_TK, scale)
    return norm_rotate(F.linear(x_TD, w).view(len(x_TD), 3, -1, K), cos_TK, sin_TK, scale)


# -- one step of decoding: each row of the cache gets a key and a value and one query looks at its ring of S slots.
# Position p lies in slot p % S. The slot after the newest is free: in layers with key offset the still half of a key
# waits there for its other half. A row at position -1 rests: nothing of it is written.


def decode_attention_ref(q, k, v, keys, values, positions, offset: bool) -> Tensor:
    """q, k, v (B, H, K), keys, values (B, S, H, K), positions int (B,) -> (B, H, K); q carries the scale."""
    S, K, rows = keys.size(1), keys.size(3), torch.arange(len(q), device=q.device)
    p, live, still = positions.clamp(min=0).long(), (positions >= 0)[:, None, None], torch.arange(K, device=q.device)
    slot, after, still = p % S, (p + 1) % S, still >= K // 2
    if offset:
        waiting = keys[rows, slot]
        keys[rows, after] = torch.where(live & still, k, keys[rows, after])
        k = torch.where(still & (p > 0)[:, None, None], waiting, k)
    keys[rows, slot] = torch.where(live, k, keys[rows, slot])
    values[rows, slot] = torch.where(live, v, values[rows, slot])
    behind = (p[:, None] - torch.arange(S, device=q.device)) % S
    seen = (behind <= p[:, None]) & (behind < S - 1)
    q, keys, values = q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2)
    return F.scaled_dot_product_attention(q, keys, values, seen[:, None, None], scale=1.0)[:, :, 0]


@jit
def decode_attention_kernel(q, k, v, o, keys, values, positions, S, H, sq, sk, sv, OFFSET: tl.constexpr,
                            D: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One row and one head a program. The new key and value are used from registers, never read back."""
    row, h, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    p = tl.load(positions + row)
    slot, stride = tl.maximum(p, 0) % S, H * D
    live, still = d < tl.where(p >= 0, D, 0), d >= D // 2
    keys += (row.to(tl.int64) * S * H + h) * D
    values += (row.to(tl.int64) * S * H + h) * D
    Q = tl.load(q + row * sq + h * D + d).to(tl.float32) * 1.4426950408889634
    K, V = tl.load(k + row * sk + h * D + d), tl.load(v + row * sv + h * D + d)
    if OFFSET:
        tl.store(keys + (slot + 1) % S * stride + d, K, mask=live & still)
        taken = still & (d < p * D)
        K = tl.where(taken, tl.load(keys + slot * stride + d, mask=taken, other=0.0), K)
    tl.store(keys + slot * stride + d, K, mask=live)
    tl.store(values + slot * stride + d, V, mask=live)
    top, total, acc = tl.sum(Q * K.to(tl.float32), 0), 1.0, V.to(tl.float32)
    for n0 in range(0, tl.minimum(p + 1, S), BN):
        n = n0 + tl.arange(0, BN)
        behind = slot - n + tl.where(n > slot, S, 0)
        seen = (n < S) & (behind > 0) & (behind <= p) & (behind < S - 1)
        at = n[:, None] * stride + d[None, :]
        k_block = tl.load(keys + at, mask=seen[:, None], other=0.0).to(tl.float32)
        v_block = tl.load(values + at, mask=seen[:, None], other=0.0).to(tl.float32)
        s = tl.where(seen, tl.sum(k_block * Q[None, :], 1), float("-inf"))
        new = tl.maximum(top, tl.max(s, 0))
        e, shrink, top = tl.exp2(s - new), tl.exp2(top - new), new
        total = total * shrink + tl.sum(e, 0)
        acc = acc * shrink + tl.sum(e[:, None] * v_block, 0)
    tl.store(o + row * stride + h * D + d, (acc / total).to(o.dtype.element_ty))


DECODE_TILES = dict(BN=128, num_warps=8)


@torch.library.custom_op(f"{OPS}::decode_attention", mutates_args=("keys", "values"))
def decode_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor,
                     offset: bool) -> Tensor:  # fmt: skip
    """As decode_attention_ref; the kernel where it can run, for K a power of two. 4 H K bytes for each key seen."""
    (B, H, D), S = q.shape, keys.size(1)
    if not use_triton(q) or D & (D - 1):
        return decode_attention_ref(q, k, v, keys, values, positions, offset)
    (q, k, v), o = map(adjacent_heads, (q, k, v)), q.new_empty(B, H, D)
    strides = (S, H, q.stride(0), k.stride(0), v.stride(0))
    decode_attention_kernel[(B, H)](q, k, v, o, keys, values, positions, *strides, offset, D, **DECODE_TILES)
    return o


decode_attention.register_fake(lambda q, *rest: q.new_empty(q.shape))


# <<< shared: kernels
# >>> shared: evaluation
# ===============================================================================
# 8. EVALUATION -- bits per byte, CORE


@torch.no_grad()
def bits_per_byte(model: Callable, batch: Batch, packs: int, token_bytes: Tensor, ranks: Ranks) -> float:
    """Nats over targets that carry bytes, divided by ln 2 and by their bytes; specials are in neither sum.

    Args: model as GPT.forward, or compiled; token_bytes int (V,) bytes of each id
    """
    sums = torch.zeros(2, device=ranks.device)
    count, group = batch.tokens.size(0), ranks.world * packs
    padded = -(-count // group) * group  # whole micro-batches for every rank; repeated packs count for nothing
    index = torch.arange(padded)
    part = slice(ranks.rank * padded // ranks.world, (ranks.rank + 1) * padded // ranks.world)
    picked = [t[index.clamp(max=count - 1)][part] for t in (batch.tokens, batch.targets, batch.positions, batch.ends)]
    picked[1][index[part] >= count] = -1
    for tokens, targets, positions, cu_seqlens, max_doc in Batch(*picked, batch.max_doc, 0, 0).micro_batches(
        packs, ranks.device
    ):
        _, nats = model(tokens, targets, positions, cu_seqlens, max_doc)
        counted = token_bytes[targets.clamp(min=0).long()] * (targets >= 0)
        sums += torch.stack(((nats * (counted > 0)).sum(), counted.sum()))
    if ranks.world > 1:
        dist.all_reduce(sums)
    return sums[0].item() / math.log(2) / max(sums[1].item(), 1)


# -- CORE (DCLM, arXiv 2406.11794): 22 tasks as files of data/core.py. Items lie behind each other in a buffer of fixed
# size, and what the choices of an item have in common is there once; each choice goes on from it, blind to the others:
#
#     tokens     B q q q a a b b b      two choices, a a . and b b b . ; what only serves as a target is not there
#     positions  0 1 2 3 4 5 4 5 6      previous: the b behind a sees q as the token before
#     first      0 0 0 0 0 0 0 0 0      the first key seen, by the window; one row for each of the two windows
#     skip       - - - - - - 4 4 4      keys of index 4 and 5 are hidden: skip <= j < branch
#     branch     0 1 2 3 4 4 6 6 6      where the choice begins


@dataclass
class CoreTask:
    """One file of data/core.py."""

    name: str
    kind: str  # multiple_choice, schema or language_modeling
    baseline: float  # accuracy of guessing, 0 to 1
    gold: np.ndarray  # (items,)
    items: list[list[np.ndarray]]  # the rows of each item
    spans: list[list[tuple[int, int]]]  # of each row: these tokens are scored

    @staticmethod
    def read(path: Path, sha256: str, limit: int, max_seq_len: int) -> CoreTask:
        """The first `limit` items (0: all), cut on the left to max_seq_len."""
        again = "make the core files again with python data/core.py"
        if not path.is_file():
            raise UserError(f"{path} is missing although dataset.json lists it; {again}")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise UserError(f"{path} is corrupt: its sha256 is not that of dataset.json; {again}")
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                tokens, shared, choices, gold, rest, start, end, meta = (
                    arrays[key] for key in ("tokens", "shared", "choices", "gold", "rest", "start", "end", "meta")
                )
            meta = json.loads(meta.tobytes())
            task = CoreTask(meta["task"], meta["type"], meta["random_baseline"] / 100, gold, [], [])
        except (ValueError, KeyError) as error:
            raise UserError(f"{path} is not a core file of this version ({error!r}); {again}") from None
        tokens, at, row = tokens.astype(np.int32), 0, 0
        for prefix, count in zip(shared.tolist(), choices.tolist(), strict=True):
            common, at, rows, spans = tokens[at : at + prefix], at + prefix, [], []
            for i in range(row, row + count):
                full, at = np.concatenate((common, tokens[at : at + rest[i]])), at + int(rest[i])
                cut = max(0, len(full) - max_seq_len)
                rows.append(full[cut:])
                spans.append((max(1, int(start[i]) - cut), max(1, int(end[i]) - cut)))
            row += count
            task.items.append(rows)
            task.spans.append(spans)
            if len(task.items) == limit:
                break
        task.gold = gold[: len(task.items)]
        return task


def shared_inputs(rows: list[np.ndarray], spans: list[tuple[int, int]]) -> int:
    """How many inputs all rows begin with, before the first that predicts a scored token."""
    if len(rows) == 1:
        return 0
    length = min(min(len(row) - 2 for row in rows), min(start for start, _ in spans) - 1)
    for row in rows[1:]:
        different = np.flatnonzero(rows[0][:length] != row[:length])
        length = int(different[0]) if different.size else length
    return max(length, 0)


class CoreBatch:
    """Inputs of score_packed on the host, filled item by item."""

    def __init__(self, size: int, windows: tuple[int, int], bos_id: int):
        self.windows, self.used, self.picked = windows, 0, 0
        index = np.arange(size, dtype=np.int32)  # what is not filled sees itself only
        self.tokens, self.positions = np.full(size, bos_id, np.int32), np.zeros(size, np.int32)
        self.previous, self.branch = np.maximum(index - 1, 0), index.copy()
        self.first, self.skip = np.stack((index, index)), index.copy()
        self.picks, self.targets = np.zeros(size // 2, np.int32), np.zeros(size // 2, np.int32)
        self.rows = np.full(size // 2, -1, np.int32)

    def add(self, rows: list[np.ndarray], spans: list[tuple[int, int]], row: int) -> bool:
        """Appends an item whose rows have the numbers row, row + 1, ...; False if there is no room."""
        common, begin, tokens, previous = shared_inputs(rows, spans), self.used, self.tokens, self.previous
        used = begin + common + sum(len(r) - 1 - common for r in rows)
        if used > tokens.size or self.picked + sum(end - start for start, end in spans) > self.picks.size:
            return False
        tokens[begin : begin + common], self.positions[begin : begin + common] = rows[0][:common], np.arange(common)
        self.branch[begin : begin + common] = self.skip[begin : begin + common] = begin
        for window, first in zip(self.windows, self.first, strict=True):
            first[begin : begin + common] = begin + np.maximum(np.arange(common) - window, 0)
        at = begin + common
        for i, (full, (start, end)) in enumerate(zip(rows, spans, strict=True)):
            own = np.arange(common, len(full) - 1, dtype=np.int32)
            stop = at + own.size
            tokens[at:stop], self.positions[at:stop] = full[common:-1], own
            if own.size:
                previous[at] = max(begin + common - 1, 0)
            self.branch[at:stop], self.skip[at:stop] = at, begin + common
            for window, first in zip(self.windows, self.first, strict=True):
                far = np.maximum(own - window, 0)
                first[at:stop] = np.where(far < common, begin + far, at + far - common)
            picked, scored = self.picked, np.arange(start, end)
            self.picked += scored.size
            self.picks[picked : self.picked] = at + scored - 1 - common
            self.targets[picked : self.picked] = full[start:end]
            self.rows[picked : self.picked] = row + i
            at = stop
        self.used = used
        return True

    def inputs(self, device: torch.device) -> list[Tensor]:
        """(tokens, positions, previous, branch, skip, first, picks, targets) and the row of each target."""
        arrays = (self.tokens, self.positions, self.previous, self.branch, self.skip, self.first, self.picks,
                  self.targets, self.rows)  # fmt: skip
        tensors = [torch.from_numpy(array) for array in arrays]
        if device.type == "cuda":
            tensors = [t.pin_memory() for t in tensors]
        return [t.to(device, non_blocking=True) for t in tensors]


def branch_attention_ref(q, k, v, first, skip, branch, scale: float, block: int = 256) -> Tensor:
    """q, k, v (T, H, K) -> (T, H, K): row i sees keys first[i] <= j <= i but not skip[i] <= j < branch[i].

    In blocks of queries, because a dense mask of all tokens would not fit.
    """
    y, index = torch.empty_like(q, memory_format=torch.contiguous_format), torch.arange(len(q), device=q.device)
    lows = F.pad(first, (0, -len(q) % block), value=len(q)).view(-1, block).amin(1).tolist()
    for i, low in enumerate(lows):
        own = slice(i * block, min(len(q), (i + 1) * block))
        i, j = index[own, None], index[None, low : own.stop]
        seen = (j >= first[own, None]) & (j <= i) & ((j < skip[own, None]) | (j >= branch[own, None]))
        rows, keys, values = (t.transpose(0, 1) for t in (q[own], k[low : own.stop], v[low : own.stop]))
        part = F.scaled_dot_product_attention(rows[None], keys[None], values[None], seen, scale=scale)
        y[own] = part[0].transpose(0, 1)
    return y


@jit
def branch_attention_kernel(q, k, v, o, first, skip, branch, T, sq, sk, sv, so, scale_log2, D: tl.constexpr,
                            BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """attention_forward_kernel with hidden keys. The first key may fall from row to row, so its minimum is taken."""
    m0, h = tl.program_id(0) * BM, tl.program_id(1)
    m = m0 + tl.arange(0, BM)
    low = tl.load(first + m, mask=m < T, other=T)
    hole, after = tl.load(skip + m, mask=m < T, other=0), tl.load(branch + m, mask=m < T, other=0)
    Q = load_rows(q + h * D, m, sq, T, D)
    top, total = tl.full([BM], -1e30, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for n0 in range(tl.min(low, 0) // BN * BN, min(m0 + BM, T), BN):
        n = n0 + tl.arange(0, BN)
        s = tl.dot(Q, tl.trans(load_rows(k + h * D, n, sk, T, D)), input_precision="ieee") * scale_log2
        seen = (n[None, :] >= low[:, None]) & (n[None, :] <= m[:, None])
        seen = seen & ((n[None, :] < hole[:, None]) | (n[None, :] >= after[:, None]))
        s = tl.where(seen, s, -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        p, shrink, top = tl.exp2(s - new[:, None]), tl.exp2(top - new), new
        total = total * shrink + tl.sum(p, 1)
        V = load_rows(v + h * D, n, sv, T, D)
        acc = tl.dot(p.to(V.dtype), V, acc * shrink[:, None], input_precision="ieee")
    tl.store(o + m.to(tl.int64)[:, None] * so + h * D + tl.arange(0, D)[None, :],
             (acc / total[:, None]).to(o.dtype.element_ty), mask=m[:, None] < T)  # fmt: skip


@torch.library.custom_op(f"{OPS}::branch_attention", mutates_args=())
def branch_attention(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, skip: Tensor, branch: Tensor, scale: float
) -> Tensor:
    """As branch_attention_ref; forward only. The kernel where it can run, for K a power of two."""
    T, H, D = q.shape
    if not use_triton(q) or D & (D - 1):
        return branch_attention_ref(q, k, v, first, skip, branch, scale)
    (q, k, v), o = map(adjacent_heads, (q, k, v)), q.new_empty(T, H, D)
    strides = (T, q.stride(0), k.stride(0), v.stride(0), H * D)
    grid = (triton.cdiv(T, ATTENTION_TILES["BM"]), H)
    branch_attention_kernel[grid](q, k, v, o, first, skip, branch, *strides, scale * math.log2(math.e), D,
                                  **ATTENTION_TILES)  # fmt: skip
    return o


branch_attention.register_fake(lambda q, *rest: q.new_empty(q.shape))


def score_packed(model: GPT, tokens_T, positions_T, previous_T, branch_T, skip_T, first_2T, picks_R, targets_R):
    """Nats of the targets, fp32 (R,), and whether each is what the model would say, bool (R,).

    The head sees the hidden state at picks_R only: few tokens of a few-shot prompt are scored.
    """
    c, first = model.config, (positions_T == 0)[:, None, None]

    def attend(index, layer, q, k, v, gate):
        if layer in c.key_offset_layers:
            k = offset_keys(k, k[previous_T], first)
        return gated(branch_attention(q, k, v, first_2T[int(layer in c.long_layers)], skip_T, branch_T, 1.0), gate)

    hidden = model.trunk(tokens_T, tokens_T[previous_T], positions_T, attend)
    nats, hits = [], []
    for picks, targets in zip(picks_R.split(8192), targets_R.split(8192), strict=True):
        z = softcap(F.linear(hidden[picks], model.head).float(), c.softcap)
        nats.append(z.logsumexp(1) - z.gather(1, targets[:, None].long())[:, 0])
        hits.append(z[:, : c.vocab_size].argmax(1) == targets)
    return torch.cat(nats), torch.cat(hits)


@torch.no_grad()
def score_task(score: Callable, task: CoreTask, size: int, windows: tuple, bos_id: int, ranks: Ranks) -> np.ndarray:
    """Whether each item of a task is answered rightly, bool (items,). Batches go round over the ranks.

    Multiple choice and schema: the choice with the lowest mean of nats, the first of equals. Language modelling: every
    scored token must be the most likely one.
    """
    begins = np.cumsum([0] + [len(rows) for rows in task.items])
    # Longest first: short items fill what is left of a batch. All ranks plan alike.
    order = sorted(range(len(task.items)), key=lambda i: -sum(map(len, task.items[i])))
    sums = torch.zeros(3, int(begins[-1]) + 1, device=ranks.device)  # nats, targets, hits; the last is for padding
    batch, number = CoreBatch(size, windows, bos_id), 0

    def finish():
        nonlocal batch, number
        if number % ranks.world == ranks.rank:
            *inputs, rows = batch.inputs(ranks.device)
            nats, hits = score(*inputs)
            rows = torch.where(rows < 0, sums.size(1) - 1, rows)
            sums.index_add_(1, rows, torch.stack((nats, torch.ones_like(nats), hits.float())))
        batch, number = CoreBatch(size, windows, bos_id), number + 1

    for i in order:
        item = task.items[i], task.spans[i], int(begins[i])
        if not batch.add(*item):
            finish()
            if not batch.add(*item):  # an enormous one: its choices apart, each of which fits
                for j, (row, span) in enumerate(zip(*item[:2], strict=True)):
                    if not batch.add([row], [span], item[2] + j):
                        finish()
                        batch.add([row], [span], item[2] + j)
    finish()
    if ranks.world > 1:
        dist.all_reduce(sums)
    nats, targets, hits = sums[:, :-1].cpu().double().numpy()
    if not np.isfinite(nats).all():
        raise UserError(f"the model's loss on {task.name} is not finite; score another checkpoint")
    if task.kind == "language_modeling":
        return (hits == targets)[begins[:-1]]
    means, correct = nats / np.maximum(targets, 1), np.zeros(len(task.items), bool)
    for i, rows in enumerate(task.items):
        mean = means[begins[i] : begins[i + 1]].copy()
        for j in range(1, len(rows)):  # equal choices are equal, whatever rounding made of them
            same = [n for n in range(j) if np.array_equal(rows[n], rows[j])]
            mean[j] = mean[same[0]] if same else mean[j]
        correct[i] = mean.argmin() == task.gold[i]
    return correct


def core_files(dataset: Dataset) -> dict[str, str]:
    """Path and sha256 of the dataset's core files, in the order of dataset.json."""
    files = dataset.info.get("files", {})
    return {name: entry["sha256"] for name, entry in files.items() if name.startswith("core/")}


def evaluate_core(
    model: GPT, dataset: Dataset, config: Config, ranks: Ranks, run_dir: Path, say: Callable, size: int
) -> dict:
    """Scores all tasks, `size` tokens at a time, prints a row for each and writes core.csv.

    Returns: {"core", "core_seconds"}
    """
    size = max(size, 2 * model.config.max_seq_len)  # a row and its targets must fit

    def score(*inputs):
        return score_packed(model, *inputs)

    if config.compile and ranks.device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        score = torch.compile(score, dynamic=False, fullgraph=True)
    bos_id = dataset.tokenizer.bos_id
    ranks.sync()
    start = time.perf_counter()
    with torch.no_grad():
        score(*CoreBatch(size, model.windows, bos_id).inputs(ranks.device)[:-1])
    ranks.sync()
    say(f"core: {size:,} tokens a batch, compiled in {time.perf_counter() - start:.1f} s")
    begin, table = time.perf_counter(), [("task", "items", "accuracy", "centered", "seconds")]
    say(f"{'task':34} {'items':>7} {'accuracy':>9} {'centered':>9} {'seconds':>8}")
    for name, sha256 in core_files(dataset).items():
        start = time.perf_counter()
        task = CoreTask.read(dataset.root / name, sha256, config.core_items, model.config.max_seq_len)
        accuracy = float(score_task(score, task, size, model.windows, bos_id, ranks).mean())
        centered, seconds = (accuracy - task.baseline) / (1 - task.baseline), time.perf_counter() - start
        table.append((task.name, len(task.items), accuracy, centered, seconds))
        say(f"{task.name:34} {len(task.items):7,} {accuracy:9.4f} {centered:9.4f} {seconds:8.2f}")
    seconds, items = time.perf_counter() - begin, sum(row[1] for row in table[1:])
    core = sum(row[3] for row in table[1:]) / (len(table) - 1)
    say(f"{'CORE':34} {items:7,} {'':9} {core:9.4f} {seconds:8.2f}")
    if len(table) != 23:
        say(f"note: {len(table) - 1} tasks; CORE is the mean over 22")
    if ranks.is_main:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*table, ("CORE", items, "", core, seconds)])
        write_atomically(run_dir / "core.csv", text.getvalue())
    return {"core": core, "core_seconds": seconds}


# <<< shared: evaluation
# >>> shared: generation
# ===============================================================================
# 9. GENERATION -- KV cache, sampling, calculator, rows that decode together, streaming text


@dataclass
class KVCache:
    """Keys and values of every attention layer in rings: a layer holds its window, not the whole text.

    Position p of a row lies in slot p % S. Keys are stored rotated, so their order in the ring does not matter. S is
    the window, the newest key and the place of the next, or that of the longest text if it is shorter.
    """

    keys: list[Tensor]  # of each attention layer, (B, S, H, K)
    values: list[Tensor]
    slots: tuple[int, int]  # S of short and of long windows

    @staticmethod
    def empty(model: GPT, rows: int, max_len: int) -> KVCache:
        c, slots = model.config, tuple(min(window + 2, max_len + 1) for window in model.windows)
        shapes = [(rows, slots[layer in c.long_layers], c.num_heads, c.head_dim) for layer in c.attention_layers]
        return KVCache(*([model.embed.new_zeros(shape) for shape in shapes] for _ in "kv"), slots)


def sample(logits_BV: Tensor, temperature_B, top_k_B, top_p_B, seeds_B, counters_B, width: int) -> Tensor:
    """One id for each row: argmax at temperature 0, else from the top_k most likely whose mass reaches top_p.

    Equals of the last one kept are kept too. Logits plus Gumbel noise are largest at a draw from their softmax. The
    noise is a hash (C. Wellons's lowbias32) of seed, counter and id, so a row draws the same in any batch.

    Args:  top_k_B 0: all; top_p_B 1 or more: all; width how many entries to sort: at least top_k of every row that
           cuts, V if one cuts by top_p alone, 0 if none does
    """

    def mix(x):  # 32 bits in int64, where nothing overflows
        x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
        return x ^ x >> 15

    z = logits_BV / temperature_B.clamp(min=1e-6)[:, None]
    if width:
        best, place = z.topk(width).values, torch.arange(width, device=z.device)
        inside = (place < top_k_B[:, None]) | (top_k_B == 0)[:, None]
        mass = best.masked_fill(~inside, -math.inf).softmax(-1)
        inside &= mass.cumsum(-1) - mass < top_p_B[:, None]  # the entry that crosses top_p stays
        least = best.masked_fill(~inside, math.inf).amin(-1)
        z = z.masked_fill((z < least[:, None]) & ((top_k_B > 0) | (top_p_B < 1))[:, None], -math.inf)
    ids = mix(torch.arange(z.size(-1), device=z.device))
    bits = mix((mix((mix(seeds_B) + counters_B) & 0xFFFFFFFF)[:, None] + ids) & 0xFFFFFFFF) >> 9
    z = z - torch.log(-torch.log((bits.float() + 0.5) * 2**-23))
    return torch.where((temperature_B == 0)[:, None], logits_BV, z).argmax(-1)


LEXEME = re.compile(r"""'[^'\\\n]*'|"[^"\\\n]*"|\.count\b|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:[eE][-+]?\d+)?"""
                    r"""|\.\d+|[-+*/%() ]""")  # fmt: skip
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.UAdd: operator.pos, ast.USub: operator.neg,
    ast.Pow: lambda a, b: a**b if abs(b) <= 100 else math.nan,
}  # fmt: skip


def evaluate(node: ast.AST, depth: int = 100) -> int | float:
    """Value of a syntax tree that holds arithmetic and .count alone; ValueError for anything else."""
    match node:
        case ast.Constant(value=int() | float() as x):
            pass
        case ast.UnaryOp() if depth:
            x = OPERATORS[type(node.op)](evaluate(node.operand, depth - 1))
        case ast.BinOp() if depth:
            x = OPERATORS[type(node.op)](evaluate(node.left, depth - 1), evaluate(node.right, depth - 1))
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
                      args=[ast.Constant(value=str() as part)], keywords=[]):  # fmt: skip
            x = text.count(part)
        case _:
            raise ValueError
    if isinstance(x, complex) or not abs(x) < 1e30:
        raise ValueError
    return x


def calculate(expression: str) -> str | None:
    """The calculator of tool calls: numbers, + - * / // % **, and 'text'.count('part'). None for anything else.

    Length, depth and size of every number are bounded, and with that time and memory, in any thread.
    """
    text = expression.strip()
    parts = LEXEME.findall(text) if len(text) <= 256 else []
    if "".join(parts) != text:
        return None
    plain = "".join(part.replace(",", "") if part[0].isdigit() else part for part in parts)  # 1,000 is a number
    try:
        x = evaluate(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    return str(int(x)) if abs(x) < 1e15 and x == int(x) else str(x) if isinstance(x, int) else f"{x:.12g}"


@dataclass
class Completion:
    """What to continue and how, and what has come of it."""

    prompt: list[int]  # BOS included
    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50  # 0: all
    top_p: float = 1.0
    stop: tuple = ()  # ids that end it; BOS always does
    seed: int = 0
    tools: bool = False  # run the calculator; without effect if the tokenizer lacks the marks of calls
    tokens: list[int] = dataclasses.field(default_factory=list)  # new ids, without the one that ended it
    forced: list[bool] = dataclasses.field(default_factory=list)  # of each new id: comes from a tool, not the model
    reason: str = ""  # why it ended: "stop" or "length"
    ended: int = -1  # the stop token
    call: list[int] | None = None  # the call that is being written
    queue: list[int] = dataclasses.field(default_factory=list)  # what a tool will say


class Decoder:
    """Rows of a KV cache that decode together: a text enters a free row while the others go on. For one thread.

    On CUDA a step is a graph, launched at once. compile also fuses it, which takes half a minute at the first step.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, rows: int, max_len=0, compile=False, graph=True):
        self.model, self.tokenizer, self.rows, self.windows = model, tokenizer, rows, model.windows
        self.max_len = min(max_len or model.config.max_seq_len, model.config.max_seq_len)
        self.cache, device = KVCache.empty(model, rows, self.max_len), model.embed.device
        kinds = torch.long, torch.long, torch.int32, torch.float32, torch.long, torch.float32, torch.long
        self.state = [torch.zeros(rows, dtype=kind, device=device) for kind in kinds]
        self.tokens, self.previous, self.positions, *self.controls = self.state
        self.positions.fill_(-1)  # all rows rest
        self.decode, self.sample = (torch.compile(f) if compile else f for f in (model.decode, sample))
        self.graphs = {} if graph and device.type == "cuda" else None
        self.known = [[] for _ in range(rows)]  # ids in the cache; of a live row also the next to go in
        self.live: dict[int, Completion] = {}
        names = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
        self.marks = [tokenizer.specials.get(name, -1) for name in names]
        with torch.no_grad():
            self.weights = model.layer_weights()

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over the present weights of the model; texts in the cache are forgotten."""
        self.known = [[] for _ in range(self.rows)]
        for old, new in zip(sum(self.weights, ()), sum(self.model.layer_weights(), ()), strict=True):
            if old is not None:
                old.copy_(new)

    def check(self, completion: Completion) -> None:
        """UserError if a completion does not fit a row."""
        n, new, limit = len(completion.prompt), completion.max_tokens, self.max_len
        if n == 0:
            raise UserError("a prompt is empty; give at least a BOS token")
        if new < 1:
            raise UserError(f"max_tokens={new} asks for no token; use at least 1")
        if n + new > limit + 1:
            raise UserError(f"a prompt of {n} tokens and {new} new ones exceed the context of {limit}; "
                            f"shorten the prompt or ask for at most {max(limit + 1 - n, 0)}")  # fmt: skip

    @torch.no_grad()
    def admit(self, completions: dict[int, Completion]) -> None:
        """Puts completions into rows that are not live. What a row holds of its prompt already is not computed again.

        The last token of a prompt goes in with the next step, which gives the first new token.
        """
        starts, values = {}, []
        for row, c in completions.items():
            assert row not in self.live, f"row {row} is taken"
            self.check(c)
            known, n = self.known[row], len(self.known[row])
            starts[row] = n if n < len(c.prompt) and known == c.prompt[:n] else 0
            previous, token = [0, *c.prompt[-2:]][-2:]
            top_p = c.top_p if c.top_p < 1 else 2  # no rounding of the sum cuts anything
            values.append((token, previous, len(c.prompt) - 1, max(c.temperature, 0), c.top_k, top_p, c.seed % 2**32))
        for ring in (*self.cache.keys, *self.cache.values):  # masked anyhow, but a mask lets infinities through
            ring[[row for row in starts if not starts[row]]] = 0
        todo = [(row, starts[row], c.prompt[:-1]) for row, c in completions.items() if len(c.prompt) - 1 > starts[row]]
        for row in completions:
            self.known[row] = []  # should the prefill fail
        while todo:
            n = max(1, sum(np.cumsum([len(prompt) for _, _, prompt in todo]) <= PREFILL_TOKENS))
            self.model.prefill(self.cache, *map(list, zip(*todo[:n], strict=True)), self.weights)
            todo = todo[n:]
        for state, column in zip(self.state, zip(*values, strict=True), strict=True):
            state[[*completions]] = torch.tensor(column, dtype=state.dtype, device=state.device)
        self.known = [list(completions[i].prompt) if i in completions else ids for i, ids in enumerate(self.known)]
        self.live |= completions

    def advance(self, width: int) -> None:
        """The work of a step, between tensors that stay where they are."""
        logits = self.decode(self.cache, self.tokens, self.previous, self.positions, self.weights)
        logits = logits[:, : self.tokenizer.vocab_size]  # without the padding of the vocabulary
        self.previous.copy_(self.tokens)
        sampled = self.sample(logits, *self.controls, self.positions, width) if width >= 0 else logits.argmax(-1)
        self.tokens.copy_(sampled)
        self.positions.add_(self.positions >= 0)

    def capture(self, width: int) -> torch.cuda.CUDAGraph:
        """Records a step. All rows rest meanwhile, so that the warm-up writes nothing into the cache."""
        kept, graph, side = [t.clone() for t in self.state], torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self.positions.fill_(-1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.advance(width)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.advance(width)
        for t, value in zip(self.state, kept, strict=True):
            t.copy_(value)
        return graph

    @torch.no_grad()
    def step(self) -> list[tuple[int, int | None, str]]:
        """One token for each live row: (row, id, reason), the reason "" while it goes on.

        "stop": a stop token came, the id is None; "length": this was the last of max_tokens. The row is then free.
        """
        if not self.live:
            return []
        V, live = self.tokenizer.vocab_size, self.live.values()
        cut = max(min(c.top_k or V * (c.top_p < 1), V) if c.temperature > 0 else -1 for c in live)
        width = min(V, next(size for size in (-1, 0, 64, 1024, V) if size >= cut))  # each is a graph of its own
        if self.graphs is None:
            self.advance(width)
        else:
            if width not in self.graphs:
                self.graphs[width] = self.capture(width)
            self.graphs[width].replay()
        tokens, events, forced, (start, end, *output) = self.tokens.tolist(), [], {}, self.marks
        for row, c in self.live.items():
            token, by_tool, c.reason = tokens[row], bool(c.queue), ""
            if by_tool:
                token = forced[row] = c.queue.pop(0)
            elif token == self.tokenizer.bos_id or token in c.stop:
                token, c.reason, c.ended = None, "stop", token
            elif c.tools and -1 not in self.marks:
                if token == start:
                    c.call = []
                elif token == end and c.call is not None:
                    result, c.call = calculate(self.tokenizer.decode(c.call)), None
                    if result is not None:
                        c.queue = [output[0], *self.tokenizer.encode(result), output[1]]
                elif c.call is not None:
                    c.call.append(token)
            if token is not None:
                c.tokens.append(token)
                c.forced.append(by_tool)
                c.reason = "length" if len(c.tokens) == c.max_tokens else ""
            if not c.reason:
                self.known[row].append(token)
            events.append((row, token, c.reason))
        if forced:
            self.tokens[[*forced]] = self.tokens.new_tensor([*forced.values()])
        self.rest([row for row, _, reason in events if reason])
        return events

    def rest(self, rows: list[int]) -> None:
        if rows:
            self.positions[rows] = -1
        self.live = {row: c for row, c in self.live.items() if row not in rows}

    def free(self, row: int) -> None:
        """Drops a row's completion, if it has one, and forgets its text."""
        self.rest([row] if row in self.live else [])
        self.known[row] = []


PREFILL_TOKENS = 16384  # at once


class Generator:
    """Continues prompts of different lengths, up to `rows` at a time. Options are fields of Completion."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, rows: int = 128, compile: bool = False):
        self.model, self.tokenizer, self.rows, self.compile = model, tokenizer, rows, compile
        self.decoder: Decoder | None = None  # of the last call, for its graphs

    def run(self, completions: list[Completion], rows: int) -> Iterator[list[tuple[int, int | None, str]]]:
        """Decoder.step over all completions, which take free rows in turn; with their index in place of the row."""
        length = max(len(c.prompt) + c.max_tokens for c in completions) - 1
        if self.model.embed.is_cuda:  # sizes that fit the next call too; keys that are not there cost no time
            rows, length = 1 << (rows - 1).bit_length(), self.model.config.max_seq_len
        decoder, self.decoder = self.decoder, None
        if decoder and (decoder.rows, decoder.windows) == (rows, self.model.windows) and decoder.max_len >= length:
            decoder.refresh()
        else:
            del decoder  # its memory first
            decoder = Decoder(self.model, self.tokenizer, rows, length, self.compile)
        waiting, index = list(enumerate(completions))[::-1], {}
        try:
            for completion in completions:
                decoder.check(completion)
            while waiting or decoder.live:
                free = [row for row in range(rows) if row not in decoder.live]
                if waiting and len(free) >= min(len(waiting), max(1, rows // 8)):  # a prefill holds the others up
                    new = {row: waiting.pop() for row in free[: len(waiting)]}
                    index |= {row: i for row, (i, _) in new.items()}
                    decoder.admit({row: completion for row, (_, completion) in new.items()})
                yield [(index[row], token, reason) for row, token, reason in decoder.step()]
        finally:
            for row in range(rows):
                decoder.free(row)
            self.decoder = decoder

    def completions(self, prompts, seed: int = 0, **options) -> list[Completion]:
        return [Completion(list(p), seed=seed + i * 0x9E3779B1, **options) for i, p in enumerate(prompts)]

    def complete(self, prompts, **options) -> list[Completion]:
        """Continues lists of ids to their end; equal prompts draw different noise.

        Raises: UserError if a prompt and its answer do not fit the context
        """
        completions = self.completions(prompts, **options)
        if completions:
            list(self.run(completions, min(len(completions), self.rows)))
        return completions

    def generate(self, prompts, **options) -> list[list[int]]:
        """The new ids of each prompt, without the stop token."""
        return [completion.tokens for completion in self.complete(prompts, **options)]

    def stream(self, prompts, **options) -> Iterator[list[int | None]]:
        """Yields one list of ids for each step, None for rows that have ended."""
        completions = self.completions(prompts, **options)
        for events in self.run(completions, len(completions)):
            found = {i: token for i, token, _ in events}
            yield [found.get(i) for i in range(len(completions))]

    def stream_text(self, prompt: str, **options) -> Iterator[str]:
        """Pieces of text as they become certain: a character is never split between pieces."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for (token,) in self.stream([[self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]], **options):
            if token is not None:
                yield decoder.decode(self.tokenizer.bytes[token])
        yield decoder.decode(b"", final=True)


# <<< shared: generation
# >>> shared: utilities
# ===============================================================================
# 10. RUN UTILITIES -- devices, ranks, log, checkpoints, report


@dataclass(frozen=True)
class Ranks:
    """This process among all that torchrun started; one process has world 1."""

    rank: int
    local_rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def bf16_is_native() -> bool:
    """Compute capability, because torch.cuda.is_bf16_supported() also says yes to slow emulation on a T4."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def start_ranks() -> Ranks:
    """Picks the device and joins the process group that torchrun describes in the environment."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"torchrun started process {local_rank} on this machine, which has "
                            f"{torch.cuda.device_count()} GPU(s); lower --nproc_per_node")  # fmt: skip
        torch.cuda.set_device(local_rank)
        torch.set_num_threads(1)  # OpenMP threads that wait slow down runs beside this one: 87 to 125 ms a step
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                device_id=device if device.type == "cuda" else None)  # fmt: skip
    return Ranks(rank, local_rank, world, device)


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    """bf16 where the hardware has it, fp16 with loss scaling on older GPUs, fp32 elsewhere."""
    names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if config.dtype == "auto":
        return (torch.bfloat16 if bf16_is_native() else torch.float16) if device.type == "cuda" else torch.float32
    if config.dtype not in names:
        raise UserError(f"--dtype {config.dtype} is none of auto, {', '.join(names)}")
    return names[config.dtype]


# Dense bf16 (T4, V100: fp16) peak in TFLOP/s from the makers' data sheets.
PEAK_TFLOPS = {
    "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "GH200": 989, "H800": 989, "B200": 2250,
    "GB200": 2500, "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10": 125, "L40S": 362, "L4": 121,
    "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71, "T4": 65, "V100": 125, "MI300X": 1307.4,
}  # fmt: skip


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of the device: from the table, else what a matrix product reaches here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for key, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{key}\b", name):  # an A4000 is no A40
            return tflops * 1e12
    size, ranks = (4096 if device.type == "cuda" else 1024), Ranks(0, 0, 1, device)
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(5):
        ranks.sync()
        start = time.perf_counter()
        a @ a
        ranks.sync()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def flops_per_token(config: Config, windows: tuple[int, int], positions: Tensor) -> float:
    """Training FLOPs: 6 for each matrix weight, 12 x heads x head width for each key seen; embeddings are free."""
    c = config
    matrices = 4 * c.width**2 * len(c.attention_layers) + 2 * c.mlp_width * c.width * c.num_layers
    seen = [positions.clamp(max=w).float().mean().item() + 1 for w in windows]
    attended = sum(seen[layer in c.long_layers] for layer in c.attention_layers)
    return 6 * (matrices + c.width * c.padded_vocab) + 12 * c.width * attended


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30  # graphs hold memory that nothing allocates any more
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def describe_machine(ranks: Ranks) -> dict:
    """Versions, hardware and commit: what it takes to compare two runs."""

    def ask(*command):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            return done.stdout.strip() if done.returncode == 0 else ""
        except (OSError, subprocess.SubprocessError):
            return ""

    here = str(Path(__file__).resolve().parent)
    gpu = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ""
    return {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "",
        "numpy": np.__version__, "platform": f"{platform.system()} {platform.machine()}",
        "device": gpu or f"{ranks.device.type}, {os.cpu_count()} cores", "num_devices": ranks.world,
        "git_commit": ask("git", "-C", here, "rev-parse", "HEAD"),
        "git_dirty": bool(ask("git", "-C", here, "status", "--porcelain", "--", Path(__file__).name)),
        "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }  # fmt: skip


class Log:
    """One fixed-width line on the screen and one object in log.jsonl for each logged step; rank 0 only."""

    def __init__(self, run_dir: Path, ranks: Ranks, wandb_name: str, config: dict):
        self.path, self.active, self.wandb = run_dir / "log.jsonl", ranks.is_main, None
        if wandb_name and self.active:
            try:
                import wandb
            except ImportError:
                raise UserError("--wandb needs the package wandb; pip install wandb, or leave the flag out") from None
            try:
                self.wandb = wandb.init(project="decoderstack", name=wandb_name, config=config, dir=str(run_dir))
            except wandb.Error as error:
                reason = str(error).splitlines()[0].rstrip(".")
                raise UserError(f"--wandb could not start ({reason}); run `wandb login`, set WANDB_MODE=offline, or "
                                "leave the flag out") from None  # fmt: skip

    def say(self, text: str) -> None:
        if self.active:
            print(text, flush=True)

    def write(self, entry: dict) -> None:
        if not self.active:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise UserError(f"{self.path} could not be written ({error.strerror}); make room and go on with --resume "
                            f"from the last checkpoint") from None  # fmt: skip
        if self.wandb is not None:
            self.wandb.log({k: v for k, v in entry.items() if isinstance(v, int | float)}, step=entry["step"])

    def step(self, entry: dict, num_steps: int) -> None:
        """A training step: the file, and the line on the screen with what is left of the run."""
        self.write(entry)
        eta = (num_steps - entry["step"]) * entry["step_ms"] / 1e3
        self.say(
            "step {step:6d}/{num_steps} | loss {loss:7.4f} | bpb {bpb:6.4f} | lr {lr:5.3f} | {step_ms:8.1f} ms "
            "| {tokens_per_second:9,.0f} tok/s | mfu {mfu:5.1%} | {memory_gib:5.1f} GiB | {train_seconds:6.1f} s "
            "| eta {eta:5.0f} s".format(**entry, num_steps=num_steps, eta=eta)
        )

    def rewind(self, step: int) -> None:
        """Drops entries after a step: a resumed run writes them anew."""
        if self.active and self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            write_atomically(self.path, "".join(kept))

    def close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(p.parent for p in run_dir.glob("checkpoints/step_*/state.json"))


def diverged_advice(run_dir: Path) -> str:
    """What to do after a loss that is not finite."""
    newest = [p.name for p in checkpoints(run_dir)][-1:]
    way = f"go on from {newest[0]} with --resume" if newest else "nothing was saved yet, so start again"
    return f"{way} and lower rates, e.g. half of --set muon_lr= and --set adam_lr="


def save_checkpoint(state: TrainState, run_dir: Path, position: dict, extra: dict) -> None:
    """Writes checkpoints/step_N/ in one rename; every rank must call it. Old ones are removed afterwards.

    model.safetensors holds fp32 weights, optimizer.safetensors fp32 moments and random state, state.json the rest.
    """
    weights, moments = state.optimizer.weights(), state.optimizer.state()
    if broken := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise UserError(f"the weights {broken[0]} are no longer finite at step {state.step}, so it was not saved; "
                        f"{diverged_advice(run_dir)}")  # fmt: skip
    if not state.ranks.is_main:
        return
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = run_dir / "checkpoints" / f"step_{state.step:06d}"
    temporary = final.with_name(f".{final.name}.tmp")
    buffers = {k: v.cpu() for k, v in state.model.state_dict().items() if k not in weights}
    moments["rng.cpu"] = torch.get_rng_state()
    if state.ranks.device.type == "cuda":
        moments["rng.cuda"] = torch.cuda.get_rng_state(state.ranks.device)
    record = {
        "step": state.step, "position": position, "optimizer_count": state.optimizer.count,
        "loss_scale": state.loss_scale, "good_steps": state.good_steps,
        "attention": stage_attention(state.config, stage_index(state.config, max(state.step - 1, 0))), **extra,
    }  # fmt: skip
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in {**weights, **buffers}.items()}, temporary / "model.safetensors")
        save_file({k: v.contiguous() for k, v in moments.items()}, temporary / "optimizer.safetensors")
        write_atomically(temporary / "state.json", json.dumps(record, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "space" in str(error).lower()
        free = shutil.disk_usage(run_dir).free / 2**30
        raise UserError(
            f"the checkpoint of step {state.step} could not be written to {final}: "
            f"{'the disk is full' if full else error} ({free:.1f} GiB free); make room and go on with --resume "
            f"from the newest of the {len(checkpoints(run_dir))} checkpoint(s) there, which are whole"
        ) from None
    done = checkpoints(run_dir)
    scores = {p: json.loads((p / "state.json").read_text())["val_bpb"] for p in done}
    best = min((p for p in done if scores[p] is not None), key=scores.get, default=None)
    for old in done[: -state.config.keep_checkpoints]:
        if old != best:
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(state: TrainState, folder: Path) -> dict:
    """Restores weights, moments and random state, on any number of ranks; returns the record of state.json."""
    from safetensors.torch import load_file

    record = json.loads((folder / "state.json").read_text())
    weights, moments = load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")
    state.optimizer.load(weights, moments, record["optimizer_count"])
    for name, buffer in state.model.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])
    state.model.set_stage(record["attention"])  # for a finished run, which enters no stage any more
    state.step, state.good_steps = record["step"], record["good_steps"]
    if 1.0 not in (state.loss_scale, record["loss_scale"]):  # 1: this run or the saved one is not in fp16
        state.loss_scale = record["loss_scale"]
    torch.set_rng_state(moments["rng.cpu"])
    if state.ranks.device.type == "cuda" and "rng.cuda" in moments:
        torch.cuda.set_rng_state(moments["rng.cuda"], state.ranks.device)
    return record


def start_from_source(state: TrainState) -> None:
    """The weights that finetuning begins with; the moments too, unless Config.sft_moments is off."""
    loss_scale = state.loss_scale
    load_checkpoint(state, Path(state.config.source))
    state.step, state.good_steps, state.loss_scale = 0, 0, loss_scale
    for slot in state.optimizer.slots:
        slot.grad = None  # a late one is of other text
    if not state.config.sft_moments:
        torch._foreach_zero_([moment for slot in state.optimizer.slots for moment in slot.moments.values()])
        state.optimizer.count = 0


def load(run_dir: str | Path, step: int | None = None, device: str | None = None, **changes):
    """A trained model for use: (model, tokenizer, config), from the newest checkpoint or that of a step.

    Changes are of the Config, such as dtype and attention, which another machine may not have.
    """
    from safetensors.torch import load_file

    run_dir = Path(run_dir)
    done = checkpoints(run_dir)
    if step is not None:
        done = [p for p in done if int(p.name[5:]) == step]
    if not done:
        where = f"of step {step} " if step is not None else ""
        raise UserError(f"no checkpoint {where}in {run_dir}/checkpoints; name a run directory with a finished save")
    config, ranks = dataclasses.replace(read_config(run_dir), **changes), start_ranks()
    device = torch.device(device) if device else ranks.device
    dtype = choose_dtype(config, device)
    model = GPT(config, device, dtype)
    model.load_state_dict(load_file(done[-1] / "model.safetensors"))
    model.set_stage(json.loads((done[-1] / "state.json").read_text())["attention"])
    model.attention = choose_attention(model, lambda text: None)
    return model.eval(), Tokenizer(run_dir / "tokenizer.json"), config


def read_config(run_dir: Path) -> Config:
    """The Config of a run, from its config.json."""
    try:
        values = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{run_dir} is not a run directory: its config.json cannot be read ({error})") from None
    if not (run_dir / Path(__file__).name).is_file():
        raise UserError(f"{run_dir} is no run of {Path(__file__).name}; call the script that lies in it")
    known = {field.name for field in dataclasses.fields(Config)}
    return Config(**{k: as_tuple(v) for k, v in values.items() if k in known})


def as_tuple(value):
    """JSON has lists where Config has tuples."""
    return tuple(as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


def write_report(run_dir: Path, result: dict, config: Config, machine: dict, samples: list[str]) -> None:
    """report.md and curve.png: what a person looks at after a run."""
    entries = [json.loads(line) for line in (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [(e["tokens"] / 1e6, e["bpb"]) for e in entries if "loss" in e]
    val = [(e["tokens"] / 1e6, e["val_bpb"]) for e in entries if "val_bpb" in e]
    picture = ""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        if train:
            axes.plot(*zip(*train, strict=True), color="#9bb8d3", lw=1, label="training (estimate from mean bytes)")
        if val:
            axes.plot(*zip(*val, strict=True), color="#c0392b", marker="o", ms=3, label="validation")
        axes.set(xlabel="training tokens, millions", ylabel="bits per byte")
        axes.set_title(f"{run_dir.name}: {result['val_bpb']:.4f} bits per byte")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(run_dir / "curve.png", dpi=120)
        plt.close(figure)
        picture = "![loss curve](curve.png)\n"
    except ImportError:
        picture = "(no picture: matplotlib is not installed)\n"
    rows = {
        "validation": f"{result['val_bpb']:.4f} bits per byte", "tokens": f"{result['tokens']:,}",
        "steps": f"{result['steps']:,}", "training time": f"{result['train_seconds']:.1f} s",
        "speed": f"{result['tokens_per_second']:,.0f} tokens/s", "MFU": f"{result['mfu']:.1%}",
        "peak memory": f"{result['peak_memory_gib']:.1f} GiB",
        "device time": f"{result['train_seconds'] * machine['num_devices'] / 3600:.4f} device hours",
        "device": f"{machine['num_devices']} x {machine['device']}", "torch": machine["torch"],
        **({"finetuned from": " ".join(Path(config.source).parts[-3::2])} if config.source else {}),
        "data": config.data, "commit": machine["git_commit"][:12] + (" (changed)" if machine["git_dirty"] else ""),
    }  # fmt: skip
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    texts = "\n".join(f"````text\n{sample}\n````\n" for sample in samples)  # a sample may hold ``` itself
    text = f"# {run_dir.name}\n\n| | |\n| --- | --- |\n{table}\n\n{picture}\n## Samples\n\n{texts}"
    write_atomically(run_dir / "report.md", text)


# <<< shared: utilities
# >>> shared: main
# ===============================================================================
# 11. MAIN -- train_step, warm-up, the loop, the command line


@dataclass
class TrainState:
    """What a training step changes, and what it needs to do so."""

    config: Config
    ranks: Ranks
    model: GPT
    forward: Callable  # the model, compiled where that pays
    optimizer: Optimizer
    packs: int  # of a micro-batch
    step: int = 0
    loss_scale: float = 1.0  # above 1 only in fp16
    good_steps: int = 0  # since the loss scale last changed
    graphs: dict | None = None  # of replay(), by shape; None: every kernel is launched by the host


def train_step(state: TrainState, batch: Batch) -> Tensor:
    """One optimizer step; returns this rank's share of the mean nats per target, a 0-D tensor.

    The same function serves warm-up, training, profiles, benchmarks and tests.
    """
    config, step = state.config, state.step
    if state.model.loss_weights.numel() > 1:
        state.model.loss_weights.copy_(torch.tensor(loss_weights(config, step)), non_blocking=True)
    while True:
        loss, targets = torch.zeros((), device=state.ranks.device), max(batch.total_targets, 1)
        factor = torch.full_like(loss, state.loss_scale / targets)
        try:
            for micro_batch in batch.micro_batches(state.packs, state.ranks.device):
                loss += (micro_step if state.graphs is None else replay)(state, micro_batch, factor) / targets
            break
        except torch.OutOfMemoryError:
            pass  # the exception holds the activations until it ends here
        step_down(state)
    stepped = state.optimizer.step(lr_multiplier(config, step), muon_momentum(config, step), state.loss_scale)
    if state.loss_scale != 1.0:  # halve on overflow, double after 1,000 good steps
        state.good_steps = state.good_steps + 1 if stepped else 0
        if not stepped:
            state.loss_scale = max(state.loss_scale / 2, 2.0)
        elif state.good_steps == 1000:
            state.loss_scale, state.good_steps = min(state.loss_scale * 2, 2.0**24), 0
    state.step += 1
    return loss


def micro_step(state: TrainState, micro_batch: tuple, factor: Tensor) -> Tensor:
    """Forward, and backward of the loss times a 0-D factor; gradients add up in .grad. Returns the sum of nats, 0-D."""
    total, nats = state.forward(*micro_batch)
    (total * factor).backward()
    return nats.sum()


def replay(state: TrainState, micro_batch: tuple, factor: Tensor) -> Tensor:
    """As micro_step, from the second call with the same shapes on by one CUDA graph, which the host launches at once.

    A step of 16,384 tokens is 960 kernels: 24 ms of an H200, but 55 for the host that launches them one by one.
    A graph works in memory of its own: inputs are copied into it, and the first gradients of a step are always the
    same tensors, to which those of later micro-batches (a second graph) are added.
    """
    *tensors, max_doc = micro_batch
    params = list(state.model.parameters())
    windows = None if state.model.attention is triton_attention else state.model.windows  # to that one they are data
    key = params[0].grad is None, max_doc, windows, *(tuple(t.shape) for t in tensors)
    if key not in state.graphs:
        return record(state, key, micro_batch, factor)
    graph, inputs, grads, output = state.graphs[key]
    for static, given in zip(inputs, (*tensors, factor), strict=True):
        static.copy_(given)
    graph.replay()
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return output


def record(state: TrainState, key: tuple, micro_batch: tuple, factor: Tensor) -> Tensor:
    """micro_step, and then the same as a graph of state.graphs; where that fails, the run goes on without graphs."""
    nats = micro_step(state, micro_batch, factor)  # the result, and it compiles what is not compiled yet
    *tensors, max_doc = micro_batch
    params, first = list(state.model.parameters()), key[0]
    grads, inputs, graph = [p.grad for p in params], [t.clone() for t in (*tensors, factor)], torch.cuda.CUDAGraph()
    pool = next(iter(state.graphs.values()))[0].pool() if state.graphs else None  # one for all, as one runs at a time
    try:
        if first:
            state.model.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may go on
            output = micro_step(state, (*inputs[:-1], max_doc), inputs[-1])  # computes nothing
        state.graphs[key] = graph, inputs, [p.grad for p in params], output
        for param, grad in zip(params, grads, strict=True):
            if first:
                param.grad.copy_(grad)
    except Exception as error:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        with torch.cuda.graph(torch.cuda.CUDAGraph()):  # else random numbers wait for the end of the recording
            torch.zeros_like(factor)
        divisible = state.packs > 1 and (state.ranks.world == 1 or state.step == 0)
        if isinstance(error, torch.OutOfMemoryError) and divisible:
            raise  # train_step tries smaller micro-batches: with graphs they are faster than large ones without
        print(f"CUDA graphs: off ({first_line(error)})")
        state.graphs = None
    return nats


def step_down(state: TrainState) -> None:
    """A smaller micro-batch after the device ran out of memory, in a step as large as before.

    Called outside the except block, whose exception holds the activations. Raises UserError when it cannot go on.
    """
    state.model.zero_grad(set_to_none=True)
    state.graphs = None if state.graphs is None else {}
    gc.collect()  # what a failed forward leaves may lie in cycles
    torch.cuda.empty_cache()
    tokens = state.packs * state.config.pack_tokens
    smaller = max((d for d in range(1, state.packs) if state.packs % d == 0), default=0)
    if not smaller or (state.ranks.world > 1 and state.step > 0):  # other ranks would wait for ever
        raise UserError(f"the device ran out of memory with micro-batches of {tokens} tokens; set "
                        f"--micro-batch-tokens lower, or pack_tokens if it is one pack already, or let memory be less "
                        f"fragmented by PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")  # fmt: skip
    state.packs = smaller
    print(f"out of memory with {tokens} tokens a micro-batch; going on with {smaller * state.config.pack_tokens}")


def choose_packs(config: Config, ranks: Ranks) -> int:
    """Packs of a micro-batch: the most that divide every stage's batch, fit into memory and help speed."""
    for stage in config.stage_table:
        if stage.packs % ranks.world:
            raise UserError(f"a step of {stage.packs} packs does not divide over {ranks.world} processes; "
                            f"use a number of processes that divides {stage.packs}")  # fmt: skip
    common = math.gcd(*(stage.packs // ranks.world for stage in config.stage_table))
    limit = 8192
    if ranks.device.type == "cuda":
        limit = micro_batch_limit(config, torch.cuda.mem_get_info(ranks.device)[0])
    if config.micro_batch_tokens:
        limit = config.micro_batch_tokens
        if limit % config.pack_tokens:
            raise UserError(f"--micro-batch-tokens {limit} is not a multiple of pack_tokens={config.pack_tokens}")
    return max(d for d in range(1, common + 1) if common % d == 0 and (d * config.pack_tokens <= limit or d == 1))


def build_state(config: Config, ranks: Ranks, say: Callable = print) -> TrainState:
    """Model, optimizer and compiled forward, with the weights of config.seed."""
    dtype = choose_dtype(config, ranks.device)
    model = GPT(config, ranks.device, dtype)
    model.attention = choose_attention(model, say)
    model.init_weights(config.seed)
    forward = model
    if config.compile and ranks.device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        forward = torch.compile(model, dynamic=False, fullgraph=True)
    optimizer = build_optimizer(model, config, ranks)
    state = TrainState(config, ranks, model, forward, optimizer, choose_packs(config, ranks))
    state.graphs = {} if forward is not model and config.cuda_graphs else None
    reset_state(state)
    return state


def reset_state(state: TrainState) -> None:
    """The state of step 0: initial weights, zero moments. Also what removes every trace of the warm-up."""
    state.model.zero_grad(set_to_none=True)
    state.model.init_weights(state.config.seed)
    if state.ranks.world > 1:
        for param in state.model.parameters():
            dist.broadcast(param.detach(), 0)
    state.model.set_stage(stage_attention(state.config, 0))
    state.optimizer.reset()
    state.step, state.good_steps = 0, 0
    state.loss_scale = 2.0**16 if state.model.embed.dtype == torch.float16 else 1.0


def checksum(model: nn.Module) -> list[float]:
    return [param.detach().float().abs().sum().item() for param in model.parameters()]


def dummy_batch(config: Config, ranks: Ranks, rows: int, max_doc: int, rng) -> Batch:
    """A batch of `rows` packs for each rank, of random tokens in documents of the greatest length."""
    packs = empty_packs(rows, config, 0)
    packs[1][:] = packs[0][:] = rng.integers(0, config.vocab_size, packs[0].shape)
    for row in range(rows):
        pad_pack(packs, row, 0, 0, max_doc)
    size = packs[0].size * ranks.world
    return Batch(*(torch.from_numpy(a) for a in packs), max_doc, size, size)


def warm_up(state: TrainState, say: Callable) -> None:
    """Runs each stage on dummy tokens, forward, backward, optimizer and validation, then forgets it all.

    Everything is compiled and recorded here, so that nothing of it happens while the clock runs.
    """
    config, ranks, start, before = state.config, state.ranks, time.perf_counter(), checksum(state.model)
    rng, ones = np.random.default_rng(0), torch.ones(config.padded_vocab, dtype=torch.long, device=ranks.device)
    for index, stage in enumerate(config.stage_table):
        state.model.set_stage(stage_attention(config, index))
        tried = 0
        while tried != state.packs:  # once more with smaller micro-batches where memory ran out
            tried = state.packs
            several = state.graphs is not None and stage.packs > tried * ranks.world  # the second has another graph
            for _ in range(1 if index else 2):  # late tables are updated from the second step on
                train_step(state, dummy_batch(config, ranks, tried * (1 + several), stage.max_doc, rng))
            batch = dummy_batch(config, ranks, state.packs, config.max_seq_len, rng)
            while True:
                try:
                    bits_per_byte(state.forward, batch, state.packs, ones, ranks)
                    break
                except torch.OutOfMemoryError:
                    pass
                step_down(state)
            if ranks.world > 1:  # memory may have run out on some ranks only
                packs = torch.tensor(state.packs, device=ranks.device)
                dist.all_reduce(packs, op=dist.ReduceOp.MIN)
                state.packs = int(packs)
    reset_state(state)
    after = checksum(state.model)
    assert before == after, f"the warm-up left a trace in the weights: {before} became {after}"
    say(f"warm-up: {time.perf_counter() - start:.1f} s, micro-batch {state.packs * config.pack_tokens:,} tokens")


class Stopper:
    """Turns SIGTERM and Ctrl-C into a flag that the loop reads between steps."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.signal = ranks, 0
        self.before = {s: signal.signal(s, self.catch) for s in (signal.SIGTERM, signal.SIGINT)}

    def catch(self, number, frame) -> None:
        if self.signal == number:  # asked twice: at once
            sys.exit(128 + number)
        self.signal = number

    def asked(self, step: int) -> bool:
        if self.ranks.world == 1:
            return bool(self.signal)
        if step % 10:  # all ranks must stop at the same step, and asking costs a synchronisation
            return False
        flag = torch.tensor(self.signal, device=self.ranks.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.signal = int(flag)
        return bool(self.signal)

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def train(config: Config, args: argparse.Namespace) -> dict:
    """Pretrains, or finetunes config.source; evaluates, saves, samples, reports; returns what is printed last."""
    ranks = start_ranks()
    dataset = Dataset.open(config.data)
    conversations = Conversations(dataset, "train", config) if config.source else None
    origin = Path(config.source).parent.parent / "tokenizer.json"
    if conversations and not args.resume and origin.read_bytes() != dataset.tokenizer.path.read_bytes():
        raise UserError(f"{dataset.root} has another tokenizer than {origin.parent}; pass the --data of that run, or "
                        f"make a dataset with data/pretrain.py --tokenizer {origin}")  # fmt: skip
    config = dataclasses.replace(config, vocab_size=dataset.tokenizer.vocab_size)
    config.validate()
    train_info, note = dataset.info["splits"]["train"], "training tokens"
    available = train_info["tokens"] * config.max_epochs
    if conversations:  # whole steps, padding included
        steps = math.ceil(len(conversations.packs) * config.pack_tokens / config.step_tokens)
        available = round(steps * config.step_tokens)
        config = dataclasses.replace(config, tokens=config.tokens or available)
        counted = conversations.tokens[conversations.counted]
        train_info = {"tokens": len(counted), "text_bytes": int(dataset.tokenizer.token_bytes[counted].sum())}
        note = (f"counted tokens in {len(conversations.borders) - 1:,} conversations, "
                f"{1 - conversations.inputs * config.max_epochs / available:.1%} padding")  # fmt: skip
    needed = sum(config.stage_table[stage_index(config, s)].packs for s in range(config.num_steps)) * config.pack_tokens
    if needed > available:
        fewer = int((available // config.step_tokens - len(config.stages) + 1) * config.step_tokens)  # in whole steps
        advice = f"ask for fewer with --tokens {fewer}, or" if fewer > 0 else "add text, make the batch smaller, or"
        raise UserError(f"{config.data} holds {available:,} training tokens, the run asks for {needed:,}; {advice} "
                        f"allow repeats with --set max_epochs=N")  # fmt: skip
    if args.profile and config.num_steps < 11:
        raise UserError(f"--profile traces steps 11 to 15, the run has {config.num_steps}; use --steps 15 or more")
    run_dir = prepare_run_dir(dataset, args, ranks)
    bytes_per_token = train_info["text_bytes"] / train_info["tokens"]
    machine = describe_machine(ranks)
    log = Log(run_dir, ranks, config.wandb, dataclasses.asdict(config))
    state = build_state(config, ranks, log.say)
    if args.profile:
        state.graphs = None  # a trace names only what the host launches
    count = sum(p.numel() for p in state.model.parameters())
    log.say(f"{Path(__file__).name}: {count / 1e6:.1f} M parameters, {state.model.embed.dtype}, "
            f"{machine['num_devices']} x {machine['device']}, torch {machine['torch']}")  # fmt: skip
    log.say(f"data: {config.data}, vocabulary {config.vocab_size:,}, {train_info['tokens']:,} {note}")
    log.say(f"run:  {run_dir}, {config.num_steps:,} steps, {config.tokens:,} tokens")
    if config.prefix_weight:
        state.model.prefixes[: config.vocab_size] = torch.tensor(dataset.tokenizer.prefixes())
    warm_up(state, log.say)

    position, train_seconds, tokens, val_bpb = None, 0.0, 0, None
    if args.resume:
        record = load_checkpoint(state, checkpoints(run_dir)[-1])
        position, train_seconds, tokens = record["position"], record["train_seconds"], record["tokens"]
        val_bpb = record["val_bpb"] if state.step == config.num_steps else None  # belongs to that checkpoint only
        log.rewind(state.step)
        log.say(f"resumed at step {state.step} from {checkpoints(run_dir)[-1]}")
        if state.step > config.num_steps:
            raise UserError(f"{run_dir} is at step {state.step} already, the flags ask for {config.num_steps}; ask for "
                            f"more, or leave out --steps and --tokens")  # fmt: skip
        if state.step == config.num_steps and (run_dir / "report.md").is_file():
            log.say(f"this run is finished; its results are in {run_dir}/report.md")
            log.close()
            return json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
        if ranks.is_main and config != read_config(run_dir):  # the next --resume goes on with these flags
            description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
            description |= {"config": dataclasses.asdict(config), "overridden": [*description["overridden"], *args.set]}
            write_atomically(run_dir / "config.json", json.dumps(description, indent=1))
    elif config.source:
        start_from_source(state)
    if ranks.is_main and not args.resume:
        description = {"command": "sft" if config.source else "pretrain", "config": dataclasses.asdict(config),
                       "flags": args.flags, "overridden": args.set, "machine": machine,
                       "date": datetime.datetime.now().isoformat(timespec="seconds"),
                       "dataset_fingerprint": dataset.info.get("fingerprint")}  # fmt: skip
        write_atomically(run_dir / "config.json", json.dumps(description, indent=1))
        write_atomically(run_dir / Path(__file__).name, Path(__file__).read_text(encoding="utf-8"))
        write_atomically(run_dir / "tokenizer.json", dataset.tokenizer.path.read_text(encoding="utf-8"))
    loader = PackLoader(dataset, config, ranks, position, state.step, conversations)
    validation = validation_batch(dataset, config)
    token_bytes = torch.zeros(config.padded_vocab, dtype=torch.long, device=ranks.device)
    token_bytes[: config.vocab_size] = torch.from_numpy(dataset.tokenizer.token_bytes).to(ranks.device)
    peak, stopper, entered_stage = peak_flops(ranks.device, state.model.embed.dtype), Stopper(ranks), -1
    profiler, work, tokens_at_start, seconds_at_start = None, 0.0, tokens, train_seconds
    losses = []  # of the steps since the last line, 0-D tensors on the device
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)

    def evaluate() -> float:
        bpb = bits_per_byte(state.forward, validation, state.packs, token_bytes, ranks)
        if not math.isfinite(bpb):
            raise UserError(f"validation gave {bpb} at step {state.step}; {diverged_advice(run_dir)}")
        log.say(f"step {state.step:6d}/{config.num_steps} | val bpb {bpb:.4f} | elapsed {train_seconds:.1f} s")
        log.write({"step": state.step, "tokens": tokens, "train_seconds": train_seconds, "val_bpb": bpb})
        return bpb

    def save() -> None:
        start = time.perf_counter()
        extra = {"tokens": tokens, "train_seconds": train_seconds, "val_bpb": val_bpb}
        save_checkpoint(state, run_dir, position, extra)
        log.say(f"step {state.step:6d}/{config.num_steps} | saved in {time.perf_counter() - start:.1f} s")

    if config.source and not args.resume:
        evaluate()  # where finetuning starts
    gc.collect()
    gc.freeze()  # else a collection of what the compiler left behind makes one step in some hundred slow
    ranks.sync()
    clock, logged_seconds, logged_tokens = time.perf_counter(), train_seconds, tokens
    while state.step < config.num_steps:
        if (index := stage_index(config, state.step)) != entered_stage:
            state.model.set_stage(stage_attention(config, index))
            entered_stage = index
        batch = loader.next()
        if args.profile and state.step == 10:
            profiler = torch.profiler.profile(with_stack=False)
            profiler.__enter__()
        losses.append(train_step(state, batch))
        position, tokens = batch.position, tokens + batch.total_tokens
        done = state.step == config.num_steps
        if profiler is not None and (state.step == 15 or done):
            profiler = finish_profile(profiler, run_dir, log, ranks)
        stop = stopper.asked(state.step)
        eval_now = done or (config.eval_every and state.step % config.eval_every == 0)
        due = done or (config.save_every and state.step % config.save_every == 0)
        save_now = stop or (due and config.save_every >= 0)
        if state.step % config.log_every == 0 or eval_now or save_now or state.step == 1:
            loss, losses = torch.stack(losses).mean(), []
            if ranks.world > 1:
                dist.all_reduce(loss)
            loss = loss.item()  # waits for the device
            ranks.sync()
            train_seconds, clock = train_seconds + time.perf_counter() - clock, time.perf_counter()
            if not math.isfinite(loss):
                raise UserError(f"the loss became {loss} at step {state.step}; {diverged_advice(run_dir)}")
            flops = flops_per_token(config, state.model.windows, batch.positions)
            work += flops * (tokens - logged_tokens)
            interval = max(train_seconds - logged_seconds, 1e-9)
            speed = (tokens - logged_tokens) / interval
            steps = max(1, round((tokens - logged_tokens) / batch.total_tokens))
            entry = {
                "step": state.step, "tokens": tokens, "loss": loss, "bpb": loss / math.log(2) / bytes_per_token,
                "lr": lr_multiplier(config, state.step - 1), "step_ms": interval / steps * 1e3,
                "tokens_per_second": speed, "mfu": speed * flops / (peak * ranks.world),
                "memory_gib": peak_memory_gib(ranks.device), "train_seconds": train_seconds,
            }  # fmt: skip
            log.step(entry, config.num_steps)
            logged_seconds, logged_tokens = train_seconds, tokens
        if eval_now or save_now:
            if eval_now:
                val_bpb = evaluate()
            if save_now:
                save()
            val_bpb = val_bpb if done else None
            ranks.sync()
            clock = time.perf_counter()
        if stop and not done:
            loader.close()
            log.close()
            name = signal.Signals(stopper.signal).name
            raise UserError(f"stopped by {name} at step {state.step}, saved; continue with "
                            f"`--resume --run-dir {run_dir}`")  # fmt: skip
    loader.close()
    stopper.restore()
    state.graphs = None  # CORE and sampling can have their memory
    if val_bpb is None:  # resumed after the last step
        val_bpb = evaluate()
    seconds = max(train_seconds - seconds_at_start, 1e-9)
    speed = (tokens - tokens_at_start) / seconds
    result = {
        "val_bpb": val_bpb, "steps": state.step, "tokens": tokens, "train_seconds": train_seconds,
        "tokens_per_second": speed, "mfu": work / (seconds * peak * ranks.world),
        "peak_memory_gib": peak_memory_gib(ranks.device), "run_dir": str(run_dir),
    }  # fmt: skip
    if core_files(dataset) and config.core_items >= 0 and not config.source:
        result |= evaluate_core(state.model, dataset, config, ranks, run_dir, log.say, state.packs * config.pack_tokens)
    if ranks.is_main:
        write_atomically(run_dir / "result.json", json.dumps(result, indent=1))
        samples = make_samples(state.model, dataset.tokenizer, config)
        for text in samples:
            log.say(f"--- sample\n{text}")
        write_report(run_dir, result, config, machine, samples)
        log.say(f"--- report: {run_dir}/report.md")
    log.close()
    return result


QUESTIONS = ("Hello! Who are you?", "Why is the sky blue?", "Write a Python function that adds two numbers.")


def make_samples(model: GPT, tokenizer: Tokenizer, config: Config) -> list[str]:
    """Three texts for the report: written from nothing, or after finetuning the most likely answers to QUESTIONS."""
    ids, prompts, options = tokenizer.specials, [[tokenizer.bos_id]] * 3, {"temperature": config.temperature}
    if config.source:
        prompts = [[tokenizer.bos_id, ids["<|user_start|>"], *tokenizer.encode(question), ids["<|user_end|>"],
                    ids["<|assistant_start|>"]] for question in QUESTIONS]  # fmt: skip
        options = {"temperature": 0.0, "stop": (ids["<|assistant_end|>"],)}
    options |= {"top_k": config.top_k, "top_p": config.top_p, "seed": config.seed}
    new = min(config.sample_tokens, config.max_seq_len + 1 - max(map(len, prompts)))
    texts = [tokenizer.decode(row) for row in Generator(model, tokenizer).generate(prompts, max_tokens=new, **options)]
    return [f"{q}\n\n{text}" for q, text in zip(QUESTIONS, texts, strict=True)] if config.source else texts


def finish_profile(profiler, run_dir: Path, log: Log, ranks: Ranks) -> None:
    """Writes the trace of five steps and a table of the slowest operations into the run directory."""
    ranks.sync()
    profiler.__exit__(None, None, None)
    if ranks.is_main:
        profiler.export_chrome_trace(str(run_dir / "trace.json"))
        key = "self_device_time_total" if ranks.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=90)
        write_atomically(run_dir / "profile.txt", table)
        log.say(f"profile: {run_dir}/profile.txt, {run_dir}/trace.json")


def prepare_run_dir(dataset: Dataset, args: argparse.Namespace, ranks: Ranks) -> Path:
    """Creates or checks the run directory; all ranks get the same answer."""
    name = datetime.datetime.now().strftime(f"%Y-%m-%d_%H-%M-%S_{Path(__file__).stem}")
    name += "_sft" if args.command == "sft" else ""
    newest = [p.name for p in checkpoints(Path(args.run_dir))][-1:] if args.resume else "nothing"
    names = [args.run_dir or f"out/{name}", newest]
    if ranks.world > 1:
        dist.broadcast_object_list(names, 0)
    run_dir = Path(names[0])
    if names[1] != newest:  # a shared file system may be seconds behind on another machine
        raise UserError(f"process {ranks.rank} would continue {newest} in {run_dir}, process 0 {names[1]}; the run "
                        f"directory must be on one file system for all; if it is, start again")  # fmt: skip
    if args.resume:
        if not checkpoints(run_dir):
            raise UserError(f"--resume found no complete checkpoint in {run_dir}/checkpoints; start without --resume")
        if (run_dir / "tokenizer.json").read_bytes() != dataset.tokenizer.path.read_bytes():
            raise UserError(f"--resume cannot change the tokenizer: {dataset.root} has another one than {run_dir}; "
                            f"pass the --data that the run began with")  # fmt: skip
        return run_dir
    if ranks.is_main:
        if (run_dir / "log.jsonl").exists():
            way = "continue it with --resume" if checkpoints(run_dir) else "nothing was saved in it, so remove it"
            raise UserError(f"{run_dir} already holds a run; {way}, or name another --run-dir")
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create the run directory {run_dir} ({error.strerror})") from None
    return run_dir


# Fields that a resumed or finetuned run may not change: the checkpoint would not fit, or the model would be another.
FROZEN = (
    "num_layers", "width", "head_dim", "mlp_width", "max_seq_len", "no_attention_layers", "long_layers",
    "key_offset_layers", "value_embed_layers", "shared_input_from", "attention_gates", "bigram_rows", "smear",
    "x0_injection", "backout_layer", "gate_width", "attention_scale", "rotary_base", "frequencies", "softcap", "source",
)  # fmt: skip
FROZEN_ON_RESUME = (*FROZEN, "pack_tokens", "pack_docs", "seed")  # the batches would be others


class Parser(argparse.ArgumentParser):
    """argparse with @FILE lines that may hold comments, and an error that names the nearest flag."""

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        return line.split("#")[0].split()

    def error(self, message: str):
        if message.startswith("unrecognized arguments: "):
            given = message.split(": ")[1].split()[0]
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(given.split("=")[0], flags, 1, 0.4)
            message = f"unknown flag {given}" + (f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help")
        raise UserError(message)


def build_parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False, fromfile_prefix_chars="@",
                    epilog="@FILE reads flags from a file, e.g. @runs/cpu.args")  # fmt: skip
    add = parser.add_argument
    add("command", nargs="?", default="pretrain", help="pretrain, sft, core or sample")
    add("--data", help="dataset directory (default data/shards/climbmix)")
    add("--run-dir", help="where the run is written (default a new dated directory under out/)")
    add("--from", dest="source", metavar="DIR", help="run directory to start from (sft, core, sample)")
    add("--resume", action="store_true", help="continue the run in --run-dir")
    add("--steps", type=int, help="length of the run in steps")
    add("--tokens", type=int, help="length of the run in tokens")
    add("--seed", type=int)
    add("--eval-every", type=int, metavar="N", help="steps between validations, 0: only at the end")
    add("--save-every", type=int, metavar="N", help="steps between checkpoints, 0: only at the end, -1: none")
    add("--log-every", type=int, metavar="N")
    add("--micro-batch-tokens", type=int, metavar="N", help="default: from free memory")
    add("--attention", help=f"auto, {', '.join(ATTENTION)}")
    add("--dtype", help="auto, bfloat16, float16, float32")
    add("--no-compile", action="store_true")
    add("--wandb", metavar="NAME", help="also log to Weights & Biases under this name")
    add("--profile", action="store_true", help="trace steps 11 to 15")
    add("--prompt", action="append", help="text to continue (sample; repeatable)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a Config field; voids record status")
    return parser


def parse_override(text: str) -> tuple[str, object]:
    """KEY=VALUE with the type of the Config field."""
    key, equals, value = text.partition("=")
    fields = {f.name: f for f in dataclasses.fields(Config)}
    if not equals or key not in fields:
        near = difflib.get_close_matches(key, fields, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--set {text}: " + (f"unknown Config field {key}{hint}" if equals else "expected KEY=VALUE"))
    default = fields[key].default
    try:
        parsed = value if isinstance(default, str) else as_tuple(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        parsed = None
    if isinstance(default, float) and type(parsed) is int:
        parsed = float(parsed)
    if type(parsed) is not type(default):
        raise UserError(f"--set {text}: {key} takes a value like {default!r}")
    return key, parsed


def sft_config(run_dir: Path, changes: dict) -> Config:
    """The Config of the run that finetuning starts from, with a schedule for one stage of its own.

    Windows, scale and frequencies are those that the checkpoint was trained with last; YaRN has nothing to replay.
    """
    base, done = read_config(run_dir), checkpoints(run_dir)
    if not done:
        raise UserError(f"{run_dir} holds no checkpoint; name a run that {Path(__file__).name} has pretrained")
    attention = json.loads((done[-1] / "state.json").read_text())["attention"]
    packs, lr = (changes.get(name, getattr(base, name)) for name in ("sft_packs", "sft_lr"))
    stage = (1.0, packs, attention["window_short"], attention["window_long"], base.max_seq_len, lr)
    # Matrices begin with full momentum, because their buffers are filled; a short document takes 32 tokens.
    return dataclasses.replace(
        base, source=str(done[-1]), attention_scale=attention["scale"], frequencies=tuple(attention["frequencies"]),
        stages=(stage,), tokens=0, max_epochs=1, cooldown=1.0, lr_floor=0.0, momentum=(base.momentum[1],) * 2 + (0, 0),
        ahead=(1.0,), prefix_weight=0.0, pack_docs=max(base.pack_docs, base.pack_tokens // 32), wandb="",
    )  # fmt: skip


def make_config(args: argparse.Namespace) -> Config:
    """Defaults, on --resume the saved Config, or for finetuning that of its source; then the flags that were given."""
    if args.resume and not args.run_dir:
        raise UserError("--resume needs --run-dir, the run to continue")
    if args.command == "sft" and not args.source and not args.resume:
        raise UserError("sft needs --from, a run directory with a checkpoint")
    if args.command == "pretrain" and args.source:
        raise UserError(f"pretraining takes no --from; to finetune that run say sft --from {args.source}")
    changes = dict(parse_override(text) for text in args.set)
    for flag in ("data", "tokens", "seed", "eval_every", "save_every", "log_every", "micro_batch_tokens", "attention",
                 "dtype", "wandb"):  # fmt: skip
        if getattr(args, flag) is not None:
            changes[flag] = getattr(args, flag)
    if args.no_compile:
        changes["compile"] = False
    base = Config(**changes)
    if args.resume:
        base = read_config(Path(args.run_dir))
        if json.loads((Path(args.run_dir) / "config.json").read_text(encoding="utf-8")).get("command") == "rl":
            raise UserError(f"{args.run_dir} is a run of runs/rl.py; continue it with that")
        if args.command == "sft" and not base.source:
            raise UserError(f"{args.run_dir} is a pretraining run; finetune it with sft --from {args.run_dir}")
    elif args.command == "sft":
        base = sft_config(Path(args.source), changes)
    config = dataclasses.replace(base, **changes)
    if args.steps is not None:
        if args.steps < 1:
            raise UserError(f"--steps {args.steps} must be at least 1")
        config = dataclasses.replace(config, tokens=round(args.steps * config.step_tokens))
    for name in FROZEN_ON_RESUME if args.resume else FROZEN if config.source else ():
        old, new = getattr(base, name), getattr(config, name)
        if old != new:
            raise UserError(f"{'--resume' if args.resume else 'sft'} cannot change {name}: the run has {old}, the "
                            f"flags say {new}; leave it out, or start a new run")  # fmt: skip
    config.validate()
    return config


def chosen(args: argparse.Namespace) -> dict:
    """What a command line may change about a trained model."""
    return {field: value for field in ("attention", "dtype") if (value := getattr(args, field)) is not None}


def sample_command(config: Config, args: argparse.Namespace) -> dict:
    """Continues prompts with the model of a run directory, streaming to the screen."""
    if not args.source:
        raise UserError("sample needs --from, a run directory with a checkpoint")
    model, tokenizer, trained = load(args.source, **chosen(args))
    options = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "seed": config.seed}
    start, count = time.perf_counter(), 0
    generator = Generator(model, tokenizer)
    for prompt in args.prompt or [""]:
        new = max(1, min(config.sample_tokens, trained.max_seq_len - len(tokenizer.encode(prompt))))
        print(prompt, end="", flush=True)
        for piece in generator.stream_text(prompt, max_tokens=new, **options):
            print(piece, end="", flush=True)
            count += 1
        count -= 1  # the last piece is no token
        print()
    return {"new_tokens": count, "seconds": time.perf_counter() - start, "run_dir": str(args.source)}


def core_command(config: Config, args: argparse.Namespace) -> dict:
    """Scores the model of a run directory on the CORE tasks of its dataset, or of --data."""
    if not args.source:
        raise UserError("core needs --from, a run directory with a checkpoint")
    run_dir, ranks = Path(args.source), start_ranks()
    dataset = Dataset.open(args.data or read_config(run_dir).data)
    if not core_files(dataset):
        raise UserError(f"{dataset.root} has no CORE tasks; add them with python data/core.py --download --data "
                        f"{dataset.root}, or name another dataset with --data")  # fmt: skip
    model, tokenizer, _ = load(run_dir, **chosen(args))
    if tokenizer.path.read_bytes() != dataset.tokenizer.path.read_bytes():
        raise UserError(f"{dataset.root} has another tokenizer than {run_dir}; pass the --data that the run began with")
    size = config.micro_batch_tokens or 8192
    if not config.micro_batch_tokens and ranks.device.type == "cuda":
        size = 65536 if torch.cuda.mem_get_info(ranks.device)[0] > 16 * 2**30 else 16384
    say = print if ranks.is_main else lambda text: None
    result = evaluate_core(model, dataset, config, ranks, run_dir, say, size)
    return {**result, "run_dir": str(run_dir)}


def main(argv: list[str] | None = None) -> int:
    """Runs a command; prints its result as one JSON object on the last line. Returns the exit code."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = build_parser().parse_args(argv)
        args.flags = list(argv)
        commands = {"pretrain": train, "sft": train, "core": core_command, "sample": sample_command}
        if args.command not in commands:  # argparse's choices would hide an unknown flag before a value
            raise UserError(f"unknown command {args.command}; use {', '.join(commands)}")
        config = make_config(args)
        result = commands[args.command](config, args)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(result), flush=True)
        return 0
    except OSError as error:  # a full disk, a directory without rights
        where = f" {error.filename}" if error.filename else ""
        print(f"error: cannot read or write{where} ({error.strerror or error}); mend that, then go on with --resume "
              f"from the last checkpoint", file=sys.stderr, flush=True)  # fmt: skip
        return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.unfreeze()
        gc.collect()  # else a gloo thread may outlive the interpreter and abort the process


if __name__ == "__main__":
    sys.exit(main())
# <<< shared: main
