"""Checks of lesson 1's exercises."""

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, Prediction, random_tensor

check_alone = Prediction(
    right=[1.0, 0.25],
    because="a guest's own vector holds its name, its wish and its gift; of the others' gifts it holds nothing, so one "
    "blind guess in four is right.",
    mistakes=[
        (
            [0.25, 0.25],
            "a guest that wants its own gift needs nobody else: name, wish and gift are all in its own vector.",
        ),
        ([1.0, 0.0], "a guess among four gifts is right one time in four, even if it is blind."),
        ([0.25, 1.0], "the shares have changed places: guests that want their own gift come first."),
        ([1.0, 1 / 7], "the network names a gift, not a seat, and there are four gifts to choose from."),
        ([100, 25], "right, but in percent; write them as numbers from 0 to 1."),
        ([1.0, 1.0], "Cleo's vector does not say what Dora has brought, so the network can only guess."),
    ],
)

_NAMES_WANTED = ["Dora", "Emil", "Ada", "Ivo", "Cleo", "Jana", "Gus"]

check_right_map = Prediction(
    right=[1, 2, 5, 3, 0, 6, 4],
    because="each guest should attend to the one whose gift it wants. No model was needed to say so.",
    mistakes=[
        (
            [4, 0, 1, 3, 6, 2, 5],
            "these are the guests by whom each one is wanted. It is the query that asks: whom for?",
        ),
        (list(range(7)), "each guest would attend to itself and get its own gift, which only Ivo wants."),
        (_NAMES_WANTED, "the right guests; now write down the seat of each, as the map's columns are seats."),
        ([2, 3, 6, 4, 1, 7, 5], "right, but counted from 1; the first seat is seat 0."),
        ([3, 4, 0, 8, 2, 9, 6], "these are places in NAMES; the map's columns are the seats at this table, 0 to 6."),
    ],
    hints=[
        f"Look at row {seat}: whom does {name} want, and where does that guest sit?"
        for seat, name in enumerate(["Cleo", "Dora", "Emil", "Ivo", "Gus", "Ada", "Jana"])
    ],
)

check_crooked_rows = Prediction(
    right=[3, 0],
    because="each column of this map sums to 1, and a guest's row collects a 1 from everybody who wants its gift.",
    mistakes=[
        (
            [1, 1],
            "so it should be, and so it is in a right head. Here the softmax runs down the columns, not along rows.",
        ),
        ([0, 3], "the two have changed places: Dora's gift is wanted by three, Emil's by nobody."),
        ([3 / 7, 0], "nothing is divided by the number of guests: each of the three has a whole 1 for its column."),
        ([3, 1], "nobody wants Emil's gift, so no column has its weight in Emil's row."),
    ],
)


# One query


def _mix(scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(dim=-1) @ values


check_one_query = Exercise(
    right=lambda query, keys, values: _mix(keys @ query, values),
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
            lambda query, keys, values: keys @ query @ values,
            "the values were weighted with the scores themselves: the softmax is missing.",
        ),
        Mistake(
            lambda query, keys, values: (keys @ query).softmax(dim=0),
            "you returned the weights; the output is the values, mixed with these weights.",
        ),
        Mistake(
            lambda query, keys, values: (keys @ query).softmax(dim=0)[:, None] * values,
            "each value has its weight; now add them up, over the keys: one vector comes out.",
        ),
        Mistake(
            lambda query, keys, values: keys @ query,
            "you returned the scores; the softmax and the mixing of the values are still to come.",
        ),
        Mistake(
            lambda query, keys, values: (keys @ query).exp() @ values,
            "the exponentials were not divided by their sum, so the weights do not add up to 1.",
        ),
        Mistake(
            lambda query, keys, values: keys @ query / (keys @ query).sum() @ values,
            "the scores were divided by their sum; the softmax takes the exponential of each first.",
        ),
        Mistake(
            lambda query, keys, values: _mix((keys * query).mean(dim=-1), values),
            "a dot product adds up the products; you took their mean.",
        ),
        Mistake(
            lambda query, keys, values: (keys * query).softmax(dim=-1).sum(dim=-1) @ values,
            "the softmax ran over the entries of each product. Add them up first: one score for each key.",
        ),
        Mistake(
            lambda query, keys, values: _mix(keys @ query / len(query) ** 0.5, values),
            "the scores were divided by the square root of head_dim. Models do that, and so will we, later in this "
            "lesson; here the plain dot product is wanted.",
        ),
        Mistake(
            lambda query, keys, values: _mix(keys @ query, keys),
            "you mixed the keys; they only decide the weights. It is the values that are handed over.",
        ),
        Mistake(
            lambda query, keys, values: values[(keys @ query).argmax()],
            "you took the value of the best key alone; every value counts, with its weight.",
        ),
        Mistake(
            lambda query, keys, values: values.mean(dim=0),
            "every value counts the same, whatever the query asks for: weight them with the softmax of the scores.",
        ),
    ],
)


