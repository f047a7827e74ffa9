"""The 200 plain questions: what counts as right, the list itself, and the command on a base and a chat model."""

import json
import re
from collections import Counter

import pytest
import questions
import train_small as ts

from commands import ran, write_run


@pytest.mark.parametrize(("answer", "accepted", "right"), [
    ("The capital of France is **Paris**.", ["Paris"], True), ("paris", ["Paris"], True),
    ("Parisian", ["Paris"], False), ("I do not know.", ["Paris"], False), ("", ["Paris"], False),
    ("It is New\nDelhi.", ["New Delhi"], True), ("New York", ["New Delhi"], False),
    ("gray", ["grey", "gray"], True), ("7 + 5 = 12.", ["12"], True), ("[7+5 = 12]", ["12"], True),
    ("112", ["12"], False), ("-12", ["12"], False), ("12.5", ["12"], False), ("12,000", ["12"], False),
    ("Use `x**2`.", ["x ** 2"], True), ("x**20", ["x ** 2"], False), ("max**2", ["x ** 2"], False),
    ('print("hello")', ["print('hello')"], True), ("```python\na[-1]\n```", ["a[-1]"], True),
    ("It is [0,1,2].", ["[0, 1, 2]"], True), ("#", ["#"], True),
])  # fmt: skip
def test_what_is_right(answer, accepted, right):
    assert questions.is_right(answer, accepted) == right


def test_the_list():
    """200 different questions that do not give their answer away; Python agrees with sums and values."""
    items = questions.read_questions()
    kinds = Counter(item["kind"] for item in items)
    assert kinds == {"capital": 40, "opposite": 40, "sum": 40, "color": 30, "code": 30, "fact": 20}
    assert len({item["question"] for item in items}) == 200
    computed = 0
    for item in items:
        assert item["answers"] and not questions.is_right(item["question"], item["answers"]), item
        assert item["question"] not in questions.EXAMPLES
        value = re.fullmatch(r"What is the value of (.+) in Python\?|What is (\d+ \S+ \d+)\?", item["question"])
        if value:
            result = eval((value[1] or value[2]).replace("times", "*"))
            assert item["answers"][0] == (result if isinstance(result, str) else repr(result)), item
            computed += 1
    assert computed == 50


def test_base_models_continue_a_list_and_chat_models_answer(bpe):
    tokenizer = ts.Tokenizer(bpe)
    text = tokenizer.decode(questions.prompt_ids(tokenizer, "What is 1 + 1?", is_chat=False)[1:])
    assert text.startswith("Question: ") and text.endswith("Answer: four\n\nQuestion: What is 1 + 1?\nAnswer:")
    bos, user, *middle, end, assistant = questions.prompt_ids(tokenizer, "What is 1 + 1?", is_chat=True)
    names = ("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>")
    assert [bos, user, end, assistant] == [tokenizer.specials[name] for name in names]
    assert tokenizer.decode(middle) == "What is 1 + 1?"


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_command(bpe, tmp_path, monkeypatch, is_chat):
    """Answers are counted by kind, also where the context is short; a base model's ends with its line."""
    run = write_run(tmp_path / "run", bpe, is_chat, max_seq_len=128, pack_tokens=128)
    monkeypatch.setattr(questions, "MAX_TOKENS", 8)
    items = questions.read_questions()[::20]
    monkeypatch.setattr(questions, "read_questions", lambda: items)
    result = ran(questions.main, run)
    assert result["questions"] == 10 and 0 <= result["right"] == sum(result["kinds"].values()) < 10
    answered = [json.loads(line) for line in (run / "questions.jsonl").open()]
    assert [entry["question"] for entry in answered] == [item["question"] for item in items]
    before = (run / "questions.jsonl").read_text()
    assert ran(questions.main, run, "--step", 7) == result
    assert (run / "questions_step_7.jsonl").read_text() == before
    assert is_chat or not any("\n" in entry["answer"] for entry in answered)

    # A model that knows the answers to the first three.
    texts = [f" It is {item['answers'][-1]}." for item in items[:3]] + ["no"] * 7
    monkeypatch.setattr(questions, "ask", lambda *args: texts)
    result = ran(questions.main, run)
    assert result["right"] == 3 and result["kinds"][items[0]["kind"]] >= 2
    assert [json.loads(line)["correct"] for line in (run / "questions.jsonl").open()] == [True] * 3 + [False] * 7
