"""What people and disks can put into a training script: values of --set, tensors of checkpoints, lines of the log.

FUZZ_CASES sets the number of cases of each target (200).
"""

import dataclasses
import hashlib
import json
import os

import pytest
import safetensors.torch
import torch
import train_medium as tm
import train_small as ts
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conftest import ALONE

CASES = int(os.environ.get("FUZZ_CASES", 200))
FUZZ = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

# ---- --set

FIELDS = [(script, f.name, f.default) for script in (ts, tm) for f in dataclasses.fields(script.Config)]
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ATOMS = st.one_of(NUMBERS, st.booleans(), st.none(), st.text(max_size=6), st.binary(max_size=3))
VALUES = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=6).map(tuple), max_leaves=12)
ODD = st.sampled_from(("", "(", "((", "1e999", "-", "nan", "0x10", "1_0", "()", "((),)", "'", "\0", "9" * 5000,
                       "\ud800", "(" * 300, "[" * 3000, "{}", "lambda: 0", "__import__('os')", "1j", "1 if 1 else 2",
                       "\u0661", "*a,", "f'{1}'", "...", "-(" * 200 + "1", "1+1j"))  # fmt: skip


@FUZZ
@given(st.sampled_from(FIELDS), VALUES.map(repr) | ODD | st.text(max_size=12))
def test_set(field, text):
    """A value of the field's type, or a sentence with the field and what it takes."""
    script, name, default = field
    try:
        key, value = script.parse_override(f"{name}={text}")
    except script.UserError as error:
        assert name in str(error) and repr(default) in str(error)
    else:
        assert key == name and type(value) is type(default)


@FUZZ
@given(st.sampled_from(FIELDS), st.data())
def test_set_takes_every_value_of_its_type(field, data):
    script, name, default = field
    kinds = {bool: st.booleans(), int: st.integers(), float: NUMBERS.map(float), str: st.text(), tuple: VALUES}
    value = data.draw(kinds[type(default)].filter(lambda value: type(value) is type(default)))
    text = value if isinstance(value, str) else repr(value)
    assert script.parse_override(f"{name}={text}") == (name, value)


@FUZZ
@given(st.text(max_size=12).filter(lambda text: text.partition("=")[0] not in tm.Config.__dataclass_fields__))
def test_set_of_no_field(text):
    with pytest.raises(tm.UserError, match="expected KEY=VALUE with a field of Config"):
        tm.parse_override(text)


# ---- checkpoints


@st.composite
def tensors(draw) -> dict:
    """Tensors of all types that a checkpoint holds, some of them empty, without dimensions or transposed."""
    found = {}
    for name in draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), unique=True, max_size=5)):
        if name == "__metadata__":
            continue
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(list(ts.SAFETENSORS_NAMES)))
        tensor = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        found[name] = tensor.mT if tensor.ndim > 1 and draw(st.booleans()) else tensor
    return found


@FUZZ
@given(tensors())
@example({"first": torch.arange(2**24 + 5).int(), "second": torch.ones(3)})  # more than a piece
@example({})
def test_tensors_are_those_that_were_written(tmp_path_factory, given):
    """By the library that everybody reads them with; the sha256 is that of the file."""
    path = tmp_path_factory.getbasetemp() / "some.safetensors"
    digest = ts.write_tensors(path, given)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    read = safetensors.torch.load_file(path)
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)


# ---- the log

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("step", "loss")), inner),
    max_leaves=15,
)
WHOLE = st.fixed_dictionaries({"step": st.integers(1, 9), "loss": st.floats(allow_nan=False)})
LINES = st.one_of(WHOLE.map(json.dumps).map(str.encode), JSON.map(json.dumps).map(str.encode), st.binary(max_size=60))


@FUZZ
@given(lines=st.lists(LINES, max_size=6), whole=st.lists(WHOLE, max_size=4), step=st.integers(0, 9))
def test_log(tmp_path_factory, lines, whole, step):
    """Damaged lines are dropped, whole ones up to the step stay in their order."""
    log = ts.Log(tmp_path_factory.getbasetemp(), ALONE)
    log.path.write_bytes(b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines))
    for entry in whole:
        log.write(entry)
    log.rewind(step)
    kept = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert all(entry["step"] <= step for entry in kept)
    expected = [entry for entry in whole if entry["step"] <= step]
    assert kept[len(kept) - len(expected) :] == expected
