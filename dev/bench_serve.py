"""Speed of a running server: tokens a second and time to the first token, and a soak with clients that disconnect.

    python runs/serve.py out/RUN --max-num-seqs 64 --compile &
    python dev/bench_serve.py                            1, 8 and 64 clients, answers of 128 tokens
    python dev/bench_serve.py --soak 10000 --pid PID     10,000 requests of 64 clients, a third disconnects
    python dev/bench_serve.py --smoke                    a few requests, on any machine

    python dev/bench_serve.py out/RUN --compile --repeats 5
                                                         with a server of its own
    python dev/bench_serve.py out/RUN --stub 3           the server alone on one CPU core, around a
                                                         model that says random ids every 3 ms

Every request of the table is for exactly --tokens tokens: where an answer ends earlier, its client
asks once more for the rest, until the count is full. "short" counts these further requests. The
clients are threads of processes of their own with plain sockets, so that what is measured is the
server. It must listen on 127.0.0.1; nothing else is spoken to. With --pid the memory of the server
is read at the start, in the middle and at the end of a soak, and "cpu us" is its processor time for
each token (Linux). With a run directory the bench starts the server itself, with --max-num-seqs
and --compile as given, and ends it. With --repeats the figures are medians. The last line is the
result as JSON.

The time to the first token is from the start of a connection to the first event with text.
Tokens are those that the server counts (usage of a stream), not events, which may hold several.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOST = "127.0.0.1"
WORDS = "what why how the sky sea stone bread old blue small is are do we who wrote made of in".split()
KEY_VARIABLE = "DECODERSTACK_API_KEY"


@dataclass
class Outcome:
    """What one request gave."""

    tokens: int
    first: float  # seconds to the first text
    aborted: bool  # the client disconnected in the middle
    error: str = ""


class Client:
    """Sends requests over one connection after the other, and reads streams."""

    def __init__(self, port: int, chat: bool, tokens: int, seed: int, as_json: bool = False):
        self.as_json = as_json
        self.port = port
        self.chat = chat
        self.tokens = tokens
        self.rng = random.Random(seed)

    def body(self) -> dict:
        question = " ".join(self.rng.choices(WORDS, k=self.rng.randint(5, 40)))
        fields = {
            "max_tokens": self.tokens,
            "temperature": 0.8,
            "seed": self.rng.randrange(2**31),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.as_json:
            schema = {"type": "array", "items": {"type": "boolean"}, "minItems": self.tokens}
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        if self.chat:
            return fields | {"messages": [{"role": "user", "content": question}]}
        return fields | {"prompt": question}

    def ask(self, abort_after: int = 0) -> Outcome:
        """One request; the client disconnects after so many events, if that is not 0."""
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        data = json.dumps(self.body()).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {HOST}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n"
        )
        if key := os.environ.get(KEY_VARIABLE):
            head += f"Authorization: Bearer {key}\r\n"
        began = time.perf_counter()
        with socket.create_connection((HOST, self.port), timeout=120) as connection:
            connection.sendall(head.encode() + b"\r\n" + data)
            return read_stream(connection, began, abort_after)

    def ask_in_full(self) -> list[Outcome]:
        """Requests until exactly `tokens` tokens came."""
        outcomes = []
        missing = self.tokens
        whole = self.tokens
        while missing > 0:
            self.tokens = missing
            outcome = self.ask()
            outcomes.append(outcome)
            if outcome.error or not outcome.tokens:
                break
            missing -= outcome.tokens
        self.tokens = whole
        return outcomes


def read_stream(connection: socket.socket, began: float, abort_after: int) -> Outcome:
    """Reads server-sent events to their end."""
    first = 0.0
    tokens = 0
    count = 0
    held = b""
    while part := connection.recv(65536):
        held += part
        lines = held.split(b"\n")
        held = lines.pop()
        for line in lines:
            if line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
                return Outcome(0, 0.0, False, line.decode().strip())
            if not line.startswith(b"data: {"):
                if line.startswith(b"data: [DONE]"):
                    return Outcome(tokens, first, False)
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return Outcome(tokens, first, False, event["error"]["message"])
            if not first and any(has_text(choice) for choice in event["choices"]):
                first = time.perf_counter() - began
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            count += 1
            if count == abort_after:
                return Outcome(tokens, first, True)
    return Outcome(tokens, first, False, "the stream ended without [DONE]")


def has_text(choice: dict) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


# ---- load


def run_clients(settings: dict, results) -> None:
    """The threads of one process: each asks until the requests of all are used up."""
    lock = threading.Lock()
    left = [settings["requests"]]
    outcomes = []

    def work(seed: int) -> None:
        as_json = settings["json"] and seed == settings["seed"]
        client = Client(settings["port"], settings["chat"], settings["tokens"], seed, as_json)
        while True:
            with lock:
                if left[0] <= 0:
                    return
                left[0] -= 1
            aborts = settings["abort_fraction"] and client.rng.random() < settings["abort_fraction"]
            try:
                if aborts:
                    new = [client.ask(client.rng.randint(1, 1 + client.tokens // 8))]
                elif settings["exact"]:
                    new = client.ask_in_full()
                else:
                    new = [client.ask()]
            except OSError as error:
                new = [Outcome(0, 0.0, False, f"{type(error).__name__}: {error}")]
            with lock:
                outcomes.extend(new)

    seeds = [settings["seed"] + i for i in range(settings["clients"])]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(json.dumps([vars(outcome) for outcome in outcomes]))


def load(args, clients: int, requests: int, abort_fraction: float = 0.0, exact: bool = True) -> dict:
    """The outcome of so many clients together, spread over a few processes."""
    processes = min(args.processes, clients)
    results = multiprocessing.Queue()
    workers = []
    for i in range(processes):
        settings = {
            "port": args.port, "chat": args.chat, "tokens": args.tokens, "abort_fraction": abort_fraction,
            "exact": exact, "seed": 1000 * (i + 1) + args.seed, "clients": share(clients, processes, i),
            "requests": share(requests, processes, i), "json": i < args.json,
        }  # fmt: skip
        workers.append(multiprocessing.Process(target=run_clients, args=(settings, results)))
    cpu = server_cpu(args.pid)
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    outcomes = [Outcome(**one) for _ in workers for one in json.loads(results.get())]
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    if cpu is not None:
        cpu = server_cpu(args.pid) - cpu

    firsts = [outcome.first for outcome in outcomes if outcome.first and not outcome.error]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    tokens = sum(outcome.tokens for outcome in outcomes)
    return {
        "clients": clients,
        "requests": len(outcomes),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "first_ms": round(1000 * float(np.median(firsts)), 1) if firsts else None,
        "first_ms_p95": round(1000 * float(np.percentile(firsts, 95)), 1) if firsts else None,
        "short": len(outcomes) - requests if exact else 0,
        "aborted": sum(outcome.aborted for outcome in outcomes),
        "cpu_us": round(1e6 * cpu / tokens, 1) if cpu is not None and tokens else None,
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
    }


def middle(repeats: list[dict]) -> dict:
    """Medians of the figures of some repeats, and sums of what they count."""
    if len(repeats) == 1:
        return repeats[0]
    result = dict(repeats[0])
    for name in ("requests", "tokens", "short", "aborted", "errors"):
        result[name] = sum(one[name] for one in repeats)
    for name in ("seconds", "tokens_per_s", "first_ms", "first_ms_p95", "cpu_us"):
        values = [one[name] for one in repeats if one[name] is not None]
        result[name] = round(float(np.median(values)), 2) if values else None
    result["first_error"] = next((one["first_error"] for one in repeats if one["errors"]), "")
    return result | {"repeats": repeats}


def spread(repeats: list[dict]) -> str:
    """The lowest and the highest speed and time to the first token, if there are several."""
    if len(repeats) == 1:
        return ""
    speeds = [one["tokens_per_s"] for one in repeats]
    firsts = [one["first_ms"] or 0 for one in repeats]
    return f"  {min(speeds)} to {max(speeds)} tokens/s, first {min(firsts)} to {max(firsts)} ms"


def share(total: int, parts: int, i: int) -> int:
    return total // parts + (i < total % parts)


def server_memory(pid: int | None) -> float | None:
    """Resident memory of the server in MiB, where the system says it."""
    if pid is None:
        return None
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    return None


def server_cpu(pid: int | None) -> float | None:
    """Seconds of processor time that the server has used, where the system says it."""
    if pid is None:
        return None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def get(port: int, path: str) -> dict:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://{HOST}:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def soak(args) -> dict:
    """Requests in four parts, with the memory of the server between them."""
    parts = []
    memory = [server_memory(args.pid)]
    for _ in range(4):
        parts.append(load(args, args.clients[-1], args.soak // 4, abort_fraction=1 / 3, exact=False))
        memory.append(server_memory(args.pid))
        print(row(parts[-1]), f"  memory {memory[-1]} MiB", flush=True)
    time.sleep(1)
    state = get(args.port, "/health")
    growth = None
    if args.pid:  # the first part fills what is kept, so the growth is counted from its end
        growth = round(100 * (memory[-1] / memory[1] - 1), 2)
    total = {name: sum(part[name] for part in parts) for name in ("requests", "aborted", "errors")}
    return total | {"memory_mib": memory, "growth_percent": growth, "health": state}


# Of a result, and its head in the table.
COLUMNS = {
    "clients": "clients", "requests": "requests", "tokens_per_s": "tokens/s", "first_ms": "first ms",
    "first_ms_p95": "first ms p95", "short": "short", "aborted": "aborted", "cpu_us": "cpu us",
    "errors": "errors",
}  # fmt: skip


def row(result: dict) -> str:
    return "".join(f"{result[name] if result[name] is not None else '-':>14}" for name in COLUMNS)


# ---- a server of its own


def serve(flags: list[str], stub: float | None, core: int | None) -> None:
    """A process that is a server; with `core` it uses that one alone."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    sys.path[:1] = [str(Path(__file__).resolve().parents[1] / "runs")]
    import serve as server
    from engine import scheduler

    if stub is not None:
        say_anything(scheduler, stub / 1000)
    sys.argv[1:] = flags
    sys.exit(server.main())


