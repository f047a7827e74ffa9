"""A trained model as a Hugging Face repository that transformers and tokenizers load.

    python runs/export.py out/RUN --out export/my-model [--push OWNER/NAME]
    AutoModelForCausalLM.from_pretrained("export/my-model", trust_remote_code=True)   # then, in Python

It writes model.safetensors, config.json, generation_config.json, tokenizer.json (for the `tokenizers`
library), tokenizer_config.json with the chat template, the model's code (export_model.py, a plain
layered model whose logits are the script's) and README.md with results and commands. Exporting needs
no transformers. --push sends the folder to a model repository of the hub, which it makes if there is none, with the
token of `hf auth login` or of HF_TOKEN; `hf upload OWNER/NAME export/my-model` does the same later.

This executes the training script that lies in the run directory.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

import torch
from chat import is_chat_run
from engine import RunError, import_script, print_note
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
import hub

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL_CODE = Path(__file__).with_name("export_model.py")
CHAT_TEMPLATE = Path(__file__).with_name("export_chat.jinja")
CARD = Path(__file__).with_name("export_card.md")
WEIGHTS_ONLY = ("model.safetensors",)

# Rows of the script's table of learned scalars; the last row holds those of the whole model.
SMALL_SCALARS = ("resid_attn", "resid_mlp", "scale_v", "scale_o", "scale_down", "share_bigram")
MEDIUM_SCALARS = ("share_x0", "share_bigram")
MODEL_SCALARS = ("backout",)


def fail(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


# ---- the model


def read_checkpoint(script, run_dir: Path, step: int | None) -> tuple[torch.nn.Module, dict]:
    """The script's model with the weights of a checkpoint, in fp32 on the CPU, and its description.

    Ends with a message if there is none, or if it is damaged.
    """
    if step is None:
        folder = script.newest_whole(run_dir, print_note, WEIGHTS_ONLY)
    else:
        folder = run_dir / "checkpoints" / f"step_{step:06d}"
        if folder not in script.checkpoints(run_dir):
            fail(f"no checkpoint of step {step} in {run_dir}/checkpoints; name another with --step, or "
                 f"leave it out")  # fmt: skip
    description = script.check_checkpoint(folder, WEIGHTS_ONLY)
    model = script.GPT(script.read_config(run_dir), "cpu", torch.float32)
    weights = load_file(folder / "model.safetensors")
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        fail(
            f"the weights in {folder} do not fit config.json; restore config.json as the run wrote it"
        )
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        fail(f"the weights in {folder} are not all finite; name an earlier checkpoint with --step")
    return model, description


def describe_model(model) -> dict:
    """The fields of DecoderStackConfig."""
    c = model.config
    high, shift, slope = c.softcap
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.mlp_width,
        "max_position_embeddings": c.max_seq_len,
        "tie_word_embeddings": c.tied,
        "window_short": c.window_short,
        "window_long": c.window_long,
        "attention_scale": c.attention_scale,
        "rotary_base": c.rotary_base,
        "no_attention_layers": list(c.no_attention_layers),
        "long_layers": list(c.long_layers),
        "key_offset_layers": list(c.key_offset_layers),
        "value_embed_layers": list(c.value_embed_layers),
        "shared_input_from": c.shared_input_from,
        "gate_width": c.gate_width,
        "injects_first": hasattr(model, "residual"),
        "x0_injection": c.x0_injection,
        "bigram_rows": c.bigram_rows,
        "backout_layer": c.backout_layer,
        "mix_width": c.mix_width,
        # high sigmoid((z + shift) / slope) = C tanh(scale (z + shift) / C) + C with C = high / 2:
        # the form that other tools know from other models.
        "final_logit_softcapping": high / 2,
        "logit_scale": high / (4 * slope),
        "logit_bias": shift,
    }


def read_scalars(model) -> tuple[list[dict], dict]:
    """The learned scalars by name: of each layer, and of the whole model."""
    is_medium = hasattr(model, "residual")
    names = MEDIUM_SCALARS if is_medium else SMALL_SCALARS
    table = model.scalars
    if len(table) != len(names) + 1:
        fail(f"the script's table of scalars has {len(table)} rows and not {len(names) + 1}; use the "
             f"export.py of the commit that made the run")  # fmt: skip
    of_layers = [dict(zip(names, column, strict=False)) for column in table.T]
    if is_medium:
        for layer, factor in zip(of_layers, model.residual, strict=True):
            layer["resid_attn"] = factor
    return of_layers, dict(zip(MODEL_SCALARS, table[-1], strict=False))


def layer_scalars(model, layer: int) -> list[str]:
    """Names of the scalars that a layer uses and that no matrix takes in."""
    c = model.config
    is_used = {
        "resid_attn": layer in c.attention_layers,
        "resid_mlp": not hasattr(model, "residual"),
        "share_x0": c.x0_injection,
        "share_bigram": c.bigram_rows > 0,
    }
    return [name for name, used in is_used.items() if used]


@torch.no_grad()
def convert_weights(model) -> dict[str, Tensor]:
    """The weights by the names of export_model.py, fp32.

    Scalars that multiply a matrix are folded into it by layer_weights(). Rows that only pad the
    vocabulary are left out.
    """
    c = model.config
    V = c.vocab_size
    D = c.width
    scalars_of_layers, scalars_of_model = read_scalars(model)
    tensors = {"model.embed_tokens.weight": model.embed[:V]}
    if not c.tied:
        tensors["lm_head.weight"] = model.head[:V]
    tensors["lm_head.bias"] = torch.full((V,), float(c.softcap[1]))
    if c.bigram_rows:
        tensors["model.bigram.embed.weight"] = model.bigram_embed
        tensors["model.bigram.signs"] = model.bigram_signs.to(torch.int8)
    if c.backout_layer >= 0:
        tensors["model.scalars.backout"] = scalars_of_model["backout"].view(1)
    if c.mix_width:
        tensors["model.mix.in_proj.weight"] = model.mix_in
        tensors["model.mix.out_proj.weight"] = model.mix_out

    for layer, weights in enumerate(model.layer_weights()):
        prefix = f"model.layers.{layer}"
        for name in layer_scalars(model, layer):
            tensors[f"{prefix}.scalars.{name}"] = scalars_of_layers[layer][name].view(1)
        tensors[f"{prefix}.mlp.up_proj.weight"] = weights.up
        tensors[f"{prefix}.mlp.down_proj.weight"] = weights.down.T
        if weights.qkv is None:
            continue

        prefix += ".self_attn"
        for name, matrix in zip("qkv", weights.qkv.view(3, D, D), strict=True):
            tensors[f"{prefix}.{name}_proj.weight"] = matrix
        tensors[f"{prefix}.o_proj.weight"] = weights.o
        if layer in c.value_embed_layers:
            index = c.value_embed_layers.index(layer)
            table = model.value_embed.view(-1, c.padded_vocab, D)[index]
            tensors[f"{prefix}.value_embed.weight"] = table[:V]
            tensors[f"{prefix}.value_gate.weight"] = model.value_gate[index]
    return tensors


def store_weights(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes safetensors; scalars stay fp32, as in training, and signs int8."""
    stored = {}
    for name, tensor in tensors.items():
        keeps_dtype = ".scalars." in name or tensor.dtype == torch.int8
        stored[name] = (tensor if keeps_dtype else tensor.to(dtype)).contiguous().clone()
    save_file(stored, path, {"format": "pt"})
    os.chmod(path, 0o644)  # else only its owner could read it


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
    """tokenizer.json of the `tokenizers` library; bos leads every text.

    Text encodes as with the project's own, except text that spells a special token, unless
    split_special_tokens=True.
    """
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

