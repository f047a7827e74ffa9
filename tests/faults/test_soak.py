"""Real runs that are killed, stopped, starved and damaged. Whatever happens, no finished work is lost, no wrong number
is reported, and one sentence says what to do.

    python -m pytest -m soak tests/faults           all faults
    FAULTS=20 python -m pytest -m soak tests/faults some of each kind
    FAULTS_SEED=3                                   others of the same kinds

A fault counts as
    lost         if a checkpoint that was said to be saved is gone, or the run cannot be finished any more
    wrong        if it ends well, but not with weights, losses and bits per byte of an undisturbed run
    tracebacks   if a person would see one, or no sentence at all
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import train_small as ts
from fault_runs import Job, Spec, run
from safetensors.torch import load_file

import hub_stub
from conftest import ROOT, TINY, write_dataset

pytestmark = [pytest.mark.soak, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SEED = int(os.environ.get("FAULTS_SEED", 0))
STEPS = 8
SMALL = {**TINY, "bigram_rows": 101, "val_tokens": 400, "sample_tokens": 2, "sample_prompts": ("the",),
         "keep_checkpoints": 3, "max_epochs": 9}  # fmt: skip
SMALL.pop("tokens")
EVERY = ("--save-every", "2", "--eval-every", "4", "--log-every", "1")


def sets(values: dict) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value!r}".replace("'", '"'))]


def flags(data, run_dir, *more) -> list[str]:
    return ["--data", data, "--run-dir", run_dir, *sets(SMALL), "--steps", STEPS, *EVERY, *more]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# ---- what a run ended with


@dataclass
class Verdict:
    """What one fault did; empty texts where nothing is wrong."""

    lost: str = ""
    wrong: str = ""
    traceback: str = ""


def no_sentence(job: Job) -> str:
    """A traceback, or a failure without exactly one sentence that says why."""
    if "Traceback" in job.output or "Fatal Python error" in job.output or job.code == -99:
        return job.output[-3000:] + f"\nexit code {job.code}"
    sentences = re.findall(r"^error: .{20,}$", job.output, re.M)
    by_signal = job.code is not None and job.code < 0
    if job.code and not by_signal and len(sentences) != 1:
        return f"{len(sentences)} sentences: {job.output[-1000:]}"
    return ""


def entries(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = ts.checkpoints(run_dir)[-1]
    return {f"{name}/{key}": value for name in ("model", "optimizer_1", "optimizer_2")
            for key, value in load_file(folder / f"{name}.safetensors").items() if key != "rng.cpu"}  # fmt: skip


def result_of(run_dir: Path) -> dict:
    """result.json, or for a run of runs/rl.py the last line of what it printed."""
    path = run_dir / "result.json"
    if path.is_file():
        return json.loads(path.read_text())
    (text,) = [path.read_text() for path in run_dir.parent.glob("*.txt") if path.name in ("rl.txt", "out.txt")]
    return json.loads(text.splitlines()[-1])


COUNTED = ("val_bpb", "steps", "tokens", "greedy", "greedy_before", "test_items", "drawn_tokens")


def difference(run_dir: Path, reference: Path, exact: bool = True) -> str:
    """How the weights, numbers and losses of a run differ from those of an undisturbed one."""
    ours, theirs = tensors(run_dir), tensors(reference)
    if ours.keys() != theirs.keys() or ts.checkpoints(run_dir)[-1].name != ts.checkpoints(reference)[-1].name:
        return "another checkpoint at the end"
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 0, "atol": 2e-3}
    other = [name for name in ours if not torch.allclose(ours[name], theirs[name], **tolerance)]
    if other and exact:
        return f"other weights: {', '.join(other)}"
    near = 0 if exact else 1e-3
    results = [result_of(folder) for folder in (run_dir, reference)]
    for name in COUNTED:
        a, b = (result.get(name) for result in results)
        if a != b and abs(a - b) > near:
            return f"{name} is {a}, not {b}"
    losses = [{e["step"]: e["loss"] for e in entries(folder) if "loss" in e} for folder in (run_dir, reference)]
    if losses[0].keys() != losses[1].keys():
        return f"the log holds steps {sorted(losses[0])}"
    if any(abs(losses[0][step] - losses[1][step]) > near for step in losses[0]):
        return "other losses"
    return ""


def said_saved(text: str) -> int:
    """The last step that the screen called saved."""
    return max((int(step) for step in re.findall(r"step +(\d+)/\d+ \| saved in", text)), default=0)


# ---- runs to be disturbed


class Lab:
    """Undisturbed runs, and a folder for each fault."""

    def __init__(self, folder: Path):
        self.root = folder
        self.data = write_dataset(folder / "data", words=((300, 40, 90), (200, 300, 90)), val_words=(30, 60, 90))
        self.other = write_dataset(folder / "other", words=((300, 41, 90), (200, 300, 91)), val_words=(30, 60, 91))
        self.number = 0
        self.lock = threading.Lock()
        self.reference = folder / "reference"
        job = run(flags(self.data, self.reference), folder / "reference.txt")
        assert job.code == 0, job.output
        self.seconds = 0.0
        self.halfway = folder / "halfway"
        stop = ("signal_in_step", 6, signal.SIGTERM)
        job = run(flags(self.data, self.halfway), folder / "halfway.txt", wrong=stop)
        assert job.code == 1 and len(ts.checkpoints(self.halfway)) == 3, job.output
        again = Job(Spec([str(a) for a in flags(self.data, folder / "timed")], folder / "timed.txt"))
        while again.process.is_alive():
            self.seconds = max(self.seconds, again.cpu_seconds() % 1e9)
            time.sleep(0.005)

    def folder(self) -> Path:
        with self.lock:
            self.number += 1
            folder = self.root / f"fault_{self.number:04d}"
        folder.mkdir()
        return folder

    def finish(self, run_dir: Path, jobs: list[Job], start, resume, reference=None, exact=True) -> Verdict:
        """Starts a disturbed run again, as a person would, and compares its end with that of an undisturbed one."""
        verdict = Verdict(traceback="".join(no_sentence(job) for job in jobs))
        saved = max(said_saved(job.output) for job in jobs)
        there = [int(path.name[5:]) for path in ts.checkpoints(run_dir)]
        if saved and (not there or max(there) < saved):
            verdict.lost = f"step {saved} was saved, there are {there}"
        if there:
            last = resume()
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            last = start()
        verdict.traceback = verdict.traceback or no_sentence(last)
        if last.code:
            verdict.lost = verdict.lost or f"it does not go on: {last.output[-1000:]}"
        else:
            verdict.wrong = difference(run_dir, reference or self.reference, exact)
        return verdict

    def finish_small(self, run_dir: Path, *jobs: Job, out=None) -> Verdict:
        out = out or jobs[0].spec.out
        resume = ["--resume", "--run-dir", run_dir]
        return self.finish(run_dir, list(jobs), lambda: run(flags(self.data, run_dir), out), lambda: run(resume, out))

    # -- finetuning and RL start from a model that has learned sums

    def tools(self) -> None:
        """Makes the source runs; once."""
        with self.lock:
            if hasattr(self, "tuned"):
                return
            import sft

            from test_data_sft import chat, write_jsonl
            from test_data_sft import run as add_conversations

            rng = random.Random(0)
            words = "the rest of an old stone is in that sea and there it ends".split()
            texts = [{"text": " ".join(rng.choices(words, k=rng.randint(1, 200)))} for _ in range(60)]
            command = ["data/pretrain.py", "--source", write_jsonl(self.root / "text.jsonl", texts), "--vocab-size",
                       "300", "--workers", "1", "--out", self.root / "sums"]  # fmt: skip
            subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, check=True)
            talks = []
            for _ in range(40):
                a, b = sft.draw_sum(rng, 1, "train")
                talks.append(chat(sft.addition_texts(a, b)[0], f"#### {a + b}"))
            source = write_jsonl(self.root / "chat.jsonl", talks)
            add_conversations(self.root / "sums", "--source", source, "--max-len", 65, "--val-fraction", 0.2)
            self.base = self.root / "base"
            job = run(flags(self.root / "sums", self.base), self.root / "base.txt")
            assert job.code == 0, job.output
            job = run(self.tune(self.root / "tuned"), self.root / "tuned.txt", "finetune")
            assert job.code == 0, job.output
            job = run(self.reinforce(self.root / "reinforced", self.root / "tuned"), self.root / "rl.txt", "rl")
            assert job.code == 0, job.output
            self.reinforced = self.root / "reinforced"
            self.tuned = self.root / "tuned"

    def tune(self, run_dir) -> list:
        return [self.base, "--run-dir", run_dir, "--packs", 2, "--steps", 6, *EVERY, "--set", "max_epochs=99"]

    def reinforce(self, run_dir, source=None) -> list:
        return [source or self.tuned, "--run-dir", run_dir, "--digits", 1, "--prompts", 2, "--samples", 2,
                "--eval-items", 3, "--eval-samples", 1, "--steps", 4, "--save-every", 1, "--eval-every", 2]  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("soak"))


# ---- faults: each is a function of the lab and a random generator


def kill(lab, rng) -> Verdict:
    """kill -9 at any moment."""
    folder = lab.folder()
    job = Job(Spec([str(a) for a in flags(lab.data, folder / "run")], folder / "out.txt"))
    job.send_after(rng.uniform(0.02, lab.seconds), signal.SIGKILL)
    job.wait()
    return lab.finish_small(folder / "run", job)


def kill_twice(lab, rng) -> Verdict:
    """The run that continues is killed too."""
    folder = lab.folder()
    shutil.copytree(lab.halfway, folder / "run")
    argv = ["--resume", "--run-dir", str(folder / "run")]
    job = Job(Spec(argv, folder / "out.txt"))
    job.send_after(rng.uniform(0.02, lab.seconds * 0.7), signal.SIGKILL)
    job.wait()
    return lab.finish_small(folder / "run", job)


def kill_at_disk(lab, rng) -> Verdict:
    """kill -9 before a certain write, sync, rename or removal."""
    folder = lab.folder()
    job = run(flags(lab.data, folder / "run"), folder / "out.txt", wrong=("die_at_operation", rng.randint(1, 60)))
    return lab.finish_small(folder / "run", job)


def stop(lab, rng) -> Verdict:
    """SIGTERM or Ctrl-C, between steps or at any moment."""
    folder = lab.folder()
    number = rng.choice((signal.SIGTERM, signal.SIGINT))
    argv = [str(a) for a in flags(lab.data, folder / "run")]
    if rng.random() < 0.5:
        job = run(argv, folder / "out.txt", wrong=("signal_in_step", rng.randint(1, STEPS), number))
    else:
        job = Job(Spec(argv, folder / "out.txt"))
        job.send_after(rng.uniform(0.02, lab.seconds), number)
        job.wait()
    return lab.finish_small(folder / "run", job)


def stop_twice(lab, rng) -> Verdict:
    """Ctrl-C by an impatient person."""
    folder = lab.folder()
    argv = [str(a) for a in flags(lab.data, folder / "run")]
    if rng.random() < 0.5:
        job = run(argv, folder / "out.txt", wrong=("signal_in_step", rng.randint(1, STEPS), signal.SIGINT, 2))
    else:
        job = Job(Spec(argv, folder / "out.txt"))
        job.send_after(rng.uniform(0.02, lab.seconds), signal.SIGINT, signal.SIGINT)
        job.wait()
    return lab.finish_small(folder / "run", job)


def spoil(path: Path, rng) -> None:
    """Flips one bit, truncates, empties, lengthens, fills with zeros, or removes."""
    content = path.read_bytes()
    place = rng.randrange(max(1, len(content)))
    how = rng.choice(("flip", "flip", "flip", "truncate", "empty", "longer", "zeros", "missing"))
    if how == "flip" and content:
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :])
    elif how == "truncate":
        path.write_bytes(content[:place])
    elif how == "longer":
        path.write_bytes(content + rng.randbytes(rng.randint(1, 50)))
    elif how == "zeros":
        path.write_bytes(content[:place] + bytes(min(4096, len(content) - place)) + content[place + 4096 :])
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes(b"")


def judge_damage(lab, run_dir, out, argv, reference=None, tool="small") -> Verdict:
    """A sentence and an exit code, or the end of an undisturbed run."""
    job = run(argv, out, tool)
    verdict = Verdict(traceback=no_sentence(job))
    if job.code == 0:
        verdict.wrong = difference(run_dir, reference or lab.reference)
    return verdict


def damage_run(lab, rng) -> Verdict:
    """One file of a run that was stopped is not what was written; whole checkpoints beside it must do."""
    folder = lab.folder()
    run_dir = shutil.copytree(lab.halfway, folder / "run")
    files = sorted(path for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock")
    newest = ts.checkpoints(run_dir)[-1]
    victim = rng.choice(files if rng.random() < 0.5 else sorted(newest.iterdir()))
    spoil(victim, rng)
    verdict = judge_damage(lab, run_dir, folder / "out.txt", ["--resume", "--run-dir", run_dir])
    if newest in victim.parents and "resumed at step" not in (folder / "out.txt").read_text():
        verdict.lost = f"{victim.name}: " + (folder / "out.txt").read_text()[-500:]
    return verdict


def damage_finished(lab, rng) -> Verdict:
    """One file of a finished run; --resume shows or makes the same result."""
    folder = lab.folder()
    run_dir = shutil.copytree(lab.reference, folder / "run")
    names = ("result.json", "report.md", "log.jsonl", "config.json", "checkpoints/step_000008/state.json")
    spoil(run_dir / rng.choice(names), rng)
    job = run(["--resume", "--run-dir", run_dir], folder / "out.txt")
    verdict = Verdict(traceback=no_sentence(job))
    if job.code == 0:
        result = json.loads(job.output.splitlines()[-1])
        right = json.loads((lab.reference / "result.json").read_text())
        changed = [name for name in ("val_bpb", "steps", "tokens") if result[name] != right[name]]
        verdict.wrong = ", ".join(changed)
    return verdict


def damage_data(lab, rng) -> Verdict:
    """One file of the dataset, before a start or before a resume."""
    folder = lab.folder()
    data = shutil.copytree(lab.data, folder / "data")
    spoil(rng.choice(sorted(path for path in data.rglob("*") if path.is_file())), rng)
    if rng.random() < 0.7:
        return judge_damage(lab, folder / "run", folder / "out.txt", flags(data, folder / "run"))
    run_dir = shutil.copytree(lab.halfway, folder / "run")
    argv = ["--resume", "--run-dir", run_dir, "--data", data]
    return judge_damage(lab, run_dir, folder / "out.txt", argv)


def replace_data(lab, rng) -> Verdict:
    """Another dataset, another shard, one too many, one too few."""
    folder = lab.folder()
    data = shutil.copytree(lab.data, folder / "data")
    how = rng.choice(("whole", "train_000000.bin", "val_000000.bin", "extra", "fewer"))
    if how == "whole":
        data = lab.other
    elif how == "extra":
        shutil.copy(lab.other / "pretrain" / "train_000000.bin", data / "pretrain" / "train_000007.bin")
    elif how == "fewer":
        (data / "pretrain" / "train_000001.bin").unlink()
    else:
        shutil.copy(lab.other / "pretrain" / how, data / "pretrain" / how)
    run_dir = shutil.copytree(lab.halfway, folder / "run")
    job = run(["--resume", "--run-dir", run_dir, "--data", data], folder / "out.txt")
    verdict = Verdict(traceback=no_sentence(job))
    if job.code == 0:
        verdict.wrong = f"{how} was accepted"
    return verdict


def numbers(lab, rng) -> Verdict:
    """NaN, infinite and huge weights, and rates that make the loss explode."""
    folder = lab.folder()
    argv = flags(lab.data, folder / "run")
    if rng.random() < 0.5:
        value = rng.choice((float("nan"), float("inf"), 1e30))
        job = run(argv, folder / "out.txt", wrong=("nan_in_step", rng.randint(1, STEPS), value, rng.randrange(20)))
    else:
        rate = rng.choice(("muon_lr=90.0", "adam_lr=90.0", "muon_lr=1.0", "adam_eps=1e-30"))
        job = run([*argv, "--set", rate], folder / "out.txt")
    verdict = Verdict(traceback=no_sentence(job))
    for checkpoint in ts.checkpoints(folder / "run"):
        if not all(tensor.isfinite().all() for tensor in load_file(checkpoint / "model.safetensors").values()):
            verdict.wrong = f"{checkpoint.name} holds weights that are not finite"
    results = folder / "run" / "result.json"
    if results.is_file() and not 0 < json.loads(results.read_text())["val_bpb"] < 1e9:
        verdict.wrong = results.read_text()
    return verdict


def no_memory(lab, rng) -> Verdict:
    """The device or the machine runs out of memory, in the warm-up, the first or a later step, once or for good."""
    folder = lab.folder()
    step = rng.choice((0, 0, 1, rng.randint(2, STEPS - 1)))
    kind = rng.choice(("cuda", "cuda", "cpu", "numpy"))
    fault = ("no_memory_in_step", step, kind, rng.choice((1, 2, 99)))
    job = run(flags(lab.data, folder / "run"), folder / "out.txt", wrong=fault)
    if job.code == 0:  # it went on with smaller micro-batches, which add up in another order
        return Verdict(traceback=no_sentence(job), wrong=difference(folder / "run", lab.reference, exact=False))
    argv = ["--resume", "--run-dir", folder / "run"]
    start = lambda: run(flags(lab.data, folder / "run"), folder / "out.txt")  # noqa: E731
    smaller = "going on with" in job.output
    return lab.finish(folder / "run", [job], start, lambda: run(argv, folder / "out.txt"), exact=not smaller)


@contextlib.contextmanager
def small_disk(folder: Path, size: int):
    """A disk of its own at folder."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    if done.returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def full_disk(lab, rng) -> Verdict:
    """The disk fills up at any place of the run: a checkpoint, the log, the result, the report. Then there is room."""
    folder = lab.folder()
    whole = sum(path.stat().st_size for path in lab.reference.rglob("*") if path.is_file())
    with small_disk(folder / "disk", rng.randint(300_000, int(whole * 1.2))) as mounted:
        if not mounted:  # no rights to mount: files cannot grow instead
            wrong = ("limit_files", rng.randint(1, STEPS), rng.randint(20_000, 600_000))
            job = run(flags(lab.data, folder / "run"), folder / "out.txt", wrong=wrong)
            return lab.finish_small(folder / "run", job)
        run_dir = folder / "disk" / "run"
        job = run(flags(lab.data, run_dir), folder / "out.txt")
        subprocess.run(["mount", "-o", f"remount,size={10 * whole}", folder / "disk"], check=True)
        return lab.finish_small(run_dir, job)


