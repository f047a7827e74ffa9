"""Python programs in processes of their own that have torch already: a start takes a tenth of a second, not three.

A server imports torch once, and each program is a fork of it. Apart from that they are as good as started by hand:
signals, exit codes, output and environment are their own. Tests call `python`; shell scripts, torchrun and other
programs start the file that `write_python` writes, in place of Python.
"""

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing.util
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(*argv, ranks=1, cwd=ROOT, env=None, timeout=120) -> subprocess.CompletedProcess:
    """What `python FILE ...`, `python -m MODULE ...` or `python -c CODE ...` does; with ranks, as torchrun starts so
    many processes.

    The exit code is the first one that is not 0; what the processes say stands behind each other.
    """
    client = [sys.executable, "-IS", "-c", CLIENT.format(address=server()[0])]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    options = dict(cwd=cwd, encoding="utf-8", errors="replace", **pipes)
    environments = [dict(env or os.environ) for _ in range(ranks)]
    if ranks > 1:
        port = free_port()
        for rank, own in enumerate(environments):
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    jobs = [subprocess.Popen([*client, *map(str, argv)], env=own, **options) for own in environments]
    try:
        said = [job.communicate(timeout=timeout) for job in jobs]
    finally:
        for job in jobs:
            job.kill()  # one that takes too long
    codes = [job.returncode for job in jobs if job.returncode] or [0]
    return subprocess.CompletedProcess(argv, codes[0], *map("".join, zip(*said, strict=True)))


# Has the server start the program, passes signals on to it, and ends as it ends.
CLIENT = """
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"x"], [0, 1, 2])
server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + bytes([10]))
answer = server.makefile()
pid = int(answer.readline())
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = os.waitstatus_to_exitcode(int(answer.readline()))
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextlib.contextmanager
def serving(app):
    """The address of an ASGI application, which a thread serves meanwhile."""
    import uvicorn  # not where this file is the server below

    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def write_python(path: Path) -> Path:
    """An executable file that stands for Python. If it is killed, its program is killed with all that it started."""
    path.write_text(f"#!{sys.executable} -IS" + CLIENT.format(address=server()[0]))
    path.chmod(0o755)
    return path


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have started."""
    found = []
    with contextlib.suppress(OSError):  # it has ended, or this is no Linux
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


@functools.cache
def server() -> tuple[str, subprocess.Popen]:
    """Starts the server; the path of its socket, and the process.

    The server ends, and removes its socket, once its stdin is closed: when this process has ended. Nothing is left to
    atexit or a finalizer here, as a fork of this process runs those at its own exit (multiprocess from Python 3.13 on).
    """
    path = f"{tempfile.mkdtemp()}/python"
    command = [sys.executable, __file__, path]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    return path, process


def serve(path: str) -> tuple[list[str], str, dict]:
    """Forks for each client. Returns in the fork: arguments, folder and environment of the program.

    The client gets the number of its process, and at the end the status. The server ends when its stdin is closed.
    """
    running = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(100)
        print("ready", flush=True)
        while True:
            ready = select.select([0, listener, *running.values()], [], [], 0.005 if running else None)[0]
            if 0 in ready:
                shutil.rmtree(os.path.dirname(path))
                sys.exit()
            for pid in [pid for pid, client in running.items() if client in ready]:  # the client is gone
                for each in (*descendants(pid), pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with contextlib.suppress(OSError), running.pop(ended[0]) as client:
                    client.sendall(b"%d\n" % ended[1])
            if listener in ready:
                client, _ = listener.accept()
                _, files, _, _ = socket.recv_fds(client, 1, 3)
                with client.makefile() as request:
                    program = json.loads(request.readline())
                pid = os.fork()
                if pid == 0:
                    for other in (client, *running.values()):
                        other.close()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    return program
                for file in files:
                    os.close(file)
                running[pid] = client
                client.sendall(b"%d\n" % pid)


def run(argv: list[str], cwd: str, environment: dict) -> None:
    """In the new process: the program, and its end as Python would end it, but that modules are not taken apart."""
    atexit._clear()
    code = 0
    try:
        execute(argv, cwd, environment)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    multiprocessing.util._exit_function()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            file.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 255)


def execute(argv: list[str], cwd: str, environment: dict) -> None:
    """Folder, environment, output and arguments of the program, then the program."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    encoding = environment.get("PYTHONIOENCODING")
    sys.stdin = open(0, encoding=encoding, closefd=False)
    sys.stdout = open(1, "w", buffering=1, encoding=encoding, closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)
    sys.executable = environment.get("FAST_PYTHON", sys.executable)  # of what the program starts
    sys.path[:] = [path for path in sys.path if ROOT not in (Path(path), *Path(path).parents[:2])]  # those of the tests
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    argv = argv[argv[0] == "-u" :]  # nothing is held back anyway
    if argv[0] in ("-c", "-"):
        code = argv.pop(1) if argv[0] == "-c" else sys.stdin.read()
        sys.argv = argv
        sys.path.insert(0, cwd)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    import matplotlib.pyplot  # noqa: F401  (what takes long)
    import scipy.stats  # noqa: F401
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # for the reason that conftest.py gives
    run(*serve(sys.argv[1]))
