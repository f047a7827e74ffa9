"""Reinforcement learning on a finetuned run: REINFORCE on answers that the model draws itself.

    python runs/rl.py --from out/SFT --task addition --digits 2          sums, worked column by column
    python runs/rl.py --from out/SFT --task gsm8k --files FOLDER         grade-school problems with the calculator
    torchrun --standalone --nproc_per_node=8 runs/rl.py --from out/SFT --task gsm8k
    python runs/rl.py --resume --run-dir out/RL

A step draws --samples answers to each of --prompts questions with the present weights, at temperature 1 from the whole
vocabulary, so that it is on-policy. The advantage of an answer is its reward minus the mean over the answers to the
same question (no division by their spread, no reference model, no clipping: as nanochat does). The loss is

    sum over answers and their tokens of  - advantage * log p(token)   /   all drawn tokens of the step, over all GPUs

Tokens that the calculator put in were not drawn: they carry no gradient and are not counted. Questions whose answers
all have the same reward teach nothing; if that is so for a whole step the weights stay, because Muon's step would be as
large without a gradient as with one. Rates are fractions of the pretraining rates and fall in a straight line to 0.

Reward: 1 for the right number behind ####; in addition --partial times the share of right digits otherwise. An answer
that does not end right behind its number is wrong: rewarded for the number alone, a model forgot to stop. Held-out
questions are answered before, every --eval-every steps and at the end: greedily, and --eval-samples times at
temperature 1 for pass@k. The run directory is like that of pretraining, so chat.py, chat_eval.py and export.py take it;
report.md shows the rewards (reward.png) and answers before and after. FOLDER holds gsm8k*train* and gsm8k*test* (or
gsm8k*val*) as .jsonl, .jsonl.gz, .jsonl.zst or .parquet; without it they are downloaded from Hugging Face. The first
model of a finetuned run may know no sums: data/sft.py --source addition:COUNT:DIGITS shows it the form.
"""

import argparse
import dataclasses
import datetime
import html
import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import chat_eval
import numpy as np
import sft
import torch
import torch.distributed as dist
from chat import RunError, import_script
from chat_eval import Item, chat_prompt, complete, sum_over_ranks

SHOWN = 8  # held-out questions in the report
MAX_TOKENS = {
    "addition": 24,
    "gsm8k": 256,
}  # of an answer; addition: for each digit and for the sum


# ---- tasks


class Task(NamedTuple):
    """Questions to train on, by step and place in the step; questions to test on; what an answer is worth."""

    train: Callable[[int, int], Item]
    test: list[Item]
    reward: Callable[[Item, str], float]
    tools: bool
    max_tokens: int


def digits_right(expected: str, text: str) -> float:
    """Share of digits of the number behind #### that are right, counted from the last; 0 without a number."""
    number = chat_eval.number_in(text)
    if number is None:
        return 0.0
    found = str(number)
    same = sum(a == b for a, b in zip(reversed(expected), reversed(found), strict=False))
    return same / max(len(expected), len(found))


def addition_task(args: argparse.Namespace, fits: Callable[[str], bool]) -> Task:
    def item(a: int, b: int) -> Item:
        return Item(sft.addition_texts(a, b)[0], str(a + b), chat_eval.same_number(f"#### {a + b}"))

    def train(step: int, place: int) -> Item:
        return item(
            *sft.draw_sum(random.Random(f"{args.seed} {step} {place}"), args.digits, "train")
        )

    def reward(item: Item, text: str) -> float:
        return 1.0 if item.right(text) else args.partial * digits_right(item.expected, text)

    rng = random.Random(0)  # the same test whatever the seed
    pairs = dict.fromkeys(
        sft.draw_sum(rng, args.digits, "val") for _ in range(20 * args.eval_items)
    )
    if not fits(item(*next(iter(pairs))).question):
        raise RunError(
            f"sums of {args.digits} digits do not fit the context of this model; use fewer"
        )
    tests = [item(*pair) for pair in list(pairs)[: args.eval_items]]
    return Task(train, tests, reward, False, MAX_TOKENS["addition"] * (args.digits + 1))


