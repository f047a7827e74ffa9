"""Real runs that are killed, stopped, starved and damaged. Whatever happens, no finished work is lost, no wrong number
is reported, and a sentence says what to do.

    python -m pytest -m soak tests/faults/test_soak.py    all faults
    FAULTS=20 python -m pytest -m soak tests/faults/...   some of each kind
    FAULT_KINDS=ranks,kill                                these kinds alone
    FAULTS_SEED=3                                         others of the same kinds

A fault counts as
    lost    if a checkpoint that was said to be saved is gone, or the run cannot be finished any more
    wrong   if it ends well, but not with weights, losses and bits per byte of an undisturbed run
    silent  if it fails without a sentence, or with a traceback that is not that of a full disk
"""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import train_small as ts
from fault_runs import Job, run

from commands import losses, sets, tensors
from processes import free_port
from tiny import TINY, write_dataset

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SEED = int(os.environ.get("FAULTS_SEED", 0))
STEPS = 8
SMALL = {**TINY, "bigram_rows": 101, "val_tokens": 400, "keep_checkpoints": 3, "max_epochs": 9}


def flags(data, run_dir) -> list[str]:
    every = ["--save-every", "2", "--eval-every", "4", "--log-every", "1"]
    return ["--data", data, "--run-dir", run_dir, *sets(SMALL), "--steps", STEPS, *every]


@dataclass
class Verdict:
    """What one fault did; empty texts where nothing is wrong."""

    lost: str = ""
    wrong: str = ""
    silent: str = ""


def silence(job: Job, may_raise: str = "nothing") -> str:
    """What a run printed that failed without a sentence, or with another error of Python than the one that it may."""
    raised = re.findall(r"^(\w*(?:Error|Exception)\b.*)", job.output, re.M)
    sentences = re.findall(r"^(?:error: |stopped at once).{20,}$", job.output, re.M)
    by_signal = -99 < job.code < 0
    if by_signal or not job.code:
        return ""
    if len(sentences) == 1 and ("Traceback" not in job.output or may_raise in " ".join(raised)):
        return ""
    return f"{job.output[-3000:]}\nexit code {job.code}"


def difference(run_dir: Path, reference: Path, exact: bool = True) -> str:
    """How the weights, numbers and losses of a run differ from those of an undisturbed one."""
    if ts.checkpoints(run_dir)[-1].name != ts.checkpoints(reference)[-1].name:
        return "another checkpoint at the end"
    ours, theirs = tensors(run_dir, STEPS), tensors(reference, STEPS)
    if ours.keys() != theirs.keys():
        return "another checkpoint at the end"
    other = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    if other and exact:
        return f"other weights: {', '.join(other)}"
    near = 0 if exact else 1e-3
    a, b = (json.loads((folder / "result.json").read_text()) for folder in (run_dir, reference))
    for name in ("val_bpb", "steps", "tokens"):
        if abs(a[name] - b[name]) > near:
            return f"{name} is {a[name]}, not {b[name]}"
    ours, theirs = losses(run_dir), losses(reference)
    if ours.keys() != theirs.keys():
        return f"the log holds steps {sorted(ours)}"
    if any(abs(ours[step] - theirs[step]) > near for step in ours):
        return "other losses"
    return ""


class Lab:
    """Undisturbed runs."""

    def __init__(self, folder: Path):
        self.data = write_dataset(folder / "data", words=((300, 40, 90), (200, 300, 90)), val_words=(30, 60, 90))
        self.other = write_dataset(folder / "other", words=((300, 41, 90), (200, 300, 91)), val_words=(30, 60, 91))
        self.seconds = 0.0
        self.reference = folder / "reference"
        run(flags(self.data, folder / "warm"), folder / "warm.txt")
        job = Job(flags(self.data, self.reference), folder / "reference.txt")
        while job.process.is_alive():
            self.seconds = max(self.seconds, job.cpu_seconds() % 1e9)
            time.sleep(0.005)
        assert job.wait() == 0, job.output
        self.halfway = folder / "halfway"
        job = run(flags(self.data, self.halfway), folder / "halfway.txt", ("signal_in_step", 6, signal.SIGTERM))
        assert job.code == 1 and len(ts.checkpoints(self.halfway)) == 3, job.output

    def finish(self, run_dir: Path, *jobs: Job, exact=True, may_raise="nothing") -> Verdict:
        """Starts a disturbed run again, as a person would, and compares its end with that of an undisturbed one."""
        verdict = Verdict(silent="".join(silence(job, may_raise) for job in jobs))
        said = [int(step) for job in jobs for step in re.findall(r"step +(\d+)/\d+ \| saved in", job.output)]
        there = [int(path.name[5:]) for path in ts.checkpoints(run_dir)]
        if said and max(said) > max(there, default=0):
            verdict.lost = f"step {max(said)} was saved, there are {there}"
        argv = ["--resume", "--run-dir", run_dir]
        if not there:
            shutil.rmtree(run_dir, ignore_errors=True)
            argv = flags(self.data, run_dir)
        last = run(argv, jobs[0].out)
        verdict.silent = verdict.silent or silence(last)
        if last.code:
            verdict.lost = verdict.lost or f"it does not go on: {last.output[-1000:]}"
        else:
            verdict.wrong = difference(run_dir, self.reference, exact)
        return verdict


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the server, which otherwise imports nothing
        yield Lab(tmp_path_factory.mktemp("soak"))


