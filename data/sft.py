"""Conversations to token shards with loss masks, for finetuning, inside an existing dataset directory.

    python data/sft.py --data data/shards/climbmix --source chat.jsonl.zst --source gsm8k:gsm8k_train.jsonl:2
    python data/sft.py --data data/shards/mine --source smol-smoltalk --source spelling:words.txt:20000
    python data/sft.py --data data/shards/mine --source "chat/*.parquet:0.5" --val-source chat_val.jsonl

--source, repeatable, each with an optional :WEIGHT (2: every conversation twice; 0.5: every second one, drawn by
the seed; 1.5: all once and half of them again):

    PATH, GLOB, FOLDER           .jsonl, .jsonl.gz, .jsonl.zst, .parquet with {"messages": [{"role", "content"}, ...]}
    hf:REPO/GLOB, smol-smoltalk  the same from a Hugging Face dataset
    gsm8k:FILE                   {"question", "answer"}; <<3*4=12>> in an answer becomes a tool call
    spelling:WORDFILE[:COUNT]    COUNT (10,000) generated tasks: spell a word, count a letter with the tool
    addition:COUNT[:DIGITS]      COUNT generated sums of numbers with up to DIGITS (2) digits, worked column by column

Template: <|bos|>, then <|user_start|> text <|user_end|> and <|assistant_start|> text <|assistant_end|> in turn, with
nothing between them. An assistant's content is a text or a list of {"type": "text"|"python"|"python_output", "text"}:
python stands between <|python_start|> and <|python_end|>, its output between <|output_start|> and <|output_end|>. The
loss counts what the assistant writes: its text, its python with both marks, and <|assistant_end|>; not
<|assistant_start|>, not the output. A system message is put before the first user message with a blank line.
Special tokens spelled in a text stay text.

Written are sft/{train,val}_000000.bin, shards as in data/format.py, and beside each NAME.mask.bin: the same header
and uint16 format, one 0 or 1 for each token (1: the loss counts it as a target), with 2 as its vocabulary size. A
reader of the shards must leave out *.mask.bin. dataset.json then lists the files and the splits "sft_train" and
"sft_val", and states a fingerprint of shards, masks and tokenizer under "sft". Without --val-source, --val-fraction
of the conversations are held out before weights apply; the generated tasks hold out words and pairs of numbers.
"""

import argparse
import hashlib
import json
import random
import re
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizer
from format import (
    entry_of,
    fail,
    lock_folder,
    read_dataset,
    remove_leftovers,
    replace_folder,
    run,
    sha256_file,
    write_dataset,
    write_shard,
)
from pretrain import MAX_WORKERS, available_cores
from sources import check_apart, clean, hub_files, identify, local_paths, read_lines
from tqdm import tqdm

NAMED = {"smol-smoltalk": "hf:HuggingFaceTB/smol-smoltalk/data/train-*.parquet"}
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
SPELLING_COUNT = 10_000
MARKS = {
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}
MOST_TASKS = 10**8  # of a generated source
MOST_TIMES = 1000  # weight of a source
BATCH = 64  # conversations given to a thread at once
SHARD_TOKENS = 100_000_000

Part = tuple[str, str]  # (type, text) of a piece of an assistant's message
Message = tuple[str, list[Part]]  # (role, parts); a user's message has one text part


# --- conversations ----------------------------------------------------------------------------------------


