# ruff: noqa: B023, E402, E731
"""Times every kernel of the scripts on a CUDA device against plain PyTorch; tests/test_kernels.py checks them.

    python dev/bench_kernels.py [ce] [sym] [mlp] [attention] [qkv]

Times are medians of triton.testing.do_bench, which flushes the L2 cache between runs. Per cent are of what this device
reaches in a large bf16 product (fp8: fp8 product) and in a large copy, measured first. The exit code is 1 if a kernel
failed.
"""

import argparse
import sys
from pathlib import Path

NAMES = ("ce", "sym", "mlp", "attention", "qkv")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to time: {', '.join(NAMES)} (default: all)")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(NAMES):
        parser.error(f"unknown part {unknown.pop()}; use {', '.join(NAMES)}")
    return args


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT)]
import torch
import torch.nn.functional as F

import train_small as K

FAILED = []  # names of what failed
LIMIT = {}  # what the device reaches: "bf16" and "fp8" in TFLOP/s, "copy" in GB/s
CAP = (23.0, 5.0, 7.5)
bf16 = torch.bfloat16


def attempt(name: str, function, tiles=False) -> None:
    """Runs, and reports an error in one line instead of stopping; tiles that do not fit are no failure."""
    try:
        function()
    except Exception as error:
        if not tiles:
            FAILED.append(name)
        reason = " ".join(str(error).split())[:160]
        print(f"{'    ' if tiles else 'FAIL'} {name}: {type(error).__name__} {reason}", flush=True)


def measure(function) -> float:
    import triton

    return triton.testing.do_bench(function, warmup=8, rep=40, return_mode="median")


def timed(name: str, function, flop=0, moved=0, kind="bf16") -> None:
    """Milliseconds, TFLOP/s and GB/s of a function, with per cent of the device's limits."""

    def one():
        ms = measure(function)
        line = f"{name:52}{ms:8.3f} ms "
        if flop:
            tflops = flop / ms / 1e9
            line += f"{tflops:6.0f} TFLOP/s {100 * tflops / LIMIT[kind]:4.0f}%"
        if moved:
            rate = moved / ms / 1e6
            line += f"{rate:6.0f} GB/s {100 * rate / LIMIT['copy']:4.0f}%"
        print(line, flush=True)

    attempt(name, one, tiles=name.startswith("  tiles"))


def sweep(name: str, table: str, names: str, rows: str, function, **work) -> None:
    """Times a function with the current tiles of K.`table`, then with other ones."""
    kept = getattr(K, table)
    timed(f"{name} as set", function, **work)
    for row in rows.split(","):
        tiles = dict(zip(names.split(), map(int, row.split()), strict=True))
        if tiles != kept:
            setattr(K, table, tiles)
            timed(f"  tiles {' '.join(map(str, tiles.values()))}", function, **work)
    setattr(K, table, kept)


def randn(*shape, scale=1.0, dtype=bf16):
    return torch.randn(*shape, device="cuda").mul_(scale).to(dtype)


def limits() -> None:
    a = randn(8192, 8192)
    b = randn(8192, 8192)
    big = torch.empty(2**29, device="cuda", dtype=bf16)
    LIMIT["bf16"] = 2 * 8192**3 / measure(lambda: a @ b) / 1e9
    LIMIT["fp8"] = LIMIT["bf16"]
    LIMIT["copy"] = 2 * big.nbytes / measure(big.clone) / 1e6
    if torch.cuda.get_device_capability() >= (8, 9):
        (a8, s), (b8, t) = K.to_fp8(a), K.to_fp8(b)
        product = lambda: torch._scaled_mm(a8, b8.T, s, t, out_dtype=bf16, use_fast_accum=True)
        LIMIT["fp8"] = 2 * 8192**3 / measure(product) / 1e9
    products = f"bf16 {LIMIT['bf16']:,.0f} TFLOP/s, fp8 {LIMIT['fp8']:,.0f} TFLOP/s"
    print(f"limits: {products}, copy {LIMIT['copy']:,.0f} GB/s")


# ---- cross-entropy


def ce_case(T: int, V: int, terms: int = 4):
    """logits, targets, weights, row weights; one term: next token only."""
    targets = torch.randint(V, (terms, T), device="cuda")
    targets[torch.rand(targets.shape, device="cuda") < 0.2] = -1
    targets[:, :4] = 5  # equal targets share a column
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25][:terms], device="cuda")
    return randn(T, V, scale=3.0), targets, weights, torch.rand(T, device="cuda")


