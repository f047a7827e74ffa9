"""Reinforcement learning: gradients against the definition, a tiny model that learns sums by it, resuming, pass@k.

The model is finetuned on one-digit sums of which two thirds are one too high, so it knows the right answers and prefers
wrong ones: what reinforcement has to turn around.
"""

import dataclasses
import hashlib
import itertools
import json
import random
import shutil
from types import SimpleNamespace

import engine
import finetune
import numpy as np
import pytest
import rl
import sft
import torch
import train_small as ts
from lib import chat_format, chat_tasks

from chats import chat, run_sft, write_jsonl
from commands import call, entries, entries_without_clocks, sets, stops
from processes import python
from tiny import ROOT, TINY

BASE = {**{k: v for k, v in TINY.items() if k != "tokens"}, "stages": ((1.0, 2, 1.0),), "window_short": 16,
        "window_long": 32}  # fmt: skip
FLAGS = ("--digits", "1", "--prompts", "6", "--samples", "6", "--eval-examples", "12", "--eval-samples", "4")


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """The finetuned run."""
    folder, rng = tmp_path_factory.mktemp("rl"), random.Random(0)
    words = "the rest of an old stone is in that sea and there it ends".split()
    texts = [{"text": " ".join(rng.choices(words, k=rng.randint(1, 200)))} for _ in range(200)]
    command = ["data/pretrain.py", "--source", write_jsonl(folder / "text.jsonl", texts), "--vocab-size", "300",
               "--workers", "1", "--out", folder / "data"]  # fmt: skip
    done = python(*command)
    assert done.returncode == 0, done.stderr
    talks = []
    for _ in range(400):
        a, b = sft.random_sum(rng, (1, 1), "train")
        talks.append(chat(sft.addition_texts(a, b)[0], f"#### {a + b + (rng.random() < 0.65)}"))
    run_sft(folder / "data", "--source", write_jsonl(folder / "chat.jsonl", talks), "--max-len", 65)
    flags = ["--data", folder / "data", "--run-dir", folder / "base", "--steps", 5, *sets(BASE)]
    assert call(ts.main, *flags)[0] == 0
    flags = [folder / "base", "--run-dir", folder / "sft", "--steps", 150, "--max-epochs", 99, "--packs", 4,
             "--eval-every", 0]  # fmt: skip
    assert call(finetune.main, *flags)[0] == 0
    return folder / "sft"


def settings_of(*flags) -> rl.Settings:
    """Those of a new run."""
    return rl.check_settings(rl.Settings, vars(rl.read_flags([str(flag) for flag in flags], rl.__doc__, rl.add_new)))


@pytest.fixture
def setup(source):
    """setup(*flags): a run at step 0 that writes no files."""

    def build(*flags) -> rl.RolloutLoader:
        settings = settings_of(source, *FLAGS, *flags)
        script = engine.import_script(source)
        job = rl.make_job(script, source, settings, resume=False)
        state = script.build_state(job.config, script.start_ranks(), lambda text: None)
        job.start_weights(state)
        return job.loader(SimpleNamespace(state=state))

    return build


def greedy(now) -> float:
    """Accuracy on all sums that may be trained on."""
    pairs = [(a, b) for a, b in itertools.product(range(10), repeat=2) if not sft.is_val_sum(a, b)]
    items = [rl.Example(f"What is {a} + {b}?", "", lambda text, n=a + b: text == f"#### {n}") for a, b in pairs]
    environment = dataclasses.replace(now.environment, test=items)
    return rl.evaluate_held_out(dataclasses.replace(now, environment=environment))[0]["greedy"]


def take_step(now) -> ts.Batch:
    answers = now.next()
    rl.policy_gradient_step(now.script, now.state, answers)
    return answers


