"""A trained model or encoder as a Hugging Face repository that transformers and tokenizers load.

    python runs/export.py out/RUN --out export/my-model
    AutoModelForCausalLM.from_pretrained("export/my-model", trust_remote_code=True)   # then, in Python
    python runs/export.py out/RUN --gguf my-model.gguf [--type q8_0]        for llama.cpp, ollama, LM Studio
    python runs/export.py FOLDER --gguf my-model.gguf       for an export of runs/portable.args, finetuned elsewhere
    python runs/export.py out/embed --out export/embed      of runs/finetune_encoder.py, for sentence-transformers

The folder holds model.safetensors, config.json, generation_config.json, tokenizer.json, tokenizer_config.json with the
chat template, the model's code (export_model.py, whose logits equal the script's) and README.md with results and
commands. `hf upload OWNER/NAME export/my-model` sends it to the hub. A run of runs/portable.args becomes a
Qwen3ForCausalLM, which needs no code of its own; only such a run can become a GGUF file. An encoder becomes a EuroBERT
with the mask as an additional token. Its embeddings are equal (dev/check_encoder.py), except for texts that spell a
special token such as <|bos|>: transformers takes that for the token, this project for text.

This executes the training script in the run directory.
"""

import argparse
import csv
import json
import shutil
import sys
from pathlib import Path

from lib.command import RunError, run_command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Export a model for transformers or llama.cpp.")
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="run directory, or for --gguf a finetuned portable export")
    add("--out", type=Path, help="folder to write, for transformers")
    add("--gguf", type=Path, metavar="FILE", help="file to write, for llama.cpp")
    add("--type", choices=("f32", "f16", "q8_0"), default="f16", help="of --gguf (default f16)")
    add("--step", type=int, help="checkpoint to take (default: the newest)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of --out (default float32)")
    add("--name", help="name in the model card, e.g. OWNER/NAME (default: the folder's)")
    add("--license", help="for the model card, as the hub spells it, e.g. mit")
    add("--language", default="en", help="for the model card (default: en)")
    args = parser.parse_args(argv)
    if not (args.out or args.gguf):
        parser.error("give --out DIR, --gguf FILE, or both")
    own_name = args.out.resolve().name if args.out else args.gguf.name.removesuffix(".gguf")
    args.path = args.name or from_here(args.out or args.gguf, own_name)
    args.name = args.name or own_name
    return args


