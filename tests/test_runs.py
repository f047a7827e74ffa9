"""Whole runs: what they leave, how a step is taken, several processes, and what a person can get wrong.

A run of 12 steps takes half a second, so most runs go through main() in this process; only what needs several gets
its own. How runs end and go on is in test_resume.py.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import engine
import pytest
import torch
import train_medium as tm
import train_small as ts
import wandb

from commands import entries, flags, losses, passes, refused, saved, snapshot, stop_at, tensors
from processes import python
from tiny import ALONE, ROOT, list_files, loader_of, logits, tiny_config, train_steps, val_bpb

pytestmark = pytest.mark.usefixtures("only_the_run", "signal_handlers")
warm_up = ts.warm_up
write_report = ts.report


# ---- what a run leaves


def test_run_directory_is_complete(finished, dataset_dir):
    """Script, tokenizer, config with versions and hardware, log, result."""
    assert (finished / "train_small.py").read_bytes() == (ROOT / "train_small.py").read_bytes()
    assert (finished / "tokenizer.json").read_bytes() == (dataset_dir / "tokenizer.json").read_bytes()
    config = json.loads((finished / "config.json").read_text())
    assert config["config"]["width"] == 128 and config["config"]["vocab_size"] == 300
    assert set(config["config"]) == {f.name for f in dataclasses.fields(ts.Config)}
    assert config["flags"] == flags(dataset_dir, finished)
    assert [stage["packs"] for stage in config["stage_table"]] == [2, 4]
    machine = config["machine"]
    assert machine["torch"] == torch.__version__ and machine["num_devices"] == 1 and "git_commit" in machine
    assert machine["script_sha256"] == hashlib.sha256((ROOT / "train_small.py").read_bytes()).hexdigest()
    assert not [p for p in finished.rglob("*") if ".tmp" in p.name or p.name == "saving"]


def test_log_and_last_line(finished):
    """Every step once, validation at its steps; the last line of stdout is the result."""
    lines = finished.with_name("out.txt").read_text().splitlines()
    assert [e["step"] for e in entries(finished) if "loss" in e] == list(range(1, 13))
    assert [e["step"] for e in entries(finished) if "val_bpb" in e] == [6, 12]
    keys = {"tokens", "bpb", "lr", "step_ms", "tokens_per_second", "mfu", "memory_gib", "train_seconds"}
    assert keys <= set(entries(finished)[0])
    result = json.loads(lines[-1])
    assert result == json.loads((finished / "result.json").read_text())
    assert (result["steps"], result["tokens"], result["run_dir"]) == (12, 6 * 256 + 6 * 512, str(finished))
    assert result["val_bpb"] == entries(finished)[-1]["val_bpb"] and result["mfu"] == 0
    assert result["tokens_per_second"] == result["tokens"] / result["train_seconds"]
    assert losses(finished)[12] < 0.7 * losses(finished)[1], "it should learn"
    steps = [line for line in lines if re.match(r"step +\d+/12 \| loss", line)]
    assert len(steps) == 12 and not any("mfu" in line for line in steps), "the peak of a CPU is not known"
    assert len({len(line) for line in steps}) == 1, "log lines have a fixed width"


def test_a_run_without_checkpoints(dataset_dir, tmp_path, monkeypatch):
    """--save-every -1 leaves out nothing but the checkpoints; a stop still writes one."""
    run_dir, stopped = tmp_path / "run", tmp_path / "stopped"
    argv = flags(dataset_dir, run_dir, "--save-every", "-1", steps=6)
    assert "val bpb" in passes(*argv)
    assert not list(run_dir.glob("checkpoints/*")) and (run_dir / "result.json").is_file()
    before = snapshot(run_dir)
    assert "already holds a run; continue it with --resume, remove it, or choose another --run-dir" in refused(*argv)
    assert snapshot(run_dir) == before
    stop_at(monkeypatch, 6)
    refused(*flags(dataset_dir, stopped, "--save-every", "-1"))
    assert saved(stopped) == [6]


@pytest.mark.parametrize(("name", "tflops"), (("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
                                              ("Tesla T4", 65), ("NVIDIA RTX A4000", None)))  # fmt: skip
def test_peak_flops_are_those_of_the_card(monkeypatch, name, tflops):
    """From the table, by whole words of the name; an unknown card or a CPU has none, so that its MFU is 0."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = tflops * 1e12 if tflops else math.inf
    assert ts.peak_flops(torch.device("cuda")) == expected
    assert ts.peak_flops(ALONE.device) == math.inf


