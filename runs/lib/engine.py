"""Decoding with a trained model: KV cache, sampling, continuous batching.

    run = engine.load_run("out/RUN")
    generator = engine.Generator(run.model, run.tokenizer)
    for delta in generator.stream_text("The sky is", max_tokens=100, temperature=0.8):
        print(delta, end="")

A Completion is one prompt, its options and its result. Generator.run puts completions into the rows of a Decoder;
when one ends, the next takes its row. Decoder.add_requests prefills what the KV cache lacks of a prompt (PrefixCache
knows what it has), and Decoder.step gives every running row one more token: decode computes logits, and sample picks
a token from them. On CUDA both are graphs over the tensors of RowState, and the next step is launched before the
host reads the tokens of the last (PendingStep). prefill and decode are both GPT.trunk(attend), which computes
everything but attention, with an `attend` that reads and writes the KVCache.

The model is the GPT class of the script that lies in the run directory. This file imports no training script of the
repository, so a run keeps decoding as it was trained.

Letters in shape comments: B rows of the cache, S slots of a row's ring, T new tokens of a prefill, P its packed
tokens (old and new), N its sequences, D model width, H heads, K head width, V vocabulary (of the tokenizer).
"""

from __future__ import annotations

import codecs
import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from os.path import commonprefix  # which takes lists of ids too
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lib.calculator import calculate
from lib.chat_format import CALL_TOKENS
from lib.checkpoint import newest_checkpoint, read_data
from lib.command import RunError, first_line
from safetensors.torch import load_file
from torch import Tensor

try:  # without Triton (CPUs, Macs, Windows) the plain path runs
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
jit = triton.jit if triton else (lambda function: function)

INTERFACE = 10  # of the training scripts that this file can read
PREFILL_TOKENS = 16384  # prompt tokens computed at once; a longer prompt is a batch of its own
SEED_STRIDE = 0x9E3779B1  # between the seeds of prompts that are generated together
GREEDY = -1  # in place of a number of logits to sort: every row takes its most likely id
NOT_FINITE = -1  # in place of an id that was sampled from logits with NaN among them

# ==== Load


def import_script(run_dir: str | Path) -> ModuleType:
    """Imports the training script that lies in a run directory, which executes its code.

    Raises: RunError if there is not exactly one, or if its interface is not INTERFACE
    """
    run_dir = Path(run_dir)
    scripts = sorted(run_dir.glob("train_*.py"))
    if len(scripts) != 1:
        found = f"it has {len(scripts)} training scripts" if run_dir.is_dir() else "it does not exist"
        raise RunError(f"{run_dir} is no run directory: {found}; name another")
    spec = importlib.util.spec_from_file_location(f"run_{scripts[0].stem}", scripts[0])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    module.UserError = RunError  # its functions raise this from now on, so tools catch one class

    found = getattr(module, "INTERFACE", 1)
    if found != INTERFACE:
        description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        commit = description.get("machine", {}).get("git_commit") or "(not in config.json)"
        wrong = f"the script in {run_dir} has interface {found} but this tool reads {INTERFACE}"
        raise RunError(f"{wrong}; use the tools of the commit that made the run: {commit}")
    return module


@dataclass(frozen=True)
class Run:
    script: ModuleType  # of the run directory
    model: Any  # its GPT, on the device, in eval mode
    tokenizer: Any
    config: Any
    step: int  # of the checkpoint


def load_run(run_dir, step: int | None = None, device: str | None = None, **changes) -> Run:
    """Loads the newest checkpoint of a run, or that of a step.

    Args:   device "cuda", "mps" or "cpu", by default the best there is; changes are fields of the
            script's Config that may differ between machines, such as dtype; None changes nothing
    Raises: RunError if the run, the step or the device is missing
    """
    run_dir = Path(run_dir)
    script = import_script(run_dir)
    needed = ("model.safetensors",)
    if step is None:
        folder = newest_checkpoint(script, run_dir, needed)
    else:
        folder = run_dir / "checkpoints" / f"step_{step:06d}"
        if folder not in script.checkpoints(run_dir):
            raise RunError(f"{run_dir} has no checkpoint of step {step}; name another with --step, or leave it out")
        script.check_checkpoint(folder, needed)

    changes = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(script.read_config(run_dir), **changes)
    ranks = script.start_ranks()
    device = choose_device(device) if device else ranks.device
    try:
        model = script.GPT(config, device, script.choose_dtype(config, device))
        weights = load_file(folder / "model.safetensors")
        if device.type == "cpu" and model.embed.dtype == torch.float32:
            # Most of the memory is n-gram tables. Those of a GPU stay in bf16, mapped from the file.
            for name in weights.keys() & {"bigram_embed", "trigram_embed"}:
                setattr(model, name, torch.nn.Parameter(weights[name]))
        model.load_state_dict(weights)
    except RuntimeError as error:  # torch's, if memory runs out or the weights do not fit config.json
        raise RunError(f"{run_dir} cannot be loaded ({first_line(error)})") from None
    model.attention = script.choose_attention(model, lambda text: None)
    tokenizer = read_data(script.Tokenizer, run_dir / "tokenizer.json")
    return Run(script, model.eval(), tokenizer, config, int(folder.name[5:]))


def choose_device(name: str) -> torch.device:
    """The device of a name. Raises: RunError if this machine or this PyTorch lacks it"""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"--device {name} does not work here ({first_line(error)}); leave it out") from None


# ==== KV cache


@dataclass
class KVCache:
    """Keys and values of every attention layer. A row is a ring that holds the layer's window, not the whole context.

    Position p of a row lies in slot p % S. Keys are stored rotated, so their order in the ring does not matter. S is
    window + 2, for the newest key and the next one, or longest sequence + 1 if less.

    In layers with key offset, the second half of a key is that of the token before. So a token writes the first half of
    its key into its own slot, and the second half into the next one. The first token of a text, which has none before
    it, writes its second half into both.
    """

    keys: list[Tensor]  # of each attention layer, (B, S, H, K)
    values: list[Tensor]
    ring_sizes: tuple[int, int]  # S of layers with a short and with a long window

    @staticmethod
    def empty(model, num_rows: int, max_len: int) -> KVCache:
        """A cache of zeros for sequences of up to max_len tokens, in the model's dtype and on its device."""
        config = model.config
        ring_sizes = tuple(min(window + 2, max_len + 1) for window in model.windows)
        sizes = [ring_sizes[int(layer in config.long_layers)] for layer in config.attention_layers]
        shapes = [(num_rows, size, config.num_heads, config.head_dim) for size in sizes]
        keys = [model.embed.new_zeros(shape) for shape in shapes]
        values = [model.embed.new_zeros(shape) for shape in shapes]
        return KVCache(keys, values, ring_sizes)

    def first_rows(self, count: int) -> KVCache:
        """The first rows, in the same memory."""
        keys = [ring[:count] for ring in self.keys]
        return KVCache(keys, [ring[:count] for ring in self.values], self.ring_sizes)

    def clear(self, rows: list[int]) -> None:
        """Zeroes rows. Old keys are masked, but infinities and NaN would get through a mask."""
        if rows:
            index = to_device(rows, self.keys[0].device)
            for ring in (*self.keys, *self.values):
                ring[index] = 0

    def copy(self, sources: dict[int, int]) -> None:
        """Copies rows: {to: from}."""
        if sources:
            target = to_device(list(sources), self.keys[0].device)
            source = to_device(list(sources.values()), self.keys[0].device)
            for ring in (*self.keys, *self.values):
                ring[target] = ring[source]


