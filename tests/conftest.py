"""What the tests share: tiny configurations, random weights, documents in packed form, a dataset, a loader.

`ts` is train_small, also in tests of what both scripts share; `script(config)` is the module of a Config. Tests reach
the packed interface through `pack`, `logits`, `loader_of` and `validation_of` below, so that a change of the interface
needs one change here.
"""

import base64
import contextlib
import dataclasses
import gc
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import matplotlib.pyplot  # noqa: F401  (imported late by a run, as dynamo is)
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before triton is imported anywhere: its kernels then run in the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import export
import sft
import tokenizer
import torch._dynamo
import train_medium as tm
import train_small as ts
from dataset import write_json
from safetensors.torch import load_file

from processes import write_python

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
ALONE = ts.Ranks(0, 1, CPU)  # one process
torch.set_num_threads(1)  # the model is tiny, and one thread adds up in one order
os.environ["OMP_NUM_THREADS"] = "1"  # the same in subprocesses


def pytest_collection_modifyitems(items: list) -> None:
    """The files that take longest come first, so that processes that share them end at about the same time."""
    names = "kernels page serve quickstart rl core generation notebook multi_node resume finetune_hf model".split()
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in names)


freeze = gc.freeze
gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> None:
    """What a module finds, such as the imports of all tests, is not looked at by the garbage collector again.

    A run collects garbage before its first step and at its end, and unfreezes everything before the latter. With all
    that lives in this process, that took 0.4 s each time, also of a run that is refused. Here only what is new is
    collected.
    """
    gc.collect()
    freeze()


# Two stages with batches of different size.
TINY = {
    "num_layers": 4, "width": 64, "head_dim": 16, "mlp_width": 128, "vocab_size": 300, "max_seq_len": 64,
    "no_attention_layers": (2,), "long_layers": (1, 3), "key_offset_layers": (1, 3), "value_embed_layers": (0, 3),
    "bigram_rows": 500, "trigram_ratio": 2.5, "shared_input_from": 1, "pack_tokens": 128,
    "max_docs_per_pack": 8, "window_short": 8, "window_long": 24, "stages": ((0.5, 2, 1.0), (0.5, 4, 1.5)),
    "tokens": 20 * 3 * 128, "val_tokens": 1500, "mudd_width": 64,
}  # fmt: skip


# Layers 1 and 3 have the long window and value embeddings.
TINY_MEDIUM = {
    "num_layers": 4, "width": 64, "head_dim": 16, "mlp_width": 128, "vocab_size": 300, "max_seq_len": 64,
    "long_layers": (1, 3), "pack_tokens": 128, "max_docs_per_pack": 8,
    "window_short": 8, "window_long": 24, "stages": ((0.5, 2, 1.0), (0.5, 4, 1.5)), "tokens": 20 * 3 * 128,
    "val_tokens": 1500, "mudd_width": 0,
    "muon_lr": 0.023, "adam_lr": 0.006,
}  # fmt: skip


def tiny_config(**overrides) -> ts.Config:
    return ts.Config(**{**TINY, **overrides})


def tiny_medium(**overrides) -> tm.Config:
    return tm.Config(**{**TINY_MEDIUM, **overrides})


def sets(values: dict) -> list[str]:
    """The flag of every field but tokens, since --steps or --tokens says how long a run is."""
    flags = []
    for key, value in values.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif key != "tokens":
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            flags.append(f"--{name}={text}".replace(" ", ""))
    return flags


