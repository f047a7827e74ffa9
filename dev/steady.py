# ruff: noqa: E402
"""Whether a long run stays as it began: time of each step, gaps between steps, memory, compilations.

    python dev/steady.py @runs/tiny.args                                            a toy on a CPU
    python dev/steady.py @runs/b34.args --tokens 450000000 --set max_epochs=14 --set bigram_rows=163840
                                                                                    8 minutes on an H200

It trains with the flags of train_small.py and looks at each step with events of the device. Steps after a validation
or a save begin with a wait and are left out. The last line is the result as JSON; the exit code is 1 if memory grew,
if something was compiled after the warm-up, or if the 99th percentile of a stage is above 1.2 times its median.
"""

import mmap
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]
import numpy as np
import torch
from torch._dynamo.utils import counters

from dev import bench

ts = bench.ts

SAMPLE_EVERY = 20  # steps between looks at the memory
GROWTH = 1.02  # of memory, from the end of the first tenth to the end of the run
SPREAD = 1.2  # of step times: 99th percentile by median


@dataclass
class Step:
    """Marks are events of the device, or seconds on a CPU."""

    stage: int
    begin: object
    end: object
    follows: bool  # another step directly, without a validation or a save between them


@dataclass
class Memory:
    """In GiB."""

    step: int
    host: float
    device: float


class Watcher:
    """Stands between the loop and its functions train_step, evaluate and save."""

    def __init__(self):
        self.steps = []
        self.memory = []
        self.graphs = 0  # compiled before the first step of the loop
        self.interrupted = True
        self.train_step = ts.train_step
        self.prepare_loop = ts.prepare_loop
        self.evaluate = ts.evaluate
        self.save = ts.save
        ts.prepare_loop = self.watch

    def watch(self, run) -> None:
        """After the warm-up, which calls train_step too."""
        self.prepare_loop(run)
        self.graphs = counters["stats"]["unique_graphs"]
        ts.train_step = self.timed_step
        ts.evaluate = self.interrupting(self.evaluate)
        ts.save = self.interrupting(self.save)

    def interrupting(self, function):
        def call(run):
            self.interrupted = True
            return function(run)

        return call

    def timed_step(self, state, batch):
        stage = ts.stage_index(state.config, state.step)
        begin = mark(state.ranks.device)
        loss = self.train_step(state, batch)
        end = mark(state.ranks.device)
        self.steps.append(Step(stage, begin, end, not self.interrupted))
        self.interrupted = False
        if state.step % SAMPLE_EVERY == 0:
            self.memory.append(Memory(state.step, host_gib(), device_gib(state.ranks.device)))
        return loss


def mark(device: torch.device):
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(before, after) -> float:
    if isinstance(before, float):
        return (after - before) * 1e3
    return before.elapsed_time(after)


def host_gib() -> float:
    """What this process holds now, or the most so far where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE / 2**30
    except OSError:
        return ts.peak_memory_gib(torch.device("cpu"))


def device_gib(device: torch.device) -> float:
    return torch.cuda.memory_reserved(device) / 2**30 if device.type == "cuda" else 0.0


def describe(watcher: Watcher) -> dict:
    """The figures of a run, and whether one of them is not as it should be."""
    stages = {}
    gaps = 0.0
    total = 0.0
    for before, step in zip(watcher.steps[:-1], watcher.steps[1:], strict=True):
        if step.follows:
            ms = milliseconds(before.end, step.end)
            stages.setdefault(step.stage, []).append(ms)
            gaps += max(milliseconds(before.end, step.begin), 0.0)
            total += ms

    rows = []
    for stage, times in sorted(stages.items()):
        median = statistics.median(times)
        p99 = float(np.percentile(times, 99))
        row = {"stage": stage, "steps": len(times), "median_ms": median, "p99_ms": p99}
        rows.append({**row, "longest_ms": max(times), "p99_by_median": p99 / median})

    early = watcher.memory[len(watcher.memory) // 10]
    late = watcher.memory[-1]
    compiled = counters["stats"]["unique_graphs"] - watcher.graphs
    grew = late.host > early.host * GROWTH or late.device > early.device * GROWTH
    uneven = any(row["p99_by_median"] > SPREAD for row in rows)
    return {
        "stages": rows,
        "idle_between_steps": gaps / total,
        "host_gib": [early.host, late.host],
        "device_gib": [early.device, late.device],
        "compiled_after_warm_up": compiled,
        "failed": bool(grew or uneven or compiled),
    }


def main() -> dict:
    parser = ts.build_parser()
    parser.prog = "steady.py"
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--script", help=f"one of {', '.join(bench.SCRIPTS)}")
    args = parser.parse_args()
    args.flags = sys.argv[1:]
    config = ts.make_config(args)
    if config.num_steps < SAMPLE_EVERY:
        raise ts.UserError(f"{config.num_steps} steps are too few; use at least {SAMPLE_EVERY}")
    watcher = Watcher()
    result = ts.train(config, args)
    result.update(describe(watcher))
    for row in result["stages"]:
        print(
            "stage {stage}: {steps:,} steps, median {median_ms:.2f} ms, 99 % below {p99_ms:.2f} ms "
            "({p99_by_median:.3f}), longest {longest_ms:.2f} ms".format(**row)
        )
    print(f"the device waited between steps for {result['idle_between_steps']:.2%} of the time")
    for name in ("host_gib", "device_gib"):
        early, late = result[name]
        print(f"{name}: {early:.3f} after a tenth of the run, {late:.3f} at its end")
    print(f"compiled after the warm-up: {result['compiled_after_warm_up']}")
    return result


if __name__ == "__main__":
    sys.exit(bench.run(main))
