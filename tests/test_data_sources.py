"""Every form of --source, on small files of the published layouts."""

import argparse
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pypi
import pytest
import sources
import stdlib_text
import zstandard

from commands import sentence
from hub_stub import COMMIT, git_blob_id, names_of, start_hub
from processes import python

DATA = Path(__file__).parents[1] / "data"

# Line and paragraph separators that str.splitlines would take for line ends, characters of 2 to 4 bytes, and
# a special token's spelling.
TEXTS = [
    "plain",
    "line\u2028sep \u2029 \x85 \x0b\x1c end",
    "gr\u00fc\u00dfe \u4f60\u597d \U0001f600",
    "a\nb\r\nc",
    "<|bos|>",
]


def write(path: Path, texts: list[str], field: str = "text") -> Path:
    lines = "".join(json.dumps({field: t, "n": 1}, ensure_ascii=False) + "\n" for t in texts).encode()
    name = path.name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif name.endswith(".zst"):
        # Three frames: cut at the end of a line, and inside the next one.
        end = lines.index(b"\n") + 1
        frames = [lines[:end], lines[end : end + 3], lines[end + 3 :]]
        path.write_bytes(b"".join(map(zstandard.compress, frames)))
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), field: texts}), path, row_group_size=2)
    elif name.endswith(".Md"):
        path.write_bytes("\n<|endoftext|>\n".join(texts).encode())
    else:
        path.write_bytes(lines)
    return path


def read(spec: object, val: object = "stdlib", **options) -> list[str]:
    specs = [str(each) for each in (spec if isinstance(spec, list) else [spec])]
    return list(sources.Source(specs, str(val) if val else None, **options).train())


def expect_error(action, *parts: object) -> None:
    message = sentence(action)
    assert [part for part in map(str, parts) if part not in message] == [], message


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_forms_give_the_same_documents(tmp_path, ending):
    path = write(tmp_path / f"x.{ending}", TEXTS)
    assert read(path) == TEXTS
    assert read(write(tmp_path / f"y.{ending}", TEXTS, "body"), text_field="body") == TEXTS


def test_several_sources_after_one_flag():
    """As a shell writes a pattern that is not quoted."""
    parser = argparse.ArgumentParser()
    sources.add_source_flags(parser)
    assert parser.parse_args(["--source", "a", "b", "--source", "c"]).source == ["a", "b", "c"]


def test_text(tmp_path, capsys):
    path = write(tmp_path / "x.Md", TEXTS[:4])
    expected = [*(t + "\n" for t in TEXTS[:3]), "a\nb\nc\n"]
    assert read(path) == expected
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r"))
    assert read(path) == expected, "without byte order mark and \\r"
    paragraph = "word " * 100 + "\n"
    path.write_text((paragraph * 5 + "\n") * 30, encoding="utf-8")
    documents = read(path)
    assert "".join(documents) == path.read_text()
    assert all(len(d) <= 12_000 and d.endswith("\n\n") for d in documents) and len(documents) > 5
    path.write_text("".join([paragraph * 15, "\n", paragraph * 7, "x" * 9000 + "\n"]), encoding="utf-8")
    documents = read(path)  # what stays after the cut at the blank line is too long with the next line
    assert "".join(documents) == path.read_text() and len(documents) == 3 and max(map(len, documents)) <= 12_000
    path.write_bytes(b"caf\xe9\n")  # not UTF-8
    source = sources.Source([str(path)], "stdlib")
    assert list(source.train()) == list(source.train()) == ["caf\ufffd\n"]
    assert capsys.readouterr().err.count("bytes that are not UTF-8") == 1, "one warning for two passes"


def test_show_refuses_a_negative_number(tmp_path):
    done = python(DATA / "sources.py", "--source", write(tmp_path / "x.jsonl", TEXTS), "--show", "-1")
    assert done.returncode == 1 and done.stderr == "error: --show must be at least 0, found -1\n"


