"""NorMuon, RMSProp and Adam against textbook versions, the parameter table, and the schedules."""

import dataclasses
import functools
import math

import pytest
import safetensors.torch
import torch
import train_small as ts
from torch._dynamo.testing import CompileCounterWithBackend

from commands import RUN, sets
from processes import python
from test_model import CONFIGS
from tiny import ALONE, optimizer_of, pack, random_documents, random_model, script, tiny_config, tiny_medium


def polar_by_svd(matrices):
    """Polar Express in float64 on the singular values alone: U p(S) V^T."""
    u, s, v = torch.linalg.svd(matrices.double(), full_matrices=False)
    s = s / (s.square().sum(-1, keepdim=True).sqrt() * 1.02 + 1e-6)
    for a, b, c in ts.POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return u @ (s[..., None] * v)


class TextbookMuon:
    """NorMuon as the papers write it, in float64: EMA momentum, Nesterov, polar factor, a second moment per neuron,
    the norm of the polar factor, cautious decay."""

    def __init__(self, weights, lr, momentum, beta2, decay, mult=1.0):
        self.p, self.m, self.v = weights.double(), 0.0, 0.0
        self.lr, self.mu, self.beta2, self.decay, self.mult = lr, momentum, beta2, decay, mult

    def step(self, grad):
        grad = grad.double()
        self.m = self.mu * self.m + (1 - self.mu) * grad
        polar = polar_by_svd(self.mu * self.m + (1 - self.mu) * grad)
        rows, columns = polar.shape[-2:]
        mean_square = (polar**2).mean(-1 if rows >= columns else -2, keepdim=True)
        self.v = self.beta2 * self.v + (1 - self.beta2) * mean_square
        update = polar / self.v.clamp(min=1e-10) ** 0.5  # neurons that no token activates have none
        update *= (polar**2).sum((-2, -1), keepdim=True) ** 0.5 / (update**2).sum((-2, -1), keepdim=True) ** 0.5
        mask = (update * self.p >= 0).double()
        self.p = self.p - self.lr * self.mult * (update + self.decay * mask * self.p)


def test_rows_without_a_gradient_keep_their_weights_on_every_rank():
    """The kernel writes only rows with a gradient, so what a rank sends to others begins as its part of the table."""
    rule = ts.parameter_table(ts.Config())["value_embed"]
    model = torch.nn.Module()
    model.value_embed = torch.nn.Parameter(torch.randn(1001, 80).bfloat16())
    for rank, rows in ((0, slice(0, 501)), (1, slice(501, 1001))):
        ranks = ts.Ranks(rank, 2, torch.device("cpu"))
        optimizer = ts.Optimizer(model, ts.Config(), ranks, {"value_embed": rule})
        (slot,) = optimizer.slots
        own = optimizer.own_rows(slot, slot.param.detach().view(slot.shape))
        part = model.value_embed.detach()[rows]
        assert slot.sharded and own.shape == slot.master.shape == (501, 80)
        assert torch.equal(own[: len(part)], part)
        assert own.data_ptr() != model.value_embed.data_ptr(), "others still read the parameter"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("config", (tiny_config(), tiny_medium()), ids=("small", "medium"))
def test_compiled_updates(config, device, monkeypatch):
    """As uncompiled, in four graphs; new rates, momenta and corrections compile nothing."""
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    module, results = script(config), []
    module.compile_once.cache_clear()
    ranks = module.Ranks(0, 1, torch.device(device))
    for compiled in (False, True):
        model = module.GPT(config, device, torch.bfloat16)
        model.init_weights(0)
        optimizer = optimizer_of(model, config, ranks=ranks)
        optimizer.compiled = compiled
        rng = torch.Generator(device).manual_seed(0)
        graphs = []
        for step in range(4):
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=rng, device=device).to(param.dtype)
            optimizer.step(1.0 - 0.1 * step, 0.85 + 0.01 * step)
            graphs.append(counter.frame_count)
        assert graphs == [4 * compiled] * 4
        results.append(optimizer.weights() | optimizer.state())
    module.compile_once.cache_clear()
    tolerance = dict(atol=1e-4, rtol=1e-3) if device == "cpu" else dict(atol=2e-3, rtol=2e-2)  # bf16 products
    for name, want in results[0].items():
        torch.testing.assert_close(results[1][name], want, **tolerance, msg=name)


