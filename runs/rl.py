"""Reinforcement learning on a finetuned run: REINFORCE on answers that the model draws itself.

    python runs/rl.py out/SFT --task addition --digits 2      sums, worked column by column
    python runs/rl.py out/SFT --task gsm8k --files FOLDER     grade-school problems, calculator
    torchrun --standalone --nproc_per_node=8 runs/rl.py out/SFT --task gsm8k
    python runs/rl.py --resume --run-dir out/RL

A step draws --samples answers to each of --prompts questions with the current weights, at temperature
1 from the whole vocabulary, so it is on-policy. The advantage of an answer is its reward minus the
mean over the answers to the same question. As in nanochat there is no division by their spread, no
reference model and no clipping. The loss is

    sum over answers and their tokens of  - advantage * log p(token)   /   all drawn tokens of the step

over all GPUs. Tokens from the calculator were not drawn: they carry no gradient and are not counted.
A question whose answers all have the same reward teaches nothing. If that is so for a whole step, the
weights stay as they are, because Muon's step would be as large without a gradient as with one. Rates
are fractions of the pretraining rates and fall in a straight line to 0.

The reward is 1 for the right number behind ####; for a wrong one it is --partial times the share of
right digits. An answer that does not end right behind its number is wrong: a model that was rewarded
for the number alone forgot to stop. Held-out questions are answered before the first step, every
--eval-every steps and at the end: greedily, and --eval-samples times at temperature 1 for pass@k.

The run directory is like that of finetuning, so chat.py, chat_eval.py and export.py read it. It holds
this script too. report.md shows the rewards (reward.png) and answers before and after. FOLDER holds
gsm8k*train* and gsm8k*test* (or gsm8k*val*) as .jsonl, .jsonl.gz, .jsonl.zst or .parquet; without
--files they are downloaded from Hugging Face. A model that was finetuned on general conversations may
know no sums: data/sft.py --source addition:COUNT:DIGITS shows it the form.
"""

import argparse
import dataclasses
import datetime
import hashlib
import html
import json
import math
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":  # Ctrl-C ends the process quietly while torch is imported
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import chat_eval
import engine
import finetune
import numpy as np
import sft
import torch
import torch.distributed as dist
from chat_eval import Item, chat_prompt, complete, sum_over_ranks
from engine import RunError

SHOWN = 8  # held-out questions in the report
NUMBER = re.compile(r"\s*[-+]?\$?[0-9,]*\.?[0-9]+\.?\s*")  # all that may stand behind ####
# Most tokens of an answer; for addition they are multiplied by the digits of the sum.
MAX_TOKENS = {"addition": 24, "gsm8k": 256}


@dataclass(frozen=True)
class Task:
    """Questions, and what an answer is worth."""

    train: Callable[[int, int], Item]  # (step, place in the step) -> a question to train on
    test: list[Item]
    reward: Callable[[Item, str], float]
    tools: bool  # whether the calculator may be used
    max_tokens: int  # in an answer


@dataclass
class Totals:
    """What a run has used so far; saved with every checkpoint."""

    train_seconds: float = 0.0
    draw_seconds: float = 0.0  # part of train_seconds
    drawn_tokens: int = 0


@dataclass
class Run:
    """A run under way."""

    script: ModuleType  # the training script of the run directory
    args: argparse.Namespace
    run_dir: Path
    state: Any  # the script's TrainState
    task: Task
    generator: engine.Generator
    log: Any
    totals: Totals
    lock: Any = None  # of run_dir, held while this lives
    evaluations: list[dict] = dataclasses.field(default_factory=list)  # the first and the last

    @property
    def tokenizer(self):
        return self.generator.tokenizer

    @property
    def ranks(self):
        return self.state.ranks


# ---- tasks


def digits_right(expected: str, text: str) -> float:
    """Share of right digits in the number behind ####, counted from the last; 0 without a number."""
    number = chat_eval.number_in(text)
    if number is None:
        return 0.0
    found = str(number)
    pairs = zip(reversed(expected), reversed(found), strict=False)
    return sum(a == b for a, b in pairs) / max(len(expected), len(found))


def sum_item(a: int, b: int) -> Item:
    question, _ = sft.addition_texts(a, b)
    return Item(question, str(a + b), chat_eval.same_number(f"#### {a + b}"))


