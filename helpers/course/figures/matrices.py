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
from helpers.course.figures.words import count_of, number_text, to_array, upper_first


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
        query_names = _query_names(num_queries, query_labels)
        key_names = _key_names(num_keys, key_labels, prefix_length)
        turned = max(map(len, key_names)) > 5 or (not numbers and key_labels is not None)
        figure = new_canvas(
            width,
            height,
            title,
            left=0.45 + text_width(max(query_names, key=len)),
            bottom=0.5 + (0.7 * text_width(max(key_names, key=len)) if turned else 0),
            right=0.15 if is_mask else 1.0,
        )
        axes = axes_on(figure)
        image = _draw_matrix(axes, values, prefix_length, _colour_limits(values, largest), numbers)
        _label_axis(axes.yaxis, query_names)
        _label_axis(axes.xaxis, key_names)
        if turned:
            axes.tick_params(axis="x", rotation=45)
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        for position, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
            if position < prefix_length:
                label.set_color(PREFIX_INK)
        axes.set(xlabel=axes_names[1], ylabel=axes_names[0])
        if not is_mask:
            figure.colorbar(image, cax=axes_on(figure, width + 0.15, 0, 0.15, height), label=quantity)
        show(figure, sentence)


def heat_maps(weights, *, prefix_length: int = 0, title: str = "", quantity: str = "weight") -> None:
    """Show `[heads, query, key]` as one small heat map a head, all in the same colours."""
    sentence = heat_maps_sentence(weights, prefix_length=prefix_length, title=title, quantity=quantity)
    values = to_array(weights)
    heads, num_queries, num_keys = values.shape
    columns = min(heads, 4)
    rows = -(-heads // columns)
    gap = (0.15, 0.55)
    cell = max(1, min(44, int(((WIDTH - 1.7) / columns - gap[0]) * DPI / num_keys)))  # pixels
    panel_width, panel_height = num_keys * cell / DPI, num_queries * cell / DPI
    with styled():
        width, height = columns * (panel_width + gap[0]), rows * (panel_height + gap[1])
        figure = new_canvas(width, height, title, left=0.6, bottom=0.25, right=1.1)
        key_names = _key_names(num_keys, None, prefix_length)
        ticks = [prefix_length + position for position in _spaced(num_keys - prefix_length)]
        for head in range(heads):
            row, column = divmod(head, columns)
            x, y = column * (panel_width + gap[0]), row * (panel_height + gap[1])
            axes = axes_on(figure, x, y + 0.25, panel_width, panel_height)
            image = _draw_matrix(axes, values[head], prefix_length, _colour_limits(values), numbers=False)
            axes.set_title(f"head {head}", fontsize=9, pad=4)
            axes.set_yticks(_spaced(num_queries), _spaced(num_queries) if column == 0 else [])
            axes.set_xticks(ticks, [key_names[tick] for tick in ticks])
            if column == 0:
                axes.set_ylabel("query")
            if head + columns >= heads:
                axes.set_xlabel("key")
        bar = axes_on(figure, width + 0.1, 0.25, 0.15, height - gap[1])
        figure.colorbar(image, cax=bar, label=quantity)
        show(figure, sentence)


def heat_map_sentence(
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
) -> str:
    values = to_array(weights)
    _check_matrix(values, 2, "[query, key]", prefix_length)
    if of_each_query not in ("favourite key", "largest weight"):
        raise ValueError(f"of_each_query is 'favourite key' or 'largest weight'; got {of_each_query!r}")
    num_queries, num_keys = values.shape
    row, column = axes_names
    queries = _phrases(row, _query_names(num_queries, None), _query_names(num_queries, query_labels))
    key_names = _key_names(num_keys, None, prefix_length)
    key_texts = _key_names(num_keys, key_labels, prefix_length)
    keys = _phrases(column, key_names, key_texts)
    size = f"{count_of(num_queries, row)} by {count_of(num_keys, column)}"
    if values.dtype == np.bool_ and relation != "may attend":
        return (
            f"{title or upper_first(relation)}, {size}: {values.sum()} of {values.size} pairs {relation}, "
            f"{np.triu(values, 1).sum()} of them above the diagonal."
        )
    if values.dtype == np.bool_:
        seen = values.sum(axis=1)
        return (
            f"{title or 'Mask'}, {size}: "
            f"{values.sum()} of {values.size} pairs may attend; "
            f"keys that queries 0 to {num_queries - 1} may attend to, in turn: {', '.join(map(str, seen))}."
        )
    rounded = np.round(values, 2)  # ties of what the figure shows go to the first, whatever the last bits say
    query, key = np.unravel_index(rounded.argmax(), rounded.shape)
    if quantity == "weight":
        facts = f"{queries[query]} attends most to {keys[key]}, weight {number_text(values[query, key])}"
        if 1 < num_queries <= LARGEST_WITH_NUMBERS:
            told = key_texts if len(set(key_texts)) == num_keys else key_names
            if of_each_query == "favourite key":
                each = [told[k] for k in rounded.argmax(axis=1)]
            else:
                each = [number_text(weight) for weight in rounded.max(axis=1)]
            facts += f"; the {of_each_query}s of queries 0 to {num_queries - 1} are {', '.join(each)}"
        if prefix_length:
            facts += f"; {_prefix_share(values, prefix_length)} of the weight is on the prefix"
    else:
        low = np.unravel_index(np.where(np.isfinite(rounded), rounded, np.inf).argmin(), rounded.shape)
        facts = (
            f"the largest {quantity} is {number_text(values[query, key])}, of {queries[query]} and {keys[key]}; "
            f"the smallest is {number_text(values[low])}, of {queries[low[0]]} and {keys[low[1]]}"
        )
    return f"{title or upper_first(quantity)}, {size}: {facts}."


def heat_maps_sentence(weights, *, prefix_length: int = 0, title: str = "", quantity: str = "weight") -> str:
    values = to_array(weights)
    _check_matrix(values, 3, "[heads, query, key]", prefix_length)
    heads, num_queries, num_keys = values.shape
    lead = (
        f"{title or upper_first(quantity)}, {count_of(heads, 'head')}, "
        f"{count_of(num_queries, 'query')} by {count_of(num_keys, 'key')}"
    )
    values = values.astype(float)
    largest = np.round(values.max(axis=(1, 2)), 2)
    sharp = int(largest.argmax())
    query, key = np.unravel_index(np.round(values[sharp], 2).argmax(), (num_queries, num_keys))
    key = f"key {_key_names(num_keys, None, prefix_length)[key]}"
    facts = f"the largest {quantity}, {number_text(largest[sharp])}, is head {sharp}'s, from query {query} to {key}"
    if heads > 1:
        facts += f"; the largest of heads 0 to {heads - 1} are {', '.join(map(number_text, largest))}"
    if prefix_length and quantity == "weight":
        shares = ", ".join(_prefix_share(head, prefix_length) for head in values)
        facts += (
            f"; the prefix's shares of the weight are {shares}" if heads > 1 else f"; the prefix's share is {shares}"
        )
    return f"{lead}: {facts}."


def matrix_product(left, right, *, names: Sequence[str] = ("left", "right", "product"), title: str = "") -> None:
    """Show `left @ right` as three matrices with their numbers, under the three `names`.

    A row of the left meets a column of the right: their product stands where that row and that column cross.
    """
    sentence = matrix_product_sentence(left, right, names=names, title=title)
    left, right = to_array(left).astype(float), to_array(right).astype(float)
    factors = (left, right, left @ right)
    limits = _colour_limits(np.concatenate([matrix.ravel() for matrix in factors]))
    cell, gap = (46 / DPI, 40 / DPI), 0.4
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
        show(figure, sentence)


def matrix_product_sentence(
    left, right, *, names: Sequence[str] = ("left", "right", "product"), title: str = ""
) -> str:
    left, right = to_array(left), to_array(right)
    for matrix in (left, right):
        _check_matrix(matrix, 2, "[row, column]", 0)
    if left.shape[1] != right.shape[0] or max(*left.shape, *right.shape) > LARGEST_WITH_NUMBERS:
        raise ValueError(
            f"matrix_product shows [rows, n] @ [n, columns] of at most {LARGEST_WITH_NUMBERS} each; "
            f"got {list(left.shape)} and {list(right.shape)}"
        )
    product = left @ right
    rounded = np.round(product, 2)
    row, column = np.unravel_index(rounded.argmax(), rounded.shape)
    sizes = [f"{name} {list(matrix.shape)}" for name, matrix in zip(names, (left, right, product), strict=True)]
    return (
        f"{title or 'Matrix product'}: {sizes[0]} times {sizes[1]} gives {sizes[2]}; "
        f"the largest entry of {names[2]} is {number_text(product[row, column])}, in row {row} and column {column}."
    )


def _draw_matrix(axes, values: np.ndarray, prefix_length: int, limits: tuple[float, float], numbers: bool):
    diverging = limits[0] < 0
    colours = matplotlib.colormaps["PuOr" if diverging else "cividis"].with_extremes(bad="#B5B1A8")
    floats = values.astype(float)
    shown = np.ma.masked_invalid(floats)
    image = axes.imshow(shown, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    if numbers:
        for (query, key), value in np.ndenumerate(floats):
            ink = ink_on(image.to_rgba(value)) if np.isfinite(value) else "black"
            text = _cell_text(value, values.dtype == np.bool_)
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


def _cell_text(value: float, of_mask: bool) -> str:
    if of_mask:
        return str(int(value))
    if not np.isfinite(value):
        return "-∞"
    return number_text(value)


def _label_axis(axis, names: list[str]) -> None:
    shown = _spaced(len(names)) if len(names) > 24 else range(len(names))
    axis.set_ticks(list(shown), [names[i] for i in shown])


def _spaced(length: int) -> list[int]:
    step = max(1, -(-length // 5))
    return list(range(0, length, step))


def _query_names(length: int, labels: Sequence[str] | None) -> list[str]:
    if labels is None:
        return [str(i) for i in range(length)]
    if len(labels) != length:
        raise ValueError(f"{length} queries need {length} query_labels; got {len(labels)}")
    return [_visible(label) for label in labels]


def _key_names(length: int, labels: Sequence[str] | None, prefix_length: int) -> list[str]:
    tokens = length - prefix_length
    labels = range(tokens) if labels is None else labels
    if len(labels) != tokens:
        raise ValueError(
            f"{length} keys, {prefix_length} of them the prefix, need {tokens} key_labels; got {len(labels)}"
        )
    return [f"p{i}" for i in range(prefix_length)] + [_visible(label) for label in labels]


def _visible(label) -> str:
    """The label, and for a token that is a space the open box that stands for one."""
    return str(label) if str(label).strip() else "␣"


def _phrases(noun: str, names: list[str], labels: list[str]) -> list[str]:
    """ "key 4", or "key 4 (cat)" where keys have labels."""
    return [f"{noun} {n}" if n == label else f"{noun} {n} ({label})" for n, label in zip(names, labels, strict=True)]


def _prefix_share(values: np.ndarray, prefix_length: int) -> str:
    return number_text(values[:, :prefix_length].sum() / (values.sum() or 1.0))


def _check_matrix(values: np.ndarray, dims: int, layout: str, prefix_length: int) -> None:
    if values.ndim != dims or values.size == 0:
        raise ValueError(f"a heat map needs {layout}, none of them empty; got shape {list(values.shape)}")
    if np.isnan(values).any():
        raise ValueError(f"{np.isnan(values).sum()} of the {values.size} numbers of shape {list(values.shape)} are NaN")
    if not np.isfinite(values).any():
        raise ValueError(f"no number of shape {list(values.shape)} is finite, so there is nothing to colour")
    if not 0 <= prefix_length <= values.shape[-1]:
        raise ValueError(f"prefix_length must be 0 to {values.shape[-1]}, the number of keys; got {prefix_length}")
