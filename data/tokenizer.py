"""The tokenizer: byte-level BPE, trained with rustbpe, run with tiktoken, stored as plain JSON.

    python data/tokenizer.py train --source climbmix --out tokenizer.json
    python data/tokenizer.py train --source climbmix --pattern qwen2 --out tokenizer.json
    python data/tokenizer.py show --tokenizer tokenizer.json --text "Hello world"
    python data/tokenizer.py gpt2 --out gpt2.json

tokenizer.json: {"format": "decoderstack-tokenizer-1", "pattern": split regex, "ranks": [base64 of
each token's bytes; the index is the id and the merge rank], "special_tokens": {name: id}}.
"""

import argparse
import base64
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tiktoken.load
from dataset import MAX_VOCAB, check_format, fail, read_json, run, sha256_file, write_json
from sources import Source, add_source_flags, check_flags, clean

FORMAT = "decoderstack-tokenizer-1"
ROLES = ("user", "assistant", "python", "output")
SPECIAL_TOKENS = ["<|bos|>", *(f"<|{role}_{end}|>" for role in ROLES for end in ("start", "end"))]
# GPT-4's split pattern with one change: digits in groups of one or two instead of up to three,
# which spends fewer of a small vocabulary's entries on numbers (published for a 12-layer model:
# 0.965 bits per byte with two, 0.969 with one, 0.972 with three).
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
# As tiktoken has it for GPT-2.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# llama.cpp knows the tokenizers of these models by their patterns.
LLAMA3_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt4": PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
    "gpt2": GPT2_PATTERN,
}
VOCAB_SIZE = 32_768
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)  # all bytes
DOC_CAP = 10_000  # maximum characters per document to train on, so that no book shapes the merges
MAX_CHARS = 2_000_000_000
HINT = "train it again with data/tokenizer.py"
PIECE = 100_000  # characters of a text that is too much for the split regex at once


