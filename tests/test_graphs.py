"""CUDA graphs of the training step: on a CPU with a stand-in that repeats the captured call, on a GPU as they are."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import sympy
import torch
import train_small as ts
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.scheduler import ForeachKernelSchedulerNode as Combination
from torch._inductor.scheduler import SchedulerNode

from tiny import ALONE, tiny_config, train_steps


class Repeated:
    """Stands for torch.cuda.CUDAGraph: runs the captured micro_step again and writes into what it returned then."""

    def pool(self):
        return None

    def capture(self, call, state, micro_batch, factor, fresh):
        held = [None if fresh or p.grad is None else p.grad.clone() for p in state.model.parameters()]
        nats, rows = call(state, micro_batch, factor)
        grads = [p.grad for p in state.model.parameters()]
        for grad, before in zip(grads, held, strict=True):
            if grad is not None:  # capturing computes nothing
                grad.copy_(torch.full_like(grad, float("nan")) if fresh else before)

        def repeat():
            params = list(state.model.parameters())
            kept = [p.grad for p in params]
            for p in params:
                p.grad = None
            new_nats, new_rows = call(state, micro_batch, factor)
            for p, grad, before in zip(params, grads, kept, strict=True):
                if grad is not None:
                    grad.copy_(p.grad if fresh else grad + p.grad)
                p.grad = before
            nats.copy_(new_nats)
            for old, new in zip(sum(rows, ()), sum(new_rows, ()), strict=True):
                old.copy_(new)

        self.replay = repeat
        for index_T, grad_TC in rows:
            index_T.fill_(-1)
            grad_TC.fill_(float("nan"))
        return nats.fill_(float("nan")), rows


@pytest.fixture
def stand_in(monkeypatch):
    @contextlib.contextmanager
    def capture(graph, **options):
        with monkeypatch.context() as patch:
            call = ts.micro_step

            def micro_step(state, micro_batch, factor):
                fresh = next(state.model.parameters()).grad is None
                return graph.capture(call, state, micro_batch, factor, fresh)

            patch.setattr(ts, "micro_step", micro_step)
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Repeated)
    monkeypatch.setattr(torch.cuda, "graph", capture)


def curve(config, dataset, graphs: bool, warm_up=lambda state: None):
    """Losses of all steps, the weights after them, and the graphs; warm_up(state) is called first."""
    state = ts.build_state(config, ts.start_ranks() if torch.cuda.is_available() else ALONE, lambda text: None)
    if not graphs:
        state.graphs = None
    elif state.graphs is None:  # on a CPU
        state.graphs = {}
    warm_up(state)
    losses = train_steps(state, dataset, config.num_steps)
    return losses, {n: p.detach().float() for n, p in state.model.named_parameters()}, state.graphs


STAGES = ((0.5, 4, 1.0), (0.5, 2, 1.2))  # four micro-batches, then two


@pytest.mark.parametrize("mtp_weights", ((1.0,), (1.0, 0.5)))
def test_replayed_steps_are_steps(stand_in, dataset, mtp_weights, capsys):
    """Several micro-batches, two stages, changing loss weights; the warm-up captures everything."""
    captured = set()
    config = tiny_config(stages=STAGES, micro_batch_tokens=128, mtp_weights=mtp_weights)
    config = dataclasses.replace(config, tokens=round(8 * config.step_tokens))

    def warm_up(state):
        ts.warm_up(state, lambda text: None)
        captured.update(state.graphs)

    want, weights, _ = curve(config, dataset, False)
    got, same, graphs = curve(config, dataset, True, warm_up)
    assert set(graphs) == captured and len(captured) == 2
    assert len(set(want)) == 8 and got == want and all(torch.equal(same[n], weights[n]) for n in weights)
    assert not capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("options", ({}, {"dtype": "float16", "attention": "sdpa"}), ids=("bf16", "fp16 sdpa"))
def test_graphs_gpu(dataset, options):
    """As the same steps without graphs but for the order of sums."""
    config = ts.Config(
        num_layers=4, width=256, mlp_width=1024, no_attention_layers=(), long_layers=(3,), key_offset_layers=(3,),
        value_embed_layers=(1,), shared_input_from=3, bigram_rows=4096, pack_tokens=1024,
        max_seq_len=512, window_long=512, stages=((0.5, 4, 1.0), (0.5, 2, 1.2)), micro_batch_tokens=1024,
        vocab_size=dataset.tokenizer.vocab_size, max_epochs=1000, **options)  # fmt: skip
    config = dataclasses.replace(config, tokens=round(12 * config.step_tokens))
    want, weights, _ = curve(config, dataset, False)
    got, same, graphs = curve(config, dataset, True)
    assert len(graphs) == 2
    assert got == pytest.approx(want, rel=2e-3) and want[-1] < want[0]
    for name, weight in weights.items():
        assert torch.nn.functional.cosine_similarity(same[name].flatten(), weight.flatten(), 0) > 0.99, name


def test_compiler_choices(monkeypatch):
    """What it builds on in torch is there: rows of up to 2,048 numbers are held, only small kernels are combined."""
    nodes = [SimpleNamespace(get_read_write_buffers_sizes=lambda size=size: size) for size in (100, 2**24)]
    default = staticmethod(lambda scheduler: [nodes])
    assert Combination._default_group_nodes_for_combo_kernels and SchedulerNode.get_read_write_buffers_sizes
    monkeypatch.setattr(Combination, "_default_group_nodes_for_combo_kernels", default)
    monkeypatch.setattr(Combination, "group_algorithm_for_combo_kernels", default)
    choices = ts.compiler_choices()
    assert Combination.group_nodes_for_combo_kernels(None) == [nodes[:1]]
    for hint in (ReductionHint.INNER, ReductionHint.DEFAULT):
        features = SimpleNamespace(reduction_numel=sympy.Integer(2048), get_reduction_hint=lambda hint=hint: hint)
        assert choices.should_use_persistent_reduction(features, False)
