"""The text of a dataset directory as every rival reads it: the training documents in their order, and what is scored.

Independent of train_small.py, so that tests can compare the two.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np


class UserError(SystemExit):
    """What the user can fix, in one sentence. Uncaught, it ends the program with exit code 1."""

    def __init__(self, message: str):
        super().__init__(f"error: {message}")


# What validation must count on these datasets: (targets that carry bytes, their bytes), as in records/tracks.json.
EXPECTED = {"p34": (2217239, 9689981), "p100": (2217239, 9689981)}


class Text:
    """A dataset directory of this project (data/README.md).

    folder: its path; max_seq_len: tokens after which a held-out document ends, BOS included; limit: held-out
    documents to score, all by default
    """

    def __init__(self, folder: str | Path, max_seq_len: int = 2048, limit: int | None = None):
        self.folder = Path(folder)
        self.max_seq_len = max_seq_len
        if not (self.folder / "dataset.json").is_file():
            raise UserError(f"no dataset at {folder}; make one with `python data/pretrain.py` (data/README.md)")
        self.info = json.loads((self.folder / "dataset.json").read_text())

        spec = json.loads(self.checked("tokenizer.json"))
        self.ranks = {base64.b64decode(rank): index for index, rank in enumerate(spec["ranks"])}
        specials = dict(spec["special_tokens"])
        self.bos = specials["<|bos|>"]
        self.vocab_size = len(self.ranks) + len(specials)
        self.token_bytes = np.array([len(rank) for rank in self.ranks] + [0] * len(specials), np.int64)

        self.tokens = self.read("train")
        self.starts = np.flatnonzero(self.tokens == self.bos)
        held_out = self.read("val")
        starts = np.flatnonzero(held_out == self.bos)
        ends = np.minimum([*starts[1:], len(held_out)], starts + max_seq_len)
        documents = [held_out[start:end].astype(np.int64) for start, end in zip(starts, ends, strict=True)]
        self.scored = [document for document in documents if len(document) > 1][:limit]

        found = self.token_bytes[np.concatenate([document[1:] for document in self.scored])]
        self.targets = int((found > 0).sum())
        self.bytes = int(found.sum())
        self.name = self.info.get("name", self.folder.name)
        expected = EXPECTED.get(self.name) if max_seq_len == 2048 and not limit else None
        if expected not in (None, (self.targets, self.bytes)):
            raise UserError(f"{folder} scores {self.targets} targets and {self.bytes} bytes, not {expected}")

    def checked(self, name: str) -> bytes:
        """Content of a file that dataset.json lists. Raises: UserError if it is not the listed one"""
        path = self.folder / name
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != self.info["files"][name]["sha256"]:
            raise UserError(f"{path} is missing or is not the file that dataset.json lists; make the dataset again")
        return content

    def read(self, split: str) -> np.ndarray:
        """All tokens of a split, uint16 (N,)."""
        names = sorted(name for name in self.info["files"] if name.startswith(f"pretrain/{split}_"))
        return np.concatenate([np.frombuffer(self.checked(name), "<u2", offset=1024) for name in names])

    def scored_sha256(self) -> str:
        """Of the scored ids, as train_small.py states it in result.json."""
        return hashlib.sha256(b"".join(document.astype("<u2").tobytes() for document in self.scored)).hexdigest()

    def bpb(self, nats: float) -> float:
        """Bits per byte from the sum of nats over the targets that carry bytes."""
        return nats / math.log(2) / self.bytes

    def documents(self) -> Iterator[np.ndarray]:
        """The training documents without BOS, int64, in their order, once."""
        for start, end in zip(self.starts, [*self.starts[1:], len(self.tokens)], strict=True):
            yield self.tokens[start + 1 : end].astype(np.int64)

    def pack(self, offset: int, size: int, max_seq_len: int) -> tuple[np.ndarray, np.ndarray, list[int], int]:
        """The next `size` training tokens, read as train_small.py reads them; nothing is dropped.

        A document longer than `max_seq_len` or than what is left of the pack is continued as a segment of its own after
        a fresh BOS, which repeats no token.
        Returns: inputs int64 (size,), targets int64 (size,), ends of the segments, offset of the next pack
        """
        inputs = np.empty(size, np.int64)
        targets = np.empty(size, np.int64)
        ends = []
        filled = 0
        while filled < size:
            if offset >= len(self.tokens):
                raise UserError(f"{self.folder} ran out of text; train on fewer tokens")
            following = np.searchsorted(self.starts, offset, side="right")
            document_end = self.starts[following] if following < len(self.starts) else len(self.tokens)
            begin = filled
            room = min(size - filled, max_seq_len)
            if self.tokens[offset] != self.bos:
                inputs[filled] = self.bos
                filled += 1
                room -= 1
            stop = int(min(document_end, offset + room))
            inputs[filled : filled + stop - offset] = self.tokens[offset:stop]
            filled += stop - offset
            targets[begin : filled - 1] = inputs[begin + 1 : filled]
            targets[filled - 1] = self.tokens[stop] if stop < len(self.tokens) else self.bos
            ends.append(filled)
            offset = stop
        return inputs, targets, ends, offset

    def training_batches(self, rows: int, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(inputs, targets) int64 (rows, length), each row a pack, for models that do not separate documents."""
        offset = 0
        while True:
            inputs = np.empty((rows, length), np.int64)
            targets = np.empty((rows, length), np.int64)
            for row in range(rows):
                inputs[row], targets[row], _, offset = self.pack(offset, length, length)
            yield inputs, targets

    def validation_batches(self, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(inputs, targets) int64 (rows, max_seq_len): a scored document a row, padded; -1 for what does not count."""
        batches = []
        for first in range(0, len(self.scored), rows):
            inputs = np.full((rows, self.max_seq_len), self.bos)
            targets = np.full((rows, self.max_seq_len), -1)
            for row, document in enumerate(self.scored[first : first + rows]):
                self.place(document, inputs[row], targets[row])
            batches.append((inputs, targets))
        return self.counted(batches)

    def validation_packs(self, size: int, multiple: int = 1) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
        """(inputs, targets, ends) of `size` tokens: whole scored documents one after another, then padding.

        multiple: of which the number of packs must be one; the packs added hold padding alone
        """
        packs = []
        left = list(reversed(self.scored))
        while left or len(packs) % multiple:
            inputs = np.full(size, self.bos)
            targets = np.full(size, -1)
            ends = [0]
            while left and ends[-1] + len(left[-1]) - 1 <= size:
                document = left.pop()
                self.place(document, inputs[ends[-1] :], targets[ends[-1] :])
                ends.append(ends[-1] + len(document) - 1)
            while ends[-1] < size:
                ends.append(min(ends[-1] + self.max_seq_len, size))
            packs.append((inputs, targets, ends[1:]))
        return self.counted(packs)

    def place(self, document: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Writes a document to the start of both arrays."""
        inputs[: len(document) - 1] = document[:-1]
        targets[: len(document) - 1] = np.where(self.token_bytes[document[1:]] > 0, document[1:], -1)

    def counted(self, batches: list[tuple]) -> list[tuple]:
        """The batches, after a check that they hold every scored target once."""
        targets = np.concatenate([batch[1].ravel() for batch in batches])
        found = self.token_bytes[targets[targets >= 0]]
        if (len(found), int(found.sum())) != (self.targets, self.bytes):
            raise AssertionError(f"{len(found)} targets and {found.sum()} bytes, not {self.targets} and {self.bytes}")
        return batches
