"""An OpenAI-compatible server for a run directory.

    python runs/serve.py out/RUN                    at http://127.0.0.1:8000
    python runs/serve.py out/RUN --page             with a web page to chat with it, see runs/page.py
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

GET /v1/models, /health and /metrics (for Prometheus); POST /v1/chat/completions, /v1/completions, /tokenize and
/detokenize; runs/lib/protocol.py has their fields, CONNECT.md the lines for other clients.

The event loop checks a request and submits it to the Worker, a thread that owns the model and decodes up to
--max-num-seqs answers together, each in a slot of its KV cache. Up to --max-queue-size more wait, and above that the
answer is 429. A request without a slot takes one from a request with several, whose answer continues later.

Log-probabilities are the model's own, before temperature and penalties. With echo they cover the prompt, as
lm-evaluation-harness needs it (model local-completions, add_bos_token=True). A finetuned model has a calculator, except
where response_format asks for JSON: call and result are in the text, as [3*4 = 12], and in a stream those pieces carry
"part": "python" or "python_output" beside "content".

With --api-key, or a key in the environment variable DECODERSTACK_API_KEY, all but /health needs "Authorization: Bearer
KEY". Host must be an IP address, localhost or an --allow-host (against DNS rebinding), Origin, if sent, must be the
server itself or an --allow-origin (CORS), and a POST must be application/json. Texts are never logged. SIGTERM and
Ctrl-C end the server once the running answers are complete, after --shutdown-timeout seconds at most.
"""

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

KEY_VARIABLE = "DECODERSTACK_API_KEY"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="run directory")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every network [%(default)s]")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free one [%(default)s]")
    add("--max-num-seqs", type=int, default=0, metavar="N",
        help="maximum number of answers that decode together (default: 32, without a GPU 8)")  # fmt: skip
    add("--max-queue-size", type=int, default=256, metavar="N",
        help="maximum number of answers that wait for a slot [%(default)s]")  # fmt: skip
    add("--shutdown-timeout", type=float, default=10, metavar="SECONDS",
        help="time for running answers to end after SIGTERM or Ctrl-C [%(default)s]")  # fmt: skip
    add("--allow-host", metavar="NAME", action="append", default=[],
        help="host name that clients may use for this machine, repeatable")  # fmt: skip
    add("--allow-origin", metavar="URL", action="append", default=[],
        help="address of a web page that may use this server, such as http://localhost:3000, repeatable")  # fmt: skip
    add("--name", help="model name (default: name of the run directory)")
    add("--step", type=int, help="step of the checkpoint (default: the newest)")
    add("--device", help="cuda, mps or cpu (default: the best available)")
    add("--compile", action="store_true", help="faster steps, and a start that takes half a minute longer")
    add("--api-key", metavar="KEY", default=os.environ.get(KEY_VARIABLE) or None,
        help=f"key that clients must send (default: ${KEY_VARIABLE})")  # fmt: skip
    add("--page", action="store_true", help="also a web page, runs/page.py, which asks its visitors for no key")
    add("--access-log", action="store_true", help="a line on stderr for each request")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # before the imports that take seconds, for which --help need not wait

import engine
import prometheus_client as prometheus
import torch
import uvicorn
from lib.chat_format import is_chat_run
from lib.command import RunError, first_line, print_note
from lib.protocol import APIError, Protocol, Request, Sequence, answers_to, shorten
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MAX_BODY = 1 << 20  # bytes of a request
# A connection stays open for so long between two requests: longer than clients keep an idle one (openai: 5 s), or they
# may send into a closed one.
IDLE_SECONDS = 30
MAX_CONNECTIONS = 1000
# A thread that runs gives way to one that waits after so long (Python: 5 ms). The worker needs the interpreter's lock
# again after each call to the device.
SWITCH_SECONDS = 2e-4
STOPPING = "the server is stopping"
FAILED = "the model no longer runs, and the server's log says why; start the server again"
COMPILERS = 4  # schemas of answers that are compiled at a time
# Prompt tokens that join in one step, so that a prefill does not hold the running answers up for long.
MAX_NUM_BATCHED_TOKENS = 16384
PREFILL_DELAY_STEPS = 2  # that a few new sequences wait for others, as each prefill holds all slots up

