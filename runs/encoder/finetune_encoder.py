"""Finetunes an encoder on pairs of texts, so that it can find the text that answers a query.

    python runs/encoder/finetune_encoder.py out/encoder --pairs train.jsonl --val-pairs val.jsonl
    python runs/encoder/finetune_encoder.py out/embed --val-pairs val.jsonl --score-only
    python runs/encoder/finetune_encoder.py --resume --run-dir out/embed

RUN is a run directory of train_encoder.py or of this script. Each line of a pairs file is
{"query": TEXT, "positive": TEXT} with an optional list "negatives"; data/pairs.py makes such files.
The embedding of a text is the normalized mean of its last hidden states. Training pulls queries
towards their positives, away from the other positives and negatives of the whole batch over all
GPUs. Held-out pairs are scored by nDCG@10 and recall@10, next to BM25. runs/export.py exports the
result for sentence-transformers.

Letters in shape comments: T packed tokens, D width, N texts.
"""

import argparse
import dataclasses
import hashlib
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from lib.checkpoint import describe_tool, load_source, newest_checkpoint
from lib.command import RunError, add_flags, check_settings, read_flags, run_command
from pydantic import BaseModel, Field, StringConstraints, ValidationError

# Settings that train_small.py's loop reads from the Config.
SAME = {"steps", "muon_lr", "adam_lr", "seed", "eval_every", "save_every", "log_every", "micro_batch_tokens"}


class Settings(BaseModel):
    """The settings of a run, from its flags; the entry "finetune_encoder" of config.json."""

    run: Path
    checkpoint: str  # name of the one it started from
    pairs: Path = Field(description="file of pairs to train on, see data/pairs.py")
    val_pairs: Path = Field(description="file of held-out pairs to score on")
    steps: int = Field(1000, ge=1, description="optimizer steps")
    batch: int = Field(256, ge=1, description="pairs per step, over all GPUs")
    max_len: int = Field(256, ge=1, description="tokens of a text; longer ones are truncated")
    negatives: int = Field(1, ge=0, description="maximum number of negatives of a pair")
    temperature: float = Field(0.05, gt=0, description="temperature of the similarities")
    muon_lr: float = Field(0.002, gt=0, description="initial learning rate of matrices (NorMuon)")
    adam_lr: float = Field(0.0006, gt=0, description="initial learning rate of the embedding")
    seed: int = Field(0, ge=0, description="seed of the order of the pairs")
    eval_every: int = Field(250, ge=0, description="steps between scores, 0: only at both ends")
    save_every: int = Field(0, description="steps between checkpoints, 0: only at the end")
    log_every: int = Field(10, ge=1, description="steps between lines of the log")
    micro_batch_tokens: int = Field(0, ge=0, description="tokens of a micro-batch, 0: 65,536 on a GPU, else 8,192")


def add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory to start from")
    parser.add_argument("--score-only", action="store_true", help="score RUN without training")
    add_flags(parser, Settings.model_fields)


if __name__ == "__main__":
    read_flags(None, __doc__, add_new)  # --help and wrong flags need not wait for PyTorch

import encoder_config
import encoder_model as encoder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from encoder_model import script
from torch import Tensor

# ---- pairs


class Pair(NamedTuple):
    """Indices of texts."""

    query: int
    positive: int
    negatives: tuple[int, ...]


@dataclass
class Pairs:
    """The pairs of a file. Equal texts are one text."""

    texts: list[str]
    pairs: list[Pair]
    sequences: list[np.ndarray] = field(default_factory=list)  # ids of each text

    def tokenize(self, tokenizer, max_len: int) -> None:
        for text in self.texts:
            ids = [tokenizer.bos_id, *tokenizer.encode(text)][:max_len]
            self.sequences.append(np.array(ids, np.int32))


Text = Annotated[str, StringConstraints(min_length=1)]


class Line(BaseModel, extra="forbid"):
    """A line of a pairs file."""

    query: Text
    positive: Text
    negatives: list[Text] = []


def read_pairs(path: Path, negatives: int) -> Pairs:
    """Reads the lines of a file, with at most `negatives` of each. Raises: RunError"""
    index = {}
    pairs = []
    try:
        with Path(path).open(encoding="utf-8", newline="\n") as file:
            for line in file:
                row = Line.model_validate_json(line.strip())
                texts = [row.query, row.positive, *row.negatives[:negatives]]
                query, positive, *others = (index.setdefault(text, len(index)) for text in texts)
                pairs.append(Pair(query, positive, tuple(others)))
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f" {part!r}" for part in first["loc"])
        form = '{"query": TEXT, "positive": TEXT} with an optional list "negatives"'
        problem = f"is {first['input']!r:.80} ({first['msg']}); each line must be {form}"
        raise RunError(f"{path} line {len(pairs) + 1}{key} {problem}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {path} ({error}); pass a UTF-8 file of pairs") from None
    if not pairs:
        raise RunError(f"{path} holds no pairs; make some with data/pairs.py")
    return Pairs(list(index), pairs)


