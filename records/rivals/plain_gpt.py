"""A plain GPT-2 with AdamW on one device: the floor that every recipe must beat. SETTINGS come from rivals.py.

Pre-norm blocks, learned positions, GELU, a head tied to the embedding; warm-up and a cosine to a tenth; gradients
clipped at 1. bf16 on a GPU, fp32 on a CPU; compiled before the clock starts. It reads rows of `max_seq_len` tokens as
train_small.py reads them, without a mask between documents.
"""

import json
import math
import os
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from rival_text import Text
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocab_size: int, layers: int, width: int, heads: int, max_seq_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

        # As GPT-2: sd 0.02, and less for what is added to the residual stream.
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                small = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if small else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target, 0 where it is -1; (rows, length) all three."""
        x = self.embed(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight).float()
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
        return nats.view_as(targets)


def rate_at(step: int, steps: int, warmup: int) -> float:
    """Factor on the rate: linear up, then a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))


def decay_groups(model: nn.Module) -> list[dict]:
    """Weight decay for matrices, none for biases and norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def train(text: Text, settings: dict, say=print) -> dict:
    """Trains and validates. Returns: the result"""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings["seed"])
    torch.set_float32_matmul_precision("high")
    shape = {name: settings[name] for name in ("layers", "width", "heads", "max_seq_len")}
    model = PlainGPT(text.vocab_size, **shape).to(device)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=settings["lr"], betas=(0.9, 0.95), fused=True)
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}")

    run = torch.compile(model) if settings["compile"] else model
    rows = settings["rows"]
    accumulation = settings["batch"] // (rows * settings["max_seq_len"])
    steps = settings["steps"]

    def nats(inputs, targets) -> Tensor:
        arrays = (torch.from_numpy(array).to(device, non_blocking=True) for array in (inputs, targets))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return run(*arrays)

    def validate(batches) -> float:
        model.eval()
        with torch.no_grad():
            total = sum(nats(*batch).double().sum().item() for batch in batches)
        model.train()
        return total

    # Everything is compiled before the clock starts.
    held_out = text.validation_batches(rows)
    batches = text.training_batches(rows, settings["max_seq_len"])
    nats(*next(batches)).mean().backward()
    optimizer.zero_grad(set_to_none=True)
    validate(held_out[:1])
    batches = text.training_batches(rows, settings["max_seq_len"])

    start = clock(device)
    for step in range(steps):
        loss = train_step(step, steps, settings["warmup"], accumulation, batches, nats, model, optimizer)
        if (step + 1) % 50 == 0 or step + 1 == steps:
            say(f"step {step + 1}/{steps} loss {loss.item():.4f} seconds {clock(device) - start:.2f}", flush=True)
    seconds = clock(device) - start

    total = validate(held_out)
    result = {"bpb": text.bpb(total), "nats": total, "seconds": seconds, "steps": steps}
    result |= {"tokens": steps * settings["batch"]}
    return result | {"gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None}


def train_step(step, steps, warmup, accumulation, batches: Iterator, nats, model, optimizer) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("base", group["lr"]) * rate_at(step, steps, warmup)
    for _ in range(accumulation):
        loss = nats(*next(batches)).mean() / accumulation
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach() * accumulation


def clock(device: torch.device) -> float:
    """Seconds, after all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    SETTINGS = json.loads(os.environ["RIVAL_SETTINGS"])
    TEXT = Text(SETTINGS["data"], SETTINGS["max_seq_len"], SETTINGS["limit"])
    print("RESULT " + json.dumps(train(TEXT, SETTINGS)), flush=True)
