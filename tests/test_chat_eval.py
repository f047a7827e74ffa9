"""Chat evaluation: letters against one forward an item, numbers, programs under limits, files of each layout."""

import csv
import functools
import json
import random

import chat_eval
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import train_small as ts
import zstandard
from lib import chat_tasks, run_program
from lib.choices import scorer

from commands import write_run
from processes import python
from tiny import ALONE, logits, random_model, tiny_config


def words(rng, most) -> str:
    return " ".join(rng.choices("the rest of an old stone is in that sea".split(), k=rng.randint(1, most)))


def test_letters_against_one_forward_an_item(bpe):
    """The chosen letter is the most likely of the item's letters behind the prompt, which may be cut after BOS."""
    tokenizer, rng = ts.Tokenizer(bpe), random.Random(0)
    config = tiny_config(vocab_size=tokenizer.vocab_size, max_seq_len=192, pack_tokens=256, bigram_rows=500)
    model = random_model(config)
    items = []
    for _ in range(40):
        choices = [words(rng, 8) for _ in range(rng.choice((3, 4, 4, 5)))]
        items.append(chat_tasks.ChoiceExample(words(rng, 150), choices, rng.randrange(3)))
    score = scorer(model, compile=False)
    right = chat_eval.score_choices(score, model, tokenizer, items, ALONE, 512)
    cut = 0
    for item, found in zip(items, right, strict=True):
        lines = "".join(f"- {choice}={letter}\n" for choice, letter in zip(item.choices, "ABCDE", strict=False))
        task = "Respond only with the letter of the correct answer."
        text = f"Multiple Choice question: {item.question}\n{lines}\n{task}"
        ids = tokenizer.specials
        prompt = [ids["<|bos|>"], ids["<|user_start|>"], *tokenizer.encode(text), ids["<|user_end|>"],
                  ids["<|assistant_start|>"]]  # fmt: skip
        cut += len(prompt) > 191
        last = logits(model, prompt if len(prompt) <= 191 else [prompt[0], *prompt[-190:]])[-1]
        letters = [last[tokenizer.encode(letter)[0]].item() for letter in "ABCDE"[: len(item.choices)]]
        assert found == (np.argmax(letters) == item.gold)
    assert 0 < cut < 40 and 0 < right.sum() < 40


@pytest.mark.parametrize(("text", "number"), [
    ("#### 18", "18"), ("so\n#### 18.0 dollars", "18"), ("#### 18.", "18"), ("#### $1,800", "1800"), ("####-5", "-5"),
    ("#### 0.50 and #### 7", "0.5"), ("#### .5", "0.5"), ("18", None), ("####", None), ("#### x 5", None),
    ("#### 1,2,", "12"),
])  # fmt: skip
def test_numbers_are_compared_as_numbers(text, number):
    found = chat_tasks.number_in(text)
    assert found is None if number is None else found == chat_tasks.Decimal(number)
    if number is not None:
        assert chat_tasks.same_number(f"work\n#### {number}")(text)
        assert not chat_tasks.same_number("#### 999")(text)


PROMPT = """from typing import List


def helper(x):
    return x + 1


def inc(x: int) -> int:
    '''Add 1.'''
"""
TEST = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0\n"


@pytest.mark.parametrize(("answer", "right"), [
    ("Here it is:\n```python\ndef inc(x: int) -> int:\n    return helper(x)\n```\nDone.", True),
    ("```python3\ndef inc(x):\n    return x + 1\n```", True),
    ("```{.python .copy}\ndef inc(x):\n    return x + 1\n```", True),
    ("Use `x`:\n\n```py linenums=\"1\"\n    return x + 1\n```", True),
    ("```\ndef inc(x: List) -> int:\n    return x + 1", True),  # the block never ends; List is imported by the prompt
    ("    return x + 1\n", True),  # the body alone
    ("def inc(x):\n    return x + 2\n", False),
    ("def inc(x):\n    exit(0)\n", False),  # a quick way out is no success
    ("import os\ndef inc(x):\n    os._exit(0)\n", False),
    ("I do not know.", False),
    ("import os\ndef inc(x):\n    os._exit(0) if x < 0 else None\n    return 2\n", False),
    ("import numpy\ndef inc(x):\n    print('more')\n    return numpy.int64(x) + 1\n", True),
    ("def inc(x):\n    y = bytearray(3 * 2**30)\n    return x + 1\n", False),  # memory
    ("def inc(x):\n    open('big', 'wb').write(b'x' * 2**22)\n    return x + 1\n", False),  # a file
    ("import os\nassert not os.environ.get('HOME')\ndef inc(x):\n    return x + 1\n", True),  # an empty environment
    ("\ud800", False),
])  # fmt: skip
def test_programs(answer, right):
    assert run_program.passes(PROMPT, answer, TEST, "inc") == right


