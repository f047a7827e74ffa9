"""The two commands, the comparison with compressors, and what the README promises."""

import gzip
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY

import train_small as ts

SCRIPTS = ("runs/quickstart.sh", "runs/test.sh", "runs/setup.sh", ".ci/run")


# ---- shell scripts


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_syntax(name):
    subprocess.run(["bash", "-n", ROOT / name], check=True)


def test_ci_can_be_executed():
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.fixture
def sandbox(tmp_path) -> Path:
    """A copy of the scripts with a .venv whose python runs a fake pip, which writes its arguments to pip.log and then
    fails if there is a file `fail`. Everything else goes to the python of this test."""
    for folder in ("runs", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("runs/setup.sh", "runs/quickstart.sh", "requirements.txt", "requirements-test.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.write_text(f"""#!/usr/bin/env bash
root=$(cd "$(dirname "$0")/../.." && pwd)
if [[ "$1 $2" == "-m pip" ]]; then echo "$@" >>"$root/pip.log"; [[ ! -e $root/fail ]]; exit; fi
if [[ $1 == *.py ]]; then echo "$@" >>"$root/python.log"; exit; fi
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    return tmp_path


def setup(sandbox: Path, file: str) -> subprocess.CompletedProcess:
    command = f"set -euo pipefail; source runs/setup.sh; setup {file}; command -v python"
    return subprocess.run(["bash", "-c", command], cwd=sandbox, capture_output=True, text=True)


def installs(sandbox: Path) -> list[str]:
    """The requirement files that pip was asked to install, in order."""
    log = sandbox / "pip.log"
    return [line.split()[-1] for line in log.read_text().splitlines()] if log.exists() else []


def test_setup_installs_once(sandbox):
    first = setup(sandbox, "requirements.txt")
    assert first.returncode == 0 and first.stdout.strip().endswith(".venv/bin/python"), first.stderr
    assert setup(sandbox, "requirements.txt").returncode == 0
    assert installs(sandbox) == ["requirements.txt"]
    assert setup(sandbox, "requirements-test.txt").returncode == 0  # the test packages are still missing
    assert setup(sandbox, "requirements-test.txt").returncode == 0
    assert setup(sandbox, "requirements.txt").returncode == 0  # contained in the other
    assert installs(sandbox) == ["requirements.txt", "requirements-test.txt"]


def test_setup_installs_again_after_a_change(sandbox):
    setup(sandbox, "requirements.txt")
    with (sandbox / "requirements.txt").open("a") as file:
        file.write("another==1.0\n")
    setup(sandbox, "requirements.txt")
    assert installs(sandbox) == ["requirements.txt"] * 2


def test_setup_tries_again_after_a_failure(sandbox):
    (sandbox / "fail").touch()
    failed = setup(sandbox, "requirements.txt")
    assert failed.returncode != 0 and "pip could not install requirements.txt" in failed.stderr
    (sandbox / "fail").unlink()
    assert setup(sandbox, "requirements.txt").returncode == 0
    assert installs(sandbox) == ["requirements.txt"] * 2


def test_setup_names_the_missing_python(tmp_path):
    """With no python at all in PATH there is one sentence and nothing else."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bash").symlink_to(shutil.which("bash"))
    command = f"set -euo pipefail; source {ROOT}/runs/setup.sh; setup requirements.txt"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env={"PATH": str(tmp_path / "bin")},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1 and done.stderr.startswith("error: Python 3.11 or newer"), done.stderr


def quickstart(sandbox: Path, *flags: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Runs the script from another directory; also returns the lines of python commands that it ran."""
    (sandbox / "python.log").unlink(missing_ok=True)
    done = subprocess.run(["bash", sandbox / "runs/quickstart.sh", *flags], cwd="/", capture_output=True, text=True)
    log = sandbox / "python.log"
    return done, log.read_text().splitlines() if log.exists() else []


def test_quickstart_starts_resumes_and_skips(sandbox):
    run = sandbox / "out/quickstart"
    done, commands = quickstart(sandbox)
    assert done.returncode == 0, done.stderr
    assert [c.split()[0] for c in commands] == [
        "data/pretrain.py", "train_small.py", "out/quickstart/train_small.py", "runs/compressors.py"
    ]  # fmt: skip
    assert commands[1] == "train_small.py @runs/cpu.args --run-dir out/quickstart"

    run.mkdir(parents=True)  # what a kill before the first checkpoint leaves
    (run / "log.jsonl").write_text("{}\n")
    done, commands = quickstart(sandbox)
    assert commands[1] == "train_small.py @runs/cpu.args --run-dir out/quickstart"
    assert not run.exists() and (sandbox / "out/quickstart.unfinished/log.jsonl").exists()

    (run / "checkpoints/step_000100").mkdir(parents=True)
    (run / "checkpoints/step_000100/state.json").touch()
    assert quickstart(sandbox)[1][1] == "train_small.py --run-dir out/quickstart --resume"

    (run / "report.md").touch()
    done, commands = quickstart(sandbox)
    assert not any(c.startswith("train_small.py") for c in commands) and "finished already" in done.stdout


def test_quickstart_passes_flags_on(sandbox):
    done, commands = quickstart(sandbox, "--steps", "20", "--set", "muon_lr=0.01")
    run = "out/quickstart_steps-20-set-muon-lr-0.01"
    assert commands[1] == f"train_small.py @runs/cpu.args --run-dir {run} --steps 20 --set muon_lr=0.01", done.stderr
    assert commands[-1] == f"runs/compressors.py {run}"
    done, commands = quickstart(sandbox, "--run-dir", "out/mine")
    assert done.returncode == 2 and not commands and "--run-dir" in done.stderr


def test_cpu_preset_is_valid():
    args = ts.build_parser().parse_args([f"@{ROOT}/runs/cpu.args"])
    ts.make_config(args).validate()
    assert args.data == "data/shards/stdlib"


# ---- compressors.py


@pytest.fixture
def run_dir(dataset_dir, tmp_path) -> Path:
    """A run of two steps on the tiny dataset, as main writes it."""
    flags = [f"--set={key}={value}" for key, value in TINY.items() if key not in ("tokens", "vocab_size")]
    assert ts.main([*flags, "--data", str(dataset_dir), "--run-dir", str(tmp_path / "run"), "--steps", "2"]) == 0
    return tmp_path / "run"


def compressors(run_dir: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "runs/compressors.py", run_dir]
    return subprocess.run(command, capture_output=True, text=True, cwd=run_dir.parent)


def test_compressors(run_dir, dataset):
    done = compressors(run_dir)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^\| (.+?) \| ([\d.]+) \|$", done.stdout, re.M))

    text = b""  # by hand: every document from behind its BOS, at most max_seq_len tokens with it
    bos, limit = dataset.tokenizer.bos_id, TINY["max_seq_len"]
    tokens = dataset.read(dataset.files("val")[0]).tolist()
    documents = [[]]
    for token in tokens:
        documents.append([]) if token == bos else documents[-1].append(token)
    total = 0
    for document in documents[1:]:
        if document and total < TINY["val_tokens"]:
            text += dataset.tokenizer.decode_bytes(document[: limit - 1])
            total += min(len(document), limit - 1)
    assert f"| {len(text):,} bytes of validation text |" in done.stdout
    packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    assert rows["gzip -9"] == f"{8 * len(gzip.compress(text, compresslevel=9)) / len(text):.4f}"
    assert rows["xz -9e"] == f"{8 * len(packed) / len(text):.4f}"

    log = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    model = [score for name, score in rows.items() if name.startswith("this model")]
    assert model == [f"{[e['val_bpb'] for e in log if 'val_bpb' in e][-1]:.4f}"]

    report = (run_dir / "report.md").read_text()
    assert report.count("## Against compressors") == 1
    assert report.index("Against compressors") < report.index("## Samples")
    assert done.stdout in report
    assert compressors(run_dir).returncode == 0
    assert (run_dir / "report.md").read_text() == report


def test_compressors_refuse_what_they_cannot_compare(run_dir, tmp_path):
    done = compressors(tmp_path)
    assert done.returncode == 1 and "training scripts" in done.stderr and "Traceback" not in done.stderr
    description = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**description, "dataset_fingerprint": "another"}))
    done = compressors(run_dir)
    assert done.returncode == 1 and "fingerprint" in done.stderr
    description["config"]["data"] = str(tmp_path / "gone")
    (run_dir / "config.json").write_text(json.dumps(description))
    done = compressors(run_dir)
    assert done.returncode == 1 and "no dataset at" in done.stderr and "Traceback" not in done.stderr