def entries(run_dir) -> list[dict]:
    """The log of a run."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


def losses(run_dir) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in entries(run_dir) if "loss" in e}


def script(config):
    """The training script that a Config belongs to."""
    return sys.modules[type(config).__module__]


def random_model(config, seed: int = 0) -> torch.nn.Module:
    """A model whose every parameter is random: zero-initialised gates and tables would hide mistakes."""
    model = script(config).GPT(config)
    model.init_weights(seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            size = 0.1 if name.endswith("_bank") else 0.3
            param.add_(torch.randn(param.shape, generator=rng) * size)
    model.attention = script(config).sdpa_attention
    return model


def random_documents(lengths, vocab=300, seed=0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def pack(documents) -> tuple:
    """(tokens, targets, positions, cu_seqlens, max_doc); the last token of a document is a target only."""
    inputs = [torch.tensor(d[:-1]) for d in documents]
    targets = torch.cat([torch.tensor(d[1:]) for d in documents]).int()
    ends = np.cumsum([0] + [len(i) for i in inputs])
    cu_seqlens = torch.tensor([*ends, ends[-1], ends[-1]], dtype=torch.int32)  # two borders are padding
    positions = torch.cat([torch.arange(len(i)) for i in inputs]).int()
    return torch.cat(inputs).int(), targets, positions, cu_seqlens, max(len(i) for i in inputs)


def logits(model, *documents) -> torch.Tensor:
    """Logits after every token of the given documents, packed behind each other: (T, padded vocabulary)."""
    tokens, _, *rest = pack([[*d, 0] for d in documents])
    with torch.no_grad():
        return model(tokens, None, *rest)


# ---- datasets


def loader_of(dataset, config, ranks=ALONE, reader_state=None, first_step=0):
    """A PackLoader over the training shards of a dataset, from a state of its reader on."""
    module = script(config)
    reader = module.ShardReader(dataset, config)
    if reader_state is not None:
        reader.seek(reader_state)
    return module.PackLoader(reader, config, ranks, first_step)


def validation_of(dataset, config):
    """The Batch of a dataset's validation split."""
    module = script(config)
    documents = module.scored_documents(module.validation_documents(dataset, config), config)
    return module.validation_batch(documents, config, dataset.tokenizer.bos_id)


def train_steps(state, dataset, steps: int) -> list[float]:
    """Losses of the first steps over a dataset."""
    module = script(state.config)
    with contextlib.closing(loader_of(dataset, state.config)) as loader:
        return [module.train_step(state, loader.next()).item() for _ in range(steps)]


def val_bpb(model, config, dataset, packs: int = 1) -> float:
    """Bits per byte of a dataset's validation split."""
    token_bytes = torch.zeros(config.padded_vocab, dtype=torch.long)
    token_bytes[: config.vocab_size] = torch.from_numpy(dataset.tokenizer.token_bytes)
    return script(config).bits_per_byte(model, validation_of(dataset, config), packs, token_bytes, ALONE)


SPECIALS = ("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>",
            "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")  # fmt: skip
MERGES = [m.encode() for m in ("th", "he", "the", " t", " a", "in", "er", "on", " the", "ed", "é", "ü", "an", "re",
                               "nd", "and", " and", "or", "is", "st", "ing", "at", "es", "en", "to", "it", "ou", "al",
                               "ar", "as", "se", "ll")] + ["€".encode()[:2], "€".encode(), b"\xa9 "]  # fmt: skip
WORDS = "the and then rest is in an order of stone ting ell hat é ü € naïve 你好 12 ... seller outer".split()


