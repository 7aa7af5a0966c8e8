"""Splitting the features of a projection into heads, and putting them back."""

from einops import rearrange
from torch import Tensor

from helpers._checks import check_tensors, check_whole
from helpers._shapes import Shaped


def split_heads(x: Shaped[Tensor, "batch seq model_dim"], num_heads: int) -> Shaped[Tensor, "batch heads seq head_dim"]:
    """Give every head its own slice of the features.

        [batch, seq, heads * head_dim] -> [batch, heads, seq, head_dim]

    Head h holds the features from `h * head_dim` up to `(h + 1) * head_dim` of every token. What is split is the
    projection, never the hidden state. The inverse is `merge_heads`.

    Raises ValueError if `x` does not have three axes, or if its last axis is not a multiple of `num_heads`.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2.
    """
    check_tensors(x=x)
    check_whole(num_heads=num_heads)
    if x.ndim != 3:
        raise ValueError(f"split_heads needs [batch, seq, heads * head_dim], got shape {list(x.shape)}")
    if num_heads < 1 or x.shape[-1] % num_heads:
        raise ValueError(
            f"split_heads cannot cut {x.shape[-1]} features (shape {list(x.shape)}) into {num_heads} equal heads: "
            "choose a num_heads that divides the last axis"
        )
    return rearrange(x, "b s (h d) -> b h s d", h=num_heads)


def merge_heads(x: Shaped[Tensor, "batch heads seq head_dim"]) -> Shaped[Tensor, "batch seq heads*head_dim"]:
    """Put the heads side by side again: `[batch, heads, seq, head_dim]` -> `[batch, seq, heads * head_dim]`.

    The inverse of `split_heads`. Raises ValueError if `x` does not have four axes.
    """
    check_tensors(x=x)
    if x.ndim != 4:
        raise ValueError(f"merge_heads needs [batch, heads, seq, head_dim], got shape {list(x.shape)}")
    return rearrange(x, "b h s d -> b s (h d)")
