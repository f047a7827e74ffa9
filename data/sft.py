"""Turns conversations into token shards with loss masks, inside an existing dataset directory.

    python data/sft.py --data data/shards/mine --source chat.jsonl --source addition:2000
    python data/sft.py --data data/shards/mine --source "chat/*.parquet:0.5" --val-source val.jsonl

--source, repeatable, each with an optional :WEIGHT (2: every conversation twice; 0.5: half of them):

    PATH, GLOB, FOLDER           .jsonl (.gz, .zst), .json, .parquet: {"messages": [{"role", "content"}]},
                                 the list alone, ShareGPT's "conversations", Alpaca's "instruction"
    hf:REPO/GLOB, smol-smoltalk  the same from a Hugging Face dataset
    gsm8k:FILE                   {"question", "answer"}; <<3*4=12>> in an answer becomes a tool call
    spelling:WORDFILE[:COUNT]    COUNT (10,000) tasks: spell a word, count a letter
    addition:COUNT[:DIGITS]      COUNT sums of up to DIGITS (2) digits, column by column

Template: <|bos|>, then <|user_start|> text <|user_end|> and <|assistant_start|> text
<|assistant_end|> in turn, with nothing between them. Content is a string or a list of {"type":
"text", "text"}; an assistant's parts may also be "python", which stands between <|python_start|>
and <|python_end|>, and "python_output", between <|output_start|> and <|output_end|>. The loss mask
is 1 for what the assistant writes: its text, its python with both special tokens, and
<|assistant_end|>; not <|assistant_start|>, not the output. System and developer messages are put
before the next user message with a blank line.

It writes sft/{train,val}_000000.bin, shards as in data/dataset.py, and beside each its loss mask, NAME.mask.bin: the
same header and uint16 format, a vocabulary size of 2, and a 0 or 1 for each token (1: a target of the loss).
dataset.json then lists the files and the splits "sft_train" and "sft_val". Without --val-source, --val-fraction of the
conversations are held out before weights apply; the generated tasks hold out words and pairs of numbers. What is in
both splits is removed from training.
"""

import argparse
import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizer
from dataset import (
    fail,
    file_entry,
    group_shards,
    lock_folder,
    new_folder,
    read_dataset,
    run,
    sha256_file,
    write_shard,
)
from pretrain import SHARD_TOKENS, available_cores
from sources import (
    File,
    check_apart,
    check_flags,
    clean,
    find_files,
    in_threads,
    is_hub,
    read_lines,
    records,
)
from tqdm import tqdm

NAMED = {"smol-smoltalk": "hf:HuggingFaceTB/smol-smoltalk/data/train-*.parquet"}
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")
SPELLING_COUNT = 10_000
GENERATED = {
    "spelling": r"(?P<file>.+?)(:(?P<count>[1-9][0-9]{0,7}))?",
    "addition": r"(?P<count>[1-9][0-9]{0,7})(:(?P<digits>[1-9]|1[0-8]))?",
}
SPECIAL_OF_PART = {  # the special tokens around a part of an assistant's message
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}
BATCH = 64  # conversations given to a thread at once

Part = tuple[str, str]  # (type, text) of a piece of an assistant's message
Message = tuple[str, list[Part]]  # (role, parts); a user's message has one text part


# ==== conversations


def find_messages(value: Any) -> Any:
    """The list of {"role", "content"} in the forms that datasets have: see the top."""
    if not isinstance(value, dict):
        return value
    if value.get("instruction") is not None and value.get("output") is not None:
        question = "\n\n".join(text for text in (value["instruction"], value.get("input")) if text)
        return conversation(question, value["output"])["messages"]
    if value.get("conversations") is not None:
        names = {"human": "user", "gpt": "assistant"}
        turns = [(turn.get("from"), turn.get("value")) for turn in value["conversations"]]
        return [{"role": names.get(name, name), "content": text} for name, text in turns]
    return value.get("messages")


