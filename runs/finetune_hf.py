"""Pretrains or finetunes an existing causal language model of Hugging Face.

    python runs/finetune_hf.py sft @runs/sft_qwen.toml
    torchrun --standalone --nproc_per_node=8 runs/finetune_hf.py sft @runs/sft_qwen.toml --steps 100
    torchrun --standalone --nproc_per_node=8 runs/finetune_hf.py pretrain @runs/pretrain_qwen.toml
    python runs/finetune_hf.py sft --resume --run-dir out/RUN

`sft` learns what the assistant says in conversations, `pretrain` learns every token of texts. Settings come from TOML
files (@FILE or @ FILE) and from flags, in this order, and the last one counts. --help lists them all.

It needs requirements-hf.txt. A step takes packs of documents, which hf_packs.py makes: positions start at 0 in each
document, and no token sees another document. The loss is the sum over all counted tokens of the step, on all ranks and
in all micro-batches, divided by their number.

The run directory holds config.json, log.jsonl, checkpoints/, report.md, curve.png, this script, and model/, which
save_pretrained wrote: talk to it with runs/chat.py. The last line on stdout is one JSON object with the result.
"""

import datetime
import difflib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import hf_packs
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hf_packs import IGNORED, Packs, Source, UserError, first_line, from_hub, read_text, write_text
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

# ---- settings


