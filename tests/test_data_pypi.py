"""The corpus of pinned wheels, on tiny wheels made here: rules, near duplicates, pip's errors, the lock."""

import functools
import hashlib
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import dataset
import pretrain
import pypi
import pytest

SYLLABLES = "ka lo mi ren tus vel dor".split(), "ba che fi nor sul wax zet".split()
WORDS = list(map("".join, itertools.product(*SYLLABLES)))
BLOCKS = 30


def prose(seed: int, lines: int = 40) -> str:
    """Lines of words that look like a person's code to every rule."""
    rng = random.Random(seed)
    return "".join(f"{' '.join(rng.choices(WORDS, k=8))}\n" for _ in range(lines))


def make_wheel(folder: Path, name: str, members: dict[str, str | bytes], version: str = "1.0") -> Path:
    """A wheel that pip accepts, with the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    members = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
        f"{info}/licence.txt": prose(99),
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in members.items():
            wheel.writestr(zipfile.ZipInfo(member), content, zipfile.ZIP_DEFLATED)
    return path


def entry(path: Path, part: str) -> dict:
    name, version, *_ = path.name.split("-")
    sha256 = dataset.sha256_file(path)
    size = path.stat().st_size
    return {
        "name": name, "version": version, "part": part, "licence": "MIT", "file": path.name, "size": size,
        "sha256": sha256,
    }  # fmt: skip


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Four wheels in index/, a lock that names them, and a pip that knows that folder alone."""
    index = tmp_path / "index"
    copied = prose(1)
    packages = [
        entry(make_wheel(index, "held", {"held/a.py": copied, "held/b.md": prose(2)}), "val"),
        entry(make_wheel(index, "one", {"one/a.py": copied, "one/b.py": prose(3), "one/c.rst": prose(4)}), "p34"),
        entry(make_wheel(index, "two", {f"two/{i}.py": prose(10 + i) for i in range(20)}), "p34"),
        entry(make_wheel(index, "more", {f"more/{i}.py": prose(40 + i) for i in range(20)}), "p100"),
    ]
    sets = {"p34": {"parts": ["val", "p34"]}, "p100": {"parts": ["val", "p34", "p100"]}}
    lock = {"format": pypi.LOCK_FORMAT, "packages": packages, "sets": sets}
    (tmp_path / "lock.json").write_text(pypi.format_lock(lock))
    monkeypatch.setattr(pypi, "LOCK", tmp_path / "lock.json")
    monkeypatch.setenv("DECODERSTACK_WHEELS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return tmp_path


@pytest.fixture
def downloaded(world):
    """The same with the wheels in place already."""
    shutil.copytree(world / "index", world / "wheels")
    return world


@pytest.fixture
def locked(downloaded):
    """The same with a lock that states the documents of p34 and the dataset "p34-1", which is built."""
    pypi.write_lock("p34", None, 1)
    pypi.write_lock("p34", build(downloaded, "p34", 1), 1)
    return downloaded


def call(main: Callable, *argv: object) -> None:
    """Runs a command in this process, where the lock is the test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(map(str, argv)))
        patch.setattr(pretrain.tokenizer, "VOCAB_SIZE", 320)
        main()


def build(world: Path, name: str, workers: int, *more: object) -> Path:
    out = world / f"{name}-{workers}"
    call(pretrain.main, "pretrain.py", "--source", f"pypi:{name}", "--out", out, "--workers", workers, *more)
    return out


def chunks(*texts: str) -> list[pypi.Chunk]:
    result = []
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        result.append(pypi.Chunk(text.encode(), digest, pypi.sketch(pypi.shingles(text.encode()))))
    return result


TABLE = "".join(f'    "{a}{b}": "{b}{a}",\n' for a, b in itertools.combinations(WORDS[:12], 2))
DROPPED = {
    "x/_vendor/y/a.py": (prose(5), "files in vendored copies and translations"),
    "x/Third_Party/a.py": (prose(5), "files in vendored copies and translations"),
    "x/locale/de/notes.txt": (prose(5), "files in vendored copies and translations"),
    "x/LICENSE-MIT.txt": (prose(5), "files by name"),
    "x/requirements-dev.txt": (prose(5), "files by name"),
    "x/service_pb2.py": (prose(5), "files by name"),
    "x/large.py": (prose(5) * 400, "files over 400,000 bytes"),
    "x/latin.py": (prose(5).encode() + b"\xe9\n", "files that are not UTF-8 text"),
    "x/zero.txt": (prose(5) + "\0", "files that are not UTF-8 text"),
    "x/made.py": ("# This file was generated by tools/make.py\n" + prose(5), "generated files"),
    "x/made2.py": ("# Do NOT edit this file manually\n" + prose(5), "generated files"),
    "x/made3.py": (prose(5) + "\n# This file is auto-generated.\n", "generated files"),
    "x/short.py": ("import this\n", "short chunks"),
    "x/table.py": (TABLE, "chunks of data"),
    "x/numbers.txt": ("".join(f"row {i} {i * i} {i**3}\n" for i in range(100, 200)), "chunks of data"),
    "x/line.py": (prose(5) + f"blob = {'abcd' * 300}\n", "chunks of data"),
    "x/signs.txt": ("x = ((a)) + [[b]] - {{c}}; !!\n" * 12, "chunks of data"),
    "x/same.py": (prose(5) + "call_it_again(with_this)\n" * 60, "chunks of data"),
}


LICENSED = "#!/usr/bin/env python\n# Copyright (c) The Authors.\n#\n\n# Licensed under a LICENCE.\n\n"


@pytest.mark.parametrize(("top", "stays"), (
    (LICENSED, ""), ("# See LICENSE for details.\n", ""), ("\n# (C) COPYRIGHT 2020 A. Person\n", ""),
    ("# A module that counts.\n", "# A module that counts.\n"), ('"""Copyright me."""\n', '"""Copyright me."""\n'),
    ("x = 1  # licence\n", "x = 1  # licence\n"), ("import os\n# Copyright me\n", "import os\n# Copyright me\n"),
))  # fmt: skip
def test_licences_at_the_top_go(tmp_path, top, stays):
    """Comments up to the first other line, if they speak of a licence; everything else stays."""
    wheel = make_wheel(tmp_path, "x", {"x/a.py": top + prose(1), "x/b.py": prose(2)})
    found, dropped = pypi.read_wheel(wheel)
    assert sorted(chunk.text.decode() for chunk in found) == sorted([stays + prose(1), prose(2)])
    assert dropped["licences at the top of files"] == (not stays)


@pytest.mark.parametrize("name", DROPPED)
def test_each_rule_drops_its_file_and_nothing_else(tmp_path, name):
    text, reason = DROPPED[name]
    path = make_wheel(tmp_path, "x", {name: text, "x/good.py": prose(6)})
    kept, dropped = pypi.read_wheel(path)
    assert [chunk.text.decode() for chunk in kept] == [prose(6)]
    assert dropped == {reason: 1}


def test_text_that_a_person_wrote_stays(tmp_path):
    """Words of the rules inside ordinary code and prose, endings that are not read."""
    files = {
        "x/tests/test_generated.py": '"""Files are generated from the template."""\n' + prose(1),
        "x/data/notes.md": "# Notes\n\n" + "".join(f"- {line}\n" for line in prose(2).splitlines()),
        "x/stub.pyi": prose(3),
        "x/manual.RST": prose(4),
        "x/linear_constraints.py": prose(9),
        "x/module.c": prose(7),
        "x/page.html": prose(8),
    }
    kept, dropped = pypi.read_wheel(make_wheel(tmp_path, "x", files))
    assert sorted(chunk.text.decode() for chunk in kept) == sorted(list(files.values())[:5])
    assert not dropped


def test_text_is_normalised_and_cut_into_chunks(tmp_path):
    body = "".join(f"def f{i}(x):\n    return x  # {' '.join(WORDS[i % 40 : i % 40 + 8])}\n\n\n" for i in range(400))
    mixed = body.replace("\n", "\r\n", 700).replace("):\n", "):\r")
    data = b"\xef\xbb\xbf" + mixed.encode()
    kept, dropped = pypi.read_wheel(make_wheel(tmp_path, "x", {"x/a.py": data}))
    texts = [chunk.text.decode() for chunk in kept]
    assert "".join(texts) == body and not dropped
    assert len(texts) > 4 and max(map(len, texts)) <= pypi.MAX_CHUNK
    assert all(text.startswith("def ") for text in texts)


def test_the_fast_ways_find_what_the_patterns_say():
    """Words without the pattern in ASCII text, and files that a program wrote, whose pattern few texts get to see."""
    rng = random.Random(3)
    pieces = ["x_1", "caf\u00e9", " ", "\n", "\t", "\x0b", "\x1c", "\x7f", "(", "-", "42", "\u4f60", "code ", "\u212a",
              "NOT edit", "do not", "Do ", "@generated", "Auto-generated", "generated", " by", "# "]  # fmt: skip
    generated = 0
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        for data in (text.encode(), text.encode("ascii", "ignore")):
            assert pypi.split_words(data) == pypi.WORD.findall(data)
        assert pypi.is_generated(text) == bool(pypi.GENERATED.search(text))
        generated += pypi.is_generated(text)
    assert 100 < generated < 2900
    every = bytes(range(128))
    assert pypi.split_words(every) == pypi.WORD.findall(every)


@functools.cache
def five_words(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def jaccard(a: str, b: str) -> float:
    """By definition: the shared part of two sets of runs of five words."""
    both = len(five_words(a) & five_words(b))
    return both / (len(five_words(a)) + len(five_words(b)) - both)


def edited(text: str, share: float, seed: int) -> str:
    """The text with a share of its lines replaced."""
    lines = text.splitlines(keepends=True)
    for i in random.Random(seed).sample(range(len(lines)), round(share * len(lines))):
        lines[i] = prose(1000 * seed + i, 1)
    return "".join(lines)


def test_near_duplicates_are_those_of_a_brute_force_comparison():
    texts = []
    for i in range(BLOCKS):
        original = prose(i)
        texts += [original] + [edited(original, share, 7 * i + 1) for share in (0.02, 0.1, 0.3, 0.8)]
    dropped = Counter()
    kept = [text.decode() for text in pypi.drop_duplicates([chunks(*texts)], dropped)[0]]
    gone = set(texts) - set(kept)
    assert dropped["near duplicates"] == len(gone) and BLOCKS <= len(gone) <= 4 * BLOCKS

    # The estimate from 72 values is within 0.18 (three standard deviations) of the true similarity.
    for a, b in itertools.combinations(kept, 2):
        assert jaccard(a, b) < 0.68
    for text in gone:
        assert max(jaccard(text, other) for other in kept) > 0.32
    similar = sum(jaccard(a, b) > 0.68 for a, b in itertools.combinations(texts, 2))
    assert similar >= BLOCKS, "the test holds pairs that must be found"


def test_hashes_are_the_same_on_every_machine():
    """Literal values: another Python, numpy or processor must give them too."""
    runs = pypi.shingles("def caf\u00e9(x_1): return x_1 + 42 # a\u2028b".encode())
    assert hashlib.sha256(runs.astype("<u8").tobytes()).hexdigest()[:16] == "b35a40a8899d8cad"
    assert hashlib.sha256(pypi.sketch(runs).astype("<u4").tobytes()).hexdigest()[:16] == "3e8ccfcf74c137b7"
    assert len(pypi.shingles(b"one two")) == len(pypi.shingles(b"")) == 1


def test_validation_goes_first_and_the_first_hash_stays():
    a, b, c, d = prose(1), prose(2), prose(3), prose(4)
    groups = [chunks(a, b), chunks(edited(a, 0.02, 1), b, c, edited(d, 0.02, 2), d)]
    val, train = pypi.drop_duplicates(groups, Counter())
    assert sorted(val) == sorted([a.encode(), b.encode()])
    assert len(train) == 2 and c.encode() in train
    pair = chunks(d, edited(d, 0.02, 2))
    assert min(pair, key=lambda chunk: chunk.digest).text in train
    assert train == sorted(train, key=lambda text: hashlib.blake2b(text, digest_size=16).digest())


def test_wheels_are_downloaded_once(world, monkeypatch, capsys):
    packages = pypi.set_packages(dataset.read_json(pypi.LOCK), "p34")
    folder = world / "wheels"
    paths = pypi.fetch(packages)
    assert [dataset.sha256_file(path) for path in paths] == [package["sha256"] for package in packages]
    assert sorted(p.name for p in folder.iterdir()) == sorted(p["file"] for p in packages)

    # A damaged one is fetched again, and it alone.
    paths[0].write_bytes(b"damaged")
    assert "downloading 3 wheels" in capsys.readouterr().out
    pypi.fetch(packages)
    assert "downloading 1 wheels" in capsys.readouterr().out
    assert dataset.sha256_file(paths[0]) == packages[0]["sha256"]

    monkeypatch.setattr(pypi, "download", lambda *args: pytest.fail("downloaded again"))
    assert pypi.fetch(packages) == paths


def test_what_was_downloaded_stays_when_the_index_lacks_a_wheel(world):
    (world / "index/two-1.0-py3-none-any.whl").unlink()
    packages = pypi.set_packages(dataset.read_json(pypi.LOCK), "p34")
    with pytest.raises(SystemExit, match=r"pip cannot download two-1.0-py3-none-any.whl \(No matching.* kept"):
        pypi.fetch(packages)
    names = sorted(path.name for path in (world / "wheels").iterdir())
    assert names == ["held-1.0-py3-none-any.whl", "one-1.0-py3-none-any.whl"]


def test_another_file_under_the_name_is_refused(world):
    make_wheel(world / "index", "two", {"two/evil.py": prose(77)})
    packages = pypi.set_packages(dataset.read_json(pypi.LOCK), "p34")
    with pytest.raises(SystemExit, match=r"pip cannot download two-1.0-py3-none-any.whl \(.* DO NOT MATCH"):
        pypi.fetch(packages)
    assert not (world / "wheels/two-1.0-py3-none-any.whl").exists()


def test_the_dataset_does_not_depend_on_the_workers(locked, capsys):
    two = build(locked, "p34", 2)
    info = dataset.read_dataset(two)
    assert info["splits"]["val"]["documents"] == 2
    assert info["splits"]["train"]["documents"] == 22, "one of 23 is in validation"
    assert info["sources"][:2] == ["pypi:p34", "held-1.0-py3-none-any.whl"]
    assert "bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_reading_process_outlives_the_build(tmp_path, number):
    wheel = make_wheel(tmp_path, "x", {"x/a.py": prose(1, 4000)})
    code = f"import pypi\nfor _ in pypi.read_all(['{wheel}'] * 5000, 2): print('read', flush=True)"
    pipe = subprocess.PIPE
    build = subprocess.Popen([sys.executable, "-c", code], cwd=pypi.LOCK.parent, stdout=pipe, stderr=subprocess.DEVNULL)
    assert build.stdout.readline() == b"read\n"
    build.send_signal(number)
    build.communicate(timeout=60)  # until all have closed its output
    assert build.returncode == -number


@pytest.mark.parametrize(("path", "words"), [
    (("documents", "train", "sha256"), "match the lock, but their documents differ"),
    (("dataset", "tokenizer"), "has the documents of pypi:p34, but its tokenizer differs"),
    (("dataset", "shards", "pretrain/val_000000.bin"), "the tokenizer of pypi:p34, but pretrain/val_000000.bin"),
])  # fmt: skip
def test_the_first_layer_that_differs_is_named(locked, path, words):
    """By the command that built the dataset."""
    lock = dataset.read_json(pypi.LOCK)
    inner = lock["sets"]["p34"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "0" * 64
    pypi.LOCK.write_text(json.dumps(lock))
    with pytest.raises(SystemExit, match=words):
        build(locked, "p34", 1)


def test_sets_share_validation_and_tokenizer(downloaded):
    small = dataset.read_dataset(build(downloaded, "p34", 1))
    large = dataset.read_dataset(build(downloaded, "p100", 1))
    assert large["tokenizer_sha256"] == small["tokenizer_sha256"]
    alone = downloaded / "alone.json"
    call(pretrain.tokenizer.main, "tokenizer.py", "train", "--source", "pypi:p100", "--out", alone)
    assert dataset.sha256_file(alone) == small["tokenizer_sha256"]
    assert large["files"]["pretrain/val_000000.bin"] == small["files"]["pretrain/val_000000.bin"]
    assert large["splits"]["train"]["documents"] == 42
    assert build(downloaded, "p100", 1) == downloaded / "p100-1", "a complete one is left alone"


@pytest.mark.parametrize("flag, value", [("--max-documents", 5), ("--shard-tokens", 3000)])
def test_a_dataset_made_with_other_flags_is_not_compared(locked, capsys, flag, value):
    build(locked, "p34", 2, flag, value)
    words = f"not compared with the lock, which is for a dataset built without {flag}\n"
    assert words in capsys.readouterr().out


def test_the_committed_lock():
    """Each set holds the one before; all are scored on the same text with the same tokenizer."""
    lock = dataset.read_json(pypi.LOCK)
    assert pypi.LOCK.read_text() == pypi.format_lock(lock)
    assert {package["licence"] for package in lock["packages"]} <= {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT"}
    names = [package["name"] for package in lock["packages"]]
    assert len(set(names)) == len(names) >= 60
    assert all(package["file"].endswith("py3-none-any.whl") for package in lock["packages"])
    assert sum(package["size"] for package in lock["packages"]) < 700e6, "bytes to download"
    sets = list(lock["sets"].values())
    for entry, tokens in zip(sets, (34_013_184, 100_000_000, 340_000_000), strict=True):
        assert entry["dataset"]["tokens"]["train"] >= tokens
        assert entry["documents"]["val"] == sets[0]["documents"]["val"]
        assert entry["dataset"]["tokenizer"] == sets[0]["dataset"]["tokenizer"]
        val = "pretrain/val_000000.bin"
        assert entry["dataset"]["shards"][val] == sets[0]["dataset"]["shards"][val]
    for smaller, larger in itertools.pairwise(sets):
        assert smaller["parts"] == larger["parts"][:-1]


def test_the_tracks_are_of_the_locked_datasets():
    """A new lock makes other datasets, and a track is frozen: it would need new names."""
    datasets = json.loads((pypi.LOCK.parents[1] / "records/tracks.json").read_text())["datasets"]
    for name, entry in dataset.read_json(pypi.LOCK)["sets"].items():
        track = datasets[name]
        assert track["fingerprint"] == entry["dataset"]["fingerprint"]
        assert track["train_tokens"] == entry["dataset"]["tokens"]["train"]
        assert track["made_by"] == f"python data/pretrain.py --source pypi:{name} --out data/shards/{name}"
        assert 0.99 < track["scored"]["bytes"] / entry["documents"]["val"]["bytes"] <= 1, "documents are cut at 2,048"
        assert 0.99 < track["scored"]["targets"] / entry["dataset"]["tokens"]["val"] <= 1
