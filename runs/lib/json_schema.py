"""Answers that follow a JSON schema: which ids may come next, by llguidance.

    vocabulary = lltokenizer_from_encoding(tokenizer.encoding, eos_token=stop_id)
    mask = Mask.from_schema({"type": "object"}, vocabulary)          for engine.Completion(..., mask=mask)

llguidance holds nearly all that a schema says. At its end jsonschema checks an answer: one that breaks the schema ends
with "length", never with "stop".

A schema can be made to take minutes or all memory, or to overflow the stack. So each new one is compiled first by
grammar_compiler.py, a process with limits.
"""

import functools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import referencing
from llguidance import LLMatcher

MAX_BYTES = 65536  # of a schema
COMPILER = Path(__file__).with_name("grammar_compiler.py")
COMPILER_SECONDS = 20  # on a busy machine; its own limit is much less
CHECK_SECONDS = 0.2  # for the check of an answer, while others wait for their next id
COMPACT = {"whitespace_flexible": False}  # a model that is not sure would write blanks for ever
ANY_OBJECT = {"type": "object"}

NUMBER_BYTES = b"+-.0123456789eE"
MIN_CHARS = 64  # for a string with a pattern or format, which all formats have room in
MAX_DIGITS = 16  # of a number; an id that holds three more makes 18, which fit into 64 bits
MAX_ENDING = 32  # ids of an answer that are left when its arrays and objects end
# Keywords that hold schemas, as far as llguidance has them.
SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
# Keywords that say, beside others, which properties an object may have.
OTHER_SCHEMAS = {"$ref", "anyOf", "oneOf"}
OF_OBJECTS = {"properties", "patternProperties", "additionalProperties", "required"}
# Others need not be followed, says the standard.
FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}

deadline = threading.local()  # of the check under way


