"""The one-command script: a plain reference, resuming, hosted shards, user errors."""

import errno
import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import dataset
import numpy as np
import pretrain
import pytest
import sources
import tokenizer

from folders import contents
from processes import python
from tiny import write_shard

DATA = Path(__file__).parents[1] / "data"

LETTERS = random.Random(5)
WORDS = ["".join(LETTERS.choices("etaoinshrdlu", k=LETTERS.randint(2, 9))) for _ in range(500)]
WORDS += [*"<|bos|> gr\u00fc\u00dfe \u4f60\u597d \U0001f600 1234 def f(x): a\u2028b".split(" "), "it's\n\n"] * 20


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed}-{i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 400))) for i in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8", newline="\n")
    return path


run = functools.partial(python, DATA / "pretrain.py")


def expect_error(result: subprocess.CompletedProcess, *parts: object) -> None:
    """The last line of stderr; runs may have printed progress before."""
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stdout + result.stderr
    for part in ("error: ", *parts):
        assert str(part) in result.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """train.jsonl, val.jsonl, tokenizer.json and the dataset "plain" built from them in one process."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = make_texts(1500)
    write_jsonl(folder / "train.jsonl", [*texts[:700], "", " \n", *texts[700:]])
    write_jsonl(folder / "val.jsonl", make_texts(80, seed=1))
    dataset.write_json(folder / "tokenizer.json", tokenizer.train(texts, 450))
    result = run(*settings(folder, "plain"), "--workers", 1)
    assert result.returncode == 0, result.stderr
    assert "skipped 2 empty documents" in result.stdout
    return folder


def settings(corpus: Path, name: str, *source: object) -> list[object]:
    return [
        *("--source", *(source or [corpus / "train.jsonl"]), "--val-source", corpus / "val.jsonl", "--name", "x"),
        *("--tokenizer", corpus / "tokenizer.json", "--shard-tokens", 60_000, "--out", corpus / name),
    ]


def test_a_document_may_fill_its_shard():
    """A shard ends before the document that would take it over its size, and holds one that just fits."""
    documents = [(range(length), 1) for length in (30, 30, 30, 29, 2, 90, 60, 1)]
    shards = dataset.group_shards(documents, 60)
    assert [[len(tokens) for tokens, _ in shard] for shard in shards] == [[30, 30], [30, 29], [2], [90], [60], [1]]


def test_equals_a_plain_reference(corpus):
    """Token for token what the simplest possible code gives, and shards cut only between documents."""
    encoding = tokenizer.load(corpus / "tokenizer.json")
    info = dataset.read_dataset(corpus / "plain")
    sha = dataset.sha256_file(corpus / "tokenizer.json")
    assert info["tokenizer_sha256"] == sha == dataset.sha256_file(corpus / "plain/tokenizer.json")
    assert (info["bos_id"], info["vocab_size"], info["name"]) == (441, 450, "x")
    assert info["sources"] == ["train.jsonl", "val.jsonl (val)"]
    for split, texts in (("train", make_texts(1500)), ("val", make_texts(80, seed=1))):
        expected = [t for text in texts for t in [441, *encoding.encode_ordinary(text)]]
        paths = sorted((corpus / "plain/pretrain").glob(f"{split}_*.bin"))
        shards = [dataset.read_shard(path, verify=True) for path in paths]
        assert np.concatenate(shards).tolist() == expected
        assert all(shard[0] == 441 and len(shard) <= 60_000 for shard in shards)
        assert [p.name for p in paths] == [f"{split}_{i:06d}.bin" for i in range(len(paths))]
        size = sum(len(t.encode()) for t in texts)
        assert info["splits"][split] == {"tokens": len(expected), "documents": len(texts), "text_bytes": size}
        for path, shard in zip(paths, shards, strict=True):
            entry = info["files"][f"pretrain/{path.name}"]
            assert entry["sha256"] == dataset.sha256_file(path) and entry["tokens"] == len(shard)
            assert entry["bytes"] == path.stat().st_size == 1024 + 2 * len(shard)
            assert entry["documents"] == int((shard == 441).sum())
            header = dataset.read_header(path)
            assert (header["bos_id"], header["vocab_size"], header["tokenizer_sha256"]) == (441, 450, sha)
    assert len(list((corpus / "plain/pretrain").glob("train_*.bin"))) > 5


def test_parallel_gives_the_same_bytes(corpus):
    result = run(*settings(corpus, "parallel"), "--workers", 3)
    assert result.returncode == 0, result.stderr
    assert contents(corpus / "parallel") == contents(corpus / "plain")


def test_every_writer_heeds_the_lock(corpus, tmp_path):
    """All write to the same folder and the same dataset.json. A second build is refused before it reads anything."""
    out = corpus / "plain"
    before = contents(out)
    commands = (
        ("pretrain.py", *settings(corpus, "plain")),
        ("pretrain.py", "--source", "pypi:p34", "--out", out),
        ("sft.py", "--data", out, "--source", "addition:50"),
        ("core_tasks.py", "--data", out, "--bundle", "none"),
    )
    env = {**os.environ, "DECODERSTACK_WHEELS": str(tmp_path / "wheels")}
    with dataset.lock_folder(out):
        for name, *flags in commands:
            result = python(DATA / name, *flags, env=env)
            expect_error(result, f"another process is writing to {out}; wait until it ends")
    assert contents(out) == before and not (tmp_path / "wheels").exists()


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_every_stop_gives_the_same_bytes(corpus, tmp_path, monkeypatch, problem):
    """Stops, or a full disk, at the 1st, 2nd, 3rd ... write: one sentence, no half file, and the next run goes on."""
    out = tmp_path / "stopped"
    argv = ["pretrain.py", *map(str, settings(corpus, "x")), "--out", str(out), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    real = os.fsync
    left = 0

    def fsync(handle):
        nonlocal left
        left -= 1
        if left < 0:
            raise problem
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    stops = 0
    while not (out / "dataset.json").exists():
        # Some further write each time, so that every one of them is hit.
        left = 3 + stops % 4
        try:
            dataset.run(pretrain.main)
        except SystemExit as end:
            assert "stopped" in end.code or "error: the disk is full" in end.code
        stops += 1
        assert stops < 50 and not list(out.rglob("*.tmp"))
        for path in out.rglob("*.bin"):
            dataset.read_shard(path, verify=True)
    assert stops > 4 and contents(out) == contents(corpus / "plain")


def test_interleaved_files(corpus, tmp_path):
    """The shards hold the documents of both files side by side; the flag belongs to the directory's settings."""
    long, short = ["long " * 10] * 40, ["short " * 10] * 20
    sources = f"{write_jsonl(tmp_path / 'a.jsonl', long)},{write_jsonl(tmp_path / 'b.jsonl', short)}"
    out = tmp_path / "mixed"
    flags = [*settings(corpus, "mixed", sources), "--out", out, "--workers", 1]
    result = run(*flags, "--interleave")
    assert result.returncode == 0, result.stderr
    encoding = tokenizer.load(corpus / "tokenizer.json")
    tokens = dataset.read_shard(out / "pretrain/train_000000.bin").tolist()
    texts = encoding.decode(tokens).split(encoding.decode([441]))[1:]
    assert len(texts) == 60 and all(texts[i : i + 6].count(short[0]) in (1, 2, 3) for i in range(0, 60, 6))
    assert "already complete" in run(*flags, "--interleave").stdout
    expect_error(run(*flags), "--interleave", True, "not given")
    expect_error(run(*settings(corpus, "x", "shards:x"), "--interleave"), "--interleave is for text")
    expect_error(run(*settings(corpus, "x", "shards:x")), "--val-source is for text")


