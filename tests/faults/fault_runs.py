"""A run in a process of its own, with something that goes wrong in it.

A server process imports torch and the scripts once; each run is a fork of it, so it starts in milliseconds, and can be
killed like any other process.
"""

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import finetune
import rl
import safetensors.torch
import tiktoken  # noqa: F401  (it and dynamo are imported late by a run, which takes a second)
import torch
import torch._dynamo
import train_small as ts

ROOT = Path(ts.__file__).parent

# ---- what goes wrong; each is called in the process of the run before it starts


def before_operation(number: int, action) -> None:
    """Runs action(arguments) before the run changes the disk for the given time: save, sync, rename, remove."""
    import shutil

    count = 0

    def watch(module, name):
        real = getattr(module, name)

        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                action(*args)
            return real(*args, **kwargs)

        setattr(module, name, call)

    for name in ("fsync", "replace", "rename", "mkdir"):
        watch(os, name)
    watch(shutil, "rmtree")
    watch(safetensors.torch, "save_file")


def die(*args) -> None:
    if len(args) == 2 and isinstance(args[0], dict):  # save_file: half of a file is there already
        Path(args[1]).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_operation(number: int) -> None:
    before_operation(number, die)


def in_step(step: int, action) -> None:
    """Runs action(state) after the given step of train_small.py."""
    real = ts.train_step

    def train_step(state, batch):
        loss = real(state, batch)
        if state.step == step:
            action(state)
        return loss

    ts.train_step = train_step


def signal_in_step(step: int, number: int, times: int = 1, rank: int = 0) -> None:
    def action(state):
        for _ in range(times if state.ranks.rank == rank else 0):
            os.kill(os.getpid(), number)

    in_step(step, action)


def nan_in_step(step: int, value: float, parameter: int) -> None:
    """A weight that is lost; or one that is huge."""

    def action(state):
        weights = list(state.model.parameters())
        weights[parameter % len(weights)].data.view(-1)[0] = value

    in_step(step, action)


def no_memory_in_step(step: int, kind: str, times: int) -> None:
    """The forward pass runs out of memory, for a number of times, from a step on."""
    errors = {
        "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        "numpy": MemoryError("Unable to allocate 3 GiB for an array"),
    }
    real = ts.micro_step
    left = times

    def micro_step(state, micro_batch, factor):
        nonlocal left
        if state.step >= step and left:
            left -= 1
            raise errors[kind]
        return real(state, micro_batch, factor)

    ts.micro_step = micro_step


def limit_files(step: int, size: int) -> None:
    """From a step on no file can grow beyond a size."""
    limits = (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    in_step(step, lambda state: resource.setrlimit(resource.RLIMIT_FSIZE, limits))


def jumping_clock(seconds: float) -> None:
    """The wall clock jumps at every call, to and fro."""
    real = time.time
    calls = 0

    def now():
        nonlocal calls
        calls += 1
        return real() + seconds * (-1) ** calls

    time.time = now


def slow_steps(seconds: float) -> None:
    """Time for others to come in between."""
    for step in range(1, 100):
        in_step(step, lambda state: time.sleep(seconds))


# ---- the process


def hub_main(argv: list[str]) -> int:
    """data/hub.py, whose address is read when huggingface_hub is imported."""
    sys.path.insert(0, str(ROOT / "data"))
    import hub

    sys.argv = ["hub.py", *argv]
    hub.main()
    return 0


MAINS = {"small": ts.main, "finetune": finetune.main, "rl": rl.main, "hub": hub_main}


@dataclass
class Spec:
    """A run to start."""

    argv: list[str]
    out: Path  # what it prints
    tool: str = "small"
    wrong: tuple = ()  # (name of a function above, its arguments...)
    environment: dict = field(default_factory=dict)

    def ready(self, pid: int) -> Path:
        """Exists from the moment on at which a process calls main()."""
        return self.out.with_name(f"{self.out.name}.{pid}")


def child(spec: Spec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(spec.out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(spec.environment)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.modules["matplotlib"] = None  # the picture takes longer than the training
    if spec.wrong:
        name, *arguments = spec.wrong
        globals()[name](*arguments)
    spec.ready(os.getpid()).touch()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = MAINS[spec.tool]([str(a) for a in spec.argv])
    atexit._run_exitfuncs()  # which forked processes skip
    sys.exit(code)


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["fault_runs"])


class Job:
    """A process that runs a Spec."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.before = len(self.text())
        self.process = SERVER.Process(target=child, args=(spec,), daemon=True)
        self.process.start()

    def text(self) -> str:
        return self.spec.out.read_text(errors="replace") if self.spec.out.is_file() else ""

    def wait(self, seconds: float = 120) -> int:
        """The exit code; a process that hangs is killed and counts as -99."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            self.code = -99
        else:
            self.code = self.process.exitcode
        self.output = self.text()[self.before :]
        return self.code

    def cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 1e9
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def send_after(self, seconds: float, *numbers: int) -> None:
        """Sends signals when the process has used so much CPU time, if it lives so long."""
        while self.process.is_alive() and not self.spec.ready(self.process.pid).exists():
            time.sleep(0.004)
        while self.process.is_alive() and self.cpu_seconds() < seconds:
            time.sleep(0.004)
        for number in numbers:
            if self.process.is_alive():
                os.kill(self.process.pid, number)
                time.sleep(0.02)


def run(argv, out: Path, tool="small", wrong=(), **environment) -> Job:
    """A run from start to end."""
    job = Job(Spec([str(a) for a in argv], out, tool, wrong, environment))
    job.wait()
    return job
