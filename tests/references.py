"""What kernels and models compute, in plain PyTorch."""

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


def linear_cross_entropy(x, w, targets, cap, target_weights=None, token_weight=None, **_):
    """The formula term by term, in the dtype of x: the weighted sum, and nats of the first target."""
    z = x @ w.T
    if cap:
        z = cap[0] * torch.sigmoid((z + cap[1]) / cap[2])
    nats = [F.cross_entropy(z, row.long(), ignore_index=-1, reduction="none") for row in targets]
    loss = sum(weight * row for weight, row in zip(target_weights, nats, strict=True))
    return (loss * (1 if token_weight is None else token_weight)).sum(), nats[0].detach()


def product8(a, b, scale, dtype, fast=False):
    """a b^T scale of fp8 operands, (M, N) in dtype. In float64 the sums are exact, so that all CPUs agree."""
    return (a.double() @ b.double().T * scale).to(dtype)


def window_attention(q, k, v, bounds):
    """q, k, v (T, H, K) -> (T, H, K) with dense scores (H, T, T)."""
    t = torch.arange(len(q), device=q.device)
    seen = (t >= bounds[0, :, None]) & (t <= t[:, None])
    scores = torch.einsum("ihd,jhd->hij", q, k).masked_fill(~seen, float("-inf"))
    p = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.einsum("hij,jhd->ihd", p.to(v.dtype), v)


def own_logits(run, ids: list[int]) -> torch.Tensor:
    """Logits (T, V) of a run's model behind each id of a text."""
    count = len(ids)
    borders = torch.tensor([0, count], dtype=torch.int32)
    with torch.no_grad():
        logits = run.model(torch.tensor(ids).int(), None, torch.arange(count), borders, count)
    return logits[:, : run.tokenizer.vocab_size]


def fp8_on_cpu(monkeypatch, script) -> None:
    """The fp8 path of a script on a CPU: its own casts and scales, plain code in place of its kernels and products."""
    plain_ce = script.softcap_ce_ref

    def softcap_ce_8(logits, *arguments):
        losses, nats, gradient = plain_ce(logits, *arguments)
        if logits.dtype == torch.bfloat16 and gradient is not None:  # models on CPUs are in fp32
            gradient = gradient.to(torch.float8_e5m2)
        return losses, nats, gradient

    monkeypatch.setattr(script, "has_fp8_products", lambda x: True)
    monkeypatch.setattr(script, "product8", product8)
    monkeypatch.setattr(script, "linear_relu2", linear_relu2)
    monkeypatch.setattr(script, "transpose8", lambda x: x.mT.contiguous())
    monkeypatch.setattr(script, "softcap_ce_ref", softcap_ce_8)
