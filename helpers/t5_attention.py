"""How a prefix reaches the attention of a Hugging Face T5 that knows nothing of it.

transformers lets anyone register an attention function, with a mask function that belongs to it; a config selects one
by name. For "sdpa" and "eager" there is a routed twin that joins the prefix and calls the stock function. A pre-hook
on each stack hands the prefix over as a keyword argument, which T5 passes down to its attention.
"""

import weakref
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.mt5.modeling_mt5 import MT5Stack
from transformers.models.t5.modeling_t5 import T5Stack, eager_attention_forward
from transformers.models.umt5.modeling_umt5 import UMT5Stack

from helpers.masks import causal_mask
from helpers.prefix import PrefixEncoder, join_prefix, with_prefix_columns

SITES = ("encoder", "decoder", "cross")  # encoder self-attention, decoder self-attention, cross-attention
_ROUTED = "prefixed_"


def stacks_by_site(model: nn.Module) -> dict[str, PreTrainedModel]:
    """`{site: stack}`; "decoder" and "cross" share one.

    Raises TypeError where the mechanism does not reach, ValueError for a module that holds several T5s.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    stacks = [module for module in modules if isinstance(module, T5Stack | MT5Stack | UMT5Stack)]
    if not stacks:
        raise TypeError(f"T5Prefix works on a T5, MT5 or UMT5 of transformers, not on a {type(model).__name__}")
    by_site = {}
    for stack in stacks:
        for site in ("decoder", "cross") if stack.config.is_decoder else ("encoder",):
            if site in by_site:
                raise ValueError(f"the {type(model).__name__} holds more than one T5: give one of them")
            by_site[site] = stack
    return by_site


@dataclass
class SitePrefix:
    """What a stack's layers are handed for one site, and what they need not compute twice."""

    layers: tuple[Tensor, ...]  # [2, rows, heads, prefix, d_kv] of each layer
    visible: Tensor | None  # bool [rows, prefix], or None for all
    added: tuple | None = None  # mask, bias, and their sum with the prefix's columns: the same for every layer
    joined: dict | None = None  # layer -> key, value, and both with the prefix, of cross-attention while decoding


