"""A DecoderStack language model for transformers, loaded with trust_remote_code=True.

A decoder with windows of attention, relu^2 in the MLP and RMS norms that have no weights. What it
has beyond that, each switched on or off by the configuration:

    key offset        half of each key comes from the token before
    value embeddings  tables that add to the values, through a gate for each head
    n-grams           embeddings of the last two and three tokens, found by a hash
    injection         the embeddings are added to the residual stream again in each layer
    mix               the last layer's values and stream get sums of input and stream

Letters in shape comments: B rows, T new tokens, S all tokens that a cache holds with the new ones,
D width, H heads, K head width, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

SIGN_ROWS = 8192  # signs of the n-gram embeddings
TRIGRAM_WIDTH = 128  # maximum


class DecoderStackConfig(PretrainedConfig):
    """Sizes, and which layers have what."""

    model_type = "decoderstack"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32768
    hidden_size: int = 768
    num_hidden_layers: int = 11
    num_attention_heads: int = 6
    num_key_value_heads: int = 6
    head_dim: int = 128
    intermediate_size: int = 3072
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    use_cache: bool = True

    # Attention. A query sees itself and as many keys before itself as its window says.
    window_short: int = 128
    window_long: int = 2048
    attention_scale: float = 0.12
    # The first half of each head turns, at 1 to 1 / rotary_base a token.
    rotary_base: float = 1024.0
    no_attention_layers: tuple = ()
    long_layers: tuple = ()
    key_offset_layers: tuple = ()
    value_embed_layers: tuple = ()
    paired_layers: tuple = ()  # heads h and h + H / 2 share one softmax over the keys of both
    exclusive_layers: tuple = ()  # a head can take the token's own value out of what it returns
    gated_layers: tuple = ()  # what a head returns has a gate
    # Attention after this layer reads what this layer reads; -1: its own input.
    shared_input_from: int = -1
    gate_width: int = 12  # channels that a gate reads

    # The residual stream.
    x0_injection: bool = True
    bigram_rows: int = 0  # 0: no n-gram embeddings
    trigram_rows: int = 0
    mudd_width: int = 0  # hidden width of the weights that mix the last layer's input; 0: no mixing

    # Logits are C tanh(logit_scale (z + logit_bias) / C) + C, where C is final_logit_softcapping.
    final_logit_softcapping: float = 11.5
    logit_scale: float = 23 / 30
    logit_bias: float = 5.0


# -- small parts


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last axis, in the dtype of x also under autocast."""
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)


def times(scalar: Tensor, x: Tensor) -> Tensor:
    """A learned scalar (1,) times x, in fp32 if the scalar is, returned in the dtype of x."""
    return (scalar * x).to(x.dtype)


