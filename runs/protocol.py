"""What the server's clients may ask, and what they get: OpenAI's protocol without the network.

    Problem     an error for the client
    Reader      from ids to pieces of text
    Job, Ask    an answer to write, and a request with its answers
    Protocol    from the fields of a request to an Ask
    the rest    from what the model said to JSON

runs/serve.py describes the fields.
"""

import asyncio
import codecs
import json
import math
import random
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import engine
from chat import Local
from starlette.responses import JSONResponse

MAX_CHOICES = 64  # answers to one request
MAX_STOPS = 4  # stop strings of a request
STOP_LENGTH = 256  # characters of each
MAX_BIASES = 300  # ids in logit_bias
MAX_TOP = 20  # likeliest ids beside each id of an answer
RETRY_AFTER = 1  # seconds that a client should wait when the queue is full
BATCH_ITEMS = 256  # ids that wait at most before a client that does not stream handles them

# What a request may hold besides the fields below: values that change nothing, and ignored fields.
NEUTRAL = {
    "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "prediction": (), "web_search_options": (), "reasoning_effort": (), "verbosity": (),
    "best_of": (1,), "suffix": ("",), "top_logprobs": (0,), "echo": (False,),
}  # fmt: skip
IGNORED = (
    "user store metadata service_tier parallel_tool_calls safety_identifier prompt_cache_key"
).split()
KNOWN = (
    "model max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty logit_bias "
    "logprobs stop seed n stream stream_options"
).split()
CALL = re.compile(r"\[([^\[\]]{1,256}) = ([^\[\]]{1,64})\]")  # as Reader shows a call