def gsm8k_task(args: argparse.Namespace, fits: Callable[[str], bool]) -> Task:
    files = []
    for part, name in (
        ("train", "main/train-00000-of-00001.parquet"),
        ("test", "main/test-00000-of-00001.parquet"),
    ):
        if not args.files:
            import hub

            files.append(hub.fetch("openai/gsm8k", name))
            continue
        found = [
            p for p in sorted(args.files.glob("gsm8k*train*")) if p.name.endswith(sft.SUFFIXES)
        ]
        path = (
            chat_eval.find_file(args.files, "gsm8k")
            if part == "test"
            else found[0]
            if found
            else None
        )
        if path is None:
            raise RunError(
                f"{args.files} has no gsm8k file for {part}ing; it needs gsm8k*train* and gsm8k*test*"
            )
        files.append(path)
    items = []
    for path in files:
        items.append([])
        for where, value, problem in sft.records(path, ("question", "answer")):
            try:
                if problem:
                    raise ValueError(problem)
                items[-1].append(chat_eval.text_item("gsm8k", value))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RunError(
                    f"{where} is no item of gsm8k ({error}); it needs question and answer"
                ) from None
    train, test = ([item for item in part if fits(item.question)] for part in items)
    if not train or not test:
        raise RunError(
            "no gsm8k question fits the context of this model; use one with a longer context"
        )
    random.Random(1337).shuffle(test)

    def pick(step: int, place: int) -> Item:
        epoch, index = divmod(step * args.prompts + place, len(train))
        return train[np.random.default_rng([args.seed, epoch]).permutation(len(train))[index]]

    return Task(
        pick,
        test[: args.eval_items],
        lambda item, text: float(item.right(text)),
        True,
        MAX_TOKENS["gsm8k"],
    )


# ---- a step


class Rollout(NamedTuple):
    """An answer that was drawn, behind its question."""

    tokens: list[int]  # prompt, answer and the token that ended it
    drawn: list[
        bool
    ]  # of each but the first: the model drew it, so it has a log probability to learn from
    reward: float
    advantage: float


def attempts(
    script, tokenizer, config, task: Task, item: Item, seeds: list[int], temperature: float
) -> list:
    """A completion of the question for each seed, from the whole vocabulary."""
    prompt, stop = chat_prompt(tokenizer, item.question), (tokenizer.specials["<|assistant_end|>"],)
    most = min(task.max_tokens, config.max_seq_len + 1 - len(prompt))
    return [script.Completion(prompt, most, temperature, 0, stop=stop, seed=seed % 2**32, tools=task.tools)
            for seed in seeds]  # fmt: skip


def ends(completion, text: str) -> bool:
    """Whether an answer ended by itself and has one word behind ####: what does not is wrong."""
    return completion.reason == "stop" and len(text.partition("####")[2].split()) == 1


def judge(task: Task, tokenizer, item: Item, answers: list) -> list[Rollout]:
    """The answers to one question with their rewards and advantages."""
    texts = [tokenizer.decode(c.tokens) for c in answers]
    rewards = [
        task.reward(item, text) * ends(c, text) for c, text in zip(answers, texts, strict=True)
    ]
    mean, rollouts = sum(rewards) / len(rewards), []
    for completion, reward in zip(answers, rewards, strict=True):
        ended = [completion.ended] if completion.reason == "stop" else []
        tokens = [*completion.prompt, *completion.tokens, *ended]
        drawn = (
            [False] * (len(completion.prompt) - 1)
            + [not f for f in completion.forced]
            + [True] * len(ended)
        )
        rollouts.append(
            Rollout(tokens, drawn, reward, reward - mean if max(rewards) > min(rewards) else 0.0)
        )
    return rollouts


