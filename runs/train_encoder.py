"""Pretrains an encoder as a masked language model.

    python runs/train_encoder.py --data data/shards/mine --run-dir out/encoder
    python runs/train_encoder.py --resume --run-dir out/encoder         continue a run that was stopped
    torchrun --standalone --nproc_per_node=8 runs/train_encoder.py --data data/shards/mine

It reads a dataset directory of data/pretrain.py, masks 20 % of the tokens of packed documents and
predicts them from both sides. Its sizes are small (12 layers, width 768) and neobert (28 layers,
width 768, that of arXiv 2502.19587). Flags set every number; --help lists them. With --resume all of
them are those that the run began with.

Loader, optimizer, training step, log and checkpoints are those of train_small.py, which must lie
beside this file or one folder above; a run directory keeps both. The model is that of EuroBERT in
transformers (RMSNorm before each part, rotary positions, SwiGLU, no biases), so an export needs no
code of its own. runs/finetune_encoder.py makes it embed texts, runs/export_encoder.py exports it.

Letters in shape comments: T packed tokens, M masked tokens, D width, H heads, K head width, V
vocabulary, L layers, P packs, N texts.
"""

import argparse
import dataclasses
import datetime
import hashlib
import importlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# A run directory has a copy of train_small.py beside this file; a checkout has it one folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
script = importlib.import_module("train_small")

FORMAT = 1  # of run directories: it rises when the model of this file changes
NORM_EPS = 1e-6
CE_ROWS = 8192  # rows of logits that exist at the same time

# ==================================================================================================
# CONFIG


@dataclass(frozen=True)
class Config:
    """Every number of a run. Flags set them, and build_parser() says what they are."""

    num_layers: int = 12
    width: int = 768
    head_dim: int = 128  # 5 % faster than 64 on an H200, the same loss
    mlp_width: int = 2048
    max_seq_len: int = 1024
    rotary_base: float = 10000.0
    vocab_size: int = 0  # entries of the tokenizer, and the mask token

    data: str = "data/shards/climbmix"
    mask_rate: float = 0.2
    pack_tokens: int = 8192
    pack_docs: int = 64  # attention looks at as many, whether there are or not
    packs: int = 16
    max_epochs: int = 1
    val_tokens: int = 1_048_576

    steps: int = 2600
    muon_lr: float = 0.02
    adam_lr: float = 0.006
    muon_beta2: float = 0.9
    adam_eps: float = 1e-10
    momentum: tuple = (0.85, 0.95, 300, 50)  # from, to, warm-up steps, cool-down steps
    cooldown: float = 0.6  # share of the run over which the rates fall
    lr_floor: float = 0.0  # what they fall to, as a share of the first

    seed: int = 0
    eval_every: int = 250
    save_every: int = 0
    log_every: int = 10
    keep_checkpoints: int = 2
    micro_batch_tokens: int = 0
    attention: str = "auto"
    dtype: str = "auto"
    compile: bool = True

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // 64) * 64

    @property
    def num_steps(self) -> int:
        return self.steps

    @property
    def step_tokens(self) -> int:
        return self.packs * self.pack_tokens

    @property
    def stages(self) -> tuple:
        """What the schedule and the loader of train_small.py ask for: an encoder's run has one stage."""
        return (script.Stage(1.0, self.packs, 1.0),)

    stage_table = stages


SIZES = {"small": {}, "neobert": {"num_layers": 28, "head_dim": 64}}


def parameter_table(config: Config) -> dict:
    """NorMuon for matrices, Adam for the embedding, with the decays of train_small.py."""
    head_pair = min(2, config.num_heads) * config.head_dim
    return {
        "qk_bank": script.Policy("normuon", 1.0, weight_decay=0.0276, rows=head_pair),
        "vo_bank": script.Policy("normuon", 1.0, weight_decay=0.0276),
        "mlp_bank": script.Policy("normuon", 1.0, weight_decay=0.0276),
        "embed": script.Policy("adam", 1.0, (0.9, 0.95), 0.006),
    }


