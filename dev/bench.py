# ruff: noqa: E402
"""Speed of a training script on random documents: start-up, steps of every stage, where a step's time goes.

    python dev/bench.py                                        the recipe of train_small.py
    python dev/bench.py --script train_medium.py               that of the medium model
    python dev/bench.py @runs/b34.args --attention triton      any flags of the script; --steps are timed ones
    torchrun --standalone --nproc_per_node=8 dev/bench.py      several GPUs

Steps are train_step with batches of PackLoader. The table by section comes from 3 more steps of the last stage under
torch.profiler. The last line is the result as JSON.
"""

import time

START = time.perf_counter()

import argparse
import bisect
import collections
import contextlib
import dataclasses
import importlib
import json
import math
import re
import sys
import tempfile
import types
from pathlib import Path

sys.path[:1] = [
    str(Path(__file__).resolve().parents[1])
]  # not dev/, whose profile.py would hide Python's own
import numpy as np
import torch

SCRIPTS = ("train_small.py", "train_medium.py")
chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
chooser.add_argument("--script", default=SCRIPTS[0])
script = chooser.parse_known_args()[0].script  # before its own flags can be read
if script not in SCRIPTS:
    sys.exit(f"error: --script {script} is none of {', '.join(SCRIPTS)}")
ts = importlib.import_module(Path(script).stem)

UNMEASURED = 5  # steps before the timed ones of a stage
PROFILED = 3
SECTIONS = ("attention", "MLP", "qkv and o products", "head and loss", "elementwise", "embeddings", "NorMuon", "Adam",
            "communication", "copies", "other")  # fmt: skip
# The first pattern found in the name of a kernel or of an operator around its launch decides. "elementwise" are norms,
# rotary embedding, gates and residuals; torch.compile merges lookups into them, then they count as embeddings.
PATTERNS = (
    (r"step: NorMuon", "NorMuon"),
    (r"step: Adam", "Adam"),
    (r"nccl|c10d::", "communication"),
    (r"triton_\w*embedding", "embeddings"),
    (r"triton_(poi|per|red)_", "elementwise"),
    (r"linear_ce|softcap_ce", "head and loss"),
    (r"attention|flash|fmha|varlen", "attention"),
    (r"relu2", "MLP"),
    (r"transpose8|transpose_kernel", "copies"),
    (r"<product>", ""),  # by the sizes of its operands
    (r"embedding|index_put|indexing_backward|index_select", "embeddings"),
    (r"AccumulateGrad|[Mm]emcpy|[Mm]emset|copy_|pin_memory|aten::(fill|zero|full|contiguous|clone)", "copies"),
    (r"elementwise|reduce|rms_norm|norm_rotate|aten::(mul|add|sub|neg|div|sum|mean|pow|rsqrt|sqrt|sigmoid|where|"
     r"masked_fill|cat|flip|relu|square|clamp|index|slice|select|unbind|stack|constant_pad|expand|remainder|bitwise|"
     r"\w*_backward)", "elementwise"),
)  # fmt: skip


def make_parser(name: str, doc: str, steps: int) -> argparse.ArgumentParser:
    """The flags of the training script; --steps are measured ones here."""
    parser = ts.build_parser()
    parser.add_argument("--script", help=f"one of {', '.join(SCRIPTS)} (default {SCRIPTS[0]})")
    parser.prog, parser.description = name, doc.splitlines()[0]
    parser.set_defaults(steps=steps)
    next(a for a in parser._actions if a.dest == "steps").help = f"measured steps (default {steps})"
    return parser


def configure(parser: argparse.ArgumentParser, others: int):
    """Arguments, Config and Ranks of a command line; the run is as long as --steps and others in every stage need."""
    args = parser.parse_args()
    if args.command != "pretrain" or args.steps < 1:
        raise ts.UserError(f"needs --steps of at least 1 and no command; see {parser.prog} --help")
    config = ts.make_config(argparse.Namespace(**{**vars(args), "steps": None}))
    mean = sum(s.share * s.packs for s in config.stage_table) * config.pack_tokens
    tokens = math.ceil((args.steps + others + 5) / min(s.share for s in config.stage_table) * mean)
    return args, dataclasses.replace(config, tokens=tokens, max_epochs=10**6), ts.start_ranks()


