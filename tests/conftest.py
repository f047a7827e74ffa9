"""Settings of all tests, and the fixtures that several files share.

Helpers lie beside it: tiny.py has configurations, models and datasets, commands.py whole runs and their directories,
chats.py conversations. Tests of kernels, model, optimizer and graphs need the first alone, so that they run on a GPU
machine with torch, numpy and pytest: what else a fixture needs, it imports itself.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before triton is imported anywhere: its kernels then run in the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import train_small as ts

from commands import flags, passes, refused, stop_at
from processes import write_python
from tiny import frozen_code, write_dataset

torch.set_num_threads(1)  # the model is tiny, and one thread adds up in one order
os.environ["OMP_NUM_THREADS"] = "1"  # the same in subprocesses


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("-m gpu runs the tests of a CUDA GPU, and torch finds none here; leave it out")


def pytest_collection_modifyitems(items: list) -> None:
    """The files that take longest come first, so that processes that share them end at about the same time."""
    names = "kernels page serve quickstart rl core generation notebook multi_node resume finetune_hf model".split()
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in names)


freeze = gc.freeze
gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> None:
    """What a module finds, such as the imports of all tests, is not looked at by the garbage collector again.

    A run collects garbage before its first step and at its end, and unfreezes everything before the latter. With all
    that lives in this process, that took 0.4 s each time, also of a run that is refused. Here only what is new is
    collected.
    """
    gc.collect()
    freeze()


@pytest.fixture(scope="session")
def fast_python(tmp_path_factory) -> Path:
    """A file that shell scripts and other programs start in place of Python: its processes have torch already."""
    return write_python(tmp_path_factory.mktemp("bin") / "python")


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory) -> Path:
    """Three train shards with documents from 1 token to many packs, one validation shard. Tests must not change it."""
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="session")
def dataset(dataset_dir) -> ts.Dataset:
    return ts.Dataset.open(dataset_dir)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> Path:
    """A tokenizer of 900 entries, trained on code that stays as it is: ids are the same with every Python."""
    import tokenizer
    from dataset import write_json

    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    write_json(path, tokenizer.train(iter(frozen_code()), 900))
    return path


@pytest.fixture
def signal_handlers():
    """A run that ends early in this process must not keep pytest's Ctrl-C; nor is it under nohup, if pytest is."""
    before = [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def only_the_run():
    """Warm-up and report have tests of their own, and take longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ts, "report", lambda run, result: None)
        patch.setattr(ts, "warm_up", lambda state, say: None)
        yield


@pytest.fixture(scope="module")
def finished(dataset_dir, tmp_path_factory, only_the_run):
    """An undisturbed run of 12 steps; what it printed is in out.txt beside it. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    out = passes(*flags(dataset_dir, run_dir))
    run_dir.with_name("out.txt").write_text(out)
    return run_dir


@pytest.fixture(scope="module")
def halfway(dataset_dir, tmp_path_factory, only_the_run):
    """A run that was stopped after step 6 of 12, with checkpoints of steps 3 and 6. Tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "halfway"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 6)
        refused(*flags(dataset_dir, run_dir))
    return run_dir
