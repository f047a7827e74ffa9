"""Chat in the terminal, with a run directory or with any OpenAI-compatible server.

    python runs/chat.py out/RUN
    python runs/chat.py out/RUN --prompt "Why is the sky blue?" --temperature 0
    python runs/chat.py --endpoint http://127.0.0.1:8000 --model NAME       (a key is read from OPENAI_API_KEY)

Text appears as it is made. Commands: /clear /system TEXT /save FILE /help /quit; Ctrl-C ends an answer, Ctrl-D the
chat. The KV cache is kept between turns, so a turn computes only its own tokens; when the context is full the oldest
turns are dropped, and it says so. A model that was not finetuned for chat continues the text instead.
"""

import argparse
import codecs
import contextlib
import http.client
import importlib.util
import json
import os
import random
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

HELP = """\
/clear         forget the conversation
/system TEXT   instructions ahead of the conversation; without TEXT: none
/save FILE     add the conversation to FILE as one line of JSON, as data/sft.py reads it
/help          this list
/quit          end (also Ctrl-D)
A message that starts with a slash: write two."""
TIMEOUT = 300  # seconds that a server may be silent


class RunError(Exception):
    """Something the user can mend; one sentence. It ends a turn but not the chat."""


def say(text: str) -> None:
    """Notes go to stderr, so that stdout holds the answers alone."""
    print(text, file=sys.stderr, flush=True)


def import_script(run_dir: Path, needs: str = "Tokenizer") -> ModuleType:
    """The training script that lies in a run directory, as a module that has what `needs` names. Raises: RunError"""
    scripts = sorted(run_dir.glob("train_*.py"))
    if len(scripts) != 1:
        raise RunError(
            f"{run_dir} holds {len(scripts)} training scripts, expected one; name a run directory"
        )
    spec = importlib.util.spec_from_file_location(f"run_{scripts[0].stem}", scripts[0])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    if not hasattr(module, needs):
        raise RunError(
            f"the script in {run_dir} is too old for this tool; use the tool of its commit"
        )
    return module


def is_chat_run(run_dir: Path) -> bool:
    """Whether the run came out of finetuning (or of reinforcement learning after it), by its config.json."""
    description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    flags = description.get("flags") or [""]
    return description.get("command", flags[0]) in ("sft", "rl")


# ---- where answers come from