class HandOver:
    """The forward pre-hook of an attached model's stacks: hands them the prefixes of their sites.

    `prefix` has `sites`, `key_values(site)`, `visible(site)` and `position_bias(stack, queries, past)`.
    """

    def __init__(self, prefix: nn.Module):
        self.prefix = prefix
        self.remembered = None  # KV cache (weakly), parameter versions, what was handed over

    def __getstate__(self) -> dict:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def __call__(self, stack: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not stack.config._attn_implementation.startswith(_ROUTED):  # somebody changed it since
            stack.set_attn_implementation(routed_twin(stack))
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        _check_cache_depth(cache, stack)
        _check_checkpointing(self.prefix, stack)
        kwargs = {**kwargs, "prefixes": self.for_stack(stack, cache)}
        if stack.config.is_decoder:
            tokens = args[0] if args else kwargs.get("input_ids")
            queries = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[1]
            past = 0 if cache is None else cache.get_seq_length()
            kwargs["prefix_bias"] = self.prefix.position_bias(stack, queries, past)
        return args, kwargs

    def for_stack(self, stack: PreTrainedModel, cache) -> dict[str, SitePrefix]:
        """The result of `evaluate`, of the cache's first step for as long as it grows: once a `generate`."""
        if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.evaluate(stack)
        versions = [(id(p), None if p.is_inference() else p._version) for p in self.prefix.parameters()]
        if self.remembered is not None and int(cache.get_seq_length()) > 0:
            known_cache, known_versions, prefixes = self.remembered
            if known_cache() is cache and known_versions == versions:
                return prefixes
        prefixes = self.evaluate(stack)
        if "cross" in prefixes:
            prefixes["cross"].joined = {}
        # With the cache go the keys that were joined for it.
        self.remembered = (weakref.ref(cache, lambda _: prefixes.clear()), versions, prefixes)
        return prefixes

    def evaluate(self, stack: PreTrainedModel) -> dict[str, SitePrefix]:
        """The prefixes of the stack's sites, from `key_values`."""
        prefixes = {}
        for site in ("decoder", "cross") if stack.config.is_decoder else ("encoder",):
            if site in self.prefix.sites:
                key_values = self.prefix.key_values(site)
                if key_values.ndim != 6 or key_values.shape[:2] != (len(stack.block), 2):
                    raise ValueError(
                        f"key_values({site!r}) must be [layers, 2, rows, heads, prefix, d_kv] with {len(stack.block)} "
                        f"layers, got {list(key_values.shape)}"
                    )
                prefixes[site] = SitePrefix(key_values.unbind(0), self.prefix.visible(site))
        return prefixes


def hand_overs(stack: nn.Module) -> dict[int, HandOver]:
    """The stack's hooks of this kind by key: at most one."""
    # Looked for in the module, not remembered as torch's handles: a deep copy has hooks that no handle knows.
    return {key: hook for key, hook in stack._forward_pre_hooks.items() if isinstance(hook, HandOver)}


def attached_prefix(model: nn.Module) -> nn.Module | None:
    """The prefix that `model` carries, or None."""
    hooks = [hook for stack in stacks_by_site(model).values() for hook in hand_overs(stack).values()]
    return hooks[0].prefix if hooks else None


def has_dropout_on(module: nn.Module) -> bool:
    """Whether any of T5's dropouts is in training mode; that of the weights hangs on the attention module itself."""
    return any(
        part.training and (isinstance(part, nn.Dropout) or hasattr(part, "relative_attention_num_buckets"))
        for part in module.modules()
    )


def detach_prefix(model: nn.Module) -> None:
    """Take the prefix off `model`, whoever attached it; afterwards the model is as it was before."""
    for stack in stacks_by_site(model).values():
        for key in hand_overs(stack):
            del stack._forward_pre_hooks[key]
            stack._forward_pre_hooks_with_kwargs.pop(key)
        implementation = stack.config._attn_implementation
        if implementation.startswith(_ROUTED):
            stack.set_attn_implementation(implementation.removeprefix(_ROUTED))


def routed_twin(stack: PreTrainedModel) -> str:
    """The name of the routed twin of the stack's attention implementation; ValueError if there is none."""
    implementation = stack.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"a prefix needs the attention implementation 'eager' or 'sdpa', not {implementation!r}: "
            "call model.set_attn_implementation('sdpa')"
        )
    if stack.config.is_decoder and not stack.block[0].layer[0].SelfAttention.is_causal:  # UMT5 in transformers 5.15
        raise ValueError(
            f"this version of transformers does not mark the self-attention of a {type(stack).__name__}'s decoder as "
            "causal, so that a prefix would take it for cross-attention: update transformers"
        )
    return _ROUTED + implementation


def _check_cache_depth(cache, stack: PreTrainedModel) -> None:
    """transformers 5.15 to 5.24 give `generate` a cache with a layer for each of the encoder's, not the decoder's."""
    cache = getattr(cache, "self_attention_cache", cache)
    if getattr(cache, "layer_class_to_replicate", True) is None and len(cache.layers) < len(stack.block):
        raise ValueError(
            f"the KV cache has {len(cache.layers)} layers and the decoder {len(stack.block)}: transformers sizes it by "
            "the encoder; generate with use_cache=False, or with a cache of your own that grows, "
            "EncoderDecoderCache(DynamicCache(), DynamicCache())"
        )


