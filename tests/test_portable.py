"""The recipe of runs/portable.args: its kernels against plain formulas, its exports against ours."""

import sys

import pytest
import torch
import train_small as ts

import references
from conftest import ROOT, tiny_config

sys.path.insert(0, str(ROOT / "records"))
import record as rec
import tracks

SHAPE = dict(
    swiglu=True, rotary_full=True, rotary_base=10000.0, softcap=(), window_short=64, window_long=64, bigram_rows=0,
    value_embed_layers=(), key_offset_layers=(), no_attention_layers=(), long_layers=(), shared_input_from=99,
    backout_layer=-1, mix_width=0,
)  # fmt: skip


def portable_config(**overrides) -> ts.Config:
    return tiny_config(**{**SHAPE, **overrides})


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
def test_loss_without_a_softcap(kernel, monkeypatch):
    """Against the formula and autograd: two targets with weights, some ignored, weights of tokens."""
    torch.manual_seed(0)
    monkeypatch.setattr(ts, "use_triton", lambda x, least=(8, 0): kernel and least <= (9, 0))
    x = torch.randn(9, 32).requires_grad_()
    w = torch.randn(100, 32).requires_grad_()
    targets = torch.randint(100, (2, 9))
    targets[0, 3] = targets[1, 5] = -1
    targets[:, 2] = 7
    weights = torch.tensor([1.0, 0.5])
    rows = torch.rand(9)
    total, nats = ts.linear_cross_entropy(x, w, targets, (), weights, rows, chunk=4)
    got = torch.autograd.grad(total, (x, w))

    want_total, want_nats = references.linear_cross_entropy(x, w, targets, (), weights, rows)
    want = (want_total, want_nats, *torch.autograd.grad(want_total, (x, w)))
    for a, b in zip((total, nats, *got), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_norm_rotate_kernel_turns_all_of_a_head(monkeypatch):
    """The kernel in Triton's interpreter against norm_rotate_ref, forward and backward."""
    model = ts.GPT(portable_config(head_dim=32, width=64))
    cos, sin = (table[:20][:, None] for table in model.rotary)
    qkv = torch.randn(20, 3, 2, 32).requires_grad_()
    scale = torch.tensor(0.3)
    grads = [torch.randn(20, 2, 32) for _ in "qkv"]
    results = []
    for kernel in (False, True):
        monkeypatch.setattr(ts, "use_triton", lambda x, least=(8, 0), on=kernel: on)
        out = ts.norm_rotate(qkv, cos, sin, scale)
        results.append((*out, *torch.autograd.grad(out, qkv, grads)))
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


def test_swiglu_in_fp8(monkeypatch):
    """Outputs and gradients within what four and three bits of each factor give."""
    torch.manual_seed(0)
    references.fp8_on_cpu(monkeypatch, ts)
    x = ts.norm(torch.randn(64, 32)).bfloat16().requires_grad_()
    up = (torch.randn(2 * 96, 32) / 6).bfloat16().requires_grad_()
    down = (torch.randn(96, 32) / 10).bfloat16().requires_grad_()
    g = torch.randn(64, 32).bfloat16()
    exact = [t.detach().double().requires_grad_() for t in (x, up, down)]
    want_y = ts.mlp_swiglu(*exact)
    want = (want_y, *torch.autograd.grad(want_y, exact, g.double()))

    (up8,), (down8,) = (ts.to_weights8(w.detach()[None]) for w in (up, down))
    y = ts.mlp_swiglu(x, up, down, up8, down8)
    got = (y, *torch.autograd.grad(y, (x, up, down), g))
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).norm() / b.norm()) < 0.11


def test_a_track_may_ask_for_a_shape():
    """Entries of another shape are not on it, whatever their dataset, script and card."""
    found = tracks.read()
    record = rec.read_record(ROOT / "baselines" / "2026-11-25_p34-portable")
    assert [name for name in tracks.tracks_of(record, found) if "portable" in name]
    record["config"]["softcap"] = [23.0, 5.0, 7.5]
    assert not [name for name in tracks.tracks_of(record, found) if "portable" in name]
