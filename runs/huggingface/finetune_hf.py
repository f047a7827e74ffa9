"""Finetunes an existing Hugging Face causal language model, or continues its pretraining.

    python runs/huggingface/finetune_hf.py sft @runs/huggingface/sft_qwen.toml --lora-rank 16 --lr 2e-4
    python runs/huggingface/finetune_hf.py pretrain @runs/huggingface/pretrain_qwen.toml --steps 100
    torchrun --standalone --nproc_per_node=8 runs/huggingface/finetune_hf.py sft @runs/huggingface/sft_qwen.toml
    python runs/huggingface/finetune_hf.py --resume --run-dir out/RUN

`sft` trains on what the assistant says in conversations, `pretrain` on every token of texts. Settings come from TOML
files (the last one wins) and from flags, which override them. Install requirements-hf.txt first.

Documents are packed: positions restart at 0 in each, and no token sees another document. The loss is the mean over all
target tokens of a step, those in the loss mask, over all ranks and micro-batches.

The run directory holds config.json, log.jsonl, checkpoints/, result.json, report.md, curve.png, this script, and model/
for from_pretrained and runs/chat.py. With --lora-rank, adapter/ holds the adapters and model/ has them merged. The last
line on stdout is one JSON object with the result.
"""

import argparse
import contextlib
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))
from lib.command import RunError, add_flags, check_settings, first_line, run_command, say
from pydantic import BaseModel, Field

IGNORED = -100  # label of a token outside the loss mask
ARRAYS = ("input_ids", "labels", "lengths")  # what a pack holds
COUNTS = ("documents", "tokens", "targets")  # how many of each it has
MIN_STEPS = 20  # fewer deserve a note
CHAT_FORM = 'a list of {"role": ..., "content": ...}'

# ---- settings


class Source(BaseModel, extra="forbid"):
    """The arguments of datasets.load_dataset. Keys for s3 come from the environment, so they are never logged."""

    path: str = Field(description="dataset on the hub, or json, parquet or text")
    name: str | None = Field(None, description="configuration of the dataset")
    data_dir: str | None = Field(None, description="folder inside the dataset")
    data_files: str | list[str] | None = Field(None, description="file names or patterns")
    split: str = Field("train", description="split of the dataset, e.g. train[:1%]")
    revision: str | None = Field(None, description="revision of the dataset on the hub")


class Config(BaseModel, extra="forbid"):
    """Every setting of a run."""

    command: Literal["sft", "pretrain"]
    model_name: str = Field(description="model on the hub, or a folder written by save_pretrained")
    chat_template: str | None = Field(None, description="file with a chat template for sft")
    run_dir: Path = Field(description="run directory to write")
    resume: bool = Field(False, description="continue the run in --run-dir")
    data: Source
    val_rows: int = Field(200, ge=1, description="rows held out for validation")
    column: str | None = Field(None, description="column of the data; default: messages for sft, text for pretrain")
    sequence_length: int = Field(4096, ge=2, description="tokens in a pack, which a document must fit into")
    workers: int = Field(1, ge=1, description="processes that tokenize and pack")
    packs: int = Field(32, ge=1, description="packs per step, over all ranks")
    micro_packs: int = Field(4, ge=1, description="packs in a micro-batch of one GPU")
    epochs: float = Field(1.0, gt=0, description="passes over the data, unless --steps is given")
    steps: int | None = Field(None, ge=1, description="optimizer steps")
    seed: int = Field(0, ge=0, description="seed of the order of packs")
    lr: float = Field(1e-5, gt=0, description="peak learning rate of AdamW; decays to a tenth")
    warmup: float = Field(0.03, ge=0, le=1, description="fraction of the steps used for warm-up")
    weight_decay: float = Field(0.1, ge=0, description="weight decay of matrices; embeddings and norms have none")
    clip: float = Field(1.0, gt=0, description="maximum norm of the gradient")
    lora_rank: int | None = Field(None, ge=1, description="rank of LoRA adapters; only they are trained")
    attention: str | None = Field(None, description="attention backend; default: torch's varlen on new GPUs, else sdpa")
    recompute: bool = Field(False, description="activation checkpointing: less memory, slower")
    save_every: int = Field(200, ge=1, description="steps between validations and checkpoints")
    keep: int = Field(2, ge=1, description="number of newest checkpoints to keep; the best is kept as well")
    wandb: str | None = Field(None, description="name of the run on Weights & Biases")


