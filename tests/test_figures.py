"""Figures say what they show, and draw it legibly."""

import base64
import io
import itertools
import re
import runpy
import subprocess
import sys
from colorsys import rgb_to_hsv
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from helpers.course import figures
from helpers.course.figures import canvas, cells, layer, matrices, memory, tables

WEIGHTS = [[0.1, 0.2, 0.3, 0.4], [0.45, 0.25, 0.2, 0.1], [0.0, 0.44, 0.16, 0.4]]
MASK = np.tri(3, 5, 2, dtype=bool)
ENTRIES = torch.arange(4)[:, None] + torch.arange(6) / 10  # token.feature


def head_of(entry: str) -> str:
    return f"features of head {int(entry[-1]) // 3}"


def layer_tensors(lesson: int) -> dict[str, torch.Tensor]:
    """What lessons 1, 3, 4 and 6 give the drawing of the layer."""
    if lesson == 1:
        shapes = {"hidden": (1, 8, 64), "query": (1, 8, 16), "key": (1, 8, 16), "value": (1, 8, 16)}
        shapes |= {"scores": (1, 8, 8), "weights": (1, 8, 8), "output": (1, 8, 16)}
    else:
        keys = 8 if lesson == 3 else 11
        shapes = dict.fromkeys(("query", "key", "value", "mixed"), (1, 12, 8, 64))
        shapes |= dict.fromkeys(("hidden", "merged", "output"), (1, 8, 768))
        shapes |= dict.fromkeys(("scores", "weights"), (1, 12, 8, keys))
    if lesson == 3:
        shapes |= {"mask": (1, 1, 1, 8)}
    if lesson >= 4:
        shapes |= dict.fromkeys(("prefix_key", "prefix_value"), (1, 12, 3, 64))
        shapes |= dict.fromkeys(("all_keys", "all_values"), (1, 12, 11, 64))
    if lesson == 6:
        shapes |= {"bias": (1, 12, 8, 11)}
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def t5_tensors() -> dict[str, torch.Tensor]:
    shapes = dict.fromkeys(("encoder", "decoder", "cross"), (2, 2, 1, 4, 3, 48))
    shapes |= {"source": (1, 15), "target": (1, 7), "encoded": (1, 15, 128), "logits": (1, 7, 384)}
    return {name: torch.empty(shape) for name, shape in shapes.items()}


CELLS = torch.arange(24).view(1, 4, 6)
SPLIT = CELLS.view(1, 4, 2, 3)
STEPS = {
    "x": (CELLS, "b s f"),
    "x.view(1, 4, 2, 3)": (SPLIT, "b s h d"),
    "then .transpose(1, 2)": (SPLIT.transpose(1, 2), "b h s d"),
    "wrong: x.view(1, 2, 4, 3)": (CELLS.view(1, 2, 4, 3), "b h s d"),
}
PATH = ([2.0, 0.0], [[1.0, 0], [0, 1], [-1, 2], [1, 1]], [[1.0, 0, 2], [0, 1, 1], [2, 2, -1], [0, -1.5, 0.5]])
LAYERS = {
    "layer, lesson 1": lambda: figures.attention_layer(layer_tensors(1), lit=("scores", "weights"), title="One head"),
    "layer, pale": lambda: figures.attention_layer({}, lit="w_q"),
    "layer, lesson 2": lambda: figures.attention_layer(
        {"hidden": torch.empty(1, 8, 768), "merged": torch.empty(1, 8, 768)}, lit=("split", "merged")
    ),
    "layer, lesson 3": lambda: figures.attention_layer(layer_tensors(3), lit=("mask", "w_o"), title="The whole layer"),
    "layer, cross": lambda: figures.attention_layer(
        layer_tensors(3) | {"source": torch.empty(1, 5, 768), "w_q": torch.empty(768, 768)}, lit="source"
    ),
    "layer, lesson 4": lambda: figures.attention_layer(layer_tensors(4), lit="prefix", title="A prefix"),
    "layer, lesson 6": lambda: figures.attention_layer(layer_tensors(6), lit="bias", scaled=False),
    "layer, all lit": lambda: figures.attention_layer(layer_tensors(6), lit=layer.PARTS.keys() - {"source"}),
    "t5": lambda: figures.t5_sites(t5_tensors(), lit=("decoder", "cross"), title="T5", layers=(2, 3)),
    "t5, bare": lambda: figures.t5_sites({"source": torch.empty(4, 512), "target": torch.empty(4, 128)}, lit="encoder"),
    "layer, large batch": lambda: figures.attention_layer(
        layer_tensors(4) | dict.fromkeys(("query", "key", "value"), torch.empty(32, 12, 128, 64)), lit="query"
    ),
}
EXAMPLES = LAYERS | {
    "heat_map": lambda: figures.heat_map(WEIGHTS),
    "prefix": lambda: figures.heat_map(
        WEIGHTS,
        prefix_length=1,
        title="A prefix",
        key_labels=["cat", "sat", "down"],
        query_labels=["cat", "sat", "down"],
    ),
    "long labels": lambda: figures.heat_map(WEIGHTS, key_labels=["straightforward", "words", "turned", "upwards"]),
    "mask": lambda: figures.heat_map(MASK, title="Causal mask"),
    "dependence": lambda: figures.heat_map(MASK, axes_names=("output token", "input token"), relation="depend"),
    "scores": lambda: figures.heat_map([[1.5, -np.inf], [-2.0, 0.5]], quantity="score"),
    "large": lambda: figures.heat_map(np.eye(30, 40) / 2, prefix_length=10),
    "heat_maps": lambda: figures.heat_maps(np.stack([WEIGHTS] * 5), prefix_length=1, title="Five heads"),
    "two maps": lambda: figures.heat_maps(
        {"predicted": np.eye(3, 4), "learned": np.array(WEIGHTS)},
        query_labels=["Ada wants Ben", "Ben wants Cem", "Cem wants Ada"],
        key_labels=["Ada", "Ben", "Cem", "Dana"],
        title="Two maps",
    ),
    "three maps": lambda: figures.heat_maps(
        {f"map number {number}": np.eye(7) * 0.9**number for number in range(3)},
        query_labels=list("abcdefg"),
        key_labels=["Ada", "Benjamin", "Cem", "Dana", "Eva", "Finn", "Gwen"],
        prefix_length=0,
    ),
    "two masks": lambda: figures.heat_maps({"causal": MASK, "all": MASK | True}, columns=1),
    "query_path": lambda: figures.query_path(
        *PATH, labels="the cat sat down".split(), query_label="cat", title="A path"
    ),
    "query_path of a prefix": lambda: figures.query_path(
        np.ones(8), np.linspace(-1, 1, 88).reshape(11, 8), np.linspace(-1, 1, 88).reshape(11, 8), prefix_length=3
    ),
    "memory_cells": lambda: figures.memory_cells(STEPS, title="From token to head"),
    "memory_cells by head": lambda: figures.memory_cells(STEPS, colour_by="head"),
    "matrix_product": lambda: figures.matrix_product(
        [[1.0, -2.0, 0.5]], np.arange(12.0).reshape(3, 4) / 3, names=("query", "keys turned", "scores"), title="Scores"
    ),
    "dots from 0 to 1": lambda: figures.dots({"one": [0.9, 1], "other": [0.4]}, between=(0, 1)),
    "marks": lambda: figures.curves({"seed 0": [0.3, 0.1], "seed 1": [0.2, 0.4]}, x=[1, 2], joined=False),
    "curves": lambda: figures.curves({"prefix": np.linspace(3, 0, 50), "all": np.linspace(3, 1, 50)}, smooth=5),
    "ablation": lambda: figures.curves({"accuracy": [0.2, 0.9, 0.7]}, x=[0.001, 0.01, 0.1], x_label="rate", log_x=True),
    "dots": lambda: figures.dots({"prefix of 5": [0.9, 0.95, 0.97], "full": [1, 1, 1], "LoRA": [0.4]}, title="Seeds"),
    "bars": lambda: figures.bars({"frozen": 0.02, "prefix tuning": 0.95}, title="Held out"),
    "narrow blocks": lambda: figures.blocks(
        {"slot": ENTRIES[:3, :2]}, colour_by=lambda entry: f"row {entry[0]} of three, which is a layer's key or value"
    ),
    "blocks": lambda: figures.blocks(
        {"split": ENTRIES.view(4, 2, 3).transpose(0, 1), "view alone": ENTRIES.reshape(2, 4, 3)},
        colour_by=head_of,
        block_name="head",
        title="Two heads",
    ),
}
HARNESS = runpy.run_path(str(Path(__file__).parents[1] / "notebooks" / "conftest.py"))
every_example = pytest.mark.parametrize("draw", EXAMPLES.values(), ids=EXAMPLES.keys())


