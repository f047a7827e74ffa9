"""dev/sweep.py: lists become runs on every GPU, a table against scipy and a picture; stopped, it goes on."""

import json
import re
import signal
import subprocess
import sys
import time

import matplotlib.image
import pytest
import train_small as ts
from dev import sweep
from scipy import stats

from commands import sentence, sets
from tiny import ROOT, TINY

# Stands for a training script: bits per byte follow from its flags, a learning rate of 9 diverges.
SCRIPT = """
import argparse, json, os, sys, time
from pathlib import Path
class UserError(Exception):
    pass
def build_parser():
    return argparse.Namespace(parse_args=list)
def make_config(words):
    if "--typo" in words:
        raise UserError("unknown flag --typo")
def main(words):
    run_dir = Path(words[words.index("--run-dir") + 1])
    seed = int(words[words.index("--seed") + 1])
    sets = dict(w.lstrip("-").split("=", 1) for w in words if "=" in w)
    run_dir.mkdir(parents=True)
    (run_dir / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if sets.get("lr") == "9":
        sys.exit("error: the loss became nan")
    time.sleep(float(sets.get("wait", 0)))
    bpb = 1.2 + 0.001 * seed + float(sets.get("lr", 0)) + (0.01 * seed**2 if "mudd-width" in sets else 0)
    steps = [{"step": i + 1, "loss": 1.0, "step_ms": 900.0 if i == 0 else 50.0 + seed} for i in range(5)]
    (run_dir / "log.jsonl").write_text("\\n".join(map(json.dumps, [*steps, {"step": 5, "val_bpb": bpb}])))
    (run_dir / "result.json").write_text(json.dumps({"val_bpb": bpb}))
if __name__ == "__main__":
    main(sys.argv[1:])
"""
FILE = """
script = "{script}"
flags = ["--tokens", "100"]
seeds = [0, 1, 2]
[variants]
"no mixing" = ["--mudd-width=0"]
broken = ["--lr=9"]
[grid]
lr = [0.1, 0.2]
"--wide" = [1]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "s.toml").write_text(FILE.format(script=script))
    monkeypatch.setattr(sweep, "find_gpus", lambda: ["3", "5"])
    return [str(tmp_path / "s.toml"), "--out", str(tmp_path / "out")]


def row(table, name) -> list[str]:
    (line,) = re.findall(rf"^\| {re.escape(name)} .*", table, re.M)
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_runs_table_and_picture(files, tmp_path, capsys):
    """Mean, sd, difference, Welch's interval and p; a variant that fails does not stop the others."""
    assert sweep.main(files) == 1
    table = (tmp_path / "out" / "sweep.md").read_text()
    base, other = [1.2, 1.201, 1.202], [1.2, 1.211, 1.242]
    test = stats.ttest_ind(other, base, equal_var=False)
    low, high = test.confidence_interval(0.95)
    difference = sum(other) / 3 - sum(base) / 3
    assert row(table, "base") == ["base", "3", "1.20100", "0.00100", "", "", "", "51.00"]
    assert row(table, "no mixing")[4:7] == [f"{difference:+.5f}", f"{low:+.5f} to {high:+.5f}", f"{test.pvalue:.2g}"]
    assert row(table, "lr=0.1 wide=1")[2:5] == ["1.30100", "0.00100", "+0.10000"]
    assert "(3 failed: error: the loss became nan)" in table and table.index("base") < table.index("no mixing")
    picture = matplotlib.image.imread(tmp_path / "out" / "sweep.png")
    assert picture.shape[1] > 800 and picture.std() > 0.02
    used = {path.read_text() for path in (tmp_path / "out").glob("*/gpu")}
    assert used <= {"3", "5"} and len(list((tmp_path / "out").glob("*/gpu"))) == 15
    out = capsys.readouterr().out
    assert "15 runs: 5 variants" in out and "15/15 [" in out


def test_resumes(files, tmp_path, capsys):
    """Finished runs are read, an unfinished one is made again, one of other flags or another script is refused."""
    assert sweep.main([*files, "--only", "no", "--seeds", "0,1"]) == 0
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/result.json")}
    assert len(made) == 4
    lost = tmp_path / "out" / "base_1" / "result.json"
    lost.unlink()
    assert sweep.main([*files, "--only", "no", "--seeds", "0,1,2"]) == 0
    for path, when in made.items():
        assert (path.stat().st_mtime_ns == when) == (path != lost)
    assert len(list((tmp_path / "out").glob("*/result.json"))) == 6
    before = capsys.readouterr()
    assert sweep.main([*files, "--only", "no", "--seeds", "0", "--steps", "9"]) == 1
    assert "base_0 has other flags or another script; choose another --out" in capsys.readouterr().out, before
    foreign = tmp_path / "out" / "base_7"
    foreign.mkdir()
    (foreign / "result.json").write_text("{}")
    assert sweep.main([*files, "--only", "no", "--seeds", "7"]) == 1 and (foreign / "result.json").exists()