def shift_right(x: Tensor, dim: int) -> Tensor:
    """x moved by one place along an axis: what the token before has. The first keeps its own."""
    length = x.size(dim)
    return torch.cat((x.narrow(dim, 0, 1), x.narrow(dim, 0, length - 1)), dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on the first half of each head; the second half carries no position.

    Args: x (B, T, H, K); cos, sin (B, T, 1, K / 4)
    """
    first, second, rest = x.split((cos.size(-1), cos.size(-1), x.size(-1) // 2), -1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin, rest), -1)


class Gate(nn.Module):
    """One number between 0 and 1 for each output, from the first channels of x: (..., outputs)."""

    def __init__(self, outputs: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x[..., : self.weight.size(1)], self.weight))


class NgramEmbedding(nn.Module):
    """Embeddings of the last two and three tokens: a row by one hash, its signs by another."""

    def __init__(self, config: DecoderStackConfig):
        super().__init__()
        width = config.hidden_size
        self.pairs = nn.Embedding(config.bigram_rows, width)
        signs = torch.randint(0, 2, (SIGN_ROWS, width), dtype=torch.int8) * 2 - 1
        self.register_buffer("signs", signs)
        self.triples = None
        if config.trigram_rows:
            self.triples = nn.Embedding(config.trigram_rows, min(TRIGRAM_WIDTH, width))
            self.out_proj = nn.Linear(min(TRIGRAM_WIDTH, width), width, bias=False)

    def forward(self, ids: Tensor, prev1_ids: Tensor, prev2_ids: Tensor, positions: Tensor) -> Tensor:
        """All int64 (B, T), prev1_ids and prev2_ids the two tokens before each -> (B, T, D)."""
        pair = (36313 * ids) ^ (27191 * prev1_ids)
        x = self.look_up(self.pairs, pair, ids ^ prev1_ids, positions < 1)
        if self.triples is None:
            return x
        triple = pair ^ (51787 * prev2_ids)
        sign_row = ids ^ (3 * prev1_ids) ^ (7 * prev2_ids)
        return x + self.out_proj(self.look_up(self.triples, triple, sign_row, positions < 2))

    def look_up(self, table: nn.Embedding, row: Tensor, sign_row: Tensor, is_short: Tensor) -> Tensor:
        """Rows of a table (..., width): the last one where a text has too few tokens (is_short)."""
        last_row = table.num_embeddings - 1
        signs = self.signs[(sign_row % SIGN_ROWS).masked_fill(is_short, 0)]
        return table((row % last_row).masked_fill(is_short, last_row)) * signs[..., : table.embedding_dim]


# -- the layers


@dataclass
class Context:
    """What all layers of one forward pass share."""

    ids: Tensor  # (B, T) new tokens
    prev1_ids: Tensor  # (B, T) the token before each
    prev2_ids: Tensor  # (B, T) and the one before that
    is_first_key: Tensor  # (B, S) whether a text starts there, with the tokens of the cache
    # Which keys each query sees: by the short and by the long window (B, 1, T, S), and in paired
    # layers (B, 2, T, 2 S), a head's own keys before those of the other one, for each half of the heads.
    masks: tuple[Tensor, Tensor, Tensor]
    cos: Tensor  # (B, T, 1, K / 4)
    sin: Tensor


def make_masks(config, positions: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which keys the last `count` tokens see, as Context has it.

    A token sees itself and the tokens before it that belong to the same text. A text starts at each
    position 0, so a row can hold several of them, and padding has position -1.

    Args: positions (B, S)
    """
    text = (positions == 0).cumsum(1)
    same_text = text[:, -count:, None] == text[:, None, :]
    is_real = (positions >= 0)[:, None, :]
    index = torch.arange(positions.size(1), device=positions.device)
    distance = index[-count:, None] - index[None, :]
    visible = same_text & is_real & (distance >= 0)

    # Padding sees itself: a query without any key would be NaN.
    itself = distance == 0
    short = (visible & (distance <= config.window_short)) | itself
    long = (visible & (distance <= config.window_long)) | itself

    # The second half of the heads sees the first one's key of the same token, not the oldest one.
    first = torch.cat((short, short & (distance > 0)), 2)
    second = torch.cat((short, visible & (distance < config.window_short)), 2)
    return short[:, None], long[:, None], torch.stack((first, second), 1)


class DecoderStackAttention(nn.Module):
    """Attention over a window, with the norms of queries and keys before the rotation."""

    def __init__(self, config: DecoderStackConfig, layer: int):
        super().__init__()
        width = config.hidden_size
        heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.is_long = layer in config.long_layers
        self.is_paired = layer in config.paired_layers
        self.offsets_keys = layer in config.key_offset_layers
        self.cache_layer = layer + 1  # the cache's first layer holds the tokens, see add_history

        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.value_embed = None
        if layer in config.value_embed_layers:
            self.value_embed = nn.Embedding(config.vocab_size, heads * self.head_dim)
            self.value_gate = Gate(heads, config.gate_width)
        self.exclusion = nn.Parameter(torch.zeros(heads)) if layer in config.exclusive_layers else None
        self.output_gate = Gate(heads, config.gate_width) if layer in config.gated_layers else None

    def forward(self, x: Tensor, context: Context, cache, mixed: Tensor | None) -> Tensor:
        """x (B, T, D) normalised -> (B, T, D); mixed (B, T, D) or None is added to the values."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q = norm(self.q_proj(x).view(heads)) * self.scale
        k = norm(self.k_proj(x).view(heads))
        v = self.v_proj(x).view(heads)
        q = rotate(q, context.cos.to(q.dtype), context.sin.to(q.dtype))
        k = rotate(k, context.cos.to(k.dtype), context.sin.to(k.dtype))
        if self.value_embed is not None:
            gate = 2 * self.value_gate(x)[..., None]
            v = v + (gate * self.value_embed(context.ids).view(heads)).to(v.dtype)
        if mixed is not None:
            v = v + mixed.view(heads)
        own_v = v

        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.cache_layer)  # keys as they are before the offset
        if self.offsets_keys:  # the half without position becomes that of the token before
            rotated, other = k.chunk(2, -1)
            other = torch.where(context.is_first_key[:, None, :, None], other, shift_right(other, 2))
            k = torch.cat((rotated, other), -1)
        mask = context.masks[self.is_long]
        if self.is_paired:
            half = q.size(1) // 2
            k = torch.cat((k, k.roll(half, 1)), 2)
            v = torch.cat((v, v.roll(half, 1)), 2)
            mask = context.masks[2].repeat_interleave(half, 1)
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0).transpose(1, 2)

        if self.exclusion is not None:  # less a fraction of its projection on the token's own value
            own = own_v.float()
            projection = (y * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True).clamp_min(1e-8)
            y = (y - torch.tanh(self.exclusion.float())[:, None] * projection * own).to(y.dtype)
        if self.output_gate is not None:
            y = y * (2 * self.output_gate(x)[..., None]).to(y.dtype)
        return self.o_proj(y.flatten(2))


class DecoderStackMLP(nn.Module):
    def __init__(self, config: DecoderStackConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Mix(nn.Module):
    """Two sums of input and stream, with weights that each token computes for itself."""

    def __init__(self, config: DecoderStackConfig):
        super().__init__()
        self.in_proj = nn.Linear(config.hidden_size, config.mudd_width, bias=False)
        self.out_proj = nn.Linear(config.mudd_width, 4, bias=False)

    def forward(self, x: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
        """All (B, T, D)."""
        w = self.out_proj(F.gelu(self.in_proj(norm(x)))).split(1, -1)
        return w[0] * x0 + w[1] * x, w[2] * x0 + w[3] * x


class DecoderStackLayer(GradientCheckpointingLayer):
    """Attention and MLP, each added to the residual stream, and the embeddings once more."""

    def __init__(self, config: DecoderStackConfig, layer: int):
        super().__init__()
        self.self_attn = None
        if layer not in config.no_attention_layers:
            self.self_attn = DecoderStackAttention(config, layer)
        self.mlp = DecoderStackMLP(config)

        # Factors of the residual stream, and how much of the embeddings is added to it, in fp32.
        start = {}
        if self.self_attn is not None:
            start["resid_attn"] = 1.0
        start["resid_mlp"] = 1.0
        if config.x0_injection:
            start["share_x0"] = 0.0
        if config.bigram_rows:
            start["share_ngram"] = 0.05
        scalars = {name: torch.tensor([value], dtype=torch.float32) for name, value in start.items()}
        self.scalars = nn.ParameterDict(scalars)

    def forward(self, x, shared_input, x0, ngram, mixed, context, past_key_values=None) -> Tensor:
        """The residual stream x (B, T, D) after this layer.

        Args: shared_input (B, T, D) what attention reads, None: x; x0, ngram, mixed (B, T, D) or
              None; mixed is added to the values
        """
        if self.self_attn is not None:
            attention_input = norm(x) if shared_input is None else shared_input
            y = self.self_attn(attention_input, context, past_key_values, mixed)
            x = times(self.scalars.resid_attn, x) + y
        if x0 is not None:
            x = x + times(self.scalars.share_x0, x0)
        if ngram is not None:
            x = x + times(self.scalars.share_ngram, ngram)
        return times(self.scalars.resid_mlp, x) + self.mlp(norm(x))


# -- the models


class DecoderStackPreTrainedModel(PreTrainedModel):
    config_class = DecoderStackConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["DecoderStackLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["scalars"]


class DecoderStackModel(DecoderStackPreTrainedModel):
    """Everything between token ids and the head."""

    def __init__(self, config: DecoderStackConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.ngram = NgramEmbedding(config) if config.bigram_rows else None
        self.mix = Mix(config) if config.mudd_width else None
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderStackLayer(config, layer) for layer in layers)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
        use_cache=None, output_hidden_states=None, **unused,
    ):  # fmt: skip
        """The normalised state after the last layer, (B, T, D).

        Args: input_ids int (B, T), the tokens after those in the cache; attention_mask (B, S), 0 at
              padding, which may stand on either side; position_ids (B, T), where each 0 starts a new
              text, so a row can hold several; past_key_values a DynamicCache
        """
        if input_ids is None:
            raise ValueError("this model needs input_ids: it looks up more than one table by them")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()

        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        positions = self.find_positions(input_ids, attention_mask, position_ids, past)
        context = self.make_context(input_ids, positions, past_key_values)
        x0 = norm(self.embed_tokens(input_ids))
        ngram = None
        if self.ngram is not None:
            ids = (input_ids, context.prev1_ids, context.prev2_ids)
            ngram = self.ngram(*(i.long() for i in ids), positions)

        x = x0
        shared_input = None
        states = []
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                states.append(x)
            mixed = None
            if self.mix is not None and index == len(self.layers) - 1:
                mixed, more = self.mix(x, x0)
                x = x + more
            if index == self.config.shared_input_from:
                shared_input = norm(x)
            injected = x0 if self.config.x0_injection else None
            x = layer(x, shared_input, injected, ngram, mixed, context, past_key_values=past_key_values)
        hidden = norm(x)
        states = (*states, hidden) if output_hidden_states else None
        return BaseModelOutputWithPast(hidden, past_key_values if use_cache else None, states)

    def find_positions(self, ids, attention_mask, position_ids, past: int) -> Tensor:
        """The position of each new token in its text, -1 for padding: (B, T).

        Raises: ValueError for a text beyond the model's context
        """
        rows, count = ids.shape
        limit = self.config.max_position_embeddings
        positions = position_ids
        if positions is None and attention_mask is not None:
            positions = (attention_mask.long().cumsum(1) - 1)[:, past:]
        elif positions is None:
            positions = torch.arange(past, past + count, device=ids.device)[None]
        positions = positions.expand(rows, count)
        if attention_mask is not None:
            positions = positions.masked_fill(attention_mask[:, past:] == 0, -1)

        # Shapes tell of most texts that they are short enough, without waiting for the GPU.
        if past + count > limit:
            check_length(int(positions.max()) + 1, limit)
        return positions

    def add_history(self, ids: Tensor, positions: Tensor, cache) -> tuple[Tensor, Tensor]:
        """Ids and positions of all tokens so far, (B, S), which are kept in the cache's first layer.

        They stand there like keys and values, so that the cache crops and reorders them with those.
        """
        if cache is None:
            return ids, positions
        if not isinstance(cache, DynamicCache):
            found = type(cache).__name__
            raise ValueError(f"this model needs a DynamicCache, not a {found}; omit cache_implementation")
        while len(cache.layers) <= self.config.num_hidden_layers:
            cache.layers.append(DynamicLayer())
        ids, positions = cache.update(ids[:, None, :, None], positions[:, None, :, None], 0)
        return ids[:, 0, :, 0], positions[:, 0, :, 0]

    def make_context(self, ids: Tensor, positions: Tensor, cache) -> Context:
        """What the layers share: the tokens before, masks, and the rotary table in fp32."""
        count = ids.size(1)
        all_ids, all_positions = self.add_history(ids, positions, cache)
        prev1_ids = shift_right(all_ids, 1)
        prev2_ids = shift_right(prev1_ids, 1)
        quarter = self.config.head_dim // 4
        exponents = [i / max(quarter - 1, 1) for i in range(quarter)]
        frequencies = [self.config.rotary_base**-exponent for exponent in exponents]
        frequencies = torch.tensor(frequencies, device=ids.device, dtype=torch.float32)
        angles = positions.clamp(min=0)[..., None, None] * frequencies
        return Context(
            ids=ids,
            prev1_ids=prev1_ids[:, -count:],
            prev2_ids=prev2_ids[:, -count:],
            is_first_key=all_positions == 0,
            masks=make_masks(self.config, all_positions, count),
            cos=angles.cos(),
            sin=angles.sin(),
        )


def check_length(count: int, limit: int) -> None:
    """Raises: ValueError beyond the model's context"""
    if count > limit:
        raise ValueError(f"{count} tokens are more than the model's context of {limit}; ask for fewer")


class Head(nn.Linear):
    """z; the model adds a constant behind it, as PEFT drops biases. TRL reads `bias`."""

    def __init__(self, width: int, vocab: int, constant: float):
        super().__init__(width, vocab, bias=False)
        self.constant = constant

    @property
    def bias(self) -> Tensor:
        return self.weight.new_full((self.out_features,), self.constant)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class DecoderStackForCausalLM(DecoderStackPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DecoderStackConfig):
        super().__init__(config)
        self.model = DecoderStackModel(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, config.logit_bias)
        self.post_init()

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs):
        """New tokens have value embeddings of zero."""
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        rows = embeddings.num_embeddings
        weight = self.lm_head.weight
        self.lm_head = Head(weight.size(1), rows, self.config.logit_bias)
        self.lm_head.weight = weight
        for module in self.modules():
            if getattr(module, "value_embed", None) is not None:
                table = module.value_embed.weight.data
                table = F.pad(table, (0, 0, 0, rows - len(table)))
                module.value_embed = nn.Embedding.from_pretrained(table, freeze=False)
        return embeddings

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
        labels=None, use_cache=None, logits_to_keep=0, output_hidden_states=None, **kwargs,
    ):  # fmt: skip
        """Logits (B, T, V) in fp32, and the loss if there are labels (B, T); those of -100 are ignored.

        Labels at padding and at the first token of a text are ignored too: nothing predicts them.
        """
        inputs = (input_ids, attention_mask, position_ids, past_key_values)
        outputs = self.model(*inputs, use_cache, output_hidden_states)
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        cap = self.config.final_logit_softcapping
        z = (self.lm_head(hidden).float() + self.config.logit_bias) * self.config.logit_scale
        logits = cap * torch.tanh(z / cap) + cap

        loss = None
        if labels is not None:
            if attention_mask is not None:
                is_real = attention_mask.bool()
                follows = F.pad(is_real[:, :-1], (1, 0), value=False)
                labels = labels.masked_fill(~(is_real & follows), -100)
            if position_ids is not None:
                labels = labels.masked_fill(position_ids == 0, -100)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)

    def _validate_generated_length(self, generation_config, input_ids_length, *args, **kwargs):
        """Refuses too long a request before its first token instead of in its middle."""
        max_length = max(input_ids_length, generation_config.max_length)
        check_length(max_length, self.config.max_position_embeddings)
        super()._validate_generated_length(generation_config, input_ids_length, *args, **kwargs)
