"""Runs nanochat's own scripts/base_train.py on our text; nothing in its copy is changed.

Some of its functions are replaced before the script imports them: its tokenizer and its reading of parquet files (ids
of our dataset, nothing is encoded again), its validation text (the documents that train_small.py scores), its seed, a
factor on its rates, and the saving at the end, where the result is printed. SETTINGS come from rivals.py.
"""

import importlib.util
import itertools
import json
import math
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
from rival_text import Text

SETTINGS = json.loads(os.environ["RIVAL_SETTINGS"])
UNUSED = ("wandb", "rustbpe", "tiktoken", "requests", "yaml", "pyarrow", "pyarrow.parquet", "jinja2")

text = Text(SETTINGS["data"], SETTINGS["max_seq_len"], SETTINGS["limit"])


class Tokenizer:
    """What its loader asks of a tokenizer; a text is already a list of ids."""

    def get_vocab_size(self) -> int:
        return text.vocab_size

    def get_bos_token_id(self) -> int:
        return text.bos

    def encode(self, documents: list[np.ndarray], prepend: int, num_threads: int) -> list[np.ndarray]:
        return [np.concatenate(([prepend], ids)) for ids in documents]


def document_batches(split: str, resume_state_dict, tokenizer_batch_size: int):
    """Training documents in their order, again from the start when they end, as its own function yields texts."""
    for epoch in itertools.count(1):
        documents = text.documents()
        group = 0
        while batch := list(itertools.islice(documents, tokenizer_batch_size)):
            yield batch, (0, group, epoch)
            group += 1


def stream(tokenizer, rows: int, length: int, device, **_):
    """In place of its training loader, which crops documents: rows one after another, nothing dropped."""
    import torch

    state = {"pq_idx": 0, "rg_idx": 0, "epoch": 1}
    for inputs, targets in text.training_batches(rows, length):
        yield torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device), state


def held_out(tokenizer, rows: int, length: int, device, **_):
    """In place of its validation loader: each scored document in a row of its own."""
    import torch

    for inputs, targets in text.validation_batches(rows):
        yield torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)


def report(folder, step: int, model, optimizer, meta: dict, rank: int = 0) -> None:
    """In place of the checkpoint at the end. Its clock leaves out the first 11 steps; `seconds` puts them back."""
    import torch

    clock = meta["loop_state"]["total_training_time"]
    bpb = meta["val_bpb"]
    result = {"bpb": bpb, "nats": bpb * math.log(2) * text.bytes, "seconds": clock * step / max(step - 11, 1)}
    result |= {"steps": step, "tokens": step * meta["total_batch_size"], "own_clock": clock}
    result |= {"epochs": meta["dataloader_state_dict"]["epoch"]}
    result |= {"gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None}
    print("RESULT " + json.dumps(result), flush=True)


def main() -> None:
    for name in UNUSED:
        if importlib.util.find_spec(name.split(".")[0]) is None:
            sys.modules[name] = MagicMock()
    sys.path.insert(0, str(Path.cwd()))

    import nanochat.checkpoint_manager
    import nanochat.common
    import nanochat.dataloader
    import nanochat.gpt
    import nanochat.tokenizer
    import torch

    replaced = SimpleNamespace(start=nanochat.common.compute_init, optimizer=nanochat.gpt.GPT.setup_optimizer)

    def start(device_type: str):
        ranks = replaced.start(device_type)
        torch.manual_seed(42 + SETTINGS["seed"])  # 42 is its own
        return ranks

    def optimizer(model, **rates):
        scaled = {name: rate * SETTINGS["lr"] if name.endswith("_lr") else rate for name, rate in rates.items()}
        return replaced.optimizer(model, **scaled)

    nanochat.common.compute_init = start
    nanochat.gpt.GPT.setup_optimizer = optimizer
    nanochat.checkpoint_manager.save_checkpoint = report
    nanochat.tokenizer.get_tokenizer = Tokenizer
    nanochat.tokenizer.get_token_bytes = lambda device: torch.from_numpy(text.token_bytes.astype(np.int32)).to(device)
    nanochat.dataloader._document_batches = document_batches
    nanochat.dataloader.tokenizing_distributed_data_loader_bos_bestfit = held_out
    if SETTINGS["loader"] == "stream":
        nanochat.dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit = stream

    steps = -(-len(text.scored) // SETTINGS["rows"])
    sys.argv += ["--eval-tokens", str(steps * SETTINGS["rows"] * SETTINGS["max_seq_len"])]
    runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