@pytest.mark.timeout(400)  # 15 s on two free cores
def test_it_learns(setup):
    """In 16 steps right sums become the most likely ones: 10 points of greedy accuracy and more."""
    now = setup("--steps", 16, "--prompts", 32, "--samples", 8, "--eval-samples", 0, "--muon-lr", 0.3, "--adam-lr", 0.3)
    now.environment = dataclasses.replace(now.environment, max_tokens=12)  # no answer that ends is longer
    before = greedy(now)
    for _ in range(16):
        answers = take_step(now)
    assert now.state.step == 16 and answers.notes["frac_groups_with_signal"] > 0.3
    assert greedy(now) >= before + 0.1


def test_what_it_starts_with(setup, source):
    """The weights of its source but none of its moments, fractions of the source's rates, and no fp8 head."""
    now = setup("--muon-lr", 0.3, "--adam-lr", 0.04)
    script, state = now.script, now.state
    base, now = script.read_config(source), state.config
    assert (now.muon_lr, now.adam_lr) == pytest.approx((0.3 * base.muon_lr, 0.04 * base.adam_lr))
    assert not now.fp8 and not now.fp8_head, "answers are sampled by bf16 products"
    assert not any(tensor.any() for tensor in state.optimizer.state().values())
    trained = engine.load_run(source, device="cpu").model.state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in state.optimizer.weights().items())


def gradients(now, rollouts, most_packs=1) -> dict:
    """Of pack_rollouts and backward, in packs of 64 tokens; another rank has so many."""
    script, state = now.script, now.state
    state.model.zero_grad(set_to_none=True)
    config = dataclasses.replace(state.config, pack_tokens=64)
    ranks = SimpleNamespace(gather=lambda packs: [packs, most_packs])
    sampled = sum(sum(r.loss_mask) for r in rollouts)
    rl.backward(script, state, *rl.pack_rollouts(script, config, 0, rollouts, ranks), sampled)
    grads = {name: param.grad for name, param in state.model.named_parameters()}
    return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads.items()}


def close(grads, expected) -> None:
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-5 * grad.abs().max().item(), rtol=1e-3, msg=name)


def test_the_gradient_is_that_of_the_definition(setup):
    """- sum of advantage * log p over sampled tokens / their number, one answer at a time; empty packs add nothing."""
    now = setup()
    state = now.state
    rng, rollouts = np.random.default_rng(0), []
    for i in range(24):
        tokens = rng.integers(0, 300, rng.integers(8, 30)).tolist()
        # A prompt, and now and then a token of a tool.
        loss_mask = [False] * 4 + (rng.random(len(tokens) - 5) < 0.8).tolist()
        rollouts.append(rl.Rollout(tokens, loss_mask, 0.0, float(rng.normal()) * (i % 5 > 0)))
    total = sum(sum(r.loss_mask) for r in rollouts)
    for r in rollouts:
        n, ids = len(r.loss_mask), torch.tensor(r.tokens)
        z = state.model(ids[:-1], None, torch.arange(n), torch.tensor([0, n, n], dtype=torch.int32), n)
        log_p = z.log_softmax(1)[torch.arange(n), ids[1:]]
        (-(log_p * torch.tensor(r.loss_mask)).sum() * r.advantage / total).backward()
    expected = {name: param.grad for name, param in state.model.named_parameters()}
    for most_packs in (1, 16):
        close(gradients(now, rollouts, most_packs), expected)
    # Of a GPU whose answers teach nothing.
    idle = gradients(now, [dataclasses.replace(r, advantage=0.0) for r in rollouts], 2)
    assert all(grad is not None and not grad.any() for grad in idle.values())
    other = [dataclasses.replace(r, loss_mask=[d and i % 2 == 0 for i, d in enumerate(r.loss_mask)]) for r in rollouts]
    assert (gradients(now, other)["embed"] - expected["embed"]).abs().max() > 0


