"""The exported repository: tokenizer and chat template, the model card, errors. Its model: test_export_model.py."""

import json
import os
import random
import re
from pathlib import Path

import datasets
import engine
import export
import pytest
import tiktoken
import tokenizer
import train_small as ts
from lib import export_files
from lib.export_tokenizer import convert_tokenizer, read_vocabulary
from safetensors import SafetensorError
from transformers import DataCollatorForLanguageModeling

from commands import stops, write_run
from references import own_logits
from tiny import ROOT

VARIED = [
    "", " ", "a", "the rest\n\n of  it\t ", "l'été, naïve: 你好 😀\u200d👧 e\u0301", "1 12 123 1234 ٣٤ Ⅷ ½", "I'LL 'ſ",
    "def f(x):\r\n        return x  # ...\n", "\x00\x01\x1c\x85\u2028\u3000\ufeff", "aaaa" * 9, " " * 70 + "x",
    "-=" * 40, "<|bos|>", "x<|user_end|><|bos|> <|bo", "\U0010ffff\ud7ff",
]  # fmt: skip


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


def export_run(run_dir: Path, out: Path, *flags: str) -> str:
    """Exports a run as the command line does; returns the model card."""
    export.main([str(run_dir), "--out", str(out), *flags])
    return (out / "README.md").read_text(encoding="utf-8")


def test_tokenizer_equals_the_projects(bpe):
    """`tokenizers` gives the ids of tiktoken for prose, code, odd blanks, digits and any Unicode, and decodes them."""
    from tokenizers import Tokenizer

    own = ts.Tokenizer(bpe)
    theirs = Tokenizer.from_str(json.dumps(read_vocabulary(own).content))
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
    theirs = Tokenizer.from_str(json.dumps(convert_tokenizer(tokenizer.PATTERN, tokens, specials, "<|bos|>")))
    own = tiktoken.Encoding("x", pat_str=tokenizer.PATTERN, mergeable_ranks={t: i for i, t in enumerate(tokens)},
                            special_tokens=specials)  # fmt: skip
    rng = random.Random(1)
    texts = ["island", "islands", *("".join(rng.choices("abcd", k=rng.randint(1, 9))) for _ in range(2000))]
    for text in texts:
        assert theirs.encode(text, add_special_tokens=False).ids == own.encode_ordinary(text), text


def test_card_and_files(bpe, tmp_path, capsys):
    """Results are those of the run, or of its log up to the saved step; nothing names this computer."""
    run_dir = write_run(tmp_path / "run", bpe)
    before = os.umask(0o027)
    card = export_run(run_dir, tmp_path / "model", "--name", "me/tiny", "--license", "apache-2.0")
    os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o640}
    assert "base model" in capsys.readouterr().out
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_decoderstack.py",
             "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert {p.name for p in (tmp_path / "model").iterdir()} == names
    assert "| validation | 1.2500 bits per byte |\n| tokens | 4,096 |\n" in card and "/home/me" not in card
    assert "base model" in card and "# me/tiny" in card
    assert "license: apache-2.0\n" in card and "language: en\n" in card and "Training data: not stated" in card
    assert "measure held-out text:" in card and "UTF-8\nbytes, here 54,321." in card
    texts = [p.read_text() for p in (tmp_path / "model").iterdir() if p.suffix in (".json", ".md", ".py")]
    assert not any("/home/me" in text or str(tmp_path) in text for text in texts)

    (run_dir / "result.json").write_text('{"val_bpb": 1.125, "tokens_per_second": 5}')
    (run_dir / "curve.png").write_bytes(b"png")
    (run_dir / "core.csv").write_text("task,accuracy\ncopa,0.5\n")
    card = export_run(run_dir, tmp_path / "earlier")
    assert {p.name for p in (tmp_path / "earlier").iterdir()} == names, "the log ends with another step"
    assert "| validation | 1.2500 bits" in card and not re.search("speed|copa|curve.png", card)

    log = run_dir / "log.jsonl"
    whole = log.read_text()
    log.write_text('{"step": 7, "reward": 0.5}\n')
    card = export_run(run_dir, tmp_path / "rl")
    assert "## Results" in card and "Bits per byte" not in card, "reinforcement learning measures none"

    log.write_text(whole[:-20])  # a crash cut the last line
    (tmp_path / "empty").mkdir()
    card = export_run(run_dir, tmp_path / "empty")
    assert "/home/me" not in card and "| data |" not in card
    assert "| speed | 5 tokens/s |\n" in card and "| copa | 0.5 |" in card and "curve.png" in card
    assert (tmp_path / "empty" / "curve.png").read_bytes() == b"png"


def blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.S)


