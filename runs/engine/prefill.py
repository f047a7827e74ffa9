"""Prefill: all new ids of several sequences in one packed pass through the model.

The host computes indices with numpy (prefill_inputs), one copy brings them to the device, and run_prefill reads them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache import KVCache, RingKind, SlotPlan, to_device

# ==== Batches and buckets

# Prompt tokens of a batch, those in the cache included; a longer prompt is a batch of its own. A GPU waits for the
# host between batches, so its batches are larger.
MAX_PREFILL_TOKENS = 16384
MAX_PREFILL_TOKENS_CUDA = 65536


def prefill_batches(plans: list[SlotPlan], max_tokens: int) -> Iterator[list[SlotPlan]]:
    """The plans that leave something to compute, in batches of up to max_tokens tokens, or of one longer sequence."""
    waiting = [plan for plan in plans if len(plan.ids) > plan.num_cached]
    while waiting:
        totals = np.cumsum([len(plan.ids) for plan in waiting])
        count = max(1, int((totals <= max_tokens).sum()))
        yield waiting[:count]
        waiting = waiting[count:]


class PrefillBucket(NamedTuple):
    """Sizes that a prefill is padded to, so that one CUDA graph serves all that fit."""

    sequences: int  # without the padding
    new: int  # tokens
    old: int  # keys read from a ring


# Above the largest of these the device is busy for longer than the host needs to launch a prefill.
NEW_BUCKETS = (128, 256, 512, 1024, 2048, 4096)
OLD_BUCKETS = (0, 1024, 4096)


def choose_bucket(
    num_cached: list[int], sequences: list[list[int]], max_sequences: int, window: int
) -> PrefillBucket | None:
    """The smallest bucket for a prefill; None if it is too long for all, so that it runs without a graph.

    Args: num_cached, sequences as of prefill; max_sequences in a prefill of the bucket; window: the model's long one
    """
    new = sum(map(len, sequences)) - sum(num_cached)
    old = sum(min(count, window) for count in num_cached)
    new_sizes = [size for size in NEW_BUCKETS if size >= new]
    old_sizes = [size for size in OLD_BUCKETS if size >= old]
    return PrefillBucket(max_sequences, new_sizes[0], old_sizes[0]) if new_sizes and old_sizes else None


# ==== What the host prepares


class RingIndices(NamedTuple):
    """Where a prefill reads and writes the rings of all layers of one kind.

    An example with a window of 3, so rings of 5 cells. The cache holds 5 tokens of sequence A, which gets 2 more, and
    1 token of sequence B, which gets 2. Old keys come from the ring, new ones from the layer:

        packed tokens     A2 A3 A4 A5 A6 | B0 B1 B2        cu_seqlens: 0 5 8
        old_index          0  1  2          5
        new_index                   3  4       6  7

    Attention runs over the packed tokens. The ring of A afterwards, with the cells of the new keys marked:

        cell     0    1    2    3    4
                A5*  A6*   .   A3   A4         first_new_cells: 0, lookahead_cells: 2 (free for the key of A7)

    Integer arrays, later tensors on the device; rows in place of tokens in a paired layer. Cells are numbered over all
    slots of the cache, S for each.
    """

    packed_positions: Any  # (P,) of each packed token in its packed sequence
    cu_seqlens: Any  # (N + 2,) where packed sequences begin and end; the last sequence is padding
    old_index: Any  # which packed tokens are old
    new_index: Any  # (T,) which are new
    old_cells: Any  # cell of each old key
    kept_new: Any  # which of the T new tokens the ring holds at the end
    kept_cells: Any  # cell of each of those
    first_new_cells: Any  # (N,) cell of the first new token of each sequence
    lookahead_cells: Any  # (N,) cell of the token after the last new one

    def attend(self, attention: Callable, q: Tensor, k: Tensor, v: Tensor, keys, values) -> Tensor:
        """Attention of the new tokens: q, k, v (T, H, K), rings (B * S, H, K) -> (T, H, K)."""
        if not len(self.old_cells):
            return attention(q, k, v, 0)
        old_keys = keys[self.old_cells]
        packed_k = self.pack(old_keys, k)
        packed_q = self.pack(old_keys, q)  # old keys in place of old queries, whose results are dropped
        packed_v = self.pack(values[self.old_cells], v)
        return attention(packed_q, packed_k, packed_v, 0)[self.new_index]

    def pack(self, old: Tensor, new: Tensor) -> Tensor:
        """Old (P - T, H, K) and new (T, H, K) tokens in the order of packed tokens, (P, H, K)."""
        packed = new.new_empty(len(self.packed_positions), *new.shape[1:])
        packed[self.old_index] = old
        packed[self.new_index] = new
        return packed


class PrefillInputs(NamedTuple):
    """What run_prefill reads: integer arrays, later tensors on the device."""

    tokens: Any  # (T,) new ids of all sequences, and padding
    prev1_ids: Any  # (T,) the id before each
    prev2_ids: Any  # (T,) and the one before that
    positions: Any  # (T,)
    first_new: Any  # (N,) index of each sequence's first new id among the T
    last_new: Any  # (N,)
    rings: dict[RingKind, RingIndices]

    def arrays(self) -> list:
        """All arrays, in a fixed order."""
        return list(itertools.chain(self[:-1], *self.rings.values()))

    def flat(self) -> Tensor:
        """All arrays in one, so that one copy brings them to the device."""
        return torch.from_numpy(np.concatenate(self.arrays()))

    def views(self, flat: Tensor) -> PrefillInputs:
        """These inputs as views of a tensor that holds what flat() gave."""
        views = iter(flat.split([len(array) for array in self.arrays()]))
        own = list(itertools.islice(views, len(self) - 1))
        rings = {kind: RingIndices(*itertools.islice(views, len(ring))) for kind, ring in self.rings.items()}
        return PrefillInputs(*own, rings)


def ring_indices(kind: RingKind, slots, num_cached, lengths, bucket: PrefillBucket | None) -> RingIndices:
    """The indices of one kind of rings, in arrays, as long as a bucket says if there is one.

    Args:  slots, num_cached, lengths (N + 1,) int64 arrays: slot of each sequence, how many of its tokens the slot
           holds, and how many it has. The last sequence is padding, which is never stored.
    """
    num_cached = kind.rows * num_cached
    lengths = kind.rows * lengths
    num_old = np.minimum(num_cached, kind.window)  # older keys are out of sight
    if bucket:
        num_old[-1] = kind.rows * bucket.old - num_old[:-1].sum()  # padding, which reads whatever lies in its slot
    packed_lengths = num_old + lengths - num_cached
    cu_seqlens = np.cumsum([0, *packed_lengths])

    # Of every packed token: its sequence, its position among the packed ones and among all of that sequence, whether
    # its key is old, and its cell.
    sequence = np.repeat(np.arange(len(slots)), packed_lengths)
    packed_positions = np.arange(len(sequence)) - cu_seqlens[sequence]
    positions = packed_positions + (num_cached - num_old)[sequence]
    is_old = packed_positions < num_old[sequence]
    cells = slots[sequence] * kind.size + positions % kind.size

    # The ring keeps the last S - 1 tokens; one cell stays free for the next token.
    new_sequence = sequence[~is_old]
    is_recent = positions[~is_old] > lengths[new_sequence] - kind.size
    is_padding = new_sequence == len(slots) - 1
    kept_new = (is_recent & ~is_padding).nonzero()[0]
    indices = RingIndices(
        packed_positions=packed_positions,
        cu_seqlens=cu_seqlens,
        old_index=is_old.nonzero()[0],
        new_index=(~is_old).nonzero()[0],
        old_cells=cells[is_old],
        kept_new=kept_new,
        kept_cells=cells[~is_old][kept_new],
        first_new_cells=(slots * kind.size + num_cached % kind.size)[:-1],
        lookahead_cells=(slots * kind.size + lengths % kind.size)[:-1],
    )
    if not bucket:
        return indices
    return indices._replace(
        cu_seqlens=np.pad(cu_seqlens, (0, bucket.sequences + 2 - len(cu_seqlens)), mode="edge"),
        kept_new=repeat_first(indices.kept_new, kind.rows * bucket.new),
        kept_cells=repeat_first(indices.kept_cells, kind.rows * bucket.new),
        first_new_cells=repeat_first(indices.first_new_cells, bucket.sequences),
        lookahead_cells=repeat_first(indices.lookahead_cells, bucket.sequences),
    )


def repeat_first(array: np.ndarray, length: int) -> np.ndarray:
    """An array of indices, filled up to a length with its first entry: to read or write one thing again is harmless."""
    return np.concatenate((array, np.full(length - len(array), array[0])))


def prefill_inputs(
    model, cache: KVCache, slots: list[int], num_cached: list[int], sequences: list[list[int]],
    bucket: PrefillBucket | None = None,
) -> PrefillInputs:  # fmt: skip
    """What run_prefill reads, in int64 arrays of numpy.

    Args: model, cache, slots, num_cached, sequences as of prefill; bucket with the lengths to pad to, by default T is
          padded to a multiple of 128
    """
    # The new ids of all sequences, and the two ids before each; 0 before a sequence, where no layer reads it.
    tokens = []
    prev1_ids = []
    prev2_ids = []
    for start, sequence in zip(num_cached, sequences, strict=True):
        padded = [0, 0, *sequence]
        tokens += padded[start + 2 :]
        prev1_ids += padded[start + 1 : -1]
        prev2_ids += padded[start:-2]

    # Padding is one more sequence; sdpa_attention works in blocks of equal size.
    padded_length = bucket.new if bucket else math.ceil(len(tokens) / 128) * 128
    padding = padded_length - len(tokens)
    slots_N1 = np.array([*slots, slots[0]])
    starts_N1 = np.array([*num_cached, 0])
    ends_N1 = np.array([*map(len, sequences), padding])
    positions = np.concatenate([np.arange(*span) for span in zip(starts_N1, ends_N1, strict=True)])
    kinds = sorted(set(cache.kinds.values()))
    cu_new = np.cumsum([0, *(ends_N1 - starts_N1)])  # where the new ids of each sequence begin and end
    num_sequences = bucket.sequences if bucket else len(slots)
    return PrefillInputs(
        tokens=np.pad(tokens, (0, padding)),
        prev1_ids=np.pad(prev1_ids, (0, padding)),
        prev2_ids=np.pad(prev2_ids, (0, padding)),
        positions=positions.clip(max=model.config.max_seq_len - 1),  # only padding can lie beyond
        first_new=repeat_first(cu_new[:-2], num_sequences),
        last_new=repeat_first(cu_new[1:-1] - 1, num_sequences),
        rings={kind: ring_indices(kind, slots_N1, starts_N1, ends_N1, bucket) for kind in kinds},
    )


# ==== The device's work


def run_prefill(model, cache: KVCache, inputs: PrefillInputs, max_length: int, layer_weights=None) -> Tensor:
    """The work of a prefill on the device.

    Args:    inputs as tensors on the device; max_length: upper bound for packed sequences, in tokens; layer_weights as
             of prefill
    Returns: hidden states (T, D)
    """
    config = model.config
    half = config.head_dim // 2
    is_first_T11 = (inputs.positions == 0)[:, None, None]
    attentions = {}
    for kind, ring in inputs.rings.items():
        sizes = (ring.cu_seqlens.int(), kind.rows * max_length)
        attentions[kind] = model.attention((kind.window,), ring.packed_positions, *sizes)

    def attend(layer, q, k, v):  # (T, H, K) -> (T, H, K)
        kind = cache.kinds[layer]
        ring = inputs.rings[kind]
        keys = cache.keys[layer].flatten(0, 1)
        values = cache.values[layer].flatten(0, 1)
        shape = q.shape
        q, k, v = (x.reshape(-1, *keys.shape[1:]) for x in (q, k, v))  # two rows a token in a paired layer

        has_offset = layer in config.key_offset_layers
        if has_offset:
            last_keys = k[inputs.last_new]
            prev_keys = torch.cat((k[:1], k[:-1]))
            # The second half of a sequence's first new key is in its cell already: the token before it wrote it there.
            prev_keys[inputs.first_new] = keys[ring.first_new_cells]
            k = model.offset_keys(k, prev_keys, is_first_T11)

        y = ring.attend(attentions[kind], q, k, v, keys, values)
        keys[ring.kept_cells] = k[ring.kept_new]
        values[ring.kept_cells] = v[ring.kept_new]
        if has_offset:
            keys[ring.lookahead_cells, :, half:] = last_keys[:, :, half:]
        return y.reshape(shape)

    prev_ids_2T = torch.stack((inputs.prev1_ids, inputs.prev2_ids))
    return model.trunk(inputs.tokens, prev_ids_2T, inputs.positions, attend, layer_weights)


def prefill(
    model, cache: KVCache, slots: list[int], num_cached: list[int], sequences: list[list[int]],
    layer_weights=None, run: Callable = run_prefill,
) -> Tensor:  # fmt: skip
    """Extends slots of the cache to the given sequences, all in one packed pass through the model.

    Args:    model: GPT of a script; slots[i] the slot of sequences[i], which are ids; num_cached[i] how many of them
             the slot already holds, fewer than all; layer_weights what model.layer_weights() gave, to save its time;
             run: run_prefill, perhaps compiled
    Returns: hidden states of the new ids of all sequences in turn, and of some padding (T, D)
    """
    inputs = prefill_inputs(model, cache, slots, num_cached, sequences)
    max_length = max(int(np.diff(ring.cu_seqlens).max()) // kind.rows for kind, ring in inputs.rings.items())
    on_device = inputs.views(to_device(inputs.flat(), model.embed.device))
    return run(model, cache, on_device, max_length, layer_weights)