def from_here(path: Path, otherwise: str) -> str:
    """A path relative to this folder, for commands; `otherwise` if it lies elsewhere, as cards name no local paths."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else otherwise


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import report
import torch
from engine import load_run
from gguf.vocab import bytes_to_unicode
from jinja2 import StrictUndefined, Template
from lib.chat_format import ASSISTANT_END, TURN_TOKENS, is_chat_run
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from lib import export_portable
from lib.export_portable import Vocabulary

LIB = Path(__file__).with_name("lib")

# ---- the model


# Fields of the script's Config that DecoderStackConfig has under the same name.
SAME_FIELDS = (
    "window_short window_long attention_scale rotary_base no_attention_layers long_layers key_offset_layers "
    "value_embed_layers shared_input_from gate_width bigram_rows trigram_rows mix_width"
).split()


def describe_model(model) -> dict:
    """The fields of DecoderStackConfig."""
    c = model.config
    high, shift, slope = c.softcap
    return {
        "model_type": "decoderstack",
        "architectures": ["DecoderStackForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_decoderstack.DecoderStackConfig",
            "AutoModel": "modeling_decoderstack.DecoderStackModel",
            "AutoModelForCausalLM": "modeling_decoderstack.DecoderStackForCausalLM",
        },
        **export_portable.sizes(c),
        "tie_word_embeddings": getattr(c, "tied", True),
        "x0_injection": getattr(c, "x0_injection", False),
        "injects_first": hasattr(model, "residual"),
        # high sigmoid((z + shift) / slope) = C tanh(scale (z + shift) / C) + C with C = high / 2, the usual form.
        "final_logit_softcapping": high / 2,
        "logit_scale": high / (4 * slope),
        "logit_bias": shift,
        **{name: getattr(c, name) for name in SAME_FIELDS},
    }


def layer_scalars(model, layer: int) -> dict[str, Tensor]:
    """The learned scalars of a layer that cannot be folded into a matrix."""
    c = model.config
    is_medium = hasattr(model, "residual")
    found = {}
    if is_medium:
        found["resid_attn"] = model.residual[layer]
        if c.x0_injection:
            found["share_x0"] = model.scalars[0, layer]
    else:
        found["resid_mlp"] = model.scalars[1, layer]
        if layer in c.attention_layers:
            found["resid_attn"] = model.scalars[0, layer]
    if c.bigram_rows:
        found["share_ngram"] = model.scalars[1 if is_medium else 5, layer]
    return found


@torch.no_grad()
def convert_weights(model) -> dict[str, Tensor]:
    """The weights by the names of export_model.py, fp32 but for n-gram tables, which have the checkpoint's dtype.

    layer_weights() folds scalars into the matrices that they multiply. Padding rows of the vocabulary are dropped.
    """
    c = model.config
    V = c.vocab_size
    D = c.width
    tensors = {"model.embed_tokens.weight": model.embed[:V]}
    if not getattr(c, "tied", True):
        tensors["lm_head.weight"] = model.head[:V]
    if c.bigram_rows:
        tensors["model.ngram.pairs.weight"] = model.bigram_embed
        tensors["model.ngram.signs"] = model.bigram_signs.to(torch.int8)
    if c.trigram_rows:
        tensors["model.ngram.triples.weight"] = model.trigram_embed
        tensors["model.ngram.out_proj.weight"] = model.trigram_proj
    if c.mix_width:
        tensors["model.mix.in_proj.weight"] = model.mix_in
        tensors["model.mix.out_proj.weight"] = model.mix_out

    for layer, weights in enumerate(model.layer_weights()):
        prefix = f"model.layers.{layer}"
        for name, value in layer_scalars(model, layer).items():
            tensors[f"{prefix}.scalars.{name}"] = value.view(1)
        tensors |= export_portable.name_matrices(layer, up=weights.up, down=weights.down.T)
        if weights.qkv is None:
            continue

        q, k, v = weights.qkv.view(3, D, D)
        tensors |= export_portable.name_matrices(layer, q=q, k=k, v=v, o=weights.o)
        if layer in c.value_embed_layers:
            index = c.value_embed_layers.index(layer)
            table = model.value_embed.view(-1, c.padded_vocab, D)[index]
            tensors[f"{prefix}.self_attn.value_embed.weight"] = table[:V]
            tensors[f"{prefix}.self_attn.value_gate.weight"] = model.value_gate[index]
    return tensors


def store_weights(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes safetensors; scalars stay fp32, as in training, and signs int8."""
    stored = {}
    for name, tensor in tensors.items():
        keeps_dtype = ".scalars." in name or tensor.dtype == torch.int8
        stored[name] = (tensor if keeps_dtype else tensor.to(dtype)).contiguous().clone()
    try:
        save_file(stored, path, {"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"cannot write {path} ({error}); make room, remove {path.parent} and try again") from None
    shutil.copymode(path.with_name("tokenizer.json"), path)  # else only its owner could read it


# ---- tokenizer


def to_merges(ranks: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Merges in order of priority. Any pair that spells a token may form it, so all pairs of a token are listed."""
    index = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for token in ranks:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in index and pair[1] in index]
        merges += sorted(known, key=lambda pair: (index[pair[0]], index[pair[1]]))
    return merges


def convert_tokenizer(pattern: str, ranks: list[bytes], specials: dict[str, int], bos: str) -> dict:
    """tokenizer.json of the `tokenizers` library; bos leads every text.

    Text encodes as with the project's own, except text that spells a special token, unless split_special_tokens=True.
    """
    letters = bytes_to_unicode()
    spell = lambda token: "".join(letters[b] for b in token)
    vocab = {spell(token): rank for rank, token in enumerate(ranks)}
    merges = [(spell(left), spell(right)) for left, right in to_merges(ranks)]
    # A word that is a token is that token, whether or not merges lead there.
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    tokenizer.decoder = decoders.ByteLevel()
    special = [(bos, specials[bos])]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", special)
    tokenizer.add_special_tokens(sorted(specials, key=specials.get))
    return json.loads(tokenizer.to_str())


# ---- model card


def training_data(dataset: Path, is_chat: bool) -> str:
    """Names of the sources of a dataset, if it is still on this computer."""
    path = dataset / "dataset.json"
    if not path.is_file():
        return "not stated; the dataset was missing when the model was exported"
    description = json.loads(path.read_text(encoding="utf-8"))
    conversations = description.get("sft", {}).get("sources", []) if is_chat else []
    return ", ".join([*description["sources"], *conversations])


def model_card(args: argparse.Namespace, fields: dict, parameters: int, step: int, bos: str) -> str:
    """README.md of the repository; args are those of the command line."""
    run_dir = args.run_dir
    log = report.read_log(run_dir)
    entries = [entry for entry in log if entry["step"] <= step]
    is_newest = len(entries) == len(log)
    result = report.read_result(run_dir, entries) if is_newest else report.latest(entries)
    description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    rows = report.table_rows(description, entries, result)
    rows.pop("data", None)  # a path on the computer that trained the model
    core = []
    if is_newest and (run_dir / "core.csv").is_file():
        header, *tasks = csv.reader((run_dir / "core.csv").read_text(encoding="utf-8").splitlines())
        core = [header, ["---"] * len(header), *tasks]
    is_chat = is_chat_run(run_dir)

    text = (LIB / "export_card.md").read_text(encoding="utf-8")
    options = {"trim_blocks": True, "keep_trailing_newline": True, "undefined": StrictUndefined}
    return Template(text, **options).render(
        **vars(args) | {"run_dir": from_here(run_dir, f"out/{run_dir.resolve().name}")},
        fields=fields,
        millions=parameters / 1e6,
        bos=bos,
        is_own="auto_map" in fields,
        is_chat=is_chat,
        data=training_data(Path(description["config"]["data"]), is_chat),
        rows=rows,
        scored=report.latest(entries).get("scored"),
        core=core,
        has_picture=is_newest and (run_dir / "curve.png").is_file(),
        run=run_dir.resolve().name,
    )


# ---- encoders

MASK = "<|mask|>"


def encoder_weights(model, x0: Tensor) -> dict[str, Tensor]:
    """The weights of an encoder by EuroBERT's names; x0 is its normalised embedding. Norms have gains, which are 1."""
    c = model.config
    ones = torch.ones(c.width)
    tensors = {"model.embed_tokens.weight": x0, "model.norm.weight": ones}
    tensors["lm_head.weight"] = model.embed[: c.vocab_size]
    for layer in range(c.num_layers):
        q, k = model.qk_bank[layer].chunk(2)
        v, o = model.vo_bank[2 * layer : 2 * layer + 2]
        gate, up, down = model.mlp_bank[3 * layer : 3 * layer + 3]
        tensors |= export_portable.name_matrices(layer, q=q, k=k, v=v, o=o, gate=gate, up=up, down=down.T)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = ones
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = ones
    return tensors


def write_sentence_transformers(folder: Path, width: int, max_len: int) -> None:
    """What sentence-transformers reads: the mean of the hidden states, divided by its length."""
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = []
    for number, (kind, path) in enumerate(parts.items()):
        kind = f"sentence_transformers.models.{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_len})
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling/config.json", pooling)
    write_json(folder / "2_Normalize/config.json", {})


@torch.no_grad()
def export_encoder(run_dir: Path, out: Path) -> None:
    """Writes the repository of an encoder, weights last. Raises: RunError, OSError"""
    import finetune_encoder
    import train_encoder

    model, description, step = finetune_encoder.load_encoder(run_dir)
    c = model.config
    tokenizer = train_encoder.script.Tokenizer(run_dir / "tokenizer.json")
    tokenizer.specials[MASK] = c.vocab_size - 1
    vocabulary = read_vocabulary(tokenizer)
    bos = tokenizer.bos_id
    fields = {
        "model_type": "eurobert",
        "architectures": ["EuroBertForMaskedLM"],
        **export_portable.sizes(c),
        "rms_norm_eps": train_encoder.NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
        "tie_word_embeddings": False,
        **{"pad_token_id": bos, "bos_token_id": bos, "eos_token_id": bos, "mask_token_id": c.vocab_size - 1},
        "dtype": "float32",
    }
    make_folder(out)
    write_json(out / "config.json", fields)
    more = {"mask_token": MASK, "padding_side": "right"}
    write_tokenizer(out, vocabulary._replace(pad=vocabulary.bos, template=""), c.max_seq_len, **more)
    write_sentence_transformers(out, c.width, finetune_encoder.longest_text(description))
    tensors = encoder_weights(model, train_encoder.norm(model.embed[: c.vocab_size]))
    store_weights(out / "model.safetensors", tensors, torch.float32)
    print(f"wrote {out}: step {step}, {sum(w.numel() for w in tensors.values()) / 1e6:.1f} M parameters, encoder")


# ---- the repository


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, vocabulary: Vocabulary, context: int, **more: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with `more` and the chat template (for base models too)."""
    write_json(folder / "tokenizer.json", vocabulary.content)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.end,
        "pad_token": vocabulary.pad,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if vocabulary.template:
        more["chat_template"] = vocabulary.template
    write_json(folder / "tokenizer_config.json", settings | more)


def make_folder(out: Path) -> None:
    """A new folder, or an empty one. Raises: RunError"""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is not an empty folder; choose another --out or remove it")
    out.mkdir(parents=True, exist_ok=True)


def convert(run_dir: Path, model, for_llama_cpp: bool) -> tuple[dict, dict[str, Tensor]]:
    """The fields of config.json and the weights. Raises: RunError for a shape that no export has"""
    c = model.config
    reason = export_portable.why_not_portable(model)
    if not reason:
        return export_portable.qwen_config(c), export_portable.qwen_weights(model)
    advice = "train with @runs/portable.args on a dataset of `data/pretrain.py --pattern qwen2`"
    if for_llama_cpp:
        raise RunError(f"llama.cpp does not know the shape of {run_dir} ({reason}); {advice}")
    if c.swiglu or c.rotary_full or not c.softcap:
        raise RunError(f"{run_dir} is only partly portable ({reason}); {advice}")
    return describe_model(model), convert_weights(model)


def read_vocabulary(tokenizer, is_chat: bool = False) -> Vocabulary:
    """The tokenizer of a run for other libraries."""
    specials = tokenizer.specials
    bos = next(text for text, i in specials.items() if i == tokenizer.bos_id)
    content = convert_tokenizer(tokenizer.pattern, list(tokenizer.mergeable), specials, bos)
    end = ASSISTANT_END if is_chat else bos
    # Padding differs from the end, which collators would not teach otherwise. The loss never counts <|output_end|>.
    pad = "<|output_end|>" if end == bos and "<|output_end|>" in specials else bos
    has_turns = specials.keys() >= {*TURN_TOKENS}
    template = (LIB / "export_chat.jinja").read_text(encoding="utf-8") if has_turns else ""
    return Vocabulary(content, tokenizer.pattern, specials, bos, end, pad, template)


def export(args: argparse.Namespace) -> None:
    """Writes the repository, the GGUF file, or both. Raises: RunError, OSError"""
    if any(args.run_dir.glob("*.safetensors")):
        if args.out:
            raise RunError(f"{args.run_dir} is an export already; give --gguf FILE without --out")
        content = export_portable.read_folder(args.run_dir)
        return export_portable.write_gguf(args.gguf, args.type, vars(args), *content)
    if (args.run_dir / "train_encoder.py").is_file():
        if args.gguf:
            raise RunError(f"{args.run_dir} is an encoder, which has no GGUF file here; give --out DIR instead")
        return export_encoder(args.run_dir, args.out)
    run = load_run(args.run_dir, args.step, "cpu", dtype="float32")
    fields, tensors = convert(args.run_dir, run.model, bool(args.gguf))
    is_chat = is_chat_run(args.run_dir)
    vocabulary = read_vocabulary(run.tokenizer, is_chat)

    parameters = sum(value.numel() for value in tensors.values() if value.dtype != torch.int8)
    if args.gguf:
        export_portable.write_gguf(args.gguf, args.type, vars(args), fields, tensors, vocabulary)
    if args.out:
        card = model_card(args, fields, parameters, run.step, vocabulary.bos)
        write_folder(args, fields, tensors, vocabulary, card)
        size = sum(path.stat().st_size for path in args.out.iterdir()) / 1e6
        about = f"step {run.step}, {parameters / 1e6:.1f} M parameters, {size:.1f} MB"
        print(f"wrote {args.out}: {about}, {'chat' if is_chat else 'base'} model")


def write_folder(args, fields: dict, tensors: dict, vocabulary, card: str) -> None:
    """Writes the repository, weights last, so that an unfinished folder does not load."""
    bos, end, pad = (vocabulary.specials[text] for text in (vocabulary.bos, vocabulary.end, vocabulary.pad))
    ids = {"bos_token_id": bos, "eos_token_id": sorted({bos, end}), "pad_token_id": pad}
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50}
    make_folder(args.out)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    if "(curve.png)" in card:
        shutil.copyfile(args.run_dir / "curve.png", args.out / "curve.png")
    if "auto_map" in fields:
        shutil.copyfile(LIB / "export_model.py", args.out / "modeling_decoderstack.py")
    write_json(args.out / "config.json", {**fields, **ids, "dtype": args.dtype})
    write_json(args.out / "generation_config.json", {**ids, **sampling})
    write_tokenizer(args.out, vocabulary, fields["max_position_embeddings"], padding_side="left")
    store_weights(args.out / "model.safetensors", tensors, getattr(torch, args.dtype))


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: export(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
