"""The model: documents in a pack do not see each other or the future, and decoding with a cache is the same model."""

from types import SimpleNamespace

import pytest
import torch
from conftest import logits, pack, random_documents, random_model, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

import train_small as ts

ONE_STAGE = (1.0, 2, 8, 16, 64, 1.0)
# Each technique: the config with it, the config without it. A new technique gets a line here, and with that its tests
# for packing, for decoding with a cache and for its switch.
TECHNIQUES = {
    "key_offset": ({}, {"key_offset_layers": ()}),
    "value_embed": ({}, {"value_embed_layers": ()}),
    "bigram": ({}, {"bigram_rows": 0}),
    "smear": ({}, {"smear": False}),
    "x0_injection": ({}, {"x0_injection": False}),
    "skip": ({}, {"skip_from": -1, "skip_to": -1}),
    "backout": ({}, {"backout_layer": -1}),
    "attention_everywhere": ({"no_attention_layers": ()}, {}),
    "long_layers": ({}, {"long_layers": ()}),
    "windows": ({}, {"stages": ((1.0, 2, 1, 3, 64, 1.0),)}),
    "full_windows": ({"stages": ((1.0, 2, 64, 64, 64, 1.0),)}, {}),
    "softcap": ({}, {"softcap": (15.0, 0.0, 15.0)}),
    "attention_scale": ({}, {"attention_scale": 0.3}),
    "rotary": ({}, {"rotary_base": 16.0}),
}
CONFIGS = {"default": {}} | {
    f"{name}-{word}": c for name, pair in TECHNIQUES.items() for word, c in zip(("on", "off"), pair, strict=True) if c
}


def config_of(overrides) -> ts.Config:
    return tiny_config(**{"stages": (ONE_STAGE,), **overrides})


def dense_attention(model, positions_T, cu_seqlens, max_doc):
    """Reference: all scores, a full mask, a softmax. Knows documents from their borders only."""

    def attend(q, k, v, long):
        T = q.size(0)
        document = torch.bucketize(torch.arange(T), cu_seqlens.long(), right=True)
        i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
        seen = (document[:, None] == document[None, :]) & (j <= i) & (i - j <= model.windows[long])
        scores = torch.einsum("ihk,jhk->hij", q, k)
        return torch.einsum("hij,jhk->ihk", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    return attend


def transplant(source: ts.GPT, target: ts.GPT) -> None:
    """Copies all weights that both models have; attention banks layer by layer."""
    ours, theirs = source.config.attention_layers, target.config.attention_layers
    with torch.no_grad():
        for name, param in target.named_parameters():
            weights = source.get_parameter(name)
            if name in ("qk_bank", "vo_bank"):
                per_layer = weights.view(len(ours), -1, *weights.shape[1:])
                weights = torch.cat([per_layer[ours.index(layer)] for layer in theirs]).view(param.shape)
            param.copy_(weights)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 64), st.integers(0, 30))
