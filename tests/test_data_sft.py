"""Conversations to shards and masks: against a plain renderer, then sources, weights, held-out parts and errors."""

import json
import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import dataset
import pyarrow
import pyarrow.parquet
import pytest
import sft
import tokenizer
import train_small as ts

from chats import chat, read_split, run_sft, write_jsonl
from folders import make_dataset
from hub_stub import names_of, start_hub
from tiny import MERGES, SPECIALS

SCRIPT = Path(__file__).parents[1] / "data" / "sft.py"
PIECES = ["the rest", " of", "\n\n", "你好", "é ü €", "<|user_end|>", "<|bos|>", "12345", "'it's'", "a" * 30, "😀"]


def random_conversations(count: int, seed: int = 0) -> list[dict]:
    """Every form: system messages, parts with tools, text that spells special tokens, a last question unanswered."""
    rng = random.Random(seed)
    text = lambda: "x" + "".join(rng.choices(PIECES, k=rng.randint(0, 6)))  # noqa: E731
    result = []
    for i in range(count):
        value = chat(*(text() for _ in range(rng.randint(2, 7))))
        value["messages"][0]["content"] = f"{seed}-{i} " + text()  # tells them apart
        for message in value["messages"][1::2]:
            if rng.random() < 0.4:
                kinds = rng.choices(("text", "python", "python_output"), k=rng.randint(1, 4))
                message["content"] = [{"type": kind, "text": text()} for kind in kinds]
        if rng.random() < 0.3:
            value["messages"].insert(0, {"role": "system", "content": "system " + text()})
        result.append(value)
    return result


def reference(value: dict, tok: ts.Tokenizer) -> tuple[list[int], list[int]]:
    """The template, written as plainly as it can be, with the training script's tokenizer."""
    messages = [dict(m) for m in value["messages"]]
    if messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
        messages[0]["content"] = system + "\n\n" + messages[0]["content"]
    out = [(tok.bos_id, 0)]
    for m in messages:
        if m["role"] == "user":
            out.append((tok.specials["<|user_start|>"], 0))
            out += [(t, 0) for t in tok.encode(m["content"])]
            out.append((tok.specials["<|user_end|>"], 0))
            continue
        out.append((tok.specials["<|assistant_start|>"], 0))
        parts = m["content"] if isinstance(m["content"], list) else [{"type": "text", "text": m["content"]}]
        for part in parts:
            ids = tok.encode(part["text"])
            if part["type"] == "python":
                ids = [tok.specials["<|python_start|>"], *ids, tok.specials["<|python_end|>"]]
            if part["type"] == "python_output":
                ids = [tok.specials["<|output_start|>"], *ids, tok.specials["<|output_end|>"]]
            out += [(t, int(part["type"] != "python_output")) for t in ids]
        out.append((tok.specials["<|assistant_end|>"], 1))
    tokens, mask = zip(*out, strict=True)
    return list(tokens), list(mask)


def tokenizer_spec(specials=SPECIALS) -> dict:
    """Few merges and the project's split pattern."""
    ranks = [*(bytes([b]) for b in range(256)), *MERGES]
    return tokenizer.make_spec(tokenizer.PATTERN, ranks, {name: len(ranks) + i for i, name in enumerate(specials)})


@pytest.fixture
def data(tmp_path) -> Path:
    """A dataset directory with a tokenizer and one pretraining shard of each split."""
    return make_dataset(tmp_path / "data", tokenizer_spec(), {"train": range(1, 20), "val": range(1, 20)})


def as_set(conversations) -> Counter:
    return Counter((tuple(tokens), tuple(mask)) for tokens, mask in conversations)


