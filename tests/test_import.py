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
__import__(sys.argv[1])
print(json.dumps({
    "events": events, "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_initialized(), "heavy": [m for m in ("wandb", "tiktoken", "matplotlib", "kernels")
                                                           if m in sys.modules],
}))
"""


@pytest.mark.parametrize("name", ("train_small", "train_medium"))
def test_import_has_no_side_effects(name):
    """No device, process group, network, subprocess or file but Python modules."""
    done = subprocess.run([sys.executable, "-c", PROBE, name], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["cuda"] and not found["group"] and not found["heavy"]
    assert any(path.endswith((f"{name}.py", "pyc")) for _, path in found["events"]), "the hook should see modules"
    packages = [str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")]
    packages += [path for path in sys.path if path.endswith(".zip")]  # the interpreter looks for its zipped library

    def allowed(event, path):  # triton asks for installed plug-ins, which reads the packages' own metadata
        inside = any(str(Path(path).resolve()).startswith(package) for package in packages)
        return event == "open" and (inside or path.endswith((".py", ".pyc")))

    assert [e for e in found["events"] if not allowed(*e)] == []


# Python imports this by itself where PYTHONPATH names its folder.
NO_HEAVY_IMPORTS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("torch", "transformers", "datasets"), f"--help waits for {name}"
sys.meta_path.insert(0, Refuse())
"""
# The first two have the flags of a training script, which they import; the last has none.
WITHOUT = {"bench.py", "bench_generate.py", "check_requirements.py"}
FOLDERS = ("data", "runs", "runs/huggingface", "runs/encoder", "records", "dev")
COMMANDS = [path.relative_to(ROOT).as_posix() for folder in FOLDERS
            for path in sorted((ROOT / folder).glob("*.py")) if path.name not in WITHOUT
            and '__name__ == "__main__"' in path.read_text(encoding="utf-8")]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_torch(command, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_HEAVY_IMPORTS)
    argv = [sys.executable, command, "--help"]
    done = subprocess.run(argv, cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


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
