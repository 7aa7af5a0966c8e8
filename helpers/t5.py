"""Prefix tuning for any Hugging Face T5, at its three attention sites."""

import hashlib
import json
import os
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.mt5.modeling_mt5 import MT5Stack
from transformers.models.t5.modeling_t5 import T5Stack, eager_attention_forward
from transformers.models.umt5.modeling_umt5 import UMT5Stack

from helpers._shapes import Float
from helpers.masks import causal_mask
from helpers.prefix import PrefixEncoder, join_prefix

SITES = ("encoder", "decoder", "cross")  # encoder self-attention, decoder self-attention, cross-attention
FORMAT_VERSION = 1
CONFIG_NAME = "prefix_config.json"


class T5Prefix(nn.Module):
    """Learned keys and values for the attention sites of a frozen T5.

    At each site and layer, with P prefix keys in front of K content keys,

        scores  = Q [P_k ; K]^T + [0 ; position bias] + [0 ; mask]      [batch, heads, query, P + K], no 1/sqrt(d_kv)
        weights = softmax(scores)
        output  = weights [P_v ; V]

    Positions, position bias and KV cache of the content stay what they were, and the prefix never enters the cache:
    `generate` computes what the forward pass was trained with, whatever cache it uses.

    Use `T5Prefix.for_model(model)`, then `with prefix.attached(model):` around training and generation. Only
    `prefix.parameters()` are trained; the model is not a submodule of the prefix, nor the prefix of the model.

    A subclass may override `key_values(site)`, the only place the prefixes are read from, and return
    `[layers, 2, rows, heads, prefix, d_kv]` with a row for each example of the batch. When the batch is a multiple of
    the rows, as in beam search, each row serves that many neighbours.

    Source: Li & Liang 2021, "Prefix-Tuning", section 4 and figure 2; T5: Raffel et al. 2020, section 2.1.
    """

    def __init__(self, encoders: dict[str, PrefixEncoder], base: dict | None = None):
        """Args: the PrefixEncoder of each site; some weights of the base to recognise it by, taken by `for_model`.

        Raises ValueError for unknown sites.
        """
        super().__init__()
        _check_sites(tuple(encoders))
        self.encoders = nn.ModuleDict({site: encoders[site] for site in SITES if site in encoders})
        self.base = base or {}

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        *,
        prefix_length: int = 20,
        sites: tuple[str, ...] = SITES,
        mid_dim: int | None = None,
        dropout: float = 0.0,
    ) -> "T5Prefix":
        """A new prefix with the shapes that `model` needs, on the model's device, in float32.

        Args:
            model: a T5, MT5 or UMT5 of transformers, with or without a head.
            prefix_length: slots at each site; 0 changes nothing.
            sites: any of "encoder", "decoder" (self-attention) and "cross" (the decoder's attention to the encoder).
            mid_dim: width of the reparameterising MLP, or None for none.
            dropout: probability of dropping a number of the prefix while the prefix is in training mode. The model's
                `eval()` does not reach the prefix: call `prefix.eval()` before generating with it.

        Raises TypeError for another kind of model; ValueError for unknown sites, or sites that the model lacks.
        """
        stacks = _stacks(model)
        _check_sites(sites)
        _check_model_has(sites, stacks, model)
        encoders = {}
        for site in sites:
            config = stacks[site].config
            encoders[site] = PrefixEncoder(
                prefix_length,
                len(stacks[site].block),
                config.num_heads,
                config.d_kv,
                mid_dim=mid_dim,
                dropout=dropout,
            )
        return cls(encoders, _fingerprint(stacks)).to(next(model.parameters()).device, torch.float32)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that have a prefix."""
        return tuple(self.encoders)

    def key_values(self, site: str) -> Float[Tensor, "layers 2 rows heads prefix d_kv"]:
        """The prefix of one site: `[layers, 2, 1, heads, prefix, d_kv]`, entry 0 of axis 1 the keys, 1 the values.

        Raises ValueError for a site without a prefix.
        """
        if site not in self.encoders:
            raise ValueError(f"this prefix has no site {site!r}, only {', '.join(self.encoders)}")
        return self.encoders[site]()

    def attach(self, model: PreTrainedModel) -> Callable[[], None]:
        """Make `model` use this prefix until the returned function is called.

        The model's parameters and classes stay as they are: its stacks get one forward pre-hook each, and its
        attention runs through transformers' attention interface. A deep copy of an attached model carries a copy of
        the prefix (`detach_prefix` takes it off).

        Raises TypeError for another kind of model; ValueError if the model has another shape than the prefix, lacks
        one of its sites, carries a prefix already, or uses an attention implementation other than "sdpa" and "eager".
        Warns if the prefix was made for other weights of the same shape.
        """
        stacks = _stacks(model)
        _check_model_has(self.sites, stacks, model)
        for site, encoder in self.encoders.items():
            config = stacks[site].config
            wanted = (len(stacks[site].block), config.num_heads, config.d_kv)
            got = (encoder.num_layers, encoder.num_heads, encoder.head_dim)
            if got != wanted:
                raise ValueError(
                    f"the prefix at site {site!r} is for (layers, heads, d_kv) = {got}, but the model has {wanted}: "
                    "make one with T5Prefix.for_model(model)"
                )
        if any(_hooks(stack) for stack in stacks.values()):
            raise ValueError("the model carries a prefix already: detach it first")
        own_stacks = {id(stacks[site]): stacks[site] for site in self.sites}.values()  # two sites share the decoder
        routes = [_routed(stack) for stack in own_stacks]  # all checked before any stack is touched
        if not _same_weights(self.base, _fingerprint(stacks)):
            warnings.warn(
                "this prefix was made for a model of the same shape with other weights: its effect on this one is "
                "undefined",
                stacklevel=2,
            )
        hand_over = _HandOver(self)
        for stack, route in zip(own_stacks, routes, strict=True):
            stack.set_attn_implementation(route)
            stack.register_forward_pre_hook(hand_over, with_kwargs=True)

        def detach() -> None:
            # A late call must not take off a prefix that was attached since.
            if any(hook is hand_over for stack in own_stacks for hook in _hooks(stack).values()):
                detach_prefix(model)

        return detach

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """`with prefix.attached(model): ...`: attach, and detach at the end whatever happens."""
        detach = self.attach(model)
        try:
            yield model
        finally:
            detach()

    def fold(self) -> "T5Prefix":
        """A new T5Prefix that holds the same keys and values without the MLP: what is needed for using it.

        Raises ValueError if a subclass supplies a row for each example: fold its parts instead.
        """
        encoders, training = {}, self.training
        self.eval()  # without dropout
        try:
            for site in self.sites:
                key_values = self.key_values(site)
                if key_values.shape[2] != 1:
                    raise ValueError(
                        f"the prefix of site {site!r} has {key_values.shape[2]} rows; fold one prefix at a time"
                    )
                encoders[site] = PrefixEncoder.from_key_values(key_values, dropout=self.encoders[site].dropout.p)
        finally:
            self.train(training)
        return T5Prefix(encoders, self.base).train(training)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write the prefix, its MLP included, to `folder` as safetensors and json.

        The weights lie in a file named after their content, and the json names that file and is replaced last, so
        that an interrupted save leaves the previous prefix whole. Nothing else in `folder` is touched.

        Raises ValueError, and writes nothing, if `folder` holds a saved prefix that this version cannot read.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = save({name: tensor.contiguous() for name, tensor in self.state_dict().items()})
        name = f"prefix-{hashlib.sha256(weights).hexdigest()[:16]}.safetensors"
        config = {
            "format_version": FORMAT_VERSION,
            "class": type(self).__name__,
            "weights": name,
            "base": self.base,
            "sites": {
                site: {
                    "prefix_length": encoder.prefix_length,
                    "num_layers": encoder.num_layers,
                    "num_heads": encoder.num_heads,
                    "head_dim": encoder.head_dim,
                    "mid_dim": encoder.mid_dim,
                    "dropout": encoder.dropout.p,
                }
                for site, encoder in self.encoders.items()
            },
        }
        previous = _read_config(folder)["weights"] if (folder / CONFIG_NAME).is_file() else name
        _replace(folder / name, weights)
        _replace(folder / CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())
        if previous != name:
            (folder / previous).unlink(missing_ok=True)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike) -> "T5Prefix":
        """Read what `save_pretrained` wrote: the same numbers, bit for bit, on the CPU, in evaluation mode.

        Raises FileNotFoundError if there is no saved prefix in `folder`, ValueError if its files cannot be read or do
        not belong together.
        """
        folder = Path(folder)
        if not (folder / CONFIG_NAME).is_file():
            raise FileNotFoundError(f"{folder} holds no saved prefix: {CONFIG_NAME} is missing")
        config = _read_config(folder)
        if config["class"] != cls.__name__:
            raise ValueError(f"the prefix in {folder} was saved by {config['class']}: load it with that class")
        try:
            with torch.device("meta"):  # draws no random numbers
                encoders = {site: PrefixEncoder(**sizes) for site, sizes in config["sites"].items()}
            prefix = cls(encoders, config["base"])
            # Assigned, they keep their dtype; cloned, they lie in memory as torch's own do, without which matrix
            # products differ in the last bit.
            tensors = {name: tensor.clone() for name, tensor in load_file(folder / config["weights"]).items()}
            prefix.load_state_dict(tensors, assign=True)
        except Exception as error:
            raise ValueError(f"the prefix saved in {folder} cannot be read: {error}") from error
        return prefix.eval()


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that at every moment either the old content is there, or the new."""
    unfinished = path.with_name(f".unfinished-{uuid.uuid4().hex}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read_config(folder: Path) -> dict:
    """The json of a saved prefix. Raises ValueError, with what is wrong, unless this version can read it."""

    def refuse(reason):
        raise ValueError(f"the prefix saved in {folder} cannot be read: {reason}")

    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except ValueError as error:
        refuse(f"{CONFIG_NAME} is not json ({error})")
    expected = {"format_version": int, "class": str, "weights": str, "base": dict, "sites": dict}
    for key, kind in expected.items():
        if not isinstance(config, dict) or not isinstance(config.get(key), kind):
            refuse(f"{CONFIG_NAME} needs a {key!r} of type {kind.__name__}")
    if config["format_version"] > FORMAT_VERSION:
        refuse(f"its format_version {config['format_version']} is newer than {FORMAT_VERSION}: update helpers")
    if Path(config["weights"]).name != config["weights"]:
        refuse(f"its weights {config['weights']!r} must lie in the same folder")
    return config


def detach_prefix(model: nn.Module) -> None:
    """Take the prefix off `model`, whoever attached it; afterwards the model is as it was before."""
    for stack in _stacks(model).values():
        for key in _hooks(stack):
            del stack._forward_pre_hooks[key]
            stack._forward_pre_hooks_with_kwargs.pop(key)
        implementation = stack.config._attn_implementation
        if implementation.startswith(_ROUTED):
            stack.set_attn_implementation(implementation.removeprefix(_ROUTED))


# --- how the prefix reaches the attention ---------------------------------------------------------------------------
# transformers lets anyone register an attention function, with a mask function that belongs to it; a config selects
# one by name. For "sdpa" and "eager" there is a routed twin that joins the prefix and calls the stock function. A
# pre-hook on each stack hands the prefix over as a keyword argument, which T5 passes down to its attention.

_ROUTED = "prefixed_"


class _HandOver:
    """The forward pre-hook of an attached model's stacks: hands them the prefixes of their sites."""

    def __init__(self, prefix: T5Prefix):
        self.prefix = prefix
        self.remembered = None  # KV cache (weakly), parameter versions, key_values by site

    def __getstate__(self) -> dict:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def __call__(self, stack: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not stack.config._attn_implementation.startswith(_ROUTED):  # somebody changed it since
            stack.set_attn_implementation(_routed(stack))
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        return args, {**kwargs, "prefix_key_values": self.for_stack(stack, cache)}

    def for_stack(self, stack: nn.Module, cache) -> dict[str, tuple[Tensor, ...]]:
        """`{site: ([2, rows, heads, prefix, d_kv] of layer 0, of layer 1, ...)}`.

        While a KV cache grows, the prefix is that of its first step: one evaluation a `generate`, not one a token.
        """
        if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.evaluate(stack)
        versions = [(id(p), None if p.is_inference() else p._version) for p in self.prefix.parameters()]
        if self.remembered is not None and int(cache.get_seq_length()) > 0:
            known_cache, known_versions, key_values = self.remembered
            if known_cache() is cache and known_versions == versions:
                return key_values
        key_values = self.evaluate(stack)
        self.remembered = (weakref.ref(cache), versions, key_values)
        return key_values

    def evaluate(self, stack: nn.Module) -> dict[str, tuple[Tensor, ...]]:
        sites = ("decoder", "cross") if stack.config.is_decoder else ("encoder",)
        return {site: self.prefix.key_values(site).unbind(0) for site in sites if site in self.prefix.sites}


def _hooks(stack: nn.Module) -> dict[int, _HandOver]:
    # Looked for in the module, not remembered as torch's handles: a deep copy has hooks that no handle knows.
    return {key: hook for key, hook in stack._forward_pre_hooks.items() if isinstance(hook, _HandOver)}


def _routed(stack: PreTrainedModel) -> str:
    """The name of the routed twin of the stack's attention implementation; ValueError if there is none."""
    implementation = stack.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"a prefix needs the attention implementation 'eager' or 'sdpa', not {implementation!r}: "
            "call model.set_attn_implementation('sdpa')"
        )
    return _ROUTED + implementation


def _attend(stock, module, query, key, value, attention_mask, *, prefix_key_values=None, position_bias=None, **kwargs):
    """The stock attention function, on keys, values, mask and bias that are longer by the prefix."""
    site = "encoder" if not module.is_decoder else "decoder" if module.is_causal else "cross"
    if prefix_key_values is None or site not in prefix_key_values:
        return stock(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)
    prefix_key, prefix_value = (
        _row_for_each_example(rows, len(key)) for rows in prefix_key_values[site][module.layer_idx]
    )
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]  # a static cache's mask can be longer than its keys
    elif module.is_causal:  # a direct call of the module; sdpa would keep only as many keys as there are queries
        visible = causal_mask(query.shape[2], key.shape[2], device=key.device)
        attention_mask = key.new_zeros(1, 1, *visible.shape).masked_fill(~visible, -torch.inf)
    key, value, attention_mask, position_bias = join_prefix(
        prefix_key, prefix_value, key, value, attention_mask, position_bias
    )
    return stock(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)


