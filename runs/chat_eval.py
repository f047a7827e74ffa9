"""Scores a finetuned run on up to six chat tasks, and gives the mean of all six, ChatCORE.

    python runs/chat_eval.py out/RUN                              the four of Hugging Face that run no programs
    python runs/chat_eval.py out/RUN --files FOLDER --run-code    all six, from own files
    python runs/chat_eval.py out/RUN --limit 200                  200 random examples of each
    torchrun --standalone --nproc_per_node=8 runs/chat_eval.py out/RUN

    arc_easy, arc_challenge, mmlu   the most likely letter is the answer, scored as CORE is
    gsm8k        grade-school problems with the calculator; the number after #### counts
    humaneval    Python functions, run against their tests; only with --run-code
    spelling     words that data/sft.py keeps out of training: to spell, or to count a letter of

ChatCORE is the mean of (accuracy - chance) / (1 - chance) over all six tasks, where chance is the accuracy of a random
guess; it is null if a task is skipped. Answers are greedy (temperature 0). The table goes to chat_eval.csv and the
answers to chat_eval_samples.jsonl in the run directory; --step, --limit and --tasks are added to these names. The last
line on stdout is one JSON object.

FOLDER holds arc_easy*, arc_challenge*, mmlu*, gsm8k* and humaneval* as .jsonl, .jsonl.gz, .jsonl.zst or .parquet with
the columns of the public sets, and words*.txt with one word per line. A name with "test" goes before one with "val";
names with "train" or "dev" are never used.

--run-code executes programs that the model wrote, each in an empty folder with limits on time, memory and file size,
and without network where Linux namespaces are allowed. This is not a security boundary: a program can read, change and
delete every file that you can, so use a container or another user. This tool executes the run's training script too.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.chat_tasks import TASKS, ChoiceExample, Example, cut, greedy_answers, read_task
from lib.command import RunError, run_command, say


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score a finetuned run on chat tasks.")
    add = parser.add_argument
    add("run_dir", metavar="RUN", type=Path, help="directory of a finetuned run")
    add("--files", type=Path, metavar="FOLDER", help="folder with the files of the tasks (default: downloaded)")
    add("--tasks", default="", metavar="A,B", help=f"tasks to score, from {','.join(TASKS)} (default: all)")
    add("--limit", type=int, metavar="N", help="number of random examples per task (default: all)")
    add("--run-code", action="store_true", help="score humaneval too; the programs it runs can reach all of your files")
    add("--step", type=int, metavar="N", help="step of the checkpoint to score (default: the newest)")
    args = parser.parse_args(argv)
    args.tasks = [task.strip() for task in args.tasks.split(",") if task.strip()]
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit must be at least 1, found {args.limit}")
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"--tasks lists {unknown.pop()}, which is not one of {', '.join(TASKS)}")
    return args


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import engine
import numpy as np
from lib import chat_format, choices
from lib.run_program import isolation
from lib.score_table import make_table, score_path, write_table

LETTERS = "ABCDEFGHIJ"

# ==== scoring


def score_choices(score, model, tokenizer, examples: list[ChoiceExample], ranks, size: int) -> np.ndarray:
    """Whether each example is answered correctly, by the logits of the letters: bool (examples,).

    The letters are choices that share the whole prompt. One that is longer than the context is cut behind its first id.

    Args: score: as choices.scorer() makes it; ranks: the script's Ranks; size: tokens of a batch
    """
    max_seq_len = model.config.max_seq_len
    letters = [tokenizer.encode(letter)[0] for letter in LETTERS]
    letter_choices = []
    spans = []
    for example in examples:
        # nanochat's wording: a letter right behind its choice binds better in a small model.
        lines = [f"- {choice}={letter}" for choice, letter in zip(example.choices, LETTERS, strict=False)]
        lines += ["", "Respond only with the letter of the correct answer."]
        question = "\n".join([f"Multiple Choice question: {example.question}", *lines])
        prompt = cut(chat_format.question_ids(tokenizer, question), max_seq_len - 1)
        own = letters[: len(example.choices)]
        letter_choices.append([np.array([*prompt, letter], np.int32) for letter in own])
        spans.append([(len(prompt), len(prompt) + 1)] * len(own))
    gold = np.array([example.gold for example in examples])
    task = choices.ChoiceTask("letters", "multiple_choice", 0.25, gold, letter_choices, spans)
    size = max(size, 2 * max_seq_len)
    return choices.score_task(score, task, size, model.windows, tokenizer.bos_id, ranks)


def score_texts(generator, examples: list[Example], task: str, ranks) -> tuple[np.ndarray, list[dict]]:
    """Whether the greedy answer to each example is correct, bool (examples,), and this rank's answers."""
    mine = examples[ranks.rank :: ranks.world]
    prompts = [chat_format.question_ids(generator.tokenizer, example.question) for example in mine]
    answers = greedy_answers(generator, prompts, TASKS[task].max_tokens, task)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // ranks.world)) as threads:
        grades = list(threads.map(lambda example, answer: example.is_correct(answer), mine, answers))
    correct = np.zeros(len(examples), np.int64)
    correct[ranks.rank :: ranks.world] = grades

    samples = []
    for example, answer, grade in zip(mine, answers, grades, strict=True):
        sample = {"task": task, "question": example.question, "answer": answer}
        samples.append(sample | {"expected": example.expected, "correct": grade})
    return sum(ranks.gather(correct)).astype(bool), samples