def test_blocked_attention_is_dense_attention(lengths, window, slack):
    """sdpa_attention's blocks give what a full mask gives, whatever the documents, the window and the length."""
    T, rng = sum(lengths), torch.Generator().manual_seed(window)
    q, k, v = torch.randn(3, T, 2, 8, generator=rng)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ends = torch.tensor([0, *lengths, 0, 0]).cumsum(0).int()
    model = SimpleNamespace(windows=(window, 2 * window))
    for long in (0, 1):
        got, want = (
            make(model, positions, ends, max(lengths) + slack)(q, k, v, long)
            for make in (ts.sdpa_attention, dense_attention)
        )
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS)
def test_packed_documents_equal_one_at_a_time(overrides):
    """Loss and gradient of every parameter: packed with the blocked attention, or each alone with the dense one."""
    documents = random_documents((6, 2, 65, 41, 18, 2))  # 128 inputs: several blocks
    model = random_model(config_of(overrides))
    loss, together = model(*pack(documents))
    (loss / len(together)).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.attention = dense_attention
    losses, alone = zip(*(model(*pack([d])) for d in documents), strict=True)
    (sum(losses) / len(together)).backward()
    alone = torch.cat(alone)
    torch.testing.assert_close(loss, together.sum(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_loss_is_the_cross_entropy_of_the_capped_logits():
    """Nats come from -log softmax of 23 sigmoid((z + 5) / 7.5), and an ignored target costs nothing."""
    model, documents = random_model(config_of({})), random_documents((30, 20))
    tokens, targets, *rest = pack(documents)
    targets[3] = -1
    capped = logits(model, *(d[:-1] for d in documents)).double()
    assert capped.max() < 23 and capped.min() > 0
    expected = -capped.log_softmax(-1).gather(1, targets.long().clamp(min=0)[:, None])[:, 0]
    expected[3] = 0
    _, nats = model(tokens, targets, *rest)
    assert nats.dtype == torch.float32
    torch.testing.assert_close(nats.double(), expected, atol=1e-5, rtol=1e-5)
    z = torch.tensor([-9.0, 0.0, 4.0])
    by_hand = torch.tensor([23 / (1 + 2.718281828 ** (-(x + 5) / 7.5)) for x in z])
    torch.testing.assert_close(ts.softcap(z, (23.0, 5.0, 7.5)), by_hand)


def test_no_leak_between_documents():
    """Another text in the middle document leaves the losses of its neighbours as they were."""
    model, (a, b, c) = random_model(config_of({})), random_documents((20, 31, 40))
    other = random_documents((31,), seed=5)[0]
    before, after = (model(*pack([a, middle, c]))[1] for middle in (b, other))
    same = torch.ones(len(before), dtype=torch.bool)
    same[19:49] = False  # the middle document's own
    assert (before - after)[same].abs().max() < 1e-6
    assert (before - after)[~same].abs().min() > 0


@pytest.mark.parametrize("border", (1, 2, 9, 30))
def test_no_leak_from_the_future(border):
    """Logits before a token do not change with that token or later ones."""
    model, (a, b) = random_model(config_of({})), random_documents((40, 40))
    before, after = logits(model, a), logits(model, a[:border] + b[border:])
    assert (before - after)[:border].abs().max() < 1e-6
    assert (before - after)[border:].abs().max() > 1e-3


def test_every_parameter_gets_a_gradient():
    """No weight is dead: what the model owns, it uses."""
    model = random_model(config_of({}))
    model(*pack(random_documents((60, 60))))[0].backward()
    for name, param in model.named_parameters():
        if name not in ("scalars", "embed", "value_embed", "bigram_embed"):
            parts = param.grad.flatten(1) if param.dim() > 1 else param.grad[None]
            assert (parts.abs().amax(1) > 0).all(), name
    with_attention = [True, True, False, True]  # layer 2 has none, the last row holds three whole-model scalars
    rows = [with_attention, [True] * 4, with_attention, with_attention, [True] * 4, [True] * 4, [True] * 4]
    assert (model.scalars.grad != 0).tolist() == [*rows, [True, True, True, False]]
    for name in ("embed", "value_embed", "bigram_embed"):
        assert (model.get_parameter(name).grad != 0).any(), name


@pytest.mark.parametrize("name", TECHNIQUES)
def test_technique_changes_the_output(name):
    """With the same weights, a technique that is switched off gives other logits: its switch is connected."""
    on, off = (random_model(config_of(overrides)) for overrides in TECHNIQUES[name])
    transplant(on, off)
    document = random_documents((50,))[0]
    assert (logits(on, document) - logits(off, document)).abs().max() > 1e-2


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS)
def test_cached_decoding_equals_full_forward(overrides):
    """Prefill in one or several ragged chunks, then token by token beyond the windows: the full forward's logits."""
    model = random_model(config_of(overrides))
    rows = random_documents((64, 58, 61))
    full = [logits(model, row) for row in rows]
    for prefill in ([(5, 40, 23)], [(1, 17, 2), (3, 1, 20), (1, 22, 1)], [(2, 1, 3)]):
        done, cache = [0, 0, 0], ts.KVCache.empty(model, 3, 64)
        one_by_one = [(1, 1, 1)] * (18 if len(prefill) < 3 else 6)
        for counts in (*prefill, *one_by_one):
            parts = [row[d : d + n] for row, d, n in zip(rows, done, counts, strict=True)]
            padded = torch.tensor([part + [7] * (max(counts) - len(part)) for part in parts])
            with torch.no_grad():
                cached = model.extend(cache, padded, torch.tensor(counts))
            done = [d + n for d, n in zip(done, counts, strict=True)]
            for row in range(3):
                error = (cached[row] - full[row][done[row] - 1]).abs().max()
                assert error < 1e-4, f"row {row} after {done[row]} tokens: {error}"


def test_bigram_rows_and_signs():
    """Which rows of the table and of the signs a text reads, by hand; the last row stands for the first token."""
    model, (document,) = random_model(config_of({})), random_documents((30,))
    pairs = list(zip(document[:-2], document[1:-1], strict=True))  # (previous, token) of every input but the first
    model(*pack([document]))[0].backward()
    touched = model.bigram_embed.grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert touched == sorted({((36313 * t) ^ (27191 * p)) % 499 for p, t in pairs} | {499})
    assert set(model.bigram_signs.unique().tolist()) == {-1.0, 1.0}
    before, read = logits(model, document[:-1]), sorted({(t ^ p) % 8192 for p, t in pairs} | {0})
    signs = torch.zeros_like(model.bigram_signs)
    signs[read] = model.bigram_signs[read]
    model.bigram_signs.copy_(signs)  # the others may be anything
    assert torch.equal(logits(model, document[:-1]), before)
    for row in read:
        model.bigram_signs[row] *= -1
        assert not torch.equal(logits(model, document[:-1]), before)
        model.bigram_signs[row] *= -1


def test_cache_reaches_the_end_of_the_context():
    """The last position of the context decodes like the others."""
    model, (row,) = random_model(config_of({})), random_documents((64,))
    cache = ts.KVCache.empty(model, 1, 64)
    with torch.no_grad():
        model.extend(cache, torch.tensor([row[:63]]))
        last = model.extend(cache, torch.tensor([row[63:]]))
    torch.testing.assert_close(last, logits(model, row)[-1:], atol=1e-4, rtol=0)


def test_initial_weights():
    """Zero MLP outputs at the start, the same weights for the same seed, others for another."""
    models = [ts.GPT(tiny_config()) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        model.init_weights(seed)
    a, b, c = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embed"], c["embed"])
    assert a["mlp_bank"][1::2].abs().max() == 0 and all(p.isfinite().all() for p in a.values())
    assert abs(a["vo_bank"].std() * 64**0.5 - 0.5) < 0.02 and a["vo_bank"].abs().max() < 0.5 * (3 / 64) ** 0.5 + 1e-6
