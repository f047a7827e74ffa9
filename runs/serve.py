"""An OpenAI-compatible server for a run directory, and a web page to chat with it.

    python runs/serve.py out/RUN                    then open http://127.0.0.1:8000
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=[...], temperature=0)

GET /v1/models, /health, /metrics (for Prometheus) and / (the page); POST /v1/chat/completions,
/v1/completions, /tokenize and /detokenize. Requests that run at the same time share every step of
the model (continuous batching), up to --rows; more wait, up to --max-waiting, and above that the
answer is 429. Rows go to requests in turn, however many answers each wants: a request without a row
takes one from a request with several, whose answer goes on later. What the model has computed is
kept where it can be: a conversation that goes on finds its keys and values in the row that it left,
and a beginning that several prompts have in common, such as a system text, is computed once.
usage.prompt_tokens_details.cached_tokens counts both.

Accepted fields: model (optional), messages or prompt (a string, token ids, or a list of either; ids
are used as they are), max_tokens, max_completion_tokens, temperature, top_p, top_k, min_p,
presence_penalty, frequency_penalty, logit_bias, stop, seed, n, logprobs, top_logprobs, echo, stream,
stream_options.include_usage. max_tokens above the context is an error; otherwise the room behind
the prompt bounds the answer, which then ends with finish_reason "length". Fields that the server
cannot honour (tools of the client, ...) and unknown ones are errors. Log-probabilities are the
model's own, before temperature and penalties; those of a calculator's result are 0. With echo they
cover the prompt, which is what lm-evaluation-harness needs (model local-completions, and
add_bos_token=True for tasks that compare answers, as it sends ids).

A system message goes in front of the user message behind it, as in training, and messages of one
role in a row become one. If the last message is the assistant's, the answer continues it. Special
tokens written in a text are plain text.

A finetuned model has a calculator. A client sees a call and its result in the text, as [3*4 = 12];
in a stream those pieces carry "part": "python" or "python_output" beside "content", and only a
result of the calculator gets the latter. When a client sends such text back in an assistant
message, it becomes a call again. Models without finetuning offer only completions.

The server listens on 127.0.0.1 by default and has no CORS. With --api-key, or a key in the
environment variable DECODERSTACK_API_KEY (which other users of the machine do not see in a list of
processes), all but the page and /health needs "Authorization: Bearer KEY". So that a web page of
another origin cannot use it, Host must be an IP address, localhost or an --allow-host (against DNS
rebinding), Origin, if sent, must be the server itself, and a POST must be application/json. Texts
are never logged; --access-log writes a line for each request to stderr.
"""

# ruff: noqa: E402
import os
import signal

if __name__ == "__main__":  # before the imports, which take seconds
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import asyncio
import base64
import contextlib
import hashlib
import hmac
import http
import ipaddress
import json
import re
import socket
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import engine
import torch
import uvicorn
from chat import Local, is_chat_run
from engine import RunError
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from protocol import Answers, Ask, Item, Job, Problem, Protocol, shorten
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None

MAX_BODY = 1 << 20  # bytes of a request
SMALL_BODY = 1 << 14  # bytes; the texts of a larger one are handled in another thread
MAX_OTHER = 1 << 17  # bytes of a request beside its body: the head, and what frames chunks
HEAD_SECONDS = 10  # for sending the head of a request
BODY_SECONDS = 60  # for sending the rest
READ_SECONDS = 60  # without reading, while an answer waits
MAX_CONNECTIONS = 1000
BACKLOG = 64  # connections that are accepted at once
SWITCH_SECONDS = 2e-4  # after which a thread gives way to another
FEW = 8  # answers at a time whose ids go out with every step
MESSAGE_SECONDS = 4e-4  # above that: between two messages to a client, for each further answer
HOLD = 2  # steps that a new request may wait for others, so that they enter together
STOPPING = "the server is stopping"
PUBLIC = ("/", "/health")  # without a key
KEY_VARIABLE = "DECODERSTACK_API_KEY"
KEY = r"[!-~]([ -~]*[!-~])?"  # what a header can hold, less blanks at its ends, which are lost

# ---- the thread that owns the model