def random_dataset(config: ts.Config) -> types.SimpleNamespace:
    """What PackLoader needs of a dataset: lognormal documents of 500 tokens on average, ids as frequent as in text."""
    rng = np.random.default_rng(0)
    count = max(2**20, 2 * config.pack_tokens * max(stage.packs for stage in config.stage_table))
    lengths = np.maximum(2, rng.lognormal(math.log(500) - 0.5, 1.0, count // 250)).astype(int)
    tokens = (
        (config.vocab_size ** rng.random(count)).astype(np.uint16).clip(1, config.vocab_size - 1)
    )  # Zipf: 1 / id
    ends = np.cumsum(lengths)
    tokens[np.concatenate(([0], ends[ends < count]))] = 0
    return types.SimpleNamespace(root="random tokens", files=lambda split: [None], read=lambda path: tokens,
                                 tokenizer=types.SimpleNamespace(bos_id=0))  # fmt: skip


@contextlib.contextmanager
def stage_batches(state: ts.TrainState, dataset, index: int):
    """Enters a stage; gives the function that returns its next batch."""
    config = state.config
    state.step = bisect.bisect_left(
        range(config.num_steps), index, key=lambda step: ts.stage_index(config, step)
    )
    state.model.set_stage(ts.stage_attention(config, index))
    loader = ts.PackLoader(dataset, config, state.ranks, first_step=state.step)
    try:
        yield loader.next
    finally:
        loader.close()


def time_stage(state: ts.TrainState, dataset, index: int, steps: int, peak: float) -> dict:
    cuda = state.ranks.device.type == "cuda"
    marks = []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter() * 1e3)
        if cuda:
            marks[-1].record()

    with stage_batches(state, dataset, index) as batches:
        for _ in range(UNMEASURED):
            ts.train_step(state, batches())
        state.ranks.sync()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        mark()
        for _ in range(steps):  # without waiting for the device in between, as in training
            batch = batches()
            loss = ts.train_step(state, batch)
            mark()
        state.ranks.sync()
        seconds = time.perf_counter() - start
    pairs = zip(marks[:-1], marks[1:], strict=True)
    ms = np.percentile([a.elapsed_time(b) if cuda else b - a for a, b in pairs], (50, 10, 90))
    speed = steps * batch.total_tokens / seconds
    flops = ts.flops_per_token(state.config, state.model.windows, batch.positions)
    return {
        "stage": index, "tokens": batch.total_tokens, "windows": state.model.windows, "ms": ms[0], "ms_p10": ms[1],
        "ms_p90": ms[2], "tokens_per_second": speed, "mfu": speed * flops / (peak * state.ranks.world),
        "memory_gib": ts.peak_memory_gib(state.ranks.device), "loss": loss.item() * state.ranks.world,
    }  # fmt: skip


@contextlib.contextmanager
def ranges(state: ts.TrainState):
    """Names the parts of a step in a trace; the backward is named by torch."""
    optimizer = state.optimizer
    spots = ((state, "forward", "step: forward"), (optimizer, "step", "step: optimizer"),
             (optimizer, "normuon_update", "step: NorMuon"), (optimizer, "adam_update", "step: Adam"))  # fmt: skip
    kept = [getattr(owner, attribute) for owner, attribute, _ in spots]

    def named(name, function):
        def call(*args, **kwargs):
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return call

    try:
        for (owner, attribute, name), function in zip(spots, kept, strict=True):
            setattr(owner, attribute, named(name, function))
        yield
    finally:
        for (owner, attribute, _), function in zip(spots, kept, strict=True):
            setattr(owner, attribute, function)


def trace_steps(state: ts.TrainState, dataset, index: int, steps: int) -> dict:
    """Steps of a stage under the profiler, as a Chrome trace."""
    state.graphs = None  # a trace names only what the host launches
    with stage_batches(state, dataset, index) as batches, tempfile.TemporaryDirectory() as folder:
        ts.train_step(state, batches())
        ready = [batches() for _ in range(steps)]  # the loader's thread would stand in the trace
        state.ranks.sync()
        with ranges(state), torch.profiler.profile(record_shapes=True) as profiler:
            for batch in ready:
                ts.train_step(state, batch)
            state.ranks.sync()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))


