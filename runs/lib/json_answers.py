"""Answers that are JSON: which ids may come next, by llguidance.

    vocabulary = lltokenizer_from_encoding(tokenizer.encoding, eos_token=stop_id)
    mask = Mask.of({"type": "object"}, vocabulary)          for engine.Completion(..., mask=mask)

A schema can be made to take minutes or all memory, or to overflow the stack. So each new one is compiled first by this
file as a program, a process with limits: it reads a grammar and prints what is wrong with it.
"""

import functools
import json
import os
import subprocess
import sys

import llguidance
from llguidance import LLMatcher

MAX_BYTES = 65536  # of a schema
COMPILE_SECONDS = 1  # of the processor
COMPILE_BYTES = 1 << 30  # of memory
COMPILE_STACK = 1 << 20  # bytes, less than the threads of a server have
WAIT_SECONDS = 20  # for the process, on a busy machine
COMPACT = {"whitespace_flexible": False}  # a model that is not sure would write blanks for ever
ANY_OBJECT = {"type": "object"}

FAR = 10**18 - 1  # the limits of integers where a schema has none
LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# Keywords that hold schemas. Parts of allOf, if and not stay as they are, as others depend on them.
SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
# Others need not be followed, says the standard.
FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}


class Mask:
    """Which ids may follow those of an answer."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher
        self.num_read = 0  # ids that the matcher has consumed

    @staticmethod
    def of(schema: dict, vocabulary: llguidance.LLTokenizer, longest: int = 10_000) -> "Mask":
        """A mask for answers that follow a schema, with `longest` characters for all strings without a limit.

        Raises: ValueError if no answer can follow it, or if it is too much work
        """
        text = json.dumps(schema)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it has {len(text):,} bytes; at most {MAX_BYTES:,} work")
        longest = max(16, longest // max(1, text.count('"string"')))
        text = json.dumps(narrow(schema, longest, closed='"allOf"' not in text))
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=COMPACT)
        problem = "" if schema == ANY_OBJECT else check_grammar(grammar)
        if not problem:
            mask = Mask(LLMatcher(vocabulary, grammar, log_level=0))
            if not mask.is_error():
                mask([])  # some schemas fail only here
            problem = mask.matcher.get_error()
        if "coerce_one_of" in problem:
            problem = "one value may fit several options of a oneOf; use anyOf"
        if "NoExtension" in problem:
            problem = "no answer can follow it"
        if problem:
            raise ValueError(" ".join(problem.partition("<state>")[0].split()))
        return mask

    def copy(self) -> "Mask":
        return Mask(self.matcher.deep_copy())

    def is_error(self) -> bool:
        """Whether the grammar has grown beyond llguidance's limits; then nothing but the end is allowed."""
        return self.matcher.is_error()

    def __call__(self, tokens: list[int]) -> bytearray:
        """A byte for each id of the vocabulary, 0 if it may not come, from the ids of the answer so far."""
        self.matcher.consume_tokens(tokens[self.num_read :])
        self.num_read = len(tokens)
        return bytearray(self.matcher.compute_logit_bias())


def narrow(schema, longest: int, closed: bool):
    """A schema whose answers end: what follows it follows the given one too.

    Strings and integers get a limit, and an object with properties has no others if `closed`.
    """
    if isinstance(schema, list):
        return [narrow(part, longest, closed) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = dict(schema)
    closed = closed and not ("properties" in schema and schema.keys() & {"anyOf", "oneOf"})  # which may name others
    for key in schema.keys() & {*SCHEMAS}:
        new[key] = narrow(schema[key], longest, closed)
    for key in schema.keys() & {*NAMED_SCHEMAS}:
        if isinstance(schema[key], dict):
            new[key] = {name: narrow(part, longest, closed) for name, part in schema[key].items()}
    if str(new.get("format")) not in FORMATS:
        new.pop("format", None)
    if new.keys() & {"enum", "const", "$ref", "allOf", "anyOf", "oneOf"}:
        return new

    kinds = new.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    least = new.get("minLength", 0)
    if "string" in kinds and not new.keys() & {"maxLength", "pattern", "format"} and type(least) is int:
        new["maxLength"] = max(longest, least)
    given = {key: new[key] for key in LIMITS if key in new}
    if "integer" in kinds and all(type(limit) in (int, float) and abs(limit) < FAR for limit in given.values()):
        if not given.keys() & {*LIMITS[:2]}:
            new["minimum"] = -FAR
        if not given.keys() & {*LIMITS[2:]}:
            new["maximum"] = FAR
    if closed and "properties" in new:
        new.setdefault("additionalProperties", False)
    return new


@functools.lru_cache(256)
def check_grammar(grammar: str) -> str:
    """What is wrong with a grammar, or "": compiles it in a process of its own."""
    pipes = {"input": grammar, "capture_output": True, "text": True}
    try:
        done = subprocess.run([sys.executable, __file__], timeout=WAIT_SECONDS, **pipes)
    except subprocess.TimeoutExpired:
        raise ValueError("this machine is too busy to compile it; try again") from None
    return "it takes too much time or memory; make it simpler" if done.returncode else done.stdout


def main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_SECONDS, COMPILE_SECONDS))
        resource.setrlimit(resource.RLIMIT_STACK, (COMPILE_STACK, COMPILE_STACK))
        resource.setrlimit(resource.RLIMIT_AS, (COMPILE_BYTES, COMPILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(10)  # answers go first
    except (ImportError, ValueError):  # Windows has no such limits, macOS not all
        pass
    grammar = sys.stdin.read()
    matcher = LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    matcher.compute_logit_bias()
    print(matcher.get_error(), end="")


if __name__ == "__main__":
    main()
