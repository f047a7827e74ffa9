"""runs/cluster/: multi_node.sh with two torchrun agents here, one of them killed; slurm.sh with fakes of SLURM."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train_small as ts

from commands import losses, sets
from processes import descendants, free_port
from tiny import ROOT, TINY

SLOW = """
import sys, time
import torch
import train_small as ts
from train_small import *
if __name__ == "__main__":
    torch.set_num_threads(1)
    step, done = ts.train_step, []
    stoppers, build = [], ts.Stopper
    ts.Stopper = lambda ranks: stoppers.append(build(ranks)) or stoppers[0]
    def slow(state, batch):
        time.sleep(0.05)
        done.append(state.step)
        while state.ranks.world == 1 and len(done) > 3 and not stoppers[0].caught_at:
            time.sleep(0.05)  # alone: three steps, then it waits for the other one to come back
        return step(state, batch)
    ts.train_step = slow
    print(f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {sys.argv[-1]}", flush=True)
    sys.exit(ts.main())
"""
STEPS = 30


def flags(data, run_dir) -> list[str]:
    where = ["--data", str(data), "--run-dir", str(run_dir)]
    every = ["--save-every", "5", "--eval-every", "0", "--log-every", "1"]
    return [*where, *sets({**TINY, "max_epochs": 99}), "--steps", str(STEPS), *every]


def with_path(folder, **more) -> dict:
    """An environment in which the programs of a folder come first."""
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **more}


def wait(condition, job, seconds=90):
    """Until the condition holds; a job that ends before is a failure."""
    end = time.monotonic() + seconds
    while not condition():
        assert job.poll() is None and time.monotonic() < end, f"{job.args} does not get there"
        time.sleep(0.05)


def listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


@pytest.fixture
def agents(tmp_path, fast_python):
    """start() is what a person types on one more machine; whatever still runs at the end is killed."""
    (tmp_path / "slow.py").write_text(SLOW)
    port = free_port()
    environment = with_path(fast_python.parent, NODES="1:2", GPUS="1", HEAD=f"localhost:{port}",
                            SCRIPT=str(tmp_path / "slow.py"),
                            RDZV="keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2")  # fmt: skip
    started = []

    def start(*argv):
        out = tmp_path / f"agent_{len(started)}.txt"
        with out.open("w") as file:
            command = ["bash", "runs/cluster/multi_node.sh", *argv]
            job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        job.text = lambda: out.read_text(encoding="utf-8", errors="replace")
        job.head = port
        started.append(job)
        return job

    yield start
    for job in started:
        if job.poll() is None:
            kill(job)


def kill(job) -> None:
    """The machine is lost: SIGKILL for the agent and its processes."""
    for pid in (*descendants(job.pid), job.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_machine_is_lost_and_comes_back(agents, dataset_dir, tmp_path):
    """Two machines, then one, then two again; the losses are those of one process that nothing disturbed."""
    run, argv = tmp_path / "run", flags(dataset_dir, tmp_path / "run")
    first = agents(*argv)
    wait(lambda: listening(first.head), first)  # here both could be the head
    second = agents(*argv)
    wait((run / "log.jsonl").exists, first)
    wait(lambda: len(losses(run)) >= 12, first)  # alone it would stop at 3
    assert len(re.findall(r"process \d of 2", first.text() + second.text())) == 2
    kill(second)
    wait(lambda: "process 0 of 1: --resume" in first.text(), first)
    wait(lambda: re.search(r"process 0 of 1(?s:.)*resumed at step +1\d", first.text()), first)
    third = agents(*argv)
    assert first.wait(90) == 0, first.text()
    assert third.wait(30) == 0, third.text()
    assert len(re.findall(r"process \d of 2: --resume", first.text() + third.text())) == 2
    where = [int(step) for step in re.findall(r"resumed at step +(\d+)", first.text() + third.text())][-2:]
    assert where[0] in range(10, 25, 5) and where[1] > where[0]
    result = json.loads((first.text() + third.text()).split("\n{")[1].split("\n")[0].join(("{", "")))

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert ts.main(flags(dataset_dir, tmp_path / "undisturbed")) == 0
    expected = losses(tmp_path / "undisturbed")
    assert sorted(losses(run)) == sorted(expected) == list(range(1, STEPS + 1))
    assert [losses(run)[s] for s in expected] == pytest.approx(list(expected.values()), rel=1e-3)
    assert result["val_bpb"] == pytest.approx(json.loads(out.getvalue().splitlines()[-1])["val_bpb"], rel=1e-4)


class Fakes:
    """Programs that come first in PATH. Each appends its name and arguments to calls.txt, then runs some code."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "calls.txt").touch()

    def write(self, name, code=""):
        path = self.folder / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>{self.folder}/calls.txt\n{code}\n')
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return (self.folder / "calls.txt").read_text().splitlines()

    def start(self, script, *argv, **more) -> subprocess.Popen:
        command = ["bash", ROOT / "runs/cluster" / script, *map(str, argv)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=ROOT, env=with_path(self.folder, **more), text=True, **pipes)

    def run(self, script, *argv, **more) -> subprocess.Popen:
        job = self.start(script, *argv, **more)
        job.out, job.err = job.communicate(timeout=60)
        return job


@pytest.fixture
def fakes(tmp_path):
    return Fakes(tmp_path)


@pytest.mark.parametrize("name", ("run/", "lr[1]"))
def test_start_and_restart(fakes, tmp_path, name):
    """A process starts fresh, moves what died early out of the way, or resumes; a half-written checkpoint is none."""
    fakes.write("python")
    run = tmp_path / name
    argv = ["--steps", "9", "--run-dir", f"{tmp_path}/{name}"]

    def worker(rank):
        process = {"SCRIPT": "train_small.py", "RANK": str(rank), "TORCHELASTIC_RUN_ID": "x"}
        done = fakes.run("multi_node.sh", *argv, **process)
        assert done.returncode == 0, done.err
        return fakes.calls()[-1]

    fresh = f"python train_small.py {' '.join(argv)}"
    assert worker(0) == fresh
    (run / "checkpoints" / "saving").mkdir(parents=True)
    (run / "checkpoints" / "saving" / "state.json").touch()
    (run / "log.jsonl").write_text("early")
    assert worker(1) == fresh and run.exists()
    assert worker(0) == fresh and not run.exists()
    assert (tmp_path / f"{run.name}.unfinished" / "log.jsonl").exists()
    (run / "checkpoints" / "step_000005").mkdir(parents=True)
    (run / "checkpoints" / "step_000005" / "state.json").touch()
    assert worker(0) == worker(1) == f"{fresh} --resume"

    shutil.rmtree(run / "checkpoints")  # as --save-every -1 leaves it
    (run / "result.json").touch()
    before = fakes.calls()
    done = fakes.run("multi_node.sh", *argv)
    assert done.returncode == 0 and "is already finished; remove it to train again" in done.out
    assert fakes.calls() == before


@pytest.mark.parametrize(
    "wrong", ("NODES=abc", "NODES=0", "NODES=2:1", "NODES=1:", "GPUS=x", "GPUS=0", "SCRIPT=runs/nope.py")
)
def test_multi_node_refuses_wrong_variables(fakes, wrong):
    fakes.write("python")
    done = fakes.run("multi_node.sh", "--run-dir", "out/a", **dict([wrong.split("=")]))
    assert done.returncode == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1 and wrong in done.err
    assert fakes.calls() == []


def test_multi_node_calls_torchrun(fakes, fast_python, dataset_dir, tmp_path):
    """The rendezvous as asked for; and refusals before anything starts."""
    fakes.write("python", code=f'if [[ $1 == *check_nodes.py ]]; then exec {fast_python} "$@"; fi')
    argv = flags(dataset_dir, tmp_path / "run")
    done = fakes.run("multi_node.sh", *argv, NODES="1:2", GPUS="2")
    assert done.returncode == 1 and "2 packs do not divide over 4 processes; use a" in done.err
    done = fakes.run("multi_node.sh", *argv, NODES="1:2", GPUS="1", HEAD="node0:1234", JOB="seven", RESTARTS="5")
    assert done.returncode == 0, done.err
    (call,) = [call for call in fakes.calls() if "torch.distributed.run" in call]
    words = call.split()
    assert words[1:3] == ["-m", "torch.distributed.run"] and "--nnodes=1:2" in words and "--nproc-per-node=1" in words
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=node0:1234", "--rdzv-id=seven", "--max-restarts=5"} <= set(words)
    assert words[words.index("--no-python") :][:3] == ["--no-python", "bash", "runs/cluster/multi_node.sh"]
    assert f"runs/cluster/multi_node.sh --save-every 250 {' '.join(argv)}" in call  # a later --save-every wins
    unknown = (["--stepps", "3"], "unknown flag --stepps; did you mean --steps?", 1)
    for more, text, code in (unknown, (["--resume"], "adds --resume where", 2)):
        done = fakes.run("multi_node.sh", *argv, *more)
        assert done.returncode == code and text in done.err
    assert "needs --run-dir" in fakes.run("multi_node.sh", "--steps", "3").err


@pytest.mark.parametrize(
    ("script", "first", "settings"),
    (("finetune.py", "out/source", "--packs=2"), ("huggingface/finetune_hf.py", "sft", "@settings.toml")),
)
def test_multi_node_runs_tools(fakes, fast_python, tmp_path, script, first, settings):
    """What a tool wants first stays first, and a tool checks its flags itself."""
    fakes.write("python", code=f'if [[ $1 == *check_nodes.py ]]; then exec {fast_python} "$@"; fi')
    argv = [settings, "--run-dir", str(tmp_path / "run")]
    done = fakes.run("multi_node.sh", first, *argv, SCRIPT=f"runs/{script}", GPUS="2")
    assert done.returncode == 0, done.err
    assert f"multi_node.sh {first} --save-every 250 {' '.join(argv)}" in fakes.calls()[-1]
    assert "--nproc-per-node=2" in fakes.calls()[-1]


def test_sigterm_reaches_torchrun(fakes, fast_python, dataset_dir, tmp_path):
    """Processes get time to save; the script ends with them."""
    nap = "trap 'echo saved; exit 5' TERM; for i in {1..300}; do sleep 0.1; done"
    fakes.write("python", code=f'if [[ $1 == *check_nodes.py ]]; then exec {fast_python} "$@"; fi\n{nap}')
    job = fakes.start("multi_node.sh", *flags(dataset_dir, tmp_path / "run"), GPUS="2")
    wait(lambda: any("torch.distributed.run" in call for call in fakes.calls()), job)
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=30)
    assert job.returncode == 5 and "saved" in out


