"""A chat page for a model server.

    python runs/serve.py out/RUN --page              server and page together
    python runs/page.py http://127.0.0.1:8000        a page for a server that is running (key: OPENAI_API_KEY)

A chat model gets a chat, whose conversations are kept in the browser. Any other model gets a text box, and continues
the text in it. The page is a process of its own and speaks OpenAI's protocol. It listens on 127.0.0.1 by default and
loads nothing from other hosts.
"""

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lib.command import RunError, run_command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="server address [%(default)s]")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every network [%(default)s]")
    add("--port", type=int, help="port to listen on (default: the first free one from 7860)")
    add("--allow-host", metavar="NAME", action="append", default=[],
        help="host name that browsers may use for this page, such as a proxy's, repeatable")  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for gradio

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # which gradio reads while it is imported
import gradio as gr
import openai
from lib.openai_client import client_options, error_message, is_context_full
from lib.web_origin import foreign_host, foreign_origin
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

SHOW_SECONDS = 0.05  # between two updates of an answer
CALL_START = "<mark>`"  # around a call of the calculator
CALL_END = "`</mark>"
JOINER = "\u2060"  # invisible; beside a $ that is no price
LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
    {"left": "$" + JOINER, "right": JOINER + "$", "display": False},
]
# Code, or a formula between two $ by pandoc's rule: no space inside, no digit behind; nor is "$5 or" a formula.
DOLLARS = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|(?<![\\$])\$(?![\s$]|\d[\d.,]*\s+[a-zA-Z]{2})([^$\n]+)(?<!\s)\$(?![\d$])",
    re.DOTALL,
)
EXAMPLES = ["Why is the sky blue?", "What is 37 * 43? Show the steps.", "Write a short poem about a lighthouse."]
# Otherwise an image in an answer would be fetched from any host that the answer names.
HEAD = """<meta http-equiv="Content-Security-Policy"
    content="default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:">"""
LIB = Path(__file__).with_name("lib")


class Guard:
    """Keeps out other web pages, as the server does, and uploads: nothing here takes files."""

    def __init__(self, app, hosts: set[str]):
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope, receive, send) -> None:
        app = self.app
        if scope["type"] != "lifespan":
            headers = Headers(scope=scope)
            if foreign_host(headers, self.hosts) or foreign_origin(headers):
                app = PlainTextResponse("this page accepts only its own requests; see --allow-host", 403)
            elif "upload" in scope["path"]:
                app = PlainTextResponse("this page takes no files", 403)
        await app(scope, receive, send)


@dataclass
class Answer:
    """What a stream has given so far."""

    text: str = ""
    reason: str = ""  # why it ended
    in_call: bool = False  # whether the text ends within a call of the calculator
    start: float = 0.0  # time of the first event
    num_tokens: int = 0  # 0 from a server that does not say it

    def add(self, event) -> None:
        self.num_tokens = event.usage.completion_tokens if event.usage else self.num_tokens
        for choice in event.choices:
            self.start = self.start or time.monotonic()
            self.reason = choice.finish_reason or self.reason
            delta = getattr(choice, "delta", choice)  # of a chat
            in_call = hasattr(delta, "part")
            if in_call != self.in_call:
                self.text += CALL_START if in_call else CALL_END
                self.in_call = in_call
            self.text += getattr(delta, "content", None) or getattr(delta, "text", None) or ""

    def markdown(self) -> str:
        return self.text + CALL_END if self.in_call else self.text

    def note(self, num_dropped: int) -> str:
        """Length, speed, and what a reader should know about the end and the beginning."""
        notes = []
        if self.num_tokens:
            seconds = max(time.monotonic() - self.start, 1e-3)
            notes.append(f"{self.num_tokens:,} tokens, {(self.num_tokens - 1) / seconds:,.0f} tokens/s")
        if self.reason == "length":
            notes.append("cut off at the maximum length or the end of the context")
        if num_dropped:
            notes.append(f"the oldest {num_dropped} messages no longer fit the context")
        return "; ".join(notes)


