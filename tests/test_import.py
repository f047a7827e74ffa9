"""Importing the script is free: other programs import it for its names."""

import json
import subprocess
import sys

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
import train_small
print(json.dumps({
    "seconds": time.perf_counter() - start, "events": events, "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_initialized(), "heavy": [m for m in ("wandb", "tiktoken", "matplotlib", "kernels")
                                                           if m in sys.modules],
}))
"""


def test_import_has_no_side_effects():
    """Under 5 s behind torch; no device, process group, network, subprocess or file but Python modules."""
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seconds"] < 5
    assert not found["cuda"] and not found["group"] and not found["heavy"]
    modules = (".py", ".pyc", ".so", ".pyd")  # compiled modules of the standard library are modules too
    assert any(path.endswith(("train_small.py", "pyc")) for _, path in found["events"]), "the hook should see modules"
    assert [e for e in found["events"] if not (e[0] == "open" and e[1].endswith(modules))] == []