def short_files(lab, rng) -> Verdict:
    """Files cannot grow any more, which the kernel says in the middle of a write."""
    folder = lab.folder()
    wrong = ("limit_files", rng.randint(1, STEPS), rng.choice((20_000, 100_000, 300_000, 600_000)))
    job = run(flags(lab.data, folder / "run"), folder / "out.txt", wrong=wrong)
    return lab.finish_small(folder / "run", job)


def two_owners(lab, rng) -> Verdict:
    """Two processes start one run, or continue it, at the same time: one does it, the other says why not."""
    folder = lab.folder()
    run_dir = folder / "run"
    argv = flags(lab.data, run_dir)
    if rng.random() < 0.5:
        shutil.copytree(lab.halfway, run_dir)
        argv = ["--resume", "--run-dir", run_dir]
    slow = ("slow_steps", 0.05)
    jobs = [Job(Spec([str(a) for a in argv], folder / f"out{i}.txt", wrong=slow)) for i in range(2)]
    codes = [job.wait() for job in jobs]
    verdict = Verdict(traceback="".join(no_sentence(job) for job in jobs))
    if sorted(codes) == [0, 1]:
        verdict.wrong = difference(run_dir, lab.reference)
    elif argv[0] == "--resume" and codes == [0, 0] and any("run is finished" in job.output for job in jobs):
        verdict.wrong = difference(run_dir, lab.reference)  # the second one came when the first was done
    else:
        verdict.wrong = f"they ended with {codes}"
    return verdict