def build_parser() -> argparse.ArgumentParser:
    """A flag for each setting. Flags that are not given are not in the result."""
    usage = "%(prog)s sft|pretrain @FILE [flags], or %(prog)s --resume --run-dir DIR [flags]"
    rules = {"argument_default": argparse.SUPPRESS, "allow_abbrev": False}
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=form, **rules)
    parser.add_argument("command", nargs="?", help="sft for conversations, pretrain for texts")
    parser.add_argument("files", nargs="*", metavar="@FILE", help="TOML file with settings")
    add_flags(parser, Config.model_fields)
    add_flags(parser, Source.model_fields, "data.")
    return parser


if __name__ == "__main__":
    build_parser().parse_intermixed_args(sys.argv[1:] or ["--help"])  # it and wrong flags need not wait for PyTorch
    if not importlib.util.find_spec("datasets"):
        sys.exit("error: datasets is not installed; pip install -r runs/huggingface/requirements-hf.txt")

import datasets
import numpy as np
import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from datasets.fingerprint import Hasher
from lib import report
from lib.packing import best_fit
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[2]))
import train_small

# ---- training


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0  # padding excluded
    train_seconds: float = 0.0
    val_loss: float = math.inf  # of the weights as they are, in nats per target token


@dataclass
class Run:
    """A run in progress."""

    config: Config
    ranks: train_small.Ranks
    log: train_small.Log
    tokenizer: Any
    train: datasets.Dataset  # packs
    val: datasets.Dataset
    counts: dict[str, np.ndarray]  # of each training pack
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    order: np.ndarray  # rows of the packs, one epoch behind the other, each in an order of its own
    origin: list  # what stays the same when a run continues
    max_len: int  # maximum tokens of a document, one number for all batches: each is compiled
    progress: Progress = field(default_factory=Progress)
    prefetched: list[dict] = field(default_factory=list)  # micro-batches of the next step


def train(config: Config) -> dict:
    """Trains from the first step or the newest checkpoint to the end. Returns the result."""
    ranks = start_ranks()
    description = load_description(config)
    log = prepare_run_dir(config, ranks)
    tokenizer = load_tokenizer(config)
    packs, val = load_data(config, tokenizer)
    model = build_model(config, description, ranks.device)
    check_documents(model)
    optimizer = build_optimizer(model, config)

    count = len(packs)
    total = config.steps * config.packs if config.steps else max(1, round(config.epochs * count))
    steps = math.ceil(total / config.packs)  # the last one may have fewer packs
    if steps < MIN_STEPS and not config.steps:
        say(f"note: few steps ({steps}); lower --packs, or raise --epochs")
    epochs = range(math.ceil(total / count))
    orders = [np.random.default_rng([config.seed, epoch]).permutation(count) for epoch in epochs]
    origin = [packs._fingerprint, model.num_parameters(), config.packs, config.seed]
    max_len = max(int(np.max(row)) for part in (packs, val) for row in part["lengths"])
    order = np.hstack(orders)[:total]
    counts = {name: packs[name][:] for name in COUNTS}
    run = Run(config, ranks, log, tokenizer, packs, val, counts, model, optimizer, steps, order, origin, max_len)
    if config.resume:
        load_newest(run)

    run_steps(run)
    export(run)
    return finish(run)


def run_steps(run: Run) -> None:
    """The loop. Raises: RunError if a signal ends it, after saving"""
    progress = run.progress
    say(f"training: step {progress.step:,} of {run.steps:,}, {run.config.packs:,} packs each")

    stopper = train_small.Stopper(run.ranks)
    if progress.step == 0:
        evaluate(run)
    while progress.step < run.steps:
        train_step(run)
        last = progress.step == run.steps
        due = last or progress.step % run.config.save_every == 0
        stop = any(run.ranks.gather(stopper.caught_at))
        if due:
            evaluate(run)
        if due or stop:
            save(run)
        if stop and not last:
            raise RunError(f"stopped and saved at step {progress.step:,}; continue with --resume")


