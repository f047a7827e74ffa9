"""runs/huggingface/finetune_hf.py with tiny random models on a CPU: data, loss, training, resuming, export, errors."""

import copy
import functools
import gc
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F

from commands import call, entries, ran
from processes import free_port, python
from tiny import ROOT

pytest.importorskip("datasets")
os.environ["HF_HUB_OFFLINE"] = "1"  # before the imports: nothing may be asked of the hub

import chat  # noqa: E402
import datasets  # noqa: E402
import finetune_hf as ft  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

del os.environ["HF_HUB_OFFLINE"]  # the tests of other files have hubs of their own

TEMPLATE = ROOT / "runs/huggingface/chat_template_qwen.jinja"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 272, "max_position_embeddings": 256,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
# The last one sees 8 tokens back.
MODELS = {
    "qwen": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "learned positions": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=272, n_positions=256, **NO_DROPOUT),
    "window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=0),
}
def byte_tokenizer(template: str | None = TEMPLATE.read_text()) -> PreTrainedTokenizerFast:
    """One token for each byte, and Qwen's marks."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|endoftext|>", additional_special_tokens=marks
    )
    tokenizer.chat_template = template
    return tokenizer


def random_model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, conversations and texts; the cache of datasets is in it too."""
    folder = tmp_path_factory.mktemp("hf")
    random_model(MODELS["qwen"]).save_pretrained(folder / "model")
    byte_tokenizer(template=None).save_pretrained(folder / "model")

    rng = np.random.default_rng(0)
    words = "red green blue one two three sun moon".split()
    chats = []
    for _ in range(60):
        question, answer = (" ".join(rng.choice(words, rng.integers(1, 6))) for _ in range(2))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        chats.append(json.dumps({"messages": [{"role": "system", "content": "."}, *turns]}))
    (folder / "chats.jsonl").write_text("\n".join(chats))
    texts = [json.dumps({"text": " ".join(rng.choice(words, rng.integers(2, 60)))}) for _ in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(texts))
    (folder / "sft.toml").write_text(f"""
model_name = "{folder}/model"
chat_template = "{TEMPLATE}"
val_rows = 8
sequence_length = 128
packs = 5
micro_packs = 2
steps = 6
lr = 1e-2
save_every = 3
[data]
path = "json"
data_files = "{folder}/chats.jsonl"
""")
    return folder


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


def main(words: list[str]) -> int:
    """finetune_hf in this process.

    The model of an earlier run still holds its process group. If the garbage collector met that in a worker of .map,
    its destructor would wait for threads that a fork does not have.
    """
    gc.collect()
    return ft.main(words)


