# ruff: noqa: E402
"""Trace of steps of a training script with section names; counts graphs, graph breaks and recompiles after the warm-up.

    python dev/profile.py [@runs/b34.args] [flags of train_small.py] [--steps 5] [--out out/profile/trace.json]
    python dev/profile.py --script train_medium.py

The trace opens in https://ui.perfetto.dev; every kernel carries its section. The exit code is 1 if there was a graph
break, or if anything was compiled after the warm-up: steps and a validation in every stage are tried. The reasons
of recompiles are printed by torch. The last line is the result as JSON.
"""

import collections
import dataclasses
import json
import sys
from pathlib import Path

sys.path[:1] = [
    str(Path(__file__).resolve().parents[1])
]  # not dev/: this file would hide Python's own profile
import torch
from torch._dynamo.utils import counters

from dev import bench

ts = bench.ts


def compilations() -> dict[str, int]:
    """How much has been compiled so far: graphs of torch.compile, and variants of the Triton kernels of section 7."""
    caches = [c for k in vars(ts).values() for c in getattr(k, "device_caches", {}).values()]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "triton_kernels": sum(len(cache[0]) for cache in caches),
    }


def name_sections(trace: dict, rows: list[tuple]) -> None:
    """Adds the section to every event, and a line of sections above the kernels of the GPU."""
    for event, microseconds, section, phase in rows:
        event.setdefault("args", {})["section"] = section
        if event["cat"] != "cpu_op":
            line = {"ph": "X", "cat": "section", "pid": -1, "tid": event["tid"], "name": section, "ts": event["ts"],
                    "dur": microseconds, "args": {"phase": phase}}  # fmt: skip
            trace["traceEvents"].append(line)
    trace["traceEvents"].append(
        {"ph": "M", "pid": -1, "name": "process_name", "args": {"name": "sections"}}
    )


def kernel_table(rows: list[tuple], steps: int, count: int) -> str:
    times, calls = collections.Counter(), collections.Counter()
    for event, microseconds, section, phase in rows:
        key = event["name"], section, phase
        times[key] += microseconds / steps / 1e3
        calls[key] += 1
    lines = [f"{'ms of a step':>12}{'calls':>7}{'us each':>9}  {'section':19}{'phase':10} name"]
    for (name, section, phase), ms in times.most_common(count):
        number = calls[name, section, phase] / steps
        lines.append(
            f"{ms:12.3f}{number:7.1f}{ms / number * 1e3:9.1f}  {section:19}{phase:10} {name[:90]}"
        )
    return "\n".join(lines)


def main() -> dict:
    parser = bench.make_parser("profile.py", __doc__, 5)
    parser.add_argument(
        "--out", default="out/profile/trace.json", help="default out/profile/trace.json"
    )
    args, config, ranks = bench.configure(parser, 5)
    say = print if ranks.is_main else (lambda text: None)
    state = ts.build_state(config, ranks, say)
    ts.warm_up(state, say)
    warm = compilations()
    torch._logging.set_logs(recompiles=True)
    dataset, last = bench.random_dataset(config), len(config.stages) - 1
    few = dataclasses.replace(config, val_tokens=2 * state.packs * config.pack_tokens)
    validation = ts.validation_batch(dataset, few)
    ones = torch.ones(config.padded_vocab, dtype=torch.long, device=ranks.device)
    for index in range(last + 1):
        with bench.stage_batches(state, dataset, index) as batches:
            for _ in range(2):
                ts.train_step(state, batches())
            ts.bits_per_byte(state.forward, validation, state.packs, ones, ranks)
    trace = bench.trace_steps(state, dataset, last, args.steps)

    rows = bench.kernels(trace, config, state.packs * config.pack_tokens)
    sections, total, table = bench.section_table(rows, args.steps)
    say(f"\n{kernel_table(rows, args.steps, 25)}\n\n{table}\n")
    if ranks.is_main:
        name_sections(trace, rows)
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(trace), encoding="utf-8")
        say(f"trace: {args.out}")
    late = {name: number - warm[name] for name, number in compilations().items()}
    breaks = sum(counters["graph_break"].values())
    say(
        f"compiled: {warm['graphs']} graphs, {warm['triton_kernels']} Triton variants, {breaks} graph breaks"
    )
    say(
        f"after the warm-up: {late['graphs']} graphs, {late['triton_kernels']} variants (expected 0, 0)"
    )
    for reason, number in counters["graph_break"].items():
        say(f"graph break, {number} times: {reason}")
    return {**warm, "graph_breaks": breaks, "recompiles": sum(late.values()), "late": late, "step_ms": total,
            "sections": sections, "trace": args.out, "failed": bool(breaks or sum(late.values()))}  # fmt: skip


if __name__ == "__main__":
    sys.exit(bench.run(main))
