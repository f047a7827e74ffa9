"""The exported model against the training script, and as trainers use it, through its own and transformers' classes."""

import math
import random
from pathlib import Path
from typing import NamedTuple

import engine
import peft
import pytest
import sft
import torch
from lib import export_model
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from commands import write_run
from references import own_logits
from test_export import export_run
from tiny import tiny_config, tiny_medium

SIZES = {"vocab_size": 900, "dtype": "float32"}
PLAIN = {"bigram_rows": 0, "value_embed_layers": (),
         "key_offset_layers": (), "mudd_width": 0, "shared_input_from": 3}  # fmt: skip
HEADS = {"no_attention_layers": (), "paired_layers": (0, 2), "exclusive_layers": (0, 1), "gated_layers": (2, 3)}
KINDS = {
    "small": lambda: tiny_config(**SIZES, **HEADS),
    "medium": lambda: tiny_medium(**SIZES),
    "plain": lambda: tiny_config(**SIZES, **PLAIN),  # without all that can be switched off
    "tied": lambda: tiny_medium(**SIZES, tied=True, bigram_rows=500, trigram_ratio=2.5, mudd_width=8),
}


class Exported(NamedTuple):
    run: engine.Run
    model: torch.nn.Module  # of the exported folder
    folder: Path

    def reference(self, ids) -> torch.Tensor:
        """Logits of the training script's forward for one text."""
        return own_logits(self.run, ids)


@pytest.fixture(scope="session", params=KINDS)
def exported(request, bpe, tmp_path_factory) -> Exported:
    folder = tmp_path_factory.mktemp("exported")
    run_dir = write_run(folder / "run", bpe, chat=True, config=KINDS[request.param]())
    export_run(run_dir, folder / "model")
    run = engine.load_run(run_dir, device="cpu")
    model = export_model.DecoderStackForCausalLM.from_pretrained(folder / "model")
    return Exported(run, model.eval(), folder / "model")


@pytest.fixture
def own_model(exported):
    """A copy of the model that a test may change."""
    return export_model.DecoderStackForCausalLM.from_pretrained(exported.folder).eval()


def random_rows(*lengths) -> list[list[int]]:
    rng = random.Random(3)
    return [rng.choices(range(900), k=length) for length in lengths]


def pad_rows(rows, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of rows with padding on one side."""
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones(len(row), dtype=torch.long) for row in rows]
    options = {"batch_first": True, "padding_side": side}
    return pad_sequence(ids, padding_value=5, **options), pad_sequence(mask, **options)


def assert_same(found, expected) -> None:
    """Logits are between 0 and 23."""
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_logits_are_the_scripts(exported):
    """Texts as long as the context, which the windows do not span, alone and beside padding."""
    rows = random_rows(20, 1, 64)
    with torch.no_grad():
        assert_same(exported.model(torch.tensor(rows[2:])).logits[0], exported.reference(rows[2]))
        for side in ("left", "right"):
            ids, mask = pad_rows(rows, side)
            logits = exported.model(ids, attention_mask=mask).logits
            assert logits.dtype == torch.float32 and logits.isfinite().all()
            for row, found, is_real in zip(rows, logits, mask.bool(), strict=True):
                assert_same(found[is_real], exported.reference(row))


def test_cache_in_parts(own_model):
    """Prefill, more at once, then token by token: the logits of one pass, also beside padding and after crop.

    In float64, as products of one row and of many round differently, each CPU's in its way.
    """
    model = own_model.double()
    ids, mask = pad_rows(random_rows(60, 33, 45), "left")
    parts = [20, 9, *[1] * 31]
    for cache in (None, DynamicCache(), DynamicCache(config=model.config)):
        found, start = [], 0
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            for count in parts:
                end = start + count
                out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
                cache, start = out.past_key_values, end
                found.append(out.logits)
        assert_same(torch.cat(found, 1)[mask.bool()], expected[mask.bool()])
        assert cache.get_seq_length() == 60

    cache.crop(-15)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    with torch.no_grad():
        order = [2, 0, 1]
        logits = model(ids[order, 45:], attention_mask=mask[order], past_key_values=cache).logits
    assert_same(logits, expected[order, 45:])


def test_generation(exported):
    """With a cache as without, beams too, and greedy as the project's own decoder."""
    rows = random_rows(20, 3, 40)
    ids, mask = pad_rows(rows, "left")
    run = exported.run
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": run.tokenizer.bos_id, "pad_token_id": 0}
    for beams in (3, 1):
        made, plain = (
            exported.model.generate(ids, attention_mask=mask, use_cache=cached, num_beams=beams, **options).tolist()
            for cached in (True, False)
        )
        assert made == plain
    expected = engine.Generator(run.model, run.tokenizer).generate(rows, max_tokens=20, temperature=0.0)
    new = [row[40:] for row in made]
    assert [row[: len(text)] for row, text in zip(new, expected, strict=True)] == expected and any(expected)


def test_what_it_cannot_do(exported):
    with pytest.raises(ValueError, match="needs a DynamicCache, not a StaticCache; omit"):
        exported.model.generate(torch.tensor([[1, 2]]), max_new_tokens=4, cache_implementation="static")
    with pytest.raises(ValueError, match="needs input_ids"):
        exported.model(inputs_embeds=torch.zeros(1, 3, 64))


def test_too_long(exported):
    """One sentence, from forward and before generate starts."""
    too_long = torch.zeros(1, 65, dtype=torch.long)
    sentence = "^65 tokens are more than the model's context of 64; ask for fewer$"
    for call in (exported.model, exported.model.generate):
        with pytest.raises(ValueError, match=sentence):
            call(too_long)
    with pytest.raises(ValueError, match=sentence):
        exported.model.generate(too_long[:, :60], max_new_tokens=5)
    assert exported.model.generate(too_long[:, :60], max_new_tokens=4).size(1) <= 64
    cache = exported.model(too_long[:, :64], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=sentence):
        exported.model(too_long[:, :1], past_key_values=cache)
    mask = torch.ones(1, 65)
    mask[0, 0] = 0
    assert exported.model(too_long, attention_mask=mask).logits.shape == (1, 65, 900), "64 tokens and padding"


def test_new_tokens(own_model, exported, tmp_path):
    """The tables of value embeddings grow too, and the old tokens' logits stay as they were."""
    own_model.resize_token_embeddings(904)
    assert own_model.lm_head.bias.tolist() == [own_model.config.logit_bias] * 904
    ids = torch.tensor(random_rows(30))
    with torch.no_grad():
        assert_same(own_model(ids).logits[0, :, :900], exported.reference(ids[0].tolist()))
        ids[0, 7] = 903
        assert own_model(ids, labels=ids).loss.isfinite()
        own_model.save_pretrained(tmp_path)
        again = export_model.DecoderStackForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again(ids).logits, own_model(ids).logits)


