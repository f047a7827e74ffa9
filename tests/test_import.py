"""Importing a script is free: other programs import it for its names. A command explains its flags at once."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tiny import ROOT

# Runs in a process of its own; every event of interest is recorded by an audit hook, which cannot be circumvented.
PROBE = """
import json, socket, sys
import torch, torch.distributed, numpy
events = []
def hook(event, args):
    if event == "open" and "r" in str(args[1] or "r") or event.startswith(("socket.", "subprocess.", "os.system")):
        events.append((event, str(args[0])))
sys.addaudithook(hook)
def refuse(*args, **kwargs):
    raise AssertionError("the import opened a socket")
socket.socket = socket.create_connection = socket.getaddrinfo = refuse
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps({
    "events": events, "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_initialized(), "heavy": [m for m in ("wandb", "tiktoken", "matplotlib", "kernels")
                                                           if m in sys.modules],
}))
"""


def test_import_has_no_side_effects():
    """No device, process group, network, subprocess or file but Python modules."""
    names = ("train_small", "train_medium")
    done = subprocess.run([sys.executable, "-c", PROBE, *names], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["cuda"] and not found["group"] and not found["heavy"]
    for name in names:
        assert any(f"{name}." in path for _, path in found["events"]), "the hook should see modules"
    packages = [str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")]
    packages += [path for path in sys.path if path.endswith(".zip")]  # the interpreter looks for its zipped library

    def allowed(event, path):  # triton asks for installed plug-ins, which reads the packages' own metadata
        inside = any(str(Path(path).resolve()).startswith(package) for package in packages)
        return event == "open" and (inside or path.endswith((".py", ".pyc")))

    assert [e for e in found["events"] if not allowed(*e)] == []


# Shows the help of several commands, one after the other.
HELP = """
import os, runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("torch", "transformers", "datasets"), f"--help waits for {name}"
sys.meta_path.insert(0, Refuse())
for command in sys.argv[1:]:
    sys.argv = [command, "--help"]
    sys.path[0] = os.path.dirname(command)
    try:
        runpy.run_path(command, run_name="__main__")
    except SystemExit as end:
        assert not end.code, f"{command} ended with {end.code}"
    print("END", command)
"""
# The first two have the flags of a training script, which they import; the last has none.
WITHOUT = {"bench.py", "bench_generate.py", "check_requirements.py"}


@pytest.mark.parametrize("folder", ("data", "runs", "runs/huggingface", "runs/encoder", "records", "dev"))
def test_help_needs_no_torch(folder):
    """All commands of a folder in one process, as some of their imports take a second."""
    paths = [path for path in sorted((ROOT / folder).glob("*.py")) if path.name not in WITHOUT]
    commands = [str(path) for path in paths if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    done = subprocess.run([sys.executable, "-c", HELP, *commands], cwd=ROOT, env={}, capture_output=True, text=True)
    *texts, last = done.stdout.split("END ")
    assert done.returncode == 0 and len(texts) == len(commands) > 0, done.stderr
    assert all("--help" in text for text in texts)


# What a script does before it imports PyTorch.
BEFORE_TORCH = """
import runpy, subprocess, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(0)
sys.meta_path.insert(0, Stop())
subprocess.Popen = lambda command, **options: print(*command[1:])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("environment", ({}, {"TRITON_CACHE_DIR": str(ROOT)}), ids=str)
def test_kernels_are_compiled_ahead(environment, tmp_path):
    """Where nothing is compiled yet, a process for that is started, and the script goes on."""
    script = str(ROOT / "train_small.py")
    argv = [sys.executable, "-c", BEFORE_TORCH, script, "--steps", "3"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    started = f"{ROOT}/runs/lib/kernel_cache.py {script} --steps 3\n"
    assert (done.stdout, done.stderr, done.returncode) == ("" if environment else started, "", 0)
