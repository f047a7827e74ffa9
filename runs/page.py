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
# What the HTML of Markdown lacks. In texts < is escaped, so none of them looks like this.
CHANGES = (
    # Links open in a tab of their own, which learns nothing of this page.
    ("<a ", '<a target="_blank" rel="noopener noreferrer" '),
    # Cells of a table get a class for their side, as the page's policy allows no style in HTML.
    (r'<(t[hd]) style="text-align:(\w+)"', r'<\1 class="\2"'),
    # [ ] and [x] at the beginning of an item of a list become boxes.
    (r"<li>(\n<p>)?\[ \] ", r'<li class="task">\1☐ '),
    (r"<li>(\n<p>)?\[[xX]\] ", r'<li class="task">\1☑ '),
)


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


def at_borders(state: StateInline, silent: bool) -> bool:
    """As with _, a * within a word is no emphasis, as in 3*4*5."""
    if re.fullmatch(r"\w\*\w", state.src[max(0, state.pos - 1) : state.pos + 2]):
        return False
    return emphasis.tokenize(state, silent)


# Markdown as GitHub has it, without HTML and images, and with links to the web alone.
OPTIONS = {"html": False, "breaks": True, "linkify": True, "highlight": highlight}
MARKDOWN = MarkdownIt("commonmark", OPTIONS)
MARKDOWN.enable(["table", "strikethrough", "linkify"]).disable("image")
MARKDOWN.inline.ruler.at("emphasis", at_borders)
MARKDOWN.validateLink = lambda url: bool(re.match(r"(https?://|mailto:)", url))


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

    result = MARKDOWN.render(text)
    for pattern, new in CHANGES:
        result = re.sub(pattern, new, result)
    return re.sub(f"[{MARKS}]", call, result)
