"""Decoding with a trained model: KV cache, sampling, and rows that decode together.

    run = engine.load_run("out/RUN")
    generator = engine.Generator(run.model, run.tokenizer)
    for piece in generator.stream_text("The sky is", max_tokens=100, temperature=0.8):
        print(piece, end="")

The model is the GPT class of the script that lies in the run directory. This file imports no
training script of the repository, so a run keeps decoding as it was trained. Everything here is
built on GPT.trunk(attend), which computes all but the attention; `attend` handles keys and values.

    Runs          load_run: the script, the model and the tokenizer of a run directory
    Cache         KVCache, prefill, decode
    Sampling      sample
    Completions   Completion: one request and its result
    Rows          what a step reads of each row, CUDA graphs
    Decoding      Decoder (one step for all rows), Generator (texts from prompts)
    Kernel        attention of one step of decoding, in Triton and in plain PyTorch

Letters in shape comments: T packed tokens, D width, H heads, K head width, V vocabulary, B rows of
the cache, S slots of a ring, N texts of a prefill.
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
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lib.calculator import calculate
from lib.command import RunError, first_line, print_note
from safetensors.torch import load_file
from torch import Tensor

try:  # without Triton (CPUs, Macs, Windows) the plain path runs
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
jit = triton.jit if triton else (lambda function: function)

INTERFACE = 8  # of the training scripts that this file can read
PREFILL_TOKENS = 16384  # prompt tokens computed at once; a longer prompt is a pack of its own
SEED_STRIDE = 0x9E3779B1  # between the seeds of prompts that are generated together

# ==== Runs


def import_script(run_dir: str | Path) -> ModuleType:
    """Imports the training script that lies in a run directory, which executes its code.

    Raises: RunError if there is not exactly one, or if its interface is not INTERFACE
    """
    run_dir = Path(run_dir)
    scripts = sorted(run_dir.glob("train_*.py"))
    if len(scripts) != 1:
        found = f"it has {len(scripts)} training scripts"
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
    """What load_run returns."""

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
    script = import_script(run_dir)
    try:
        return load_model(script, Path(run_dir), step, device, changes)
    except RuntimeError as error:  # torch's, if memory runs out
        raise RunError(first_line(error)) from None


def choose_device(name: str) -> torch.device:
    """The device of a name. Raises: RunError if this machine or this PyTorch lacks it"""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"--device {name} does not work here ({first_line(error)}); leave it out") from None


def load_model(script: ModuleType, run_dir: Path, step, device, changes: dict) -> Run:
    needed = ("model.safetensors",)
    if step is None:
        folder = script.newest_whole(run_dir, print_note, needed)
    else:
        folder = run_dir / "checkpoints" / f"step_{step:06d}"
        if folder not in script.checkpoints(run_dir):
            way = "name another with --step, or leave it out"
            raise RunError(f"no checkpoint of step {step} in {run_dir}/checkpoints; {way}")
    state = script.check_checkpoint(folder, needed)
    weights = load_file(folder / "model.safetensors")

    changes = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(script.read_config(run_dir), **changes)
    ranks = script.start_ranks()
    device = choose_device(device) if device else ranks.device
    model = script.GPT(config, device, script.choose_dtype(config, device))
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        advice = "restore config.json as the run wrote it"
        raise RunError(f"the weights in {folder} do not fit config.json; {advice}") from None
    model.attention = script.choose_attention(model, lambda text: None)
    tokenizer = script.Tokenizer(run_dir / "tokenizer.json")
    return Run(script, model.eval(), tokenizer, config, state["step"])


# ==== Cache
# Keys and values of the texts so far. prefill adds many tokens, decode one for each row.


@dataclass
class KVCache:
    """Keys and values of every attention layer in rings: a layer holds its window, not all tokens.

    Position p of a row lies in slot p % S. Keys are stored rotated, so their order in the ring does
    not matter. S is window + 2, for the newest key and the next one, or longest text + 1 if less.

    In layers with key offset, a key takes its second half from the token before. That half waits in
    the slot of the next position until the next token comes.
    """

    keys: list[Tensor]  # of each attention layer, (B, S, H, K)
    values: list[Tensor]
    slots: tuple[int, int]  # S of layers with a short and with a long window

    @staticmethod
    def empty(model, rows: int, max_len: int) -> KVCache:
        """A cache of zeros for texts of up to max_len tokens, in the model's dtype and place."""
        config = model.config
        slots = tuple(min(window + 2, max_len + 1) for window in model.windows)
        sizes = [slots[int(layer in config.long_layers)] for layer in config.attention_layers]
        shapes = [(rows, size, config.num_heads, config.head_dim) for size in sizes]
        keys = [model.embed.new_zeros(shape) for shape in shapes]
        values = [model.embed.new_zeros(shape) for shape in shapes]
        return KVCache(keys, values, slots)

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


class RingPlan(NamedTuple):
    """How a prefill reads and writes the rings of all layers that have one window.

    A picture with a window of 3, so rings of 5 slots. Row A holds 5 tokens and gets 2 more, row B
    holds 1 token and gets 2. Old keys come from the ring, new ones from the layer:

        packed, a text of its own for each row    A2 A3 A4 A5 A6 | B0 B1 B2
                                    old_places     0  1  2          5
                                    new_places              3  4       6  7

    Attention runs over the packed texts. Old keys stand in for queries there, and nobody reads the
    results at their places. The ring of A afterwards, with the slots of the new keys marked:

        slot     0    1    2    3    4
                A5*  A6*   .   A3   A4         first: slot 0, next: slot 2 (free for the key of A7)

    Arrays of whole numbers; on the device tensors. A fixed size repeats some of their entries. Slots
    are numbered over all rows, S for each.
    """

    places: Any  # in their text, of all places of the packed texts
    borders: Any  # of the packed texts
    old_places: Any  # where the old keys are in the packed texts
    new_places: Any  # (T,) where the new tokens are
    read: Any  # slot of each old key
    kept: Any  # which of the T new tokens their ring holds at the end
    write: Any  # slot of each of those
    first: Any  # (N,) slot of the first new token of each text
    next: Any  # (N,) slot of the token after the last new one

    def attend(self, attention: Callable, q: Tensor, k: Tensor, v: Tensor, keys, values, long: int):
        """Attention of the new tokens: q, k, v (T, H, K), rings (B * S, H, K) -> (T, H, K)."""
        if not len(self.read):
            return attention(q, k, v, long)
        old_keys = keys[self.read]
        packed_q = self.pack(old_keys, q)
        packed_k = self.pack(old_keys, k)
        packed_v = self.pack(values[self.read], v)
        return attention(packed_q, packed_k, packed_v, long)[self.new_places]

    def pack(self, old: Tensor, new: Tensor) -> Tensor:
        packed = new.new_empty(len(self.places), *new.shape[1:])
        packed[self.old_places] = old
        packed[self.new_places] = new
        return packed


