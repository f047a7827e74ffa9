"""Whole runs: files, checkpoints, resuming, ranks, signals, the command line, and every error a person can cause.

A run of 20 steps takes a second, so most runs go through main() in this process; only what kills a process or needs
several gets its own.
"""

import contextlib
import dataclasses
import errno
import gc
import hashlib
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import engine
import matplotlib.image
import numpy as np
import pytest
import safetensors.torch
import torch
import train_small as ts
from safetensors.torch import load_file

from conftest import ALONE, CPU, MERGES, ROOT, TINY, list_files, loader_of, logits, tiny_config, write_dataset
from processes import python

# Wide enough for most parameters to be shared out over ranks; one table has an odd number of rows.
RUN = {**TINY, "width": 128, "head_dim": 32, "bigram_rows": 1501}
RUN.pop("tokens")
EVERY = ("--save-every", "5", "--eval-every", "10", "--log-every", "1")


def flags(data, run_dir, *more, steps=20, **overrides) -> list[str]:
    sets = [word for key, value in {**RUN, **overrides}.items() for word in ("--set", f"{key}={value}")]
    return ["--data", str(data), "--run-dir", str(run_dir), *sets, "--steps", str(steps), *EVERY, *more]


def entries(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


def losses(run_dir) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in entries(run_dir) if "loss" in e}


def saved(run_dir) -> list[int]:
    return [int(p.name[5:]) for p in ts.checkpoints(run_dir)]


def tensors(run_dir, step=20) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    return {f"{name}/{k}": v for name in ("model", "optimizer_1", "optimizer_2")
            for k, v in load_file(folder / f"{name}.safetensors").items() if k != "rng.cpu"}  # fmt: skip


def assert_same_run(run_dir, reference) -> None:
    """Weights, moments and losses to the last bit, and a log without gaps or repetitions."""
    a, b = tensors(run_dir), tensors(reference)
    assert a.keys() == b.keys() and [k for k in a if not torch.equal(a[k], b[k])] == []
    kinds = [[(e["step"], "loss" in e) for e in entries(d)] for d in (run_dir, reference)]
    assert kinds[0] == kinds[1] and losses(run_dir) == losses(reference)


def snapshot(folder) -> dict:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(autouse=True)
def signal_handlers():
    """A run that ends early in this process must not keep pytest's Ctrl-C."""
    before = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def fails(capsys):
    def check(argv, *words) -> str:
        """main(argv) must print one line `error: ...` that holds all the words, and return 1."""
        capsys.readouterr()
        code, err = ts.main([str(a) for a in argv]), capsys.readouterr().err
        assert code == 1 and err.startswith("error: ") and err.count("\n") == 1 and len(err) > 30, err
        assert [w for w in words if w not in err] == [], err
        return err

    return check


@pytest.fixture(scope="module")
def finished(dataset_dir, tmp_path_factory):
    """An undisturbed run of 20 steps and what it printed. Tests must not change it."""
    run_dir, out = tmp_path_factory.mktemp("runs") / "finished", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert ts.main(flags(dataset_dir, run_dir)) == 0
    return run_dir, out.getvalue()


