"""Checks of lesson 3's exercises."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from helpers.course.exercises.checking import Exercise, Mistake, Prediction, UnreadableError, random_tensor
from helpers.course.exercises.layer_variants import (
    MATRICES,
    FourMatrices,
    MultiHeadAttention,
    class_of,
    forward,
    hide_nothing,
    masked_late,
    masked_mix,
    merge_with_reshape_alone,
    split_with_view_alone,
    variant,
)
from helpers.course.exercises.leaky_layers import LAYERS
from helpers.heads import merge_heads, split_heads
from helpers.masks import causal_mask


def _given_numbers(layer: nn.Module, model_dim: int) -> nn.Module:
    """The layer in double precision with four matrices that all answers share; UnreadableError if they do not fit."""
    if not isinstance(layer, nn.Module):
        raise UnreadableError(
            f"MultiHeadAttention(...) should give an nn.Module, and gives one {type(layer).__name__}."
        )
    generator = torch.Generator().manual_seed(1)
    for name in MATRICES:
        matrix = getattr(layer, name, None)
        if not isinstance(matrix, nn.Linear):
            raise UnreadableError(f"the layer has no nn.Linear named {name}: __init__ makes {', '.join(MATRICES)}.")
        if matrix.bias is not None:
            raise UnreadableError(f"{name} adds a bias vector: give nn.Linear bias=False.")
        if list(matrix.weight.shape) != [model_dim, model_dim]:
            shape = list(matrix.weight.shape)
            raise UnreadableError(
                f"the matrix of {name} is {shape}, expected {[model_dim, model_dim]}: one matrix makes all heads."
            )
        matrix.weight = nn.Parameter(random_tensor(generator, model_dim, model_dim) / model_dim**0.5)
    return layer


def _run(layer: nn.Module, model_dim: int, num_heads: int):
    hidden = random_tensor(torch.Generator().manual_seed(2), 2, 5, model_dim)
    return _given_numbers(layer, model_dim)(hidden)


def _one_head(layer: nn.Module, hidden: Tensor, context: Tensor | None = None, mask: Tensor | None = None):
    return forward(layer, hidden, context, mask, split=lambda x, num_heads: split_heads(x, 1))


def _no_head_axis(layer: nn.Module, hidden: Tensor, context: Tensor | None = None, mask: Tensor | None = None):
    output, weights = _one_head(layer, hidden, context, mask)
    return output, weights.squeeze(1)


def _split_before_projecting(layer: nn.Module, hidden: Tensor, context: Tensor | None, mask: Tensor | None):
    return layer.q_proj(split_heads(hidden, layer.num_heads)), None


check_multi_head_attention = Exercise(
    right=MultiHeadAttention,
    toys=lambda draw: [(12, 3), (20, 2)],
    read=_run,
    compared="What the layer returns",
    examples="layers of different sizes",
    mistakes=[
        Mistake(
            variant(split=split_with_view_alone),
            "heads were split with view alone: head 0 got whole tokens instead of a slice of every token's features.",
        ),
        Mistake(
            variant(merge=merge_with_reshape_alone),
            "heads were merged with reshape alone: one output row holds several tokens of the same head; merge_heads "
            "swaps heads and tokens first.",
        ),
        Mistake(
            variant(split=split_with_view_alone, merge=merge_with_reshape_alone),
            "heads were split and merged with view alone: tokens and heads have to change places both times.",
        ),
        Mistake(
            class_of(_split_before_projecting),
            "a matrix met single heads: q_proj, k_proj and v_proj come before split_heads, o_proj after merge_heads.",
        ),
        *(
            Mistake(class_of(wrong), "there is one head: query, key and value have to go through split_heads as well.")
            for wrong in (_one_head, _no_head_axis)
        ),
        Mistake(
            variant(last=lambda layer, merged: merged),
            "the merged heads were returned: the output projection, o_proj, is missing.",
        ),
        Mistake(variant(last=lambda layer, merged: layer.o_proj(layer.o_proj(merged))), "o_proj was applied twice."),
        Mistake(variant(mix=partial(masked_mix, scale=1.0)), "the scores were not divided by the root of head_dim."),
        Mistake(
            variant(
                mix=lambda query, key, value, mask: masked_mix(
                    query, key, value, mask, scale=(query.shape[1] * query.shape[-1]) ** -0.5
                )
            ),
            "the scores were divided by the root of model_dim; each head has head_dim features.",
        ),
        Mistake(
            variant(mix=lambda query, key, value, mask: masked_mix(query, key, value, mask, scale=1 / query.shape[-1])),
            "the scores were divided by head_dim, or twice by its root; once by the root is right.",
        ),
        Mistake(
            variant(mix=partial(masked_mix, dim=-2)),
            "the softmax runs over the queries: each query shares out its weight over the keys, the last axis.",
        ),
        Mistake(variant(project="qvk"), "k_proj and v_proj have changed places."),
        Mistake(variant(project="kqv"), "q_proj and k_proj have changed places."),
        Mistake(
            class_of(lambda *arguments: forward(*arguments)[::-1]),
            "the pair is in the wrong order: first the output, then the weights.",
        ),
        Mistake(
            class_of(lambda *arguments: forward(*arguments)[0]),
            "the output is right; the weights are missing: return both.",
        ),
    ],
)


# The mask


def _with_an_empty_row(mask: Tensor) -> Tensor:
    mask[1, ..., 2, :] = False  # one query that may look at nobody
    return mask


def _hide_with_zero(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, 0.0)


def _hide_the_others(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -torch.inf)


def _keep(weights: Tensor, mask: Tensor) -> Tensor:
    return weights


def _clear_the_others(weights: Tensor, mask: Tensor) -> Tensor:
    return weights.masked_fill(mask, 0.0)


_NOBODY_GIVES_NAN = (
    "right wherever somebody is left to look at; a query that may look at nobody gets NaN, since 0 is divided by 0, "
    "and it should get zeros: "
)

check_masked_mix = Exercise(
    right=masked_mix,
    toys=lambda draw: [
        (
            random_tensor(draw, 2, 3, queries, head_dim),
            *(random_tensor(draw, 2, 3, keys, head_dim) for _ in range(2)),
            _with_an_empty_row(torch.rand(2, heads, queries, keys, generator=draw).argsort(dim=-1) < keys - 2),
        )
        for heads, queries, keys, head_dim in [(1, 4, 6, 5), (3, 7, 5, 2)]
    ],
    compared="What mended returns",
    mistakes=[
        Mistake(
            masked_late,
            "the weights still add up to less than 1: the softmax has shared them out before the mask comes.",
        ),
        Mistake(partial(masked_mix, hide=hide_nothing, last=_keep), "there is no mask: all weights are as before."),
        Mistake(partial(masked_mix, last=_keep), _NOBODY_GIVES_NAN + "end with masked_fill(~mask, 0.0) as before."),
        Mistake(
            partial(masked_mix, hide=lambda scores, mask: scores.masked_fill(~mask, -1e9), last=_keep),
            "right wherever somebody is left to look at; a query that may look at nobody gets the mean of all values, "
            "and should get zeros.",
        ),
        *(
            Mistake(
                partial(masked_mix, hide=_hide_with_zero, last=last),
                "a hidden score was set to 0, and exp(0) is 1, so it takes its share of the softmax. Minus infinity "
                "takes none.",
            )
            for last in (_keep, lambda weights, mask: weights.masked_fill(~mask, 0.0))
        ),
        *(
            Mistake(
                partial(masked_mix, hide=lambda scores, mask: scores + mask.to(scores.dtype), last=last),
                "the mask was added to the scores: that moves some of them by 1 and hides none.",
            )
            for last in (_keep, lambda weights, mask: weights.masked_fill(~mask, 0.0))
        ),
        *(
            Mistake(
                partial(masked_mix, hide=_hide_the_others, last=last),
                "True and False are swapped: True = may attend, so what is filled is ~mask.",
            )
            for last in (_keep, lambda weights, mask: weights.masked_fill(~mask, 0.0), _clear_the_others)
        ),
        Mistake(
            partial(masked_mix, scale=1.0), "the mask is right; the scores were not divided by the root of head_dim."
        ),
        Mistake(
            partial(masked_mix, dim=-2),
            "the softmax runs over the queries: each query shares out its weight over the keys, the last axis.",
        ),
        Mistake(
            lambda *toy: masked_mix(*toy)[0],
            "the mixed values are right; return the weights as well, as masked_late does.",
        ),
    ],
)


check_mask_shape = Prediction(
    right=[1000, 1, 1, 7],
    because="tables and keys have axes of their own; heads and queries share one mask each.",
    mistakes=[
        ([1000, 7], "shapes are aligned from the right, so 1000 tables would be taken for 1000 queries."),
        (
            [1000, 1, 7],
            "shapes are aligned from the right, so tables would be taken for heads: one axis is missing.",
        ),
        ([1000, 1, 7, 1], "the 7 is on the axis of the queries: that hides who asks, not who is asked."),
        ([1000, 7, 1, 1], "the 7 is on the axis of the heads; keys are the last axis."),
        ([1000, 2, 7, 7], "that works too, with the same row written 14 times: axes of length 1 save that."),
        ([1000, 2, 1, 7], "that works too, with the same row written for both heads: an axis of length 1 saves that."),
        ([1000, 1, 7, 7], "that works too, with the same row written 7 times: an axis of length 1 saves that."),
        ([1, 1, 1, 7], "that is one mask for all tables; each has other empty seats."),
    ],
)


# The leak


def _jacobian(layer: Callable, hidden: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(layer, hidden)


def _dependence(layer: Callable, hidden: Tensor, threshold: float = 0.0) -> Tensor:
    """Bool `[output token, input token]`."""
    return (_jacobian(layer, hidden).abs() > threshold).sum(dim=(0, 2, 3, 5)) > 0


def _sees_future(layer: Callable, hidden: Tensor, threshold: float = 0.0) -> bool:
    return _dependence(layer, hidden, threshold).triu(1).any().item()


def _sees_future_by_signed_sums(layer: Callable, hidden: Tensor, differs: Callable) -> Tensor:
    return differs(_jacobian(layer, hidden).sum(dim=(0, 2, 3, 5)), 0).triu(1).any()


def _one_truth(result, layer: Callable, hidden: Tensor) -> bool:
    if isinstance(result, Tensor) and result.numel() != 1:
        raise UnreadableError(
            f"sees_future should return one True or False, and returns a tensor {list(result.shape)}: .any() says "
            "whether there is a True in it."
        )
    return bool(result)


check_sees_future = Exercise(
    right=_sees_future,
    toys=lambda draw: [(layer, random_tensor(draw, 1, 5, 6)) for layer in LAYERS],
    read=_one_truth,
    compared="The answer of sees_future",
    examples="layers",
    mistakes=[
        Mistake(
            lambda layer, hidden: True,
            "it calls every layer leaky: what follows the token counts, and not the token itself or what came before. "
            "(Or it changes hidden itself: clone it first.)",
        ),
        Mistake(
            lambda layer, hidden: not _sees_future(layer, hidden),
            "the answer is the opposite of the right one on every layer: True means that the layer leaks.",
        ),
        Mistake(
            lambda layer, hidden: _dependence(layer, hidden).tril(-1).any(),
            "it looks for the past: the future of output token i are the input tokens after i.",
        ),
        Mistake(
            lambda layer, hidden: _dependence(layer, hidden)[0, 1:].any(),
            "it watches output token 0 alone, and misses a leak further back.",
        ),
        Mistake(
            lambda layer, hidden: _dependence(layer, hidden)[:-1, -1].any(),
            "it sees what comes from the last token alone: replace all that follow, with hidden at its full length.",
        ),
        Mistake(
            lambda layer, hidden: _dependence(layer, hidden).diagonal(1).any(),
            "it watches the next token alone, and misses a leak from further away: watch all that follow.",
        ),
        Mistake(
            lambda layer, hidden: (_jacobian(layer, hidden)[0, :, 0, 0, :, 0] != 0).triu(1).any(),
            "it looks at some features alone: any feature of the output can depend on any feature of the input.",
        ),
        *(
            Mistake(
                partial(_sees_future_by_signed_sums, differs=differs),
                "it adds up what can cancel: take abs() of the derivatives, or replace the tokens by random ones.",
            )
            for differs in (torch.ne, torch.gt)
        ),
        *(
            Mistake(
                partial(_sees_future, threshold=threshold),
                "it misses weak leaks: where no path leads, nothing changes at all, so the threshold only has to be "
                "above rounding, 1e-6 say.",
            )
            for threshold in (0.1, 1e-2)
        ),
        Mistake(
            lambda layer, hidden: False,
            f"it finds no leak anywhere, though {len(LAYERS) - 2} of the {len(LAYERS)} layers have one.",
        ),
    ],
)


# The cache

check_step = Prediction(
    right=[1, 12, 1, 6],
    because="one query, the new token's; six keys, five that were kept and its own.",
    mistakes=[
        (
            [1, 12, 6, 6],
            "that is the whole map, as without a cache: the queries of the first five are not computed again.",
        ),
        ([1, 12, 1, 5], "the new token also looks at itself: its own key joins the five before the softmax."),
        ([1, 12, 6, 1], "rows are queries and columns are keys: one query, six keys."),
        ([1, 12, 5, 1], "rows are queries and columns are keys: one query, and five keys with its own make six."),
        ([1, 12, 1, 64], "those are the mixed values: weights have a column for each key."),
        ([1, 12, 1, 1], "the new token looks at the five before it as well: their keys were kept for that."),
        ([1, 1, 6], "each head has weights of its own: there is an axis of 12 in front of the queries."),
        ([1, 1, 12, 6], "heads come before queries: [batch, heads, query, key]."),
    ],
)


# The other table


def _toys_of_forward(draw: torch.Generator) -> list[tuple]:
    toys = []
    for batch, queries, keys, model_dim, heads in [(2, 5, 7, 12, 3), (3, 4, 6, 10, 2)]:
        layer = _given_numbers(FourMatrices(model_dim, heads), model_dim)
        hidden = random_tensor(draw, batch, queries, model_dim)
        context = random_tensor(draw, batch, keys, model_dim)
        here = _with_an_empty_row(torch.rand(batch, 1, queries, keys, generator=draw) < 0.7)
        toys += [
            (layer, hidden, None, None),
            (layer, hidden, None, causal_mask(queries)),
            (layer, hidden, context, None),
            (layer, hidden, context, here),
        ]
    return toys


def _changed(change: Callable, **changes) -> Callable:
    """A forward that exchanges hidden states and context beforehand."""

    def changed(layer, hidden, context, mask):
        return forward(layer, *change(hidden, context), mask, **changes)

    return changed


def _swapped(hidden: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (hidden, None) if context is None else (context, hidden)


def _key_alone_from_context(layer, hidden, context, mask):
    context = hidden if context is None else context
    query, key = split_heads(layer.q_proj(hidden), layer.num_heads), split_heads(layer.k_proj(context), layer.num_heads)
    value = split_heads(layer.v_proj(hidden), layer.num_heads)
    mixed, weights = masked_mix(query, key, value, torch.ones((), dtype=torch.bool) if mask is None else mask)
    return layer.o_proj(merge_heads(mixed)), weights


def _context_needed(layer, hidden, context, mask):
    return layer.k_proj(context) if context is None else forward(layer, hidden, context, mask)


def _mask_needed(layer, hidden, context, mask):
    return ~mask if mask is None else forward(layer, hidden, context, mask)


def _always_causal(layer, hidden, context, mask):
    keys = (hidden if context is None else context).shape[1]
    return forward(layer, hidden, context, torch.ones(hidden.shape[1], keys, dtype=torch.bool).tril())


check_forward = Exercise(
    right=forward,
    toys=_toys_of_forward,
    compared="What forward returns",
    examples="calls, with and without context and mask",
    mistakes=[
        Mistake(
            _changed(lambda hidden, context: (hidden, None)),
            "context is not used: keys and values come from it, if it is given.",
        ),
        Mistake(_changed(_swapped), "the roles are swapped: queries come from hidden, keys and values from context."),
        Mistake(
            _changed(lambda hidden, context: (hidden if context is None else context, None)),
            "the queries come from context as well: they are made of hidden.",
        ),
        Mistake(
            _key_alone_from_context, "the keys come from context, but the values from hidden: each key has one value."
        ),
        Mistake(
            lambda layer, hidden, context, mask: forward(layer, hidden, context or hidden, mask),
            "`or` asks whether a tensor is true, which torch refuses: write `hidden if context is None else context`.",
        ),
        Mistake(
            _context_needed,
            "context may be None, and then keys and values come from hidden.",
        ),
        Mistake(_mask_needed, "mask may be None, and then everybody may look at everybody: ~None is an error."),
        Mistake(
            lambda layer, hidden, context, mask: forward(layer, hidden, context),
            "the mask is not used: it goes into masked_mix.",
        ),
        Mistake(_always_causal, "there is a causal mask whatever was given: whoever calls the layer chooses the mask."),
        Mistake(partial(forward, mix=masked_late), "the mask comes after the softmax: use masked_mix."),
        Mistake(partial(forward, mix=partial(masked_mix, last=_keep)), _NOBODY_GIVES_NAN + "use masked_mix."),
        Mistake(partial(forward, last=lambda layer, merged: merged), "the output projection, o_proj, is missing."),
        Mistake(
            partial(
                forward,
                mix=lambda query, key, value, mask: masked_mix(query, key, value, mask, scale=1 / query.shape[-1]),
            ),
            "the scores were divided by the root of head_dim twice: masked_mix does it once.",
        ),
        Mistake(
            lambda *toy: forward(*toy)[0],
            "the output is right; the weights are missing: return both.",
        ),
    ],
)
