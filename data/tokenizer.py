"""The tokenizer: byte-level BPE, trained with rustbpe, run with tiktoken, stored as plain JSON.

    python data/tokenizer.py train --source climbmix --out tokenizer.json
    python data/tokenizer.py train --source climbmix --pattern llama3 --out tokenizer.json
    python data/tokenizer.py show --tokenizer tokenizer.json --text "Hello world"
    python data/tokenizer.py eval --tokenizer tokenizer.json --source stdlib
    python data/tokenizer.py gpt2 --out gpt2.json

tokenizer.json: {"format": "decoderstack-tokenizer-1", "pattern": split regex, "ranks": [base64 of each
token's bytes; the index is the id and the merge rank], "special_tokens": {name: id}}.
"""

import argparse
import base64
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from format import MAX_VOCAB, fail, read_json, run, sha256_file, write_json
from sources import TextSettings, add_source_flags, check_positive, clean, open_text

FORMAT = "decoderstack-tokenizer-1"
SPECIAL_TOKENS = [
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
]
# GPT-4's split pattern with one change: digits in groups of one or two instead of up to three, which spends
# fewer of a small vocabulary's entries on numbers (published for a 12-layer model: 0.965 bits per byte with
# two, 0.969 with one, 0.972 with three).
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
# As tiktoken has it for GPT-2.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# llama.cpp knows the tokenizers of these models by their patterns, and so runs models with such a tokenizer.
LLAMA3_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
PATTERNS = {
    "gpt4": PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "gpt2": GPT2_PATTERN,
}
VOCAB_SIZE = 32_768
DOC_CAP = 10_000  # characters of one document that the trainer sees, so that no single book shapes the merges
MAX_CHARS = 2_000_000_000
PIECE = 100_000  # characters of a text that is too much for the split regex at once
# A text for trying a pattern: many characters, some prose, and runs of each printable character, which a pattern
# that backtracks would split in too many ways.
TEST_TEXT = "".join(map(chr, range(0x250))) + (
    "The quick brown fox's 12,345.67 jumps\r\n\r\n  over\t\tthe lazy dog!? \u2028 \u00e9 e\u0301 "
    "\u4f60\u597d \u0417\u0434\u0440 \u0645\u0631 \U0001f600\u200d \ufffd <|bos|> "
)
TEST_TEXT += "\n\n\n\n \n".join(chr(c) * 60 for c in range(32, 127))


def train(
    documents: Iterable[str],
    vocab_size: int,
    max_chars: int = MAX_CHARS,
    doc_cap: int = DOC_CAP,
    pattern: str = PATTERN,
) -> dict:
    """Trains BPE on the first max_chars characters; returns the content of tokenizer.json. Deterministic."""
    import rustbpe

    check_vocab_size(vocab_size)
    wanted = vocab_size - len(SPECIAL_TOKENS)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(cap(documents, max_chars, doc_cap), wanted, pattern=pattern)
    pairs = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    # Two merge paths can spell the same bytes; tiktoken finds tokens by bytes, so the second would be dead.
    ranks = list(dict.fromkeys(bytes(token) for token, _ in pairs))
    if len(ranks) < wanted:
        most = len(ranks) + len(SPECIAL_TOKENS)
        fail(
            f"the text is too small for --vocab-size {vocab_size}: only {most} entries could be trained; "
            "give more text or that size"
        )
    special = {name: wanted + i for i, name in enumerate(SPECIAL_TOKENS)}
    return make_spec(pattern, ranks, special)


def pattern_name(path: str | Path) -> str:
    """The name of a tokenizer's pattern in PATTERNS, or "other"."""
    pattern = read_spec(path)[0]
    return next((name for name, known in PATTERNS.items() if known == pattern), "other")


def check_vocab_size(vocab_size: int) -> None:
    least = 256 + len(SPECIAL_TOKENS)
    if not least <= vocab_size <= MAX_VOCAB:
        fail(
            f"--vocab-size {vocab_size} is out of range: shards hold uint16 tokens; give {least} to {MAX_VOCAB}"
        )


def cap(documents: Iterable[str], max_chars: int, doc_cap: int) -> Iterator[str]:
    """The beginning of each document, until max_chars characters were given out."""
    left = max_chars
    for text in documents:
        text = text[: min(doc_cap, left)]
        left -= len(text)
        yield text
        if left <= 0:
            return


def make_spec(pattern: str, ranks: list[bytes], special: dict[str, int]) -> dict[str, Any]:
    encoded = [base64.b64encode(token).decode() for token in ranks]
    return {"format": FORMAT, "pattern": pattern, "ranks": encoded, "special_tokens": special}


