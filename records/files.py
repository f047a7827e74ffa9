"""Files of records/ and baselines/: places, reading, writing, and how two JSON values differ."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ROOT / "baselines"


class UserError(SystemExit):
    """What the user can fix, in one sentence. Uncaught, it ends the program with exit code 1."""

    def __init__(self, message: str):
        super().__init__(f"error: {message}")
        self.message = message

    def __str__(self) -> str:
        return self.message


def raise_first(problems: list[str]) -> None:
    """Raises UserError with the first problem, if there is one."""
    if problems:
        raise UserError(problems[0])


def sha256(path: Path) -> str:
    """The hash of a file as 64 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises UserError if it cannot be read or is something else."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path.parent.name}/{path.name} cannot be read ({error})") from None


def to_json(value: dict) -> str:
    """The text of a JSON file."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_atomic(path: Path, text: str) -> None:
    """Writes a text file beside its place and moves it there, so it is never half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


class Mismatch(NamedTuple):
    """A place in a JSON value, e.g. ".runs[0].val_bpb", and the two different values found there.

    A key that one side lacks has the value "missing" there.
    """

    path: str
    expected: object
    actual: object


def diff(expected: object, actual: object, path: str = "") -> list[Mismatch]:
    """Where two JSON values differ, but for the last digits of floats."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        out = []
        for key in dict.fromkeys((*expected, *actual)):
            place = f"{path}.{key}"
            if key in expected and key in actual:
                out += diff(expected[key], actual[key], place)
            else:
                wanted = expected.get(key, "missing")
                found = actual.get(key, "missing")
                out.append(Mismatch(place, wanted, found))
        return out
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = zip(expected, actual, strict=True)
        return [found for i, pair in enumerate(pairs) for found in diff(*pair, f"{path}[{i}]")]
    same = expected == actual and isinstance(expected, bool) == isinstance(actual, bool)
    if isinstance(expected, float) and isinstance(actual, float):
        same = math.isclose(expected, actual, rel_tol=1e-9)
    return [] if same else [Mismatch(path, expected, actual)]


def mismatches(expected: object, actual: object, name: str, source: str = "the files give") -> list[str]:
    """diff() in sentences: "NAME.path is ACTUAL, SOURCE EXPECTED"."""
    return [f"{name}{path} is {found}, {source} {wanted}" for path, wanted, found in diff(expected, actual)]