def test_mfu_and_milliseconds(dataset_dir, tmp_path, monkeypatch):
    """Of each line, also one that spans two stages, and of the whole run: FLOPs over those of the device."""
    monkeypatch.setattr(ts, "peak_flops", lambda device: 2e12)
    monkeypatch.setattr(ts, "flops_per_token", lambda config, positions: 1e6 if len(positions) == 2 else 3e6)
    argv = flags(dataset_dir, tmp_path, "--log-every", "4", "--eval-every", "0", "--save-every", "-1", steps=12)
    result = json.loads(passes(*argv).splitlines()[-1])
    lines = [{"step": 0, "train_seconds": 0, "tokens": 0}, *(e for e in entries(tmp_path) if "loss" in e)]
    assert [line["step"] for line in lines] == [0, 1, 4, 8, 12]
    total = 0
    for before, line in zip(lines, lines[1:], strict=False):
        seconds = line["train_seconds"] - before["train_seconds"]
        flops = (line["tokens"] - before["tokens"]) * (1e6 if line["step"] < 7 else 3e6)
        total += flops
        assert line["step_ms"] == pytest.approx(seconds / (line["step"] - before["step"]) * 1e3)
        assert line["mfu"] == pytest.approx(flops / seconds / 2e12)
    assert result["mfu"] == pytest.approx(total / result["train_seconds"] / 2e12)


def test_a_report_that_fails_costs_no_result(dataset_dir, tmp_path, monkeypatch):
    """Whatever goes wrong in it: the result is there, the command ends well, and a line says how to make another."""
    import report

    def fail(*arguments, **options):
        raise ValueError("a font")

    monkeypatch.setattr(report, "write_report", fail)
    monkeypatch.setattr(ts, "report", write_report)
    out = passes(*flags(dataset_dir, tmp_path, steps=1))
    assert f"no report (ValueError('a font')); for one: python runs/report.py {tmp_path}" in out
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(out.splitlines()[-1])
    assert saved(tmp_path) == [1]


def test_a_run_directory_gives_its_model_back(finished, dataset, monkeypatch):
    """The script inside the run directory, imported from there: the weights' bits per byte are the run's.

    No tool waits for other processes, whatever the environment says.
    """
    for name in ts.TORCHRUN:
        monkeypatch.setenv(name, "2")
    run = engine.load_run(finished, device="cpu")
    script = run.script
    assert script is not ts and script.__file__ == str(finished / "train_small.py")
    assert run.config.width == 128 and run.tokenizer.vocab_size == 300
    stated = json.loads((finished / "result.json").read_text())["val_bpb"]
    assert val_bpb(run.model, run.config, dataset, 2) == pytest.approx(stated, rel=1e-6)
    earlier = engine.load_run(finished, step=9, device="cpu")
    assert not torch.equal(logits(earlier.model, [1, 2]), logits(run.model, [1, 2]))


def test_wandb_offline(dataset_dir, tmp_path):
    """With a name and no network the run is recorded in the run directory; --resume goes on with the same run."""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_PROJECT": "my-project", "PYTHONWARNINGS": "ignore"}
    run_dir = tmp_path / "run"
    argv = flags(dataset_dir, run_dir, "--wandb", "name", steps=2)
    code = f"""
import train_small as ts, wandb
assert ts.main({argv}) == 0
wandb.finish()
assert ts.main(["--resume", "--run-dir", {str(run_dir)!r}, "--steps", "4"]) == 0
"""
    done = python("-c", code, env=environment)
    assert done.returncode == 0, done.stderr
    records = list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    number = (run_dir / "wandb_id.txt").read_text()
    assert len(records) == 2 and all(path.name == f"run-{number}.wandb" for path in records)
    for path in records:
        written = path.read_bytes()
        assert all(key in written for key in (b"val_bpb", b"loss", b"step_ms", b"my-project"))


