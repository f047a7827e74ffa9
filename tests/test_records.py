"""Records from real runs: add, verify and compare end to end, tampering, refusals, statistics.

A small repository of its own holds the scripts, an args file and six runs: two variants of the training script with
three seeds each, trained for 12 steps.
"""

import contextlib
import gzip
import importlib.util
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import add
import compare
import entry
import files
import flags
import leaderboard
import matplotlib.image
import metrics
import numpy as np
import pytest
import ranking
import rules
import significance
import text
import tracks
import verify
from ranking import Kind, Standing
from scipy import stats
from significance import p_below

from commands import entries, sentence, sets
from processes import python
from tiny import ROOT, TINY, write_dataset

SEEDS = (0, 1, 2)


def git(repo, *words):
    subprocess.run(["git", "-C", repo, "-c", "user.name=t", "-c", "user.email=t@example.org", *words], check=True,
                   capture_output=True)  # fmt: skip


def train(script, *argv) -> None:
    """main() of a script in this process, from the folder of its repository."""
    spec = importlib.util.spec_from_file_location("trained_script", script)
    module = sys.modules["trained_script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.warm_up = lambda state, say: None
    module.report = lambda *arguments: None
    with contextlib.chdir(script.parent), contextlib.redirect_stdout(io.StringIO()):
        assert module.main([str(word) for word in argv]) == 0


@pytest.fixture(scope="session")
def repo(tmp_path_factory):
    """The repository with finished runs out/a_S and out/b_S."""
    repo = tmp_path_factory.mktemp("records") / "repo"
    (repo / "runs").mkdir(parents=True)
    (repo / "baselines").mkdir()
    shutil.copy(ROOT / "train_small.py", repo)
    shutil.copytree(ROOT / "records", repo / "records", ignore=shutil.ignore_patterns("__pycache__"))
    args = repo / "runs" / "tiny.args"
    args.write_text("--tokens 9216\n")
    git(repo, "init", "-q")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "before the runs")
    args.write_text(f"# a tiny model\n--tokens 4608 {' '.join(sets(TINY))}  # 12 steps\n")
    data = write_dataset(repo / "data" / "tiny")
    write_dataset(repo / "data" / "other", val_words=(40, 1, 0, 100, 9, 60, 4))
    script, tiny, logs = repo / "train_small.py", "@runs/tiny.args", ("--log-every", 3, "--eval-every", 6)
    for seed in SEEDS:
        train(script, tiny, "--data", data, "--run-dir", f"out/a_{seed}", "--seed", seed, *logs)
    before = script.read_text()
    script.write_text(re.sub(r"adam_lr: float = [\d.]+", "adam_lr: float = 0.001", before))
    for seed in SEEDS:
        train(script, tiny, f"--data={data}", "--run-dir", f"out/b_{seed}", f"--seed={seed}", *logs)
    script.write_text(before)
    git(repo, "commit", "-qam", "tiny")  # an args file may be committed after its runs
    for path in (repo / "out").glob("*/config.json"):  # so that the names of records are known; b ran after a
        hour = 11 if path.parent.name.startswith("b") else 10
        edit(path, lambda c, hour=hour: c["starts"][0].update(date=f"2026-11-22T{hour}:00:00"))
    return repo


@pytest.fixture(autouse=True)
def here(request, monkeypatch, fast_python):
    """The tools work on the small repository in tests that use it. What they start has torch already."""
    if "repo" in request.fixturenames:
        root = request.getfixturevalue("repo")
        monkeypatch.setattr(files, "ROOT", root)
        monkeypatch.setattr(files, "BASELINES", root / "baselines")
        monkeypatch.setattr(tracks, "FILE", root / "records" / "tracks.json")
        monkeypatch.setattr(leaderboard, "README", root / "records" / "README.md")
        monkeypatch.setattr(sys, "executable", str(fast_python))
        monkeypatch.chdir(root)


