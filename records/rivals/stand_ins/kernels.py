"""Stand-in for the Hugging Face hub's `kernels`, whose FlashAttention 3 both rivals load: the same two functions.

RIVAL_SETTINGS["attention"] says what computes them: "torch" (torch's varlen attention, FlashAttention 2) or "fa4"
(flash-attn-4 of PyPI).
"""

import json
import os
from types import SimpleNamespace

import torch
from torch import Tensor

SETTINGS = json.loads(os.environ["RIVAL_SETTINGS"])


def load_torch():
    from torch.nn.attention.varlen import varlen_attn

    def attend(q, k, v, bounds, longest, scale, window):
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(window, 0))

    return attend


def load_fa4():
    """flash-attn-4 as one operator, since its own autograd.Function cannot be compiled with fullgraph=True."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def options(bounds, longest, scale, window):
        left = window if window >= 0 else None
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lengths | {"softmax_scale": scale, "causal": True, "window_size_left": left}

    @torch.library.custom_op("rivals::fa4", mutates_args=())
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int
    ) -> tuple[Tensor, Tensor]:
        return _flash_attn_fwd(q, k, v, return_lse=True, **options(bounds, longest, scale, window))[:2]

    @forward.register_fake
    def _(q, k, v, bounds, longest, scale, window):
        return torch.empty_like(q), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)

    @torch.library.custom_op("rivals::fa4_grad", mutates_args=())
    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Tensor,
        longest: int,
        scale: float,
        window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _flash_attn_bwd(q, k, v, out, grad, lse, **options(bounds, longest, scale, window))[:3]

    @backward.register_fake
    def _(grad, q, k, v, *rest):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def keep(ctx, inputs, output):
        *tensors, longest, scale, window = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.numbers = (longest, scale, window)

    def grads(ctx, grad, _):
        q, k, v, bounds, out, lse = ctx.saved_tensors
        found = backward(grad.contiguous(), q, k, v, out, lse, bounds, *ctx.numbers)
        return *found, None, None, None, None

    forward.register_autograd(grads, setup_context=keep)

    def attend(q, k, v, bounds, longest, scale, window):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return forward(q, k, v, bounds, longest, scale or q.size(-1) ** -0.5, window)[0]

    return attend


attend = {"torch": load_torch, "fa4": load_fa4}[SETTINGS["attention"]]()


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size
):
    """Packed documents, (T, H, K); causal always."""
    return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size[0])


def flash_attn_func(q, k, v, causal=True, window_size=(-1, -1)):
    """Rows of equal length, (B, T, H, K)."""
    rows, length, *heads = q.shape
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
    window = window_size[0] if window_size[0] < length else -1
    out = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bounds, length, None, window)
    return out.view(rows, length, *heads)


def has_kernel(*_, **__) -> bool:
    return True


def get_kernel(*_, **__) -> SimpleNamespace:
    both = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_func=flash_attn_func)
    return SimpleNamespace(flash_attn_interface=both)
