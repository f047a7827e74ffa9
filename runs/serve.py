"""An OpenAI-compatible server for a run directory, and a web page to chat with it.

    python runs/serve.py out/RUN                    then open http://127.0.0.1:8000
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100, "stream": true}'

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    answer = client.chat.completions.create(model=client.models.list().data[0].id, messages=[...], temperature=0)

GET /v1/models, /health and / (the page); POST /v1/chat/completions and /v1/completions. Requests that run at the same
time share every step of the model (continuous batching), up to --rows; more wait, up to --max-waiting, and above that
the answer is 429. A conversation that goes on finds its keys and values in the row that it left, if no other text took
it; usage.prompt_tokens_details.cached_tokens says how much.

Taken: model (may be left out), messages or prompt (a string, token ids, or a list of either; ids are taken as they
are), max_tokens, max_completion_tokens, temperature, top_p, top_k, stop, seed, n, stream, stream_options.include_usage.
What is not given comes from the run's config. max_tokens above the context is an error, else the room behind the prompt
bounds it; an answer that hits a bound ends with finish_reason "length". What the server cannot do (logprobs, tools of
the client, ...) and what it does not know is an error. A system message goes in front of the first user message, as
in training; special tokens written in a text are text.

A finetuned model has a calculator. A client sees its call and result in the text, as [3*4 = 12]; in a stream those
pieces carry "part": "python" or "python_output" beside "content", which only a result of the calculator gets. Sent back
in a message of the assistant, such text becomes a call again. Without finetuning there are only completions.

The server listens on 127.0.0.1 unless told otherwise, has no passwords and no CORS. So that a web page of another
origin cannot use it: Host must be an IP address, localhost or an --allow-host (against DNS rebinding), Origin, if sent,
must be the server itself, and a POST must be application/json. Texts are never logged.
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

import torch
import uvicorn
from chat import Local, RunError, import_script, is_chat_run
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MAX_BODY = 1 << 20  # bytes of a request
BODY_SECONDS = 60  # for sending one
MAX_CHOICES = 64  # answers to one request
MAX_STOPS, STOP_LENGTH = 4, 256  # stop strings and characters of each
RETRY_AFTER = 1  # seconds that a client should wait when the queue is full
STOPPING = "the server is stopping"

# What a request may hold besides what the text at the top lists: values that change nothing, and what is ignored.
NEUTRAL = {
    "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "web_search_options": (), "reasoning_effort": (), "verbosity": (), "best_of": (1,), "echo": (False,),
    "suffix": ("",),
}  # fmt: skip
IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
)
KNOWN = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "seed",
    "n",
    "stream",
    "stream_options",
)
CALL = re.compile(r"\[([^\[\]]{1,256}) = ([^\[\]]{1,64})\]")  # as Reader shows a call


class Problem(Exception):
    """A request that gets an error; in OpenAI's form."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER)} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)


# ---- ids to what a client sees


