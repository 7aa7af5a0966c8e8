"""Checks of lesson 4's exercises."""

from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, Prediction, UnreadableError, random_tensor
from helpers.course.exercises.lesson_3 import split_with_view_alone
from helpers.course.single_head import mix

# Keys and values in front


def _attend_with(query, key, value, past_key, past_value) -> tuple[Tensor, Tensor]:
    return mix(query, torch.cat([past_key, key], dim=1), torch.cat([past_value, value], dim=1))


def _unscaled(query, key, value, past_key, past_value) -> tuple[Tensor, Tensor]:
    return _attend_with(query * query.shape[-1] ** 0.5, key, value, past_key, past_value)


check_attend_with = Exercise(
    right=_attend_with,
    toys=lambda draw: [
        tuple(
            random_tensor(draw, batch, length, width)
            for length, width in ((queries, 4), (keys, 4), (keys, 7), (past, 4), (past, 7))
        )
        for batch, queries, keys, past in [(2, 3, 6, 5), (5, 4, 4, 2)]
    ],
    mistakes=[
        Mistake(
            lambda q, k, v, past_k, past_v: mix(q, k, v),
            "this is the head without those who left: their keys and values are not joined.",
        ),
        Mistake(
            lambda q, k, v, past_k, past_v: mix(q, past_k, past_v),
            "only those who left are heard: put their keys in front of the others', not in their place.",
        ),
        Mistake(
            lambda q, k, v, past_k, past_v: mix(q, torch.cat([k, past_k], dim=1), torch.cat([v, past_v], dim=1)),
            "the output is right, but the kept keys are behind the others: the first columns of the weights should be "
            "theirs.",
        ),
        Mistake(
            lambda q, k, v, past_k, past_v: mix(q, torch.cat([past_k, k], dim=1), torch.cat([v, past_v], dim=1)),
            "the keys are in front and the values behind: each key must have its own value in the same place.",
        ),
        Mistake(_unscaled, "the scores were not divided by the square root of head_dim."),
        Mistake(
            lambda *toy: _attend_with(*toy)[0],
            "you returned the output alone; return the output and the weights.",
        ),
        Mistake(
            lambda *toy: _attend_with(*toy)[::-1], "output and weights have changed places: return the output first."
        ),
        Mistake(
            lambda q, k, v, past_k, past_v: _attend_with(torch.cat([past_k, q], dim=1), k, v, past_k, past_v),
            "those who left ask, too: join keys and values, and leave the queries as they are.",
        ),
        Mistake(
            lambda q, k, v, past_k, past_v: mix(q, torch.cat([past_k, k], dim=0), torch.cat([past_v, v], dim=0)),
            "joined along axis 0, those who left become tables of their own: guests are axis 1.",
        ),
        Mistake(
            lambda q, k, v, past_k, past_v: mix(q, torch.cat([past_k, k], dim=-1), torch.cat([past_v, v], dim=-1)),
            "joined along the last axis, keys become wider and not more: guests are axis 1.",
        ),
    ],
)

check_hosts_wishes = Prediction(
    right=["yes", "no"],
    because="a slot adds its own value for those queries that find its key, and it cannot make a query look elsewhere.",
    mistakes=[
        ([True, False], "right; write it as yes or no, in quotation marks."),
        (
            ["no", "yes"],
            "the two have changed places: a slot can hand over a kite of its own, but Ben's gift is Ben's.",
        ),
        (
            ["yes", "yes"],
            "a slot is the same at every table; where Ben sits, and what he has brought, it does not know.",
        ),
        (["no", "no"], "a key that only those queries find is a direction in 16 dimensions; training can look for it."),
    ],
)

check_zero_slots = Prediction(
    right=3 / 11,
    because="a key of zeros has the score 0, like all the others here, and exp(0) = 1: three equal weights of eleven.",
    mistakes=[
        ("3/11", "right; without the quotation marks."),
        (0, "a score of 0 is not a weight of 0: exp(0) = 1."),
        (3 / 8, "the softmax runs over all keys, those of the slots included: eleven."),
        (8 / 11, "this is what is left for the tokens."),
        (1 / 11, "this is one slot; there are three."),
        (1 / 3, "this is one slot's share of the prefix; asked is the prefix's share of all."),
    ],
)


# A key for one query


def _address(query: Tensor, key: Tensor, number: int) -> Tensor:
    wanted = torch.full((len(query),), -20.0, dtype=query.dtype)
    wanted[number] = 20.0
    return torch.linalg.lstsq(query, wanted[:, None]).solution[:, 0] * query.shape[-1] ** 0.5


