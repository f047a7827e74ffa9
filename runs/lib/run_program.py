"""Runs a program that a model wrote, with limits; this is no security boundary, see runs/chat_eval.py."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

RUNNER = """
import resource, runpy, sys
for kind, value in (("AS", 2**30), ("CPU", 5), ("FSIZE", 2**20), ("NOFILE", 64), ("NPROC", 0), ("CORE", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (value, value))
    except (ValueError, OSError, AttributeError):
        pass
runpy.run_path(sys.argv[1], run_name="__main__")
"""
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


def program(prompt: str, answer: str, test: str, entry: str) -> tuple[str, str]:
    """A program that checks an answer to a task of HumanEval, and the nonce that it prints last if everything passes.

    Args: prompt, test and entry (the name of the function) are columns of HumanEval
    The answer's first code block, or all of it, is either the whole function, which then follows the prompt's imports
    and helpers, or the body that continues the prompt.
    """
    nonce = secrets.token_hex(16)
    block = re.search(r"```[^\n`]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = block[1] if block else answer
    before = prompt
    if re.search(rf"^\s*def {re.escape(entry)}\b", code, re.MULTILINE):
        before = re.split(rf"^def {re.escape(entry)}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]
    code = before + code
    return f"{code}\n\n{test}\n\ncheck({entry})\nprint()\nprint({nonce!r})\n", nonce


def run_program(text: str, nonce: str) -> bool:
    """Whether a program exits with 0 and prints the nonce last."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        path = Path(folder, "program.py")
        path.write_text(text, encoding="utf-8", errors="replace")
        command = (*isolation(), sys.executable, "-I", "-c", RUNNER, str(path))
        null = subprocess.DEVNULL
        pipes = {"stdin": null, "stdout": out, "stderr": null}
        process = subprocess.Popen(command, **pipes, cwd=folder, env={}, start_new_session=True)
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return code == 0 and out.read().split(b"\n")[-2:] == [nonce.encode(), b""]
