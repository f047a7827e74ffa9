"""The tasks of runs/chat_eval.py and runs/rl.py: where they come from, their examples, and what is a correct answer."""

import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from lib.chat_format import ASSISTANT_END
from lib.command import RunError
from lib.run_program import passes

sys.path.append(str(Path(__file__).resolve().parents[2] / "data"))
import hub
import sft


@dataclass(frozen=True)
class Task:
    repository: str  # on Hugging Face; "": there is none
    file: str
    columns: tuple[str, ...]
    chance: float  # accuracy of a random guess, 0 to 1
    max_tokens: int = 0  # of an answer; 0: the answer is a letter


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


SPELLING_EXAMPLES = 512


@dataclass
class Example:
    """A question to answer in text."""

    question: str
    expected: str  # the answer, for samples
    is_correct: Callable[[str], bool]  # grades an answer


@dataclass
class ChoiceExample:
    """A question to answer with a letter."""

    question: str
    choices: list[str]
    gold: int  # index of the correct choice


def find_file(folder: Path, task: str, part: str = "test") -> Path | None:
    """The file of a task for a part, "test" or "train"; None if there is none.

    For "test" that is the file with "test" in its name, else one with "val", else any but those of few-shot prompts
    ("dev") and training.

    Raises: RunError if the folder does not exist
    """
    if not folder.is_dir():
        raise RunError(f"--files {folder} is not a folder; pass one with the files of the tasks")
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
    """Grades answers by the number after ####. Raises: ValueError if `expected` has none"""
    number = number_in(expected)
    if number is None:
        raise ValueError("the answer has no number after ####")
    return lambda text: number_in(text) == number


def choice_example(value: dict[str, Any]) -> ChoiceExample:
    """An example of ARC, whose choices have labels, or of MMLU."""
    choices = value["choices"]
    if isinstance(choices, dict):
        gold = list(choices["label"]).index(value["answerKey"])
        return ChoiceExample(value["question"], list(choices["text"]), gold)
    return ChoiceExample(value["question"], list(choices), int(value["answer"]))


def text_example(task: str, value: dict[str, Any]) -> Example:
    """An example of gsm8k or humaneval."""
    if task == "gsm8k":
        answer = value["answer"]
        return Example(value["question"], answer.rpartition("####")[2].strip(), same_number(answer))
    prompt = value["prompt"]
    test = value["test"]
    entry = value["entry_point"]
    return Example(prompt, f"{entry} passes its tests", lambda answer: passes(prompt, answer, test, entry))


def spelling_example(value: dict[str, Any]) -> Example:
    question, answer = (message["content"] for message in value["messages"])
    if isinstance(answer, str):
        return Example(question, answer, lambda text: text.strip() == answer)
    last = answer[-1]["text"]
    return Example(question, last.rpartition("####")[2].strip(), same_number(last))


def read_task(
    name: str, folder: Path | None, limit: int | None = None, part: str = "test"
) -> list[Example] | list[ChoiceExample]:
    """The examples of a task, or `limit` random ones; none if there is no file.

    Args:   folder with files of tasks, None: downloads the file; part "test" or "train"
    Raises: RunError if the file is not one of this task
    """
    task = TASKS[name]
    path = None
    if folder:
        path = find_file(folder, name, part)
    elif task.repository:
        path = hub.fetch(task.repository, task.file.replace("test", part))
    if path is None:
        return []
    if name == "spelling":
        words = sft.read_words(path, "--files")
        values = sft.spelling_tasks(words, limit or SPELLING_EXAMPLES, "val", 0)
        return [spelling_example(value) for value in values]

    examples = read_examples(path, name)
    random.Random(1337).shuffle(examples)  # MMLU is sorted by subject
    return examples[:limit]


def read_examples(path: Path, name: str) -> list[Example] | list[ChoiceExample]:
    """All examples in a file of a task, but not of spelling. Raises: RunError if one lacks a column"""
    task = TASKS[name]
    examples = []
    for where, value, problem in sft.records(path, task.columns):
        try:
            if problem:
                raise ValueError(problem)
            examples.append(text_example(name, value) if task.max_tokens else choice_example(value))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            columns = ", ".join(task.columns)
            raise RunError(f"{where} is not an example of {name} ({error}); it needs {columns}") from None
    return examples


def cut(prompt: list[int], room: int) -> list[int]:
    """At most `room` ids of a prompt: the first one, which is BOS, and the last ones."""
    return [prompt[0], *prompt[max(1, len(prompt) - room + 1) :]]


def greedy_answers(generator, prompts: list[list[int]], max_tokens: int, note: str, is_chat: bool = True) -> list[str]:
    """The most likely answers to prompts of ids, which are cut to leave room; the note is for the progress bar."""
    tokenizer = generator.tokenizer
    context = generator.model.config.max_seq_len
    room = context - min(max_tokens, context // 2)
    options = {"max_tokens": max_tokens, "temperature": 0.0, "tools": is_chat}
    if is_chat:
        options["stop"] = (tokenizer.specials[ASSISTANT_END],)
    answers = generator.generate([cut(prompt, room) for prompt in prompts], note, **options)
    return [tokenizer.decode(ids) for ids in answers]
