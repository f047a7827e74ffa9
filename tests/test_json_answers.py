"""Answers of the server that are JSON, or follow a JSON schema."""

# ruff: noqa: F811  (fixtures of another file)
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

from test_serve import HELLO, expected, model_logprobs, rendered, runs, talker, writer  # noqa: F401  (fixtures)

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
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_follow_a_json_schema(talker, schema, monkeypatch):
    """20 answers of a random model are valid by another library; an answer without a schema beside them is as ever.

    Every other time steps overlap, as on a GPU.
    """
    monkeypatch.setattr(talker.decoder, "overlap", SCHEMAS.index(schema) % 2 == 1)
    body = {"model": "talker", "messages": HELLO, "temperature": 1.5, "seed": 1, "n": 20, "max_tokens": 400}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(talker.chat, model="talker", messages=HELLO, max_tokens=400, temperature=0)
        shape = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        choices = talker.chat(**body, response_format=shape).choices
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    prompt = rendered(talker, HELLO)
    assert [other.result().choices[0].message.content] == expected(talker, [prompt], max_tokens=400, temperature=0.0)


def test_grammars_beyond_limits(talker):
    """A schema that fails at once is refused; an answer that a grammar fails ends as too long, never as complete."""
    def ask(schema):
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return talker.chat(model="talker", messages=HELLO, n=6, temperature=1.5, response_format=shape).choices

    with pytest.raises(openai.BadRequestError, match="response_format: this schema does not work here"):
        ask({"$ref": "#"})
    assert [c.finish_reason for c in ask({"type": "string", "pattern": "^(x?){500}x{500}$"})] == ["length"] * 6


def test_json_objects(talker, writer):
    """Any object, also of a base model and in a stream; the client parses one; logprobs stay the model's own."""
    options = {"temperature": 1.2, "seed": 2, "max_tokens": 200}
    options |= {"extra_body": {"response_format": {"type": "json_object"}}}
    found = talker.chat(model="talker", messages=HELLO, n=8, **options).choices
    answers = [(choice.message.content, choice.finish_reason) for choice in found]
    found = writer.text(model="writer", prompt="x", n=8, **options).choices
    answers += [(choice.text, choice.finish_reason) for choice in found]
    streamed = [chunk.choices[0] for chunk in talker.chat(model="talker", messages=HELLO, stream=True, **options)]
    assert "".join(choice.delta.content or "" for choice in streamed) == answers[0][0]
    for text, reason in answers:
        assert text.startswith("{") and (reason == "length" or isinstance(json.loads(text), dict))
    assert {reason for _, reason in answers} == {"stop", "length"}

    class Pair(pydantic.BaseModel):
        left: Literal["a", "b"]
        right: bool

    answer = talker.client.chat.completions.parse(model="talker", messages=HELLO, response_format=Pair, logprobs=True)
    assert isinstance(answer.choices[0].message.parsed, Pair)
    first = answer.choices[0].logprobs.content[0]
    row = model_logprobs(talker, rendered(talker, HELLO))[-1]
    brace = row[talker.server.tokenizer.encode("{")[0]].item()
    assert first.token == "{" and first.logprob == pytest.approx(brace, abs=1e-3)
