import torch
import torch.nn.functional as F

from helpers.course.exercises.lesson_1 import check_right_map
from helpers.course.guests import GIFTS, NAMES, draw_tables, reading_matrices


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
