"""Nothing saved is lost, nothing damaged is accepted: checkpoints, --resume, the lock, and the way a run ends."""

import builtins
import contextlib
import dataclasses
import errno
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import filelock
import pytest
import torch
import train_small as ts
from safetensors.torch import load_file

from commands import at_step, entries, flags, losses, main, passes, refused, saved, snapshot, stop_at
from processes import python
from tiny import ALONE, MERGES, ROOT, tiny_config, write_dataset

pytestmark = pytest.mark.usefixtures("only_the_run", "signal_handlers")

FILES = (*ts.CHECKPOINT_FILES, "state.json")


def files_of(run_dir, step: int) -> dict[str, bytes]:
    """The files of a checkpoint; of state.json all but the time it took, and so the hash."""
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    found = {name: (folder / name).read_bytes() for name in FILES}
    state = json.loads(found["state.json"])
    found["state.json"] = {name: value for name, value in state.items() if name not in ("train_seconds", "sha256")}
    return found


def assert_same_run(run_dir, reference) -> None:
    """Checkpoints and losses to the last bit, and a log without gaps or repetitions."""
    for step in (9, 12):
        assert files_of(run_dir, step) == files_of(reference, step)
    kinds = [[(e["step"], "loss" in e) for e in entries(d)] for d in (run_dir, reference)]
    assert kinds[0] == kinds[1] and losses(run_dir) == losses(reference)


@pytest.fixture
def run_dir(halfway, tmp_path):
    """A copy of the run that was stopped after step 6."""
    return shutil.copytree(halfway, tmp_path / "run")


@pytest.fixture
def state():
    """A tiny state to save."""
    config = tiny_config(num_layers=3, no_attention_layers=(), long_layers=(1,), key_offset_layers=(1,),
                         value_embed_layers=(0,), bigram_rows=0, keep_checkpoints=2)  # fmt: skip
    return ts.build_state(config, ALONE, lambda text: None)


def save(state, run_dir, step, val_bpb=None):
    state.step = step
    progress = ts.Progress(scores={"val_bpb": val_bpb} if val_bpb else None)
    ts.save_checkpoint(state, run_dir, dataclasses.asdict(progress))


def damage(path, how: str, at: float = 0.7) -> None:
    """Truncates a file, flips one bit of it or removes it."""
    content = path.read_bytes()
    place = int(at * len(content))
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    else:
        path.write_bytes(content[:place])


# ---- kill, stop, resume

KILL = """
import os, signal, sys
import torch
import train_small as ts
torch.set_num_threads(1)
ts.report = ts.warm_up = lambda *arguments: None
name, last = sys.argv[1], int(sys.argv[2])
original, calls = getattr(ts, name), []
def killed(*arguments):
    calls.append(name)
    if len(calls) == last:
        if name == "write_tensors":
            arguments[0].write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(ts, name, killed)
sys.exit(ts.main(sys.argv[3:]))
"""


@pytest.mark.parametrize(("name", "last"), (("train_step", 8), ("write_tensors", 6)))
def test_kill_and_resume_is_bit_identical(finished, dataset_dir, tmp_path, name, last):
    """kill -9 in step 8, or halfway through saving step 9; --resume ends with the undisturbed run's files."""
    run_dir = tmp_path / "killed"
    killed = python("-c", KILL, name, last, *flags(dataset_dir, run_dir))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert saved(run_dir) == [3, 6] and max(losses(run_dir)) > 6
    passes("--resume", "--run-dir", run_dir)
    assert_same_run(run_dir, finished)
    assert len(list(run_dir.glob("checkpoints/*"))) == 4, "the half-written checkpoint is gone"


