"""The tokenizer: lossless, safe against injected specials, exact byte counts, deterministic."""

import base64
import functools
import json
import os
import random
import re
from pathlib import Path

import dataset
import numpy as np
import pytest
import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from commands import sentence
from processes import python

DATA = Path(__file__).parents[1] / "data"

FOX = "The quick brown fox number {} jumps over {} lazy dogs; gr\u00fc\u00dfe \u4f60\u597d."
SAMPLE = [FOX.format(i, i * i) for i in range(300)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    dataset.write_json(path, tokenizer.train(SAMPLE, 400))
    return path


@pytest.fixture(scope="module")
def encoding(path):
    return tokenizer.load(path)


run = functools.partial(python, DATA / "tokenizer.py")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200) | st.text(
    " \n\t\r<|bos|>a1'\u00fc\u2028", max_size=80
)


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_lossless(encoding, path, text):
    tokens = tokenizer.encode(encoding, text)
    assert tokens.dtype == np.uint16 and tokens.tolist() == encoding.encode_ordinary(text)
    assert encoding.decode(tokens.tolist()) == text
    assert tokenizer.token_bytes(path)[tokens].sum() == len(text.encode())


def test_special_tokens(encoding, path):
    names = """<|bos|> <|user_start|> <|user_end|> <|assistant_start|> <|assistant_end|> <|python_start|>
        <|python_end|> <|output_start|> <|output_end|>""".split()
    assert tokenizer.special_tokens(encoding) == {name: 391 + i for i, name in enumerate(names)}
    assert tokenizer.bos_id(encoding) == 391 and encoding.n_vocab == 400
    tokens = tokenizer.encode(encoding, "".join(names))
    assert tokens.max() < 391 and encoding.decode(tokens.tolist()) == "".join(names)
    lengths = tokenizer.token_bytes(path)
    assert lengths.dtype == np.int32 and len(lengths) == 400
    assert (lengths[:391] > 0).all() and (lengths[391:] == 0).all()


def test_a_million_blanks(encoding):
    text = "start" + " " * 1_200_000 + "end"
    assert encoding.decode(tokenizer.encode(encoding, text).tolist()) == text


def test_deterministic_and_capped(monkeypatch):
    a = tokenizer.train(SAMPLE, 350)
    assert a == tokenizer.train(iter(SAMPLE), 350)
    monkeypatch.setattr(tokenizer, "MAX_CHARS", sum(map(len, SAMPLE)))
    assert a == tokenizer.train([*SAMPLE, "zzzz " * 1000], 350)
    assert list(tokenizer.truncate(["abcd", "efgh", "ij"], 6, 3)) == ["abc", "efg"]
    assert list(tokenizer.truncate(["abcd", "efgh"], 4, 3)) == ["abc", "e"]


def test_too_little_text_says_how_much():
    most = int(sentence(tokenizer.train, ["ab ab ab"], 1000).split("only ")[1].split()[0])
    assert 265 < most < 275
    assert len(tokenizer.train(["ab ab ab"], most)["ranks"]) == most - 9
    assert len(tokenizer.train(["ab ab ab"], None)["ranks"]) == 256
    rng = random.Random(0)
    texts = [" ".join(["".join(rng.choices("abcdefgh", k=9))] * 2) for _ in range(2000)]
    most = int(sentence(tokenizer.train, texts, 60_000).split("only ")[1].split()[0])
    size = len(tokenizer.train(texts, None)["ranks"]) + 9
    assert most / 4 < size <= most / 2 and size in (1024, 2048, 4096, 8192), "a power of two that fits"
    for bad in (264, 65537):
        with pytest.raises(SystemExit, match=str(bad)):
            tokenizer.train(SAMPLE, bad)


def spoil(path, target, change):
    value = json.loads(path.read_text())
    change(value)
    target.write_text(json.dumps(value))
    return target


@pytest.mark.parametrize(("change", "part"), [
    (lambda v: v.update(format="x"), "format"),
    (lambda v: v.pop("pattern"), "damaged"),
    (lambda v: v["ranks"].__setitem__(300, "%%%"), "damaged"),
    (lambda v: v["special_tokens"].update({"<|bos|>": 5}), "special ids must follow the ranks"),
    (lambda v: v["special_tokens"].clear(), "bos"),
    (lambda v: v.update(special_tokens=[391]), "damaged"),
    (lambda v: v["ranks"].extend(base64.b64encode(b"%d!" % i).decode() for i in range(66000)), "65536"),
])  # fmt: skip
def test_bad_tokenizer_files(path, tmp_path, change, part):
    with pytest.raises(SystemExit) as e:
        tokenizer.load(spoil(path, tmp_path / "t.json", change))
    assert e.value.code.startswith("error: ") and part in e.value.code


def test_a_pattern_that_fails_later_is_named(path, tmp_path):
    """One that backtracks."""
    pattern = r"(\u4f60+\u4f60+)+(?=y)|[\s\S]"
    encoding = tokenizer.load(spoil(path, tmp_path / "t.json", lambda v: v.update(pattern=pattern)))
    with pytest.raises(SystemExit, match="the pattern fails on the text"):
        tokenizer.encode(encoding, "\u4f60" * 100)