class PrefillSize(NamedTuple):
    """Lengths that a prefill is padded to, so that one CUDA graph serves all that fit them."""

    texts: int  # without the padding
    new: int  # tokens
    old: int  # keys read from a ring


# Above the largest of these the device is busy for longer than the host needs to launch a prefill.
NEW_SIZES = (128, 256, 512, 1024, 2048, 4096)
OLD_SIZES = (0, 1024, 4096)


def prefill_size(starts: list, texts: list, most_texts: int, window: int) -> PrefillSize | None:
    """The smallest size for some texts, of which rows hold `starts` ids; None if they are long."""
    new = sum(map(len, texts)) - sum(starts)
    old = sum(min(start, window) for start in starts)
    new_sizes = [size for size in NEW_SIZES if size >= new]
    old_sizes = [size for size in OLD_SIZES if size >= old]
    return PrefillSize(most_texts, new_sizes[0], old_sizes[0]) if new_sizes and old_sizes else None


def padded(array, length: int, value: int):
    return np.concatenate((array, np.full(length - len(array), value)))


def plan_ring(text_rows, starts, ends, window: int, slots: int, size: PrefillSize | None = None):
    """The RingPlan for rings of one window, in arrays.

    Args:  text_rows, starts, ends (N + 1,) int64 arrays: row of each text, how many of its tokens
           the row holds, and its length. The last text is padding, which is never stored.
    """
    count = len(text_rows) - 1
    held = np.minimum(starts, window)  # older keys are out of sight
    if size:
        held[-1] = size.old - held[:-1].sum()  # the padding takes whatever lies in its row
    lengths = held + ends - starts
    borders = np.cumsum([0, *lengths])

    # For every place of the packed texts: which text, where in it, and whether its key is old.
    text = np.repeat(np.arange(count + 1), lengths)
    place = np.arange(len(text)) - borders[text]
    position = place + (starts - held)[text]
    old = place < held[text]
    slot = text_rows[text] * slots + position % slots

    # The ring keeps the last S - 1 tokens; one slot stays free for the token that comes next.
    new_text = text[~old]
    stays = position[~old] > ends[new_text] - slots
    kept = (stays & (new_text < count)).nonzero()[0]

    # What is written for padding is what the first of these writes too.
    which = np.arange(count)
    if size:
        kept = padded(kept, size.new, kept[0])
        which = padded(which, size.texts, 0)
        borders = padded(borders, size.texts + 2, borders[-1])

    return RingPlan(
        places=place,
        borders=borders,
        old_places=old.nonzero()[0],
        new_places=(~old).nonzero()[0],
        read=slot[old],
        kept=kept,
        write=slot[~old][kept],
        first=text_rows[which] * slots + starts[which] % slots,
        next=text_rows[which] * slots + ends[which] % slots,
    )


class Pack(NamedTuple):
    """What the host prepares for a prefill: arrays of whole numbers; on the device tensors."""

    tokens: Any  # (T,) new ids of all texts, and padding
    previous: Any  # (T,) the id before each
    positions: Any  # (T,)
    first_new: Any  # (N,) of each text, among the new ids
    last_new: Any
    plans: tuple[RingPlan, RingPlan]  # of layers with a short and with a long window

    def arrays(self) -> list:
        return [*self[:5], *self.plans[0], *self.plans[1]]

    def flat(self) -> Tensor:
        """All arrays behind each other, so that one copy brings them to the device."""
        return torch.from_numpy(np.concatenate(self.arrays()))

    def over(self, flat: Tensor) -> Pack:
        """This pack as parts of a tensor that holds what flat() gave."""
        parts = flat.split([len(array) for array in self.arrays()])
        half = 5 + len(RingPlan._fields)
        return Pack(*parts[:5], (RingPlan(*parts[5:half]), RingPlan(*parts[half:])))


def to_device(array, device: torch.device) -> Tensor:
    """A tensor with the values of an array or list, without waiting for work that is under way."""
    return torch.as_tensor(array).to(device, non_blocking=True)