async def stream_answer(create, fields: dict):
    """An answer as it grows: yields (text, note at its end, error message, if any).

    The oldest messages are dropped until the rest fits the context.

    Args:  create: method of the client that sends a request; fields of the request
    """
    num_dropped = 0
    while True:
        answer = Answer()
        last_shown = 0.0
        try:
            async with await create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
                async for event in stream:
                    answer.add(event)
                    if answer.text and time.monotonic() - last_shown > SHOW_SECONDS:
                        last_shown = time.monotonic()
                        yield answer.markdown(), "", ""
            problem = "" if answer.reason else "the connection ended before the answer did"
            yield answer.markdown(), answer.note(num_dropped), problem
            return
        except openai.OpenAIError as error:
            shorter = drop_oldest(fields.get("messages", []))
            if not is_context_full(error) or not shorter:
                yield answer.markdown(), "", error_message(error)
                return
            fields = fields | {"messages": shorter}
            num_dropped += 2


def drop_oldest(messages: list[dict]) -> list[dict]:
    """A conversation without its oldest question and answer; empty if there is nothing behind them."""
    first = 1 if messages and messages[0]["role"] == "system" else 0
    rest = messages[first + 2 :]
    return messages[:first] + rest if rest else []


def settings(max_tokens: int) -> list:
    """Inputs for what a request says beside its text, in the order of sampling()."""
    return [
        gr.Slider(0, 2, 0.8, step=0.05, label="Temperature"),
        gr.Slider(0, 1, 1, step=0.01, label="Top-p"),
        gr.Slider(0, 1, 0, step=0.01, label="Min-p"),
        gr.Number(50, label="Top-k (0: all)", precision=0, minimum=0),
        gr.Number(max_tokens, label="Maximum tokens per answer (0: what fits)", precision=0, minimum=0),
        gr.Number(-1, label="Seed (-1: a new one each time)", precision=0, minimum=-1),
    ]


def sampling(temperature: float, top_p: float, min_p: float, top_k: int, max_tokens: int, seed: int) -> dict:
    """The fields of a request."""
    fields = {"temperature": temperature, "top_p": top_p, "extra_body": {"min_p": min_p, "top_k": top_k}}
    if max_tokens:
        fields["max_tokens"] = max_tokens
    if seed >= 0:
        fields["seed"] = seed
    return fields


def chat_page(client, model: str):
    """A chat: conversations at the left, settings at the right."""
    async def answer(message: str, history: list[dict], system: str, *values):
        messages = []
        for turn in [*history, {"role": "user", "content": message}]:
            text = turn["content"]
            if not isinstance(text, str):  # a browser's history has lists of parts, that of gradio_client has texts
                text = "".join(part["text"] for part in text)
            text = text.replace(CALL_START, "").replace(CALL_END, "").replace(JOINER, "")
            if not turn.get("metadata"):
                messages.append({"role": turn["role"], "content": text})
            elif messages[-1]["role"] == "user":  # an error, and its question has no answer
                messages.pop()
        if system.strip():
            messages.insert(0, {"role": "system", "content": system})
        fields = {"model": model, "messages": messages, **sampling(*values)}
        async for text, note, error in stream_answer(client.chat.completions.create, fields):
            text = DOLLARS.sub(lambda found: f"${JOINER}{found[1]}{JOINER}$" if found[1] else found[0], text)
            # As a message of its own, since gradio's own errors cover the conversation.
            parts = [text] if text or not error else []
            if error:
                parts.append({"role": "assistant", "content": error, "metadata": {"title": "Error"}})
            yield parts, note

    with gr.Blocks(title=model, fill_height=True, fill_width=True) as demo:
        with gr.Sidebar(position="right", open=False):
            system = gr.Textbox("", label="System message", lines=2)
            inputs = [system, *settings(0)]
        status = gr.Markdown(render=False)
        chatbot = gr.Chatbot(show_label=False, scale=1, editable="user", buttons=["copy", "copy_all"],
                             latex_delimiters=LATEX, render=False)  # fmt: skip
        chat = gr.ChatInterface(
            answer, title=model, chatbot=chatbot, editable=True, save_history=True, additional_inputs=inputs,
            additional_outputs=[status], examples=[[text] for text in EXAMPLES], run_examples_on_click=False,
            concurrency_limit=None,
        )  # fmt: skip
        status.render()
        stored = chat.saved_conversations
        stored.storage_key = "copy"  # gradio's own, which saveConversations removes
        # A name for each model: a page that is started again finds its conversations.
        key = json.dumps(f"all conversations of {model}")
        demo.load(None, None, stored, js=f"() => loadConversations({key})")
        stored.change(None, stored, None, js=f"(list) => saveConversations({key}, list)")
        (show,) = (fn for fn in demo.fns.values() if fn.name == "_load_chat_history")
        show.trigger_mode = "always_last"  # while it shows the empty list of a new page, ours comes
        key = json.dumps(f"system text of {model}")
        demo.load(None, None, system, js=f"() => localStorage.getItem({key}) ?? ''")
        system.change(None, system, None, js=f"(text) => localStorage.setItem({key}, text)")
    return demo


