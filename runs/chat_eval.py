"""Scores a finetuned run on up to six chat tasks, and gives the mean of all six, ChatCORE.

    python runs/chat_eval.py out/RUN                              the four of Hugging Face that run no programs
    python runs/chat_eval.py out/RUN --files FOLDER --run-code    all six, from own files
    python runs/chat_eval.py out/RUN --limit 200                  200 random items of each
    torchrun --standalone --nproc_per_node=8 runs/chat_eval.py out/RUN

    arc_easy, arc_challenge, mmlu   the most likely letter is the answer, scored in packs as CORE is
    gsm8k        grade-school problems with the calculator; the number after #### counts
    humaneval    Python functions, run against their tests; only with --run-code
    spelling     words that data/sft.py keeps out of training: to spell, or to count a letter of

ChatCORE is the mean of (accuracy - guessing) / (1 - guessing) over all six tasks, and null if one is left out. Answers
are the most likely ones (temperature 0). The table goes to chat_eval.csv and the answers to chat_eval_samples.jsonl in
the run directory; the last line on stdout is one JSON object.

FOLDER holds arc_easy*, arc_challenge*, mmlu*, gsm8k* and humaneval* as .jsonl, .jsonl.gz, .jsonl.zst or .parquet with
the columns of the public sets, and words*.txt with one word per line. A name with "test" goes before one with "val";
names with "train" or "dev" are never used.

--run-code executes programs that the model wrote, each in an empty folder with limits on time, memory and file size,
and without network where Linux namespaces are allowed. This is no security boundary: a program can read, change and
delete every file that you can, so use a container or another user. This tool executes the run's training script too.
"""

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from lib.command import RunError, run_command, say


@dataclass(frozen=True)
class Task:
    repository: str  # on Hugging Face; "": there is none
    file: str
    columns: tuple[str, ...]
    guessing: float  # accuracy
    new_tokens: int = 0  # most tokens of an answer; 0: the answer is a letter


# fmt: off
TASKS = {
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy/test-00000-of-00001.parquet",
                     ("question", "choices", "answerKey"), 0.25),
    "arc_challenge": Task("allenai/ai2_arc", "ARC-Challenge/test-00000-of-00001.parquet",
                          ("question", "choices", "answerKey"), 0.25),
    "mmlu": Task("cais/mmlu", "all/test-00000-of-00001.parquet", ("question", "choices", "answer"), 0.25),
    "gsm8k": Task("openai/gsm8k", "main/test-00000-of-00001.parquet", ("question", "answer"), 0.0, 512),
    "humaneval": Task("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet",
                      ("prompt", "test", "entry_point"), 0.0, 512),
    "spelling": Task("", "", (), 0.0, 128),
}
# fmt: on


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score a finetuned run on chat tasks.")
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="finetuned run")
    add("--files", type=Path, metavar="FOLDER", help="task files (default: downloaded)")
    add("--tasks", default="", metavar="A,B", help=f"some of {','.join(TASKS)} (default: all)")
    add("--limit", type=int, default=0, metavar="N", help="random items of a task (default: all)")
    add("--run-code", action="store_true", help="score humaneval; its programs can reach all files")
    add("--step", type=int, help="checkpoint to use (default: the newest)")
    args = parser.parse_args(argv)
    args.tasks = [task for task in args.tasks.split(",") if task]
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"--tasks names {unknown.pop()}, which is none of {', '.join(TASKS)}")
    return args


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import engine
import numpy as np
import score_core
from lib import chat_format
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
import sft

SPELLING_ITEMS = 512
LETTERS = "ABCDEFGHIJ"


@dataclass
class Item:
    """A question to answer in text."""

    question: str
    expected: str  # for the samples
    right: Callable[[str], bool]  # whether an answer is correct


@dataclass
class ChoiceItem:
    """A question to answer with a letter."""

    question: str
    choices: list[str]
    gold: int  # index of the right choice


