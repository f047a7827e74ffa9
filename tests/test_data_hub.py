"""Download and upload of datasets against a stand-in server, with broken and corrupted transfers."""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from hub_stub import COMMIT, run_hub, start_hub
from processes import python

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import format

DATA = Path(__file__).parents[1] / "data"

TOKEN = "hf_AbCdEfSecretSecret"
SIGNATURE = "SignedPartOfAnAddress"
TRAIN = "pretrain/train_000000.bin"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """A dataset whose training shard is longer than the 10 MB pieces huggingface_hub downloads in."""
    folder = tmp_path_factory.mktemp("dataset") / "x"
    files = {}
    for name, count in ((TRAIN, 6_000_000), ("pretrain/val_000000.bin", 1000)):
        tokens = np.random.default_rng(count).integers(0, 300, count).astype(np.uint16)
        sha = format.write_shard(folder / name, tokens)
        files[name] = {"tokens": count, "documents": 1, "text_bytes": count, "sha256": sha}
    sha = format.write_json(folder / "tokenizer.json", {"made": "up"})
    files["tokenizer.json"] = format.entry_of(folder / "tokenizer.json", sha)
    format.write_dataset(folder, {"name": "x", "sources": [], "tokenizer_sha256": sha, "files": files})
    (folder / "progress.json").write_text("not part of the dataset")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("progress.json", ".lock")]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


@pytest.fixture
def hub(dataset, tmp_path):
    with start_hub({"me/x": contents(dataset)}) as server:
        server.home = tmp_path / "home"
        yield server


def run(hub, *args: object, code: int = 0) -> str:
    """Runs data/hub.py; returns stdout and stderr together."""
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(hub.home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
        **getattr(hub, "env", {}),
    }
    result = run_hub(*args, env=env)
    output = result.stdout + result.stderr
    assert SIGNATURE not in output
    assert result.returncode == code, output
    assert TOKEN not in output and "Traceback" not in output
    if code:
        assert re.search(r"^error: ", result.stderr, re.M)
    return output


def fetched(hub, name: str) -> list[str | None]:
    """The Range header of each GET of a file."""
    return [r[2] for r in hub.requests if r[0] == "GET" and r[1].endswith(f"/resolve/{COMMIT}/{name}")]


def test_download_survives_a_broken_connection(hub, dataset, tmp_path):
    hub.break_after[TRAIN] = 11_000_000
    out = tmp_path / "out"
    output = run(hub, "download", "me/x", "--out", out)
    assert "is complete: 3 files, 0 were there already" in output
    assert contents(out) == contents(dataset)
    ranges = fetched(hub, TRAIN)
    assert len(ranges) == 2 and ranges[0] is None and re.fullmatch(r"bytes=[1-9]\d{6,}-", ranges[1])

    hub.requests.clear()
    assert "3 were there already" in run(hub, "download", "me/x", "--out", out)
    assert fetched(hub, TRAIN) == [] and contents(out) == contents(dataset)

    # A file that was damaged or lost afterwards is the only one fetched.
    (out / "pretrain/val_000000.bin").write_bytes(b"damaged")
    hub.requests.clear()
    assert "2 were there already" in run(hub, "download", "me/x", "--out", out)
    assert fetched(hub, TRAIN) == [] and len(fetched(hub, "pretrain/val_000000.bin")) == 1
    assert contents(out) == contents(dataset)


def test_a_corrupted_file_is_fetched_again(hub, dataset, tmp_path):
    hub.corrupt["tokenizer.json"] = 2
    output = run(hub, "download", "me/x", "--out", tmp_path / "out")
    assert output.count("; deleted") == 2 and len(fetched(hub, "tokenizer.json")) == 3
    assert contents(tmp_path / "out") == contents(dataset)


def test_a_file_that_stays_corrupted(hub, dataset, tmp_path):
    hub.corrupt["tokenizer.json"] = -1
    out = tmp_path / "out"
    output = run(hub, "download", "me/x", "--out", out, "--attempts", 3, code=1)
    good = format.sha256_file(dataset / "tokenizer.json")
    assert f"expected sha256 {good}, found " in output and "error: tokenizer.json" in output
    assert len(fetched(hub, "tokenizer.json")) == 3
    # Neither the bad file nor dataset.json is there, the good shard is; the next run needs only the rest.
    assert not (out / "tokenizer.json").exists() and not (out / "dataset.json").exists() and (out / TRAIN).exists()
    hub.corrupt.clear()
    assert "2 were there already" in run(hub, "download", "me/x", "--out", out)
    assert contents(out) == contents(dataset)