def check_messages(value: Any) -> list[Message]:
    """A conversation in its plain form; ValueError with what is wrong with it."""
    try:
        messages = find_messages(value)
    except (AttributeError, TypeError):  # parts that are no dict or text
        messages = None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        forms = '"messages" of {"role", "content"}, "conversations" of {"from", "value"}, "instruction" and "output"'
        found = f"found: {', '.join(list(value)[:9])}" if isinstance(value, dict) else "found no object"
        raise ValueError(f"it has none of {forms} ({found})")
    result: list[Message] = []
    system: list[str] = []  # texts for the next message of the user
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        where = f"message {number}"
        if role in ("system", "developer"):
            text = "".join(text for _, text in check_content(content, role, where))
            system += [text] if text.strip() else []
            continue
        expected = ("user", "assistant")[len(result) % 2]
        if role != expected:
            actual = role if isinstance(role, str) else None
            raise ValueError(f"{where} has the role {actual!r}, expected {expected!r}, since roles alternate")
        parts = check_content(content, role, where)
        if role == "user":
            parts = [("text", "\n\n".join([*system, "".join(text for _, text in parts)]))]
            system = []
        result.append((role, parts))
    if len(result) < 2:
        raise ValueError("it has no answer by the assistant")
    if system:
        raise ValueError("it has a system message after the last user message")
    return result


def check_content(content: Any, role: str, where: str) -> list[Part]:
    """The parts of a message; ValueError with what is wrong with it."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"{where} ({role}) has content that is not text")
    kinds = ("text", *SPECIAL_OF_PART) if role == "assistant" else ("text",)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} ({role}) has a part that is not {' or '.join(kinds)}")
        parts.append((kind, clean(part["text"])))
    if role in ("user", "assistant") and not any(text.strip() for _, text in parts):
        raise ValueError(f"{where} ({role}) is empty")
    return parts


def render(
    messages: list[Message], encode: Callable[[str], np.ndarray], ids: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint16 [n], loss mask bool [n]) of a conversation, by the template at the top."""
    pieces: list[tuple[Sequence[int], bool]] = [([ids["<|bos|>"]], False)]  # tokens, and whether they are targets
    for role, parts in messages:
        is_assistant = role == "assistant"
        pieces.append(([ids[f"<|{role}_start|>"]], False))
        for kind, text in parts:
            is_target = is_assistant and kind != "python_output"
            tokens = encode(text)
            if kind != "text":
                start, end = SPECIAL_OF_PART[kind]
                tokens = [ids[start], *tokens, ids[end]]
            pieces.append((tokens, is_target))
        pieces.append(([ids[f"<|{role}_end|>"]], is_assistant))
    mask = np.repeat([is_target for _, is_target in pieces], [len(tokens) for tokens, _ in pieces])
    return np.concatenate([tokens for tokens, _ in pieces]).astype(np.uint16), mask


# ==== sources

# Where it stands, what was read or None, and what is wrong with it or "".
Record = tuple[str, Any, str]


@dataclass(frozen=True)
class ChatSource:
    """A --source or --val-source: files, or tasks that are generated for a split."""

    name: str  # for dataset.json, without folders
    weight: float = 1.0
    files: tuple[File, ...] = ()
    is_gsm8k: bool = False
    tasks: Callable[[str], Iterator[dict[str, Any]]] | None = None  # conversations, from "train" or "val"

    def read(self, split: str) -> Iterator[Record]:
        """Every record, of tasks those of a split."""
        for file in self.files:
            yield from records(file.fetch(), ("question", "answer") if self.is_gsm8k else ())
        if self.tasks:
            for number, task in enumerate(self.tasks(split), 1):
                yield f"task {number}", task, ""