def train_step(run: Run) -> None:
    """One step of the optimizer, and its line in the log."""
    began = time.perf_counter()
    config = run.config
    progress = run.progress
    torch.manual_seed(config.seed * 1_000_003 + progress.step)  # dropout, if the model has any
    start = progress.step * config.packs
    rows = run.order[start : start + config.packs]
    targets = int(run.counts["targets"][rows].sum())  # on all ranks, without asking each other
    batches = run.prefetched or list(micro_batches(run, run.train, rows))

    run.model.train()
    total = torch.zeros((), device=run.model.device)
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        run.model.set_requires_gradient_sync(last)
        run.model.set_reshard_after_backward(last)
        loss = packed_loss(run.model, batch, targets)
        (loss * run.ranks.world).backward()  # FSDP averages gradients, the sum is wanted
        total += loss.detach()

    # The packs of the next step are read while the GPU still works on this one.
    following = run.order[start + config.packs :][: config.packs]
    run.prefetched = list(micro_batches(run, run.train, following))
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.clip).full_tensor()
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(config, progress.step, run.steps)
    run.optimizer.step()
    run.optimizer.zero_grad()
    norm = norm.item()  # waits for the GPU
    if not math.isfinite(norm):
        raise RunError(f"the gradient became {norm}; lower --lr, and --resume if there is a checkpoint")

    seconds = time.perf_counter() - began
    progress.step += 1
    tokens = int(run.counts["tokens"][rows].sum())
    progress.tokens += tokens
    progress.train_seconds += seconds
    progress.val_loss = math.inf
    log_step(run, sum(run.ranks.gather(total.item())), norm, tokens / seconds)


def packed_loss(model: nn.Module, batch: dict, targets: int) -> Tensor:
    """Summed loss of a micro-batch, divided by the number of target tokens of the step."""
    items = torch.full((), targets, device=batch["labels"].device)
    return model(**batch, num_items_in_batch=items, use_cache=False, **model.loss_options).loss


def learning_rate(config: Config, step: int, steps: int) -> float:
    """A straight line up, then half a cosine down to a tenth."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def evaluate(run: Run) -> None:
    """Loss over all packs of the validation data, in nats per target token."""
    progress = run.progress
    run.model.eval()
    targets = int(run.val["targets"][:].sum())
    total = torch.zeros((), device=run.model.device)
    for batch in micro_batches(run, run.val, np.arange(len(run.val))):
        total += packed_loss(run.model, batch, targets)
    reshard(run.model)
    progress.val_loss = sum(run.ranks.gather(total.item()))
    run.log.say(f"step {progress.step:,}: validation {progress.val_loss:.4f}")
    run.log.write({"step": progress.step, "tokens": progress.tokens, "val_loss": progress.val_loss})


# ---- data: rows of load_dataset -> documents -> packs -> micro-batches


def load_description(config: Config):
    """The model's config.json. Raises: RunError if there is none, or if packs are longer than the model's context"""
    advice = "pass a folder written by save_pretrained, or a causal model on the hub"
    with explain(f"--model-name {config.model_name} cannot be loaded", advice):
        description = AutoConfig.from_pretrained(config.model_name, trust_remote_code=False)
    positions = getattr(description, "max_position_embeddings", None) or config.sequence_length
    if config.sequence_length > positions:
        problem = f"--sequence-length {config.sequence_length:,} exceeds the model's {positions:,} positions"
        raise RunError(f"{problem}; lower it")
    return description


def load_tokenizer(config: Config):
    """The model's own tokenizer, with the chat template that sft needs."""
    with explain(f"--model-name {config.model_name} has no tokenizer that can be loaded", "check the name"):
        tokenizer = AutoTokenizer.from_pretrained(config.model_name, trust_remote_code=False)
    if config.command == "pretrain":
        return tokenizer

    if config.chat_template:
        tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    if not re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)):
        template = f"the chat template of {config.chat_template or config.model_name}"
        advice = "use --chat-template FILE (runs/huggingface/chat_template_qwen.jinja or chat_template_llama3.jinja)"
        raise RunError(f"{template} does not tag what the assistant says with {{% generation %}}; {advice}")
    return tokenizer


