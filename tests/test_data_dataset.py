"""The shard format and dataset.json: round trips, damage, and failed writes."""

import errno
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import check as check_script
import dataset
import numpy as np
import pytest
import tokenizer

from commands import sentence

TOKENS = np.arange(1, 5001, dtype=np.uint16)
AA, BB, CC = "aa" * 32, "bb" * 32, "cc" * 32
SPECIAL = {"<|bos|>": 256, "<|end|>": 257}
SHA = hashlib.sha256(b"a tokenizer").hexdigest()


def test_layout_is_the_published_one(tmp_path):
    """The first three words and the tokens, byte for byte, as other projects read them; then our words."""
    path = tmp_path / "x.bin"
    dataset.write_shard(path, np.array([7, 65535, 256], dtype=np.uint16), 7, 300, SHA)
    raw = path.read_bytes()
    assert raw[:12] == (20240520).to_bytes(4, "little") + (1).to_bytes(4, "little") + (3).to_bytes(4, "little")
    assert raw[12:20] == (8).to_bytes(4, "little") + (300).to_bytes(4, "little")
    assert raw[20:52].hex() == SHA
    assert raw[52:84] == hashlib.sha256(raw[1024:]).digest()
    assert raw[84:1024] == bytes(940)
    assert raw[1024:] == b"\x07\x00\xff\xff\x00\x01"


def header_word(word: int, value: int):
    """A change of one word of a header."""
    raw = value.to_bytes(4, "little", signed=True)
    return lambda shard: shard[: 4 * word] + raw + shard[4 * word + 4 :]


@pytest.mark.parametrize(("change", "part"), [
    *((lambda shard, size=size: shard[:size], "is truncated: expected 11024 bytes") for size in (11023, 1024, 1000)),
    (lambda shard: shard + b"\0\0", "too long: expected 11024 bytes for 5000 tokens, found 11026"),
    (lambda shard: b"", "is not a token shard"),
    (lambda shard: shard[:5000] + bytes([shard[5000] ^ 1]) + shard[5001:], "is damaged: expected"),
    (header_word(0, 1), "magic"), (header_word(1, 2), "version"), (header_word(2, 0), " 0 "),
    (header_word(2, -5), "-5"),
])  # fmt: skip
def test_damage_is_found(tmp_path, change, part):
    path = tmp_path / "x.bin"
    dataset.write_shard(path, TOKENS)
    path.write_bytes(change(path.read_bytes()))
    message = sentence(dataset.read_shard, path, verify=True)
    assert part in message and str(path) in message
    if "damaged" in part:
        dataset.read_shard(path)  # not asked to verify


@pytest.mark.parametrize(("number", "part"), [(errno.ENOSPC, "full"), (errno.EACCES, "permissions")])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, number, part):
    path = tmp_path / "x.bin"
    dataset.write_shard(path, TOKENS)
    before = path.read_bytes()

    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    assert part in sentence(dataset.run, lambda: dataset.write_shard(path, TOKENS[:10]))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["x.bin"]


def make_dataset(folder, **more):
    dataset.write_shard(folder / "pretrain/train_000000.bin", TOKENS)
    entry = {"tokens": 5000, "documents": 3, "text_bytes": 9, "bytes": 11024, "sha256": AA}
    files = {"tokenizer.json": {"sha256": CC}, "pretrain/val_000000.bin": {**entry, "sha256": BB}}
    files |= {"pretrain/train_000001.bin": entry, "pretrain/train_000000.bin": entry, **more}
    dataset.write_dataset(folder, {"name": "x", "sources": ["y"], "tokenizer_sha256": CC, "files": files})


def test_dataset_json(tmp_path):
    make_dataset(tmp_path)
    info = dataset.read_dataset(tmp_path)
    assert info["splits"]["train"] == {"tokens": 10000, "documents": 6, "text_bytes": 18}
    assert info["splits"]["val"] == {"tokens": 5000, "documents": 3, "text_bytes": 9}
    lines = f"pretrain/train_000000.bin {AA}\npretrain/train_000001.bin {AA}\n"
    lines += f"pretrain/val_000000.bin {BB}\ntokenizer.json {CC}\n"
    assert info["fingerprint"] == hashlib.sha256(lines.encode()).hexdigest()
    assert not set(dataset.FOLDERS) & set(info), "no notes of folders that are not there"


