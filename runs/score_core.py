"""Scores a pretrained run on CORE, the 22 tasks of DCLM (arXiv 2406.11794).

    python runs/score_core.py out/RUN
    python runs/score_core.py out/RUN --items 200                  the first 200 items of each task
    torchrun --standalone --nproc_per_node=8 runs/score_core.py out/RUN

data/core.py adds the tasks to the run's dataset. CORE is the mean over the tasks of (accuracy - guessing) /
(1 - guessing). The table goes to core.csv in the run directory, the score to its result.json and, as one JSON object,
to the last line on stdout. For an earlier checkpoint (--step) or an unfinished run there is only the table,
core_step_N.csv. This executes the training script in the run directory.

Letters in shapes: T tokens of a batch, R scored tokens of a batch, H heads, K head width.
"""

import argparse
import csv
import hashlib
import io
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lib.command import RunError, run_command, say


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score a pretrained run on the CORE tasks.")
    add = parser.add_argument
    add("run_dir", metavar="RUN", type=Path, help="run directory")
    add("--data", metavar="DIR", help="dataset with CORE tasks (default: the run's)")
    add("--items", type=int, default=0, metavar="N", help="first items of each task (default: all)")
    add("--batch-tokens", type=int, metavar="N", help="tokens per batch (default: by memory)")
    add("--step", type=int, metavar="N", help="checkpoint to score (default: the newest)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: that of the run")
    add("--no-compile", action="store_true", help="quicker start, slower scoring")
    args = parser.parse_args(argv)
    if args.items < 0:
        parser.error("--items must be at least 0")
    return args


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import numpy as np
import torch
import torch.nn.functional as F
from lib import engine
from lib.checkpoint import open_dataset
from lib.engine import adjacent_heads, jit, tl, triton, use_triton
from torch import Tensor

NUM_TASKS = 22

# ==== Tasks


@dataclass
class CoreTask:
    """The items of one task. An item has a row of tokens per choice; its span (start, end) is scored."""

    name: str
    kind: str  # multiple_choice, schema or language_modeling
    baseline: float  # accuracy of guessing, 0 to 1
    gold: np.ndarray  # (items,) the right choice
    items: list[list[np.ndarray]]  # the rows of each item
    spans: list[list[tuple[int, int]]]  # the span of each row

    @staticmethod
    def read(path: Path, sha256: str, limit: int, max_seq_len: int) -> "CoreTask":
        """Reads a file of data/core.py.

        Args:   limit: the first items only, 0: all; max_seq_len: longer rows lose their beginning
        Raises: RunError if the file is missing or not the one listed in dataset.json
        """
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != sha256:
            state = "corrupt: its sha256 is not the one in dataset.json" if content else "missing"
            raise RunError(f"{path} is {state}; make the CORE files again with python data/core.py")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = dict(file)
        meta = json.loads(arrays["meta"].tobytes())
        items = []
        spans = []

        # The file holds once what the choices of an item share, then what each has of its own.
        tokens = arrays["tokens"].astype(np.int32)
        choices = zip(*(arrays[name].tolist() for name in ("rest", "start", "end")), strict=True)
        cursor = 0  # in tokens
        counts = arrays["choices"][: limit or None].tolist()
        for shared, count in zip(arrays["shared"].tolist(), counts, strict=False):
            common = tokens[cursor : cursor + shared]
            cursor += shared
            items.append([])
            spans.append([])
            for length, start, end in islice(choices, count):
                full = np.concatenate((common, tokens[cursor : cursor + length]))
                cursor += length
                cut = max(0, len(full) - max_seq_len)
                items[-1].append(full[cut:])
                spans[-1].append((max(1, start - cut), max(1, end - cut)))
        gold = arrays["gold"][: len(items)]
        return CoreTask(meta["task"], meta["type"], meta["random_baseline"] / 100, gold, items, spans)


def core_files(dataset) -> dict[str, str]:
    """Path and sha256 of the dataset's CORE files, in the order of dataset.json."""
    files = dataset.info.get("files", {})
    return {name: entry["sha256"] for name, entry in files.items() if name.startswith("core/")}


def shared_inputs(rows: list[np.ndarray], spans: list[tuple[int, int]]) -> int:
    """Length of the common prefix of all rows, up to the first input that predicts a scored token."""
    if len(rows) == 1:
        return 0
    shortest = min(len(row) for row in rows)
    first_scored = min(start for start, _ in spans)
    most = max(min(shortest - 2, first_scored - 1), 0)
    beginnings = np.stack([row[:most] for row in rows])
    differs = (beginnings != beginnings[0]).any(0)
    return int(differs.argmax()) if differs.any() else most


