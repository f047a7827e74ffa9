"""Trains a finetuned run by reinforcement learning: REINFORCE on its own answers.

    python runs/rl.py out/SFT --task addition --digits 2      sums, worked column by column
    python runs/rl.py out/SFT --task gsm8k --files FOLDER     grade-school problems, calculator
    torchrun --standalone --nproc_per_node=8 runs/rl.py out/SFT --task gsm8k
    python runs/rl.py --resume --run-dir out/RL

A step samples --samples answers to each of --prompts questions with the current weights, at temperature 1 from the
whole vocabulary, so it is on-policy. The advantage of an answer is its reward minus the mean over the answers to the
same question. As in nanochat there is no division by their standard deviation, no reference model and no clipping. The
loss is

    sum over answers and their tokens of  - advantage * log p(token)   /   all sampled tokens of the step

over all GPUs. Tokens from the calculator were not sampled, so the loss leaves them out. Rates are fractions of the
pretraining rates and fall in a straight line to 0. A question whose answers all have the same reward teaches nothing.
Muon and Adam divide by the size of the gradient, so a step would be as large with one question that teaches something
as with many; its rates are therefore multiplied by their share. If there is none, the weights stay as they are.

The reward is 1 for the correct number after ####; for a wrong sum it is --partial-credit times the fraction of correct
digits. An answer that does not end directly after its number is wrong: a model that was rewarded for the number alone
forgot to stop. Held-out questions are answered before the first step, every --eval-every steps and at the end:
greedily, and --eval-samples times at temperature 1 for pass@k.

The run directory is like that of finetuning, and its report shows the rewards, and answers before and after. FOLDER
holds gsm8k*train* and gsm8k*test* (or gsm8k*val*) as .jsonl, .jsonl.gz, .jsonl.zst or .parquet. A model that was
finetuned on general conversations may know no sums: data/sft.py --source addition:COUNT:DIGITS shows it the form.
"""

import argparse
import dataclasses
import hashlib
import math
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from lib import chat_format
from lib.checkpoint import describe_run, describe_tool, load_source, newest_checkpoint, stage_config
from lib.command import RunError, add_flags, check_settings, read_flags, run_command
from lib.packing import best_fit
from pydantic import BaseModel, Field

SHOWN = 8  # held-out questions in the report
NUMBER = re.compile(r"\s*[-+]?\$?[0-9,]*\.?[0-9]+\.?\s*")  # all that may follow ####
# Of an answer; for addition they are multiplied by the digits of the sum.
MAX_TOKENS = {"addition": 24, "gsm8k": 256}


class Settings(BaseModel, allow_inf_nan=False):
    """The settings of a run, from its flags; entry "rl" of config.json."""

    source: str
    compile: bool = Field(True, description="compile the model; --no-compile starts quicker, its steps are slower")
    task: Literal[*MAX_TOKENS] = Field("addition", description="task to train on, addition or gsm8k")
    digits: int = Field(2, ge=1, le=18, description="digits of each number to add")
    files: str | None = Field(None, description="folder with GSM8K's files (default: downloaded)")
    steps: int = Field(250, ge=1, description="length of the run in steps")
    prompts: int = Field(16, ge=1, description="questions per step, over all GPUs")
    samples: int = Field(16, ge=2, description="answers to each question")
    # Twice as much teaches sums no better and forgets three times as much (dev/LOG.md, 2026-11-28).
    muon_lr: float = Field(0.1, gt=0, description="learning rate of matrices, as a fraction of pretraining's")
    adam_lr: float = Field(0.02, gt=0, description="learning rate of everything else, as a fraction of pretraining's")
    partial_credit: float = Field(0.2, ge=0, lt=1, description="reward of a wrong sum, times its share of right digits")
    eval_every: int = Field(50, ge=0, description="steps between evaluations, 0: only before and after")
    eval_examples: int = Field(200, ge=1, description="held-out questions")
    eval_samples: int = Field(8, ge=0, description="answers to each held-out question for pass@k, 0: none")
    save_every: int = Field(0, ge=0, description="steps between checkpoints, 0: only at the end")
    log_every: int = Field(1, ge=1, description="steps between lines of the log")
    max_num_seqs: int = Field(256, ge=1, description="maximum number of answers that decode together")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of questions and answers")


