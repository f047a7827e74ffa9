"""The sections that train_small.py and train_medium.py share: shows where they differ, or copies them.

    python dev/sync.py                          a diff and exit code 1 if a shared section differs
    python dev/sync.py --to train_medium.py     takes over every shared section from train_small.py

A shared section lies between `# >>> shared: NAME` and `# <<< shared: NAME`, indented or not, and is the same byte for
byte in both scripts. A new section needs its two marker lines in both, because only a person knows where it belongs.
"""

import argparse
import difflib
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_small.py", "train_medium.py")
MARKER = re.compile(r"^ *# (>>>|<<<) shared: (\w+)\n", re.M)


def split(text: str, name: str) -> list[tuple[str, str]]:
    """(section, text) pieces of a script, in order: with marker lines if shared, the section "" if not."""
    pieces, start, inside, seen = [], 0, "", set()
    for match in MARKER.finditer(text):
        kind, section = match.groups()
        if (kind == ">>>" and (inside or section in seen)) or (kind == "<<<" and section != inside):
            line = text.count("\n", 0, match.start()) + 1
            sys.exit(f"error: {name}:{line}: the marker {match[0].strip()} is out of place; sections must not be open "
                     f"twice, nested or closed by another name")  # fmt: skip
        border = match.start() if kind == ">>>" else match.end()
        pieces.append((inside, text[start:border]))
        start, inside = border, section if kind == ">>>" else ""
        seen.add(section)
    if inside:
        sys.exit(
            f"error: {name}: the section {inside} is not closed; add its line # <<< shared: {inside}"
        )
    return [*pieces, ("", text[start:])]


def read(name: str) -> list[tuple[str, str]]:
    return split((ROOT / name).read_bytes().decode("utf-8"), name)  # bytes: line ends count


def shared(pieces: list[tuple[str, str]]) -> dict[str, str]:
    return {section: text for section, text in pieces if section}


def share(pieces: list[tuple[str, str]]) -> float:
    """Which part of a script's lines is shared."""
    lines = [text.count("\n") for _, text in pieces]
    return sum(n for n, (section, _) in zip(lines, pieces, strict=True) if section) / sum(lines)


def difference(old: dict[str, str], new: dict[str, str], names: tuple[str, str]) -> list[str]:
    """A unified diff, section by section; also of what only one script has, or in another order."""
    if list(old) != list(new):
        return list(
            difflib.unified_diff(
                [f"section {s}\n" for s in old], [f"section {s}\n" for s in new], *names
            )
        )
    lines = []
    for section, text in old.items():
        titles = [f"{name}, {section}" for name in names]
        lines += difflib.unified_diff(text.splitlines(True), new[section].splitlines(True), *titles)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--to", choices=SCRIPTS, help="overwrite the shared sections of this script"
    )
    args = parser.parse_args()
    pieces = {name: read(name) for name in SCRIPTS}
    if args.to:
        source = shared(pieces[next(name for name in SCRIPTS if name != args.to)])
        if list(source) != list(shared(pieces[args.to])):
            sys.stdout.writelines(
                difference(shared(pieces[args.to]), source, (args.to, "the other script"))
            )
            print(
                f"error: {args.to} has other sections, or in another order; mend its marker lines",
                file=sys.stderr,
            )
            return 1
        text = "".join(source.get(section, own) for section, own in pieces[args.to])
        temporary = ROOT / f".{args.to}.tmp"
        temporary.write_bytes(text.encode("utf-8"))
        os.replace(temporary, ROOT / args.to)
        pieces[args.to] = read(args.to)
    lines = difference(*(shared(pieces[name]) for name in SCRIPTS), SCRIPTS)
    sys.stdout.writelines(lines)
    for name in SCRIPTS:
        print(
            f"{name}: {len(shared(pieces[name]))} shared sections, {share(pieces[name]):.1%} of its lines"
        )
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