def load_data(config: Config, tokenizer) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Training and validation packs. One process per machine makes them; the others read its cache."""
    is_first = dist.get_node_local_rank(fallback_rank=0) == 0
    patient = dist.new_group(timeout=timedelta(hours=24), backend="gloo")  # tokenizing takes long
    if not is_first:
        datasets.disable_progress_bars()
        dist.barrier(patient)

    arguments = config.data.model_dump(exclude_none=True)
    with explain(f"load_dataset cannot load {arguments}", "check these arguments"):
        rows = datasets.load_dataset(**arguments)
    column, form = {"sft": ("messages", CHAT_FORM), "pretrain": ("text", "a text")}[config.command]
    column = config.column or column
    if column not in rows.column_names:
        raise RunError(f"no column {column} in {rows.column_names}; choose one with --column, each row of it {form}")
    with explain(f"--val-rows {config.val_rows:,} is too many for {len(rows):,} rows", "lower it"):
        parts = rows.train_test_split(config.val_rows, seed=0)
    train_packs = make_packs(config, tokenizer, parts["train"], column)
    val_packs = make_packs(config, tokenizer, parts["test"], column)

    if is_first:
        dist.barrier(patient)
    return train_packs, val_packs


def make_packs(config: Config, tokenizer, rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """Tokenizes and packs rows; both results are cached."""
    function = {"sft": tokenize_chats, "pretrain": tokenize_texts}[config.command]
    with explain(f"{config.model_name} has no fast tokenizer", "choose a model that has one"):
        identity = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template, column]
    arguments = {"tokenizer": tokenizer, "column": column}
    tokenized = cached_map(config, rows, function, arguments, identity)

    arguments = {"length": config.sequence_length, "split": config.command == "pretrain"}
    identity = [arguments, config.workers]  # each worker packs a part of the rows
    packed = cached_map(config, tokenized, pack, arguments, identity)
    if len(packed) == 0:
        raise RunError(f"none of the {len(rows):,} rows fits; check --sequence-length")
    packs = packed.with_format("numpy")
    documents, tokens, targets = (packs[name][:].sum() for name in COUNTS)
    counts = f"{documents:,} documents of {len(rows):,} rows in {len(packs):,} packs"
    say(f"data: {counts}, {tokens:,} tokens, {targets:,} of them targets of the loss")
    return packs


def cached_map(config: Config, rows, function: Callable, arguments: dict, identity: list):
    """rows.map, cached by data, source and identity: the default hash changes whenever a tokenizer is used."""
    return rows.map(
        function,
        batched=True,
        batch_size=4096,
        fn_kwargs=arguments,
        remove_columns=rows.column_names,
        num_proc=config.workers if config.workers > 1 else None,
        new_fingerprint=Hasher.hash([rows._fingerprint, inspect.getsource(function), identity]),
        desc=function.__name__,
    )


def tokenize_texts(batch: dict, tokenizer, column: str) -> dict:
    """Each text with the tokenizer's BOS, if any, and EOS. The loss mask has every token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    with explain(f"column {column} has a row without text", "drop such rows"):
        rows = tokenizer(batch[column], verbose=False)["input_ids"]
    rows = [row if row[-1:] == end else row + end for row in rows]
    return {"tokens": rows, "loss_mask": [[True] * len(row) for row in rows]}


def tokenize_chats(batch: dict, tokenizer, column: str) -> dict:
    """Each conversation of OpenAI's form in the chat template. The loss mask has what the assistant says."""
    result = {"tokens": [], "loss_mask": []}
    apply = tokenizer.apply_chat_template
    tools = batch.get("tools") or [None] * len(batch[column])
    for messages, own in zip(batch[column], tools, strict=True):
        text = json.dumps(messages, ensure_ascii=False)[:200]
        with explain(f"the conversation {text} does not fit the chat template", f"make it {CHAT_FORM}"):
            row = apply(present(messages), present(own) or None, return_assistant_tokens_mask=True)
        result["tokens"].append(row["input_ids"])
        result["loss_mask"].append([bool(n) for n in row["assistant_masks"]])
    return result


def present(value):
    """A value without the nulls of Arrow, which gives every dict of a column the keys of all the others."""
    if isinstance(value, dict):
        return {k: present(v) for k, v in value.items() if v is not None}
    return [present(v) for v in value] if isinstance(value, list) else value


def pack(batch: dict, length: int, split: bool) -> dict:
    """Packs documents by best fit, the longest first; drops those without targets.

    Documents that are too long are split into parts that share a token, so no target is lost, or else dropped. The
    model shifts labels itself, so the label of a document's first token is ignored.
    """
    documents = []
    for tokens, loss_mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
        if len(tokens) > length and not split:
            continue
        for start in range(0, len(tokens) - 1, length - 1):
            part = np.array(tokens[start : start + length])
            labels = np.where(loss_mask[start : start + length], part, IGNORED)
            labels[0] = IGNORED
            if (labels != IGNORED).any():
                documents.append((part, labels))
    sizes = np.array([len(part) for part, _ in documents])
    order = np.argsort(-sizes, kind="stable")
    packs = []
    for numbers in best_fit(sizes, order, length, len(documents)) if documents else ():
        members = [documents[number] for number in numbers]
        tokens, labels = (np.concatenate(parts) for parts in zip(*members, strict=True))
        lengths = sizes[numbers]
        padding = length - len(tokens)
        row = {
            "input_ids": np.pad(tokens, (0, padding)),
            "labels": np.pad(labels, (0, padding), constant_values=IGNORED),
            "lengths": [*lengths, *filling(padding, lengths.max())],
            "documents": len(members),
            "tokens": len(tokens),
            "targets": int((labels != IGNORED).sum()),
        }
        packs.append(row)
    return {name: [row[name] for row in packs] for name in (*ARRAYS, *COUNTS)}


