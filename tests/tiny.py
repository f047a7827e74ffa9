"""Tiny configurations, models with random weights, documents in packs, and datasets.

`ts` is train_small, also in tests of what both scripts share; `script(config)` is the module of a Config. Tests reach
the packed interface through `pack`, `logits`, `loader_of` and `validation_of` below, so that a change of the interface
needs one change here. Nothing but torch, numpy and what the scripts import is needed.
"""

import base64
import contextlib
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import train_medium as tm
import train_small as ts

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
ALONE = ts.Ranks(0, 1, CPU)  # one process

# Two stages with batches of different size.
TINY = {
    "num_layers": 4, "width": 64, "head_dim": 16, "mlp_width": 128, "vocab_size": 300, "max_seq_len": 64,
    "no_attention_layers": (2,), "long_layers": (1, 3), "key_offset_layers": (1, 3), "value_embed_layers": (0, 3),
    "paired_layers": (0,), "exclusive_layers": (0, 1), "gated_layers": (1, 3),
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


SHAPE = dict(
    swiglu=True, rotary_full=True, rotary_base=10000.0, softcap=(), window_short=64, window_long=64, bigram_rows=0,
    value_embed_layers=(), key_offset_layers=(), no_attention_layers=(), long_layers=(), shared_input_from=99,
    mudd_width=0, paired_layers=(), exclusive_layers=(), gated_layers=(),
)  # fmt: skip


def tiny_config(**overrides) -> ts.Config:
    return ts.Config(**{**TINY, **overrides})


def tiny_medium(**overrides) -> tm.Config:
    return tm.Config(**{**TINY_MEDIUM, **overrides})


def portable_config(**overrides) -> ts.Config:
    return tiny_config(**{**SHAPE, **overrides})


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


def optimizer_of(model, config, table=None, ranks=None):
    module = script(config)
    ranks = ranks or module.Ranks(0, 1, next(model.parameters()).device)
    return module.Optimizer(model, config, ranks, table or module.parameter_table(config))


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


def frozen_code() -> list[str]:
    return (ROOT / "baselines/2026-11-25_p34-portable/train_small.py").read_text().split("\n\n\n")


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


FIELDS = ("tokens", "targets", "positions", "ends")


def segments(batch: ts.Batch, row: int):
    """(inputs, targets) of each segment of a pack, by its ends alone."""
    start = 0
    for end in sorted({int(e) for e in batch.ends[row]}):
        yield batch.tokens[row, start:end].tolist(), batch.targets[row, start:end].tolist()
        start = end


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
    info.pop("sha256", None)
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
    (root / "dataset.json").write_bytes(ts.seal(info))