class Config(BaseModel):
    """Every setting of a run."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    # fmt: off
    model_name: str = Field(description="name on the hub, or a folder of save_pretrained")
    from_scratch: bool = Field(False, description="random weights in place of the trained ones")
    chat_template: str | None = Field(None, description="file with a chat template for sft")
    run_dir: str | None = Field(None, description="where the run is written; default: dated")

    data: Source = Field(description="what to train on")
    val_data: Source | None = Field(None, description="what to validate on; default: --val-rows")
    val_rows: int = Field(200, ge=1, description="rows of --data held out where no --val-data is")
    column: str | None = Field(None, description="default: messages for sft, text for pretrain")
    sequence_length: int = Field(4096, ge=2, description="tokens in a pack, longest document")
    workers: int = Field(1, ge=1, description="processes that tokenize and pack")

    packs: int = Field(32, ge=1, description="packs in a step, over all ranks")
    micro_packs: int = Field(4, ge=1, description="packs that one GPU takes at once")
    epochs: float = Field(1.0, gt=0, description="passes over the data, unless --steps is given")
    steps: int | None = Field(None, ge=1, description="optimizer steps")
    seed: int = Field(0, ge=0, description="of the order of packs, and of random weights")

    lr: float = Field(1e-5, gt=0, description="highest learning rate of AdamW")
    lr_floor: float = Field(0.1, ge=0, le=1, description="share of the rate that is left at the end")
    warmup: float = Field(0.03, ge=0, le=1, description="share of the steps that warm up")
    weight_decay: float = Field(0.1, ge=0, description="of matrices, never of embeddings or norms")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the square")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")

    attention: Literal["auto", "fa3", "fa2", "varlen", "sdpa"] = Field("auto", description="auto: the first that runs")
    liger: bool | None = Field(None, description="Liger kernels; default: on a GPU if installed")
    recompute: bool | None = Field(None, description="activation checkpointing; default: if memory asks for it")
    compile: bool | None = Field(None, description="torch.compile each layer; default: on a GPU")

    log_every: int = Field(10, ge=1, description="steps between lines of the log")
    eval_every: int = Field(100, ge=1, description="steps between validations")
    save_every: int = Field(500, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints to keep; the best stays too")
    wandb: str | None = Field(None, description="project of Weights & Biases")
    # fmt: on


# What --resume may change: nothing of this alters the result beyond rounding.
CHANGEABLE = {
    "run_dir", "workers", "micro_packs", "attention", "liger", "recompute", "compile", "log_every", "eval_every",
    "save_every", "keep", "wandb",
}  # fmt: skip


# ---- the run


@dataclass
class Ranks:
    """Which process this is."""

    rank: int
    local: int  # number on this machine
    world: int
    device: torch.device
    mesh: Any
    slow: Any  # a gloo group that waits for hours, for what one process does alone

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.slow)
        return total.item()


@dataclass
class Progress:
    """Where a run is; saved with every checkpoint."""

    step: int = 0
    packs: int = 0  # packs read so far, which is the position in the data
    tokens: int = 0  # padding excluded
    train_seconds: float = 0.0
    val_loss: float | None = None  # nats for each counted token, at val_step
    val_step: int = -1


@dataclass
class Run:
    """A run under way."""

    command: str
    config: Config
    ranks: Ranks
    run_dir: Path
    tokenizer: Any
    train: Packs
    val: Packs
    model: "PackedModel"
    optimizer: torch.optim.Optimizer
    steps: int
    log: "Log"
    progress: Progress = field(default_factory=Progress)


def train(command: str, config: Config, resumed: bool) -> dict:
    """Trains from the first step, or from the newest checkpoint, to the end. Returns the result."""
    ranks = start_ranks()
    run_dir = prepare_run_dir(command, config, resumed, ranks)
    tokenizer = hf_packs.load_tokenizer(command, config)
    train_packs, val_packs = hf_packs.load_data(command, config, tokenizer, ranks)
    model = build_model(config, tokenizer, ranks)
    optimizer = build_optimizer(model, config)

    steps = config.steps or math.ceil(config.epochs * len(train_packs) / config.packs)
    log = Log(run_dir, config, ranks)
    parts = (tokenizer, train_packs, val_packs, model, optimizer)
    run = Run(command, config, ranks, run_dir, *parts, steps, log)
    if resumed:
        load_newest(run)
    ranks.say(f"training: step {run.progress.step:,} of {steps:,}, {config.packs:,} packs a step")

    run_steps(run)
    export(run)
    return finish(run)


def run_steps(run: Run) -> None:
    """The loop. Raises: UserError if a signal ends it, after saving"""
    config = run.config
    progress = run.progress
    caught = catch_signals()
    if progress.step == 0:
        evaluate(run)

    meter = Meter(run)
    while progress.step < run.steps:
        loss, norm = train_step(run)
        meter.add(loss)

        last = progress.step == run.steps
        stop = run.ranks.sum(len(caught)) > 0
        if progress.step % config.log_every == 0 or last or stop:
            meter.write(norm)
        save_now = progress.step % config.save_every == 0 or last
        if progress.step % config.eval_every == 0 or save_now:
            evaluate(run)
        if save_now or stop:
            save(run)
        if stop and not last:
            raise UserError(f"stopped at step {progress.step:,}, which is saved; use --resume")
        meter.start()


def train_step(run: Run) -> tuple[Tensor, float]:
    """One step of the optimizer.

    Returns: the loss of this rank's tokens divided by the counted tokens of all, and the gradient's norm
    """
    config = run.config
    progress = run.progress
    torch.manual_seed(config.seed * 1_000_003 + progress.step)  # dropout, if the model has any
    numbers = range(progress.packs, progress.packs + config.packs)
    counted = run.train.total("counted", numbers)
    batches = list(hf_packs.micro_batches(run.train, numbers, config, run.ranks))

    run.model.train()
    total = torch.zeros((), device=run.ranks.device)
    for i, batch in enumerate(batches):
        run.model.set_requires_gradient_sync(i == len(batches) - 1)
        loss = run.model(**batch) / counted
        # The gradient is averaged over the ranks, and the sum is wanted.
        (loss * run.ranks.world).backward()
        total += loss.detach()

    norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.clip)
    norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient became {norm} at step {progress.step + 1:,}; continue from the checkpoint before with "
            f"--resume on other data, or start again with a lower --lr than {config.lr:g}"
        )
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(config, progress.step, run.steps)
    run.optimizer.step()
    run.optimizer.zero_grad()

    progress.step += 1
    progress.packs += config.packs
    progress.tokens += run.train.total("tokens", numbers)
    return total, norm


def learning_rate(config: Config, step: int, steps: int) -> float:
    """A straight line up, then half a cosine down to the floor."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    low = config.lr * config.lr_floor
    return low + (config.lr - low) * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate(run: Run) -> None:
    """Loss over all packs of the validation data, in nats for each counted token."""
    progress = run.progress
    if progress.val_step == progress.step:
        return
    run.model.eval()
    numbers = range(len(run.val))
    total = torch.zeros((), device=run.ranks.device, dtype=torch.float64)
    for batch in hf_packs.micro_batches(run.val, numbers, run.config, run.ranks):
        total += run.model(**batch)
    run.model.reshard()  # only a backward pass does that by itself
    progress.val_loss = run.ranks.sum(total.item()) / run.val.total("counted", numbers)
    progress.val_step = progress.step
    entry = {"step": progress.step, "tokens": progress.tokens, "val_loss": progress.val_loss}
    run.log.write(entry, f"step {progress.step:,}: validation {progress.val_loss:.4f}")


