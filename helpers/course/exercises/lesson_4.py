"""Checks of lesson 4's exercises."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from helpers.attention import scaled_dot_product_attention
from helpers.course.exercises.checking import Exercise, Mistake, random_tensor
from helpers.course.exercises.lesson_3 import split_with_view_alone
from helpers.masks import causal_mask


def _split_prefix(prefix: Tensor, num_heads: int, pattern: str) -> tuple[Tensor, Tensor]:
    key, value = rearrange(prefix, f"b p ({pattern}) -> kv b h p d", kv=2, h=num_heads)
    return key, value


check_split_prefix = Exercise(
    right=partial(_split_prefix, pattern="kv h d"),
    toys=lambda draw: [
        (random_tensor(draw, batch, prefix, 2 * heads * head_dim), heads)
        for batch, prefix, heads, head_dim in [(1, 4, 3, 5), (2, 3, 4, 6)]
    ],
    mistakes=[
        Mistake(
            lambda prefix, heads: _split_prefix(prefix, heads, "kv h d")[::-1],
            "keys and values have changed places: the first half of a row is the key.",
        ),
        Mistake(
            partial(_split_prefix, pattern="h d kv"),
            "keys and values were taken in turn, one number each: the first half of a row is the key.",
        ),
        Mistake(
            partial(_split_prefix, pattern="h kv d"),
            "the rows were cut into heads before they were cut in half: head 0 got the key's numbers of heads 0 and 1.",
        ),
        Mistake(
            lambda prefix, heads: tuple(split_with_view_alone(half, heads) for half in prefix.chunk(2, dim=-1)),
            "heads were split with view alone: head 0 got whole slots instead of a slice of every slot's features.",
        ),
        Mistake(
            lambda prefix, heads: prefix.chunk(2, dim=-1),
            "the halves are right, but they are not split into heads yet.",
        ),
    ],
)


def _prefix_attention(query, key, value, prefix_key, prefix_value, mask, new_columns=None) -> Tensor:
    if new_columns is None:
        new_columns = torch.ones(len(mask), prefix_key.shape[2], dtype=torch.bool)
    key, value = torch.cat([prefix_key, key], dim=2), torch.cat([prefix_value, value], dim=2)
    return scaled_dot_product_attention(query, key, value, torch.cat([new_columns, mask], dim=1))[0]


def _prefix_attention_weights(query, key, value, prefix_key, prefix_value, mask) -> Tensor:
    key, value = torch.cat([prefix_key, key], dim=2), torch.cat([prefix_value, value], dim=2)
    return scaled_dot_product_attention(query, key, value, F.pad(mask, (prefix_key.shape[2], 0), value=True))[1]


def _mask_behind_its_prefix(query, key, value, prefix_key, prefix_value, mask, fill=True) -> Tensor:
    key, value = torch.cat([prefix_key, key], dim=2), torch.cat([prefix_value, value], dim=2)
    return scaled_dot_product_attention(query, key, value, F.pad(mask, (0, prefix_key.shape[2]), value=fill))[0]


def _prefix_behind_its_mask(query, key, value, prefix_key, prefix_value, mask) -> Tensor:
    key, value = torch.cat([key, prefix_key], dim=2), torch.cat([value, prefix_value], dim=2)
    return scaled_dot_product_attention(query, key, value, F.pad(mask, (prefix_key.shape[2], 0), value=True))[0]


def _prefix_with_queries(query, key, value, prefix_key, prefix_value, mask) -> Tensor:
    return _prefix_attention(
        torch.cat([prefix_key, query], dim=2),
        key,
        value,
        prefix_key,
        prefix_value,
        F.pad(mask, (0, 0, prefix_key.shape[2], 0), value=True),
    )


check_prefix_attention = Exercise(
    right=_prefix_attention,
    toys=lambda draw: [
        (
            *(random_tensor(draw, batch, heads, length, head_dim) for length in (queries, keys, keys, prefix, prefix)),
            causal_mask(queries, keys),
        )
        for batch, heads, queries, keys, prefix, head_dim in [(2, 3, 5, 6, 4, 7), (1, 4, 3, 5, 2, 6)]
    ],
    mistakes=[
        Mistake(
            lambda *toy: _prefix_attention(*toy, new_columns=torch.zeros(len(toy[-1]), toy[3].shape[2]).bool()),
            "this is the output without a prefix: it was not joined, or its columns of the mask are False.",
        ),
        Mistake(
            lambda *toy: _prefix_attention(*toy[:-1], torch.ones_like(toy[-1])),
            "the mask was dropped: every query sees every key.",
        ),
        Mistake(
            _mask_behind_its_prefix,
            "the mask grew at the other end than the keys: the prefix is in front, so are its columns.",
        ),
        Mistake(
            partial(_mask_behind_its_prefix, fill=False),
            "the mask grew at the other end than the keys, and by columns of False: F.pad takes (in front, behind), "
            "and value=True.",
        ),
        Mistake(
            lambda *toy: (_prefix_attention(*toy), _prefix_attention_weights(*toy)),
            "the pair of output and weights was returned: the mixed values are its first part.",
        ),
        Mistake(
            _prefix_behind_its_mask,
            "the prefix stands behind the keys, but the new columns of the mask in front.",
        ),
        Mistake(
            lambda query, key, value, prefix_key, prefix_value, mask: _prefix_attention(
                query, key, value, prefix_key, prefix_key, mask
            ),
            "the prefix's keys serve as its values too: prefix_value is not used.",
        ),
        Mistake(
            _prefix_with_queries,
            "the prefix got queries: rows of the output belong to tokens, so the queries stay as they are.",
        ),
        Mistake(
            lambda query, key, value, prefix_key, prefix_value, mask: _prefix_attention(
                query,
                key,
                value,
                prefix_key,
                prefix_value,
                torch.ones(len(mask), mask.shape[1] + prefix_key.shape[2]).tril().bool()[:, prefix_key.shape[2] :],
                torch.ones(len(mask), prefix_key.shape[2]).tril().bool(),
            ),
            "a triangle was laid over the prefix too: every query sees the whole prefix.",
        ),
    ],
)


def _prefix_weights(query, key, prefix_key, scale=None, dim=-1) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return (scale * query @ torch.cat([prefix_key, key], dim=2).mT).softmax(dim)[..., : prefix_key.shape[2]]


def _prefix_share(query, key, prefix_key, **options) -> Tensor:
    return _prefix_weights(query, key, prefix_key, **options).sum(dim=-1, keepdim=True)


def _share_of_columns(query, key, prefix_key, columns: Callable[[int], slice]) -> Tensor:
    scores = query.shape[-1] ** -0.5 * query @ torch.cat([prefix_key, key], dim=2).mT
    return scores.softmax(dim=-1)[..., columns(prefix_key.shape[2])].sum(dim=-1, keepdim=True)


check_prefix_share = Exercise(
    right=_prefix_share,
    toys=lambda draw: [
        tuple(random_tensor(draw, batch, heads, length, head_dim) for length in (queries, keys, prefix))
        for batch, heads, queries, keys, prefix, head_dim in [(2, 3, 5, 6, 4, 7), (1, 4, 3, 7, 2, 5)]
    ],
    mistakes=[
        Mistake(
            lambda *toy: 1 - _prefix_share(*toy),
            "this is what is left for the content: the share of the prefix is 1 minus it.",
        ),
        Mistake(
            lambda *toy: _prefix_weights(*toy).mean(dim=-1, keepdim=True),
            "the weights on the prefix were averaged: the share is their sum.",
        ),
        Mistake(
            lambda query, key, prefix_key: torch.ones_like(query[..., :1]),
            "every share is 1: the softmax ran over the prefix alone; it runs over prefix and content together.",
        ),
        Mistake(
            lambda query, key, prefix_key: torch.full_like(
                query[..., :1], prefix_key.shape[2] / (prefix_key.shape[2] + key.shape[2])
            ),
            "this is the share if all scores were equal: it depends on the query.",
        ),
        Mistake(
            partial(_prefix_share, scale=1.0),
            "the scores were not divided by the square root of head_dim.",
        ),
        Mistake(
            partial(_prefix_share, dim=-2),
            "the softmax ran over the queries: it runs over the keys, the last axis.",
        ),
        Mistake(
            partial(_share_of_columns, columns=lambda length: slice(-length, None)),
            "the last columns were summed, which are not the prefix's: the prefix stands in front.",
        ),
        Mistake(
            partial(_share_of_columns, columns=lambda length: slice(length, 2 * length)),
            "the columns that were summed are not the prefix's: they belong to the first tokens.",
        ),
        Mistake(
            partial(_share_of_columns, columns=lambda length: slice(0, 1)),
            "one column was summed, that of the first slot: the prefix has as many columns as slots.",
        ),
    ],
)
