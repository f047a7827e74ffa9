"""Importing a script is free: other programs import it for its names."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conftest import ROOT

# Runs in a process of its own; every event of interest is recorded by an audit hook, which cannot be circumvented.
PROBE = """
import json, socket, sys, time
import torch, torch.distributed, numpy
events = []
def hook(event, args):
    if event == "open" and "r" in str(args[1] or "r") or event.startswith(("socket.", "subprocess.", "os.system")):
        events.append((event, str(args[0])))
sys.addaudithook(hook)
def refuse(*args, **kwargs):
    raise AssertionError("the import opened a socket")
socket.socket = socket.create_connection = socket.getaddrinfo = refuse
start = time.perf_counter()
__import__(sys.argv[1])
print(json.dumps({
    "seconds": time.perf_counter() - start, "events": events, "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_initialized(), "heavy": [m for m in ("wandb", "tiktoken", "matplotlib", "kernels")
                                                           if m in sys.modules],
}))
"""


@pytest.mark.parametrize("name", ("train_small", "train_medium"))
def test_import_has_no_side_effects(name):
    """Under 5 s behind torch; no device, process group, network, subprocess or file but Python modules."""
    done = subprocess.run([sys.executable, "-c", PROBE, name], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seconds"] < 5
    assert not found["cuda"] and not found["group"] and not found["heavy"]
    assert any(path.endswith((f"{name}.py", "pyc")) for _, path in found["events"]), "the hook should see modules"
    packages = [str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")]
    packages += [path for path in sys.path if path.endswith(".zip")]  # the interpreter looks for its zipped library

    def allowed(event, path):  # triton asks for installed plug-ins, which reads the packages' own metadata
        inside = any(str(Path(path).resolve()).startswith(package) for package in packages)
        return event == "open" and (inside or path.endswith((".py", ".pyc")))

    assert [e for e in found["events"] if not allowed(*e)] == []