def run(tool, *argv) -> str:
    """What main() of a tool prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        tool.main([str(word) for word in argv])
    return out.getvalue()


def refused(tool, *argv) -> str:
    """The one sentence that main() of a tool ends with."""
    with contextlib.redirect_stdout(io.StringIO()):
        return sentence(tool.main, [str(word) for word in argv])


@pytest.fixture(scope="session")
def folders(repo, fast_python):
    """The records of both variants, made by the commands that a person would type."""

    def typed(*words):
        done = python(*words, cwd=repo, env={**os.environ, "FAST_PYTHON": str(fast_python)})
        assert done.returncode == 0, done.stderr

    device = json.loads((repo / "out" / "a_0" / "config.json").read_text())["machine"]["device"]
    track = ["--dataset", "tiny", "--script", "small", "--tokens", "4608", "--device", device, "--max-seq-len", "64",
             "--val-tokens", "1500", "--made-by", "make", "--train", "train"]  # fmt: skip
    against = ["--baseline", "2026-11-22_base", "--hypothesis", "A lower rate is worse."]
    typed("records/add.py", "out/a_0", "out/a_1", "out/a_2", "--slug", "base")
    typed("records/tracks.py", "add", "data/tiny", *track, "--first", "baselines/2026-11-22_base")
    typed("records/add.py", "out/b_0", "out/b_1", "out/b_2", "--slug", "a-low-rate", *against)
    return repo / "baselines" / "2026-11-22_base", repo / "baselines" / "2026-11-22_a-low-rate"


def raw(repo, name) -> list[list[dict]]:
    return [entries(repo / "out" / f"{name}_{seed}") for seed in SEEDS]


# ==== what is in the repository


@pytest.mark.parametrize("folder", sorted(p.name for p in files.BASELINES.iterdir() if p.is_dir()))
def test_every_baseline_verifies(folder):
    assert rules.problems(files.BASELINES / folder) == []
    assert sum(p.stat().st_size for p in (files.BASELINES / folder).iterdir()) <= add.MAX_BYTES
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_[a-z0-9-]+", folder)


def test_old_entries_are_frozen(tmp_path):
    """A record.json of format 1 is known by its sha256 in tracks.json."""
    folder = shutil.copytree(files.BASELINES, tmp_path / "baselines") / "2026-11-22_fp8-layers"
    edit(folder / "record.json", lambda record: record["config"].update(width=512))
    assert any("does not hold its sha256" in problem for problem in rules.problems(folder))


def test_leaderboard_is_current():
    """`python records/leaderboard.py` would change nothing."""
    for name, part in (("README.md", leaderboard.leaderboard()), ("CURVES.md", leaderboard.curves())):
        page = leaderboard.README.with_name(name).read_text(encoding="utf-8")
        assert part == page[page.index(leaderboard.BEGIN) : page.index(leaderboard.END) + len(leaderboard.END)]


# ==== add, verify, compare


def test_record_holds_what_the_runs_say(repo, folders):
    """Every figure of the second record against a computation from the run directories."""
    record = json.loads((folders[1] / "record.json").read_text())
    logs = raw(repo, "b")
    assert [run["seed"] for run in record["runs"]] == list(SEEDS)
    for log, stated in zip(logs, record["runs"], strict=True):
        steps = [e for e in log if "loss" in e]
        assert (stated["val_bpb"], stated["steps"], stated["tokens"]) == (log[-1]["val_bpb"], 12, 4608)
        assert stated["train_seconds"] == log[-1]["train_seconds"] and stated["core"] is None
        assert stated["tokens_per_second"] == pytest.approx(4608 / log[-1]["train_seconds"])
        seconds = np.diff([0, *(e["train_seconds"] for e in steps)])
        assert stated["mfu"] == pytest.approx(np.average([e["mfu"] for e in steps], weights=seconds))
        assert stated["peak_memory_gib"] == max(e["memory_gib"] for e in steps)
    new, old = ([log[-1]["val_bpb"] for log in raw(repo, name)] for name in "ba")
    mean, sd = pytest.approx(np.mean(new)), pytest.approx(np.std(new, ddof=1))
    assert record["summary"]["val_bpb"] == {"mean": mean, "sd": sd}
    difference = record["comparison"]["val_bpb"]
    assert difference["difference"] == pytest.approx(np.mean(new) - np.mean(old)) and difference["difference"] > 0
    assert difference["p"] == pytest.approx(stats.ttest_ind(new, old, equal_var=False).pvalue)
    losses = np.array([[e["loss"] for e in log if "loss" in e] for log in logs])
    noise = np.sqrt(np.mean((losses.std(0, ddof=1) / losses.mean(0)) ** 2))
    assert record["loss_noise"] == pytest.approx(noise)
    commits = subprocess.run(["git", "rev-list", "HEAD"], capture_output=True, text=True).stdout.split()
    assert (record["commit"], record["script_changed"]) == (commits[-1], True)
    assert json.loads((folders[0] / "record.json").read_text())["script_changed"] is False
    assert record["flags"] == ["--log-every", "3", "--eval-every", "6"] and record["args"] == "tiny.args"
    assert record["config"]["adam_lr"] == 0.001 and "data" not in record["config"]
    assert str(repo) not in (folders[1] / "record.json").read_text() + (folders[1] / "README.md").read_text()


def test_record_folder(folders):
    """Script and logs byte for byte, a curve, and a README that a person can read."""
    base, low = folders
    assert {p.name for p in low.iterdir()} == {"README.md", "record.json", "train_small.py", "tiny.args", "curve.csv",
                                               "log_0.jsonl.gz", "log_1.jsonl.gz", "log_2.jsonl.gz",
                                               "run_0.json", "run_1.json", "run_2.json"}  # fmt: skip
    run_dir = base.parents[1] / "out" / "b_1"
    assert (low / "train_small.py").read_bytes() == (run_dir / "train_small.py").read_bytes()
    assert gzip.decompress((low / "log_1.jsonl.gz").read_bytes()) == (run_dir / "log.jsonl").read_bytes()
    curve = np.genfromtxt(low / "curve.csv", delimiter=",", names=True)
    assert curve["step"].tolist() == [1, 3, 6, 9, 12] and not math.isnan(curve["val_bpb"][-1])
    readme = (low / "README.md").read_text()
    assert "A lower rate is worse." in readme and "config (+1 -1)" in readme and "Against `2026-11-22_base`" in readme
    assert not [p for p in base.parent.iterdir() if p.name.startswith(".")]


def test_compare_records_and_runs(repo, folders, tmp_path):
    """Records and run directories give the same rows; the reference is found by a pattern."""
    bpb = {name: [log[-1]["val_bpb"] for log in raw(repo, name)] for name in "ab"}
    picture = tmp_path / "curves.png"
    said = run(compare, *folders, "--baseline", "*base", "--target", 2.95, "--plot", picture)
    runs = run(compare, *(f"out/{name}_{seed}" for name in "ab" for seed in SEEDS), "--baseline", "a")
    assert runs == run(compare, *(f"out/{name}_{seed}" for name in "ab" for seed in SEEDS)), "the first is the baseline"
    for name, title, table in (("a", "2026-11-22_base", said), ("b", "2026-11-22_a-low-rate", said), ("a", "a", runs)):
        (line,) = re.findall(rf"^\| {title} +\| +3 \| (.*)", table, re.M)
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[0] == f"{np.mean(bpb[name]):.5f}" and cells[1] == f"{np.std(bpb[name], ddof=1):.5f}"
        assert cells[2] == "4,608"
    difference = text.difference_text(significance.welch(bpb["b"], bpb["a"]), 5)
    assert difference in said and difference in runs
    assert f"| {text.p_text(p_below(bpb['a'], 2.95)).removeprefix('= ')} " in said
    image = matplotlib.image.imread(picture)
    assert image.shape[1] > 1000 and image.std() > 0.02
    assert "matches 2 rows" in refused(compare, *folders, "--baseline", "2026*")
    assert "out/a_* is neither a folder nor an entry" in refused(compare, "out/a_*")
    assert "records holds no entry and no finished run" in refused(compare, "records")


def test_rows_are_what_a_record_may_hold(repo, tmp_path):
    """Intervals are free, versions, text and GPU are not; a copy is no second run, and unfinished ones are left out."""
    runs = copies(repo, tmp_path, 0, 1)
    edit(runs[1] / "config.json", lambda c: c["config"].update(save_every=2, eval_every=3, log_every=1))
    assert re.search(r"^\| run +\| +2 \|", run(compare, *runs), re.M)
    edit(runs[1] / "config.json", lambda c: c["machine"].update(torch="2.0"))
    assert len(re.findall(r"^\| run_\d +\| +1 \|", run(compare, *runs), re.M)) == 2
    edit(runs[1] / "config.json", lambda c: c.update(dataset_fingerprint="x", machine={**c["machine"], "device": "T4"}))
    said = run(compare, *runs, "--baseline", "run_0")
    assert "not compared: on another dataset" in said and "not compared: other hardware" in said
    os.remove(runs[1] / "result.json")
    said = run(compare, tmp_path)
    assert "| run_0" in said and "run_1" not in said
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    assert "run_0, copy are runs of one recipe, some with the same seed" in refused(compare, runs[0], copy)


def test_write_leaderboard(repo, folders, monkeypatch):
    """Both tracks of the toy: the record that came first, and the worse one, which losses and pictures are of."""
    before = (repo / "records" / "README.md").read_text()
    shutil.copy(repo / "out/a_0/log.jsonl", repo / "records/ours.jsonl")
    monkeypatch.setattr(leaderboard, "BESIDE_RIVALS", ("train_small.py", "ours.jsonl", "a CPU"))
    swap(tracks.FILE, '"main_dataset": "p34"', '"main_dataset": "tiny"')
    swap(folders[0] / "README.md", "## Hypothesis", "Made by A. B. Writer.\n\n## Hypothesis")
    pictures = [repo / "records" / f"{name}.png" for name in ("curves", "training", "tokens")]
    old = [path.read_bytes() for path in pictures]
    run(leaderboard)
    for path, content in zip(pictures, old, strict=True):
        assert path.read_bytes().startswith(b"\x89PNG") and path.read_bytes() != content
    losses, bpbs = ([[e for e in log if "loss" in e][-1][key] for log in raw(repo, "b")] for key in ("loss", "bpb"))
    last = f"{np.mean(losses):.3f} | {np.std(losses, ddof=1):.3f} | {np.mean(bpbs):.3f} |"
    page = (repo / "records" / "CURVES.md").read_text()
    assert page.count("## @runs/") == 1 and "2026-11-22_a-low-rate" in page
    assert re.search(r"\| 100% +\| +12 \| +0\.0 M \| +" + re.escape(last).replace(r"\ ", " +"), page), page
    written = (repo / "records" / "README.md").read_text()
    assert written.startswith(before[: before.index(leaderboard.BEGIN)])
    assert "Fewest bits per byte with 4,608 tokens, at most" in written and "Fewest training seconds" in written
    rows = re.findall(r"^\| \[2026-11-22_([a-z-]+)\](?:.+?) +\| (record 1 |)", written, re.M)
    assert rows == [("base", "record 1 "), ("a-low-rate", "")] * 2
    bpb, seconds = (np.mean([log[-1][key] for log in raw(repo, "a")]) for key in ("val_bpb", "train_seconds"))
    target = tracks.read()["tracks"]["tiny-small-seconds"]["target_bpb"]
    (best,) = re.findall(r"^\| tiny-small +\| [^|]+\| (.*?) +\| (.*?) +\|$", written, re.M)
    link = "(../baselines/2026-11-22_base/README.md) by A. B. Writer"
    assert best == (f"[{bpb:.5f}]{link}", f"[{seconds:.2f}]{link} to {target:.3f} bpb")
    assert written.count(" by A. B. Writer") == 4
    assert "c34-small-bpb, c34-small-seconds" in written and "--max-files 1" in written
    assert "is up to date" in run(leaderboard)
    record = folders[1] / "record.json"
    kept = record.read_text()
    record.write_text(kept.replace('"seed": 2', '"seed": 5'))
    assert "2026-11-22_a-low-rate does not verify" in refused(leaderboard)
    record.write_text(kept)
    assert (repo / "records" / "README.md").read_text() == written
    with monkeypatch.context() as patch:
        patch.setattr(files, "BASELINES", repo / "none")
        assert "README.md: updated" in run(leaderboard) and "[2026" not in (repo / "records/README.md").read_text()
    run(leaderboard)
    assert (repo / "records" / "README.md").read_text() == written


def test_what_the_pictures_show(repo, folders, monkeypatch):
    """A run over seconds, and results over tokens of the same scored text."""
    tracks_json = tracks.read() | {"main_dataset": "tiny"}
    monkeypatch.setattr(tracks, "read", lambda: tracks_json)

    log = raw(repo, "a")[0]
    curve = leaderboard.our_curve("train_small.py", repo / "out/a_0/log.jsonl")
    assert curve.name == "train_small.py" and len(curve.points) == sum("val_bpb" in line for line in log)
    assert curve.points[-1] == (log[-1]["train_seconds"], log[-1]["val_bpb"])

    # The committed run, which is no entry, scored another text; this one scored the same.
    shutil.copy(repo / "out/a_0/log.jsonl", repo / "records")
    (small,) = leaderboard.token_curves()
    bpb = np.mean([log[-1]["val_bpb"] for log in raw(repo, "b")])
    assert small.name == "train_small.py" and small.points == [(4608, pytest.approx(bpb))]
    monkeypatch.setattr(leaderboard, "SINGLE_RUNS", (("medium", "log.jsonl"),))
    _, medium = leaderboard.token_curves()
    assert medium.name == "train_medium.py" and medium.points == [(4608, raw(repo, "a")[0][-1]["val_bpb"])]


# ==== tampering


def edit(path, change) -> None:
    """Changes a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    if path.name == "config.json" and len(value.get("starts") or []) == 1 and "machine" in value:
        same = ("flags", "machine", "dataset_fingerprint")  # of a run with one start
        value["starts"][0].update({key: value[key] for key in same})
    path.write_text(json.dumps(value))


