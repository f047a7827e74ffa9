"""The model of train_small.py and its training in plain PyTorch, to read and to try ideas in.

    python runs/tutorials/train_plain.py --data data/shards/stdlib                         tiny model, laptop
    python runs/tutorials/train_plain.py --data data/shards/p34 --size small --steps 240   real model, GPU

Tutorial 1 makes the first dataset, README.md the second.
From the same weights and text, both reach the same losses (tests/test_train_plain.py). Only what makes training fast or
convenient is left out, and the mean of the last weights that train_small.py ends with (worth 0.002). Nothing is
imported from the repository: copy this file and change the copy. Sections: CONFIG, MODEL (ids -> logits), LOSS
(documents -> nats), DATA (shards -> packs), OPTIMIZER, SCHEDULE, LOOP.

"Record 34" is a speedrun of modded-nanogpt, where a trick comes from. "Worth 0.01" is what it saves on B34, a benchmark
of 34 M tokens, in bits per byte of validation text (dev/MEASUREMENTS.md). Capitals at the end of a name are
its shape: x_THK is (T, H, K). T tokens of a pack, D width, H heads, K head width, F hidden width of the MLP, V
vocabulary, L layers, E layers with value embeddings, C width of a trigram row, 1 an axis of length 1.
"""

import argparse
import base64
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


# ---- 1. CONFIG: sizes, rates and stages. Other numbers are where they are used.
@dataclass(frozen=True)
class Stage:  # a part of the run; early ones have small batches, which is better for each token
    fraction: float  # of the run's steps
    packs: int  # in each step
    lr_mult: float  # larger batches allow larger steps


@dataclass(frozen=True)
class Config:  # the defaults are DecoderStack-small
    num_layers: int = 11
    width: int = 768
    head_dim: int = 128
    mlp_width: int = 3072
    vocab_size: int = 32768  # replaced by that of the dataset, rounded up to a multiple of 64
    no_attention_layers: tuple = (4, 6, 9)  # record 17
    long_layers: tuple = (3, 10)  # worth 0.031 against short windows everywhere
    key_offset_layers: tuple = (3, 10)
    value_embed_layers: tuple = (1, 2, 8, 10)
    paired_layers: tuple = (0, 2, 5)
    exclusive_layers: tuple = (1, 3, 7)
    gated_layers: tuple = (3, 10)
    shared_input_from: int = 8
    bigram_rows: int = 409600
    trigram_rows: int = 4096000
    max_seq_len: int = 2048  # tokens; what is left of a longer document counts as one of its own
    window_short: int = 128  # how many tokens most layers look back
    window_long: int = 2048  # the same for long_layers
    pack_tokens: int = 8192
    max_docs_per_pack: int = 64  # most documents in a pack
    steps: int = 2402  # of 340 M tokens
    stages: tuple = (
        Stage(737 / 2402, 8, 1.0),
        Stage(1105 / 2402, 16, 1.414),
        Stage(560 / 2402, 32, 2.0),
    )


TINY = Config(  # as large as runs/cpu.args; tricks, rates and length differ, and so does its bpb
    num_layers=4, width=192, head_dim=64, mlp_width=768, no_attention_layers=(), long_layers=(1, 3),
    key_offset_layers=(1, 3), value_embed_layers=(0, 3), paired_layers=(),
    exclusive_layers=(1,), gated_layers=(3,), bigram_rows=10240, trigram_rows=25600,
    max_seq_len=512, window_long=256, steps=150, pack_tokens=1024, max_docs_per_pack=32, stages=(Stage(1.0, 1, 1.0),),
)  # fmt: skip


# ---- 2. MODEL: token ids -> logits
def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])  # RMSNorm without anything to learn


def rotate(x_THK: Tensor, angles_T1K: Tensor) -> Tensor:
    """Rotary embedding of the first half of each head; angles (T, 1, K / 4)."""
    a, b, *still = x_THK.chunk(4, -1)
    cos = angles_T1K.cos()
    sin = angles_T1K.sin()
    return torch.cat((a * cos + b * sin, b * cos - a * sin, *still), -1)


def visible(positions_T: Tensor, window: int) -> Tensor:
    """Who sees whom, bool (T, T): a query sees itself and `window` tokens before it, if its document has them."""
    distance = torch.arange(len(positions_T))[:, None] - torch.arange(len(positions_T))
    return (distance >= 0) & (distance <= positions_T[:, None]) & (distance <= window)


