"""The two commands, and what the README promises."""

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_medium as tm
import train_small as ts
import zstandard

from tiny import ROOT

REQUIREMENTS = ("requirements-quickstart.txt", "requirements.txt", "requirements-test.txt")

# Stands for the python of .venv. It writes down what pip and scripts are asked for, and makes what the next step looks
# for; pip fails if there is a file `fail`, chat_eval.py if there is `offline`, an index has the text of `versions`, and
# the CORE bundle cannot be downloaded.
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
"-m pip index"*) cat versions; exit ;;
"-m pip"*) echo "$@" >>pip.log; [[ ! -e fail ]]; exit ;;
*device_count*) cat gpus; exit ;;
*.py*) printf '%s ' "${{@//$'\\n'/ }}" >>python.log; echo >>python.log ;;
*) exec {sys.executable} "$@" ;;
esac
case "$*" in
data/core_tasks.py*) echo "no network" >&2; exit 1 ;;
runs/chat_eval.py*) [[ ! -e offline ]] || exit 1; echo scores >"$2/chat_eval_limit_16.csv" ;;
data/pretrain.py*) mkdir -p "${{@: -1}}"; echo {{}} >"${{@: -1}}/dataset.json" ;;
*--resume) ;;
*--run-dir*) mkdir -p "${{@: -1}}"; touch "${{@: -1}}/"{{result.json,report.md}} ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def sandbox(tmp_path) -> Path:
    """A copy of the shell scripts and recipes, with the python above in .venv."""
    shutil.copytree(ROOT / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in REQUIREMENTS:
        shutil.copy(ROOT / name, tmp_path / name)
    program(tmp_path / ".venv/bin/python", PYTHON)
    (tmp_path / "gpus").write_text("1\n")
    return tmp_path


def setup(sandbox: Path, file: str, cpu_index: str = "", **environment: str) -> subprocess.CompletedProcess:
    command = f"set -euo pipefail; source runs/lib/setup.sh; setup {file}; command -v python"
    environment = {**os.environ, "TORCH_CPU_INDEX": cpu_index, **environment}
    return subprocess.run(["bash", "-c", command], cwd=sandbox, env=environment, capture_output=True, text=True)


def installs(sandbox: Path) -> list[str]:
    """The requirement files that pip was asked to install, in order."""
    return re.findall(r"-r (\S+)$", (sandbox / "pip.log").read_text(), re.M)


def test_setup_installs_once(sandbox):
    """What a larger file contains is not installed again; after a failure, or a change of any of them, it is."""
    (sandbox / "fail").touch()
    failed = setup(sandbox, "requirements-quickstart.txt")
    assert failed.returncode != 0 and "pip could not install requirements-quickstart.txt" in failed.stderr
    (sandbox / "fail").unlink()
    first = setup(sandbox, "requirements-quickstart.txt")
    assert first.returncode == 0 and first.stdout.strip().endswith(".venv/bin/python"), first.stderr
    for file in ("requirements-quickstart.txt", "requirements-test.txt", "requirements.txt"):
        assert setup(sandbox, file).returncode == 0
    assert installs(sandbox) == ["requirements-quickstart.txt"] * 2 + ["requirements-test.txt"]
    with (sandbox / "requirements-quickstart.txt").open("a") as file:
        file.write("another==1.0\n")
    assert setup(sandbox, "requirements.txt").returncode == 0
    assert installs(sandbox)[3:] == ["requirements.txt"]


def test_setup_names_the_missing_python(tmp_path):
    """With no python at all in PATH there is one sentence and nothing else."""
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    command = f"set -euo pipefail; source {ROOT}/runs/lib/setup.sh; setup requirements.txt"
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: this requires Python 3.11 or newer"), done.stderr


def test_setup_finds_the_python_of_windows(sandbox):
    (sandbox / ".venv/bin").rename(sandbox / ".venv/Scripts")
    done = setup(sandbox, "requirements.txt")
    assert done.returncode == 0 and done.stdout.strip().endswith(".venv/Scripts/python"), done.stderr
    assert installs(sandbox) == ["requirements.txt"]


# ---- where torch comes from

TORCH = re.search(r"^torch==(\S+)$", (ROOT / REQUIREMENTS[0]).read_text(), re.M)[1]
CPU_INDEX = "https://torch.example.org/cpu"
GPU = "GPU 0: NVIDIA H200 (UUID: GPU-1)"


def setup_on(sandbox: Path, gpu="", system="Linux", cpu_index=CPU_INDEX, version=TORCH) -> tuple[str, list[str]]:
    """What setup says on a machine whose CPU index has a version of torch, and the packages taken from that index."""
    program(sandbox / "bin/nvidia-smi", f"#!/bin/sh\necho '{gpu}'\n")
    program(sandbox / "bin/uname", f"#!/bin/sh\necho {system}\n")
    (sandbox / "versions").write_text(f"torch ({version}+cpu)\nAvailable versions: {version}+cpu, 2.0.0+cpu\n")
    done = setup(sandbox, "requirements.txt", cpu_index, PATH=f"{sandbox / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    asked = re.findall(rf"-m pip install .* --index-url {CPU_INDEX} (\S+)$", (sandbox / "pip.log").read_text(), re.M)
    return done.stdout, asked


@pytest.mark.parametrize(("machine", "says"), [
    ({}, f"no NVIDIA GPU found; installing the CPU build of torch from {CPU_INDEX}\n"),
    ({"version": "1.0"}, f"the CPU build of torch {TORCH} could not be had from {CPU_INDEX} "),
    ({"gpu": GPU}, "setup: torch comes from the default package index\n"),
    ({"system": "Darwin"}, "setup: torch comes from the default package index\n"),
    ({"cpu_index": ""}, "setup: torch comes from the default package index\n"),
])  # fmt: skip
def test_where_torch_comes_from(sandbox, machine, says):
    """From the CPU index if there is no GPU and it has this version; all else from the default one."""
    said, asked = setup_on(sandbox, **machine)
    assert says in said and asked == ([] if machine else [f"torch=={TORCH}+cpu"])
    assert installs(sandbox) == ["requirements.txt"]


def test_the_cpu_build_stays(sandbox):
    """It is not installed again; where a GPU was added, setup says how to use it."""
    (sandbox / f".venv/lib/python3.11/site-packages/torch-{TORCH}+cpu.dist-info").mkdir(parents=True)
    said, asked = setup_on(sandbox)
    assert said.count("setup:") == 1 and not asked
    said, _ = setup_on(sandbox, gpu=GPU)
    assert "remove .venv and run this again" in said


# ---- quickstart.sh


def start(sandbox: Path, script: str, *flags: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Runs a script from another directory; also returns the Python scripts that it ran, with their arguments."""
    log = sandbox / "python.log"
    log.write_text("")
    environment = {**os.environ, "TORCH_CPU_INDEX": ""}
    command = ["bash", sandbox / "runs" / script, *flags]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    return done, [line.strip() for line in log.read_text().splitlines()]


def test_quickstart_starts_and_skips(sandbox):
    """How a run is resumed or started over is tested in test_scaling.py, as all scripts do it by runs/lib/launch.sh."""
    fresh = "train_small.py @runs/cpu.args --run-dir out/quickstart"
    done, commands = start(sandbox, "quickstart.sh")
    assert done.returncode == 0, done.stderr
    scripts = ["data/pretrain.py", "train_small.py", "runs/sample.py"]
    assert [command.split()[0] for command in commands] == scripts and commands[1] == fresh
    assert installs(sandbox) == ["requirements-quickstart.txt"]
    assert {"Report:  out/quickstart/report.md", "Plot:    out/quickstart/curve.png"} <= {*done.stdout.splitlines()}
    done, commands = start(sandbox, "quickstart.sh")
    assert "is already finished" in done.stdout and not any("train_small.py" in command for command in commands)


def test_quickstart_passes_flags_on(sandbox):
    done, commands = start(sandbox, "quickstart.sh", "--steps", "20", "--muon-lr", "0.01")
    run = commands[1].split()[-1]
    assert re.fullmatch(r"out/quickstart_steps-20-muon-lr-0.01_\d+", run)
    assert commands[1] == f"train_small.py @runs/cpu.args --steps 20 --muon-lr 0.01 --run-dir {run}", done.stderr
    assert commands[-1].startswith(f"runs/sample.py {run} ")
    done, commands = start(sandbox, "quickstart.sh", "--run-dir", "out/mine")
    assert done.returncode == 2 and not commands and "--run-dir" in done.stderr


# ---- speedrun_small.sh


def test_speedrun_runs_each_stage_once(sandbox):
    asks = "runs/questions.py"
    steps = f"data/pretrain.py data/core_tasks.py data/sft.py train_small.py {asks} runs/finetune.py runs/chat_eval.py"
    done, ran = start(sandbox, "speedrun_small.sh", "--", "--steps", "3")
    programs = [*steps.split(), asks, "runs/rl.py", asks]
    assert done.returncode == 0 and [command.split()[0] for command in ran] == programs, done.stderr
    assert "=== core: skipped, because data/core_tasks.py failed (see above)" in done.stdout
    (sandbox / "gpus").write_text("8\n")  # on another machine
    done, ran = start(sandbox, "speedrun_small.sh", "--", "--steps", "3")
    assert done.returncode == 0 and "=== base: complete" in done.stdout, done.stderr
    assert len(ran) == 1 and ran[0].startswith("data/core_tasks.py")
    log = (sandbox / "out/speedrun_small/log.txt").read_text()
    assert log.count("no network\n") == 2 and log.count("=== base: 0.0 minutes\n=== questions_base\n") == 1


def test_speedrun_without_hugging_face(sandbox):
    """Text from pypi:, own conversations; the chat tasks are skipped, but not if they are the user's own files."""
    (sandbox / "offline").touch()
    flags = ("--source", "pypi:p400", "--sft", "chat.jsonl", "--sft", "addition:20")
    done, ran = start(sandbox, "speedrun_small.sh", *flags)
    assert done.returncode == 0 and "=== chat_eval: skipped" in done.stdout, done.stderr
    assert ran[0] == "data/pretrain.py --source pypi:p400 --out data/shards/p400"
    assert any(command.endswith("--source chat.jsonl --source addition:20") for command in ran)
    minutes = (sandbox / "out/speedrun_small/report.md").read_text().partition("## Minutes")[2]
    assert re.findall(r"- (\w+): 0\.0", minutes) == [
        *("data", "core", "conversations", "base", "questions_base", "sft", "chat_eval", "questions_sft", "rl"),
        "questions_rl",
    ]
    done, _ = start(sandbox, "speedrun_small.sh", "--name", "other", "--files", "mine", *flags)
    assert done.returncode == 1 and "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("flags", "source"), (((), "stdlib"), (("--source", "text.txt"), "text.txt")))
def test_speedrun_smoke(sandbox, flags, source):
    (sandbox / "README.md").write_text("some words\n")
    (sandbox / "gpus").write_text("0\n")
    done, ran = start(sandbox, "speedrun_small.sh", "--smoke", *flags)
    assert "## sft/chat_eval_limit_16.csv\n\n```\nscores\n" in done.stdout, done.stderr
    assert ran[0] == f"data/pretrain.py --source {source} --vocab-size 4096 --workers 1 --out out/smoke/data"


@pytest.mark.parametrize("name", ("small", "medium"))
def test_speedrun_without_a_gpu(sandbox, name):
    """It ends before anything is downloaded or trained."""
    (sandbox / "gpus").write_text("0\n")
    done, ran = start(sandbox, f"speedrun_{name}.sh")
    assert done.returncode == 1 and not ran and done.stderr == (
        f"error: speedrun_{name}.sh needs a GPU, but torch finds none; add --smoke to run all steps at toy size "
        "without one\n"
    )


@pytest.mark.parametrize(
    ("flags", "stage"),
    ((("--", "--steps", "4"), "base"), (("--sft", "addition:20"), "conversations"), (("--run-code",), "chat_eval")),
)
def test_speedrun_refuses_other_flags(sandbox, flags, stage):
    """The results in the directory are those of other flags."""
    assert start(sandbox, "speedrun_small.sh")[0].returncode == 0
    done, _ = start(sandbox, "speedrun_small.sh", *flags)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == (
        f"error: out/speedrun_small holds the results of another command for {stage}; choose another --name, or remove "
        "out/speedrun_small"
    )
    assert start(sandbox, "speedrun_small.sh", "--name", "other", *flags)[0].returncode == 0


def test_speedrun_with_a_dataset(sandbox):
    """One that is there is used, however it was made; a wrong --data is one sentence."""
    (sandbox / "data/shards/climbmix").mkdir(parents=True)
    (sandbox / "data/shards/climbmix/dataset.json").write_text("{}")
    done, ran = start(sandbox, "speedrun_small.sh")
    assert done.returncode == 0 and not any(command.startswith("data/pretrain.py") for command in ran)
    assert "=== data: data/shards/climbmix exists and is used as it is" in done.stdout
    done, ran = start(sandbox, "speedrun_small.sh", "--name", "other", "--data", "data/shards/nothing")
    assert done.returncode == 1 and not ran and "error: no dataset at data/shards/nothing; " in done.stderr
    assert done.stderr.count("\n") == 1


# ---- args files


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "runs").glob("*.args")))
def test_args_files(name):
    """Each is valid and makes a model."""
    script = tm if "medium" in name else ts
    config = script.make_config(script.build_parser().parse_args([f"@{ROOT}/runs/{name}"]))
    script.check_config(config)
    script.GPT(config, "meta")


