"""Scores a finetuned run on six chat tasks and gives their mean, ChatCORE.

    python runs/chat_eval.py out/RUN                                 downloads the tasks from Hugging Face
    python runs/chat_eval.py out/RUN --files FOLDER --limit 200      files of one's own, 200 drawn items of each task
    torchrun --standalone --nproc_per_node=8 runs/chat_eval.py out/RUN

    arc_easy, arc_challenge, mmlu   the most likely of the letters at the answer, scored in packs as CORE is; no text is
                                    generated; guessing: 0.25
    gsm8k        grade-school problems with the calculator; the number behind #### is compared as a number
    humaneval    Python functions, run against their tests; only with --run-code
    spelling     words that data/sft.py keeps out of training: spelled, or one letter counted

ChatCORE is the mean of (accuracy - guessing) / (1 - guessing) over the tasks that ran. Answers are the most likely
ones (temperature 0). FOLDER holds arc_easy*, arc_challenge*, mmlu*, gsm8k*, humaneval* as .jsonl, .jsonl.gz,
.jsonl.zst or .parquet with the columns of the public sets, and words*.txt, one a line; a name with "test" in it goes
before one with "val", "train" and "dev" are never used. Writes chat_eval.csv and chat_eval_samples.jsonl into the run
directory; the last line on stdout is one JSON object.

--run-code executes programs that the model wrote, each in a process with limits on time, memory and file size, in an
empty folder, and without network where Linux namespaces are allowed. This stops accidents. It is no security boundary.
"""

import argparse
import csv
import io
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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
import sft
from chat import RunError, import_script

# name: (repository, file) on Hugging Face, columns, most new tokens (0: letters), accuracy of guessing
TASKS = {
    "arc_easy": (("allenai/ai2_arc", "ARC-Easy/test-00000-of-00001.parquet"), ("question", "choices", "answerKey"),
                 0, 0.25),
    "arc_challenge": (("allenai/ai2_arc", "ARC-Challenge/test-00000-of-00001.parquet"),
                      ("question", "choices", "answerKey"), 0, 0.25),
    "mmlu": (("cais/mmlu", "all/test-00000-of-00001.parquet"), ("question", "choices", "answer"), 0, 0.25),
    "gsm8k": (("openai/gsm8k", "main/test-00000-of-00001.parquet"), ("question", "answer"), 512, 0.0),
    "humaneval": (("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"),
                  ("prompt", "test", "entry_point"), 512, 0.0),
    "spelling": (None, (), 128, 0.0),
}  # fmt: skip
SPELLING_ITEMS = 512
LETTERS = "ABCDEFGHIJ"


class Item(NamedTuple):
    """A task to answer in text."""

    question: str
    expected: str  # for the samples
    right: Callable[[str], bool]


# ---- the run


def chat_prompt(tokenizer, question: str) -> list[int]:
    """The ids of a question up to where the answer starts, as data/sft.py lays them out."""
    ids = tokenizer.specials
    return [tokenizer.bos_id, ids["<|user_start|>"], *tokenizer.encode(question), ids["<|user_end|>"],
            ids["<|assistant_start|>"]]  # fmt: skip


def check_chat_tokens(tokenizer, run_dir: Path) -> None:
    if "<|assistant_end|>" not in tokenizer.specials:
        raise RunError(f"the tokenizer of {run_dir} has no chat tokens; finetune a run whose tokenizer was made by "
                       f"data/tokenizer.py")  # fmt: skip


def complete(generator, completions: list, note: str = "") -> None:
    """Brings completions to their end, with a progress bar on a terminal."""
    with tqdm(
        total=len(completions), desc=note, disable=None if note else True, leave=False
    ) as bar:
        for events in (
            generator.run(completions, min(len(completions), generator.rows)) if completions else ()
        ):
            bar.update(sum(bool(reason) for _, _, reason in events))


def sum_over_ranks(values: np.ndarray, ranks) -> np.ndarray:
    if ranks.world == 1:
        return values
    total = torch.from_numpy(values).to(ranks.device)
    dist.all_reduce(total)
    return total.cpu().numpy()


# ---- tasks