def swap(path, old, new) -> None:
    """Replaces a pattern once in a text, packed or not."""
    packed = path.suffix == ".gz"
    before = gzip.decompress(path.read_bytes()).decode() if packed else path.read_text()
    changed = re.sub(old, new, before, count=1)
    assert changed != before, old
    path.write_bytes(gzip.compress(changed.encode(), mtime=0) if packed else changed.encode())


def test_verify_names_what_was_tampered_with(repo, folders, tmp_path):
    """A log with a better score and corrected hashes: what no longer follows is named; words around it are free."""
    shutil.copytree(repo / "baselines", tmp_path / "baselines")
    folder = tmp_path / "baselines" / folders[1].name
    swap(folder / "README.md", r"\(not stated\)", "Two other rates.")
    assert rules.problems(folder) == []
    swap(folder / "log_1.jsonl.gz", r'"val_bpb": [\d.]+}\n$', '"val_bpb": 1.5}\n')
    edit(folder / "record.json", lambda record: record.update(files=entry.hashes(folder)))
    found = "\n".join(rules.problems(folder))
    for words in ("summary.val_bpb.mean", "comparison.val_bpb.p", "curve.csv, line 6 is 12,", "is | 1    | "):
        assert words in found, words
    assert "1 of 1 entries do not verify" in refused(verify, folder)
    assert run(verify, folder.name) == f"{folder.name}: ok\n", "the one in baselines/, by its name"
    assert "none is neither a folder nor an entry" in refused(verify, "none")


# ==== every leaf of an entry, one at a time


