"""The loss of a frozen T5 with a prefix, in fewer operations and on real tokens alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers import MT5ForConditionalGeneration, PreTrainedModel, T5ForConditionalGeneration

from helpers._shapes import Bool, Float
from helpers.masks import causal_mask, padding_mask
from helpers.prefix import join_prefix, with_prefix_columns
from helpers.tuning.attach import PrefixPerRow, T5Prefix
from helpers.tuning.losses import frozen_cross_entropy
from helpers.tuning.routing import has_dropout_on, row_for_each_example


class LeanT5:
    """A frozen T5 for training a prefix: `LeanT5(model, prefix)(batch)` is `model(**batch).loss` for less work.

    The equations are T5's; their arrangement is another, and changes the loss by rounding alone:

    - Only attention sees padding. Norms, projections and feed-forward layers work on real tokens, one row each; in the
      decoder, on those up to the last label.
    - Matrices for keys and values that read the same states are one, for all cross-attentions together. Each norm's
      weight is multiplied into the matrices behind it.
    - Of the logits, at most 32 MB are there at once: see `frozen_cross_entropy`.

    The joined matrices are copies, made once: after a change of the model's weights, dtype or device, make a new one.
    The prefix need not be attached. Hooks on the model's modules do not run.

    Source: Raffel et al. 2020, section 2.1; the prefix: Li & Liang 2021, section 4.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, prefix: T5Prefix | PrefixPerRow):
        """Args: a frozen T5 or MT5 in evaluation mode, with a language modelling head; a prefix that fits it.

        Raises TypeError for another model or prefix; ValueError for a model with dropout, weights to train, weights
        that are no plain numbers, or several dtypes, for a prefix with a position bias, and what `check_fits` raises.
        """
        _check(model, prefix)
        self.model, self.prefix, self.d_kv = model, prefix, model.config.d_kv
        first = model.encoder.block[0].layer[-1]
        self.eps, self.activation = first.layer_norm.variance_epsilon, first.DenseReluDense.act
        self.encoder_layers = [_joined_layer(block) for block in model.encoder.block]
        self.decoder_layers = [_joined_layer(block) for block in model.decoder.block]
        cross = [block.layer[1].EncDecAttention for block in model.decoder.block]
        key_value = [projection for attention in cross for projection in (attention.k, attention.v)]
        self.cross_key_value = _joined(model.encoder.final_layer_norm, *key_value)
        self.lm_head = _joined(model.decoder.final_layer_norm, model.lm_head)
        if isinstance(model, T5ForConditionalGeneration) and model.config.scale_decoder_outputs:  # an MT5 never scales
            self.lm_head *= model.model_dim**-0.5

    def __call__(
        self, batch: Mapping[str, Tensor], *, encoded: Float[Tensor, "tokens d_model"] | None = None
    ) -> Float[Tensor, ""]:
        """The mean cross-entropy over the labels; NaN without any.

        Args:
            batch: `input_ids` and `attention_mask` `[batch, source]`, `labels` `[batch, target]`, -100 where none.
            encoded: what `encode` gives for these sources, if it is known already.

        Raises ValueError for other keys, shapes that do not fit, a source without a token, or states that are encoded
        already where the prefix has the site "encoder".
        """
        source, decoder = self._source_mask(batch), self.model.decoder
        if "labels" not in batch:
            raise ValueError(f"a loss needs labels, and the batch has only {', '.join(batch)}")
        labels = batch["labels"]
        real = Padding(source[:, 0, 0])
        if encoded is None:
            encoded = self.encode(batch)
        elif "encoder" in self.prefix.sites or len(encoded) != source.sum():
            raise ValueError(
                f"encoded {list(encoded.shape)} must have a row for each of the {source.sum()} source tokens, and a "
                f"prefix at the encoder changes it: this one has the sites {', '.join(self.prefix.sites)}"
            )
        labelled = labels != -100
        needed = labelled.flip(1).cumsum(dim=1).flip(1) > 0  # no token sees those behind the last label
        own = self._site("decoder", needed, causal_mask(labels.shape[1], device=labels.device), decoder)
        cross = self._site("cross", needed, source)
        memory = real.pad(F.linear(encoded, self.cross_key_value))
        memory = rearrange(memory, "b s (l kv h d) -> l kv b h s d", l=len(self.decoder_layers), kv=2, d=self.d_kv)

        states = decoder.embed_tokens(self.model.prepare_decoder_input_ids_from_labels(labels)[needed])
        for layer, weights in enumerate(self.decoder_layers):
            states = self._self_attention(states, own, layer, weights)
            query = cross.queries.pad(F.linear(self._norm(states), weights["cross_query"]))
            query = rearrange(query, "b s (h d) -> b h s d", d=self.d_kv)
            states = states + F.linear(cross.attend(layer, query, *memory[layer]), weights["cross_output"])
            states = self._feed_forward(states, weights)
        return frozen_cross_entropy(self._norm(states)[labelled[needed]], self.lm_head, labels[labelled])

    def encode(self, batch: Mapping[str, Tensor]) -> Float[Tensor, "tokens d_model"]:
        """The encoder's states of all real tokens, row after row, normed; the norm's weight is still missing."""
        source, encoder = self._source_mask(batch), self.model.encoder
        tokens = source[:, 0, 0]
        site = self._site("encoder", tokens, source, encoder)
        states = encoder.embed_tokens(batch["input_ids"][tokens])
        for layer, weights in enumerate(self.encoder_layers):
            states = self._self_attention(states, site, layer, weights)
            states = self._feed_forward(states, weights)
        return self._norm(states)

    def _source_mask(self, batch: Mapping[str, Tensor]) -> Bool[Tensor, "batch 1 1 source"]:
        if not {"input_ids", "attention_mask"} <= set(batch) <= {"input_ids", "attention_mask", "labels"}:
            raise ValueError(f"LeanT5 needs input_ids, attention_mask and labels, got {', '.join(batch)}")
        shapes = {name: list(tensor.shape) for name, tensor in batch.items()}
        if not shapes["input_ids"] == shapes["attention_mask"] or len({shape[0] for shape in shapes.values()}) > 1:
            raise ValueError(
                f"input_ids and attention_mask must be of one shape, and labels have as many rows, got {shapes}: a "
                "prefix needs no columns in the mask"
            )
        source = padding_mask(batch["attention_mask"])
        if not source.any(dim=-1).all():
            raise ValueError(f"every source needs a token, and a row of attention_mask {list(source.shape)} has none")
        return source

    def _site(self, site: str, tokens: Tensor, mask: Tensor, stack: nn.Module | None = None) -> "Site":
        """Args: which queries are real, [batch, query]; which keys they see; the stack whose position bias they get."""
        added = torch.zeros_like(mask, dtype=self.lm_head.dtype).masked_fill(~mask, -torch.inf)
        if stack is not None:
            length = mask.shape[-1]
            added = added + stack.block[0].layer[0].SelfAttention.compute_bias(length, length)
        layers, slots, visible = None, 0, None
        if site in self.prefix.sites:
            layers = [
                [row_for_each_example(part, len(tokens)) for part in pair] for pair in self.prefix.key_values(site)
            ]
            slots, visible = layers[0][0].shape[-2], self.prefix.visible(site)
            visible = None if visible is None else row_for_each_example(visible, len(tokens))
        return Site(Padding(tokens), layers, with_prefix_columns(added, slots, added.shape[-1], visible))

    def _self_attention(self, states: Tensor, site: "Site", layer: int, weights: dict) -> Tensor:
        normed = self._norm(states)
        # The query is kept for the backward pass, keys and values are not, once they have been joined to a prefix.
        query = rearrange(site.queries.pad(F.linear(normed, weights["query"])), "b s (h d) -> b h s d", d=self.d_kv)
        key_value = site.queries.pad(F.linear(normed, weights["key_value"]))
        key_value = rearrange(key_value, "b s (kv h d) -> kv b h s d", kv=2, d=self.d_kv)
        return states + F.linear(site.attend(layer, query, *key_value), weights["output"])

    def _feed_forward(self, states: Tensor, weights: dict) -> Tensor:
        inner = F.linear(self._norm(states), weights["inner"])
        if inner.shape[-1] > weights["outer"].shape[-1]:  # gated
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
    prefixes: Sequence[Sequence[Tensor]] | None  # each layer's key and value, [batch or 1, heads, prefix, d_kv]
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