class Reader:
    """Makes pieces of text from ids as they come: (part, text), part "text", "python" or "python_output".

    Characters are whole, and nothing of a stop string comes out: what may become one is held until that is clear.
    """

    def __init__(self, tokenizer, stops: tuple[str, ...] = ()):
        self.bytes, self.stops, self.most = (
            tokenizer.bytes,
            stops,
            max(map(len, stops), default=1) - 1,
        )
        self.marks = {
            tokenizer.specials[name]: name for name in Local.SHOWN if name in tokenizer.specials
        }
        self.text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.part, self.closing = "text", False  # closing: the call is written, a result may follow
        self.held: list[tuple[str, str]] = []

    def push(self, token: int, forced: bool) -> tuple[list[tuple[str, str]], bool]:
        """(pieces, whether a stop string ended the text); forced as in Completion."""
        mark = self.marks.get(token, "")
        if self.closing and mark != "<|output_start|>":
            self.add("]")
            self.part = "text"
        self.closing = mark == "<|python_end|>"
        if mark == "<|python_start|>":
            self.part = "python"
        elif (
            mark == "<|output_start|>"
        ):  # a model can also write one itself, which is no result of the calculator
            self.part = "python_output" if forced else "text"
        self.add(self.text.decode(Local.SHOWN[mark].encode() if mark else self.bytes[token]))
        if mark == "<|output_end|>":
            self.part = "text"
        return self.release()

    def finish(self) -> list[tuple[str, str]]:
        """What is left when the last token is in."""
        self.add("]" if self.closing else "")
        self.add(self.text.decode(b"", final=True))
        return self.release(final=True)[0]

    def add(self, text: str) -> None:
        if text:
            self.held.append((self.part, text))

    def release(self, final: bool = False) -> tuple[list[tuple[str, str]], bool]:
        text = "".join(piece for _, piece in self.held)
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        cut = min(found, default=len(text))
        if not found and not final:  # keep the longest end that a stop string begins with
            ends = range(max(0, len(text) - self.most), len(text))
            cut = next(
                (i for i in ends if any(stop.startswith(text[i:]) for stop in self.stops)), cut
            )
        pieces, rest = [], []
        for part, piece in self.held:
            pieces.append((part, piece[:cut]))
            rest.append((part, piece[cut:]))
            cut = max(0, cut - len(piece))
        self.held = [piece for piece in rest if piece[1]]
        return [piece for piece in pieces if piece[1]], bool(found)


# ---- the thread that owns the model


@dataclass
class Job:
    """One answer that is asked for. The thread puts (index, pieces, reason) into the queue, or a Problem."""

    index: int  # among the choices of its request
    completion: object  # the script's Completion
    reader: Reader
    queue: asyncio.Queue
    cached: int = 0  # ids of the prompt that its row held already
    count: int = 0  # ids of the answer so far
    gone: bool = False  # the client left; set by the other thread


