"""Runs a program that a model wrote, with limits; this is no security boundary, see runs/chat_eval.py."""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache

LIMITS = {"AS": 2**30, "CPU": 5, "FSIZE": 2**20, "NOFILE": 64, "NPROC": 0, "CORE": 0}
TIMEOUT = 10  # seconds on the clock


@cache
def isolation() -> tuple[str, ...]:
    """A command that starts another one without network; () if the system forbids it."""
    unshare = shutil.which("unshare")
    if not unshare:
        return ()
    flags = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    works = subprocess.run((unshare, *flags, "true"), capture_output=True).returncode == 0
    return (unshare, *flags) if works else ()


def passes(prompt: str, answer: str, test: str, entry: str) -> bool:
    """Whether an answer to a task of HumanEval passes its test.

    Args: prompt, test and entry (the name of the function) are columns of HumanEval
    The answer's first code block, or all of it, is either the whole function, which then follows the prompt's imports
    and helpers, or the body that continues the prompt.
    """
    block = re.search(r"```[^\n`]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = block[1] if block else answer
    helpers = re.split(rf"^def {re.escape(entry)}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]
    is_whole = re.search(rf"^\s*def {re.escape(entry)}\b", code, re.MULTILINE)
    program = (helpers if is_whole else prompt) + code
    task = json.dumps({"program": program, "test": f"{helpers}\n\n{test}", "entry": entry})

    with tempfile.TemporaryDirectory() as folder:
        command = (*isolation(), sys.executable, "-I", __file__)
        null = subprocess.DEVNULL
        pipes = {"stdin": subprocess.PIPE, "stdout": null, "stderr": null}
        process = subprocess.Popen(command, **pipes, cwd=folder, env={}, start_new_session=True)
        try:
            process.communicate(task.encode(), TIMEOUT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode == 0


# ---- in the started process


def plain(value):
    """A result whose repr is a literal: subclasses of containers as these, numbers of NumPy as Python's."""
    for kind in (dict, list, tuple, set):
        if isinstance(value, kind):
            return kind(map(plain, value.items() if kind is dict else value))
    return value.item() if hasattr(value, "item") else value


def answer_calls(program: str, entry: str, channel) -> None:
    """Runs the program, then its function for each line of arguments."""
    names = {"__name__": "__main__"}
    exec(program, names)
    for arguments in channel:
        result = names[entry](*ast.literal_eval(arguments))
        print(repr(plain(result)), file=channel, flush=True)


def run_test(test: str, channel) -> None:
    """Raises whatever the test raises."""
    def candidate(*arguments):
        print(repr(arguments), file=channel, flush=True)
        return ast.literal_eval(channel.readline())

    names = {}
    exec(test, names)
    names["check"](candidate)


def main() -> None:
    """Runs the task on stdin.

    The program has a process of its own, and literals go to and fro. So it can neither end the test early nor return an
    object that equals everything.
    """
    import resource

    task = json.load(sys.stdin)
    ours, theirs = socket.socketpair()
    in_program = os.fork() == 0
    for name, value in LIMITS.items():
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if in_program:
        ours.close()
        answer_calls(task["program"], task["entry"], theirs.makefile("rw", encoding="utf-8"))
    else:
        theirs.close()  # so that the end of the program is seen
        run_test(task["test"], ours.makefile("rw", encoding="utf-8"))


if __name__ == "__main__":
    main()
