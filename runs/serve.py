"""An OpenAI-compatible server for a run directory, and a web page to chat with it.

    python runs/serve.py out/RUN                    then open http://127.0.0.1:8000
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=[...], temperature=0)

GET /v1/models, /health and / (the page); POST /v1/chat/completions and /v1/completions. Requests
that run at the same time share every step of the model (continuous batching), up to --rows; more
wait, up to --max-waiting, and above that the answer is 429. A conversation that goes on finds its
keys and values in the row that it left, unless another text took it, and then
usage.prompt_tokens_details.cached_tokens counts them.

Accepted fields: model (optional), messages or prompt (a string, token ids, or a list of either; ids
are used as they are), max_tokens, max_completion_tokens, temperature, top_p, top_k, stop, seed, n,
stream, stream_options.include_usage. Defaults come from the run's config. max_tokens above the
context is an error; otherwise the room behind the prompt bounds the answer, which then ends with
finish_reason "length". Fields that the server cannot honour (logprobs, tools of the client, ...)
and unknown ones are errors. A system message goes in front of the first user message, as in
training; special tokens written in a text are plain text.

A finetuned model has a calculator. A client sees a call and its result in the text, as [3*4 = 12];
in a stream those pieces carry "part": "python" or "python_output" beside "content", and only a
result of the calculator gets the latter. When a client sends such text back in an assistant
message, it becomes a call again. Models without finetuning offer only completions.

The server listens on 127.0.0.1 by default, and has no passwords and no CORS. So that a web page of
another origin cannot use it, Host must be an IP address, localhost or an --allow-host (against DNS
rebinding), Origin, if sent, must be the server itself, and a POST must be application/json. Texts
are never logged.
"""

import argparse
import asyncio
import base64
import codecs
import contextlib
import hashlib
import ipaddress
import json
import math
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path

import engine
import torch
import uvicorn
from chat import Local, is_chat_run
from engine import RunError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MAX_BODY = 1 << 20  # bytes of a request
BODY_SECONDS = 60  # for sending one
MAX_CHOICES = 64  # answers to one request
MAX_STOPS = 4  # stop strings of a request
STOP_LENGTH = 256  # characters of each
RETRY_AFTER = 1  # seconds that a client should wait when the queue is full
STOPPING = "the server is stopping"

# What a request may hold besides the fields above: values that change nothing, and ignored fields.
NEUTRAL = {
    "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "echo": (False,),
    "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "function_call": ("none", "auto"),
    "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "prediction": (), "web_search_options": (), "reasoning_effort": (), "verbosity": (),
    "best_of": (1,), "suffix": ("",),
}  # fmt: skip
IGNORED = (
    "user store metadata service_tier parallel_tool_calls safety_identifier prompt_cache_key"
).split()
KNOWN = "model max_tokens temperature top_p top_k stop seed n stream stream_options".split()
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
        if self.closing and mark != "<|output_start|>":
            self.add("]")
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

    def finish(self) -> list[tuple[str, str]]:
        """The pieces that remain after the last token."""
        self.add("]" if self.closing else "")
        self.add(self.text.decode(b"", final=True))
        return self.release(final=True)[0]

    def add(self, text: str) -> None:
        if text:
            self.held.append((self.part, text))

    def release(self, final: bool = False) -> tuple[list[tuple[str, str]], bool]:
        """The pieces that are certain, and whether a stop string was found."""
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


# ---- the thread that owns the model


@dataclass
class Job:
    """One answer to write. The worker puts (index, pieces, reason) into the queue, or a Problem."""

    index: int  # among the choices of its request
    completion: engine.Completion
    reader: Reader
    queue: asyncio.Queue
    cached: int = 0  # ids of the prompt that its row already held
    count: int = 0  # ids of the answer so far
    gone: bool = False  # the client left; set by the other thread


