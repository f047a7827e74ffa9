"""The encoder: attention both ways inside documents, masking, loss, resuming, ranks, pairs, retrieval, export."""

import contextlib
import dataclasses
import io
import json
import math
import shutil
import sys

import encoder_model as em
import export
import finetune_encoder as ft
import numpy as np
import pairs as data_pairs
import pytest
import torch
import torch.nn.functional as F
import train_encoder as te
from lib.command import RunError
from safetensors.torch import load_file

from chats import write_jsonl
from commands import call, ran, stops
from commands import entries_without_clocks as entries
from processes import python
from tiny import ALONE, CPU, ts

TINY = {"num_layers": 2, "width": 32, "head_dim": 16, "mlp_width": 48, "max_seq_len": 48, "pack_tokens": 128,
        "max_docs_per_pack": 8, "packs": 2, "steps": 8, "val_tokens": 600, "log_every": 1}  # fmt: skip
SENTENCES = (
    "the stone is in the order", "then the rest and an outer hat", "seller of stone", "an hat is then in the",
    "order and rest", "the ten outer seller", "in the stone order the hat", "rest is the order of an",
)  # fmt: skip


def flags(**values) -> list:
    return [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), value)]


def tiny_flags(**changes) -> list:
    return flags(**{**TINY, **changes})


def random_encoder(seed: int = 0, **changes) -> em.Encoder:
    """Every weight is random: zero projections would hide mistakes."""
    model = em.Encoder(te.Config(**{**TINY, "vocab_size": 301, **changes}))
    model.init_weights(seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=rng) * 0.2)
    return model


def documents(*lengths, seed=0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, n, dtype=np.int32) for n in lengths]


def hidden_of(model, texts) -> torch.Tensor:
    return model.hidden(*ft.pack_texts(texts, CPU))


# ---- attention


def dense_attention(q, k, v, lengths) -> torch.Tensor:
    """Softmax over each document on its own, by the formula."""
    parts = []
    for queries, keys, values in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("qhk,thk->hqt", queries, keys) / math.sqrt(q.size(-1))
        parts.append(torch.einsum("hqt,thk->qhk", scores.softmax(-1), values))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", ((5,), (1, 9, 2, 9, 9), (3, 40, 1, 1, 17), (8, 8, 8)))
def test_attention_is_that_of_the_formula(lengths):
    """Also where T is no multiple of the longest document, and where max_doc is a loose bound."""
    T = sum(lengths)
    q, k, v = torch.randn(3, T, 2, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])
    expected = dense_attention(q, k, v, list(lengths))
    for max_doc in (max(lengths), max(lengths) + 3):
        found = em.sdpa_attention(positions, None, max_doc)(q, k, v)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
def test_varlen_attention_on_a_gpu():
    q, k, v = torch.randn(3, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, 100, 101, 300, 300], device="cuda", dtype=torch.int32)
    found = em.varlen_attention(None, ends, 256)(q, k, v)
    expected = dense_attention(*(x.float() for x in (q, k, v)), [100, 1, 199])
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def test_packed_equals_one_document_at_a_time():
    """Hidden states and the gradients of all weights."""
    model = random_encoder()
    texts = documents(7, 1, 30, 12, 48)
    weights = torch.randn(sum(map(len, texts)), TINY["width"], generator=torch.Generator().manual_seed(3))

    packed = hidden_of(model, texts)
    (packed * weights).sum().backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    alone = torch.cat([hidden_of(model, [text]) for text in texts])
    (alone * weights).sum().backward()

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    for name, param in model.named_parameters():
        scale = param.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], param.grad, atol=1e-5 * scale, rtol=1e-4, msg=name)


# ---- loss


def test_forward_counts_masked_tokens_only():
    """The sum of nats is that of the masked positions by plain torch; other positions have 0."""
    model = random_encoder()
    texts = documents(30, 34, seed=5)
    tokens, *rest = ft.pack_texts(texts, CPU)
    targets = torch.full((64,), -1, dtype=torch.int32)
    targets[[2, 31, 63]] = torch.tensor([7, 200, 4], dtype=torch.int32)
    total, nats = model(tokens, targets, *rest)
    logits = F.linear(hidden_of(model, texts), model.embed)
    expected = F.cross_entropy(logits[[2, 31, 63]], torch.tensor([7, 200, 4]), reduction="none")
    torch.testing.assert_close(nats[[2, 31, 63]], expected)
    torch.testing.assert_close(total, expected.sum())
    assert (nats != 0).sum() == 3


