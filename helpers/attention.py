"""Attention, written to be read, and multi-head attention, written to be used."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers._checks import check_share, check_tensors, check_whole
from helpers._shapes import Bool, Float
from helpers.heads import merge_heads, split_heads
from helpers.prefix import join_prefix


def scaled_dot_product_attention(
    query: Float[Tensor, "batch heads query head_dim"],
    key: Float[Tensor, "batch heads key head_dim"],
    value: Float[Tensor, "batch heads key value_dim"],
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "batch heads query value_dim"], Float[Tensor, "batch heads query key"]]:
    """Every query's weighted mean of the values, and the weights.

        scores  = scale * query @ key^T + bias            [batch, heads, query, key]
        weights = softmax(scores where mask, over keys)   [batch, heads, query, key]
        output  = weights @ value                         [batch, heads, query, value_dim]

    Args:
        query: `[batch, heads, query, head_dim]`.
        key: `[batch, heads, key, head_dim]`.
        value: `[batch, heads, key, value_dim]`.
        mask: bool, True = may attend, broadcastable to the scores.
        bias: added to the scores before the softmax (T5's position bias), broadcastable to them.
        scale: None means 1 / sqrt(head_dim); T5 uses 1.0.
        dropout: probability of dropping a weight; what is left is scaled up. Applied whenever it is above 0.

    Returns `(output, weights)`; the weights are those that multiplied the values, so after dropout.
    A query with nothing to attend to gets zero weights and a zero output, and passes no gradient on.

    Raises TypeError for a mask that is not bool, ValueError for shapes that do not fit.

    Source: Vaswani et al. 2017, section 3.2.1, equation 1. The same as `F.scaled_dot_product_attention`, which
    returns no weights.
    """
    check_share(dropout=dropout)
    _check_attention_inputs(query, key, value, mask, bias)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * query @ key.mT
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # Softmax of a row of -inf is 0 / 0. Such a row is computed on zeros, then cleared, so that neither it nor its
    # gradient is ever NaN.
    nothing_to_see = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(nothing_to_see, 0.0).softmax(dim=-1).masked_fill(nothing_to_see, 0.0)
    weights = F.dropout(weights, dropout)
    return weights @ value, weights


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each on its own slice of the projections.

        query = split(x W_Q)   key = split(context W_K)   value = split(context W_V)
        output = merge(attention(query, key, value)) W_O

    Args:
        model_dim: features of the hidden states, in and out.
        num_heads: attention patterns computed side by side; a hyper-parameter.
        head_dim: features of one head; None means model_dim / num_heads, a habit and not a law.
        context_dim: features of the hidden states that keys and values come from; None means model_dim.
        bias: whether the four projections add a bias vector.
        dropout: probability of dropping an attention weight while training.

    Raises ValueError for sizes below 1, or if head_dim is None and num_heads does not divide model_dim.

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        sizes = {"model_dim": model_dim, "num_heads": num_heads, "head_dim": head_dim, "context_dim": context_dim}
        check_whole(**sizes)
        check_share(dropout=dropout)
        if any(size is not None and size < 1 for size in sizes.values()):
            raise ValueError(
                "MultiHeadAttention needs positive sizes, got "
                + ", ".join(f"{name}={size}" for name, size in sizes.items())
            )
        if head_dim is None and model_dim % num_heads:
            raise ValueError(
                f"model_dim {model_dim} cannot be cut into {num_heads} equal heads: "
                "choose a num_heads that divides it, or give head_dim"
            )
        context_dim = model_dim if context_dim is None else context_dim
        head_dim = model_dim // num_heads if head_dim is None else head_dim
        inner_dim = num_heads * head_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(model_dim, inner_dim, bias=bias)
        self.k_proj = nn.Linear(context_dim, inner_dim, bias=bias)
        self.v_proj = nn.Linear(context_dim, inner_dim, bias=bias)
        self.o_proj = nn.Linear(inner_dim, model_dim, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "batch query model_dim"],
        context: Float[Tensor, "batch key context_dim"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        scale: float | None = None,
        prefix: tuple[Tensor, Tensor] | None = None,
        need_weights: bool = False,
    ):
        """Attend from `x` to `context`, or to `x` itself.

        Args:
            x: `[batch, query, model_dim]`.
            context: `[batch, key, context_dim]`; None means self-attention.
            mask: bool, True = may attend, broadcastable to `[batch, heads, query, key]`; prefix columns are added here.
            bias: added to the scores; prefix columns are added here, with bias 0.
            scale: None means 1 / sqrt(head_dim).
            prefix: `(key, value)`, each `[batch or 1, heads, prefix, head_dim]`, put in front of keys and values.
            need_weights: also return the weights, by the explicit computation instead of torch's fused kernel.

        Returns the output `[batch, query, model_dim]`; with `need_weights`, `(output, weights)` where weights is
        `[batch, heads, query, prefix + key]`.

        Raises ValueError or TypeError for shapes or masks that do not fit.
        """
        context = x if context is None else context
        check_tensors(x=x, context=context)
        for name, states, projection in (("x", x, self.q_proj), ("context", context, self.k_proj)):
            if states.ndim != 3 or states.shape[-1] != projection.in_features:
                raise ValueError(
                    f"MultiHeadAttention needs {name} as [batch, seq, {projection.in_features}], "
                    f"got shape {list(states.shape)}"
                )
            if states.dtype != projection.weight.dtype and not torch.is_autocast_enabled(states.device.type):
                raise TypeError(
                    f"{name} {list(states.shape)} is {states.dtype} and the weights are {projection.weight.dtype}: "
                    f"use `{name}.to({projection.weight.dtype})`"
                )
        if prefix is not None and not (isinstance(prefix, tuple | list) and len(prefix) == 2):
            got = list(prefix.shape) if isinstance(prefix, Tensor) else f"{type(prefix).__name__} of {len(prefix)}"
            raise TypeError(f"the prefix must be a pair (key, value), got {got}")
        query = split_heads(self.q_proj(x), self.num_heads)
        key = split_heads(self.k_proj(context), self.num_heads)
        value = split_heads(self.v_proj(context), self.num_heads)
        if prefix is not None:
            key, value, mask, bias = join_prefix(*prefix, key, value, mask, bias)

        dropout = self.dropout if self.training else 0.0
        if need_weights:
            output, weights = scaled_dot_product_attention(query, key, value, mask, bias, scale=scale, dropout=dropout)
            return self.o_proj(merge_heads(output)), weights

        _check_attention_inputs(query, key, value, mask, bias)
        if bias is not None:
            # torch's kernel takes one mask: a float one is added to the scores.
            mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
            mask = mask.to(query.dtype)
        if mask is not None:
            mask = torch.atleast_2d(mask)  # the kernel asks for [query, key] at least
        output = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
        return self.o_proj(merge_heads(output))


def _check_attention_inputs(query, key, value, mask, bias) -> None:
    """Refuse what would broadcast, or fail five frames down, with one sentence that holds the shapes."""
    check_tensors(query=query, key=key, value=value, mask=mask, bias=bias)
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"attention needs [batch, heads, seq, head_dim] three times, got {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"queries and keys need the same head_dim, got {shapes}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"every key needs one value, got {shapes}")
    if query.shape[:2] != key.shape[:2]:
        raise ValueError(f"queries and keys need the same batch and heads, got {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"queries, keys and values need the same dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    if not query.is_floating_point():
        raise TypeError(f"attention needs float queries, keys and values, got {query.dtype}: use `.float()`")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"the mask must be bool with True = may attend, got {mask.dtype}: use padding_mask or "
            "`mask.bool()` for a 0/1 mask, or pass numbers to be added to the scores as bias"
        )
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"the bias is added to the scores and must be float, got {bias.dtype}: pass a mask as mask")
    scores = (*query.shape[:3], key.shape[2])
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is not None and not _broadcasts_to(tensor.shape, scores):
            raise ValueError(
                f"the {name} {list(tensor.shape)} does not broadcast to the scores "
                f"[batch, heads, query, key] = {list(scores)}"
            )


def _broadcasts_to(shape, target) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )
