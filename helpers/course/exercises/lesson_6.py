"""Checks of lesson 6's exercises."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from helpers.attention import scaled_dot_product_attention
from helpers.course.exercises.checking import Exercise, Mistake, random_tensor
from helpers.masks import causal_mask


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()


check_rms_norm = Exercise(
    right=_rms_norm,
    toys=lambda draw: [
        (random_tensor(draw, batch, seq, model_dim), random_tensor(draw, model_dim), eps)
        for batch, seq, model_dim, eps in [(2, 3, 5, 0.25), (4, 6, 7, 0.5)]
    ],
    mistakes=[
        Mistake(
            lambda x, weight, eps: F.layer_norm(x, weight.shape, weight, eps=eps),
            "this is LayerNorm: RMSNorm subtracts no mean.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).sum(dim=-1, keepdim=True) + eps).sqrt(),
            "the squares were summed; RMSNorm takes their mean.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / x.norm(dim=-1, keepdim=True),
            "each token was divided by its length: take the mean of the squares, not their sum, and add eps.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.var(dim=-1, keepdim=True, correction=0) + eps).sqrt(),
            "this divides by the standard deviation, which subtracts the mean first: RMSNorm subtracts none.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.std(dim=-1, keepdim=True) + eps),
            "this divides by the standard deviation, which subtracts the mean first: RMSNorm subtracts none.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + eps),
            "the root is missing: the hidden states were divided by the mean square.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).mean(dim=-1, keepdim=True).sqrt() + eps),
            "eps was added behind the root; it belongs under it.",
        ),
        Mistake(
            lambda x, weight, eps: _rms_norm(x, weight, 0.0),
            "eps is missing under the root.",
        ),
        Mistake(
            lambda x, weight, eps: _rms_norm(x, torch.ones_like(weight), eps),
            "the weight is missing.",
        ),
        Mistake(
            lambda x, weight, eps: weight + _rms_norm(x, torch.ones_like(weight), eps),
            "the weight was added; it multiplies.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).mean() + eps).sqrt(),
            "one mean was taken over everything: each token has its own, over its features.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).mean(dim=1, keepdim=True) + eps).sqrt(),
            "the mean ran over the tokens: it runs over the features, the last axis.",
        ),
    ],
)


def _cached_bias(table: Tensor, num_cached: int, distance: Callable[[Tensor, int], Tensor]) -> Tensor:
    return rearrange(table[distance(torch.arange(num_cached + 1), num_cached)], "k h -> 1 h 1 k")


check_cached_bias = Exercise(
    right=partial(_cached_bias, distance=lambda keys, cached: cached - keys),
    toys=lambda draw: [(random_tensor(draw, 9, 3), 4), (random_tensor(draw, 12, 5), 6)],
    mistakes=[
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: keys),
            "the row is reversed: the last key is the new token itself, at distance 0.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: torch.zeros_like(keys)),
            "this is the row of a token at position 0: the new token stands behind the cached ones.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: cached + 1 - keys),
            "all distances are one too large: the new token stands at position num_cached, not at num_cached + 1.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: cached - 1 - keys),
            "all distances are one too small, and the last is -1: the new token stands at position num_cached.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: keys - cached),
            "the distances have the wrong sign, so that rows were read from the table's end: num_cached - k.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: -keys),
            "this is the row of a token at position 0: the new token stands behind the cached ones.",
        ),
        Mistake(
            lambda table, num_cached: rearrange(table[num_cached - torch.arange(num_cached)], "k h -> 1 h 1 k"),
            "the new token's own key is missing: there are num_cached + 1 keys.",
        ),
        Mistake(
            lambda table, num_cached: table[num_cached - torch.arange(num_cached + 1)].T,
            "the numbers are right, but two axes are missing: return [1, heads, 1, num_cached + 1].",
        ),
        Mistake(
            lambda table, num_cached: table[num_cached - torch.arange(num_cached + 1)],
            "the heads come before the keys: return [1, heads, 1, num_cached + 1].",
        ),
    ],
)


def _t5_prefix_attention(
    query, key, value, bias, mask, prefix_key, prefix_value, *, scale=1.0, columns=None, visible=True
) -> Tensor:
    """`columns` makes the prefix columns of the bias from the bias; None means zeros."""
    length = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(len(value), -1, -1, -1), value], dim=2)
    new = torch.zeros_like(bias[..., :1]) if columns is None else columns(bias)
    bias = torch.cat([new.expand(-1, -1, -1, length), bias], dim=-1)
    mask = F.pad(mask, (length, 0), value=visible)
    return scaled_dot_product_attention(query, key, value, mask, bias, scale=scale)[0]


def _t5_prefix_behind(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    length = prefix_key.shape[2]
    key = torch.cat([key, prefix_key.expand(len(key), -1, -1, -1)], dim=2)
    value = torch.cat([value, prefix_value.expand(len(value), -1, -1, -1)], dim=2)
    mask, bias = F.pad(mask, (length, 0), value=True), F.pad(bias, (length, 0))
    return scaled_dot_product_attention(query, key, value, mask, bias, scale=1.0)[0]


def _t5_bias_behind_the_softmax(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    toy = query, key, value, torch.zeros_like(bias), mask, prefix_key, prefix_value
    return _t5_prefix_attention(*toy) + bias @ value


def _t5_prefix_with_a_new_triangle(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    length = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(len(value), -1, -1, -1), value], dim=2)
    mask = torch.ones(query.shape[2], key.shape[2]).tril().bool()
    return scaled_dot_product_attention(query, key, value, mask, F.pad(bias, (length, 0)), scale=1.0)[0]


def _t5_prefix_padded_behind(query, key, value, bias, mask, prefix_key, prefix_value, *, both: bool) -> Tensor:
    length = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(len(value), -1, -1, -1), value], dim=2)
    mask = F.pad(mask, (0, length) if both else (length, 0), value=True)
    return scaled_dot_product_attention(query, key, value, mask, F.pad(bias, (0, length)), scale=1.0)[0]


check_t5_prefix_attention = Exercise(
    right=_t5_prefix_attention,
    toys=lambda draw: [
        (
            *(random_tensor(draw, batch, heads, length, head_dim) for length in (queries, keys, keys)),
            random_tensor(draw, 1, heads, queries, keys),
            causal_mask(queries, keys),
            *(random_tensor(draw, 1, heads, prefix, head_dim) for _ in range(2)),
        )
        for batch, heads, queries, keys, prefix, head_dim in [(2, 3, 5, 6, 4, 7), (3, 4, 2, 5, 3, 6)]
    ],
    mistakes=[
        Mistake(
            lambda query, *others: _t5_prefix_attention(query, *others, scale=query.shape[-1] ** -0.5),
            "the scores were divided by the square root of head_dim: T5 does not.",
        ),
        Mistake(
            lambda query, key, value, bias, *others: _t5_prefix_attention(
                query, key, value, torch.zeros_like(bias), *others
            ),
            "the bias was not added to the scores.",
        ),
        Mistake(
            partial(_t5_prefix_padded_behind, both=False),
            "the bias grew at the other end than the keys: its zeros belong in front.",
        ),
        Mistake(
            partial(_t5_prefix_padded_behind, both=True),
            "bias and mask grew at the other end than the keys: the prefix is in front, so are its columns.",
        ),
        Mistake(
            partial(_t5_prefix_attention, columns=lambda bias: bias[..., :1]),
            "the prefix got the bias of the first key: its columns are 0.",
        ),
        Mistake(
            partial(_t5_prefix_attention, columns=lambda bias: torch.ones_like(bias[..., :1])),
            "the prefix's columns of the bias are 1, which favours it: they are 0.",
        ),
        Mistake(
            partial(_t5_prefix_attention, visible=False),
            "this is the output without a prefix: it was not joined, or its columns of the mask are False.",
        ),
        Mistake(
            lambda query, key, value, bias, mask, *prefix: _t5_prefix_attention(
                query, key, value, bias, torch.ones_like(mask), *prefix
            ),
            "the mask was dropped: every query sees every key.",
        ),
        Mistake(
            lambda *toy: _t5_prefix_attention(*toy[:-1], toy[-2]),
            "the prefix's keys serve as its values too: prefix_value is not used.",
        ),
        Mistake(
            lambda *toy: _t5_prefix_attention(*toy[:-2], toy[-1], toy[-2]),
            "prefix_key and prefix_value are exchanged.",
        ),
        Mistake(
            _t5_prefix_behind,
            "the prefix was joined behind, but the new columns of bias and mask are in front.",
        ),
        Mistake(
            _t5_bias_behind_the_softmax,
            "the bias was added to the shares: it is added to the scores, before the softmax.",
        ),
        Mistake(
            _t5_prefix_with_a_new_triangle,
            "a new triangle begins over the prefix: let the given mask grow in front, by columns of True.",
        ),
    ],
)
