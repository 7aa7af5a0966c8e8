"""Layers that see the future, each in its own way, and two that do not: what lesson 3's leak detector is tried on."""

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.course.exercises.layer_variants import masked_late
from helpers.heads import merge_heads, split_heads
from helpers.masks import causal_mask


def causal_attention(hidden: Tensor) -> Tensor:
    heads = split_heads(hidden, 2)
    return merge_heads(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))


def causal_attention_with_a_merge_without_transpose(hidden: Tensor) -> Tensor:
    heads = split_heads(hidden, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).reshape(hidden.shape)


def causal_attention_masked_late(hidden: Tensor) -> Tensor:
    heads = split_heads(hidden, 2)
    return merge_heads(masked_late(heads, heads, heads, causal_mask(hidden.shape[1]))[0])


def attention_without_a_mask(hidden: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(hidden, hidden, hidden)


def each_token_alone(hidden: Tensor) -> Tensor:
    return hidden.tanh()


def last_token_reaches_the_one_before(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :-2], hidden[:, -2:-1] * hidden[:, -1:], hidden[:, -1:]], dim=1)


def second_token_reaches_the_first(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :1] * hidden[:, 1:2], hidden[:, 1:]], dim=1)


def each_token_reaches_two_back(hidden: Tensor, strength: float = 1.0) -> Tensor:
    return hidden + strength * F.pad(hidden[:, 2:], (0, 0, 0, 2))


def a_leak_of_a_fiftieth(hidden: Tensor) -> Tensor:
    return each_token_reaches_two_back(hidden, 2e-2)


def a_leak_of_a_two_thousandth(hidden: Tensor) -> Tensor:
    return each_token_reaches_two_back(hidden, 5e-4)


def one_feature_reaches_another_of_the_token_before(hidden: Tensor) -> Tensor:
    reached = F.pad(hidden[:, 1:, 4], (0, 1))
    return torch.cat([hidden[:, :, :2], hidden[:, :, 2:3] + reached[:, :, None], hidden[:, :, 3:]], dim=-1)


def the_difference_of_two_features_reaches_back(hidden: Tensor) -> Tensor:
    """Its derivatives add up to 0."""
    return hidden + F.pad(hidden[:, 1:, :1] - hidden[:, 1:, 1:2], (0, 0, 0, 1))


# Their names are in the sentence for a wrong answer. All but two of them leak.
LAYERS = [
    causal_attention,
    causal_attention_with_a_merge_without_transpose,
    causal_attention_masked_late,
    attention_without_a_mask,
    each_token_alone,
    last_token_reaches_the_one_before,
    second_token_reaches_the_first,
    each_token_reaches_two_back,
    a_leak_of_a_fiftieth,
    a_leak_of_a_two_thousandth,
    one_feature_reaches_another_of_the_token_before,
    the_difference_of_two_features_reaches_back,
]
