"""Rivals: they read and score what train_small.py does; changes that do not fit stop; results follow from logs."""

import gzip
import importlib.util
import json
import math
import subprocess
import sys
import types

import leaderboard
import numpy as np
import plain_gpt
import pytest
import rivals
import torch
import train_small as ts
from rival_text import Text, UserError

from commands import sentence
from tiny import ROOT, tiny_config, write_dataset, write_shard


def config_of(**overrides) -> ts.Config:
    return tiny_config(val_tokens=10**9, **overrides)


def test_scored_documents_are_those_of_the_script(dataset, dataset_dir):
    expected = ts.scored_documents(ts.validation_documents(dataset, config_of()), config_of())
    text = Text(dataset_dir, max_seq_len=64)
    assert len(text.scored) == len(expected) > 3
    assert max(map(len, text.scored)) == 64
    for document, (sequence, _) in zip(text.scored, expected, strict=True):
        assert document.tolist() == sequence.tolist()
    lengths = dataset.tokenizer.token_bytes
    assert text.bytes == sum(int(lengths[sequence[1:]].sum()) for sequence, _ in expected)
    assert text.targets == sum(int((lengths[sequence[1:]] > 0).sum()) for sequence, _ in expected)


def test_training_packs_are_those_of_the_script(dataset, dataset_dir):
    """At shard ends, in documents longer than a pack and in those of a BOS alone too."""
    text = Text(dataset_dir, max_seq_len=64)
    reader = ts.ShardReader(dataset, config_of())
    offset = 0
    for size in [100, 128, 37, 200] * 12:
        inputs, targets, ends, offset = text.pack(offset, size, 64)
        found = []
        while sum(len(segment) - 1 for segment in found) < size:
            found.append(reader.segment(min(size - sum(len(segment) - 1 for segment in found), 64)))
        assert inputs.tolist() == np.concatenate([segment[:-1] for segment in found]).tolist()
        assert targets.tolist() == np.concatenate([segment[1:] for segment in found]).tolist()
        assert ends == np.cumsum([len(segment) - 1 for segment in found]).tolist()
    with pytest.raises(UserError, match="ran out of text"):
        text.pack(len(text.tokens) - 5, 64, 64)


def test_validation_holds_every_scored_target_once(dataset_dir):
    text = Text(dataset_dir, max_seq_len=64)
    expected = [ids for document in text.scored for ids in document[1:].tolist() if text.token_bytes[ids]]
    for batches in (text.validation_batches(3), text.validation_packs(150, multiple=4)):
        targets = np.concatenate([batch[1].ravel() for batch in batches])
        assert targets[targets >= 0].tolist() == expected
    packs = text.validation_packs(150, multiple=4)
    assert len(packs) % 4 == 0
    for _, _, ends in packs:
        assert ends[-1] == 150
        assert max(np.diff([0, *ends])) <= 64


def test_another_text_is_refused(tmp_path):
    """Other counts than those of the benchmark, and a changed shard."""
    folder = write_dataset(tmp_path / "p34")
    with pytest.raises(UserError, match="not .2217239, 9689981."):
        Text(folder)
    write_shard(folder / "pretrain/val_000000.bin", [256, 1, 2])
    with pytest.raises(UserError, match=r"val_000000\.bin is missing or is not the file"):
        Text(folder)


def test_fresh_text(tmp_path):
    """Other validation documents, none of which the text to leave out trains on; training text stays as it was."""
    words = [f"word{i} " * 9 for i in range(40)]
    parts = {"base": words[:4], "seen": words[:20], "unseen": words[10:31], "val": words[38:]}
    for name, documents in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        (tmp_path / f"{name}.jsonl").write_text(lines)

    def run(script, *argv):
        return subprocess.run([sys.executable, ROOT / script, *argv], cwd=tmp_path, capture_output=True, text=True)

    for name in ("base", "seen", "unseen"):
        flags = ["--vocab-size", "265"] if name == "base" else ["--tokenizer", "base/tokenizer.json"]
        argv = ["--source", f"{name}.jsonl", "--val-source", "val.jsonl", "--out", name, *flags]
        assert run("data/pretrain.py", *argv).returncode == 0
    assert run("data/sft.py", "--data", "base", "--source", "addition:100").returncode == 0

    made = run("records/rivals/fresh_text.py", "base", "--seen", "seen", "--unseen", "unseen", "--out", "fresh")
    assert "2 documents" in made.stdout, made.stderr
    assert run("data/check.py", "fresh").returncode == 0
    tokenizer = ts.Tokenizer(tmp_path / "fresh/tokenizer.json")
    tokens = np.fromfile(tmp_path / "fresh/pretrain/val_000000.bin", dtype=np.uint16)[512:]
    found = tokenizer.decode(tokens.tolist()).split("<|bos|>")
    assert [text for text in found if text] == words[20:22]
    train = "pretrain/train_000000.bin"
    assert (tmp_path / "fresh" / train).read_bytes() == (tmp_path / "base" / train).read_bytes()

    few = run("records/rivals/fresh_text.py", "base", "--seen", "seen", "--unseen", "base", "--out", "more")
    assert "base has 0 documents that seen has not, but 2 are needed" in few.stderr
    assert not (tmp_path / "more").exists()


