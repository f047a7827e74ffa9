# ruff: noqa: E402
"""Speed of decoding with a model of random weights: prefill, tokens a second, memory, and whether the paths agree.

    python dev/bench_generate.py                      default config, one GPU: batches of 1, 32, 128; 1,024 + 128 tokens
    python dev/bench_generate.py --smoke              a tiny model, in seconds, on any machine
    python dev/bench_generate.py --script train_medium.py

Greedy unless said otherwise; no text ends early. "step" is one step with everything that the host does, "GPU" the same
steps launched without reading their tokens in between; "equal" is the share of tokens on which the plain path (no
kernels in decoding, no graph, nothing compiled) agrees, and "until" the mean place of the first that differs: a near
tie that rounding decides changes all that follows. Times are medians of 3. The last line is the result as JSON.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path[:1] = [
    str(Path(__file__).resolve().parents[1])
]  # not dev/, whose profile.py would hide Python's own
import torch

from dev import bench

ts = bench.ts
SMOKE = {"num_layers": 4, "width": 64, "head_dim": 16, "mlp_width": 128, "vocab_size": 512, "max_seq_len": 128,
         "no_attention_layers": (2,), "long_layers": (1, 3), "key_offset_layers": (1, 3), "value_embed_layers": (0, 3),
         "bigram_rows": 500, "shared_input_from": 1, "backout_layer": 2, "pack_tokens": 256,
         "stages": ((1.0, 1, 16, 64, 128, 1.0),)}  # fmt: skip


def build(config: ts.Config, device: torch.device) -> ts.GPT:
    """Random weights that use every part of the model, and a head whose choices are not all near ties."""
    model = ts.GPT(config, device, ts.choose_dtype(config, device))
    model.init_weights(0)
    rng = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            scale = 0.02 if name.endswith("_bank") else 1.0 if name in ("embed", "unembed") else 0.1
            param.add_(
                torch.randn(param.shape, generator=rng, device=device).to(param.dtype) * scale
            )
    model.set_stage(ts.stage_attention(config, len(config.stages) - 1))
    model.attention = ts.choose_attention(model)
    return model


def timed(ranks: ts.Ranks, function) -> float:
    """Milliseconds, with the device idle before and after."""
    ranks.sync()
    start = time.perf_counter()
    function()
    ranks.sync()
    return (time.perf_counter() - start) * 1e3


def fill(decoder: ts.Decoder, prompts: list, new: int, **options) -> list[ts.Completion]:
    for row in range(decoder.rows):
        decoder.free(row)
    completions = [ts.Completion(p, new, seed=i, **options) for i, p in enumerate(prompts)]
    decoder.admit(dict(enumerate(completions)))
    return completions


def finish(decoder: ts.Decoder) -> None:
    while decoder.live:
        decoder.step()


def measure(
    model: ts.GPT, tokenizer, prompts: list, new: int, compile: bool, ranks: ts.Ranks
) -> dict:
    """Figures of one batch size."""
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    decoder = ts.Decoder(model, tokenizer, len(prompts), compile=compile)
    greedy, count, prefill, decode = {"temperature": 0.0}, len(prompts) * new, [], []
    ready = timed(ranks, lambda: (fill(decoder, prompts, new, **greedy), decoder.step()))
    for _ in range(3):
        prefill.append(timed(ranks, lambda: fill(decoder, prompts, new, **greedy)))
        completions = list(decoder.live.values())
        decode.append(timed(ranks, lambda: finish(decoder)))
    a, b = statistics.median(prefill), statistics.median(decode)
    row = {"batch": len(prompts), "ready_s": ready / 1e3, "prefill_ms": a, "step_ms": b / new,
           "decode_tokens_per_second": count / b * 1e3, "tokens_per_second": count / (a + b) * 1e3}  # fmt: skip
    if decoder.graphs is not None:
        fill(decoder, prompts, new, **greedy)
        row["gpu_step_ms"] = (
            timed(ranks, lambda: [decoder.graphs[-1].replay() for _ in range(new)]) / new
        )
    fill(decoder, prompts, new, temperature=0.8, top_k=50)
    decoder.step()
    row["sampled_step_ms"] = timed(ranks, lambda: finish(decoder)) / (new - 1)
    row["memory_gib"] = ts.peak_memory_gib(ranks.device)
    decoder = None  # its memory
    kept, ts.use_triton = ts.use_triton, lambda *_: False
    try:
        plain = ts.Decoder(model, tokenizer, len(prompts), graph=False)
        others = fill(plain, prompts, new, **greedy)
        row["plain_step_ms"] = timed(ranks, lambda: finish(plain)) / new
    finally:
        ts.use_triton = kept
    same = torch.tensor([[x == y for x, y in zip(c.tokens, o.tokens, strict=True)]
                         for c, o in zip(completions, others, strict=True)])  # fmt: skip
    row["equal"], row["until"] = (
        same.double().mean().item(),
        same.cumprod(1).sum(1).double().mean().item(),
    )
    return row


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--script", help=f"one of {', '.join(bench.SCRIPTS)} (default {bench.SCRIPTS[0]})"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model, few tokens")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--prompt", type=int, help="tokens (1,024)")
    parser.add_argument("--new", type=int, help="tokens (128)")
    parser.add_argument("--attention", default="auto", help="of the prefill")
    parser.add_argument("--no-compile", action="store_true", help="graphs of the plain operators")
    args = parser.parse_args()
    fields = {field.name for field in dataclasses.fields(ts.Config)}
    tiny = {name: value for name, value in SMOKE.items() if name in fields} if args.smoke else {}
    config = ts.Config(attention=args.attention, **tiny)
    batches = args.batches or ([1, 3] if args.smoke else [1, 32, 128])
    length, new = (
        args.prompt or (50 if args.smoke else 1024),
        args.new or (8 if args.smoke else 128),
    )
    config.validate()
    ranks = ts.start_ranks()
    cuda = ranks.device.type == "cuda"
    compile, model = cuda and not args.no_compile, build(config, ranks.device)
    tokenizer = SimpleNamespace(bos_id=-1, vocab_size=config.vocab_size, specials={})
    rng = torch.Generator().manual_seed(0)
    columns = ("batch", "ready_s", "prefill_ms", "step_ms", "gpu_step_ms", "sampled_step_ms", "plain_step_ms",
               "decode_tokens_per_second", "tokens_per_second", "memory_gib", "equal", "until")  # fmt: skip
    heads = ("batch", "ready s", "prefill ms", "step ms", "GPU ms", "sampled ms", "plain ms", "decode tok/s",
             "all tok/s", "GiB", "equal", "until")  # fmt: skip
    print(
        f"prompt {length:,}, {new:,} new tokens, windows {model.windows}, {model.embed.dtype}, compile {compile}"
    )
    print("".join(f"{head:>13}" for head in heads), flush=True)
    rows = []
    for batch in batches:
        prompts = torch.randint(0, config.vocab_size, (batch, length), generator=rng).tolist()
        rows.append(row := measure(model, tokenizer, prompts, new, compile, ranks))
        print("".join(f"{row.get(name, float('nan')):13,.3f}" for name in columns), flush=True)
    return {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__, "prompt": length,
            "new": new, "dtype": str(model.embed.dtype), "attention": model.attention.__name__, "compile": compile,
            "batches": rows}  # fmt: skip


if __name__ == "__main__":
    sys.exit(bench.run(main))
