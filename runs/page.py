"""The web page of runs/serve.py, and its answers as HTML: Markdown by markdown-it-py, code by Pygments."""

import base64
import hashlib
import html
import re
from pathlib import Path

import pygments
from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, emphasis
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from starlette.responses import HTMLResponse, Response

MARKS = "\ue000-\uf8ff"  # private characters, which stand for calls of the calculator
TASK = re.compile(r"\[([ xX])\] ")


def read_page() -> Response:
    """The web page, with headers that allow it only its own script and style, and this server."""
    page = (Path(__file__).parent / "chat.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        inner = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"

    policy = f"""default-src 'none'; script-src {digest("script")}; style-src {digest("style")};
        connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';
        frame-ancestors 'none'"""
    headers = {
        "Content-Security-Policy": " ".join(policy.split()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(page, headers=headers)


def highlight(code: str, name: str, _) -> str:
    """Code as HTML with a class for each kind of word; "" if its language is not known."""
    try:
        lexer = get_lexer_by_name(name)
    except ClassNotFound:
        return ""
    return pygments.highlight(code, lexer, HtmlFormatter(nowrap=True))


def mark_links_and_cells(tokens: list) -> None:
    """Links open in a tab of their own, which learns nothing of this page.

    Cells of a table get a class for their side, as the page's policy allows no style in HTML.
    """
    for token in tokens:
        if token.type == "link_open":
            token.attrs |= {"target": "_blank", "rel": "noopener noreferrer"}
        if style := token.attrs.pop("style", ""):
            token.attrs["class"] = style.removeprefix("text-align:")


def mark_tasks(tokens: list) -> None:
    """[ ] and [x] at the beginning of an item of a list become boxes."""
    for item, _, inner in zip(tokens, tokens[1:], tokens[2:], strict=False):
        first = inner.children[0] if inner.children else None
        if item.type == "list_item_open" and first and (task := TASK.match(first.content)):
            item.attrSet("class", "task")
            box = "\u2610 " if task[1] == " " else "\u2611 "
            first.content = box + first.content[task.end() :]


def at_borders(state: StateInline, silent: bool) -> bool:
    """As with _, a * within a word is no emphasis, as in 3*4*5."""
    if re.fullmatch(r"\w\*\w", state.src[max(0, state.pos - 1) : state.pos + 2]):
        return False
    return emphasis.tokenize(state, silent)


def markdown() -> MarkdownIt:
    """Markdown as GitHub has it, without HTML and images, and with links to the web alone."""
    options = {"html": False, "breaks": True, "linkify": True, "highlight": highlight}
    reader = MarkdownIt("commonmark", options)
    reader.enable(["table", "strikethrough", "linkify"]).disable("image")
    reader.inline.ruler.at("emphasis", at_borders)
    reader.validateLink = lambda url: bool(re.match(r"(https?://|mailto:)", url))

    def mark(state) -> None:
        mark_tasks(state.tokens)
        mark_links_and_cells(state.tokens)
        for token in state.tokens:
            mark_links_and_cells(token.children or [])

    reader.core.ruler.push("marks", mark)
    return reader


MARKDOWN = markdown()


def render(parts: list[list[str]]) -> str:
    """The HTML of an answer from its parts, as Reader of protocol.py gives them."""
    text = ""
    calls = []
    for part, piece in parts:
        if part == "text":
            text += re.sub(f"[{MARKS}]", "", piece)
        elif part == "python_output" and calls:
            calls[-1] += f"<b>{html.escape(piece.removesuffix(']'))}</b>"
        else:
            text += chr(0xE000 + len(calls) % 6400)
            calls.append(html.escape(piece.removeprefix("[").removesuffix("]")))

    def call(match: re.Match) -> str:
        place = ord(match[0]) - 0xE000
        return f'<code class="call">{calls[place]}</code>' if place < len(calls) else ""

    return re.sub(f"[{MARKS}]", call, MARKDOWN.render(text))