@pytest.mark.parametrize(("name", "gib", "tokens"), [("t4", 14.7, 16384), ("a100", 39.5, 65536), ("h100", 79, 65536)])
def test_args_fit_into_memory(monkeypatch, name, gib, tokens):
    """The micro-batch that choose_packs takes on such a card, and weights and moments by counting parameters.

    Tables of n-grams have an fp32 copy in fp16 only, and small gradients.
    """
    config = ts.make_config(ts.build_parser().parse_args([f"@{ROOT}/runs/{name}.args"]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(gib * 2**30), int(gib * 2**30)))
    monkeypatch.setattr(ts, "bf16_is_native", lambda: name != "t4")
    packs = ts.choose_packs(config, ts.Ranks(0, 1, torch.device("cuda")))
    assert packs * config.pack_tokens == tokens
    sizes = {name: p.numel() for name, p in ts.GPT(config, "meta").named_parameters()}
    ngrams = sizes.pop("bigram_embed") + sizes.pop("trigram_embed", 0)
    state = (6 if name == "t4" else 2) * ngrams + 18 * sum(sizes.values())
    assert state / 2**30 + tokens * (0.59e6 if name == "t4" else 0.38e6) / 2**30 < 0.9 * gib


SHELL = "test quickstart speedrun_small speedrun_medium scaling cluster/multi_node cluster/slurm".split()


