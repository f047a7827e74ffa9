"""Text sources: each form of --source as a stream of training and validation documents.

    stdlib             the Python standard library of the running interpreter, no network
    climbmix           Hugging Face parquet; the last file is validation
    fineweb-edu        likewise
    hf:REPO/GLOB       files of any Hugging Face dataset, e.g. hf:user/name/data/*.parquet
    pypi:p34           pinned wheels of Python projects, also p100 and p400: see data/pypi.py
    PATH, GLOB, FOLDER .jsonl, .jsonl.gz, .jsonl.zst, .parquet and text (.txt, .md, .py, ...), also
                       in subfolders of FOLDER; several, each with --source or in one comma-separated
                       list, are read in order, or with --interleave side by side

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
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from functools import partial
from glob import escape, glob
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import hub
import pypi
import stdlib_text
from dataset import fail, read_json, run, sha256_file

HUB_SOURCES = {
    "climbmix": "hf:karpathy/climbmix-400b-shuffle/shard_*.parquet",
    "fineweb-edu": "hf:karpathy/fineweb-edu-100b-shuffle/shard_*.parquet",
}
RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
TEXT = tuple(
    ".txt .text .md .markdown .rst .adoc .org .tex .html .htm .xml .py .pyi .c .h .cc .cpp .hpp .cs "
    ".css .go .java .js .jsx .ts .tsx .kt .lua .php .pl .r .rb .rs .scala .sh .sql .swift".split()
)
HUB_FILES = 40  # default number of training files, about 2 billion tokens of climbmix
HUB_VAL_DOCUMENTS = 10_000  # of the last file, which has some 50 million tokens
TEXT_CHUNK = 12_000  # characters
LITTLE_TEXT = 5_000_000  # bytes of files; 1 % of less is too little to validate on


@dataclass(frozen=True)
class File:
    """A file of this machine, or, if repo is given, of a commit of a Hugging Face dataset."""

    identity: list[Any]  # [name, size in bytes, digest]: what tells that it was exchanged
    name: str  # its path, here or in the repository
    repo: str = ""
    commit: str = ""

    def fetch(self) -> Path:
        """Where it lies on this machine; it is downloaded first if need be."""
        if self.repo:
            return hub.fetch(self.repo, self.name, self.commit)
        return Path(self.name)


@dataclass
class Source:
    """The documents of --source and --val-source: str, never empty, no lone surrogates.

    train(), val() and tokenizer_text() each start a fresh pass. On its way from a file to them a
    document passes field_documents or text_documents, which find it; documents_in, which skips it
    if it is empty; read_files or interleave_files, which go from file to file; and limited and
    one_part, which end a pass and hold out a part.

    The arguments are the flags of these names. User errors end the script before any text is read.
    """

    source: list[str]
    val_source: str | None = None
    text_field: str = "text"
    val_fraction: float | None = None  # of files on this machine; None: 1 %, of little text 5 %
    max_files: int = HUB_FILES  # of Hugging Face
    max_documents: int | None = None  # of source
    max_bytes: int | None = None  # of source, in UTF-8
    val_documents: int | None = None
    workers: int = 1
    interleave: bool = False
    skip_bad: bool = False

    # What identifies the text: identities of files, after "val" those of val_source.
    inputs: list[list[Any]] = field(init=False)
    files: list[File] = field(init=False, default_factory=list)  # of source
    corpus: pypi.Corpus | None = field(init=False, default=None)
    val_reader: Callable[[], Iterator[str]] | None = field(init=False, default=None)  # None: a part of source
    # Documents without text and, with skip_bad, malformed lines, by file, in the latest pass.
    skipped: dict[Path, int] = field(init=False, default_factory=dict)

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Source":
        """From the flags of a script, which need not have all of them."""
        names = [field.name for field in fields(cls) if field.init]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def __post_init__(self) -> None:
        first = self.source[0]
        named = [spec for spec in self.source if not is_local(spec)]
        if named and len(self.source) > 1:
            fail(f"--source {named[0]} cannot be combined with other sources; use it alone")
        if named and self.interleave:
            fail(f"--interleave is for local files, but --source is {first}; omit it")
        if first == "stdlib":
            self.inputs = [stdlib_text.identity()]
            self.val_reader = partial(stdlib_text.documents, "val")
        elif first.startswith("pypi:"):
            self.inputs, self.corpus = pypi.open_set(first, self.workers)
            self.val_reader = partial(map, bytes.decode, self.corpus.val)
        else:
            self.open_files()
        if self.val_source is not None:
            self.open_val_source()
        if self.val_fraction is None:
            size = min(sum(file.identity[1] for file in self.files), self.max_bytes or LITTLE_TEXT)
            self.val_fraction = 0.01 if self.val_reader or size >= LITTLE_TEXT else 0.05

    def open_files(self) -> None:
        """The files of source. Of a Hugging Face dataset the last one is validation, if val_source names no other."""
        self.files = find_files(*self.source, skip_bad=self.skip_bad)
        val_files = []
        if is_hub(self.source[0]):
            if self.val_source is None:
                if len(self.files) < 2:
                    fail(f"--source {self.source[0]} has one file but needs 2; pass --val-source")
                val_files = [self.files.pop()]
                self.val_reader = partial(self.read_files, val_files)
                self.val_documents = self.val_documents or HUB_VAL_DOCUMENTS
            self.files = self.files[: self.max_files]
        self.inputs = [file.identity for file in self.files + val_files]

    def open_val_source(self) -> None:
        """All of val_source is validation; of climbmix and fineweb-edu the last file."""
        if self.val_source == "stdlib":
            self.val_reader = partial(stdlib_text.documents, "val")
            val_inputs = [stdlib_text.identity()]
        else:
            val_files = find_files(self.val_source, skip_bad=self.skip_bad)
            if self.val_source in HUB_SOURCES:
                val_files = val_files[-1:]
            self.val_reader = partial(self.read_files, val_files)
            val_inputs = [file.identity for file in val_files]
        check_apart(self.inputs, val_inputs)
        self.inputs = self.inputs + [["val", *identity] for identity in val_inputs]

    def train(self) -> Iterator[str]:
        """The documents to train on."""
        documents = self.read_source()
        return documents if self.val_reader else one_part(documents, self.val_fraction, want_val=False)

    def val(self) -> Iterator[str]:
        """The documents to validate on."""
        if self.val_reader:
            documents = self.val_reader()
        else:
            documents = one_part(self.read_source(), self.val_fraction, want_val=True)
        return limited(documents, self.val_documents)

    def tokenizer_text(self) -> Iterator[str]:
        """The documents for a new tokenizer: those to train on, but for pypi:, whose sets share one tokenizer."""
        if self.corpus:
            documents = map(bytes.decode, self.corpus.tokenizer_text)
            return limited(documents, self.max_documents, self.max_bytes)
        return self.train()

    def read_source(self) -> Iterator[str]:
        """The documents of source, up to max_documents and max_bytes."""
        if self.source == ["stdlib"]:
            documents = stdlib_text.documents("train")
        elif self.corpus:
            documents = map(bytes.decode, self.corpus.train)
        elif self.interleave and len(self.files) > 1:
            documents = self.interleave_files()
        else:
            documents = self.read_files(self.files)
        return limited(documents, self.max_documents, self.max_bytes)

    def read_files(self, files: list[File]) -> Iterator[str]:
        """Every document of the files, in order; up to four files are prefetched."""
        for path in in_threads(File.fetch, files, workers=4, max_pending=5):
            yield from self.documents_in(path)

    def interleave_files(self) -> Iterator[str]:
        """Every document, always from the file of which the smallest fraction was read so far.

        So every stretch of the text holds all files in proportion to their bytes.
        """
        paths = [file.fetch() for file in self.files]
        allow_open_files(len(paths))
        sizes = self.text_sizes
        readers = [self.documents_in(path) for path in paths]
        heap = [(0.0, i) for i in range(len(paths))]  # (fraction read, file)
        while heap:
            fraction, i = heap[0]
            text = next(readers[i], None)
            if text is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (fraction + len(text.encode()) / sizes[i], i))
                yield text

    @functools.cached_property  # each split is a pass of its own
    def text_sizes(self) -> list[int]:
        """Bytes of text in each file."""
        print(f"counting the text of {len(self.files)} files, to interleave them", file=sys.stderr)
        documents = [self.documents_in(file.fetch()) for file in self.files]
        return [sum(len(text.encode()) for text in texts) for texts in documents]

    def documents_in(self, path: Path) -> Iterator[str]:
        """Every document of a file that has text."""
        self.skipped[path] = 0
        is_text = has_ending(path, TEXT)
        for text in text_documents(path) if is_text else self.field_documents(path):
            if not text or text.isspace():
                self.skipped[path] += 1
            else:
                yield clean(text)

    def field_documents(self, path: Path) -> Iterator[str]:
        """The text field of each line or row; null and what skip_bad skips are empty documents."""
        for where, value, problem in records(path, (self.text_field,)):
            text = value.get(self.text_field, 0) if isinstance(value, dict) else 0
            if not problem and text is not None and not isinstance(text, str):
                found = ", ".join(list(value)[:9]) if isinstance(value, dict) else type(value).__name__
                problem = f"it has no string field {self.text_field!r} (found: {found}), see --text-field"
            if problem and not self.skip_bad:
                fail(f"{where}: {problem}; correct or remove the line, or skip such lines with --skip-bad")
            yield "" if problem else text or ""


def is_hub(spec: str) -> bool:
    """Whether a --source names a Hugging Face dataset."""
    return spec in HUB_SOURCES or spec.startswith("hf:")


def is_local(spec: str) -> bool:
    """Whether a --source names files on this machine."""
    return spec != "stdlib" and not spec.startswith("pypi:") and not is_hub(spec)


def check_apart(*sources: list[list[Any]]) -> None:
    """Ends the script if two sources share a file with the same content."""
    names: dict[tuple, str] = {}  # of earlier files, by (size, digest)
    for inputs in sources:
        # The standard library, which is no file, keeps its two parts apart itself.
        files = {tuple(content): name for name, *content in inputs if len(content) == 2}
        for content in files.keys() & names.keys():
            fail(f"{files[content]} and {names[content]} are the same file; keep it out of --source or --val-source")
        names |= files


def limited(documents: Iterable[str], max_documents: int | None, max_bytes: int | None = None) -> Iterator[str]:
    """The first documents, whole, up to either limit; max_bytes in UTF-8."""
    size = 0
    for text in islice(documents, max_documents):
        size += len(text.encode())
        if max_bytes and size > max_bytes:
            return
        yield text


def one_part(documents: Iterable[str], fraction: float, want_val: bool) -> Iterator[str]:
    """The training or the validation part, by document number alone: the same in every pass.

    Of each round(1 / fraction) documents one is validation, chosen by a hash of their number.
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
    return text.encode("utf-8", "replace").decode()


