"""The loss of a frozen T5 with a prefix, in fewer operations and on real tokens alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers import MT5ForConditionalGeneration, PreTrainedModel, T5ForConditionalGeneration
from transformers.activations import ACT2FN

from helpers._shapes import Bool, Float
from helpers.losses import frozen_cross_entropy
from helpers.masks import causal_mask, padding_mask
from helpers.prefix import join_prefix, with_prefix_columns


class LeanT5:
    """A frozen T5 for training a prefix: `LeanT5(model)(batch, prefix)` is `model(**batch).loss` for less work.

    The equations are T5's; their arrangement is another, and changes the loss by rounding alone:

    - Only attention sees padding. Norms, projections and feed-forward layers work on real tokens, one row each; in the
      decoder, on those up to the last label.
    - Matrices for keys and values that read the same states are one, for all cross-attentions together. Each norm's
      weight is multiplied into the matrices behind it.
    - The logits are never all there at once: see `frozen_cross_entropy`.

    The joined matrices are copies, made once: what is done to the model's weights afterwards does not reach them.

    Source: Raffel et al. 2020, section 2.1; the prefix: Li & Liang 2021, section 4.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel):
        """Args: a frozen T5 or MT5 in evaluation mode, with a language modelling head.

        Raises TypeError for another model; ValueError if it has dropout or weights to train, or if its weights are not
        there as plain numbers.
        """
        if not isinstance(model, T5ForConditionalGeneration | MT5ForConditionalGeneration):
            raise TypeError(
                f"LeanT5 needs a T5ForConditionalGeneration or MT5ForConditionalGeneration, got {type(model).__name__}"
            )
        trained = sum(parameter.requires_grad for parameter in model.parameters())
        if model.training or trained:
            raise ValueError(
                "LeanT5 has no dropout and trains no weight of the model: call model.eval() and "
                f"model.requires_grad_(False) first (training mode {model.training}, tensors to train {trained})"
            )
        projections = [module for module in model.modules() if hasattr(module, "in_features")]
        if any(type(module) is not nn.Linear or module.weight.is_meta for module in projections):
            raise ValueError("LeanT5 multiplies the model's own weights: it takes no quantised or offloaded model")
        self.model, self.d_kv, self.eps = model, model.config.d_kv, model.config.layer_norm_epsilon
        self.encoder_layers = [_joined_layer(block) for block in model.encoder.block]
        self.decoder_layers = [_joined_layer(block) for block in model.decoder.block]
        cross = [block.layer[1].EncDecAttention for block in model.decoder.block]
        key_value = [projection for attention in cross for projection in (attention.k, attention.v)]
        self.cross_key_value = _joined(model.encoder.final_layer_norm, *key_value)
        self.lm_head = _joined(model.decoder.final_layer_norm, model.lm_head)
        if getattr(model.config, "scale_decoder_outputs", False):  # an MT5 never scales
            self.lm_head *= model.model_dim**-0.5
        self.activation = ACT2FN[model.config.dense_act_fn]

    def __call__(
        self, batch: Mapping[str, Tensor], prefix, *, encoded: Float[Tensor, "tokens d_model"] | None = None
    ) -> Tensor:
        """The mean cross-entropy over the labels.

        Args:
            batch: `input_ids` and `attention_mask` `[batch, source]`, `labels` `[batch, target]`, -100 where none.
            prefix: a T5Prefix or PrefixPerRow, attached or not.
            encoded: what `encode` gives for these sources, if it is known already.

        Raises ValueError for a source without a token, or a prefix with a position bias.
        """
        labels, decoder = batch["labels"], self.model.decoder
        if prefix.position_bias(decoder, labels.shape[1], 0) is not None:
            raise ValueError(f"LeanT5 knows no position bias of slots, and the {type(prefix).__name__} has one")
        encoded = self.encode(batch, prefix) if encoded is None else encoded
        labelled = labels != -100
        needed = labelled.flip(1).cumsum(dim=1).flip(1) > 0  # no token sees those behind the last label
        source = padding_mask(batch["attention_mask"])
        own = self._site("decoder", prefix, needed, causal_mask(labels.shape[1], device=labels.device), decoder)
        cross = self._site("cross", prefix, needed, source)
        memory = Padding(source[:, 0, 0]).pad(F.linear(encoded, self.cross_key_value))
        memory = rearrange(memory, "b s (l kv h d) -> l kv b h s d", l=len(self.decoder_layers), kv=2, d=self.d_kv)

        states = decoder.embed_tokens(self.model.prepare_decoder_input_ids_from_labels(labels)[needed])
        for layer, weights in enumerate(self.decoder_layers):
            states = self._self_attention(states, own, layer, weights)
            query = cross.queries.pad(F.linear(self._norm(states), weights["cross_query"]))
            query = rearrange(query, "b s (h d) -> b h s d", d=self.d_kv)
            states = states + F.linear(cross.attend(layer, query, *memory[layer]), weights["cross_output"])
            states = self._feed_forward(states, weights)
        return frozen_cross_entropy(self._norm(states)[labelled[needed]], self.lm_head, labels[labelled])

    def encode(self, batch: Mapping[str, Tensor], prefix) -> Float[Tensor, "tokens d_model"]:
        """The encoder's states of all real tokens, row after row, normed but not yet multiplied by the norm's weight.

        The same for every prefix without the site "encoder". Raises ValueError for a source without a token.
        """
        source, encoder = padding_mask(batch["attention_mask"]), self.model.encoder
        if not source.any(dim=-1).all():
            raise ValueError(f"every source needs a token, and a row of attention_mask {list(source.shape)} has none")
        tokens = source[:, 0, 0]
        site = self._site("encoder", prefix, tokens, source, encoder)
        states = encoder.embed_tokens(batch["input_ids"][tokens])
        for layer, weights in enumerate(self.encoder_layers):
            states = self._self_attention(states, site, layer, weights)
            states = self._feed_forward(states, weights)
        return self._norm(states)

    def _site(self, site: str, prefix, tokens, mask, stack=None) -> "Site":
        """Args: which queries are real, [batch, query]; which keys they see; the stack whose position bias they get."""
        added = torch.zeros_like(mask, dtype=self.lm_head.dtype).masked_fill(~mask, -torch.inf)
        if stack is not None:
            length = mask.shape[-1]
            with torch.no_grad():
                added = added + stack.block[0].layer[0].SelfAttention.compute_bias(length, length)
        layers = None
        if site in prefix.sites:
            layers = prefix.key_values(site).unbind(0)
            added = with_prefix_columns(added, layers[0].shape[-2], added.shape[-1], prefix.visible(site))
        return Site(Padding(tokens), layers, added)

    def _self_attention(self, states: Tensor, site: "Site", layer: int, weights: dict) -> Tensor:
        normed = self._norm(states)
        # The query is kept for the backward pass, keys and values are not, once they have been joined to a prefix.
        query = rearrange(site.queries.pad(F.linear(normed, weights["query"])), "b s (h d) -> b h s d", d=self.d_kv)
        key_value = site.queries.pad(F.linear(normed, weights["key_value"]))
        key_value = rearrange(key_value, "b s (kv h d) -> kv b h s d", kv=2, d=self.d_kv)
        return states + F.linear(site.attend(layer, query, *key_value), weights["output"])

    def _feed_forward(self, states: Tensor, weights: dict) -> Tensor:
        inner = F.linear(self._norm(states), weights["inner"])
        if self.model.config.is_gated_act:
            gate, inner = inner.chunk(2, dim=-1)
            return states + F.linear(self.activation(gate) * inner, weights["outer"])
        return states + F.linear(self.activation(inner), weights["outer"])

    def _norm(self, states: Tensor) -> Tensor:
        """RMSNorm without its weight, which is in the matrices behind it."""
        return F.rms_norm(states, states.shape[-1:], eps=self.eps)