def leaves(value, path=()):
    """(path, value) of everything in a JSON value that holds nothing further."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield path, value
    for key, item in items:
        yield from leaves(item, (*path, key))


def changed(value):
    """Another value of the same kind: a figure differs by a millionth, a text by a character."""
    if isinstance(value, float):
        return value * (1 + 1e-6) + 1e-9
    if isinstance(value, str):
        return value + "0"
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "x"


def test_every_leaf_is_guarded(folders, tmp_path):
    """Whatever is changed in record.json, in a file that it lists, or in the figures of README.md, is noticed."""
    kept = shutil.copytree(folders[1].parent, tmp_path / "baselines")
    folder = kept / folders[1].name
    stated = json.loads((folder / "record.json").read_text())
    for path, value in leaves(stated):
        record = json.loads(json.dumps(stated))
        place = record
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = changed(value)
        (folder / "record.json").write_text(json.dumps(record))
        assert rules.problems(folder), path
    (folder / "record.json").write_text(json.dumps(stated))
    for file in folder.iterdir():
        before = file.read_bytes()
        file.write_bytes(before.replace(b"| sd ", b"| sb ") if file.suffix == ".md" else before + b"\n")
        assert rules.problems(folder) or file.name == "record.json", file.name
        file.write_bytes(before)
    assert rules.problems(folder) == []


# ==== refusals of add.py


def config(change):
    """Changes the config.json of a run."""
    return lambda run_dir: edit(run_dir / "config.json", change)


def log(old, new=""):
    """Replaces a pattern in the log of a run."""
    return lambda run_dir: swap(run_dir / "log.jsonl", old, new)


def overridden(config) -> None:
    config["flags"] += ["--adam-lr", "0.001"]
    config["config"]["adam_lr"] = 0.001


def second_start(**changes):
    """The run was stopped after step 6 and resumed, with something else."""
    return config(lambda c: c["starts"].append({**c["starts"][0], "step": 6, **changes}))


def resumed(start, *flags) -> dict:
    """A second start, which may give further flags."""
    return {**start, "step": 6, "flags": ["--resume", "--run-dir", "out/a_0", *flags]}


# The runs that are added, what is done to a copy of the last one, and what add.py says.
REFUSALS = [
    ("a_0 b_1", None, "run_1.json: script_sha256 is not that of train_small.py"),
    ("a_0 a_0", None, "has the seed 0, like another run"),
    ("a_0 a_1", config(lambda c: c.update(dataset_fingerprint="x" * 64)), "/tiny (xxxxxxxxxxxx); an entry"),
    ("a_0 a_1", config(lambda c: c["machine"].update(device="T4")), "device is T4, run_0.json states cpu"),
    ("a_0 a_1", log(r'(?s){"step": 12, .*'), "ends at step 9 of 12"),
    ("a_0 a_1", log(r'{"step": 6, [^\n]*"loss"[^\n]*\n'), "step 9: tokens_per_second is "),
    ("a_0 a_1", lambda run_dir: os.remove(run_dir / "config.json"), "has no config.json"),
    ("a_0 a_1", lambda run_dir: os.remove(run_dir / "train_small.py"), "has no train_small.py; pass"),
    ("a_0 a_1", config(overridden), "--adam-lr 0.001, run_0.json states @tiny.args"),
    ("a_0", config(overridden), "--adam-lr 0.001 overrides the recipe, which voids record status"),
    ("a_0", config(lambda c: c["flags"].append("--no-fp8")), "--no-fp8 in --log-every 3"),
    ("a_0", config(lambda c: c["config"].update(adam_lr=1.0)), "config.adam_lr is 1.0, script and flags give 0.006"),
    ("a_0", config(lambda c: c.update(flags=c["flags"][1:])), "config.num_layers is 4, script and flags give 11"),
    ("a_0", config(lambda c: c.update(flags=["@runs/new.args"])), "runs/new.args is not committed"),
    ("a_0", config(lambda c: c["flags"].append("--steps=9")), "--steps is given, but tiny.args fixes it"),
    ("a_0", config(lambda c: c.update(dataset_fingerprint=None)), "has no fingerprint"),
    ("a_0", config(lambda c: c.update(command="finetune")), "is a run of finetune"),
    ("a_0", second_start(dataset_fingerprint="f"), "start 2.dataset_fingerprint is f, the run states"),
    ("a_0", config(lambda c: c["starts"].append(resumed(c["starts"][0], "--tokens", "9"))),
     "start 2.flags is --tokens 9, the run states @tiny.args"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "spoil", "words"), REFUSALS, ids=[words for _, _, words in REFUSALS])
def test_add_refuses(repo, tmp_path, names, spoil, words):
    """Runs that do not belong together or are not whole, in one sentence; nothing is written."""
    run_dirs = [shutil.copytree(repo / "out" / name, tmp_path / f"{i}") for i, name in enumerate(names.split())]
    if spoil:
        spoil(run_dirs[-1])
    message = refused(add, *run_dirs, "--slug", "x", "--out", tmp_path / "new")
    assert words in message and not list(tmp_path.glob("new/*")), message


def copies(repo, tmp_path, *seeds) -> list[Path]:
    return [shutil.copytree(repo / "out" / f"a_{seed}", tmp_path / f"run_{seed}") for seed in seeds]


def added(tmp_path, *run_dirs) -> Path:
    """The folder of an entry that add.py has made of run directories."""
    run(add, *run_dirs, "--slug", "x", "--out", tmp_path / "new")
    (folder,) = (tmp_path / "new").iterdir()
    assert rules.problems(folder) == []
    return folder


def core_table(run_dir, accuracy, count=10) -> None:
    rows = [f"task{i},{count},0.5,{accuracy + i / 1000},1.0" for i in range(metrics.CORE_TASKS)]
    head = "task,examples,accuracy,centered,seconds"
    (run_dir / "core.csv").write_text("\n".join([head, *rows, "CORE,220,,0.3,22.0\n"]))


def test_add_reads_core(repo, tmp_path):
    """core.csv counts, and all runs must have been scored on the same examples."""
    runs = copies(repo, tmp_path, 0, 1)
    core_table(runs[0], 0.2)
    core_table(runs[1], 0.4)
    folder = added(tmp_path, *runs)
    record = entry.read_record(folder)
    assert [r["core"] for r in record["runs"]] == [pytest.approx(0.2 + 0.0105), pytest.approx(0.4 + 0.0105)]
    assert record["summary"]["core"]["mean"] == pytest.approx(0.3105)
    swap(folder / "core_1.csv", "0.5,0.4", "0.5,0.6")
    assert any("record.json.runs[1].core is" in problem for problem in rules.problems(folder))
    core_table(runs[1], 0.4, count=5)
    message = refused(add, *runs, "--slug", "x", "--out", tmp_path / "other")
    assert "core_1.csv: it scores other examples than core_0.csv; score all runs alike" in message
    (folder / "core_0.csv").write_text("task,examples,accuracy,centered,seconds\nx,1,1,1,1\n")
    assert metrics.read_core(folder / "core_0.csv") == ({"x": "1"}, None)


def test_add_refuses_names(repo, folders, tmp_path):
    runs = ["out/a_0", "out/a_1"]
    assert "entries are never edited" in refused(add, *runs, "--slug", "base")
    assert "--slug Wide_MLP" in refused(add, *runs, "--slug", "Wide_MLP")
    assert "--baseline nothing is not an entry" in refused(add, *runs, "--slug", "x", "--baseline", "nothing")
    assert "data has no training script" in refused(add, "data", "--slug", "x")
    (other,) = copies(repo, tmp_path, 0)
    edit(other / "config.json", lambda c: c.update(dataset_fingerprint="x" * 64))
    argv = [other, "--slug", "x", "--baseline", "2026-11-22_base"]
    assert re.search(r"/tiny \(x{12}\) and 2026-11-22_base read tiny \(\w{12}\); an entry", refused(add, *argv))
    assert len(list((repo / "baselines").iterdir())) == 2


# ==== starts, copies, what is scored


def test_a_run_that_was_really_resumed(repo, tmp_path):
    """Its last checkpoint is lost and made again: log and starts of the scripts are as the tools expect them."""
    run_dir = tmp_path / "run"
    flags = ("--data", repo / "data" / "tiny", "--run-dir", run_dir)
    train(repo / "train_small.py", "@runs/tiny.args", *flags, "--log-every", "3", "--save-every", "4")
    shutil.rmtree(run_dir / "checkpoints" / "step_000012")
    os.remove(run_dir / "result.json")
    train(repo / "train_small.py", "--resume", "--run-dir", run_dir, "--log-every", 3)
    day = json.loads((run_dir / "config.json").read_text())["starts"][0]["date"][:10]
    folder = added(tmp_path, run_dir)
    record = entry.read_record(folder)
    assert record["runs"][0]["starts"] == 2 and record["date"] == day
    readme = (folder / "README.md").read_text()
    assert "starts of each run: 2" in readme and "there is one run" in readme
    assert record["loss_noise"] is None and record["summary"]["val_bpb"]["sd"] is None
    assert str(tmp_path) not in (folder / "run_0.json").read_text()
    other = shutil.copytree(folder, tmp_path / "other" / "2019-01-01_x")
    assert any(f"date is {day}, the folder is 2019" in problem for problem in rules.problems(other))


def test_what_is_no_reason_to_refuse(repo, tmp_path):
    """Patch versions, intervals, names of folders, a table of stages, and the seal of older config.json."""
    runs = copies(repo, tmp_path, 0, 1)

    def other(config):
        machine = config["machine"]
        for key in ("python", "numpy"):
            machine[key] = machine[key].rsplit(".", 1)[0] + ".99"
        config.update(sha256="0" * 64)
        config["config"].update(data="/elsewhere/renamed", save_every=-1)
        config["flags"] += ["--save-every", "-1", "--wandb", "name"]

    def stages_apart(config):
        """As scripts list them that do not write derived stages into the Config."""
        config.pop("sha256", None)
        if "stage_table" not in config:
            names = ("fraction", "packs", "lr_mult")
            rows = config["config"]["stages"]
            config["stage_table"] = [dict(zip(names, row, strict=True)) for row in rows]
            config["config"]["stages"] = []

    edit(runs[0] / "config.json", stages_apart)
    edit(runs[1] / "config.json", other)
    added(tmp_path, *runs)
    given = ["@other/tiny.args", "--resume", "--run-dir=a", "--no-compile", "--log-every", "3"]
    assert flags.recipe_flags(given) == ["@tiny.args", "--no-compile"]


def halved(log) -> list[dict]:
    """A log whose clock ran at half the speed; its MFU stays."""
    out = [{**line, "train_seconds": line["train_seconds"] / 2} for line in log]
    for line in metrics.split_log(out)[0]:
        line.update(step_ms=line["step_ms"] / 2, tokens_per_second=line["tokens_per_second"] * 2)
    return out


def test_speeds_are_those_of_the_clock():
    record = entry.read_record(files.BASELINES / "2026-11-23_first-p34-medium")
    log = entry.read_logs(files.BASELINES / "2026-11-23_first-p34-medium", record)[0]
    log[5]["step_ms"] *= 2
    assert [words[:8] for words in rules.check_log(log, record["config"])] == ["step 50:"]


def test_what_is_scored_is_that_of_the_track(folders):
    """Targets, bytes and hash that tracks.py finds in the dataset are those that the runs stated."""
    found = tracks.read()
    record = entry.read_record(folders[0])
    stated, config = record["scored"], record["config"]
    assert found["datasets"]["tiny"]["scored"] == {**stated, "max_seq_len": 64, "val_tokens": 1500}
    assert stated.keys() == {"targets", "bytes", "sha256"}
    assert tracks.scoring_problems(record, config, stated, found) == []
    (problem,) = tracks.scoring_problems(record, {**config, "max_seq_len": 32}, stated, found)
    assert problem == "scored.max_seq_len is 32, the tracks of this dataset score 64"
    (problem,) = tracks.scoring_problems(record, config, {**stated, "bytes": 5}, found)
    assert problem.startswith("scored.bytes is 5")
    said = tracks.scoring_problems(record, config, None, found)  # logs that do not say what they scored
    assert [problem.split()[0] for problem in said] == ["scored.targets", "scored.bytes", "scored.sha256"]


# ==== tracks.json


def test_committed_tracks():
    """Limits are those of the records that they name; no record of format 1 is missing; every track has a rule."""
    found = tracks.read()
    for name, track in found["tracks"].items():
        assert entry.device_class(track["hardware"]["device"]) == track["class"] and name.rsplit("-", 1)[1] in (
            "bpb", "seconds"), name  # fmt: skip
        assert tracks.rule_text(track) and f"train_{track['script']}.py" in track["train"]
        if track["limits_from"]:
            runs = entry.read_record(files.BASELINES / track["limits_from"])["runs"]
            if track["ranked_by"] == "val_bpb":
                assert track["max_seconds"] == tracks.limit_of([run["train_seconds"] for run in runs])
            else:
                assert track["target_bpb"] == tracks.target_of([run["val_bpb"] for run in runs])
    old = [p.parent.name for p in files.BASELINES.glob("*/record.json") if json.loads(p.read_text())["format"] == 1]
    assert sorted(found["format_1"]) == sorted(old) and found["main_dataset"] in found["datasets"]


@pytest.fixture
def new_track(folders, tmp_path, monkeypatch):
    """An empty tracks.json, the words that add a track to it, and a function that makes a first entry for it."""
    monkeypatch.setattr(tracks, "FILE", tmp_path / "tracks.json")
    tracks.FILE.write_text(json.dumps({"datasets": {}, "tracks": {}, "format_1": {}, "main_dataset": "b34"}))
    argv = ["add", "data/tiny", "--dataset", "new", "--script", "small", "--tokens", "4608", "--device", "Tesla T4"]

    def first(**changes):
        seeds = zip((1.2, 1.21, 1.22), (100, 101, 102), strict=True)
        runs = [{"val_bpb": bpb, "train_seconds": seconds} for bpb, seconds in seeds]
        folder = shutil.copytree(folders[0], tmp_path / "2026-11-22_first", dirs_exist_ok=True)
        new = {"hardware": {"device": "Tesla T4", "num_devices": 1}, "runs": runs, **changes}
        edit(folder / "record.json", lambda record: record.update(new))
        return ["--first", folder]

    return argv, first


def test_add_a_track(new_track):
    """Open limits are filled in once, from three seeds; what stands is never changed."""
    argv, first = new_track
    assert "no limit of time yet" in run(tracks, *argv)
    few = first(runs=[{"val_bpb": 1.0, "train_seconds": 1.0}])
    assert "sets no limits; the entry must be of this dataset" in refused(tracks, *argv, *few)
    assert "at most 111.1 training seconds" in run(tracks, *argv, *first())
    found = tracks.read()
    assert found["tracks"]["new-small-seconds"]["target_bpb"] == tracks.target_of([1.2, 1.21, 1.22])
    assert found["tracks"]["new-small-bpb"]["class"] == "free GPU"
    assert "new-small-bpb" in run(tracks)
    for more, words in ((["--tokens", "4000"], "tokens is 4608 and would become 4000; tracks are frozen"),
                        (["--tokens", "999999999"], "is more than the"), (["--dataset", "N X"], "lower-case"),
                        (["--max-seq-len", "32"], "tracks are frozen")):  # fmt: skip
        assert words in refused(tracks, *argv, *more)
    assert "no dataset at runs" in refused(tracks, "add", "runs", *argv[2:])
    assert tracks.read() == found


# ==== running again


def forge(source, target, change) -> Path:
    """A copy of an entry in which everything agrees with a changed file, as a forger would have it."""
    folder = shutil.copytree(source, target)
    script = folder / "train_small.py"
    before = files.sha256(script)
    change(folder)
    for path in folder.glob("run_*.json"):
        path.write_text(path.read_text().replace(before, files.sha256(script)))
    record = entry.read_record(folder)
    (folder / "curve.csv").write_text(text.curve_csv(entry.read_logs(folder, record)))
    record = entry.make_record(folder, record["track"], record["against"])
    (folder / "record.json").write_text(files.to_json(record))
    swap(folder / "README.md", rf"(?s){text.BEGIN}.*{text.END}", lambda match: text.figures_text(record, folder))
    assert rules.problems(folder) == [], "without a rerun nobody sees it"
    return folder


def rerun(folder, steps, code=1) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) if code else contextlib.nullcontext():
        verify.main([str(folder), "--rerun", str(steps), "--data", "data/tiny"])
    return out.getvalue()


def test_rerun(repo, folders, tmp_path, monkeypatch):
    """The first seed again gives the logged losses; a script that trains differently does not, at the named step."""
    monkeypatch.setattr(verify, "TIME_TOLERANCE", 1000)
    said = rerun(folders[0], 6, code=0)
    assert re.search(r"the loss at step 6 is \d\.\d{4}, the entry has \d\.\d{4}", said)
    assert re.search(r"steps 1 to 6 took \d", said) and said.endswith("_base: ok\n") and "step 9" not in said
    assert "is another dataset" in refused(verify, folders[0], "--rerun", 6, "--data", "data/other")
    assert "--rerun needs" in refused(verify, "all", "--rerun", 6, "--data", "data/tiny")

    def script(old, new):
        return lambda folder: swap(folder / "train_small.py", old, new)

    change = script(r'head = UpdateRule\("adam", +1.00', 'head = UpdateRule("adam", 0.10')
    said = rerun(forge(folders[0], tmp_path / "2026-11-22_forged", change), 12)
    assert "rerun: the loss at step 12 is" in said and "rerun: val bpb is" in said
    change = script(r"muon_lr: float = [\d.]+", "muon_lr: float = 0.5")
    said = rerun(forge(folders[0], tmp_path / "b" / "2026-11-22_rate", change), 1)
    assert "rerun: config.muon_lr is 0.023, the script makes 0.5" in said


def test_rerun_compares_the_clock(repo, folders, tmp_path, monkeypatch):
    """Seconds and MFU on the same card; on another one it is said that they are not compared."""

    def fast(folder):
        for path in folder.glob("log_*.jsonl.gz"):
            log = metrics.read_log(path)
            for _ in range(10):
                log = halved(log)
            log = [{**line, "mfu": 0.5} if "loss" in line else line for line in log]
            path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in log).encode()))

    forged = forge(folders[0], tmp_path / "2026-11-22_fast", fast)
    said = rerun(forged, 6)
    assert "rerun: step 6 of the log states an MFU that does not belong to its tokens/s" in said
    assert re.search(r"rerun: steps 1 to 6 took [\d.]+ s, in the entry 0.0\d s; that is [\d,]+% slower", said)

    def elsewhere(folder):
        for path in folder.glob("run_*.json"):
            path.write_text(re.sub(r'"device": ?"[^"]+"', '"device": "T400"', path.read_text()))

    forged = forge(forged, tmp_path / "b" / "2026-11-22_fast", elsewhere)
    monkeypatch.setattr(verify.rivals, "ask_gpu", lambda *_: "another GPU")
    assert "seconds and MFU are not compared: this is 1 x cpu" in rerun(forged, 6, code=0)
    monkeypatch.setattr(verify.rivals, "ask_gpu", lambda *_: None)
    assert "ran on T400, and nvidia-smi finds no GPU" in refused(verify, forged, "--rerun", 6, "--data", "data/tiny")


# ==== statistics


def test_welch():
    """Against Welch's formulas by hand; without a spread or with a single run there is a difference only."""
    new, old = [1.18, 1.19, 1.175, 1.182], [1.20, 1.21, 1.19]
    a, b = np.var(new, ddof=1) / 4, np.var(old, ddof=1) / 3
    freedom = (a + b) ** 2 / (a**2 / 3 + b**2 / 2)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(a + b)
    p = 2 * stats.t.sf(0.01825 / math.sqrt(a + b), freedom)
    wanted = {"difference": -0.01825, "low": -0.01825 - half, "high": -0.01825 + half, "p": p}
    assert significance.welch(new, old) == pytest.approx(wanted)
    for pair, difference in ((([1.0], [2.0, 3.0]), -1.5), (([1.0, 1.0], [2.0, 2.0]), -1.0)):
        assert significance.welch(*pair) == {"difference": difference, "low": None, "high": None, "p": None}