def test_lists_globs_and_folders(tmp_path, capsys):
    a, b = write(tmp_path / "a.jsonl", ["1", "2"]), write(tmp_path / "b.parquet", ["3"])
    for name in ("notes.docx", "UPPER.DOCX", "x.png"):
        (tmp_path / name).write_text("not data")
    assert read(f"{b},{a}") == read([b, a]) == ["3", "1", "2"]
    assert read(tmp_path) == read(tmp_path / "*") == ["1", "2", "3"]
    assert capsys.readouterr().err == "skipped files of other kinds: 2 .docx, 1 .png\n" * 2
    comma = write(tmp_path / "d,e.jsonl", ["4"])
    assert read(comma) == ["4"] and read([comma, a]) == ["4", "1", "2"]
    comma.unlink()
    expect_error(lambda: read([a, "stdlib"]), "stdlib cannot be combined with other sources")
    assert read(tmp_path / "*.jsonl") == ["1", "2"]
    expect_error(lambda: read(tmp_path / "*.gz"), "matches no file", "*.gz")
    expect_error(lambda: read(tmp_path / "notes.docx"), "unknown extension", "notes.docx")
    expect_error(lambda: read(f"{a},{a}"), "twice")
    expect_error(lambda: read(f"{a},{tmp_path}/../{tmp_path.name}/a.jsonl"), "twice")
    copy = shutil.copy(a, tmp_path / "copy.jsonl")
    for other, name in ((a, "a.jsonl"), (copy, "copy.jsonl")):
        words = f"{name} and a.jsonl are the same file; keep it out of --source or --val-source"
        expect_error(lambda other=other: read(a, other), words)
    assert read(f"{a},{copy}") == ["1", "2", "1", "2"], "a copy in one source is read"
    expect_error(lambda: read("no-such-source"), "no-such-source", "--help")


def test_folders_are_read_whole(tmp_path):
    """With subfolders, without hidden files and folders; a link to nothing is an error in a folder and by name."""
    for name, text in (("b", "1"), ("a/c", "2"), ("a/[1]", "3"), (".hidden", "-"), ("._b", "-"), (".git/d", "-")):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write(path, [text])
    assert read(tmp_path) == ["3", "2", "1"] and read(tmp_path / "**/*.jsonl") == ["3", "2", "1"]
    assert read(tmp_path / "a/[1].jsonl") == ["3"] and read(tmp_path / ".hidden.jsonl") == ["-"]
    link = tmp_path / "a/link.jsonl"
    link.symlink_to(tmp_path / "gone")
    for spec in (tmp_path, link, tmp_path / "a/*"):
        expect_error(lambda spec=spec: read(spec), link, "a link to a file that does not exist")


OPEN_FILES = """
import resource, sys
import sources
soft, hard, spec = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(sum(1 for text in sources.Source([spec], "stdlib", interleave=True).train()))
"""


def test_more_files_than_may_be_open(tmp_path):
    for i in range(150):
        write(tmp_path / f"{i}.jsonl", ["a", "b"])
    run = lambda hard: python("-c", OPEN_FILES, 100, hard, tmp_path, env={**os.environ, "PYTHONPATH": str(DATA)})
    assert run(300).stdout == "300\n"
    assert "opens 150 files at once, the system allows 200; raise ulimit -n" in run(200).stderr


def test_a_console_that_lacks_letters(tmp_path):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = python(DATA / "sources.py", "--source", write(tmp_path / "x.jsonl", TEXTS[2:4]), "--split", "val", env=env)
    assert done.returncode == 0 and "gr??e ?? ?" in done.stdout, done.stderr