def find_file(folder: Path, task: str) -> Path | None:
    """The file of a task: one with "test" in its name before one with "val", never training or few-shot items."""
    prefix = "words" if task == "spelling" else task
    endings = (".txt", ".txt.gz", ".txt.zst") if task == "spelling" else sft.SUFFIXES
    names = [p for p in sorted(folder.glob(f"{prefix}*")) if p.name.endswith(endings)]
    names = [p for p in names if not re.search(r"train|dev", p.name.lower())]
    return min(names, key=lambda p: ("test" not in p.name, "val" not in p.name), default=None)


def number_in(text: str) -> Decimal | None:
    """The number behind the first ####, or None: 18, 18.0, $18. and 1,800 are numbers."""
    match = re.search(r"####\s*([-+]?)\s*\$?\s*((?:[0-9][0-9,]*)?\.?[0-9]+)", text)
    return Decimal(match[1] + match[2].replace(",", "")) if match else None


def same_number(expected: str) -> Callable[[str], bool]:
    number = number_in(expected)
    if number is None:
        raise ValueError("there is no #### number in the answer")
    return lambda text: number_in(text) == number


def choice_item(value: dict[str, Any]) -> tuple[str, list[str], int]:
    """(question, choices, index of the right one) of an ARC or MMLU item."""
    choices = value["choices"]
    if isinstance(choices, dict):
        return (
            value["question"],
            list(choices["text"]),
            list(choices["label"]).index(value["answerKey"]),
        )
    return value["question"], list(choices), int(value["answer"])


def choice_question(question: str, choices: list[str]) -> str:
    """nanochat's wording: the letter behind the choice, with no blank before it, binds better in a small model."""
    lines = "\n".join(
        f"- {choice}={letter}" for choice, letter in zip(choices, LETTERS, strict=False)
    )
    return f"Multiple Choice question: {question}\n{lines}\n\nRespond only with the letter of the correct answer."


def text_item(task: str, value: dict[str, Any]) -> Item:
    if task == "gsm8k":
        return Item(
            value["question"],
            value["answer"].rpartition("####")[2].strip(),
            same_number(value["answer"]),
        )
    prompt, test, entry = value["prompt"], value["test"], value["entry_point"]
    return Item(
        prompt,
        f"{entry} passes its tests",
        lambda text: run_program(*program(prompt, text, test, entry)),
    )


def spelling_item(value: dict[str, Any]) -> Item:
    question, answer = (message["content"] for message in value["messages"])
    if isinstance(answer, str):
        return Item(question, answer, lambda text: text.strip() == answer)
    last = answer[-1]["text"]
    return Item(question, last.rpartition("####")[2].strip(), same_number(last))


def read_task(task: str, folder: Path | None, limit: int) -> list | None:
    """The items of a task, or `limit` drawn ones; None if there is no file."""
    source, columns, new_tokens, _ = TASKS[task]
    path = find_file(folder, task) if folder else None
    if not folder and source:
        import hub

        path = hub.fetch(*source)
    if path is None:
        return None
    if task == "spelling":
        count = limit or SPELLING_ITEMS
        return [
            spelling_item(value)
            for value in sft.spelling_tasks(sft.read_words(path, "--files"), count, "val", 0)
        ]
    items = []
    for where, value, problem in sft.records(path, columns):
        try:
            if problem:
                raise ValueError(problem)
            items.append(text_item(task, value) if new_tokens else choice_item(value))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{where} is no item of {task} ({error}); it needs {', '.join(columns)}"
            ) from None
    random.Random(1337).shuffle(items)  # MMLU is sorted by subject
    return items[: limit or None]


# ---- scoring


@cache
def scorer(script, model, compile: bool) -> Callable:
    """score_packed of a model, compiled once for all tasks."""

    def score(*inputs):
        return script.score_packed(model, *inputs)

    return torch.compile(score, dynamic=False, fullgraph=True) if compile else score