def test_programs_end(monkeypatch):
    """A sleeping program is killed with its children's group; where namespaces are allowed there is no network."""
    interfaces = "import socket\ndef names():\n    return socket.if_nameindex()\n"
    if run_program.isolation():
        assert run_program.passes("", interfaces, "def check(names):\n    assert names() == [(1, 'lo')]\n", "names")
    monkeypatch.setattr(run_program, "TIMEOUT", 1)
    assert not run_program.passes("", "import time\ntime.sleep(60)\n", TEST, "inc")


ARC = [{"question": f"q{i}", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answerKey": "2"}
       for i in range(5)]  # fmt: skip
MMLU = [{"question": f"m{i}", "choices": ["a", "b", "c", "d"], "answer": i % 4, "subject": "x"} for i in range(8)]
GSM8K = [{"question": f"g{i}", "answer": f"<<1+{i}={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(4)]
HUMANEVAL = [{"task_id": "0", "prompt": PROMPT, "test": TEST, "entry_point": "inc", "canonical_solution": ""}]


@pytest.fixture
def files(tmp_path):
    """A folder in which every layout occurs once."""
    folder = tmp_path / "files"
    folder.mkdir()
    lines = lambda items: "".join(json.dumps(item) + "\n" for item in items)  # noqa: E731
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ARC), folder / "arc_easy_test.parquet")
    (folder / "arc_easy_validation.jsonl").write_text("not read")
    (folder / "arc_challenge_validation.jsonl").write_text(lines(ARC))
    (folder / "mmlu_test.jsonl.zst").write_bytes(zstandard.compress(lines(MMLU).encode()))
    (folder / "mmlu_dev.jsonl").write_text("not read")
    (folder / "gsm8k_test.jsonl").write_text(lines(GSM8K))
    (folder / "gsm8k_train.jsonl").write_text("not read")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(HUMANEVAL), folder / "humaneval.parquet")
    rng = random.Random(0)
    made = {"".join(rng.choices("abcdefgh", k=rng.randint(3, 9))) for _ in range(400)}
    (folder / "words.txt").write_text("\n".join(sorted(made)))
    return folder


def test_items_of_every_layout(files):
    read = lambda task, limit=None: chat_tasks.read_task(task, files, limit)  # noqa: E731
    in_order = functools.partial(sorted, key=lambda item: item.question)
    for task in ("arc_easy", "arc_challenge"):
        assert in_order(read(task)) == [chat_tasks.ChoiceExample(f"q{i}", ["a", "b", "c"], 1) for i in range(5)]
    wanted = [chat_tasks.ChoiceExample(f"m{i}", ["a", "b", "c", "d"], i % 4) for i in range(8)]
    assert in_order(read("mmlu")) == wanted != read("mmlu") and read("mmlu", 3) == read("mmlu")[:3]
    items = {item.question: item for item in read("gsm8k")}
    assert items["g2"].expected == "3" and items["g2"].is_correct("so #### 3.0") and not items["g2"].is_correct("3")
    (item,) = read("humaneval")
    assert item.question == PROMPT and item.is_correct("    return x + 1\n")
    spelled = read("spelling", 40)
    counted = [item for item in spelled if item.expected.isdigit()]
    assert len(spelled) == 40 and len(counted) == 20
    for item in spelled:
        assert item.is_correct(f"#### {item.expected}" if item in counted else f" {item.expected}\n")
        assert not item.is_correct("#### 77")
    assert chat_tasks.read_task("arc_easy", files.parent) == []


def test_items_of_training_are_no_test(tmp_path):
    """Nor are those for few-shot prompts; a test goes before validation, and that before any other name."""
    found = []
    for name in ("mmlu_auxiliary_train", "mmlu_dev", "mmlu_all", "mmlu_val", "mmlu_test"):
        (tmp_path / f"{name}.jsonl").touch()
        path = chat_tasks.find_file(tmp_path, "mmlu")
        found.append(path and path.stem)
    assert found == [None, None, "mmlu_all", "mmlu_val", "mmlu_test"]