# The least of each number; rates and shares must be above 0 and at most 1.
LEAST = {
    "num_layers": 1, "width": 2, "head_dim": 2, "mlp_width": 1, "max_seq_len": 2, "pack_tokens": 2, "pack_docs": 1,
    "packs": 1, "max_epochs": 1, "val_tokens": 1, "steps": 1, "seed": 0, "eval_every": 0, "save_every": 0,
    "log_every": 1, "keep_checkpoints": 1, "micro_batch_tokens": 0,
}  # fmt: skip
SHARES = ("mask_rate", "muon_lr", "adam_lr")
CHOICES = {"attention": ("auto", "varlen", "sdpa"), "dtype": ("auto", "bfloat16", "float32")}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_config(c: Config) -> None:
    """Raises UserError with the first problem."""
    for name, least in LEAST.items():
        if getattr(c, name) < least:
            raise script.UserError(f"{flag_of(name)} {getattr(c, name)} must be at least {least}")
    for name in SHARES:
        if not 0 < getattr(c, name) <= 1:
            found = f"{flag_of(name)} {getattr(c, name)}"
            way = f"the default is {getattr(Config, name)}"
            raise script.UserError(f"{found} must be above 0 and at most 1; {way}")
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            names = ", ".join(choices)
            raise script.UserError(
                f"{flag_of(name)} {getattr(c, name)} is none of {names}; name one"
            )
    if c.width % c.head_dim or c.head_dim % 2:
        found = f"--width {c.width} and --head-dim {c.head_dim}"
        raise script.UserError(f"{found}: the width must be a multiple of an even head width")
    if c.max_seq_len > c.pack_tokens:
        found = f"--max-seq-len {c.max_seq_len} is above --pack-tokens {c.pack_tokens}"
        raise script.UserError(f"{found}; a document must fit into a pack, so change one of them")