class Worker(threading.Thread):
    """Decodes all jobs together in the rows of one Decoder.

    submit() and stop() are for the thread of the event loop.
    """

    def __init__(
        self, model, tokenizer, config, rows: int, max_waiting: int, compile: bool = False
    ):
        super().__init__(name="worker", daemon=True)
        self.model = model
        self.config = config
        self.max_waiting = max_waiting
        self.decoder = engine.Decoder(model, tokenizer, rows, compile=compile)
        self.waiting: deque[Job] = deque()
        self.jobs: dict[int, Job] = {}  # by row
        self.ended = [0] * rows  # when a row was last in use, in rounds
        self.rounds = 0
        self.failures = 0  # in a row
        self.closed = False
        self.wake = threading.Condition()
        self.ready = threading.Event()
        self.problem: Exception | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, jobs: list[Job]) -> None:
        """Queues the jobs of one request, all or none. Raises: Problem"""
        self.loop = asyncio.get_running_loop()
        with self.wake:
            if self.closed:
                raise Problem(503, STOPPING)
            taken = len(self.waiting) + len(self.jobs)
            most = self.decoder.rows + self.max_waiting
            if taken + len(jobs) > most:
                raise Problem(
                    429,
                    f"the server is busy: {taken} answers are being written or wait, and at most "
                    f"{most} may; try again in a moment",
                    code="queue_full",
                )
            self.waiting += jobs
            self.wake.notify()

    def stop(self) -> None:
        with self.wake:
            self.closed = True
            self.wake.notify()

    def run(self) -> None:
        try:
            self.warm_up()
        except Exception as error:
            self.problem = error
        self.ready.set()
        while not self.problem and not self.closed:
            with self.wake:
                while not (self.waiting or self.jobs or self.closed):
                    self.wake.wait()
            self.round()
        with self.wake:
            jobs = [*self.jobs.values(), *self.waiting]
            self.waiting = deque()
        with contextlib.suppress(RuntimeError):  # nobody listens any more
            self.deliver([(job, Problem(503, STOPPING)) for job in jobs])

    def warm_up(self) -> None:
        """Builds the usual graphs before anyone waits for them."""
        if self.model.embed.is_cuda:
            torch.cuda.set_device(self.model.embed.device)  # of this thread
        for temperature in (0.0, engine.Completion.temperature):
            completion = engine.Completion([0], 1, temperature)
            self.decoder.admit({0: completion})
            self.decoder.step()
        self.decoder.free(0)

    def round(self) -> None:
        """Drops jobs that nobody waits for, admits others into free rows, and makes one step."""
        self.rounds += 1
        self.leave([row for row, job in self.jobs.items() if job.gone])
        new: dict[int, Job] = {}
        try:
            with self.wake:
                new = self.place()
                self.jobs |= new  # under the lock, so that submit() counts each once
            if new:
                self.decoder.admit({row: job.completion for row, job in new.items()})
        except Exception:
            self.fail([*new])
        items = []
        try:
            for event in self.decoder.step():
                job = self.jobs[event.row]
                items.append((job, self.read(job, event)))
            if items:
                self.failures = 0
        except Exception:
            self.fail([*self.jobs])
        self.deliver(items)

    def place(self) -> dict[int, Job]:
        """Chooses rows for waiting jobs.

        A job gets the row that holds the longest beginning of its prompt, or else the one that has
        been unused for longest. The prompts of one round are bounded, since all other rows wait.
        """
        free = set(range(self.decoder.rows)) - set(self.jobs)
        new = {}
        tokens = 0
        while free and self.waiting and tokens < engine.PREFILL_TOKENS:
            job = self.waiting.popleft()
            if job.gone:
                continue
            held = {row: self.decoder.held(row, job.completion.prompt) for row in free}
            oldest_first = sorted(free, key=lambda row: self.ended[row])
            row = max(oldest_first, key=held.get)  # the first of equals
            job.cached = held[row]
            tokens += len(job.completion.prompt) - job.cached
            free.remove(row)
            new[row] = job
        return new

    def read(self, job: Job, event: engine.Event) -> tuple:
        """What the queue of a job gets after a step: (index, pieces, reason)."""
        pieces = []
        stopped = False
        reason = event.reason
        if event.token is not None:
            job.count += 1
            pieces, stopped = job.reader.push(event.token, job.completion.forced[-1])
        if stopped:
            reason = "stop"
            self.leave([event.row])
        elif reason:
            pieces += job.reader.finish()
            self.ended[event.row] = self.rounds
            del self.jobs[event.row]
        return job.index, pieces, reason

    def leave(self, rows: list[int]) -> None:
        """Frees rows whose texts are not continued."""
        for row in rows:
            self.decoder.free(row)
            self.ended[row] = 0
            del self.jobs[row]

    def fail(self, rows: list[int]) -> None:
        """Reports a failure to those whose answers were in these rows; the server goes on."""
        self.failures += 1
        traceback.print_exc()
        jobs = [self.jobs[row] for row in rows]
        try:
            self.leave(rows)
        except Exception:  # the device no longer works
            self.jobs = {row: job for row, job in self.jobs.items() if row not in rows}
        self.deliver(
            [(job, Problem(500, "the model failed; the server's log says how")) for job in jobs]
        )

    def deliver(self, items: list[tuple[Job, object]]) -> None:
        """Hands results to the event loop, all those of a step at once."""
        items = [(job.queue, item) for job, item in items if not job.gone]
        if items:
            self.loop.call_soon_threadsafe(
                lambda: [queue.put_nowait(item) for queue, item in items]
            )