def test_below_and_target():
    """One-sided p by hand; the first record is below the target that it sets with p < 0.01, and not below less."""
    values = [1.184300512523402, 1.1866317469768832, 1.18417808650079]
    t = (np.mean(values) - 1.19) / (np.std(values, ddof=1) / math.sqrt(3))
    assert p_below(values, 1.19) == pytest.approx(stats.t.cdf(t, 2))
    assert p_below(values, 1.18) > 0.9 and p_below([1.0], 2) is None and p_below([1.0, 1.0], 2) is None
    assert tracks.target_of(values) == 1.191  # 1.18504 + 6.9646 * 0.00138 / sqrt(3) = 1.19060
    assert p_below(values, 1.191) < 0.01 < p_below(values, 1.190)


def made_up(name, bpb, seconds, tokens=100, **about):
    """A record with what ranking reads; each has a recipe of its own."""
    runs = [{"val_bpb": b, "train_seconds": t, "tokens": tokens} for b, t in zip(bpb, seconds, strict=True)]
    record = {"name": name, "date": "2026-11-22", "against": None, "runs": runs, "hardware": {"device": "NVIDIA H200"}}
    return record | {"script": "train_small.py", "args": None, "flags": [], "files": {"train_small.py": name}} | about


def around(mean, spread=0.1) -> tuple:
    return mean, mean + spread, mean - spread