# ==== files


def find_files(*specs: str, suffixes: tuple[str, ...] = (*RECORDS, *TEXT), skip_bad: bool = False) -> list[File]:
    """The files of a Hugging Face dataset, or of paths, globs and folders, in their order."""
    spec = specs[0]
    if not is_hub(spec):
        paths = without_binaries(local_paths(specs, suffixes), skip_bad)
        return [File(identify(path), str(path)) for path in paths]
    parts = HUB_SOURCES.get(spec, spec).removeprefix("hf:").split("/", 2)
    if len(parts) < 3:
        fail(f"{spec} is not of the form hf:OWNER/NAME/GLOB, e.g. with /*.parquet")
    repo, pattern = "/".join(parts[:2]), parts[2]
    commit, files = hub.list_files(repo)
    # A README.md of the repository is no text to train on.
    kinds = tuple(suffix for suffix in suffixes if suffix not in TEXT[1:])
    names = sorted(name for name in files if fnmatch(name, pattern) and has_ending(name, kinds))
    if not names:
        fail(f"{spec}: no {', '.join(kinds)} file of {repo} matches {pattern!r}; check the pattern")
    return [File([f"{repo}/{name}", *files[name]], name, repo, commit) for name in names]


def has_ending(path: Path | str, suffixes: str | tuple[str, ...]) -> bool:
    """Whether a name ends with one of the suffixes, in small or capital letters."""
    return str(path).lower().endswith(suffixes)