# ---- masking


@pytest.fixture(scope="module")
def setting(dataset):
    """(config, which tokens are text, a batch as it was read)"""
    config = te.Config(**{**TINY, "vocab_size": 301, "packs": 4})
    is_text = np.zeros(320, bool)
    is_text[:300] = dataset.tokenizer.token_bytes > 0
    loader = ts.PackLoader(ts.ShardReader(dataset, config), config, ALONE)
    batch = loader.next()
    loader.close()
    return config, is_text, batch


def test_masking_statistics(setting):
    """A fifth of the text of each pack, anywhere with the same probability, and never a special token."""
    config, is_text, batch = setting
    times = np.zeros(batch.tokens.shape)
    for step in range(300):
        masked = te.mask_tokens(batch, config, is_text, [0, step])
        chosen = masked.targets.numpy() >= 0
        times += chosen
        assert (masked.tokens.numpy()[chosen] == 300).all() and (masked.targets[chosen] == batch.tokens[chosen]).all()
        assert torch.equal(masked.tokens[~chosen], batch.tokens[~chosen])
        assert masked.total_targets == chosen.sum()
    text = is_text[batch.tokens.numpy()]
    assert not times[~text].any() and (~text).sum() > 4, "the batch should hold specials"
    for row in range(len(text)):
        count = text[row].sum()
        assert chosen[row].sum() == int(0.2 * count)
        rate = int(0.2 * count) / count
        spread = math.sqrt(300 * rate * (1 - rate))
        assert np.abs(times[row, text[row]] - 300 * rate).max() < 5 * spread


def test_masks_differ_by_step_and_seed(setting, dataset):
    config, is_text, batch = setting
    found = [te.mask_tokens(batch, config, is_text, seed).targets for seed in ([0, 1], [0, 2], [1, 1], [0, 1])]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[3])
    loader = te.MaskedPacks(ts.ShardReader(dataset, config), config, ALONE, is_text)
    whole = [loader.next() for _ in range(2)]
    loader.close()
    first, second = (batch.targets >= 0 for batch in whole)
    assert (first & second).sum() < first.sum() / 2, "each step has masks of its own"
    for rank in range(2):  # of two ranks, that resume after the first step
        reader = ts.ShardReader(dataset, config)
        reader.seek(whole[0].reader_state)
        loader = te.MaskedPacks(reader, config, ts.Ranks(rank, 2, CPU), is_text, first_step=1)
        part = loader.next()
        loader.close()
        assert torch.equal(part.tokens, whole[1].tokens[2 * rank : 2 * rank + 2])
        assert torch.equal(part.targets, whole[1].targets[2 * rank : 2 * rank + 2])


def test_flops_by_hand(setting):
    config, _, batch = setting
    positions = torch.tensor([[*range(3), *range(5)]])
    found = te.flops_per_token(config, positions)
    layer = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    assert found == pytest.approx(6 * (layer + 0.2 * 32 * 320) + 12 * 2 * 32 * (9 + 25) / 8)


# ---- pretraining