class Problem(Exception):
    """An error in the form of OpenAI's, for the client."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict:
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER)} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)


# ---- from ids to what a client sees


class Reader:
    """Turns ids into pieces of text as they come: (part, text), part "text", "python" or
    "python_output".

    Characters come out whole, and stop strings do not come out at all: text that may become one is
    held back until that is clear.
    """

    def __init__(self, tokenizer, stops: tuple[str, ...] = ()):
        self.bytes = tokenizer.bytes
        self.stops = stops
        self.longest_stop = max(map(len, stops), default=1)
        self.marks = {
            tokenizer.specials[name]: name for name in Local.SHOWN if name in tokenizer.specials
        }
        self.text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.part = "text"
        self.closing = False  # the call is written, and a result may follow
        self.held: list[tuple[str, str]] = []

    def push(self, token: int, forced: bool) -> tuple[list[tuple[str, str]], bool]:
        """Returns pieces and whether a stop string ended the text; `forced` as in Completion."""
        mark = self.marks.get(token, "")
        if not (mark or self.closing or self.stops):  # as nearly always
            text = self.text.decode(self.bytes[token])
            return [(self.part, text)] if text else [], False
        if self.closing and mark != "<|output_start|>":
            self.close()
            self.part = "text"
        self.closing = mark == "<|python_end|>"
        if mark == "<|python_start|>":
            self.part = "python"
        elif mark == "<|output_start|>":
            # A model can write this mark itself; then no result of the calculator follows.
            self.part = "python_output" if forced else "text"
        shown = Local.SHOWN[mark].encode() if mark else self.bytes[token]
        self.add(self.text.decode(shown))
        if mark == "<|output_end|>":
            self.part = "text"
        return self.release()

    def finish(self) -> tuple[list[tuple[str, str]], bool]:
        """The pieces that remain after the last token, and whether a stop string was in them."""
        if self.closing:
            self.close()
        self.add(self.text.decode(b"", final=True))
        return self.release(final=True)

    def close(self) -> None:
        """Ends a call without a result; what is left of half a character comes before the mark."""
        self.add(self.text.decode(b"", final=True))
        self.add("]")

    def add(self, text: str) -> None:
        if text:
            self.held.append((self.part, text))

    def release(self, final: bool = False) -> tuple[list[tuple[str, str]], bool]:
        """The pieces that are certain, and whether a stop string was found."""
        if not self.stops:
            pieces = self.held
            self.held = []
            return pieces, False
        text = "".join(piece for _, piece in self.held)
        places = [text.find(stop) for stop in self.stops]
        places = [place for place in places if place >= 0]
        if places:
            cut = min(places)
        elif final:
            cut = len(text)
        else:
            cut = self.possible_stop(text)

        pieces = []
        rest = []
        for part, piece in self.held:
            pieces.append((part, piece[:cut]))
            rest.append((part, piece[cut:]))
            cut = max(0, cut - len(piece))
        self.held = [piece for piece in rest if piece[1]]
        return [piece for piece in pieces if piece[1]], bool(places)

    def possible_stop(self, text: str) -> int:
        """Where the longest end of a text begins that a stop string may begin with."""
        for start in range(max(0, len(text) - self.longest_stop + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self.stops):
                return start
        return len(text)


# ---- requests and their answers


class Item(NamedTuple):
    """What the model did for an answer in one step."""

    job: "Job"
    token: int | None  # the new id; None if a stop token came
    forced: bool  # a tool said it
    reason: str  # why the answer ended, "" while it goes on
    chance: engine.Chance | None


@dataclass(eq=False)
class Job:
    """One answer to write."""

    index: int  # among the choices of its request
    completion: engine.Completion
    reader: Reader
    ask: "Ask | None" = None
    cached: int = 0  # ids of the prompt that were not computed
    admitted: bool = False  # it has had a row

    # What its client has got so far, by the thread of the event loop.
    count: int = 0  # ids
    reason: str = ""
    texts: list[str] = field(default_factory=list)
    pieces: list[tuple[str, str]] = field(default_factory=list)  # not sent yet: (part, text)
    chances: list[tuple[int, engine.Chance | None]] = field(default_factory=list)  # not sent yet

    def take(self, item: Item) -> None:
        """Turns an id into text. A stop string ends the answer."""
        if self.reason:
            return  # ids after a stop string
        if item.token is not None:
            self.count += 1
            pieces, stopped = self.reader.push(item.token, item.forced)
            self.pieces += pieces
            if item.chance:
                self.chances.append((item.token, item.chance))
            if stopped:
                self.reason = "stop"
                return
        if item.reason:
            pieces, stopped = self.reader.finish()
            self.pieces += pieces
            self.reason = "stop" if stopped else item.reason


@dataclass(eq=False)
class Ask:
    """A request after its checks, and the mailbox that the model's thread fills."""

    jobs: list[Job]
    chat: bool
    stream: bool
    usage: bool  # in the stream
    prompt_tokens: int
    logprobs: int | None = None  # so many likeliest ids beside each id; None: no chances
    echo: bool = False  # the prompt in front of the answer
    silent: bool = False  # echo alone: the answer itself is left out

    # For the model's thread: jobs without a row, and how many have one.
    waiting: deque[Job] = field(default_factory=deque)
    rows: int = 0
    gone: bool = False  # nobody waits for it any more
    began: float = field(default_factory=time.monotonic)

    items: list[Item] = field(default_factory=list)
    problem: Problem | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self):
        self.waiting.extend(self.jobs)
        for job in self.jobs:
            job.ask = self
        # A stream goes on with every id, and a stop string must be seen at once.
        self.at_once = self.stream or any(job.reader.stops for job in self.jobs)

    def put(self, items: list[Item]) -> None:
        """For the event loop's thread."""
        self.items += items
        full = len(self.items) >= BATCH_ITEMS
        if self.at_once or full or any(item.reason for item in items):
            self.ready.set()

    def fail(self, problem: Problem) -> None:
        self.problem = problem
        self.ready.set()

    async def progress(self) -> list[Job]:
        """Waits for news, of however many steps. Gives the jobs that have some. Raises: Problem"""
        await self.ready.wait()
        self.ready.clear()
        items = self.items
        self.items = []
        changed = {}
        for item in items:
            item.job.take(item)
            changed[item.job.index] = item.job
        if self.problem and not self.done():
            raise self.problem
        return list(changed.values())

    def done(self) -> bool:
        return all(job.reason for job in self.jobs)


# ---- the fields of a request


def number(body: dict, name: str, default, low: float, high: float, whole: bool = False):
    value = body.get(name)
    if value is None:
        return default
    good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        upper = f" and at most {high:,}" if high < 2**53 else ""
        raise Problem(
            400, f"{name} must be {kind} of at least {low:,}{upper}, found {shorten(value)}", name
        )
    return value


