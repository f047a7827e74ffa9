"""An OpenAI-compatible server for a run directory.

    python runs/serve.py out/RUN                    at http://127.0.0.1:8000
    python runs/serve.py out/RUN --page             with a web page to chat with it, see runs/page.py
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

GET /v1/models, /health and /metrics (for Prometheus); POST /v1/chat/completions, /v1/completions, /tokenize and
/detokenize; runs/lib/protocol.py has their fields, CONNECT.md the lines for other clients.

The event loop checks a request and submits it to the Worker, a thread that owns the model and decodes up to --rows
answers together. Up to --max-waiting more wait, and above that the answer is 429. A request without a row takes one
from a request with several, whose answer continues later.

Log-probabilities are the model's own, before temperature and penalties. With echo they cover the prompt, as
lm-evaluation-harness needs it (model local-completions, add_bos_token=True). A finetuned model has a calculator, except
where response_format asks for JSON: call and result are in the text, as [3*4 = 12], and in a stream those pieces carry
"part": "python" or "python_output" beside "content".

With --api-key, or a key in the environment variable DECODERSTACK_API_KEY, all but /health needs "Authorization: Bearer
KEY". Host must be an IP address, localhost or an --allow-host (against DNS rebinding), Origin, if sent, must be the
server itself or an --allow-origin (CORS), and a POST must be application/json. Texts are never logged. SIGTERM and
Ctrl-C end the server once the answers under way are written, after --drain seconds at most.
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
    add("--host", default="127.0.0.1", help="address [%(default)s]; 0.0.0.0: every network")
    add("--port", type=int, default=8000, help="0: any free one [%(default)s]")
    add("--rows", type=int, default=0, help="answers at a time (default 32, without a GPU 8)")
    add("--max-waiting", type=int, default=256, help="answers that may wait [%(default)s]")
    add("--drain", type=float, default=10, metavar="SECONDS", help="to finish answers [%(default)s]")
    add("--allow-host", metavar="NAME", action="append", default=[],
        help="a name that clients may use for this machine, repeatable")  # fmt: skip
    add("--allow-origin", metavar="URL", action="append", default=[],
        help="a web page's address, such as http://localhost:3000, that may use this server, repeatable")  # fmt: skip
    add("--name", help="of the model (default: that of the run directory)")
    add("--step", type=int, help="checkpoint to use (default: the newest)")
    add("--device", help="cuda, mps or cpu (default: the best available)")
    add("--compile", action="store_true", help="faster steps, half a minute more at the start")
    add("--api-key", metavar="KEY", default=os.environ.get(KEY_VARIABLE) or None,
        help=f"key that clients must send (default: ${KEY_VARIABLE})")  # fmt: skip
    add("--page", action="store_true", help="also start a web page, runs/page.py")
    add("--access-log", action="store_true", help="print a line for each request")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # before the imports that take seconds, for which --help need not wait

import engine
import prometheus_client as prometheus
import torch
import uvicorn
from lib.chat_format import is_chat_run
from lib.command import RunError, first_line, print_note
from lib.protocol import Answers, APIError, Protocol, Request, Sequence, shorten
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
# Up to FEW answers, each id goes out with its step. With more, a client gets news every MESSAGE_SECONDS times the
# number of answers beyond FEW, as messages cost more time than ids.
FEW = 8
MESSAGE_SECONDS = 4e-4
HOLD = 2  # steps that new sequences may wait for others, so that one prefill serves all
STOPPING = "the server is stopping"
FAILED = "the model no longer runs, and the server's log says why; start the server again"
COMPILERS = 4  # schemas of answers that are compiled at a time

# ---- the thread that owns the model


class Metrics:
    def __init__(self, worker: "Worker"):
        self.registry = prometheus.CollectorRegistry()
        own = {"namespace": "decoderstack", "registry": self.registry}
        counter = partial(prometheus.Counter, **own)
        self.requests = counter("requests", "Requests by path and status", ("path", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "Tokens of prompts that earlier requests had cached")
        self.new_tokens = counter("generated_tokens", "Tokens of answers")
        self.steps = counter("steps", "Steps of the model")
        self.preemptions = counter("moved_answers", "Answers that made room for another request")
        self.abandoned = counter("abandoned_requests", "Requests whose client left")
        text = "From the arrival of a request to the first token of an answer, counted for each answer"  # as in vLLM
        self.time_to_first_token = prometheus.Histogram("time_to_first_token_seconds", text, **own)
        gauge = partial(prometheus.Gauge, **own)
        gauge("rows", "Answers that can be written at a time").set_function(lambda: worker.decoder.num_slots)
        gauge("answers_live", "Answers being written").set_function(lambda: len(worker.sequences))
        gauge("answers_waiting", "Answers that wait for a row").set_function(worker.waiting)


class Worker(threading.Thread):
    """Decodes all sequences in the rows of one Decoder. The event loop submits, withdraws and stops."""

    def __init__(self, model, tokenizer, rows: int, max_waiting: int, compile: bool = False):
        super().__init__(name="worker", daemon=True)
        self.model = model
        self.max_waiting = max_waiting
        self.decoder = engine.Decoder(model, tokenizer, rows, compile=compile, prefix_slots=max(2, rows // 4))
        self.queue: dict[Request, None] = {}  # requests with sequences that wait, in order of arrival
        self.sequences: dict[int, Sequence] = {}  # by row
        self.idle_rows = list(range(rows))  # the one unused for longest first
        self.steps_held = 0  # steps in a row that new sequences have waited for others
        self.unsent: set[Request] = set()  # requests with news that the event loop has not heard of
        self.notified = 0.0  # when it last heard of all news
        self.failures = 0  # in a row
        self.draining = False  # no new requests, as it stops or has failed
        self.closed = False  # the loop of run() ends
        self.wake = threading.Condition()
        self.warm = threading.Event()
        self.error: Exception | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.metrics = Metrics(self)

    def waiting(self) -> int:
        return sum(len(request.waiting) for request in list(self.queue))

    def submit(self, request: Request) -> None:
        """Queues the sequences of one request, all or none. Raises: APIError"""
        self.loop = asyncio.get_running_loop()
        with self.wake:
            if self.draining:
                raise APIError(503, FAILED if self.error else STOPPING)
            taken = self.waiting() + len(self.sequences)
            most = self.decoder.num_slots + self.max_waiting
            if taken + len(request.sequences) > most:
                busy = f"{taken} answers are being written or wait, and at most {most} may; try again in a moment"
                raise APIError(429, busy, code="queue_full")
            self.queue[request] = None
            self.wake.notify()

    def withdraw(self, request: Request) -> None:
        """Ends a request, also when its client left; its rows are free before the next step."""
        if not request.gone and not request.done() and not request.error:
            self.metrics.abandoned.inc()
        request.gone = True
        with self.wake:
            request.waiting.clear()
            self.queue.pop(request, None)

    def stop(self) -> None:
        """Ends the answers under way with an error."""
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
        self.notify(self.unsent)
        self.notify(requests, APIError(503, FAILED if self.error else STOPPING))

    def warm_up(self) -> None:
        """Builds the usual graphs before anyone waits for them, and takes memory for a prefill."""
        if self.model.embed.is_cuda:
            torch.cuda.set_device(self.model.embed.device)  # of this thread
        for size in (128, *(engine.NEW_BUCKETS if self.decoder.prefill_graphs is not None else ())):
            prompt = [0] * min(size, self.decoder.max_len)
            for temperature in (0.0, engine.Completion.temperature):
                self.decoder.add_requests({0: engine.Completion(prompt, 1, temperature)})
                self.decoder.step()
                self.decoder.evict(0)

    def step(self) -> None:
        """Drops sequences that nobody waits for, puts others into free rows, and makes one step."""
        for row, sequence in list(self.sequences.items()):
            if sequence.request.gone or sequence.reason:  # its client left, or a stop string ended it
                self.release(row)
        with self.wake:
            self.preempt()
            new = self.schedule()
        try:
            if new:
                self.add_sequences(new)
        except Exception:
            self.fail([*new])
        try:
            outputs = self.decoder.step()
            if outputs:
                self.failures = 0
                self.metrics.steps.inc()
                self.metrics.new_tokens.inc(sum(output.token is not None for output in outputs))
            self.deliver(outputs)
        except Exception:
            self.fail([*self.sequences])

    # -- rows

    def preempt(self) -> None:
        """Makes a row idle for each request that has none, as long as another request has two or more.

        The request with the most rows gives up that of its shortest answer, which keeps its tokens and continues later.
        """
        waiting = [request for request in self.queue if not request.num_running]
        for _ in range(len(waiting) - len(self.idle_rows)):
            running = [sequence.request for sequence in self.sequences.values()]
            largest = max(running, key=lambda request: request.num_running, default=None)
            if largest is None or largest.num_running < 2:
                return
            rows = [row for row, sequence in self.sequences.items() if sequence.request is largest]
            row = min(rows, key=lambda row: len(self.sequences[row].completion.tokens))
            largest.waiting.appendleft(self.release(row))
            self.queue[largest] = None
            self.metrics.preemptions.inc()

    def schedule(self) -> dict[int, Sequence]:
        """Chooses rows for waiting sequences.

        The request with the fewest rows is next, and of these the one that came first. A sequence gets the row that
        holds its longest prefix, or the one that has been unused for longest. What one step computes is bounded.
        """
        new = {}
        if not self.idle_rows or not self.queue or self.holds_back():
            return new
        num_new = 0
        while self.idle_rows and self.queue and num_new < 16384:
            request = min(self.queue, key=lambda request: request.num_running)
            sequence = request.waiting.popleft()
            if not request.waiting:
                del self.queue[request]
            ids = sequence.completion.all_tokens()
            num_cached = {row: self.decoder.prefix_cache.match(row, ids) for row in self.idle_rows}
            row = max(num_cached, key=num_cached.get)  # the first of equals
            num_new += len(ids) - num_cached[row]
            self.idle_rows.remove(row)
            request.num_running += 1
            new[row] = sequence
        self.sequences |= new  # under the lock, so that submit() counts each once
        return new

    def holds_back(self) -> bool:
        """Whether a few new sequences should wait for others, as each prefill holds all rows up."""
        few = self.waiting() < self.decoder.num_slots // 8
        wait = bool(self.sequences) and few and self.steps_held < HOLD
        self.steps_held = self.steps_held + 1 if wait else 0
        return wait

    def add_sequences(self, new: dict[int, Sequence]) -> None:
        num_cached = self.decoder.add_requests({row: sequence.completion for row, sequence in new.items()})
        for row, sequence in new.items():
            if sequence.num_cached is None:  # it is not one that was preempted
                sequence.num_cached = num_cached[row]
                self.metrics.prompt_tokens.inc(len(sequence.completion.prompt))
                self.metrics.cached_tokens.inc(num_cached[row])

    def release(self, row: int) -> Sequence:
        """Makes a row idle, whether its answer has ended or not; what it holds stays in the prefix cache."""
        if row in self.decoder.running:
            self.decoder.release([row])
        sequence = self.sequences.pop(row)
        sequence.request.num_running -= 1
        self.idle_rows.append(row)
        return sequence

    # -- results

    def fail(self, rows: list[int]) -> None:
        """Reports a failure to those whose answers were in these rows; the server goes on."""
        self.failures += 1
        traceback.print_exc()
        requests = {self.sequences[row].request for row in rows}
        for row in rows:
            with contextlib.suppress(Exception):  # the device may no longer work
                self.decoder.evict(row)
            self.release(row)
        self.notify(requests, APIError(500, "the model failed; the server's log says how"))

    def deliver(self, outputs: list[engine.StepOutput]) -> None:
        """Gives the outputs of a step to their sequences, and tells the event loop which requests have news.

        While few answers are written it hears of each id at once. With many, the ids of several steps go out together,
        but the first and the last id of an answer do not wait. Only the end is news to a client that does not stream.
        """
        urgent = set()
        for output in outputs:
            sequence = self.sequences[output.slot]
            request = sequence.request
            sequence.add_output(output)
            is_first = output.token is not None and len(sequence.completion.tokens) == 1
            if is_first:
                self.metrics.time_to_first_token.observe(time.monotonic() - request.began)
            if output.reason:
                self.release(output.slot)
            if request.fields.stream or request.done():
                self.unsent.add(request)
                if is_first or sequence.reason:
                    urgent.add(request)

        now = time.monotonic()
        wait = MESSAGE_SECONDS * (len(self.sequences) - FEW)  # below 0 with few answers
        if now - self.notified >= wait:
            self.notified = now
            urgent = self.unsent
        self.notify(urgent)
        self.unsent = self.unsent - urgent

    def notify(self, requests: set[Request], problem: APIError | None = None) -> None:
        for request in requests:
            request.error = request.error or problem
        if requests:
            with contextlib.suppress(RuntimeError):  # nobody listens any more
                self.loop.call_soon_threadsafe(lambda: [request.news.set() for request in requests])


# ---- the HTTP handlers


class Server(uvicorn.Server):
    """The model, the requests that it understands, and the HTTP handlers. Raises: RunError if the model does not run"""

    def __init__(self, run_dir: Path, args: argparse.Namespace):
        self.drain = args.drain
        run = engine.load_run(run_dir, args.step, args.device)
        self.tokenizer = run.tokenizer
        self.tokenizer.encode("")  # now, since later several threads would build its tables at once
        self.name = args.name or run_dir.resolve().name
        # Without a GPU a row costs time even while it is idle.
        rows = args.rows or (32 if run.model.embed.is_cuda else 8)
        try:
            self.worker = Worker(run.model, self.tokenizer, rows, args.max_waiting, args.compile)
        except (RuntimeError, MemoryError) as error:
            reason = first_line(error)
            raise RunError(f"{rows:,} rows do not fit into memory ({reason}); use fewer --rows") from None
        limit = self.worker.decoder.max_len
        chat = is_chat_run(run_dir)
        self.protocol = Protocol(self.name, self.tokenizer, limit, chat, rows + args.max_waiting)
        self.compilers = ThreadPoolExecutor(COMPILERS)
        model = {"id": self.name, "object": "model", "owned_by": "local"}
        model |= {"created": int(time.time()), "max_model_len": limit, "chat": chat}
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
        log = {"log_level": "info" if args.access_log else "error", "access_log": args.access_log}
        limits = {"limit_concurrency": MAX_CONNECTIONS, "timeout_keep_alive": IDLE_SECONDS}
        limits["timeout_graceful_shutdown"] = int(args.drain) + 2
        super().__init__(uvicorn.Config(app, ws="none", lifespan="off", **log, **limits))

    async def gate(self, scope, receive, send) -> None:
        """Counts requests, and keeps out other web pages (see the top) and those without the key."""
        path = scope["path"]
        label = path if path in self.paths else "other"

        async def counting(message) -> None:
            if message["type"] == "http.response.start":
                self.worker.metrics.requests.labels(label, message["status"]).inc()
            await send(message)

        problem = self.check(HTTPRequest(scope).headers, path)
        await (problem.response() if problem else self.app)(scope, receive, counting)

    def check(self, headers, path: str) -> APIError | None:
        host = headers.get("host", "").lower()
        origin = headers.get("origin")
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
            if name not in self.hosts:
                ipaddress.ip_address(name)  # a page that rebinds a name has that name here
            known = origin is None or not {origin, "*"}.isdisjoint(self.origins)
            if not known and urllib.parse.urlsplit(origin).netloc.lower() != host:
                wrong = f"requests from web pages of another origin are refused, found {shorten(origin)}"
                return APIError(403, f"{wrong}; start the server with --allow-origin URL to allow it")
        except ValueError:
            wrong = f"this server does not know {shorten(host)} of the Host header"
            return APIError(403, f"{wrong}; start it with --allow-host NAME to allow it")
        if self.key is None or path == "/health":
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), self.key.encode())  # bytes, as they were sent
        if kind.lower() == "bearer" and right:
            return None
        return APIError(401, 'this server needs its key: send "Authorization: Bearer KEY"', code="invalid_api_key")

    async def health(self, http_request: HTTPRequest) -> Response:
        worker = self.worker
        good = worker.is_alive() and worker.failures < 3
        state = {"status": "ok" if good else "failing", "rows": worker.decoder.num_slots}
        state |= {"live": len(worker.sequences), "waiting": worker.waiting()}
        return JSONResponse(state, 200 if good else 503)

    async def metrics(self, http_request: HTTPRequest) -> Response:
        text = prometheus.generate_latest(self.worker.metrics.registry)
        return Response(text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def post(self, action: Callable, http_request: HTTPRequest) -> Callable:
        """The answer to a request, by an action of Protocol or by the model."""
        data = await read_body(http_request)
        found = await asyncio.to_thread(action, data)
        if isinstance(found, Request):
            if found.fields.response_format.type != "text":  # in threads of their own, as others must not wait
                await asyncio.get_running_loop().run_in_executor(self.compilers, self.protocol.set_masks, found)
            return partial(self.reply, found)
        return JSONResponse(found)

    async def reply(self, request: Request, scope, receive, send) -> None:
        """Has the answers to a request written, and sends them. Raises: APIError, before it sends"""
        self.worker.submit(request)
        watching = asyncio.ensure_future(self.watch(receive, request))
        answers = Answers(request, self.name, self.tokenizer)
        try:
            await request.progress()  # an error now is still a plain error
            if request.fields.stream:
                headers = {"Cache-Control": "no-store"}
                response = StreamingResponse(answers.events(), 200, headers, "text/event-stream")
                await response.stream_response(send)  # response(...) would also watch for the client's leaving
                return
            while not request.done():
                await request.progress()
            # In a thread, since the JSON of many logprobs takes seconds.
            response = await asyncio.to_thread(lambda: JSONResponse(answers.whole()))
            await response(scope, receive, send)
        finally:
            watching.cancel()
            self.worker.withdraw(request)

    async def watch(self, receive, request: Request) -> None:
        """Ends a request when its client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.worker.withdraw(request)
        request.error = APIError(499, "the client left")
        request.news.set()

    async def shutdown(self, sockets=None) -> None:
        self.worker.draining = True
        asyncio.get_running_loop().call_later(self.drain, self.worker.stop)
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
        raise APIError(499, "the client left") from None
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
    sizes = f"{server.worker.decoder.num_slots} rows, context {server.protocol.limit:,}, {kind}"
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