class TextbookRows:
    """RMSProp in float64 with Adam's bias correction, one second moment for each row, and cautious decay."""

    def __init__(self, weights, lr, beta2, eps, decay):
        self.p, self.v, self.steps = weights.double(), 0.0, 0
        self.lr, self.beta2, self.eps, self.decay = lr, beta2, eps, decay

    def step(self, grad):
        grad = grad.double()
        self.steps += 1
        self.v = self.beta2 * self.v + (1 - self.beta2) * (grad**2).mean(1, keepdim=True)
        update = grad / ((self.v / (1 - self.beta2**self.steps)) ** 0.5 + self.eps)
        mask = (update * self.p > 0).double()
        self.p = self.p - self.lr * (update + self.decay * mask * self.p)


def test_sparse_gradient_in_steps():
    """Three steps of the whole optimizer: a table with sparse gradients ends as one with dense ones."""
    config = tiny_config()
    table = ts.parameter_table(config)
    assert table["bigram_embed"].sparse
    found = []
    for sparse in (True, False):
        model = random_model(config)
        optimizer = optimizer_of(model, config, table)
        state = ts.TrainState(config, ALONE, model, model, optimizer, micro_packs=2)
        for seed in (0, 1, 2):
            batch = pack(random_documents((60, 60), seed=seed))
            if sparse:
                _, gradients = ts.micro_step(state, ts.MicroBatch(*batch), torch.tensor(0.01))
                assert model.bigram_embed.grad is None
                ts.set_sparse_gradients(model, [[gradient] for gradient in gradients])
            else:
                (model(*batch)[0] * 0.01).backward()
            optimizer.step(1.0, 0.9)
        found.append({**optimizer.weights(), "square": optimizer.state()["bigram_embed.second_moment"]})
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_parameter_has_a_policy(config):
    """Each technique's parameters are in the table, matrices go to NorMuon, and the optimizer takes all of them."""
    model, table = script(config).GPT(config), script(config).parameter_table(config)
    names = {name for name, _ in model.named_parameters()}
    assert names <= set(table)
    assert {slot.name for slot in optimizer_of(model, config).slots} == names
    assert {n for n in names if table[n].optimizer == "normuon"} == {n for n in names if n.endswith("_bank")}
    tables = {"bigram_embed", "trigram_embed", "value_embed"}
    assert {n for n in names if table[n].optimizer == "rmsprop"} == names & tables
    betas = {"normuon": 0, "rmsprop": 1, "adam": 2}
    assert all(len(p.betas) == betas[p.optimizer] and p.lr_mult > 0 and p.weight_decay >= 0 for p in table.values())


def assert_nearly_all_close(got, expected, name) -> None:
    """Where an update is nearly 0, rounding decides its sign, and so the decay: in one entry of a thousand."""
    off = (got.detach().double() - expected.detach()).abs() > 1e-3
    assert off.double().mean() < 1e-3, f"{name}: {off.sum()} of {off.numel()} entries"


@pytest.mark.parametrize(
    # Q and K of the small model are orthogonalised by pairs of heads (32 of the 128 rows), all else by whole matrices;
    # its down projections move twice as far.
    ("config", "rows", "down"),
    [(tiny_config(), {"qk_bank": 32}, 2.0), (tiny_medium(), {"qk_bank": 64}, 1.0)],
    ids=("small", "medium"),
)
def test_optimizer_step_applies_the_table(config, rows, down):
    """Two steps on a whole model: for every parameter the textbook update with the rates of its row."""
    model, table = random_model(config), script(config).parameter_table(config)
    for name, rule in table.items():  # so large that a wrong decay shows
        table[name] = dataclasses.replace(rule, weight_decay=30 * rule.weight_decay)
    optimizer = optimizer_of(model, config, table)
    muon, tables, adam = {}, {}, {}
    for name, param in model.named_parameters():
        rule, weights = table[name], param.detach().clone()
        if rule.optimizer == "normuon":
            matrices = weights.view(-1, rows.get(name, weights.size(1)), 64)
            mult = torch.ones(len(matrices), 1, 1)
            if name == "mlp_bank":  # (128, 64) is twice as tall as wide
                mult = torch.full_like(mult, 2**0.5)
                mult[1::2] *= down
            decay = rule.weight_decay * 0.7
            muon[name] = TextbookMuon(matrices, config.muon_lr * rule.lr_mult * 0.7, 0.9, 0.9, decay, mult)
        elif rule.optimizer == "rmsprop":
            lr = config.adam_lr * rule.lr_mult * 0.7
            tables[name] = TextbookRows(weights, lr, *rule.betas, config.adam_eps, rule.weight_decay * 0.7)
        else:
            adam[name] = [weights.requires_grad_()]
            lr = config.adam_lr * rule.lr_mult * 0.7
            adam[name] += [lr, torch.optim.Adam(adam[name], lr=lr, betas=rule.betas, eps=config.adam_eps)]
    for seed in (0, 1, 2):
        (model(*pack(random_documents((60, 60), seed=seed)))[0] / 100).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step(0.7, 0.9)
        for name, textbook in muon.items():
            textbook.step(grads[name].view(textbook.p.shape))
            assert_nearly_all_close(model.get_parameter(name).view(textbook.p.shape), textbook.p, name)
        for name, textbook in tables.items():
            textbook.step(grads[name])
            assert_nearly_all_close(model.get_parameter(name), textbook.p, name)
        for name, (weights, lr, textbook) in adam.items():
            before = weights.detach().clone()
            weights.grad = grads[name]
            textbook.step()
            with torch.no_grad():  # the cautious decay is on top
                shrinks = (before - weights) * before > 0
                weights -= lr * table[name].weight_decay * 0.7 * before * shrinks
            assert_nearly_all_close(model.get_parameter(name), weights, name)


