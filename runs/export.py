"""A trained model as a Hugging Face repository that transformers and tokenizers load.

    python runs/export.py out/RUN --out export/my-model
    AutoModelForCausalLM.from_pretrained("export/my-model", trust_remote_code=True)      # then, in Python

It writes model.safetensors, config.json, generation_config.json, tokenizer.json (for the `tokenizers` library),
tokenizer_config.json with the chat template, the training script as it ran with a thin modelling file beside it, and
README.md with the results. The model is the script's own GPT class, so its logits are the script's. Exporting does not
need transformers; upload the folder with `hf upload OWNER/NAME export/my-model`.

This executes the training script that lies in the run directory.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import torch
from chat import is_chat_run
from engine import RunError, import_script
from safetensors.torch import load_file, save_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CONFIGURATION = '''"""The configuration of a DecoderStack model for transformers."""

from transformers import PretrainedConfig


class DecoderStackConfig(PretrainedConfig):
    """script_config holds the Config of the training script; stage holds windows, scale and rotary frequencies."""

    model_type = "decoderstack"

    def __init__(self, script_config=None, stage=None, **kwargs):
        self.script_config = script_config or {}
        self.stage = stage or {}
        super().__init__(**kwargs)
'''

MODELING = '''"""A DecoderStack model for transformers: a thin shell around the GPT class of its training script."""

import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_decoderstack import DecoderStackConfig
from .@SCRIPT@ import GPT, Config, as_tuple, sdpa_attention


class DecoderStackForCausalLM(GenerationMixin, PreTrainedModel):
    """No KV cache: generate() runs the whole text for each new token. The project's own tools decode with a cache."""

    config_class = DecoderStackConfig
    base_model_prefix = "gpt"
    main_input_name = "input_ids"
    _keep_in_fp32_modules_strict = ["scalars"]
    _supports_cache_class = False

    def __init__(self, config):
        super().__init__(config)
        with torch.device("cpu"):  # transformers builds models on the meta device, where tables cannot be filled
            values = {name: as_tuple(value) for name, value in config.script_config.items()}
            self.gpt = GPT(Config(**values), dtype=torch.get_default_dtype())  # which from_pretrained sets
        self.tables_device = None
        self.post_init()

    def _init_weights(self, module):
        """All weights come from model.safetensors."""

    def get_input_embeddings(self):
        return None  # a plain parameter in the script, which cannot be replaced

    def prepare(self, device):
        """Windows, scale and rotary table are not weights: they are rebuilt, in fp32, on the model's device."""
        gpt = self.gpt
        gpt.attention = sdpa_attention
        shapes = (gpt.config.max_seq_len, gpt.config.head_dim)
        gpt.rotary = torch.zeros(2, *shapes, device=device)
        gpt.attention_scale = torch.zeros((), device=device)
        gpt.window_sizes = torch.zeros(2, dtype=torch.int32, device=device)
        gpt.loss_weights = torch.ones(len(gpt.config.ahead), device=device)
        with torch.device("cpu"):
            gpt.set_stage(self.config.stage)
        self.tables_device = device

    def forward(self, input_ids, attention_mask=None, labels=None, return_dict=True, logits_to_keep=0, **unused):
        """Rows are packed without their padding, left or right; logits at padding are 0."""
        device = input_ids.device
        if self.tables_device != device or self.gpt.rotary.dtype != torch.float32:
            self.prepare(device)
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        lengths = real.sum(1)
        longest, limit = int(lengths.max()), self.gpt.config.max_seq_len
        if longest > limit:
            raise ValueError(f"the text has {longest} tokens but the model's context is {limit}; shorten it")
        ends = lengths.cumsum(0)
        borders = torch.cat((ends.new_zeros(1), ends)).int()
        positions = (real.long().cumsum(1) - 1)[real].int()
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            flat = self.gpt(input_ids[real].int(), None, positions, borders, longest)[:, : self.config.vocab_size]
        logits = flat.new_zeros(*input_ids.shape, flat.size(-1))
        logits[real] = flat
        loss = None
        if labels is not None:
            targets = torch.where(real[:, :-1] & real[:, 1:], labels[:, 1:], -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        if isinstance(logits_to_keep, int) and logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return CausalLMOutputWithPast(loss=loss, logits=logits) if return_dict else (logits,)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **unused):
        return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
