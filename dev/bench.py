# ruff: noqa: E402
"""Speed of a training script on random documents: start-up, steps of each stage, time by section and kernel.

    python dev/bench.py                                        the recipe of train_small.py
    python dev/bench.py --script train_medium.py               that of train_medium.py
    python dev/bench.py @runs/b34.args --attention triton      any flags of the script; --steps: timed steps
    python dev/bench.py --trace out/trace.json                 also the slowest kernels, and a trace
    torchrun --standalone --nproc_per_node=8 dev/bench.py      several GPUs

Steps are calls of train_step with batches from a PackLoader. The table by section comes from 3 more steps of the last
stage under torch.profiler. Open a trace in https://ui.perfetto.dev; each kernel carries its section. The exit code is 1
if there was a graph break, or if steps and a validation in each stage compiled anything after the warm-up; torch prints
why. The last line is the result as JSON.
"""

import time

START = time.perf_counter()

import argparse
import collections
import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]
import numpy as np
import torch
from torch._dynamo.utils import counters

SCRIPTS = ("train_small.py", "train_medium.py")
chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
chooser.add_argument("--script", default=SCRIPTS[0])
script = chooser.parse_known_args()[0].script  # before its own flags can be read
if script not in SCRIPTS:
    sys.exit(f"error: --script {script} is not one of {', '.join(SCRIPTS)}")
ts = importlib.import_module(Path(script).stem)

STEPS = 30  # timed ones of a stage, without --steps
UNMEASURED = 5  # steps before the timed ones of a stage
PROFILED = 3
SLOWEST = 25  # kernels that are printed with a trace
SECTIONS = ("attention", "MLP", "qkv and o products", "head and loss", "elementwise", "embeddings", "NorMuon",
            "RMSProp", "Adam", "communication", "copies", "other")  # fmt: skip
