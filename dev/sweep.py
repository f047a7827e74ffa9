"""Trains variants of a recipe, each with several seeds, and writes a table and a plot.

    python dev/sweep.py dev/ablations.toml
    python dev/sweep.py dev/ablations.toml --only mixing,fp8 --seeds 0,1,2
    python dev/sweep.py rates.toml --out out/rates @runs/b34.args

The file is TOML. Its base is always run. Each variant adds flags to it, and a grid adds every combination of its
values:

    script = "train_small.py"        # the default
    flags = ["@runs/b34.args"]       # of every run; further words of the command line are added
    seeds = [0, 1, 2]

    [variants]
    "no mixing" = ["--mudd-width", "0"]

    [grid]                           # fields of the Config, or flags
    adam_lr = [0.004, 0.006, 0.008]
    "--tokens" = [17_000_000, 34_000_000]

The flags of all variants are checked before the first run. Every GPU takes one run at a time (CUDA_VISIBLE_DEVICES
chooses among them); without a GPU the runs follow each other. Finished runs are kept: the same command continues where
it stopped. Runs, table (sweep.md) and plot (sweep.png) are in --out. Differences are means minus the base, with the
95 % interval and p of Welch's t-test. GPUs of one model differ by a few percent in speed, so step times from different
GPUs are only a rough guide.
"""

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "records"))
from files import UserError, write_atomic  # noqa: E402
from metrics import read_log, split_log  # noqa: E402
from plots import new_figure  # noqa: E402
from significance import welch  # noqa: E402
from text import p_text, table  # noqa: E402
from tqdm import tqdm  # noqa: E402

BASE = "base"


class Sweep(BaseModel, extra="forbid", strict=True):
    """The entries of a TOML file: flags of every run, and those that each variant adds."""

    script: str = "train_small.py"
    flags: list[str] = []
    seeds: list[int] = Field([0], min_length=1)
    variants: dict[str, list[str]] = {}
    grid: dict[str, Annotated[list, Field(min_length=1)]] = {}


@dataclass
class Job:
    """One run: a variant with a seed."""

    variant: str
    seed: int
    run_dir: Path
    flags: list[str]
    bpb: float | None = None
    step_ms: float | None = None
    error: str | None = None


# ==== the file


def read_sweep(path: Path) -> Sweep:
    """The sweep of a TOML file; its variants hold the base and the grid too. Raises UserError if it is none"""
    try:
        sweep = Sweep(**tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {name} is {first['input']!r}: {first['msg'].lower()}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None
    script = ROOT / sweep.script
    if not script.is_file():
        raise UserError(f"{path} names the script {script.name}, which {script.parent} lacks")
    if BASE in sweep.variants:
        raise UserError(f"{path}: {BASE} is the name of the runs without changes; rename the variant")
    sweep.variants = {BASE: [], **sweep.variants, **grid_variants(sweep.grid)}
    sweep.seeds = list(dict.fromkeys(sweep.seeds))
    return sweep


def grid_variants(grid: dict) -> dict[str, list[str]]:
    """{name: flags} for every combination of the values."""
    out = {}
    for values in itertools.product(*grid.values()) if grid else ():
        pairs = list(zip(grid, values, strict=True))
        name = " ".join(f"{key.lstrip('-')}={as_text(value)}" for key, value in pairs)
        out[name] = [word for key, value in pairs for word in as_flag(key, value)]
    return out


def as_text(value) -> str:
    """A value as a flag takes it: 3,10 for a list, (0.5,8,1.0),(0.5,16,1.4) for a list of lists."""
    if not isinstance(value, list):
        return str(value)
    return ",".join(f"({as_text(item)})" if isinstance(item, list) else str(item) for item in value)


def as_flag(key: str, value) -> list[str]:
    """The flag of a Config field, or one that is written out."""
    if key.startswith("-"):
        return [key, as_text(value)]
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={as_text(value)}"]


# ==== runs


def plan(sweep: Sweep, out: Path) -> list[Job]:
    """All runs, seed by seed, so that an early look at the table compares like with like."""
    jobs = []
    taken = {}
    for seed in sweep.seeds:
        for name, flags in sweep.variants.items():
            folder = re.sub(r"[^A-Za-z0-9.=-]+", "_", name).strip("_") or "variant"
            if taken.setdefault(folder, name) != name:
                raise UserError(f"the variants {taken[folder]} and {name} would share a folder; rename one")
            run_dir = out / f"{folder}_{seed}"
            jobs.append(Job(name, seed, run_dir, [*sweep.flags, *flags, "--seed", str(seed)]))
    return jobs


def check_flags(script: Path, variants: dict[str, list[str]]) -> None:
    """Reads the flags of every variant as the script will. Raises UserError about the first that is wrong"""
    sys.path.insert(0, str(script.parent))
    module = importlib.import_module(script.stem)
    for name, flags in variants.items():
        try:
            with contextlib.chdir(ROOT):  # where runs start
                module.make_config(module.build_parser().parse_args(flags))
        except module.UserError as error:
            raise UserError(f"the variant {name}: {error}") from None


def train(job: Job, script: Path, gpu: str, running: set) -> None:
    """Trains a run on a GPU ("": whatever the script finds), or reads what an earlier call left."""
    digest = hashlib.sha256(script.read_bytes()).hexdigest()
    wanted = {"flags": job.flags, "script": digest}
    note = job.run_dir.with_name(f"{job.run_dir.name}.json")
    ours = note.is_file() and json.loads(note.read_text(encoding="utf-8")) == wanted
    if job.run_dir.exists() and not ours:
        job.error = f"{job.run_dir} has other flags or another script; choose another --out"
        return
    if not (job.run_dir / "result.json").is_file():
        shutil.rmtree(job.run_dir, ignore_errors=True)  # of a sweep that was stopped
        job.run_dir.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(note, json.dumps(wanted))
        run_script(job, script, gpu, running)
    if not job.error:
        read_result(job)


def run_script(job: Job, script: Path, gpu: str, running: set) -> None:
    """Runs the script; its process is in `running` meanwhile."""
    command = [sys.executable, str(script), "--save-every", "-1", *job.flags]
    command += ["--run-dir", str(job.run_dir.resolve())]
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=env, text=True, errors="replace", cwd=ROOT, **pipes)
    running.add(process)
    said = process.communicate()[1].strip()
    running.discard(process)
    if process.returncode:
        job.error = said.splitlines()[-1] if said else f"exit code {process.returncode}"


