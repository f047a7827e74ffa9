# ruff: noqa: E402
"""Speed of decoding with random weights: prefill, tokens a second, memory, and whether paths agree.

    python dev/bench_generate.py --script train_medium.py             batches of 1, 32, 128; 1,024 + 128 tokens
    python dev/bench_generate.py @runs/tiny.args --prompt 50 --new 8  any flags of the script, any machine

Greedy unless noted; no answer ends early. "step" is one step with all work of the host, "GPU" the same steps launched
without reading their tokens in between. "equal" is the fraction of tokens on which the plain path (no kernels in
decoding, no graph, nothing compiled) agrees, and "until" the mean index of the first that differs: a near tie that
rounding decides changes everything after it. Times are medians of 3. The last line is the result as JSON.
"""

import contextlib
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT), str(ROOT / "runs")]
import engine
import torch
from engine import kernel

from dev import bench

ts = bench.ts


def build(config: ts.Config, device: torch.device) -> ts.GPT:
    """Random weights that use every part of the model; the head's choices are not all near ties."""
    model = ts.GPT(config, device, ts.choose_dtype(config, device))
    model.init_weights(0)
    rng = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            scale = 1.0 if name in ("embed", "unembed") else 0.1
            if name.endswith("_bank"):
                scale = 0.02
            noise = torch.randn(param.shape, generator=rng, device=device).to(param.dtype)
            param.add_(noise * scale)
    model.attention = ts.choose_attention(model)
    return model


def timed(ranks: ts.Ranks, function) -> float:
    """Milliseconds, with the device idle before and after."""
    ranks.sync()
    start = time.perf_counter()
    function()
    ranks.sync()
    return (time.perf_counter() - start) * 1e3


def fill(decoder: engine.Decoder, prompts: list, new: int, **options) -> list[engine.Completion]:
    """Puts new completions of the prompts into all slots."""
    for slot in range(decoder.num_slots):
        decoder.evict(slot)
    completions = [engine.Completion(p, new, seed=i, **options) for i, p in enumerate(prompts)]
    decoder.add_requests(dict(enumerate(completions)))
    return completions


def finish(decoder: engine.Decoder) -> None:
    while decoder.running:
        decoder.step()


@contextlib.contextmanager
def without_kernels():
    """The plain path of the model and of decoding."""
    never = lambda *_: False
    with mock.patch.object(ts, "use_triton", never), mock.patch.object(kernel, "use_triton", never):
        yield


def measure(model, tokenizer, prompts: list, new: int, compile: bool, ranks: ts.Ranks) -> dict:
    """The result of one batch size, by the names of COLUMNS."""
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    decoder = engine.Decoder(model, tokenizer, len(prompts), compile=compile)
    # The first prefill and step, which compile and capture.
    ready = timed(ranks, lambda: (fill(decoder, prompts, new, temperature=0.0), decoder.step()))
    result = {"batch": len(prompts), "ready_s": ready / 1e3}

    # Prefill and greedy steps.
    times = []
    for _ in range(3):
        prefill_ms = timed(ranks, lambda: fill(decoder, prompts, new, temperature=0.0))
        completions = list(decoder.running.values())
        times.append((prefill_ms, timed(ranks, lambda: finish(decoder))))
    prefill_ms, decode_ms = map(statistics.median, zip(*times, strict=True))
    count = len(prompts) * new
    result["prefill_ms"] = prefill_ms
    result["step_ms"] = decode_ms / new
    result["decode_tokens_per_second"] = count / decode_ms * 1e3
    result["tokens_per_second"] = count / (prefill_ms + decode_ms) * 1e3

    # The same steps without the host, and steps that sample.
    if decoder.step_graphs is not None:
        fill(decoder, prompts, new, temperature=0.0)
        graphs = [graph for graph, _ in decoder.step_graphs.recorded.values()]  # of logits, then of greedy ids
        result["gpu_step_ms"] = timed(ranks, lambda: [graph.replay() for graph in graphs * new]) / new
    fill(decoder, prompts, new, temperature=0.8, top_k=50)
    decoder.step()
    result["sampled_step_ms"] = timed(ranks, lambda: finish(decoder)) / (new - 1)
    result["memory_gib"] = ts.peak_memory_gib(ranks.device)

    # The plain path, and where its tokens are the same.
    graphs = decoder = None  # frees their memory
    with without_kernels():
        plain = engine.Decoder(model, tokenizer, len(prompts))
        plain.step_graphs = plain.prefill_graphs = None
        others = fill(plain, prompts, new, temperature=0.0)
        result["plain_step_ms"] = timed(ranks, lambda: finish(plain)) / new
    fast, slow = (torch.tensor([c.tokens for c in batch]) for batch in (completions, others))
    same = (fast == slow).double()
    result["equal"] = same.mean().item()
    result["until"] = same.cumprod(1).sum(1).mean().item()
    return result


# Of a result, and its head in the table.
COLUMNS = {
    "batch": "batch", "ready_s": "ready s", "prefill_ms": "prefill ms",
    "step_ms": "step ms", "gpu_step_ms": "GPU ms", "sampled_step_ms": "sampled ms",
    "plain_step_ms": "plain ms",
    "decode_tokens_per_second": "decode tok/s", "tokens_per_second": "all tok/s",
    "memory_gib": "GiB", "equal": "equal", "until": "until",
}  # fmt: skip


def main() -> dict:
    parser = ts.build_parser()
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--script", help=f"one of {', '.join(bench.SCRIPTS)} (default {bench.SCRIPTS[0]})")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="batch sizes %(default)s")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens per prompt [%(default)s]")
    parser.add_argument("--new", type=int, default=128, help="new tokens per prompt [%(default)s]")
    args = parser.parse_args()
    config = ts.make_config(args)
    ranks = ts.start_ranks()
    cuda = ranks.device.type == "cuda"
    compile = cuda and config.compile
    model = build(config, ranks.device)
    tokenizer = SimpleNamespace(bos_id=-1, vocab_size=config.vocab_size, specials={})

    dtype = str(model.embed.dtype)
    print(f"prompt {args.prompt:,}, {args.new:,} new tokens, windows {model.windows}, {dtype}, compile {compile}")
    print("".join(f"{head:>13}" for head in COLUMNS.values()), flush=True)
    rng = torch.Generator().manual_seed(0)
    results = []
    for batch in args.batches:
        shape = (batch, args.prompt)
        prompts = torch.randint(0, config.vocab_size, shape, generator=rng).tolist()
        results.append(measure(model, tokenizer, prompts, args.new, compile, ranks))
        cells = [results[-1].get(name, float("nan")) for name in COLUMNS]
        print("".join(f"{cell:13,.3f}" for cell in cells), flush=True)
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
        "prompt": args.prompt, "new": args.new, "dtype": dtype, "compile": compile,
        "attention": model.attention.__name__, "batches": results,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(ts.run_command(main))
