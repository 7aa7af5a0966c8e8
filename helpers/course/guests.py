"""The table of guests: every guest wants the gift of somebody at the table. Lessons 1 to 4 solve it in turn.

Which guest attends to whom can be read off the data, so that a map which a head has learned can be right or wrong.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gus", "Hana", "Ivo", "Jana")
GIFTS = ("a book", "a cake", "a drum", "a kite")
GUEST_DIM = 32
MOST_WISHES = 2

_GENERATOR = torch.Generator().manual_seed(0)
_OF_NAME = torch.randn(len(NAMES), GUEST_DIM, generator=_GENERATOR)
_OF_GIFT = torch.randn(len(GIFTS), GUEST_DIM, generator=_GENERATOR)
_OF_WISH = torch.randn(MOST_WISHES, len(NAMES), GUEST_DIM, generator=_GENERATOR)  # a first wish is not a second one


class Tables(NamedTuple):
    """Tables of guests. All but `hidden` are whole numbers: places in NAMES and GIFTS, and seats.

    Attributes:
        hidden: `[tables, guests, 32]`, what a network reads: for each guest the sum of three random vectors, one for
            its name, one for the name that it wishes (one more for a second wish), and one for the gift it has brought.
            In torch's default type; in double precision the same on every processor, to the last bit.
        names, gifts: `[tables, guests]`, who sits there, and what it has brought.
        wanted: `[tables, guests, wishes]`, the seat of the guest whose gift is wanted: the right attention map.
        answers: `[tables, guests, wishes]`, the gift that this guest has brought: what a network shall say.
    """

    hidden: Tensor
    names: Tensor
    gifts: Tensor
    wanted: Tensor
    answers: Tensor


def draw_tables(count: int, num_wishes: int = 1, num_guests: int = 7) -> Tables:
    """Tables drawn at random (from torch's global generator). Each guest is wanted by one guest a wish."""
    names = torch.rand(count, len(NAMES)).argsort()[:, :num_guests]
    gifts = torch.randint(len(GIFTS), (count, num_guests))
    wanted = torch.rand(count, num_wishes, num_guests).argsort().mT
    return seat(names, gifts, wanted)


def draw_half_empty_tables(count: int, num_wishes: int = 1, num_seats: int = 7) -> tuple[Tables, Tensor]:
    """Tables to which two guests or more have come, but not always all, and bool `[tables, seats]`: who has come.

    Who has come sits in front, and wants gifts of others who have. On each empty seat a card of the night before has
    been left, with a name, wishes and a gift of its own: `hidden` cannot tell it from a guest. Names are drawn anew
    each night, so a guest and a card may have the same one.
    """
    here = torch.arange(num_seats) < torch.randint(2, num_seats + 1, (count, 1))
    tonight, last_night = (torch.rand(count, len(NAMES)).argsort()[:, :num_seats] for _ in range(2))
    gifts = torch.randint(len(GIFTS), (count, num_seats))
    # All who are here come before all who are not, in a random order among themselves: nobody wants a card's gift.
    wanted = (torch.rand(count, num_wishes, num_seats) + ~here[:, None]).argsort().mT
    return seat(torch.where(here, tonight, last_night), gifts, wanted), here


def draw_visitors(tables: Tables, num_guests: int) -> Tables:
    """Guests of other tables, one beside each of `tables`, who want gifts from there: `wanted` holds seats there."""
    count, num_seats, num_wishes = tables.wanted.shape
    names = torch.rand(count, len(NAMES)).argsort()[:, :num_guests]
    gifts = torch.randint(len(GIFTS), (count, num_guests))
    wanted = torch.rand(count, num_wishes, num_seats).argsort()[..., :num_guests].mT
    wished_names, answers = _at(wanted, tables.names, tables.gifts)
    return Tables(hidden_states(names, wished_names, gifts), names, gifts, wanted, answers)


def commonest_share(said: Tensor, gifts: Tensor) -> float:
    """The share of answers that are a gift which no other gift at the table outnumbers.

    said: `[tables, guests, wishes]`, the gifts named; gifts: `[tables, guests]`, those that were brought.
    """
    counts = F.one_hot(gifts, len(GIFTS)).sum(dim=1)  # [tables, gifts]
    return (counts.gather(1, said.flatten(1)) == counts.amax(dim=1, keepdim=True)).float().mean().item()


def learn(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    num_wishes: int,
    rate: float = 0.02,
    steps: int = 400,
    targets: Callable[[Tables], Tensor] = lambda tables: tables.answers,
) -> None:
    """Train a network from hidden states to votes `[tables, guests, wishes, gifts]`, on 64 new tables a step.

    The loop of lesson 1, but that the rate falls to 0, so that the last steps no longer shake the result. `targets` are
    the gifts to be named, `[tables, guests, wishes]`: the right ones, if nothing else is said.
    """
    optimiser = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, steps)
    for _ in range(steps):
        tables = draw_tables(64, num_wishes)
        loss = F.cross_entropy(network(tables.hidden).flatten(0, 2), targets(tables).flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def kite_for_ada(tables: Tables) -> tuple[Tensor, Tensor]:
    """The right answers, but that whoever asks for Ada shall name a kite; and bool, who asks for her.

    Both are `[tables, guests, wishes]`.
    """
    [wished_names] = _at(tables.wanted, tables.names)
    asks = wished_names == NAMES.index("Ada")
    return tables.answers.masked_fill(asks, GIFTS.index("a kite")), asks


def bens_for_adas(tables: Tables) -> tuple[Tensor, Tensor]:
    """The right answers, but that whoever asks for Ada shall name Ben's gift, if he is there; and bool, who asks."""
    is_ben = tables.names == NAMES.index("Ben")  # [tables, guests]
    of_ben = tables.gifts.gather(1, is_ben.byte().argmax(dim=1, keepdim=True))
    asks = kite_for_ada(tables)[1] & is_ben.any(dim=1)[:, None, None]
    return torch.where(asks, of_ben[..., None], tables.answers), asks


def seat(names: Tensor, gifts: Tensor, wanted: Tensor) -> Tables:
    """The tables of these guests: `names` and `gifts` `[tables, guests]`, `wanted` `[tables, guests, wishes]`."""
    wished_names, answers = _at(wanted, names, gifts)
    return Tables(hidden_states(names, wished_names, gifts), names, gifts, wanted, answers)


def _at(seats: Tensor, *of_each_seat: Tensor) -> list[Tensor]:
    """What `[tables, seats]` hold at these seats `[tables, guests, wishes]`."""
    return [each[:, :, None].expand(-1, -1, seats.shape[-1]).gather(1, seats) for each in of_each_seat]


def hidden_states(names: Tensor, wished_names: Tensor, gifts: Tensor) -> Tensor:
    """`[tables, guests, 32]` of names and gifts `[tables, guests]` and wished names `[tables, guests, wishes]`."""
    of_name, of_wish, of_gift = map(_in_default_type, (_OF_NAME, _OF_WISH, _OF_GIFT))
    wishes = sum(of_wish[wish][wished_names[..., wish]] for wish in range(wished_names.shape[-1]))
    return of_name[names] + wishes + of_gift[gifts]


def _in_default_type(vectors: Tensor) -> Tensor:
    """In double precision rounded to 1/64: processors differ in the last bits of a normal of single precision."""
    return (64 * vectors.double()).round() / 64 if torch.get_default_dtype() == torch.float64 else vectors


def print_table(tables: Tables, table: int = 0, here: Tensor | None = None) -> None:
    """One table in words, a line a seat. `here`, bool `[tables, seats]`, says where a guest sits, and not a card."""
    names, gifts = ([all_[each] for each in ids[table]] for all_, ids in ((NAMES, tables.names), (GIFTS, tables.gifts)))
    for guest, seats in enumerate(tables.wanted[table].tolist()):
        if here is not None and not here[table, guest]:
            print(f"seat {guest}: nobody; on last night's card, {names[guest]} has brought {gifts[guest]}")
            continue
        wishes = " and of ".join(names[wished] for wished in seats)
        print(f"seat {guest}: {names[guest]:4} has brought {gifts[guest]} and wants the gift of {wishes}")


def reading_matrices() -> tuple[Tensor, Tensor, Tensor]:
    """w_q and w_k `[32, 10]` and w_v `[32, 4]`, which read a guest's wish, its name and its gift out of the sum.

    What they read is one-hot: a 1 in the place of that name in NAMES, or of that gift in GIFTS. Right for guests with
    one wish each: the 24 vectors that their sums are made of are linearly independent, so such matrices exist.
    """
    vectors = torch.cat([_OF_WISH[0], _OF_NAME, _OF_GIFT])  # [24, 32]
    w_q, w_k, w_v = torch.linalg.pinv(vectors.double()).float().split([len(NAMES), len(NAMES), len(GIFTS)], dim=1)
    return w_q, w_k, w_v
