"""An OpenAI-compatible server for a run directory.

    python runs/serve.py out/RUN                    at http://127.0.0.1:8000
    python runs/serve.py out/RUN --page             with a web page to chat with it, see runs/page.py
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'

GET /v1/models, /health and /metrics (for Prometheus); POST /v1/chat/completions and /v1/completions.
runs/lib/protocol.py has their fields, CONNECT.md the lines for other clients.

The event loop checks a request and submits it to the Worker (runs/lib/worker.py), a thread that owns the model and
decodes up to --max-num-seqs answers together, each in a slot of its KV cache. Up to --max-queue-size more wait, and
above that the answer is 429. A request without a slot takes one from a request with several, whose answer continues
later.

Log-probabilities are the model's own, before temperature and penalties. With echo they cover the prompt, as
lm-evaluation-harness needs it (model local-completions, add_bos_token=True). A finetuned model has a calculator, except
where response_format asks for JSON: call and result are in the text, as [3*4 = 12], and in a stream those pieces carry
"part": "python" or "python_output" beside "content".

With --api-key, or a key in the environment variable DECODERSTACK_API_KEY, all but / and /health needs "Authorization:
Bearer KEY". Host must be an IP address, localhost or an --allow-host (against DNS rebinding), Origin, if sent, must be
the server itself or an --allow-origin (CORS), and a POST must be application/json. Texts are never logged. SIGTERM and
Ctrl-C end the server once the running answers are complete, after --shutdown-timeout seconds at most; a second one ends
it at once.
"""

import argparse
import asyncio
import hmac
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
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
        help="maximum number of answers that decode together (default: 32, or 8 without a GPU)")  # fmt: skip
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
    add("--compile", action="store_true", help="compiled steps: faster, but the start takes half a minute longer")
    add("--api-key", metavar="KEY", default=os.environ.get(KEY_VARIABLE) or None,
        help=f"key that clients must send (default: ${KEY_VARIABLE})")  # fmt: skip
    add("--page", action="store_true", help="chat page beside the API (runs/page.py); its visitors need no key")
    add("--access-log", action="store_true", help="log of requests on stderr")
    args = parser.parse_args(argv)
    if min(args.max_num_seqs, args.max_queue_size) < 0:
        found = f"found {args.max_num_seqs} and {args.max_queue_size}"
        parser.error(f"--max-num-seqs and --max-queue-size must be at least 0, {found}")
    return args


if __name__ == "__main__":
    parse()  # before the imports that take seconds, for which --help need not wait

import engine
import prometheus_client as prometheus
import uvicorn
from lib.chat_format import is_chat_run
from lib.command import RunError, error_message, first_line, print_note
from lib.protocol import APIError, ChatAnswers, ChatFields, Protocol, Request, TextAnswers, shorten
from lib.web_origin import foreign_host, foreign_origin
from lib.worker import Worker
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

MAX_BODY = 1 << 20  # bytes of a request
# A connection stays open for so long between two requests: longer than clients keep an idle one (openai: 5 s), or they
# may send into a closed one.
IDLE_SECONDS = 30
MAX_CONNECTIONS = 1000
# A thread that runs gives way to one that waits after so long (Python: 5 ms). The worker needs the interpreter's lock
# again after each call to the device.
SWITCH_SECONDS = 2e-4
COMPILERS = 4  # schemas of answers that are compiled at a time

# ---- the HTTP handlers


