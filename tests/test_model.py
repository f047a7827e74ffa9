"""The model: documents in a pack do not see each other or the future, and every technique does what it should."""

import dataclasses
import sys

import pytest
import torch
import train_medium as tm
import train_small as ts
from hypothesis import given, settings
from hypothesis import strategies as st

import references
from tiny import logits, pack, random_documents, random_model, script, tiny_config, tiny_medium

ONE_STAGE = (1.0, 2, 1.0)
# Each technique: the config with it, the config without it. A new technique gets a line here, which adds it to the
# tests of packing, of the switch and, in test_generation.py, of decoding with a cache. First those of train_small.py.
TECHNIQUES = {
    "key_offset": ({}, {"key_offset_layers": ()}),
    "paired": ({"no_attention_layers": (), "paired_layers": (0, 2)}, {"no_attention_layers": (), "paired_layers": ()}),
    "exclusive": ({}, {"exclusive_layers": ()}),
    "gated": ({}, {"gated_layers": ()}),
    "value_embed": ({}, {"value_embed_layers": ()}),
    "bigram": ({"trigram_ratio": 0.0}, {"bigram_rows": 0}),
    "trigram": ({}, {"trigram_ratio": 0.0}),
    "shared_input": ({}, {"shared_input_from": 3}),
    "mix": ({}, {"mudd_width": 0}),
    "attention_everywhere": ({"no_attention_layers": ()}, {}),
    "long_layers": ({}, {"long_layers": ()}),
    "windows": ({}, {"window_short": 1, "window_long": 3}),
    "full_windows": ({"window_short": 64, "window_long": 64}, {}),
    "softcap": ({}, {"softcap": (15.0, 0.0, 15.0)}),
    "attention_scale": ({}, {"attention_scale": 0.3}),
    "rotary": ({}, {"rotary_base": 16.0}),
    "tied": ({}, {"tied": False}),
}
MEDIUM = {
    "key_offset": ({}, {"key_offset": False}),
    "value_embed": ({}, {"value_embeds": False}),
    "bigram": ({"bigram_rows": 500}, {}),
    "trigram": ({"bigram_rows": 500, "trigram_ratio": 2.5}, {"bigram_rows": 500}),
    "x0_injection": ({"bigram_rows": 500}, {"bigram_rows": 500, "x0_injection": False}),
    "mix": ({"mudd_width": 64}, {}),
    "long_layers": ({}, {"long_layers": (3,)}),
    "tied": ({"tied": True}, {}),
    "odd_layers": ({"num_layers": 3}, {}),
}


def config_of(overrides) -> ts.Config:
    return tiny_config(**{"stages": (ONE_STAGE,), "window_long": 16, **overrides})


def medium_of(overrides):
    return tiny_medium(**{"stages": (ONE_STAGE,), "window_long": 16, **overrides})


CONFIGS = {"default": config_of({}), "medium": medium_of({})}
for prefix, table, build in (("", TECHNIQUES, config_of), ("medium-", MEDIUM, medium_of)):
    for technique, pair in table.items():
        CONFIGS |= {f"{prefix}{technique}-{word}": build(c) for word, c in zip(("on", "off"), pair, strict=True) if c}
# But for those whose models have other weights.
SWITCHES = {name: [config_of(c) for c in pair] for name, pair in TECHNIQUES.items() if name != "tied"}
SWITCHES |= {f"medium-{name}": [medium_of(c) for c in pair] for name, pair in MEDIUM.items()
             if name not in ("tied", "odd_layers")}  # fmt: skip
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
both = pytest.mark.parametrize("config", [CONFIGS["default"], CONFIGS["medium"]], ids=("small", "medium"))


