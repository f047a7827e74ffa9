"""The exported repository: the tokenizer token by token, the model card, errors. Its model: test_export_model.py."""

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

from conftest import ROOT, random_model, script, tiny_config
from hub_stub import start_hub
from processes import python

sys.path.insert(0, str(ROOT / "data"))
sys.path.insert(0, str(ROOT / "runs"))
import export
import format
import sources
import tokenizer

VARIED = [
    "", " ", "a", "the rest\n\n of  it\t ", "l'été, naïve: 你好 😀\u200d👧 e\u0301", "1 12 123 1234 ٣٤ Ⅷ ½", "I'LL 'ſ",
    "def f(x):\r\n        return x  # ...\n", "\x00\x01\x1c\x85\u2028\u3000\ufeff", "aaaa" * 9, " " * 70 + "x",
    "-=" * 40, "<|bos|>", "x<|user_end|><|bos|> <|bo", "\U0010ffff\ud7ff",
]  # fmt: skip


@functools.cache
def trained_tokenizer() -> dict:
    documents = list(sources.open_source("stdlib", max_documents=60).train())
    return tokenizer.train(iter(documents), 900)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> Path:
    """A tokenizer of 900 entries, trained on a little of the standard library. Other files import this fixture."""
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
    entries = [{"step": 5, "loss": 2.0}, {"step": 7, "val_bpb": 1.25, "tokens": 4096}, {"step": 9, "val_bpb": 9.0}]
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    shutil.copy(script(config).__file__, folder)
    shutil.copy(bpe, folder / "tokenizer.json")
    return folder


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
    spec = json.loads(bpe.read_text())
    theirs = Tokenizer.from_str(json.dumps(export.convert_tokenizer(spec, list(own.mergeable), "<|bos|>")))
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
    spec = {"pattern": tokenizer.PATTERN, "special_tokens": {"<|bos|>": len(tokens)}}
    theirs = Tokenizer.from_str(json.dumps(export.convert_tokenizer(spec, tokens, "<|bos|>")))
    own = tiktoken.Encoding("x", pat_str=spec["pattern"], mergeable_ranks={t: i for i, t in enumerate(tokens)},
                            special_tokens=spec["special_tokens"])  # fmt: skip
    rng = random.Random(1)
    texts = ["island", "islands", *("".join(rng.choices("abcd", k=rng.randint(1, 9))) for _ in range(2000))]
    for text in texts:
        assert theirs.encode(text, add_special_tokens=False).ids == own.encode_ordinary(text), text


# ---- the folder


def test_card_and_files(bpe, tmp_path, capsys):
    """Results come from the report, or from the log up to the saved step; nothing names this computer."""
    run_dir = write_run(tmp_path / "run", bpe)
    export.export(run_dir, tmp_path / "model", name="me/tiny")
    assert "base model" in capsys.readouterr().out
    names = {"README.md", "chat_template_for_finetuning.jinja", "config.json", "generation_config.json",
             "model.safetensors", "modeling_decoderstack.py", "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert {p.name for p in (tmp_path / "model").iterdir()} == names and not list(tmp_path.glob(".*"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| validation, bits per byte | 1.25 |" in card and "base model" in card and "me/tiny" in card
    assert "chat_template" not in json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    texts = [p.read_text() for p in (tmp_path / "model").iterdir() if p.suffix in (".json", ".md", ".py")]
    assert not any("/home/me" in text or str(tmp_path) in text for text in texts)
    data = "| data | /home/me/secret |"
    (run_dir / "report.md").write_text(f"# r\n\n| | |\n| --- | --- |\n{data}\n| speed | 5 |\n\n| other | x |\n")
    (run_dir / "curve.png").write_bytes(b"png")
    (run_dir / "core.csv").write_text("task,accuracy\ncopa,0.5\n")
    export.export(run_dir, tmp_path / "earlier")
    card = (tmp_path / "earlier" / "README.md").read_text()
    assert {p.name for p in (tmp_path / "earlier").iterdir()} == names, "the log ends with another step"
    assert "| validation, bits per byte | 1.25 |" in card and not re.search("speed|copa|curve.png", card)

    log = run_dir / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], lines[2][:9]]))  # a crash cut the last line
    (tmp_path / "empty").mkdir()
    export.export(run_dir, tmp_path / "empty")
    card = (tmp_path / "empty" / "README.md").read_text()
    assert "/home/me" not in card and "| data |" not in card
    assert "| speed | 5 |\n" in card and "| copa | 0.5 |" in card and "curve.png" in card and "other" not in card
    assert (tmp_path / "empty" / "curve.png").read_bytes() == b"png"


