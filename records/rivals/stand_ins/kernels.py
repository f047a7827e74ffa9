"""Stand-in for the Hugging Face hub's `kernels`, whose FlashAttention 3 both rivals load: the same two functions, by
torch's varlen attention (FlashAttention 2)."""

from types import SimpleNamespace

import torch
from torch.nn.attention import varlen


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size
):
    """Packed documents, (T, H, K); causal always."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return varlen.varlen_attn(q, k, v, *lengths, scale=softmax_scale, window_size=(window_size[0], 0))


def flash_attn_func(q, k, v, causal=True, window_size=(-1, -1)):
    """Rows of equal length, (B, T, H, K)."""
    rows, length, *heads = q.shape
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
    window = window_size[0] if window_size[0] < length else -1
    packed = [q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)]
    out = flash_attn_varlen_func(*packed, bounds, bounds, length, length, causal, None, (window, 0))
    return out.view(rows, length, *heads)


def has_kernel(*_, **__) -> bool:
    return True


def get_kernel(*_, **__) -> SimpleNamespace:
    both = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_func=flash_attn_func)
    return SimpleNamespace(flash_attn_interface=both)
