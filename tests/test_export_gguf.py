"""A portable run in transformers, in GGUF and in llama.cpp, against the training script.

llama.cpp comes from npm:

    npm install --prefix .venv --omit=optional node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1
"""

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import dataset
import engine
import export
import pytest
import tokenizer
import tokenizers
import torch
import torch.nn.functional as F
import train_small as ts
from lib import chat_format, export_portable
from lib.command import RunError
from lib.export_tokenizer import read_vocabulary
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import stops, write_run
from references import own_logits
from test_data_tokenizer import PUBLISHED
from test_export import VARIED, export_run, random_texts
from tiny import ROOT, frozen_code, portable_config, random_model

NODE_MODULES = Path(os.environ.get("NODE_MODULES", ROOT / ".venv/node_modules"))
needs_llama_cpp = pytest.mark.skipif(
    not (shutil.which("node") and (NODE_MODULES / "node-llama-cpp").is_dir()),
    reason="llama.cpp is not here; the header of this file names the command that installs it",
)


def ask_llama_cpp(folder: Path, model: Path, request: dict) -> dict:
    asked = folder / "request.json"
    answered = folder / "answer.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    command = ["node", ROOT / "tests/llama_cpp.mjs", NODE_MODULES, model, asked, answered]
    subprocess.run(command, check=True)
    return json.loads(answered.read_text(encoding="utf-8"))


def portable_run(folder: Path, pattern: str = "qwen2", chat: bool = True, **overrides) -> Path:
    """A run of a tiny model with random weights, residual factors and all, and a tokenizer of 900 entries."""
    path = folder / "tokenizer.json"
    dataset.write_json(path, tokenizer.train(iter(frozen_code()), 900, pattern=tokenizer.PATTERNS[pattern]))
    config = portable_config(vocab_size=900, dtype="float32", **overrides)
    return write_run(folder / "run", path, chat=chat, config=config)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return portable_run(tmp_path_factory.mktemp("portable"))


@pytest.fixture(scope="module")
def run(run_dir):
    return engine.load_run(run_dir, device="cpu")


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(891), k=count)


def test_transformers(run, run_dir, tmp_path):
    """Qwen3ForCausalLM without code of ours: its logits, its tokens, and what it generates with a cache."""
    card = export_run(run_dir, tmp_path / "model")
    assert "trust_remote_code" not in card and not list((tmp_path / "model").glob("*.py"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    ids = random_ids(64)
    expected = own_logits(run, ids)
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    text = "def f(x):\n    return 12345"
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode(text)]
    assert theirs(text).input_ids == ids
    for _ in range(8):
        ids.append(int(own_logits(run, ids)[-1].argmax()))
    start = torch.tensor([ids[:-8]])
    found = model.generate(start, do_sample=False, max_new_tokens=8, eos_token_id=-1)
    assert found[0].tolist() == ids


@pytest.mark.parametrize("kind", export_portable.TYPES)
def test_file(kind, run_dir, tmp_path, capsys):
    """The gguf package reads the weights of the transformers export, to the precision of their type."""
    import gguf

    path = tmp_path / "a b.gguf"
    flags = ["--type", kind, "--out", str(tmp_path / "llama-1.5b"), "--license", "mit"]
    assert export.main([str(run_dir), "--gguf", str(path), *flags]) == 0
    said = capsys.readouterr().out
    assert f"llama-cli -m '{path}' -c 64 --jinja -cnv\n" in said and "\nFROM ./a b.gguf\n" in said
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3" and fields["qwen3.context_length"] == 64
    own = ts.Tokenizer(run_dir / "tokenizer.json")
    assert fields["tokenizer.ggml.pre"] == "qwen2" and len(fields["tokenizer.ggml.tokens"]) == 900
    assert fields["tokenizer.ggml.bos_token_id"] == own.bos_id
    for name in ("eos", "eot"):
        assert fields[f"tokenizer.ggml.{name}_token_id"] == own.specials["<|assistant_end|>"]
    assert fields["tokenizer.ggml.padding_token_id"] == own.bos_id and fields["general.license"] == "mit"
    found = [fields[f"general.{name}"] for name in ("type", "name", "size_label", "quantization_version")]
    weights = load_file(tmp_path / "llama-1.5b/model.safetensors")
    assert found == ["model", "llama-1.5b", f"{sum(w.numel() for w in weights.values()) / 1000:.0f}K", 2]

    assert len(reader.tensors) == len(weights) == 3 + 4 * 11
    found = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 4)
    tolerance = {"f32": 0, "f16": 1e-3, "q8_0": 1e-2}[kind]
    for name, weight in weights.items():
        got = found[names.get_name(name, (".weight",))]
        assert got.shape == weight.shape
        assert (got - weight).norm() <= tolerance * weight.norm()


