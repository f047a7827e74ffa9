"""A run in a process of its own, with something that goes wrong in it.

A server process imports torch and the script once; each run is a fork of it, so it starts in milliseconds, and can be
killed like any other process.
"""

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  (a run imports it late, which takes a second)
import train_small as ts

from commands import at_step

ROOT = Path(ts.__file__).parent


def die_at_operation(number: int) -> None:
    """kill -9 before the run changes the disk for the given time: write, sync, rename, make or remove a folder."""
    count = 0

    def watch(module, name):
        real = getattr(module, name)

        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                if name == "write_tensors":
                    args[0].write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(module, name, call)

    for name in ("fsync", "replace", "mkdir"):
        watch(os, name)
    watch(shutil, "rmtree")
    watch(ts, "write_tensors")


def in_step(step: int, action) -> None:
    """Runs action(state) after the given step, for the rest of this process."""
    at_step(pytest.MonkeyPatch(), step, action)


def signal_in_step(step: int, number: int, times: int = 1) -> None:
    in_step(step, lambda state: [os.kill(os.getpid(), number) for _ in range(times)])


def limit_files(step: int, size: int) -> None:
    """From a step on no file can grow beyond a size, as on a full disk."""
    limits = (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    in_step(step, lambda state: resource.setrlimit(resource.RLIMIT_FSIZE, limits))


def slow_steps(seconds: float) -> None:
    """Time for others to come in between."""
    for step in range(1, 100):
        in_step(step, lambda state: time.sleep(seconds))


def ready(out: Path, pid: int) -> Path:
    """Exists from the moment on at which a process calls main()."""
    return out.with_name(f"{out.name}.{pid}")


def child(argv: list[str], out: Path, wrong: tuple, environment: dict) -> None:
    """A run that prints into a file. wrong: (name of a function above, its arguments...)"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr = out.open("a", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    os.environ.update(environment)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    ts.report = lambda *arguments: None  # it takes longer than the training
    if wrong:
        name, *arguments = wrong
        globals()[name](*arguments)
    ready(out, os.getpid()).touch()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(ts.main(argv))


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["fault_runs"])


class Job:
    """A run in a process of its own. What an earlier one has printed into the file is not its output."""

    def __init__(self, argv, out: Path, wrong=(), **environment):
        self.out = out
        out.touch()
        self.before = len(out.read_text(errors="replace"))
        words = [str(word) for word in argv]
        self.process = SERVER.Process(target=child, args=(words, out, wrong, environment), daemon=True)
        self.process.start()

    def wait(self, seconds: float = 60) -> int:
        """The exit code; a process that hangs is killed and counts as -99."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            self.code = -99
        else:
            self.code = self.process.exitcode
        self.output = self.out.read_text(errors="replace")[self.before :]
        return self.code

    def cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 1e9
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def send_after(self, seconds: float, *numbers: int) -> None:
        """Sends signals when the process has used so much CPU time, if it lives so long."""
        while self.process.is_alive() and not ready(self.out, self.process.pid).exists():
            time.sleep(0.004)
        while self.process.is_alive() and self.cpu_seconds() < seconds:
            time.sleep(0.004)
        for number in numbers:
            if self.process.is_alive():
                os.kill(self.process.pid, number)
                time.sleep(0.02)


def run(argv, out: Path, wrong=()) -> Job:
    """A run from start to end."""
    job = Job(argv, out, wrong)
    job.wait()
    return job