def _row_for_each_example(rows: Tensor, batch_size: int) -> Tensor:
    """`[rows, heads, prefix, d_kv]` -> `[1 or batch, ...]`: beams and returned sequences lie next to each other."""
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


# --- the base model -------------------------------------------------------------------------------------------------


def _stacks(model: nn.Module) -> dict[str, PreTrainedModel]:
    """`{site: stack}`; "decoder" and "cross" share one.

    Raises TypeError where the mechanism does not reach, ValueError for a module that holds several T5s.
    """
    stacks = [module for module in model.modules() if isinstance(module, T5Stack | MT5Stack | UMT5Stack)]
    if not stacks:
        raise TypeError(f"T5Prefix works on a T5, MT5 or UMT5 of transformers, not on a {type(model).__name__}")
    by_site = {}
    for stack in stacks:
        for site in ("decoder", "cross") if stack.config.is_decoder else ("encoder",):
            if site in by_site:
                raise ValueError(f"the {type(model).__name__} holds more than one T5: give one of them")
            by_site[site] = stack
    return by_site


def _check_sites(sites) -> None:
    if isinstance(sites, str) or not sites or not set(sites) <= set(SITES):
        raise ValueError(f"sites must be some of {SITES}, as a tuple, got {sites!r}")


def _check_model_has(sites, stacks: dict, model: nn.Module) -> None:
    missing = [site for site in sites if site not in stacks]
    if missing:
        raise ValueError(
            f"a {type(model).__name__} has no {' and no '.join(missing)} attention: choose sites={tuple(stacks)}"
        )


def _fingerprint(stacks: dict[str, PreTrainedModel]) -> dict[str, list[float]]:
    """32 weights of each stack, spread over its tensors, to recognise the base by; none if some are not in memory."""
    samples = {}
    for name in ("encoder", "decoder"):
        if name in stacks:
            parameters = list(stacks[name].block.parameters())
            chosen = [parameters[i * len(parameters) // 32].detach().flatten() for i in range(32)]
            if not any(parameter.is_meta for parameter in chosen):
                samples[name] = [round(parameter[len(parameter) // 3].item(), 6) for parameter in chosen]
    return samples


def _same_weights(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> bool:
    """Whether the stacks known to both agree, up to the rounding of float16 and bfloat16."""
    return all(
        torch.allclose(torch.tensor(ours[site]), torch.tensor(theirs[site]), rtol=2**-8, atol=2e-6)
        for site in ours.keys() & theirs.keys()
    )
