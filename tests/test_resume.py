"""Nothing saved is lost, nothing damaged is accepted: checkpoints, --resume, the lock, and the way a run ends."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import train_medium as tm
import train_small as ts

from conftest import ALONE, tiny_config, write_dataset
from processes import python
from test_runs import assert_same_run, at_step, entries, flags, saved, signal_handlers, snapshot  # noqa: F401

FILES = (*ts.CHECKPOINT_FILES, "state.json")
ARCHITECTURE = {"num_layers": 3, "no_attention_layers": (), "long_layers": (1,), "key_offset_layers": (1,),
                "value_embed_layers": (0,), "bigram_rows": 0}  # fmt: skip


def main(*argv) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of train_small.py."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = ts.main([str(a) for a in argv])
    return code, out.getvalue(), err.getvalue()


def refused(*argv) -> str:
    """The one sentence that train_small.py ends with, and exit code 1."""
    code, _, err = main(*argv)
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module")
def finished(dataset_dir, tmp_path_factory):
    """An undisturbed run of 20 steps. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    assert main(*flags(dataset_dir, run_dir, keep_checkpoints=4))[0] == 0
    return run_dir


@pytest.fixture(scope="module")
def halfway(dataset_dir, tmp_path_factory):
    """A run that was stopped after step 10 of 20, with checkpoints of steps 5 and 10. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "halfway"
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 10, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        assert main(*flags(dataset_dir, run_dir, keep_checkpoints=4))[0] == 1
    return run_dir


@pytest.fixture
def state():
    """A tiny state to save."""
    return ts.build_state(tiny_config(**ARCHITECTURE, keep_checkpoints=2), ALONE, lambda text: None)


def save(state, run_dir, step, val_bpb=None):
    state.step = step
    ts.save_checkpoint(state, run_dir, dataclasses.asdict(ts.Progress(val_bpb=val_bpb)))


def damage(path, how: str, at: float = 0.7) -> None:
    """Truncates a file, flips one bit of it, empties or removes it."""
    content = path.read_bytes()
    place = int(at * len(content))
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    else:
        path.write_bytes(content[:place] if how == "truncated" else b"")


# ---- damaged checkpoints


@pytest.mark.parametrize("how", ("truncated", "flipped", "empty", "missing"))
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over(halfway, tmp_path, name, how):
    """Whatever happened to whichever file: the one before is taken, and one line names both."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    damage(run_dir / "checkpoints" / "step_000010" / name, how)
    lines = []
    assert ts.newest_whole(run_dir, lines.append).name == "step_000005"
    assert len(lines) == 1 and "\n" not in lines[0]
    assert lines[0].startswith("skipped step_000010: ") and name in lines[0]


def test_flips_anywhere_in_a_checkpoint_are_seen(halfway, tmp_path):
    """One bit at each of 20 places of each file: headers, tensors, JSON."""
    folder = shutil.copytree(halfway / "checkpoints" / "step_000010", tmp_path / "step_000010")
    for name in FILES:
        content = (folder / name).read_bytes()
        for i in range(20):
            damage(folder / name, "flipped", i / 20)
            with pytest.raises(ts.UserError, match=name):
                ts.check_checkpoint(folder)
            (folder / name).write_bytes(content)
    assert ts.check_checkpoint(folder)["step"] == 10


def test_a_run_goes_on_before_the_damage(halfway, finished, tmp_path):
    """It ends with the weights of an undisturbed run; what is damaged is set aside and never loaded again."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    damage(run_dir / "checkpoints" / "step_000010" / "optimizer_2.safetensors", "flipped")
    (run_dir / "checkpoints" / "step_000010.damaged").mkdir()  # of an earlier fault at this step
    (run_dir / "checkpoints" / "step_000010.damaged" / "state.json").touch()
    code, out, err = main("--resume", "--run-dir", run_dir)
    assert code == 0, err
    skipped = [line for line in out.splitlines() if line.startswith("skipped")]
    assert len(skipped) == 1 and "step_000010/optimizer_2.safetensors is damaged" in skipped[0]
    assert "resumed at step 5" in out and saved(run_dir) == [5, 10, 15, 20]
    assert (run_dir / "checkpoints" / "step_000010.damaged" / "model.safetensors").is_file()
    assert_same_run(run_dir, finished)


def test_no_whole_checkpoint_is_one_sentence(halfway, tmp_path):
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    for folder in ts.checkpoints(run_dir):
        damage(folder / "model.safetensors", "truncated")
    err = refused("--resume", "--run-dir", run_dir)
    assert f"none of the 2 checkpoints in {run_dir} is whole" in err and "start again" in err


def test_a_checkpoint_of_another_version_is_one_sentence(halfway, monkeypatch, tmp_path):
    """A version whose optimizer keeps other moments cannot go on from it."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    load_file = safetensors.torch.load_file
    older = lambda path: {n: t for n, t in load_file(path).items() if not n.startswith("value_embed.row")}
    monkeypatch.setattr(safetensors.torch, "load_file", older)
    err = refused("--resume", "--run-dir", run_dir)
    assert "has no 'value_embed.row_square', so another version of this script wrote it; call the script that" in err


