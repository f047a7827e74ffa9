"""Line links of "One training step" in README.md, and line counts in dev/FILES.md.

    python dev/links.py             updates them
    python dev/links.py --check     exit code 1 if any is out of date

A function named in backticks with () in that section becomes a link to its line in train_small.py. A new row of
dev/FILES.md may be written without its count.
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
                sys.exit(f"error: dev/FILES.md names {path}, which does not exist; fix the row")
            if (ROOT / path).is_file() and not path.endswith(".ipynb"):
                counts.append(f"{len((ROOT / path).read_text(encoding='utf-8').splitlines()):,}")
        return f"| {paths} | {' + '.join(counts)} | {what} |"

    return re.sub(r"^\| (`[^|]+) \|(?: [\d, +]*\|)? ([^|]+) \|$", row, section, flags=re.M)


def update_section(text: str) -> str:
    """README.md with up-to-date links."""
    before, heading, rest = text.partition("\n## One training step\n")
    section, following, after = rest.partition("\n## ")
    return before + heading + line_links(section) + following + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if something would change"
    )
    check = parser.parse_args().check
    code = 0
    for name, update in (("README.md", update_section), ("dev/FILES.md", line_counts)):
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = update(text)
        if new == text:
            print(f"{name}: up to date")
        elif check:
            print(f"{name}: out of date; run python dev/links.py")
            code = 1
        else:
            path.write_text(new, encoding="utf-8")
            print(f"{name}: updated")
    return code


if __name__ == "__main__":
    sys.exit(main())