class Server(uvicorn.Server):
    """The model, the requests that it understands, and the HTTP handlers. Raises: RunError if the model does not run"""

    def __init__(self, run_dir: Path, args: argparse.Namespace):
        self.shutdown_timeout = args.shutdown_timeout
        run = engine.load_run(run_dir, args.step, args.device)
        self.tokenizer = run.tokenizer
        self.tokenizer.encode("")  # now, since later several threads would build its tables at once
        self.name = args.name or run_dir.resolve().name
        max_num_seqs = args.max_num_seqs or (32 if run.model.embed.is_cuda else 8)  # on a CPU idle slots cost time too
        try:
            self.worker = Worker(run.model, self.tokenizer, max_num_seqs, args.max_queue_size, args.compile)
        except (RuntimeError, MemoryError) as error:
            problem = f"{max_num_seqs:,} slots do not fit into memory ({first_line(error)})"
            raise RunError(f"{problem}; use a smaller --max-num-seqs") from None
        max_choices = max_num_seqs + args.max_queue_size
        max_len = self.worker.decoder.max_len
        self.protocol = Protocol(self.name, self.tokenizer, max_len, is_chat_run(run_dir), max_choices)
        self.compilers = ThreadPoolExecutor(COMPILERS)

        self.key = args.api_key
        self.hosts = {args.host.lower(), *map(str.lower, args.allow_host)}  # names of this server
        self.origins = [origin.rstrip("/") for origin in args.allow_origin]
        self.page_url = ""  # of the web page, once it is ready
        routes = self.routes()
        self.paths = {route.path for route in routes}  # labels of /metrics
        handlers = dict.fromkeys([APIError, HTTPException, Exception], failure)
        self.app = Starlette(routes=routes, exception_handlers=handlers)
        app = CORSMiddleware(self.check_and_count, allow_origins=self.origins, allow_methods=["*"], allow_headers=["*"])

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

    def routes(self) -> list[Route]:
        model = {
            "id": self.name,
            "object": "model",
            "owned_by": "local",
            "created": int(time.time()),
            "max_model_len": self.protocol.max_len,
            "chat": self.protocol.chat,
        }
        return [
            Route("/", self.root),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", JSONResponse({"object": "list", "data": [model]}), methods=["GET"]),
            Route(f"/v1/models/{self.name}", JSONResponse(model), methods=["GET"]),
            Route("/v1/chat/completions", partial(self.post, self.protocol.prepare_chat), methods=["POST"]),
            Route("/v1/completions", partial(self.post, self.protocol.prepare_texts), methods=["POST"]),
        ]

    async def check_and_count(self, scope, receive, send) -> None:
        """Keeps out other web pages (see the top) and requests without the key, and counts all."""
        path = scope["path"]
        label = path if path in self.paths else "other"

        async def send_and_count(message) -> None:
            if message["type"] == "http.response.start":
                self.worker.metrics.requests.labels(label, message["status"]).inc()
            await send(message)

        refusal = self.check(HTTPRequest(scope).headers, path)
        await (refusal.response() if refusal else self.app)(scope, receive, send_and_count)

    def check(self, headers, path: str) -> APIError | None:
        """The refusal of a request with these headers, or None if it may pass."""
        if foreign_host(headers, self.hosts):
            host = headers.get("host", "").lower()
            problem = f"this server does not accept the Host header {shorten(host)}"
            return APIError(403, f"{problem}; start it with --allow-host NAME to allow it")
        if foreign_origin(headers, tuple(self.origins)):
            origin = headers.get("origin")
            problem = f"requests from web pages of another origin are refused, found {shorten(origin)}"
            return APIError(403, f"{problem}; start the server with --allow-origin URL to allow it")
        if self.key is None or path in ("/", "/health"):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_key = hmac.compare_digest(key.strip().encode("latin-1"), self.key.encode())  # bytes, as they were sent
        if scheme.lower() == "bearer" and is_key:
            return None
        return APIError(401, 'this server needs an API key: send "Authorization: Bearer KEY"', code="invalid_api_key")

    async def root(self, http_request: HTTPRequest) -> Response:
        """For browsers on this machine, the only ones that can reach it: leads to the web page."""
        if self.page_url and ipaddress.ip_address(http_request.client.host).is_loopback:
            return RedirectResponse(self.page_url)
        raise HTTPException(404, "Not Found; --page starts a chat page for browsers on this machine")

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
        """The answer to a request, which an action of Protocol reads."""
        data = await read_body(http_request)
        result = await asyncio.to_thread(action, data)
        if result.fields.response_format.type != "text":  # in threads of their own, as others must not wait
            await asyncio.get_running_loop().run_in_executor(self.compilers, self.protocol.set_masks, result)
        return partial(self.reply, result)

    async def reply(self, request: Request, scope, receive, send) -> None:
        """Has the model answer a request, and sends the answers. Raises: APIError, before it sends"""
        self.worker.submit(request)
        watching = asyncio.ensure_future(self.watch(receive, request))
        form = ChatAnswers if isinstance(request.fields, ChatFields) else TextAnswers
        answers = form(request, self.name, self.tokenizer)
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
            response = await asyncio.to_thread(lambda: JSONResponse(answers.body()))
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

    def follow_page(self, page: subprocess.Popen) -> None:
        """Prints what the process of the web page prints, and keeps its address."""
        for line in page.stdout:
            print(line, end="", flush=True)
            if line.startswith("page: "):
                self.page_url = line.removeprefix("page: ").strip()

    def handle_exit(self, signum: int, frame) -> None:
        """Ends the server once the running answers are complete; a second signal ends them with an error."""
        if self.should_exit:
            self.worker.stop()
        elif self.worker.sequences:
            print_note("note: running answers end first; Ctrl-C again stops them")
        self.should_exit = True

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
                raise APIError(413, f"the request is too long; at most {MAX_BODY:,} bytes are allowed")
    except ClientDisconnect:
        raise APIError(499, "the client disconnected") from None
    return bytes(data)


