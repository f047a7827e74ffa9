"""Sampling: what a step reads of each slot, and how logits become ids."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache import to_device
from engine.completion import Completion, TokenLogprob

# ==== The mode of a step

TOP_K_BOUNDS = (0, 64, 1024)  # and the whole vocabulary; on CUDA each is a graph of its own


class SamplerMode(NamedTuple):
    """What the steps of some slots must compute. On CUDA each mode is a graph."""

    is_greedy: bool  # argmax of the model's logits for every slot; top_k_bound is 0 then
    top_k_bound: int  # logits to sort, one of TOP_K_BOUNDS or the whole vocabulary; 0: none
    processors: bool  # logits processors, for any slot
    masks: bool  # for any slot


def sampler_mode(completions: Iterable[Completion], vocab_size: int) -> SamplerMode:
    """The cheapest SamplerMode that serves all completions."""
    completions = list(completions)
    needed = max((c.top_k_bound(vocab_size) for c in completions), default=0)
    bounds = [bound for bound in TOP_K_BOUNDS if bound >= needed]
    return SamplerMode(
        is_greedy=all(c.is_greedy() for c in completions),
        top_k_bound=min([*bounds, vocab_size]),
        processors=any(c.has_processors() for c in completions),
        masks=any(c.mask for c in completions),
    )


# ==== The slots


class InputBatch:
    """What a step reads of each slot: tensors that are only written in place, as graphs hold their addresses."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device):
        # Each tensor of a slot begins at a multiple of 16 bytes, else compiled code copies it.
        padded = math.ceil(num_slots / 4) * 4
        self.integers = torch.zeros(6, padded, dtype=torch.long, device=device)[:, :num_slots]
        self.tokens = self.integers[0]  # the input token, and in prev_ids the two ids before it
        self.prev_ids = self.integers[1:3]
        self.positions = self.integers[3]  # of the input token; -1: the slot is idle
        self.top_k = self.integers[4]
        self.seeds = self.integers[5]
        self.positions.fill_(-1)

        self.numbers = torch.zeros(6, padded, device=device)[:, :num_slots]
        self.temperature = self.numbers[0]
        self.top_p = self.numbers[1]
        self.min_p = self.numbers[2]
        self.presence = self.numbers[3]  # penalties
        self.frequency = self.numbers[4]
        self.repetition = self.numbers[5]
        self.repetition.fill_(1)

        self.sampled = torch.zeros_like(self.tokens)  # the ids of the last step, or INVALID_TOKEN
        # (B, V): whether each id is in the prompt, how often in the answer, what is added to its logit, and whether a
        # mask forbids it.
        self.in_prompt = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(num_slots, vocab_size, device=device)
        self.forbidden = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)

    def set_slots(self, completions: dict[int, Completion]) -> None:
        """Sets slots so that the last id of each sequence is the input token of the next step."""
        integers = []  # of each slot, in the order of the tensors above
        numbers = []
        for c in completions.values():
            ids = c.all_tokens()
            prev2, prev1, token = [0, 0, *ids][-3:]
            integers.append((token, prev1, prev2, len(ids) - 1, c.top_k, c.seed % 2**32))
            # 0 keeps the most likely token. With 1 the rounding of a sum could cut something: 2 cuts nothing.
            top_p = max(c.top_p, 1e-6) if c.top_p < 1 else 2
            penalties = (c.presence_penalty, c.frequency_penalty, c.repetition_penalty)
            numbers.append((max(c.temperature, 0), top_p, c.min_p, *penalties))

        device = self.tokens.device
        slots = to_device(list(completions), device)
        self.integers[:, slots] = to_device(np.array(integers, dtype=np.int64).T, device)
        self.numbers[:, slots] = to_device(np.array(numbers, dtype=np.float32).T, device)
        self.bias[slots] = 0
        self.forbidden[slots] = False
        for slot, completion in completions.items():
            if completion.has_processors():
                for token, bias in completion.logit_bias.items():
                    self.bias[slot, token] = bias
                answer = torch.tensor(completion.tokens, dtype=torch.long)
                self.counts[slot] = to_device(answer.bincount(minlength=self.counts.size(1)), device)
                self.in_prompt[slot] = False
                self.in_prompt[slot, to_device(completion.prompt, device)] = True

    def set_masks(self, completions: dict[int, Completion]) -> None:
        """Sets which ids may not come next, in the slots that have a mask."""
        masks = {slot: c.mask(c.tokens, c.max_tokens - len(c.tokens)) for slot, c in completions.items() if c.mask}
        if masks:
            allowed = torch.stack([torch.from_numpy(mask) for mask in masks.values()])
            device = self.forbidden.device
            self.forbidden[to_device(list(masks), device)] = to_device(allowed == 0, device)

    def process_logits(self, logits_BV: Tensor) -> Tensor:
        """The logits with their penalties, plus the bias."""
        counts = self.counts.to(logits_BV.dtype)
        repetition = self.repetition[:, None]
        weakened = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
        logits_BV = torch.where(self.in_prompt | (counts > 0), weakened, logits_BV)
        frequency = self.frequency[:, None] * counts
        presence = self.presence[:, None] * (counts > 0)
        return logits_BV - frequency - presence + self.bias

    def count(self, tokens_B: Tensor) -> None:
        """Counts an id of each running slot for the penalties."""
        running = (self.positions >= 0).to(self.counts.dtype)
        self.counts.scatter_add_(1, tokens_B[:, None], running[:, None])

    def advance(self, tokens_B: Tensor) -> None:
        """Makes the sampled ids the input tokens of the next step."""
        self.prev_ids[1].copy_(self.prev_ids[0])
        self.prev_ids[0].copy_(self.tokens)
        self.tokens.copy_(tokens_B)
        self.positions.add_(self.positions >= 0)

    def force(self, slot: int, token: int) -> None:
        """Puts an id in place of the sampled one, as the input token of the next step."""
        counts = self.counts[slot]
        counts[self.tokens[slot : slot + 1]] -= 1
        counts[token] += 1
        self.tokens[slot] = token