def filling(tokens: int, max_len: int) -> list[int]:
    """Lengths of the documents that padding is split into: attention takes as long as the longest one needs."""
    return [min(max_len, tokens - start) for start in range(0, tokens, max_len)]


def micro_batches(run: Run, packs: datasets.Dataset, rows: np.ndarray) -> Iterator[dict]:
    """This rank's part of some packs. All ranks get the same number of micro-batches, all of one shape."""
    world = run.ranks.world
    mine = rows[run.ranks.rank :: world]
    size = min(run.config.micro_packs, math.ceil(run.config.packs / world))
    for start in range(0, math.ceil(len(rows) / world), size):
        chosen = [packs[int(row)] for row in mine[start : start + size]]
        yield collate(chosen, size, run.config.sequence_length, run.max_len, run.model.device)


def collate(rows: list[dict], size: int, length: int, max_len: int, device: torch.device) -> dict:
    """Arguments of the model: the packs in one sequence, filled up with empty ones to `size`.

    Args:    rows hold ARRAYS of a pack each; length of a pack in tokens; max_len of a document
    Returns: input_ids, labels and position_ids, int64 (1, T) with T = size * length; cu_seq_lens_q and cu_seq_lens_k,
             int32 document boundaries; max_length_q and max_length_k, max_len
    """
    empty = {"input_ids": np.zeros(length, np.int64), "labels": np.full(length, IGNORED)}
    empty["lengths"] = filling(length, max_len)
    rows = rows + [empty] * (size - len(rows))
    tokens, labels, lengths = (np.concatenate([row[name] for row in rows]) for name in ARRAYS)
    positions = np.concatenate([np.arange(n) for n in lengths])
    arrays = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    batch = {name: torch.from_numpy(x)[None] for name, x in arrays.items()}
    batch["cu_seq_lens_q"] = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
    if device.type == "cuda":  # without waiting; one compiled layer serves any number of documents
        batch = {k: v.pin_memory().to(device, non_blocking=True) for k, v in batch.items()}
        torch._dynamo.maybe_mark_dynamic(batch["cu_seq_lens_q"], 0)
    sizes = {"max_length_q": max_len, "max_length_k": max_len}
    return batch | sizes | {"cu_seq_lens_k": batch["cu_seq_lens_q"]}


# ---- model and optimizer


def build_model(config: Config, description, device: torch.device) -> nn.Module:
    """Loads the model and applies, in this order: kernels, recomputation, compilation, FSDP.

    Trained weights are fp32. Weights frozen by LoRA keep their dtype.
    """
    own_dtype = description.dtype or torch.float32
    dtype = own_dtype if config.lora_rank else torch.float32
    with explain(f"--model-name {config.model_name} cannot be loaded", "use a causal model that transformers supports"):
        hf = AutoModelForCausalLM.from_pretrained(config.model_name, dtype=dtype, trust_remote_code=False)
    hf.export_dtype = own_dtype

    on_gpu = device.type == "cuda"
    AttentionInterface.register("varlen", varlen_attention)
    attention = config.attention or ("varlen" if on_gpu and torch.cuda.get_device_capability() >= (8, 0) else "sdpa")
    with explain(f"--attention {attention} does not fit", "try --attention sdpa"):
        hf.set_attn_implementation(attention)
    hf.loss_options = apply_liger(hf) if on_gpu else {}
    if config.lora_rank:
        torch.manual_seed(config.seed)  # the same adapters on all ranks
        hf.add_adapter(lora_config(config.lora_rank))
        for weight in trainable(hf).values():
            weight.data = weight.data.float()
    if config.recompute:
        hf.activation_checkpointing_enable({"use_reentrant": False})
    layers = next(m for m in hf.base_model.modules() if isinstance(m, nn.ModuleList))
    dtype = torch.bfloat16 if on_gpu else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        if on_gpu:
            layer.compile()
        fully_shard(layer, mp_policy=policy, reshard_after_forward=dist.get_world_size() > 1)
    fully_shard(hf, mp_policy=policy)
    trained = sum(p.numel() for p in trainable(hf).values())
    counts = f"{hf.num_parameters():,} parameters, {trained:,} of them trained"
    say(f"model: {counts}, attention: {attention}, with Liger: {bool(hf.loss_options)}")
    return hf


