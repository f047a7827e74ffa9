"""Finetuning on conversations: the loss against its definition, whole conversations in packs, and whole runs.

The dataset is made by data/pretrain.py and data/sft.py; runs go through main() as in test_runs.py.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import train_medium as tm
import train_small as ts
from safetensors.torch import load_file

from conftest import ALONE, CPU, MERGES, ROOT, TINY, TINY_MEDIUM, logits, random_model, write_dataset
from test_data_loader import FIELDS, same, segments
from test_data_sft import chat, read_split, run, write_jsonl
from test_runs import (  # noqa: F401  (two are fixtures)
    KILL,
    at_step,
    entries,
    fails,
    losses,
    saved,
    signal_handlers,
    snapshot,
    tensors,
    torchrun,
)

CONTEXT = TINY["max_seq_len"]
BASE = {key: value for key, value in TINY.items() if key != "tokens"}
WORDS = "the rest of an old stone is in that sea and there it ends".split()
MEMORY = {"who?": "the stone", "where?": "in the sea", "when?": "at the end", "and then?": "it rests"}


def words(rng, most) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A dataset with conversations of 8 to 65 tokens, some of which end with a question. Tests must not change it."""
    folder, rng = tmp_path_factory.mktemp("sft"), random.Random(0)
    write_jsonl(folder / "text.jsonl", [{"text": words(rng, 200)} for _ in range(300)])
    write_jsonl(folder / "val_text.jsonl", [{"text": words(rng, 60)} for _ in range(10)])
    command = ["data/pretrain.py", "--source", folder / "text.jsonl", "--val-source", folder / "val_text.jsonl",
               "--vocab-size", "300", "--workers", "1", "--out", folder / "data"]  # fmt: skip
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    talks = [chat(*(words(rng, 16) for _ in range(rng.choice((2, 2, 2, 3, 4))))) for _ in range(400)]
    source = write_jsonl(folder / "chat.jsonl", talks)
    run(folder / "data", "--source", source, "--val-fraction", 0.1, "--max-len", CONTEXT + 1, "--shard-tokens", 2000)
    return folder / "data"


def flags(data, run_dir, *more, **overrides) -> list[str]:
    sets = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    every = ("--save-every", "5", "--eval-every", "10", "--log-every", "1")
    return ["--data", str(data), "--run-dir", str(run_dir), *sets, *every, *map(str, more)]


