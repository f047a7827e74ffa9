"""CORE: the packed scorer against one that renders and scores one example at a time, written from the definition.

The bundle is synthetic, with the layout, the 22 tasks and the oddities of the real one: blank contexts, continuations
with blanks around them, equal choices, choices that begin others, prompts that are too long, contexts that share ends.
"""

import csv
import functools
import json
import random
import shutil
from os.path import commonprefix  # of any lists
from types import SimpleNamespace

import numpy as np
import pytest
import score_core
import torch
import train_small as ts
from lib import choices

from commands import ran, sets, stops
from processes import python
from tiny import ALONE, MERGES, TINY, WORDS, list_files, logits, random_model, write_dataset

# label, kind, shots, baseline in percent, delimiter
TABLE = [
    ("hellaswag_zeroshot", "multiple_choice", 0, 25, " "), ("jeopardy", "language_modeling", 10, 0, "\nAnswer: "),
    ("bigbench_qa_wikidata", "language_modeling", 10, 0, " "), ("arc_easy", "multiple_choice", 10, 25, "\nAnswer: "),
    ("arc_challenge", "multiple_choice", 10, 25, "\nAnswer: "), ("copa", "multiple_choice", 0, 50, " "),
    ("commonsense_qa", "multiple_choice", 10, 20, " "), ("piqa", "multiple_choice", 10, 50, "\nAnswer: "),
    ("openbook_qa", "multiple_choice", 0, 25, " "), ("lambada_openai", "language_modeling", 0, 0, " "),
    ("hellaswag", "multiple_choice", 10, 25, " "), ("winograd", "schema", 0, 50, " "),
    ("winogrande", "schema", 0, 50, " "), ("bigbench_dyck_languages", "language_modeling", 10, 0, " "),
    ("agi_eval_lsat_ar", "multiple_choice", 3, 20, " "), ("bigbench_cs_algorithms", "language_modeling", 10, 0, " "),
    ("bigbench_operators", "language_modeling", 10, 0, " "),
    ("bigbench_repeat_copy_logic", "language_modeling", 10, 0, " "), ("squad", "language_modeling", 10, 0, " "),
    ("coqa", "language_modeling", 0, 0, " "), ("boolq", "multiple_choice", 10, 62, "\nAnswer: "),
    ("bigbench_language_identification", "multiple_choice", 10, 9.1, " "),
]  # fmt: skip
LENGTH = 160  # of the model's context; many ten-shot prompts are longer
SIZES = {**TINY, "max_seq_len": LENGTH, "pack_tokens": 256, "window_short": 16, "window_long": 100,
         "stages": ((1.0, 2, 1.0),)}  # fmt: skip
CONFIG = ts.Config(**SIZES)