def in_processes(folder, *words, **environment) -> subprocess.CompletedProcess:
    environment |= {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = python(*words, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done


def refused(*words) -> str:
    """The one sentence of a run that cannot be."""
    code, _, err = call(main, *words)
    assert code and "error: " in err.splitlines()[-1], err
    return err.splitlines()[-1]


def one_config(**settings) -> ft.Config:
    data = {"path": "json"}
    return ft.Config(**{"command": "sft", "model_name": "x", "run_dir": "x", "data": data, **settings})


# ---- data


def test_tools_in_the_form_of_openai():
    """Arguments come as text, keys may be empty; the call counts, its answer does not."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Add.", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_calls": None},
        {"role": "assistant", "content": "It is 3."},
    ]  # fmt: skip
    tokenizer = byte_tokenizer()
    tools = [{"type": "function", "function": {"name": "add"}}]
    batch = ft.tokenize_chats({"messages": [messages], "tools": [tools]}, tokenizer, "messages")
    pairs = list(zip(batch["tokens"][0], batch["loss_mask"][0], strict=True))
    text = tokenizer.decode([token for token, _ in pairs])
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert text.startswith("<|im_start|>system\n# Tools\n\nYou may call") and "Alibaba" not in TEMPLATE.read_text()
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in text
    assert text.endswith(
        f"<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n{called}\n<|im_start|>user\n<tool_response>\n3\n"
        f"</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>\n"
    )
    assert tokenizer.decode([token for token, flag in pairs if flag]) == f"{called}It is 3.<|im_end|>"


def test_nulls_of_other_tools_are_left_out(tmp_path):
    """Arrow gives every tool the parameters of all others; the text is that of the conversation by itself."""

    def conversation(name: str, key: str) -> dict:
        tool = {"type": "function", "function": {"name": name, "parameters": {key: {"type": "string"}}}}
        call = {"function": {"name": name, "arguments": {key: "x"}}}
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": turns, "tools": [tool]}

    rows = [conversation("add", "number"), conversation("weather", "city")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    read = datasets.load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), split="train")
    assert read[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] is None
    tokenizer = byte_tokenizer()
    alone = ft.tokenize_chats({name: [row[name] for row in rows] for name in rows[0]}, tokenizer, "messages")
    assert ft.tokenize_chats(read[:], tokenizer, "messages") == alone


def test_rows_of_another_form_are_named(folder, tmp_path):
    """A text that is missing, a conversation in a column of another name, and one with other keys."""
    (tmp_path / "texts.jsonl").write_text('{"text": "a b"}\n{"text": null}\n{"text": "c"}\n')
    words = ["pretrain", "--model-name", folder / "model", "--data.path", "json", "--run-dir", tmp_path / "run",
             "--sequence-length", 64]  # fmt: skip
    error = refused(*words, "--data.data-files", tmp_path / "texts.jsonl", "--val-rows", 1)
    assert "column text has a row without text" in error and error.endswith("drop such rows")
    (tmp_path / "chats.jsonl").write_text('{"conversations": [{"from": "human", "value": "Hi"}]}\n' * 20)
    words = ["sft", f"@{folder}/sft.toml", "--run-dir", tmp_path / "run", "--data.data-files", tmp_path / "chats.jsonl"]
    form = 'a list of {"role": ..., "content": ...}'
    advice = f"no column messages in ['conversations']; choose one with --column, each row of it {form}"
    assert refused(*words).endswith(advice)
    assert refused(*words, "--column", "conversations").endswith(f"; make it {form}")


@pytest.mark.parametrize(("name", "turn", "end", "answer"), [
    ("qwen", "<|im_start|>{}\n", "<|im_end|>", "<think>\nHm\n</think>\n\nYes."),
    ("llama3", "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "Yes."),
])  # fmt: skip
def test_templates_by_hand(name, turn, end, answer):
    """Of Qwen3 with thoughts, and of Llama 3: what is counted ends each turn."""
    tokenizer = byte_tokenizer((ROOT / f"runs/huggingface/chat_template_{name}.jinja").read_text())
    tokenizer.bos_token = ""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm"}]
    batch = ft.tokenize_chats({"messages": [turns]}, tokenizer, "messages")
    pairs = list(zip(batch["tokens"][0], batch["loss_mask"][0], strict=True))
    assert tokenizer.decode([token for token, flag in pairs if flag]) == answer + end
    text = tokenizer.decode([token for token, _ in pairs]).replace("\n" + turn[:12], turn[:12]).strip()
    assert text == turn.format("user") + "Hi" + end + turn.format("assistant") + answer + end


def test_types_of_a_base_in_bf16(folder, tmp_path, monkeypatch):
    """What LoRA freezes stays bf16, what is trained is fp32, the export is bf16 and says so."""
    random_model(MODELS["qwen"]).bfloat16().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    seen = []
    monkeypatch.setattr(ft, "finish", lambda run: seen.extend(run.model.parameters()))
    words = ["sft", f"@{folder}/sft.toml", "--model-name", tmp_path / "model", "--steps", 2, "--run-dir"]
    for run, *more in ((tmp_path / "lora", "--lora-rank", 2), (tmp_path / "full",)):
        seen.clear()
        assert call(main, *words, run, *more)[0] == 0
        frozen = {(False, torch.bfloat16)} if more else set()
        assert {(p.requires_grad, p.dtype) for p in seen} == {(True, torch.float32)} | frozen
        assert {t.dtype for t in tensors_of(run / "model").values()} == {torch.bfloat16}
        assert json.loads((run / "model/config.json").read_text())["dtype"] == "bfloat16"


def test_texts_end_with_the_end_of_text():
    tokenizer = byte_tokenizer()
    batch = ft.tokenize_texts({"text": ["ab", "c<|endoftext|>"]}, tokenizer, "text")
    assert [row[-1] for row in batch["tokens"]] == [tokenizer.eos_token_id] * 2
    assert all(all(row) for row in batch["loss_mask"])


def test_best_fit_by_hand():
    """Documents of 7, 5, 4, 2 and 2 tokens in packs of 10: 7 + 2 and 5 + 4, then 2; the rest is padding."""
    rows = [list(range(start, start + n)) for start, n in ((1, 2), (10, 7), (20, 4), (30, 5), (40, 2))]
    batch = {"tokens": rows, "loss_mask": [[True] * len(row) for row in rows]}
    packs = ft.pack(batch, 10, split=False)
    assert packs["lengths"] == [[7, 2, 1], [5, 4, 1], [2, 2, 2, 2, 2]]
    assert packs["input_ids"][0].tolist() == [*range(10, 17), 1, 2, 0]
    assert packs["labels"][0].tolist() == [-100, *range(11, 17), -100, 2, -100]
    assert packs["documents"] == [2, 2, 1] and packs["tokens"] == [9, 9, 2] and packs["targets"] == [7, 7, 1]


def test_long_texts_are_cut_without_losing_a_target_and_long_chats_left_out():
    row = list(range(100, 126))
    batch = {"tokens": [row, [1, 2]], "loss_mask": [[True] * 26, [True, False]]}
    packs = ft.pack(batch, 10, split=True)  # [1, 2] counts nothing that could be a target
    labels = np.concatenate(packs["labels"])
    assert sorted(labels[labels != -100].tolist()) == row[1:]
    assert ft.pack(batch, 10, split=False)["input_ids"] == []


def test_cache_serves_the_next_run(folder, monkeypatch):
    """The second run tokenizes and packs nothing, another length only packs, another template tokenizes."""
    calls = []
    for name in ("tokenize_chats", "pack"):
        original = getattr(ft, name)

        @functools.wraps(original)
        def counting(*args, original=original, **kwargs):
            calls.append(original.__name__)
            return original(*args, **kwargs)

        monkeypatch.setattr(ft, name, counting)
    data = {"path": "json", "data_files": str(folder / "chats.jsonl")}
    rows = datasets.load_dataset(**data, split="train")

    def prepare(length: int, template: str) -> list[str]:
        calls.clear()
        config = one_config(sequence_length=length)
        packs = ft.make_packs(config, byte_tokenizer(template), rows, "messages")
        assert max(packs["tokens"]) <= length
        return list(calls)

    template = TEMPLATE.read_text() + "{# another cache than that of other tests #}"
    assert prepare(96, template) == ["tokenize_chats", "pack"]
    assert prepare(96, template) == []
    assert prepare(200, template) == ["pack"]
    assert prepare(96, template) == []
    assert prepare(96, template.replace("cache", "place")) == ["tokenize_chats", "pack"]


# ---- model and loss


def packed_batch(documents: list[torch.Tensor], members: list[list[int]]) -> dict:
    """The micro-batch of packs of 64 that hold the documents of each list; every third target is not counted."""
    rows = []
    for numbers in members:
        labels = [documents[i].clone() for i in numbers]
        for part in labels:
            part[0] = ft.IGNORED
            part[1::3] = ft.IGNORED
        lengths = [len(part) for part in labels]
        padding = 64 - sum(lengths)
        rows.append({
            "input_ids": F.pad(torch.cat([documents[i] for i in numbers]), (0, padding)),
            "labels": F.pad(torch.cat(labels), (0, padding), value=ft.IGNORED),
            "lengths": np.array([*lengths, *ft.filling(padding, 40)]),
        })  # fmt: skip
    return ft.collate(rows, len(rows) + 1, 64, 40, torch.device("cpu"))  # one pack stays empty


def test_micro_batch_by_hand():
    """A pack of 8 with documents of 3 and 2, and an empty one: positions start anew, padding is documents too."""
    row = {"input_ids": np.arange(1, 9), "labels": np.arange(8), "lengths": np.array([3, 2, 3])}
    batch = ft.collate([row], 2, 8, 3, torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[*range(1, 9), *[0] * 8]]
    assert batch["labels"].tolist() == [[*range(8), *[-100] * 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 8, 11, 14, 16]
    assert batch["cu_seq_lens_q"].dtype == torch.int32 and batch["max_length_q"] == batch["max_length_k"] == 3


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_one_document_at_a_time(name):
    """Loss and every gradient agree with transformers' own model, which gets each document alone; it may be trained."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 256, (n,), generator=generator) for n in (20, 31, 5, 40, 2)]
    plain = random_model(MODELS[name])
    plain_loss = 0.0
    for document in documents:
        targets = document[1:].clone()
        targets[::3] = ft.IGNORED
        logits = plain(input_ids=document[None, :-1], use_cache=False).logits[0]
        plain_loss = plain_loss + F.cross_entropy(logits, targets, reduction="sum")
    plain_loss.backward()

    hf = random_model(MODELS[name])
    hf.loss_options = {}
    packed_loss = ft.packed_loss(hf, packed_batch(documents, [[0, 1, 2], [3, 4]]), targets=10)
    packed_loss.backward()
    assert packed_loss.item() == pytest.approx(plain_loss.item() / 10, rel=1e-5)
    for (key, ours), reference in zip(hf.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad * 10, reference.grad, rtol=1e-4, atol=1e-5, msg=key)
    ft.check_documents(hf)


MIXING = {
    "opt": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_documents_are_refused(folder, tmp_path, name):
    """On a CPU, OPT attends across documents and LFM2 convolves across them."""
    random_model(MIXING[name]).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    words = ["sft", f"@{folder}/sft.toml", "--run-dir", tmp_path / "run", "--model-name", tmp_path / "model"]
    assert f"{name} models mix the documents of a pack" in refused(*words)


def test_liger_gives_the_loss_alone(monkeypatch):
    """A stand-in for its package: other kernels are switched off, and a token's logits take 2 x 57,344 bytes."""
    calls = []

    def apply(rope=True, swiglu=True, fused_linear_cross_entropy=True, model=None):
        calls.append((rope, swiglu, fused_linear_cross_entropy, model))

    package = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"qwen2": apply})
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", types.ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", package)
    model = random_model(MODELS["qwen"])
    width = model.config.hidden_size
    expected = {"skip_logits": True, "accum_dtype": torch.float32, "chunk_mem_const": 57344 // width}
    assert ft.apply_liger(model) == expected
    assert calls == [(False, False, True, model)]
    assert ft.apply_liger(random_model(MODELS["llama"])) == {}


def test_decay_and_rate():
    config = one_config(lr=1.0, warmup=0.2)
    model = random_model(MODELS["llama"])
    matrices, others = ft.build_optimizer(model, config).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    plain = {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}
    assert {names[id(p)].split(".")[-2] for p in others["params"]} == plain
    assert len(matrices["params"]) == 2 * 7 + 1 and others["weight_decay"] == 0
    rates = [ft.learning_rate(config, step, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[6] == pytest.approx(0.55)
    assert rates[9] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 7 / 8)))


