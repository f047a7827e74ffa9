"""Finetuning on conversations: the loss against its definition, whole conversations in packs, and whole runs.

The dataset is made by data/pretrain.py and data/sft.py. Runs go through the main() of runs/finetune.py, which imports
the script of their source.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import chat as chat_script
import engine
import finetune
import numpy as np
import pytest
import torch
import train_medium as tm
import train_small as ts
from lib import chat_format, checkpoint, packing
from lib import report as reports
from safetensors.torch import load_file

from chats import chat, read_split, run_sft, write_jsonl
from commands import entries, losses, saved, sets, snapshot, stops, tensors
from processes import python
from tiny import ALONE, FIELDS, MERGES, ROOT, TINY, TINY_MEDIUM, logits, random_model, segments, write_dataset

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
    done = python(*command)
    assert done.returncode == 0, done.stderr
    talks = [chat(*(words(rng, 16) for _ in range(rng.choice((2, 2, 2, 3, 4))))) for _ in range(400)]
    source = write_jsonl(folder / "chat.jsonl", talks)
    more = ("--val-fraction", 0.1, "--max-len", CONTEXT + 1, "--shard-tokens", 2000)
    run_sft(folder / "data", "--source", source, *more)
    return folder / "data"


def flags(data, run_dir, *more, **overrides) -> list[str]:
    every = ("--save-every", "5", "--eval-every", "10", "--log-every", "1")
    return ["--data", str(data), "--run-dir", str(run_dir), *sets(overrides), *every, *map(str, more)]


@pytest.fixture(scope="session")
def base(data, tmp_path_factory) -> Path:
    """A pretrained run of two stages. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "base"
    with contextlib.redirect_stdout(io.StringIO()):
        assert ts.main(flags(data, run_dir, "--steps", 20, **BASE)) == 0
    return run_dir


def tune(base, run_dir, *more, packs=4, **overrides) -> list[str]:
    """Arguments of main() for a finetuning run on the data of its source."""
    return [str(base), "--packs", str(packs), *flags("unused", run_dir, *more, **overrides)[2:]]


def fails(argv, *words) -> None:
    """finetune.main(argv) must end with one sentence that holds all the words."""
    err = stops(finetune.main, *argv)
    assert [word for word in words if word not in err] == [], err


@pytest.fixture(scope="session")
def finished(base, tmp_path_factory) -> tuple[Path, str]:
    """An undisturbed finetuning run and what it printed. Tests must not change it."""
    run_dir, out = tmp_path_factory.mktemp("runs") / "sft", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert finetune.main(tune(base, run_dir)) == 0
    return run_dir, out.getvalue()


def job(base, *more, **overrides) -> ts.Pretraining:
    argv = tune(base, "unused", *more, **overrides)
    return finetune.new_job(ts, finetune.build_parser(ts).parse_args(argv))


@pytest.fixture(scope="session")
def setup(data, base):
    """(config, dataset, its train conversations) of a finetuning run of two epochs."""
    two = job(base, max_epochs=2)
    return two.config, ts.Dataset.open(data), two.reader


