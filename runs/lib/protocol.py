"""What the server's clients may ask, and what they get: OpenAI's protocol without the network.

Protocol turns the fields of a request into an Ask, which has a Job for each answer. A Reader turns
ids of an answer into text, and Answers into JSON. A Problem is an error for the client.
"""

import asyncio
import codecs
import itertools
import json
import random
import re
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from chat import Local
from lib import engine
from lib.json_answers import Mask
from llguidance.tiktoken import lltokenizer_from_encoding
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse

MAX_CHOICES = 64  # answers to one request
MAX_TOP = 20  # likeliest ids beside each id of an answer
# Fields that a request has in common with engine.Completion.
SAMPLING = {"temperature", "top_p", "min_p", "logit_bias", "presence_penalty", "frequency_penalty"}
CALL = re.compile(r"\[([^\[\]]{1,256}) = ([^\[\]]{1,64})\]")  # as Reader shows a call


class Problem(Exception):
    """An error in the form of OpenAI's, for the client."""

    def __init__(self, status: int, message: str, param: str = "", code: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict:
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        about = {"param": self.param or None, "code": self.code}
        return {"error": {"message": str(self), "type": kind, **about}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)


# ---- from ids to what a client sees


class Reader:
    """Turns ids into pieces of text as they come: (part, text), part "text", "python" or
    "python_output".

    Characters come out whole, and stop strings do not come out at all: as many characters are held
    back as may be the beginning of one.
    """

    def __init__(self, tokenizer, stops: tuple[str, ...] = ()):
        self.bytes = tokenizer.bytes
        self.stops = stops
        self.hold = max(map(len, stops), default=1) - 1
        specials = tokenizer.specials
        self.marks = {specials[name]: name for name in Local.SHOWN if name in specials}
        self.text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.part = "text"
        self.closing = False  # the call is written, and a result may follow
        self.held: list[tuple[str, str]] = []  # characters, with their parts
        self.stopped = False  # by a stop string

    def push(self, token: int, forced: bool) -> list[tuple[str, str]]:
        """The pieces that a token completes, some of one character; `forced` as in Completion."""
        mark = self.marks.get(token, "")
        if not (mark or self.closing or self.stops):  # as nearly always
            text = self.text.decode(self.bytes[token])
            return [(self.part, text)] if text else []
        if self.closing and mark != "<|output_start|>":
            self.add(b"]")  # a call without a result
            self.part = "text"
        self.closing = mark == "<|python_end|>"
        if mark == "<|python_start|>":
            self.part = "python"
        elif mark == "<|output_start|>":
            # A model can write this mark itself; then no result of the calculator follows.
            self.part = "python_output" if forced else "text"
        self.add(Local.SHOWN[mark].encode() if mark else self.bytes[token])
        if mark == "<|output_end|>":
            self.part = "text"
        return self.release(self.hold)

    def finish(self) -> list[tuple[str, str]]:
        """The pieces that remain after the last token."""
        self.add(b"]" if self.closing else b"", final=True)
        return self.release(0)

    def add(self, own: bytes, final: bool = False) -> None:
        self.held += [(self.part, character) for character in self.text.decode(own, final)]

    def release(self, hold: int) -> list[tuple[str, str]]:
        """What is held, but for some characters at the end or what follows a stop string."""
        text = "".join(character for _, character in self.held)
        places = [text.find(stop) for stop in self.stops if stop in text]
        self.stopped = bool(places)
        cut = min(places, default=max(0, len(text) - hold))
        pieces = self.held[:cut]
        self.held = self.held[cut:]
        return pieces


# ---- requests and their answers


@dataclass(eq=False)
class Job:
    """One answer to write. The model's thread writes it, and that of the event loop reads it."""

    index: int  # among the choices of its request
    completion: engine.Completion
    reader: Reader
    silent: bool = False  # only the prompt is shown, and nothing of the answer
    ask: "Ask | None" = None
    cached: int | None = None  # ids of the prompt that were not computed; None: it had no row yet
    pieces: deque[tuple[str, str]] = field(default_factory=deque)  # not sent yet: (part, text)
    reason: str = ""  # why it ended: "stop" or "length"

    def take(self, event: engine.Event) -> None:
        """Turns the id of a step into text. A stop string ends the answer."""
        if event.token is not None and not self.silent:
            self.pieces.extend(self.reader.push(event.token, self.completion.forced[-1]))
        if event.reason and not self.reader.stopped and not self.silent:
            self.pieces.extend(self.reader.finish())
        self.reason = "stop" if self.reader.stopped else event.reason


@dataclass(eq=False)
class Ask:
    """A request after its checks."""

    jobs: list[Job]
    fields: "ChatFields | TextFields"
    logprobs: int | None  # so many likeliest ids beside each id; None: no chances

    # For the model's thread: jobs without a row, and how many have one.
    waiting: deque[Job] = field(default_factory=deque)
    rows: int = 0
    gone: bool = False  # nobody waits for it any more
    began: float = field(default_factory=time.monotonic)

    problem: Problem | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self):
        self.waiting.extend(self.jobs)
        for job in self.jobs:
            job.ask = self

    async def progress(self) -> None:
        """Waits for news, of however many steps. Raises: Problem"""
        await self.ready.wait()
        self.ready.clear()
        if self.problem and not self.done():
            raise self.problem

    def done(self) -> bool:
        return all(job.reason for job in self.jobs)


