"""The web page, runs/page.py, in a headless Chromium: it talks to servers in this process."""

# ruff: noqa: F811  (fixtures of another file)
import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import gradio_client
import httpx2
import openai
import pytest

from test_chat import events, server  # noqa: F401
from test_serve import SCRIPT, base_server, chat_server, expected, gate, runs, script, serve, until  # noqa: F401
from tiny import ROOT

PAGE = ROOT / "runs" / "page.py"
BOT, USER = "[data-testid=bot]", "[data-testid=user]"
MARKUP = (
    "Some **bold** text for $5 or $6, $7-$8, $9 and US$ 10, `$a$`, $x^2$.\n\n"
    "| Liechtenstein | b | c | d | e | f |\n|---|--:|--|--|--|--|\n| 1 | 2<script>document.title = 1</script> |\n\n"
    "```python\ndef area(r): return 3.14 * r\n```\n\n$$A = \\pi r^2$$\n\nwhere \\(r\\) is it "
    '![x](https://example.org/x.png) <img src="https://example.org/y.png" onerror="document.title = 1">'
)


def start(*command) -> tuple[subprocess.Popen, list[str]]:
    """A program, and its output up to the address of its page."""
    command = [sys.executable, *map(str, command)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = []
    while not lines or not lines[-1].startswith("page: "):
        lines.append(process.stdout.readline().strip())
        assert lines[-1], process.communicate()
    return process, lines


@pytest.fixture(scope="module")
def pages(chat_server, base_server):
    """Addresses of pages for a chat model and for a base model."""
    started = [start(PAGE, server.url) for server in (chat_server, base_server)]
    yield [lines[-1].removeprefix("page: ") for _, lines in started]
    for process, _ in started:
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")


def test_other_web_pages_are_kept_out(pages):
    """A name that is rebound to this machine, a form of another page, and files that nobody asked for."""
    url = pages[0].rstrip("/")
    port = urlsplit(url).port
    for headers, status in [
        ({}, 200), ({"Host": f"localhost:{port}"}, 200), ({"Origin": url}, 200), ({"Host": "192.168.1.5"}, 200),
        ({"Host": "evil.example"}, 403), ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
    ]:  # fmt: skip
        assert httpx2.get(f"{url}/config", headers=headers).status_code == status, headers
    asked = {"data": ["hi", [], "", 0.8, 1, 0, 50, 4, ""]}
    assert httpx2.post(f"{url}/gradio_api/call/answer", json=asked, headers={"Host": "evil.example"}).status_code == 403
    assert httpx2.post(f"{url}/gradio_api/upload", files={"files": b"x" * 1000}).status_code == 403


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        names = ("chromium", "chromium-browser", "google-chrome", play.chromium.executable_path)
        path = next((found for name in names if (found := shutil.which(name))), None)
        if not path:
            pytest.skip("the page is only tested where there is a Chromium (apt-get install chromium, or "
                        "playwright install chromium)")  # fmt: skip
        running = play.chromium.launch(executable_path=path)
        yield running
        running.close()


@pytest.fixture
def browse(chromium):
    """browse(url): a page of its own context; at the end no script has failed, and no other host has answered."""
    contexts, problems = [], []

    def go(url, width=1280, height=900):
        def check(request):
            is_own = urlsplit(request.url).netloc in (urlsplit(url).netloc, "")  # data: has none
            if not is_own and request.failure != "csp":  # which the page itself forbids
                problems.append(request.url)

        contexts.append(chromium.new_context(viewport={"width": width, "height": height}))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: problems.append(error))
        page.on("requestfinished", check)
        page.on("requestfailed", check)
        page.goto(url)
        page.wait_for_selector(".submit-button, #text textarea")
        return page

    yield go
    for context in contexts:
        context.close()
    assert not problems


def send(page, text: str) -> None:
    page.wait_for_selector(".submit-button")  # once the answer before is whole
    box = page.locator("textarea:visible").last
    box.fill(text)
    box.press("Enter")


def configure(page, values: dict[str, str]) -> None:
    """Opens the settings, fills fields by the beginnings of their labels, and closes them."""
    page.get_by_label("Toggle Sidebar").click()
    for label, value in values.items():
        field = page.get_by_label(label).first
        field.fill(value)
        field.press("Tab")
    page.get_by_label("Toggle Sidebar").click()


def bots(page) -> list[str]:
    """The answers on a page."""
    return [text.strip() for text in page.locator(BOT).all_text_contents()]


def say(page, server, question: str, answer: str) -> None:
    """Asks, has the model say something, and waits for the end of it."""
    count = len(bots(page))
    with script(server, server.server.tokenizer.encode(answer)):
        send(page, question)
        until(lambda: "".join(bots(page)[count:]))
    page.wait_for_selector(".submit-button")


@pytest.fixture
def bodies(monkeypatch):
    """The requests that servers get from now on."""
    seen, read_body = [], serve.read_body

    async def read(request):
        seen.append(json.loads(await read_body(request)))
        return json.dumps(seen[-1]).encode()

    monkeypatch.setattr(serve, "read_body", read)
    return seen


