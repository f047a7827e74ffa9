"""Speed of a running server: tokens a second and time to the first token, and a soak with clients that disconnect.

    python runs/serve.py out/RUN --max-num-seqs 64 --compile &
    python dev/bench_serve.py                            1, 8 and 64 clients, answers of 128 tokens
    python dev/bench_serve.py --soak 10000 --pid PID     10,000 requests of 64 clients, a third disconnects
    python dev/bench_serve.py --smoke                    a few requests, on any machine

The server itself is measured with a model that takes little time, such as one of runs/tiny.args.
Every request of the table is for exactly --tokens tokens: where an answer ends earlier, its client asks once more for
the rest. "short" counts these further requests. Tokens are those that the server counts (usage of a stream). The time
to the first token is from the start of a connection to the first event with text. With --pid the memory of the server
is read during a soak, and "cpu us" is its processor time for each token (Linux). The clients are threads of processes
of their own with plain sockets, so that what is measured is the server. The last line is the result as JSON.
"""

import argparse
import itertools
import json
import os
import random
import re
import socket
import sys
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOST = "127.0.0.1"
WORDS = "what why how the sky sea stone bread old blue small is are do we who wrote made of in".split()
KEY_VARIABLE = "DECODERSTACK_API_KEY"
SEEDS = itertools.count()  # of requests: no question comes twice, as the server would know it


@dataclass
class Outcome:
    """What one request gave."""

    tokens: int
    first: float  # seconds to the first text
    aborted: bool  # the client disconnected in the middle
    error: str = ""


@dataclass
class Client:
    """Sends requests, each over a connection of its own."""

    port: int
    chat: bool
    rng: random.Random

    def body(self, tokens: int) -> dict:
        question = " ".join(self.rng.choices(WORDS, k=self.rng.randint(5, 40)))
        fields = {
            "max_tokens": tokens,
            "temperature": 0.8,
            "seed": self.rng.randrange(2**31),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            return fields | {"messages": [{"role": "user", "content": question}]}
        return fields | {"prompt": question}

    def ask(self, tokens: int, abort_after: int = 0) -> Outcome:
        """One request; the client disconnects after so many events, if that is not 0."""
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        data = json.dumps(self.body(tokens)).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {HOST}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n"
        )
        if key := os.environ.get(KEY_VARIABLE):
            head += f"Authorization: Bearer {key}\r\n"
        began = time.perf_counter()
        try:
            with socket.create_connection((HOST, self.port), timeout=120) as connection:
                connection.sendall(head.encode() + b"\r\n" + data)
                return read_stream(connection, began, abort_after)
        except OSError as error:
            return Outcome(0, 0.0, False, f"{type(error).__name__}: {error}")

    def ask_in_full(self, tokens: int) -> list[Outcome]:
        """Requests until exactly so many tokens came."""
        outcomes = []
        while tokens > 0:
            outcomes.append(self.ask(tokens))
            if outcomes[-1].error or not outcomes[-1].tokens:
                break
            tokens -= outcomes[-1].tokens
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


def run_clients(port: int, chat: bool, tokens: int, clients: int, abort_fraction: float, seeds: list) -> list[Outcome]:
    """One request of a thread for each seed, by so many threads."""

    def work(seed: int) -> list[Outcome]:
        client = Client(port, chat, random.Random(seed))
        if not abort_fraction:
            return client.ask_in_full(tokens)
        aborts = client.rng.random() < abort_fraction
        return [client.ask(tokens, client.rng.randint(1, 1 + tokens // 8) if aborts else 0)]

    with ThreadPoolExecutor(clients) as threads:
        return list(itertools.chain.from_iterable(threads.map(work, seeds)))


def load(args, clients: int, requests: int, abort_fraction: float = 0.0) -> dict:
    """The outcome of so many clients together, spread over a few processes; without aborts, answers are in full."""
    processes = min(args.processes, clients)
    seeds = list(itertools.islice(SEEDS, requests))
    cpu = server_cpu(args.pid)
    began = time.perf_counter()
    with ProcessPoolExecutor(processes) as pool:
        parts = []
        for i in range(processes):
            settings = (args.port, args.chat, args.tokens, share(clients, processes, i), abort_fraction)
            parts.append(pool.submit(run_clients, *settings, seeds[i::processes]))
        outcomes = [outcome for part in parts for outcome in part.result()]
    seconds = time.perf_counter() - began
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
        "short": len(outcomes) - requests,
        "aborted": sum(outcome.aborted for outcome in outcomes),
        "cpu_us": round(1e6 * cpu / tokens, 1) if cpu is not None and tokens else None,
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
    }


def share(total: int, parts: int, i: int) -> int:
    return total // parts + (i < total % parts)


def server_memory(pid: int | None) -> float | None:
    """Resident memory of the server in MiB."""
    if pid is None:
        return None
    return round(int(re.search(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024, 1)


def server_cpu(pid: int | None) -> float | None:
    """Seconds of processor time that the server has used."""
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
        parts.append(load(args, args.clients[-1], args.soak // 4, abort_fraction=1 / 3))
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--port", type=int, default=8000, help="port of the server on 127.0.0.1 [%(default)s]")
    add("--clients", type=int, nargs="+", default=[1, 8, 64], help="numbers of concurrent clients %(default)s")
    add("--requests", type=int, default=4, help="requests per client; a single client sends four times as many")
    add("--tokens", type=int, default=128, help="length of each answer [%(default)s]")
    add("--soak", type=int, default=0, metavar="N", help="a soak test of N requests, instead of the table")
    add("--pid", type=int, help="process id of the server, to report its memory and CPU time")
    add("--processes", type=int, default=4, help="number of processes to spread the clients over [%(default)s]")
    add("--smoke", action="store_true", help="a quick run: two clients, three requests, answers of 8 tokens")
    args = parser.parse_args()
    if args.smoke:
        args.clients = [1, 2]
        args.requests = 1
        args.tokens = 8
    try:
        args.chat = get(args.port, "/v1/models")["data"][0]["chat"]
    except (OSError, ValueError, LookupError) as error:
        print(f"error: no server answers on {HOST} port {args.port} ({error}); start it first")
        return 1
    print("".join(f"{name:>14}" for name in COLUMNS.values()), flush=True)
    load(args, 1, 1)  # warms up
    if args.soak:
        result = soak(args)
    else:
        result = []
        for clients in args.clients:
            requests = args.requests * clients * (4 if clients == 1 else 1)
            result.append(load(args, clients, requests))
            print(row(result[-1]), flush=True)
    print(json.dumps(result))
    failed = result["errors"] if args.soak else sum(part["errors"] for part in result)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