# ---- runs


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory):
    """A run of 6 steps that nothing disturbed."""
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    assert call(main, "sft", f"@{folder}/sft.toml", "--run-dir", run_dir)[0] == 0
    return run_dir


def losses_of(run_dir) -> list[float]:
    """Losses, and norms of gradients: AdamW would hide a wrong factor of the gradient."""
    return [entry[key] for entry in entries(run_dir) for key in ("loss", "val_loss", "grad_norm") if key in entry]


def tensors_of(folder) -> dict:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def test_run_directory(reference):
    names = "config.json log.jsonl checkpoints result.json report.md curve.png model finetune_hf.py"
    assert {path.name for path in reference.iterdir()} == set(names.split())
    log = entries(reference)
    assert [entry["step"] for entry in log] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert log[-1]["val_loss"] < log[0]["val_loss"] - 0.5
    assert abs(log[0]["val_loss"] - math.log(272)) < 0.3  # the random model knows nothing
    assert not list(reference.glob("**/*.pt")) and not list(reference.glob("**/.metadata"))  # no pickle

    report = (reference / "report.md").read_text()
    assert f"| validation | {log[-1]['val_loss']:.4f} nats" in report and "| validation, before | 5." in report
    assert len({path.stat().st_mode for path in reference.glob("model/*")}) == 1
    assert re.search(r"````text\n<\|im_start\|>system\n\.<\|im_end\|>.*<\|im_start\|>assistant\n.+\n````", report, re.S)