def make_item(kind, rng, number):
    def words(low, high):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    if kind == "language_modeling":
        odd = [{"context": "", "continuation": "the"}, {"context": "  the \n", "continuation": "\n\nrest "},
               {"context": words(90, 120), "continuation": "ü"}, {"context": "in", "continuation": words(12, 15)},
               {"context": "Q:", "continuation": ""}]  # fmt: skip
        item = {"context": words(2, 7), "continuation": words(1, 2)}
    elif kind == "schema":
        start = words(1, 4)
        item = {"context_options": [start + " " + words(1, 3), start + " " + words(1, 3)],
                "continuation": words(1, 5), "gold": rng.randrange(2)}  # fmt: skip
        odd = [{"context_options": ["the and", "the the and"], "continuation": "is and", "gold": 1},
               {"context_options": ["the", "the"], "continuation": "is", "gold": 1},
               {"context_options": [words(150, 170), words(80, 90)], "continuation": "is in", "gold": 0}]  # fmt: skip
    else:
        count = rng.choice((2, 4))
        item = {"query": words(2, 7), "choices": [words(1, 4) for _ in range(count)], "gold": rng.randrange(count)}
        odd = [{"query": "the", "choices": ["an order", "stone", "an order", "in"], "gold": 2},
               {"query": "is", "choices": ["the", "the and", "the stone ü"], "gold": 0},
               {"query": words(60, 80), "choices": [words(1, 1), words(20, 30)], "gold": 1},
               {"query": "is", "choices": ["the", "the"], "gold": 1}, {"query": "", "choices": ["a"] * 5, "gold": 0},
               {"query": "x", "choices": [words(50, 60) for _ in range(5)], "gold": 3}]  # fmt: skip
    return odd[number] if number < len(odd) else item


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("bundle") / "eval_bundle", random.Random(0)
    lines, meta = ["icl_tasks:"], ["Eval Task,Task Category,Task Type,#shots,Random baseline,Description"]
    for label, kind, shots, baseline, delimiter in TABLE:
        uri = f"some_group/{label}.jsonl"
        lines += ["-", f"  label: {label}", f"  dataset_uri: {uri}", f"  num_fewshot: [{shots}]",
                  f"  icl_task_type: {kind}"]  # fmt: skip
        lines += [] if delimiter == " " else [f"  continuation_delimiter: {json.dumps(delimiter)}"]
        meta.append(f'{label},group,{kind},{shots},{baseline},"a, b"')
        path = root / "eval_data" / uri
        path.parent.mkdir(parents=True, exist_ok=True)
        items = [make_item(kind, rng, i) for i in range(14)]
        path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    (root / "core.yaml").write_text("\n".join(lines) + "\n")
    (root / "eval_meta_data.csv").write_text("\n".join(meta) + "\n")
    return root


@pytest.fixture(scope="module")
def data(bundle, tmp_path_factory):
    """A dataset directory with core files. dataset.json is completed so that data/dataset.py accepts it."""
    root = write_dataset(tmp_path_factory.mktemp("core") / "data", hashes=False)
    for name in ("tokenizer", "dataset"):
        content = {"format": f"decoderstack-{name}-1", **json.loads((root / f"{name}.json").read_text())}
        (root / f"{name}.json").write_text(json.dumps(content))
    list_files(root, documents=1)
    done = python("data/core_tasks.py", "--bundle", bundle, "--data", root)
    assert done.returncode == 0, done.stderr
    return root


def plain_rows(items, index, kind, shots, delimiter, encode, length):
    """[(tokens, start)] of one item; the tokens from start on are scored."""
    others = [other for i, other in enumerate(items) if i != index]
    prompt = ""
    for other in random.Random(1234 + index).sample(others, shots):
        if kind == "multiple_choice":
            prompt += other["query"] + delimiter + other["choices"][other["gold"]] + "\n\n"
        elif kind == "schema":
            prompt += other["context_options"][other["gold"]] + delimiter + other["continuation"] + "\n\n"
        else:
            prompt += other["context"].strip() + delimiter + other["continuation"] + "\n\n"
    item = items[index]
    if kind == "language_modeling":
        question = prompt + item["context"].strip() + delimiter
        rows = [encode(question + item["continuation"])]
        starts = [len(commonprefix([encode(question.strip()), *rows]))]
    elif kind == "schema":
        rows = [encode(prompt + context + delimiter + item["continuation"]) for context in item["context_options"]]
        same = len(commonprefix([row[::-1] for row in rows]))
        starts = [max(len(row) - same, 1) for row in rows]
    else:
        rows = [encode(prompt + item["query"] + delimiter + choice) for choice in item["choices"]]
        starts = [min(len(commonprefix(rows)), min(map(len, rows)) - 1)] * len(rows)
    cut = [max(len(row) - length, 0) for row in rows]
    return [(row[c:], max(start - c, 1)) for row, start, c in zip(rows, starts, cut, strict=True)]


def plain_score(model, rows, kind, gold, vocab_size):
    """(right or wrong, distance to the nearest tie) of one item, a forward for each of its rows."""
    means = []
    for tokens, start in rows:
        z = logits(model, tokens).double()
        if kind == "language_modeling":
            said = z[start - 1 : len(tokens) - 1, :vocab_size]
            top = said.topk(2).values
            right = all(said[i].argmax().item() == tokens[start + i] for i in range(len(said)))
            return right, (top[:, 0] - top[:, 1]).min().item() if len(said) else 1.0
        nats = [-z[t - 1].log_softmax(0)[tokens[t]].item() for t in range(start, len(tokens))]
        means.append(sum(nats) / len(nats))
    best = means.index(min(means))  # the first of equals
    gap = min((abs(m - means[best]) for i, m in enumerate(means) if rows[i] != rows[best]), default=1.0)
    return best == gold, gap