def kill(lab, folder, rng) -> Verdict:
    """kill -9 at any moment."""
    job = Job(flags(lab.data, folder / "run"), folder / "out.txt")
    job.send_after(rng.uniform(0.02, lab.seconds), signal.SIGKILL)
    job.wait()
    return lab.finish(folder / "run", job)


def kill_twice(lab, folder, rng) -> Verdict:
    """The run that continues is killed too."""
    shutil.copytree(lab.halfway, folder / "run")
    job = Job(["--resume", "--run-dir", folder / "run"], folder / "out.txt")
    job.send_after(rng.uniform(0.02, lab.seconds * 0.7), signal.SIGKILL)
    job.wait()
    return lab.finish(folder / "run", job)


def kill_at_disk(lab, folder, rng) -> Verdict:
    """kill -9 before a certain write, sync, rename or removal."""
    job = run(flags(lab.data, folder / "run"), folder / "out.txt", ("die_at_operation", rng.randint(1, 60)))
    return lab.finish(folder / "run", job)


def stop(lab, folder, rng) -> Verdict:
    """SIGTERM or Ctrl-C, once or twice, between steps or at any moment."""
    number = rng.choice((signal.SIGTERM, signal.SIGINT))
    times = rng.choice((1, 1, 2))
    if rng.random() < 0.5:
        wrong = ("signal_in_step", rng.randint(1, STEPS), number, times)
        job = run(flags(lab.data, folder / "run"), folder / "out.txt", wrong)
    else:
        job = Job(flags(lab.data, folder / "run"), folder / "out.txt")
        job.send_after(rng.uniform(0.02, lab.seconds), *[number] * times)
        job.wait()
    return lab.finish(folder / "run", job)


def spoil(path: Path, rng) -> None:
    """Truncates, empties or removes a file; one with a hash is also flipped in one bit, made longer or overwritten."""
    content = path.read_bytes()
    place = rng.randrange(max(1, len(content)))
    before, after = content[:place], content[place:]
    damaged = [before, b"", None]
    if path.suffix != ".json" or path.name == "tokenizer.json":
        flipped = before + bytes([after[0] ^ (1 << rng.randrange(8))]) + after[1:]
        zeros = before + bytes(len(after[:4096])) + after[4096:]
        damaged += [flipped, flipped, content + rng.randbytes(rng.randint(1, 50)), zeros]
    new = rng.choice(damaged)
    if new is None:
        path.unlink()
    else:
        path.write_bytes(new)


def judge_damage(lab, run_dir, out, argv) -> Verdict:
    """A sentence and an exit code, or the end of an undisturbed run."""
    job = run(argv, out)
    verdict = Verdict(silent=silence(job))
    if job.code == 0:
        verdict.wrong = difference(run_dir, lab.reference)
    return verdict


def damage_run(lab, folder, rng) -> Verdict:
    """One file of a checkpoint is not what was written; a whole one beside it must do."""
    run_dir = shutil.copytree(lab.halfway, folder / "run")
    victim = rng.choice(sorted(rng.choice(ts.checkpoints(run_dir)[-2:]).iterdir()))
    spoil(victim, rng)
    verdict = judge_damage(lab, run_dir, folder / "out.txt", ["--resume", "--run-dir", run_dir])
    if "resumed at step" not in (folder / "out.txt").read_text():
        verdict.lost = f"{victim.name}: " + (folder / "out.txt").read_text()[-500:]
    return verdict


def damage_data(lab, folder, rng) -> Verdict:
    """One file of the dataset, before a start or before a resume."""
    data = shutil.copytree(lab.data, folder / "data")
    spoil(rng.choice([data / "tokenizer.json", *sorted(data.rglob("*.bin"))]), rng)
    argv = flags(data, folder / "run")
    if rng.random() < 0.3:
        shutil.copytree(lab.halfway, folder / "run")
        argv = ["--resume", "--run-dir", folder / "run", "--data", data]
    return judge_damage(lab, folder / "run", folder / "out.txt", argv)


def replace_data(lab, folder, rng) -> Verdict:
    """Another dataset, or a shard of another one."""
    data = shutil.copytree(lab.data, folder / "data")
    how = rng.choice(("whole", "train_000000.bin", "val_000000.bin"))
    if how == "whole":
        data = lab.other
    else:
        shutil.copy(lab.other / "pretrain" / how, data / "pretrain" / how)
    run_dir = shutil.copytree(lab.halfway, folder / "run")
    job = run(["--resume", "--run-dir", run_dir, "--data", data], folder / "out.txt")
    verdict = Verdict(silent=silence(job))
    if job.code == 0 and how != "train_000000.bin":  # which was read before the stop
        verdict.wrong = f"{how} was accepted"
    return verdict