def test_second_run_and_other_settings(corpus):
    before = contents(corpus / "plain")
    result = run(*settings(corpus, "plain"))
    assert result.returncode == 0 and "already complete" in result.stdout and len(result.stdout.splitlines()) == 1
    expect_error(run(*settings(corpus, "plain"), "--shard-tokens", 50_000), "--shard-tokens", 60000, 50000)
    changed = settings(corpus, "plain", corpus / "val.jsonl")
    expect_error(run(*changed, "--val-source", "stdlib"), "different source files")
    other = corpus / "other.json"
    dataset.write_json(other, tokenizer.train(make_texts(300), 300))
    expect_error(run(*settings(corpus, "plain"), "--tokenizer", other), "--tokenizer")
    assert contents(corpus / "plain") == before


def test_a_malformed_line_does_not_cost_the_finished_shards(corpus, tmp_path):
    """The build that stopped there continues with --skip-bad; without the line it is another source."""
    out = tmp_path / "out"
    source = write_jsonl(tmp_path / "train.jsonl", make_texts(1500))
    good = source.read_bytes()
    lines = good.split(b"\n")
    source.write_bytes(b"\n".join([*lines[:1200], b'{"text": "broken', *lines[1200:]]))
    flags = [*settings(corpus, "x", source), "--workers", 1, "--out"]
    expect_error(run(*flags, out), "train.jsonl line 1201: it is not valid JSON", "--skip-bad")
    shards = dataset.read_json(out / "progress.json")["shards"]["train"]
    assert len(shards) > 4
    before = [(out / shard["path"]).stat().st_ino for shard in shards]
    (out / f"pretrain/.train_{len(shards):06d}.bin.tmp").write_bytes(b"half a shard")  # as kill -9 leaves it
    source.write_bytes(good)
    expect_error(run(*flags, out), "was built from different source files")
    source.write_bytes(b"\n".join([*lines[:1200], b'{"text": "broken', *lines[1200:]]))
    result = run(*flags, out, "--skip-bad")
    assert result.returncode == 0 and "skipped 1 empty documents or malformed lines" in result.stdout, result.stderr
    assert [(out / shard["path"]).stat().st_ino for shard in shards] == before
    assert contents(out) == contents(corpus / "plain")


