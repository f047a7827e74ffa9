"""A corpus that anyone can reproduce bit for bit: the text inside pinned wheels of Python projects.

    python data/pretrain.py --source pypi:p34 --out data/shards/p34  # 36.8 million tokens
    python data/pretrain.py --source pypi:p100 --out data/shards/p100   # 103.7 million
    python data/pretrain.py --source pypi:p400 --out data/shards/p400   # 387.5 million

The same command compares a complete dataset with the lock, layer by layer.

data/pypi_lock.json lists the wheels (version, sha256, licence) and the hashes of what is made from
them. pip downloads them from its configured index to data/shards/wheels or $DECODERSTACK_WHEELS.
Nothing is installed or run: the text is read from the archives.

From a wheel to documents:

1.  Members that end in .py, .pyi, .rst, .md or .txt, of at most 400,000 bytes. Not those in a
    vendored copy, a catalogue of translations or the wheel's own metadata (SKIPPED_FOLDERS), not
    licences and lists of requirements (SKIPPED_NAMES), and not what a program wrote (GENERATED in
    its first 2,000 or last 1,000 characters).
2.  UTF-8 only. A byte order mark goes, and every line ends in "\\n". Comments at the top of a file,
    up to its first other line, go if they speak of a licence or copyright (TOP_COMMENTS, LICENCE).
    Nothing else is changed.
3.  Each file is cut into chunks of at most 6,000 characters, by preference before a top-level
    definition. Chunks of less than 200 bytes go, and so do those that hold data (`is_data`).
4.  Chunks are ordered by the hash of their text. An equal chunk goes, and so does a near
    duplicate of one that stays: at least half of their MinHash values over shingles of five words
    agree.
5.  Validation is whole projects, listed as "val". They come first in step 4, and every set has the
    same ones.

The lock also states what that leaves and drops. Almost all of it is Python code with docstrings.

Nothing here depends on the number of workers, the order of a set, the locale or Unicode tables.
"""

import argparse
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import string
import subprocess
import sys
import tempfile
import threading
import zipfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dataset import fail, read_dataset, read_json, run, sha256_matches, write_atomic
from tqdm import tqdm

LOCK = Path(__file__).parent / "pypi_lock.json"
LOCK_FORMAT = "decoderstack-pypi-1"
WHEELS = Path(__file__).parent / "shards" / "wheels"
PIP_FLAGS = (
    "--no-input --no-deps --disable-pip-version-check --progress-bar=off --only-binary=:all: --require-hashes "
    "--ignore-requires-python".split()
)
TOKENIZER_SET = "p34"  # every set has the tokenizer of this one's training text,
TOKENIZER_BYTES = 50_000_000  # of its first documents up to this size

SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt")
MAX_MEMBER = 400_000  # bytes: what people write is smaller
MAX_CHUNK = 6_000  # characters
MIN_CHUNK = 200  # bytes

SKIPPED_FOLDERS = frozenset(
    "_vendor vendor vendored _vendored vendors third_party thirdparty _third_party extern externals external "
    "_external _externals locale locales node_modules".split()
)
SKIPPED_NAMES = re.compile(
    r"^(licen[cs]e|copying|notice|authors|contributors|requirements|constraints).*\.(txt|md|rst)$"
    r"|_pb2(_grpc)?\.pyi?$|(parse|lex|yacc)tab\.py$"
)
GENERATED = re.compile(
    r"(auto|automatically)[- ]?generated|@generated|do not (edit|modify)"
    r"|^[^\w\n]*(this (file|module) (is|was|has been) )?(code )?generated (by|from|with|using)",
    re.IGNORECASE | re.MULTILINE | re.ASCII,
)

# The same few licences stand at the top of thousands of files, where they teach nothing.
TOP_COMMENTS = re.compile(r"(?:#[^\n]*\n|[ \t]*\n)+")
LICENCE = re.compile(r"licen[cs]e|copyright", re.IGNORECASE | re.ASCII)

WORD = re.compile(rb"[0-9A-Za-z_]+|[\x80-\xff]+")
BETWEEN_WORDS = bytes(range(128)).translate(None, b"0123456789_" + string.ascii_letters.encode())
TO_BLANKS = bytes.maketrans(BETWEEN_WORDS, b" " * len(BETWEEN_WORDS))
SHINGLE_WORDS = 5
BANDS = 24  # finds 96 % of pairs with a Jaccard similarity of 0.5, 99.6 % at 0.6
BAND_ROWS = 3
MIN_AGREEING = BANDS * BAND_ROWS // 2