@pytest.fixture(scope="session")
def base(data, tmp_path_factory) -> Path:
    """A pretrained run of two stages, so that YaRN has changed its attention. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "base"
    with contextlib.redirect_stdout(io.StringIO()):
        assert ts.main(flags(data, run_dir, "--steps", 20, **BASE)) == 0
    return run_dir


def sft(base, run_dir, *more, **overrides) -> list[str]:
    argv = flags("unused", run_dir, *more, **{"sft_packs": 4, **overrides})[2:]  # --data is that of the source
    return ["sft", "--from", str(base), *argv]


@pytest.fixture(scope="session")
def finished(base, tmp_path_factory) -> tuple[Path, str]:
    """An undisturbed finetuning run and what it printed. Tests must not change it."""
    run_dir, out = tmp_path_factory.mktemp("runs") / "sft", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert ts.main(sft(base, run_dir)) == 0
    return run_dir, out.getvalue()


def make_config(base, *more, **overrides) -> ts.Config:
    return ts.make_config(ts.build_parser().parse_args(sft(base, "unused", *more, **overrides)))


@pytest.fixture(scope="session")
def setup(data, base):
    """(config, dataset, its train conversations) of a finetuning run of two epochs."""
    config, dataset = make_config(base, max_epochs=2, tokens=2 * 60 * 512), ts.Dataset.open(data)
    config = dataclasses.replace(config, vocab_size=dataset.tokenizer.vocab_size)
    return config, dataset, ts.Conversations(dataset, "train", config)


def batches(setup, ranks=ALONE, position=None, first_step=0, most=10**9) -> list[ts.Batch]:
    """Those of two epochs, or the first of them."""
    config, dataset, talks = setup
    steps = min(most, -(-len(talks.packs) // 4) - first_step)
    loader = ts.PackLoader(dataset, config, ranks, position, first_step, talks)
    found = [loader.next() for _ in range(steps)]
    loader.close()
    return found


def talks_of(batch: ts.Batch, row: int):
    """(inputs, targets) of each conversation in a pack, without the padding."""
    return [(i, t) for i, t in segments(batch, row) if len(set(i)) > 1]


def expected(tokens, mask):
    """Inputs and targets of a conversation, by definition."""
    return tuple(tokens[:-1]), tuple(t if m else -1 for t, m in zip(tokens[1:], mask[1:], strict=True))


# ---- packs


def test_whole_conversations_once_an_epoch(setup, data):
    """Each epoch holds every conversation once, whole, with the mask's targets, in an order of its own."""
    config, _, _ = setup
    truth = [expected(*talk) for talk in read_split(data, "train")]
    assert max(len(i) for i, _ in truth) == CONTEXT and len(list((data / "sft").glob("train_*.mask.bin"))) > 3
    assert any(t[-1] == -1 for _, t in truth), "some end with a question"
    found, docs = [], []
    for batch in batches(setup):
        counted = 0
        for row in range(4):
            pack = talks_of(batch, row)
            found += [(tuple(i), tuple(t)) for i, t in pack]
            docs.append(len(pack))
            counted += sum(t != -1 for _, targets in pack for t in targets)
            rest = batch.targets[row, sum(len(i) for i, _ in pack) :]
            assert (rest == -1).all() and (batch.positions[row] < CONTEXT).all()
        assert batch.total_targets == counted == (batch.targets >= 0).sum()
    assert max(docs) <= config.pack_docs and len(found) == 2 * len(truth)
    epochs = found[: len(truth)], found[len(truth) :]
    assert all(Counter(epoch) == Counter(truth) for epoch in epochs)
    assert epochs[0] != truth and epochs[0] != epochs[1], "shuffled, each time anew"


def test_the_seed_draws_the_order(setup):
    """Equal seeds, equal packs; another seed packs the same conversations in another order."""
    config, dataset, talks = setup
    same_seed, other = (ts.Conversations(dataset, "train", dataclasses.replace(config, seed=seed)).packs
                        for seed in (config.seed, config.seed + 1))  # fmt: skip
    assert same_seed == talks.packs != other and sorted(sum(other, [])) == sorted(sum(talks.packs, []))


def test_best_fit():
    """Against the definition: the fullest pack with room, the oldest of equals; and little is left empty."""
    rng = np.random.default_rng(0)
    for room, most in ((100, 100), (100, 4), (70, 3)):
        lengths, packs = rng.integers(1, 70, 300), []
        order = rng.permutation(300)
        for i in order.tolist():
            open_packs = [p for p in packs if lengths[p].sum() + lengths[i] <= room and len(p) < most]
            if open_packs:
                max(open_packs, key=lambda p: lengths[p].sum()).append(i)
            else:
                packs.append([i])
        assert ts.best_fit(lengths, order, room, most) == packs
    lengths = np.clip(rng.lognormal(5.5, 0.8, 5000).astype(int), 8, 2048)
    packs = ts.best_fit(lengths, rng.permutation(5000), 8192, 256)
    assert lengths.sum() / (8192 * len(packs)) > 0.995


def test_any_position_continues_exactly(setup):
    """A loader that starts at a batch's position yields what follows, also over the border of the epochs."""
    found = batches(setup)
    assert len(found) > 12
    for i in range(0, len(found) - 2, 3):
        later = batches(setup, position=found[i].position, first_step=i + 1, most=2)
        assert len(later) == 2 and all(map(same, later, found[i + 1 :]))


