"""Line links of "One training step" and line counts of the file map in README.md.

    python dev/links.py             updates them
    python dev/links.py --check     exit code 1 if any is out of date

A function named in backticks with () in that section becomes a link to its line in train_small.py. A new row of the
file map may be written without its count.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "train_small.py"


def definitions() -> dict[str, int]:
    """Line of every function, class and method of the script: "train", "GPT", "GPT.forward"."""
    lines = {}
    for node in ast.parse((ROOT / SCRIPT).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            lines |= {f"{node.name}.{method.name}": method.lineno for method in methods}
    return lines


def line_links(section: str) -> str:
    lines = definitions()

    def link(match: re.Match) -> str:
        if match[1] not in lines:
            sys.exit(
                f"error: README.md names {match[1]}(), which {SCRIPT} does not define; fix the text"
            )
        return f"[`{match[1]}()`]({SCRIPT}#L{lines[match[1]]})"

    bare = re.sub(rf"\[(`[\w.]+\(\)`)\]\({SCRIPT}#L\d+\)", r"\1", section)
    return re.sub(r"`([A-Za-z_][\w.]*)\(\)`", link, bare)


def line_counts(section: str) -> str:
    def row(match: re.Match) -> str:
        paths = match[1]
        what = match[2]
        counts = []
        for path in re.findall(r"`([^`]+)`", paths):
            if not (ROOT / path).exists():
                sys.exit(
                    f"error: the file map of README.md names {path}, which does not exist; fix the row"
                )
            if (ROOT / path).is_file() and not path.endswith(".ipynb"):
                counts.append(f"{len((ROOT / path).read_text(encoding='utf-8').splitlines()):,}")
        return f"| {paths} | {' + '.join(counts)} | {what} |"

    return re.sub(r"^\| (`[^|]+) \|(?: [\d, +]*\|)? ([^|]+) \|$", row, section, flags=re.M)


def update(text: str) -> str:
    """README.md with up-to-date links and counts."""
    for title, change in (("One training step", line_links), ("Files", line_counts)):
        before, heading, rest = text.partition(f"\n## {title}\n")
        section, following, after = rest.partition("\n## ")
        text = before + heading + change(section) + following + after
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if something would change"
    )
    check = parser.parse_args().check
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    new = update(text)
    if new == text:
        print("README.md: links and counts are up to date")
        return 0
    if check:
        print("README.md: links or counts are out of date; run python dev/links.py")
        return 1
    path.write_text(new, encoding="utf-8")
    print("README.md: links and counts updated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
