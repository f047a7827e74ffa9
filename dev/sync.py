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
MARKER = re.compile(r"^ *# (>>>|<<<) shared: (\w+)\n", re.M)


def split(text: str, name: str) -> list[tuple[str, str]]:
    """(section, text) pieces of a script, in order: with marker lines if shared, the section "" if not."""
    pieces = []
    start = 0
    inside = ""  # the section that is open
    seen = set()
    for match in MARKER.finditer(text):
        opens = match[1] == ">>>"
        section = match[2]
        misplaced = section != inside
        if opens:
            misplaced = bool(inside) or section in seen
        if misplaced:
            line = text.count("\n", 0, match.start()) + 1
            where = f"{name}:{line}: the marker {match[0].strip()} is out of place"
            sys.exit(f"error: {where}; sections must not be nested, repeated or closed by another name")
        # A marker line belongs to its section.
        border = match.start() if opens else match.end()
        pieces.append((inside, text[start:border]))
        start = border
        inside = section if opens else ""
        seen.add(section)
    if inside:
        sys.exit(f"error: {name}: the section {inside} is not closed; add its line # <<< shared: {inside}")
    return [*pieces, ("", text[start:])]


def read(name: str) -> list[tuple[str, str]]:
    return split((ROOT / name).read_bytes().decode("utf-8"), name)  # bytes: line ends count


def shared(pieces: list[tuple[str, str]]) -> dict[str, str]:
    return {section: text for section, text in pieces if section}


def share(pieces: list[tuple[str, str]]) -> float:
    """Which part of a script's lines is shared."""
    shared_lines = sum(text.count("\n") for section, text in pieces if section)
    return shared_lines / sum(text.count("\n") for _, text in pieces)


def difference(old: dict[str, str], new: dict[str, str], names: tuple[str, str]) -> list[str]:
    """A unified diff, section by section; also of what only one script has, or in another order."""
    if list(old) != list(new):
        old_order = [f"section {section}\n" for section in old]
        new_order = [f"section {section}\n" for section in new]
        return list(difflib.unified_diff(old_order, new_order, *names))
    lines = []
    for section, text in old.items():
        titles = [f"{name}, {section}" for name in names]
        old_lines = text.splitlines(keepends=True)
        new_lines = new[section].splitlines(keepends=True)
        lines += difflib.unified_diff(old_lines, new_lines, *titles)
    return lines


def copy_sections(pieces: dict[str, list], target: str) -> bool:
    """Overwrites the shared sections of one script with the other's; False if their sections differ."""
    other = next(name for name in SCRIPTS if name != target)
    source = shared(pieces[other])
    found = shared(pieces[target])
    if list(source) != list(found):
        sys.stdout.writelines(difference(found, source, (target, "the other script")))
        message = f"error: {target} has other sections, or in another order; fix its marker lines"
        print(message, file=sys.stderr)
        return False
    text = "".join(source.get(section, own) for section, own in pieces[target])
    (ROOT / target).write_bytes(text.encode("utf-8"))
    pieces[target] = read(target)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", choices=SCRIPTS, help="overwrite the shared sections of this one")
    args = parser.parse_args()
    pieces = {name: read(name) for name in SCRIPTS}
    if args.to and not copy_sections(pieces, args.to):
        return 1
    lines = difference(*(shared(pieces[name]) for name in SCRIPTS), SCRIPTS)
    sys.stdout.writelines(lines)
    for name in SCRIPTS:
        count = len(shared(pieces[name]))
        print(f"{name}: {count} shared sections, {share(pieces[name]):.1%} of its lines")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
