"""The KV cache, and the prefix cache, which knows what each slot of it holds."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import commonprefix  # which takes lists of ids too
from typing import NamedTuple

import torch
from torch import Tensor

from engine.completion import Completion

MIN_SHARED_PREFIX = 64  # ids that two sequences must have in common before a prefix slot holds them


class RingKind(NamedTuple):
    """What the rings of a layer have in common with those of some other layers."""

    rows: int  # of a token: two in a paired layer, with half of the heads each (see GPT.forward)
    window: int  # how many rows before its own a row sees
    size: int  # S, cells of a slot's ring


@dataclass
class KVCache:
    """Keys and values of every attention layer. A slot holds one sequence, in a ring of cells for each layer.

    A ring has cells for the layer's window, not for the whole context: row p of a sequence lies in cell p % S. Keys are
    stored rotated, so their order in the ring does not matter. S is window + 2, for the newest key and the next one, or
    one more than the longest sequence has rows, if that is less.

    In layers with key offset, the second half of a key is that of the token before. So a token writes the first half of
    its key into its own cell, and the second half into the next one. The first token of a text, which has none before
    it, writes its second half into both.
    """

    keys: dict[int, Tensor]  # of each layer with attention, (B, S, H, K)
    values: dict[int, Tensor]  # the same
    kinds: dict[int, RingKind]  # of each layer with attention

    @staticmethod
    def empty(model, num_slots: int, max_len: int) -> KVCache:
        """A cache of zeros for sequences of up to max_len tokens, in the model's dtype and on its device."""
        config = model.config
        cache = KVCache({}, {}, {})
        for layer in config.attention_layers:
            rows = 2 if layer in config.paired_layers else 1
            window = rows * model.windows[layer in config.long_layers]
            kind = RingKind(rows, window, size=min(window + 2, rows * max_len + 1))
            shape = (num_slots, kind.size, config.num_heads // rows, config.head_dim)
            cache.keys[layer] = model.embed.new_zeros(shape)
            cache.values[layer] = model.embed.new_zeros(shape)
            cache.kinds[layer] = kind
        return cache

    def rings(self) -> list[Tensor]:
        """The rings of keys of all layers, then those of values."""
        return [*self.keys.values(), *self.values.values()]

    def clear(self, slots: list[int]) -> None:
        """Zeroes slots. Old keys are masked, but infinities and NaN would get through a mask."""
        if slots:
            rings = self.rings()
            index = to_device(slots, rings[0].device)
            for ring in rings:
                ring[index] = 0

    def copy(self, sources: dict[int, int]) -> None:
        """Copies slots: {to: from}."""
        if sources:
            rings = self.rings()
            target = to_device(list(sources), rings[0].device)
            source = to_device(list(sources.values()), rings[0].device)
            for ring in rings:
                ring[target] = ring[source]


def to_device(array, device: torch.device) -> Tensor:
    """A tensor of an array or list, without waiting for work that the device has not finished."""
    return torch.as_tensor(array).to(device, non_blocking=True)


@dataclass
class SlotPlan:
    """What a slot should hold, and how much of it need not be computed."""

    slot: int
    ids: list[int]  # that it holds in the end
    num_cached: int = 0  # how many of them the cache holds: in this slot, or in `source`
    source: int | None = None  # a prefix slot, which is copied into this one first
    completion: Completion | None = None  # None: it is a prefix slot


class PrefixCache:
    """Which ids have their keys and values in each slot of the KV cache.

    An idle slot keeps what its last sequence left, so that the next turn of a conversation computes only what is new.
    Behind the slots of requests come prefix slots, for what several sequences begin with, such as a system prompt; a
    sequence with such a prefix starts as a copy of the slot. Of what a slot holds, all is used or nothing, since a ring
    only has the end.
    """

    def __init__(self, num_slots: int, prefix_slots: int):
        self.num_slots = num_slots
        self.tokens: list[list[int]] = [[] for _ in range(num_slots + prefix_slots)]  # by slot
        self.prefix_slots = list(range(num_slots, num_slots + prefix_slots))  # least recently used first

    def match(self, slot: int, ids: list[int]) -> int:
        """How many ids a slot holds, if the given ones begin with all of them; else 0."""
        cached = self.tokens[slot]
        return len(cached) if cached == ids[: len(cached)] else 0

    def choose_prefixes(self, plans: list[SlotPlan]) -> list[SlotPlan]:
        """Lets new sequences start from prefix slots: sets source and num_cached of their plans.

        A prefix gets a prefix slot, the least recently used one, when a second sequence has it. So this also
        changes which ids the prefix slots hold (self.tokens) and their order of use (self.prefix_slots).

        Returns: plans of prefix slots whose prefix must be computed before the plans may start from it
        """
        if not self.prefix_slots:
            return []
        new_prefixes = []
        sources = set()  # they are copied once all plans are made, so no other prefix may take their place
        sequences = self.tokens[: self.num_slots]  # what slots hold, then the new sequences before this one
        for plan in plans:
            source = max(self.prefix_slots, key=lambda slot: self.match(slot, plan.ids))
            num_cached = self.match(source, plan.ids)

            # If another sequence has many more ids in common, these become a shared prefix of their own.
            num_common = max(len(commonprefix([plan.ids, other])) for other in sequences)
            sequences.append(plan.completion.all_tokens())
            oldest = self.prefix_slots[0]
            if num_common >= max(plan.num_cached, num_cached) + MIN_SHARED_PREFIX and oldest not in sources:
                source = oldest
                num_cached = num_common
                self.tokens[source] = plan.ids[:num_common]
                new_prefixes.append(SlotPlan(source, self.tokens[source]))

            if num_cached > plan.num_cached:
                plan.source = source
                plan.num_cached = num_cached
                sources.add(source)
                self.prefix_slots.remove(source)
                self.prefix_slots.append(source)  # the most recently used
        return new_prefixes