def test_every_conversation_is_as_the_plain_renderer_has_it(data, tmp_path):
    """300 conversations of all forms: shards hold just the reference's tokens and masks, in another, fixed order."""
    values, val = random_conversations(300), random_conversations(40, seed=1)
    source = write_jsonl(tmp_path / "chat.jsonl.gz", values)
    args = ("--source", source, "--val-source", write_jsonl(tmp_path / "val.jsonl", val), "--shard-tokens", 4000)
    out = run_sft(data, *args, "--workers", 3)
    tok = ts.Tokenizer(data / "tokenizer.json")
    found, expected = read_split(data, "train"), [reference(v, tok) for v in values]
    assert as_set(found) == as_set(expected) and found != expected
    assert as_set(read_split(data, "val")) == as_set(reference(v, tok) for v in val)
    assert len(list((data / "sft").glob("train_*.mask.bin"))) > 3, "several shards"
    info = dataset.read_dataset(data)
    split = info["splits"]["sft_train"]
    counts = [sum(len(t) for t, _ in expected), sum(sum(m) for _, m in expected), 300]
    assert list(split.values()) == counts and list(split) == ["tokens", "counted_tokens", "conversations"]
    assert info["splits"]["train"]["tokens"] == 19, "the pretraining splits are as they were"
    assert info["sft"]["train"] == {"cut": 0, "dropped": 0, "bad": 0} and "300 conversations" in out
    for name, entry in info["files"].items():
        assert dataset.sha256_file(data / name) == entry["sha256"]
        assert (data / name).stat().st_size == entry["bytes"]
        if name.startswith("sft/"):
            shard = dataset.read_shard(data / name)
            assert len(shard) == entry["tokens"]
            text = b"".join(tok.bytes[t] for t in shard if t < 291)
            assert name.endswith(".mask.bin") or entry["text_bytes"] == len(text)
    assert info["sft"]["fingerprint"] == dataset.fingerprint(info["files"], "sft")
    before = {p.name: p.read_bytes() for p in (data / "sft").iterdir()}
    run_sft(data, *args, "--workers", 1)  # again, over what is there: the same bytes from any number of threads
    assert before == {p.name: p.read_bytes() for p in (data / "sft").iterdir()}
    run_sft(data, *args, "--seed", 7, "--shard-tokens", 10**6)
    assert as_set(read_split(data, "train")) == as_set(expected) and read_split(data, "train") != found
    assert sorted(p.name for p in (data / "sft").iterdir()) == [
        f"{s}_000000{m}.bin" for s in ("train", "val") for m in ("", ".mask")
    ], "no shard of the earlier run is left"
    assert [p.name for p in data.glob(".*")] == [".lock"], "nor its folders"


def test_weights(data, tmp_path):
    """:2 is twice each, :0.5 half of them once, :1.5 both; no other copies."""
    tok = ts.Tokenizer(data / "tokenizer.json")
    values = [random_conversations(40, seed) for seed in (2, 3, 4)]
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", v) for i, v in enumerate(values)]
    val = write_jsonl(tmp_path / "v.jsonl", [chat("q", "z")])
    specs = [f"{path}:{weight}" for path, weight in zip(paths, ("2", "0.5", "1.5"), strict=True)]
    run_sft(data, *(x for spec in specs for x in ("--source", spec)), "--val-source", val)
    found = as_set(read_split(data, "train"))
    copies = [Counter(found[tuple(map(tuple, reference(v, tok)))] for v in part) for part in values]
    assert copies == [{2: 40}, {0: 20, 1: 20}, {1: 20, 2: 20}] and found.total() == 80 + 20 + 60
    first = [found[tuple(map(tuple, reference(v, tok)))] for v in values[1]]
    assert first not in ([0, 1] * 20, [1, 0] * 20, [1] * 20 + [0] * 20), "drawn, not a pattern"


def test_held_out_conversations_are_in_no_training_shard(data, tmp_path):
    """Without --val-source a part is held out before the weight applies."""
    path = write_jsonl(tmp_path / "chat.jsonl", random_conversations(100))
    run_sft(data, "--source", f"{path}:3", "--val-fraction", 0.1)
    train, val = as_set(read_split(data, "train")), as_set(read_split(data, "val"))
    assert val.total() == 10 and train.total() == 270 and not set(train) & set(val) and len(train) == 90


def test_long_conversations(data, tmp_path):
    """Exactly --max-len stays whole; one token more is cut at the end; without an answer left it goes."""
    tok = ts.Tokenizer(data / "tokenizer.json")
    values = [chat("q" * 3, "z" * n) for n in (40, 41, 90)] + [chat("q" * 60, "zz")]
    lengths = [len(reference(v, tok)[0]) for v in values]
    val = write_jsonl(tmp_path / "v.jsonl", [chat("q", "z")])
    source = write_jsonl(tmp_path / "c.jsonl", values)
    out = run_sft(data, "--source", source, "--val-source", val, "--max-len", lengths[0])
    assert lengths[1] == lengths[0] + 1 and "2 truncated to 48 tokens, 1 with no answer left" in out, lengths
    expected = [tuple(x[: lengths[0]] for x in reference(v, tok)) for v in values[:3]]
    assert as_set(read_split(data, "train")) == as_set(expected)
    assert dataset.read_dataset(data)["sft"]["train"] == {"cut": 2, "dropped": 1, "bad": 0}


