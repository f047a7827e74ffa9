"""The server, through the official client and by hand: answers, streams, limits and failures."""

import asyncio
import contextlib
import gc
import http.client
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import chat
import engine
import httpx2
import openai
import pytest
import serve
import sft
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib import protocol
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest

from commands import stops, write_run
from tiny import ROOT, logits

SCRIPT = ROOT / "runs" / "serve.py"
QUIET = {"temperature": 0.0, "max_tokens": 24}
HELLO = [{"role": "user", "content": "hello"}]
TALK = [
    {"role": "system", "content": "Be <|bos|> brief."}, {"role": "user", "content": "the <|user_end|> rest é 你好"},
    {"role": "assistant", "content": "is [3*4 = 12] and [3*4 = 13]"}, {"role": "user", "content": "12 and 345"},
]  # fmt: skip


class Running:
    """A server in threads of this process, with a client."""

    def __init__(self, folder, *flags):
        args = serve.parse([str(folder), "--device", "cpu", "--port", "0", *flags])
        listening = serve.bind(args.host, args.port)
        self.server = serve.Server(folder, args)
        self.worker, self.decoder = self.server.worker, self.server.worker.decoder
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)
        self.chat, self.text = self.client.chat.completions.create, self.client.completions.create
        self.model = self.server.name

    def post(self, body, path="chat/completions", **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        # verify: else certificates are read each time, which takes as long as the answer
        return httpx2.post(f"{self.url}/v1/{path}", content=content, headers=headers, timeout=90, verify=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.worker.join(20)
        assert not self.worker.is_alive()


@pytest.fixture(scope="module")
def runs(bpe, tmp_path_factory):  # noqa: F811
    """Run directories with random weights: after finetuning, and after pretraining alone."""
    folder, sizes = tmp_path_factory.mktemp("serve"), {"max_seq_len": 512, "pack_tokens": 512}
    return {chat: write_run(folder / ("chat" if chat else "base"), bpe, chat, **sizes) for chat in (True, False)}


@pytest.fixture(scope="module")
def chat_server(runs):
    with Running(runs[True], "--max-num-seqs", "6") as running:
        yield running


@pytest.fixture(scope="module")
def base_server(runs):
    with Running(runs[False], "--max-num-seqs", "4", "--max-queue-size", "20") as running:
        yield running


@pytest.fixture(scope="module")
def one_slot_server(runs):
    """One slot, and one answer may wait."""
    with Running(runs[True], "--max-num-seqs", "1", "--max-queue-size", "1") as running:
        yield running


def expected(running, prompts, stops=None, **options) -> list[str]:
    """What the model says, by Generator in this thread, from ids."""
    generator = engine.Generator(running.worker.model, running.server.tokenizer)
    rows = generator.generate(prompts, stop=running.server.protocol.stops if stops is None else stops, **options)
    return ["".join(read(protocol.Detokenizer(running.server.tokenizer), row)[0]) for row in rows]


def rendered(running, messages) -> list[int]:
    """Ids of a conversation without calls, up to the next answer, by data/sft.py."""
    tokenizer = running.server.tokenizer
    talk = sft.check_messages({"messages": [*messages, {"role": "assistant", "content": "x"}]})
    return sft.render(talk, tokenizer.encode, tokenizer.specials)[0].tolist()[: -1 - len(tokenizer.encode("x"))]


def render(running, messages) -> list[int]:
    """Ids of a conversation, by the server."""
    fields = protocol.read_fields(protocol.ChatFields, json.dumps({"messages": messages}).encode())
    return running.server.protocol.render(fields.messages)


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def script(running, ids):
    """The model says these ids, whatever it is asked; results of tools come between them by themselves."""
    rest, stop = iter(ids), running.server.tokenizer.bos_id

    def scripted(logits, *_):
        (completion,) = running.decoder.running.values()
        token = 0 if completion.tool_output else next(rest, stop)  # what is sampled while a result is forced is lost
        return torch.full((len(logits),), token)

    with mock.patch.object(running.decoder, "sampler", scripted):
        yield {"model": running.model, "messages": HELLO, "temperature": 1.0}
        until(lambda: not running.worker.sequences)  # a part of the answer may have been enough for the test


@contextlib.contextmanager
def gate(running):
    """The model makes a step only after gate.release(); gate.arrived counts those that came up to it."""
    decoder, steps, step = running.decoder, threading.Semaphore(0), running.decoder.step
    steps.arrived = 0

    def gated():
        if decoder.running:
            steps.arrived += 1
            steps.acquire()
        return step()

    try:
        with mock.patch.object(decoder, "step", gated):
            yield steps
    finally:
        steps.release(10_000)


def events(text: str) -> list:
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# ---- answers


def test_curl_of_the_page(chat_server):
    (line,) = re.findall(r"^curl .*", (ROOT / "runs/CONNECT.md").read_text("utf-8"), re.M)
    _, url, flag, header, data, body = shlex.split(line)
    assert (url, flag, data) == ("http://127.0.0.1:8000/v1/chat/completions", "-H", "-d")
    answer = chat_server.post(body.encode(), **dict([header.split(": ")])).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_models_and_health(chat_server):
    (model,) = chat_server.client.models.list().data
    assert model.id == chat_server.model == "chat" and model.object == "model"
    assert model.chat and model.max_model_len == 512
    assert chat_server.client.models.retrieve("chat").id == "chat"
    with pytest.raises(openai.NotFoundError, match="/v1/models/gpt"):
        chat_server.client.models.retrieve("gpt")
    health = {"status": "ok", "max_num_seqs": 6, "running": 0, "waiting": 0}
    assert httpx2.get(f"{chat_server.url}/health").json() == health


def test_greedy_chat_equals_the_generator(chat_server):
    """Template, special tokens as text, and the answer, with and without streaming."""
    talk = [*TALK[:2], {"role": "assistant", "content": "the <|assistant_end|> end"}, TALK[3]]
    prompt = rendered(chat_server, talk)
    (text,) = expected(chat_server, [prompt], **QUIET)
    answer = chat_server.chat(model="chat", messages=talk, **QUIET)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "chat"
    (choice,) = answer.choices
    assert choice.message.content == text and choice.message.role == "assistant"
    count = answer.usage.completion_tokens
    reason = "length" if count == QUIET["max_tokens"] else "stop"  # the model's weights are random
    assert choice.finish_reason == reason and answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == len(prompt) + count
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(chat_server.chat(model="chat", messages=talk, **QUIET, **options))
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 4, "it comes in pieces"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_the_terminal_chat_as_a_client(chat_server):
    remote = chat.Remote(chat_server.url, SimpleNamespace(model=None, seed=None, top_k=None, top_p=1.0, **QUIET))
    (text,) = expected(chat_server, [rendered(chat_server, TALK[:2])], **QUIET)
    pieces = []
    remote.reply(TALK[:2], {}, pieces.append)
    assert "".join(pieces) == text


def test_completions(base_server):
    """A text, texts, ids and lists of ids; n choices of each, in order; the default of 16 tokens."""
    bos, encode = base_server.server.tokenizer.bos_id, base_server.server.tokenizer.encode
    ids = [[bos, *encode(text)] for text in ("the rest of", "", "é <|bos|> 12")]
    texts = expected(base_server, ids, max_tokens=16, temperature=0.0)
    for prompt, wanted in (("the rest of", texts[:1]), (["the rest of", "", "é <|bos|> 12"], texts),
                           (ids[0], texts[:1]), (ids, texts)):  # fmt: skip
        answer = base_server.text(model="base", prompt=prompt, temperature=0)
        assert answer.object == "text_completion" and [c.text for c in answer.choices] == wanted
        assert [c.index for c in answer.choices] == list(range(len(wanted)))
        assert answer.usage.prompt_tokens == sum(map(len, ids[: len(wanted)]))
    options = {"temperature": 1.5, "max_tokens": 30, "seed": 5}
    answer = base_server.text(model="base", prompt=ids[::2], n=3, **options, extra_body={"top_k": 7})
    sampled = [c.text for c in answer.choices]
    assert sampled == expected(base_server, [ids[0]] * 3 + [ids[2]] * 3, top_k=7, **options) and len(set(sampled)) == 6
    assert answer.usage.prompt_tokens == len(ids[0]) + len(ids[2]), "a prompt counts once, however many answers"
    stream = base_server.text(model="base", prompt=ids[::2], n=3, stream=True, **options, extra_body={"top_k": 7})
    streamed = [""] * 6
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == sampled
    cut = base_server.text(model="base", prompt=ids[0], max_tokens=8, temperature=2, top_p=0)
    (greedy,) = expected(base_server, ids[:1], max_tokens=8, temperature=0.0)
    assert cut.choices[0].text == greedy, "top_p of 0 is greedy"


def test_sampling_follows_the_seed(chat_server):
    def ask(**options):
        return chat_server.chat(model="chat", messages=HELLO, max_tokens=20, temperature=1.5, **options)

    texts = [ask(seed=seed).choices[0].message.content for seed in (1, 1, 2, -(2**63), 2**63 - 1)]
    assert texts[0] == texts[1] and len(set(texts)) == 4
    assert len({ask().choices[0].message.content for _ in range(6)}) > 1, "without a seed it is sampled"
    default = chat_server.chat(model="chat", messages=HELLO, max_tokens=20, seed=3).choices[0].message.content
    usual = engine.Completion
    wanted = {"temperature": usual.temperature, "top_k": usual.top_k, "top_p": usual.top_p}
    assert [default] == expected(chat_server, [rendered(chat_server, HELLO)], max_tokens=20, seed=3, **wanted)


def test_64_clients_get_what_each_gets_alone(chat_server):
    """Different prompts and lengths over 6 slots; half of them sampled, half of them streamed."""

    def ask(i):
        body = {"model": "chat", "messages": [{"role": "user", "content": f"{i} the rest " * (1 + i % 7)}], "seed": i,
                "max_tokens": 3 + i % 7, "temperature": float(i % 2)}  # fmt: skip
        if i % 4 < 2:
            return chat_server.chat(**body).choices[0].message.content
        chunks = chat_server.chat(**body, stream=True)
        return "".join(c.choices[0].delta.content or "" for c in chunks)

    alone = [ask(i) for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, range(64))) == alone
    assert len(set(alone)) > 40 and not chat_server.worker.sequences and not chat_server.worker.num_waiting()


def test_tool_calls(chat_server):
    """Call and result are in the text, marked in a stream, and sent back they are the same ids again."""
    tok = chat_server.server.tokenizer
    special = {name[2:-2]: i for name, i in tok.specials.items()}
    call = [special["python_start"], *tok.encode("3*4"), special["python_end"]]
    wrong = [special["python_start"], *tok.encode("3*x"), special["python_end"]]
    own = [special["output_start"], *tok.encode("9"), special["output_end"]]  # the model pretends to have a result
    plan = [*tok.encode("is "), *call, *tok.encode(" so "), *wrong, *tok.encode(", "), *wrong, *own]
    text = "is [3*4 = 12] so [3*x], [3*x = 9]"
    with script(chat_server, plan) as ask:
        deltas = [c.choices[0].delta for c in chat_server.chat(**ask, stream=True)]
    pieces = [(getattr(delta, "part", "text"), delta.content) for delta in deltas if delta.content]
    groups = itertools.groupby(pieces, key=lambda piece: piece[0])
    assert [(part, "".join(text for _, text in group)) for part, group in groups] == [
        ("text", "is "), ("python", "[3*4"), ("python_output", " = 12]"), ("text", " so "), ("python", "[3*x]"),
        ("text", ", "), ("python", "[3*x"), ("text", " = 9]"),
    ]  # fmt: skip
    with script(chat_server, plan) as ask:
        answer = chat_server.chat(**ask)
    assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "stop"
    forced = [special["output_start"], *tok.encode("12"), special["output_end"]]
    assert answer.usage.completion_tokens == len(plan) + len(forced)
    with script(chat_server, plan[: plan.index(special["python_end"]) + 1]) as ask:
        assert chat_server.chat(**ask).choices[0].message.content == "is [3*4 = 12]"
    # "is [3*4 = 12]" comes back
    again = [*HELLO, {"role": "assistant", "content": "is [3*4 = 12]"}, {"role": "user", "content": "the"}]
    ids = render(chat_server, again)
    talk = [*HELLO, {"role": "assistant", "content": [
        {"type": "text", "text": "is "}, {"type": "python", "text": "3*4"}, {"type": "python_output", "text": "12"}
    ]}, {"role": "user", "content": "the"}]  # fmt: skip
    assert ids == rendered(chat_server, talk)
    cached = chat_server.chat(model="chat", messages=again, **QUIET).usage.prompt_tokens_details.cached_tokens
    assert cached > ids.index(special["output_end"])
    lies = [*HELLO, {"role": "assistant", "content": "[3*4 = 13] [x = 1] [ = ]"},
            {"role": "user", "content": "[1+1 = 2]"}]  # fmt: skip
    assert render(chat_server, lies) == rendered(chat_server, lies), "other brackets are text"


def test_a_conversation_keeps_its_cache(one_slot_server, chat_server):
    """A turn computes only what is new, in the slot that knows most of it; else the oldest slot is taken."""
    words = chat_server.server.tokenizer.encode("the rest of an old stone")

    def turn(running, messages, plan):
        with script(running, plan) as ask:
            answer = running.chat(**{**ask, "messages": messages})
        return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens

    talks = [[{"role": "user", "content": f"conversation {i}"}] for i in range(3)]
    for i in (0, 1, 2, 1, 0):
        text, cached = turn(chat_server, talks[i], words)
        before = len(rendered(chat_server, talks[i][:-2])) + len(words) if len(talks[i]) > 1 else 0
        assert (cached == before) if before else cached <= 2
        talks[i] += [{"role": "assistant", "content": text}, {"role": "user", "content": "and so on"}]
    for talk in (talks[0], talks[1], talks[0]):
        assert turn(one_slot_server, talk[:1], words)[1] == 0, "another conversation took the slot"


# ---- turns, shared prefixes, logprobs, and what operators need


@pytest.mark.parametrize("overlap", [False, True])
def test_a_short_request_beside_two_large_ones(runs, overlap):
    """It is served within 2 steps of its turn, which comes with the next round, though two requests of n=64 wait.

    Theirs are the answers that they would be anyway.
    """
    options = {"max_tokens": 4, "temperature": 1.0}
    body = {"model": "chat", "messages": HELLO, "n": 64, **options}
    with Running(runs[True], "--max-num-seqs", "4") as running:
        running.decoder.overlap = overlap
        prompts = [rendered(running, HELLO)] * 64
        wanted = [expected(running, prompts, seed=seed, **options) for seed in (1, 2)]
        with gate(running) as steps, ThreadPoolExecutor(3) as pool:
            large = [pool.submit(running.chat, **body, seed=seed) for seed in (1, 2)]
            until(lambda: running.worker.num_waiting() == 124)
            steps.release(2)  # answers are under way
            until(lambda: steps.arrived == 3)
            short = pool.submit(running.chat, model="chat", messages=HELLO, max_tokens=1, temperature=0)
            until(lambda: any(len(ask.sequences) == 1 for ask in list(running.worker.queue)))
            steps.release(1)  # a step that was under way when its request came
            steps.release(2 if overlap else 1)
            assert short.result(20).usage.completion_tokens <= 1
            steps.release(10_000)
            assert [[c.message.content for c in call.result(60).choices] for call in large] == wanted


def test_shared_beginnings_are_computed_once(chat_server):
    """From the second prompt on, a long system text is copied."""
    system = {"role": "system", "content": "the rest of an old stone, " * 12}
    cached = []
    for word in ("1", "é", "what", "who"):
        talk = [system, {"role": "user", "content": f"{word} is it"}]
        usage = chat_server.chat(model="chat", messages=talk, **QUIET).usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert max(cached[:2]) <= 2 and min(cached[2:]) > engine.MIN_SHARED_PREFIX, "the second computed it again"


def model_logprobs(running, ids) -> torch.Tensor:
    """Log-probabilities of the next id after each id of a text, from the training script's forward."""
    with torch.no_grad():
        return logits(running.worker.model, ids)[:, : running.server.tokenizer.vocab_size].log_softmax(-1)


def test_logprobs_of_answers(chat_server, base_server):
    """Both endpoints give the model's own log-probabilities, whatever temperature and penalties are; streams too."""
    prompt = rendered(chat_server, HELLO)
    options = {"max_tokens": 8, "temperature": 1.3, "seed": 4, "logprobs": True, "top_logprobs": 3}
    options |= {"presence_penalty": 1.0}
    answer = chat_server.chat(model="chat", messages=HELLO, **options).choices[0]
    streamed = [entry for chunk in chat_server.chat(model="chat", messages=HELLO, **options, stream=True)
                for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]  # fmt: skip
    entries = answer.logprobs.content
    assert streamed == entries and len(entries) > 3
    one = {bytes(b): i for i, b in enumerate(chat_server.server.tokenizer.bytes)}
    ids = [one[bytes(entry.bytes)] for entry in entries]
    table = model_logprobs(chat_server, [*prompt, *ids])[len(prompt) - 1 :]
    for entry, id, row in zip(entries, ids, table, strict=False):
        assert entry.logprob == pytest.approx(row[id].item(), abs=1e-3)
        best = row.topk(3)
        assert [one[bytes(top.bytes)] for top in entry.top_logprobs] == best.indices.tolist()
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
    answer = base_server.text(model="base", prompt=[5, 6, 7], max_tokens=4, temperature=0, logprobs=2)
    plain = answer.choices[0].logprobs
    assert len(plain.tokens) == len(plain.token_logprobs) == len(plain.text_offset) == 4 and plain.text_offset[0] == 0
    assert all(max(top.values()) == one for top, one in zip(plain.top_logprobs, plain.token_logprobs, strict=True))


def test_echo_scores_prompts_as_the_evaluation_harness_asks(base_server):
    """lm-evaluation-harness sends ids of context and continuation, and reads what lies between both ends."""
    rng = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 890, (length,), generator=rng).tolist() for length in (5, 40, 1, 200)]
    body = {"model": "base", "prompt": texts, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for _ in range(2):  # the second time slots hold the prompts already
        choices = base_server.post(body, "completions").json()["choices"]
        for text, choice in zip(texts, choices, strict=True):
            table = model_logprobs(base_server, text)
            found, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            assert found[0] is None and tops[0] is None and len(found) == len(text) + 1
            wanted = [table[i, text[i + 1]].item() for i in range(len(text) - 1)]
            assert found[1:-1] == pytest.approx(wanted, abs=1e-3)
            greedy = [one == max(top.values()) for one, top in zip(found[1:-1], tops[1:-1], strict=True)]
            assert greedy == [table[i].argmax().item() == text[i + 1] for i in range(len(text) - 1)]
    echoed = base_server.text(model="base", prompt="the rest é", max_tokens=0, echo=True, logprobs=1)
    assert echoed.choices[0].text == "the rest é" and echoed.usage.completion_tokens == 0
    assert echoed.choices[0].logprobs.tokens[0] == "<|bos|>" and echoed.choices[0].logprobs.text_offset[:2] == [0, 0]
    tokenizer = base_server.server.tokenizer
    (text,) = expected(base_server, [[tokenizer.bos_id, *tokenizer.encode("the")]], max_tokens=5, temperature=0.0)
    echo = {"model": "base", "prompt": "the", "max_tokens": 5, "temperature": 0, "echo": True}
    assert base_server.text(**echo).choices[0].text == "the" + text
    assert "".join(c.choices[0].text for c in base_server.text(**echo, stream=True)) == "the" + text


def test_text_offset_behind_characters_of_several_ids(base_server):
    """An id begins where the text of those before it ends; half a character adds nothing until it is whole."""
    tokenizer = base_server.server.tokenizer
    one = {bytes([b]): i for i, b in enumerate(b[0] for b in tokenizer.bytes[:256])}
    prompt = [tokenizer.bos_id, *(one[bytes([b])] for b in "é你a😀b".encode())]
    choice = base_server.text(model="base", prompt=prompt, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert choice.text == "é你a😀b"
    assert choice.logprobs.text_offset == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 4]


@pytest.mark.parametrize("shape", [{"presence_penalty": 1.5}, {"frequency_penalty": 1.5},
                                   {"extra_body": {"repetition_penalty": 1.3}}, {"extra_body": {"repeat_penalty": 1.3}},
                                   {"logit_bias": {str(id): 3.0 for id in range(0, 600, 2)}}])  # fmt: skip
def test_penalties_biases_and_min_p(chat_server, shape):
    """They change the logits of their request alone; min_p of 1 leaves the most likely id alone."""
    options = {"model": "chat", "messages": HELLO, "max_tokens": 12, "temperature": 0, "logprobs": True}

    def answer(**more):
        entries = chat_server.chat(**{**options, **more}).choices[0].logprobs.content
        return [bytes(entry.bytes) for entry in entries]

    prompt, tokens, vocab_size = rendered(chat_server, HELLO), [], chat_server.server.tokenizer.vocab_size
    while len(tokens) < 12:
        row = logits(chat_server.worker.model, [*prompt, *tokens])[-1, :vocab_size].clone()
        for id, bias in shape.get("logit_bias", {}).items():
            row[int(id)] += bias
        for id in set(prompt + tokens) if "extra_body" in shape else ():
            row[id] = row[id] / 1.3 if row[id] > 0 else row[id] * 1.3
        for id in set(tokens):
            row[id] -= shape.get("presence_penalty", 0) + shape.get("frequency_penalty", 0) * tokens.count(id)
        tokens.append(row.argmax().item())
        if tokens[-1] in chat_server.server.protocol.stops:
            del tokens[-1]
            break
    plain = answer()
    assert answer(**shape) == [chat_server.server.tokenizer.bytes[id] for id in tokens] != plain
    for _ in range(6):  # all slots
        assert answer(temperature=1.7, extra_body={"min_p": 1}) == plain


def test_metrics(chat_server):
    def value(name):
        text = httpx2.get(f"{chat_server.url}/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    before = value("decoderstack_generation_tokens_total")
    requests = value('decoderstack_http_requests_total{path="/v1/chat/completions",status="200"}')
    usage = chat_server.chat(model="chat", messages=HELLO, **QUIET).usage
    assert value("decoderstack_generation_tokens_total") == before + usage.completion_tokens
    assert value('decoderstack_http_requests_total{path="/v1/chat/completions",status="200"}') == requests + 1
    assert value("decoderstack_max_num_seqs") == 6 and value("decoderstack_num_requests_running") == 0
    httpx2.get(f"{chat_server.url}/{'x' * 50}")
    assert "xxx" not in httpx2.get(f"{chat_server.url}/metrics").text, "paths of strangers are no labels"
    failed = value('decoderstack_http_requests_total{path="/v1/chat/completions",status="500"}')
    with mock.patch.object(serve, "read_body", side_effect=ZeroDivisionError):
        assert chat_server.post({}).json()["error"]["message"] == "the server failed; its log says how"
    assert value('decoderstack_http_requests_total{path="/v1/chat/completions",status="500"}') == failed + 1


def test_only_browsers_of_this_machine_are_led_to_the_page(chat_server, monkeypatch):
    """The page listens on 127.0.0.1, which is another machine for all others."""
    monkeypatch.setattr(chat_server.server, "page_url", "http://127.0.0.1:7860/")
    assert httpx2.get(chat_server.url).headers["location"] == "http://127.0.0.1:7860/"
    with pytest.raises(HTTPException, match="for browsers on this machine"):
        asyncio.run(chat_server.server.root(HTTPRequest({"type": "http", "client": ("192.0.2.1", 50000)})))


def test_api_key_access_log_and_allowed_pages(runs, capfd, monkeypatch):
    """All but /health needs the key. A page that is allowed may read answers and errors; others are told how."""
    monkeypatch.setenv(serve.KEY_VARIABLE, "s3cret")
    flags = ("--max-num-seqs", "1", "--access-log", "--allow-origin", "http://a.example:3000/")
    page, other = {"Origin": "http://a.example:3000"}, {"Origin": "http://b.example"}
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    body = {"messages": HELLO, "max_tokens": 1}
    with Running(runs[True], *flags) as running:
        with pytest.raises(openai.AuthenticationError, match="needs an API key"):
            running.chat(model="chat", messages=HELLO)
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="s3cret", max_retries=0)
        assert client.chat.completions.create(model="chat", messages=HELLO, max_tokens=1).choices
        for path, status in (("/", 404), ("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
            assert httpx2.get(running.url + path).status_code == status
        for value in ("s3cret", "Basic s3cret", "Bearer", "Bearer s3cre", "Bearer s3crets", "Bearer \xe9".encode()):
            assert httpx2.get(f"{running.url}/metrics", headers={"Authorization": value}).status_code == 401
        assert httpx2.get(f"{running.url}/metrics", headers={"Authorization": "bearer s3cret"}).status_code == 200
        for origin, status in ((page, 200), (other, 400)):
            assert httpx2.options(f"{running.url}/v1/chat/completions", headers=origin | ask).status_code == status
        for key, status in (("Bearer s3cret", 200), ("Bearer x", 401)):
            reply = running.post(body, Authorization=key, **page)
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == page["Origin"]
        reply = running.post(body, Authorization="Bearer s3cret", **other)
        assert reply.status_code == 403 and "--allow-origin URL" in reply.json()["error"]["message"]
    log = "".join(capfd.readouterr())
    assert re.search(r'127\.0\.0\.1:\d+ - "POST /v1/chat/completions HTTP/1\.1" 200', log)
    assert '"GET /metrics HTTP/1.1" 401' in log and "hello" not in log and "s3cret" not in log


# ---- text


def read(reader, ids) -> tuple[list[str], bool]:
    """Pieces of ids until a stop string."""
    pieces = []
    for token in ids:
        pieces += [text for _, text in reader.add(token, False)]
        if reader.stopped:
            return pieces, True
    pieces += [text for _, text in reader.finish()]
    return pieces, reader.stopped


@given(st.text("abcé你😀\n", max_size=40), st.lists(st.text("abcé\n", min_size=1, max_size=5), max_size=3))
def test_stop_strings(text, stops):
    """Byte by byte: all of the text before the first place where a stop string is complete, and nothing of it."""
    reader = protocol.Detokenizer(SimpleNamespace(bytes=[bytes([b]) for b in range(256)], specials={}), tuple(stops))
    pieces, stopped = read(reader, text.encode())
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = min(ends, default=None)
    places = [text.find(stop) for stop in stops if stop in text[:first]] if ends else []
    assert "".join(pieces) == (text[: min(places)] if places else text) and stopped == bool(places)
    if not stops:
        assert pieces == list(text)


def test_stop_strings_over_http(chat_server):
    tok = chat_server.server.tokenizer
    plan = [*tok.encode("one two"), *tok.encode(" thr"), *tok.encode("ee four")]
    whole = "one two three four"
    for stop, wanted in (("two three", "one "), (["nothing", "our"], "one two three f"), ("o", ""), ("fourteen", whole),
                         ([], whole)):  # fmt: skip
        for stream in (False, True):
            with script(chat_server, plan) as ask:
                answer = chat_server.chat(**ask, stop=stop, stream=stream)
                choices = [c.choices[0] for c in answer] if stream else answer.choices
            contents = [(choice.delta if stream else choice.message).content or "" for choice in choices]
            assert "".join(contents) == wanted and choices[-1].finish_reason == "stop"


# ---- what is refused


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item after validation, not 0, found []"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "messages[0] (user) is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         'messages.0.content: Parts can only be {"type": "text", "text": ...}, found'),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string, found 5"),
        ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages.1.role: Input should be 'system'"),
        ({"messages": [{"role": "system", "content": " "}]}, "one from the user"),
        ({"logit_bias": {"70000": 1}}, "logit_bias contains ids outside 0 to 899"),
        ({"max_tokens": -2}, "max_tokens: Input should be greater than or equal to -1, found -2"),
        ({"tools": [{"type": "function"}]}, 'tools is not supported by this server, found [{"type": "function"}]; ask'),
        ({"max_tokens": "10"}, 'max_tokens: Input should be a valid integer, found "10"'),
        ({"temperature": 2.5}, "temperature: Input should be less than or equal to 2, found 2.5"),
        ({"response_format": {"type": "xml"}}, "response_format: Input tag 'xml'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "king"}}}},
         "response_format: the schema is invalid at $.type ('king' is not valid under any of the given schemas)"),
        ({"temprature": 0.5}, '"temprature" is not a request field; did you mean temperature?'),
    ],
)  # fmt: skip
def test_bad_requests(chat_server, body, message):
    reply = chat_server.post({"messages": HELLO, **body})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error", error
    assert message in error["message"] and error["param"] in error["message"], error


