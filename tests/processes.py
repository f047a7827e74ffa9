"""Python programs in processes of their own that have torch already: a start takes a tenth of a second, not four.

A server process imports torch once, and each program is a fork of it. Apart from that they are as good as started by
hand: signals, exit codes, output and environment are their own.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "scipy.stats"])  # what takes long


def python(*argv, ranks=1, cwd=ROOT, env=None, timeout=120) -> subprocess.CompletedProcess:
    """What `python FILE ...` or `python -c CODE ...` does; with ranks, as torchrun starts so many processes.

    The exit code is the first one that is not 0; what the processes say stands behind each other.
    """
    argv = [str(word) for word in argv]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        jobs = []
        for rank in range(ranks):
            environment = dict(env or os.environ)
            if ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            files = [f"{folder}/{name}_{rank}" for name in ("out", "err")]
            jobs.append(FORKS.Process(target=program, args=(argv, str(cwd), environment, *files)))
        free.close()
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(timeout)
        late = [job for job in jobs if job.is_alive()]
        for job in late:
            job.kill()
            job.join()
        out, err = ("".join(Path(f"{folder}/{name}_{rank}").read_text() for rank in range(ranks))
                    for name in ("out", "err"))  # fmt: skip
    assert not late, f"{argv} still ran after {timeout} s\n{out}\n{err}"
    codes = [job.exitcode for job in jobs if job.exitcode] or [0]
    return subprocess.CompletedProcess(argv, codes[0], out, err)


def program(argv, cwd, environment, out, err) -> None:
    """In the new process: the place, the output and the arguments of the program, then the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.path[:] = [path for path in sys.path if ROOT not in (Path(path), Path(path).parent)]  # those of the tests
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, cwd)
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
        runpy.run_path(argv[0], run_name="__main__")