# ---- requests


@dataclass
class Ask:
    """A request after its checks."""

    jobs: list[Job]
    queue: asyncio.Queue
    chat: bool
    stream: bool
    usage: bool  # in the stream
    prompt_tokens: int


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


class Server:
    """The model, what requests need to know about it, and the HTTP handlers."""

    def __init__(self, run_dir: Path, args: argparse.Namespace):
        run = engine.load_run(run_dir, args.step, args.device)
        self.config = run.config
        self.tokenizer = run.tokenizer
        self.tokenizer.encode("")  # now, since later several threads would build its tables at once
        specials = self.tokenizer.specials
        self.chat = is_chat_run(run_dir) and set(Local.MARKS) <= set(specials)
        tools = {specials[name] for name in Local.SHOWN if name in specials} if self.chat else set()
        self.stops = tuple(sorted({*specials.values()} - tools))
        self.name = args.name or run_dir.resolve().name
        self.created = int(time.time())

        rows = args.rows
        if not rows:  # without a GPU a row costs time even while it rests
            rows = 32 if run.model.embed.is_cuda else 8
        self.worker = Worker(
            run.model, self.tokenizer, self.config, rows, args.max_waiting, args.compile
        )
        self.limit = self.worker.decoder.max_len
        self.most_choices = min(MAX_CHOICES, rows + args.max_waiting)
        longest_token = max(map(len, self.tokenizer.bytes))
        self.most_bytes = self.limit * longest_token  # a longer text cannot fit
        self.page, self.page_headers = read_page()
        routes = [
            Route("/", self.get_page),
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        handlers = {
            Problem: problem_response,
            HTTPException: http_error,
            ClientDisconnect: client_left,
            Exception: server_error,
        }
        guard = Middleware(Guard, allowed=frozenset(map(str.lower, [args.host, *args.allow_host])))
        self.app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)

    # -- the fields of a request

    def prepare(self, body: dict, chat: bool) -> Ask:
        """Checks a request and turns its texts into ids. Raises: Problem"""
        self.check_fields(body, chat)
        stream = flag(body, "stream")
        usage = self.wants_usage(body, stream)
        stops = self.stop_strings(body)
        sampling = self.sampling(body)
        seed = number(body, "seed", secrets.randbits(32), -(2**63), 2**63 - 1, whole=True)
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
        most = number(body, name, self.limit if chat else 16, 1, self.limit, whole=True)
        queue = asyncio.Queue()
        jobs = []
        for prompt in prompts:
            for _ in range(n):
                completion = engine.Completion(
                    prompt,
                    max_tokens=min(most, self.limit + 1 - len(prompt)),
                    stop=self.stops,
                    tools=self.chat,
                    seed=seed + len(jobs) * engine.SEED_STRIDE,
                    **sampling,
                )
                jobs.append(Job(len(jobs), completion, Reader(self.tokenizer, stops), queue))
        return Ask(jobs, queue, chat, stream, usage, sum(map(len, prompts)))

    def check_fields(self, body: dict, chat: bool) -> None:
        """Refuses unknown fields, unsupported values, and the name of another model."""
        own = ("messages", "max_completion_tokens") if chat else ("prompt",)
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
            message = "stream_options must be an object, and only with stream"
            raise Problem(400, message, "stream_options")
        return flag(options, "include_usage", "stream_options.include_usage")

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
                f"stop must be a text, or at most {MAX_STOPS}, of 1 to {STOP_LENGTH} characters",
                "stop",
            )
        return tuple(stops)

    def sampling(self, body: dict) -> dict:
        """temperature, top_p and top_k, as Completion takes them."""
        temperature = number(body, "temperature", engine.Completion.temperature, 0, 2)
        top_p = number(body, "top_p", engine.Completion.top_p, 0, 1)
        top_k = number(body, "top_k", engine.Completion.top_k, 0, math.inf, whole=True)
        return {
            "temperature": float(temperature),
            "top_p": max(float(top_p), 1e-6),  # 0 keeps the most likely token
            "top_k": min(top_k, self.tokenizer.vocab_size),
        }

    def too_long(self, tokens: str, param: str):
        message = (
            f"the context of this model is {self.limit:,} tokens but the prompt has {tokens}; "
            f"shorten it"
        )
        raise Problem(400, message, param, "context_length_exceeded")

    def render(self, messages) -> list[int]:
        """Ids of a conversation up to its next answer, in the template of data/sft.py."""
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
        return [*ids, special["<|assistant_start|>"]]

    def turns(self, messages) -> list[str]:
        """The texts of user and assistant in turn, a system text in the first. Raises: Problem"""
        if not isinstance(messages, list) or not messages:
            raise Problem(400, "messages must be a list of at least one message", "messages")
        texts = []
        system = ""
        for i, message in enumerate(messages):
            where = f"messages[{i}]"
            role, text = self.role_and_text(message, where)
            if role in ("system", "developer"):
                if i:
                    reason = "is a system message; only the first message may be one"
                    raise Problem(400, f"{where} {reason}", where)
                system = f"{text}\n\n" if text.strip() else ""
                continue
            expected = ("user", "assistant")[len(texts) % 2]
            if role != expected:
                raise Problem(
                    400,
                    f"{where} has the role {role}, expected {expected}: user and assistant take "
                    f"turns, the user first",
                    f"{where}.role",
                )
            texts.append(system + text)
            system = ""
        if len(texts) % 2 == 0:
            raise Problem(400, "the last message must be the user's", "messages")
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
        text = self.content(message.get("content"), f"{where}.content")
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
        is_ids = isinstance(prompt, list) and prompt and all(type(id) is int for id in prompt)
        if not is_ids:
            message = f"{where} must be a text or a list of token ids, found {shorten(prompt)}"
            raise Problem(400, message, "prompt")
        largest = self.tokenizer.vocab_size - 1
        if not all(0 <= id <= largest for id in prompt):
            raise Problem(400, f"{where} holds ids outside of 0 to {largest:,}", "prompt")
        return prompt

    # -- handlers

    async def get_page(self, request: Request) -> Response:
        return HTMLResponse(self.page, headers=self.page_headers)

    async def health(self, request: Request) -> Response:
        worker = self.worker
        good = worker.is_alive() and worker.failures < 3
        state = {
            "status": "ok" if good else "failing",
            "rows": worker.decoder.rows,
            "live": len(worker.jobs),
            "waiting": len(worker.waiting),
        }
        return JSONResponse(state, 200 if good else 503)

    def describe(self) -> dict:
        """An entry of /v1/models; context and chat are for the web page, beyond the protocol."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "local",
            "context": self.limit,
            "chat": self.chat,
        }

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.describe()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            raise Problem(
                404, f"there is no such model here, only {self.name}", "model", "model_not_found"
            )
        return JSONResponse(self.describe())

    async def chat_completions(self, request: Request) -> Response:
        return await self.answer(request, chat=True)

    async def completions(self, request: Request) -> Response:
        return await self.answer(request, chat=False)

    async def answer(self, request: Request, chat: bool) -> Response:
        body = await read_body(request)
        ask = await asyncio.to_thread(self.prepare, body, chat)
        self.worker.submit(ask.jobs)
        try:
            head = {
                "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
                "object": "chat.completion" if chat else "text_completion",
                "created": int(time.time()),
                "model": self.name,
            }
            if ask.stream:  # an error before the first token is still a plain error
                first = await unless_left(request, ask.queue.get())
                if isinstance(first, Problem):
                    raise first
                return Stream(self.events(ask, head, first), ask)
            texts = [[] for _ in ask.jobs]
            reasons = [""] * len(ask.jobs)
            while not all(reasons):
                item = await unless_left(request, ask.queue.get())
                if isinstance(item, Problem):
                    raise item
                index, pieces, reasons[index] = item
                texts[index] += [text for _, text in pieces]
            choices = [choice(chat, i, "".join(text), reasons[i]) for i, text in enumerate(texts)]
            return JSONResponse(head | {"choices": choices, "usage": usage(ask)})
        except BaseException:
            leave(ask)
            raise

    async def events(self, ask: Ask, head: dict, item) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        if ask.chat:
            head |= {"object": "chat.completion.chunk"}
        if ask.usage:
            head |= {"usage": None}

        def event(value: dict) -> str:
            return f"data: {json.dumps(value)}\n\n"

        def chunk(*values) -> str:
            return event(head | {"choices": [delta(ask.chat, *values)]})

        left = len(ask.jobs)
        if ask.chat:
            yield "".join(chunk(job.index, "", "role", None) for job in ask.jobs)
        while True:
            if isinstance(item, Problem):
                yield event(item.body())
                return
            index, pieces, reason = item
            lines = [chunk(index, text, part, None) for part, text in pieces]
            if reason:
                left -= 1
                lines.append(chunk(index, "", "", reason))
            if lines:
                yield "".join(lines)
            if not left:
                break
            item = await ask.queue.get()
        if ask.usage:
            yield event(head | {"choices": [], "usage": usage(ask)})
        yield "data: [DONE]\n\n"


def choice(chat: bool, index: int, text: str, reason: str) -> dict:
    if chat:
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    else:
        content = {"text": text}
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def delta(chat: bool, index: int, text: str, part: str, reason: str | None) -> dict:
    """A choice of a stream; part "role" begins a chat answer, "" ends it."""
    content: dict = {"content": text} if part else {}
    if part == "role":
        content["role"] = "assistant"
    elif part in ("python", "python_output"):
        content["part"] = part
    content = {"delta": content} if chat else {"text": text}
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def usage(ask: Ask) -> dict:
    new = sum(job.count for job in ask.jobs)
    return {
        "prompt_tokens": ask.prompt_tokens,
        "completion_tokens": new,
        "total_tokens": ask.prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": sum(job.cached for job in ask.jobs)},
    }


def leave(ask: Ask) -> None:
    """Tells the worker, which looks before each step, to drop what is not done."""
    for job in ask.jobs:
        job.gone = True


class Stream(StreamingResponse):
    """Server-sent events; whichever way they end, the worker is told."""

    def __init__(self, events: AsyncIterator[str], ask: Ask):
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
        self.ask = ask

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            leave(self.ask)


async def unless_left(request: Request, result: Awaitable):
    """Waits for a result; ClientDisconnect if the client leaves first."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer = asyncio.ensure_future(result)
    departure = asyncio.ensure_future(left())
    try:
        await asyncio.wait((answer, departure), return_when=asyncio.FIRST_COMPLETED)
        if departure.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        departure.cancel()