def lora_config(rank: int):
    """Adapters on all matrices except the head, with PEFT's usual scale."""
    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters: all, or the adapters with LoRA."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def apply_liger(hf) -> dict:
    """Applies Liger's fused cross-entropy if it knows the model; returns its arguments. torch compiles the layers."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return {}
    if hf.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return {}
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[hf.config.model_type]
    others = inspect.signature(apply).parameters.keys() - {"model", "fused_linear_cross_entropy"}
    apply(model=hf, **dict.fromkeys(others, False))
    chunk = 57344 // hf.get_output_embeddings().in_features  # about 115 kB of logits a token
    return {"skip_logits": True, "accum_dtype": torch.float32, "chunk_mem_const": chunk}


def varlen_attention(module, query, key, value, mask, scaling=None, sliding_window=None, **others):
    """torch's attention for packed documents, with the signature that transformers calls. No dropout."""
    if others.get("softcap") is not None or others.get("s_aux") is not None:
        raise RunError(f"varlen attention does not fit {type(module).__name__}; use --attention sdpa")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    sizes = [others[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    reach = (-1 if sliding_window is None else sliding_window - 1, 0)
    y = varlen_attn(q, k, v, *sizes, scale=scaling, window_size=reach)
    return y[None], None


def check_documents(hf) -> None:
    """Raises RunError if a document's logits depend on the documents before it in the pack."""
    first, _, last = logits_of(hf, [*range(16), *range(16, 0, -1), *range(16)], [16] * 3).split(16)
    error = (first - last).norm() / first.norm()
    if not error < (0.03 if hf.device.type == "cuda" else 1e-5):  # bf16 rounds, fp32 hardly
        raise RunError(f"{hf.config.model_type} models mix the documents of a pack; use another model")


@torch.no_grad()
def logits_of(hf, tokens: list[int], lengths: list[int], **options) -> Tensor:
    """Logits (T, V) of a pack of documents, fp32; options are those of the model."""
    row = {"input_ids": np.array(tokens), "labels": np.array(tokens), "lengths": lengths}
    batch = collate([row], 1, len(tokens), max(lengths), hf.device) | {"labels": None}
    hf.eval()
    with torch.compiler.set_stance("force_eager"):  # training has other shapes
        logits = hf(**batch, use_cache=False, **options).logits[0].float()
    reshard(hf)
    return logits


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights after a forward pass; only a backward pass does so by itself."""
    for module in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
        module.reshard()


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW with decay on matrices only. Moments exist from the start, so that a checkpoint can be loaded into them."""
    trained = [*trainable(model).values()]
    lookups = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}  # a tied head is among them
    matrices = {p for p in trained if p.ndim > 1} - lookups
    decayed = {"params": [p for p in trained if p in matrices], "weight_decay": config.weight_decay}
    others = {"params": [p for p in trained if p not in matrices], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, others], lr=config.lr, betas=(0.9, 0.95), fused=True)
    for parameter in trained:
        state = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = state | {"step": torch.zeros((), device=parameter.device)}
    return optimizer