def test_a_renamed_folder_is_no_other_dataset(corpus, tmp_path):
    """Neither a whole one nor one that was interrupted; only an explicit --name must be the same."""
    flags = [*settings(corpus, "x"), "--workers", 1, "--out"]
    at = flags.index("--name")
    del flags[at : at + 2]
    assert run(*flags, tmp_path / "a").returncode == 0
    (tmp_path / "a").rename(tmp_path / "b")
    assert "already complete" in run(*flags, tmp_path / "b").stdout
    assert dataset.read_dataset(tmp_path / "b")["name"] == "a"
    (tmp_path / "b/dataset.json").unlink()
    (tmp_path / "b").rename(tmp_path / "c")
    assert run(*flags, tmp_path / "c").returncode == 0
    assert dataset.read_dataset(tmp_path / "c")["name"] == "c"
    expect_error(run(*flags, tmp_path / "c", "--name", "other"), "--name")


def test_a_pattern_by_name(tmp_path):
    """dataset.json names it; another one in the same folder, or beside --tokenizer, is refused."""
    source = write_jsonl(tmp_path / "x.jsonl", make_texts(200))
    flags = ["--source", source, "--vocab-size", 300, "--workers", 1]
    for name in ("gpt4", "llama3"):
        out = tmp_path / name
        more = ["--pattern", name] if name != "gpt4" else []
        assert run(*flags, *more, "--out", out).returncode == 0
        assert dataset.read_dataset(out)["pattern"] == name
        assert dataset.read_json(out / "tokenizer.json")["pattern"] == tokenizer.PATTERNS[name]
    expect_error(run(*flags, "--pattern", "qwen2", "--out", tmp_path / "llama3"), "--pattern", "qwen2")
    expect_error(run("--source", source, "--out", tmp_path / "gpt4"), "was 300 before and is not given now")
    given = ["--tokenizer", tmp_path / "gpt4/tokenizer.json", "--out", tmp_path / "other"]
    expect_error(run(*flags, "--pattern", "qwen2", *given), "has --pattern gpt4, not qwen2; omit the flag")