def test_a_wide_zstd_window_opens(tmp_path):
    """--long=27, which large published corpora use."""
    texts = [f"{i} " + "x" * 1000 for i in range(2000)]
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "x.jsonl.zst").write_bytes(compressor.compress(lines) + compressor.flush())
    assert read(tmp_path / "x.jsonl.zst") == texts


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_a_file_of_the_wrong_kind(tmp_path, ending):
    """A truncated file, an empty one, zeros, and bytes of another format, under every ending."""
    path = write(tmp_path / f"x.{ending}", [f"{i} {hash(str(i))}" for i in range(3000)])
    contents = [path.read_bytes()[:-30], bytes(5000), b"PK\x03\x04" * 99, b"PAR1" + b"\xff" * 99 + b"PAR1"]
    for raw in contents + [b""] * (ending != "jsonl"):
        path.write_bytes(raw)
        expect_error(lambda: read(path), path)


@pytest.mark.parametrize(("line", "parts"), [
    (b"[" * 100_000, ["line 3", "not valid JSON"]),
    (b'{"text": "\xff"}', ["line 3", "not valid JSON"]),
    (b'{"text": "cut', ["line 3", "not valid JSON"]),
    (b'{"body": "x"}', ["line 3", "'text'", "body", "--text-field"]),
    (b'{"text": 5}', ["line 3", "'text'"]),
    (b"[1]", ["line 3", "list"]),
])  # fmt: skip
def test_malformed_lines_are_named(tmp_path, line, parts):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a\xe2\x80\xa8b"}\n\n' + line + b'\n{"text": "d"}\n')
    expect_error(lambda: read(path), path, *parts, "--skip-bad")
    assert read(path, skip_bad=True) == ["a\u2028b", "d"]


def test_parquet_columns(tmp_path):
    path = write(tmp_path / "x.parquet", ["a"])
    expect_error(lambda: read(path, text_field="body"), path, "body", "text", "--text-field")
    expect_error(lambda: read(path, text_field="n"), path, "no string field 'n'", "--text-field")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    assert read(path) == ["a", "b"]