# The first pattern that is found in the name of a kernel, or of an operator around its launch, decides. "elementwise"
# covers norms, rotary embedding, gates and residuals. Where torch.compile merges lookups into them, they count as
# embeddings.
PATTERNS = (
    (r"step: NorMuon", "NorMuon"),
    (r"step: RMSProp", "RMSProp"),
    (r"step: Adam", "Adam"),
    (r"nccl|c10d::", "communication"),
    (r"triton_\w*embedding", "embeddings"),
    (r"triton_(poi|per|red)_", "elementwise"),
    (r"linear_ce|softcap_ce", "head and loss"),
    (r"attention|flash|fmha|varlen", "attention"),
    (r"relu2", "MLP"),
    (r"linear_rotate", "qkv and o products"),
    (r"transpose8|transpose_kernel", "copies"),
    (r"<product>", ""),  # by the sizes of its operands
    (r"embedding|index_put|indexing_backward|index_select", "embeddings"),
    (r"AccumulateGrad|[Mm]emcpy|[Mm]emset|copy_|pin_memory|aten::(fill|zero|full|contiguous|clone)", "copies"),
    (r"elementwise|reduce|rms_norm|norm_rotate|aten::(mul|add|sub|neg|div|sum|mean|pow|rsqrt|sqrt|sigmoid|where|"
     r"masked_fill|cat|flip|relu|square|clamp|index|slice|select|unbind|stack|constant_pad|expand|remainder|bitwise|"
     r"\w*_backward)", "elementwise"),
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The flags of the training script; here --steps are measured steps."""
    parser = ts.build_parser()
    parser.add_argument("--script", help=f"one of {', '.join(SCRIPTS)} (default {SCRIPTS[0]})")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="file for a trace (default: none)")
    parser.description = f"{__doc__.splitlines()[0]} Here --steps are the measured steps ({STEPS})."
    parser.set_defaults(steps=STEPS)
    return parser


def make_config(args: argparse.Namespace) -> ts.Config:
    """The Config of the flags, long enough for all steps in each stage."""
    if args.steps < 1:
        raise ts.UserError(f"--steps {args.steps} must be at least 1")
    config = ts.make_config(argparse.Namespace(**{**vars(args), "steps": None}))
    smallest = min(stage.fraction for stage in config.stage_table)
    num_steps = (args.steps + UNMEASURED + PROFILED + 5) / smallest
    tokens = math.ceil(num_steps * config.step_tokens)
    stages = tuple(dataclasses.astuple(stage) for stage in config.stage_table)  # those of the recipe's own length
    return dataclasses.replace(config, tokens=tokens, stages=stages, max_epochs=10**6)


def random_dataset(config: ts.Config) -> types.SimpleNamespace:
    """What a ShardReader needs of a dataset.

    Documents are lognormal with a mean of 500 tokens; the frequencies of ids follow Zipf's law, 1 / id.
    """
    rng = np.random.default_rng(0)
    most_packs = max(stage.packs for stage in config.stage_table)
    count = max(2**20, 2 * config.pack_tokens * most_packs)
    lengths = rng.lognormal(math.log(500) - 0.5, 1.0, count // 250)
    lengths = np.maximum(2, lengths).astype(int)
    tokens = (config.vocab_size ** rng.random(count)).astype(np.uint16)
    tokens = tokens.clip(1, config.vocab_size - 1)
    ends = np.cumsum(lengths)
    tokens[np.concatenate(([0], ends[ends < count]))] = 0  # the BOS
    return types.SimpleNamespace(
        root="random tokens",
        files=lambda split: [None],
        read=lambda path: tokens,
        tokenizer=types.SimpleNamespace(bos_id=0),
    )


@contextlib.contextmanager
def stage_batches(state: ts.TrainState, dataset, index: int):
    """Enters a stage; yields the function that returns its next batch."""
    config = state.config
    state.step = next(step for step in range(config.num_steps) if ts.stage_index(config, step) == index)
    reader = ts.ShardReader(dataset, config)
    loader = ts.PackLoader(reader, config, state.ranks, first_step=state.step)
    try:
        yield loader.next
    finally:
        loader.close()


def mark(device: torch.device):
    """A moment: an event of a GPU, or seconds of the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(before, after) -> float:
    if isinstance(before, float):
        return 1e3 * (after - before)
    return before.elapsed_time(after)


def time_stage(state: ts.TrainState, dataset, index: int, steps: int, peak: float) -> dict:
    """Speed of a stage. Args: peak FLOP/s of a device"""
    device = state.ranks.device
    with stage_batches(state, dataset, index) as next_batch:
        for _ in range(UNMEASURED):
            ts.train_step(state, next_batch())
        state.ranks.sync()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        # As in training, nothing waits for the device between steps.
        start = time.perf_counter()
        marks = [mark(device)]
        for _ in range(steps):
            batch = next_batch()
            loss = ts.train_step(state, batch)
            marks.append(mark(device))
        state.ranks.sync()
        seconds = time.perf_counter() - start

    loss = loss.item() * state.ranks.world
    if not math.isfinite(loss):  # such a model is faster: its numbers need less power
        raise ts.UserError(f"the loss became {loss} in stage {index}; its speed means nothing until that is fixed")
    times = [milliseconds(before, after) for before, after in itertools.pairwise(marks)]
    fast, median, slow = np.percentile(times, (10, 50, 90))
    speed = steps * batch.total_tokens / seconds
    flops = ts.flops_per_token(state.config, batch.positions)
    return {
        "stage": index,
        "tokens": batch.total_tokens,
        "windows": state.model.windows,
        "ms": median,
        "ms_p10": fast,
        "ms_p90": slow,
        "tokens_per_second": speed,
        "mfu": speed * flops / (peak * state.ranks.world),
        "memory_gib": ts.peak_memory_gib(device),
        "loss": loss,
    }


def validate(state: ts.TrainState, dataset) -> None:
    """A validation of two micro-batches, with the windows of the current stage."""
    config = state.config
    few = dataclasses.replace(config, val_tokens=2 * state.micro_packs * config.pack_tokens)
    documents = ts.scored_documents(ts.validation_documents(dataset, few), few)
    batch = ts.validation_batch(documents, few, 0)
    ones = torch.ones(config.padded_vocab, dtype=torch.long, device=state.ranks.device)
    ts.bits_per_byte(state.model, batch, state.micro_packs, ones, state.ranks)


def compilations() -> dict[str, int]:
    """How much has been compiled so far: graphs of torch.compile, and variants of the script's Triton kernels."""
    variants = 0
    for value in vars(ts).values():
        for cache in getattr(value, "device_caches", {}).values():
            variants += len(cache[0])
    return {"graphs": counters["stats"]["unique_graphs"], "triton_kernels": variants}


@contextlib.contextmanager
def ranges(state: ts.TrainState):
    """Names the parts of a step in a trace; torch names the backward itself."""
    optimizer = state.optimizer
    spots = (
        (state, "forward", "step: forward"),
        (optimizer, "step", "step: optimizer"),
        (ts, "normuon_update", "step: NorMuon"),
        (ts, "rmsprop_update", "step: RMSProp"),
        (optimizer, "update_adam", "step: Adam"),
    )
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in spots:
            named = torch.profiler.record_function(name)(getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, named))
        yield