def to_device(array, device: torch.device) -> Tensor:
    """A tensor of an array or list, without waiting for work that is under way."""
    return torch.as_tensor(array).to(device, non_blocking=True)


# ==== Prefill
# The host plans with numpy (prefill_inputs), one copy brings the plan to the device, and run_prefill follows it there.


class RingPlan(NamedTuple):
    """How a prefill reads and writes the rings of all layers that have one window.

    An example with a window of 3, so rings of 5 slots. The cache holds 5 tokens of sequence A, which gets 2 more, and
    1 token of sequence B, which gets 2. Old keys come from the ring, new ones from the layer:

        packed tokens     A2 A3 A4 A5 A6 | B0 B1 B2        cu_seqlens: 0 5 8
        old_index          0  1  2          5
        new_index                   3  4       6  7

    Attention runs over the packed tokens. The ring of A afterwards, with the slots of the new keys marked:

        slot     0    1    2    3    4
                A5*  A6*   .   A3   A4         first_slots: 0, next_slots: 2 (free for the key of A7)

    Integer arrays, later tensors on the device. Slots are numbered over all rows of the cache, S for each.
    """

    packed_positions: Any  # (P,) of each packed token in its packed sequence
    cu_seqlens: Any  # (N + 2,) where packed sequences begin and end; the last sequence is padding
    old_index: Any  # which packed tokens are old
    new_index: Any  # (T,) which are new
    old_slots: Any  # slot of each old key
    stored: Any  # which of the T new tokens the ring holds at the end
    stored_slots: Any  # slot of each of those
    first_slots: Any  # (N,) slot of the first new token of each sequence
    next_slots: Any  # (N,) slot of the token after the last new one

    def attend(self, attention: Callable, q: Tensor, k: Tensor, v: Tensor, keys, values, long: int):
        """Attention of the new tokens: q, k, v (T, H, K), rings (B * S, H, K) -> (T, H, K)."""
        if not len(self.old_slots):
            return attention(q, k, v, long)
        old_keys = keys[self.old_slots]
        packed_k = self.pack(old_keys, k)
        packed_q = self.pack(old_keys, q)  # in place of queries whose results nobody reads
        packed_v = self.pack(values[self.old_slots], v)
        return attention(packed_q, packed_k, packed_v, long)[self.new_index]

    def pack(self, old: Tensor, new: Tensor) -> Tensor:
        packed = new.new_empty(len(self.packed_positions), *new.shape[1:])
        packed[self.old_index] = old
        packed[self.new_index] = new
        return packed


class PrefillInputs(NamedTuple):
    """What run_prefill reads: integer arrays, later tensors on the device."""

    tokens: Any  # (T,) new ids of all sequences, and padding
    previous: Any  # (T,) the id before each
    before: Any  # (T,) and the one before that
    positions: Any  # (T,)
    first_new: Any  # (N,) index of each sequence's first new id among the T
    last_new: Any  # (N,)
    plans: tuple[RingPlan, RingPlan]  # of layers with a short and with a long window

    def arrays(self) -> list:
        return [*self[:-1], *self.plans[0], *self.plans[1]]

    def flat(self) -> Tensor:
        """All arrays behind each other, so that one copy brings them to the device."""
        return torch.from_numpy(np.concatenate(self.arrays()))

    def views(self, flat: Tensor) -> PrefillInputs:
        """These inputs as views of a tensor that holds what flat() gave."""
        views = iter(flat.split([len(array) for array in self.arrays()]))
        own = [next(views) for _ in self[:-1]]
        short, long = (RingPlan(*(next(views) for _ in plan)) for plan in self.plans)
        return PrefillInputs(*own, (short, long))


class PrefillBucket(NamedTuple):
    """Sizes that a prefill is padded to, so that one CUDA graph serves all that fit."""

    sequences: int  # without the padding
    new: int  # tokens
    old: int  # keys read from a ring


# Above the largest of these the device is busy for longer than the host needs to launch a prefill.
NEW_BUCKETS = (128, 256, 512, 1024, 2048, 4096)
OLD_BUCKETS = (0, 1024, 4096)


def choose_bucket(num_cached: list, sequences: list, max_sequences: int, window: int):
    """The smallest PrefillBucket for sequences with num_cached tokens in the cache; None if they are too long."""
    new = sum(map(len, sequences)) - sum(num_cached)
    old = sum(min(count, window) for count in num_cached)
    new_sizes = [size for size in NEW_BUCKETS if size >= new]
    old_sizes = [size for size in OLD_BUCKETS if size >= old]
    return PrefillBucket(max_sequences, new_sizes[0], old_sizes[0]) if new_sizes and old_sizes else None


def repeat_first(array: np.ndarray, length: int) -> np.ndarray:
    """An array of indices, filled up to a length with its first entry: to read or write one thing again is harmless."""
    return np.concatenate((array, np.full(length - len(array), array[0])))


def make_ring_plan(rows, num_cached, lengths, window: int, ring_size: int, bucket=None) -> RingPlan:
    """The plan for rings of one window, in arrays, as long as a bucket says if there is one.

    Args:  rows, num_cached, lengths (N + 1,) int64 arrays: row of each sequence, how many of its tokens the row holds,
           and how many it has. The last sequence is padding, which is never stored.
    """
    num_old = np.minimum(num_cached, window)  # older keys are out of sight
    if bucket:
        num_old[-1] = bucket.old - num_old[:-1].sum()  # padding, which reads whatever lies in its row
    packed_lengths = num_old + lengths - num_cached
    cu_seqlens = np.cumsum([0, *packed_lengths])

    # Of every packed token: which sequence it is in, where there, whether its key is old, and its slot.
    sequence = np.repeat(np.arange(len(rows)), packed_lengths)
    packed_positions = np.arange(len(sequence)) - cu_seqlens[sequence]
    positions = packed_positions + (num_cached - num_old)[sequence]
    is_old = packed_positions < num_old[sequence]
    slots = rows[sequence] * ring_size + positions % ring_size

    # The ring keeps the last S - 1 tokens; one slot stays free for the token that comes next.
    new_sequence = sequence[~is_old]
    stays = positions[~is_old] > lengths[new_sequence] - ring_size
    is_padding = new_sequence == len(rows) - 1
    stored = (stays & ~is_padding).nonzero()[0]
    first_slots = (rows * ring_size + num_cached % ring_size)[:-1]
    next_slots = (rows * ring_size + lengths % ring_size)[:-1]
    if bucket:
        stored = repeat_first(stored, bucket.new)
        first_slots = repeat_first(first_slots, bucket.sequences)
        next_slots = repeat_first(next_slots, bucket.sequences)
        cu_seqlens = np.pad(cu_seqlens, (0, bucket.sequences + 2 - len(cu_seqlens)), mode="edge")

    return RingPlan(
        packed_positions=packed_positions,
        cu_seqlens=cu_seqlens,
        old_index=is_old.nonzero()[0],
        new_index=(~is_old).nonzero()[0],
        old_slots=slots[is_old],
        stored=stored,
        stored_slots=slots[~is_old][stored],
        first_slots=first_slots,
        next_slots=next_slots,
    )