# ---- the thread that owns the model


class Metrics:
    """What /metrics shows. The names are vLLM's, where it has them; its requests are our sequences."""

    def __init__(self, worker: "Worker"):
        self.registry = prometheus.CollectorRegistry()
        own = {"namespace": "decoderstack", "registry": self.registry}
        counter = partial(prometheus.Counter, **own)
        self.requests = counter("http_requests", "Requests by path and status", ("path", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Tokens of prompts that earlier requests had cached")
        self.generation_tokens = counter("generation_tokens", "Tokens of answers")
        self.steps = counter("steps", "Steps of the model")
        self.preemptions = counter("num_preemptions", "Answers that made room for another request")
        self.aborted = counter("num_requests_aborted", "Requests whose client disconnected")
        text = "From the arrival of a request to the first token of an answer, counted for each answer"
        self.time_to_first_token = prometheus.Histogram("time_to_first_token_seconds", text, **own)
        gauge = partial(prometheus.Gauge, **own)
        gauge("max_num_seqs", "Answers that can decode together").set_function(lambda: worker.decoder.num_slots)
        gauge("num_requests_running", "Answers that have a slot").set_function(lambda: len(worker.sequences))
        gauge("num_requests_waiting", "Answers that wait for a slot").set_function(worker.num_waiting)


def stream_interval(num_running: int) -> float:
    """Seconds between two messages to a client.

    With few answers each token goes out with its step. With many, those of several steps go together, as a message
    costs more time than a token.
    """
    return max(0, num_running - 8) * 0.4e-3


class Worker(threading.Thread):
    """Decodes all sequences in the slots of one Decoder. The event loop calls submit, abort and stop."""

    def __init__(self, model, tokenizer, max_num_seqs: int, max_queue_size: int, compile: bool = False):
        super().__init__(name="worker", daemon=True)
        self.model = model
        self.max_queue_size = max_queue_size
        prefix_slots = max(2, max_num_seqs // 4)
        self.decoder = engine.Decoder(model, tokenizer, max_num_seqs, compile=compile, prefix_slots=prefix_slots)
        self.queue: dict[Request, None] = {}  # requests with sequences that wait, in order of arrival
        self.sequences: dict[int, Sequence] = {}  # by slot
        self.idle_slots = list(range(max_num_seqs))  # the one unused for longest first
        self.steps_delayed = 0  # steps in a row that new sequences have waited for others
        self.updated: set[Request] = set()  # requests that the event loop has not been notified of
        self.last_flush = 0.0  # when it was last notified of all
        self.failures = 0  # in a row
        self.draining = False  # no new requests, as it stops or has failed
        self.closed = False  # the loop of run() ends
        self.wake = threading.Condition()
        self.warm = threading.Event()
        self.error: Exception | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.metrics = Metrics(self)

    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return sum(len(request.waiting) for request in list(self.queue))

    def submit(self, request: Request) -> None:
        """Queues the sequences of one request, all or none. Raises: APIError"""
        self.loop = asyncio.get_running_loop()
        with self.wake:
            if self.draining:
                raise APIError(503, FAILED if self.error else STOPPING)
            taken = self.num_waiting() + len(self.sequences)
            capacity = self.decoder.num_slots + self.max_queue_size
            if taken + len(request.sequences) > capacity:
                busy = f"{taken} answers are running or waiting, and at most {capacity} may; try again in a moment"
                raise APIError(429, busy, code="queue_full")
            self.queue[request] = None
            self.wake.notify()

    def abort(self, request: Request) -> None:
        """Ends a request, if it has not ended yet; its slots are free before the next step."""
        if not request.aborted and not request.done() and not request.error:
            self.metrics.aborted.inc()
        request.aborted = True
        with self.wake:
            request.waiting.clear()
            self.queue.pop(request, None)

    def stop(self) -> None:
        """Ends running answers with an error."""
        with self.wake:
            self.draining = True
            self.closed = True
            self.wake.notify()

    def run(self) -> None:
        try:
            self.warm_up()
            self.warm.set()
            while not self.closed:
                with self.wake:
                    self.wake.wait_for(lambda: self.queue or self.sequences or self.closed)
                self.step()
        except Exception as error:
            self.error = error
            if self.warm.is_set():  # else Server() reports it
                traceback.print_exc()
        self.warm.set()
        with self.wake:
            self.draining = True
            requests = {sequence.request for sequence in self.sequences.values()} | set(self.queue)
            self.queue = {}
        self.notify(self.updated)
        self.notify(requests, APIError(503, FAILED if self.error else STOPPING))

    def warm_up(self) -> None:
        """Builds the usual graphs before anyone waits for them, and takes memory for a prefill."""
        if self.model.embed.is_cuda:
            torch.cuda.set_device(self.model.embed.device)  # of this thread
        sizes = [128]
        if self.decoder.prefill_graphs is not None:
            sizes += engine.NEW_BUCKETS
        for size in sizes:
            prompt = [0] * min(size, self.decoder.max_len)
            for temperature in (0.0, engine.Completion.temperature):
                self.decoder.add_requests({0: engine.Completion(prompt, 1, temperature)})
                self.decoder.step()
                self.decoder.evict(0)

    def step(self) -> None:
        """Drops sequences that nobody waits for, puts others into free slots, and makes one step."""
        self.release_finished()
        with self.wake:
            self.preempt()
            new = self.schedule()
        if new:
            self.guard(lambda: self.add_sequences(new), new)
        self.guard(self.decode, self.sequences)

    def guard(self, work: Callable, sequences: dict[int, Sequence]) -> None:
        """Runs work(). If it fails, the requests of these sequences get an error, and the server goes on."""
        try:
            work()
        except Exception:
            self.failures += 1
            traceback.print_exc()
            self.fail(list(sequences))

    # -- slots

    def release_finished(self) -> None:
        """Frees the slots of sequences whose client disconnected, or that a stop string ended."""
        for slot, sequence in list(self.sequences.items()):
            if sequence.request.aborted or sequence.reason:
                self.release(slot)

    def preempt(self) -> None:
        """Makes a slot idle for each request that has none, as long as another request has two or more.

        The request with the most slots gives up that of its shortest answer, which keeps its tokens and continues
        later.
        """
        waiting = [request for request in self.queue if not request.num_running]
        for _ in range(len(waiting) - len(self.idle_slots)):
            running = [sequence.request for sequence in self.sequences.values()]
            largest = max(running, key=lambda request: request.num_running, default=None)
            if largest is None or largest.num_running < 2:
                return
            slots = [slot for slot, sequence in self.sequences.items() if sequence.request is largest]
            slot = min(slots, key=lambda slot: len(self.sequences[slot].completion.tokens))
            largest.waiting.appendleft(self.release(slot))
            self.queue[largest] = None
            self.metrics.preemptions.inc()

    def schedule(self) -> dict[int, Sequence]:
        """Chooses slots for waiting sequences.

        The request with the fewest slots is next, and of these the one that came first. A sequence gets the slot that
        holds its longest prefix, or the one that has been unused for longest.
        """
        new = {}
        if not self.idle_slots or not self.queue or self.delay_prefill():
            return new
        num_new = 0  # tokens
        while self.idle_slots and self.queue and num_new < MAX_NUM_BATCHED_TOKENS:
            request = min(self.queue, key=lambda request: request.num_running)
            sequence = request.waiting.popleft()
            if not request.waiting:
                del self.queue[request]
            ids = sequence.completion.cached_tokens()
            num_cached = {slot: self.decoder.prefix_cache.match(slot, ids) for slot in self.idle_slots}
            slot = max(num_cached, key=num_cached.get)  # the first of equals
            num_new += len(ids) + 1 - num_cached[slot]
            self.idle_slots.remove(slot)
            request.num_running += 1
            new[slot] = sequence
        self.sequences |= new  # under the lock, so that submit() counts each once
        return new

    def delay_prefill(self) -> bool:
        """Whether a few new sequences should wait for others, so that one prefill serves all."""
        few = self.num_waiting() < self.decoder.num_slots // 8
        delay = bool(self.sequences) and few and self.steps_delayed < PREFILL_DELAY_STEPS
        self.steps_delayed = self.steps_delayed + 1 if delay else 0
        return delay

    def release(self, slot: int) -> Sequence:
        """Makes a slot idle, whether its answer has ended or not; what it holds stays in the prefix cache."""
        if slot in self.decoder.running:
            self.decoder.release([slot])
        sequence = self.sequences.pop(slot)
        sequence.request.num_running -= 1
        self.idle_slots.append(slot)
        return sequence

    # -- work of the model

    def add_sequences(self, new: dict[int, Sequence]) -> None:
        """Prefills sequences in their slots."""
        num_cached = self.decoder.add_requests({slot: sequence.completion for slot, sequence in new.items()})
        for slot, sequence in new.items():
            if sequence.num_cached is None:  # it is not one that was preempted
                sequence.num_cached = num_cached[slot]
                self.metrics.prompt_tokens.inc(len(sequence.completion.prompt))
                self.metrics.prefix_cache_hits.inc(num_cached[slot])

    def decode(self) -> None:
        """Makes one step, and passes its tokens on."""
        outputs = self.decoder.step()
        if outputs:
            self.failures = 0
            self.metrics.steps.inc()
            self.metrics.generation_tokens.inc(sum(output.token is not None for output in outputs))
        self.deliver(outputs)

    def fail(self, slots: list[int]) -> None:
        """Ends what is in these slots with an error."""
        requests = {self.sequences[slot].request for slot in slots}
        for slot in slots:
            with contextlib.suppress(Exception):  # the device may no longer work
                self.decoder.evict(slot)
            self.release(slot)
        self.notify(requests, APIError(500, "the model failed; the server's log says how"))

    def deliver(self, outputs: list[engine.StepOutput]) -> None:
        """Gives the outputs of a step to their sequences, and notifies the event loop at each stream_interval.

        The first and the last token of an answer do not wait. A client that does not stream hears of the end alone.
        """
        urgent = set()
        for output in outputs:
            sequence = self.sequences[output.slot]
            request = sequence.request
            sequence.add_output(output)
            is_first = output.token is not None and len(sequence.completion.tokens) == 1
            if is_first:
                self.metrics.time_to_first_token.observe(time.monotonic() - request.arrival)
            if output.reason:
                self.release(output.slot)
            if request.fields.stream or request.done():
                self.updated.add(request)
                if is_first or sequence.reason:
                    urgent.add(request)

        now = time.monotonic()
        if now - self.last_flush >= stream_interval(len(self.sequences)):
            self.last_flush = now
            urgent = self.updated
        self.notify(urgent)
        self.updated = self.updated - urgent

    def notify(self, requests: set[Request], error: APIError | None = None) -> None:
        """Wakes the event loop's tasks of requests, perhaps with an error for the client."""
        for request in requests:
            request.error = request.error or error
        if requests:
            with contextlib.suppress(RuntimeError):  # nobody listens any more
                self.loop.call_soon_threadsafe(lambda: [request.updated.set() for request in requests])


# ---- the HTTP handlers


class Server(uvicorn.Server):
    """The model, the requests that it understands, and the HTTP handlers. Raises: RunError if the model does not run"""

    def __init__(self, run_dir: Path, args: argparse.Namespace):
        self.shutdown_timeout = args.shutdown_timeout
        run = engine.load_run(run_dir, args.step, args.device)
        self.tokenizer = run.tokenizer
        self.tokenizer.encode("")  # now, since later several threads would build its tables at once
        self.name = args.name or run_dir.resolve().name
        # Without a GPU a slot costs time even while it is idle.
        max_num_seqs = args.max_num_seqs or (32 if run.model.embed.is_cuda else 8)
        try:
            self.worker = Worker(run.model, self.tokenizer, max_num_seqs, args.max_queue_size, args.compile)
        except (RuntimeError, MemoryError) as error:
            problem = f"{max_num_seqs:,} slots do not fit into memory ({first_line(error)})"
            raise RunError(f"{problem}; use a smaller --max-num-seqs") from None
        max_len = self.worker.decoder.max_len
        chat = is_chat_run(run_dir)
        max_choices = max_num_seqs + args.max_queue_size
        self.protocol = Protocol(self.name, self.tokenizer, max_len, chat, max_choices)
        self.compilers = ThreadPoolExecutor(COMPILERS)
        model = {
            "id": self.name,
            "object": "model",
            "owned_by": "local",
            "created": int(time.time()),
            "max_model_len": max_len,
            "chat": chat,
        }
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", JSONResponse({"object": "list", "data": [model]}), methods=["GET"]),
            Route(f"/v1/models/{self.name}", JSONResponse(model), methods=["GET"]),
            Route("/v1/chat/completions", partial(self.post, self.protocol.prepare_chat), methods=["POST"]),
            Route("/v1/completions", partial(self.post, self.protocol.prepare_texts), methods=["POST"]),
            Route("/tokenize", partial(self.post, self.protocol.tokenize), methods=["POST"]),
            Route("/detokenize", partial(self.post, self.protocol.detokenize), methods=["POST"]),
        ]
        self.key = args.api_key
        self.hosts = {"localhost", args.host.lower(), *map(str.lower, args.allow_host)}  # names of this server
        self.paths = {route.path for route in routes}  # that are counted by name
        self.origins = [origin.rstrip("/") for origin in args.allow_origin]
        handlers = dict.fromkeys([APIError, HTTPException, Exception], failure)
        self.app = Starlette(routes=routes, exception_handlers=handlers)
        app = CORSMiddleware(self.gate, allow_origins=self.origins, allow_methods=["*"], allow_headers=["*"])

        # The worker is warm before anyone can connect.
        self.worker.start()
        self.worker.warm.wait()
        if self.worker.error:
            raise RunError(f"the model does not run: {first_line(self.worker.error)}")
        sys.setswitchinterval(SWITCH_SECONDS)
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_level="info" if args.access_log else "error",
            access_log=args.access_log,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=int(args.shutdown_timeout) + 2,
        )
        super().__init__(config)

    async def gate(self, scope, receive, send) -> None:
        """Counts requests, and keeps out other web pages (see the top) and those without the key."""
        path = scope["path"]
        label = path if path in self.paths else "other"

        async def counting(message) -> None:
            if message["type"] == "http.response.start":
                self.worker.metrics.requests.labels(label, message["status"]).inc()
            await send(message)

        refusal = self.check(HTTPRequest(scope).headers, path)
        await (refusal.response() if refusal else self.app)(scope, receive, counting)

    def check(self, headers, path: str) -> APIError | None:
        """The refusal of a request with these headers, or None if it may pass."""
        host = headers.get("host", "").lower()
        origin = headers.get("origin")
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
            if name not in self.hosts:
                ipaddress.ip_address(name)  # a page that rebinds a name has that name here
            known = origin is None or not {origin, "*"}.isdisjoint(self.origins)
            if not known and urllib.parse.urlsplit(origin).netloc.lower() != host:
                problem = f"requests from web pages of another origin are refused, found {shorten(origin)}"
                return APIError(403, f"{problem}; start the server with --allow-origin URL to allow it")
        except ValueError:
            problem = f"this server does not know {shorten(host)} of the Host header"
            return APIError(403, f"{problem}; start it with --allow-host NAME to allow it")
        if self.key is None or path == "/health":
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_key = hmac.compare_digest(key.strip().encode("latin-1"), self.key.encode())  # bytes, as they were sent
        if scheme.lower() == "bearer" and is_key:
            return None
        return APIError(401, 'this server needs its key: send "Authorization: Bearer KEY"', code="invalid_api_key")

    async def health(self, http_request: HTTPRequest) -> Response:
        worker = self.worker
        healthy = worker.is_alive() and worker.failures < 3
        state = {
            "status": "ok" if healthy else "failing",
            "max_num_seqs": worker.decoder.num_slots,
            "running": len(worker.sequences),
            "waiting": worker.num_waiting(),
        }
        return JSONResponse(state, 200 if healthy else 503)

    async def metrics(self, http_request: HTTPRequest) -> Response:
        text = prometheus.generate_latest(self.worker.metrics.registry)
        return Response(text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def post(self, action: Callable, http_request: HTTPRequest) -> Callable:
        """The answer to a request, by an action of Protocol or by the model."""
        data = await read_body(http_request)
        result = await asyncio.to_thread(action, data)
        if not isinstance(result, Request):
            return JSONResponse(result)
        if result.fields.response_format.type != "text":  # in threads of their own, as others must not wait
            await asyncio.get_running_loop().run_in_executor(self.compilers, self.protocol.set_masks, result)
        return partial(self.reply, result)

    async def reply(self, request: Request, scope, receive, send) -> None:
        """Has the model answer a request, and sends the answers. Raises: APIError, before it sends"""
        self.worker.submit(request)
        watching = asyncio.ensure_future(self.watch(receive, request))
        answers = answers_to(request, self.name, self.tokenizer)
        try:
            await request.wait()  # an error now is still a plain error
            if request.fields.stream:
                headers = {"Cache-Control": "no-store"}
                response = StreamingResponse(answers.events(), 200, headers, "text/event-stream")
                await response.stream_response(send)  # response(...) would also watch for a disconnect
                return
            while not request.done():
                await request.wait()
            # In a thread, since the JSON of many logprobs takes seconds.
            response = await asyncio.to_thread(lambda: JSONResponse(answers.whole()))
            await response(scope, receive, send)
        finally:
            watching.cancel()
            self.worker.abort(request)

    async def watch(self, receive, request: Request) -> None:
        """Aborts a request when its client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.worker.abort(request)
        request.error = APIError(499, "the client disconnected")
        request.updated.set()

    async def shutdown(self, sockets=None) -> None:
        self.worker.draining = True
        asyncio.get_running_loop().call_later(self.shutdown_timeout, self.worker.stop)
        await super().shutdown(sockets)
        self.worker.stop()


async def read_body(http_request: HTTPRequest) -> bytes:
    """The JSON of a request. Raises: APIError"""
    content_type = http_request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise APIError(415, 'the request must have the header "Content-Type: application/json"')
    data = bytearray()
    try:
        async for part in http_request.stream():
            data += part
            if len(data) > MAX_BODY:
                raise APIError(413, f"the request is too long; at most {MAX_BODY:,} bytes work")
    except ClientDisconnect:
        raise APIError(499, "the client disconnected") from None
    return bytes(data)


async def failure(http_request: HTTPRequest, error: Exception) -> Response:
    """What a client gets in place of an answer."""
    if isinstance(error, APIError):
        return error.response()
    if isinstance(error, HTTPException):  # an unknown path or method
        message = f"{http_request.method} {http_request.url.path[:100]}: {error.detail}"
        if error.status_code == 404 and not http_request.url.path.startswith("/v1/"):
            message += "; the base URL of the API ends with /v1"
        response = APIError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response
    return APIError(500, "the server failed; its log says how").response()


# ---- the command line


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on an address. Raises: RunError"""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (")[0]
        raise RunError(f"cannot listen on {host} port {port} ({reason}); choose another --host or --port") from None


def base_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main() -> int:
    args = parse()
    try:
        if args.api_key == "":
            raise RunError("--api-key is empty; name a key, or leave it out")
        listening = bind(args.host, args.port)  # first, since a model takes a while to load
        server = Server(args.run_dir, args)
    except RunError as error:
        print_note(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        os._exit(130)  # Python would abort while the worker is in the middle of a step
    host, port = listening.getsockname()[:2]
    kind = "chat" if server.protocol.chat else "completions"
    sizes = f"{server.worker.decoder.num_slots} slots, context {server.protocol.max_len:,}, {kind}"
    if not ipaddress.ip_address(host).is_loopback and args.api_key is None:
        print_note("note: everyone who can reach this address can use the model; set a key with --api-key")
    for signum in (signal.SIGTERM, signal.SIGINT):
        # uvicorn handles them while it runs, and raises them again once it is done.
        signal.signal(signum, lambda *_: setattr(server, "should_exit", True))
    print(f"{server.name}: {base_url(host, port)} ({sizes})", flush=True)
    if args.page:  # a process that prints its address once it is ready, and ends with this one
        url = base_url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
        environment = {**os.environ, "OPENAI_API_KEY": args.api_key or "", "DECODERSTACK_SERVER": str(os.getpid())}
        subprocess.Popen([sys.executable, Path(__file__).with_name("page.py"), url], env=environment)
    server.run(sockets=[listening])
    server.worker.join(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
