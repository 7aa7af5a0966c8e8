"""Lesson 3's layer with a place for each thing that can go wrong in it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from helpers.heads import merge_heads, split_heads

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")


def masked_mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    hide: Callable = lambda scores, mask: scores.masked_fill(~mask, -torch.inf),
    last: Callable = lambda weights, mask: weights.masked_fill(~mask, 0.0),
    scale: float | None = None,
    dim: int = -1,
) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = last(hide(scores, mask).softmax(dim=dim), mask)
    return weights @ value, weights


def forward(
    layer: nn.Module,
    hidden: Tensor,
    context: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    project: str = "qkv",
    split: Callable = split_heads,
    merge: Callable = merge_heads,
    mix: Callable = masked_mix,
    last: Callable = lambda layer, merged: layer.o_proj(merged),
) -> tuple[Tensor, Tensor]:
    context = hidden if context is None else context
    mask = torch.ones((), dtype=torch.bool) if mask is None else mask
    query, key, value = (
        split(getattr(layer, f"{letter}_proj")(states), layer.num_heads)
        for letter, states in zip(project, (hidden, context, context), strict=True)
    )
    mixed, weights = mix(query, key, value, mask)
    return last(layer, merge(mixed)), weights


class FourMatrices(nn.Module):
    def __init__(self, model_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        for name in MATRICES:
            setattr(self, name, nn.Linear(model_dim, model_dim, bias=False))


def class_of(forward: Callable) -> type[nn.Module]:
    """The class of the exercise with another forward; it is what a mistake does, or the right one."""

    def method(self, hidden, context=None, mask=None):
        return forward(self, hidden, context, mask)

    return type("MultiHeadAttention", (FourMatrices,), {"forward": method})


MultiHeadAttention = class_of(forward)


def variant(**changes) -> type[nn.Module]:
    return class_of(partial(forward, **changes))


def hide_nothing(scores: Tensor, mask: Tensor) -> Tensor:
    return scores


def masked_late(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The broken one, which stands in the lesson."""
    return masked_mix(query, key, value, mask, hide=hide_nothing)


def split_with_view_alone(x: Tensor, num_heads: int) -> Tensor:
    return x.reshape(x.shape[0], num_heads, x.shape[1], -1)


def merge_with_reshape_alone(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)