def prefill_inputs(model, cache, rows, num_cached, sequences, bucket=None) -> PrefillInputs:
    """The inputs of a prefill in arrays, as long as a bucket says if there is one; arguments as for prefill."""
    # The new ids of all sequences, and the two ids before each; 0 before a sequence, where no layer reads it.
    tokens = []
    previous = []
    before = []
    for start, sequence in zip(num_cached, sequences, strict=True):
        tokens += sequence[start:]
        previous += [0, *sequence[:-1]][start:]
        before += [0, 0, *sequence[:-2]][start : len(sequence)]

    # Padding is one more sequence; sdpa_attention works in blocks of equal size.
    padding = (bucket.new if bucket else -(-len(tokens) // 128) * 128) - len(tokens)
    rows_N1 = np.array([*rows, rows[0]])
    starts_N1 = np.array([*num_cached, 0])
    ends_N1 = np.array([*map(len, sequences), padding])
    positions = np.concatenate([np.arange(*span) for span in zip(starts_N1, ends_N1, strict=True)])
    plans = [
        make_ring_plan(rows_N1, starts_N1, ends_N1, window, ring_size, bucket)
        for window, ring_size in zip(model.windows, cache.ring_sizes, strict=True)
    ]

    cu_new = np.cumsum([0, *(ends_N1 - starts_N1)])  # where the new ids of each sequence begin and end
    num_sequences = bucket.sequences if bucket else len(rows)
    return PrefillInputs(
        tokens=np.pad(tokens, (0, padding)),
        previous=np.pad(previous, (0, padding)),
        before=np.pad(before, (0, padding)),
        positions=positions.clip(max=model.config.max_seq_len - 1),  # only padding can lie beyond
        first_new=repeat_first(cu_new[:-2], num_sequences),
        last_new=repeat_first(cu_new[1:-1] - 1, num_sequences),
        plans=tuple(plans),
    )


def run_prefill(model, cache, inputs: PrefillInputs, max_lengths: list[int], layer_weights=None):
    """The work of a prefill on the device. Returns hidden states (T, D).

    Args: max_lengths: upper bounds for the packed sequences of each plan
    """
    config = model.config
    half = config.head_dim // 2
    first_T11 = (inputs.positions == 0)[:, None, None]
    attentions = [
        model.attention(model, plan.packed_positions, plan.cu_seqlens.int(), max_length)
        for plan, max_length in zip(inputs.plans, max_lengths, strict=True)
    ]

    def attend(layer, q, k, v):  # (T, H, K) -> (T, H, K)
        index = config.attention_layers.index(layer)
        long = int(layer in config.long_layers)
        plan = inputs.plans[long]
        keys = cache.keys[index].flatten(0, 1)
        values = cache.values[index].flatten(0, 1)

        offset = layer in config.key_offset_layers
        if offset:
            last_keys = k[inputs.last_new]
            before = torch.cat((k[:1], k[:-1]))
            # What the token before a sequence's first new one wrote ahead, into the slot of that one.
            before[inputs.first_new] = keys[plan.first_slots]
            k = model.offset_keys(k, before, first_T11)

        y = plan.attend(attentions[long], q, k, v, keys, values, long)
        keys[plan.stored_slots] = k[plan.stored]
        values[plan.stored_slots] = v[plan.stored]
        if offset:
            keys[plan.next_slots, :, half:] = last_keys[:, :, half:]
        return y

    previous_2T = torch.stack((inputs.previous, inputs.before))
    return model.trunk(inputs.tokens, previous_2T, inputs.positions, attend, layer_weights)


def prefill(model, cache: KVCache, rows, num_cached, sequences, layer_weights=None, run=run_prefill) -> Tensor:
    """Extends rows of the cache to the given sequences, all in one packed pass through the model.

    Args:    rows[i] the row of sequences[i], a list of ids; num_cached[i] how many of them the row already holds,
             fewer than all; layer_weights what model.layer_weights() gave, to save its time; run may be compiled
    Returns: hidden states of the new ids, behind each other, and of some padding (T, D)
    """
    inputs = prefill_inputs(model, cache, rows, num_cached, sequences)
    max_lengths = [int(np.diff(plan.cu_seqlens).max()) for plan in inputs.plans]
    on_device = inputs.views(to_device(inputs.flat(), model.embed.device))
    return run(model, cache, on_device, max_lengths, layer_weights)


def prefill_batches(sequences: dict, num_cached: dict, most: int) -> Iterator[list[int]]:
    """Rows that have something to compute, in groups of at most so many tokens."""
    waiting = [row for row, sequence in sequences.items() if len(sequence) > num_cached[row]]
    while waiting:
        totals = np.cumsum([len(sequences[row]) for row in waiting])
        count = max(1, int((totals <= most).sum()))
        yield waiting[:count]
        waiting = waiting[count:]


# ==== Decode


def decode(model, cache: KVCache, tokens_B, previous_2B, positions_B, layer_weights=None) -> Tensor:
    """Appends one token to each row of the cache.

    Args:    tokens_B int (B,), the ids; previous_2B the id before each, and the one before that; positions_B int (B,),
             -1 for idle rows, of which nothing changes; layer_weights as for prefill
    Returns: logits fp32 (B, V and the padding of the vocabulary), which mean nothing for idle rows
    """

    def attend(layer, q, k, v):  # (B, H, K) -> (B, H, K)
        index = model.config.attention_layers.index(layer)
        offset = layer in model.config.key_offset_layers
        rings = (cache.keys[index], cache.values[index])
        return decode_attention(q, k, v, *rings, positions_B, offset)

    hidden = model.trunk(tokens_B, previous_2B, positions_B.clamp(min=0), attend, layer_weights)
    return model.logits(hidden)


# ==== Requests


class TokenLogprob(NamedTuple):
    """Log-probability of a token, at temperature 1 and before any cut or penalty."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest ids with theirs, the likeliest first


@dataclass
class Completion:
    """One request to a Decoder: a prompt, its options, and the result. (A client's request may need several.)"""

    prompt: list[int]  # BOS included
    max_tokens: int = 128  # fewer if the context ends before
    temperature: float = 0.8  # 0: the most likely id
    top_k: int = 50  # 0: all
    top_p: float = 1.0
    stop: tuple = ()  # ids that end it; BOS always does
    seed: int = 0
    tools: bool = False  # run the calculator, if the tokenizer has chat_format.CALL_TOKENS
    min_p: float = 0.0  # leave out ids with less than this share of the likeliest one's probability
    presence_penalty: float = 0.0  # off the logit of an id that is in the answer
    frequency_penalty: float = 0.0  # the same, for each time that it is there
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the logits of ids
    logprobs: int | None = None  # keep the logprob of each new id, and of so many likeliest ones
    score_prompt: bool = False  # with logprobs: also those of the prompt's ids
    mask: Any = None  # a json_answers.Mask: which ids may come next

    # The result.
    tokens: list[int] = field(default_factory=list)  # new ids, without the stop token
    forced: list[bool] = field(default_factory=list)  # whether each came from a tool
    token_logprobs: list[TokenLogprob] = field(default_factory=list)  # of each, with logprobs
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    reason: str = ""  # why it ended: "stop" or "length"
    stop_token: int = -1  # that ended it

    # A tool call under way: ids of its expression so far, and ids of its result yet to be added.
    call: list[int] | None = None
    tool_result: list[int] = field(default_factory=list)

    def fit(self, max_len: int) -> None:
        """Lowers max_tokens to what a row for sequences of max_len tokens has room for. Raises: RunError if for none"""
        room = max_len + 1 - len(self.prompt)  # the last new token needs no slot in the cache
        if room < 1:
            raise RunError(f"a prompt of {len(self.prompt)} tokens exceeds the context of {max_len}; shorten it")
        self.max_tokens = min(self.max_tokens, room)

    def has_processors(self) -> bool:
        """Whether its logits are changed before they are sampled from."""
        return bool(self.min_p or self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def num_sorted(self, vocab_size: int) -> int:
        """How many logits sample must sort for it, or GREEDY if it needs no sample."""
        if self.temperature <= 0:
            return 0 if self.has_processors() else GREEDY
        if self.top_k:
            return min(self.top_k, vocab_size)
        return vocab_size if self.top_p < 1 else 0

    def all_tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.prompt, *self.tokens] if self.tokens else self.prompt

    def last_token(self) -> int:
        """The id that goes in next."""
        return (self.tokens or self.prompt)[-1]

    def accept(self, sampled: int, tokenizer, tool_ids: list[int]) -> int | None:
        """Adds the sampled id, or that of a tool's result if one is due; None if a stop token came.

        Raises: RunError if the id was sampled from logits that are not finite
        """
        by_tool = bool(self.tool_result)
        if by_tool:
            token = self.tool_result.pop(0)
        elif sampled == NOT_FINITE:
            raise RunError("the model computes logits that are not finite; name an earlier checkpoint with --step")
        elif sampled == tokenizer.bos_id or sampled in self.stop:
            # A grammar beyond its limits allows only the end, in the middle of an answer.
            self.reason = "length" if self.mask and self.mask.is_error() else "stop"
            self.stop_token = sampled
            return None
        else:
            token = sampled
            if self.tools and tool_ids:
                self.follow_call(token, tokenizer, tool_ids)
        self.tokens.append(token)
        self.forced.append(by_tool)
        if len(self.tokens) == self.max_tokens:
            self.reason = "length"
        return token

    def follow_call(self, token: int, tokenizer, tool_ids: list[int]) -> None:
        """Collects the ids of a tool call; at its end the calculator gives tool_result."""
        call_start, call_end, result_start, result_end = tool_ids
        if token == call_start:
            self.call = []
        elif token == call_end and self.call is not None:
            result = calculate(tokenizer.decode(self.call))
            self.call = None
            if result is not None:
                self.tool_result = [result_start, *tokenizer.encode(result), result_end]
        elif self.call is not None:
            self.call.append(token)


# ==== The loop


class Generator:
    """Continues prompts of different lengths, up to num_rows at a time.

    Options are fields of Completion. RunError says that a prompt does not fit.
    """

    def __init__(self, model, tokenizer, num_rows: int = 128):
        self.model = model
        self.tokenizer = tokenizer
        self.num_rows = num_rows
        self.decoder: Decoder | None = None  # of the last call, kept for its graphs

    def run(self, completions: list[Completion]) -> Iterator[list[StepOutput]]:
        """Decodes completions, which take idle rows in turn. Yields the outputs of each step."""
        if not completions:
            return
        decoder = self.take_decoder(completions)
        waiting = completions[::-1]  # the first at the end
        try:
            while waiting or decoder.running:
                # A prefill holds the other rows up, so several requests join together.
                idle = [row for row in range(decoder.num_rows) if row not in decoder.running]
                if waiting and len(idle) >= min(len(waiting), max(1, decoder.num_rows // 8)):
                    decoder.add_requests({row: waiting.pop() for row in idle[: len(waiting)]})
                yield decoder.step()
        finally:
            for row in range(decoder.num_rows):
                decoder.free(row)
            self.decoder = decoder

    def take_decoder(self, completions: list[Completion]) -> Decoder:
        """The decoder of the last call if it fits these completions, else a new one."""
        num_rows = min(len(completions), self.num_rows)
        length = self.model.config.max_seq_len
        if self.model.embed.is_cuda:  # sizes that fit the next call too; empty slots cost no time
            num_rows = 1 << (num_rows - 1).bit_length()
        else:
            length = min(length, max(len(c.prompt) + c.max_tokens for c in completions) - 1)

        # Taken out of self, so that a call within this one gets another decoder.
        decoder = self.decoder
        self.decoder = None
        if decoder and decoder.num_rows == num_rows and decoder.max_len >= length:
            decoder.reload_weights()
            return decoder
        del decoder  # frees its memory before the next one is made
        return Decoder(self.model, self.tokenizer, num_rows, length)

    def complete(self, prompts, seed: int = 0, **options) -> list[Completion]:
        """Continues lists of ids to their end; equal prompts get different noise."""
        completions = []
        for i, prompt in enumerate(prompts):
            completions.append(Completion(list(prompt), seed=seed + i * SEED_STRIDE, **options))
        for _ in self.run(completions):
            pass
        return completions

    def generate(self, prompts, **options) -> list[list[int]]:
        """The new ids of each prompt, without the stop token."""
        return [completion.tokens for completion in self.complete(prompts, **options)]

    def stream_text(self, prompt: str, **options) -> Iterator[str]:
        """Yields the text of each token as it comes, and a rest at the end; either may be empty.

        A character whose bytes are spread over several tokens comes whole, with the last of them.
        """
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        detokenizer = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for (output,) in self.run([Completion(ids, **options)]):
            if output.token is not None:
                yield detokenizer.decode(self.tokenizer.bytes[output.token])
        yield detokenizer.decode(b"", final=True)


class StepOutput(NamedTuple):
    """What a step gave a row."""

    row: int
    token: int | None  # the new id; None if a stop token came
    reason: str  # as in Completion


class PendingStep(NamedTuple):
    """A step that was launched and whose tokens the host has not read yet."""

    completions: dict[int, Completion]  # by row; those that are stopped meanwhile are taken out
    sampled: Tensor  # (B,) ids, on the host; on CUDA complete after `done`
    done: torch.cuda.Event | None
    logprobs: list[TokenLogprob]  # by row; empty if no completion wants them


class Decoder:
    """Rows of a KV cache that decode together; requests join and leave at any step (continuous batching).

    On CUDA a step is two graphs. `compile` also fuses their work and that of prefills, which costs half a minute or
    more. A Decoder is for one thread.

    With `overlap`, as on CUDA, the next step is launched before the tokens of the last are read, so that the
    device does not wait for the host. A row that meets a stop token then computes one token too many. That writes only
    into slots of its rings that the next token overwrites.

    Args:  max_len: tokens of the longest sequence, by default the model's context; prefix_rows: rows of the cache
           beside num_rows, for prefixes that several prompts share
    """

    def __init__(self, model, tokenizer, num_rows: int, max_len: int = 0, compile: bool = False,
                 prefix_rows: int = 0):  # fmt: skip
        device = model.embed.device
        cuda = device.type == "cuda"
        context = model.config.max_seq_len
        self.model = model
        self.tokenizer = tokenizer
        self.num_rows = num_rows
        self.max_len = min(max_len or context, context)
        tool_ids = [tokenizer.specials.get(name) for name in CALL_TOKENS]
        self.tool_ids = [] if None in tool_ids else tool_ids
        self.overlap = cuda
        with torch.no_grad():
            self.layer_weights = model.layer_weights()

        self.cache = KVCache.empty(model, num_rows + prefix_rows, self.max_len)
        self.decode_cache = self.cache.first_rows(num_rows)
        self.prefix_cache = PrefixCache(num_rows, prefix_rows)
        self.state = RowState(num_rows, tokenizer.vocab_size, device)
        self.running: dict[int, Completion] = {}  # by row; the other rows are idle
        self.kind = step_kind([], tokenizer.vocab_size)  # of steps of the running rows
        self.pending: PendingStep | None = None

        self.run_prefill = torch.compile(run_prefill, dynamic=True) if compile else run_prefill
        self.decode = torch.compile(decode) if compile else decode
        self.sample = torch.compile(sample) if compile else sample
        self.step_graphs = Graphs() if cuda else None  # "logits", and of sample_step by StepKind
        self.prefill_graphs = Graphs() if cuda else None  # by PrefillBucket
        # What each prefill graph reads: one flat tensor, and the same as PrefillInputs.
        self.graph_inputs: dict[PrefillBucket, tuple[Tensor, PrefillInputs]] = {}

    @torch.no_grad()
    def reload_weights(self) -> None:
        """Reads the model's weights again; what they have computed is dropped from the prefix cache."""
        self.prefix_cache.tokens = [[] for _ in self.prefix_cache.tokens]
        self.pending = None
        for layers in zip(self.layer_weights, self.model.layer_weights(), strict=True):
            for old, new in zip(*layers, strict=True):  # in place, as graphs hold their addresses
                if old is not None:
                    old.copy_(new)

    # -- requests join

    @torch.no_grad()
    def add_requests(self, completions: dict[int, Completion]) -> dict[int, int]:
        """Prefills completions, which then run in these rows.

        The last id of a prompt goes in with the next step, which gives the first new one.

        Returns: {row: how many ids of its sequence were in the cache, left there by earlier requests}
        Raises:  RunError if a prompt does not fit its row
        """
        for row, completion in completions.items():
            assert row not in self.running, f"row {row} is taken"
            completion.fit(self.max_len)
        sequences = {row: c.all_tokens() for row, c in completions.items()}
        scored = {row: c for row, c in completions.items() if c.score_prompt}

        # What the cache holds of each; to score a prompt, all of it is computed.
        reusing = {row: ids for row, ids in sequences.items() if row not in scored}
        num_cached = dict.fromkeys(sequences, 0)
        num_cached |= {row: self.prefix_cache.match(row, ids) for row, ids in reusing.items()}
        copies, new_prefixes = self.prefix_cache.choose_shared(reusing, num_cached)
        num_cached |= {row: len(self.prefix_cache.tokens[source]) for row, source in copies.items()}

        self.fill(new_prefixes, dict.fromkeys(new_prefixes, 0), {})
        self.cache.copy(copies)
        self.fill({row: ids[:-1] for row, ids in sequences.items()}, num_cached, scored)

        self.state.set_rows(completions)
        self.running |= completions
        self.kind = step_kind(self.running.values(), self.tokenizer.vocab_size)
        # A prefix that was computed just now was not in the cache.
        computed_now = [row for row, source in copies.items() if source in new_prefixes]
        return num_cached | dict.fromkeys(computed_now, 0)

    def fill(self, sequences: dict, num_cached: dict, scored: dict[int, Completion]) -> None:
        """Computes what rows of the cache lack of their sequences, and scores the prompts of some."""
        self.cache.clear([row for row in sequences if num_cached[row] == 0])
        for row in sequences:
            self.prefix_cache.tokens[row] = []  # should the prefill fail
        # Between batches a GPU waits for the host, so they are larger there.
        most = PREFILL_TOKENS * (4 if self.model.embed.is_cuda else 1)
        for rows in prefill_batches(sequences, num_cached, most):
            counts = [num_cached[row] for row in rows]
            hidden_TD = self.prefill_batch(rows, counts, [sequences[row] for row in rows])
            start = 0  # of a sequence's new ids
            for row in rows:
                end = start + len(sequences[row]) - num_cached[row]
                if row in scored:
                    self.score_prompt(scored[row], hidden_TD[start:end])
                start = end
        for row, sequence in sequences.items():
            self.prefix_cache.tokens[row] = sequence

    def prefill_batch(self, rows: list, num_cached: list, sequences: list) -> Tensor:
        """As the function prefill, by a CUDA graph if one fits; the next may overwrite what it returns."""
        bucket = choose_bucket(num_cached, sequences, self.num_rows, max(self.model.windows))
        if self.prefill_graphs is None or bucket is None:
            weights = self.layer_weights
            return prefill(self.model, self.cache, rows, num_cached, sequences, weights, self.run_prefill)
        inputs = prefill_inputs(self.model, self.cache, rows, num_cached, sequences, bucket)
        if bucket not in self.graph_inputs:
            flat = torch.empty_like(inputs.flat(), device=self.model.embed.device)
            self.graph_inputs[bucket] = (flat, inputs.views(flat))
        flat, on_device = self.graph_inputs[bucket]
        flat.copy_(inputs.flat(), non_blocking=True)
        max_lengths = [bucket.new + bucket.old] * 2
        work = (self.model, self.cache, on_device, max_lengths, self.layer_weights)
        return self.prefill_graphs.run(bucket, self.run_prefill, *work)

    def score_prompt(self, completion: Completion, hidden_TD: Tensor) -> None:
        """Sets the logprob of each id of a prompt, given the hidden state before it."""
        vocab_size = self.tokenizer.vocab_size
        targets = completion.prompt[1:]
        completion.prompt_logprobs = [None]  # also of one that was stopped, and whose prompt is computed again
        for start in range(0, len(targets), 256):  # logits of all at once might not fit into memory
            tokens = to_device(targets[start : start + 256], hidden_TD.device)
            logits = self.model.logits(hidden_TD[start : start + len(tokens)])[:, :vocab_size]
            completion.prompt_logprobs += compute_logprobs(logits, tokens, completion.logprobs or 0)

    # -- one step

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """Computes one token for each running row; a row that ends is idle afterwards.

        Requests that joined while a step was pending get their first token with the next one.

        Raises: RunError if the model's logits are not finite
        """
        pending = self.pending
        self.pending = None
        if not self.running:
            return []
        if pending is None or not pending.completions:
            pending = self.launch(self.running, self.compute_logits())

        # A tool's ids take the place of the sampled ones before they go in. They are known by now: the host has read
        # the id that ended the call.
        for row, completion in pending.completions.items():
            if completion.tool_result:
                self.state.tokens[row] = completion.tool_result[0]

        # The device gets the work of the next step before the host reads the ids of this one.
        following = self.completions_after(pending) if self.overlap else {}
        logits = self.compute_logits() if following else None
        if following and not self.kind.masks:
            self.pending = self.launch(following, logits)
            return self.finish(pending)

        # A mask says which ids may follow those of this step, so with masks sampling waits until they are read.
        outputs = self.finish(pending)
        following = {row: c for row, c in following.items() if not c.reason}
        if following:
            self.pending = self.launch(following, logits)
        return outputs

    def completions_after(self, pending: PendingStep) -> dict[int, Completion]:
        """The completions of the next step: all but those whose last token is pending, whose rows become idle."""
        completions = dict(self.running)
        for row, completion in pending.completions.items():
            if len(completion.tokens) + 1 >= completion.max_tokens:
                self.state.positions[row] = -1
                del completions[row]
        return completions

    def run_graph(self, key, work: Callable, *arguments):
        """As Graphs.run, where there are graphs."""
        return self.step_graphs.run(key, work, *arguments) if self.step_graphs else work(*arguments)

    def compute_logits(self) -> Tensor:
        """The logits (B, V) of the ids that go in, before masks and processors. The next call may overwrite them."""
        state = self.state
        inputs = (self.decode_cache, state.tokens, state.previous, state.positions, self.layer_weights)
        logits = self.run_graph("logits", self.decode, self.model, *inputs)
        return logits[:, : self.tokenizer.vocab_size]  # without the padding of the vocabulary

    def launch(self, completions: dict[int, Completion], logits: Tensor) -> PendingStep:
        """Samples an id for each row from logits (B, V). They go in with the next step, except where a tool speaks."""
        self.state.set_masks(completions)
        self.run_graph(self.kind, self.sample_step, self.kind, logits)
        wanted = [c.logprobs for c in completions.values() if c.logprobs is not None]
        logprobs = compute_logprobs(logits, self.state.tokens, max(wanted)) if wanted else []  # of the ids just sampled

        # Copied without waiting for the device; done is when the copy is complete.
        cuda = self.state.sampled.is_cuda
        sampled = self.state.sampled.to("cpu", non_blocking=cuda, copy=True)
        done = torch.cuda.current_stream().record_event() if cuda else None
        return PendingStep(dict(completions), sampled, done, logprobs)

    def sample_step(self, kind: StepKind, logits: Tensor) -> None:
        """The part of a step after its logits (B, V), which writes the ids that go in next into RowState."""
        state = self.state
        scores = logits.masked_fill(state.forbidden, -math.inf) if kind.masks else logits
        if kind.processors:
            scores = state.process_logits(scores)
        if kind.num_sorted == GREEDY:
            sampled = scores.argmax(-1)
        else:
            cuts = (state.temperature, state.top_k, state.top_p)
            noise = (state.seeds, state.positions)
            min_p = state.min_p if kind.processors else None
            sampled = self.sample(scores, *cuts, *noise, kind.num_sorted, min_p)

        # The largest of numbers with NaN among them is NaN, so NaN is what was sampled.
        broken = logits.gather(1, sampled[:, None])[:, 0].isnan()
        state.sampled.copy_(sampled).masked_fill_(broken, NOT_FINITE)
        state.previous[1].copy_(state.previous[0])
        state.previous[0].copy_(state.tokens)
        state.tokens.copy_(sampled)
        state.positions.add_(state.positions >= 0)

    def finish(self, pending: PendingStep) -> list[StepOutput]:
        """Reads the ids of a step and gives them to its completions."""
        if pending.done:
            pending.done.synchronize()
        sampled = pending.sampled.tolist()
        outputs = []
        for row, completion in pending.completions.items():
            self.prefix_cache.tokens[row].append(completion.last_token())  # which this step computed
            token = completion.accept(sampled[row], self.tokenizer, self.tool_ids)
            if token is not None and completion.logprobs is not None:
                by_tool = completion.forced[-1]
                logprob = TokenLogprob(0.0, []) if by_tool else pending.logprobs[row]
                completion.token_logprobs.append(logprob)
            outputs.append(StepOutput(row, token, completion.reason))
        if ended := [output.row for output in outputs if output.reason]:
            self.stop(ended)
        return outputs

    # -- requests leave

    def stop(self, rows: list[int]) -> None:
        """Makes rows idle, whether their completions have ended or not. The prefix cache keeps what they hold."""
        for row in rows:
            self.state.positions[row] = -1
            del self.running[row]
            if self.pending:
                self.pending.completions.pop(row, None)
        self.kind = step_kind(self.running.values(), self.tokenizer.vocab_size)

    def free(self, row: int) -> None:
        """Stops a row's completion, if it has one, and drops its ids from the prefix cache."""
        if row in self.running:
            self.stop([row])
        self.prefix_cache.tokens[row] = []


# ==== Sampling

SORT_SIZES = (GREEDY, 0, 64, 1024)  # and the whole vocabulary; on CUDA each is a graph of its own


class StepKind(NamedTuple):
    """What the steps of some rows must compute."""

    num_sorted: int  # of SORT_SIZES, or the whole vocabulary
    processors: bool  # logits processors, for any row
    masks: bool  # for any row


def step_kind(completions, vocab_size: int) -> StepKind:
    needed = max((c.num_sorted(vocab_size) for c in completions), default=GREEDY)
    enough = [size for size in SORT_SIZES if size >= needed]
    processors = any(c.has_processors() for c in completions)
    return StepKind(min([*enough, vocab_size]), processors, any(c.mask for c in completions))


class RowState:
    """What a step reads of each row: tensors that are only written in place, as graphs hold their addresses."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        # The id that goes in next, the two before it, the position of the first (-1: the row is idle), and options.
        padded = -(-num_rows // 4) * 4  # so that each begins at a multiple of 16 bytes, else compiled code copies it
        self.integers = torch.zeros(6, padded, dtype=torch.long, device=device)[:, :num_rows]
        self.numbers = torch.zeros(5, padded, device=device)[:, :num_rows]
        self.tokens, _, _, self.positions, self.top_k, self.seeds = self.integers
        self.previous = self.integers[1:3]
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency = self.numbers
        self.positions.fill_(-1)
        self.sampled = torch.zeros_like(self.tokens)  # the id that the last step sampled, or NOT_FINITE
        # (B, V): how often each id is in the answer of a row, and what is added to its logit.
        self.counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(num_rows, vocab_size, device=device)
        self.forbidden = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)  # by a mask

    def set_rows(self, completions: dict[int, Completion]) -> None:
        """Sets rows so that the last id of each sequence goes in with the next step."""
        integers = []
        numbers = []
        for c in completions.values():
            ids = c.all_tokens()
            before, previous, last = [0, 0, *ids][-3:]
            integers.append((last, previous, before, len(ids) - 1, c.top_k, c.seed % 2**32))
            # 0 keeps the most likely token; at 1 the rounding of a sum could cut something.
            top_p = max(c.top_p, 1e-6) if c.top_p < 1 else 2
            penalties = (c.presence_penalty, c.frequency_penalty)
            numbers.append((max(c.temperature, 0), top_p, c.min_p, *penalties))

        device = self.tokens.device
        rows = to_device(list(completions), device)
        self.integers[:, rows] = to_device(np.array(integers, dtype=np.int64).T, device)
        self.numbers[:, rows] = to_device(np.array(numbers, dtype=np.float32).T, device)
        self.bias[rows] = 0
        self.forbidden[rows] = False
        for row, completion in completions.items():
            if completion.has_processors():
                for token, bias in completion.logit_bias.items():
                    self.bias[row, token] = bias
                answer = torch.tensor(completion.tokens, dtype=torch.long)
                counts = answer.bincount(minlength=self.counts.size(1))
                counts[completion.last_token()] -= 1  # the next step counts this one
                self.counts[row] = to_device(counts, device)

    def set_masks(self, completions: dict[int, Completion]) -> None:
        """Sets which ids may not come next, in the rows that have a mask."""
        masks = {row: c.mask(c.tokens) for row, c in completions.items() if c.mask}
        if masks:
            allowed = torch.stack([torch.frombuffer(mask, dtype=torch.uint8) for mask in masks.values()])
            device = self.forbidden.device
            self.forbidden[to_device(list(masks), device)] = to_device(allowed == 0, device)

    def process_logits(self, logits_BV: Tensor) -> Tensor:
        """Counts the ids that go in. Returns the logits less the penalties, plus the bias."""
        running = (self.positions >= 0).to(self.counts.dtype)
        self.counts.scatter_add_(1, self.tokens[:, None], running[:, None])
        counts = self.counts.to(logits_BV.dtype)
        often = self.frequency[:, None] * counts
        present = self.presence[:, None] * (counts > 0)
        return logits_BV - often - present + self.bias


def sample(
    logits_BV, temperature_B, top_k_B, top_p_B, seeds_B, counters_B, num_sorted: int, min_p_B=None
) -> Tensor:
    """One id for each row: argmax at temperature 0, else sampled from the likeliest.

    Of the top_k likeliest ids the fewest whose mass reaches top_p can come; ids as likely as the last of them count
    too. The argmax of logits plus Gumbel noise is a sample of their softmax.

    Args:    top_k_B 0: all ids; top_p_B 1 or more: all ids; seeds_B, counters_B integers, on which the noise depends,
             and on nothing else, so a row samples the same in any batch; num_sorted logits to sort: at least top_k of
             every row that cuts, V if one cuts by top_p alone, 0 if none does; min_p_B: drops ids below this share of
             the largest probability
    Returns: ids (B,)
    """
    z = logits_BV / temperature_B.clamp(min=1e-6)[:, None]
    if num_sorted:
        cuts = (top_k_B > 0) | (top_p_B < 1)
        unlikely = z < smallest_kept(z, top_k_B, top_p_B, num_sorted)[:, None]
        z = z.masked_fill(unlikely & cuts[:, None], -math.inf)
    if min_p_B is not None:
        least = z.amax(-1) + min_p_B.log()  # min_p of 0 gives minus infinity, which cuts nothing
        z = z.masked_fill(z < least[:, None], -math.inf)
    z = z + gumbel_noise(seeds_B, counters_B, z.size(-1))
    greedy = (temperature_B == 0)[:, None]
    return torch.where(greedy, logits_BV, z).argmax(-1)


def smallest_kept(z_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, num_sorted: int) -> Tensor:
    """The smallest logit of each row that top_k and top_p keep, (B,)."""
    top = z_BV.topk(num_sorted).values
    rank = torch.arange(num_sorted, device=top.device)
    kept = (rank < top_k_B[:, None]) | (top_k_B == 0)[:, None]
    mass = top.masked_fill(~kept, -math.inf).softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    kept &= mass_before < top_p_B[:, None]  # the id that crosses top_p stays
    return top.masked_fill(~kept, math.inf).amin(-1)


def gumbel_noise(seeds_B: Tensor, counters_B: Tensor, vocab_size: int) -> Tensor:
    """Noise (B, V) fp32: a hash of seed, counter and id, which needs no state."""
    ids_V = hash32(torch.arange(vocab_size, device=seeds_B.device))
    hash_B = hash32((hash32(seeds_B) + counters_B) & 0xFFFFFFFF)
    bits = hash32((hash_B[:, None] + ids_V) & 0xFFFFFFFF) >> 9
    uniform = (bits.float() + 0.5) * 2**-23
    return -torch.log(-torch.log(uniform))


def hash32(x: Tensor) -> Tensor:
    """A hash of 32 bits, with constants from github.com/skeeto/hash-prospector; in int64, where nothing overflows."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def compute_logprobs(logits_BV: Tensor, tokens_B: Tensor, num_top: int) -> list[TokenLogprob]:
    """The logprob of one id in each row, and of the num_top likeliest ids, at least one."""
    logprobs = logits_BV.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens_B[:, None].long())[:, 0].tolist()
    top = logprobs.topk(max(num_top, 1))
    rows = zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprob(logprob, list(zip(ids, values, strict=True))) for logprob, ids, values in rows]


# ==== Prefix cache

MIN_SHARED_PREFIX = 64  # ids that two sequences must have in common before a shared row holds them


class PrefixCache:
    """Which ids have their keys and values in each row of the KV cache.

    An idle row keeps what its last sequence left, so that the next turn of a conversation computes only what is new.
    Behind the rows of requests come shared rows, for prefixes of several sequences, such as a system prompt; a sequence
    with such a prefix starts as a copy of the row. A row is used whole or not at all, since a ring only has the end.
    """

    def __init__(self, num_rows: int, num_shared: int):
        self.num_rows = num_rows
        self.tokens: list[list[int]] = [[] for _ in range(num_rows + num_shared)]
        self.shared = list(range(num_rows, num_rows + num_shared))  # least recently used first

    def match(self, row: int, sequence: list[int]) -> int:
        """How many ids a row holds, if the sequence begins with all of them and goes on; else 0."""
        cached = self.tokens[row]
        is_prefix = len(cached) < len(sequence) and cached == sequence[: len(cached)]
        return len(cached) if is_prefix else 0

    def choose_shared(self, sequences: dict, num_cached: dict) -> tuple[dict[int, int], dict[int, list]]:
        """Chooses shared rows for new sequences.

        A prefix gets a shared row, the least recently used one, when a second sequence has it.

        Args:    sequences by row; num_cached what these rows hold of them
        Returns: {row: the shared row that it should copy}, {shared row: new prefix that must be computed first}
        """
        copies = {}
        new_prefixes = {}
        earlier = self.tokens[: self.num_rows]  # sequences
        for row, sequence in sequences.items() if self.shared else ():
            source = max(self.shared, key=lambda shared: self.match(shared, sequence))
            num_shared = self.match(source, sequence)

            # If an earlier sequence has many more ids in common, these become a shared prefix of their own.
            common = max(len(commonprefix([sequence[:-1], other])) for other in earlier)
            earlier.append(sequence)
            oldest = self.shared[0]
            is_longer = common >= max(num_cached[row], num_shared) + MIN_SHARED_PREFIX
            if is_longer and oldest not in copies.values():  # a row that is about to be copied stays
                source = oldest
                num_shared = common
                new_prefixes[source] = self.tokens[source] = sequence[:common]

            if num_shared > num_cached[row]:
                copies[row] = source
                self.shared.remove(source)
                self.shared.append(source)  # the most recently used
        return copies, new_prefixes


# ==== CUDA graphs


class Graphs:
    """Work between tensors that stay where they are, as CUDA graphs; each is recorded once."""

    def __init__(self):
        self.recorded: dict[Any, tuple] = {}  # by key: the graph, and what the work returned

    def run(self, key, work: Callable, *arguments):
        """What work(*arguments) does and returns, a tensor or None. All runs of a key return the same tensor."""
        if key in self.recorded:
            graph, result = self.recorded[key]
            graph.replay()
            return result

        # The first time it runs as it is, to compile what it needs, since recording computes nothing.
        first = work(*arguments)
        # All graphs share one pool of memory, because one runs at a time.
        pool = next((graph.pool() for graph, _ in self.recorded.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work(*arguments)
        self.recorded[key] = (graph, result)
        return result if first is None else result.copy_(first)


# ==== Attention kernel
# One decoding step: each row writes a key and a value into its ring, as KVCache says, and one query looks at that ring.
# Rows at position -1 are idle: nothing of them is written.


def use_triton(x: Tensor) -> bool:
    """Kernels run on CUDA tensors (.., K) of 16 bits, from Ampere on, K a power of two; else the plain path does."""
    can_run = triton is not None and x.is_cuda and x.itemsize <= 2 and x.size(-1).bit_count() == 1
    return can_run and torch.cuda.get_device_capability(x.device) >= (8, 0)


def decode_attention_ref(q, k, v, keys, values, positions, offset: bool) -> Tensor:
    """Writes a key and a value into each ring, and returns what the query finds there.

    Args:    q, k, v (B, H, K), q carries the scale; keys, values (B, S, H, K), written in place;
             positions int (B,), -1 for idle rows; offset: of a layer with key offset
    Returns: (B, H, K)
    """
    slots = keys.size(1)
    width = keys.size(3)
    row = torch.arange(len(q), device=q.device)
    running = (positions >= 0)[:, None, None]
    position = positions.clamp(min=0).long()
    slot = position % slots

    if offset:
        second_half = torch.arange(width, device=q.device) >= width // 2
        from_before = second_half & (position > 0)[:, None, None]
        next_slot = (position + 1) % slots
        keys[row, next_slot] = torch.where(running & second_half, k, keys[row, next_slot])
        k = torch.where(from_before, keys[row, slot], k)
    keys[row, slot] = torch.where(running, k, keys[row, slot])
    values[row, slot] = torch.where(running, v, values[row, slot])

    # How far behind the newest key each slot is; the oldest one is the free slot.
    behind = (position[:, None] - torch.arange(slots, device=q.device)) % slots
    seen = (behind <= position[:, None]) & (behind < slots - 1)
    ring = (keys.transpose(1, 2), values.transpose(1, 2))
    y = F.scaled_dot_product_attention(q[:, :, None], *ring, seen[:, None, None], scale=1.0)
    return y[:, :, 0]


@jit
def decode_attention_kernel(
    q, k, v, o, keys, values, positions, S, H, stride_q, stride_k, stride_v,
    OFFSET: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One row and one head of WIDTH a program. The new key and value are not read back."""
    row = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, WIDTH)
    p = tl.load(positions + row).to(tl.int32)
    slot = tl.maximum(p, 0) % S
    stride = H * WIDTH  # from slot to slot
    running = d < tl.where(p >= 0, WIDTH, 0)
    keys += (row.to(tl.int64) * S * H + h) * WIDTH
    values += (row.to(tl.int64) * S * H + h) * WIDTH

    # The new key and value; exp2 below needs the query times log2(e).
    Q = tl.load(q + row * stride_q + h * WIDTH + d).to(tl.float32) * 1.4426950408889634
    K = tl.load(k + row * stride_k + h * WIDTH + d)
    V = tl.load(v + row * stride_v + h * WIDTH + d)
    if OFFSET:
        second_half = d >= WIDTH // 2
        tl.store(keys + (slot + 1) % S * stride + d, K, mask=running & second_half)
        from_before = second_half & (d < p * WIDTH)  # the first token has none before it
        K = tl.where(from_before, tl.load(keys + slot * stride + d, mask=from_before, other=0.0), K)
    tl.store(keys + slot * stride + d, K, mask=running)
    tl.store(values + slot * stride + d, V, mask=running)

    # Online softmax over the ring, starting with the new key.
    top = tl.sum(Q * K.to(tl.float32), 0)
    total = 1.0
    acc = V.to(tl.float32)
    for n0 in range(0, tl.minimum(p + 1, S), BN):
        n = n0 + tl.arange(0, BN)
        behind = slot - n + tl.where(n > slot, S, 0)
        seen = (n < S) & (behind > 0) & (behind <= p) & (behind < S - 1)
        at = n[:, None] * stride + d[None, :]
        k_block = tl.load(keys + at, mask=seen[:, None], other=0.0).to(tl.float32)
        v_block = tl.load(values + at, mask=seen[:, None], other=0.0).to(tl.float32)
        s = tl.where(seen, tl.sum(k_block * Q[None, :], 1), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        e = tl.exp2(s - new_top)
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(e, 0)
        acc = acc * shrink + tl.sum(e[:, None] * v_block, 0)
    tl.store(o + row * stride + h * WIDTH + d, (acc / total).to(o.dtype.element_ty))


DECODE_TILES = dict(BN=128, num_warps=8)


def adjacent_heads(x: Tensor) -> Tensor:
    """x (B, H, K) with the heads of a row next to each other in memory."""
    return x if x.stride()[1:] == (x.size(2), 1) else x.contiguous()


@torch.library.custom_op("decoderstack_engine::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, offset: bool
) -> Tensor:
    """As decode_attention_ref, by the kernel where it runs."""
    B, H, width = q.shape
    if not use_triton(q):
        return decode_attention_ref(q, k, v, keys, values, positions, offset)
    q, k, v = (adjacent_heads(t) for t in (q, k, v))
    o = q.new_empty(B, H, width)
    decode_attention_kernel[(B, H)](
        q, k, v, o, keys, values, positions, keys.size(1), H, q.stride(0), k.stride(0), v.stride(0),
        OFFSET=offset, WIDTH=width, **DECODE_TILES,
    )  # fmt: skip
    return o


@decode_attention.register_fake
def _(q, k, v, keys, values, positions, offset):
    return q.new_empty(q.shape)