class Chunk(NamedTuple):
    """One document of the corpus."""

    text: bytes  # UTF-8
    digest: bytes  # its hash, 16 bytes
    sketch: np.ndarray  # its MinHash values, uint32 [72]


class Corpus(NamedTuple):
    """The documents of a set in their order, as UTF-8, and why the rest was dropped."""

    train: list[bytes]
    val: list[bytes]
    tokenizer_text: list[bytes]
    dropped: dict[str, int]


# ==== the lock


def read_set(lock: dict[str, Any], name: str) -> dict[str, Any]:
    """What the lock states of a set; an unknown name ends the script."""
    if name not in lock["sets"]:
        names = ", ".join(f"pypi:{known}" for known in lock["sets"])
        fail(f"--source pypi:{name} is unknown; choose one of {names}")
    return lock["sets"][name]


def set_packages(lock: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The wheels of a set: those of its parts, validation among them."""
    parts = read_set(lock, name)["parts"]
    return [package for package in lock["packages"] if package["part"] in parts]


# ==== downloading


def fetch(packages: list[dict[str, Any]]) -> list[Path]:
    """The wheels in $DECODERSTACK_WHEELS or data/shards/wheels, downloaded where they are missing or damaged."""
    folder = Path(os.environ.get("DECODERSTACK_WHEELS") or WHEELS)
    missing = [wheel for wheel in packages if not sha256_matches(folder / wheel["file"], wheel["sha256"])]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        size = sum(package["size"] for package in missing)
        print(f"downloading {len(missing)} wheels ({size / 1e6:.0f} MB) with pip to {folder}")
        with ThreadPoolExecutor(4) as pool:
            done = pool.map(functools.partial(download, folder=folder), missing)
            list(tqdm(done, "wheels", len(missing), disable=None))
    return [folder / package["file"] for package in packages]


def download(package: dict[str, Any], folder: Path) -> None:
    """One wheel with pip, which compares its sha256."""
    path = folder / package["file"]
    with tempfile.TemporaryDirectory() as temporary:
        requirement = Path(temporary) / "requirements.txt"
        requirement.write_text(f"{package['name']}=={package['version']} --hash=sha256:{package['sha256']}\n")
        command = [sys.executable, "-m", "pip", "download", *PIP_FLAGS, "--dest", folder, "-r", requirement]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode or not sha256_matches(path, package["sha256"]):
        errors = re.findall(r"^ERROR: (.+)", result.stderr, re.MULTILINE) or [result.stderr]
        hint = "check the network, pip's index and the disk space, then run the same command again"
        fail(f"pip cannot download {package['file']} ({errors[-1]}); {hint}; finished downloads are kept")


# ==== reading


def read_wheel(path: Path) -> tuple[list[Chunk], Counter]:
    """The chunks of a wheel by steps 1 to 3, and how many files or chunks each rule dropped."""
    dropped: Counter = Counter()
    chunks: dict[bytes, Chunk] = {}
    hash_word.cache_clear()  # one wheel's words are few, all of them would fill the memory
    # The sha256 of the lock vouches for the archive.
    with zipfile.ZipFile(path) as wheel:
        members = [member for member in wheel.infolist() if is_text(member, dropped)]
        names = sorted(member.filename for member in members)
        files = [wheel.read(name) for name in names]
    for data in files:
        text = normalise(data)
        if text is None:
            dropped["files that are not UTF-8 text"] += 1
            continue
        if is_generated(text[:2_000]) or is_generated(text[-1_000:]):
            dropped["generated files"] += 1
            continue
        body = without_licence(text)
        if body != text:
            dropped["licences at the top of files"] += 1
        for piece in cut_chunks(body, MAX_CHUNK):
            encoded = piece.encode()
            digest = hashlib.blake2b(encoded, digest_size=16).digest()
            if len(encoded) < MIN_CHUNK:
                dropped["short chunks"] += 1
            elif is_data(encoded):
                dropped["chunks of data"] += 1
            elif digest in chunks:
                dropped["equal chunks"] += 1
            else:
                chunks[digest] = Chunk(encoded, digest, sketch(shingles(encoded)))
    return list(chunks.values()), dropped


def is_text(member: zipfile.ZipInfo, dropped: Counter) -> bool:
    """Step 1, as far as names and sizes say."""
    name = member.filename.lower()
    folders = name.split("/")[:-1]
    if not name.endswith(SUFFIXES) or folders and folders[0].endswith((".dist-info", ".data")):
        return False
    if not SKIPPED_FOLDERS.isdisjoint(folders):
        dropped["files in vendored copies and translations"] += 1
    elif SKIPPED_NAMES.search(name.rsplit("/", 1)[-1]):
        dropped["files by name"] += 1
    elif member.file_size > MAX_MEMBER:
        dropped["files over 400,000 bytes"] += 1
    else:
        return True
    return False


def normalise(data: bytes) -> str | None:
    """Step 2; None for what is not UTF-8 or holds a zero byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def is_generated(text: str) -> bool:
    """Whether the top or the end of a file says that a program wrote it."""
    # Every form has one of these words, few files have, and finding them is 20 times faster.
    lowered = text.lower()
    if "generated" not in lowered and "do not" not in lowered:
        return False
    return GENERATED.search(text) is not None


def without_licence(text: str) -> str:
    """The rest of step 2: a file without the comments at its top, if they speak of a licence."""
    comments = TOP_COMMENTS.match(text)
    if comments and LICENCE.search(comments[0]):
        return text[comments.end() :]
    return text


LETTERS = bytes([*range(65, 91), *range(97, 123), *range(128, 256)])
DIGITS = b"0123456789"
BLANKS = b"\t\n\f "
ENTRY = frozenset(b"\"'0123456789([{")  # first bytes of the entries of a table


def is_data(chunk: bytes) -> bool:
    """Whether a chunk holds a table, numbers or an encoded file rather than what a person wrote
    line by line: a line over 1,000 bytes, more than 15 % digits or less than half letters (blanks
    not counted), more than half of the lines beginning with a quote, a digit or a bracket, or more
    than half of the longer lines repeated."""
    visible = len(chunk) - count_bytes(chunk, BLANKS)
    if 100 * count_bytes(chunk, DIGITS) > 15 * visible:
        return True
    if 2 * count_bytes(chunk, LETTERS) < visible:
        return True

    lines = [line.lstrip(b" \t") for line in chunk.split(b"\n")]
    lines = [line for line in lines if line]
    entries = sum(line[0] in ENTRY for line in lines)
    if max(map(len, lines)) > 1_000 or 2 * entries > len(lines):
        return True
    longer = [line for line in lines if len(line) > 10]
    return len(longer) > 20 and 2 * len(set(longer)) < len(longer)


def count_bytes(chunk: bytes, kinds: bytes) -> int:
    """How many bytes of a chunk are among `kinds`."""
    return len(chunk) - len(chunk.translate(None, kinds))


# ==== cutting


def cut_chunks(text: str, limit: int) -> list[str]:
    """Cuts Python source into chunks of at most `limit` characters (one longer line excepted).

    Each cut is before a line, by preference a top-level def, class or decorator, then any other
    top-level statement, then the line after a blank one. Joined, the chunks give the text again.
    """
    lines = text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    ends = list(itertools.accumulate(map(len, lines)))  # characters up to the end of each line
    chunks: list[str] = []
    start = 0
    taken = 0  # characters before line `start`
    while len(text) - taken > limit:
        end = max(bisect_right(ends, taken + limit), start + 1)  # the first line that does not fit
        if end == len(lines):
            break
        # Of equally good places the last one fills the chunk best.
        cut = max(range(end, start, -1), key=lambda i: cut_quality(lines, i))
        chunks.append("".join(lines[start:cut]))
        start = cut
        taken = ends[cut - 1]
    chunks.append("".join(lines[start:]))
    return [chunk for chunk in chunks if chunk.strip()]


def cut_quality(lines: list[str], i: int) -> int:
    """How good a place before line i is for a cut: 3 best, 0 worst."""
    line = lines[i]
    if line[0] in " \t\r\n)]}#\"'" or line.startswith(("else", "elif", "except", "finally")):
        return int(not lines[i - 1].strip())
    if line.startswith(("def ", "class ", "async def ", "@")) and not lines[i - 1].startswith("@"):
        return 3
    return 2


# ==== near duplicates


@functools.cache
def hash_word(word: bytes) -> bytes:
    return hashlib.blake2b(word, digest_size=8).digest()


def mix(values: np.ndarray) -> np.ndarray:
    """Spreads every bit of uint64 values over all of them (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def split_words(text: bytes) -> list[bytes]:
    """What WORD finds in a text."""
    if text.isascii():  # nearly every text: three times faster
        return text.translate(TO_BLANKS).split()
    return WORD.findall(text)


def shingles(text: bytes) -> np.ndarray:
    """uint64 [n]: a hash for every run of five words, or one for a shorter text."""
    words = split_words(text)
    joined = b"".join(map(hash_word, words))
    hashes = np.frombuffer(joined, dtype=">u8").astype(np.uint64)
    count = max(len(words) - SHINGLE_WORDS + 1, 1)
    runs = np.zeros(count, dtype=np.uint64)
    for start in range(min(SHINGLE_WORDS, len(words))):
        runs = mix(runs + hashes[start : start + count])
    return runs


# One multiplier for each MinHash value, odd, so that it permutes the 64-bit numbers.
FACTORS = mix(np.arange(1, BANDS * BAND_ROWS + 1, dtype=np.uint64)) | np.uint64(1)


def sketch(runs: np.ndarray) -> np.ndarray:
    """MinHash, uint32 [72]: two texts agree in each value with a probability that is the shared
    part of their shingles (Jaccard similarity)."""
    products = runs[None, :] * FACTORS[:, None]
    return (products.min(axis=1) >> np.uint64(32)).astype(np.uint32)


def band_keys(sketches: np.ndarray) -> np.ndarray:
    """uint64 [n, bands]: near duplicates have at least one key in common, nearly surely."""
    bands = sketches.astype(np.uint64).reshape(len(sketches), BANDS, BAND_ROWS)
    keys = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), bands.shape[:2])
    for row in range(BAND_ROWS):
        keys = mix(keys + bands[:, :, row])
    return keys


def drop_duplicates(groups: list[list[Chunk]], dropped: Counter) -> list[list[bytes]]:
    """Step 4: the texts that stay, group by group, each in the order of the hashes."""
    groups = [sorted(group, key=lambda chunk: chunk.digest) for group in groups]
    keys = [band_keys(np.array([chunk.sketch for chunk in group])) for group in groups]
    # Nine of ten keys belong to one chunk and find nothing: buckets for them would take gigabytes.
    values, counts = np.unique(np.concatenate(keys), return_counts=True)
    shared = values[counts > 1]
    seen: set[bytes] = set()
    buckets: dict[int, list[np.ndarray]] = {}
    result = []
    for group, group_keys in zip(groups, keys, strict=True):
        kept = []
        is_shared = np.isin(group_keys, shared)
        rows = zip(group, group_keys, is_shared, strict=True)
        for chunk, row, used in tqdm(rows, "dropping duplicates", len(group), disable=None):
            if chunk.digest in seen:
                dropped["equal chunks"] += 1
                continue
            seen.add(chunk.digest)
            own_buckets = [buckets.setdefault(key, []) for key in row[used].tolist()]
            others = itertools.chain.from_iterable(own_buckets)
            if any(np.sum(chunk.sketch == other) >= MIN_AGREEING for other in others):
                dropped["near duplicates"] += 1
                continue
            kept.append(chunk.text)
            for bucket in own_buckets:
                bucket.append(chunk.sketch)
        result.append(kept)
    return result


# ==== the corpus


def make_corpus(lock: dict[str, Any], name: str, workers: int) -> Corpus:
    """Downloads and reads the wheels of a set; the documents must be those of the lock."""
    packages = set_packages(lock, name)
    paths = fetch(packages)
    parts: dict[str, list[Chunk]] = {}
    dropped: Counter = Counter()
    for package, (chunks, reasons) in zip(packages, read_all(paths, workers), strict=True):
        parts.setdefault(package["part"], []).extend(chunks)
        dropped += reasons

    val = parts.pop("val")
    train = [chunk for part in parts.values() for chunk in part]
    texts = drop_duplicates([val, train], dropped)
    tokenizer_text = texts[1]
    if name != TOKENIZER_SET:
        used = [part for part in lock["sets"][TOKENIZER_SET]["parts"] if part != "val"]
        first = [chunk for part in used for chunk in parts[part]]
        tokenizer_text = drop_duplicates([val, first], Counter())[1]
    # Whole documents up to a size in all.
    ends = np.cumsum([len(text) for text in tokenizer_text])
    tokenizer_text = tokenizer_text[: int(np.searchsorted(ends, TOKENIZER_BYTES, side="right"))]
    corpus = Corpus(texts[1], texts[0], tokenizer_text, dict(dropped))
    # The first layer; a set that the lock does not describe yet passes.
    actual = describe(corpus)
    expected = lock["sets"][name].get("documents", actual)
    if actual != expected:
        differs = f"found {actual}, expected {expected}; report it with your versions of Python and numpy"
        fail(f"the wheels of pypi:{name} match the lock, but their documents differ: {differs}")
    return corpus


def open_set(spec: str, workers: int) -> tuple[list[list[Any]], Corpus]:
    """For --source pypi:NAME: what identifies the input, and the documents."""
    name = spec.removeprefix("pypi:")
    lock = read_json(LOCK)
    corpus = make_corpus(lock, name, workers)
    print("left out:")
    for reason, count in sorted(corpus.dropped.items()):
        print(f"{count:9,} {reason}")
    files = [[package["file"], package["size"], package["sha256"]] for package in set_packages(lock, name)]
    return [[spec], *files], corpus


def read_all(paths: list[Path], workers: int) -> Iterator[tuple[list[Chunk], Counter]]:
    """read_wheel over the paths, in their order."""
    if workers == 1:
        yield from tqdm(map(read_wheel, paths), "reading wheels", len(paths), disable=None)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        yield from tqdm(pool.map(read_wheel, paths), "reading wheels", len(paths), disable=None)


def end_with_parent() -> None:
    """Ends this process when the one that started it has ended, by whatever signal."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def describe(corpus: Corpus) -> dict[str, Any]:
    """What the lock states of the documents of a set; their sha256 takes each after its length."""
    result = {}
    for split, documents in (("train", corpus.train), ("val", corpus.val)):
        digest = hashlib.sha256()
        for text in documents:
            digest.update(len(text).to_bytes(8, "little") + text)
        size = sum(map(len, documents))
        result[split] = {"documents": len(documents), "bytes": size, "sha256": digest.hexdigest()}
    return result


def compare_dataset(out: Path, name: str) -> None:
    """The layers after the documents: the first that differs from the lock ends the script."""
    expected = read_set(read_json(LOCK), name).get("dataset")
    if not expected:
        return
    actual = dataset_layers(read_dataset(out))
    hint = "install the versions in requirements.txt and rebuild it"
    if actual["tokenizer"] != expected["tokenizer"]:
        fail(f"{out} has the documents of pypi:{name}, but its tokenizer differs; {hint}")
    for path in sorted(expected["shards"] | actual["shards"]):
        if actual["shards"].get(path) != expected["shards"].get(path):
            fail(f"{out} has the documents and the tokenizer of pypi:{name}, but {path} differs; {hint}")
    print(f"{out} is pypi:{name} bit for bit (fingerprint {actual['fingerprint'][:12]})")


def dataset_layers(dataset: dict[str, Any]) -> dict[str, Any]:
    """What the lock states of a dataset directory."""
    files = dataset["files"]
    return {
        "tokens": {split: total["tokens"] for split, total in dataset["splits"].items()},
        "tokenizer": dataset["tokenizer_sha256"],
        "shards": {path: files[path]["sha256"] for path in files if path.startswith("pretrain/")},
        "fingerprint": dataset["fingerprint"],
    }


# ==== commands


def write_lock(name: str, out: Path | None, workers: int) -> None:
    """Notes the documents of a set, or, with a dataset that was built since, all the rest."""
    lock = read_json(LOCK)
    entry = read_set(lock, name)
    if out is None:
        entry.pop("documents", None)
        entry.pop("dataset", None)
        corpus = make_corpus(lock, name, workers)
        entry["documents"] = describe(corpus)
        entry["dropped"] = dict(sorted(corpus.dropped.items()))
    else:
        entry["dataset"] = dataset_layers(read_dataset(out))
    write_atomic(LOCK, [format_lock(lock).encode()])
    print(json.dumps(entry, indent=1))


def format_lock(lock: dict[str, Any]) -> str:
    """JSON with a line for each wheel."""
    packages = ",\n".join("  " + json.dumps(package) for package in lock["packages"])
    sets = json.dumps(lock["sets"], indent=1).replace("\n", "\n ")
    return f'{{\n "format": "{LOCK_FORMAT}",\n "packages": [\n{packages}\n ],\n "sets": {sets}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Rewrite what pypi_lock.json states about a set.")
    parser.add_argument("command", choices=["lock"], help="lock the documents, or the dataset if one is given")
    parser.add_argument("set", help="name of a set: p34, p100 or p400")
    parser.add_argument("data", type=Path, nargs="?", help="dataset directory, e.g. data/shards/p34")
    parser.add_argument("--workers", type=int, default=1, help="number of reading processes [%(default)s]")
    args = parser.parse_args()
    write_lock(args.set, args.data, args.workers)


if __name__ == "__main__":
    run(main)
