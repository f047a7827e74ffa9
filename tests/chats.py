"""Conversations, and the shards that data/sft.py makes of them."""

import contextlib
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import sft
import train_small as ts

from tiny import ROOT


def chat(*texts) -> dict:
    """A conversation whose messages take turns."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}


def write_jsonl(path: Path, values) -> Path:
    raw = "".join(json.dumps(v) + "\n" for v in values).encode()
    path.write_bytes(gzip.compress(raw) if path.name.endswith(".gz") else raw)
    return path


def run_sft(data: Path, *args, code: int = 0, env=None) -> str:
    """Output and errors of data/sft.py; in this process (a new one takes a third of a second) unless env is given."""
    argv = [str(ROOT / "data/sft.py"), "--data", str(data), *map(str, args)]
    if env is not None:
        done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, env=env)
        found, out = done.returncode, done.stdout + done.stderr
    else:
        stream, found, message = io.StringIO(), 0, ""
        with contextlib.redirect_stdout(stream), mock.patch.object(sys, "argv", argv):
            try:
                sft.main()
            except SystemExit as end:
                found, message = 1, f"{end.code}\n"
        out = stream.getvalue() + message
    assert found == code and "Traceback" not in out, out
    return out


def read_split(data: Path, split: str) -> list[tuple[list[int], list[int]]]:
    """The conversations of a split in order, from shards and masks as they lie on the disk."""
    found = []
    dataset = ts.Dataset.open(data)
    for path in sorted((data / "sft").glob(f"{split}_*.bin")):
        if path.name.endswith(".mask.bin"):
            continue
        tokens, mask = dataset.read(path), dataset.read(path.with_name(path.stem + ".mask.bin"))  # headers checked
        assert len(tokens) == len(mask) and mask.max() <= 1 and tokens[0] == dataset.tokenizer.bos_id
        starts = [*np.flatnonzero(tokens == dataset.tokenizer.bos_id), len(tokens)]
        found += [(tokens[a:b].tolist(), mask[a:b].tolist()) for a, b in zip(starts, starts[1:], strict=False)]
    return found