def test_an_answer_streams_in(chat_server, pages, browse, bodies):
    """With a call of the calculator, which goes back as it was; undo, retry, stop and edit; a reload keeps it."""
    tok, page = chat_server.server.tokenizer, browse(pages[0], 390, 844)  # a phone
    special = {name[2:-2]: i for name, i in tok.specials.items()}
    plan = [*tok.encode("é is "), special["python_start"], *tok.encode("3*4*5"), special["python_end"],
            *tok.encode(" so")]  # fmt: skip
    with gate(chat_server) as steps, script(chat_server, plan):
        send(page, "Hello")
        until(lambda: chat_server.worker.sequences)
        steps.release(len(tok.encode("é is ")))
        until(lambda: "".join(bots(page)).startswith("é"))
        steps.release(100)
        page.wait_for_selector("text=/^\\d+ tokens, \\d+ tokens.s$/")
    assert page.text_content(f"{BOT} mark code") == "[3*4*5 = 60]" and page.text_content(USER).strip() == "Hello"
    say(page, chat_server, "again", "yes")
    turns = [("user", "Hello"), ("assistant", "é is [3*4*5 = 60] so"), ("user", "again")]
    assert [(one["role"], one["content"]) for one in bodies[-1]["messages"]] == turns
    page.get_by_role("button", name="Undo").click()
    until(lambda: len(bots(page)) == 1)
    with gate(chat_server) as steps:
        page.get_by_role("button", name="Retry").click()
        until(lambda: chat_server.worker.sequences)
        page.click(".stop-button")
        until(lambda: all(one.request.aborted for one in [*chat_server.worker.sequences.values()]))
        steps.release(100)
    until(lambda: not chat_server.worker.sequences and page.is_visible(".submit-button"))
    with script(chat_server, tok.encode("other")):
        page.get_by_role("button", name="Edit").first.click()
        page.fill("[role=log] textarea", "Hi")
        page.get_by_role("button", name="Submit").first.click()
        until(lambda: bots(page) == ["other"])
    until(lambda: page.is_visible("[data-testid^=dataset-cell] >> text=Hi"))
    page.reload()
    page.click("[data-testid^=dataset-cell] >> text=Hi")
    until(lambda: bots(page) == ["other"])
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], "nothing is wider than the window"


def test_gradio_client_keeps_the_conversation(chat_server, pages, bodies):
    """A Python program in place of a browser: the second request holds the first question and its answer."""
    client = gradio_client.Client(pages[0], verbose=False, analytics_enabled=False)
    for question in ("one", "two"):
        with script(chat_server, chat_server.server.tokenizer.encode("yes")):
            answer, _ = client.predict(question, api_name="/answer")
        assert answer == ["yes"]
    assert [one["content"] for one in bodies[-1]["messages"]] == ["one", "yes", "two"]


def test_markup(chat_server, pages, browse, bodies):
    """Code, tables and LaTeX are rendered; scripts do not run, and pictures of other hosts are not fetched."""
    page = browse(pages[0], 390, 844)
    say(page, chat_server, "<b>show</b> all", MARKUP)
    for part in ("strong", "td >> text=2", "pre .token.keyword >> text=def", ".katex-display"):
        page.wait_for_selector(f"{BOT} {part}")
    until(lambda: page.locator(f"{BOT} :not(.katex-display) > .katex").count() == 2)
    assert "$5 or $6, $7-$8, $9 and US$ 10, $a$, " in page.text_content(BOT) and page.title() == "chat"
    lines = """(cell) => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getClientRects().length;
    }"""
    assert page.locator(f"{BOT} th").first.evaluate(lines) == 1, "a word is not broken on a phone"
    say(page, chat_server, "again", "yes")
    assert bodies[-1]["messages"][1]["content"] == MARKUP


def test_settings_and_errors(chat_server, pages, browse, bodies):
    """Settings go out with a request. What the server says is shown; a question without an answer is left out."""
    page = browse(pages[0])
    say(page, chat_server, "one", "yes")
    assert "seed" not in bodies[-1], "a new one each time"
    values = {"System message": "Be brief.", "Temperature": "0.5", "Top-p": "0.9", "Min-p": "0.1", "Top-k": "5",
              "Maximum tokens": "7", "Seed": "3"}  # fmt: skip
    configure(page, values)
    send(page, "word " * 600)
    page.wait_for_selector(f"{BOT} >> text=the prompt has")
    say(page, chat_server, "two", "yes")
    assert bots(page)[-1] == "yes"
    names = ("temperature", "top_p", "min_p", "top_k", "max_tokens", "seed")
    assert [bodies[-1][name] for name in names] == [0.5, 0.9, 0.1, 5, 7, 3]
    assert [one["content"] for one in bodies[-1]["messages"]] == ["Be brief.", "one", "yes", "two"]