async def failure(http_request: HTTPRequest, error: Exception) -> Response:
    """What a client gets in place of an answer."""
    if isinstance(error, APIError):
        return error.response()
    if isinstance(error, HTTPException):  # an unknown path or method
        message = f"{http_request.method} {http_request.url.path[:100]}: {error.detail}"
        if error.status_code == 404 and http_request.url.path.startswith("/v1/"):
            message += "; this server has chat/completions, completions and models"
        elif error.status_code == 404:
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
    """The address for a browser on this machine; 0.0.0.0 and :: mean all interfaces, and browsers refuse them."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main() -> int:
    args = parse()
    sys.stdout.reconfigure(errors="replace")  # "?" where the terminal cannot show a name
    try:
        if args.api_key == "":
            raise RunError("--api-key is empty; pass a key, or omit the flag")
        listening = bind(args.host, args.port)  # first, since a model takes a while to load
        server = Server(args.run_dir, args)
    except KeyboardInterrupt:
        os._exit(130)  # Python would abort while the worker is in the middle of a step
    except Exception as error:
        message = error_message(error)
        if not message:
            raise
        print_note(f"error: {message}")
        return 1
    host, port = listening.getsockname()[:2]
    kind = "chat" if server.protocol.chat else "completions"
    sizes = f"{server.worker.decoder.num_slots} slots, context {server.protocol.max_len:,}, {kind}"
    url = base_url(host, port)
    others = ", also on all other addresses of this machine" if ipaddress.ip_address(host).is_unspecified else ""
    if not ipaddress.ip_address(host).is_loopback and args.api_key is None:
        print_note("note: everyone who can reach this address can use the model; set a key with --api-key")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, server.handle_exit)  # as uvicorn does while it runs
    print(f"{server.name}: {url}{others} ({sizes})", flush=True)
    if args.page:  # a process that prints its address once it is ready, and ends with this one
        environment = {**os.environ, "OPENAI_API_KEY": args.api_key or "", "DECODERSTACK_SERVER": str(os.getpid())}
        hosts = [f"--allow-host={name}" for name in args.allow_host]
        command = [sys.executable, Path(__file__).with_name("page.py"), url, *hosts]
        page = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
        threading.Thread(target=server.follow_page, args=(page,), daemon=True).start()
    server.run(sockets=[listening])
    server.worker.join(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