def addition_task(args: argparse.Namespace, fits: Callable[[str], bool]) -> Task:
    """Sums; `fits` tells whether the context has room for a question."""

    def train(step: int, place: int) -> Item:
        rng = random.Random(f"{args.seed} {step} {place}")
        return sum_item(*sft.draw_sum(rng, args.digits, "train"))

    def reward(item: Item, text: str) -> float:
        if item.right(text):
            return 1.0
        return args.partial * digits_right(item.expected, text)

    rng = random.Random(0)  # not the seed of the run: the test is always the same
    draws = [sft.draw_sum(rng, args.digits, "val") for _ in range(20 * args.eval_items)]
    pairs = list(dict.fromkeys(draws))  # each once
    test = [sum_item(*pair) for pair in pairs[: args.eval_items]]
    if not fits(test[0].question):
        raise RunError(
            f"sums of {args.digits} digits do not fit the context of this model; use fewer digits"
        )
    return Task(train, test, reward, False, MAX_TOKENS["addition"] * (args.digits + 1))


def gsm8k_task(args: argparse.Namespace, fits: Callable[[str], bool]) -> Task:
    """Grade-school problems; `fits` tells whether the context has room for a question."""
    train_path = gsm8k_file(args.files, "train")
    test_path = gsm8k_file(args.files, "test")
    train_items = [item for item in gsm8k_items(train_path) if fits(item.question)]
    test_items = [item for item in gsm8k_items(test_path) if fits(item.question)]
    if not train_items or not test_items:
        raise RunError(
            "no gsm8k question fits the context of this model; use a model with a longer context"
        )
    random.Random(1337).shuffle(test_items)

    def train(step: int, place: int) -> Item:
        count = len(train_items)
        epoch, index = divmod(step * args.prompts + place, count)
        order = np.random.default_rng([args.seed, epoch]).permutation(count)
        return train_items[order[index]]

    def reward(item: Item, text: str) -> float:
        return float(item.right(text))

    return Task(train, test_items[: args.eval_items], reward, True, MAX_TOKENS["gsm8k"])


def gsm8k_file(folder: Path | None, part: str) -> Path:
    """The file for "train" or "test"; it is downloaded if there is no folder."""
    if not folder:
        import hub

        return hub.fetch("openai/gsm8k", f"main/{part}-00000-of-00001.parquet")
    if part == "test":
        path = chat_eval.find_file(folder, "gsm8k")
    else:
        names = sorted(folder.glob("gsm8k*train*"))
        path = next((name for name in names if name.name.endswith(sft.SUFFIXES)), None)
    if path is None:
        raise RunError(
            f"{folder} has no gsm8k file for {part}ing; it needs gsm8k*train* and gsm8k*test*"
        )
    return path


def gsm8k_items(path: Path) -> list[Item]:
    items = []
    for where, value, problem in sft.records(path, ("question", "answer")):
        try:
            if problem:
                raise ValueError(problem)
            items.append(chat_eval.text_item("gsm8k", value))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{where} is no item of gsm8k ({error}); it needs question and answer"
            ) from None
    return items


# ---- answers and what they are worth


@dataclass(frozen=True)
class Rollout:
    """An answer that was drawn, behind its question."""

    tokens: list[int]  # the prompt, the answer, and the token that ended it
    drawn: list[bool]  # for each token but the first: the model drew it, so it can learn from it
    reward: float
    advantage: float


@dataclass
class Group:
    """A question and its answers."""

    item: Item
    completions: list[engine.Completion]


def ask(run: Run, item: Item, seeds, temperature: float) -> list[engine.Completion]:
    """A completion of the question for each seed, from the whole vocabulary; not yet drawn."""
    prompt = chat_prompt(run.tokenizer, item.question)
    room = run.state.config.max_seq_len + 1 - len(prompt)
    return [
        engine.Completion(
            prompt,
            min(run.task.max_tokens, room),
            temperature,
            top_k=0,
            stop=(run.tokenizer.specials["<|assistant_end|>"],),
            seed=seed % 2**32,
            tools=run.task.tools,
        )
        for seed in seeds
    ]