def test_the_command(bpe, files, tmp_path, capsys):
    """The table, the csv file and the last line agree; ChatCORE is the mean of what goes beyond guessing."""

    def evaluate(*args) -> tuple:
        return chat_eval.main([str(arg) for arg in args]), *capsys.readouterr()

    run_dir = write_run(tmp_path / "run", bpe, True, None, max_seq_len=256, pack_tokens=256)
    code, out, err = evaluate(run_dir, "--files", files, "--limit", 4, "--run-code")
    assert code == 0, err
    *_, last = out.splitlines()
    result, rows = json.loads(last), list(csv.reader((run_dir / "chat_eval_limit_4.csv").open()))
    assert rows[0] == ["task", "examples", "accuracy", "centered", "seconds"] and rows[-1][0] == "ChatCORE"
    assert [row[0] for row in rows[1:-1]] == list(chat_eval.TASKS) == list(result["tasks"])
    assert [row[1] for row in rows[1:]] == ["4", "4", "4", "4", "1", "4", "21"]
    centred = [(float(row[2]) - (0.25 if i < 3 else 0)) / (0.75 if i < 3 else 1) for i, row in enumerate(rows[1:-1])]
    assert [float(row[3]) for row in rows[1:-1]] == pytest.approx(centred)
    assert "chatcore" not in result, "four examples of each task are an estimate"
    assert result["chatcore_estimate"] == pytest.approx(sum(centred) / 6) == pytest.approx(float(rows[-1][3]))
    samples = [json.loads(line) for line in (run_dir / "chat_eval_samples_limit_4.jsonl").open()]
    assert {sample["task"] for sample in samples} == {"gsm8k", "humaneval", "spelling"} and len(samples) == 9
    code, out, err = evaluate(run_dir, "--files", files, "--limit", 2, "--tasks", "mmlu,humaneval")
    assert code == 0 and "allow that with --run-code" in out
    assert "no ChatCORE, which is the mean of 6 tasks; 1 were scored" in out
    assert json.loads(out.splitlines()[-1])["chatcore_estimate"] is None
    code, out, err = evaluate(run_dir, "--files", files, "--tasks", "mmlu", "--step", 7)
    assert code == 0, err
    names = ["", "_limit_4", "_limit_2_mmlu_humaneval", "_step_7_mmlu"]
    tables = [run_dir / f"chat_eval{name}.csv" for name in names]
    assert [path.is_file() for path in tables] == [False, True, True, True], "a quick look is no full result"
    (files / "gsm8k_test.jsonl").write_text('{"question": "x"}\n')
    for args, message in (
        (("--files", tmp_path, "--tasks", "mmlu"), "mmlu cannot be scored"),
        (("--files", tmp_path / "none"), "none is not a folder"),
        (("--files", files, "--tasks", "gsm8k"), "is not an example of gsm8k"), (("--step", 99), "no checkpoint"),
    ):  # fmt: skip
        code, _, err = evaluate(run_dir, *args)
        assert code == 1 and message in err and err.startswith("error: ") and err.count("\n") == 1, err
    assert evaluate(tmp_path)[0] == 1
    for flag, value, message in (("--tasks", "mmlo", "is not one of"), ("--limit", 0, "at least 1, found 0")):
        with pytest.raises(SystemExit):
            evaluate(run_dir, flag, value)
        assert message in capsys.readouterr().err
    assert chat_eval.parse(["run", "--tasks", "mmlu, gsm8k"]).tasks == ["mmlu", "gsm8k"]


def test_two_processes(bpe, files, tmp_path):
    """They share the examples; the files are those of one process, but for the order of the answers."""
    found = []
    for ranks in (1, 2):
        run_dir = write_run(tmp_path / str(ranks), bpe, True, None, max_seq_len=256, pack_tokens=256)
        done = python("runs/chat_eval.py", run_dir, "--files", files, "--tasks", "mmlu,gsm8k", ranks=ranks)
        assert done.returncode == 0, done.stderr
        (table,) = run_dir.glob("chat_eval*.csv")
        (answers,) = run_dir.glob("chat_eval_samples*.jsonl")
        rows = [row[:4] for row in csv.reader(table.open())]
        found.append((rows, sorted(answers.read_text().splitlines())))
    assert found[0] == found[1] and len(found[0][1]) == len(GSM8K)


def test_room_for_an_answer(bpe):
    """A question longer than the context is answered with half a context, not with one token."""
    tokenizer = ts.Tokenizer(bpe)
    config = tiny_config(vocab_size=tokenizer.vocab_size, max_seq_len=64, pack_tokens=64, bigram_rows=500)
    generator = chat_eval.engine.Generator(random_model(config), tokenizer)
    asked = []
    generator.run = lambda completions: asked.extend(completions) or []
    questions = [chat_tasks.Example(text, "7", chat_tasks.same_number("#### 7")) for text in ("a", "the rest " * 99)]
    chat_eval.score_texts(generator, questions, "gsm8k", ALONE)
    short, long = asked
    assert short.prompt == chat_eval.chat_format.question_ids(tokenizer, "a") and short.max_tokens == 512
    bos, *rest = chat_eval.chat_format.question_ids(tokenizer, "the rest " * 99)
    assert long.prompt == [bos, *rest[-31:]]
