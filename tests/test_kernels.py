"""Kernels against their plain references: odd shapes in Triton's interpreter, real sizes with `-m gpu`."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import train_small as K

import references

PATH = Path(K.__file__)
CAP = (23.0, 5.0, 7.5)
COMPILED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
GPU = [pytest.param("cpu", id="interpreter", marks=COMPILED), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", GPU)


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch, request):
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        monkeypatch.setattr(K, "use_triton", lambda x: x.dtype != torch.float64)
        monkeypatch.setattr(K, "product8", references.product8)
    torch.manual_seed(0)


def needs_hopper(device) -> None:
    if device == "cuda" and not (9, 0) <= torch.cuda.get_device_capability() < (12, 0):
        pytest.skip("needs the shared memory of a Hopper or a B200")


def close(got, want, tol):
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all()
    error = ((got - want).norm() / want.norm().clamp(min=1e-12)).item()
    assert error < tol, f"relative error {error:.2e} above {tol}"


CASES = {  # T, V, weights, row weights, chunk, ignored
    "plain": (7, 192, [1.0], False, 16, "some"),
    "chunked": (21, 64, [1.0], True, 8, "some"),
    "three": (13, 320, [1.0, 0.5, 0.25], False, 5, "some"),
    "four": (9, 128, [1.0, 0.0, 0.25, 0.25], True, 4, "some"),
    "zero": (5, 64, [0.0, 0.0], False, 8, "none"),
    "ignored": (6, 64, [1.0, 0.5, 0.3], False, 8, "all"),
    "one": (1, 64, [1.0, 0.5], False, 8, "none"),
    "no softcap": (9, 128, [1.0, 0.5], True, 4, "some"),  # as in runs/portable.args
}


def ce_inputs(case, device, dtype, T=None, V=None, D=32):
    t, v, weights, token_weight, chunk, ignored = CASES[case]
    T, V, D = T or t, V or v, D
    x = torch.randn(T, D, device=device).to(dtype).requires_grad_()
    w = (torch.randn(V, D, device=device) * 3 / D**0.5).to(dtype).requires_grad_()
    shape = (len(weights), T)
    targets = torch.randint(V, shape, device=device, dtype=torch.int32 if case == "four" else torch.int64)
    targets[torch.rand(shape, device=device) < {"some": 0.3, "none": 0.0, "all": 2.0}[ignored]] = -1
    if T > 3 and ignored == "some":
        targets[:, 2] = 5  # several terms of one row share a column
    rows = torch.rand(T, device=device) if token_weight else None
    return x, w, targets, torch.tensor(weights, device=device), rows, chunk


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("case", CASES)
def test_linear_cross_entropy_fp32(case, kernel, monkeypatch):
    if torch.cuda.is_available() and kernel:
        pytest.skip("compiled kernels are tested in 16 bits")
    monkeypatch.setattr(K, "use_triton", lambda x: kernel)
    x, w, targets, weights, rows, chunk = ce_inputs(case, "cpu", torch.float32)
    cap = () if case == "no softcap" else CAP
    total, nats = K.linear_cross_entropy(x, w, targets, cap, weights, rows, chunk=chunk)
    got = torch.autograd.grad(total * 0.7, (x, w))
    want_total, want_nats = references.linear_cross_entropy(x, w, targets, cap, weights, rows)
    want = torch.autograd.grad(want_total * 0.7, (x, w))
    for a, b in zip((total, nats, *got), (want_total, want_nats, *want), strict=False):
        torch.testing.assert_close(a, b, rtol=2e-6 if not kernel else 1e-5, atol=2e-6 if not kernel else 1e-5)
    with torch.no_grad():
        _, again = K.linear_cross_entropy(x, w, targets, cap, weights, rows, chunk=chunk)
    torch.testing.assert_close(again, want_nats, rtol=1e-5, atol=1e-5)
    assert not nats.requires_grad


def test_to_fp8():
    """Four bits of each number, whatever its row holds, and no number above 448, even alone in its row."""
    torch.manual_seed(0)
    x = torch.randn(64, 48).bfloat16()
    x[5] = 0
    x[5, 7] = -130
    x8, scale = K.to_fp8(x)
    assert scale.item() == pytest.approx(130 / 448) and x8[5, 7].item() == -448
    normal = x.abs() > 2**-6 * 130 / 448
    ratio = (x8.float() * scale / x.float())[normal]
    assert len(ratio) > 2900 and (ratio - 1).abs().max() < 2**-4 + 1e-6
    zeros, scale = K.to_fp8(torch.zeros(4, 16).bfloat16())
    assert scale > 0 and not zeros.float().any()


def test_cast8_rounds_once():
    x = torch.linspace(-3, 3, 1001).bfloat16()
    factor = torch.tensor(1.7364)  # halfway between two numbers of bf16
    assert torch.equal(K.cast8(x, factor).float(), (x.double() * factor.item()).to(K.E4M3).float())


@devices
@pytest.mark.parametrize("case", ["plain", "four"])
def test_linear_cross_entropy_bf16(case, device):
    big = device == "cuda"
    size = (5001, 32768, 768) if big else ()
    x, w, targets, weights, rows, chunk = ce_inputs(case, device, torch.bfloat16, *size)
    total, nats = K.linear_cross_entropy(x, w, targets, CAP, weights, rows, chunk=2048 if big else chunk)
    got = torch.autograd.grad(total, (x, w))
    x, w = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
    want_total, want_nats = references.linear_cross_entropy(x, w, targets, CAP, weights, rows)
    want = torch.autograd.grad(want_total, (x, w))
    close(total, want_total, 5e-3)
    close(nats, want_nats, 5e-3)
    close(got[0], want[0], 2e-2)
    close(got[1], want[1], 2e-2)


@devices
def test_linear_cross_entropy_fp8(device):
    # the interpreter rounds to e5m2 without carrying into the exponent (32762 -> 16384): one mild case there
    cuda, small = ("four", (4096, 32768, 768), 2048), ("plain", (64, 128, 32), 32)
    case, size, chunk = cuda if device == "cuda" else small
    x, w, targets, weights, rows, _ = ce_inputs(case, device, torch.bfloat16, *size)
    outs = []
    for fp8 in (False, True):
        total, nats = K.linear_cross_entropy(x, w, targets, CAP, weights, rows, chunk=chunk, fp8=fp8)
        outs.append((nats, *torch.autograd.grad(total, (x, w))))
    for a, b, tol in zip(outs[1], outs[0], (2e-2, 0.12, 0.12), strict=False):
        close(a, b, tol)


@devices
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_transpose8(dtype, device):
    for shape in ((3, 130, 300), (130, 300), (16, 128)):
        x = torch.randn(shape, device=device).to(dtype)
        want = x.view(torch.uint8).mT
        assert torch.equal(K.transpose8(x).view(torch.uint8), want) and K.transpose8(x).is_contiguous()


@devices
@pytest.mark.parametrize("shape", [(2, 40, 24), (1, 150, 70), (3, 16, 130)])
def test_sym_mm(shape, device, monkeypatch):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu":
        monkeypatch.setattr(K, "SYM_TILES", dict(BM=32, BN=32, BK=32))
    shape = tuple(n * 10 for n in shape[1:]) if device == "cuda" else shape[1:]
    x = torch.randn(2, *shape, device=device).to(dtype)
    tol = 1e-5 if device == "cpu" else 5e-3
    for v in (x, x.mT):
        got, want = K.sym_mm(v, 0.5), K.sym_mm_ref(v.double(), 0.5)
        close(got, want, tol)
        close(got, got.mT, 1e-6)
    a = K.sym_mm_ref(x) / x.shape[-1]
    close(K.sym_mm(a, 0.7, -1.3, 2.0), K.sym_mm_ref(a.double(), 0.7, -1.3, 2.0), tol)


def updated(update, start, gradient, rows=None, dtype=None) -> list:
    """Master, second moments and, if they have a dtype, weights after one update."""
    master, square = start.clone(), torch.arange(float(len(start)), device=start.device)
    weights = start.to(dtype) if dtype else None
    numbers = dict(lr=0.1, beta2=0.9, correction=0.3, eps=1e-10, decay=0.5)
    update(master, gradient, square, weights, rows, **numbers)
    return [master, square, weights] if dtype else [master, square]


@devices
@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("columns", [48, 768, 70])
def test_rmsprop_update(columns, with_weights, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    grad = torch.randn(40, columns, device=device).to(dtype)
    grad[::3] = 0
    grad[1] = math.nan
    start = torch.randn(40, columns, device=device)
    got = updated(K.rmsprop_update, start, grad, dtype=dtype if with_weights else None)
    want = updated(K.rmsprop_update_ref, start, grad, dtype=dtype if with_weights else None)
    torch.testing.assert_close(got, want, equal_nan=True)
    master, square, *_ = got
    assert torch.equal(master[::3], start[::3]) and master[1].isnan().all()
    torch.testing.assert_close(square[::3], 0.9 * torch.arange(40.0, device=device)[::3])


@devices
@pytest.mark.parametrize("columns", [48, 70])
def test_rmsprop_update_of_a_sparse_gradient(columns, device):
    """As a dense gradient whose rows are sums: rows read once, 2 to 11 times and never, in any order."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    times = torch.tensor([0, 1, 2, 3, 4, 5, 8, 9, 0, 0, 11, 1])
    index = torch.arange(12).repeat_interleave(times)
    index = index[torch.randperm(len(index))].to(device)
    grad = torch.randn(len(index), columns, device=device).to(dtype)
    dense = torch.zeros(12, columns, dtype=torch.float64, device=device).index_add_(0, index, grad.double())
    start = torch.randn(12, columns, device=device)
    found = updated(K.rmsprop_update, start, grad, index, dtype)
    summed = updated(K.rmsprop_update_ref, start, dense.float(), None, dtype)
    for got, want in zip(found, summed, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3 if got.dtype == dtype else 1e-5, atol=1e-5)
    assert torch.equal(found[0][[0, 8, 9]], start[[0, 8, 9]])


