# ruff: noqa: E402
"""Speed of a training script on random documents: start-up, steps of each stage, time by section.

    python dev/bench.py                                        the recipe of train_small.py
    python dev/bench.py --script train_medium.py               that of train_medium.py
    python dev/bench.py @runs/b34.args --attention triton      any flags of the script; --steps: timed steps
    torchrun --standalone --nproc_per_node=8 dev/bench.py      several GPUs

Steps are calls of train_step with batches from a PackLoader. The table by section comes from 3 more steps of the last
stage under torch.profiler. The last line is the result as JSON.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]
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
    (r"transpose8|transpose_kernel", "copies"),
    (r"<product>", ""),  # by the sizes of its operands
    (r"embedding|index_put|indexing_backward|index_select", "embeddings"),
    (r"AccumulateGrad|[Mm]emcpy|[Mm]emset|copy_|pin_memory|aten::(fill|zero|full|contiguous|clone)", "copies"),
    (r"elementwise|reduce|rms_norm|norm_rotate|aten::(mul|add|sub|neg|div|sum|mean|pow|rsqrt|sqrt|sigmoid|where|"
     r"masked_fill|cat|flip|relu|square|clamp|index|slice|select|unbind|stack|constant_pad|expand|remainder|bitwise|"
     r"\w*_backward)", "elementwise"),
)  # fmt: skip


@dataclass
class Settings:
    """What a command line asks for."""

    args: argparse.Namespace
    config: ts.Config
    ranks: ts.Ranks


def make_parser(name: str, doc: str, steps: int) -> argparse.ArgumentParser:
    """The flags of the training script; here --steps are measured steps."""
    parser = ts.build_parser()
    parser.add_argument("--script", help=f"one of {', '.join(SCRIPTS)} (default {SCRIPTS[0]})")
    parser.prog = name
    parser.description = doc.splitlines()[0]
    parser.set_defaults(steps=steps)
    for action in parser._actions:
        if action.dest == "steps":
            action.help = f"measured steps (default {steps})"
    return parser


def configure(parser: argparse.ArgumentParser, others: int) -> Settings:
    """Reads the command line; makes the run long enough for --steps and `others` in each stage."""
    args = parser.parse_args()
    if args.steps < 1:
        raise ts.UserError(f"--steps {args.steps} must be at least 1")
    given = argparse.Namespace(**{**vars(args), "steps": None})
    config = ts.make_config(given)
    smallest_share = min(stage.share for stage in config.stage_table)
    num_steps = (args.steps + others + 5) / smallest_share
    tokens = math.ceil(num_steps * config.step_tokens)
    config = dataclasses.replace(config, tokens=tokens, max_epochs=10**6)
    return Settings(args, config, ts.start_ranks())


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
    state.step = bisect.bisect_left(
        range(config.num_steps), index, key=lambda step: ts.stage_index(config, step)
    )
    reader = ts.ShardReader(dataset, config)
    loader = ts.PackLoader(reader, config, state.ranks, first_step=state.step)
    try:
        yield loader.next
    finally:
        loader.close()


class StepTimes:
    """Milliseconds between marks, by the device's own clock where it has one."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks = []

    def mark(self) -> None:
        if not self.cuda:
            self.marks.append(time.perf_counter() * 1e3)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def ms(self) -> list[float]:
        pairs = zip(self.marks[:-1], self.marks[1:], strict=True)
        if self.cuda:
            return [before.elapsed_time(after) for before, after in pairs]
        return [after - before for before, after in pairs]


def time_stage(state: ts.TrainState, dataset, index: int, steps: int, peak: float) -> dict:
    """Speed of a stage. Args: peak FLOP/s of a device"""
    times = StepTimes(state.ranks.device)
    with stage_batches(state, dataset, index) as next_batch:
        for _ in range(UNMEASURED):
            ts.train_step(state, next_batch())
        state.ranks.sync()
        if times.cuda:
            torch.cuda.reset_peak_memory_stats()

        # As in training, nothing waits for the device between steps.
        start = time.perf_counter()
        times.mark()
        for _ in range(steps):
            batch = next_batch()
            loss = ts.train_step(state, batch)
            times.mark()
        state.ranks.sync()
        seconds = time.perf_counter() - start

    loss = loss.item() * state.ranks.world
    if not math.isfinite(loss):  # such a model is faster: its numbers need less power
        raise ts.UserError(
            f"the loss became {loss} in stage {index}; its speed means nothing until that is fixed"
        )
    median, fast, slow = np.percentile(times.ms(), (50, 10, 90))
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
        "memory_gib": ts.peak_memory_gib(state.ranks.device),
        "loss": loss,
    }


@contextlib.contextmanager
def ranges(state: ts.TrainState):
    """Names the parts of a step in a trace; torch names the backward itself."""
    optimizer = state.optimizer
    spots = (
        (state, "forward", "step: forward"),
        (optimizer, "step", "step: optimizer"),
        (ts, "normuon_update", "step: NorMuon"),
        (ts, "update_rows", "step: RMSProp"),
        (optimizer, "update_adam", "step: Adam"),
    )
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
    with (
        stage_batches(state, dataset, index) as next_batch,
        tempfile.TemporaryDirectory() as folder,
    ):
        ts.train_step(state, next_batch())
        ready = [next_batch() for _ in range(steps)]  # else the loader's thread is in the trace
        state.ranks.sync()
        with ranges(state), torch.profiler.profile(record_shapes=True) as profiler:
            for batch in ready:
                ts.train_step(state, batch)
            state.ranks.sync()
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


def classify(
    event: dict, microseconds: float, around: list[dict], config: ts.Config, micro_batch: int
) -> Row:
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


