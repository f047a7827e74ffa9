"""Asks a run 200 plain questions and counts the right answers: a figure to compare after each stage of training.

    python runs/questions.py out/RUN

The questions are in runs/lib/questions.jsonl: capitals, colors, opposites, sums, short code, facts. A finetuned run is
asked in the chat format. Any other run continues a list of six questions with their answers, and the line that it adds
is its answer. Answers are greedy, and one is right if it contains an accepted answer as whole words. They go to
questions.jsonl in the run directory, or with --step N to questions_step_N.jsonl; the last line on stdout is one JSON
object.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from lib.command import run_command, say


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import engine
from lib import chat_format
from lib.chat_tasks import greedy_answers
from lib.score_table import score_path

QUESTIONS = Path(__file__).parent / "lib" / "questions.jsonl"
MAX_TOKENS = 64
EXAMPLES = """Question: What is the capital of Austria?
Answer: Vienna

Question: What color is a strawberry?
Answer: red

Question: What is the opposite of left?
Answer: right

Question: What is 6 + 2?
Answer: 8

Question: Which Python function prints a text?
Answer: print

Question: How many legs does a dog have?
Answer: four

"""


def read_questions() -> list[dict]:
    """The questions: kind, question and answers, those that count."""
    return [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


def is_right(answer: str, accepted: list[str]) -> bool:
    """Whether an answer contains an accepted one as whole words; case, spaces and the kind of quotes do not count."""
    answer = answer.replace('"', "'")
    for text in accepted:
        parts = re.findall(r"\w+|[^\w\s]", text)
        words = r"\s*".join(map(re.escape, parts))
        # 12 is neither in 112 nor in -12 or 12.5.
        if re.search(rf"(?<![\w.-]){words}(?!\w|[.,]\d)", answer, re.IGNORECASE):
            return True
    return False


def prompt_ids(tokenizer, question: str, is_chat: bool) -> list[int]:
    """Ids of a question, up to its answer."""
    if is_chat:
        return chat_format.question_ids(tokenizer, question)
    return [tokenizer.bos_id, *tokenizer.encode(f"{EXAMPLES}Question: {question}\nAnswer:")]


def ask(run: engine.Run, questions: list[dict], is_chat: bool) -> list[str]:
    """The greedy answer to each question."""
    prompts = [prompt_ids(run.tokenizer, question["question"], is_chat) for question in questions]
    generator = engine.Generator(run.model, run.tokenizer)
    answers = greedy_answers(generator, prompts, MAX_TOKENS, "questions", is_chat)
    answers = [answer.strip() for answer in answers]
    return answers if is_chat else [answer.partition("\n")[0] for answer in answers]


def evaluate(args: argparse.Namespace) -> dict:
    """Asks, prints a line for each kind, and writes the answers. Returns what is printed last."""
    run = engine.load_run(args.run_dir, args.step)
    questions = read_questions()
    answers = ask(run, questions, chat_format.is_chat_run(args.run_dir))

    totals = Counter(question["kind"] for question in questions)
    right = Counter()
    lines = []
    for question, answer in zip(questions, answers, strict=True):
        correct = is_right(answer, question["answers"])
        right[question["kind"]] += correct
        lines.append(json.dumps({**question, "answer": answer, "correct": correct}) + "\n")
    path = score_path(args.run_dir / "questions.jsonl", args.step)
    path.write_text("".join(lines), encoding="utf-8")
    for kind, total in totals.items():
        say(f"{kind:10} {right[kind]:4} of {total}")
    say(f"{'all':10} {right.total():4} of {len(questions)} right")
    result = {"right": right.total(), "questions": len(questions), "kinds": dict(right)}
    return result | {"run_dir": str(args.run_dir)}


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: evaluate(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
