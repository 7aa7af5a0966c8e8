"""T5 from its weights, written a second time and differently: plain matrix products, no cache, no transformers code.

The reference that `T5Prefix` is held against. Nothing here is imported from `helpers`.
"""

import math

import torch
from torch import Tensor


def bucket(distance: int, *, bidirectional: bool, buckets: int = 32, max_distance: int = 128) -> int:
    """The bucket of `key position - query position` (Raffel et al. 2020, section 2.1, as in Mesh TensorFlow)."""
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    logarithmic = exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact))
    return offset + min(logarithmic, buckets - 1)


def position_bias(table: Tensor, queries: int, keys: int, *, bidirectional: bool, config) -> Tensor:
    """`[heads, queries, keys]` from the table `[buckets, heads]`."""
    rows = [
        [
            bucket(
                k - q,
                bidirectional=bidirectional,
                buckets=config.relative_attention_num_buckets,
                max_distance=config.relative_attention_max_distance,
            )
            for k in range(keys)
        ]
        for q in range(queries)
    ]
    return table[torch.tensor(rows, device=table.device)].permute(2, 0, 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def attention(weights: dict, name: str, x: Tensor, context: Tensor, config, bias: Tensor, visible: Tensor, prefix=None):
    """One T5 attention, head by head and example by example; returns output and probabilities.

    visible: bool `[batch, query, key]`; bias `[heads, query, key]`; prefix: `(key, value)` or None, each
    `[batch, heads, prefix, d_kv]`.
    """
    d = config.d_kv
    outputs, probabilities = [], []
    for row in range(len(x)):
        heads, maps = [], []
        for head in range(config.num_heads):
            features = slice(head * d, (head + 1) * d)
            query = x[row] @ weights[f"{name}.q.weight"][features].T
            key = context[row] @ weights[f"{name}.k.weight"][features].T
            value = context[row] @ weights[f"{name}.v.weight"][features].T
            scores = query @ key.T + bias[head]
            scores[~visible[row]] = -math.inf
            if prefix is not None:
                scores = torch.cat([query @ prefix[0][row, head].T, scores], dim=1)
                value = torch.cat([prefix[1][row, head], value], dim=0)
            unnormalised = (scores - scores.max(dim=1, keepdim=True).values).exp()
            probability = unnormalised / unnormalised.sum(dim=1, keepdim=True)
            heads.append(probability @ value)
            maps.append(probability)
        outputs.append(torch.cat(heads, dim=1) @ weights[f"{name}.o.weight"].T)
        probabilities.append(torch.stack(maps))
    return torch.stack(outputs), torch.stack(probabilities)


def feed_forward(weights: dict, name: str, x: Tensor, config) -> Tensor:
    def activate(x):
        if config.dense_act_fn == "relu":
            return x.clamp(min=0)
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))  # gelu_new

    if config.is_gated_act:
        x = activate(x @ weights[f"{name}.wi_0.weight"].T) * (x @ weights[f"{name}.wi_1.weight"].T)
    else:
        x = activate(x @ weights[f"{name}.wi.weight"].T)
    return x @ weights[f"{name}.wo.weight"].T


def stack(weights, name, x, config, layers, visible, prefixes, context=None, context_visible=None):
    """One encoder (context None) or decoder; returns hidden states and `{site: [probabilities of each layer]}`."""
    maps = {"self": [], "cross": []}
    eps = config.layer_norm_epsilon
    own_prefix = prefixes.get("encoder" if context is None else "decoder")

    def pair(prefix, layer):
        if prefix is None:
            return None
        return prefix[layer].to(x).expand(-1, len(x), -1, -1, -1).unbind(0)

    for layer in range(layers):
        block = f"{name}.block.{layer}.layer.0"
        table_name = f"{block}.SelfAttention.relative_attention_bias.weight"
        if table_name in weights:  # T5: layer 0 only, shared by all; UMT5: every layer has its own
            bias = position_bias(
                weights[table_name], x.shape[1], x.shape[1], bidirectional=context is None, config=config
            )
        normed = rms_norm(x, weights[f"{block}.layer_norm.weight"], eps)
        out, seen = attention(
            weights, f"{block}.SelfAttention", normed, normed, config, bias, visible, pair(own_prefix, layer)
        )
        x = x + out
        maps["self"].append(seen)
        if context is not None:
            block = f"{name}.block.{layer}.layer.1"
            normed = rms_norm(x, weights[f"{block}.layer_norm.weight"], eps)
            no_bias = x.new_zeros(config.num_heads, x.shape[1], context.shape[1])
            out, seen = attention(
                weights,
                f"{block}.EncDecAttention",
                normed,
                context,
                config,
                no_bias,
                context_visible,
                pair(prefixes.get("cross"), layer),
            )
            x = x + out
            maps["cross"].append(seen)
        block = f"{name}.block.{layer}.layer.{1 if context is None else 2}"
        normed = rms_norm(x, weights[f"{block}.layer_norm.weight"], eps)
        x = x + feed_forward(weights, f"{block}.DenseReluDense", normed, config)
    return rms_norm(x, weights[f"{name}.final_layer_norm.weight"], eps), maps


@torch.no_grad()
def t5(model, input_ids, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None, prefixes=None):
    """Run `model`'s weights; returns a dict with encoder, encoder_maps, and with decoder inputs logits and maps.

    prefixes: `{site: [layers, 2, batch or 1, heads, prefix, d_kv]}`.
    """
    weights, config, prefixes = model.state_dict(), model.config, prefixes or {}
    embedding = weights["shared.weight"]
    attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    keys = attention_mask.bool()[:, None, :]
    encoder, encoder_maps = stack(
        weights,
        "encoder",
        embedding[input_ids],
        config,
        config.num_layers,
        keys.expand(-1, input_ids.shape[1], -1),
        prefixes,
    )
    result = {"encoder": encoder, "encoder_maps": encoder_maps["self"]}
    if decoder_input_ids is None:
        return result
    length = decoder_input_ids.shape[1]
    earlier = torch.tensor([[k <= q for k in range(length)] for q in range(length)], device=input_ids.device)
    visible = earlier[None].expand(len(input_ids), -1, -1)
    if decoder_attention_mask is not None:
        visible = visible & decoder_attention_mask.bool()[:, None, :]
    decoder, maps = stack(
        weights,
        "decoder",
        embedding[decoder_input_ids],
        config,
        config.num_decoder_layers,
        visible,
        prefixes,
        context=encoder,
        context_visible=keys.expand(-1, length, -1),
    )
    result |= {"decoder": decoder, "decoder_maps": maps["self"], "cross_maps": maps["cross"]}
    if "lm_head.weight" in weights:
        scale = config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0  # MT5 never scales
        result["logits"] = scale * decoder @ weights["lm_head.weight"].T
    return result
