"""The terminal chat: cached turns against computing everything anew, a full context, commands, and a stub server."""

import builtins
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace

import chat as chat_script
import export
import pytest
import sft
import torch
from engine import scheduler
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from commands import write_run
from processes import serving
from tiny import ROOT, logits, random_model, tiny_config

SCRIPT = ROOT / "runs" / "chat.py"
OPTIONS = {"temperature": 0.0, "top_k": None, "top_p": 1.0, "max_tokens": 10, "seed": 0,
           "step": None, "device": "cpu", "model": None, "trust": False}  # fmt: skip


def say(chat, text: str) -> tuple[str, str]:
    """What a turn (or a command) writes on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        chat.command(text) if text.startswith("/") else chat.turn(text)
    return out.getvalue(), err.getvalue()


@pytest.fixture
def make(bpe, tmp_path):  # noqa: F811
    """make(**options): a chat with a model of random weights, finetuned by its config, and a context of 96 or more."""

    def build(finetuned=True, context=96, system="", model=None, **options):
        folder = write_run(tmp_path / "run", bpe, finetuned, model, max_seq_len=context, pack_tokens=context)
        with contextlib.redirect_stderr(io.StringIO()) as err:
            backend = chat_script.Local(folder, Namespace(**{**OPTIONS, **options}))
        backend.said = err.getvalue()
        return chat_script.Chat(backend, system)

    return build


def argmax_answer(backend, ids, max_tokens) -> list[int]:
    """Reference: every token from a full forward over the whole conversation, without a cache."""
    tools = ("python_start", "python_end", "output_start", "output_end")
    new, stops = [], {i for name, i in backend.tokenizer.specials.items() if name[2:-2] not in tools}
    while len(new) < max_tokens:
        row = logits(backend.model, [*ids, *new])[-1, : backend.tokenizer.vocab_size]
        token = row.argmax().item()
        if token in stops:
            break
        new.append(token)
    return new


def template(backend, system, texts) -> list[int]:
    """User texts and answers' ids in turn, as data/sft.py lays them out, up to the next answer."""
    tok, ids = backend.tokenizer, [backend.tokenizer.bos_id]
    for i, text in enumerate(texts):
        role = ("user", "assistant")[i % 2]
        part = text if role == "assistant" else tok.encode(f"{system}\n\n{text}" if system and i == 0 else text)
        ids += [tok.specials[f"<|{role}_start|>"], *part, tok.specials[f"<|{role}_end|>"]]
    return [*ids, tok.specials["<|assistant_start|>"]]


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_cached_turns_equal_computing_everything_anew(make, system, monkeypatch):
    """At temperature 0 four turns give the reference's tokens, and each turn feeds only its own tokens."""
    chat, texts = make(system=system, context=256), []
    backend, fed, prefill = chat.backend, [], scheduler.prefill

    def counted(model, cache, slots, starts, texts, *more, **options):
        fed.append(len(texts[0]) - starts[0])
        prefill(model, cache, slots, starts, texts, *more, **options)

    monkeypatch.setattr(scheduler, "prefill", counted)
    for text in ("the rest of", "<|user_end|> é 你好", "12 and 345", "a"):
        texts.append(text)
        ids = template(backend, system, texts)
        known = len(backend.decoder.prefix_cache.tokens[0])
        fed.clear()
        out, _ = say(chat, text)
        answer = chat.messages[-1]
        assert answer["ids"] == argmax_answer(backend, ids, 10) and fed == [len(ids) - known - 1]
        assert known == 0 or known > len(ids) - 40, "the cache was kept"
        assert out == chat_script.printable(answer["content"]) + "\n"
        texts.append(answer["ids"])
    say(chat, "/system Speak of other things.")  # the beginning of the conversation changes, and it gets longer
    fed.clear()
    say(chat, "more")
    ids = template(backend, "Speak of other things.", [*texts, "more"])
    assert chat.messages[-1]["ids"] == argmax_answer(backend, ids, 10)
    assert fed == [len(ids) - 1], "what was in the cache no longer fits, so all is computed anew"
    say(chat, "/clear")
    say(chat, "again")
    ids = template(backend, "Speak of other things.", ["again"])
    assert chat.messages[-1]["ids"] == argmax_answer(backend, ids, 10), "nothing is left of the old conversation"


