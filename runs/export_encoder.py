"""A trained encoder as a folder that transformers and sentence-transformers load.

    python runs/export_encoder.py out/embed --out out/embed_hf
    AutoModel.from_pretrained("out/embed_hf")              # in Python; AutoModelForMaskedLM likewise
    SentenceTransformer("out/embed_hf").encode(texts)      # the embeddings of runs/finetune_encoder.py

It writes model.safetensors and config.json of a EuroBERT (transformers has the code), tokenizer.json
(for the `tokenizers` library) with one more token, the mask, and what sentence-transformers reads. It
needs neither of these packages. dev/check_encoder.py compares the embeddings. They are equal but for
texts that spell a special token, such as <|bos|>: to transformers that is the token, here it is text.
"""

import argparse
import json
import sys
from pathlib import Path

import finetune_encoder
import torch
import train_encoder as encoder
from engine import RunError
from export import convert_tokenizer, make_folder, store_weights, write_json
from torch import Tensor

script = encoder.script
MASK = "<|mask|>"


@torch.no_grad()
def convert_weights(model: encoder.Encoder) -> dict[str, Tensor]:
    """The weights by EuroBERT's names. Its norms have gains, which are 1."""
    c = model.config
    ones = torch.ones(c.width)
    # The first norm of this model works on the embedding, so it can be taken into the table.
    tensors = {
        "model.embed_tokens.weight": encoder.norm(model.embed[: c.vocab_size]),
        "lm_head.weight": model.embed[: c.vocab_size],
        "model.norm.weight": ones,
    }
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}"
        q, k = model.qk_bank[layer].chunk(2)
        v, o = model.vo_bank[2 * layer : 2 * layer + 2]
        gate, up, down = model.mlp_bank[3 * layer : 3 * layer + 3]
        for name, matrix in {"q": q, "k": k, "v": v, "o": o}.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = matrix
        for name, matrix in {"gate": gate, "up": up, "down": down.T}.items():
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = matrix
        tensors[f"{prefix}.input_layernorm.weight"] = ones
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones
    return tensors


def transformers_config(config: encoder.Config, bos_id: int) -> dict:
    return {
        "model_type": "eurobert",
        "architectures": ["EuroBertForMaskedLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": encoder.NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "tie_word_embeddings": False,
        "pad_token_id": bos_id,
        "bos_token_id": bos_id,
        "eos_token_id": bos_id,
        "mask_token_id": config.vocab_size - 1,
        "dtype": "float32",
    }


def write_tokenizer(folder: Path, path: Path, config: encoder.Config) -> None:
    """The tokenizer for transformers, with one token more: the mask."""
    tokenizer = script.Tokenizer(path)
    spec = json.loads(path.read_text(encoding="utf-8"))
    spec["special_tokens"][MASK] = config.vocab_size - 1
    ranks = sorted(tokenizer.mergeable, key=tokenizer.mergeable.get)
    bos = next(text for text, i in tokenizer.specials.items() if i == tokenizer.bos_id)
    write_json(folder / "tokenizer.json", convert_tokenizer(spec, ranks, bos))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": bos,
        "mask_token": MASK,
        "model_max_length": config.max_seq_len,
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_sentence_transformers(folder: Path, width: int, max_len: int) -> None:
    """What sentence-transformers reads: the mean of the hidden states, divided by its length."""
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = []
    for number, (kind, path) in enumerate(parts.items()):
        kind = f"sentence_transformers.models.{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "modules.json", modules)
    limits = {"max_seq_length": max_len, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", limits)
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling/config.json", pooling)
    write_json(folder / "2_Normalize/config.json", {})


def export(run_dir: Path, out: Path) -> dict:
    """Writes the folder, the weights last. Raises: UserError"""
    model, description, step = finetune_encoder.load_encoder(run_dir)
    config = model.config
    bos_id = script.Tokenizer(run_dir / "tokenizer.json").bos_id
    tensors = convert_weights(model)
    try:
        make_folder(out)
    except RunError as error:
        raise script.UserError(str(error)) from None
    write_json(out / "config.json", transformers_config(config, bos_id))
    write_tokenizer(out, run_dir / "tokenizer.json", config)
    write_sentence_transformers(out, config.width, finetune_encoder.longest_text(description))
    store_weights(out / "model.safetensors", tensors, torch.float32)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return {"out": str(out), "step": step, "parameters": parameters}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of an encoder")
    parser.add_argument("--out", required=True, type=Path, help="new folder")
    args = parser.parse_args(argv)
    return script.run_command(lambda: export(args.run, args.out))


if __name__ == "__main__":
    sys.exit(main())