def clock(lab, rng) -> Verdict:
    """The wall clock jumps by hours or years, to and fro."""
    folder = lab.folder()
    jump = rng.choice((3600.0, -86400.0, 1e9))
    job = run(flags(lab.data, folder / "run"), folder / "out.txt", wrong=("jumping_clock", jump))
    verdict = lab.finish_small(folder / "run", job)
    if job.code or not 0 <= json.loads((folder / "run" / "result.json").read_text())["train_seconds"] < 600:
        verdict.wrong = job.output[-500:]
    return verdict


def start_ranks(lab, argv, folder, wrong=()) -> list[Job]:
    """Two processes of one run."""
    port = str(free_port())
    jobs = []
    for rank in range(2):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": port}  # fmt: skip
        argv = [str(a) for a in argv]
        jobs.append(Job(Spec(argv, folder / f"rank{rank}.txt", wrong=wrong, environment=environment)))
    return jobs


def ranks(lab, rng) -> Verdict:
    """One of two ranks, or both, are killed, asked to stop, or hang; one process goes on from there."""
    folder = lab.folder()
    how = rng.choice(("kill one", "kill both", "SIGTERM", "SIGSTOP", "kill at disk"))
    argv = [*flags(lab.data, folder / "run"), "--rank-timeout", "5"]
    if how == "SIGSTOP":
        wrong = ("signal_in_step", rng.randint(1, STEPS - 1), signal.SIGSTOP, 1, rng.randrange(2))
        jobs = start_ranks(lab, argv, folder, wrong)
    elif how == "kill at disk":
        jobs = start_ranks(lab, argv, folder, ("die_at_operation", rng.randint(1, 60)))
    else:
        jobs = start_ranks(lab, argv, folder)
        number = signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL
        victims = jobs if how != "kill one" else [rng.choice(jobs)]
        victims[0].send_after(rng.uniform(0.05, lab.seconds), number)
        for other in victims[1:]:
            other.send_after(0.0, number)
    if how == "SIGSTOP":  # the one that lives ends by itself and names the other; then a person kills that one
        end = time.monotonic() + 60
        while all(job.process.is_alive() for job in jobs) and time.monotonic() < end:
            time.sleep(0.05)
        for job in jobs:
            if not job.process.is_alive():
                job.wait()
        living = [job for job in jobs if job.process.is_alive()]
        for job in living:
            job.process.kill()
    for job in jobs:
        job.wait(90)
    if how == "SIGSTOP":
        text = "".join(job.output for job in jobs)
        if "so process" not in text or "--rank-timeout" not in text:
            return Verdict(traceback=f"nobody named the rank that hangs: {text[-1500:]}")
    out = folder / "out.txt"
    run_dir = folder / "run"
    resume = ["--resume", "--run-dir", run_dir]
    return lab.finish(run_dir, jobs, lambda: run(flags(lab.data, run_dir), out), lambda: run(resume, out), exact=False)


