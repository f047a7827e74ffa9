"""Fuzzing of what the data scripts read: either accepted, or one sentence for the user.

Each case changes valid files (flips, truncation, deletions, repeats, hostile values in JSON) and reads them. FUZZ_CASES
sets the number of cases of each target:

    FUZZ_CASES=20000 python -m pytest -m soak tests/faults/test_fuzz_data.py
"""

import copy
import gzip
import json
import math
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "data"))
import format
import sources
import tokenizer

CASES = int(os.environ.get("FUZZ_CASES", 200))
pytestmark = [pytest.mark.soak] if CASES > 1000 else []

HOSTILE = [
    None, True, False, 0, -1, 1, 1.5, math.inf, math.nan, 255, 256, 65535, 65536, 2**31, 2**63, 10**30, -(10**9),
    "", " ", "a", "\0", "\ud800", "\n", "x" * 300, "../../x", "/x", "C:\\x", "QQ==", "(", ".", r"\S+", "(x+x+)+(?=y)|.",
    "pretrain/train_000000.bin", "aa" * 32, [], [[]], {}, {"a": None}, ["a", "b"], [0], [None] * 99,
]  # fmt: skip
TEXT = "The river was wide, 1234 times.\n\n  \u4f60\u597d \u00fc\U0001f600 <|bos|>\r\n\tx = f(y)"


