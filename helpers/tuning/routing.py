"""How a prefix reaches the attention of a transformers model that knows nothing of it.

transformers lets anyone register an attention function, with a mask function that belongs to it; a config selects one
by name. For "sdpa" and "eager" there is a routed twin that joins the prefix and calls the stock function. A pre-hook
on each stack hands the prefix over as a keyword argument, which the stack passes down to its attention.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from helpers.masks import causal_mask
from helpers.prefix import is_exporting, join_prefix, with_prefix_columns
from helpers.tuning.families import Site, StackSigns, put_signs, sites_of, take_signs
from helpers.tuning.refusals import check_assistant, check_cache_depth, check_checkpointing, check_masks

_ROUTED = "prefixed_"


@dataclass
class SitePrefix:
    """What a stack's layers are handed for one site, and what they need not compute twice."""

    layers: tuple[Tensor, ...]  # [2, rows, heads, prefix, head_dim] of each layer
    visible: Tensor | None  # bool [rows, prefix], or None for all
    added: tuple = ()  # (mask, bias, keys, their sum with the prefix's columns), of the latest two: layers share them
    joined: dict | None = None  # layer -> key, value, and both with the prefix, of cross-attention while decoding


@torch.compiler.assume_constant_result
def _constant_key_values(prefix: nn.Module, site: str) -> Tensor:
    """For torch.export with strict=True, which knows no parameters but those of the exported module."""
    return prefix.key_values(site).detach()


class Attachment:
    """One prefix in use on a model, and what it has computed for the KV cache of its latest generation.

    `prefix` has `sites`, `key_values(site)`, `visible(site)` and `position_bias(stack, queries, past)`.
    """

    def __init__(self, prefix: nn.Module):
        self.prefix = prefix
        self.remembered = None  # KV cache (weakly), parameter versions, what was handed over

    def for_stack(self, depths: dict[str, int], cache) -> dict[str, SitePrefix]:
        """The result of `evaluate`, of the cache's first step for as long as it grows: once a `generate`."""
        if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.evaluate(depths)
        versions = [(id(p), None if p.is_inference() else p._version) for p in self.prefix.parameters()]
        if self.remembered is not None and int(cache.get_seq_length()) > 0:
            known_cache, known_versions, prefixes = self.remembered
            if known_cache() is cache and known_versions == versions:
                return prefixes
        prefixes = self.evaluate(depths)
        if "cross" in prefixes:
            prefixes["cross"].joined = {}
        # With the cache go the keys that were joined for it.
        self.remembered = (weakref.ref(cache, lambda _: prefixes.clear()), versions, prefixes)
        return prefixes

    def evaluate(self, depths: dict[str, int]) -> dict[str, SitePrefix]:
        """The prefixes of a stack's sites, from `key_values`; `depths` has the layers of each."""
        prefixes = {}
        for site, layers in depths.items():
            if site in self.prefix.sites:
                key_values = self._key_values(site)
                if key_values.ndim != 6 or key_values.shape[:2] != (layers, 2):
                    raise ValueError(
                        f"key_values({site!r}) must be [layers, 2, rows, heads, prefix, head_dim] with {layers} "
                        f"layers, got {list(key_values.shape)}"
                    )
                prefixes[site] = SitePrefix(key_values.unbind(0), self.prefix.visible(site))
        return prefixes

    def _key_values(self, site: str) -> Tensor:
        if is_exporting() and torch.compiler.is_dynamo_compiling():
            return _constant_key_values(self.prefix, site)
        try:
            return self.prefix.key_values(site)
        except RuntimeError as error:
            if "Cannot insert a Tensor that requires grad as a constant" in str(error):  # and all its numbers
                raise ValueError(
                    "torch.jit.trace knows the parameters of the traced module alone, and takes others for constants: "
                    "call prefix.requires_grad_(False) first, or trace a ModelWithPrefix"
                ) from None
            raise


