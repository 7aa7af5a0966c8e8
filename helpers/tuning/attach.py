"""A prefix for any supported transformers model, at each of its attention sites."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from helpers._checks import warn_caller
from helpers._shapes import Bool, Float, Shaped
from helpers.prefix import PrefixEncoder
from helpers.tuning.families import SITES, Site, is_t5, sites_of
from helpers.tuning.routing import Detach, attach_for_all, attached_here
from helpers.tuning.routing import detach_prefix as detach_prefix
from helpers.tuning.sharded import is_sharded
from helpers.tuning.store import Stored, fingerprint, hub_name, same_weights


class _Attachable(nn.Module, ABC):
    """What can be attached to a model: keys and values for some of its sites."""

    @property
    @abstractmethod
    def sites(self) -> tuple[str, ...]:
        """The sites that have a prefix."""

    @abstractmethod
    def key_values(self, site: str) -> Float[Tensor, "layers 2 rows heads prefix head_dim"]:
        """`[layers, 2, rows, heads, prefix, head_dim]`: one row for all examples of a batch, or one for each."""

    def visible(self, site: str) -> Bool[Tensor, "rows prefix"] | None:
        """Which of `key_values`' slots each row has (True), or None for all."""
        return None

    def position_bias(
        self, stack: PreTrainedModel, queries: int, past: int | Tensor
    ) -> Float[Tensor, "layers rows heads queries prefix"] | None:
        """What is added to the scores of the slots in decoder self-attention; None for 0.

        `[layers, rows, heads, queries, prefix]`, for `queries` tokens of which the first is at position `past`.
        """
        return None

    def position_shift(self) -> int | Shaped[Tensor, "rows 1"]:
        """By how much the positions of a decoder's tokens grow: 0, or a number for each row."""
        return 0

    @abstractmethod
    def check_fits(self, model: PreTrainedModel) -> None:
        """Raise ValueError if `model` has another shape or lacks a site; warn if it has other weights."""

    def attach(self, model: PreTrainedModel) -> Detach:
        """Make `model` use this prefix, in all threads, until the returned function is called.

        What is returned can also be used as `with prefix.attach(model):`, and detaches at the end of the block.

        The model's parameters and classes stay as they are: its stacks get one forward pre-hook each, and its
        attention runs through transformers' attention interface. A deep copy of an attached model carries a copy of
        the prefix (`detach_prefix` takes it off).

        The prefix's parameters are not the model's: an engine that trains a model's parameters, such as transformers'
        Trainer, would train nothing, without an error. Give it a `ModelWithPrefix`.

        Attach before threads begin to compute: what they are in the middle of goes on with the new prefix. For a prefix
        of its own in each thread, see `attached`.

        Raises TypeError for another kind of model; ValueError if the model has another shape than the prefix, lacks
        one of its sites, carries a prefix already, or uses an attention implementation other than "sdpa" and "eager".
        Warns if the prefix was made for other weights of the same shape.
        """
        self.check_fits(model)
        return attach_for_all(self, model)

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """`with prefix.attached(model): ...`: attach, and detach at the end whatever happens.

        It holds for the thread or asyncio task that enters it. The threads and tasks of a server share one model, each
        with a prefix of its own, and those that enter none compute with the bare model:

            def answer(request):  # in any thread
                with prefixes[request.task].attached(model):
                    return model.generate(**request.inputs)

        A task inherits what is attached where it is made. A thread that is started inside the block inherits nothing,
        and warns: enter `attached` in the function that it runs, or use `attach` around both. A compiled model sees
        what its thread has entered, and cannot tell the tasks of one thread apart.

        Raises and warns as `attach` does.
        """
        self.check_fits(model)
        with attached_here(self, model):
            yield model