def test_wandb_without_a_key(dataset_dir, tmp_path, monkeypatch):
    """One sentence with the ways out, and the run can be started again."""
    def init(**options):
        raise wandb.errors.UsageError("No API key configured.\nMore")

    monkeypatch.setattr(wandb, "init", init)
    err = refused(*flags(dataset_dir, tmp_path / "run", "--wandb", "name"))
    assert "(No API key configured.); log in with `wandb login`, or set WANDB_MODE=offline" in err


# ---- ranks


def test_ranks_with_different_free_memory(monkeypatch):
    """All take the micro-batch of the one with the least: else they would run a different number of them."""
    monkeypatch.setattr(ts, "choose_packs", lambda config, ranks: 2)
    monkeypatch.setattr(ts.Ranks, "gather", lambda self, value: [value, 1 if value == 2 else value])
    assert ts.build_state(tiny_config(), ALONE, lambda text: None).micro_packs == 1


def test_two_processes_train_like_one(finished, halfway, dataset_dir, tmp_path, fast_python):
    """From the start and resumed from one process's checkpoint of step 6: the same losses within 1e-5."""
    resumed = shutil.copytree(halfway, tmp_path / "resumed")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_small.py"]
    environment = {**os.environ, "PYTHON_EXEC": str(fast_python)}
    first = python(*torchrun, *flags(dataset_dir, tmp_path / "two"), env=environment)
    second = python("train_small.py", "--resume", "--run-dir", resumed, ranks=2)
    for done in (first, second):
        assert done.returncode == 0 and done.stdout.count('"steps": 12') == 1, done.stderr
    one, two, after = (losses(d) for d in (finished, tmp_path / "two", resumed))
    assert [two[s] for s in range(1, 7)] == pytest.approx([one[s] for s in range(1, 7)], rel=1e-5)
    assert [after[s] for s in range(7, 13)] == pytest.approx([one[s] for s in range(7, 13)], rel=1e-5)
    ours, theirs = tensors(resumed), tensors(finished)
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    for name in ("qk_bank", "mlp_bank", "scalars"):
        name = f"model.safetensors/{name}"
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-3, rtol=0)


# ---- the training step


def test_warm_up_leaves_no_trace():
    """It updates every parameter, and then the state is that of a fresh start."""
    config = tiny_config()
    fresh, warm = (ts.build_state(config, ALONE, lambda text: None) for _ in range(2))
    random_state = torch.get_rng_state()
    weights = {name: value.clone() for name, value in warm.optimizer.weights().items()}
    changed = set()
    reset = ts.reset_state

    def before_reset(state):
        trained = state.optimizer.weights()
        changed.update(name for name in weights if not torch.equal(trained[name], weights[name]))
        reset(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ts, "reset_state", before_reset)
        warm_up(warm, lambda text: None)
    assert changed == weights.keys()
    assert torch.equal(random_state, torch.get_rng_state())
    for part in ("weights", "state"):
        a, b = (getattr(s.optimizer, part)() for s in (fresh, warm))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert all(torch.equal(a, b) for a, b in zip(fresh.model.parameters(), warm.model.parameters(), strict=True))
    assert all(p.grad is None for p in warm.model.parameters())
    assert warm.step == 0 and not any(slot.updates for slot in warm.optimizer.slots)


@pytest.mark.parametrize("where", ("micro_step", "bits_per_byte"), ids=("training", "validation"))
def test_out_of_memory(dataset_dir, tmp_path, monkeypatch, capsys, where):
    """Already in the warm-up, and in one sentence that says what to do."""
    def fail(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ts, "warm_up", warm_up)
    monkeypatch.setattr(ts, where, fail)
    assert ts.main(flags(dataset_dir, tmp_path / "run")) == 1
    found = capsys.readouterr()
    assert "step: micro-batch 512 tokens, " in found.out and not (tmp_path / "run/log.jsonl").exists()
    assert found.err.count("\n") == 1 and "out of memory; pass --micro-batch-tokens with half" in found.err