# ==================================================================================================
# MODEL


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last axis, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding of whole heads; cos_TK and sin_TK are (T, 1, K)."""
    first, second = x_THK.chunk(2, -1)
    return x_THK * cos_TK + torch.cat((-second, first), -1) * sin_TK


class Encoder(nn.Module):
    """Transformer that sees both sides of a token. Weights lie in banks, as in train_small.py."""

    def __init__(self, config: Config, device="cpu", dtype=torch.float32):
        super().__init__()
        self.config = c = config
        D = c.width
        L = c.num_layers

        def weight(*shape):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.embed = weight(c.padded_vocab, D)  # one table for input and output
        self.qk_bank = weight(L, 2 * D, D)
        self.vo_bank = weight(2 * L, D, D)  # v0, o0, v1, o1, ...
        self.mlp_bank = weight(3 * L, c.mlp_width, D)  # gate0, up0, down0, ...; down like up

        positions = torch.arange(c.max_seq_len)
        exponents = torch.arange(0, c.head_dim, 2) / c.head_dim
        angles = torch.outer(positions, 1.0 / c.rotary_base**exponents).repeat(1, 2)
        rotary = torch.stack((angles.cos(), angles.sin()))
        self.register_buffer("rotary", rotary.to(device), persistent=False)
        # One target a token; train_step() of train_small.py asks for the number.
        self.register_buffer("loss_weights", torch.ones(1, device=device), persistent=False)
        self.attention: Callable = sdpa_attention

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        rng = torch.Generator(device=self.embed.device).manual_seed(seed)
        bound = 0.5 * math.sqrt(3 / self.config.width)  # uniform, standard deviation 0.5 / sqrt(D)
        self.embed.normal_(0, 0.005, generator=rng)  # as a head; as an input it is normalised
        self.qk_bank.uniform_(-bound, bound, generator=rng)
        self.vo_bank.uniform_(-bound, bound, generator=rng)
        self.mlp_bank.uniform_(-bound, bound, generator=rng)
        self.mlp_bank[2::3].zero_()

    def hidden(self, tokens_T, positions_T, cu_seqlens, max_doc: int) -> Tensor:
        """Normalised last hidden states (T, D) of packed documents, each blind to the others.

        Args: positions_T in the document; cu_seqlens int32 borders of documents, padded with T;
              max_doc bound on a document's length
        """
        c = self.config
        cos, sin = (table[positions_T][:, None].to(self.embed.dtype) for table in self.rotary)
        attend = self.attention(positions_T, cu_seqlens, max_doc)
        qk = self.qk_bank.unbind(0)
        vo = self.vo_bank.unbind(0)
        mlp = self.mlp_bank.unflatten(0, (c.num_layers, 3)).unbind(0)

        x = norm(F.embedding(tokens_T, self.embed))
        for layer in range(c.num_layers):
            a = norm(x)
            q_and_k = rotate(F.linear(a, qk[layer]).view(-1, 2 * c.num_heads, c.head_dim), cos, sin)
            q, k = q_and_k.chunk(2, 1)
            v = F.linear(a, vo[2 * layer]).view(-1, c.num_heads, c.head_dim)
            x = x + F.linear(attend(q, k, v).reshape(x.shape), vo[2 * layer + 1])

            # Two products: one for both would write their gradients side by side first, 2 % of a step.
            gate, up, down = mlp[layer].unbind(0)
            a = norm(x)
            x = x + (F.silu(F.linear(a, gate)) * F.linear(a, up)) @ down
        return norm(x)

    def forward(self, tokens_T, targets_T, positions_T, cu_seqlens, max_doc: int):
        """The loss of masked tokens, for train_step() and bits_per_byte() of train_small.py.

        Args:    targets_T the original token where one was masked, else -1
        Returns: the sum of nats, to be differentiated, and the nats of each target, fp32 (T,)
        """
        hidden_TD = self.hidden(tokens_T, positions_T, cu_seqlens, max_doc)

        # A fixed number of rows, masked ones first, so that shapes stay the same in each step.
        T = len(tokens_T)
        M = min(T, math.ceil(T * self.config.mask_rate))
        picked_M = torch.argsort((targets_T < 0).int(), stable=True)[:M]
        targets_M = targets_T[picked_M].long()
        total, nats_M = cross_entropy(hidden_TD[picked_M], self.embed, targets_M)
        return total, nats_M.new_zeros(T).scatter(0, picked_M, nats_M)

    def embed_texts(self, tokens_T, positions_T, cu_seqlens, max_doc: int) -> Tensor:
        """Embeddings of packed texts, fp32 (N, D), each of length 1."""
        hidden_TD = self.hidden(tokens_T, positions_T, cu_seqlens, max_doc).float()
        text_T = (positions_T == 0).cumsum(0) - 1
        lengths_N = cu_seqlens.diff()[:, None]
        sums_ND = hidden_TD.new_zeros(len(lengths_N), hidden_TD.size(1))
        return F.normalize(sums_ND.index_add(0, text_T, hidden_TD) / lengths_N, dim=-1)


# -- attention(positions, cu_seqlens, max_doc) prepares what all layers share and returns
# attend(q, k, v (T, H, K)) -> (T, H, K). A token sees its whole document and nothing else.


def with_neighbours(x: Tensor, edge: int) -> Tensor:
    """(blocks, block, ...) -> (blocks, 3 block, ...): the block before, the block, the one after."""
    outside = torch.full_like(x[:1], edge)
    before = torch.cat((outside, x[:-1]))
    after = torch.cat((x[1:], outside))
    return torch.cat((before, x, after), 1)


def sdpa_attention(positions_T, cu_seqlens, max_doc: int) -> Callable:
    """Plain torch, on any device: blocks as long as the longest document see their neighbours."""
    T = positions_T.numel()
    block = min(max_doc, T)
    padding = -T % block
    starts = torch.arange(T, device=positions_T.device) - positions_T  # where a document begins
    starts = F.pad(starts, (0, padding), value=-1).view(-1, block)
    is_split = len(starts) > 1
    key_starts = with_neighbours(starts, -2) if is_split else starts
    mask = (starts[:, :, None] == key_starts[:, None, :])[:, None]

    def attend(q, k, v):
        shape = (len(starts), block, *q.shape[1:])
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)).view(shape) for x in (q, k, v))
        if is_split:
            k = with_neighbours(k, 0)
            v = with_neighbours(v, 0)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return y.transpose(1, 2).flatten(0, 1)[:T]

    return attend


def varlen_attention(positions_T, cu_seqlens, max_doc: int) -> Callable:
    """FlashAttention 2 inside torch (Ampere or newer, 16 bits)."""
    from torch.nn.attention.varlen import varlen_attn

    sizes = (cu_seqlens, cu_seqlens, max_doc, max_doc)
    return lambda q, k, v: varlen_attn(q, k, v, *sizes, window_size=(-1, -1))


def choose_attention(name: str, device: torch.device, dtype: torch.dtype) -> Callable:
    """The kernel where it runs, if nothing else is asked for."""
    if name == "auto":
        name = "varlen" if device.type == "cuda" and dtype == torch.bfloat16 else "sdpa"
    return {"varlen": varlen_attention, "sdpa": sdpa_attention}[name]


# -- cross-entropy of masked tokens: CE_ROWS rows of logits at a time, with their gradient, so that
# (M, V) never exists in fp32.


def cross_entropy_ref(hidden_MD: Tensor, head_VD: Tensor, targets_M: Tensor):
    """What cross_entropy() computes, in the plain form."""
    logits = F.linear(hidden_MD, head_VD).float()
    nats = F.cross_entropy(logits, targets_M, ignore_index=-1, reduction="none")
    return nats.sum(), nats.detach()


def cross_entropy(hidden_MD: Tensor, head_VD: Tensor, targets_M: Tensor, rows: int = CE_ROWS):
    """The sum of nats, 0-D, and the nats of each row, 0 where the target is -1; fp32."""
    return ChunkedCE.apply(hidden_MD, head_VD, targets_M, rows, torch.is_grad_enabled())


class ChunkedCE(torch.autograd.Function):
    """The forward computes the gradient too, while it has the logits."""

    @staticmethod
    def forward(ctx, hidden_MD, head_VD, targets_M, rows: int, grad: bool):
        grad_hidden = []
        grad_head = torch.zeros_like(head_VD, dtype=torch.float32) if grad else None
        nats = []
        columns = torch.arange(len(head_VD), device=head_VD.device)
        parts = zip(hidden_MD.split(rows), targets_M.split(rows), strict=True)
        for hidden, targets in parts:
            logits = F.linear(hidden, head_VD).float()
            counted = targets >= 0
            picks = targets.clamp(min=0)[:, None]
            log_sum = logits.logsumexp(1, keepdim=True)
            nats.append(((log_sum - logits.gather(1, picks)) * counted[:, None])[:, 0])
            if grad:
                # Softmax less one at the target; a scatter would be a pass of its own.
                g = (logits - log_sum).exp() - (columns == picks).float()
                g = (g * counted[:, None]).to(head_VD.dtype)
                grad_hidden.append(g @ head_VD)
                grad_head += g.mT @ hidden
        if grad:
            ctx.save_for_backward(torch.cat(grad_hidden), grad_head.to(head_VD.dtype))
        nats = torch.cat(nats)
        ctx.mark_non_differentiable(nats)
        return nats.sum(), nats

    @staticmethod
    def backward(ctx, g, _):
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * g, grad_head * g, None, None, None


# ==================================================================================================
# DATA


def mask_tokens(batch, config: Config, is_text_V: np.ndarray, seed: list[int]):
    """A Batch with tokens masked, and targets where they are.

    Every pack loses the same share of its tokens of text. All of them become the mask token.

    Args: is_text_V which tokens of the vocabulary may be masked; seed of this batch
    """
    tokens = batch.tokens.numpy().copy()
    targets = np.full_like(tokens, -1)
    is_text = is_text_V[tokens]
    lots = np.random.default_rng(seed).random(tokens.shape)
    lots[~is_text] = 2.0  # they never come first
    order = lots.argsort(1)
    for row in range(len(tokens)):
        chosen = order[row, : int(config.mask_rate * is_text[row].sum())]
        targets[row, chosen] = tokens[row, chosen]
    tokens[targets >= 0] = config.vocab_size - 1
    return dataclasses.replace(
        batch,
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        total_targets=int((targets >= 0).sum()),
    )


class MaskedPacks(script.PackLoader):
    """The masked packs of each step. Which tokens are masked does not depend on the ranks."""

    def __init__(self, reader, config: Config, ranks, is_text_V: np.ndarray, first_step: int = 0):
        self.sharing = ranks
        self.is_text_V = is_text_V
        super().__init__(reader, config, script.Ranks(0, 0, 1, ranks.device), first_step)

    def batch(self, step: int):
        """This rank's packs. Every rank reads and masks all of them."""
        whole = super().batch(step)
        masked = mask_tokens(whole, self.config, self.is_text_V, [self.config.seed, step])
        share = len(masked.tokens) // self.sharing.world
        own = slice(self.sharing.rank * share, (self.sharing.rank + 1) * share)
        fields = {name: getattr(masked, name)[own] for name in ("tokens", "targets", "positions")}
        return dataclasses.replace(masked, **fields, ends=masked.ends[own])


