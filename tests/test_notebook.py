"""runs/colab_small.ipynb from top to bottom on a CPU, with its toy model; interrupted, and run again."""

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nbclient
import nbformat
import pytest

from commands import losses
from tiny import ROOT

NOTEBOOK = ROOT / "runs" / "colab_small.ipynb"


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Path:
    """A copy of the files that the notebook uses, because it writes into its folder."""
    root = tmp_path_factory.mktemp("notebook") / "repo"
    for folder in ("data", "runs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("shards", "__pycache__"))
    for path in (ROOT / "train_small.py", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, root)
    return root


def cell_with(text: str) -> str:
    """The source of the one code cell that holds a text."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    (source,) = [cell.source for cell in cells if cell.cell_type == "code" and text in cell.source]
    return source


@pytest.fixture
def execute(repo, fast_python, monkeypatch):
    """execute() runs all cells of the notebook at toy size, but those that hold one of some texts, and returns
    everything printed. All calls share a kernel."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    first = cells[0][1]
    first.source, found = re.subn(r"^SMOKE = .*$", "SMOKE = True", first.source, flags=re.M)
    first.source += f"\nimport sys; sys.executable = {str(fast_python)!r}"
    assert found == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    where = {"metadata": {"path": str(repo)}}
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where)

    def run(without: tuple[str, ...] = ()) -> str:
        outputs = []
        for index, cell in cells:
            if not any(text in cell.source for text in without):
                outputs += client.execute_cell(cell, index).outputs
        pictures = sum("image/png" in output.get("data", {}) for output in outputs)
        return "".join(output.get("text", "") for output in outputs) + f"\n{pictures} pictures"

    with client.setup_kernel():
        yield run


def test_notebook_from_top_to_bottom(repo, execute):
    """Data, training, curves, samples, chat and export. An interrupted run continues, finished work is not repeated."""
    text = execute()
    assert "installed now: nothing" in text and "no GPU" in text and "2 pictures" in text
    log = losses(repo / "out/first")
    assert max(log) == 20 and (repo / "out/first_chat/report.md").exists()
    assert text.count("resumed at step") == 0 and "Once upon a time" in text and "Why is the sky blue?" in text
    times = re.findall(r"^\(\d+\.\d minutes\)$", text, re.M)
    assert len(times) == text.count("\n$ ") == 7, "each command has its time"
    assert re.search(r"^page: http://127\.0\.0\.1:\d+/$", text, re.M), "the chat page is up"
    with zipfile.ZipFile(repo / "out/first_chat_hf.zip") as archive:
        assert {"model.safetensors", "README.md", "tokenizer.json"} <= set(archive.namelist())

    (repo / "out/first/report.md").unlink()  # as a disconnect after step 10 leaves it
    shutil.rmtree(repo / "out/first/checkpoints/step_000020")
    text = execute(without=("sample.py", "chat.py", "serve.py", "export.py"))
    assert "resumed at step 10" in text and "first_chat is finished" in text and "is complete" in text
    assert losses(repo / "out/first") == log


