"""Scripts of the medium model: fits of scaling series on a known law, a tiny real series, the steps of the speedrun."""

import csv
import itertools
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import train_medium as tm

from commands import sets
from processes import python
from tiny import ROOT

# bpb = FLOOR + A / N ** ALPHA + B / D ** BETA: best sizes grow with FLOPs ** (BETA / (ALPHA + BETA)), tokens with the
# rest, and what is above the floor falls with FLOPs ** -(ALPHA BETA / (ALPHA + BETA)).
FLOOR, A, ALPHA, B, BETA = 0.5, 60.0, 0.30, 400.0, 0.35

# What a console of another encoding prints is no failure.
CAPTURED = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}


def fake_run(folder: Path, width: int, flops: float) -> None:
    """What scaling_plot.py reads of a run with width / 64 layers and 32,768 entries."""
    layers = width // 64
    weights = layers * 12 * width**2 + 32768 * width
    tokens = flops / 6 / weights
    run_dir = folder / f"run_{flops}_{width}"
    run_dir.mkdir(parents=True)
    config = {"num_layers": layers, "width": width, "mlp_width": 4 * width, "vocab_size": 32759}
    (run_dir / "config.json").write_text(json.dumps({"config": config, "machine": {"num_devices": 8}}))
    bpb = FLOOR + A / weights**ALPHA + B / tokens**BETA
    result = {"val_bpb": bpb, "tokens": tokens, "train_seconds": 5.0, "core": 0.25}
    (run_dir / "result.json").write_text(json.dumps(result))


