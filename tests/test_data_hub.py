"""Datasets to a stand-in of the hub and back with huggingface_hub's own command, and errors of the network."""

import os
import subprocess
import sys
from pathlib import Path

import check
import pytest

from folders import contents, make_dataset
from hub_stub import names_of, start_hub
from processes import python

DATA = Path(__file__).parents[1] / "data"


def hf(hub, home: Path, *words: object) -> None:
    """The commands of data/README.md."""
    env = {**os.environ, **names_of(hub, home), "HF_TOKEN": "hf_x"}
    command = [Path(sys.executable).with_name("hf"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_dataset_goes_there_and_comes_back(tmp_path):
    folder = make_dataset(tmp_path / "x", {"made": "up"}, {"train": range(300), "val": range(100)})
    out = tmp_path / "out"
    with start_hub({}) as hub:
        hf(hub, tmp_path, "upload", "me/x", folder, ".", "--repo-type", "dataset")
        hf(hub, tmp_path, "download", "me/x", "--repo-type", "dataset", "--local-dir", out)
    assert {name: data for name, data in contents(out).items() if not name.startswith(".cache")} == contents(folder)
    (out / "pretrain/train_000000.bin").write_bytes(b"damaged")
    assert any("train_000000.bin" in problem for problem in check.find_problems(out))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://192.0.2.1"])
def test_a_missing_network(tmp_path, url):
    """Nothing listens there, or no packet comes back: a sentence within 20 s."""
    out = tmp_path / "out"
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "no_proxy": "*"}
    result = python(DATA / "pretrain.py", "--source", "hf:me/x/*.jsonl", "--out", out, env=env, timeout=20)
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("error: listing me/x: "), result.stderr
    assert "check the names, the network, HF_ENDPOINT" in result.stderr and "Traceback" not in result.stderr
    assert not out.exists()