def add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", help="finetuned run to start from")
    add_flags(parser, Settings.model_fields)


if __name__ == "__main__":
    read_flags(None, __doc__, add_new)  # --help and wrong flags need not wait for PyTorch

import engine
import torch
from lib import chat_tasks
from lib.chat_tasks import Example, sft


@dataclass(frozen=True)
class Environment:
    """Questions, and what an answer is worth."""

    train: Callable[[int, int], Example]  # (step, index in the step) -> a question to train on
    test: list[Example]
    reward: Callable[[Example, str], float]
    tools: bool  # whether the calculator may be used
    max_tokens: int  # in an answer


# ---- environments


def correct_digits(expected: str, text: str) -> float:
    """Fraction of correct digits in the number after ####, from the last on; 0 without a number."""
    number = chat_tasks.number_in(text)
    if number is None:
        return 0.0
    digits = str(number)
    pairs = zip(reversed(expected), reversed(digits), strict=False)
    return sum(a == b for a, b in pairs) / max(len(expected), len(digits))


def sum_example(a: int, b: int) -> Example:
    question, _ = sft.addition_texts(a, b)
    return Example(question, str(a + b), chat_tasks.same_number(f"#### {a + b}"))


def addition_environment(settings: Settings) -> Environment:
    """Sums of two numbers of exactly `digits` digits."""
    lengths = (settings.digits, settings.digits)

    def train(step: int, place: int) -> Example:
        rng = random.Random(f"{settings.seed} {step} {place}")
        return sum_example(*sft.random_sum(rng, lengths, "train"))

    def reward(example: Example, text: str) -> float:
        if example.is_correct(text):
            return 1.0
        return settings.partial_credit * correct_digits(example.expected, text)

    rng = random.Random(0)  # not the seed of the run: held-out questions are always the same
    pairs = [sft.random_sum(rng, lengths, "val") for _ in range(20 * settings.eval_examples)]
    unique = list(dict.fromkeys(pairs))
    test = [sum_example(*pair) for pair in unique[: settings.eval_examples]]
    return Environment(train, test, reward, False, MAX_TOKENS["addition"] * (settings.digits + 1))


def gsm8k_environment(settings: Settings) -> Environment:
    """Grade-school problems."""
    folder = Path(settings.files) if settings.files else None
    train_examples = chat_tasks.read_task("gsm8k", folder, part="train")
    test_examples = chat_tasks.read_task("gsm8k", folder)
    if not train_examples or not test_examples:
        raise RunError(f"{folder or 'openai/gsm8k'} cannot be used; it needs gsm8k*train* and gsm8k*test*")

    def train(step: int, place: int) -> Example:
        count = len(train_examples)
        epoch, index = divmod(step * settings.prompts + place, count)
        order = np.random.default_rng([settings.seed, epoch]).permutation(count)
        return train_examples[order[index]]

    reward = lambda example, text: float(example.is_correct(text))
    return Environment(train, test_examples[: settings.eval_examples], reward, True, MAX_TOKENS["gsm8k"])


# ---- answers and their rewards


@dataclass(frozen=True)
class Rollout:
    tokens: list[int]  # the prompt, the answer, and the token that ended it
    loss_mask: list[bool]  # of all tokens but the first: whether the model sampled each
    reward: float
    advantage: float


def ends(completion: engine.Completion, text: str) -> bool:
    """Whether an answer ended by itself directly after its number; one that does not is wrong."""
    number = text.partition("####")[2]
    return completion.reason == "stop" and NUMBER.fullmatch(number) is not None