class _Thread(threading.local):
    def __init__(self):
        self.entered: tuple[Attachment, ...] = ()


# Who has entered `attached`: for a thread or an asyncio task, and again for the thread as a whole.
_CONTEXT: ContextVar[tuple[Attachment, ...]] = ContextVar("entered", default=())
_THREAD = _Thread()
_ATTACHING = threading.RLock()  # held while hooks come and go


class HandOver:
    """The forward pre-hook of an attached model's stacks, one for all of them: hands on the prefix of who is calling.

    That is the one attached for all threads, or else the one that the calling thread or task has entered.
    """

    def __init__(self, prefix: nn.Module | None = None):
        self.everywhere = None if prefix is None else Attachment(prefix)
        self.entered: tuple[Attachment, ...] = ()  # of all threads and tasks

    def __getstate__(self) -> dict:
        attachment = self.current()
        return {"prefix": None if attachment is None else attachment.prefix}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def current(self) -> Attachment | None:
        """What the caller computes with."""
        if self.everywhere is not None or not self.entered:
            return self.everywhere
        # torch.compile can trace a thread's attributes, and guards them; a ContextVar it cannot trace.
        entered = _THREAD.entered if torch.compiler.is_compiling() else _CONTEXT.get()
        mine = [attachment for attachment in entered if attachment in self.entered]
        if len(mine) > 1:
            raise ValueError("torch.compile tells threads apart, but not the tasks of one thread with a prefix each")
        return mine[0] if mine else None

    def __call__(self, stack: PreTrainedModel, args: tuple, kwargs: dict | None = None) -> tuple[tuple, dict] | None:
        attachment = self.current()
        if attachment is None:  # nor are there kwargs, if torch calls while another thread adds or removes this hook
            if self.entered and not torch.compiler.is_compiling():
                warnings.warn(
                    "this thread computes without a prefix while another thread or task has one attached. A thread "
                    "does not inherit `attached`: enter it in the thread itself, or use `attach`, for all threads",
                    stacklevel=2,
                )
            return None
        signs: StackSigns = stack.prefix_signs
        given = {**dict(zip(signs.arguments, args, strict=False)), **kwargs}
        tokens = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
        if tokens is None and given.get("input_features") is None:
            return None  # the stack says what is missing
        if not stack.config._attn_implementation.startswith(_ROUTED):  # somebody changed it since
            stack.set_attn_implementation(routed_twin(stack))
        cache = given.get("cache", given.get("past_key_values"))
        check_cache_depth(cache, signs.depths)
        if tokens is not None:  # sounds have no mask
            check_masks(given, tokens, cache, signs.depths)
        check_checkpointing(attachment.prefix, stack, signs.layers)
        if given.get("output_attentions") and "decoder" in signs.depths and "decoder" in attachment.prefix.sites:
            check_assistant()
        kwargs = {**kwargs, "prefixes": attachment.for_stack(signs.depths, cache)}
        if "decoder" in signs.depths:
            past = 0 if cache is None else cache.get_seq_length()
            kwargs["prefix_bias"] = attachment.prefix.position_bias(stack, tokens.shape[1], past)
            shift = attachment.prefix.position_shift()
            if isinstance(shift, Tensor) or shift:
                args, kwargs = _with_positions(args, kwargs, given, tokens, past, shift)
        return args, kwargs


def _with_positions(args: tuple, kwargs: dict, given: dict, tokens: Tensor, past, shift) -> tuple[tuple, dict]:
    """A stack's arguments with positions that are greater by `shift`, a number or `[rows, 1]`."""
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None] + past
    if isinstance(shift, Tensor):
        shift = row_for_each_example(shift, tokens.shape[0])
    # By name, all of them: a position may have come by its place.
    return (), {**given, **kwargs, "position_ids": positions + shift}


def hand_overs(stack: nn.Module) -> dict[int, HandOver]:
    """The stack's hooks of this kind by key: at most one."""
    # Looked for in the module, not remembered as torch's handles: a deep copy has hooks that no handle knows.
    return {key: hook for key, hook in stack._forward_pre_hooks.items() if isinstance(hook, HandOver)}


