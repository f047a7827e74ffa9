"""The weights of a run by the names of export_model.py, the remote code of an export."""

import torch
from lib.export_portable import name_matrices, sizes
from torch import Tensor

# Fields of the script's Config that DecoderStackConfig has under the same name.
SAME_FIELDS = (
    "window_short window_long attention_scale rotary_base no_attention_layers long_layers key_offset_layers "
    "value_embed_layers paired_layers exclusive_layers gated_layers shared_input_from gate_width bigram_rows "
    "trigram_rows mudd_width"
).split()


def describe_model(model) -> dict:
    """The fields of DecoderStackConfig, for config.json."""
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
        **sizes(c),
        "tie_word_embeddings": c.tied,
        "x0_injection": c.x0_injection,
        # high sigmoid((z + shift) / slope) = C tanh(scale (z + shift) / C) + C with C = high / 2.
        "final_logit_softcapping": high / 2,
        "logit_scale": high / (4 * slope),
        "logit_bias": shift,
        **{name: getattr(c, name) for name in SAME_FIELDS},
    }


def layer_scalars(script, model, layer: int) -> dict[str, Tensor]:
    """The learned scalars of a layer, 0-D each, that cannot be folded into a matrix."""
    c = model.config
    scalar = dict(zip(script.SCALARS, model.scalars[:, layer], strict=True))
    names = ["resid_mlp"]
    if layer in c.attention_layers:
        names.append("resid_attn")
    if c.x0_injection:
        names.append("share_x0")
    if c.bigram_rows:
        names.append("share_ngram")
    return {name: scalar[name] for name in names}


@torch.no_grad()
def convert_weights(script, model) -> dict[str, Tensor]:
    """The weights by the names of export_model.py, fp32; n-gram tables have the checkpoint's dtype.

    With V tokens, width D and F hidden channels of an MLP: embed_tokens and value_embed are (V, D),
    q_proj, k_proj, v_proj and o_proj (D, D), up_proj (F, D), down_proj (D, F), scalars (1,).
    layer_weights() folds the other scalars into the matrices that they multiply. Rows that pad the
    vocabulary are dropped.
    """
    c = model.config
    V = c.vocab_size
    D = c.width
    tensors = {"model.embed_tokens.weight": model.embed[:V]}
    if not c.tied:
        tensors["lm_head.weight"] = model.head[:V]
    if c.bigram_rows:
        tensors["model.ngram.pairs.weight"] = model.bigram_embed
        tensors["model.ngram.signs"] = model.bigram_signs.to(torch.int8)
    if c.trigram_rows:
        tensors["model.ngram.triples.weight"] = model.trigram_embed
        tensors["model.ngram.out_proj.weight"] = model.trigram_proj
    if c.mudd_width:
        tensors["model.mix.in_proj.weight"] = model.mix_in
        tensors["model.mix.out_proj.weight"] = model.mix_out

    for layer, weights in enumerate(model.layer_weights()):
        prefix = f"model.layers.{layer}"
        for name, value in layer_scalars(script, model, layer).items():
            tensors[f"{prefix}.scalars.{name}"] = value.view(1)
        tensors |= name_matrices(layer, up=weights.up, down=weights.down.T)
        if weights.qkv is None:
            continue

        q, k, v = weights.qkv.view(3, D, D)
        tensors |= name_matrices(layer, q=q, k=k, v=v, o=weights.o)
        if layer in c.value_embed_layers:
            index = c.value_embed_layers.index(layer)
            table = model.value_embed.view(-1, c.padded_vocab, D)[index]
            tensors[f"{prefix}.self_attn.value_embed.weight"] = table[:V]
            tensors[f"{prefix}.self_attn.value_gate.weight"] = model.value_gate[index]
        if layer in c.exclusive_layers:
            index = c.exclusive_layers.index(layer)
            tensors[f"{prefix}.self_attn.exclusion"] = model.exclusion[index]
        if layer in c.gated_layers:
            gate = model.output_gate[c.gated_layers.index(layer)]
            tensors[f"{prefix}.self_attn.output_gate.weight"] = gate
    return tensors