def torchrun(lab, rng) -> Verdict:
    """The same with the real torchrun, whose report shows the sentence of the rank that failed."""
    folder = lab.folder()
    argv = [*flags(lab.data, folder / "run"), "--rank-timeout", "5"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--redirects=3",
               f"--log-dir={folder}/logs", "train_small.py", *map(str, argv)]  # fmt: skip
    how = rng.choice(("kill all", "SIGTERM", "bad flag"))
    if how == "bad flag":
        command += ["--dtype", "int3"]
    with (folder / "torchrun.txt").open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        if how != "bad flag" and list((folder / "run").glob("checkpoints/step_000002/state.json")):
            os.killpg(process.pid, signal.SIGKILL if how == "kill all" else signal.SIGTERM)
            break
        time.sleep(0.02)
    process.wait(60)
    time.sleep(0.2)
    texts = [path.read_text() for path in (folder / "logs").rglob("std*.log")]
    verdict = Verdict(traceback="".join(text[-1500:] for text in texts if "Traceback" in text))
    report = (folder / "torchrun.txt").read_text()
    if how == "bad flag":
        if "--dtype int3 is none of" not in report:
            verdict.traceback = report[-1500:]
        return verdict
    run_dir = folder / "run"
    out = folder / "out.txt"
    last = run(["--resume", "--run-dir", run_dir], out)
    verdict.traceback += no_sentence(last)
    verdict.lost = last.output[-1000:] if last.code else ""
    verdict.wrong = "" if last.code else difference(run_dir, lab.reference, exact=False)
    return verdict


