"""What only train_medium.py has: rules, derived sizes, fp8 products, recomputation and its memory.

Packing and the optimizer's step are tested for both scripts in test_model.py and test_optimizer.py, cached decoding in
test_generation.py, 20 steps in test_interface.py, a whole run and its finetuning in test_finetune.py.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import train_medium as tm

import references
from tiny import pack, random_documents, random_model, tiny_medium


def config_of(*flags) -> tm.Config:
    return tm.make_config(tm.build_parser().parse_args(list(flags)))


def test_sizes():
    """24 layers of width 1536: counted on the model itself, and by hand."""
    config = tm.Config()
    tm.check_config(config)
    model = tm.GPT(config, device="meta")
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    D, V = 1536, 32768
    assert (config.width, config.num_heads, config.mlp_width) == (D, 12, 4 * D)
    assert sizes["qk_bank"] + sizes["vo_bank"] + sizes["mlp_bank"] == 24 * 12 * D * D
    assert sizes["embed"] == sizes["unembed"] == V * D and sizes["value_embed"] == 12 * V * D
    assert 1.38e9 < sum(sizes.values()) < 1.39e9
    assert tm.matmul_weights(config) == 24 * 12 * D * D + V * D == 729_808_896
    assert config.long_layers == (3, 7, 11, 15, 19, 23) == config.key_offset_layers
    assert config.value_embed_layers == tuple(range(1, 24, 2))
    other = tm.Config(num_layers=5)
    assert other.width == 384 and other.long_layers == (3, 4) and other.value_embed_layers == (0, 2, 4)
    assert tm.Config(num_layers=5, long_layers=(1,)).key_offset_layers == (1,)


def test_default_recipe_is_nanochats():
    """At 24 layers the rules give its 5.84 billion tokens, 5,568 steps of 2 ** 20, rate 0.0283 and decay 0.0597."""
    config = tm.Config()
    assert (config.tokens, config.num_steps) == (8 * 729_808_896, 5568)
    assert config.stage_table[0].packs * config.pack_tokens == 2**20 and config.stage_table[0].packs % 8 == 0
    table = tm.parameter_table(config)
    assert config.muon_lr == pytest.approx(0.0283) and table["mlp_bank"].weight_decay == pytest.approx(0.0597, rel=1e-2)
    assert config.adam_lr * table["unembed"].lr_mult == pytest.approx(0.0064 / 2**0.5)
    moved = 5568 * 0.0064 * 60 / 2**0.5  # by the tables over the run, in units of their decay, which add up to 8
    assert table["value_embed"].weight_decay == pytest.approx(8 / moved, rel=1e-2) and moved * 0.015 > 8


def test_sizes_and_rates_follow_the_flags(tmp_path):
    """A depth alone sets everything; what is given stays; a saved config comes back as it was."""
    config = config_of("--num-layers", "12")
    assert (config.width, config.mlp_width, config.tokens) == (768, 3072, 8 * (12 * 12 * 768**2 + 32768 * 768))
    assert config.stages == ((1.0, 64, 1.0),) and config.num_steps == 1680
    wider = config_of("--num-layers", "12", "--width", "1024", "--muon-lr", "0.5", "--tokens", "34000000")
    assert (wider.width, wider.mlp_width, wider.muon_lr, wider.tokens) == (1024, 4096, 0.5, 34_000_000)
    assert wider.stage_table[0].packs == 16 and wider.adam_lr == float(f"{0.0064 * tm.rate_rule(34e6, 2**17):.3g}")
    assert config_of("--steps", "7").num_steps == 7
    (tmp_path / "config.json").write_bytes(tm.seal({"config": dataclasses.asdict(wider)}))
    assert tm.read_config(tmp_path) == wider
    shorter = dataclasses.replace(wider, tokens=1000)  # what is stated already is not derived again
    assert (shorter.muon_lr, shorter.adam_lr, shorter.stages) == (wider.muon_lr, wider.adam_lr, wider.stages)


@pytest.fixture
def fp8_everywhere(monkeypatch):
    """The same casts and products on the CPU, with plain code in place of the kernels."""
    references.fp8_on_cpu(monkeypatch, tm)


def weights8(*weights):
    return [tm.weights_to_fp8(w[None])[0] for w in weights]


@pytest.mark.parametrize("power", (-20, 0, 10))
def test_linear8_is_exact_where_fp8_is(fp8_everywhere, power):
    """With powers of two as factors and few-bit integers as values only the scale of a result is rounded, in fp32."""
    rng = torch.Generator().manual_seed(0)
    x, w, g = (torch.randint(-1, 2, shape, generator=rng).float() for shape in ((32, 16), (48, 16), (32, 48)))
    for t in (x, w, g):
        t[0], t[0, 0] = 0.0, 7.0  # the longest row; 448 / 64, 57344 / 2 ** 13
    x, w, g = x.requires_grad_(), (w * 2.0**power).requires_grad_(), g * 2.0 ** (power - 20)
    y = tm.linear8(x, w, *weights8(w))
    got, want = (torch.autograd.grad(out, (x, w), g) for out in (y, F.linear(x, w)))
    for a, b in zip((y, *got), (F.linear(x, w), *want), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=0)


def test_fp8_of_zeros(fp8_everywhere):
    """The first backward of a zero projection, and rows of zeros: no NaN."""
    x, w = torch.zeros(16, 16, requires_grad=True), torch.zeros(16, 16, requires_grad=True)
    zero8, one8 = weights8(w, w + 1)
    outputs = tm.linear8(x, w, zero8), tm.mlp_relu2(x, w, w, zero8, zero8), tm.mlp_relu2(x + 1, w + 1, w, one8, zero8)
    for y in outputs:
        x.grad = w.grad = None
        y.sum().backward()
        assert y.abs().max() == 0 and x.grad.isfinite().all() and w.grad.isfinite().all()


def test_recomputation_changes_nothing():
    found = []
    for recompute in (False, True):
        model = random_model(tiny_medium(mudd_width=64, recompute=recompute))
        (model(*pack(random_documents((60, 40, 28))))[0] / 128).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_micro_batch_limit(monkeypatch):
    """What it must answer for cards of 140, 80 and 24 GiB, with 16.7 GB of weights and states on them."""
    monkeypatch.setattr(tm, "bf16_is_native", lambda: True)
    for gib, recompute, least, most in ((140, False, 32768, 32768), (80, False, 16384, 32767), (48, False, 8192, 24576),
                                        (40, True, 32768, 32768), (24, False, -1e9, 0)):  # fmt: skip
        limit = tm.micro_batch_limit(tm.Config(recompute=recompute), int(gib * 2**30 - 16.7e9))
        assert least <= limit <= most, (gib, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", (False, True))
def test_linear8_gpu(compiled):
    """The hardware's products against the emulated ones of the same casts, and against fp32; sizes of the model."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    torch.manual_seed(0)
    T, K, N = 4096, 1536, 1536
    x = F.rms_norm(torch.randn(T, K, device="cuda"), (K,)).bfloat16().requires_grad_()
    w = (torch.randn(N, K, device="cuda") * K**-0.5).bfloat16().requires_grad_()
    g = (torch.randn(T, N, device="cuda") * 1e-6).bfloat16()
    function = torch.compile(tm.linear8, fullgraph=True) if compiled else tm.linear8
    y = function(x, w, *weights8(w))
    got = (y, *torch.autograd.grad(y, (x, w), g))
    slow = [t.detach().float().requires_grad_() for t in (x, w)]
    exact = F.linear(*slow)
    want = (exact, *torch.autograd.grad(exact, slow, g.float()))
    rounded = [t8.float() * scale for t8, scale in map(tm.to_fp8, (x, w))]
    for name, a, b, most in zip("y dx dw".split(), got, want, (0.06, 0.1, 0.1), strict=True):
        error = ((a.float() - b).norm() / b.norm()).item()
        assert a.dtype == torch.bfloat16 and error < most, f"{name}: {error}"
    assert ((y.float() - F.linear(*rounded)).norm() / exact.norm()).item() < 0.01