def test_two_tabs(chat_server, pages, browse):
    """A tab keeps what the other one has saved, and what that one has deleted stays away; a reload keeps all."""
    first = browse(pages[0])
    say(first, chat_server, "one", "yes")
    configure(first, {"System message": "Be brief."})
    second = first.context.new_page()
    second.goto(pages[0])
    say(second, chat_server, "two", "yes")
    say(first, chat_server, "more", "yes")
    cells = "[data-testid^=dataset-cell]"
    stored = "JSON.parse(localStorage.getItem('all conversations of chat')).map(one => one.length)"
    until(lambda: first.evaluate(stored) == [4, 2])
    second.reload()
    until(lambda: second.locator(cells).all_text_contents() == ["one", "two"])
    until(lambda: second.get_by_label("System message").input_value() == "Be brief.")
    second.click(f"{cells} >> text=one")
    until(lambda: len(bots(second)) == 2)
    second.get_by_label("Clear").click()
    until(lambda: second.evaluate(stored) == [2])
    first.get_by_role("button", name="New chat").click()
    until(lambda: not bots(first))
    say(first, chat_server, "three", "yes")
    until(lambda: first.evaluate(stored) == [2, 2])


def test_a_base_model_continues_the_text(base_server, pages, browse):
    page = browse(pages[1])
    configure(page, {"Temperature": "0"})
    box, tok = page.locator("#text textarea"), base_server.server.tokenizer
    box.fill("the rest of")
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("text=/^\\d+ tokens, /")
    (new,) = expected(base_server, [[tok.bos_id, *tok.encode("the rest of")]], max_tokens=200, temperature=0.0)
    assert box.input_value() == "the rest of" + new.replace("\r", "\n")  # as browsers do
    page.get_by_role("button", name="Undo").click()
    until(lambda: box.input_value() == "the rest of")


def test_a_streamed_answer_without_a_browser(chat_server, server):
    """Text in growing pieces with marks around a call, then a note; a context that is full; an error message."""
    import page

    def ask(messages, url=chat_server.url, **fields):
        fields = {"model": "chat", "messages": messages, "temperature": 1.0, **fields}

        async def collect():
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                return [part async for part in page.stream_answer(client.chat.completions.create, fields)]

        with ThreadPoolExecutor(1) as pool:  # Playwright leaves an event loop running in this thread
            return pool.submit(asyncio.run, collect()).result()

    tok = chat_server.server.tokenizer
    special = {name[2:-2]: i for name, i in tok.specials.items()}
    plan = [*tok.encode("is "), special["python_start"], *tok.encode("3*4"), special["python_end"], *tok.encode(" so")]
    with script(chat_server, plan):
        *parts, (text, note, error) = ask([{"role": "user", "content": "hello"}])
    assert (text, error) == ("is <mark>`[3*4 = 12]`</mark> so", "")
    assert re.fullmatch(r"\d+ tokens, [\d,]+ tokens/s", note)
    assert all(note == error == "" and part.count("<mark>") == part.count("</mark>") for part, note, error in parts)
    talk = [{"role": "user", "content": "the rest " * 60}, {"role": "assistant", "content": "yes"}]
    question = [{"role": "system", "content": "Be brief."}, *talk * 9, {"role": "user", "content": "so?"}]
    *_, (_, note, error) = ask(question, max_tokens=2)
    assert "the oldest " in note and "messages no longer fit" in note and not error
    *_, (_, _, error) = ask([{"role": "user", "content": "word " * 600}])
    assert error.startswith("the server answered 400: the context of this model is 512 tokens")
    server.reply = events("Hel", "lo")
    assert ask([], server.url)[-1] == ("Hello", "", ""), "a server that does not count tokens"
    server.reply = events("Hel", "lo", end=False)
    assert ask([], server.url)[-1] == ("Hello", "", "the connection ended before the answer did")
    assert ask([], "http://127.0.0.1:9")[-1][2].startswith("cannot reach http://127.0.0.1:9/v1/")


def test_the_server_starts_its_page_which_ends_with_it(runs):
    process, lines = start(SCRIPT, runs[True], "--page", "--port", "0", "--max-num-seqs", "2", "--device", "cpu")
    url = lines[-1].removeprefix("page: ")
    assert lines[0].startswith("chat: http://127.0.0.1:") and httpx2.get(url).status_code == 200
    api = lines[0].split()[1]
    assert httpx2.get(api).headers["location"] == url
    process.kill()
    process.communicate(timeout=30)

    def gone():
        with contextlib.suppress(httpx2.TransportError):
            httpx2.get(url)
            return False
        return True

    until(gone)


@pytest.mark.parametrize(("argv", "message"), [
    (["http://h:abc"], "error: http://h:abc is not a web address ("),
    (["http://127.0.0.1:9"], "error: http://127.0.0.1:9 lists no model ("),
    (["http://127.0.0.1:9", "--host=127.0.0.1x"], "error: cannot listen on 127.0.0.1x ("),
])  # fmt: skip
def test_a_server_that_does_not_answer(monkeypatch, capsys, argv, message):
    import page

    monkeypatch.setattr(sys, "argv", ["page.py", *argv])
    assert page.main() == 1
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1