def score_choices(script, model, tokenizer, items: list, ranks, size: int) -> np.ndarray:
    """Whether each item is answered rightly, by the letters' logits behind <|assistant_start|>: bool (items,).

    The letters are the choices of a CORE task, whose rows have the whole prompt in common; so this is one forward over
    packed prompts. A prompt that is longer than the context loses its beginning.
    """
    letters = [tokenizer.encode(letter)[0] for letter in LETTERS]
    rows, limit = [], model.config.max_seq_len
    for question, choices, _ in items:
        prompt = chat_prompt(tokenizer, choice_question(question, choices))[-(limit - 1) :]
        rows.append([np.array([*prompt, letter], np.int32) for letter in letters[: len(choices)]])
    spans = [[(len(row) - 1, len(row)) for row in choices] for choices in rows]
    gold = np.array([item[2] for item in items])
    task = script.CoreTask("choices", "multiple_choice", 0.25, gold, rows, spans)
    score = scorer(script, model, ranks.device.type == "cuda" and model.config.compile)
    return script.score_task(
        score, task, max(size, 2 * limit), model.windows, tokenizer.bos_id, ranks
    )


def score_texts(
    script, generator, items: list[Item], new_tokens: int, ranks, note: str
) -> tuple[np.ndarray, list]:
    """Whether the most likely answer to each item is right, bool (items,), and this rank's samples.

    Questions that fill the context count as wrong.
    """
    tokenizer, limit = generator.tokenizer, generator.model.config.max_seq_len
    stop = (tokenizer.specials["<|assistant_end|>"],)
    mine, completions = list(range(ranks.rank, len(items), ranks.world)), {}
    for i in mine:
        prompt = chat_prompt(tokenizer, items[i].question)
        if (most := min(new_tokens, limit + 1 - len(prompt))) > 0:
            completions[i] = script.Completion(prompt, most, temperature=0.0, stop=stop, tools=True)
    complete(generator, [*completions.values()], note)
    texts = {i: tokenizer.decode(c.tokens) for i, c in completions.items()}
    right = np.zeros(len(items), np.int64)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // ranks.world)) as threads:
        found = threads.map(lambda i: items[i].right(texts[i]), texts)
        right[[*texts]] = list(found)
    samples = [{"question": items[i].question, "answer": texts.get(i, ""), "expected": items[i].expected,
                "right": bool(right[i])} for i in mine]  # fmt: skip
    return sum_over_ranks(right, ranks).astype(bool), samples


# ---- programs of the model

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
    """A command that starts another one without network and ends its children with it, where the system allows."""
    unshare = shutil.which("unshare")
    command = (
        unshare or "",
        "--user",
        "--map-root-user",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
    )
    if unshare and subprocess.run((*command, "true"), capture_output=True).returncode == 0:
        return command
    return ()


