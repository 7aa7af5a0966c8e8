"""Checks of lesson 3's exercises."""

from functools import partial

import torch
from torch import Tensor

from helpers.attention import scaled_dot_product_attention
from helpers.course.exercises.checking import Exercise, Mistake, random_tensor
from helpers.heads import merge_heads, split_heads
from helpers.masks import causal_mask


def _decoder_mask(not_padding: Tensor, triangle: Tensor) -> Tensor:
    return not_padding[:, None, None, :] & triangle


def _triangle(attention_mask: Tensor, diagonal: int = 0) -> Tensor:
    return torch.ones(attention_mask.shape[1], attention_mask.shape[1], dtype=torch.bool).tril(diagonal)


def _right_decoder_mask(attention_mask: Tensor) -> Tensor:
    return _decoder_mask(attention_mask.bool(), _triangle(attention_mask))


check_decoder_mask = Exercise(
    right=_right_decoder_mask,
    toys=lambda draw: [
        (torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),),
        (torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]]),),
    ],
    mistakes=[
        Mistake(
            lambda given: _decoder_mask(given.bool(), _triangle(given).T),
            "the triangle is upside down: queries see what comes after them, and not what came before.",
        ),
        Mistake(
            lambda given: _decoder_mask(given.bool(), _triangle(given, -1)),
            "no token sees itself: the diagonal of the triangle must be True.",
        ),
        Mistake(
            lambda given: given.bool()[:, None, :, None] & _triangle(given),
            "padding hides queries (rows); it has to hide keys (columns), on the last axis.",
        ),
        Mistake(
            lambda given: _right_decoder_mask(given) & given.bool()[:, None, :, None],
            "padded queries (rows) are hidden too, and are left without a key: padding hides keys (columns) alone.",
        ),
        Mistake(
            lambda given: given.bool()[:, None, None, :] & _triangle(given).float(),
            "`&` joins bool masks, and one of yours is float: attention_mask.bool() is bool, and so is "
            "torch.ones(seq, seq, dtype=torch.bool).tril().",
        ),
        Mistake(
            lambda given: ~_right_decoder_mask(given),
            "True and False are swapped: True = may attend.",
        ),
        Mistake(
            lambda given: given.bool()[:, None, None, :] | _triangle(given),
            'the two masks were joined with "or": a key must be real and not in the future, so "and".',
        ),
        Mistake(
            lambda given: given.bool()[:, None, None, :].expand(-1, 1, given.shape[1], -1),
            "padding is hidden, but there is no triangle: queries see the future.",
        ),
        Mistake(
            lambda given: given.bool()[:, None, None, :],
            "padding is hidden, but there is no triangle: queries see the future.",
        ),
        Mistake(
            lambda given: _decoder_mask(torch.ones_like(given, dtype=torch.bool), _triangle(given)),
            "the triangle is right, but the padding is visible.",
        ),
        Mistake(_triangle, "the triangle is right, but the padding is visible."),
    ],
)


def _cross_attention(
    x, context, w_q, w_k, w_v, w_o, num_heads, *, split=split_heads, merge=merge_heads, scale=None
) -> Tensor:
    query, key, value = (split(projected, num_heads) for projected in (x @ w_q.T, context @ w_k.T, context @ w_v.T))
    return merge(scaled_dot_product_attention(query, key, value, scale=scale)[0]) @ w_o.T


def _cross_attention_without_transpose(*toy, among: str) -> Tensor:
    x, context, w_q, w_k, w_v, w_o, num_heads = toy
    w_q, w_k, w_v, w_o = (w.T if name in among else w for name, w in zip("qkvo", (w_q, w_k, w_v, w_o), strict=True))
    return _cross_attention(x, context, w_q, w_k, w_v, w_o, num_heads)


def _cross_attention_of_a_pair(x, context, w_q, w_k, w_v, w_o, num_heads) -> Tensor:
    query, key, value = (split_heads(y, num_heads) for y in (x @ w_q.T, context @ w_k.T, context @ w_v.T))
    return merge_heads(scaled_dot_product_attention(query, key, value))


def split_with_view_alone(x: Tensor, num_heads: int) -> Tensor:
    return x.reshape(x.shape[0], num_heads, x.shape[1], -1)


def _merge_with_reshape_alone(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)