def test_empty_and_unencodable_documents(tmp_path):
    """Null is an empty document, in JSON lines as in parquet."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": ""}\n{"text": "ok"}\n{"text": null}\n{"text": " \\n"}\n{"text": "a\\ud800b"}\n')
    source = sources.Source([str(path)], "stdlib")
    for _ in range(2):
        assert list(source.train()) == ["ok", "a?b"]
        assert sum(source.skipped.values()) == 3, "of the latest pass, not of all"


def test_split_is_a_fixed_partition(tmp_path):
    texts = [f"document {i}" for i in range(1000)]
    source = sources.Source([str(write(tmp_path / "x.jsonl", texts))], val_fraction=0.02)
    train, val = list(source.train()), list(source.val())
    assert len(val) == 20 and sorted(train + val) == sorted(texts) and not set(train) & set(val)
    positions = [texts.index(t) % 50 for t in val]
    assert len(set(positions)) > 5  # spread, not one fixed position
    assert list(source.val()) == val
    two = sources.Source([str(write(tmp_path / "y.jsonl", ["a", "b"]))])
    assert (list(two.train()), list(two.val())) == (["b"], ["a"])
    for count, held_out in ((100, 5), (1000, 10)):  # 0.5 and 5 MB
        path = write(tmp_path / f"{count}.jsonl", [f"{i}" + "x" * 5000 for i in range(count)])
        assert len(list(sources.Source([str(path)]).val())) == held_out


def test_limits(tmp_path):
    path = write(tmp_path / "x.jsonl", ["aaaa", "\u00fc\u00fc", "c", "d"])
    assert read(path, max_documents=2) == ["aaaa", "\u00fc\u00fc"]
    assert read(path, max_bytes=8) == ["aaaa", "\u00fc\u00fc"]
    assert read(path, max_bytes=7) == ["aaaa"]
    val = sources.Source(["stdlib"], str(path), val_documents=3).val()
    assert list(val) == ["aaaa", "\u00fc\u00fc", "c"]
    # Both splits come from the first documents only.
    both = sources.Source([str(path)], max_documents=3)
    assert sorted([*both.train(), *both.val()]) == ["aaaa", "c", "\u00fc\u00fc"]


def test_interleave_reads_files_side_by_side(tmp_path):
    """By hand: of 40 and 20 bytes, the file of which the smaller part was read gives the next document."""
    long = write(tmp_path / "a.jsonl.zst", [f"a{i}" * 5 for i in range(4)])
    short = write(tmp_path / "b.parquet", ["b0" * 4, "b1" * 6])
    none = write(tmp_path / "c.jsonl", ["", " "])
    spec = f"{long},{short},{none}"
    # Parts of a and b before each document: 0 0, 1/4 0, 1/4 8/20, 2/4 8/20, 2/4 1, 3/4 1.
    order = ["a0" * 5, "b0" * 4, "a1" * 5, "b1" * 6, "a2" * 5, "a3" * 5]
    assert read(spec, interleave=True) == order
    assert read(spec) == [f"a{i}" * 5 for i in range(4)] + ["b0" * 4, "b1" * 6]
    assert read(spec, interleave=True, max_documents=3) == order[:3]
    # Without validation text of its own, it is held out of the same order.
    source = sources.Source([spec], val_fraction=0.34, interleave=True)
    assert sorted([*source.train(), *source.val()]) == sorted(order)
    assert next(source.val()) == order[0]
    expect_error(lambda: sources.Source(["stdlib"], interleave=True), "--interleave is for local files")


def test_inputs_notice_a_changed_file(tmp_path):
    path = write(tmp_path / "x.jsonl", ["abc"])
    before = sources.Source([str(path)]).inputs
    assert before == sources.Source([str(path)]).inputs
    path.write_bytes(path.read_bytes().replace(b"abc", b"abd"))
    assert before != sources.Source([str(path)]).inputs


def test_stdlib():
    names = stdlib_text.files()
    assert {"ast.py", "json/decoder.py", "email/message.py"} <= set(names) and names == sorted(names)
    assert not [n for n in names if "/test" in n or "site-packages" in n or n.startswith("idlelib")]
    source = sources.Source(["stdlib"])
    train, val = list(source.train()), list(source.val())
    assert train == list(sources.Source(["stdlib"], "stdlib").train()), "the same again, and it keeps its parts apart"
    assert sum(map(len, train)) > 4e6 and 0.01 < sum(map(len, val)) / sum(map(len, train)) < 0.12
    assert not set(train) & set(val)
    long = [d for d in train + val if len(d) > 6000]
    assert all("\n" not in d.rstrip("\n") for d in long)  # only single lines exceed the limit
    assert train != sorted(train)
    # Whole files are held out.
    files = [stdlib_text.root() / name for name in names if stdlib_text.is_val_file(name)]
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    assert all(chunk in text for chunk in val)


def plain_cuts(text: str, limit: int) -> list[str]:
    """Chunks line by line: how good each place for a cut is, in the words of cut_chunks."""

    def quality(i: int) -> int:
        if re.match("def |class |async def |@", lines[i]) and not lines[i - 1].startswith("@"):
            return 3
        if not re.match(r"[ \t\r\n)\]}#\"']|else|elif|except|finally", lines[i]):
            return 2
        return int(lines[i - 1].isspace())

    lines = re.findall("[^\n]*\n|[^\n]+", text)
    chunks = []
    while lines:
        fits = 1
        while fits < len(lines) and len("".join(lines[: fits + 1])) <= limit:
            fits += 1
        cut = fits
        if fits < len(lines):
            cut = max(range(1, fits + 1), key=lambda i: (quality(i), i))
        chunks.append("".join(lines[:cut]))
        lines = lines[cut:]
    return [chunk for chunk in chunks if chunk.strip()]


def test_chunks_are_those_of_a_plain_search():
    rng = random.Random(8)
    pieces = ["def f():\n", "@cache\n", "class A:\n", "    x = 1\n", "\n", "  \n", "\x0b\n", "else:\n", "import os\n",
              ")\n", "y" * 30 + "\n", "# z\n", "except E:\n", "\u2028 a\n", "async def g():\n"]  # fmt: skip
    for _ in range(1500):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 30))) + rng.choice(["", "end", " "])
        limit = rng.randint(1, 120)
        assert pypi.cut_chunks(text, limit) == plain_cuts(text, limit)
    # By hand: before a decorator, not between it and its function.
    texts = ["import os\n\n\n", "@cache\ndef f():\n    return 1\n\n\n", "@cache\ndef g():\n    return 2\n"]
    assert pypi.cut_chunks("".join(texts), 40) == texts


HUB_PROGRAM = """
import json, sys
import sources
spec, val, limit = json.loads(sys.argv[1])
source = sources.Source([spec], val, max_files=limit)
print(json.dumps([list(source.train()), list(source.val()), source.inputs]))
"""


def test_hub_sources(tmp_path):
    """In processes of their own, as huggingface_hub reads HF_ENDPOINT when it is imported."""
    files = {"README.md": b"hello", "other/x.jsonl": b'{"text": "json"}\n'}
    for i in range(7):  # more than are fetched ahead
        parquet = write(tmp_path / "x.parquet", [f"{i} a", f"{i} \u2028"])
        files[f"shard_{i:05d}.parquet"] = parquet.read_bytes()
    repo = "karpathy/climbmix-400b-shuffle"
    all_texts = [[f"{i} a", f"{i} \u2028"] for i in range(7)]
    spec = f"hf:{repo}/other/*.jsonl"
    with start_hub({repo: files}) as server:
        env = {**os.environ, **names_of(server, tmp_path)}

        def program(*arguments: object) -> subprocess.CompletedProcess:
            return python("-c", HUB_PROGRAM, json.dumps(arguments), env={**env, "PYTHONPATH": str(DATA)})

        good = [
            (("climbmix", None, 40), [sum(all_texts[:6], []), all_texts[6]]),
            (("climbmix", None, 1), [all_texts[0], all_texts[6]]),
            ((spec, "climbmix", 40), [["json"], all_texts[6]]),
        ]
        for arguments, expected in good:
            result = program(*arguments)
            assert result.returncode == 0, result.stderr
            *texts, inputs = json.loads(result.stdout)
            assert texts == expected
            for name, size, digest in (entry[-3:] for entry in inputs):
                data = files[name.removeprefix(f"{repo}/")]
                assert size == len(data) and digest in (hashlib.sha256(data).hexdigest(), git_blob_id(data))
        gets = [r[1] for r in server.requests if r[0] == "GET" and "/resolve/" in r[1]]
        assert len(gets) == len(set(gets)) == 8  # each file once, then from the cache
        assert all(f"/resolve/{COMMIT}/" in path for path in gets), "all of one commit"
        bad = [
            ((spec, None, 40), "--val-source"),
            ((f"hf:{repo}/*.gz", None, 40), "matches '*.gz'"),
            (("hf:only-a-name", None, 40), "hf:OWNER/NAME/GLOB"),
            (("hf:no/such/*.parquet", None, 40), "Repository Not Found"),
            (("climbmix", f"hf:{repo}/shard_00000.parquet", 40), "shard_00000.parquet are the same file"),
            ((str(tmp_path / "x.parquet"), "climbmix", 40), "and x.parquet are the same file"),
        ]
        for arguments, part in bad:
            result = program(*arguments)
            assert result.returncode == 1 and part in result.stderr, result.stderr
            assert result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_refused(tmp_path, encoding, capsys):
    """With a byte order mark and without one. One error names all such files, --skip-bad leaves them out."""
    raw = '{"text": "\u4f60\u597d, a text"}\n'.encode(encoding)
    odd = [tmp_path / f"x.{ending}" for ending in ("jsonl", "jsonl.gz", "txt")]
    for path in odd:
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    write(tmp_path / "good.jsonl", ["good"])
    expect_error(lambda: read(tmp_path), *odd, "3 of 4 files are UTF-16", "convert them to UTF-8", "--skip-bad")
    assert read(tmp_path, skip_bad=True) == ["good"] and str(odd[2]) in capsys.readouterr().err