BPB = {"ranked_by": "val_bpb", "tokens": 100, "max_seconds": 111.1, "max_epochs": 1}
SECONDS = {"ranked_by": "train_seconds", "target_bpb": 1.3, "max_epochs": 1}


def standings(records, track) -> dict[str, str]:
    """{name: standing} from the best down."""
    return {record["name"]: str(standing) for record, standing in ranking.rank(records, track)}


def test_rank():
    """Standings of made-up records on a track of bits per byte, best first; then those that are not ranked, and why."""
    first = made_up("first", (1.20, 1.21, 1.22), (100, 101, 102))
    records = [
        first,
        made_up("better", (1.10, 1.11, 1.12), (105, 106, 104), against="first"),
        made_up("equal", (1.11, 1.09, 1.10), (100, 100, 100), against="better"),
        made_up("worse", (1.5, 1.51, 1.52), (100, 100, 100), against="first"),
        made_up("unclear", (1.0, 1.3, 1.2), (100, 100, 100), against="better"),
        made_up("slow", (1.00, 1.01, 1.02), (120, 121, 122)),
        made_up("few", (0.9, 0.8), (50, 50)),
        made_up("more", (1.0, 1.01, 1.02), (90, 90, 91), 101),
        made_up("whole steps", (1.6, 1.61, 1.62), (90, 90, 91), 100.1, against="first"),
    ]
    found = ranking.rank(records, BPB)
    assert [(record["name"], standing.kind, standing.number) for record, standing in found] == [
        ("equal", Kind.EQUAL, None), ("better", Kind.RECORD, 2), ("unclear", Kind.EQUAL, None),
        ("first", Kind.RECORD, 1), ("worse", Kind.WORSE, None), ("whole steps", Kind.WORSE, None),
        ("few", Kind.INELIGIBLE, None), ("slow", Kind.INELIGIBLE, None), ("more", Kind.INELIGIBLE, None),
    ]  # fmt: skip
    by_name = {record["name"]: standing for record, standing in found}
    p = significance.welch((1.10, 1.11, 1.12), (1.20, 1.21, 1.22))["p"]
    assert by_name["better"] == Standing(Kind.RECORD, 2, p) and str(by_name["better"]) == f"record 2, p = {p:.2g}"
    assert str(by_name["first"]) == "record 1" and str(by_name["worse"]) == "worse, p < 0.0001"
    assert str(by_name["equal"]).startswith("not significant, p = 0.2")
    assert str(by_name["few"]) == "ineligible: fewer than 3 seeds" and str(by_name["slow"]) == "ineligible: too slow"
    assert str(by_name["more"]) == "ineligible: too many tokens"

    target = tracks.target_of([1.20, 1.21, 1.22])
    fast = made_up("fast", (1.20, 1.21, 1.22), (80, 81, 82), against="first")
    short = made_up("short", (1.25, 1.24, 1.26), (50, 51, 52))
    assert standings([short, first, fast], {**SECONDS, "target_bpb": target}) == {
        "fast": "record 2, 19.8% faster", "first": "record 1", "short": "ineligible: misses the target"}  # fmt: skip
    assert standings([{**first, "max_epochs": 2}], SECONDS) == {"first": "ineligible: repeats text"}
    assert standings([first], {**BPB, "max_seconds": None}) == {"first": "ineligible: no limit yet"}
    assert standings([first], {**SECONDS, "target_bpb": None}) == {"first": "ineligible: no target yet"}