# ---- checkpoints, log, report


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, by name. Loading writes into these tensors."""
    tensors = {}
    for name, parameter in trainable(run.model).items():
        tensors[f"weight.{name}"] = parameter.data
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{moment}.{name}"] = run.optimizer.state[parameter][moment]
    return tensors


def save(run: Run) -> None:
    """Saves a checkpoint in safetensors files, one per rank. It gets its name once it is complete."""
    folder = run.config.run_dir / "checkpoints" / f"step_{run.progress.step:06d}"
    unfinished = folder.with_suffix(".tmp")
    if run.ranks.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    writer = HuggingFaceStorageWriter(str(unfinished), save_distributed=True)
    dcp.save(tensors_of(run), storage_writer=writer)

    # Process 0 comes here when all have written.
    if run.ranks.is_main:
        files = sorted(unfinished.iterdir())
        with ThreadPoolExecutor() as pool:
            hashes = dict(zip([file.name for file in files], pool.map(train_small.file_sha256, files), strict=True))
        state = {"progress": asdict(run.progress), "origin": run.origin, "files": hashes}
        train_small.write_atomically(unfinished / "state.json", train_small.seal(state))
        shutil.rmtree(folder, ignore_errors=True)  # a corrupted one
        unfinished.rename(folder)
        prune(run.config.run_dir, run.config.keep)
    dist.barrier()


def newest_complete(folder: Path) -> tuple[Path, dict] | None:
    """The newest complete checkpoint of a run and its state.json; says which ones it skips."""
    for checkpoint in reversed(train_small.checkpoints(folder)):
        try:
            return checkpoint, train_small.check_checkpoint(checkpoint, train_small.read_state(checkpoint)["files"])
        except (train_small.UserError, OSError, ValueError) as error:
            say(f"skipped {checkpoint.name}: {error}")
    return None


def prune(folder: Path, keep: int) -> None:
    """Removes all checkpoints but the newest and the one with the lowest validation loss."""
    losses = dict.fromkeys(train_small.checkpoints(folder), math.inf)
    for checkpoint in losses:
        with contextlib.suppress(OSError, ValueError):  # a corrupted one has none
            losses[checkpoint] = train_small.read_state(checkpoint)["progress"]["val_loss"]
    best = min(losses, key=losses.get)
    for checkpoint in list(losses)[:-keep]:
        if checkpoint != best:
            shutil.rmtree(checkpoint)


def load_newest(run: Run) -> None:
    """Continues from the newest checkpoint, written by any number of ranks."""
    folder = run.config.run_dir
    complete = run.ranks.gather(newest_complete(folder) if run.ranks.is_main else None)[0]
    if not complete:
        raise RunError(f"{folder} has no complete checkpoint; start again without --resume")
    newest, state = complete
    if state["origin"] != run.origin:
        raise RunError(f"{folder} was started with other data, model, length, packs, workers or seed; see config.json")
    dcp.load(tensors_of(run), storage_reader=HuggingFaceStorageReader(str(newest)))
    run.progress = Progress(**state["progress"])
    for moments in run.optimizer.state.values():
        moments["step"].fill_(run.progress.step)
    run.log.rewind(run.progress.step)


def export(run: Run) -> None:
    """Writes model/ for from_pretrained, in the original dtype of the weights."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(run.model, options=options)  # on rank 0
    if run.ranks.is_main:
        dtype = run.model.export_dtype
        hf = run.model
        if run.config.lora_rank:
            hf, state = merge(run.config, state)
        labels = run.train[0]["labels"]
        last = int(labels[labels != IGNORED][-1])  # the token that ends a text or a turn
        if last in run.tokenizer.added_tokens_decoder:
            hf.generation_config.eos_token_id = last
            run.tokenizer.eos_token = run.tokenizer.convert_ids_to_tokens(last)
        state = {name: tensor.to(dtype) for name, tensor in state.items()}
        hf.save_pretrained(run.config.run_dir / "model", state_dict=state)
        hf.config.dtype = dtype  # save_pretrained wrote that of the module
        hf.config.save_pretrained(run.config.run_dir / "model")
        run.tokenizer.save_pretrained(run.config.run_dir / "model")
        for file in run.config.run_dir.glob("*/*.safetensors"):  # else only its owner could read it
            shutil.copymode(run.config.run_dir / "config.json", file)
    dist.barrier()