def test_a_damaged_dataset_is_noticed(corpus):
    out = corpus / "damaged"
    assert run(*settings(corpus, "damaged"), "--workers", 1).returncode == 0
    shard = out / "pretrain/train_000001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    expect_error(run(*settings(corpus, "damaged")), "truncated", shard.name)
    shard.unlink()
    expect_error(run(*settings(corpus, "damaged")), shard.name)
    shard.write_bytes(whole)
    (out / "progress.json").unlink()
    before = contents(out)
    expect_error(run(*settings(corpus, "damaged")), "did not write", out)
    assert contents(out) == before


def test_trains_its_own_tokenizer_and_holds_out_documents(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", make_texts(300))
    args = ["--source", source, "--vocab-size", 400, "--workers", 1, "--val-fraction", 0.05]
    for name in ("a", "b"):
        assert run(*args, "--out", tmp_path / name, "--name", "x").returncode == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    info = dataset.read_dataset(tmp_path / "a")
    assert info["vocab_size"] == 400 and info["splits"]["val"]["documents"] == 15
    assert info["splits"]["train"]["documents"] == 285
    # The tokenizer saw only training text.
    train = sources.Source([str(source)], val_fraction=0.05).train()
    assert dataset.read_json(tmp_path / "a/tokenizer.json") == tokenizer.train(train, 400)


@pytest.mark.parametrize(("args", "parts"), [
    (["--source", "{tmp}/none.jsonl"], ["matches no file"]),
    (["--source", "{tmp}/empty.jsonl"], ["no train document", "provide two or more"]),
    (["--source", "{tmp}/one.jsonl"], ["no train document", "provide two or more"]),
    (["--source", "{tmp}/bad.jsonl"], ["bad.jsonl line 2"]),
    (["--source", "{tmp}/two.jsonl", "--vocab-size", "32768"], ["too small", "--vocab-size 32768", "such as 265"]),
    (["--source", "{tmp}/two.jsonl", "--vocab-size", "65537"], ["65537", "65536"]),
    (["--source", "{tmp}/two.jsonl", "--tokenizer", "{tmp}/none.json"], ["none.json", "check the path"]),
    (["--source", "{tmp}/two.jsonl", "--tokenizer", "{tmp}/two.jsonl"], ["two.jsonl"]),
    (["--source", "{tmp}/two.jsonl", "--shard-tokens", "0"], ["--shard-tokens"]),
    (["--source", "{tmp}/two.jsonl", "--val-fraction", "0.9"], ["--val-fraction must be above 0 and at most 0.5"]),
    (["--source", "shards:{tmp}/*.bin"], ["--tokenizer"]),
])  # fmt: skip
def test_user_errors(tmp_path, args, parts, monkeypatch, capsys):
    for name, lines in {
        "empty": "",
        "one": '{"text": "a"}\n',
        "bad": '{"text": "a"}\n{"text": \n',
        "two": '{"text": "a"}\n{"text": "b"}\n',
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(lines)
    out = tmp_path / "out"
    arguments = [a.replace("{tmp}", str(tmp_path)) for a in args]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *arguments, "--out", str(out), "--workers", "1"])
    with pytest.raises(SystemExit) as e:
        dataset.run(pretrain.main)
    assert e.value.code.startswith("error: ") and "\n" not in e.value.code
    for part in parts:
        assert part in e.value.code
    assert not list(tmp_path.rglob("*.bin")) and not list(tmp_path.rglob("dataset.json"))
    # The directory is not spoiled for the right command.
    good = ["--source", str(tmp_path / "two.jsonl"), "--vocab-size", "265", "--out", str(out), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *good])
    pretrain.main()
    assert dataset.read_dataset(out)["splits"]["train"]["documents"] == 1
    assert "here 50% of the text" in capsys.readouterr().out


# --- hosted shards ----------------------------------------------------------------------------------------


