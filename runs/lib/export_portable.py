"""A run of runs/portable.args as a Qwen3ForCausalLM, in safetensors or GGUF.

Qwen3 has norms with gains, a scale of 1 / sqrt(head width), rotary pairs of the channels i and
i + K / 2, and separate tables for input and output. What the script does differently is folded into
the weights exactly:

- A factor on the residual stream is divided out of what is added later, as norm(a x) = norm(x).
- The norm of the embedding is applied to the input table, which then differs from the output table.
- The attention scale is put into the gains of the query norm; all other gains are 1.
- Channels of queries and keys are reordered within each head.
"""

import json
import math
import re
import shlex
import sys
from pathlib import Path

import gguf
import torch
from jinja2 import Template
from lib.command import RunError
from lib.export_tokenizer import Vocabulary
from safetensors.torch import load_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "data"))
from tokenizer import PATTERNS

HOW_TO_TRAIN = "train with @runs/portable.args on a dataset of `data/pretrain.py --pattern qwen2`"
HOW_TO_RUN = Path(__file__).with_name("export_gguf.jinja")
EPS = torch.finfo(torch.float32).eps  # what F.rms_norm adds
TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}  # llama.cpp's names
# Split patterns that llama.cpp knows, and what it calls them.
LLAMA_CPP_PATTERNS = {PATTERNS["llama3"]: "llama-bpe", PATTERNS["qwen2"]: "qwen2", PATTERNS["gpt2"]: "gpt-2"}
# Tags of the loss mask in a chat template, which only transformers knows.
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


# ---- the model


# What Qwen3 has or lacks, as fields of the script's Config.
QWEN = {
    "swiglu": True, "rotary_full": True, "softcap": (), "tied": True, "x0_injection": False, "bigram_rows": 0,
    "mudd_width": 0, "value_embed_layers": (), "key_offset_layers": (), "no_attention_layers": (),
    "paired_layers": (), "exclusive_layers": (), "gated_layers": (),
}  # fmt: skip


def why_not_portable(model) -> str:
    """What a model has that Qwen3 lacks, or ""."""
    c = model.config
    for name, value in QWEN.items():
        if getattr(c, name) != value:
            return f"it has {name}={getattr(c, name)}"
    if c.shared_input_from < c.num_layers - 1:
        return f"it has shared_input_from={c.shared_input_from}"
    windows = (c.window_short, c.window_long)
    window = min(windows[layer in c.long_layers] for layer in c.attention_layers)
    if window < c.max_seq_len - 1:
        return f"a window of {window} tokens is shorter than its context of {c.max_seq_len}"
    return ""


def sizes(c) -> dict:
    """The fields of config.json that all kinds of models have; c is the script's Config."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_seq_len,
    }


def qwen_config(c) -> dict:
    """config.json without the ids of special tokens; c is the script's Config."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **sizes(c),
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": c.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


@torch.no_grad()
def qwen_weights(model) -> dict[str, Tensor]:
    """The weights by the names of Qwen3ForCausalLM, fp32, without padding of the vocabulary."""
    c = model.config
    V = c.vocab_size
    D = c.width
    H = c.num_heads
    ones = torch.ones(D)
    x0 = torch.nn.functional.rms_norm(model.embed[:V], (D,))
    tensors = {"model.embed_tokens.weight": x0}
    factor = 1.0  # what the script's stream is, over the exported one
    for layer, weights in enumerate(model.layer_weights()):
        prefix = f"model.layers.{layer}"
        q, k, v = weights.qkv.view(3, D, D)
        gate, up = weights.up.chunk(2)
        for_attention = positive(factor * model.scalars[0, layer].item(), layer)
        factor = positive(for_attention * model.scalars[1, layer].item(), layer)
        tensors |= name_matrices(layer, q=reorder_channels(q, H), k=reorder_channels(k, H), v=v)
        down = weights.down.T / factor
        tensors |= name_matrices(layer, o=weights.o / for_attention, gate=gate, up=up, down=down)
        gain = c.attention_scale * math.sqrt(c.head_dim)
        tensors[f"{prefix}.self_attn.q_norm.weight"] = torch.full((c.head_dim,), gain)
        tensors[f"{prefix}.self_attn.k_norm.weight"] = torch.ones(c.head_dim)
        tensors[f"{prefix}.input_layernorm.weight"] = ones
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones
    tensors["model.norm.weight"] = ones
    tensors["lm_head.weight"] = model.embed[:V]
    return tensors


def name_matrices(layer: int, **matrices: Tensor) -> dict[str, Tensor]:
    """The matrices q, k, v, o, gate, up and down of a layer by their names in transformers."""
    parts = {"gate": "mlp", "up": "mlp", "down": "mlp"}
    named = {f"{parts.get(name, 'self_attn')}.{name}": matrix for name, matrix in matrices.items()}
    return {f"model.layers.{layer}.{name}_proj.weight": matrix for name, matrix in named.items()}


