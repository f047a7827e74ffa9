"""OpenAI's protocol without the network: requests, their checks, and the JSON of their answers.

Protocol turns the JSON of a request into a Request, which has a Sequence for each answer. A Detokenizer turns the ids
of a sequence into text, and Answers turn that into JSON. An APIError is what a client gets in place of an answer.
"""

import asyncio
import codecs
import difflib
import itertools
import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import engine
import pydantic_core
from lib import chat_format, json_schema
from lib.chat_format import Detokenizer
from llguidance.tiktoken import lltokenizer_from_encoding
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse

MAX_CHOICES = 64  # answers to one request
MAX_TOP_LOGPROBS = 20  # top tokens beside each token of an answer
# Fields that a request has in common with engine.Completion.
SAMPLING = {
    "temperature", "top_p", "min_p", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"
}  # fmt: skip


class APIError(Exception):
    """An error in the form of OpenAI's, for the client."""

    def __init__(self, status: int, message: str, param: str = "", code: str | None = None):
        super().__init__(message)
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param or None, "code": code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


# ---- requests and their answers


@dataclass(eq=False)
class Sequence:
    """One answer. The model's thread writes it, and that of the event loop reads it."""

    index: int  # among the choices of its request
    completion: engine.Completion
    detokenizer: Detokenizer
    echo_only: bool = False  # max_tokens is 0: only the prompt is shown
    request: "Request | None" = None
    num_cached: int | None = None  # token ids of the prompt that were in the cache; None: it had no slot yet
    deltas: deque[tuple[str, str]] = field(default_factory=deque)  # not sent yet: (part, text)
    reason: str = ""  # why it ended: "stop" or "length"

    # What the client of a stream has of it.
    end_sent: bool = False  # the reason why it ended
    num_logprobs_sent: int = 0  # logprobs of so many tokens
    offset_decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    text_offset: int = 0  # characters of these tokens

    def add_output(self, output: engine.StepOutput) -> None:
        """Turns the token of a step into text. A stop string ends the answer."""
        if output.token is not None and not self.echo_only:
            self.deltas.extend(self.detokenizer.add(output.token, self.completion.forced[-1]))
        if output.reason and not self.detokenizer.stopped and not self.echo_only:
            self.deltas.extend(self.detokenizer.finish())
        self.reason = "stop" if self.detokenizer.stopped else output.reason


@dataclass(eq=False)
class Request:
    """A request after its checks."""

    sequences: list[Sequence]
    fields: "ChatFields | TextFields"
    logprobs: int | None  # number of top tokens beside each token; None: no logprobs

    # For the model's thread: sequences without a slot, and how many have one.
    waiting: deque[Sequence] = field(default_factory=deque)
    num_running: int = 0
    aborted: bool = False  # its client has disconnected
    arrival: float = field(default_factory=time.monotonic)

    error: APIError | None = None
    updated: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self):
        self.waiting.extend(self.sequences)
        for sequence in self.sequences:
            sequence.request = self

    async def wait(self) -> None:
        """Waits until something of it has changed, by however many steps. Raises: APIError"""
        await self.updated.wait()
        self.updated.clear()
        if self.error and (self.aborted or not self.done()):
            raise self.error

    def done(self) -> bool:
        """Whether all of its answers have ended."""
        return all(sequence.reason for sequence in self.sequences)


# ---- the fields of a request


def as_list(value: Any) -> Any:
    """One text, or the ids of one, as a list of one."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
    return [value] if is_one else value


def join_parts(value: Any) -> Any:
    """The text of a message's content, which may come in parts or be null."""
    if not isinstance(value, list):
        return value or ""
    for part in value:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise PydanticCustomError("part", 'Parts can only be {"type": "text", "text": ...}')
    return "".join(part["text"] for part in value)


class JsonSchema(BaseModel, strict=True):
    given: dict = Field(alias="schema")


class PlainFormat(BaseModel, strict=True):
    type: Literal["text", "json_object"] = "text"
    given: dict = Field(json_schema.ANY_OBJECT, alias="schema")  # as llama.cpp has it, of a json_object


class SchemaFormat(BaseModel, strict=True):
    type: Literal["json_schema"]
    json_schema: JsonSchema


AnyFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]
Ids = Annotated[list[int], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedId = Annotated[int, Field(ge=0, strict=False)]  # a text, as keys of JSON are
# Fields of other servers that would change an answer, with values that change nothing. No empty value does.
UNSUPPORTED = {
    "suffix": (), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "grammar": (),
    "structured_outputs": (), "json_schema": (), "min_tokens": (), "ignore_eos": (), "stop_token_ids": (),
    "best_of": (1,),
}  # fmt: skip
TOOLS = {"tools": (), "functions": (), "tool_choice": ("none", "auto"), "function_call": ("none", "auto")}


class Message(BaseModel, strict=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(join_parts)] = ""


class AnswerFields(BaseModel, strict=True, allow_inf_nan=False):
    """What requests for answers have in common. Fields that are not here are ignored, but for near misses."""

    model: str = ""
    temperature: float = Field(engine.Completion.temperature, ge=0, le=2)
    top_p: float = Field(engine.Completion.top_p, ge=0, le=1)
    top_k: int = Field(engine.Completion.top_k, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    # As vLLM and transformers call it; llama.cpp has the other name.
    repetition_penalty: float = Field(
        1.0, ge=0.1, le=10, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: dict[BiasedId, Bias] = Field({}, max_length=300)
    stop: Annotated[list[StopString], Field(max_length=4), BeforeValidator(as_list)] = []
    seed: int = Field(default_factory=lambda: random.getrandbits(32), ge=-(2**63), le=2**63 - 1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: dict = {}
    response_format: AnyFormat = PlainFormat()


class ChatFields(AnswerFields):
    source: ClassVar = "messages"  # the field with the prompt
    messages: list[Message] = Field(min_length=1)
    # -1: as many as fit
    max_tokens: int = Field(-1, ge=-1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)


class TextFields(AnswerFields):
    source: ClassVar = "prompt"
    prompt: Annotated[list[str | Ids], Field(min_length=1), BeforeValidator(as_list)]
    max_tokens: int = Field(16, ge=-1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


def read_fields(kind: type[BaseModel], data: bytes) -> BaseModel:
    """The fields of a request from its JSON. Raises: APIError, about the first that is wrong or not supported"""
    try:
        body = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"the request is not valid JSON ({error})") from None
    if isinstance(body, dict):  # null is as good as none
        body = {name: value for name, value in body.items() if value is not None}
    try:
        fields = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "missing" else f", found {shorten(first['input'])}"
        raise APIError(400, f"{name or 'the request'}: {first['msg']}{value}", name) from None

    for name, harmless in (UNSUPPORTED | TOOLS).items():
        value = body.get(name)
        if value and value not in harmless:
            advice = "ask for JSON with response_format instead" if name in TOOLS else "omit it"
            raise APIError(400, f"{name} is not supported by this server, found {shorten(value)}; {advice}", name)
    known = {*UNSUPPORTED, *TOOLS}
    for name, described in kind.model_fields.items():
        known.update(described.validation_alias.choices if described.validation_alias else [name])
    for name in sorted(body.keys() - known)[:50]:  # a client may send 100,000
        for similar in difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise APIError(400, f"{shorten(name)} is not a request field; did you mean {similar}?", name)
    return fields


def shorten(value: Any) -> str:
    """A value of a request, for a message about it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class Protocol:
    """Checks requests for one model, and turns their texts into ids.

    Args:  name of the model; tokenizer: Tokenizer of a script; max_len: tokens of the context; chat: whether the model
           was finetuned for it; max_choices: answers to one request, at most MAX_CHOICES
    """

    def __init__(self, name: str, tokenizer, max_len: int, chat: bool, max_choices: int):
        self.name = name
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.chat = chat
        self.max_choices = min(MAX_CHOICES, max_choices)
        self.special_ids = set(tokenizer.specials.values())
        tools = {tokenizer.specials.get(name) for name in chat_format.CALL_TOKENS} if chat else set()
        self.stops = tuple(sorted(self.special_ids - tools))
        end = tokenizer.specials[chat_format.ASSISTANT_END] if chat else tokenizer.bos_id
        self.vocabulary = lltokenizer_from_encoding(tokenizer.encoding, eos_token=end)

    def prepare_chat(self, data: bytes) -> Request:
        """Checks a request for the next answer of a conversation. Raises: APIError"""
        fields = read_fields(ChatFields, data)
        logprobs = fields.top_logprobs if fields.logprobs else None
        return self.make_request(fields, [self.render(fields.messages)], logprobs)

    def prepare_texts(self, data: bytes) -> Request:
        """Checks a request for the continuation of texts. Raises: APIError"""
        fields = read_fields(TextFields, data)
        prompts = [self.prompt_ids(prompt) for prompt in fields.prompt]
        request = self.make_request(fields, prompts, fields.logprobs, fields.echo)
        for sequence in request.sequences if fields.echo else ():
            ids = [id for id in sequence.completion.prompt if id not in self.special_ids]
            sequence.deltas.append(("text", self.tokenizer.decode(ids)))
        return request

    def make_request(self, fields: AnswerFields, prompts, logprobs, echo: bool = False) -> Request:
        """The answers to some prompts. Raises: APIError"""
        count = fields.n * len(prompts)
        if fields.model not in ("", self.name):
            problem = f"there is no model {shorten(fields.model)} here, only {self.name}"
            raise APIError(404, problem, "model", "model_not_found")
        if count > self.max_choices:
            raise APIError(400, f"the request asks for {count:,} answers; at most {self.max_choices} are allowed", "n")
        max_tokens = fields.max_tokens if fields.max_tokens >= 0 else self.max_len
        self.check_ids(fields.logit_bias, "logit_bias")
        sampling = fields.model_dump(include=SAMPLING)
        sequences = []
        for prompt in prompts:
            if len(prompt) > self.max_len:
                problem = f"the context of this model is {self.max_len:,} tokens but the prompt has {len(prompt):,}"
                raise APIError(400, f"{problem}; shorten it", fields.source, "context_length_exceeded")
            for _ in range(fields.n):
                completion = engine.Completion(
                    prompt,
                    max_tokens=max(max_tokens, 1),
                    stop=self.stops,
                    tools=self.chat and fields.response_format.type == "text",
                    seed=fields.seed + len(sequences) * engine.SEED_STRIDE,
                    logprobs=logprobs,
                    prompt_logprobs=echo and logprobs is not None,
                    top_k=min(fields.top_k, self.tokenizer.vocab_size),
                    **sampling,
                )
                completion.fit(self.max_len)
                detokenizer = Detokenizer(self.tokenizer, tuple(fields.stop))
                sequences.append(Sequence(len(sequences), completion, detokenizer, echo_only=max_tokens == 0))
        return Request(sequences, fields, logprobs)

    def set_masks(self, request: Request) -> None:
        """Sets which ids the answers may hold, as they must be JSON; this can take seconds. Raises: APIError"""
        response_format = request.fields.response_format
        if response_format.type == "json_schema":
            schema = response_format.json_schema.given
        else:
            schema = response_format.given
        try:
            num_left = min(sequence.completion.max_tokens for sequence in request.sequences)
            mask = json_schema.Mask.from_schema(schema, self.vocabulary, num_left)
        except ValueError as error:
            raise APIError(400, f"response_format: {error}", "response_format") from None
        for sequence in request.sequences:
            sequence.completion.mask = mask.copy()

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Checks that the tokenizer has all ids of a field. Raises: APIError that names the field, param"""
        largest = self.tokenizer.vocab_size - 1
        if not all(0 <= id <= largest for id in ids):
            raise APIError(400, f"{param} contains ids outside 0 to {largest:,}", param)

    def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """One prompt as ids; ids are used as they are. Raises: APIError"""
        if isinstance(prompt, str):
            return [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        self.check_ids(prompt, "prompt")
        return prompt

    def render(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation up to its next answer, as chat_format.render gives them. Raises: APIError"""
        if not self.chat:
            advice = "use /v1/completions to continue a text, or finetune it with runs/finetune.py"
            raise APIError(400, f"{self.name} was not finetuned for chat; {advice}", "model", "not_a_chat_model")
        try:
            turns = chat_format.merge_turns((message.role, message.content) for message in messages)
        except ValueError as error:
            raise APIError(400, str(error), "messages") from None
        return chat_format.render(self.tokenizer, turns)


# ---- answers


def server_sent_event(body: dict) -> str:
    return f"data: {json.dumps(body)}\n\n"


class Answers:
    """The JSON of the answers to one request.

    A subclass has the form of an endpoint, as parts of a choice: content(text) a complete answer; delta(text, part)
    what is new in a stream, without arguments nothing; logprobs_json(sequence, tokens) the logprobs of the next tokens,
    pairs of an id and its engine.TokenLogprob.
    """

    def __init__(self, request: Request, model: str, tokenizer):
        self.request = request
        self.tokenizer = tokenizer
        self.with_usage = request.fields.stream_options.get("include_usage")  # in a stream
        self.head = {
            "id": f"{self.id_prefix}-{random.getrandbits(96):024x}",
            "object": self.stream_object if request.fields.stream else self.object,
            "created": int(time.time()),
            "model": model,
        }
        self.event_head = self.head | {"usage": None} if self.with_usage else self.head

    def first_events(self) -> str:
        """The events of a stream before the first token."""
        return ""

    def body(self) -> dict:
        """The answer to a request without stream, once all sequences are done."""
        choices = []
        for sequence in self.request.sequences:
            text = "".join(text for _, text in sequence.deltas)
            choice = {"index": sequence.index, **self.content(text)}
            choices.append(choice | {"logprobs": self.new_logprobs(sequence), "finish_reason": sequence.reason})
        return self.head | {"choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answers as server-sent events. What came while the client was slow goes out at once."""
        text = self.first_events()
        try:
            while True:
                is_done = self.request.done()  # read first, as the model's thread continues
                text += "".join(self.new_events(sequence) for sequence in self.request.sequences)
                if is_done:
                    break
                if text:
                    yield text
                text = ""
                await self.request.wait()
        except APIError as error:
            yield server_sent_event(error.body)
            return
        if self.with_usage:
            text += server_sent_event(self.head | {"choices": [], "usage": self.usage()})
        yield f"{text}data: [DONE]\n\n"

    def new_events(self, sequence: Sequence) -> str:
        """The events for what is new of a sequence; deltas of one part in a row go together."""
        reason = sequence.reason  # read first, as the model's thread sets it after the last delta
        deltas = [sequence.deltas.popleft() for _ in range(len(sequence.deltas))]
        events = []
        for part, group in itertools.groupby(deltas, key=lambda delta: delta[0]):
            delta = self.delta("".join(text for _, text in group), part)
            events.append(self.event(sequence, delta, self.new_logprobs(sequence)))
        if reason and not sequence.end_sent:
            sequence.end_sent = True
            events.append(self.event(sequence, self.delta(), self.new_logprobs(sequence), reason))
        return "".join(events)

    def event(self, sequence: Sequence, delta: dict, logprobs: dict | None = None, reason: str | None = None) -> str:
        choice = {"index": sequence.index, **delta, "logprobs": logprobs, "finish_reason": reason}
        return server_sent_event(self.event_head | {"choices": [choice]})

    def usage(self) -> dict:
        """Tokens of the request. A prompt counts once, however many answers it has."""
        new = sum(len(sequence.completion.tokens) for sequence in self.request.sequences if not sequence.echo_only)
        firsts = self.request.sequences[:: self.request.fields.n]
        prompt = sum(len(sequence.completion.prompt) for sequence in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(sequence.num_cached for sequence in firsts)},
        }

    def new_logprobs(self, sequence: Sequence) -> dict | None:
        """The logprobs of a sequence's tokens that were not sent yet."""
        if self.request.logprobs is None:
            return None
        completion = sequence.completion
        ids = [] if sequence.echo_only else completion.tokens
        logprobs = completion.token_logprobs
        if completion.prompt_logprobs:
            ids = completion.prompt + ids
            logprobs = completion.prompt_token_logprobs + logprobs
        # The model's thread continues meanwhile: a token may be there before its logprob.
        start = sequence.num_logprobs_sent
        tokens = list(zip(ids[start:], logprobs[start:], strict=False))
        sequence.num_logprobs_sent += len(tokens)
        return self.logprobs_json(sequence, tokens)

    def text_of(self, token: int) -> str:
        """The text of one token; bytes of an incomplete character become U+FFFD."""
        return self.tokenizer.bytes[token].decode("utf-8", "replace")


class ChatAnswers(Answers):
    """The form of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    stream_object = "chat.completion.chunk"

    def content(self, text: str) -> dict:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str = "", part: str = "") -> dict:
        if not part:
            return {"delta": {}}
        if part == "text":
            return {"delta": {"content": text}}
        return {"delta": {"content": text, "part": part}}

    def first_events(self) -> str:
        role = {"delta": {"content": "", "role": "assistant"}}
        return "".join(self.event(sequence, role) for sequence in self.request.sequences)

    def logprobs_json(self, sequence: Sequence, tokens: list) -> dict:
        content = []
        for token, entry in tokens:
            top = [self.logprob_json(other, logprob) for other, logprob in entry.top[: self.request.logprobs]]
            content.append(self.logprob_json(token, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def logprob_json(self, token: int, logprob: float) -> dict:
        return {"token": self.text_of(token), "logprob": logprob, "bytes": list(self.tokenizer.bytes[token])}


class TextAnswers(Answers):
    """The form of /v1/completions."""

    id_prefix = "cmpl"
    object = "text_completion"
    stream_object = "text_completion"

    def content(self, text: str) -> dict:
        return {"text": text}

    def delta(self, text: str = "", part: str = "") -> dict:
        return {"text": text}

    def logprobs_json(self, sequence: Sequence, tokens: list) -> dict:
        """The first token of a prompt has no logprob."""
        result = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in tokens:
            text = self.text_of(token)
            top = None
            if entry is not None:
                candidates = [*entry.top[: self.request.logprobs], (token, entry.logprob)]
                # Of tokens with the same text, the most likely one stays.
                top = {self.text_of(other): logprob for other, logprob in reversed(candidates)}
            result["tokens"].append(text)
            result["token_logprobs"].append(entry.logprob if entry else None)
            result["top_logprobs"].append(top)
            result["text_offset"].append(sequence.text_offset)
            if token not in self.tokenizer.specials.values():
                # Tokens that hold parts of a character add it with the last of them.
                sequence.text_offset += len(sequence.offset_decoder.decode(self.tokenizer.bytes[token]))
        return result
