"""Prefill: all new ids of several prompts in one packed pass through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache import KVCache, to_device

PREFILL_TOKENS = 16384  # prompt tokens computed at once; a longer prompt is a batch of its own

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

    def attend(index, layer, q, k, v):  # (T, H, K) -> (T, H, K)
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