def read_spec(path: str | Path) -> tuple[str, list[bytes], dict[str, int]]:
    """(pattern, ranks, special tokens) of a tokenizer.json, checked."""
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        fail(f"{path} has format {found!r}, expected {FORMAT!r}; train one with data/tokenizer.py")
    pattern, spelled, special = (value.get(key) for key in ("pattern", "ranks", "special_tokens"))
    again = "train it again with data/tokenizer.py"
    if not (isinstance(pattern, str) and isinstance(spelled, list) and isinstance(special, dict)):
        fail(f"{path} is damaged: it needs a text pattern, a list ranks and a table special_tokens; {again}")
    try:
        ranks = [base64.b64decode(text, validate=True) for text in spelled]
    except (TypeError, ValueError) as problem:
        fail(f"{path} is damaged: its ranks are not the base64 of tokens ({problem}); {again}")
    problem = ranks_problem(ranks) or special_problem(special, len(ranks))
    problem = problem or pattern_problem(pattern)
    if problem:
        fail(f"{path} is damaged: {problem}; {again}")
    return pattern, ranks, special


def ranks_problem(ranks: list[bytes]) -> str | None:
    """Tokens are not empty, all different, and every single byte is among them."""
    if b"" in ranks:
        return f"its rank {ranks.index(b'')} is empty"
    if len(set(ranks)) != len(ranks) or not {bytes([b]) for b in range(256)} <= set(ranks):
        return "its ranks must be distinct and hold the 256 single bytes"
    return None


def special_problem(special: dict[str, Any], first: int) -> str | None:
    """The special tokens have names, and their ids follow the ranks."""
    end = first + len(special)
    if end > MAX_VOCAB:
        return f"it has {end} entries, but shards hold uint16 tokens: at most {MAX_VOCAB}"
    ids = list(special.values())
    if any(type(i) is not int for i in ids) or sorted(ids) != list(range(first, end)):
        return f"its special ids must be {first} to {end - 1}, which follow the ranks"
    if not {"<|bos|>", "<|endoftext|>"} & set(special):
        return "it has no <|bos|> or <|endoftext|> token, and documents must start with one"
    # JSON can spell lone surrogates, which tiktoken does not take.
    if not all(name and name == clean(name) for name in special):
        return "a special token has no name"
    return None


def pattern_problem(pattern: str) -> str | None:
    """Whether tiktoken compiles the pattern, and every character of a text is in one of its matches.

    It is tried with a vocabulary of single bytes. The empty entry is for patterns that match nothing at some place:
    tiktoken would crash there if it did not find the empty piece.
    """
    ranks = {bytes([b]): b for b in range(256)} | {b"": 256}
    try:
        trial = tiktoken.Encoding(
            "trial", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        tokens = trial.encode_to_numpy(TEST_TEXT, allowed_special=set(), disallowed_special=())
    except ValueError as problem:
        return f"its pattern does not work ({problem})"
    if 256 in tokens or bytes(tokens.tolist()) != TEST_TEXT.encode():
        return "its pattern loses text or matches nothing at some place"
    return None


def load(path: str | Path) -> tiktoken.Encoding:
    """The tiktoken encoding of a tokenizer.json. For text use encode: it never makes specials."""
    pattern, ranks, special = read_spec(path)
    name = f"decoderstack-{sha256_file(path)[:12]}"
    mergeable = {token: rank for rank, token in enumerate(ranks)}
    return tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=mergeable, special_tokens=special
    )


def token_bytes(path: str | Path) -> np.ndarray:
    """int32 [vocabulary]: how many bytes of text each token stands for; 0 for special tokens.

    From the raw bytes, never from decoded strings: half a character decodes to U+FFFD, which is three.
    """
    _, ranks, special = read_spec(path)
    return np.array([len(token) for token in ranks] + [0] * len(special), dtype=np.int32)


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """uint16 [n]: the tokens of encode_ordinary, so special tokens spelled in the text stay text.

    encode_to_numpy with nothing allowed and nothing disallowed gives just these, but spares the list of
    Python integers (20 % faster). The split regex overflows its stack on a run of about a million blanks; a
    text with such a run is encoded in pieces, which changes only tokens at their seams.
    """
    try:
        tokens = encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
    except ValueError as problem:
        if len(text) <= PIECE:
            fail(f"the tokenizer's pattern fails on the text {text[:40]!r}... ({problem}); use another tokenizer")
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


# ==== GPT-2