def dense_attention(windows, positions_T, cu_seqlens, max_doc):
    """Reference: all scores, a full mask, a softmax. Knows documents from their borders only."""

    cu, t = cu_seqlens.long(), torch.arange(len(positions_T))
    starts = cu[torch.bucketize(t, cu, right=True) - 1]

    def attend(q, k, v, index):
        return references.window_attention(q, k, v, torch.maximum(starts, t - windows[index])[None])

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
    for index in (0, 1):
        got, want = (
            make((window, 2 * window), positions, ends, max(lengths) + slack)(q, k, v, index)
            for make in (ts.sdpa_attention, dense_attention)
        )
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_paired_heads_by_their_definition():
    """Head h of token t sees, in a row, the keys of heads h and h + 2 of the tokens before: one softmax over both."""
    config = config_of({"no_attention_layers": (), "paired_layers": (0,), "window_short": 3, "exclusive_layers": (0,)})
    model = random_model(config)
    T, H, K = 11, config.num_heads, config.head_dim
    q, k, v = torch.randn(3, T, H, K, generator=torch.Generator().manual_seed(0))
    found = {}
    model.trunk = lambda tokens, previous, positions, attend, **_: found.update(y=attend(0, q, k, v)) or q.flatten(1)
    positions = torch.cat((torch.arange(7), torch.arange(4)))
    model(torch.arange(T), None, positions, torch.tensor([0, 7, 11]).int(), 64)
    for t in range(T):
        for h in range(H):
            half = int(h >= H // 2)
            row = 2 * t + half
            # The keys as rows of (token, half) that are not older than twice the window.
            seen = [(s, g) for s in range(t - int(positions[t]), t + 1) for g in (0, 1) if row - 6 <= 2 * s + g <= row]
            keys = torch.stack([k[s, h % (H // 2) + g * (H // 2)] for s, g in seen])
            values = torch.stack([v[s, h % (H // 2) + g * (H // 2)] for s, g in seen])
            by_hand = torch.softmax(keys @ q[t, h], 0) @ values
            torch.testing.assert_close(found["y"][t, h], by_hand)


def test_exclusion_takes_out_the_own_value():
    """At full strength nothing of the token's own value is left; at 0 nothing changes."""
    y, v = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ts.exclude_own_value(y, v, torch.zeros(3)), y)
    left = ts.exclude_own_value(y, v, torch.full((3,), 20.0))
    torch.testing.assert_close((left * v).sum(-1), torch.zeros(5, 3), atol=1e-5, rtol=0)


@every_config
def test_packed_documents_equal_one_at_a_time(config, monkeypatch):
    """Loss and gradient of every parameter: packed with the blocked attention, or each alone with the dense one.

    In float64, with the loss by its formula: random weights enlarge the rounding of fp32, which each CPU does its way.
    """
    monkeypatch.setattr(script(config), "linear_cross_entropy", references.linear_cross_entropy)
    documents = random_documents((6, 2, 65, 41, 18, 2))  # 128 inputs: several blocks
    model = random_model(config).double()
    loss, together = model(*pack(documents))
    (loss / len(together)).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.attention = dense_attention
    losses, alone = zip(*(model(*pack([d])) for d in documents), strict=True)
    (sum(losses) / len(together)).backward()
    alone = torch.cat(alone)
    torch.testing.assert_close(loss, sum(losses))
    torch.testing.assert_close(together, alone)
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_targets_of_training():
    """Two documents and padding by hand: nothing beyond the end of a document, no prefix where there is no target."""
    model = ts.GPT(tiny_config(mtp_weights=(1.0, 0.5, 0.25)))
    model.prefix_ids[5:9] = torch.tensor([1, -1, 2, 3], dtype=torch.int32)
    targets = torch.tensor([5, 6, 7, 8, 5, -1, -1], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1], dtype=torch.int32)
    by_hand = [[5, 6, 7, 8, 5, -1, -1], [6, 7, -1, 5, -1, -1, -1], [7, -1, -1, -1, -1, -1, -1],
               [1, -1, 2, 3, 1, -1, -1]]  # fmt: skip
    assert model.all_targets(targets, positions).tolist() == by_hand
    assert len(model.loss_weights) == len(by_hand)


def test_token_weights_scale_each_targets_loss():
    """Loss and gradients with weights are those of the weighted sum over targets, one by one; weight 0 is no target."""
    model = random_model(tiny_config(prefix_weight=0.0, mtp_weights=(1.0,)))
    inputs = pack(random_documents((9, 5, 12)))
    T = len(inputs[0])
    weights = torch.randn(T, generator=torch.Generator().manual_seed(3))
    weights[4] = 0.0
    z = model(inputs[0], None, *inputs[2:])
    expected = -(z.log_softmax(1)[torch.arange(T), inputs[1].long()] * weights).sum()
    expected.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    for silent in (False, True):  # an ignored target in place of weight 0
        model.zero_grad(set_to_none=True)
        targets = torch.where(weights == 0, -1, inputs[1]) if silent else inputs[1]
        loss, nats = model(inputs[0], targets, *inputs[2:], token_weight_T=weights)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        torch.testing.assert_close((nats * weights).sum(), loss.detach(), rtol=1e-4, atol=1e-4)
        for name, param in model.named_parameters():
            scale = grads[name].abs().max().item()
            torch.testing.assert_close(param.grad, grads[name], atol=2e-5 * scale, rtol=1e-3, msg=name)


def test_flops_by_hand():
    """6 for each weight that is multiplied; for each key seen 2 products of 2 operations each, backward twice more."""
    config = tiny_config()
    sizes = {name: p.numel() for name, p in ts.GPT(config).named_parameters()}
    weights = sum(sizes[name] for name in ("qk_bank", "vo_bank", "mlp_bank", "embed"))  # the table is the head
    seen = [sum(min(i, window) + 1 for i in range(40)) / 40 for window in (8, 24)]
    # Layer 0 is paired, so that half as wide a head sees the keys of two; 1 and 3 are long, 2 has no attention.
    by_hand = 6 * weights + 3 * 2 * 2 * 64 * (2 * seen[0] + 2 * seen[1])
    assert ts.flops_per_token(config, torch.arange(40)) == pytest.approx(by_hand, rel=1e-6)


@both
def test_prefix_loss(config):
    """In training the prefix of each target is a second one, with a weight; an ignored target has none."""
    config = dataclasses.replace(config, mtp_weights=(1.0,))
    model, documents = random_model(config), random_documents((30, 20))
    model.prefix_ids[:300] = torch.arange(300) // 2 - 1  # -1 for tokens 0 and 1
    tokens, targets, *rest = pack(documents)
    targets[3], targets[7], targets[8] = -1, 0, 1
    log_p = logits(model, *(d[:-1] for d in documents)).double().log_softmax(-1)
    expected = 0.0
    for row, target in zip(log_p, targets.tolist(), strict=True):
        expected -= row[target] if target >= 0 else 0.0
        expected -= 0.25 * row[target // 2 - 1] if target >= 2 else 0.0
    total, nats = model(tokens, targets, *rest)
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert nats.sum().item() < 0.9 * expected.item(), "what is logged is the next token's alone"


@both
def test_every_parameter_gets_a_gradient(config):
    """No weight is dead: what the model owns, it uses."""
    model = random_model(config)
    model(*pack(random_documents((60, 60))))[0].backward()
    for name, param in model.named_parameters():
        if name not in ("scalars", "embed", "value_embed", "bigram_embed", "trigram_embed"):
            parts = param.grad.flatten(1) if param.dim() > 1 else param.grad[None]
            assert (parts.abs().amax(1) > 0).all(), name
    for name, row in zip(ts.SCALARS, model.scalars.grad != 0, strict=True):
        used = [True] * 4
        if name in ("resid_attn", "scale_v", "scale_o"):
            used = [layer in config.attention_layers for layer in range(4)]
        if name == ("share_x0" if config is CONFIGS["default"] else "share_ngram"):  # which these models lack
            used = [False] * 4
        assert row.tolist() == used, name
    for name in {"embed", "value_embed", "bigram_embed", "trigram_embed"} & dict(model.named_parameters()).keys():
        assert (model.get_parameter(name).grad != 0).any(), name


@pytest.mark.parametrize("name", SWITCHES)
def test_technique_changes_the_output(name):
    """With the same weights, a technique that is switched off gives other logits: its switch is connected."""
    on, off = (random_model(config) for config in SWITCHES[name])
    transplant(on, off)
    document = random_documents((50,))[0]
    assert (logits(on, document) - logits(off, document)).abs().max() > 1e-2


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
    # Residual before attention and MLP; V, O, down; share of bigram; share of the input.
    by_hand = torch.tensor([1.1**0.5, 1.1**0.5, 0.5, 1.0, 1.0, 0.05, 0.0])[:, None].expand(7, 4)
    torch.testing.assert_close(a["scalars"], by_hand)


@pytest.mark.parametrize(
    ("config", "products"),
    # Of a layer 4 in the MLP and, in the medium model, 3 in o; 3 of the head; those of qkv need a GPU.
    [(tiny_config(mudd_width=0), 4 * 4 + 3), (tiny_medium(), 7 * 4 + 3)],  # random weights of mix enlarge every error
    ids=("small", "medium"),
)
def test_fp8_is_for_training(config, products, monkeypatch):
    """Not for validation; the gradients are within a quarter of the plain ones; its switches work."""
    module = script(config)
    references.fp8_on_cpu(monkeypatch, module)
    calls, product8, batch = [], module.product8, pack(random_documents((61, 41, 29)))
    monkeypatch.setattr(module, "product8", lambda *args, **options: calls.append(0) or product8(*args, **options))
    scores, gradients = [], []
    for fp8 in (False, True):
        model = random_model(dataclasses.replace(config, fp8=fp8, fp8_head=fp8))
        with torch.no_grad():
            scores.append(model(*batch)[1])
        assert not calls
        (model(*batch)[0] / 128).backward()
        assert len(calls) == fp8 * products
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.dim() > 1 and name != "scalars"})
    assert torch.equal(*scores)
    for name, plain in gradients[0].items():
        error = ((gradients[1][name] - plain).norm() / plain.norm()).item()
        assert 1e-3 < error < 0.25, f"{name}: {error}"


EVERYTHING = {"num_layers": 2, "bigram_rows": 500, "mudd_width": 64}


def test_a_gpu_without_triton_compiles_nothing(monkeypatch):
    """Validation and decoding on a GPU compile norm_rotate, but not on Windows, which has no Triton."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    calls = []
    monkeypatch.setattr(ts, "compile_once", lambda function: calls.append(function) or function)
    x, w, cos, sin = torch.randn(5, 8), torch.randn(3 * 8, 8), *torch.randn(2, 5, 1, 4)
    found = {}
    for name in ("triton", None):
        monkeypatch.setattr(ts, "triton", name)
        with torch.no_grad():
            found[name] = ts.project_qkv(x, w, cos, sin, torch.ones(()))
        assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(found["triton"], found[None], strict=True))


def test_a_model_too_large_for_a_machine_without_a_gpu(monkeypatch):
    """Weights, gradients and two moments against the memory of the machine, in pages."""
    model = random_model(tiny_config())
    size = sum(param.nbytes for param in model.parameters())
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 4 * size + 1}
    monkeypatch.setattr(ts.os, "sysconf", pages.get)
    ts.check_memory(model)
    pages["SC_PHYS_PAGES"] = 4 * size
    with pytest.raises(ts.UserError, match="without a GPU takes about 0 GiB, and this machine has 0 GiB; use a GPU"):
        ts.check_memory(model)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(mudd_width=8, fp8=False, fp8_head=False),
        tiny_config(mudd_width=8),
        tiny_medium(**EVERYTHING),
        tiny_medium(**EVERYTHING, recompute=True),
    ],
    ids=("small", "small fp8", "medium fp8", "medium fp8 recompute"),
)
def test_compiled_model(config, monkeypatch):
    """What torch.compile traces in one graph, gates as sums among it, has the loss and gradients of uncompiled code."""
    references.fp8_on_cpu(monkeypatch, script(config))
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = random_model(config)
        forward = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager") if compiled else model
        loss, nats = forward(*pack(random_documents((61, 41, 29))))
        (loss / 128).backward()
        results.append((loss, nats, *(p.grad for p in model.parameters())))
    tolerance = 3e-2 if config.fp8 else 1e-5  # fp8 may round the other way: 0.002 to 0.013 by weights and CPU
    for plain, traced in zip(*results, strict=True):
        assert (traced - plain).norm() <= tolerance * plain.norm() + 1e-7


@pytest.mark.parametrize(
    ("head_dim", "wanted", "gpu", "chosen"),
    [(16, "auto", True, ts.triton_attention), (24, "auto", True, ts.sdpa_attention),
     (8, "auto", True, ts.sdpa_attention), (16, "auto", False, ts.sdpa_attention),
     (16, "sdpa", True, ts.sdpa_attention), (16, "triton", False, None), (24, "triton", True, None)],
)  # fmt: skip
def test_attention_is_chosen_by_the_shape_and_the_gpu(head_dim, wanted, gpu, chosen, monkeypatch):
    """The kernel takes heads of a power of two; what is asked for and cannot run is refused."""
    monkeypatch.setattr(ts, "use_triton", lambda x: gpu)
    model = ts.GPT(tiny_config(width=48 * 4, head_dim=head_dim, attention=wanted))
    said = []
    if chosen is None:
        with pytest.raises(ts.UserError, match="--attention triton cannot run here"):
            ts.choose_attention(model)
    else:
        assert ts.choose_attention(model, said.append) is chosen
        assert said == [f"attention: {chosen.__name__.removesuffix('_attention')}"]


def test_flash_attention_3_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ts.UserError, match="--attention fa3 cannot be loaded .*; omit it"):
        ts.choose_attention(ts.GPT(tiny_config(attention="fa3")))


@pytest.mark.parametrize(
    ("config", "products"),
    [(ts.Config(), "head qkv MLP"), (tm.Config(num_layers=2), "head qkv o MLP"), (ts.Config(fp8=False), "head"),
     (ts.Config(fp8_head=False), "qkv MLP"), (ts.Config(head_dim=256), "head MLP"),
     (ts.Config(swiglu=True), "head qkv"), (ts.Config(mlp_width=3000), "head qkv"),
     (tm.Config(num_layers=2, recompute=True), "head"), (ts.Config(width=768 + 8, head_dim=8), "")],
)  # fmt: skip
def test_fp8_is_chosen_by_the_shape(config, products, monkeypatch):
    """Which products of training a Hopper runs in fp8; none without one."""
    small = dataclasses.replace(config, bigram_rows=0, vocab_size=300)
    model = script(config).GPT(small, device="meta")
    assert model.fp8_products == ()
    monkeypatch.setattr(script(config), "has_fp8_products", lambda x: True)
    assert script(config).GPT(small, device="meta").fp8_products == tuple(products.split())
