"""The shard format and dataset.json: round trips, damage, and failed writes."""

import errno
import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import format

TOKENS = np.arange(1, 5001, dtype=np.uint16)
SHA = hashlib.sha256(b"a tokenizer").hexdigest()


def expect_error(capture: pytest.ExceptionInfo, *parts: object) -> None:
    message = capture.value.code
    assert isinstance(message, str) and message.startswith("error: "), message
    for part in parts:
        assert str(part) in message, f"{part!r} not in {message!r}"


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 65535), min_size=1, max_size=300),
    bos_id=st.none() | st.integers(0, 65535),
    vocab_size=st.integers(0, 65536),
    tokenizer_sha256=st.just("") | st.binary(min_size=32, max_size=32).map(bytes.hex),
)
def test_round_trip(tmp_path_factory, tokens, bos_id, vocab_size, tokenizer_sha256):
    path = tmp_path_factory.mktemp("shard") / "x.bin"
    array = np.array(tokens, dtype=np.uint16)
    sha = format.write_shard(path, array, bos_id, vocab_size, tokenizer_sha256)
    assert sha == hashlib.sha256(path.read_bytes()).hexdigest()
    back = format.read_shard(path, verify=True)
    assert back.dtype == np.uint16 and back.tolist() == tokens
    header = format.read_header(path)
    stated = tokenizer_sha256 if tokenizer_sha256.strip("0") else ""
    assert header == {
        "tokens": len(tokens),
        "bos_id": bos_id,
        "vocab_size": vocab_size,
        "tokenizer_sha256": stated,
        "payload_sha256": hashlib.sha256(array.tobytes()).hexdigest(),
    }


def test_layout_is_the_published_one(tmp_path):
    """The first three words and the tokens, byte for byte, as other projects read them; then our words."""
    path = tmp_path / "x.bin"
    format.write_shard(path, np.array([7, 65535, 256], dtype=np.uint16), 7, 300, SHA)
    raw = path.read_bytes()
    assert raw[:12] == (20240520).to_bytes(4, "little") + (1).to_bytes(4, "little") + (3).to_bytes(4, "little")
    assert raw[12:20] == (8).to_bytes(4, "little") + (300).to_bytes(4, "little")
    assert raw[20:52].hex() == SHA
    assert raw[52:84] == hashlib.sha256(raw[1024:]).digest()
    assert raw[84:1024] == bytes(940)
    assert raw[1024:] == b"\x07\x00\xff\xff\x00\x01"


def test_a_plain_header_states_nothing(tmp_path):
    path = tmp_path / "hosted.bin"
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 4
    path.write_bytes(header.tobytes() + np.array([1, 2, 3, 4], dtype="<u2").tobytes())
    assert format.read_shard(path, verify=True).tolist() == [1, 2, 3, 4]
    found = format.read_header(path)
    assert (found["bos_id"], found["vocab_size"], found["tokenizer_sha256"], found["payload_sha256"]) == (
        None,
        0,
        "",
        "",
    )


def test_truncation_says_expected_and_found(tmp_path):
    path = tmp_path / "x.bin"
    format.write_shard(path, TOKENS)
    raw = path.read_bytes()
    for size in (11023, 1024, 1000, 0):
        path.write_bytes(raw[:size])
        with pytest.raises(SystemExit) as e:
            format.read_shard(path)
        expect_error(e, "truncated", path, size, 1024 if size < 1024 else 11024)
    path.write_bytes(raw + b"\0\0")
    with pytest.raises(SystemExit) as e:
        format.read_shard(path)
    expect_error(e, "too long", 11024, 11026)


def test_damage_is_found(tmp_path):
    path = tmp_path / "x.bin"
    format.write_shard(path, TOKENS)
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    format.read_shard(path)  # not asked to verify
    with pytest.raises(SystemExit) as e:
        format.read_shard(path, verify=True)
    expect_error(e, "damaged", path, "expected", "found")


@pytest.mark.parametrize(("word", "value", "part"), [(0, 1, "magic"), (1, 2, "version"), (2, 0, " 0 "), (2, -5, "-5")])
def test_bad_headers(tmp_path, word, value, part):
    path = tmp_path / "x.bin"
    format.write_shard(path, TOKENS)
    raw = bytearray(path.read_bytes())
    raw[4 * word : 4 * word + 4] = value.to_bytes(4, "little", signed=True)
    path.write_bytes(raw)
    with pytest.raises(SystemExit) as e:
        format.read_header(path)
    expect_error(e, part, path)
    with pytest.raises(SystemExit) as e:
        format.read_header(tmp_path / "missing.bin")
    expect_error(e, "missing.bin")


def test_wrong_tokens_are_refused(tmp_path):
    for bad in (TOKENS.astype(np.int32), TOKENS.reshape(2, -1), TOKENS[:0]):
        with pytest.raises(ValueError):
            format.write_shard(tmp_path / "x.bin", bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "part"), [(errno.ENOSPC, "full"), (errno.EACCES, "permissions")])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, number, part):
    path = tmp_path / "x.bin"
    format.write_shard(path, TOKENS)
    before = path.read_bytes()

    def no_space(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(SystemExit) as e:
        format.write_shard(path, TOKENS[:10])
    expect_error(e, part)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["x.bin"]


def test_interrupted_write_leaves_nothing(tmp_path):
    def pieces():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        format.write_atomic(tmp_path / "x.bin", pieces())
    assert list(tmp_path.iterdir()) == []


def make_dataset(folder):
    format.write_shard(folder / "pretrain/train_000000.bin", TOKENS)
    entry = {"tokens": 5000, "documents": 3, "text_bytes": 9, "sha256": "aa"}
    files = {"tokenizer.json": {"sha256": "cc"}, "pretrain/val_000000.bin": {**entry, "sha256": "bb"}}
    files |= {"pretrain/train_000001.bin": entry, "pretrain/train_000000.bin": entry}
    format.write_dataset(folder, {"name": "x", "sources": ["y"], "files": files})


def test_dataset_json(tmp_path):
    make_dataset(tmp_path)
    dataset = format.read_dataset(tmp_path)
    assert dataset["splits"]["train"] == {"tokens": 10000, "documents": 6, "text_bytes": 18}
    assert dataset["splits"]["val"] == {"tokens": 5000, "documents": 3, "text_bytes": 9}
    lines = "pretrain/train_000000.bin aa\npretrain/train_000001.bin aa\n"
    lines += "pretrain/val_000000.bin bb\ntokenizer.json cc\n"
    assert dataset["fingerprint"] == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('"aa"', '"ab"', "fingerprint"),
        ("decoderstack-dataset-1", "other", "other"),
        ("pretrain/val_000000.bin", "../val_000000.bin", "bad path"),
        ("pretrain/val_000000.bin", "/tmp/val_000000.bin", "bad path"),
        ("{", "", "JSON"),
    ],
)
def test_bad_dataset_json(tmp_path, old, new, part):
    make_dataset(tmp_path)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(SystemExit) as e:
        format.read_dataset(tmp_path)
    expect_error(e, part)


def test_missing_dataset_json(tmp_path):
    with pytest.raises(SystemExit) as e:
        format.read_dataset(tmp_path)
    expect_error(e, "no dataset.json")