def test_user_errors(run_dir, bpe, tmp_path, monkeypatch):
    """One sentence, exit code not 0, and no file, not even a part of one."""
    default = write_run(tmp_path / "default", bpe)
    gpt4 = write_run(tmp_path / "gpt4", bpe, config=portable_config(vocab_size=900, dtype="float32"))
    half = write_run(tmp_path / "half", bpe, config=portable_config(vocab_size=900, dtype="float32", mudd_width=8))
    full = tmp_path / "full.gguf"
    full.write_text("mine")
    new = tmp_path / "new"

    def fails(run, flag, out, message):
        assert message in stops(export.main, run, flag, out)
        assert not new.exists() and not new.with_name("new.part").exists()

    fails(default, "--gguf", new, "(it has swiglu=False); train with @runs/portable.args on a dataset of")
    fails(gpt4, "--gguf", new, "does not support the split pattern")
    fails(half, "--gguf", new, "mudd_width=8")
    fails(half, "--out", new, "mudd_width=8")
    fails(run_dir, "--gguf", full, "exists")
    (tmp_path / "model.safetensors").touch()
    fails(tmp_path, "--gguf", new, "merge adapters into the model first")
    fails(tmp_path, "--out", new, "is already an export")
    (checkpoint,) = run_dir.glob("checkpoints/*")
    fails(checkpoint, "--out", new, "is not a run directory")
    export_run(default, tmp_path / "default_hf")
    fails(tmp_path / "default_hf", "--gguf", new, "a DecoderStackForCausalLM; train with @runs/portable.args")
    with monkeypatch.context() as patch:
        patch.setattr(export_portable, "add_vocabulary", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        fails(run_dir, "--gguf", new, "No space")
    assert full.read_text() == "mine"


def test_a_residual_factor_that_no_norm_takes_away(tmp_path):
    model = random_model(portable_config(vocab_size=900))
    with torch.no_grad():
        model.scalars[1, 2] = -0.5
    with pytest.raises(RunError, match="residual factor of layer 2 fell to"):
        export_portable.qwen_weights(model)


@pytest.mark.parametrize("changed", [
    {}, {"softcap": (15.0, 0.0, 15.0)}, {"window_short": 32}, {"value_embed_layers": (1,)}, {"shared_input_from": 1},
    {"rotary_full": False}, {"no_attention_layers": (2,)}, {"swiglu": False}, {"mudd_width": 8}, {"bigram_rows": 9},
])  # fmt: skip
def test_what_is_portable(changed):
    reason = export_portable.why_not_portable(random_model(portable_config(**changed)))
    assert bool(reason) == bool(changed)


def test_tokens_by_the_rule_of_ollama(tmp_path):
    """It splits the text of every Qwen3 as Qwen2 does, whatever the file says; the pages name a pattern that agrees."""
    pages = ("runs/tutorials/6_portable.md", "runs/portable.args", "runs/README.md")
    names = {re.search(r"--pattern\s+(\w+)", (ROOT / page).read_text(encoding="utf-8"))[1] for page in pages}
    assert len(names) == 1
    run_dir = portable_run(tmp_path, *names)
    own = ts.Tokenizer(run_dir / "tokenizer.json")
    content = read_vocabulary(own).content
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PUBLISHED["qwen2"]
    theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
    theirs.encode_special_tokens = True
    for text in [*VARIED, *random_texts(2000), (ROOT / "train_small.py").read_text(encoding="utf-8")]:
        assert theirs.encode(text, add_special_tokens=False).ids == own.encode(text), repr(text)


@pytest.fixture(scope="module")
def finetuned(run_dir, tmp_path_factory) -> Path:
    """An export whose weights another program has changed and saved, in more than one file, and a token more."""
    folder = tmp_path_factory.mktemp("finetuned")
    export_run(run_dir, folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    theirs = AutoTokenizer.from_pretrained(folder / "hf")
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    model.resize_token_embeddings(902)
    model.save_pretrained(folder / "new", max_shard_size="200KB")
    theirs.save_pretrained(folder / "new")
    return folder / "new"


def test_file_of_a_finetuned_export(run_dir, finetuned, tmp_path):
    """Each tensor is the one that was saved; vocabulary and template are those of the run."""
    import gguf

    for source, name in ((run_dir, "run"), (finetuned, "new")):
        assert export.main([str(source), "--gguf", str(tmp_path / name), "--type", "f32"]) == 0
    old, new = (gguf.GGUFReader(tmp_path / name) for name in ("run", "new"))
    fields, expected = ({k: field.contents() for k, field in file.fields.items()} for file in (new, old))
    differ = {k for k in fields if fields[k] != expected.get(k)}
    shape = {"qwen3.vocab_size", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}
    assert differ == shape | {"general.name"} and fields.keys() == expected.keys()
    assert fields["tokenizer.ggml.tokens"] == [*expected["tokenizer.ggml.tokens"], "[PAD900]", "[PAD901]"]

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 4)
    found = {tensor.name: torch.tensor(tensor.data) for tensor in new.tensors}
    weights = AutoModelForCausalLM.from_pretrained(finetuned).state_dict()
    assert len(weights) == len(found) == 47 and len(list(finetuned.glob("*.safetensors"))) > 1
    assert all(torch.equal(found[names.get_name(name, (".weight",))], weight) for name, weight in weights.items())


@needs_llama_cpp
def test_llama_cpp_after_finetuning(finetuned, tmp_path):
    """Greedy text is that of transformers, as far as the first two are apart."""
    export.main([str(finetuned), "--gguf", str(tmp_path / "m.gguf"), "--type", "f32"])
    model = AutoModelForCausalLM.from_pretrained(finetuned)
    prompts = [random_ids(20, seed) for seed in range(4)]
    answer = ask_llama_cpp(tmp_path, tmp_path / "m.gguf", {"prompts": prompts, "count": 20})
    for ids, found in zip(prompts, answer["prompts"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids + found])).logits[0, len(ids) - 1 : -1]
        assert (logits.amax(1) - logits.gather(1, torch.tensor(found)[:, None])[:, 0]).max() < 0.02


