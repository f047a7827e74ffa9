"""runs/lib/command.py: how a command ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_medium as tm
import train_small as ts
from lib.command import RunError, run_command
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def ended(capsys, work) -> tuple[int, str, str]:
    """Exit code and output of a command."""
    return run_command(work), *capsys.readouterr()


def fails_with(error: BaseException):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "message"),
    (
        (RunError("no run at out/x; name another"), "no run at out/x; name another"),
        (ts.UserError("no dataset at x"), "no dataset at x"),
        (tm.UserError("no dataset at x"), "no dataset at x"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nto"), "the device ran out of memory; use smaller batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "the device ran out of memory"),
        (OSError(28, "No space left on device"), "No space left on device; fix that"),
        (RuntimeError("I/O error: No space left on device\nmore"), "I/O error: No space left on device; fix that"),
        (torch.distributed.DistNetworkError("the connection was lost"), "the connection was lost; fix that"),
    ),
)
def test_what_the_user_can_fix_is_one_line(capsys, error, message):
    """Of any tool, and of a training script inside it."""
    code, out, err = ended(capsys, fails_with(error))
    assert code == 1 and not out
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("run", [run_command, ts.run_command], ids=["a tool", "a training script"])
def test_the_report_of_torchrun_has_the_message(capsys, monkeypatch, tmp_path, run):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert run(fails_with(ts.UserError("no run at out/x"))) == 1 and "error: no run" in capsys.readouterr().err
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert str(ChildFailedError("tool.py", {0: failure})).splitlines()[-2].endswith(": error: no run at out/x")


def test_a_fault_keeps_its_traceback(capsys):
    with pytest.raises(ZeroDivisionError):
        run_command(fails_with(ZeroDivisionError()))


def test_an_interrupted_command(capsys):
    assert ended(capsys, fails_with(KeyboardInterrupt())) == (130, "", "\nstopped\n")


@pytest.mark.parametrize(
    ("code", "message"),
    (
        ("import no_such_package", "error: the package no_such_package is not installed in "),
        ("1 / 0", "Traceback (most recent call last):"),
    ),
)
def test_a_missing_package_is_one_line(code, message):
    """Commands import packages before run_command() can explain an error."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "runs")}
    command = [sys.executable, "-c", f"import lib.command; {code}"]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith(message)
    assert (done.stderr.count("\n") == 1) == message.startswith("error")


@pytest.mark.parametrize("work", ("print('text', flush=True)", "print('text')", "dict(a=1)", "None"))
def test_a_reader_that_ends_before_the_command(work):
    """As head may: no message, and none by Python at its end either."""
    code = f"import sys; from lib.command import run_command; sys.exit(run_command(lambda: {work}))"
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "runs")}
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0 if work == "None" else 1, b"")