# ---- model


class PackedModel(nn.Module):
    """A causal model of transformers that returns the summed loss of packed documents.

    It is the root of FSDP, so the head's weight is there when the loss needs it.
    """

    def __init__(self, hf, cross_entropy: Callable):
        super().__init__()
        self.hf = hf
        self.cross_entropy = cross_entropy

    def forward(self, tokens, targets, positions, bounds, longest: int) -> Tensor:
        hidden = self.hf.base_model(
            input_ids=tokens[None],
            position_ids=positions[None],
            cu_seq_lens_q=bounds,
            max_length_q=longest,
            use_cache=False,
        ).last_hidden_state[0]
        head = self.hf.get_output_embeddings()
        return self.cross_entropy(hidden, head.weight, targets, head.bias)


def build_model(config: Config, tokenizer, ranks: Ranks) -> PackedModel:
    """Loads the model in fp32 and applies, in this order: kernels, recomputation, compilation, FSDP."""
    hf = load_model(config, tokenizer)
    check_head(hf)
    hf.matrix_weights = count_matrix_weights(hf)  # before sharding, for the MFU
    on_gpu = ranks.device.type == "cuda"
    hf_packs.choose_attention(hf, config, ranks)

    liger = use_liger(hf) if on_gpu and config.liger is not False else None
    if config.liger and not liger:
        raise UserError("--liger needs a GPU and the package liger-kernel; use --no-liger")

    layers = next(m for m in hf.base_model.modules() if isinstance(m, nn.ModuleList))
    recompute = config.recompute
    if recompute is None:
        recompute = on_gpu and memory_is_short(hf, config, ranks)
    if recompute:
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    compiled = on_gpu if config.compile is None else config.compile
    if compiled:
        for layer in layers:
            layer.compile()

    dtype = torch.bfloat16 if on_gpu else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
    model = PackedModel(hf, liger or linear_cross_entropy)
    fully_shard(model, mesh=ranks.mesh, mp_policy=policy)
    ranks.say(
        f"model: {sum(p.numel() for p in model.parameters()):,} parameters, Liger kernels {'on' if liger else 'off'}, "
        f"recomputation {'on' if recompute else 'off'}, compilation {'on' if compiled else 'off'}"
    )
    return model