class Engine(threading.Thread):
    """Decodes all jobs together in the rows of one Decoder. submit() and stop() are for the event loop's thread."""

    def __init__(
        self, script, model, tokenizer, config, rows: int, max_waiting: int, compile: bool = False
    ):
        super().__init__(name="engine", daemon=True)
        self.script, self.model, self.config, self.max_waiting = script, model, config, max_waiting
        self.decoder = script.Decoder(model, tokenizer, rows, compile=compile)
        self.waiting: deque[Job] = deque()
        self.jobs: dict[int, Job] = {}  # by row
        self.ended = [0] * rows  # when a row was last in use, in rounds
        self.rounds, self.failures, self.closed = 0, 0, False  # failures in a row
        self.wake, self.ready, self.problem = threading.Condition(), threading.Event(), None
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, jobs: list[Job]) -> None:
        """Queues jobs of one request, all or none."""
        self.loop = asyncio.get_running_loop()
        with self.wake:
            if self.closed:
                raise Problem(503, STOPPING)
            waiting, most = len(self.waiting) + len(self.jobs), self.decoder.rows + self.max_waiting
            if waiting + len(jobs) > most:
                raise Problem(429, f"the server is busy: {waiting} answers are being written or wait, and {most} are "
                                   f"the most; try again in a moment", code="queue_full")  # fmt: skip
            self.waiting += jobs
            self.wake.notify()

    def stop(self) -> None:
        with self.wake:
            self.closed = True
            self.wake.notify()

    def run(self) -> None:
        try:
            if self.model.embed.is_cuda:
                torch.cuda.set_device(self.model.embed.device)  # of this thread
            for temperature in (
                0.0,
                self.config.temperature,
            ):  # builds the usual graphs before anyone waits for them
                self.decoder.admit(
                    {0: self.script.Completion([0], 1, temperature, self.config.top_k)}
                )
                self.decoder.step()
            self.decoder.free(0)
        except Exception as error:
            self.problem = error
        self.ready.set()
        while not self.problem and not self.closed:
            with self.wake:
                while not (self.waiting or self.jobs or self.closed):
                    self.wake.wait()
            self.round()
        with self.wake:
            jobs, self.waiting = [*self.jobs.values(), *self.waiting], deque()
        with contextlib.suppress(RuntimeError):  # nobody listens any more
            self.deliver([(job, Problem(503, STOPPING)) for job in jobs])

    def round(self) -> None:
        """Lets jobs go that nobody waits for, admits others into free rows, and makes one step."""
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
            for row, token, reason in self.decoder.step():
                items.append((self.jobs[row], self.read(row, self.jobs[row], token, reason)))
            self.failures = 0 if items else self.failures
        except Exception:
            self.fail([*self.jobs])
        self.deliver(items)

    def place(self) -> dict[int, Job]:
        """Rows for waiting jobs: that which holds the longest beginning of the prompt, else the one longest unused.

        The prompts of one round are bounded, since the others stand still meanwhile.
        """
        free, new, tokens = set(range(self.decoder.rows)) - set(self.jobs), {}, 0
        while free and self.waiting and tokens < self.script.PREFILL_TOKENS:
            job = self.waiting.popleft()
            if job.gone:
                continue
            prompt = job.completion.prompt
            held = {
                row: len(ids)
                for row in free
                if (ids := self.decoder.known[row]) == prompt[: len(ids)]
            }
            held = {row: n for row, n in held.items() if n < len(prompt)}
            row = max(free, key=lambda row: (held.get(row, 0), -self.ended[row]))  # noqa: B023  (called at once)
            job.cached = held.get(row, 0)
            tokens += len(prompt) - job.cached
            free.remove(row)
            new[row] = job
        return new

    def read(self, row: int, job: Job, token: int | None, reason: str) -> tuple:
        pieces, stopped = [], False
        if token is not None:
            job.count += 1
            pieces, stopped = job.reader.push(token, job.completion.forced[-1])
        if stopped:
            reason = "stop"
            self.leave([row])
        elif reason:
            pieces += job.reader.finish()
            self.ended[row] = self.rounds
            del self.jobs[row]
        return job.index, pieces, reason

    def leave(self, rows: list[int]) -> None:
        """Frees rows whose text goes no further."""
        for row in rows:
            self.decoder.free(row)
            self.ended[row] = 0
            del self.jobs[row]

    def fail(self, rows: list[int]) -> None:
        """Something broke; those whose answers were in these rows hear of it, and the server goes on."""
        self.failures += 1
        traceback.print_exc()
        jobs = [self.jobs[row] for row in rows]
        try:
            self.leave(rows)
        except Exception:  # a device that does nothing any more
            self.jobs = {row: job for row, job in self.jobs.items() if row not in rows}
        self.deliver(
            [(job, Problem(500, "the model failed; the server's log says how")) for job in jobs]
        )

    def deliver(self, items: list[tuple[Job, object]]) -> None:
        """Hands results to the event loop, all of a step at once."""
        items = [(job.queue, item) for job, item in items if not job.gone]
        if items:
            self.loop.call_soon_threadsafe(
                lambda: [queue.put_nowait(item) for queue, item in items]
            )


# ---- requests


