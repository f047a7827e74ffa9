"""The web page of the server, in a headless Chromium."""

# ruff: noqa: F811  (fixtures of another file)
import json
import os
import re
from pathlib import Path

import pytest

import browser
from test_serve import SCRIPT, Running, expected, gate, runs, script, sft, talker, until, writer  # noqa: F401

pytestmark = pytest.mark.browser
CONTENTS = "chat.turns.map((turn) => turn.content)"
COMPLETIONS = "**/v1/chat/completions"


@pytest.fixture(scope="module")
def chromium():
    path = browser.find_chromium()
    if not path:
        pytest.skip("the web page is only tested where playwright finds a Chromium (apt-get install chromium, or "
                    "playwright install chromium)")  # fmt: skip
    with browser.launch(path) as running:
        yield running


@pytest.fixture
def page(talker, chromium, request):
    """The page of a server whose model was finetuned."""
    with browser.open_page(talker.url, chromium, getattr(request, "param", (1200, 800))) as page:
        yield page


phone = pytest.mark.parametrize("page", [(390, 700)], indirect=True)


def says(server, text: str):
    """The model says this, whatever it is asked."""
    return script(server, server.server.tokenizer.encode(text))


def ask(page, server, question: str, answer: str = "yes") -> None:
    with says(server, answer):
        browser.ask(page, question)


@phone
def test_page(talker, page):
    """Type a message, see the answer stream in, with a call; a second turn; stop; an error; a new chat."""
    tok = talker.server.tokenizer
    special = {name[2:-2]: i for name, i in tok.specials.items()}
    plan = [*tok.encode("é <b>is</b> "), special["python_start"], *tok.encode("3*4"), special["python_end"],
            *tok.encode("\nso")]  # fmt: skip
    assert page.title() == "talker" and page.evaluate("document.activeElement.id") == "message"
    with gate(talker) as steps, script(talker, plan):
        page.keyboard.type("Hello <i>you</i>")
        page.keyboard.press("Enter")
        until(lambda: talker.worker.jobs)
        steps.release(len(tok.encode("é <b>is</b> ")))
        until(lambda: page.text_content(".busy .text") == "é <b>is</b>")
        assert page.is_visible("#stop") and not page.is_visible("#send")
        assert page.get_attribute("#log", "aria-busy") == "true"
        steps.release(100)
        page.wait_for_selector("#send")
    assert page.inner_text(".user .text") == "Hello <i>you</i>"
    until(lambda: page.text_content(".assistant .text") == "é <b>is</b> 3*4 = 12\nso")
    assert page.text_content(".assistant .call") == "3*4 = 12" and page.text_content(".call b") == " = 12"
    assert page.get_attribute("#log", "aria-busy") == "false"
    with script(talker, plan):
        browser.ask(page, "again")
    assert page.locator("#log .assistant").count() == 2
    assert page.evaluate("chat.turns[3].tokens") > page.evaluate("chat.turns[1].tokens") > 0
    page.reload()
    until(lambda: page.locator("#log .turn").count() == 4)
    page.wait_for_selector(".assistant .call b >> text= = 12")  # a reload keeps the conversation
    with gate(talker) as steps:
        page.fill("#message", "endless")
        page.press("#message", "Enter")
        until(lambda: talker.worker.jobs)
        steps.release(3)
        page.keyboard.press("Escape")
        page.wait_for_selector("text=stopped")
        until(lambda: all(job.ask.gone for job in [*talker.worker.jobs.values()]))  # the server has heard of it
        steps.release(1)  # the step that the worker waits in
        until(lambda: not talker.worker.jobs)
    page.evaluate("document.getElementById('temperature').value = '9'")
    page.press("#message", "x")
    page.press("#message", "Enter")
    assert page.is_visible("#settings") and not talker.worker.jobs, "it shows what is wrong"
    page.fill("#temperature", "0.75")
    page.click("#done")
    assert page.input_value("#message").endswith("x"), "the message is still there"
    page.click("#new")
    assert page.locator("#log .turn").count() == 0 and page.is_visible("#empty")
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], "nothing is wider than a phone"


def test_page_drops_the_oldest_turns(talker, page):
    """A full context is no dead end: what no longer fits is marked, and the model answers."""
    for text in ("the rest " * 60, "an old stone " * 60, "so it is " * 60):
        ask(page, talker, text)
    assert page.locator(".assistant").count() == 3 and page.locator(".cut").count() == 1
    seen = page.evaluate("chat.turns.slice(chat.first).length")
    assert 1 < seen < 6 and page.locator(".cut ~ .user").count() == seen // 2
    browser.ask(page, "word " * 600)
    assert "the prompt has" in page.text_content(".note.bad")
    assert page.evaluate("chat.turns.slice(chat.first).length") == seen, "a message too long drops nothing"
    assert page.input_value("#message").startswith("word word")


