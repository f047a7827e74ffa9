"""A request to the engine: a prompt, its options, and the result, which grows with each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lib.calculator import calculate
from lib.command import RunError

INVALID_TOKEN = -1  # in place of an id that was sampled where the model's logits are not finite


class TokenLogprob(NamedTuple):
    """Log-probability of a token, at temperature 1 and before any cut or penalty."""

    logprob: float
    top: list[tuple[int, float]]  # the top tokens: ids and their log-probabilities, the largest first


@dataclass
class Completion:
    """One request to a Decoder. (A client's request may need several.)"""

    prompt: list[int]  # BOS included
    max_tokens: int = 128  # fewer if the context ends before
    temperature: float = 0.8  # 0: the most likely id
    top_k: int = 50  # 0: all
    top_p: float = 1.0
    stop: tuple[int, ...] = ()  # ids that end it; BOS always does
    seed: int = 0
    tools: bool = False  # run the calculator, if the tokenizer has chat_format.CALL_TOKENS
    min_p: float = 0.0  # drops ids that have less than this fraction of the largest probability
    presence_penalty: float = 0.0  # off the logit of an id that is in the answer
    frequency_penalty: float = 0.0  # the same, for each time that it is there
    repetition_penalty: float = 1.0  # divides the logit of an id in prompt or answer; multiplies it, if negative
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the logits of ids
    logprobs: int | None = None  # keep the logprob of each new id and of this many top tokens
    prompt_logprobs: bool = False  # with logprobs: also those of the prompt's ids
    mask: Any = None  # a json_schema.Mask: which ids may come next

    # The result.
    tokens: list[int] = field(default_factory=list)  # new ids, without the stop token
    forced: list[bool] = field(default_factory=list)  # whether each is part of a tool's output
    token_logprobs: list[TokenLogprob] = field(default_factory=list)  # of each, with logprobs
    prompt_token_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    reason: str = ""  # why it ended: "stop" or "length"
    stop_token: int = -1  # the id that ended it; -1: none

    # A tool call: ids of its expression so far (None: there is no call), and ids of its output still to be added.
    tool_call: list[int] | None = None
    tool_output: list[int] = field(default_factory=list)

    def fit(self, max_len: int) -> None:
        """Lowers max_tokens to what fits into sequences of max_len tokens. Raises: RunError if none does"""
        if self.max_tokens < 1:
            raise RunError(f"max_tokens is {self.max_tokens}; ask for at least 1")
        capacity = max_len + 1 - len(self.prompt)  # the cache need not hold the last new token
        if capacity < 1:
            raise RunError(f"a prompt of {len(self.prompt)} tokens exceeds the context of {max_len}; shorten it")
        self.max_tokens = min(self.max_tokens, capacity)

    def has_processors(self) -> bool:
        """Whether its logits are changed before they are sampled from."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(self.min_p or penalties or self.logit_bias)

    def is_greedy(self) -> bool:
        """Whether its ids are the argmax of the model's own logits."""
        return self.temperature <= 0 and not self.has_processors()

    def top_k_bound(self, vocab_size: int) -> int:
        """How many logits must be sorted to sample from it: 0 if none, vocab_size if all."""
        if self.temperature <= 0:
            return 0
        if self.top_k:
            return min(self.top_k, vocab_size)
        return vocab_size if self.top_p < 1 else 0

    def all_tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.prompt, *self.tokens]

    def input_token(self) -> int:
        """The id that the next step feeds to the model: the last one so far."""
        return (self.tokens or self.prompt)[-1]

    def prefill_tokens(self) -> list[int]:
        """The ids before the input token, whose keys and values a step finds in the cache."""
        return self.all_tokens()[:-1]

    def append(self, sampled: int, tokenizer, tool_ids: list[int]) -> int | None:
        """Adds the sampled id, or in its place the next id of a tool's output.

        Args:    tokenizer of the script; tool_ids of CALL_TOKENS, or empty if the tokenizer lacks them
        Returns: the id that was added; None if a stop token was sampled
        Raises:  RunError if the sampled id is INVALID_TOKEN
        """
        is_forced = bool(self.tool_output)
        token = self.tool_output.pop(0) if is_forced else sampled
        if token == INVALID_TOKEN:
            raise RunError("the model's logits are not finite; choose an earlier checkpoint with --step")
        if not is_forced and (token == tokenizer.bos_id or token in self.stop):
            # A mask may have failed: it allows the end in the middle of an answer, or more than its schema does.
            is_whole = self.mask is None or self.mask.is_valid(tokenizer.decode(self.tokens))
            self.reason = "stop" if is_whole else "length"
            self.stop_token = token
            return None
        if self.tools and tool_ids and not is_forced:
            self.follow_tool_call(token, tokenizer, tool_ids)
        self.tokens.append(token)
        self.forced.append(is_forced)
        if len(self.tokens) == self.max_tokens:
            self.reason = "length"
        return token

    def follow_tool_call(self, token: int, tokenizer, tool_ids: list[int]) -> None:
        """Collects the ids of a tool call; at its end the calculator gives tool_output."""
        call_start, call_end, output_start, output_end = tool_ids
        if token == call_start:
            self.tool_call = []
        elif token == call_end and self.tool_call is not None:
            result = calculate(tokenizer.decode(self.tool_call))
            self.tool_call = None
            if result is not None:
                self.tool_output = [output_start, *tokenizer.encode(result), output_end]
        elif self.tool_call is not None:
            self.tool_call.append(token)


class StepOutput(NamedTuple):
    """What a step gave to a slot."""

    slot: int
    token: int | None  # the new id; None if a stop token was sampled
    reason: str  # as in Completion