def batches(setup, most=10**9) -> list[ts.Batch]:
    """Those of two epochs, or the first of them."""
    config, _, talks = setup
    talks.seek({"pack": 0})
    loader = ts.PackLoader(talks, config, ALONE, 0)
    found = [loader.next() for _ in range(min(most, -(-len(talks.packs) // 4)))]
    loader.close()
    return found


def talks_of(batch: ts.Batch, row: int):
    """(inputs, targets) of each conversation in a pack, without the padding."""
    return [(i, t) for i, t in segments(batch, row) if len(set(i)) > 1]


def expected(tokens, mask):
    """Inputs and targets of a conversation, by definition."""
    return tuple(tokens[:-1]), tuple(t if m else -1 for t, m in zip(tokens[1:], mask[1:], strict=True))


def test_whole_conversations_once_an_epoch(setup, data):
    """Each epoch holds every conversation once, whole, with the mask's targets, in an order of its own."""
    config = setup[0]
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
    assert max(docs) <= config.max_docs_per_pack and len(found) == 2 * len(truth)
    epochs = found[: len(truth)], found[len(truth) :]
    assert all(Counter(epoch) == Counter(truth) for epoch in epochs)
    assert epochs[0] != truth and epochs[0] != epochs[1], "shuffled, each time anew"


def test_the_seed_draws_the_order(setup):
    """Equal seeds, equal packs; another seed packs the same conversations in another order."""
    config, dataset, talks = setup
    same_seed, other = (finetune.Conversations(dataset, "train", dataclasses.replace(config, seed=seed)).packs
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
        assert packing.best_fit(lengths, order, room, most) == packs
    lengths = np.clip(rng.lognormal(5.5, 0.8, 5000).astype(int), 8, 2048)
    packs = packing.best_fit(lengths, rng.permutation(5000), 8192, 256)
    assert lengths.sum() / (8192 * len(packs)) > 0.995


def step(setup, batch, packs=2):
    """Loss and gradients of train_step for the batch, on a model with random weights."""
    config = setup[0]
    state = ts.build_state(config, ALONE, lambda text: None)
    state.model.load_state_dict(random_model(config).state_dict())
    state.micro_packs, grads = packs, {}
    params = dict(state.model.named_parameters())
    state.optimizer.step = lambda *args: grads.update({name: p.grad.to_dense() for name, p in params.items()})
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


def test_micro_batches_and_steps_without_a_target(setup):
    """A pack that counts nothing changes neither loss nor gradient; a step of such packs changes nothing and is 0."""
    config = setup[0]
    batch, empty = batches(setup, most=1)[0], ts.empty_packs(4, config, 0)
    for row in range(4):
        ts.fill_pack(empty, row, [])
    assert empty.total_targets == 0
    joined = (torch.cat((getattr(empty, f), getattr(batch, f))) for f in FIELDS)
    both = dataclasses.replace(batch, **dict(zip(FIELDS, joined, strict=True)))
    (loss, grads), (loss_both, grads_both) = step(setup, batch), step(setup, both)
    assert loss == loss_both and all(torch.allclose(grads[n], grads_both[n], atol=1e-7) for n in grads)
    state = ts.build_state(config, ALONE, lambda text: None)
    for _ in range(2):
        assert ts.train_step(state, empty).item() == 0
    assert all(param.isfinite().all() for param in state.model.parameters())


def test_run_directory_is_complete(finished, base, data):
    """Files as after pretraining, the command in config.json, every conversation once, answers in the report."""
    run_dir, out = finished
    config = json.loads((run_dir / "config.json").read_text())
    assert config["command"] == "finetune" and json.loads((base / "config.json").read_text())["command"] == "pretrain"
    settings = {"run": str(base), "checkpoint": "step_000020", "packs": 4, "lr": 0.8}
    assert config["finetune"] == settings and config["flags"][0] == str(base)
    assert config["config"]["data"] == str(data) and config["config"]["width"] == 64
    tool = (ROOT / "runs" / "finetune.py").read_bytes()
    assert (run_dir / "finetune.py").read_bytes() == tool
    assert config["scripts"] == {"finetune.py": hashlib.sha256(tool).hexdigest()}
    for name in ("train_small.py", "tokenizer.json"):
        assert (run_dir / name).read_bytes() == (base / name).read_bytes()
    report = (run_dir / "report.md").read_text()
    assert "| finetuned from | base step_000020 |" in report
    assert report.count("```text") == 3 and all(question in report for question in reports.QUESTIONS)
    assert (run_dir / "curve.png").stat().st_size > 5000
    result = json.loads(out.splitlines()[-1])
    packs = len(finetune.Conversations(ts.Dataset.open(data), "train", ts.read_config(run_dir)).packs)
    steps = -(-packs // 4)
    assert packs % 4, "the last step holds what is left"
    assert (result["steps"], result["tokens"], result["run_dir"]) == (steps, steps * 512, str(run_dir))
    assert [e["step"] for e in entries(run_dir) if "val_bpb" in e] == [0, *range(10, steps, 10), steps]
    assert result["val_bpb"] == entries(run_dir)[-1]["val_bpb"] < entries(run_dir)[0]["val_bpb"]
    split = json.loads((data / "dataset.json").read_text())["splits"]["sft_train"]
    counted, talks = split["counted_tokens"], split["conversations"]
    padding = 1 - (split["tokens"] - talks) / result["tokens"]
    assert f"{counted:,} target tokens in {talks:,} conversations, {padding:.1%} padding" in out and padding < 0.1
    logged = [e for e in entries(run_dir) if "lr" in e]
    assert [e["lr"] for e in logged] == pytest.approx([0.8 * (1 - i / steps) for i in range(steps)])
    tokenizer = ts.Tokenizer(run_dir / "tokenizer.json")
    size = sum(tokenizer.token_bytes[tokens] @ mask for tokens, mask in read_split(data, "train")) / counted
    assert [e["bpb"] for e in logged] == pytest.approx([e["loss"] / np.log(2) / size for e in logged])


def test_starts_from_the_models_weights(finished, base, data):
    """Validation before the first step is the source's on the assistant's text, by definition."""
    for run_dir, logged in ((base, entries(finished[0])[0]), (finished[0], entries(finished[0])[-1])):
        run = engine.load_run(run_dir, device="cpu", attention="sdpa")
        model, tokenizer = run.model, run.tokenizer
        nats = size = 0
        for tokens, mask in read_split(data, "val"):
            lengths = tokenizer.token_bytes[tokens[1:]] * np.array(mask[1:])
            z = logits(model, tokens[:-1])
            each = z.logsumexp(1) - z[torch.arange(len(z)), tokens[1:]]
            nats, size = nats + each[torch.from_numpy(lengths > 0)].sum().item(), size + lengths.sum()
        assert logged["val_bpb"] == pytest.approx(nats / np.log(2) / size, rel=1e-5)
        assert model.windows == (8, 24)


@pytest.mark.parametrize("moments", (True, False))
def test_moments(base, moments):
    """Those of the source, or none as in reinforcement learning."""
    start = job(base)
    state = ts.build_state(start.config, ALONE, lambda text: None)
    source = base / "checkpoints" / "step_000020"
    start.start_weights(state) if moments else checkpoint.load_source(ts, state, source, moments=False)
    weights, *moments_files = (load_file(source / name) for name in ts.CHECKPOINT_FILES)
    theirs = {name: moment for file in moments_files for name, moment in file.items()}
    assert state.step == 0
    assert all(torch.equal(w, weights[name]) for name, w in state.optimizer.weights().items())
    for name, moment in state.optimizer.state().items():
        assert torch.equal(moment, theirs[name] * moments) and theirs[name].any(), name


def test_few_steps_are_said(base, capsys):
    count = len(job(base).reader.packs)
    assert capsys.readouterr().out == "", "packs of 4 make enough steps"
    assert job(base, "--packs", count).config.num_steps == 1
    assert f"few steps (1); make more of them with --packs {count // 20}" in capsys.readouterr().out
    job(base, "--packs", count, "--steps", 2)
    assert capsys.readouterr().out == "", "asked for"


def test_flags_come_last(base):
    """What is set wins over the schedule of finetuning, the source's recipe over the defaults; no averages."""
    config = job(base, "--steps", 3, "--lr", 0.3, cooldown=0.4).config
    assert config.stages == ((1.0, 4, 0.3),) and (config.num_steps, config.cooldown) == (3, 0.4)
    assert (config.lr_floor, config.bigram_rows, config.momentum) == (0.0, 500, (0.95, 0.95, 0, 0))
    assert (config.mtp_weights, config.prefix_weight) == ((1.0,), 0.0), "one target for a token, as validation has it"
    assert ts.read_config(base).average > config.average == 0


def test_a_resumed_run_is_bit_identical(finished, base, tmp_path):
    """From step 10 on --resume ends with the same weights, and needs neither the source nor its flags.

    It takes them if they are the same.
    """
    stopped, source, reference = tmp_path / "stopped", tmp_path / "source", finished[0]
    shutil.copytree(base, source)
    assert finetune.main(tune(source, stopped, keep_checkpoints=99)) == 0
    for step in saved(stopped):
        if step > 10:
            shutil.rmtree(stopped / "checkpoints" / f"step_{step:06d}")
    shutil.rmtree(source)
    for name, more in (("bare", []), ("same", tune(source, "unused")[:3])):
        run_dir = shutil.copytree(stopped, tmp_path / name)
        assert finetune.main([*more, "--resume", "--run-dir", str(run_dir)]) == 0
        last = saved(reference)[-1]
        assert saved(run_dir)[-1] == last
        a, b = tensors(run_dir, last), tensors(reference, last)
        assert a.keys() == b.keys() and [k for k in a if not torch.equal(a[k], b[k])] == []
        kinds = [[(e["step"], "loss" in e) for e in entries(d)] for d in (run_dir, reference)]
        assert kinds[0] == kinds[1] and losses(run_dir) == losses(reference)


def test_two_processes_train_like_one(finished, base, tmp_path):
    done = python("runs/finetune.py", *tune(base, tmp_path / "two"), ranks=2)
    assert done.returncode == 0, done.stderr
    one, two = losses(finished[0]), losses(tmp_path / "two")
    assert one.keys() == two.keys() and list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)


@pytest.fixture(scope="module")
def memorised(base, tmp_path_factory) -> Path:
    """A run that has seen four short conversations 80 times."""
    folder = tmp_path_factory.mktemp("memory")
    data = shutil.copytree(ts.read_config(base).data, folder / "data")
    source = write_jsonl(folder / "c.jsonl", [chat(q, a) for q, a in MEMORY.items()])
    val = write_jsonl(folder / "v.jsonl", [chat("who? ", "the stone")])
    run_sft(data, "--source", source, "--val-source", val)
    argv = tune(base, folder / "run", "--data", data, "--eval-every", 0, "--lr", 1, packs=1, max_epochs=80)
    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "QUESTIONS", tuple(MEMORY))
        assert finetune.main(argv) == 0
    return folder / "run"


def test_memorised_answers(memorised, base, monkeypatch, capsys):
    """Generator and report answer each question by heart and stop; runs/chat.py knows the run for a chat, too."""
    run = engine.load_run(memorised, device="cpu")
    model, tokenizer = run.model, run.tokenizer
    ids = tokenizer.specials
    prompts = [[tokenizer.bos_id, ids["<|user_start|>"], *tokenizer.encode(q), ids["<|user_end|>"],
                ids["<|assistant_start|>"]] for q in MEMORY]  # fmt: skip
    generator = engine.Generator(model, tokenizer)
    answers = generator.generate(prompts, max_tokens=20, temperature=0, stop=(ids["<|assistant_end|>"],))
    assert [tokenizer.decode(answer) for answer in answers] == list(MEMORY.values())
    report = (memorised / "report.md").read_text()
    assert all(f"````text\n{q}\n\n{a}\n````\n" in report for q, a in MEMORY.items())
    assert chat_format.is_chat_run(memorised) and not chat_format.is_chat_run(base)
    argv = ["chat.py", str(memorised), "--prompt", "where?", "--temperature", "0", "--max-tokens", "20"]
    monkeypatch.setattr(sys, "argv", argv)
    capsys.readouterr()
    assert chat_script.main() == 0
    out, err = capsys.readouterr()
    assert out.strip() == "in the sea" and "not finetuned" not in err


def test_finetuning_again(finished, tmp_path, capsys):
    """A finetuned run is a source like any other, whose own script trains; the rate does not shrink a second time."""
    source, again = shutil.copytree(finished[0], tmp_path / "source"), tmp_path / "again"
    script = source / "train_small.py"
    script.write_text(script.read_text().replace(" M parameters", " million parameters"))
    assert finetune.main(tune(source, again, "--steps", 1)) == 0
    assert " million parameters" in capsys.readouterr().out
    assert (again / "train_small.py").read_bytes() == script.read_bytes()
    config, first = ts.read_config(again), ts.read_config(source)
    assert config.stages == first.stages and config.muon_lr == first.muon_lr
    assert ts.read_description(again)["finetune"]["run"] == str(source)


def test_defaults(base, tmp_path, monkeypatch):
    """Packs, rate and run directory without flags, on a script that has all of them by its name."""
    monkeypatch.chdir(tmp_path)
    assert finetune.main([str(base), "--steps", "1"]) == 0
    (made,) = (tmp_path / "out").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_train_small_finetune", made.name) and saved(made) == [1]
    assert ts.read_config(made).stages == ((1.0, 8, 0.8),)


@pytest.mark.parametrize(("argv", "words"), [
    ([], ["a run directory with a checkpoint", "python runs/finetune.py RUN"]),
    (["--steps", "5", "{base}"], ["pass it first"]),
    (["--resume"], ["--resume needs --run-dir"]),
    (["{tmp}/none"], ["{tmp}/none is not a run directory"]),
    (["--resume", "--run-dir", "{base}"], ["{base} is a run of train_small.py; continue it with", "train_small.py"]),
    (["--resume", "--run-dir", "{rl}"], ["{rl} is a run of runs/rl.py; continue it with", "runs/rl.py --resume"]),
    (["{base}", "--run-dir", "{base}"], ["already holds a run"]),
    (["{base}", "--pack", "4"], ["unknown flag --pack; did you mean --packs?"]),
    (["{base}", "--packs", "0"], ["--packs must be at least 1, found 0"]),
    (["{base}", "--lr", "-1"], ["--lr must be from 0 to 1000, found -1.0"]),
    (["{base}", "--lr", "nan"], ["--lr must be from 0 to 1000, found nan"]),
    (["{base}", "--packs", "4", "--steps", "1000"], ["the run asks for 512,000", "--max-epochs"]),
    (["{base}", "--data", "{other}"], ["{other} has a different tokenizer from {base}"]),
    (["{base}", "--data", "{text}"], ["{text}/sft has no train_*.bin", "data/sft.py"]),
    (["--resume", "--run-dir", "{sft}", "--seed", "5"], ["--resume cannot change --seed: ", "has 0; omit it"]),
    (["--resume", "--run-dir", "{sft}", "--packs", "5"], ["--resume cannot change packs", "4", "5"]),
    (["{tmp}", "--resume", "--run-dir", "{sft}"], ["--resume cannot change run: the run has {base}"]),
], ids=lambda value: " ".join(value)[:40])  # fmt: skip
def test_mistakes(argv, words, base, finished, data, tmp_path, monkeypatch):
    """Each is told in a sentence; nothing is written, into the source least of all."""
    monkeypatch.chdir(tmp_path)
    before = snapshot(base)
    text, other, rl = tmp_path / "text", tmp_path / "other", tmp_path / "rl"
    if "{text}" in argv:
        shutil.copytree(data, text)
        shutil.rmtree(text / "sft")
        info = ts.unseal((text / "dataset.json").read_bytes())
        info["files"] = {name: entry for name, entry in info["files"].items() if not name.startswith("sft/")}
        (text / "dataset.json").write_bytes(ts.seal(info))
    if "{other}" in argv:
        write_dataset(other, merges=MERGES)
    if "{rl}" in argv:
        shutil.copytree(base, rl)
        (rl / "config.json").write_bytes(ts.seal({"command": "rl"}))
    names = {"tmp": tmp_path, "base": base, "text": text, "other": other, "sft": finished[0], "rl": rl}
    fails([a.format(**names) for a in argv], *(w.format(**names) for w in words))
    assert snapshot(base) == before and not (tmp_path / "out").exists()


def test_bad_masks(base, data, tmp_path):
    """One sentence with the file; the run directory is not even made."""
    root = shutil.copytree(data, tmp_path / "data")
    mask = root / "sft/train_000001.mask.bin"
    mask.write_bytes(mask.read_bytes()[:-2] + b"\1\1")
    fails(tune(base, tmp_path / "run", "--data", root), f"{mask} was changed or is missing")
    assert not (tmp_path / "run").exists()


def test_a_conversation_that_is_too_long(base, data, tmp_path):
    root = shutil.copytree(data, tmp_path / "data")
    run_sft(root, "--source", write_jsonl(tmp_path / "long.jsonl", [chat(f"{i} " * 40, "the " * 40) for i in range(3)]))
    words = ["contains a conversation of", "the model's context is 64", "--max-len 65"]
    fails(tune(base, tmp_path / "run", "--data", root), *words)


def test_medium_finetunes_too(data, tmp_path):
    """train_medium.py derives sizes and rates from zeros; finetuning keeps what its source had of them."""
    medium = {key: value for key, value in TINY_MEDIUM.items() if key not in ("tokens", "muon_lr", "adam_lr")}
    assert tm.main(flags(data, tmp_path / "base", "--steps", 20, **medium)) == 0
    assert finetune.main([str(tmp_path / "base"), "--run-dir", str(tmp_path / "sft"), "--log-every", "1"]) == 0
    before, after = (tm.read_description(tmp_path / name)["config"] for name in ("base", "sft"))
    assert all(before[name] == after[name] > 0 for name in ("muon_lr", "adam_lr", "width", "num_layers"))
    assert after["stages"] == [[1.0, 16, 0.3]]
    assert after["tokens"] != before["tokens"] and after["tokens"] % (16 * 128) == 0
    assert losses(tmp_path / "sft")[max(losses(tmp_path / "sft"))] < losses(tmp_path / "sft")[1]
