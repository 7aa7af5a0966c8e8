"""Checks of the lessons' exercises. Each prints one sentence; for a wrong answer, one that names the mistake."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from helpers.attention import scaled_dot_product_attention
from helpers.heads import merge_heads, split_heads
from helpers.masks import causal_mask

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

    def _outcome(self, answer: Callable, toy: tuple) -> "_Outcome":
        # Each call gets its own copies: an answer may write into its arguments.
        given = [argument.clone() if isinstance(argument, Tensor) else argument for argument in toy]
        try:
            result = answer(*given)
            if result is not None and self.read is not None:
                result = self.read(result, *toy)
        except UnreadableError as error:
            return _Outcome(error="UnreadableError", message=str(error))
        except Exception as error:  # whatever the reader's code raises is what the sentence says
            return _Outcome(error=type(error).__name__, message=str(error).partition("\n")[0])
        return _Outcome(result)


@dataclass(frozen=True)
class _Outcome:
    """What a call gave: a result, or an error."""

    result: Any = None
    error: str | None = None
    message: str = ""


def _difference(got: _Outcome, wanted: _Outcome, compared: str = "") -> str:
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
    return argument.__name__ if callable(argument) else repr(argument)


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
            _random(draw, batch, seq, model_dim),
            *(_random(draw, model_dim, size) for size in (head_dim, head_dim, value_dim)),
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


# Lesson 2


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
    toys=lambda draw: [(_random(draw, 2, 5, 3 * 4), 3), (_random(draw, 1, 4, 2 * 3), 2), (_random(draw, 5, 3, 28), 7)],
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
    toys=lambda draw: [(_random(draw, 2, 3, 5, 4),), (_random(draw, 3, 2, 4, 5),)],
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
    toys=lambda draw: [(layer, _random(draw, 1, 5, 6)) for layer in _LAYERS],
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


# Lesson 3


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


def _split_with_view_alone(x: Tensor, num_heads: int) -> Tensor:
    return x.reshape(x.shape[0], num_heads, x.shape[1], -1)


def _merge_with_reshape_alone(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)


check_cross_attention = Exercise(
    right=_cross_attention,
    toys=lambda draw: [
        (
            _random(draw, batch, queries, model_dim),
            _random(draw, batch, keys, model_dim),
            *(_random(draw, heads * head_dim, model_dim) for _ in range(3)),
            _random(draw, model_dim, heads * head_dim),
            heads,
        )
        for batch, queries, keys, heads, head_dim, model_dim in [(2, 5, 7, 3, 4, 10), (4, 3, 6, 2, 5, 8)]
    ],
    mistakes=[
        Mistake(
            partial(_cross_attention, split=_split_with_view_alone),
            "heads were split with view alone: head 0 got whole tokens instead of a slice of every token's features.",
        ),
        Mistake(
            partial(_cross_attention, merge=_merge_with_reshape_alone),
            "heads were merged with reshape alone: one output row holds several tokens of the same head; heads and "
            "tokens have to change places first.",
        ),
        Mistake(
            partial(_cross_attention, split=_split_with_view_alone, merge=_merge_with_reshape_alone),
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
            *(_random(draw, batch, heads, new, head_dim) for _ in range(3)),
            *(_random(draw, batch, heads, past, head_dim) for _ in range(2)),
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


# Lesson 4


def _split_prefix(prefix: Tensor, num_heads: int, pattern: str) -> tuple[Tensor, Tensor]:
    key, value = rearrange(prefix, f"b p ({pattern}) -> kv b h p d", kv=2, h=num_heads)
    return key, value


check_split_prefix = Exercise(
    right=partial(_split_prefix, pattern="kv h d"),
    toys=lambda draw: [
        (_random(draw, batch, prefix, 2 * heads * head_dim), heads)
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
            lambda prefix, heads: tuple(_split_with_view_alone(half, heads) for half in prefix.chunk(2, dim=-1)),
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
            *(_random(draw, batch, heads, length, head_dim) for length in (queries, keys, keys, prefix, prefix)),
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
        tuple(_random(draw, batch, heads, length, head_dim) for length in (queries, keys, prefix))
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


# Lesson 5


def _unpack(flat: Tensor, num_layers: int, num_heads: int, row: str = "l kv h d", to: str = "l kv b h p d") -> Tensor:
    return rearrange(flat, f"b p ({row}) -> {to}", l=num_layers, kv=2, h=num_heads)


def _unpack_with_view_alone(flat: Tensor, num_layers: int, num_heads: int) -> Tensor:
    return flat.reshape(num_layers, 2, flat.shape[0], num_heads, flat.shape[1], -1)


def _unpack_with_shared_slices(flat: Tensor, num_layers: int, num_heads: int) -> Tensor:
    slices = rearrange(_unpack(flat, num_layers, num_heads), "l kv b h p d -> (l kv) b h p d")
    return torch.stack([part[:2] for part in torch.cat([slices, slices]).split(4)])


check_unpack_prefix = Exercise(
    right=_unpack,
    toys=lambda draw: [
        (_random(draw, batch, prefix, layers * 2 * heads * head_dim), layers, heads)
        for batch, prefix, layers, heads, head_dim in [(6, 3, 4, 2, 5), (1, 5, 6, 4, 3)]
    ],
    mistakes=[
        Mistake(
            partial(_unpack, row="kv l h d"),
            "a row was read as all keys, then all values: the layer comes first, (l kv h d).",
        ),
        Mistake(
            partial(_unpack, row="l h kv d"),
            "a layer's numbers were cut into heads before they were cut into key and value: (l kv h d).",
        ),
        Mistake(
            partial(_unpack, row="l kv d h"),
            "a head took every num_heads-th feature; a head owns neighbouring ones: (h d), not (d h).",
        ),
        Mistake(
            _unpack_with_view_alone,
            "this is view alone: no axis was moved, so that slots, sentences and layers are mixed.",
        ),
        Mistake(
            _unpack_with_shared_slices,
            "layers share slices: layer 1 got the key and value of layer 2, and half of the numbers reach no layer.",
        ),
        Mistake(
            partial(_unpack, to="l kv b p h d"),
            "the slots stand before the heads: the order is [layers, 2, batch, heads, prefix, head_dim].",
        ),
        Mistake(
            partial(_unpack, to="b l kv h p d"),
            "the batch stands in front: the layers come first, so that a loop gives each layer its pair.",
        ),
        Mistake(
            partial(_unpack, to="kv l b h p d"),
            "key and value stand before the layers: the layers come first, so that a loop gives each layer its pair.",
        ),
        Mistake(
            partial(_unpack, row="h l kv d"),
            "a row was cut into heads first: it is cut into layers first, and into heads last, (l kv h d).",
        ),
        Mistake(
            lambda *toy: _unpack(*toy).flip(1),
            "key and value are exchanged: in the row and in the result, the key comes first.",
        ),
    ],
)


def _prefix_size(prefix_length, num_layers, num_heads, head_dim, mid_dim, *, key_and_value=2, biases=True) -> int:
    inner_dim = num_heads * head_dim
    row_dim = num_layers * key_and_value * inner_dim
    if mid_dim is None:
        return prefix_length * row_dim
    mlp = inner_dim * mid_dim + mid_dim * row_dim + biases * (mid_dim + row_dim)
    return prefix_length * inner_dim + mlp


def _prefix_size_with_long_embedding(prefix_length, num_layers, num_heads, head_dim, mid_dim) -> int:
    row_dim = num_layers * 2 * num_heads * head_dim
    if mid_dim is None:
        return prefix_length * row_dim
    return prefix_length * row_dim + 2 * row_dim * mid_dim + mid_dim + row_dim


def _prefix_size_with_narrow_embedding(prefix_length, num_layers, num_heads, head_dim, mid_dim) -> int:
    row_dim = num_layers * 2 * num_heads * head_dim
    if mid_dim is None:
        return prefix_length * row_dim
    return prefix_length * mid_dim + mid_dim * mid_dim + mid_dim + mid_dim * row_dim + row_dim


check_prefix_size = Exercise(
    right=_prefix_size,
    toys=lambda draw: [(3, 4, 2, 5, None), (3, 4, 2, 5, 7), (20, 6, 8, 64, 512)],
    compared="Your number",
    mistakes=[
        Mistake(
            partial(_prefix_size, key_and_value=1),
            "the 2 for key and value is missing.",
        ),
        Mistake(
            partial(_prefix_size, biases=False),
            "the biases of the two linear layers are missing.",
        ),
        Mistake(
            lambda *sizes: _prefix_size(*sizes[:-1], None),
            "this is what is kept after folding: with mid_dim, the embedding and the MLP are trained.",
        ),
        Mistake(
            lambda *sizes: _prefix_size(*sizes) - (sizes[-1] is not None) * sizes[0] * sizes[2] * sizes[3],
            "the MLP is right, but the embedding that goes into it is trained too.",
        ),
        Mistake(
            lambda *sizes: _prefix_size(*sizes) + (sizes[-1] is not None) * _prefix_size(*sizes[:-1], None),
            "with mid_dim, the long rows are not parameters: the MLP makes them.",
        ),
        Mistake(
            _prefix_size_with_long_embedding,
            "with mid_dim, a row of the embedding has num_heads * head_dim numbers, and not those of all layers.",
        ),
        Mistake(
            lambda *sizes: _prefix_size(*sizes[:-1], None) + (sizes[-1] is not None) * _prefix_size(0, *sizes[1:]),
            "the MLP is right, but with mid_dim a row of the embedding has num_heads * head_dim numbers.",
        ),
        Mistake(
            _prefix_size_with_narrow_embedding,
            "the embedding and the MLP's input have num_heads * head_dim features; mid_dim lies between the layers.",
        ),
        Mistake(
            lambda *sizes: (
                _prefix_size(*sizes)
                if sizes[-1] is None
                else sizes[0] * (_prefix_size(0, *sizes[1:]) + sizes[2] * sizes[3])
            ),
            "the MLP was counted once for each slot: it is one MLP, whatever the prefix length.",
        ),
    ],
)


def _pack(key_values: Tensor, row: str = "l kv h d") -> Tensor:
    return rearrange(key_values, f"l kv 1 h p d -> p ({row})")


check_pack_prefix = Exercise(
    right=_pack,
    toys=lambda draw: [
        (_random(draw, layers, 2, 1, heads, prefix, head_dim),)
        for layers, heads, prefix, head_dim in [(4, 3, 6, 5), (3, 4, 5, 7)]
    ],
    mistakes=[
        Mistake(
            lambda key_values: key_values.reshape(key_values.shape[4], -1),
            "this is reshape alone: a row must hold one slot, so the prefix axis has to come to the front first.",
        ),
        Mistake(partial(_pack, row="kv l h d"), "the rows hold all keys, then all values: the layer comes first."),
        Mistake(partial(_pack, row="l kv d h"), "the features of all heads are interleaved: (h d), not (d h)."),
        Mistake(
            partial(_pack, row="l h kv d"),
            "key and value alternate head by head: a layer's whole key comes first, then its value.",
        ),
        Mistake(
            partial(_pack, row="h l kv d"),
            "each row begins with all of head 0: the layer comes first, then key or value, and then the head.",
        ),
        Mistake(
            lambda key_values: key_values.transpose(0, 4).reshape(key_values.shape[4], -1),
            "the prefix axis changed places with the layers': move it to the front and leave the others in order.",
        ),
        Mistake(
            lambda key_values: _pack(key_values).T,
            "rows and columns are exchanged: a row for each slot.",
        ),
        Mistake(
            lambda key_values: _pack(key_values)[None],
            "the numbers are right, but there is a batch axis: the parameter is [prefix, row].",
        ),
    ],
)


# Lesson 6


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()


check_rms_norm = Exercise(
    right=_rms_norm,
    toys=lambda draw: [
        (_random(draw, batch, seq, model_dim), _random(draw, model_dim), eps)
        for batch, seq, model_dim, eps in [(2, 3, 5, 0.25), (4, 6, 7, 0.5)]
    ],
    mistakes=[
        Mistake(
            lambda x, weight, eps: F.layer_norm(x, weight.shape, weight, eps=eps),
            "this is LayerNorm: RMSNorm subtracts no mean.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).sum(dim=-1, keepdim=True) + eps).sqrt(),
            "the squares were summed; RMSNorm takes their mean.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / x.norm(dim=-1, keepdim=True),
            "each token was divided by its length: take the mean of the squares, not their sum, and add eps.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.var(dim=-1, keepdim=True, correction=0) + eps).sqrt(),
            "this divides by the standard deviation, which subtracts the mean first: RMSNorm subtracts none.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.std(dim=-1, keepdim=True) + eps),
            "this divides by the standard deviation, which subtracts the mean first: RMSNorm subtracts none.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + eps),
            "the root is missing: the hidden states were divided by the mean square.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).mean(dim=-1, keepdim=True).sqrt() + eps),
            "eps was added behind the root; it belongs under it.",
        ),
        Mistake(
            lambda x, weight, eps: _rms_norm(x, weight, 0.0),
            "eps is missing under the root.",
        ),
        Mistake(
            lambda x, weight, eps: _rms_norm(x, torch.ones_like(weight), eps),
            "the weight is missing.",
        ),
        Mistake(
            lambda x, weight, eps: weight + _rms_norm(x, torch.ones_like(weight), eps),
            "the weight was added; it multiplies.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).mean() + eps).sqrt(),
            "one mean was taken over everything: each token has its own, over its features.",
        ),
        Mistake(
            lambda x, weight, eps: weight * x / (x.pow(2).mean(dim=1, keepdim=True) + eps).sqrt(),
            "the mean ran over the tokens: it runs over the features, the last axis.",
        ),
    ],
)


def _cached_bias(table: Tensor, num_cached: int, distance: Callable[[Tensor, int], Tensor]) -> Tensor:
    return rearrange(table[distance(torch.arange(num_cached + 1), num_cached)], "k h -> 1 h 1 k")


check_cached_bias = Exercise(
    right=partial(_cached_bias, distance=lambda keys, cached: cached - keys),
    toys=lambda draw: [(_random(draw, 9, 3), 4), (_random(draw, 12, 5), 6)],
    mistakes=[
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: keys),
            "the row is reversed: the last key is the new token itself, at distance 0.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: torch.zeros_like(keys)),
            "this is the row of a token at position 0: the new token stands behind the cached ones.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: cached + 1 - keys),
            "all distances are one too large: the new token stands at position num_cached, not at num_cached + 1.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: cached - 1 - keys),
            "all distances are one too small, and the last is -1: the new token stands at position num_cached.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: keys - cached),
            "the distances have the wrong sign, so that rows were read from the table's end: num_cached - k.",
        ),
        Mistake(
            partial(_cached_bias, distance=lambda keys, cached: -keys),
            "this is the row of a token at position 0: the new token stands behind the cached ones.",
        ),
        Mistake(
            lambda table, num_cached: rearrange(table[num_cached - torch.arange(num_cached)], "k h -> 1 h 1 k"),
            "the new token's own key is missing: there are num_cached + 1 keys.",
        ),
        Mistake(
            lambda table, num_cached: table[num_cached - torch.arange(num_cached + 1)].T,
            "the numbers are right, but two axes are missing: return [1, heads, 1, num_cached + 1].",
        ),
        Mistake(
            lambda table, num_cached: table[num_cached - torch.arange(num_cached + 1)],
            "the heads come before the keys: return [1, heads, 1, num_cached + 1].",
        ),
    ],
)


def _t5_prefix_attention(
    query, key, value, bias, mask, prefix_key, prefix_value, *, scale=1.0, columns=None, visible=True
) -> Tensor:
    """`columns` makes the prefix columns of the bias from the bias; None means zeros."""
    length = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(len(value), -1, -1, -1), value], dim=2)
    new = torch.zeros_like(bias[..., :1]) if columns is None else columns(bias)
    bias = torch.cat([new.expand(-1, -1, -1, length), bias], dim=-1)
    mask = F.pad(mask, (length, 0), value=visible)
    return scaled_dot_product_attention(query, key, value, mask, bias, scale=scale)[0]


def _t5_prefix_behind(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    length = prefix_key.shape[2]
    key = torch.cat([key, prefix_key.expand(len(key), -1, -1, -1)], dim=2)
    value = torch.cat([value, prefix_value.expand(len(value), -1, -1, -1)], dim=2)
    mask, bias = F.pad(mask, (length, 0), value=True), F.pad(bias, (length, 0))
    return scaled_dot_product_attention(query, key, value, mask, bias, scale=1.0)[0]


def _t5_bias_behind_the_softmax(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    toy = query, key, value, torch.zeros_like(bias), mask, prefix_key, prefix_value
    return _t5_prefix_attention(*toy) + bias @ value


def _t5_prefix_with_a_new_triangle(query, key, value, bias, mask, prefix_key, prefix_value) -> Tensor:
    length = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(len(value), -1, -1, -1), value], dim=2)
    mask = torch.ones(query.shape[2], key.shape[2]).tril().bool()
    return scaled_dot_product_attention(query, key, value, mask, F.pad(bias, (length, 0)), scale=1.0)[0]


def _t5_prefix_padded_behind(query, key, value, bias, mask, prefix_key, prefix_value, *, both: bool) -> Tensor:
    length = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(len(key), -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(len(value), -1, -1, -1), value], dim=2)
    mask = F.pad(mask, (0, length) if both else (length, 0), value=True)
    return scaled_dot_product_attention(query, key, value, mask, F.pad(bias, (0, length)), scale=1.0)[0]


check_t5_prefix_attention = Exercise(
    right=_t5_prefix_attention,
    toys=lambda draw: [
        (
            *(_random(draw, batch, heads, length, head_dim) for length in (queries, keys, keys)),
            _random(draw, 1, heads, queries, keys),
            causal_mask(queries, keys),
            *(_random(draw, 1, heads, prefix, head_dim) for _ in range(2)),
        )
        for batch, heads, queries, keys, prefix, head_dim in [(2, 3, 5, 6, 4, 7), (3, 4, 2, 5, 3, 6)]
    ],
    mistakes=[
        Mistake(
            lambda query, *others: _t5_prefix_attention(query, *others, scale=query.shape[-1] ** -0.5),
            "the scores were divided by the square root of head_dim: T5 does not.",
        ),
        Mistake(
            lambda query, key, value, bias, *others: _t5_prefix_attention(
                query, key, value, torch.zeros_like(bias), *others
            ),
            "the bias was not added to the scores.",
        ),
        Mistake(
            partial(_t5_prefix_padded_behind, both=False),
            "the bias grew at the other end than the keys: its zeros belong in front.",
        ),
        Mistake(
            partial(_t5_prefix_padded_behind, both=True),
            "bias and mask grew at the other end than the keys: the prefix is in front, so are its columns.",
        ),
        Mistake(
            partial(_t5_prefix_attention, columns=lambda bias: bias[..., :1]),
            "the prefix got the bias of the first key: its columns are 0.",
        ),
        Mistake(
            partial(_t5_prefix_attention, columns=lambda bias: torch.ones_like(bias[..., :1])),
            "the prefix's columns of the bias are 1, which favours it: they are 0.",
        ),
        Mistake(
            partial(_t5_prefix_attention, visible=False),
            "this is the output without a prefix: it was not joined, or its columns of the mask are False.",
        ),
        Mistake(
            lambda query, key, value, bias, mask, *prefix: _t5_prefix_attention(
                query, key, value, bias, torch.ones_like(mask), *prefix
            ),
            "the mask was dropped: every query sees every key.",
        ),
        Mistake(
            lambda *toy: _t5_prefix_attention(*toy[:-1], toy[-2]),
            "the prefix's keys serve as its values too: prefix_value is not used.",
        ),
        Mistake(
            lambda *toy: _t5_prefix_attention(*toy[:-2], toy[-1], toy[-2]),
            "prefix_key and prefix_value are exchanged.",
        ),
        Mistake(
            _t5_prefix_behind,
            "the prefix was joined behind, but the new columns of bias and mask are in front.",
        ),
        Mistake(
            _t5_bias_behind_the_softmax,
            "the bias was added to the shares: it is added to the scores, before the softmax.",
        ),
        Mistake(
            _t5_prefix_with_a_new_triangle,
            "a new triangle begins over the prefix: let the given mask grow in front, by columns of True.",
        ),
    ],
)


# Lesson 7


def _teacher_forcing(target_ids: Tensor, attention_mask: Tensor, start_id: int) -> tuple[Tensor, Tensor]:
    decoder_input_ids = F.pad(target_ids[:, :-1], (1, 0), value=start_id)
    return decoder_input_ids, target_ids.masked_fill(attention_mask == 0, -100)


def _behind_start(ids: Tensor, start_id: int) -> Tensor:
    return F.pad(ids[:, :-1], (1, 0), value=start_id)


def _padded_targets(draw: torch.Generator, batch: int, target: int, start_id: int) -> tuple[Tensor, Tensor, int]:
    """Targets of several lengths, padded with 0; no id is the start id."""
    lengths = target - torch.arange(batch) % (target - 2)
    attention_mask = (torch.arange(target) < lengths[:, None]).long()
    return torch.randint(10, 50, (batch, target), generator=draw) * attention_mask, attention_mask, start_id


check_teacher_forcing = Exercise(
    right=_teacher_forcing,
    toys=lambda draw: [_padded_targets(draw, 3, 5, start_id=2), _padded_targets(draw, 4, 7, start_id=3)],
    mistakes=[
        Mistake(
            lambda ids, mask, start: (ids, ids.masked_fill(mask == 0, -100)),
            "the decoder reads at each position the very token that it has to write there, so that it learns to copy "
            "its input: shift it right, behind the start token.",
        ),
        Mistake(
            lambda ids, mask, start: (F.pad(ids[:, 1:], (0, 1)), ids.masked_fill(mask == 0, -100)),
            "the decoder's input was shifted to the left, so that it reads the token after the one it has to write.",
        ),
        Mistake(
            lambda ids, mask, start: (_behind_start(ids, start), ids),
            "padding counts in the loss: its labels must be -100.",
        ),
        Mistake(
            lambda ids, mask, start: (_behind_start(ids, start), ids.masked_fill(mask == 1, -100)),
            "the tokens are ignored and the padding counts: in the attention mask, 1 is a token.",
        ),
        Mistake(
            lambda ids, mask, start: (
                _behind_start(ids.masked_fill(mask == 0, -100), start),
                ids.masked_fill(mask == 0, -100),
            ),
            "the decoder's input holds -100, which is no token: shift the ids, not the labels.",
        ),
        Mistake(
            lambda ids, mask, start: (
                _behind_start(ids, start),
                _behind_start(ids.masked_fill(mask == 0, -100), start),
            ),
            "the labels were shifted too: at position 0 the decoder reads the start token and writes the first token.",
        ),
        Mistake(
            lambda ids, mask, start: (F.pad(ids, (1, 0), value=start), ids.masked_fill(mask == 0, -100)),
            "the decoder's input is one longer than the labels: its last token has nothing left to write.",
        ),
        Mistake(
            lambda ids, mask, start: (_behind_start(ids, 0), ids.masked_fill(mask == 0, -100)),
            "the decoder's input begins with 0 instead of start_id.",
        ),
        Mistake(
            lambda ids, mask, start: _teacher_forcing(ids, mask, start)[::-1],
            "the two are exchanged: return (decoder_input_ids, labels).",
        ),
    ],
)


def _training_bytes(base: int, prefix: int, number: int = 4, moments: int = 2) -> tuple[int, int, int]:
    return number * (base + prefix), number * prefix, number * moments * prefix


check_training_bytes = Exercise(
    right=_training_bytes,
    toys=lambda draw: [(1000, 30), (12_345, 678)],
    examples="pairs of sizes",
    mistakes=[
        Mistake(
            lambda base, prefix: (4 * (base + prefix), 4 * (base + prefix), 8 * (base + prefix)),
            "this is full fine-tuning: a frozen weight has neither a gradient nor moments.",
        ),
        Mistake(
            lambda base, prefix: (4 * (base + prefix), 4 * (base + prefix), 8 * prefix),
            "the frozen weights have no gradients.",
        ),
        Mistake(
            lambda base, prefix: (4 * (base + prefix), 4 * prefix, 8 * (base + prefix)),
            "the optimiser keeps moments for what it trains, the prefix alone.",
        ),
        Mistake(partial(_training_bytes, moments=1), "AdamW keeps two numbers for each that it trains, not one."),
        Mistake(
            partial(_training_bytes, moments=3),
            "the optimiser's part is counted three times: it has two moments; the number itself is a weight.",
        ),
        Mistake(partial(_training_bytes, number=1), "these are numbers; a number in float32 takes 4 bytes."),
        Mistake(partial(_training_bytes, number=2), "these are the bytes of float16; float32 takes 4 for each number."),
        Mistake(
            lambda base, prefix: (4 * base, 4 * prefix, 8 * prefix),
            "the prefix itself is missing among the weights.",
        ),
        Mistake(
            lambda base, prefix: (4 * prefix, 4 * prefix, 8 * prefix),
            "the frozen weights lie in memory too: they need no gradient, but the model still runs on them.",
        ),
    ],
)


def _stack_prefixes(prefixes: list[Tensor], rows: list[int | None]) -> tuple[Tensor, Tensor]:
    longest = max(prefix.shape[1] for prefix in prefixes)
    padded = [F.pad(prefix, (0, 0, 0, longest - prefix.shape[1])) for prefix in prefixes]
    empty = torch.zeros_like(padded[0])
    lengths = torch.tensor([0 if row is None else prefixes[row].shape[1] for row in rows])
    keys = torch.stack([empty if row is None else padded[row] for row in rows])
    return keys, torch.arange(longest) < lengths[:, None]


def _visible_slots(result, prefixes: list[Tensor], rows: list[int | None]) -> tuple[Tensor, Tensor]:
    """The keys with zeros where nobody looks: what stands there does not matter."""
    wanted = [len(rows), max(prefix.shape[1] for prefix in prefixes)]
    if not isinstance(result, tuple | list) or len(result) != 2:
        given = f"{len(result)} results" if isinstance(result, tuple | list) else f"one {type(result).__name__}"
        raise UnreadableError(f"Return two tensors, the keys and which slots are visible; yours is {given}.")
    keys, visible = result
    for name, part in (("keys", keys), ("mask", visible)):
        if not isinstance(part, Tensor):
            raise UnreadableError(f"Your {name} should be a tensor, and is a {type(part).__name__}.")
    if visible.dtype != torch.bool or list(visible.shape) != wanted:
        raise UnreadableError(
            f"Your mask should be bool [batch, longest] = {wanted}, and is {visible.dtype} {list(visible.shape)}."
        )
    if keys.ndim != 4 or [keys.shape[0], keys.shape[2]] != wanted:
        raise UnreadableError(
            f"Your keys should be [batch, heads, longest, d_kv] with {wanted[0]} rows and {wanted[1]} slots, and are "
            f"{list(keys.shape)}."
        )
    return keys.masked_fill(~visible[:, None, :, None], 0.0), visible


def _stack_with_none_as(index: int, prefixes: list[Tensor], rows: list[int | None]) -> tuple[Tensor, Tensor]:
    return _stack_prefixes(prefixes, [index if row is None else row for row in rows])


def _stack_padded_in_front(prefixes: list[Tensor], rows: list[int | None]) -> tuple[Tensor, Tensor]:
    keys, visible = _stack_prefixes(prefixes, rows)
    lengths = visible.sum(dim=1).tolist()
    rolled = [key.roll(visible.shape[1] - length, dims=1) for key, length in zip(keys, lengths, strict=True)]
    return torch.stack(rolled), visible.flip(1)


check_stack_prefixes = Exercise(
    right=_stack_prefixes,
    toys=lambda draw: [
        ([_random(draw, 4, 2, 5), _random(draw, 4, 3, 5)], [1, None, 0, 1, 0, 1]),
        ([_random(draw, 2, 4, 3), _random(draw, 2, 1, 3), _random(draw, 2, 6, 3)], [2, 1, None, 0, 2]),
    ],
    read=_visible_slots,
    compared="Your result",
    examples="batches",
    mistakes=[
        Mistake(
            lambda prefixes, rows: (
                _stack_prefixes(prefixes, rows)[0],
                torch.ones_like(_stack_prefixes(prefixes, rows)[1]),
            ),
            "every slot is visible: a slot of zeros still takes weight, as lesson 4 showed, so it must be masked.",
        ),
        Mistake(
            lambda prefixes, rows: (_stack_prefixes(prefixes, rows)[0], ~_stack_prefixes(prefixes, rows)[1]),
            "the mask is upside down: True is a slot that the row has.",
        ),
        Mistake(
            partial(_stack_with_none_as, 0),
            "a row of None got the first prefix: it has no visible slot.",
        ),
        Mistake(
            partial(_stack_with_none_as, -1),
            "a row of None got the last prefix: it has no visible slot.",
        ),
        Mistake(
            _stack_padded_in_front,
            "the shorter prefixes were padded in front: the attention would be the same, but put the padding behind.",
        ),
        Mistake(
            lambda prefixes, rows: _stack_prefixes(prefixes, [None if row == 0 else row for row in rows]),
            "rows of prefix 0 have no visible slot: `if row` is false for 0 too; ask `row is None`.",
        ),
    ],
)


# Lesson 8


def _content_weights(weights: Tensor, prefix_length: int) -> Tensor:
    content = weights[..., prefix_length:]
    return content / content.sum(dim=-1, keepdim=True)


check_content_weights = Exercise(
    right=_content_weights,
    toys=lambda draw: [
        (_random(draw, batch, heads, queries, prefix + keys).mul(2).softmax(dim=-1), prefix)
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