check_cross_attention = Exercise(
    right=_cross_attention,
    toys=lambda draw: [
        (
            random_tensor(draw, batch, queries, model_dim),
            random_tensor(draw, batch, keys, model_dim),
            *(random_tensor(draw, heads * head_dim, model_dim) for _ in range(3)),
            random_tensor(draw, model_dim, heads * head_dim),
            heads,
        )
        for batch, queries, keys, heads, head_dim, model_dim in [(2, 5, 7, 3, 4, 10), (4, 3, 6, 2, 5, 8)]
    ],
    mistakes=[
        Mistake(
            partial(_cross_attention, split=split_with_view_alone),
            "heads were split with view alone: head 0 got whole tokens instead of a slice of every token's features.",
        ),
        Mistake(
            partial(_cross_attention, merge=_merge_with_reshape_alone),
            "heads were merged with reshape alone: one output row holds several tokens of the same head; heads and "
            "tokens have to change places first.",
        ),
        Mistake(
            partial(_cross_attention, split=split_with_view_alone, merge=_merge_with_reshape_alone),
            "heads were split and merged with view alone: tokens and heads have to change places both times.",
        ),
        Mistake(
            lambda x, context, *others: _cross_attention(x, x, *others),
            "keys and values were made from x, so this is self-attention: they come from context.",
        ),
        Mistake(
            lambda x, context, *others: _cross_attention(context, x, *others),
            "the roles are swapped: queries come from x, keys and values from context.",
        ),
        Mistake(
            lambda x, context, *others: _cross_attention(context, context, *others),
            "queries were made from context: they come from x.",
        ),
        Mistake(
            lambda x, context, w_q, w_k, w_v, *others: _cross_attention(x, context, w_q, w_v, w_k, *others),
            "w_k and w_v have changed places.",
        ),
        Mistake(
            lambda x, context, w_q, w_k, w_v, w_o, heads: _cross_attention(x, context, w_q, w_k, w_v, w_o, 1),
            "there is one head: the projections were not split into num_heads.",
        ),
        Mistake(
            lambda x, context, w_q, w_k, w_v, w_o, heads: _cross_attention(
                x, context, w_q, w_k, w_v, torch.eye(len(w_q), dtype=x.dtype), heads
            ),
            "the merged heads were returned: the output projection w_o is missing.",
        ),
        Mistake(
            lambda x, context, w_q, *others: _cross_attention(x, context, w_q, *others, scale=len(w_q) ** -0.5),
            "the scores were divided by the square root of all features together; head_dim belongs there.",
        ),
        Mistake(partial(_cross_attention, scale=1.0), "the scores were not divided by the square root of head_dim."),
        *(
            Mistake(
                partial(_cross_attention_without_transpose, among=among),
                "a matrix was used as it is stored: nn.Linear stores [out, in], so use .T, as in x @ w_q.T.",
            )
            for among in ("qkvo", "k", "o")
        ),
        Mistake(
            _cross_attention_of_a_pair,
            "scaled_dot_product_attention returns a pair, output and weights: take the first, mixed, _ = ...",
        ),
    ],
)


def _cached_step(query, key, value, past_key, past_value, mask=causal_mask) -> tuple[Tensor, Tensor, Tensor]:
    key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
    visible = mask(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, visible)[0], key, value


check_cached_step = Exercise(
    right=_cached_step,
    toys=lambda draw: [
        (
            *(random_tensor(draw, batch, heads, new, head_dim) for _ in range(3)),
            *(random_tensor(draw, batch, heads, past, head_dim) for _ in range(2)),
        )
        for batch, heads, new, past, head_dim in [(2, 3, 4, 7, 5), (1, 2, 3, 6, 4)]
    ],
    mistakes=[
        Mistake(
            partial(_cached_step, mask=lambda queries, keys: torch.ones(queries, keys).tril().bool()),
            "the triangle stands in the top-left corner, as with is_causal=True: the first new token sees key 0 alone, "
            "instead of the whole past and itself.",
        ),
        Mistake(
            partial(_cached_step, mask=lambda queries, keys: None),
            "there is no mask: a new token sees the new tokens that come after it.",
        ),
        Mistake(
            partial(_cached_step, mask=lambda queries, keys: causal_mask(queries, keys).tril(keys - queries - 1)),
            "a new token does not see itself: the diagonal is one column too far left.",
        ),
        Mistake(
            lambda query, key, value, past_key, past_value: _cached_step(query, past_key, past_value, key, value),
            "the new keys stand in front of the past: the past comes first.",
        ),
        Mistake(
            lambda query, key, value, past_key, past_value: (
                scaled_dot_product_attention(query, key, value, causal_mask(query.shape[2]))[0],
                *_cached_step(query, key, value, past_key, past_value)[1:],
            ),
            "the cache is right, but the new tokens attended to each other alone and not to the past.",
        ),
        Mistake(
            lambda query, key, value, past_key, past_value: (
                _cached_step(query, key, value, past_key, past_value)[0],
                key,
                value,
            ),
            "the output is right, but the new keys and values were returned alone: the next step needs the past too.",
        ),
    ],
)
