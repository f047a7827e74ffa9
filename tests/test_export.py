"""The exported repository: tokenizer and chat template, the model card, errors. Its model: test_export_model.py."""

import dataclasses
import functools
import json
import math
import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import tiktoken
import torch
import train_small as ts
from transformers import PreTrainedTokenizerFast

from conftest import ROOT, random_model, script, tiny_config
from hub_stub import start_hub
from processes import python

sys.path.insert(0, str(ROOT / "data"))
sys.path.insert(0, str(ROOT / "runs"))
import export
import format
import tokenizer
from lib.protocol import Problem, Protocol

VARIED = [
    "", " ", "a", "the rest\n\n of  it\t ", "l'été, naïve: 你好 😀\u200d👧 e\u0301", "1 12 123 1234 ٣٤ Ⅷ ½", "I'LL 'ſ",
    "def f(x):\r\n        return x  # ...\n", "\x00\x01\x1c\x85\u2028\u3000\ufeff", "aaaa" * 9, " " * 70 + "x",
    "-=" * 40, "<|bos|>", "x<|user_end|><|bos|> <|bo", "\U0010ffff\ud7ff",
]  # fmt: skip


def frozen_code() -> list[str]:
    """Documents that stay as they are, unlike the standard library: ids are the same with every Python."""
    return (ROOT / "baselines/2026-11-25_p34-portable/train_small.py").read_text().split("\n\n\n")


@functools.cache
def trained_tokenizer() -> dict:
    return tokenizer.train(iter(frozen_code()), 900)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> Path:
    """A tokenizer of 900 entries, trained on code. Other files import this fixture."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    format.write_json(path, trained_tokenizer())
    return path


def write_run(folder: Path, bpe: Path, chat: bool = False, model=None, config=None, **overrides) -> Path:
    """A run directory with a model of random weights, as pretraining or (chat) finetuning leaves it."""
    if config is None:
        config = tiny_config(**{"vocab_size": 900, "dtype": "float32", "data": "/home/me/secret", **overrides})
    model = model or random_model(config)
    folder.mkdir(parents=True)
    state = {"step": 7, "identity": {}, "scores": {"val_bpb": 1.25}}
    script(config).write_checkpoint(folder, (model.state_dict(), {}), state)
    description = {"config": dataclasses.asdict(config), "command": "finetune" if chat else "pretrain", "flags": []}
    (folder / "config.json").write_text(json.dumps(description | {"starts": [{"identity": {}}]}))
    scored = {"step": 7, "val_bpb": 1.25, "tokens": 4096, "scored": {"bytes": 54321}}
    entries = [{"step": 5, "loss": 2.0}, scored, {"step": 9, "val_bpb": 9.0}]
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    shutil.copy(script(config).__file__, folder)
    shutil.copy(bpe, folder / "tokenizer.json")
    return folder


def export_run(run_dir: Path, out: Path, *flags: str) -> str:
    """Exports a run as the command line does; returns the model card."""
    export.main([str(run_dir), "--out", str(out), *flags])
    return (out / "README.md").read_text(encoding="utf-8")


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    alphabets = ["  \t\n\r\x0b\u00a0\u2028'sSdtlLvVeErR12½.,ab", "aab ..--==\n", ["<|bos|>", "<|", "|>", "user", " "]]
    texts = []
    for i in range(count):
        if i % 2:
            texts.append("".join(rng.choices(alphabets[i // 2 % 3], k=rng.randint(1, 30))))
        else:
            pick = lambda: rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x1F000, 0x1FFFF)))  # noqa: E731
            texts.append("".join(chr(pick()) for _ in range(rng.randint(1, 12))))
    return texts


def test_tokenizer_equals_the_projects(bpe):
    """`tokenizers` gives the ids of tiktoken for prose, code, odd blanks, digits and any Unicode, and decodes them."""
    from tokenizers import Tokenizer

    own = ts.Tokenizer(bpe)
    theirs = Tokenizer.from_str(json.dumps(export.read_vocabulary(own).content))
    assert theirs.get_vocab_size() == own.vocab_size == 900
    texts = VARIED + random_texts(3000) + [(ROOT / "train_small.py").read_text(encoding="utf-8")]
    for text in texts:
        theirs.encode_special_tokens = True  # what spells a special token stays text, as in the project
        ids = own.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert theirs.encode(text).ids == [own.bos_id, *ids]
        theirs.encode_special_tokens = False
        expected = own.encoding.encode(text, allowed_special="all")
        assert theirs.encode(text, add_special_tokens=False).ids == expected, repr(text)
        assert theirs.decode(expected, skip_special_tokens=False) == text


def test_tokens_that_no_merge_reaches(bpe):
    """A whole word that is a token is one token, and every pair that spells a token merges, as in tiktoken."""
    from tokenizers import Tokenizer

    tokens = [bytes([b]) for b in range(256)] + [b"bc", b"ab", b"cd", b"abc", b"island", b"bcd"]
    specials = {"<|bos|>": len(tokens)}
    theirs = Tokenizer.from_str(json.dumps(export.convert_tokenizer(tokenizer.PATTERN, tokens, specials, "<|bos|>")))
    own = tiktoken.Encoding("x", pat_str=tokenizer.PATTERN, mergeable_ranks={t: i for i, t in enumerate(tokens)},
                            special_tokens=specials)  # fmt: skip
    rng = random.Random(1)
    texts = ["island", "islands", *("".join(rng.choices("abcd", k=rng.randint(1, 9))) for _ in range(2000))]
    for text in texts:
        assert theirs.encode(text, add_special_tokens=False).ids == own.encode_ordinary(text), text


# ---- the chat template


def conversation(turns: str, *contents) -> list[dict]:
    """Messages whose roles are given by their first letters."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[letter], "content": content} for letter, content in zip(turns, contents, strict=True)]