def read_items(bundle, label):
    path = bundle / "eval_data/some_group" / f"{label}.jsonl"
    items = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    random.Random(1337).shuffle(items)
    return items


def read(data, label, limit=None) -> choices.ChoiceTask:
    name = f"core/{label}.npz"
    return score_core.read_task(data / name, score_core.core_files(ts.Dataset.open(data))[name], limit, LENGTH)


def packed(model, data, label, size=512, limit=None):
    dataset, task = ts.Dataset.open(data), read(data, label, limit)

    def score(inputs):
        assert all(len(t) == size for t in inputs[:5]) and all(len(t) == size // 2 for t in inputs[6:])
        return choices.score_packed(model, inputs)

    return task, choices.score_task(score, task, size, model.windows, dataset.tokenizer.bos_id, ALONE)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, seed=3)


@pytest.mark.parametrize("row", {(row[1:3], row[4]): row for row in TABLE}.values(), ids=lambda row: row[0])
def test_packed_equals_plain(bundle, data, model, row):
    """Every item of a task of each kind: tokens, spans and the verdict, for three sizes of the buffer."""
    label, kind, shots, baseline, delimiter = row
    tokenizer, items = ts.Tokenizer(data / "tokenizer.json"), read_items(bundle, label)

    def encode(text):
        return [tokenizer.bos_id, *tokenizer.encode(text)]

    expected = []
    task, _ = packed(model, data, label)
    assert (task.name, task.kind, task.chance, len(task.examples)) == (label, kind, baseline / 100, len(items))
    for index, item in enumerate(items):
        rows = plain_rows(items, index, kind, shots, delimiter, encode, LENGTH)
        assert [r.tolist() for r in task.examples[index]] == [tokens for tokens, _ in rows]
        assert task.spans[index] == [(start, len(tokens)) for tokens, start in rows]
        right, gap = plain_score(model, rows, kind, item.get("gold", 0), CONFIG.vocab_size)
        assert gap > 2e-5, "the synthetic data should not hold near-ties"
        expected.append(right)
    for size in (2 * LENGTH, 512, 2048):
        assert packed(model, data, label, size)[1].tolist() == expected


