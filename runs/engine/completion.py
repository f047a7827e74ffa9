"""A request to the engine: a prompt, its options and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lib.calculator import calculate
from lib.command import RunError

GREEDY = -1  # in place of a number of logits to sort: every row takes its most likely id
NOT_FINITE = -1  # in place of an id that was sampled from logits with NaN among them


class TokenLogprob(NamedTuple):
    """Log-probability of a token, at temperature 1 and before any cut or penalty."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest ids with theirs, the likeliest first


@dataclass
class Completion:
    """One request to a Decoder: a prompt, its options, and the result. (A client's request may need several.)"""

    prompt: list[int]  # BOS included
    max_tokens: int = 128  # fewer if the context ends before
    temperature: float = 0.8  # 0: the most likely id
    top_k: int = 50  # 0: all
    top_p: float = 1.0
    stop: tuple = ()  # ids that end it; BOS always does
    seed: int = 0
    tools: bool = False  # run the calculator, if the tokenizer has chat_format.CALL_TOKENS
    min_p: float = 0.0  # leave out ids with less than this share of the likeliest one's probability
    presence_penalty: float = 0.0  # off the logit of an id that is in the answer
    frequency_penalty: float = 0.0  # the same, for each time that it is there
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the logits of ids
    logprobs: int | None = None  # keep the logprob of each new id, and of so many likeliest ones
    score_prompt: bool = False  # with logprobs: also those of the prompt's ids
    mask: Any = None  # a json_answers.Mask: which ids may come next

    # The result.
    tokens: list[int] = field(default_factory=list)  # new ids, without the stop token
    forced: list[bool] = field(default_factory=list)  # whether each came from a tool
    token_logprobs: list[TokenLogprob] = field(default_factory=list)  # of each, with logprobs
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    reason: str = ""  # why it ended: "stop" or "length"
    stop_token: int = -1  # that ended it

    # A tool call under way: ids of its expression so far, and ids of its result yet to be added.
    call: list[int] | None = None
    tool_result: list[int] = field(default_factory=list)

    def fit(self, max_len: int) -> None:
        """Lowers max_tokens to what a row for sequences of max_len tokens has room for. Raises: RunError if for none"""
        room = max_len + 1 - len(self.prompt)  # the last new token needs no slot in the cache
        if room < 1:
            raise RunError(f"a prompt of {len(self.prompt)} tokens exceeds the context of {max_len}; shorten it")
        self.max_tokens = min(self.max_tokens, room)

    def has_processors(self) -> bool:
        """Whether its logits are changed before they are sampled from."""
        return bool(self.min_p or self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def num_sorted(self, vocab_size: int) -> int:
        """How many logits sample must sort for it, or GREEDY if it needs no sample."""
        if self.temperature <= 0:
            return 0 if self.has_processors() else GREEDY
        if self.top_k:
            return min(self.top_k, vocab_size)
        return vocab_size if self.top_p < 1 else 0

    def all_tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.prompt, *self.tokens] if self.tokens else self.prompt

    def last_token(self) -> int:
        """The id that goes in next."""
        return (self.tokens or self.prompt)[-1]

    def accept(self, sampled: int, tokenizer, tool_ids: list[int]) -> int | None:
        """Adds the sampled id, or that of a tool's result if one is due; None if a stop token came.

        Raises: RunError if the id was sampled from logits that are not finite
        """
        by_tool = bool(self.tool_result)
        if by_tool:
            token = self.tool_result.pop(0)
        elif sampled == NOT_FINITE:
            raise RunError("the model computes logits that are not finite; name an earlier checkpoint with --step")
        elif sampled == tokenizer.bos_id or sampled in self.stop:
            # A grammar beyond its limits allows only the end, in the middle of an answer.
            self.reason = "length" if self.mask and self.mask.is_error() else "stop"
            self.stop_token = sampled
            return None
        else:
            token = sampled
            if self.tools and tool_ids:
                self.follow_call(token, tokenizer, tool_ids)
        self.tokens.append(token)
        self.forced.append(by_tool)
        if len(self.tokens) == self.max_tokens:
            self.reason = "length"
        return token

    def follow_call(self, token: int, tokenizer, tool_ids: list[int]) -> None:
        """Collects the ids of a tool call; at its end the calculator gives tool_result."""
        call_start, call_end, result_start, result_end = tool_ids
        if token == call_start:
            self.call = []
        elif token == call_end and self.call is not None:
            result = calculate(tokenizer.decode(self.call))
            self.call = None
            if result is not None:
                self.tool_result = [result_start, *tokenizer.encode(result), result_end]
        elif self.call is not None:
            self.call.append(token)


class StepOutput(NamedTuple):
    """What a step gave a row."""

    row: int
    token: int | None  # the new id; None if a stop token came
    reason: str  # as in Completion