@pytest.mark.parametrize("name", ("SIGTERM", "SIGINT", "SIGHUP"))
def test_signal_saves_and_resumes(finished, dataset_dir, tmp_path, monkeypatch, name):
    """SIGTERM, Ctrl-C or a closed terminal in step 4: a checkpoint of step 4, exit code 1 and how to go on."""
    run_dir = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_at(patch, 4, getattr(signal, name))
        err = refused(*flags(dataset_dir, run_dir))
    assert "stopped by a signal at step 4, saved" in err and f"--resume --run-dir {run_dir}" in err
    assert saved(run_dir) == [3, 4] and max(losses(run_dir)) == 4
    passes("--resume", "--run-dir", run_dir)
    assert_same_run(run_dir, finished)


def test_resume_of_a_finished_run(finished, tmp_path):
    """Nothing left to do: the same result again, no step repeated, checkpoints and config untouched."""
    run_dir = shutil.copytree(finished, tmp_path / "again")
    checkpoints = snapshot(run_dir / "checkpoints")
    result = json.loads((run_dir / "result.json").read_text())
    (run_dir / "result.json").unlink()  # killed before it was written
    again = json.loads(passes("--resume", "--run-dir", run_dir).splitlines()[-1])
    for name in ("val_bpb", "steps", "tokens", "train_seconds", "tokens_per_second", "mfu"):
        assert again[name] == result[name]
    written = (run_dir / "result.json").read_bytes()
    assert again == json.loads(written)
    passes("--resume", "--run-dir", run_dir)
    assert (run_dir / "result.json").read_bytes() == written, "its peak memory is that of the training"
    assert snapshot(run_dir / "checkpoints") == checkpoints
    for name in ("config.json", "log.jsonl"):
        assert (run_dir / name).read_bytes() == (finished / name).read_bytes()


def test_a_longer_run_drops_the_result_of_the_shorter_one(finished, tmp_path, monkeypatch):
    """It would be taken for that of the newest checkpoint."""
    run_dir = shutil.copytree(finished, tmp_path / "run")
    (run_dir / "report.md").touch()
    with monkeypatch.context() as patch:
        stop_at(patch, 14)
        refused("--resume", "--run-dir", run_dir, "--steps", "16")
    assert saved(run_dir)[-1] == 14
    assert not (run_dir / "result.json").exists() and not (run_dir / "report.md").exists()
    passes("--resume", "--run-dir", run_dir)
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 16


# ---- the script that runs


def test_the_script_that_runs_is_kept(dataset_dir, finished, tmp_path, monkeypatch):
    """Byte by byte as it was when it started, whatever an editor saves meanwhile; from there the run goes on."""
    path, run_dir = tmp_path / "train_small.py", tmp_path / "run"
    source = (ROOT / "train_small.py").read_bytes().replace(b"\n", b"\r\n")
    path.write_bytes(source)
    real = builtins.__import__

    def imported(name, *rest):
        if name == "safetensors.torch":
            path.write_bytes(b"raise SystemExit('edited')\n")
        return real(name, *rest)

    spec = importlib.util.spec_from_file_location("train_small_copy", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_small_copy", script)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", imported)
        spec.loader.exec_module(script)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(dataset_dir)
    (tmp_path / "runs").symlink_to(ROOT / "runs")
    stop_at(monkeypatch, 6, script=script)
    assert script.main(flags("data", run_dir)) == 1
    assert saved(run_dir) == [3, 6] and (run_dir / "train_small.py").read_bytes() == source != path.read_bytes()
    assert ts.read_description(run_dir)["machine"]["script_sha256"] == ts.hashlib.sha256(source).hexdigest()
    # The run directory alone suffices, from any folder; data and report's tool are those where the run began.
    done = python(run_dir / "train_small.py", "--resume", cwd="/")
    assert done.returncode == 0, done.stderr
    assert (run_dir / "report.md").is_file(), done.stdout
    for name in ts.CHECKPOINT_FILES:
        assert files_of(run_dir, 12)[name] == files_of(finished, 12)[name]
    assert [start["step"] for start in ts.read_description(run_dir)["starts"]] == [0, 6]
    assert (run_dir / "train_small.py").read_bytes() == source


