"""The layer that lesson 3's reader writes computes what `helpers.MultiHeadAttention` does."""

import re

import nbformat
import pytest
import torch
from lessons import lessons
from torch import nn

from helpers import MultiHeadAttention, causal_mask, merge_heads, padding_mask, split_heads
from helpers.course.single_head import mix

CELLS = {cell.id: cell.source for cell in nbformat.read(lessons()[2], as_version=4).cells}


def written(*cells: str) -> dict:
    """What the cells define, one after the other: code as it is, of a folded solution its code."""
    names = {"torch": torch, "nn": nn, "split_heads": split_heads, "merge_heads": merge_heads, "mix": mix}
    for cell in cells:
        folded = re.search(r"```python\n(.*?)```", CELLS[cell], flags=re.DOTALL)
        exec(folded[1] if folded else CELLS[cell], names)
        names["masked_mix"] = names.get("mended")
    return names


@pytest.fixture
def layers():
    names = written("03-four-matrices", "03-solution-layer", "03-solution-masked-mix", "03-solution-forward")
    torch.manual_seed(0)
    ours = MultiHeadAttention(15, 3).double()
    lesson = names["MultiHeadAttention"](15, 3).double()
    lesson.load_state_dict(ours.state_dict())
    return lesson, names["forward"], ours


def test_the_first_forward(layers):
    lesson, _, ours = layers
    hidden = torch.randn(2, 7, 15, dtype=torch.float64)
    for got, wanted in zip(lesson(hidden), ours(hidden, need_weights=True), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("mask", [None, causal_mask(7), padding_mask(torch.arange(7)[None] < torch.tensor([[7], [0]]))])
@pytest.mark.parametrize("queries", [None, 4])
def test_the_whole_forward_with_masks_and_another_table(layers, mask, queries):
    lesson, forward, ours = layers
    keys = torch.randn(2, 7, 15, dtype=torch.float64)
    hidden, context = (keys, None) if queries is None else (torch.randn(2, queries, 15, dtype=torch.float64), keys)
    mask = mask[:queries] if mask is not None and mask.ndim == 2 else mask
    for got, wanted in zip(
        forward(lesson, hidden, context, mask), ours(hidden, context, mask=mask, need_weights=True), strict=True
    ):
        torch.testing.assert_close(got, wanted)