CHAT_PROMPT = """\
messages = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
"""
BASE_PROMPT = 'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'

# {options} of a base model name the template, which its tokenizer does not have.
FINETUNE = """\
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=conversations,  # a datasets.Dataset with a column "messages"
    args=SFTConfig(output_dir="sft", max_length={context}, assistant_only_loss=True{options}),
    peft_config=LoraConfig(target_modules="all-linear"),  # or leave it out to train all weights
)
"""
BASE_TEMPLATE = "chat_template_for_finetuning.jinja"


def report_table(run_dir: Path, last: dict, newest: bool) -> str:
    """The result table of the run's report, if that is about the newest step, or figures of its log.

    The row with the dataset is left out: it is a path on the computer that trained the model.
    """
    report = run_dir / "report.md"
    text = report.read_text(encoding="utf-8") if newest and report.is_file() else ""
    if match := re.search(r"^\|.*\|\n\| ---.*(?:\n\|.*\|)+", text, re.M):
        return "\n".join(row for row in match[0].splitlines() if not row.startswith("| data |"))
    names = {
        "val_bpb": "validation, bits per byte",
        "step": "steps",
        "tokens": "training tokens",
        "train_seconds": "training time, s",
    }
    known = [key for key in names if isinstance(last.get(key), int | float)]
    rows = [f"| {names[key]} | {last[key]:,.6g} |" for key in known]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def core_table(run_dir: Path) -> str:
    """A section with core.csv, or nothing."""
    path = run_dir / "core.csv"
    if not path.is_file():
        return ""
    header, *rows = path.read_text(encoding="utf-8").strip().splitlines()
    rule = ",".join(["---"] * len(header.split(",")))
    lines = ["| " + " | ".join(line.split(",")) + " |" for line in (header, rule, *rows)]
    return "\n## CORE\n\n" + "\n".join(lines) + "\n"