# ---- damaged and foreign checkpoints


@pytest.mark.parametrize(
    ("name", "how", "at"),
    [(name, "truncated", at) for name in FILES for at in (0, 0.7)]
    + [(name, "missing", 0) for name in ts.CHECKPOINT_FILES]
    + [(name, "flipped", at) for name in FILES for at in (0.01, 0.999)],
)
def test_a_damaged_checkpoint_is_passed_over(run_dir, name, how, at):
    """Whatever happened to whichever file: the one before is taken, and one line names both."""
    damage(run_dir / "checkpoints" / "step_000006" / name, how, at)
    lines = []
    assert ts.newest_whole(run_dir, lines.append).name == "step_000003"
    assert len(lines) == 1 and lines[0].startswith("skipped step_000006: ") and "step_000006" in lines[0][20:]


@pytest.mark.parametrize("name", ("state.json", "config.json"))
def test_no_bit_may_change(run_dir, name):
    """Every 101st single-bit flip, and cuts at every 50th byte: none is read, whether it is still JSON or not."""
    (path,) = run_dir.glob(f"**/step_000006/{name}") if name == "state.json" else [run_dir / name]
    read = (lambda: ts.check_checkpoint(path.parent, ())) if name == "state.json" else (lambda: ts.read_config(run_dir))
    content = path.read_bytes()
    read()
    changed = [content[:length] for length in range(0, len(content), 50)] + [b"[]", b"3", b'"sha256"', b"{}"]
    for place in range(0, 8 * len(content), 101):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        changed.append(bytes(flipped))
    for found in changed:
        path.write_bytes(found)
        with pytest.raises(ts.UserError, match="is damaged"):
            read()


def test_a_run_goes_on_before_the_damage(run_dir, finished):
    """It ends with the files of an undisturbed run, also where it saves at other steps for a while."""
    damage(run_dir / "checkpoints" / "step_000006" / "optimizer.safetensors", "truncated")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 4)
        refused("--resume", "--run-dir", run_dir, "--keep-checkpoints", "1")
    assert 4 in saved(run_dir), "what was just saved stays, though there is a folder of a later step"
    out = passes("--resume", "--run-dir", run_dir, "--keep-checkpoints", "4")
    assert "skipped step_000006: " in out and "resumed at step 4" in out
    assert saved(run_dir)[-3:] == [6, 9, 12]
    assert_same_run(run_dir, finished)


def test_newest_and_best_checkpoints_are_kept(state, tmp_path):
    """keep_checkpoints newest ones, and the one with the lowest validation wherever it lies.

    A copy that somebody made beside them is neither loaded nor removed; half of a killed save goes.
    """
    folder = tmp_path / "checkpoints"
    foreign = {"step_000004 (copy)", "step_000099_old", "best"}
    for name in (*foreign, "saving"):
        (folder / name).mkdir(parents=True)
        (folder / name / "state.json").write_text("{}")
    kept = []
    for step, bpb in enumerate((3.0, 1.5, None, 2.0, None, 1.2, 1.3, None, 1.4), 1):
        save(state, tmp_path, step, bpb)
        kept.append(saved(tmp_path))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [6, 7, 8], [6, 8, 9]]
    assert {path.name for path in folder.iterdir()} == {*foreign, "step_000006", "step_000008", "step_000009"}