# ==== From logits to ids


def sample_ids(
    logits_BV, temperature_B, top_k_B, top_p_B, seeds_B, counters_B, top_k_bound: int, min_p_B=None
) -> Tensor:
    """One id for each slot: argmax at temperature 0, else sampled from the most likely ids.

    Of the top_k ids with the largest logits it keeps the fewest whose probabilities reach top_p, and ids as likely as
    the last of them. The argmax of logits plus Gumbel noise is a sample of their softmax.

    Args:    logits_BV fp32; temperature_B, top_p_B, min_p_B fp32 (B,); top_k_B, seeds_B, counters_B int64 (B,).
             top_k 0: all ids; top_p 1 or more: all ids; seeds and counters: the noise depends on them and on nothing
             else, so a slot samples the same in any batch; top_k_bound: logits to sort, at least top_k of every slot
             that cuts, V if one cuts by top_p alone, 0 if none does; min_p: drops ids below this fraction of the
             largest probability, None: none does
    Returns: ids int64 (B,)
    """
    z = logits_BV / temperature_B.clamp(min=1e-6)[:, None]
    if top_k_bound:
        cuts = (top_k_B > 0) | (top_p_B < 1)
        unlikely = z < smallest_kept(z, top_k_B, top_p_B, top_k_bound)[:, None]
        z = z.masked_fill(unlikely & cuts[:, None], -math.inf)
    if min_p_B is not None:
        min_logit = z.amax(-1) + min_p_B.log()  # min_p of 0 gives minus infinity, which cuts nothing
        z = z.masked_fill(z < min_logit[:, None], -math.inf)
    z = z + gumbel_noise(seeds_B, counters_B, z.size(-1))
    greedy = (temperature_B == 0)[:, None]
    return torch.where(greedy, logits_BV, z).argmax(-1)


def smallest_kept(z_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, top_k_bound: int) -> Tensor:
    """The smallest logit of each slot that top_k and top_p keep, (B,)."""
    top = z_BV.topk(top_k_bound).values
    rank = torch.arange(top_k_bound, device=top.device)
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
    """The logprob of one id of each row of logits, and of its num_top top tokens, at least one."""
    logprobs = logits_BV.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens_B[:, None].long())[:, 0].tolist()
    top = logprobs.topk(max(num_top, 1))
    rows = zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprob(logprob, list(zip(ids, values, strict=True))) for logprob, ids, values in rows]
