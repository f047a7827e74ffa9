"""Hostile requests: the server answers each with one JSON error of one sentence, or does what was asked.

FUZZ_CASES=20000 sets how many requests are tried (default 200).
"""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_export import bpe  # noqa: F401  (a fixture)
from test_serve import HELLO, Running, events, runs, until  # noqa: F401  (runs is a fixture)

CASES = int(os.environ.get("FUZZ_CASES", "200"))
MANY = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "echo", "stop", "seed", "n", "stream",
    "stream_options", "tools", "logit_bias", "user", "best_of", "tokens", "add_special_tokens", "response_format",
]  # fmt: skip
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
EDGES = st.sampled_from([
    0, -1, 1, 2, 5, 21, 64, 65, 512, 513, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, -0.0, 1e-320, 1e308, True, False,
    None, "", " ", "\x00", "\ud800", "é😀", "<|bos|>", "[3*4 = 12]", "[" * 300, "a" * 5000, [], {}, [[]], [None],
    [0] * 600, ["a"] * 70, {"include_usage": True}, {"include_usage": 1}, [{}], HELLO, [*HELLO, *HELLO],
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
])  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=30)
ANY = st.recursive(
    EDGES | SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text") | ANY, "text": st.text(max_size=9) | ANY}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries({
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool", ""]) | ANY,
        "content": st.text(max_size=40) | PARTS | ANY,
    }) | ANY,
    max_size=5,
)  # fmt: skip
GOOD = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 3)},
    optional={
        "messages": MESSAGES | st.just(HELLO),
        "prompt": st.text(max_size=40) | st.lists(st.integers(0, 899), max_size=9),
        "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "top_k": st.integers(0, 10**6),
        "min_p": st.floats(0, 1), "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2),
        "logprobs": st.booleans() | st.integers(0, 20), "top_logprobs": st.integers(0, 20), "echo": st.booleans(),
        "n": st.integers(1, 4), "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
        "seed": st.integers(-(2**63), 2**63 - 1), "stream": st.booleans(),
    },
)  # fmt: skip
BODIES = st.one_of(
    GOOD,
    st.tuples(GOOD, st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=2)).map(lambda both: {**both[0], **both[1]}),
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), ANY, max_size=5),
    ANY,
)


@pytest.fixture(scope="module", params=[True, False], ids=["chat", "base"])
def server(runs, request):  # noqa: F811
    running = Running(runs[request.param], "--rows", "4")
    yield running
    until(lambda: not running.worker.jobs and not running.worker.queue)
    assert running.worker.failures == 0 and running.worker.is_alive()
    running.close()


def post(running, path: str, body: bytes) -> tuple[int, str]:
    reply = running.session.post(running.url + path, content=body, headers={"Content-Type": "application/json"})
    return reply.status_code, reply.text


def check_error(text: str) -> None:
    """One JSON error with a message of one sentence on one line."""
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message = error["message"]
    assert message and "\n" not in message and "Traceback" not in message and len(message) < 700, message


def quiet(capfd) -> None:
    log = capfd.readouterr().err
    assert "Traceback" not in log and "Error" not in log, log[-3000:]


def test_bodies(server, capfd):
    """Any JSON, and fields that are nearly right: 200, or an error that is the client's."""
    import httpx2

    server.session = httpx2.Client(timeout=60)

    @MANY
    @given(path=st.sampled_from(PATHS), body=BODIES)
    def one(path, body):
        status, text = post(server, path, json.dumps(body).encode())
        assert status < 500, text
        if status != 200:
            check_error(text)
        elif text.startswith("data: "):
            assert events(text)[-1] == "[DONE]"
        else:
            json.loads(text)

    one()
    server.session.close()
    quiet(capfd)