def kill_tool(lab, rng, tool: str) -> Verdict:
    lab.tools()
    folder = lab.folder()
    run_dir = folder / "run"
    argv = lab.tune(run_dir) if tool == "finetune" else lab.reinforce(run_dir)
    out = folder / "out.txt"
    if rng.random() < 0.5:
        job = run(argv, out, tool, ("die_at_operation", rng.randint(1, 50)))
    else:
        job = Job(Spec([str(a) for a in argv], out, tool))
        number = rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        job.send_after(rng.uniform(0.3, 2.5 * lab.seconds), number)
        job.wait()
    resume = ["--resume", "--run-dir", run_dir]
    reference = lab.tuned if tool == "finetune" else lab.reinforced
    return lab.finish(run_dir, [job], lambda: run(argv, out, tool), lambda: run(resume, out, tool), reference)


def kill_finetune(lab, rng) -> Verdict:
    """A finetuning run that is killed or stopped."""
    return kill_tool(lab, rng, "finetune")


def kill_rl(lab, rng) -> Verdict:
    """A run of reinforcement learning that is killed or stopped."""
    return kill_tool(lab, rng, "rl")


def damage_tool(lab, rng) -> Verdict:
    """One file of a finetuning or RL run, or of what finetuning starts from and reads."""
    lab.tools()
    folder = lab.folder()
    run_dir = folder / "run"
    out = folder / "out.txt"
    tool = rng.choice(("finetune", "finetune source", "rl"))
    if tool == "finetune source":
        source = shutil.copytree(lab.base, folder / "base")
        data = shutil.copytree(lab.root / "sums", folder / "sums")
        files = [path for path in (*source.rglob("*"), *data.rglob("*")) if path.is_file() and path.name != ".lock"]
        spoil(rng.choice(sorted(files)), rng)
        argv = [source, *lab.tune(run_dir)[1:], "--data", data]
        job = run(argv, out, "finetune")
        verdict = Verdict(traceback=no_sentence(job))
        passed_over = "skipped" in job.output  # an older checkpoint is another start
        if job.code == 0 and not passed_over:
            verdict.wrong = difference(run_dir, lab.tuned)
        return verdict
    argv = lab.tune(run_dir) if tool == "finetune" else lab.reinforce(run_dir)
    job = Job(Spec([str(a) for a in argv], out, tool))
    while job.process.is_alive() and not ts.checkpoints(run_dir):
        time.sleep(0.01)
    job.process.kill()
    job.wait()
    spoil(rng.choice(sorted(p for p in run_dir.rglob("*") if p.is_file() and p.name != ".lock")), rng)
    reference = lab.tuned if tool == "finetune" else lab.reinforced
    resume = ["--resume", "--run-dir", run_dir]
    return judge_damage(lab, run_dir, out, resume, reference, tool)