# ==== Packing
# Items are packed into a buffer of fixed size. The common prefix of an item's choices is stored once; each choice
# continues from there and does not see the others:
#
#     tokens     B q q q a a b b b      two choices, a a . and b b b . ; a token that is only a target is not stored
#     positions  0 1 2 3 4 5 4 5 6      previous: for the first b, the token before is the last q
#     first      0 0 0 0 0 0 0 0 0      the first key seen, by the window; one row for each of the two windows
#     skip       - - - - - - 4 4 4      keys of index 4 and 5 are hidden: skip <= j < branch
#     branch     0 1 2 3 4 4 6 6 6      where the choice begins


class CoreInputs(NamedTuple):
    """A batch, int32: arrays, or tensors on a device. Padding tokens see only themselves; their targets have row -1."""

    tokens_T: Tensor
    positions_T: Tensor  # in the row
    previous_T: Tensor  # index of the token before in the row
    branch_T: Tensor
    skip_T: Tensor
    first_2T: Tensor  # for the short and the long window
    picks_R: Tensor  # index of the input that predicts each scored token
    targets_R: Tensor  # the scored tokens
    rows_R: Tensor  # the row that each of them belongs to


class CoreBatch:
    """A batch on the host, filled item by item."""

    def __init__(self, size: int, windows: tuple[int, int], bos_id: int):
        index = np.arange(size, dtype=np.int32)
        zeros = np.zeros(size // 2, np.int32)
        self.arrays = CoreInputs(
            tokens_T=np.full(size, bos_id, np.int32),
            positions_T=np.zeros(size, np.int32),
            previous_T=np.maximum(index - 1, 0),
            branch_T=index.copy(),
            skip_T=index.copy(),
            first_2T=np.stack((index, index)),
            picks_R=zeros.copy(),
            targets_R=zeros.copy(),
            rows_R=zeros - 1,
        )
        self.windows = windows
        self.used = 0  # tokens
        self.picked = 0  # scored tokens

    def add(self, rows: list[np.ndarray], spans: list[tuple[int, int]], row: int) -> bool:
        """Appends an item whose rows have the numbers row, row + 1, ...; False without room."""
        common = shared_inputs(rows, spans)
        tokens = common + sum(len(full) - 1 - common for full in rows)
        scored = sum(end - start for start, end in spans)
        arrays = self.arrays
        if self.used + tokens > arrays.tokens_T.size or self.picked + scored > arrays.picks_R.size:
            return False
        begin = self.used
        self.add_part(rows[0][:common], 0, begin, begin, begin)
        for number, (full, (start, end)) in enumerate(zip(rows, spans, strict=True), row):
            branch = self.used
            self.add_part(full[common:-1], common, begin, branch, begin + common)
            if self.used > branch:
                arrays.previous_T[branch] = max(begin + common - 1, 0)
            # The input before a scored token predicts it; shared_inputs leaves it to the choice.
            picks = slice(self.picked, self.picked + end - start)
            arrays.picks_R[picks] = np.arange(start, end) - 1 - common + branch
            arrays.targets_R[picks] = full[start:end]
            arrays.rows_R[picks] = number
            self.picked = picks.stop
        return True

    def add_part(self, tokens: np.ndarray, common: int, begin: int, branch: int, skip: int) -> None:
        """Appends what choices begin with, or a choice behind `common` tokens from `begin` on."""
        positions = np.arange(common, common + len(tokens), dtype=np.int32)
        part = slice(self.used, self.used + len(tokens))
        self.arrays.tokens_T[part] = tokens
        self.arrays.positions_T[part] = positions
        self.arrays.branch_T[part] = branch
        self.arrays.skip_T[part] = skip
        # The first position seen lies in the common part or in this one.
        for window, first in zip(self.windows, self.arrays.first_2T, strict=True):
            far = np.maximum(positions - window, 0)
            first[part] = np.where(far < common, begin + far, branch + far - common)
        self.used = part.stop

    def inputs(self, device: torch.device) -> CoreInputs:
        """The batch on a device. The copy may still be under way."""
        tensors = [torch.from_numpy(array) for array in self.arrays]
        if device.type == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return CoreInputs(*(tensor.to(device, non_blocking=True) for tensor in tensors))


# ==== Attention
# As in training, but each row also has a gap of keys that it does not see. Forward only.


def branch_attention_ref(q, k, v, first, skip, branch, block: int = 256) -> Tensor:
    """q, k, v (T, H, K) -> (T, H, K): row i sees the keys first[i] <= j <= i, except skip[i] <= j < branch[i].

    q carries the scale. Works in blocks of queries, as a dense mask over all tokens would not fit into memory.
    """
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    index = torch.arange(len(q), device=q.device)
    for start in range(0, len(q), block):
        own = slice(start, min(start + block, len(q)))
        seen = slice(int(first[own].min()), own.stop)  # by any query of the block
        i = index[own, None]
        j = index[None, seen]
        visible = (j >= first[own, None]) & (j <= i)
        visible &= (j < skip[own, None]) | (j >= branch[own, None])
        heads = [t.transpose(0, 1)[None] for t in (q[own], k[seen], v[seen])]
        y[own] = F.scaled_dot_product_attention(*heads, visible, scale=1.0)[0].transpose(0, 1)
    return y


@jit
def load_rows(x, index, stride, T, D: tl.constexpr):
    """Rows of one head, (BLOCK, D); zeros past the end."""
    x += index.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(x, mask=index[:, None] < T, other=0.0)


@jit
def branch_attention_kernel(q, k, v, o, first, skip, branch, T, sq, sk, sv, so, D: tl.constexpr,
                            BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One block of BM rows and one head a program; sq, sk, sv and so are the strides of a token.

    Window attention as in training, plus a gap of hidden keys. The first key may decrease from row to row, so a block
    starts at the smallest of its rows.
    """
    m0 = tl.program_id(0) * BM
    h = tl.program_id(1)
    m = m0 + tl.arange(0, BM)
    low = tl.load(first + m, mask=m < T, other=T)
    gap = tl.load(skip + m, mask=m < T, other=0)
    after = tl.load(branch + m, mask=m < T, other=0)
    Q = load_rows(q + h * D, m, sq, T, D)

    # Online softmax in base 2: `top` is the largest score so far, `total` the sum of exp2(score - top).
    top = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for n0 in range(tl.min(low, 0) // BN * BN, min(m0 + BM, T), BN):
        n = n0 + tl.arange(0, BN)
        K = load_rows(k + h * D, n, sk, T, D)
        scores = tl.dot(Q, tl.trans(K), input_precision="ieee") * 1.4426950408889634  # log2(e)
        seen = (n[None, :] >= low[:, None]) & (n[None, :] <= m[:, None])
        seen = seen & ((n[None, :] < gap[:, None]) | (n[None, :] >= after[:, None]))
        scores = tl.where(seen, scores, -1e30)

        # The first visible key makes `shrink` 0, which wipes out what hidden keys have added.
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(p, 1)
        V = load_rows(v + h * D, n, sv, T, D)
        acc = tl.dot(p.to(V.dtype), V, acc * shrink[:, None], input_precision="ieee")

    out = o + m.to(tl.int64)[:, None] * so + h * D + tl.arange(0, D)[None, :]
    tl.store(out, (acc / total[:, None]).to(o.dtype.element_ty), mask=m[:, None] < T)


# The sizes of the training kernel, which are the best on an H200.
TILES = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}


@torch.library.custom_op("decoderstack_core::branch_attention", mutates_args=())
def branch_attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor, skip: Tensor, branch: Tensor) -> Tensor:
    """branch_attention_ref, by the kernel where it runs."""
    if not use_triton(q):
        return branch_attention_ref(q, k, v, first, skip, branch)
    T, H, D = q.shape
    q, k, v = (adjacent_heads(t) for t in (q, k, v))
    o = q.new_empty(T, H, D)
    strides = (q.stride(0), k.stride(0), v.stride(0), o.stride(0))
    grid = (triton.cdiv(T, TILES["BM"]), H)
    branch_attention_kernel[grid](q, k, v, o, first, skip, branch, T, *strides, D, **TILES)
    return o


@branch_attention.register_fake
def _(q, k, v, first, skip, branch):
    return q.new_empty(q.shape)


# ==== Scoring


def score_packed(model, inputs: CoreInputs) -> tuple[Tensor, Tensor]:
    """Nats of the targets, fp32 (R,), and whether each is the most likely token, bool (R,).

    The head is computed at picks_R only, as few tokens of a few-shot prompt are scored.
    """
    config = model.config
    first_T11 = (inputs.positions_T == 0)[:, None, None]

    def attend(layer, q, k, v):
        if layer in config.key_offset_layers:
            k = model.offset_keys(k, k[inputs.previous_T], first_T11)
        first = inputs.first_2T[int(layer in config.long_layers)]
        return branch_attention(q, k, v, first, inputs.skip_T, inputs.branch_T)

    before_T = inputs.previous_T[inputs.previous_T]
    previous_2T = inputs.tokens_T[torch.stack((inputs.previous_T, before_T))]
    hidden = model.trunk(inputs.tokens_T, previous_2T, inputs.positions_T, attend)

    # In parts, which bounds the memory of the logits.
    nats = []
    hits = []
    for picks, targets in zip(inputs.picks_R.split(8192), inputs.targets_R.split(8192), strict=True):
        z = model.logits(hidden[picks])
        nats.append(z.logsumexp(1) - z.gather(1, targets[:, None].long())[:, 0])
        hits.append(z[:, : config.vocab_size].argmax(1) == targets)
    return torch.cat(nats), torch.cat(hits)


def scorer(model, compile: bool) -> Callable:
    """score_packed of a model, compiled to one graph on request."""
    score = partial(score_packed, model)
    return torch.compile(score, dynamic=False, fullgraph=True) if compile else score


def pack_items(task: CoreTask, size: int, windows: tuple, bos_id: int) -> Iterator[CoreBatch]:
    """All items of a task in batches of `size` tokens. Rows are numbered in the task's order."""
    begins = np.cumsum([0] + [len(rows) for rows in task.items]).tolist()
    lengths = [sum(len(row) for row in rows) for rows in task.items]
    # Longest first, so that short items fill what is left of a batch.
    order = sorted(range(len(task.items)), key=lambda i: -lengths[i])
    waiting = deque((task.items[i], task.spans[i], begins[i]) for i in order)
    batch = CoreBatch(size, windows, bos_id)
    while waiting:
        rows, spans, first = waiting.popleft()
        if batch.add(rows, spans, first):
            continue
        if batch.used:
            waiting.appendleft((rows, spans, first))
            yield batch
            batch = CoreBatch(size, windows, bos_id)
        else:  # the item is too long for any batch, but each of its choices fits
            for number in reversed(range(len(rows))):
                waiting.appendleft(([rows[number]], [spans[number]], first + number))
    yield batch


@torch.no_grad()
def score_task(score, task: CoreTask, size: int, windows: tuple, bos_id: int, ranks) -> np.ndarray:
    """Whether each item of a task is answered correctly, bool (items,). Raises: RunError if the loss is not finite.

    Args: score: as scorer() makes it; size: tokens of a batch; windows: of the model; ranks: the script's Ranks
    """
    count = sum(len(rows) for rows in task.items)
    # Nats, targets and hits of each row; the last column is for padding.
    sums = torch.zeros(3, count + 1, device=ranks.device)

    # All ranks pack alike and score the batches in turn.
    for number, batch in enumerate(pack_items(task, size, windows, bos_id)):
        if number % ranks.world != ranks.rank:
            continue
        inputs = batch.inputs(ranks.device)
        nats, hits = score(inputs)
        rows = torch.where(inputs.rows_R < 0, count, inputs.rows_R)
        sums.index_add_(1, rows, torch.stack((nats, torch.ones_like(nats), hits.float())))
    nats, targets, hits = sum(ranks.gather(sums[:, :-1].cpu().double().numpy()))
    if not np.isfinite(nats).all():
        raise RunError(f"the loss on {task.name} is not finite; score another checkpoint with --step")
    return correct_items(task, nats, targets, hits)


def correct_items(task: CoreTask, nats, targets, hits) -> np.ndarray:
    """The verdicts, bool (items,), from sums over the scored tokens of each row, three arrays.

    Language modelling: every scored token must be the most likely one. Multiple choice and schema: the right choice
    must have the lowest mean nats; ties go to the first.
    """
    begins = np.cumsum([0] + [len(rows) for rows in task.items])
    if task.kind == "language_modeling":
        return (hits == targets)[begins[:-1]]
    means = nats / np.maximum(targets, 1)
    correct = np.zeros(len(task.items), bool)
    for i, rows in enumerate(task.items):
        # Equal choices have equal means, whatever rounding has made of them.
        choices = [row.tobytes() for row in rows]
        first_equal = [choices.index(choice) for choice in choices]
        own = means[begins[i] : begins[i + 1]]
        correct[i] = own[first_equal].argmin() == task.gold[i]
    return correct


# ==== The command


class TaskScore(NamedTuple):
    """A row of the table and the csv file; the last one, the mean over tasks, has no accuracy."""

    task: str
    items: int
    accuracy: float | None
    centered: float | None  # (accuracy - guessing) / (1 - guessing); None for the mean if a task is missing
    seconds: float

    def line(self) -> str:
        accuracy, centered = ("" if x is None else f"{x:.4f}" for x in (self.accuracy, self.centered))
        return f"{self.task:34} {self.items:7,} {accuracy:>9} {centered:>9} {self.seconds:8.2f}"


def make_table(tasks: Iterable[tuple], name: str, count: int) -> list[TaskScore]:
    """Prints a row per task and one for the mean, which is empty unless there are `count` tasks; returns the rows.

    Args: tasks: name, which items are right, and accuracy of guessing of each; name: of the mean
    """
    say(f"{'task':34} {'items':>7} {'accuracy':>9} {'centered':>9} {'seconds':>8}")
    begin = time.perf_counter()
    rows = []
    for task, right, guessing in tasks:
        accuracy = float(right.mean())
        seconds = time.perf_counter() - begin - sum(row.seconds for row in rows)
        centered = (accuracy - guessing) / (1 - guessing)
        rows.append(TaskScore(task, len(right), accuracy, centered, seconds))
        say(rows[-1].line())
    if not rows:
        raise RunError("no task could be scored; give files with --files")
    mean = float(np.mean([row.centered for row in rows])) if len(rows) == count else None
    if mean is None:
        say(f"note: no {name}, which is the mean of {count} tasks; {len(rows)} were scored")
    total = sum(row.items for row in rows)
    rows.append(TaskScore(name, total, None, mean, time.perf_counter() - begin))
    say(rows[-1].line())
    return rows


def write_table(path: Path, rows: list[TaskScore]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([TaskScore._fields, *rows])


def default_batch_tokens(device: torch.device) -> int:
    if device.type != "cuda":
        return 8192
    free, _ = torch.cuda.mem_get_info(device)
    return 65536 if free > 16 * 2**30 else 16384


def write_scores(run: engine.Run, run_dir: Path, rows: list[TaskScore], result: dict) -> None:
    """core.csv and result.json describe the finished model; other checkpoints get tables of their own."""
    newest = run.script.checkpoints(run_dir)[-1]
    path = run_dir / "result.json"  # the run writes it when it has finished
    if newest.name != f"step_{run.step:06d}" or not path.is_file():
        write_table(run_dir / f"core_step_{run.step}.csv", rows)
        return
    write_table(run_dir / "core.csv", rows)
    of_training = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(of_training | result, indent=1), encoding="utf-8")


def score_run(args: argparse.Namespace) -> dict:
    """Scores the model of a run and writes the files. Returns what is printed last."""
    run = engine.load_run(args.run_dir, args.step, dtype=args.dtype)
    ranks = run.script.start_ranks()
    model = run.model
    dataset = open_dataset(run.script, args.data or run.config.data, args.run_dir)
    if not core_files(dataset):
        add = f"python data/core.py --download --data {dataset.root}"
        raise RunError(f"{dataset.root} has no CORE tasks; add them with {add}, or name another dataset with --data")
    bos_id = dataset.tokenizer.bos_id
    limit = model.config.max_seq_len
    size = args.batch_tokens or default_batch_tokens(ranks.device)
    size = max(size, 2 * limit)  # room for a row and its targets
    score = scorer(model, ranks.device.type == "cuda" and not args.no_compile)

    ranks.sync()
    start = time.perf_counter()
    with torch.no_grad():
        score(CoreBatch(size, model.windows, bos_id).inputs(ranks.device))
    ranks.sync()
    say(f"core: {size:,} tokens a batch, compiled in {time.perf_counter() - start:.1f} s")

    def tasks() -> Iterator[tuple]:
        for name, sha256 in core_files(dataset).items():
            task = CoreTask.read(dataset.root / name, sha256, args.items, limit)
            right = score_task(score, task, size, model.windows, bos_id, ranks)
            yield task.name, right, task.baseline

    rows = make_table(tasks(), "CORE", NUM_TASKS)
    core = rows[-1]
    result = {"core": core.centered, "core_seconds": core.seconds, "core_items": args.items or None}
    if ranks.is_main:
        write_scores(run, args.run_dir, rows, result)
    return result | {"run_dir": str(args.run_dir)}


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: score_run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
