"""runs/tutorials/train_plain.py trains as train_small.py does, and needs no module but torch and numpy."""

import collections
import dataclasses
import re
import sys

import numpy as np
import pytest
import torch
import train_small as ts

from tiny import ALONE, CPU, ROOT, tiny_config, train_steps, val_bpb

PATH = ROOT / "runs" / "tutorials" / "train_plain.py"
sys.path.insert(0, str(PATH.parent))
import train_plain as plain  # noqa: E402

STEPS = 20


def plain_config(config: ts.Config) -> plain.Config:
    """The same recipe for train_plain, of what tiny.TINY sets."""
    same = ("num_layers", "width", "head_dim", "mlp_width", "no_attention_layers", "long_layers", "key_offset_layers",
            "value_embed_layers", "paired_layers", "exclusive_layers", "gated_layers", "shared_input_from",
            "bigram_rows", "trigram_rows", "max_seq_len", "window_short", "window_long", "pack_tokens",
            "max_docs_per_pack")  # fmt: skip
    fields = {name: getattr(config, name) for name in same}
    stages = tuple(plain.Stage(*row) for row in config.stages)
    return plain.Config(**fields, vocab_size=config.padded_vocab, steps=config.num_steps, stages=stages)


def small_state(dataset) -> ts.TrainState:
    config = tiny_config(attention="sdpa", dtype="float32", val_tokens=10**6, mudd_width=256)
    state = ts.build_state(config, ALONE, say=lambda text: None)
    state.model.prefix_ids[: config.vocab_size] = torch.tensor(dataset.tokenizer.prefix_ids())
    return state


def randomise(state) -> None:
    """Adds noise: zero gates and scalars would hide mistakes, and zero MLP outputs give gradients of rounding."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in state.model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.02)
    state.optimizer.reset()


def copy_weights(small, model) -> None:
    """Writes all weights of train_small's model into that of train_plain, whose banks hold a row for every layer."""
    layers = list(small.config.attention_layers)
    scalars = ("keep_before_attention", "keep_before_mlp", "scale_v", "scale_o", "scale_down", "share_ngram")
    with torch.no_grad():
        names = ("embed", "bigram_embed", "bigram_signs", "trigram_embed", "trigram_proj", "value_gate", "output_gate",
                 "exclusion")
        for name in (*names, "mix_in", "mix_out"):
            getattr(model, name).copy_(getattr(small, name))
        model.value_embed.copy_(small.value_embed.view_as(model.value_embed))
        model.qk[layers] = small.qk_bank.view_as(model.qk[layers])
        model.v[layers] = small.vo_bank[0::2]
        model.o[layers] = small.vo_bank[1::2]
        model.up.copy_(small.mlp_bank[0::2])
        model.down.copy_(small.mlp_bank[1::2])
        for row, name in enumerate(scalars):
            getattr(model, name).copy_(small.scalars[row])


def test_losses_and_validation_are_those_of_train_small_at_every_step(dataset_dir, dataset):
    small = small_state(dataset)
    randomise(small)
    plain_dataset = plain.Dataset(dataset_dir)
    model = plain.Model(plain_config(small.config)).to(CPU)
    copy_weights(small.model, model)
    state = collections.defaultdict(float)

    ours = [plain.train_step(model, state, plain_dataset, step) for step in range(STEPS)]
    theirs = train_steps(small, dataset, STEPS)

    assert small.config.num_steps == STEPS
    assert len({plain.stage_index(model.config, step) for step in range(STEPS)}) == 2
    assert ours[-1] < ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    bpb = val_bpb(small.model, small.config, dataset)
    assert plain.bits_per_byte(model, plain_dataset) == pytest.approx(bpb, rel=1e-5)


def test_schedule_is_that_of_train_small_over_the_small_recipe():
    small = ts.Config()
    config = plain.Config()
    same = plain_config(small)
    assert dataclasses.replace(config, stages=()) == same
    for stage, own in zip(config.stages, small.stage_table, strict=True):
        assert dataclasses.astuple(stage) == pytest.approx(dataclasses.astuple(own), rel=2e-3)
    for step in range(config.steps):
        assert plain.lr_multiplier(config, step) == pytest.approx(ts.lr_multiplier(small, step), rel=1e-12)
        assert plain.muon_momentum(config, step) == pytest.approx(ts.muon_momentum(small, step), rel=1e-12)
        assert plain.stage_index(config, step) == ts.stage_index(small, step)


def test_the_script_needs_only_torch_and_numpy():
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", PATH.read_text(encoding="utf-8"), re.M))
    assert imported - sys.stdlib_module_names == {"torch", "numpy"}


def test_the_command_prints_losses_bits_per_byte_and_samples(dataset_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_plain.py", "--data", str(dataset_dir), "--steps", "2"])
    plain.main()
    torch.set_default_device(None)  # which it has set
    out = capsys.readouterr().out
    assert "step 1 | loss" in out and "step 2 | loss" in out and "bits per byte" in out
    assert out.count("---") == 3


def test_missing_text_is_one_sentence(dataset_dir, tmp_path):
    with pytest.raises(SystemExit, match="no dataset at .*nowhere"):
        plain.Dataset(tmp_path / "nowhere")
    dataset = plain.Dataset(dataset_dir)
    config = plain.Config(pack_tokens=1024, max_seq_len=512)
    with pytest.raises(SystemExit, match="no more text"):
        for _ in range(100):
            dataset.pack(config)
