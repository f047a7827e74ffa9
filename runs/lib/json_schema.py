"""Answers that follow a JSON schema: which ids may come next, by llguidance.

    vocabulary = lltokenizer_from_encoding(tokenizer.encoding, eos_token=stop_id)
    mask = Mask.from_schema({"type": "object"}, vocabulary)          for engine.Completion(..., mask=mask)

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
# Of the process that compiles a schema: seconds of the processor, bytes of memory, bytes of the stack (less than the
# threads of a server have), bytes of a core dump.
PROCESS_LIMITS = {"CPU": 1, "AS": 1 << 30, "STACK": 1 << 20, "CORE": 0}
WAIT_SECONDS = 20  # for the process, on a busy machine
COMPACT = {"whitespace_flexible": False}  # a model that is not sure would write blanks for ever
ANY_OBJECT = {"type": "object"}

MAX_INT = 10**18 - 1  # the bound of integers where a schema has none
MINIMA = ("minimum", "exclusiveMinimum")
MAXIMA = ("maximum", "exclusiveMaximum")
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
    def from_schema(schema: dict, vocabulary: llguidance.LLTokenizer, max_chars: int = 10_000) -> "Mask":
        """A mask for answers that follow a schema, with max_chars characters for all strings without a limit.

        Raises: ValueError if no answer can follow it, or if it is too much work
        """
        text = json.dumps(schema)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it has {len(text):,} bytes; at most {MAX_BYTES:,} work")
        max_chars = max(16, max_chars // max(1, text.count('"string"')))
        bounded = bound_schema(schema, max_chars, closed='"allOf"' not in text)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(bounded), overrides=COMPACT)
        if schema != ANY_OBJECT:
            raise_problem(check_grammar(grammar))
        mask = Mask(LLMatcher(vocabulary, grammar, log_level=0))
        if not mask.is_error():
            mask([])  # some schemas fail only here
        raise_problem(mask.matcher.get_error())
        return mask

    def copy(self) -> "Mask":
        """A mask of its own for another answer."""
        return Mask(self.matcher.deep_copy())

    def is_error(self) -> bool:
        """Whether the grammar has grown beyond llguidance's limits; then nothing but the end is allowed."""
        return self.matcher.is_error()

    def __call__(self, tokens: list[int]) -> bytearray:
        """A byte for each id of the vocabulary, 0 if it may not come, from the ids of the answer so far."""
        self.matcher.consume_tokens(tokens[self.num_read :])
        self.num_read = len(tokens)
        return bytearray(self.matcher.compute_logit_bias())


def raise_problem(problem: str) -> None:
    """Raises: ValueError that says what llguidance found, in words for the author of the schema; "" raises none"""
    if "coerce_one_of" in problem:
        problem = "one value may fit several options of a oneOf; use anyOf"
    if "NoExtension" in problem:
        problem = "no answer can follow it"
    if problem:
        raise ValueError(" ".join(problem.partition("<state>")[0].split()))


def bound_schema(schema, max_chars: int, closed: bool):
    """A schema whose answers end: what follows it follows the given one too.

    Args:  schema: a value of JSON, changed inside only where keywords hold schemas; max_chars for strings without a
           limit; closed: whether objects with properties get additionalProperties: false
    """
    if isinstance(schema, list):
        return [bound_schema(part, max_chars, closed) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "properties" in schema and schema.keys() & {"anyOf", "oneOf"}:
        closed = False  # the options may name other properties
    new = dict(schema)
    for key in SCHEMAS:
        if key in schema:
            new[key] = bound_schema(schema[key], max_chars, closed)
    for key in NAMED_SCHEMAS:
        if isinstance(schema.get(key), dict):
            new[key] = {name: bound_schema(part, max_chars, closed) for name, part in schema[key].items()}
    if str(new.get("format")) not in FORMATS:
        new.pop("format", None)
    if new.keys() & {"enum", "const", "$ref", "allOf", "anyOf", "oneOf"}:
        return new

    types = new.get("type")
    if not isinstance(types, list):
        types = [types]
    if "string" in types:
        bound_string(new, max_chars)
    if "integer" in types:
        bound_integer(new)
    if closed and "properties" in new:
        new.setdefault("additionalProperties", False)
    return new


def bound_string(schema: dict, max_chars: int) -> None:
    """Adds maxLength, if the length has no other limit."""
    min_length = schema.get("minLength", 0)
    if not schema.keys() & {"maxLength", "pattern", "format"} and type(min_length) is int:
        schema["maxLength"] = max(max_chars, min_length)


def bound_integer(schema: dict) -> None:
    """Adds a minimum and a maximum where there is none, if the bounds that there are lie within MAX_INT."""
    bounds = [schema[key] for key in (*MINIMA, *MAXIMA) if key in schema]
    if not all(type(bound) in (int, float) and abs(bound) < MAX_INT for bound in bounds):
        return
    if not schema.keys() & set(MINIMA):
        schema["minimum"] = -MAX_INT
    if not schema.keys() & set(MAXIMA):
        schema["maximum"] = MAX_INT


@functools.lru_cache(256)
def check_grammar(grammar: str) -> str:
    """What is wrong with a grammar, or "": compiles it in a process of its own."""
    pipes = {"input": grammar, "capture_output": True, "text": True}
    try:
        done = subprocess.run([sys.executable, __file__], timeout=WAIT_SECONDS, **pipes)
    except subprocess.TimeoutExpired:
        raise ValueError("this machine is too busy to compile it; try again") from None
    return "it takes too much time or memory; make it simpler" if done.returncode else done.stdout


def limit_process() -> None:
    """Sets each of PROCESS_LIMITS that the system has, and gives way to other processes."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, value in PROCESS_LIMITS.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (ValueError, OSError):  # macOS lacks some; or the limit is lower already
            pass
    os.nice(10)


def main() -> None:
    limit_process()
    grammar = sys.stdin.read()
    matcher = LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    matcher.compute_logit_bias()
    print(matcher.get_error(), end="")


if __name__ == "__main__":
    main()