# ==== the command


def score_tasks(run: engine.Run, ranks, args, samples: list[dict]) -> Iterator[tuple]:
    """Scores the tasks for make_table(); adds this rank's answers in text to samples. Raises: RunError"""
    cuda = ranks.device.type == "cuda"
    generator = engine.Generator(run.model, run.tokenizer, num_slots=128 if cuda else 32)
    score = choices.scorer(run.model, compile=cuda and run.config.compile)
    size = choices.default_batch_tokens(ranks)
    for name, task in TASKS.items():
        if args.tasks and name not in args.tasks:
            continue
        if name == "humaneval" and not args.run_code:
            say(f"{name:34} skipped: it executes code that the model writes; allow that with --run-code")
            continue
        examples = read_task(name, args.files, args.limit)
        if not examples:
            where = f"{args.files} has no file for it" if args.files else "it is not on Hugging Face; use --files"
            if args.tasks:
                raise RunError(f"{name} cannot be scored: {where}")
            say(f"{name:34} skipped: {where}")
            continue
        if task.max_tokens:
            correct, answers = score_texts(generator, examples, name, ranks)
            samples += answers
        else:
            correct = score_choices(score, run.model, run.tokenizer, examples, ranks, size)
        yield name, correct, task.chance


def evaluate(args: argparse.Namespace) -> dict:
    """Scores the tasks and writes the files. Returns what is printed last."""
    run = engine.load_run(args.run_dir, args.step)
    ranks = run.script.start_ranks()
    if args.run_code and not isolation():
        say("note: programs will run with access to the network: unshare is not allowed here")
    samples = []
    rows = make_table(score_tasks(run, ranks, args, samples), "ChatCORE", len(TASKS))
    *table, total = rows
    samples = [sample for part in ranks.gather(samples) for sample in part]
    answers = score_path(args.run_dir / "chat_eval_samples.jsonl", args.step, args.limit, args.tasks)
    if ranks.is_main:
        write_table(score_path(args.run_dir / "chat_eval.csv", args.step, args.limit, args.tasks), rows)
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        answers.write_text(lines, encoding="utf-8")
    if samples:
        say(f"answers: {answers}")
    key = "chatcore_estimate" if args.limit else "chatcore"
    result = {key: total.centered, "tasks": {row.task: row.accuracy for row in table}}
    return result | {"chat_eval_seconds": total.seconds, "run_dir": str(args.run_dir)}


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: evaluate(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