def test_parquet_and_hub(data, tmp_path):
    """The messages column of a Parquet file, locally and by the name of a Hugging Face dataset."""
    values = [chat(f"question {i}", f"answer {i}", "more", "z") for i in range(30)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "c.parquet")
    tok = ts.Tokenizer(data / "tokenizer.json")
    val = write_jsonl(tmp_path / "v.jsonl", [chat("q", "z")])
    raw = (tmp_path / "c.parquet").read_bytes()
    files = {"data/train-00000-of-00001.parquet": raw, "data/test-00000-of-00001.parquet": b"not read"}
    with start_hub({"HuggingFaceTB/smol-smoltalk": files}) as server:
        env = {**os.environ, **names_of(server, tmp_path)}
        for spec in (tmp_path / "c.parquet", "smol-smoltalk", "hf:HuggingFaceTB/smol-smoltalk/data/train*"):
            run_sft(data, "--source", f"{spec}:1", "--val-source", val, env=env)
            assert as_set(read_split(data, "train")) == as_set(reference(v, tok) for v in values)


def test_gsm8k(data, tmp_path):
    """<<expression=result>> becomes a counted call and an uncounted output; a note without either goes."""
    answer = "She has 3*4 = <<3*4=12>>12 eggs,\n<<a=b=7>> <<=5>><<>>so\n#### 12"
    path = write_jsonl(tmp_path / "g.jsonl", [{"question": " How many? ", "answer": answer}])
    parts = [("text", "She has 3*4 = "), ("python", "3*4"), ("python_output", "12"), ("text", "12 eggs,\n"),
             ("python", "a=b"), ("python_output", "7"), ("text", " "), ("text", "so\n#### 12")]  # fmt: skip
    run_sft(data, "--source", f"gsm8k:{path}:2", "--val-source", write_jsonl(tmp_path / "v.jsonl", [chat("q", "z")]))
    found = as_set(read_split(data, "train"))
    value = chat("How many?", [{"type": kind, "text": text} for kind, text in parts])
    assert found == as_set([reference(value, ts.Tokenizer(data / "tokenizer.json"))] * found.total())
    assert found.total() == 2 and "no text" in run_sft(data, "--source", f"gsm8k:{write_jsonl(path, [{}])}", code=1)


@pytest.mark.parametrize("text", ["<<see x<y>> so 3 + 4 = 7 #### 7", "<<a>b=c>>tail", "a <<b", ">>1=2<<"])
def test_text_that_is_no_note_stays(text):
    value = sft.gsm8k_conversation({"question": "q", "answer": text})
    assert value["messages"][1]["content"] == [{"type": "text", "text": text}]