def write_tokenizer(path: Path, merges=MERGES) -> str:
    """256 bytes, some merges, the specials: 300 entries by default. Returns the sha256 of the file."""
    ranks = [bytes([b]) for b in range(256)] + list(merges)
    spec = {"pattern": r"\s?\S+|\s+", "ranks": [base64.b64encode(r).decode() for r in ranks],
            "special_tokens": {s: len(ranks) + i for i, s in enumerate(SPECIALS)}}  # fmt: skip
    path.write_text(json.dumps(spec))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_shard(path: Path, tokens, tokenizer_sha256: str = "") -> None:
    """256 int32 of header, then uint16. Without a hash the header ends after its first three words (llm.c)."""
    tokens = np.asarray(tokens, "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    if tokenizer_sha256:
        header[5:13] = np.frombuffer(bytes.fromhex(tokenizer_sha256), "<i4")
        header[13:21] = np.frombuffer(hashlib.sha256(tokens.tobytes()).digest(), "<i4")
    path.write_bytes(header.tobytes() + tokens.tobytes())


def write_dataset(root: Path, words=((0, 1, 300, 12, 2, 90, 0, 45), (700, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 60, 25, 1500),
                                     (40, 150, 7, 800, 26, 1)), val_words=(30, 1, 0, 200, 9, 60, 4), hashes=True,
                  merges=MERGES) -> Path:  # fmt: skip
    """A dataset of documents of the given numbers of words, one tuple for each train shard: 0 words are a BOS alone,
    1 word is one token."""
    (root / "pretrain").mkdir(parents=True)
    sha256 = write_tokenizer(root / "tokenizer.json", merges)
    tokenizer, rng, text_bytes = ts.Tokenizer(root / "tokenizer.json"), np.random.default_rng(0), {}
    for split, shards in (("train", words), ("val", (val_words,))):
        for i, shard in enumerate(shards):
            tokens, texts = [], ["the" if n == 1 else " ".join(rng.choice(WORDS, n)) for n in shard]
            for text in texts:
                tokens += [tokenizer.bos_id, *tokenizer.encode(text)]
            path = root / "pretrain" / f"{split}_{i:06d}.bin"
            write_shard(path, tokens, sha256 if hashes else "")
            text_bytes[path.relative_to(root).as_posix()] = len("".join(texts).encode())
    (root / "dataset.json").write_text(json.dumps({"vocab_size": tokenizer.vocab_size}))
    list_files(root, text_bytes)
    return root


def list_files(root: Path, text_bytes: dict | None = None, **more) -> None:
    """Writes into dataset.json what lies in the directory, as if it had been made so. Counts of text stay if known."""
    info = json.loads((root / "dataset.json").read_text())
    before, files = info.get("files", {}), {}
    for path in sorted([root / "tokenizer.json", *root.glob("*/*.bin")]):
        name = path.relative_to(root).as_posix()
        files[name] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        if path.suffix == ".bin":
            files[name]["tokens"] = max(0, (path.stat().st_size - 1024) // 2)
        if name.startswith("pretrain/"):
            known = before.get(name, {}).get("text_bytes", 1)
            files[name] |= {"text_bytes": (text_bytes or {}).get(name, known), **more}
    pretrain = [name for name in sorted(files) if name.startswith(("tokenizer.json", "pretrain/"))]
    lines = "".join(f"{name} {files[name]['sha256']}\n" for name in pretrain)
    info |= {"files": files, "tokenizer_sha256": files["tokenizer.json"]["sha256"]}
    info["fingerprint"] = hashlib.sha256(lines.encode()).hexdigest()
    (root / "dataset.json").write_text(json.dumps(info))


@pytest.fixture(scope="session")
def fast_python(tmp_path_factory) -> Path:
    """A file that shell scripts and other programs start in place of Python: its processes have torch already."""
    return write_python(tmp_path_factory.mktemp("bin") / "python")


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory) -> Path:
    """Three train shards with documents from 1 token to many packs, one validation shard. Tests must not change it."""
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="session")
def dataset(dataset_dir) -> ts.Dataset:
    return ts.Dataset.open(dataset_dir)


# ---- whole runs of train_small.py: used by test_runs.py and test_resume.py

# Wide enough for most parameters to be shared out over ranks; one table has an odd number of rows.
RUN = {**TINY, "width": 128, "head_dim": 32, "bigram_rows": 1501, "keep_checkpoints": 4}
EVERY = ("--save-every", "3", "--eval-every", "6", "--log-every", "1")


def flags(data, run_dir, *more, steps=12, **overrides) -> list[str]:
    where = ["--data", str(data), "--run-dir", str(run_dir)]
    return [*where, *sets({**RUN, **overrides}), "--steps", str(steps), *EVERY, *more]


def call(main, *argv) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 2
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        code = main([str(arg) for arg in argv])
    return code, out.getvalue(), err.getvalue()