@pytest.mark.gpu
def test_model_gpu():
    """Four layers of the real width, compiled: fp8 against bf16, and recomputation against neither, in less memory."""
    results, peaks = {}, {}
    for name, options in {"bf16": {"fp8": False}, "fp8": {}, "again": {"recompute": True}}.items():
        config = tm.Config(num_layers=4, width=1536, tokens=10**6, stages=((1.0, 1, 1.0),),
                           fp8_head=False, **options)  # fmt: skip
        torch._dynamo.reset()
        state = tm.build_state(config, tm.start_ranks(), lambda text: None)
        rng = torch.Generator(device="cuda").manual_seed(1)
        with torch.no_grad():
            for bank in (state.model.vo_bank, state.model.mlp_bank):
                bank.add_(torch.randn(bank.shape, generator=rng, device="cuda") * 0.01)
        lengths = (1001, 701, 1001, 101, 1001, 201, 1001, 1001, 1001, 1001)  # 8,000 inputs, a multiple of 16
        packed = pack(random_documents(lengths, vocab=32768))
        batch = [*(t.cuda() for t in packed[:4]), 1024]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, _ = state.forward(*batch)
        (loss / 8000).backward()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        results[name] = loss.item() / 8000, {n: p.grad.float() for n, p in state.model.named_parameters()}
        del state
    for name in ("fp8", "again"):
        assert results[name][0] == pytest.approx(results["bf16"][0], rel=5e-3)
        for parameter, want in results["bf16"][1].items():
            got = results[name][1][parameter]
            if want.norm() > 0 and want.numel() > 10_000:  # in sums to few numbers most cancels
                assert F.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.95, (name, parameter)
    assert peaks["again"] < 0.9 * peaks["fp8"], peaks
