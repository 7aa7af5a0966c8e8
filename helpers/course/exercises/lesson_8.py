"""Checks of lesson 8's exercises."""

from functools import partial

import torch
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, random_tensor


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


def _lora_rank(prefix_length, num_heads, d_kv, d_model, *, key_and_value=2, matrices=2, sides=None) -> int:
    """`sides`: the sum of a matrix's two sides, made from the inner width and d_model."""
    inner_dim = num_heads * d_kv
    sides = inner_dim + d_model if sides is None else sides(inner_dim, d_model)
    return max(1, round(key_and_value * prefix_length * inner_dim / (matrices * sides)))


check_lora_rank = Exercise(
    right=_lora_rank,
    toys=lambda draw: [(5, 4, 48, 128), (20, 8, 64, 512), (23, 6, 64, 512), (30, 32, 128, 1024), (1, 2, 8, 64)],
    examples="models",
    mistakes=[
        Mistake(
            partial(_lora_rank, key_and_value=1),
            "half of the prefix is missing: a slot is a key and a value.",
        ),
        Mistake(
            partial(_lora_rank, matrices=1),
            "LoRA changes two matrices of each attention, q and v; one was counted.",
        ),
        Mistake(
            partial(_lora_rank, sides=lambda inner_dim, d_model: 2 * d_model),
            "the matrices were taken for d_model by d_model; they are d_model by num_heads * d_kv.",
        ),
        Mistake(
            partial(_lora_rank, sides=lambda inner_dim, d_model: inner_dim * d_model),
            "the whole matrix was counted: of rank r, LoRA trains r * (d_model + num_heads * d_kv) numbers for it.",
        ),
        Mistake(
            lambda prefix_length, num_heads, d_kv, d_model: max(
                1, prefix_length * num_heads * d_kv // (d_model + num_heads * d_kv)
            ),
            "the rank was rounded down: take the nearest whole number.",
        ),
        Mistake(
            lambda prefix_length, num_heads, d_kv, d_model: round(
                prefix_length * num_heads * d_kv / (d_model + num_heads * d_kv)
            ),
            "a rank of 0 trains nothing: return at least 1.",
        ),
        Mistake(
            lambda prefix_length, num_heads, d_kv, d_model: (
                prefix_length * num_heads * d_kv / (d_model + num_heads * d_kv)
            ),
            "a rank is a whole number: round it, to at least 1.",
        ),
        Mistake(
            lambda prefix_length, num_heads, d_kv, d_model: max(1, round(prefix_length * d_kv / (d_model + d_kv))),
            "the width of one head was counted; the matrices hold all heads, num_heads * d_kv.",
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
