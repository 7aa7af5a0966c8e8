import torch

from helpers.course.toys import draw


def test_draw_gives_the_same_numbers_wherever_it_stands():
    before = torch.get_rng_state()
    first = draw(3, 1, 8, 64)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(5)
    assert torch.equal(first, draw(3, 1, 8, 64))
    assert not torch.equal(first, draw(3, 1, 8, 64, seed=1))


def test_draw_gives_standard_normals_of_which_the_first_axis_can_be_unpacked():
    query, key, value = draw(3, 2, 50, 40)
    assert list(value.shape) == [2, 50, 40]
    assert not torch.equal(query, key)
    assert abs(key.mean()) < 0.1
    assert 0.9 < key.std() < 1.1
