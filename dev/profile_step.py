# ruff: noqa: E402
"""Traces training steps with section names; counts graphs, graph breaks and what is compiled after the warm-up.

    python dev/profile_step.py [@runs/b34.args] [flags of train_small.py] [--steps 5] [--out out/profile/trace.json]
    python dev/profile_step.py --script train_medium.py

It prints the kernels that take most of a step, and the sections of dev/bench.py. Open the trace in
https://ui.perfetto.dev; each kernel carries its section. The exit code is 1 if there was a graph break, or if steps and
a validation in each stage compiled anything after the warm-up. torch prints why something was recompiled. The last line
is the result as JSON.
"""

import collections
import dataclasses
import json
import sys
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]
import torch
from torch._dynamo.utils import counters

from dev import bench

ts = bench.ts


def compilations() -> dict[str, int]:
    """How much has been compiled so far: graphs of torch.compile, and variants of the script's Triton kernels."""
    variants = 0
    for value in vars(ts).values():
        for cache in getattr(value, "device_caches", {}).values():
            variants += len(cache[0])
    return {"graphs": counters["stats"]["unique_graphs"], "triton_kernels": variants}


def name_sections(trace: dict, rows: list[bench.Row]) -> None:
    """Adds the section to each event, and a line of sections above the kernels of the GPU."""
    for row in rows:
        event = row.event
        event.setdefault("args", {})["section"] = row.section
        if event["cat"] != "cpu_op":
            section = {"name": row.section, "cat": "section", "args": {"phase": row.phase}}
            trace["traceEvents"].append({**event, **section, "pid": -1})
    title = {"ph": "M", "pid": -1, "name": "process_name", "args": {"name": "sections"}}
    trace["traceEvents"].append(title)


def kernel_table(rows: list[bench.Row], steps: int, count: int) -> str:
    """The kernels that take most of a step."""
    times = collections.Counter()
    calls = collections.Counter()
    for row in rows:
        key = (row.event["name"], row.section, row.phase)
        times[key] += row.microseconds / steps / 1e3
        calls[key] += 1
    lines = [f"{'ms of a step':>12}{'calls':>7}{'us each':>9}  {'section':19}{'phase':10} name"]
    for key, ms in times.most_common(count):
        name, section, phase = key
        number = calls[key] / steps
        each = ms / number * 1e3
        lines.append(f"{ms:12.3f}{number:7.1f}{each:9.1f}  {section:19}{phase:10} {name[:90]}")
    return "\n".join(lines)


def visit_stages(state: ts.TrainState, dataset) -> None:
    """Two steps and a validation in each stage, which should compile nothing."""
    config = state.config
    few = dataclasses.replace(config, val_tokens=2 * state.micro_packs * config.pack_tokens)
    documents = ts.scored_documents(ts.validation_documents(dataset, few), few)
    validation = ts.validation_batch(documents, few, 0)
    ones = torch.ones(config.padded_vocab, dtype=torch.long, device=state.ranks.device)
    for index in range(len(config.stage_table)):
        with bench.stage_batches(state, dataset, index) as next_batch:
            for _ in range(2):
                ts.train_step(state, next_batch())
            ts.bits_per_byte(state.model, validation, state.micro_packs, ones, state.ranks)


def main() -> dict:
    parser = bench.make_parser("profile_step.py", __doc__, 5)
    parser.add_argument("--out", default="out/profile/trace.json", help="file for the trace [%(default)s]")
    args = parser.parse_args()
    config = bench.make_config(args, 5)
    ranks = ts.start_ranks()
    say = print if ranks.is_main else (lambda text: None)
    state = ts.build_state(config, ranks, say)
    ts.warm_up(state, say)
    warm = compilations()
    torch._logging.set_logs(recompiles=True)

    dataset = bench.random_dataset(config)
    visit_stages(state, dataset)
    trace = bench.trace_steps(state, dataset, len(config.stage_table) - 1, args.steps)
    rows = bench.kernels(trace, config, bench.micro_batch_tokens(state))
    fractions, step_ms, table = bench.section_table(rows, args.steps)
    say(f"\n{kernel_table(rows, args.steps, 25)}\n\n{table}\n")
    if ranks.is_main:
        name_sections(trace, rows)
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(trace), encoding="utf-8")
        say(f"trace: {args.out}")

    late = {name: number - warm[name] for name, number in compilations().items()}
    breaks = sum(counters["graph_break"].values())
    recompiles = sum(late.values())
    say(f"compiled: {warm['graphs']} graphs, {warm['triton_kernels']} Triton variants, {breaks} graph breaks")
    say(f"after the warm-up: {late['graphs']} graphs, {late['triton_kernels']} variants (expected 0, 0)")
    for reason, number in counters["graph_break"].items():
        say(f"graph break, {number} times: {reason}")
    return {
        **warm,
        "graph_breaks": breaks,
        "recompiles": recompiles,
        "late": late,
        "step_ms": step_ms,
        "sections": fractions,
        "trace": args.out,
        "failed": bool(breaks or recompiles),
    }


if __name__ == "__main__":
    sys.exit(bench.run(main))