def plan_pack(model, cache: KVCache, rows, starts, texts, size: PrefillSize | None = None) -> Pack:
    """The arrays of a prefill, padded to a size if there is one."""
    # The new ids of all texts, and the id before each; 0 before a text, where no layer reads it.
    tokens = []
    previous = []
    for start, text in zip(starts, texts, strict=True):
        tokens += text[start:]
        previous += [0, *text[:-1]][start:]

    # Padding is one more text; sdpa_attention works in blocks of equal size.
    padding = (size.new if size else -(-len(tokens) // 128) * 128) - len(tokens)
    text_rows = np.array([*rows, rows[0]])
    starts = np.array([*starts, 0])
    ends = np.array([*map(len, texts), padding])
    borders = np.cumsum([0, *(ends - starts)])
    positions = np.concatenate([np.arange(*span) for span in zip(starts, ends, strict=True)])
    spans = (text_rows, starts, ends)
    kinds = zip(model.windows, cache.slots, strict=True)
    plans = [plan_ring(*spans, window, slots, size) for window, slots in kinds]

    count = len(rows)
    most = size.texts if size else count
    return Pack(
        tokens=padded(tokens, len(positions), 0),
        previous=padded(previous, len(positions), 0),
        positions=positions.clip(max=model.config.max_seq_len - 1),  # only padding can lie beyond
        first_new=padded(borders[:count], most, borders[0]),
        last_new=padded(borders[1 : count + 1] - 1, most, borders[1] - 1),
        plans=tuple(plans),
    )


def run_pack(model, cache: KVCache, pack: Pack, longest: list[int], weights=None) -> Tensor:
    """The work of a prefill on the device, (T, D); `longest` bounds the packed texts of each plan."""
    config = model.config
    half = config.head_dim // 2
    first_T11 = (pack.positions == 0)[:, None, None]
    attentions = [
        model.attention(model, plan.places, plan.borders.int(), bound)
        for plan, bound in zip(pack.plans, longest, strict=True)
    ]

    def attend(index, layer, q, k, v):
        long = int(layer in config.long_layers)
        plan = pack.plans[long]
        keys = cache.keys[index].flatten(0, 1)
        values = cache.values[index].flatten(0, 1)

        own_keys = k
        offset = layer in config.key_offset_layers
        if offset:
            before = torch.cat((k[:1], k[:-1]))
            # The key before the first new one: its second half waits in the slot of that one.
            before[pack.first_new] = keys[plan.first]
            k = model.offset_keys(k, before, first_T11)

        y = plan.attend(attentions[long], q, k, v, keys, values, long)
        keys[plan.write] = k[plan.kept]
        values[plan.write] = v[plan.kept]
        if offset:
            keys[plan.next, :, half:] = own_keys[pack.last_new, :, half:]
        return y

    return model.trunk(pack.tokens, pack.previous, pack.positions, attend, weights)


def prefill(model, cache: KVCache, rows: list, starts: list, texts: list, weights=None) -> Tensor:
    """Brings rows of the cache up to the given texts, all in one packed pass through the model.

    Args:    rows[i] the row of texts[i], a list of ids; starts[i] how many of them the row already
             holds, fewer than all; weights what model.layer_weights() gave, to save its time
    Returns: hidden states of the new ids, behind each other, and of some padding (T, D)
    """
    pack = plan_pack(model, cache, rows, starts, texts)
    longest = [int(np.diff(plan.borders).max()) for plan in pack.plans]
    on_device = pack.over(to_device(pack.flat(), model.embed.device))
    return run_pack(model, cache, on_device, longest, weights)


def decode(model, cache: KVCache, tokens_B, previous_B, positions_B, weights=None) -> Tensor:
    """Appends one token to each row of the cache.

    Args:    tokens_B, previous_B ids and the ids before them, int (B,); positions_B int32 (B,), -1
             for rows that rest, of which nothing changes; weights as for prefill
    Returns: logits (B, V) fp32, which mean nothing for rows that rest
    """

    def attend(index, layer, q, k, v):
        offset = layer in model.config.key_offset_layers
        return decode_attention(q, k, v, cache.keys[index], cache.values[index], positions_B, offset)

    hidden = model.trunk(tokens_B, previous_B, positions_B.clamp(min=0), attend, weights)
    return model.logits(hidden)


# ==== Sampling


def sample(logits_BV, temperature_B, top_k_B, top_p_B, seeds_B, counters_B, width, min_p_B=None):
    """One id for each row: argmax at temperature 0, else a draw from the likeliest.

    The draw is from the top_k likeliest ids, of these from the fewest whose mass reaches top_p; ids
    as likely as the last of them count too. The argmax of logits plus Gumbel noise is such a draw.

    Args:    top_k_B 0: all ids; top_p_B 1 or more: all ids; seeds_B, counters_B integers, on which
             the noise depends, and on nothing else, so a row draws the same in any batch; width how
             many logits to sort: at least top_k of every row that cuts, V if one cuts by top_p
             alone, 0 if none does; min_p_B: drops ids below this share of the largest probability
    Returns: ids (B,)
    """
    z = logits_BV / temperature_B.clamp(min=1e-6)[:, None]
    if width:
        cuts = (top_k_B > 0) | (top_p_B < 1)
        unlikely = z < least_kept(z, top_k_B, top_p_B, width)[:, None]
        z = z.masked_fill(unlikely & cuts[:, None], -math.inf)
    if min_p_B is not None:
        least = z.amax(-1) + min_p_B.log()  # min_p of 0 gives minus infinity, which cuts nothing
        z = z.masked_fill(z < least[:, None], -math.inf)
    z = z + gumbel_noise(seeds_B, counters_B, z.size(-1))
    greedy = (temperature_B == 0)[:, None]
    return torch.where(greedy, logits_BV, z).argmax(-1)


def least_kept(z_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, width: int) -> Tensor:
    """The smallest logit of each row that top_k and top_p keep, (B,)."""
    best = z_BV.topk(width).values
    place = torch.arange(width, device=best.device)
    kept = (place < top_k_B[:, None]) | (top_k_B == 0)[:, None]
    mass = best.masked_fill(~kept, -math.inf).softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    kept &= mass_before < top_p_B[:, None]  # the id that crosses top_p stays
    return best.masked_fill(~kept, math.inf).amin(-1)


class Chance(NamedTuple):
    """How likely an id was to the model, at temperature 1 and without any cut or penalty."""

    logprob: float
    best: list[tuple[int, float]]  # the likeliest ids with their logprobs, the likeliest first


CERTAIN = Chance(0.0, [])  # of the ids of a tool's result, which were not drawn


def token_chances(logits_BV: Tensor, tokens_B: Tensor, most: int) -> list[Chance]:
    """The chance of one id in each row, with the `most` likeliest ids, at least one."""
    logprobs = logits_BV.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens_B[:, None].long())[:, 0].tolist()
    best = logprobs.topk(max(most, 1))
    rows = zip(chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [Chance(one, list(zip(ids, values, strict=True))) for one, ids, values in rows]


def gumbel_noise(seeds_B: Tensor, counters_B: Tensor, vocab_size: int) -> Tensor:
    """Noise (B, V) fp32: a hash of seed, counter and id, which needs no state."""
    ids = lowbias32(torch.arange(vocab_size, device=seeds_B.device))
    rows = lowbias32((lowbias32(seeds_B) + counters_B) & 0xFFFFFFFF)
    bits = lowbias32((rows[:, None] + ids) & 0xFFFFFFFF) >> 9
    uniform = (bits.float() + 0.5) * 2**-23
    return -torch.log(-torch.log(uniform))


def lowbias32(x: Tensor) -> Tensor:
    """A hash of 32 bits, by C. Wellons; in int64, where nothing overflows."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


# ==== Completions

# The special tokens around a tool call and around its result.
MARKS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")


@dataclass
class Completion:
    """One request and its result."""

    prompt: list[int]  # BOS included
    max_tokens: int = 128
    temperature: float = 0.8  # 0: the most likely id
    top_k: int = 50  # 0: all
    top_p: float = 1.0
    stop: tuple = ()  # ids that end it; BOS always does
    seed: int = 0
    tools: bool = False  # run the calculator, if the tokenizer has the marks of calls
    # These four need a Decoder with shaping=True.
    min_p: float = 0.0  # leave out ids with less than this share of the likeliest one's probability
    presence_penalty: float = 0.0  # off the logit of an id that is in the answer
    frequency_penalty: float = 0.0  # the same, for each time that it is there
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the logits of ids
    logprobs: int | None = None  # keep the chance of each new id, and of so many likeliest ones
    score_prompt: bool = False  # with logprobs: also those of the prompt's ids
    # From the new ids so far to which may come next, booleans (V,).
    mask: Callable[[list[int]], Tensor] | None = None

    # The result: new ids without the one that ended it, and whether each came from a tool.
    tokens: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    chances: list[Chance] = field(default_factory=list)  # of each new id, with logprobs
    prompt_chances: list[Chance | None] = field(default_factory=lambda: [None])  # of the prompt's
    reason: str = ""  # why it ended: "stop" or "length"
    ended: int = -1  # the stop token

    # A tool call under way: ids of its expression so far, and ids of its result yet to be added.
    call: list[int] | None = None
    queue: list[int] = field(default_factory=list)

    def check(self, max_len: int) -> None:
        """Raises RunError if it does not fit a row for texts of max_len tokens."""
        length = len(self.prompt)
        room = max(max_len + 1 - length, 0)  # the last new token needs no place in the cache
        assert length and self.max_tokens > 0, "give at least a BOS token, and ask for one token"
        if self.max_tokens > room:
            wanted = f"a prompt of {length} tokens and {self.max_tokens} new ones"
            fewer = f" or ask for at most {room}" if room else ""
            raise RunError(f"{wanted} exceed the context of {max_len}; shorten the prompt{fewer}")

    def is_shaped(self) -> bool:
        """Whether it needs a Decoder with shaping=True."""
        penalties = self.presence_penalty or self.frequency_penalty
        return bool(self.min_p or penalties or self.logit_bias)

    def sort_width(self, vocab_size: int) -> int:
        """How many logits sample must sort for it, or GREEDY if it needs no sample."""
        if self.temperature <= 0:
            return 0 if self.is_shaped() else GREEDY
        if self.top_k:
            return min(self.top_k, vocab_size)
        return vocab_size if self.top_p < 1 else 0

    def text(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.prompt, *self.tokens] if self.tokens else self.prompt

    def accept(self, sampled: int, tokenizer, marks: list[int]) -> int | None:
        """Adds the sampled id, or that of a tool's result if one is due; None if a stop came.

        Raises: RunError if the id was drawn from logits that are not finite
        """
        by_tool = bool(self.queue)
        if by_tool:
            token = self.queue.pop(0)
        elif sampled == NOT_FINITE:
            raise RunError("the model computes logits that are not finite; name an earlier checkpoint with --step")
        elif sampled == tokenizer.bos_id or sampled in self.stop:
            self.reason = "stop"
            self.ended = sampled
            return None
        else:
            token = sampled
            if self.tools and marks:
                self.follow_call(token, tokenizer, marks)
        self.tokens.append(token)
        self.forced.append(by_tool)
        if len(self.tokens) == self.max_tokens:
            self.reason = "length"
        return token

    def follow_call(self, token: int, tokenizer, marks: list[int]) -> None:
        """Notes the ids of a tool call; at its end the result goes into the queue."""
        call_start, call_end, result_start, result_end = marks
        if token == call_start:
            self.call = []
        elif token == call_end and self.call is not None:
            result = calculate(tokenizer.decode(self.call))
            self.call = None
            if result is not None:
                self.queue = [result_start, *tokenizer.encode(result), result_end]
        elif self.call is not None:
            self.call.append(token)


class Event(NamedTuple):
    """What a step did to a row."""

    row: int
    token: int | None  # the new id; None if a stop token came
    reason: str  # as in Completion


# ==== Rows

GREEDY = -1  # a width for steps that take the most likely id in every row
WIDTHS = (GREEDY, 0, 64, 1024)  # and the whole vocabulary; on CUDA each is a graph of its own
WORTH_SHARING = 64  # ids that two texts must begin with in common before a shelf holds them
NOT_FINITE = -1  # in place of an id that was drawn from logits with NaN among them


class RowState:
    """What a step reads of each row: tensors that are only written in place.

    A CUDA graph of a step holds their addresses. Without shaping V is 0 here.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device):
        integers = torch.zeros(rows, dtype=torch.long, device=device)
        numbers = torch.zeros(rows, device=device)
        self.tokens = integers.clone()  # the id that goes in next
        self.previous = integers.clone()  # the id before it
        self.drawn = integers.clone()  # the id that the last step drew, or NOT_FINITE
        self.positions = integers.int() - 1  # of the id that goes in next; -1: the row rests
        self.top_k = integers.clone()
        self.seeds = integers.clone()
        self.temperature = numbers.clone()
        self.top_p = numbers.clone()
        self.min_p = numbers.clone()
        self.presence = numbers.clone()
        self.frequency = numbers.clone()
        # (B, V): how often each id is in the answer of a row, and what is added to its logit.
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(rows, vocab_size, device=device)

    def write(self, completions: dict[int, Completion]) -> None:
        """Sets rows so that the last id of each text goes in with the next step."""
        places = []
        samplings = []
        for c in completions.values():
            text = c.text()
            previous = text[-2] if len(text) > 1 else 0
            places.append((text[-1], previous, len(text) - 1, c.top_k, c.seed % 2**32))
            # 0 keeps the most likely token; at 1 the rounding of a sum could cut something.
            top_p = max(c.top_p, 1e-6) if c.top_p < 1 else 2
            penalties = (c.presence_penalty, c.frequency_penalty)
            samplings.append((max(c.temperature, 0), top_p, c.min_p, *penalties))

        device = self.tokens.device
        rows = to_device(list(completions), device)
        integers = to_device(np.array(places, dtype=np.int64).T, device)
        numbers = to_device(np.array(samplings, dtype=np.float32).T, device)
        names = ("tokens", "previous", "positions", "top_k", "seeds")
        names += ("temperature", "top_p", "min_p", "presence", "frequency")
        for name, column in zip(names, (*integers, *numbers), strict=True):
            tensor = getattr(self, name)
            tensor[rows] = column.to(tensor.dtype)
        self.bias[rows] = 0
        for row, completion in completions.items():
            if completion.is_shaped():
                self.write_shape(row, completion)

    def write_shape(self, row: int, completion: Completion) -> None:
        """Sets the bias of a row, and the counts to those of its answer so far.

        A step counts the id that goes in, the last of the text first, so that one is left out here.
        """
        for token, bias in completion.logit_bias.items():
            self.bias[row, token] = bias
        answer = torch.tensor(completion.tokens, dtype=torch.long)
        counts = answer.bincount(minlength=self.counts.size(1))
        counts[completion.text()[-1]] -= 1
        self.counts[row] = to_device(counts, self.counts.device)

    def apply_shape(self, logits_BV: Tensor) -> Tensor:
        """Counts the ids that go in. Returns the logits less the penalties, plus the bias."""
        live = (self.positions >= 0).to(self.counts.dtype)
        self.counts.scatter_add_(1, self.tokens[:, None], live[:, None])
        counts = self.counts.to(logits_BV.dtype)
        often = self.frequency[:, None] * counts
        present = self.presence[:, None] * (counts > 0)
        return logits_BV - often - present + self.bias


def common_length(text: list[int], other: list[int]) -> int:
    """How many first ids two texts have in common."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


def step_kind(completions, vocab_size: int) -> tuple[int, bool]:
    """What steps of these rows need: how many logits to sort, and whether any are shaped."""
    needed = max((c.sort_width(vocab_size) for c in completions), default=GREEDY)
    enough = [width for width in WIDTHS if width >= needed]
    return min([*enough, vocab_size]), any(c.is_shaped() for c in completions)


class Graphs:
    """Work between tensors that stay where they are, as CUDA graphs; each is recorded once."""

    def __init__(self):
        self.recorded: dict[Any, tuple] = {}  # by key: the graph, and what the work returned

    def run(self, key, work: Callable, *arguments):
        """What work(*arguments) does and returns; the next run may overwrite the result."""
        if key in self.recorded:
            graph, result = self.recorded[key]
            graph.replay()
            return result
        result = work(*arguments)  # recording computes nothing

        # All of them share one pool of memory, because one runs at a time.
        pool = next((graph.pool() for graph, _ in self.recorded.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.recorded[key] = (graph, work(*arguments))
        return result


class Flight(NamedTuple):
    """A step that was launched and whose ids nobody has read yet."""

    rows: dict[int, Completion]  # that it computes, without those that have ended since
    drawn: Tensor  # its ids by row, on the host; on CUDA complete after `done`
    done: torch.cuda.Event | None
    chances: list[Chance]  # by row; empty if no row wants them


# ==== Decoding


class Decoder:
    """Rows of a KV cache that decode together: a text enters a free row while others go on.

    On CUDA a step is a graph, launched at once. `compile` also fuses it, which costs half a minute
    at the first step. A Decoder is for one thread.

    With `ahead`, the default on CUDA, the next step is launched before the ids of the last are
    read, so that the device does not wait for the host. A row that meets a stop token then computes
    one id too many. That writes only into places of its rings that the next id overwrites.

    Shelves are more rows of the cache, for beginnings that several texts have in common. A text that
    begins like one of them starts with a copy of it.

    Args:  max_len tokens of the longest text, by default the model's context; shaping whether
           completions may have penalties, logit_bias and min_p; shelves how many
    """

    def __init__(self, model, tokenizer, rows: int, max_len: int = 0, compile: bool = False,
                 graph: bool = True, shaping: bool = False, shelves: int = 0,
                 ahead: bool | None = None):  # fmt: skip
        device = model.embed.device
        cuda = device.type == "cuda"
        context = model.config.max_seq_len
        self.model = model
        self.tokenizer = tokenizer
        self.rows = rows
        self.max_len = min(max_len or context, context)
        marks = [tokenizer.specials.get(name) for name in MARKS]
        self.marks = [] if None in marks else marks
        self.ahead = cuda if ahead is None else ahead
        with torch.no_grad():
            self.weights = model.layer_weights()

        self.cache = KVCache.empty(model, rows + shelves, self.max_len)
        keys = [ring[:rows] for ring in self.cache.keys]
        values = [ring[:rows] for ring in self.cache.values]
        self.row_cache = KVCache(keys, values, self.cache.slots)  # without the shelves
        self.state = RowState(rows, tokenizer.vocab_size if shaping else 0, device)
        self.shelves = list(range(rows, rows + shelves))  # what was used last is at the end

        # The ids in each row of the cache; of a live row also the next one.
        self.known = [[] for _ in range(rows + shelves)]
        self.live: dict[int, Completion] = {}
        self.flight: Flight | None = None
        self.kind = step_kind([], tokenizer.vocab_size)  # of steps of the live rows

        self.decode = torch.compile(decode) if compile else decode
        self.sample = torch.compile(sample) if compile else sample
        self.graphs = Graphs() if graph and cuda else None  # of steps, by their kind
        self.prefills = Graphs() if graph and cuda else None  # by size
        self.packs: dict[PrefillSize, tuple] = {}  # what these read: flat, and as a Pack

    @torch.no_grad()
    def refresh(self) -> None:
        """Reads the weights of the model again; texts in the cache are forgotten."""
        self.known = [[] for _ in self.known]
        self.flight = None
        for old_layer, new_layer in zip(self.weights, self.model.layer_weights(), strict=True):
            for old, new in zip(old_layer, new_layer, strict=True):
                if old is not None:
                    old.copy_(new)

    # -- texts that enter

    @torch.no_grad()
    def admit(self, completions: dict[int, Completion]) -> dict[int, int]:
        """Puts completions into rows that are not live. Returns how many ids each did not compute.

        What a row still holds of its new text is not computed again, nor what a shelf holds. The
        last id of a text goes in with the next step, which gives the first new one.

        Raises: RunError if one does not fit its row
        """
        texts = {}
        starts = {}
        for row, completion in completions.items():
            assert row not in self.live, f"row {row} is taken"
            completion.check(self.max_len)
            texts[row] = completion.text()
            # To score a prompt, all of it is computed.
            starts[row] = 0 if completion.score_prompt else self.held(row, texts[row])

        sources = self.find_shelves(completions, texts, starts)
        self.cache.clear([row for row in completions if starts[row] == 0 and row not in sources])
        self.cache.copy(sources)
        for row, shelf in sources.items():
            starts[row] = len(self.known[shelf])
        self.fill({row: text[:-1] for row, text in texts.items()}, starts, completions)

        self.state.write(completions)
        for row, text in texts.items():
            self.known[row].append(text[-1])
        self.live |= completions
        self.kind = step_kind(self.live.values(), self.tokenizer.vocab_size)
        return starts

    def held(self, row: int, text: list[int]) -> int:
        """How many ids are in a row of the cache, if a text begins with all of them and goes on."""
        known = self.known[row]
        return len(known) if len(known) < len(text) and known == text[: len(known)] else 0

    def find_shelves(self, completions: dict, texts: dict, starts: dict) -> dict[int, int]:
        """The shelf that each text should start as a copy of; fills those that are new.

        A beginning goes onto a shelf when a second text has it; the one used longest ago goes.
        """
        sources = {}
        new = {}
        others = self.known[: self.rows]
        for row, text in texts.items():
            if not self.shelves or completions[row].score_prompt:
                continue
            shelf = max(self.shelves, key=lambda shelf: self.held(shelf, text))
            longest = max(starts[row], self.held(shelf, text))
            start = text[:-1]
            common = max(common_length(start, other) for other in others)
            others.append(text)
            oldest = self.shelves[0]
            is_free = oldest not in sources.values()
            if is_free and common >= longest + WORTH_SHARING:
                shelf = oldest
                new[shelf] = self.known[shelf] = text[:common]
            if self.held(shelf, text) > starts[row]:
                self.shelves.remove(shelf)
                self.shelves.append(shelf)
                sources[row] = shelf
        self.cache.clear(list(new))
        self.fill(new, dict.fromkeys(new, 0), {})
        return sources

    def fill(self, texts: dict, starts: dict, completions: dict[int, Completion]) -> None:
        """Computes what rows lack of their texts, and the chances of prompts that want them."""
        for row in texts:
            self.known[row] = []  # should the prefill fail
        for pack in prefill_packs(texts, starts):
            held = [starts[row] for row in pack]
            hidden = self.prefill(pack, held, [texts[row] for row in pack])
            place = 0  # of a text's first new id
            for row in pack:
                end = place + len(texts[row]) - starts[row]
                if row in completions and completions[row].score_prompt:
                    self.score_prompt(completions[row], hidden[place:end])
                place = end
        for row, text in texts.items():
            self.known[row] = text

    def prefill(self, rows: list, starts: list, texts: list) -> Tensor:
        """As prefill, by a CUDA graph if one fits; the next may overwrite what it returns."""
        size = prefill_size(starts, texts, self.rows, max(self.model.windows))
        if self.prefills is None or size is None:
            return prefill(self.model, self.cache, rows, starts, texts, self.weights)
        pack = plan_pack(self.model, self.cache, rows, starts, texts, size)
        if size not in self.packs:
            flat = torch.empty_like(pack.flat(), device=self.model.embed.device)
            self.packs[size] = (flat, pack.over(flat))
        flat, on_device = self.packs[size]
        flat.copy_(pack.flat(), non_blocking=True)
        longest = [size.new + size.old] * 2
        work = (self.model, self.cache, on_device, longest, self.weights)
        return self.prefills.run(size, run_pack, *work)

    def score_prompt(self, completion: Completion, hidden_TD: Tensor) -> None:
        """Notes the chance of each id of a prompt, given the hidden state before it."""
        vocab_size = self.tokenizer.vocab_size
        after = completion.prompt[1:]
        completion.prompt_chances = [None]
        for start in range(0, len(after), 256):  # logits of all at once might not fit into memory
            tokens = to_device(after[start : start + 256], hidden_TD.device)
            logits = self.model.logits(hidden_TD[start : start + len(tokens)])[:, :vocab_size]
            chances = token_chances(logits, tokens, completion.logprobs or 0)
            completion.prompt_chances += chances

    # -- steps

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Computes one token for each live row; a row that ends is free afterwards.

        Rows that entered while a step was in flight get their first token with the next one.

        Raises: RunError if the model's logits are not finite
        """
        flight = self.flight
        self.flight = None
        if not self.live:
            return []
        if not (flight and flight.rows):
            flight = self.launch(self.live)
        rows = flight.rows

        # A tool's ids take the place of the drawn ones before they go in.
        for row, completion in rows.items():
            if completion.queue:
                self.state.tokens[row] = completion.queue[0]
        masked = any(c.mask for c in self.live.values())  # a mask depends on the ids before it
        if self.ahead and not masked:
            going_on = dict(self.live)
            for row, completion in rows.items():
                if len(completion.tokens) + 1 >= completion.max_tokens:  # its last id is in flight
                    self.state.positions[row] = -1
                    del going_on[row]
            if going_on:
                self.flight = self.launch(going_on)
        return self.accept(flight, rows)

    def launch(self, rows: dict[int, Completion]) -> Flight:
        """Starts a step. What it draws goes in with the next one, except where a tool speaks."""
        masks = {row: c.mask(c.tokens) for row, c in rows.items() if c.mask}
        if self.graphs and not masks:
            logits = self.graphs.run(self.kind, self.advance, *self.kind)
        else:
            logits = self.advance(*self.kind, masks)
        wanted = [c.logprobs for c in rows.values() if c.logprobs is not None]
        chances = token_chances(logits, self.state.tokens, max(wanted)) if wanted else []

        # Copied without waiting for the device; done is when the copy is complete.
        cuda = self.state.drawn.is_cuda
        drawn = self.state.drawn.to("cpu", non_blocking=cuda, copy=True)
        done = torch.cuda.current_stream().record_event() if cuda else None
        return Flight(dict(rows), drawn, done, chances)

    def advance(self, width: int, shaped: bool, masks: dict | None = None) -> Tensor:
        """The work of a step, between tensors that stay where they are. Gives the logits.

        Args: masks by row, bool (V,): which ids may come
        """
        state = self.state
        inputs = (state.tokens, state.previous, state.positions)
        logits = self.decode(self.model, self.row_cache, *inputs, self.weights)
        logits = logits[:, : self.tokenizer.vocab_size]  # without the padding of the vocabulary
        allowed = logits.clone() if masks else logits
        for row, mask in (masks or {}).items():
            allowed[row].masked_fill_(~mask.to(allowed.device), -math.inf)
        drawn = self.draw(allowed, width, shaped)

        # The largest of numbers with NaN among them is NaN, so NaN is what was drawn.
        broken = logits.gather(1, drawn[:, None])[:, 0].isnan()
        state.drawn.copy_(drawn).masked_fill_(broken, NOT_FINITE)
        state.previous.copy_(state.tokens)
        state.tokens.copy_(drawn)
        state.positions.add_(state.positions >= 0)
        return logits

    def draw(self, logits: Tensor, width: int, shaped: bool) -> Tensor:
        """The next id of each row, (B,): the one place where logits become ids."""
        state = self.state
        if width == GREEDY:
            return logits.argmax(-1)
        min_p = None
        if shaped:
            logits = state.apply_shape(logits)
            min_p = state.min_p
        cuts = (state.temperature, state.top_k, state.top_p, state.seeds, state.positions, width)
        return self.sample(logits, *cuts, min_p)

    def accept(self, flight: Flight, rows: dict[int, Completion]) -> list[Event]:
        """Gives the ids of a step to the completions that wait for them."""
        if flight.done:
            flight.done.synchronize()
        drawn = flight.drawn.tolist()
        events = []
        for row, completion in rows.items():
            token = completion.accept(drawn[row], self.tokenizer, self.marks)
            if token is not None and completion.logprobs is not None:
                chance = CERTAIN if completion.forced[-1] else flight.chances[row]
                completion.chances.append(chance)
            if not completion.reason:
                self.known[row].append(token)
            events.append(Event(row, token, completion.reason))

        ended = [event.row for event in events if event.reason]
        if ended:
            self.rest(ended)
        return events

    # -- rows that end

    def rest(self, rows: list[int]) -> None:
        """Ends the completions of rows; what the rows hold stays known."""
        for row in rows:
            self.state.positions[row] = -1
            del self.live[row]
            if self.flight:
                self.flight.rows.pop(row, None)
        self.kind = step_kind(self.live.values(), self.tokenizer.vocab_size)

    def stop(self, row: int) -> None:
        """Ends a row's completion early; what the row holds stays known."""
        self.rest([row])
        self.known[row].pop()  # the id that was to go in next

    def free(self, row: int) -> None:
        """Drops a row's completion, if it has one, and forgets its text."""
        if row in self.live:
            self.rest([row])
        self.known[row] = []


def prefill_packs(texts: dict[int, list[int]], starts: dict[int, int]) -> Iterator[list[int]]:
    """Rows that have something to compute, in groups of up to PREFILL_TOKENS of text."""
    waiting = [row for row, text in texts.items() if len(text) > starts[row]]
    while waiting:
        sizes = np.cumsum([len(texts[row]) for row in waiting])
        count = max(1, int((sizes <= PREFILL_TOKENS).sum()))
        yield waiting[:count]
        waiting = waiting[count:]


class Generator:
    """Continues prompts of different lengths, up to `rows` at a time.

    Options are fields of Completion. RunError says that a prompt and its answer do not fit.
    """

    def __init__(self, model, tokenizer, rows: int = 128):
        self.model = model
        self.tokenizer = tokenizer
        self.rows = rows
        self.decoder: Decoder | None = None  # of the last call, kept for its graphs

    def run(self, completions: list[Completion]) -> Iterator[list[Event]]:
        """Decodes completions, which enter free rows in turn. Yields what each step did."""
        if not completions:
            return
        decoder = self.take_decoder(completions)
        rows = decoder.rows
        waiting = completions[::-1]  # the first at the end
        try:
            for completion in completions:
                completion.check(decoder.max_len)
            while waiting or decoder.live:
                # A prefill holds the other rows up, so several texts enter together.
                free = [row for row in range(rows) if row not in decoder.live]
                if waiting and len(free) >= min(len(waiting), max(1, rows // 8)):
                    decoder.admit({row: waiting.pop() for row in free[: len(waiting)]})
                yield decoder.step()
        finally:
            for row in range(rows):
                decoder.free(row)
            self.decoder = decoder

    def take_decoder(self, completions: list[Completion]) -> Decoder:
        """The decoder of the last call if it fits these completions, else a new one."""
        rows = min(len(completions), self.rows)
        length = max(len(c.prompt) + c.max_tokens for c in completions) - 1
        if self.model.embed.is_cuda:  # sizes that fit the next call too; empty slots cost no time
            rows = 1 << (rows - 1).bit_length()
            length = self.model.config.max_seq_len

        # Taken out of self, so that a call within this one gets another decoder.
        decoder = self.decoder
        self.decoder = None
        if decoder and decoder.rows == rows and decoder.max_len >= length:
            decoder.refresh()
            return decoder
        del decoder  # frees its memory before the next one is made
        return Decoder(self.model, self.tokenizer, rows, length)

    def complete(self, prompts, seed: int = 0, **options) -> list[Completion]:
        """Continues lists of ids to their end; equal prompts draw different noise."""
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
        """Pieces of text as they become certain: a character is never split between two pieces.

        One piece for each token, which may be empty, and one more at the end.
        """
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for (event,) in self.run([Completion(ids, **options)]):
            if event.token is not None:
                yield text.decode(self.tokenizer.bytes[event.token])
        yield text.decode(b"", final=True)


# ==== Kernel
# Attention of one step of decoding. Each row writes a key and a value into its ring, as KVCache
# says, and one query looks at that ring. Rows at position -1 rest: nothing of them is written.


def use_triton(x: Tensor) -> bool:
    """The kernel runs on CUDA tensors of 16 bits from Ampere on; all else takes the plain path."""
    if triton is None or not x.is_cuda or x.itemsize > 2:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0)


def decode_attention_ref(q, k, v, keys, values, positions, offset: bool) -> Tensor:
    """Writes a key and a value into each ring, and returns what the query finds there.

    Args:    q, k, v (B, H, K), q carries the scale; keys, values (B, S, H, K), written in place;
             positions int (B,), -1 for rows that rest; offset: of a layer with key offset
    Returns: (B, H, K)
    """
    slots = keys.size(1)
    width = keys.size(3)
    row = torch.arange(len(q), device=q.device)
    live = (positions >= 0)[:, None, None]
    position = positions.clamp(min=0).long()
    slot = position % slots

    if offset:
        second_half = torch.arange(width, device=q.device) >= width // 2
        waiting = keys[row, slot]
        next_slot = (position + 1) % slots
        keys[row, next_slot] = torch.where(live & second_half, k, keys[row, next_slot])
        has_previous = (position > 0)[:, None, None]
        k = torch.where(second_half & has_previous, waiting, k)
    keys[row, slot] = torch.where(live, k, keys[row, slot])
    values[row, slot] = torch.where(live, v, values[row, slot])

    # How far behind the newest key each slot is; the oldest one is the free slot.
    behind = (position[:, None] - torch.arange(slots, device=q.device)) % slots
    seen = (behind <= position[:, None]) & (behind < slots - 1)
    ring = (keys.transpose(1, 2), values.transpose(1, 2))
    y = F.scaled_dot_product_attention(q[:, :, None], *ring, seen[:, None, None], scale=1.0)
    return y[:, :, 0]


@jit
def decode_attention_kernel(
    q, k, v, o, keys, values, positions, S, H, stride_q, stride_k, stride_v,
    OFFSET: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One row and one head a program. The new key and value are not read back from the ring."""
    row = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, D)
    p = tl.load(positions + row)
    slot = tl.maximum(p, 0) % S
    stride = H * D  # from slot to slot
    live = d < tl.where(p >= 0, D, 0)
    keys += (row.to(tl.int64) * S * H + h) * D
    values += (row.to(tl.int64) * S * H + h) * D

    # The new key and value; exp2 below needs the query times log2(e).
    Q = tl.load(q + row * stride_q + h * D + d).to(tl.float32) * 1.4426950408889634
    K = tl.load(k + row * stride_k + h * D + d)
    V = tl.load(v + row * stride_v + h * D + d)
    if OFFSET:
        second_half = d >= D // 2
        tl.store(keys + (slot + 1) % S * stride + d, K, mask=live & second_half)
        taken = second_half & (d < p * D)  # from the token before, which the first has not
        K = tl.where(taken, tl.load(keys + slot * stride + d, mask=taken, other=0.0), K)
    tl.store(keys + slot * stride + d, K, mask=live)
    tl.store(values + slot * stride + d, V, mask=live)

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
    tl.store(o + row * stride + h * D + d, (acc / total).to(o.dtype.element_ty))


DECODE_TILES = dict(BN=128, num_warps=8)


def adjacent_heads(x: Tensor) -> Tensor:
    """x (B, H, K) with the heads of a row next to each other in memory."""
    return x if x.stride()[1:] == (x.size(2), 1) else x.contiguous()


@torch.library.custom_op("decoderstack_engine::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, offset: bool
) -> Tensor:
    """As decode_attention_ref: the kernel where it runs, for K a power of two.

    It reads 4 H K bytes for each key seen.
    """
    B, H, D = q.shape
    if not use_triton(q) or D & (D - 1):
        return decode_attention_ref(q, k, v, keys, values, positions, offset)
    q, k, v = (adjacent_heads(t) for t in (q, k, v))
    o = q.new_empty(B, H, D)
    decode_attention_kernel[(B, H)](
        q, k, v, o, keys, values, positions, keys.size(1), H, q.stride(0), k.stride(0), v.stride(0),
        OFFSET=offset, D=D, **DECODE_TILES,
    )  # fmt: skip
    return o


@decode_attention.register_fake
def _(q, k, v, keys, values, positions, offset):
    return q.new_empty(q.shape)