def test_each_folder_has_its_own_fingerprint(tmp_path):
    """Over its files and the tokenizer; the one of pretrain/ does not change, and goes when the folder goes."""
    make_dataset(tmp_path)
    plain = dataset.read_dataset(tmp_path)
    shard, mask = {"bytes": 1, "sha256": AA}, {"bytes": 1, "sha256": BB}
    more = {"sft/train_000000.mask.bin": mask, "sft/train_000000.bin": shard, "core/copa.npz": mask}
    make_dataset(tmp_path, **more)
    info = dataset.read_dataset(tmp_path)
    assert info["fingerprint"] == plain["fingerprint"]
    lines = f"sft/train_000000.bin {AA}\nsft/train_000000.mask.bin {BB}\ntokenizer.json {CC}\n"
    assert info["sft"]["fingerprint"] == hashlib.sha256(lines.encode()).hexdigest()
    lines = f"core/copa.npz {BB}\ntokenizer.json {CC}\n"
    assert info["core"]["fingerprint"] == hashlib.sha256(lines.encode()).hexdigest()

    info["files"].pop("core/copa.npz")
    dataset.write_dataset(tmp_path, info)
    assert "core" not in dataset.read_dataset(tmp_path)


def test_datasets_of_earlier_versions_are_read(tmp_path):
    """They state no sizes in bytes, and no fingerprint of sft/ and core/."""
    make_dataset(tmp_path, **{"sft/train_000000.bin": {"sha256": AA}})
    value = dataset.read_json(tmp_path / "dataset.json")
    for entry in value["files"].values():
        entry.pop("bytes", None)
    value["sft"] = {"sources": ["chat"]}
    del value["sha256"]
    dataset.write_json(tmp_path / "dataset.json", value)
    assert dataset.read_dataset(tmp_path) == value


@pytest.mark.parametrize(("old", "new", "part"), [
    (f'"{AA}"', f'"{BB}"', "is damaged"),
    ('"name": "x"', '"name": "y"', "is damaged"),
    ("decoderstack-dataset-1", "other", "has format 'other'"),
    ("{", "", "is not a readable JSON file"),
])  # fmt: skip
def test_bad_dataset_json(tmp_path, old, new, part):
    make_dataset(tmp_path)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace(old, new, 1))
    assert part in sentence(dataset.read_dataset, tmp_path)


@pytest.mark.parametrize("raw", [b"[" * 10**6, b"\xff", b""])
def test_broken_json(tmp_path, raw):
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    assert f"{path} is not a readable JSON file" in sentence(dataset.read_json, path)


def write_whole(root: Path, train: list[list[int]], val: list[list[int]], **header) -> dict:
    """A dataset of documents, whose tokens are bytes, with conversations; returns the value of dataset.json."""
    spec = tokenizer.make_spec(tokenizer.PATTERN, [bytes([b]) for b in range(256)], SPECIAL)
    sha = dataset.write_json(root / "tokenizer.json", spec)
    files = {"tokenizer.json": dataset.file_entry(root / "tokenizer.json", sha)}
    for split, documents in (("train", train), ("val", val)):
        tokens = np.array([t for document in documents for t in [256, *document]], np.uint16)
        stated = {"bos_id": 256, "vocab_size": 258, "tokenizer_sha256": sha, **header}
        for folder in ("pretrain", "sft"):
            path = root / folder / f"{split}_000000.bin"
            counts = {"tokens": len(tokens), "documents": len(documents), "conversations": len(documents)}
            counts["text_bytes"] = len(tokens) - len(documents)
            written = dataset.write_shard(path, tokens, **stated)
            files[f"{folder}/{path.name}"] = {**counts, **dataset.file_entry(path, written)}
        mask = root / f"sft/{split}_000000.mask.bin"
        written = dataset.write_shard(mask, np.ones(len(tokens), np.uint16), None, 2, sha)
        files[f"sft/{mask.name}"] = {"tokens": len(tokens), **dataset.file_entry(mask, written)}
    info = {"name": "x", "sources": [], "tokenizer_sha256": sha, "vocab_size": 258, "bos_id": 256}
    dataset.write_dataset(root, {**info, "special_tokens": SPECIAL, "files": files})
    return dataset.read_dataset(root)