async def read_body(request: Request) -> dict:
    """The JSON object of a request. Raises: Problem"""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise Problem(415, 'the request must have the header "Content-Type: application/json"')
    data = bytearray()
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():  # all of it, since clients read no answer before
                size += len(part)
                if size <= MAX_BODY:
                    data += part
    except TimeoutError:
        raise Problem(408, f"the request did not arrive within {BODY_SECONDS} seconds") from None
    if size > MAX_BODY:
        raise Problem(413, f"the request has {size:,} bytes; at most {MAX_BODY:,} are accepted")

    def refuse(name: str):
        raise ValueError(f"{name} is not JSON")

    try:
        body = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Problem(
            400, f"the request is not valid JSON ({str(error)[:200] or 'nested too deep'})"
        ) from None
    if not isinstance(body, dict):
        raise Problem(400, "the request must be a JSON object")
    return body


class Guard:
    """Keeps web pages of other origins out (see the top). Programs send no Origin."""

    def __init__(self, app, allowed: frozenset[str]):
        self.app = app
        self.allowed = allowed | {"localhost"}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and (problem := self.check(Request(scope).headers)):
            await problem.response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def check(self, headers) -> Problem | None:
        host = headers.get("host", "").lower()
        origin = headers.get("origin")
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
            if name not in self.allowed:
                ipaddress.ip_address(name)  # a page that rebinds a name has that name here
            if origin is None or urllib.parse.urlsplit(origin).netloc.lower() == host:
                return None
        except ValueError:
            return Problem(
                403,
                "this server does not know the name in the Host header; start it with --allow-host "
                "NAME to allow it",
            )
        return Problem(403, "requests from web pages of another origin are refused")


