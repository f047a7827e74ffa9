"""The two commands, the comparison with compressors, and what the README promises."""

import gzip
import json
import lzma
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import train_medium as tm
import train_small as ts
import zstandard

from conftest import ROOT, TINY

SCRIPTS = (*(str(path.relative_to(ROOT)) for path in sorted((ROOT / "runs").glob("*.sh"))), ".ci/run")


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


def test_cpu_preset_uses_the_embedded_dataset():
    assert ts.build_parser().parse_args([f"@{ROOT}/runs/cpu.args"]).data == "data/shards/stdlib"


# ---- args files


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "runs").glob("*.args")))
def test_args_files(name):
    """Each is valid and makes a model, and the time in its comment follows from its tokens and the stated speed."""
    script = tm if "medium" in name else ts
    config = script.make_config(script.build_parser().parse_args([f"@{ROOT}/runs/{name}"]))
    config.validate()
    script.GPT(config, "meta")
    text = (ROOT / "runs" / name).read_text(encoding="utf-8")
    unit = {"k": 1e3, "M": 1e6}
    for tokens, speed, prefix, minutes in re.findall(r"(\d+) M tokens / ([\d.]+)([kM]) tokens/s = ([\d.]+) min", text):
        assert config.tokens == int(tokens) * 1e6
        assert config.tokens / float(speed) / unit[prefix] / 60 == pytest.approx(float(minutes), rel=0.03)
    if re.search(r"t4|[ah]100", name):
        assert "computed" in text and "tokens/s = " in text


@pytest.mark.parametrize(("name", "gib", "tokens"), [("t4", 14.7, 16384), ("a100", 39.5, 65536), ("h100", 79, 65536)])
def test_args_fit_into_memory(monkeypatch, name, gib, tokens):
    """The micro-batch that choose_packs takes on such a card, and weights and moments by counting parameters."""
    config = ts.make_config(ts.build_parser().parse_args([f"@{ROOT}/runs/{name}.args"]))
    monkeypatch.setattr(ts.torch.cuda, "mem_get_info", lambda device: (int(gib * 2**30), int(gib * 2**30)))
    monkeypatch.setattr(ts, "bf16_is_native", lambda: name != "t4")
    packs = ts.choose_packs(config, ts.Ranks(0, 0, 1, ts.torch.device("cuda")))
    assert packs * config.pack_tokens == tokens
    numbers = sum(p.numel() for p in ts.GPT(config, "meta").parameters())
    assert 18 * numbers / 2**30 + tokens * (0.59e6 if name == "t4" else 0.38e6) / 2**30 < 0.9 * gib


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

COMMAND = re.compile(r"^ *(?:[A-Z_]+=\S+ )*(?:python|torchrun|bash|source|for|sed|mv|sbatch) .*$", re.M)
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


def known_flags(script: str) -> set[str]:
    """Flags of a script, from its parser; what data/*.py share is in data/sources.py."""
    if script == "train_small.py":
        return {flag for action in ts.build_parser()._actions for flag in action.option_strings}
    sources = [ROOT / script, *([ROOT / "data/sources.py"] if script.startswith("data/") else [])]
    pattern = r"^# (--[a-z-]+)" if script.endswith(".sh") else r'"(--[a-z-]+)"'
    return {flag for path in sources for flag in re.findall(pattern, path.read_text(encoding="utf-8"), re.M)}


@pytest.mark.parametrize("name", ["README.md", "data/README.md", "records/README.md", *TUTORIALS])
def test_readme_commands_exist(name):
    commands = readme_commands(name)
    assert commands
    for command in commands:
        words = command.split()
        scripts = [word for word in words if re.fullmatch(r"[\w/.]+\.(py|sh)", word)]
        assert scripts or words[0] in ("source", "sed", "mv"), command
        for script in scripts[:1]:
            assert (ROOT / script).is_file(), command
            arguments = words[words.index(script) + 1 :]
            passed_on = {"runs/quickstart.sh", "runs/multi_node.sh", "runs/slurm.sh", "dev/bench.py", "dev/profile.py"}
            target = "train_small.py" if script in passed_on else script
            if script == "runs/test.sh":
                continue
            if script == "runs/speedrun_medium.sh":
                assert arguments in ([], ["--smoke"])
                continue
            given = {word.split("=")[0] for word in arguments if word.startswith("--")}
            assert given <= known_flags(target), f"{command}: unknown {given - known_flags(target)}"
            for word in arguments:
                if word.startswith("@"):
                    assert (ROOT / word[1:]).is_file(), command