class Mask:
    """Which ids may follow those of an answer."""

    def __init__(self, matcher: LLMatcher, vocabulary: llguidance.LLTokenizer, validator, num_strings: int):
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.ending_ids = ending_ids(vocabulary)
        self.validator = validator  # of jsonschema
        self.num_strings = num_strings  # in the schema, which share the ids of an answer
        self.num_read = 0  # ids that the matcher has consumed
        # The value that the answer is in the middle of.
        self.string_start: int | None = None  # where a string begins; None: it is none
        self.is_escaped = False  # the next byte of the string
        self.num_digits = 0  # of a number
        self.depth = 0  # arrays and objects around it

    @staticmethod
    def from_schema(schema: dict, vocabulary: llguidance.LLTokenizer, num_left: int = 10_000) -> "Mask":
        """A mask for answers of up to num_left ids that follow a schema.

        Raises: ValueError that says why there is none
        """
        text = json.dumps(schema)
        if len(text) > MAX_BYTES:
            raise ValueError(f"the schema has {len(text):,} bytes; at most {MAX_BYTES:,} are allowed")
        validator = make_validator(schema)
        num_strings = max(1, text.count('"string"'))
        closed = not has_combinations(schema)
        for max_chars in (max(MIN_CHARS, num_left // num_strings), None):  # None: a pattern may need more
            try:
                bounded = bound_schema(schema, max_chars, closed)
            except (TypeError, AttributeError):  # where the standard of its draft leaves a keyword of ours open
                raise ValueError("a keyword of the schema has a value of the wrong type") from None
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(bounded), overrides=COMPACT)
            problem = check_grammar(grammar)
            if not problem:
                break
        raise_problem(problem)
        mask = Mask(LLMatcher(vocabulary, grammar, log_level=0), vocabulary, validator, num_strings)
        if not mask.matcher.is_error():
            mask([], num_left)  # some schemas fail only here
        raise_problem(mask.matcher.get_error())
        return mask

    def copy(self) -> "Mask":
        """A mask of its own for another answer."""
        return Mask(self.matcher.deep_copy(), self.vocabulary, self.validator, self.num_strings)

    def __call__(self, tokens: list[int], num_left: int) -> np.ndarray:
        """Which ids may come next, uint8 (V,), 0 if one may not.

        A value ends as soon as it can: a string once it is longer than its share of what is left of the answer, a
        number after MAX_DIGITS, arrays and objects when little is left.

        Args: tokens: the answer so far; num_left: how many more it may have
        """
        self.matcher.consume_tokens(tokens[self.num_read :])
        for index in range(self.num_read, len(tokens)):
            self.read(self.vocabulary.decode_bytes([tokens[index]]), index)
        self.num_read = len(tokens)

        allowed = np.frombuffer(bytearray(self.matcher.compute_logit_bias()), np.uint8)
        ending = allowed
        if self.string_start is not None:
            length = len(tokens) - self.string_start
            if length > num_left // self.num_strings and not self.is_escaped:
                ending = allowed * self.ending_ids["string"]
        elif self.num_digits >= MAX_DIGITS:
            ending = allowed * self.ending_ids["number"]
        elif num_left < min(MAX_ENDING, (len(tokens) + num_left) // 4) + 2 * self.depth:
            ending = allowed * self.ending_ids["bracket"]
        return ending if ending.any() else allowed

    def read(self, text: bytes, index: int) -> None:
        """Follows the answer through the bytes of its id of that index."""
        for byte in text:
            if self.is_escaped:
                self.is_escaped = False
            elif byte == ord('"'):
                self.string_start = index if self.string_start is None else None
            elif self.string_start is not None:
                self.is_escaped = byte == ord("\\")
            else:
                self.depth += (byte in b"[{") - (byte in b"]}")
            is_digit = self.string_start is None and byte in NUMBER_BYTES
            self.num_digits = self.num_digits + 1 if is_digit else 0

    def is_valid(self, text: str) -> bool:
        """Whether a whole answer follows the schema."""
        deadline.time = time.monotonic() + CHECK_SECONDS
        try:
            return self.validator.is_valid(json.loads(text))
        except Exception:  # no JSON, since the grammar has grown beyond llguidance's limits; or too much work
            return False


@functools.lru_cache(2)
def ending_ids(vocabulary: llguidance.LLTokenizer) -> dict[str, np.ndarray]:
    """Which ids end a string, a number, an array or object, and begin nothing that is new: 1 or 0, uint8 (V,)."""
    texts = [vocabulary.decode_bytes([id]) for id in range(vocabulary.vocab_size)]  # special ids have none
    return {
        "string": np.array([text[:1] == b'"' and not text[1:].strip(b"]}") for text in texts], np.uint8),
        "number": np.array([not text or text[0] not in NUMBER_BYTES for text in texts], np.uint8),
        "bracket": np.array([bool(text) and not text.strip(b"]}") for text in texts], np.uint8),
    }


@functools.lru_cache(256)
def check_grammar(grammar: str) -> str:
    """What is wrong with a grammar, or "": compiles it in a process of its own."""
    pipes = {"input": grammar.encode(), "capture_output": True}  # bytes, since the locale may not be UTF-8
    try:
        done = subprocess.run([sys.executable, COMPILER], timeout=COMPILER_SECONDS, **pipes)
    except subprocess.TimeoutExpired:
        raise ValueError("this machine is too busy to compile the schema; try again") from None
    return "it takes too much time or memory; make it simpler" if done.returncode else done.stdout.decode()


def raise_problem(problem: str) -> None:
    """Raises: ValueError that says what llguidance found, in words for the author of the schema; "" raises none"""
    problem = " ".join(problem.partition("<state>")[0].split()).replace("Unsatisfiable schema", "no answer matches it")
    if "coerce_one_of" in problem:
        problem = "one value may fit several options of a oneOf; use anyOf"
    if "NoExtension" in problem:
        problem = "no answer matches it"
    if problem:
        raise ValueError(f"this server does not support the schema ({problem})")


# ---- the schema for llguidance


def has_combinations(schema) -> bool:
    """Whether several schemas together describe one object, so that each may name properties that others do not."""
    if isinstance(schema, list):
        return any(map(has_combinations, schema))
    if not isinstance(schema, dict):
        return False
    others = schema.keys() & OTHER_SCHEMAS
    is_combination = "allOf" in schema or others and len(others | schema.keys() & OF_OBJECTS) > 1
    return is_combination or any(map(has_combinations, schema.values()))


def bound_schema(schema, max_chars: int | None, closed: bool):
    """A schema whose answers end: what follows it follows the given one too.

    Args:  schema: a value of JSON, changed inside only where keywords hold schemas; max_chars for a string with a
           pattern or format; closed: whether objects get no other properties than those that are named
    """
    if isinstance(schema, list):
        return [bound_schema(part, max_chars, closed) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = dict(schema)
    for key in SCHEMAS:
        if key in schema:
            new[key] = bound_schema(schema[key], max_chars, closed)
    for key in NAMED_SCHEMAS:
        if key in schema:
            new[key] = {name: bound_schema(part, max_chars, closed) for name, part in schema[key].items()}

    if new.get("format") not in FORMATS:
        new.pop("format", None)
    if max_chars and new.keys() & {"pattern", "format"}:
        new.setdefault("maxLength", max(max_chars, new.get("minLength", 0)))

    names = new.get("properties", {}).keys()
    needs_others = set(new.get("required", ())) - names or new.get("minProperties", 0) > len(names)
    if closed and "properties" in new and not needs_others:
        new.setdefault("additionalProperties", False)
    return new


# ---- the check at the end


def make_validator(schema: dict):
    """A validator of jsonschema for answers. Raises: ValueError if that is no schema"""
    rest = {name: value for name, value in schema.items() if name != "$schema"}
    text = json.dumps(rest)
    for name in ("x-guidance", "$schema"):  # they would change how llguidance writes, and what jsonschema checks
        if f'"{name}": ' in text:
            raise ValueError(f"this server does not support {name} inside a schema")
    draft = {"$schema": str(schema.get("$schema", ""))}
    kind = jsonschema.validators.validator_for(draft, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=None)
    except jsonschema.SchemaError as error:
        raise ValueError(f"the schema is invalid at {error.json_path} ({error.message[:200]})") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    return timed(kind)(rest, registry=referencing.Registry())  # which fetches nothing


@functools.cache
def timed(kind):
    """A class of jsonschema's validators that stops at the deadline.

    It leaves patterns to the grammar, since Python's regular expressions can take for ever, and nothing stops them.
    """
    keywords = {name: functools.partial(check_keyword, check) for name, check in kind.VALIDATORS.items()}
    for name in ("pattern", "patternProperties"):
        keywords[name] = lambda validator, value, instance, schema: ()
    return jsonschema.validators.extend(kind, keywords)


def check_keyword(check, validator, value, instance, schema):
    """What a keyword of jsonschema finds wrong. Raises: TimeoutError"""
    if time.monotonic() > deadline.time:
        raise TimeoutError
    if "patternProperties" in schema and schema.get("additionalProperties") is value:
        return ()  # it would match the patterns
    return check(validator, value, instance, schema)