def test_a_parameter_that_nothing_uses():
    """It has no gradient, and stays as it was."""
    config = tiny_config()
    model = random_model(config)
    optimizer = optimizer_of(model, config)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for _ in range(2):
        (model(*pack(random_documents((50, 60))))[0] / 100).backward()
        model.scalars.grad = None
        optimizer.step(1.0, 0.9)
    changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert changed == set(before) - {"scalars"}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_optimizer_state_survives_a_round_trip(dtype):
    """weights() and state() are all there is: a fresh optimizer that loads them takes the same next step."""
    config = tiny_config()
    models = [ts.GPT(config, dtype=dtype) for _ in range(2)]
    for seed, model in enumerate(models):
        source = random_model(config, seed)
        model.load_state_dict(source.state_dict())
        model.attention = source.attention
    first, second = (optimizer_of(model, config) for model in models)
    assert all(moment.dtype == torch.float32 for slot in first.slots for moment in slot.moments.values())
    (models[0](*pack(random_documents((50, 60))))[0] / 100).backward()
    first.step(1.0, 0.9)
    for name, param in models[0].named_parameters():
        assert torch.equal(param, first.weights()[name].to(param.dtype)), f"{name} is not its rounded master"
    second.load(first.weights(), first.state())
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, (first, second), strict=True):
        (model(*pack(random_documents((40, 60), seed=3)))[0] / 100).backward()
        optimizer.step(0.5, 0.95)
    for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
        assert torch.equal(a, b), name


def test_matrices_in_parts():
    """NorMuon over one matrix at a time is NorMuon over the whole bank; at most 2 ** 27 entries go together."""
    config, weights = tiny_config(), []
    for together in (None, 1):
        model = random_model(config)
        optimizer = optimizer_of(model, config)
        for slot in optimizer.slots:
            if slot.mult is not None:
                assert slot.matrices_at_once == len(slot.master), "a tiny bank goes at once"
                slot.matrices_at_once = together or slot.matrices_at_once
        (model(*pack(random_documents((50, 60))))[0] / 100).backward()
        optimizer.step(1.0, 0.9)
        weights.append(optimizer.weights())
    for name, whole in weights[0].items():
        torch.testing.assert_close(weights[1][name], whole, atol=1e-6, rtol=1e-5)


def half_precision_step(model, optimizer, scale: float, seed: int) -> None:
    """A step of the optimizer with gradients in fp16, times a scale, of a model whose forward is in fp32."""
    twin = random_model(tiny_config())
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    (twin(*pack(random_documents((50, 60), seed=seed)))[0] / 100 * scale).backward()
    for param, exact in zip(model.parameters(), twin.parameters(), strict=True):
        param.grad = exact.grad.to(param.dtype)
    optimizer.step(1.0, 0.9)