def classify(
    event: dict, around: list[dict], config: ts.Config, micro_batch: int
) -> tuple[str, str]:
    """(section, phase) of a kernel; `around` are the operators around its launch, outermost first."""
    text, product = " ".join(e["name"] for e in (*around, event)), None
    phase = (
        "optimizer"
        if "step: optimizer" in text
        else "backward"
        if "autograd::engine" in text
        else "forward"
    )
    for operator in (*around, event):
        if re.fullmatch(r"aten::(mm|addmm|bmm|matmul|linear|_scaled_mm)", operator["name"]):
            product = operator.get("args", {}).get("Input Dims") or product
    text += " <product>" if product else ""
    section = next((name for pattern, name in PATTERNS if re.search(pattern, text)), "other")
    if not section:
        sizes = {
            n
            for shape in product
            for n in (shape if isinstance(shape, list) else [])
            if isinstance(n, int)
        }
        known = (
            (config.padded_vocab, "head and loss"),
            (config.gate_width, "elementwise"),
            (config.mlp_width, "MLP"),
        )
        section = next(
            (name for size, name in known if size in sizes - {micro_batch}), "qkv and o products"
        )
    return section, phase


def kernels(trace: dict, config: ts.Config, micro_batch: int) -> list[tuple[dict, float, str, str]]:
    """(event, its own microseconds, section, phase) of every kernel; of every operator if the trace has no kernels."""
    lanes, launched, result = collections.defaultdict(list), collections.defaultdict(list), []
    for event in trace["traceEvents"]:
        kind = event.get("cat") if event.get("ph") == "X" else None
        if kind in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            lanes[event["pid"], event["tid"]].append(event)
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            launched[event["args"].get("correlation")].append(event)
    on_gpu = bool(launched)
    for lane in lanes.values():
        around, own = [], {}
        for event in sorted(lane, key=lambda e: (e["ts"], -e["dur"])):
            while around and event["ts"] >= around[-1]["ts"] + around[-1]["dur"]:
                around.pop()
            if on_gpu and event["cat"].startswith("cuda"):
                for kernel in launched.pop(event["args"].get("correlation"), ()):
                    result.append(
                        (kernel, kernel["dur"], *classify(kernel, around, config, micro_batch))
                    )
            elif not on_gpu:
                own[id(event)] = [event, event["dur"], list(around)]
                if around:
                    own[id(around[-1])][1] -= event["dur"]
            around.append(event)
        result += [(event, left, *classify(event, outer, config, micro_batch)) for event, left, outer in own.values()
                   if event["cat"] == "cpu_op"]  # fmt: skip
    unknown = (
        kernel for group in launched.values() for kernel in group
    )  # whose launch is not in the trace
    return result + [
        (kernel, kernel["dur"], *classify(kernel, [], config, micro_batch)) for kernel in unknown
    ]