def _hand_over(sites: dict[str, Site]) -> HandOver | None:
    return next((hook for site in sites.values() for hook in hand_overs(site.stack).values()), None)


def attached_prefix(model: nn.Module) -> nn.Module | None:
    """The prefix that `model` carries for the calling thread or task, or None."""
    hand_over = _hand_over(sites_of(model))
    attachment = hand_over and hand_over.current()
    return attachment and attachment.prefix


class Detach:
    """What `attach` returns: takes the prefix off again when it is called, or at the end of a `with` block."""

    def __init__(self, model: nn.Module, hand_over: HandOver):
        self._model, self._hand_over, self._attachment = model, hand_over, hand_over.everywhere

    def __call__(self) -> None:
        """A late or second call does nothing: it must not take off a prefix that was attached since."""
        with _ATTACHING:
            if self._attachment is self._hand_over.everywhere:
                self._hand_over.everywhere = None
                detach_prefix(self._model)

    def __enter__(self) -> nn.Module:
        if self._attachment is not self._hand_over.everywhere:
            raise ValueError("this prefix was detached already: attach it anew")
        return self._model

    def __exit__(self, *_) -> None:
        self()


def attach_for_all(prefix: nn.Module, model: nn.Module) -> Detach:
    """Let every thread compute with `prefix`. Raises ValueError if the model carries one, for whomever."""
    with _ATTACHING:
        hand_over = _installed(prefix, model, alone=True)
        hand_over.everywhere = Attachment(prefix)
        return Detach(model, hand_over)


@contextmanager
def attached_here(prefix: nn.Module, model: nn.Module) -> Iterator[None]:
    """Let the calling thread or task compute with `prefix`; the others go on as they were.

    Raises ValueError if the model carries one for this thread or task, or for all.
    """
    attachment = Attachment(prefix)
    with _ATTACHING:
        hand_over = _installed(prefix, model)
        hand_over.entered += (attachment,)
    _CONTEXT.set((*_CONTEXT.get(), attachment))
    _THREAD.entered += (attachment,)
    try:
        yield
    finally:
        # Not by a token: the end may come in another context than the beginning, as in a fixture or a generator.
        _CONTEXT.set(tuple(each for each in _CONTEXT.get() if each is not attachment))
        _THREAD.entered = tuple(each for each in _THREAD.entered if each is not attachment)
        with _ATTACHING:
            if attachment in hand_over.entered:
                hand_over.entered = tuple(each for each in hand_over.entered if each is not attachment)
                if not hand_over.entered:
                    detach_prefix(model)


def _installed(prefix: nn.Module, model: nn.Module, *, alone: bool = False) -> HandOver:
    """The model's hook, put on the stacks of the prefix's sites as far as it is not there; `_ATTACHING` is held."""
    sites = sites_of(model)
    hand_over = _hand_over(sites) or HandOver()
    if hand_over.current() is not None or (alone and hand_over.entered):
        raise ValueError(
            "the model carries a prefix already: detach it first, with what attach returned, the end of its with "
            "block, or detach_prefix(model) (from helpers import detach_prefix)"
        )
    own_stacks = {sites[site].stack: None for site in prefix.sites}  # two sites share the decoder
    for name in prefix.sites:  # all checked before any stack is touched
        _check_configs(sites[name])
    if "decoder" in sites:
        _check_causal(sites["decoder"])
    routes = [routed_twin(stack) for stack in own_stacks]
    for stack, route in zip(own_stacks, routes, strict=True):
        put_signs(stack, sites)
        stack.set_attn_implementation(route)
        if not hand_overs(stack):
            stack.register_forward_pre_hook(hand_over, with_kwargs=True)
    return hand_over