def merge(config: Config, state: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Saves the adapters of a state; returns the model with them merged, and its state."""
    model = AutoModelForCausalLM.from_pretrained(config.model_name, dtype=torch.float32, trust_remote_code=False)
    model = peft.get_peft_model(model, lora_config(config.lora_rank))
    model.load_state_dict({f"base_model.model.{name}": tensor for name, tensor in state.items()})
    model.save_pretrained(config.run_dir / "adapter")
    (config.run_dir / "adapter/README.md").unlink()  # a form to fill in
    merged = model.merge_and_unload()
    return merged, merged.state_dict()


def sample_text(run: Run) -> str:
    """The beginning of a held-out document, continued greedily by 64 tokens. All ranks compute it."""
    row = run.val[0]
    start = int(np.argmax(row["labels"] != IGNORED))  # of the first answer
    start = start if run.config.command == "sft" else min(16, int(row["lengths"][0]) // 2)
    tokens = row["input_ids"][:start].tolist()
    for _ in range(min(64, run.config.sequence_length - start)):
        tokens.append(logits_of(run.model, tokens, [len(tokens)], logits_to_keep=1)[-1].argmax().item())
    return run.tokenizer.decode(tokens)


def log_step(run: Run, loss: float, norm: float, speed: float) -> None:
    """Loss, speed and memory of a step. Padding counts as no work."""
    progress = run.progress
    eta = (run.steps - progress.step) * progress.train_seconds / progress.step
    entry = {"step": progress.step, "tokens": progress.tokens, "loss": loss, "grad_norm": norm}
    entry |= {"lr": run.optimizer.param_groups[0]["lr"], "tokens_per_second": speed, "eta_seconds": eta}
    entry["memory_gib"] = train_small.peak_memory_gib(run.ranks.device)
    used = f"{speed:,.0f} tokens/s, {entry['memory_gib']:.1f} GiB"
    left = f"{timedelta(seconds=round(eta))} left"
    run.log.say(f"step {progress.step:,}/{run.steps:,}: loss {loss:.4f}, norm {norm:.2f}, {used}, {left}")
    run.log.write(entry)


def finish(run: Run) -> dict:
    """Writes the report and returns the result."""
    progress = run.progress
    folder = run.config.run_dir
    sample = sample_text(run)
    steps = [entry for entry in report.read_log(folder) if "loss" in entry]
    result = asdict(progress) | {"steps": progress.step, "run_dir": str(folder), "loss": steps[-1]["loss"]}
    result["tokens_per_second"] = progress.tokens / progress.train_seconds
    result["peak_memory_gib"] = max(entry["memory_gib"] for entry in steps)
    if run.ranks.is_main:
        result = {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
        (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        report.write_report(folder, with_samples=False)
        with (folder / "report.md").open("a", encoding="utf-8") as file:
            file.write(f"\n## A held-out text, continued\n\n````text\n{sample}\n````\n")
    return result


# ---- processes, errors, command line


def start_ranks() -> train_small.Ranks:
    """Joins the processes of torchrun; a single process forms a group of its own."""
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timedelta(minutes=10), **alone)
    return train_small.Ranks(dist.get_rank(), dist.get_world_size(), device)


def prepare_run_dir(config: Config, ranks: train_small.Ranks) -> train_small.Log:
    """Makes the run directory with config.json and this script; one without a checkpoint may be started again."""
    folder = config.run_dir
    if not config.resume and (train_small.checkpoints(folder) or (folder / "model").exists()):
        raise RunError(f"{folder} already holds a run; use --resume, or another --run-dir")
    dist.barrier()
    log = train_small.Log(folder, ranks)
    if ranks.is_main and not config.resume:
        folder.mkdir(parents=True, exist_ok=True)
        log.rewind(-1)
        (folder / "config.json").write_text(config.model_dump_json(indent=1), encoding="utf-8")
        shutil.copy(__file__, folder)
    if ranks.is_main and config.wandb:
        log.start_wandb(config.wandb, config.model_dump(mode="json"))
    return log


@contextlib.contextmanager
def explain(what: str, advice: str) -> Iterator[None]:
    """Turns the many errors of a library into one sentence."""
    try:
        yield
    except Exception as error:
        raise RunError(f"{what} ({type(error).__name__}: {first_line(error)[:200]}); {advice}") from None


def make_config(argv: list[str]) -> Config:
    """The checked settings. With --resume those of the run come first."""
    flags = vars(build_parser().parse_intermixed_args(argv))
    files = [file.removeprefix("@") for file in flags.pop("files", [])]
    if flags.get("resume") and "run_dir" in flags:
        files.insert(0, f"{flags['run_dir']}/config.json")
    source = {name[5:]: flags.pop(name) for name in list(flags) if name.startswith("data.")}

    settings = {}
    data = {}
    for file in files:
        with explain(f"{file} cannot be read", "correct its name or that line"):
            text = Path(file).read_text(encoding="utf-8-sig")
            found = json.loads(text) if file.endswith(".json") else tomllib.loads(text)
        data |= found.pop("data", {})
        settings |= found
    return check_settings(Config, settings | flags | {"data": data | source})


def main(argv: list[str]) -> int:
    return run_command(lambda: train(make_config(argv)))


if __name__ == "__main__":
    import finetune_hf  # under its own name, by which the workers of .map find its functions

    sys.exit(finetune_hf.main(sys.argv[1:]))