def load_model(config: Config, tokenizer):
    """The weights in fp32, which the optimizer keeps; hf.export_dtype is what they came in."""
    from transformers import AutoConfig, AutoModelForCausalLM

    description = from_hub(AutoConfig.from_pretrained, config.model_name, "--model-name")
    if config.from_scratch:
        torch.manual_seed(config.seed)
        hf = AutoModelForCausalLM.from_config(description, dtype=torch.float32)
    else:
        load = AutoModelForCausalLM.from_pretrained
        hf = from_hub(load, config.model_name, "--model-name", dtype=torch.float32)
    hf.export_dtype = description.dtype or torch.float32

    rows = hf.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        found = f"the tokenizer has {len(tokenizer):,} tokens, the model {rows:,}"
        raise UserError(f"{found}; use a model and a tokenizer that belong together")
    longest = getattr(description, "max_position_embeddings", None) or config.sequence_length
    if config.sequence_length > longest:
        asked = f"--sequence-length {config.sequence_length:,}"
        raise UserError(f"{asked} is more than the {longest:,} positions of the model; lower it")
    return hf


@torch.no_grad()
def check_head(hf) -> None:
    """Some models scale or cap their logits. The loss here does not, so they are refused."""
    hf.eval()
    tokens = torch.arange(8)[None]
    hidden = hf.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    head = hf.get_output_embeddings()
    ours = F.linear(hidden, head.weight, head.bias)
    theirs = hf(input_ids=tokens, use_cache=False).logits
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        name = type(hf).__name__
        raise UserError(f"{name} changes its logits behind the last matrix; choose another model")


def count_matrix_weights(hf) -> int:
    """Weights that a token is multiplied with; a lookup is free."""
    lookups = {id(m.weight) for m in hf.modules() if isinstance(m, nn.Embedding)}
    head = hf.get_output_embeddings().weight
    others = [p for p in hf.parameters() if p.ndim > 1 and id(p) not in lookups and p is not head]
    return sum(p.numel() for p in others) + head.numel()


def memory_is_short(hf, config: Config, ranks: Ranks) -> bool:
    """Whether activations would take more than what is left beside weights, gradients and moments.

    An estimate for bf16 and attention without a score matrix; it errs towards recomputation.
    """
    c = hf.config
    parameters = sum(p.numel() for p in hf.parameters())
    wide = getattr(c, "intermediate_size", None) or 4 * c.hidden_size
    a_token = 2 * (10 * c.hidden_size + 4 * wide) * c.num_hidden_layers
    activations = a_token * config.micro_packs * config.sequence_length
    states = 16 * parameters / ranks.world + 6 * parameters  # 6: gathered, unreduced gradients
    free = torch.cuda.mem_get_info(ranks.device)[0]
    return activations > 0.8 * (free - states)


def use_liger(hf) -> Callable | None:
    """Gives a model of a known type Liger's kernels; returns its fused cross-entropy, None if not installed."""
    try:
        from liger_kernel.transformers import (
            LigerFusedLinearCrossEntropyLoss,
            _apply_liger_kernel_to_instance,
        )
    except ImportError:
        return None
    _apply_liger_kernel_to_instance(hf, cross_entropy=False, fused_linear_cross_entropy=False)
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)
    return lambda hidden, weight, targets, bias: loss(weight, hidden, targets, bias)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, bias=None) -> Tensor:
    """Summed cross-entropy. Logits exist for 1,024 tokens at a time, and again in the backward pass."""

    def chunk_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, weight, bias).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for part, wanted in zip(hidden.split(1024), targets.split(1024), strict=True):
        total = total + checkpoint(chunk_loss, part, wanted, use_reentrant=False)
    return total


# ---- optimizer


def build_optimizer(model: PackedModel, config: Config) -> torch.optim.AdamW:
    """AdamW without decay on embeddings, norms and biases. Moments start at zero, so that they can be loaded."""
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decays = {p: p.ndim > 1 and id(p) not in lookups for p in model.parameters()}
    matrices = {"params": [p for p in decays if decays[p]], "weight_decay": config.weight_decay}
    others = {"params": [p for p in decays if not decays[p]], "weight_decay": 0.0}
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW([matrices, others], lr=config.lr, betas=betas, fused=True)
    for parameter in decays:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


