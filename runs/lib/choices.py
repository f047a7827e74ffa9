"""Scores choices: which of several continuations of a prompt a model finds most likely.

    correct = score_task(scorer(model, compile=True), task, batch_tokens, model.windows, bos_id, ranks)

runs/score_core.py scores CORE with it, runs/chat_eval.py the letters of its multiple-choice tasks. Many examples share
a batch, and the choices of an example share their prompt.

Letters in shapes: T tokens of a batch, R scored tokens of a batch, H heads, K head width.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from engine.kernel import adjacent_heads, jit, tl, triton, use_triton
from lib.command import RunError
from torch import Tensor


@dataclass
class ChoiceTask:
    """The examples of a task. A choice is int32 token ids, of the prompt too; only its span (start, end) is scored."""

    name: str
    kind: str  # multiple_choice, schema or language_modeling
    chance: float  # accuracy of a random guess, 0 to 1
    gold: np.ndarray  # (examples,) index of the correct choice
    examples: list[list[np.ndarray]]  # the choices of each example
    spans: list[list[tuple[int, int]]]  # the span of each choice


def shared_prefix(choices: list[np.ndarray], spans: list[tuple[int, int]]) -> int:
    """Length of the common prefix of all choices, up to the first input that predicts a scored token."""
    if len(choices) == 1:
        return 0
    shortest = min(len(choice) for choice in choices)
    first_scored = min(start for start, _ in spans)
    limit = max(min(shortest - 2, first_scored - 1), 0)
    beginnings = np.stack([choice[:limit] for choice in choices])
    differs = (beginnings != beginnings[0]).any(0)
    return int(differs.argmax()) if differs.any() else limit


# ==== Packing
# Examples are packed into a buffer of fixed size. The common prefix of an example's choices is stored once; each choice
# continues from there and does not see the others:
#
#     tokens        B q q q a a b b b    two choices, a a . and b b b . ; a token that is only a target is not stored
#     positions     0 1 2 3 4 5 4 5 6    previous: for the first b, the token before is the last q
#     window_start  0 0 0 0 0 0 0 0 0    the first key that the window reaches; one row for each of the two windows
#     hidden_start  - - - - - - 4 4 4    keys 4 and 5 are hidden from b: hidden_start <= j < choice_start
#     choice_start  0 1 2 3 4 4 6 6 6


class PackedChoices(NamedTuple):
    """A batch, int32: arrays, or tensors on a device. Padding tokens see only themselves; padding targets belong to
    choice -1."""

    tokens_T: Tensor
    positions_T: Tensor  # in the choice
    previous_T: Tensor  # index of the token before in the choice
    choice_start_T: Tensor
    hidden_start_T: Tensor
    window_start_2T: Tensor  # for the short and the long window
    scored_R: Tensor  # index of the input that predicts each scored token
    targets_R: Tensor  # the scored tokens
    choice_R: Tensor  # number of the choice that each of them belongs to


class ChoiceBatch:
    """A batch on the host, filled example by example."""

    def __init__(self, size: int, windows: tuple[int, int], bos_id: int):
        index = np.arange(size, dtype=np.int32)
        zeros = np.zeros(size // 2, np.int32)
        self.arrays = PackedChoices(
            tokens_T=np.full(size, bos_id, np.int32),
            positions_T=np.zeros(size, np.int32),
            previous_T=np.maximum(index - 1, 0),
            choice_start_T=index.copy(),
            hidden_start_T=index.copy(),
            window_start_2T=np.stack((index, index)),
            scored_R=zeros.copy(),
            targets_R=zeros.copy(),
            choice_R=zeros - 1,
        )
        self.windows = windows
        self.num_tokens = 0
        self.num_scored = 0

    def add(self, choices: list[np.ndarray], spans: list[tuple[int, int]], number: int) -> bool:
        """Appends an example whose choices have the numbers number, number + 1, ...; False if it does not fit."""
        prefix_len = shared_prefix(choices, spans)
        tokens = prefix_len + sum(len(choice) - 1 - prefix_len for choice in choices)
        scored = sum(end - start for start, end in spans)
        arrays = self.arrays
        if self.num_tokens + tokens > arrays.tokens_T.size or self.num_scored + scored > arrays.scored_R.size:
            return False

        begin = self.num_tokens
        prefix = choices[0][:prefix_len]
        self.add_part(prefix, position=0, prefix_start=begin, choice_start=begin, hidden_start=begin)
        for choice, (start, end) in zip(choices, spans, strict=True):
            own = self.num_tokens
            hidden_start = begin + prefix_len
            rest = choice[prefix_len:-1]
            self.add_part(rest, position=prefix_len, prefix_start=begin, choice_start=own, hidden_start=hidden_start)
            if self.num_tokens > own:
                arrays.previous_T[own] = max(hidden_start - 1, 0)

            # The input before a scored token predicts it; shared_prefix leaves it to the choice.
            part = slice(self.num_scored, self.num_scored + end - start)
            arrays.scored_R[part] = np.arange(start, end) - 1 - prefix_len + own
            arrays.targets_R[part] = choice[start:end]
            arrays.choice_R[part] = number
            self.num_scored = part.stop
            number += 1
        return True

    def add_part(
        self, tokens: np.ndarray, *, position: int, prefix_start: int, choice_start: int, hidden_start: int
    ) -> None:
        """Appends the common prefix of an example, or what a choice has of its own, from `position` on."""
        positions = np.arange(position, position + len(tokens), dtype=np.int32)
        part = slice(self.num_tokens, self.num_tokens + len(tokens))
        self.arrays.tokens_T[part] = tokens
        self.arrays.positions_T[part] = positions
        self.arrays.choice_start_T[part] = choice_start
        self.arrays.hidden_start_T[part] = hidden_start
        # The first position that the window reaches lies in the prefix or in this part.
        for window, window_start in zip(self.windows, self.arrays.window_start_2T, strict=True):
            first = np.maximum(positions - window, 0)
            own = choice_start + first - position
            window_start[part] = np.where(first < position, prefix_start + first, own)
        self.num_tokens = part.stop

    def inputs(self, device: torch.device) -> PackedChoices:
        """The batch on a device. The copy may still be under way."""
        tensors = [torch.from_numpy(array) for array in self.arrays]
        if device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return PackedChoices(*(tensor.to(device, non_blocking=True) for tensor in tensors))


# ==== Attention
# As in training, but each token also has a range of keys that are hidden from it. Forward only.


def choice_attention_ref(q, k, v, window_start, hidden_start, choice_start, block: int = 256) -> Tensor:
    """q, k, v (T, H, K) -> (T, H, K): token i sees the keys window_start[i] <= j <= i, but not
    the hidden range hidden_start[i] <= j < choice_start[i].

    q carries the scale. Works in blocks of queries, as a dense mask over all tokens would not fit into memory.
    """
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    index = torch.arange(len(q), device=q.device)
    for start in range(0, len(q), block):
        own = slice(start, min(start + block, len(q)))
        seen = slice(int(window_start[own].min()), own.stop)  # by any query of the block
        i = index[own, None]
        j = index[None, seen]
        visible = (j >= window_start[own, None]) & (j <= i)
        visible &= (j < hidden_start[own, None]) | (j >= choice_start[own, None])
        heads = [t.transpose(0, 1)[None] for t in (q[own], k[seen], v[seen])]
        y[own] = F.scaled_dot_product_attention(*heads, visible, scale=1.0)[0].transpose(0, 1)
    return y


@jit
def load_rows(x, index, stride, T, D: tl.constexpr):
    """Rows of one head, (BLOCK, D); zeros past the end."""
    x += index.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(x, mask=index[:, None] < T, other=0.0)


@jit
def choice_attention_kernel(q, k, v, o, window_start, hidden_start, choice_start, T, sq, sk, sv, so, D: tl.constexpr,
                            BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One block of BM rows and one head a program; sq, sk, sv and so are the strides of a token.

    Window attention as in training, without the hidden range. window_start may decrease from row to row, so a block
    starts at the smallest of its rows.
    """
    m0 = tl.program_id(0) * BM
    h = tl.program_id(1)
    m = m0 + tl.arange(0, BM)
    low = tl.load(window_start + m, mask=m < T, other=T)
    hidden = tl.load(hidden_start + m, mask=m < T, other=0)
    after = tl.load(choice_start + m, mask=m < T, other=0)
    Q = load_rows(q + h * D, m, sq, T, D)

    # Online softmax in base 2: `top` is the largest score so far, `total` the sum of exp2(score - top).
    top = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for n0 in range(tl.min(low, 0) // BN * BN, min(m0 + BM, T), BN):
        n = n0 + tl.arange(0, BN)
        K = load_rows(k + h * D, n, sk, T, D)
        scores = tl.dot(Q, tl.trans(K), input_precision="ieee") * 1.4426950408889634  # log2(e)
        seen = (n[None, :] >= low[:, None]) & (n[None, :] <= m[:, None])
        seen = seen & ((n[None, :] < hidden[:, None]) | (n[None, :] >= after[:, None]))
        scores = tl.where(seen, scores, -1e30)

        # The first visible key makes `shrink` 0, which wipes out what hidden keys have added.
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(p, 1)
        V = load_rows(v + h * D, n, sv, T, D)
        acc = tl.dot(p.to(V.dtype), V, acc * shrink[:, None], input_precision="ieee")

    out = o + m.to(tl.int64)[:, None] * so + h * D + tl.arange(0, D)[None, :]
    tl.store(out, (acc / total[:, None]).to(o.dtype.element_ty), mask=m[:, None] < T)


# The sizes of the training kernel, which are the best on an H200.
TILES = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}