def pack_rollouts(script, config, bos_id: int, rollouts: list[Rollout], packs: int) -> tuple:
    """(Batch, weights (P, pack_tokens)) of the rollouts with an advantage, at least one micro-batch of `packs`."""
    rollouts = [r for r in rollouts if r.advantage]
    rows = [[]]
    if rollouts:
        lengths = np.array([len(r.drawn) for r in rollouts])
        rows = script.best_fit(
            lengths, np.arange(len(rollouts)), config.pack_tokens, config.pack_docs
        )
    rows += [[] for _ in range(-len(rows) % packs)]
    arrays = script.empty_packs(len(rows), config, bos_id)
    weights, targets = np.zeros(arrays[0].shape, np.float32), 0
    for row, members in enumerate(rows):
        chosen = [rollouts[i] for i in members]
        documents = [(np.array(r.tokens, np.int32), np.array(r.drawn)) for r in chosen]
        targets += script.fill_pack(arrays, row, documents, config.max_seq_len)
        end = sum(len(r.drawn) for r in chosen)
        weights[row, :end] = np.repeat(
            [r.advantage for r in chosen], [len(r.drawn) for r in chosen]
        )
    tensors = [torch.from_numpy(array) for array in (*arrays, weights)]
    return script.Batch(*tensors[:4], config.max_seq_len, arrays[0].size, targets), tensors[4]


def backward(state, batch, weights: torch.Tensor, total_drawn: int) -> float:
    """Adds the gradient of sum(advantage * nats) / total_drawn, from this rank's packs; returns their sum of nats."""
    device, packs, total_nats = (
        state.ranks.device,
        state.packs,
        torch.zeros((), device=state.ranks.device),
    )
    for i, micro_batch in enumerate(batch.micro_batches(packs, device)):
        weight = weights[i * packs : (i + 1) * packs].flatten().to(device)
        loss, nats = state.forward(*micro_batch, weight)
        (loss / total_drawn * state.loss_scale).backward()
        total_nats += nats.sum()
    return total_nats.item()


def rl_step(script, state, task: Task, generator, args: argparse.Namespace) -> dict:
    """Draws, judges and updates once; returns what to log about it."""
    ranks, tokenizer, step, start = (
        state.ranks,
        generator.tokenizer,
        state.step,
        time.perf_counter(),
    )
    groups = []
    for place in range(
        ranks.rank, args.prompts, ranks.world
    ):  # the answers to a question stay together
        first = ((args.seed * 1_000_003 + step) * args.prompts + place) * args.samples
        item, seeds = task.train(step, place), range(first, first + args.samples)
        groups.append(
            (item, attempts(script, tokenizer, state.config, task, item, seeds, args.temperature))
        )
    complete(generator, [completion for _, group in groups for completion in group])
    judged = [judge(task, tokenizer, item, group) for item, group in groups]
    rollouts, rolled = [rollout for group in judged for rollout in group], time.perf_counter()
    sums = [sum(sum(r.drawn) for r in rollouts), sum(r.reward for r in rollouts), sum(r.reward == 1 for r in rollouts),
            sum(any(r.advantage for r in group) for group in judged)]  # fmt: skip
    drawn, reward, right, useful = sum_over_ranks(np.array(sums, float), ranks).tolist()
    lr, nats, targets = script.lr_multiplier(state.config, step), 0.0, 0
    if useful:
        batch, weights = pack_rollouts(
            script, state.config, tokenizer.bos_id, rollouts, state.packs
        )
        nats, targets = backward(state, batch, weights, int(drawn)), batch.total_targets
        if not state.optimizer.step(lr, script.muon_momentum(state.config, step), state.loss_scale):
            state.loss_scale = max(state.loss_scale / 2, 2.0)  # fp16 overflowed
    nats, targets = sum_over_ranks(np.array([nats, targets], float), ranks).tolist()
    state.step += 1
    ranks.sync()
    count = args.prompts * args.samples
    return {"step": state.step, "reward": reward / count, "right": right / count, "useful": useful / args.prompts,
            "drawn_tokens": int(drawn), "nats": nats / max(targets, 1), "lr": lr,
            "draw_seconds": rolled - start, "update_seconds": time.perf_counter() - rolled}  # fmt: skip