def _check(model: PreTrainedModel, prefix: T5Prefix | PrefixPerRow) -> None:
    """Refuse what LeanT5 would compute wrongly."""
    if type(model) not in (T5ForConditionalGeneration, MT5ForConditionalGeneration):
        raise TypeError(
            "LeanT5 needs a T5ForConditionalGeneration or MT5ForConditionalGeneration itself, got a "
            f"{type(model).__name__}: of a wrapper, give the model inside"
        )
    if not isinstance(prefix, T5Prefix | PrefixPerRow):
        raise TypeError(f"LeanT5 needs a T5Prefix or PrefixPerRow, got a {type(prefix).__name__}")
    prefix.check_fits(model)
    if prefix.position_bias(model.decoder, 1, 0) is not None:
        raise ValueError(f"LeanT5 knows no position bias of slots, and the {type(prefix).__name__} has one")
    dropout, trained = has_dropout_on(model), sum(parameter.requires_grad for parameter in model.parameters())
    if dropout or trained:
        raise ValueError(
            "LeanT5 has no dropout and trains no weight of the model: call model.eval() and "
            f"model.requires_grad_(False) first (dropout on {dropout}, tensors to train {trained})"
        )
    linear = [(name, module) for name, module in model.named_modules() if hasattr(module, "in_features")]
    for name, module in [("lm_head", model.lm_head), *linear]:
        if type(module) is not nn.Linear or module.bias is not None or module.weight.is_meta:
            raise ValueError(
                "LeanT5 multiplies the weights of nn.Linear layers that have no bias and are in memory, and "
                f"{name} is {module}: merge or remove adapters, load the model unquantised and not offloaded"
            )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1 or not dtypes <= {torch.float64, torch.float32, torch.bfloat16}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"LeanT5 needs a model in float32, float64 or bfloat16 throughout, got {found}")


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