def test_older_checkpoints_survive_a_bad_save(state, tmp_path):
    """A real write really fails. The error is the system's own; nothing that is there has changed."""
    for step in (1, 2):
        save(state, tmp_path, step)
    before = snapshot(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(OSError):
            save(state, tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after = {path: content for path, content in snapshot(tmp_path).items() if "/saving/" not in path}
    assert after == before


def test_a_first_save_that_failed(dataset_dir, finished, tmp_path, monkeypatch):
    """There is nothing to resume; the same command starts again, and nothing of the first try remains in the log."""
    argv = flags(dataset_dir, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(ts, "write_tensors", lambda path, tensors: Path("/dev/full").write_bytes(b"half"))
        assert "No space left" in refused(*argv)
    assert "start again without --resume" in refused("--resume", "--run-dir", tmp_path / "run")
    passes(*argv)
    assert_same_run(tmp_path / "run", finished)


def test_a_last_save_that_failed(dataset_dir, finished, tmp_path, monkeypatch):
    """The run is not taken for complete: it has no result, and --resume trains the steps since the save before."""
    run_dir = tmp_path / "run"
    save = ts.save

    def full_disk(run):
        if run.state.step == 12:
            raise OSError(errno.ENOSPC, "No space left")
        save(run)

    with monkeypatch.context() as patch:
        patch.setattr(ts, "save", full_disk)
        assert "No space left" in refused(*flags(dataset_dir, run_dir))
    assert saved(run_dir)[-1] == 9 and not (run_dir / "result.json").exists()
    passes("--resume", "--run-dir", run_dir)
    assert_same_run(run_dir, finished)


def test_tensors_are_those_that_were_written(tmp_path):
    """By the library that everybody reads them with; the sha256 is that of the file."""
    written = {str(dtype): torch.arange(12).view(3, 4).to(dtype) for dtype in ts.SAFETENSORS_NAMES}
    written |= {"transposed": torch.randn(3, 5).mT, "empty": torch.zeros(0, 2), "number": torch.tensor(3.5)}
    written["larger than a piece"] = torch.arange(2**24 + 5).int()
    path = tmp_path / "some.safetensors"
    assert ts.write_tensors(path, written) == ts.hashlib.sha256(path.read_bytes()).hexdigest()
    read = load_file(path)
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


# ---- what --resume accepts


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("script", "started with a different train_small.py; continue it with"),
        ("train_medium.py", "is a run of train_medium.py; continue it with python train_medium.py --resume --run-dir"),
        ("data", "is not the data that"),
        ("tokenizer", "is not the data that"),  # one of the same size
        (["--cooldown", "0.3"], "--resume cannot change --cooldown: "),
        (["--stages", "(1.0,2,1.0)"], "--resume cannot change --stages: "),
        (["--seed", "1"], "has 0; omit it"),
    ],
    ids=str,
)
def test_another_run_is_not_resumed(run_dir, tmp_path, monkeypatch, what, message):
    """Refused with the difference, and nothing is touched."""
    argv = ["--resume", "--run-dir", run_dir, "--steps", "7"]
    if what == "script":
        monkeypatch.setattr(ts, "SOURCE", ts.SOURCE + b"\n")
    elif what == "train_medium.py":
        (run_dir / "train_small.py").rename(run_dir / what)
    elif what == "data":
        argv += ["--data", write_dataset(tmp_path / "other", words=((900, 40, 700), (800, 90)))]
    elif what == "tokenizer":
        argv += ["--data", write_dataset(tmp_path / "other", merges=[*MERGES[:-1], b"qq"])]
    else:
        argv += what
    before = snapshot(run_dir)
    assert message in refused(*argv)
    assert snapshot(run_dir) == before


def test_the_flags_of_the_start_may_stand_there_again(run_dir, dataset_dir):
    """Whoever adds --resume to the command of the run changes nothing."""
    passes(*flags(dataset_dir, run_dir, "--resume", steps=7))


def test_what_is_free(run_dir, dataset_dir, tmp_path):
    """Intervals, where the text lies, how it is computed, and the length: none of it makes another run."""
    elsewhere = shutil.copytree(dataset_dir, tmp_path / "moved")
    passes("--resume", "--run-dir", run_dir, "--steps", "7", "--eval-every", "0", "--save-every", "5",
           "--log-every", "2", "--data", elsewhere, "--micro-batch-tokens", "128", "--attention", "sdpa",
           "--dtype", "float32", "--no-compile", "--keep-checkpoints", "1", "--max-epochs", "2")  # fmt: skip
    assert ts.read_config(run_dir).data == str(elsewhere)


def test_a_relative_path_of_the_text_stays_relative(dataset_dir, tmp_path, monkeypatch):
    """So a folder with run and text may move. From another folder the text is found as well."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(dataset_dir, "text")
    passes(*flags("text", "run", steps=3))
    passes("--resume", "--run-dir", "run", "--steps", "5")
    assert ts.read_config(tmp_path / "run").data == "text"

    monkeypatch.chdir(tmp_path.parent)
    passes("--resume", "--run-dir", tmp_path / "run", "--steps", "7")
    assert ts.read_config(tmp_path / "run").data == str(tmp_path / "text")


def test_resume_remembers_new_flags(run_dir):
    """A run that is made longer and stopped again goes on to its new end without the flags being said twice."""
    before = ts.read_description(run_dir)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 8)
        refused("--resume", "--run-dir", run_dir, "--steps", "10")
    assert json.loads(passes("--resume", "--run-dir", run_dir).splitlines()[-1])["steps"] == 10
    after = ts.read_description(run_dir)
    assert [entry["step"] for entry in after["starts"]] == [0, 6, 8]
    assert after["config"] == before["config"] | {"tokens": 10 * 3 * 128}


def test_a_longer_run_has_the_stages_of_its_length(dataset_dir, tmp_path):
    """Stages by the rule are derived anew: from the step reached on, tokens and rates are those of a fresh run."""
    for name, steps in (("short", 6), ("long", 14)):
        passes(*flags(dataset_dir, tmp_path / name, steps=steps, stages=(), min_packs=1))
    short, long = (ts.read_config(tmp_path / name) for name in ("short", "long"))
    assert len(short.stage_table) < len(long.stage_table)
    passes("--resume", "--run-dir", tmp_path / "short", "--tokens", long.tokens)
    logs = [[e for e in entries(tmp_path / name) if "loss" in e and e["step"] > 6] for name in ("short", "long")]
    found, want = ([(e["step"], e["tokens"], e["lr"]) for e in log] for log in logs)
    assert found == want and len(found) == 8
    table = [dataclasses.asdict(stage) for stage in long.stage_table]
    assert ts.read_description(tmp_path / "short")["stage_table"] == table


def test_a_run_that_ends_before_the_step_reached(run_dir):
    """Its result is that of the step reached, and nothing is saved anew."""
    passes("--resume", "--run-dir", run_dir, "--steps", "5")
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 6 and saved(run_dir) == [3, 6]


def test_damaged_lines_of_the_log_are_dropped(run_dir):
    """Half a line, no JSON, no object, no step, and bits that are no text."""
    good = entries(run_dir)
    with (run_dir / "log.jsonl").open("ab") as file:
        file.write(b'nothing\n[1]\n{"loss": 1.0}\n{"step": "3"}\n{"step": null}\n\xff\xfe\n7\n{"step": 3, "lo')
    passes("--resume", "--run-dir", run_dir, "--steps", "7")
    assert entries(run_dir)[: len(good)] == good and len(entries(run_dir)) == len(good) + 2


# ---- one run, one owner


def test_a_second_owner_is_kept_out(run_dir, dataset_dir):
    """New runs and resumed ones."""
    with filelock.FileLock(run_dir / ".lock"):
        before = snapshot(run_dir)
        assert f"another process is training in {run_dir}" in refused("--resume", "--run-dir", run_dir)
        assert f"another process is training in {run_dir}" in refused(*flags(dataset_dir, run_dir))
        assert snapshot(run_dir) == before
    passes("--resume", "--run-dir", run_dir)


def test_a_file_system_without_locks(run_dir, monkeypatch):
    """The run goes on."""

    def refuse(*args, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(ts.filelock.FileLock, "acquire", refuse)
    passes("--resume", "--run-dir", run_dir)


# ---- how a run ends


@pytest.mark.parametrize("where", ("warm_up", "prepare_loop", "save_checkpoint", "finish"))
def test_ctrl_c_is_one_line(dataset_dir, tmp_path, monkeypatch, where):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ts, where, interrupt)
    code, _, err = main(*flags(dataset_dir, tmp_path / "run", steps=2))
    assert (code, err) == (130, "stopped at once; continue with --resume, or start again if nothing is saved yet\n")


def test_our_own_bugs_keep_their_traceback(dataset_dir, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(ts, "build_state", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        ts.main(flags(dataset_dir, tmp_path / "run"))
    assert capsys.readouterr().err == "error: please report what follows, if it is a fault of the script\n"


@pytest.mark.parametrize("later", (0.05, 1.1))
def test_a_second_ctrl_c(monkeypatch, later):
    """Through torchrun one comes twice, from the terminal and from torchrun: only a later one means at once."""
    now = 100.0
    monkeypatch.setattr(ts.time, "monotonic", lambda: now)
    stopper = ts.Stopper(ALONE)
    assert not stopper.asked(1)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    now += later
    with pytest.raises(KeyboardInterrupt) if later > 1 else contextlib.nullcontext():
        os.kill(os.getpid(), signal.SIGINT)
    assert stopper.asked(1)


def test_a_loss_that_is_not_finite(finished, dataset_dir, tmp_path, monkeypatch):
    """Weights become NaN in step 8: the run ends, and nothing that is not finite is saved; from there it can go on."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 8, lambda state: state.model.head.data.fill_(float("nan")))
        err = refused(*flags(dataset_dir, run_dir))
    assert "the loss became nan at step 9; start again with lower rates, e.g. half of --muon-lr" in err
    assert saved(run_dir) == [3, 6]
    for name in ("master", "moments"):  # after a loss that was finite, in the step that is saved
        with monkeypatch.context() as patch:
            parts = (lambda slot: [slot.master]) if name == "master" else (lambda slot: slot.moments.values())
            at_step(patch, 9, lambda state: [p.fill_(float("nan")) for p in parts(state.optimizer.slots[0])])  # noqa: B023
            err = refused("--resume", "--run-dir", run_dir)
        assert "became nan at step 9" in err and saved(run_dir) == [3, 6]
    passes("--resume", "--run-dir", run_dir)
    assert_same_run(run_dir, finished)


STOP = """
import os, signal, sys, time
from pathlib import Path
import train_small as ts
main = os.environ["RANK"] == "0"
step, write = ts.train_step, ts.write_checkpoint
def train_step(state, batch):
    if state.step == 7 and not main:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(state, batch)
def write_checkpoint(*arguments):
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)  # from the launcher, which passes on what it was sent
    write(*arguments)
ts.train_step, ts.write_checkpoint = train_step, write_checkpoint
code = ts.main(sys.argv[1:])
print("process", os.environ["RANK"], "ended with", [p.name for p in Path(os.environ["RUN_DIR"]).glob("checkpoints/*")])
sys.exit(code)
"""


def test_a_stop_waits_for_the_checkpoint(finished, dataset_dir, tmp_path):
    """One of two processes is asked to stop: both do at step 10, and none ends before process 0 has saved.

    One process alone goes on from there.
    """
    run_dir = tmp_path / "run"
    argv = [*flags(dataset_dir, run_dir), "--save-every", "0"]
    done = python("-c", STOP, *argv, ranks=2, env={**os.environ, "RUN_DIR": str(run_dir)})
    assert done.returncode == 1 and "stopped by a signal at step 10, saved" in done.stderr, done.stderr
    assert "stopped at once" not in done.stderr
    for rank in (0, 1):
        assert f"process {rank} ended with ['step_000010']" in done.stdout, done.stdout
    passes("--resume", "--run-dir", run_dir)
    assert losses(run_dir) == pytest.approx(losses(finished), rel=1e-4)
