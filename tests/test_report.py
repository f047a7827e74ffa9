"""runs/report.py: the table against rows by hand, the curves, and samples against plain forward passes."""

import gzip
import json
import os
import re
import sys

import engine
import leaderboard
import pytest
import report as command
import train_small as ts
from lib import report
from lib.command import RunError

from commands import sets, write_run
from tiny import ROOT, TINY

MACHINE = {"device": "GPU", "num_devices": 8, "torch": "2.11.0", "git_commit": "0123456789abcdef", "git_dirty": True}
MACHINE_ROWS = {
    "device hours": "0.0800", "device": "8 x GPU", "torch": "2.11.0", "commit": "0123456789ab (changed)"
}  # fmt: skip


def write_files(run_dir, description: dict, log: list[dict], result: dict | None = None) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps(description))
    (run_dir / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    if result:
        (run_dir / "result.json").write_text(json.dumps(result))


def tables(run_dir) -> list[list[list[str]]]:
    """The cells of all tables of a report, without their first two lines."""
    text = (run_dir / "report.md").read_text()
    found = re.findall(r"^\|.*\|\n\| (?:---:? ?\| ?|---:? )+\n((?:\|.*\|\n)+)", text, re.M)
    return [[line[2:-2].split(" | ") for line in part.splitlines()] for part in found]


def texts_of(run_dir) -> list[str]:
    text = (run_dir / "report.md").read_bytes().decode()  # a sample may hold \r
    return re.findall(r"^````text\n(.*?)\n````$", text, re.M | re.S)


def curves(log: list[dict], **references) -> dict:
    """By axis and legend: the points that are plotted."""
    found = {}
    for axes in report.plot_curves(log, "a title with $1 and $2", references).axes:
        for line in axes.get_lines():
            found[axes.get_ylabel(), line.get_label()] = list(zip(*line.get_data(), strict=True))
    return found


RESULT = {"val_bpb": 0.98765, "steps": 1200, "tokens": 5_000_000, "train_seconds": 36.0, "run_dir": "elsewhere",
          "tokens_per_second": 138888.9, "mfu": 0.456, "peak_memory_gib": 20.25}  # fmt: skip
RESULT_ROWS = {
    "validation": "0.9877 bits per byte", "tokens": "5,000,000", "steps": "1,200", "training time": "36.0 s",
    "speed": "138,889 tokens/s", "MFU": "45.6%", "peak memory": "20.2 GiB",
}  # fmt: skip
START = [{"machine": {**MACHINE, "device": "CPU"}}, {"machine": MACHINE}]

# What a run wrote (config.json, log.jsonl, result.json), and the rows of its table.
FINISHED = {
    "pretraining": (
        {"command": "pretrain", "config": {"data": "data/shards/mine"}, "starts": START},
        [{"step": 1, "tokens": 10, "bpb": 2.0}, {"step": 1200, "tokens": 5_000_000, "val_bpb": 0.98765}],
        RESULT, {**RESULT_ROWS, "data": "data/shards/mine", **MACHINE_ROWS},
    ),
    "encoder": (
        {"command": "finetune_encoder", "config": {"data": "d"}, "machine": MACHINE,
         "finetune_encoder": {"run": "out/encoder", "checkpoint": "step_000008"}},
        [{"step": 0, "tokens": 0, "ndcg@10": 0.1, "bm25_ndcg@10": 0.4}, {"step": 3, "tokens": 9, "loss": 1.0}],
        {"ndcg@10": 0.5, "bm25_ndcg@10": 0.4, "recall@10": 0.75, "steps": 3, "tokens": 9, "train_seconds": 36,
         "mfu": 0},
        {"nDCG@10": "0.5000", "nDCG@10, before": "0.1000", "nDCG@10 of BM25": "0.4000", "recall@10": "0.7500",
         "tokens": "9", "steps": "3", "training time": "36.0 s", "data": "d", "finetuned from": "encoder step_000008",
         **MACHINE_ROWS},
    ),
    "Hugging Face": (
        {"command": "sft", "model_name": "a/model", "data": {"path": "x"}},
        [{"step": 0, "tokens": 0, "val_loss": 2.5}, {"step": 4, "tokens": 800, "loss": 1.5}],
        {"val_loss": 1.25, "steps": 4, "tokens": 800, "train_seconds": 2.0, "loss": 1.5},
        {"validation": "1.2500 nats per target", "validation, before": "2.5000 nats per target",
         "tokens": "800", "steps": "4", "training time": "2.0 s", "model": "a/model"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FINISHED)
def test_the_table_of_a_finished_run(tmp_path, kind):
    """Every metric of result.json under its name, the last start's machine, and where the run came from."""
    description, log, result, rows = FINISHED[kind]
    write_files(tmp_path, description, log, result)
    assert command.main([str(tmp_path), "--no-samples"]) == 0
    (found,) = tables(tmp_path)
    assert dict(found) == rows and len(found) == len(rows)
    assert found[0] == list(next(iter(rows.items()))), "the picture has the score in its title"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "![curve](curve.png)" in (tmp_path / "report.md").read_text()


def test_a_run_on_two_numbers_of_gpus():
    """How long each part took is not known, so there are no device hours."""
    starts = [{"machine": {**MACHINE, "num_devices": 4}}, {"machine": MACHINE}]
    rows = report.machine_rows({"starts": starts}, {"train_seconds": 36.0})
    assert rows == {label: value for label, value in MACHINE_ROWS.items() if label != "device hours"}


def test_a_run_in_progress(tmp_path):
    """Without result.json the table shows the newest metrics of the log, whose last line may be half written."""
    description = FINISHED["pretraining"][0]
    log = [
        {"step": 20, "tokens": 2000, "val_bpb": 1.6, "train_seconds": 24.0},
        {"step": 30, "tokens": 3000, "train_seconds": 36.0, "tokens_per_second": 80.0, "memory_gib": 2.0},
    ]
    write_files(tmp_path, description, log)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 40, "tok')
    assert command.main([str(tmp_path)]) == 0
    (found,) = tables(tmp_path)
    assert dict(found) == MACHINE_ROWS | {
        "validation": "1.6000 bits per byte", "tokens": "3,000", "steps": "30", "training time": "36.0 s",
        "speed": "80 tokens/s", "peak memory": "2.0 GiB", "data": "data/shards/mine",
    }  # fmt: skip
    text = (tmp_path / "report.md").read_text()
    assert "Still running: the metrics are from step 30." in text
    assert "no samples: " in text

    (tmp_path / "log.jsonl").write_text("")  # it has just begun
    assert command.main([str(tmp_path)]) == 0 and "curve.png" not in (tmp_path / "report.md").read_text()


def test_reinforcement_learning(tmp_path):
    """Scores and answers of the first and the last evaluation; text that would break a table does not."""
    settings = {"task": "addition", "digits": 2, "prompts": 4, "samples": 6, "muon_lr": 0.2, "adam_lr": 0.02,
                "source": "out/sft", "seed": 3}  # fmt: skip
    description = {"command": "rl", "rl": settings, "machine": MACHINE}
    question = {"question": "1 | 2?\n<b>", "expected": "3"}
    evaluations = [
        {"step": 0, "greedy": 0.25, "pass@1": 0.2, "answers": [{**question, "answer": "4", "reward": 0.0}]},
        {"step": 15, "greedy": 0.3, "pass@1": 0.1, "answers": [{**question, "answer": "x", "reward": 0.5}]},
        {"step": 30, "greedy": 0.75, "pass@1": 0.15, "answers": [{**question, "answer": "3", "reward": 1.0}]},
    ]
    steps = [{"step": i, "reward": i / 30, "train_seconds": 1.2 * i} for i in range(1, 31)]
    log = [evaluations[0], *steps[:15], evaluations[1], *steps[15:], evaluations[2]]
    write_files(tmp_path, description, log)
    assert command.main([str(tmp_path)]) == 0

    scores, rows, answers = tables(tmp_path)
    assert scores == [["greedy", "25.0%", "75.0%", "+50.0"], ["pass@1", "20.0%", "15.0%", "-5.0"]]
    assert answers == [["1 &#124; 2?<br>&lt;b&gt;", "3", "4", "0.00", "3", "1.00"]]
    assert dict(rows) == MACHINE_ROWS | {
        "task": "addition of 2-digit numbers", "answers of a step": "4 questions x 6", "seed": "3", "steps": "30",
        "learning rates": "0.2 (matrices) and 0.02 (rest) times pretraining's, falling to 0",
        "started from": "sft", "training time": "36.0 s",
    }  # fmt: skip

    found = curves(log)
    unit = "reward, accuracy"
    assert found[unit, "mean reward of a step"] == [(i, i / 30) for i in range(1, 31)]
    smooth = found[unit, "mean of 20 steps"]
    assert smooth == [(i, pytest.approx((i - 9.5) / 30)) for i in range(20, 31)]
    assert found[unit, "held out, greedy"] == [(0, 0.25), (15, 0.3), (30, 0.75)]
    assert found[unit, "held out, pass@1"] == [(0, 0.2), (15, 0.1), (30, 0.15)] and len(found) == 4


def test_a_reference_is_drawn_in_grey(tmp_path):
    """Another run, and the newest entry of an args file from its first seed's log."""
    log = [{"step": 1, "tokens": 2_000_000, "bpb": 2.0}, {"step": 2, "tokens": 4_000_000, "val_bpb": 1.5}]
    write_files(tmp_path / "a", FINISHED["pretraining"][0], log)
    assert report.read_reference(str(tmp_path / "a")) == log
    found = curves(log[:1], **{"@runs/p34.args": log})
    assert found["bits per byte", "@runs/p34.args validation"] == [(4.0, 1.5)] and len(found) == 3
    entry = ROOT / "baselines" / leaderboard.current_entries()["p34.args"]["name"]
    with gzip.open(entry / "log_0.jsonl.gz", "rt") as file:
        assert report.read_reference("@runs/p34.args") == report.read_reference(str(entry)) == [*map(json.loads, file)]
    assert command.main([str(tmp_path / "a"), "--no-samples", "--against", "@runs/p34.args"]) == 0
    assert command.main([str(tmp_path / "a"), "--no-samples", "--against", "@runs/none.args"]) == 1
    with pytest.raises(RunError, match="an args file is given as @runs/p34.args"):
        report.read_reference("runs/p34.args")


@pytest.mark.parametrize(("names", "training", "score"), [
    (("bpb", "val_bpb"), ("bits per byte", "training (estimate)"), ("bits per byte", "validation")),
    (("loss", "val_loss"), ("loss, nats", "training"), ("loss, nats", "validation")),
    (("loss", "ndcg@10"), ("loss, nats", "training"), ("nDCG@10", "held out")),
], ids=("pretraining", "Hugging Face", "encoder"))  # fmt: skip
def test_curves(names, training, score):
    """Training and validation over millions of tokens; pretraining also logs a loss, which is not plotted."""
    log = [{"tokens": x * 1e6, "loss": 9.0, names[0]: 5 - x} for x in (1.0, 2.0)]
    log.append({"tokens": 2e6, names[1]: 0.5})
    assert curves(log) == {training: [(1.0, 4.0), (2.0, 3.0)], score: [(2.0, 0.5)]}


def test_pretraining_of_a_few_steps(dataset_dir, tmp_path, capsys):
    """A run of the training script: samples go on with held-out text as the engine does."""
    run_dir = tmp_path / "run"
    flags = ["--data", str(dataset_dir), "--run-dir", str(run_dir), "--steps", "2", "--seed", "3", *sets(TINY)]
    assert ts.main(flags) == 0
    capsys.readouterr()
    assert command.main([str(run_dir), "--device", "cpu"]) == 0
    said = capsys.readouterr().out

    run = engine.load_run(run_dir, device="cpu")
    documents = ts.validation_documents(ts.Dataset.open(dataset_dir), run.config)
    prompts = [ids[:9].tolist() for ids, _ in documents if len(ids) > 9][:3]
    options = {"max_tokens": run.config.max_seq_len - 8, "temperature": 0.5, "seed": run.config.seed}
    found = engine.Generator(run.model, run.tokenizer).generate(prompts, **options)
    expected = [run.tokenizer.decode([*a[1:], *b]) for a, b in zip(prompts, found, strict=True)]
    assert texts_of(run_dir) == expected and len(expected) == 3
    samples = "".join(f"--- sample\n{text}\n" for text in expected)
    assert said == f"{samples}--- report: {run_dir}/report.md\n"
    assert "## Samples of step 2" in (run_dir / "report.md").read_text()
    result = json.loads((run_dir / "result.json").read_text())
    assert dict(tables(run_dir)[0])["validation"] == f"{result['val_bpb']:.4f} bits per byte"


@pytest.fixture
def run_dir(bpe, tmp_path):
    """A run with random weights, whose dataset is not here."""
    run_dir = write_run(tmp_path / "run", bpe, data="nowhere", max_seq_len=96)
    (run_dir / "log.jsonl").write_text('{"step": 7, "tokens": 4096, "val_bpb": 1.25}\n')
    return run_dir


def test_without_the_dataset_prompts_are_fixed(run_dir):
    """As after a download of the run."""
    assert command.main([str(run_dir), "--device", "cpu"]) == 0
    found = texts_of(run_dir)
    assert len(found) == 3
    for prompt, text in zip(report.PROMPTS, found, strict=True):
        assert text.startswith(prompt) and len(text) > len(prompt)


def test_a_reader_that_has_ended(run_dir, monkeypatch):
    """As with `| head`: the report is complete."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert command.main([str(run_dir), "--device", "cpu"]) == 1
    assert len(texts_of(run_dir)) == 3


def test_a_model_that_cannot_be_loaded_costs_the_samples_only(run_dir, capsys):
    path = next(run_dir.glob("checkpoints/*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert command.main([str(run_dir), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "has no complete checkpoint; wait until the run saves one" in said
    line = next(line for line in said.splitlines() if "no samples" in line)
    assert line in (run_dir / "report.md").read_text() and tables(run_dir)


def test_no_run_directory(tmp_path, capsys):
    (tmp_path / "report.md").touch()
    for path in (tmp_path, tmp_path / "report.md"):
        assert command.main([str(path)]) == 1
        assert capsys.readouterr().err.startswith(f"error: there is no {path}/config.json; pass the directory of a run")