class Prefix(_Attachable, Stored):
    """Learned keys and values for the attention sites of a frozen model.

    At each site and layer, with P prefix keys in front of K content keys, s being what the model scales by,

        scores  = s Q [P_k ; K]^T + [0 ; mask]                          [batch, heads, query, P + K]
        weights = softmax(scores)
        output  = weights [P_v ; V]

    and as the model has them: in T5, s = 1 and the content's scores get their position bias, the slots' none; where
    positions rotate, queries and content keys are rotated and the prefix's keys are not; where keys and values are
    grouped, the prefix has as many heads as they; a window counts tokens, and slots are always in it.

    Positions and KV cache of the content stay what they were, and the prefix never enters the cache: `generate`
    computes what the forward pass was trained with, whatever cache it uses.

    Use `Prefix.for_model(model)`, then `with prefix.attached(model):` around training and generation. Only
    `prefix.parameters()` are trained; the model is not a submodule of the prefix, nor the prefix of the model.

    A subclass may override `key_values(site)`, the only place the prefixes are read from, and return
    `[layers, 2, rows, heads, prefix, head_dim]` with a row for each example of the batch. When the batch is a multiple
    of the rows, as in beam search, each row serves that many neighbours.

    Source: Li & Liang 2021, "Prefix-Tuning", section 4 and figure 2; T5: Raffel et al. 2020, section 2.1; grouped keys:
    Ainslie et al. 2023, "GQA"; positions that rotate: Su et al. 2021, "RoFormer".
    """

    def __init__(self, encoders: dict[str, PrefixEncoder], base: dict | None = None):
        """Args: the PrefixEncoder of each site; what the base is known by, some weights and its name on the hub, taken
        by `for_model`.

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
        sites: tuple[str, ...] | None = None,
        mid_dim: int | None = None,
        dropout: float = 0.0,
        init_std: float | None = None,
    ) -> "Prefix":
        """A new prefix with the shapes that `model` needs, on the model's device, in float32.

        Args:
            model: one of the models in `helpers.tuning.families`, T5, BERT, GPT-2, Llama, BART and others, with or
                without a head.
            prefix_length: slots at each site; 0 changes nothing.
            sites: any of "encoder", "decoder" (self-attention) and "cross" (the decoder's attention to the encoder);
                None for all that the model has.
            mid_dim: width of the reparameterising MLP, or None for none.
            dropout: probability of dropping a number of the prefix while the prefix is in training mode. The model's
                `eval()` does not reach the prefix: call `prefix.eval()` before generating with it.
            init_std: standard deviation of the first keys and values, without an MLP; None for 0.02. See PrefixEncoder.

        Raises TypeError for another kind of model; ValueError for unknown sites, or sites that the model lacks.
        """
        own = sites_of(model)
        sites = tuple(own) if sites is None else sites
        _check_sites(sites)
        _check_model_has(sites, own, model)
        encoders = {}
        for site in sites:
            encoders[site] = PrefixEncoder(
                prefix_length, *own[site].shape, mid_dim=mid_dim, dropout=dropout, init_std=init_std
            )
        base = fingerprint(own) | hub_name(model)
        if not is_t5(model.config.model_type):  # what a file does not say is T5, the only kind there once was
            base["model_type"] = model.config.model_type
        return cls(encoders, base).to(_device(model), torch.float32)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that have a prefix."""
        return tuple(self.encoders)

    def key_values(self, site: str) -> Float[Tensor, "layers 2 rows heads prefix head_dim"]:
        """The prefix of one site: `[layers, 2, 1, heads, prefix, head_dim]`, entry 0 of axis 1 the keys, 1 the values.

        Raises ValueError for a site without a prefix, or if the prefix is sharded (FSDP2) and not gathered.
        """
        if site not in self.encoders:
            raise ValueError(f"this prefix has no site {site!r}, only {', '.join(self.encoders)}")
        if is_sharded(self.encoders[site].embedding):
            raise ValueError(
                "the prefix is sharded and nothing has gathered it: apply fully_shard to the ModelWithPrefix, which "
                "gathers it in forward and generate; to fold it, save it, load it and fold that"
            )
        return self.encoders[site]()

    def check_fits(self, model: PreTrainedModel) -> None:
        """Raise ValueError if `model` has another shape or lacks a site; warn if it has other weights."""
        own = sites_of(model)
        _check_model_has(self.sites, own, model)
        for site, encoder in self.encoders.items():
            if encoder.shape != own[site].shape:
                raise ValueError(
                    f"the prefix at site {site!r} is for (layers, heads, head_dim) = {encoder.shape}, "
                    f"but the model has {own[site].shape}: "
                    "make one with Prefix.for_model(model)"
                )
        if not same_weights(self.base, fingerprint(own)):
            warn_caller(
                "this prefix was made for a model of the same shape with other weights: its effect on this one is "
                "undefined"
            )

    def fold(self) -> "Prefix":
        """A new Prefix that holds the same keys and values without the MLP: what is needed for using it.

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
        return Prefix(encoders, self.base).train(training)


T5Prefix = Prefix
"""The name that the lessons use, in which a prefix is a T5's."""


class PrefixPerRow(_Attachable):
    """One prefix for each row of a batch: one frozen model, many tasks at once.

        with PrefixPerRow([german, italian, None]).attached(model):
            model.generate(**batch_of_three)

    A row computes what its prefix computes alone. The prefixes may differ in length and in their sites: slots that a
    row does not have are masked. None stands for the model without a prefix. Each distinct prefix is evaluated once,
    however many rows it serves. When the batch is a multiple of the rows, as in beam search, each row serves that many
    neighbours.

    The prefixes are submodules, so that one can train several tasks in one batch; save and fold each by itself.
    """

    def __init__(self, rows: Sequence[Prefix | None]):
        """Args: the prefix of each row, in the batch's order.

        Raises TypeError if a row is neither a Prefix nor None, ValueError if all are None, if two were made for
        models of different shape, or if one has several rows itself.
        """
        super().__init__()
        if not isinstance(rows, Sequence):
            raise TypeError(f"rows must be a sequence of prefixes, got a {type(rows).__name__}")
        for row in rows:
            if row is not None and not isinstance(row, Prefix):
                raise TypeError(f"each row needs a Prefix or None, got a {type(row).__name__}")
        distinct = list(dict.fromkeys(row for row in rows if row is not None))
        if not distinct:
            raise ValueError(f"at least one of the {len(rows)} rows needs a prefix")
        for site in SITES:
            shapes = {prefix.encoders[site].shape for prefix in distinct if site in prefix.sites}
            if len(shapes) > 1:
                raise ValueError(
                    f"the prefixes at site {site!r} are for models of different (layers, heads, head_dim): "
                    f"{sorted(shapes)}"
                )
        self.prefixes = nn.ModuleList(distinct)
        self.rows = [None if row is None else distinct.index(row) for row in rows]

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites at which any row has a prefix."""
        return tuple(site for site in SITES if any(site in prefix.sites for prefix in self.prefixes))

    def check_fits(self, model: PreTrainedModel) -> None:
        """Raise ValueError if `model` has another shape or lacks a site; warn if it has other weights."""
        for prefix in self.prefixes:
            prefix.check_fits(model)

    def key_values(self, site: str) -> Float[Tensor, "layers 2 rows heads prefix head_dim"]:
        """`[layers, 2, rows, heads, prefix, head_dim]`, shorter prefixes padded with zeros behind their slots."""
        own = [prefix.key_values(site) if site in prefix.sites else None for prefix in self.prefixes]
        known = [key_values for key_values in own if key_values is not None]
        if any(key_values.shape[2] != 1 for key_values in known):
            raise ValueError(f"a prefix of a row must itself have one row, got {[k.shape[2] for k in known]}")
        longest = max(key_values.shape[4] for key_values in known)
        empty = known[0].new_zeros(*known[0].shape[:4], longest, known[0].shape[5])
        padded = [empty if k is None else F.pad(k, (0, 0, 0, longest - k.shape[4])) for k in own]
        return torch.cat([empty if index is None else padded[index] for index in self.rows], dim=2)

    def position_bias(
        self, stack: PreTrainedModel, queries: int, past: int | Tensor
    ) -> Float[Tensor, "layers rows heads queries prefix"] | None:
        """`[layers, rows, heads, queries, prefix]`, zero for rows without, None if all are."""
        own = [prefix.position_bias(stack, queries, past) for prefix in self.prefixes]
        known = [bias for bias in own if bias is not None]
        if not known:
            return None
        longest = max(prefix.encoders["decoder"].prefix_length for prefix in self.prefixes if "decoder" in prefix.sites)
        none = known[0].new_zeros(*known[0].shape[:-1], longest)
        padded = [none if bias is None else F.pad(bias, (0, longest - bias.shape[-1])) for bias in own]
        return torch.cat([none if index is None else padded[index] for index in self.rows], dim=1)

    def position_shift(self) -> int | Shaped[Tensor, "rows 1"]:
        """`[rows, 1]`, or 0 if no row's tokens move."""
        own = [prefix.position_shift() for prefix in self.prefixes]
        if not any(own):
            return 0
        return torch.tensor([[0 if index is None else own[index]] for index in self.rows], device=_device(self))

    def visible(self, site: str) -> Bool[Tensor, "rows prefix"] | None:
        """Which slots each row has; None if all have the same number."""
        own = [prefix.encoders[site].prefix_length if site in prefix.sites else 0 for prefix in self.prefixes]
        lengths = [0 if index is None else own[index] for index in self.rows]
        if len(set(lengths)) == 1:
            return None
        device = next(self.parameters()).device
        return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]


def _check_sites(sites) -> None:
    if isinstance(sites, str) or not sites or not set(sites) <= set(SITES):
        raise ValueError(f"sites must be some of {SITES}, as a tuple, got {sites!r}")


def _check_model_has(sites, own: dict[str, Site], model: nn.Module) -> None:
    missing = [site for site in sites if site not in own]
    if missing:
        raise ValueError(
            f"a {type(model).__name__} has no {' and no '.join(missing)} attention: choose sites={tuple(own)}"
        )


def _device(model: nn.Module) -> torch.device:
    """Where the model's first weight in memory lies: offloaded ones are on no device."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