# ==== the run


def check_chat_tokens(tokenizer, run_dir: Path) -> None:
    if chat_format.ASSISTANT_END not in tokenizer.specials:
        advice = "finetune a run whose tokenizer was made by data/tokenizer.py"
        raise RunError(f"the tokenizer of {run_dir} has no chat tokens; {advice}")


def complete(generator, completions: list, note: str = "") -> None:
    """Brings completions to their end; a note shows a progress bar on a terminal."""
    disable = None if note else True  # None: only where there is no terminal
    with tqdm(total=len(completions), desc=note, disable=disable, leave=False) as bar:
        for events in generator.run(completions):
            bar.update(sum(bool(event.reason) for event in events))


# ==== tasks


def find_file(folder: Path, task: str, part: str = "test") -> Path | None:
    """The file of a task: "test" in its name before "val", never few-shot or, but for "train", training items."""
    prefix = "words" if task == "spelling" else task
    endings = (".txt", ".txt.gz", ".txt.zst") if task == "spelling" else sft.SUFFIXES
    names = [p for p in sorted(folder.glob(f"{prefix}*")) if p.name.endswith(endings)]
    if part == "train":
        return next((p for p in names if "train" in p.name), None)
    names = [p for p in names if not re.search(r"train|dev", p.name.lower())]
    return min(names, key=lambda p: ("test" not in p.name, "val" not in p.name), default=None)


def number_in(text: str) -> Decimal | None:
    """The number after the first ####, like 18, 18.0, $18. and 1,800; or None."""
    match = re.search(r"####\s*([-+]?)\s*\$?\s*((?:[0-9][0-9,]*)?\.?[0-9]+)", text)
    return Decimal(match[1] + match[2].replace(",", "")) if match else None


def same_number(expected: str) -> Callable[[str], bool]:
    number = number_in(expected)
    if number is None:
        raise ValueError("the answer has no number after ####")
    return lambda text: number_in(text) == number


def choice_item(value: dict[str, Any]) -> ChoiceItem:
    """An item of ARC, whose choices have labels, or of MMLU."""
    choices = value["choices"]
    if isinstance(choices, dict):
        gold = list(choices["label"]).index(value["answerKey"])
        return ChoiceItem(value["question"], list(choices["text"]), gold)
    return ChoiceItem(value["question"], list(choices), int(value["answer"]))


def text_item(task: str, value: dict[str, Any]) -> Item:
    """An item of gsm8k or humaneval."""
    if task == "gsm8k":
        answer = value["answer"]
        return Item(value["question"], answer.rpartition("####")[2].strip(), same_number(answer))
    prompt = value["prompt"]
    test = value["test"]
    entry = value["entry_point"]
    right = lambda answer: run_program(*program(prompt, answer, test, entry))
    return Item(prompt, f"{entry} passes its tests", right)


def spelling_item(value: dict[str, Any]) -> Item:
    question, answer = (message["content"] for message in value["messages"])
    if isinstance(answer, str):
        return Item(question, answer, lambda text: text.strip() == answer)
    last = answer[-1]["text"]
    return Item(question, last.rpartition("####")[2].strip(), same_number(last))


def read_task(name: str, folder: Path | None, limit: int = 0, part: str = "test") -> list:
    """The items of a task, or `limit` random ones; none if there is no file. part: "test" or "train"."""
    task = TASKS[name]
    path = None
    if folder:
        path = find_file(folder, name, part)
    elif task.repository:
        import hub

        path = hub.fetch(task.repository, task.file.replace("test", part))
    if path is None:
        return []
    if name == "spelling":
        words = sft.read_words(path, "--files")
        values = sft.spelling_tasks(words, limit or SPELLING_ITEMS, "val", 0)
        return [spelling_item(value) for value in values]

    items = read_items(path, name)
    random.Random(1337).shuffle(items)  # MMLU is sorted by subject
    return items[: limit or None]