def hub(lab, rng) -> Verdict:
    """A server that stalls, truncates, sends wrong bytes, redirects and fails; the second try finds a whole one."""
    folder = lab.folder()
    lab.tools()
    root = lab.root / "sums"  # made by the scripts in data/
    listed = ["dataset.json", *json.loads((root / "dataset.json").read_text())["files"]]
    files = {name: (root / name).read_bytes() for name in listed}
    how = rng.choice(("stall", "truncate", "corrupt", "redirect", "error", "away"))
    victim = rng.choice(sorted(files))
    faults = {"left": rng.choice((1, 99))}

    with hub_stub.start_hub({"me/x": files}) as server:
        plain = hub_stub.make_handler(server)

        class Handler(plain):
            def send_file(self, name, data):
                if name != victim or faults["left"] <= 0 or how in ("truncate", "corrupt", "away"):
                    return super().send_file(name, data)
                if self.command == "GET":
                    faults["left"] -= 1
                if how == "stall" and self.command == "GET":
                    time.sleep(3)
                    self.close_connection = True
                    return None
                if how == "redirect":  # to another host, which must not be followed into a wrong file
                    return self.answer(302, b"", {"Location": "http://127.0.0.1:9/elsewhere"})
                if how == "error":
                    return self.answer(500, b"broken")
                return super().send_file(name, data)

        if how == "truncate":
            server.break_after[victim] = rng.randrange(len(files[victim]))
        if how == "corrupt":
            server.corrupt[victim] = faults["left"]
        faulty = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        faulty.daemon_threads = True
        threading.Thread(target=faulty.serve_forever, daemon=True).start()
        url = "http://127.0.0.1:9" if how == "away" else f"http://127.0.0.1:{faulty.server_port}"
        environment = {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1",
                       "HF_HUB_ETAG_TIMEOUT": "1", "no_proxy": "*"}  # fmt: skip
        argv = ["download", "me/x", "--out", folder / "data", "--attempts", "2", "--backoff", "0.01"]
        first = run(argv, folder / "out.txt", "hub", HF_ENDPOINT=url, **environment)
        verdict = Verdict(traceback=no_sentence(first))
        if first.code and (folder / "data" / "dataset.json").is_file():
            verdict.wrong = "half a dataset looks whole"
        server.corrupt.clear()
        second = run(argv, folder / "out.txt", "hub", HF_ENDPOINT=server.url, **environment)
        faulty.shutdown()
    verdict.traceback = verdict.traceback or no_sentence(second)
    got = {name: (folder / "data" / name).read_bytes() for name in files if (folder / "data" / name).is_file()}
    if second.code == 0 and got != files:
        verdict.wrong = "other bytes"
    if second.code:
        verdict.lost = second.output[-1000:]
    return verdict