def grade(environment: Environment, tokenizer, example: Example, completions: list) -> list[Rollout]:
    """The answers to one question with their rewards and advantages."""
    rewards = []
    for completion in completions:
        text = tokenizer.decode(completion.tokens)
        rewards.append(environment.reward(example, text) * ends(completion, text))
    mean = sum(rewards) / len(rewards)
    differ = max(rewards) > min(rewards)  # the mean of equal rewards may be rounded

    rollouts = []
    for completion, reward in zip(completions, rewards, strict=True):
        tokens = [*completion.prompt, *completion.tokens]
        loss_mask = [False] * (len(completion.prompt) - 1)
        loss_mask += [not forced for forced in completion.forced]
        if completion.reason == "stop":
            tokens.append(completion.stop_token)
            loss_mask.append(True)
        rollouts.append(Rollout(tokens, loss_mask, reward, reward - mean if differ else 0.0))
    return rollouts


# ---- a step


def pack_rollouts(script, config, bos_id: int, rollouts: list[Rollout], ranks) -> tuple:
    """This rank's rollouts that have an advantage, in packs; at least one, which may be empty.

    Returns: the script's Batch; fp32 (P, pack_tokens), the advantage of the answer that a target is in
    """
    rollouts = [r for r in rollouts if r.advantage]
    members = [[]]  # of each pack
    if rollouts:
        lengths = np.array([len(r.loss_mask) for r in rollouts])
        order = np.arange(len(rollouts))
        members = best_fit(lengths, order, config.pack_tokens, config.max_docs_per_pack)
    # The exchange of n-gram gradients needs as many rows from each rank, so empty packs fill up the others.
    most = max(ranks.gather(len(members)))
    members += [[]] * (most - len(members))

    batch = script.empty_packs(len(members), config, bos_id)
    advantages = torch.zeros(batch.tokens.shape)
    for pack, indices in enumerate(members):
        documents = []
        start = 0
        for i in indices:
            rollout = rollouts[i]
            end = start + len(rollout.loss_mask)
            advantages[pack, start:end] = rollout.advantage
            start = end
            documents.append((np.array(rollout.tokens, np.int32), np.array(rollout.loss_mask)))
        script.fill_pack(batch, pack, documents)
    return batch, advantages


def backward(script, state, batch, advantages: torch.Tensor, num_sampled: int) -> torch.Tensor:
    """Adds the gradient of sum(advantage * nats) / num_sampled of this rank's packs; returns the sum of nats."""
    device = state.ranks.device
    total_nats = torch.zeros((), device=device)
    factor = torch.full_like(total_nats, state.loss_scale / num_sampled)
    gradients = []  # of each pack, a list over n-gram tables
    for micro_batch, weights in zip(batch.micro_batches(1, device), advantages, strict=True):
        nats, row_gradients = script.micro_step(state, micro_batch, factor, weights.to(device))
        total_nats += nats
        gradients.append(row_gradients)
    script.set_sparse_gradients(state.model, list(zip(*gradients, strict=True)))
    return total_nats


def policy_gradient_step(script, state, batch) -> torch.Tensor:
    """One optimizer step on the answers of all ranks; this rank's part of the mean nats."""
    step = state.step
    state.step += 1
    with_signal = batch.notes["frac_groups_with_signal"]
    if with_signal == 0:  # all advantages are 0, on all ranks
        return torch.zeros((), device=state.ranks.device)
    nats = backward(script, state, batch, batch.advantages, batch.total_tokens)
    schedule = script.lr_multiplier(state.config, step) * with_signal
    state.optimizer.step(schedule, script.muon_momentum(state.config, step))
    targets = sum(state.ranks.gather(batch.total_targets))
    return nats / max(targets, 1)