def _gates(slot_key: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The slot's weight beside the keys, for each query."""
    return mix(query, torch.cat([slot_key[None], key]), torch.zeros(len(key) + 1, 1, dtype=key.dtype))[1][:, 0]


def _reaches_one_alone(slot_key, query: Tensor, key: Tensor, number: int) -> bool:
    if not isinstance(slot_key, Tensor) or list(slot_key.shape) != [query.shape[-1]]:
        given = list(slot_key.shape) if isinstance(slot_key, Tensor) else type(slot_key).__name__
        raise UnreadableError(f"Your key should be a tensor [head_dim] = [{query.shape[-1]}], and is {given}.")
    gates = _gates(slot_key.to(query), query, key)
    if gates[number] <= 0.95:
        raise UnreadableError(
            f"Query {number} gives your slot {gates[number]:.2f} of its attention, and should give it more than 0.95. "
            "How large does the score have to be?"
        )
    others = gates.clone()
    others[number] = 0
    if others.max() >= 0.05:
        raise UnreadableError(
            f"Query {number} finds your slot, but query {others.argmax()} gives it {others.max():.2f} of its attention "
            "too, and should give it less than 0.05. A score of 0 is still heard: ask for one far below 0 there."
        )
    return True


check_address = Exercise(
    right=_address,
    toys=lambda draw: [
        (random_tensor(draw, tokens, head_dim) + 1, random_tensor(draw, tokens, head_dim), number)
        for tokens, head_dim, number in [(8, 64, 5), (5, 9, 2)]
    ],
    read=_reaches_one_alone,
    examples="sentences",
    mistakes=[
        Mistake(
            lambda query, key, number: _address(query, key, number) / query.shape[-1] ** 0.5,
            "the direction is right, but mind that scores are divided by the square root of head_dim: the key must be "
            "larger by it.",
        ),
    ],
)


# From a row of numbers to the keys of every head


def _split_prefix(prefix: Tensor, num_heads: int, pattern: str) -> tuple[Tensor, Tensor]:
    key, value = rearrange(prefix, f"b p ({pattern}) -> kv b h p d", kv=2, h=num_heads)
    return key, value


check_split_prefix = Exercise(
    right=partial(_split_prefix, pattern="kv h d"),
    toys=lambda draw: [
        (random_tensor(draw, batch, prefix, 2 * heads * head_dim), heads)
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
            lambda prefix, heads: tuple(split_with_view_alone(half, heads) for half in prefix.chunk(2, dim=-1)),
            "heads were split with view alone: head 0 got whole slots instead of a slice of every slot's features.",
        ),
        Mistake(
            lambda prefix, heads: tuple(
                rearrange(half, "b p (h d) -> b p h d", h=heads) for half in prefix.chunk(2, -1)
            ),
            "the heads are apart, but stand behind the slots: keys are [batch, heads, prefix, head_dim].",
        ),
        Mistake(
            lambda prefix, heads: prefix.chunk(2, dim=-1),
            "the halves are right, but they are not split into heads yet.",
        ),
    ],
)


# The mask


def _longer_mask(mask: Tensor, prefix_length: int, padding=(1, 0), value: bool = True) -> Tensor:
    return F.pad(mask, [prefix_length * end for end in padding], value=value)


check_longer_mask = Exercise(
    right=_longer_mask,
    toys=lambda draw: [
        (torch.arange(keys) < torch.tensor([[keys - 2], [keys], [1]]), prefix) for keys, prefix in [(7, 3), (5, 4)]
    ],
    compared="Your mask",
    mistakes=[
        Mistake(partial(_longer_mask, padding=(0, 1), value=False), "this is still the broken one."),
        Mistake(
            partial(_longer_mask, padding=(0, 1)),
            "the new columns say True now, but they are behind: the prefix is in front, so the mask is shifted against "
            "the keys.",
        ),
        Mistake(
            partial(_longer_mask, value=False),
            "the new columns are in front now, and say False, so that the prefix is hidden.",
        ),
        Mistake(
            lambda mask, prefix_length: _longer_mask(mask, prefix_length).long(),
            "right, but as numbers: a mask whose True means may attend is bool.",
        ),
        Mistake(
            lambda mask, prefix_length: torch.ones(len(mask), prefix_length + mask.shape[1], dtype=torch.bool),
            "every key is visible now, those of cards too: keep the old columns as they are.",
        ),
        Mistake(
            lambda mask, prefix_length: torch.ones(len(mask), prefix_length, dtype=torch.bool),
            "these are the new columns; join them to the old mask.",
        ),
    ],
)
