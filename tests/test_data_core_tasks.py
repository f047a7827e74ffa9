"""data/core_tasks.py on bundles that are damaged or hostile: one sentence, and what was there before stays."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import core_tasks
import dataset
import numpy as np
import pytest
import tokenizer
import zstandard

from commands import sentence
from folders import contents, make_dataset

YAML = """icl_tasks:
- label: copa
  dataset_uri: a/copa.jsonl
  num_fewshot: [1]
  icl_task_type: multiple_choice
- label: winograd
  dataset_uri: a/winograd.jsonl
  num_fewshot: [0]
  icl_task_type: schema
- label: lambada
  dataset_uri: a/lambada.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
"""
TABLE = "Eval Task,Random baseline\ncopa,50\nwinograd,50\nlambada,0\n"
ITEMS = {
    "copa": [{"query": f"q{i}", "choices": ["yes", "no"], "gold": i % 2} for i in range(3)],
    "winograd": [{"context_options": ["the a", "the b"], "continuation": "is it", "gold": 1}],
    "lambada": [{"context": "once upon a", "continuation": "time"}, {"context": "", "continuation": "x"}],
}


def lines(items: list) -> bytes:
    return "".join(json.dumps(item) + "\n" for item in items).encode()


@pytest.fixture
def bundle(tmp_path) -> Path:
    root = tmp_path / "eval_bundle"
    (root / "eval_data/a").mkdir(parents=True)
    (root / "core.yaml").write_text(YAML)
    (root / "eval_meta_data.csv").write_text(TABLE)
    for label, items in ITEMS.items():
        (root / f"eval_data/a/{label}.jsonl").write_bytes(lines(items))
    return root


@pytest.fixture
def data(tmp_path) -> Path:
    """A dataset with shards of one token and a tokenizer of single bytes."""
    spec = tokenizer.make_spec(tokenizer.PATTERN, [bytes([b]) for b in range(256)], {"<|bos|>": 256})
    return make_dataset(tmp_path / "data", spec, {"train": [256, 65], "val": [256, 65]})


def test_every_file_is_listed_with_its_size_and_text(data, bundle):
    plain = dataset.read_dataset(data)
    core_tasks.build(bundle, data, 64)
    info = dataset.read_dataset(data)
    assert [name for name in info["files"] if name.startswith("core/")] == [
        f"core/{label}.npz" for label in ("copa", "lambada", "winograd")
    ]
    for label in ITEMS:
        path, entry = data / f"core/{label}.npz", info["files"][f"core/{label}.npz"]
        assert entry["bytes"] == path.stat().st_size and entry["sha256"] == dataset.sha256_file(path)
        with np.load(path, allow_pickle=False) as arrays:
            # Each token but BOS is one byte.
            assert entry["text_bytes"] == int((arrays["tokens"] != 256).sum())
            assert entry["tokens"] == len(arrays["tokens"]) and entry["items"] == len(arrays["gold"])
    assert info["fingerprint"] == plain["fingerprint"]
    assert info["core"] == {"fingerprint": dataset.fingerprint(info["files"], "core")}
    before = info["core"]["fingerprint"]
    core_tasks.build(bundle, data, 64)
    assert dataset.read_dataset(data) == info, "the same files again"
    core_tasks.build(bundle, data, 5)
    assert dataset.read_dataset(data)["core"]["fingerprint"] != before, "cut rows are other files"


def test_a_failed_run_leaves_the_old_files(data, bundle, monkeypatch):
    """The third of three files cannot be written: the first two are not exchanged either."""
    core_tasks.build(bundle, data, 64)
    before = contents(data)
    real = core_tasks.write_atomic

    def write_atomic(path, pieces):
        return dataset.fail("the disk is full") if path.name == "lambada.npz" else real(path, pieces)

    monkeypatch.setattr(core_tasks, "write_atomic", write_atomic)
    assert "the disk is full" in sentence(lambda: core_tasks.build(bundle, data, 32))
    assert contents(data) == before
    monkeypatch.undo()
    (data / ".core.new.tmp").mkdir()
    (data / ".core.new.tmp/half.npz").write_bytes(b"half")
    core_tasks.build(bundle, data, 32)
    assert contents(data) != before and not list(data.rglob("*half*"))


@pytest.mark.parametrize(("old", "new", "part"), [
    ("copa", "../copa", "'../copa'"), ("[1]", "[99]", "too few for 99 shots"), ("schema", "essay", "'essay'")
])  # fmt: skip
def test_bad_tables_are_named(data, bundle, old, new, part):
    for path in (bundle / "core.yaml", bundle / "eval_meta_data.csv"):
        path.write_text(path.read_text().replace(old, new))
    assert part in sentence(lambda: core_tasks.build(bundle, data, 64))


@pytest.mark.parametrize(("name", "old", "new", "found"), [
    ("core.yaml", "num_fewshot: [0]", "num_fewshot: [0", "ParserError"),
    ("core.yaml", "  dataset_uri: a/copa.jsonl\n", "", "KeyError: 'dataset_uri'"),
    ("core.yaml", YAML, "", "TypeError"),
    ("eval_meta_data.csv", "copa,50\n", "", "KeyError: 'copa'"),
    ("eval_meta_data.csv", "copa,50\n", "copa\n", "TypeError"),
    ("eval_meta_data.csv", "copa,50", "copa,half", "ValueError"),
], ids=("syntax", "key", "empty", "row", "short row", "number"))  # fmt: skip
def test_damaged_tables_are_named(data, bundle, name, old, new, found):
    (bundle / name).write_text((bundle / name).read_text().replace(old, new))
    message = sentence(lambda: core_tasks.build(bundle, data, 64))
    assert name in message and f"damaged ({found}" in message and "download the bundle again" in message


CHOICE = ITEMS["copa"][0]
DAMAGED = {
    "half": (b'{"query": "x", "cho', "JSONDecodeError"),
    "bytes": (b'{"query": "\xff"}', "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 11"),
    "list": (b"[1]", "TypeError"),
    "key": (b'{"query": "x", "gold": 0}', "KeyError: 'choices'"),
    "gold": (lines([{**CHOICE, "gold": 2}]), "IndexError"),
    "choice": (lines([{**CHOICE, "choices": ["yes", None]}]), "TypeError"),
}


@pytest.mark.parametrize(("item", "part"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_item_is_named(data, bundle, item, part):
    """With its file, its line and the reason; nothing is written."""
    core_tasks.build(bundle, data, 64)
    before = contents(data)
    (bundle / "eval_data/a/copa.jsonl").write_bytes(lines([CHOICE]) + b"\n" + item.strip() + b"\n" + lines([CHOICE]))
    message = sentence(lambda: core_tasks.build(bundle, data, 32))
    assert "eval_data/a/copa.jsonl line 3 is not an item of type multiple_choice" in message and part in message
    assert contents(data) == before


def test_texts_that_are_not_utf8(data, bundle):
    """A lone surrogate in JSON becomes a question mark, as everywhere."""
    path = bundle / "eval_data/a/lambada.jsonl"
    path.write_bytes(b'{"context": "a\\ud800", "continuation": "b"}\n')
    core_tasks.build(bundle, data, 64)
    with np.load(data / "core/lambada.npz", allow_pickle=False) as arrays:
        assert bytes(arrays["tokens"][1:].astype(np.uint8)) == b"a? b"


def test_the_public_bundle(data, bundle, tmp_path, monkeypatch, capsys):
    """It is fetched, and a task whose text is not the original, by the id that git gives it, is named."""
    paths = sorted((bundle / "eval_data").rglob("*.jsonl"))
    ids = subprocess.check_output(["git", "hash-object", "--no-filters", *paths], text=True).split()
    names = [path.relative_to(bundle / "eval_data").as_posix() for path in paths]
    monkeypatch.setattr(core_tasks, "ORIGINALS", dict(zip(names, ids, strict=True)))
    monkeypatch.setattr(sys, "argv", ["core_tasks.py", "--download", "--data", str(data)])

    def download() -> str:
        archive = shutil.make_archive(tmp_path / "b", "zip", bundle.parent, bundle.name)
        monkeypatch.setattr(core_tasks, "URL", Path(archive).as_uri())
        core_tasks.main()
        return capsys.readouterr().out

    assert "differs from the original" not in download()
    lambada = bundle / "eval_data/a/lambada.jsonl"
    lambada.write_bytes(lambada.read_bytes() + b"\n")
    assert "note: the text differs from the original, so published scores do not compare: lambada\n" in download()
    monkeypatch.setattr(core_tasks, "URL", (tmp_path / "none.zip").as_uri())
    assert "cannot download" in sentence(core_tasks.main) and "pass --bundle" in sentence(core_tasks.main)


@pytest.mark.parametrize("ending", ["zip", "tar.zst"])
def test_damaged_archives(bundle, tmp_path, ending):
    path = Path(shutil.make_archive(tmp_path / "b", ending[:3], bundle.parent, bundle.name))
    if ending == "tar.zst":
        path = path.with_suffix(".tar.zst")
        path.write_bytes(zstandard.compress((tmp_path / "b.tar").read_bytes()))
    assert contents(core_tasks.open_bundle(path, tmp_path / "whole")) == contents(bundle)
    raw = path.read_bytes()
    for damaged in (raw[:-30], raw[:100], raw[: len(raw) // 2] + bytes(200) + raw[len(raw) // 2 + 200 :], b""):
        path.write_bytes(damaged)
        assert "download it again" in sentence(lambda: core_tasks.open_bundle(path, tmp_path / "damaged"))
    path.unlink()
    assert "does not exist" in sentence(lambda: core_tasks.open_bundle(path, tmp_path / "damaged"))
