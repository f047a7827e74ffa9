"""What people and disks can put into a training script: values of --set, tensors of checkpoints, lines of the log.

FUZZ_CASES sets the number of cases of each target (200).
"""

import dataclasses
import hashlib
import os

import safetensors.torch
import torch
import train_medium as tm
import train_small as ts
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

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


@FUZZ
@given(st.sampled_from(FIELDS), st.data())
def test_set_takes_every_value_of_its_type(field, data):
    script, name, default = field
    kinds = {bool: st.booleans(), int: st.integers(), float: NUMBERS.map(float), str: st.text(), tuple: VALUES}
    value = data.draw(kinds[type(default)].filter(lambda value: type(value) is type(default)))
    text = value if isinstance(value, str) else repr(value)
    assert script.parse_override(f"{name}={text}") == (name, value)


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