def parse_source(spec: str, flag: str, args: argparse.Namespace) -> ChatSource:
    """Resolves a --source or --val-source; user errors end the script before anything is read."""
    kind = spec.partition(":")[0]
    if kind in GENERATED:
        return parse_generated(spec, flag, args)
    is_gsm8k = kind == "gsm8k"
    path, weight = re.fullmatch(r"(.*?)(?::([0-9]+\.?[0-9]*))?", spec.removeprefix("gsm8k:")).groups()
    weight = float(weight or 1)
    if not 0 < weight <= 1000:
        fail(f"{flag} {spec} has the weight {weight:g}, which must be above 0 and at most 1000")
    path = NAMED.get(path, path)
    files = tuple(find_files(path, suffixes=SUFFIXES, skip_bad=args.skip_bad))
    names = path if is_hub(path) else ",".join(file.identity[0] for file in files)
    prefix = "gsm8k:" if is_gsm8k else ""
    return ChatSource(f"{prefix}{names}:{weight:g}", weight, files, is_gsm8k)


def parse_generated(spec: str, flag: str, args: argparse.Namespace) -> ChatSource:
    """spelling:WORDFILE[:COUNT] or addition:COUNT[:DIGITS]."""
    kind, _, rest = spec.partition(":")
    match = re.fullmatch(GENERATED[kind], rest)
    if not match:
        fail(f"{flag} {spec} must be spelling:WORDFILE[:COUNT] or addition:COUNT[:DIGITS] with at most 18 digits")
    count = int(match["count"] or SPELLING_COUNT)
    # All of a --val-source is validation.
    val_count = count if flag == "--val-source" else held_out_count(count, args)
    counts = {"train": count, "val": val_count}
    if kind == "spelling":
        path = Path(match["file"])
        words = read_words(path, flag)
        tasks = lambda split: spelling_tasks(words, counts[split], split, args.seed)
        return ChatSource(f"spelling:{path.name}:{count}", tasks=tasks)
    digits = int(match["digits"] or 2)
    tasks = lambda split: addition_tasks(digits, counts[split], split, args.seed)
    return ChatSource(f"addition:{count}:{digits}", tasks=tasks)


