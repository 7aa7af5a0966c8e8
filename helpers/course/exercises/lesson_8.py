"""Checks of lesson 8's exercises."""

import torch
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, Prediction, random_tensor

check_least_read = Prediction(
    right="2",
    because="a digit is in the source and is copied; the comma and the h of Donnerstag have to come from the slots.",
    mistakes=[
        (",", "where would the comma come from? The source has none."),
        ("h", "where would the h of Donnerstag or Mittwoch come from? The source has none there."),
    ],
)

check_weekday_site = Prediction(
    right="encoder",
    because="without its slots the weekday is wrong half of the time, and most of the rest is right.",
    mistakes=[
        ("decoder", "without the decoder's slots nothing is right, the weekday and all else."),
        ("cross", "without the slots of cross-attention nothing is right, the weekday and all else."),
    ],
)

check_site_alone = Prediction(
    right=["none", "most"],
    because="the slots of one training rely on each other; slots that were trained alone had nothing to rely on.",
    mistakes=[
        (["most", "most"], "they were trained together with the slots of the two other sites, which are gone now."),
        (["none", "none"], "alone from the start, they can learn to do without the others."),
        (["most", "none"], "exactly reversed: which of the two was trained under the conditions in which it is tried?"),
    ],
)

check_survives = Prediction(
    right=["no", "yes", "no"],
    because="a difference between means counts where the runs of the one hardly overlap those of the other.",
    mistakes=[
        (["yes", "yes", "yes"], "look at the single runs and not at the means: two of these overlap."),
        (["no", "no", "no"], "one of the three is clear: the worst run of the one is above the best of the other."),
        (["yes", "yes", "no"], "two slots and twenty: the best run of two is above the worst of twenty."),
        (["no", "yes", "yes"], "N(0, 1) and real activations: their ranges are nearly the same."),
    ],
)


def _content_weights(weights: Tensor, prefix_length: int) -> Tensor:
    content = weights[..., prefix_length:]
    return content / content.sum(dim=-1, keepdim=True)


check_content_weights = Exercise(
    right=_content_weights,
    toys=lambda draw: [
        (random_tensor(draw, batch, heads, queries, prefix + keys).mul(2).softmax(dim=-1), prefix)
        for batch, heads, queries, prefix, keys in [(2, 3, 5, 4, 6), (3, 2, 4, 1, 7)]
    ],
    mistakes=[
        Mistake(
            lambda weights, prefix_length: weights[..., prefix_length:],
            "the rows do not sum to one: divide by what is left of each.",
        ),
        Mistake(
            lambda weights, prefix_length: weights[..., prefix_length:].softmax(dim=-1),
            "these are weights, not scores: a second softmax flattens them. Divide each row by its sum.",
        ),
        Mistake(
            lambda weights, prefix_length: (
                weights[..., prefix_length:] / weights[..., :prefix_length].sum(dim=-1, keepdim=True)
            ),
            "this divides by the share of the prefix; divide by what is left, one minus that share.",
        ),
        Mistake(
            lambda weights, prefix_length: (
                weights[..., prefix_length:] / weights[..., prefix_length:].sum(dim=-2, keepdim=True)
            ),
            "the sum ran over the queries: each query shares out its own weight, over the keys.",
        ),
        Mistake(
            lambda weights, prefix_length: weights[..., prefix_length:] / weights[..., prefix_length:].sum(),
            "one sum was taken over everything: each row has its own.",
        ),
        Mistake(
            lambda weights, prefix_length: (
                weights[..., prefix_length:] / weights[..., prefix_length:].amax(dim=-1, keepdim=True)
            ),
            "each row was divided by its largest weight; divide by its sum.",
        ),
        Mistake(
            lambda weights, prefix_length: _content_weights(weights.flip(-1), prefix_length).flip(-1),
            "the last columns were dropped: the prefix is in front.",
        ),
        Mistake(
            lambda weights, prefix_length: (
                weights[..., :prefix_length] / weights[..., :prefix_length].sum(dim=-1, keepdim=True)
            ),
            "these are the columns of the prefix; the text's are those behind it.",
        ),
    ],
)


