"""Text sources: each form of --source as a stream of training and validation documents.

    stdlib             the Python standard library of the running interpreter, no network
    climbmix           Hugging Face parquet; the last file is validation
    fineweb-edu        likewise
    hf:REPO/GLOB       files of any Hugging Face dataset, e.g. hf:user/name/data/*.parquet
    pypi:p34, p100     pinned wheels of Python projects: see data/pypi.py
    PATH, GLOB, FOLDER .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, also in subfolders of FOLDER; a comma-separated
                       list is read in order, or with --interleave all files side by side

Run it to look at documents:  python data/sources.py --source stdlib --show 2
"""

import argparse
import contextlib
import functools
import gzip
import hashlib
import heapq
import io
import json
import os
import platform
import random
import sys
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from functools import partial
from glob import escape, glob
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import hub
import pypi
from dataset import fail, run
from pypi import cut_sections

HUB_SOURCES = {
    "climbmix": "hf:karpathy/climbmix-400b-shuffle/shard_*.parquet",
    "fineweb-edu": "hf:karpathy/fineweb-edu-100b-shuffle/shard_*.parquet",
}
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
HUB_FILES = 40  # default number of training files, about 2 billion tokens of climbmix
HUB_VAL_DOCUMENTS = 10_000  # of the last file, which has some 50 million tokens
STDLIB_SECTION = 6_000  # characters
TEXT_SECTION = 12_000  # characters
STDLIB_VAL_FRACTION = 0.05


