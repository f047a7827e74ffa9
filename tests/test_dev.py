"""The tools in dev/ on a CPU, with the tiny model: they run, and their numbers are sane."""

import json
import os

import pytest
from dev import bench

from commands import sets
from processes import python
from tiny import TINY, TINY_MEDIUM

FLAGS = sets(TINY)
# 192: a width that tells the products of the MLP from others.
MEDIUM = ["--script", "train_medium.py", *sets({**TINY_MEDIUM, "mlp_width": 192})]


@pytest.mark.parametrize("flags", (FLAGS, MEDIUM), ids=("small", "medium"))
def test_bench(flags):
    done = python("dev/bench.py", *flags, "--steps", 2)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["stages"]) == len(TINY["stages"])
    for stage, row in zip(result["stages"], TINY["stages"], strict=True):
        assert stage["tokens"] == row[1] * TINY["pack_tokens"] and stage["tokens_per_second"] > 0 and stage["mfu"] == 0
        assert stage["ms_p10"] <= stage["ms"] <= stage["ms_p90"] and stage["windows"] == [8, 24]
        assert 0 < stage["loss"] < 10
    speeds = [stage["tokens_per_second"] for stage in result["stages"]]
    assert min(speeds) <= result["tokens_per_second"] <= max(speeds)
    sections = result["sections"]
    assert set(sections) == set(bench.SECTIONS) and abs(sum(sections.values()) - 1) < 1e-6
    used = ("attention", "MLP", "qkv and o products", "head and loss", "elementwise", "embeddings", "NorMuon", "Adam")
    assert all(sections[name] > 0 for name in used) and sections["other"] < 0.3
    assert result["ready_seconds"] >= result["import_seconds"] + result["warm_up_seconds"]


def test_trace(tmp_path):
    done = python("dev/bench.py", *FLAGS, "--steps", 2, "--trace", tmp_path / "new" / "trace.json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["recompiles"] == result["graph_breaks"] == 0 and "us each" in done.stdout
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    assert {"NorMuon", "attention"} <= {event.get("args", {}).get("section") for event in events}


@pytest.mark.parametrize(("script", "recipe"), [*zip(bench.SCRIPTS, ("tiny", "cpu_medium"), strict=True)])
def test_bench_generate(script, recipe):
    """Every batch is measured; on a CPU both paths are the same, so every token agrees."""
    sizes = ("--batches", "1", "3", "--prompt", "50", "--new", "8", "--dtype", "float32")
    done = python("dev/bench_generate.py", "--script", script, f"@runs/{recipe}.args", *sizes)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["batch"] for row in result["batches"]] == [1, 3] and result["new"] == 8
    for row in result["batches"]:
        assert row["equal"] == 1 and row["until"] == 8 and row["prefill_ms"] > 0 and row["memory_gib"] > 0
        assert row["decode_tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert 0 < row["tokens_per_second"] < row["decode_tokens_per_second"]


def test_tests_of_a_gpu_need_one():
    """It ends before anything is collected."""
    done = python("-m", "pytest", "-q", "-m", "gpu", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


def event(name, kind, start, length, thread=1, **args):
    return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": length, "pid": 7, "tid": thread, "args": args}


def launched(number, start, name, kernel_us, thread=1):
    """The launch of a kernel, and the kernel, which runs later."""
    return [event("cudaLaunchKernel", "cuda_runtime", start, 1, thread, correlation=number),
            event(name, "kernel", 1000 + start, kernel_us, 99, correlation=number)]  # fmt: skip


def test_sections_of_kernels():
    """GPU kernels are named by what surrounds their launch, products by their sizes."""
    config, mm = bench.ts.Config(), "nvjet_hsh_128x256"
    backward = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    trace = {"traceEvents": [
        event("step: forward", "user_annotation", 0, 100),
        event("aten::mm", "cpu_op", 1, 9, **{"Input Dims": [[8192, 768], [768, 2304], []]}), *launched(1, 2, mm, 10),
        event("aten::mm", "cpu_op", 11, 9, **{"Input Dims": [[8192, 3072], [3072, 768]]}), *launched(2, 12, mm, 20),
        event("decoderstack0::linear_ce", "cpu_op", 21, 20), event("aten::mm", "cpu_op", 22, 9),
        *launched(3, 23, mm, 5),
        *launched(4, 50, "triton_per_fused_add_embedding_mul_0", 3), *launched(5, 60, "attention_forward_kernel", 4),
        event(backward, "cpu_op", 5, 80, 2), *launched(6, 30, "triton_poi_fused_mul_1", 2, 2),
        event("step: optimizer", "user_annotation", 200, 50), event("step: NorMuon", "user_annotation", 210, 20),
        event("decoderstack0::transpose8", "cpu_op", 70, 5), *launched(10, 72, "transpose_kernel", 7),
        *launched(7, 215, "sym_mm_kernel", 6), *launched(8, 240, "Memcpy DtoD", 1), *launched(9, 245, "mystery", 1),
    ]}  # fmt: skip
    rows = {row.event["args"]["correlation"]: (row.microseconds, row.section, row.phase)
            for row in bench.kernels(trace, config, 8192)}  # fmt: skip
    assert rows == {
        1: (10, "qkv and o products", "forward"), 2: (20, "MLP", "forward"), 3: (5, "head and loss", "forward"),
        4: (3, "embeddings", "forward"), 5: (4, "attention", "forward"), 6: (2, "elementwise", "backward"),
        10: (7, "copies", "forward"), 7: (6, "NorMuon", "optimizer"), 8: (1, "copies", "optimizer"),
        9: (1, "other", "optimizer"),
    }  # fmt: skip
