"""DecoderStack-small: how an 11-layer, 768-wide GPT is trained, in one file.

    python train_small.py                                     one GPU (on a laptop add @runs/cpu.args)
    torchrun --standalone --nproc_per_node=8 train_small.py   eight GPUs, same recipe, same tokens per step

It reads a dataset directory (data/README.md) and writes a run directory: this script, config.json,
log.jsonl, checkpoints and result.json. What is done with a trained model lives in runs/.

The file reads downward; kernels come last. runs/tutorials/train_plain.py has the same step in plain
PyTorch. What stands between `shared` marks is the same in train_medium.py. One training step is, in
sections 3 to 6,
    run_steps > train_step > micro_step (or its CUDA graph) > GPT.forward > trunk > block > attend_layer,
    then linear_cross_entropy (12) and its backward, then Optimizer.step > update > normuon_update.

     1. CONFIG        the numbers of the recipe, the stage table, the parameter table
     2. SCHEDULE      learning rate, momentum, loss weights: pure functions of the step
     3. TRAINING      the outline of a run, the loop, one step, CUDA graphs
     4. MODEL         one trunk between token ids and head; attention is passed in
     5. DATA          packs of documents -> micro-batches
     6. OPTIMIZER     NorMuon, RMSProp and Adam, state sharded over ranks
     7. DOCUMENTS     shards -> documents, for training and for validation; bits per byte
     8. RUN           start, resume, finish; model building, warm-up, ranks and devices
     9. FILES         dataset directory, run directory: log and checkpoints
    10. COMMAND LINE  a flag for each field of Config, checks of the config
    11. ATTENTION     a Triton kernel, SDPA or FlashAttention 3 behind one signature
    12. KERNELS       Triton, each beside a plain reference; fp8 products

Capitals at the end of a name are its shape: q_THK is (T, H, K). T packed tokens, D width, H heads,
K head width, F MLP hidden width, M hidden width of mix(), V vocabulary, L layers, A layers with
attention, E value embeddings, P packs, N targets of a token, G documents in a micro-batch (with those
of padding) or channels that a gate reads, C width of a table's row. In the optimizer: N matrices of
R rows and C columns. In section 12 products are (M, K) by (N, K).
"""

# >>> shared: imports
from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import dataclasses
import datetime
import difflib
import fractions
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: this requires Python 3.11 or newer, not {platform.python_version()}")

# Read first, as the run directory keeps it: an editor may change the file during a long start.
SOURCE = Path(__file__).read_bytes()

# For torch's compiler and Triton. With the first a warm start skips the tracing of gradients; that cache sees what an
# autograd.Function does, but not what register_autograd() is given, so kernels here use the former. What is compiled
# is kept below the current folder, as containers and others lose /tmp and the home.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD", "1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.abspath("out/cache/inductor"))
os.environ.setdefault("TRITON_CACHE_DIR", os.path.abspath("out/cache/triton"))
os.environ.setdefault("USER", "unnamed")  # torch's compiler asks; some containers do not know

# Where nothing is compiled yet, a second process compiles kernels while this one imports PyTorch.
kernel_cache = Path(__file__).parent / "runs/lib/kernel_cache.py"
if __name__ == "__main__" and kernel_cache.is_file() and not os.path.isdir(os.environ["TRITON_CACHE_DIR"]):
    subprocess.Popen([sys.executable, kernel_cache, *sys.argv], start_new_session=True)

import filelock
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:  # CPUs, Macs and Windows do without Triton: every kernel has a plain path
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = tl = TensorDescriptor = None
jit = triton.jit if triton else (lambda function: function)


class UserError(Exception):
    """Something the user can fix; printed as one sentence, without a traceback."""