# ---- held-out questions


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that k of n answers, drawn without replacement, hold a right one (the unbiased estimate, Codex paper)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def evaluate(script, state, task: Task, generator, args: argparse.Namespace) -> dict:
    """Greedy accuracy and pass@k on the held-out questions, and the greedy answers to the first few."""
    ranks, tokenizer, start, n = (
        state.ranks,
        generator.tokenizer,
        time.perf_counter(),
        args.eval_samples,
    )
    mine, groups = range(ranks.rank, len(task.test), ranks.world), []
    for i in mine:
        greedy = attempts(script, tokenizer, state.config, task, task.test[i], [0], 0.0)
        seeds = range(10**9 + i * n, 10**9 + (i + 1) * n)
        groups.append(
            greedy + attempts(script, tokenizer, state.config, task, task.test[i], seeds, 1.0)
        )
    complete(
        generator,
        [c for group in groups for c in group],
        "held-out questions" if ranks.is_main else "",
    )
    right = np.zeros((len(task.test), 2), np.int64)  # greedily, and of the drawn ones
    answers = []
    for i, group in zip(mine, groups, strict=True):
        item, texts = task.test[i], [tokenizer.decode(c.tokens) for c in group]
        good = [ends(c, text) and item.right(text) for c, text in zip(group, texts, strict=True)]
        right[i] = good[0], sum(good[1:])
        answers.append({"question": item.question, "expected": item.expected, "answer": texts[0],
                        "reward": judge(task, tokenizer, item, group[:1])[0].reward})  # fmt: skip
    greedy, drawn = sum_over_ranks(right, ranks).T
    found = {f"pass@{2**e}": float(np.mean([pass_at_k(n, int(c), 2**e) for c in drawn]))
             for e in range(n.bit_length())}  # fmt: skip
    return {"step": state.step, "greedy": float(greedy.mean()), **found, "eval_seconds": time.perf_counter() - start,
            "answers": answers[:SHOWN]}  # fmt: skip


# ---- the report


def cell(text: str) -> str:
    """A text as a cell of a table."""
    return (
        html.escape(text, quote=False)
        .replace("|", "&#124;")
        .replace("\r", "")
        .replace("\n", "<br>")
    )


def draw_curve(path: Path, steps: list[dict], evals: list[dict], title: str) -> str:
    """The rewards of all steps and the accuracy on held-out questions; returns the line for the report."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "(no picture: matplotlib is not installed)\n"
    x, reward = [e["step"] for e in steps], [e["reward"] for e in steps]
    width = max(1, len(reward) // 20)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(x, reward, color="#9bb8d3", lw=0.8, label="mean reward of a step")
    if width > 1:
        smooth = np.convolve(reward, np.ones(width) / width, "valid")
        axes.plot(x[width - 1 :], smooth, color="#2c6fa3", lw=1.6, label=f"mean of {width} steps")
    at = [e["step"] for e in evals]
    axes.plot(
        at,
        [e["greedy"] for e in evals],
        color="#c0392b",
        marker="o",
        ms=4,
        label="held out, greedy",
    )
    if "pass@1" in evals[0]:
        axes.plot(
            at,
            [e["pass@1"] for e in evals],
            color="#c0392b",
            ls=":",
            marker=".",
            label="held out, pass@1",
        )
    axes.set(xlabel="step", ylabel="reward, accuracy", ylim=(-0.02, 1.02), title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return "![rewards](reward.png)\n"


def write_report(
    script, run_dir: Path, args: argparse.Namespace, machine: dict, result: dict
) -> None:
    """report.md and reward.png, from log.jsonl."""
    entries = [
        json.loads(line)
        for line in (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps, evals = [e for e in entries if "reward" in e], [e for e in entries if "greedy" in e]
    first, last = evals[0], evals[-1]
    scores = "\n".join(f"| {key} | {first[key]:.1%} | {last[key]:.1%} | {100 * (last[key] - first[key]):+.1f} |"
                       for key in first if key == "greedy" or key.startswith("pass@"))  # fmt: skip
    name = f"addition of {args.digits}-digit numbers" if args.task == "addition" else args.task
    rows = {
        "task": name, "held-out questions": f"{result['test_items']:,}", "steps": f"{result['steps']:,}",
        "answers of a step": f"{args.prompts} questions x {args.samples}",
        "drawn tokens": f"{result['drawn_tokens']:,}",
        "time": f"{result['train_seconds']:.1f} s, of which drawing {result['draw_seconds']:.1f} s",
        "rates": f"{args.muon_lr:g} (matrices) and {args.adam_lr:g} (rest) of those of pretraining, falling to 0",
        "peak memory": f"{result['peak_memory_gib']:.1f} GiB",
        "device": f"{machine['num_devices']} x {machine['device']}", "torch": machine["torch"],
        "started from": str(args.source), "seed": str(args.seed),
    }  # fmt: skip
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    picture = draw_curve(run_dir / "reward.png", steps, evals, f"{run_dir.name}: {name}")
    samples = "\n".join(
        f"| {cell(a['question'])} | {cell(a['expected'])} | {cell(a['answer'])} | {a['reward']:.2f} "
        f"| {cell(b['answer'])} | {b['reward']:.2f} |"
        for a, b in zip(first["answers"], last["answers"], strict=True)
    )
    script.write_atomically(
        run_dir / "report.md",
        f"""# {run_dir.name}