def test_notebook_needs_a_gpu(monkeypatch):
    """It is looked for first; a driver that is too old for torch shows later."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="Change runtime type"):
        exec(cell_with("elif not SMOKE"), {"SMOKE": False, "shutil": shutil})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs a driver for CUDA .* is older; choose another runtime"):
        exec(cell_with("torch.cuda"), {"SMOKE": False})


def test_only_missing_packages_are_installed(tmp_path, monkeypatch):
    """Other versions stay, but for an old torch. A driver older than CUDA 13's gets a torch for CUDA 12."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements-quickstart.txt").write_text("torch==2.11.0\nnumpy==2.3.5  # why\n# a comment\n")
    (tmp_path / "requirements.txt").write_text("rustbpe==0.1.0\n")

    def asked(driver="", cuda="13", **installed) -> list[list[str]]:
        requires = lambda package: [f"nvidia-cudnn-cu{cuda}==9.1"]
        own = SimpleNamespace(version=installed.__getitem__, requires=requires, PackageNotFoundError=KeyError)
        calls = []
        settings = {"metadata": own, "Path": Path, "sys": SimpleNamespace(modules={})}
        settings["shutil"] = SimpleNamespace(which=lambda name: driver)
        settings["subprocess"] = SimpleNamespace(check_output=lambda command, text: f"{driver}\n{driver}\n")
        exec(cell_with("def is_missing"), {**settings, "sh": lambda *words: calls.append(list(words[5:]))})
        return calls

    assert asked(torch="2.12.1+cu130", numpy="2.0.0") == [["rustbpe==0.1.0"]]
    assert asked(torch="2.9.0", numpy="1.26", rustbpe="0.2") == [["torch==2.11.0"]]
    assert asked(torch="2.11.0", rustbpe="0.2") == [["numpy==2.3.5"]]
    ready = {"torch": "2.11.0", "numpy": "2.3.5", "rustbpe": "0.1.0"}
    assert asked(**ready) == asked("580.65.06", **ready) == asked("550.54.15", "12", **ready) == []

    other = ["torch==2.11.0+cu128", "--index-url", "https://download.pytorch.org/whl/cu128"]
    assert asked("550.54.15", **ready) == [other, ["torch==2.11.0+cu128"]]
    assert asked("550.54.15", "12", torch="2.9.0", numpy="2.0") == [other, ["torch==2.11.0+cu128", "rustbpe==0.1.0"]]
    assert asked("580.65.06", torch="2.9.0", numpy="2.0") == [["torch==2.11.0", "rustbpe==0.1.0"]]


@pytest.mark.parametrize("start", ["", "runs", "elsewhere"])
def test_the_address_of_the_repository_is_asked_for_outside_a_clone(tmp_path, monkeypatch, start):
    """A notebook in a clone uses that clone, also where Jupyter starts in runs/."""
    clone = tmp_path / "clone"
    (clone / "runs").mkdir(parents=True)
    (clone / "train_small.py").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(clone / start if start != "elsewhere" else tmp_path / start)
    asked = []

    def sh(*words):
        asked.extend(words)
        shutil.copytree(clone, words[-1])

    settings = {"Path": Path, "os": os, "sh": sh, "input": lambda text: "https://example.org/x"}
    exec(cell_with("NAME = "), settings)
    exec(cell_with("drive.mount"), settings)
    assert asked[-2:] == (["https://example.org/x", "DecoderStack"] if start == "elsewhere" else [])
    assert Path.cwd() == (tmp_path / "elsewhere/DecoderStack" if start == "elsewhere" else clone)


def test_another_source_needs_another_name(tmp_path):
    """The old dataset is not trained on in place of the new one."""
    (tmp_path / "first.source").write_text("climbmix")
    settings = {"recipe": ["@runs/tiny.args"], "HUB_DATASET": "", "SOURCE": "stdlib", "NAME": "first", "sys": sys}
    with pytest.raises(RuntimeError, match="first was made from climbmix; choose another NAME for stdlib"):
        exec(cell_with("import train_small"), {**settings, "data": tmp_path / "first"})


def test_what_colab_may_take_away_is_on_drive(monkeypatch, tmp_path, capsys):
    """By default all that the notebook makes lies on Drive, and without Drive it says what that means."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_small.py").touch()
    mounted = []
    colab = ModuleType("google.colab")
    colab.drive = SimpleNamespace(mount=mounted.append)
    colab.files = object()
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    settings = {"Path": Path}
    exec(cell_with("NAME = "), settings)
    exec(cell_with("drive.mount"), settings)
    kept = Path("/content/drive/MyDrive/DecoderStack")
    assert mounted == ["/content/drive"] and settings["data"] == kept / "data/shards/first"
    assert settings["run"] == kept / "out/first" and settings["chat_run"] == kept / "out/first_chat"
    assert capsys.readouterr().out == ""

    settings["DRIVE"] = False
    exec(cell_with("drive.mount"), settings)
    assert settings["run"] == Path("out/first") and "DRIVE = True" in capsys.readouterr().out