async def problem_response(request: Request, problem: Problem) -> Response:
    return problem.response()


async def http_error(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods."""
    response = Problem(
        error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}"
    ).response()
    response.headers.update(error.headers or {})
    return response


async def client_left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # reaches nobody


async def server_error(request: Request, error: Exception) -> Response:
    return Problem(500, "the server failed; its log says how").response()


def read_page() -> tuple[str, dict[str, str]]:
    """The web page, and headers that allow it only its own script and style, and this server."""
    page = (Path(__file__).parent / "chat.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        inner = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; "
        f"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'"
    )
    return page, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


# ---- the command line


class HTTPServer(uvicorn.Server):
    """Prints its address once it listens; ends the answers that are being written when it stops."""

    def __init__(self, config: uvicorn.Config, worker: Worker):
        super().__init__(config)
        self.worker = worker
        self.greeting = ""

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.greeting:
            print(self.greeting, flush=True)

    async def shutdown(self, sockets=None) -> None:
        self.worker.stop()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """Reserves an address, without listening yet. Raises: RunError"""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise RunError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --host or "
            f"--port"
        ) from None
    return listening


def http_server(server: Server) -> HTTPServer:
    """Starts the worker and waits until it is warm. Raises: RunError if the model does not run"""
    server.worker.start()
    server.worker.ready.wait()
    if problem := server.worker.problem:
        lines = str(problem).splitlines() or [repr(problem)]
        raise RunError(f"the model does not run: {lines[0]}")
    config = uvicorn.Config(
        server.app,
        loop="asyncio",
        http="h11",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=10,
    )
    return HTTPServer(config, server.worker)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Serve a run as an OpenAI-compatible API, with a web page."
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path)
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this machine's")
    add("--port", type=int, default=8000, help="0: any free one")
    add("--rows", type=int, default=0, help="answers at a time (default: 32, without a GPU 8)")
    add(
        "--max-waiting", type=int, default=256, help="answers that may wait for a row; more get 429"
    )
    add("--allow-host", metavar="NAME", action="append", default=[],
        help="a name by which the server is reached, repeatable")  # fmt: skip
    add("--name", help="of the model (default: the name of the run directory)")
    add("--step", type=int, help="checkpoint to use (default: the newest)")
    add("--device", help="cuda, mps or cpu (default: the best available)")
    add(
        "--compile", action="store_true", help="faster steps, after half a minute more at the start"
    )
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    try:
        if args.rows < 0 or args.max_waiting < 0 or not 0 <= args.port < 65536:
            raise RunError("--rows and --max-waiting must be at least 0, --port 0 to 65,535")
        listening = bind(args.host, args.port)  # first, since a model takes a while to load
        server = Server(args.run_dir, args)
        http = http_server(server)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    host, port = listening.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    kind = "chat" if server.chat else "completions"
    http.greeting = (
        f"{server.name}: http://{shown_host}:{port} ({server.worker.decoder.rows} rows, "
        f"context {server.limit:,}, {kind})"
    )
    if not ipaddress.ip_address(host).is_loopback:
        print(
            "note: everyone who can reach this address can use the model; there is no password",
            file=sys.stderr,
        )
    for signum in (signal.SIGTERM, signal.SIGINT):
        # uvicorn handles them, and raises them again once it is done.
        signal.signal(signum, lambda *_: None)
    http.run(sockets=[listening])
    server.worker.join(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