def test_a_day_is_counted_from_the_best_down_by_the_figure_of_the_track():
    """The entry with fewer bits is slower: it is counted first on one track and last on the other."""
    low = made_up("low", around(0.70, 0.001), around(40))
    fast = made_up("fast", around(0.71, 0.001), around(30))
    for records in ([low, fast], [fast, low]):
        assert standings(records, BPB) == {"low": "record 1", "fast": "worse, p = 0.00026"}
        assert standings(records, SECONDS) == {"fast": "record 1", "low": "worse, 33.3% slower"}


def test_an_entry_of_a_day_comes_behind_its_baseline():
    """Baselines of another day do not count: c names b, a names an entry of the day before."""
    old = made_up("old", (1.5,), (9,), date="2026-11-20")
    a = made_up("a", (1.3,), (9,), against="old")
    b = made_up("b", (1.1,), (9,))
    c = made_up("c", (1.0,), (9,), against="b")
    found = ranking.in_order([c, b, a, old], "val_bpb")
    assert [record["name"] for record in found] == ["old", "b", "a", "c"]


def test_a_rerun_is_no_record():
    """The same script, args file and flags with p < 0.01, on both tracks; --save-every and --seed are no recipe."""
    first = made_up("first", around(0.70, 0.001), around(40))
    same = {"files": first["files"], "flags": ["--save-every", "9", "--seed", "1"], "date": "2026-11-23"}
    again = made_up("again", around(0.69, 0.001), around(20), **same)
    for track in (BPB, SECONDS):
        assert standings([first, again], track) == {"again": "not significant: a rerun", "first": "record 1"}
        other = {**again, "flags": ["--tokens", "90"]}
        assert standings([first, other], track)["again"].startswith("record 2, ")