@torch.library.custom_op("decoderstack::choice_attention", mutates_args=())
def choice_attention(
    q: Tensor, k: Tensor, v: Tensor, window_start: Tensor, hidden_start: Tensor, choice_start: Tensor
) -> Tensor:
    """choice_attention_ref, by the kernel where it runs."""
    if not use_triton(q):
        return choice_attention_ref(q, k, v, window_start, hidden_start, choice_start)
    T, H, D = q.shape
    q, k, v = (adjacent_heads(t) for t in (q, k, v))
    o = q.new_empty(T, H, D)
    strides = (q.stride(0), k.stride(0), v.stride(0), o.stride(0))
    grid = (triton.cdiv(T, TILES["BM"]), H)
    choice_attention_kernel[grid](q, k, v, o, window_start, hidden_start, choice_start, T, *strides, D, **TILES)
    return o


@choice_attention.register_fake
def _(q, k, v, window_start, hidden_start, choice_start):
    return q.new_empty(q.shape)


# ==== Scoring


def score_packed(model, inputs: PackedChoices) -> tuple[Tensor, Tensor]:
    """Nats of the targets, fp32 (R,), and whether each is the most likely token, bool (R,).

    The head is computed at scored_R only, as few tokens of a few-shot prompt are scored.
    """
    config = model.config
    is_first_T11 = (inputs.positions_T == 0)[:, None, None]

    def attend(layer, q, k, v):
        if layer in config.key_offset_layers:
            k = model.offset_keys(k, k[inputs.previous_T], is_first_T11)
        if layer in config.paired_layers:
            q2, k2, v2 = (x.reshape(-1, config.num_heads // 2, config.head_dim) for x in (q, k, v))
            return choice_attention(q2, k2, v2, *paired_rows(inputs, config.window_short)).reshape(q.shape)
        window_start_T = inputs.window_start_2T[int(layer in config.long_layers)]
        return choice_attention(q, k, v, window_start_T, inputs.hidden_start_T, inputs.choice_start_T)

    before_T = inputs.previous_T[inputs.previous_T]
    previous_2T = inputs.tokens_T[torch.stack((inputs.previous_T, before_T))]
    hidden_TD = model.trunk(inputs.tokens_T, previous_2T, inputs.positions_T, attend)

    # In parts, which bounds the memory of the logits.
    nats = []
    hits = []
    for scored, targets in zip(inputs.scored_R.split(8192), inputs.targets_R.split(8192), strict=True):
        z = model.logits(hidden_TD[scored])
        nats.append(z.logsumexp(1) - z.gather(1, targets[:, None].long())[:, 0])
        hits.append(z[:, : config.vocab_size].argmax(1) == targets)
    return torch.cat(nats), torch.cat(hits)


def paired_rows(inputs: PackedChoices, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where windows, hidden keys and choices begin, of the two rows that each token has in a paired layer: (2 T,) each.

    The window of 2 W rows begins, for the second row of a token, with the second row of the token W before.
    """
    start_T = 2 * inputs.window_start_2T[0]
    second_T = start_T + (inputs.positions_T >= window)
    window_start = torch.stack((start_T, second_T), 1).flatten()
    return window_start, 2 * inputs.hidden_start_T.repeat_interleave(2), 2 * inputs.choice_start_T.repeat_interleave(2)


def scorer(model, compile: bool) -> Callable:
    """score_packed of a model, compiled to one graph on request."""
    score = partial(score_packed, model)
    return torch.compile(score, dynamic=False, fullgraph=True) if compile else score


def default_batch_tokens(ranks) -> int:
    """Tokens of a batch that fit into the free memory of each rank, since all must pack alike."""
    if ranks.device.type != "cuda":
        return 8192
    free, _ = torch.cuda.mem_get_info(ranks.device)
    return min(ranks.gather(65536 if free > 16 * 2**30 else 16384))


def first_choices(task: ChoiceTask) -> list[int]:
    """The number of each example's first choice, counting the choices of the whole task; one entry more at the end."""
    return np.cumsum([0] + [len(choices) for choices in task.examples]).tolist()


def pack_examples(task: ChoiceTask, size: int, windows: tuple[int, int], bos_id: int) -> Iterator[ChoiceBatch]:
    """All examples of a task in batches of `size` tokens. Choices are numbered in the task's order."""
    numbers = first_choices(task)
    lengths = [sum(len(choice) for choice in choices) for choices in task.examples]
    # Longest first, so that short examples fill what is left of a batch.
    order = sorted(range(len(task.examples)), key=lambda i: -lengths[i])
    waiting = deque((task.examples[i], task.spans[i], numbers[i]) for i in order)
    batch = ChoiceBatch(size, windows, bos_id)
    while waiting:
        choices, spans, number = waiting.popleft()
        if batch.add(choices, spans, number):
            continue
        if batch.num_tokens:
            waiting.appendleft((choices, spans, number))
            yield batch
            batch = ChoiceBatch(size, windows, bos_id)
        else:  # the example is too long for any batch, but each of its choices fits
            for i in reversed(range(len(choices))):
                waiting.appendleft(([choices[i]], [spans[i]], number + i))
    yield batch


@torch.no_grad()
def score_task(
    score: Callable, task: ChoiceTask, size: int, windows: tuple[int, int], bos_id: int, ranks
) -> np.ndarray:
    """Whether each example of a task is answered correctly, bool (examples,).

    Args:   score: as scorer() makes it; size: tokens of a batch; windows: of the model; ranks: the script's Ranks
    Raises: RunError if the loss is not finite
    """
    num_choices = first_choices(task)[-1]
    # Nats, targets and hits of each choice; the last column is for padding.
    sums = torch.zeros(3, num_choices + 1, device=ranks.device)

    # All ranks pack alike and score the batches in turn.
    for i, batch in enumerate(pack_examples(task, size, windows, bos_id)):
        if i % ranks.world != ranks.rank:
            continue
        inputs = batch.inputs(ranks.device)
        nats, hits = score(inputs)
        choice_R = torch.where(inputs.choice_R < 0, num_choices, inputs.choice_R)
        sums.index_add_(1, choice_R, torch.stack((nats, torch.ones_like(nats), hits.float())))
    nats, targets, hits = sum(ranks.gather(sums[:, :-1].cpu().double().numpy()))
    if not np.isfinite(nats).all():
        raise RunError(f"the loss on {task.name} is not finite; score another checkpoint with --step")
    return correct_examples(task, nats, targets, hits)


def correct_examples(task: ChoiceTask, nats: np.ndarray, targets: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Whether each example is answered correctly, bool (examples,), from sums over the scored tokens of each choice.

    Language modelling: every scored token must be the most likely one. Multiple choice and schema: the correct choice
    must have the lowest mean nats; ties go to the first.
    """
    numbers = first_choices(task)
    if task.kind == "language_modeling":
        return (hits == targets)[numbers[:-1]]
    means = nats / np.maximum(targets, 1)
    correct = np.zeros(len(task.examples), bool)
    for i, choices in enumerate(task.examples):
        # Equal choices have equal means, whatever rounding has made of them.
        contents = [choice.tobytes() for choice in choices]
        first_equal = [contents.index(content) for content in contents]
        own = means[numbers[i] : numbers[i + 1]]
        correct[i] = own[first_equal].argmin() == task.gold[i]
    return correct