def test_checkpoints_from_step_a_million_on(state, tmp_path):
    """They are sorted as numbers; seven digits come after six."""
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        save(state, tmp_path, step)
    assert saved(tmp_path) == [1_000_000, 1_000_001]
    assert ts.newest_whole(tmp_path, print).name == "step_1000001"
    assert ts.load_checkpoint(state, ts.checkpoints(tmp_path)[-1])["step"] == 1_000_001


def test_other_folders_are_left_alone(state, tmp_path):
    """A copy that somebody made beside the checkpoints is neither loaded nor removed."""
    save(state, tmp_path, 4)
    foreign = ("step_000004 (copy)", "step_9", "step_000009_old", "step_000009.damaged", "best")
    for name in foreign:
        shutil.copytree(tmp_path / "checkpoints" / "step_000004", tmp_path / "checkpoints" / name)
    for step in (5, 6, 7):
        save(state, tmp_path, step)
    assert saved(tmp_path) == [6, 7] and ts.newest_whole(tmp_path, print).name == "step_000007"
    assert all((tmp_path / "checkpoints" / name / "state.json").is_file() for name in foreign)


def test_leftovers_of_killed_saves_are_removed(state, tmp_path):
    for name in (".step_000002.tmp", ".step_000003.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    save(state, tmp_path, 3)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def half_a_file(tensors, path):
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def other_bits(tensors, path):
    """A disk that turns one bit of what is written."""
    real_save_file(tensors, path)
    damage(path, "flipped", 0.9)


def other_values(tensors, path):
    """A file that is whole, but not what was asked for."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    name = max(changed, key=lambda name: changed[name].numel())
    changed[name].view(-1)[-1] += 1
    real_save_file(changed, path)


real_save_file = safetensors.torch.save_file


@pytest.mark.parametrize("disk", (half_a_file, other_bits, other_values))
def test_older_checkpoints_survive_a_bad_save(state, tmp_path, monkeypatch, disk):
    """They are only removed after the new one was read back."""
    for step in (1, 2):
        save(state, tmp_path, step)
    before = snapshot(tmp_path)
    monkeypatch.setattr(safetensors.torch, "save_file", disk)
    with pytest.raises(ts.UserError, match=r"step 3 could not be written .* go on with --resume"):
        save(state, tmp_path, 3)
    assert snapshot(tmp_path) == before and saved(tmp_path) == [1, 2]


def test_files_are_on_the_disk_before_the_rename(state, tmp_path, monkeypatch):
    """Each file and its folder are synced, then comes the rename, then the folder above, then older ones go."""
    save(state, tmp_path, 1)
    save(state, tmp_path, 2)
    calls = []

    def note(module, name, paths):
        real = getattr(module, name)

        def call(*args, **kwargs):
            calls.append((name, *(str(a).rpartition("/")[2] for a in args[:paths])))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    note(ts, "sync_to_disk", 1)
    note(os, "replace", 2)
    note(shutil, "rmtree", 1)
    save(state, tmp_path, 3)
    folder = ".step_000003.tmp"
    files = [("sync_to_disk", name) for name in ts.CHECKPOINT_FILES]
    order = [("sync_to_disk", folder), ("replace", folder, "step_000003"), ("sync_to_disk", "checkpoints"),
             ("rmtree", "step_000001")]  # fmt: skip
    seen = [call for call in calls if call in files + order]
    assert sorted(seen[:3]) == files, "three threads write the three files, in any order"
    assert seen[3:] == order


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_broken_weights_are_not_saved(state, tmp_path, value):
    """Nor advised: the sentence names the checkpoint before, and --resume-changed where rates are lowered."""
    save(state, tmp_path, 1)
    before = snapshot(tmp_path)
    next(iter(state.model.parameters())).data.view(-1)[3] = value
    with pytest.raises(ts.UserError, match="no longer finite at step 2.*step_000001 with --resume --resume-changed"):
        save(state, tmp_path, 2)
    assert snapshot(tmp_path) == before


# ---- what --resume accepts


@pytest.fixture(scope="module")
def other_text(tmp_path_factory):
    """A dataset of the same tokenizer with other documents."""
    return write_dataset(tmp_path_factory.mktemp("data") / "other", words=((900, 40, 700), (800, 90)))


def edited_script(monkeypatch):
    real = ts.describe_machine
    monkeypatch.setattr(ts, "describe_machine", lambda ranks: {**real(ranks), "script_sha256": "0" * 64})


@pytest.mark.parametrize("what", ("script", "data", "cooldown", "stages", "val_tokens", "adam_lr"))
def test_another_run_is_not_resumed(halfway, other_text, tmp_path, monkeypatch, what):
    """Refused with the difference, and nothing is touched; with --resume-changed it goes on and says so for ever."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    before = snapshot(run_dir)
    argv = ["--resume", "--run-dir", run_dir, "--steps", "11"]
    if what == "script":
        edited_script(monkeypatch)
        difference = "train_small.py was edited"
    elif what == "data":
        argv += ["--data", other_text]
        difference = f"{other_text} holds other data"
    else:
        new = {"cooldown": 0.3, "stages": ((1.0, 2, 1.0),), "val_tokens": 700, "adam_lr": 0.001}[what]
        argv += ["--set", f"{what}={new}"]
        difference = f"{what} was {getattr(ts.read_config(run_dir), what)} and is {new}"

    err = refused(*argv)
    assert difference in err and "--resume-changed" in err and "voids record status" in err
    after = {path: content for path, content in snapshot(run_dir).items() if not path.endswith(".lock")}
    assert after == {path: content for path, content in before.items() if not path.endswith(".lock")}
    code, _, err = main(*argv, "--resume-changed")
    assert code == 0, err
    starts = ts.read_description(run_dir)["starts"]
    assert [start["changed"] for start in starts] == [[], [difference]]
    assert [start["step"] for start in starts] == [0, 10]


def test_what_is_free(halfway, dataset_dir, tmp_path):
    """Intervals, where the text lies, how it is computed, and the length: none of it makes another run."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    elsewhere = shutil.copytree(dataset_dir, tmp_path / "moved")
    more = ["--set", "keep_checkpoints=1", "--set", "sample_prompts=('the',)", "--set", "sample_tokens=3",
            "--set", "sample_temperature=0.0"]  # fmt: skip
    code, _, err = main("--resume", "--run-dir", run_dir, "--steps", "11", "--eval-every", "0", "--save-every", "3",
                        "--log-every", "2", "--data", elsewhere, "--micro-batch-tokens", "128", "--attention", "sdpa",
                        "--dtype", "float32", "--no-compile", *more)  # fmt: skip
    assert code == 0, err
    assert [start["changed"] for start in ts.read_description(run_dir)["starts"]] == [[], []]
    assert ts.read_config(run_dir).data == str(elsewhere)
    assert {"tokens", "data", "dtype"} <= set(ts.FREE_ON_RESUME)
    known = {f.name for f in dataclasses.fields(ts.Config)} & {f.name for f in dataclasses.fields(tm.Config)}
    assert set(ts.FREE_ON_RESUME) <= known and not set(ts.FREE_ON_RESUME) & set(ts.FROZEN_ON_RESUME)


def test_an_edited_description_is_refused(halfway, tmp_path):
    """config.json is sealed: a rate that somebody changed in it would be a lie about the steps before."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    path = run_dir / "config.json"
    whole = path.read_text()
    for edit in (whole.replace('"cooldown": 0.6', '"cooldown": 0.5'), whole.replace('"sha256": "', '"sha256": "0'),
                 whole.replace('"step": 0', '"step": 1')):  # fmt: skip
        assert edit != whole
        path.write_text(edit)
        assert "config.json was changed after it was written" in refused("--resume", "--run-dir", run_dir)


def test_damaged_lines_of_the_log_are_dropped(halfway, tmp_path):
    """Half a line, no JSON, no object, no step, and bits that are no text; one line says how many."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    good = entries(run_dir)
    with (run_dir / "log.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "lo\nnothing\n[1]\n{"loss": 1.0}\n{"step": "3"}\n{"step": null}\n\xff\xfe\n7\n')
    code, out, err = main("--resume", "--run-dir", run_dir, "--steps", "11")
    assert code == 0, err
    assert re.findall(r"dropped .*", out) == [f"dropped 8 damaged line(s) of {run_dir}/log.jsonl"]
    assert entries(run_dir)[: len(good)] == good


@pytest.mark.parametrize(
    "line", ('{"step": 2, "loss": 1.0}', '{"step": 2, "tokens": null, "loss": 1, "bpb": [], "val_bpb": "x"}')
)
def test_a_report_from_a_log_with_gaps(halfway, tmp_path, line):
    """A line that lost a key to a flipped bit is left out of the picture."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    with (run_dir / "log.jsonl").open("a") as file:
        file.write(f"{line}\n")
    code, _, err = main("--resume", "--run-dir", run_dir, "--steps", "11")
    assert code == 0, err
    assert (run_dir / "curve.png").is_file()


@pytest.mark.parametrize("how", ("truncated", "flipped", "missing"))
def test_a_damaged_result_is_made_again(finished, tmp_path, how):
    """It is compared with the sealed checkpoint, so no wrong number is printed."""
    run_dir = shutil.copytree(finished, tmp_path / "run")
    path = run_dir / "result.json"
    right = json.loads(path.read_text())
    if how == "flipped":
        path.write_text(path.read_text().replace(f'"val_bpb": {str(right["val_bpb"])[:3]}', '"val_bpb": 1.0'))
    else:
        damage(path, how)
    code, out, err = main("--resume", "--run-dir", run_dir)
    assert code == 0, err
    again = json.loads(out.splitlines()[-1])
    for name in ("val_bpb", "steps", "tokens", "train_seconds"):
        assert again[name] == right[name] == json.loads(path.read_text())[name]
    assert again["tokens_per_second"] == pytest.approx(right["tokens"] / right["train_seconds"])


def test_a_finished_run_compiles_nothing(finished, tmp_path, monkeypatch):
    """Its result is printed again before a model is built."""
    run_dir = shutil.copytree(finished, tmp_path / "run")
    before = snapshot(run_dir)
    monkeypatch.setattr(ts, "build_state", lambda *args: pytest.fail("a model was built"))
    code, out, err = main("--resume", "--run-dir", run_dir)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1]) == json.loads((run_dir / "result.json").read_text())
    assert {k: v for k, v in snapshot(run_dir).items() if k in before} == before


