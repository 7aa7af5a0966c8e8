"""What a model with a prefix refuses at the door of its forward pass, because it would be wrong without a word."""

import sys
from collections.abc import Collection

import torch
from torch import Tensor, nn

from helpers.prefix import PrefixEncoder
from helpers.tuning.families import at


def check_cache_depth(cache, depths: dict[str, int]) -> None:
    """transformers 5.15 to 5.24 give `generate` a cache with a layer for each of the encoder's, not the decoder's."""
    cache, layers = getattr(cache, "self_attention_cache", cache), depths.get("decoder", 0)
    if getattr(cache, "layer_class_to_replicate", True) is None and len(cache.layers) < layers:
        raise ValueError(
            f"the KV cache has {len(cache.layers)} layers and the decoder {layers}: transformers sizes it by "
            "the encoder; generate with use_cache=False, or with a cache of your own that grows, "
            "EncoderDecoderCache(DynamicCache(), DynamicCache())"
        )


def check_masks(given: dict, tokens: Tensor, cache, sites: Collection[str]) -> None:
    """Refuse masks that transformers or broadcasting would cut or stretch to the keys without a word.

    Args: the stack's arguments by name, its tokens, its KV cache, and its sites.
    """
    batch, keys = tokens.shape[:2]
    mask, states = given.get("attention_mask"), given.get("encoder_hidden_states")
    if "encoder" in sites:
        _check_mask("attention_mask", mask, batch, keys)
        return
    static = getattr(cache, "is_compileable", False)
    if static:
        own = getattr(cache, "self_attention_cache", cache)  # layers with a window hold fewer
        keys = max(own.get_mask_sizes(keys, layer)[0] for layer in range(len(own.layers)))
    elif cache is not None:
        keys += cache.get_seq_length()
    short = static and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] <= keys
    if not short:  # or tokens yet to come are hidden
        name = "decoder_attention_mask" if states is not None else "attention_mask"
        _check_mask(name, mask, batch, keys)
    if states is not None:
        _check_mask("attention_mask", given.get("encoder_attention_mask"), *states.shape[:2])


def _check_mask(name: str, mask: Tensor | dict | None, batch: int, keys: int) -> None:
    if mask is None or isinstance(mask, dict):  # generate's own, of each kind of layer
        return
    if (mask.ndim == 4 and mask.shape[-1] == keys) or tuple(mask.shape) == (batch, keys):
        return
    raise ValueError(
        f"the {name} {list(mask.shape)} must be [batch, keys] = {[batch, keys]} or [batch, heads, queries, keys]: a "
        "prefix needs no columns in the mask, pass the tokens' own"
    )


def check_assistant() -> None:
    """Assisted decoding cuts the decoder's maps to the text's length: behind the slots, it would cut off the text."""
    frame = None if torch.compiler.is_compiling() else sys._getframe()  # its first step is never compiled
    while frame is not None and frame.f_code.co_name != "generate":
        if frame.f_code.co_name == "_assisted_decoding":
            raise ValueError(
                "generate cannot give attention maps in assisted decoding with a prefix at the site 'decoder': "
                "transformers would cut them to the text's length without the slots. Leave out output_attentions or "
                "the assistant, or take the maps of a forward pass over the text"
            )
        frame = frame.f_back


def check_checkpointing(prefix: nn.Module, stack: nn.Module, layers: str) -> None:
    """Reentrant checkpointing runs a backward pass for each layer, through an MLP that one pass has already freed."""
    layer = at(stack, layers)[0]
    checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
    if not (layer.training and torch.is_grad_enabled() and getattr(checkpoint, "keywords", {}).get("use_reentrant")):
        return
    encoders = [module for module in prefix.modules() if isinstance(module, PrefixEncoder)]
    if any(encoder.mid_dim or (encoder.dropout.p and encoder.training) for encoder in encoders):
        raise ValueError(
            "reentrant gradient checkpointing cannot train a prefix with an MLP or with dropout: enable it with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