def scaling_plot(folder: Path) -> tuple[str, dict]:
    done = python(ROOT / "runs/lib/scaling_plot.py", folder, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_exponents_of_a_known_law(tmp_path):
    """Five budgets of nine sizes, three runs of each."""
    for flops, width, more in itertools.product(np.geomspace(1e18, 1e20, 5), range(384, 2433, 256), (1, 1.001, 1.002)):
        fake_run(tmp_path / "laws", width, flops * more)
    _, result = scaling_plot(tmp_path / "laws")
    assert result["runs"] == 135 and len(result["budgets"]) == 5
    assert result["weights"]["exponent"] == pytest.approx(BETA / (ALPHA + BETA), abs=0.004)
    assert result["tokens"]["exponent"] == pytest.approx(ALPHA / (ALPHA + BETA), abs=0.004)
    assert result["bpb"]["exponent"] == pytest.approx(ALPHA * BETA / (ALPHA + BETA), abs=0.003)
    assert result["bpb"]["floor"] == pytest.approx(FLOOR, abs=0.005)
    for found in result["budgets"]:
        best = (found["flops"] / 6) ** (BETA / (ALPHA + BETA)) * (A * ALPHA / B / BETA) ** (1 / (ALPHA + BETA))
        assert found["weights"] == pytest.approx(best, rel=0.02)
    with (tmp_path / "laws/results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 135 and float(rows[0]["flops"]) == pytest.approx(1e18) and float(rows[0]["core"]) == 0.25
    assert matplotlib.image.imread(tmp_path / "laws/scaling.png").std() > 0.02


def test_no_minimum_inside(tmp_path):
    """Sizes that are all too small or too large give no best one, also where a parabola turns inside (1e16)."""
    for flops, widths in ((1e16, (256, 1024, 2048)), (1e20, (256, 384, 512)), (2e20, (256, 384, 512))):
        for width in widths:
            fake_run(tmp_path / "laws", width, flops)
    printed, result = scaling_plot(tmp_path / "laws")
    assert [found["weights"] for found in result["budgets"]] == [None, None, None] and result["weights"] is None
    assert printed.count("no minimum between") == 3 and "weights: too few points" in printed


@pytest.fixture
def sandbox(tmp_path, fast_python) -> Path:
    """A copy of the scripts whose .venv is the python of this test; pip installs nothing. With a file `log` there,
    scripts are not run but written to python.log, and runs are finished at once; only plans are made."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copytree(ROOT / "runs", tmp_path / "runs")
    for path in (ROOT / "train_medium.py", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.write_text(f"""#!/usr/bin/env bash
if [[ "$1 $2" == "-m pip" ]]; then exit; fi
if [[ $2 == *device_count* ]]; then echo "${{GPUS:-0}}"; exit; fi # saves the import of torch
if [[ $1 == *.py && $1 != *scaling_plan.py && -e log ]]; then
  echo "$@" >>python.log
  if [[ "$*" == *--run-dir* ]]; then
    mkdir -p "${{@: -1}}"
    echo "# done" | tee "${{@: -1}}/report.md" >"${{@: -1}}/result.json"
  fi
  exit
fi
exec {fast_python} "$@"
""")
    python.chmod(0o755)
    return tmp_path


def series(sandbox: Path, name: str, data: Path, environment: str, **more) -> subprocess.CompletedProcess:
    tiny = {"head_dim": 16, "max_seq_len": 64, "window_short": 8, "window_long": 16, "pack_tokens": 128,
            "val_tokens": 1500, "stages": ((1.0, 1, 1.0),), "muon_lr": 0.02, "adam_lr": 0.004,
            **more}  # fmt: skip
    flags = shlex.join(sets(tiny))
    command = f"{environment} bash {sandbox}/runs/{name} --data {data} {flags}"
    return subprocess.run(["bash", "-c", command], cwd="/", **CAPTURED, timeout=300)


def test_miniseries(sandbox, dataset_dir):
    """A depth, whose width and tokens follow from it (with the default's 32,768 entries); called again, nothing is
    trained. Series of several are those of test_scaling_laws."""
    argv = ("scaling.sh miniseries", dataset_dir, "DEPTHS=2 OUT=out/mini")
    done = series(sandbox, *argv, tokens_per_weight=0.0005)
    assert done.returncode == 0, done.stderr
    with (sandbox / "out/mini/results.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["num_layers"], row["width"]) == ("depth_02", "2", "128")
    weights = 2 * 12 * 128**2 + 32768 * 128
    assert int(row["tokens"]) == pytest.approx(0.0005 * weights, abs=64), "half a pack"
    again = series(sandbox, *argv)
    assert again.returncode == 0 and again.stdout.count("is already finished") == 1 and "loss" not in again.stdout
    assert (sandbox / "out/mini/scaling.png").is_file()


def test_scaling_laws(sandbox, dataset_dir):
    """For each budget the tokens that make 6 x weights x tokens equal for all sizes; then the fits."""
    (sandbox / "log").touch()
    done = series(sandbox, "scaling.sh laws", dataset_dir, "BUDGETS='1e12 4e12 1.6e13' DEPTHS='2 3 4 5' OUT=out/laws")
    assert done.returncode == 0, done.stderr
    *commands, last = (sandbox / "python.log").read_text().splitlines()
    assert len(commands) == 12 and all(f"--data {dataset_dir}" in c and "--head-dim=16" in c for c in commands)
    weights = 3 * 12 * 192**2 + 320 * 192  # 300 entries are padded to 320
    assert f"--tokens {round(4e12 / 6 / weights)} --run-dir out/laws/flops_4e12_depth_03" in commands[5]
    assert last == "runs/lib/scaling_plot.py out/laws"
    done = series(sandbox, "scaling.sh laws", sandbox / "nothing", "BUDGETS=1e12")
    assert done.returncode == 1 and "no dataset at" in done.stderr and "Traceback" not in done.stderr


def test_a_series_without_text(sandbox):
    """One sentence, with enough files for all sizes, before anything is installed."""
    shutil.rmtree(sandbox / ".venv")
    done = subprocess.run(["bash", str(sandbox / "runs/scaling.sh"), "miniseries"], cwd="/", **CAPTURED)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "--max-files 140" in done.stderr
    assert not (sandbox / ".venv").exists()


LAUNCH = """
source runs/lib/launch.sh
train runs/tool.py out/new SOURCE --packs 2
mkdir -p out/stopped/checkpoints/step_000010 out/dead out/finished
touch out/stopped/checkpoints/step_000010/state.json out/dead/log.jsonl out/finished/result.json
train runs/tool.py out/stopped SOURCE
train runs/tool.py out/dead SOURCE
train runs/tool.py out/finished SOURCE
"""


@pytest.mark.parametrize(("gpus", "processes"), ((0, 1), (1, 1), (3, 2), (8, 8), (16, 8)))
def test_launch(tmp_path, gpus, processes):
    """A run is started, continued, started over or skipped, with 8, 4 or 2 processes or one."""
    (tmp_path / "runs").symlink_to(ROOT / "runs")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo {gpus}; else echo "$@" >>calls; fi\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-ec", LAUNCH], cwd=tmp_path, env=environment, **CAPTURED)
    assert done.returncode == 0, done.stderr
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={processes} " if processes > 1 else ""
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"{torchrun}runs/tool.py SOURCE --packs 2 --run-dir out/new",
        f"{torchrun}runs/tool.py --run-dir out/stopped --resume",
        f"{torchrun}runs/tool.py SOURCE --run-dir out/dead",
    ]
    assert (tmp_path / "out/dead.unfinished/log.jsonl").is_file() and "out/finished is already finished" in done.stdout


def test_speedrun(sandbox):
    """The steps in their order, with flags of training that exist; a second call trains nothing again."""
    (sandbox / "log").touch()
    for flag, run in (("", "out/speedrun_medium"), ("--smoke", "out/smoke_medium")):
        (sandbox / "python.log").unlink(missing_ok=True)
        command = ["bash", str(sandbox / "runs/speedrun_medium.sh"), *flag.split()]
        environment = {**os.environ, "GPUS": "0" if flag else "1"}
        done = subprocess.run(command, cwd="/", env=environment, **CAPTURED)
        assert done.returncode == 0 and done.stdout.count("# done") == 2, done.stderr
        lines = (sandbox / "python.log").read_text().splitlines()
        scripts = [line.split()[0] for line in lines]
        expected = "data/pretrain.py data/core_tasks.py data/sft.py train_medium.py runs/score_core.py runs/finetune.py"
        expected = [*expected.split(), "runs/export.py", "runs/chat_eval.py"]
        # Evaluations that the smoke test skips.
        large = ("data/core_tasks.py", "runs/score_core.py", "runs/chat_eval.py")
        assert scripts == [script for script in expected if not flag or script not in large]

        (pretrain,) = [line for line in lines if line.startswith("train_medium.py")]
        args = tm.build_parser().parse_args(pretrain.replace("@runs", f"@{ROOT}/runs").split()[1:])
        assert args.run_dir == run and args.data.startswith("data/shards/")

        (finetune,) = [line for line in lines if line.startswith("runs/finetune.py")]
        assert finetune.startswith(f"runs/finetune.py {run} --data {args.data}")
        assert finetune.endswith(f"--run-dir {run}_sft")
        (sandbox / f"{run}_sft/chat_eval.csv").touch()
        (sandbox / "python.log").unlink()
        again = subprocess.run(command, cwd="/", env=environment, **CAPTURED)
        assert again.stdout.count("is already finished") == 2
        assert "runs/chat_eval.py" not in (sandbox / "python.log").read_text()