def test_a_step_whose_gradients_overflow_is_skipped():
    """In fp16 one infinite gradient leaves weights and moments as they were; in fp32 nobody looks."""
    model = ts.GPT(tiny_config(), dtype=torch.float16)
    model.init_weights(0)
    optimizer = optimizer_of(model, tiny_config())
    half_precision_step(model, optimizer, 1.0, seed=0)
    before = {name: value.clone() for name, value in (optimizer.weights() | optimizer.state()).items()}
    half_precision_step(model, optimizer, math.inf, seed=1)
    after = optimizer.weights() | optimizer.state()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(param.grad is None for param in model.parameters())
    half_precision_step(model, optimizer, 1.0, seed=1)
    assert not torch.equal(before["embed"], optimizer.weights()["embed"])


TWO_RANKS = """
import sys
import torch
import train_small as ts

config = ts.change_config(None, ts.build_parser().parse_args(sys.argv[1:]))
ranks = ts.start_ranks()
model = ts.GPT(config, dtype=torch.float16)
model.init_weights(0)
optimizer = ts.Optimizer(model, config, ranks, ts.parameter_table(config))
assert len({slot.sharded for slot in optimizer.slots}) == 2

def contents():
    return {name: value.clone() for name, value in (optimizer.weights() | optimizer.state()).items()}

for sizes in ((20000.0, 20000.0), (40000.0, 40000.0), (1.0, float("inf")), (1.0, 1.0)):
    before = contents()
    for param in model.parameters():
        param.grad = torch.full_like(param, sizes[ranks.rank])
    optimizer.step(1.0, 0.9)
    same = [torch.equal(value, before[name]) for name, value in contents().items()]
    assert optimizer.is_finite()
    print(ranks.rank, sizes, "skipped" if all(same) else "done", flush=True)
"""


def test_ranks_skip_a_step_together():
    """Where a gradient is infinite on one of them, and where only the sum is, as fp16 ends at 65,504."""
    done = python("-c", TWO_RANKS, *sets(RUN), "--steps", 4, ranks=2)
    assert done.returncode == 0, done.stderr
    want = ("(20000.0, 20000.0) done", "(40000.0, 40000.0) skipped", "(1.0, inf) skipped", "(1.0, 1.0) done")
    assert done.stdout.splitlines() == [f"{rank} {line}" for rank in (0, 1) for line in want]


def test_no_update_depends_on_the_scale_of_gradients():
    """So gradients in fp16 are never scaled back."""
    config, found = tiny_config(), []
    for scale in (1.0, 64.0):
        model = random_model(config)
        optimizer = optimizer_of(model, config)
        for seed in range(3):
            (model(*pack(random_documents((50, 60), seed=seed)))[0] / 100 * scale).backward()
            optimizer.step(1.0, 0.9)
        found.append(optimizer.weights())
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-4, rtol=1e-3, msg=name)


THIRDS = tuple((1 / 3, packs, mult) for packs, mult in ((1, 1.0), (2, 1.5), (3, 1.7)))


def schedule_config(steps=300, **overrides) -> ts.Config:
    return tiny_config(stages=THIRDS, tokens=steps * 2 * 128, **overrides)


def test_learning_rate():
    """The stage's factor, then a line from the start of the cool-down to the floor at the end."""
    config = schedule_config(cooldown=0.6, lr_floor=0.15)
    rate = {step: ts.lr_multiplier(config, step) for step in (0, 99, 100, 120, 210, 300)}
    by_hand = {0: 1.0, 99: 1.0, 100: 1.5, 120: 1.5, 210: 0.5 * 1.7 + 0.5 * 0.15, 300: 0.15}
    assert rate == pytest.approx(by_hand)
    assert ts.lr_multiplier(schedule_config(cooldown=0.0), 299) == 1.7