def text_page(client, model: str):
    """A text that the model continues."""
    async def complete(text: str, *values):
        fields = {"model": model, "prompt": text, **sampling(*values)}
        async for new, note, error in stream_answer(client.completions.create, fields):
            yield text + new, f"Error: {error}" if error else note

    with gr.Blocks(title=model, fill_height=True, fill_width=True) as demo:
        with gr.Sidebar(position="right", open=False):
            inputs = settings(200)
        gr.Markdown(f"# {model}\nThis model was not finetuned for chat. It continues the text that you write.")
        text = gr.Textbox(show_label=False, lines=3, autofocus=True, elem_id="text")
        with gr.Row():
            go, stop, undo = (gr.Button(name) for name in ("Continue", "Stop", "Undo"))
        status = gr.Markdown()
        before = gr.State("")
        run = go.click(lambda text: text, text, before)
        run = run.then(complete, [text, *inputs], [text, status], concurrency_limit=None)
        stop.click(None, cancels=run)
        undo.click(lambda text: text, before, text, cancels=run)
    return demo


def show(args: argparse.Namespace) -> None:
    """Serves the page until Ctrl-C, or until the process that started this one ends. Raises: RunError"""
    try:
        socket.getaddrinfo(args.host, None)  # an unknown name, with which gradio would try for minutes
        options = client_options(args.url)
        model = openai.OpenAI(**options).models.list().data[0]
        page = chat_page if getattr(model, "chat", True) else text_page
        demo = page(openai.AsyncOpenAI(**options), model.id)
        hosts = {args.host.lower(), *map(str.lower, args.allow_host)}
        guard = {"middleware": [Middleware(Guard, hosts=hosts)]}
        head = f"{HEAD}<script>{(LIB / 'page.js').read_text('utf-8')}</script>"
        theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
        _, url, _ = demo.launch(
            server_name=args.host, server_port=args.port, app_kwargs=guard, theme=theme, head=head,
            css_paths=LIB / "page.css", share=False, ssr_mode=False, run_history=False, enable_monitoring=False,
            footer_links=[], quiet=True, prevent_thread_lock=True,
        )  # fmt: skip
    except (openai.OpenAIError, ValueError, IndexError) as error:
        raise RunError(f"{args.url} lists no model ({error_message(error)}); check the address") from None
    except OSError as error:
        reason = str(error).partition(". ")[0]  # gradio adds advice about its own settings
        raise RunError(f"cannot listen on {args.host} ({reason}); choose another --host or --port") from None
    print(f"page: {url}", flush=True)
    server = os.environ.get("DECODERSTACK_SERVER")  # the process that started this one
    with contextlib.suppress(KeyboardInterrupt):
        while server in (None, str(os.getppid())):
            time.sleep(1)


def main() -> int:
    return run_command(lambda: show(parse()))


if __name__ == "__main__":
    sys.exit(main())