@devices
def test_rmsprop_update_rounds_bf16_stochastically(device):
    """Each weight goes to one of the two numbers beside the exact one, and the mean stays; no gradient, no change."""
    start = torch.randn(256, 48, device=device).bfloat16()
    grad = torch.rand(256, 48, device=device).bfloat16() + 0.5
    grad[::4] = 0
    index = torch.randperm(256, device=device)
    numbers = dict(lr=1e-4, beta2=0.9, correction=0.5, eps=1e-10, decay=0.1)

    def updated(function, dtype):
        master = start.to(dtype, copy=True)
        function(master, grad, torch.zeros(256, device=device), None, index, **numbers)
        return master.double()

    exact = updated(K.rmsprop_update_ref, torch.float32)
    step = torch.exp2(exact.abs().log2().floor() - 7)  # between numbers of 8 bits
    for function in (K.rmsprop_update, K.rmsprop_update_ref):
        got = updated(function, torch.bfloat16)
        error = (got - exact) / step
        assert error.abs().max() < 1.001 and abs(error.mean()) < 4 / len(error.flatten()) ** 0.5
        assert (got - start.double()).abs().max() > 0 and torch.equal(got[index[::4]], start[index[::4]].double())

    # Small steps add up, though the rate is below half of the distance of numbers near 1; a NaN stays one.
    for function in (K.rmsprop_update, K.rmsprop_update_ref):
        master, moment = torch.ones(8, 48, device=device).bfloat16(), torch.zeros(8, device=device)
        for k in range(1, 51):
            gradient = torch.full((8, 48), 1 + 0.01 * k, device=device)
            now = {"lr": 1e-3, "decay": 0.0, "correction": 1 - 0.9**k}
            function(master, gradient, moment, None, **(numbers | now))
        assert master.float().mean().item() == pytest.approx(0.947, abs=0.004)
        gradient[3, 5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
        function(master, gradient, moment, None, **numbers)
        assert master[3].isnan().all() and not master[2].isnan().any()


@devices
@pytest.mark.parametrize("shape", [(2, 48, 48), (1, 96, 32), (6, 32, 80)])
def test_polar_express(shape, device):
    """As in float64, where singular vectors stay and singular values over two decades become about 1."""
    g = torch.randn(*shape, device=device)
    cuda = device == "cuda"  # the interpreter has no bf16 dot
    dtype, tol = (torch.bfloat16, 5e-2) if cuda else (torch.float32, 1e-4)
    close(K.polar_express(g.to(dtype)), K.polar_express(g.double()), tol)
    u, s, v = torch.linalg.svd(g.double(), full_matrices=False)
    decades = torch.logspace(-2, 0, s.shape[-1], device=device)
    levelled = u.mT @ K.polar_express(7 * (u * decades) @ v) @ v.mT
    values = torch.diagonal(levelled, dim1=-2, dim2=-1)
    assert 0.75 < values.min() and values.max() < 1.15
    assert (levelled - torch.diag_embed(values)).abs().max() < 2e-3
    assert K.polar_express(torch.zeros_like(g, dtype=dtype)).abs().max() == 0, "no gradient, no update, no NaN"


@devices
def test_linear_relu2_in_8_bits(device, monkeypatch):
    """Both fp8 products with their epilogues and transposes, to the last bit of each result.

    A few may be wrong: the interpreter's casts lose the carry of numbers rounded up to a power of two, and a GPU's
    sums have 14 bits.
    """
    needs_hopper(device)
    if device == "cpu":
        monkeypatch.setattr(K, "RELU2_TILES", dict(GROUP=2, BM=32, BN=32, BK=32))
    T, D, Fw = (5008, 768, 3072) if device == "cuda" else (80, 48, 112)
    x, up, down, g = (torch.randn(n, D, device=device).mul(s) for n, s in ((T, 30), (Fw, 60), (Fw, 20), (T, 10)))
    x8, up8, down8, g8 = x.to(K.E4M3), up.to(K.E4M3), down.to(K.E4M3), g.to(K.E5M2)
    post8, post8_T = K.linear_relu2(x8, up8, None, 448.0**-3)
    before8, before8_T = K.linear_relu2(g8, down8, post8, 448.0**-1.5 / 2)
    want_post = F.relu(x8.double() @ up8.double().T).square() * 448.0**-3
    want_before = (g8.double() @ down8.double().T) * post8.double().sqrt() * 448.0**-1.5
    assert want_post.max() > 1 and want_before.abs().max() > 0.1
    for got, flipped, want, dtype, step, least in (
        (post8, post8_T, want_post, K.E4M3, 1 / 15, 2**-10),
        (before8, before8_T, want_before, K.E5M2, 1 / 7.5, 2**-17),
    ):
        right = (got.double() - want).abs() <= want.abs() * step + least
        assert got.dtype == flipped.dtype == dtype and right.double().mean() >= 0.95
        assert flipped.is_contiguous() and torch.equal(flipped.float(), got.float().T)
    # What stands for the kernel in tests of whole models.
    for got, arguments in ((post8, (x8, up8, None, 448.0**-3)), (before8, (g8, down8, post8, 448.0**-1.5 / 2))):
        plain, flipped = references.linear_relu2(*arguments)
        assert (got.float() == plain.float()).double().mean() >= 0.95
        assert flipped.is_contiguous() and torch.equal(flipped.float(), plain.float().T)


def weights8(*weights):
    return [K.weights_to_fp8(w[None])[0] for w in weights]


def mlp_gradients(leaves, g):
    y = K.mlp_relu2(*leaves, *weights8(*leaves[1:]))
    return y, *torch.autograd.grad(y, leaves, g)


@devices
def test_mlp_fp8(device, monkeypatch):
    needs_hopper(device)
    cuda = device == "cuda"
    dtype, (T, D, Fw) = (torch.bfloat16, (5008, 768, 3072)) if cuda else (torch.float32, (96, 64, 160))
    if not cuda:
        monkeypatch.setattr(K, "RELU2_TILES", dict(GROUP=2, BM=32, BN=64, BK=32))
    x = F.rms_norm(torch.randn(T, D, device=device), (D,)).to(dtype)
    up, down, g = (torch.randn(n, D, device=device).mul(s).to(dtype) for n, s in ((Fw, 0.1), (Fw, 0.02), (T, 1e-4)))
    leaves = [t.requires_grad_() for t in (x, up, down)]
    got = mlp_gradients(leaves, g)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = F.relu(exact[0] @ exact[1].T).square() @ exact[2]
    for a, b in zip(got, (y, *torch.autograd.grad(y, exact, g.double())), strict=True):
        close(a, b, 0.11 if cuda else 0.16)
        assert ((a.double() - b).norm() / b.norm()).item() > 0.02, "it must be fp8"
    # Scales take up powers of two, so that results differ by these alone, bit by bit.
    leaves = [x, (up * 2**12).detach().requires_grad_(), (down / 2**9).detach().requires_grad_()]
    powers = (2.0**15, 2.0**-1, 2.0**-13, 2.0**8)
    for a, b, power in zip(mlp_gradients(leaves, g * 2**-16), got, powers, strict=True):
        assert torch.equal(a, b * power)


def test_inputs_of_fp8_products_come_from_norm():
    """Their scale is that of rows of norm sqrt(D), and longer ones would saturate."""
    x = F.rms_norm(torch.randn(96, 64), (64,))
    x8, scale = K.normed_to_fp8(x)
    assert scale == 8 / 448 and (x8.float() * scale - x).abs().max() < x.abs().max() / 15
    with pytest.raises(AssertionError, match="norm"):
        K.normed_to_fp8(3 * x)


@devices
def test_weights_fp8(device):
    """Each matrix of a bank with its own scale; scales lie 16 bytes apart, which cuBLAS asks for."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bank = torch.randn(3, 48, 32, device=device).mul(torch.tensor([1e-3, 1, 1e3], device=device)[:, None, None])
    bank = bank.to(dtype)
    found = K.weights_to_fp8(bank)
    assert len(found) == 3 and len({w8.scale.data_ptr() % 16 for w8 in found}) == 1
    for w, w8 in zip(bank.float(), found, strict=True):
        torch.testing.assert_close(w8.scale, w.norm(dim=1).max() / 448)
        assert w8.matrix.dtype == K.E4M3 and torch.equal(w8.transposed.float(), w8.matrix.float().T)
        assert w8.matrix.is_contiguous() and w8.transposed.is_contiguous()
        back = w8.matrix.float() * w8.scale
        assert (back - w).abs().max() <= w.abs().max() / 15


def rotary(T, width, dtype, device, full=False):
    """Cosines and sines (T, 1, width) of random angles for rotate(), of the first half of each head or of both."""
    first, second = (torch.rand(T, 1, width // 4, device=device) * 6 for _ in range(2))
    second = second * full
    cos = torch.cat((first.cos(), first.cos(), second.cos(), second.cos()), 2).to(dtype)
    return cos, torch.cat((first.sin(), -first.sin(), second.sin(), -second.sin()), 2).to(dtype)


@devices
@pytest.mark.parametrize("full", [False, True], ids=["half", "full"])
def test_linear_rotate(full, device, monkeypatch):
    """The fp8 product with its epilogue against a product and norm_rotate in float64, with a last tile cut off."""
    needs_hopper(device)
    if device == "cpu":
        monkeypatch.setattr(K, "ROTATE_TILES", dict(BM=32, BD=32))
    cuda = device == "cuda"
    dtype, (T, D, H, width) = (torch.bfloat16, (5003, 768, 6, 128)) if cuda else (torch.float32, (77, 48, 3, 32))
    a, b = (torch.randn(n, D, device=device).mul(60).to(K.E4M3) for n in (T, 3 * H * width))
    cos, sin = rotary(T, width, dtype, device, full)
    unit, scale = torch.tensor(3e-5, device=device), torch.tensor(0.3, device=device)
    out, rstd = K.linear_rotate(a, b, unit, cos, sin, scale)
    qkv = (a.double() @ b.double().T * unit.double()).view(T, 3, H, width)
    want = K.norm_rotate(qkv, cos.double(), sin.double(), scale.double())
    assert out.dtype == dtype and rstd.dtype == torch.float32
    for got, exact in zip(out.unbind(1), want, strict=True):
        close(got, exact, 5e-3 if cuda else 1e-5)
    close(rstd, (qkv[:, :2].square().mean(-1) + K.NORM_EPS).rsqrt(), 1e-3 if cuda else 1e-5)


@devices
def test_qkv_fp8(device):
    """Against norm_rotate of the plain product; gradients of a token outside the sample may be 100 times as large."""
    cuda = device == "cuda"
    needs_hopper(device)
    dtype, (T, D, H, width) = (torch.bfloat16, (5008, 768, 6, 128)) if cuda else (torch.float32, (208, 64, 2, 32))
    x = F.rms_norm(torch.randn(T, D, device=device), (D,)).to(dtype).requires_grad_()
    w = torch.randn(3 * H * width, D, device=device).mul(0.1).to(dtype).requires_grad_()
    cos, sin = rotary(T, width, dtype, device)
    scale, grads = torch.tensor(0.1, device=device), torch.randn(3, T, H, width, device=device).mul(1e-5).to(dtype)
    grads[:, 5] *= 100
    y = K.project_qkv(x, w, cos, sin, scale, *weights8(w))
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    z = K.norm_rotate((exact[0] @ exact[1].T).view(T, 3, H, width), cos.double(), sin.double(), scale.double())
    got = *y, *torch.autograd.grad(y, (x, w), list(grads))
    want = *z, *torch.autograd.grad(z, exact, list(grads.double()))
    for a, b in zip(got, want, strict=True):
        close(a, b, 0.08 if cuda else 0.15)
    assert ((y[0].double() - z[0]).norm() / z[0].norm()).item() > 0.01, "it must be fp8"
    close(got[3][5], want[3][5], 0.08 if cuda else 0.15)
    close(K.project_qkv(x, w, cos, sin, scale)[0], z[0], 1e-2 if cuda else 1e-5)


@devices
@pytest.mark.parametrize("full, few", [(False, False), (True, False), (True, True)], ids=["half", "full", "few"])
def test_norm_rotate_grad(full, few, device):
    """Against autograd in float64; the scale is that of every 63rd token and of the values' first channel.

    few: only tokens that are not sampled have a gradient.
    """
    cuda = device == "cuda"
    needs_hopper(device)
    dtype, (T, H, width) = (torch.bfloat16, (5003, 6, 128)) if cuda else (torch.float32, (197, 2, 32))
    cos, sin = rotary(T, width, dtype, device, full)
    scale, grads = torch.tensor(0.1, device=device), torch.randn(3, T, H, width, device=device).to(dtype)
    grads[:, 63] *= 1000
    if few:
        grads *= 1e-3
        grads[:, ::63] = 0
    before = torch.randn(T, 3, H, width, device=device, dtype=torch.float64, requires_grad=True)
    after = K.norm_rotate(before, cos.double(), sin.double(), scale.double())
    (want,) = torch.autograd.grad(after, before, list(grads.double()))
    rstd = (before[:, :2].square().mean(-1) + K.NORM_EPS).rsqrt().float()
    got, unit = K.norm_rotate_grad(torch.stack(after, 1).detach().to(dtype), rstd.detach(), *grads, cos, sin, scale)
    assert got.dtype == K.E5M2 and got.shape == want.shape
    close(got.double() * unit, want, 0.08 if cuda else 0.15)
    sampled = torch.maximum(want[::63].abs().amax(), grads[2, ..., 0].abs().amax()).float() * 256 / K.E5M2_MAX
    torch.testing.assert_close(unit, sampled, rtol=1e-2 if cuda else 1e-5, atol=0)


@pytest.mark.parametrize("T", (1, 5, 64))
def test_norm_rotate_outside_of_a_compiled_model(T):
    """What project_qkv compiles on CUDA is one graph, for all lengths and for views."""
    qkv = torch.randn(2 * T, 4, 2, 32)[::2, :3]
    cos, sin = (x[::2, :1] for x in torch.rand(2, 2 * T, 2, 32))
    with torch.no_grad():
        traced = torch.compile(K.norm_rotate, fullgraph=True, dynamic=True, backend="eager")
        found = traced(qkv, cos, sin, torch.tensor(0.1))
        for a, b in zip(found, K.norm_rotate(qkv, cos, sin, torch.tensor(0.1)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@devices
@pytest.mark.parametrize(
    "cu,window", [([0, 70], 20), ([0, 1, 2, 40, 41, 77, 77, 77], 16), ([0, 33, 50], 500), ([0, 5, 100], 0), ([0, 1], 3)]
)
def test_window_attention(cu, window, device, monkeypatch):
    cuda = device == "cuda"
    cu = torch.tensor(cu, dtype=torch.int32, device=device) * (37 if cuda else 1)
    T, H, D, dtype = int(cu[-1]), 2, 128 if cuda else 16, torch.bfloat16 if cuda else torch.float32
    if not cuda:
        monkeypatch.setattr(K, "ATTENTION_TILES", dict(BM=32, BN=16))
    bounds = K.attention_bounds(cu, T, window)
    doc, t = torch.bucketize(torch.arange(T, device=device), cu, right=True), torch.arange(T, device=device)
    seen = (doc[:, None] == doc) & (t <= t[:, None]) & (t >= t[:, None] - window)
    assert torch.equal(seen, (t >= bounds[0, :, None]) & (t <= t[:, None]))
    assert torch.equal(seen, (t[:, None] <= bounds[1]) & (t <= t[:, None]))
    qkv = torch.randn(T, 3, H, D, device=device).to(dtype).requires_grad_()
    do = torch.randn(T, H, D, device=device).to(dtype)
    q, k, v = qkv.unbind(1)
    y = K.window_attention(q * 0.2, k, v, bounds)
    got = (y, *torch.autograd.grad(y, qkv, do))
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.unbind(1)
    y = references.window_attention(q * 0.2, k, v, bounds)
    for a, b in zip(got, (y, *torch.autograd.grad(y, exact, do.double())), strict=True):
        close(a, b, 1e-2 if cuda else 1e-5)


@pytest.mark.parametrize("T,heads,width", [(37, 3, 16), (1, 1, 8)])
def test_norm_rotate(T, heads, width):
    """Against norms and rotation by complex numbers, in float64; v goes through untouched."""
    qkv = torch.randn(T, 3, heads, width).requires_grad_()
    cos, sin = rotary(T, width, torch.float32, "cpu", full=True)
    scale = torch.tensor(0.3)
    grads = [torch.randn(T, heads, width) for _ in "qkv"]
    q, k, v = K.norm_rotate(qkv, cos, sin, scale)
    assert torch.equal(v, qkv[:, 2])
    got = (q, k, *torch.autograd.grad((q, k, v), qkv, grads))
    exact = qkv.detach().double().requires_grad_()
    turns = torch.complex(cos.double(), -sin.double()).unflatten(-1, (2, 2, -1))[..., 0, :]

    def turned(x):
        x = x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
        pair = torch.complex(*x.unflatten(-1, (2, 2, -1)).unbind(-2)) * turns
        return torch.stack((pair.real, pair.imag), -2).flatten(-3)

    want = (turned(exact[:, 0]) * 0.3, turned(exact[:, 1]), exact[:, 2])
    want = (*want[:2], *torch.autograd.grad(want, exact, [g.double() for g in grads]))
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-5)


@devices
def test_compiled_fullgraph(device):
    """All operations traced by torch.compile without a graph break."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, w, targets, weights, rows, _ = ce_inputs("four", device, dtype)
    # Small, so that rounding in 16 bits does not decide the softmax.
    up = (torch.randn(64, 32, device=device) / 6).to(dtype).requires_grad_()
    down = (torch.randn(64, 32, device=device) / 8).to(dtype).requires_grad_()
    qkv = torch.randn(len(x), 3, 1, 32, device=device, dtype=dtype, requires_grad=True)
    angle = torch.rand(len(x), 1, 16, device=device)
    turn, scale = torch.cat((angle, angle * 0), -1).to(dtype), torch.tensor(0.5, device=device)
    slant = turn / 2
    bounds = K.attention_bounds(torch.tensor([0, len(x)], dtype=torch.int32, device=device), len(x), 4)

    def step(x, w, up, down, qkv):
        q, k, v = K.norm_rotate(qkv / 2, turn, slant, scale)
        y = K.window_attention(q, k, v * 2, bounds)
        y = K.mlp_relu2(x + y.flatten(1), up, down)
        return K.linear_cross_entropy(y, w, targets, CAP, weights, rows, chunk=4)[0] / 3

    leaves = (x, w, up, down, qkv)
    want = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    got = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(got, want, strict=False):
        close(a, b, 1e-5 if device == "cpu" else 3e-2)


def test_imports_without_triton():
    """The file imports, and its plain paths work, where triton is absent."""
    code = (
        "import sys; sys.modules['triton'] = None; import importlib.util as u, torch\n"
        f"s = u.spec_from_file_location('k', r'{PATH}')\n"
        "k = sys.modules['k'] = u.module_from_spec(s); s.loader.exec_module(k)\n"
        "x = torch.randn(6, 8, requires_grad=True); w = torch.randn(64, 8, requires_grad=True)\n"
        "k.linear_cross_entropy(x, w, torch.arange(6)[None], (23.0, 5.0, 7.5))[0].backward()\n"
        "k.mlp_relu2(x, w, w).sum().backward(); k.polar_express(torch.randn(2, 8, 4)); print('fine')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "fine" in out.stdout, out.stderr


@pytest.mark.parametrize(
    "flags", (["--quick", "90", "120"], pytest.param(["80", "90", "120"], marks=pytest.mark.soak)), ids=("most", "all")
)
def test_kernels_compile_for_gpus_that_are_not_here(flags):
    """To machine code for an H100 and an RTX 5090, within the shared memory of each, without any of them.

    An A100 gets the kernels of an RTX 5090, and has more shared memory.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PATH.parent / "dev/compile_kernels.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: set() for name in ("8.0", "9.0", "12.0")}
    for arch, kernel, shared in (line.split() for line in done.stdout.splitlines()[1:]):
        found[arch].add(kernel)
        assert float(shared) < 227
    kernels = set()
    for file in (PATH, PATH.parent / "runs/engine/kernel.py", PATH.parent / "runs/lib/choices.py"):
        kernels |= set(re.findall(r"^@jit\ndef (\w+_kernel)\(", file.read_text(), re.M))
    assert found["9.0"] == kernels and len(kernels) == 12
    hopper = {"transpose_kernel", "linear_relu2_kernel", "linear_rotate_kernel", "norm_rotate_grad_kernel"}
    assert found["12.0"] == kernels - hopper
    assert found["8.0"] == (found["12.0"] if "80" in flags else set())
