"""The recipe of runs/portable.args: its kernels against plain formulas, its exports against ours."""

import sys

import pytest
import torch
import train_small as ts

import references
from tiny import ROOT, portable_config

sys.path.insert(0, str(ROOT / "records"))
import entry
import tracks


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
def test_loss_without_a_softcap(kernel, monkeypatch):
    """Against the formula and autograd: two targets with weights, some ignored, weights of tokens."""
    torch.manual_seed(0)
    monkeypatch.setattr(ts, "use_triton", lambda x: kernel)
    x = torch.randn(9, 32).requires_grad_()
    w = torch.randn(100, 32).requires_grad_()
    targets = torch.randint(100, (2, 9))
    targets[0, 3] = targets[1, 5] = -1
    targets[:, 2] = 7
    weights = torch.tensor([1.0, 0.5])
    rows = torch.rand(9)
    total, nats = ts.linear_cross_entropy(x, w, targets, None, weights, rows, chunk=4)
    got = torch.autograd.grad(total, (x, w))

    want_total, want_nats = references.linear_cross_entropy(x, w, targets, None, weights, rows)
    want = (want_total, want_nats, *torch.autograd.grad(want_total, (x, w)))
    for a, b in zip((total, nats, *got), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_only_qkv_is_in_fp8(monkeypatch):
    """What the trunk hands to fp8 products: SwiGLU has none."""
    references.fp8_on_cpu(monkeypatch, ts)
    model = ts.GPT(portable_config(head_dim=32))
    assert model.fp8_products == ("head", "qkv")
    for w in model.layer_weights(model.fp8_products):
        assert isinstance(w.qkv8, ts.Weight8) and w.o8 is w.up8 is w.down8 is None


def test_a_track_may_ask_for_a_shape():
    """Entries of another shape are not on it, whatever their dataset, script and card."""
    found = tracks.read()
    record = entry.read_record(ROOT / "baselines" / "2026-11-25_p34-portable")
    assert [name for name in tracks.tracks_of(record, found) if "portable" in name]
    record["config"]["softcap"] = [23.0, 5.0, 7.5]
    assert not [name for name in tracks.tracks_of(record, found) if "portable" in name]