def test_every_step_takes_its_own_numbers(dataset_dir, dataset, tmp_path, monkeypatch):
    """Rate, momentum and loss weights are those of the step; prefixes are the tokenizer's."""
    update, train_step, taken, seen = ts.Optimizer.step, ts.train_step, [], []

    def watched_update(optimizer, lr, momentum, *rest):
        taken[:] = lr, momentum
        return update(optimizer, lr, momentum, *rest)

    def watched_step(state, batch):
        loss, model = train_step(state, batch), state.model
        seen.append([*taken, *model.loss_weights.tolist()])
        assert model.prefix_ids.tolist() == [*dataset.tokenizer.prefix_ids(), *[-1] * 20]
        return loss

    monkeypatch.setattr(ts.Optimizer, "step", watched_update)
    monkeypatch.setattr(ts, "train_step", watched_step)
    passes(*flags(dataset_dir, tmp_path / "run", "--eval-every", "0", "--save-every", "-1", mtp_weights=(1.0, 0.5)))
    config = ts.read_config(tmp_path / "run")
    assert len(seen) == 12
    for step, numbers in enumerate(seen):
        rates = ts.lr_multiplier(config, step), ts.muon_momentum(config, step)
        assert numbers == pytest.approx([*rates, *ts.loss_weights(config, step)])


def test_loss_scale(dataset):
    """In fp16 all gradients are larger by one number, which no step depends on."""
    config = tiny_config(dtype="float16")
    state = ts.build_state(config, ALONE, lambda text: None)
    assert state.loss_scale == 4096
    assert ts.build_state(tiny_config(dtype="float32"), ALONE, lambda text: None).loss_scale == 1.0
    losses = train_steps(state, dataset, 6)
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def test_micro_batch_size():
    """The most packs that divide a stage's share and fit the wanted tokens."""
    config = tiny_config(stages=((0.5, 8, 1.0), (0.5, 12, 1.5)))

    def packs(world, tokens):
        return ts.choose_packs(dataclasses.replace(config, micro_batch_tokens=tokens), ts.Ranks(0, world, ALONE.device))

    assert [packs(1, n * 128) for n in (1, 2, 3, 4, 100)] == [1, 2, 3, 4, 12]
    assert [packs(world, 0) for world in (1, 2, 4)] == [12, 6, 3]
    with pytest.raises(ts.UserError, match="8 packs do not divide over 3 processes"):
        ts.Pretraining.check(SimpleNamespace(config=config, available=math.inf), ts.Ranks(0, 3, ALONE.device))


# ---- the command line

def test_flash_attention_3_by_name(monkeypatch):
    """The pinned package accepts the request, and the function that it returns sees this project's arguments."""
    kernels = pytest.importorskip("kernels")
    from kernels.load import revision_or_version

    asked = {}

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        asked.update(options, longest=(max_q, max_k))
        return q + v, None

    def get_kernel(repository, *, revision=None, version=None):
        revision_or_version(revision=revision, version=version)
        return SimpleNamespace(flash_attn_varlen_func=flash)

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    config = tiny_config(attention="fa3")
    model = ts.GPT(config)
    attend = ts.choose_attention(model, lambda text: None)
    q, k, v = torch.randn(3, 8, config.num_heads, config.head_dim)
    y = attend(model.windows, torch.arange(8), torch.tensor([0, 8]), 8)(q, k, v, 1)
    torch.testing.assert_close(y, q + v)
    window = (config.window_long, 0)
    assert asked == {"softmax_scale": 1.0, "causal": True, "window_size": window, "longest": (8, 8)}


def test_flags_from_a_file(tmp_path):
    """@FILE: several flags on a line, comments, later flags win."""
    path = tmp_path / "some.args"
    path.write_text("\ufeff# it's a comment\n--steps 7 --width 64   # half a line\n\n--head-dim 16\n"
                    "--no-compile --run-dir='my lr#2/run #3' --data=~/text\n", encoding="utf-8")  # fmt: skip
    args = [f"@{path}", "--tokens", "999424", "--steps", "9", "--width", "32"]
    config = ts.make_config(args := ts.build_parser().parse_args(args))
    assert (config.width, config.head_dim, config.compile, config.num_steps) == (32, 16, False, 9)
    assert args.run_dir == "my lr#2/run #3" and config.data == "~/text"
    with pytest.raises(ts.UserError, match=f"no dataset at {Path.home()}/text"):
        ts.Dataset.open(config.data)


