"""What the changed copy of modded-nanogpt's train_gpt.py calls in place of its own code.

The copy imports this file as `rival` (rivals.py says where) and calls change() once, after its classes and stages are
defined and before anything is built from them, and report() after validation. SETTINGS come from rivals.py.
"""

import itertools
import json
import os
from types import SimpleNamespace

import numpy as np
import torch
from rival_text import Text

SETTINGS = json.loads(os.environ["RIVAL_SETTINGS"])
VALIDATION_PACK = 262144  # tokens of one forward pass in validation, as in the original
DEVICE = "cuda"
SEGMENTS = {8192: 64, 16384: 64, 24576: 96, 32768: 96, 49152: 128}  # most in a pack; from 16,384 as in the original

text = Text(SETTINGS["data"], limit=SETTINGS["limit"])
vocab_size = text.vocab_size
assert vocab_size == 32768, f"the loss kernel of the copy is made for 32,768 entries, {text.folder} has {vocab_size}"

# Its batches are eight micro-batches. Smaller batches are fewer micro-batches, and below one a smaller one.
grad_accum_steps = max(8 // SETTINGS["divide"], 1)
validation = text.validation_packs(VALIDATION_PACK, multiple=grad_accum_steps)


def get_encoding(name: str) -> SimpleNamespace:
    """In place of tiktoken's: its table of prefixes needs the bytes of each token alone."""
    return SimpleNamespace(_mergeable_ranks=text.ranks)


def trained_tokens(scheduled: int, extension: int, batches: list[int]) -> int:
    """Tokens of a run: the three stages share the scheduled steps, the extension goes on with the last batch."""
    bounds = [round(scheduled * third / 3) for third in range(4)]
    steps = [end - start for start, end in itertools.pairwise(bounds)]
    return sum(count * batch for count, batch in zip(steps, batches, strict=False)) + extension * batches[-1]


def choose_steps(tokens: int, batches: list[int]) -> tuple[int, int]:
    """(scheduled, extension) steps that train nearest to `tokens`, in the original's proportion of 1,270 to 15."""
    most = tokens * 3 // sum(batches[:3]) + 2  # without an extension, whose batches are larger than the mean
    choices = []
    for steps in range(max(most * 9 // 10 - 10, 4), most + 1):
        extension = max(round(steps * 15 / 1285), 1)
        choices.append((steps - extension, extension))
    return min(choices, key=lambda choice: abs(trained_tokens(*choice, batches) - tokens))


def change(names: dict) -> None:
    """Seed, length, batches, rates, data and fp8; `names` are the copy's globals."""
    torch.manual_seed(SETTINGS["seed"])
    np.random.seed(SETTINGS["seed"])

    stages = names["TRAINING_STAGES"]
    for stage in stages:
        stage.batch_size //= SETTINGS["divide"]
    batches = [stage.batch_size for stage in stages]

    args = names["args"]
    args.num_scheduled_iterations, args.num_extension_iterations = choose_steps(SETTINGS["tokens"], batches)
    SETTINGS["trained_tokens"] = trained_tokens(args.num_scheduled_iterations, args.num_extension_iterations, batches)
    args.val_loss_every = SETTINGS["val_every"]
    SETTINGS["steps"] = args.num_scheduled_iterations + args.num_extension_iterations
    args.val_batch_size = VALIDATION_PACK * grad_accum_steps
    args.val_tokens = VALIDATION_PACK * len(validation)

    schedule = names["TrainingSchedule"]
    rate = schedule.get_lr
    schedule.get_lr = lambda self, step: rate(self, step) * SETTINGS["lr"]

    names["distributed_data_generator"] = lambda *given, **more: generator(names["get_bigram_hash"], *given, **more)
    if SETTINGS["mlp"] == "bf16":
        names["GPT"].quantize_mlp_fp8 = lambda self, bootstrap_down=False: None  # fp8 copies that nothing reads


def generator(hash_bigrams, pattern, num_tokens, max_seq_len, grad_accum_steps=1, align_to_bos=True):
    """In place of its loader, with the same interface; align_to_bos is False for validation alone."""
    held_out = itertools.cycle(validation)  # warm-up reads on; validation stops by itself
    offset = 0
    while True:
        size = num_tokens // grad_accum_steps
        if align_to_bos:
            inputs, targets, ends, offset = text.pack(offset, size, max_seq_len)
            most = SEGMENTS[size]
        else:
            inputs, targets, ends = next(held_out)
            targets = np.where(targets < 0, -100, targets)  # cross_entropy's index for what does not count
            most = 1024
        bounds = np.full(most, size, np.int32)
        bounds[0] = 0
        bounds[1 : len(ends) + 1] = ends

        bigrams = hash_bigrams(torch.from_numpy(inputs.astype(np.int32)))
        arrays = (inputs.astype(np.int32), targets, bounds)
        on_device = [torch.from_numpy(array).to(DEVICE, non_blocking=True) for array in arrays]
        changed = yield *on_device, bigrams.to(DEVICE, non_blocking=True), bigrams.numpy()
        if changed:
            num_tokens, max_seq_len, grad_accum_steps = changed


def report(mean_loss: torch.Tensor, milliseconds: float, steps: int) -> None:
    """mean_loss: nats of the scored targets divided by all positions of the validation packs, padding included."""
    nats = mean_loss.item() * VALIDATION_PACK * len(validation)
    result = {"bpb": text.bpb(nats), "nats": nats, "seconds": milliseconds / 1000, "steps": steps}
    if steps < SETTINGS["steps"]:
        print("VALIDATION " + json.dumps(result), flush=True)
        return
    result |= {"tokens": SETTINGS["trained_tokens"], "gib": torch.cuda.max_memory_allocated() / 2**30}
    print("RESULT " + json.dumps(result), flush=True)