def test_forced_tokens_and_the_end_mark(setup):
    """The model sampled what no tool put in, and the mark that ended the answer; not the question."""
    now = setup()
    environment, generator = now.environment, now.generator
    end = generator.tokenizer.specials["<|assistant_end|>"]
    answers = []
    for reason, text in (("stop", "#### 7"), ("length", "#### 8"), ("stop", "7")):
        tokens = generator.tokenizer.encode(text)
        forced = [i == 1 for i in range(len(tokens))]
        answers.append(engine.Completion([1, 2, 3], tokens=tokens, forced=forced, reason=reason, stop_token=end))
    item = rl.Example("", "7", chat_tasks.same_number("#### 7"))
    found = rl.grade(environment, generator.tokenizer, item, answers)
    assert [r.reward for r in found] == [1.0, 0.0, 0.0]
    assert [r.advantage for r in found] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    n = len(answers[0].tokens)
    assert found[0].tokens == [1, 2, 3, *answers[0].tokens, end] and found[1].tokens == [1, 2, 3, *answers[1].tokens]
    assert found[0].loss_mask == [False] * 2 + [True, False] + [True] * (n - 2) + [True]
    assert found[1].loss_mask == found[0].loss_mask[:-1]
    same = rl.grade(environment, generator.tokenizer, item, answers[1:])
    assert [r.advantage for r in same] == [0.0, 0.0]


def test_an_answer_ends_behind_its_number(setup, monkeypatch):
    """A right number is worth nothing if the model goes on behind it or does not stop, in training as in the test."""
    now = setup("--eval-samples", 0)
    generator = now.generator
    worth = {("stop", "6+1=7\n#### 7"): 1, ("stop", "#### 7 \n"): 1, ("length", "#### 7"): 0, ("stop", "7"): 0,
             ("stop", "#### 7\n#### 7"): 0, ("stop", "#### 7 and"): 0, ("stop", "#### 8"): 0.08,
             ("length", "#### 8"): 0, ("stop", "#### $7.00"): 1, ("stop", "####+7."): 1, ("stop", "#### 7abc"): 0,
             ("stop", "#### 7####8####9"): 0, ("stop", "#### 7<|user_start|>"): 0, ("stop", "#### 7+1"): 0,
             }  # fmt: skip
    items = [rl.Example("", "7", chat_tasks.same_number("#### 7")) for _ in worth]

    def reward(item, text: str) -> float:
        return 1.0 if item.is_correct(text) else 0.08 * ("####" in text)

    now.environment = dataclasses.replace(now.environment, reward=reward, test=items)

    def fill(answers: list) -> list:
        for completion, (reason, text) in zip(answers, worth, strict=True):
            completion.tokens, completion.reason, completion.stop_token = generator.tokenizer.encode(text), reason, 0
            completion.forced = [False] * len(completion.tokens)
        return answers

    answers = fill([engine.Completion([1]) for _ in worth])
    assert [r.reward for r in rl.grade(now.environment, generator.tokenizer, items[0], answers)] == list(worth.values())
    monkeypatch.setattr(generator, "complete", lambda answers, *note: fill(answers))
    found, answers = rl.evaluate_held_out(now)
    assert found["greedy"] == 4 / len(worth)
    assert [a["reward"] for a in answers] == list(worth.values())[: rl.SHOWN]


def test_every_answer_has_noise_of_its_own(setup, monkeypatch):
    """No seed comes twice, neither in the questions of a step nor in the next step, nor in a test."""
    now, seeds = setup(), []
    complete = now.generator.complete

    def watched(completions, *note):
        seeds.extend(c.seed for c in completions if c.temperature)
        complete(completions, *note)

    monkeypatch.setattr(now.generator, "complete", watched)
    for _ in range(2):
        take_step(now)
    assert len(set(seeds)) == len(seeds) == 2 * 6 * 6
    rl.evaluate_held_out(now)
    assert len(set(seeds)) == len(seeds) == 2 * 6 * 6 + 12 * 4


