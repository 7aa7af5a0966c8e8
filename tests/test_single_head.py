import torch
import torch.nn.functional as F

from helpers.course.single_head import attend, mix
from helpers.course.toys import draw


def test_mixed_values_and_weights_are_torchs():
    query, (key, value) = draw(2, 3, 5, 4), draw(2, 2, 3, 7, 4, seed=1)
    mixed, weights = mix(query, key, value)
    torch.testing.assert_close(mixed, F.scaled_dot_product_attention(query, key, value))
    torch.testing.assert_close(weights, F.scaled_dot_product_attention(query, key, torch.eye(7).expand(2, 3, 7, 7)))


def test_a_head_projects_and_mixes():
    hidden, (w_q, w_k), w_v = draw(2, 5, 6), draw(2, 6, 3, seed=1), draw(6, 4, seed=2)
    output, weights = attend(hidden, w_q, w_k, w_v)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(hidden @ w_q, hidden @ w_k, hidden @ w_v))
    assert list(weights.shape) == [2, 5, 5]