# ---- checkpoints


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, by name. Loading writes into these tensors."""
    tensors = {}
    for name, parameter in run.model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        tensors[f"weight.{name}"] = parameter.data
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{moment}.{name}"] = run.optimizer.state[parameter][moment]
    return tensors


def save(run: Run) -> None:
    """A checkpoint in safetensors files, one for each rank. It gets its name when it is complete."""
    folder = run.run_dir / "checkpoints" / f"step_{run.progress.step:06d}"
    unfinished = folder.with_suffix(".tmp")
    if run.ranks.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier(run.ranks.slow)
    writer = HuggingFaceStorageWriter(str(unfinished), save_distributed=True)
    dcp.save(tensors_of(run), storage_writer=writer)
    dist.barrier(run.ranks.slow)

    if run.ranks.rank == 0:
        state = {
            "progress": asdict(run.progress),
            "data": run.train.fingerprint,
            "files": {path.name: path.stat().st_size for path in unfinished.iterdir()},
        }
        write_text(unfinished / "state.json", json.dumps(state, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        prune(run.run_dir, run.config.keep)
    dist.barrier(run.ranks.slow)


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete ones, oldest first."""
    folders = (run_dir / "checkpoints").glob("step_*")
    return sorted((f for f in folders if f.suffix != ".tmp"), key=lambda f: int(f.name[5:]))