@pytest.fixture(scope="module")
def halfway(dataset_dir, tmp_path_factory):
    """A run that was stopped after step 10 of 20, as a folder to copy."""
    run_dir = tmp_path_factory.mktemp("runs") / "halfway"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        at_step(patch, 10, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        assert ts.main(flags(dataset_dir, run_dir)) == 1
    return run_dir


def at_step(monkeypatch, step: int, action) -> None:
    """Runs action(state) behind the given optimizer step."""
    original = ts.train_step

    def train_step(state, batch):
        loss = original(state, batch)
        if state.step == step:
            action(state)
        return loss

    monkeypatch.setattr(ts, "train_step", train_step)


# ---- what a run leaves


def test_run_directory_is_complete(finished, dataset_dir):
    """Script, tokenizer, config with versions and hardware, log, report, a picture with something on it."""
    run_dir, _ = finished
    assert (run_dir / "train_small.py").read_bytes() == (ROOT / "train_small.py").read_bytes()
    assert (run_dir / "tokenizer.json").read_bytes() == (dataset_dir / "tokenizer.json").read_bytes()
    config = json.loads((run_dir / "config.json").read_text())
    assert config["config"]["width"] == 128 and config["config"]["vocab_size"] == 300
    assert set(config["config"]) == {f.name for f in dataclasses.fields(ts.Config)}
    assert config["flags"] == flags(dataset_dir, run_dir) and "width=128" in config["overridden"]
    machine = config["machine"]
    assert machine["torch"] == torch.__version__ and machine["num_devices"] == 1 and "git_commit" in machine
    assert machine["script_sha256"] == hashlib.sha256((ROOT / "train_small.py").read_bytes()).hexdigest()
    report = (run_dir / "report.md").read_text()
    assert "bits per byte" in report and "curve.png" in report and report.count("```text") == 3
    picture = matplotlib.image.imread(run_dir / "curve.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 500 and picture.std() > 0.02
    assert not [p for p in run_dir.rglob("*") if ".tmp" in p.name]


def test_a_run_without_checkpoints(dataset_dir, tmp_path, capsys):
    """--save-every -1 leaves out nothing but the checkpoints; a stop still writes one."""
    run_dir, stopped = tmp_path / "run", tmp_path / "stopped"
    assert ts.main(flags(dataset_dir, run_dir, "--save-every", "-1", "--steps", "6")) == 0
    assert not list(run_dir.glob("checkpoints/*")) and "val bpb" in capsys.readouterr().out
    assert (run_dir / "report.md").is_file() and (run_dir / "result.json").is_file()
    assert ts.checkpoints(run_dir) == []
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 6, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        assert ts.main(flags(dataset_dir, stopped, "--save-every", "-1")) == 1
    assert [p.name for p in stopped.glob("checkpoints/*")] == ["step_000006"]


@pytest.mark.parametrize(("name", "tflops"), (("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
                                              ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA GH200 480GB", 989),
                                              ("Tesla T4", 65),
                                              ("NVIDIA RTX A4000", None), ("NVIDIA RTX A1000", None),
                                              ("NVIDIA L40", None), ("NVIDIA A10G", None)))  # fmt: skip
def test_peak_flops_are_those_of_the_card(monkeypatch, name, tflops):
    """From the table, by whole words of the name; an unknown card or a CPU has none, so that its MFU is 0."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = tflops * 1e12 if tflops else math.inf
    assert ts.peak_flops(torch.device("cuda")) == expected
    assert ts.peak_flops(CPU) == math.inf


def test_mfu(dataset_dir, tmp_path, monkeypatch, capsys):
    """Of each line and of the whole run: FLOPs of its tokens a second over those of the device; 0 where unknown."""
    monkeypatch.setattr(ts, "peak_flops", lambda device: 2e12)
    monkeypatch.setattr(ts, "flops_per_token", lambda config, positions: 1e6 if len(positions) == 2 else 3e6)
    run_dir = tmp_path / "run"
    assert ts.main(flags(dataset_dir, run_dir, "--eval-every", "0")) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = [entry for entry in entries(run_dir) if "loss" in entry]
    for line, flops in zip(lines, [1e6] * 10 + [3e6] * 10, strict=True):
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / 2e12)
    flops = 10 * 256 * 1e6 + 10 * 512 * 3e6
    assert result["mfu"] == pytest.approx(flops / result["train_seconds"] / 2e12)


def test_log_and_last_line(finished):
    """Every step once, validation at its steps; the last line of stdout is the result."""
    run_dir, out = finished
    assert [e["step"] for e in entries(run_dir) if "loss" in e] == list(range(1, 21))
    assert [e["step"] for e in entries(run_dir) if "val_bpb" in e] == [10, 20]
    assert {"tokens", "bpb", "lr", "step_ms", "tokens_per_second", "mfu", "memory_gib", "train_seconds"} <= set(
        entries(run_dir)[0]
    )
    result = json.loads(out.splitlines()[-1])
    assert set(result) >= {"val_bpb", "steps", "tokens", "train_seconds", "tokens_per_second", "mfu",
                           "peak_memory_gib", "run_dir"}  # fmt: skip
    assert (result["steps"], result["tokens"], result["run_dir"]) == (20, 10 * 256 + 10 * 512, str(run_dir))
    assert result["val_bpb"] == entries(run_dir)[-1]["val_bpb"] and result["mfu"] == 0
    assert losses(run_dir)[20] < 0.5 * losses(run_dir)[1], "it should learn"
    steps = [line for line in out.splitlines() if re.match(r"step +\d+/20 \| loss", line)]
    assert not any("mfu" in line for line in steps), "the peak of a CPU is not known"
    widths = {len(line) for line in steps}
    assert len(widths) == 1, "log lines have a fixed width"
    assert "CORE" not in out, "which runs/score_core.py computes"


def test_default_run_directory(dataset_dir, tmp_path, monkeypatch, capsys):
    """Without --run-dir a run goes to a new dated directory under out/."""
    monkeypatch.chdir(tmp_path)
    argv = flags(dataset_dir, "x", steps=1)
    del argv[2:4]
    assert ts.main(argv) == 0
    (made,) = (tmp_path / "out").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_train_small", made.name) and saved(made) == [1]


def test_a_run_directory_gives_its_model_back(finished, dataset):
    """The script inside the run directory, imported from there: the weights' bits per byte are the run's."""
    run_dir, out = finished
    run = engine.load_run(run_dir, device="cpu")
    script = run.script
    assert script is not ts and script.__file__ == str(run_dir / "train_small.py")
    assert run.config.width == 128 and run.tokenizer.vocab_size == 300
    token_bytes = torch.zeros(run.config.padded_vocab, dtype=torch.long)
    token_bytes[:300] = torch.from_numpy(run.tokenizer.token_bytes)
    documents = script.scored_documents(script.validation_documents(dataset, run.config), run.config)
    validation = script.validation_batch(documents, run.config, run.tokenizer.bos_id)
    bpb = script.bits_per_byte(run.model, validation, 2, token_bytes, ALONE)
    assert bpb == pytest.approx(json.loads(out.splitlines()[-1])["val_bpb"], rel=1e-6)
    earlier = engine.load_run(run_dir, step=15, device="cpu")
    assert not torch.equal(logits(earlier.model, [1, 2]), logits(run.model, [1, 2]))


def test_load_on_another_machine(finished, tmp_path):
    """A backend and a dtype that this machine lacks end in a sentence, unless others are asked for."""
    run_dir, _ = finished
    other = shutil.copytree(run_dir, tmp_path / "from_another_machine")
    edited = ts.read_description(other)
    edited["config"] |= {"attention": "varlen", "dtype": "bfloat16"}
    ts.write_description(other, edited)
    with pytest.raises(engine.RunError, match="varlen cannot run here"):
        engine.load_run(other)
    loaded = engine.load_run(other, attention="auto", dtype="float32")
    same = engine.load_run(run_dir)
    assert torch.equal(logits(loaded.model, [1, 2, 3]), logits(same.model, [1, 2, 3]))


def test_a_job_of_a_tool(dataset_dir, dataset, tmp_path, capsys):
    """Other text, other first weights, other samples: what a tool brings is used, and the run directory tells."""
    run_dir = tmp_path / "run"
    note = tmp_path / "tool.py"
    note.write_text("print(1)\n")
    argv = flags(dataset_dir, run_dir, "--save-every", "0", "--eval-every", "0", steps=4)
    args = ts.build_parser().parse_args(argv)
    args.flags = argv
    config = ts.make_config(args)
    loaded = []

    def load_start(state):
        loaded.append(state.step)
        state.model.init_weights(7)
        state.optimizer.reset()

    def samples(model, tokenizer, config):
        return ["a sample of the tool"]

    held_out = [(np.array([dataset.tokenizer.bos_id, 1, 2]), np.array([True, True]))]
    job = dataclasses.replace(
        ts.pretraining_job(config), command="finetune", note="what it is", load_start=load_start, samples=samples,
        description={"source": "elsewhere"}, report_rows={"base": "a model"}, scripts=(note,), validation=held_out,
    )  # fmt: skip
    assert ts.run_command(lambda: ts.train(config, args, job)) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert loaded == [0] and result["steps"] == 4 and ", what it is\n" in out
    validated = [e for e in entries(run_dir) if "val_bpb" in e]
    assert [e["step"] for e in validated] == [0, 4], "the loaded weights are validated too"
    fresh = ts.build_state(job.config, ALONE, lambda text: None)
    fresh.model.init_weights(7)
    token_bytes = torch.zeros(job.config.padded_vocab, dtype=torch.long)
    token_bytes[:300] = torch.from_numpy(dataset.tokenizer.token_bytes)
    batch = ts.validation_batch(ts.scored_documents(held_out, job.config), job.config, dataset.tokenizer.bos_id)
    bpb = ts.bits_per_byte(fresh.model, batch, 1, token_bytes, ALONE)
    assert validated[0]["val_bpb"] == pytest.approx(bpb, rel=1e-6) and validated[1]["val_bpb"] == result["val_bpb"]
    description = json.loads((run_dir / "config.json").read_text())
    assert (description["command"], description["source"]) == ("finetune", "elsewhere")
    assert (run_dir / "tool.py").read_text() == "print(1)\n" and (run_dir / "train_small.py").is_file()
    report = (run_dir / "report.md").read_text()
    assert (
        "| base | a model |" in report
        and "elsewhere" not in report
        and report.count("```text") == 1
        and "a sample of the tool" in report
    )
    assert ts.read_config(run_dir) == job.config


def test_wandb_offline(dataset_dir, tmp_path):
    """With a name and no network the run is recorded in the run directory; --resume goes on with the same run."""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_PROJECT": "my-project", "PYTHONWARNINGS": "ignore"}
    run_dir = tmp_path / "run"
    for steps, more in ((2, []), (4, ["--resume"])):
        argv = [*flags(dataset_dir, run_dir, "--wandb", "name", steps=steps), *more]
        done = python("train_small.py", *argv, env=environment)
        assert done.returncode == 0, done.stderr
    records = list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    number = (run_dir / "wandb_id.txt").read_text()
    assert len(records) == 2 and all(path.name == f"run-{number}.wandb" for path in records)
    for path in records:
        written = path.read_bytes()
        assert all(key in written for key in (b"val/bpb", b"train/loss", b"system/step_ms", b"my-project"))


def test_wandb_without_a_login(dataset_dir, tmp_path):
    """One sentence, not wandb's traceback; the same command without the flag then trains."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "PYTHONWARNINGS": "ignore"}
    argv = flags(dataset_dir, tmp_path / "run", steps=2)
    done = python("train_small.py", *argv, "--wandb", "x", env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: --wandb could not start" in done.stderr and "WANDB_MODE=offline" in done.stderr
    assert python("train_small.py", *argv, env=environment).returncode == 0


def test_milliseconds_of_a_line_that_spans_two_stages(dataset_dir, tmp_path):
    """Steps of 2 packs and then of 4: each counts as one."""
    stages = "stages=((0.5,2,1.0),(0.5,4,1.4))"
    assert ts.main(flags(dataset_dir, tmp_path, "--log-every", "6", "--set", stages, steps=12)) == 0
    lines = [entry for entry in entries(tmp_path) if "step_ms" in entry]
    assert {line["step"] for line in lines} >= {1, 6, 12}
    for before, line in itertools.pairwise(lines):
        seconds = line["train_seconds"] - before["train_seconds"]
        assert line["step_ms"] == pytest.approx(seconds / (line["step"] - before["step"]) * 1e3)


def test_no_samples_without_tiktoken(dataset_dir, tmp_path, monkeypatch, capsys):
    """What was trained is reported all the same."""
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert ts.main(flags(dataset_dir, tmp_path, steps=2)) == 0
    assert "no samples: import of tiktoken halted" in capsys.readouterr().out
    assert (tmp_path / "report.md").is_file()


# ---- ranks


def test_ranks_with_different_free_memory(monkeypatch):
    """All take the micro-batch of the one with the least: else they would warm up a different number of times."""
    monkeypatch.setattr(ts, "choose_packs", lambda config, ranks: 2)
    monkeypatch.setattr(ts.Ranks, "gather", lambda self, value: [value, 1 if value == 2 else value])
    assert ts.build_state(tiny_config(), ALONE, lambda text: None).packs == 1


def test_ranks_with_different_attention(monkeypatch):
    """One may have failed to load FlashAttention 3 from the hub."""
    monkeypatch.setattr(ts.Ranks, "gather", lambda self, value: [value, "fa3_attention"])
    with pytest.raises(ts.UserError, match="sdpa_attention, fa3_attention"):
        ts.build_state(tiny_config(), ALONE, lambda text: None)


def test_flash_attention_3_by_name(monkeypatch):
    """The pinned package accepts the request, and the function that it returns sees this project's arguments."""
    kernels = pytest.importorskip("kernels")
    from kernels.load import revision_or_version

    asked = {}

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
        asked.update(scale=softmax_scale, causal=causal, window=window_size, longest=(max_q, max_k))
        return q + v, None

    def get_kernel(repository, *, revision=None, version=None):
        asked["version"] = revision_or_version(revision=revision, version=version)
        return SimpleNamespace(flash_attn_varlen_func=flash)

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    config = tiny_config(attention="fa3")
    model = ts.GPT(config)
    attend = ts.choose_attention(model, lambda text: None)
    q, k, v = torch.randn(3, 8, config.num_heads, config.head_dim)
    y = attend(model, torch.arange(8), torch.tensor([0, 8]), 8)(q, k, v, 1)
    torch.testing.assert_close(y, q + v)
    assert asked["causal"] and asked["scale"] == 1.0
    assert asked["window"] == (config.window_long, 0) and asked["longest"] == (8, 8)


# ---- the training step


def test_warm_up_leaves_no_trace(dataset):
    """After the warm-up the state is that of a fresh start: weights, moments, step, stage, random numbers."""
    config = tiny_config()
    fresh, warm = (ts.build_state(config, ALONE, lambda text: None) for _ in range(2))
    random_state = torch.get_rng_state()
    ts.warm_up(warm, lambda text: None)
    assert torch.equal(random_state, torch.get_rng_state())
    for part in ("weights", "state"):
        a, b = (getattr(s.optimizer, part)() for s in (fresh, warm))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert all(torch.equal(a, b) for a, b in zip(fresh.model.parameters(), warm.model.parameters(), strict=True))
    assert all(p.grad is None for p in warm.model.parameters())
    assert (warm.step, warm.optimizer.count, warm.model.windows) == (0, 0, fresh.model.windows)
    assert warm.model.attention_scale == fresh.model.attention_scale


def test_warm_up_updates_every_parameter(dataset, monkeypatch):
    """Late tables too, which the first step leaves alone: else they would be compiled while the clock runs."""
    state, updated = ts.build_state(tiny_config(stages=((1.0, 2, 1.0),)), ALONE, lambda text: None), set()

    def watched(update):
        return lambda master, *rest, **named: updated.add(master.data_ptr()) or update(master, *rest, **named)

    for name in ("update_rows", "adam_update", "normuon_update"):
        monkeypatch.setattr(ts, name, watched(getattr(ts, name)))
    masters = {slot.name: slot.master.data_ptr() for slot in state.optimizer.slots}
    ts.warm_up(state, lambda text: None)
    assert {name for name, pointer in masters.items() if pointer in updated} == masters.keys()


def test_second_thread_runs_all_kernels(dataset, monkeypatch):
    """It comes to its end, updates every parameter and validates, on a small model that is gone afterwards."""
    state = ts.build_state(tiny_config(bigram_rows=5000), ALONE, lambda text: None)
    before, steps, ends, models = ts.checksum(state.model), [], [], []
    train_step, bits_per_byte = ts.train_step, ts.bits_per_byte

    def watched_step(small, batch):
        steps.append((len(small.model.bigram_embed), small.model.attention, batch.tokens.shape))
        models.append(weakref.ref(small.model))
        was = {slot.name: slot.master.clone() for slot in small.optimizer.slots}
        loss = train_step(small, batch)
        changed = {slot.name for slot in small.optimizer.slots if not torch.equal(slot.master, was[slot.name])}
        return loss, ends.append(changed)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ts, "train_step", watched_step)
    monkeypatch.setattr(ts, "bits_per_byte", lambda *args: ends.append(bits_per_byte(*args)))
    gc.disable()
    try:
        ts.compile_kernels(state)
        assert [model() for model in models] == [None, None]
    finally:
        gc.enable()
    assert steps == [(4096, state.model.attention, (1, state.config.max_seq_len))] * 2
    assert ends[0] | ends[1] == {slot.name for slot in state.optimizer.slots} and ends[2] > 0
    assert ts.checksum(state.model) == before


def test_second_thread_ends_with_the_warm_up(monkeypatch):
    """The block waits for it, also after an error, and leaves Python's collector and turns as they were."""
    state = SimpleNamespace(config=SimpleNamespace(compile=True), model=SimpleNamespace(embed=None), beside=None)
    may_end, ended, turn = threading.Event(), [], sys.getswitchinterval()
    monkeypatch.setattr(ts, "use_triton", lambda x: True)
    monkeypatch.setattr(ts, "compile_kernels", lambda state: ended.append(may_end.wait(30)))
    with pytest.raises(ts.UserError), ts.kernels_compiled_beside(state):
        assert state.beside.is_alive() and not gc.isenabled() and sys.getswitchinterval() < turn / 10
        threading.Timer(0.2, may_end.set).start()
        raise ts.UserError("no room")
    assert ended == [True] and state.beside is None
    assert gc.isenabled() and sys.getswitchinterval() == pytest.approx(turn)


def test_warm_up_where_validation_does_not_fit(dataset, monkeypatch, capsys):
    """Training is compiled for the smaller micro-batches too, in every stage that is run with them."""
    state, trained = ts.build_state(tiny_config(micro_batch_tokens=256), ALONE, lambda text: None), []
    forward, bits_per_byte = state.forward, ts.bits_per_byte
    assert state.packs == 2

    def watched(tokens, *rest):
        trained.append(len(tokens) // 128)
        return forward(tokens, *rest)

    def limited(forward, batch, packs, *rest):
        if packs > 1:
            raise torch.OutOfMemoryError
        return bits_per_byte(state.model, batch, packs, *rest)

    state.forward = watched
    monkeypatch.setattr(ts, "bits_per_byte", limited)
    ts.warm_up(state, print)
    assert trained == [2, 2, 1, 1, 1], "late tables need two steps of the first stage"
    said = capsys.readouterr().out
    assert said.count("going on with 128") == 1 and "micro-batch 128 tokens" in said


def test_every_step_takes_its_own_numbers(dataset_dir, dataset, tmp_path, monkeypatch):
    """Rate, momentum, loss weights, windows and scale are those of the step; prefixes are the tokenizer's."""
    update, train_step, taken, seen = ts.Optimizer.step, ts.train_step, [], []

    def watched_update(optimizer, lr, momentum, *rest):
        taken[:] = lr, momentum
        return update(optimizer, lr, momentum, *rest)

    def watched_step(state, batch):
        loss, model = train_step(state, batch), state.model
        seen.append([*taken, *model.loss_weights.tolist()])
        assert len(seen) <= 3 or model.prefixes.tolist() == [*dataset.tokenizer.prefixes(), *[-1] * 20]  # 3: warm-up
        return loss

    monkeypatch.setattr(ts.Optimizer, "step", watched_update)
    monkeypatch.setattr(ts, "train_step", watched_step)
    assert ts.main(flags(dataset_dir, tmp_path / "run", ahead="(1.0,0.5)")) == 0
    config, seen = ts.read_config(tmp_path / "run"), seen[3:]
    assert len(seen) == 20
    for step, numbers in enumerate(seen):
        rates = ts.lr_multiplier(config, step), ts.muon_momentum(config, step)
        assert numbers == pytest.approx([*rates, *ts.loss_weights(config, step)])


def test_loss_scale():
    """Half after an overflow, but at least 2; twice after 1,000 good steps in a row, but at most 2 ** 24."""
    config = tiny_config()
    state = ts.build_state(config, ALONE, lambda text: None)
    empty = ts.empty_packs(0, config, 0)

    def after(scale: float, *outcomes: bool) -> float:
        state.loss_scale, state.good_steps = scale, 0
        for outcome in outcomes:
            state.optimizer.step = lambda *args: outcome  # noqa: B023  (called at once)
            ts.train_step(state, empty)
        return state.loss_scale

    assert [after(scale, False) for scale in (1024.0, 4.0, 2.0)] == [512.0, 2.0, 2.0]
    assert [after(64.0, *[True] * n) for n in (999, 1000, 2000)] == [64.0, 128.0, 256.0]
    assert after(64.0, *[True] * 999, False, *[True] * 999) == 32.0
    assert after(2.0**24, *[True] * 1000) == 2.0**24


@pytest.mark.parametrize("packs", (2, 4))
def test_micro_batches_do_not_change_the_step(dataset, packs):
    """Two steps with micro-batches of one or several packs: the same losses and weights."""
    config = tiny_config(stages=((1.0, 4, 1.0),), tokens=10 * 4 * 128)
    losses, weights = [], []
    for size in (1, packs):
        state = ts.build_state(config, ALONE, lambda text: None)
        state.packs = size
        loader = loader_of(dataset, config)
        losses.append([ts.train_step(state, loader.next()).item() for _ in range(2)])
        weights.append(state.optimizer.weights())
        loader.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in weights[0]:
        if name not in ("bigram_embed", "value_embed", "embed"):  # Adam's first steps are signs: rounding flips some
            torch.testing.assert_close(weights[0][name], weights[1][name], atol=2e-3, rtol=0)


def test_micro_batch_size():
    """The most packs that divide a stage's share and fit the wanted tokens."""
    config = tiny_config(stages=((0.5, 8, 1.0), (0.5, 12, 1.5)))
    ranks = {world: ts.Ranks(0, 0, world, CPU) for world in (1, 2, 3, 4)}

    def packs(world, tokens):
        return ts.choose_packs(dataclasses.replace(config, micro_batch_tokens=tokens), ranks[world])

    assert [packs(1, n * 128) for n in (1, 2, 3, 4, 100)] == [1, 2, 3, 4, 12]
    assert [packs(world, 0) for world in (1, 2, 4)] == [12, 6, 3]
    with pytest.raises(ts.UserError, match="8 packs do not divide over 3 processes"):
        packs(3, 0)


# ---- kill, stop, resume

KILL = """
import os, signal, sys
import safetensors.torch, torch
import train_small as ts
torch.set_num_threads(1)
train_step, save_file = ts.train_step, safetensors.torch.save_file
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def killed_step(state, batch):
    return train_step(state, batch) if state.step != 13 else die()
def killed_save(tensors, path):
    if "step_000015" in str(path) and "optimizer" in str(path):
        path.write_bytes(b"half")
        die()
    save_file(tensors, path)
if sys.argv.pop(1) == "step":
    ts.train_step = killed_step
else:
    safetensors.torch.save_file = killed_save
sys.exit(ts.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("where", ("step", "save"))
def test_kill_and_resume_is_bit_identical(finished, dataset_dir, tmp_path, where):
    """kill -9 in step 14, or halfway through saving step 15; --resume ends with the undisturbed run's weights."""
    run_dir = tmp_path / "killed"
    argv = flags(dataset_dir, run_dir)
    killed = python("-c", KILL, where, *argv)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert saved(run_dir) == [5, 10] and max(losses(run_dir)) > 10
    assert ts.main(["--resume", "--run-dir", str(run_dir)]) == 0
    assert_same_run(run_dir, finished[0])
    assert not list(run_dir.glob("checkpoints/.*")), "the half-written checkpoint is gone"
    for step in (15, 20):  # also what says which checkpoint is the best one
        ours, theirs = (json.loads((d / "checkpoints" / f"step_{step:06d}" / "state.json").read_text())
                        for d in (run_dir, finished[0]))  # fmt: skip
        for state in (ours, theirs):  # the optimizer's file also holds the random state, which nothing here uses
            del state["files"]["optimizer_1.safetensors"], state["train_seconds"], state["sha256"]
        assert ours == theirs


@pytest.mark.parametrize("name", ("SIGTERM", "SIGINT"))
def test_signal_saves_and_resumes(finished, dataset_dir, tmp_path, monkeypatch, fails, name):
    """SIGTERM or Ctrl-C in step 7: a checkpoint of step 7, exit code 1 and the way to go on, which loses nothing."""
    run_dir = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda state: os.kill(os.getpid(), getattr(signal, name)))
        fails(flags(dataset_dir, run_dir), f"stopped by {name} at step 7", f"--resume --run-dir {run_dir}")
    assert saved(run_dir) == [5, 7] and max(losses(run_dir)) == 7
    assert ts.main(["--resume", "--run-dir", str(run_dir)]) == 0
    assert_same_run(run_dir, finished[0])


def test_checkpoint_holds_the_random_state(tmp_path):
    """Random numbers go on where they were when the checkpoint was written."""
    state = ts.build_state(tiny_config(), ALONE, lambda text: None)
    state.step = 3
    progress = ts.Progress(position={"shard": 1})
    ts.save_checkpoint(state, tmp_path, dataclasses.asdict(progress))
    expected = torch.rand(5)
    assert ts.load_checkpoint(state, ts.checkpoints(tmp_path)[0])["position"] == {"shard": 1}
    assert torch.equal(torch.rand(5), expected)


def test_resume_of_a_finished_run(finished, tmp_path, capsys):
    """Nothing left to do: the same result again, no step repeated, report and weights untouched."""
    run_dir = shutil.copytree(finished[0], tmp_path / "again")
    assert ts.main(["--resume", "--run-dir", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "this run is finished" in out
    assert json.loads(out.splitlines()[-1]) == json.loads(finished[1].splitlines()[-1])
    assert_same_run(run_dir, finished[0])
    for name in ("report.md", "result.json", "config.json"):
        assert (run_dir / name).read_bytes() == (finished[0] / name).read_bytes()


def edit_state(folder, **changes) -> dict:
    """Changes state.json of a checkpoint as if it had been saved so; returns what it was."""
    before = ts.read_state(folder)
    after = before | changes
    (folder / "state.json").write_text(json.dumps(after | {"sha256": ts.object_sha256(after)}))
    return before


def test_resume_remembers_new_flags(halfway, tmp_path, fails, capsys):
    """A run that is made longer and stopped again goes on to its new end without the flags being said twice."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    before = ts.read_description(run_dir)
    fails(["--resume", "--run-dir", run_dir, "--steps", "8"], "is at step 10 already", "ask for 8")
    fails(
        ["--resume", "--run-dir", run_dir, "--set", "cooldown=0.3"], "cooldown was 0.6 and is 0.3", "--resume-changed"
    )
    assert ts.read_description(run_dir) == before
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 12, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        changed = ["--resume-changed", "--steps", "14", "--set", "cooldown=0.3"]
        assert ts.main(["--resume", "--run-dir", str(run_dir), *changed]) == 1
    assert ts.main(["--resume", "--run-dir", str(run_dir)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 14
    after = ts.read_description(run_dir)
    assert [entry["step"] for entry in after["starts"]] == [0, 10, 12]
    assert [entry["changed"] for entry in after["starts"]] == [[], ["cooldown was 0.6 and is 0.3"], []]
    assert after["overridden"] == [*before["overridden"], "cooldown=0.3"], "which voids record status"
    assert after["config"] == before["config"] | {"tokens": 14 * 3 * 128, "cooldown": 0.3}
    for command, tool in (("rl", "runs/rl.py"), ("finetune", "runs/finetune.py"), ("sft", "runs/finetune.py")):
        ts.write_description(run_dir, after | {"command": command})
        fails(["--resume", "--run-dir", run_dir], f"is a run of {tool}", f"python {tool} --resume --run-dir {run_dir}")


def test_a_finished_run_is_evaluated_as_it_was_trained(finished, dataset, tmp_path, capsys):
    """If it ended before it could say so."""
    run_dir = shutil.copytree(finished[0], tmp_path / "again")
    path = ts.checkpoints(run_dir)[-1] / "state.json"
    record = edit_state(path.parent, val_bpb=None)
    (run_dir / "report.md").unlink()
    assert ts.main(["--resume", "--run-dir", str(run_dir)]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["val_bpb"] == pytest.approx(record["val_bpb"], rel=1e-12)


def test_loss_scale_follows_the_precision(finished, halfway, tmp_path, capsys):
    """A run goes on in another precision with that one's loss scale, and in fp16 with the one it had."""
    folder = ts.checkpoints(halfway)[-1]
    for dtype, stated, expected in (("float16", 1.0, 2.0**16), ("float16", 2.0**9, 2.0**9), ("float32", 2.0**9, 1.0)):
        changed = shutil.copytree(folder, tmp_path / f"{dtype}_{stated}")
        edit_state(changed, loss_scale=stated)
        state = ts.build_state(dataclasses.replace(ts.read_config(halfway), dtype=dtype), ALONE, lambda text: None)
        ts.load_checkpoint(state, changed)
        assert (state.step, state.loss_scale) == (10, expected), dtype


@pytest.mark.parametrize("where", ("forward", "backward"))
def test_out_of_memory_takes_smaller_micro_batches(dataset, monkeypatch, capsys, where):
    """The step ends with the weights of a device with enough memory; what failed is freed before the next try."""
    config = tiny_config(stages=((1.0, 4, 1.0),))
    weights, held, alive = [], [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(any(ref() is not None for ref in held)))
    for fits in (4, 1):
        state = ts.build_state(config, ALONE, lambda text: None)
        state.packs, forward = 4, state.forward

        class Failing(torch.autograd.Function):  # keeps an activation, as the graph of a real one does
            @staticmethod
            def forward(ctx, total):
                ctx.activation = torch.zeros(9)
                held.append(weakref.ref(ctx.activation))
                return total.clone()

            @staticmethod
            def backward(ctx, grad):
                raise torch.OutOfMemoryError

        def limited(tokens, *rest, forward=forward, fits=fits, failing=Failing):
            total, nats = forward(tokens, *rest)
            if len(tokens) <= fits * config.pack_tokens:
                return total, nats
            total = failing.apply(total)
            if where == "forward":
                raise torch.OutOfMemoryError
            return total, nats

        state.forward = limited
        loader = loader_of(dataset, config)
        loss = ts.train_step(state, loader.next())
        loader.close()
        weights.append((loss, *(p.detach().clone() for p in state.model.parameters())))
        assert state.packs == fits
    assert len(held) == 2 and alive == [False, False]  # 4 packs, 2, 1
    assert "going on with 128" in capsys.readouterr().out
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_newest_and_best_checkpoints_are_kept(dataset, tmp_path):
    """keep_checkpoints newest ones, and the one with the lowest validation wherever it lies."""
    state = ts.build_state(tiny_config(keep_checkpoints=2), ALONE, lambda text: None)
    kept = []
    for state.step, bpb in enumerate((3.0, 1.5, None, 2.0, None, 1.2, 1.3, None, 1.4), 1):
        ts.save_checkpoint(state, tmp_path, dataclasses.asdict(ts.Progress(val_bpb=bpb)))
        kept.append(saved(tmp_path))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [6, 7, 8], [6, 8, 9]]


# ---- several processes


def torchrun(python, *argv) -> subprocess.Popen:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_small.py"]
    return subprocess.Popen([*command, *argv], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "PYTHON_EXEC": str(python)})  # fmt: skip


def test_two_processes_train_like_one(finished, halfway, dataset_dir, tmp_path):
    """From the start and resumed from one process's checkpoint of step 10: the same losses within 1e-5."""
    resumed = shutil.copytree(halfway, tmp_path / "resumed")
    job = torchrun(sys.executable, *flags(dataset_dir, tmp_path / "two"))
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    done = python("train_small.py", "--resume", "--run-dir", resumed, ranks=2)
    assert done.returncode == 0, done.stderr
    for said in (out, done.stdout):
        assert said.count("--- report") == 1 and '"steps": 20' in said
    one, two, after = (losses(d) for d in (finished[0], tmp_path / "two", resumed))
    first = range(1, 11)
    assert [two[s] for s in first] == pytest.approx([one[s] for s in first], rel=1e-5)
    second = range(11, 21)
    assert [after[s] for s in second] == pytest.approx([one[s] for s in second], rel=1e-5)
    ours, theirs = tensors(resumed), tensors(finished[0])
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    for name in ("qk_bank", "mlp_bank", "scalars"):
        torch.testing.assert_close(ours[f"model/{name}"], theirs[f"model/{name}"], atol=1e-3, rtol=0)


def test_two_processes_stop_together(dataset_dir, tmp_path, fast_python):
    """SIGTERM to torchrun: all ranks save the same step and leave; one process can go on from there."""
    run_dir = tmp_path / "two"
    argv = flags(dataset_dir, run_dir, "--save-every", "0", "--eval-every", "0", steps=3000, max_epochs=1000)
    job = torchrun(fast_python, *argv)
    for line in job.stdout:
        if re.match(r"step +2/", line):
            break
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0 and "stopped by SIGTERM" in err and "--resume --run-dir" in err
    (step,) = saved(run_dir)
    assert step % 10 == 0 and max(losses(run_dir)) == step
    assert ts.main(["--resume", "--run-dir", str(run_dir), "--steps", str(step + 2)]) == 0
    assert max(losses(run_dir)) == step + 2


# ---- the command line

FLAGS = {
    "--attention", "--data", "--dtype", "--eval-every", "--help", "--log-every", "--micro-batch-tokens",
    "--no-compile", "--rank-timeout", "--resume", "--resume-changed",
    "--run-dir", "--save-every", "--seed", "--set", "--steps",
    "--tokens", "--wandb",
}  # fmt: skip


def test_flags_are_frozen():
    """At most 20 flags in kebab-case, and exactly these: people's scripts depend on them."""
    found = {f for action in ts.build_parser()._actions for f in action.option_strings if f.startswith("--")}
    assert found == FLAGS and len(found) <= 20
    assert all(re.fullmatch(r"--[a-z]+(-[a-z]+)*", flag) for flag in found)


def test_flags_from_a_file(tmp_path):
    """@FILE: several flags on a line, comments, later flags win; the shipped file parses and is valid."""
    path = tmp_path / "some.args"
    path.write_text("# a comment\n--steps 7 --set width=64   # half a line\n\n--set head_dim=16 --no-compile\n")
    args = ts.build_parser().parse_args([f"@{path}", "--steps", "9"])
    config = ts.make_config(args)
    assert (config.width, config.head_dim, config.compile, config.num_steps) == (64, 16, False, 9)
    assert "stdlib" in ts.make_config(ts.build_parser().parse_args([f"@{ROOT}/runs/cpu.args"])).data


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--dta", "x"], ["unknown flag --dta", "did you mean --data?"]),
        (["--eval-evry=3"], ["unknown flag --eval-evry", "did you mean --eval-every?"]),
        (["--res"], ["unknown flag --res"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--steps", "0"], ["--steps 0"]),
        (["pretrian"], ["pretrian", "--help"]),
        (["@nothing.args"], ["nothing.args"]),
        (["--set", "widht=64"], ["unknown Config field widht", "did you mean width?"]),
        (["--set", "width"], ["expected KEY=VALUE"]),
        (["--set", "width=wide"], ["width takes a value like 768"]),
        (["--set", "width=1.5"], ["width takes a value like 768"]),
        (["--set", "fp8=1"], ["fp8 takes a value like True"]),
        (["--set", "long_layers=3"], ["long_layers takes a value like (3, 10)"]),
        (["--set", "stages=((1.0, 2),)"], ["stages"]),
        (["--set", "momentum=(0.9,)"], ["momentum", "4 values"]),
        (["--set", "momentum=('a',1,1,1)"], ["momentum", "each value must be 0.0 to"]),
        (["--set", "momentum=(2.0,3.0,1,1)"], ["momentum", "below 1"]),
        (["--set", "window_long=0"], ["window_long=0 must be 1 to"]),
        (["--set", "stages=((),)"], ["stages: the row ()"]),
        (["--set", "stages=(None,)"], ["stages: the row None"]),
        (["--set", "stages=((2,1,1),(-1,1,1))"], ["stages: the row (2, 1"]),
        (["--set", "ahead=()"], ["ahead=()"]),
        (["--set", "muon_beta2=2.0"], ["muon_beta2=2.0 must be 0.0 to"]),
        (["--set", "long_layers=(1.5,)"], ["long_layers", "0 to 255"]),
        (["--set", "long_layers=(True,)"], ["long_layers", "0 to 255"]),
        (["--set", "width=1000000000"], ["width=1000000000 must be 1 to 16,384"]),
        (["--set", "muon_lr=1e999"], ["muon_lr=inf must be"]),
        (["--set", "softcap=" + "(" * 3000], ["softcap takes a value like"]),
        (["--set", f"seed={2**63}"], ["seed=9223372036854775808 must be"]),
        (["--set", "data=" + "x" * 2000], ["data must be a text of at most"]),
        (["--steps", "1000000000000000"], ["--steps 1000000000000000 must be"]),
        (["--set", "width=100"], ["width=100", "head_dim=128"]),
        (["--set", "vocab_size=70000"], ["70000", "65,536"]),
        (["--set", "long_layers=(11,)"], ["layer 11", "10"]),
        (["--set", "max_seq_len=16384"], ["max_seq_len=16384"]),
        (["--set", "stages=((0.5, 16, 1.0),)"], ["0.5000, not 1"]),
        (["--set", "tokens=0"], ["tokens=0"]),
        (["@train_small.py\0"], ["null"]),
    ],
    ids=lambda value: " ".join(value) if value[0][0] in "-@p" else "",
)
def test_command_line_mistakes(fails, argv, words):
    """Each is told what was wrong and what is near."""
    fails(argv, *words)


# ---- bad data and bad circumstances: one sentence, exit code 1, nothing lost


def spoil(root, what: str) -> None:
    shard, tokenizer = root / "pretrain" / "train_000000.bin", root / "tokenizer.json"
    if what == "empty":
        shutil.rmtree(root / "pretrain")
        (root / "pretrain").mkdir()
    elif what == "no validation":
        (root / "pretrain" / "val_000000.bin").unlink()
    elif what == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif what == "corrupt":
        shard.write_bytes(shard.read_bytes()[:-2] + b"\0\0")
    elif what == "tokenizer":
        tokenizer.write_text(tokenizer.read_text() + "\n")
    elif what == "no tokenizer":
        tokenizer.unlink()
    else:
        description = json.loads((root / "dataset.json").read_text())
        if what == "vocabulary":
            spec = json.loads(tokenizer.read_text())
            spec["special_tokens"]["<|big|>"] = 70000
            tokenizer.write_text(json.dumps(spec))
        elif what == "description":
            del description["files"]
        (root / "dataset.json").write_text(json.dumps(description) if what != "no json" else "{")
        if what == "vocabulary":
            list_files(root)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("empty", ["train_000000.bin is missing", "make the dataset again"]),
        ("no validation", ["val_000000.bin is missing"]),
        ("truncated", ["train_000000.bin has", "bytes, dataset.json says"]),
        ("corrupt", ["train_000000.bin was changed"]),
        ("tokenizer", ["tokenizer.json does not belong to the shards"]),
        ("no tokenizer", ["tokenizer.json does not belong", "missing"]),
        ("vocabulary", ["special tokens whose ids do not follow"]),
        ("description", ["dataset.json"]),
        ("no json", ["dataset.json cannot be read"]),
    ],
)
def test_bad_dataset(fails, dataset_dir, tmp_path, what, words):
    """What was wrong with which file, before anything is trained; the dataset stays as it was."""
    root = shutil.copytree(dataset_dir, tmp_path / "bad")
    spoil(root, what)
    before = snapshot(root)
    fails(flags(root, tmp_path / "run"), *words)
    assert snapshot(root) == before and not saved(tmp_path / "run")


def test_missing_dataset_names_both_commands(fails, tmp_path):
    """The command that makes the default dataset and the one that needs no network."""
    fails(flags(tmp_path / "none", tmp_path / "run"), "no dataset at", "python data/pretrain.py --source climbmix",
          "python data/pretrain.py --source stdlib", "--data data/shards/stdlib")  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_too_little_data(fails, dataset, dataset_dir, tmp_path):
    """What there is, what was asked for, and both ways out; the advice holds to the last step."""
    there = dataset.total("train", "tokens")
    words = f"{there:,} training tokens", "192,000", "max_epochs"
    error = fails(flags(dataset_dir, tmp_path / "run", steps=500), *words)
    config = tiny_config(tokens=int(re.search(r"--tokens (\d+)", error)[1]))
    assert there - 3 * 384 < config.tokens <= there
    with contextlib.closing(loader_of(dataset, config)) as loader:
        for _ in range(config.num_steps):
            loader.next()
    rounded_up = next(n for n in range(2, 99) if there % (128 * n) > 64 * n)  # packs: the steps come to more
    for packs, tokens, words in ((rounded_up, there, "training tokens"), (999, 9, "make the steps smaller")):
        argv = [w for w in flags(dataset_dir, tmp_path / "run") if w not in ("--steps", "20")]
        fails([*argv, "--set", f"stages=((1.0,{packs},1.0),)", "--tokens", tokens], words)


def test_repeated_text_and_a_large_table(fails, dataset, dataset_dir, tmp_path):
    """Refused with the way out before anything is written; less than 1.5 passes, small tables and none are allowed."""
    there = dataset.total("train", "tokens")
    steps = round(2 * there / 384)
    argv = flags(dataset_dir, tmp_path / "run", steps=steps, max_epochs=3, bigram_rows=163841)
    fails(argv, "would read", "2.0 times", "163,841 bigrams", "--set bigram_rows=0")
    assert not (tmp_path / "run").exists()
    config = tiny_config(tokens=steps * 384, max_epochs=3, bigram_rows=163841, data=str(dataset_dir))
    for change in ({"bigram_rows": 163840}, {"bigram_rows": 0}, {"tokens": int(1.4 * there)}):
        ts.check_length(ts.pretraining_job(dataclasses.replace(config, **change)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--micro-batch-tokens", "200"], ["--micro-batch-tokens 200 is not a multiple of pack_tokens=128"]),
        (["--set", "softcap=(300.0,0.0,7.5)"], ["softcap=(300.0, 0.0, 7.5)", "-100.0 to 100.0"]),
        (["--attention", "flash9"], ["--attention flash9 is none of auto"]),
        (["--attention", "varlen"], ["--attention varlen cannot run here"]),
        (["--dtype", "int3"], ["--dtype int3 is none of auto"]),
        (["--set", "sample_tokens=-1"], ["sample_tokens=-1 must be 0 to"]),
        (["--set", "keep_checkpoints=0"], ["keep_checkpoints=0 must be 1 to"]),
        (["--eval-every", "-1"], ["eval_every=-1 must be 0 to"]),
        (["--seed", "-1"], ["seed=-1 must be 0 to"]),
        (["--set", "sample_temperature=-0.5"], ["sample_temperature=-0.5 must be 0.0 to"]),
        (["--set", "sample_prompts=(1,)"], ["sample_prompts=(1,)", "texts"]),
        (["--set", "top_k=5"], ["unknown Config field top_k"]),
        (["--set", "ahead_until=0.0"], ["ahead_until=0.0 must be 1e-06 to"]),
        (["--set", "shared_input_from=-1"], ["shared_input_from=-1 must be 0 to"]),
        (
            ["--set", "no_attention_layers=(0,)", "--set", "value_embed_layers=(0,)"],
            ["layer 0 has value embeddings but no attention"],
        ),
        (
            ["--set", "no_attention_layers=(0,1,2,3)", "--set", "shared_input_from=4"],
            ["no_attention_layers leaves no layer with attention"],
        ),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_impossible_requests(fails, dataset_dir, tmp_path, more, words):
    """What this machine or this recipe cannot do is said in a sentence."""
    fails(flags(dataset_dir, tmp_path / "run", *more), *words)


def test_existing_run_is_not_overwritten(fails, finished, dataset_dir):
    """A second run into the same directory is refused, and nothing there is touched."""
    before = snapshot(finished[0])
    fails(flags(dataset_dir, finished[0]), "already holds a run", "--resume")
    assert snapshot(finished[0]) == before


def test_resume_needs_a_checkpoint(fails, dataset_dir, finished, tmp_path):
    """Without a run, or with one that was never saved; a half-written checkpoint is none."""
    fails(["--resume"], "--resume needs --run-dir")
    fails(flags(dataset_dir, tmp_path / "none", "--resume"), str(tmp_path / "none"))
    run_dir = shutil.copytree(finished[0], tmp_path / "unsaved")
    for checkpoint in ts.checkpoints(run_dir):
        (checkpoint / "state.json").unlink()
    before = snapshot(run_dir)
    fails(["--resume", "--run-dir", run_dir], "no complete checkpoint", "start without --resume")
    fails(flags(dataset_dir, run_dir), "already holds a run", "remove it")
    assert snapshot(run_dir) == before


@pytest.mark.parametrize(
    "change",
    ("width=64", "num_layers=5", "bigram_rows=0", "key_offset_layers=()",
     "shared_input_from=3",
     "long_layers=(0,)", "backout_layer=1", "softcap=(15.0,0.0,15.0)", "rotary_base=10.0",
     "attention_scale=0.2", "pack_tokens=256"),
)  # fmt: skip
def test_resume_cannot_change_the_architecture(fails, halfway, tmp_path, change):
    """Also where the weights would fit: the model would silently be another one."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    before = snapshot(run_dir)
    fails(["--resume", "--run-dir", run_dir, "--set", change], change.partition("=")[0], "--resume")
    assert snapshot(run_dir) == before


@pytest.mark.parametrize("merges", (MERGES[:-9], [*MERGES[:-1], b"qq"]), ids=("smaller", "same size"))
def test_resume_cannot_change_the_tokenizer(fails, halfway, tmp_path, merges):
    """A dataset with another vocabulary, or with other words in a vocabulary of the same size, is refused."""
    run_dir, other = shutil.copytree(halfway, tmp_path / "run"), write_dataset(tmp_path / "other", merges=merges)
    before = snapshot(run_dir)
    fails(["--resume", "--run-dir", run_dir, "--data", other], "tokenizer")
    assert snapshot(run_dir) == before


@pytest.mark.parametrize("how", ("no space", "short file"))
def test_full_disk_while_saving(fails, finished, dataset_dir, tmp_path, monkeypatch, how):
    """The checkpoint of step 10 cannot be written: that of step 5 is whole, and --resume finishes the run."""
    run_dir, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def break_disk(state):
        def refuse(tensors, path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        if how == "no space":
            patch.setattr(safetensors.torch, "save_file", refuse)
        else:  # a real write that really fails
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))

    try:
        with monkeypatch.context() as patch:
            at_step(patch, 8, break_disk)
            words = ["the checkpoint of step 10 could not be written", "--resume"]
            fails(flags(dataset_dir, run_dir), *words, *(["the disk is full"] if how == "no space" else []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved(run_dir) == [5] and not list(run_dir.glob("checkpoints/.*"))
    assert ts.main(["--resume", "--run-dir", str(run_dir)]) == 0
    assert_same_run(run_dir, finished[0])


def test_full_disk_while_logging(fails, dataset_dir, tmp_path, monkeypatch):
    """A log line that cannot be written (/dev/full is a full disk) ends the run with a sentence too."""
    log = tmp_path / "run" / "log.jsonl"

    def fill(state):
        log.unlink()
        log.symlink_to("/dev/full")

    at_step(monkeypatch, 7, fill)
    fails(flags(dataset_dir, tmp_path / "run"), "log.jsonl", "--resume")
    assert saved(tmp_path / "run") == [5]


def test_nan_loss(fails, finished, dataset_dir, tmp_path, monkeypatch):
    """Weights become NaN in step 12: the run ends, the checkpoint of step 10 is whole, and --resume finishes."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 12, lambda state: state.model.head.data.fill_(torch.nan))
        fails(flags(dataset_dir, run_dir), "the loss became nan at step 13", "--resume", "muon_lr")
    assert saved(run_dir) == [5, 10]
    assert ts.main(["--resume", "--run-dir", str(run_dir)]) == 0
    assert_same_run(run_dir, finished[0])


def test_nan_weights_are_not_saved(fails, dataset_dir, tmp_path, monkeypatch):
    """The loss of step 10 is fine but its update is not: without validation in between, no such checkpoint appears."""
    at_step(monkeypatch, 10, lambda state: state.model.head.data.fill_(torch.nan))
    fails([*flags(dataset_dir, tmp_path / "run"), "--eval-every", "0"], "--resume")
    assert saved(tmp_path / "run") == [5]


def test_absurd_rate(fails, dataset_dir, tmp_path, monkeypatch):
    """A real divergence, by a rate of 1e30, is a sentence as well."""
    monkeypatch.setitem(ts.RANGES, "adam_lr", (0.0, 1e30))
    fails(flags(dataset_dir, tmp_path / "run", adam_lr=1e30), "the loss became nan at step 2", "adam_lr")
