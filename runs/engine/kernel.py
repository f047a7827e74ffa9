"""One decoding step of all slots, and its attention kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache import KVCache

try:  # without Triton (CPUs, Macs, Windows) the plain path runs
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
jit = triton.jit if triton else (lambda function: function)


def decode(
    model, cache: KVCache, tokens_B: Tensor, prev_ids_2B: Tensor, positions_B: Tensor, layer_weights=None
) -> Tensor:
    """Appends one token to each slot of the cache.

    Args:    tokens_B int (B,), the ids; prev_ids_2B the id before each, and the one before that; positions_B int (B,),
             -1 for idle slots, of which nothing changes; layer_weights as of prefill
    Returns: logits fp32 (B, V and the padding of the vocabulary), which mean nothing for idle slots
    """

    def attend(layer, q, k, v):  # (B, H, K) -> (B, H, K)
        ring = (cache.keys[layer], cache.values[layer])
        if layer in model.config.paired_layers:
            outputs = []
            for i, heads in enumerate(zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True)):
                rows_B = torch.where(positions_B < 0, positions_B, 2 * positions_B + i)
                outputs.append(decode_attention(*heads, *ring, rows_B, False))
            return torch.cat(outputs, 1)
        return decode_attention(q, k, v, *ring, positions_B, layer in model.config.key_offset_layers)

    hidden = model.trunk(tokens_B, prev_ids_2B, positions_B.clamp(min=0), attend, layer_weights)
    return model.logits(hidden)


# ==== Attention kernel
# Each slot writes a key and a value into its ring, as KVCache says, and one query looks at that ring. Slots at position
# -1 are idle: nothing of them is written.


def use_triton(x: Tensor) -> bool:
    """Kernels run on CUDA tensors (.., K) of 16 bits, from Ampere on, K a power of two; else the plain path does."""
    can_run = triton is not None and x.is_cuda and x.itemsize <= 2 and x.size(-1).bit_count() == 1
    return can_run and torch.cuda.get_device_capability(x.device) >= (8, 0)


def decode_attention_ref(q, k, v, keys, values, positions, offset: bool) -> Tensor:
    """Writes a key and a value into each ring, and returns what the query finds there.

    Args:    q, k, v (B, H, K), q carries the scale; keys, values (B or more, S, H, K), written in place;
             positions int (B,), -1 for idle slots; offset: whether the layer has a key offset
    Returns: (B, H, K)
    """
    keys = keys[: len(q)]  # without the prefix slots
    values = values[: len(q)]
    ring_size = keys.size(1)
    width = keys.size(3)
    slot = torch.arange(len(q), device=q.device)
    running = (positions >= 0)[:, None, None]
    position = positions.clamp(min=0).long()
    cell = position % ring_size

    if offset:
        second_half = torch.arange(width, device=q.device) >= width // 2
        from_prev = second_half & (position > 0)[:, None, None]
        next_cell = (position + 1) % ring_size
        keys[slot, next_cell] = torch.where(running & second_half, k, keys[slot, next_cell])
        k = torch.where(from_prev, keys[slot, cell], k)
    keys[slot, cell] = torch.where(running, k, keys[slot, cell])
    values[slot, cell] = torch.where(running, v, values[slot, cell])

    # How far behind the newest key each cell is; the oldest one is the free cell.
    behind = (position[:, None] - torch.arange(ring_size, device=q.device)) % ring_size
    seen = (behind <= position[:, None]) & (behind < ring_size - 1)
    heads = (q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2))
    y = F.scaled_dot_product_attention(*heads, seen[:, None, None], scale=1.0)
    return y[:, :, 0]


@jit
def decode_attention_kernel(
    q, k, v, o, keys, values, positions, S, H, stride_q, stride_k, stride_v,
    OFFSET: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One slot and one head of WIDTH a program. The new key and value are not read back."""
    slot = tl.program_id(0)
    h = tl.program_id(1)
    d = tl.arange(0, WIDTH)
    p = tl.load(positions + slot).to(tl.int32)
    cell = tl.maximum(p, 0) % S
    stride = H * WIDTH  # from cell to cell
    running = d < tl.where(p >= 0, WIDTH, 0)  # all or none: whether the slot runs
    keys += (slot.to(tl.int64) * S * H + h) * WIDTH
    values += (slot.to(tl.int64) * S * H + h) * WIDTH

    # The new key and value; exp2 below needs the query times log2(e).
    Q = tl.load(q + slot * stride_q + h * WIDTH + d).to(tl.float32) * 1.4426950408889634
    K = tl.load(k + slot * stride_k + h * WIDTH + d)
    V = tl.load(v + slot * stride_v + h * WIDTH + d)
    if OFFSET:
        second_half = d >= WIDTH // 2
        tl.store(keys + (cell + 1) % S * stride + d, K, mask=running & second_half)
        from_prev = second_half & (d < p * WIDTH)  # p > 0 as a mask: the first token has none before it
        K = tl.where(from_prev, tl.load(keys + cell * stride + d, mask=from_prev, other=0.0), K)
    tl.store(keys + cell * stride + d, K, mask=running)
    tl.store(values + cell * stride + d, V, mask=running)

    # Online softmax over the ring, starting with the new key.
    top = tl.sum(Q * K.to(tl.float32), 0)
    total = 1.0
    acc = V.to(tl.float32)
    for n0 in range(0, tl.minimum(p + 1, S), BN):
        n = n0 + tl.arange(0, BN)
        behind = cell - n + tl.where(n > cell, S, 0)
        seen = (n < S) & (behind > 0) & (behind <= p) & (behind < S - 1)
        at = n[:, None] * stride + d[None, :]
        k_block = tl.load(keys + at, mask=seen[:, None], other=0.0).to(tl.float32)
        v_block = tl.load(values + at, mask=seen[:, None], other=0.0).to(tl.float32)
        s = tl.where(seen, tl.sum(k_block * Q[None, :], 1), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        e = tl.exp2(s - new_top)
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(e, 0)
        acc = acc * shrink + tl.sum(e[:, None] * v_block, 0)
    tl.store(o + slot * stride + h * WIDTH + d, (acc / total).to(o.dtype.element_ty))


DECODE_TILES = dict(BN=128, num_warps=8)


def adjacent_heads(x: Tensor) -> Tensor:
    """x (B, H, K) with the heads of a slot next to each other in memory."""
    return x if x.stride()[1:] == (x.size(2), 1) else x.contiguous()


@torch.library.custom_op("decoderstack_engine::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, offset: bool
) -> Tensor:
    """As decode_attention_ref, by the kernel where it runs."""
    B, H, width = q.shape
    if not use_triton(q):
        return decode_attention_ref(q, k, v, keys, values, positions, offset)
    q, k, v = (adjacent_heads(t) for t in (q, k, v))
    o = q.new_empty(B, H, width)
    decode_attention_kernel[(B, H)](
        q, k, v, o, keys, values, positions, keys.size(1), H, q.stride(0), k.stride(0), v.stride(0),
        OFFSET=offset, WIDTH=width, **DECODE_TILES,
    )  # fmt: skip
    return o


@decode_attention.register_fake
def _(q, k, v, keys, values, positions, offset):
    return q.new_empty(q.shape)