def test_ranks_share_the_same_step(setup):
    """The ranks' packs behind each other are the packs of one process; the count is that of the whole step."""
    whole, *parts = (batches(setup, ranks) for ranks in (ALONE, *(ts.Ranks(r, r, 2, CPU) for r in range(2))))
    for batch, *shares in zip(whole, *parts, strict=True):
        for field in FIELDS:
            assert torch.equal(getattr(batch, field), torch.cat([getattr(s, field) for s in shares]))
        assert {s.total_targets for s in shares} == {batch.total_targets}


# ---- the loss


def step(setup, batch, packs=2):
    """Loss and gradients of train_step for the batch, on a model with random weights."""
    config = setup[0]
    state = ts.build_state(config, ALONE, lambda text: None)
    state.model.load_state_dict(random_model(config).state_dict())
    state.packs, grads = packs, {}
    state.optimizer.step = lambda *args: grads.update({n: p.grad for n, p in state.model.named_parameters()})
    return ts.train_step(state, batch).item(), grads


def test_loss_and_gradients_are_those_of_the_definition(setup, data):
    """The mean over all counted tokens of a step, from conversations one by one; no other target has a part in it."""
    config, dataset, _ = setup
    batch = batches(setup, most=1)[0]
    members = {tuple(i) for row in range(4) for i, _ in talks_of(batch, row)}
    model, total, count = random_model(config), 0.0, 0
    for tokens, mask in read_split(data, "train"):
        if tuple(tokens[:-1]) not in members:
            continue
        n = len(tokens) - 1
        z = model(torch.tensor(tokens[:-1]), None, torch.arange(n), torch.tensor([0, n, n], dtype=torch.int32), n)
        nats = z.logsumexp(1) - z[torch.arange(n), tokens[1:]]
        total, count = total + (nats * torch.tensor(mask[1:])).sum(), count + sum(mask[1:])
    (total / count).backward()
    assert count == batch.total_targets
    for packs in (1, 4):
        loss, grads = step(setup, batch, packs)
        assert loss == pytest.approx((total / count).item(), rel=1e-5)
        for name, param in model.named_parameters():
            scale = param.grad.abs().max().item()
            torch.testing.assert_close(grads[name], param.grad, atol=2e-5 * scale, rtol=1e-4, msg=name)


def test_user_tokens_are_no_targets(setup):
    """The end mark of a question without an answer is a target only: another token there changes no bit."""
    config, dataset, talks = setup
    batch = batches(setup, most=1)[0]
    other = ts.Conversations(dataset, "train", config)
    ends = other.borders[1:] - 1
    changed = ends[~other.counted[ends]]
    assert len(changed) > 5
    other.tokens[changed] = 7
    again = batches((config, dataset, other), most=1)[0]
    assert same(batch, again) and step(setup, batch)[0] == step(setup, again)[0]
    starts = ts.Conversations(dataset, "train", config).tokens == dataset.tokenizer.specials["<|assistant_start|>"]
    assert not talks.counted[starts].any() and set(talks.tokens[talks.counted].tolist()).isdisjoint(
        dataset.tokenizer.specials[name] for name in ("<|bos|>", "<|user_start|>", "<|user_end|>")
    )


def test_micro_batches_and_steps_without_a_target(setup):
    """A pack that counts nothing changes neither loss nor gradient; a step of such packs changes nothing and is 0."""
    config = setup[0]
    batch, empty = batches(setup, most=1)[0], ts.empty_packs(4, config, 0)
    for row in range(4):
        ts.pad_pack(empty, row, 0, 0, CONTEXT)
    empty = ts.Batch(*map(torch.from_numpy, empty), CONTEXT, 512, 0)
    joined = (torch.cat((getattr(empty, f), getattr(batch, f))) for f in FIELDS)
    both = dataclasses.replace(batch, **dict(zip(FIELDS, joined, strict=True)))
    (loss, grads), (loss_both, grads_both) = step(setup, batch), step(setup, both)
    assert loss == loss_both and all(torch.allclose(grads[n], grads_both[n], atol=1e-7) for n in grads)
    state = ts.build_state(config, ALONE, lambda text: None)
    for _ in range(2):
        assert ts.train_step(state, empty).item() == 0
    assert all(param.isfinite().all() for param in state.model.parameters())