def time_ce() -> None:
    T, V, D = 16384, 32768, 768
    logits, targets, one, _ = ce_case(T, V, 1)
    _, targets4, weights, rows = ce_case(T, 64)
    g8 = torch.empty(T, V, device="cuda", dtype=torch.float8_e5m2)
    moved = 4 * T * V

    def loss(**options):
        return K.softcap_ce(logits, targets, one, None, CAP, **options)

    def all_terms():
        return K.softcap_ce(logits, targets4, weights, rows, CAP)

    timed(f"softcap_ce {T} x {V}", loss, moved=moved)
    timed("  four targets, row weights", all_terms, moved=moved)
    timed("  validation", lambda: loss(grad=False), moved=moved / 2)
    timed("  e5m2 gradient", lambda: loss(out=g8), moved=moved * 3 / 4)
    timed("  transpose8 of the gradient", lambda: K.transpose8(g8), moved=moved / 2)
    timed("  torch, .T.contiguous()", lambda: g8.view(torch.uint8).T.contiguous(), moved=moved / 2)
    logits = g8 = None
    T = 65536
    x = randn(T, D).requires_grad_()
    w = randn(V, D, scale=0.1).requires_grad_()
    targets = torch.randint(V, (1, T), device="cuda")
    flop = 6 * T * V * D

    def head(chunk, fp8):
        total, _ = K.linear_cross_entropy(x, w, targets, CAP, chunk=chunk, fp8=fp8)
        torch.autograd.grad(total, (x, w))

    kinds = ("bf16", "fp8") if K.has_fp8_products(x) else ("bf16",)
    for kind in kinds:
        for chunk in (8192, 16384, 32768, 65536):
            name = f"linear_cross_entropy {T}, {kind}, chunk {chunk}"
            timed(name, lambda: head(chunk, kind == "fp8"), flop=flop, kind=kind)
    with torch.no_grad():
        timed("  validation", lambda: K.linear_cross_entropy(x, w, targets, CAP), flop=flop / 3)

    @torch.compile
    def plain(x, w, targets):
        return F.cross_entropy(K.softcap((x @ w.T).float(), CAP), targets[0], reduction="sum")

    both = lambda: torch.autograd.grad(plain(x, w, targets), (x, w))
    timed("  torch.compile of the plain formula", both, flop=flop)


# ---- symmetric products