def fuzz(test):
    """Gives a test random numbers of a seed, CASES times."""
    chosen = settings(
        max_examples=CASES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return chosen(given(seed=st.integers(0, 2**64))(test))


def spoil_bytes(raw: bytes, rng: random.Random) -> bytes:
    """One to three changes: a flipped bit, another byte, a cut, bytes left out, repeated or added."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        if not data:
            break
        at = rng.choice((rng.randrange(len(data)), min(rng.randrange(64), len(data) - 1)))
        length = rng.choice((1, 2, 4, 32, 500))
        change = rng.choice(("flip", "set", "cut", "remove", "repeat", "add"))
        if change == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif change == "set":
            data[at : at + length] = bytes([rng.choice((0, 255, 34, 91, 123, 10))]) * length
        elif change == "cut":
            del data[at:]
        elif change == "remove":
            del data[at : at + length]
        elif change == "repeat":
            data[at:at] = data[at : at + length]
        else:
            data[at:at] = rng.randbytes(length)
    return bytes(data)


def places(value, path=()) -> list[tuple]:
    """The path of every part of a JSON value but the whole; of long lists only the first and the last entries."""
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = sorted({*range(len(value))[:2], *range(len(value))[-2:]})
    else:
        return []
    found = []
    for key in keys:
        found += [(*path, key), *places(value[key], (*path, key))]
    return found


def spoil_json(value, rng: random.Random):
    """One or two parts deleted, replaced, renamed, doubled or wrapped, in a copy."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 2)):
        found = places(value)
        if not found:
            break
        *way, key = rng.choice(found)
        parent = value
        for step in way:
            parent = parent[step]
        change = rng.choice(("delete", "replace", "replace", "wrap", "rename"))
        if change == "delete":
            del parent[key]
        elif change == "replace":
            parent[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif change == "wrap":
            parent[key] = rng.choice(([parent[key]], {"x": parent[key]}, str(parent[key])))
        elif isinstance(parent, dict):
            parent[str(rng.choice(HOSTILE))] = parent.pop(key)
        else:
            parent.insert(key, parent[key])
    return value


def spoil_file(raw: bytes, rng: random.Random) -> bytes:
    """A JSON file, changed as text or as a value."""
    if rng.random() < 0.4:
        return spoil_bytes(raw, rng)
    if rng.random() < 0.02:
        return b"[" * 100_000
    return json.dumps(spoil_json(json.loads(raw), rng)).encode()


def read_or_refuse(action, kind=SystemExit):
    """What action gives, or None if it refused in one sentence; any other exception fails the test."""
    try:
        return action()
    except kind as problem:
        message = problem.code if kind is SystemExit else str(problem)
        assert isinstance(message, str) and message and "\n" not in message.strip(), repr(message)
        assert kind is not SystemExit or message.startswith("error: ")
        return None


# ---- valid files


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> Path:
    """A small whole dataset: two training shards, one for validation, conversations and a CORE file."""
    root = tmp_path_factory.mktemp("valid")
    ranks = [bytes([b]) for b in range(256)] + [b"th", b" t", b"er", "\u4f60".encode()]
    special = {name: len(ranks) + i for i, name in enumerate(tokenizer.SPECIAL_TOKENS)}
    sha = format.write_json(root / "tokenizer.json", tokenizer.make_spec(tokenizer.PATTERN, ranks, special))
    encoding = tokenizer.load(root / "tokenizer.json")
    text = tokenizer.encode(encoding, TEXT)
    tokens = np.concatenate(([260], text, [260], text[::-1])).astype(np.uint16)
    counts = {"tokens": len(tokens), "documents": 2, "text_bytes": 2 * len(TEXT.encode())}
    files = {"tokenizer.json": format.entry_of(root / "tokenizer.json", sha)}
    for name in ("pretrain/train_000000.bin", "pretrain/train_000001.bin", "pretrain/val_000000.bin"):
        written = format.write_shard(root / name, tokens, 260, 269, sha)
        files[name] = {**counts, **format.entry_of(root / name, written)}
    mask = np.ones(len(tokens), np.uint16)
    for name, content in (("sft/train_000000.bin", tokens), ("sft/train_000000.mask.bin", mask)):
        written = format.write_shard(root / name, content, None, 269, sha)
        files[name] = {"tokens": len(tokens), **format.entry_of(root / name, written)}
    info = {"name": "x", "sources": ["y"], "tokenizer_sha256": sha, "vocab_size": 269, "bos_id": 260}
    format.write_dataset(root, {**info, "special_tokens": special, "files": files})
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# ---- data/*.py


@fuzz
def test_shards(valid, folder, seed):
    rng, path = random.Random(seed), folder / "shard.bin"
    source = valid / "pretrain/train_000000.bin"
    path.write_bytes(spoil_bytes(source.read_bytes(), rng))
    tokens = read_or_refuse(lambda: format.read_shard(path, verify=True))
    if tokens is not None and format.read_header(path)["payload_sha256"]:
        assert np.array_equal(tokens, format.read_shard(source))


@fuzz
def test_tokenizers(valid, folder, seed):
    """An accepted one need not be the same, but it loses no text and its ids fit shards."""
    rng, path = random.Random(seed), folder / "tokenizer.json"
    path.write_bytes(spoil_file((valid / "tokenizer.json").read_bytes(), rng))
    encoding = read_or_refuse(lambda: tokenizer.load(path))
    if encoding is not None:
        tokens = tokenizer.encode(encoding, TEXT)
        assert encoding.decode(tokens.tolist()) == TEXT and 0 <= tokenizer.bos_id(encoding) < encoding.n_vocab <= 65536
        assert tokenizer.token_bytes(path)[tokens].sum() == len(TEXT.encode())


def spoil_dataset(raw: bytes, rng: random.Random) -> bytes:
    """In half of the cases the fingerprint is made right again, so that the checks behind it are reached."""
    spoiled = spoil_file(raw, rng)
    if rng.random() < 0.5:
        try:
            value = json.loads(spoiled)
            value["fingerprint"] = format.fingerprint(value["files"])
            spoiled = json.dumps(value).encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
    return spoiled


@fuzz
def test_datasets(valid, folder, seed):
    rng, root = random.Random(seed), folder / "dataset"
    root.mkdir(exist_ok=True)
    (root / "dataset.json").write_bytes(spoil_dataset((valid / "dataset.json").read_bytes(), rng))
    info = read_or_refuse(lambda: format.read_dataset(root))
    if info is not None:
        # What was accepted can be written again, and its files lie in the folder.
        format.write_dataset(root, info)
        again = format.read_dataset(root)
        assert again["fingerprint"] == info["fingerprint"]
        assert all((root / name).resolve().is_relative_to(root.resolve()) for name in info["files"])


cached = {}


@fuzz
def test_sources(folder, seed):
    """Text files of every form. Only jsonl and txt have no checksum, so only they may give other documents."""
    rng = random.Random(seed)
    ending = rng.choice(("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"))
    path = folder / f"x.{ending}"
    if ending not in cached:
        texts = [f"{i} {TEXT}" for i in range(20)]
        raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        forms = {"jsonl.gz": gzip.compress(raw), "txt": "\n<|endoftext|>\n".join(texts).encode(), "jsonl": raw}
        forms["jsonl.zst"] = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "x.parquet", row_group_size=7)
        forms["parquet"] = (folder / "x.parquet").read_bytes()
        cached.update(forms)
    path.write_bytes(spoil_bytes(cached[ending], rng))
    for text in read_or_refuse(lambda: list(sources.local_documents([path], "text", {}))) or []:
        assert text.strip() and text.encode()


@fuzz
def test_checked_datasets(valid, folder, seed):
    """One file of a dataset is changed: python data/format.py check names a problem."""
    rng, root = random.Random(seed), folder / "checked"
    if not root.exists():
        shutil.copytree(valid, root)
    names = [*format.read_dataset(valid)["files"], "dataset.json"]
    path = root / rng.choice(names)
    before = path.read_bytes()
    spoil = spoil_dataset if path.name == "dataset.json" else spoil_bytes
    path.write_bytes(spoil(before, rng))
    try:
        problems = format.find_problems(root)
        assert all(problem and "\n" not in problem for problem in problems)
        assert problems or path.name == "dataset.json" or path.read_bytes() == before
    finally:
        path.write_bytes(before)