def say_anything(scheduler, seconds: float) -> None:
    """Replaces the model by one that says random ids of one byte; its steps take a time each."""
    import torch

    torch.set_num_threads(1)
    logits = torch.zeros(1)

    def decode(model, cache, tokens, *rest):
        return logits.expand(len(tokens), model.config.vocab_size)

    def sample(logits, *cuts):
        time.sleep(seconds)
        return torch.randint(97, 123, (len(logits),))

    scheduler.decode = decode
    scheduler.sample_ids = sample
    scheduler.prefill = lambda *work, **options: None


@contextlib.contextmanager
def own_server(args):
    """Runs a server while the block runs, and sets args.port and args.pid to its own."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        args.port = free.getsockname()[1]
    flags = [str(args.run_dir), "--port", str(args.port), "--max-num-seqs", str(args.max_num_seqs)]
    flags += ["--compile"] if args.compile else []
    flags += ["--device", "cpu"] if args.stub is not None else []
    core = None
    if args.stub is not None and hasattr(os, "sched_setaffinity"):
        core = min(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve, args=(flags, args.stub, core))
    process.start()
    try:
        args.pid = process.pid if sys.platform == "linux" else None
        while process.is_alive():
            with contextlib.suppress(OSError, ValueError):
                get(args.port, "/health")
                break
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.join()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its own server ends with it
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("run_dir", nargs="?", type=Path, help="run to serve (default: a server that runs already)")
    add("--port", type=int, default=8000, help="port of the server on 127.0.0.1 [%(default)s]")
    add("--clients", type=int, nargs="+", default=[1, 8, 64], help="numbers of concurrent clients %(default)s")
    add("--requests", type=int, default=4, help="requests of each client, of a single one four times as many")
    add("--repeats", type=int, default=1, help="runs of each number of clients; shown are medians [%(default)s]")
    add("--tokens", type=int, default=128, help="length of each answer [%(default)s]")
    add("--soak", type=int, default=0, metavar="N", help="N requests instead of the table")
    add("--pid", type=int, help="process id of the server, for its memory and processor time")
    add("--processes", type=int, default=4, help="processes that the clients are spread over [%(default)s]")
    add("--json", type=int, default=0, metavar="N", help="clients that ask for JSON, at most one a process")
    add("--seed", type=int, default=0, help="seed of the questions [%(default)s]")
    add("--smoke", action="store_true", help="a quick run: two clients, three requests, answers of 8 tokens")
    add("--max-num-seqs", type=int, default=64, help="slots of the bench's own server")
    add("--compile", action="store_true", help="compiled steps in the bench's own server")
    add("--stub", type=float, metavar="MS",
        help="a model that says random ids; its steps take so many milliseconds of no CPU time")  # fmt: skip
    args = parser.parse_args()
    if args.smoke:
        args.clients = [1, 2]
        args.requests = 1
        args.tokens = 8
    if args.run_dir is None:
        return measure(args)
    with own_server(args):
        return measure(args)


def measure(args) -> int:
    """The table or the soak of one server. Returns the exit code."""
    try:
        model = get(args.port, "/v1/models")["data"][0]
    except (OSError, ValueError, LookupError) as error:
        print(f"error: no server answers on {HOST} port {args.port} ({error}); start it first")
        return 1
    args.chat = model["chat"]
    print("".join(f"{name:>14}" for name in COLUMNS.values()), flush=True)
    load(args, 1, 1)  # warms up
    if args.soak:
        result = soak(args)
    else:
        result = []
        for clients in args.clients:
            requests = args.requests * clients * (4 if clients == 1 else 1)
            repeats = [load(args, clients, requests) for _ in range(args.repeats)]
            result.append(middle(repeats))
            print(row(result[-1]) + spread(repeats), flush=True)
    print(json.dumps(result))
    failed = result["errors"] if args.soak else sum(part["errors"] for part in result)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