def polar_plain(x):
    """polar_express with torch's products only."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = x.size(-2) > x.size(-1)
    for a, b, c in K.POLAR_EXPRESS:
        A = x.mT @ x if tall else x @ x.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        x = torch.baddbmm(x, x, B, beta=a) if tall else torch.baddbmm(x, B, x, beta=a)
    return x


def time_sym() -> None:
    names = "BM BN BK num_warps num_stages"
    rows = "128 128 64 8 3,128 128 64 4 4,64 128 64 4 4,128 256 64 8 3"
    banks = ((22, 768, 3072), (20, 768, 768), (60, 256, 768))  # MLP, VO and QK of the recipe
    for n, m, k in banks:
        x = randn(n, k, m, scale=0.1).mT
        flop = 2 * n * m * m * k
        name = f"sym_mm x^T x, {n} x {m} x {k}"
        sweep(name, "SYM_TILES", names, rows, lambda: K.sym_mm(x), flop=flop)
        timed("  torch.bmm", lambda: x @ x.mT, flop=flop)
    for shape in ((22, 3072, 768), (20, 768, 768), (60, 256, 768)):
        g = randn(*shape)
        timed(f"polar_express {shape}", lambda: K.polar_express(g))
        timed("  torch", lambda: polar_plain(g))


# ---- MLP


def operands8(T: int, D: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """x, up, down in e4m3 and a gradient in e5m2."""
    e4m3 = [randn(T, D, scale=30), randn(hidden, D, scale=60), randn(hidden, D, scale=20)]
    return *(t.to(K.E4M3) for t in e4m3), randn(T, D, scale=10).to(K.E5M2)


def time_mlp() -> None:
    T, D, hidden = 65536, 768, 3072
    names = "BM BN BK GROUP num_warps num_stages"
    rows = "128 128 128 8 4 3,128 128 128 8 8 3,128 256 128 8 8 3,256 128 128 8 8 3"
    tiles = ("RELU2_TILES", names, rows)
    x, up, down, g = operands8(T, D, hidden)
    post, _ = K.linear_relu2(x, up, None, 448.0**-3)
    work = {"flop": 2 * T * D * hidden, "kind": "fp8"}
    name = f"linear_relu2 {T} x {D} x {hidden}"
    sweep(name, *tiles, lambda: K.linear_relu2(x, up, None, 448.0**-3), **work)
    sweep(f"{name}, gradient", *tiles, lambda: K.linear_relu2(g, down, post, 448.0**-1.5 / 2), **work)


# ---- attention


def documents(T: int, mean: int) -> torch.Tensor:
    """cu_seqlens of documents with exponentially distributed lengths, padded with T."""
    lengths = torch.empty(4 * T // mean + 1).exponential_(1 / mean).long().clamp(min=1)
    ends = lengths.cumsum(0)
    ends = ends[ends < T].int()
    return torch.cat((torch.zeros(1), ends, torch.full((8,), T))).int().cuda()


def time_attention() -> None:
    T, H, D = 65536, 6, 128
    cu = documents(T, 500)
    q, k, v, g = (randn(T, H, D) for _ in range(4))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    longest = int(cu.diff().max())
    names = "BM BN num_warps num_stages"
    rows = "64 64 4 2,128 64 8 2,128 64 4 2,64 64 4 3,128 128 8 2,64 128 4 2"

    def varlen(q, k, v):
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, cu, cu, longest, longest, scale=0.1, window_size=(window, 0))

    for window in (128, 384, 896, 2048):
        bounds = K.attention_bounds(cu, T, window)
        pairs = (torch.arange(T, device="cuda") - bounds[0] + 1).sum().item()
        scaled = 0.1 * q
        o, lse = K.window_attention_forward(scaled, k, v, bounds)
        forward = lambda: K.window_attention_forward(scaled, k, v, bounds)
        backward = lambda: K.window_attention_grad(scaled, k, v, o, g, lse, bounds)
        rate = {"flop": 4 * pairs * H * D, "moved": 8 * T * H * D}
        back = {"flop": 10 * pairs * H * D, "moved": 24 * T * H * D}
        tried = rows if window in (128, 896) else "64 64 4 2"
        tiles = ("ATTENTION_TILES", names, tried)
        name = f"window_attention {T}, window {window}"
        sweep(f"{name}, forward", *tiles, forward, **rate)
        sweep(f"{name}, backward", *tiles, backward, **back)
        timed("  torch varlen, forward", lambda: varlen(q, k, v), **rate)
        timed("  torch varlen, both ways", lambda: torch.autograd.grad(varlen(*leaves), leaves, g))


# ---- norm and rotary embedding of queries and keys


def rotate_case(T: int, H: int):
    """qkv, cosines, sines, scale and the gradients of q, k, v."""
    angle = torch.rand(T, 1, 32, device="cuda") * 6
    cos = torch.cat((angle.cos(), angle.cos(), torch.ones(T, 1, 64, device="cuda")), 2).to(bf16)
    sin = torch.cat((angle.sin(), -angle.sin(), torch.zeros(T, 1, 64, device="cuda")), 2).to(bf16)
    scale = torch.tensor(0.1, device="cuda")
    return randn(T, 3, H, 128).requires_grad_(), cos, sin, scale, [randn(T, H, 128) for _ in "qkv"]


def time_qkv() -> None:
    tiles = ("ROTATE_TILES", "BM BD num_warps num_stages", "256 128 8 3,128 64 4 4,128 128 8 2,64 128 4 3")
    for T, H in ((65536, 6), (32768, 12)):
        D = 128 * H
        _, *rotary, grads = rotate_case(T, H)
        x, _, w, _ = operands8(T, D, 3 * D)
        unit = torch.tensor(448.0**-2, device="cuda")
        product = lambda: K.product8(x, w, unit, bf16, fast=True).view(T, 3, H, 128)
        work = {"flop": 6 * T * D * D, "kind": "fp8"}
        timed(f"qkv {T} x {D}: product8", product, **work)
        plain = torch.compile(K.norm_rotate)
        timed("  product8 and compiled norm_rotate", lambda: plain(product(), *rotary), **work)
        sweep("  linear_rotate", *tiles, lambda: K.linear_rotate(x, w, unit, *rotary), **work)
        results = K.linear_rotate(x, w, unit, *rotary)
        backward = lambda: K.norm_rotate_grad(*results, *grads, *rotary)
        timed("  norm_rotate_grad", backward, moved=13 * T * D)


PARTS = dict(zip(NAMES, (time_ce, time_sym, time_mlp, time_attention, time_qkv), strict=True))


def main() -> int:
    parts = parse().parts or list(PARTS)
    if not torch.cuda.is_available() or not K.use_triton(torch.empty(1, device="cuda", dtype=bf16)):
        sys.exit("error: bench_kernels.py needs a CUDA device of capability 8.0 or newer, and triton")
    if not K.has_fp8_products(randn(8, 8)):
        parts = [part for part in parts if part not in ("mlp", "qkv")]
        print("mlp and qkv skipped: they need the shared memory of a Hopper or a B200")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    limits()
    for part in parts:
        attempt(part, PARTS[part])
        torch.cuda.empty_cache()
    print(f"failed: {', '.join(FAILED) or 'none'}")
    return int(bool(FAILED))


if __name__ == "__main__":
    sys.exit(main())