def test_attention_kernel(data, model, monkeypatch):
    """The Triton kernel in its interpreter (or on a GPU) against the reference, on a real layout."""
    if choices.triton is None:
        pytest.skip("no triton")
    monkeypatch.setattr(choices, "use_triton", lambda q: True)
    task = read(data, "arc_easy")
    batch = choices.ChoiceBatch(512, model.windows, 0)
    for rows, spans in zip(task.examples, task.spans, strict=True):
        batch.add(rows, spans, 0)
    inputs = batch.inputs(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    qkv = torch.randn(512, 3, 2, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.to(inputs.tokens_T.device).half().unbind(1)
    for window_start in inputs.window_start_2T:
        layout = (window_start, inputs.hidden_start_T, inputs.choice_start_T)
        found = choices.choice_attention(q, k, v, *layout)
        wanted = choices.choice_attention_ref(q.float(), k.float(), v.float(), *layout)
        torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)


def test_ties_go_to_the_first(data, model):
    """Equal choices: the first counts, even if the packed losses differ by rounding."""
    rows = [np.array([0, 5, 6, 7])] * 3
    task = choices.ChoiceTask("t", "multiple_choice", 0.0, np.array([0, 1, 2]), [rows] * 3, [[(3, 4)] * 3] * 3)
    drift = iter(torch.arange(1000, 0, -1).float())

    def score(inputs):
        targets = inputs.targets_R
        return torch.tensor([next(drift) for _ in targets]), targets > 0

    assert choices.score_task(score, task, 64, model.windows, 0, ALONE).tolist() == [True, False, False]


def test_greedy_answers_count(data, model):
    """What the model itself says is right; with any one of its tokens changed it is wrong."""
    rows, said = [], []
    for prompt in ([0, 5, 6, 7], [0, *range(20, 110)], [0]):
        row = list(prompt)
        for _ in range(4):
            row.append(logits(model, row)[-1, : CONFIG.vocab_size].argmax().item())
        for change in (None, -1, -2, -4):
            other = list(row)
            if change:
                other[change] = (other[change] + 1) % CONFIG.vocab_size
            rows.append([np.array(other, np.int32)])
            said.append(change is None)
    spans = [[(len(row) - 4, len(row))] for (row,) in rows]
    task = choices.ChoiceTask("t", "language_modeling", 0.0, np.zeros(len(rows), np.int32), rows, spans)
    found = choices.score_task(choices.scorer(model, compile=False), task, 512, model.windows, 0, ALONE)
    assert found.tolist() == said


def test_one_graph(data, model, monkeypatch):
    """The scorer compiles to one graph without a break, and batches of other content compile nothing."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compiled, bos_id = choices.scorer(model, compile=True), ts.Dataset.open(data).tokenizer.bos_id
    for label in ("copa", "arc_easy", "winograd"):
        task = read(data, label)
        found = choices.score_task(compiled, task, 512, model.windows, bos_id, ALONE)
        assert found.tolist() == packed(model, data, label)[1].tolist()
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_subset_has_the_shots_of_the_full_run(data, bundle, model, trained, tmp_path):
    """The first N items score alike in a full run, in a limited one, and in files that hold N items only."""
    root = shutil.copytree(data, tmp_path / "data")
    assert python("data/core_tasks.py", "--bundle", bundle, "--data", root, "--limit", 5).returncode == 0
    for label in ("arc_easy", "squad", "agi_eval_lsat_ar"):
        full, scores = packed(model, data, label)
        for where in (data, root):
            part, found = packed(model, where, label, limit=5)
            assert found.tolist() == scores[:5].tolist() and len(part.examples) == 5
            for a, b in zip(part.examples, full.examples, strict=False):
                assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    result = ran(score_core.main, shutil.copytree(trained, tmp_path / "run"), "--data", root, *SMALL)
    assert "core_estimate" in result and "core" not in result, "files of 5 items give no CORE"


def test_mistakes(data, bundle, tmp_path):
    """One sentence for what a person can get wrong."""
    for bundle_dir, root, words in (
        (tmp_path / "none", data, "check the path"),
        (tmp_path, data, "no core.yaml"),
        (bundle, tmp_path, "dataset.json"),
    ):
        done = python("data/core_tasks.py", "--bundle", bundle_dir, "--data", root)
        assert done.returncode == 1 and words in done.stderr and done.stderr.startswith("error: ")
    with pytest.raises(score_core.RunError, match="corrupt"):
        score_core.read_task(data / "core/copa.npz", "0" * 64, None, LENGTH)


SMALL = ("--batch-tokens", 700)  # a buffer of the default size takes a tenth of a second on a CPU


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run of four steps with a checkpoint in the middle."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    argv = [*sets(SIZES), "--data", str(data), "--run-dir", str(run_dir), "--steps", "4", "--save-every", "2"]
    assert ts.main([*argv, "--dtype", "float32"]) == 0
    return run_dir


def test_command(data, trained, tmp_path):
    """core.csv, result.json and the last line agree with each other and with the definition of CORE."""
    run_dir = shutil.copytree(trained, tmp_path / "run")
    before = json.loads((run_dir / "result.json").read_text())
    result = ran(score_core.main, run_dir, *SMALL)
    assert result["run_dir"] == str(run_dir)
    rows = list(csv.DictReader((run_dir / "core.csv").open()))
    assert len(rows) == 23 and rows[-1]["task"] == "CORE" and float(rows[-1]["centered"]) == result["core"]
    model = score_core.engine.load_run(run_dir, device="cpu").model
    for row in rows[:-1]:
        baseline = {label: value / 100 for label, _, _, value, _ in TABLE}[row["task"]]
        wanted = (float(row["accuracy"]) - baseline) / (1 - baseline)
        assert float(row["centered"]) == pytest.approx(wanted) and row["examples"] == "14"
        assert float(row["accuracy"]) == packed(model, data, row["task"])[1].mean()
    assert result["core"] == pytest.approx(sum(float(row["centered"]) for row in rows[:-1]) / 22)
    after = json.loads((run_dir / "result.json").read_text())
    assert after == {**before, "core": result["core"], "core_seconds": result["core_seconds"]}


def test_an_estimate_is_no_core(trained, tmp_path):
    """With --limit, core.csv and result.json stay as they are."""
    run_dir = shutil.copytree(trained, tmp_path / "run")
    before = (run_dir / "result.json").read_text()
    result = ran(score_core.main, run_dir, "--limit", 4, *SMALL)
    assert "core" not in result and not (run_dir / "core.csv").exists()
    assert (run_dir / "result.json").read_text() == before
    rows = list(csv.DictReader((run_dir / "core_limit_4.csv").open()))
    assert len(rows) == 23 and {row["examples"] for row in rows[:-1]} == {"4"} and rows[-1]["task"] != "CORE"
    assert result["core_estimate"] == pytest.approx(sum(float(row["centered"]) for row in rows[:-1]) / 22)


def test_other_checkpoints_have_their_own_table(trained, tmp_path):
    """core.csv and result.json describe the finished model only."""
    run_dir = shutil.copytree(trained, tmp_path / "run")
    result = run_dir / "result.json"
    before = result.read_text()
    ran(score_core.main, run_dir, "--step", 2, *SMALL)
    assert (run_dir / "core_step_2.csv").is_file() and not (run_dir / "core.csv").exists()
    assert result.read_text() == before
    result.unlink()  # a run that was stopped
    ran(score_core.main, run_dir, "--limit", 1, *SMALL)
    assert (run_dir / "core_step_4_limit_1.csv").is_file() and not (run_dir / "core.csv").exists()
    assert not result.exists()


def test_ranks_pack_alike(monkeypatch):
    """All take the batches of the GPU with the least free memory."""
    for free, other, size in ((80, 65536, 65536), (80, 16384, 16384), (8, 65536, 16384)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 80 * 2**30))
        ranks = SimpleNamespace(device=torch.device("cuda"), gather=lambda own, other=other: [own, other])
        assert choices.default_batch_tokens(ranks) == size


def test_two_processes(trained, tmp_path):
    """Under torchrun the ranks share the work; the score is that of one process."""
    scores = []
    for ranks in (1, 2):
        run_dir = shutil.copytree(trained, tmp_path / str(ranks))
        done = python("runs/score_core.py", run_dir, "--limit", 3, *SMALL, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("core: ") == 1, "one rank prints"
        scores.append(json.loads(done.stdout.splitlines()[-1])["core_estimate"])
    assert scores[0] == scores[1]


def test_mistakes_of_the_command(data, trained, tmp_path):
    """A dataset without CORE files is named with the command that adds them."""
    bare = shutil.copytree(data, tmp_path / "bare")
    info = ts.unseal((bare / "dataset.json").read_bytes())
    info["files"] = {name: entry for name, entry in info["files"].items() if not name.startswith("core/")}
    (bare / "dataset.json").write_bytes(ts.seal(info))
    other = write_dataset(tmp_path / "other", merges=MERGES[:-1])
    info = ts.unseal((other / "dataset.json").read_bytes())
    info["files"]["core/copa.npz"] = {"sha256": ""}
    (other / "dataset.json").write_bytes(ts.seal(info))
    for flags, words in (
        (("--data", bare), f"python data/core_tasks.py --download --data {bare}"),
        (("--data", other), "different tokenizer"),
        (("--step", 99), "no checkpoint at step 99 (its steps: 2, 4); choose another"),
    ):
        assert words in stops(score_core.main, trained, *flags)