def train(documents: Iterable[str], vocab_size: int | None, pattern: str = PATTERN) -> dict:
    """Trains BPE on the first MAX_CHARS characters; returns the content of tokenizer.json.

    vocab_size None: VOCAB_SIZE, or less if the text is too small for that.
    """
    import rustbpe

    check_vocab_size(vocab_size or VOCAB_SIZE)
    num_ranks = (vocab_size or VOCAB_SIZE) - len(SPECIAL_TOKENS)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(truncate(documents, MAX_CHARS, DOC_CAP), num_ranks, pattern=pattern)
    pairs = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    # Two merge paths can spell the same bytes; for tiktoken the second would be dead.
    ranks = list(dict.fromkeys(bytes(token) for token, _ in pairs))
    if len(ranks) < num_ranks:
        limit = len(ranks) + len(SPECIAL_TOKENS)
        # A word of its own for everything in the text would teach nothing.
        fitting = max(SMALLEST_VOCAB, 2 ** (limit // 4).bit_length())
        if vocab_size:
            advice = f"use more text or a smaller size, such as {fitting}"
            fail(f"the text is too small for --vocab-size {vocab_size}: it yields only {limit} entries; {advice}")
        print(f"note: the text is small: the vocabulary has {fitting:,} entries, not {VOCAB_SIZE:,}")
        num_ranks = fitting - len(SPECIAL_TOKENS)
    special = {name: num_ranks + i for i, name in enumerate(SPECIAL_TOKENS)}
    return make_spec(pattern, ranks[:num_ranks], special)


def check_vocab_size(vocab_size: int) -> None:
    """Ends the script unless a vocabulary of this size holds all bytes and special tokens, and fits into uint16."""
    if not SMALLEST_VOCAB <= vocab_size <= MAX_VOCAB:
        fail(f"--vocab-size {vocab_size} is out of range; give {SMALLEST_VOCAB} to {MAX_VOCAB}")


def truncate(documents: Iterable[str], max_chars: int, doc_cap: int) -> Iterator[str]:
    """The beginning of each document, up to max_chars characters in all."""
    left = max_chars
    for text in documents:
        text = text[: min(doc_cap, left)]
        left -= len(text)
        yield text
        if left <= 0:
            return


def make_spec(pattern: str, ranks: list[bytes], special: dict[str, int]) -> dict[str, Any]:
    """The content of tokenizer.json."""
    encoded = [base64.b64encode(token).decode() for token in ranks]
    return {"format": FORMAT, "pattern": pattern, "ranks": encoded, "special_tokens": special}


def read_spec(path: str | Path) -> tuple[str, list[bytes], dict[str, int]]:
    """(pattern, ranks, special tokens) of a tokenizer.json, checked."""
    value = read_json(path)
    check_format(value, path, FORMAT, "train one with data/tokenizer.py")
    try:
        pattern = value["pattern"]
        special = value["special_tokens"]
        ranks = [base64.b64decode(text, validate=True) for text in value["ranks"]]
        ids = sorted(special.values())
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        fail(f"{path} is damaged ({problem!r}); {HINT}")
    end = len(ranks) + len(special)
    if end > MAX_VOCAB or ids != list(range(len(ranks), end)):
        fail(f"{path} is damaged: special ids must follow the ranks, below {MAX_VOCAB}; {HINT}")
    if not {"<|bos|>", "<|endoftext|>"} & set(special):
        fail(f"{path} has no <|bos|> or <|endoftext|> token to start documents with; {HINT}")
    return pattern, ranks, special


def load(path: str | Path) -> tiktoken.Encoding:
    """The tiktoken encoding of a tokenizer.json. For text use encode: it never makes specials."""
    pattern, ranks, special = read_spec(path)
    mergeable = {token: rank for rank, token in enumerate(ranks)}
    return tiktoken.Encoding("decoderstack", pat_str=pattern, mergeable_ranks=mergeable, special_tokens=special)


def token_bytes(path: str | Path) -> np.ndarray:
    """int32 [vocabulary]: how many bytes of text each token stands for; 0 for special tokens.

    From the raw bytes: half a character would decode to U+FFFD, which is three.
    """
    _, ranks, special = read_spec(path)
    return np.array([len(token) for token in ranks] + [0] * len(special), dtype=np.int32)


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """uint16 [n]: the tokens of encode_ordinary, so special tokens spelled in the text stay text.

    encode_to_numpy with nothing allowed and nothing disallowed gives just these, but spares the
    list of Python integers (20 % faster). The split regex overflows its stack on a run of about a
    million blanks; a text with such a run is encoded in pieces, which changes only tokens at their
    seams.
    """
    try:
        tokens = encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
    except ValueError as problem:
        if len(text) <= PIECE:
            fail(f"the pattern fails on the text {text[:40]!r}... ({problem}); use another tokenizer")
        parts = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        return np.concatenate([encode(encoding, part) for part in parts])
    return tokens.astype(np.uint16)


def special_tokens(encoding: tiktoken.Encoding) -> dict[str, int]:
    """Name -> id, in the order of the ids."""
    pairs = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
    return dict(sorted(pairs.items(), key=lambda pair: pair[1]))


def bos_id(encoding: tiktoken.Encoding) -> int:
    """The token that starts every document: <|bos|>, or <|endoftext|> for GPT-2's vocabulary."""
    special = special_tokens(encoding)
    return special.get("<|bos|>", special.get("<|endoftext|>", -1))


def describe(path: str | Path) -> dict[str, Any]:
    """What dataset.json says of a tokenizer; its pattern by the name in PATTERNS, or "other"."""
    encoding = load(path)
    pattern = read_spec(path)[0]
    return {
        "vocab_size": encoding.n_vocab,
        "pattern": next((name for name in PATTERNS if PATTERNS[name] == pattern), "other"),
        "bos_id": bos_id(encoding),
        "special_tokens": special_tokens(encoding),
    }


# ==== GPT-2


def gpt2_spec(vocab_bpe: Path | None, encoder_json: Path | None) -> dict[str, Any]:
    """GPT-2's vocabulary as tokenizer.json, from its two files or tiktoken's copy."""
    if (vocab_bpe is None) != (encoder_json is None):
        fail("--vocab-bpe and --encoder-json belong together; pass both or neither")
    if vocab_bpe is None:
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except Exception as problem:  # tiktoken lets through whatever its HTTP client raises
            way = "download GPT-2's vocab.bpe and encoder.json and pass them as --vocab-bpe and --encoder-json"
            fail(f"tiktoken cannot download the gpt2 files ({type(problem).__name__}); {way}")
        ranks = [encoding.decode_single_token_bytes(i) for i in range(50256)]
        return make_spec(GPT2_PATTERN, ranks, {"<|endoftext|>": 50256})
    try:
        ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
            str(vocab_bpe), str(encoder_json), sha256_file(vocab_bpe), sha256_file(encoder_json)
        )
    except AssertionError:
        fail(f"the tokens of {vocab_bpe} are not those of {encoder_json}; download both again")
    return make_spec(GPT2_PATTERN, sorted(ranks, key=ranks.get), {"<|endoftext|>": len(ranks)})


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a new tokenizer that pretrain.py has too."""
    add = parser.add_argument
    held_out = "held-out part of local files: 1 document in round(1 / F) (default: 0.01; 0.05 below 5 MB)"
    add("--val-fraction", metavar="F", type=float, help=held_out)
    size = f"entries, special tokens included (default: {VOCAB_SIZE}, fewer for little text)"
    add("--vocab-size", type=int, help=f"size of a new tokenizer in {size}")
    add("--pattern", choices=PATTERNS, help="split pattern of a new tokenizer (default: gpt4)")


def main() -> None:
    args = parse_arguments()
    if args.command == "show":
        encoding = load(args.tokenizer)
        text = clean(args.text)
        tokens = encode(encoding, text).tolist()
        print(" ".join(f"{i}:{encoding.decode_single_token_bytes(i)!r}" for i in tokens))
        print(f"{encoding.n_vocab} entries, {len(tokens)} tokens for {len(text.encode())} bytes")
    elif args.command == "gpt2":
        sha = write_json(args.out, gpt2_spec(args.vocab_bpe, args.encoder_json))
        print(f"wrote {args.out} (sha256 {sha})")
    else:
        start = time.perf_counter()
        documents = Source.of(args).tokenizer_text()
        pattern = PATTERNS[args.pattern or "gpt4"]
        spec = train(documents, args.vocab_size, pattern)
        sha = write_json(args.out, spec)
        seconds = time.perf_counter() - start
        entries = len(spec["ranks"]) + len(spec["special_tokens"])
        print(f"trained {entries} entries in {seconds:.1f} s: {args.out} (sha256 {sha})")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train and show tokenizers.")
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("train", help="train a tokenizer on a source")
    add_source_flags(p)
    add_training_flags(p)
    p.add_argument("--out", required=True, type=Path, help="path of the new tokenizer.json")

    p = commands.add_parser("show", help="print how a tokenizer splits a text")
    p.add_argument("--tokenizer", required=True, type=Path, help="path of a tokenizer.json")
    p.add_argument("--text", default="Hello world! In 2026 it's 3,141,592 tokens.", help="text to split")

    p = commands.add_parser("gpt2", help="convert GPT-2's vocabulary")
    p.add_argument("--vocab-bpe", type=Path, help="path of GPT-2's file (default: downloaded)")
    p.add_argument("--encoder-json", type=Path, help="path of GPT-2's file (default: downloaded)")
    p.add_argument("--out", required=True, type=Path, help="path of the new tokenizer.json")

    args = parser.parse_args()
    check_flags(args)
    return args


if __name__ == "__main__":
    run(main)