def trace_steps(state: ts.TrainState, dataset, index: int, steps: int) -> dict:
    """Steps of a stage under the profiler, as a Chrome trace."""
    state.graphs = None  # a trace names only what the host launches
    with stage_batches(state, dataset, index) as next_batch:
        ts.train_step(state, next_batch())
        ready = [next_batch() for _ in range(steps)]  # else the loader's thread is in the trace
        state.ranks.sync()
        with ranges(state), torch.profiler.profile(record_shapes=True) as profiler:
            for batch in ready:
                ts.train_step(state, batch)
            state.ranks.sync()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))


# -- sections of a trace


@dataclass
class Row:
    """A kernel in a trace, or an operator on a CPU."""

    event: dict
    microseconds: float  # its own, without what it calls
    section: str
    phase: str  # of the step: forward, backward or optimizer


PHASES = ("forward", "backward", "optimizer")
PRODUCT = re.compile(r"aten::(mm|addmm|bmm|matmul|linear|_scaled_mm)")


def phase_of(text: str) -> str:
    if "step: optimizer" in text:
        return "optimizer"
    if "autograd::engine" in text:
        return "backward"
    return "forward"


def section_of_product(shapes: list, config: ts.Config, micro_batch: int) -> str:
    """The section of a matrix product, by the sizes of its operands."""
    sizes = set()
    for shape in shapes:
        if isinstance(shape, list):
            sizes |= {size for size in shape if isinstance(size, int)}
    sizes -= {micro_batch}
    if config.padded_vocab in sizes:
        return "head and loss"
    if config.gate_width in sizes:
        return "elementwise"
    if config.mlp_width in sizes:
        return "MLP"
    return "qkv and o products"


def classify(event: dict, microseconds: float, around: list, config, micro_batch: int) -> Row:
    """A kernel with its section and phase; `around` are the operators around its launch, outermost first."""
    operators = [*around, event]
    text = " ".join(operator["name"] for operator in operators)
    phase = phase_of(text)
    shapes = None
    for operator in operators:
        if PRODUCT.fullmatch(operator["name"]):
            shapes = operator.get("args", {}).get("Input Dims") or shapes
    if shapes:
        text += " <product>"

    section = "other"
    for pattern, name in PATTERNS:
        if re.search(pattern, text):
            section = name or section_of_product(shapes, config, micro_batch)
            break
    return Row(event, microseconds, section, phase)


def nested(lane: list[dict]) -> Iterator[tuple[dict, list[dict]]]:
    """Each event of a thread in order, with the events around it, outermost first."""
    around = []
    for event in sorted(lane, key=lambda e: (e["ts"], -e["dur"])):
        while around and event["ts"] >= around[-1]["ts"] + around[-1]["dur"]:
            around.pop()
        yield event, list(around)
        around.append(event)