def test_head_in_the_form_that_trainers_know(exported):
    """TRL computes log-probabilities from the head's weight and bias, logit_scale and final_logit_softcapping."""
    config, head = exported.model.config, exported.model.lm_head
    ids = torch.tensor(random_rows(40))
    with torch.no_grad():
        hidden = exported.model.base_model(input_ids=ids).last_hidden_state
        z = (hidden @ head.weight.T + head.bias) * config.logit_scale
        log_probs = (config.final_logit_softcapping * torch.tanh(z / config.final_logit_softcapping)).log_softmax(-1)
    assert_same(log_probs[0], exported.reference(ids[0].tolist()).log_softmax(-1))


def test_peft_trains_single_tokens(own_model, exported):
    """It computes a tied head without a bias; before training the logits are those of the script."""
    options = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4], task_type="CAUSAL_LM")
    ids = random_rows(30)
    with torch.no_grad():
        logits = peft.get_peft_model(own_model, options)(torch.tensor(ids)).logits[0]
    assert_same(logits, exported.reference(ids[0]))
    assert not [name for name in load_file(exported.folder / "model.safetensors") if name.endswith("bias")]


def test_loss(exported):
    """The mean over labels that are not -100, or their sum over num_items_in_batch; padding predicts nothing."""
    rows = random_rows(20, 2, 50)
    nats = [-exported.reference(row)[:-1].log_softmax(-1)[range(len(row) - 1), row[1:]] for row in rows]
    for side in ("left", "right"):
        ids, mask = pad_rows(rows, side)
        loss = exported.model(ids, attention_mask=mask, labels=ids).loss.item()
        assert loss == pytest.approx(torch.cat(nats).mean().item(), abs=1e-5)
        loss = exported.model(ids, attention_mask=mask, labels=ids, num_items_in_batch=500).loss.item()
        assert loss == pytest.approx(torch.cat(nats).sum().item() / 500, abs=1e-5)
    packed = torch.tensor([sum(rows, [])])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    loss = exported.model(packed, position_ids=positions, labels=packed).loss.item()
    assert loss == pytest.approx(torch.cat(nats).mean().item(), abs=1e-5)
    labels = torch.tensor(rows[:1])
    labels[0, :15] = -100
    loss = exported.model(torch.tensor(rows[:1]), labels=labels).loss.item()
    assert loss == pytest.approx(nats[0][14:].mean().item(), abs=1e-5)


@pytest.mark.parametrize("reentrant", (False, True))
def test_gradient_checkpointing(own_model, reentrant):
    """the gradients are those without it, of every parameter, and training mode makes no cache."""
    ids = torch.tensor(random_rows(40, 40))
    own_model.train()
    out = own_model(ids, labels=ids)
    out.loss.backward()
    assert out.past_key_values is None
    plain = {name: param.grad.clone() for name, param in own_model.named_parameters()}
    own_model.zero_grad()

    own_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    own_model.enable_input_require_grads()
    assert own_model.is_gradient_checkpointing
    out = own_model(ids, labels=ids, past_key_values=DynamicCache())
    assert out.past_key_values is None, "layers that run twice would fill it twice"
    out.loss.backward()
    for name, param in own_model.named_parameters():
        torch.testing.assert_close(param.grad, plain[name], msg=name)