def test_download_errors(hub, dataset, tmp_path):
    assert "not found" in run(hub, "download", "me/none", "--out", tmp_path / "a", code=1)
    assert "OWNER/NAME" in run(hub, "download", "me", "--out", tmp_path / "a", code=1)
    hub.repos["me/empty"] = {"README.md": b""}
    assert "dataset.json" in run(hub, "download", "me/empty", "--out", tmp_path / "a", code=1)
    outside = contents(dataset)["dataset.json"].replace(b'"tokenizer.json"', b'"../../tokenizer.json"')
    hub.repos["me/evil"] = {**contents(dataset), "dataset.json": outside}
    assert "bad path" in run(hub, "download", "me/evil", "--out", tmp_path / "a", code=1)

    # A directory with another dataset stays as it is.
    out = tmp_path / "other"
    info = format.read_dataset(dataset)
    info["files"][TRAIN]["sha256"] = "ab" * 32
    format.write_dataset(out, info)
    before = contents(out)
    assert "another dataset" in run(hub, "download", "me/x", "--out", out, code=1)
    assert {k: v for k, v in contents(out).items() if not k.startswith(".download")} == before


@pytest.mark.soak
def test_a_server_that_stalls(hub, tmp_path):
    """A file or an answer that never comes; huggingface_hub asks several times, which takes 20 seconds for each."""
    hub.stall["tokenizer.json"] = 4
    output = run(hub, "download", "me/x", "--out", tmp_path / "out", "--attempts", 1, code=1)
    assert "error: fetching tokenizer.json of me/x: failed" in output
    hub.stall = {"/api/datasets/": 4}
    output = run(hub, "download", "me/x", "--out", tmp_path / "out", "--attempts", 1, code=1)
    assert "error: opening me/x at main: failed with ReadTimeout" in output


def test_requests_without_a_limit_get_one():
    """huggingface_hub lists repositories without a time limit; a limit that it does state stays."""
    import hub as data_hub

    requests = [types.SimpleNamespace(method=method, extensions={}) for method in ("GET", "POST")]
    requests[0].extensions["timeout"] = {"connect": None, "read": 5.0, "write": None, "pool": None}
    for request in requests:
        data_hub.limit_time(request)
    get, post = (request.extensions["timeout"] for request in requests)
    assert get == {"connect": 10, "read": 5.0, "write": 10, "pool": 10} and set(post.values()) == {300}


@pytest.mark.parametrize("status", [401, 403, 404, 418, pytest.param(500, marks=pytest.mark.soak)])
def test_errors_of_the_server(hub, tmp_path, status):
    hub.fail_gets["pretrain/train"] = status
    output = run(hub, "download", "me/x", "--out", tmp_path / "out", "--attempts", 1, code=1)
    last = output.splitlines()[-1]
    assert last.startswith(f"error: fetching {TRAIN} of me/x: ") and not (tmp_path / "out/dataset.json").exists()


def test_redirects(hub, dataset, tmp_path):
    """To another host, which must not get the token; in a circle; and a signed address must not be shown."""
    with start_hub({"me/x": contents(dataset)}) as other:
        # huggingface_hub takes localhost for another host than 127.0.0.1, as any client does.
        hub.redirect["tokenizer.json"] = other.url.replace("127.0.0.1", "localhost")
        assert "is complete" in run(hub, "download", "me/x", "--out", tmp_path / "a")
        assert contents(tmp_path / "a") == contents(dataset)
        assert f"Bearer {TOKEN}" in hub.tokens and other.tokens == {None}
    hub.redirect["tokenizer.json"] = hub.url
    output = run(hub, "download", "me/x", "--out", tmp_path / "b", "--attempts", 1, code=1)
    assert "error: fetching tokenizer.json of me/x" in output
    hub.redirect["tokenizer.json"] = f"http://127.0.0.1:9/?Signature={SIGNATURE}&rest="
    output = run(hub, "download", "me/x", "--out", tmp_path / "c", "--attempts", 1, code=1)
    assert "error: fetching tokenizer.json of me/x" in output