@pytest.mark.parametrize("script", (ts, tm))
@pytest.mark.parametrize("steps", (1, 7, 1000, 6144, 10**6, 9627397))
def test_steps_and_tokens_give_the_same_run(script, steps):
    """--steps N is --tokens of the same length: batch and rates are those of that length."""

    def config(*argv):
        return script.make_config(script.build_parser().parse_args([str(a) for a in argv]))

    by_steps = config("--steps", steps)
    assert by_steps.num_steps == steps and by_steps == config("--tokens", by_steps.tokens)


def test_values_of_flags():
    """Numbers, switches, lists, and lists of lists; an empty list needs a =."""
    parse = ts.build_parser().parse_args
    given = parse(["--muon-lr", "1", "--tokens", "5M", "--val-tokens", "1e6", "--seed", str(2**53 + 1), "--no-fp8",
                   "--fp8-head", "--long-layers=", "--value-embed-layers", "3",
                   "--softcap", "30,0.5,7.5", "--stages", "(0.5,8,1.0),(0.5,16,1.4)", "--wandb", "a b"])  # fmt: skip
    assert ts.given_fields(given) == {
        "muon_lr": 1.0, "tokens": 5_000_000, "val_tokens": 1_000_000, "seed": 2**53 + 1,
        "fp8": False, "fp8_head": True, "long_layers": (), "value_embed_layers": (3,),
        "softcap": (30, 0.5, 7.5), "stages": ((0.5, 8, 1.0), (0.5, 16, 1.4)), "wandb": "a b",
    }  # fmt: skip
    assert ts.given_fields(parse([])) == {}


@pytest.mark.parametrize(("argv", "words"), [
    (["--dta", "x"], ["unknown flag --dta; did you mean --data?"]),
    (["--lr", "0.1"], ["unknown flag --lr; did you mean --muon-lr and --adam-lr?"]),
    (["--batch-size", "8"], ["unknown flag --batch-size; did you mean --stages"]),
    (["runs/tiny.args"], ["unknown flag runs/tiny.args; an args file is given as @runs/tiny.args"]),
    (["@nothing.args"], ["No such file or directory: 'nothing.args'; give the path", "e.g. @runs/cpu.args"]),
    (["--steps", "many"], ["--steps: 'many' is not a whole number like 1000, 1e6 or 5M"]),
    (["--tokens", "1.5"], ["--tokens: '1.5' is not a whole number"]),
    (["--steps", "0"], ["--steps 0 trains nothing; use 1 or more"]),
    (["--long-layers", "a"], ["--long-layers: 'a' is not a list like 3,10"]),
    (["--width", "100"], ["width=100", "head_dim=128"]),
    (["--width", "30", "--head-dim", "30"], ["head_dim=30 is not a multiple of 4"]),
    (["--vocab-size", "70000"], ["vocab_size=70000 is not in its range (1, 65536)"]),
    (["--long-layers", "11"], ["long_layers=(11,) goes beyond the last layer, 10"]),
    (["--no-attention-layers", "1"], ["a layer of value_embed, paired, exclusive or gated_layers has no attention"]),
    (["--shared-input-from", "4"], ["shared_input_from is a layer"]),
    (["--dtype", "int8"], ["--dtype int8 is not one of auto, bfloat16, float16, float32"]),
    (["--max-seq-len", "16384"], ["max_seq_len=16384 is above pack_tokens=8192"]),
    (["--stages", "(0.5, 16, 1.0)"], ["0.5000, not 1"]),
    (["--stages", "1,2"], ["stages=(1, 2) is not in its range"]),
    (["--mtp-weights="], ["mtp_weights needs a weight for the next token"]),
    (["--bigram-rows", "1"], ["two rows"]),
    (["--micro-batch-tokens", "200"], ["--micro-batch-tokens is not a multiple of pack_tokens=8192"]),
    (["--resume", "--run-dir", "out/none"], ["out/none is not a run directory"]),
    (["--resume"], ["--resume needs --run-dir"]),
], ids=lambda value: " ".join(value) if value[0][:1] in "-@" else "")  # fmt: skip
def test_command_line_mistakes(argv, words):
    """Each is told what was wrong."""
    err = refused(*argv)
    assert [word for word in words if word not in err] == [], err