def require(condition, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


# <<< shared: imports
# ===============================================================================
# 1. CONFIG -- the numbers of the recipe, each with its unit or reason; files like runs/p34.args change some
# Change a field here, or try something out with its flag, as --muon-lr 0.03 (which voids record status);
# the comment of a field is the help of its flag. "Record N" is an entry of modded-nanogpt's leaderboard.
# dev/LOG.md has measured what each choice is worth.


@dataclass(frozen=True)
class Stage:
    """One row of the stage table."""

    fraction: float  # of the run's steps
    packs: int  # packs in a step, over all ranks and micro-batches
    lr_mult: float  # for lr_multiplier(): about sqrt(tokens in a step / 65,536)


@dataclass(frozen=True)
class Config:
    # -- model
    num_layers: int = 11  # number of layers
    width: int = 768  # width of the residual stream
    head_dim: int = 128  # width of an attention head
    mlp_width: int = 3072  # hidden width of an MLP
    swiglu: bool = False  # silu(gate) * up instead of relu(up) ** 2 (runs/portable.args)
    vocab_size: int = 32768  # vocabulary size; the dataset's tokenizer overrides it
    max_seq_len: int = 2048  # longest document in tokens; the rest starts a new document
    window_short: int = 128  # how many tokens back a query sees in most layers
    window_long: int = 2048  # how many tokens back a query sees in long_layers
    no_attention_layers: tuple = (4, 6, 9)  # layers with an MLP only (record 17: layer 7)
    long_layers: tuple = (3, 10)  # layers with the long window
    key_offset_layers: tuple = (3, 10)  # layers where half of each key is the previous token's
    value_embed_layers: tuple = (1, 2, 8, 10)  # layers with an embedding of each token in v
    shared_input_from: int = 8  # first layer whose attention reads a shared input (record 77); 99: off
    tied: bool = True  # one table for input and output
    bigram_rows: int = 409600  # rows of the bigram table (hashed n-gram embeddings); 0: off
    trigram_ratio: float = 10.0  # rows of a table of token triples for each bigram row; 0: off
    x0_injection: bool = False  # input added to the stream in every layer, times a learned factor
    mudd_width: int = 256  # hidden width of mix(), which makes the last layer's input (MUDDFormer); 0: off
    # layers whose heads h and h + H/2 share a softmax over the keys of both (modded-nanogpt PR 191)
    paired_layers: tuple = (0, 2, 5)
    # layers whose heads can remove the token's own value from their output (modded-nanogpt PR 264)
    exclusive_layers: tuple = (1, 3, 7)
    gated_layers: tuple = (3, 10)  # layers with a gate on what each head returns
    gate_width: int = 12  # channels that gates read
    attention_scale: float = 0.12  # factor on the products of queries and keys (record 20)
    rotary_base: float = 1024.0  # base of the rotary frequencies
    rotary_full: bool = False  # rotation of whole heads, not of half of each
    softcap: tuple = (23.0, 5.0, 7.5)  # a, b, c of logits = a * sigmoid((x + b) / c), record 54; none: x
    fp8: bool = True  # fp8 matmuls in qkv and MLP, in training only, on Hopper and B200
    fp8_head: bool = True  # fp8 matmul in the head, in training only, on Hopper and B200
    fp8_o: bool = False  # fp8 matmul in attention's output; no gain at this width
    recompute: bool = False  # recomputed activations in the backward: less memory, slower, without fp8 in layers
    mtp_weights: tuple = (1.0, 0.5, 0.25)  # loss weights of the next tokens, for multi-token prediction (record 53)
    mtp_until: float = 0.65  # fraction of the run over which all but the first mtp_weight fall to 0
    # weight of a second target, the longest other token that the next token begins with; 0: off
    prefix_weight: float = 0.25
    # -- initial weights, as standard deviations times sqrt(width)
    init_qkv: float = 0.5  # initial scale of queries, keys and values
    init_o: float = 1.0  # initial scale of attention's output, times init_qkv; not 0: record 64
    init_up: float = 0.5  # initial scale of the MLP's first matrix; the second starts at 0
    # -- data
    pack_tokens: int = 8192  # tokens in a pack, the loader's unit; a step is several packs
    max_docs_per_pack: int = 64  # maximum number of documents in a pack; the rest of it is padding
    tokens: int = 340_000_000  # length of the run in tokens
    max_epochs: int = 1  # maximum number of passes over the text
    val_tokens: int = 10_485_760  # tokens of validation text to score
    # -- stages
    stages: tuple = ()  # fraction, packs and lr_mult of each, e.g. (0.5,8,1.0),(0.5,16,1.4); none: stage_rule
    min_packs: int = 8  # packs in the first stage of stage_rule; the number of GPUs must divide it
    # -- optimizer: base rates, multiplied by the parameter table and the schedule
    muon_lr: float = 0.023  # learning rate of matrices
    adam_lr: float = 0.006  # learning rate of everything else
    table_decay: float = 0.015  # weight decay of value and n-gram embeddings; short runs want more
    muon_beta2: float = 0.9  # decay of NorMuon's second moment
    adam_eps: float = 1e-10  # epsilon of Adam and RMSProp (record 20)
    momentum: tuple = (0.85, 0.95, 300, 50)  # NorMuon's: low, high, steps of rise (<= 1/3 of all) and of fall (<= 1/10)
    cooldown: float = 0.6  # fraction of the run over which learning rates fall
    lr_floor: float = 0.2  # learning rates at the end, as a fraction of the base rates
    average: float = 0.2  # last fraction of the run, over which weights are averaged (modded-nanogpt PR 360)
    # -- how a run is executed, no part of the recipe
    data: str = "data/shards/climbmix"  # dataset directory
    seed: int = 0  # seed of the first weights
    eval_every: int = 250  # steps between validations; 0: only at the end
    save_every: int = 0  # steps between checkpoints; 0: only at the end, -1: only if it is stopped
    log_every: int = 10  # steps between lines of the log
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; the best is kept as well
    micro_batch_tokens: int = 0  # tokens that a GPU processes at once; 0: chosen by its free memory
    attention: str = "auto"  # auto, triton, fa3 or sdpa
    dtype: str = "auto"  # auto, bfloat16, float16 or float32
    compile: bool = True  # torch.compile on a GPU: a slower start, faster steps
    cuda_graphs: bool = True  # replay of compiled steps: faster, but more memory
    wandb: str = ""  # name of the run on Weights & Biases; empty: not logged there

    def __post_init__(self):
        check_ranges(self)

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim

    @property
    def attention_layers(self) -> tuple:
        return tuple(i for i in range(self.num_layers) if i not in self.no_attention_layers)

    @property
    def trigram_rows(self) -> int:
        return int(self.bigram_rows * self.trigram_ratio)

    @property
    def padded_vocab(self) -> int:
        """Tensor cores and the loss kernel like multiples of 64."""
        return math.ceil(self.vocab_size / 64) * 64

    @functools.cached_property
    def stage_table(self) -> tuple[Stage, ...]:
        return tuple(Stage(*row) for row in self.stages or stage_rule(self))

    @property
    def step_tokens(self) -> float:
        """Tokens in a step, the mean over all steps."""
        return sum(s.fraction * s.packs for s in self.stage_table) * self.pack_tokens

    @property
    def num_steps(self) -> int:
        return max(1, round(self.tokens / self.step_tokens))


# The range of each number above, both ends included; whole numbers unless an end has a point.
# A tuple has a range for each entry, or in brackets one for all of them.
RANGES = {
    "num_layers": (1, 1000),
    "no_attention_layers long_layers key_offset_layers value_embed_layers": [(0, 999)],
    "paired_layers exclusive_layers gated_layers": [(0, 999)],
    "width head_dim mlp_width gate_width vocab_size": (1, 2**16),
    "max_seq_len window_short window_long pack_tokens max_docs_per_pack min_packs": (1, 2**20),
    "shared_input_from bigram_rows mudd_width micro_batch_tokens seed eval_every": (0, 2**31),
    "tokens max_epochs val_tokens log_every keep_checkpoints": (1, 10**18),
    "save_every": (-1, 2**31),
    "muon_lr adam_lr prefix_weight init_qkv init_o init_up trigram_ratio": (0.0, 1000.0),
    "mtp_weights": [(0.0, 1000.0)],
    "cooldown lr_floor average table_decay": (0.0, 1.0),
    "mtp_until attention_scale": (0.001, 1.0),
    "rotary_base": (1.0, 1e9),
    "adam_eps": (1e-30, 1.0),
    "muon_beta2": (0.0, 0.9999),
    "momentum": ((0.0, 0.9999), (0.0, 0.9999), (0, 10**9), (0, 10**9)),
    "softcap": ((0.1, 1000.0), (0.0, 1000.0), (0.1, 1000.0)),
    "stages": [((1e-9, 1.0), (1, 10**6), (0.0, 1000.0))],
}


def stage_rule(config: Config) -> tuple:
    """Rows of the stage table: the batch doubles whenever the tokens seen have quadrupled.

    A batch of B tokens is used until B ** 2 / 89 tokens were seen: 65,536 until 48 M, 131,072 until 193 M,
    262,144 until 772 M. Rates alone grow, with the square root of the batch (cf. arXiv 2205.10287).
    """
    rows = []
    seen = 0.0
    packs = config.min_packs
    while seen < config.tokens:
        batch = packs * config.pack_tokens
        until = min(batch**2 / 89, config.tokens)
        steps = (until - seen) / batch
        rows.append((steps, packs, round((batch / 65536) ** 0.5, 3)))
        seen = until
        packs *= 2
    total = sum(steps for steps, _, _ in rows)
    return tuple((steps / total, packs, rate) for steps, packs, rate in rows)


@dataclass(frozen=True)
class UpdateRule:
    """How one parameter is updated: a row of the parameter table."""

    # "normuon" for matrices, "rmsprop" for large tables, else "adam"; see Optimizer.update()
    optimizer: str
    lr_mult: float  # times Config.muon_lr or Config.adam_lr, times lr_multiplier()
    betas: tuple = ()  # two for Adam, one for RMSProp
    # p -= lr * weight_decay * lr_multiplier() * p where the update shrinks p too (cautious, arXiv 2510.12402).
    # lr holds lr_multiplier() as well, so decay falls with its square.
    weight_decay: float = 0.0
    rows: int = 0  # NorMuon: rows of one orthogonalised matrix; 0: the bank's own
    odd_mult: float = 1.0  # NorMuon: factor on lr_mult of an MLP's second matrix (records 36, 48)
    sparse: bool = False  # RMSProp: the gradient holds only the rows that this step looked up
    average: float = 0.0  # fraction of the average in the final weights


def parameter_table(config: Config) -> dict[str, UpdateRule]:
    """The rule of each parameter, in the order of communication; after record 89, but for RMSProp."""
    head_pair = min(2, config.num_heads) * config.head_dim  # record 80: Q and K per pair of heads
    head = UpdateRule("adam", 1.00, (0.50, 0.95), 0.0060, average=0.65)
    tables = config.table_decay
    return {
        # name                       optimizer  lr_mult  betas         weight_decay  rows
        "qk_bank":        UpdateRule("normuon",   1.00,  (),           0.0276, head_pair, average=0.55),
        "vo_bank":        UpdateRule("normuon",   1.00,  (),           0.0276, average=0.35),
        "mlp_bank":       UpdateRule("normuon",   1.00,  (),           0.0276, odd_mult=2.0, average=0.35),
        "gate_bank":      UpdateRule("normuon",   1.00,  (),           0.0276, average=0.35),  # swiglu
        "scalars":        UpdateRule("adam",      5.00,  (0.90, 0.99)),
        "value_gate":     UpdateRule("adam",      1.00,  (0.90, 0.99)),
        "output_gate":    UpdateRule("adam",      1.00,  (0.90, 0.99)),
        "exclusion":      UpdateRule("adam",      1.00,  (0.90, 0.99)),
        "mix_in":         UpdateRule("adam",      0.25,  (0.90, 0.99)),
        "mix_out":        UpdateRule("adam",      0.025, (0.90, 0.99)),
        "embed":          head if config.tied else UpdateRule("adam", 15.00, (0.80, 0.95), 0.0010),
        "unembed":        head,
        "bigram_embed":   UpdateRule("rmsprop",  60.00,  (0.95,),      tables, sparse=True),
        "trigram_embed":  UpdateRule("rmsprop",  60.00,  (0.95,),      tables, sparse=True),
        "trigram_proj":   UpdateRule("adam",      1.00,  (0.90, 0.99)),
        "value_embed":    UpdateRule("rmsprop",  60.00,  (0.95,),      tables, average=1.0),
    }  # fmt: skip


# Learned scalars: a row for each name, a column for each layer. Here are the initial values of the first
# and the last layer (they differ in train_medium.py); others lie on a line between them.
SCALARS = {
    "resid_attn": (1.1**0.5, 1.1**0.5),  # factor of the residual stream before attention is added
    "resid_mlp": (1.1**0.5, 1.1**0.5),  # and before the MLP is added
    "scale_v": (0.5, 0.5),  # factors of matrices
    "scale_o": (1.0, 1.0),
    "scale_down": (1.0, 1.0),
    "share_ngram": (0.05, 0.05),  # of the n-gram embedding that is added to the stream
    "share_x0": (0.0, 0.0),  # of the input, with x0_injection
}


def micro_batch_limit(config: Config, free: int) -> float:
    """The most tokens in a micro-batch that fit into `free` bytes of GPU memory and help speed."""
    # What is kept for the backward, in bytes; the compiler keeps less.
    layer = 24 * config.width + 4 * config.mlp_width
    a_token = 2 * (config.num_layers * layer + 4 * config.padded_vocab)
    if config.compile and bf16_is_native():
        a_token *= 0.4
    # Dense gradients; those of n-gram tables are sparse.
    tables = config.padded_vocab * (1 + len(config.value_embed_layers))
    gradients = 20 * config.width * tables
    return min(65536, (0.85 * free - gradients) / a_token)


# >>> shared: sections_2_to_12
# ===============================================================================
# 2. SCHEDULE -- pure functions of (config, step)


def stage_index(config: Config, step: int) -> int:
    """Which row of the stage table a step belongs to."""
    ends = itertools.accumulate(stage.fraction for stage in config.stage_table[:-1])
    return sum(step / config.num_steps >= end - 1e-9 for end in ends)  # how many stages are over


def lr_multiplier(config: Config, step: int) -> float:
    """The stage's factor; over the last `cooldown` of the run it is blended linearly into lr_floor.

    There is no warm-up. The rate jumps up where a stage begins, even in the cool-down.
    """
    mult = config.stage_table[stage_index(config, step)].lr_mult
    if not config.cooldown:
        return mult
    fall = (step / config.num_steps - (1 - config.cooldown)) / config.cooldown
    fall = min(max(fall, 0.0), 1.0)
    return mult * (1 - fall) + config.lr_floor * fall


def muon_momentum(config: Config, step: int) -> float:
    """Rises over the first steps, while gradients change quickly, and falls over the last ones."""
    low, high, warm, cool = config.momentum
    warm = min(warm, config.num_steps // 3)
    cool = min(cool, config.num_steps // 10)
    rise = min(1.0, step / warm) if warm else 1.0
    fall = min(1.0, (config.num_steps - step) / cool) if cool else 1.0
    return low + (high - low) * min(rise, fall)


def loss_weights(config: Config, step: int) -> list[float]:
    """Weights in the loss of the next tokens and of the prefix. All but the first fade out."""
    fade = max(0.0, 1 - step / (config.num_steps * config.mtp_until))
    weights = [config.mtp_weights[0], *(weight * fade for weight in config.mtp_weights[1:])]
    if config.prefix_weight:
        # Full for a third of the run, none after two thirds.
        weights.append(config.prefix_weight * min(1.0, max(0.0, 2 - 3 * step / config.num_steps)))
    return weights


# ===============================================================================
# 3. TRAINING -- the outline of a run, the loop, one step, and how a CUDA graph replays it
# Four objects carry a run: `job` is what it trains on and how (Pretraining), `state` what a step changes
# (TrainState), `progress` what else a checkpoint keeps (Progress), `run` all of these (Run).


@dataclass
class Ranks:
    """This process among all that torchrun started; one process has world 1."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value) -> list:
        """The value of every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

    reader_state: dict | None = None  # where the reader is
    tokens: int = 0
    train_seconds: float = 0.0
    flops: float = 0.0
    scores: dict | None = None  # of the weights of this very step, if they were evaluated


@dataclass
class Run:
    """A run under way."""

    job: Pretraining
    args: argparse.Namespace
    ranks: Ranks
    run_dir: Path
    lock: object  # of run_dir, held while this object exists
    machine: dict
    log: Log
    progress: Progress = field(default_factory=Progress)
    state: TrainState | None = None
    loader: PackLoader | None = None
    peak_flops: float = math.inf  # FLOP/s of one device
    stopper: Stopper | None = None
    # Since the last line of the log:
    clock: float = 0.0  # when training seconds were counted
    logged: Progress | None = None
    losses: list[Tensor] = field(default_factory=list)  # 0-D, on the device
    batch: Batch | None = None  # of the last step


def train(job: Pretraining, args: argparse.Namespace) -> dict:
    """The outline of a run; returns the result that is printed last."""
    # The data comes first: nothing is written before we know that there is enough of it.
    ranks = start_ranks()
    job.check(ranks)
    run_dir, lock = prepare_run_dir(job, args, ranks)
    run = Run(job, args, ranks, run_dir, lock, describe_machine(ranks), Log(run_dir, ranks))
    config = job.config
    if args.resume:
        check_same_run(run)
    if config.wandb and ranks.is_main:
        run.log.start_wandb(config.wandb, dataclasses.asdict(config) | {"machine": run.machine})

    run.log.say(f"{Path(__file__).name} on {ranks.world} x {run.machine['device']}")
    run.log.say(f"data: {config.data}, vocabulary {config.vocab_size:,}, {job.note}")
    run.log.say(f"run: {run_dir}, {config.num_steps:,} steps, {config.tokens:,} tokens")
    run.state = job.build(ranks, run.log.say)

    # Initial weights, or those of another run; a resumed run starts from its newest checkpoint.
    has_learned = False
    if args.resume:
        resume(run)
    else:
        has_learned = job.start_weights(run.state)
        run.log.rewind(-1)  # what a start without a checkpoint has left
        write_description(run)

    prepare_loop(run)
    if has_learned:
        evaluate(run)
    run_steps(run)
    return finish(run)


def run_steps(run: Run) -> None:
    """The loop: steps until the end of the run or a signal, and what is due between them."""
    config = run.job.config
    state = run.state
    progress = run.progress
    run.clock = time.perf_counter()

    while state.step < config.num_steps:
        # The step itself. The device works on it while the host continues.
        run.batch = run.loader.next()
        run.losses.append(run.job.step(state, run.batch))
        sample_average(state)
        progress.reader_state = run.batch.reader_state
        progress.tokens += run.batch.total_tokens
        if state.step == config.num_steps:
            return  # finish() logs, evaluates and saves

        # What is due before the next step? All of it waits for the device.
        stop = run.stopper.asked(state.step)
        eval_now = is_due(state.step, config.eval_every)
        save_now = stop or is_due(state.step, config.save_every)
        if eval_now or save_now or state.step == 1 or is_due(state.step, config.log_every):
            log_steps(run)
        if eval_now:
            progress.scores = evaluate(run)
        if save_now:
            save(run)
        if stop:
            what_next = f"continue with `--resume --run-dir {run.run_dir}`"
            raise UserError(f"stopped by a signal at step {state.step}, saved; {what_next}")
        if eval_now or save_now:
            progress.scores = None  # the next step changes the weights
            run.ranks.sync()
            run.clock = time.perf_counter()  # validation and saving are not training time


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# -- one step


@dataclass
class TrainState:
    """What a training step changes, and what it needs to do so."""

    config: Config
    ranks: Ranks
    model: GPT
    forward: Callable  # the model, compiled where that pays
    optimizer: Optimizer
    micro_packs: int  # most packs in a micro-batch
    loss_scale: float = 1.0  # factor on all gradients, 4096 in fp16; updates do not depend on it, but for epsilons
    dynamic_tokens: bool = False  # stages have micro-batches of different sizes
    step: int = 0
    averaged_steps: int = 0  # how many steps' weights each average is made of, see sample_average
    graphs: dict[tuple, Graph] | None = None  # for replay(); None: the host launches every kernel


def train_step(state: TrainState, batch: Batch) -> Tensor:
    """One step; returns a 0-D tensor, which summed over ranks is the mean nats per target."""
    config = state.config
    if state.model.loss_weights.numel() > 1:  # an encoder has one, and no mtp_weights
        weights = torch.tensor(loss_weights(config, state.step))
        state.model.loss_weights.copy_(weights, non_blocking=True)

    # Forward and backward of all micro-batches.
    loss = torch.zeros((), device=state.ranks.device)
    gradients = []  # of each micro-batch, a list over n-gram tables
    targets = max(batch.total_targets, 1)
    # A tensor, as a CUDA graph would repeat the number of the first step.
    factor = torch.full_like(loss, state.loss_scale / targets)
    for i, micro_batch in enumerate(batch.micro_batches(state.micro_packs, state.ranks.device)):
        if state.graphs is None:
            nats, row_gradients = micro_step(state, micro_batch, factor)
        else:
            nats, row_gradients = replay(state, micro_batch, factor, is_first=(i == 0))
        loss += nats / targets
        gradients.append(row_gradients)
    gradients_of_tables = list(zip(*gradients, strict=True))
    set_sparse_gradients(state.model, gradients_of_tables)

    state.optimizer.step(lr_multiplier(config, state.step), muon_momentum(config, state.step))
    state.step += 1
    return loss


class RowGradients(NamedTuple):
    """Gradients of the rows of an n-gram table that the tokens of a micro-batch have looked up."""

    index_T: Tensor  # int64, which row
    grad_TC: Tensor


def micro_step(state, micro_batch: MicroBatch, factor, token_weight_T=None) -> tuple[Tensor, list[RowGradients]]:
    """Forward, and backward of the loss times a 0-D factor; gradients add up in .grad.

    A gradient of a whole n-gram table would be mostly zeros, and slow to write. So its rows are looked up
    here and passed to the model, and the gradient has one row for each token.

    Args:    token_weight_T factor on the loss of each target
    Returns: the sum of nats, 0-D; the gradients of the rows of each n-gram table
    """
    # The model gets these rows, as leaf tensors, in place of its tables. It hashes again, for the signs.
    tables = ngram_tables(state.model)
    indices = []
    if tables:
        tokens_T = micro_batch.tokens_T
        hashes = state.model.hash_ngrams(tokens_T, previous_tokens(tokens_T), micro_batch.positions_T)
        indices = [index_T for index_T, _ in hashes]
    rows = []
    for table, index_T in zip(tables, indices, strict=True):
        rows.append(table.detach()[index_T].requires_grad_())
    if state.dynamic_tokens:
        # One compiled model serves all sizes as fast as one for each would, and compiles faster.
        for tensor in (*micro_batch.tensors(), *rows):
            torch._dynamo.mark_dynamic(tensor, 0)
    options = {"ngram_rows": rows} if rows else {}  # only what is there: an encoder takes neither
    if token_weight_T is not None:
        options["token_weight_T"] = token_weight_T
    loss, nats_T = state.forward(*micro_batch, **options)
    (loss * factor).backward()

    row_gradients = []
    for index_T, row_TC in zip(indices, rows, strict=True):
        row_gradients.append(RowGradients(index_T, row_TC.grad))
    return nats_T.sum(), row_gradients


def ngram_tables(model: nn.Module) -> list[Tensor]:
    """The tables of token pairs (R, D) and of triples (R, C), as far as a model has them."""
    names = ("bigram_embed", "trigram_embed")
    return [getattr(model, name) for name in names if hasattr(model, name)]


def set_sparse_gradients(model: nn.Module, gradients: list[list[RowGradients]]) -> None:
    """The gradients of the n-gram tables, as sparse tensors with a row for each token of the step.

    Args: gradients of each table, a list over micro-batches
    """
    for table, parts in zip(ngram_tables(model), gradients, strict=True):
        index, grad = parts[0]
        if len(parts) > 1:  # cat would copy a single one
            index = torch.cat([part.index_T for part in parts])
            grad = torch.cat([part.grad_TC for part in parts])
        # A check would wait for the device.
        with torch.sparse.check_sparse_tensor_invariants(False):
            table.grad = torch.sparse_coo_tensor(index[None], grad, table.shape)


# -- CUDA graphs: one call launches all kernels of a small step, which one by one take longer to launch
# than to run. A graph always reads and writes the same memory, so its inputs are copied there. The first
# micro-batch of a step needs a graph that writes gradients, later ones a graph that adds to them.


@dataclass
class Graph:
    """micro_step as a CUDA graph, with the tensors that it reads and writes."""

    cuda: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # those of the micro-batch, then the factor
    grads: list[Tensor | None]  # of each parameter
    nats: Tensor
    row_gradients: list[RowGradients]


def replay(state, micro_batch: MicroBatch, factor, is_first: bool) -> tuple[Tensor, list[RowGradients]]:
    """micro_step as one graph, from the second call with the same shapes on.

    Args: is_first whether this micro-batch is the first of its step
    """
    inputs = [*micro_batch.tensors(), factor]
    key = (is_first, *(t.shape for t in inputs))
    if key not in state.graphs:
        return capture(state, key, micro_batch, factor, is_first)

    graph = state.graphs[key]
    for static, given in zip(graph.inputs, inputs, strict=True):
        static.copy_(given)
    graph.cuda.replay()
    for param, grad in zip(state.model.parameters(), graph.grads, strict=True):
        param.grad = grad
    # The next replay overwrites what the graph returns; nats are added up before it.
    return graph.nats, [RowGradients(index.clone(), grad.clone()) for index, grad in graph.row_gradients]


def capture(state, key, micro_batch: MicroBatch, factor, is_first) -> tuple[Tensor, list[RowGradients]]:
    """micro_step, and then a graph of it for the next calls."""
    # This micro-batch runs kernel by kernel, which also compiles the model if it is not yet.
    result = micro_step(state, micro_batch, factor)
    params = list(state.model.parameters())
    grads = [param.grad for param in params]

    # A capture records what is launched, and computes nothing. Where .grad is None, the graph writes
    # gradients into new tensors of its own; else it adds to those that are there, of the first graph.
    if is_first:
        state.model.zero_grad(set_to_none=True)
    inputs = [t.clone() for t in (*micro_batch.tensors(), factor)]
    static_batch = MicroBatch(*inputs[:-1], micro_batch.max_doc)
    # All graphs share one pool of memory, because one runs at a time.
    pool = next((graph.cuda.pool() for graph in state.graphs.values()), None)
    cuda = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda, pool=pool, capture_error_mode="thread_local"):
        nats, row_gradients = micro_step(state, static_batch, inputs[-1])
    static_grads = [param.grad for param in params]
    state.graphs[key] = Graph(cuda, inputs, static_grads, nats, row_gradients)

    # .grad is now the graph's own tensors, so copy this micro-batch's gradients into them.
    if is_first:
        for static, grad in zip(static_grads, grads, strict=True):
            if static is not None:
                static.copy_(grad)
    return result


# ===============================================================================
# 4. MODEL -- one trunk; attention is passed in, so training and cached decoding share every line
# Matrices of equal shape form a bank: NorMuon works on whole banks, and ranks own slices of them. Everything
# except attention and the ids of the two tokens before is per token: the KV cache stays small.


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last axis, without a gain (nothing to learn, nothing to decay)."""
    return F.rms_norm(x, (x.size(-1),))


def scale_fp32(scalar: Tensor, x: Tensor) -> Tensor:
    """A learned scalar (fp32, 0-D) times x, in the dtype of x; eager torch would round it first."""
    if torch.compiler.is_compiling():
        return scalar * x
    return (scalar.view(1) * x).to(x.dtype)


def rotary_table(config: Config) -> Tensor:
    """Cosines and sines for rotate(), fp32 (2, max_seq_len, K).

        quarter of a head       0     1     2     3
        cosines of angles      cos   cos    1     1      pairs lie in quarters 0 and 1; 2 and 3 do not
        sines                  sin  -sin    0     0      turn, or with rotary_full hold pairs too
    """
    K = config.head_dim
    slowest = 1 / config.rotary_base  # radians a token
    frequencies = np.append(slowest ** np.linspace(0, 1, K // 4), np.zeros(K // 4))
    if config.rotary_full:
        frequencies = slowest ** (np.arange(K // 2) / (K // 2))
    angles = torch.outer(torch.arange(config.max_seq_len), torch.tensor(frequencies.tolist()))
    first, second = angles.chunk(2, 1)
    cosines = torch.cat((first.cos(), first.cos(), second.cos(), second.cos()), 1)
    sines = torch.cat((first.sin(), -first.sin(), second.sin(), -second.sin()), 1)
    return torch.stack((cosines, sines))


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding of heads (T, H, K); cos, sin (T, 1, K) by rotary_table()."""
    # Swaps quarters. Unlike cat(), flip() keeps the compiled kernel free of branches.
    swapped = x_THK.reshape(*x_THK.shape[:-1], 2, 2, -1).flip(-2).flatten(-3)
    return x_THK * cos_TK + swapped * sin_TK


def norm_rotate(qkv: Tensor, cos_TK: Tensor, sin_TK: Tensor, q_factor: Tensor):
    """qkv (T, 3, H, K) -> q, k, v (T, H, K): q, k normalised and rotated, q times q_factor."""
    q, k, v = qkv.unbind(1)
    q = rotate(scale_fp32(q_factor, norm(q)), cos_TK, sin_TK)
    return q, rotate(norm(k), cos_TK, sin_TK), v


def project_qkv(normed_TD, w, cos_TK, sin_TK, q_factor, w8: Weight8 | None = None) -> tuple:
    """norm_rotate of x w^T, for an x from norm() and w (3 H K, D); with w8 in fp8, see QKV8."""
    if w8 is not None:
        return QKV8.apply(normed_TD, w, cos_TK, sin_TK, q_factor, *w8)
    # Validation and decoding run this outside of a compiled model.
    eager = normed_TD.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    rotated = compile_once(norm_rotate) if eager and triton is not None else norm_rotate
    qkv = F.linear(normed_TD, w).view(len(normed_TD), 3, -1, cos_TK.size(-1))
    return rotated(qkv, cos_TK, sin_TK, q_factor)


def softcap(x: Tensor, cap: tuple) -> Tensor:
    """Bounded logits, asymmetric as most are negative; cap (a, b, c), or () for x itself."""
    if not cap:
        return x
    a, b, c = cap
    return a * torch.sigmoid((x + b) / c)


def head_gates(x_TD: Tensor, weight_HG: Tensor) -> Tensor:
    """A factor between 0 and 2 for each head, (T, H), from the first G channels; 1 at the start."""
    x_TG = x_TD[:, : weight_HG.size(-1)]
    if torch.compiler.is_compiling():  # the same product, without a kernel of its own
        return HeadGates.apply(x_TG, weight_HG)
    return 2 * torch.sigmoid(F.linear(x_TG, weight_HG))


class HeadGates(torch.autograd.Function):
    """head_gates for the compiler: sums of a few products, which join the kernels around them."""

    @staticmethod
    def forward(ctx, x, weight):
        x = x.clone()  # else all channels of its rows are kept for the backward
        gates = 2 * torch.sigmoid((x[:, None] * weight).sum(-1))
        ctx.save_for_backward(x, weight, gates)
        return gates

    @staticmethod
    def backward(ctx, g):
        # Matrix products, which are faster here than sums.
        x, weight, gates = ctx.saved_tensors
        g = g * gates * (1 - gates / 2)
        return g @ weight, g.T @ x


def exclude_own_value(y_THK: Tensor, v_THK: Tensor, strength_H: Tensor) -> Tensor:
    """y less tanh(strength) of its projection on the token's own value; strength fp32."""
    y = y_THK.float()
    v = v_THK.float()
    projection = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-8)
    return (y - torch.tanh(strength_H)[:, None] * projection * v).to(y_THK.dtype)


class Stored(torch.autograd.Function):
    """x, which a compiled model then computes once; else each reader would compute it anew."""

    @staticmethod
    def forward(ctx, x):
        return x.as_strided(x.shape, x.stride())  # a view that needs x in memory

    @staticmethod
    def backward(ctx, g):
        return g


def linear8(x_TK: Tensor, w_NK: Tensor, w8: Weight8 | None = None) -> Tensor:
    """F.linear(x, w), (T, N) in the dtype of x; with w8 in fp8."""
    return F.linear(x_TK, w_NK) if w8 is None else Linear8.apply(x_TK, w_NK, *w8)


def mlp_relu2(normed_TD: Tensor, up_FD: Tensor, down_FD: Tensor, up8=None, down8=None) -> Tensor:
    """relu(x up^T)^2 down, (T, D), for an x from norm(); with up8 and down8 in fp8, see MLP8."""
    if up8 is not None:
        return MLP8.apply(normed_TD, up_FD, down_FD, *up8, *down8)
    return F.relu(normed_TD @ up_FD.T).square() @ down_FD


class LayerWeights(NamedTuple):
    """The matrices of one layer as they are used; None for what a layer lacks.

    Products in fp8 read copies, whose names end in 8; the matrices receive the gradients.
    """

    up: Tensor  # (F, D), or (2 F, D) with the gate first
    down: Tensor  # (F, D)
    up8: Weight8 | None
    down8: Weight8 | None
    qkv: Tensor | None = None  # (3 D, D)
    o: Tensor | None = None  # (D, D)
    qkv8: Weight8 | None = None
    o8: Weight8 | None = None


class Inputs(NamedTuple):
    """What every layer reads in addition to the residual stream."""

    x0: Tensor  # (T, D) normalised embedding
    ngram: Tensor | None  # (T, D) embedding of the last two and three tokens
    value_embeds: tuple | None  # E value embeddings (T, D)
    cos: Tensor  # (T, 1, K)
    sin: Tensor  # (T, 1, K)
    scalar: dict[str, Tensor]  # rows of the learned scalars, fp32 (L,)
    shared: Tensor | None = None  # (T, D) input of attention from shared_input_from on (record 77)


SIGN_ROWS = 8192  # 500 to 15,000 are equally good in record 83
TRIGRAM_WIDTH = 128


class GPT(nn.Module):
    """Decoder-only transformer. parameter_table lists the parameters; all others are buffers."""

    def __init__(self, config: Config, device="cpu", dtype=torch.float32):
        """Weights are set later, by init_weights() or load_state_dict(), and so is attention."""
        super().__init__()
        self.config = c = config
        D = c.width
        V = c.padded_vocab
        A = len(c.attention_layers)
        L = c.num_layers
        E = len(c.value_embed_layers)

        def weight(*shape, dtype=dtype):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.embed = weight(V, D)  # if tied also the output matrix
        if not c.tied:
            self.unembed = weight(V, D)
        self.qk_bank = weight(A, 2 * D, D)
        self.vo_bank = weight(2 * A, D, D)  # v0, o0, v1, o1, ...
        self.mlp_bank = weight(2 * L, c.mlp_width, D)  # up0, down0, ...; down is (F, D) like up
        if c.swiglu:
            self.gate_bank = weight(L, c.mlp_width, D)
        self.scalars = weight(len(SCALARS), L, dtype=torch.float32)
        if E:
            self.value_embed = weight(E * V, D)
            self.value_gate = weight(E, c.num_heads, c.gate_width)
        if c.gated_layers:
            self.output_gate = weight(len(c.gated_layers), c.num_heads, c.gate_width)
        if c.exclusive_layers:
            self.exclusion = weight(len(c.exclusive_layers), c.num_heads, dtype=torch.float32)
        if c.bigram_rows:
            self.bigram_embed = weight(c.bigram_rows, D)
            self.register_buffer("bigram_signs", torch.empty(SIGN_ROWS, D, device=device, dtype=dtype))
        if c.trigram_rows:
            self.trigram_embed = weight(c.trigram_rows, min(TRIGRAM_WIDTH, D))
            self.trigram_proj = weight(D, min(TRIGRAM_WIDTH, D))
        if c.mudd_width:
            self.mix_in = weight(c.mudd_width, D)
            self.mix_out = weight(4, c.mudd_width)

        # Numbers that change are tensors, as others would recompile the model.
        def buffer(name: str, value: Tensor) -> None:
            self.register_buffer(name, value.to(device), persistent=False)

        buffer("rotary", rotary_table(c))
        buffer("attention_scale", torch.tensor(c.attention_scale))
        buffer("loss_weights", torch.tensor(loss_weights(c, 0)))
        buffer("prefix_ids", torch.full((V,), -1, dtype=torch.int32))  # set by Pretraining.build
        self.windows = (c.window_short, c.window_long)
        self.softcap = c.softcap
        self.fp8_products = fp8_products(c, self.embed)
        self.attention: Callable | None = None  # a backend of section 11, set by build_state()

    @property
    def head(self) -> Tensor:
        """The output matrix (V, D)."""
        return self.embed if self.config.tied else self.unembed

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """All initial weights. MLPs return 0 at first, attention only where init_o is 0."""
        c = self.config
        rng = torch.Generator(device=self.embed.device).manual_seed(seed)
        bound = math.sqrt(3 / c.width)  # uniform, standard deviation 1 / sqrt(D)
        self.head.normal_(0, 0.005, generator=rng)  # if tied also the input, which is normalised
        if not c.tied:
            self.embed.normal_(0, 0.8, generator=rng)
        self.qk_bank.uniform_(-c.init_qkv * bound, c.init_qkv * bound, generator=rng)
        self.vo_bank.uniform_(-c.init_qkv * bound, c.init_qkv * bound, generator=rng)
        self.vo_bank[1::2] *= c.init_o
        self.mlp_bank.uniform_(-c.init_up * bound, c.init_up * bound, generator=rng)
        self.mlp_bank[1::2].zero_()
        if c.swiglu:
            self.gate_bank.uniform_(-c.init_up * bound, c.init_up * bound, generator=rng)
        for name in ("value_gate", "output_gate", "exclusion", "bigram_embed", "trigram_embed", "mix_out"):
            if hasattr(self, name):
                getattr(self, name).zero_()
        if c.value_embed_layers:
            self.value_embed.normal_(0, 0.01, generator=rng)
        if c.mudd_width:
            self.mix_in.uniform_(-bound, bound, generator=rng)
            # The last layer wants the input in its values; some seeds find that late or never.
            self.mix_out[0] = 0.01
        if c.trigram_rows:
            self.trigram_proj.normal_(0, self.trigram_proj.size(1) ** -0.5, generator=rng)
        for row, (first, last) in zip(self.scalars, SCALARS.values(), strict=True):
            row.copy_(torch.linspace(first, last, c.num_layers))
        if c.bigram_rows:
            # Saved with the weights, so other versions of torch may generate other signs.
            rng = torch.Generator().manual_seed(0)
            bits = torch.randint(0, 2, self.bigram_signs.shape, generator=rng)
            self.bigram_signs.copy_(bits * 2 - 1)

    def forward(
        self, tokens_T, targets_T, positions_T, cu_seqlens, max_doc: int,
        token_weight_T=None, ngram_rows=None,
    ) -> tuple[Tensor, Tensor] | Tensor:  # fmt: skip
        """Packed documents, each blind to the others.

        Args:    tokens_T, targets_T, positions_T int (T,), target -1 is ignored; cu_seqlens int32
                 (G + 1,) borders of documents, repeats are padding; max_doc bound on their length,
                 a python int; token_weight_T fp32 (T,) factor on the loss of each target; ngram_rows
                 as for the trunk
        Returns: the sum of the loss, to be differentiated, and the nats of each target, fp32 (T,),
                 detached, 0 where ignored; logits (T, V) if targets_T is None
        """
        c = self.config
        first_T11 = (positions_T == 0)[:, None, None]
        # Prepared once for all layers: attend_heads(q, k, v, i) uses windows[i], see section 11.
        attend_heads = self.attention(self.windows, positions_T, cu_seqlens, max_doc)
        if c.paired_layers:  # two rows a token: heads h and h + H / 2 share a softmax
            pair_positions = torch.stack((2 * positions_T, 2 * positions_T + 1), 1).flatten()
            attend_pairs = self.attention((2 * c.window_short,), pair_positions, 2 * cu_seqlens, 2 * max_doc)

        def attend(layer, q, k, v):
            if layer in c.key_offset_layers:
                k = self.offset_keys(k, torch.cat((k[:1], k[:-1])), first_T11)
            if layer in c.paired_layers:
                q2, k2, v2 = (x.reshape(2 * len(x), -1, c.head_dim) for x in (q, k, v))
                return attend_pairs(q2, k2, v2, 0).reshape(q.shape)
            return attend_heads(q, k, v, int(layer in c.long_layers))

        previous_2T = previous_tokens(tokens_T)
        hidden_TD = self.trunk(tokens_T, previous_2T, positions_T, attend, ngram_rows=ngram_rows)
        if targets_T is None:
            return self.logits(hidden_TD)

        # Validation counts the next token alone; training adds more targets with weights.
        training = torch.is_grad_enabled()
        targets_NT = self.all_targets(targets_T, positions_T) if training else targets_T[None]
        target_weights = self.loss_weights if training else None
        fp8 = training and "head" in self.fp8_products
        return linear_cross_entropy(
            hidden_TD, self.head, targets_NT, self.softcap, target_weights, token_weight_T, fp8=fp8
        )

    def all_targets(self, targets_T: Tensor, positions_T: Tensor) -> Tensor:
        """The next tokens and the prefix: (N, T), a row for each of loss_weights, -1 for none."""
        targets = [targets_T]
        for ahead in range(1, len(self.config.mtp_weights)):
            same_document = positions_T.roll(-ahead) == positions_T + ahead
            targets.append(torch.where(same_document, targets_T.roll(-ahead), -1))
        if self.config.prefix_weight:
            prefix_T = self.prefix_ids[targets_T.clamp(min=0)].to(targets_T.dtype)
            targets.append(torch.where(targets_T < 0, -1, prefix_T))
        return torch.stack(targets)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Softcapped logits (T, V), fp32, of what the trunk returned."""
        return softcap(F.linear(hidden_TD, self.head).float(), self.softcap)

    @staticmethod
    def offset_keys(k_THK: Tensor, previous_THK: Tensor, first_T11: Tensor) -> Tensor:
        """The unrotated half of each key is the previous token's: what followed it? (record 49)"""
        K = k_THK.size(-1)
        unrotated = torch.arange(K, device=k_THK.device) >= K // 2
        return torch.where(unrotated & ~first_T11, previous_THK, k_THK)

    def trunk(self, tokens_T, previous_2T, positions_T, attend, weights=None, ngram_rows=None) -> Tensor:
        """Everything between token ids and the head.

        Args:    int tokens_T; previous_2T the token before in the same document, and the one before
                 that (any value where there is none); positions_T in the document;
                 attend(layer, q, k, v) -> y, all (T, H, K), q scaled; weights by layer_weights();
                 ngram_rows those of ngram_tables(), looked up here if None
        Returns: normalised hidden state (T, D)
        """
        c = self.config
        training = torch.is_grad_enabled()
        if weights is None:
            in_fp8 = training and len(tokens_T) % 16 == 0
            weights = self.layer_weights(self.fp8_products if in_fp8 else ())
        inputs = self.embed_inputs(tokens_T, previous_2T, positions_T, ngram_rows)

        x = inputs.x0
        for layer, w in enumerate(weights):
            # Before the last layer, each token mixes input and stream (see mix).
            to_values = None
            if c.mudd_width and layer == c.num_layers - 1:
                to_values, to_stream = self.mix(x, inputs.x0)
                x = x + to_stream
            if layer == c.shared_input_from:
                inputs = inputs._replace(shared=norm(x))
            arguments = (x, to_values, layer, w, inputs, attend)
            if c.recompute and training:
                options = {"use_reentrant": False, "preserve_rng_state": False}
                x = torch.utils.checkpoint.checkpoint(self.block, *arguments, **options)
            else:
                x = self.block(*arguments)
        return norm(x)

    def block(self, x, to_values, layer: int, w: LayerWeights, inputs: Inputs, attend) -> Tensor:
        """One layer: attention and MLP, each added to the residual stream x (T, D).

        to_values (T, D) or None is added to the values of attention; attend as for the trunk.
        """
        c = self.config
        scalar = inputs.scalar
        if layer not in c.no_attention_layers:
            attention_input = norm(x) if inputs.shared is None else inputs.shared
            y = self.attend_layer(attention_input, to_values, layer, w, inputs, attend)
            x = scale_fp32(scalar["resid_attn"][layer], x) + linear8(y, w.o, w.o8)
        if c.x0_injection:
            x = x + scale_fp32(scalar["share_x0"][layer], inputs.x0)
        if inputs.ngram is not None:
            x = x + scale_fp32(scalar["share_ngram"][layer], inputs.ngram)
        if c.swiglu:
            gate, up = (norm(x) @ w.up.T).chunk(2, 1)
            y = (F.silu(gate) * up) @ w.down
        else:
            y = mlp_relu2(norm(x), w.up, w.down, w.up8, w.down8)
        return scale_fp32(scalar["resid_mlp"][layer], x) + y

    def attend_layer(self, normed_TD, to_values, layer, w: LayerWeights, inputs, attend) -> Tensor:
        """Attention of one layer on its normalised input, before the output projection: (T, D)."""
        c = self.config
        # q and k come back normalised (QK norm) and rotated, q also scaled.
        q, k, v = project_qkv(normed_TD, w.qkv, inputs.cos, inputs.sin, self.attention_scale, w.qkv8)
        if layer in c.value_embed_layers:  # record 14; the gate reads the token's hidden state
            e = c.value_embed_layers.index(layer)
            gate_TH = head_gates(normed_TD, self.value_gate[e])
            v = v + gate_TH[..., None] * inputs.value_embeds[e].view_as(v)
        if to_values is not None:
            v = v + to_values.view_as(v)
        y = attend(layer, q, k, v)
        if layer in c.exclusive_layers:
            y = exclude_own_value(y, v, self.exclusion[c.exclusive_layers.index(layer)])
        if layer in c.gated_layers:
            gate_TH = head_gates(normed_TD, self.output_gate[c.gated_layers.index(layer)])
            y = y * gate_TH[..., None]
        return y.reshape(len(normed_TD), c.width)

    def embed_inputs(self, tokens_T, previous_2T, positions_T, ngram_rows) -> Inputs:
        """Embeddings, the rotary table, scalars; arguments as of the trunk."""
        c = self.config
        cos, sin = (table[positions_T][:, None].to(self.embed.dtype) for table in self.rotary)
        x = F.embedding(tokens_T, self.embed)

        # N-grams: hashed, and signed so that collisions are nearly orthogonal (records 62, 83).
        # In training micro_step() has looked up the rows, and only the signs are looked up here.
        ngram_TD = None
        if c.bigram_rows:
            hashes = self.hash_ngrams(tokens_T, previous_2T, positions_T)
            signed = []
            for i, (table, (row_T, sign_T)) in enumerate(zip(ngram_tables(self), hashes, strict=True)):
                rows = F.embedding(row_T, table) if ngram_rows is None else ngram_rows[i]
                signed.append(rows * F.embedding(sign_T, self.bigram_signs[:, : table.size(1)]))
            ngram_TD = signed[0]
            if c.trigram_rows:
                ngram_TD = ngram_TD + F.linear(signed[1], self.trigram_proj)
            ngram_TD = Stored.apply(ngram_TD)

        # Value embeddings: all tables in one lookup, so that the backward has one scatter.
        value_embeds = None
        if c.value_embed_layers:
            tables = torch.arange(len(c.value_embed_layers), device=x.device)[:, None]
            value_embeds = F.embedding(tokens_T + tables * c.padded_vocab, self.value_embed).unbind(0)
        scalar = dict(zip(SCALARS, self.scalars.unbind(0), strict=True))
        return Inputs(norm(x), ngram_TD, value_embeds, cos, sin, scalar)

    def hash_ngrams(self, tokens_T, previous_2T, positions_T) -> list[tuple[Tensor, Tensor]]:
        """For each of ngram_tables(), each token's row in it and in bigram_signs, int64 (T,)."""
        t = tokens_T.long()
        t1, t2 = previous_2T.long()  # one and two tokens before t
        pair_T = (36313 * t) ^ (27191 * t1)
        ngrams = [(pair_T, t ^ t1, self.config.bigram_rows)]
        if self.config.trigram_rows:
            ngrams.append((pair_T ^ (51787 * t2), t ^ (3 * t1) ^ (7 * t2), self.config.trigram_rows))

        # The last row is that of a document's first tokens: nothing may leak from the one before.
        hashes = []
        for before, (row_T, sign_T, rows) in enumerate(ngrams, 1):
            short_T = positions_T < before
            row_T = (row_T % (rows - 1)).masked_fill(short_T, rows - 1)
            hashes.append((row_T, (sign_T % SIGN_ROWS).masked_fill(short_T, 0)))
        return hashes

    def mix(self, x_TD: Tensor, x0_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What the last layer adds to its values and to its stream, (T, D) each.

        Both are sums of input and stream, with factors that each token computes for itself and that
        start at 0, but for the input in the values (arXiv 2502.12170, record 81).
        """
        hidden_TM = F.gelu(F.linear(norm(x_TD), self.mix_in))
        w = F.linear(hidden_TM, self.mix_out).split(1, 1)  # four times (T, 1)
        return w[0] * x0_TD + w[1] * x_TD, w[2] * x0_TD + w[3] * x_TD

    def layer_weights(self, products8: tuple[str, ...] = ()) -> list[LayerWeights]:
        """The matrices of each layer, for a trunk or for many; those of products8 in fp8 as well.

        Scalars multiply matrices where they can: these have fewer numbers than activations (record
        47), and a decoder needs that only once.
        """
        c = self.config
        scalar = dict(zip(SCALARS, self.scalars, strict=True))

        def scaled(bank: Tensor, name: str, layers: Iterable[int]) -> Tensor:
            factors = torch.stack([scalar[name][layer] for layer in layers])
            return (factors[:, None, None] * bank).to(bank.dtype)

        v, o = self.vo_bank.unflatten(0, (-1, 2)).unbind(1)
        up, down = self.mlp_bank.unflatten(0, (-1, 2)).unbind(1)
        v = scaled(v, "scale_v", c.attention_layers)
        o = scaled(o, "scale_o", c.attention_layers)
        down = scaled(down, "scale_down", range(c.num_layers))
        qkv = torch.cat((self.qk_bank, v), 1)
        if c.swiglu:
            up = torch.cat((self.gate_bank, up), 1)

        def in_fp8(product: str, bank: Tensor) -> list:
            return weights_to_fp8(bank) if product in products8 else [None] * len(bank)

        mlp = (up.unbind(0), down.unbind(0), in_fp8("MLP", up), in_fp8("MLP", down))
        attention = (qkv.unbind(0), o.unbind(0), in_fp8("qkv", qkv), in_fp8("o", o))
        weights = []
        for layer in range(c.num_layers):
            own = [bank[layer] for bank in mlp]
            if layer in c.attention_layers:
                own += [bank[c.attention_layers.index(layer)] for bank in attention]
            weights.append(LayerWeights(*own))
        return weights


def previous_tokens(tokens_T: Tensor) -> Tensor:
    """The token before each, and the one before that, (2, T); before the first is the first."""
    before = torch.cat((tokens_T[:1], tokens_T[:1], tokens_T))
    return torch.stack((before[1:-1], before[:-2]))


# ===============================================================================
# 5. DATA -- packs of documents -> micro-batches
# A pack is a fixed number of tokens that starts with a BOS and holds whole documents, as far as they
# fit. A document that is longer than max_seq_len, or than what is left of the pack, is continued as a new
# segment after a BOS of its own: no text is lost, and the token at the cut is a target twice.
#
#     tokens    B a a a a B b b B c c c | B c c c c c B d ...    two packs of 12; document c is continued
#     targets   a a a a B b b B c c c c | c c c c c B d ...      a document's last target is the next BOS
#     positions 0 1 2 3 4 0 1 2 0 1 2 3 | 0 1 2 3 4 5 0 ...
#
# Rank r of W gets the r-th of W equal parts of each step, so neither the number of ranks nor the
# micro-batch changes the tokens of a step.


class MicroBatch(NamedTuple):
    """What GPT.forward reads, on the device."""

    tokens_T: Tensor
    targets_T: Tensor
    positions_T: Tensor
    cu_seqlens: Tensor  # int32 (G + 1,)
    max_doc: int

    def tensors(self) -> tuple[Tensor, ...]:
        return self[:4]


@dataclass
class Batch:
    """The packs of one step that belong to this rank, on the host, int32."""

    tokens: Tensor  # (P, pack_tokens)
    targets: Tensor  # (P, pack_tokens); -1 is ignored
    positions: Tensor  # (P, pack_tokens)
    ends: Tensor  # (P, most documents), where each document ends; padded with pack_tokens
    max_doc: int
    total_tokens: int  # in the step, over all ranks
    total_targets: int = 0  # how many of them are not ignored
    reader_state: dict | None = None  # where the reader is after this batch
    notes: dict = field(default_factory=dict)  # further numbers for the log

    def micro_batches(self, packs: int, device: torch.device) -> Iterator[MicroBatch]:
        """The batch on the device, up to `packs` packs at a time, all micro-batches of one size."""
        P, pack_tokens = self.tokens.shape
        packs = largest_divisor(P, packs)
        starts = torch.arange(packs, dtype=torch.int32)[:, None] * pack_tokens
        for i in range(0, P, packs):
            own = slice(i, i + packs)
            ends = (self.ends[own] + starts).flatten()
            cu_seqlens = torch.cat((ends.new_zeros(1), ends))
            tensors = [t[own].flatten() for t in (self.tokens, self.targets, self.positions)]
            tensors.append(cu_seqlens)
            if device.type == "cuda":
                tensors = [t.pin_memory() for t in tensors]
            yield MicroBatch(*(t.to(device, non_blocking=True) for t in tensors), self.max_doc)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`; 1 for 0."""
    return next((n for n in range(min(number, most), 0, -1) if number % n == 0), 1)


def empty_packs(count: int, config: Config, bos_id: int) -> Batch:
    """Packs to be filled: all tokens are BOS, all targets are ignored."""
    shape = (count, config.pack_tokens)
    padding_docs = math.ceil(config.pack_tokens / config.max_seq_len)  # see fill_pack
    most_docs = config.max_docs_per_pack + padding_docs
    return Batch(
        tokens=torch.full(shape, bos_id, dtype=torch.int32),
        targets=torch.full(shape, -1, dtype=torch.int32),
        positions=torch.zeros(shape, dtype=torch.int32),
        ends=torch.full((count, most_docs), config.pack_tokens, dtype=torch.int32),
        max_doc=config.max_seq_len,
        total_tokens=count * config.pack_tokens,
    )


def fill_pack(batch: Batch, row: int, documents: Iterable) -> None:
    """Puts whole documents one after another into a pack, and pads the rest.

    Each is (sequence int32 (n,), counted bool (n - 1,)): inputs sequence[:-1], targets sequence[1:].
    """
    tokens = batch.tokens[row].numpy()  # writes into the tensor
    targets = batch.targets[row].numpy()
    positions = batch.positions[row].numpy()
    ends = batch.ends[row].numpy()
    start = 0
    num_docs = 0
    for sequence, counted in documents:
        end = start + len(sequence) - 1
        tokens[start:end] = sequence[:-1]
        targets[start:end] = np.where(counted, sequence[1:], -1)
        positions[start:end] = np.arange(end - start)
        ends[num_docs] = end
        start = end
        num_docs += 1
        batch.total_targets += int(counted.sum())

    # The rest becomes documents of ignored BOS tokens, none above max_doc.
    size = len(tokens)
    positions[start:] = np.arange(size - start) % batch.max_doc
    while start < size:
        start = min(start + batch.max_doc, size)
        ends[num_docs] = start
        num_docs += 1


class PackLoader:
    """Yields one Batch for each step, prepared ahead by a thread."""

    def __init__(self, reader: ShardReader, config: Config, ranks: Ranks, first_step: int = 0):
        self.reader = reader
        self.config = config
        self.ranks = ranks
        self.steps = iter(range(first_step, config.num_steps))
        self.thread = ThreadPoolExecutor(1)
        self.ahead = []  # the next batches in their order, as futures
        self.prepare(3)

    def prepare(self, count: int) -> None:
        """Asks the thread for the batches of as many further steps."""
        for step in itertools.islice(self.steps, count):
            self.ahead.append(self.thread.submit(self.batch, step))

    def batch(self, step: int) -> Batch:
        """This rank's packs of a step. Every rank reads all packs: cheaper than communication."""
        config = self.config
        stage = config.stage_table[stage_index(config, step)]
        own = stage.packs // self.ranks.world
        batch = empty_packs(own, config, self.reader.bos_id)
        for pack in range(stage.packs):
            row = pack - self.ranks.rank * own
            documents = self.reader.pack()
            if 0 <= row < own:
                fill_pack(batch, row, documents)
            else:  # a pack of another rank
                batch.total_targets += sum(int(counted.sum()) for _, counted in documents)
        batch.total_tokens = stage.packs * config.pack_tokens
        batch.reader_state = dict(self.reader.reader_state)
        return batch

    def next(self) -> Batch:
        """The next batch; raises what went wrong in the thread."""
        batch = self.ahead.pop(0).result()
        self.prepare(1)
        return batch

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


# ===============================================================================
# 6. OPTIMIZER -- NorMuon for matrices, RMSProp for tables, else Adam; state sharded over ranks
# Each rank owns a slice of every large bank and table: fp32 master weights and moments. A step
# reduce-scatters gradients, updates slices, and all-gathers weights in the model's dtype. But a table with
# sparse gradients is whole on every rank, and only rows that were looked up are exchanged.

@dataclass(eq=False)
class Slot:
    """One parameter with this rank's slice of its optimizer state."""

    name: str
    param: Tensor
    rule: UpdateRule
    shape: tuple  # the parameter as (N, R, C) or (N, ...), of which ranks own slices along N
    sharded: bool
    per_rank: int  # length of a slice; the last ranks' slices may end in padding
    # What follows is set by Optimizer.reset().
    updates: int = 0
    master: Tensor | None = None  # fp32, or a sparse table itself in bf16
    aliased: bool = False  # the master is the parameter itself
    moments: dict[str, Tensor] = field(default_factory=dict)  # and the average of the last weights
    mult: Tensor | None = None  # NorMuon: factor on the rate of each matrix
    matrices_at_once: int = 0  # NorMuon: how many a call of normuon_update takes


class Pending(NamedTuple):
    """A gradient or new weights, complete after wait(); with one process, at once."""

    slot: Slot
    tensor: Tensor  # this rank's slice of the summed gradient, or the new weights of all ranks
    index: Tensor | None = None  # sparse: for each row of `tensor`, its row in the table
    works: Iterable = ()  # handles of collectives
    sent: tuple = ()  # what this rank sends, kept alive until they end

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Optimizer:
    """NorMuon, RMSProp and Adam, as the UpdateRule of each parameter says."""

    def __init__(self, model: nn.Module, config: Config, ranks: Ranks, table: dict[str, UpdateRule]):
        self.config = config
        self.ranks = ranks
        params = dict(model.named_parameters())
        assert set(params) <= set(table), f"parameters without a rule: {set(params) - set(table)}"
        self.slots = [self.make_slot(n, params[n], table[n]) for n in table if n in params]

        on_gpu = ranks.device.type == "cuda"
        self.muon_dtype = torch.bfloat16 if on_gpu and bf16_is_native() else torch.float32
        self.compiled = on_gpu and config.compile
        self.reset()

    def make_slot(self, name: str, param: Tensor, rule: UpdateRule) -> Slot:
        shape = tuple(param.shape)
        if rule.optimizer == "normuon":
            R = rule.rows or param.size(-2)
            C = param.size(-1)
            shape = (param.numel() // (R * C), R, C)
        # Small parameters are not worth sharding. A step touches few rows of a sparse table, so
        # every rank updates all of it.
        sharded = self.ranks.world > 1 and param.numel() >= 65536 and not rule.sparse
        per_rank = math.ceil(shape[0] / self.ranks.world) if sharded else shape[0]
        return Slot(name, param, rule, shape, sharded, per_rank)

    @torch.no_grad()
    def reset(self) -> None:
        """Copies the master weights from the model and zeroes the moments."""
        for slot in self.slots:
            slot.updates = 0
            weights = slot.param.detach().view(slot.shape)
            # fp32 needs no copy, nor do sparse tables in bf16, which are rounded stochastically.
            precise = (torch.float32, torch.bfloat16) if slot.rule.sparse else (torch.float32,)
            slot.aliased = weights.dtype in precise and not slot.sharded
            if slot.aliased:
                slot.master = weights
            else:
                slot.master = slot.moments = None  # old and new may not fit together
                slot.master = self.own_rows(slot, weights).float()
            if slot.rule.optimizer == "normuon":
                self.reset_normuon(slot)
            elif slot.rule.optimizer == "rmsprop":
                slot.moments = {"second_moment": torch.zeros_like(slot.master[:, 0], dtype=torch.float32)}
            else:
                names = ("exp_avg", "exp_avg_sq")
                slot.moments = {name: torch.zeros_like(slot.master) for name in names}
            if self.config.average > 0 and slot.rule.average:
                slot.moments["average"] = torch.zeros_like(slot.master)

    def reset_normuon(self, slot: Slot) -> None:
        N, R, C = slot.master.shape
        device = slot.master.device
        slot.moments = {
            "momentum": torch.zeros(N, R, C, device=device),
            "second_moment": torch.zeros((N, R, 1) if R >= C else (N, 1, C), device=device),
        }
        # sqrt(rows / columns): each row of a tall matrix moves as far as one of a square matrix.
        mult = torch.full((slot.shape[0], 1, 1), max(1, R / C) ** 0.5, device=device)
        mult[1::2] *= slot.rule.odd_mult
        slot.mult = self.own_rows(slot, mult)
        # At most 2 ** 27 entries at once: each needs about 12 bytes of temporary memory.
        slot.matrices_at_once = largest_divisor(N, 2**27 // (R * C))

    @torch.no_grad()
    def step(self, lr_factor: float, momentum: float) -> None:
        """Sums gradients over ranks, updates, gathers; skipped if a gradient in fp16 overflowed.

        Args: lr_factor, momentum lr_multiplier() and muon_momentum() of this step
        """
        slots = [slot for slot in self.slots if slot.param.grad is not None]

        # 1. Start to sum all gradients.
        gradients = [self.start_sum(slot) for slot in slots]
        if self.overflowed(gradients):
            return

        # 2. Update with each as soon as it is complete, and start to gather the new weights.
        gathers = []
        for gradient in gradients:
            gradient.wait()
            new_weights = self.update(gradient, lr_factor, momentum)
            if gradient.slot.sharded:
                gathers.append(self.start_gather(gradient.slot, new_weights))

        # 3. The next forward needs all weights. Padded ones were gathered beside their parameter.
        for gathered in gathers:
            slot = gathered.slot
            gathered.wait()
            if len(gathered.tensor) != slot.shape[0]:
                slot.param.view(slot.shape).copy_(gathered.tensor[: slot.shape[0]])

    def overflowed(self, gradients: list[Pending]) -> bool:
        """Whether a gradient in fp16, summed over ranks, is not finite; other dtypes have room."""
        if not any(gradient.tensor.dtype == torch.float16 for gradient in gradients):
            return False
        for gradient in gradients:
            gradient.wait()
        return not self.all_finite([gradient.tensor for gradient in gradients])

    def update(self, gradient: Pending, lr_factor: float, momentum: float) -> Tensor | None:
        """Updates master and moments by the slot's rule; returns this rank's new weights."""
        slot = gradient.slot
        rule = slot.rule
        slot.updates += 1
        # Receives the result in the model's dtype; None: the master is the parameter itself.
        new_weights = None
        if not slot.aliased:
            # The old ones at first, as RMSProp writes only rows with a gradient.
            new_weights = self.own_rows(slot, slot.param.detach().view(slot.shape))
        rate = self.config.muon_lr if rule.optimizer == "normuon" else self.config.adam_lr
        lr = rate * rule.lr_mult * lr_factor
        decay = rule.weight_decay * lr_factor
        if rule.optimizer == "normuon":
            self.update_normuon(gradient, new_weights, momentum, lr, decay)
        elif rule.optimizer == "rmsprop":
            (beta2,) = rule.betas
            rmsprop_update(
                slot.master, gradient.tensor, slot.moments["second_moment"], new_weights, gradient.index,
                lr=lr, beta2=beta2, correction=1 - beta2**slot.updates, eps=self.config.adam_eps, decay=decay,
            )  # fmt: skip
        else:
            self.update_adam(gradient, new_weights, lr, decay)
        return new_weights

    def update_normuon(self, gradient: Pending, new_weights, momentum: float, lr: float, decay: float) -> None:
        """NorMuon, for some matrices at a time, which limits temporary memory."""
        slot = gradient.slot
        tensors = (slot.master, gradient.tensor, slot.moments["momentum"], slot.moments["second_moment"], slot.mult)
        for start in range(0, len(slot.master), slot.matrices_at_once):
            some = slice(start, start + slot.matrices_at_once)
            normuon_update(
                *(t[some] for t in tensors), None if new_weights is None else new_weights[some],
                lr=lr, momentum=momentum, beta2=self.config.muon_beta2, decay=decay,
                dtype=self.muon_dtype, compiled=self.compiled,
            )  # fmt: skip

    def update_adam(self, gradient: Pending, new_weights: Tensor | None, lr: float, decay: float) -> None:
        slot = gradient.slot
        beta1, beta2 = slot.rule.betas
        tensors = (slot.master, gradient.tensor, slot.moments["exp_avg"], slot.moments["exp_avg_sq"], new_weights)
        # Scalars, which are their own master, are not worth compiling.
        function = compile_once(adam_update) if self.compiled and new_weights is not None else adam_update
        function(
            *(None if t is None else t.view(-1) for t in tensors),
            lr=lr, beta1=beta1, correction1=1 - beta1**slot.updates, beta2=beta2,
            correction2=1 - beta2**slot.updates, eps=self.config.adam_eps, decay=decay,
        )  # fmt: skip

    # -- communication

    def start_sum(self, slot: Slot) -> Pending:
        """Takes the gradient out of .grad and starts to sum it over ranks."""
        grad = slot.param.grad
        slot.param.grad = None
        if grad.is_sparse:
            return self.start_exchange(slot, grad)
        grad = grad.view(slot.shape)
        if self.ranks.world == 1:
            return Pending(slot, grad)
        if not slot.sharded:
            return Pending(slot, grad, works=(dist.all_reduce(grad, async_op=True),))
        padding = slot.per_rank * self.ranks.world - slot.shape[0]
        if padding:
            grad = torch.cat((grad, grad.new_zeros(padding, *grad.shape[1:])))
        own = grad.new_empty(slot.per_rank, *grad.shape[1:])
        work = dist.reduce_scatter_tensor(own, grad, async_op=True)
        return Pending(slot, own, works=(work,), sent=(grad,))

    def start_exchange(self, slot: Slot, grad: Tensor) -> Pending:
        """Starts to gather the rows of a sparse gradient, in the same order on all ranks."""
        assert not slot.sharded, f"{slot.name} is sharded, but has a sparse gradient"
        own_index = grad._indices()[0]
        own_rows = grad._values()
        if self.ranks.world == 1:
            return Pending(slot, own_rows, own_index)
        index = own_index.new_empty(self.ranks.world * len(own_index))
        rows = own_rows.new_empty(len(index), own_rows.size(1))
        works = (
            dist.all_gather_into_tensor(index, own_index, async_op=True),
            dist.all_gather_into_tensor(rows, own_rows, async_op=True),
        )
        return Pending(slot, rows, index, works, sent=(own_index, own_rows))

    def start_gather(self, slot: Slot, own: Tensor) -> Pending:
        """Starts to gather the new weights of all ranks."""
        whole = slot.param.detach().view(slot.shape)
        padded = slot.per_rank * self.ranks.world
        if padded != slot.shape[0]:
            whole = own.new_empty(padded, *own.shape[1:])
        work = dist.all_gather_into_tensor(whole, own, async_op=True)
        return Pending(slot, whole, works=(work,), sent=(own,))

    def own_rows(self, slot: Slot, full: Tensor) -> Tensor:
        """This rank's rows of a full (N, ...) tensor, padded with zeros."""
        if not slot.sharded:
            return full
        start = self.ranks.rank * slot.per_rank
        part = full[start : start + slot.per_rank]
        padding = part.new_zeros(slot.per_rank - part.size(0), *part.shape[1:])
        return torch.cat((part, padding))

    def gather(self, slot: Slot, part: Tensor) -> Tensor:
        """The full (N, ...) tensor from every rank's slice; of a sharded slot on the CPU."""
        if not slot.sharded:
            return part
        full = part.new_empty(slot.per_rank * self.ranks.world, *part.shape[1:])
        dist.all_gather_into_tensor(full, part.contiguous())
        return full[: slot.shape[0]].cpu()  # all slots together may not fit on the device

    # -- state

    def weights(self) -> dict[str, Tensor]:
        """Whole master weights, fp32 but for sparse tables in bf16. Every rank must call it."""
        return {s.name: self.gather(s, s.master).view(s.param.shape) for s in self.slots}

    def state(self, averages: bool = True) -> dict[str, Tensor]:
        """Whole moments, for any number of ranks to load. Every rank must call it."""
        state = {}
        for slot in self.slots:
            state[f"{slot.name}.updates"] = torch.tensor(slot.updates)
            for name, moment in slot.moments.items():
                if averages or name != "average":
                    state[f"{slot.name}.{name}"] = self.gather(slot, moment)
        return state

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Restores what weights() and state() returned. Raises: KeyError if something is missing"""
        for slot in self.slots:
            slot.updates = int(state[f"{slot.name}.updates"])
            full = weights[slot.name].to(slot.master.device).view(slot.shape)
            slot.master.copy_(self.own_rows(slot, full))
            slot.param.copy_(full.view(slot.param.shape))
            for name, moment in slot.moments.items():
                key = f"{slot.name}.{name}"
                if name != "average" or key in state:  # there are none before the first sample and after blend_average
                    moment.copy_(self.own_rows(slot, state[key].to(moment.device)))

    def is_finite(self) -> bool:
        """Whether all that a checkpoint holds is finite. Every rank must call it."""
        return self.all_finite([t for slot in self.slots for t in (slot.master, *slot.moments.values())])

    def all_finite(self, tensors: list[Tensor]) -> bool:
        """Whether all numbers of these tensors are finite, on all ranks."""
        # The largest size is inf or nan if any number is; isfinite() would take temporary memory.
        largest = [torch.linalg.vector_norm(t, math.inf, dtype=torch.float32) for t in tensors]
        finite = torch.stack(largest).isfinite().all().float()
        if self.ranks.world > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return finite.item() > 0


# -- update rules


def normuon_update(
    master, grad, momentum_buffer, second_moment, mult, param,
    *, lr, momentum, beta2, decay, dtype, compiled=False,
) -> None:  # fmt: skip
    """One NorMuon step (arXiv 2510.05491) with cautious weight decay (arXiv 2510.12402), in place.

    Args: master, grad, momentum_buffer (N, R, C); second_moment (N, R, 1), or (N, 1, C) for wide
          matrices; mult (N, 1, 1) factors on lr; param as in step_cautiously; dtype for polar_express
    """
    blend_function = compile_once(blend_momentum) if compiled else blend_momentum
    step_function = compile_once(step_cautiously) if compiled else step_cautiously
    # Flat, so that banks of all shapes share one compiled function.
    blended = blend_function(grad.view(-1), momentum_buffer.view(-1), dtype, momentum=momentum)
    update = polar_express(blended.view(master.shape))

    # Each row of a tall update, or column of a wide one, is divided by the root of its second moment.
    # Then the update of each matrix gets back the norm that it had.
    axis = -1 if update.size(-2) >= update.size(-1) else -2
    squares = torch.linalg.vector_norm(update, dim=axis, keepdim=True, dtype=torch.float32).square()
    second_moment.lerp_(squares / update.size(axis), 1 - beta2)
    factor = second_moment.clamp_min(1e-10).rsqrt()
    norm_before = squares.sum((-2, -1), keepdim=True).sqrt()
    norm_after = (squares * factor.square()).sum((-2, -1), keepdim=True).sqrt()
    factor *= norm_before / norm_after.clamp_min(1e-10)
    step_function(master, update, factor, lr * mult, param, decay=decay)


def blend_momentum(grad, buffer, dtype, *, momentum) -> Tensor:
    """Nesterov momentum: moves the fp32 buffer to the gradient; returns their blend in dtype."""
    grad = grad.float()
    buffer.lerp_(grad, 1 - momentum)
    return grad.lerp(buffer, momentum).to(dtype)


# Coefficients (a, b, c) for four iterations, computed as in Polar Express (arXiv 2505.16932).
POLAR_EXPRESS = (
    (7.871436, -20.937255, 14.627350),
    (3.781651, -2.618773, 0.476315),
    (3.149197, -2.269902, 0.453804),
    (2.216045, -1.591900, 0.410524),
)


def polar_express(matrices_NRC: Tensor) -> Tensor:
    """Sets singular values of (N, R, C) to 0.9-1.1; those below 0.5 % of the norm stay smaller."""
    x = matrices_NRC / (matrices_NRC.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = x.size(-2) > x.size(-1)
    # x <- (a I + b A + c A A) x, where A = x x^T, and A = x^T x on the right of a tall x.
    for a, b, c in POLAR_EXPRESS:
        gram = sym_mm(x.mT if tall else x)
        poly = sym_mm(gram, alpha=c, beta=b, gamma=a)  # c A A + b A + a I
        x = x @ poly if tall else poly @ x
    return x


def step_cautiously(master, update, factor, lr, param, *, decay) -> None:
    """master -= lr * (factor * update + decay * master); decay only where the update shrinks it too.

    Args: master fp32, update (N, R, C); positive factor fp32 (N, R, 1) or (N, 1, C); lr fp32
          (N, 1, 1); param (N, R, C) receives the master in its own dtype, or is None
    """
    update = update.float() * factor
    agrees = update * master >= 0
    master.sub_(lr * (update + decay * master * agrees))
    if param is not None:
        param.copy_(master)


def adam_update(
    master, grad, exp_avg, exp_avg_sq, param,
    *, lr, beta1, beta2, correction1, correction2, eps, decay,
) -> None:  # fmt: skip
    """One Adam step with cautious weight decay, in place; all fp32 but for grad and param."""
    grad = grad.float()
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    update = exp_avg / correction1 / ((exp_avg_sq / correction2).sqrt() + eps)
    agrees = update * master > 0  # so what has had no gradient yet does not decay
    master.sub_(lr * (update + decay * master * agrees))
    if param is not None:
        param.copy_(master)


@functools.cache
def compile_once(function: Callable) -> Callable:
    """A compiled function without gradients; no size or number makes it compile again."""
    compiled = torch.compile(function, fullgraph=True, dynamic=True)

    def call(*arguments, **numbers):
        # torch.compile guards on the base of a view and would recompile for each; .data has none. Numbers
        # become tensors, as it would compile again for each new rate.
        arguments = [a.data if isinstance(a, Tensor) else a for a in arguments]
        return compiled(*arguments, **{name: torch.tensor(n) for name, n in numbers.items()})

    return call


# -- averages of the weights in the last part of the run (modded-nanogpt PR 360)


SAMPLE_EVERY = 4  # steps


def is_sampled(config: Config, step: int) -> bool:
    """Whether averages include these weights: of every fourth step near the end, and the last."""
    left = config.num_steps - step
    return left % SAMPLE_EVERY == 0 and left < config.average * config.num_steps


def slot_norms(slot: Slot) -> Tensor:
    """Norms of the matrices of NorMuon, fp32 (N, 1, 1); of another slot that of the whole, 0-D."""
    if slot.rule.optimizer == "normuon":
        return torch.linalg.vector_norm(slot.master, dim=(-2, -1), keepdim=True)
    square = torch.linalg.vector_norm(slot.master).square()
    if slot.sharded:
        dist.all_reduce(square)
    return square.sqrt()


@torch.no_grad()
def sample_average(state: TrainState) -> None:
    """Adds the master weights to their averages, if this step is one of those that are averaged."""
    slots = [slot for slot in state.optimizer.slots if "average" in slot.moments]
    if not slots or not is_sampled(state.config, state.step):
        return
    if not is_sampled(state.config, state.step - SAMPLE_EVERY):
        state.averaged_steps = 0  # this is the first
    # Counted, as a run that --resume makes longer or shorter may lack the first ones.
    state.averaged_steps += 1
    averages = [slot.moments["average"] for slot in slots]
    torch._foreach_lerp_(averages, [slot.master for slot in slots], 1 / state.averaged_steps)


@torch.no_grad()
def blend_average(state: TrainState) -> None:
    """After the last step: the weights become a blend of themselves and their average."""
    state.averaged_steps = 0
    for slot in state.optimizer.slots:
        if "average" not in slot.moments:
            continue
        # An average has a smaller norm than what it is made of, so each matrix gets its norm back.
        before = slot_norms(slot)
        slot.master.lerp_(slot.moments.pop("average"), slot.rule.average)
        slot.master.mul_(before / slot_norms(slot).clamp_min(1e-10))
        slot.param.copy_(state.optimizer.gather(slot, slot.master).view(slot.param.shape))


# ===============================================================================
# 7. DOCUMENTS -- what training and validation read of the shards; bits per byte


class ShardReader:
    """Walks over the training shards of a dataset and cuts them into the documents of packs.

    Readers of other data need the same: `reader_state`, which seek() restores; `bos_id`; pack().
    """

    def __init__(self, dataset: Dataset, config: Config):
        self.dataset = dataset
        self.config = config
        self.bos_id = dataset.tokenizer.bos_id
        self.files = dataset.files("train")
        self.seek({"epoch": 0, "shard": 0, "offset": 0})

    def seek(self, reader_state: dict) -> None:
        self.reader_state = dict(reader_state)
        self.tokens = None  # of the shard, read when needed

    def pack(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(sequence, counted) of the documents in the next pack; every target counts."""
        room = self.config.pack_tokens
        num_docs = 0
        while room and num_docs < self.config.max_docs_per_pack:
            sequence = self.segment(min(room, self.config.max_seq_len))
            room -= len(sequence) - 1
            num_docs += 1
            yield sequence, np.ones(len(sequence) - 1, bool)

    def segment(self, room: int) -> np.ndarray:
        """The next segment with at most `room` inputs, and one more token, the last target."""
        if self.tokens is None:
            self.open_shard()
        if self.reader_state["offset"] == len(self.tokens):
            self.next_shard()

        # Where does the current document end? If it is continued here, it gets a BOS of its own.
        offset = self.reader_state["offset"]
        continued = self.tokens[offset] != self.bos_id
        following = np.searchsorted(self.bos_at, offset, side="right")
        end = self.bos_at[following] if following < len(self.bos_at) else len(self.tokens)

        # Take as much of it as fits.
        start = [self.bos_id] if continued else []
        stop = int(offset + min(end - offset, room - len(start)))
        self.reader_state["offset"] = stop
        last = self.tokens[stop] if stop < len(self.tokens) else self.bos_id
        return np.concatenate((start, self.tokens[offset:stop], [last])).astype(np.int32)

    def open_shard(self) -> None:
        self.tokens = self.dataset.read(self.files[self.reader_state["shard"]])
        self.bos_at = np.flatnonzero(self.tokens == self.bos_id)

    def next_shard(self) -> None:
        """Moves to the next shard, or to the next epoch if that is allowed."""
        epoch = self.reader_state["epoch"]
        shard = self.reader_state["shard"] + 1
        if shard == len(self.files):
            epoch += 1
            shard = 0
        if epoch >= self.config.max_epochs:
            raise UserError(
                f"{self.dataset.root} ran out of text after {self.config.max_epochs} epoch(s); train "
                f"on fewer tokens (--tokens), or allow repeats with --max-epochs {epoch + 1}"
            )
        self.reader_state = {"epoch": epoch, "shard": shard, "offset": 0}
        self.open_shard()


def validation_documents(dataset: Dataset, config: Config) -> Iterator[tuple]:
    """(sequence, counted), as for fill_pack, of held-out documents, cut at max_seq_len."""
    bos_id = dataset.tokenizer.bos_id
    for path in dataset.files("val"):
        tokens = dataset.read(path).astype(np.int32)
        starts = np.flatnonzero(tokens == bos_id)
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            end = min(end, start + config.max_seq_len)
            yield tokens[start:end], np.ones(end - start - 1, bool)


def scored_documents(documents: Iterable, config: Config) -> list[tuple[np.ndarray, np.ndarray]]:
    """The documents with targets, up to val_tokens targets: the same for every run."""
    scored = []
    total = 0
    for sequence, counted in documents:
        if total >= config.val_tokens:
            break
        if len(counted):
            scored.append((sequence, counted))
            total += len(counted)
    return scored


def validation_batch(documents: list, config: Config, bos_id: int) -> Batch:
    """The scored documents, whole in their packs."""
    packs = [[]]
    room = config.pack_tokens
    for sequence, counted in documents:
        if len(counted) > room or len(packs[-1]) == config.max_docs_per_pack:
            packs.append([])
            room = config.pack_tokens
        packs[-1].append((sequence, counted))
        room -= len(counted)

    batch = empty_packs(len(packs), config, bos_id)
    for index, members in enumerate(packs):
        fill_pack(batch, index, members)
    return batch


@torch.no_grad()
def bits_per_byte(model, batch: Batch, micro_packs: int, token_bytes, ranks: Ranks) -> float:
    """Nats of the targets that have bytes, over ln 2 and their bytes. token_bytes int (V,)"""
    nats_sum = torch.zeros((), device=ranks.device)
    bytes_sum = torch.zeros((), device=ranks.device)
    share = share_of_rank(batch, micro_packs, ranks)
    for micro_batch in share.micro_batches(micro_packs, ranks.device):
        _, nats = model(*micro_batch)
        targets = micro_batch.targets_T
        num_bytes = token_bytes[targets.clamp(min=0).long()] * (targets >= 0)
        nats_sum += (nats * (num_bytes > 0)).sum()
        bytes_sum += num_bytes.sum()

    sums = torch.stack((nats_sum, bytes_sum))
    if ranks.world > 1:
        dist.all_reduce(sums)
    return sums[0].item() / math.log(2) / sums[1].item()


def share_of_rank(batch: Batch, micro_packs: int, ranks: Ranks) -> Batch:
    """This rank's micro-batches of a batch that every rank holds, filled up with ignored packs."""
    count = len(batch.tokens)
    group = ranks.world * micro_packs
    share = math.ceil(count / group) * micro_packs
    index = torch.arange(ranks.rank * share, (ranks.rank + 1) * share)
    names = ("tokens", "targets", "positions", "ends")
    own = {name: getattr(batch, name)[index.clamp(max=count - 1)] for name in names}
    own["targets"][index >= count] = -1
    return dataclasses.replace(batch, **own)


# ===============================================================================
# 8. RUN -- what a run is made of, start, resume, what happens between steps, finish


class Pretraining:
    """The job of a run: what it trains on, and how. Tools that train otherwise bring a subclass."""

    command = "pretrain"  # the tool, in config.json and in the name of the run directory
    scored: dict | None = None  # what bits per byte are of
    description: dict = {}  # further entries of config.json
    scripts: tuple[Path, ...] = ()  # further scripts that the run directory keeps

    def __init__(self, config: Config):
        dataset = Dataset.open(config.data)
        tokens = dataset.total("train", "tokens")
        self.tokenizer = dataset.tokenizer
        self.config = dataclasses.replace(config, vocab_size=self.tokenizer.vocab_size)
        check_config(self.config)
        self.fingerprint = dataset.info["fingerprint"]  # of what is read
        self.note = f"{tokens:,} training tokens"  # what there is to train on, for the log
        self.available = tokens * config.max_epochs  # training tokens
        # For the bits per byte of training in the log.
        self.bytes_per_token = dataset.total("train", "text_bytes") / max(tokens, 1)
        self.reader = ShardReader(dataset, self.config)
        self.set_validation(validation_documents(dataset, self.config))

    def set_validation(self, documents: Iterable) -> None:
        """Packs and counts the held-out documents, (sequence, counted) each."""
        config = self.config
        documents = scored_documents(documents, config)
        token_bytes = np.zeros(config.padded_vocab, np.int64)
        token_bytes[: config.vocab_size] = self.tokenizer.token_bytes
        text_bytes = [token_bytes[sequence[1:][counted]] for sequence, counted in documents]
        text_bytes = np.concatenate([*text_bytes, [0]])
        require(text_bytes.any(), f"{config.data} has no validation text to score; make the dataset again")
        tokens = b"".join(sequence.astype("<u2").tobytes() for sequence, _ in documents)
        self.scored = {
            "targets": int((text_bytes > 0).sum()),
            "bytes": int(text_bytes.sum()),
            "sha256": hashlib.sha256(tokens).hexdigest(),
        }
        self.token_bytes = torch.from_numpy(token_bytes)
        self.validation = validation_batch(documents, config, self.tokenizer.bos_id)

    def check(self, ranks: Ranks) -> None:
        """Raises UserError if the run cannot begin; warns if text would be memorized."""
        config = self.config
        for stage in config.stage_table:
            found = f"{stage.packs} packs do not divide over {ranks.world} processes"
            require(stage.packs % ranks.world == 0, f"{found}; use a number of processes that divides {stage.packs}")

        found = f"{config.data} holds {self.available:,} training tokens in {config.max_epochs} epoch(s)"
        asked = config.num_steps * config.step_tokens
        fewer = "--tokens" if config.num_steps > 1 else "--min-packs or --stages"
        way = f"ask for fewer with {fewer}, add text, or allow repeats with --max-epochs"
        needed = 0
        for step in range(config.num_steps):
            needed += config.stage_table[stage_index(config, step)].packs * config.pack_tokens
            require(needed <= self.available, f"{found}, the run asks for {asked:,.0f}; {way}")
        passes = needed * config.max_epochs / self.available
        if passes > 1.5 and config.bigram_rows > 163840 and ranks.is_main:
            print(f"warning: text read {passes:.1f} times is memorized; lower --bigram-rows")

    def build(self, ranks: Ranks, say: Callable) -> TrainState:
        """Model and optimizer with the weights of config.seed, compiled before the clock starts."""
        state = build_state(self.config, ranks, say)
        warm_up(state, say)
        if self.config.prefix_weight:  # the second target of each token
            state.model.prefix_ids[: self.config.vocab_size] = torch.tensor(self.tokenizer.prefix_ids())
        return state

    def start_weights(self, state: TrainState) -> bool:
        """Loads weights to begin with, if there are any; returns whether."""
        return False

    def loader(self, run: Run) -> PackLoader:
        """What gives the batch of each step, from the run's step on."""
        return PackLoader(self.reader, self.config, run.ranks, run.state.step)

    def step(self, state: TrainState, batch: Batch) -> Tensor:
        return train_step(state, batch)

    def evaluate(self, run: Run) -> dict[str, float]:
        """Scores of the held-out text, by name."""
        inputs = (self.validation, run.state.micro_packs, self.token_bytes.to(run.ranks.device), run.ranks)
        return {"val_bpb": bits_per_byte(run.state.model, *inputs)}

    def flops(self, positions: Tensor) -> float:
        """Training FLOPs of a token."""
        return flops_per_token(self.config, positions)

    def seconds_left(self, run: Run, entry: dict) -> float:
        """By tokens, as later steps may be larger. Args: entry of the log"""
        return max(self.config.tokens - run.progress.tokens, 0) / entry["tokens_per_second"]


def write_description(run: Run) -> None:
    """Writes config.json, over that of an earlier start, the scripts that run and the tokenizer."""
    job = run.job
    if not run.ranks.is_main:
        return
    this_start = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "step": run.state.step,
        "flags": run.args.flags,
        "folder": os.getcwd(),  # where relative paths begin
        "machine": run.machine,
        "dataset_fingerprint": job.fingerprint,
    }
    # What describes a start stays that of the first one; config and stages are those of now.
    earlier = read_description(run.run_dir) if run.args.resume else {}
    description = {"command": job.command, **this_start, **job.description, **earlier}
    description["config"] = dataclasses.asdict(job.config)
    description["stage_table"] = [dataclasses.asdict(stage) for stage in job.config.stage_table]
    description["starts"] = [*earlier.get("starts", []), this_start]
    write_atomically(run.run_dir / "config.json", seal(description))
    write_atomically(run.run_dir / Path(__file__).name, SOURCE)
    for path in (job.tokenizer.path, *job.scripts):
        write_atomically(run.run_dir / path.name, path.read_bytes())


def check_same_run(run: Run) -> None:
    """Raises UserError unless a resumed run goes on with its own script and data."""
    kept = run.run_dir / Path(__file__).name
    if not kept.is_file() or kept.read_bytes() != SOURCE:
        raise UserError(f"{run.run_dir} started with a different {kept.name}; continue it with {kept}")
    if read_description(run.run_dir)["dataset_fingerprint"] != run.job.fingerprint:
        raise UserError(f"{run.job.config.data} is not the data that {run.run_dir} started with; pass that with --data")


def resume(run: Run) -> None:
    """Continues from the newest checkpoint without damage."""
    folder = newest_whole(run.run_dir, run.log.say) if run.ranks.is_main else None
    folder = run.ranks.gather(folder)[0]
    require(folder, f"{run.run_dir} has no complete checkpoint; start again without --resume")
    saved = load_checkpoint(run.state, folder)
    step = run.state.step
    is_done = step >= run.job.config.num_steps
    run.progress = Progress(**{f.name: saved[f.name] for f in dataclasses.fields(Progress)})
    if not is_done:
        run.progress.scores = None
    if saved["reader_state"]:
        run.job.reader.seek(saved["reader_state"])
    run.log.rewind(step)
    run.log.say(f"resumed at step {step} from {folder}")

    # The next --resume keeps the flags of this one. What an earlier end reported is out of date.
    if run.ranks.is_main and not is_done:
        for name in ("result.json", "report.md"):
            (run.run_dir / name).unlink(missing_ok=True)
        write_description(run)


def prepare_loop(run: Run) -> None:
    """Starts the loader's thread and makes what the loop needs in addition to the model."""
    run.loader = run.job.loader(run)
    run.peak_flops = peak_flops(run.ranks.device)
    run.stopper = Stopper(run.ranks)
    if run.ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.ranks.device)
    run.logged = dataclasses.replace(run.progress)
    gc.collect()
    gc.freeze()  # else a collection of what the compiler left slows down some steps
    run.ranks.sync()


def log_steps(run: Run) -> None:
    """Waits for the device, counts the training time, and logs the steps since the last line."""
    config = run.job.config
    state = run.state
    progress = run.progress
    loss = torch.stack(run.losses).mean()
    if run.ranks.world > 1:
        dist.all_reduce(loss)
    loss = loss.item()
    run.ranks.sync()
    now = time.perf_counter()
    progress.train_seconds += now - run.clock
    run.clock = now
    check_finite(run, "the loss", loss)

    seconds = max(progress.train_seconds - run.logged.train_seconds, 1e-9)
    tokens = progress.tokens - run.logged.tokens
    flops = run.job.flops(run.batch.positions)
    progress.flops += flops * tokens
    entry = {
        "step": state.step,
        "tokens": progress.tokens,
        "loss": loss,
        "bpb": loss / math.log(2) / run.job.bytes_per_token,
        "lr": lr_multiplier(config, state.step - 1),  # without the base rates
        "step_ms": seconds / len(run.losses) * 1e3,
        "tokens_per_second": tokens / seconds,
        "mfu": tokens / seconds * flops / (run.peak_flops * run.ranks.world),
        "memory_gib": peak_memory_gib(run.ranks.device),
        "train_seconds": progress.train_seconds,
        **run.batch.notes,
    }
    run.log.write(entry)
    notes = "".join(f" | {name} {value:.4g}" for name, value in run.batch.notes.items())
    run.log.say(step_line(entry, config.num_steps, run.job.seconds_left(run, entry)) + notes)
    run.logged = dataclasses.replace(progress)
    run.losses.clear()


def evaluate(run: Run) -> dict:
    """Logs the scores of the held-out text and returns them."""
    entry = {"step": run.state.step, "tokens": run.progress.tokens, "train_seconds": run.progress.train_seconds}
    if run.job.scored:
        entry["scored"] = run.job.scored
    scores = run.job.evaluate(run)
    for name, value in scores.items():
        check_finite(run, name, value)
    run.log.write({**entry, **scores})
    line = " | ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())
    place = f"step {run.state.step:6d}/{run.job.config.num_steps}"
    run.log.say(f"{place} | {line} | elapsed {run.progress.train_seconds:.1f} s")
    return scores


def check_finite(run: Run, name: str, value: float) -> None:
    """Raises UserError with the way out. Every checkpoint is finite, as save() asks too."""
    if not math.isfinite(value):
        way = "start again with lower rates, e.g. half of --muon-lr and --adam-lr"
        raise UserError(f"{name} became {value} at step {run.state.step}; {way}")


def save(run: Run) -> None:
    """Writes a checkpoint of this step, in any thread."""
    begin = time.perf_counter()
    if run.ranks.device.type == "cuda":
        torch.cuda.set_device(run.ranks.device)  # each thread has its own
    if not run.state.optimizer.is_finite():
        check_finite(run, "a weight or moment", math.nan)
    save_checkpoint(run.state, run.run_dir, dataclasses.asdict(run.progress))
    seconds = time.perf_counter() - begin
    run.log.say(f"step {run.state.step:6d}/{run.job.config.num_steps} | saved in {seconds:.1f} s")


def finish(run: Run) -> dict:
    """Logs, evaluates and saves the last step; returns the result."""
    state = run.state
    progress = run.progress
    run.loader.close()
    is_new = bool(run.losses)  # not so where --resume found the run at its end
    if is_new:
        blend_average(state)
        log_steps(run)
    state.graphs = None  # the report's samples can have their memory
    torch._logging.set_logs(recompiles=False)  # and may compile
    progress.scores = progress.scores or evaluate(run)
    seconds = max(progress.train_seconds, 1e-9)

    result = {
        **progress.scores,
        "steps": state.step,
        "tokens": progress.tokens,
        "train_seconds": progress.train_seconds,
        "tokens_per_second": progress.tokens / seconds,
        "mfu": progress.flops / (seconds * run.peak_flops * run.ranks.world),
        "peak_memory_gib": peak_memory_gib(run.ranks.device),
        "run_dir": str(run.run_dir),
    }
    # The report is made while the checkpoint is written.
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, run) if is_new and run.job.config.save_every >= 0 else None
        if run.ranks.is_main:
            report(run, result)
    if saving:
        saving.result()  # raises what went wrong
    # Last, since it says that the run is complete.
    path = run.run_dir / "result.json"
    if run.ranks.is_main and (is_new or not path.exists()):
        write_atomically(path, json.dumps(result, indent=1).encode())
    if run.log.wandb is not None:
        run.log.wandb.finish()
    return result


def report(run: Run, result: dict) -> None:
    """Writes report.md, curve.png and samples, if runs/report.py is there."""
    config = run.job.config
    live = (sys.modules[__name__], run.state.model, run.job.tokenizer, config, run.state.step)
    try:
        # Beside this script, or for the copy in a run directory where that run began.
        for folder in (Path(__file__).resolve().parent, Path(read_description(run.run_dir)["folder"])):
            sys.path.append(str(folder / "runs"))
        import report as tool

        tool.write_report(run.run_dir, live=live, result=result)
    except Exception as error:  # whatever it is, the run ends well
        run.log.say(f"no report ({error!r}); for one: python runs/report.py {run.run_dir}")


class Stopper:
    """Turns SIGTERM, Ctrl-C and the end of the terminal into a flag for the loop to read."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.caught_at = 0.0
        numbers = [signal.SIGTERM, signal.SIGINT]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)  # Windows has none, and nohup ignores it
        for number in numbers:
            signal.signal(number, self.catch)

    def catch(self, number, frame) -> None:
        # A second Ctrl-C stops at once. Under torchrun each one comes twice.
        if number == signal.SIGINT and 0 < self.caught_at < time.monotonic() - 1:
            raise KeyboardInterrupt
        self.caught_at = time.monotonic()

    def asked(self, step: int) -> bool:
        if self.ranks.world == 1:
            return self.caught_at > 0
        if step % 10:  # all must stop at the same step, and asking costs a synchronisation
            return False
        flag = torch.tensor(self.caught_at, device=self.ranks.device)
        dist.all_reduce(flag)
        return flag.item() > 0


# -- model, optimizer and warm-up


def compiler_choices():
    """What torch's compiler chooses differently here: how to sum rows, which kernels to combine."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Combination

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction) -> bool:
            # A program that holds a row reads it once. The compiler would read rows twice where one
            # operand has another shape, as gates have, or a row has more than 1,024 numbers.
            size = features.reduction_numel
            fits = size.is_number and size <= 2048 and features.get_reduction_hint().name in ("INNER", "DEFAULT")
            return fits or InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    def small_kernels(scheduler) -> list[list]:
        # A kernel that moves over 16 MB gains nothing in a combination, and is not tuned there.
        groups = Combination._default_group_nodes_for_combo_kernels(scheduler)
        return [[node for node in group if node.get_read_write_buffers_sizes() < 2**24] for group in groups]

    Combination.set_group_algorithm_for_combo_kernels(small_kernels)
    return Choices()


