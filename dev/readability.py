"""How long files of this repository are, beside the limits that they keep.

    python dev/readability.py              lines of a file, or of all files of a folder (wc -l)
    python dev/readability.py --check      also exits with 1 if one is beyond its limit
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What there is, and a few lines; tutorials count as runs.
LINES = {
    "train_small.py": 4230,
    "train_medium.py": 4350,
    "runs/**/*.py": 9410,
    "data/*.py": 3700,
    "records/*.py": 2400,
    "dev/*.py": 3030,
    "tests/**/*.py": 16250,
    "README.md": 190,
    "runs/tutorials/train_plain.py": 465,
}


def length(pattern: str) -> int:
    """Lines of all files of a pattern together."""
    return sum(path.read_bytes().count(b"\n") for path in ROOT.glob(pattern))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 beyond a limit")
    args = parser.parse_args()
    found = {name: length(name) for name in LINES}
    print(f"{'':32}{'lines':>8}{'limit':>8}")
    for name, lines in found.items():
        print(f"{name:32}{lines:8}{LINES[name]:8}")
    beyond = [name for name in LINES if found[name] > LINES[name]]
    for name in beyond:
        print(f"error: {name} has {found[name]} lines; the limit is {LINES[name]}", file=sys.stderr)
    return int(args.check and bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