'''

# As data/sft.py renders conversations; tool parts too. Nothing stands between the tokens.
CHAT_TEMPLATE = """\
{{- '<|bos|>' -}}
{%- set lead = namespace(text='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- set lead.text = message.content + '\\n\\n' -%}
{%- elif message.role == 'user' -%}
{{- '<|user_start|>' + lead.text + message.content + '<|user_end|>' -}}
{%- set lead.text = '' -%}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant_start|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'python' -%}
{{- '<|python_start|>' + part.text + '<|python_end|>' -}}
{%- elif part.type == 'python_output' -%}
{{- '<|output_start|>' + part.text + '<|output_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|assistant_end|>' -}}
{%- else -%}
{{- raise_exception('unknown role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant_start|>' -}}
{%- endif -%}
"""


def fail(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


# ---- tokenizer


def byte_letters() -> list[str]:
    """GPT-2's spelling of bytes as characters: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    for b in range(256):
        letters.setdefault(b, chr(256 + len(letters) - len(printable)))
    return [letters[b] for b in range(256)]


def to_merges(ranks: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Merges in the order in which they apply. Ranks allow any pair that spells a token, so all pairs of a token are
    listed, one after the other, and not only the pair by which training found it."""
    index = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for token in ranks:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in index and pair[1] in index]
        merges += sorted(known, key=lambda pair: (index[pair[0]], index[pair[1]]))
    return merges


def convert_tokenizer(spec: dict, ranks: list[bytes], bos: str) -> dict:
    """tokenizer.json of the `tokenizers` library. Text encodes as with the project's own; bos leads every text."""
    letters = byte_letters()
    spell = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    specials = dict(sorted(spec["special_tokens"].items(), key=lambda pair: pair[1]))
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    bos_piece = {"SpecialToken": {"id": bos, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for text, i in specials.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": spec["pattern"]}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ]},
        "post_processor": {
            "type": "TemplateProcessing", "single": [bos_piece, a], "pair": [bos_piece, a, bos_piece, b],
            "special_tokens": {bos: {"id": bos, "ids": [specials[bos]], "tokens": [bos]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": True,  # a word that is a token is that token, whether or not merges lead there
            "vocab": {spell(token): rank for rank, token in enumerate(ranks)},
            "merges": [[spell(left), spell(right)] for left, right in to_merges(ranks)],
        },
    }  # fmt: skip


# ---- model card


def report_table(run_dir: Path, last: dict) -> str:
    """The result table of the run's report, or the last figures of its log."""
    report = run_dir / "report.md"
    text = report.read_text(encoding="utf-8") if report.is_file() else ""
    if match := re.search(r"^\|.*\|\n\| ---.*(?:\n\|.*\|)+", text, re.M):
        return match[0]
    names = {"val_bpb": "validation, bits per byte", "step": "steps", "tokens": "training tokens",
             "train_seconds": "training time, s"}  # fmt: skip
    rows = [
        f"| {label} | {last[key]:,.6g} |"
        for key, label in names.items()
        if isinstance(last.get(key), int | float)
    ]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def model_card(
    name: str, run_dir: Path, config, parameters: int, last: dict, chat: bool, picture: bool
) -> str:
    core = ""
    if (run_dir / "core.csv").is_file():
        header, *rows = (run_dir / "core.csv").read_text(encoding="utf-8").strip().splitlines()
        lines = [header, ",".join(["---"] * len(header.split(","))), *rows]
        core = (
            "\n## CORE\n\n"
            + "\n".join("| " + " | ".join(line.split(",")) + " |" for line in lines)
            + "\n"
        )
    if chat:
        use = """\
messages = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
"""
        kind = "It was finetuned for conversations; the chat template is in the tokenizer."
    else:
        use = 'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        kind = "It is a base model: it continues text and was not finetuned for conversations."
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- decoderstack
---

# {name}

A decoder-only language model of {parameters / 1e6:.1f} million parameters ({config.num_layers} layers, width
{config.width}, {config.vocab_size:,} tokens of vocabulary, context of {config.max_seq_len:,}), trained with
DecoderStack. {kind}

## Results

{report_table(run_dir, last)}
{core}
{"![loss curve](curve.png)" if picture else ""}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
{use}output = model.generate(**inputs, max_new_tokens=100)
print(tokenizer.decode(output[0][inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

`trust_remote_code=True` runs the Python files of this repository: the script that trained the model and a thin shell
around its model class. Read them first.

## Limits

- `generate` keeps no KV cache here and computes the whole text for each new token. Use DecoderStack itself for speed.
- A text of more than {config.max_seq_len:,} tokens is refused.
- Special tokens spelled in a text become special tokens here, as usual in transformers; for text of strangers set
  `tokenizer.backend_tokenizer.encode_special_tokens = True`, and add special tokens by their ids.
- The model is small: it makes up facts, and its training text was not filtered for what you may find offensive.
"""


# ---- the repository


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def export(
    run_dir: Path, out: Path, step: int | None = None, dtype: str = "float32", name: str = ""
) -> None:
    """Writes the repository beside its final name and renames it. Refuses a folder that holds files."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fail(f"{out} is not an empty folder; choose another --out or remove it")
    try:
        script = import_script(run_dir)
    except RunError as error:
        fail(str(error))
    try:
        config = script.read_config(run_dir)
        tokenizer = script.Tokenizer(run_dir / "tokenizer.json")
    except script.UserError as error:
        fail(str(error))
    found = [p for p in script.checkpoints(run_dir) if step is None or int(p.name[5:]) == step]
    if not found:
        fail(f"no checkpoint {'' if step is None else f'of step {step} '}in {run_dir}/checkpoints; name a run "
             f"directory with a finished save")  # fmt: skip
    try:
        weights = load_file(found[-1] / "model.safetensors")
        state = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))
    except Exception as error:  # safetensors has exceptions of its own
        fail(f"the checkpoint {found[-1]} cannot be read ({error}); choose another with --step")
    chat, name = is_chat_run(run_dir), name or out.resolve().name
    log = run_dir / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    last = {
        k: v
        for line in lines
        for k, v in json.loads(line).items()
        if json.loads(line)["step"] <= state["step"]
    }
    spec = json.loads((run_dir / "tokenizer.json").read_text(encoding="utf-8"))
    ranks = sorted(tokenizer.mergeable, key=tokenizer.mergeable.get)
    bos = next(text for text, i in tokenizer.specials.items() if i == tokenizer.bos_id)
    end = "<|assistant_end|>" if chat else bos
    stops = sorted({tokenizer.bos_id, tokenizer.specials[end]})
    source = Path(script.__file__)

    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        kept = {"scalars"}  # whole-model scalars stay fp32, as in training
        tensors = {f"gpt.{k}": v if k in kept else v.to(DTYPES[dtype]) for k, v in weights.items()}
        save_file(
            {k: v.contiguous() for k, v in tensors.items()},
            temporary / "model.safetensors",
            {"format": "pt"},
        )
        os.chmod(temporary / "model.safetensors", 0o644)  # else only its owner could read it
        write_json(temporary / "config.json", {
            "model_type": "decoderstack", "architectures": ["DecoderStackForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_decoderstack.DecoderStackConfig",
                         "AutoModelForCausalLM": "modeling_decoderstack.DecoderStackForCausalLM"},
            "vocab_size": config.vocab_size, "hidden_size": config.width, "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads, "intermediate_size": config.mlp_width,
            "max_position_embeddings": config.max_seq_len, "bos_token_id": tokenizer.bos_id, "eos_token_id": stops,
            "pad_token_id": tokenizer.bos_id, "tie_word_embeddings": False, "use_cache": False, "dtype": dtype,
            "torch_dtype": dtype, "stage": state["attention"],
            "script_config": {key: "" if key in ("data", "source") else value  # no folder of this computer
                              for key, value in dataclasses.asdict(config).items()},
        })  # fmt: skip
        write_json(temporary / "generation_config.json", {
            "bos_token_id": tokenizer.bos_id, "eos_token_id": stops, "pad_token_id": tokenizer.bos_id,
            "do_sample": True, "temperature": 0.8, "top_k": 50, "use_cache": False,
        })  # fmt: skip
        write_json(temporary / "tokenizer.json", convert_tokenizer(spec, ranks, bos))
        template = {"chat_template": CHAT_TEMPLATE} if chat else {}
        write_json(temporary / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": end, "pad_token": bos,
            "model_max_length": config.max_seq_len, "clean_up_tokenization_spaces": False, "padding_side": "left",
            "model_input_names": ["input_ids", "attention_mask"], **template,
        })  # fmt: skip
        shutil.copyfile(source, temporary / source.name)
        (temporary / "configuration_decoderstack.py").write_text(CONFIGURATION, encoding="utf-8")
        modeling = MODELING.replace("@SCRIPT@", source.stem)
        (temporary / "modeling_decoderstack.py").write_text(modeling, encoding="utf-8")
        if picture := (run_dir / "curve.png").is_file():
            shutil.copyfile(run_dir / "curve.png", temporary / "curve.png")
        parameters = sum(v.numel() for k, v in weights.items() if k != "bigram_signs")
        card = model_card(name, run_dir, config, parameters, last, chat, picture)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if out.is_dir():
            out.rmdir()  # empty
        os.replace(temporary, out)
    except OSError as error:
        fail(
            f"cannot write {out} ({error.strerror or error}); check its folder and the space there"
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    size = sum(p.stat().st_size for p in out.iterdir())
    print(f"wrote {out}: step {state['step']}, {parameters / 1e6:.1f} M parameters, {size / 1e6:.1f} MB, "
          f"{'chat' if chat else 'base'} model")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="A trained model as a Hugging Face repository.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--out", required=True, type=Path, help="new folder")
    parser.add_argument("--step", type=int, help="checkpoint to take (default: the newest)")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="float32", help="of the stored weights"
    )
    parser.add_argument(
        "--name", default="", help="name in the model card, e.g. OWNER/NAME (default: the folder's)"
    )
    args = parser.parse_args()
    export(args.run_dir, args.out, args.step, args.dtype, args.name)


if __name__ == "__main__":
    main()