# ---- README.md

COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:python|torchrun|bash|source) .*$", re.M)


def readme_commands(name: str) -> list[str]:
    """Commands in fenced blocks and in backticks, without comments."""
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
    inline = re.findall(r"`((?:python|torchrun|bash) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    found = [line for block in blocks for line in COMMAND.findall(block)] + inline
    return [re.split(r"\s+#", command)[0] for command in found]


def known_flags(script: str) -> set[str]:
    """Flags of a script, from its parser; what data/*.py share is in data/sources.py."""
    if script == "train_small.py":
        return {flag for action in ts.build_parser()._actions for flag in action.option_strings}
    sources = [ROOT / script, *([ROOT / "data/sources.py"] if script.startswith("data/") else [])]
    return {flag for path in sources for flag in re.findall(r'"(--[a-z-]+)"', path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", ["README.md", "data/README.md"])
def test_readme_commands_exist(name):
    commands = readme_commands(name)
    assert commands
    for command in commands:
        words = command.split()
        scripts = [word for word in words if re.fullmatch(r"[\w/.]+\.(py|sh)", word)]
        assert scripts or words[0] == "source", command
        for script in scripts[:1]:
            assert (ROOT / script).is_file(), command
            arguments = words[words.index(script) + 1 :]
            target = "train_small.py" if script == "runs/quickstart.sh" else script
            if script == "runs/test.sh":
                continue
            given = {word.split("=")[0] for word in arguments if word.startswith("--")}
            assert given <= known_flags(target), f"{command}: unknown {given - known_flags(target)}"
            for word in arguments:
                if word.startswith("@"):
                    assert (ROOT / word[1:]).is_file(), command


def test_readme_names_real_flags_fields_and_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    flags = {f for script in ("train_small.py", "data/pretrain.py", "data/hub.py") for f in known_flags(script)}
    mentioned = set(re.findall(r"`(--[a-z-]+)", text))
    assert mentioned <= flags, mentioned - flags
    fields = set(ts.Config.__dataclass_fields__)
    assert set(re.findall(r"--set ([a-z_]+)=", text)) <= fields
    files = text.split("\n## Files\n")[1].split("\n## ")[0]
    for path in re.findall(r"^\| `([\w/.-]+)` \|", files, re.M):
        assert (ROOT / path).exists(), path
    needs = text.split("\n## Requirements\n")[1].split("\n## ")[0]
    for file in ("requirements.txt", "requirements-test.txt"):
        for package in re.findall(r"^([\w-]+)==", (ROOT / file).read_text(encoding="utf-8"), re.M):
            assert package in ("torch", "numpy") or f"`{package}`" in needs, f"{package} has no reason in the README"
    for name in re.findall(r"`(\w+(?:\.\w+)?)\(\)`", text):  # functions of the training script
        target = ts
        for part in name.split("."):
            assert hasattr(target, part), name
            target = getattr(target, part)
