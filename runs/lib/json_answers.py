"""Answers that are JSON: which ids may come next, by llguidance.

    vocabulary = lltokenizer_from_encoding(tokenizer.encoding, eos_token=stop_id)
    mask = Mask.of({"type": "object"}, vocabulary)          for engine.Completion(..., mask=mask)
"""

import json

import llguidance
import torch
from torch import Tensor

# A model that is not sure may write blanks for ever.
BLANKS = {"whitespace_pattern": r"[ \n\t]{0,20}"}


class Mask:
    """Which ids may follow those of an answer."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self.matcher = matcher
        self.num_read = 0  # ids that the matcher has consumed

    @staticmethod
    def of(schema: dict, vocabulary: llguidance.LLTokenizer) -> "Mask":
        """A mask for answers that follow a schema. Raises: ValueError if none can"""
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=BLANKS)
        mask = Mask(llguidance.LLMatcher(vocabulary, grammar, log_level=0))
        if not mask.is_error():
            mask([])  # some schemas fail only here
        if mask.is_error():
            raise ValueError(" ".join(mask.matcher.get_error().partition("<state>")[0].split()))
        return mask

    def copy(self) -> "Mask":
        return Mask(self.matcher.deep_copy())

    def is_error(self) -> bool:
        """Whether the grammar has grown beyond llguidance's limits; then nothing but the end is allowed."""
        return self.matcher.is_error()

    def __call__(self, tokens: list[int]) -> Tensor:
        """Booleans (V,), from the ids of the answer so far, which only grow."""
        self.matcher.consume_tokens(tokens[self.num_read :])
        self.num_read = len(tokens)
        allowed = bytearray(self.matcher.compute_logit_bias())
        return torch.frombuffer(allowed, dtype=torch.bool)