@pytest.fixture(scope="module")
def pretrained(dataset_dir, tmp_path_factory):
    """8 steps, with checkpoints of steps 4 and 8. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("encoder") / "run"
    ran(te.main, "--data", dataset_dir, "--run-dir", run_dir, *tiny_flags(save_every=4, eval_every=4))
    return run_dir


def test_run_directory(pretrained):
    """It is complete, the loss falls, and the last line of the log is the result."""
    names = {path.name for path in pretrained.iterdir()}
    assert {"train_small.py", "train_encoder.py", "tokenizer.json", "config.json"} <= names
    losses = [entry["loss"] for entry in entries(pretrained) if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(320), abs=0.1) and losses[-1] < losses[0] - 0.3
    result = json.loads((pretrained / "result.json").read_text())
    assert result["tokens"] == 8 * 256 and result["val_bpb"] == entries(pretrained)[-1]["val_bpb"]


def test_it_refuses_in_a_sentence(pretrained, dataset_dir, tmp_path):
    base = ("--data", dataset_dir, "--run-dir", tmp_path / "new")
    assert "multiple of an even --head-dim" in stops(te.main, *base, *tiny_flags(head_dim=15))
    assert "fit into a pack" in stops(te.main, *base, *tiny_flags(max_seq_len=200))
    assert "allow repeats" in stops(te.main, *base, *tiny_flags(steps=10**6))
    assert "--val-tokens is '0': input should be greater" in stops(te.main, *base, *tiny_flags(val_tokens=0))
    assert not (tmp_path / "new").exists()
    assert "already holds a run" in stops(te.main, "--data", dataset_dir, "--run-dir", pretrained, *tiny_flags())
    for others in ("--steps 9", f"--steps {te.Config.steps}", "--size small"):
        error = stops(te.main, "--resume", "--run-dir", pretrained, *others.split())
        assert f"error: unrecognized arguments: {others}; a resumed run keeps its settings" in error
    assert "arguments are required: --run-dir" in stops(te.main, "--resume")
    error = stops(ft.main, "--resume", "--run-dir", pretrained)
    assert "is a run of runs/encoder/train_encoder.py; continue it with" in error


# ---- pairs


BAD_PAIRS = (
    ("{", "is '{' (Invalid JSON"),
    ("[1]", "is [1] (Input should be an object)"),
    ('{"query": "a"}', "'positive' is {'query': 'a'} (Field required)"),
    ('{"query": "a", "positive": "b", "negative": ["c"]}', "'negative' is ['c'] (Extra inputs are not permitted)"),
    ('{"query": "a", "positive": "b", "negatives": "c"}', "'negatives' is 'c'"),
)


@pytest.mark.parametrize("line, message", BAD_PAIRS)
def test_bad_pairs_are_refused(tmp_path, line, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"query": "a", "positive": "b"}\n' + line + "\n")
    with pytest.raises(RunError, match="pairs.jsonl line 2") as error:
        ft.read_pairs(path, 1)
    assert message in str(error.value)


def test_pairs_are_read(tmp_path):
    rows = [{"query": "a", "positive": "b\u2028b", "negatives": ["c", "d"]}, {"query": "e", "positive": "c"}]
    data = ft.read_pairs(write_jsonl(tmp_path / "p.jsonl", rows), 1)
    assert data.texts == ["a", "b\u2028b", "c", "e"]
    assert data.pairs == [ft.Pair(0, 1, (2,)), ft.Pair(3, 2, ())]
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(RunError, match="holds no pairs"):
        ft.read_pairs(tmp_path / "empty.jsonl", 1)


def test_every_epoch_reads_every_pair_once():
    for epoch in range(2):
        steps = [ft.pairs_of_step(12, 4, 0, step) for step in range(3 * epoch, 3 * epoch + 3)]
        assert sorted(np.concatenate(steps)) == list(range(12))
    assert not np.array_equal(ft.pairs_of_step(12, 4, 0, 0), ft.pairs_of_step(12, 4, 0, 3))


def make(tmp_path, *argv) -> tuple[str, str]:
    """train.jsonl and val.jsonl by the command line of data/pairs.py."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", ["pairs.py", "--out", str(out), *map(str, argv)])
        data_pairs.main()
    return tuple((out / name).read_text(encoding="utf-8") for name in ("train.jsonl", "val.jsonl"))


def test_titles_become_queries(tmp_path):
    body = "one two three four five six seven eight nine ten"
    texts = [f"# The  hat\n\n{body}", f"A sentence that ends.\n{body} a", f"Stone\n{body} b c d", "Hat\nshort"]
    texts += [f"the hat\n{body} e", f"Order\n{body} f"]  # the first is a repeated query
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    val = write_jsonl(tmp_path / "b.jsonl", [{"text": f"Order\n{body} g"}])
    train, held_out = make(tmp_path, "--source", source, "--val-source", val, "--passage-words", 12)
    assert [json.loads(line) for line in train.splitlines()] == [
        {"query": "The hat", "positive": body},
        {"query": "Stone", "positive": f"{body} b c"},
    ]
    assert json.loads(held_out) == {"query": "Order", "positive": f"{body} g"}


def test_passages_do_not_overlap(tmp_path):
    texts = [
        " ".join(f"{letter}{i}" for i in range(n)) for letter, n in zip("abcdefgh", range(14, 94, 10), strict=True)
    ]
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in (*texts, "too short")])
    val = write_jsonl(tmp_path / "b.jsonl", [{"text": texts[3].replace("d", "z")}])
    argv = ("--source", source, "--val-source", val, "--kind", "passages", "--query-words", 6, "--passage-words", 20)
    train, held_out = make(tmp_path, *argv)
    assert (train, held_out) == make(tmp_path, *argv), "the same command writes the same bytes"
    for line, text in zip(train.splitlines(), texts, strict=True):
        query, positive = json.loads(line).values()
        assert query in text and positive in text and not set(query.split()) & set(positive.split())
        assert len(query.split()) == 6 and 8 <= len(positive.split()) <= 20


