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


def learn(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    num_wishes: int,
    rate: float = 0.02,
    steps: int = 400,
) -> None:
    """Train a network from hidden states to votes `[tables, guests, wishes, gifts]`, on 64 new tables a step.

    The loop of lesson 1, but that the rate falls to 0, so that the last steps no longer shake the result.
    """
    optimiser = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, steps)
    for _ in range(steps):
        tables = draw_tables(64, num_wishes)
        loss = F.cross_entropy(network(tables.hidden).flatten(0, 2), tables.answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def seat(names: Tensor, gifts: Tensor, wanted: Tensor) -> Tables:
    """The tables of these guests: `names` and `gifts` `[tables, guests]`, `wanted` `[tables, guests, wishes]`."""
    wished_names, answers = (
        each[:, :, None].expand(-1, -1, wanted.shape[-1]).gather(1, wanted) for each in (names, gifts)
    )
    return Tables(hidden_states(names, wished_names, gifts), names, gifts, wanted, answers)


def hidden_states(names: Tensor, wished_names: Tensor, gifts: Tensor) -> Tensor:
    """`[tables, guests, 32]` of names and gifts `[tables, guests]` and wished names `[tables, guests, wishes]`."""
    wishes = sum(_OF_WISH[wish][wished_names[..., wish]] for wish in range(wished_names.shape[-1]))
    return _OF_NAME[names] + wishes + _OF_GIFT[gifts]


def print_table(tables: Tables, table: int = 0) -> None:
    """One table in words, a line a guest."""
    names, gifts = ([all_[each] for each in ids[table]] for all_, ids in ((NAMES, tables.names), (GIFTS, tables.gifts)))
    for guest, seats in enumerate(tables.wanted[table].tolist()):
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