def check_messages(value: Any) -> list[Message]:
    """A conversation in its plain form, the system message merged; ValueError with what is wrong with it."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('there is no list "messages"')
    result: list[Message] = []
    system = ""
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            role = None
        content = message.get("content") if isinstance(message, dict) else None
        if role == "system" and i == 0 and isinstance(content, str):
            system = clean(content)
            continue
        expected = ("user", "assistant")[len(result) % 2]
        if role != expected:
            found = role if role is None else role[:40]
            raise ValueError(f"message {i + 1} has the role {found!r}, expected {expected!r} (user and assistant take "
                             f"turns, the user first, a system message may lead)")  # fmt: skip
        if isinstance(content, str):
            parts = [("text", clean(content))]
        elif role == "assistant" and isinstance(content, list):
            parts = []
            for part in content:
                kind, text = (
                    (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
                )
                if kind not in ("text", *MARKS) or not isinstance(text, str):
                    raise ValueError(
                        f"message {i + 1} has a part that is no text, python or python_output"
                    )
                parts.append((kind, clean(text)))
        else:
            raise ValueError(f"message {i + 1} ({role}) has no text as its content")
        if not any(text.strip() for _, text in parts):
            raise ValueError(f"message {i + 1} ({role}) is empty")
        result.append((role, parts))
    if len(result) < 2:
        raise ValueError("there is no answer of the assistant")
    if system.strip():
        result[0] = ("user", [("text", f"{system}\n\n{result[0][1][0][1]}")])
    return result


def render(
    messages: list[Message], encode: Callable[[str], np.ndarray], ids: dict[str, int]
) -> tuple:
    """(tokens uint16 [n], counted bool [n]) of a conversation; the template is in the text at the top."""
    pieces: list[np.ndarray] = []
    counts: list[bool] = []

    def add(piece: str | np.ndarray, counted: bool) -> None:
        pieces.append(np.array([ids[piece]], dtype=np.uint16) if isinstance(piece, str) else piece)
        counts.append(counted)

    add("<|bos|>", False)
    for role, parts in messages:
        assistant = role == "assistant"
        add(f"<|{role}_start|>", False)
        for kind, text in parts:
            counted = assistant and kind != "python_output"
            if kind in MARKS:
                add(MARKS[kind][0], counted)
            add(encode(text), counted)
            if kind in MARKS:
                add(MARKS[kind][1], counted)
        add(f"<|{role}_end|>", assistant)
    return np.concatenate(pieces), np.repeat(counts, [len(piece) for piece in pieces])


# --- sources ----------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A --source, parsed. read(split) gives (where, conversation or None, what is wrong with it)."""

    name: str  # for dataset.json, without folders
    weight: float
    inputs: list[list[Any]]  # as sources.identify gives them
    read: Callable[[str], Iterator[tuple[str, Any, str]]]
    generated: bool = False


def parse_source(spec: str, flag: str, seed: int, val_fraction: float) -> Source:
    """Resolves a --source or --val-source; mistakes end the script before anything is read."""
    kind, colon, rest = spec.partition(":")
    if kind == "addition" and colon:
        return addition_source(rest, flag, seed, val_fraction)
    if kind not in ("gsm8k", "spelling") or not colon:
        kind, rest = "chat", spec
    path, number = rest, ""
    if match := re.fullmatch(r"(.+):(-?[0-9.]+)", rest):
        path, number = match.groups()
    try:
        weight = float(number or 1)
    except ValueError:
        weight = 0.0
    most = MOST_TASKS if kind == "spelling" else MOST_TIMES
    if not 0 < weight <= most:
        fail(
            f"{flag} {spec} has the weight {number}, which must be a number above 0 and at most {most}; 2 means "
            f"twice, 0.5 half"
        )
    if kind == "spelling":
        if weight != int(weight):
            fail(f"{flag} {spec}: the number of spelling tasks must be whole, found {number}")
        count = int(weight) if number else SPELLING_COUNT
        words = read_words(Path(path), flag)

        def generate(split: str) -> Iterator[tuple[str, Any, str]]:
            total = (
                count
                if split == "train" or flag == "--val-source"
                else max(1, round(count * val_fraction))
            )
            for i, value in enumerate(spelling_tasks(words, total, split, seed)):
                yield f"task {i + 1}", value, ""

        return Source(f"spelling:{Path(path).name}:{count}", 1.0, [], generate, True)
    name = path = NAMED.get(path, path)
    if path.startswith("hf:"):
        repo, commit, files = hub_files(path)
        inputs = [[f"{repo}/{file}", *content] for file, content in files.items()]

        def open_files() -> Iterator[Path]:
            import hub

            yield from (hub.fetch(repo, file, commit) for file in files)

    else:
        paths = local_paths(path, SUFFIXES)
        inputs = [identify(p) for p in paths]
        name = ",".join(p.name for p in paths)

        def open_files() -> Iterator[Path]:
            yield from paths

    def read(split: str) -> Iterator[tuple[str, Any, str]]:
        for file in open_files():
            for where, value, problem in records(
                file, ("question", "answer") if kind == "gsm8k" else ("messages",)
            ):
                if kind == "gsm8k" and not problem:
                    try:
                        value = gsm8k_conversation(value)
                    except ValueError as error:
                        problem = str(error)
                yield where, value, problem

    prefix = "gsm8k:" if kind == "gsm8k" else ""
    return Source(f"{prefix}{name}:{weight:g}", weight, inputs, read)


