"""Checks of lesson 2's exercises."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, random_tensor


def _split(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _view_alone(x: Tensor, num_heads: int, seq: int | None = None) -> Tensor:
    return x.reshape(len(x), num_heads, x.shape[1] if seq is None else seq, -1)


def _tokens_of_head_0(x: Tensor, num_heads: int) -> str:
    return (
        f"heads were split with view alone: all {x.shape[1]} rows of head 0 come from the first "
        f"{-(-x.shape[1] // num_heads)} of {x.shape[1]} tokens."
    )


check_split_heads = Exercise(
    right=_split,
    toys=lambda draw: [
        (random_tensor(draw, 2, 5, 3 * 4), 3),
        (random_tensor(draw, 1, 4, 2 * 3), 2),
        (random_tensor(draw, 5, 3, 28), 7),
    ],
    mistakes=[
        Mistake(_view_alone, _tokens_of_head_0),
        Mistake(
            lambda x, num_heads: _view_alone(x, num_heads).flatten(0, 1),
            lambda x, num_heads: _tokens_of_head_0(x, num_heads) + " Also, the heads are folded into the batch.",
        ),
        Mistake(
            lambda x, num_heads: x.unflatten(-1, (num_heads, -1)),
            "the transpose is missing: the axes are batch, seq, heads, head_dim, and the head has to come before seq.",
        ),
        Mistake(
            lambda x, num_heads: x.unflatten(-1, (-1, num_heads)).movedim(-1, 1),
            lambda x, num_heads: (
                f"head 0 took features 0, {num_heads}, {2 * num_heads}, ...; a head owns neighbouring ones: "
                "(h d), not (d h)."
            ),
        ),
        Mistake(
            lambda x, num_heads: _view_alone(x.transpose(1, 2), num_heads, x.shape[1]),
            "tokens and features were transposed before the cut: cut the last axis first, then transpose.",
        ),
        Mistake(
            lambda x, num_heads: _split(x, num_heads).flatten(0, 1),
            "the numbers are right, but heads are folded into the batch: return four axes.",
        ),
    ],
)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


check_merge_heads = Exercise(
    right=_merge,
    toys=lambda draw: [(random_tensor(draw, 2, 3, 5, 4),), (random_tensor(draw, 3, 2, 4, 5),)],
    mistakes=[
        Mistake(
            lambda x: x.reshape(x.shape[0], x.shape[2], -1),
            lambda x: (
                f"the transpose is missing: row 0 of your output holds {x.shape[1]} tokens of head 0, and should hold "
                f"token 0 of all {x.shape[1]} heads."
            ),
        ),
        Mistake(
            lambda x: x.transpose(1, 2).view(x.shape[0], x.shape[2], -1),
            "view refuses a transposed tensor, whose numbers lie in another order in memory: use reshape, or "
            "contiguous() before view.",
        ),
        Mistake(
            lambda x: x.permute(0, 2, 3, 1).flatten(2),
            "the features of all heads are interleaved: heads stand side by side, (h d) and not (d h).",
        ),
        Mistake(
            lambda x: x.transpose(1, 2),
            "the last step is missing: heads and head_dim are still two axes.",
        ),
        Mistake(
            lambda x: x.mean(dim=1),
            "the heads were averaged: they have to stand side by side, each with its own features.",
        ),
    ],
)


def causal_attention(hidden: Tensor) -> Tensor:
    heads = _split(hidden, 2)
    return _merge(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))


def causal_attention_with_a_merge_without_transpose(hidden: Tensor) -> Tensor:
    heads = _split(hidden, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).reshape(hidden.shape)


def attention_without_a_mask(hidden: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(hidden, hidden, hidden)


def each_token_alone(hidden: Tensor) -> Tensor:
    return hidden.tanh()


def last_token_reaches_the_one_before(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :-2], hidden[:, -2:-1] * hidden[:, -1:], hidden[:, -1:]], dim=1)


def second_token_reaches_the_first(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :1] * hidden[:, 1:2], hidden[:, 1:]], dim=1)


def each_token_reaches_two_back(hidden: Tensor) -> Tensor:
    return hidden + F.pad(hidden[:, 2:], (0, 0, 0, 2))


def one_feature_reaches_another_of_the_token_before(hidden: Tensor) -> Tensor:
    reached = F.pad(hidden[:, 1:, 4], (0, 1))
    return torch.cat([hidden[:, :, :2], hidden[:, :, 2:3] + reached[:, :, None], hidden[:, :, 3:]], dim=-1)


def the_difference_of_two_features_reaches_back(hidden: Tensor) -> Tensor:
    """Its derivatives add up to 0."""
    return hidden + F.pad(hidden[:, 1:, :1] - hidden[:, 1:, 1:2], (0, 0, 0, 1))


# Their names are in the sentence for a wrong answer.
_LAYERS = [
    causal_attention,
    causal_attention_with_a_merge_without_transpose,
    attention_without_a_mask,
    each_token_alone,
    last_token_reaches_the_one_before,
    second_token_reaches_the_first,
    each_token_reaches_two_back,
    one_feature_reaches_another_of_the_token_before,
    the_difference_of_two_features_reaches_back,
]


def _jacobian(layer: Callable, hidden: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(layer, hidden)


def _dependence(layer: Callable, hidden: Tensor) -> Tensor:
    """Bool `[output token, input token]`."""
    return _jacobian(layer, hidden).abs().sum(dim=(0, 2, 3, 5)) > 0


def _sees_future_by_signed_sums(layer: Callable, hidden: Tensor, differs: Callable) -> Tensor:
    return differs(_jacobian(layer, hidden).sum(dim=(0, 2, 3, 5)), 0).triu(1).any()


check_sees_future = Exercise(
    right=lambda layer, hidden: _dependence(layer, hidden).triu(1).any().item(),
    toys=lambda draw: [(layer, random_tensor(draw, 1, 5, 6)) for layer in _LAYERS],
    read=lambda result, layer, hidden: bool(result),
    examples="layers",
    mistakes=[
        Mistake(
            lambda layer, hidden: True,
            "it calls every layer leaky: count only the pairs above the diagonal, without the diagonal.",
        ),
        Mistake(
            lambda layer, hidden: _dependence(layer, hidden).tril(-1).any(),
            "it looks for the past: the future of output token i are the input tokens after i, above the diagonal.",
        ),
        Mistake(
            lambda layer, hidden: _dependence(layer, hidden)[0, 1:].any(),
            "it watches output token 0 alone, and misses a leak further back.",
        ),
        Mistake(
            lambda layer, hidden: _dependence(layer, hidden)[:-1, -1].any(),
            "it watches the last input token alone, and misses a leak from a token before it.",
        ),
        Mistake(
            lambda layer, hidden: _dependence(layer, hidden).diagonal(1).any(),
            "it watches the next token alone, and misses a leak from further away: take all of the upper triangle.",
        ),
        Mistake(
            lambda layer, hidden: (_jacobian(layer, hidden)[0, :, 0, 0, :, 0] != 0).triu(1).any(),
            "it looks at some features alone: any feature of the output can depend on any feature of the input.",
        ),
        *(
            Mistake(
                partial(_sees_future_by_signed_sums, differs=differs),
                "it adds up what can cancel: take abs() of the derivatives, or change one feature at a time.",
            )
            for differs in (torch.ne, torch.gt)
        ),
        Mistake(
            lambda layer, hidden: False,
            f"it finds no leak anywhere, though {len(_LAYERS) - 2} of the {len(_LAYERS)} layers have one.",
        ),
    ],
)
