"""Answers of the server that are JSON, or follow a JSON schema."""

# ruff: noqa: F811  (fixtures of another file)
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import engine
import jsonschema
import pydantic
import pytest
from engine import scheduler
from lib import json_schema

from test_serve import HELLO, base_server, chat_server, expected, model_logprobs, rendered, runs  # noqa: F401  (fixtures)

SCHEMAS = [
    {"type": "boolean"},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"enum": ["red", "é 你", 7, None]},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{3}$"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer",
     "minimum": 0, "maximum": 130}}, "required": ["name", "age"], "additionalProperties": False},
    {"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
     "more": {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": False}},
     "additionalProperties": False},
    {"anyOf": [{"const": "yes"}, {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9},
     "minItems": 1, "maxItems": 2}]},
    {"$defs": {"d": {"enum": [1, 2]}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/d"},
     "b": {"$ref": "#/$defs/d"}}, "required": ["b"], "additionalProperties": False},
    {"allOf": [{"type": "string", "format": "path"}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_follow_a_json_schema(chat_server, schema, monkeypatch):
    """8 answers of a random model are valid by another library; an answer without a schema beside them is as ever.

    Every other time steps overlap, as on a GPU.
    """
    monkeypatch.setattr(chat_server.decoder, "overlap", SCHEMAS.index(schema) % 2 == 1)
    body = {"model": "chat", "messages": HELLO, "temperature": 1.5, "seed": 1, "n": 8, "max_tokens": 120}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(chat_server.chat, model="chat", messages=HELLO, max_tokens=30, temperature=0)
        shape = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        choices = chat_server.chat(**body, response_format=shape).choices
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    wanted = expected(chat_server, [rendered(chat_server, HELLO)], max_tokens=30, temperature=0.0)
    assert [other.result().choices[0].message.content] == wanted


def ask(running, schema, **options):
    """The answer to a request for JSON of a schema."""
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    options = {"max_tokens": 100, "temperature": 1.0, "seed": 1, **options}
    return running.post({"messages": HELLO, "response_format": shape, **options})


def chain(count: int) -> dict:
    """Definitions that each refer to the next."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": links | {f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


HOSTILE = [
    ({"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(14)]}, "too much time or memory"),
    (chain(3000), "bytes; at most 65,536 are allowed"),
    ({"$ref": "#"}, "this server does not support the schema (no answer matches it)"),
    ({"type": "string", "propertyNames": {}}, 'Unimplemented keys: ["propertyNames"]'),
    ({"type": "array", "x-guidance": {"item_separator": ";"}}, "does not support x-guidance inside a schema"),
    ({"properties": {"a": {"x-guidance": {}}}}, "does not support x-guidance inside a schema"),
    ({"$defs": {"a": {"$schema": "http://json-schema.org/draft-07/schema#"}}}, "does not support $schema inside"),
    ({"oneOf": [{"type": "string"}, {"maxLength": 5}]}, "one value may fit several options of a oneOf; use anyOf"),
    ({"$defs": {"d": 5}, "$ref": "#/$defs/d"}, "the schema is invalid at $['$defs'].d (5 is not of type"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$defs": 5}, "has a value of the wrong type"),
]  # fmt: skip
# These look hostile and are not: their answers are computed in steps that are quick.
HARMLESS = [
    {"type": "string", "pattern": "(a|b)*a(a|b){30}"}, {"type": "string", "pattern": "((a{1,50}){1,50}){1,50}"},
    {"type": "string", "minLength": 10**9, "maxLength": 10**9}, {"type": "array", "minItems": 10**9},
    {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1500)}}, chain(100),
]  # fmt: skip


def test_hostile_schemas(chat_server):
    """They are refused in a sentence, or their answer ends; meanwhile others get theirs."""
    with ThreadPoolExecutor(32) as pool:
        refused = [pool.submit(ask, chat_server, schema) for schema, _ in HOSTILE]
        answered = [pool.submit(ask, chat_server, schema) for schema in HARMLESS]
        plain = [chat_server.post({"messages": HELLO, "max_tokens": 8}) for _ in range(5)]
        assert not all(call.done() for call in refused), "they block nobody"
        assert all(reply.status_code == 200 for reply in plain)
        for call, (_, message) in zip(refused, HOSTILE, strict=True):
            reply = call.result()
            found = reply.json()["error"]["message"]
            assert reply.status_code == 400 and (message in found or "too busy" in found), found
        for call in answered:
            assert call.result().json()["choices"][0]["finish_reason"] in ("stop", "length"), call.result().text


@pytest.mark.parametrize("code", ["x = bytearray(2**31)", "import os; os.kill(os.getpid(), 11)", "while True: pass"])
def test_the_compiler_is_a_process_with_limits(monkeypatch, tmp_path, code):
    """Memory, a broken stack and time end it, and nothing else."""
    source = json_schema.COMPILER.read_text(encoding="utf-8")
    (tmp_path / "compiler.py").write_text(source.replace("grammar = sys.stdin", f"{code}  # "))
    monkeypatch.setattr(json_schema, "COMPILER", tmp_path / "compiler.py")
    assert json_schema.check_grammar(code) == "it takes too much time or memory; make it simpler"


def test_answers_end(chat_server):
    """Without any limit in the schema; compact, as others write it, and valid by another library."""
    schema = {"type": "object", "required": ["name", "age", "path", "more"], "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"}, "path": {"type": "string", "format": "path"},
        "more": {"type": "array", "items": {"$ref": "#/$defs/m"}, "maxItems": 2}},
        "$defs": {"m": {"type": ["string", "null"]}}}  # fmt: skip
    choices = ask(chat_server, schema, n=8).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"]
    assert len(texts) >= 7
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
        compact = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        assert text.replace(":-0,", ":0,") == compact or "\\" in text
    pieces = chat_server.server.tokenizer.bytes
    digits = {str(i): 50 for i, piece in enumerate(pieces) if piece.isdigit()}
    letters = {str(i): 50 for i, piece in enumerate(pieces) if piece.isalpha()}
    commas = {str(i): 50 for i, piece in enumerate(pieces) if b"," in piece}
    for schema, bias in [
        ({"type": "integer"}, digits), ({"anyOf": [{"type": "number"}, {"type": "null"}]}, digits),
        ({"type": "array", "items": {}, "minItems": 3, "maxItems": 3}, digits), ({"type": "string"}, letters),
        ({"type": "string", "format": "email"}, letters), ({"type": "array", "items": {}}, commas),
        ({"type": "object", "additionalProperties": {"type": "null"}}, commas),
        ({"type": "string", "pattern": "^a.*z"}, letters),
    ]:  # fmt: skip
        (choice,) = ask(chat_server, schema, logit_bias=dict(list(bias.items())[:300])).json()["choices"]
        assert choice["finish_reason"] == "stop", choice
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    same = {"type": "json_object", "schema": {"enum": ["one"]}}
    answer = chat_server.post({"messages": HELLO, "response_format": same}).json()
    assert answer["choices"][0]["message"]["content"] == '"one"'


OPEN = {"$defs": {"d": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}}}


@pytest.mark.parametrize("schema", [
    {**OPEN, "$ref": "#/$defs/d", "properties": {"a": {"type": "null"}}, "required": ["a"]},
    {**OPEN, "anyOf": [{"$ref": "#/$defs/d"}], "type": "object", "required": ["y"]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b", "a"]},
    {"type": "object", "properties": {}, "minProperties": 1},
])  # fmt: skip
def test_properties_named_elsewhere(chat_server, schema):
    """Those that a reference, an option, `required` or `minProperties` asks for can come."""
    choices = ask(chat_server, schema, n=8).json()["choices"]
    answers = [json.loads(one["message"]["content"]) for one in choices if one["finish_reason"] == "stop"]
    assert len(answers) > 4
    for answer in answers:
        jsonschema.validate(answer, schema)


def test_an_answer_is_checked_at_its_end(chat_server, monkeypatch):
    """What breaks its schema does not end with "stop"; the check has a limit, and no pattern can make it hang."""
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 0, "maximum": 0.5,
              "exclusiveMinimum": True}  # fmt: skip
    for choice in ask(chat_server, schema, n=8).json()["choices"]:
        is_valid = float(choice["message"]["content"]) > 0
        assert choice["finish_reason"] == ("stop" if is_valid else "length")
    vocabulary = chat_server.server.protocol.vocabulary
    patterns = [{"type": "string", "pattern": pattern} for pattern in ("^(a+)+$", "^a+b$")]
    mask = json_schema.Mask.from_schema({"anyOf": patterns}, vocabulary)
    assert mask.is_valid(json.dumps("a" * 100 + "b")) and not mask.is_valid('"a') and not mask.is_valid("1")
    monkeypatch.setattr(json_schema, "CHECK_SECONDS", -1)
    assert not mask.is_valid('"aab"')


def test_schemas_beyond_ascii(monkeypatch):
    """Whatever encoding the environment has for other programs."""
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    grammar = json_schema.LLMatcher.grammar_from_json_schema(json.dumps({"enum": ["€", "名"]}, ensure_ascii=False))
    assert json_schema.check_grammar(grammar) == ""


class Recorded(scheduler.Graphs):
    """Stands for CUDA graphs: works again with the arguments of the first time, into what it returned then."""

    def run(self, key, work, *arguments):
        if key not in self.recorded:
            self.recorded[key] = (work, arguments, work(*arguments))
            return self.recorded[key][2]
        work, arguments, result = self.recorded[key]
        new = work(*arguments)
        return result if new is None else result.copy_(new)


def test_masks_beside_other_slots(chat_server):
    """Steps that overlap, and graphs, give every slot the ids that plain steps give; completions join, end and stop."""
    schemas = [None, SCHEMAS[6], None, {"type": "object"}, None, SCHEMAS[4]]
    vocabulary = chat_server.server.protocol.vocabulary
    model, tokenizer = chat_server.worker.model, chat_server.server.tokenizer

    def answers(overlap, graphs):
        generator = engine.Generator(model, tokenizer, 3)
        decoder = generator.decoder = engine.Decoder(model, tokenizer, 3)
        decoder.overlap, decoder.step_graphs = overlap, Recorded() if graphs else None
        every = [engine.Completion([1, 2, i], 9 + 7 * i, seed=i, temperature=float(i % 4 > 0), stop=(9, *range(40, 60)),
                                   logprobs=0, mask=schema and json_schema.Mask.from_schema(schema, vocabulary))
                 for i, schema in enumerate(schemas * 2)]  # fmt: skip
        for _ in generator.run(every):
            pass
        assert generator.decoder is decoder
        keys = decoder.step_graphs.recorded if graphs else ()
        return [(c.tokens, c.reason, [entry.logprob for entry in c.token_logprobs]) for c in every], keys

    (plain, _), (found, keys) = answers(False, False), answers(True, True)
    assert found == plain == answers(False, True)[0] and {"logits"} < {*keys}
    assert {reason for _, reason, _ in plain} == {"stop", "length"}


def test_grammars_beyond_limits(chat_server):
    """An answer that a grammar fails ends as too long, never as complete."""
    choices = ask(chat_server, {"type": "string", "pattern": "^(x?){500}x{500}$"}, n=6).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 6


def test_json_objects(chat_server, base_server):
    """Any object, also of a base model and in a stream; the client parses one; logprobs stay the model's own."""
    options = {"temperature": 1.2, "seed": 2, "max_tokens": 100}
    options |= {"extra_body": {"response_format": {"type": "json_object"}}}
    found = chat_server.chat(model="chat", messages=HELLO, n=3, **options).choices
    answers = [(choice.message.content, choice.finish_reason) for choice in found]
    found = base_server.text(model="base", prompt="x", n=3, **options).choices
    answers += [(choice.text, choice.finish_reason) for choice in found]
    streamed = [chunk.choices[0] for chunk in chat_server.chat(model="chat", messages=HELLO, stream=True, **options)]
    assert "".join(choice.delta.content or "" for choice in streamed) == answers[0][0]
    for text, reason in answers:
        assert reason == "stop" and isinstance(json.loads(text), dict)

    class Pair(pydantic.BaseModel):
        left: Literal["a", "b"]
        right: bool

    parse = chat_server.client.chat.completions.parse
    answer = parse(model="chat", messages=HELLO, response_format=Pair, logprobs=True)
    assert isinstance(answer.choices[0].message.parsed, Pair)
    first = answer.choices[0].logprobs.content[0]
    row = model_logprobs(chat_server, rendered(chat_server, HELLO))[-1]
    brace = row[chat_server.server.tokenizer.encode("{")[0]].item()
    assert first.token == "{" and first.logprob == pytest.approx(brace, abs=1e-3)
