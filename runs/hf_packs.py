"""Packs of documents for runs/finetune_hf.py: from load_dataset to the arrays of a micro-batch, and attention on them.

A document is a conversation or a text. It is tokenized, then packed with others, both by the .map of Hugging Face
datasets. Each step leaves its result in the cache of datasets, where the next run finds it: the same data with another
sequence length is only packed anew.
"""

import bisect
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

IGNORED = -100  # a target that is not counted


class UserError(Exception):
    """A mistake that one sentence explains."""


class Source(BaseModel):
    """The arguments of datasets.load_dataset. Keys for s3 come from the environment, so that none is logged."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="a dataset of the hub, or json, parquet, text")
    name: str | None = Field(None, description="configuration of the dataset")
    data_dir: str | None = Field(None, description="folder of the dataset")
    data_files: str | list[str] | None = Field(None, description="files or patterns")
    split: str = Field("train", description="part of the dataset, also train[:1%]")
    revision: str | None = Field(None, description="version on the hub")


def load_data(command: str, config, tokenizer, ranks) -> tuple["Packs", "Packs"]:
    """Training and validation packs. One process of each machine does the work, the others read its cache."""
    import datasets

    if ranks.local != 0:
        datasets.disable_progress_bars()
        dist.barrier(ranks.slow)
    train_rows = load_rows(config.data)
    if config.val_data:
        val_rows = load_rows(config.val_data)
    elif len(train_rows) <= config.val_rows:
        raise UserError(
            f"--data has {len(train_rows):,} rows and --val-rows holds out {config.val_rows:,}; lower it, or name "
            f"--val-data.path"
        )
    else:
        parts = train_rows.train_test_split(config.val_rows, seed=0)
        train_rows = parts["train"]
        val_rows = parts["test"]
    train_packs = pack_rows(command, config, tokenizer, train_rows, "training", ranks)
    val_packs = pack_rows(command, config, tokenizer, val_rows, "validation", ranks)
    if ranks.local == 0:
        dist.barrier(ranks.slow)
    return Packs(train_packs, True, config.seed), Packs(val_packs, False, config.seed)


def load_rows(source: Source):
    """Rows of load_dataset; its many errors become a sentence."""
    import datasets

    arguments = source.model_dump(exclude_none=True)
    try:
        return datasets.load_dataset(**arguments)
    except Exception as error:
        raise UserError(
            f"the dataset {arguments} could not be loaded ({first_line(error)}); check the "
            f"arguments, which are those of datasets.load_dataset"
        ) from None


def pack_rows(command: str, config, tokenizer, rows, name: str, ranks):
    """Tokens of all rows, then packs of them; both come from the cache where it has them."""
    column = config.column or {"sft": "messages", "pretrain": "text"}[command]
    if column not in rows.column_names:
        raise UserError(
            f"the {name} data has no column {column}, but {', '.join(rows.column_names)}; name one with --column"
        )
    tokenize = {"sft": tokenize_chats, "pretrain": tokenize_texts}[command]
    identity = [tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), column]
    identity += [str(tokenizer.special_tokens_map)]
    arguments = {"tokenizer": tokenizer, "column": column}
    tokens = cached_map(rows, tokenize, arguments, identity, config.workers)

    length = config.sequence_length
    sizes = np.asarray(tokens["size"])
    left_out = int((sizes > length + 1).sum()) if command == "sft" else 0
    arguments = {"length": length, "cut": command == "pretrain"}
    packs = cached_map(tokens, pack, arguments, [json.dumps(arguments)], config.workers)
    if len(packs) == 0:
        raise UserError(
            f"the {name} data has nothing to learn from in {len(rows):,} rows: {left_out:,} are longer than "
            f"--sequence-length {length:,}, the others have no counted token"
        )
    used = sum(packs["tokens"])
    ranks.say(
        f"{name}: {len(packs):,} packs with {used:,} tokens, {sum(packs['counted']):,} counted, "
        f"{1 - used / (len(packs) * length):.1%} padding"
    )
    if left_out:
        ranks.say(f"{name}: left out {left_out:,} conversations longer than {length:,} tokens")
    return packs


def cached_map(rows, function: Callable, arguments: dict, identity: list[str], workers: int):
    """rows.map, whose cache is found again by the data, the function's text and what identity states.

    The hash that map makes of its arguments changes when a tokenizer is used, so it is not relied on.
    """
    words = [rows._fingerprint, inspect.getsource(function), *identity]
    return rows.map(
        function,
        batched=True,
        batch_size=4096,
        fn_kwargs=arguments,
        remove_columns=rows.column_names,
        num_proc=workers if workers > 1 else None,
        new_fingerprint=hashlib.sha256("\0".join(words).encode()).hexdigest()[:32],
        desc=function.__name__,
    )


def load_tokenizer(command: str, config):
    """The model's own tokenizer, with the chat template that sft needs."""
    from transformers import AutoTokenizer

    tokenizer = from_hub(AutoTokenizer.from_pretrained, config.model_name, "--model-name")
    if not tokenizer.is_fast:
        raise UserError(f"{config.model_name} has no fast tokenizer; choose a model that has one")
    if command == "pretrain":
        return tokenizer

    ship = "pass one that does with --chat-template FILE (runs/chat_template_qwen.jinja is for Qwen2.5)"
    if config.chat_template:
        tokenizer.chat_template = read_text(Path(config.chat_template))
    if not isinstance(tokenizer.chat_template, str):
        raise UserError(
            f"{config.model_name} has no chat template that tells what to count; {ship}"
        )
    if not re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
        whose = config.chat_template or f"the chat template of {config.model_name}"
        raise UserError(
            f"{whose} does not mark what the assistant says with {{% generation %}}, so the loss cannot be limited to "
            f"it; {ship}"
        )
    return tokenizer