def ends(completion: engine.Completion, text: str) -> bool:
    """Whether an answer ended by itself right behind its number; one that does not is wrong."""
    number = text.partition("####")[2]
    return completion.reason == "stop" and NUMBER.fullmatch(number) is not None


def judge(task: Task, tokenizer, group: Group) -> list[Rollout]:
    """The answers to one question with their rewards and advantages."""
    rewards = []
    for completion in group.completions:
        text = tokenizer.decode(completion.tokens)
        rewards.append(task.reward(group.item, text) * ends(completion, text))
    mean = sum(rewards) / len(rewards)
    differ = max(rewards) > min(rewards)  # the mean of equal rewards may be rounded

    rollouts = []
    for completion, reward in zip(group.completions, rewards, strict=True):
        tokens = [*completion.prompt, *completion.tokens]
        drawn = [False] * (len(completion.prompt) - 1)
        drawn += [not forced for forced in completion.forced]
        if completion.reason == "stop":
            tokens.append(completion.ended)
            drawn.append(True)
        rollouts.append(Rollout(tokens, drawn, reward, reward - mean if differ else 0.0))
    return rollouts


# ---- a step


@dataclass
class WeightedBatch:
    batch: Any  # the script's Batch
    weights: torch.Tensor  # fp32 (P, pack_tokens): the advantage of the answer that a target is in


def pack_rollouts(
    script, config, bos_id: int, rollouts: list[Rollout], packs: int
) -> WeightedBatch:
    """The rollouts that have an advantage, as whole micro-batches of `packs` packs, at least one."""
    rollouts = [r for r in rollouts if r.advantage]
    rows = [[]]
    if rollouts:
        lengths = np.array([len(r.drawn) for r in rollouts])
        order = np.arange(len(rollouts))
        rows = finetune.best_fit(lengths, order, config.pack_tokens, config.pack_docs)
    while len(rows) % packs:
        rows.append([])

    batch = script.empty_packs(len(rows), config, bos_id)
    weights = torch.zeros(batch.tokens.shape)
    for row, members in enumerate(rows):
        documents = []
        start = 0
        for i in members:
            rollout = rollouts[i]
            end = start + len(rollout.drawn)
            weights[row, start:end] = rollout.advantage
            start = end
            documents.append((np.array(rollout.tokens, np.int32), np.array(rollout.drawn)))
        script.fill_pack(batch, row, documents)
    return WeightedBatch(batch, weights)


def backward(state, weighted: WeightedBatch, total_drawn: int) -> float:
    """Adds the gradient of sum(advantage * nats) / total_drawn of this rank's packs.

    Returns: the sum of nats, without weights
    """
    device = state.ranks.device
    packs = state.packs
    total_nats = torch.zeros((), device=device)
    for i, micro_batch in enumerate(weighted.batch.micro_batches(packs, device)):
        weight = weighted.weights[i * packs : (i + 1) * packs].flatten().to(device)
        loss, nats = state.forward(*micro_batch, weight)
        (loss / total_drawn * state.loss_scale).backward()
        total_nats += nats.sum()
    return total_nats.item()


def draw_groups(run: Run) -> list[Group]:
    """This rank's questions of the step, answered; the answers to one question stay together."""
    args = run.args
    ranks = run.ranks
    step = run.state.step
    groups = []
    for place in range(ranks.rank, args.prompts, ranks.world):
        first = ((args.seed * 1_000_003 + step) * args.prompts + place) * args.samples
        item = run.task.train(step, place)
        seeds = range(first, first + args.samples)
        groups.append(Group(item, ask(run, item, seeds, args.temperature)))
    complete(run.generator, [c for group in groups for c in group.completions])
    return groups


def update(run: Run, rollouts: list[Rollout], total_drawn: int) -> float:
    """One optimizer step on the rollouts of all ranks; returns the mean nats of a target."""
    state = run.state
    bos_id = run.tokenizer.bos_id
    weighted = pack_rollouts(run.script, state.config, bos_id, rollouts, state.packs)
    nats = backward(state, weighted, total_drawn)
    lr_mult = run.script.lr_multiplier(state.config, state.step)
    momentum = run.script.muon_momentum(state.config, state.step)
    if not state.optimizer.step(lr_mult, momentum, state.loss_scale):
        state.loss_scale = max(state.loss_scale / 2, 2.0)  # fp16 overflowed
    sums = np.array([nats, weighted.batch.total_targets], float)
    nats, targets = sum_over_ranks(sums, run.ranks).tolist()
    return nats / max(targets, 1)