def unusual_parts(fields: dict) -> str:
    """What a tool that knows common architectures would lack, for the model card."""
    parts = []
    if fields["key_offset_layers"]:
        parts.append("keys that take half of themselves from the token before")
    if fields["value_embed_layers"]:
        parts.append("embeddings added to the values")
    if fields["bigram_rows"]:
        parts.append("an embedding of token pairs")
    parts.append("learned factors of the residual stream")
    return textwrap.fill(", ".join(parts), 110, subsequent_indent="  ")


def last_figures(run_dir: Path, step: float = math.inf) -> dict:
    """The newest value of each key in the run's log, up to a step; a line that a crash cut is skipped."""
    log = run_dir / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    last = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if entry["step"] <= step:
                last |= entry
    return last


def is_newest(run_dir: Path, step: int) -> bool:
    """Whether the log ends with this step; report.md, core.csv and curve.png are of that one."""
    return last_figures(run_dir, step) == last_figures(run_dir)


def model_card(name: str, run_dir: Path, fields: dict, parameters: int, step: int, bos: str) -> str:
    chat = is_chat_run(run_dir)
    context = fields["max_position_embeddings"]
    base_options = f',\n        chat_template_path="{BASE_TEMPLATE}", eos_token="<|assistant_end|>"'
    newest = is_newest(run_dir, step)
    has_picture = newest and (run_dir / "curve.png").is_file()
    chat_kind = "It was finetuned for conversations; the chat template is in the tokenizer."
    base_kind = "It is a base model: it continues text and was not finetuned for conversations."
    return CARD.read_text(encoding="utf-8").format(
        name=name,
        millions=parameters / 1e6,
        layers=fields["num_hidden_layers"],
        width=fields["hidden_size"],
        vocab=fields["vocab_size"],
        context=context,
        kind=chat_kind if chat else base_kind,
        results=report_table(run_dir, last_figures(run_dir, step), newest),
        core=core_table(run_dir) if newest else "",
        picture="\n![loss curve](curve.png)\n" if has_picture else "",
        prompt=CHAT_PROMPT if chat else BASE_PROMPT,
        finetune=FINETUNE.format(context=context, options="" if chat else base_options),
        bos=bos,
        or_chat="or let it chat " if chat else "",
        chat_flag=" --apply_chat_template" if chat else "",
        parts=unusual_parts(fields),
        run=run_dir.resolve().name,
    )