def gpt2_spec(vocab_bpe: Path | None, encoder_json: Path | None) -> dict[str, Any]:
    """GPT-2's published vocabulary as tokenizer.json, from its two files or from tiktoken's copy."""
    if (vocab_bpe is None) != (encoder_json is None):
        fail("--vocab-bpe and --encoder-json belong together but one is missing; give both or neither")
    if vocab_bpe is None:
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except Exception as problem:  # tiktoken lets through whatever its HTTP client raises
            fail(
                f"tiktoken cannot fetch the gpt2 files ({type(problem).__name__}); download vocab.bpe and "
                "encoder.json of GPT-2 and give them with --vocab-bpe and --encoder-json"
            )
        ranks = [encoding.decode_single_token_bytes(i) for i in range(50256)]
        return make_spec(GPT2_PATTERN, ranks, {"<|endoftext|>": 50256})
    # The files spell each byte as one character: printable bytes as themselves, the others from U+0100 on.
    printable = [b for b in range(256) if chr(b).isprintable() and b != 32]
    others = [b for b in range(256) if b not in printable]
    to_byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    try:
        merges = vocab_bpe.read_text(encoding="utf-8").split("\n")[1:-1]  # after the version line
        ids = json.loads(encoder_json.read_text(encoding="utf-8"))
        ids.pop("<|endoftext|>", None)
        spelled = [bytes(to_byte[c] for c in token) for token in sorted(ids, key=ids.get)]
        ranks = [bytes([b]) for b in printable + others]
        ranks += [bytes(to_byte[c] for c in merge.replace(" ", "")) for merge in merges]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        fail(f"{vocab_bpe} and {encoder_json} are not GPT-2's files ({problem!r}); download them again")
    if spelled != ranks or sorted(ids.values()) != list(range(len(ranks))):
        fail(
            f"{vocab_bpe} gives {len(ranks)} tokens that are not the {len(ids)} of {encoder_json}; download both again"
        )
    return make_spec(GPT2_PATTERN, ranks, {"<|endoftext|>": len(ranks)})


# ==== measuring


def evaluate(path: str | Path, documents: Iterable[str]) -> dict[str, float]:
    """Compression on a text: bytes per token, tokens per word (fertility), seconds of encoding, and the share
    of the tokens produced that are not valid UTF-8 alone (parts of a character)."""
    encoding = load(path)
    lengths = token_bytes(path)
    counts = np.zeros(len(lengths), dtype=np.int64)
    words, seconds = 0, 0.0
    for text in documents:
        start = time.perf_counter()
        tokens = encode(encoding, text)
        seconds += time.perf_counter() - start
        counts += np.bincount(tokens, minlength=len(counts))
        words += len(text.split())
    if not counts.sum() or not words:
        fail("the source holds no text to measure on; choose another --source")
    total, size = int(counts.sum()), int(counts @ lengths)
    # Bytes that are no UTF-8 alone decode to other ones.
    is_part = [token.decode(errors="replace").encode() != token for token in read_spec(path)[1]]
    return {
        "tokens": total,
        "bytes": size,
        "bytes_per_token": size / total,
        "tokens_per_word": total / words,
        "seconds": seconds,
        "partial_utf8_share": int(counts[: len(is_part)][is_part].sum()) / total,
    }


def add_pattern_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pattern", choices=PATTERNS, help="split pattern of a new tokenizer (default gpt4)"
    )


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
    elif args.command == "eval":
        source = open_text(TextSettings.of(args))
        print(json.dumps(evaluate(args.tokenizer, getattr(source, args.split)())))
    else:
        check_vocab_size(args.vocab_size)
        start = time.perf_counter()
        documents = open_text(TextSettings.of(args)).train()
        pattern = PATTERNS[args.pattern or "gpt4"]
        spec = train(documents, args.vocab_size, args.max_chars, args.doc_cap, pattern)
        sha = write_json(args.out, spec)
        seconds = time.perf_counter() - start
        print(f"trained {args.vocab_size} entries in {seconds:.1f} s; wrote {args.out} (sha256 {sha})")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, show and measure tokenizers.")
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("train", help="train a tokenizer on a source")
    add_source_flags(p)
    add_pattern_flag(p)
    add = p.add_argument
    size = "entries, the nine special tokens included"
    add("--vocab-size", type=int, default=VOCAB_SIZE, help=size)
    add("--max-chars", type=int, default=MAX_CHARS, help="characters of text to train on")
    add("--doc-cap", type=int, default=DOC_CAP, help="characters to take of each document")
    held_out = "held-out part of local files, not trained on: 1 document in round(1 / F)"
    add("--val-fraction", type=float, default=0.01, help=held_out)
    add("--out", required=True, type=Path)

    p = commands.add_parser("show", help="print how a tokenizer splits a text")
    p.add_argument("--tokenizer", required=True, type=Path)
    p.add_argument("--text", default="Hello world! In 2026 it's 3,141,592 tokens.")

    p = commands.add_parser("eval", help="measure a tokenizer on a source's validation documents")
    add_source_flags(p)
    p.add_argument("--tokenizer", required=True, type=Path)
    p.add_argument("--split", choices=["train", "val"], default="val")

    p = commands.add_parser("gpt2", help="convert GPT-2's vocabulary")
    p.add_argument("--vocab-bpe", type=Path)
    p.add_argument("--encoder-json", type=Path)
    p.add_argument("--out", required=True, type=Path)

    args = parser.parse_args()
    if args.command in ("train", "eval"):
        check_positive(args, *(("max_chars", "doc_cap") if args.command == "train" else ()))
    return args


if __name__ == "__main__":
    run(main)