def test_a_failed_command_leaves_no_older_training_pairs(tmp_path):
    """They may hold what the new val.jsonl holds out. If nothing can be held out, both files stay."""
    text = "one two three four five six seven eight"
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": f"Title\n{text}"}])
    val = write_jsonl(tmp_path / "b.jsonl", [{"text": f"Other\n{text} nine"}])
    none = write_jsonl(tmp_path / "none.jsonl", [{"text": "short"}])
    before = make(tmp_path, "--source", source, "--val-source", val)
    files = [tmp_path / "out/train.jsonl", tmp_path / "out/val.jsonl"]
    with pytest.raises(SystemExit):
        make(tmp_path, "--source", val, "--val-source", none)
    assert tuple(file.read_text() for file in files) == before
    with pytest.raises(SystemExit):
        make(tmp_path, "--source", none, "--val-source", source)
    assert not files[0].exists() and files[1].read_text() == before[0]


# ---- retrieval


def test_ranking_scores_by_hand():
    task = ft.Retrieval({}, {10: {1}, 11: {7}, 12: {0, 1}})
    scores = np.zeros((3, 12))
    for row, first in zip(scores, ([3, 1, 2], [0, 1, 2], [2, 0, 1]), strict=True):
        row[first] = 3, 2, 1
    scores[1, 8:] = 1.0
    ideal = 1 + 1 / math.log2(3)
    ndcg = (1 / math.log2(3) + 0 + (1 / math.log2(3) + 1 / 2) / ideal) / 3
    assert ft.ranking_scores(task, scores) == pytest.approx({"ndcg@10": ndcg, "recall@10": 2 / 3})


def test_a_query_is_no_wrong_answer_to_itself(monkeypatch):
    """Each text asks for its twin, which a perfect model embeds alike; a query may also be its own answer."""
    pairs = [ft.Pair(0, 1, ()), ft.Pair(1, 0, ()), ft.Pair(2, 3, ()), ft.Pair(3, 2, ()), ft.Pair(4, 4, ())]
    embeddings = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float32)
    assert ft.info_nce_loss(embeddings, range(5), pairs, 0.01).item() == 0
    monkeypatch.setattr(ft, "embed_all", lambda state, sequences: embeddings)
    perfect = {"ndcg@10": 1.0, "recall@10": 1.0}
    data = ft.Pairs(["the hat", "hat the", "stone", "stone stone", "order"], pairs)
    assert ft.retrieval_scores(None, data) == perfect
    assert ft.bm25_scores(data) == {f"bm25_{name}": score for name, score in perfect.items()}


def test_bm25_by_hand():
    """Two documents of two and four words, k1 = 1.2, b = 0.75."""
    documents = ["the hat", "The stone, the order."]
    hat, the, unknown = ft.bm25(documents, ["hat?", "the", "nothing known"])
    idf = math.log(1 + 1.5 / 1.5)
    assert hat == pytest.approx([idf / (1 + 1.2 * (0.25 + 0.75 * 2 / 3)), 0])
    idf = math.log(1 + 0.5 / 2.5)
    both = [idf / (1 + 1.2 * (0.25 + 0.75 * 2 / 3)), idf * 2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 3))]
    assert the == pytest.approx(both)
    assert unknown == pytest.approx([0, 0])


# ---- InfoNCE


@pytest.mark.parametrize(("rows", "documents"), [
    # Each document once.
    ([(0, 1, (5,)), (2, 3, ()), (4, 1, (3,))], [(1, 5, 3), (1, 5, 3), (1, 5, 3)]),
    # Query 0 has two positives: neither is a wrong answer for the other.
    ([(0, 1, (4,)), (2, 3, (1,)), (0, 5, (1,))], [(1, 4, 3), (1, 4, 3, 5), (4, 3, 5)]),
])  # fmt: skip
def test_info_nce_loss_by_hand(rows, documents):
    """Each query against all positives and negatives of the batch, but for other positives of its own."""
    embeddings = F.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    embeddings.requires_grad_()
    expected = 0
    for (query, positive, _), compared in zip(rows, documents, strict=True):
        scores = {document: (embeddings[query] @ embeddings[document]).item() / 0.1 for document in compared}
        expected -= scores[positive] - math.log(sum(math.exp(score) for score in scores.values()))
    loss = ft.info_nce_loss(embeddings, range(6), [ft.Pair(*row) for row in rows], 0.1)
    assert loss.item() == pytest.approx(expected / 3, rel=1e-5)
    loss.backward()
    assert embeddings.grad.isfinite().all()