def read_state(folder: Path) -> dict | None:
    """state.json of a checkpoint; None if it or a file that it lists is damaged."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in state["files"]}
    except (OSError, ValueError, KeyError):
        return None
    return state if sizes == state["files"] else None


def prune(run_dir: Path, keep: int) -> None:
    """Removes all but the newest and the one with the lowest validation loss."""
    losses = {}
    for folder in checkpoints(run_dir):
        state = read_state(folder)
        progress = Progress(**state["progress"]) if state else Progress()
        measured = progress.val_step == progress.step
        losses[folder] = progress.val_loss if measured else math.inf
    best = min(losses, key=losses.get)
    for folder in list(losses)[:-keep]:
        if folder != best:
            shutil.rmtree(folder)


def load_newest(run: Run) -> None:
    """Continues from the newest checkpoint that is whole, written by any number of ranks."""
    for folder in reversed(checkpoints(run.run_dir)):
        state = read_state(folder)
        if state is None:
            run.ranks.say(f"{folder.name} is damaged, passed over")
            continue
        if state["data"] != run.train.fingerprint:
            what = f"{run.run_dir} was trained on other data, or with another tokenizer"
            raise UserError(f"{what}; restore them, or start a new run")
        dcp.load(tensors_of(run), storage_reader=HuggingFaceStorageReader(str(folder)))
        run.progress = Progress(**state["progress"])
        for moments in run.optimizer.state.values():
            moments["step"].fill_(run.progress.step)
        run.log.cut(run.progress.step)
        return
    raise UserError(f"{run.run_dir} holds no whole checkpoint; start it again without --resume")


def export(run: Run) -> None:
    """model/, which from_pretrained reads: weights in the type they came in, tokenizer and chat template."""
    hf = run.model.hf
    state = {}
    for name, tensor in hf.state_dict().items():
        # All ranks take part in putting a tensor together.
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if run.ranks.rank == 0:
            state[name] = full.to("cpu", hf.export_dtype)
    if run.ranks.rank == 0:
        folder = run.run_dir / "model"
        hf.config.dtype = hf.export_dtype
        if run.command == "sft":
            end_turns(run, hf.generation_config)
        hf.save_pretrained(folder, state_dict=state)
        run.tokenizer.save_pretrained(folder)
    dist.barrier(run.ranks.slow)


def end_turns(run: Run, generation_config) -> None:
    """Makes generation stop at the token that ended the answers in training."""
    targets = run.train.rows[0]["targets"]
    lasts = np.flatnonzero((targets != IGNORED) & (np.append(targets[1:], IGNORED) == IGNORED))
    stops = {int(targets[lasts[0]])} & set(run.tokenizer.all_special_ids)
    known = generation_config.eos_token_id
    if known is not None:
        stops |= set(known if isinstance(known, list) else [known])
    generation_config.eos_token_id = sorted(stops) or None


# ---- log and report


class Log:
    """log.jsonl, the screen, and Weights & Biases if asked for. Only rank 0 writes."""

    def __init__(self, run_dir: Path, config: Config, ranks: Ranks):
        self.path = run_dir / "log.jsonl"
        self.ranks = ranks
        self.wandb = None
        if ranks.rank == 0 and config.wandb:
            import wandb

            settings = config.model_dump()
            self.wandb = wandb.init(project=config.wandb, name=run_dir.name, config=settings)

    def write(self, entry: dict, line: str) -> None:
        self.ranks.say(line)
        if self.ranks.rank == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        if self.wandb:
            self.wandb.log(entry, step=entry["step"])

    def entries(self) -> list[dict]:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]  # kill -9 may cut one

    def cut(self, step: int) -> None:
        """Drops what was logged behind a checkpoint."""
        if self.ranks.rank == 0:
            lines = [json.dumps(entry) for entry in self.entries() if entry["step"] <= step]
            write_text(self.path, "".join(f"{line}\n" for line in lines))


class Meter:
    """Loss, speed and memory since the last line. Of time, only that of steps counts, compilation included."""

    def __init__(self, run: Run):
        self.run = run
        c = run.model.hf.config
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.pair_flops = 12 * c.num_hidden_layers * c.num_attention_heads * width
        self.token_flops = 6 * run.model.hf.matrix_weights
        self.peak = peak_flops(run.ranks.device) * run.ranks.world
        self.reset()

    def reset(self) -> None:
        self.losses = []
        self.seconds = 0.0
        self.tokens = 0
        self.flops = 0
        self.start()

    def start(self) -> None:
        self.began = time.perf_counter()

    def add(self, loss: Tensor) -> None:
        """A step is over."""
        progress = self.run.progress
        numbers = range(progress.packs - self.run.config.packs, progress.packs)
        tokens = self.run.train.total("tokens", numbers)
        attended = self.run.train.total("attended", numbers)
        seconds = time.perf_counter() - self.began
        self.seconds += seconds
        progress.train_seconds += seconds
        self.tokens += tokens
        self.flops += self.token_flops * tokens + self.pair_flops * attended
        self.losses.append(loss)

    def write(self, norm: float) -> None:
        run = self.run
        left = run.steps - run.progress.step
        eta = left * self.seconds / len(self.losses)
        entry = {
            "step": run.progress.step,
            "tokens": run.progress.tokens,
            "loss": run.ranks.sum(torch.stack(self.losses).mean().item()),
            "lr": run.optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "tokens_per_second": self.tokens / self.seconds,
            "mfu": self.flops / self.seconds / self.peak,
            "memory_gib": torch.cuda.max_memory_reserved() / 2**30,  # 0 without a GPU
            "eta_seconds": eta,
        }
        line = (
            f"step {entry['step']:,}/{run.steps:,}: loss {entry['loss']:.4f}, norm {norm:.2f}, "
            f"{entry['tokens_per_second']:,.0f} tokens/s, MFU {entry['mfu']:.1%}, "
            f"{entry['memory_gib']:.1f} GiB, {datetime.timedelta(seconds=round(eta))} left"
        )
        run.log.write(entry, line)
        self.reset()


# Dense bf16 peak in TFLOP/s, from the maker's data sheets.
PEAK_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362}


def peak_flops(device: torch.device) -> float:
    """Infinite where the table does not know the device, which makes the MFU 0."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    found = [tflops for key, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)]
    return found[0] * 1e12 if found else math.inf