# -- copies


def commit_all(folder) -> str:
    git = ["git", "-C", folder, "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git[:3], "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def clone_of_modded(folder, monkeypatch, leave_out: str = ""):
    """A repository whose files hold the anchors alone."""
    folder.mkdir()
    for name in ("train_gpt.py", "triton_kernels.py", "dc_triton_kernels.py"):
        anchors = [old for file, old, _ in rivals.CHANGES if file == name and old != leave_out]
        lines = [f"x = dict({a})" if a.endswith(",") else f"#{a}" if a.startswith(" ") else a for a in anchors]
        (folder / name).write_text("\n".join(lines) + "\n")
    monkeypatch.setitem(rivals.CLONES, "modded", ("https://localhost/modded", commit_all(folder)))
    return folder


def test_copies_come_from_the_commit(tmp_path, monkeypatch):
    """Not from the work tree of the clone, which may be at another commit or edited."""
    clone = clone_of_modded(tmp_path / "clone", monkeypatch)
    (clone / "train_gpt.py").write_text("edited")
    rivals.main(["prepare", "--modded", str(clone), "--out", str(tmp_path / "out")])
    copy = (tmp_path / "out/modded/train_gpt.py").read_text()
    assert "edited" not in copy
    for file, old, new in rivals.CHANGES:
        changed = (tmp_path / "out/modded" / file).read_text()
        assert new in changed
        assert old not in changed.replace(new, "")


def test_missing_anchors_clones_gpus_and_logs_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(rivals, "ask_gpu", lambda *_: None)
    clone = clone_of_modded(tmp_path / "clone", monkeypatch, leave_out="vocab_size=50257,")
    (tmp_path / "modded").mkdir()
    run = ["--data", tmp_path, "--tokens", 1000, "--gpu", ""]
    for argv, words in (
        (["prepare", "--modded", clone], "train_gpt.py of modded-nanogpt holds 'vocab_size=50257,' 0 times, not once"),
        (["prepare", "--nanochat", tmp_path], "run `git clone https://github.com/karpathy/nanochat"),
        (["nanochat", *run], "rivals.py prepare --nanochat CLONE"),
        (["modded", *run], "modded-nanogpt needs an NVIDIA GPU"),
        (["gpt", *run[:-2]], "gpt needs an NVIDIA GPU"),
        (["results", "--logs", tmp_path], "has no full runs"),
    ):
        assert words in sentence(rivals.main, [*map(str, argv), "--out", str(tmp_path)])
    with pytest.raises(UserError, match="train.py holds 'a = 1' 2 times, not once"):
        rivals.replace_once("a = 1\nb\na = 1", "a = 1", "a = 2", "train.py")


# -- modded-nanogpt: what its copy calls


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    """Imports modded_hooks as a copy does, with a vocabulary of 32,768 entries and batches divided by `divide`."""

    def load(divide: int = 8, tokens: int = 34_013_184):
        folder = tmp_path / f"data_{divide}"
        merges = [bytes([i // 256, i % 256]) for i in range(32768 - 256 - 9)]
        write_dataset(folder, merges=merges)
        settings = {"data": str(folder), "divide": divide, "tokens": tokens, "lr": 1.4, "mlp": "bf16", "seed": 3}
        monkeypatch.setenv("RIVAL_SETTINGS", json.dumps(settings | {"limit": None, "val_every": 0}))
        monkeypatch.delitem(sys.modules, "modded_hooks", raising=False)
        module = importlib.import_module("modded_hooks")
        module.DEVICE = "cpu"
        return module

    return load


def test_steps_of_record_89(hooks):
    """1,270 scheduled steps to 15 more, as there, for the tokens of P34, at most half a batch away from them."""
    module = hooks()
    for divide, steps in {1: (127, 2), 2: (255, 3), 4: (510, 6), 8: (1020, 12), 16: (2040, 24)}.items():
        batches = [size // divide for size in (131072, 262144, 393216, 393216)]
        assert module.choose_steps(34_013_184, batches) == steps
        bounds = [0, round(steps[0] / 3), round(steps[0] * 2 / 3), steps[0], sum(steps)]
        tokens = sum((bounds[i + 1] - bounds[i]) * batches[i] for i in range(4))
        assert module.trained_tokens(*steps, batches) == tokens
        assert abs(tokens - 34_013_184) <= batches[-1] / 2


def test_what_the_copy_gets(hooks):
    """Batches and rates are changed in place, and the loader gives packs of the text, in training and validation."""
    module = hooks(16)
    stages = [types.SimpleNamespace(batch_size=size) for size in (131072, 262144, 393216, 393216)]
    schedule = type("TrainingSchedule", (), {"get_lr": lambda self, step: 0.5 + step})
    names = {"TRAINING_STAGES": stages, "args": types.SimpleNamespace(), "TrainingSchedule": schedule}
    names |= {"GPT": type("GPT", (), {}), "get_bigram_hash": lambda x: x + 1}
    module.change(names)
    assert [stage.batch_size for stage in stages] == [8192, 16384, 24576, 24576]
    assert schedule().get_lr(2) == pytest.approx(3.5)
    assert names["GPT"]().quantize_mlp_fp8(bootstrap_down=True) is None
    assert module.grad_accum_steps == 1

    # Its loss is a mean over all positions, and what is not scored has cross_entropy's index to be left out.
    args = names["args"]
    loader = names["distributed_data_generator"]("", args.val_batch_size, -1, grad_accum_steps=1, align_to_bos=False)
    inputs, targets, bounds, bigrams, on_host = next(loader)
    assert len(inputs) == args.val_tokens == module.VALIDATION_PACK
    assert int((targets >= 0).sum()) == module.text.targets
    assert set(targets[targets < 0].tolist()) == {-100}
    assert bounds[0] == 0 and bounds[-1] == len(inputs) and (bounds.diff() >= 0).all()
    assert (bigrams == inputs + 1).all() and (on_host == bigrams.numpy()).all()


def test_training_packs_of_the_copy(hooks):
    module = hooks(8)
    module.SEGMENTS = {512: 200, 256: 100}
    loader = module.generator(lambda x: x, "", 1024, 64, grad_accum_steps=2)
    inputs, targets, bounds, *_ = loader.send(None)
    expected = module.text.pack(0, 512, 64)
    assert inputs.tolist() == expected[0].tolist()
    assert targets.tolist() == expected[1].tolist()
    assert bounds[1 : len(expected[2]) + 1].tolist() == expected[2]
    inputs, *_ = loader.send((256, 128, 1))
    assert inputs.tolist() == module.text.pack(expected[3], 256, 128)[0].tolist()


def weights(q, k, bounds, scale, window) -> torch.Tensor:
    """Of attention that is causal, inside documents, over `window` tokens back, (H, T, T), from the definition."""
    position = torch.arange(len(q))
    document = torch.bucketize(position, bounds[1:].long(), right=True)
    back = position[:, None] - position
    seen = (document[:, None] == document) & (back >= 0) & ((back <= window) if window >= 0 else True)
    scores = torch.einsum("ihk,jhk->hij", q, k) * scale
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def attention(q, k, v, bounds, scale, window) -> torch.Tensor:
    return torch.einsum("hij,jhk->ihk", weights(q, k, bounds, scale, window), v)


def test_flash_attn_4_becomes_one_operator(monkeypatch):
    """Its two functions are called with what they need, and their gradients arrive where they belong."""

    def forward(q, k, v, return_lse, softmax_scale, causal, window_size_left, **lengths):
        assert causal and lengths["cu_seqlens_q"] is lengths["cu_seqlens_k"] and lengths["max_seqlen_k"] == 6
        left = -1 if window_size_left is None else window_size_left
        out = attention(q, k, v, lengths["cu_seqlens_q"], softmax_scale, left)
        return out, torch.zeros(q.size(1), q.size(0)), None, None, None

    def backward(q, k, v, out, grad, lse, softmax_scale, causal, window_size_left, **lengths):
        assert lse.shape == (q.size(1), q.size(0))
        left = -1 if window_size_left is None else window_size_left
        p = weights(q, k, lengths["cu_seqlens_q"], softmax_scale, left)
        p_grad = torch.einsum("ihk,jhk->hij", grad, v)
        s_grad = p * (p_grad - (grad * out).sum(-1).T[:, :, None]) * softmax_scale
        q_grad = torch.einsum("hij,jhk->ihk", s_grad, k)
        k_grad = torch.einsum("hij,ihk->jhk", s_grad, q)
        return q_grad, k_grad, torch.einsum("hij,ihk->jhk", p, grad)

    module = types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setenv("RIVAL_SETTINGS", json.dumps({"attention": "fa4"}))
    path = ROOT / "records/rivals/stand_ins/kernels.py"
    spec = importlib.util.spec_from_file_location("stand_in", path)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)

    torch.manual_seed(0)
    q, k, v = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))
    bounds = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    flash = kernels.get_kernel("any").flash_attn_interface
    compiled = torch.compile(flash.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    for window in (-1, 3):
        out = compiled(q, k, v, bounds, bounds, 6, 6, causal=True, softmax_scale=0.3, window_size=(window, 0))
        expected = attention(q, k, v, bounds, 0.3, window)
        torch.testing.assert_close(out, expected)
        weight = torch.randn_like(out)
        found = torch.autograd.grad((out * weight).sum(), (q, k, v))
        for one, other in zip(found, torch.autograd.grad((expected * weight).sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(one, other)

    # nanochat's dense rows are documents of equal length.
    rows = flash.flash_attn_func(*(x.view(2, 6, 2, 8) for x in (q, k, v)), causal=True, window_size=(window, 0))
    bounds = torch.tensor([0, 6, 12], dtype=torch.int32)
    torch.testing.assert_close(rows.flatten(0, 1), attention(q, k, v, bounds, 8**-0.5, window))


# -- the plain GPT, and runs from the command to the table


def gpt_settings(**overrides) -> dict:
    settings = {"seed": 0, "layers": 2, "width": 32, "heads": 2, "max_seq_len": 64, "lr": 0.003, "rows": 4}
    return settings | {"batch": 512, "steps": 16, "warmup": 2, "compile": False} | overrides


def test_plain_gpt_learns(dataset_dir):
    text = Text(dataset_dir, max_seq_len=64)
    untrained = plain_gpt.train(text, gpt_settings(steps=1, lr=0.0), say=lambda *_, **__: None)
    trained = plain_gpt.train(text, gpt_settings(), say=lambda *_, **__: None)
    uniform = text.targets * math.log(text.vocab_size) / math.log(2) / text.bytes
    assert untrained["bpb"] == pytest.approx(uniform, rel=0.02)
    assert trained["bpb"] < 0.85 * untrained["bpb"]
    assert trained["tokens"] == 16 * 512


def test_plain_gpt_is_causal_and_skips_what_does_not_count():
    torch.manual_seed(0)
    model = plain_gpt.PlainGPT(vocab_size=50, layers=2, width=32, heads=2, max_seq_len=16)
    tokens = torch.randint(50, (2, 16))
    targets = torch.randint(50, (2, 16))
    targets[0, 3] = -1
    nats = model(tokens, targets)
    assert nats[0, 3] == 0
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 50
    assert torch.equal(model(changed, targets)[:, :10], nats[:, :10])
    assert not torch.equal(model(changed, targets)[:, 10:], nats[:, 10:])


def test_nanochat_reads_the_documents_in_their_order(dataset, dataset_dir, monkeypatch):
    settings = {"data": str(dataset_dir), "max_seq_len": 64, "limit": None, "rows": 2, "loader": "bestfit"}
    monkeypatch.setenv("RIVAL_SETTINGS", json.dumps(settings))
    monkeypatch.delitem(sys.modules, "nanochat_run", raising=False)
    module = importlib.import_module("nanochat_run")
    tokens = np.concatenate([dataset.read(path) for path in dataset.files("train")]).tolist()
    encode = module.Tokenizer().encode
    read = []
    for batch, (*_, epoch) in module.document_batches("train", None, 7):
        if epoch == 2:
            break
        assert len(batch) <= 7
        read += np.concatenate(encode(batch, prepend=dataset.tokenizer.bos_id, num_threads=4)).tolist()
    assert read == tokens


# The parts of nanochat that nanochat_run.py replaces or relies on; the "model" gives every target the same nats.
NANOCHAT = {
    "nanochat/common.py": "def compute_init(kind):\n    import torch\n    torch.manual_seed(42)\n    return kind\n",
    "nanochat/gpt.py": "class GPT:\n    def setup_optimizer(self, matrix_lr, weight_decay):\n"
    "        print('rates', matrix_lr, weight_decay)\n",
    "nanochat/checkpoint_manager.py": "def save_checkpoint(*args):\n    raise SystemExit('saved')\n",
    "nanochat/tokenizer.py": "import rustbpe\ndef get_tokenizer(): pass\ndef get_token_bytes(device): pass\n",
    "nanochat/dataloader.py": "def _document_batches(): pass\n"
    "def tokenizing_distributed_data_loader_bos_bestfit(): pass\n"
    "def tokenizing_distributed_data_loader_with_state_bos_bestfit(): pass\n",
    "scripts/base_train.py": """
import argparse, math, nanochat.dataloader, wandb
from nanochat.common import compute_init
from nanochat.gpt import GPT
from nanochat.checkpoint_manager import save_checkpoint
from nanochat.tokenizer import get_tokenizer, get_token_bytes
from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit as held_out
from nanochat.dataloader import tokenizing_distributed_data_loader_with_state_bos_bestfit as loader
parser = argparse.ArgumentParser()
for name in ("depth", "max-seq-len", "device-batch-size", "total-batch-size", "num-iterations", "eval-every",
             "core-metric-every", "sample-every", "eval-tokens"):
    parser.add_argument("--" + name, type=int)
args = parser.parse_args()
device = compute_init("cpu")
GPT().setup_optimizer(matrix_lr=0.02, weight_decay=0.1)
B, T = args.device_batch_size, args.max_seq_len
train = loader(get_tokenizer(), B, T, split="train", device=device)
token_bytes = get_token_bytes(device=device)
for step in range(args.num_iterations):
    x, y, state = next(train)
    print(f"step {step:05d}/{args.num_iterations:05d} (0%) | dt: 100.00ms | x")
targets = bytes_ = 0
batches = iter(held_out(get_tokenizer(), B, T, split="val", device=device))
for _ in range(args.eval_tokens // (B * T)):
    x, y = next(batches)
    targets += int((y >= 0).sum())
    bytes_ += int(token_bytes[y[y >= 0]].sum())
assert next(batches, None) is None
bpb = 3.0 * targets / math.log(2) / bytes_
meta = {"val_bpb": bpb, "loop_state": {"total_training_time": 0.1 * (args.num_iterations - 11)},
        "total_batch_size": args.total_batch_size, "dataloader_state_dict": state}
save_checkpoint("folder", args.num_iterations, {}, {}, meta, rank=0)
""",
}


def test_nanochat_from_clone_to_table(dataset_dir, tmp_path, monkeypatch, capsys):
    clone = tmp_path / "clone"
    for name, content in NANOCHAT.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(content)
    monkeypatch.setitem(rivals.CLONES, "nanochat", ("https://localhost/nanochat", commit_all(clone)))
    folders = ["--out", str(tmp_path / "out"), "--logs", str(tmp_path / "logs")]
    rivals.main(["prepare", "--nanochat", str(clone), *folders])

    flags = ["--data", str(dataset_dir), "--max-seq-len", "64", "--batch", "256", "--steps", "13", "--tokens", "3328"]
    flags += ["--loader", "stream", "--lr", "2", "--seeds", "1", "--gpu", ""]
    rivals.main(["nanochat", *flags, *folders])
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name.endswith("seed-1.log.gz")
    run = rivals.read_log(log)
    text = Text(dataset_dir, max_seq_len=64)
    assert run["result"]["nats"] == pytest.approx(3 * text.targets)
    assert run["result"]["seconds"] == pytest.approx(1.3)
    assert run["result"]["tokens"] == 13 * 256
    assert run["dataset"]["scored"]["bytes"] == text.bytes
    assert "rates 0.04 0.1" in gzip.decompress(log.read_bytes()).decode()

    capsys.readouterr()
    rivals.main(["results", *folders])
    row = capsys.readouterr().out.splitlines()[-1]
    bpb = f"{run['result']['bpb']:.4f}"
    assert f"| 1 | 13 | 3,328 | {bpb} | {bpb} | 1.3 |" in row


def bits(nats: float) -> float:
    """Of 1,000 bytes, for each byte."""
    return nats / math.log(2) / 1000


def write_log(path, *lines: str, rival="gpt", lr=0.001, seed=0, nats=1000.0, length="max_seq_len", **wrong) -> None:
    """A finished run: these lines, then the result of 50 steps in 2 s, but for what is `wrong` in it."""
    settings = {"rival": rival, length: 2048, "lr": lr, "seed": seed, "smoke": False}
    run = {"settings": settings, "machine": {"device": "a CPU"}, "dataset": {"name": "p34", "scored": {"bytes": 1000}}}
    result = {"bpb": bits(nats), "nats": nats, "seconds": 2.0, "steps": 50, "tokens": 100, "gib": None} | wrong
    words = ["RUN " + json.dumps(run), *lines, "RESULT " + json.dumps(result)]
    path.write_bytes(gzip.compress("\n".join(words).encode()))


GPT_LINE = "step 50/50 loss 1.2345 seconds 2.00"


def test_a_log_that_contradicts_its_result_is_refused(tmp_path):
    path = tmp_path / "x.log.gz"
    write_log(path, GPT_LINE)
    assert rivals.read_log(path)["validations"] == [(50, 2.0, pytest.approx(bits(1000)))]
    for line, wrong, words in (
        (GPT_LINE, {"bpb": 1.4}, "states 1.400000 bpb, but its nats give 1.442695"),
        (GPT_LINE, {"seconds": 1.9}, "50 steps in 1.90 s, but its lines give 2.00 s"),
        (GPT_LINE, {"steps": 49}, r"results after \[49\] steps, but its lines have them after \[50\]"),
        ("RESULT {}", {}, "not the log of a finished run: it has 2 results"),
    ):
        write_log(path, line, **wrong)
        with pytest.raises(UserError, match=words):
            rivals.read_log(path)


def modded_lines(milliseconds: int, **wrong) -> list[str]:
    """A validation after 20 steps, as its copy prints it, and the line of the last one."""
    state = {"bpb": bits(1500), "nats": 1500.0, "seconds": 0.9, "steps": 20} | wrong
    first = ["step:20/50 train_time:880ms step_avg:44.00ms", "VALIDATION " + json.dumps(state)]
    times = {20: milliseconds, 50: 2000}
    return first + [f"step:{step}/50 val_loss:3.1 train_time:{time}ms step_avg:1ms" for step, time in times.items()]


def test_validations_of_modded_nanogpt(tmp_path):
    path = tmp_path / "x.log.gz"
    write_log(path, *modded_lines(900), rival="modded")
    expected = [(20, 0.9, pytest.approx(bits(1500))), (50, 2.0, pytest.approx(bits(1000)))]
    assert rivals.read_log(path)["validations"] == expected
    for lines, words in (
        (modded_lines(900, bpb=2.0), "states 2.000000 bpb, but its nats give 2.164043"),
        (modded_lines(990), "states 20 steps in 0.90 s, but its lines give 0.99 s"),
        (modded_lines(900, steps=21), r"results after \[21, 50\] steps, but its lines have them after \[20, 50\]"),
    ):
        write_log(path, *lines, rival="modded")
        with pytest.raises(UserError, match=words):
            rivals.read_log(path)


def test_validations_of_nanochat(tmp_path):
    """Steps of 10 ms behind 11 that its clock leaves out, of which each counts as the mean of the others."""
    path = tmp_path / "x.log.gz"
    lines = ["Step 00000 | Validation bpb: 3.500000"]
    lines += [f"step {step:05d}/00050 (0%) | dt: {9999 if step < 11 else 10}.00ms | x" for step in range(30)]
    lines += ["Step 00030 | Validation bpb: 1.750000"]
    lines += [f"step {step:05d}/00050 (0%) | dt: 20.00ms | x" for step in range(30, 50)]
    lines += ["Step 00050 | Validation bpb: 1.442695"]
    mean = (19 * 0.01 + 20 * 0.02) / 39
    write_log(path, *lines, rival="nanochat", seconds=50 * mean)
    (start, during, end) = rivals.read_log(path)["validations"]
    assert start == (0, 0, 3.5)
    assert during == (30, pytest.approx(11 * mean + 19 * 0.01), 1.75)
    assert end == (50, pytest.approx(50 * mean), pytest.approx(bits(1000), abs=1e-9))
    write_log(path, *lines[:-2], rival="nanochat", seconds=50 * mean)
    with pytest.raises(UserError, match="results after"):
        rivals.read_log(path)


def test_curves_of_rivals(tmp_path, monkeypatch):
    """Each rival with its best settings, by the seed with the most validations."""
    logs = tmp_path / "rivals/logs"
    logs.mkdir(parents=True)
    monkeypatch.setattr(leaderboard, "README", tmp_path / "README.md")
    end = "step:50/50 val_loss:3.1 train_time:2200ms step_avg:1ms"
    write_log(logs / "a.log.gz", end, rival="modded", nats=1100.0, seconds=2.2)
    write_log(logs / "b.log.gz", *modded_lines(900), rival="modded", seed=1)
    write_log(logs / "c.log.gz", end, rival="modded", lr=0.1, nats=1900.0, seconds=2.2)
    write_log(logs / "d.log.gz", GPT_LINE)
    found = {curve.name: curve.points for curve in leaderboard.rival_curves("p34", "a CPU")}
    modded = [(0.9, pytest.approx(bits(1500))), (2.0, pytest.approx(bits(1000)))]
    assert found == {"modded-nanogpt, record 89": modded}, "a plain GPT has no curve"
    assert leaderboard.rival_curves("p34", "NVIDIA H200") == leaderboard.rival_curves("p100", "a CPU") == []


def test_seeds_share_a_row(tmp_path, capsys):
    """Also those of a log that says "sequence", as older ones do."""
    write_log(tmp_path / "a.log.gz", GPT_LINE, nats=1500 * math.log(2), length="sequence")
    write_log(tmp_path / "b.log.gz", GPT_LINE, nats=1600 * math.log(2), seed=1, seconds=2.004)
    rivals.main(["results", "--logs", str(tmp_path)])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == ["| p34 | gpt | lr 0.001 | 0, 1 | 50 | 100 | 1.5500 | 1.5000, 1.6000 | 2.0, 2.0 |  | a CPU |"]


@pytest.mark.parametrize("rival", ["gpt", "nanochat"])
def test_a_log_for_each_setting(rival, tmp_path, monkeypatch):
    """No run overwrites the log of another one, and runs without special flags state what those of older logs do."""
    runs = []
    monkeypatch.setattr(rivals, "train", lambda args, settings, *_: runs.append(settings | {"seed": 0}))
    (tmp_path / "nanochat").mkdir()
    common = [rival, "--out", str(tmp_path), "--tokens", "65536000", "--gpu", ""]
    for flags in ("", "--val-every 9", "--max-seq-len 64", "--rows 2", "--steps 9", "--no-compile", "--batch 4096"):
        rivals.main([*common, *flags.split()])
    assert len({rivals.tag_of(settings) for settings in runs}) == len(runs)
    assert rival == "gpt" or not {"steps", "compile"} & runs[0].keys()


def test_a_run_that_fails_keeps_its_log(dataset_dir, tmp_path, capsys):
    args = types.SimpleNamespace(seeds=[0], logs=tmp_path, cache=tmp_path, gpu="")
    settings = {"rival": "gpt", "data": str(dataset_dir), "tokens": 1, "max_seq_len": 64, "limit": None, "smoke": False}
    with pytest.raises(UserError, match="the run ended with status 3; its log is"):
        rivals.train(args, settings, ["-c", "print('the reason'); raise SystemExit(3)"], tmp_path, {})
    assert "the reason" in capsys.readouterr().err
    (log,) = tmp_path.iterdir()
    assert log.suffix == ".log"