# ---- the repository


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(
    folder: Path, run_dir: Path, tokenizer, fields: dict, bos: str, end: str
) -> None:
    spec = json.loads((run_dir / "tokenizer.json").read_text(encoding="utf-8"))
    ranks = sorted(tokenizer.mergeable, key=tokenizer.mergeable.get)
    write_json(folder / "tokenizer.json", convert_tokenizer(spec, ranks, bos))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": end,
        "pad_token": bos,
        "model_max_length": fields["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if is_chat_run(run_dir):
        settings["chat_template"] = CHAT_TEMPLATE.read_text(encoding="utf-8")
    elif "<|assistant_end|>" in tokenizer.specials:
        shutil.copyfile(CHAT_TEMPLATE, folder / BASE_TEMPLATE)
    write_json(folder / "tokenizer_config.json", settings)


def write_config(folder: Path, fields: dict, ids: dict, dtype: str) -> None:
    classes = "modeling_decoderstack.DecoderStack"
    config = {
        "model_type": "decoderstack",
        "architectures": ["DecoderStackForCausalLM"],
        "auto_map": {
            "AutoConfig": classes + "Config",
            "AutoModel": classes + "Model",
            "AutoModelForCausalLM": classes + "ForCausalLM",
        },
        **ids,
        "dtype": dtype,
        **fields,
    }
    write_json(folder / "config.json", config)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50}
    write_json(folder / "generation_config.json", {**ids, **sampling})


def export(
    run_dir: Path, out: Path, step: int | None = None, dtype: str = "float32", name: str = ""
) -> None:
    """Writes the repository beside its final name and renames it. Refuses a folder that holds files."""
    if out.resolve() == Path.cwd():
        fail(f"--out {out} is the current folder; name a new one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fail(f"{out} is not an empty folder; choose another --out or remove it")
    try:
        script = import_script(run_dir)
    except RunError as error:
        fail(str(error))
    try:
        model, description = read_checkpoint(script, run_dir, step)
        tokenizer = script.Tokenizer(run_dir / "tokenizer.json")
    except script.UserError as error:
        fail(str(error))

    name = name or out.resolve().name
    bos = next(text for text, i in tokenizer.specials.items() if i == tokenizer.bos_id)
    end = "<|assistant_end|>" if is_chat_run(run_dir) else bos
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": sorted({tokenizer.bos_id, tokenizer.specials[end]}),
        "pad_token_id": tokenizer.bos_id,
    }
    fields = describe_model(model)
    tensors = convert_weights(model)
    parameters = sum(value.numel() for value in tensors.values() if value.dtype != torch.int8)

    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        store_weights(temporary / "model.safetensors", tensors, DTYPES[dtype])
        write_config(temporary, fields, ids, dtype)
        write_tokenizer(temporary, run_dir, tokenizer, fields, bos, end)
        shutil.copyfile(MODEL_CODE, temporary / "modeling_decoderstack.py")
        if is_newest(run_dir, description["step"]) and (run_dir / "curve.png").is_file():
            shutil.copyfile(run_dir / "curve.png", temporary / "curve.png")
        card = model_card(name, run_dir, fields, parameters, description["step"], bos)
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

    size = sum(path.stat().st_size for path in out.iterdir())
    kind = "chat" if is_chat_run(run_dir) else "base"
    print(
        f"wrote {out}: step {description['step']}, {parameters / 1e6:.1f} M parameters, "
        f"{size / 1e6:.1f} MB, {kind} model"
    )


def push(folder: Path, repo: str) -> None:
    """Sends an export to a model repository of the hub."""
    from huggingface_hub import HfApi

    hub.prepare()
    api = HfApi()
    way = f"({folder} is written; `hf upload {repo} {folder}` sends it later)"
    hub.retry(lambda: api.create_repo(repo, exist_ok=True), f"creating {repo} {way}")
    hub.retry(
        lambda: api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Add the model"),
        f"sending to {repo} {way}",
    )
    print(f"sent {folder} to {repo}")


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
    parser.add_argument("--push", metavar="OWNER/NAME", help="also send it to the hub")
    args = parser.parse_args()
    if args.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.push):
        fail(f"--push {args.push} is not a repository name; give OWNER/NAME")
    export(args.run_dir, args.out, args.step, args.dtype, args.name or args.push or "")
    if args.push:
        push(args.out, args.push)


if __name__ == "__main__":
    main()