class Local:
    """A model of a run directory with the conversation in its KV cache."""

    MARKS = ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>")
    SHOWN = {
        "<|python_start|>": "[",
        "<|python_end|>": "",
        "<|output_start|>": " = ",
        "<|output_end|>": "]",
    }

    def __init__(self, run_dir: Path, args: argparse.Namespace):
        self.script = import_script(run_dir)
        if not hasattr(self.script, "Decoder"):
            raise RunError(
                f"the script in {run_dir} is too old for this chat; use the runs/chat.py of its commit"
            )
        try:
            self.model, self.tokenizer, config = self.script.load(run_dir, args.step, args.device)
        except (
            self.script.UserError,
            RuntimeError,
            AssertionError,
        ) as error:  # torch's, if a device is not there
            raise RunError(str(error).splitlines()[0]) from None
        specials = self.tokenizer.specials
        self.chat = is_chat_run(run_dir) and set(self.MARKS) <= set(specials)
        if not self.chat:
            say("this run was not finetuned for chat; it will continue your text instead of answering it "
                "(finetune it with the sft command)")  # fmt: skip
        self.shown = {
            specials[name]: text.encode() for name, text in self.SHOWN.items() if name in specials
        }
        self.stops = {i for i in specials.values() if i not in self.shown}
        import torch._dynamo  # noqa: F401  (now: Ctrl-C in the first answer would leave half of it imported)

        self.args, self.limit = args, config.max_seq_len
        self.seed = random.randrange(2**32) if args.seed is None else args.seed
        self.decoder = self.script.Decoder(
            self.model, self.tokenizer, 1
        )  # its row keeps the conversation

    def render(self, system: str, messages: list[dict]) -> list[int]:
        """The ids of a conversation, up to where the assistant's next answer starts."""
        special, encode = self.tokenizer.specials, self.tokenizer.encode
        ids = [self.tokenizer.bos_id]
        for i, message in enumerate(messages):
            text = f"{system}\n\n{message['content']}" if i == 0 and system else message["content"]
            part = message["ids"] if message["role"] == "assistant" else encode(text)
            start, end = f"<|{message['role']}_start|>", f"<|{message['role']}_end|>"
            ids += [special[start], *part, special[end]] if self.chat else part
        return [*ids, special["<|assistant_start|>"]] if self.chat else ids

    def parts(self, ids: list[int]) -> str | list[dict]:
        """An answer as data/sft.py takes it: a text, or with tool calls a list of parts."""
        kinds = {"<|python_start|>": "python", "<|output_start|>": "python_output"}
        named = {i: name for name, i in self.tokenizer.specials.items() if i in self.shown}
        runs = [("text", [])]
        for i in ids:
            if i in named:
                runs.append((kinds.get(named[i], "text"), []))
            else:
                runs[-1][1].append(i)
        found = [{"type": kind, "text": self.tokenizer.decode(run)} for kind, run in runs if run]
        return (
            found if any(part["type"] != "text" for part in found) else self.tokenizer.decode(ids)
        )

    def fit(self, system: str, messages: list[dict]) -> list[int]:
        """render(), after dropping the oldest turns until there is room for an answer."""
        reserve, dropped = min(self.args.max_tokens, self.limit // 4), 0
        if (alone := len(self.render(system, messages[-1:]))) > self.limit:
            raise RunError(
                f"the message takes {alone:,} tokens but the context is {self.limit:,}; shorten it"
            )
        while (
            len(ids := self.render(system, messages)) + reserve > self.limit + 1
            and len(messages) > 1
        ):
            del messages[:2]
            dropped += 1
        if dropped:
            say(f"(the context of {self.limit:,} tokens is full: dropped the oldest {dropped} "
                f"turn{'s' if dropped > 1 else ''})")  # fmt: skip
        return ids

    def stream(self, system: str, messages: list[dict], answer: dict) -> Iterator[str]:
        """Pieces of the answer; answer["ids"] grows with it. May drop the oldest messages."""
        ids, args = self.fit(system, messages), self.args
        most = min(args.max_tokens, self.limit + 1 - len(ids))
        options = {
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "seed": self.seed,
        }
        completion = self.script.Completion(
            ids, most, stop=tuple(self.stops), tools=True, **options
        )
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        try:
            self.decoder.admit({0: completion})
            while not completion.reason:
                ((_, token, _),) = self.decoder.step()
                if token is not None:
                    answer["ids"].append(token)
                    yield text.decode(self.shown.get(token, self.tokenizer.bytes[token]))
        finally:
            if not completion.reason:  # Ctrl-C may have struck within a step
                self.decoder.free(0)
        if completion.reason == "length":
            say(f"\n(cut after {most:,} tokens)")
        yield text.decode(b"", final=True)


class Remote:
    """A server that speaks the OpenAI chat protocol."""

    def __init__(self, url: str, args: argparse.Namespace):
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise RunError(
                f"--endpoint {url} is no web address; give one like http://127.0.0.1:8000"
            )
        base = url.rstrip("/").removesuffix("/chat/completions")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self.args, self.model = args, args.model
        if not self.model:
            with self.open("models") as response:
                try:
                    self.model = json.loads(response.read())["data"][0]["id"]
                except (ValueError, LookupError, TypeError, OSError, http.client.HTTPException):
                    raise RunError(
                        f"{self.base}/models names no model; name one with --model"
                    ) from None

    def open(self, path: str, body: dict | None = None):
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
        }
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode() if body is not None else None
        try:
            request = urllib.request.Request(f"{self.base}/{path}", data, headers)
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            text = error.read(10_000).decode("utf-8", "replace").strip()
            with contextlib.suppress(ValueError, LookupError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise RunError(
                f"the server answered {error.code}: {printable(text)[:500] or error.reason}"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise RunError(
                f"cannot reach {self.base} ({reason}); check the address and the server"
            ) from None

    def stream(self, system: str, messages: list[dict], answer: dict) -> Iterator[str]:
        """Pieces of the answer as server-sent events bring them; a server that does not stream gives one piece."""
        lead = [{"role": "system", "content": system}] if system else []
        history = [{"role": m["role"], "content": m["content"]} for m in messages]
        body = {"model": self.model, "messages": lead + history, "stream": True, "max_tokens": self.args.max_tokens,
                "temperature": self.args.temperature, "top_p": self.args.top_p}  # fmt: skip
        if self.args.seed is not None:
            body["seed"] = self.args.seed
        if self.args.top_k_given:  # no part of the protocol, so only if asked for
            body["top_k"] = self.args.top_k
        ended, held = False, ""
        try:
            with self.open("chat/completions", body) as response:
                if "event-stream" not in response.headers.get("Content-Type", ""):
                    yield json.loads(response.read())["choices"][0]["message"]["content"] or ""
                    return
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    if line[5:].strip() == b"[DONE]":
                        ended = True
                        break
                    event = json.loads(line[5:])
                    if "error" in event:
                        error = event["error"]
                        text = error.get("message") if isinstance(error, dict) else error
                        raise RunError(f"the server stopped: {printable(str(text))[:500]}")
                    for choice in event.get("choices") or ():
                        held += (choice.get("delta") or {}).get("content") or ""
                        ended = ended or bool(choice.get("finish_reason"))
                    # JSON may spell one character as two halves, which need not come together.
                    cut = len(held) - ("\ud800" <= held[-1:] <= "\udbff")
                    piece, held = held[:cut], held[cut:]
                    if piece:
                        yield whole(piece)
        except (OSError, http.client.HTTPException):
            ended = False
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RunError(
                "the server sent something that is not the OpenAI chat protocol"
            ) from None
        if held:
            yield whole(held)
        if not ended:
            raise RunError("the connection ended before the answer did")


def whole(text: str) -> str:
    """Pairs of surrogates become their character, lone ones a replacement mark."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def printable(text: str) -> str:
    """Without control characters, which could steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


# ---- the conversation


class Chat:
    """History and commands. A message is {"role", "content"}, an answer of a local model also {"ids"}."""

    def __init__(self, backend: Local | Remote, system: str = ""):
        self.backend, self.system, self.messages = backend, system, []

    def turn(self, text: str) -> bool:
        """Sends a message and prints the answer as it comes. False if there was none; the message is then undone."""
        text = text.encode(
            "utf-8", "replace"
        ).decode()  # a terminal can hand over bytes that are no text
        answer = {"role": "assistant", "content": "", "ids": []}
        pieces, problem = [], None
        self.messages.append({"role": "user", "content": text})
        stream = self.backend.stream(self.system, self.messages, answer)
        try:
            for piece in stream:
                pieces.append(piece)
                print(printable(piece), end="", flush=True)
        except KeyboardInterrupt:
            problem = "(stopped)"
        except RunError as error:
            problem = f"error: {error}"
        finally:
            stream.close()
        print(flush=True)
        if problem:
            say(problem)
        answer["content"] = "".join(pieces)
        if problem and not pieces:
            self.messages.pop()
            return False
        self.messages.append(answer)
        return not problem

    def command(self, line: str) -> bool:
        """Runs a line that starts with a slash; False ends the chat."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return False
        if name == "/clear":
            self.messages.clear()
            say("(cleared)")
        elif name == "/system":
            self.system = rest
            say("(set)" if rest else "(no system text)")
        elif name == "/save" and rest:
            self.save(Path(rest).expanduser())
        elif name == "/help":
            say(HELP)
        else:
            say(
                f"{name} needs a file name"
                if name == "/save"
                else f"unknown command {name}; /help lists all"
            )
        return True

    def save(self, path: Path) -> None:
        if not self.messages:
            return say("there is nothing to save yet")
        messages = [{"role": m["role"], "content": m["content"]} for m in self.messages]
        for message, known in zip(messages, self.messages, strict=True):
            if known.get("ids"):
                message["content"] = self.backend.parts(known["ids"])
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": messages}) + "\n")
            say(f"(saved {len(self.messages)} messages to {path})")
        except OSError as error:
            say(f"cannot write {path} ({error.strerror})")

    def loop(self) -> None:
        """Reads lines until /quit or the end of the input."""
        terminal = sys.stdin.isatty()
        if terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input)
            say("/help lists the commands")
        while True:
            try:
                line = input("> " if terminal else "")
            except (EOFError, KeyboardInterrupt):
                if terminal:
                    print()
                return
            if line.startswith("/") and not line.startswith("//"):
                if not self.command(line.strip()):
                    return
            elif line.strip():
                self.turn(line.removeprefix("/"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Chat with a trained model or with an OpenAI-compatible server."
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", nargs="?", type=Path)
    add("--endpoint", metavar="URL", help="an OpenAI-compatible server instead of a run directory")
    add("--model", help="its name on the server (default: the first it lists)")
    add("--prompt", help="answer this and end")
    add("--system", default="", help="instructions ahead of the conversation")
    add("--temperature", type=float, default=0.8, help="0: always the most likely token")
    add("--top-k", type=int, help="sample from this many tokens, 0: all (default 50)")
    add("--top-p", type=float, default=1.0)
    add("--max-tokens", type=int, default=512, help="most tokens of an answer")
    add("--seed", type=int, help="repeat the same answers (default: others each time)")
    add("--step", type=int, help="checkpoint to use (default: the newest)")
    add("--device", help="cuda, mps or cpu (default: the best there is)")
    args = parser.parse_args()
    args.top_k_given = args.top_k is not None
    args.top_k = 50 if args.top_k is None else args.top_k
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        if (args.run_dir is None) == (args.endpoint is None):
            raise RunError("name either a run directory or --endpoint URL")
        if args.temperature < 0 or args.max_tokens < 1 or args.top_k < 0 or not 0 < args.top_p <= 1:
            raise RunError("--temperature and --top-k must be at least 0, --max-tokens at least 1, and --top-p above "
                            "0 and at most 1")  # fmt: skip
        if args.prompt is not None and not args.prompt.strip():
            raise RunError("--prompt is empty; give it a text")
        chat = Chat(
            Local(args.run_dir, args) if args.run_dir else Remote(args.endpoint, args), args.system
        )
    except RunError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:  # while the model was loaded
        return 130
    if args.prompt is not None:
        return 0 if chat.turn(args.prompt) else 1
    chat.loop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
