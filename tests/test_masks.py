"""Masks: True = may attend, bottom-right corner, prefix in front."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

from helpers.masks import causal_mask, padding_mask

lengths = st.integers(0, 7)


@given(queries=lengths, keys=lengths, prefix=lengths)
def test_causal_mask_entry_by_entry(queries, keys, prefix):
    mask = causal_mask(queries, keys, prefix_length=prefix)
    assert mask.dtype == torch.bool
    assert mask.shape == (queries, prefix + keys)
    for query in range(queries):
        for column in range(prefix + keys):
            position = column - prefix
            assert mask[query, column] == (position < 0 or position <= query + keys - queries)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 5), (1, 4)])
def test_causal_mask_is_torchs_lower_right_variant(queries, keys):
    query, key, value = (torch.randn(3, 2, n, 4) for n in (queries, keys, keys))
    attend = torch.nn.functional.scaled_dot_product_attention
    want = attend(query, key, value, attn_mask=causal_lower_right(queries, keys))
    assert torch.allclose(attend(query, key, value, attn_mask=causal_mask(queries, keys)), want, atol=1e-6)


def test_causal_mask_defaults_to_as_many_keys_as_queries():
    assert torch.equal(causal_mask(4), torch.ones(4, 4, dtype=torch.bool).tril())


def test_more_queries_than_keys_leaves_the_first_queries_nothing():
    assert causal_mask(3, 1).tolist() == [[False], [False], [True]]


@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=0, max_size=4), prefix=lengths)
@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.float32, torch.bfloat16, torch.bool])
def test_padding_mask_hides_keys_and_never_the_prefix(rows, prefix, dtype):
    attention_mask = torch.tensor(rows).reshape(-1, 5).to(dtype)
    mask = padding_mask(attention_mask, prefix_length=prefix)
    assert mask.dtype == torch.bool
    assert mask.shape == (len(rows), 1, 1, prefix + 5)
    assert mask[..., :prefix].all()
    assert torch.equal(mask[:, 0, 0, prefix:], attention_mask == 1)


@pytest.mark.usefixtures("unchecked")
def test_padding_mask_is_compiled_whole_and_exported():
    attention_mask = torch.tensor([[1, 1, 0], [1, 0, 0]])

    class Mask(torch.nn.Module):
        def forward(self, attention_mask):
            return padding_mask(attention_mask, prefix_length=2)

    compiled = torch.compile(Mask(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(attention_mask), Mask()(attention_mask))
    lengths = ({0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("key", min=2)},)
    longer = torch.arange(9).expand(5, 9) < torch.tensor([1, 3, 5, 7, 9])[:, None]
    for strict in (False, True):
        exported = torch.export.export(Mask(), (attention_mask,), dynamic_shapes=lengths, strict=strict).module()
        assert torch.equal(exported(longer.long()), Mask()(longer.long()))


@pytest.mark.usefixtures("unchecked")
def test_values_are_looked_at_only_where_that_costs_nothing():
    """A tensor without values stands for one on a GPU, whose values would have to be waited for."""
    for without_values in (torch.ones(2, 3, device="meta"), FakeTensorMode().from_tensor(torch.ones(2, 3))):
        assert padding_mask(without_values, prefix_length=2).shape == (2, 1, 1, 5)
    with pytest.raises(ValueError, match="other values"):
        padding_mask(torch.full((2, 3), 2))


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"got query_length=-1, key_length=-1, prefix_length=0"):
        causal_mask(-1)
    with pytest.raises(ValueError, match="prefix_length=-2"):
        causal_mask(3, 4, prefix_length=-2)
    with pytest.raises(ValueError, match=r"\[batch, key\], got shape \[5\]"):
        padding_mask(torch.ones(5))
    with pytest.raises(ValueError, match="at least 0, got -1"):
        padding_mask(torch.ones(2, 5), prefix_length=-1)
    for wrong in (torch.tensor([[0.0, -torch.inf]]), torch.tensor([[1, 2]]), torch.tensor([[1.0, torch.nan]])):
        with pytest.raises(ValueError, match="other values"):
            padding_mask(wrong)