def test_hosted_shards(tmp_path, corpus):
    encoding = tokenizer.load(corpus / "tokenizer.json")
    hosted = tmp_path / "hosted"
    hosted.mkdir()
    texts = ["gr\u00fc\u00dfe \u4f60\u597d", "the river", "house"]
    documents = [[441, *encoding.encode_ordinary(t)] for t in texts]
    write_shard(hosted / "fineweb_train_000001.bin", documents[0] + documents[1])
    write_shard(hosted / "fineweb_train_000002.bin", documents[2])
    write_shard(hosted / "fineweb_val_000000.bin", documents[1])
    out = tmp_path / "out"
    args = ["--source", f"shards:{hosted}", "--tokenizer", corpus / "tokenizer.json", "--out", out]
    result = run(*args)
    assert result.returncode == 0, result.stderr
    info = dataset.read_dataset(out)
    sizes = [len(t.encode()) for t in texts]
    total = {"tokens": sum(map(len, documents)), "documents": 3, "text_bytes": sum(sizes)}
    assert info["splits"]["train"] == total
    assert info["splits"]["val"] == {"tokens": len(documents[1]), "documents": 1, "text_bytes": sizes[1]}
    names = ["pretrain/train_000000.bin", "pretrain/train_000001.bin", "pretrain/val_000000.bin", "tokenizer.json"]
    assert sorted(info["files"]) == names
    assert dataset.read_shard(out / "pretrain/train_000001.bin").tolist() == documents[2]
    for name, entry in info["files"].items():
        assert dataset.sha256_file(out / name) == entry["sha256"]
    assert (hosted / "fineweb_train_000002.bin").exists()
    result = run(*args)
    assert result.returncode == 0 and "already complete" in result.stdout


def test_it_starts_without_the_modules_of_unix():
    """Windows has neither resource nor fcntl."""
    program = "import sys; sys.modules.update(resource=None, fcntl=None); import pretrain"
    result = subprocess.run([sys.executable, "-c", program], cwd=DATA, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_hosted_shards_are_told_apart_by_whole_words(tmp_path, capsys):
    """ "val" in "retrieval" makes no validation, nor does "train" in "constrained" make training."""
    names = ["retrieval_train_000000.bin", "Retrieval-Train-1.bin", "edu_val_0.bin", "constrained_000.bin"]
    names += ["train00002.bin", "evaluation.val.000.bin", "x_train_val_0.bin"]
    found = pretrain.sort_by_split([Path(name) for name in names], "x")
    assert [path.name for path in found["train"]] == [names[0], names[1], names[4]]
    assert [path.name for path in found["val"]] == [names[2], names[5]]
    skipped = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert skipped == ["skipped constrained_000.bin", "skipped x_train_val_0.bin"]
    with pytest.raises(SystemExit, match="none of the 2 files of x has the word 'val'"):
        pretrain.sort_by_split([Path("retrieval_train_0.bin"), Path("retrieval_1.bin")], "x")


def test_bad_hosted_shards(tmp_path, corpus, monkeypatch):
    hosted, out = tmp_path / "hosted", tmp_path / "out"
    hosted.mkdir()

    def error(source: str) -> str:
        argv = ["pretrain.py", "--source", source, "--tokenizer", str(corpus / "tokenizer.json"), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as e:
            pretrain.main()
        assert e.value.code.startswith("error: ") and not list(out.rglob("*.bin"))
        return e.value.code

    train = hosted / "x_train_000000.bin"
    write_shard(train, [441, 1, 2])
    assert "'val'" in error(f"shards:{hosted}")
    val = hosted / "x_val_000000.bin"
    write_shard(val, [441, 450])
    assert "token 450" in error(f"shards:{hosted}/*.bin")
    val.write_bytes(train.read_bytes()[:-1])
    assert "truncated" in error(f"shards:{hosted}/*.bin")
    dataset.write_shard(val, np.array([441, 1], dtype=np.uint16), 441, 450, "ab" * 32)
    assert "another tokenizer" in error(f"shards:{hosted}/*.bin")
    # Of another tokenizer, which nothing but its BOS or its size tells.
    tokens = np.array([441, 1], dtype=np.uint16)
    for bos, entries in ((440, 450), (441, 449), (None, 449)):
        dataset.write_shard(val, tokens, bos, entries)
        assert f"another vocabulary (BOS {bos}, {entries} entries)" in error(f"shards:{hosted}/*.bin")
    write_shard(val, [1, 2, 3])
    assert f"{val} lacks the tokenizer's BOS 441" in error(f"shards:{hosted}/*.bin")
    assert "matches no file" in error(f"shards:{hosted}/*.dat")