def full_disk(lab, folder, rng) -> Verdict:
    """Files cannot grow any more, which the kernel says in the middle of a write. Then there is room."""
    wrong = ("limit_files", rng.randint(1, STEPS), rng.choice((20_000, 100_000, 300_000, 600_000)))
    job = run(flags(lab.data, folder / "run"), folder / "out.txt", wrong)
    return lab.finish(folder / "run", job, may_raise="OSError")


def two_owners(lab, folder, rng) -> Verdict:
    """Two processes start one run, or continue it, at the same time: one does it, the other says why not."""
    run_dir = folder / "run"
    argv = flags(lab.data, run_dir)
    if rng.random() < 0.5:
        shutil.copytree(lab.halfway, run_dir)
        argv = ["--resume", "--run-dir", run_dir]
    jobs = [Job(argv, folder / f"out{i}.txt", ("slow_steps", 0.05)) for i in range(2)]
    codes = sorted(job.wait() for job in jobs)
    verdict = Verdict(silent="".join(silence(job) for job in jobs))
    late = argv[0] == "--resume" and codes == [0, 0]  # the second one came when the first was done
    verdict.wrong = difference(run_dir, lab.reference) if codes == [0, 1] or late else f"they ended with {codes}"
    return verdict


def ranks(lab, folder, rng) -> Verdict:
    """One of two ranks, or both, are killed or asked to stop; one process goes on from there.

    What a rank says that lost the other is torch's; torchrun would end it.
    """
    how = rng.choice(("kill one", "kill both", "SIGTERM", "kill at disk"))
    wrong = ("die_at_operation", rng.randint(1, 60)) if how == "kill at disk" else ()
    port = str(free_port())
    jobs = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        jobs.append(Job(flags(lab.data, folder / "run"), folder / f"rank{rank}.txt", wrong, **place))
    if how != "kill at disk":
        number = signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL
        victims = jobs if how != "kill one" else [rng.choice(jobs)]
        victims[0].send_after(rng.uniform(0.05, lab.seconds), number)
        for other in victims[1:]:
            other.send_after(0.0, number)
    while all(job.process.is_alive() for job in jobs):
        time.sleep(0.01)
    for job in jobs:
        job.process.join(5)
        job.process.kill()
        job.wait()
        job.code = 0
    return lab.finish(folder / "run", *jobs, exact=False)


KINDS = {
    kill: 50, kill_twice: 20, kill_at_disk: 60, stop: 30, damage_run: 60, damage_data: 40, replace_data: 10,
    full_disk: 20, two_owners: 10, ranks: 20,
}  # fmt: skip


def chosen(most: int) -> list[tuple]:
    """(kind, number): all of them, or a spread over all kinds."""
    names = os.environ.get("FAULT_KINDS", ",".join(kind.__name__ for kind in KINDS)).split(",")
    kinds = {kind: most for kind, most in KINDS.items() if kind.__name__ in names}
    rounds = [(kind, number) for number in range(max(KINDS.values())) for kind in kinds if number < kinds[kind]]
    return rounds[:most]


def test_soak(lab, tmp_path, capsys):
    """No fault loses work, makes a wrong number, or ends without a sentence."""
    rows = {}
    bad = []
    begin = time.monotonic()
    faults = chosen(int(os.environ.get("FAULTS", sum(KINDS.values()))))
    for done, (kind, number) in enumerate(faults, 1):
        row = rows.setdefault(kind.__name__, Counter())
        folder = tmp_path / f"{kind.__name__}_{number}"
        folder.mkdir()
        verdict = kind(lab, folder, random.Random(f"{SEED} {kind.__name__} {number}"))
        row["faults"] += 1
        seconds = time.monotonic() - begin
        said = [f"{done} of {len(faults)}: {kind.__name__} {number}, {seconds:.0f} s"]
        for name, text in vars(verdict).items():
            if text:
                row[name] += 1
                said.append(f"{kind.__name__} {number}, {name}: {text}\n({folder})")
        bad += said[1:]
        if len(said) == 1:
            shutil.rmtree(folder, ignore_errors=True)
        with capsys.disabled():
            print("\n".join(said), flush=True)

    with capsys.disabled():
        print("\n\n| kind | faults | lost | wrong | silent |\n| --- | ---: | ---: | ---: | ---: |")
        rows["all"] = sum(rows.values(), Counter())
        for name, row in rows.items():
            print(f"| {name} | {row['faults']} | {row['lost']} | {row['wrong']} | {row['silent']} |", flush=True)
    assert not bad, f"{len(bad)} of {len(faults)} faults: " + "\n".join(bad)[:6000]