def has_dropout_on(module: nn.Module) -> bool:
    """Whether any of T5's dropouts is in training mode; that of the weights hangs on the attention module itself."""
    return any(
        part.training and (isinstance(part, nn.Dropout) or hasattr(part, "relative_attention_num_buckets"))
        for part in module.modules()
    )


def detach_prefix(model: nn.Module) -> None:
    """Take the prefix off `model`, whoever attached it, in whichever thread; afterwards the model is as before."""
    with _ATTACHING:
        for site in sites_of(model).values():
            stack = site.stack
            for key, hand_over in hand_overs(stack).items():
                hand_over.everywhere, hand_over.entered = None, ()
                del stack._forward_pre_hooks[key]
                stack._forward_pre_hooks_with_kwargs.pop(key)
            take_signs(site)
            if stack.config._attn_implementation.startswith(_ROUTED):
                stack.set_attn_implementation(stack.config._attn_implementation.removeprefix(_ROUTED))


def _check_configs(site: Site) -> None:
    """A layer that was copied into the model has a copy of its config, and would compute without the prefix."""
    for layer, attention in enumerate(site.attentions):
        if attention.config is not site.stack.config:
            raise ValueError(
                f"the {type(attention).__name__} of layer {layer} has a config of its own, and would not hear of the "
                "prefix: give it its model's, attention.config = model.config"
            )


def _check_causal(site: Site) -> None:
    """UMT5's decoder in transformers 5.15 makes no causal mask: its tokens see those that come later."""
    for attention in site.attentions:
        if hasattr(attention, "has_relative_attention_bias") and not attention.is_causal:
            raise ValueError(
                f"this version of transformers does not mark the self-attention of a {type(site.stack).__name__}'s "
                "decoder as causal, so that its tokens see those that come later: update transformers"
            )


def routed_twin(stack: PreTrainedModel) -> str:
    """The name of the routed twin of the stack's attention implementation; ValueError if there is none."""
    # Routed already: another thread's doing, or the config is a copy of an attached model's.
    implementation = stack.config._attn_implementation.removeprefix(_ROUTED)
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"a prefix needs the attention implementation 'eager' or 'sdpa', not {implementation!r}: "
            "call model.set_attn_implementation('sdpa')"
        )
    if implementation == "eager" and getattr(stack.config, "reorder_and_upcast_attn", False):
        raise ValueError(
            "GPT-2's reorder_and_upcast_attn goes around the attention function that a prefix needs: call "
            "model.set_attn_implementation('sdpa'), or set it to False"
        )
    return _ROUTED + implementation


def _attend(
    stock, module, query, key, value, attention_mask, *, prefixes=None, prefix_bias=None, position_bias=None, **kwargs
):
    """The stock attention function, on keys, values and one additive mask that are longer by the prefix."""
    site, layer = (None, None) if prefixes is None else _place(module)
    if prefixes is None or site not in prefixes:
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        return stock(module, query, key, value, attention_mask, **kwargs)
    prefix = prefixes[site]
    if site == "cross":
        position_bias = None  # T5 has none there: transformers hands down zeros for every head, query and key
    causal = kwargs.get("is_causal", getattr(module, "is_causal", False)) and query.shape[2] > 1
    added = _added_to_scores(prefix, causal, query, key, attention_mask, position_bias)
    if site == "decoder" and prefix_bias is not None:
        bias = row_for_each_example(prefix_bias[layer], key.shape[0])
        bias = F.pad(bias, (0, key.shape[2]))
        added = bias if added is None else added + bias
    key, value = _joined_keys_and_values(prefix, layer, key, value)
    return stock(module, query, key, value, added, **kwargs)


def _place(module: nn.Module) -> tuple[str, int]:
    """The site and the layer of an attention module."""
    try:
        return module.prefix_place
    except AttributeError:
        raise ValueError(
            f"this {type(module).__name__} came into the model after the prefix was attached: detach, and attach anew"
        ) from None