@dataclass(frozen=True)
class TextSettings:
    """What is read, by the names of the flags. max_documents and max_bytes (of UTF-8) end the reading of `source`;
    val_documents limits validation; interleave reads the files of `source` side by side."""

    source: str
    val_source: str | None = None
    text_field: str = "text"
    val_fraction: float = 0.01
    max_files: int = HUB_FILES
    max_documents: int | None = None
    max_bytes: int | None = None
    val_documents: int | None = None
    workers: int = 1
    interleave: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> "TextSettings":
        """Of the flags of a script, which need not have all of them."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


class File(NamedTuple):
    """A file of this machine or of Hugging Face."""

    identity: list[Any]  # [name, size in bytes, digest]: what tells that it was exchanged
    fetch: Callable[[], Path]  # where it lies here; it is downloaded before if need be


class Source(NamedTuple):
    """train() and val() each start a fresh pass over the documents (str, never empty, no lone surrogates).

    inputs identifies what is read: [name, size in bytes, digest] for files, after "val" those of --val-source.
    empty counts the documents passed over because they hold no text, by file, in the latest pass over it.
    tokenizer_text() gives the documents for a new tokenizer, where those are not train().
    """

    inputs: list[list[Any]]
    train: Callable[[], Iterator[str]]
    val: Callable[[], Iterator[str]] | None
    empty: dict[str, int]
    tokenizer_text: Callable[[], Iterator[str]] | None = None


def open_source(source: str, val_source: str | None = None, **options: Any) -> Source:
    """open_text, by the fields of TextSettings."""
    return open_text(TextSettings(source, val_source, **options))


def open_text(settings: TextSettings) -> Source:
    """Resolves a --source and a --val-source; user errors end the script before any text is read."""
    spec = settings.source
    is_named = spec == "stdlib" or spec.startswith("pypi:") or is_hub(spec)
    if settings.interleave and is_named:
        fail(f"--interleave is for files on this machine, --source is {spec}; leave it out")
    if spec == "stdlib":
        source = open_stdlib()
    elif spec.startswith("pypi:"):
        source = open_pypi(settings)
    else:
        source = open_files(settings)
    inputs = source.inputs
    val = source.val
    most_val = settings.val_documents
    if settings.val_source is not None:
        held_out = open_held_out(settings, source.empty)
        check_apart(inputs, held_out.inputs)
        inputs = inputs + [["val", *entry] for entry in held_out.inputs]
        val = held_out.val
    elif is_hub(spec) and most_val is None:
        most_val = HUB_VAL_DOCUMENTS

    limit = partial(limited, max_documents=settings.max_documents, max_bytes=settings.max_bytes)
    train = partial(limit, source.train)
    tokenizer_text = partial(limit, source.tokenizer_text) if source.tokenizer_text else None
    if val is None:
        val = partial(one_part, train, settings.val_fraction, True)
        train = partial(one_part, train, settings.val_fraction, False)
    return Source(inputs, train, partial(limited, val, most_val), source.empty, tokenizer_text)


def is_hub(spec: str) -> bool:
    return spec in HUB_SOURCES or spec.startswith("hf:")


# ==== one opener for each kind of source


def open_stdlib() -> Source:
    inputs = [["stdlib", platform.python_version()]]
    return Source(inputs, partial(stdlib_documents, "train"), partial(stdlib_documents, "val"), {})


def open_pypi(settings: TextSettings) -> Source:
    inputs, corpus = pypi.open_set(settings.source, settings.workers)
    parts = (corpus.train, corpus.val, corpus.tokenizer_text)
    train, val, tokenizer_text = (partial(map, bytes.decode, part) for part in parts)
    return Source(inputs, train, val, {}, tokenizer_text)


def open_files(settings: TextSettings) -> Source:
    """Without --val-source the last file of the hub is validation, and a part of local documents (val is None)."""
    files = find_files(settings.source)
    held_out = []
    if is_hub(settings.source):
        if settings.val_source is None:
            if len(files) < 2:
                fail(f"--source {settings.source} has one file but needs 2; give --val-source")
            held_out.append(files.pop())
        files = files[: settings.max_files]
    empty = {}
    read = interleaved_documents if settings.interleave and len(files) > 1 else documents_of
    train = partial(read, files, settings.text_field, empty)
    val = partial(documents_of, held_out, settings.text_field, empty) if held_out else None
    return Source([file.identity for file in files + held_out], train, val, empty)


def open_held_out(settings: TextSettings, empty: dict[str, int]) -> Source:
    """A --val-source: all of it is validation, of the named hub datasets the last file."""
    if settings.val_source == "stdlib":
        return open_stdlib()
    files = find_files(settings.val_source)
    if settings.val_source in HUB_SOURCES:
        files = files[-1:]
    read = partial(documents_of, files, settings.text_field, empty)
    return Source([file.identity for file in files], read, read, empty)


def check_apart(*sources: list[list[Any]]) -> None:
    """Ends the script if two sources share a file with the same content."""
    known: dict[tuple, str] = {}
    for inputs in sources:
        # The standard library, which is no file, keeps its two parts apart itself.
        files = {tuple(content): name for name, *content in inputs if len(content) == 2}
        for content in files.keys() & known.keys():
            found = f"{files[content]} is the same file as {known[content]}"
            fail(f"--source/--val-source: {found}; name it once")
        known |= files


def limited(
    read: Callable[[], Iterator[str]], max_documents: int | None = None, max_bytes: int | None = None
) -> Iterator[str]:
    """The first documents of a pass, whole, up to either limit."""
    size = 0
    for text in islice(read(), max_documents):
        size += len(text.encode())
        if max_bytes and size > max_bytes:
            return
        yield text


def one_part(read: Callable[[], Iterator[str]], fraction: float, want_val: bool) -> Iterator[str]:
    """One of the two parts of a stream, by document number alone: the same in every pass.

    Of each round(1 / fraction) documents one is validation, chosen by a hash of their number.
    In the first block it is the first document, so that even two documents give both splits.
    """
    block = round(1 / fraction)
    chosen = 0
    for i, text in enumerate(read()):
        if i % block == 0 and i > 0:
            chosen = int.from_bytes(hashlib.sha256(str(i // block).encode()).digest()[:8]) % block
        if (i % block == chosen) == want_val:
            yield text


def clean(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates, which JSON escapes can spell, become "?"."""
    return text.encode("utf-8", "replace").decode()


# ==== files