def test_an_open_quote_in_an_args_file(tmp_path):
    (tmp_path / "mine.args").write_text("--steps 2\n--wandb 'mine\n")
    message = refused(f"@{tmp_path}/mine.args")
    assert """"--wandb 'mine" in an args file cannot be read (No closing quotation)""" in message


NONSENSE = """
    num-layers=0 width=-64 width=1e12 head-dim=0 mlp-width=-1 vocab-size=0 max-seq-len=0 window-short=-8 window-long=0
    no-attention-layers=-1 long-layers=1.5 long-layers=(1,2) long-layers=1,-1 value-embed-layers=True bigram-rows=-500
    trigram-ratio=nan mudd-width=-1 gate-width=0 gate-width=999 attention-scale=0 rotary-base=inf softcap=1,2
    softcap=23,5,0 softcap=a,b,c mtp-weights=0 mtp-weights=1,nan mtp-until=7 prefix-weight=-1 init-qkv=nan init-o=-2
    init-up=inf pack-tokens=0 max-docs-per-pack=0 tokens=-5 max-epochs=0 val-tokens=0 stages=(1.0,0,1.0)
    stages=(1.0,2.5,1.0) stages=(nan,2,1.0) stages=(1.0,2) stages=(-1,2,1),(2,2,1) min-packs=0 muon-lr=-1 adam-lr=nan
    muon-beta2=2 adam-eps=0 momentum=2,0.9,3,3 momentum=0.85 momentum=0.8,0.9,-3,3 cooldown=-1 cooldown=2 lr-floor=nan
    average=1.5 seed=-1 eval-every=-1 save-every=-2 log-every=0 keep-checkpoints=0 micro-batch-tokens=-128
""".split()


@pytest.mark.parametrize("flag", NONSENSE)
def test_numbers_out_of_range(dataset_dir, tmp_path, flag):
    """Refused by the name of the field, before anything is made."""
    err = refused(*flags(dataset_dir, tmp_path / "run"), *(["--steps=1"] if "tokens=" in flag else []), f"--{flag}")
    name = flag.partition("=")[0]
    assert name in err or name.replace("-", "_") in err, err
    assert not (tmp_path / "run").exists()


# ---- where it runs

# A user without a name or a home, and a reader that leaves.
ALIEN = """
import os, pwd, sys
def unknown(number):
    raise KeyError(number)
pwd.getpwuid = unknown
for name in ("USER", "LOGNAME", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    os.environ.pop(name, None)
os.environ["HOME"] = "/nonexistent"
import train_small as ts
import torch
torch.set_num_threads(1)
import torch._inductor.codecache
print(*(os.environ.get(f"{name}_CACHE_DIR", "none") for name in ("TORCHINDUCTOR", "TRITON")), flush=True)
ts.report = ts.warm_up = lambda *arguments: None
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(writer)
os.close(reader)
sys.exit(ts.main(sys.argv[1:]))
"""


