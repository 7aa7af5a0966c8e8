import torch
import torch.nn.functional as F

from helpers.course.exercises.lesson_1 import check_right_map
from helpers.course.guests import GIFTS, GUEST_DIM, NAMES, draw_tables, learn, reading_matrices
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
