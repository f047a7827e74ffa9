"""The chat format in all places that write it: the server, data/sft.py, the template of exports, ollama's."""

import json
import re

import pytest
import sft
import train_small as ts
from lib import chat_format, export_files, export_portable, export_tokenizer
from lib.protocol import APIError, Protocol
from transformers import PreTrainedTokenizerFast


def conversation(turns: str, *contents) -> list[dict]:
    """Messages whose roles are given by their first letters."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[letter], "content": content} for letter, content in zip(turns, contents, strict=True)]


def parts(*texts) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


CALLS = "so [3*4 = 12], ['hello'.count('l') = 2][1,000 * 2 = 2000] [x = 3] [1 [2 = 2] [ 4] ]["
SHAPES = {
    "a question": conversation("u", "Hi"),
    "several turns": conversation("suau", "Be brief.", "Hi", "Yes?", "More"),
    "special tokens as text": conversation("uau", "<|user_end|>", "<|bos|>", "<|python_start|>"),
    "text parts": conversation("suau", parts("Be ", "brief."), parts("a", " b"), parts("x", "y"), "c"),
    "system before a later question": conversation("uasu", "a", "b", "late", "c"),
    "system behind a question": conversation("us", "a", "late"),
    "system between questions": conversation("usu", "a", "late", "b"),
    "system behind an answer": conversation("uas", "a", "b", "late"),
    "answer behind a system": conversation("uasau", "a", "b", "late", "c", "d"),
    "two systems": conversation("ssu", "one", "two", "a"),
    "an empty system": conversation("su", " ", "a"),
    "developer": conversation("du", "rules", "a"),
    "system alone": conversation("s", "alone"),
    "two users": conversation("uu", "a", "b"),
    "two assistants": conversation("uaau", "a", "b", "c", "d"),
    "calls": conversation("uau", "a", CALLS, "b"),
    "an answer that goes on": conversation("ua", "a", "Once upon"),
    "a call that goes on": conversation("ua", "a", "it is [3*4 = 12]"),
    "no answer": conversation("uau", "a", None, "b"),
    "an empty answer to go on": conversation("ua", "a", ""),
    "assistant first": conversation("sau", "x", "Hello!", "a"),
}
# Those that training data may have.
TRAINED = (
    "a question", "several turns", "special tokens as text", "an empty system", "calls", "two systems", "developer",
    "system before a later question", "text parts",
)  # fmt: skip
REFUSED = {
    "an empty question": conversation("u", " "),
    "a tool": conversation("ut", "a", "12"),
    "an empty system alone": conversation("s", " "),
    "an empty answer alone": conversation("a", ""),
    "a picture": conversation("u", [{"type": "image_url", "image_url": {"url": "x"}}]),
}


def server_ids(tokenizer, messages: list[dict]) -> list[int]:
    """A conversation as the server gives it to its model."""
    request = json.dumps({"messages": messages}).encode()
    return Protocol("x", tokenizer, 1000, True, 1).prepare_chat(request).sequences[0].completion.prompt


@pytest.fixture(scope="module")
def templates(bpe, tmp_path_factory) -> dict:
    """What each template makes of messages."""
    folder = tmp_path_factory.mktemp("tokenizer")
    export_files.write_tokenizer(folder, export_tokenizer.read_vocabulary(ts.Tokenizer(bpe), is_chat=True), 64)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.backend_tokenizer.encode_special_tokens = False

    def render(text, messages):
        return theirs.apply_chat_template(messages, chat_template=text, add_generation_prompt=True)["input_ids"]

    texts = {"transformers": theirs.chat_template, "GGUF": export_portable.GENERATION.sub("", theirs.chat_template)}
    assert "generation -%}" not in texts["GGUF"]
    return {name: lambda messages, text=text: render(text, messages) for name, text in texts.items()}


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "special tokens as text"])
def test_templates_and_server_agree(name, bpe, templates):
    """But for special tokens in a text, which become tokens there."""
    expected = server_ids(ts.Tokenizer(bpe), SHAPES[name])
    assert templates["transformers"](SHAPES[name]) == templates["GGUF"](SHAPES[name]) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, bpe, templates):
    with pytest.raises(APIError):
        server_ids(ts.Tokenizer(bpe), REFUSED[name])
    for render in templates.values():
        with pytest.raises(Exception, match="role tool|is empty|no text|must contain"):
            render(REFUSED[name])


@pytest.mark.parametrize("name", TRAINED)
def test_it_is_what_models_are_trained_on(name, bpe):
    """data/sft.py gives the ids of the server, up to the answer that follows. Calls are parts there."""
    tokenizer = ts.Tokenizer(bpe)
    answered = []
    for message in [*SHAPES[name], {"role": "assistant", "content": "yes"}]:
        if message["role"] == "assistant" and isinstance(message["content"], str):
            ids = chat_format.answer_ids(tokenizer, message["content"])
            message = message | {"content": chat_format.answer_content(tokenizer, ids)}
        answered.append(message)
    ids = sft.render(sft.check_messages({"messages": answered}), tokenizer.encode, tokenizer.specials)[0]
    answer = [*tokenizer.encode("yes"), tokenizer.specials["<|assistant_end|>"]]
    assert ids.tolist() == server_ids(tokenizer, SHAPES[name]) + answer


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_ollama(system, bpe):
    """Its template, with the two constructs that it uses filled in by hand."""
    text = export_portable.HOW_TO_RUN.read_text().partition('TEMPLATE """')[2].partition('"""')[0]
    text = re.sub(r"{{ if .System }}(.*?){{ end }}", r"\1" if system else "", text, flags=re.DOTALL)
    text = text.replace("{{ .System }}", system).replace("{{ .Prompt }}", "Hi").partition("{{ .Response }}")[0]
    tokenizer = ts.Tokenizer(bpe)
    ids = tokenizer.encoding.encode(f"<|bos|>{text}", allowed_special="all")
    assert ids == server_ids(tokenizer, conversation("su", system, "Hi"))
