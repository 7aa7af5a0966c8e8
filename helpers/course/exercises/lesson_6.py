"""Checks of lesson 6's exercises."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.attention import scaled_dot_product_attention
from helpers.course.exercises.checking import Exercise, Mistake, Prediction, random_tensor
from helpers.masks import causal_mask

check_key_lengths = Prediction(
    right=[18, 10, 18],
    because="three slots and the tokens that are read: the source's 15, the target's 7, and the source's again.",
    mistakes=[
        ([15, 10, 15], "so it is where the prefix comes as a cache, in the decoder alone; here all sites have slots."),
        ([18, 10, 10], "cross-attention's queries are the target's; its keys come from the source."),
        ([15, 7, 15], "these are the keys of tokens; each site has three slots besides."),
        ([18, 10, 21], "the source's slots are keys of the encoder's attention and make no row of its output."),
        ([18, 10, 25], "cross-attention reads the source alone, not the target."),
    ],
)


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
            lambda x, weight, eps: weight * x / (x.pow(2).mean(dim=-1) + eps).sqrt(),
            "the mean has lost its axis and does not fit: keep it with keepdim=True.",
        ),
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


def _t5_masked_with_zero(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    length = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(len(value), -1, -1, -1), value], dim=2)
    scores = query @ key.mT + F.pad(bias, (length, 0))
    return scores.masked_fill(~F.pad(mask, (length, 0), value=True), 0.0).softmax(dim=-1) @ value


def _t5_all_divided(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    root = query.shape[-1] ** 0.5
    return _t5_prefix_attention(query / root, key, value, bias / root, mask, prefix_key, prefix_value)


def _t5_not_expanded(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    return torch.cat([prefix_key, key], dim=2)


def _t5_last_columns(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    length = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(len(value), -1, -1, -1), value], dim=2)
    bias = torch.cat([bias[..., -length:], bias], dim=-1)
    mask = F.pad(mask, (length, 0), value=True)
    return scaled_dot_product_attention(query, key, value, mask, bias, scale=1.0)[0]


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
            lambda query, key, value, bias, mask, *prefix: _t5_prefix_attention(
                query, key, value, bias, ~mask, *prefix
            ),
            "the mask was turned round: hidden keys are heard and the others not. Fill where it is False, ~mask.",
        ),
        Mistake(_t5_all_divided, "scores and bias were divided by the square root of head_dim: T5 divides neither."),
        Mistake(
            _t5_masked_with_zero,
            "masked scores became 0, and exp(0) is 1, so that hidden keys are heard: fill with minus infinity.",
        ),
        Mistake(
            _t5_last_columns,
            "the slots got the bias of the last keys: a prefix has no position, and its columns are 0.",
        ),
        Mistake(
            _t5_not_expanded,
            "the prefix has batch 1 and the keys have more: expand it, prefix_key.expand(len(key), -1, -1, -1).",
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


# The bias of a prefix

check_blind = Prediction(
    right=["passes", "passes", "fails"],
    because="the test divides by the sum of the tokens' columns: what happens in the prefix's columns it cannot see.",
    mistakes=[
        (["pass", "pass", "fail"], "right; write it as passes or fails."),
        (["fails", "fails", "fails"], "what is divided by what? The prefix's own columns are cut off before."),
        (["passes", "fails", "fails"], "+5 makes the prefix louder for all, and the tokens' proportions stay."),
        (
            ["fails", "passes", "fails"],
            "positions of their own move the slots' columns alone, and the tokens' proportions stay.",
        ),
        (
            ["passes", "passes", "passes"],
            "queries moved by three change the distances among tokens, and so their proportions.",
        ),
        (["fails", "fails", "passes"], "exactly reversed: which of the three changes scores among the tokens?"),
    ],
)


def _longer_bias(bias: Tensor, prefix_length: int) -> Tensor:
    return F.pad(bias, (prefix_length, 0))


check_longer_bias = Exercise(
    right=_longer_bias,
    toys=lambda draw: [(random_tensor(draw, 1, 3, 5, 6), 2), (random_tensor(draw, 1, 4, 2, 7), 3)],
    compared="Your bias",
    mistakes=[
        Mistake(
            lambda bias, prefix_length: F.pad(bias, (0, prefix_length)),
            "the zeros are behind the tokens' columns; the prefix is in front.",
        ),
        Mistake(
            lambda bias, prefix_length: F.pad(bias, (prefix_length, 0), value=1.0),
            "the new columns are 1, which makes the slots louder: a slot gets 0.",
        ),
        Mistake(
            lambda bias, prefix_length: F.pad(bias, (prefix_length, 0), value=-torch.inf),
            "minus infinity hides the prefix: a slot gets 0.",
        ),
        Mistake(
            lambda bias, prefix_length: torch.cat([bias[..., :1].expand(-1, -1, -1, prefix_length), bias], dim=-1),
            "the slots got the bias of the first token, a number that changes with the query: a slot gets 0.",
        ),
        Mistake(
            lambda bias, prefix_length: F.pad(bias, (prefix_length, 0, prefix_length, 0)),
            "the bias has new rows, too: the prefix has no queries.",
        ),
        Mistake(
            lambda bias, prefix_length: bias, "the bias is as it was: the keys have become more, so must its columns."
        ),
    ],
)