@pytest.fixture(scope="module")
def lora(folder, tmp_path_factory):
    """The same run with adapters of rank 4."""
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    run_dir = tmp_path_factory.mktemp("runs") / "lora"
    words = ["sft", f"@{folder}/sft.toml", "--run-dir", run_dir, "--lora-rank", 4]
    assert call(main, *words)[0] == 0
    return run_dir


def test_lora_trains_the_adapters_alone(folder, lora):
    """model/ is the untouched model with the adapter that PEFT finds in adapter/, merged."""
    log = entries(lora)
    assert log[-1]["val_loss"] < log[0]["val_loss"] - 0.1
    assert {path.name for path in (lora / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    names = {name.split(".", 1)[1] for name in tensors_of(lora / "checkpoints/step_000006")}
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    merged = AutoModelForCausalLM.from_pretrained(lora / "model")
    assert torch.equal(base.model.embed_tokens.weight, merged.model.embed_tokens.weight)
    assert not torch.equal(base.model.layers[0].mlp.up_proj.weight, merged.model.layers[0].mlp.up_proj.weight)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, lora / "adapter")(ids).logits
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-5)


def test_export_is_the_trained_model(folder, reference):
    """transformers' own loss on the validation conversations is the one that the log ends with."""
    model = AutoModelForCausalLM.from_pretrained(reference / "model")
    tokenizer = AutoTokenizer.from_pretrained(reference / "model")
    rows = datasets.load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train")
    total, count = 0.0, 0
    for row in rows.train_test_split(8, seed=0)["test"]:
        chat = tokenizer.apply_chat_template(row["messages"], return_assistant_tokens_mask=True)
        tokens = torch.tensor(chat["input_ids"])
        counted = torch.tensor(chat["assistant_masks"], dtype=torch.bool)[1:]
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        total += F.cross_entropy(logits[counted], tokens[1:][counted], reduction="sum").item()
        count += int(counted.sum())
    assert total / count == pytest.approx(entries(reference)[-1]["val_loss"], rel=1e-5)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_chat_talks_to_it(reference):
    """The run directory or its model/; at temperature 0 the answer is that of generate."""
    assert chat.pretrained_folder(reference) == chat.pretrained_folder(reference / "model") == reference / "model"
    assert chat.pretrained_folder(ROOT / "runs") is None
    args = chat.parse([str(reference), "--temperature", "0", "--max-tokens", "12", "--device", "cpu"])
    backend = chat.Pretrained(reference / "model", args)
    talk, pieces = chat.Chat(backend), []
    talk.messages = messages = [{"role": "user", "content": "red"}]
    talk.reply({}, pieces.append)
    tokens = backend.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    whole = backend.model.generate(**tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    assert "".join(pieces) == backend.tokenizer.decode(whole[tokens["input_ids"].shape[1] :], skip_special_tokens=True)

    talk.messages = [{"role": role, "content": "x" * 50} for role in ("user", "assistant") * 3] + messages
    talk.reply({}, pieces.append)
    assert len(talk.messages) < 7 and talk.messages[-1] == messages[0]  # the oldest turns do not fit into 256 tokens


@pytest.mark.parametrize(("kind", "damage"), [
    ("reference", None), ("reference", lambda content: content[:-100]),
    ("reference", lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]),
    ("lora", lambda content: content[:-4096] + bytes(4096)),
])  # fmt: skip
def test_resume_bit_for_bit(request, tmp_path, kind, damage):
    """From step 3, whether the checkpoint of step 6 is gone or damaged."""
    reference = request.getfixturevalue(kind)
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    last = run_dir / "checkpoints/step_000006"
    if damage:
        file = next(last.glob("*.safetensors"))
        file.write_bytes(damage(file.read_bytes()))
    else:
        shutil.rmtree(last)
    shutil.rmtree(run_dir / "model")
    code, out, err = call(main, "--resume", "--run-dir", run_dir)
    assert code == 0 and ("skipped step_000006: " in out) == bool(damage), err
    assert losses_of(run_dir) == losses_of(reference)
    for part in ("checkpoints/step_000006", "model"):
        ours = tensors_of(run_dir / part)
        theirs = tensors_of(reference / part)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sigterm_saves_and_ends(folder, reference, tmp_path, monkeypatch):
    """In step 2, between checkpoints; the run goes on as if nothing had happened."""
    original = ft.train_step

    def step(run):
        if run.progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with monkeypatch.context() as patch:
        patch.setattr(ft, "train_step", step)
        error = refused("sft", f"@{folder}/sft.toml", "--run-dir", tmp_path / "run")
    assert "stopped and saved at step 2; continue with --resume" in error
    ran(main, "--resume", "--run-dir", tmp_path / "run")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert losses_of(tmp_path / "run") == losses_of(reference)