| held out | before | after | points |
| --- | ---: | ---: | ---: |
{scores}

| | |
| --- | --- |
{table}

{picture}
## Greedy answers to held-out questions

| question | expected | before | reward | after | reward |
| --- | --- | --- | ---: | --- | ---: |
{samples}
""",
    )


# ---- the run


def rl_config(script, source: Path, args: argparse.Namespace):
    """The finetuned run's Config with rates and length of this run; a step of the schedule is a step here."""
    base = script.sft_config(source, {})
    return dataclasses.replace(
        base, muon_lr=base.muon_lr * args.muon_lr, adam_lr=base.adam_lr * args.adam_lr, sft_moments=False,
        fp8=False, fp8_head=False, seed=args.seed, eval_every=args.eval_every, save_every=args.save_every,
        compile=base.compile and not args.no_compile,
    )  # fmt: skip


def fit_ranks(config, steps: int, world: int):
    """One pack to a rank in the schedule's books: it then counts `steps` steps, and a micro-batch is one pack."""
    stage = (1.0, world, *config.stages[0][2:5], 1.0)
    return dataclasses.replace(config, stages=(stage,), tokens=steps * world * config.pack_tokens)


def prepare(script, args: argparse.Namespace, ranks) -> Path:
    """The new run directory; all ranks get the same answer."""
    names = [args.run_dir or f"out/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}_{args.task}"]
    if ranks.world > 1:
        dist.broadcast_object_list(names, 0)
        dist.barrier()
    run_dir = Path(names[0])
    if (run_dir / "log.jsonl").exists():
        raise RunError(
            f"{run_dir} already holds a run; continue it with --resume or name another --run-dir"
        )
    return run_dir


