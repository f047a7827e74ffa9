"""A trained encoder as a folder that transformers and sentence-transformers load.

    python runs/export_encoder.py out/embed --out out/embed_hf
    AutoModel.from_pretrained("out/embed_hf")              # in Python; AutoModelForMaskedLM likewise
    SentenceTransformer("out/embed_hf").encode(texts)      # the embeddings of runs/finetune_encoder.py

The folder holds a EuroBERT, whose code is in transformers, a tokenizer with the mask as an additional token, and the
settings of sentence-transformers. dev/check_encoder.py compares the embeddings. They are equal, except for texts that
spell a special token such as <|bos|>: transformers takes that for the token, this project for text.
"""

import argparse
import sys
from pathlib import Path

from lib.command import run_command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of an encoder")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import finetune_encoder
import torch
import train_encoder as encoder
from export import make_folder, read_vocabulary, store_weights, write_json, write_tokenizer
from lib.export_portable import name_matrices, sizes
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
        tensors |= name_matrices(layer, q=q, k=k, v=v, o=o, gate=gate, up=up, down=down.T)
        tensors[f"{prefix}.input_layernorm.weight"] = ones
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones
    return tensors


def transformers_config(config: encoder.Config, bos_id: int) -> dict:
    return {
        "model_type": "eurobert",
        "architectures": ["EuroBertForMaskedLM"],
        **sizes(config),
        "rms_norm_eps": encoder.NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "tie_word_embeddings": False,
        "pad_token_id": bos_id,
        "bos_token_id": bos_id,
        "eos_token_id": bos_id,
        "mask_token_id": config.vocab_size - 1,
        "dtype": "float32",
    }


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


def export(run_dir: Path, out: Path) -> dict:
    """Writes the folder, the weights last. Raises: RunError"""
    model, description, step = finetune_encoder.load_encoder(run_dir)
    config = model.config
    tokenizer = script.Tokenizer(run_dir / "tokenizer.json")
    tokenizer.specials[MASK] = config.vocab_size - 1
    tensors = convert_weights(model)
    make_folder(out)
    write_json(out / "config.json", transformers_config(config, tokenizer.bos_id))
    more = {"mask_token": MASK, "padding_side": "right"}
    vocabulary = read_vocabulary(tokenizer)
    write_tokenizer(out, vocabulary._replace(pad=vocabulary.bos, template=""), config.max_seq_len, **more)
    write_sentence_transformers(out, config.width, finetune_encoder.longest_text(description))
    store_weights(out / "model.safetensors", tensors, torch.float32)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return {"out": str(out), "step": step, "parameters": parameters}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_command(lambda: export(args.run, args.out))


if __name__ == "__main__":
    sys.exit(main())
