"""What people and disks can put into a training script: command lines, config.json, state.json, safetensors, the log.

Whatever it is, the script returns 0, or 1 with one sentence. Training itself is replaced by a stub. FUZZ_CASES sets the
number of cases of each target (200).
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import struct

import pytest
import torch
import train_medium as tm
import train_small as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import ALONE, tiny_config

CASES = int(os.environ.get("FUZZ_CASES", 200))
FUZZ = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SCRIPTS = (ts, tm)


def sentence(script, argv) -> None:
    """main(argv) returns 0, or 1 with one sentence."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            code = script.main(argv)
        except SystemExit as end:  # --help
            code = end.code
    text = err.getvalue()
    assert code in (0, 1), code
    assert code == 0 or (text.startswith("error: ") and len(text) > 20), text


def refused_well(function, *args):
    """Calls a function that may raise UserError and nothing else; returns its value, or None."""
    try:
        return function(*args)
    except ts.UserError as error:
        assert len(str(error)) > 10
        return None


# ---- command lines

FIELDS = {script: {f.name: f.default for f in dataclasses.fields(script.Config)} for script in SCRIPTS}
NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.integers(),
    st.sampled_from((0, -1, 1e308, 1e-320, 2**31, 2**63, 10**30, float("nan"), float("inf"), -0.0)),
    st.floats(),
)
ATOMS = st.one_of(NUMBERS, st.booleans(), st.none(), st.text(max_size=6), st.binary(max_size=3))
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=6).map(tuple) | st.lists(inner, max_size=3),
    max_leaves=12,
)
STAGE = st.tuples(*[NUMBERS | st.sampled_from((1.0, 0.5, 16, 128, 2048))] * 6)
ODD = st.sampled_from(("", "(", "((", "1e999", "-", "nan", "0x10", "1_0", "True", "()", "((),)", "'", "\0", "\ud800",
                       "9" * 5000, "(" * 300, "[" * 3000, "{}", "lambda: 0", "__import__('os')", "1j", "1 if 1 else 2",
                       "\u0661", "*a,", "f'{1}'", "...", "b'x'", "-(" * 200 + "1", "1+1j", "2**99"))  # fmt: skip
TEXTS = st.one_of(VALUES.map(repr), ODD, st.text(max_size=12), st.lists(STAGE, max_size=3).map(tuple).map(repr))


@st.composite
def overrides(draw) -> tuple:
    """A script, and a KEY=VALUE whose value often has the shape of the field's."""
    script = draw(st.sampled_from(SCRIPTS))
    name = draw(st.sampled_from(sorted(FIELDS[script])) | st.text(max_size=5))
    default = FIELDS[script].get(name)
    value = draw(TEXTS)
    if isinstance(default, tuple) and draw(st.booleans()):
        items = list(default)
        for _ in range(draw(st.integers(0, 2))):
            if items:
                items[draw(st.integers(0, len(items) - 1))] = draw(VALUES)
        value = repr(tuple(items))
    elif isinstance(default, int | float) and draw(st.booleans()):
        value = repr(draw(NUMBERS))
    return script, f"{name}{draw(st.sampled_from(('=', '=', '=', '=', '', '==')))}{value}"


FLAGS = ("--data", "--run-dir", "--resume", "--resume-changed", "--steps", "--tokens", "--seed", "--eval-every",
         "--save-every", "--log-every", "--micro-batch-tokens", "--attention", "--dtype", "--no-compile",
         "--rank-timeout", "--wandb", "--set", "--help", "--nonsense", "-x", "--", "@nothing", "@/",
         "sample", "sft", "--steps=3", "--set=width=64")  # fmt: skip