def rl_step(run: Run) -> dict:
    """Draws and judges answers and updates the weights once; returns the entry for the log."""
    state = run.state
    args = run.args
    start = time.perf_counter()
    groups = draw_groups(run)
    judged = [judge(run.task, run.tokenizer, group) for group in groups]
    rollouts = [rollout for group in judged for rollout in group]
    drawn_at = time.perf_counter()

    # Sums over all ranks decide for all of them whether there is anything to learn.
    sums = [
        sum(sum(r.drawn) for r in rollouts),
        sum(r.reward for r in rollouts),
        sum(r.reward == 1 for r in rollouts),
        sum(any(r.advantage for r in group) for group in judged),
    ]
    drawn, reward, right, useful = sum_over_ranks(np.array(sums, float), run.ranks).tolist()
    lr_mult = run.script.lr_multiplier(state.config, state.step)
    nats = update(run, rollouts, int(drawn)) if useful else 0.0
    state.step += 1
    run.ranks.sync()

    answers = args.prompts * args.samples
    return {
        "step": state.step,
        "reward": reward / answers,
        "right": right / answers,
        "useful": useful / args.prompts,
        "drawn_tokens": int(drawn),
        "nats": nats,
        "lr": lr_mult,
        "draw_seconds": drawn_at - start,
        "update_seconds": time.perf_counter() - drawn_at,
    }


