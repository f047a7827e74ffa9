"""KV cache and prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import commonprefix  # which takes lists of ids too

import torch
from torch import Tensor

MIN_SHARED_PREFIX = 64  # ids that two sequences must have in common before a shared row holds them


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
