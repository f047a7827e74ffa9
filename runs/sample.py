"""Continues texts with the model of a run directory.

    python runs/sample.py out/RUN --prompt "The sky is" --prompt "Once upon a time"
    python runs/sample.py out/RUN --check       compares decoding with the forward pass of training

The text appears as it is generated. The last line is one JSON object: new_tokens, seconds and run_dir, or with --check
decoding_error and run_dir.
"""

import argparse
import copy
import math
import sys
import time
from pathlib import Path

from lib.command import RunError, check_sampling, run_command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="run directory")
    add("--prompt", action="append", help="text to continue, repeatable (default: an empty one)")
    add("--tokens", type=int, default=128, help="maximum new tokens per prompt [%(default)s]")
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0: the most likely token [%(default)s]")
    add("--top-k", type=int, default=50, help="number of most likely tokens to sample from; 0: all [%(default)s]")
    add("--top-p", type=float, default=1.0, help="total probability of the tokens to sample from [%(default)s]")
    add("--seed", type=int, default=0, help="seed of the sampling [%(default)s]")
    add("--step", type=int, help="step of the checkpoint (default: the newest)")
    add("--attention", metavar="NAME", help="attention backend for the prompt")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="dtype of the weights (default: the run's)")
    add("--device", help="cuda, mps or cpu (default: the best available)")
    add("--check", action="store_true", help="only compare decoding with the forward pass")
    args = parser.parse_args(argv)
    check_sampling(parser, args)
    if args.tokens < 1:
        parser.error(f"--tokens must be at least 1, found {args.tokens}")
    return args


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import engine
import torch
from engine.prefill import prefill

CHECKED_TOKENS = 32
# Largest difference between the logits of decode and forward, relative to their standard deviation. Models of random
# weights show 1e-6 in fp32 and up to 2e-2 in bf16. A wrong position shows 1e-1, but a missing key offset as little as
# 1e-2, which only fp32 can tell from rounding.
EXACT_TOLERANCE = 1e-3
ROUNDED_TOLERANCE = 1e-1  # for 16 bits


def check(run: engine.Run) -> dict:
    """decoding_error() of the model in fp32; one of 16 bits is also compared as it is, with its kernels.

    Raises: RunError if decoding and forward pass differ by more than rounding, or are not finite
    """
    models = [(run.model, EXACT_TOLERANCE)]
    if run.model.embed.dtype != torch.float32:
        exact = copy.deepcopy(run.model).cpu().float()
        exact.attention = run.script.sdpa_attention
        models = [(run.model, ROUNDED_TOLERANCE), (exact, EXACT_TOLERANCE)]
    for model, tolerance in models:
        error = decoding_error(model, run.tokenizer)
        if math.isnan(error):
            raise RunError("the model's logits are not finite; choose an earlier checkpoint with --step")
        if error > tolerance:
            problem = "decoding and the forward pass give different logits"
            problem += f" (difference {error:.1e}, at most {tolerance:.0e} is rounding)"
            raise RunError(f"{problem}; use the tools of the commit that made the run")
    print(f"decoding agrees with the forward pass (difference {error:.1e}, rounding)")
    return {"decoding_error": error}


@torch.no_grad()
def decoding_error(model, tokenizer) -> float:
    """Root mean square difference of the logits of decode and forward, relative to their standard deviation.

    A third of CHECKED_TOKENS random ids is prefilled into an empty slot, then another third behind it, and the others
    are decoded one by one. NaN if any logit is not finite.
    """
    device = model.embed.device
    vocab_size = tokenizer.vocab_size
    length = min(CHECKED_TOKENS, model.config.max_seq_len)
    rng = torch.Generator().manual_seed(0)
    random_ids = torch.randint(0, vocab_size, (length - 1,), generator=rng)
    ids = [tokenizer.bos_id, *random_ids.tolist()]

    # All at once, as in training.
    tokens_T = torch.tensor(ids, device=device)
    positions_T = torch.arange(length, device=device, dtype=torch.int32)
    cu_seqlens = torch.tensor([0, length, length, length], device=device, dtype=torch.int32)
    expected = model(tokens_T.int(), None, positions_T, cu_seqlens, length)

    # In parts, with a cache.
    cache = engine.KVCache.empty(model, 1, length)
    first = length // 3
    second = 2 * length // 3
    prefill(model, cache, [0], [0], [ids[:first]])
    prefill(model, cache, [0], [first], [ids[:second]])
    decoded = []
    for i in range(second, length):
        prev_ids_21 = tokens_T[i - 2 : i].flip(0)[:, None]
        inputs = (tokens_T[i : i + 1], prev_ids_21, positions_T[i : i + 1])
        decoded.append(engine.decode(model, cache, *inputs))

    expected = expected[second:, :vocab_size].double()
    decoded = torch.cat(decoded)[:, :vocab_size].double()
    std = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    difference = (decoded - expected).square().mean().sqrt()
    return (difference / std.clamp(min=1e-30)).item()


def sample(run: engine.Run, args: argparse.Namespace) -> dict:
    """Prints the continuation of each prompt."""
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    generator = engine.Generator(run.model, run.tokenizer)

    start = time.perf_counter()
    new_tokens = 0
    for i, prompt in enumerate(args.prompt or [""]):
        seed = args.seed + i * engine.SEED_STRIDE  # equal prompts get different noise
        print(prompt, end="", flush=True)
        for delta in generator.stream_text(prompt, max_tokens=args.tokens, seed=seed, **options):
            print(delta, end="", flush=True)
            new_tokens += 1
        new_tokens -= 1  # the last delta belongs to no token
        print("\n")
    return {"new_tokens": new_tokens, "seconds": time.perf_counter() - start}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    def work() -> dict:
        run = engine.load_run(args.run_dir, args.step, args.device, attention=args.attention, dtype=args.dtype)
        result = check(run) if args.check else sample(run, args)
        return result | {"run_dir": str(args.run_dir)}

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