def build_state(config: Config, ranks: Ranks, say: Callable = print) -> TrainState:
    """Model, optimizer and compiled forward, with the weights of config.seed."""
    dtype = choose_dtype(config, ranks.device)
    model = GPT(config, ranks.device, dtype)
    check_memory(model)
    model.attention = choose_attention(model, say)
    forward = model
    if config.compile and ranks.device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        # Small kernels that do not depend on each other become one. Each keeps its own block sizes, since
        # kernels with common ones take much longer to compile.
        options = {"combo_kernels": True, "combo_kernel_per_subkernel_blocks": True}
        # The cache of compiled code knows only the name of this function: clear it after a change.
        torch._inductor.config.inductor_choices_class = compiler_choices
        forward = torch.compile(model, dynamic=False, fullgraph=True, options=options)
    optimizer = Optimizer(model, config, ranks, parameter_table(config))
    # Free memory may differ between GPUs, but all ranks must run the same number of micro-batches.
    micro_packs = min(ranks.gather(choose_packs(config, ranks)))
    state = TrainState(config, ranks, model, forward, optimizer, micro_packs)
    if forward is not model:
        shares = {stage.packs // ranks.world for stage in config.stage_table}
        state.dynamic_tokens = len({largest_divisor(share, micro_packs) for share in shares}) > 1
        state.graphs = {} if config.cuda_graphs else None
    if dtype == torch.float16:  # else small gradients become 0
        state.loss_scale = 2.0**12
    describe_state(state, say)
    reset_state(state)
    return state


def check_memory(model: nn.Module) -> None:
    """Raises UserError if there is no GPU and too little memory, as the system would kill the run without a word."""
    if model.embed.is_cuda or not hasattr(os, "sysconf"):  # Windows has none
        return
    # Weights, gradients and two moments. N-gram tables need less, but activations come on top: P100's model took 5
    # times its weights before its first step.
    needed = 4 * sum(param.nbytes for param in model.parameters()) / 2**30
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = f"training this model without a GPU takes about {needed:.0f} GiB, and this machine has {memory:.0f} GiB"
    require(needed < memory, f"{found}; use a GPU, or a smaller model such as that of runs/cpu.args")


def describe_state(state: TrainState, say: Callable) -> None:
    """Says what was decided for this machine; which attention it is, choose_attention() says."""
    config = state.config
    model = state.model
    params = dict(model.named_parameters())
    size = sum(param.numel() for param in params.values()) / 1e6
    tables = ", ".join(f"{name} {len(param):,}" for name, param in params.items() if name.endswith("embed"))
    compiled = "compiled" if state.forward is not model else "not compiled"
    graphs = "no CUDA graphs" if state.graphs is None else "CUDA graphs"
    fp8 = "fp8 in " + ", ".join(model.fp8_products) if model.fp8_products else "no fp8"
    say(f"model: {size:.1f} M parameters in {model.embed.dtype}, {fp8}")
    say(f"rows of tables: {tables}")
    say(f"step: micro-batch {state.micro_packs * config.pack_tokens:,} tokens, {compiled}, {graphs}")


def reset_state(state: TrainState) -> None:
    """The state of step 0: initial weights, zero moments, no trace of the warm-up."""
    state.model.zero_grad(set_to_none=True)
    state.model.init_weights(state.config.seed)
    if state.ranks.world > 1:
        for param in state.model.parameters():
            dist.broadcast(param.detach(), 0)
    state.optimizer.reset()
    state.step = 0


def warm_up(state: TrainState, say: Callable) -> None:
    """Compiles and captures everything on dummy tokens of each stage, then resets the state."""
    begin = time.perf_counter()
    gc.disable()  # else it scans the compiler's graphs again and again
    for stage in state.config.stage_table:
        own = stage.packs // state.ranks.world
        packs = largest_divisor(own, state.micro_packs)
        # Where a step has several micro-batches, the second has a graph of its own.
        count = packs if state.graphs is None else min(2 * packs, own)
        # A copy with this stage's micro-batch; it shares the model, the optimizer and the graphs.
        trial = dataclasses.replace(state, micro_packs=packs)
        train_step(trial, dummy_batch(state.config, state.ranks, count))

    # If memory is too small for validation, this should show now.
    batch = dummy_batch(state.config, state.ranks, state.micro_packs)
    token_bytes = torch.ones(state.config.padded_vocab, dtype=torch.long, device=state.ranks.device)
    bits_per_byte(state.model, batch, state.micro_packs, token_bytes, state.ranks)

    gc.enable()
    reset_state(state)
    torch._logging.set_logs(recompiles=True)  # one that comes now takes its seconds from the clock
    say(f"warm-up: {time.perf_counter() - begin:.1f} s")


def dummy_batch(config: Config, ranks: Ranks, packs: int) -> Batch:
    """A batch of so many packs for each rank, random tokens in documents of maximal length."""
    batch = empty_packs(packs, config, 0)
    batch.tokens.random_(config.vocab_size, generator=torch.Generator())
    batch.targets.copy_(batch.tokens)
    for row in range(packs):
        fill_pack(batch, row, ())  # random tokens stay
    batch.total_tokens *= ranks.world
    batch.total_targets = batch.total_tokens
    return batch


def choose_packs(config: Config, ranks: Ranks) -> int:
    """The most packs in a micro-batch: the largest divisor of a rank's share that memory allows."""
    tokens = config.micro_batch_tokens
    if not tokens and ranks.device.type == "cuda":
        tokens = micro_batch_limit(config, torch.cuda.mem_get_info(ranks.device)[0])
    most = max(int((tokens or 8192) // config.pack_tokens), 1)
    return max(largest_divisor(stage.packs // ranks.world, most) for stage in config.stage_table)


# -- ranks and devices


# What torchrun sets. Some of it may be left over, or come from another launcher.
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_ranks() -> Ranks:
    """Picks the device and joins the process group that torchrun describes in the environment."""
    given = [name for name in TORCHRUN if os.environ.get(name)]
    if len(given) < len(TORCHRUN):
        for name in TORCHRUN:
            os.environ.pop(name, None)
        if given:
            print(f"note: {', '.join(given)} ignored, as torchrun would set {', '.join(TORCHRUN)}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        # Spinning OpenMP threads slow down other runs on the host.
        torch.set_num_threads(1)
    if world > 1 and not dist.is_initialized():
        # When a process dies, torchrun ends the others; when one hangs, this timeout does.
        timeout = datetime.timedelta(minutes=10)
        if device.type == "cuda":
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
    return Ranks(rank, world, device)


def bf16_is_native() -> bool:
    """By compute capability, as torch.cuda.is_bf16_supported() is also true for slow emulation."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    """bf16 where the hardware has it, fp16 on older GPUs, fp32 elsewhere."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if bf16_is_native() else torch.float16


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: of the GPU, or of the process."""
    if device.type == "cuda":
        # Reserved memory, because graphs hold memory that no longer counts as allocated.
        return torch.cuda.max_memory_reserved(device) / 2**30
    if os.name == "nt":  # which has no module resource
        return 0.0
    import resource

    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# Dense bf16 peak (T4, V100: fp16) in TFLOP/s, by the makers' data sheets; also for fp8.
PEAK_TFLOPS = {
    "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "GH200": 989, "H800": 989,
    "B200": 2250, "GB200": 2500, "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10": 125, "L40S": 362, "L4": 121,
    "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71, "T4": 65, "V100": 125, "MI300X": 1307.4,
}  # fmt: skip


def peak_flops(device: torch.device) -> float:
    """Peak FLOP/s of the device; infinite if the table does not know it, which makes the MFU 0."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for key, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{key}\b", name):  # an A4000 is no A40
            return tflops * 1e12
    return math.inf


def flops_per_token(config: Config, positions: Tensor) -> float:
    """Training FLOPs: 6 for each weight of a matrix, 12 x heads x head width for each key seen."""
    c = config
    attention = 4 * c.width**2 * len(c.attention_layers)
    mlp = (2 + c.swiglu) * c.mlp_width * c.width * c.num_layers
    head = c.width * c.padded_vocab
    windows = (c.window_short, c.window_long)
    keys_seen = [positions.clamp(max=window).float().mean().item() + 1 for window in windows]
    attended = sum(keys_seen[layer in c.long_layers] for layer in c.attention_layers)
    attended += keys_seen[0] * len(c.paired_layers)  # those of the other head
    return 6 * (attention + mlp + head) + 12 * c.width * attended


def describe_machine(ranks: Ranks) -> dict:
    """Versions, hardware and commit: what it takes to compare two runs."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", folder, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    commit = ""
    if shutil.which("git"):
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    gpu = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": triton.__version__ if triton else "",
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": gpu or f"{ranks.device.type}, {os.cpu_count()} cores",
        "gpu_uuid": str(torch.cuda.get_device_properties(ranks.device).uuid) if gpu else "",
        "num_devices": ranks.world,
        "git_commit": commit.removesuffix("-dirty"),
        "git_dirty": commit.endswith("-dirty"),
        "script_sha256": hashlib.sha256(SOURCE).hexdigest(),
    }


# ===============================================================================
# 9. FILES -- the dataset directory, and the run directory: log and checkpoints


class Tokenizer:
    """tokenizer.json: split pattern, base64 ranks, special tokens. Only encoding needs tiktoken."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with explain_damage(self.path):
            spec = json.loads(self.path.read_bytes())
            self.pattern = spec["pattern"]
            self.specials = dict(spec["special_tokens"])
            ranks = [base64.b64decode(rank) for rank in spec["ranks"]]
        self.vocab_size = len(ranks) + len(self.specials)
        self.mergeable = {rank: i for i, rank in enumerate(ranks)}
        self.bos_id = self.specials.get("<|bos|>", self.specials.get("<|endoftext|>"))

        # The raw bytes of each token, never those of decoded text. Specials carry no text.
        self.bytes = ranks + [b""] * (self.vocab_size - len(ranks))
        for text, index in self.specials.items():
            self.bytes[index] = text.encode()
        self.token_bytes = np.array([len(b) for b in self.bytes], np.int32)
        self.token_bytes[len(ranks) :] = 0

    def prefix_ids(self) -> list[int]:
        """For each token the longest other one that it begins with, or -1 (record 88)."""
        found = []
        for text in self.mergeable:
            shorter = (self.mergeable.get(text[:length]) for length in range(len(text) - 1, 0, -1))
            found.append(next((index for index in shorter if index is not None), -1))
        return found + [-1] * (self.vocab_size - len(found))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it stay text."""
        return self.encoding.encode_ordinary(text)

    @functools.cached_property
    def encoding(self):
        """tiktoken's encoder."""
        import tiktoken

        tokens = {"mergeable_ranks": self.mergeable, "special_tokens": self.specials}
        return tiktoken.Encoding("decoderstack", pat_str=self.pattern, **tokens)

    def decode_bytes(self, ids) -> bytes:
        return b"".join(self.bytes[i] for i in ids)

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


@dataclass
class Dataset:
    """A dataset directory. Only what dataset.json lists is read; data/check.py looks closer."""

    root: Path
    info: dict  # dataset.json
    tokenizer: Tokenizer

    @staticmethod
    def open(root: str | Path) -> Dataset:
        root = Path(root).expanduser()
        path = root / "dataset.json"
        if not path.is_file():
            known = {"climbmix": "climbmix", "stdlib": "stdlib --vocab-size 4096"}
            known |= {name: f"pypi:{name}" for name in ("p34", "p100", "p400")}
            source = known.get(root.name, "SOURCE")
            way = f"make one with `python data/pretrain.py --source {source} --out {root}`"
            others = [found.parent.name for found in sorted(root.parent.glob("*/dataset.json"))]
            if others:
                way = f"name one of those in {root.parent} with --data ({', '.join(others)}), or {way}"
            raise UserError(f"no dataset at {root}; {way}; data/README.md lists the sources")
        with explain_damage(path):
            info = json.loads(path.read_bytes())
            if "sha256" in info:  # older datasets have no seal
                unseal(path.read_bytes())
            listed = info["files"]["tokenizer.json"]["sha256"]
        tokenizer = root / "tokenizer.json"
        if not tokenizer.is_file() or file_sha256(tokenizer) != listed:
            raise UserError(f"{tokenizer} is not the tokenizer that its shards were made with; make the dataset again")
        return Dataset(root, info, Tokenizer(tokenizer))

    def files(self, split: str, folder: str = "pretrain") -> list[Path]:
        """The shards of a split, without the loss masks beside them."""
        pattern = rf"{folder}/{split}_\d+\.bin"
        names = sorted(name for name in self.info["files"] if re.fullmatch(pattern, name))
        require(names, f"{self.root}/{folder} has no {split}_*.bin shards; make them with data/{folder}.py")
        return [self.root / name for name in names]

    def total(self, split: str, key: str) -> int:
        """Sum of a count, "tokens" or "text_bytes", over the shards of a split for pretraining."""
        listed = self.info["files"].items()
        return sum(entry[key] for name, entry in listed if name.startswith(f"pretrain/{split}_"))

    def read(self, path: Path) -> np.ndarray:
        """Tokens of a listed shard, uint16. Raises: UserError if the file is not the listed one"""
        content = path.read_bytes() if path.is_file() else b""
        listed = self.info["files"][path.relative_to(self.root).as_posix()]
        way = "make or download it again with the scripts in data/"
        if hashlib.sha256(content).hexdigest() != listed["sha256"]:
            raise UserError(f"{path} was changed or is missing: its sha256 is not the one in dataset.json; {way}")
        return np.frombuffer(content, "<u2", offset=1024)


@contextlib.contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turns what a damaged JSON file leads to into one sentence."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r:.200}); restore or rebuild it") from None


def seal(description: dict) -> bytes:
    """JSON whose last entry is the sha256 of the JSON without it."""
    digest = hashlib.sha256(json.dumps(description, indent=1).encode()).hexdigest()
    return json.dumps({**description, "sha256": digest}, indent=1).encode()


def unseal(content: bytes) -> dict:
    """What seal() was given. Raises: ValueError if this is not what it returned"""
    description = json.loads(content)
    if isinstance(description, dict):
        description.pop("sha256", None)
        if seal(description) == content.rstrip(b"\n"):
            return description
    raise ValueError("it was changed, or written by another version of the script")


def write_atomically(path: Path, content: bytes) -> None:
    """A reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Rises when a name that tools in runs/ use (tests/test_interface.py) changes its meaning.
INTERFACE = 10


def prepare_run_dir(job: Pretraining, args: argparse.Namespace, ranks: Ranks) -> tuple[Path, object]:
    """The run directory, the same on all ranks, and in process 0 what holds its lock."""
    run_dir = None
    lock = None
    if ranks.is_main:
        now = datetime.datetime.now()
        kind = "" if job.command == "pretrain" else f"_{job.command}"
        run_dir = Path(args.run_dir or f"out/{now:%Y-%m-%d_%H-%M-%S}_{Path(__file__).stem}{kind}")
        run_dir.mkdir(parents=True, exist_ok=True)
        # A process may use its own run again.
        lock = filelock.FileLock(run_dir / ".lock", is_singleton=True)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            way = "wait until it ends, or choose another --run-dir"
            raise UserError(f"another process is training in {run_dir}; {way}") from None
        except (OSError, NotImplementedError):
            print(f"note: the file system of {run_dir} has no locks; do not start a second run there", file=sys.stderr)
        # Without them a run ended before its first save, and may start again.
        begun = checkpoints(run_dir) or (run_dir / "result.json").exists()
        if begun and not args.resume:
            way = "continue it with --resume, remove it, or choose another --run-dir"
            raise UserError(f"{run_dir} already holds a run; {way}")
    return ranks.gather(run_dir)[0], lock


def read_description(run_dir: Path) -> dict:
    """config.json of a run."""
    path = run_dir / "config.json"
    require(path.is_file(), f"{run_dir} is not a run directory: it has no config.json; choose one")
    with explain_damage(path):
        return unseal(path.read_bytes())


def read_config(run_dir: Path) -> Config:
    """The Config of a run, from its config.json, without fields that this script does not know."""
    values = read_description(run_dir)["config"]
    known = {f.name for f in dataclasses.fields(Config)}
    return Config(**{name: as_tuple(value) for name, value in values.items() if name in known})


def as_tuple(value):
    """JSON has lists where Config has tuples."""
    return tuple(as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


class Log:
    """Lines on the screen, and objects in log.jsonl; rank 0 only."""

    def __init__(self, run_dir: Path, ranks: Ranks):
        self.path = run_dir / "log.jsonl"
        self.active = ranks.is_main
        self.wandb = None

    def start_wandb(self, name: str, config: dict) -> None:
        """Starts a run of wandb, or continues the one that this run directory has begun."""
        import wandb

        id_path = self.path.with_name("wandb_id.txt")
        if not id_path.is_file():
            id_path.write_text(os.urandom(4).hex())
        project = os.environ.get("WANDB_PROJECT", "decoderstack")
        options = {"id": id_path.read_text(), "resume": "allow", "dir": str(self.path.parent)}
        try:
            self.wandb = wandb.init(project=project, name=name, config=config, **options)
        except wandb.errors.UsageError as error:  # no key
            way = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise UserError(f"--wandb cannot start ({str(error).splitlines()[0]}); {way}") from None

    def say(self, text: str) -> None:
        if not self.active:
            return
        try:
            print(text, flush=True)
        except OSError:  # `| head` has ended, or the terminal: the run does without
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def write(self, entry: dict) -> None:
        """Adds an object to log.jsonl, and its numbers to wandb."""
        if not self.active:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self.wandb is not None:
            numbers = {k: v for k, v in entry.items() if isinstance(v, int | float)}
            self.wandb.log(numbers, step=entry["step"])

    def rewind(self, step: int) -> None:
        """Drops entries after a step, as a resumed run writes them anew, and damaged lines."""
        if not self.active or not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    kept.append(f"{line}\n")
        write_atomically(self.path, "".join(kept).encode())


def step_line(entry: dict, num_steps: int, eta: float) -> str:
    """A training step on the screen, with the seconds that are left."""
    e = entry
    bpb = f"| bpb {e['bpb']:6.4f} " if e["bpb"] else ""  # 0 where targets have no bytes
    mfu = f"| mfu {e['mfu']:5.1%} " if e["mfu"] else ""  # 0 where the peak is unknown
    return (
        f"step {e['step']:6d}/{num_steps} | loss {e['loss']:7.4f} {bpb}"
        f"| lr {e['lr']:5.3f} | {e['step_ms']:8.1f} ms | {e['tokens_per_second']:9,.0f} tok/s {mfu}"
        f"| {e['memory_gib']:5.1f} GiB | {e['train_seconds']:6.1f} s | eta {eta:5.0f} s"
    )


# -- checkpoints

CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors")


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folders = [path.parent for path in run_dir.glob("checkpoints/step_*/state.json")]
    steps = {folder.name.removeprefix("step_"): folder for folder in folders}
    return [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)]


def save_checkpoint(state: TrainState, run_dir: Path, progress: dict) -> None:
    """Writes checkpoints/step_N/ in one rename, then removes old ones; every rank must call it."""
    weights = state.optimizer.weights()
    moments = state.optimizer.state(averages=state.averaged_steps > 0)
    if state.ranks.is_main:
        buffers = {k: v for k, v in state.model.state_dict().items() if k not in weights}
        description = {"step": state.step, "averaged_steps": state.averaged_steps, **progress}
        write_checkpoint(run_dir, (weights | buffers, moments), description)
        prune_checkpoints(run_dir, state.step, state.config.keep_checkpoints)
    # When the first process ends, torchrun ends the others. So all wait until everything is saved.
    state.ranks.gather(None)


def write_checkpoint(run_dir: Path, tensors: tuple[dict, dict], description: dict) -> None:
    """Everything is on the disk before it gets its name. tensors: those of each CHECKPOINT_FILES"""
    final = run_dir / "checkpoints" / f"step_{description['step']:06d}"
    temporary = final.with_name("saving")
    shutil.rmtree(temporary, ignore_errors=True)  # of a save that was killed
    temporary.mkdir(parents=True)
    paths = [temporary / name for name in CHECKPOINT_FILES]
    with ThreadPoolExecutor() as pool:
        files = dict(zip(CHECKPOINT_FILES, pool.map(write_tensors, paths, tensors), strict=True))
    write_atomically(temporary / "state.json", seal({**description, "files": files}))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)


def read_state(folder: Path) -> dict:
    """state.json of a checkpoint. Raises: OSError, or ValueError if it is not what was saved"""
    return unseal((folder / "state.json").read_bytes())


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Writes a safetensors file, hashes it meanwhile, piece by piece, and returns its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(2) as pool:
        # The disk is busy from the start: one long sync at the end would add its time.
        synced = pool.submit(os.fsync, file.fileno())
        for piece in safetensors_pieces(tensors):
            hashed = pool.submit(digest.update, piece)
            file.write(piece)
            hashed.result()
            if synced.done():
                synced.result()  # raises, if the disk is full
                synced = pool.submit(os.fsync, file.fileno())
        file.flush()
        synced.result()
        os.fsync(file.fileno())
    return digest.hexdigest()


def safetensors_pieces(tensors: dict[str, Tensor]) -> Iterator:
    """The content of a safetensors file, in pieces that each replace the one before."""
    header = {}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.nbytes
        dtype = SAFETENSORS_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text

    buffer = torch.empty(2**26, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    for tensor in tensors.values():
        for piece in tensor.contiguous().view(-1).view(torch.uint8).split(len(buffer)):
            buffer[: len(piece)].copy_(piece)
            yield buffer[: len(piece)].numpy()


SAFETENSORS_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32",
}  # fmt: skip


def prune_checkpoints(run_dir: Path, step: int, keep: int) -> None:
    """Keeps the newest `keep` checkpoints up to a step and the one with the lowest val_bpb."""
    # resume() has skipped those of later steps.
    folders = [folder for folder in checkpoints(run_dir) if int(folder.name[5:]) <= step]
    scores = dict.fromkeys(folders, math.inf)
    for folder in folders:
        with contextlib.suppress(ValueError, KeyError):  # a damaged one has no score
            scores[folder] = (read_state(folder)["scores"] or {}).get("val_bpb", math.inf)
    best = min(scores, key=scores.get)
    for folder in folders[:-keep]:
        if folder != best or scores[best] == math.inf:
            shutil.rmtree(folder, ignore_errors=True)


def check_checkpoint(folder: Path, names=CHECKPOINT_FILES) -> dict:
    """Returns state.json; raises UserError if it or a named file is not what was saved."""
    try:
        saved = read_state(folder)
        with ThreadPoolExecutor() as pool:
            hashes = list(pool.map(file_sha256, [folder / name for name in names]))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is damaged ({error})") from None
    for name, found in zip(names, hashes, strict=True):
        require(found == saved["files"][name], f"{folder / name} is damaged: its sha256 is not the one in state.json")
    return saved


def newest_whole(run_dir: Path, say: Callable, names=CHECKPOINT_FILES) -> Path | None:
    """The newest checkpoint without damage, if there is one; says which ones it skips."""
    for folder in reversed(checkpoints(run_dir)):
        try:
            check_checkpoint(folder, names)
            return folder
        except UserError as error:
            say(f"skipped {folder.name}: {error}")
    return None


def load_checkpoint(state: TrainState, folder: Path) -> dict:
    """Restores weights and moments, on any number of ranks; returns state.json."""
    saved = read_state(folder)
    weights, moments = (safetensors.torch.load_file(folder / name) for name in CHECKPOINT_FILES)
    state.optimizer.load(weights, moments)
    buffers = dict(state.model.named_buffers())
    for name in weights.keys() & buffers.keys():
        buffers[name].copy_(weights[name])
    state.step = saved["step"]
    state.averaged_steps = saved["averaged_steps"]
    return saved


# ===============================================================================
# 10. COMMAND LINE -- a flag for each field of Config, checks of the config


def is_within(value, limits) -> bool:
    """Whether a number is in a range of RANGES, or a tuple in those of its entries."""
    if isinstance(limits, list):
        return isinstance(value, tuple) and all(is_within(entry, limits[0]) for entry in value)
    if isinstance(limits[0], tuple):  # a tuple of so many entries, or none
        fits = isinstance(value, tuple) and len(value) in (0, len(limits))
        return fits and all(map(is_within, value, limits))
    least, most = limits
    kinds = (int,) if isinstance(least, int) else (int, float)
    return type(value) in kinds and least <= value <= most


def check_ranges(config: Config) -> None:
    """Raises UserError if a number is not in its range."""
    for names, limits in RANGES.items():
        for name in names.split():
            value = getattr(config, name)
            require(is_within(value, limits), f"{name}={value!r} is not in its range {limits}")


def check_layers(c: Config) -> None:
    """Raises UserError if the lists of layers do not fit each other."""
    without = set(c.no_attention_layers)
    with_attention = {*c.value_embed_layers, *c.paired_layers, *c.exclusive_layers, *c.gated_layers}
    never_paired = {*c.long_layers, *c.key_offset_layers}
    last = c.num_layers - 1
    for name, layers in vars(c).items():
        if name.endswith("_layers") and isinstance(layers, tuple):
            fits = max(layers, default=0) <= last
            require(fits, f"{name}={layers} goes beyond the last layer, {last}; pass others")
    require(not without & with_attention, "a layer of value_embed, paired, exclusive or gated_layers has no attention")
    require(not never_paired & {*c.paired_layers}, "a layer of paired_layers is long or has a key offset")
    if c.paired_layers:
        require(c.num_heads % 2 == 0, f"paired_layers need an even number of heads, not {c.num_heads}")
    require(c.shared_input_from not in without, "shared_input_from is a layer without attention")


def check_config(config: Config) -> None:
    """Raises UserError for the first mistake that it finds; torch reports the rest."""
    c = config
    total = sum(stage.fraction for stage in c.stage_table)
    require(c.dtype in ("auto", *DTYPES), f"--dtype {c.dtype} is not one of auto, {', '.join(DTYPES)}")
    names = ", ".join(ATTENTION)
    require(c.attention in ("auto", *ATTENTION), f"--attention {c.attention} is not one of auto, {names}")
    require(c.width % c.head_dim == 0, f"width={c.width} is not a multiple of head_dim={c.head_dim}")
    require(c.head_dim % 4 == 0, f"head_dim={c.head_dim} is not a multiple of 4")
    require(c.gate_width <= c.width, f"gate_width={c.gate_width} is above width={c.width}")
    require(1 not in (c.bigram_rows, c.trigram_rows), "an n-gram table needs at least two rows; 0 switches it off")
    require(sum(c.mtp_weights[:1]) > 0, "mtp_weights needs a weight for the next token; 1.0 alone is enough")
    require(c.momentum, "momentum needs four numbers, e.g. 0.85,0.95,300,50")
    require(c.max_seq_len <= c.pack_tokens, f"max_seq_len={c.max_seq_len} is above pack_tokens={c.pack_tokens}")
    require(abs(total - 1) < 1e-6, f"the fractions of the stages add up to {total:.4f}, not 1")
    whole = c.micro_batch_tokens % c.pack_tokens == 0
    require(whole, f"--micro-batch-tokens is not a multiple of pack_tokens={c.pack_tokens}")
    check_layers(c)


# What other projects call it.
OTHER_NAMES = {
    "--lr": "--muon-lr and --adam-lr",
    "--learning-rate": "--muon-lr and --adam-lr",
    "--batch-size": "--stages, or for memory --micro-batch-tokens",
}


class FlagParser(argparse.ArgumentParser):
    """Reads flags from files too; a wrong one is one sentence that names the nearest."""

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        try:
            return shlex.split(line.strip("\ufeff\xef\xbb\xbf"), comments=True)  # a BOM may come first
        except ValueError as error:
            raise UserError(f"{line.strip()!r:.200} in an args file cannot be read ({error}); fix it") from None

    def error(self, message: str) -> None:
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        if is_unknown:
            flag = words.split()[0].partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            meant = OTHER_NAMES.get(flag) or (near[0] if near else "")
            message = f"unknown flag {flag}" + (f"; did you mean {meant}?" if meant else "; --help lists all")
            if flag.endswith(".args"):
                message = f"unknown flag {flag}; an args file is given as @{flag}"
        if message.startswith("[Errno"):  # FILE of @FILE cannot be read
            message += "; give the path of an args file, e.g. @runs/cpu.args"
        raise UserError(message)


def build_parser() -> FlagParser:
    """The flags of a training run, one for each field of Config. runs/finetune.py has them too."""
    options = {"allow_abbrev": False, "fromfile_prefix_chars": "@", "epilog": "@FILE: more flags, e.g. @runs/cpu.args"}
    parser = FlagParser(description=__doc__.splitlines()[0], usage="%(prog)s [flags]", **options)
    add = parser.add_argument
    add("--run-dir", type=os.path.expanduser, metavar="DIR", help="run directory (default: a new dated one in out/)")
    add("--resume", action="store_true", help="continue the run in --run-dir, with its own recipe")
    add("--steps", type=read_int, metavar="N", help="length of the run in steps, instead of --tokens")
    helps = field_help()
    for field_ in dataclasses.fields(Config):
        name = field_.name
        flag = f"--{name.replace('_', '-')}"
        default = field_.default
        options = {"type": read_int if type(default) is int else type(default), "metavar": "X"}
        if isinstance(default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, tuple):
            options = {"type": read_list, "metavar": "X,X"}
            default = ",".join(map(str, default))
        text = helps[name].replace("%", "%%")
        add(flag, help=f"{text} [{default}]", **options)
    return parser


def field_help() -> dict[str, str]:
    """The comment of each field of Config in the source: behind it, or in the line above."""
    notes = {}
    above = ""
    for line in SOURCE.decode().partition("class Config:")[2].splitlines():
        code, _, note = line.partition("# ")
        notes.setdefault(code.partition(":")[0].strip(), note or above)
        above = note
    return notes


def read_int(text: str) -> int:
    """A whole number, as 1000, 1e3 or 1k; M and B are millions and billions."""
    digits = text.replace("k", "e3").replace("M", "e6").replace("B", "e9")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        number = fractions.Fraction(digits)
        if number.denominator == 1:
            return int(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number like 1000, 1e6 or 5M")


def read_list(text: str) -> tuple:
    """The value of a flag like 3,10 or (0.5,8,1.0),(0.5,16,1.4); nothing is the empty tuple."""
    try:
        return as_tuple(ast.literal_eval(f"[{text}]"))
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 3,10") from None


def given_fields(args: argparse.Namespace) -> dict:
    """The fields of Config that were given by flags."""
    values = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(Config)}
    return {name: value for name, value in values.items() if value is not None}


def change_config(base: Config | None, args: argparse.Namespace) -> Config:
    """A valid Config with the values that the flags give; base None: the defaults."""
    values = dataclasses.asdict(base) if base else {}
    values |= given_fields(args)
    require(args.steps is None or args.steps > 0, f"--steps {args.steps} trains nothing; use 1 or more")
    config = Config(**values)
    if args.steps:
        # The batch may depend on the length of the run, so this converges; each time the error halves.
        for _ in range(50):
            values["tokens"] = max(1, round(args.steps * config.step_tokens))
            config = Config(**values)
    check_config(config)
    return config


# What --resume may change: where a run ends, what it reports, and how it is executed.
FREE_ON_RESUME = (
    "tokens", "max_epochs", "log_every", "eval_every", "save_every", "keep_checkpoints", "data",
    "wandb", "micro_batch_tokens", "attention", "dtype", "compile", "cuda_graphs",
)  # fmt: skip


def resumed_config(args: argparse.Namespace) -> Config:
    """The Config of the run in --run-dir, with the flags that may change."""
    run_dir = Path(args.run_dir)
    base = read_config(run_dir)
    for name, value in given_fields(args).items():
        saved = getattr(base, name)
        if name not in FREE_ON_RESUME and value != saved:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"--resume cannot change {flag}: {run_dir} has {saved}; omit it")
    config = change_config(base, args)
    # A relative path that is not here is that of the folder where the run began.
    data = Path(read_description(run_dir)["folder"]) / config.data
    if args.data is None and data.is_dir() and not Path(config.data).is_dir():
        config = dataclasses.replace(config, data=str(data))
    return config


def make_config(args: argparse.Namespace) -> Config:
    """Defaults, or on --resume the saved Config, with the flags that were given."""
    if not args.resume:
        return change_config(None, args)
    if args.run_dir is None:  # the script that a run directory keeps
        args.run_dir = str(Path(__file__).parent)
        found = (Path(args.run_dir) / "config.json").is_file()
        require(found, "--resume needs --run-dir with the run to continue")
    run_dir = Path(args.run_dir)
    command = read_description(run_dir)["command"]
    tool = Path(__file__).name
    if command != "pretrain":
        tool = f"runs/encoder/{command}.py" if command.endswith("encoder") else f"runs/{command}.py"
    elif not (run_dir / tool).is_file():
        tool = next((path.name for path in run_dir.glob("train_*.py")), tool)
    if tool != Path(__file__).name:
        raise UserError(f"{run_dir} is a run of {tool}; continue it with python {tool} --resume --run-dir {run_dir}")
    return resumed_config(args)


def report_error(message: str) -> int:
    """Prints an error of the user; returns the exit code."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun ends with a report, whose last lines are the message of the process that failed first.
        reply = {"message": f"error: {message}", "timestamp": int(time.time())}
        Path(path).write_text(json.dumps(reply), encoding="utf-8")
    return 1


def run_command(command: Callable[[], dict]) -> int:
    """Prints what a command returns as one JSON object on the last line; returns the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console may lack letters of a path or a sample
    try:
        result = command()
    except UserError as error:
        return report_error(str(error))
    except torch.OutOfMemoryError:
        way = "pass --micro-batch-tokens with half of that printed above, but at least --pack-tokens"
        return report_error(f"the device ran out of memory; {way}, or see runs/TROUBLESHOOTING.md")
    except KeyboardInterrupt:
        way = "continue with --resume, or start again if nothing is saved yet"
        print(f"stopped at once; {way}", file=sys.stderr)
        return 130
    except Exception as error:
        # A full disk, a folder that cannot be written, a neighbour's connection that was lost.
        if isinstance(error, OSError | dist.DistError) or re.search("gloo|No space left|t allocate memory", str(error)):
            way = "fix that, then continue with --resume, or start again if nothing is saved yet"
            found = str(error).partition("\n")[0] or type(error).__name__
            return report_error(f"{found}; {way}")
        print("error: please report what follows, if it is a fault of the script", file=sys.stderr)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.unfreeze()  # a test or a tool may continue in this process
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result), flush=True)
    return 0


def pretrain(argv: list[str]) -> dict:
    args = build_parser().parse_args(argv)
    args.flags = list(argv)
    return train(Pretraining(make_config(args)), args)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: pretrain(sys.argv[1:] if argv is None else argv))


# ===============================================================================
# 11. ATTENTION -- causal, inside documents, over a window; one signature for all backends
# attention(windows, positions int (T,), cu_seqlens int32 (G + 1,), max_doc) prepares what all layers
# share and returns attend(q, k, v (T, H, K), index) -> (T, H, K), where q already is scaled. Query i
# sees keys j of its own document with i - windows[index] <= j <= i.


def block_mask(positions_T: Tensor, reach: int) -> Tensor:
    """Which keys each query sees in its own and the previous block, each at least as long as the reach.

    Returns: bool (T / block, 1, block, 2 block), or (1, 1, T, T) if T has no such divisor
    """
    T = positions_T.numel()
    block = next((b for b in range(max(reach, 1), T) if T % b == 0), T)
    index = torch.arange(T, device=positions_T.device)
    first = torch.maximum(index - positions_T, index - reach).view(-1, 1, block, 1)
    queries = index.view(-1, 1, block, 1)
    keys = index.view(-1, 1, 1, block)
    if block < T:
        keys = torch.cat((keys - block, keys), 3)
    return (keys >= first) & (keys <= queries)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q, k, v (T, H, K) and a block_mask -> (T, H, K), by scaled_dot_product_attention."""
    T, H, K = q.shape
    blocks, _, block, width = mask.shape
    q, k, v = (x.view(blocks, block, H, K).transpose(1, 2) for x in (q, k, v))
    if width > block:  # those of the previous block come first; the first block's mask hides them
        k = torch.cat((k.roll(1, 0), k), 2)
        v = torch.cat((v.roll(1, 0), v), 2)
    y = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
    return y.transpose(1, 2).reshape(T, H, K)


def sdpa_attention(windows, positions_T, cu_seqlens, max_doc) -> Callable:
    """Plain torch, on any device and in any dtype."""
    masks = [block_mask(positions_T, min(window, max_doc)) for window in windows]
    return lambda q, k, v, index: blocked_attention(q, k, v, masks[index])


def triton_attention(windows, positions_T, cu_seqlens, max_doc) -> Callable:
    """window_attention of section 12."""
    T = positions_T.numel()
    bounds = [attention_bounds(cu_seqlens, T, window) for window in windows]
    return lambda q, k, v, index: window_attention(q, k, v, bounds[index])


def load_fa3_attention() -> Callable:
    """FlashAttention 3 from the Hugging Face hub, for Hopper; not measured here."""
    try:
        from kernels import get_kernel

        flash = get_kernel("kernels-community/flash-attn3", version=1).flash_attn_varlen_func
    except Exception as error:  # a missing package, no network, no build for this GPU
        found = f"{type(error).__name__}: {error}"
        raise UserError(f"--attention fa3 cannot be loaded ({found}); omit it") from None

    def fa3_attention(windows, positions_T, cu_seqlens, max_doc) -> Callable:
        sizes = (cu_seqlens, cu_seqlens, max_doc, max_doc)

        def attend(q, k, v, index):
            window = (windows[index], 0)
            y = flash(q, k, v, *sizes, softmax_scale=1.0, causal=True, window_size=window)
            return y[0] if isinstance(y, tuple) else y

        return attend

    return fa3_attention


ATTENTION = ("fa3", "triton", "sdpa")


def choose_attention(model: nn.Module, say: Callable = print) -> Callable:
    """The backend that --attention names; by default our kernel where it fits, else SDPA. Raises: UserError"""
    K = model.config.head_dim
    kernel_fits = use_triton(model.embed) and K >= 16 and K.bit_count() == 1
    name = model.config.attention
    if name == "auto":
        name = "triton" if kernel_fits else "sdpa"
    if name == "triton" and not kernel_fits:
        needs = "an NVIDIA GPU from Ampere on, 16 bits and a head_dim that is a power of two"
        raise UserError(f"--attention triton cannot run here: it needs {needs}; omit it")
    say(f"attention: {name}")
    if name == "fa3":
        return load_fa3_attention()
    return triton_attention if name == "triton" else sdpa_attention


# ===============================================================================
# 12. KERNELS -- Triton, each beside the plain code for CPUs, fp32 and GPUs before Ampere
# tests/test_kernels.py compares both, dev/bench_kernels.py times them and tries the tiles below.
# Lines of a kernel's signature: tensors, then sizes and numbers, then constants.


def use_triton(x: Tensor) -> bool:
    """Kernels run on CUDA tensors of at most 16 bits, from Ampere on; plain code does the rest."""
    fits = triton is not None and x.is_cuda and x.itemsize <= 2
    return fits and torch.cuda.get_device_capability(x.device) >= (8, 0)


# Operator names are global; a second copy of this file in a process (of a run directory) needs others.
copies = 0
while hasattr(getattr(torch.ops, f"decoderstack{copies}"), "linear_ce"):
    copies += 1
OPS = f"decoderstack{copies}"

# Of operators that take any strides; to others torch.compile hands a copy of what it computes.
ANY_LAYOUT = (torch.Tag.flexible_layout,)

# -- softcapped cross-entropy: head, loss and gradient in one pass over the logits
# linear_cross_entropy > LinearCE (autograd) > linear_ce (by chunks) > softcap_ce or softcap_ce_ref
# With z = a sigmoid((x + b) / c), where a, b, c are height, shift and width, s = z / a and
# lse = log sum_j exp z_j: row t has N targets, targets[k, t] >= 0 with weight w_k, and S = sum_k w_k.
#   loss_t = S lse - sum_k w_k z[target_k]
#   dloss_t/dx_j = a/c s_j (1 - s_j) (S softmax_j - sum_k w_k [j = target_k])
# Without a softcap z = x, and the factor before the bracket is 1.


def softcap_ce_ref(logits, targets, target_weights, token_weight, cap, first=0, grad=True):
    """Losses and nats, fp32 (n,), and token_weight * gradient, as the logits, or None.

    Args: logits (n, V) of the tokens from `first` on; targets int (N, T); target_weights fp32 (N,);
          token_weight fp32 (T,) or None; cap as for softcap()
    """
    own = slice(first, first + len(logits))
    picks = targets[:, own].T.long()
    real = picks >= 0
    picks = picks.clamp(min=0)
    w = target_weights * real

    # e = exp(z - top). With a softcap z <= a, so no maximum is needed. To save memory in place,
    # and in one pass: torch.add(p, x, alpha=q) is p + q x.
    if cap:
        a, b, c = cap
        s = torch.add(torch.full((), b / c, device=w.device), logits.float(), alpha=1 / c).sigmoid_()
        e = torch.add(torch.full((), -a, device=w.device), s, alpha=a).exp_()
        z = a * s.gather(1, picks)
        top = a
    else:
        z = logits.float()
        top = z.amax(1)
        e = (z - top[:, None]).exp_()
        z = z.gather(1, picks)
    total = e.sum(1)
    lse = top + total.log()
    losses = w.sum(1) * lse - (w * z).sum(1)
    nats = (lse - z[:, 0]) * real[:, 0]
    if not grad:
        return losses, nats, None

    g = (a / c) * w if cap else w
    if token_weight is not None:
        g = g * token_weight[own, None]
    e.mul_((g.sum(1) / total)[:, None]).scatter_add_(1, picks, -g)
    if cap:
        e.mul_(s.addcmul_(s, s, value=-1))
    return losses, nats, e.to(logits.dtype)


@jit
def fast_tanh(x, FAST: tl.constexpr):
    """FAST is one instruction, off by up to 5e-4, which bf16 hides."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@jit
def to_bf16(x):
    """Two numbers an instruction; Triton rounds them one by one."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, True, 2)


@jit
def load_softcap(logits, j, a, b, c, V: tl.constexpr, FAST: tl.constexpr):
    """Of columns j: h = tanh((x + b) / 2c), so s (1 - s) = (1 - h^2) / 4, and e = exp(z - a)."""
    x = tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32)
    h = fast_tanh(x * (0.5 / c) + b * (0.5 / c), FAST)
    slope = a * 0.7213475204444817  # log2(e) / 2
    return h, tl.where(j < V, tl.exp2(h * slope - slope), 0.0)


@jit
def softcap_ce_kernel(
    logits, grad, losses, nats, targets, target_weights, token_weight,
    first, T, a, b, c,
    V: tl.constexpr, N: tl.constexpr, PAD: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One row of logits (n, V) a program, read once; grad (n, V) and token_weight may be None.

    The softmax part of the gradient is const * v with v = 4 e s (1 - s), or e without a softcap,
    known at the first look. Target columns are rewritten at the end.
    """
    row = tl.program_id(0)
    t = first + row
    logits += row.to(tl.int64) * V

    # The targets of the row, padded to a power of two.
    k = tl.arange(0, PAD)
    target = tl.load(targets + k * T + t, mask=k < N, other=-1).to(tl.int32)
    w = tl.where(target >= 0, tl.load(target_weights + k, mask=k < N, other=0.0), 0.0)
    W = tl.sum(w)

    # e = exp(z - top). With a softcap z <= a, so no maximum is needed.
    j = tl.arange(0, BLOCK)
    if CAP:
        h_t, e_t = load_softcap(logits, tl.maximum(target, 0), a, b, c, V, FAST)
        h, e = load_softcap(logits, j, a, b, c, V, FAST)
        z_t = a * (0.5 + 0.5 * h_t)
        v = e * (1.0 - h * h)
        v_t = 1.0 - h_t * h_t
        top = a
        slope = 0.25 * a / c
    else:
        z_t = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
        z = tl.load(logits + j, mask=j < V, other=float("-inf")).to(tl.float32)
        top = tl.max(z)
        e_t = tl.exp(z_t - top)
        e = tl.exp(z - top)
        v = e
        v_t = 1.0
        slope = 1.0
    v = to_bf16(v) if FAST else v  # half the registers: two programs a multiprocessor
    total = tl.sum(e)
    lse = top + tl.log(total)
    tl.store(losses + row, W * lse - tl.sum(w * z_t))
    tl.store(nats + row, tl.sum(tl.where((k == 0) & (target >= 0), lse - z_t, 0.0)))

    if grad is not None:
        grad += row.to(tl.int64) * V
        g = slope
        if token_weight is not None:
            g = g * tl.load(token_weight + t)
        v = v.to(tl.float32) * (g * W / total)
        tl.store(grad + j, v.to(grad.dtype.element_ty), mask=j < V)
        # Equal targets share a column. The barrier (bar.sync) puts these stores after those above.
        w = tl.sum(tl.where(target[:, None] == target[None, :], w[None, :], 0.0), 1)
        g_t = g * v_t * (W * e_t / total - w)
        tl.debug_barrier()
        tl.store(grad + target, g_t.to(grad.dtype.element_ty), mask=target >= 0)


def softcap_ce(logits, targets, target_weights, token_weight, cap, first=0, grad=True, out=None):
    """As softcap_ce_ref in a read and a write; the gradient replaces the logits or fills `out`."""
    n, V = logits.shape
    N = len(target_weights)
    losses, nats = torch.empty(2, n, dtype=torch.float32, device=logits.device)
    gradient = None
    if grad:
        gradient = logits if out is None else out
    tensors = (logits, gradient, losses, nats, targets, target_weights, token_weight)
    numbers = (first, targets.shape[1], *(cap or (0.0, 0.0, 1.0)))
    fast = grad and not triton.knobs.runtime.interpret
    pad = max(2, triton.next_power_of_2(N))
    constants = (V, N, pad, fast, triton.next_power_of_2(V), bool(cap))
    softcap_ce_kernel[(n,)](*tensors, *numbers, *constants, num_warps=16)
    return losses, nats, gradient


@jit
def transpose_kernel(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """x (B, M, N) -> y (B, N, M)."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    x += tl.program_id(2).to(tl.int64) * M * N
    y += tl.program_id(2).to(tl.int64) * M * N
    inside = (m[:, None] < M) & (n[None, :] < N)
    tile = tl.load(x + m[:, None] * N + n[None, :], mask=inside)
    inside = (n[:, None] < N) & (m[None, :] < M)
    tl.store(y + n[:, None] * M + m[None, :], tl.trans(tile), mask=inside)


@torch.library.custom_op(f"{OPS}::transpose8", mutates_args=(), tags=ANY_LAYOUT)
def transpose8(x: Tensor) -> Tensor:
    """(..., M, N) of one-byte items -> contiguous (..., N, M), for _scaled_mm's one layout."""
    M, N = x.shape[-2:]
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-2], N, M)
    grid = (triton.cdiv(M, 128), triton.cdiv(N, 128), x.numel() // (M * N))
    in_bytes = [t.view(torch.uint8) for t in (x, y)]
    transpose_kernel[grid](*in_bytes, M, N, BM=128, BN=128, num_warps=8)
    return y


transpose8.register_fake(lambda x: x.new_empty(*x.shape[:-2], x.size(-1), x.size(-2)))

# -- fp8 products
# An fp8 tensor stands for matrix * scale: x8 for x8 * x_scale, fp32 0-D or a number. Weights and
# activations are e4m3, gradients e5m2, sums fp32. Scales come from norms of rows, which bound what
# is cast: nothing of size (T, F) is searched for its maximum, and nothing is carried from step to
# step. A bound may be far off: e4m3 has 18 binades, e5m2 32. to_fp8 finds a scale, cast8 uses it.

E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
E5M2, E5M2_MAX = torch.float8_e5m2, 57344.0


def has_fp8_products(x: Tensor) -> bool:
    """Whether x is bf16 on Hopper or B200; an RTX 50 lacks shared memory."""
    fits = triton is not None and x.is_cuda and x.dtype == torch.bfloat16
    return fits and (9, 0) <= torch.cuda.get_device_capability(x.device) < (12, 0)


def fp8_products(config: Config, weight: Tensor) -> tuple[str, ...]:
    """Which of the products head, qkv, o and MLP are in fp8, for weights like this one."""
    c = config
    if not has_fp8_products(weight) or c.width % 16:
        return ()
    # torch 2.11 keeps what an autograd.Function saves even if told to recompute.
    in_layers = c.fp8 and not c.recompute
    fits = {
        "head": c.fp8_head,
        # TMA asks for quarters of heads of 16 bytes; heads of 256 do not fit into registers.
        "qkv": in_layers and c.head_dim in (32, 64, 128),
        "o": in_layers and c.fp8_o,
        "MLP": in_layers and c.mlp_width % 16 == 0 and not c.swiglu,
    }
    return tuple(product for product in fits if fits[product])


def largest_row_norm(x: Tensor) -> Tensor:
    """The largest norm of a row of x (..., N, K), fp32, (...)."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax(-1).clamp(min=1e-20)


def cast8(x: Tensor, inverse_scale: Tensor | float, dtype: torch.dtype = E4M3) -> Tensor:
    """x times 1 / scale, rounded once; eager torch would first round a 0-D factor as x."""
    return (x.float() * inverse_scale).to(dtype)


def product8(a_MK: Tensor, b_NK: Tensor, scale: Tensor, dtype: torch.dtype, fast=False) -> Tensor:
    """a b^T times a 0-D fp32 scale, (M, N) in dtype, of contiguous fp8 operands.

    fast: sums of 14 bits, precise enough where K is a width, but not for gradients of weights, where K
    is the number of tokens.
    """
    one = torch.ones((), device=scale.device)
    return torch._scaled_mm(a_MK, b_NK.T, scale, one, out_dtype=dtype, use_fast_accum=fast)


def to_fp8(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """x (N, K) in fp8 and its scale, fp32 0-D: the largest norm of a row / the dtype's maximum."""
    scale = largest_row_norm(x) / torch.finfo(dtype).max
    return cast8(x, 1 / scale, dtype), scale


def normed_to_fp8(x: Tensor) -> tuple[Tensor, float]:
    """An e4m3 copy of x (T, D) and its scale, where rows have norm sqrt(D), as after norm()."""
    row_norm = math.sqrt(x.size(1))
    if not torch.compiler.is_compiling():  # longer rows would saturate in silence
        assert largest_row_norm(x) < 1.02 * row_norm, "inputs of fp8 products must come from norm()"
    scale = row_norm / E4M3_MAX
    return cast8(x, 1 / scale), scale


class Weight8(NamedTuple):
    """A matrix (N, K) in e4m3."""

    matrix: Tensor  # (N, K)
    transposed: Tensor  # (K, N): _scaled_mm takes one layout only
    scale: Tensor  # the largest norm of a row / 448, fp32, 0-D


@torch.no_grad()
def weights_to_fp8(bank: Tensor) -> list[Weight8]:
    """The matrices of a bank (B, N, K) in fp8, all layers at once in few kernels."""
    row_norms = largest_row_norm(bank)
    matrices = cast8(bank, (E4M3_MAX / row_norms)[:, None, None])
    # A compiled backward may write a number into the memory of a scale, and cuBLAS wants scales at
    # multiples of 16 bytes: four columns.
    scales = (row_norms / E4M3_MAX)[:, None].expand(-1, 4).contiguous()[:, 0]
    parts = (matrices, transpose8(matrices), scales)
    return [Weight8(*part) for part in zip(*(t.unbind(0) for t in parts), strict=True)]


class Linear8(torch.autograd.Function):
    """x w^T and its gradients by fp8 products; the backward keeps the fp8 input, not x."""

    @staticmethod
    def forward(ctx, x, w, *weight8):
        w8 = Weight8(*weight8)
        x8, x_scale = to_fp8(x)
        ctx.save_for_backward(x8, x_scale, *w8)
        return product8(x8, w8.matrix, x_scale * w8.scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, g):
        x8, x_scale, *weight8 = ctx.saved_tensors
        w8 = Weight8(*weight8)
        g8, g_scale = to_fp8(g.contiguous(), E5M2)
        dx = product8(g8, w8.transposed, g_scale * w8.scale, g.dtype, fast=True)
        dw = product8(transpose8(g8), transpose8(x8), g_scale * x_scale, g.dtype)
        return dx, dw, None, None, None


def scale_head_gradient(x, target_weights, token_weight, cap) -> tuple[Tensor, Tensor]:
    """The e5m2 scale of the logits' gradient (0-D), and token_weight (T,) divided by it."""
    # |gradient| <= slope * sum of target weights * token weight
    slope = cap[0] / (4 * cap[2]) if cap else 1.0
    g_scale = target_weights.abs().sum() * (slope / E5M2_MAX)
    if token_weight is None:
        token_weight = torch.ones(len(x), device=x.device)
    else:
        g_scale = g_scale * token_weight.abs().max()
    g_scale = g_scale.clamp(min=1e-30)
    return g_scale, token_weight / g_scale


@torch.library.custom_op(f"{OPS}::linear_ce", mutates_args=())
def linear_ce(
    x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor | None,
    targets: Tensor, target_weights: Tensor, token_weight: Tensor | None,
    cap: list[float], chunk: int, grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, nats, dx, dw of linear_cross_entropy by chunks; in fp8 x and w have scales."""
    T = len(x)
    fp8 = x_scale is not None
    dtype = torch.bfloat16 if fp8 else x.dtype
    losses, nats = torch.empty(2, T, device=x.device)
    dx = x.new_empty(x.shape if grad else 0, dtype=dtype)
    dw = None if grad else w.new_empty(0, dtype=dtype)  # None until the first chunk
    # More than one chunk is summed in fp32: a 16-bit running sum would round once a chunk.
    wide = x.is_cuda and dtype != torch.float32 and T > chunk
    dw_dtype = torch.float32 if wide else dtype
    g_weight = token_weight
    gradient8 = None  # the buffer of an fp8 gradient of the logits
    if fp8 and grad:
        w_T = transpose8(w)
        g_scale, g_weight = scale_head_gradient(x, target_weights, token_weight, cap)
        gradient8 = torch.empty(min(chunk, T), len(w), dtype=E5M2, device=x.device)

    for start in range(0, T, chunk):
        own = slice(start, min(start + chunk, T))
        if fp8:
            logits = product8(x[own], w, x_scale * w_scale, dtype, fast=True)
        else:
            logits = x[own] @ w.T
        arguments = (targets, target_weights, g_weight, cap, start, grad)
        if use_triton(logits):
            out = None if gradient8 is None else gradient8[: len(logits)]
            losses[own], nats[own], g = softcap_ce(logits, *arguments, out)
        else:
            losses[own], nats[own], g = softcap_ce_ref(logits, *arguments)
        if not grad:
            continue

        if fp8:
            del logits  # before the transpose of g needs memory
            dx[own] = product8(g, w_T, g_scale * w_scale, dtype)
            part = product8(transpose8(g), transpose8(x[own]), g_scale * x_scale, dw_dtype)
        else:
            torch.mm(g, w, out=dx[own])
            part = torch.mm(g.T, x[own], out_dtype=dw_dtype) if wide else g.T @ x[own]
        dw = part if dw is None else dw.add_(part)
        logits = g = None  # frees memory for the next chunk
    total = losses.sum() if token_weight is None else losses @ token_weight
    return total, nats, dx, dw.to(dtype)


@linear_ce.register_fake
def _(x, w, x_scale, w_scale, targets, target_weights, token_weight, cap, chunk, grad):
    dtype = x.dtype if x_scale is None else torch.bfloat16
    nats = x.new_empty(x.size(0), dtype=torch.float32)
    dx = x.new_empty(x.shape if grad else 0, dtype=dtype)
    dw = w.new_empty(w.shape if grad else 0, dtype=dtype)
    return nats.new_empty(()), nats, dx, dw


class LinearCE(torch.autograd.Function):
    """linear_cross_entropy with gradients of x and w."""

    @staticmethod
    def forward(ctx, x, w, fp8, *arguments):
        x_scale = w_scale = None
        if fp8:  # here and not in linear_ce: compiled, the casts join the kernels around them
            x, x_scale = to_fp8(x)
            w, w_scale = to_fp8(w)
        total, nats, dx, dw = linear_ce(x, w, x_scale, w_scale, *arguments, True)
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(nats)
        return total, nats

    @staticmethod
    def backward(ctx, g, g_nats):
        dx, dw = ctx.saved_tensors
        return dx * g, dw * g, *(None,) * 6


def linear_cross_entropy(x, w, targets, cap, target_weights=None, token_weight=None, chunk=32768, fp8=False):
    """Softcapped head and loss.

    Args:    x (T, D), w (V, D); targets int (N, T), negative for none; cap as for softcap(); target_weights
             fp32 (N,), one for each row of targets; token_weight fp32 (T,); chunk tokens at a time;
             fp8: for training, e4m3 operands and an e5m2 gradient, where 16 divides all sizes
    Returns: sum over t of token_weight_t * loss_t; nats of the first target alone, fp32 (T,),
             detached, 0 where there is none

    The forward computes the gradients, a chunk at a time; the backward only multiplies them.
    """
    if target_weights is None:
        target_weights = torch.ones(len(targets), device=x.device)
    grad = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    if not use_triton(x):  # plain code holds several fp32 copies of a chunk's logits
        chunk = min(chunk, max(2**26 // len(w), 1))
    fp8 = fp8 and all(size % 16 == 0 for size in (*x.shape, len(w), chunk))
    arguments = (targets.contiguous(), target_weights, token_weight, list(cap), chunk)
    if grad:
        return LinearCE.apply(x, w, fp8, *arguments)
    return linear_ce(x, w, None, None, *arguments, False)[:2]


# -- symmetric products for Polar Express: half the tiles


def sym_mm_ref(x: Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Tensor:
    """alpha x x^T + beta x + gamma I: x (b, m, k) -> (b, m, m); beta needs a symmetric x."""
    out = alpha * (x @ x.mT)
    if beta:
        out = out + beta * x
    if gamma:
        out = out + gamma * torch.eye(out.shape[-1], dtype=x.dtype, device=x.device)
    return out


@jit
def sym_mm_kernel(
    x, out,
    M, K, sb, sm, sk, alpha, beta, gamma,
    BETA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x (b, M, K) with strides sb, sm, sk -> out (b, M, M), one tile of one matrix a program."""
    i = tl.program_id(0) // tl.cdiv(M, BN)
    j = tl.program_id(0) % tl.cdiv(M, BN)
    if j * BN < (i + 1) * BM:  # on or below the diagonal; the store mirrors it
        x += tl.program_id(1).to(tl.int64) * sb
        out += tl.program_id(1).to(tl.int64) * M * M
        m = i * BM + tl.arange(0, BM)
        n = j * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        left = x + m[:, None] * sm + k[None, :] * sk
        right = x + n[:, None] * sm + k[None, :] * sk
        acc = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            in_k = k[None, :] < K - k0
            a = tl.load(left, mask=(m[:, None] < M) & in_k, other=0.0)
            b = tl.load(right, mask=(n[:, None] < M) & in_k, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc)
            left += BK * sk
            right += BK * sk
        acc *= alpha
        inside = (m[:, None] < M) & (n[None, :] < M)
        if BETA:
            tile = tl.load(x + m[:, None] * sm + n[None, :] * sk, mask=inside, other=0.0)
            acc += beta * tile.to(tl.float32)
        acc = (acc + tl.where(m[:, None] == n[None, :], gamma, 0.0)).to(out.dtype.element_ty)
        tl.store(out + m[:, None] * M + n[None, :], acc, mask=inside)
        mirrored = (n[:, None] < M) & (m[None, :] < M)
        tl.store(out + n[:, None] * M + m[None, :], tl.trans(acc), mask=mirrored)


SYM_TILES = dict(BM=128, BN=128, BK=64, num_warps=8, num_stages=3)


def sym_mm(x: Tensor, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Tensor:
    """As sym_mm_ref with half the products: tiles below the diagonal, stored twice. Any strides."""
    if not use_triton(x):
        return sym_mm_ref(x, alpha, beta, gamma)
    b, m, k = x.shape
    out = x.new_empty(b, m, m)
    grid = (triton.cdiv(m, SYM_TILES["BM"]) * triton.cdiv(m, SYM_TILES["BN"]), b)
    numbers = (m, k, *x.stride(), alpha, beta, gamma)
    sym_mm_kernel[grid](x, out, *numbers, BETA=beta != 0, **SYM_TILES)
    return out


# -- RMSProp for tables: one second moment for each row and no first one, so rows without a gradient need
# no update, which saves time over Adam


def rmsprop_update_ref(master, grad, second_moment, param, index=None, *, lr, beta2, correction, eps, decay):
    """One RMSProp step with cautious weight decay, in place; rows without a gradient stay.

    Args: master fp32 (R, C), or bf16, rounded stochastically; grad (R, C), or with index int64 (N,)
          the gradients (N, C) of these rows, which are summed; second_moment fp32 (R,); param (R, C) or None
    """
    grad = grad.float()
    if index is None:
        rows = grad.any(1).nonzero()[:, 0]
        grad = grad[rows]
    else:
        rows, place = index.unique(return_inverse=True)
        grad = grad.new_zeros(len(rows), grad.size(1)).index_add_(0, place, grad)
    second_moment.mul_(beta2)
    second_moment[rows] += (1 - beta2) * grad.square().mean(1)
    update = grad / ((second_moment[rows] / correction).sqrt() + eps)[:, None]
    old = master[rows].float()
    agrees = update * old > 0
    new = old - lr * (update + decay * old * agrees)
    if master.dtype == torch.bfloat16:
        # As in the kernel.
        bits = new.view(torch.int32).long() & 0xFFFFFFFF
        noise = bits ^ second_moment[rows].view(torch.int32).long()[:, None]
        noise = (noise ^ (noise >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
        noise = (noise ^ (noise >> 15)) * 0x735A2D97 & 0xFFFFFFFF
        rounded = (bits + (noise >> 16) >> 16 << 16).int().view(torch.float32)
        new = torch.where(new.isnan(), new, rounded)
    master[rows] = new.to(master.dtype)
    if param is not None:
        param[rows] = master[rows].to(param.dtype)


@jit
def rmsprop_update_kernel(
    master, grad, second_moment, param, index, order,
    N, C, lr, beta2, correction, eps, decay, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One row of the gradient a program; arguments as those of rmsprop_update_ref.

    A sparse gradient comes with its index in ascending order, and with the places in the gradient
    where its rows lie. The first program of equal rows adds them up, GROUP at a time.
    """
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    if index is None:
        row = place
        first = True
        g = tl.load(grad + row * C + column, mask=inside, other=0.0).to(tl.float32)
        square = beta2 * tl.load(second_moment + row)
    else:
        row = tl.load(index + place)
        first = tl.load(index + place - 1, mask=place > 0, other=-1) != row
        member = place + tl.arange(0, GROUP)
        equal = (tl.load(index + member, mask=member < N, other=-1) == row) & first
        g = tl.zeros((BLOCK,), tl.float32)
        while tl.max(equal.to(tl.int32), 0) > 0:
            at = tl.load(order + member, mask=equal, other=0)
            mask = equal[:, None] & inside[None, :]
            part = tl.load(grad + at[:, None] * C + column, mask=mask, other=0.0)
            g += tl.sum(part.to(tl.float32), 0)
            member += GROUP
            equal = tl.load(index + member, mask=member < N, other=-1) == row
        square = tl.load(second_moment + row)  # times beta2 already
    total = tl.sum(g * g)
    square += (1 - beta2) * (total / C)
    tl.store(second_moment + row, square, mask=first)
    if total != 0:
        x = tl.load(master + row * C + column, mask=inside, other=0.0).to(tl.float32)
        update = g / (tl.sqrt(square / correction) + eps)
        x -= lr * (update + tl.where(update * x > 0, decay * x, 0.0))
        if master.dtype.element_ty == tl.bfloat16:
            # Stochastic rounding: up or down so as to keep the mean (arXiv 2010.06192). The random bits are
            # hashed, as in splitmix32, from the number and the row's second moment, which changes from
            # step to step: every rank and resumed run rounds alike.
            bits = x.to(tl.uint32, bitcast=True)
            noise = bits ^ square.to(tl.uint32, bitcast=True)
            noise = (noise ^ (noise >> 16)) * 0x21F0AAAD
            noise = (noise ^ (noise >> 15)) * 0x735A2D97
            rounded = ((bits + (noise >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
            x = tl.where(x == x, rounded, x)  # the bits of a NaN would overflow
        tl.store(master + row * C + column, x, mask=inside)
        if param is not None:
            tl.store(param + row * C + column, x.to(param.dtype.element_ty), mask=inside)


def rmsprop_update(master, grad, second_moment, param, index=None, **numbers) -> None:
    """As rmsprop_update_ref."""
    if not use_triton(grad):
        return rmsprop_update_ref(master, grad, second_moment, param, index, **numbers)
    order = None
    if index is not None:
        index, order = index.sort(stable=True)
        second_moment.mul_(numbers["beta2"])
    N, C = grad.shape
    tensors = (master, grad, second_moment, param, index, order)
    block = triton.next_power_of_2(C)
    rmsprop_update_kernel[(N,)](*tensors, N, C, **numbers, BLOCK=block, GROUP=8)


# -- relu(x w^T)^2 in the epilogue of an fp8 product. Only the square is kept; the backward needs its root.


def persistent_programs(tiles: int) -> int:
    """Two on each multiprocessor: where both fit into its shared memory (not in linear_rotate), one multiplies
    while the other stores."""
    if triton.knobs.runtime.interpret:  # on a CPU, in tests
        return min(tiles, 3)
    return min(tiles, 2 * torch.cuda.get_device_properties().multi_processor_count)


@jit
def store_relu2(acc, aux, out, out_T, m0, n0, factor):
    if aux is not None:
        acc = 2.0 * acc * tl.sqrt(aux.load([m0, n0]).to(tl.float32))
    else:
        acc = tl.maximum(acc, 0.0)
        acc = acc * acc
    value = (acc * factor).to(out.dtype)
    out.store([m0, n0], value)
    out_T.store([n0, m0], value.T)


@jit
def linear_relu2_kernel(
    a, b, aux, out, out_T,
    factor, M, N, K,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """linear_relu2 on descriptors of a (M, K), b (N, K), aux (post), out (M, N), out_T (N, M)."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    # Flattened, a tile's loads begin before the last one is stored; with aux this needs too much
    # shared memory for two programs.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=aux is None):
        first = tile // (GROUP * tiles_n) * GROUP
        rows = min(tiles_m - first, GROUP)
        m0 = (first + tile % (GROUP * tiles_n) % rows) * BM
        n0 = tile % (GROUP * tiles_n) // rows * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            acc = tl.dot(a.load([m0, k0]), b.load([n0, k0]).T, acc)
        # Halves need less shared memory.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        store_relu2(left, aux, out, out_T, m0, n0, factor)
        store_relu2(right, aux, out, out_T, m0, n0 + BN // 2, factor)


RELU2_TILES = dict(BM=128, BN=128, BK=128, GROUP=4, num_warps=4, num_stages=3)


@torch.library.custom_op(f"{OPS}::linear_relu2", mutates_args=(), tags=ANY_LAYOUT)
def linear_relu2(a: Tensor, b: Tensor, post: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    """relu(a b^T)^2 factor, or with post 2 (a b^T) sqrt(post) factor; also transposed.

    Args:    fp8 a (M, K), b (N, K), post (M, N) or None; factor a constant
    Returns: (M, N) and (N, M) in the dtype of a
    """
    M, K = a.shape
    N = len(b)
    out, out_T = empty_relu2(a, b)
    BM, BN, BK = (RELU2_TILES[name] for name in ("BM", "BN", "BK"))
    describe = TensorDescriptor.from_tensor
    half = [BM, BN // 2]
    aux = None if post is None else describe(post.contiguous(), half)
    operands = (describe(a.contiguous(), [BM, BK]), describe(b.contiguous(), [BN, BK]), aux)
    results = (describe(out, half), describe(out_T, half[::-1]))
    programs = persistent_programs(triton.cdiv(M, BM) * triton.cdiv(N, BN))
    sizes = (factor, M, N, K)
    linear_relu2_kernel[(programs,)](*operands, *results, *sizes, PROGRAMS=programs, **RELU2_TILES)
    return out, out_T


@linear_relu2.register_fake
def empty_relu2(a, b, *rest):
    M, N = a.size(0), b.size(0)
    return a.new_empty(M, N), a.new_empty(N, M)


class MLP8(torch.autograd.Function):
    """mlp_relu2 with its six products in fp8.

    |x w^T| <= |x| |w| bounds what is cast. Rows in e4m3 have norms of at most 448, so (x8 up8^T)^2 is at
    most 448^4, and a factor of 448^-3 makes it fit. Rows in e5m2 have at most 57344, and so has
    2 (g8 down8^T) sqrt(post8) with a factor of 448^-1.5 / 2.
    """

    @staticmethod
    def forward(ctx, x, up, down, *weights8):
        up8 = Weight8(*weights8[:3])
        down8 = Weight8(*weights8[3:])
        x8, x_scale = normed_to_fp8(x)
        post8, post8_T = linear_relu2(x8, up8.matrix, None, E4M3_MAX**-3)
        post_scale = E4M3_MAX**3 * (x_scale * up8.scale) ** 2
        ctx.save_for_backward(x8, post8, post8_T, *up8, *down8)
        return product8(post8, down8.transposed, post_scale * down8.scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, g):
        x8, post8, post8_T, *weights8 = ctx.saved_tensors
        up8 = Weight8(*weights8[:3])
        down8 = Weight8(*weights8[3:])
        x_scale = math.sqrt(x8.size(1)) / E4M3_MAX
        post_scale = E4M3_MAX**3 * (x_scale * up8.scale) ** 2
        g8, g_scale = to_fp8(g.contiguous(), E5M2)
        # The gradient before relu^2 is 2 (g down^T) sqrt(post).
        before8, before8_T = linear_relu2(g8, down8.matrix, post8, E4M3_MAX**-1.5 / 2)
        before_scale = 2 * E4M3_MAX**3 * g_scale * down8.scale * up8.scale * x_scale
        dx = product8(before8, up8.transposed, before_scale * up8.scale, g.dtype, fast=True)
        dup = product8(before8_T, transpose8(x8), before_scale * x_scale, g.dtype)
        ddown = product8(post8_T, transpose8(g8), post_scale * g_scale, g.dtype)
        return dx, dup, ddown, *(None,) * 6


# -- sliding-window attention on packed documents, faster than torch's varlen_attn. Query i sees
# keys bounds[0, i] <= j <= i; key j is seen by queries j <= i <= bounds[1, j]; no bound decreases.


def attention_bounds(cu_seqlens: Tensor, T: int, window: int) -> Tensor:
    """cu_seqlens int32 (G + 1,), some repeated -> int32 (2, T): first key seen, last row seeing."""
    t = torch.arange(T, dtype=torch.int32, device=cu_seqlens.device)
    doc = torch.searchsorted(cu_seqlens, t, right=True, out_int32=True)
    first = torch.maximum(cu_seqlens[doc - 1], t - window)
    last = torch.minimum(cu_seqlens[doc] - 1, t + window)
    return torch.stack([first, last]).to(torch.int32)


@jit
def load_rows(x, index, stride, T, HEAD: tl.constexpr, SWAP: tl.constexpr = 0):
    """Rows of one head, `stride` numbers apart. SWAP, a power of two: blocks of that size swap."""
    column = tl.arange(0, HEAD)
    if SWAP:  # the hints keep loads wide
        column = tl.max_contiguous(tl.multiple_of(column ^ SWAP, SWAP), SWAP)
    x += index.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x, mask=index[:, None] < T, other=0.0)


@jit
def store_rows(x, value, index, stride, T, HEAD: tl.constexpr):
    x += index.to(tl.int64)[:, None] * stride + tl.arange(0, HEAD)[None, :]
    tl.store(x, value.to(x.dtype.element_ty), mask=index[:, None] < T)


@jit
def attention_forward_kernel(
    q, k, v, o, lse, bounds,
    T, sq, sk, sv, so,
    HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM queries of a head a program; q, k, v, o (T, H, HEAD) with strides sq to so, lse (H, T)."""
    m0 = tl.program_id(0) * BM
    h = tl.program_id(1)
    m = m0 + tl.arange(0, BM)
    first = tl.load(bounds + m, mask=m < T, other=0)
    Q = load_rows(q + h * HEAD, m, sq, T, HEAD)
    top = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, HEAD], tl.float32)
    for n0 in range(tl.load(bounds + m0) // BN * BN, min(m0 + BM, T), BN):
        n = n0 + tl.arange(0, BN)
        K = load_rows(k + h * HEAD, n, sk, T, HEAD)
        s = tl.dot(Q, tl.trans(K)) * 1.4426950408889634  # log2(e), for exp2
        s = tl.where((n[None, :] >= first[:, None]) & (n[None, :] <= m[:, None]), s, -1e30)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        # The first true maximum wipes out what all-masked blocks left.
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(p, 1)
        V = load_rows(v + h * HEAD, n, sv, T, HEAD)
        acc = tl.dot(p.to(V.dtype), V, acc * shrink[:, None])
    store_rows(o + h * HEAD, acc * (1.0 / total)[:, None], m, so, T, HEAD)
    tl.store(lse + h * T + m, top + tl.log2(total), mask=m < T)


@jit
def attention_dq_kernel(
    q, k, v, o, do, dq, lse, delta, bounds,
    T, sq, sk, sv, so,
    HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """As the forward; also leaves delta = rowsum(o do) for the other kernel."""
    m0 = tl.program_id(0) * BM
    h = tl.program_id(1)
    m = m0 + tl.arange(0, BM)
    first = tl.load(bounds + m, mask=m < T, other=0)
    L = tl.load(lse + h * T + m, mask=m < T, other=0.0)
    Q = load_rows(q + h * HEAD, m, sq, T, HEAD)
    dO = load_rows(do + h * HEAD, m, so, T, HEAD)
    O = load_rows(o + h * HEAD, m, so, T, HEAD)
    delta_m = tl.sum(dO.to(tl.float32) * O.to(tl.float32), 1)
    tl.store(delta + h * T + m, delta_m, mask=m < T)
    acc = tl.zeros([BM, HEAD], tl.float32)
    for n0 in range(tl.load(bounds + m0) // BN * BN, min(m0 + BM, T), BN):
        n = n0 + tl.arange(0, BN)
        K = load_rows(k + h * HEAD, n, sk, T, HEAD)
        s = tl.dot(Q, tl.trans(K)) * 1.4426950408889634
        s = tl.where((n[None, :] >= first[:, None]) & (n[None, :] <= m[:, None]), s, float("-inf"))
        p = tl.exp2(s - L[:, None])
        V = load_rows(v + h * HEAD, n, sv, T, HEAD)
        dp = tl.dot(dO, tl.trans(V))
        ds = p * (dp - delta_m[:, None])
        acc = tl.dot(ds.to(K.dtype), K, acc)
    store_rows(dq + h * HEAD, acc, m, so, T, HEAD)


@jit
def attention_dkv_kernel(
    q, k, v, do, dk, dv, lse, delta, bounds,
    T, sq, sk, sv, so,
    HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of BN keys and one head a program; rows up to the last that sees its last key."""
    n0 = tl.program_id(0) * BN
    h = tl.program_id(1)
    n = n0 + tl.arange(0, BN)
    last = tl.load(bounds + T + n, mask=n < T, other=-1)
    K = load_rows(k + h * HEAD, n, sk, T, HEAD)
    V = load_rows(v + h * HEAD, n, sv, T, HEAD)
    dK = tl.zeros([BN, HEAD], tl.float32)
    dV = tl.zeros([BN, HEAD], tl.float32)
    for m0 in range(n0 // BM * BM, tl.load(bounds + T + min(n0 + BN, T) - 1) + 1, BM):
        m = m0 + tl.arange(0, BM)
        Q = load_rows(q + h * HEAD, m, sq, T, HEAD)
        dO = load_rows(do + h * HEAD, m, so, T, HEAD)
        L = tl.load(lse + h * T + m, mask=m < T, other=0.0)
        delta_m = tl.load(delta + h * T + m, mask=m < T, other=0.0)
        s = tl.dot(K, tl.trans(Q)) * 1.4426950408889634
        s = tl.where((m[None, :] >= n[:, None]) & (m[None, :] <= last[:, None]), s, float("-inf"))
        p = tl.exp2(s - L[None, :])
        dV = tl.dot(p.to(dO.dtype), dO, dV)
        dp = tl.dot(V, tl.trans(dO))
        ds = p * (dp - delta_m[None, :])
        dK = tl.dot(ds.to(Q.dtype), Q, dK)
    store_rows(dk + h * HEAD, dK, n, so, T, HEAD)
    store_rows(dv + h * HEAD, dV, n, so, T, HEAD)


ATTENTION_TILES = dict(BM=64, BN=64, num_warps=4, num_stages=2)


def adjacent_heads(x: Tensor) -> Tensor:
    """x (T, H, K), copied unless the heads of a token follow each other in memory."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@torch.library.custom_op(f"{OPS}::window_attention", mutates_args=())
def window_attention_forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """window_attention and lse (H, T), the base-2 logarithms of the softmax's denominators."""
    T, H, K = q.shape
    q, k, v = map(adjacent_heads, (q, k, v))
    o = q.new_empty(T, H, K)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(T, ATTENTION_TILES["BM"]), H)
    sizes = (T, q.stride(0), k.stride(0), v.stride(0), H * K, K)
    attention_forward_kernel[grid](q, k, v, o, lse, bounds, *sizes, **ATTENTION_TILES)
    return o, lse


@torch.library.custom_op(f"{OPS}::window_attention_grad", mutates_args=())
def window_attention_grad(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous (T, H, K), from that of o, `do`."""
    T, H, K = q.shape
    q, k, v = map(adjacent_heads, (q, k, v))
    do = do.contiguous()
    dq, dk, dv = (q.new_empty(T, H, K) for _ in range(3))
    delta = torch.empty_like(lse)
    sizes = (T, q.stride(0), k.stride(0), v.stride(0), H * K, K)
    grid = (triton.cdiv(T, ATTENTION_TILES["BM"]), H)
    attention_dq_kernel[grid](q, k, v, o, do, dq, lse, delta, bounds, *sizes, **ATTENTION_TILES)
    grid = (triton.cdiv(T, ATTENTION_TILES["BN"]), H)
    attention_dkv_kernel[grid](q, k, v, do, dk, dv, lse, delta, bounds, *sizes, **ATTENTION_TILES)
    return dq, dk, dv


@window_attention_forward.register_fake
def _(q, k, v, bounds):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@window_attention_grad.register_fake
def _(q, *rest):
    return tuple(q.new_empty(q.shape) for _ in range(3))


class WindowAttention(torch.autograd.Function):
    """window_attention with gradients of q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, bounds):
        o, lse = window_attention_forward(q, k, v, bounds)
        ctx.save_for_backward(q, k, v, bounds, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, bounds, o, lse = ctx.saved_tensors
        return *window_attention_grad(q, k, v, o, do, lse, bounds), None


def window_attention(q_THK, k_THK, v_THK, bounds: Tensor) -> Tensor:
    """Attention (T, H, K) in 16 bits, K a power of two; q, k, v may be views of one tensor."""
    return WindowAttention.apply(q_THK, k_THK, v_THK, bounds)


# -- queries and keys: norm, scale and rotary embedding. In fp8 they join the epilogue of the product, so
# q and k are written once and not read; a second kernel computes their gradient.


NORM_EPS = torch.finfo(torch.float32).eps  # what F.rms_norm adds in 16 and 32 bits


@jit
def linear_rotate_kernel(
    a, b, cos, sin, out, rstd, ab_scale, q_factor,
    T, H, eps,
    D: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """From a b^T ab_scale to out, whose q and k went through norm and rotation, and rstd (T, 2, H).

    Descriptors of a (T, D), b (3 H K, D), cos and sin (T, 2, K / 2), out (T, 6 H, K / 2). A tile is
    BM rows of one head of q, k or v.
    """
    product_scale = tl.load(ab_scale)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BM) * 3 * H, PROGRAMS, flatten=True):
        m0 = tile // (3 * H) * BM
        head = tile % (3 * H)
        acc = tl.zeros([BM, K], tl.float32)
        for d0 in range(0, D, BD):
            acc = tl.dot(a.load([m0, d0]), b.load([head * K, d0]).T, acc)

        # The quarters that are rotated together, in both halves.
        acc *= product_scale
        x0, x1 = tl.split(tl.permute(tl.reshape(acc, (BM, 2, 2, K // 4)), (0, 1, 3, 2)))
        part = head // H
        if part < 2:
            squares = tl.sum(tl.sum(x0 * x0 + x1 * x1, 2), 1)
            factor = tl.rsqrt(squares / K + eps)
            t = m0 + tl.arange(0, BM)
            tl.store(rstd + (t * 2 + part) * H + head % H, factor, mask=t < T)
            factor *= tl.load(q_factor, mask=part == 0, other=1.0)
            C = cos.load([m0, 0, 0]) * factor[:, None, None]
            S = sin.load([m0, 0, 0]) * factor[:, None, None]
            turned = x0 * C + x1 * S
            x1 = x1 * C - x0 * S
            x0 = turned
        out.store([m0, 2 * head, 0], x0.to(out.dtype))
        out.store([m0, 2 * head, K // 4], x1.to(out.dtype))


ROTATE_TILES = dict(BM=256, BD=128, num_warps=8, num_stages=3)


@torch.library.custom_op(f"{OPS}::linear_rotate", mutates_args=(), tags=ANY_LAYOUT)
def linear_rotate(
    a: Tensor, b: Tensor, ab_scale: Tensor, cos: Tensor, sin: Tensor, q_factor: Tensor
) -> tuple[Tensor, Tensor]:
    """norm_rotate of a b^T ab_scale in one tensor, and rstd, 1 / RMS of the heads of q and k.

    Args:    e4m3 a (T, D), b (3 H K, D); cos, sin 16 bits (T, 1, K); ab_scale, q_factor fp32, 0-D
    Returns: (T, 3, H, K) in the dtype of cos; fp32 (T, 2, H)
    """
    T, D = a.shape
    out, rstd = empty_linear_rotate(a, b, ab_scale, cos)
    _, _, H, K = out.shape
    BM, BD = (ROTATE_TILES[name] for name in ("BM", "BD"))
    describe = TensorDescriptor.from_tensor
    operands = (describe(a.contiguous(), [BM, BD]), describe(b.contiguous(), [K, BD]))
    quarters = [BM, 2, K // 4]
    halves = [describe(x.contiguous().view(T, -1, K // 2), quarters) for x in (cos, sin, out)]
    programs = persistent_programs(triton.cdiv(T, BM) * 3 * H)
    sizes = (T, H, NORM_EPS, D, K, programs)
    tensors = (*operands, *halves, rstd, ab_scale, q_factor)
    linear_rotate_kernel[(programs,)](*tensors, *sizes, **ROTATE_TILES)
    return out, rstd


@linear_rotate.register_fake
def empty_linear_rotate(a, b, ab_scale, cos, *rest):
    T, K = a.size(0), cos.size(-1)
    H = b.size(0) // (3 * K)
    return cos.new_empty(T, 3, H, K), cos.new_empty(T, 2, H, dtype=torch.float32)


@jit
def norm_rotate_grad_kernel(
    qkv, rstd, dq, dk, dv, cos, sin, q_factor, largest, g_scale, out,
    T, N, H, every,
    K: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Gradients before norm and rotation in fp8.

    It is launched twice: without `out` it finds the `largest` of a sample of them, with `out` it writes all.
    A program computes BR rows, heads of every `every`-th token, from what linear_rotate returned and
    dq, dk, dv (T, H, K). out e5m2 (N, 3, H, K) is divided by g_scale, which comes from `largest`.
    With n = x rstd and y = s R n, R a rotation, dx = rstd R^T (s dy - y mean(y dy) / s): the norm takes
    away the part of the gradient along y. Of dv the sample has the first channel of all tokens.
    """
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    head = row % H
    n = row // H
    t = n * every
    C = load_rows(cos, t, K, T, K).to(tl.float32)
    S = load_rows(sin, t, K, T, K).to(tl.float32)
    if out is None:
        inverse_scale = 1.0
        value = (tl.program_id(0) * BR * every).to(tl.int64) + tl.arange(0, BR * 64)  # every <= 64
        top = tl.max(tl.abs(tl.load(dv + value * K, mask=value < T * H, other=0.0).to(tl.float32)))
    else:
        # e5m2 has 32 binades: other numbers may exceed `largest` by 8 of them (what is above that
        # becomes 57344) and fall below by 23.
        scale = tl.maximum(tl.load(largest), 1e-30) * (256 / 57344)
        tl.store(g_scale, scale, mask=tl.program_id(0) == 0)
        inverse_scale = 1.0 / scale
    for part in tl.static_range(2):
        gradient = dq if part == 0 else dk
        dy = load_rows(gradient, t * H + head, K, T * H, K).to(tl.float32)
        result = (t * 3 + part) * H + head
        y = load_rows(qkv, result, K, T * 3 * H, K).to(tl.float32)
        s = tl.load(q_factor) if part == 0 else 1.0
        along = (tl.sum(y * dy, 1) / (K * s))[:, None]
        dn = s * dy - y * along
        # The same rows with their quarters swapped, as in rotate().
        dy = load_rows(gradient, t * H + head, K, T * H, K, K // 4).to(tl.float32)
        y = load_rows(qkv, result, K, T * 3 * H, K, K // 4).to(tl.float32)
        other = s * dy - y * along
        factor = tl.load(rstd + (t * 2 + part) * H + head, mask=t < T, other=0.0) * inverse_scale
        dx = (dn * C - other * S) * factor[:, None]
        if out is None:
            top = tl.maximum(top, tl.max(tl.abs(dx)))
        else:
            store_rows(out, dx, (n * 3 + part) * H + head, K, 3 * N * H, K)
    g = load_rows(dv, t * H + head, K, T * H, K).to(tl.float32)
    if out is None:
        tl.atomic_max(largest, tl.maximum(top, tl.max(tl.abs(g))))
    else:
        store_rows(out, g * inverse_scale, (n * 3 + 2) * H + head, K, 3 * N * H, K)


@torch.library.custom_op(f"{OPS}::norm_rotate_grad", mutates_args=())
def norm_rotate_grad(
    qkv: Tensor, rstd: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cos: Tensor, sin: Tensor, q_factor: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient before norm and rotation in fp8: e5m2 (T, 3, H, K), and its scale.

    Args: qkv and rstd from linear_rotate; dq, dk, dv (T, H, K); the others as there
    """
    tensors = [t.contiguous() for t in (qkv, rstd, dq, dk, dv, cos, sin, q_factor)]
    T, _, H, K = qkv.shape
    dqkv = qkv.new_empty(qkv.shape, dtype=E5M2)
    largest = torch.zeros((), device=qkv.device)
    g_scale = torch.empty_like(largest)

    # The scale comes from every 63rd token, odd as documents often begin at multiples of 64, and from one
    # channel of all values, as sampled tokens may have no gradient.
    for out, every in ((None, 63), (dqkv, 1)):
        N = math.ceil(T / every)
        rows = 8  # of a program
        grid = (triton.cdiv(N * H, rows),)
        sizes = (T, N, H, every, K, rows)
        norm_rotate_grad_kernel[grid](*tensors, largest, g_scale, out, *sizes)
    return dqkv, g_scale


@norm_rotate_grad.register_fake
def _(qkv, *rest):
    return qkv.new_empty(qkv.shape, dtype=E5M2), qkv.new_empty((), dtype=torch.float32)


class QKV8(torch.autograd.Function):
    """project_qkv with fp8 products."""

    @staticmethod
    def forward(ctx, x, w, cos, sin, q_factor, *weight8):
        w8 = Weight8(*weight8)
        x8, x_scale = normed_to_fp8(x)
        qkv, rstd = linear_rotate(x8, w8.matrix, x_scale * w8.scale, cos, sin, q_factor)
        ctx.save_for_backward(x8, qkv, rstd, cos, sin, q_factor, *w8)
        return qkv.unbind(1)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        x8, qkv, rstd, cos, sin, q_factor, *weight8 = ctx.saved_tensors
        w8 = Weight8(*weight8)
        x_scale = math.sqrt(x8.size(1)) / E4M3_MAX
        g8, g_scale = norm_rotate_grad(qkv, rstd, dq, dk, dv, cos, sin, q_factor)
        g8 = g8.view(len(x8), -1)
        dx = product8(g8, w8.transposed, g_scale * w8.scale, dq.dtype, fast=True)
        dw = product8(transpose8(g8), transpose8(x8), g_scale * x_scale, dq.dtype)
        return dx, dw, *(None,) * 6


# <<< shared: sections_2_to_12


if __name__ == "__main__":
    exit_code = main()
    if exit_code == 0:
        os._exit(0)  # all is flushed; Python would take seconds to free what the compiler left
    sys.exit(exit_code)
