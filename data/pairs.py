"""Pairs of texts for runs/encoder/finetune_encoder.py, made from any corpus.

    python data/pairs.py --source "text/*.jsonl.zst" --kind title --out data/pairs/mine
    python data/pairs.py --source climbmix --max-files 2 --kind passages --out data/pairs/climbmix

--kind title      the first line of a document is the query, the beginning of the rest its positive;
                  documents whose first line is not a title (too long, or like a sentence) are skipped
--kind passages   two passages of one document that do not overlap

--source and --val-source are those of data/pretrain.py. It writes train.jsonl and val.jsonl into
--out, one {"query": TEXT, "positive": TEXT} per line. No text appears twice, and no text of
val.jsonl is in train.jsonl. The same command writes the same bytes.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from dataset import fail, run, write_atomic
from sources import Source, add_source_flags, check_flags

MAX_TITLE_WORDS = 20
MIN_WORDS = 8  # of a positive, and of the query in --kind passages


class Pair(NamedTuple):
    """A query and a text that answers it."""

    query: str
    positive: str


def title_pair(text: str, passage_words: int) -> Pair | None:
    """The first line and the beginning of the rest; None if the first line is no title."""
    title, _, rest = text.strip().partition("\n")
    title = " ".join(title.split()).lstrip("# ")
    words = rest.split()
    is_title = title and len(title.split()) <= MAX_TITLE_WORDS and not title.endswith((".", ":"))
    if not is_title or len(words) < MIN_WORDS:
        return None
    return Pair(title, " ".join(words[:passage_words]))


def passage_pair(
    text: str, query_words: int, passage_words: int, rng: random.Random
) -> Pair | None:
    """Two passages at random places; None if the document is too short for both."""
    words = text.split()
    num_others = len(words) - query_words
    if num_others < MIN_WORDS:
        return None
    # The query may stand wherever the text before it or behind it can hold a positive.
    starts = [i for i in range(num_others + 1) if max(i, num_others - i) >= MIN_WORDS]
    start = rng.choice(starts)
    before = words[:start]
    behind = words[start + query_words :]
    fitting = [part for part in (before, behind) if len(part) >= MIN_WORDS]
    part = rng.choice(fitting)
    first = rng.randint(0, max(0, len(part) - passage_words))
    query = " ".join(words[start : start + query_words])
    return Pair(query, " ".join(part[first : first + passage_words]))


def make_pairs(documents: Iterable[str], args: argparse.Namespace) -> Iterator[Pair]:
    """The pair of each document that gives one."""
    for number, text in enumerate(documents):
        if args.kind == "title":
            pair = title_pair(text, args.passage_words)
        else:
            rng = random.Random(f"{args.seed} {number}")
            pair = passage_pair(text, args.query_words, args.passage_words, rng)
        if pair:
            yield pair


def without_repeats(pairs: Iterable[Pair], seen: set[bytes]) -> Iterator[Pair]:
    """Drops pairs with a text in `seen`, which holds hashes, and adds the texts of the others to it."""
    for pair in pairs:
        keys = {hashlib.blake2b(text.lower().encode(), digest_size=16).digest() for text in pair}
        if len(keys) == 2 and not keys & seen:
            seen |= keys
            yield pair


def write_pairs(path: Path, pairs: Iterable[Pair]) -> int:
    """Writes a file and returns how many pairs it holds."""
    lines = [json.dumps(pair._asdict(), ensure_ascii=False).encode() + b"\n" for pair in pairs]
    write_atomic(path, lines)
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_source_flags(parser)
    add("--val-source", help="held-out text (default: a part of --source)")
    add("--kind", choices=("title", "passages"), default="title", help="kind of pairs [%(default)s]")
    add("--out", required=True, type=Path, help="folder for train.jsonl and val.jsonl")
    add("--max-pairs", type=int, help="maximum number of training pairs (default: all)")
    add("--val-pairs", type=int, default=1000, help="maximum number of held-out pairs [%(default)s]")
    add("--query-words", type=int, default=16, help="words of a query, with --kind passages [%(default)s]")
    add("--passage-words", type=int, default=100, help="maximum words of a positive [%(default)s]")
    add("--seed", type=int, default=0, help="seed of the choice of passages [%(default)s]")
    args = parser.parse_args()
    check_flags(args, max_pairs=1, val_pairs=1, query_words=1, passage_words=MIN_WORDS)

    source = Source.of(args)
    args.out.mkdir(parents=True, exist_ok=True)
    seen = set()
    counts = {}
    # Held-out pairs come first, so that training pairs can avoid their texts.
    splits = {"val": (source.val(), args.val_pairs), "train": (source.train(), args.max_pairs)}
    for split, (documents, max_pairs) in splits.items():
        pairs = without_repeats(make_pairs(documents, args), seen)
        first = next(pairs, None)
        if first is None:
            hint = "try --kind passages" if args.kind == "title" else "use longer documents"
            fail(f"no {split} document of {', '.join(args.source)} yields a pair of --kind {args.kind}; {hint}")
        # Training pairs of an earlier command may hold texts of the new val.jsonl.
        (args.out / "train.jsonl").unlink(missing_ok=True)
        pairs = islice(chain([first], pairs), max_pairs)
        counts[split] = write_pairs(args.out / f"{split}.jsonl", pairs)
    print(f"wrote {args.out}: {counts['train']:,} pairs to train on, {counts['val']:,} held out")


if __name__ == "__main__":
    run(main)