def seed_of(*parts) -> int:
    """A seed of 32 bits for an answer, from all that tells it from other answers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest())


@dataclass
class RolloutLoader:
    """Samples the batch of each step with the current weights, for the training script's loop."""

    script: ModuleType  # the training script of the run directory
    settings: Settings
    environment: Environment
    tokenizer: Any
    state: Any  # the script's TrainState
    generator: Any

    def close(self) -> None:
        """The loop calls this at the end; there is nothing to end."""

    def next(self):
        """The Batch of the next step: samples and grades answers."""
        start = time.perf_counter()
        settings = self.settings
        state = self.state
        ranks = state.ranks
        examples = []  # the answers to one question stay on one rank
        completions = []  # the group of each example
        for place in range(ranks.rank, settings.prompts, ranks.world):
            examples.append(self.environment.train(state.step, place))
            seeds = [seed_of("train", settings.seed, state.step, place, k) for k in range(settings.samples)]
            completions.append(self.new_completions(examples[-1], seeds, 1.0))
        self.generator.complete([completion for group in completions for completion in group])
        pairs = zip(examples, completions, strict=True)
        groups = [grade(self.environment, self.tokenizer, example, group) for example, group in pairs]
        rollouts = [rollout for group in groups for rollout in group]

        # Sums over all ranks decide for all of them whether there is anything to learn.
        sums = [
            sum(sum(r.loss_mask) for r in rollouts),
            sum(r.reward for r in rollouts),
            sum(r.reward == 1 for r in rollouts),
            sum(any(r.advantage for r in group) for group in groups),
        ]
        num_sampled, reward, num_correct, num_signal = sum(ranks.gather(np.array(sums, float))).tolist()
        bos_id = self.tokenizer.bos_id
        batch, advantages = pack_rollouts(self.script, state.config, bos_id, rollouts, ranks)
        batch.advantages = advantages
        batch.total_tokens = int(num_sampled)
        count = settings.prompts * settings.samples
        batch.notes = {
            "reward": reward / count,
            "accuracy": num_correct / count,
            "frac_groups_with_signal": num_signal / settings.prompts,
            "rollout_seconds": time.perf_counter() - start,
        }
        return batch

    def new_completions(self, example: Example, seeds: list[int], temperature: float) -> list[engine.Completion]:
        """A completion of the question for each seed, from the whole vocabulary; not yet sampled."""
        prompt = chat_format.question_ids(self.tokenizer, example.question)
        options = {
            "max_tokens": self.environment.max_tokens,
            "temperature": temperature,
            "top_k": 0,
            "stop": (self.tokenizer.specials[chat_format.ASSISTANT_END],),
            "tools": self.environment.tools,
        }
        return [engine.Completion(prompt, seed=seed, **options) for seed in seeds]


# ---- evaluation


def evaluate_held_out(rollouts: RolloutLoader) -> tuple[dict[str, float], list[dict]]:
    """Greedy accuracy and pass@k on the held-out questions, and the first greedy answers."""
    examples = rollouts.environment.test
    n = rollouts.settings.eval_samples
    ranks = rollouts.state.ranks
    # Each rank has questions in a row, so the report's are the first for any number of ranks.
    per_rank = math.ceil(len(examples) / ranks.world)
    mine = range(len(examples))[ranks.rank * per_rank : (ranks.rank + 1) * per_rank]
    groups = []
    for i in mine:
        greedy = rollouts.new_completions(examples[i], [0], 0.0)
        seeds = [seed_of("test", i, k) for k in range(n)]
        groups.append(greedy + rollouts.new_completions(examples[i], seeds, 1.0))
    note = "held-out questions" if ranks.is_main else ""
    rollouts.generator.complete([completion for group in groups for completion in group], note)

    greedy_correct = np.zeros(len(examples), np.int64)
    sampled_correct = np.zeros(len(examples), np.int64)  # how many of n
    answers = []
    for i, group in zip(mine, groups, strict=True):
        greedy, *sampled = grade(rollouts.environment, rollouts.tokenizer, examples[i], group)
        greedy_correct[i] = greedy.reward == 1
        sampled_correct[i] = sum(r.reward == 1 for r in sampled)
        text = rollouts.tokenizer.decode(group[0].tokens)
        answer = {"question": examples[i].question, "expected": examples[i].expected}
        answers.append(answer | {"answer": text, "reward": greedy.reward})
    scores = {"greedy": float(sum(ranks.gather(greedy_correct)).mean())}
    counts = sum(ranks.gather(sampled_correct)).tolist()
    for exponent in range(n.bit_length()):
        k = 2**exponent
        scores[f"pass@{k}"] = float(np.mean([pass_at_k(n, count, k) for count in counts]))
    return scores, answers[:SHOWN]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n answers hold a correct one: the unbiased estimate of arXiv 2107.03374."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


