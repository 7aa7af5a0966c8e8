"""Attention maps and other matrices."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.patches import Rectangle

from helpers.course.figures.canvas import (
    DPI,
    LARGEST_WITH_NUMBERS,
    PREFIX_COLOUR,
    PREFIX_INK,
    WIDTH,
    axes_on,
    ink_on,
    new_canvas,
    show,
    styled,
    text_width,
)
from helpers.course.figures.matrix_words import (
    digits_of,
    heat_map_sentence,
    heat_maps_sentence,
    key_names,
    matrix_product_sentence,
    panels_of,
    query_names,
)
from helpers.course.figures.words import number_text, to_array


def heat_map(
    weights,
    *,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    prefix_length: int = 0,
    title: str = "",
    quantity: str = "weight",
    axes_names: tuple[str, str] = ("query", "key"),
    relation: str = "may attend",
    of_each_query: str = "favourite key",
    largest: float | None = None,
    caption: str | None = None,
) -> None:
    """Show one matrix `[query, key]`: attention weights, or scores, a bias or a bool mask.

    The first `prefix_length` keys are the prefix, outlined in orange and named p0, p1, ...; `key_labels` name
    the keys behind it. `quantity` says what a number is ("weight", "score", "bias"). Negative numbers get a
    diverging map around zero, minus infinity is grey. `largest` ends the range of colours, so that two figures
    can be compared.

    Rows and columns that are no queries and keys have other `axes_names`, and what a 1 of a bool matrix says of
    them is the `relation` ("depend"). Of weights, the sentence tells `of_each_query` the "favourite key" or the
    "largest weight".
    """
    sentence = heat_map_sentence(
        weights,
        query_labels=query_labels,
        key_labels=key_labels,
        prefix_length=prefix_length,
        title=title,
        quantity=quantity,
        axes_names=axes_names,
        relation=relation,
        of_each_query=of_each_query,
    )
    values = to_array(weights)
    num_queries, num_keys = values.shape
    is_mask = values.dtype == np.bool_
    with styled():
        numbers = max(values.shape) <= LARGEST_WITH_NUMBERS
        # A cell with a number in it must hold five characters of 8 pt.
        cell = (50, 40) if numbers else (max(1, min(44, 530 // num_keys)),) * 2  # pixels
        width, height = num_keys * cell[0] / DPI, num_queries * cell[1] / DPI
        row_names = query_names(num_queries, query_labels)
        column_names = key_names(num_keys, key_labels, prefix_length)
        turned = max(map(len, column_names)) > 5 or (not numbers and key_labels is not None)
        figure = new_canvas(
            width,
            height,
            title,
            left=0.45 + text_width(max(row_names, key=len)),
            bottom=0.5 + (0.7 * text_width(max(column_names, key=len)) if turned else 0),
            right=0.15 if is_mask else 1.0,
        )
        axes = axes_on(figure)
        image = _draw_matrix(axes, values, prefix_length, _colour_limits(values, largest), numbers)
        _label_axis(axes.yaxis, row_names)
        _label_keys(axes, column_names, prefix_length, turned)
        axes.set(xlabel=axes_names[1], ylabel=axes_names[0])
        if not is_mask:
            figure.colorbar(image, cax=axes_on(figure, width + 0.15, 0, 0.15, height), label=quantity)
        show(figure, sentence, caption)


def heat_maps(
    weights,
    *,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    prefix_length: int = 0,
    title: str = "",
    quantity: str = "weight",
    axes_names: tuple[str, str] = ("query", "key"),
    relation: str = "may attend",
    of_each_query: str = "favourite key",
    largest: float | None = None,
    columns: int | None = None,
    caption: str | None = None,
) -> None:
    """Show several maps side by side, in the same colours: `{title: [query, key]}`, or `[heads, query, key]`.

    The maps have one shape and one set of labels. There are `columns` of them in a row, up to four if left out. The
    numbers are inside the cells as far as these are wide enough, else a colour bar tells them. All else is as in
    `heat_map`.
    """
    options = {"query_labels": query_labels, "key_labels": key_labels, "prefix_length": prefix_length}
    options |= {"quantity": quantity, "axes_names": axes_names, "relation": relation, "of_each_query": of_each_query}
    sentence = heat_maps_sentence(weights, title=title, **options)
    panels = panels_of(weights, prefix_length)
    values = np.stack([*panels.values()])
    _, num_queries, num_keys = values.shape
    row_names, column_names = query_names(num_queries, query_labels), key_names(num_keys, key_labels, prefix_length)
    columns = min(len(panels), columns or 4)
    rows = -(-len(panels) // columns)
    left, gap = 0.45 + text_width(max(row_names, key=len)), 0.18
    number_size = max(_cell_width(value, values) for value in values.flat)

    def cell_size(bar: float) -> int:
        room = (WIDTH - left - bar) / columns - gap
        return max(1, min(50, int(room * DPI / num_keys)))  # pixels

    numbers = max(num_queries, num_keys) <= LARGEST_WITH_NUMBERS and cell_size(0.1) >= number_size
    bar = 0.1 if numbers or values.dtype == np.bool_ else 1.0
    wide = cell_size(bar)
    high = min(wide, 40)
    turned = wide >= 14 and text_width(max(column_names, key=len)) > wide / DPI
    below = 0.25 + (0.7 * text_width(max(column_names, key=len)) if turned else 0.05)
    panel_width, panel_height = num_keys * wide / DPI, num_queries * high / DPI
    panel_gap = max(gap, max(map(len, panels)) * 0.075 - panel_width + 0.1)  # titles do not run into each other
    step = (panel_width + panel_gap, 0.25 + panel_height + below)
    with styled():
        width, height = columns * step[0] - panel_gap, rows * step[1] - below
        figure = new_canvas(width, height, title, left=left, bottom=below + 0.22, right=bar)
        for number, (name, matrix) in enumerate(panels.items()):
            row, column = divmod(number, columns)
            axes = axes_on(figure, column * step[0], row * step[1] + 0.25, panel_width, panel_height)
            image = _draw_matrix(axes, matrix, prefix_length, _colour_limits(values, largest), numbers)
            axes.set_title(name, fontsize=9, pad=4)
            _label_axis(axes.yaxis, row_names, few=wide < 14)
            _label_keys(axes, column_names, prefix_length, turned, few=wide < 14)
            if column:
                axes.set_yticklabels([])
            else:
                axes.set_ylabel(axes_names[0])
            if number + columns >= len(panels):
                axes.set_xlabel(axes_names[1])
        if bar == 1.0:
            place = axes_on(figure, width + 0.15, 0.25, 0.15, height - 0.25)
            figure.colorbar(image, cax=place, label=quantity)
        show(figure, sentence, caption)


def matrix_product(
    left, right, *, names: Sequence[str] = ("left", "right", "product"), title: str = "", caption: str | None = None
) -> None:
    """Show `left @ right` as three matrices with their numbers, under the three `names`.

    A row of the left meets a column of the right: their product stands where that row and that column cross.
    """
    sentence = matrix_product_sentence(left, right, names=names, title=title)
    left, right = to_array(left).astype(float), to_array(right).astype(float)
    factors = (left, right, left @ right)
    limits = _colour_limits(np.concatenate([matrix.ravel() for matrix in factors]))
    gap = 0.35
    # As wide as the column allows, but wide enough for the numbers.
    room = (WIDTH - 2 * gap - 0.3) * DPI / sum(matrix.shape[1] for matrix in factors)
    wide = round(min(46, max(room, *(_cell_width(value, matrix) for matrix in factors for value in matrix.flat))))
    cell = wide / DPI, min(wide, 40) / DPI
    widths = [max(matrix.shape[1] * cell[0], text_width(name, 10)) for matrix, name in zip(factors, names, strict=True)]
    height = max(len(matrix) for matrix in factors) * cell[1]
    with styled():
        figure = new_canvas(sum(widths) + 2 * gap, height + 0.3, title, left=0.15, bottom=0.12, right=0.15)
        for number, (matrix, name) in enumerate(zip(factors, names, strict=True)):
            rows, columns = matrix.shape
            x = sum(widths[:number]) + gap * number
            inset = (widths[number] - columns * cell[0]) / 2
            top = (height - rows * cell[1]) / 2
            axes = axes_on(figure, x + inset, 0.3 + top, columns * cell[0], rows * cell[1])
            _draw_matrix(axes, matrix, 0, limits, numbers=True)
            axes.set(xticks=[], yticks=[])
            axes.set_title(f"{name} [{rows}, {columns}]", pad=4)
            if number:
                sign = axes_on(figure, x - gap, 0.3, gap, height)
                sign.set_axis_off()
                sign.text(0.5, 0.5, "@="[number - 1], ha="center", va="center", fontsize=12)
        show(figure, sentence, caption)


def _draw_matrix(axes, values: np.ndarray, prefix_length: int, limits: tuple[float, float], numbers: bool):
    diverging = limits[0] < 0
    colours = matplotlib.colormaps["PuOr" if diverging else "cividis"].with_extremes(bad="#B5B1A8")
    floats = values.astype(float)
    shown = np.ma.masked_invalid(floats)
    image = axes.imshow(shown, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    if numbers:
        digits = digits_of(values)
        for (query, key), value in np.ndenumerate(floats):
            ink = ink_on(image.to_rgba(value)) if np.isfinite(value) else "black"
            text = _cell_text(value, values.dtype == np.bool_, digits)
            axes.text(key, query, text, ha="center", va="center", fontsize=8, color=ink)
    if prefix_length:
        box = Rectangle((-0.5, -0.5), prefix_length, len(values), fill=False, edgecolor=PREFIX_COLOUR, linewidth=2.5)
        box.set_clip_on(False)
        axes.add_patch(box)
    return image


def _colour_limits(values: np.ndarray, largest: float | None = None) -> tuple[float, float]:
    finite = values[np.isfinite(values)].astype(float)
    largest = max(np.abs(finite).max(), 1e-9) if largest is None else largest
    return (-largest if finite.min() < 0 else 0.0), largest


def _cell_text(value: float, of_mask: bool, digits: int) -> str:
    if of_mask:
        return str(int(value))
    if not np.isfinite(value):
        return "-∞"
    return number_text(value, digits)


def _cell_width(value: float, values: np.ndarray) -> float:
    """Pixels that a cell needs for its number: letters of 8 points, and a little air."""
    text = _cell_text(value, values.dtype == np.bool_, digits_of(values))
    return sum(0.32 if letter == "." else 0.64 for letter in text) * 8 / 72 * DPI + 2


def _label_axis(axis, names: list[str], few: bool = False) -> None:
    """All names, or about five where they have little room."""
    shown = _spaced(len(names)) if few or len(names) > 24 else range(len(names))
    axis.set_ticks(list(shown), [names[i] for i in shown])


def _label_keys(axes, names: list[str], prefix_length: int, turned: bool, few: bool = False) -> None:
    _label_axis(axes.xaxis, names, few)
    if turned:
        axes.tick_params(axis="x", rotation=45)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    for position, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        if position < prefix_length:
            label.set_color(PREFIX_INK)


def _spaced(length: int) -> list[int]:
    step = max(1, -(-length // 5))
    return list(range(0, length, step))
