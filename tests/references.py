"""What kernels compute, in plain PyTorch."""

import torch
import torch.nn.functional as F


def linear_relu2(a, b, post=None, factor=1.0):
    """relu(a b^T)^2 factor, or with post 2 (a b^T) sqrt(post) factor, in the dtype of a; the same transposed."""
    product = a.double() @ b.double().T
    if post is None:
        y = F.relu(product).square() * factor
    else:
        y = 2 * product * post.double().sqrt() * factor
    most = torch.finfo(a.dtype).max  # torch rounds to NaN what is too large, Triton to the largest number
    y = y.clamp(-most, most).to(a.dtype)
    return y, y.T.contiguous()


def window_attention(q, k, v, bounds):
    """q, k, v (T, H, K) -> (T, H, K) with dense scores (H, T, T)."""
    t = torch.arange(len(q), device=q.device)
    seen = (t >= bounds[0, :, None]) & (t <= t[:, None])
    scores = torch.einsum("ihd,jhd->hij", q, k).masked_fill(~seen, float("-inf"))
    p = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.einsum("hij,jhd->ihd", p.to(v.dtype), v)


def fp8_on_cpu(monkeypatch, script) -> None:
    """The fp8 path of a script on a CPU: its own casts, scales and products, plain code in place of its kernels."""
    plain_ce = script.softcap_ce_cpu

    def softcap_ce_8(logits, *arguments):
        losses, nats, gradient = plain_ce(logits, *arguments)
        if logits.dtype == torch.bfloat16 and gradient is not None:  # models on CPUs are in fp32
            gradient = gradient.to(torch.float8_e5m2)
        return losses, nats, gradient

    monkeypatch.setattr(script, "fits_fp8", lambda x, *sizes: True)
    monkeypatch.setattr(script, "linear_relu2", linear_relu2)
    monkeypatch.setattr(script, "transpose8", lambda x: x.mT.contiguous())
    monkeypatch.setattr(script, "softcap_ce_cpu", softcap_ce_8)