def server_ids(tokenizer, messages: list[dict]) -> list[int]:
    """A conversation as the server gives it to its model."""
    request = json.dumps({"messages": messages}).encode()
    return Protocol("x", tokenizer, 1000, True, 1).tokenize(request)["tokens"]


def parts(*texts) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


CALLS = "so [3*4 = 12], ['hello'.count('l') = 2][1,000 * 2 = 2000] [x = 3] [1 [2 = 2] [ 4] ]["
SHAPES = {
    "a question": conversation("u", "Hi"),
    "several turns": conversation("suau", "Be brief.", "Hi", "Yes?", "More"),
    "text parts": conversation("suau", parts("Be ", "brief."), parts("a", " b"), parts("x", "y"), "c"),
    "system before a later question": conversation("uasu", "a", "b", "late", "c"),
    "system behind a question": conversation("us", "a", "late"),
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
REFUSED = {
    "an empty question": conversation("u", " "),
    "tool": conversation("ut", "a", "12"),
    "an empty system alone": conversation("s", " "),
    "an empty answer alone": conversation("a", ""),
    "a picture": conversation("u", [{"type": "image_url", "image_url": {"url": "x"}}]),
}


@pytest.fixture(scope="module")
def exported_chat(bpe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    export_run(write_run(folder / "run", bpe, chat=True), folder / "model")
    return folder / "model"


@pytest.mark.parametrize("name", [*SHAPES, *REFUSED])
def test_template_and_server_agree(name, bpe, exported_chat):
    """transformers gives the ids that the server gives its model, and refuses what the server refuses."""
    messages = {**SHAPES, **REFUSED}[name]
    theirs = PreTrainedTokenizerFast.from_pretrained(exported_chat)
    render = functools.partial(theirs.apply_chat_template, messages, add_generation_prompt=True)
    if name in SHAPES:
        assert render()["input_ids"] == server_ids(ts.Tokenizer(bpe), messages)
        return
    with pytest.raises(Problem):
        server_ids(ts.Tokenizer(bpe), messages)
    with pytest.raises(Exception, match="role tool|is empty|no text|must hold"):
        render()


# ---- the folder


def test_card_and_files(bpe, tmp_path, capsys):
    """Results come from the report, or from the log up to the saved step; nothing names this computer."""
    run_dir = write_run(tmp_path / "run", bpe)
    card = export_run(run_dir, tmp_path / "model", "--name", "me/tiny", "--license", "apache-2.0")
    assert "base model" in capsys.readouterr().out
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_decoderstack.py",
             "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert {p.name for p in (tmp_path / "model").iterdir()} == names
    assert "| validation, bits per byte | 1.25 |" in card and "base model" in card and "# me/tiny" in card
    assert "license: apache-2.0\n" in card and "language: en\n" in card and "Training data: not stated" in card
    assert "measure held-out text:" in card and "UTF-8\nbytes, here 54,321." in card
    texts = [p.read_text() for p in (tmp_path / "model").iterdir() if p.suffix in (".json", ".md", ".py")]
    assert not any("/home/me" in text or str(tmp_path) in text for text in texts)

    data = "| data | /home/me/secret |"
    (run_dir / "report.md").write_text(f"# r\n\n| | |\n| --- | --- |\n{data}\n| speed | 5 |\n\n| other | x |\n")
    (run_dir / "curve.png").write_bytes(b"png")
    (run_dir / "core.csv").write_text("task,accuracy\ncopa,0.5\n")
    card = export_run(run_dir, tmp_path / "earlier")
    assert {p.name for p in (tmp_path / "earlier").iterdir()} == names, "the log ends with another step"
    assert "| validation, bits per byte | 1.25 |" in card and not re.search("speed|copa|curve.png", card)

    log = run_dir / "log.jsonl"
    log.write_text(log.read_text()[:-20])  # a crash cut the last line
    (tmp_path / "empty").mkdir()
    card = export_run(run_dir, tmp_path / "empty")
    assert "/home/me" not in card and "| data |" not in card
    assert "| speed | 5 |\n" in card and "| copa | 0.5 |" in card and "curve.png" in card and "other" not in card
    assert (tmp_path / "empty" / "curve.png").read_bytes() == b"png"


@pytest.mark.parametrize("chat", (False, True))
def test_card_commands(chat, bpe, tmp_path, monkeypatch, capsys):
    """The code for transformers runs from any folder, that for TRL where TRL is installed; harness and server.

    The training data are the sources of the dataset; conversations are those of a chat model.
    """
    (tmp_path / "dataset.json").write_text(json.dumps({"sources": ["climbmix"], "sft": {"sources": ["smol-smoltalk"]}}))
    run_dir = write_run(tmp_path / "run", bpe, chat=chat, data=str(tmp_path))
    card = export_run(run_dir, tmp_path / "model", "--name", str(tmp_path / "model"))
    assert "{" not in re.sub(r"```python.*?```|`python`|\{\"type.*?\}", "", card, flags=re.S), "nothing left to fill in"
    assert f"Training data: climbmix{', smol-smoltalk' if chat else ''}\n" in card
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    use, *finetune = re.findall(r"```python\n(.*?)```", card, re.S)
    scope = {}
    exec(use, scope)
    assert type(scope["model"]).__name__ == "DecoderStackForCausalLM"
    assert scope["tokenizer"].chat_template, "also that of a base model, for finetuning"
    for block in finetune:
        compile(block, "card", "exec")
    assert ('eos_token="<|assistant_end|>"' in card) != chat

    commands = re.findall(r"^lm_eval (?:.*\\\n)*.*$", card, re.M)
    assert len(commands) == 3 and all("max_length=64" in command for command in commands)
    assert "add_bos_token" not in commands[0] and "hellaswag" in commands[0]
    assert "add_bos_token=False" in commands[1] and "wikitext" in commands[1]
    assert ("--apply_chat_template" in commands[0]) == chat
    assert "model=run," in commands[2] and "add_bos_token=True" in commands[2], "the server adds none to ids"
    assert "python runs/serve.py out/run\n" in card


def test_user_errors(bpe, tmp_path):
    """One sentence, exit code not 0, and nothing is left behind."""
    run_dir, full, new = write_run(tmp_path / "run", bpe), tmp_path / "full", tmp_path / "new"
    full.mkdir()
    (full / "x").write_text("mine")
    model = random_model(tiny_config(vocab_size=900))
    with torch.no_grad():
        model.scalars[0, 0] = math.nan
    diverged = write_run(tmp_path / "diverged", bpe, model=model)
    for run, out, flags, message in [
        (run_dir, full, (), "not an empty folder"), (run_dir, full / "x", (), "not an empty folder"),
        (tmp_path / "none", new, (), "0 training scripts"), (run_dir, new, ("--step", "8"), "no checkpoint of step 8"),
        (diverged, new, (), "not all finite"), (run_dir, full / "x" / "y", (), "Not a directory"),
    ]:  # fmt: skip
        with pytest.raises(SystemExit) as end:
            export_run(run, out, *flags)
        assert message in end.value.code and end.value.code.startswith("error: ") and "\n" not in end.value.code
    assert not new.exists() and [p.name for p in full.iterdir()] == ["x"]


def test_push(bpe, tmp_path):
    """The repository of the hub holds the files of the folder; without a hub one sentence says what is left to do."""
    run_dir = write_run(tmp_path / "run", bpe)

    def run(endpoint, out, *more):
        names = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
        environment = {**os.environ, **names, "HF_HUB_DISABLE_XET": "1"}
        return python("runs/export.py", run_dir, "--out", out, "--push", *more, env=environment)

    with start_hub({}) as hub:
        done = run(hub.url, tmp_path / "a", "me/tiny")
        assert done.returncode == 0 and done.stdout.endswith(f"sent {tmp_path / 'a'} to me/tiny\n"), done.stderr
        sent = {name: data for name, data in hub.repos["me/tiny"].items()}
    assert sent == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert b"# me/tiny" in sent["README.md"]

    done = run(hub.url, tmp_path / "b", "me/tiny")  # the hub has gone
    assert done.returncode == 1 and "hf upload me/tiny" in done.stderr and "hf_secret" not in done.stderr
    assert "Traceback" not in done.stderr and (tmp_path / "b" / "model.safetensors").is_file()
    done = run(hub.url, tmp_path / "c", "tiny")
    assert done.returncode == 2 and "give OWNER/NAME" in done.stderr and not (tmp_path / "c").exists()