def records(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Any, str]]:
    """(where it stands, value, "" or what is wrong) for each line or row of a file."""
    if not path.name.endswith(".parquet"):
        for number, line in enumerate(read_lines(path), 1):
            if line.strip():
                try:
                    yield f"{path} line {number}", json.loads(line), ""
                except (ValueError, RecursionError) as problem:
                    yield f"{path} line {number}", None, f"it is not valid JSON ({problem})"
        return
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if missing := [c for c in columns if c not in file.schema_arrow.names]:
                fail(f"{path} has no column {missing[0]!r} (found: {', '.join(file.schema_arrow.names)}); choose a "
                     f"file of that form")  # fmt: skip
            for batch in file.iter_batches(1024, columns=list(columns)):
                for value in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", value, ""
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        fail(f"{path} is not a readable parquet file ({problem}); fetch it again")


def gsm8k_conversation(value: Any) -> dict[str, Any]:
    """A grade-school problem; a calculator note <<expression=result>> in the answer becomes a call and its output."""
    texts = [value.get(key) if isinstance(value, dict) else None for key in ("question", "answer")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('there is no text "question" and "answer"')
    parts = []
    for i, piece in enumerate(re.split(r"<<([^<>]*)>>", texts[1])):
        is_note = i % 2 == 1
        expression, _, result = (part.strip() for part in piece.rpartition("="))
        if not is_note and piece:
            parts.append({"type": "text", "text": piece})
        elif is_note and expression and result:  # an empty note says nothing
            parts.append({"type": "python", "text": expression})
            parts.append({"type": "python_output", "text": result})
    messages = [
        {"role": "user", "content": texts[0].strip()},
        {"role": "assistant", "content": parts},
    ]
    return {"messages": messages}


def read_words(path: Path, flag: str) -> list[str]:
    """Words of a file (plain, .gz or .zst), one a line: letters only, lower case, 2 to 20 of them."""
    if not path.is_file():
        fail(f"{flag} spelling:{path} does not exist; give a file with one word a line")
    lines = (line.decode("utf-8", "replace").strip().lower() for line in read_lines(path))
    words = list(dict.fromkeys(word for word in lines if word.isalpha() and 2 <= len(word) <= 20))
    if not any(map(is_val_word, words)) or all(map(is_val_word, words)):
        fail(
            f"{path} holds {len(words)} usable words, too few for a training and a validation part; give more words"
        )
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
    "How many times does the letter {l} appear in {w}?", "How many {l} are in the word {w}", "Count the {l} in {w}.",
    "How often does {w} contain the letter {l}?", "Tell me the number of {l} in {w}", "In {w}, how many {l} are there?",
)  # fmt: skip