def read_items(path: Path, name: str) -> list:
    """All items in a file of a task, but not of spelling. Raises: RunError if one lacks a column"""
    task = TASKS[name]
    items = []
    for where, value, problem in sft.records(path, task.columns):
        try:
            if problem:
                raise ValueError(problem)
            items.append(text_item(name, value) if task.new_tokens else choice_item(value))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            columns = ", ".join(task.columns)
            raise RunError(f"{where} is no item of {name} ({error}); it needs {columns}") from None
    return items


# ==== scoring


def score_choices(score, model, tokenizer, items: list[ChoiceItem], ranks, size: int) -> np.ndarray:
    """Whether each item is answered correctly, by the logits of the letters: bool (items,).

    The letters are the choices of a CORE task whose rows share the whole prompt. A prompt that is longer than the
    context loses its beginning. score: as score_core.scorer makes it.
    """
    limit = model.config.max_seq_len
    letters = [tokenizer.encode(letter)[0] for letter in LETTERS]
    rows = []
    spans = []
    for item in items:
        # nanochat's wording: a letter right behind its choice binds better in a small model.
        lines = [f"- {choice}={letter}" for choice, letter in zip(item.choices, LETTERS, strict=False)]
        lines += ["", "Respond only with the letter of the correct answer."]
        question = "\n".join([f"Multiple Choice question: {item.question}", *lines])
        prompt = chat_format.question_ids(tokenizer, question)
        prompt = prompt[-(limit - 1) :]
        own = letters[: len(item.choices)]
        rows.append([np.array([*prompt, letter], np.int32) for letter in own])
        spans.append([(len(prompt), len(prompt) + 1)] * len(own))
    gold = np.array([item.gold for item in items])
    task = score_core.CoreTask("choices", "multiple_choice", 0.25, gold, rows, spans)
    size = max(size, 2 * limit)
    return score_core.score_task(score, task, size, model.windows, tokenizer.bos_id, ranks)


def score_texts(generator, items: list[Item], task: str, ranks) -> tuple[np.ndarray, list[dict]]:
    """Whether the likeliest answer to each item is correct, bool (items,), and this rank's answers.

    Questions that fill the context count as wrong.
    """
    tokenizer = generator.tokenizer
    limit = generator.model.config.max_seq_len
    stop = (tokenizer.specials[chat_format.ASSISTANT_END],)
    mine = range(ranks.rank, len(items), ranks.world)

    completions = {}
    for i in mine:
        prompt = chat_format.question_ids(tokenizer, items[i].question)
        if len(prompt) <= limit:
            options = {"max_tokens": TASKS[task].new_tokens, "temperature": 0.0, "stop": stop, "tools": True}
            completions[i] = engine.Completion(prompt, **options)
    complete(generator, list(completions.values()), task)
    answers = {i: tokenizer.decode(completion.tokens) for i, completion in completions.items()}

    right = np.zeros(len(items), np.int64)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // ranks.world)) as threads:
        found = threads.map(lambda i: items[i].right(answers[i]), answers)
        right[list(answers)] = list(found)

    samples = []
    for i in mine:
        sample = {"task": task, "question": items[i].question, "answer": answers.get(i, "")}
        samples.append(sample | {"expected": items[i].expected, "right": bool(right[i])})
    return sum(ranks.gather(right)).astype(bool), samples


# ==== programs of the model

RUNNER = """
import resource, runpy, sys
for kind, value in (("AS", 2**30), ("CPU", 5), ("FSIZE", 2**20), ("NOFILE", 64), ("NPROC", 0), ("CORE", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (value, value))
    except (ValueError, OSError, AttributeError):
        pass
runpy.run_path(sys.argv[1], run_name="__main__")
"""
TIMEOUT = 10  # seconds on the clock


