"""runs/colab_small.ipynb from top to bottom on a CPU, with its toy model; interrupted, and run again."""

import json
import re
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

from conftest import ROOT

NOTEBOOK = ROOT / "runs" / "colab_small.ipynb"


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Path:
    """A copy of the files that the notebook uses, because it writes into its folder."""
    root = tmp_path_factory.mktemp("notebook") / "repo"
    for folder in ("data", "runs"):
        (root / folder).mkdir(parents=True)
        for path in (ROOT / folder).iterdir():
            if path.suffix in (".py", ".args"):
                shutil.copy(path, root / folder)
    shutil.copy(ROOT / "train_small.py", root)
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, root)
    return root


def execute(repo: Path, monkeypatch, **settings) -> str:
    """Runs all cells with the given settings in the first code cell; returns everything that was printed."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for name, value in settings.items():
        first.source, found = re.subn(rf"^{name} = .*$", f"{name} = {value}", first.source, flags=re.M)
        assert found == 1, name
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    where = {"metadata": {"path": str(repo)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    nbformat.write(notebook, repo / "executed.ipynb")
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output.get("text", "") for output in outputs) + f"\n{pictures} pictures"


def test_notebook_from_top_to_bottom(repo, monkeypatch):
    """Data, training, curve, samples and chat. An interrupted run continues, and finished work is not repeated."""
    text = execute(repo, monkeypatch, SMOKE=True)
    assert "installed now: nothing" in text and "no GPU" in text and "1 pictures" in text
    log = [json.loads(line) for line in (repo / "out/first/log.jsonl").read_text().splitlines()]
    assert max(entry["step"] for entry in log) == 20 and (repo / "out/first_chat/report.md").exists()
    assert text.count("resumed at step") == 0 and "Once upon a time" in text and "Why is the sky blue?" in text

    (repo / "out/first/report.md").unlink()  # as a disconnect after step 10 leaves it
    shutil.rmtree(repo / "out/first/checkpoints/step_000020")
    text = execute(repo, monkeypatch, SMOKE=True)
    assert "resumed at step 10" in text and "first_chat is finished" in text and "is complete" in text
    again = [json.loads(line) for line in (repo / "out/first/log.jsonl").read_text().splitlines()]
    assert [(e["step"], e.get("loss")) for e in again] == [(e["step"], e.get("loss")) for e in log]


def test_notebook_needs_a_gpu(repo, monkeypatch):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="Change runtime type"):
        execute(repo, monkeypatch)


def test_notebook_is_clean():
    """Committed without outputs, valid for nbformat, with short cells."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.source.count("\n") < 30 and all(len(line) <= 125 for line in cell.source.split("\n")), cell.source
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