@pytest.mark.parametrize("chat", (False, True))
def test_card_commands(chat, bpe, tmp_path, monkeypatch, capsys):
    """The code for transformers runs where it was exported. Tests below run what other packages need.

    The training data are the sources of the dataset; conversations are those of a chat model.
    """
    (tmp_path / "dataset.json").write_text(json.dumps({"sources": ["climbmix"], "sft": {"sources": ["smol-smoltalk"]}}))
    run_dir = write_run(tmp_path / "run", bpe, chat=chat, data=str(tmp_path))
    monkeypatch.chdir(tmp_path)
    card = export_run(run_dir, Path("export/tiny-1.5b"))
    assert "# tiny-1.5b\n" in card
    assert "{" not in re.sub(r"```python.*?```|`python`|\{\"type.*?\}", "", card, flags=re.S), "nothing left to fill in"
    assert f"Training data: climbmix{', smol-smoltalk' if chat else ''}\n" in card
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scope = {}
    exec(blocks(card)[0], scope)
    assert type(scope["model"]).__name__ == "DecoderStackForCausalLM"
    assert scope["tokenizer"].chat_template, "also that of a base model, for finetuning"
    collate = DataCollatorForLanguageModeling(scope["tokenizer"], mlm=False)
    end = scope["tokenizer"].eos_token_id
    labels = collate([scope["tokenizer"](text) for text in ("a" + scope["tokenizer"].eos_token, "a b c d")])["labels"]
    assert end in labels[0, 1:].tolist(), "padding is another token than the end, which a collator would not teach"
    for block in blocks(card):
        compile(block, "card", "exec")
    assert ('eos_token="<|assistant_end|>"' in card) != chat

    commands = re.findall(r"^lm_eval (?:.*\\\n)*.*$", card, re.M)
    assert len(commands) == 3 and all("max_length=64" in command for command in commands)
    assert "add_bos_token" not in commands[0] and "hellaswag" in commands[0]
    assert "add_bos_token=False" in commands[1] and "wikitext" in commands[1]
    assert ("--apply_chat_template" in commands[0]) == chat
    assert "model=run," in commands[2] and "add_bos_token=True" in commands[2], "the server adds none to ids"
    assert "python runs/serve.py run\n" in card


@pytest.mark.parametrize("chat", (False, True))
def test_card_in_trl(chat, bpe, tmp_path, monkeypatch):
    """SFT with LoRA, and DPO: after `pip install trl`, which is not among the requirements."""
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    question, answer, worse = ({"role": role, "content": text} for role, text in (
        ("user", "a b"), ("assistant", "c d"), ("assistant", "e")))  # fmt: skip
    pair = {"prompt": [question], "chosen": [answer], "rejected": [worse]}
    scope = {"conversations": datasets.Dataset.from_list([{"messages": [question, answer]}] * 8)}
    scope["preferences"] = datasets.Dataset.from_list([pair] * 8)
    use, *finetune = blocks(export_run(write_run(tmp_path / "run", bpe, chat=chat), Path("model")))
    exec(use, scope)
    few = 'output_dir="\\1", use_cpu=True, max_steps=2, report_to="none", save_strategy="no"'
    for block in finetune:
        exec(re.sub(r'output_dir="(\w+)"', few, block), scope)
        assert scope["trainer"].state.global_step == 2


def test_card_in_the_harness(bpe, tmp_path, monkeypatch):
    """With the card's arguments it finds the script's log-likelihoods: after `pip install "lm_eval[hf]"`."""
    harness = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    monkeypatch.chdir(tmp_path)
    run = engine.load_run(write_run(tmp_path / "run", bpe), device="cpu")
    arguments = re.findall(r"lm_eval --model hf --model_args (\S+)", export_run(tmp_path / "run", Path("model")))

    def ask(kind: str, arguments: str, *texts: str):
        judge = harness.HFLM.create_from_arg_string(arguments, {"device": "cpu", "dtype": "float32"})
        return getattr(judge, kind)([Instance(kind, {}, texts, 0)])[0]

    encode = run.tokenizer.encode
    ids = [run.tokenizer.bos_id, *encode("the rest and an order")]
    nats = own_logits(run, ids[:-1]).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    found, _ = ask("loglikelihood", arguments[0], "the rest", " and an order")
    assert found == pytest.approx(nats[len(encode("the rest")) :].sum().item(), abs=1e-3)
    found = ask("loglikelihood_rolling", arguments[1], "the rest and an order")
    assert found == pytest.approx(nats.sum().item(), abs=1e-3)


def test_user_errors(bpe, tmp_path, monkeypatch):
    """One sentence, exit code not 0, and nothing is left behind."""
    run_dir, full, new = write_run(tmp_path / "run", bpe), tmp_path / "full", tmp_path / "new"
    full.mkdir()
    (full / "x").write_text("mine")
    for run, out, flags, message in [
        (run_dir, full, (), "not an empty folder"), (run_dir, full / "x", (), "not an empty folder"),
        (tmp_path / "none", new, (), "it does not exist"), (run_dir, new, ("--step", "8"), "no checkpoint at step 8"),
        (run_dir, full / "x" / "y", (), "Not a directory"),
    ]:  # fmt: skip
        assert message in stops(export.main, run, "--out", out, *flags)
    assert not new.exists() and [p.name for p in full.iterdir()] == ["x"]

    def full_disk(*_):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(export_files, "save_file", full_disk)
    assert "No space left on device; fix that" in stops(export.main, run_dir, "--out", new)
