"""Code and pages use the words of the field: prefix cache, idle rows, sampled tokens, logprobs, sequence, request."""

import re

from conftest import ROOT

WORDS = re.compile(
    r"\bshel(?:f|ves)\b|\bFlight\b|\bin flight\b|\bclass Chance\b|\b[Cc]hances\b|\bCERTAIN\b"
    r"|\brest(?:ing|ed)\b|\brows? rests?\b|\bat rest\b|\badmit\w*|\buntold\b|\bdef tell\b"
    r"|\b(?:Ask|Problem)\b[(:\]]|\bclass Reader\b|\bdrawn (?:ids?|tokens?)\b|\w\.drawn\b|\bdrawn = "
    r"|^ *(?:figures|cards) = |\blargest_row\b|\brow_square\b|\breader\.position\b|\bwith larger steps\b|\bas rec\b",
    re.MULTILINE,
)
FOLDERS = ("", "runs", "runs/lib", "runs/tutorials", "runs/huggingface", "runs/encoder")
FOLDERS += ("data", "records", "dev", "tests")


def test_words_of_the_field():
    files = [path for folder in FOLDERS for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".md", ".html")]
    files = [path for path in files if path.name not in ("LOG.md", "test_words.py")]
    found = [f"{path.relative_to(ROOT)}: {word}" for path in files for word in WORDS.findall(path.read_text("utf-8"))]
    assert not found, "\n".join(found)