# The imports take most of the time, so one process does them for all: two ranks of a run of each port.
TWO_RANKS = """
import os, sys
sys.path.insert(0, "runs/huggingface")
import datasets, finetune_hf, matplotlib.pyplot, transformers.models.qwen2.modeling_qwen2
config, folder, *ports = sys.argv[1:]
children = []
for port, flags in zip(ports, ([], ["--lora-rank", "4"]), strict=True):
    for rank in "01":
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        code = finetune_hf.main(["sft", config, "--run-dir", f"{folder}/{port}", *flags])
        sys.stdout.flush()
        os._exit(code)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_two_ranks_and_back_to_one(folder, reference, lora, tmp_path):
    """5 packs a step do not divide over 2 ranks. The second half runs on one rank again; also with adapters."""
    ports = [free_port(), free_port()]
    address = {"MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
    done = in_processes(folder, "-c", TWO_RANKS, f"@{folder}/sft.toml", tmp_path, *ports, **address)
    assert "tokenize_chats:" not in done.stderr  # the reference has filled the cache
    for port, one_rank in zip(ports, (reference, lora), strict=True):
        run_dir = tmp_path / str(port)
        assert losses_of(run_dir) == pytest.approx(losses_of(one_rank), rel=1e-5)
        assert len(list((run_dir / "checkpoints/step_000003").glob("*.safetensors"))) == 2

        shutil.rmtree(run_dir / "checkpoints/step_000006")
        ran(main, "--resume", "--run-dir", run_dir)
        assert losses_of(run_dir) == pytest.approx(losses_of(one_rank), rel=1e-5)


def test_micro_batches_and_recomputation_change_nothing(folder, reference, tmp_path):
    ran(main, "sft", f"@{folder}/sft.toml", "--run-dir", tmp_path / "run", "--micro-packs", 5, "--recompute",
        "--steps=6")  # fmt: skip
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(reference), rel=1e-5)


def test_pretrain(folder, tmp_path):
    """As a user starts it, with two processes that tokenize, and flags of every form. Each epoch has its own order."""
    words = ["pretrain", "--model-name", folder / "model", "--data.path=json", "--data.data-files",
             folder / "texts.jsonl", "--val-rows", 5, "--sequence-length", 100, "--packs", 4, "--epochs", 1.5,
             "--lr", 0.01, "--workers", 2, "--no-recompute", "--run-dir", tmp_path / "run"]  # fmt: skip
    done = in_processes(folder, "runs/huggingface/finetune_hf.py", *words)
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["command"] == "pretrain" and config["recompute"] is False
    log = entries(tmp_path / "run")
    assert log[-1]["val_loss"] < log[0]["val_loss"] - 0.5
    lines = (folder / "texts.jsonl").read_text().splitlines()
    tokens = sum(len(json.loads(line)["text"]) + 1 for line in lines)
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] == pytest.approx(1.5 * tokens * 35 / 40, rel=0.1)


def test_order_of_packs(folder, tmp_path, monkeypatch):
    """Every epoch has each pack once, in an order of its own; the last step may have fewer."""
    toml = (folder / "sft.toml").read_text().replace("steps = 6\n", "")
    (tmp_path / "epochs.toml").write_text(toml)

    def order(*words) -> tuple[list[int], int]:
        runs = []
        with monkeypatch.context() as patch:
            patch.setattr(ft, "run_steps", runs.append)
            patch.setattr(ft, "export", lambda run: None)
            patch.setattr(ft, "finish", lambda run: {})
            ran(main, "sft", f"@{tmp_path}/epochs.toml", "--run-dir", tmp_path / "run", *words)
        return runs[0].order.tolist(), runs[0].steps

    first, steps = order("--packs", 4, "--epochs", 2)
    count = max(first) + 1
    assert sorted(first[:count]) == sorted(first[count:]) == list(range(count))
    assert first[:count] != first[count:] and count % 4 and steps == -(-2 * count // 4)
    assert order("--packs", 1000) == (first[:count], 1)
    assert order("--packs", 2, "--steps", count) == (first, count)
    assert order("--packs", 4, "--epochs", 2, "--seed", 1)[0] != first


def test_newest_and_best_are_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: math.inf, 4: 2.5, 10: 2.2}  # infinite: saved by a signal, without a validation
    for step, loss in losses.items():
        path = tmp_path / f"checkpoints/step_{step:06d}"
        path.mkdir(parents=True)
        state = {"progress": {"step": step, "val_loss": loss}, "files": {}}
        (path / "state.json").write_bytes(ft.train_small.seal(state))
    (tmp_path / "checkpoints/step_000011.tmp").mkdir()
    (tmp_path / "checkpoints/step_000011.tmp/state.json").write_text("{")
    ft.prune(tmp_path, 2)
    assert [path.name for path in ft.train_small.checkpoints(tmp_path)] == ["step_000002", "step_000004", "step_000010"]


# ---- settings and errors


def test_flags_win_over_files_and_later_files_over_earlier_ones(tmp_path):
    (tmp_path / "a.toml").write_text('\ufefflr = 1e-4\nseed = 1\n[data]\npath = "json"\nname = "a"\nsplit = "a"\n')
    (tmp_path / "b.toml").write_text('seed = 2\npacks = 7\n[data]\nname = "b"\n')
    words = ["sft", "--packs", "5", f"@{tmp_path}/a.toml", "--data.split", "c", "--model-name=x", "--run-dir", "y",
             f"@{tmp_path}/b.toml", "--recompute"]  # fmt: skip
    config = ft.make_config(words)
    assert (config.command, config.lr, config.seed, config.packs) == ("sft", 1e-4, 2, 5)
    assert (config.resume, config.recompute) == (False, True)
    assert config.data == ft.Source(path="json", name="b", split="c")
    (tmp_path / "a.toml").write_text("packz = 3", encoding="utf-8")
    with pytest.raises(ft.RunError, match="--packz is 3: extra inputs are not permitted"):
        ft.make_config(words)


@pytest.mark.parametrize(("words", "sentence"), [
    (["--sequence-lenght", "9"], "unrecognized arguments: --sequence-lenght 9"),
    (["--packs", "many"], "--packs is 'many': input should be a valid integer"),
    (["--column", "talk"], "no column talk in ['messages']; choose one with --column, each row of it a list of {"),
    (["--val-rows", "60"], "--val-rows 60 is too many for 60 rows"),
    (["--chat-template", TEMPLATE.with_name("sft_qwen.toml")], "does not tag what the assistant says with"),
    (["--data.path", "/nowhere/x"], "load_dataset cannot load"),
    (["--model-name", "/nowhere/x"], "--model-name /nowhere/x cannot be loaded ("),
    (["--sequence-length", "1000", "--data.path", "/nowhere/x"], "exceeds the model's 256"),
    (["--attention", "eager9"], "--attention eager9 does not fit"),
    (["--sequence-length", "10"], "none of the 52 rows fits; check --sequence-length"),
    (["--resume", "--run-dir", "/nowhere"], "/nowhere/config.json cannot be read (FileNotFoundError: "),
    (["--chat-template", "/nowhere.jinja"], "No such file or directory: '/nowhere.jinja'; fix that"),
])  # fmt: skip
def test_mistakes_are_one_sentence(folder, tmp_path, words, sentence):
    words = ["sft", f"@{folder}/sft.toml", "--run-dir", tmp_path / "run", *words]
    assert sentence in refused(*words)


def test_runs_are_neither_overwritten_nor_mixed(folder, reference, tmp_path):
    words = ["sft", f"@{folder}/sft.toml", "--run-dir", reference]
    before = (reference / "log.jsonl").read_text()
    assert "already holds a run" in refused(*words)
    lengths = ["--sequence-length", 100], ["--packs", 4]
    for other in (*lengths, ["--seed", 1], ["--val-rows", 9], ["--workers", 2], ["--lora-rank", 8]):
        error = refused("--resume", "--run-dir", reference, *other)
        assert "was started with other data, model, length, packs, workers or seed" in error
    assert (reference / "log.jsonl").read_text() == before


def test_a_run_that_saved_nothing_starts_again(folder, reference, tmp_path, monkeypatch):
    """What each error says works: its log is none of the next run's."""
    words = ["sft", f"@{folder}/sft.toml", "--run-dir", tmp_path / "run"]
    with monkeypatch.context() as patch:
        patch.setattr(ft, "packed_loss", lambda model, batch, targets: model(**batch).logits.sum() * math.nan)
        assert "the gradient became nan; lower --lr, and --resume if there is" in refused(*words)
    resumed = refused("--resume", "--run-dir", tmp_path / "run")
    assert "has no complete checkpoint; start again without --resume" in resumed
    ran(main, *words)
    assert losses_of(tmp_path / "run") == losses_of(reference)


def test_without_its_packages(monkeypatch, capsys):
    """One sentence that says how to install them."""
    path = ROOT / "runs/huggingface/finetune_hf.py"
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(sys, "argv", [str(path), "sft"])
    with pytest.raises(SystemExit, match="^error: datasets is not installed; pip install -r runs/huggingface/"):
        runpy.run_path(str(path), run_name="__main__")
