"""The lines that people copy: the published count, the package's numbers, and the way they are shown."""

import re

import nbformat
import pytest
import torch
from lessons import lessons
from torch import nn
from transformers import GPT2Config, GPT2Model

from helpers import split_prefix
from helpers.course.thirty_lines import AFTER_LESSON, LINES, PrefixEncoder, PrefixModel, show_lines

LAYERS, HEADS, HEAD_DIM, SLOTS = 3, 4, 5, 2


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=HEADS * HEAD_DIM,
        vocab_size=11,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    encoder = PrefixEncoder(SLOTS, LAYERS, HEADS * HEAD_DIM, mid_dim=7)
    return PrefixModel(GPT2Model(config), encoder, SLOTS, LAYERS, HEADS, HEAD_DIM).eval()


def test_there_are_thirty_lines_and_each_is_explained_in_its_time():
    assert len(LINES) == 30
    assert set(AFTER_LESSON[4]) < set(AFTER_LESSON[5]) < set(AFTER_LESSON[6]) == {*range(1, 31)}


def test_the_published_number_of_parameters():
    trained = nn.ModuleList([PrefixEncoder(5, num_layers=12, model_dim=768, mid_dim=512), nn.Linear(768, 9)])
    assert sum(parameter.numel() for parameter in trained.parameters()) == 9_860_105


def test_the_pairs_are_those_of_the_package(model):
    pairs = model.get_prompt(6)
    rows = model.encoder(torch.arange(SLOTS).expand(6, -1))
    assert torch.equal(torch.stack(pairs), split_prefix(rows, LAYERS, HEADS, HEAD_DIM))


def test_a_model_runs_with_them_and_only_the_encoder_is_trained(model):
    ids = torch.arange(2, 8).view(2, 3)
    output = model(ids, torch.ones(2, 3)).last_hidden_state
    bare = model.model(ids).last_hidden_state
    assert output.shape == bare.shape
    assert (output - bare).abs().max() > 0.01
    output.sum().backward()
    assert all(parameter.grad is None for parameter in model.model.parameters())
    assert all(parameter.grad is not None for parameter in model.encoder.parameters())


def test_lit_lines_have_an_arrow_and_known_ones_a_tick(capsys):
    show_lines(lit=[28, 29], known=[12])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line[0] for line in shown] == [
        "✓" if number == 12 else "➜" if number in (28, 29) else " " for number in range(1, 31)
    ]


@pytest.mark.parametrize("number", [0, 31])
def test_a_line_that_does_not_exist(number):
    with pytest.raises(ValueError, match="numbers 1 to 30"):
        show_lines(lit=[number])


def test_the_lessons_light_what_they_say_they_do():
    lit = {number: set() for number in AFTER_LESSON}
    for path in lessons():
        for cell in nbformat.read(path, as_version=4).cells:
            for call in re.findall(r"show_lines\((.*?)\)", cell.source if cell.cell_type == "code" else ""):
                names = {"AFTER_LESSON": AFTER_LESSON, "range": range}
                lit[int(path.name[:2])] |= set(eval(f"dict({call})", names).get("lit", ()))
    explained = set()
    for number in sorted(lit):
        explained |= lit[number]
        if lit[number]:  # not every lesson has been rewritten yet
            assert explained == set(AFTER_LESSON[number]), number