def flag(body: dict, name: str, param: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Problem(
            400, f"{param or name} must be true or false, found {shorten(value)}", param or name
        )
    return bool(value)


def shorten(value) -> str:
    """A value of a request, for a message about it."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "something nested very deep"
    return text if len(text) <= 60 else f"{text[:60]}..."


def plain(text: str) -> str:
    """The text with halves of characters replaced by "?", as data/sources.py does it."""
    return text.encode("utf-8", "replace").decode()


class Protocol:
    """Checks requests for one model, and turns their texts into ids."""

    def __init__(self, name: str, tokenizer, limit: int, chat: bool, most_choices: int):
        self.name = name
        self.tokenizer = tokenizer
        self.limit = limit  # tokens of the context
        self.chat = chat
        self.most_choices = min(MAX_CHOICES, most_choices)
        specials = tokenizer.specials
        tools = {specials[mark] for mark in Local.SHOWN if mark in specials} if chat else set()
        self.stops = tuple(sorted({*specials.values()} - tools))
        longest_token = max(map(len, tokenizer.bytes))
        self.most_bytes = limit * longest_token  # a longer text cannot fit

    def prepare(self, body: dict, chat: bool) -> Ask:
        """Checks a request and turns its texts into ids. Raises: Problem"""
        self.check_fields(body, chat)
        logprobs = self.wants_logprobs(body, chat)
        echo = not chat and flag(body, "echo")
        stream = flag(body, "stream")
        usage = self.wants_usage(body, stream)
        stops = self.stop_strings(body)
        sampling = self.sampling(body)
        seed = number(body, "seed", random.getrandbits(32), -(2**63), 2**63 - 1, whole=True)
        n = number(body, "n", 1, 1, self.most_choices, whole=True)
        prompts = [self.render(body.get("messages"))] if chat else self.prompts(body.get("prompt"))
        if n * len(prompts) > self.most_choices:
            raise Problem(
                400,
                f"{len(prompts)} prompts with n={n} ask for {n * len(prompts)} answers; at most "
                f"{self.most_choices} are possible in one request",
                "n",
            )
        for prompt in prompts:
            if len(prompt) > self.limit:
                self.too_long(f"{len(prompt):,}", "messages" if chat else "prompt")

        name = "max_tokens"
        if body.get("max_completion_tokens") is not None:
            name = "max_completion_tokens"
        least = 0 if echo else 1  # with echo, none is the prompt alone
        most = number(body, name, self.limit if chat else 16, least, self.limit, whole=True)
        jobs = []
        for prompt in prompts:
            for _ in range(n):
                completion = engine.Completion(
                    prompt,
                    max_tokens=min(max(most, 1), self.limit + 1 - len(prompt)),
                    stop=self.stops,
                    tools=self.chat,
                    seed=seed + len(jobs) * engine.SEED_STRIDE,
                    logprobs=logprobs,
                    score_prompt=echo and logprobs is not None,
                    **sampling,
                )
                jobs.append(Job(len(jobs), completion, Reader(self.tokenizer, stops)))
        tokens = sum(map(len, prompts))
        return Ask(jobs, chat, stream, usage, tokens, logprobs, echo, silent=most == 0)

    def check_fields(self, body: dict, chat: bool) -> None:
        """Refuses unknown fields, unsupported values, and the name of another model."""
        own = ("prompt", "echo")
        if chat:
            own = ("messages", "max_completion_tokens", "top_logprobs")
        for name, value in body.items():
            if value is None or name in (*KNOWN, *own, *IGNORED):
                continue
            if name not in NEUTRAL:
                raise Problem(
                    400, f"unknown parameter {shorten(name)}", plain(name[:60]), "unknown_parameter"
                )
            if not any(value == v and type(value) is type(v) for v in NEUTRAL[name]):
                message = f"{name} is not supported here; leave it out"
                raise Problem(400, message, name, "unsupported_parameter")
        model = body.get("model")
        if model is not None and model != self.name:
            message = f"there is no model {shorten(model)} here, only {self.name}"
            raise Problem(404, message, "model", "model_not_found")

    def wants_usage(self, body: dict, stream: bool) -> bool:
        """Whether a stream should end with the numbers of tokens."""
        options = body.get("stream_options") or {}
        if not isinstance(options, dict) or options and not stream:
            found = "no stream" if isinstance(options, dict) else shorten(options)
            message = f"stream_options must be an object, and only with stream, found {found}"
            raise Problem(400, message, "stream_options")
        return flag(options, "include_usage", "stream_options.include_usage")

    def wants_logprobs(self, body: dict, chat: bool) -> int | None:
        """How many likeliest ids to show beside each id; None: no chances at all."""
        if not chat:
            return number(body, "logprobs", None, 0, MAX_TOP, whole=True)
        top = number(body, "top_logprobs", None, 0, MAX_TOP, whole=True)
        if not flag(body, "logprobs"):
            if top:
                raise Problem(400, "top_logprobs needs logprobs: true", "top_logprobs")
            return None
        return top or 0

    def stop_strings(self, body: dict) -> tuple[str, ...]:
        stops = body.get("stop")
        if stops is None:
            stops = []
        elif isinstance(stops, str):
            stops = [stops]
        good = isinstance(stops, list) and len(stops) <= MAX_STOPS
        good = good and all(isinstance(s, str) and 0 < len(s) <= STOP_LENGTH for s in stops)
        if not good:
            raise Problem(
                400,
                f"stop must be a text, or at most {MAX_STOPS}, of 1 to {STOP_LENGTH} characters, "
                f"found {shorten(body['stop'])}",
                "stop",
            )
        return tuple(stops)

    def sampling(self, body: dict) -> dict:
        """What shapes the draw of an id, as Completion takes it."""
        temperature = number(body, "temperature", engine.Completion.temperature, 0, 2)
        top_p = number(body, "top_p", engine.Completion.top_p, 0, 1)
        top_k = number(body, "top_k", engine.Completion.top_k, 0, math.inf, whole=True)
        return {
            "min_p": float(number(body, "min_p", 0, 0, 1)),
            "presence_penalty": float(number(body, "presence_penalty", 0, -2, 2)),
            "frequency_penalty": float(number(body, "frequency_penalty", 0, -2, 2)),
            "logit_bias": self.logit_bias(body),
            "temperature": float(temperature),
            "top_p": max(float(top_p), 1e-6),  # 0 keeps the most likely token
            "top_k": min(top_k, self.tokenizer.vocab_size),
        }

    def logit_bias(self, body: dict) -> dict[int, float]:
        """What to add to the logits of ids, which are texts in JSON. Raises: Problem"""
        biases = body.get("logit_bias") or {}
        if not isinstance(biases, dict) or len(biases) > MAX_BIASES:
            found = len(biases) if isinstance(biases, dict) else shorten(biases)
            message = f"logit_bias must be an object of at most {MAX_BIASES} ids, found {found}"
            raise Problem(400, message, "logit_bias")
        for token in biases:
            is_id = token.isascii() and token.isdigit() and len(token) < 8
            if not is_id or int(token) >= self.tokenizer.vocab_size:
                largest = self.tokenizer.vocab_size - 1
                message = f"logit_bias holds {shorten(token)}, not an id of 0 to {largest:,}"
                raise Problem(400, message, "logit_bias")
        return {int(token): float(number(biases, token, 0, -100, 100)) for token in biases}

    def too_long(self, tokens: str, param: str):
        message = (
            f"the context of this model is {self.limit:,} tokens but the prompt has {tokens}; "
            f"shorten it"
        )
        raise Problem(400, message, param, "context_length_exceeded")

    def render(self, messages) -> list[int]:
        """Ids of a conversation up to its next answer, in the template of data/sft.py.

        If the last message is the assistant's, the answer continues it.
        """
        if not self.chat:
            raise Problem(
                400,
                f"{self.name} was not finetuned for chat; use /v1/completions to continue a text, "
                f"or finetune it with runs/finetune.py",
                "model",
                "not_a_chat_model",
            )
        texts = self.turns(messages)
        self.check_size(sum(len(text) for text in texts), "messages")
        special = self.tokenizer.specials
        ids = [self.tokenizer.bos_id]
        for i, text in enumerate(texts):
            role = ("user", "assistant")[i % 2]
            inner = self.answer_ids(text) if role == "assistant" else self.tokenizer.encode(text)
            ids += [special[f"<|{role}_start|>"], *inner, special[f"<|{role}_end|>"]]
        if len(texts) % 2 == 0:
            return ids[:-1]  # the last answer goes on
        return [*ids, special["<|assistant_start|>"]]

    def turns(self, messages) -> list[str]:
        """The texts of user and assistant in turn. Raises: Problem

        A system text goes in front of the next text of the user, and several messages of one role
        in a row become one, as the model has only seen turns.
        """
        if not isinstance(messages, list) or not messages:
            message = f"messages must be a list of at least one message, found {shorten(messages)}"
            raise Problem(400, message, "messages")
        texts = []
        system = ""
        for i, message in enumerate(messages):
            role, text = self.role_and_text(message, f"messages[{i}]")
            if role in ("system", "developer"):
                if text.strip():
                    system += f"{text}\n\n"
                continue
            if role == "user":
                text = system + text
                system = ""
            turn = 0 if role == "user" else 1
            if len(texts) % 2 == turn:
                texts.append(text)
            elif texts:
                texts[-1] += f"\n\n{text}"
            else:
                texts += [system.strip(), text]  # an assistant that speaks first
                system = ""
        if system and len(texts) % 2:
            texts[-1] += f"\n\n{system.strip()}"  # behind the last text of the user
        elif system:
            texts.append(system.strip())
        if len(texts) % 2 == 0 and not (texts and texts[-1]):
            texts = texts[:-1]  # an empty beginning of an answer says nothing
        if not any(texts):
            raise Problem(400, "messages must hold one of the user or the assistant", "messages")
        return texts

    def role_and_text(self, message, where: str) -> tuple[str, str]:
        """The role and the text of one message, checked. Raises: Problem"""
        if not isinstance(message, dict):
            raise Problem(400, f"{where} must be an object with role and content", where)
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise Problem(
                400,
                f"{where} has the role {shorten(role)}; known are system, user and assistant",
                f"{where}.role",
            )
        value = message.get("content")
        if value is None and role == "assistant" and "content" in message:
            value = ""  # as clients write an answer without text
        text = self.content(value, f"{where}.content")
        # A model may answer with nothing, and clients send empty system texts.
        if role == "user" and not text.strip():
            raise Problem(400, f"{where} (user) is empty", f"{where}.content")
        return role, text

    def content(self, value, where: str) -> str:
        """The text of a message's content. Raises: Problem"""
        if isinstance(value, str):
            return plain(value)
        if not isinstance(value, list):
            message = f"{where} must be a text or a list of text parts, found {shorten(value)}"
            raise Problem(400, message, where)
        for part in value:
            good = isinstance(part, dict) and part.get("type") == "text"
            if not good or not isinstance(part.get("text"), str):
                expected = '{"type": "text", "text": ...}'
                message = f"{where} may only hold {expected}, found {shorten(part)}"
                raise Problem(400, message, where)
        return plain("".join(part["text"] for part in value))

    def answer_ids(self, text: str) -> list[int]:
        """Ids of an answer; [3*4 = 12] in it is a call if the calculator gives that result."""
        special = self.tokenizer.specials
        encode = self.tokenizer.encode
        if not all(mark in special for mark in Local.SHOWN):
            return encode(text)
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

    def check_size(self, characters: int, param: str) -> None:
        if characters > self.most_bytes:
            self.too_long(f"more than {characters * self.limit // self.most_bytes:,}", param)

    def prompts(self, prompt) -> list[list[int]]:
        """A text, ids, or a list of either, as lists of ids. Raises: Problem"""
        is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        if not is_list:
            return [self.prompt_ids(prompt, "prompt")]
        if len(prompt) > self.most_choices:
            raise Problem(
                400,
                f"prompt holds {len(prompt):,} prompts; at most {self.most_choices} are possible "
                f"in one request",
                "prompt",
            )
        return [self.prompt_ids(one, f"prompt[{i}]") for i, one in enumerate(prompt)]

    def prompt_ids(self, prompt, where: str) -> list[int]:
        """One prompt as ids. Raises: Problem"""
        if isinstance(prompt, str):
            self.check_size(len(prompt), where)
            return [self.tokenizer.bos_id, *self.tokenizer.encode(plain(prompt))]
        return self.check_ids(prompt, where, "a text or a list of token ids")

    def check_ids(self, ids, where: str, expected: str) -> list[int]:
        """A list of ids, as it is. Raises: Problem"""
        param = where.partition("[")[0]
        if not (isinstance(ids, list) and ids and all(type(id) is int for id in ids)):
            raise Problem(400, f"{where} must be {expected}, found {shorten(ids)}", param)
        largest = self.tokenizer.vocab_size - 1
        if not all(0 <= id <= largest for id in ids):
            raise Problem(400, f"{where} holds ids outside of 0 to {largest:,}", param)
        return ids

    # -- ids of texts, and back

    def tokenize(self, body: dict) -> dict:
        """The ids of a prompt, or of messages up to their next answer. Raises: Problem"""
        self.check_names(body, ("prompt", "messages", "add_special_tokens"))
        if body.get("messages") is not None:
            ids = self.render(body["messages"])
        else:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                message = f"prompt must be a text, found {shorten(prompt)}"
                raise Problem(400, message, "prompt")
            ids = self.tokenizer.encode(plain(prompt))
            if body.get("add_special_tokens") is None or flag(body, "add_special_tokens"):
                ids = [self.tokenizer.bos_id, *ids]
        return {"tokens": ids, "count": len(ids), "max_model_len": self.limit}

    def detokenize(self, body: dict) -> dict:
        """The text of ids. Raises: Problem"""
        self.check_names(body, ("tokens",))
        tokens = body.get("tokens")
        if tokens == []:
            return {"prompt": ""}
        ids = self.check_ids(tokens, "tokens", "a list of token ids")
        return {"prompt": self.tokenizer.decode(ids)}

    def check_names(self, body: dict, names: tuple) -> None:
        for name in body:
            if name not in (*names, "model"):
                message = f"unknown parameter {shorten(name)}"
                raise Problem(400, message, plain(name[:60]), "unknown_parameter")


# ---- answers


class Answers:
    """The JSON of the answers to one request."""

    def __init__(self, ask: Ask, model: str, tokenizer):
        self.ask = ask
        self.tokenizer = tokenizer
        self.marks = set(tokenizer.specials.values())
        self.opened = set()  # indices of jobs whose prompt was echoed
        # Characters before the next id, for text_offset.
        self.offsets = [0] * len(ask.jobs)
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in ask.jobs]
        kind = "chat.completion" if ask.chat else "text_completion"
        if ask.chat and ask.stream:
            kind = "chat.completion.chunk"
        self.head = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{random.getrandbits(96):024x}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        # The beginning of every event of a stream.
        shown = self.head | {"usage": None} if ask.usage else self.head
        self.start = f"data: {json.dumps(shown)[:-1]}, "

    def whole(self) -> dict:
        """The answer to a request without stream, once all jobs are done."""
        choices = []
        for job in self.ask.jobs:
            text = self.echoed(job) + self.text_of(job)
            if self.ask.chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            else:
                content = {"text": text}
            chances = self.chances(job, self.prompt_chances(job) + self.new_chances(job))
            ends = {"logprobs": chances, "finish_reason": job.reason}
            choices.append({"index": job.index, **content, **ends})
        return self.head | {"choices": choices, "usage": self.usage()}

    def text_of(self, job: Job) -> str:
        """The text of a job that has not been sent, of all parts."""
        text = "".join(text for _, text in job.pieces)
        job.pieces = []
        return "" if self.ask.silent else text

    def echoed(self, job: Job) -> str:
        """The prompt, as far as it is shown."""
        if not self.ask.echo:
            return ""
        return self.tokenizer.decode([i for i in job.completion.prompt if i not in self.marks])

    def opening(self) -> str:
        """The first event of a stream for each choice of a chat: its role."""
        if not self.ask.chat:
            return ""
        content = {"content": "", "role": "assistant"}
        return "".join(self.event(job, content) for job in self.ask.jobs)

    def news(self, job: Job) -> str:
        """The events for what is new of a job; pieces of the same part go together."""
        parts = []
        for part, text in job.pieces:
            if parts and parts[-1][0] == part and part == "text":
                parts[-1][1].append(text)
            else:
                parts.append((part, [text]))
        job.pieces = []

        events = []
        # The chances of a prompt are known once its answer has had a row.
        if self.ask.echo and job.index not in self.opened:
            self.opened.add(job.index)
            chances = self.chances(job, self.prompt_chances(job))
            events.append(self.event(job, self.echoed(job), chances=chances))
        if self.ask.silent:
            parts = []
        for part, texts in parts:
            text = "".join(texts)
            content = {"content": text} if self.ask.chat else text
            if self.ask.chat and part != "text":
                content["part"] = part
            chances = self.chances(job, self.new_chances(job))
            events.append(self.event(job, content, chances=chances))
        if job.reason:
            content = {} if self.ask.chat else ""
            chances = self.chances(job, self.new_chances(job))
            events.append(self.event(job, content, job.reason, chances))
        return "".join(events)

    def event(self, job: Job, content, reason: str | None = None, chances=None) -> str:
        name = "delta" if self.ask.chat else "text"
        choice = {"index": job.index, name: content, "logprobs": chances, "finish_reason": reason}
        return f'{self.start}"choices": [{json.dumps(choice)}]}}\n\n'

    def closing(self) -> str:
        """The end of a stream."""
        end = "data: [DONE]\n\n"
        if self.ask.usage:
            body = self.head | {"choices": [], "usage": self.usage()}
            end = f"data: {json.dumps(body)}\n\n{end}"
        return end

    def usage(self) -> dict:
        new = 0 if self.ask.silent else sum(job.count for job in self.ask.jobs)
        prompt = self.ask.prompt_tokens
        # As in prompt_tokens, a prompt counts once, however many answers it has: the first counts.
        cached = {id(job.completion.prompt): job.cached for job in reversed(self.ask.jobs)}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    # -- chances of ids

    def new_chances(self, job: Job) -> list:
        """The ids that were not sent yet, with their chances."""
        found = job.chances
        job.chances = []
        return [] if self.ask.silent else found

    def prompt_chances(self, job: Job) -> list:
        """The ids of an echoed prompt, with their chances."""
        completion = job.completion
        if not completion.score_prompt:
            return []
        return list(zip(completion.prompt, completion.prompt_chances, strict=True))

    def chances(self, job: Job, found: list) -> dict | None:
        if self.ask.logprobs is None:
            return None
        if self.ask.chat:
            return {"content": [self.chat_chance(*one) for one in found], "refusal": None}
        return self.text_chances(job, found)

    def chat_chance(self, token: int, chance: engine.Chance) -> dict:
        best = chance.best[: self.ask.logprobs]
        entry = self.named(token, chance.logprob)
        return entry | {"top_logprobs": [self.named(*one) for one in best]}

    def named(self, token: int, logprob: float) -> dict:
        own = self.tokenizer.bytes[token]
        return {"token": self.shown(token), "logprob": logprob, "bytes": list(own)}

    def shown(self, token: int) -> str:
        return self.tokenizer.bytes[token].decode("utf-8", "replace")

    def text_chances(self, job: Job, found: list) -> dict:
        """The form of /v1/completions. The first id of a prompt has no chance."""
        result = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, chance in found:
            text = self.shown(token)
            top = None
            if chance is not None:
                # Of ids that look the same, the likeliest counts.
                top = {}
                for other, logprob in chance.best[: self.ask.logprobs]:
                    top.setdefault(self.shown(other), logprob)
                top.setdefault(text, chance.logprob)
            result["tokens"].append(text)
            result["token_logprobs"].append(chance.logprob if chance else None)
            result["top_logprobs"].append(top)
            result["text_offset"].append(self.offsets[job.index])
            if token not in self.marks:
                # Ids that hold parts of a character add it with the last of them.
                added = self.decoders[job.index].decode(self.tokenizer.bytes[token])
                self.offsets[job.index] += len(added)
        return result
