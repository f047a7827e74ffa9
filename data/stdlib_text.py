"""The source `stdlib`: the modules of Python's standard library that people wrote, which every machine has."""

import hashlib
import platform
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pypi import MAX_CHUNK, cut_chunks

VAL_FRACTION = 0.05


def root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def identity() -> list[str]:
    """What tells that the text of `stdlib` is another one."""
    return ["stdlib", platform.python_version()]


def files() -> list[str]:
    """Sorted paths (relative to root()) of the modules that people wrote: no installed
    packages, tests, demos, character maps, or other files that are mostly generated tables."""
    skip = set("site-packages dist-packages test tests __pycache__ idlelib turtledemo _bundled".split())
    generated = {"pydoc_data/topics.py", "html/entities.py"}
    folder = root()
    names = []
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        is_made = name in generated or name.startswith("config-") or path.name.startswith("_sysconfigdata")
        if path.is_file() and not is_made and not skip & set(name.split("/")):
            names.append(name)
    return sorted(names)


def is_val_file(name: str) -> bool:
    """Whole files are held out, chosen by a hash of the path: no part of one is ever trained on."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < VAL_FRACTION * 2**64


def documents(part: str) -> Iterator[str]:
    """Chunks of the "train" or "val" files, in an order that a fixed seed shuffled."""
    chunks: list[str] = []
    for name in files():
        if is_val_file(name) != (part == "val"):
            continue
        text = (root() / name).read_text(encoding="utf-8", errors="replace")
        # Half of encodings/ are generated character maps, which hold these names.
        if name.startswith("encodings/") and ("decoding_table" in text or "decoding_map" in text):
            continue
        chunks += cut_chunks(text, MAX_CHUNK)
    random.Random(20240520).shuffle(chunks)
    return iter(chunks)