def make_gpt2_files(folder: Path) -> tuple[Path, Path]:
    """vocab.bpe and encoder.json in the published spelling, with three merges."""
    printable = [b for b in range(256) if chr(b).isprintable() and b != 32]
    spelled = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    merges = ["\u0120 t", "h e", "\u0120t he"]
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    ids = {s: i for i, s in enumerate(spelled + [m.replace(" ", "") for m in merges])}
    (folder / "encoder.json").write_text(json.dumps({**ids, "<|endoftext|>": len(ids)}), encoding="utf-8")
    return folder / "vocab.bpe", folder / "encoder.json"


def test_gpt2(tmp_path):
    vocab, encoder = make_gpt2_files(tmp_path)
    out = tmp_path / "gpt2.json"
    result = run("gpt2", "--vocab-bpe", vocab, "--encoder-json", encoder, "--out", out)
    assert result.returncode == 0, result.stderr
    encoding = tokenizer.load(out)
    assert encoding.n_vocab == 260 and tokenizer.bos_id(encoding) == 259
    assert encoding.encode_ordinary(" the he") == [258, encoding.encode_single_token(b" "), 257]
    assert encoding.encode_single_token(b"!") == 0 and tokenizer.token_bytes(out)[258] == 4
    assert encoding.decode(encoding.encode_ordinary("\u4f60 \n\x00")) == "\u4f60 \n\x00"

    before = out.read_bytes()
    vocab.write_text("#version: 0.2\nh e\n", encoding="utf-8")
    result = run("gpt2", "--vocab-bpe", vocab, "--encoder-json", encoder, "--out", out)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and "download both" in result.stderr
    result = run("gpt2", "--vocab-bpe", vocab, "--out", out)
    assert result.returncode == 1 and "--encoder-json" in result.stderr
    assert out.read_bytes() == before


TEST_TEXT = "".join(map(chr, range(0x250))) + "\n\n\n\n \n".join(chr(c) * 60 for c in range(32, 127))
HARD_TEXT = "I'LL it's  \n\n x\t\ty 12345 \u0663\u0664 \u4f60\u597d!?\r\n \u00a0\u2003 e\u0301 \U0001f600\u200d end  "


@pytest.mark.parametrize("name", tokenizer.PATTERNS)
def test_patterns_by_name(tmp_path, name):
    """A tokenizer trained with each drops no text, and states its pattern."""
    path = tmp_path / "t.json"
    dataset.write_json(path, tokenizer.train(SAMPLE, 300, pattern=tokenizer.PATTERNS[name]))
    encoding = tokenizer.load(path)
    for text in (HARD_TEXT, TEST_TEXT, " ", "\n \n", "a \n"):
        assert encoding.decode_bytes(tokenizer.encode(encoding, text).tolist()) == text.encode()
    assert tokenizer.describe(path)["pattern"] == name


def pieces(pattern: str, text: str) -> list[str]:
    """How the library tokenizers splits a text."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


# As the published tokenizer.json of each model spells its pattern.
PUBLISHED = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_patterns_split_as_the_models_that_they_are_named_after(name):
    """Split by the library tokenizers, as those models do it."""
    rng = random.Random(1)
    parts = ["'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "a", "Word", "12345", "\u00e9", "\u4f60", "!?", "-", "\u00a0"]
    texts = ["".join(rng.choices(parts, k=rng.randint(1, 12))) for _ in range(500)] + [HARD_TEXT]
    for text in texts:
        assert pieces(tokenizer.PATTERNS[name], text) == pieces(PUBLISHED[name], text), text


def test_commands(tmp_path, path):
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in SAMPLE))
    out = tmp_path / "t.json"
    result = run("train", "--source", source, "--vocab-size", 300, "--out", out)
    assert result.returncode == 0 and tokenizer.load(out).n_vocab == 300, result.stderr
    result = run("show", "--tokenizer", out, "--text", "<|bos|> 12")
    assert result.returncode == 0 and "300 entries" in result.stdout

    before = out.read_bytes()
    result = run("train", "--source", source, "--vocab-size", 60000, "--out", out)
    assert re.fullmatch("error: the text is too small .*\n", result.stderr) and out.read_bytes() == before
    text = os.fsdecode(b"a\xff")  # in a locale of UTF-8 no text, but in latin-1
    size = len(text.encode(errors="replace"))
    result = run("show", "--tokenizer", out, "--text", text)
    assert result.returncode == 0 and f"{size} tokens for {size} bytes" in result.stdout, result.stderr
    for flag, value in (("--max-documents", -5), ("--max-bytes", 0)):
        result = run("train", "--source", source, "--vocab-size", 300, "--out", tmp_path / "new.json", flag, value)
        assert result.returncode == 1 and result.stderr.startswith(f"error: {flag} must be at least 1, found {value}")
    assert not (tmp_path / "new.json").exists()
    result = run("show", "--tokenizer", tmp_path / "missing.json")
    assert result.returncode == 1 and "missing.json" in result.stderr