@dataclass
class Site:
    """One attention site of a stack for one batch."""

    queries: "Padding"
    prefixes: Sequence[Tensor] | None  # each layer's [2, batch or 1, heads, prefix, d_kv]
    added: Float[Tensor, "..."]  # mask and bias with the prefix's columns, the same in every layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "tokens inner_dim"]:
        """Args: `[batch, heads, seq, d_kv]` each."""
        if self.prefixes is not None:
            key, value, _, _ = join_prefix(*self.prefixes[layer], key, value)
        mixed = F.scaled_dot_product_attention(query, key, value, self.added, scale=1.0)
        return self.queries.drop(rearrange(mixed, "b h s d -> b s (h d)"))


class Padding:
    """The way from real tokens, one row each, to a padded batch and back."""

    def __init__(self, real: Bool[Tensor, "batch seq"]):
        self.shape = real.shape
        self.index = None if real.all() else real.flatten().nonzero().squeeze(1)

    def pad(self, rows: Float[Tensor, "tokens features"]) -> Float[Tensor, "batch seq features"]:
        if self.index is not None:
            rows = rows.new_zeros(self.shape.numel(), rows.shape[1]).index_copy(0, self.index, rows)
        return rows.unflatten(0, self.shape)

    def drop(self, padded: Float[Tensor, "batch seq features"]) -> Float[Tensor, "tokens features"]:
        rows = padded.flatten(0, 1)
        return rows if self.index is None else rows.index_select(0, self.index)


def _joined_layer(block: nn.Module) -> dict[str, Tensor]:
    """The matrices of one layer by use."""
    first, last = block.layer[0], block.layer[-1]
    own, inner = first.SelfAttention, last.DenseReluDense
    gated = hasattr(inner, "wi_0")
    weights = {
        "query": _joined(first.layer_norm, own.q),
        "key_value": _joined(first.layer_norm, own.k, own.v),
        "output": own.o.weight,
        "inner": _joined(last.layer_norm, *((inner.wi_0, inner.wi_1) if gated else (inner.wi,))),
        "outer": inner.wo.weight,
    }
    if block.is_decoder:
        norm, cross = block.layer[1].layer_norm, block.layer[1].EncDecAttention
        weights |= {"cross_query": _joined(norm, cross.q), "cross_output": cross.o.weight}
    return weights


def _joined(norm: nn.Module, *projections: nn.Linear) -> Tensor:
    """One matrix for projections of the same normed states, the norm's weight multiplied in."""
    matrix = torch.cat([projection.weight for projection in projections])
    exact = torch.promote_types(matrix.dtype, torch.float32)
    return (matrix.to(exact) * norm.weight).to(matrix.dtype)