def test_spelling(data, tmp_path):
    """Spellings and counts are right, held-out words do not appear in training, the count is the count asked for."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeé", k=rng.randint(3, 9))) for _ in range(400)]
    path = tmp_path / "words.txt"
    path.write_text("\n".join([*words, "don't", "x", "Upper"]), encoding="utf-8")
    run_sft(data, "--source", f"spelling:{path}:200", "--val-fraction", 0.2)
    assert [dataset.read_dataset(data)["splits"][f"sft_{s}"]["conversations"] for s in ("train", "val")] == [200, 40]
    seen = {}
    for split in ("train", "val"):
        tasks = list(sft.spelling_tasks(sft.read_words(path, "--source"), 300, split, 5))
        seen[split] = set()
        for task in tasks:
            question, answer = (m["content"] for m in task["messages"])
            if isinstance(answer, str):
                word, _, spelled = answer.partition(":")
                assert spelled == ",".join(word) and word in question
            else:
                by_hand, call, output, last = (part["text"] for part in answer)
                word = by_hand.partition(":")[0]
                assert eval(call) == int(output) == int(last.removeprefix("\n#### "))
                assert by_hand.split("\n")[-2].endswith(f":{output}") and f"'{word}'" in call
                assert word in question and not {"don't", "x"} & {word}
            seen[split].add(word)
    assert not seen["train"] & seen["val"] and len(seen["val"]) > 5


def test_addition(data):
    """Columns and sums are right, for numbers of any length; held-out pairs are in training in neither order."""
    run_sft(data, "--source", "addition:60:3", "--val-fraction", 0.2)
    assert [dataset.read_dataset(data)["splits"][f"sft_{s}"]["conversations"] for s in ("train", "val")] == [60, 12]
    assert sft.addition_texts(47, 85) == ("What is 47 + 85?", "7+5=12\n4+8+1=13\n#### 132")
    seen, rng = {"train": set(), "val": set()}, random.Random(0)
    for split, found in seen.items():
        for lengths in [(1, 1), (2, 2), (3, 3), (1, 3), (3, 2)] * 200:
            a, b = sft.random_sum(rng, lengths, split)
            assert (len(str(a)), len(str(b))) == lengths
            found.add((min(a, b), max(a, b)))
            question, answer = sft.addition_texts(a, b)
            *columns, total = answer.split("\n")
            assert question == f"What is {a} + {b}?" and total == f"#### {a + b}" and len(columns) == max(lengths)
            carry = 0
            for place, line in enumerate(columns):
                left, _, right = line.partition("=")
                terms = [int(term) for term in left.split("+")]
                assert terms == [a // 10**place % 10, b // 10**place % 10] + [1] * carry and sum(terms) == int(right)
                carry = int(right) // 10
    assert not seen["train"] & seen["val"] and len(seen["val"]) > 100
    questions = [task["messages"][0]["content"] for task in sft.addition_tasks(2, 200, "train", 0)]
    lengths = {tuple(map(len, re.findall("[0-9]+", question))) for question in questions}
    assert lengths == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert sft.addition_texts(5, 995)[1] == "5+5=10\n0+9+1=10\n0+9+1=10\n#### 1000"


BAD = [
    ({"messages": []}, "no answer"),
    ({"messages": ["hello"]}, 'it has none of "messages"'),
    ({"conversations": ["hello"]}, 'it has none of "messages"'),
    ({"instruction": 5, "output": "b"}, 'it has none of "messages"'),
    ({"instruction": "a", "response": "b"}, "found: instruction, response"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "message 1 has the role None"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "message 1 has the role 'tool', expected 'user'"),
    (chat("a"), "no answer"),
    ({"messages": chat("a", "b")["messages"][::-1]}, "message 1 has the role 'assistant', expected 'user'"),
    ({"messages": [*chat("a", "b")["messages"], *chat("a", "b")["messages"][1:]]}, "message 3 has the role 'assis"),
    (chat("a", " \n"), r"message 2 \(assistant\) is empty"),
    (chat("a", None), r"message 2 \(assistant\) has content that is not text"),
    (chat([{"type": "python", "text": "a"}], "b"), r"message 1 \(user\) has a part"),
    (chat("a", [{"type": "image", "text": "b"}]), r"message 2 \(assistant\) has a part"),
    ({"messages": [*chat("a", "b")["messages"], {"role": "system", "content": "late"}]}, "after the last user message"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_bad_conversations_are_named(value, message):
    with pytest.raises(ValueError, match=message):
        sft.check_messages(value)


def test_bad_lines_end_the_script_or_are_counted(data, tmp_path):
    """The error names file and line and leaves the dataset as it was; --skip-bad leaves the lines out."""
    good = random_conversations(10)
    path = write_jsonl(tmp_path / "c.jsonl", [*good[:5], *(value for value, _ in BAD), *good[5:]])
    path.write_bytes(path.read_bytes() + b"\n{broken\n" + json.dumps(chat("\ud800", "b")).encode())
    val = write_jsonl(tmp_path / "v.jsonl", [chat("q", "z")])
    before = (data / "dataset.json").read_bytes()
    out = run_sft(data, "--source", path, "--val-source", val, code=1, env=os.environ)
    assert "\nerror: " in f"\n{out}" and f"{path} line 6" in out and "--skip-bad" in out
    assert (data / "dataset.json").read_bytes() == before and not (data / "sft").exists()
    out = run_sft(data, "--source", path, "--val-source", val, "--skip-bad")
    tok = ts.Tokenizer(data / "tokenizer.json")
    assert f"{len(BAD) + 1:,} bad ones skipped" in out
    assert as_set(read_split(data, "train")) == as_set(reference(v, tok) for v in [*good, chat("?", "b")])


def test_user_errors(data, tmp_path):
    """One sentence and exit code 1, and never a traceback."""
    path = write_jsonl(tmp_path / "c.jsonl", random_conversations(4))
    copy = shutil.copy(path, tmp_path / "d.jsonl")
    long = write_jsonl(tmp_path / "long.jsonl", [chat("q" * 60, "z")] * 5)
    one = write_jsonl(tmp_path / "one.jsonl", [chat("q", "z")])
    for args, message in [
        (["--source", tmp_path / "none.jsonl"], "matches no file"),
        (["--source", f"{path}:0"], "weight 0, which must"),
        (["--source", f"{path}:-1"], "matches no file"),
        (["--source", path, "--val-source", path], "c.jsonl and c.jsonl are the same file; keep it out of"),
        (["--source", path, "--source", f"{copy}:2"], "d.jsonl and c.jsonl are the same file; keep it out of"),
        (["--source", f"spelling:{tmp_path}/none"], "does not exist"),
        (["--source", f"{path}:1000000000"], "at most 1000"),
        (["--source", "addition:0"], "or addition:COUNT[:DIGITS]"),
        (["--source", "addition:9:19"], "at most 18 digits"),
        (["--source", one], "no train conversation is left; add different ones, raise weights or use --val-source"),
        (["--source", long, "--max-len", "20"], "check the file, or whether --max-len 20 truncates all answers"),
        (["--source", path, "--max-len", "0"], "--max-len must be at least 8"),
        (["--source", path, "--val-fraction", "1"], "--val-fraction"),
        (["--source", write_jsonl(tmp_path / "empty.jsonl", [])], "yields no conversation"),
    ]:
        out = run_sft(data, *args, code=1)
        assert message in out and out.startswith("error: ") and out.count("\n") == 1, out
    dataset.write_json(data / "tokenizer.json", tokenizer_spec(SPECIALS[:1]))
    assert "has no <|assistant_end|> token" in run_sft(data, "--source", path, code=1)
    assert "complete dataset" in run_sft(tmp_path, "--source", path, code=1)


def test_validation_conversations_are_left_out_of_training(data, tmp_path):
    values = random_conversations(20)
    train = write_jsonl(tmp_path / "c.jsonl", values)
    val = write_jsonl(tmp_path / "v.jsonl", [*values[:3], chat("only", "here")])
    out = run_sft(data, "--source", f"{train}:2", "--val-source", val)
    assert "removed from training: 6 conversations" in out
    tok = ts.Tokenizer(data / "tokenizer.json")
    assert as_set(read_split(data, "train")) == as_set(reference(v, tok) for v in values[3:] * 2)
    assert "left out" not in run_sft(data, "--source", train)


@pytest.mark.parametrize(("count", "held_out"), [(40, 2), (3000, 50), (6000, 60)])
def test_of_few_conversations_more_are_held_out(data, tmp_path, count, held_out):
    run_sft(data, "--source", write_jsonl(tmp_path / "c.jsonl", [chat(f"{i}", "z") for i in range(count)]))
    assert len(read_split(data, "val")) == held_out


def test_forms_of_other_datasets(data, tmp_path):
    """A bare list, ShareGPT, Alpaca, and a file that is one JSON list, as text and as Parquet."""
    first, second = chat("a", "b"), chat("task\n\ninput", "c")
    turns = [{"from": name, "value": text} for name, text in (("human", "a"), ("gpt", "b"))]
    forms = [
        first["messages"],
        {"id": 1, "conversations": turns},
        {"instruction": "task", "input": "input", "output": "c"},
        {"instruction": "a", "input": "", "output": "b"},
    ]
    expected = [first, first, second, first]
    tok = ts.Tokenizer(data / "tokenizer.json")
    val = write_jsonl(tmp_path / "v.jsonl", [chat("q", "z")])
    (tmp_path / "x.json").write_text(json.dumps(forms), encoding="utf-8-sig")
    for i, form in enumerate(forms[1:]):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([form]), tmp_path / f"{i}.parquet")
    for path, values in ((write_jsonl(tmp_path / "x.jsonl", forms), expected), (tmp_path / "x.json", expected),
                         (tmp_path / "[0-9].parquet", expected[1:])):  # fmt: skip
        run_sft(data, "--source", path, "--val-source", val)
        assert as_set(read_split(data, "train")) == as_set(reference(v, tok) for v in values)
