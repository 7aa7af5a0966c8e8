"""Checks of lesson 1's exercises."""

from functools import partial

import torch
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, UnreadableError, random_tensor


def _softmax_mix(scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(dim=-1) @ values


check_one_query = Exercise(
    right=lambda query, keys, values: _softmax_mix(keys @ query / len(query) ** 0.5, values),
    toys=lambda draw: [
        (
            random_tensor(draw, head_dim),
            random_tensor(draw, num_keys, head_dim),
            random_tensor(draw, num_keys, value_dim),
        )
        for num_keys, head_dim, value_dim in [(4, 9, 3), (7, 2, 5)]
    ],
    mistakes=[
        Mistake(
            lambda query, keys, values: _softmax_mix(keys @ query, values),
            "the scores were not divided by the square root of head_dim.",
        ),
        Mistake(
            lambda query, keys, values: _softmax_mix(keys @ query / len(query), values),
            "the scores were divided by head_dim, not by its square root.",
        ),
        Mistake(
            lambda query, keys, values: _softmax_mix(keys @ query / len(keys) ** 0.5, values),
            lambda query, keys, values: (
                f"the scores were divided by the square root of the number of keys, {len(keys)}; the square root "
                f"of head_dim, {len(query)}, belongs there."
            ),
        ),
        Mistake(
            lambda query, keys, values: keys @ query / len(query) ** 0.5 @ values,
            "the values were weighted with the scores themselves: the softmax is missing.",
        ),
        Mistake(
            lambda query, keys, values: (keys @ query / len(query) ** 0.5).softmax(dim=0),
            "you returned the weights; the output is the values, mixed with these weights.",
        ),
    ],
)


def _attention(query: Tensor, key: Tensor, value: Tensor, number: float) -> tuple[Tensor, Tensor]:
    """Output and weights, the scores divided by the square root of `number`."""
    weights = (query @ key.mT / number**0.5).softmax(dim=-1)
    return weights @ value, weights


def _softmax_over_queries(hidden: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, dim=-2) -> tuple[Tensor, Tensor]:
    weights = ((hidden @ w_q) @ (hidden @ w_k).mT / w_q.shape[-1] ** 0.5).softmax(dim=dim)
    return weights @ (hidden @ w_v), weights


check_self_attention = Exercise(
    right=lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x @ w_v, w_q.shape[-1]),
    toys=lambda draw: [
        (
            random_tensor(draw, batch, seq, model_dim),
            *(random_tensor(draw, model_dim, size) for size in (head_dim, head_dim, value_dim)),
        )
        for batch, seq, model_dim, head_dim, value_dim in [(2, 5, 7, 3, 4), (3, 4, 6, 9, 6)]
    ],
    mistakes=[
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x @ w_v, 1),
            "the scores were not divided by the square root of head_dim.",
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x @ w_v, w_q.shape[-1] ** 2),
            "the scores were divided by head_dim, not by its square root.",
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x @ w_v, x.shape[-1]),
            lambda x, w_q, w_k, w_v: (
                f"the scores were divided by the square root of model_dim, {x.shape[-1]}; the square root of head_dim, "
                f"{w_q.shape[-1]}, belongs there."
            ),
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x @ w_v, x.shape[1]),
            lambda x, w_q, w_k, w_v: (
                f"the scores were divided by the square root of the number of tokens, {x.shape[1]}; the square root of "
                f"head_dim, {w_q.shape[-1]}, belongs there."
            ),
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x @ w_v, w_v.shape[-1]),
            lambda x, w_q, w_k, w_v: (
                f"the scores were divided by the square root of value_dim, {w_v.shape[-1]}; the square root of "
                f"head_dim, {w_q.shape[-1]}, belongs there."
            ),
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_k, x @ w_q, x @ w_v, w_q.shape[-1]),
            "queries and keys have changed places: rows of the weights must be queries, so query @ key.mT.",
        ),
        Mistake(
            _softmax_over_queries,
            "the softmax ran over the queries: the columns of the weights sum to 1, and the rows should.",
        ),
        Mistake(
            partial(_softmax_over_queries, dim=0),
            "the softmax ran over the sentences of the batch, dim=0: it has to run over the keys, dim=-1.",
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: (
                _attention(x @ w_q, x @ w_k, x @ w_v, w_q.shape[-1])[0],
                (x @ w_q) @ (x @ w_k).mT / w_q.shape[-1] ** 0.5,
            ),
            "the output is right, but you returned the scores beside it; return the weights, after the softmax.",
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x, w_q.shape[-1]),
            "the weights were applied to the hidden states: project them with w_v to values first.",
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x @ w_v, w_q.shape[-1])[0],
            "you returned the output alone; return the output and the weights.",
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attention(x @ w_q, x @ w_k, x @ w_v, w_q.shape[-1])[::-1],
            "output and weights have changed places: return the output first.",
        ),
    ],
)


def _sharp_map(matrices, num_tokens: int) -> Tensor:
    """Where the head that these matrices make, on one-hot positions, has a weight above 0.99; without token 0."""
    pair = isinstance(matrices, tuple | list) and len(matrices) == 2
    if not pair or not all(isinstance(matrix, Tensor) for matrix in matrices):
        given = f"{len(matrices)} results" if isinstance(matrices, tuple | list) else f"one {type(matrices).__name__}"
        raise UnreadableError(f"Return w_q and w_k, two tensors; you returned {given}.")
    w_q, w_k = matrices
    if not list(w_q.shape) == list(w_k.shape) == [num_tokens, num_tokens]:
        raise UnreadableError(
            f"w_q has shape {list(w_q.shape)} and w_k {list(w_k.shape)}, expected [{num_tokens}, {num_tokens}] twice."
        )
    return ((w_q @ w_k.mT / num_tokens**0.5).softmax(dim=-1) > 0.99)[1:]


def _shifted(num_tokens: int, steps: int, strength: float = 100.0) -> tuple[Tensor, Tensor]:
    keys = torch.eye(num_tokens)
    return strength * keys.roll(steps, dims=0), keys


def _next_token(num_tokens: int) -> tuple[Tensor, Tensor]:
    """The last token has no next one: its scores are all 0."""
    return 100 * torch.eye(num_tokens).roll(-1, dims=0).triu(), torch.eye(num_tokens)


check_previous_token = Exercise(
    right=lambda num_tokens: _shifted(num_tokens, 1),
    toys=lambda draw: [(5,), (8,)],
    read=_sharp_map,
    compared="The map of weights above 0.99, for all tokens but the first,",
    mistakes=[
        Mistake(lambda n: _shifted(n, -1), "every token attends to the token after it, not to the one before."),
        Mistake(_next_token, "every token but the last attends to the token after it, not to the one before."),
        Mistake(lambda n: _shifted(n, 0), "every token attends to itself, not to the one before it."),
        Mistake(
            lambda n: _shifted(n, 1, strength=0.0),
            "no weight exceeds 0.99: the differences between the scores are too small, so make w_q or w_k larger.",
        ),
    ],
)