# Rule 6: in which session a new recipe ran, which entry it names, in how many seconds, and its standing.
RULE_6 = [
    ("2026-12-01", "A", "again", 96, "record 2, p < 0.0001"),
    ("2026-12-01", "A", "again", 98, "not significant, p = 1"),  # no faster than the rerun
    ("2026-12-01", "A", "again", 99, "not significant, p = 0.00026"),  # slower than the rerun alone
    ("2026-12-01", "B", "again", 96, "not significant: other GPU or session"),
    ("2026-12-01", None, "again", 96, "not significant: other GPU or session"),
    ("2026-12-02", "A", "again", 96, "not significant: other GPU or session"),
    ("2026-12-01", "A", "first", 96, "not significant: other GPU or session"),
    ("2026-12-01", "A", None, 96, "not significant: other GPU or session"),
    ("2026-12-01", None, None, 90, "record 2, 10.0% faster"),
    ("2026-12-01", None, None, 110, "worse, 10.0% slower"),
    ("2026-11-30", "C", "first", 99, "record 2, p = 0.00026"),  # in the session of the record itself
    ("2026-11-30", "C", "first", 101, "worse, p = 0.00026"),
]


@pytest.mark.parametrize(("day", "gpu", "against", "seconds", "standing"), RULE_6)
def test_seconds_are_tested_on_one_gpu_in_one_session(day, gpu, against, seconds, standing):
    """Elsewhere a difference below 5 % says nothing, whatever its p."""

    def record(name, seconds, day, gpu, against, **more):
        about = {"date": day, "against": against, "gpus": gpu and [gpu], **more}
        return made_up(name, (1.20, 1.21, 1.22), around(seconds), **about)

    first = record("first", 100, "2026-11-30", "C", None)
    again = record("again", 98, "2026-12-01", "A", "first", files=first["files"])
    new = record("new", seconds, day, gpu, against)
    found = standings([first, again, new], SECONDS)
    assert found["first"] == "record 1" and found["new"] == standing


def test_gpus_of_an_entry(repo, folders, tmp_path):
    """Their UUIDs are in record.json and README.md; seconds of another GPU have a difference and no test."""
    baselines = tmp_path / "baselines"
    runs = copies(repo, tmp_path, 0, 1, 2)
    script, old = runs[0] / "train_small.py", (runs[0] / "train_small.py").read_bytes()

    def on(name, gpu, *baseline):
        """An entry of the runs on one GPU; its script and losses are those of nobody else."""
        for seed, run_dir in enumerate(runs):
            (run_dir / "train_small.py").write_bytes(old + f"# {name}\n".encode())
            digest = files.sha256(script)
            machine = {"device": "NVIDIA H200", "gpu_uuid": gpu, "script_sha256": digest}
            edit(run_dir / "config.json", lambda c, machine=machine: c["machine"].update(machine))
            swap(run_dir / "log.jsonl", r'"loss": [\d.]+', f'"loss": {9 + seed}.{len(name)}')
        argv = [*runs, "--slug", name, "--out", baselines, *baseline]
        run(add, *argv)
        return baselines / f"2026-11-22_{name}"

    first = on("first", "GPU-1")
    record = entry.read_record(on("second", "GPU-1", "--baseline", first))
    assert record["gpus"] == ["GPU-1"] and record["comparison"]["train_seconds"]["p"] == 1
    folder = on("other-gpu", "GPU-2", "--baseline", first)
    assert entry.read_record(folder)["comparison"]["train_seconds"]["p"] is None
    readme = (folder / "README.md").read_text()
    assert "- training seconds: +0.00 (no test: other GPU or session)" in readme and "- GPU: GPU-2" in readme
    assert rules.problems(folder) == []
    said = run(compare, *baselines.iterdir(), "--baseline", "*first")
    assert "+0.00 (no test: other GPU or session)" in said and "p = 1" in said


# ==== flags


def test_flags_of_both_kinds_say_the_same():
    """--set with a field of the Config, as scripts took it up to 2026-11-27, and a flag of that name."""
    old = """# the recipe isn't new
        --tokens 9 --set ahead=(1.0,0.5) --set "long_layers=(3, 7)" --set stages=((0.5,4,1.0),(0.5,8,1.4))  # and so on
        --set tied=True --set fp8=False --set no_attention_layers=() --set fewest_packs=2 --set=mix_width=96"""
    new = """--tokens=9 --mtp-weights 1,0.5 --long-layers 3,7 --stages (0.5,4,1),(0.5,8,1.4)
        --tied --no-fp8 --no-attention-layers "" --min-packs 2 --mudd-width=96"""
    found = flags.parse_settings(flags.parse_args_file(new))
    assert found == flags.parse_settings(flags.parse_args_file(old))
    assert found["stages"] == [0.5, 4, 1, 0.5, 8, 1.4] and found["fp8"] == ["False"]
    assert found["tokens"] == [9] and found["no_attention_layers"] == [] and len(found) == 9
    assert flags.parse_settings(["--tied", "--log-every", "3"]) == {"tied": ["True"], "log_every": [3]}


def test_renamed_fields_have_one_shape():
    """A track asks for fields by their names of its day; an entry of today has the names of today."""
    track = {"dataset": "d", "script": "small", "hardware": {"device": "T4", "num_devices": 1}}
    track["config"] = {"mix_width": 0, "width": 64}
    known = {"datasets": {"d": {"fingerprint": "f"}}, "tracks": {"t": track}}
    record = {"dataset": {"fingerprint": "f"}, "track": "small", "hardware": track["hardware"]}
    for config, on in (({"mudd_width": 0, "width": 64}, ["t"]), ({"mix_width": 0, "width": 64}, ["t"]),
                       ({"mudd_width": 96, "width": 64}, []), (None, [])):  # fmt: skip
        assert tracks.tracks_of({**record, "config": config}, known) == on
