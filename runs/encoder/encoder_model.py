"""The encoder, its optimizer and its run directories.

Letters in shape comments: T packed tokens, M masked tokens, D width, H heads, K head width, N texts.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from encoder_config import Config
from lib.checkpoint import describe_run, newest_checkpoint
from lib.command import RunError
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
import train_small as script

NORM_EPS = 1e-6
CE_ROWS = 8192  # rows of logits that exist at the same time

# ---- model


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

        weight = lambda *shape: nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
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

        Args: positions_T in the document; cu_seqlens int32 document boundaries, padded with T;
              max_doc maximum length of a document
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

            # Two products: one for both would first copy their gradients side by side.
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
        inputs = (hidden_TD[picked_M], self.embed, targets_T[picked_M][None])
        total, nats_M = script.linear_cross_entropy(*inputs, cap=(), chunk=CE_ROWS)
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


def sdpa_attention(positions_T, cu_seqlens, max_doc: int) -> Callable:
    """Plain torch, on any device: blocks as long as the longest document see their neighbours."""
    T = positions_T.numel()
    block = min(max_doc, T)
    padding = -T % block
    starts = torch.arange(T, device=positions_T.device) - positions_T  # where a document begins
    queries = F.pad(starts, (0, padding), value=-1).view(-1, block)
    keys = F.pad(starts, (block, block + padding), value=-1).unfold(0, 3 * block, block)
    mask = (queries[:, :, None] == keys[:, None, :])[:, None]

    def attend(q, k, v):
        q = F.pad(q, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, block)).transpose(1, 2)
        k, v = (F.pad(x, (0, 0, 0, 0, block, block + padding)) for x in (k, v))
        k, v = (x.unfold(0, 3 * block, block).transpose(2, 3) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return y.transpose(1, 2).flatten(0, 1)[:T]

    return attend


def varlen_attention(positions_T, cu_seqlens, max_doc: int) -> Callable:
    """FlashAttention 2 inside torch (Ampere or newer, 16 bits)."""
    from torch.nn.attention.varlen import varlen_attn

    sizes = (cu_seqlens, cu_seqlens, max_doc, max_doc)
    return lambda q, k, v: varlen_attn(q, k, v, *sizes, window_size=(-1, -1))


# ---- run


def parameter_table(config: Config) -> dict:
    """NorMuon for matrices, Adam for the embedding, with the decays of train_small.py."""
    head_pair = min(2, config.num_heads) * config.head_dim
    return {
        "qk_bank": script.UpdateRule("normuon", 1.0, weight_decay=0.0276, rows=head_pair),
        "vo_bank": script.UpdateRule("normuon", 1.0, weight_decay=0.0276),
        "mlp_bank": script.UpdateRule("normuon", 1.0, weight_decay=0.0276),
        "embed": script.UpdateRule("adam", 1.0, (0.9, 0.95), 0.006),
    }


def micro_batch_limit(config: Config, device: torch.device) -> int:
    """Tokens of a micro-batch."""
    return config.micro_batch_tokens or (65536 if device.type == "cuda" else 8192)


def build_state(config: Config, ranks, say: Callable = print):
    """Model and optimizer with the weights of config.seed."""
    dtype = script.choose_dtype(config, ranks.device)
    if dtype == torch.float16:
        dtype = torch.float32  # GPUs without bf16 need no loss scale then
    model = Encoder(config, ranks.device, dtype)
    if dtype == torch.bfloat16 and ranks.device.type == "cuda":
        model.attention = varlen_attention
    model.init_weights(config.seed)
    forward = model
    if config.compile and ranks.device.type == "cuda":
        forward = torch.compile(model, dynamic=False)
    optimizer = script.Optimizer(model, config, ranks, parameter_table(config))
    limit = micro_batch_limit(config, ranks.device)
    packs = script.choose_packs(dataclasses.replace(config, micro_batch_tokens=limit), ranks)
    return script.TrainState(config, ranks, model, forward, optimizer, packs)


def read_run(run_dir: Path, command: str = "") -> tuple[Config, dict]:
    """Config and config.json of an encoder run, or of one to resume. Raises: RunError"""
    description = describe_run(script, run_dir, command) if command else script.read_description(run_dir)
    if not description["command"].endswith("_encoder"):
        raise RunError(f"{run_dir} is not an encoder run; pass one that is")
    return Config(**description["config"]), description


def load_encoder(run_dir: Path) -> tuple[Encoder, dict, int]:
    """The newest model of a run in fp32 on the CPU, its config.json and its step."""
    config, description = read_run(run_dir)
    folder = newest_checkpoint(script, run_dir, ("model.safetensors",))
    model = Encoder(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), description, int(folder.name[5:])


def max_text_len(description: dict) -> int:
    """The maximum number of tokens of a text that a run embeds, from its config.json."""
    if description["command"] == "finetune_encoder":
        return description["finetune_encoder"]["max_len"]
    return description["config"]["max_seq_len"]