def test_slurm(fakes, tmp_path):
    """srun starts multi_node.sh with the first host as HEAD; USR1 queues the job again; the exit code is srun's."""
    (tmp_path / "runs").mkdir()
    fakes.write("scontrol", code="if [[ $1 == show ]]; then printf 'gpu7\\ngpu8\\n'; fi")
    fakes.write("srun", code='echo "env $NODES $HEAD $JOB" >>$CALLS; sleep ${NAP:-0}; exit ${CODE:-0}')
    slurm = dict(SLURM_SUBMIT_DIR=str(tmp_path), SLURM_JOB_ID="4321", SLURM_JOB_NUM_NODES="2",
                 SLURM_JOB_NODELIST="gpu[7-8]", CALLS=str(tmp_path / "calls.txt"))  # fmt: skip
    assert fakes.run("slurm.sh", "--run-dir", "out/a", **slurm).returncode == 0
    assert fakes.calls() == ["scontrol show hostnames gpu[7-8]", "srun bash runs/cluster/multi_node.sh --run-dir out/a",
                             "env 2 gpu7:24321 4321"]  # fmt: skip
    assert fakes.run("slurm.sh", **slurm, CODE="7").returncode == 7
    fakes.run("slurm.sh", **slurm, NODES="1:2")
    assert fakes.calls()[-2] == "srun --no-kill --kill-on-bad-exit=0 bash runs/cluster/multi_node.sh"
    assert fakes.calls()[-1] == "env 1:2 gpu7:24321 4321"

    before = len(fakes.calls())
    job = fakes.start("slurm.sh", **slurm, NAP="1.5")
    wait(lambda: len(fakes.calls()) == before + 3, job)
    job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=20)
    assert job.returncode == 0 and "goes back into the queue" in err
    assert fakes.calls()[-1] == "scontrol requeue 4321"


SHELL_SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "runs").rglob("*.sh"))


@pytest.mark.parametrize("name", [*SHELL_SCRIPTS, ".ci/run"])
def test_shellcheck(name):
    command = ["shellcheck", "--shell=bash", "--severity=warning", "-x", name]
    done = subprocess.run(command, cwd=ROOT, env=with_path(Path(sys.executable).parent), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