def program(prompt: str, answer: str, test: str, entry: str) -> tuple[str, str]:
    """A program that checks an answer, and what its last line says if all went well.

    The answer's first code block, or all of it, is the whole function behind the prompt's imports and helpers, or else
    the body that continues the prompt.
    """
    block = re.search(r"```[a-zA-Z]*[ \t]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code, nonce = block[1] if block else answer, secrets.token_hex(16)
    define = re.search(rf"^def {re.escape(entry)}\b", prompt, re.MULTILINE)
    if re.search(rf"^\s*def {re.escape(entry)}\b", code, re.MULTILINE):
        code = prompt[: define.start() if define else 0] + code
    else:
        code = prompt + code
    return f"{code}\n\n{test}\n\ncheck({entry})\nprint()\nprint({nonce!r})\n", nonce


def run_program(text: str, nonce: str) -> bool:
    """Whether a program ends well and prints the nonce last. See the text at the top: no security boundary."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        path = Path(folder, "program.py")
        path.write_text(text, encoding="utf-8", errors="replace")
        command = (*isolation(), sys.executable, "-I", "-c", RUNNER, str(path))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL, cwd=folder,
                                   env={}, start_new_session=True)  # fmt: skip
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        out.seek(0)
        return code == 0 and out.read().split(b"\n")[-2:] == [nonce.encode(), b""]


# ---- the command


def evaluate(script, model, tokenizer, args: argparse.Namespace, ranks) -> dict:
    """Scores the tasks, prints a row for each and writes the files; returns what is printed last."""

    def say(text: str) -> None:
        if ranks.is_main:
            print(text, flush=True)

    cuda = ranks.device.type == "cuda"
    size = (
        65536
        if cuda and torch.cuda.mem_get_info(ranks.device)[0] > 16 * 2**30
        else 16384
        if cuda
        else 8192
    )
    generator = script.Generator(model, tokenizer, rows=128 if cuda else 32)
    table, samples, begin = [], [], time.perf_counter()
    left_out = []
    if args.run_code and not isolation():
        say("note: programs will run with access to the network: unshare is not allowed here")
    say(f"{'task':34} {'items':>7} {'accuracy':>9} {'centered':>9} {'seconds':>8}")
    for task in TASKS:
        if args.tasks and task not in args.tasks:
            left_out.append(task)
            continue
        start, (_, _, new_tokens, guessing) = time.perf_counter(), TASKS[task]
        if task == "humaneval" and not args.run_code:
            say(
                f"{task:34} left out: it executes programs of the model; allow that with --run-code"
            )
            left_out.append(task)
            continue
        items = read_task(task, args.files, args.limit)
        if not items:
            where = f"{args.files} has no {'words*.txt' if task == 'spelling' else f'{task}* file'}"
            where = (
                where
                if args.files
                else "its word list is no Hugging Face dataset; give it with --files"
            )
            if task in args.tasks:
                raise RunError(f"{task} cannot be scored: {where}")
            say(f"{task:34} left out: {where}")
            left_out.append(task)
            continue
        if new_tokens:
            right, found = score_texts(script, generator, items, new_tokens, ranks, task)
            samples += [{"task": task, **sample} for sample in found]
        else:
            right = score_choices(script, model, tokenizer, items, ranks, size)
        accuracy = float(right.mean())
        table.append(
            (
                task,
                len(items),
                accuracy,
                (accuracy - guessing) / (1 - guessing),
                time.perf_counter() - start,
            )
        )
        say("{:34} {:7,} {:9.4f} {:9.4f} {:8.2f}".format(*table[-1]))
    if not table:
        raise RunError("no task could be scored; give files with --files")
    seconds, items = time.perf_counter() - begin, sum(row[1] for row in table)
    chatcore = sum(row[3] for row in table) / len(table)
    say(f"{'ChatCORE':34} {items:7,} {'':9} {chatcore:9.4f} {seconds:8.2f}")
    if left_out:
        say(f"note: the mean of {len(table)} tasks, without {', '.join(left_out)}")
    if ranks.is_main:
        text = io.StringIO()
        header = ("task", "items", "accuracy", "centered", "seconds")
        csv.writer(text, lineterminator="\n").writerows(
            [header, *table, ("ChatCORE", items, "", chatcore, seconds)]
        )
        script.write_atomically(args.run_dir / "chat_eval.csv", text.getvalue())
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        script.write_atomically(args.run_dir / "chat_eval_samples.jsonl", lines)
        if samples:
            say(f"answers: {args.run_dir}/chat_eval_samples.jsonl")
    return {"chatcore": chatcore, "tasks": {row[0]: row[2] for row in table}, "chat_eval_seconds": seconds,
            "run_dir": str(args.run_dir)}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Score a finetuned run on chat tasks.")
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path)
    add(
        "--files",
        type=Path,
        metavar="FOLDER",
        help="task files (default: download from Hugging Face)",
    )
    add(
        "--tasks",
        default="",
        metavar="A,B",
        help=f"some of {','.join(TASKS)} (default: all there are)",
    )
    add(
        "--limit", type=int, default=0, metavar="N", help="items of each task, drawn (default: all)"
    )
    add(
        "--run-code",
        action="store_true",
        help="execute the model's programs for humaneval; no security boundary",
    )
    add("--step", type=int, help="checkpoint to use (default: the newest)")
    args = parser.parse_args(argv)
    args.tasks = [task for task in args.tasks.split(",") if task]
    errors: tuple = (RunError,)
    try:
        if unknown := set(args.tasks) - set(TASKS):
            raise RunError(
                f"--tasks names {sorted(unknown)[0]}, which is none of {', '.join(TASKS)}"
            )
        if args.limit < 0:
            raise RunError(f"--limit {args.limit} must be at least 0")
        if args.files and not args.files.is_dir():
            raise RunError(f"--files {args.files} is no folder; name one that holds task files")
        script = import_script(args.run_dir, "Completion")
        errors = (RunError, script.UserError)
        ranks = script.start_ranks()
        model, tokenizer, _ = script.load(args.run_dir, args.step)
        check_chat_tokens(tokenizer, args.run_dir)
        with torch.no_grad():
            result = evaluate(script, model, tokenizer, args, ranks)
        if ranks.is_main:
            print(json.dumps(result), flush=True)
        return 0
    except errors as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