def read_result(job: Job) -> None:
    """Final bits per byte, and the median time of a step without the first fifth of them."""
    result = json.loads((job.run_dir / "result.json").read_text(encoding="utf-8"))
    steps, _ = split_log(read_log(job.run_dir / "log.jsonl"))
    times = [line["step_ms"] for line in steps]
    job.bpb = result["val_bpb"]
    job.step_ms = statistics.median(times[len(times) // 5 :])


def find_gpus() -> list[str]:
    """Names of the GPUs that may be used, or [""]. Asks another process, which lets go of them."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    count = int(done.stdout or 0)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return (names or [str(index) for index in range(count)])[:count] or [""]


def run_all(jobs: list[Job], script: Path, bar: tqdm) -> None:
    """Trains all runs, one at a time on each GPU."""
    gpus = queue.SimpleQueue()
    running = set()

    def take(job: Job) -> Job:
        gpu = gpus.get()
        try:
            train(job, script, gpu, running)
        except (OSError, ValueError, KeyError, UserError) as error:
            job.error = f"{job.run_dir} cannot be read or written ({error})"
        gpus.put(gpu)
        return job

    names = find_gpus()
    for name in names:
        gpus.put(name)
    with ThreadPoolExecutor(len(names)) as threads:
        try:
            for future in as_completed([threads.submit(take, job) for job in jobs]):
                job = future.result()
                end = job.error or f"{job.bpb:.4f} bpb, {job.step_ms:.2f} ms a step"
                bar.write(f"{job.variant}, seed {job.seed}: {end}", file=sys.stdout)
                bar.update()
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise UserError("stopped; finished runs are kept, and the same command continues with the rest") from None


# ==== what came of it


def rows_of(jobs: list[Job]) -> list[dict]:
    """A row for each variant: its runs, and the difference to the base. The best comes first."""
    groups = {}
    for job in jobs:
        groups.setdefault(job.variant, []).append(job)
    base = [job.bpb for job in groups[BASE] if job.bpb is not None]
    rows = []
    for name, members in groups.items():
        done = [job for job in members if job.bpb is not None]
        errors = [job.error for job in members if job.error]
        bpb = [job.bpb for job in done]
        test = welch(bpb, base) if bpb and base and name != BASE else None
        row = {"name": name, "bpb": bpb, "errors": errors, "test": test}
        row["step_ms"] = statistics.median(job.step_ms for job in done) if done else None
        rows.append(row)
    return sorted(rows, key=lambda r: statistics.fmean(r["bpb"]) if r["bpb"] else float("inf"))


def table_text(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        bpb = row["bpb"]
        mean = f"{statistics.fmean(bpb):.5f}" if bpb else ""
        sd = f"{statistics.stdev(bpb):.5f}" if len(bpb) > 1 else ""
        ms = f"{row['step_ms']:.2f}" if bpb else ""
        test = row["test"]
        cells = [""] * 3
        if test:
            cells[0] = f"{test['difference']:+.5f}"
        if test and test["p"] is not None:
            cells[1] = f"{test['low']:+.5f} to {test['high']:+.5f}"
            cells[2] = p_text(test["p"]).removeprefix("= ")
        name = row["name"]
        if row["errors"]:
            name += f" ({len(row['errors'])} failed: {row['errors'][0]})".replace("|", "/")
        lines.append([name, str(len(bpb)), mean, sd, *cells, ms])
    titles = ["variant", "seeds", "val bpb", "sd", "minus base", "95 % interval", "p", "ms a step"]
    return table(titles, lines) + "\n"


def draw(rows: list[dict], path: Path) -> None:
    """Every variant minus the base: a dot a seed, the mean, and its interval."""
    base = next(row["bpb"] for row in rows if row["name"] == BASE)
    shown = [row for row in rows if row["bpb"]][::-1]
    middle = statistics.fmean(base)
    figure, (axes,) = new_figure(1, (9, 1.6 + 0.34 * len(shown)))
    for y, row in enumerate(shown):
        test = row["test"]
        if test and test["low"] is not None:
            axes.plot([test["low"], test["high"]], [y, y], color="C0", lw=2, alpha=0.5)
        differences = [value - middle for value in row["bpb"]]
        axes.plot(differences, [y] * len(differences), "o", color="0.5", ms=4, mec="white", mew=0.5)
        axes.plot(statistics.fmean(differences), y, "|", color="C0", ms=14, mew=2)
    axes.axvline(0, color="0.3", lw=0.8)
    axes.margins(y=0.15)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    axes.set_xlabel(
        f"val bpb minus the base's {middle:.4f}; left is better\n"
        f"dots: seeds, marks: means, bars: 95 % intervals of the difference (Welch)"
    )
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def choose(sweep: Sweep, only: str | None, seeds: str | None) -> None:
    """Leaves the variants whose names begin with a word of --only, and the base; other seeds if --seeds is given."""
    if only:
        beginnings = tuple(word.strip() for word in only.split(",") if word.strip())
        names = [name for name in sweep.variants if name != BASE and name.startswith(beginnings)]
        if not names:
            raise UserError(f"--only {only} matches no variant; choose from {', '.join(sweep.variants)}")
        sweep.variants = {name: sweep.variants[name] for name in (BASE, *names)}
    if seeds:
        try:
            sweep.seeds = list(dict.fromkeys(int(word) for word in seeds.split(",")))
        except ValueError:
            raise UserError(f"--seeds {seeds} must be whole numbers with commas between, e.g. 0,1,2") from None


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("file", type=Path, help="TOML file that lists the variants")
    add("--out", type=Path, help="folder for runs, table and plot (default: out/ and the name of the file)")
    add("--only", help="variants to run: the beginnings of their names, separated by commas")
    add("--seeds", metavar="N[,N]", help="seeds to run (default: the file's)")
    args, more = parser.parse_known_args(argv)
    sweep = read_sweep(args.file)
    choose(sweep, args.only, args.seeds)
    sweep.flags = [*sweep.flags, *more]

    out = args.out or ROOT / "out" / args.file.stem
    jobs = plan(sweep, out)
    script = ROOT / sweep.script
    check_flags(script, {job.variant: job.flags for job in jobs})
    print(f"{len(jobs)} runs: {len(sweep.variants)} variants, seeds {sweep.seeds}, in {out}")
    with tqdm(total=len(jobs), unit="run", file=sys.stdout) as bar:
        run_all(jobs, script, bar)

    rows = rows_of(jobs)
    table = table_text(rows)
    print(table, end="")
    write_atomic(out / "sweep.md", table)
    if any(row["bpb"] for row in rows if row["name"] == BASE):
        draw(rows, out / "sweep.png")
        print(f"{out / 'sweep.md'}, {out / 'sweep.png'}")
    return int(any(job.error for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