def test_the_last_step_holds_what_is_left(setup):
    """An epoch that does not fill its last step ends with packs of padding."""
    config, dataset, talks = setup
    short = ts.Conversations(dataset, "train", config)
    short.packs = short.packs[:6]
    first, last = batches((config, dataset, short))
    assert [len(talks_of(last, row)) > 0 for row in range(4)] == [True, True, False, False]
    assert first.total_targets > last.total_targets == (last.targets >= 0).sum() > 0


# ---- runs


def test_run_directory_is_complete(finished, base, data):
    """Files as after pretraining, the command in config.json, every conversation once, answers in the report."""
    run_dir, out = finished
    config = json.loads((run_dir / "config.json").read_text())
    assert config["command"] == "sft" and json.loads((base / "config.json").read_text())["command"] == "pretrain"
    assert config["config"]["source"] == str(base / "checkpoints" / "step_000020") and config["flags"][0] == "sft"
    assert config["config"]["data"] == str(data) and config["config"]["width"] == 64
    for name in ("train_small.py", "tokenizer.json"):
        assert (run_dir / name).read_bytes() == (base / name).read_bytes()
    report = (run_dir / "report.md").read_text()
    assert "| finetuned from | base step_000020 |" in report
    assert report.count("```text") == 3 and all(question in report for question in ts.QUESTIONS)
    assert (run_dir / "curve.png").stat().st_size > 5000
    result = json.loads(out.splitlines()[-1])
    steps = -(-len(ts.Conversations(ts.Dataset.open(data), "train", ts.read_config(run_dir)).packs) // 4)
    assert (result["steps"], result["tokens"], result["run_dir"]) == (steps, steps * 512, str(run_dir))
    assert [e["step"] for e in entries(run_dir) if "val_bpb" in e] == [0, *range(10, steps, 10), steps]
    assert result["val_bpb"] == entries(run_dir)[-1]["val_bpb"] < entries(run_dir)[0]["val_bpb"]
    split = json.loads((data / "dataset.json").read_text())["splits"]["sft_train"]
    counted, talks = split["counted_tokens"], split["conversations"]
    padding = 1 - (split["tokens"] - talks) / result["tokens"]
    assert f"{counted:,} counted tokens in {talks:,} conversations, {padding:.1%} padding" in out and padding < 0.1
    logged = [e for e in entries(run_dir) if "lr" in e]
    assert [e["lr"] for e in logged] == pytest.approx([0.8 * (1 - i / steps) for i in range(steps)])
    tokenizer = ts.Tokenizer(run_dir / "tokenizer.json")
    size = sum(tokenizer.token_bytes[tokens] @ mask for tokens, mask in read_split(data, "train")) / counted
    assert [e["bpb"] for e in logged] == pytest.approx([e["loss"] / np.log(2) / size for e in logged])


def test_starts_from_the_models_weights_and_attention(finished, base, data):
    """Validation before the first step is the source's on the assistant's text, by definition; YaRN's results stay."""
    attention = json.loads((base / "checkpoints" / "step_000020" / "state.json").read_text())["attention"]
    assert attention["window_long"] == 24 and attention["scale"] > TINY.get("attention_scale", 0.12)
    for run_dir, logged in ((base, entries(finished[0])[0]), (finished[0], entries(finished[0])[-1])):
        model, tokenizer, config = ts.load(run_dir)
        nats = size = 0
        for tokens, mask in read_split(data, "val"):
            lengths = tokenizer.token_bytes[tokens[1:]] * np.array(mask[1:])
            z = logits(model, tokens[:-1])
            each = z.logsumexp(1) - z[torch.arange(len(z)), tokens[1:]]
            nats, size = nats + each[torch.from_numpy(lengths > 0)].sum().item(), size + lengths.sum()
        assert logged["val_bpb"] == pytest.approx(nats / np.log(2) / size, rel=1e-5)
        assert model.windows == (8, 24) and model.attention_scale.item() == pytest.approx(attention["scale"])
    for folder in ts.checkpoints(finished[0]):
        assert json.loads((folder / "state.json").read_text())["attention"] == attention


@pytest.mark.parametrize("moments", (True, False))
def test_moments(base, moments):
    """Those of the source, or none; fp16 begins with its own loss scale."""
    config = make_config(base, sft_moments=moments)
    state = ts.build_state(dataclasses.replace(config, vocab_size=300), ALONE, lambda text: None)
    state.loss_scale = 65536.0
    ts.start_from_source(state)
    source = base / "checkpoints" / "step_000020"
    weights, theirs = load_file(source / "model.safetensors"), load_file(source / "optimizer.safetensors")
    assert (state.step, state.loss_scale, state.optimizer.count) == (0, 65536.0, 20 * moments)
    assert all(torch.equal(w, weights[name]) for name, w in state.optimizer.weights().items())
    late = [any(name.endswith(".grad") for name in found) for found in (theirs, state.optimizer.state())]
    assert late == [True, False], "late gradients are of text that is not trained on now"
    for name, moment in state.optimizer.state().items():
        assert torch.equal(moment, theirs[name] * moments) and theirs[name].any(), name


def test_flags_come_last(base):
    """What is set wins over the schedule of finetuning, the source's recipe over the defaults."""
    config = make_config(base, "--steps", 3, sft_lr=0.3, cooldown=0.4)
    assert config.stages == ((1.0, 4, 8, 24, 64, 0.3),) and (config.num_steps, config.cooldown) == (3, 0.4)
    assert (config.lr_floor, config.bigram_rows, config.momentum) == (0.0, 500, (0.95, 0.95, 0, 0))
    assert (config.ahead, config.prefix_weight) == ((1.0,), 0.0), "one target for a token, as validation has it"


def test_kill_and_resume_is_bit_identical(finished, base, tmp_path):
    """kill -9 in step 14; --resume, which need not be told that it is finetuning, ends with the same weights."""
    run_dir = tmp_path / "killed"
    killed = subprocess.run([sys.executable, "-c", KILL, "step", *sft(base, run_dir)], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL and saved(run_dir) == [5, 10]
    assert ts.main(["--resume", "--run-dir", str(run_dir)]) == 0
    assert_finished_alike(run_dir, finished[0])


def assert_finished_alike(run_dir, reference) -> None:
    last = saved(reference)[-1]
    assert saved(run_dir)[-1] == last
    a, b = tensors(run_dir, last), tensors(reference, last)
    assert a.keys() == b.keys() and [k for k in a if not torch.equal(a[k], b[k])] == []
    kinds = [[(e["step"], "loss" in e) for e in entries(d)] for d in (run_dir, reference)]
    assert kinds[0] == kinds[1] and losses(run_dir) == losses(reference)


def test_signal_saves_and_resumes(finished, base, tmp_path, monkeypatch, fails):  # noqa: F811
    """SIGTERM in step 7 saves; the same command with --resume goes on."""
    run_dir = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        fails(sft(base, run_dir), "stopped by SIGTERM at step 7")
    assert saved(run_dir) == [5, 7]
    assert ts.main([*sft(base, run_dir), "--resume"]) == 0
    assert_finished_alike(run_dir, finished[0])


def test_two_processes_train_like_one(finished, base, tmp_path):
    job = torchrun(*sft(base, tmp_path / "two"))
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    one, two = losses(finished[0]), losses(tmp_path / "two")
    assert one.keys() == two.keys() and list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)


@pytest.fixture(scope="module")
def memorised(base, tmp_path_factory) -> Path:
    """A run that has seen four short conversations 80 times."""
    folder = tmp_path_factory.mktemp("memory")
    data = shutil.copytree(ts.read_config(base).data, folder / "data")
    source = write_jsonl(folder / "c.jsonl", [chat(q, a) for q, a in MEMORY.items()])
    val = write_jsonl(folder / "v.jsonl", [chat("who? ", "the stone")])
    run(data, "--source", source, "--val-source", val)
    argv = sft(base, folder / "run", "--data", data, "--eval-every", 0, sft_packs=1, max_epochs=80, sft_lr=1.0)
    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ts, "QUESTIONS", tuple(MEMORY))
        patch.setattr(ts, "core_files", lambda dataset: {"core/x.npz": ""})  # only pretraining ends with CORE
        assert ts.main(argv) == 0
    return folder / "run"