def test_bad_prompts(base_server):
    for prompt, message in ((None, "prompt: Field required"), ([], "at least 1 item"), (5, "valid list, found 5"),
                            (["a", 5], "prompt.1."), ([900], "outside 0 to 899"), ([1, "a"], "prompt.0."),
                            ([-1], "outside"), ([[]], "prompt.0."), (["a"] * 25, "for 25 answers; at most 24"),
                            ({"a": 1}, "valid list")):  # fmt: skip
        reply = base_server.post({"prompt": prompt}, "completions")
        assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text
    reply = base_server.post({"prompt": ["a"] * 9, "n": 3}, "completions")
    assert reply.status_code == 400 and "asks for 27 answers" in reply.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="not finetuned for chat; use /v1/completions") as caught:
        base_server.chat(model="base", messages=HELLO)
    assert caught.value.code == "not_a_chat_model" and not base_server.client.models.list().data[0].chat


def test_the_context_is_a_limit(chat_server):
    """A prompt that fills the context gets one token; one more is an error with numbers, as is a megabyte of text."""
    word = chat_server.server.tokenizer.encode(" the")
    assert len(word) == 1
    base = len(rendered(chat_server, HELLO))

    def fill(count):
        return [{"role": "user", "content": "hello" + " the" * count}]

    answer = chat_server.chat(model="chat", messages=fill(512 - base), max_tokens=300, temperature=0)
    assert answer.usage.prompt_tokens == 512 and answer.usage.completion_tokens <= 1
    with pytest.raises(openai.BadRequestError, match="context of this model is 512 tokens but .* has 513") as caught:
        chat_server.chat(model="chat", messages=fill(513 - base))
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="has 200,"):
        chat_server.chat(model="chat", messages=fill(200_000))