@needs_llama_cpp
@pytest.mark.parametrize("pattern", ("llama3", "qwen2", "gpt2"))
def test_tokens_in_llama_cpp(pattern, tmp_path):
    run_dir = portable_run(tmp_path, pattern)
    own = ts.Tokenizer(run_dir / "tokenizer.json")
    export.main([str(run_dir), "--gguf", str(tmp_path / "m.gguf")])
    code = (ROOT / "train_small.py").read_text(encoding="utf-8")
    texts = [*VARIED, *random_texts(1500), *(code[i : i + 400] for i in range(0, 200_000, 400))]
    texts = [text for text in texts if "\x00" not in text]
    answer = ask_llama_cpp(tmp_path, tmp_path / "m.gguf", {"texts": texts})
    for text, found in zip(texts, answer["texts"], strict=True):
        assert found["ids"] == own.encode(text), repr(text)
        assert found["special"] == own.encoding.encode(text, allowed_special="all"), repr(text)


@needs_llama_cpp
@pytest.mark.parametrize("kind", export_portable.TYPES)
def test_llama_cpp(kind, run, run_dir, tmp_path):
    """Nats of each token, greedy continuations as far as the first two are apart, and the chat template."""
    path = tmp_path / "m.gguf"
    export.main([str(run_dir), "--gguf", str(path), "--type", kind])
    texts = [random_ids(64, seed) for seed in range(4)]
    prompts = [random_ids(20, seed) for seed in range(8)]
    said = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Yes, [3*4 = 12]!"), ("user", "How?")]
    messages = [{"role": role, "content": content} for role, content in said]
    asked = {"prompts": prompts, "count": 20, "messages": messages}
    answer = ask_llama_cpp(tmp_path, path, asked | {"scored": texts})

    tolerance = {"f32": 2e-3, "f16": 5e-3, "q8_0": 0.1}[kind]  # keys and values are fp16 in llama.cpp
    for ids, nats in zip(texts, answer["scored"], strict=True):
        expected = F.cross_entropy(own_logits(run, ids)[:-1], torch.tensor(ids[1:]), reduction="none")
        assert (torch.tensor(nats) - expected).abs().mean() < tolerance
    for ids, found in zip(prompts, answer["prompts"], strict=True):
        logits = own_logits(run, ids + found)[len(ids) - 1 : -1]
        lost = logits.amax(1) - logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert lost.max() < 10 * tolerance

    assert answer["architecture"] == "qwen3"
    expected = chat_format.render(run.tokenizer, chat_format.merge_turns(said))
    assert answer["rendered"] == run.tokenizer.encoding.decode(expected)
