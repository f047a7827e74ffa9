"""Cuts Python source into sections, for the corpora made of it."""

from bisect import bisect_right
from itertools import accumulate


def cut_sections(text: str, limit: int) -> list[str]:
    """Cuts Python source into sections of at most `limit` characters (one longer line excepted).

    Each cut is before a line, by preference a top-level def, class or decorator, then any other top-level
    statement, then the line after a blank one. Joined, the sections give the text again.
    """
    lines = text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    ends = list(accumulate(map(len, lines)))  # characters up to the end of each line
    sections: list[str] = []
    start = 0
    taken = 0  # characters before line `start`
    while len(text) - taken > limit:
        end = max(bisect_right(ends, taken + limit), start + 1)  # the first line that does not fit
        if end == len(lines):
            break
        # Of equally good places the last one fills the section best.
        cut = max(range(end, start, -1), key=lambda i: cut_quality(lines, i))
        sections.append("".join(lines[start:cut]))
        start = cut
        taken = ends[cut - 1]
    sections.append("".join(lines[start:]))
    return [section for section in sections if section.strip()]


def cut_quality(lines: list[str], i: int) -> int:
    """How good a place before line i is for a cut: 3 best, 0 worst."""
    line = lines[i]
    if line[0] in " \t\r\n)]}#\"'" or line.startswith(("else", "elif", "except", "finally")):
        return int(not lines[i - 1].strip())
    if line.startswith(("def ", "class ", "async def ", "@")) and not lines[i - 1].startswith("@"):
        return 3
    return 2