class Metrics:
    """Counters in Prometheus' format."""

    def __init__(self, worker: "Worker"):
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels=()) -> Counter:
            return Counter(f"decoderstack_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests by path and status", ("path", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "Tokens of prompts that were not computed")
        self.new_tokens = counter("generated_tokens", "Tokens of answers")
        self.steps = counter("steps", "Steps of the model")
        self.moved = counter("moved_answers", "Answers that made room for another request")
        self.left = counter("abandoned_requests", "Requests whose client left")
        self.first_token = Histogram(
            "decoderstack_first_token_seconds",
            "From a request to its first token",
            registry=self.registry,
        )
        gauges = {
            "rows": lambda: worker.decoder.rows,
            "answers_live": lambda: len(worker.jobs),
            "answers_waiting": worker.waiting,
        }
        for name, value in gauges.items():
            text = name.replace("_", " ").capitalize()
            Gauge(f"decoderstack_{name}", text, registry=self.registry).set_function(value)


class Worker(threading.Thread):
    """Decodes all jobs together in the rows of one Decoder.

    submit(), withdraw() and stop() are for the thread of the event loop.
    """

    def __init__(self, model, tokenizer, rows: int, max_waiting: int, compile: bool = False):
        super().__init__(name="worker", daemon=True)
        self.model = model
        self.max_waiting = max_waiting
        shelves = max(2, rows // 4)
        self.decoder = engine.Decoder(
            model, tokenizer, rows, compile=compile, shaping=True, shelves=shelves
        )
        self.queue: dict[Ask, None] = {}  # requests with jobs that wait, in order of arrival
        self.jobs: dict[int, Job] = {}  # by row
        self.ended = [0] * rows  # when a row was last in use, in rounds
        self.rounds = 0
        self.held_back = 0  # rounds in a row that new jobs have waited for company
        self.unsent: dict[Ask, list[Item]] = {}
        self.sent = 0.0  # when the event loop last got all items
        self.failures = 0  # in a row
        self.closed = False
        self.wake = threading.Condition()
        self.ready = threading.Event()
        self.problem: Exception | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.metrics = Metrics(self)

    def waiting(self) -> int:
        """How many jobs wait for a row."""
        return sum(len(ask.waiting) for ask in list(self.queue))

    def submit(self, ask: Ask) -> None:
        """Queues the jobs of one request, all or none. Raises: Problem"""
        self.loop = asyncio.get_running_loop()
        with self.wake:
            if self.closed:
                raise Problem(503, STOPPING)
            taken = self.waiting() + len(self.jobs)
            most = self.decoder.rows + self.max_waiting
            if taken + len(ask.jobs) > most:
                raise Problem(
                    429,
                    f"the server is busy: {taken} answers are being written or wait, and at most "
                    f"{most} may; try again in a moment",
                    code="queue_full",
                )
            self.queue[ask] = None
            self.wake.notify()

    def withdraw(self, ask: Ask) -> None:
        """Ends a request, also when its client left; its rows are free before the next step."""
        if not ask.gone and not ask.done() and not ask.problem:
            self.metrics.left.inc()
        self.drop(ask)

    def drop(self, ask: Ask) -> None:
        ask.gone = True
        with self.wake:
            ask.waiting.clear()
            self.queue.pop(ask, None)

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
                while not (self.queue or self.jobs or self.closed):
                    self.wake.wait()
            self.round()
        self.hand_over(self.unsent)
        with self.wake:
            asks = {job.ask for job in self.jobs.values()} | set(self.queue)
            self.queue = {}
        self.tell([(ask, Problem(503, STOPPING)) for ask in asks])

    def warm_up(self) -> None:
        """Builds the usual graphs before anyone waits for them, and takes memory for a prefill."""
        if self.model.embed.is_cuda:
            torch.cuda.set_device(self.model.embed.device)  # of this thread
        prompt = [0] * min(128, self.decoder.max_len)
        for temperature in (0.0, engine.Completion.temperature):
            completion = engine.Completion(prompt, 1, temperature)
            self.decoder.admit({0: completion})
            self.decoder.step()
            self.decoder.free(0)
        if self.decoder.prefills is not None:
            for size in engine.NEW_SIZES:
                ids = [0] * min(size, self.decoder.max_len)
                self.decoder.admit({0: engine.Completion(ids, 1, 0.0)})
                self.decoder.free(0)

    def round(self) -> None:
        """Drops jobs that nobody waits for, admits others into free rows, and makes one step."""
        self.rounds += 1
        for row, job in list(self.jobs.items()):
            if job.ask.gone or job.reason:  # its client left, or has found a stop string
                self.leave(row)
        new: dict[int, Job] = {}
        try:
            with self.wake:
                self.make_room()
                new = self.place()
            if new:
                found = self.decoder.admit({row: job.completion for row, job in new.items()})
                self.note_cached(new, found)
        except Exception:
            self.fail([*new])
        try:
            items = [self.read(event) for event in self.decoder.step()]
            if items:
                self.failures = 0
                self.metrics.steps.inc()
                self.metrics.new_tokens.inc(sum(item.token is not None for item in items))
            self.deliver(items)
        except Exception:
            self.fail([*self.jobs])

    # -- rows

    def make_room(self) -> None:
        """Takes a row from the request with the most, for one that has none.

        The answer that has come least far waits at the front of its request.
        """
        if not self.jobs:
            return
        waiting = [ask for ask in self.queue if not ask.rows]
        missing = len(waiting) - (self.decoder.rows - len(self.jobs))
        for _ in range(missing):
            richest = max((job.ask for job in self.jobs.values()), key=lambda ask: ask.rows)
            if richest.rows < 2:
                return
            rows = [row for row, job in self.jobs.items() if job.ask is richest]
            row = min(rows, key=lambda row: len(self.jobs[row].completion.tokens))
            job = self.jobs[row]
            self.leave(row)
            richest.waiting.appendleft(job)
            self.queue[richest] = None
            self.metrics.moved.inc()

    def place(self) -> dict[int, Job]:
        """Chooses rows for waiting jobs, and enters them.

        The request with the fewest rows is next, and of these the one that came first. A job gets
        the row that holds the longest beginning of its text, or else the one that has been unused
        for longest. The texts of one round are bounded, since all other rows wait for them.
        """
        new = {}
        free = set(range(self.decoder.rows)) - set(self.jobs)
        if not free or not self.queue or self.holds_back():
            return new
        tokens = 0
        while free and self.queue and tokens < engine.PREFILL_TOKENS:
            ask = min(self.queue, key=lambda ask: ask.rows)
            job = ask.waiting.popleft()
            if not ask.waiting:
                del self.queue[ask]
            if job.reason:
                continue  # a stop string was found after it made room
            text = job.completion.text()
            held = {row: self.decoder.held(row, text) for row in free}
            oldest_first = sorted(free, key=lambda row: self.ended[row])
            row = max(oldest_first, key=held.get)  # the first of equals
            tokens += len(text) - held[row]
            free.remove(row)
            ask.rows += 1
            new[row] = job
        self.jobs |= new  # under the lock, so that submit() counts each once
        return new

    def holds_back(self) -> bool:
        """Whether a few new jobs should wait for others, as each prefill holds all rows up."""
        few = self.waiting() < self.decoder.rows // 8
        if self.jobs and few and self.held_back < HOLD:
            self.held_back += 1
            return True
        self.held_back = 0
        return False

    def note_cached(self, new: dict[int, Job], found: dict[int, int]) -> None:
        for row, job in new.items():
            if job.admitted:
                continue  # it goes on after it made room
            job.admitted = True
            job.cached = found[row]
            self.metrics.prompt_tokens.inc(len(job.completion.prompt))
            self.metrics.cached_tokens.inc(found[row])

    def leave(self, row: int) -> None:
        """Frees a row whose answer is not continued; what it holds stays known."""
        if row in self.decoder.live:
            self.decoder.stop(row)
        self.release(row)

    def release(self, row: int) -> Job:
        job = self.jobs.pop(row)
        job.ask.rows -= 1
        self.ended[row] = self.rounds
        return job

    # -- results

    def read(self, event: engine.Event) -> Item:
        """What the client of a row gets after a step."""
        job = self.jobs[event.row]
        completion = job.completion
        forced = False
        chance = None
        if event.token is not None:
            forced = completion.forced[-1]
            chance = completion.chances[-1] if completion.chances else None
            if len(completion.tokens) == 1:
                self.metrics.first_token.observe(time.monotonic() - job.ask.began)
        if event.reason:
            self.release(event.row)
        return Item(job, event.token, forced, event.reason, chance)

    def fail(self, rows: list[int]) -> None:
        """Reports a failure to those whose answers were in these rows; the server goes on."""
        self.failures += 1
        traceback.print_exc()
        asks = {self.jobs[row].ask for row in rows}
        for row in rows:
            with contextlib.suppress(Exception):  # the device may no longer work
                self.decoder.free(row)
            self.release(row)
        for ask in asks:
            self.drop(ask)
        problem = "the model failed; the server's log says how"
        self.tell([(ask, Problem(500, problem)) for ask in asks])

    def deliver(self, items: list[Item]) -> None:
        """Hands ids to the event loop: those of a step at once, while few answers are written.

        Messages cost more time than ids. So with many answers several steps go out together, but
        the first and the last id of an answer do not wait.
        """
        for item in items:
            self.unsent.setdefault(item.job.ask, []).append(item)
        now = time.monotonic()
        pause = MESSAGE_SECONDS * (len(self.jobs) - FEW)
        if not self.jobs or now - self.sent >= pause:
            self.sent = now
            self.hand_over(self.unsent)
            self.unsent = {}
        elif urgent := {i.job.ask for i in items if i.reason or len(i.job.completion.tokens) == 1}:
            self.hand_over({ask: self.unsent.pop(ask) for ask in urgent})

    def hand_over(self, items: dict[Ask, list[Item]]) -> None:
        def put() -> None:
            for ask, own in items.items():
                if not ask.gone:
                    ask.put(own)

        if items:
            with contextlib.suppress(RuntimeError):  # nobody listens any more
                self.loop.call_soon_threadsafe(put)

    def tell(self, problems: list[tuple[Ask, Problem]]) -> None:
        with contextlib.suppress(RuntimeError):  # nobody listens any more
            for ask, problem in problems:
                self.loop.call_soon_threadsafe(ask.fail, problem)


# ---- the HTTP handlers


class Server:
    """The model, the requests that it understands, and the HTTP handlers."""

    def __init__(self, run_dir: Path, args: argparse.Namespace):
        run = engine.load_run(run_dir, args.step, args.device)
        self.tokenizer = run.tokenizer
        self.tokenizer.encode("")  # now, since later several threads would build its tables at once
        self.chat = is_chat_run(run_dir) and set(Local.MARKS) <= set(self.tokenizer.specials)
        self.name = args.name or run_dir.resolve().name
        self.created = int(time.time())

        rows = args.rows
        if not rows:  # without a GPU a row costs time even while it rests
            rows = 32 if run.model.embed.is_cuda else 8
        try:
            self.worker = Worker(run.model, self.tokenizer, rows, args.max_waiting, args.compile)
        except (RuntimeError, MemoryError) as error:
            reason = engine.first_line(error)
            raise RunError(
                f"the cache of {rows:,} rows does not fit into memory ({reason}); use fewer --rows"
            ) from None
        self.limit = self.worker.decoder.max_len
        most = rows + args.max_waiting
        self.protocol = Protocol(self.name, self.tokenizer, self.limit, self.chat, most)
        self.page, self.page_headers = read_page()
        routes = [
            Route("/", self.get_page),
            Route("/health", self.health),
            Route("/metrics", self.get_metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        handlers = {
            Problem: problem_response,
            HTTPException: http_error,
            ClientDisconnect: client_left,
            Exception: server_error,
        }
        hosts = frozenset(map(str.lower, [args.host, *args.allow_host]))
        guard = Middleware(Guard, allowed=hosts, key=args.api_key)
        paths = frozenset(route.path for route in routes)
        log = Middleware(Log, self.worker.metrics.requests, paths=paths, lines=args.access_log)
        self.app = Starlette(routes=routes, middleware=[log, guard], exception_handlers=handlers)

    async def get_page(self, request: Request) -> Response:
        return HTMLResponse(self.page, headers=self.page_headers)

    async def health(self, request: Request) -> Response:
        worker = self.worker
        good = worker.is_alive() and worker.failures < 3
        state = {
            "status": "ok" if good else "failing",
            "rows": worker.decoder.rows,
            "live": len(worker.jobs),
            "waiting": worker.waiting(),
        }
        return JSONResponse(state, 200 if good else 503)

    async def get_metrics(self, request: Request) -> Response:
        text = generate_latest(self.worker.metrics.registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def describe(self) -> dict:
        """An entry of /v1/models; context and chat are for the web page, beyond the protocol."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "local",
            "context": self.limit,
            "max_model_len": self.limit,
            "chat": self.chat,
        }

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.describe()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            message = f"there is no such model here, only {self.name}"
            raise Problem(404, message, "model", "model_not_found")
        return JSONResponse(self.describe())

    async def tokenize(self, request: Request) -> Response:
        body, _ = await read_body(request)
        return JSONResponse(await asyncio.to_thread(self.protocol.tokenize, body))

    async def detokenize(self, request: Request) -> Response:
        body, _ = await read_body(request)
        return JSONResponse(await asyncio.to_thread(self.protocol.detokenize, body))

    async def chat_completions(self, request: Request) -> Response:
        return await self.answer(request, chat=True)

    async def completions(self, request: Request) -> Response:
        return await self.answer(request, chat=False)

    async def answer(self, request: Request, chat: bool) -> Response:
        body, size = await read_body(request)
        if size <= SMALL_BODY:
            ask = self.protocol.prepare(body, chat)
        else:
            ask = await asyncio.to_thread(self.protocol.prepare, body, chat)
        answers = Answers(ask, self.name, self.tokenizer)
        self.worker.submit(ask)
        departure = asyncio.ensure_future(self.watch(request, ask))

        def ended() -> None:
            departure.cancel()
            self.worker.withdraw(ask)

        try:
            jobs = await ask.progress()  # an error now is still a plain error
            if ask.stream:
                return Stream(ask, events(ask, answers, jobs), ended)
            while not ask.done():
                await ask.progress()
        except BaseException:
            ended()
            raise
        ended()
        return JSONResponse(answers.whole())

    async def watch(self, request: Request, ask: Ask) -> None:
        """Ends a request when its client leaves."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.worker.withdraw(ask)
        ask.fail(Problem(499, "the client left"))


async def events(ask: Ask, answers: Answers, jobs: list[Job]) -> AsyncIterator[str]:
    """The answers as server-sent events. What came while the client was slow goes out at once."""
    text = answers.opening()
    try:
        while True:
            text += "".join(answers.news(job) for job in jobs)
            if ask.done():
                break
            if text:
                yield text
            text = ""
            jobs = await ask.progress()
    except Problem as problem:
        yield f"data: {json.dumps(problem.body())}\n\n"
        return
    yield text + answers.closing()


class Stream(Response):
    """Server-sent events; whichever way they end, `ended` is called."""

    def __init__(self, ask: Ask, events: AsyncIterator[str], ended: Callable[[], None]):
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self.ask = ask
        self.events = events
        self.ended = ended

    async def __call__(self, scope, receive, send) -> None:
        more = True
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(head)
            async for text in self.events:
                more = not self.ask.done()  # the end of an answer is in its last text
                body = {"type": "http.response.body", "body": text.encode(), "more_body": more}
                await send(body)
            if more:
                await send({"type": "http.response.body", "body": b""})
        finally:
            self.ended()


async def read_body(request: Request) -> tuple[dict, int]:
    """The JSON object of a request, and its size in bytes. Raises: Problem"""
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
        reason = str(error)[:200] or "nested too deep"
        raise Problem(400, f"the request is not valid JSON ({reason})") from None
    if not isinstance(body, dict):
        raise Problem(400, "the request must be a JSON object")
    return body, size


class Log:
    """Counts requests, and with --access-log writes a line for each."""

    def __init__(self, app, counter: Counter, paths: frozenset[str], lines: bool):
        self.app = app
        self.counter = counter
        self.paths = paths
        self.lines = lines

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499  # unless something is sent, the client left
        began = time.monotonic()

        async def noting(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            path = scope["path"]
            self.counter.labels(path if path in self.paths else "other", status).inc()
            if self.lines:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                client = (scope["client"] or ("-",))[0]
                shown = urllib.parse.quote(path[:200])
                seconds = time.monotonic() - began
                line = f"{now} {client} {scope['method']} {shown} {status} {seconds:.3f} s"
                print(line, file=sys.stderr, flush=True)


class Guard:
    """Keeps web pages of other origins out (see the top), and those without the key."""

    def __init__(self, app, allowed: frozenset[str], key: str | None):
        self.app = app
        self.allowed = allowed | {"localhost"}
        self.key = key

    async def __call__(self, scope, receive, send) -> None:
        problem = None
        if scope["type"] == "http":
            headers = Request(scope).headers
            problem = self.check(headers) or self.check_key(headers, scope["path"])
        if problem:
            await problem.response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def check_key(self, headers, path: str) -> Problem | None:
        if self.key is None or path in PUBLIC:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.key.encode())
        if kind.lower() == "bearer" and right:
            return None
        message = 'this server needs its key in the header "Authorization: Bearer KEY"'
        return Problem(401, message, code="invalid_api_key")

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
                f"this server does not know {shorten(host)} of the Host header; start it with "
                "--allow-host NAME to allow it",
            )
        return Problem(403, "requests from web pages of another origin are refused")


async def problem_response(request: Request, problem: Problem) -> Response:
    return problem.response()


async def http_error(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods."""
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    response = Problem(error.status_code, message).response()
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


# ---- connections


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with deadlines and limits: idle ones must not use up the server.

    uvicorn itself closes a connection that is silent between two requests. A request that comes
    before the answer to the one before is not read; that answer is then the last.
    """

    most = MAX_CONNECTIONS
    other = 0  # bytes of the request so far beside its body
    deadline: asyncio.TimerHandle | None = None  # for the head of a request
    patience: asyncio.TimerHandle | None = None  # for a client that does not read

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self.refuse(Problem(503, f"the server has {self.most:,} connections already"))
        else:
            self.deadline = self.loop.call_later(HEAD_SECONDS, self.too_slow)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.other += len(data)
        super().data_received(data)
        if self.other > MAX_OTHER:
            self.refuse(Problem(431, f"the head of the request is longer than {MAX_OTHER:,} bytes"))
        elif self.is_answering():
            self.stop(self.deadline)
            self.deadline = None
        elif self.deadline is None and not self.transport.is_closing():
            self.deadline = self.loop.call_later(HEAD_SECONDS, self.too_slow)

    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        if self.is_answering():
            raise Problem(400, "a request came before the answer to the one before")
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self.other -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.other = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.stop(self.deadline)
        self.deadline = None

    def too_slow(self) -> None:
        message = f"the head of the request did not arrive within {HEAD_SECONDS} seconds"
        self.refuse(Problem(408, message))

    def pause_writing(self) -> None:
        super().pause_writing()
        self.patience = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop(self.patience)

    def connection_lost(self, exc) -> None:
        self.stop(self.deadline)
        self.stop(self.patience)
        super().connection_lost(exc)

    def stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

    def send_400_response(self, msg: str) -> None:
        self.refuse(Problem(400, "this is not a valid HTTP request"))

    def refuse(self, problem: Problem) -> None:
        """Answers and closes. If an answer is under way, that is the last instead."""
        if self.is_answering() and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        body = json.dumps(problem.body()).encode()
        if not self.is_answering() and not self.transport.is_closing():
            head = (
                f"HTTP/1.1 {problem.status} {http.HTTPStatus(problem.status).phrase}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                f"Connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def connection_limit() -> int:
    """How many connections leave files for the rest of the program."""
    if resource is None:
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 4 * BACKLOG
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(8, min(MAX_CONNECTIONS, soft - 4 * BACKLOG))


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
    """A socket that listens on an address. Raises: RunError"""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)  # now, since two programs can bind one port, and one can listen
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
        raise RunError(f"the model does not run: {engine.first_line(problem)}")
    Connection.most = connection_limit()
    # The worker waits for the interpreter after each call to the device, by default up to 5 ms.
    sys.setswitchinterval(SWITCH_SECONDS)
    config = uvicorn.Config(
        server.app,
        loop="asyncio",
        http=Connection,
        ws="none",
        backlog=BACKLOG,
        log_level="error",
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
    add("--api-key", metavar="KEY", default=os.environ.get(KEY_VARIABLE) or None,
        help=f"that clients must send (default: the environment variable {KEY_VARIABLE}, if set)")  # fmt: skip
    add("--access-log", action="store_true", help="a line for each request on stderr")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if args.rows < 0 or args.max_waiting < 0 or not 0 <= args.port < 65536:
            rule = "--rows and --max-waiting must be at least 0, --port 0 to 65,535"
            raise RunError(f"{rule}, found {args.rows}, {args.max_waiting} and {args.port}")
        if args.api_key is not None and not re.fullmatch(KEY, args.api_key):
            rule = "--api-key must be printable ASCII without a blank at an end"
            size = len(args.api_key)
            raise RunError(f"{rule}, found one of {size} characters that is not; choose another")
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
    if not ipaddress.ip_address(host).is_loopback and args.api_key is None:
        print(
            "note: everyone who can reach this address can use the model; set a key with --api-key",
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
