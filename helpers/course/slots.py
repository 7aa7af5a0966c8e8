"""What a model gives the slots of a prefix, and a prefix with one slot less: lesson 8's instruments."""

import torch
from torch import Tensor

from helpers.prefix import PrefixEncoder
from helpers.tuning.attach import T5Prefix


def slot_weights(model, prefix: T5Prefix, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The attention weights on the slots, `[queries, heads, slots]` by place: "encoder 0", "cross 1".

    The queries are those of all examples in turn, without the places of padding: of the encoder as many as
    `attention_mask` has ones, of the two others as many as `labels` has that are not -100. `model` is a T5, and its
    attention is computed in the open from now on ("eager"), since fused kernels have no weights to show.
    """
    for part in (model, model.encoder, model.decoder):  # older versions of transformers stop at the first
        part.set_attn_implementation("eager")
    with prefix.attached(model), torch.no_grad():
        output = model(**batch, output_attentions=True)
    source, target = batch["attention_mask"] == 1, batch["labels"] != -100
    maps = {
        "encoder": (output.encoder_attentions, source),
        "decoder": (output.decoder_attentions, target),
        "cross": (output.cross_attentions, target),
    }
    return {
        f"{site} {layer}": weights[..., : prefix.key_values(site).shape[-2]].transpose(1, 2)[real]
        for site, (layers, real) in maps.items()
        if site in prefix.sites
        for layer, weights in enumerate(layers)
    }


def without_slot(prefix: T5Prefix, site: str, slot: int) -> T5Prefix:
    """The same prefix without one slot of one site, in all layers."""
    pairs = prefix.key_values(site).detach()
    kept = [number for number in range(pairs.shape[-2]) if number != slot]
    return T5Prefix({**prefix.encoders, site: PrefixEncoder.from_key_values(pairs[..., kept, :])}, prefix.base)
