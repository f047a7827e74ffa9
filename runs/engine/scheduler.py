"""Continuous batching: sequences join and leave the slots of a KV cache, which decode together.

Generator decodes a list of completions; Decoder is the loop beneath it, for programs that add requests as they come.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from lib.chat_format import CALL_TOKENS
from torch import Tensor
from tqdm import tqdm

from engine.cache import KVCache, PrefixCache, SlotPlan, to_device
from engine.completion import INVALID_TOKEN, Completion, StepOutput, TokenLogprob
from engine.kernel import decode
from engine.prefill import (
    MAX_PREFILL_TOKENS,
    MAX_PREFILL_TOKENS_CUDA,
    PrefillBucket,
    PrefillInputs,
    choose_bucket,
    prefill,
    prefill_batches,
    prefill_inputs,
    run_prefill,
)
from engine.sampling import InputBatch, SamplerMode, compute_logprobs, sample_ids, sampler_mode

SEED_STRIDE = 0x9E3779B1  # between the seeds of prompts that are generated together


# ==== A list of prompts


class Generator:
    """Continues prompts of different lengths, up to num_slots at a time.

    Options are fields of Completion. RunError says that a prompt does not fit.
    """

    def __init__(self, model, tokenizer, num_slots: int = 128):
        self.model = model  # GPT of a script
        self.tokenizer = tokenizer
        self.num_slots = num_slots
        self.decoder: Decoder | None = None  # of the last call, kept for its graphs

    def run(self, completions: list[Completion]) -> Iterator[list[StepOutput]]:
        """Decodes completions, which take idle slots in turn. Yields the outputs of each step."""
        if not completions:
            return
        decoder = self.take_decoder(completions)
        waiting = completions[::-1]  # the first at the end
        try:
            while waiting or decoder.running:
                # A prefill holds the other slots up, so several requests join together.
                min_joining = min(len(waiting), max(1, decoder.num_slots // 8))
                idle = [slot for slot in range(decoder.num_slots) if slot not in decoder.running]
                if waiting and len(idle) >= min_joining:
                    decoder.add_requests({slot: waiting.pop() for slot in idle[: len(waiting)]})
                yield decoder.step()
        finally:
            for slot in range(decoder.num_slots):
                decoder.evict(slot)
            self.decoder = decoder

    def take_decoder(self, completions: list[Completion]) -> Decoder:
        """The decoder of the last call if it fits these completions, else a new one."""
        num_slots = min(len(completions), self.num_slots)
        max_len = self.model.config.max_seq_len
        if self.model.embed.is_cuda:  # sizes that fit the next call too; empty cells cost no time
            num_slots = 1 << (num_slots - 1).bit_length()
        else:
            max_len = min(max_len, max(len(c.prompt) + c.max_tokens for c in completions) - 1)

        # Taken out of self, so that a call within this one gets another decoder.
        decoder = self.decoder
        self.decoder = None
        if decoder and decoder.num_slots == num_slots and decoder.max_len >= max_len:
            decoder.reload_weights()
            return decoder
        del decoder  # frees its memory before the next one is made
        return Decoder(self.model, self.tokenizer, num_slots, max_len)

    def complete(self, completions: list[Completion], note: str = "") -> None:
        """Brings completions to their end; a note shows a progress bar on a terminal."""
        disable = None if note else True  # None: only where there is no terminal
        with tqdm(total=len(completions), desc=note, disable=disable, leave=False) as bar:
            for outputs in self.run(completions):
                bar.update(sum(bool(output.reason) for output in outputs))

    def generate(self, prompts: list[list[int]], note: str = "", seed: int = 0, **options) -> list[list[int]]:
        """The new ids of each prompt, without the stop token; equal prompts get different noise."""
        completions = []
        for i, prompt in enumerate(prompts):
            completions.append(Completion(list(prompt), seed=seed + i * SEED_STRIDE, **options))
        self.complete(completions, note)
        return [completion.tokens for completion in completions]

    def stream_text(self, prompt: str, **options) -> Iterator[str]:
        """Yields the text of each token as it comes, and a rest at the end; either may be empty.

        A character whose bytes belong to several tokens comes with the last of them.
        """
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        detokenizer = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for (output,) in self.run([Completion(ids, **options)]):
            if output.token is not None:
                yield detokenizer.decode(self.tokenizer.bytes[output.token])
        yield detokenizer.decode(b"", final=True)


# ==== Requests that come and go


class PendingStep(NamedTuple):
    """A step that was launched and whose tokens the host has not read yet."""

    completions: dict[int, Completion]  # by slot; those that are released meanwhile are taken out
    sampled: Tensor  # (B,) ids, on the host; on CUDA complete after `done`
    done: torch.cuda.Event | None
    logprobs: list[TokenLogprob]  # by slot; empty if no completion wants them


class Decoder:
    """Slots of a KV cache that decode together; requests join and leave at any step.

    On CUDA a step is two graphs. `compile` also fuses their work and that of prefills, which costs half a minute or
    more. A Decoder is for one thread.

    With `overlap`, as on CUDA, step n + 1 is launched before the tokens of step n are read, so that the device does not
    wait for the host. A slot that meets a stop token then computes one token too many. That writes only into cells of
    its rings that the next token overwrites.

    Args:  model, tokenizer: GPT and Tokenizer of a script; max_len: maximum tokens of a sequence, by default the
           model's context; prefix_slots: slots of the cache beside num_slots, for prefixes that several prompts share
    """

    def __init__(self, model, tokenizer, num_slots: int, max_len: int | None = None, compile: bool = False,
                 prefix_slots: int = 0):  # fmt: skip
        device = model.embed.device
        cuda = device.type == "cuda"
        context = model.config.max_seq_len
        self.model = model
        self.tokenizer = tokenizer
        self.num_slots = num_slots
        self.max_len = min(max_len or context, context)
        self.max_prefill_tokens = MAX_PREFILL_TOKENS_CUDA if cuda else MAX_PREFILL_TOKENS
        tool_ids = [tokenizer.specials.get(name) for name in CALL_TOKENS]
        self.tool_ids = [] if None in tool_ids else tool_ids
        self.overlap = cuda
        with torch.no_grad():
            self.layer_weights = model.layer_weights()

        self.cache = KVCache.empty(model, num_slots + prefix_slots, self.max_len)
        self.prefix_cache = PrefixCache(num_slots, prefix_slots)
        self.batch = InputBatch(num_slots, tokenizer.vocab_size, device)
        self.running: dict[int, Completion] = {}  # by slot; the other slots are idle
        self.mode = sampler_mode([], tokenizer.vocab_size)  # of steps of the running slots
        self.pending: PendingStep | None = None

        self.run_prefill = torch.compile(run_prefill, dynamic=True) if compile else run_prefill
        self.decode = torch.compile(decode) if compile else decode
        self.sampler = torch.compile(sample_ids) if compile else sample_ids
        self.step_graphs = Graphs() if cuda else None  # "logits", and of sample_on_device by SamplerMode
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
        """Prefills completions, which then run in these slots.

        The last id of a prompt is the input token of the next step, which gives the first new one.

        Returns: {slot: how many ids of its sequence earlier requests had left in the cache}
        Raises:  RunError if a prompt does not fit its slot
        """
        plans = []
        reusing = []  # the plans that may start from what the cache holds
        for slot, completion in completions.items():
            assert slot not in self.running, f"slot {slot} is taken"
            completion.fit(self.max_len)
            plan = SlotPlan(slot, completion.prefill_tokens(), completion=completion)
            plans.append(plan)
            if not completion.prompt_logprobs:  # they need all of the prompt's hidden states
                plan.num_cached = self.prefix_cache.match(slot, plan.ids)
                reusing.append(plan)

        new_prefixes = self.prefix_cache.choose_prefixes(reusing)
        self.fill(new_prefixes)
        self.cache.copy({plan.slot: plan.source for plan in plans if plan.source is not None})
        self.fill(plans)

        self.batch.set_slots(completions)
        self.running |= completions
        self.mode = sampler_mode(self.running.values(), self.tokenizer.vocab_size)

        # A prefix that was computed just now does not count.
        computed_now = {plan.slot for plan in new_prefixes}
        return {plan.slot: 0 if plan.source in computed_now else plan.num_cached for plan in plans}

    def fill(self, plans: list[SlotPlan]) -> None:
        """Computes what slots of the cache lack, and the logprobs of prompts that want them."""
        self.cache.clear([plan.slot for plan in plans if plan.num_cached == 0])
        for plan in plans:
            self.prefix_cache.tokens[plan.slot] = []  # should the prefill fail
        for together in prefill_batches(plans, self.max_prefill_tokens):
            hidden_TD = self.prefill_batch(together)
            start = 0  # of a sequence's new ids
            for plan in together:
                end = start + len(plan.ids) - plan.num_cached
                if plan.completion and plan.completion.prompt_logprobs:
                    self.compute_prompt_logprobs(plan.completion, hidden_TD[start:end])
                start = end
        for plan in plans:
            self.prefix_cache.tokens[plan.slot] = plan.ids

    def prefill_batch(self, plans: list[SlotPlan]) -> Tensor:
        """Hidden states (T, D), as the function prefill gives them, by a CUDA graph if one fits.

        The next call may overwrite them.
        """
        slots = [plan.slot for plan in plans]
        num_cached = [plan.num_cached for plan in plans]
        sequences = [plan.ids for plan in plans]
        bucket = choose_bucket(num_cached, sequences, self.num_slots, max(self.model.windows))
        if self.prefill_graphs is None or bucket is None:
            weights = self.layer_weights
            return prefill(self.model, self.cache, slots, num_cached, sequences, weights, self.run_prefill)

        inputs = prefill_inputs(self.model, self.cache, slots, num_cached, sequences, bucket)
        if bucket not in self.graph_inputs:
            flat = torch.empty_like(inputs.flat(), device=self.model.embed.device)
            self.graph_inputs[bucket] = (flat, inputs.views(flat))
        flat, on_device = self.graph_inputs[bucket]
        flat.copy_(inputs.flat(), non_blocking=True)
        arguments = (self.model, self.cache, on_device, bucket.new + bucket.old, self.layer_weights)
        return self.prefill_graphs.run(bucket, self.run_prefill, *arguments)

    def compute_prompt_logprobs(self, completion: Completion, hidden_TD: Tensor) -> None:
        """Sets the logprob of each id of a prompt, given the hidden state before it."""
        vocab_size = self.tokenizer.vocab_size
        targets = completion.prompt[1:]
        completion.prompt_token_logprobs = [None]  # also of one that was preempted, whose prompt is computed again
        for start in range(0, len(targets), 256):  # logits of all at once might not fit into memory
            tokens = to_device(targets[start : start + 256], hidden_TD.device)
            logits = self.model.logits(hidden_TD[start : start + len(tokens)])[:, :vocab_size]
            completion.prompt_token_logprobs += compute_logprobs(logits, tokens, completion.logprobs or 0)

    # -- one step

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """One token for each running slot; a slot whose completion ends is idle afterwards.

        With overlap, step n + 1 is launched (execute_model, sample) before the tokens of step n are read (update).
        Requests that joined while step n was pending get their first token with step n + 1.

        Raises: RunError if the model's logits are not finite
        """
        current = self.pending
        self.pending = None
        if not self.running:
            return []
        if current is None or not current.completions:  # there is none, or its requests have left
            current = self.sample(self.running, self.execute_model())
        self.force_tool_outputs(current)

        following = self.schedule(current) if self.overlap else {}
        if not following:
            return self.update(current)
        logits = self.execute_model()
        if not self.mode.masks:
            self.pending = self.sample(following, logits)
            return self.update(current)

        # Masks say which ids may follow those of this step, so these are read before the next are sampled.
        outputs = self.update(current)
        following = {slot: completion for slot, completion in following.items() if not completion.reason}
        if following:
            self.pending = self.sample(following, logits)
        return outputs

    def force_tool_outputs(self, current: PendingStep) -> None:
        """Puts ids of tool outputs in place of sampled ones, as input tokens of the next step.

        The host has read the id that ended the call, so the output is there.
        """
        for slot, completion in current.completions.items():
            if completion.tool_output:
                self.batch.force(slot, completion.tool_output[0])

    def schedule(self, current: PendingStep) -> dict[int, Completion]:
        """The completions of the next step: all but those whose last token is pending, whose slots become idle."""
        completions = dict(self.running)
        for slot, completion in current.completions.items():
            if len(completion.tokens) + 1 >= completion.max_tokens:
                self.batch.positions[slot] = -1
                del completions[slot]
        return completions

    def execute_model(self) -> Tensor:
        """The logits (B, V) after the input tokens, before masks and processors. The next call may overwrite them."""
        batch = self.batch
        inputs = (self.cache, batch.tokens, batch.prev_ids, batch.positions, self.layer_weights)
        logits = self.run_graph("logits", self.decode, self.model, *inputs)
        return logits[:, : self.tokenizer.vocab_size]  # without the padding of the vocabulary

    def sample(self, completions: dict[int, Completion], logits: Tensor) -> PendingStep:
        """Samples an id for each slot from logits (B, V), without waiting for the device."""
        self.batch.set_masks(completions)
        self.run_graph(self.mode, self.sample_on_device, self.mode, logits)
        logprobs = []
        num_top = [c.logprobs for c in completions.values() if c.logprobs is not None]
        if num_top:  # of the ids just sampled, which are input tokens now
            logprobs = compute_logprobs(logits, self.batch.tokens, max(num_top))

        # Copied without waiting; done is when the copy is complete.
        cuda = self.batch.sampled.is_cuda
        sampled = self.batch.sampled.to("cpu", non_blocking=cuda, copy=True)
        done = torch.cuda.current_stream().record_event() if cuda else None
        return PendingStep(dict(completions), sampled, done, logprobs)

    def sample_on_device(self, mode: SamplerMode, logits: Tensor) -> None:
        """The device's part of sample(): from logits (B, V) to the input tokens of the next step."""
        batch = self.batch
        scores = logits.masked_fill(batch.forbidden, -math.inf) if mode.masks else logits
        if mode.processors:
            scores = batch.process_logits(scores)
        if mode.is_greedy:
            sampled = scores.argmax(-1)
        else:
            cuts = (batch.temperature, batch.top_k, batch.top_p)
            noise = (batch.seeds, batch.positions)
            min_p = batch.min_p if mode.processors else None
            sampled = self.sampler(scores, *cuts, *noise, mode.top_k_bound, min_p)

        # If a logit is NaN or infinite, that is what was sampled. x - x is 0 for finite numbers only.
        logit = logits.gather(1, sampled[:, None])[:, 0]
        batch.sampled.copy_(sampled).masked_fill_(logit - logit != 0, INVALID_TOKEN)
        if mode.processors:
            batch.count(sampled)
        batch.advance(sampled)

    def update(self, current: PendingStep) -> list[StepOutput]:
        """Reads the ids of a step and gives them to its completions. Raises: RunError, as of step"""
        if current.done:
            current.done.synchronize()
        sampled = current.sampled.tolist()
        outputs = []
        for slot, completion in current.completions.items():
            self.prefix_cache.tokens[slot].append(completion.input_token())  # which this step computed
            token = completion.append(sampled[slot], self.tokenizer, self.tool_ids)
            if token is not None and completion.logprobs is not None:
                is_forced = completion.forced[-1]
                logprob = TokenLogprob(0.0, []) if is_forced else current.logprobs[slot]
                completion.token_logprobs.append(logprob)
            outputs.append(StepOutput(slot, token, completion.reason))
        ended = [output.slot for output in outputs if output.reason]
        if ended:
            self.release(ended)
        return outputs

    def run_graph(self, key, work: Callable, *arguments):
        """As Graphs.run, where there are graphs."""
        return self.step_graphs.run(key, work, *arguments) if self.step_graphs else work(*arguments)

    # -- requests leave

    def release(self, slots: list[int]) -> None:
        """Makes slots idle, whether their completions have ended or not. The prefix cache keeps what they hold."""
        for slot in slots:
            self.batch.positions[slot] = -1
            del self.running[slot]
            if self.pending:
                self.pending.completions.pop(slot, None)
        self.mode = sampler_mode(self.running.values(), self.tokenizer.vocab_size)

    def evict(self, slot: int) -> None:
        """Releases a slot, if it is running, and drops its ids from the prefix cache."""
        if slot in self.running:
            self.release([slot])
        self.prefix_cache.tokens[slot] = []


# ==== CUDA graphs


class Graphs:
    """Work between tensors that stay where they are, as CUDA graphs; each is recorded once."""

    def __init__(self):
        self.recorded: dict[Any, tuple] = {}  # by key: the graph, and what the work returned

    def run(self, key, work: Callable, *arguments) -> Tensor | None:
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
        # A copy, because recording computed nothing and each run of a key returns the same tensor.
        return result if first is None else result.copy_(first)