def validation_of(dataset, config: Config, is_text_V: np.ndarray):
    """Held-out documents. On a dataset, equal --pack-tokens, --pack-docs and --max-seq-len give equal masks."""
    documents = script.validation_documents(dataset, config)
    scored = script.scored_documents(documents, config)
    batch = script.validation_batch(scored, config, dataset.tokenizer.bos_id)
    return mask_tokens(batch, config, is_text_V, [0])


def flops_per_token(config: Config, batch) -> float:
    """Training FLOPs: 6 a matrix weight, of the head for masked tokens, 12 x width a token seen."""
    c = config
    layer = 4 * c.width**2 + 3 * c.width * c.mlp_width
    head = c.mask_rate * c.width * c.padded_vocab
    is_first = (batch.positions == 0).flatten().numpy()
    lengths = np.diff(np.flatnonzero(np.append(is_first, True)))
    seen = float((lengths.astype(float) ** 2).sum() / lengths.sum())
    return 6 * (c.num_layers * layer + head) + 12 * c.num_layers * c.width * seen


# ==================================================================================================
# RUN


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

    position: dict | None = None  # where the reader stands
    tokens: int = 0
    train_seconds: float = 0.0
    val_bpb: float | None = None  # the best checkpoint has the lowest; for pairs it is -nDCG@10
    scores: dict = field(default_factory=dict)  # of the newest evaluation


