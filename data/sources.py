"""Where text comes from: every --source form as a stream of training and of validation documents.

    stdlib             the Python standard library of the running interpreter, always there, no network
    climbmix           Hugging Face parquet; the last file is validation
    fineweb-edu        likewise
    hf:REPO/GLOB       files of any Hugging Face dataset, e.g. hf:user/name/data/*.parquet
    pypi:p34, p100     pinned wheels of Python projects, the same text for everyone: see data/pypi.py
    PATH, GLOB, FOLDER .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet; a comma-separated list is read in order,
                       or with --interleave all files side by side

Run it to look at documents:  python data/sources.py --source stdlib --show 2
"""

import argparse
import functools
import gzip
import hashlib
import heapq
import io
import json
import random
import sys
import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from format import fail, run

HUB_SOURCES = {
    "climbmix": "hf:karpathy/climbmix-400b-shuffle/shard_*.parquet",
    "fineweb-edu": "hf:karpathy/fineweb-edu-100b-shuffle/shard_*.parquet",
}
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
HUB_FILES = 40  # default number of Hugging Face training files, about 2 billion tokens of climbmix
HUB_VAL_DOCUMENTS = (
    10_000  # default size of their validation split, which is one file of some 50 million tokens
)
STDLIB_SECTION = 6_000  # characters
TEXT_SECTION = 12_000  # characters
STDLIB_VAL_FRACTION = 0.05
MAX_LINE = 2**28  # bytes; a longer one is hardly text, and would have to lie in memory whole


class Source(NamedTuple):
    """train() and val() each start a fresh pass over the documents (str, never empty, no lone surrogates).

    inputs identifies what is read: [name, size in bytes, digest] for files, after "val" those of --val-source.
    empty counts the documents passed over because they hold no text, by file, in the latest pass over it.
    tokenizer_text() gives the documents for a new tokenizer, where those are not train().
    """

    inputs: list[list[Any]]
    train: Callable[[], Iterator[str]]
    val: Callable[[], Iterator[str]]
    empty: dict[str, int]
    tokenizer_text: Callable[[], Iterator[str]] | None = None


def open_source(
    spec: str,
    val_spec: str | None = None,
    text_field: str = "text",
    val_fraction: float = 0.01,
    max_files: int = HUB_FILES,
    max_documents: int | None = None,
    max_bytes: int | None = None,
    val_documents: int | None = None,
    workers: int = 1,
    interleave: bool = False,
) -> Source:
    """Resolves a --source and an optional --val-source; mistakes end the script before any text is read.

    max_documents and max_bytes (of UTF-8) end the reading of `spec` early; val_documents limits validation;
    interleave reads the files of `spec` side by side.
    """

    def limited(documents: Iterator[str]) -> Iterator[str]:
        return take(documents, max_documents, max_bytes)

    empty: dict[str, int] = {}
    tokenizer_text = None
    val_inputs: list[list[Any]] = []
    if not 0 < val_fraction <= 0.5:
        fail(
            f"--val-fraction must lie above 0 and at most 0.5, found {val_fraction}; 0.01 is usual"
        )
    if interleave and (spec in ("stdlib", *HUB_SOURCES) or spec.startswith(("pypi:", "hf:"))):
        fail(f"--interleave is for files on this machine, --source is {spec}; leave it out")
    if spec == "stdlib":
        inputs = [["stdlib", python_version()]]
        train, val = (lambda: limited(stdlib_documents("train"))), (lambda: stdlib_documents("val"))
    elif spec.startswith("pypi:"):
        import pypi

        inputs, corpus = pypi.open_set(spec, workers)
        train = lambda: limited(map(bytes.decode, corpus.train))
        val = lambda: map(bytes.decode, corpus.val)
        tokenizer_text = lambda: limited(map(bytes.decode, corpus.tokenizer_text))
    elif spec in HUB_SOURCES or spec.startswith("hf:"):
        repo, commit, files = hub_files(spec)
        names = list(files)
        if val_spec is None:
            if len(names) < 2:
                fail(
                    f"--source {spec} has {len(names)} file but needs 2, as the last one is validation; "
                    "give --val-source"
                )
            names, val_names = names[:-1][:max_files], names[-1:]
            if val_documents is None:
                val_documents = HUB_VAL_DOCUMENTS
        else:
            names, val_names = names[:max_files], []
        inputs = [[f"{repo}/{name}", *files[name]] for name in [*names, *val_names]]
        train = lambda: limited(hub_documents(repo, commit, names, text_field, empty))
        val = lambda: hub_documents(repo, commit, val_names, text_field, empty)
    else:
        paths = local_paths(spec)
        inputs = [identify(path) for path in paths]
        read = interleaved_documents if interleave and len(paths) > 1 else local_documents
        documents = lambda: limited(read(paths, text_field, empty))
        if val_spec is None:
            train = lambda: split(documents(), val_fraction, False)
            val = lambda: split(documents(), val_fraction, True)
        else:
            train = documents
            val = None
    if val_spec is not None:
        if val_spec == "stdlib":
            val_inputs = [["stdlib", python_version()]]
            val = lambda: stdlib_documents("val")
        elif val_spec in HUB_SOURCES or val_spec.startswith("hf:"):
            val_repo, val_commit, val_files = hub_files(val_spec)
            held_out = list(val_files)[-1:] if val_spec in HUB_SOURCES else list(val_files)
            val_inputs = [[f"{val_repo}/{name}", *val_files[name]] for name in held_out]
            val = lambda: hub_documents(val_repo, val_commit, held_out, text_field, empty)
        else:
            val_paths = local_paths(val_spec)
            val_inputs = [identify(path) for path in val_paths]
            val = lambda: local_documents(val_paths, text_field, empty)
    check_apart(inputs, val_inputs)
    inputs = inputs + [["val", *entry] for entry in val_inputs]
    limited_val = lambda: take(val(), val_documents, None)
    return Source(inputs, train, limited_val, empty, tokenizer_text)