def test_memorised_answers(memorised, base, monkeypatch, capsys):
    """Generator and report answer each question by heart and stop; runs/chat.py knows the run for a chat, too."""
    model, tokenizer, _ = ts.load(memorised)
    ids = tokenizer.specials
    prompts = [[tokenizer.bos_id, ids["<|user_start|>"], *tokenizer.encode(q), ids["<|user_end|>"],
                ids["<|assistant_start|>"]] for q in MEMORY]  # fmt: skip
    generator = ts.Generator(model, tokenizer)
    answers = generator.generate(prompts, max_tokens=20, temperature=0, stop=(ids["<|assistant_end|>"],))
    assert [tokenizer.decode(answer) for answer in answers] == list(MEMORY.values())
    report = (memorised / "report.md").read_text()
    assert all(f"````text\n{q}\n\n{a}\n````\n" in report for q, a in MEMORY.items())
    monkeypatch.syspath_prepend(ROOT / "runs")
    for name in ("chat", "export"):
        spec = importlib.util.spec_from_file_location(f"runs_{name}", ROOT / "runs" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.is_chat_run(memorised) and not module.is_chat_run(base)
        if name == "chat":
            argv = ["chat.py", str(memorised), "--prompt", "where?", "--temperature", "0", "--max-tokens", "20"]
            monkeypatch.setattr(sys, "argv", argv)
            capsys.readouterr()
            assert module.main() == 0
            out, err = capsys.readouterr()
            assert out.strip() == "in the sea" and "not finetuned" not in err


def test_finetuning_again(finished, tmp_path):
    """A finetuned run is a source like any other; the rate does not shrink a second time."""
    assert ts.main(sft(finished[0], tmp_path / "again", "--steps", 1)) == 0
    config, first = ts.read_config(tmp_path / "again"), ts.read_config(finished[0])
    assert (config.frequencies, config.attention_scale) == (first.frequencies, first.attention_scale)
    assert config.source.startswith(str(finished[0])) and config.stages == first.stages


def test_default_run_directory(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ts.main(["sft", "--from", str(base), "--steps", "1", "--set", "sft_packs=1"]) == 0
    (made,) = (tmp_path / "out").iterdir()
    assert made.name.endswith("_train_small_sft") and saved(made) == [1]


# ---- errors


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sft"], ["sft needs --from"]),
        (["sft", "--from", "{tmp}/none"], ["{tmp}/none is not a run directory"]),
        (["--from", "{base}"], ["sft --from {base}"]),
        (["sft", "--resume", "--run-dir", "{base}"], ["{base} is a pretraining run", "sft --from {base}"]),
        (["sft", "--from", "{base}", "--run-dir", "{base}"], ["already holds a run"]),
        (["sft", "--from", "{base}", "--set", "width=128"], ["sft cannot change width", "64", "128"]),
        (["sft", "--from", "{base}", "--set", "source=x"], ["sft cannot change source"]),
        (["sft", "--from", "{base}", "--set", "sft_packs=0"], ["packs and windows of at least 1"]),
        (["sft", "--from", "{base}", "--steps", "1000"], ["the run asks for 1,024,000", "max_epochs"]),
        (["sft", "--from", "{base}", "--data", "{other}"], ["{other} has another tokenizer than {base}"]),
        (["sft", "--from", "{base}", "--data", "{text}"], ["{text}/sft has no train_*.bin", "data/sft.py --data"]),
        (["--resume", "--run-dir", "{sft}", "--seed", "5"], ["--resume cannot change seed"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)  # fmt: skip
def test_mistakes(argv, words, fails, base, finished, data, tmp_path, monkeypatch):  # noqa: F811
    """Each is told in a sentence; nothing is written, into the source least of all."""
    monkeypatch.chdir(tmp_path)
    before = snapshot(base)
    text, other = tmp_path / "text", tmp_path / "other"
    if "{text}" in argv:
        shutil.copytree(data, text)
        shutil.rmtree(text / "sft")
    if "{other}" in argv:
        write_dataset(other, merges=MERGES)
        shutil.copytree(data / "sft", other / "sft")
        for path in (other / "sft").iterdir():  # headers that state no tokenizer
            raw = path.read_bytes()
            path.write_bytes(raw[:12] + bytes(1012) + raw[1024:])
        words = ["another tokenizer"]
    names = {"tmp": tmp_path, "base": base, "text": text, "other": other, "sft": finished[0]}
    fails([a.format(**names) for a in argv], *(w.format(**names) for w in words))
    assert snapshot(base) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ("missing", "truncated", "corrupt", "foreign", "no mask", "too long"))
def test_bad_masks(what, fails, base, data, tmp_path):  # noqa: F811
    """One sentence with the file; the run directory is not even made."""
    root = shutil.copytree(data, tmp_path / "data")
    mask, other = root / "sft" / "train_000001.mask.bin", root / "sft" / "train_000002.mask.bin"
    words = [str(mask)]
    if what == "missing":
        mask.unlink()
        words = ["train_000001.bin has no loss mask train_000001.mask.bin"]
    elif what == "truncated":
        mask.write_bytes(mask.read_bytes()[:-2])
    elif what == "corrupt":
        mask.write_bytes(mask.read_bytes()[:-2] + b"\1\1")
    elif what == "foreign":
        shutil.copy(other, mask)
    elif what == "no mask":
        shutil.copy(root / "sft" / "train_000001.bin", mask)
    else:
        talk = write_jsonl(tmp_path / "long.jsonl", [chat("why " * 40, "the " * 40)] * 3)
        run(root, "--source", talk)
        words = ["holds a conversation of", "the model reads 64", "--max-len 65"]
    fails(sft(base, tmp_path / "run", "--data", root), *words)
    assert not (tmp_path / "run").exists()


def test_medium_finetunes_too(data, tmp_path, capsys):
    """train_medium.py derives sizes and rates from zeros; finetuning keeps what its source had of them."""
    medium = {key: value for key, value in TINY_MEDIUM.items() if key not in ("tokens", "muon_lr", "adam_lr")}
    assert tm.main(flags(data, tmp_path / "base", "--steps", 20, **medium)) == 0
    assert tm.main(sft(tmp_path / "base", tmp_path / "sft")) == 0
    assert tm.main(["sample", "--from", str(tmp_path / "sft"), "--prompt", "the", "--set", "sample_tokens=5"]) == 0
    capsys.readouterr()
    before, after = (json.loads((tmp_path / name / "config.json").read_text())["config"] for name in ("base", "sft"))
    assert all(before[name] == after[name] > 0 for name in ("muon_lr", "adam_lr", "width", "num_layers"))
    assert after["tokens"] != before["tokens"] and after["tokens"] % 512 == 0 and after["source"]
    assert losses(tmp_path / "sft")[max(losses(tmp_path / "sft"))] < losses(tmp_path / "sft")[1]