def local_paths(specs: Sequence[str], suffixes: tuple[str, ...]) -> list[Path]:
    """The files of paths, globs and folders, in order; a single spec may be a comma-separated list.

    Files of other kinds in a folder or a glob are skipped, and a note says how many.
    """
    endings = ", ".join(suffixes)
    if len(specs) == 1 and not os.path.lexists(specs[0]):
        specs = list(filter(None, map(str.strip, specs[0].split(","))))
    paths: list[Path] = []
    skipped: Counter[str] = Counter()
    for part in specs:
        is_named = os.path.lexists(part)
        is_folder = Path(part).is_dir()
        pattern = escape(part) if is_named else part  # a name may look like a pattern
        # glob passes over hidden files, such as the ._NAME of a Mac.
        found = sorted(map(Path, glob(f"{pattern}/**" if is_folder else pattern, recursive=True)))
        found = [path for path in found if not path.is_dir()]
        if not found and not is_folder:
            fail(f"{part} matches no file; check the path, or see --help for other sources")
        others = [path for path in found if not has_ending(path, suffixes)]
        if others and is_named and not is_folder:
            fail(f"{part} has an unknown extension; use one of {endings}")
        skipped.update(path.suffix.lower() or "without extension" for path in others)
        paths += [path for path in found if has_ending(path, suffixes)]
    if skipped:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in skipped.most_common())
        print(f"skipped files of other kinds: {kinds}", file=sys.stderr)
    if not paths:
        fail(f"{', '.join(specs)} holds no {endings} file; check the path")
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            fail(f"{path} is a link to a file that does not exist; restore the file or remove the link")
        if path.resolve() in seen:
            fail(f"the file {path} is listed twice; list it once")
        seen.add(path.resolve())
    return paths