def check_apart(*sources: list[list[Any]]) -> None:
    """Ends the script if one source has a file with the content of a file of another, whatever the names are.

    Copies within one source are only counted: folders of texts are full of them.
    """
    known: dict[tuple, str] = {}
    for inputs in sources:
        files: dict[tuple, str] = {}
        copies = []
        for name, *content in inputs:
            key = tuple(content)
            if len(key) < 2:  # no file: the standard library keeps its two parts apart itself
                continue
            if key in known:
                fail(
                    f"--source/--val-source: {name} is the same file as {known[key]}; name it once"
                )
            if key in files:
                copies.append(f"{name} of {files[key]}")
            files.setdefault(key, name)
        if copies:
            print(
                f"warning: {len(copies)} of {len(inputs)} files are copies and their text is read again, the first is "
                f"{copies[0]}; remove what you do not want twice",
                file=sys.stderr,
            )
        known |= files


def take(
    documents: Iterator[str], max_documents: int | None, max_bytes: int | None
) -> Iterator[str]:
    """The first documents, whole, up to either limit."""
    count = size = 0
    for text in documents:
        count, size = count + 1, size + utf8_length(text)
        if (max_documents is not None and count > max_documents) or (
            max_bytes is not None and size > max_bytes
        ):
            return
        yield text