def kernels(trace: dict, config: ts.Config, micro_batch: int) -> list[Row]:
    """Every kernel of a trace; every operator if the trace has no kernels."""
    lanes = collections.defaultdict(list)  # events by process and thread of the host
    launched = collections.defaultdict(list)  # kernels and copies by the id of their launch
    for event in trace["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") != "X":
            continue
        if kind in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            lanes[event["pid"], event["tid"]].append(event)
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            launched[event["args"].get("correlation")].append(event)

    rows = []
    if not launched:
        for lane in lanes.values():
            rows += operators(lane, config, micro_batch)
        return rows

    for lane in lanes.values():
        for event, around in nested(lane):
            if event["cat"].startswith("cuda"):
                for kernel in launched.pop(event["args"].get("correlation"), ()):
                    rows.append(classify(kernel, kernel["dur"], around, config, micro_batch))
    # What is left was launched outside the trace.
    for kernel in itertools.chain.from_iterable(launched.values()):
        rows.append(classify(kernel, kernel["dur"], [], config, micro_batch))
    return rows


def operators(lane: list[dict], config: ts.Config, micro_batch: int) -> list[Row]:
    """The operators of a thread of a CPU, with the time that no inner event takes."""
    found = list(nested(lane))
    own = {id(event): event["dur"] for event, _ in found}
    for event, around in found:
        if around:
            own[id(around[-1])] -= event["dur"]

    rows = []
    for event, around in found:
        if event["cat"] == "cpu_op":
            rows.append(classify(event, own[id(event)], around, config, micro_batch))
    return rows


def section_table(rows: list[Row], steps: int) -> tuple[dict[str, float], float, str]:
    """(fraction of each section in the time of a step, its milliseconds, a table of both by phase to print)."""
    times = collections.Counter()
    for row in rows:
        ms = row.microseconds / steps / 1e3
        for section in (row.section, "sum"):
            times[section, row.phase] += ms
            times[section, "all"] += ms
    total = times["sum", "all"]
    fractions = {name: times[name, "all"] / total for name in (*SECTIONS, "sum")}

    columns = (*PHASES, "all")
    titles = "".join(f"{name:>11}" for name in (*columns, "fraction"))
    lines = [f"{'ms of a step':20}{titles}"]
    for name in (*sorted(SECTIONS, key=fractions.get, reverse=True), "sum"):
        numbers = "".join(f"{times[name, column]:11.2f}" for column in columns)
        lines.append(f"{name:20}{numbers}{fractions[name]:11.1%}")
    del fractions["sum"]
    return fractions, total, "\n".join(lines)


def kernel_table(rows: list[Row], steps: int) -> str:
    """The kernels that take most of a step."""
    times = collections.Counter()
    calls = collections.Counter()
    for row in rows:
        key = (row.event["name"], row.section, row.phase)
        times[key] += row.microseconds / steps / 1e3
        calls[key] += 1
    lines = [f"{'ms of a step':>12}{'calls':>7}{'us each':>9}  {'section':19}{'phase':10} name"]
    for key, ms in times.most_common(SLOWEST):
        name, section, phase = key
        number = calls[key] / steps
        each = ms / number * 1e3
        lines.append(f"{ms:12.3f}{number:7.1f}{each:9.1f}  {section:19}{phase:10} {name[:90]}")
    return "\n".join(lines)


def write_trace(path: Path, trace: dict, rows: list[Row]) -> None:
    """Writes a trace with the section of each event, and a line of sections above the kernels of the GPU."""
    for row in rows:
        event = row.event
        event.setdefault("args", {})["section"] = row.section
        if event["cat"] != "cpu_op":
            section = {"name": row.section, "cat": "section", "args": {"phase": row.phase}}
            trace["traceEvents"].append({**event, **section, "pid": -1})
    title = {"ph": "M", "pid": -1, "name": "process_name", "args": {"name": "sections"}}
    trace["traceEvents"].append(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace), encoding="utf-8")


# -- the whole


def start_up(config: ts.Config, ranks: ts.Ranks, say) -> tuple[ts.TrainState, dict]:
    """The state, warmed up, and the seconds that took; a second warm-up tells what compiling took."""
    imported = time.perf_counter()
    state = ts.build_state(config, ranks, say)
    built = time.perf_counter()
    ts.warm_up(state, say)
    ready = time.perf_counter()
    ts.warm_up(state, lambda text: None)
    again = time.perf_counter() - ready
    seconds = {
        "import_seconds": imported - START,
        "build_seconds": built - imported,
        "warm_up_seconds": ready - built,
        "compile_seconds": max(0.0, ready - built - again),
        "ready_seconds": ready - START,
    }
    text = "ready after {ready_seconds:.1f} s: imports {import_seconds:.1f}, build {build_seconds:.1f}, "
    text += "warm-up {warm_up_seconds:.1f}, of which compiling {compile_seconds:.1f}"
    say(text.format(**seconds))
    return state, seconds