@pytest.fixture(scope="module")
def some_pairs(tmp_path_factory):
    """A file of pairs of which some share texts."""
    following = (*SENTENCES[1:], SENTENCES[0])
    others = (*SENTENCES[2:], *SENTENCES[:2])
    rows = []
    for query, text, other in zip(SENTENCES, following, others, strict=True):
        rows.append({"query": query, "positive": f"{text} {query[:9]}", "negatives": [other]})
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows)


@pytest.mark.parametrize("most", (10**6, 40, 1))
def test_a_step_in_micro_batches_is_one_step(pretrained, some_pairs, monkeypatch, most):
    """Gradients are those of autograd through all texts at once, for any size of micro-batches."""
    model, _, _ = em.load_encoder(pretrained)
    config = dataclasses.replace(model.config, micro_batch_tokens=most)
    state = em.build_state(config, ALONE)
    state.model.load_state_dict(model.state_dict())
    data = ft.read_pairs(some_pairs, 1)
    data.tokenize(ts.Tokenizer(pretrained / "tokenizer.json"), 16)
    grads = {}
    taken = lambda *args: grads.update({name: p.grad.clone() for name, p in state.model.named_parameters()})
    monkeypatch.setattr(state.optimizer, "step", taken)
    pairs = [data.pairs[i] for i in (0, 2, 3, 7)]
    loss = ft.grad_cache_step(state, data, pairs, 0.1)

    embeddings = model.embed_texts(*ft.pack_texts(data.sequences, CPU))
    expected = ft.info_nce_loss(embeddings, range(len(embeddings)), pairs, 0.1)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, param in model.named_parameters():
        scale = param.grad.abs().max().item()
        torch.testing.assert_close(grads[name], param.grad, atol=1e-4 * scale, rtol=1e-3, msg=name)


def ft_flags(pairs, run_dir, **changes) -> list:
    values = {"steps": 8, "batch": 4, "max_len": 24, "save_every": 4, "eval_every": 4, "log_every": 1, "muon_lr": 0.01}
    return flags(pairs=pairs, val_pairs=pairs, run_dir=run_dir, **{**values, **changes})