@pytest.fixture
def shown(monkeypatch) -> list[tuple[dict, dict]]:
    """The outputs, each a mime bundle and its metadata."""
    outputs = []

    def display(data, *, metadata=None, raw):
        assert raw
        outputs.append((data, metadata or {}))

    monkeypatch.setattr("IPython.display.display", display)
    for module in (canvas, tables):
        monkeypatch.setattr(module, "has_kernel", lambda: True)
    return outputs


def picture_of(shown) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(shown[0][0]["image/png"])))


# Showing


@every_example
def test_shows_a_figure_and_its_sentence_once(draw, shown):
    assert draw() is None
    (figure, metadata), (caption, _) = shown
    sentence = figure["text/plain"]
    assert figure.keys() == {"image/png", "text/plain"}
    assert metadata == {"image/png": {"alt": sentence}}
    assert caption == {"text/plain": sentence, "text/markdown": caption["text/markdown"]}
    if draw not in LAYERS.values():  # their caption is shorter
        assert caption["text/markdown"].replace("\\", "") == f"*Figure.* {sentence}"
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert plt.get_fignums() == []


@every_example
def test_two_calls_give_the_same_bytes(draw, shown):
    draw()
    with plt.rc_context({"font.size": 20, "axes.facecolor": "red", "savefig.dpi": 30}):  # a reader's own style
        draw()
    assert shown[0] == shown[2]
    assert shown[1] == shown[3]


@every_example
def test_picture_is_opaque_small_and_bare_of_versions(draw, shown):
    draw()
    picture = picture_of(shown)
    assert "transparency" not in picture.info
    assert picture.convert("RGBA").getchannel("A").getextrema() == (255, 255)
    assert not {"Software", "Creation Time", "date"} & picture.info.keys()
    assert len(base64.b64decode(shown[0][0]["image/png"])) < 60_000


@every_example
def test_letters_are_large_enough_and_inside(draw, shown, monkeypatch):
    drawn = []
    draw_text = Text.draw

    def spy(text, renderer):
        draw_text(text, renderer)
        if text.get_text():
            drawn.append((text, text.get_window_extent(renderer).extents, text.get_figure(root=True).bbox.extents))

    monkeypatch.setattr(Text, "draw", spy)
    draw()
    assert len(drawn) > 5
    for text, (left, low, right, high), (_, _, width, height) in drawn:
        assert text.get_fontsize() >= 8, text
        assert min(left, low) >= 0, text
        assert right <= width, text
        assert high <= height, text


@every_example
def test_letters_stand_out_from_what_is_behind_them(draw, shown, monkeypatch):
    contrasts = []
    draw_text = Text.draw

    def spy(text, renderer):
        if text.get_text():
            left, low, right, high = np.round(text.get_window_extent(renderer).extents).astype(int)
            picture = np.asarray(renderer.buffer_rgba())[::-1, :, :3] / 255
            behind = np.median(picture[max(low, 0) : high, max(left, 0) : right], axis=(0, 1))
            light, dark = sorted(map(luminance, (behind, to_rgb(text.get_color()))), reverse=True)
            contrasts.append(((light + 0.05) / (dark + 0.05), text.get_text()))
        draw_text(text, renderer)

    monkeypatch.setattr(Text, "draw", spy)
    draw()
    assert len(contrasts) > 5
    assert min(contrasts)[0] >= 4.5, min(contrasts)  # what WCAG 2.2 asks of text


