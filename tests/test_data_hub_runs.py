"""Run directories to the hub's stand-in and back: what comes back is a run for every tool, and nothing else comes."""

import json
import shutil
from pathlib import Path

import dataset
import hub as data_hub
import pytest
import train_small as ts

from commands import sets
from folders import contents
from hub_stub import COMMIT, run_hub, start_hub
from processes import python
from tiny import ROOT, TINY, write_dataset

STEP = "checkpoints/step_000004"
FILES = {"train_small.py", "config.json", "log.jsonl", "tokenizer.json", "report.md", "result.json", "curve.png",
         *(f"{STEP}/{name}" for name in data_hub.CHECKPOINT)}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of 4 steps with the checkpoints of two of them and a file that is nobody else's business."""
    folder = tmp_path_factory.mktemp("run")
    data = write_dataset(folder / "data")
    flags = ("--data", data, "--run-dir", folder / "a", "--steps", 4, "--save-every", 2, "--log-every", 1)
    done = python("train_small.py", *flags, *sets(TINY))
    assert done.returncode == 0, done.stderr
    (folder / "a/wandb_id.txt").write_text("private")
    return folder / "a"


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "local")


@pytest.fixture
def hub(tmp_path):
    with start_hub({}) as server:
        server.home = tmp_path / "home"
        yield server


def sampled(folder: Path) -> str:
    """What runs/sample.py writes, without its last line, which names the folder."""
    done = python("runs/sample.py", folder, "--prompt", "the rest", "--tokens", 8, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    return done.stdout.rsplit("\n", 2)[0]


def test_a_run_goes_there_and_comes_back(hub, run_dir, tmp_path):
    """Its newest checkpoint is whole for the script, the same text is sampled, and it can be trained on."""
    assert f"me/run is complete: {len(FILES)} files\n" in run_hub(hub, "upload-run", run_dir, "me/run")
    assert set(hub.repos["me/run"]) == FILES | {"run.json"} and hub.committed[-1] == "run.json"
    assert not (run_dir / "run.json").exists()

    out = tmp_path / "out"
    error = run_hub(hub, "download-run", "me/run", "--out", out, code=1)
    assert f"read it at {hub.url}/me/run/blob/{COMMIT}/train_small.py, then add --revision {COMMIT} --trust" in error
    assert not contents(out), "nothing comes without consent"
    run_hub(hub, "download-run", "me/run", "--out", out, "--revision", COMMIT, "--trust")
    mine = contents(run_dir)
    assert contents(out) == {**{name: mine[name] for name in FILES}, "run.json": hub.repos["me/run"]["run.json"]}
    assert ts.newest_whole(out, pytest.fail) == out / STEP
    assert ts.read_config(out) == ts.read_config(run_dir)
    assert sampled(out) == sampled(run_dir)

    # Again: no large file is sent and nothing fetched.
    hub.requests.clear()
    run_hub(hub, "upload-run", run_dir, "me/run")
    assert not [request for request in hub.requests if request[0] == "PUT"]
    hub.requests.clear()
    assert f"{len(FILES)} already there" in run_hub(hub, "download-run", "me/run", "--out", out, "--trust")
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def test_the_newest_whole_checkpoint_is_sent(hub, run_dir):
    """A damaged one is skipped; with no complete one nothing is sent."""
    (run_dir / STEP / "model.safetensors").write_bytes(b"damaged")
    assert "skipped" in run_hub(hub, "upload-run", run_dir, "me/run")
    sent = {name for name in hub.repos["me/run"] if name.startswith("checkpoints/")}
    assert sent == {f"checkpoints/step_000002/{name}" for name in data_hub.CHECKPOINT}
    shutil.rmtree(run_dir / "checkpoints/step_000002")
    (run_dir / STEP / "state.json").write_text("[]")
    assert "has no complete checkpoint" in run_hub(hub, "upload-run", run_dir, "me/new", code=1)
    assert "me/new" not in hub.repos


def test_what_is_no_run_is_not_sent(hub, run_dir, tmp_path):
    assert "not a run directory" in run_hub(hub, "upload-run", tmp_path / "none", "me/new", code=1)
    with dataset.lock_folder(run_dir):  # as training does
        assert "another process is writing" in run_hub(hub, "upload-run", run_dir, "me/new", code=1)
    (run_dir / "train_small.py").unlink()
    assert "must list one script" in run_hub(hub, "upload-run", run_dir, "me/new", code=1)
    assert "me/new" not in hub.repos
    shutil.copy(ROOT / "train_small.py", run_dir)
    hub.repos["me/export"] = {"README.md": b"", "generation_config.json": b"{}"}
    assert "contains generation_config.json" in run_hub(hub, "upload-run", run_dir, "me/export", code=1)
    assert len(hub.repos["me/export"]) == 2
    hub.fail_posts["/commit/"] = -1
    assert f"uploading {run_dir} to me/busy" in run_hub(hub, "upload-run", run_dir, "me/busy", code=1)


def test_other_folders_stay_as_they_are(hub, run_dir, tmp_path):
    """Another run, the same one trained further, and a folder of something else."""
    run_hub(hub, "upload-run", run_dir, "me/run")
    assert "Repository Not Found" in run_hub(hub, "download-run", "me/none", "--out", tmp_path / "out", code=1)
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**config, "starts": "one more"}))
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for folder in (run_dir, other):
        before = contents(folder)
        error = run_hub(hub, "download-run", "me/run", "--out", folder, "--trust", code=1)
        assert "something other than this run" in error
        assert contents(folder) == before


def changed(manifest: dict, **more: object) -> dict:
    return {**manifest, "files": {**manifest["files"], **more}}


def without(manifest: dict, name: str) -> dict:
    files = manifest["files"]
    return {**manifest, "files": {other: files[other] for other in files if other != name}}


BAD_NAMES = ("../escaped", "/tmp/escaped", f"{STEP}/../../escaped", "escaped.py", "train_x.py/escaped", "wandb_id.txt",
             "checkpoints/step_4/state.json", "train_a\\b.py", ".lock")  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: [], "has format 'list'"),
    (lambda m: {**m, "format": "x"}, "has format 'x'"),
    (lambda m: {"format": m["format"]}, "does not list files"),
    (lambda m: changed(m, **{"log.jsonl": 3}), "does not list files and their sha256"),
    (lambda m: changed(m, **{"train_other.py": {"sha256": ""}}), "must list one script"),
    (lambda m: changed(m, **{"checkpoints/step_000009/state.json": {"sha256": ""}}), "one checkpoint"),
    (lambda m: without(m, "config.json"), "must list one script"),
    (lambda m: without(m, f"{STEP}/model.safetensors"), "must list one script"),
    *((lambda m, name=name: changed(m, **{name: {"sha256": ""}}), "not a file of a run") for name in BAD_NAMES),
])  # fmt: skip
def test_bad_manifests(change, message):
    files = {name: {"bytes": 1, "sha256": "ab" * 32} for name in FILES}
    manifest = {"format": data_hub.RUN_FORMAT, "files": files}
    assert list(data_hub.check_run(manifest, "run.json"))[0] == "config.json"
    with pytest.raises(SystemExit, match=message) as end:
        data_hub.check_run(change(manifest), "run.json")
    assert "\n" not in end.value.code
