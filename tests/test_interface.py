"""What the tools in runs/ may use of a script, what became of the old commands, and 20 steps as they always were."""

import ast
import dataclasses

import pytest
import torch
import train_medium as tm
import train_small as ts

from conftest import ALONE, ROOT, loader_of, script, tiny_config, tiny_medium, validation_of

SCRIPTS = pytest.mark.parametrize("module", (ts, tm), ids=("small", "medium"))
TOOLS = sorted(ROOT.glob("runs/*.py"))


# ---- the names

# All that tools use of a script. Where one changes its meaning, INTERFACE rises.
NAMES = """
    Config Stage Policy UserError GPT Tokenizer Dataset Ranks TrainState Job Batch MicroBatch ShardReader PackLoader
    Log Stopper empty_packs fill_pack validation_documents scored_documents validation_batch bits_per_byte
    lr_multiplier muon_momentum stage_index start_ranks choose_dtype choose_attention
    sdpa_attention peak_flops peak_memory_gib describe_machine build_state build_optimizer warm_up train train_step
    checkpoints newest_whole check_checkpoint load_checkpoint save_checkpoint lock_run_dir fingerprint
    read_config read_description write_description write_atomically FREE_ON_RESUME
    FROZEN FROZEN_ON_RESUME build_parser config_changes change_config make_config run_command
""".split()


@SCRIPTS
def test_interface_names_exist(module):
    """Each name once, and all of them in both scripts."""
    assert module.INTERFACE == 7
    assert len(set(NAMES)) == len(NAMES)
    assert [name for name in NAMES if not hasattr(module, name)] == []


@SCRIPTS
def test_names_of_a_model(module):
    """What tools ask of a GPT object."""
    model = module.GPT(tiny_config() if module is ts else tiny_medium())
    used = "config embed head windows attention trunk layer_weights logits offset_keys forward"
    assert [name for name in used.split() if not hasattr(model, name)] == []


def names_of_script(source: str) -> set[str]:
    """Each NAME in script.NAME, X.script.NAME and getattr(script, "NAME")."""

    def is_script(node) -> bool:
        if isinstance(node, ast.Name):
            return node.id == "script"
        return isinstance(node, ast.Attribute) and node.attr == "script"

    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_script(node.value):
            names.add(node.attr)
        is_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        if is_getattr and is_script(node.args[0]) and isinstance(node.args[1], ast.Constant):
            names.add(node.args[1].value)
    return {name for name in names if not name.startswith("__")}


def test_names_of_script_finds_names():
    source = 'script.A(self.script.B, run.script.C.D)\ngetattr(script, "E", None)\nx: script.F = script.__file__'
    assert names_of_script(source) == set("ABCEF")


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.name)
def test_tools_use_only_the_interface(path):
    """So a tool works with the script that lies in a run directory as long as its INTERFACE is the same."""
    used = names_of_script(path.read_text(encoding="utf-8")) - {"INTERFACE"}
    assert sorted(used - set(NAMES)) == []


