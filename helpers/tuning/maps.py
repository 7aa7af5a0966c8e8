"""Attention maps of a model with a prefix, without the prefix's columns."""

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput


def content_attentions(outputs: ModelOutput, prefix: nn.Module, *, renormalise: bool = False) -> ModelOutput:
    """A copy of `outputs` whose attention maps have no columns for the prefix's slots, as viewers such as bertviz want.

    A map `[batch, heads, query, prefix + key]` becomes `[batch, heads, query, key]`. Its rows then add up to what the
    slots have left to the content. With `renormalise` they are divided by that share and add up to 1: where a token
    looks, given that it looks at content at all. In the first layer this is what it is without a prefix. How much the
    slots take is lost: `1 - map.sum(-1)` before renormalising, or the first `prefix` columns of the map in `outputs`.

    Args:
        outputs: of a forward pass of the model, of one of its stacks, or of `generate`, whose maps are nested by step;
            with `output_attentions=True` (for generate also `return_dict_in_generate=True`) and attention "eager".
        prefix: the Prefix or PrefixPerRow that was attached. Of rows, as many columns go as the longest prefix has.
        renormalise: divide each row by its sum.

    Raises ValueError if `outputs` hold no maps, or maps without the columns of this prefix.
    """
    has_cache = hasattr(outputs, "past_key_values") or hasattr(outputs, "cache")  # or a place for it, as BERT's too
    of_decoder = outputs.get("cross_attentions") or (has_cache and "encoder" not in prefix.sites)
    sites = {
        "encoder_attentions": "encoder",
        "decoder_attentions": "decoder",
        "cross_attentions": "cross",
        "attentions": "decoder" if of_decoder else "encoder",  # of one stack
    }
    maps = {name: outputs[name] for name in sites if outputs.get(name)}
    if not maps or any(each is None for given in maps.values() for each in given):
        raise ValueError(
            "these outputs hold no attention maps: call model.set_attn_implementation('eager'), and the model with "
            "output_attentions=True (generate also with return_dict_in_generate=True)"
        )

    def content(given, site: str, slots: int):
        if not isinstance(given, Tensor):
            return tuple(content(each, site, slots) for each in given)
        own = given.shape[-2] if site != "cross" else 1  # a token's keys are at least the queries of its stack
        if given.shape[-1] < slots + own:
            raise ValueError(
                f"a map {list(given.shape)} of site {site!r} has no {slots} columns for the slots of this prefix in "
                "front of the content's: was another prefix attached, or none?"
            )
        kept = given[..., slots:]
        return kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny) if renormalise else kept

    with torch.no_grad():
        slots = {site: prefix.key_values(site).shape[-2] for site in prefix.sites}
    own_maps = {name: content(given, sites[name], slots.get(sites[name], 0)) for name, given in maps.items()}
    return type(outputs)(**{**outputs, **own_maps})
