"""Compares the sections that train_small.py and train_medium.py share, or copies them.

    python dev/sync.py                          a diff and exit code 1 if a shared section differs
    python dev/sync.py --to train_medium.py     copies every shared section from train_small.py

A shared section lies between `# >>> shared: NAME` and `# <<< shared: NAME`, indented or not, and is equal byte for
byte in both scripts. To add a section, write its two marker lines into both: only a person knows where it belongs.
"""

import argparse
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_small.py", "train_medium.py")
SECTION = re.compile(r"^ *# >>> shared: (\w+)\n.*?^ *# <<< shared: \1\n", re.M | re.S)
MARKER = re.compile(r"^ *# (?:>>>|<<<) shared: ", re.M)


def read(name: str) -> str:
    return (ROOT / name).read_bytes().decode("utf-8")  # bytes: line ends count


def shared(name: str) -> dict[str, str]:
    """The shared sections of a script, in order, with their marker lines."""
    text = read(name)
    sections = {match[1]: match[0] for match in SECTION.finditer(text)}
    if len(MARKER.findall(text)) != 2 * len(sections):
        sys.exit(f"error: markers in {name} do not pair; sections must not be nested, repeated or left open")
    return sections


def difference() -> list[str]:
    """A unified diff of all shared sections."""
    lines = ["".join(shared(name).values()).splitlines(keepends=True) for name in SCRIPTS]
    return list(difflib.unified_diff(*lines, *SCRIPTS))


def copy_sections(target: str) -> None:
    """Overwrites the shared sections of one script with the other's. Raises: SystemExit if their sections differ"""
    other = next(name for name in SCRIPTS if name != target)
    source = shared(other)
    if list(source) != list(shared(target)):
        lists = " and ".join(f"{name} {', '.join(shared(name))}" for name in SCRIPTS)
        sys.exit(f"error: {lists} are not the same sections in the same order; fix the marker lines of {target}")
    text = SECTION.sub(lambda match: source[match[1]], read(target))
    (ROOT / target).write_bytes(text.encode("utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", choices=SCRIPTS, help="overwrite the shared sections of this one")
    args = parser.parse_args()
    if args.to:
        copy_sections(args.to)
    lines = difference()
    sys.stdout.writelines(lines)
    for name in SCRIPTS:
        sections = shared(name).values()
        fraction = sum(text.count("\n") for text in sections) / read(name).count("\n")
        print(f"{name}: {len(sections)} shared sections, {fraction:.1%} of its lines")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