def pairs_of_step(count: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Which pairs a step reads; each epoch has an order of its own."""
    epoch, number = divmod(step, count // batch)
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return order[number * batch : (number + 1) * batch]


# ---- retrieval


class Retrieval(NamedTuple):
    """Each query against all documents but its own text. Keys are indices of texts."""

    documents: dict[int, int]  # numbers them
    relevant: dict[int, set[int]]  # for each query, numbers of documents


def retrieval_task(pairs: list[Pair]) -> Retrieval:
    """The task of finding the positive of each query among all positives and negatives."""
    texts = dict.fromkeys(i for pair in pairs for i in (pair.positive, *pair.negatives))
    documents = {text: number for number, text in enumerate(texts)}
    relevant = {}
    for pair in pairs:
        relevant.setdefault(pair.query, set()).add(documents[pair.positive])
    return Retrieval(documents, relevant)


def own_text(task: Retrieval, query: int) -> set[int]:
    """The number of a query's own text, if that is a document; none if it is an answer."""
    return {task.documents.get(query)} - {None} - task.relevant[query]


def ranking_scores(task: Retrieval, scores: Iterable[np.ndarray]) -> dict[str, float]:
    """nDCG@10 and recall@10, means over queries.

    Args: scores of all documents for each query of the task; that of its own text is overwritten
    """
    gains = 1 / np.log2(np.arange(2, 12))
    ndcg = []
    recall = []
    for (query, relevant), row in zip(task.relevant.items(), scores, strict=True):
        row[list(own_text(task, query))] = -math.inf
        hits = np.isin(np.argsort(-row, kind="stable")[:10], list(relevant))
        ndcg.append((hits * gains[: len(hits)]).sum() / gains[: min(10, len(relevant))].sum())
        recall.append(hits.sum() / len(relevant))
    return {"ndcg@10": float(np.mean(ndcg)), "recall@10": float(np.mean(recall))}


def bm25(documents: list[str], queries: list[str]) -> Iterator[np.ndarray]:
    """Scores of all documents for each query.

    Okapi BM25 over words of letters and digits, with Lucene's k1 = 1.2, b = 0.75 and idf.
    """
    words_of = lambda text: re.findall(r"\w+", text.lower())
    counts = [Counter(words_of(text)) for text in documents]
    lengths = np.array([max(count.total(), 1) for count in counts])
    norm = 1.2 * (1 - 0.75 + 0.75 * lengths / lengths.mean())
    index = {}  # of each word: (number of a document, how often it is there)
    for row, count in enumerate(counts):
        for word, times in count.items():
            index.setdefault(word, []).append((row, times))
    index = {word: np.array(entries).T for word, entries in index.items()}
    for query in queries:
        scores = np.zeros(len(documents))
        for rows, times in (index[word] for word in words_of(query) if word in index):
            idf = math.log(1 + (len(documents) - len(rows) + 0.5) / (len(rows) + 0.5))
            scores[rows] += idf * times / (times + norm[rows])
        yield scores


def bm25_scores(data: Pairs) -> dict[str, float]:
    """nDCG@10 and recall@10 of BM25."""
    task = retrieval_task(data.pairs)
    documents = [data.texts[i] for i in task.documents]
    queries = [data.texts[i] for i in task.relevant]
    scores = ranking_scores(task, bm25(documents, queries))
    return {f"bm25_{name}": score for name, score in scores.items()}


# ---- one step


def pack_texts(sequences: list[np.ndarray], device: torch.device) -> tuple:
    """Arguments of Encoder.embed_texts, the tensors int32 (T,), (T,) and (N + 1,)."""
    lengths = [len(sequence) for sequence in sequences]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    arrays = (np.concatenate(sequences), positions, ends)
    return *(torch.from_numpy(array).to(device) for array in arrays), max(lengths)


def own_texts(state, sequences: list[np.ndarray]) -> list[tuple]:
    """This rank's part of some texts in micro-batches; a text above the limit gets its own."""
    ranks = state.ranks
    capacity = encoder.micro_batch_limit(state.config, ranks.device)
    groups = []
    free = 0  # tokens in the last group
    for sequence in sequences[ranks.rank :: ranks.world]:
        if not groups or len(sequence) > free:
            groups.append([])
            free = capacity
        groups[-1].append(sequence)
        free -= len(sequence)
    return [pack_texts(group, ranks.device) for group in groups]


def gather_rows(part_ND: Tensor, count: int, ranks) -> Tensor:
    """All `count` rows; rank r holds every world-th, starting at r. Without gradient."""
    if ranks.world == 1:
        return part_ND.detach()
    part_size = math.ceil(count / ranks.world)
    padded = F.pad(part_ND.detach(), (0, 0, 0, part_size - len(part_ND))).contiguous()
    parts = [torch.empty_like(padded) for _ in range(ranks.world)]
    dist.all_gather(parts, padded)
    return torch.stack(parts, 1).flatten(0, 1)[:count]


@torch.no_grad()
def embed_all(state, sequences: list[np.ndarray]) -> Tensor:
    """Embeddings of texts, fp32 (N, D), on every rank. The ranks share the work."""
    parts = [torch.zeros(0, state.config.width, device=state.ranks.device)]
    parts += [state.model.embed_texts(*packed) for packed in own_texts(state, sequences)]
    return gather_rows(torch.cat(parts), len(sequences), state.ranks)


def info_nce_loss(embeddings_ND: Tensor, row, pairs: list[Pair], temperature: float) -> Tensor:
    """InfoNCE, 0-D: mean nats of finding each query's positive among all documents of the batch.

    Other positives of a query and its own text are not wrong answers, so they are masked.
    Args: row[i] the row of embeddings_ND that text i has
    """
    task = retrieval_task(pairs)
    queries = embeddings_ND[[row[pair.query] for pair in pairs]]
    documents = embeddings_ND[[row[i] for i in task.documents]]
    similarity = queries @ documents.T
    positives = [task.documents[pair.positive] for pair in pairs]
    for number, pair in enumerate(pairs):
        others = task.relevant[pair.query] - {positives[number]} | own_text(task, pair.query)
        similarity[number, list(others)] = -math.inf
    targets = torch.tensor(positives, device=similarity.device)
    return F.cross_entropy(similarity / temperature, targets)


def texts_of(pairs: list[Pair]) -> list[int]:
    """The texts of some pairs, each once."""
    return list(dict.fromkeys(i for p in pairs for i in (p.query, p.positive, *p.negatives)))


def grad_cache_step(state, data: Pairs, pairs: list[Pair], temperature: float) -> Tensor:
    """One optimizer step on some pairs; returns this rank's part of the loss, 0-D.

    Every rank embeds a part of the texts, computes the loss of the whole batch and backpropagates to
    its own texts. A part of several micro-batches is embedded twice: first without a graph, then one
    micro-batch at a time with the gradients of its embeddings (GradCache, arXiv 2101.06983).
    """
    ranks = state.ranks
    texts = texts_of(pairs)
    row = {text: number for number, text in enumerate(texts)}
    packed = own_texts(state, [data.sequences[i] for i in texts])
    keeps_graph = len(packed) == 1
    with torch.set_grad_enabled(keeps_graph):
        outputs = [state.model.embed_texts(*group) for group in packed]

    leaf = torch.cat(outputs).detach().requires_grad_()
    own_rows = torch.arange(ranks.rank, len(texts), ranks.world, device=ranks.device)
    everything = gather_rows(leaf, len(texts), ranks).index_copy(0, own_rows, leaf)
    loss = info_nce_loss(everything, row, pairs, temperature)
    loss.backward()

    gradients = leaf.grad.split([len(output) for output in outputs])
    for group, output, gradient in zip(packed, outputs, gradients, strict=True):
        if not keeps_graph:
            output = state.model.embed_texts(*group)
        output.backward(gradient)
    lr_mult = script.lr_multiplier(state.config, state.step)
    state.optimizer.step(lr_mult, script.muon_momentum(state.config, state.step))
    state.step += 1
    return loss.detach() / ranks.world  # every rank has all of it


def retrieval_scores(state, data: Pairs) -> dict[str, float]:
    """nDCG@10 and recall@10 of the model; every rank must call it."""
    task = retrieval_task(data.pairs)
    embeddings = embed_all(state, data.sequences)
    documents = embeddings[list(task.documents)]
    queries = embeddings[list(task.relevant)]
    scores = itertools.chain.from_iterable((q @ documents.T).cpu().numpy() for q in queries.split(1024))
    return ranking_scores(task, scores)


# ---- the run


def pair_loader(run, train: Pairs, batch: int) -> SimpleNamespace:
    """The pairs of each step, starting at the run's, as batches for the loop of train_small.py."""

    def batches() -> Iterator[SimpleNamespace]:
        for step in itertools.count(run.state.step):
            chosen = pairs_of_step(len(train.pairs), batch, run.job.config.seed, step)
            pairs = [train.pairs[i] for i in chosen]
            tokens = sum(len(train.sequences[i]) for i in texts_of(pairs))
            unused = {"reader_state": None, "positions": None, "notes": {}}
            yield SimpleNamespace(pairs=pairs, total_tokens=tokens, **unused)

    return SimpleNamespace(next=batches().__next__, close=lambda: None)


def finetune(args: argparse.Namespace) -> dict:
    """Runs or resumes; returns the result that is printed last."""
    if args.resume:
        config, description = encoder.read_run(args.run_dir, "finetune_encoder")
        settings = Settings(**description["finetune_encoder"])
        home = args.run_dir
    else:
        base, _ = encoder.read_run(args.run)
        folder = newest_checkpoint(script, args.run)
        settings = check_settings(Settings, {**vars(args), "checkpoint": folder.name})
        settings.max_len = min(settings.max_len, base.max_seq_len)
        # The rate falls from the first step to the last. The moments are new, so momentum rises.
        same = settings.model_dump(include=SAME)
        config = dataclasses.replace(base, **same, cooldown=1.0, lr_floor=0.0)
        home = settings.run
    tokenizer = script.Tokenizer(home / "tokenizer.json")
    return script.train(ContrastiveFinetuning(config, settings, tokenizer), args)


class ContrastiveFinetuning(script.Pretraining):
    """Finetuning of an encoder on pairs, with the loop of train_small.py."""

    command = "finetune_encoder"
    bytes_per_token = math.inf  # nothing to state in bits per byte

    def __init__(self, config: encoder.Config, settings: Settings, tokenizer):
        self.config = config
        self.settings = settings
        self.tokenizer = tokenizer
        self.train = read_pairs(settings.pairs, settings.negatives)
        self.held_out = read_pairs(settings.val_pairs, settings.negatives)
        count = len(self.train.pairs)
        if count < settings.batch:
            problem = f"{settings.pairs} holds {count:,} pairs but a step takes {settings.batch:,}"
            raise RunError(f"{problem}; lower --batch, or make more pairs")
        for data in (self.train, self.held_out):
            data.tokenize(tokenizer, settings.max_len)
        self.baseline = bm25_scores(self.held_out)

        files = [path.read_bytes() for path in (settings.pairs, settings.val_pairs)]
        digests = "".join(hashlib.sha256(content).hexdigest() for content in files)
        self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()
        self.note = f"{count:,} pairs to train on, {len(self.held_out.pairs):,} held out"
        entry = {"finetune_encoder": settings.model_dump(mode="json")}
        describe_tool(self, entry, __file__, encoder.__file__, encoder_config.__file__)

    def check(self, ranks) -> None:
        """Pairs are read again and again, and any number of ranks can share a step."""

    def build(self, ranks, say: Callable):
        return encoder.build_state(self.config, ranks, say)

    def start_weights(self, state) -> bool:
        source = self.settings.run / "checkpoints" / self.settings.checkpoint
        load_source(script, state, source, moments=False)
        return True

    def loader(self, run) -> SimpleNamespace:
        return pair_loader(run, self.train, self.settings.batch)

    def step(self, state, batch) -> Tensor:
        return grad_cache_step(state, self.train, batch.pairs, self.settings.temperature)

    def evaluate(self, run) -> dict[str, float]:
        return {**retrieval_scores(run.state, self.held_out), **self.baseline}

    def flops(self, positions) -> float:
        return 0.0  # texts are of many lengths, and most are short

    def seconds_left(self, run, entry: dict) -> float:
        return (self.config.num_steps - run.state.step) * entry["step_ms"] / 1e3


def score(args: argparse.Namespace) -> dict:
    """Retrieval on held-out pairs, and BM25 on the same."""
    settings = check_settings(Settings, {"pairs": "", "checkpoint": ""} | vars(args))
    ranks = script.start_ranks()
    model, description, step = encoder.load_encoder(args.run)
    state = encoder.build_state(model.config, ranks)
    state.model.load_state_dict(model.state_dict())
    data = read_pairs(settings.val_pairs, settings.negatives)
    data.tokenize(script.Tokenizer(args.run / "tokenizer.json"), encoder.max_text_len(description))
    counts = {"queries": len(retrieval_task(data.pairs).relevant), "step": step}
    return {**counts, **retrieval_scores(state, data), **bm25_scores(data)}


def main(argv: list[str] | None = None) -> int:
    args = read_flags(argv, __doc__, add_new)
    work = score if "score_only" in args else finetune
    return run_command(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
