"""Compiles the Triton kernels of a training script into their cache, for the GPU of this machine.

    python runs/lib/kernel_cache.py train_small.py [the flags of the run]

A training script starts this where nothing is compiled yet: its kernels take ten seconds, which
pass while it imports PyTorch and builds the model. What is not there in time, or not in the right
form, the script compiles itself.
"""

import dataclasses
import functools
import importlib
import os
import shutil
import sys
from pathlib import Path


def launch_kernels(script, config, dtype) -> None:
    """Launches every kernel of training in each of its forms, on empty tensors of the host.

    Triton compiles a form for types, constants, and numbers that 16 divides. So sizes are those of
    the config, for one pack.
    """
    import torch

    D, F, V, T = config.width, config.mlp_width, config.padded_vocab, config.pack_tokens
    H, K = config.num_heads, config.head_dim
    new = functools.partial(torch.empty, dtype=dtype)

    # Attention.
    q, k, v = new(T, 3, H, K).unbind(1)
    o, do = new(2, T, H, K)
    lse = torch.empty(H, T)
    bounds = torch.empty(2, T, dtype=torch.int32)
    script.window_attention_forward(q, k, v, bounds)
    script.window_attention_grad(q, k, v, o, do, lse, bounds)

    # Head and loss, in training and in validation.
    fp8 = script.fp8_products(config, q)
    weights = torch.tensor(script.loss_weights(config, 0))
    targets = torch.empty(len(weights), T, dtype=torch.int32)
    token_weight = torch.empty(T) if "head" in fp8 else None
    out = new(16, V, dtype=script.E5M2) if "head" in fp8 else None
    cap = config.softcap
    script.softcap_ce(new(16, V), targets, weights, token_weight, cap, out=out)
    script.softcap_ce(new(16, V), targets[:1], weights[:1], None, cap, grad=False)

    # Products of the layers in fp8.
    x, up, post, qkv = (new(*shape, dtype=script.E4M3) for shape in ((T, D), (F, D), (T, F), (3 * D, D)))
    if fp8:
        script.transpose8(x)
    if "qkv" in fp8:
        number = torch.empty(1)
        turn = (new(T, 1, K), new(T, 1, K), number)
        script.linear_rotate(x, qkv, number, *turn)
        script.norm_rotate_grad(new(T, 3, H, K), torch.empty(T, 2, H), *new(3, T, H, K), *turn)
    if "MLP" in fp8:
        script.linear_relu2(x, up, None, 0.5)
        script.linear_relu2(new(T, D, dtype=script.E5M2), up, post, 0.5)

    # The optimizer.
    square = torch.empty(2, D, D, dtype=torch.bfloat16)
    script.sym_mm(square)
    script.sym_mm(square.mT)
    script.sym_mm(square, 0.5, 0.5, 0.5)
    numbers = dict.fromkeys(("lr", "beta2", "correction", "eps", "decay"), 0.5)
    script.rmsprop_update(torch.empty(16, D), new(16, D), torch.empty(16), new(16, D), None, **numbers)
    for C in (D, min(script.TRIGRAM_WIDTH, D)):  # tables with sparse gradients
        param = None if dtype == torch.bfloat16 else new(16, C)
        master = new(16, C) if param is None else torch.empty(16, C)  # in bf16 it is the table itself
        script.rmsprop_update(master, new(16, C), torch.empty(16), param, torch.arange(16), **numbers)


def main() -> None:
    if sys.argv[1:2] in ([], ["--help"]):
        print(__doc__)
        return
    # A machine without a GPU has nothing to compile, and one process of torchrun is enough.
    if not shutil.which("nvidia-smi") or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for number in range(3):  # what reads the output of the training script need not wait for this process
        os.dup2(os.open(os.devnull, os.O_RDWR), number)

    path = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(path.parent))
    script = importlib.import_module(path.stem)
    import torch
    import triton

    config = script.make_config(script.build_parser().parse_args(sys.argv[2:]))
    vocab_size = script.Dataset.open(config.data).tokenizer.vocab_size
    config = dataclasses.replace(config, vocab_size=vocab_size)
    dtype = script.choose_dtype(config, torch.device("cuda"))
    capability = torch.cuda.get_device_capability()
    if dtype == torch.float32 or capability < (8, 0):
        return
    driver = triton.runtime.driver.active
    driver.get_current_stream = lambda device: 0  # nothing is launched
    run = triton.JITFunction.run

    def compile_only(self, *arguments, warmup, **options):
        kernel = run(self, *arguments, warmup=True, **options)
        driver.launcher_cls(kernel.src, kernel.metadata)  # a C program for the host

    triton.JITFunction.run = compile_only
    script.use_triton = lambda x: True
    script.has_fp8_products = lambda x: x.dtype == torch.bfloat16 and (9, 0) <= capability < (12, 0)
    launch_kernels(script, config, dtype)


if __name__ == "__main__":
    main()