class Model(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        D = config.width
        L = config.num_layers
        E = len(config.value_embed_layers)
        heads = D // config.head_dim
        pair_rows = min(2, heads) * config.head_dim  # those of two heads in Q or K
        bound = 0.5 * math.sqrt(3 / D)  # of a uniform distribution with deviation 0.5 / sqrt(D)

        # One table for input and output: worth 0.008 against two.
        self.embed = nn.Parameter(torch.randn(config.vocab_size, D) * 0.005)
        self.value_embed = nn.Parameter(torch.randn(E, config.vocab_size, D) * 0.01)
        self.bigram_embed = nn.Parameter(torch.zeros(config.bigram_rows, D))
        self.register_buffer("bigram_signs", torch.randint(0, 2, (8192, D)) * 2.0 - 1)
        C = min(128, D)
        self.trigram_embed = nn.Parameter(torch.zeros(config.trigram_rows, C))
        self.trigram_proj = nn.Parameter(torch.randn(D, C) * C**-0.5)

        # Matrices of all layers. NorMuon takes Q and K in pairs of heads (record 80; worth 0.004).
        self.qk = nn.Parameter(torch.empty(L, 2 * D // pair_rows, pair_rows, D).uniform_(-bound, bound))
        self.v = nn.Parameter(torch.empty(L, D, D).uniform_(-bound, bound))
        self.o = nn.Parameter(torch.empty(L, D, D).uniform_(-bound, bound))  # not zero (record 64)
        self.up = nn.Parameter(torch.empty(L, config.mlp_width, D).uniform_(-bound, bound))
        self.down = nn.Parameter(torch.zeros(L, config.mlp_width, D))  # zero: no effect at first

        # Gates, which read the first 12 channels of a token, and scalars.
        self.value_gate = nn.Parameter(torch.zeros(E, heads, 12))
        self.output_gate = nn.Parameter(torch.zeros(len(config.gated_layers), heads, 12))
        self.exclusion = nn.Parameter(torch.zeros(len(config.exclusive_layers), heads))
        self.keep_before_attention = nn.Parameter(torch.full((L,), 1.1**0.5))
        self.keep_before_mlp = nn.Parameter(torch.full((L,), 1.1**0.5))
        self.scale_v = nn.Parameter(torch.full((L,), 0.5))
        self.scale_o = nn.Parameter(torch.ones(L))
        self.scale_down = nn.Parameter(torch.ones(L))
        self.share_ngram = nn.Parameter(torch.full((L,), 0.05))
        self.mix_in = nn.Parameter(torch.empty(256, D).uniform_(-2 * bound, 2 * bound))
        self.mix_out = nn.Parameter(torch.zeros(4, 256))
        self.mix_out.data[0] = 0.01  # the last layer wants the input in its values

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Ids of packed documents and positions in them, int64 (T,) -> logits (T, V)."""
        first_T = positions_T == 0  # nothing may leak in from the document before
        previous_T = torch.cat((tokens_T[:1], tokens_T[:-1]))
        before_T = torch.cat((previous_T[:1], previous_T[:-1]))
        frequencies = (1 / 1024) ** np.linspace(0, 1, self.config.head_dim // 4)  # radians a token
        frequencies = torch.tensor(frequencies, dtype=torch.float32)
        angles_T1K = torch.outer(positions_T, frequencies)[:, None]

        mask_short = visible(positions_T, self.config.window_short)
        mask_long = visible(positions_T, self.config.window_long)
        # Paired layers have two rows a token (see attention).
        rows_2T = torch.stack((2 * positions_T, 2 * positions_T + 1), 1).flatten()
        mask_paired = visible(rows_2T, 2 * self.config.window_short)

        x = x0 = norm(self.embed[tokens_T])

        # Bigrams: an embedding of each pair of neighbours, hashed into a table (record 62; worth 0.017). Most pairs
        # that share a row get different random signs and hardly disturb each other (record 83).
        row_T = ((36313 * tokens_T) ^ (27191 * previous_T)) % (self.config.bigram_rows - 1)
        sign_T = (tokens_T ^ previous_T) % len(self.bigram_signs)
        ngram = self.bigram_embed[row_T.masked_fill(first_T, self.config.bigram_rows - 1)]
        ngram = ngram * self.bigram_signs[sign_T.masked_fill(first_T, 0)]

        # Trigrams: the same with narrower rows, of C channels (worth 0.004).
        last = self.config.trigram_rows - 1
        row_T = ((36313 * tokens_T) ^ (27191 * previous_T) ^ (51787 * before_T)) % last
        sign_T = (tokens_T ^ (3 * previous_T) ^ (7 * before_T)) % len(self.bigram_signs)
        trigram = self.trigram_embed[row_T.masked_fill(positions_T < 2, last)]
        trigram = trigram * self.bigram_signs[sign_T.masked_fill(positions_T < 2, 0), :128]
        ngram = ngram + F.linear(trigram, self.trigram_proj)

        for layer in range(self.config.num_layers):
            # Before the last layer, each token weighs the input x0 and the residual stream x: once for
            # the values of attention, once for the stream (arXiv 2502.12170, record 81).
            mixed = torch.zeros_like(x)
            if layer == self.config.num_layers - 1:
                w = F.linear(F.gelu(F.linear(norm(x), self.mix_in)), self.mix_out).split(1, 1)
                mixed = w[0] * x0 + w[1] * x
                x = x + w[2] * x0 + w[3] * x

            if layer not in self.config.no_attention_layers:
                # Layers after shared_input_from reuse its attention input (record 77; worth 0.001).
                if layer <= self.config.shared_input_from:
                    attention_input = norm(x)
                mask = mask_long if layer in self.config.long_layers else mask_short
                mask = mask_paired if layer in self.config.paired_layers else mask
                y = self.attention(layer, attention_input, tokens_T, first_T, angles_T1K, mask, mixed)
                x = self.keep_before_attention[layer] * x + y

            # Every layer reads the n-grams again.
            x = x + self.share_ngram[layer] * ngram

            # The MLP, (T, D) -> (T, F) -> (T, D), with a squared ReLU.
            hidden_TF = F.linear(norm(x), self.up[layer]).relu().square()
            y = hidden_TF @ (self.down[layer] * self.scale_down[layer])
            x = self.keep_before_mlp[layer] * x + y

        # Softcap: logits stay between 0 and 23 (record 54; worth 0.002 against 15 tanh).
        return 23 * torch.sigmoid((F.linear(norm(x), self.embed) + 5) / 7.5)

    def attention(self, layer, a_TD, tokens_T, first_T, angles_T1K, mask_TT, mixed_TD) -> Tensor:
        """What attention adds in a layer, (T, D). Its input a_TD is normalised."""
        by_head = (len(a_TD), -1, self.config.head_dim)

        # A scalar multiplies a weight, which is 100 times smaller than an activation (record 47).
        v_THK = F.linear(a_TD, self.v[layer] * self.scale_v[layer]).view(by_head)
        q, k = F.linear(a_TD, self.qk[layer].flatten(0, 1)).chunk(2, -1)
        q_THK = rotate(norm(q.view(by_head)) * 0.12, angles_T1K)  # not 1 / sqrt(K): record 20
        k_THK = rotate(norm(k.view(by_head)), angles_T1K)

        # Key offset: half of each key is the previous token's, so that one layer can look for "what came after the
        # last X" (record 49, 50 of its steps; worth 0.008).
        if layer in self.config.key_offset_layers:
            own, shifted = k_THK.chunk(2, -1)
            previous = torch.cat((shifted[:1], shifted[:-1]))
            k_THK = torch.cat((own, torch.where(first_T[:, None, None], shifted, previous)), -1)

        # Value embeddings: what each token has to say in this layer (record 14; worth 0.016).
        if layer in self.config.value_embed_layers:
            index = self.config.value_embed_layers.index(layer)
            gate_TH = 2 * torch.sigmoid(F.linear(a_TD[:, :12], self.value_gate[index]))
            v_THK = v_THK + gate_TH[..., None] * self.value_embed[index][tokens_T].view(by_head)
        v_THK = v_THK + mixed_TD.view(by_head)

        # Paired layers: heads h and h + H / 2 share a softmax over the keys of both, as two rows of each token
        # (modded-nanogpt PR 191). Of a token's heads 0 1 2 3, reshape puts 0 1 into one row and 2 3 into
        # the next: heads 0 and 2 are then the rows of one head, 1 and 3 those of another.
        rows = mask_TT.size(0)
        by_row = (rows, -1, self.config.head_dim)
        q, k, v = (x.reshape(by_row).transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
        y = F.scaled_dot_product_attention(q, k, v, mask_TT, scale=1.0)[0]  # (H, T, K) or (H / 2, 2 T, K)
        y_THK = y.transpose(0, 1).reshape(by_head)

        # A head can take the token's own value, which the stream holds already, out of its output (PR 264).
        if layer in self.config.exclusive_layers:
            strength_H1 = torch.tanh(self.exclusion[self.config.exclusive_layers.index(layer)])[:, None]
            projection = (y_THK * v_THK).sum(-1, keepdim=True) / v_THK.square().sum(-1, keepdim=True)
            y_THK = y_THK - strength_H1 * projection * v_THK

        # A gate on what each head returns.
        if layer in self.config.gated_layers:
            index = self.config.gated_layers.index(layer)
            gate_TH = 2 * torch.sigmoid(F.linear(a_TD[:, :12], self.output_gate[index]))
            y_THK = y_THK * gate_TH[..., None]
        return F.linear(y_THK.flatten(1), self.o[layer] * self.scale_o[layer])


# ---- 3. LOSS: documents -> nats
def losses(model: Model, documents: list[np.ndarray], prefixes_V: Tensor) -> tuple[Tensor, ...]:
    """Nats (T,) of the next token, the second and third one and the prefix; 0 where there is none."""
    tokens_T = torch.tensor(np.concatenate([document[:-1] for document in documents]))
    positions_T = torch.cat([torch.arange(len(document) - 1) for document in documents])
    logits_TV = model(tokens_T, positions_T)
    # Targets: the next token and the two after it (record 53; worth 0.003), and the longest shorter token that the
    # next one begins with, as " the" for " them" is nearly right (record 88; worth 0.001).
    targets = []
    for ahead in (1, 2, 3):
        ids = [np.append(document, [-1, -1])[ahead : len(document) + ahead - 1] for document in documents]
        targets.append(torch.tensor(np.concatenate(ids)))
    targets.append(prefixes_V[targets[0]])
    return tuple(F.cross_entropy(logits_TV, t, ignore_index=-1, reduction="none") for t in targets)


# ---- 4. DATA: shards of tokens -> documents -> packs
class Dataset:  # a directory that data/pretrain.py made: a tokenizer, and shards of token ids
    def __init__(self, root: Path):
        if not (root / "dataset.json").is_file():
            raise SystemExit(f"no dataset at {root}; make one with data/pretrain.py")
        self.root = root

        # The bytes of each token. Special tokens follow the others.
        tokenizer = json.loads((root / "tokenizer.json").read_text())
        specials = sorted(tokenizer["special_tokens"], key=tokenizer["special_tokens"].get)
        ordinary = [base64.b64decode(token) for token in tokenizer["ranks"]]
        self.bos_id = tokenizer["special_tokens"]["<|bos|>"]
        self.bytes = ordinary + [name.encode() for name in specials]
        self.text_bytes = torch.tensor([len(token) for token in ordinary] + [0] * len(specials))

        # The prefix of a token: the longest other one that its bytes begin with, or -1.
        ids = {token: index for index, token in enumerate(ordinary)}
        prefixes = [-1] * len(self.bytes)
        for index, token in enumerate(ordinary):
            for length in range(1, len(token)):
                prefixes[index] = ids.get(token[:length], prefixes[index])
        self.prefixes = torch.tensor(prefixes)

        self.training = self.documents("train")
        self.rest = next(self.training)  # what pack() has not used of its document

    def documents(self, split: str):
        """Yields the ids of each document, which begins with a BOS, int64."""
        for path in sorted((self.root / "pretrain").glob(f"{split}_*.bin")):
            tokens = np.fromfile(path, "<u2", offset=1024)
            for document in np.split(tokens, np.flatnonzero(tokens == self.bos_id))[1:]:
                yield document.astype(int)

    def pack(self, config: Config) -> list[np.ndarray]:
        """The next documents, each with its last target. The rest of a long one comes next."""
        documents = []
        room = config.pack_tokens  # tokens that still fit
        while room and len(documents) < config.max_docs_per_pack:
            if self.rest is None:
                raise SystemExit(f"{self.root} has no more text; use fewer --steps or more text")
            length = min(len(self.rest), room, config.max_seq_len)
            documents.append(np.append(self.rest, self.bos_id)[: length + 1])  # the last target may be a BOS
            room -= length
            left = self.rest[length:]
            self.rest = np.insert(left, 0, self.bos_id) if len(left) else next(self.training, None)
        return documents

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.bytes[i] for i in ids).decode(errors="replace")


# ---- 5. OPTIMIZER: NorMuon for matrices, RMSProp for tables, else Adam.
@dataclass(frozen=True)
class UpdateRule:  # of Adam; without the first moment it is RMSProp
    lr_mult: float  # times 0.006
    betas: tuple
    weight_decay: float = 0.0


RULES = {
    "embed": UpdateRule(1.0, (0.50, 0.95), 0.006),
    "bigram_embed": UpdateRule(60.0, (0.0, 0.95), 0.015),
    "trigram_embed": UpdateRule(60.0, (0.0, 0.95), 0.015),
    "trigram_proj": UpdateRule(1.0, (0.90, 0.99)),
    "value_embed": UpdateRule(60.0, (0.0, 0.95), 0.015),
    "value_gate": UpdateRule(1.0, (0.90, 0.99)),
    "output_gate": UpdateRule(1.0, (0.90, 0.99)),
    "exclusion": UpdateRule(1.0, (0.90, 0.99)),
    "mix_in": UpdateRule(0.25, (0.90, 0.99)),
    "mix_out": UpdateRule(0.025, (0.90, 0.99)),
}
MUON_LR_MULT = {"qk": 1, "v": 1, "o": 1, "up": 1, "down": 2}  # records 36, 48
POLAR_EXPRESS = (  # polynomials for four rounds, after arXiv 2505.16932
    (7.871436, -20.937255, 14.627350),
    (3.781651, -2.618773, 0.476315),
    (3.149197, -2.269902, 0.453804),
    (2.216045, -1.591900, 0.410524),
)


def polar_express(x: Tensor) -> Tensor:
    """Sets singular values of (..., R, C) to 0.9-1.1; those below 0.7 % of the norm stay smaller."""
    if x.size(-2) > x.size(-1):
        return polar_express(x.mT).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


@torch.no_grad()
def update_parameters(model: Model, state: defaultdict, step: int) -> None:
    """One step of the optimizer. The state by (name, kind) starts at 0; steps count from 0."""
    config = model.config
    schedule = lr_multiplier(config, step)
    for name, param in model.named_parameters():
        grad = param.grad
        if name in MUON_LR_MULT:
            # NorMuon (arXiv 2510.05491): Nesterov's momentum, then equal singular values.
            beta = muon_momentum(config, step)
            mean = beta * state[name, "mean"] + (1 - beta) * grad
            update = polar_express(beta * mean + (1 - beta) * grad)

            # Divide each row of a tall matrix, or column of a wide one, by its usual size, and keep the
            # norm of the matrix (worth 0.006).
            matrix_norm = update.norm(dim=(-2, -1), keepdim=True)
            shorter = -2 if param.size(-2) < param.size(-1) else -1
            square = 0.9 * state[name, "square"] + 0.1 * update.square().mean(shorter, keepdim=True)
            update = update * square.clamp_min(1e-10).rsqrt()
            update = update * matrix_norm / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10)
            lr = 0.023 * MUON_LR_MULT[name] * max(1, param.size(-2) / param.size(-1)) ** 0.5
            decay = 0.0276 * (update * param >= 0)
        else:
            rule = RULES.get(name, UpdateRule(5.0, (0.90, 0.99)))  # or a scalar
            beta1, beta2 = rule.betas
            mean = beta1 * state[name, "mean"] + (1 - beta1) * grad
            new = grad.square() if beta1 else grad.square().mean(-1, True)  # RMSProp: by row
            square = beta2 * state[name, "square"] + (1 - beta2) * new
            rms = (square / (1 - beta2 ** (step + 1))).sqrt() + 1e-10  # 1e-8: +0.0014 nats (record 20)
            update = mean / (1 - beta1 ** (step + 1)) / rms
            lr = 0.006 * rule.lr_mult
            decay = rule.weight_decay * (update * param > 0)  # no gradient: no decay

        # Cautious decay: none where the update makes a weight larger (arXiv 2510.12402). The schedule
        # counts twice: rate and decay both fall.
        param -= lr * schedule * (update + schedule * decay * param)
        state[name, "mean"] = mean
        state[name, "square"] = square


# ---- 6. SCHEDULE: functions of the step
def stage_index(config: Config, step: int) -> int:
    shares = np.cumsum([stage.fraction for stage in config.stages])
    return int((step / config.steps >= shares[:-1] - 1e-9).sum())  # how many stages are over


def lr_multiplier(config: Config, step: int) -> float:
    """The stage's factor; over the last 60 % of the run a straight line down to 0.2."""
    fall = max(0.0, (step / config.steps - 0.4) / 0.6)
    return config.stages[stage_index(config, step)].lr_mult * (1 - fall) + 0.2 * fall


def muon_momentum(config: Config, step: int) -> float:
    """Rises over the first steps and falls over the last ones."""
    rise = step / max(1, min(300, config.steps // 3))
    fall = (config.steps - step) / max(1, min(50, config.steps // 10))
    return 0.85 + (0.95 - 0.85) * min(1.0, rise, fall)


# ---- 7. LOOP: training, validation, samples
def train_step(model: Model, state: defaultdict, dataset: Dataset, step: int) -> float:
    """One update from some packs. Returns the mean nats of their targets before it."""
    config = model.config
    stage = config.stages[stage_index(config, step)]
    packs = [dataset.pack(config) for _ in range(stage.packs)]
    count = sum(len(document) - 1 for pack in packs for document in pack)
    # Targets two and three ahead fade until 65 % of the run, prefixes from 1/3 to 2/3 of it.
    ahead_weight = max(0.0, 1 - step / (0.65 * config.steps))
    prefix_weight = 0.25 * min(1.0, max(0.0, 2 - 3 * step / config.steps))
    total = 0.0
    for pack in packs:  # one at a time to save memory; gradients add up
        nats_T, second_T, third_T, prefix_T = losses(model, pack, dataset.prefixes)
        loss = nats_T.sum() + prefix_weight * prefix_T.sum()
        loss = loss + ahead_weight * (0.5 * second_T.sum() + 0.25 * third_T.sum())
        (loss / count).backward()
        total += nats_T.sum().item()
    update_parameters(model, state, step)
    model.zero_grad()
    return total / count


@torch.no_grad()
def bits_per_byte(model: Model, dataset: Dataset) -> float:
    """Over validation documents, one by one. Special tokens do not count."""
    nats = 0.0
    text_bytes = 0
    for document in dataset.documents("val"):
        document = document[: model.config.max_seq_len]
        if len(document) > 1:
            nats_T, *_ = losses(model, [document], dataset.prefixes)
            bytes_T = dataset.text_bytes[document[1:]]
            nats += nats_T[bytes_T > 0].sum().item()
            text_bytes += bytes_T.sum().item()
    return nats / math.log(2) / text_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="train_small.py in plain PyTorch")
    parser.add_argument("--data", type=Path, default="data/shards/stdlib", help="dataset directory")
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--steps", type=int, help="length of the run; all schedules follow")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # tensor cores of a GPU
    dataset = Dataset(args.data)
    config = TINY if args.size == "tiny" else Config()
    vocab_size = math.ceil(len(dataset.bytes) / 64) * 64
    config = replace(config, vocab_size=vocab_size, steps=args.steps or config.steps)
    model = Model(config)
    state = defaultdict(float)

    start = time.perf_counter()
    for step in range(config.steps):
        loss = train_step(model, state, dataset, step)
        print(f"step {step + 1} | loss {loss:.4f} | {time.perf_counter() - start:.1f} s")
    print(f"validation: {bits_per_byte(model, dataset):.4f} bits per byte")

    # The model continues three validation documents. It reads everything again for each token: slow but short.
    for _, document in zip(range(3), dataset.documents("val"), strict=False):
        ids = document[:24].tolist()
        for _ in range(24):
            logits_TV = model(torch.tensor(ids), torch.arange(len(ids)))
            ids.append(int(logits_TV[-1, : len(dataset.bytes)].argmax()))
        print(f"--- {dataset.decode(ids[1:-24])!r} ... {dataset.decode(ids[-24:])!r}")


if __name__ == "__main__":
    main()