def finish(run: Run) -> dict:
    """Writes the report and returns the result."""
    progress = run.progress
    entries = run.log.entries() if run.ranks.rank == 0 else []
    speeds = [entry for entry in entries if "loss" in entry]
    result = {
        "val_loss": progress.val_loss,
        "loss": speeds[-1]["loss"] if speeds else None,
        "steps": progress.step,
        "tokens": progress.tokens,
        "train_seconds": progress.train_seconds,
        "tokens_per_second": progress.tokens / max(progress.train_seconds, 1e-9),
        "mfu": float(np.median([entry["mfu"] for entry in speeds])) if speeds else None,
        "peak_memory_gib": torch.cuda.max_memory_reserved() / 2**30,
        "run_dir": str(run.run_dir),
    }
    if run.ranks.rank == 0:
        rows = {"command": run.command, "model": run.config.model_name, **result}
        rows["val_loss before"] = entries[0].get("val_loss")
        table = "".join(f"| {key} | {value} |\n" for key, value in rows.items())
        draw_curve(entries, run.run_dir / "curve.png")
        text = f"# {run.run_dir.name}\n\n| | |\n| --- | --- |\n{table}\n![loss](curve.png)\n"
        write_text(run.run_dir / "report.md", text)
    return result


def draw_curve(entries: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, style in (("loss", "-"), ("val_loss", "o-")):
        points = [(entry["step"], entry[key]) for entry in entries if key in entry]
        axes.plot(*zip(*points, strict=True), style, ms=3, label=key)
    axes.set(xlabel="step", ylabel="nats for each counted token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---- ranks, files, signals


def start_ranks() -> Ranks:
    """Joins the processes of torchrun; one process alone is a group too."""
    rank = int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    slow = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=24))
    mesh = init_device_mesh(device.type, (world,))
    return Ranks(rank, local, world, device, mesh, slow)


def prepare_run_dir(command: str, config: Config, resumed: bool, ranks: Ranks) -> Path:
    """The run directory with config.json and this script."""
    now = torch.tensor(int(time.time()))
    dist.broadcast(now, 0, group=ranks.slow)
    stamp = datetime.datetime.fromtimestamp(now.item()).strftime("%Y-%m-%d_%H-%M-%S")
    run_dir = Path(config.run_dir or f"out/{stamp}_{command}_hf")
    if (run_dir / "log.jsonl").exists() and not resumed:
        raise UserError(f"{run_dir} already holds a run; use --resume, or another --run-dir")
    dist.barrier(ranks.slow)
    if ranks.rank == 0 and not resumed:
        run_dir.mkdir(parents=True, exist_ok=True)
        description = {
            "command": command,
            "config": config.model_dump(),
            "torch": torch.__version__,
        }
        write_text(run_dir / "config.json", json.dumps(description, indent=1))
        for script in (Path(__file__), Path(__file__).with_name("hf_packs.py")):
            shutil.copy(script, run_dir)
    return run_dir


def catch_signals() -> list[int]:
    """A list that SIGTERM and Ctrl-C are added to, for the loop to read between steps."""
    caught = []

    def catch(number: int, frame) -> None:
        if caught:  # asked twice: at once
            raise KeyboardInterrupt
        caught.append(number)

    signal.signal(signal.SIGTERM, catch)
    signal.signal(signal.SIGINT, catch)
    return caught


# ---- command line