def gsm8k_conversation(value: Any) -> dict[str, Any]:
    """A grade-school problem; a note <<expression=result>> becomes a call and its output."""
    texts = [value.get(key) if isinstance(value, dict) else None for key in ("question", "answer")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('it has no text "question" and "answer"')
    parts = []
    for i, piece in enumerate(re.split(r"<<([^<>]*)>>", texts[1])):
        is_note = i % 2 == 1
        expression, _, result = (part.strip() for part in piece.rpartition("="))
        if not is_note and piece:
            parts.append({"type": "text", "text": piece})
        elif is_note and expression and result:  # an empty note says nothing
            parts.append({"type": "python", "text": expression})
            parts.append({"type": "python_output", "text": result})
    return conversation(texts[0].strip(), parts)


def read_words(path: Path, flag: str) -> list[str]:
    """Words of a file, one a line: 2 to 20 letters, lower case."""
    if not path.is_file():
        fail(f"{flag} spelling:{path} does not exist; use a file with one word per line")
    lines = (line.decode("utf-8", "replace").strip().lower() for line in read_lines(path))
    words = list(dict.fromkeys(word for word in lines if word.isalpha() and 2 <= len(word) <= 20))
    if not any(map(is_val_word, words)) or all(map(is_val_word, words)):
        fail(f"{path} holds {len(words)} usable words, too few for both splits; give more")
    return words


def is_val_word(word: str) -> bool:
    """Every twentieth word, by its hash, is held out: no training task is about it."""
    return hashlib.sha256(word.encode()).digest()[0] < 13


SPELL = (
    "Spell the word: {w}",
    "How do you spell {w}?",
    "Spell {w} letter by letter.",
    "Please spell the word {w}",
)
COUNT = (
    "How many times does the letter {l} appear in {w}?",
    "How many {l} are in the word {w}",
    "Count the {l} in {w}.",
    "How often does {w} contain the letter {l}?",
    "Tell me the number of {l} in {w}",
    "In {w}, how many {l} are there?",
)


def spelling_tasks(words: Sequence[str], count: int, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Half of the tasks spell a word, half count a letter by hand and with the tool."""
    words = [word for word in words if is_val_word(word) == (split == "val")]
    rng = random.Random(f"{seed} {split}")  # its own stream for each split
    for i in range(count):
        word = rng.choice(words)
        quote = rng.choice(("", "", "'", '"'))
        shown = f"{quote}{word}{quote}"
        if i % 2 == 0:
            question = rng.choice(SPELL).format(w=shown)
            answer = f"{word}:{','.join(word)}"
        else:
            # One time in ten a letter that may not be there at all.
            letters = word if rng.random() < 0.9 else "abcdefghijklmnopqrstuvwxyz"
            letter = rng.choice(letters)
            question = rng.choice(COUNT).format(w=shown, l=f"{quote}{letter}{quote}")
            answer = count_letter(word, letter)
        if rng.random() < 0.3:
            question = question.lower()
        yield conversation(question, answer)


def count_letter(word: str, letter: str) -> list[dict[str, str]]:
    """An answer that counts a letter, by hand and with the tool."""
    number = 0
    lines = [f"{word}:{','.join(word)}"]
    for c in word:
        number += c == letter
        lines.append(f"{c}:{number}")
    return [
        {"type": "text", "text": "\n".join(lines) + "\n"},
        {"type": "python", "text": f"'{word}'.count('{letter}')"},
        {"type": "python_output", "text": str(number)},
        {"type": "text", "text": f"\n#### {number}"},
    ]


def conversation(question: str, answer: str | list[dict[str, str]]) -> dict[str, Any]:
    """One question and its answer, in the form of a file of conversations."""
    user = {"role": "user", "content": question}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def is_val_sum(a: int, b: int) -> bool:
    """Every fifth pair of numbers, by its hash, is held out, in both orders."""
    return hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()[0] < 51


def random_sum(rng: random.Random, digits: tuple[int, int], split: str) -> tuple[int, int]:
    """Two numbers of exactly so many digits each, of the training or of the validation part."""
    while True:
        a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in digits)
        if is_val_sum(a, b) == (split == "val"):
            return a, b


def addition_texts(a: int, b: int) -> tuple[str, str]:
    """A question, and a line for each column from the right with what is carried.

    47 + 85 gives 7+5=12, 4+8+1=13 and #### 132, as a small model can learn a column.
    """
    width = len(str(max(a, b)))
    carry = 0
    lines = []
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        total = int(x) + int(y) + carry
        lines.append(f"{x}+{y}+1={total}" if carry else f"{x}+{y}={total}")
        carry = total // 10
    return f"What is {a} + {b}?", "\n".join([*lines, f"#### {a + b}"])


def addition_tasks(digits: int, count: int, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Sums of two numbers, each with 1 to `digits` digits."""
    rng = random.Random(f"{seed} addition {split}")
    for _ in range(count):
        lengths = (rng.randint(1, digits), rng.randint(1, digits))
        yield conversation(*addition_texts(*random_sum(rng, lengths, split)))


# ==== encoding


Conversation = tuple[np.ndarray, np.ndarray]  # tokens uint16 [n], loss mask bool [n]


def encode_records(encoding: Any, is_gsm8k: bool, batch: list[Record]) -> list[tuple]:
    """(where, tokens, loss mask) of each record, or (where, what is wrong, None)."""
    ids = tokenizer.special_tokens(encoding)
    encode = partial(tokenizer.encode, encoding)
    results = []
    for where, value, problem in batch:
        try:
            if problem:
                raise ValueError(problem)
            if is_gsm8k:
                value = gsm8k_conversation(value)
            tokens, mask = render(check_messages(value), encode, ids)
            results.append((where, tokens, mask))
        except ValueError as error:
            results.append((where, str(error), None))
    return results


def encode_source(
    source: ChatSource, split: str, encoding: Any, args: argparse.Namespace, tally: Counter
) -> list[Conversation]:
    """Every conversation of a source, in its order, truncated to --max-len; tally counts what is lost."""
    stream = source.read(split)
    batches = iter(lambda: list(islice(stream, BATCH)), [])
    work = partial(encode_records, encoding, source.is_gsm8k)
    results = in_threads(work, batches, args.workers, max_pending=3 * args.workers)
    conversations = []
    bar = tqdm(chain.from_iterable(results), source.name, unit=" conversations", disable=None)
    for where, tokens, mask in bar:
        if mask is None:
            problem = tokens  # as encode_records() returns it
            if not args.skip_bad:
                fail(f"{where}: {problem}; fix it, or skip such conversations with --skip-bad")
            tally["bad"] += 1
        elif not mask[: args.max_len].any():
            # Only a question is left, which teaches nothing.
            tally["dropped"] += 1
        else:
            tally["cut"] += len(tokens) > args.max_len
            conversations.append((tokens[: args.max_len], mask[: args.max_len]))
    if not conversations:
        hint = f"check the file, or whether --max-len {args.max_len} truncates all answers"
        fail(f"{source.name} yields no conversation; {hint}")
    return conversations


def read_splits(
    sources: list[ChatSource], val_sources: list[ChatSource], encoding: Any, args: argparse.Namespace
) -> tuple[dict[str, list[Conversation]], dict[str, Counter]]:
    """The conversations of both splits in the order to write them in, and the tallies of encode_source.

    Random numbers: stream 0 for each --source, 1 for each --val-source, 2 for the order of each split.
    """
    train: list[Conversation] = []
    val: list[Conversation] = []
    tallies = {"train": Counter(), "val": Counter()}
    for i, source in enumerate(sources):
        rng = np.random.default_rng([args.seed, 0, i])
        conversations = encode_source(source, "train", encoding, args, tallies["train"])
        if not val_sources and source.tasks:
            val += encode_source(source, "val", encoding, args, tallies["val"])
        elif not val_sources:
            count = held_out_count(len(conversations), args)
            chosen = set(rng.choice(len(conversations), count, replace=False).tolist())
            val += [each for n, each in enumerate(conversations) if n in chosen]
            conversations = [each for n, each in enumerate(conversations) if n not in chosen]
        train += weigh(conversations, source.weight, rng)
    for i, source in enumerate(val_sources):
        conversations = encode_source(source, "val", encoding, args, tallies["val"])
        val += weigh(conversations, source.weight, np.random.default_rng([args.seed, 1, i]))
    held_out = {tokens.tobytes() for tokens, _ in val}
    splits = {"train": [each for each in train if each[0].tobytes() not in held_out], "val": val}
    tallies["train"]["repeated"] = len(train) - len(splits["train"])
    for i, (split, conversations) in enumerate(splits.items()):
        if not conversations:
            fail(f"no {split} conversation is left; add different ones, raise weights or use --val-source")
        np.random.default_rng([args.seed, 2, i]).shuffle(conversations)
    return splits, tallies


def held_out_count(total: int, args: argparse.Namespace) -> int:
    """How many of the conversations of a source are validation."""
    if args.val_fraction:
        return max(1, round(args.val_fraction * total))
    return max(1, round(0.01 * total), min(50, total // 20))  # 1 % of few would say little


def weigh(conversations: list[Conversation], weight: float, rng: np.random.Generator) -> list[Conversation]:
    """Each conversation int(weight) times, plus a random part of them for the fraction of the weight."""
    count = len(conversations)
    extra = rng.choice(count, round((weight - int(weight)) * count), replace=False)
    return conversations * int(weight) + [conversations[i] for i in sorted(extra)]


# ==== writing


def write_shard_and_mask(path: Path, conversations: list[Conversation], tokenizer_path: Path) -> dict[str, dict]:
    """A shard of conversations and its loss mask; returns the entries of both."""
    encoding = tokenizer.load(tokenizer_path)
    sha256 = sha256_file(tokenizer_path)
    tokens = np.concatenate([tokens for tokens, _ in conversations])
    mask = np.concatenate([mask for _, mask in conversations]).astype(np.uint16)
    mask_path = path.with_name(f"{path.stem}.mask.bin")
    shard_sha256 = write_shard(path, tokens, tokenizer.bos_id(encoding), encoding.n_vocab, sha256)
    mask_sha256 = write_shard(mask_path, mask, None, 2, sha256)
    entry = {
        "tokens": len(tokens),
        "counted_tokens": int(mask.sum()),  # the targets of the loss
        "conversations": len(conversations),
        "text_bytes": int(tokenizer.token_bytes(tokenizer_path)[tokens].sum()),
        **file_entry(path, shard_sha256),
    }
    mask_entry = {"tokens": len(mask), **file_entry(mask_path, mask_sha256)}
    return {f"sft/{path.name}": entry, f"sft/{mask_path.name}": mask_entry}


def build(args: argparse.Namespace) -> None:
    """Writes sft/ of a dataset directory."""
    out = args.data
    encoding = tokenizer.load(out / "tokenizer.json")
    missing = set(tokenizer.SPECIAL_TOKENS) - set(tokenizer.special_tokens(encoding))
    if missing:
        fail(f"the tokenizer of {out} has no {min(missing)} token; train a tokenizer that has it")
    sources = [parse_source(spec, "--source", args) for spec in args.source]
    val_sources = [parse_source(spec, "--val-source", args) for spec in args.val_source]
    # Even two of --source: each would pick its own conversations to hold out.
    check_apart(*([file.identity for file in source.files] for source in sources + val_sources))
    splits, tallies = read_splits(sources, val_sources, encoding, args)
    notes = {
        "sources": [source.name for source in sources],
        "val_sources": [source.name for source in val_sources],
        "max_len": args.max_len,
        "seed": args.seed,
    }
    for split, tally in tallies.items():
        notes[split] = {name: tally[name] for name in ("cut", "dropped", "bad")}
    with new_folder(out, "sft", sft=notes) as (folder, files):
        for split, conversations in splits.items():
            for number, shard in enumerate(group_shards(conversations, args.shard_tokens)):
                path = folder / f"{split}_{number:06d}.bin"
                files |= write_shard_and_mask(path, shard, out / "tokenizer.json")

    totals = read_dataset(out)["splits"]
    for split, tally in tallies.items():
        total = totals[f"sft_{split}"]
        supervised = total["counted_tokens"] / total["tokens"]
        print(
            f"{split}: {total['conversations']:,} conversations, {total['tokens']:,} tokens, "
            f"{supervised:.1%} supervised; {tally['cut']:,} truncated to "
            f"{args.max_len:,} tokens, {tally['dropped']:,} with no answer left and "
            f"{tally['bad']:,} bad ones skipped"
        )
    if repeated := tallies["train"]["repeated"]:
        print(f"removed from training: {repeated:,} conversations of the validation split")
    print(f"wrote {out / 'sft'}")


def main() -> None:
    args = parse_arguments()
    read_dataset(args.data)
    with lock_folder(args.data):
        build(args)


def parse_arguments() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--data", required=True, type=Path, help="dataset directory, e.g. data/shards/NAME")
    add("--source", required=True, action="extend", nargs="+", metavar="SPEC", help="conversations in a form above")
    add("--val-source", action="append", default=[], metavar="SPEC", help="validation conversations; repeatable")
    held_out = "held-out fraction without --val-source (default: 0.01, at least 50 or 5 %%)"
    add("--val-fraction", metavar="F", type=float, help=held_out)
    max_len = "maximum tokens per conversation; longer ones are truncated [%(default)s]"
    add("--max-len", type=int, default=2048, help=max_len)
    add("--skip-bad", action="store_true", help="skip malformed conversations, and count them")
    add("--seed", type=int, default=1337, help="seed of the shuffle and all random choices [%(default)s]")
    add("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens per shard [%(default)s]")
    add("--workers", type=int, default=available_cores(), help="number of encoding threads [%(default)s]")
    args = parser.parse_args()
    check_flags(args, max_len=8, shard_tokens=1, workers=1, seed=0)
    return args


if __name__ == "__main__":
    run(main)