KINDS = {
    kill: 50, kill_twice: 20, kill_at_disk: 60, stop: 20, stop_twice: 12, damage_run: 60, damage_finished: 20,
    damage_data: 40, replace_data: 10, numbers: 14, no_memory: 16, full_disk: 14, short_files: 10, two_owners: 10,
    clock: 4, ranks: 20, torchrun: 4, kill_finetune: 10, kill_rl: 10, damage_tool: 20, hub: 12,
}  # fmt: skip


def chosen(most: int) -> list[tuple]:
    """(kind, number): all of them, or a spread over all kinds; the slow ones come last."""
    rounds = [(kind, number) for number in range(max(KINDS.values())) for kind in KINDS if number < KINDS[kind]]
    named = os.environ.get("FAULT_KINDS")  # such as ranks,hub: only these
    if named:
        return [pair for pair in rounds if pair[0].__name__ in named.split(",")]
    quick = [kind for kind in KINDS if kind not in (torchrun, kill_rl, damage_tool, hub)]
    if most < len(KINDS):
        return [pair for pair in rounds if pair[0] in quick][:most]
    return rounds[:most]


def test_soak(lab, capsys):
    """No fault loses work, makes a wrong number, or ends without a sentence."""
    rows = {}
    bad = []
    begin = time.monotonic()
    faults = chosen(int(os.environ.get("FAULTS", sum(KINDS.values()))))
    for done, (kind, number) in enumerate(faults, 1):
        row = rows.setdefault(kind.__name__, Counter())
        verdict = kind(lab, random.Random(f"{SEED} {kind.__name__} {number}"))
        row["faults"] += 1
        for name in ("lost", "wrong", "traceback"):
            text = getattr(verdict, name)
            if text:
                row[name] += 1
                bad.append(f"{kind.__name__} {number}, {name}: {text}")
                with capsys.disabled():
                    print(f"\n{bad[-1]}\n({lab.root}/fault_{lab.number:04d})", flush=True)
        if not any(vars(verdict).values()):
            shutil.rmtree(lab.root / f"fault_{lab.number:04d}", ignore_errors=True)
        with capsys.disabled():
            seconds = time.monotonic() - begin
            print(f"{done} of {len(faults)}: {kind.__name__} {number}, {seconds:.0f} s", flush=True)

    with capsys.disabled():
        print("\n\n| kind | faults | lost | wrong | tracebacks |\n| --- | ---: | ---: | ---: | ---: |")
        total = Counter()
        for name, row in rows.items():
            total += row
            print(f"| {name} | {row['faults']} | {row['lost']} | {row['wrong']} | {row['traceback']} |")
        print(f"| all | {total['faults']} | {total['lost']} | {total['wrong']} | {total['traceback']} |", flush=True)
    assert not bad, f"{len(bad)} of {len(faults)} faults: " + "\n".join(bad)[:3000]
