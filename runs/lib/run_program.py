"""Runs a program that a model wrote, with limits; this is not a security boundary, see runs/chat_eval.py."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache

LIMITS = {"AS": 2**30, "CPU": 5, "FSIZE": 2**20, "NOFILE": 64, "NPROC": 0, "CORE": 0}
TIMEOUT = 10  # seconds on the clock
PASSED = 42  # exit code after a test that raised nothing


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
    program = f"{helpers if is_whole else prompt}{code}\n\n{test}\n\ncheck({entry})\n"

    with tempfile.TemporaryDirectory() as folder:
        command = (*isolation(), sys.executable, "-I", __file__)
        null = subprocess.DEVNULL
        pipes = {"stdin": subprocess.PIPE, "stdout": null, "stderr": null}
        process = subprocess.Popen(command, **pipes, cwd=folder, env={}, start_new_session=True)
        try:
            process.communicate(json.dumps(program).encode(), TIMEOUT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode == PASSED


def main() -> None:
    """Runs the program on stdin, within limits. It may exit early, but not with this code."""
    import resource

    for name, value in LIMITS.items():
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    exec(json.load(sys.stdin), {"__name__": "__main__"})
    os._exit(PASSED)


if __name__ == "__main__":
    main()
