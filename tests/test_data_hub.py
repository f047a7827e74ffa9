"""Download and upload of datasets against a stand-in server, with broken and corrupted transfers."""

import os
import re
import shutil
from pathlib import Path

import dataset
import numpy as np
import pytest

from folders import contents, make_dataset
from hub_stub import COMMIT, run_hub, start_hub
from processes import python

DATA = Path(__file__).parents[1] / "data"
TRAIN = "pretrain/train_000000.bin"


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory) -> Path:
    """A dataset whose training shard is longer than the 0.1 MB pieces huggingface_hub downloads in."""
    rng = np.random.default_rng(0)
    splits = {"train": rng.integers(0, 300, 60_000), "val": rng.integers(0, 300, 1000)}
    folder = make_dataset(tmp_path_factory.mktemp("dataset") / "x", {"made": "up"}, splits)
    (folder / "progress.json").write_text("not part of the dataset")
    return folder


@pytest.fixture
def hub(dataset_dir, tmp_path):
    with start_hub({"me/x": contents(dataset_dir)}) as server:
        server.home = tmp_path / "home"
        yield server


def fetched(hub, name: str) -> list[str | None]:
    """The Range header of each GET of a file."""
    return [r[2] for r in hub.requests if r[0] == "GET" and r[1].endswith(f"/resolve/{COMMIT}/{name}")]


def test_download_survives_a_broken_connection(hub, dataset_dir, tmp_path):
    hub.break_after[TRAIN] = 110_000
    out = tmp_path / "out"
    output = run_hub(hub, "download", "me/x", "--out", out)
    assert "is complete: 3 files, 0 already there" in output
    assert contents(out) == contents(dataset_dir)
    ranges = fetched(hub, TRAIN)
    assert len(ranges) == 2 and ranges[0] is None and re.fullmatch(r"bytes=[1-9]\d{4,}-", ranges[1])

    hub.requests.clear()
    assert "3 already there" in run_hub(hub, "download", "me/x", "--out", out)
    assert fetched(hub, TRAIN) == [] and contents(out) == contents(dataset_dir)

    # A file that was damaged or lost afterwards is the only one fetched.
    (out / "pretrain/val_000000.bin").write_bytes(b"damaged")
    hub.requests.clear()
    assert "2 already there" in run_hub(hub, "download", "me/x", "--out", out)
    assert fetched(hub, TRAIN) == [] and len(fetched(hub, "pretrain/val_000000.bin")) == 1
    assert contents(out) == contents(dataset_dir)


def test_a_corrupted_file_is_named_and_fetched_again_by_the_same_command(hub, dataset_dir, tmp_path):
    hub.corrupt["tokenizer.json"] = 1
    out = tmp_path / "out"
    output = run_hub(hub, "download", "me/x", "--out", out, code=1)
    good = dataset.sha256_file(dataset_dir / "tokenizer.json")
    assert f"error: tokenizer.json of me/x is not what dataset.json lists (sha256 {good})" in output
    assert not (out / "tokenizer.json").exists() and not (out / "dataset.json").exists()
    hub.requests.clear()
    run_hub(hub, "download", "me/x", "--out", out)
    assert contents(out) == contents(dataset_dir) and not fetched(hub, TRAIN), "only what is missing is fetched"


def test_download_errors(hub, dataset_dir, tmp_path):
    assert "Repository Not Found" in run_hub(hub, "download", "me/none", "--out", tmp_path / "a", code=1)
    assert "OWNER/NAME" in run_hub(hub, "download", "me", "--out", tmp_path / "a", code=1)
    hub.repos["me/empty"] = {"README.md": b""}
    assert "dataset.json" in run_hub(hub, "download", "me/empty", "--out", tmp_path / "a", code=1)
    # Names that lead out of the folder; tests/test_data_dataset.py has more of them.
    outside = contents(dataset_dir)["dataset.json"].replace(b'"tokenizer.json"', b'"../../escaped.json"')
    hub.repos["me/evil"] = {**contents(dataset_dir), "dataset.json": outside, "../../escaped.json": b"evil"}
    assert "bad path" in run_hub(hub, "download", "me/evil", "--out", tmp_path / "deep/er", code=1)
    assert not list(tmp_path.rglob("*escaped*"))

    # A directory with another dataset stays as it is.
    out = tmp_path / "other"
    info = dataset.read_dataset(dataset_dir)
    info["files"][TRAIN]["sha256"] = "ab" * 32
    dataset.write_dataset(out, info)
    before = contents(out)
    assert "another dataset" in run_hub(hub, "download", "me/x", "--out", out, code=1)
    assert contents(out) == before


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://192.0.2.1"])
@pytest.mark.parametrize("command", ["download", "upload", "pretrain"])
def test_a_missing_network(hub, dataset_dir, tmp_path, url, command):
    """Nothing listens there, or no packet comes back: a sentence within 20 s."""
    out = tmp_path / "out"
    commands = {
        "download": ["hub.py", "download", "me/x", "--out", out],
        "upload": ["hub.py", "upload", dataset_dir, "me/x"],
        "pretrain": ["pretrain.py", "--source", "hf:me/x/*.jsonl", "--out", out],
    }
    name, *args = commands[command]
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(hub.home), "no_proxy": "*"}
    result = python(DATA / name, *args, env=env, timeout=20)
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("error: "), result.stderr
    assert "check the names, the network, HF_ENDPOINT" in result.stderr and "Traceback" not in result.stderr
    assert not out.exists() or [path.name for path in out.iterdir()] == [".lock"]


def test_offline(hub, tmp_path):
    output = run_hub(hub, "download", "me/x", "--out", tmp_path / "out", code=1, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in output


def test_upload(hub, dataset_dir):
    """A server that fails is named; the same command goes on, and sends no large file twice."""
    hub.fail_posts["/commit/"] = 1
    assert "uploading" in run_hub(hub, "upload", dataset_dir, "me/new", code=1) and not hub.repos["me/new"]
    hub.requests.clear()
    assert "me/new is complete: 3 files" in run_hub(hub, "upload", dataset_dir, "me/new")
    assert hub.repos["me/new"] == contents(dataset_dir)
    assert not [r for r in hub.requests if r[0] == "PUT"]


def test_upload_refuses_a_damaged_dataset(hub, dataset_dir, tmp_path):
    copy = shutil.copytree(dataset_dir, tmp_path / "copy")
    (copy / "tokenizer.json").write_bytes(b"{}")
    assert "tokenizer.json was changed: dataset.json" in run_hub(hub, "upload", copy, "me/new", code=1)
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in run_hub(hub, "upload", copy, "me/new", code=1)
    assert "me/new" not in hub.repos and not [r for r in hub.requests if r[0] == "POST"]
    assert "no dataset.json" in run_hub(hub, "upload", tmp_path / "nothing", "me/new", code=1)