def test_interface_is_used():
    """The tools together use names of a script: else the test above would prove nothing."""
    used = set().union(*(names_of_script(path.read_text(encoding="utf-8")) for path in TOOLS))
    assert {"UserError", "checkpoints", "start_ranks", "write_atomically"} <= used


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.name)
def test_tools_import_no_training_script(path):
    """They use the copy of a run directory, which may be of another version or size."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert not imported & {"train_small", "train_medium"}


# ---- the command line


@SCRIPTS
@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("pretrain", "leave the word out"),
        ("sft", "runs/finetune.py"),
        ("sample", "runs/sample.py"),
        ("core", "runs/score_core.py"),
    ],
)
def test_old_commands(module, capsys, word, advice):
    """One sentence that names what to call now, and exit code 1, whatever follows the word."""
    for rest in ([], ["--from", "out/run", "--prompt", "x"]):
        assert module.main([word, *rest]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        assert advice in err and module.__name__ in err
        assert "runs/" not in advice or (ROOT / advice).is_file()


@SCRIPTS
@pytest.mark.parametrize("flag", ("--from", "--prompt"))
def test_old_flags(module, capsys, flag):
    assert module.main([flag, "x"]) == 1
    assert capsys.readouterr().err.startswith(f"error: unknown flag {flag}; ")


@SCRIPTS
@pytest.mark.parametrize("name", ("source", "sft_epochs", "core_items", "temperature", "top_k", "top_p"))
def test_old_fields(module, capsys, name):
    """Fields that left the Config are told like any unknown one, and a config.json that still holds them is read."""
    assert module.main(["--set", f"{name}=1"]) == 1
    assert f"unknown Config field {name}" in capsys.readouterr().err


@SCRIPTS
def test_config_of_an_older_script_is_read(module, tmp_path):
    """Fields that this Config does not have are left out."""
    (tmp_path / f"{module.__name__}.py").touch()
    config = tiny_config() if module is ts else tiny_medium()
    values = dataclasses.asdict(config) | {"source": "", "top_k": 0, "core_items": 5}
    module.write_description(tmp_path, {"config": values})
    assert module.read_config(tmp_path) == config


# Fields of the model that a resumed run may change: kernels and precision, the loss, and the vocabulary, which the
# tokenizer sets and which is compared byte for byte.
FREE = {"vocab_size", "fp8", "fp8_head", "recompute", "ahead", "ahead_until", "prefix_weight"}
OTHER = {
    "num_layers": 6, "width": 128, "head_dim": 32, "mlp_width": 256, "max_seq_len": 32, "no_attention_layers": (),
    "long_layers": (0,), "key_offset_layers": (), "value_embed_layers": (), "shared_input_from": 3, "gate_width": 4,
    "bigram_rows": 501, "x0_injection": False, "backout_layer": 1,
    "mix_width": 8,
    "attention_scale": 0.2, "rotary_base": 10.0, "window_short": 4, "window_long": 16, "softcap": (15.0, 0.0, 15.0),
    "window_pattern": "S", "key_offset": False, "value_embeds": False, "tied": True, "backout": False,
}  # fmt: skip


@pytest.mark.parametrize("make", (tiny_config, tiny_medium), ids=("small", "medium"))
def test_every_field_of_the_model_is_frozen(make):
    """--resume refuses to change what the model computes; a new field belongs into FROZEN or above."""
    base = make()
    names = [field.name for field in dataclasses.fields(base)]
    model = names[: names.index("pack_tokens")]
    refused = []
    for name in set(model) - FREE:
        change = {name: OTHER[name]}
        try:
            script(base).change_config(base, change, None, script(base).FROZEN_ON_RESUME, "--resume")
        except script(base).UserError as error:
            assert "--resume cannot change" in str(error), error
            refused.append(name)
    assert sorted(refused) == sorted(set(model) - FREE)


# ---- numbers

# 20 steps in fp32 on a CPU, since large tables are updated by RMSProp. Other CPUs change them by
# 2e-7; the medium model needs a larger epsilon in Adam for that, because zero weights begin with gradients of rounding.
SMALL_LOSSES = """
    5.7733727 5.5304375 5.1206069 4.7580018 4.4423370 4.1906557 3.9819863 3.8291042 3.6788201 3.5990148
    3.4775405 3.3716278 3.3429573 3.2170782 3.0771711 3.0378785 3.0081649 2.9676263 2.8937771 2.8640814
"""
MEDIUM_LOSSES = """
    5.7651176 5.2267365 4.4526525 3.6349120 2.9139824 2.4070153 2.0748596 1.8561041 1.7322729 1.5910391
    1.5345724 1.5499028 1.5602124 1.4055029 1.3093331 1.3683283 1.3402594 1.3631612 1.2597708 1.3080270
"""


@pytest.mark.parametrize(
    ("config", "losses", "bpb"),
    ((tiny_config(), SMALL_LOSSES, 2.8445460), (tiny_medium(adam_eps=1e-4), MEDIUM_LOSSES, 1.3608097)),
    ids=("small", "medium"),
)
def test_twenty_steps_are_those_of_before(dataset, config, losses, bpb):
    """Losses of the tiny run and its bits per byte, within rounding."""
    config = dataclasses.replace(config, attention="sdpa", dtype="float32")
    module = script(config)
    state = module.build_state(config, ALONE, lambda text: None)
    state.model.prefixes[: config.vocab_size] = torch.tensor(dataset.tokenizer.prefixes())
    loader = loader_of(dataset, config)
    found = []
    for _ in range(config.num_steps):
        found.append(module.train_step(state, loader.next()).item())
    loader.close()
    assert found == pytest.approx([float(loss) for loss in losses.split()], rel=1e-5)

    token_bytes = torch.zeros(config.padded_vocab, dtype=torch.long)
    token_bytes[: config.vocab_size] = torch.from_numpy(dataset.tokenizer.token_bytes)
    validation = validation_of(dataset, config)
    assert module.bits_per_byte(state.forward, validation, state.packs, token_bytes, ALONE) == pytest.approx(
        bpb, rel=1e-5
    )