def without_binaries(paths: list[Path], skip_bad: bool) -> list[Path]:
    """The files of text and lines of JSON, but for those that are UTF-16 or of another format."""
    binaries = [path for path in paths if is_binary(path)]
    names = ", ".join(map(str, binaries))
    if binaries and not skip_bad:
        advice = "convert them to UTF-8, or leave them out with --skip-bad"
        fail(f"{len(binaries):,} of {len(paths):,} files are UTF-16 or not text: {names}; {advice}")
    if binaries:
        print(f"skipped files that are UTF-16 or not text: {names}", file=sys.stderr)
    return [path for path in paths if path not in binaries]


def is_binary(path: Path) -> bool:
    """Whether there is a zero in the first bytes of a file, as there is in no text in UTF-8."""
    if has_ending(path, ".parquet"):
        return False
    with contextlib.suppress(EOFError, zlib.error, OSError), open_lines(path) as f:
        return b"\0" in f.read(2**16)
    return False


def identify(path: Path) -> list[Any]:
    """[name, size in bytes, sha256]: what tells that a file was exchanged."""
    return [path.name, path.stat().st_size, sha256_file(path)]


def in_threads(
    work: Callable[[Any], Any], items: Iterable[Any], workers: int, max_pending: int
) -> Iterator[Any]:
    """work(item) for each item, in their order; at most max_pending of them are begun and not taken."""
    if workers == 1:
        yield from map(work, items)
        return
    pending: deque = deque()
    with ThreadPoolExecutor(workers) as threads:
        try:
            for item in items:
                pending.append(threads.submit(work, item))
                if len(pending) >= max_pending:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


def allow_open_files(count: int) -> None:
    """Raises the limit of open files of this process (1,024 on most systems) if it is too low."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 100), hard))
        except ValueError:
            fail(f"--interleave opens {count} files at once, the system allows {hard}; raise ulimit -n or join files")


def records(path: Path, columns: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, str]]:
    """(where it stands, value, "" or what is wrong with it) for each line, row or entry of a list.

    columns: those of a Parquet file to read; without them, all
    """
    if has_ending(path, ".parquet"):
        for number, row in enumerate(parquet_rows(path, columns), 1):
            yield f"{path} row {number}", row, ""
        return
    # Some .json files hold a line for each value.
    if has_ending(path, ".json") and path.read_text("utf-8-sig", "replace").lstrip()[:1] == "[":
        for number, value in enumerate(read_json(path), 1):
            yield f"{path} entry {number}", value, ""
        return
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            yield where, json.loads(line), ""
        except (ValueError, RecursionError) as problem:
            yield where, None, f"it is not valid JSON ({problem})"


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain, .gz or .zst file without their line end, split at b"\\n" only: texts
    may hold U+2028 and the like, which str.splitlines would break. A file that ends early is an
    error."""
    number = 0
    try:
        with open_lines(path) as f:
            for line in f:
                number += 1
                yield line.removesuffix(b"\n")
    except (EOFError, zlib.error, OSError) as problem:
        fail(f"{path} cannot be read after line {number} ({problem}); download it again")