@dataclass
class Ask:
    """A request that was checked."""

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
    """Something of a request, for a message about it."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "something nested very deep"
    return text if len(text) <= 60 else f"{text[:60]}..."


def plain(text: str) -> str:
    """Text that UTF-8 can hold, as data/sources.py makes it: halves of characters become "?"."""
    return text.encode("utf-8", "replace").decode()


class Server:
    """The model with what the requests need to know of it, and the HTTP handlers."""

    def __init__(self, run_dir: Path, args: argparse.Namespace):
        self.script = import_script(run_dir, "Decoder")
        try:
            model, self.tokenizer, self.config = self.script.load(run_dir, args.step, args.device)
        except (
            self.script.UserError,
            RuntimeError,
            AssertionError,
        ) as error:  # torch's, if a device is not there
            raise RunError(str(error).splitlines()[0]) from None
        self.tokenizer.encode("")  # now, since later several threads would build it at once
        specials = self.tokenizer.specials
        self.chat = is_chat_run(run_dir) and set(Local.MARKS) <= set(specials)
        tools = {specials[name] for name in Local.SHOWN if name in specials} if self.chat else set()
        self.stops = tuple(sorted({*specials.values()} - tools))
        self.name, self.created = args.name or run_dir.resolve().name, int(time.time())
        rows = args.rows or (
            32 if model.embed.is_cuda else 8
        )  # without a GPU a row costs time also when it rests
        self.engine = Engine(
            self.script, model, self.tokenizer, self.config, rows, args.max_waiting, args.compile
        )
        self.limit = self.engine.decoder.max_len
        self.most_choices = min(MAX_CHOICES, rows + args.max_waiting)
        self.most_bytes = self.limit * max(
            map(len, self.tokenizer.bytes)
        )  # a longer text surely does not fit
        self.page, self.page_headers = read_page()
        routes = [
            Route("/", self.get_page), Route("/health", self.health), Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]  # fmt: skip
        handlers = {Problem: problem_response, HTTPException: http_error, ClientDisconnect: client_left,
                    Exception: server_error}  # fmt: skip
        guard = Middleware(Guard, allowed=frozenset(map(str.lower, [args.host, *args.allow_host])))
        self.app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)

    # -- what a request says

    def prepare(self, body: dict, chat: bool) -> Ask:
        """Checks a request and turns its texts into ids. Raises: Problem"""
        own = ("messages", "max_completion_tokens") if chat else ("prompt",)
        for name, value in body.items():
            if value is None or name in (*KNOWN, *own, *IGNORED):
                continue
            if name not in NEUTRAL:
                raise Problem(
                    400, f"unknown parameter {shorten(name)}", plain(name[:60]), "unknown_parameter"
                )
            if not any(value == v and type(value) is type(v) for v in NEUTRAL[name]):
                raise Problem(
                    400,
                    f"{name} is not supported here; leave it out",
                    name,
                    "unsupported_parameter",
                )
        model = body.get("model")
        if model is not None and model != self.name:
            raise Problem(
                404,
                f"there is no model {shorten(model)} here, only {self.name}",
                "model",
                "model_not_found",
            )
        stream = flag(body, "stream")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict) or options and not stream:
            raise Problem(
                400, "stream_options must be an object, and only with stream", "stream_options"
            )
        usage = flag(options, "include_usage", "stream_options.include_usage")
        stops = body.get("stop")
        stops = [stops] if isinstance(stops, str) else [] if stops is None else stops
        if (not isinstance(stops, list) or len(stops) > MAX_STOPS
                or not all(isinstance(s, str) and 0 < len(s) <= STOP_LENGTH for s in stops)):  # fmt: skip
            raise Problem(
                400,
                f"stop must be a text, or at most {MAX_STOPS}, of 1 to {STOP_LENGTH} characters",
                "stop",
            )
        sampling = {
            "temperature": float(number(body, "temperature", self.config.temperature, 0, 2)),
            "top_p": max(
                float(number(body, "top_p", self.config.top_p, 0, 1)), 1e-6
            ),  # 0: the most likely one
            "top_k": number(body, "top_k", self.config.top_k, 0, math.inf, whole=True),
        }
        sampling["top_k"] = min(sampling["top_k"], self.tokenizer.vocab_size)
        seed = number(body, "seed", secrets.randbits(32), -(2**63), 2**63 - 1, whole=True)
        n = number(body, "n", 1, 1, self.most_choices, whole=True)
        prompts = [self.render(body.get("messages"))] if chat else self.prompts(body.get("prompt"))
        if n * len(prompts) > self.most_choices:
            raise Problem(400, f"{len(prompts)} prompts with n={n} ask for {n * len(prompts)} answers; at most "
                               f"{self.most_choices} are possible in one request", "n")  # fmt: skip
        name = (
            "max_completion_tokens"
            if body.get("max_completion_tokens") is not None
            else "max_tokens"
        )
        most = number(body, name, self.limit if chat else 16, 1, self.limit, whole=True)
        queue, jobs = asyncio.Queue(), []
        for prompt in prompts:
            if len(prompt) > self.limit:
                self.too_long(f"{len(prompt):,}", "messages" if chat else "prompt")
            for _ in range(n):
                completion = self.script.Completion(
                    prompt, min(most, self.limit + 1 - len(prompt)), stop=self.stops, tools=self.chat,
                    seed=seed + len(jobs) * 0x9E3779B1, **sampling,
                )  # fmt: skip
                jobs.append(Job(len(jobs), completion, Reader(self.tokenizer, tuple(stops)), queue))
        return Ask(jobs, queue, chat, stream, usage, sum(map(len, prompts)))

    def too_long(self, tokens: str, param: str):
        raise Problem(400, f"the context of this model is {self.limit:,} tokens but the prompt takes {tokens}; "
                           f"shorten it", param, "context_length_exceeded")  # fmt: skip

    def render(self, messages) -> list[int]:
        """Ids of a conversation up to where the next answer starts, in the template of data/sft.py."""
        if not self.chat:
            raise Problem(400, f"{self.name} was not finetuned for chat; use /v1/completions to continue a text, or "
                               f"finetune it with the sft command", "model", "not_a_chat_model")  # fmt: skip
        if not isinstance(messages, list) or not messages:
            raise Problem(400, "messages must be a list of at least one message", "messages")
        texts, system = [], ""
        for i, message in enumerate(messages):
            where = f"messages[{i}]"
            if not isinstance(message, dict):
                raise Problem(400, f"{where} must be an object with role and content", where)
            role = message.get("role")
            if role not in ("system", "developer", "user", "assistant"):
                raise Problem(400, f"{where} has the role {shorten(role)}; known are system, user and assistant",
                              f"{where}.role")  # fmt: skip
            text = self.content(message.get("content"), f"{where}.content")
            if (
                not text.strip() and role == "user"
            ):  # a model can answer with nothing, and clients send empty systems
                raise Problem(400, f"{where} (user) is empty", f"{where}.content")
            if role in ("system", "developer"):
                if i:
                    raise Problem(
                        400,
                        f"{where} is a system message; only the first message may be one",
                        where,
                    )
                system = f"{text}\n\n" if text.strip() else ""
                continue
            expected = ("user", "assistant")[len(texts) % 2]
            if role != expected:
                raise Problem(400, f"{where} has the role {role}, expected {expected}: user and assistant take turns, "
                                   f"the user first", f"{where}.role")  # fmt: skip
            texts.append(system + text)
            system = ""
        if len(texts) % 2 == 0:
            raise Problem(400, "the last message must be the user's", "messages")
        self.check_size(sum(len(text) for text in texts), "messages")
        special, ids = self.tokenizer.specials, [self.tokenizer.bos_id]
        for i, text in enumerate(texts):
            role = ("user", "assistant")[i % 2]
            inner = self.answer_ids(text) if i % 2 else self.tokenizer.encode(text)
            ids += [special[f"<|{role}_start|>"], *inner, special[f"<|{role}_end|>"]]
        return [*ids, special["<|assistant_start|>"]]

    def content(self, value, where: str) -> str:
        if isinstance(value, str):
            return plain(value)
        if not isinstance(value, list):
            raise Problem(
                400,
                f"{where} must be a text or a list of text parts, found {shorten(value)}",
                where,
            )
        for part in value:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise Problem(400, f'{where} may only hold {{"type": "text", "text": ...}}, found {shorten(part)}',
                              where)  # fmt: skip
        return plain("".join(part["text"] for part in value))

    def answer_ids(self, text: str) -> list[int]:
        """Ids of an answer; [3*4 = 12] in it is a call of the calculator, if that is what the calculator says."""
        special, encode, ids, end = self.tokenizer.specials, self.tokenizer.encode, [], 0
        if all(mark in special for mark in Local.SHOWN):
            python_start, python_end, output_start, output_end = (
                special[mark] for mark in Local.SHOWN
            )
            for call in CALL.finditer(text):
                if self.script.calculate(call[1]) == call[2]:
                    ids += [*encode(text[end : call.start()]), python_start, *encode(call[1]), python_end,
                            output_start, *encode(call[2]), output_end]  # fmt: skip
                    end = call.end()
        return ids + encode(text[end:])

    def check_size(self, characters: int, param: str) -> None:
        if characters > self.most_bytes:
            self.too_long(f"more than {characters * self.limit // self.most_bytes:,}", param)

    def prompts(self, prompt) -> list[list[int]]:
        """A text, ids, or a list of either, as lists of ids."""
        one_alone = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
        found, most = [], self.most_choices
        if not one_alone and len(prompt) > most:
            raise Problem(400, f"prompt holds {len(prompt):,} prompts; at most {most} are possible in one request",
                          "prompt")  # fmt: skip
        for i, one in enumerate([prompt] if one_alone else prompt):
            where = "prompt" if one_alone else f"prompt[{i}]"
            if isinstance(one, str):
                self.check_size(len(one), where)
                found.append([self.tokenizer.bos_id, *self.tokenizer.encode(plain(one))])
            elif isinstance(one, list) and one and all(type(id) is int for id in one):
                if not all(0 <= id < self.tokenizer.vocab_size for id in one):
                    raise Problem(
                        400,
                        f"{where} holds ids outside of 0 to {self.tokenizer.vocab_size - 1:,}",
                        "prompt",
                    )
                found.append(one)
            else:
                raise Problem(
                    400,
                    f"{where} must be a text or a list of token ids, found {shorten(one)}",
                    "prompt",
                )
        return found

    # -- handlers

    async def get_page(self, request: Request) -> Response:
        return HTMLResponse(self.page, headers=self.page_headers)

    async def health(self, request: Request) -> Response:
        engine = self.engine
        good = engine.is_alive() and engine.failures < 3
        state = {"status": "ok" if good else "failing", "rows": engine.decoder.rows, "live": len(engine.jobs),
                 "waiting": len(engine.waiting)}  # fmt: skip
        return JSONResponse(state, 200 if good else 503)

    def describe(self) -> dict:
        """context and chat are no part of the protocol; the web page reads them."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "local",
                "context": self.limit, "chat": self.chat}  # fmt: skip

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
        self.engine.submit(ask.jobs)
        try:
            head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
                    "object": "chat.completion" if chat else "text_completion",
                    "created": int(time.time()), "model": self.name}  # fmt: skip
            if ask.stream:  # an error before the first token is still a plain error
                first = await unless_left(request, ask.queue.get())
                if isinstance(first, Problem):
                    raise first
                return Stream(self.events(ask, head, first), ask)
            texts, reasons = [[] for _ in ask.jobs], [""] * len(ask.jobs)
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
    content = (
        {"message": {"role": "assistant", "content": text, "refusal": None}}
        if chat
        else {"text": text}
    )
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def delta(chat: bool, index: int, text: str, part: str, reason: str | None) -> dict:
    """A choice of a stream; part "role" begins an answer of a chat, "" ends it."""
    content: dict = {"content": text} if part else {}
    if part == "role":
        content["role"] = "assistant"
    elif part in ("python", "python_output"):
        content["part"] = part
    content = {"delta": content} if chat else {"text": text}
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def usage(ask: Ask) -> dict:
    new = sum(job.count for job in ask.jobs)
    return {"prompt_tokens": ask.prompt_tokens, "completion_tokens": new, "total_tokens": ask.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": sum(job.cached for job in ask.jobs)}}  # fmt: skip


def leave(ask: Ask) -> None:
    """Lets the engine drop what is not done; it looks before each step."""
    for job in ask.jobs:
        job.gone = True


class Stream(StreamingResponse):
    """Server-sent events; whichever way they end, the engine hears of it."""

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

    tasks = asyncio.ensure_future(result), asyncio.ensure_future(left())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def read_body(request: Request) -> dict:
    """The JSON object of a request."""
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise Problem(415, 'the request must have the header "Content-Type: application/json"')
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():  # to its end, since clients read no answer before
                size += len(part)
                if size <= MAX_BODY:
                    data += part
    except TimeoutError:
        raise Problem(408, f"the request did not arrive within {BODY_SECONDS} seconds") from None
    if size > MAX_BODY:
        raise Problem(413, f"the request has {size:,} bytes, at most {MAX_BODY:,} are read")

    def refuse(name: str):
        raise ValueError(f"{name} is no JSON")

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
    """Keeps web pages of other origins out; see the text at the top. Programs send no Origin."""

    def __init__(self, app, allowed: frozenset[str]):
        self.app, self.allowed = app, allowed | {"localhost"}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and (problem := self.check(Request(scope).headers)):
            await problem.response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def check(self, headers) -> Problem | None:
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
            if name not in self.allowed:
                ipaddress.ip_address(name)  # a page that rebinds a name has that name here
            if origin is None or urllib.parse.urlsplit(origin).netloc.lower() == host:
                return None
        except ValueError:
            return Problem(403, "this server is not known under the name of the Host header; start it with "
                                "--allow-host NAME to allow it")  # fmt: skip
        return Problem(403, "requests of web pages of another origin are refused")


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
    """The web page, and headers that allow it nothing but its own script, its own style and this server."""
    page = (Path(__file__).parent / "chat.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        inner = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"

    policy = (f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
              f"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")  # fmt: skip
    return page, {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
                  "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}  # fmt: skip


# ---- the command line


class HTTPServer(uvicorn.Server):
    """Says where it is once it listens, and ends the answers that are being written when it stops."""

    def __init__(self, config: uvicorn.Config, engine: Engine):
        super().__init__(config)
        self.engine, self.greeting = engine, ""

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.greeting:
            print(self.greeting, flush=True)

    async def shutdown(self, sockets=None) -> None:
        self.engine.stop()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """An address that is ours, without listening yet."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise RunError(f"cannot listen on {host} port {port} ({error.strerror}); choose another --host or --port"
                        ) from None  # fmt: skip
    return listening


def http_server(server: Server) -> HTTPServer:
    """Starts the engine and waits until it is warm. Raises: RunError if the model does not run"""
    server.engine.start()
    server.engine.ready.wait()
    if problem := server.engine.problem:
        raise RunError(
            f"the model does not run: {str(problem).splitlines()[0] if str(problem) else repr(problem)}"
        )
    config = uvicorn.Config(server.app, loop="asyncio", http="h11", ws="none", log_level="warning",
                            access_log=False, server_header=False, timeout_graceful_shutdown=10)  # fmt: skip
    return HTTPServer(config, server.engine)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Serve a run as an OpenAI-compatible API, with a web page."
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path)
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0: all, for everyone who can reach them",
    )
    add("--port", type=int, default=8000, help="0: any that is free")
    add(
        "--rows",
        type=int,
        default=0,
        help="answers written at the same time (default: 32, without a GPU 8)",
    )
    add(
        "--max-waiting",
        type=int,
        default=256,
        help="answers that may wait for a row; above that: 429",
    )
    add(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name the server is reached by, repeatable",
    )
    add("--name", help="of the model (default: that of the run directory)")
    add("--step", type=int, help="checkpoint to use (default: the newest)")
    add("--device", help="cuda, mps or cpu (default: the best there is)")
    add("--compile", action="store_true", help="faster steps, half a minute later")
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
    http.greeting = (f"{server.name}: http://{f'[{host}]' if ':' in host else host}:{port} "
                     f"({server.engine.decoder.rows} rows, context {server.limit:,}, "
                     f"{'chat' if server.chat else 'completions'})")  # fmt: skip
    if not ipaddress.ip_address(host).is_loopback:
        print(
            "note: everyone who can reach this address can use the model; there is no password",
            file=sys.stderr,
        )
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            signum, lambda *_: None
        )  # uvicorn takes them over, and raises them again once it is done
    http.run(sockets=[listening])
    server.engine.join(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