# All queries


def _attend(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores.softmax(dim=-1)
    return weights @ value, weights


def _softmax_along(dim: int, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores.softmax(dim=dim)
    return weights @ value, weights


def _of_projections(attention: Callable) -> Callable:
    """An answer of the form that the exercises ask for, from a function of query, key and value."""
    return lambda x, w_q, w_k, w_v: attention(x @ w_q, x @ w_k, x @ w_v)


def _toys(draw: torch.Generator) -> list[tuple]:
    return [
        (
            random_tensor(draw, batch, seq, model_dim),
            *(random_tensor(draw, model_dim, size) for size in (head_dim, head_dim, value_dim)),
        )
        for batch, seq, model_dim, head_dim, value_dim in [(2, 5, 7, 3, 4), (3, 4, 6, 9, 6)]
    ]


def _slips(root: Callable[[Tensor], float]) -> list[Mistake]:
    """What goes wrong whether scores are divided or not; `root` is what they are divided by, made from the query."""

    def slip(attention: Callable, sentence: str) -> Mistake:
        return Mistake(_of_projections(attention), sentence)

    return [
        slip(
            lambda q, k, v: _attend(k @ q.mT / root(q), v),
            "queries and keys have changed places. The query comes from w_q, the key from w_k, and rows of the weights "
            "are queries: query @ key.mT.",
        ),
        slip(
            lambda q, k, v: _softmax_along(-2, q @ k.mT / root(q), v),
            "the softmax ran over the queries: the columns of the weights sum to 1, and the rows should.",
        ),
        slip(
            lambda q, k, v: _softmax_along(0, q @ k.mT / root(q), v),
            "the softmax ran over the tables of the batch, dim=0: it has to run over the keys, dim=-1.",
        ),
        slip(
            lambda q, k, v: (q @ k.mT / root(q) @ v, q @ k.mT / root(q)),
            "the softmax is missing: the values were weighted with the scores themselves.",
        ),
        slip(
            lambda q, k, v: (_attend(q @ k.mT / root(q), v)[0], q @ k.mT / root(q)),
            "the output is right, but you returned the scores beside it; return the weights, after the softmax.",
        ),
        slip(
            lambda q, k, v: _attend(q @ q.mT / root(q), v),
            "the queries were held against the queries: the second factor is key.mT.",
        ),
        slip(
            lambda q, k, v: _attend(k @ k.mT / root(k), v),
            "the keys were held against the keys: the first factor is query.",
        ),
        slip(
            lambda q, k, v: (_attend(q @ k.mT / root(q), v)[1].mT @ v, _attend(q @ k.mT / root(q), v)[1]),
            "the weights are right, but were transposed before they met the values: weights @ value.",
        ),
        slip(
            lambda q, k, v: _attend(q @ k / root(q), v),
            "the shapes do not fit: rows meet columns in a product, so the keys have to be turned round, key.mT.",
        ),
        slip(
            lambda q, k, v: _attend(q @ k.permute(2, 1, 0) / root(q), v),  # what key.T is, for now: it warns
            "key.T turns all three axes round, the batch too. Write key.mT, which swaps the last two.",
        ),
        Mistake(
            lambda x, w_q, w_k, w_v: _attend((x @ w_q) @ (x @ w_k).mT / root(x @ w_q), x),
            "the weights were applied to the hidden states: project them with w_v to values first.",
        ),
        slip(
            lambda q, k, v: _attend(q @ k.mT / root(q), v)[0],
            "you returned the output alone; return the output and the weights.",
        ),
        slip(
            lambda q, k, v: _attend(q @ k.mT / root(q), v)[::-1],
            "output and weights have changed places: return the output first.",
        ),
    ]


def _one(query: Tensor) -> float:
    return 1.0


def _root(query: Tensor) -> float:
    return query.shape[-1] ** 0.5


check_attend = Exercise(
    right=_of_projections(lambda q, k, v: _attend(q @ k.mT, v)),
    toys=_toys,
    mistakes=[
        Mistake(
            _of_projections(lambda q, k, v: _softmax_along(1, k @ q.mT, v)),
            "two slips at once: queries and keys have changed places, and the softmax runs along axis 1 instead of the "
            "last.",
        ),
        *_slips(_one),
        Mistake(
            _of_projections(lambda q, k, v: _attend(q @ k.mT / _root(q), v)),
            "the scores were divided by the square root of head_dim. Models do that, and so will we, later in this "
            "lesson; here the plain product is wanted.",
        ),
    ],
)

check_mended = Exercise(
    right=_of_projections(lambda q, k, v: _attend(q @ k.mT, v)),
    toys=_toys,
    mistakes=[
        Mistake(
            _of_projections(lambda q, k, v: _softmax_along(1, k @ q.mT, v)),
            "this is still the crooked head.",
        ),
        Mistake(
            _of_projections(lambda q, k, v: _attend(k @ q.mT, v)),
            "each row sums to 1 now, and it is the wrong row: it holds what guest i, as a key, is worth to the others. "
            "Look at the product.",
        ),
        Mistake(
            _of_projections(lambda q, k, v: _softmax_along(1, q @ k.mT, v)),
            "rows are queries now, and they still do not sum to 1: along which axis does the softmax run?",
        ),
        Mistake(
            _of_projections(
                lambda q, k, v: (_softmax_along(1, k @ q.mT, v)[1].mT @ v, _softmax_along(1, k @ q.mT, v)[1])
            ),
            "the output is right: transposing the weights undoes both slips at once. But you returned the crooked "
            "weights, with keys as rows.",
        ),
        *_slips(_one)[2:],  # the first two have sentences of their own above
    ],
)


def _divided_by(number: Callable) -> Callable:
    """The right answer but for the number under the root, made from hidden states, w_q and w_v."""
    return lambda x, w_q, w_k, w_v: _attend((x @ w_q) @ (x @ w_k).mT / number(x, w_q, w_v) ** 0.5, x @ w_v)


def _wrong_root(number: Callable, name: str) -> Mistake:
    return Mistake(
        _divided_by(number),
        lambda x, w_q, w_k, w_v: (
            f"the scores were divided by the square root of {name}, {number(x, w_q, w_v)}; a dot product adds head_dim "
            f"terms, here {w_q.shape[-1]}."
        ),
    )


check_self_attention = Exercise(
    right=_divided_by(lambda x, w_q, w_v: w_q.shape[-1]),
    toys=_toys,
    mistakes=[
        Mistake(_divided_by(lambda x, w_q, w_v: 1), "the scores were not divided: this is the head from before."),
        Mistake(
            _divided_by(lambda x, w_q, w_v: w_q.shape[-1] ** 2),
            "the scores were divided by head_dim. Look again at the spread: four times the width doubles it.",
        ),
        Mistake(
            _divided_by(lambda x, w_q, w_v: 1 / w_q.shape[-1]),
            "the scores were multiplied by the square root of head_dim; they should become smaller.",
        ),
        _wrong_root(lambda x, w_q, w_v: x.shape[-1], "model_dim"),
        _wrong_root(lambda x, w_q, w_v: x.shape[1], "the number of guests"),
        _wrong_root(lambda x, w_q, w_v: w_v.shape[-1], "value_dim"),
        Mistake(
            _of_projections(lambda q, k, v: _attend(q @ k.mT / (q @ k.mT).std(), v)),
            "the scores were divided by their measured spread, so that each table's weights depend on the other tables "
            "of the batch. Divide by a number that depends on the width alone.",
        ),
        Mistake(
            _of_projections(lambda q, k, v: tuple(each / _root(q) for each in _attend(q @ k.mT, v))),
            "the weights were divided, after the softmax, and no longer sum to 1: divide the scores, before it.",
        ),
        Mistake(
            _of_projections(lambda q, k, v: _attend(q @ k.mT / 4, v)),
            "the scores were divided by 4, which is right for a head_dim of 16 alone.",
        ),
        Mistake(
            _of_projections(lambda q, k, v: _attend(q @ k.mT / 16, v)),
            "the scores were divided by 16, which is right for a head_dim of 256 alone.",
        ),
        *_slips(_root),
    ],
)