def main(*argv) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of train_small.py."""
    return call(ts.main, *argv)


def stops(main, *argv) -> str:
    """The one sentence that a command ends with; argparse writes its usage before."""
    code, _, err = call(main, *argv)
    assert code == 2 or code == 1 and err.startswith("error: ") and err.count("\n") == 1, err
    return err.splitlines()[-1]


def sentence(action, *args, **options) -> str:
    """The sentence with which an action of data/ ends the script."""
    with pytest.raises(SystemExit) as end:
        action(*args, **options)
    message = end.value.code
    assert message.startswith("error: ") and "\n" not in message
    return message


def passes(*argv) -> str:
    """What train_small.py prints; it must end well."""
    code, out, err = main(*argv)
    assert code == 0, err
    return out


def refused(*argv) -> str:
    """The one sentence that train_small.py ends with, and exit code 1."""
    code, _, err = main(*argv)
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def saved(run_dir) -> list[int]:
    return [int(p.name[5:]) for p in ts.checkpoints(run_dir)]


def tensors(run_dir, step=12) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    return {f"{name}/{k}": v for name in ts.CHECKPOINT_FILES for k, v in load_file(folder / name).items()}


def snapshot(folder) -> dict:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


@pytest.fixture
def signal_handlers():
    """A run that ends early in this process must not keep pytest's Ctrl-C."""
    before = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def only_the_run():
    """Warm-up and report have tests of their own, and take longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ts, "report", lambda run, result: None)
        patch.setattr(ts, "warm_up", lambda state, say: None)
        yield


@pytest.fixture(scope="module")
def finished(dataset_dir, tmp_path_factory, only_the_run):
    """An undisturbed run of 12 steps; what it printed is in out.txt beside it. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    out = passes(*flags(dataset_dir, run_dir))
    run_dir.with_name("out.txt").write_text(out)
    return run_dir


@pytest.fixture(scope="module")
def halfway(dataset_dir, tmp_path_factory, only_the_run):
    """A run that was stopped after step 6 of 12, with checkpoints of steps 3 and 6. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "halfway"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 6)
        refused(*flags(dataset_dir, run_dir))
    return run_dir


def at_step(monkeypatch, step: int, action, script=ts) -> None:
    """Runs action(state) behind the given optimizer step."""
    original = script.train_step

    def train_step(state, batch):
        loss = original(state, batch)
        if state.step == step:
            action(state)
        return loss

    monkeypatch.setattr(script, "train_step", train_step)


def stop_at(monkeypatch, step: int, number=signal.SIGTERM, script=ts) -> None:
    at_step(monkeypatch, step, lambda state: os.kill(os.getpid(), number), script)


# ---- conversations


def chat(*texts) -> dict:
    """A conversation whose messages take turns."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}


def write_jsonl(path: Path, values) -> Path:
    raw = "".join(json.dumps(v) + "\n" for v in values).encode()
    path.write_bytes(gzip.compress(raw) if path.name.endswith(".gz") else raw)
    return path


def run_sft(data: Path, *args, code: int = 0, env=None) -> str:
    """Output and errors of data/sft.py; in this process (a new one takes a third of a second) unless env is given."""
    argv = [str(ROOT / "data/sft.py"), "--data", str(data), *map(str, args)]
    if env is not None:
        done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, env=env)
        found, out = done.returncode, done.stdout + done.stderr
    else:
        stream, found, message = io.StringIO(), 0, ""
        with contextlib.redirect_stdout(stream), mock.patch.object(sys, "argv", argv):
            try:
                sft.main()
            except SystemExit as end:
                found, message = 1, f"{end.code}\n"
        out = stream.getvalue() + message
    assert found == code and "Traceback" not in out, out
    return out


def read_split(data: Path, split: str) -> list[tuple[list[int], list[int]]]:
    """The conversations of a split in order, from shards and masks as they lie on the disk."""
    found = []
    dataset = ts.Dataset.open(data)
    for path in sorted((data / "sft").glob(f"{split}_*.bin")):
        if path.name.endswith(".mask.bin"):
            continue
        tokens, mask = dataset.read(path), dataset.read(path.with_name(path.stem + ".mask.bin"))  # headers checked
        assert len(tokens) == len(mask) and mask.max() <= 1 and tokens[0] == dataset.tokenizer.bos_id
        starts = [*np.flatnonzero(tokens == dataset.tokenizer.bos_id), len(tokens)]
        found += [(tokens[a:b].tolist(), mask[a:b].tolist()) for a, b in zip(starts, starts[1:], strict=False)]
    return found