def open_lines(path: Path) -> BinaryIO:
    """A plain, .gz or .zst file, unpacked; an empty archive ends the script."""
    if has_ending(path, (".gz", ".zst")) and not path.stat().st_size:
        fail(f"{path} is empty; download it again")
    if has_ending(path, ".gz"):
        return gzip.open(path)
    if not has_ending(path, ".zst"):
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 2**16)


def parquet_rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """{column: value} of each row; a missing column ends the script."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            for column in columns:
                if column not in names:
                    found = ", ".join(names)
                    fail(f"{path} has no column {column!r} (found: {found}); choose another file or --text-field")
            for batch in file.iter_batches(1024, columns=list(columns) or None):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        fail(f"{path} is not a readable parquet file ({problem}); download it again")


def text_documents(path: Path) -> Iterator[str]:
    """Documents of a text file: it is split at lines that hold only <|endoftext|>, and cut at a
    blank line (else at a line) into chunks of at most TEXT_CHUNK characters, a longer single line
    excepted. As in data/pypi.py, a byte order mark goes, and every line ends in "\\n"."""
    chunk: list[str] = []
    length = 0
    with open(path, encoding="utf-8-sig", errors="replace") as f:
        for line in f:
            if "\ufffd" in line:
                warn_of_encoding(path)
            if line.strip() == "<|endoftext|>":
                if chunk:
                    yield "".join(chunk)
                chunk = []
                length = 0
                continue
            text = line.removesuffix("\n") + "\n"
            while chunk and length + len(text) > TEXT_CHUNK:
                blank = [i for i, s in enumerate(chunk) if not s.strip()]
                cut = blank[-1] + 1 if blank and blank[-1] >= len(chunk) // 4 else len(chunk)
                yield "".join(chunk[:cut])
                chunk = chunk[cut:]
                length = sum(map(len, chunk))
            chunk.append(text)
            length += len(text)
    if chunk:
        yield "".join(chunk)


@functools.cache  # once for a file that is read several times
def warn_of_encoding(path: Path) -> None:
    print(f"warning: {path} has \ufffd for bytes that are not UTF-8; convert the file", file=sys.stderr)


# ==== flags


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Flags shared by all scripts that read text."""
    add = parser.add_argument
    kinds = "stdlib, climbmix, fineweb-edu, pypi:p34 (p100, p400), hf:OWNER/NAME/GLOB, path, glob, folder"
    add("--source", required=True, action="extend", nargs="+", help=f"text to read: {kinds}")
    add("--text-field", default="text", help="JSON field or parquet column of the text [%(default)s]")
    add("--max-files", type=int, default=HUB_FILES, help="maximum number of Hugging Face files [%(default)s]")
    add("--max-documents", type=int, help="maximum number of documents (default: all)")
    add("--max-bytes", type=int, help="maximum bytes of text (default: all)")
    add("--interleave", action="store_true", help="read local files side by side, not one after another")
    add("--skip-bad", action="store_true", help="skip malformed lines, and files of UTF-16 or other formats")


def check_flags(args: argparse.Namespace, **minimums: int) -> None:
    """Ends the script if a number of add_source_flags is below 1, or a flag named here below its minimum."""
    minimums = {"max_files": 1, "max_documents": 1, "max_bytes": 1, **minimums}
    for flag, minimum in minimums.items():
        value = getattr(args, flag, None)
        if value is not None and value < minimum:
            fail(f"--{flag.replace('_', '-')} must be at least {minimum}, found {value}")
    fraction = getattr(args, "val_fraction", None)
    if fraction is not None and not 0 < fraction <= 0.5:
        fail(f"--val-fraction must be above 0 and at most 0.5, found {fraction}; 0.01 is usual")


def main() -> None:
    parser = argparse.ArgumentParser(description="Show documents of a source.")
    add_source_flags(parser)
    parser.add_argument("--split", choices=["train", "val"], default="train", help="split [%(default)s]")
    parser.add_argument("--show", type=int, default=3, help="number of documents to print [%(default)s]")
    args = parser.parse_args()
    check_flags(args, show=0)
    source = Source.of(args)
    documents = source.train() if args.split == "train" else source.val()
    for i, text in enumerate(islice(documents, args.show)):
        print(f"--- document {i}: {len(text)} characters\n{text}")


if __name__ == "__main__":
    run(main)