@dataclass
class Events:
    """The events of a trace that matter here."""

    lanes: dict[tuple, list[dict]]  # by process and thread of the host
    launched: dict[int, list[dict]]  # kernels and copies, by the correlation id of their launch


def sort_events(trace: dict) -> Events:
    lanes = collections.defaultdict(list)
    launched = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        kind = event.get("cat")
        if kind in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            lanes[event["pid"], event["tid"]].append(event)
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            launched[event["args"].get("correlation")].append(event)
    return Events(lanes, launched)


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
    events = sort_events(trace)
    rows = []
    if not events.launched:
        for lane in events.lanes.values():
            rows += operators(lane, config, micro_batch)
        return rows

    for lane in events.lanes.values():
        for event, around in nested(lane):
            if event["cat"].startswith("cuda"):
                for kernel in events.launched.pop(event["args"].get("correlation"), ()):
                    rows.append(classify(kernel, kernel["dur"], around, config, micro_batch))
    # What is left was launched outside the trace.
    for group in events.launched.values():
        rows += [classify(kernel, kernel["dur"], [], config, micro_batch) for kernel in group]
    return rows


def operators(lane: list[dict], config: ts.Config, micro_batch: int) -> list[Row]:
    """The operators of a thread of a CPU, with the time that no inner event takes."""
    found = list(nested(lane))
    own = {id(event): event["dur"] for event, _ in found}
    for event, around in found:
        if around:
            own[id(around[-1])] -= event["dur"]
    return [
        classify(event, own[id(event)], around, config, micro_batch)
        for event, around in found
        if event["cat"] == "cpu_op"
    ]


@dataclass
class SectionTable:
    shares: dict[str, float]  # of each section in the time of a step
    step_ms: float
    text: str  # to print


def section_table(rows: list[Row], steps: int) -> SectionTable:
    """Milliseconds of a step by section and phase."""
    times = collections.Counter()
    for row in rows:
        times[row.section, row.phase] += row.microseconds / steps / 1e3
    total = sum(times.values())
    shares = {}
    for name in SECTIONS:
        shares[name] = sum(times[name, phase] for phase in PHASES) / total

    def line(title: str, values: list[float], all_phases: float, share: float) -> str:
        numbers = "".join(f"{value:11.2f}" for value in (*values, all_phases))
        return f"{title:20}{numbers}{share:11.1%}"

    titles = "".join(f"{name:>11}" for name in (*PHASES, "all", "share"))
    lines = [f"{'ms of a step':20}{titles}"]
    for name in sorted(SECTIONS, key=shares.get, reverse=True):
        values = [times[name, phase] for phase in PHASES]
        lines.append(line(name, values, sum(values), shares[name]))
    sums = [sum(times[name, phase] for name in SECTIONS) for phase in PHASES]
    lines.append(line("sum", sums, total, 1))
    return SectionTable(shares, total, "\n".join(lines))


# -- the whole


@dataclass
class Ready:
    """A training state that is warmed up, and how long that took."""

    state: ts.TrainState
    seconds: dict[str, float]


def start_up(settings: Settings, say) -> Ready:
    """Builds the state and warms it up; a second warm-up, with everything compiled, tells what compiling took."""
    imported = time.perf_counter()
    state = ts.build_state(settings.config, settings.ranks, say)
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
    say(
        f"ready after {seconds['ready_seconds']:.1f} s: imports {seconds['import_seconds']:.1f}, "
        f"build {seconds['build_seconds']:.1f}, warm-up {seconds['warm_up_seconds']:.1f}, of which "
        f"compiling {seconds['compile_seconds']:.1f}"
    )
    return Ready(state, seconds)


def time_stages(state: ts.TrainState, dataset, steps: int, say) -> list[dict]:
    peak = ts.peak_flops(state.ranks.device)
    stages = []
    for index in range(len(state.config.stages)):
        row = time_stage(state, dataset, index, steps, peak)
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
        tokens += stage.share * row["tokens"]
        seconds += stage.share * row["tokens"] / row["tokens_per_second"]
    return tokens / seconds


def main() -> dict:
    settings = configure(make_parser("bench.py", __doc__, 30), UNMEASURED + PROFILED)
    config = settings.config
    ranks = settings.ranks
    say = print if ranks.is_main else (lambda text: None)
    ready = start_up(settings, say)
    state = ready.state

    dataset = random_dataset(config)
    stages = time_stages(state, dataset, settings.args.steps, say)
    speed = recipe_speed(config, stages)
    say(f"recipe  | {speed:,.0f} tok/s, stages weighted by their steps")

    last = len(stages) - 1
    own = config.stage_table[last].packs // ranks.world
    micro_batch = ts.largest_divisor(own, state.packs) * config.pack_tokens
    trace = trace_steps(state, dataset, last, PROFILED)
    table = section_table(kernels(trace, config, micro_batch), PROFILED)
    busy = table.step_ms / stages[last]["ms"]
    where = "GPU" if ranks.device.type == "cuda" else "CPU"
    say(f"\n{where} time in a step of stage {last} ({busy:.0%} of the timed step)\n{table.text}")
    say(f"not classified: {table.shares['other']:.1%}")

    name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else ranks.device.type
    return {
        "device": name,
        "world": ranks.world,
        "torch": torch.__version__,
        "dtype": str(state.model.embed.dtype),
        "attention": state.model.attention.__name__,
        "micro_batch_tokens": micro_batch,
        **ready.seconds,
        "tokens_per_second": speed,
        "memory_gib": max(row["memory_gib"] for row in stages),
        "stages": stages,
        "sections": table.shares,
        "busy": busy,
    }


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