def test_a_step_divides_by_all_that_was_drawn(setup, monkeypatch):
    """Also by the answers that teach nothing; its rate falls in a line to 0, times the share of groups that teach."""
    now, backward, seen = setup("--steps", 4), rl.backward, []

    def watched(script, state, batch, weights, sampled):
        seen.append((sampled, batch.total_targets))
        return backward(script, state, batch, weights, sampled)

    rates = []
    monkeypatch.setattr(rl, "backward", watched)
    step = now.state.optimizer.step
    monkeypatch.setattr(now.state.optimizer, "step", lambda lr, *more: (rates.append(lr), step(lr, *more))[1])
    found = [take_step(now) for _ in range(4)]
    has_signal = [answers.notes["frac_groups_with_signal"] > 0 for answers in found]
    expected = [answers.total_tokens for answers, signal in zip(found, has_signal, strict=True) if signal]
    assert [total for total, _ in seen] == expected
    assert any(targets < total for total, targets in seen), "some question should be answered alike"
    shares = [answers.notes["frac_groups_with_signal"] for answers in found]
    assert any(0 < share < 1 for share in shares)
    assert rates == pytest.approx([(1 - i / 4) * share for i, share in enumerate(shares) if share])


def test_nothing_to_learn_leaves_the_weights(setup, monkeypatch):
    """If all answers to each question are worth the same, no weight moves, momentum or not."""
    now = setup()
    take_step(now)  # fills the moments
    before = [p.clone() for p in now.state.model.parameters()]
    now.environment = dataclasses.replace(now.environment, reward=lambda item, text: 0.5)
    monkeypatch.setattr(rl, "ends", lambda completion, text: True)
    answers = take_step(now)
    assert not answers.notes["frac_groups_with_signal"] and answers.notes["reward"] == 0.5 and now.state.step == 2
    assert all(map(torch.equal, before, now.state.model.parameters()))


def test_rewards():
    """1 for the number, a share for digits counted from the last."""
    settings = settings_of("x", "--digits", "2", "--partial-credit", "0.3")
    environment = rl.addition_environment(settings)
    item = rl.Example("", "132", chat_tasks.same_number("#### 132"))
    for text, reward in (("7+5=12\n#### 132", 1.0), ("#### 132.0", 1.0), ("#### 142", 0.2), ("#### 32", 0.2),
                         ("132", 0.0), ("#### 1132", 0.225), ("#### 999", 0.0), ("", 0.0)):  # fmt: skip
        assert environment.reward(item, text) == pytest.approx(reward), text
    assert len(environment.test) == 200 == len({item.question for item in environment.test})
    for i in range(50):
        item = environment.train(3, i)
        a, b = (int(n) for n in item.question.removeprefix("What is ").removesuffix("?").split(" + "))
        assert not sft.is_val_sum(a, b) and {len(str(a)), len(str(b))} == {2}
        assert item.expected == str(a + b)
    for item in environment.test:
        a, b = (int(n) for n in item.question.removeprefix("What is ").removesuffix("?").split(" + "))
        assert sft.is_val_sum(a, b) and item.expected == str(a + b), "no sum of the test is ever trained on"


