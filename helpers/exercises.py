"""Checks of the lessons' exercises. Each prints one sentence; for a wrong answer, one that names the mistake."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NOT_DONE, WRONG, CORRECT = "not done yet", "not right yet", "correct"


@dataclass(frozen=True)
class Verdict:
    state: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.state[0].upper()}{self.state[1:]}: {self.sentence}"


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that learners give, and the sentence that names it: a text, or made from a toy's arguments."""

    answer: Callable
    sentence: str | Callable[..., str]


@dataclass(frozen=True)
class Exercise:
    """Compares an answer with the right one on toys, and recognises mistakes by computing them too.

    Args:
        right: the right answer, called with the arguments of a toy.
        toys: given a generator, the arguments for each comparison; sizes all different, so that no swap of axes
            goes unseen, and float64.
        mistakes: what learners get wrong. One is recognised if it agrees with the answer on every toy.
        read: what is compared: made from the answer's result and the toy's arguments. None compares the result, a
            tensor, a number or a tuple of them.
    """

    right: Callable
    toys: Callable[[torch.Generator], Sequence[tuple]]
    mistakes: Sequence[Mistake] = ()
    read: Callable[..., Any] | None = None

    def __call__(self, answer: Callable) -> None:
        print(self.judge(answer))

    def judge(self, answer: Callable) -> Verdict:
        toys = list(self.toys(torch.Generator().manual_seed(0)))
        outcomes = [self._outcome(answer, toy) for toy in toys]
        if any(outcome.result is None and outcome.error in (None, "NotImplementedError") for outcome in outcomes):
            return Verdict(NOT_DONE, f"fill in {_name(answer)} and run this cell again.")
        differences = [
            (_difference(outcome, self._outcome(self.right, toy)), toy)
            for outcome, toy in zip(outcomes, toys, strict=True)
        ]
        differences = [(difference, toy) for difference, toy in differences if difference]
        if not differences:
            return Verdict(CORRECT, f"{_name(answer)} gives the right result on {len(toys)} toys of different sizes.")
        difference, toy = differences[0]
        for mistake in self.mistakes:
            wrong = [self._outcome(mistake.answer, toy) for toy in toys]
            if not any(map(_difference, outcomes, wrong)):
                sentence = mistake.sentence if isinstance(mistake.sentence, str) else mistake.sentence(*toy)
                return Verdict(WRONG, sentence)
        return Verdict(WRONG, f"{difference} The arguments were {_described(toy)}.")

    def _outcome(self, answer: Callable, toy: tuple) -> "_Outcome":
        # Each call gets its own copies: an answer may write into its arguments.
        given = [argument.clone() if isinstance(argument, Tensor) else argument for argument in toy]
        try:
            result = answer(*given)
            if result is not None and self.read is not None:
                result = self.read(result, *toy)
        except Exception as error:  # whatever the reader's code raises is what the sentence says
            return _Outcome(error=type(error).__name__, message=str(error).partition("\n")[0])
        return _Outcome(result)


@dataclass(frozen=True)
class _Outcome:
    """What a call gave: a result, or an error."""

    result: Any = None
    error: str | None = None
    message: str = ""


def _difference(got: _Outcome, wanted: _Outcome) -> str:
    """One sentence, or an empty string if there is no difference."""
    if got.error is not None:
        same = (got.error, got.message) == (wanted.error, wanted.message)
        return "" if same else f"Your code raised {got.error}: {got.message.rstrip('.')}."
    if wanted.error is not None:
        return f"Expected {wanted.error}: {wanted.message.rstrip('.')}."
    return _result_difference(got.result, wanted.result, "Your output")


def _result_difference(got, wanted, name: str) -> str:
    if isinstance(wanted, tuple):
        if not isinstance(got, tuple | list) or len(got) != len(wanted):
            given = f"{len(got)}" if isinstance(got, tuple | list) else f"one {type(got).__name__}"
            return f"{name} should be {len(wanted)} results, and is {given}."
        parts = [_result_difference(*pair, f"{name} {i}") for i, pair in enumerate(zip(got, wanted, strict=True))]
        return next(filter(None, parts), "")
    if not isinstance(wanted, Tensor):
        equal = type(got) is type(wanted) and (got == wanted)
        return "" if equal else f"{name} is {got!r}, expected {wanted!r}."
    if not isinstance(got, Tensor):
        return f"{name} is a {type(got).__name__}, expected a tensor of shape {list(wanted.shape)}."
    if got.shape != wanted.shape:
        return f"{name} has shape {list(got.shape)}, expected {list(wanted.shape)}."
    if (got.dtype == torch.bool) != (wanted.dtype == torch.bool):
        return f"{name} has dtype {got.dtype}, expected {wanted.dtype}."
    got, wanted = got.detach().double(), wanted.detach().double()
    # Also right: an answer that went through float32.
    differs = ~torch.isclose(got, wanted, rtol=1e-4, atol=1e-5)
    if not differs.any():
        return ""
    if torch.allclose(got.flatten().sort().values, wanted.flatten().sort().values, rtol=1e-4, atol=1e-5):
        return f"{name} holds the right numbers, {int(differs.sum())} of {differs.numel()} in the wrong places."
    place = differs.nonzero()[0].tolist()
    return (
        f"{name} has the right shape {list(wanted.shape)}, but {int(differs.sum())} of {differs.numel()} entries "
        f"are wrong: entry {place} is {got[tuple(place)]:.3f}, expected {wanted[tuple(place)]:.3f}."
    )


def _name(answer: Callable) -> str:
    return getattr(answer, "__name__", "your answer")


def _described(toy: tuple) -> str:
    return ", ".join(str(list(a.shape)) if isinstance(a, Tensor) else repr(a) for a in toy)


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# Lesson 1


def _softmax_mix(scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(dim=-1) @ values


check_one_query = Exercise(
    right=lambda query, keys, values: _softmax_mix(keys @ query / len(query) ** 0.5, values),
    toys=lambda draw: [
        (_random(draw, head_dim), _random(draw, num_keys, head_dim), _random(draw, num_keys, value_dim))
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