def test_a_full_context_drops_the_oldest_turns(make):
    """The note says so, and what follows equals a conversation that began later. A message too long is refused."""
    chat = make(system="S")
    backend, dropped = chat.backend, 0
    for i in range(8):
        before = [m["ids"] if m["role"] == "assistant" else m["content"] for m in chat.messages]
        text = f"message {i} and the rest in order"
        out, err = say(chat, text)
        assert [m["role"] for m in chat.messages] == ["user", "assistant"] * (len(chat.messages) // 2)
        if "full" in err:
            dropped += 1
            assert "context of 96 tokens is full, oldest turns dropped: " in err
        kept = [*before, text][-len(chat.messages) + 1 :]
        ids = template(backend, "S", kept)
        assert chat.messages[-1]["ids"] == argmax_answer(backend, ids, 10) and len(ids) + 10 <= 97
    assert dropped > 2
    before = [*chat.messages]
    _, err = say(chat, "word " * 200)
    assert "error: the message has" in err and "context is 96" in err and chat.messages == before
    _, err = say(chat, "short")
    assert "error" not in err and chat.messages[-2]["content"] == "short"


def test_a_base_model_continues_text(make):
    """It says that it was not finetuned, uses no template, and later turns continue the same text."""
    chat = make(finetuned=False, context=256)
    tok = chat.backend.tokenizer
    assert "not finetuned for chat" in chat.backend.said
    ids = [tok.bos_id]
    for text in ("the rest", " of it"):
        ids += tok.encode(text)
        say(chat, text)
        assert chat.messages[-1]["ids"] == argmax_answer(chat.backend, ids, 10)
        ids += chat.messages[-1]["ids"]


def test_tool_calls(make, tmp_path):
    """The result is shown behind the call, and /save keeps the parts as data/sft.py takes them."""
    base = make(max_tokens=60, temperature=1.0)
    backend, tok = base.backend, base.backend.tokenizer
    special = tok.specials
    plan = [*tok.encode("is "), special["<|python_start|>"], *tok.encode("3*4"), special["<|python_end|>"],
            *tok.encode(" so"), special["<|assistant_end|>"]]  # fmt: skip
    cut = plan.index(special["<|python_end|>"]) + 1
    rest = iter([*plan[:cut], 7, 7, 7, 7, *plan[cut:]])  # what is sampled while the result is forced is lost
    backend.decoder.sampler = lambda *_: torch.tensor([next(rest)])
    out, _ = say(base, "3*4?")
    assert out == "is [3*4 = 12] so\n"
    base.system = "Be exact."
    say(base, f"/save {tmp_path}/saved.jsonl")
    saved = json.loads((tmp_path / "saved.jsonl").read_text())
    parts = [("text", "is "), ("python", "3*4"), ("python_output", "12"), ("text", " so")]
    assert sft.check_messages(saved) == [("user", [("text", "Be exact.\n\n3*4?")]), ("assistant", parts)]


def test_commands(make, tmp_path):
    chat = make()
    assert "/save FILE" in say(chat, "/help")[1] and "unknown command /foo" in say(chat, "/foo")[1]
    say(chat, "/system Be kind.")
    assert chat.system == "Be kind." and "needs a file" in say(chat, "/save")[1]
    assert "a conversation to save" in say(chat, f"/save {tmp_path}/x")[1] and not (tmp_path / "x").exists()
    chat.messages.append({"role": "user", "content": "a"})
    assert "cannot write" in say(chat, f"/save {tmp_path}/none/x")[1] and chat.command("/quit") is False
    say(chat, "hello")
    say(chat, "/clear")
    assert chat.messages == [] and chat.system == "Be kind."


def test_retry_undo_and_temperature(server):
    """A question is asked again without its answer, or after an error; /undo forgets both."""
    chat = talk_to(server)
    assert "needs a number" in say(chat, "/temperature hot")[1] and "needs a number" in say(chat, "/temperature nan")[1]
    assert say(chat, "/retry") == ("", "")
    for reply, text, contents in [
        (events("1"), "a", ["a", "1"]), (events("2"), "/retry", ["a", "2"]), (events("3"), "b", ["a", "2", "b", "3"]),
        ((500, "text/html", b"x"), "c", ["a", "2", "b", "3"]), (events("4"), "/retry", ["a", "2", "b", "3", "c", "4"]),
        (None, "/temperature 0.5", ["a", "2", "b", "3", "c", "4"]), (events("5"), "/retry", [*"a2b3", "c", "5"]),
        (None, "/undo", [*"a2b3"]), (None, "/undo", [*"a2"]), (None, "/undo", []), (None, "/undo", []),
    ]:  # fmt: skip
        server.reply = reply
        say(chat, text)
        assert [message["content"] for message in chat.messages] == contents, text
    *_, body = server.seen[-1]
    assert [one["content"] for one in body["messages"]] == [*"a2b3c"] and body["temperature"] == 0.5


def test_an_export_is_executed_only_with_trust(bpe, tmp_path, monkeypatch, capsys):
    """And transformers, which would ask for it, reads no line of the user."""
    export.main([str(write_run(tmp_path / "run", bpe, True)), "--out", str(tmp_path / "model")])
    for flag, code in (([], 1), (["--trust"], 0)):
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
        monkeypatch.setattr(sys, "argv", ["chat.py", str(tmp_path / "model"), "--device", "cpu", *flag])
        with contextlib.suppress(SystemExit):
            assert chat_script.main() == code
        out, err = capsys.readouterr()
        assert "add --trust" in err if code else out.strip(), (out, err)
        assert code or not sys.stdin.read()


@pytest.mark.parametrize("place", ["sampler", "decode", "step"])
def test_interrupted_answers_stay_and_the_chat_goes_on(make, place):
    """Ctrl-C within a step keeps what was said; the next turn equals computing everything anew."""
    chat = make(context=256, top_k=1, temperature=1.0)  # top_k of 1 is greedy, and takes sample()
    owner, count = chat.backend.decoder, iter(range(100))
    function = getattr(owner, place)

    def interrupt(*args):
        result = function(*args)  # the cache has moved on, and nobody noted it
        if next(count) == 4:
            raise KeyboardInterrupt
        return result

    setattr(owner, place, interrupt)
    assert "(stopped)" in say(chat, "one")[1]
    first = chat.messages[-1]["ids"]
    assert len(first) == 4
    say(chat, "two")
    ids = template(chat.backend, "", ["one", first, "two"])
    assert chat.messages[-1]["ids"] == argmax_answer(chat.backend, ids, 10)


def test_an_empty_answer_is_not_kept(make, tmp_path):
    """/save promises what data/sft.py reads, which needs a text in each message; /retry asks again."""
    chat = make()
    pieces = iter([" \n", "yes", "", "no"])
    chat.backend.reply = lambda messages, answer, show: show(next(pieces))
    for text in ("a", "b", "c"):
        say(chat, text)
    assert [message["content"] for message in chat.messages] == ["b", "yes"] and not chat.failed
    say(chat, "/retry")
    assert [message["content"] for message in chat.messages] == ["b", "yes", "c", "no"]
    path = tmp_path / "saved.jsonl"
    say(chat, f"/save {path}")
    assert sft.check_messages(json.loads(path.read_text()))


def talk_to(server, system="", **options):
    """A chat with the stub server."""
    return chat_script.Chat(chat_script.Remote(server.url, Namespace(**{**OPTIONS, **options})), system)


@pytest.fixture
def server():
    """Answers /v1/chat/completions with server.reply, or what it says to a request, and records the requests."""
    stub = Namespace(seen=[], reply=None)

    async def models(request):
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def answer(request):
        body = await request.json()
        stub.seen.append((request.url.path, request.headers.get("Authorization"), body))
        status, kind, content = stub.reply(body) if callable(stub.reply) else stub.reply
        return Response(content, status, {"Content-Type": kind})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", answer, methods=["POST"])]
    with serving(Starlette(routes=routes)) as stub.url:
        yield stub


def events(*pieces, end=True) -> tuple:
    choices = [{"delta": {"content": piece}} for piece in pieces]
    choices += [{"delta": {}, "finish_reason": "stop"}] if end else []
    lines = [": a comment\n", *(f"data: {json.dumps({'choices': [choice]})}\n" for choice in choices)]
    lines.append('data: {"choices": [], "usage": null}\n')
    return 200, "text/event-stream; charset=utf-8", "\n".join([*lines, "data: [DONE]\n" if end else ""]).encode()


def test_endpoint(server, monkeypatch):
    """History, system text and key go out; pieces come in one by one, without what could steer the terminal."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.url += "/v1/"
    chat = talk_to(server, "Be brief.")
    server.reply = events("Hel", "lo ", None, "😀", "\x1b!\x9b\tb")
    out, err = say(chat, "Hi")
    assert (out, err) == ("Hello 😀!\tb\n", "") and chat.messages[1]["content"] == "Hello 😀\x1b!\x9b\tb"
    server.reply = events("fine")
    assert say(chat, "More")[0] == "fine\n"
    path, key, body = server.seen[-1]
    assert path == "/v1/chat/completions" and key == "Bearer secret"
    assert body["model"] == "tiny" and body["stream"] and body["temperature"] == 0.0 and "top_k" not in body
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello 😀\x1b!\x9b\tb"), ("user", "More")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "message", "kept"),
    [
        ((400, "application/json", b'{"error": {"message": "too long"}}'), "answered 400: too long", 0),
        ((401, "application/json", b'{"error": {"message": "no key"}}'), "no key; set the environment variable", 0),
        ((500, "text/html", b"<b>broken</b>"), "answered 500: <b>broken</b>", 0),
        ((404, "application/json", b'{"detail": "Not Found"}'), "answered 404: {\"detail\"", 0),
        ((200, "text/event-stream", b"data: {nonsense\n\n"), "not the OpenAI chat protocol", 0),
        ((200, "text/event-stream", b"data: []\n\n"), "not the OpenAI chat protocol", 0),
        ((200, "text/event-stream", b'data: {"error": {"message": "no memory"}}\n\n'), "stopped: no memory", 0),
        (events("Hel", end=False), "connection ended before", 2),
    ],
)
def test_server_faults_are_one_sentence(server, reply, message, kept):
    """The chat goes on afterwards; a message without an answer is forgotten, a broken answer is kept."""
    chat = talk_to(server)
    server.reply = reply
    _, err = say(chat, "Hi")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1 and len(chat.messages) == kept
    server.reply = events("fine")
    assert say(chat, "again")[0] == "fine\n"


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """pretrained(generate): a chat with a model that is only this function of the streamer."""
    transformers = pytest.importorskip("transformers")
    tokenizer = Namespace(
        chat_template="x", decode=lambda ids, **_: "".join(map(chr, ids)),
        apply_chat_template=lambda messages, **_: {"input_ids": [65] * len(messages)},
    )  # fmt: skip

    def build(generate, **options):
        model = Namespace(config=Namespace(max_position_embeddings=99), device="cpu", to=lambda device: None,
                          generate=lambda ids, streamer, **_: generate(streamer))  # fmt: skip
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
        return chat_script.Chat(chat_script.Pretrained(tmp_path, Namespace(**{**OPTIONS, **options})))

    return build


def test_failures_of_transformers_are_one_sentence(pretrained):
    """A message without an answer is forgotten, a broken answer is kept, and the chat goes on."""
    plan = Namespace(text="", fails=False)

    def generate(streamer):
        streamer.put(torch.tensor([[65]]))  # the prompt, which is not shown
        for letter in plan.text:
            streamer.put(torch.tensor([ord(letter)]))
        if plan.fails:
            raise ValueError("no memory\nmore about it")

    chat = pretrained(generate)
    for text, fails, messages in (("", True, 0), ("well ", False, 2), ("half of ", True, 4), ("", True, 4)):
        plan.text, plan.fails = text, fails
        err = "error: transformers failed (no memory)\n" if fails else ""
        assert say(chat, "a") == (f"{text}\n", err) and len(chat.messages) == messages, text


@pytest.fixture
def run(fast_python):
    """Calls runs/chat.py with arguments and the text of a pipe."""

    def call(*args, text="", encoding="utf-8"):
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [fast_python, str(SCRIPT), *map(str, args)]
        done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", timeout=60, env=env)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return call


def test_command_line(run, server, bpe, tmp_path):  # noqa: F811
    """One shot and piped lines, for both kinds; stdout holds the answers alone."""
    server.reply = events("one ", "two")
    done = run("--endpoint", server.url, "--prompt", "Hi", "--top-k", 5)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two\n", "") and server.seen[-1][2]["top_k"] == 5
    done = run("--endpoint", server.url, "--prompt", "Hi", "--prompt", "Why?")
    questions = [message["content"] for message in server.seen[-1][2]["messages"]]
    assert (done.stdout, questions) == ("one two\none two\n", ["Hi", "one two", "Why?"])
    server.seen.clear()
    done = run("--endpoint", server.url, "--model", "m", text="Hi\n\n//x\n/clear\n/quit\nnever\n")
    assert (done.returncode, done.stdout) == (0, "one two\none two\n")
    assert [len(body["messages"]) for *_, body in server.seen] == [1, 3]
    assert server.seen[-1][2]["messages"][-1]["content"] == "/x" and server.seen[-1][2]["model"] == "m"
    folder = write_run(tmp_path / "run", bpe, model=random_model(tiny_config(vocab_size=900)))
    done = run(folder, "--prompt", "the", "--temperature", 0, "--max-tokens", 5, "--device", "cpu")
    assert done.returncode == 0 and "not finetuned for chat" in done.stderr and "cut after 5" in done.stderr
    assert len(done.stdout) > 1
    server.reply = events("1 € 😀")
    done = run("--endpoint", server.url, text="é 你好\n", encoding="ascii")
    assert (done.returncode, done.stdout) == (0, "1 ? ?\n"), "a terminal that lacks characters"
    server.reply = events("half", end=False)
    done = run("--endpoint", server.url, text="a\n/quit\n")
    assert done.returncode == 1 and "connection ended" in done.stderr, "a question of a pipe had no whole answer"


@pytest.mark.parametrize(("text", "messages"), [
    ("one\\\n two \\\nthree\nfour\n", ["one\n two \nthree", "four"]),
    ("a\\b\n", ["a\\b"]), ("one\\\n\ntwo\n", ["one\n", "two"]), ("the end\\", ["the end\n"]),
])  # fmt: skip
def test_a_line_that_ends_with_a_backslash_goes_on(monkeypatch, text, messages):
    """Up to the first line without one, or the end of the input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    chat, turns = chat_script.Chat(None), []
    chat.turn = turns.append
    chat.loop()
    assert turns == messages


def test_user_errors(server, bpe, tmp_path, monkeypatch, capsys):  # noqa: F811
    young = write_run(tmp_path / "young", bpe, True)
    shutil.rmtree(young / "checkpoints")
    server.reply = 401, "application/json", b'{"error": {"message": "no key"}}'
    for args, message in [
        ((young,), "has no complete checkpoint; wait until the run saves one"),
        ((tmp_path,), "0 training scripts"),
        (("--endpoint", "localhost:8000"), "'localhost:8000' does not begin with http://"),
        (("--endpoint", ""), "'' does not begin with http://"),
        (("--endpoint", "http://h:abc"), "http://h:abc is not a web address"),
        (("--endpoint", "http://127.0.0.1:9"), "cannot reach"),
        (("--endpoint", server.url, "--prompt", "x"), "answered 401: no key"),
    ]:  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["chat.py", *map(str, args)])
        with pytest.raises(SystemExit, match="^1$"):
            sys.exit(chat_script.main())
        err = capsys.readouterr().err
        assert message in err and err.startswith("error: ") and err.count("\n") == 1
    for args, message in [
        ((), "RUN_DIR --endpoint is required"), (("run", "--endpoint", server.url), "not allowed with"),
        (("run", "--prompt", " "), "--prompt is empty"), (("run", "--temperature", "nan"), "--temperature and "),
        (("run", "--top-k", "-3"), "--top-k must"), (("run", "--top-p", "0"), "--top-p above 0"),
    ]:  # fmt: skip
        with pytest.raises(SystemExit):
            chat_script.parse(args)
        assert message in capsys.readouterr().err