def train(script, args: argparse.Namespace) -> dict:
    """Runs or resumes; returns what is printed last."""
    ranks = script.start_ranks()
    run_dir = args.run_dir if args.resume else prepare(script, args, ranks)
    base = script.read_config(run_dir) if args.resume else rl_config(script, args.source, args)
    config = fit_ranks(base, args.steps, ranks.world)
    tokenizer = script.Tokenizer((run_dir if args.resume else args.source) / "tokenizer.json")
    chat_eval.check_chat_tokens(tokenizer, args.source)
    task = (addition_task if args.task == "addition" else gsm8k_task)(args, lambda question: (
        len(chat_prompt(tokenizer, question)) + 32 <= config.max_seq_len))  # fmt: skip
    machine = script.describe_machine(ranks)
    if ranks.is_main and not args.resume:
        run_dir.mkdir(parents=True, exist_ok=True)
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        description = {
            "command": "rl",
            "config": dataclasses.asdict(config),
            "rl": settings,
            "machine": machine,
        }
        script.write_atomically(run_dir / "config.json", json.dumps(description, indent=1))
        for name in (Path(script.__file__).name, "tokenizer.json"):
            script.write_atomically(
                run_dir / name, (args.source / name).read_text(encoding="utf-8")
            )
    if ranks.world > 1:
        dist.barrier()
    log = script.Log(run_dir, ranks, "", {})
    state = script.build_state(config, ranks, log.say)
    log.say(f"run: {run_dir}, {args.steps:,} steps of {args.prompts} questions x {args.samples} answers, "
            f"{len(task.test):,} held-out questions{', all there are' if len(task.test) < args.eval_items else ''}, "
            f"from {config.source}")  # fmt: skip
    totals = {"train_seconds": 0.0, "draw_seconds": 0.0, "drawn_tokens": 0}
    if args.resume:
        folder = script.checkpoints(run_dir)[-1]
        record = script.load_checkpoint(state, folder)
        totals = record["totals"]
        log.rewind(state.step)
        log.say(f"resumed at step {state.step} from {folder}")
    else:
        script.start_from_source(state)
    generator = script.Generator(state.model, tokenizer, rows=args.rows)
    stopper = script.Stopper(ranks)

    def test() -> dict:
        found = evaluate(script, state, task, generator, args)
        log.write(found)
        scores = " | ".join(
            f"{k} {v:6.1%}" for k, v in found.items() if k == "greedy" or k.startswith("pass@")
        )
        log.say(
            f"step {state.step:5d}/{args.steps} | held out: {scores} | {found['eval_seconds']:.1f} s"
        )
        return found

    if not args.resume and not any(
        v for k, v in test().items() if k == "greedy" or k.startswith("pass@")
    ):
        log.say("no answer is right, so there may be nothing to learn from: finetune on such answers first, e.g. with "
                "data/sft.py --source addition:2000")  # fmt: skip
    while state.step < args.steps:
        entry = rl_step(script, state, task, generator, args)
        seconds = entry["draw_seconds"] + entry["update_seconds"]
        for key, value in (("train_seconds", seconds), ("draw_seconds", entry["draw_seconds"]),
                           ("drawn_tokens", entry["drawn_tokens"])):  # fmt: skip
            totals[key] += value
        entry["train_seconds"] = totals["train_seconds"]
        if not math.isfinite(entry["nats"]):
            raise RunError(
                f"the loss is no longer finite at step {state.step}; lower --muon-lr and --adam-lr"
            )
        log.write(entry)
        done, stop = state.step == args.steps, stopper.asked(state.step)
        if state.step % args.log_every == 0 or done or state.step == 1:
            log.say("step {step:5d}/{0} | reward {reward:.3f} | right {right:6.1%} | useful {useful:4.0%} | nats "
                    "{nats:.3f} | lr {lr:.3f} | draw {draw_seconds:5.2f} s | update {update_seconds:5.2f} s | "
                    "{train_seconds:6.1f} s".format(args.steps, **entry))  # fmt: skip
        if done or (args.eval_every and state.step % args.eval_every == 0):
            test()
        if done or stop or (args.save_every and state.step % args.save_every == 0):
            script.save_checkpoint(state, run_dir, {}, {"val_bpb": None, "totals": totals})
        if stop and not done:
            raise RunError(f"stopped by {signal.Signals(stopper.signal).name} at step {state.step}, saved; continue "
                           f"with --resume --run-dir {run_dir}")  # fmt: skip
    stopper.restore()
    if not ranks.is_main:
        return {}
    entries = [
        json.loads(line)
        for line in (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    evals = [entry for entry in entries if "greedy" in entry]
    result = {"greedy_before": evals[0]["greedy"], "greedy": evals[-1]["greedy"],
              **{k: v for k, v in evals[-1].items() if k.startswith("pass@")}, "steps": state.step, **totals,
              "test_items": len(task.test), "peak_memory_gib": script.peak_memory_gib(ranks.device),
              "run_dir": str(run_dir)}  # fmt: skip
    write_report(script, run_dir, args, machine, result)
    log.say(f"--- report: {run_dir}/report.md")
    return result


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Reinforcement learning on a finetuned run.")
    add = parser.add_argument
    add("--from", dest="source", type=Path, metavar="DIR", help="finetuned run to start from")
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where the run is written (default a dated directory under out/)",
    )
    add(
        "--resume", action="store_true", help="continue the run in --run-dir, with its own settings"
    )
    add("--task", choices=tuple(MAX_TOKENS), default="addition")
    add("--digits", type=int, default=2, metavar="N", help="of each number in addition")
    add(
        "--files",
        type=Path,
        metavar="FOLDER",
        help="folder with the files of gsm8k (default: download)",
    )
    add("--steps", type=int, default=250)
    add("--prompts", type=int, default=16, metavar="N", help="questions of a step, over all GPUs")
    add("--samples", type=int, default=16, metavar="N", help="answers to each question")
    add("--temperature", type=float, default=1.0, help="of the answers; only 1 is on-policy")
    # These took a small model from 35.5 % to 71.5 % of two-digit sums; 0.5 for matrices, or 0.2 for all, did harm.
    add(
        "--muon-lr",
        type=float,
        default=0.2,
        metavar="X",
        help="rate of matrices, as a fraction of pretraining's",
    )
    add("--adam-lr", type=float, default=0.02, metavar="X", help="rate of all else, likewise")
    add(
        "--partial",
        type=float,
        default=0.2,
        metavar="X",
        help="reward for a sum whose digits are all but right",
    )
    add(
        "--eval-every",
        type=int,
        default=50,
        metavar="N",
        help="steps between tests, 0: only before and after",
    )
    add("--eval-items", type=int, default=200, metavar="N", help="held-out questions")
    add(
        "--eval-samples",
        type=int,
        default=8,
        metavar="N",
        help="answers to each for pass@k, 0: none",
    )
    add(
        "--save-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between checkpoints, 0: only at the end",
    )
    add("--log-every", type=int, default=1, metavar="N")
    add(
        "--rows", type=int, default=256, metavar="N", help="answers that are drawn at the same time"
    )
    add("--seed", type=int, default=0)
    add("--no-compile", action="store_true")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; of a resumed run those it began with."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not args.resume:
        if not args.source:
            raise RunError("--from is missing; name a finetuned run to start from")
        least = {
            "digits": 1,
            "steps": 1,
            "prompts": 1,
            "samples": 2,
            "eval_items": 1,
            "log_every": 1,
            "rows": 1,
        }
        for name, value in {
            **least,
            "eval_every": 0,
            "eval_samples": 0,
            "save_every": 0,
            "seed": 0,
        }.items():
            if getattr(args, name) < value:
                raise RunError(
                    f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {value}"
                )
        if args.temperature <= 0 or not 0 <= args.partial < 1 or args.digits > 18:
            raise RunError(
                "--temperature must be above 0, --partial 0 or more and below 1, --digits at most 18"
            )
        return args
    if not args.run_dir:
        raise RunError("--resume needs --run-dir, the run to continue")
    for name, value in vars(args).items():
        if name not in ("resume", "run_dir") and value != parser.get_default(name):
            raise RunError(
                f"--resume takes the settings of {args.run_dir}; leave out --{name.replace('_', '-')}"
            )
    try:
        settings = json.loads((args.run_dir / "config.json").read_text(encoding="utf-8"))["rl"]
    except (OSError, ValueError, KeyError):
        raise RunError(f"{args.run_dir} is no run of this tool; name one that it began") from None
    if not list(args.run_dir.glob("checkpoints/step_*/state.json")):
        raise RunError(f"{args.run_dir} has no checkpoint yet; remove it and start again")
    settings |= {"resume": True, "run_dir": args.run_dir, "source": Path(settings["source"]),
                 "files": settings["files"] and Path(settings["files"])}  # fmt: skip
    return argparse.Namespace(**settings)


def main(argv: list[str] | None = None) -> int:
    errors: tuple = (RunError,)
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        script = import_script(args.run_dir if args.resume else args.source, "Completion")
        errors = (RunError, script.UserError)
        result = train(script, args)
        if result:
            print(json.dumps(result), flush=True)
        return 0
    except errors as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