def tokenize_texts(batch: dict, tokenizer, column: str) -> dict:
    """Each text with the tokenizer's own first token, if any, and its end of text. Every token counts."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = tokenizer(batch[column], verbose=False)["input_ids"]
    rows = [row if row[-1:] == end else row + end for row in rows]
    counted = [[True] * len(row) for row in rows]
    return {"tokens": rows, "counted": counted, "size": [len(row) for row in rows]}


def tokenize_chats(batch: dict, tokenizer, column: str) -> dict:
    """Each conversation of OpenAI's form in the chat template; what the assistant says counts."""
    result = {"tokens": [], "counted": [], "size": []}
    tools = batch.get("tools") or [None] * len(batch[column])
    for messages, row_tools in zip(batch[column], tools, strict=True):
        try:
            row = tokenizer.apply_chat_template(
                [plain_message(message) for message in messages],
                tools=row_tools or None,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as error:  # templates fail in their own ways
            text = json.dumps(messages, ensure_ascii=False)[:200]
            raise UserError(
                f"a conversation does not fit the chat template ({first_line(error)}): {text}"
            ) from None
        result["tokens"].append(row["input_ids"])
        result["counted"].append([bool(n) for n in row["assistant_masks"]])
        result["size"].append(len(row["input_ids"]))
    return result


def plain_message(message: dict) -> dict:
    """A message as templates expect it: no empty keys, text in one piece, arguments of tools as an object."""
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content", "")
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content)
    message["content"] = content
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