def micro_batch_tokens(state: ts.TrainState) -> int:
    """Of the last stage."""
    own = state.config.stage_table[-1].packs // state.ranks.world
    return ts.largest_divisor(own, state.micro_packs) * state.config.pack_tokens


def time_stages(state: ts.TrainState, dataset, steps: int, say) -> list[dict]:
    peak = ts.peak_flops(state.ranks.device)
    stages = []
    for index in range(len(state.config.stage_table)):
        row = time_stage(state, dataset, index, steps, peak)
        validate(state, dataset)
        stages.append(row)
        say(
            f"stage {index} | {row['tokens']:,} tokens, windows {row['windows']} | {row['ms']:.1f} ms "
            f"({row['ms_p10']:.1f} to {row['ms_p90']:.1f}) | {row['tokens_per_second']:,.0f} tok/s "
            f"| mfu {row['mfu']:.1%} | {row['memory_gib']:.1f} GiB | loss {row['loss']:.3f}"
        )
    return stages


def recipe_speed(config: ts.Config, stages: list[dict]) -> float:
    """Tokens per second of the whole recipe."""
    tokens = 0.0
    seconds = 0.0
    for stage, row in zip(config.stage_table, stages, strict=True):
        tokens += stage.fraction * row["tokens"]
        seconds += stage.fraction * row["tokens"] / row["tokens_per_second"]
    return tokens / seconds


def main() -> dict:
    args = build_parser().parse_args()
    config = make_config(args)
    ranks = ts.start_ranks()
    say = print if ranks.is_main else (lambda text: None)
    state, seconds = start_up(config, ranks, say)
    warm = compilations()
    torch._logging.set_logs(recompiles=True)

    dataset = random_dataset(config)
    stages = time_stages(state, dataset, args.steps, say)
    speed = recipe_speed(config, stages)
    say(f"recipe  | {speed:,.0f} tok/s, stages weighted by their steps")

    last = len(stages) - 1
    micro_batch = micro_batch_tokens(state)
    trace = trace_steps(state, dataset, last, PROFILED)
    rows = kernels(trace, config, micro_batch)
    fractions, step_ms, table = section_table(rows, PROFILED)
    busy = step_ms / stages[last]["ms"]
    on_gpu = ranks.device.type == "cuda"
    say(f"\n{'GPU' if on_gpu else 'CPU'} time in a step of stage {last} ({busy:.0%} of the timed step)\n{table}")
    if args.trace and ranks.is_main:
        say(f"\n{kernel_table(rows, PROFILED)}\ntrace: {args.trace}")
        write_trace(args.trace, trace, rows)

    recompiles = sum(compilations().values()) - sum(warm.values())
    breaks = sum(counters["graph_break"].values())
    say(f"compiled: {warm['graphs']} graphs, {warm['triton_kernels']} Triton variants, {breaks} graph breaks")
    say(f"compiled after the warm-up: {recompiles} (expected 0)")
    for reason, number in counters["graph_break"].items():
        say(f"graph break, {number} times: {reason}")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else ranks.device.type,
        "world": ranks.world,
        "torch": torch.__version__,
        "dtype": str(state.model.embed.dtype),
        "attention": state.model.attention.__name__,
        "micro_batch_tokens": micro_batch,
        **seconds,
        "tokens_per_second": speed,
        "memory_gib": max(row["memory_gib"] for row in stages),
        "stages": stages,
        "sections": fractions,
        "busy": busy,
        "graph_breaks": breaks,
        "recompiles": recompiles,
        "failed": bool(breaks or recompiles),
    }


def run() -> int:
    """Prints the result as the last line; returns the exit code."""
    result = {}

    def bench() -> dict:
        result.update(main())
        return result

    code = ts.run_command(bench)
    return code or int(result["failed"])


if __name__ == "__main__":
    sys.exit(run())
