"""Sampling: from logits to ids."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache import to_device
from engine.completion import GREEDY, Completion, TokenLogprob

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
