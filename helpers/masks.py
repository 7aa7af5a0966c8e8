"""Boolean attention masks. One convention everywhere: True = may attend."""

import torch
from einops import rearrange
from torch import Tensor

from helpers._checks import check_tensors, check_whole
from helpers._shapes import Bool, Shaped


def causal_mask(
    query_length: int,
    key_length: int | None = None,
    *,
    prefix_length: int = 0,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "query keys"]:
    """No query sees the keys that come after it: bool `[query_length, prefix_length + key_length]`.

    The triangle is aligned at its bottom-right corner: the last query is the last key, so query i sees the keys up to
    `i + key_length - query_length`. This is what a KV cache needs, where few queries meet many keys. If there are
    more queries than keys, the first ones see no key at all. The prefix lies in front and is visible to every query.

    Args:
        query_length: number of queries.
        key_length: number of keys without the prefix; None means as many as queries.
        prefix_length: number of prefix columns in front of the keys.
        device: where the mask is made.

    Raises ValueError if a length is negative.
    """
    check_whole(query_length=query_length, key_length=key_length, prefix_length=prefix_length)
    key_length = query_length if key_length is None else key_length
    if min(query_length, key_length, prefix_length) < 0:
        raise ValueError(
            "causal_mask needs lengths of at least 0, got "
            f"query_length={query_length}, key_length={key_length}, prefix_length={prefix_length}"
        )
    everything = torch.ones(query_length, prefix_length + key_length, dtype=torch.bool, device=device)
    visible = everything.tril(prefix_length + key_length - query_length)
    visible[:, :prefix_length] = True
    return visible


def padding_mask(
    attention_mask: Shaped[Tensor, "batch key"], *, prefix_length: int = 0
) -> Bool[Tensor, "batch 1 1 keys"]:
    """A tokenizer's 0/1 mask as bool `[batch, 1, 1, prefix_length + key]`, ready to broadcast over heads and queries.

    Padding hides keys (columns), never queries (rows). The prefix columns are always visible.

    Args:
        attention_mask: `[batch, key]`, 1 for a token and 0 for padding; integers, floats or bools.
        prefix_length: number of prefix columns in front of the keys.

    Raises ValueError for another rank, a negative prefix_length, or values other than 0 and 1. The values are looked at
    only in eager mode on a CPU: a GPU would have to be waited for, and a graph that is being traced has none.
    """
    check_tensors(attention_mask=attention_mask)
    check_whole(prefix_length=prefix_length)
    if attention_mask.ndim != 2:
        raise ValueError(f"padding_mask needs a mask [batch, key], got shape {list(attention_mask.shape)}")
    if prefix_length < 0:
        raise ValueError(f"padding_mask needs a prefix_length of at least 0, got {prefix_length}")
    visible = attention_mask.bool()
    at_hand = type(attention_mask) is Tensor and attention_mask.is_cpu and not torch.compiler.is_compiling()
    if at_hand and not torch.equal(visible.to(attention_mask.dtype), attention_mask):
        raise ValueError(
            f"padding_mask needs 1 for a token and 0 for padding, but the mask {list(attention_mask.shape)} "
            "holds other values: an additive mask (0 and -inf) has to be turned into `mask == 0` first"
        )
    prefix = visible.new_ones(visible.shape[0], prefix_length)
    return rearrange(torch.cat([prefix, visible], dim=1), "b k -> b 1 1 k")