@pytest.fixture(scope="module")
def finetuned(pretrained, some_pairs, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("finetuned") / "run"
    ran(ft.main, pretrained, *ft_flags(some_pairs, run_dir))
    return run_dir


def test_finetuning(finetuned, pretrained, some_pairs):
    """The loss falls, retrieval is scored before and after beside BM25, and --score-only finds the same."""
    losses = [entry["loss"] for entry in entries(finetuned) if "loss" in entry]
    assert len(losses) == 8 and np.mean(losses[4:]) < np.mean(losses[:4])
    scored = [entry for entry in entries(finetuned) if "ndcg@10" in entry]
    assert [entry["step"] for entry in scored] == [0, 4, 8] and 0 < scored[0]["bm25_ndcg@10"] <= 1
    again = ran(ft.main, finetuned, "--val-pairs", some_pairs, "--score-only")
    assert again["ndcg@10"] == scored[-1]["ndcg@10"] and again["bm25_ndcg@10"] == scored[-1]["bm25_ndcg@10"]
    assert again["queries"] == 8 and again["step"] == 8
    assert (finetuned / "finetune_encoder.py").is_file()


def test_finetuning_resumes_bit_for_bit(finetuned, tmp_path):
    copy = shutil.copytree(finetuned, tmp_path / "run", ignore=shutil.ignore_patterns("step_000008"))
    ran(ft.main, "--resume", "--run-dir", copy)
    assert entries(copy) == entries(finetuned)
    for name in ("model", "optimizer"):
        path = f"checkpoints/step_000008/{name}.safetensors"
        a, b = load_file(copy / path), load_file(finetuned / path)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_two_ranks_finetune_like_one(finetuned, pretrained, some_pairs, tmp_path):
    done = python("runs/encoder/finetune_encoder.py", pretrained, *ft_flags(some_pairs, tmp_path / "two"), ranks=2)
    assert done.returncode == 0, done.stderr
    for one, other in zip(entries(tmp_path / "two"), entries(finetuned), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-4, abs=1e-6), key


def test_finetuning_refuses_in_a_sentence(pretrained, finetuned, some_pairs, tmp_path):
    new = tmp_path / "new"
    assert "arguments are required: RUN" in stops(ft.main, *ft_flags(some_pairs, new))
    assert "--batch is 'x': input" in stops(ft.main, pretrained, *ft_flags(some_pairs, new, batch="x"))
    assert "lower --batch" in stops(ft.main, pretrained, *ft_flags(some_pairs, new, batch=9))
    assert "cannot read" in stops(ft.main, pretrained, *ft_flags(tmp_path / "gone.jsonl", new))
    assert "--pairs is missing" in stops(ft.main, pretrained, "--run-dir", new)
    assert "--val-pairs is missing" in stops(ft.main, pretrained, "--score-only")
    assert not new.exists()
    copy = shutil.copytree(finetuned, tmp_path / "edited")
    (copy / "train_small.py").write_text("another one")
    assert "started with a different train_small.py" in stops(ft.main, "--resume", "--run-dir", copy)
    for others in (pretrained, "--steps 1000", "--batch 256", "--temperature 0.05"):
        error = stops(ft.main, "--resume", "--run-dir", finetuned, *str(others).split())
        assert f"error: unrecognized arguments: {others}; a resumed run keeps its settings" in error


# ---- export


@pytest.fixture(scope="module")
def exported(finetuned, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "model"
    code, said, _ = call(export.main, finetuned, "--out", out)
    assert code == 0 and said.startswith(f"wrote {out}: step 8, ")
    assert "not an empty folder" in stops(export.main, finetuned, "--out", out)
    assert "is an encoder, which --gguf cannot export" in stops(export.main, finetuned, "--gguf", out)
    return out


def embedded(run_dir) -> tuple[list[str], torch.Tensor]:
    """Texts, one of them too long, and their embeddings by the run."""
    model, description, _ = em.load_encoder(run_dir)
    data = ft.Pairs([*SENTENCES[:3], "é ü € naïve 你好 12 ...", "the stone " * 40], [])
    data.tokenize(ts.Tokenizer(run_dir / "tokenizer.json"), em.max_text_len(description))
    with torch.no_grad():
        return data.texts, model.embed_texts(*ft.pack_texts(data.sequences, CPU))


def test_export_in_transformers(exported, finetuned):
    """Embeddings of a padded batch and logits of a masked text, to 1e-5."""
    transformers = pytest.importorskip("transformers")
    texts, expected = embedded(finetuned)
    own = ts.Tokenizer(finetuned / "tokenizer.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=24, return_tensors="pt")
    for row, mask, text in zip(batch["input_ids"], batch["attention_mask"], texts, strict=True):
        assert row[mask.bool()].tolist() == [own.bos_id, *own.encode(text)][:24]
    mask = batch["attention_mask"][..., None]
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(exported)(**batch).last_hidden_state
    found = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    masked = tokenizer("the <|mask|> is in the order", return_tensors="pt")["input_ids"]
    assert (masked == tokenizer.mask_token_id).sum() == 1 and tokenizer.mask_token_id == 300
    with torch.no_grad():
        logits = transformers.AutoModelForMaskedLM.from_pretrained(exported)(masked).logits[0]
        model, *_ = em.load_encoder(finetuned)
        expected = F.linear(hidden_of(model, [masked[0].int().numpy()]), model.embed)[:, :301]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_export_for_sentence_transformers(exported, finetuned):
    """The files that it reads, and its embeddings where it is installed."""
    modules = json.loads((exported / "modules.json").read_text())
    assert [module["type"].split(".")[-1] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    assert all((exported / module["path"]).is_dir() for module in modules)
    pooling = json.loads((exported / "1_Pooling/config.json").read_text())
    assert pooling == {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    assert json.loads((exported / "sentence_bert_config.json").read_text())["max_seq_length"] == 24
    package = pytest.importorskip("sentence_transformers")
    model = package.SentenceTransformer(str(exported), device="cpu")
    texts, expected = embedded(finetuned)
    for found in (model.encode(texts), np.stack([model.encode(text) for text in texts])):
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)