def test_a_user_without_a_name_and_a_reader_that_leaves(dataset_dir, tmp_path):
    """Compiled code lies in the project; `| head` takes the output, and the run goes on."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = python("-c", ALIEN, *flags(dataset_dir, tmp_path / "run", steps=3), cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and saved(tmp_path / "run") == [3]
    assert done.stdout.split() == [f"{tmp_path}/out/cache/inductor", f"{tmp_path}/out/cache/triton"]
    assert not (tmp_path / "out").exists(), "as nothing was compiled"


def test_a_console_that_lacks_letters(dataset_dir, tmp_path, monkeypatch):
    """It shows a ? in their place."""
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.setattr(ts, "report", lambda run, result: run.log.say("a sample: 名"))
    assert ts.main(flags(dataset_dir, tmp_path / "run", steps=1)) == 0
    assert b"a sample: ?\n" in console.buffer.getvalue()


@pytest.mark.parametrize("left", ("RANK", "WORLD_SIZE", "RANK WORLD_SIZE MASTER_ADDR"))
@pytest.mark.parametrize("value", ("", "2"))
def test_left_over_variables_of_torchrun(dataset_dir, tmp_path, monkeypatch, left, value):
    """A run takes all of them or none, and says so: it trains alone, and its result comes last."""
    for name in left.split():
        monkeypatch.setenv(name, value)
    out = passes(*flags(dataset_dir, tmp_path / "run", steps=1))
    assert json.loads(out.splitlines()[-1])["steps"] == 1
    note = f"note: {left.replace(' ', ', ')} ignored, as torchrun would set RANK, "
    assert out.startswith(note) if value else "note: " not in out


def test_an_old_python():
    """One sentence, where the packages that a newer one has would be missing."""
    done = python("-c", "import sys; sys.version_info = (3, 10); import train_small")
    assert done.returncode == 1 and done.stderr.startswith("error: this requires Python 3.11 or newer"), done.stderr


# ---- bad data: one sentence, exit code 1, nothing lost


SHARD = "pretrain/train_000000.bin"
BAD = {  # what is wrong with a dataset: a file, how it changes, whether dataset.json lists it so, the words
    "corrupt": (SHARD, lambda b: b[:-2] + b"\0\0", False, ["train_000000.bin was changed", "download it again"]),
    "truncated": (SHARD, lambda b: b[:-101], False, ["train_000000.bin was changed or is missing"]),
    "missing": (SHARD, None, False, ["train_000000.bin was changed or is missing"]),
    "tokenizer": ("tokenizer.json", lambda b: b + b"\n", False, ["is not the tokenizer that its shards were made"]),
    "no shards": ("pretrain/val_000000.bin", None, True, ["has no val_*.bin shards", "data/pretrain.py"]),
    "half": ("dataset.json", lambda b: b[: len(b) // 2], False, ["dataset.json is damaged (JSONDecodeError("]),
    "a count": ("dataset.json", lambda b: b.replace(b'"tokens": 1', b'"tokens": 3'), False, ["it was changed"]),
    "no object": ("dataset.json", lambda b: b"[]", False, ["dataset.json is damaged (TypeError("]),
    "no ranks": ("tokenizer.json", lambda b: b.replace(b'"ranks"', b'"r"'), True, ["is damaged (KeyError('ranks'))"]),
    "gone": ("dataset.json", None, False, ["no dataset at", "(good)", "--source SOURCE --out", "data/README.md"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_dataset(dataset_dir, tmp_path, what):
    """What was wrong with which file, before anything is trained; the dataset stays as it was."""
    root = shutil.copytree(dataset_dir, tmp_path / "bad")
    shutil.copytree(dataset_dir, tmp_path / "good")
    name, change, listed, words = BAD[what]
    content = (root / name).read_bytes()
    (root / name).unlink()
    if change:
        (root / name).write_bytes(change(content))
    if listed:
        list_files(root)
    before = snapshot(root)
    err = refused(*flags(root, tmp_path / "run"))
    assert [word for word in words if word not in err] == [], err
    assert snapshot(root) == before and not saved(tmp_path / "run")


def test_too_little_data(dataset, dataset_dir, tmp_path):
    """What there is, what was asked for, and the ways out; what is there can be used to the last step."""
    there = dataset.total("train", "tokens")
    err = refused(*flags(dataset_dir, tmp_path / "run", steps=500))
    words = f"{there:,} training tokens", "192,000", "--tokens", "--max-epochs"
    assert [word for word in words if word not in err] == [], err
    assert "asks for 384,000,000," in refused(*flags(dataset_dir, tmp_path / "run", steps=10**9)), "at once"
    config = tiny_config(tokens=there - 384)
    with contextlib.closing(loader_of(dataset, config)) as loader:
        for _ in range(config.num_steps):
            loader.next()


def test_repeated_text_and_a_large_table(dataset, dataset_dir, capsys):
    """A warning where the text is read twice; none for 1.4 passes, small tables and no table."""
    there = dataset.total("train", "tokens")

    def warning(**changes) -> str:
        values = {"tokens": 2 * there, "max_epochs": 3, "bigram_rows": 163841, "data": str(dataset_dir), **changes}
        ts.Pretraining(tiny_config(**values)).check(ALONE)
        return capsys.readouterr().out

    assert "text read 2.0 times" in warning() and "lower --bigram-rows" in warning()
    for change in ({"bigram_rows": 163840}, {"bigram_rows": 0}, {"tokens": int(1.4 * there)}):
        assert not warning(**change)
