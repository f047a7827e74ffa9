"""What the tools in runs/ may use of a script, what makes a run, and 20 steps as they always were."""

import dataclasses
import re

import pytest
import torch
import train_medium as tm
import train_small as ts

from tiny import ALONE, ROOT, script, tiny_config, tiny_medium, train_steps, val_bpb

SCRIPTS = pytest.mark.parametrize("module", (ts, tm), ids=("small", "medium"))
# They take no run, and train or plan with the script of this checkout.
WITH_OUR_SCRIPT = "check_nodes finetune_hf kernel_cache scaling_plan train_encoder encoder_config encoder_model".split()
WITH_OUR_SCRIPT += ["train_plain"]
TOOLS = sorted(path for path in ROOT.glob("runs/**/*.py") if path.stem not in WITH_OUR_SCRIPT)


# All that tools use of a script. Where one changes its meaning, INTERFACE rises.
NAMES = """
    SCALARS Stage UpdateRule UserError GPT Tokenizer Dataset Ranks TrainState Pretraining ShardReader PackLoader
    empty_packs fill_pack validation_documents scored_documents validation_batch bits_per_byte
    lr_multiplier muon_momentum start_ranks choose_dtype choose_attention sdpa_attention
    build_state Optimizer train micro_step set_sparse_gradients
    CHECKPOINT_FILES checkpoints newest_whole check_checkpoint load_checkpoint
    read_config read_description build_parser change_config resumed_config run_command
""".split()


@SCRIPTS
def test_interface_names_exist(module):
    """Each name once, and all of them in both scripts; and what tools ask of a GPT object."""
    assert module.INTERFACE == 10
    assert len(set(NAMES)) == len(NAMES)
    assert [name for name in NAMES if not hasattr(module, name)] == []
    model = module.GPT(tiny_config() if module is ts else tiny_medium())
    used = "config embed head windows attention trunk layer_weights logits offset_keys forward"
    assert [name for name in used.split() if not hasattr(model, name)] == []


# script.NAME, X.script.NAME and getattr(script, "NAME")
USED = re.compile(r'\bscript\.(\w+)|getattr\(\s*(?:\w+\.)*script, "(\w+)"')


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.name)
def test_tools_use_only_the_interface(path):
    """So a tool works with the script that lies in a run directory, of whatever size, if its INTERFACE is the same."""
    source = path.read_text(encoding="utf-8")
    used = {name for pair in USED.findall(source) for name in pair if not name.startswith("__")}
    assert sorted(used - {"", "INTERFACE", *NAMES}) == []
    assert not re.search(r"^ *(from|import) train_(small|medium)", source, re.M)


@SCRIPTS
def test_every_field_is_a_flag_with_help(module):
    """Its comment in the source is the help; a run that is resumed may change some of them."""
    fields = {field.name for field in dataclasses.fields(module.Config)}
    actions = {action.dest: action for action in module.build_parser()._actions}
    assert fields <= actions.keys() and set(module.FREE_ON_RESUME) <= fields
    assert all(actions[name].help for name in fields)
    assert actions["prefix_weight"].help.startswith("weight of a second target, "), "a comment in the line above"
    assert actions["adam_eps"].help.endswith("[1e-10]")
    numbers = {f.name for f in dataclasses.fields(module.Config) if type(f.default) in (int, float, tuple)}
    assert {name for names in module.RANGES for name in names.split()} == numbers, "each has a range"


@SCRIPTS
def test_config_of_an_older_script_is_read(module, tmp_path):
    """Fields that this Config does not have are left out."""
    config = tiny_config() if module is ts else tiny_medium()
    values = dataclasses.asdict(config) | {"source": "", "top_k": 0, "core_items": 5}
    (tmp_path / "config.json").write_bytes(module.seal({"config": values}))
    assert module.read_config(tmp_path) == config


# 20 steps in fp32 on a CPU, since large tables are updated by RMSProp. Other CPUs change them by
# 2e-7; that takes a larger epsilon in Adam, because zero weights begin with gradients of rounding.
SMALL_LOSSES = """
    5.7732358 5.5165706 5.1165600 4.7564969 4.4304605 4.1781831 3.9785898 3.8238800 3.6819808 3.6150913
    3.5053463 3.4136717 3.3872542 3.2740381 3.1394174 3.1065686 3.0860169 3.0436029 2.9747691 2.9400427
"""
MEDIUM_LOSSES = """
    5.7673593 5.2039728 4.4066463 3.6422865 2.9208145 2.4211793 2.0799463 1.8612406 1.7317829 1.5847309
    1.5336628 1.5557790 1.5707189 1.4127939 1.3082899 1.3774655 1.3426476 1.3667467 1.2677599 1.3118660
"""


@pytest.mark.parametrize(
    ("config", "losses", "bpb"),
    ((tiny_config(lr_floor=0.15, mtp_until=0.5), SMALL_LOSSES, 2.9179494), (tiny_medium(), MEDIUM_LOSSES, 1.3651398)),
    ids=("small", "medium"),
)
def test_twenty_steps_are_those_of_before(dataset, config, losses, bpb):
    """Losses of the tiny run and its bits per byte, within rounding."""
    config = dataclasses.replace(config, attention="sdpa", dtype="float32", adam_eps=1e-4)
    module = script(config)
    state = module.build_state(config, ALONE, lambda text: None)
    state.model.prefix_ids[: config.vocab_size] = torch.tensor(dataset.tokenizer.prefix_ids())
    found = train_steps(state, dataset, config.num_steps)
    assert found == pytest.approx([float(loss) for loss in losses.split()], rel=1e-5)
    assert val_bpb(state.forward, config, dataset, state.micro_packs) == pytest.approx(bpb, rel=1e-5)