def positive(factor: float, layer: int) -> float:
    """A factor that the next norm cancels. Raises: RunError if it is not positive"""
    if not factor > 1e-6:
        raise RunError(f"the residual factor of layer {layer} fell to {factor:.2g}; export an earlier --step")
    return factor


def reorder_channels(matrix: Tensor, heads: int) -> Tensor:
    """Rows of Q or K (D, D): per head, first the second channels of all rotary pairs, then the first.

    The script pairs the first quarter with the second and the third with the fourth, and turns the
    other way.
    """
    quarters = matrix.view(heads, 4, -1, matrix.size(1))
    return quarters[:, [1, 3, 0, 2]].reshape_as(matrix)


# ---- GGUF, the format of llama.cpp


def read_folder(folder: Path) -> tuple[dict, dict[str, Tensor], Vocabulary]:
    """config.json, weights and vocabulary of a portable export that transformers saved again.

    Raises: RunError if it is another model, OSError
    """
    files = ("config.json", "tokenizer_config.json", "tokenizer.json")
    try:
        fields, settings, content = (json.loads((folder / name).read_text(encoding="utf-8")) for name in files)
        split = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        (architecture,) = fields["architectures"]
    except (FileNotFoundError, ValueError, LookupError, TypeError) as error:
        advice = "merge adapters into the model first, and save model and tokenizer in one folder"
        raise RunError(f"{folder} is not a finetuned portable export ({error}); {advice}") from None
    if architecture != "Qwen3ForCausalLM":
        raise RunError(f"llama.cpp does not support {folder}, a {architecture}; {HOW_TO_TRAIN}")

    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    specials = {token["content"]: token["id"] for token in content["added_tokens"]}
    bos, end, pad = (settings[f"{name}_token"] for name in ("bos", "eos", "pad"))
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template", "")
    return fields, tensors, Vocabulary(content, split, specials, bos, end, pad, template)


def write_gguf(args, fields: dict, tensors: dict[str, Tensor], vocabulary: Vocabulary) -> None:
    """Writes a new GGUF file, completely or not at all, and prints how to run it.

    Args:   args of runs/export.py; fields of config.json; tensors by the names of Qwen3ForCausalLM
    Raises: RunError, OSError
    """
    path = args.gguf
    if path.exists():
        raise RunError(f"{path} exists; choose another --gguf or remove it")
    if vocabulary.pattern not in LLAMA_CPP_PATTERNS:
        advice = "train on a dataset of `data/pretrain.py --pattern qwen2`"
        raise RunError(f"llama.cpp does not support the split pattern of this run's tokenizer; {advice}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, fields["num_hidden_layers"])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        writer = gguf.GGUFWriter(part, "qwen3")
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(args.name)
        if args.license:
            writer.add_license(args.license)
        parameters = sum(tensor.numel() for tensor in tensors.values())
        writer.add_size_label(gguf.size_label(parameters, 0, 0, 0))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType[TYPES[args.type]])
        add_shape(writer, fields)
        add_vocabulary(writer, vocabulary, fields["vocab_size"])
        for key, tensor in tensors.items():
            values = tensor.detach().float().contiguous().numpy()
            stored = "f32" if values.ndim == 1 else args.type  # gains stay fp32
            if stored == "q8_0" and values.shape[-1] % 32:
                stored = "f16"
            dtype = gguf.GGMLQuantizationType[stored.upper()]
            values = gguf.quants.quantize(values, dtype)
            writer.add_tensor(names.get_name(key, (".weight",)), values, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    is_chat = vocabulary.end != vocabulary.bos
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    print(f"wrote {path}: {args.type}, {size}, {'chat' if is_chat else 'base'} model")
    how_to_run = Template(HOW_TO_RUN.read_text(encoding="utf-8"), trim_blocks=True)
    about = {"file": path.name, "context": fields["max_position_embeddings"], "is_chat": is_chat}
    print(how_to_run.render(path=shlex.quote(str(path)), **about), end="")


def add_shape(writer: gguf.GGUFWriter, fields: dict) -> None:
    """Sizes of the model; fields of config.json."""
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_value_length(fields["head_dim"])
    writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_vocab_size(fields["vocab_size"])


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary, size: int) -> None:
    """Tokens, merges, special tokens, and the chat template."""
    model = vocabulary.content["model"]
    specials = vocabulary.specials
    texts = {i: text for text, i in {**model["vocab"], **specials}.items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]  # as llama.cpp fills empty rows
    types = gguf.TokenType
    kinds = [types.CONTROL if text in specials else types.NORMAL for text in tokens]
    kinds = [kind if i in texts else types.UNUSED for i, kind in enumerate(kinds)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(LLAMA_CPP_PATTERNS[vocabulary.pattern])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(specials[vocabulary.bos])
    writer.add_eos_token_id(specials[vocabulary.end])
    writer.add_eot_token_id(specials[vocabulary.end])
    writer.add_pad_token_id(specials[vocabulary.pad])
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    if vocabulary.template:
        writer.add_chat_template(GENERATION.sub("", vocabulary.template))