def pack(batch: dict, length: int, cut: bool) -> dict:
    """Best fit of documents, the longest first: each goes into the fullest pack that has room for it.

    A document of n tokens has n - 1 inputs with targets. One that is too long is cut into parts that share a token,
    so that no target is lost, or else left out. So is one that counts nothing.
    """
    documents = []
    for tokens, counted in zip(batch["tokens"], batch["counted"], strict=True):
        if len(tokens) > length + 1 and not cut:
            continue
        for start in range(0, len(tokens) - 1, length):
            part = slice(start + 1, start + length + 1)
            targets = np.where(counted[part], tokens[part], IGNORED).astype(np.int32)
            inputs = np.asarray(tokens[start : start + len(targets)], np.int32)
            if (targets != IGNORED).any():
                documents.append((inputs, targets))
    documents.sort(key=lambda document: -len(document[0]))

    packs = []
    unfilled = []  # (room left, number of the pack), sorted
    for document in documents:
        at = bisect.bisect_left(unfilled, (len(document[0]), 0))
        if at < len(unfilled):
            room, number = unfilled.pop(at)
        else:
            room = length
            number = len(packs)
            packs.append([])
        packs[number].append(document)
        room -= len(document[0])
        if room > 0 and len(packs[number]) < most_documents(length):
            bisect.insort(unfilled, (room, number))

    result = {
        name: [] for name in ("inputs", "targets", "lengths", "tokens", "counted", "attended")
    }
    for members in packs:
        targets = np.concatenate([targets for _, targets in members])
        lengths = np.array([len(inputs) for inputs, _ in members], np.int32)
        result["inputs"].append(np.concatenate([inputs for inputs, _ in members]))
        result["targets"].append(targets)
        result["lengths"].append(lengths)
        result["tokens"].append(len(targets))
        result["counted"].append(int((targets != IGNORED).sum()))
        result["attended"].append(int((lengths.astype(np.int64) * (lengths + 1) // 2).sum()))
    return result


def most_documents(length: int) -> int:
    """Documents that a pack may hold."""
    return max(8, length // 16)


class Packs:
    """Packs of one split, and their order, which is shuffled anew in every epoch.

    A row has inputs, targets and lengths of documents. Pack number n of a run is the same on any number of ranks.
    """

    def __init__(self, rows, shuffled: bool, seed: int):
        self.rows = rows.with_format("numpy")
        self.fingerprint = rows._fingerprint
        self.shuffled = shuffled
        self.seed = seed
        # Small columns, in memory: all ranks know what a step counts without asking each other.
        self.columns = {name: np.asarray(rows[name]) for name in ("counted", "tokens", "attended")}
        self.set_epoch(0)

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.order = np.arange(len(self))
        if self.shuffled:
            self.order = np.random.default_rng([self.seed, epoch]).permutation(len(self))

    def place(self, number: int) -> int:
        """The row of a pack."""
        epoch = number // len(self)
        if epoch != self.epoch:
            self.set_epoch(epoch)
        return int(self.order[number % len(self)])

    def row(self, number: int) -> dict:
        return self.rows[self.place(number)]

    def total(self, column: str, numbers: range) -> int:
        return int(sum(self.columns[column][self.place(number)] for number in numbers))


def micro_batches(packs: "Packs", numbers: range, config, ranks) -> Iterator[dict]:
    """This rank's share of some packs. All ranks get the same number of micro-batches."""
    mine = numbers[ranks.rank :: ranks.world]
    most = math.ceil(len(numbers) / ranks.world)
    size = min(config.micro_packs, most)
    for start in range(0, most, size):
        rows = [packs.row(number) for number in mine[start : start + size]]
        yield collate(rows, size, config.sequence_length, ranks.device)


def collate(rows: list[dict], size: int, length: int, device: torch.device) -> dict:
    """The inputs of PackedModel: packs one behind the other, each filled up with a document of padding.

    Shapes depend on nothing but size and length, so that everything is compiled once.
    """
    tokens = np.zeros(size * length, np.int64)
    targets = np.full(size * length, IGNORED, np.int64)
    positions = np.zeros(size * length, np.int64)
    bounds = np.full(size * (most_documents(length) + 1) + 1, size * length, np.int32)
    document = 0
    for i in range(size):
        lengths = rows[i]["lengths"].tolist() if i < len(rows) else []
        used = sum(lengths)
        at = i * length
        if used:
            tokens[at : at + used] = rows[i]["inputs"]
            targets[at : at + used] = rows[i]["targets"]
        for n in [*lengths, length - used]:
            positions[at : at + n] = np.arange(n)
            bounds[document] = at
            document += n > 0
            at += n
    bounds[document] = size * length
    arrays = {"tokens": tokens, "targets": targets, "positions": positions, "bounds": bounds}
    batch = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return {**batch, "longest": length}


# ---- attention: (q, k, v) (T, heads, width), bounds of documents -> (T, heads, width)


def load_fa3() -> Callable:
    """FlashAttention 3 from the hub (Hopper)."""
    from kernels import get_kernel

    return get_kernel("kernels-community/flash-attn3").flash_attn_varlen_func


def load_fa2() -> Callable:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def load_varlen() -> Callable:
    from torch.nn.attention.varlen import varlen_attn

    def varlen(q, k, v, *sizes, softmax_scale: float, causal: bool, window_size: tuple) -> Tensor:
        return varlen_attn(
            q, k, v, *sizes, scale=softmax_scale, window_size=window_size, enable_gqa=True
        )

    return varlen


def flash_attention(flash: Callable) -> Callable:
    def attend(q, k, v, bounds, longest: int, scale: float, window: int | None) -> Tensor:
        sizes = (bounds, bounds, longest, longest)
        reach = (-1 if window is None else window - 1, 0)
        y = flash(q, k, v, *sizes, softmax_scale=scale, causal=True, window_size=reach)
        return y[0] if isinstance(y, tuple) else y

    return attend


@torch.compiler.disable
def sdpa(q, k, v, bounds, longest: int, scale: float, window: int | None) -> Tensor:
    """One document after the other: slow, but it runs everywhere and is the reference of the others."""
    parts = []
    ends = bounds.unique_consecutive().tolist()
    for start, end in zip(ends, ends[1:], strict=False):
        one = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        n = end - start
        mask = None
        if window is not None and window < n:
            distance = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)
            mask = (distance >= 0) & (distance < window)
        y = F.scaled_dot_product_attention(
            *one, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(y[0].transpose(0, 1))
    return torch.cat(parts)


ATTENTION = {"fa3": load_fa3, "fa2": load_fa2, "varlen": load_varlen, "sdpa": None}


def choose_attention(hf, config, ranks) -> None:
    """Gives the model the first backend that agrees with sdpa on two small documents."""
    from transformers import AttentionInterface

    if config.attention != "auto":
        names = [config.attention]
    elif ranks.device.type != "cuda":
        names = ["sdpa"]
    else:
        hopper = torch.cuda.get_device_capability(ranks.device) == (9, 0)
        names = [name for name in ATTENTION if name != "fa3" or hopper]
    for name in names:
        try:
            attend = sdpa if name == "sdpa" else flash_attention(ATTENTION[name]())
            probe(attend, hf.config, ranks.device)
            break
        except Exception as error:  # backends fail in many ways
            if name == names[-1]:
                raise UserError(
                    f"--attention {name} does not run here ({first_line(error)}); try --attention auto"
                ) from None
            ranks.say(f"attention: {name} skipped ({first_line(error)})")
    ranks.say(f"attention: {name}")
    AttentionInterface.register("documents", documents_attention(attend))
    hf.set_attn_implementation("documents")


def probe(attend: Callable, model_config, device: torch.device) -> None:
    """Compares a backend with sdpa, forward and backward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = model_config.num_attention_heads
    groups = getattr(model_config, "num_key_value_heads", None) or heads
    width = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    generator = torch.Generator().manual_seed(0)
    shapes = ((96, heads, width), (96, groups, width), (96, groups, width))
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    bounds = torch.tensor([0, 40, 96, 96], device=device, dtype=torch.int32)
    results = []
    for function in (attend, sdpa):
        inputs = [x.clone().requires_grad_() for x in drawn]
        y = function(*inputs, bounds, 96, width**-0.5, None)
        y.float().square().sum().backward()
        results.append([y, *(x.grad for x in inputs)])
    for ours, reference in zip(*results, strict=True):
        error = (ours.float() - reference.float()).norm() / reference.float().norm()
        if not error < 0.02:
            raise RuntimeError(f"its results differ from sdpa's by {error:.1%}")


def documents_attention(attend: Callable) -> Callable:
    """The form in which transformers calls attention."""

    def attention(module, query, key, value, mask, scaling=None, sliding_window=None, **rest):
        bounds = rest.get("cu_seq_lens_q")
        extra = [name for name in ("softcap", "s_aux") if rest.get(name) is not None]
        if bounds is None or extra:
            what = " and ".join(extra) or "no bounds of documents"
            raise UserError(
                f"{type(module).__name__} asks for {what} in attention, which this script cannot give; choose "
                f"another model"
            )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        y = attend(q, k, v, bounds, rest["max_length_q"], scale, sliding_window)
        return y[None], None

    return attention


# ---- errors


def from_hub(load: Callable, name: str, flag: str, **arguments):
    """What transformers loads by name. It runs no code of the hub; its many errors become a sentence."""
    try:
        return load(name, **arguments)
    except Exception as error:
        raise UserError(
            f"{flag} {name} could not be loaded ({first_line(error)}); give a folder of save_pretrained, or a name on "
            f"the hub that this machine can reach"
        ) from None


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({first_line(error)}); check the path") from None


def write_text(path: Path, text: str) -> None:
    """Writes a file at once or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