@every_example
def test_letters_do_not_overlap(draw, shown, monkeypatch):
    drawn = []
    draw_text = Text.draw

    def spy(text, renderer):
        draw_text(text, renderer)
        if text.get_visible() and text.get_text().strip() and not text.get_rotation() % 90:
            drawn.append((text.get_window_extent(renderer), text.get_text()))

    monkeypatch.setattr(Text, "draw", spy)
    draw()
    for (one, name), (other, other_name) in itertools.combinations(drawn, 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        down = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, down) <= 0.5, (name, other_name)


def contrast(one, other) -> float:
    light, dark = sorted(map(luminance, map(to_rgb, (one, other))), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_lines_and_markers_stand_out_from_the_background():
    for colour in [*canvas.COLOURS, canvas.PREFIX_COLOUR, layer.LINE, layer.LIT]:
        assert contrast(colour, canvas.BACKGROUND) >= 3, colour  # what WCAG 2.2 asks of graphics
    assert contrast(canvas.PREFIX_INK, canvas.BACKGROUND) >= 4.5


def test_colours_differ_in_hue_or_in_lightness():
    for one, other in itertools.combinations(canvas.COLOURS, 2):
        turn = abs(rgb_to_hsv(*to_rgb(one))[0] - rgb_to_hsv(*to_rgb(other))[0])
        assert min(turn, 1 - turn) > 0.08 or contrast(one, other) > 1.5, (one, other)


def test_the_background_is_neither_white_nor_dark(shown):
    figures.curves({"a": [3, 2]})
    corner = picture_of(shown).convert("RGB").getpixel((0, 0))
    assert corner == tuple(int(canvas.BACKGROUND[i : i + 2], 16) for i in (1, 3, 5))
    assert 1.25 < contrast(canvas.BACKGROUND, "white") < 2


def luminance(rgb) -> float:
    """WCAG's relative luminance."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def test_the_colour_key_is_inside(monkeypatch):
    drawn = []
    monkeypatch.setattr(memory, "show", lambda figure, *texts: drawn.append(figure))
    EXAMPLES["narrow blocks"]()
    patches = [patch.get_window_extent() for patch in drawn[0].artists]
    assert len(patches) == 3
    assert all(drawn[0].bbox.x0 < patch.x0 and patch.x1 < drawn[0].bbox.x1 for patch in patches)
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(patches))
    plt.close(drawn[0])


def test_show_wants_a_sentence(shown):
    figure = plt.figure()
    with pytest.raises(ValueError, match="sentence"):
        figures.show(figure, "  ")
    figures.show(figure, "An empty *square* of <pad>.")
    assert shown[1][0]["text/markdown"] == r"*Figure.* An empty \*square\* of \<pad\>."


def test_helpers_alone_does_not_load_matplotlib():
    code = "import sys, helpers; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_prefix_is_outlined(shown):
    figures.heat_map(WEIGHTS)
    figures.heat_map(WEIGHTS, prefix_length=2)
    orange = [int(canvas.PREFIX_COLOUR[i : i + 2], 16) for i in (1, 3, 5)]
    counts = [
        (np.abs(np.asarray(picture_of(shown[first:]).convert("RGB"), int) - orange).max(axis=-1) < 12).sum()
        for first in (0, 2)
    ]
    assert counts[0] == 0
    assert counts[1] > 500


# Comparison, as notebooks/conftest.py does it


@every_example
def test_letters_drawn_otherwise_are_the_same_figure(draw, shown, monkeypatch):
    draw()
    monkeypatch.setitem(canvas.STYLE, "text.hinting", "none")
    draw()
    assert shown[0][0]["image/png"] != shown[2][0]["image/png"]
    difference = HARNESS["figure_difference"](shown[0][0]["image/png"], shown[2][0]["image/png"])
    assert difference < HARNESS["FIGURE_TOLERANCE"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            lambda: figures.attention_layer(layer_tensors(3), lit="mask"),
            lambda: figures.attention_layer(layer_tensors(3), lit="scores"),
        ),
        (
            lambda: figures.attention_layer(layer_tensors(4), lit="prefix_key"),
            lambda: figures.attention_layer(layer_tensors(4), lit=("prefix_key", "prefix_value")),
        ),
        (
            lambda: figures.heat_maps({"a": WEIGHTS, "b": WEIGHTS}),
            lambda: figures.heat_maps({"a": WEIGHTS, "b": WEIGHTS[::-1]}),
        ),
        (lambda: figures.query_path(*PATH), lambda: figures.query_path(PATH[0], PATH[1][::-1], PATH[2])),
        (
            lambda: figures.memory_cells(STEPS),
            lambda: figures.memory_cells(
                dict(zip(STEPS, [*[*STEPS.values()][:3], STEPS["then .transpose(1, 2)"]], strict=True))
            ),
        ),
        (lambda: figures.heat_map(WEIGHTS), lambda: figures.heat_map(np.array(WEIGHTS)[:, [0, 2, 1, 3]])),
        (lambda: figures.heat_map(WEIGHTS, prefix_length=2), lambda: figures.heat_map(WEIGHTS, prefix_length=1)),
        (lambda: figures.heat_map(MASK), lambda: figures.heat_map(np.tri(3, 5, dtype=bool))),
        (lambda: figures.heat_map(WEIGHTS), lambda: figures.heat_map(WEIGHTS, largest=1.0)),
        (lambda: figures.curves({"a": [3, 2, 1]}), lambda: figures.curves({"a": [3, 1.8, 1]})),
        (lambda: figures.curves({"a": [3, 2]}), lambda: figures.curves({"a": [3, 2]}, from_zero=True)),
        (lambda: figures.curves({"a": [3, 2], "b": [2, 1]}), lambda: figures.curves({"a": [2, 1], "b": [3, 2]})),
        (lambda: figures.dots({"a": [0.9, 0.8], "b": [0.5]}), lambda: figures.dots({"a": [0.9, 0.6], "b": [0.5]})),
        (lambda: figures.bars({"a": 0.9, "b": 0.5}), lambda: figures.bars({"a": 0.9, "b": 0.4})),
        (
            lambda: figures.blocks({"x": ENTRIES.view(4, 2, 3).transpose(0, 1)}, colour_by=head_of),
            lambda: figures.blocks({"x": ENTRIES.reshape(2, 4, 3)}, colour_by=head_of),
        ),
    ],
    ids=[
        "another part lit",
        "a part more",
        "one of two maps",
        "query path",
        "memory cells",
        "keys swapped",
        "prefix length",
        "mask corner",
        "range of colours",
        "curve",
        "axis from zero",
        "curves swapped",
        "dots",
        "bar",
        "reshape",
    ],
)
def test_other_data_is_another_figure(right, wrong, shown):
    right()
    wrong()
    difference = HARNESS["figure_difference"](shown[0][0]["image/png"], shown[2][0]["image/png"])
    assert difference > HARNESS["FIGURE_TOLERANCE"]


# Sentences


def test_heat_map_sentence():
    assert figures.heat_map_sentence(WEIGHTS) == (
        "Weight, 3 queries by 4 keys: query 1 attends most to key 0, weight 0.45; "
        "the favourite keys of queries 0 to 2 are 3, 0, 1."
    )


def test_heat_map_sentence_with_prefix_and_labels():
    sentence = figures.heat_map_sentence(
        torch.tensor(WEIGHTS, requires_grad=True, dtype=torch.bfloat16),
        prefix_length=2,
        query_labels=["the", "cat", "sat"],
        key_labels=["cat", "sat"],
        title="Lesson 4",
    )
    assert sentence == (
        "Lesson 4, 3 queries by 4 keys: query 1 (cat) attends most to key p0, weight 0.45; "
        "the favourite keys of queries 0 to 2 are sat, p0, p1; 0.48 of the weight is on the prefix."
    )


def test_a_token_that_is_a_space_is_seen(shown):
    figures.heat_map([[0.9, 0.1], [0.2, 0.8]], query_labels=list("a "), key_labels=list(" b"))
    assert "query 0 (a) attends most to key 0 (␣), weight 0.90" in shown[1][0]["text/plain"]


def test_heat_map_sentence_numbers_favourite_keys_whose_labels_repeat():
    sentence = figures.heat_map_sentence(WEIGHTS, key_labels=["the", "cat", "saw", "the"])
    assert sentence.endswith(
        "attends most to key 0 (the), weight 0.45; the favourite keys of queries 0 to 2 are 3, 0, 1."
    )


def test_heat_map_sentence_of_largest_weights():
    sentence = figures.heat_map_sentence(WEIGHTS, of_each_query="largest weight")
    assert sentence.endswith("; the largest weights of queries 0 to 2 are 0.40, 0.45, 0.44.")


def test_heat_map_sentence_of_rows_that_are_no_queries():
    options = {"axes_names": ("output token", "input token"), "relation": "depend"}
    assert figures.heat_map_sentence(np.tri(3, 3, 1, dtype=bool), **options) == (
        "Depend, 3 output tokens by 3 input tokens: 8 of 9 pairs depend, 2 of them above the diagonal."
    )
    assert "output token 1 attends most to input token 0" in figures.heat_map_sentence(
        WEIGHTS, axes_names=options["axes_names"]
    )


def test_heat_map_sentence_of_mask_and_scores():
    assert figures.heat_map_sentence(MASK) == (
        "Mask, 3 queries by 5 keys: 12 of 15 pairs may attend; "
        "keys that queries 0 to 2 may attend to, in turn: 3, 4, 5."
    )
    assert figures.heat_map_sentence([[1.5, -np.inf], [-2.0, 0.5]], quantity="score") == (
        "Score, 2 queries by 2 keys: the largest score is 1.50, of query 0 and key 0; "
        "the smallest is -2.00, of query 1 and key 0."
    )


def test_heat_maps_sentence():
    heads = np.stack([np.full((3, 4), 0.25), WEIGHTS])
    assert figures.heat_maps_sentence(heads, prefix_length=1) == (
        "Weight, 2 heads, 3 queries by 4 keys: the largest weight, 0.45, is head 1's, from query 1 to key p0; "
        "the largest of heads 0 to 1 are 0.25, 0.45; the prefix's shares of the weight are 0.25, 0.18."
    )


def test_heat_maps_sentence_of_named_maps():
    names = ["Ada", "Ben", "Cem"]
    maps = {"predicted": torch.eye(3).roll(1, 1), "learned": np.array([[0.1, 0.9, 0], [0.3, 0.2, 0.5], [0.7, 0.3, 0]])}
    assert figures.heat_maps_sentence(maps, query_labels=names, key_labels=names, title="Two maps") == (
        "Two maps, 2 maps of 3 queries by 3 keys. predicted: query 0 (Ada) attends most to key 1 (Ben), weight 1; the "
        "favourite keys of queries 0 to 2 are Ben, Cem, Ada. learned: query 0 (Ada) attends most to key 1 (Ben), "
        "weight 0.90; the favourite keys of queries 0 to 2 are Ben, Cem, Ada."
    )
    masks = figures.heat_maps_sentence({"a": MASK, "b": ~MASK}, axes_names=("row", "column"), relation="depend")
    assert masks == (
        "Depend, 2 maps of 3 rows by 5 columns. a: 12 of 15 pairs depend, 6 of them above the diagonal. b: 3 of 15 "
        "pairs depend, 3 of them above the diagonal."
    )


def test_rows_that_are_no_queries_have_their_own_name():
    sentence = figures.heat_map_sentence(WEIGHTS, axes_names=("size", "key"), of_each_query="largest weight")
    assert "size 1 attends most to key 0" in sentence
    assert "the largest weights of sizes 0 to 2 are" in sentence


@pytest.mark.parametrize(("number", "text"), [(2, "2"), (2.5, "2.50"), (2 + 1e-9, "2"), (2.001, "2.00"), (-0.0, "0")])
def test_whole_numbers_have_no_decimals(number, text, shown, monkeypatch):
    written = []
    monkeypatch.setattr(Axes, "text", lambda axes, x, y, text, **options: written.append(text))
    figures.heat_map([[number, 1]], quantity="score")
    assert written[0] == text
    assert f"{text}, of query 0 and key 0" in shown[0][0]["text/plain"]


def test_maps_side_by_side_share_their_colours(shown, monkeypatch):
    limits = []
    draw_matrix = matrices._draw_matrix
    monkeypatch.setattr(
        matrices, "_draw_matrix", lambda *args, **options: limits.append(args[3]) or draw_matrix(*args, **options)
    )
    figures.heat_maps({"small": [[0.1, 0.2]], "large": [[0.9, 0.1]]})
    assert limits == [(0.0, 0.9)] * 2


def test_a_product_of_wide_matrices_fits_the_column(shown):
    figures.matrix_product(np.eye(10), np.eye(10)[:, :7])
    assert picture_of(shown).width <= 1.02 * canvas.WIDTH * canvas.DPI


# The layer


def texts_of(draw, monkeypatch) -> dict[str, tuple[Text, object]]:
    """Every text of a figure and its box in pixels."""
    drawn, draw_text = {}, Text.draw

    def spy(text, renderer):
        draw_text(text, renderer)
        drawn[text.get_text()] = text, text.get_window_extent(renderer)

    monkeypatch.setattr(Text, "draw", spy)
    draw()
    monkeypatch.undo()
    return drawn


def layer_texts(monkeypatch, *args, **options):
    for module in (canvas, tables):
        monkeypatch.setattr(module, "has_kernel", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda *args, **options: None)
    return texts_of(lambda: figures.attention_layer(*args, **options), monkeypatch)


def test_the_layer_grows_from_lesson_to_lesson(monkeypatch):
    first = layer_texts(monkeypatch, layer_tensors(1))
    assert {"W_Q", "query", "softmax over the keys", "weights × value", "output  [1, 8, 16]"} <= first.keys()
    assert not {"split into heads", "merge heads", "W_O", "prefix key"} & first.keys()
    second = layer_texts(monkeypatch, {}, lit="split", parts="merged")
    assert {"split into heads", "merge heads", "mixed values"} <= second.keys()
    assert not {"W_O", "output"} & second.keys()
    fourth = layer_texts(monkeypatch, layer_tensors(4))
    assert {"W_O", "prefix key", "3 slots", "8 tokens", "all keys  [1, 12, 11, 64]"} <= fourth.keys()
    assert "÷ √head_dim" in fourth
    sixth = layer_texts(monkeypatch, layer_tensors(6), scaled=False)
    assert "+ bias  [1, 12, 8, 11]" in sixth
    assert "÷ √head_dim" not in sixth


def test_the_prefix_enters_in_front_of_the_tokens_behind_w_k(monkeypatch):
    drawn = {name: box for name, (_, box) in layer_texts(monkeypatch, layer_tensors(4)).items()}
    assert drawn["query"].x1 < drawn["prefix key"].x0
    assert drawn["prefix key"].x1 < drawn["key"].x0 < drawn["prefix value"].x0
    assert drawn["prefix value"].x1 < drawn["value"].x0
    assert drawn["W_K"].y0 > drawn["prefix key"].y1 > drawn["query × keyᵀ"].y1  # upwards
    assert drawn["3 slots"].x1 < drawn["8 tokens"].x0


def test_only_lit_parts_are_bold(monkeypatch):
    drawn = layer_texts(monkeypatch, layer_tensors(4), lit=("prefix_key", "weights"))
    bold = {name for name, (text, _) in drawn.items() if text.get_weight() == "bold"}
    assert bold == {"prefix key", "softmax over the keys", "weights  [1, 12, 8, 11]"}


def test_parts_without_a_tensor_are_pale(monkeypatch):
    drawn = layer_texts(monkeypatch, {"hidden": torch.empty(1, 8, 64), "query": torch.empty(1, 8, 16)})
    pale = {name for name, (text, _) in drawn.items() if text.get_color() == layer.PALE_INK}
    assert {"key", "value", "W_K", "scores", "weights × value"} <= pale
    assert not {"W_Q", "query", "[1, 8, 16]", "hidden states  [1, 8, 64]"} & pale


def test_parts_can_have_other_names(monkeypatch):
    drawn = layer_texts(monkeypatch, layer_tensors(4), names={"prefix_key": "past key"})
    assert "past key" in drawn
    assert "prefix key" not in drawn


def test_t5_sites_sentence():
    said = figures.t5_sites_sentence(t5_tensors(), lit="decoder", layers=(2, 3))
    assert said == (
        "T5: highlighted is the decoder's self-attention; the encoder's self-attention has 15 queries and 3 + 15 keys; "
        "the decoder's self-attention has 7 queries and 3 + 7 keys; cross-attention has 7 queries and 3 + 15 keys; the "
        "encoder has 2 layers and the decoder 3; the encoder's output goes to cross-attention in every layer of the "
        "decoder."
    )
    bare = {"source": torch.empty(2, 5), "target": torch.empty(2, 1)}
    assert figures.t5_sites_sentence(bare).startswith("T5: the encoder's self-attention has 5 queries and 5 keys; ")
    assert "the decoder's self-attention has 1 query and 1 keys" in figures.t5_sites_sentence(bare)


def test_attention_layer_sentence():
    tensors = {"hidden": torch.empty(1, 8, 64), "query": torch.empty(1, 8, 16), "output": torch.empty(1, 8, 16)}
    assert figures.attention_layer_sentence(tensors, lit=("w_k", "w_q"), title="One head") == (
        "One head: highlighted are W_Q and W_K; hidden states [1, 8, 64] go in; output [1, 8, 16] comes out."
    )
    assert "; on the way is query [1, 8, 16]; drawn from top to bottom are hidden states, W_Q," in (
        figures.attention_layer_sentence(tensors, everything=True)
    )
    assert figures.attention_layer_sentence({}) == "The attention layer: nothing is highlighted."


def test_a_caption_stands_under_the_figure_and_the_sentence_is_its_alternative(shown):
    figures.heat_map(WEIGHTS, caption="Row 1 looks *back*.")
    assert shown[1][0]["text/markdown"] == r"*Figure.* Row 1 looks \*back\*."
    assert shown[0][1]["image/png"]["alt"] == figures.heat_map_sentence(WEIGHTS) == shown[1][0]["text/plain"]


# One query's path


def test_query_path_is_attention():
    torch.manual_seed(0)
    query, keys, values = torch.randn(4), torch.randn(5, 4), torch.randn(5, 3)
    sentence = figures.query_path_sentence(query, keys, values, labels=list("abcde"), query_label="b")
    weights = (keys @ query / 2).softmax(0)
    mixed = torch.nn.functional.scaled_dot_product_attention(query[None], keys, values)[0]
    for label, score, weight in zip("abcde", keys @ query / 2, weights, strict=True):
        assert f"{label} {score:.2f} and {weight:.2f}" in sentence
    assert f"the largest weight, {weights.max():.2f}, is on key {'abcde'[weights.argmax()]};" in sentence
    assert f"the mixed value is [{', '.join(f'{entry:.2f}' for entry in mixed)}]" in sentence
    assert sentence.startswith("The path of the query of b: ")
    unscaled = figures.query_path_sentence(query, keys, values, scaled=False)
    assert f"0 {keys[0] @ query:.2f} and" in unscaled


def test_query_path_draws_bars_as_long_as_the_numbers(shown, monkeypatch):
    lengths = []
    barh = Axes.barh
    monkeypatch.setattr(
        Axes, "barh", lambda axes, y, width, **options: lengths.append(width) or barh(axes, y, width, **options)
    )
    figures.query_path(*PATH, scaled=False)
    scores = np.array(PATH[1]) @ PATH[0]
    assert lengths[0] == pytest.approx(scores)
    assert lengths[1] == pytest.approx(np.exp(scores) / np.exp(scores).sum())


# Memory cells


def test_memory_cells_sentence_tells_a_right_split_from_a_wrong_one():
    readings = [
        "x is [1, 4, 6] with strides (24, 6, 1); each token reads its own cells",
        "x.view(1, 4, 2, 3) is [1, 4, 2, 3] with strides (24, 6, 3, 1); each token reads its own cells of every head",
        "then .transpose(1, 2) is [1, 2, 4, 3] with strides (24, 3, 6, 1); "
        "each head reads its own cells of every token",
        "wrong: x.view(1, 2, 4, 3) is [1, 2, 4, 3] with strides (24, 12, 3, 1); "
        "head 0 reads tokens 0 and 1 and head 1 reads tokens 2 and 3",
    ]
    expected = f"Memory cells, 24 in a row, coloured by token: {'. '.join(readings)}."
    assert figures.memory_cells_sentence(STEPS) == expected
    merged = {"x": (CELLS, "b s f"), "y": (SPLIT.transpose(1, 2).reshape(1, 4, 6), "b s f")}
    assert figures.memory_cells_sentence(merged).endswith(
        "in memory of its own; token 0 reads tokens 0 and 1, token 1 reads tokens 2 and 3, token 2 reads tokens 0 and "
        "1 and token 3 reads tokens 2 and 3."
    )


def test_memory_cells_are_coloured_by_their_owner(shown, monkeypatch):
    coloured = []
    draw_cell = cells._draw_cell

    def spy(axes, x, y, width, text, colour):
        coloured.append((int(text), colour))
        draw_cell(axes, x, y, width, text, colour)

    monkeypatch.setattr(cells, "_draw_cell", spy)
    figures.memory_cells(STEPS)
    figures.memory_cells(STEPS, colour_by="head")
    assert len(coloured) == 2 * 5 * 24  # the row of memory and four tensors
    for number, (cell, colour) in enumerate(coloured):
        owner = cell // 6 if number < 120 else cell % 6 // 3
        assert colour == canvas.COLOURS[owner]
    assert [cell for cell, _ in coloured[72:96]] == SPLIT.transpose(1, 2).flatten().tolist()


WEIGHT_MATRICES = arrays(
    float, st.tuples(st.integers(2, 6), st.integers(2, 7)), elements=st.integers(0, 100).map(lambda n: n / 100)
)


@given(WEIGHT_MATRICES, st.floats(-1e-7, 1e-7))
def test_heat_map_sentence_does_not_hang_on_the_last_bits(weights, noise):
    noisy = weights + noise * np.linspace(0, 1, weights.size).reshape(weights.shape)
    assert figures.heat_map_sentence(np.abs(noisy)) == figures.heat_map_sentence(weights)


@given(WEIGHT_MATRICES, st.integers(0, 2))
def test_heat_map_sentence_names_a_largest_weight(weights, prefix_length):
    sentence = figures.heat_map_sentence(weights, prefix_length=prefix_length)
    found = re.search(r"query (\d+) attends most to key (p?)(\d+), weight (\d(?:\.\d\d)?)(?=[;.]|$)", sentence)
    query, in_prefix, key, weight = int(found[1]), found[2] == "p", int(found[3]), float(found[4])
    assert weights[query, key + (0 if in_prefix else prefix_length)] == weight == weights.max()


def test_matrix_product_sentence():
    assert figures.matrix_product_sentence([[1, 2, 0]], torch.eye(3)[:, 1:], names=("query", "keys", "scores")) == (
        "Matrix product: query [1, 3] times keys [3, 2] gives scores [1, 2]; "
        "the largest entry of scores is 2, in row 0 and column 0."
    )


def test_curves_sentence():
    assert figures.curves_sentence({"prefix": np.linspace(3.21, 0.04, 300)}) == (
        "Loss by step: loss falls from 3.21 to 0.04 in 300 steps (prefix)."
    )
    assert figures.curves_sentence({"a": [1, 2, 3], "b": [2.001, 9, 1.999]}, y_label="score", title="Two runs") == (
        "Two runs: score rises from 1.00 to 3.00 in 3 steps (a); score stays at 2.00 in 3 steps (b)."
    )


def test_curves_sentence_speaks_of_means_when_smoothed():
    assert "falls from 2.50 to 0.50 in 5 epochs" in figures.curves_sentence(
        {"prefix": [3, 2, 4, 1, 0]}, smooth=2, x_label="epoch"
    )


def test_curves_sentence_names_the_peak_of_an_ablation():
    assert figures.curves_sentence(
        {"prefix": [0.2, 0.9, 0.7]}, x=[0.001, 0.01, 0.1], x_label="learning rate", y_label="accuracy", digits=1
    ) == (
        "Accuracy by learning rate: accuracy rises from 0.2 to 0.7 between learning rate 0.001 and 0.1, "
        "with a peak of 0.9 at 0.01 (prefix)."
    )
    assert "with a low of 0.10 at 2" in figures.curves_sentence({"loss": [0.5, 0.1, 0.4]}, x=[1, 2, 3])


def test_curves_of_different_lengths_each_over_its_own_places():
    series, x = {"training": [3, 2, 1, 1], "validation": [2.5, 1.5]}, {"training": [1, 2, 3, 4], "validation": [2, 4]}
    assert figures.curves_sentence(series, x=x) == (
        "Loss by step: loss falls from 3.00 to 1.00 between step 1 and 4 (training); "
        "loss falls from 2.50 to 1.50 between step 2 and 4 (validation)."
    )


def test_curves_to_a_file_are_not_shown(shown, tmp_path):
    figures.curves({"a": [3, 2], "b": [1, 2, 3]}, x={"a": [1, 3], "b": [1, 2, 3]}, path=tmp_path / "loss.png")
    assert not shown
    assert not plt.get_fignums()
    assert Image.open(tmp_path / "loss.png").size[0] > 400


def test_dots_sentence():
    scores = {"prefix": [0.5, 0.7, 0.9], "full": [0.8, 0.8], "LoRA": torch.tensor([0.25])}
    assert figures.dots_sentence(scores, score_label="exact match") == (
        "Exact match, mean and range of the runs: prefix 0.70 (0.50 to 0.90), full 0.80 (0.80 to 0.80), LoRA 0.25; "
        "full is highest, LoRA is lowest."
    )
    assert figures.dots_sentence({"a": [1.001], "b": [0.999]}, title="Tie").endswith("all means are equal.")
    tied = figures.dots_sentence({"a": [0.5], "b": [0.9], "c": [0.501], "d": [0.5]})
    assert tied.endswith("0.50; b is highest, a, c and d are lowest.")


def test_bars_sentence():
    scores = {"frozen": 0.02, "prefix": 0.954, "full": 0.951}
    assert figures.bars_sentence(scores, score_label="accuracy") == (
        "Accuracy: frozen 0.02, prefix 0.95, full 0.95; prefix is best, frozen is worst."
    )
    assert figures.bars_sentence(scores, lower_is_better=True, digits=3).endswith("frozen is best, prefix is worst.")
    assert figures.bars_sentence({"a": 1.001, "b": 0.999}, title="Tie") == "Tie: a 1.00, b 1.00; all are equal."


def test_blocks_sentence_tells_a_right_split_from_a_wrong_one():
    grids = {
        "hidden states": ENTRIES,
        "split": ENTRIES.view(4, 2, 3).transpose(0, 1),
        "view alone": ENTRIES.reshape(2, 4, 3),
    }
    both = "features of head 0 and features of head 1"
    assert figures.blocks_sentence(grids, colour_by=head_of, block_name="head") == (
        f"Entries by colour: hidden states, 4 by 6, holds {both}; split, 2 heads of 4 by 3: head 0 holds features of "
        f"head 0, head 1 holds features of head 1; view alone, 2 heads of 4 by 3: every head holds {both}."
    )
    by_token = figures.blocks_sentence(grids, colour_by=lambda entry: f"token {entry[0]}", block_name="head")
    assert by_token == (
        "Entries by colour (token 0, token 1, token 2 and token 3): hidden states, 4 by 6, holds all 4; "
        "split, 2 heads of 4 by 3: every head holds all 4; view alone, 2 heads of 4 by 3: head 0 holds token 0 and "
        "token 1, head 1 holds token 2 and token 3."
    )


# Tables


def test_shape_table_reads_the_shapes(shown):
    figures.shape_table([("scores", torch.zeros(1, 12, 8, 11), "a|b"), ("K", np.zeros((2, 3)), "`what` a query meets")])
    [(data, _)] = shown
    assert data["text/plain"].splitlines() == [
        "concept  shape           role",
        "scores   [1, 12, 8, 11]  a|b",
        "K        [2, 3]          `what` a query meets",
    ]
    assert data["text/markdown"].splitlines() == [
        "| concept | shape | role |",
        "| --- | --- | --- |",
        r"| scores | `[1, 12, 8, 11]` | a\|b |",
        "| K | `[2, 3]` | `what` a query meets |",
    ]


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: figures.heat_map(np.zeros((2, 3, 4))), r"\[query, key\].*\[2, 3, 4\]"),
        (lambda: figures.heat_map(np.zeros((0, 3))), r"\[0, 3\]"),
        (lambda: figures.heat_map([[0.5, np.nan]]), r"1 of the 2 numbers of shape \[1, 2\] are NaN"),
        (lambda: figures.heat_map([[-np.inf, -np.inf]]), r"no number of shape \[1, 2\] is finite"),
        (lambda: figures.heat_map(WEIGHTS, prefix_length=5), "0 to 4.*got 5"),
        (lambda: figures.heat_map(WEIGHTS, query_labels=["a"]), "3 query_labels; got 1"),
        (lambda: figures.heat_map(WEIGHTS, key_labels=list("abcd"), prefix_length=1), "need 3 key_labels; got 4"),
        (lambda: figures.heat_map(WEIGHTS, of_each_query="key"), "'favourite key' or 'largest weight'; got 'key'"),
        (lambda: figures.heat_maps(WEIGHTS), r"\[heads, query, key\].*\[3, 4\]"),
        (lambda: figures.heat_maps({}), "one map or more; got none"),
        (lambda: figures.heat_maps({"a": WEIGHTS, "b": MASK}), r"one shape.*a \[3, 4\] of float64, b \[3, 5\] of bool"),
        (lambda: figures.dots({"a": [0.5], "b": [1.5]}, between=(0, 1)), r"ends at \(0, 1\).* 0.5 to 1.5"),
        (lambda: figures.t5_sites({"source": torch.empty(1, 2)}), "needs source and target"),
        (lambda: figures.t5_sites(t5_tensors(), lit="query"), "may have encoder, decoder, cross, .*got .*'query'"),
        (lambda: figures.attention_layer({}, lit="softmax"), "no part 'softmax'; its parts are hidden, source, w_q,"),
        (lambda: figures.attention_layer({"prefix": torch.empty(1)}), "no part 'prefix'"),
        (lambda: figures.attention_layer({}, parts="heads"), "no part 'heads'"),
        (lambda: figures.attention_layer({"hidden": [1]}), "part 'hidden' needs a tensor.*got list"),
        (lambda: figures.query_path([1.0], [[1.0, 2]], [[1.0]]), r"got \[1\], \[1, 2\] and \[1, 1\]"),
        (lambda: figures.query_path([1.0], np.ones((17, 1)), np.ones((17, 1))), "1 to 16 keys; got 17"),
        (lambda: figures.query_path([np.nan], [[1.0]], [[1.0]]), "finite"),
        (lambda: figures.query_path([1.0], [[1.0]], [[1.0]], labels=["a", "b"]), "need 1 key_labels; got 2"),
        (lambda: figures.memory_cells({}), "one tensor or more; got none"),
        (lambda: figures.memory_cells({"x": (CELLS, "b s f")}, colour_by="batch"), "'token' or 'head'; got 'batch'"),
        (lambda: figures.memory_cells({"x": (CELLS, "b s f")}, colour_by="head"), "no pattern has an axis h"),
        (lambda: figures.memory_cells({"x": (CELLS, "b s")}), r"pattern 'b s' does not name the axes of \[1, 4, 6\]"),
        (lambda: figures.memory_cells({"x": (CELLS.view(2, 2, 6), "b s f")}), "'x' needs a batch of 1"),
        (lambda: figures.memory_cells({"x": (CELLS + 1, "b s f")}), "the numbers 0 to at most 31"),
        (lambda: figures.memory_cells({"x": (CELLS.flip(1), "b s f")}), "in order"),
        (lambda: figures.memory_cells({"x": (torch.arange(40).view(4, 10), "s f")}), "at most 31"),
        (
            lambda: figures.memory_cells({"x": (CELLS, "b s f"), "y": (CELLS.view(1, 2, 4, 3), "b s h d")}),
            "step 'y' has 2 places on axis s, another step has 4",
        ),
        (lambda: figures.matrix_product(np.eye(3), np.eye(4)), r"n, columns.*got \[3, 3\] and \[4, 4\]"),
        (lambda: figures.matrix_product(np.eye(13), np.eye(13)), "at most 12 each"),
        (lambda: figures.matrix_product([1.0], [[1.0]]), r"\[row, column\].*\[1\]"),
        (lambda: figures.curves({}), "1 to 7 lines; got 0"),
        (lambda: figures.curves({str(i): [1, 2] for i in range(8)}), "1 to 7 lines; got 8"),
        (lambda: figures.curves({"a": [[1.0], [2.0]]}), r"'a' needs.*one dimension; got shape \[2, 1\]"),
        (lambda: figures.curves({"a": [1.0, np.nan]}), "'a' needs finite"),
        (lambda: figures.curves({"a": [1, 2, 3]}, x=[1, 2]), "3 values for 2 places"),
        (lambda: figures.curves({"a": [1, 2]}, x={"b": [1, 2]}), "curve 'a' has no places in x, which has b"),
        (lambda: figures.curves({"a": [1, 2, 3]}, x={"a": [1, 2]}), "3 values for 2 places"),
        (lambda: figures.curves({"a": [1, 2, 3]}, smooth=3), "smooth must be 1 to 2"),
        (lambda: figures.dots({"a": [1.0]}), "two labels or more; got 1"),
        (lambda: figures.dots({"a": [1.0], "b": []}), "label 'b' needs finite numbers"),
        (lambda: figures.dots({"a": [1.0], "b": [np.nan]}), "finite"),
        (lambda: figures.bars({"a": 1.0}), "two scores or more; got 1"),
        (lambda: figures.bars({"a": 1.0, "b": np.inf}), "finite"),
        (lambda: figures.blocks({}, colour_by=head_of), "got none"),
        (lambda: figures.blocks({"x": [1, 2]}, colour_by=str), r"'x' needs \[row, column\].*got shape \[2\]"),
        (lambda: figures.blocks({"x": [list(range(8))]}, colour_by=str), "7 groups; colour_by named 8"),
        (lambda: figures.shape_table([]), "one row or more; got none"),
    ],
)
def test_wrong_input_is_refused_at_the_door(call, message, shown):
    with pytest.raises(ValueError, match=message):
        call()
    assert shown == []


def test_a_zero_is_drawn_as_zero_whatever_its_last_bits_say(shown):
    for noise in (0.0, -1e-9):
        figures.query_path([2.0, noise], np.eye(2), np.eye(2), scaled=False)
    plain, noisy = (output["image/png"] for output, _ in shown if "image/png" in output)
    assert plain == noisy
