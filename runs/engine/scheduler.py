"""The loop: continuous batching."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from lib.chat_format import CALL_TOKENS
from torch import Tensor

from engine.cache import KVCache, PrefixCache, to_device
from engine.completion import GREEDY, NOT_FINITE, Completion, StepOutput, TokenLogprob
from engine.kernel import decode
from engine.prefill import (
    PREFILL_TOKENS,
    PrefillBucket,
    PrefillInputs,
    choose_bucket,
    prefill,
    prefill_batches,
    prefill_inputs,
    run_prefill,
)
from engine.sampling import RowState, StepKind, compute_logprobs, sample, step_kind

SEED_STRIDE = 0x9E3779B1  # between the seeds of prompts that are generated together


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