def _check_checkpointing(prefix: nn.Module, stack: PreTrainedModel) -> None:
    """Reentrant checkpointing runs a backward pass for each layer, through an MLP that one pass has already freed."""
    checkpoint = getattr(stack.block[0], "_gradient_checkpointing_func", None)
    if not (
        stack.block[0].training and torch.is_grad_enabled() and getattr(checkpoint, "keywords", {}).get("use_reentrant")
    ):
        return
    encoders = [module for module in prefix.modules() if isinstance(module, PrefixEncoder)]
    if any(encoder.mid_dim or (encoder.dropout.p and encoder.training) for encoder in encoders):
        raise ValueError(
            "reentrant gradient checkpointing cannot train a prefix with an MLP or with dropout: enable it with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def _attend(
    stock, module, query, key, value, attention_mask, *, prefixes=None, prefix_bias=None, position_bias=None, **kwargs
):
    """The stock attention function, on keys, values and one additive mask that are longer by the prefix."""
    site = "encoder" if not module.is_decoder else "decoder" if module.is_causal else "cross"
    if prefixes is None or site not in prefixes:
        return stock(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)
    prefix = prefixes[site]
    if site == "cross":
        position_bias = None  # it has none: transformers hands down zeros for every head, query and key
    added = _added_to_scores(prefix, module, query, key, attention_mask, position_bias)
    if site == "decoder" and prefix_bias is not None:
        bias = row_for_each_example(prefix_bias[module.layer_idx], len(key))
        added = added + F.pad(bias, (0, added.shape[-1] - bias.shape[-1]))
    key, value = _joined_keys_and_values(prefix, module.layer_idx, key, value)
    return stock(module, query, key, value, added, position_bias=None, **kwargs)


def _added_to_scores(prefix: SitePrefix, module, query, key, mask, bias) -> Tensor | None:
    """Mask and position bias in one tensor `[..., query, prefix + key]`, made once for all layers of a stack."""
    if prefix.added is not None and prefix.added[0] is mask and prefix.added[1] is bias:
        return prefix.added[2]
    given = mask, bias
    if mask is not None:
        mask = mask[..., : key.shape[2]]  # a static cache's mask can be longer than its keys
    elif module.is_causal:  # a direct call of the module; sdpa would keep only as many keys as there are queries
        mask = causal_mask(query.shape[2], key.shape[2], device=key.device)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        # The stock functions' own number, not -inf: a fully padded example attends evenly to its padding.
        mask = key.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(key.dtype).min)
    added = mask if bias is None else bias if mask is None else bias + mask
    visible = None if prefix.visible is None else row_for_each_example(prefix.visible, len(key))
    added = with_prefix_columns(added, prefix.layers[0].shape[-2], key.shape[2], visible)
    if added is not None and added.dtype == torch.bool:  # only slots are hidden; eager adds its mask
        added = key.new_zeros(added.shape).masked_fill(~added, -torch.inf)
    prefix.added = (*given, added)
    return added


def _joined_keys_and_values(prefix: SitePrefix, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the prefix in front. Those of the source are joined once for a whole generation."""
    if prefix.joined is not None and layer in prefix.joined and prefix.joined[layer][0] is key:
        return prefix.joined[layer][1]
    prefix_key, prefix_value = (row_for_each_example(rows, len(key)) for rows in prefix.layers[layer])
    joined = join_prefix(prefix_key, prefix_value, key, value)[:2]
    if prefix.joined is not None:
        prefix.joined[layer] = key, joined
    return joined


def row_for_each_example(rows: Tensor, batch_size: int) -> Tensor:
    """`[rows, ...]` -> `[1 or batch, ...]`: beams and returned sequences lie next to each other."""
    if len(rows) in (1, batch_size):
        return rows
    if batch_size % len(rows):
        raise ValueError(
            f"a prefix with {len(rows)} rows cannot serve a batch of {batch_size}: it needs one row for all, or one "
            "for each example"
        )
    return rows.repeat_interleave(batch_size // len(rows), dim=0)


def _complete_mask(stock, *args, allow_is_causal_skip=False, **kwargs):
    """The stock mask function, never leaving the causal triangle to the kernel: the kernel would misplace it."""
    return stock(*args, allow_is_causal_skip=False, **kwargs)


for _name, _attention, _mask in (
    ("eager", eager_attention_forward, eager_mask),
    ("sdpa", sdpa_attention_forward, sdpa_mask),
):
    AttentionInterface.register(_ROUTED + _name, partial(_attend, _attention))
    AttentionMaskInterface.register(_ROUTED + _name, partial(_complete_mask, _mask))