def split(documents: Iterable[str], fraction: float, want_val: bool) -> Iterator[str]:
    """One of the two parts of a stream, by document number alone, so that it is the same in every pass.

    Of each block of round(1 / fraction) documents one is validation, chosen by a hash of the block's number.
    In the first block it is the first document, so that even two documents give both splits.
    """
    block = round(1 / fraction)
    chosen = 0
    for i, text in enumerate(documents):
        if i % block == 0 and i > 0:
            chosen = int.from_bytes(hashlib.sha256(str(i // block).encode()).digest()[:8]) % block
        if (i % block == chosen) == want_val:
            yield text


def clean(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates, which JSON escapes can spell, become "?"."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


# --- local files ------------------------------------------------------------------------------------------


def local_paths(spec: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files that a comma-separated list of paths, globs and folders names, in order."""
    paths: list[Path] = []
    seen: set[Path] = set()
    for part in (p.strip() for p in spec.split(",")):
        if not part:
            continue
        if Path(part).is_dir():
            found = sorted(
                p for p in Path(part).iterdir() if p.is_file() and p.name.endswith(suffixes)
            )
            if not found:
                fail(f"--source folder {part} holds no {', '.join(suffixes)} file; check the path")
        elif Path(part).exists():
            found = [Path(part)]
        else:
            found = sorted(Path(p) for p in glob(part, recursive=True) if Path(p).is_file())
            if not found:
                names = ", ".join(["stdlib", *HUB_SOURCES, "pypi:p34", "hf:REPO/GLOB"])
                fail(f"--source {part} matches no file; give {names}, or an existing path or glob")
        for path in found:
            if not path.name.endswith(suffixes):
                fail(
                    f"--source file {path} has an unknown ending; use one of {', '.join(suffixes)}"
                )
            if path.resolve() in seen:
                fail(f"--source names the file {path} twice; name it once")
            seen.add(path.resolve())
        paths += found
    if not paths:
        fail(f"--source {spec!r} names no file; give an existing path or glob")
    return paths


def identify(path: Path) -> list[Any]:
    """[name, size, sha256]: what tells that a file was exchanged."""
    try:
        with open(path, "rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
            size = f.tell()
    except OSError as problem:
        fail(f"{path} cannot be read ({problem.strerror}); check the file and its permissions")
    return [path.name, size, digest]


def local_documents(paths: Iterable[Path], text_field: str, empty: dict[str, int]) -> Iterator[str]:
    """Every document of the files, in order; those without text are only counted in empty[file]."""
    for path in paths:
        if path.name.endswith(".parquet"):
            documents = parquet_documents(path, text_field)
        elif path.name.endswith(".txt"):
            documents = text_documents(path)
        else:
            documents = jsonl_documents(path, text_field)
        empty[str(path)] = 0
        for text in documents:
            if not text or text.isspace():
                empty[str(path)] += 1
            else:
                yield clean(text)


def interleaved_documents(
    paths: list[Path], text_field: str, empty: dict[str, int]
) -> Iterator[str]:
    """Every document of the files, the next always from the file of which the smallest part was read.

    So each stretch of the text holds all files in proportion to their bytes of text, and all end together.
    """
    sizes = count_text(tuple(paths), text_field)
    readers = [local_documents([path], text_field, empty) for path in paths]
    parts = [(0.0, i) for i in range(len(paths))]  # of each file: how much was read, from 0 to 1
    while parts:
        part, i = parts[0]
        text = next(readers[i], None)
        if text is None:
            heapq.heappop(parts)
        else:
            heapq.heapreplace(parts, (part + utf8_length(text) / sizes[i], i))
            yield text


@functools.cache  # each split is a pass of its own
def count_text(paths: tuple[Path, ...], text_field: str) -> list[int]:
    """Bytes of text in each file."""
    print(f"counting the text of {len(paths)} files, to read them side by side", file=sys.stderr)
    return [sum(map(utf8_length, local_documents([path], text_field, {}))) for path in paths]


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain, .gz or .zst file without their line end, split at b"\\n" only: texts may hold
    U+2028 and the like, which str.splitlines would break. A file that ends early is an error."""
    number = 0
    try:
        with open_lines(path) as f:
            while line := f.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    fail(
                        f"{path} line {number} has more than {MAX_LINE:,} bytes; cut it into documents"
                    )
                yield line.removesuffix(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        fail(f"{path} is damaged or incomplete after line {number} ({problem}); fetch it again")
    except OSError as problem:
        fail(f"{path} cannot be read ({problem.strerror}); check the file and its permissions")


def open_lines(path: Path) -> Any:
    """A file opened for reading lines of bytes, decompressed."""
    if path.name.endswith(".gz"):
        return gzip.open(path)
    if path.name.endswith(".zst"):
        return io.BufferedReader(ChunkReader(zstd_chunks(path)), 2**16)
    return open(path, "rb")


class ChunkReader(io.RawIOBase):
    """Pieces of bytes as a file, so that io.BufferedReader finds the lines."""

    def __init__(self, chunks: Iterator[bytes]):
        self.chunks = chunks
        self.rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # An empty piece is not the end of the file.
        while not self.rest:
            piece = next(self.chunks, None)
            if piece is None:
                return 0
            self.rest = memoryview(piece)
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count


def zstd_chunks(path: Path) -> Iterator[bytes]:
    """Decompressed pieces of a .zst file of one or more frames, windows up to 128 MiB, never the whole file.

    decompressobj, as stream_reader would take a truncated file for its end without a word.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**27)
    frame, started = decompressor.decompressobj(), False
    with open(path, "rb") as f:
        try:
            # Small pieces: 4 KiB can stand for 128 MiB of zeros.
            while data := f.read(2**12):
                while data:
                    started = True
                    yield frame.decompress(data)
                    data = b""
                    if frame.eof:
                        data, frame, started = (
                            frame.unused_data,
                            decompressor.decompressobj(),
                            False,
                        )
        except zstandard.ZstdError as problem:
            fail(f"{path} is damaged ({problem}); fetch it again")
    if started:
        fail(f"{path} is incomplete: it ends inside a zstd frame; fetch it again")


def jsonl_documents(path: Path, text_field: str) -> Iterator[str]:
    """The text field of each line; blank lines are passed over, anything else is an error with its line."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            fail(f"{path} line {number} is not valid JSON ({problem}); correct or remove the line")
        if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
            found = ", ".join(list(value)[:9]) if isinstance(value, dict) else type(value).__name__
            fail(
                f"{path} line {number} has no string field {text_field!r} (found: {found}); choose another "
                f"with "
                "--text-field"
            )
        yield value[text_field]


def text_documents(path: Path) -> Iterator[str]:
    """Documents of a text file: parted by lines that hold only <|endoftext|>, and cut at a blank line (else
    at a line) into sections of at most TEXT_SECTION characters, a longer single line excepted."""
    section: list[str] = []
    length, warned = 0, False
    for line in read_lines(path):
        text = line.decode("utf-8", "replace") + "\n"
        if not warned and "\ufffd" in text and "\ufffd".encode() not in line:
            warned = True
            print(
                f"warning: {path} is not UTF-8 everywhere; convert it, or the rest becomes \ufffd",
                file=sys.stderr,
            )
        if text.strip() == "<|endoftext|>":
            if section:
                yield "".join(section)
            section, length = [], 0
            continue
        while section and length + len(text) > TEXT_SECTION:
            blank = [i for i, s in enumerate(section) if not s.strip()]
            cut = blank[-1] + 1 if blank and blank[-1] >= len(section) // 4 else len(section)
            yield "".join(section[:cut])
            section = section[cut:]
            length = sum(map(len, section))
        section.append(text)
        length += len(text)
    if section:
        yield "".join(section)


def parquet_documents(path: Path, text_field: str) -> Iterator[str]:
    """The text column, a row group and at most 1,024 rows at a time; nulls count as empty documents."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                fail(
                    f"{path} has no column {text_field!r} (found: {', '.join(file.schema_arrow.names)}); "
                    f"choose "
                    "another with --text-field"
                )
            if not pyarrow.types.is_string(kind := file.schema_arrow.field(text_field).type) and (
                not pyarrow.types.is_large_string(kind)
            ):
                fail(
                    f"{path} column {text_field!r} holds {kind}, expected string; choose another with "
                    f"--text-field"
                )
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(1024, row_groups=[group], columns=[text_field]):
                    yield from (text or "" for text in batch.column(0).to_pylist())
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        fail(f"{path} is not a readable parquet file ({problem}); fetch it again")


# --- Hugging Face -----------------------------------------------------------------------------------------


def hub_files(spec: str) -> tuple[str, str, dict[str, list]]:
    """(repository, its commit now, {name: [size, digest]}) of the files of climbmix, fineweb-edu or hf:REPO/GLOB, in
    the order of their names."""
    import hub

    parts = HUB_SOURCES.get(spec, spec).removeprefix("hf:").split("/", 2)
    if len(parts) < 3 or not all(parts):
        fail(
            f"--source {spec} is not of the form hf:OWNER/NAME/GLOB; add the file pattern, e.g. /*.parquet"
        )
    repo, pattern = "/".join(parts[:2]), parts[2]
    commit, files = hub.list_files(repo)
    names = sorted(name for name in files if fnmatch(name, pattern) and name.endswith(SUFFIXES))
    if outside := [name for name in names if not hub.is_inside(name)]:
        fail(f"--source {spec} lists the file {outside[0]!r}, which has a bad path; choose another")
    if not names:
        fail(
            f"--source {spec}: no {', '.join(SUFFIXES)} file in dataset {repo} matches {pattern!r}; check "
            f"the pattern"
        )
    return repo, commit, {name: files[name] for name in names}


def hub_documents(
    repo: str, commit: str, names: list[str], text_field: str, empty: dict[str, int]
) -> Iterator[str]:
    """Documents of dataset files in the Hugging Face cache, fetched up to four files ahead of the reader."""
    import hub

    with ThreadPoolExecutor(4) as pool:
        ahead = [pool.submit(hub.fetch, repo, name, commit) for name in names[:4]]
        try:
            for i in range(len(names)):
                path = ahead.pop(0).result()
                if i + 4 < len(names):
                    ahead.append(pool.submit(hub.fetch, repo, names[i + 4], commit))
                yield from local_documents([path], text_field, empty)
        finally:
            pool.shutdown(cancel_futures=True)


# --- the Python standard library --------------------------------------------------------------------------


def python_version() -> str:
    import platform

    return platform.python_version()


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[str]:
    """Sorted paths (relative to stdlib_root) of the modules that people wrote: no installed packages, tests,
    demos, character maps, or other files that are mostly generated tables."""
    skip = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "__pycache__",
        "idlelib",
        "turtledemo",
        "_bundled",
    }
    generated = {"pydoc_data/topics.py", "html/entities.py"}
    root = stdlib_root()
    names = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if (
            skip & set(relative.parts)
            or name in generated
            or relative.parts[0].startswith("config-")
        ):
            continue
        if path.name.startswith("_sysconfigdata") or not path.is_file():
            continue
        names.append(name)
    return sorted(names)


def is_val_file(name: str) -> bool:
    """Whole files are held out, chosen by a hash of the path: no part of one is ever trained on."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < STDLIB_VAL_FRACTION * 2**64


def stdlib_documents(part: str) -> Iterator[str]:
    """Sections of the "train" or "val" files, in an order that a fixed seed shuffled."""
    sections: list[str] = []
    for name in stdlib_files():
        if is_val_file(name) != (part == "val"):
            continue
        text = (stdlib_root() / name).read_text(encoding="utf-8", errors="replace")
        # encodings/ is half small codecs and half generated character maps; the maps hold these names.
        if name.startswith("encodings/") and ("decoding_table" in text or "decoding_map" in text):
            continue
        sections += cut_sections(text, STDLIB_SECTION)
    if not sections:
        fail(
            f"the Python standard library in {stdlib_root()} holds no source files; choose another --source"
        )
    random.Random(20240520).shuffle(sections)
    return map(clean, sections)


def cut_sections(text: str, limit: int) -> list[str]:
    """Cuts Python source into sections of at most `limit` characters (one longer line excepted).

    Each cut is before a line, by preference a top-level def, class or decorator, then any other top-level
    statement, then the line after a blank one. Joined, the sections give the text again.
    """
    lines = text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    ends = list(accumulate(map(len, lines)))  # characters up to the end of each line
    sections: list[str] = []
    start = 0
    taken = 0  # characters before line `start`
    while len(text) - taken > limit:
        end = max(bisect_right(ends, taken + limit), start + 1)  # the first line that does not fit
        if end == len(lines):
            break
        cut = best_cut(lines, start, end)
        sections.append("".join(lines[start:cut]))
        start = cut
        taken = ends[cut - 1]
    sections.append("".join(lines[start:]))
    return [section for section in sections if section.strip()]


def best_cut(lines: list[str], start: int, end: int) -> int:
    """The best cut among lines start+1 .. end; of equals the last, which fills the section best."""
    best = end
    quality = -1
    for i in range(end, start, -1):
        found = cut_quality(lines, i)
        if found == 3:
            return i
        if found > quality:
            best = i
            quality = found
    return best


def cut_quality(lines: list[str], i: int) -> int:
    """How good a place before line i is for a cut: 3 best, 0 worst."""
    line = lines[i]
    if line[0] in " \t\r\n)]}#\"'" or line.startswith(("else", "elif", "except", "finally")):
        return int(not lines[i - 1].strip())
    if line.startswith(("def ", "class ", "async def ", "@")) and not lines[i - 1].startswith("@"):
        return 3
    return 2


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every script which reads text shares."""
    parser.add_argument(
        "--source",
        required=True,
        help="stdlib, climbmix, fineweb-edu, pypi:p34, pypi:p100, hf:REPO/GLOB, path or glob",
    )
    parser.add_argument(
        "--text-field", default="text", help="JSON field or parquet column that holds the text"
    )
    parser.add_argument(
        "--max-files", type=int, default=HUB_FILES, help="Hugging Face training files to use"
    )
    parser.add_argument(
        "--max-documents", type=int, help="stop reading the source after this many documents"
    )
    parser.add_argument(
        "--max-bytes", type=int, help="stop reading the source after this many bytes of text"
    )
    parser.add_argument(
        "--interleave",
        action="store_true",
        help="read local files side by side, not one after the other; for files of different kinds of text",
    )


def check_positive(args: argparse.Namespace, *more: str) -> None:
    """Ends the script if a number of add_source_flags, or of the flags named, is below 1."""
    for flag in ("max_files", "max_documents", "max_bytes", *more):
        if (value := getattr(args, flag)) is not None and value < 1:
            fail(
                f"--{flag.replace('_', '-')} must be at least 1, found {value}; leave it out for the default"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Show documents of a source.")
    add_source_flags(parser)
    parser.add_argument("--split", choices=["train", "val"], default="train")
    parser.add_argument("--show", type=int, default=3, help="number of documents to print")
    args = parser.parse_args()
    check_positive(args)
    source = open_source(
        args.source,
        None,
        args.text_field,
        max_files=args.max_files,
        max_documents=args.max_documents,
        max_bytes=args.max_bytes,
        interleave=args.interleave,
    )
    for i, text in enumerate(getattr(source, args.split)()):
        if i == args.show:
            break
        print(f"--- document {i}: {len(text)} characters\n{text}")


if __name__ == "__main__":
    run(main)
