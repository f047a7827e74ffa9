"""Compiles every kernel of a script and of runs/ for GPUs that this machine need not have; prints what each needs.

    python dev/compile_kernels.py [--script train_medium.py] [--quick] [80 86 89 90 100 120]

The numbers are compute capabilities times ten; without any: A100, L4, H100, B200, RTX 5090. Kernels are called as the
script, runs/engine/kernel.py and runs/lib/choices.py call them, on tensors of the host, and Triton goes as far as the
machine code (its ptxas needs no GPU).
With --quick only the forms that training and decoding of the default recipe need are compiled.
The shared memory of a program must stay below the GPU's limit: exit code 1 if a kernel does not fit. This says nothing
about speed: dev/bench_kernels.py does.
"""

# ruff: noqa: E402
import argparse
import importlib
import os
import sys
from pathlib import Path

# KiB that one program may have: table of compute capabilities in NVIDIA's CUDA C++ Programming Guide.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--script", default="train_small.py")
    parser.add_argument("--quick", action="store_true", help="only the forms of the default recipe")
    parser.add_argument("archs", nargs="*", type=int, default=[80, 89, 90, 100, 120])
    args = parser.parse_args()
    if unknown := set(args.archs) - set(SHARED):
        known = ", ".join(map(str, SHARED))
        raise SystemExit(f"error: compute capability {unknown.pop()} is none of {known}")
    return args


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "runs")]
os.environ.pop("TRITON_INTERPRET", None)
import torch
from engine import kernel
from lib import choices
from lib.kernel_cache import launch_kernels
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

NUMBERS = dict(lr=0.1, beta2=0.9, correction=0.5, eps=1e-10, decay=0.1)


class NoDevice:
    """What a launch asks of the driver before there is anything to launch."""

    arch = 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # a cache for each

    def get_current_stream(self, device=None):
        return 0


def launches(script, config, quick: bool) -> None:
    """Every kernel in every form in which the script and runs/ start it; quick: only those that training needs most."""
    dtype = torch.bfloat16
    T, D, V = 256, config.width, config.padded_vocab
    H, K = config.num_heads, config.head_dim

    def new(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype)

    launch_kernels(script, config, dtype)
    if not quick:
        targets, weights = new(1, T, dtype=torch.int32), torch.ones(1)
        for logits in (new(4, V), new(4, V).half()):
            script.softcap_ce(logits, targets, weights, weights, config.softcap)
        for index in (None, torch.arange(4)):  # a table that is its own master
            script.rmsprop_update(torch.zeros(4, D), new(4, D), torch.zeros(4), None, index, **NUMBERS)
    q, k, v = new(T, 3, H, K).unbind(1)
    rows = (q[:4], k[:4], v[:4])
    cache = new(2, 4, 64, H, K)
    for offset in [True] if quick else [False, True]:
        kernel.decode_attention(*rows, *cache, new(4, dtype=torch.int32), offset)
    choices.choice_attention(q, k, v, *new(3, T, dtype=torch.int32))


def main() -> None:
    args = parse()
    device = NoDevice()
    driver.set_active(device)
    seen = set()  # hashes of kernels
    misfits = 0
    script = importlib.import_module(Path(args.script).stem)
    script.use_triton = lambda x: True
    script.has_fp8_products = lambda x: 90 <= device.arch < 120
    script.persistent_programs = lambda tiles: tiles
    kernel.use_triton = lambda x: True
    choices.use_triton = lambda x: True
    run = JITFunction.run

    def compile_only(self, *arguments, warmup, **options):
        nonlocal misfits
        kernel = run(self, *arguments, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            fits = kernel.metadata.shared <= 1024 * SHARED[device.arch]
            misfits += not fits
            verdict = "" if fits else "  DOES NOT FIT"
            shared = kernel.metadata.shared / 1024
            print(f"{device.arch / 10:4.1f} {self.fn.__name__:26} {shared:11.1f}{verdict}", flush=True)
        return kernel

    JITFunction.run = compile_only
    print(f"{'cap.':4} {'kernel':26} {'shared, KiB':>11}")
    for device.arch in args.archs:
        launches(script, script.Config(), args.quick)
    if misfits:
        raise SystemExit(f"{misfits} kernels ask for more shared memory than the GPU has")


if __name__ == "__main__":
    main()
