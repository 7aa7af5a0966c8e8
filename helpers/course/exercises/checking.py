"""Checks of the lessons' exercises. Each prints one sentence; for a wrong answer, one that names the mistake."""

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import EinopsError
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


class UnreadableError(Exception):
    """What `read` raises, with a whole sentence, if an answer's result is not of the form that it compares."""


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
        compared: what a sentence calls that which is compared.
        examples: what a sentence calls the toys.
    """

    right: Callable
    toys: Callable[[torch.Generator], Sequence[tuple]]
    mistakes: Sequence[Mistake] = ()
    read: Callable[..., Any] | None = None
    compared: str = "Your output"
    examples: str = "examples of different sizes"

    def __call__(self, answer: Callable) -> None:
        print(self.judge(answer))

    def or_ours(self, answer: Callable) -> Callable:
        """As a call, and gives the answer back if it is right, else the right one: the lesson goes on with either."""
        verdict = self.judge(answer)
        if verdict.state == CORRECT:
            print(f"{verdict} The lesson goes on with yours.")
            return answer
        print(f"{verdict} Until then the lesson goes on with ours.")
        return self.right

    def judge(self, answer: Callable) -> Verdict:
        toys = list(self.toys(torch.Generator().manual_seed(0)))
        outcomes = [self._outcome(answer, toy) for toy in toys]
        # torch raises NotImplementedError too, with a message: that one is an error of the answer.
        if any((outcome.error, outcome.message) == ("NotImplementedError", "") for outcome in outcomes):
            return Verdict(NOT_DONE, f"fill in {_name(answer)} and run this cell again.")
        if any(outcome.result is None and outcome.error is None for outcome in outcomes):
            return Verdict(NOT_DONE, f"{_name(answer)} returned None. Is a return missing?")
        differences = [
            (_difference(outcome, self._outcome(self.right, toy), self.compared), toy)
            for outcome, toy in zip(outcomes, toys, strict=True)
        ]
        differences = [(difference, toy) for difference, toy in differences if difference]
        if not differences:
            return Verdict(CORRECT, f"{_name(answer)} gives the right result on {len(toys)} {self.examples}.")
        difference, toy = differences[0]
        for mistake in self.mistakes:
            wrong = [self._outcome(mistake.answer, toy) for toy in toys]
            if not any(map(_difference, outcomes, wrong)):
                sentence = mistake.sentence if isinstance(mistake.sentence, str) else mistake.sentence(*toy)
                return Verdict(WRONG, sentence)
        return Verdict(WRONG, f"{difference} The arguments were {_described(toy, answer)}.")

    def _outcome(self, answer: Callable, toy: tuple) -> "Outcome":
        # Each call gets its own copies: an answer may write into its arguments.
        given = [argument.clone() if isinstance(argument, Tensor) else argument for argument in toy]
        try:
            result = answer(*given)
            if result is not None and self.read is not None:
                result = self.read(result, *toy)
        except UnreadableError as error:
            return Outcome(error="UnreadableError", message=str(error))
        except Exception as error:  # whatever the reader's code raises is what the sentence says
            return Outcome(error=type(error).__name__, message=_first_words(error))
        return Outcome(result)


@dataclass(frozen=True)
class Prediction:
    """Compares what a reader expects, a number or a list of them, with what comes out.

    Args:
        right: what comes out.
        because: why, in a whole sentence: said with a right prediction.
        mistakes: (a wrong prediction, the sentence that says what is wrong in it).
        hints: one for each entry of a list: said with a prediction that is wrong in this entry alone.
    """

    right: Any
    because: str
    mistakes: Sequence[tuple[Any, str]] = ()
    hints: Sequence[str] = ()

    def __call__(self, expected: Any) -> None:
        print(self.judge(expected))

    def judge(self, expected: Any) -> Verdict:
        if expected is ... or (isinstance(expected, list | tuple) and ... in expected):
            return Verdict(NOT_DONE, "put what you expect in the place of the three dots, and run this cell again.")
        expected = list(expected) if isinstance(expected, tuple | torch.Size) else expected
        for equal in (operator.eq, _nearly_equal):  # what is exactly a mistake is not nearly right
            if equal(expected, self.right):
                return Verdict(CORRECT, self.because)
            for wrong, sentence in self.mistakes:
                if equal(expected, wrong):
                    return Verdict(WRONG, sentence)
        if self.hints and isinstance(expected, list) and len(expected) == len(self.right):
            slips = [place for place, pair in enumerate(zip(expected, self.right, strict=True)) if pair[0] != pair[1]]
            if len(slips) == 1:
                return Verdict(WRONG, f"all but one are right. {self.hints[slips[0]]}")
        if isinstance(expected, str) and isinstance(self.right, int | float):
            return Verdict(WRONG, f"a number, please: {expected!r} cannot be compared with one.")
        return Verdict(WRONG, f"{expected} is not what comes out.")


def _nearly_equal(expected: Any, other: Any) -> bool:
    """A fraction may be rounded to two decimals; all else must be the same."""
    if isinstance(other, float) and isinstance(expected, int | float):
        return abs(expected - other) < 0.005
    if isinstance(other, list) and isinstance(expected, list):
        return len(expected) == len(other) and all(map(_nearly_equal, expected, other))
    return expected == other


@dataclass(frozen=True)
class Outcome:
    """What a call gave: a result, or an error."""

    result: Any = None
    error: str | None = None
    message: str = ""


_ADVICE = {  # on what einops refuses
    "not infer": ": it can find one length in a bracket, so give it the others",
    "anonymous": ": give each number a name and a length, as kv with kv=2",
}


def _first_words(error: Exception) -> str:
    """What an error says first; of einops, which quotes the pattern first and says last what is wrong, both."""
    lines = str(error).strip().splitlines() or [""]
    if not isinstance(error, EinopsError):
        return lines[0]
    advice = next((advice for words, advice in _ADVICE.items() if words in lines[-1]), "")
    return f"{lines[0].removesuffix('.')}: {lines[-1].strip().removesuffix('.')}{advice}"


def _difference(got: Outcome, wanted: Outcome, compared: str = "") -> str:
    """One sentence, or an empty string if there is no difference."""
    if got.error is not None:
        if (got.error, got.message) == (wanted.error, wanted.message):
            return ""
        if got.error == "UnreadableError":
            return got.message
        return f"Your code raised {got.error}: {got.message.rstrip('.')}."
    if wanted.error is not None:
        return f"Expected {wanted.error}: {wanted.message.rstrip('.')}."
    return _result_difference(got.result, wanted.result, compared)


def _result_difference(got, wanted, name: str) -> str:
    if isinstance(wanted, tuple):
        if _is_stacked(got, wanted):
            got = got.unbind()
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
    # Also right: an answer that went through float32. NaN equals NaN: a mistake that gives it is recognised by it.
    differs = ~torch.isclose(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    if not differs.any():
        return ""
    if torch.allclose(got.flatten().sort().values, wanted.flatten().sort().values, rtol=1e-4, atol=1e-5):
        return f"{name} holds the right numbers, {int(differs.sum())} of {differs.numel()} in the wrong places."
    place = differs.nonzero()[0].tolist()
    return (
        f"{name} has the right shape {list(wanted.shape)}, but {int(differs.sum())} of {differs.numel()} entries "
        f"are wrong: entry {place} is {got[tuple(place)]:.3f}, expected {wanted[tuple(place)]:.3f}."
    )


def _is_stacked(got, wanted: tuple) -> bool:
    """Whether `got` is one tensor that holds the results along its first axis: a pair, say, as `[2, ...]`."""
    return (
        isinstance(got, Tensor)
        and got.ndim > 0
        and len(got) == len(wanted)
        and all(isinstance(one, Tensor) and one.ndim == got.ndim - 1 for one in wanted)
    )


def _name(answer: Callable) -> str:
    return getattr(answer, "__name__", "your answer")


def _described(toy: tuple, answer: Callable) -> str:
    """The arguments, each with the name that the answer gives it."""
    try:
        parameters = inspect.signature(answer).parameters.values()
    except ValueError:  # a function written in C has no signature
        parameters = ()
    names = [f"{each.name} " for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(names) != len(toy):
        names = [""] * len(toy)
    return ", ".join(name + _description(argument) for name, argument in zip(names, toy, strict=True))


def _description(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return str(list(argument.shape))
    return getattr(argument, "__name__", type(argument).__name__) if callable(argument) else repr(argument)


def random_tensor(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