def _honest_score(validation: Tensor, test: Tensor) -> tuple[int, Tensor, Tensor]:
    chosen = int(validation.mean(dim=1).argmax())
    return chosen, test[chosen].mean(), test[chosen].max() - test[chosen].min()


def _with_index_as_number(result, validation: Tensor, test: Tensor):
    """A row may be given as a number or as a tensor of one."""
    if isinstance(result, tuple | list) and result and isinstance(result[0], Tensor) and result[0].numel() == 1:
        return (int(result[0]), *result[1:])
    return result


def _score_of(chosen: Tensor, test: Tensor) -> tuple[int, Tensor, Tensor]:
    return int(chosen), test[int(chosen)].mean(), test[int(chosen)].max() - test[int(chosen)].min()


def _grid(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


check_honest_score = Exercise(
    right=_honest_score,
    # [rates, seeds]: the mean on validation prefers one rate, seed 0 another, the luckiest run or test a third.
    toys=lambda draw: [
        (
            _grid([0.3, 0.2, 0.1], [0.8, 0.4, 0.5], [0.7, 0.9, 0.6], [0.1, 0.7, 0.3]),
            _grid([0.2, 0.3, 0.1], [0.55, 0.4, 0.6], [0.5, 0.6, 0.6], [0.9, 0.5, 0.95]),
        ),
        (
            _grid([0.6, 0.1, 0.2, 0.3], [0.5, 0.6, 0.7, 0.8], [0.2, 0.9, 0.1, 0.1]),
            _grid([0.4, 0.1, 0.5, 0.2], [0.35, 0.3, 0.6, 0.5], [0.3, 0.8, 0.9, 0.7]),
        ),
    ],
    read=_with_index_as_number,
    examples="grids of scores",
    mistakes=[
        Mistake(
            lambda validation, test: _score_of(test[:, 0].argmax(), test),
            "the rate was chosen on the test scores: what is reported then has been looked for.",
        ),
        Mistake(
            lambda validation, test: _score_of(test.mean(dim=1).argmax(), test),
            "the rate was chosen on the test scores: what is reported then has been looked for.",
        ),
        Mistake(
            lambda validation, test: _score_of(validation[:, 0].argmax(), test),
            "the rate was chosen with seed 0 alone: take the mean of each row, over all seeds.",
        ),
        Mistake(
            lambda validation, test: _score_of(validation.max(dim=1).values.argmax(), test),
            "the rate of the luckiest run was chosen: take the mean of each row, over all seeds.",
        ),
        Mistake(
            lambda validation, test: _score_of(validation.mean(dim=1).argmax(), validation),
            "these are validation scores: they were used for choosing, so report those of the test.",
        ),
        Mistake(
            lambda validation, test: (
                *_honest_score(validation, test)[:1],
                test[validation.mean(dim=1).argmax()].max(),
                _honest_score(validation, test)[2],
            ),
            "the best seed was reported; report the mean of all seeds.",
        ),
        Mistake(
            lambda validation, test: (
                *_honest_score(validation, test)[:1],
                test[validation.mean(dim=1).argmax(), 0],
                _honest_score(validation, test)[2],
            ),
            "seed 0 alone was reported: report the mean of all seeds.",
        ),
        Mistake(
            lambda validation, test: (
                *_honest_score(validation, test)[:2],
                test[validation.mean(dim=1).argmax()].std(),
            ),
            "the spread asked for is the largest minus the smallest, not the standard deviation.",
        ),
        Mistake(
            lambda validation, test: (*_honest_score(validation, test)[:2], test.max() - test.min()),
            "the spread was taken over all rates: take it over the seeds of the chosen one.",
        ),
    ],
)