def _added_to_scores(prefix: SitePrefix, causal: bool, query, key, mask, bias) -> Tensor | None:
    """Mask and position bias in one tensor `[..., query, prefix + key]`, made once for all layers that share them."""
    if mask is None and bias is None and prefix.visible is None and not causal:
        return None
    for known_mask, known_bias, keys, added in prefix.added:
        if known_mask is mask and known_bias is bias and keys == key.shape[2]:
            return added
    given = mask, bias, key.shape[2]
    # A module called by itself; sdpa would keep only as many keys as there are queries.
    if mask is None and causal:
        mask = causal_mask(query.shape[2], key.shape[2], device=key.device)[None, None]
    if mask is not None and mask.shape[-1] != key.shape[2]:
        raise ValueError(
            f"the mask {list(mask.shape)} needs one column for each of the {key.shape[2]} keys {list(key.shape)}: give "
            "it without the prefix, whose columns are added here"
        )
    if mask is not None and mask.dtype == torch.bool:
        # The stock functions' own number, not -inf: a fully padded example attends evenly to its padding.
        mask = key.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(key.dtype).min)
    added = mask if bias is None else bias if mask is None else bias + mask
    visible = None if prefix.visible is None else row_for_each_example(prefix.visible, key.shape[0])
    added = with_prefix_columns(added, prefix.layers[0].shape[-2], key.shape[2], visible)
    if added is not None and added.dtype == torch.bool:  # only slots are hidden; eager adds its mask
        added = key.new_zeros(added.shape).masked_fill(~added, -torch.inf)
    prefix.added = (*prefix.added, (*given, added))[-2:]  # layers with a window and layers without take turns
    return added


def _joined_keys_and_values(prefix: SitePrefix, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the prefix in front. Those of the source are joined once for a whole generation."""
    if prefix.joined is not None and layer in prefix.joined and prefix.joined[layer][0] is key:
        return prefix.joined[layer][1]
    prefix_key, prefix_value = (row_for_each_example(rows, key.shape[0]) for rows in prefix.layers[layer])
    joined = join_prefix(prefix_key, prefix_value, key, value)[:2]
    if prefix.joined is not None:
        prefix.joined[layer] = key, joined
    return joined


def row_for_each_example(rows: Tensor, batch_size: int) -> Tensor:
    """`[rows, ...]` -> `[1 or batch, ...]`: beams and returned sequences lie next to each other."""
    own = rows.shape[0]
    if own == 1 or own == batch_size:
        return rows
    if batch_size % own:
        raise ValueError(
            f"a prefix with {own} rows cannot serve a batch of {batch_size}: it needs one row for all, or one "
            "for each example"
        )
    return rows.repeat_interleave(batch_size // own, dim=0)


def _complete_mask(stock, *args, allow_is_causal_skip=False, **kwargs):
    """The stock mask function, never leaving the causal triangle to the kernel: the kernel would misplace it.

    One query that is the last token has no triangle. Without a mask, kernels read grouped keys as they lie.
    """
    q_length, q_offset = kwargs.get("q_length"), kwargs.get("q_offset", 0)
    is_last = (
        q_length == 1 and type(q_offset) is int and q_offset + 1 == kwargs["kv_length"] + kwargs.get("kv_offset", 0)
    )
    return stock(*args, allow_is_causal_skip=allow_is_causal_skip and is_last, **kwargs)


def _eager(module: nn.Module, *args, **kwargs):
    """The eager attention of the module's own family: soft caps and attention sinks are its own."""
    for cls in type(module).__mro__:
        attention = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if attention is not None:
            return attention(module, *args, **kwargs)
    raise ValueError(f"a {type(module).__name__} has no eager attention: call model.set_attn_implementation('sdpa')")


for _name, _attention, _mask in (("eager", _eager, eager_mask), ("sdpa", sdpa_attention_forward, sdpa_mask)):
    AttentionInterface.register(_ROUTED + _name, partial(_attend, _attention))
    AttentionMaskInterface.register(_ROUTED + _name, partial(_complete_mask, _mask))