@dataclass
class Run:
    """A run under way."""

    config: Config
    ranks: object
    run_dir: Path
    lock: object  # of run_dir, held while this lives
    log: object
    state: object
    machine: dict
    progress: Progress = field(default_factory=Progress)
    losses: list[Tensor] = field(default_factory=list)  # since the last line of the log
    clock: float = 0.0  # when training seconds were last counted
    logged: Progress = field(default_factory=Progress)  # at the last line


def micro_batch_limit(config: Config, device: torch.device) -> int:
    return config.micro_batch_tokens or (65536 if device.type == "cuda" else 8192)


def choose_packs(config: Config, ranks) -> int:
    """Packs in a micro-batch: the most that divide a rank's share and stay below the limit."""
    share = max(1, config.packs // ranks.world)
    limit = micro_batch_limit(config, ranks.device)
    fitting = [n for n in range(1, share + 1) if share % n == 0 and n * config.pack_tokens <= limit]
    return max(fitting, default=1)


def build_state(config: Config, ranks):
    """Model and optimizer with the weights of config.seed."""
    dtype = script.choose_dtype(config, ranks.device)
    if dtype == torch.float16:
        dtype = torch.float32  # GPUs without bf16 need no loss scale then
    model = Encoder(config, ranks.device, dtype)
    model.attention = choose_attention(config.attention, ranks.device, dtype)
    model.init_weights(config.seed)
    forward = model
    if config.compile and ranks.device.type == "cuda":
        forward = torch.compile(model, dynamic=False)
    optimizer = script.build_optimizer(model, config, parameter_table(config), ranks)
    packs = choose_packs(config, ranks)
    return script.TrainState(config, ranks, model, forward, optimizer, packs)


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def new_run_dir(args: argparse.Namespace, command: str, ranks) -> Path:
    """The run directory to be made; all ranks get the same answer."""
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    of_main = [str(args.run_dir or f"out/{now}_{command}")]
    if ranks.world > 1:
        dist.broadcast_object_list(of_main, 0)
        dist.barrier()
    run_dir = Path(of_main[0])
    if (run_dir / "log.jsonl").exists():
        way = "continue it with --resume, or name another --run-dir"
        raise script.UserError(f"{run_dir} already holds a run; {way}")
    return run_dir


def read_run(run_dir: Path, command: str = "") -> tuple[Config, dict]:
    """The Config and config.json of an encoder's run, which must be of a command if one is named."""
    description = script.read_description(run_dir)
    if "scripts" not in description:
        raise script.UserError(f"{run_dir} is no run of an encoder; name one that is")
    if description["format"] != FORMAT:
        found = f"{run_dir} has format {description['format']}, this script reads {FORMAT}"
        raise script.UserError(f"{found}; call the scripts that lie in it")
    if command not in ("", description["command"]):
        tools = {"pretrain": "runs/train_encoder.py", "contrast": "runs/finetune_encoder.py"}
        way = f"continue it with python {tools[description['command']]} --resume"
        raise script.UserError(f"{run_dir} is another kind of run; {way}")
    values = description["config"]
    return Config(**{**values, "momentum": tuple(values["momentum"])}), description


def check_same_run(run_dir: Path, facts: dict) -> None:
    """Raises UserError if --resume would not go on as the run began."""
    description = read_run(run_dir)[1]
    for name, sha256 in facts["scripts"].items():
        if description["scripts"].get(name) != sha256:
            way = "call the scripts in it, or start a new run"
            raise script.UserError(f"{name} was edited since {run_dir} began; {way}")
    if description["fingerprint"] != facts["fingerprint"]:
        raise script.UserError(f"the data of {run_dir} was changed; restore it, or start a new run")


def open_run(args, command: str, config: Config, tokenizer_path: Path, facts: dict, *tools) -> Run:
    """The run of a command before its first step, with the weights of config.seed.

    Args: facts further entries of config.json, "fingerprint" of the data among them; tools further
          scripts that the run directory keeps
    """
    ranks = script.start_ranks()
    paths = [Path(script.__file__), Path(__file__), *tools]
    facts = {**facts, "scripts": {path.name: file_sha256(path) for path in paths}}
    run_dir = args.run_dir if args.resume else new_run_dir(args, command, ranks)
    if args.resume:
        check_same_run(run_dir, facts)
    lock = None
    if ranks.is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = script.lock_run_dir(run_dir)
    machine = script.describe_machine(ranks)
    log = script.Log(run_dir, ranks, "", {})
    state = build_state(config, ranks)
    if ranks.is_main and not args.resume:
        description = {"command": command, "format": FORMAT, "config": dataclasses.asdict(config)}
        script.write_description(run_dir, {**description, **facts, "machine": machine})
        for path in (*paths, tokenizer_path):
            script.write_atomically(run_dir / path.name, path.read_text(encoding="utf-8"))

    parameters = sum(p.numel() for p in state.model.parameters())
    log.say(
        f"{command}: {parameters / 1e6:.1f} M parameters, {state.model.embed.dtype}, "
        f"{machine['num_devices']} x {machine['device']}, torch {machine['torch']}, "
        f"{state.model.attention.__name__}"
    )
    log.say(f"run: {run_dir}, {config.steps:,} steps")
    return Run(config, ranks, run_dir, lock, log, state, machine)


def resume(run: Run) -> None:
    """Goes on where the newest whole checkpoint stands."""
    folder = script.newest_whole(run.run_dir, run.log.say)
    saved = script.load_checkpoint(run.state, folder)
    progress = Progress(**{f.name: saved[f.name] for f in dataclasses.fields(Progress)})
    run.progress = progress
    run.logged = dataclasses.replace(progress)
    run.log.rewind(run.state.step)
    run.log.say(f"resumed at step {run.state.step} from {folder}")


def run_steps(run: Run, step: Callable, log_steps: Callable, evaluate: Callable) -> None:
    """The loop: steps until the end or a signal; logs, evaluates and saves in between.

    Args: step() trains and adds to run.losses; log_steps() writes a line about the steps since the
          last one; evaluate() returns scores by name
    """
    config = run.config
    state = run.state
    stopper = script.Stopper(run.ranks)
    run.clock = time.perf_counter()
    while state.step < config.steps:
        run.ranks.at_step(state.step)
        step()
        done = state.step == config.steps
        stop = stopper.asked(state.step)
        eval_now = done or config.eval_every and state.step % config.eval_every == 0
        save_now = done or stop or config.save_every and state.step % config.save_every == 0
        log_now = state.step == 1 or state.step % config.log_every == 0
        if log_now or eval_now or save_now:
            count_time(run)
            log_steps()
            run.logged = dataclasses.replace(run.progress)
        run.ranks.at_step(None)
        run.progress.val_bpb = None  # it belongs to the step that was evaluated
        if eval_now:
            log_scores(run, evaluate())
        if save_now:
            script.save_checkpoint(state, run.run_dir, dataclasses.asdict(run.progress))
        if eval_now or save_now:
            run.ranks.sync()
            run.clock = time.perf_counter()  # neither is training time
        if stop and not done:
            name = signal.Signals(stopper.signal).name
            way = f"continue with --resume --run-dir {run.run_dir}"
            raise script.UserError(f"stopped by {name} at step {state.step}, saved; {way}")
    stopper.restore()


def count_time(run: Run) -> None:
    """Waits for the device and adds the seconds since the clock was read."""
    run.ranks.sync()
    now = time.perf_counter()
    run.progress.train_seconds += now - run.clock
    run.clock = now


def log_scores(run: Run, scores: dict) -> None:
    """Logs an evaluation and keeps it for the checkpoint."""
    run.progress.scores = scores
    run.progress.val_bpb = scores.get("val_bpb", -scores.get("ndcg@10", 0.0))
    run.log.write({"step": run.state.step, "tokens": run.progress.tokens, **scores})
    line = " | ".join(f"{name} {value:.4f}" for name, value in scores.items())
    run.log.say(f"step {run.state.step:6d}/{run.config.steps} | held out: {line}")


def mean_loss(run: Run, shared: bool) -> float:
    """Of the steps since the last line; `shared`: each rank has its part of the loss."""
    loss = torch.stack(run.losses).mean()
    run.losses.clear()
    if shared and run.ranks.world > 1:
        dist.all_reduce(loss)
    if not math.isfinite(loss.item()):
        found = f"the loss became {loss.item()} at step {run.state.step}"
        raise script.UserError(f"{found}; lower --muon-lr and --adam-lr in a new run")
    return loss.item()


def finish(run: Run, score: str) -> dict:
    """result.json, report.md and curve.png; returns the result, on all ranks."""
    progress = run.progress
    result = {
        **progress.scores,
        "steps": run.state.step,
        "tokens": progress.tokens,
        "train_seconds": progress.train_seconds,
        "peak_memory_gib": script.peak_memory_gib(run.ranks.device),
        "run_dir": str(run.run_dir),
    }
    if run.ranks.is_main:
        script.write_atomically(run.run_dir / "result.json", json.dumps(result, indent=1))
        write_report(run, result, score)
        run.log.say(f"--- report: {run.run_dir}/report.md")
    return result


def write_report(run: Run, result: dict, score: str) -> None:
    machine = run.machine
    rows = {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in result.items()}
    rows["device"] = f"{machine['num_devices']} x {machine['device']}"
    rows |= {"torch": machine["torch"], "commit": machine["git_commit"][:12]}
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    draw_curve(run.run_dir, score)
    text = [f"# {run.run_dir.name}\n", "| | |", "| --- | --- |", *lines, "\n![curve](curve.png)\n"]
    script.write_atomically(run.run_dir / "report.md", "\n".join(text))


def draw_curve(run_dir: Path, score: str) -> None:
    """curve.png: training loss, and the score of held-out data."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, key in zip(axes, ("loss", score), strict=True):
        points = [(entry["step"], entry[key]) for entry in entries if key in entry]
        axis.plot(*zip(*points, strict=True), "o-", ms=2)
        axis.set(xlabel="step", title="loss, nats" if key == "loss" else f"held out: {key}")
        axis.grid(alpha=0.3)
    figure.savefig(run_dir / "curve.png", dpi=120)
    plt.close(figure)


# ==================================================================================================
# PRETRAINING


def pretrain(args: argparse.Namespace) -> dict:
    """Runs or resumes; returns the result that is printed last."""
    config = read_run(args.run_dir, "pretrain")[0] if args.resume else new_config(args)
    dataset = script.Dataset.open(config.data)
    vocab_size = dataset.tokenizer.vocab_size
    config = dataclasses.replace(config, vocab_size=vocab_size + 1)
    check_config(config)
    check_length(config, dataset)
    facts = {"fingerprint": script.fingerprint(dataset.info["files"])}
    run = open_run(args, "pretrain", config, dataset.tokenizer.path, facts)
    if config.packs % run.ranks.world:
        found = f"--packs {config.packs} do not divide over {run.ranks.world} processes"
        raise script.UserError(f"{found}; use a number that does")
    state = run.state
    script.warm_up(state, run.log.say)
    if args.resume:
        resume(run)

    # Specials carry no text and are never masked; the mask token is no token of the dataset.
    token_bytes = np.zeros(config.padded_vocab, np.int64)
    token_bytes[:vocab_size] = dataset.tokenizer.token_bytes
    validation = validation_of(dataset, config, token_bytes > 0)
    token_bytes_V = torch.from_numpy(token_bytes).to(run.ranks.device)
    reader = script.ShardReader(dataset, config)
    if run.progress.position:
        reader.seek(run.progress.position)
    loader = MaskedPacks(reader, config, run.ranks, token_bytes > 0, state.step)
    bytes_per_token = dataset.total("train", "text_bytes") / dataset.total("train", "tokens")
    batch = None

    def step() -> None:
        nonlocal batch
        batch = loader.next()
        run.losses.append(script.train_step(state, batch))
        run.progress.position = batch.position
        run.progress.tokens += config.step_tokens

    def evaluate() -> dict:
        bpb = script.bits_per_byte(state.model, validation, state.packs, token_bytes_V, run.ranks)
        return {"val_bpb": bpb}

    try:
        run_steps(run, step, lambda: log_pretraining(run, batch, bytes_per_token), evaluate)
    finally:
        loader.close()
    return finish(run, "val_bpb")


def new_config(args: argparse.Namespace) -> Config:
    names = [f.name for f in dataclasses.fields(Config)]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    return Config(**{**SIZES[args.size], **given})


def check_length(config: Config, dataset) -> None:
    """Raises UserError if the run asks for more text than there is."""
    available = dataset.total("train", "tokens") * config.max_epochs
    needed = config.steps * config.step_tokens
    if needed > available:
        way = f"ask for --steps {available // config.step_tokens}, or repeat it with --max-epochs"
        raise script.UserError(
            f"{config.data} holds {available:,} training tokens, the run asks for {needed:,}; {way}"
        )


def log_pretraining(run: Run, batch, bytes_per_token: float) -> None:
    """A line like those of train_small.py; bits per byte are those of masked tokens."""
    config = run.config
    progress = run.progress
    loss = mean_loss(run, shared=True)
    tokens = progress.tokens - run.logged.tokens
    seconds = max(progress.train_seconds - run.logged.train_seconds, 1e-9)
    peak = script.peak_flops(run.ranks.device) * run.ranks.world
    entry = {
        "step": run.state.step,
        "tokens": progress.tokens,
        "loss": loss,
        "bpb": loss / math.log(2) / bytes_per_token,
        "lr": script.lr_multiplier(config, run.state.step - 1),
        "step_ms": seconds / (tokens / config.step_tokens) * 1e3,
        "tokens_per_second": tokens / seconds,
        "mfu": tokens / seconds * flops_per_token(config, batch) / peak,
        "memory_gib": script.peak_memory_gib(run.ranks.device),
        "train_seconds": progress.train_seconds,
    }
    eta = (config.steps - run.state.step) * entry["step_ms"] / 1e3
    run.log.step(entry, config.steps, eta)


# ==================================================================================================
# COMMAND LINE


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument

    def number(flag: str, help: str) -> None:
        default = getattr(Config, flag[2:].replace("-", "_"))
        metavar = "X" if isinstance(default, float) else "N"
        add(flag, type=type(default), metavar=metavar, help=f"{help} (default {default})")

    add(
        "--run-dir", type=Path, metavar="DIR", help="where the run is written (default: under out/)"
    )
    add("--resume", action="store_true", help="continue the run in --run-dir, with its flags")
    add("--data", metavar="DIR", help=f"dataset directory (default {Config.data})")
    add("--size", choices=tuple(SIZES), default="small", help="number of layers (default small)")
    number("--num-layers", "in place of that of --size")
    number("--width", "of the hidden states")
    number("--head-dim", "width of an attention head")
    number("--mlp-width", "hidden width of the SwiGLU")
    number("--max-seq-len", "longest document; a longer one goes on as another")
    number("--mask-rate", "share of the tokens that are masked")
    number("--steps", "length of the run")
    number("--packs", "packs in a step, over all GPUs")
    number("--pack-tokens", "tokens in a pack of documents")
    number("--pack-docs", "most documents in a pack")
    number("--max-epochs", "passes over the text that are allowed")
    number("--val-tokens", "held-out tokens to score")
    number("--muon-lr", "rate of matrices")
    number("--adam-lr", "rate of the embedding")
    number("--seed", "of weights and masks")
    number("--eval-every", "steps between evaluations, 0: only at the end")
    number("--save-every", "steps between checkpoints, 0: only at the end")
    number("--log-every", "steps between lines of the log")
    number("--micro-batch-tokens", "0: 65,536 on a GPU, else 8,192")
    add("--attention", metavar="NAME", help=f"one of {', '.join(CHOICES['attention'])}")
    add("--dtype", metavar="NAME", help=f"one of {', '.join(CHOICES['dtype'])}")
    add("--no-compile", dest="compile", action="store_const", const=False, help="quicker start")
    return parser


def check_resume(parser: argparse.ArgumentParser, argv: list[str] | None) -> None:
    """Raises UserError if flags stand beside --resume that only a new run can have."""
    unset = dict.fromkeys(vars(parser.parse_args(argv)))  # which keeps the defaults out
    args = parser.parse_args(argv, argparse.Namespace(**unset))
    if not args.resume:
        return
    if not args.run_dir:
        raise script.UserError("--resume needs --run-dir, the run to continue")
    for name, value in vars(args).items():
        if name not in ("resume", "run_dir") and value is not None:
            flag = "RUN" if name == "run" else flag_of(name)
            raise script.UserError(f"--resume uses the flags of {args.run_dir}; leave out {flag}")


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)

    def command() -> dict:
        check_resume(parser, argv)
        return pretrain(args)

    return script.run_command(command)


if __name__ == "__main__":
    sys.exit(main())