# Commands of README.md, records/README.md and the tutorials in their smoke form: the first match wins. runs/tiny.args
# is shortened to 8 steps.
SMOKE = (
    (r"(--source )climbmix", r"\1stdlib --vocab-size 400 --max-bytes 300000"),
    (r"--source stdlib --vocab-size 4096", "--source stdlib --vocab-size 400 --max-bytes 300000"),
    (r"--vocab-size (16384|4096)", "--vocab-size 400"),
    (r"--tokens 50000000", "@runs/tiny.args --steps 2 --data data/shards/mine"),
    (r"(--data data/shards/own .*)", r"\1 --steps 2"),
    (r"(train_small.py --run-dir out/first --resume)", r"\1"),
    (r"^(python train_small.py)( --run-dir out/first --save-every 500)?$",
     r"\1 @runs/tiny.args --data data/shards/climbmix\2"),
    (r"--source smol-smoltalk --source gsm8k:gsm8k_train.jsonl:2", "--source chat.jsonl --max-len 257"),
    (r"(sft --from out/first)", r"\1 --run-dir out/2026-11-21_12-00-00_train_small_sft"),
    (r"(runs/chat.py out/\S+)", r"\1 --prompt Hello --max-tokens 4"),
    (r"(dev/bench.py|dev/profile.py) @runs/tiny.args(?: --set vocab_size=4096)? --steps \d+",
     r"\1 @runs/tiny.args --set vocab_size=400 --steps 1"),
)  # fmt: skip
NOT_RUN = {  # pattern: why, and what does it in the tests
    r"^source ": "there is no .venv here",
    r"runs/test\.sh": "this is it",
    r"runs/quickstart\.sh": "minutes; above with a fake python, and its commands are those of tutorial 1",
    r"^torchrun ": "eight GPUs; test_runs.py starts two processes on the CPU",
    r"@runs/b34\.args": "needs a GPU; the same with tiny.args in the tutorials",
    r"data/hub\.py (download|upload)": "network; test_data_hub.py has a server of its own",
    r"runs/(chat_eval|rl|serve)\.py": "test_chat_eval.py, test_rl.py and test_serve.py have runs of their own",
    r"runs/(speedrun_\w+|miniseries|scaling_laws)\.sh": "they make .venv; .ci/run has the small one at toy size",
    r"train_medium\.py": "needs a GPU; test_medium.py trains a small one",
    r"data/core\.py|train_small\.py core": "needs the CORE files; test_core.py makes small ones",
    r"sbatch |multi_node\.sh": "needs machines; test_multi_node.py has two agents and fakes of SLURM",
    r"records/\S+ .*(2026-11-21_first-b34|--help)": "needs runs on that card; tutorial 3 does the same with others",
    r"--seed \d --run-dir out/a_\d$": "done by tutorial 3",
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
    toy = re.sub(r"--(eval|save)-every 100", r"--\1-every 4", toy).replace("sample_tokens=64", "sample_tokens=4")
    (root / "runs/tiny.args").write_text(toy)
    text = (ROOT / "train_small.py").read_text(encoding="utf-8")
    (root / "text/some.txt").write_text("\n\n<|endoftext|>\n".join([text] * 3))
    row = json.dumps({"text": text[:20000]}) + "\n"
    (root / "val.jsonl").write_text(row)
    (root / "text/some.jsonl.zst").write_bytes(zstandard.compress((row * 20).encode()))
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "def nothing():"}]
    (root / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 60)
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "runs", "train_small.py"], [*author, "commit", "-qm", "clone"]):
        subprocess.run(["git", "-C", root, *words], check=True)
    return root


def run_command(command: str, monkeypatch) -> int:
    """python FILE in this process, where torch is imported already; everything else in a shell."""
    words = shlex.split(command)
    if words[0] != "python":
        return subprocess.run(command, shell=True).returncode
    for name in ("record", "add", "train_small", "sources", "format", "tokenizer", "dev", "dev.bench"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # those of the clone, as it is now
    monkeypatch.setattr(sys, "argv", words[1:])
    monkeypatch.setattr(sys, "path", [str(Path(words[1]).resolve().parent), *sys.path])
    try:
        runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.mark.parametrize("name", ["README.md", "records/README.md", *TUTORIALS])
def test_commands_run(checkout, monkeypatch, capfd, name):
    """Every command of a page, one after the other; what cannot run here is in NOT_RUN."""
    monkeypatch.chdir(checkout)
    ran = set()
    for command in readme_commands(name):
        if any(re.search(pattern, command) for pattern in NOT_RUN) and not (name in TUTORIALS and "out/a_" in command):
            continue
        for pattern, smoke in SMOKE:
            if re.search(pattern, command):
                command = re.sub(pattern, smoke, command, count=1)
                break
        if command in ran:  # two that differ in size only
            continue
        with monkeypatch.context() as patch:
            assert run_command(command, patch) == 0, f"{command}\n{''.join(capfd.readouterr())[-3000:]}"
        ran.add(command)
    assert ran or name == "records/README.md"


def test_readme_lines_are_true():
    """Line links and line counts: python dev/links.py writes them anew."""
    done = subprocess.run([sys.executable, "dev/links.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run python dev/links.py"
    stops = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## One training step\n")[1].split("\n## ")[0]
    script = (ROOT / "train_small.py").read_text(encoding="utf-8").splitlines()
    links = re.findall(r"\[`(?:\w+\.)?(\w+)\(\)`\]\(train_small.py#L(\d+)\)", stops)
    assert len(links) >= 12 and len(re.findall(r"^\d+\. ", stops, re.M)) == 12
    for name, line in links:
        assert re.match(rf" *(def|class) {name}\b", script[int(line) - 1]), f"{name} is not in line {line}"


def test_readme_names_real_flags_fields_and_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    scripts = ("train_small.py", "data/pretrain.py", "data/hub.py", "runs/chat_eval.py", "runs/rl.py")
    flags = {f for script in (*scripts, "runs/speedrun_small.sh") for f in known_flags(script)}
    mentioned = set(re.findall(r"`(--[a-z-]+)", text))
    assert mentioned <= flags, mentioned - flags
    fields = {*ts.Config.__dataclass_fields__, *tm.Config.__dataclass_fields__}
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
