"""The chat format: how a conversation becomes token ids, and how a tool call, of the calculator, stands in text.

    <|bos|> <|user_start|> text <|user_end|> <|assistant_start|> text <|assistant_end|> ...

with nothing between the tokens. data/sft.py writes the training data in this format. The template of exports
(export_chat.jinja) repeats it for other programs. tests/test_chat_format.py compares all of them.
"""

import codecs
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

from lib.calculator import calculate

ASSISTANT_START = "<|assistant_start|>"
ASSISTANT_END = "<|assistant_end|>"
TURN_TOKENS = ("<|user_start|>", "<|user_end|>", ASSISTANT_START, ASSISTANT_END)
# The special tokens of a tool call, and what stands for them in text: [3*4 = 12].
CALL_TOKENS = {"<|python_start|>": "[", "<|python_end|>": "", "<|output_start|>": " = ", "<|output_end|>": "]"}
CALL = re.compile(r"\[([^\[\]]{1,256}) = ([^\[\]]{1,64})\]")

Turn = tuple[str, str | list[int]]  # "user" or "assistant", and its text; an answer may be ids


def is_chat_run(run_dir: Path) -> bool:
    """Whether a run was finetuned (or trained by reinforcement after it), by its config.json."""
    description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    return description.get("command") in ("finetune", "rl")


def merge_turns(messages: Iterable[tuple[str, str | list[int]]]) -> list[Turn]:
    """Turns of user and assistant, from (role, content) of a conversation.

    A system (or developer) text goes in front of the next text of the user. Several messages of one role in a row
    become one. The user speaks first, if only with an empty text. The model has seen nothing else in training.

    Raises: ValueError if a message of the user is empty, or if there is none of user or assistant
    """
    merged = []
    system = []  # texts that wait for the user
    for number, (role, content) in enumerate(messages):
        if role == "user" and not content.strip():
            raise ValueError(f"messages[{number}] (user) is empty")
        if role in ("system", "developer"):
            system += [("user", content)] if content.strip() else []
            continue
        if role == "user" or not merged:
            merged += system
            system = []
        if role == "assistant" and not merged:
            merged.append(("user", ""))
        merged.append((role, content))
    merged += system

    turns = []
    for role, group in itertools.groupby(merged, key=lambda turn: turn[0]):
        contents = [content for _, content in group]
        turns.append((role, contents[0] if len(contents) == 1 else "\n\n".join(contents)))
    if turns and turns[-1] == ("assistant", ""):
        turns.pop()  # an empty beginning of an answer says nothing
    if not any(content for _, content in turns):
        raise ValueError("messages must contain one from the user or the assistant")
    return turns


def render(tokenizer, turns: list[Turn]) -> list[int]:
    """Ids of turns up to the next answer. If the last turn is the assistant's, the answer continues it."""
    specials = tokenizer.specials
    ids = [tokenizer.bos_id]
    for role, content in turns:
        if role == "assistant" and isinstance(content, str):
            content = answer_ids(tokenizer, content)
        elif isinstance(content, str):
            content = tokenizer.encode(content)
        ids += [specials[f"<|{role}_start|>"], *content, specials[f"<|{role}_end|>"]]
    if turns[-1][0] == "assistant":
        return ids[:-1]
    return [*ids, specials[ASSISTANT_START]]


def question_ids(tokenizer, question: str) -> list[int]:
    """Ids of a conversation of one question, up to its answer."""
    return render(tokenizer, [("user", question)])


def answer_ids(tokenizer, text: str) -> list[int]:
    """Ids of an answer; [3*4 = 12] in it is a call if the calculator gives that result."""
    python_start, python_end, output_start, output_end = (tokenizer.specials[name] for name in CALL_TOKENS)
    ids = []
    end = 0  # of the last call
    for call in CALL.finditer(text):
        expression, result = call.groups()
        if calculate(expression) != result:
            continue
        ids += tokenizer.encode(text[end : call.start()])
        ids += [python_start, *tokenizer.encode(expression), python_end]
        ids += [output_start, *tokenizer.encode(result), output_end]
        end = call.end()
    return ids + tokenizer.encode(text[end:])


def answer_content(tokenizer, ids: list[int]) -> str | list[dict]:
    """An answer as data/sft.py reads it: a text, or a list of parts if there are calls."""
    types = {"<|python_start|>": "python", "<|output_start|>": "python_output"}
    names = {tokenizer.specials[name]: name for name in CALL_TOKENS if name in tokenizer.specials}
    parts = [("text", [])]
    for i in ids:
        if i in names:
            parts.append((types.get(names[i], "text"), []))
        else:
            parts[-1][1].append(i)
    if all(kind == "text" for kind, _ in parts):
        return tokenizer.decode(ids)
    return [{"type": kind, "text": tokenizer.decode(part)} for kind, part in parts if part]


class Detokenizer:
    """Turns token ids into deltas as they come: (part, text), part "text", "python" or "python_output".

    Characters come out complete, and stop strings do not come out at all: as many characters are held back as may be
    the beginning of one.
    """

    def __init__(self, tokenizer, stops: tuple[str, ...] = ()):
        self.bytes = tokenizer.bytes
        self.stops = stops
        self.keep = max(map(len, stops), default=1) - 1
        specials = tokenizer.specials
        self.call_tokens = {specials[name]: name for name in CALL_TOKENS if name in specials}
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # "text", "python" in a call, "python_output" in its result, then "text". A call that is closed shows as [3*4
        # until the next token says whether a result follows: [3*4 = 12], or none: [3*4].
        self.part = "text"
        self.call_closed = False
        self.buffer: list[tuple[str, str]] = []  # characters, with their parts
        self.stopped = False  # by a stop string

    def add(self, token: int, forced: bool) -> list[tuple[str, str]]:
        """The deltas that a token completes, some of one character; `forced` as in Completion."""
        special = self.call_tokens.get(token, "")
        if not (special or self.call_closed or self.stops):  # as nearly always
            text = self.decoder.decode(self.bytes[token])
            return [(self.part, text)] if text else []
        if self.call_closed and special != "<|output_start|>":
            self.append(b"]")  # a call without a result
            self.part = "text"
        self.call_closed = special == "<|python_end|>"
        if special == "<|python_start|>":
            self.part = "python"
        elif special == "<|output_start|>":
            # A model can write this token itself; then no result of the calculator follows.
            self.part = "python_output" if forced else "text"
        self.append(CALL_TOKENS[special].encode() if special else self.bytes[token])
        if special == "<|output_end|>":
            self.part = "text"
        return self.release(self.keep)

    def finish(self) -> list[tuple[str, str]]:
        """The deltas that remain after the last token."""
        self.append(b"]" if self.call_closed else b"", final=True)
        return self.release(0)

    def append(self, utf8: bytes, final: bool = False) -> None:
        """Decodes bytes into the buffer; those of an unfinished character wait, unless they are the final ones."""
        self.buffer += [(self.part, character) for character in self.decoder.decode(utf8, final)]

    def release(self, keep: int) -> list[tuple[str, str]]:
        """Takes out of the buffer all but `keep` characters, or all before a stop string."""
        text = "".join(character for _, character in self.buffer)
        starts = [text.find(stop) for stop in self.stops if stop in text]
        self.stopped = bool(starts)
        end = min(starts, default=max(0, len(text) - keep))
        deltas = self.buffer[:end]
        self.buffer = self.buffer[end:]
        return deltas