@pytest.mark.parametrize("chat", (False, True))
def test_card_commands(chat, bpe, tmp_path):
    """E4: commands for transformers, TRL, the harness with the right BOS, the server; what does not work, and why."""
    run_dir = write_run(tmp_path / "run", bpe, chat=chat)
    export.export(run_dir, tmp_path / "model", name="me/tiny")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "{" not in re.sub(r"```python.*?```", "", card, flags=re.S), "nothing is left to fill in"
    for block in re.findall(r"```python\n(.*?)```", card, re.S):
        compile(block, "card", "exec")
    commands = re.findall(r"^lm_eval .*$", card, re.M)
    assert len(commands) == 3 and all("pretrained=me/tiny,trust_remote_code=True" in c for c in commands[:2])
    assert "add_bos_token" not in commands[0] and "hellaswag" in commands[0]
    assert "add_bos_token=False" in commands[1] and "wikitext" in commands[1]
    assert ("--apply_chat_template" in commands[0]) == chat
    assert ("chat_template_for_finetuning.jinja" in card) != chat and "assistant_only_loss=True" in card
    assert "model=run," in card and "tokenizer=me/tiny,add_bos_token=True" in card, "the server adds none to ids"
    assert "python runs/serve.py out/run\n" in card and "vLLM" in card and "GGUF" in card
    assert "keys that take half of themselves from the token before" in card


def test_user_errors(bpe, tmp_path, monkeypatch, capsys):
    """One sentence, exit code not 0, and nothing is left behind."""
    run_dir, full = write_run(tmp_path / "run", bpe), tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("mine")
    broken = write_run(tmp_path / "broken", bpe)
    (broken / "checkpoints/step_000007/model.safetensors").write_bytes(b"x")
    bare = write_run(tmp_path / "bare", bpe)
    (bare / "config.json").unlink()
    model = random_model(tiny_config(vocab_size=900))
    with torch.no_grad():
        model.scalars[0, 0] = math.nan
    diverged = write_run(tmp_path / "diverged", bpe, model=model)
    other = write_run(tmp_path / "other", bpe, model=random_model(tiny_config(vocab_size=300)))
    new = tmp_path / "new"
    for args, message in [
        ((run_dir, full), "not an empty folder"), ((run_dir, full / "x"), "not an empty folder"),
        ((tmp_path / "none", new), "0 training scripts"), ((bare, new), "config.json does not exist"),
        ((run_dir, new, "--step", "8"), "no checkpoint of step 8"), ((broken, new), "is whole"),
        ((broken, new, "--step", "7"), "is damaged"), ((diverged, new), "not all finite"),
        ((other, new), "do not fit config.json"), ((run_dir, full / "x" / "y"), "cannot write"),
    ]:  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["export.py", str(args[0]), "--out", *map(str, args[1:])])
        with pytest.raises(SystemExit) as end:
            export.main()
        assert message in end.value.code and end.value.code.startswith("error: ") and "\n" not in end.value.code
    assert not new.exists() and [p.name for p in full.iterdir()] == ["x"] and not list(tmp_path.glob(".*"))


def test_the_current_folder_is_refused(bpe, tmp_path, monkeypatch):
    run_dir = write_run(tmp_path / "run", bpe)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for out in (Path("."), Path("../empty"), tmp_path / "empty"):
        with pytest.raises(SystemExit, match="error: --out .* is the current folder; name a new one"):
            export.export(run_dir, out)
    assert not list((tmp_path / "empty").iterdir())


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
    assert done.returncode == 1 and "give OWNER/NAME" in done.stderr and not (tmp_path / "c").exists()


def test_a_damaged_checkpoint_is_passed_over(bpe, tmp_path, capsys):
    """The newest whole one is taken, and a note says so."""
    run_dir = write_run(tmp_path / "run", bpe)
    good = run_dir / "checkpoints" / "step_000007"
    shutil.copytree(good, run_dir / "checkpoints" / "step_000009")
    (run_dir / "checkpoints" / "step_000009" / "model.safetensors").write_bytes(b"x")
    export.export(run_dir, tmp_path / "model")
    out, err = capsys.readouterr()
    assert "step 7" in out and "skipped step_000009" in err


def test_another_table_of_scalars(bpe, tmp_path):
    """A script whose scalars this file does not know is refused, not exported wrongly."""
    model = random_model(tiny_config(vocab_size=900))
    model.scalars = torch.nn.Parameter(torch.zeros(9, 4))
    with pytest.raises(SystemExit, match="table of scalars has 9 rows and not 7; use the export.py of the commit"):
        export.convert_weights(model)