def test_a_server_whose_context_is_full(server):
    """It holds two messages. The oldest turns go and a note says so; a message too long by itself costs nothing."""

    def small(body):
        if len(body["messages"]) > 2 or len(body["messages"][-1]["content"]) > 50:
            error = {"message": "the context is full", "code": "context_length_exceeded"}
            return 400, "application/json", json.dumps({"error": error}).encode()
        return events(f"answer {len(server.seen)}")

    server.reply = small
    chat = talk_to(server, "S", max_tokens=None)
    assert say(chat, "one") == ("answer 1\n", "")
    for i, text in enumerate(("two", "three")):
        out, err = say(chat, text)
        assert "oldest turns dropped: 1" in err and out.startswith("answer")
        assert [m["content"] for m in chat.messages][0] == text and len(chat.messages) == 2, i
    assert [m["content"] for m in server.seen[-1][2]["messages"]] == ["S", "three"]
    assert "max_tokens" not in server.seen[-1][2], "the server knows what fits"
    before = [*chat.messages]
    assert "answered 400: the context is full" in say(chat, "x" * 60)[1] and chat.messages == before


def test_a_question_asked_again_draws_anew(make, server):
    """With a seed the whole conversation is fixed, not each answer."""
    chat, texts = make(temperature=1.0, seed=5), []
    for i in range(6):
        chat.backend.turns = i % 3
        say(chat, "/clear")
        texts.append(say(chat, "the rest")[0])
    assert len(set(texts)) == 3 and texts[:3] == texts[3:]
    server.reply = events("x")
    chat = talk_to(server, seed=7)
    for _ in range(2):
        say(chat, "a")
    assert [body["seed"] for *_, body in server.seen] == [7, 8]


def test_ctrl_c_and_ctrl_d(server, monkeypatch, capsys):
    """Ctrl-C empties the line, Ctrl-D ends the chat."""
    typed = iter(["first question", KeyboardInterrupt, "more", EOFError])

    def read_line(prompt):
        line = next(typed)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read_line)
    monkeypatch.setattr(sys, "stdin", Namespace(isatty=lambda: True))
    server.reply = events("fine")
    talk_to(server).loop()
    assert "(Ctrl-D or /quit ends the chat)" in capsys.readouterr().err
    assert [body["messages"][-1]["content"] for *_, body in server.seen] == ["first question", "more"]