def test_hidden_states_and_tuples(exported):
    ids = torch.tensor(random_rows(9))
    with torch.no_grad():
        out = exported.model(ids, output_hidden_states=True)
        last = exported.model(ids, logits_to_keep=2, return_dict=False)
    assert len(out.hidden_states) == 5 and out.hidden_states[0].shape == (1, 9, 64)
    assert_same(last[0], out.logits[:, -2:])
    with torch.no_grad():
        assert torch.equal(exported.model.base_model(ids).last_hidden_state, out.hidden_states[-1])


def test_a_new_model(exported):
    """from_config gives weights, different for each seed, and logits near those of a uniform guess."""
    make = export_model.DecoderStackForCausalLM._from_config
    ids = torch.tensor(random_rows(60))
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        model = make(exported.model.config)
        assert all(value.isfinite().all() for value in model.state_dict().values())
        with torch.no_grad():
            losses.append(model(ids, labels=ids).loss.item())
    assert losses[0] == losses[2] != losses[1] and all(abs(loss - math.log(900)) < 0.5 for loss in losses)
    if exported.model.config.bigram_rows:
        assert model.model.ngram.signs.abs().eq(1).all() and model.model.ngram.signs.float().mean().abs() < 0.1
    if not exported.model.config.tie_word_embeddings:
        assert model.lm_head.weight.std() > 0


def test_16_bits(bpe, tmp_path):
    """Stored as asked, but the learned scalars stay fp32; the ids that are most likely are mostly the same."""
    run_dir = write_run(tmp_path / "run", bpe, config=KINDS["small"]())
    export_run(run_dir, tmp_path / "model", "--dtype", "bfloat16")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    assert kinds.pop("model.ngram.signs") == torch.int8
    assert {kind for name, kind in kinds.items() if ".scalars." in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if ".scalars." not in name} == {torch.bfloat16}
    model = export_model.DecoderStackForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert {p.dtype for n, p in model.named_parameters() if ".scalars." in n} == {torch.float32}
    (row,) = random_rows(64)
    expected = own_logits(engine.load_run(run_dir, device="cpu"), row)
    with torch.no_grad():
        stored = model(torch.tensor([row])).logits[0]
        with torch.autocast("cpu", torch.bfloat16):
            cast = model.float()(torch.tensor([row])).logits[0]
    for found in (stored, cast):
        assert found.dtype == torch.float32
        assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.5


def test_code_stands_alone(exported):
    """The folder holds one Python file, without imports from this project."""
    (code,) = exported.folder.glob("*.py")
    lines = [line for line in code.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert code.name == "modeling_decoderstack.py"
    assert {line.split()[1].split(".")[0] for line in lines} == {"dataclasses", "torch", "transformers"}


CONVERSATION = [
    ("system", "Be brief."),
    ("user", "1+1?"),
    ("assistant", [{"type": "text", "text": "see "}, {"type": "python", "text": "1+1"},
                   {"type": "python_output", "text": "2"}, {"type": "text", "text": "\ntwo"}]),
    ("user", "é\n sure? "),
    ("assistant", "Yes."),
]  # fmt: skip
TRUST = {"trust_remote_code": True}


def test_auto_classes(exported, tmp_path):
    """The model from the folder alone, and saved again."""
    model = AutoModelForCausalLM.from_pretrained(exported.folder, **TRUST)
    assert type(model).__module__.startswith("transformers_modules.") and model.dtype == torch.float32
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, **TRUST)
    base = AutoModel.from_pretrained(exported.folder, **TRUST)
    (row,) = random_rows(30)
    ids = torch.tensor([row])
    with torch.no_grad():
        for each in (model, again):
            assert_same(each(ids).logits[0], exported.reference(row))
        assert torch.equal(base(ids).last_hidden_state, model.base_model(ids).last_hidden_state)


def test_auto_tokenizer(exported, tmp_path):
    """A text starts with one BOS, or with none if the caller adds its own; conversations are those of data/sft.py."""
    own = exported.run.tokenizer
    text = "the rest\n 12"
    chat = [{"role": role, "content": content} for role, content in CONVERSATION]
    tokens, counted = sft.render(sft.check_messages({"messages": chat}), own.encode, own.specials)
    first = AutoTokenizer.from_pretrained(exported.folder)
    first.save_pretrained(tmp_path)
    for theirs in (first, AutoTokenizer.from_pretrained(tmp_path)):
        assert theirs(text).input_ids == [own.bos_id, *own.encode(text)]
        assert theirs(text, add_special_tokens=False).input_ids == own.encode(text)
        found = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert found["input_ids"] == tokens.tolist() and found["assistant_masks"] == counted.astype(int).tolist()
        asked = theirs.apply_chat_template(chat[:2], add_generation_prompt=True)["input_ids"]
        assert asked == [*tokens.tolist()[: len(asked) - 1], own.specials["<|assistant_start|>"]]
