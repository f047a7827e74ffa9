"""Answers that are JSON: which ids may come next, by llguidance.

    vocabulary = llguidance.LLTokenizer(Vocabulary(tokenizer, stop_id))
    mask = Mask.of({"type": "object"}, vocabulary)          for engine.Completion(..., mask=mask)
"""

import json

import llguidance
import torch
from torch import Tensor

# A model that is not sure may write blanks for ever.
BLANKS = {"whitespace_pattern": r"[ \n\t]{0,20}"}


class Vocabulary:
    """A tokenizer of this project as llguidance reads one."""

    bos_token_id = None
    is_tokenizer_wrapper = True  # llguidance asks for it

    def __init__(self, tokenizer, stop: int):
        self.tokenizer = tokenizer
        self.tokens = list(tokenizer.bytes)
        self.special_token_ids = list(tokenizer.specials.values())
        self.eos_token_id = stop

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


class Mask:
    """Which ids may follow those of an answer."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self.matcher = matcher
        self.seen = 0  # ids that the matcher knows

    @staticmethod
    def of(schema: dict, vocabulary: llguidance.LLTokenizer) -> "Mask":
        """A mask for answers that follow a schema. Raises: ValueError if none can"""
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=BLANKS)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().split()))
        return Mask(matcher)

    def copy(self) -> "Mask":
        return Mask(self.matcher.deep_copy())

    def __call__(self, tokens: list[int]) -> Tensor:
        """Booleans over the vocabulary, from the ids of the answer so far, which only grow."""
        self.matcher.consume_tokens(tokens[self.seen :])
        self.seen = len(tokens)
        allowed = bytearray(self.matcher.compute_logit_bias())
        return torch.frombuffer(allowed, dtype=torch.bool)