@pytest.fixture
def stubbed(tmp_path, monkeypatch):
    """Training does nothing; files of flags lie where it starts."""
    monkeypatch.chdir(tmp_path)
    for script in SCRIPTS:
        monkeypatch.setattr(script, "train", lambda config, args: {})
    monkeypatch.setattr(ts.gc, "collect", lambda: 0)  # which takes longer than the rest
    (tmp_path / "good.args").write_text("--steps 3  # three\n--set width=128\n")
    (tmp_path / "binary.args").write_bytes(bytes(range(256)))
    (tmp_path / "itself.args").write_text("@itself.args\n")
    (tmp_path / "empty.args").write_text("")
    (tmp_path / "folder.args").mkdir()


@FUZZ
@given(overrides())
def test_set(stubbed, case):
    """--set KEY=VALUE: a Config that is valid, or a sentence."""
    script, text = case
    sentence(script, ["--set", text])


WORDS = st.one_of(
    st.sampled_from(FLAGS),
    st.sampled_from(("@good.args", "@binary.args", "@itself.args", "@empty.args", "@folder.args", "@")),
    st.text(max_size=8),
    NUMBERS.map(repr),
    ODD,
    st.just("x" * 300),
)


@st.composite
def command_lines(draw) -> tuple:
    script = draw(st.sampled_from(SCRIPTS))
    argv = []
    for _ in range(draw(st.integers(0, 6))):
        argv.append(draw(WORDS))
        if argv[-1] == "--set":
            argv.append(draw(overrides())[1])
        elif argv[-1].startswith("--") and draw(st.booleans()):
            argv.append(draw(NUMBERS.map(repr) | st.text(max_size=5)))
    return script, argv


@FUZZ
@given(command_lines())
def test_command_line(stubbed, case):
    """Any words at all."""
    sentence(*case)


# ---- files of a run

KEYS = st.sampled_from(("step", "files", "sha256", "config", "machine", "starts", "command", "val_bpb", "tokens",
                        "loss", "attention", "position", "width", "stages"))  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5),
    max_leaves=15,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run directory with one checkpoint, which was never trained, and its state."""
    run_dir = tmp_path_factory.mktemp("run")
    config = tiny_config(num_layers=3, no_attention_layers=(), long_layers=(1,), key_offset_layers=(1,),
                         value_embed_layers=(0,), width=32, mlp_width=32, bigram_rows=0)  # fmt: skip
    state = ts.build_state(config, ALONE, lambda text: None)
    state.step = 3
    ts.save_checkpoint(state, run_dir, dataclasses.asdict(ts.Progress(position={"shard": 0})))
    machine = {"script_sha256": "0" * 64}
    start = {"step": 0, "machine": machine, "dataset_fingerprint": "0" * 64, "changed": []}
    description = {"command": "pretrain", "config": dataclasses.asdict(config), "overridden": [], "machine": machine,
                   "starts": [start]}  # fmt: skip
    ts.write_description(run_dir, description)
    shutil.copy(ts.__file__, run_dir / "train_small.py")
    return run_dir, state, (run_dir / "config.json").read_bytes()


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Bytes of a file after something has happened to it: flips, cuts, insertions, or other bytes altogether."""
    how = draw(st.sampled_from(("flip", "flip", "cut", "insert", "other", "json")))
    place = draw(st.integers(0, len(content) - 1))
    if how == "flip":
        changed = bytearray(content)
        for _ in range(draw(st.integers(1, 3))):
            changed[place] ^= 1 << draw(st.integers(0, 7))
            place = draw(st.integers(0, len(content) - 1))
        return bytes(changed)
    if how == "cut":
        return content[:place]
    if how == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=9)) + content[place:]
    if how == "json":
        return json.dumps(draw(JSON)).encode()
    return draw(st.binary(max_size=200))