# ---- packs


FIELDS = ("tokens", "targets", "positions", "ends")


def segments(batch: ts.Batch, row: int):
    """(inputs, targets) of each segment of a pack, by its ends alone."""
    start = 0
    for end in sorted({int(e) for e in batch.ends[row]}):
        yield batch.tokens[row, start:end].tolist(), batch.targets[row, start:end].tolist()
        start = end


# ---- exported runs


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> Path:
    """A tokenizer of 900 entries, trained on code that stays as it is: ids are the same with every Python."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    write_json(path, tokenizer.train(iter(frozen_code()), 900))
    return path


def frozen_code() -> list[str]:
    return (ROOT / "baselines/2026-11-25_p34-portable/train_small.py").read_text().split("\n\n\n")


def write_run(folder: Path, bpe: Path, chat: bool = False, model=None, config=None, **overrides) -> Path:
    """A run directory with a model of random weights, as pretraining or (chat) finetuning leaves it."""
    if config is None:
        config = tiny_config(**{"vocab_size": 900, "dtype": "float32", "data": "/home/me/secret", **overrides})
    model = model or random_model(config)
    folder.mkdir(parents=True)
    state = {"step": 7, "scores": {"val_bpb": 1.25}}
    script(config).write_checkpoint(folder, (model.state_dict(), {}), state)
    description = {"config": dataclasses.asdict(config), "command": "finetune" if chat else "pretrain", "flags": []}
    (folder / "config.json").write_text(json.dumps(description))
    scored = {"step": 7, "val_bpb": 1.25, "tokens": 4096, "scored": {"bytes": 54321}}
    entries = [{"step": 5, "loss": 2.0}, scored, {"step": 9, "val_bpb": 9.0}]
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    shutil.copy(script(config).__file__, folder)
    shutil.copy(bpe, folder / "tokenizer.json")
    return folder


SHAPE = dict(
    swiglu=True, rotary_full=True, rotary_base=10000.0, softcap=(), window_short=64, window_long=64, bigram_rows=0,
    value_embed_layers=(), key_offset_layers=(), no_attention_layers=(), long_layers=(), shared_input_from=99,
    mudd_width=0,
)  # fmt: skip


def portable_config(**overrides) -> ts.Config:
    return tiny_config(**{**SHAPE, **overrides})


VARIED = [
    "", " ", "a", "the rest\n\n of  it\t ", "l'été, naïve: 你好 😀\u200d👧 e\u0301", "1 12 123 1234 ٣٤ Ⅷ ½", "I'LL 'ſ",
    "def f(x):\r\n        return x  # ...\n", "\x00\x01\x1c\x85\u2028\u3000\ufeff", "aaaa" * 9, " " * 70 + "x",
    "-=" * 40, "<|bos|>", "x<|user_end|><|bos|> <|bo", "\U0010ffff\ud7ff",
]  # fmt: skip


def export_run(run_dir: Path, out: Path, *flags: str) -> str:
    """Exports a run as the command line does; returns the model card."""
    export.main([str(run_dir), "--out", str(out), *flags])
    return (out / "README.md").read_text(encoding="utf-8")


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    alphabets = ["  \t\n\r\x0b\u00a0\u2028'sSdtlLvVeErR12½.,ab", "aab ..--==\n", ["<|bos|>", "<|", "|>", "user", " "]]
    texts = []
    for i in range(count):
        if i % 2:
            texts.append("".join(rng.choices(alphabets[i // 2 % 3], k=rng.randint(1, 30))))
        else:
            pick = lambda: rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x1F000, 0x1FFFF)))  # noqa: E731
            texts.append("".join(chr(pick()) for _ in range(rng.randint(1, 12))))
    return texts
