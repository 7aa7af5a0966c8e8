import pytest
import torch
import torch.nn.functional as F

from helpers.course.exercises.lesson_1 import check_right_map
from helpers.course.guests import (
    GIFTS,
    GUEST_DIM,
    NAMES,
    bens_for_adas,
    commonest_share,
    draw_half_empty_tables,
    draw_tables,
    draw_visitors,
    hidden_states,
    kite_for_ada,
    learn,
    print_table,
    reading_matrices,
)
from helpers.course.single_head import attend


def test_the_reading_matrices_read_wish_name_and_gift():
    torch.manual_seed(3)
    tables = draw_tables(50)
    wished_names = tables.names.gather(1, tables.wanted[..., 0])
    w_q, w_k, w_v = reading_matrices()
    for matrix, read, count in (
        (w_q, wished_names, len(NAMES)),
        (w_k, tables.names, len(NAMES)),
        (w_v, tables.gifts, len(GIFTS)),
    ):
        assert torch.allclose(tables.hidden @ matrix, F.one_hot(read, count).float(), atol=1e-4)


def test_the_map_that_lesson_1_asks_for_is_that_of_its_table():
    torch.manual_seed(0)
    assert draw_tables(1).wanted[0, :, 0].tolist() == check_right_map.right


def wanted_of(tables, of_each_seat):
    return torch.stack([of_each_seat.gather(1, wish) for wish in tables.wanted.unbind(-1)], dim=-1)


def test_at_half_empty_tables_only_guests_are_wanted_and_a_card_may_have_their_name():
    tables, here = draw_half_empty_tables(500, num_wishes=2, num_seats=7)
    assert tables.wanted.shape == (500, 7, 2)
    assert set(here.sum(dim=1).tolist()) == set(range(2, 8))
    assert not (here[:, 1:] & ~here[:, :-1]).any()  # in front
    assert wanted_of(tables, here)[here].all()
    assert torch.equal(wanted_of(tables, tables.gifts), tables.answers)
    twice = (tables.names[:, :, None] == tables.names[:, None]) & ~torch.eye(7, dtype=torch.bool)
    assert not (twice & here[:, :, None] & here[:, None]).any()
    assert abs(twice[here[:, :, None] & ~here[:, None]].float().mean() - 1 / len(NAMES)) < 0.02


def test_visitors_want_what_is_at_the_other_table():
    tables = draw_tables(50, num_wishes=2)
    visitors = draw_visitors(tables, num_guests=5)
    assert (visitors.hidden.shape, visitors.wanted.shape) == ((50, 5, 32), (50, 5, 2))
    assert torch.equal(wanted_of(visitors, tables.gifts), visitors.answers)
    wished = wanted_of(visitors, tables.names)
    assert torch.equal(visitors.hidden, hidden_states(visitors.names, wished, visitors.gifts))


def test_a_table_in_words_names_guests_and_cards(capsys):
    torch.manual_seed(0)
    tables, here = draw_half_empty_tables(9)
    table = (here.sum(dim=1) == 4).nonzero()[0].item()
    print_table(tables, table, here)
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(f"seat {seat}: nobody; on last night's card, ") for seat, line in enumerate(lines)] == [
        *[False] * 4,
        *[True] * 3,
    ]
    wanted = NAMES[tables.names[table, tables.wanted[table, 0, 0]]]
    assert lines[0].endswith(f" and wants the gift of {wanted}")


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_in_double_precision_guests_are_rounded_so_that_processors_agree(double_precision):
    hidden = draw_tables(20, num_wishes=2).hidden
    assert hidden.dtype == torch.float64
    assert torch.equal(hidden, (64 * hidden).round() / 64)


def test_in_single_precision_guests_are_as_they_were_drawn():
    hidden = draw_tables(20).hidden
    assert hidden.dtype == torch.float32
    assert not torch.equal(hidden, (64 * hidden).round() / 64)


def test_a_network_learns_the_task_from_tables_with_one_wish_or_two():
    def right_gifts(num_wishes):
        torch.manual_seed(0)
        w_q, w_k, w_v = (0.1 * torch.randn(3, num_wishes, 1, GUEST_DIM, 16)).unbind()
        readout = 0.1 * torch.randn(16 * num_wishes, num_wishes * len(GIFTS))
        matrices = [each.requires_grad_() for each in (w_q, w_k, w_v, readout)]

        def network(hidden):
            outputs, _ = attend(hidden, w_q, w_k, w_v)  # [wishes, tables, guests, 16]
            return (outputs.movedim(0, 2).flatten(2) @ readout).unflatten(-1, (num_wishes, len(GIFTS)))

        learn(network, matrices, num_wishes)
        tables = draw_tables(200, num_wishes)
        return (network(tables.hidden).argmax(dim=-1) == tables.answers).float().mean().item()

    assert right_gifts(1) > 0.95
    assert right_gifts(2) > 0.95


def test_the_hosts_wishes_change_the_answers_of_those_who_ask_for_ada_alone():
    torch.manual_seed(3)
    tables = draw_tables(300, num_wishes=2)
    (kites, asks), (bens, asks_and_ben) = kite_for_ada(tables), bens_for_adas(tables)
    for table in range(300):
        names = [NAMES[name] for name in tables.names[table]]
        for guest in range(7):
            for wish, seat_wanted in enumerate(tables.wanted[table, guest].tolist()):
                for_ada, place = names[seat_wanted] == "Ada", (table, guest, wish)
                assert asks[place] == for_ada
                assert asks_and_ben[place] == (for_ada and "Ben" in names)
                right = tables.answers[place]
                assert kites[place] == (GIFTS.index("a kite") if for_ada else right)
                ben = names.index("Ben") if for_ada and "Ben" in names else seat_wanted
                assert bens[place] == tables.gifts[table, ben]
    assert 0 < asks_and_ben.sum() < asks.sum()


def test_answers_that_are_the_commonest_gift():
    """At the first table 2 is brought most, at the second 0 and 1 as often."""
    gifts = torch.tensor([[2, 2, 0, 2, 1], [0, 1, 0, 1, 3]])
    said = torch.tensor([[[2, 2], [0, 2], [1, 2], [2, 2], [2, 3]], [[0, 1], [3, 0], [2, 1], [1, 1], [0, 0]]])
    assert commonest_share(said, gifts) == pytest.approx((7 + 8) / 20)