@pytest.mark.parametrize("name", SHELL)
def test_help_of_a_shell_script(name, tmp_path):
    """The comment at its head, from any folder; nothing is installed or started."""
    path = ROOT / "runs" / f"{name}.sh"
    done = subprocess.run(["bash", path, "--help"], cwd=tmp_path, capture_output=True, text=True)
    lines = path.read_text("utf-8").splitlines()
    assert done.returncode == 0 and done.stdout.splitlines()[0] == lines[1].removeprefix("# ")
    assert "source" not in done.stdout.splitlines()[-1] and not [*tmp_path.iterdir()]


# ---- README.md

COMMAND = re.compile(r"^ *(?:[A-Z_]+=\S+ )*(?:python|torchrun|bash|source|for|sed|git|sbatch) .*$", re.M)
TUTORIALS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "runs/tutorials").glob("*.md"))


def readme_commands(name: str) -> list[str]:
    """Commands in fenced blocks and in backticks, without comments."""
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
    inline = re.findall(r"`((?:python|torchrun|bash) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    found = [line.strip() for block in blocks for line in COMMAND.findall(block)] + inline
    return [each for command in found for each in unrolled(re.split(r"\s+#", command)[0])]


def unrolled(command: str) -> list[str]:
    """The commands of a line `for seed in 0 1 2; do ...; done`."""
    loop = re.fullmatch(r"for (\w+) in ([^;]+); do (.+); done", command)
    return [loop[3].replace(f"${loop[1]}", value) for value in loop[2].split()] if loop else [command]


BY_HELP = ["train_small.py", "train_medium.py", "runs/rl.py", "runs/huggingface/finetune_hf.py"]
BY_HELP += ["runs/encoder/train_encoder.py", "runs/encoder/finetune_encoder.py"]


def known_flags(script: str) -> set[str]:
    """Flags of a script, from its help or its text; what data/*.py share is in two of them."""
    if script in BY_HELP:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            importlib.import_module(Path(script).stem).main(["--help"])
        return set(re.findall(r"--[a-z.-]+", out.getvalue()))
    shared = ("data/sources.py", "data/tokenizer.py") if script.startswith("data/") else ()
    sources = [ROOT / name for name in (script, *shared)]
    pattern = r"^# +(?:bash \S+ )?(--[a-z-]+)" if script.endswith(".sh") else r'"(--[a-z-]+)"'
    return {flag for path in sources for flag in re.findall(pattern, path.read_text(encoding="utf-8"), re.M)}


PASSED_ON = ("runs/quickstart.sh", "runs/scaling.sh", "runs/cluster/multi_node.sh", "runs/cluster/slurm.sh")
PASSED_ON += ("dev/bench.py",)


@pytest.mark.parametrize("name", ["README.md", "runs/README.md", "data/README.md", "records/README.md", *TUTORIALS])
def test_readme_commands_exist(name):
    commands = readme_commands(name)
    assert commands
    for command in commands:
        words = command.split()
        script = next((word for word in words if re.fullmatch(r"[\w/.]+\.(py|sh)", word)), None)
        if script is None:
            assert words[0] in ("source", "sed"), command
            continue
        assert (ROOT / script).is_file(), command
        arguments = words[words.index(script) + 1 :]
        known = known_flags(script)
        if script in PASSED_ON:
            known = known | known_flags("train_small.py")
        given = {word.split("=")[0] for word in arguments if word.startswith("--")}
        assert given <= known, f"{command}: unknown {given - known}"
        for word in arguments:
            assert not word.startswith("@") or (ROOT / word[1:]).is_file(), command


# Commands of README.md, records/README.md and the tutorials in their smoke form: the first match wins. runs/tiny.args
# is shortened to 8 steps.
SMOKE = (
    (r"(--source )climbmix", r"\1text/some.txt --vocab-size 400"),
    (r"--source stdlib --vocab-size 4096", "--source text/some.txt --vocab-size 400"),
    (r"--vocab-size (16384|4096)", "--vocab-size 400"),
    (r"--tokens 50000000", "@runs/tiny.args --steps 2 --data data/shards/mine"),
    (r"(--data data/shards/own .*)", r"\1 --steps 2"),
    (r"--width 128 --mlp-width 512", "--width 64 --mlp-width 512"),
    (r"@runs/cpu.args (@runs/portable.args) --mlp-width 512 (.*) --tokens 614400",
     r"@runs/tiny.args \1 --window-short 256 \2 --steps 2"),
    (r"@runs/cpu.args (--data \S+) --tokens 614400", r"@runs/tiny.args \1 --steps 2"),
    (r"--tokens 409600", "--tokens 8192"),
    (r"^(python train_small.py)( --run-dir out/\w+ --save-every 500)$",
     r"\1 @runs/tiny.args --data data/shards/climbmix\2"),
    (r"--source smol-smoltalk --source addition:2000", "--source chat.jsonl --max-len 257"),
    (r"--data data/shards/stdlib --source addition:20000", "--data data/shards/climbmix --source addition:200"),
    (r"finetune.py out/quickstart --packs 2 (.*)", r"finetune.py out/base --packs 1 --steps 2 \1"),
    (r"addition:2000", "addition:200"),
    (r"(runs/finetune.py .*)", r"\1 --packs 1 --steps 2"),
    (r"(runs/chat.py out/\S+)", r"\1 --prompt Hello --max-tokens 4"),
)  # fmt: skip
NOT_RUN = {  # pattern: why, and what does it in the tests
    r"^source ": "there is no .venv here",
    r"runs/test\.sh|python -m pytest": "this is it",
    r"runs/quickstart\.sh": "minutes; above with a fake python, and its commands are those of tutorial 1",
    r"train_plain\.py": "test_train_plain.py runs it",
    r"dev/bench\.py": "test_dev.py runs it",
    r"^torchrun |dev/many_gpus\.sh": "eight GPUs; test_runs.py starts two processes on the CPU",
    r"@runs/b34\.args": "needs a GPU; the same with tiny.args in the tutorials",
    r"^hf (download|upload)": "network; test_data_hub.py has a server of its own",
    r"runs/(chat_eval|questions|rl|serve|page)\.py": "test_chat_eval.py, test_rl.py and others have runs of their own",
    r"runs/(speedrun_\w+|scaling)\.sh": "they make .venv; .ci/run has the small one at toy size",
    r"train_medium\.py": "needs a GPU; test_medium.py trains a small one",
    r"export\.py out/finetuned": "test_export_gguf.py finetunes an export",
    r"finetune_hf\.py|out/(qwen|backwards)": "needs a model of the hub; test_finetune_hf.py makes one",
    r"data/core_tasks\.py|runs/score_core\.py": "needs the CORE files; test_core.py makes small ones",
    r"sbatch |multi_node\.sh": "needs machines; test_multi_node.py has two agents and fakes of SLURM",
    r"records/\S+ .*(2026-11-2\d_(first-[bp]34|p34-h100)|--help)": "needs runs on that card; tutorial 3 has others",
    r"--seed \d --run-dir out/a_\d$": "done by tutorial 3",
    r"train_00\.jsonl\.zst|shards/c340?|--data DIR ": "needs files that are not published, or the network",
    r"data/pairs\.py|_encoder\.py|export\.py out/embed": "test_encoder.py makes pairs, trains and exports an encoder",
    r"records/leaderboard\.py": "there are no entries here; test_records.py has some",
    r"records/tracks\.py add": "needs a dataset and runs of it; test_records.py has others",
    r"pypi:|@runs/p(34|100)|shards/p400|add\.py out/p34": "needs an index, a GPU; test_data_pypi.py has small wheels",
    r"--help$": "test_readme_commands_exist knows the flags",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A fresh clone, with a toy in place of every recipe, some text and some conversations."""
    root = tmp_path_factory.mktemp("docs") / "clone"
    for folder in ("data", "dev", "records", "runs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("shards", "__pycache__"))
    shutil.copy(ROOT / "train_small.py", root)
    (root / "baselines").mkdir()
    (root / "text").mkdir()
    toy = (root / "runs/tiny.args").read_text().replace("--tokens 204800", "--tokens 8192")
    toy = toy.replace("-every 100", "-every 8").replace("--val-tokens 65536", "--val-tokens 4096")
    (root / "runs/tiny.args").write_text(toy)
    text = (ROOT / "train_small.py").read_text(encoding="utf-8")
    (root / "text/some.txt").write_text("\n\n<|endoftext|>\n".join([text] * 3))
    row = json.dumps({"text": text[:20000]}) + "\n"
    (root / "val.jsonl").write_text(row)
    (root / "text/some.jsonl.zst").write_bytes(zstandard.compress((row * 20).encode()))
    answer = {"role": "assistant", "content": "def nothing():"}
    talks = [{"messages": [{"role": "user", "content": f"Hello {i}"}, answer]} for i in range(60)]
    (root / "chat.jsonl").write_text("\n".join(map(json.dumps, talks)))
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "runs", "train_small.py"], [*author, "commit", "-qm", "clone"]):
        subprocess.run(["git", "-C", root, *words], check=True)
    return root


@pytest.mark.parametrize("name", ["README.md", "records/README.md", "runs/README.md", *TUTORIALS])
def test_commands_run(checkout, fast_python, name):
    """Every command of a page, one after the other; what cannot run here is in NOT_RUN. Tutorial 3 needs a dataset."""
    path = f"{fast_python.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FAST_PYTHON": str(fast_python)}
    commands = readme_commands(name)
    if "3_one_change" in name:
        commands.insert(0, "python data/pretrain.py --source stdlib --vocab-size 4096 --out data/shards/stdlib")
    ran = set()
    for command in commands:
        if any(re.search(pattern, command) for pattern in NOT_RUN) and not (name in TUTORIALS and "out/a_" in command):
            continue
        for pattern, smoke in SMOKE:
            if re.search(pattern, command):
                command = re.sub(pattern, smoke, command, count=1)
                break
        if command in ran:  # two that differ in size only
            continue
        done = subprocess.run(command, shell=True, cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        ran.add(command)
    not_here = ("README.md", "records/README.md", "runs/tutorials/2_profile.md", "runs/tutorials/4_finetune_hf.md")
    assert ran or name in not_here


LINKING = ["README.md", "CONTRIBUTING.md", "runs/README.md", "runs/TROUBLESHOOTING.md", "records/README.md"]
LINKING += ["dev/MEASUREMENTS.md"]


@pytest.mark.parametrize("name", LINKING)
def test_links_of_pages_lead_to_files(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([\w/.-]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link