# ---- the fields of a request


def as_list(value: Any) -> Any:
    """One text, or the ids of one, as a list of one."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
    return [value] if is_one else value


def joined(value: Any) -> Any:
    """The text of a message's content, which may come in parts or be null."""
    if not isinstance(value, list):
        return value or ""
    for part in value:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise PydanticCustomError("part", 'Parts can only be {{"type": "text", "text": ...}}')
    return "".join(part["text"] for part in value)


def unsupported(value: Any) -> None:
    if value:
        raise PydanticCustomError("unsupported", "Leave it out, as this server does not support it")


class JsonSchema(BaseModel, strict=True):
    given: dict = Field(alias="schema")


class PlainFormat(BaseModel, strict=True):
    type: Literal["text", "json_object"] = "text"


class SchemaFormat(BaseModel, strict=True):
    type: Literal["json_schema"]
    json_schema: JsonSchema


AnyFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]
Ids = Annotated[list[int], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedId = Annotated[int, Field(ge=0, strict=False)]  # a text, as keys of JSON are
Unsupported = Annotated[Any, BeforeValidator(unsupported)]  # it would change the answer


class Message(BaseModel, strict=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(joined)] = ""


class AnswerFields(BaseModel, strict=True, allow_inf_nan=False):
    """What requests for answers have in common. Fields that are not here are ignored."""

    model: str = ""
    temperature: float = Field(engine.Completion.temperature, ge=0, le=2)
    top_p: float = Field(engine.Completion.top_p, ge=0, le=1)
    top_k: int = Field(engine.Completion.top_k, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[BiasedId, Bias] = Field({}, max_length=300)
    stop: Annotated[list[StopString], Field(max_length=4), BeforeValidator(as_list)] = []
    seed: int = Field(default_factory=lambda: random.getrandbits(32), ge=-(2**63), le=2**63 - 1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: dict = {}
    tools: Unsupported = None
    functions: Unsupported = None
    suffix: Unsupported = None
    response_format: AnyFormat = PlainFormat()


class ChatFields(AnswerFields):
    source: ClassVar = "messages"  # the field with the prompt
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)


class TextFields(AnswerFields):
    source: ClassVar = "prompt"
    prompt: Annotated[list[str | Ids], Field(min_length=1), BeforeValidator(as_list)]
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)


class TokenizeFields(BaseModel, strict=True):
    prompt: str = ""
    messages: list[Message] = []
    add_special_tokens: bool = True


class DetokenizeFields(BaseModel, strict=True):
    tokens: list[int]


def read_fields(kind: type[BaseModel], data: bytes) -> BaseModel:
    """The fields of a request from its JSON. Raises: Problem, about the first that is wrong"""
    try:
        body = pydantic_core.from_json(data, allow_inf_nan=False)
        if isinstance(body, dict):  # null is as good as none
            body = {name: value for name, value in body.items() if value is not None}
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    except ValueError as error:
        raise Problem(400, f"the request is not valid JSON ({error})") from None
    where = ".".join(map(str, first["loc"]))
    found = "" if first["type"] == "missing" else f", found {shorten(first['input'])}"
    raise Problem(400, f"{where or 'the request'}: {first['msg']}{found}", where)


def shorten(value: Any) -> str:
    """A value of a request, for a message about it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class Protocol:
    """Checks requests for one model, and turns their texts into ids."""

    def __init__(self, name: str, tokenizer, limit: int, chat: bool, most_choices: int):
        self.name = name
        self.tokenizer = tokenizer
        self.limit = limit  # tokens of the context
        self.chat = chat
        self.most_choices = min(MAX_CHOICES, most_choices)
        self.marks = set(tokenizer.specials.values())
        tools = {tokenizer.specials.get(mark) for mark in Local.SHOWN} if chat else set()
        self.stops = tuple(sorted(self.marks - tools))
        end = tokenizer.specials["<|assistant_end|>"] if chat else tokenizer.bos_id
        self.vocabulary = lltokenizer_from_encoding(tokenizer.encoding, eos_token=end)

    def prepare_chat(self, data: bytes) -> Ask:
        """Checks a request for the next answer of a conversation. Raises: Problem"""
        fields = read_fields(ChatFields, data)
        most = fields.max_completion_tokens or fields.max_tokens or self.limit
        logprobs = fields.top_logprobs if fields.logprobs else None
        return self.ask(fields, [self.render(fields.messages)], most, logprobs)

    def prepare_texts(self, data: bytes) -> Ask:
        """Checks a request for the continuation of texts. Raises: Problem"""
        fields = read_fields(TextFields, data)
        prompts = [self.prompt_ids(prompt) for prompt in fields.prompt]
        ask = self.ask(fields, prompts, fields.max_tokens, fields.logprobs, fields.echo)
        for job in ask.jobs if fields.echo else ():
            shown = [id for id in job.completion.prompt if id not in self.marks]
            job.pieces.append(("text", self.tokenizer.decode(shown)))
        return ask

    def ask(self, fields: AnswerFields, prompts, most: int, logprobs, echo: bool = False) -> Ask:
        """The answers to some prompts, of up to `most` tokens each. Raises: Problem"""
        count = fields.n * len(prompts)
        if fields.model not in ("", self.name):
            wrong = f"there is no model {shorten(fields.model)} here, only {self.name}"
            raise Problem(404, wrong, "model", "model_not_found")
        if count > self.most_choices:
            raise Problem(400, f"the request asks for {count:,} answers; at most {self.most_choices} work", "n")
        least = 0 if echo else 1  # with echo, none is the prompt alone
        if not least <= most <= self.limit:
            raise Problem(400, f"max_tokens must be {least} to {self.limit:,}, found {most:,}", "max_tokens")
        self.check_ids(fields.logit_bias, "logit_bias")
        sampling = fields.model_dump(include=SAMPLING)
        jobs = []
        mask = self.mask(fields.response_format)
        for prompt in prompts:
            if len(prompt) > self.limit:
                wrong = f"the context of this model is {self.limit:,} tokens but the prompt has {len(prompt):,}"
                raise Problem(400, f"{wrong}; shorten it", fields.source, "context_length_exceeded")
            for _ in range(fields.n):
                completion = engine.Completion(
                    prompt,
                    max_tokens=min(max(most, 1), self.limit + 1 - len(prompt)),
                    stop=self.stops,
                    tools=self.chat and mask is None,
                    mask=mask and mask.copy(),
                    seed=fields.seed + len(jobs) * engine.SEED_STRIDE,
                    logprobs=logprobs,
                    score_prompt=echo and logprobs is not None,
                    top_k=min(fields.top_k, self.tokenizer.vocab_size),
                    **sampling,
                )
                reader = Reader(self.tokenizer, tuple(fields.stop))
                jobs.append(Job(len(jobs), completion, reader, silent=most == 0))
        return Ask(jobs, fields, logprobs)

    def mask(self, wanted: AnyFormat) -> Mask | None:
        """Which ids an answer may hold, if it must be JSON. Raises: Problem"""
        if wanted.type == "text":
            return None
        shaped = wanted.type == "json_schema"
        try:
            schema = wanted.json_schema.given if shaped else {"type": "object"}
            return Mask.of(schema, self.vocabulary)
        except ValueError as error:
            wrong = f"response_format: this schema does not work here ({error})"
            raise Problem(400, wrong, "response_format") from None

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        largest = self.tokenizer.vocab_size - 1
        if not all(0 <= id <= largest for id in ids):
            raise Problem(400, f"{param} holds ids outside of 0 to {largest:,}", param)

    def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """One prompt as ids; ids are used as they are. Raises: Problem"""
        if isinstance(prompt, str):
            return [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        self.check_ids(prompt, "prompt")
        return prompt

    def render(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation up to its next answer, in the template of data/sft.py.

        If the last message is the assistant's, the answer continues it. Raises: Problem
        """
        if not self.chat:
            advice = "use /v1/completions to continue a text, or finetune it with runs/finetune.py"
            raise Problem(400, f"{self.name} was not finetuned for chat; {advice}", "model", "not_a_chat_model")
        special = self.tokenizer.specials
        ids = [self.tokenizer.bos_id]
        for role, text in self.turns(messages):
            inner = self.answer_ids(text) if role == "assistant" else self.tokenizer.encode(text)
            ids += [special[f"<|{role}_start|>"], *inner, special[f"<|{role}_end|>"]]
        if role == "assistant":
            return ids[:-1]  # the last answer goes on
        return [*ids, special["<|assistant_start|>"]]

    def turns(self, messages: list[Message]) -> list[tuple[str, str]]:
        """Texts of user and assistant in turn, with their roles. Raises: Problem

        A system text goes in front of the next text of the user, and several messages of one role
        in a row become one, as the model has only seen turns.
        """
        said = []  # roles and texts, those of the system as the user's
        system = []  # what waits for a text of the user
        for i, message in enumerate(messages):
            role = message.role
            text = message.content
            if role == "user" and not text.strip():
                raise Problem(400, f"messages[{i}] (user) is empty", "messages")
            if role in ("system", "developer"):
                system += [("user", text)] if text.strip() else []
                continue
            if role == "user" or not said:
                said += system
                system = []
            if role == "assistant" and not said:  # it speaks first
                said.append(("user", ""))
            said.append((role, text))
        said += system

        turns = []
        for role, group in itertools.groupby(said, key=lambda one: one[0]):
            turns.append((role, "\n\n".join(text for _, text in group)))
        if turns and turns[-1] == ("assistant", ""):
            turns.pop()  # an empty beginning of an answer says nothing
        if not any(text for _, text in turns):
            raise Problem(400, "messages must hold one of the user or the assistant", "messages")
        return turns

    def answer_ids(self, text: str) -> list[int]:
        """Ids of an answer; [3*4 = 12] in it is a call if the calculator gives that result."""
        special = self.tokenizer.specials
        encode = self.tokenizer.encode
        python_start, python_end, output_start, output_end = (special[mark] for mark in Local.SHOWN)
        ids = []
        end = 0  # of the last call
        for call in CALL.finditer(text):
            expression, result = call.groups()
            if engine.calculate(expression) != result:
                continue
            ids += encode(text[end : call.start()])
            ids += [python_start, *encode(expression), python_end]
            ids += [output_start, *encode(result), output_end]
            end = call.end()
        return ids + encode(text[end:])

    def tokenize(self, data: bytes) -> dict:
        """The ids of a prompt, or of messages up to their next answer. Raises: Problem"""
        fields = read_fields(TokenizeFields, data)
        if fields.messages:
            ids = self.render(fields.messages)
        else:
            ids = self.tokenizer.encode(fields.prompt)
            if fields.add_special_tokens:
                ids = [self.tokenizer.bos_id, *ids]
        return {"tokens": ids, "count": len(ids), "max_model_len": self.limit}

    def detokenize(self, data: bytes) -> dict:
        """The text of ids. Raises: Problem"""
        fields = read_fields(DetokenizeFields, data)
        self.check_ids(fields.tokens, "tokens")
        return {"prompt": self.tokenizer.decode(fields.tokens)}


# ---- answers


class Answers:
    """The JSON of the answers to one request."""

    def __init__(self, ask: Ask, model: str, tokenizer):
        self.ask = ask
        self.chat = ask.fields.source == "messages"
        self.with_usage = ask.fields.stream_options.get("include_usage")  # in a stream
        self.tokenizer = tokenizer
        self.ended = set()  # jobs whose end was sent
        self.scored = [0] * len(ask.jobs)  # ids whose chances were sent
        # Characters before the next id, for text_offset.
        self.offsets = [0] * len(ask.jobs)
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in ask.jobs]
        kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and ask.fields.stream:
            kind = "chat.completion.chunk"
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{random.getrandbits(96):024x}"
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        # The beginning of every event of a stream.
        shown = self.head | {"usage": None} if self.with_usage else self.head
        self.start = f"data: {json.dumps(shown)[:-1]}, "

    def whole(self) -> dict:
        """The answer to a request without stream, once all jobs are done."""
        choices = []
        for job in self.ask.jobs:
            text = "".join(text for _, text in job.pieces)
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self.chat else {"text": text}
            ends = {"logprobs": self.chances(job), "finish_reason": job.reason}
            choices.append({"index": job.index, **content, **ends})
        return self.head | {"choices": choices, "usage": self.usage()}

    def opening(self) -> str:
        """The first event of a stream for each choice of a chat: its role."""
        if not self.chat:
            return ""
        content = {"content": "", "role": "assistant"}
        return "".join(self.event(job, content, None) for job in self.ask.jobs)

    def news(self, job: Job) -> str:
        """The events for what is new of a job; pieces of text in a row go together."""
        reason = job.reason  # read first, as the model's thread sets it behind the last piece
        parts = []
        while job.pieces:
            part, text = job.pieces.popleft()
            if parts and parts[-1][0] == part == "text":
                text = parts.pop()[1] + text
            parts.append((part, text))

        events = []
        for part, text in parts:
            content = {"content": text} if self.chat else text
            if self.chat and part != "text":
                content["part"] = part
            events.append(self.event(job, content, self.chances(job)))
        if reason and job not in self.ended:
            self.ended.add(job)
            content = {} if self.chat else ""
            events.append(self.event(job, content, self.chances(job), reason))
        return "".join(events)

    def event(self, job: Job, content, chances: dict | None, reason: str | None = None) -> str:
        name = "delta" if self.chat else "text"
        choice = {"index": job.index, name: content, "logprobs": chances, "finish_reason": reason}
        return f'{self.start}"choices": [{json.dumps(choice)}]}}\n\n'

    def closing(self) -> str:
        """The end of a stream."""
        body = self.head | {"choices": [], "usage": self.usage()}
        numbers = f"data: {json.dumps(body)}\n\n" if self.with_usage else ""
        return f"{numbers}data: [DONE]\n\n"

    def usage(self) -> dict:
        new = sum(len(job.completion.tokens) for job in self.ask.jobs if not job.silent)
        # A prompt counts once, however many answers it has.
        firsts = self.ask.jobs[:: self.ask.fields.n]
        prompt = sum(len(job.completion.prompt) for job in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(job.cached for job in firsts)},
        }

    def chances(self, job: Job) -> dict | None:
        """The ids of a job that were not sent yet, with their chances."""
        if self.ask.logprobs is None:
            return None
        completion = job.completion
        ids = [] if job.silent else completion.tokens
        chances = completion.chances
        if completion.score_prompt:
            ids = completion.prompt + ids
            chances = completion.prompt_chances + chances
        start = self.scored[job.index]
        # The model's thread goes on meanwhile: an id may be there before its chance.
        found = list(zip(ids[start:], chances[start:], strict=False))
        self.scored[job.index] += len(found)
        if self.chat:
            return {"content": [self.chat_chance(*one) for one in found], "refusal": None}
        return self.text_chances(job, found)

    def chat_chance(self, token: int, chance: engine.Chance) -> dict:
        def named(token: int, logprob: float) -> dict:
            own = self.tokenizer.bytes[token]
            return {"token": self.shown(token), "logprob": logprob, "bytes": list(own)}

        best = chance.best[: self.ask.logprobs]
        return named(token, chance.logprob) | {"top_logprobs": [named(*one) for one in best]}

    def shown(self, token: int) -> str:
        return self.tokenizer.bytes[token].decode("utf-8", "replace")

    def text_chances(self, job: Job, found: list) -> dict:
        """The form of /v1/completions. The first id of a prompt has no chance."""
        result = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, chance in found:
            text = self.shown(token)
            top = None
            if chance is not None:
                best = [*chance.best[: self.ask.logprobs], (token, chance.logprob)]
                # Of ids that look the same, the likeliest counts.
                top = {self.shown(other): logprob for other, logprob in reversed(best)}
            result["tokens"].append(text)
            result["token_logprobs"].append(chance.logprob if chance else None)
            result["top_logprobs"].append(top)
            result["text_offset"].append(self.offsets[job.index])
            if token not in self.tokenizer.specials.values():
                # Ids that hold parts of a character add it with the last of them.
                added = self.decoders[job.index].decode(self.tokenizer.bytes[token])
                self.offsets[job.index] += len(added)
        return result