def test_page_continues_texts(writer, chromium):
    """A model without finetuning continues the message."""
    with browser.open_page(writer.url, chromium) as page:
        assert "continues" in page.text_content("#about") and not page.is_visible("#system-field")
        page.evaluate("document.getElementById('temperature').value = '0'")
        browser.ask(page, "the rest of")
        bos, tok = writer.server.tokenizer.bos_id, writer.server.tokenizer
        (text,) = expected(writer, [[bos, *tok.encode("the rest of")]], max_tokens=200, temperature=0.0)
        assert page.evaluate("chat.turns[1].content") == text
        assert "mono" in page.get_attribute(".assistant .text", "class")


MARKUP = """Some **bold**, *thin*, ~~gone~~ and `a <b>` text with snake_case_names and 3*4*5.

1. one
2. two <img src=x onerror=alert(1)>
   - [x] inner

| a | b |
|---|--:|
| 1 | <script>x</script> |

```py
x = "**not bold**"
```
<b>raw</b> [bad](javascript:alert(1)) [good](https://example.org/a) &amp; https://example.org/b. **open"""


def test_page_renders_markdown_and_no_markup(talker, page):
    """Blocks become elements; tags of the text stay text; links can be clicked, and code is coloured."""
    ask(page, talker, "<img src=x>", MARKUP)
    page.wait_for_selector(".assistant .text:not(.raw) .code")
    until(lambda: page.text_content(".assistant .text").endswith("**open"))
    kinds = page.evaluate("[...document.querySelectorAll('.assistant .text *')].map((e) => e.nodeName).join(' ')")
    assert kinds == ("P STRONG EM S CODE OL LI LI UL LI DIV TABLE THEAD TR TH TH TBODY TR TD TD "
                     "DIV DIV SPAN BUTTON PRE CODE SPAN SPAN SPAN P A A")  # fmt: skip
    text = page.text_content(".assistant .text")
    for piece in ("snake_case_names and 3*4*5.", "<img src=x onerror=alert(1)>", "<script>x</script>",
                  '"**not bold**"', "<b>raw</b> [bad](javascript:alert(1)) good & ", "☑ inner"):  # fmt: skip
        assert piece in text
    assert page.text_content(".user .text") == "<img src=x>" and page.locator("#log img").count() == 0
    links = page.evaluate("[...document.querySelectorAll('#log a')].map((a) => [a.href, a.target, a.rel])")
    assert links == [[f"https://example.org/{name}", "_blank", "noopener noreferrer"] for name in "ab"]
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert page.evaluate(style.format("td:nth-child(2)", "textAlign")) == "right"
    assert page.evaluate(style.format("pre .s2", "color")) != page.evaluate(style.format("pre .n", "color"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".code button")
    page.wait_for_selector(".code >> text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'x = "**not bold**"'


def test_page_edits_regenerates_and_keeps_conversations(talker, page):
    with says(talker, "first"):
        page.click("#examples button")
        page.wait_for_selector(".assistant >> text=Regenerate")
    question = page.text_content(".user .text")
    with says(talker, "second"):
        page.click("text=Regenerate")
        page.wait_for_selector(".assistant .text >> text=second")
        page.wait_for_selector("#send")
    assert page.evaluate(CONTENTS) == [question, "second"]
    with says(talker, "third"):
        page.click("text=Edit")
        page.keyboard.type("Tell me: ")
        page.keyboard.press("Enter")
        page.wait_for_selector(".assistant .text >> text=third")
        page.wait_for_selector("#send")
    assert len(page.evaluate("chat.turns")) == 2 and "Tell me: " in page.text_content(".user .text")
    with page.expect_download() as download:
        page.click("#export")
    lines = open(download.value.path(), encoding="utf-8").read().splitlines()
    assert [m["role"] for m in json.loads(lines[0])["messages"]] == ["user", "assistant"]
    assert len(sft.check_messages(json.loads(lines[0]))) == 2, "data/sft.py reads it"
    page.click("#new")
    ask(page, talker, "Another talk", "other")
    assert page.locator("#chats li").count() == 2
    page.click("#chats li:nth-child(2) .pick")
    page.wait_for_selector(".assistant .text >> text=third")
    for wanted in ("first", "second", "third"):  # all answers are there
        page.click("text=Other versions (2)")
        assert page.evaluate("chat.turns[1].content") == wanted
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#chats li.open >> text=Delete")
    assert page.locator("#chats li").count() == 1 and page.is_visible("#empty")


@phone
def test_page_reloaded_within_an_answer(talker, page):
    """Question and partial answer stay; Continue goes on behind them; a phone's list opens and closes by keyboard."""
    with gate(talker) as steps, says(talker, "one two three four"):
        page.fill("#message", "count")
        page.press("#message", "Enter")
        until(lambda: talker.worker.jobs)
        steps.release(len(talker.server.tokenizer.encode("one two")))
        until(lambda: page.text_content(".busy .text") == "one two")
        page.reload()
        page.wait_for_selector("#send:enabled")
        steps.release(1)
        until(lambda: not talker.worker.jobs)
    assert page.text_content(".user .text") == "count" and page.text_content(".assistant .text") == "one two"
    with says(talker, " three"):
        page.click("text=Continue")
        until(lambda: page.text_content(".assistant .text") == "one two three")
        page.wait_for_selector("#send")
    page.focus("#menu")
    page.keyboard.press("Enter")
    assert page.is_visible("#side") and page.evaluate("document.activeElement.className").startswith("bare pick")
    page.keyboard.press("Escape")
    assert not page.is_visible("#side") and page.evaluate("document.activeElement.id") == "menu"


@pytest.mark.parametrize("page", [(900, 700)], indirect=True)
def test_a_long_question_leaves_room_for_the_chat(talker, page):
    ask(page, talker, "the rest of an old stone " * 4)
    assert page.evaluate("document.getElementById('frame').clientWidth") > 600


@pytest.mark.parametrize("action", ["Regenerate", "Edit"])
def test_page_keeps_what_was_there_until_the_new_answer_begins(talker, page, action):
    """The server refuses, or the page is reloaded while it waits."""
    for text in ("first", "second"):
        ask(page, talker, text, f"answer to {text}")
    before = page.evaluate(CONTENTS)

    def act():
        page.click(f".turn >> text={action} >> nth=0")
        if action == "Edit":
            page.keyboard.press("Enter")

    page.route(COMPLETIONS, lambda route: route.fulfill(status=503, body="{}"))
    act()
    page.wait_for_selector("text=The server answered 503")
    assert page.evaluate(CONTENTS) == before and page.locator(".turn").count() == 4
    page.unroute(COMPLETIONS)
    with gate(talker) as steps:
        act()
        until(lambda: talker.worker.jobs)
        page.reload()
        page.wait_for_selector("#send:enabled")
        steps.release(100)
    until(lambda: page.evaluate(CONTENTS) == before)


def test_page_in_two_tabs(talker, page):
    """Each shows what the other wrote; what is deleted stays away; of two answers at once none is lost."""
    one, two = page, page.context.new_page()
    ask(one, talker, "one", "first")
    two.goto(talker.url)
    two.click("#chats .pick")
    ask(two, talker, "two", "second")
    until(lambda: one.evaluate(CONTENTS) == ["one", "first", "two", "second"])
    with gate(talker) as steps, says(talker, "third"):
        one.fill("#message", "three")
        one.press("#message", "Enter")
        until(lambda: talker.worker.jobs)
        two.evaluate("chat.turns.push({role: 'user', content: 'four', parts: [['text', 'four']]}); keep()")
        steps.release(100)
        one.wait_for_selector("#send")
    kept = one.evaluate("stored().map((one) => one.turns.slice(4).map((turn) => turn.content))")
    assert ["three", "third"] in kept and any("four" in turns for turns in kept)
    two.on("dialog", lambda dialog: dialog.accept())
    while two.locator("#chats li").count():
        two.click("#chats .pick >> nth=0")
        two.click("#chats li.open >> text=Delete")
    until(lambda: one.is_visible("#empty"))
    ask(one, talker, "again", "new")
    assert one.evaluate("stored().map((one) => one.turns.length)") == [2]


def test_page_says_when_storage_is_full(talker, page):
    """Nothing is dropped, and the conversation can be exported."""
    ask(page, talker, "old", "kept")
    page.click("#new")
    page.evaluate("""for (let size = 1 << 22; size; size >>= 1)
        try { localStorage.setItem(`filler${size}`, "x".repeat(size)); } catch { /* full */ }""")
    ask(page, talker, "the rest of it " * 10, "not kept")
    assert "Export it" in page.text_content(".note.full")
    assert page.evaluate("stored().map((one) => one.turns[0].content)") == ["old"]
    with page.expect_download() as download:
        page.click("#export")
    assert "not kept" in Path(download.value.path()).read_text(encoding="utf-8")


@pytest.mark.parametrize("data", ["data: {nonsense\n\n", "data: {}\n\n", "data: null\n\n", 'data: {"choices": 5}\n\n'])
def test_page_with_malformed_data(talker, page, data):
    page.route(COMPLETIONS, lambda route: route.fulfill(status=200, body=data))
    browser.ask(page, "hello")
    assert page.text_content(".note.bad") == "The server sent something that is no answer."
    assert page.input_value("#message") == "hello"


def test_page_keeps_settings_and_draft(talker, page):
    """They survive a reload and are sent; the speed and the context used are under an answer; arrow up edits."""
    values = {"temperature": "0.5", "top-p": "0.9", "length": "7", "top-k": "5", "min-p": "0.1", "seed": "3",
              "presence": "0.2", "frequency": "0.3"}  # fmt: skip
    page.click("#setup")
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.select_option("#theme", "dark")
    page.click("#done")
    page.fill("#message", "a draft")
    page.reload()
    page.wait_for_selector("#send:enabled")
    assert page.input_value("#message") == "a draft"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
    with gate(talker) as steps, says(talker, "yes or no, one"):
        with page.expect_request(COMPLETIONS) as sent:
            page.fill("#message", "hello")
            page.press("#message", "Enter")
        until(lambda: talker.worker.jobs)
        steps.release(2)
        until(lambda: page.text_content(".busy .text"))  # the speed is known from the second piece on
        steps.release(100)
        page.wait_for_selector("#send")
    body = sent.value.post_data_json
    names = ("temperature", "top_p", "max_tokens", "top_k", "min_p", "seed")
    names += ("presence_penalty", "frequency_penalty")
    assert [body[name] for name in names] == [float(value) for value in values.values()]
    tokens = page.evaluate("chat.turns[1].tokens")
    assert re.fullmatch(rf"\d+ tokens/s, {tokens} of 512 tokens", page.text_content(".assistant .actions span"))
    page.press("#message", "ArrowUp")
    assert page.input_value(".edit textarea") == "hello"


def test_page_names_searches_exports_and_imports(talker, page):
    for question in ("about stones", "about bread"):
        page.click("#new")
        ask(page, talker, question)
    page.on("dialog", lambda dialog: dialog.accept("Baking"))
    page.click("#chats li.open >> text=Rename")
    titles = "[...document.querySelectorAll('#chats .pick')].map((one) => one.textContent)"
    assert page.evaluate(titles) == ["Baking", "about stones"]
    page.fill("#search", "BREAD")
    assert page.evaluate(titles) == ["Baking"]
    page.fill("#search", "")
    with page.expect_download() as download:
        page.click("#export-all")
    path = download.value.path()
    page.set_input_files("#file", path)
    until(lambda: page.evaluate(titles) == ["about bread", "about stones", "Baking", "about stones"])
    page.click("#chats .pick >> nth=1")
    assert page.evaluate(CONTENTS) == ["about stones", "yes"]
    page.set_input_files("#file", SCRIPT)
    page.wait_for_selector("text=This file holds no conversations")


def test_page_asks_for_the_key(runs, chromium):
    with Running(runs[True], "--api-key", "a key", "--rows", "2") as running:
        with browser.open_page(running.url, chromium, ready="#key") as page:
            page.fill("#key", "a key")
            page.press("#key", "Enter")
            page.wait_for_selector("#send:enabled")
            ask(page, running, "hello")
            until(lambda: page.text_content(".assistant .text:not(.raw)") == "yes")


AXE = Path(os.environ.get("AXE_PATH", "axe.min.js"))  # of the npm package axe-core


@pytest.mark.skipif(not AXE.exists(), reason="AXE_PATH names no axe.min.js (npm pack axe-core)")
@pytest.mark.parametrize("size", [(390, 844), (1400, 900)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_no_axe_findings(talker, chromium, size, scheme):
    with browser.open_page(talker.url, chromium, size, scheme=scheme, bypass_csp=True) as page:
        page.evaluate(AXE.read_text(encoding="utf-8"))

        def findings():
            return [(v["id"], v["nodes"][0]["html"]) for v in page.evaluate("axe.run()")["violations"]]

        assert findings() == []
        ask(page, talker, "all kinds", MARKUP)
        assert findings() == []
        page.click("#setup")
        assert findings() == []