@cache
def isolation() -> tuple[str, ...]:
    """A command that starts another one without network; () if the system forbids it."""
    unshare = shutil.which("unshare")
    if not unshare:
        return ()
    flags = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    works = subprocess.run((unshare, *flags, "true"), capture_output=True).returncode == 0
    return (unshare, *flags) if works else ()


def program(prompt: str, answer: str, test: str, entry: str) -> tuple[str, str]:
    """A program that checks an answer, and its last line if everything passes.

    The answer's first code block, or all of it, is either the whole function, which then follows the prompt's imports
    and helpers, or the body that continues the prompt.
    """
    nonce = secrets.token_hex(16)
    block = re.search(r"```[^\n`]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = block[1] if block else answer
    before = prompt
    if re.search(rf"^\s*def {re.escape(entry)}\b", code, re.MULTILINE):
        before = re.split(rf"^def {re.escape(entry)}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]
    code = before + code
    return f"{code}\n\n{test}\n\ncheck({entry})\nprint()\nprint({nonce!r})\n", nonce


def run_program(text: str, nonce: str) -> bool:
    """Whether a program exits with 0 and prints the nonce last. No security boundary, see above."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        path = Path(folder, "program.py")
        path.write_text(text, encoding="utf-8", errors="replace")
        command = (*isolation(), sys.executable, "-I", "-c", RUNNER, str(path))
        null = subprocess.DEVNULL
        pipes = {"stdin": null, "stdout": out, "stderr": null}
        process = subprocess.Popen(command, **pipes, cwd=folder, env={}, start_new_session=True)
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return code == 0 and out.read().split(b"\n")[-2:] == [nonce.encode(), b""]


# ==== the command


def score_tasks(run: engine.Run, ranks, args, samples: list[dict]) -> Iterator[tuple]:
    """Scores the tasks for score_core.make_table(); adds this rank's answers in text to samples. Raises: RunError"""
    cuda = ranks.device.type == "cuda"
    generator = engine.Generator(run.model, run.tokenizer, num_slots=128 if cuda else 32)
    score = score_core.scorer(run.model, compile=cuda and run.config.compile)
    size = score_core.default_batch_tokens(ranks.device)
    for name, task in TASKS.items():
        if args.tasks and name not in args.tasks:
            continue
        if name == "humaneval" and not args.run_code:
            say(f"{name:34} left out: it executes programs of the model; allow that with --run-code")
            continue
        items = read_task(name, args.files, args.limit)
        if not items:
            where = f"{args.files} has no file of it" if args.files else "it is not on Hugging Face; use --files"
            if args.tasks:
                raise RunError(f"{name} cannot be scored: {where}")
            say(f"{name:34} left out: {where}")
            continue
        if task.new_tokens:
            right, answers = score_texts(generator, items, name, ranks)
            samples += answers
        else:
            right = score_choices(score, run.model, run.tokenizer, items, ranks, size)
        yield name, right, task.guessing


def evaluate(args: argparse.Namespace) -> dict:
    """Scores the tasks and writes the files. Returns what is printed last."""
    run = engine.load_run(args.run_dir, args.step)
    ranks = run.script.start_ranks()
    check_chat_tokens(run.tokenizer, args.run_dir)
    if args.run_code and not isolation():
        say("note: programs will run with access to the network: unshare is not allowed here")
    samples = []
    rows = score_core.make_table(score_tasks(run, ranks, args, samples), "ChatCORE", len(TASKS))
    *table, total = rows
    if ranks.is_main:
        score_core.write_table(args.run_dir / "chat_eval.csv", rows)
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (args.run_dir / "chat_eval_samples.jsonl").write_text(lines, encoding="utf-8")
    if samples:
        say(f"answers: {args.run_dir}/chat_eval_samples.jsonl")
    result = {"chatcore": total.centered, "tasks": {row.task: row.accuracy for row in table}}
    return result | {"chat_eval_seconds": total.seconds, "run_dir": str(args.run_dir)}


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: evaluate(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
