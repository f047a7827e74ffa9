"""The two training scripts share what does not depend on the model, byte for byte."""

import re
import subprocess
import sys

import pytest
import train_medium as tm
import train_small as ts
from dev import sync

from tiny import ROOT


def test_scripts_share_their_sections():
    """The same sections with the same bytes."""
    assert "".join(sync.difference()) == ""
    assert list(sync.shared("train_small.py")) == ["imports", "sections_2_to_12"]


def test_shared_sections_ask_for_what_both_configs_have():
    """Every config.NAME of shared code, and every field that a run may not change, is in both Configs."""
    sections = sync.shared("train_small.py")
    plain = "".join(sections.values()).split("# 12. KERNELS")[0]  # where c is a tensor
    names = set(re.findall(r"\bconfig\.([a-z]\w+)", "".join(sections.values())))
    names -= {"json", "recompile_limit", "inductor_choices_class"}
    names |= set(re.findall(r"\bc\.([a-z]\w+)", plain))
    assert {"num_steps", "stage_table", "tokens", "softcap"} <= names
    for module in (ts, tm):
        config = module.Config()
        missing = [name for name in names | set(module.FREE_ON_RESUME) if not hasattr(config, name)]
        assert missing == []


OLD = "a\n# >>> shared: one\nsame\n# <<< shared: one\nb\n    # >>> shared: two\n    old\n    # <<< shared: two\nc"
NEW = OLD.replace("old", "new").replace("a\n", "z\n")


def run(folder, *flags) -> subprocess.CompletedProcess:
    command = [sys.executable, folder / "dev/sync.py", *flags]
    return subprocess.run(command, cwd="/", capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path):
    """A checkout with two tiny scripts: one shared section differs, and so does what is not shared."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/sync.py").write_bytes((ROOT / "dev/sync.py").read_bytes())
    (tmp_path / "train_small.py").write_text(NEW)
    (tmp_path / "train_medium.py").write_text(OLD)
    return tmp_path


def test_sync_shows_and_copies(folder):
    """A diff and exit code 1; --to replaces the shared sections of that script and nothing else."""
    done = run(folder)
    assert done.returncode == 1 and "-    new\n+    old\n" in done.stdout
    assert "-same" not in done.stdout and "z" not in done.stdout, "equal and own lines are no difference"
    assert run(folder, "--to", "train_medium.py").returncode == 0
    assert (folder / "train_medium.py").read_text() == NEW.replace("z\n", "a\n")
    assert (folder / "train_small.py").read_text() == NEW
    assert run(folder).returncode == 0
    assert sorted(p.name for p in folder.iterdir()) == ["dev", "train_medium.py", "train_small.py"]
    (folder / "train_medium.py").write_text(OLD)
    assert run(folder, "--to", "train_small.py").returncode == 0
    assert (folder / "train_small.py").read_text() == OLD.replace("a\n", "z\n")


@pytest.mark.parametrize("text", [
    OLD.replace("    # <<< shared: two\n", ""), OLD.replace("<<< shared: one", "<<< shared: two"),
    OLD.replace("# <<< shared: one\n", ""), OLD + "\n# >>> shared: one\n# <<< shared: one\n",
    OLD.replace("same\n", "# >>> shared: three\n# <<< shared: three\n"),
])  # fmt: skip
def test_markers_out_of_place(folder, text):
    (folder / "train_medium.py").write_text(text)
    done = run(folder, "--to", "train_small.py")
    assert done.returncode == 1 and done.stderr.startswith("error: markers in train_medium.py do not pair")
    assert (folder / "train_small.py").read_text() == NEW
