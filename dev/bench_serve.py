"""Speed of a running server: tokens a second and time to the first token, named as in vLLM's `bench serve`.

    python runs/serve.py out/RUN --max-num-seqs 64 --compile &
    python dev/bench_serve.py                            1, 8 and 64 clients, answers of 128 tokens

The server itself is measured with a model that takes little time, such as one of runs/tiny.args.
Every request of the table is for exactly --tokens tokens: where an answer ends earlier, its client asks once more for
the rest. "short" counts these further requests. Tokens are those that the server counts (usage of a stream). The time
to the first token (ttft) is from the start of a connection to the first event with text. "cpu_us" is the processor time
of the server for each token, from /metrics (Linux); on a GPU it says little, since the worker spins while it waits for
the device, and so takes about one second a second at any load. The clients are threads of processes of their own, so
that what is measured is the server. The last line is the result as JSON.
"""

import argparse
import http.client
import itertools
import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

HOST = "127.0.0.1"
PROCESSES = 4  # that the clients are spread over
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('DECODERSTACK_API_KEY')}"}
WORDS = "what why how the sky sea stone bread old blue small is are do we who wrote made of in".split()
SEEDS = itertools.count()  # of requests: no question comes twice, as the server would know it


@dataclass
class Outcome:
    """What one request gave."""

    tokens: int = 0
    ttft: float = 0.0  # seconds to the first text
    error: str = ""


def ask(port: int, rng: random.Random, tokens: int) -> Outcome:
    """One request."""
    question = " ".join(rng.choices(WORDS, k=rng.randint(5, 40)))
    body = {
        "prompt": question,
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": rng.randrange(2**31),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    outcome = Outcome()
    began = time.perf_counter()
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        response = connection.getresponse()
        if response.status != 200:
            outcome.error = f"{response.status} {response.reason}"
            return outcome
        events = (line[6:] for line in response if line.startswith(b"data: "))
        for data in events:
            if data.startswith(b"[DONE]"):
                return outcome
            event = json.loads(data)
            if "error" in event:
                outcome.error = event["error"]["message"]
                return outcome
            if not outcome.ttft and any(choice["text"] for choice in event["choices"]):
                outcome.ttft = time.perf_counter() - began
            if event.get("usage"):
                outcome.tokens = event["usage"]["completion_tokens"]
        outcome.error = "the stream ended without [DONE]"
    except (OSError, http.client.HTTPException) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return outcome


# ---- load


def run_clients(port: int, tokens: int, clients: int, seeds: list) -> list[Outcome]:
    """The requests of each seed, by so many threads, until all tokens came."""

    def work(seed: int) -> list[Outcome]:
        rng = random.Random(seed)
        outcomes = [ask(port, rng, tokens)]
        rest = tokens - outcomes[0].tokens
        while rest > 0 and outcomes[-1].tokens and not outcomes[-1].error:
            outcomes.append(ask(port, rng, rest))
            rest -= outcomes[-1].tokens
        return outcomes

    with ThreadPoolExecutor(clients) as threads:
        return list(itertools.chain.from_iterable(threads.map(work, seeds)))


def load(args, clients: int, requests: int) -> dict:
    """The result of so many clients together, spread over a few processes."""
    processes = min(PROCESSES, clients)
    seeds = list(itertools.islice(SEEDS, requests))
    cpu = metric(args.port, "process_cpu_seconds_total")
    began = time.perf_counter()
    with ProcessPoolExecutor(processes) as pool:
        parts = []
        for i in range(processes):
            threads = clients // processes + (i < clients % processes)
            parts.append(pool.submit(run_clients, args.port, args.tokens, threads, seeds[i::processes]))
        outcomes = [outcome for part in parts for outcome in part.result()]
    seconds = time.perf_counter() - began
    cpu = metric(args.port, "process_cpu_seconds_total") - cpu

    ttfts = [outcome.ttft for outcome in outcomes if outcome.ttft and not outcome.error] or [float("nan")]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    tokens = sum(outcome.tokens for outcome in outcomes)
    return {
        "clients": clients,
        "requests": len(outcomes),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "output_throughput": round(tokens / seconds, 1),
        "median_ttft_ms": round(1000 * float(np.median(ttfts)), 1),
        "p95_ttft_ms": round(1000 * float(np.percentile(ttfts, 95)), 1),
        "short": len(outcomes) - requests,
        "cpu_us": round(1e6 * cpu / max(tokens, 1), 1),
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
    }


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.request("GET", path, headers=HEADERS)
    return connection.getresponse().read().decode()


def metric(port: int, name: str) -> float:
    """One value of /metrics; NaN if the server's system does not give it."""
    families = text_string_to_metric_families(get(port, "/metrics"))
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    return samples.get(name, float("nan"))


COLUMNS = "clients requests output_throughput median_ttft_ms p95_ttft_ms short cpu_us errors".split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--port", type=int, default=8000, help="port of the server on 127.0.0.1 [%(default)s]")
    add("--clients", type=int, nargs="+", default=[1, 8, 64], help="numbers of concurrent clients %(default)s")
    add("--requests", type=int, default=4, help="requests per client; a single client sends four times as many")
    add("--tokens", type=int, default=128, help="length of each answer [%(default)s]")
    args = parser.parse_args()
    try:
        get(args.port, "/health")
    except OSError as error:
        print(f"error: no server answers on {HOST} port {args.port} ({error}); start it first")
        return 1
    print("".join(f"{name:>18}" for name in COLUMNS), flush=True)
    load(args, 1, 1)  # warms up
    results = []
    for clients in args.clients:
        requests = args.requests * clients * (4 if clients == 1 else 1)
        results.append(load(args, clients, requests))
        print("".join(f"{results[-1][name]:>18}" for name in COLUMNS), flush=True)
    print(json.dumps(results))
    return int(any(result["errors"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