def section_table(rows: list[tuple], steps: int) -> tuple[dict, float, str]:
    """(share of each section, ms of a step, printable table)."""
    times = collections.Counter()
    for _, microseconds, section, phase in rows:
        times[section, phase] += microseconds / steps / 1e3
    total, phases = sum(times.values()), ("forward", "backward", "optimizer")
    lines = [f"{'ms of a step':20}" + "".join(f"{name:>11}" for name in (*phases, "all", "share"))]
    shares = {name: sum(times[name, phase] for phase in phases) / total for name in SECTIONS}
    for name in sorted(SECTIONS, key=shares.get, reverse=True):
        values = [times[name, phase] for phase in phases]
        lines.append(
            f"{name:20}"
            + "".join(f"{v:11.2f}" for v in (*values, sum(values)))
            + f"{shares[name]:11.1%}"
        )
    sums = [sum(times[name, phase] for name in SECTIONS) for phase in phases]
    lines.append(f"{'sum':20}" + "".join(f"{v:11.2f}" for v in (*sums, total)) + f"{1:11.1%}")
    return shares, total, "\n".join(lines)


def main() -> dict:
    args, config, ranks = configure(make_parser("bench.py", __doc__, 30), UNMEASURED + PROFILED)
    say = print if ranks.is_main else (lambda text: None)
    imported = time.perf_counter()
    state = ts.build_state(config, ranks, say)
    built = time.perf_counter()
    ts.warm_up(state, say)
    ready = time.perf_counter()
    ts.warm_up(state, lambda text: None)  # again, with everything compiled
    compiling = max(0.0, ready - built - (time.perf_counter() - ready))
    start = {"import_seconds": imported - START, "build_seconds": built - imported, "warm_up_seconds": ready - built,
             "compile_seconds": compiling, "ready_seconds": ready - START}  # fmt: skip
    say(f"ready after {ready - START:.1f} s: imports {imported - START:.1f}, build {built - imported:.1f}, "
        f"warm-up {ready - built:.1f}, of which compiling {compiling:.1f}")  # fmt: skip

    dataset, peak = random_dataset(config), ts.peak_flops(ranks.device, state.model.embed.dtype)
    stages = []
    for index in range(len(config.stages)):
        stages.append(row := time_stage(state, dataset, index, args.steps, peak))
        say(f"stage {index} | {row['tokens']:,} tokens, windows {row['windows']} | {row['ms']:.1f} ms "
            f"({row['ms_p10']:.1f} to {row['ms_p90']:.1f}) | {row['tokens_per_second']:,.0f} tok/s "
            f"| mfu {row['mfu']:.1%} | {row['memory_gib']:.1f} GiB | loss {row['loss']:.3f}")  # fmt: skip
    shares = [stage.share for stage in config.stage_table]
    seconds = sum(
        share * row["tokens"] / row["tokens_per_second"]
        for share, row in zip(shares, stages, strict=True)
    )
    speed = sum(share * row["tokens"] for share, row in zip(shares, stages, strict=True)) / seconds
    say(f"recipe  | {speed:,.0f} tok/s, stages weighted by their steps")

    trace = trace_steps(state, dataset, len(config.stages) - 1, PROFILED)
    sections, total, table = section_table(
        kernels(trace, config, state.packs * config.pack_tokens), PROFILED
    )
    busy, where = total / stages[-1]["ms"], "GPU" if ranks.device.type == "cuda" else "CPU"
    say(f"\nwhere a step of stage {len(stages) - 1} spends {where} time ({busy:.0%} of the timed step)\n{table}\n"
        f"not classified: {sections['other']:.1%}")  # fmt: skip
    name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else ranks.device.type
    return {
        "device": name, "world": ranks.world, "torch": torch.__version__, "dtype": str(state.model.embed.dtype),
        "attention": state.model.attention.__name__, "micro_batch_tokens": state.packs * config.pack_tokens, **start,
        "tokens_per_second": speed, "memory_gib": max(row["memory_gib"] for row in stages), "stages": stages,
        "sections": sections, "busy": busy,
    }  # fmt: skip


def run(command) -> int:
    """Prints the result of a command as the last line; returns its exit code."""
    try:
        result = command()
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(json.dumps(result), flush=True)
        return int(result.get("failed", False))
    except ts.UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run(main))