def spelling_tasks(words: list[str], count: int, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Half of the tasks spell a word, half count a letter: by hand, then with the tool, then "#### n"."""
    words = [word for word in words if is_val_word(word) == (split == "val")]
    rng = random.Random(f"{seed} {split}")  # its own stream for each split
    for i in range(count):
        word = rng.choice(words)
        quote = rng.choice(("", "", "'", '"'))
        shown = f"{quote}{word}{quote}"
        if i % 2 == 0:
            question, answer = rng.choice(SPELL).format(w=shown), f"{word}:{','.join(word)}"
        else:
            # One time in ten a letter that may not be there at all.
            letter = (
                rng.choice(word) if rng.random() < 0.9 else rng.choice("abcdefghijklmnopqrstuvwxyz")
            )
            question = rng.choice(COUNT).format(w=shown, l=f"{quote}{letter}{quote}")
            number, lines = 0, [f"{word}:{','.join(word)}"]
            for c in word:
                number += c == letter
                lines.append(f"{c}:{number}")
            answer = [
                {"type": "text", "text": "\n".join(lines) + "\n"},
                {"type": "python", "text": f"'{word}'.count('{letter}')"},
                {"type": "python_output", "text": str(number)},
                {"type": "text", "text": f"\n#### {number}"},
            ]
        if rng.random() < 0.3:
            question = question.lower()
        yield {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }


def is_val_sum(a: int, b: int) -> bool:
    """Every fifth pair of numbers, by its hash, is held out, in both orders."""
    return hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()[0] < 51


def draw_sum(rng: random.Random, digits: int, split: str) -> tuple[int, int]:
    """Two numbers of exactly so many digits, of the training or of the validation part."""
    while True:
        a, b = (rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits) for _ in "ab")
        if is_val_sum(a, b) == (split == "val"):
            return a, b


def addition_texts(a: int, b: int) -> tuple[str, str]:
    """Question and answer: a line for each column from the right, with what is carried, then the sum.

    47 + 85 gives 7+5=12, 4+8+1=13 and #### 132. A small model learns a column; a whole sum it would have to look up.
    """
    width, carry, lines = len(str(max(a, b))), 0, []
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        total = int(x) + int(y) + carry
        lines.append(f"{x}+{y}+1={total}" if carry else f"{x}+{y}={total}")
        carry = total // 10
    return f"What is {a} + {b}?", "\n".join([*lines, f"#### {a + b}"])


def addition_source(rest: str, flag: str, seed: int, val_fraction: float) -> Source:
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,2}))?", rest)
    count, most = (int(match[1]), int(match[2] or 2)) if match else (0, 0)
    if not 1 <= count <= MOST_TASKS or not 1 <= most <= 18:
        fail(f"{flag} addition:{rest} must be addition:COUNT or addition:COUNT:DIGITS with 1 to {MOST_TASKS} tasks and "
             f"1 to 18 digits, e.g. addition:2000:2")  # fmt: skip

    def generate(split: str) -> Iterator[tuple[str, Any, str]]:
        total = (
            count
            if split == "train" or flag == "--val-source"
            else max(1, round(count * val_fraction))
        )
        rng = random.Random(f"{seed} addition {split}")
        for i in range(total):
            roles = zip(
                ("user", "assistant"),
                addition_texts(*draw_sum(rng, rng.randint(1, most), split)),
                strict=True,
            )
            yield (
                f"task {i + 1}",
                {"messages": [{"role": role, "content": text} for role, text in roles]},
                "",
            )

    return Source(f"addition:{count}:{most}", 1.0, [], generate, True)


# --- encoding ---------------------------------------------------------------------------------------------


class Pool(NamedTuple):
    """The encoded conversations of a split: tokens and counted of each, and the order to write them in."""

    tokens: list[np.ndarray]
    counted: list[np.ndarray]
    order: list[int]


def encode_source(
    source: Source, split: str, encoding: Any, args: argparse.Namespace, tally: Counter
) -> list[tuple]:
    """(tokens, counted) of every conversation of a source, in its order, cut to --max-len."""
    ids = tokenizer.special_tokens(encoding)

    def work(batch: list[tuple[str, Any, str]]) -> list[tuple]:
        done = []
        for where, value, problem in batch:
            try:
                if problem:
                    raise ValueError(problem)
                done.append(
                    (
                        where,
                        *render(
                            check_messages(value),
                            lambda text: tokenizer.encode(encoding, text),
                            ids,
                        ),
                    )
                )
            except ValueError as error:
                done.append((where, str(error), None))
        return done

    def results() -> Iterator[tuple]:
        stream, waiting = source.read(split), deque()
        # Threads are enough: the encoder, which is nearly all of the work, runs without Python's lock.
        with ThreadPoolExecutor(args.workers) as threads:
            try:
                while batch := list(islice(stream, BATCH)):
                    waiting.append(threads.submit(work, batch))
                    if len(waiting) > 2 * args.workers:
                        yield from waiting.popleft().result()
                while waiting:
                    yield from waiting.popleft().result()
            finally:
                threads.shutdown(cancel_futures=True)

    found = []
    for where, tokens, counted in tqdm(
        results(), desc=source.name, unit=" conversations", disable=None
    ):
        if counted is None:
            if not args.skip_bad:
                fail(f"{where}: {tokens}; fix it, or leave out such conversations with --skip-bad")
            tally["bad"] += 1
            continue
        if len(tokens) > args.max_len:
            tokens, counted = tokens[: args.max_len], counted[: args.max_len]
            if not counted.any():  # only a question is left, which teaches nothing
                tally["dropped"] += 1
                continue
            tally["cut"] += 1
        found.append((tokens, counted))
    if not found:
        fail(f"--source {source.name} gives no conversation; check the file")
    return found


def fill_pools(
    sources: list[Source], val_sources: list[Source], encoding: Any, args: argparse.Namespace
) -> tuple:
    """The pools of both splits and how many conversations were cut, dropped or bad in each."""
    pools = {split: Pool([], [], []) for split in ("train", "val")}
    tallies = {split: Counter() for split in pools}

    def put(split: str, found: list[tuple], weight: float, rng: np.random.Generator) -> None:
        pool, start = pools[split], len(pools[split].tokens)
        pool.tokens.extend(tokens for tokens, _ in found)
        pool.counted.extend(counted for _, counted in found)
        whole = int(weight)
        chosen = rng.choice(len(found), round((weight - whole) * len(found)), replace=False)
        pool.order.extend(
            [start + i for i in range(len(found))] * whole
            + [start + int(i) for i in sorted(chosen)]
        )

    for i, source in enumerate(sources):
        rng = np.random.default_rng([args.seed, 0, i])
        found = encode_source(source, "train", encoding, args, tallies["train"])
        if not val_sources and source.generated:
            put("val", encode_source(source, "val", encoding, args, tallies["val"]), 1.0, rng)
        elif not val_sources:
            if len(found) < 2:
                fail(
                    f"--source {source.name} gives one conversation, too few to hold one out; give --val-source"
                )
            held = set(
                rng.choice(
                    len(found), max(1, round(args.val_fraction * len(found))), replace=False
                ).tolist()
            )
            put("val", [f for j, f in enumerate(found) if j in held], 1.0, rng)
            found = [f for j, f in enumerate(found) if j not in held]
        put("train", found, source.weight, rng)
    for i, source in enumerate(val_sources):
        found = encode_source(source, "val", encoding, args, tallies["val"])
        put("val", found, source.weight, np.random.default_rng([args.seed, 1, i]))
    for i, (split, pool) in enumerate(pools.items()):
        if not pool.order:
            fail(f"the weights leave no {split} conversation; raise them")
        np.random.default_rng([args.seed, 2, i]).shuffle(pool.order)
    return pools, tallies


# --- writing ----------------------------------------------------------------------------------------------


def write_split(
    folder: Path,
    split: str,
    pool: Pool,
    shard_tokens: int,
    sha: str,
    encoding: Any,
    lengths: np.ndarray,
) -> dict[str, dict]:
    """The shards and masks of a split; returns their entries for dataset.json. No conversation lies in two shards."""
    files: dict[str, dict] = {}
    shard: list[int] = []
    size = 0

    def flush() -> None:
        name = f"{split}_{len(files) // 2:06d}"
        tokens = np.concatenate([pool.tokens[i] for i in shard])
        mask = np.concatenate([pool.counted[i] for i in shard]).astype(np.uint16)
        counts = {
            "tokens": len(tokens),
            "counted_tokens": int(mask.sum()),
            "conversations": len(shard),
            "text_bytes": int(lengths[tokens].sum()),
        }
        path = folder / f"{name}.bin"
        written = write_shard(path, tokens, tokenizer.bos_id(encoding), encoding.n_vocab, sha)
        files[f"sft/{name}.bin"] = {**counts, **entry_of(path, written)}

        path = folder / f"{name}.mask.bin"
        written = write_shard(path, mask, None, 2, sha)
        files[f"sft/{name}.mask.bin"] = {"tokens": len(mask), **entry_of(path, written)}

    for i in pool.order:
        if shard and size + len(pool.tokens[i]) > shard_tokens:
            flush()
            shard, size = [], 0
        shard.append(i)
        size += len(pool.tokens[i])
    flush()
    return files


def sum_files(files: dict[str, dict], split: str) -> dict[str, int]:
    entries = [
        e
        for path, e in files.items()
        if path.startswith(f"sft/{split}_") and not path.endswith(".mask.bin")
    ]
    return {
        key: sum(e[key] for e in entries) for key in ("tokens", "counted_tokens", "conversations")
    }


def register(out: Path, files: dict[str, dict], notes: dict[str, Any] | None) -> dict[str, Any]:
    """Replaces what dataset.json says about sft/ by these files (none: forgets them), in one rename."""
    dataset = read_dataset(out)
    dataset.pop("sft", None)
    kept = {path: entry for path, entry in dataset["files"].items() if not path.startswith("sft/")}
    splits = {
        name: split
        for name, split in dataset.get("splits", {}).items()
        if not name.startswith("sft_")
    }
    if files:
        splits |= {f"sft_{split}": sum_files(files, split) for split in ("train", "val")}
        dataset["sft"] = notes
    dataset["splits"] = splits
    dataset["files"] = {**kept, **files}
    write_dataset(out, dataset)
    return read_dataset(out)


def build(args: argparse.Namespace) -> None:
    out = args.data
    dataset = read_dataset(out)
    encoding, sha = tokenizer.load(out / "tokenizer.json"), sha256_file(out / "tokenizer.json")
    if dataset.get("tokenizer_sha256", sha) != sha:
        fail(
            f"{out}/tokenizer.json is not the one that dataset.json states; restore it or build the dataset again"
        )
    missing = set(tokenizer.SPECIAL_TOKENS) - set(tokenizer.special_tokens(encoding))
    if missing:
        fail(f"the tokenizer of {out} has no {sorted(missing)[0]} token, which conversations need; choose a dataset "
             f"whose tokenizer was made by data/tokenizer.py train")  # fmt: skip
    sources = [parse_source(spec, "--source", args.seed, args.val_fraction) for spec in args.source]
    val_sources = [
        parse_source(spec, "--val-source", args.seed, args.val_fraction) for spec in args.val_source
    ]
    # Even two of --source: each would draw its own conversations to hold out.
    check_apart(*(source.inputs for source in [*sources, *val_sources]))
    start = time.perf_counter()
    pools, tallies = fill_pools(sources, val_sources, encoding, args)
    seconds = time.perf_counter() - start
    # The new folder takes the old one's place between two states of dataset.json, both of which are true.
    new = out / ".sft.new.tmp"
    remove_leftovers(out)
    files: dict[str, dict] = {}
    lengths = tokenizer.token_bytes(out / "tokenizer.json")
    try:
        for split, pool in pools.items():
            files |= write_split(new, split, pool, args.shard_tokens, sha, encoding, lengths)
        register(out, {}, None)
        replace_folder(new, out / "sft")
    finally:
        shutil.rmtree(new, ignore_errors=True)
    tally_names = ("cut", "dropped", "bad")
    notes = {
        "sources": [s.name for s in sources], "val_sources": [s.name for s in val_sources], "max_len": args.max_len,
        "seed": args.seed, **{s: {name: tallies[s][name] for name in tally_names} for s in tallies},
    }  # fmt: skip
    splits = register(out, files, notes)["splits"]
    for split, tally in tallies.items():
        total = splits[f"sft_{split}"]
        print(f"{split}: {total['conversations']:,} conversations, {total['tokens']:,} tokens, "
              f"{total['counted_tokens']:,} of them counted ({total['counted_tokens'] / total['tokens']:.1%}); "
              f"{tally['cut']:,} cut to {args.max_len:,} tokens, {tally['dropped']:,} with no answer left, "
              f"{tally['bad']:,} bad ones left out")  # fmt: skip
    read = sum(len(tokens) for pool in pools.values() for tokens in pool.tokens)
    print(
        f"encoded {read:,} tokens in {seconds:.1f} s with {args.workers} threads ({read / seconds:,.0f} tokens/s)"
    )
    print(f"wrote {out / 'sft'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversations to token shards with loss masks.")
    add = parser.add_argument
    add(
        "--data",
        required=True,
        type=Path,
        help="dataset directory whose tokenizer is used, e.g. data/shards/NAME",
    )
    add("--source", required=True, action="append", metavar="SPEC[:WEIGHT]",
        help="file, glob, hf:REPO/GLOB, smol-smoltalk, gsm8k:FILE, spelling:WORDFILE[:COUNT], "
             "addition:COUNT[:DIGITS]; repeatable")  # fmt: skip
    add(
        "--val-source",
        action="append",
        default=[],
        metavar="SPEC[:WEIGHT]",
        help="validation; repeatable",
    )
    add("--val-fraction", type=float, default=0.01, help="held out if there is no --val-source")
    add(
        "--max-len",
        type=int,
        default=2048,
        help="most tokens of a conversation; longer ones are cut at the end",
    )
    add("--skip-bad", action="store_true", help="leave out malformed conversations, and count them")
    add("--seed", type=int, default=1337, help="of the shuffle and of all draws")
    add("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens in a shard")
    add("--workers", type=int, default=available_cores(), help="encoding threads")
    args = parser.parse_args()
    for flag, least in (("max_len", 8), ("shard_tokens", 1), ("workers", 1), ("seed", 0)):
        if getattr(args, flag) < least:
            fail(
                f"--{flag.replace('_', '-')} must be at least {least}, found {getattr(args, flag)}"
            )
    if args.workers > MAX_WORKERS:
        fail(
            f"--workers must be at most {MAX_WORKERS}, found {args.workers}; give one for each core"
        )
    if not 0 < args.val_fraction <= 0.5:
        fail(
            f"--val-fraction must lie above 0 and at most 0.5, found {args.val_fraction}; 0.01 is usual"
        )
    read_dataset(args.data)
    with lock_folder(args.data):
        build(args)


if __name__ == "__main__":
    run(main)