def test_operations_are_counted_over_resumes(halfway, finished, tmp_path):
    """The MFU of a result that is made again needs those of the whole run."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    assert main("--resume", "--run-dir", run_dir)[0] == 0
    counted = [ts.read_state(ts.checkpoints(folder)[-1])["flops"] for folder in (run_dir, finished)]
    assert counted[0] == pytest.approx(counted[1]) and counted[1] > 0


# ---- one run, one owner

OWNER = (
    "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print('mine', flush=True)\n"
)


def test_a_second_process_is_kept_out(halfway, dataset_dir, tmp_path):
    """New runs and resumed ones; the lock ends with the process that held it, however that ended."""
    run_dir = shutil.copytree(halfway, tmp_path / "run")
    code = f"{OWNER}time.sleep(60)"
    owner = subprocess.Popen([sys.executable, "-c", code, run_dir / ".lock"], stdout=subprocess.PIPE)
    try:
        owner.stdout.readline()
        before = snapshot(run_dir)
        assert f"another process is training in {run_dir}" in refused("--resume", "--run-dir", run_dir)
        assert f"another process is training in {run_dir}" in refused(*flags(dataset_dir, run_dir))
        assert snapshot(run_dir) == before
    finally:
        owner.kill()
        owner.wait()
    ts.lock_run_dir(run_dir).close()


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    """One line says that nothing keeps a second run out; the run goes on."""

    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(ts.fcntl, "lockf", refuse)
    ts.lock_run_dir(tmp_path)
    out = capsys.readouterr().out
    assert out == (f"{tmp_path} is not locked: its file system supports no locks (No locks available); "
                   f"start no second run in it\n")  # fmt: skip


def test_two_starts_in_one_second(tmp_path, monkeypatch):
    """Eight threads at once get eight directories: each that finds its second taken waits."""
    monkeypatch.chdir(tmp_path)
    noon = ts.datetime.datetime(2030, 1, 1, 12)
    seconds = []
    second = ts.datetime.timedelta(seconds=1)
    fake = SimpleNamespace(datetime=SimpleNamespace(now=lambda: noon + len(seconds) * second))
    monkeypatch.setattr(ts, "datetime", fake)
    monkeypatch.setattr(ts.time, "sleep", lambda _: seconds.append(1))
    made = []
    job = SimpleNamespace(command="pretrain")
    threads = [threading.Thread(target=lambda: made.append(ts.create_dated_dir(job).name)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8 and min(made) == "2030-01-01_12-00-00_train_small"


# ---- length


@pytest.mark.parametrize("steps", (1, 7, 1000, 6144, 10**6))
def test_steps_of_medium_follow_its_rules(steps):
    """--steps N is --tokens of the same length: batch and rates are those of that length."""

    def config(*argv):
        return tm.make_config(tm.build_parser().parse_args([str(a) for a in argv]))

    by_steps = config("--steps", steps)
    assert by_steps.num_steps == steps and by_steps == config("--tokens", by_steps.tokens)


def test_the_length_is_checked_without_counting_steps(dataset_dir, monkeypatch):
    """A billion steps: a handful of looks at the schedule, then the sentence."""
    calls = []
    real = ts.stage_index
    monkeypatch.setattr(ts, "stage_index", lambda config, step: calls.append(step) or real(config, step))
    err = refused(*flags(dataset_dir, "unused", steps=10**9))
    assert "the run asks for 384,000,000,256" in err and len(calls) < 200


# ---- how a run ends


@pytest.mark.parametrize("where", ("warm_up", "prepare_loop", "save_checkpoint", "write_report"))
def test_ctrl_c_is_one_sentence(dataset_dir, tmp_path, monkeypatch, where):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ts, where, interrupt)
    code, _, err = main(*flags(dataset_dir, tmp_path / "run", steps=2))
    assert code == 130
    assert err == "error: stopped at once; a run that has saved goes on with --resume\n"


def test_a_further_ctrl_c_changes_nothing(capsys, monkeypatch):
    """While the process cleans up: the sentence is printed all the same."""
    collect = ts.gc.collect
    monkeypatch.setattr(ts.gc, "collect", lambda: os.kill(os.getpid(), signal.SIGINT) or collect())

    def command():
        raise ts.UserError("the disk is full")

    assert ts.run_command(command) == 1 and capsys.readouterr().err == "error: the disk is full\n"


@pytest.mark.parametrize(
    "error",
    [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory. Tried"),
     RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried")],
    ids=("numpy", "cuda", "cpu"),
)  # fmt: skip
def test_too_little_memory_is_one_sentence(dataset_dir, tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(ts, "build_state", fail)
    assert "memory ran out" in refused(*flags(dataset_dir, tmp_path / "run"))


def test_our_own_bugs_keep_their_traceback(dataset_dir, tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(ts, "build_state", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        main(*flags(dataset_dir, tmp_path / "run"))


def test_a_sentence_stands_in_the_report_of_torchrun(tmp_path, monkeypatch, capsys):
    """torchrun reads it from the file that it names."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ts.print_error("the disk is full; make room")
    assert capsys.readouterr().err == "error: the disk is full; make room\n"
    message = json.loads(path.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "the disk is full; make room"
    ts.print_error("another, which came later")
    assert json.loads(path.read_text())["message"] == message


# ---- the other ranks


class Store:
    """The store of a process group."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key].encode()


def watch_at(heard: list[dict], times: list) -> list:
    """What a RankWatch of 5 s says at each time, where {rank: message} stands in the store by then."""
    watch = ts.RankWatch(SimpleNamespace(rank=0, world=2), Store(), 5.0)
    watch.closing.set()
    watch.thread.join()
    said = []
    for messages, now in zip(heard, times, strict=True):
        watch.store.values = {f"watch/{rank}": json.dumps(message) for rank, message in messages.items()}
        watch.listen(now)
        said.append(watch.problem(now))
    return said


def test_a_rank_that_is_silent_is_named():
    """Process 1 last counted at 2 s; process 0 goes on counting."""
    times = [1.0, 2.0, 4.0, 6.9, 7.1]
    beats = [{0: [time, time], 1: [min(time, 2.0), 1.0]} for time in times]
    assert watch_at(beats, times) == [None] * 4 + ["process 1 has not been heard of for 5 s"]
    left = [{0: [time, 4], 1: None} for time in times]  # it said good-bye
    left[0] = beats[0]
    assert watch_at(left, times)[:4] == [None] * 4
    assert watch_at([{0: [1, 4]}] * 2, [1.0, 4.0]) == [None, None], "one that has not begun says nothing"


def test_a_rank_that_hangs_is_named():
    """Both live, but no step ends: the one that is behind. Where a wait may be long there is no limit."""
    times = [0.0, 2.0, 4.0, 6.0, 7.1]
    steps = [(5, 4), (6, 5), (6, 5), (6, 5), (6, 5)]
    hanging = [{0: [time, a], 1: [time, b]} for time, (a, b) in zip(times, steps, strict=True)]
    assert watch_at(hanging, times) == [None] * 4 + ["no step has ended for 5 s, and process 1 is the furthest behind"]
    saving = [{0: [time, 6], 1: [time, None]} for time in times]
    assert watch_at(saving, times) == [None] * 5


def test_a_watch_tells_and_says_good_bye():
    store = Store()
    watch = ts.RankWatch(SimpleNamespace(rank=1, world=2), store, 5.0)
    watch.step = 7
    watch.tell([3, watch.step])
    watch.listen(1.0)
    assert watch.heard[1] == ([3, 7], 1.0)
    watch.listen(2.0)
    assert watch.heard[1] == ([3, 7], 1.0), "an old message is no new sign of life"
    watch.close()
    assert store.values["watch/1"] == "null"


def test_a_process_that_never_comes(monkeypatch):
    """Nobody else starts: the first one says so in its time, not after half an hour."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ts.UserError, match="not all of the 2 processes have started after 1 s .*1/2 clients"):
        ts.meet(0, 2, 1.0)


def test_a_store_that_does_not_answer(monkeypatch, capsys):
    """Process 0 holds the store: stopped, it answers nothing, and the call of process 1 would wait for ever."""
    ended = threading.Event()
    stopped = threading.Event()
    monkeypatch.setattr(ts.os, "_exit", lambda code: ended.set())
    store = Store()
    store.check = lambda keys: stopped.wait(60)
    watch = ts.RankWatch(SimpleNamespace(rank=1, world=2), store, 0.2)
    assert ended.wait(10)
    watch.closing.set()
    stopped.set()
    watch.thread.join()
    assert "error: process 0 has not been heard of for 0 s, so process 1 ends" in capsys.readouterr().err


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


def test_a_stop_waits_for_the_checkpoint(dataset_dir, tmp_path):
    """One of two processes is asked to stop: both do at step 10, and none ends before process 0 has saved."""
    run_dir = tmp_path / "run"
    argv = [*flags(dataset_dir, run_dir), "--save-every", "0"]
    done = python("-c", STOP, *argv, ranks=2, env={**os.environ, "RUN_DIR": str(run_dir)})
    assert done.returncode == 1 and "stopped by SIGTERM at step 10, saved" in done.stderr, done.stderr
    assert "stopped at once" not in done.stderr
    for rank in (0, 1):
        assert f"process {rank} ended with ['step_000010']" in done.stdout, done.stdout


def test_ctrl_c_through_torchrun_comes_twice(monkeypatch):
    """The terminal sends it to all processes, and torchrun passes on its own: only a later one means at once."""
    for variable, patience in (("x", 1.1), (None, 0.0)):
        if variable:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", variable)
        else:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        now = 100.0
        monkeypatch.setattr(ts.time, "monotonic", lambda: now)  # noqa: B023  (called at once)
        stopper = ts.Stopper(ALONE)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            now += 0.05 if variable else 0.0
            if variable:
                os.kill(os.getpid(), signal.SIGINT)
                assert stopper.asked(1) and stopper.signal == signal.SIGINT
            now += patience + 0.1
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                ts.time.sleep(0.1)
        finally:
            stopper.restore()


def test_checkpoints_without_a_log_are_a_run(finished, tmp_path, dataset_dir):
    """A new run there would remove its own checkpoints in favour of the old ones."""
    run_dir = shutil.copytree(finished, tmp_path / "run")
    (run_dir / "log.jsonl").unlink()
    before = snapshot(run_dir)
    assert "already holds a run; continue it with --resume" in refused(*flags(dataset_dir, run_dir, seed=7))
    assert snapshot(run_dir) == before


def test_a_finished_run_without_checkpoints_is_not_called_unsaved(tmp_path, dataset_dir):
    argv = [*flags(dataset_dir, tmp_path / "run", steps=2), "--save-every", "-1"]
    assert main(*argv)[0] == 0
    assert "it is finished and saved no checkpoint" in refused(*argv)


def test_a_longer_run_drops_the_result_of_the_shorter_one(finished, tmp_path):
    """It would be taken for that of the newest checkpoint. CORE of the old end keeps its table."""
    run_dir = shutil.copytree(finished, tmp_path / "run")
    (run_dir / "core.csv").write_text("task")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 22, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        refused("--resume", "--run-dir", run_dir, "--steps", "24")
    assert saved(run_dir)[-1] == 22
    assert not (run_dir / "result.json").exists() and not (run_dir / "report.md").exists()
    assert [path.name for path in run_dir.glob("core*")] == ["core_step_20.csv"]
    assert main("--resume", "--run-dir", run_dir)[0] == 0
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 24


def test_other_data_that_is_too_short_to_go_on_with(halfway, tmp_path):
    """Fewer shards, or a shorter shard, than the run has read."""
    for words in (((0, 1, 40),), ((5,), (5,), (5,))):
        other = write_dataset(tmp_path / f"data_{len(words)}", words)
        run_dir = shutil.copytree(halfway, tmp_path / f"run_{len(words)}")
        more = ["--data", other, "--set", "max_epochs=999", "--resume-changed"]
        err = refused("--resume", "--run-dir", run_dir, *more)
        assert "has less text than the run has read" in err and "pass the --data that it began with" in err


def test_validation_text_must_have_bytes(tmp_path):
    """Documents of a BOS alone would be scored as perfect."""
    data = write_dataset(tmp_path / "data", val_words=(0, 0, 0))
    assert "holds no text to validate on" in refused(*flags(data, tmp_path / "run", steps=2))


def test_a_file_in_the_way_is_no_full_disk(state, tmp_path):
    """Also where the path speaks of space."""
    run_dir = tmp_path / "workspace"
    run_dir.mkdir()
    (run_dir / "checkpoints").touch()
    with pytest.raises(ts.UserError) as error:
        save(state, run_dir, 3)
    assert "could not be written" in str(error.value) and "disk is full" not in str(error.value)


def test_a_console_without_the_letters_of_a_sample(monkeypatch):
    """A redirected stdout on Windows knows 256 letters."""
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", console)
    assert ts.run_command(lambda: print("half a letter: \ufffd") or {}) == 0
    console.flush()
    assert console.buffer.getvalue().startswith(b"half a letter: ?")


def test_a_title_with_dollars(tmp_path):
    """matplotlib reads formulas between them."""
    (tmp_path / "log.jsonl").write_text('{"step": 1, "tokens": 10, "bpb": 3.0}\n')
    assert ts.draw_curve(tmp_path, "a$_$b: 1.0000 bits per byte") == "![loss curve](curve.png)\n"


@pytest.mark.parametrize("seconds", ("nan", "inf", "0", "-5"))
def test_rank_timeout_is_a_time(dataset_dir, tmp_path, seconds):
    err = refused(*flags(dataset_dir, tmp_path / "run"), "--rank-timeout", seconds)
    assert "--rank-timeout" in err and "must be 1 to 1,000,000 seconds" in err


def test_words_that_belong_to_no_flag():
    """A forgotten @ is not called an unknown flag."""
    assert "runs/tiny.args belongs to no flag" in refused("runs/tiny.args")


def test_no_special_layers():
    """A plain ablation: the lists of layers may all be empty."""
    layers = ("no_attention_layers", "long_layers", "value_embed_layers", "key_offset_layers")
    assert list(ts.model_problems(tiny_config(**dict.fromkeys(layers, ())))) == []