def test_ctrl_c_ends_the_runs(files, tmp_path):
    """One sentence, no run left behind, and the finished runs stay."""
    (tmp_path / "s.toml").write_text(FILE.format(script=tmp_path / "script.py") + "wait = [0, 60]\n")
    code = "import sys; from dev import sweep; sweep.find_gpus = lambda: ['0']; sys.exit(sweep.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *files, "--seeds", "4", "--only", "lr=0.1 wide=1 wait=6"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    waiting = tmp_path / "out" / "lr=0.1_wide=1_wait=60_4" / "gpu"
    while not waiting.is_file():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and said == (
        "error: stopped; finished runs are kept, and the same command continues with the rest\n"
    )
    assert (tmp_path / "out" / "base_4" / "result.json").is_file() and not (waiting.parent / "result.json").exists()


@pytest.mark.parametrize(("text", "words"), [
    ("x", "cannot be read as TOML"),
    ("seed = [1]", "seed is [1]: extra inputs are not permitted"),
    ("seeds = 3", "seeds is 3: input should be a valid list"),
    ('flags = "--a"', "flags is '--a': input should be a valid list"),
    ('script = "no.py"', "names the script no.py, which "),
    ("[grid]\nlr = 0.1", "grid.lr is 0.1: input should be a valid list"),
    ('[variants]\n"a b" = []\n"a_b" = []', "would share a folder"),
])  # fmt: skip
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "s.toml"
    path.write_text(text)
    assert words in sentence(sweep.main, [str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_bad_flags(files, tmp_path):
    assert "matches no variant" in sentence(sweep.main, [*files, "--only", "zzz"])
    assert "must be whole numbers" in sentence(sweep.main, [*files, "--seeds", "a"])
    with open(files[0], "a") as file:
        file.write("late = [1]\n'--typo' = [1]\n")
    assert "the variant lr=0.1 wide=1 late=1 typo=1: unknown flag --typo" in sentence(sweep.main, files)
    assert not (tmp_path / "out").exists(), "before the first run"


def test_gpus(monkeypatch):
    """Those of the machine, or those that CUDA_VISIBLE_DEVICES names, as far as they are there."""
    for chosen, count, gpus in ((None, 2, ["0", "1"]), ("4,6", 2, ["4", "6"]), ("4", 1, ["4"]), (None, 0, [""]),
                                ("", 0, [""])):  # fmt: skip
        monkeypatch.setattr(sweep.subprocess, "run", lambda *a, n=count, **k: subprocess.CompletedProcess(a, 0, f"{n}"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert sweep.find_gpus() == gpus


def test_ablations_fit_the_script():
    """Every switch of the committed file is a field of today's Config, with a value of its type that changes it."""
    found = sweep.read_sweep(ROOT / "dev" / "ablations.toml")
    assert len(found.variants) > 10 and found.flags == ["@runs/b34.args"]
    for flags in list(found.variants.values())[1:]:
        changed = ts.given_fields(ts.build_parser().parse_args(flags))
        assert changed and all(getattr(ts.Config(), key) != value for key, value in changed.items())


def test_with_the_real_script(tmp_path, dataset_dir, fast_python, monkeypatch):
    """Two real runs: the table states the bits per byte that they printed."""
    monkeypatch.setattr(sweep, "find_gpus", lambda: [""])
    flags = ["--data", str(dataset_dir), "--tokens", "768", "--log-every", "1", *sets(TINY)]
    (tmp_path / "s.toml").write_text(f"flags = {json.dumps(flags)}\n[grid]\nadam_lr = [0.001]\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", str(fast_python))
    assert sweep.main([str(tmp_path / "s.toml"), "--out", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "sweep.md").read_text()
    for name, folder in (("base", "base_0"), ("adam_lr=0.001", "adam_lr=0.001_0")):
        result = json.loads((tmp_path / "out" / folder / "result.json").read_text())
        assert row(table, name)[2] == f"{result['val_bpb']:.5f}"
    assert not list((tmp_path / "out" / "base_0").glob("checkpoints/*"))