def changed_object(draw, value: dict) -> dict:
    """A dict with a few entries replaced, removed and added, anywhere in it."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        place = value
        while True:
            name = draw(st.sampled_from(sorted(place)) if place else KEYS)
            inner = place.get(name)
            if isinstance(inner, dict) and inner and draw(st.booleans()):
                place = inner
                continue
            break
        if draw(st.booleans()):
            place.pop(name, None)
        else:
            place[name] = draw(JSON)
    return value


@FUZZ
@given(st.data())
def test_state_json(saved, data):
    """Damaged it is a sentence; only what was saved is accepted."""
    run_dir, _, _ = saved
    (folder,) = ts.checkpoints(run_dir)
    path = folder / "state.json"
    whole = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged(whole)))
        found = refused_well(ts.check_checkpoint, folder)
        expected = json.loads(whole)
        del expected["sha256"]
        assert found in (None, expected)
        refused_well(ts.newest_whole, run_dir, lambda line: None)
        ts.prune_checkpoints(run_dir, 1)
    finally:
        path.write_bytes(whole)


@FUZZ
@given(st.data())
def test_config_json(saved, stubbed, data):
    """Flipped and cut, or sealed anew by somebody who changed what it says."""
    run_dir, _, whole = saved
    path = run_dir / "config.json"
    try:
        if data.draw(st.booleans()):
            path.write_bytes(data.draw(damaged(whole)))
        else:
            description = json.loads(whole)
            del description["sha256"]
            ts.write_description(run_dir, changed_object(data.draw, description))
        more = data.draw(st.sampled_from(([], ["--steps", "9"], ["--set", "width=32"], ["--seed", "1"])))
        sentence(ts, ["--resume", "--run-dir", str(run_dir), *more])
        refused_well(ts.read_config, run_dir)
    finally:
        path.write_bytes(whole)


def header(draw, content: bytes) -> bytes:
    """A safetensors file whose JSON header says something else, with a length that fits or does not."""
    (length,) = struct.unpack("<Q", content[:8])
    value = changed_object(draw, json.loads(content[8 : 8 + length]))
    text = json.dumps(value).encode()
    stated = draw(st.sampled_from((len(text), len(text), len(text) - 1, 0, 2**40, 2**64 - 1)))
    return struct.pack("<Q", stated) + text + content[8 + length :]


@FUZZ
@given(st.data())
def test_safetensors(saved, data):
    """A file that changed is refused by its sha256, whatever its header says."""
    run_dir, state, _ = saved
    (folder,) = ts.checkpoints(run_dir)
    path = folder / data.draw(st.sampled_from(ts.CHECKPOINT_FILES))
    whole = path.read_bytes()
    changed = header(data.draw, whole) if data.draw(st.booleans()) else data.draw(damaged(whole))
    before = [parameter.clone() for parameter in state.model.parameters()]
    try:
        path.write_bytes(changed)
        if refused_well(ts.load_checkpoint, state, folder) is not None:
            assert changed == whole
    finally:
        path.write_bytes(whole)
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))


ENTRY = st.fixed_dictionaries(
    {"step": st.integers(1, 9) | JSON, "tokens": st.integers(1, 9999) | JSON},
    optional={"loss": st.floats() | JSON, "bpb": st.floats() | JSON, "val_bpb": st.floats() | JSON},
)
LINES = st.one_of(ENTRY.map(json.dumps).map(str.encode), JSON.map(json.dumps).map(str.encode), st.binary(max_size=60),
                  st.just(b"[" * 5000), st.just(b'{"step": ' + b"9" * 5000 + b"}"))  # fmt: skip


class Axes:
    """matplotlib, as far as draw_curve uses it; drawing would take most of the time."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


@FUZZ
@given(lines=st.lists(LINES, max_size=6), step=st.integers(0, 9))
def test_log(saved, lines, step):
    """Damaged lines are dropped, whole ones stay as they were, and the report can be made of the rest."""
    import matplotlib.pyplot as plt

    run_dir, _, _ = saved
    path = run_dir / "log.jsonl"
    path.write_bytes(b"\n".join(lines))
    log = ts.Log(run_dir, ALONE, "", {})
    with contextlib.redirect_stdout(io.StringIO()):
        log.rewind(step)
    kept = path.read_text().splitlines()
    assert all(json.loads(line)["step"] <= step for line in kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "subplots", lambda **kwargs: (Axes(), Axes()))
        patch.setattr(plt, "close", lambda figure: None)
        ts.draw_curve(run_dir, "a title")