def test_momentum():
    """0.85 to 0.95 over the warm-up, back over the cool-down; short runs shorten both."""
    config = schedule_config(3000, momentum=(0.85, 0.95, 300, 50))
    found = {s: ts.muon_momentum(config, s) for s in (0, 150, 300, 2950, 2975, 3000)}
    assert found == pytest.approx({0: 0.85, 150: 0.9, 300: 0.95, 2950: 0.95, 2975: 0.9, 3000: 0.85})
    short = schedule_config(30, momentum=(0.85, 0.95, 300, 50))  # 10 steps up, 3 down
    assert [ts.muon_momentum(short, s) for s in (0, 5, 10, 27)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert all(0.85 <= ts.muon_momentum(schedule_config(n), s) <= 0.95 for n in (1, 2, 3, 10) for s in range(n))


def test_loss_weights():
    """The next token's stays, others are gone at mtp_until; the prefix's is whole for a third, gone after two."""
    config = schedule_config(mtp_weights=(1.0, 0.5, 0.25), mtp_until=0.5, prefix_weight=0.3)
    found = [ts.loss_weights(config, step) for step in (0, 75, 100, 150, 200, 300)]
    by_hand = [[1, 0.5, 0.25, 0.3], [1, 0.25, 0.125, 0.3], [1, 1 / 6, 1 / 12, 0.3], [1, 0, 0, 0.15], [1, 0, 0, 0],
               [1, 0, 0, 0]]  # fmt: skip
    assert all(a == pytest.approx(b) for a, b in zip(found, by_hand, strict=True))
    assert ts.loss_weights(schedule_config(mtp_weights=(1.0,), prefix_weight=0.0), 10) == [1.0]


@pytest.mark.parametrize(
    ("tokens", "fewest", "packs"),
    [(34_000_000, 4, [4, 8]), (34_000_000, 8, [8]), (94_371_840, 8, [8, 16]), (340_000_000, 8, [8, 16, 32])],
)
def test_stage_rule(tokens, fewest, packs):
    """The batch B doubles after B ** 2 / 89 tokens, and rates rise with its root."""
    config = ts.Config(tokens=tokens, min_packs=fewest)
    assert [stage.packs for stage in config.stage_table] == packs
    assert fewest < 8 or all(n % 8 == 0 for n in packs), "they divide over eight GPUs"
    assert [stage.lr_mult for stage in config.stage_table] == pytest.approx([(n / 8) ** 0.5 for n in packs], abs=1e-3)
    done = 0.0
    for stage in config.stage_table[:-1]:
        done += stage.fraction * config.num_steps * stage.packs * 8192
        assert done == pytest.approx((stage.packs * 8192) ** 2 / 89, rel=0.01)


@pytest.mark.parametrize(
    ("steps", "stop", "resumed", "counted"),
    [
        (20, 14, 20, (12, 16, 20)),
        (20, 20, 32, (24, 28, 32)),  # the samples of the run that was finished are gone
        (40, 22, 28, (24, 28)),  # 16 and 20 had not been sampled
        (20, 14, 24, (16, 20, 24)),
        (20, 14, 40, (24, 28, 32, 36, 40)),
    ],
    ids=("same", "finished", "shorter", "longer", "much longer"),
)
def test_averages_with_norms(steps, stop, resumed, counted, tmp_path):
    """The last half is averaged, blended and rescaled by hand; a resumed run may end at another step."""
    rng = torch.Generator().manual_seed(3)
    weights = []  # after each step

    def run(first: int, last: int, length: int):
        config = tiny_config(tokens=length * 3 * 128, average=0.5)
        state = ts.build_state(config, ALONE, lambda text: None)
        if first > 1:
            ts.load_checkpoint(state, *ts.checkpoints(tmp_path))
        for state.step in range(first, last + 1):
            for slot in state.optimizer.slots:
                slot.master.add_(torch.randn(slot.master.shape, generator=rng))
            weights.append({slot.name: slot.master.clone() for slot in state.optimizer.slots})
            ts.sample_average(state)
        if last == length:
            ts.blend_average(state)
        return state

    ts.save_checkpoint(run(1, stop, steps), tmp_path, {})
    stored = safetensors.torch.load_file(ts.checkpoints(tmp_path)[0] / "optimizer.safetensors")
    assert any(name.endswith(".average") for name in stored) == (stop == 14), "only between first sample and end"
    state = run(stop + 1, resumed, resumed)
    averaged = {slot.name for slot in state.optimizer.slots if slot.rule.average}
    assert averaged >= {"qk_bank", "mlp_bank", "embed", "value_embed"}
    for slot in state.optimizer.slots:
        want = weights[-1][slot.name]
        if slot.name in averaged:
            share = slot.rule.average
            mean = torch.stack([weights[step - 1][slot.name] for step in counted]).mean(0)
            mixed = (1 - share) * want + share * mean
            matrices = mixed.flatten(0, -3) if slot.rule.optimizer == "normuon" else [mixed]
            originals = want.flatten(0, -3) if slot.rule.optimizer == "normuon" else [want]
            pairs = zip(matrices, originals, strict=True)
            want = torch.stack([m * (w.norm() / m.norm()) for m, w in pairs]).view(want.shape)
        torch.testing.assert_close(slot.master, want)
        torch.testing.assert_close(slot.param.view(want.shape), want)
    assert not any("average" in name for name in state.optimizer.state()), "the last checkpoint holds none"