# ---- held-out questions


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that k of n answers, drawn without replacement, hold a right one.

    The unbiased estimate of the Codex paper (arXiv 2107.03374).
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def evaluate(run: Run) -> dict:
    """Greedy accuracy and pass@k on the held-out questions, and the greedy answers to the first few."""
    start = time.perf_counter()
    test = run.task.test
    n = run.args.eval_samples
    # Each rank has a run of questions, so that those of the report are the first for any number of ranks.
    share = -(-len(test) // run.ranks.world)
    mine = range(run.ranks.rank * share, min((run.ranks.rank + 1) * share, len(test)))
    groups = []
    for i in mine:
        seeds = range(10**9 + i * n, 10**9 + (i + 1) * n)
        greedy = ask(run, test[i], [0], 0.0)
        groups.append(Group(test[i], greedy + ask(run, test[i], seeds, 1.0)))
    note = "held-out questions" if run.ranks.is_main else ""
    complete(run.generator, [c for group in groups for c in group.completions], note)

    right = np.zeros((len(test), 2), np.int64)  # of the greedy answer, of the drawn ones
    answers = []
    for i, group in zip(mine, groups, strict=True):
        item = group.item
        texts = [run.tokenizer.decode(c.tokens) for c in group.completions]
        pairs = zip(group.completions, texts, strict=True)
        good = [ends(completion, text) and item.right(text) for completion, text in pairs]
        right[i] = good[0], sum(good[1:])
        (first,) = judge(run.task, run.tokenizer, Group(item, group.completions[:1]))
        answers.append(
            {
                "question": item.question,
                "expected": item.expected,
                "answer": texts[0],
                "reward": first.reward,
            }
        )
    greedy, drawn = sum_over_ranks(right, run.ranks).T
    found = {"step": run.state.step, "greedy": float(greedy.mean())}
    for exponent in range(n.bit_length()):
        k = 2**exponent
        found[f"pass@{k}"] = float(np.mean([pass_at_k(n, int(count), k) for count in drawn]))
    found["eval_seconds"] = time.perf_counter() - start
    found["answers"] = answers[:SHOWN]
    return found


def scores(evaluation: dict) -> dict[str, float]:
    """The accuracies of an evaluation: greedy, pass@1, pass@2, ..."""
    return {k: v for k, v in evaluation.items() if k == "greedy" or k.startswith("pass@")}


# ---- the report


def cell(text: str) -> str:
    """A text as a cell of a table."""
    text = html.escape(text, quote=False)
    return text.replace("|", "&#124;").replace("\r", "").replace("\n", "<br>")


def draw_curve(path: Path, steps: list[dict], evaluations: list[dict], title: str) -> str:
    """Rewards of all steps and accuracy on held-out questions; returns the line for the report."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "(no picture: matplotlib is not installed)\n"

    x = [entry["step"] for entry in steps]
    reward = [entry["reward"] for entry in steps]
    width = max(1, len(reward) // 20)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(x, reward, color="#9bb8d3", lw=0.8, label="mean reward of a step")
    if width > 1:
        smooth = np.convolve(reward, np.ones(width) / width, "valid")
        axes.plot(x[width - 1 :], smooth, color="#2c6fa3", lw=1.6, label=f"mean of {width} steps")

    x = [entry["step"] for entry in evaluations]
    held_out = {"color": "#c0392b"}
    greedy = [entry["greedy"] for entry in evaluations]
    axes.plot(x, greedy, marker="o", ms=4, label="held out, greedy", **held_out)
    if "pass@1" in evaluations[0]:
        drawn = [entry["pass@1"] for entry in evaluations]
        axes.plot(x, drawn, ls=":", marker=".", label="held out, pass@1", **held_out)
    axes.set(xlabel="step", ylabel="reward, accuracy", ylim=(-0.02, 1.02), title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return "![rewards](reward.png)\n"


def read_log(run_dir: Path) -> list[dict]:
    lines = (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def score_lines(first: dict, last: dict) -> str:
    lines = []
    after = scores(last)
    for name, before in scores(first).items():
        points = 100 * (after[name] - before)
        lines.append(f"| {name} | {before:.1%} | {after[name]:.1%} | {points:+.1f} |")
    return "\n".join(lines)


def answer_lines(first: dict, last: dict) -> str:
    lines = []
    # More ranks than before may have left fewer to the first one.
    for a, b in zip(first["answers"], last["answers"], strict=False):
        lines.append(
            f"| {cell(a['question'])} | {cell(a['expected'])} | {cell(a['answer'])} "
            f"| {a['reward']:.2f} | {cell(b['answer'])} | {b['reward']:.2f} |"
        )
    return "\n".join(lines)


def write_report(run: Run, machine: dict, result: dict) -> None:
    """report.md and reward.png, from log.jsonl."""
    args = run.args
    entries = read_log(run.run_dir)
    steps = [entry for entry in entries if "reward" in entry]
    evaluations = [entry for entry in entries if "greedy" in entry]
    first = run.evaluations[0]
    last = run.evaluations[-1]
    name = f"addition of {args.digits}-digit numbers" if args.task == "addition" else args.task
    rows = {
        "task": name,
        "held-out questions": f"{result['test_items']:,}",
        "steps": f"{result['steps']:,}",
        "answers of a step": f"{args.prompts} questions x {args.samples}",
        "drawn tokens": f"{result['drawn_tokens']:,}",
        "time": f"{result['train_seconds']:.1f} s, of which drawing {result['draw_seconds']:.1f} s",
        "rates": f"{args.muon_lr:g} (matrices) and {args.adam_lr:g} (rest) of those of pretraining, "
        "falling to 0",
        "peak memory": f"{result['peak_memory_gib']:.1f} GiB",
        "device": f"{machine['num_devices']} x {machine['device']}",
        "torch": machine["torch"],
        "started from": str(args.source),
        "seed": str(args.seed),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    picture = draw_curve(
        run.run_dir / "reward.png", steps, evaluations, f"{run.run_dir.name}: {name}"
    )
    text = f"""# {run.run_dir.name}

| held out | before | after | points |
| --- | ---: | ---: | ---: |
{score_lines(first, last)}

| | |
| --- | --- |
{table}

{picture}
## Greedy answers to held-out questions

| question | expected | before | reward | after | reward |
| --- | --- | --- | ---: | --- | ---: |
{answer_lines(first, last)}
"""
    run.script.write_atomically(run.run_dir / "report.md", text)


# ---- the run


def rl_config(script, checkpoint: Path, args: argparse.Namespace):
    """The Config of the finetuned run with the rates of this run."""
    base = finetune.stage_config(script, checkpoint, packs=1, lr=1.0)
    return dataclasses.replace(
        base,
        muon_lr=base.muon_lr * args.muon_lr,
        adam_lr=base.adam_lr * args.adam_lr,
        fp8=False,
        fp8_head=False,
        seed=args.seed,
        eval_every=args.eval_every,
        save_every=args.save_every,
        compile=base.compile and not args.no_compile,
    )


def fit_ranks(config, steps: int, world: int):
    """Gives the schedule `steps` steps: on paper, a step is one pack on each rank.

    A micro-batch is then one pack, and a step has as many of them as its answers need.
    """
    stages = ((1.0, world, 1.0),)
    return dataclasses.replace(config, stages=stages, tokens=steps * world * config.pack_tokens)


def new_run_dir(args: argparse.Namespace, ranks) -> Path:
    """The run directory to be made; all ranks get the same answer."""
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    of_main = [args.run_dir or f"out/{now}_{args.task}"]
    if ranks.world > 1:
        dist.broadcast_object_list(of_main, 0)
        dist.barrier()
    run_dir = Path(of_main[0])
    if (run_dir / "log.jsonl").exists():
        raise RunError(
            f"{run_dir} already holds a run; continue it with --resume or name another --run-dir"
        )
    return run_dir


def write_description(script, run_dir: Path, config, checkpoint: Path, args, machine) -> None:
    """config.json, and the files that make a run directory complete."""
    this_script = Path(__file__)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    description = {
        "command": "rl",
        "config": dataclasses.asdict(config),
        "rl": settings,
        "rl_sha256": hashlib.sha256(this_script.read_bytes()).hexdigest(),
        "checkpoint": checkpoint.name,  # of the source
        "machine": machine,
    }
    script.write_description(run_dir, description)
    for path in (Path(script.__file__), args.source / "tokenizer.json", this_script):
        script.write_atomically(run_dir / path.name, path.read_text(encoding="utf-8"))


def check_same_tool(script, run_dir: Path) -> None:
    """Raises RunError if the training script or this file is another than when the run began."""
    description = script.read_description(run_dir)
    began_with = {
        Path(script.__file__): description["machine"]["script_sha256"],
        Path(__file__): description["rl_sha256"],
    }
    for path, sha256 in began_with.items():
        if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise RunError(
                f"{path} was edited since {run_dir} began; call the rl.py in the run directory, or "
                f"start a new run"
            )


def make_task(args: argparse.Namespace, tokenizer, max_seq_len: int) -> Task:
    def fits(question: str) -> bool:
        return len(chat_prompt(tokenizer, question)) + 32 <= max_seq_len

    if args.task == "addition":
        return addition_task(args, fits)
    return gsm8k_task(args, fits)


def open_run(script, args: argparse.Namespace, ranks, machine: dict) -> Run:
    """A run that is ready for its next step, new or resumed."""
    if args.resume:
        run_dir = args.run_dir
        check_same_tool(script, run_dir)
        home = run_dir
        checkpoint = finetune.newest_checkpoint(script, run_dir)
        base = script.read_config(run_dir)
    else:
        run_dir = new_run_dir(args, ranks)
        home = args.source
        checkpoint = finetune.newest_checkpoint(script, args.source)
        base = rl_config(script, checkpoint, args)
    config = fit_ranks(base, args.steps, ranks.world)
    tokenizer = script.Tokenizer(home / "tokenizer.json")
    chat_eval.check_chat_tokens(tokenizer, home)
    task = make_task(args, tokenizer, config.max_seq_len)
    lock = None
    if ranks.is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = script.lock_run_dir(run_dir)
    if ranks.is_main and not args.resume:
        write_description(script, run_dir, config, checkpoint, args, machine)
    if ranks.world > 1:
        dist.barrier()

    log = script.Log(run_dir, ranks, "", {})
    state = script.build_state(config, ranks, log.say)
    all_of_them = ", all there are" if len(task.test) < args.eval_items else ""
    log.say(
        f"run: {run_dir}, {args.steps:,} steps of {args.prompts} questions x {args.samples} answers, "
        f"{len(task.test):,} held-out questions{all_of_them}, from {checkpoint}"
    )
    totals = Totals()
    evaluations = []
    if args.resume:
        saved = script.load_checkpoint(state, checkpoint)
        totals = Totals(**saved["totals"])
        evaluations = saved["evaluations"]
        log.rewind(state.step)
        log.say(f"resumed at step {state.step} from {checkpoint}")
    else:
        finetune.load_source(script, state, checkpoint, moments=False)
    generator = engine.Generator(state.model, tokenizer, rows=args.rows)
    return Run(script, args, run_dir, state, task, generator, log, totals, lock, evaluations)


def log_evaluation(run: Run) -> dict[str, float]:
    """Answers the held-out questions, logs that and returns the scores."""
    found = evaluate(run)
    run.log.write(found)
    run.evaluations = [*run.evaluations[:1], found]
    line = " | ".join(f"{name} {score:6.1%}" for name, score in scores(found).items())
    run.log.say(
        f"step {run.state.step:5d}/{run.args.steps} | held out: {line} "
        f"| {found['eval_seconds']:.1f} s"
    )
    return scores(found)


def log_step(run: Run, entry: dict) -> None:
    """Adds a step to the totals and to the log."""
    step = run.state.step
    totals = run.totals
    totals.train_seconds += entry["draw_seconds"] + entry["update_seconds"]
    totals.draw_seconds += entry["draw_seconds"]
    totals.drawn_tokens += entry["drawn_tokens"]
    entry["train_seconds"] = totals.train_seconds
    if not math.isfinite(entry["nats"]):
        raise RunError(
            f"the loss is no longer finite at step {step}; lower --muon-lr and --adam-lr"
        )
    run.log.write(entry)
    if step == 1 or step % run.args.log_every == 0 or step == run.args.steps:
        run.log.say(
            "step {step:5d}/{0} | reward {reward:.3f} | right {right:6.1%} | useful {useful:4.0%} "
            "| nats {nats:.3f} | lr {lr:.3f} | draw {draw_seconds:5.2f} s "
            "| update {update_seconds:5.2f} s | {train_seconds:6.1f} s".format(
                run.args.steps, **entry
            )
        )


def run_steps(run: Run) -> None:
    """The loop: steps until the end or a signal; tests and saves in between."""
    args = run.args
    stopper = run.script.Stopper(run.ranks)
    if not args.resume and not any(log_evaluation(run).values()):
        run.log.say(
            "no answer is right, so there may be nothing to learn from: finetune on such answers "
            "first, e.g. with data/sft.py --source addition:2000"
        )
    while run.state.step < args.steps:
        log_step(run, rl_step(run))
        step = run.state.step
        done = step == args.steps
        stop = stopper.asked(step)
        if done or (args.eval_every and step % args.eval_every == 0):
            log_evaluation(run)
        if done or stop or (args.save_every and step % args.save_every == 0):
            totals = dataclasses.asdict(run.totals)
            progress = {"position": None, "val_bpb": None, "totals": totals}
            progress["evaluations"] = (
                run.evaluations
            )  # the log may be damaged, a checkpoint is sealed
            run.script.save_checkpoint(run.state, run.run_dir, progress)
        if stop and not done:
            name = signal.Signals(stopper.signal).name
            raise RunError(
                f"stopped by {name} at step {step}, saved; continue with --resume --run-dir "
                f"{run.run_dir}"
            )
    stopper.restore()


def train(script, args: argparse.Namespace) -> dict:
    """Runs or resumes; returns the result that is printed last, on rank 0."""
    ranks = script.start_ranks()
    machine = script.describe_machine(ranks)
    run = open_run(script, args, ranks, machine)
    run_steps(run)
    if not ranks.is_main:
        return {}

    result = {
        "greedy_before": run.evaluations[0]["greedy"],
        **scores(run.evaluations[-1]),
        "steps": run.state.step,
        **dataclasses.asdict(run.totals),
        "test_items": len(run.task.test),
        "peak_memory_gib": script.peak_memory_gib(ranks.device),
        "run_dir": str(run.run_dir),
    }
    write_report(run, machine, result)
    run.log.say(f"--- report: {run.run_dir}/report.md")
    return result


# ---- the command line


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Reinforcement learning on a finetuned run.")

    add = parser.add_argument

    def number(flag: str, default: int | float, help: str = "") -> None:
        metavar = "X" if isinstance(default, float) else "N"
        add(flag, type=type(default), default=default, metavar=metavar, help=help)

    add("source", nargs="?", type=Path, metavar="RUN", help="finetuned run to start from")
    add(
        "--run-dir", type=Path, metavar="DIR", help="where the run is written (default: under out/)"
    )
    add("--resume", action="store_true", help="continue the run in --run-dir, with its settings")
    add("--task", choices=tuple(MAX_TOKENS), default="addition")
    number("--digits", 2, "in each number of addition")
    add("--files", type=Path, metavar="FOLDER", help="files of gsm8k (default: download)")
    number("--steps", 250)
    number("--prompts", 16, "questions of a step, over all GPUs")
    number("--samples", 16, "answers to each question")
    number("--temperature", 1.0, "of the answers; only 1 is on-policy")
    # These took a small model from 35.5 % to 71.5 % of two-digit sums; 0.5 for matrices, or 0.2 for
    # all, did harm.
    number("--muon-lr", 0.2, "rate of matrices, as a fraction of pretraining's")
    number("--adam-lr", 0.02, "rate of all else, likewise")
    number("--partial", 0.2, "reward for a wrong sum, times its share of right digits")
    number("--eval-every", 50, "steps between tests, 0: only before and after")
    number("--eval-items", 200, "held-out questions")
    number("--eval-samples", 8, "answers to each of them for pass@k, 0: none")
    number("--save-every", 0, "steps between checkpoints, 0: only at the end")
    number("--log-every", 1)
    number("--rows", 256, "answers that are drawn at the same time")
    number("--seed", 0)
    add("--no-compile", action="store_true")
    return parser


LEAST = {
    "digits": 1, "steps": 1, "prompts": 1, "samples": 2, "eval_items": 1, "log_every": 1, "rows": 1,
    "eval_every": 0, "eval_samples": 0, "save_every": 0, "seed": 0,
}  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Raises RunError if a flag of a new run is missing or out of range."""
    if not args.source:
        raise RunError("RUN is missing; name a finetuned run to start from")
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value < least:
            flag = name.replace("_", "-")
            raise RunError(f"--{flag} {value} must be at least {least}")
    if min(args.temperature, args.muon_lr, args.adam_lr) <= 0:
        raise RunError("--temperature, --muon-lr and --adam-lr must be above 0")
    if not 0 <= args.partial < 1:
        raise RunError(f"--partial {args.partial} must be at least 0 and below 1")
    if args.digits > 18:
        raise RunError(f"--digits {args.digits} must be at most 18")


def check_resume(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Raises RunError unless --run-dir, and nothing else, is given with --resume."""
    unset = dict.fromkeys(vars(parser.parse_args(argv)))  # which keeps the defaults out
    args = parser.parse_args(argv, argparse.Namespace(**unset))
    if not args.run_dir:
        raise RunError("--resume needs --run-dir, the run to continue")
    for name, value in vars(args).items():
        if name not in ("resume", "run_dir") and value is not None:
            flag = "RUN" if name == "source" else "--" + name.replace("_", "-")
            raise RunError(f"--resume uses the settings of {args.run_dir}; leave out {flag}")


def saved_settings(script: ModuleType, run_dir: Path) -> argparse.Namespace:
    """The flags that a run to be resumed began with."""
    settings = script.read_description(run_dir).get("rl")
    if settings is None:
        raise RunError(
            f"{run_dir} is no run of runs/rl.py; continue it with the tool that began it"
        )
    if not list(run_dir.glob("checkpoints/step_*/state.json")):
        raise RunError(f"{run_dir} has no checkpoint yet; remove it and start again")
    settings["resume"] = True
    settings["run_dir"] = run_dir
    settings["source"] = Path(settings["source"])
    if settings["files"]:
        settings["files"] = Path(settings["files"])
    return argparse.Namespace(**settings)


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; with --resume only --run-dir, see saved_settings."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.resume:
        check_resume(parser, argv)
    else:
        check(args)
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        script = engine.import_script(args.run_dir if args.resume else args.source)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("error: stopped at once; nothing was done yet", file=sys.stderr, flush=True)
        return 130

    def command() -> dict:
        try:
            settings = saved_settings(script, args.run_dir) if args.resume else args
            return train(script, settings)
        except RunError as error:
            raise script.UserError(str(error)) from None

    return script.run_command(command)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