def test_pass_at_k():
    """The share of subsets of k answers that hold a right one."""
    for n, right, k in itertools.product((5, 8), range(6), (1, 2, 4)):
        subsets = list(itertools.combinations([i < right for i in range(n)], k))
        assert rl.pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_a_run_and_its_continuation(source, tmp_path):
    """A whole run writes what a person looks at; stopped and resumed it goes on exactly; other tools can load it."""
    flags = [source, *FLAGS, "--steps", 4, "--eval-every", 2, "--save-every", 2]
    code, out, err = call(rl.main, *flags, "--run-dir", tmp_path / "whole")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["steps"] == 4 and 0 <= result["greedy"] <= 1 and "pass@4" in result and "12 held-out" in out
    # As it was after step 2.
    shutil.copytree(tmp_path / "whole", tmp_path / "part", ignore=shutil.ignore_patterns("step_000004"))
    code, out, err = call(rl.main, "--resume", "--run-dir", tmp_path / "part")
    assert code == 0 and "resumed at step 2" in out, err
    whole, part = (entries_without_clocks(tmp_path / name) for name in ("whole", "part"))
    assert whole == part and [e["step"] for e in whole] == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4]
    rl.engine.load_run(tmp_path / "part", device="cpu")
    description = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert chat_format.is_chat_run(tmp_path / "whole") and description["starts"][0]["step"] == 0
    assert description["rl"]["source"] == str(source) and description["rl"]["samples"] == 6
    tool = (ROOT / "runs" / "rl.py").read_bytes()
    assert (tmp_path / "whole" / "rl.py").read_bytes() == tool
    assert description["scripts"] == {"rl.py": hashlib.sha256(tool).hexdigest()}
    new, resume = [*flags, "--run-dir", tmp_path / "new"], ["--resume", "--run-dir", tmp_path / "whole"]
    for main, argv, message in (
        (rl.main, [*flags, "--run-dir", tmp_path / "whole"], "already holds a run"),
        (rl.main, [*new, "--samples", "1"], "--samples is '1': input should be greater than or equal to 2"),
        (rl.main, [*new, "--muon-lr", "inf"], "--muon-lr is 'inf': input should be a finite number"),
        (rl.main, [*new, "--task", "sums"], "input should be 'addition' or 'gsm8k'"),
        (rl.main, [*new, "--task", "gsm8k", "--files", tmp_path], "it needs gsm8k*train* and gsm8k*test*"),
        (rl.main, [*resume, "--steps", 250], "arguments: --steps 250; a resumed run"),  # a parser's default, too
        (rl.main, [source, *resume], f"arguments: {source}; a resumed run keeps its settings, so omit them"),
        (rl.main, ["--resume", "--run-dir", source], "is a run of runs/finetune.py; continue it with"),
        (rl.main, [source.parent / "base", *FLAGS], "was not finetuned, so no answer would be correct"),
        (rl.main, [], "the following arguments are required: RUN"),
        (ts.main, resume, "python runs/rl.py --resume"),
    ):
        assert message in stops(main, *argv)


def test_two_processes_are_one(source, tmp_path):
    """They get the same rewards, also if one has more packs of answers than the other."""
    flags = [source, *FLAGS, "--steps", 3]
    one = call(rl.main, *flags, "--run-dir", tmp_path / "one")
    assert one[0] == 0, one[2]
    two = python("runs/rl.py", *flags, "--run-dir", tmp_path / "two", ranks=2)
    assert two.returncode == 0, two.stderr
    rewards = [[e["reward"] for e in entries(tmp_path / name) if "reward" in e] for name in ("one", "two")]
    assert rewards[0] == pytest.approx(rewards[1]) and len(rewards[0]) == 3


def test_gsm8k_items(source, tmp_path):
    """Each epoch asks every question once; the file for testing is not the one for training."""
    for part, n in (("train", 7), ("test", 3)):
        items = [{"question": f"{part} {i}?", "answer": f"so <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(n)]
        write_jsonl(tmp_path / f"gsm8k_{part}.jsonl", items)
    settings = settings_of(source, "--task", "gsm8k", "--files", tmp_path, "--prompts", "3")
    environment = rl.gsm8k_environment(settings)
    asked = [environment.train(step, place).question for step in range(7) for place in range(3)]
    for epoch in range(3):
        assert sorted(asked[7 * epoch : 7 * epoch + 7]) == [f"train {i}?" for i in range(7)]
    assert asked[:7] != asked[7:14]
    assert sorted(item.question for item in environment.test) == [f"test {i}?" for i in range(3)]
    item = environment.test[0]
    assert environment.reward(item, f"#### {item.expected}.0") == 1 and environment.reward(item, item.expected) == 0
    assert environment.tools
