"""An encoder as a EuroBERT for transformers and sentence-transformers."""

from pathlib import Path

import torch
from encoder_model import NORM_EPS, load_encoder, max_text_len, norm, script
from lib.export_files import make_folder, store_weights, write_json, write_tokenizer
from lib.export_portable import name_matrices, sizes
from lib.export_tokenizer import read_vocabulary
from torch import Tensor

MASK = "<|mask|>"


def encoder_weights(model, x0: Tensor) -> dict[str, Tensor]:
    """The weights of an encoder by EuroBERT's names; x0 is its normalised embedding."""
    c = model.config
    ones = torch.ones(c.width)  # the gains of norms
    tensors = {"model.embed_tokens.weight": x0, "model.norm.weight": ones}
    tensors["lm_head.weight"] = model.embed[: c.vocab_size]
    for layer in range(c.num_layers):
        q, k = model.qk_bank[layer].chunk(2)
        v, o = model.vo_bank[2 * layer : 2 * layer + 2]
        gate, up, down = model.mlp_bank[3 * layer : 3 * layer + 3]
        tensors |= name_matrices(layer, q=q, k=k, v=v, o=o, gate=gate, up=up, down=down.T)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = ones
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = ones
    return tensors


def write_sentence_transformers(folder: Path, width: int, max_len: int) -> None:
    """What sentence-transformers reads: mean pooling of the hidden states, then normalisation."""
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
    model, description, step = load_encoder(run_dir)
    c = model.config
    tokenizer = script.Tokenizer(run_dir / "tokenizer.json")
    tokenizer.specials[MASK] = c.vocab_size - 1
    vocabulary = read_vocabulary(tokenizer)
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.bos_id)
    fields = {
        "model_type": "eurobert",
        "architectures": ["EuroBertForMaskedLM"],
        **sizes(c),
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
        "tie_word_embeddings": False,
        **ids,
        "mask_token_id": c.vocab_size - 1,
        "dtype": "float32",
    }
    make_folder(out)
    write_json(out / "config.json", fields)
    vocabulary = vocabulary._replace(pad=vocabulary.bos, template="")
    write_tokenizer(out, vocabulary, c.max_seq_len, mask_token=MASK, padding_side="right")
    write_sentence_transformers(out, c.width, max_text_len(description))
    tensors = encoder_weights(model, norm(model.embed[: c.vocab_size]))
    store_weights(out / "model.safetensors", tensors, torch.float32)
    parameters = sum(weight.numel() for weight in tensors.values())
    print(f"wrote {out}: step {step}, {parameters / 1e6:.1f} M parameters, encoder")