def test_bad_bodies(chat_server):
    for body, status, message in [
        (b'{"messages": ', 400, "not valid JSON"), (b"", 400, "not valid JSON"),
        (b"[]", 400, "the request: Input should be a valid dictionary"),
        (b'{"temperature": NaN}', 400, "not valid JSON"), (b'{"a": "\xff"}', 400, "not valid JSON"),
        (b'{"a": "\\ud800"}', 400, "not valid JSON"), (b"[" * 100_000, 400, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", 400, "not valid JSON"),
        (json.dumps({"messages": HELLO, "user": "x" * 1_100_000}).encode(), 413, "at most 1,048,576 bytes are allowed"),
    ]:  # fmt: skip
        reply = chat_server.post(body)
        assert reply.status_code == status and message in reply.json()["error"]["message"], reply.text
    with pytest.raises(openai.NotFoundError, match='no model "gpt-4" here, only chat') as caught:
        chat_server.chat(model="gpt-4", messages=HELLO)
    assert caught.value.code == "model_not_found"
    for method, path, status in (("GET", "/v1/chat/completions", 405), ("GET", "/", 404), ("POST", "/health", 405)):
        reply = httpx2.request(method, chat_server.url + path)
        assert reply.status_code == status and path in reply.json()["error"]["message"]
    reply = httpx2.post(chat_server.url + "/chat/completions", json={}).json()["error"]["message"]
    assert reply == "POST /chat/completions: Not Found; the base URL of the API ends with /v1"
    reply = httpx2.post(chat_server.url + "/v1/responses", json={}).json()["error"]["message"]
    assert reply == "POST /v1/responses: Not Found; this server has chat/completions, completions and models"
    neutral = {"user": "me", "tools": [], "logprobs": False, "presence_penalty": 0, "n": None, "stop": None,
               "metadata": {"a": "b"}, "response_format": {"type": "text"}, "chat_template_kwargs": {"x": True},
               "cache_prompt": True, "parallel_tool_calls": False, "id_slot": -1, "repeat_penalty": 1.0,
               "repetition_penalty": 1.2, "min_tokens": 0, "ignore_eos": False, "best_of": 1, "stop_token_ids": [],
               "tool_choice": "none", "guided_json": None}  # fmt: skip
    assert chat_server.post({"messages": HELLO, "max_tokens": 1, **neutral}).status_code == 200


def test_other_origins_are_refused(chat_server, runs):
    """DNS rebinding (a foreign Host) and requests of other pages (Origin, or a form's content type)."""
    body, port = {"messages": HELLO, "max_tokens": 1}, chat_server.url.rpartition(":")[2]
    for headers, status in [
        ({}, 200), ({"Host": f"localhost:{port}"}, 200), ({"Host": "192.168.1.5"}, 200), ({"Host": "[::1]:80"}, 200),
        ({"Origin": chat_server.url}, 200), ({"Host": f"evil.example:{port}"}, 403), ({"Host": "127.0.0.1.evil"}, 403),
        ({"Host": ""}, 403), ({"Host": "[::1"}, 403), ({"Origin": "null"}, 403), ({"Origin": "http://evil"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403), ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ]:  # fmt: skip
        reply = chat_server.post(body, **headers)
        assert reply.status_code == status and ("error" in reply.json()) == (status != 200), (headers, reply.text)
    reply = httpx2.get(chat_server.url, headers={"Host": "evil.example"})
    assert reply.status_code == 403 and 'accept the Host header "evil.example"' in reply.json()["error"]["message"]
    server = SimpleNamespace(hosts={"chat.example"}, origins=[], key="clé")
    headers = {"host": "chat.example", "origin": "https://chat.example", "authorization": "Bearer clé"}
    sent = {name: value.encode().decode("latin-1") for name, value in headers.items()}  # as Starlette reads the bytes
    assert serve.Server.check(server, sent, "/v1/models") is None, "behind TLS, with a key beyond ASCII"


@pytest.mark.parametrize("value", ["x", 1.5, 2, {"a": 1}])
@pytest.mark.parametrize("name", sorted(protocol.UNSUPPORTED | protocol.TOOLS))
def test_fields_that_would_change_the_answer(name, value):
    """A field of other servers is never ignored if it asks for another answer."""
    with pytest.raises(protocol.APIError, match=f"^{name} is not supported by this server") as caught:
        protocol.read_fields(protocol.ChatFields, json.dumps({"messages": HELLO, name: value}).encode())
    assert caught.value.status == 400 and caught.value.body["error"]["param"] == name


def test_max_tokens_beyond_the_context(chat_server, base_server):
    """It is cut, and -1 means as many as fit."""
    prompt = [1] * 500
    texts = [base_server.text(model="base", prompt=prompt, max_tokens=limit, temperature=0).choices[0].text
             for limit in (13, 513, 10**9, -1)]  # fmt: skip
    assert len(set(texts)) == 1
    ask = {"model": "chat", "messages": [{"role": "user", "content": "the rest " * 150}], "temperature": 0}
    texts = {chat_server.chat(**ask, **limit).choices[0].message.content
             for limit in ({}, {"max_tokens": -1}, {"max_completion_tokens": -1, "max_tokens": 3})}  # fmt: skip
    assert len(texts) == 1


# ---- load, disconnects, failures


@pytest.mark.parametrize("what", ["preempt", "admit"])
def test_a_dead_model_thread(runs, what, capfd):
    """Whatever fails outside of the model: requests under way and later ones get 503 at once, and it ends cleanly."""
    with Running(runs[True], "--max-num-seqs", "2") as running, ThreadPoolExecutor(1) as pool:
        with gate(running) as steps:
            endless = {str(id): -100 for id in running.server.tokenizer.specials.values()}
            body = {"messages": HELLO, "max_tokens": 50, "n": 2, "logit_bias": endless}
            under_way = pool.submit(running.post, body)
            until(lambda: len(running.worker.sequences) == 2)
            with mock.patch.object(running.worker, what, side_effect=SystemError):
                steps.release(100)
                until(lambda: not running.worker.is_alive())
        for reply in (under_way.result(), running.post({"messages": HELLO})):
            assert reply.status_code == 503 and "restart the server" in reply.json()["error"]["message"]
        health = httpx2.get(f"{running.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "failing"
    assert "SystemError" in capfd.readouterr().err


def test_a_full_queue(one_slot_server):
    with gate(one_slot_server) as steps, ThreadPoolExecutor(2) as pool:
        ask = {"model": "chat", "messages": HELLO, "max_tokens": 2}
        first = [pool.submit(one_slot_server.chat, **ask) for _ in range(2)]
        until(lambda: len(one_slot_server.worker.sequences) == one_slot_server.worker.num_waiting() == 1)
        health = {"status": "ok", "max_num_seqs": 1, "running": 1, "waiting": 1}
        assert httpx2.get(f"{one_slot_server.url}/health").json() == health
        with pytest.raises(openai.RateLimitError, match="2 answers are running or waiting") as caught:
            one_slot_server.chat(**ask)
        assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "queue_full"
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            one_slot_server.chat(**ask, n=3)
        steps.release(100)
        assert all(f.result().usage.completion_tokens <= 2 for f in first)
    assert one_slot_server.chat(**ask).choices


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("place", ["slot", "queue"])
def test_a_client_that_disconnects(one_slot_server, stream, place):
    """Its slot is free at the next step, and in the queue it is skipped."""
    with gate(one_slot_server) as steps:
        body = {"messages": HELLO, "temperature": 0, "stream": stream}
        other = http.client.HTTPConnection("127.0.0.1", int(one_slot_server.url.rpartition(":")[2]))
        pool = ThreadPoolExecutor(1)
        if place == "queue":
            before = pool.submit(one_slot_server.post, {**body, "stream": False, "max_tokens": 20})
            until(lambda: one_slot_server.worker.sequences)
        other.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        worker = one_slot_server.worker
        until(lambda: worker.queue if place == "queue" else worker.sequences)
        job = [*worker.queue][0].sequences[0] if place == "queue" else worker.sequences[0]
        if place == "slot":
            steps.release(5)
            until(lambda: len(job.completion.tokens) == 5)
            assert not stream or other.getresponse().read(10)
        other.sock.close() if other.sock else None
        other.close()
        until(lambda: job.request.aborted)
        if place == "slot":
            steps.release(1)  # the step that the worker waits in
            until(lambda: not one_slot_server.worker.sequences)
            assert 5 <= len(job.completion.tokens) <= 6 and job.completion.reason == ""
        else:
            assert not one_slot_server.worker.queue, "it makes room at once"
            steps.release(10_000)
            assert before.result().json()["usage"]["completion_tokens"] <= 20 and not job.completion.tokens
        pool.shutdown()
    assert one_slot_server.chat(model="chat", messages=HELLO, **QUIET).choices


def test_failures_are_told_and_survived(chat_server, capfd):
    """A step that breaks ends what is in the slots, a prefill that breaks only the new; then all is as before."""
    wanted = chat_server.chat(model="chat", messages=HELLO, **QUIET).choices[0].message.content
    decoder = chat_server.decoder
    endless = {str(id): -100 for id in chat_server.server.tokenizer.specials.values()}
    body = {"messages": [{"role": "user", "content": "my secret word"}], "max_tokens": 40, "temperature": 0}
    with gate(chat_server) as steps, ThreadPoolExecutor(2) as pool:
        body |= {"logit_bias": endless}
        calls = [pool.submit(chat_server.post, body | {"stream": stream}) for stream in (True, False)]
        until(lambda: len(chat_server.worker.sequences) + chat_server.worker.num_waiting() == 2)
        gated, count = decoder.step, iter(range(100))

        def broken():
            events = gated()
            return events if next(count) < 5 else 1 / 0

        with mock.patch.object(decoder, "step", broken):
            steps.release(1000)
            streamed, plain = (call.result() for call in calls)
    assert plain.status_code == 500 and plain.json()["error"]["type"] == "server_error"
    found = events(streamed.text)
    assert streamed.status_code == 200 and streamed.headers["content-type"].startswith("text/event-stream")
    assert "the model failed" in found[-1]["error"]["message"] and len(found) > 1
    until(lambda: not chat_server.worker.sequences and not decoder.running)
    with mock.patch.object(decoder, "add_requests", lambda completions: 1 / 0):
        with pytest.raises(openai.InternalServerError, match="the model failed"):
            chat_server.chat(model="chat", messages=HELLO, stream=True)
    assert chat_server.chat(model="chat", messages=HELLO, **QUIET).choices[0].message.content == wanted
    assert httpx2.get(f"{chat_server.url}/health").json()["status"] == "ok"
    log = capfd.readouterr().err
    assert "ZeroDivisionError" in log and "secret" not in log


def test_nothing_is_left_of_requests(chat_server):
    """After answers, streams, errors and disconnects, no object of a request is alive."""
    for i in range(30):
        chat_server.post({"messages": HELLO, "max_tokens": 3 if i % 5 else -5, "stream": i % 2 == 0})
    with chat_server.chat(model="chat", messages=HELLO, stream=True) as stream:
        next(iter(stream))
    kinds = (protocol.Sequence, protocol.Request, protocol.Detokenizer, protocol.APIError, engine.Completion)
    until(lambda: not chat_server.worker.sequences)
    until(lambda: gc.collect() >= 0 and not any(type(found) in kinds for found in gc.get_objects()))
    assert sum(map(len, chat_server.decoder.prefix_cache.tokens)) <= 6 * 512


# ---- the program


def test_bench(chat_server):
    """Each client asks until it has all its tokens."""
    sizes = ["--clients", "1", "2", "--requests", "1", "--tokens", "8"]
    command = [sys.executable, ROOT / "dev" / "bench_serve.py", "--port", chat_server.url.rpartition(":")[2], *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(one["tokens"], one["requests"] - one["short"], one["errors"]) for one in found] == [
        (32, 4, 0), (16, 2, 0)]  # fmt: skip


@pytest.mark.parametrize(("signum", "timeout", "count"), [
    (signal.SIGTERM, 0.2, 1), (signal.SIGINT, 60, 1), (signal.SIGINT, 60, 2)])  # fmt: skip
def test_signals_end_it_cleanly(runs, fast_python, signum, timeout, count):
    """Running answers get --shutdown-timeout seconds or until a second signal, then an error; exit code 0."""
    is_cut = timeout < 1 or count > 1
    flags = ["--port", "0", "--max-num-seqs", "2", "--shutdown-timeout", str(timeout), "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([fast_python, str(SCRIPT), str(runs[False]), *flags], **pipes)
    try:
        line = process.stdout.readline()
        url = re.fullmatch(r"base: (http://127\.0\.0\.1:\d+) \(2 slots, context 512, completions\)\n", line)[1]
        body = {"prompt": ["the"] * (60 if is_cut else 4), "max_tokens": 500, "stream": True, "temperature": 2}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            parts = reply.iter_text()
            text = next(parts)
            process.send_signal(signum)
            time.sleep(0.3)
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"{url}/health")
            if count > 1:
                process.send_signal(signum)
            text += "".join(parts)
        last = events(text)[-1]
        assert "the server is stopping" in last["error"]["message"] if is_cut else last == "[DONE]"
        note = "note: running answers end first; Ctrl-C again stops them\n"
        assert process.wait(20) == 0 and process.communicate() == ("", note)
    finally:
        process.kill()


def test_the_address_of_all_interfaces_can_be_opened(runs, fast_python):
    flags = ["--host", "0.0.0.0", "--port", "0", "--api-key", "k", "--device", "cpu"]
    process = subprocess.Popen([fast_python, SCRIPT, runs[False], *flags], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        url = re.match(r"base: (http://127\.0\.0\.1:\d+), also on all other addresses", line)[1]
        assert httpx2.get(f"{url}/health").status_code == 200
    finally:
        process.kill()
        process.communicate()


def test_user_errors(runs, chat_server, monkeypatch, capsys):
    """One sentence, also where the first step of the model fails."""
    port = chat_server.url.rpartition(":")[2]

    def fails(message, *flags):
        monkeypatch.setattr(sys, "argv", ["serve.py", str(runs[True]), "--device", "cpu", "--port", "0", *flags])
        assert serve.main() == 1
        out, err = capsys.readouterr()
        assert message in err and err.startswith("error: ") and err.count("\n") == 1 and out == "", err

    fails("port must be 0-65535", "--port", "99999")
    fails("cannot listen on 203.0.113.1", "--host", "203.0.113.1")
    fails(f"port {port} (Address already in use); choose another", "--port", port)
    fails("slots do not fit into memory", "--max-num-seqs", str(10**10))
    fails("--api-key is empty", "--api-key", "")
    fails("no checkpoint at step 3", "--step", "3")
    for flag in ("--max-num-seqs", "--max-queue-size"):
        assert "--max-num-seqs and --max-queue-size must be at least 0, found" in stops(serve.parse, "run", flag, -1)
    with mock.patch.object(engine.Decoder, "step", side_effect=RuntimeError("1 row")):
        fails("the model does not run: 1 row\n")