def find_files(spec: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[File]:
    """The files of a path, glob, folder or list of them, of climbmix, fineweb-edu or hf:REPO/GLOB, in their order."""
    if not is_hub(spec):
        return [File(identify(path), partial(Path, path)) for path in local_paths(spec, suffixes)]
    parts = HUB_SOURCES.get(spec, spec).removeprefix("hf:").split("/", 2)
    if len(parts) < 3:
        fail(f"--source {spec} is not of the form hf:OWNER/NAME/GLOB, e.g. with /*.parquet")
    repo, pattern = "/".join(parts[:2]), parts[2]
    commit, files = hub.list_files(repo)
    names = sorted(name for name in files if fnmatch(name, pattern) and name.endswith(suffixes))
    if not names:
        fail(f"--source {spec}: no {', '.join(suffixes)} file of {repo} matches {pattern!r}; check the pattern")
    fetch = partial(hub.fetch, repo, commit=commit)
    return [File([f"{repo}/{name}", *files[name]], partial(fetch, name)) for name in names]


def local_paths(spec: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that a comma-separated list of paths, globs and folders names, in order."""
    endings = ", ".join(suffixes)
    paths: list[Path] = []
    for part in filter(None, map(str.strip, spec.split(","))):
        pattern = escape(part) if os.path.lexists(part) else part  # a name may look like a pattern
        is_folder = Path(part).is_dir()
        # glob passes over hidden files, such as the ._NAME of a Mac.
        found = sorted(map(Path, glob(f"{pattern}/**" if is_folder else pattern, recursive=True)))
        found = [path for path in found if not path.is_dir() and (path.name.endswith(suffixes) or not is_folder)]
        if not found and not is_folder:
            fail(f"--source {part} matches no file; check the path, or see --help for other sources")
        paths += found
    if not paths:
        fail(f"--source {spec} holds no {endings} file; check the path")
    seen: set[Path] = set()
    for path in paths:
        if not path.name.endswith(suffixes):
            fail(f"--source file {path} has an unknown ending; use one of {endings}")
        if not path.exists():
            fail(f"--source file {path} is a link to a file that does not exist; restore the file or remove the link")
        if path.resolve() in seen:
            fail(f"--source names the file {path} twice; name it once")
        seen.add(path.resolve())
    return paths


def identify(path: Path) -> list[Any]:
    """[name, size, sha256]: what tells that a file was exchanged."""
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        return [path.name, f.tell(), digest]


def documents_of(files: list[File], text_field: str, empty: dict[str, int]) -> Iterator[str]:
    """Every document of the files, in order; files are fetched up to four ahead of the reader."""
    for path in in_threads(lambda file: file.fetch(), files, workers=4, ahead=5):
        yield from documents_in(path, text_field, empty)


def documents_in(path: Path, text_field: str, empty: dict[str, int]) -> Iterator[str]:
    """Every document of a file; those without text are only counted in empty[file]."""
    is_text = path.name.endswith(".txt")
    empty[str(path)] = 0
    for text in text_documents(path) if is_text else field_documents(path, text_field):
        if not text or text.isspace():
            empty[str(path)] += 1
        else:
            yield clean(text)


def in_threads(
    work: Callable[[Any], Any], items: Iterable[Any], workers: int, ahead: int
) -> Iterator[Any]:
    """work over items, results in their order; at most `ahead` of them are under way."""
    if workers == 1:
        yield from map(work, items)
        return
    waiting: deque = deque()
    with ThreadPoolExecutor(workers) as threads:
        try:
            for item in items:
                waiting.append(threads.submit(work, item))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


def interleaved_documents(
    files: list[File], text_field: str, empty: dict[str, int]
) -> Iterator[str]:
    """Every document, always from the file with the smallest part read so far.

    Every stretch of the text thus holds all files in proportion to their bytes.
    """
    paths = tuple(file.fetch() for file in files)
    allow_open_files(len(paths))
    sizes = count_text(paths, text_field)
    readers = [documents_in(path, text_field, empty) for path in paths]
    parts = [(0.0, i) for i in range(len(paths))]  # of each file: how much was read, from 0 to 1
    while parts:
        part, i = parts[0]
        text = next(readers[i], None)
        if text is None:
            heapq.heappop(parts)
        else:
            heapq.heapreplace(parts, (part + len(text.encode()) / sizes[i], i))
            yield text


def allow_open_files(count: int) -> None:
    """Raises the limit of open files of this process (1,024 on most systems) if it is too low."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 100), hard))
        except ValueError:
            fail(f"--interleave opens {count} files at a time, the system allows {hard}; raise ulimit -n or join files")


@functools.cache  # each split is a pass of its own
def count_text(paths: tuple[Path, ...], text_field: str) -> list[int]:
    """Bytes of text in each file."""
    print(f"counting the text of {len(paths)} files, to read them side by side", file=sys.stderr)
    documents = [documents_in(path, text_field, {}) for path in paths]
    return [sum(len(text.encode()) for text in texts) for texts in documents]


def records(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Any, str]]:
    """(where it stands, value, "" or what is wrong with it) for each line or row of a file."""
    if path.name.endswith(".parquet"):
        for number, row in enumerate(parquet_rows(path, columns), 1):
            yield f"{path} row {number}", row, ""
        return
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            yield where, json.loads(line), ""
        except (ValueError, RecursionError) as problem:
            yield where, None, f"it is not valid JSON ({problem})"


def field_documents(path: Path, text_field: str) -> Iterator[str]:
    """The text field of each line or row, null as an empty document; anything else is an error."""
    for where, value, problem in records(path, (text_field,)):
        if problem:
            fail(f"{where}: {problem}; correct or remove the line")
        text = value.get(text_field, 0) if isinstance(value, dict) else 0
        if text is not None and not isinstance(text, str):
            found = ", ".join(list(value)[:9]) if isinstance(value, dict) else type(value).__name__
            fail(f"{where} has no string field {text_field!r} (found: {found}); choose another with --text-field")
        yield text or ""


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain, .gz or .zst file without their line end, split at b"\\n" only: texts may hold
    U+2028 and the like, which str.splitlines would break. A file that ends early is an error."""
    number = 0
    try:
        with open_lines(path) as f:
            for line in f:
                if number == 0 and b"\0" in line:
                    fail(f"{path} is UTF-16 or no text; convert it to UTF-8")
                number += 1
                yield line.removesuffix(b"\n")
    except (EOFError, zlib.error, OSError) as problem:
        fail(f"{path} cannot be read after line {number} ({problem}); fetch it again")


def open_lines(path: Path) -> BinaryIO:
    if path.name.endswith((".gz", ".zst")) and not path.stat().st_size:
        fail(f"{path} is empty; fetch it again")
    if path.name.endswith(".gz"):
        return gzip.open(path)
    if not path.name.endswith(".zst"):
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 2**16)


def parquet_rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            for column in columns:
                if column not in names:
                    found = ", ".join(names)
                    fail(f"{path} has no column {column!r} (found: {found}); choose another file or --text-field")
            for batch in file.iter_batches(1024, columns=list(columns)):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        fail(f"{path} is not a readable parquet file ({problem}); fetch it again")


def text_documents(path: Path) -> Iterator[str]:
    """Documents of a text file: parted by lines that hold only <|endoftext|>, and cut at a blank line (else
    at a line) into sections of at most TEXT_SECTION characters, a longer single line excepted."""
    section: list[str] = []
    length = 0
    warned = False
    for line in read_lines(path):
        text = line.decode("utf-8", "replace") + "\n"
        if not warned and "\ufffd" in text and "\ufffd".encode() not in line:
            warned = True
            print(f"warning: {path} is not UTF-8 everywhere; convert it, or the rest becomes \ufffd", file=sys.stderr)
        if text.strip() == "<|endoftext|>":
            if section:
                yield "".join(section)
            section = []
            length = 0
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


# ==== the Python standard library


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[str]:
    """Sorted paths (relative to stdlib_root) of the modules that people wrote: no installed packages, tests,
    demos, character maps, or other files that are mostly generated tables."""
    skip = set("site-packages dist-packages test tests __pycache__ idlelib turtledemo _bundled".split())
    generated = {"pydoc_data/topics.py", "html/entities.py"}
    root = stdlib_root()
    names = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        is_made = name in generated or name.startswith("config-") or path.name.startswith("_sysconfigdata")
        if path.is_file() and not is_made and not skip & set(name.split("/")):
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
        # Half of encodings/ are generated character maps, which hold these names.
        if name.startswith("encodings/") and ("decoding_table" in text or "decoding_map" in text):
            continue
        sections += cut_sections(text, STDLIB_SECTION)
    random.Random(20240520).shuffle(sections)
    return map(clean, sections)


# ==== flags


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Flags shared by all scripts that read text."""
    add = parser.add_argument
    kinds = "stdlib, climbmix, fineweb-edu, pypi:p34, pypi:p100, hf:OWNER/NAME/GLOB, path or glob"
    add("--source", required=True, help=kinds)
    add("--text-field", default="text", help="JSON field or parquet column that holds the text")
    add("--max-files", type=int, default=HUB_FILES, help="files to take from Hugging Face [%(default)s]")
    add("--max-documents", type=int, help="documents to read, at most")
    add("--max-bytes", type=int, help="bytes of text to read, at most")
    side_by_side = "read local files side by side, not one after the other"
    add("--interleave", action="store_true", help=side_by_side)


def check_flags(args: argparse.Namespace, **least: int) -> None:
    """Ends the script if a number of add_source_flags is below 1, or a flag named here below its least value."""
    least = {"max_files": 1, "max_documents": 1, "max_bytes": 1, **least}
    for flag, smallest in least.items():
        value = getattr(args, flag, None)
        if value is not None and value < smallest:
            fail(f"--{flag.replace('_', '-')} must be at least {smallest}, found {value}")
    fraction = getattr(args, "val_fraction", 0.01)
    if not 0 < fraction <= 0.5:
        fail(f"--val-fraction must lie above 0 and at most 0.5, found {fraction}; 0.01 is usual")


def main() -> None:
    parser = argparse.ArgumentParser(description="Show documents of a source.")
    add_source_flags(parser)
    parser.add_argument("--split", choices=["train", "val"], default="train")
    parser.add_argument("--show", type=int, default=3, help="documents to print [%(default)s]")
    args = parser.parse_args()
    check_flags(args)
    source = open_text(TextSettings.of(args))
    documents = getattr(source, args.split)()
    for i, text in enumerate(islice(documents, args.show)):
        print(f"--- document {i}: {len(text)} characters\n{text}")


if __name__ == "__main__":
    run(main)
