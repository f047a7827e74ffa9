"""Files of records/ and baselines/: places, reading, writing, and how two JSON values differ."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

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


def diff(expected: object, actual: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Where two JSON values differ, but for the last digits of floats: (path, expected, actual).

    A path is e.g. ".runs[0].val_bpb"; a key that one side lacks has the value "missing" there.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in dict.fromkeys((*expected, *actual)):
            yield from diff(expected.get(key, "missing"), actual.get(key, "missing"), f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for i, pair in enumerate(zip(expected, actual, strict=True)):
            yield from diff(*pair, f"{path}[{i}]")
    elif isinstance(expected, float) and isinstance(actual, float):
        if not math.isclose(expected, actual, rel_tol=1e-9):
            yield path, expected, actual
    elif expected != actual or isinstance(expected, bool) != isinstance(actual, bool):
        yield path, expected, actual


def mismatches(expected: object, actual: object, name: str, source: str = "the files give") -> list[str]:
    """diff() in sentences: "NAME.path is ACTUAL, SOURCE EXPECTED"."""
    return [f"{name}{path} is {found}, {source} {wanted}" for path, wanted, found in diff(expected, actual)]