def parse(argv: list[str]) -> tuple[str, bool, dict]:
    """The command, whether to resume, and settings by dotted name, of which the last one counts."""
    command = ""
    resumed = False
    settings = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("sft", "pretrain"):
            command = word
        elif word == "--resume":
            resumed = True
        elif word.startswith("@"):
            file = word[1:] or (words.pop(0) if words else "")
            try:
                table = tomllib.loads(read_text(Path(file)))
            except tomllib.TOMLDecodeError as error:
                raise UserError(f"{file} is no TOML ({error}); fix that line") from None
            settings.update(dotted(table, file))
        elif word.startswith("--"):
            name, equals, value = word[2:].replace("-", "_").partition("=")
            if equals:
                value = word.partition("=")[2]  # with its own dashes
            elif words and not words[0].startswith(("--", "@")):
                value = words.pop(0)
            else:  # a switch
                value = not name.startswith("no_")
                name = name.removeprefix("no_")
            settings.update(dotted({name: value}, "the command line"))
        else:
            raise UserError(f"{word} is neither sft, pretrain, @FILE nor a flag; see --help")
    if not command:
        raise UserError("name what to do: sft or pretrain, as in runs/finetune_hf.py sft @FILE")
    return command, resumed, settings


def setting_names() -> dict[str, Any]:
    """All settings by dotted name, with what pydantic knows of them."""
    names = dict(Config.model_fields)
    for outer in ("data", "val_data"):
        names |= {f"{outer}.{name}": f for name, f in Source.model_fields.items()}
    return names


def dotted(table: dict, origin: str) -> dict:
    """A table of settings with its inner tables opened: {"data": {"path": 1}} is {"data.path": 1}."""
    names = setting_names()
    found = {}
    for name, value in table.items():
        inner = value if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": item for key, item in inner.items()} or {name: value}
    for name in found:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
            raise UserError(f"unknown setting {name} in {origin}; the nearest is {near}")
    return found


def make_config(command: str, resumed: bool, settings: dict) -> Config:
    """The settings, checked; with --resume those of the run, which may change in few things only."""
    before = {}
    if resumed:
        if "run_dir" not in settings:
            raise UserError("--resume needs --run-dir, the run to continue")
        description = json.loads(read_text(Path(settings["run_dir"]) / "config.json"))
        if description["command"] != command:
            raise UserError(f"{settings['run_dir']} is a run of {description['command']}; say so")
        old = Config(**description["config"])
        before = dotted(old.model_dump(exclude_none=True), "config.json")

    nested = {}
    for name, value in {**before, **settings}.items():
        outer, _, inner = name.rpartition(".")
        place = nested.setdefault(outer, {}) if outer else nested
        place[inner] = value
    try:
        config = Config(**nested)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][:2])).replace("_", "-")
        found = "missing" if first["type"] == "missing" else repr(first["input"])
        raise UserError(f"--{name} is {found}: {first['msg'].lower()}; see --help") from None

    for name in Config.model_fields if resumed else ():
        if name not in CHANGEABLE and getattr(config, name) != getattr(old, name):
            raise UserError(
                f"--resume cannot change {name}: the run has {getattr(old, name)}, the command asks for "
                f"{getattr(config, name)}; leave it out, or start a new run"
            )
    return config


def print_help() -> int:
    print(__doc__.strip() + "\n\nSettings (--no-NAME turns a switch off):")
    for name, setting in setting_names().items():
        shown = "" if setting.is_required() or setting.default is None else f" [{setting.default}]"
        print(f"  --{name.replace('_', '-'):28} {setting.description}{shown}")
    return 0


def main(argv: list[str]) -> int:
    if not argv or "--help" in argv or "-h" in argv:
        return print_help()
    rank = int(os.environ.get("RANK", 0))
    try:
        command, resumed, settings = parse(argv)
        result = train(command, make_config(command, resumed, settings), resumed)
        if rank == 0:
            print(json.dumps(result), flush=True)
        return 0
    except UserError as error:
        message = str(error)
    except torch.OutOfMemoryError as error:
        message = f"memory ran out ({first_line(error)}); lower --micro-packs, or use --recompute"
    except KeyboardInterrupt:
        message = "stopped at once; a run that has saved goes on with --resume"
    except OSError as error:
        message = f"{first_line(error)}; fix that, then start again, with --resume if it has saved"
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()
    time.sleep(3 if rank else 0)  # by then torchrun has ended the others, so one line is printed
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
