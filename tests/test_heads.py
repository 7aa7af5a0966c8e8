"""split_heads and merge_heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.heads import merge_heads, split_heads

sizes = st.integers(0, 5)
positive = st.integers(1, 5)


@given(batch=sizes, seq=sizes, heads=positive, head_dim=sizes)
def test_split_and_merge_are_inverse_and_equal_view_and_transpose(batch, seq, heads, head_dim):
    x = torch.arange(batch * seq * heads * head_dim).reshape(batch, seq, heads * head_dim)
    split = split_heads(x, heads)
    assert torch.equal(split, x.view(batch, seq, heads, head_dim).transpose(1, 2))
    assert torch.equal(merge_heads(split), x)
    y = torch.arange(batch * seq * heads * head_dim).reshape(batch, heads, seq, head_dim)
    assert torch.equal(split_heads(merge_heads(y), heads), y)


def test_each_head_holds_neighbouring_features_of_every_token():
    names = torch.tensor([[[10 * token + feature for feature in range(6)] for token in range(4)]])
    split = split_heads(names, 2)
    assert split[0, 1].tolist() == [[3, 4, 5], [13, 14, 15], [23, 24, 25], [33, 34, 35]]


def test_the_running_example():
    assert split_heads(torch.zeros(1, 8, 768), 12).shape == (1, 12, 8, 64)
    assert split_heads(torch.zeros(1, 8, 768), 1).shape == (1, 1, 8, 768)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (split_heads, (torch.zeros(8, 768), 12), r"\[batch, seq, heads \* head_dim\], got shape \[8, 768\]"),
        (split_heads, (torch.zeros(1, 2, 8, 768), 12), r"got shape \[1, 2, 8, 768\]"),
        (split_heads, (torch.zeros(1, 8, 768), 7), r"768 features \(shape \[1, 8, 768\]\) into 7 equal heads"),
        (split_heads, (torch.zeros(1, 8, 768), 0), "into 0 equal heads"),
        (split_heads, (torch.zeros(1, 8, 768), -12), "into -12 equal heads"),
        (merge_heads, (torch.zeros(12, 8, 64),), r"\[batch, heads, seq, head_dim\], got shape \[12, 8, 64\]"),
    ],
)
def test_wrong_shapes_are_refused_in_one_sentence(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