ESCAPES = ["../../escaped", "/tmp/escaped", "pretrain/../../escaped", "pretrain\\escaped", ".download/escaped"]


@pytest.mark.parametrize("name", ESCAPES)
def test_names_cannot_leave_the_directory(hub, dataset, tmp_path, name):
    files = contents(dataset)
    value = json.loads(files["dataset.json"])
    value["files"][name] = value["files"].pop(TRAIN)
    value["fingerprint"] = format.fingerprint(value["files"])
    hub.repos["me/evil"] = {**files, name: files[TRAIN], "dataset.json": json.dumps(value).encode()}
    assert "bad path" in run(hub, "download", "me/evil", "--out", tmp_path / "deep/er/out", code=1)
    assert not list(tmp_path.rglob("*escaped*"))


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
def test_headers_cannot_name_files_outside(hub, tmp_path, header):
    """The cache of huggingface_hub names its files by these headers."""
    hub.headers["tokenizer.json"] = {header: '"../../../../../../escaped"'}
    program = "import hub; hub.fetch('me/x', 'tokenizer.json')"
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "a/b/c/home"), "PYTHONPATH": str(DATA)}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and f"sent a bad {header}" in result.stderr
    assert not list(tmp_path.rglob("*escaped*"))


def test_names_of_hub_files():
    import hub as data_hub

    assert all(map(data_hub.is_inside, ("a.parquet", "data/train-0.parquet", "a b/\u00fc.jsonl", "..a/b..")))
    assert not any(map(data_hub.is_inside, ("", "/a", "../a", "a/../b", "a//b", "a/", "a\\b", "a\0", "n" * 256)))


def test_a_full_disk_is_not_the_networks_fault(hub, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system")
    try:
        output = run(hub, "download", "me/x", "--out", disk / "out", code=1)
        assert "trying again" not in output and "the disk is full" in output.splitlines()[-1]
        assert not (disk / "out" / TRAIN).exists() and not (disk / "out/dataset.json").exists()
        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        assert "is complete" in run(hub, "download", "me/x", "--out", disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_unreachable_server(hub, tmp_path):
    """Said at once, as trying again cannot help; the same if the environment forbids the network."""
    out = tmp_path / "out"
    hub.url = "http://127.0.0.1:9"  # discard: nothing listens
    output = run(hub, "download", "me/x", "--out", out, code=1)
    assert "again" not in output and "cannot be reached" in output and "HF_ENDPOINT" in output
    command = [DATA / "pretrain.py", "--source", "hf:me/x/*.jsonl", "--out", out]
    result = python(*command, env={**os.environ, "HF_ENDPOINT": hub.url})
    assert result.returncode == 1 and "cannot be reached" in result.stderr and "Retrying" not in result.stderr

    hub.env = {"HF_HUB_OFFLINE": "1"}
    output = run(hub, "download", "me/x", "--out", out, code=1)
    assert "again" not in output and "HF_HUB_OFFLINE" in output


def test_upload(hub, dataset):
    hub.fail_posts["/commit/"] = 2
    output = run(hub, "upload", dataset, "me/new")
    assert "is complete: 3 files sent, 0 were there already" in output and "trying again" in output
    assert hub.repos["me/new"] == contents(dataset)
    assert hub.committed[-1] == "dataset.json" and len(hub.committed) == 4

    hub.requests.clear()
    assert "2 were there already" in run(hub, "upload", dataset, "me/new")
    assert not [r for r in hub.requests if r[0] == "PUT"]


def test_upload_refuses_a_damaged_dataset(hub, dataset, tmp_path):
    for name, data in contents(dataset).items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    (tmp_path / "copy/tokenizer.json").write_bytes(b"{}")
    good = format.sha256_file(dataset / "tokenizer.json")
    output = run(hub, "upload", tmp_path / "copy", "me/new", code=1)
    assert "tokenizer.json" in output and f"expected sha256 {good}" in output
    (tmp_path / "copy/tokenizer.json").unlink()
    assert "missing" in run(hub, "upload", tmp_path / "copy", "me/new", code=1)
    assert "me/new" not in hub.repos and not [r for r in hub.requests if r[0] == "POST"]
    assert "no dataset.json" in run(hub, "upload", tmp_path / "nothing", "me/new", code=1)