def check(root: Path) -> tuple[int, str]:
    """Exit code and output of the command."""
    command = [sys.executable, check_script.__file__, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_check_counts_validation_text_that_is_also_training_text(tmp_path):
    write_whole(tmp_path, [[1, 2], [3], [9]], [[3], [5, 6], [3], [1, 2, 9]])
    code, output = check(tmp_path)
    first, *notes = output.splitlines()
    assert code == 0 and re.fullmatch(r".* is complete: 7 files, fingerprint [0-9a-f]{12}", first)
    assert notes == [
        "note: 2 of 4 documents of the validation split are also in the training split",
        "note: 2 of 4 conversations of the validation split are also in the training split",
    ]


TRAIN = "pretrain/train_000000.bin"


def change_tokenizer(root: Path, **fields) -> None:
    value = dataset.read_json(root / "tokenizer.json") | fields
    sha = dataset.write_json(root / "tokenizer.json", value)
    info = dataset.read_dataset(root) | {"tokenizer_sha256": sha}
    info["files"]["tokenizer.json"] = dataset.file_entry(root / "tokenizer.json", sha)
    dataset.write_dataset(root, info)


def rewrite(root: Path, tokens: list[int], name: str = TRAIN, **header) -> None:
    """Another shard, which dataset.json lists with its new sha256 and size."""
    dataset.write_shard(root / name, np.array(tokens, np.uint16), **header)
    value = dataset.read_dataset(root)
    value["files"][name] |= dataset.file_entry(root / name, dataset.sha256_file(root / name))
    dataset.write_dataset(root, value)


@pytest.mark.parametrize(("change", "words"), [
    (lambda root: (root / TRAIN).unlink(), "is missing, but dataset.json lists it"),
    (lambda root: (root / TRAIN).write_bytes((root / TRAIN).read_bytes()[:-2]), "is truncated"),
    (lambda root: dataset.write_shard(root / TRAIN, TOKENS[:5]), "was changed"),
    (lambda root: dataset.write_shard(root / "pretrain/train_000001.bin", TOKENS), "is not listed"),
    (lambda root: dataset.write_json(root / "core/copa.npz", {}), "copa.npz is not listed"),
    (lambda root: rewrite(root, [256, 1, 300, 256, 3]), "holds token 300 but the tokenizer has 258 entries"),
    (lambda root: rewrite(root, [1, 2, 1, 2, 3]), "lacks the tokenizer's BOS 256"),
    (lambda root: rewrite(root, [256, 1, 2, 3, 4]), "holds 1 documents, dataset.json lists 2"),
    (lambda root: rewrite(root, [256, 1, 2, 256, 3], bos_id=255), "states another vocabulary (BOS 255,"),
    (lambda root: rewrite(root, [256, 1, 2, 256, 3], tokenizer_sha256=AA), "made with another tokenizer"),
    (lambda root: rewrite(root, [2] * 5, "sft/train_000000.mask.bin"), "is not a mask of the shard"),
    (lambda root: change_tokenizer(root, special_tokens={"<|bos|>": 257, "<|end|>": 256}), "a different bos_id"),
])  # fmt: skip
def test_check_names_each_problem(tmp_path, change, words):
    write_whole(tmp_path, [[1, 2], [3]], [[4], [5, 6]])
    (tmp_path / "pretrain/.train_000001.bin.tmp").touch()  # of a command that was killed
    assert check_script.find_problems(tmp_path) == []
    change(tmp_path)
    assert any(words in problem for problem in check_script.find_problems(tmp_path))


def test_check_names_all_problems(tmp_path):
    write_whole(tmp_path, [[1, 2], [3]], [[4], [5, 6]])
    (tmp_path / TRAIN).unlink()
    (tmp_path / "sft/val_000000.bin").write_bytes(b"short")
    code, output = check(tmp_path)
    assert code == 1 and len(output.splitlines()) == 2 and "missing" in output and "is not a token shard" in output
    (tmp_path / "dataset.json").unlink()
    code, output = check(tmp_path)
    assert code == 1 and "has no dataset.json" in output