# ---- the run


def rl_config(script, checkpoint: Path, settings: Settings):
    """The Config of the finetuned run with the rates of this run."""
    # A step has as many packs as its answers need: one in the stage table gives the number of steps.
    base = stage_config(script, checkpoint, packs=1, lr=1.0)
    same = settings.model_dump(include={"seed", "log_every", "eval_every", "save_every"})
    return dataclasses.replace(
        base,
        tokens=settings.steps * base.pack_tokens,
        muon_lr=base.muon_lr * settings.muon_lr,
        adam_lr=base.adam_lr * settings.adam_lr,
        fp8=False,
        fp8_head=False,
        compile=base.compile and settings.compile,
        **same,
    )


def make_job(script, run_dir: Path, settings: Settings, resume: bool):
    """RL, as a kind of the script's pretraining; run_dir is the run to start from or to resume."""
    checkpoint = newest_checkpoint(script, run_dir)
    config = script.read_config(run_dir) if resume else rl_config(script, checkpoint, settings)
    tokenizer = script.Tokenizer(run_dir / "tokenizer.json")
    if not chat_format.is_chat_run(run_dir):
        raise RunError(f"{run_dir} was not finetuned, so no answer would be correct; start from a finetuned run")
    environments = {"addition": addition_environment, "gsm8k": gsm8k_environment}
    environment = environments[settings.task](settings)
    note = f"{settings.prompts} questions x {settings.samples} answers a step"

    class ReinforcementLearning(script.Pretraining):
        command = "rl"
        bytes_per_token = math.inf  # nothing to state in bits per byte

        def __init__(self):
            self.config = config
            self.tokenizer = tokenizer
            self.fingerprint = settings.task
            self.note = f"{note}, {len(environment.test):,} held-out questions, from {settings.source}"
            describe_tool(self, {"rl": settings.model_dump()}, __file__)

        def check(self, ranks) -> None:
            """There are always enough questions, and any number of ranks can share them."""

        def build(self, ranks, say):
            """Not warmed up: the model compiles with the first answers."""
            return script.build_state(config, ranks, say)

        def start_weights(self, state) -> bool:
            load_source(script, state, checkpoint, moments=False)
            return True

        def loader(self, run):
            generator = engine.Generator(run.state.model, tokenizer, num_slots=settings.max_num_seqs)
            return RolloutLoader(script, settings, environment, tokenizer, run.state, generator)

        def step(self, state, batch):
            return policy_gradient_step(script, state, batch)

        def evaluate(self, run) -> dict[str, float]:
            scores, answers = evaluate_held_out(run.loader)
            run.log.write({"step": run.state.step, "answers": answers})
            if run.state.step == 0 and not any(scores.values()):
                advice = "finetune on such answers first (data/sft.py --help)"
                run.log.say(f"no answer is correct, so there may be nothing to learn from: {advice}")
            return scores

        def flops(self, positions) -> float:
            return 0.0  # those of sampling are unknown

        def seconds_left(self, run, entry: dict) -> float:
            return (settings.steps - run.state.step) * entry["step_ms"] / 1e3

    return ReinforcementLearning()


# ---- the command line


def reinforce(args: argparse.Namespace) -> dict:
    """Runs or resumes; returns the result that is printed last."""
    run_dir = args.run_dir if args.resume else Path(args.source)
    script = engine.import_script(run_dir)
    given = describe_run(script, run_dir, "rl")["rl"] if args.resume else vars(args)
    job = make_job(script, run_dir, check_settings(Settings, given), args.resume)
    return script.train(job, args)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: reinforce(read_flags(argv, __doc__, add_new)))


if __name__ == "__main__":
    sys.exit(main())
