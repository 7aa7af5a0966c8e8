"""The lessons' figures, each with a sentence computed from its data.

The sentence stands under the figure, is its alternative text, and is what a test of the notebook compares.
Every drawing function shows its figure and returns None; `..._sentence` returns the sentence alone. In a plain script,
where there is no notebook to show a figure in, the sentence is printed.
"""

import base64
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

__all__ = ["bars", "blocks", "curves", "dots", "heat_map", "heat_maps", "matrix_product", "shape_table", "show"]

DPI = 110
WIDTH = 6.4  # inches: what a notebook column shows without scaling
# Okabe and Ito's colours in the order of use; their yellow is left out, because it is lost on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
PREFIX_COLOUR = "#D55E00"
PREFIX_INK = "#B85100"  # the same hue for letters on white, darker: a contrast of 5 instead of 3.9
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that figures are alike on every system
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 6,
}
KEY_GAP = 0.15  # inches between the entries of a colour key
# Above this size the numbers inside a matrix no longer fit.
LARGEST_WITH_NUMBERS = 12


def show(figure: Figure, sentence: str) -> None:
    """Display a figure with its sentence as alternative text and as a caption, and close it.

    The caption is an output of its own: JupyterLab does not render an image's alternative text, and text can
    be selected, enlarged and read in a dark theme. Without a notebook's kernel, the sentence is printed instead.
    """
    if not sentence.strip():
        raise ValueError("a figure needs a sentence that says what it shows; got an empty one")
    if not _has_kernel():
        plt.close(figure)
        print(sentence)
        return
    from IPython.display import display  # not at the top: drawing to a file needs no IPython

    png = base64.b64encode(_png(figure)).decode()
    plt.close(figure)
    display({"image/png": png, "text/plain": sentence}, metadata={"image/png": {"alt": sentence}}, raw=True)
    markdown = re.sub(r"([\\`*_{}\[\]<>#|$~&])", r"\\\1", sentence)
    display({"text/markdown": f"*Figure.* {markdown}", "text/plain": sentence}, raw=True)


def _has_kernel() -> bool:
    """Whether a notebook's front end is there to show what is displayed: not in a script, nor in a terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _png(figure: Figure) -> bytes:
    """Opaque, of 256 colours, and without the version note that would make two installations differ."""
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, facecolor="white", transparent=False)
    # A palette halves the size of the numbers' soft edges.
    palette = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    palette.save(buffer, format="png", optimize=True, dpi=(DPI, DPI))
    return buffer.getvalue()


def _styled():
    return style.context(["default", STYLE])


def _canvas(width: float, height: float, title: str, *, left: float, bottom: float, right: float) -> Figure:
    """A figure with room in inches for a title above, and margins around, an area of width by height.

    Margins are reckoned in whole pixels, not fitted to the drawn text, so that another version of matplotlib, which
    draws letters and fractions of pixels otherwise, moves nothing: the tests compare figures.
    """
    lacking = max(0.0, _text_width(title, 10) + 0.2 - (left + width + right))
    top = 0.4 if title else 0.12
    left, right, top, bottom = map(_whole_pixels, (left + lacking / 2, right + lacking / 2, top, bottom))
    size = (left + _whole_pixels(width) + right, bottom + _whole_pixels(height) + top)
    figure = plt.figure(figsize=size)
    figure.subplots_adjust(left / size[0], bottom / size[1], 1 - right / size[0], 1 - top / size[1])
    if title:
        figure.text(0.5, 1 - 0.2 / size[1], title, ha="center", va="center", fontsize=10)
    return figure


def _whole_pixels(inches: float) -> float:
    return round(inches * DPI) / DPI


def _text_width(text: str, points: float = 8) -> float:
    return len(text) * points * 0.63 / 72


def _axes(figure: Figure, x: float = 0, y: float = 0, width: float | None = None, height: float | None = None):
    """Axes over the canvas's area, or over a part of it: inches from its left and its top."""
    area = figure.subplotpars
    across, down = figure.get_size_inches()
    width = (area.right - area.left) * across if width is None else width
    height = (area.top - area.bottom) * down if height is None else height
    x, y, width, height = map(_whole_pixels, (x, y, width, height))
    return figure.add_axes((area.left + x / across, area.top - (y + height) / down, width / across, height / down))


# Attention


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
    values = _array(weights)
    num_queries, num_keys = values.shape
    is_mask = values.dtype == np.bool_
    with _styled():
        numbers = max(values.shape) <= LARGEST_WITH_NUMBERS
        # A cell with a number in it must hold five characters of 8 pt.
        cell = (50, 40) if numbers else (max(1, min(44, 530 // num_keys)),) * 2  # pixels
        width, height = num_keys * cell[0] / DPI, num_queries * cell[1] / DPI
        query_names = _query_names(num_queries, query_labels)
        key_names = _key_names(num_keys, key_labels, prefix_length)
        turned = max(map(len, key_names)) > 5 or (not numbers and key_labels is not None)
        figure = _canvas(
            width,
            height,
            title,
            left=0.45 + _text_width(max(query_names, key=len)),
            bottom=0.5 + (0.7 * _text_width(max(key_names, key=len)) if turned else 0),
            right=0.15 if is_mask else 1.0,
        )
        axes = _axes(figure)
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
            figure.colorbar(image, cax=_axes(figure, width + 0.15, 0, 0.15, height), label=quantity)
        show(figure, sentence)


def heat_maps(weights, *, prefix_length: int = 0, title: str = "", quantity: str = "weight") -> None:
    """Show `[heads, query, key]` as one small heat map a head, all in the same colours."""
    sentence = heat_maps_sentence(weights, prefix_length=prefix_length, title=title, quantity=quantity)
    values = _array(weights)
    heads, num_queries, num_keys = values.shape
    columns = min(heads, 4)
    rows = -(-heads // columns)
    gap = (0.15, 0.55)
    cell = max(1, min(44, int(((WIDTH - 1.7) / columns - gap[0]) * DPI / num_keys)))  # pixels
    panel_width, panel_height = num_keys * cell / DPI, num_queries * cell / DPI
    with _styled():
        width, height = columns * (panel_width + gap[0]), rows * (panel_height + gap[1])
        figure = _canvas(width, height, title, left=0.6, bottom=0.25, right=1.1)
        key_names = _key_names(num_keys, None, prefix_length)
        ticks = [prefix_length + position for position in _spaced(num_keys - prefix_length)]
        for head in range(heads):
            row, column = divmod(head, columns)
            x, y = column * (panel_width + gap[0]), row * (panel_height + gap[1])
            axes = _axes(figure, x, y + 0.25, panel_width, panel_height)
            image = _draw_matrix(axes, values[head], prefix_length, _colour_limits(values), numbers=False)
            axes.set_title(f"head {head}", fontsize=9, pad=4)
            axes.set_yticks(_spaced(num_queries), _spaced(num_queries) if column == 0 else [])
            axes.set_xticks(ticks, [key_names[tick] for tick in ticks])
            if column == 0:
                axes.set_ylabel("query")
            if head + columns >= heads:
                axes.set_xlabel("key")
        bar = _axes(figure, width + 0.1, 0.25, 0.15, height - gap[1])
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
    values = _array(weights)
    _check_matrix(values, 2, "[query, key]", prefix_length)
    if of_each_query not in ("favourite key", "largest weight"):
        raise ValueError(f"of_each_query is 'favourite key' or 'largest weight'; got {of_each_query!r}")
    num_queries, num_keys = values.shape
    row, column = axes_names
    queries = _phrases(row, _query_names(num_queries, None), _query_names(num_queries, query_labels))
    key_names = _key_names(num_keys, None, prefix_length)
    key_texts = _key_names(num_keys, key_labels, prefix_length)
    keys = _phrases(column, key_names, key_texts)
    size = f"{_count(num_queries, row)} by {_count(num_keys, column)}"
    if values.dtype == np.bool_ and relation != "may attend":
        return (
            f"{title or _upper_first(relation)}, {size}: {values.sum()} of {values.size} pairs {relation}, "
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
        facts = f"{queries[query]} attends most to {keys[key]}, weight {_number(values[query, key])}"
        if 1 < num_queries <= LARGEST_WITH_NUMBERS:
            told = key_texts if len(set(key_texts)) == num_keys else key_names
            if of_each_query == "favourite key":
                each = [told[k] for k in rounded.argmax(axis=1)]
            else:
                each = [_number(weight) for weight in rounded.max(axis=1)]
            facts += f"; the {of_each_query}s of queries 0 to {num_queries - 1} are {', '.join(each)}"
        if prefix_length:
            facts += f"; {_prefix_share(values, prefix_length)} of the weight is on the prefix"
    else:
        low = np.unravel_index(np.where(np.isfinite(rounded), rounded, np.inf).argmin(), rounded.shape)
        facts = (
            f"the largest {quantity} is {_number(values[query, key])}, of {queries[query]} and {keys[key]}; "
            f"the smallest is {_number(values[low])}, of {queries[low[0]]} and {keys[low[1]]}"
        )
    return f"{title or _upper_first(quantity)}, {size}: {facts}."


def heat_maps_sentence(weights, *, prefix_length: int = 0, title: str = "", quantity: str = "weight") -> str:
    values = _array(weights)
    _check_matrix(values, 3, "[heads, query, key]", prefix_length)
    heads, num_queries, num_keys = values.shape
    lead = (
        f"{title or _upper_first(quantity)}, {_count(heads, 'head')}, "
        f"{_count(num_queries, 'query')} by {_count(num_keys, 'key')}"
    )
    values = values.astype(float)
    largest = np.round(values.max(axis=(1, 2)), 2)
    sharp = int(largest.argmax())
    query, key = np.unravel_index(np.round(values[sharp], 2).argmax(), (num_queries, num_keys))
    key = f"key {_key_names(num_keys, None, prefix_length)[key]}"
    facts = f"the largest {quantity}, {_number(largest[sharp])}, is head {sharp}'s, from query {query} to {key}"
    if heads > 1:
        facts += f"; the largest of heads 0 to {heads - 1} are {', '.join(map(_number, largest))}"
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
    left, right = _array(left).astype(float), _array(right).astype(float)
    factors = (left, right, left @ right)
    limits = _colour_limits(np.concatenate([matrix.ravel() for matrix in factors]))
    cell, gap = (46 / DPI, 40 / DPI), 0.4
    widths = [
        max(matrix.shape[1] * cell[0], _text_width(name, 10)) for matrix, name in zip(factors, names, strict=True)
    ]
    height = max(len(matrix) for matrix in factors) * cell[1]
    with _styled():
        figure = _canvas(sum(widths) + 2 * gap, height + 0.3, title, left=0.15, bottom=0.12, right=0.15)
        for number, (matrix, name) in enumerate(zip(factors, names, strict=True)):
            rows, columns = matrix.shape
            x = sum(widths[:number]) + gap * number
            inset = (widths[number] - columns * cell[0]) / 2
            top = (height - rows * cell[1]) / 2
            axes = _axes(figure, x + inset, 0.3 + top, columns * cell[0], rows * cell[1])
            _draw_matrix(axes, matrix, 0, limits, numbers=True)
            axes.set(xticks=[], yticks=[])
            axes.set_title(f"{name} [{rows}, {columns}]", pad=4)
            if number:
                sign = _axes(figure, x - gap, 0.3, gap, height)
                sign.set_axis_off()
                sign.text(0.5, 0.5, "@="[number - 1], ha="center", va="center", fontsize=12)
        show(figure, sentence)


def matrix_product_sentence(
    left, right, *, names: Sequence[str] = ("left", "right", "product"), title: str = ""
) -> str:
    left, right = _array(left), _array(right)
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
        f"the largest entry of {names[2]} is {_number(product[row, column])}, in row {row} and column {column}."
    )


def _draw_matrix(axes, values: np.ndarray, prefix_length: int, limits: tuple[float, float], numbers: bool):
    diverging = limits[0] < 0
    colours = matplotlib.colormaps["PuOr" if diverging else "cividis"].with_extremes(bad="#d9d9d9")
    floats = values.astype(float)
    shown = np.ma.masked_invalid(floats)
    image = axes.imshow(shown, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    axes.spines[:].set_visible(False)
    if numbers:
        for (query, key), value in np.ndenumerate(floats):
            ink = _ink(image.to_rgba(value)) if np.isfinite(value) else "black"
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
    return _number(value)


def _ink(rgba) -> str:
    """Black or white, whichever has the larger contrast to the cell, as WCAG reckons it: 4.5 at least."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgba[:3]]
    return "black" if np.dot([0.2126, 0.7152, 0.0722], linear) > 0.179 else "white"


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
    return _number(values[:, :prefix_length].sum() / (values.sum() or 1.0))


def _check_matrix(values: np.ndarray, dims: int, layout: str, prefix_length: int) -> None:
    if values.ndim != dims or values.size == 0:
        raise ValueError(f"a heat map needs {layout}, none of them empty; got shape {list(values.shape)}")
    if np.isnan(values).any():
        raise ValueError(f"{np.isnan(values).sum()} of the {values.size} numbers of shape {list(values.shape)} are NaN")
    if not np.isfinite(values).any():
        raise ValueError(f"no number of shape {list(values.shape)} is finite, so there is nothing to colour")
    if not 0 <= prefix_length <= values.shape[-1]:
        raise ValueError(f"prefix_length must be 0 to {values.shape[-1]}, the number of keys; got {prefix_length}")


# Curves and bars


def curves(
    series: Mapping[str, Sequence[float]],
    *,
    x: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
    x_label: str = "step",
    y_label: str = "loss",
    title: str = "",
    smooth: int = 1,
    log_x: bool = False,
    from_zero: bool = False,
    digits: int = 2,
    path: str | os.PathLike | None = None,
) -> None:
    """Show one line for each label, over `x` or over 1, 2, 3, ...

    `x` holds the places of all lines, or those of each under its label. `smooth` is the number of values in a running
    mean, drawn over the pale line of the values themselves; the sentence then speaks of the means. `from_zero` begins
    the other axis at 0. With `path`, the figure is written there as PNG and not shown.
    """
    sentence = curves_sentence(series, x=x, x_label=x_label, y_label=y_label, title=title, smooth=smooth, digits=digits)
    with _styled():
        figure = _canvas(WIDTH - 0.85, 2.8, title, left=0.7, bottom=0.5, right=0.15)
        axes = _axes(figure)
        for (label, values), colour, marker in zip(series.items(), COLOURS, MARKERS, strict=False):
            values = _array(values).astype(float)
            places = np.arange(1, len(values) + 1) if x is None else _array(_places_of(label, x))
            if smooth > 1:
                axes.plot(places, values, color=colour, alpha=0.3, linewidth=1)
            means = _running_mean(values, smooth)
            every = max(1, len(means) // 8)
            axes.plot(places[smooth - 1 :], means, color=colour, marker=marker, markevery=every, label=label)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.3)
        if from_zero:
            axes.set_ylim(bottom=0)
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if x is not None and not isinstance(x, Mapping) and len(x) <= 10:
            axes.set_xticks(_array(x), [f"{place:g}" for place in x])
            axes.minorticks_off()
        if x is None:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        if path is None:
            show(figure, sentence)
        else:
            Path(path).write_bytes(_png(figure))
            plt.close(figure)


def curves_sentence(
    series: Mapping[str, Sequence[float]],
    *,
    x: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
    x_label: str = "step",
    y_label: str = "loss",
    title: str = "",
    smooth: int = 1,
    digits: int = 2,
) -> str:
    if not 1 <= len(series) <= len(COLOURS):
        raise ValueError(f"curves draws 1 to {len(COLOURS)} lines; got {len(series)}")
    facts = []
    for label, values in series.items():
        values = _finite_vector(values, f"curve {label!r}")
        places = _places_of(label, x)
        if places is not None and len(places) != len(values):
            raise ValueError(f"curve {label!r} has {len(values)} values for {len(places)} places in x")
        if not 1 <= smooth < len(values):
            raise ValueError(f"smooth must be 1 to {len(values) - 1}: {label!r} has {len(values)} values; got {smooth}")
        means = _running_mean(values, smooth)
        facts.append(f"{y_label} {_change(means, digits)} {_span(places, x_label, len(values))}")
        if places is not None:
            facts[-1] += _extreme_inside(means, _array(places)[smooth - 1 :], digits)
        facts[-1] += f" ({label})"
    lead = title or f"{_upper_first(y_label)} by {x_label}"
    return f"{lead}: {'; '.join(facts)}."


def bars(
    scores: Mapping[str, float],
    *,
    score_label: str = "score",
    title: str = "",
    lower_is_better: bool = False,
    digits: int = 2,
) -> None:
    """Show one horizontal bar for each label, in the order given."""
    sentence = bars_sentence(
        scores, score_label=score_label, title=title, lower_is_better=lower_is_better, digits=digits
    )
    labels = list(scores)
    values = _array(list(scores.values())).astype(float)
    with _styled():
        left = 0.2 + _text_width(max(labels, key=len))
        figure = _canvas(WIDTH - 0.15 - left, 0.36 * len(labels), title, left=left, bottom=0.5, right=0.15)
        axes = _axes(figure)
        drawn = axes.barh(labels, values, color=COLOURS[0], height=0.65)
        axes.bar_label(drawn, [_number(value, digits) for value in values], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel=score_label)
        show(figure, sentence)


def bars_sentence(
    scores: Mapping[str, float],
    *,
    score_label: str = "score",
    title: str = "",
    lower_is_better: bool = False,
    digits: int = 2,
) -> str:
    if len(scores) < 2:
        raise ValueError(f"bars compares two scores or more; got {len(scores)}")
    values = _finite_vector(list(scores.values()), "bars")
    labels = list(scores)
    rounded = np.round(values, digits) * (-1 if lower_is_better else 1)
    facts = ", ".join(f"{label} {_number(value, digits)}" for label, value in zip(labels, values, strict=True))
    best, worst = labels[rounded.argmax()], labels[rounded.argmin()]
    verdict = "all are equal" if rounded.max() == rounded.min() else f"{best} is best, {worst} is worst"
    return f"{title or _upper_first(score_label)}: {facts}; {verdict}."


def dots(
    scores: Mapping[str, Sequence[float]], *, score_label: str = "score", title: str = "", digits: int = 2
) -> None:
    """Show one row for each label, with a dot for each of its runs (one a seed) and a line at their mean."""
    sentence = dots_sentence(scores, score_label=score_label, title=title, digits=digits)
    labels = list(scores)
    with _styled():
        left = 0.2 + _text_width(max(labels, key=len))
        right = 0.3 + _text_width(f"{1:.{digits}f}")
        figure = _canvas(WIDTH - right - left, 0.3 * len(labels), title, left=left, bottom=0.5, right=right)
        axes = _axes(figure)
        for row, values in enumerate(_array(values).astype(float) for values in scores.values()):
            mean, beside = values.mean(), np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else [0]
            axes.plot([mean, mean], [row - 0.35, row + 0.35], color="black", linewidth=1.5)
            axes.plot(
                values, row + np.asarray(beside), linestyle="", marker="o", markersize=5, color=COLOURS[0], alpha=0.7
            )
            axes.annotate(
                _number(mean, digits),
                (1, row),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.margins(x=0.05)
        axes.grid(axis="x", alpha=0.3)
        axes.set(xlabel=score_label)
        show(figure, sentence)


def dots_sentence(
    scores: Mapping[str, Sequence[float]], *, score_label: str = "score", title: str = "", digits: int = 2
) -> str:
    if len(scores) < 2:
        raise ValueError(f"dots compares two labels or more; got {len(scores)}")
    facts, means = [], {}
    for label, values in scores.items():
        values = _finite_vector(values, f"label {label!r}")
        means[label] = round(values.mean(), digits)
        fact = f"{label} {_number(values.mean(), digits)}"
        if len(values) > 1:
            fact += f" ({_number(values.min(), digits)} to {_number(values.max(), digits)})"
        facts.append(fact)
    ends = [[label for label in means if means[label] == end] for end in (max(means.values()), min(means.values()))]
    verdict = ", ".join(
        f"{_listed(labels)} {'is' if len(labels) == 1 else 'are'} {place}"
        for labels, place in zip(ends, ("highest", "lowest"), strict=True)
    )
    if ends[0] == ends[1]:
        verdict = "all means are equal"
    return f"{title or _upper_first(score_label)}, mean and range of the runs: {', '.join(facts)}; {verdict}."


def _places_of(label: str, x) -> Sequence[float] | None:
    """The places of one line: `x` holds those of all, or of each under its label."""
    if isinstance(x, Mapping) and label not in x:
        raise ValueError(f"curve {label!r} has no places in x, which has {', '.join(x)}")
    return x[label] if isinstance(x, Mapping) else x


def _running_mean(values: np.ndarray, length: int) -> np.ndarray:
    return np.convolve(values, np.full(length, 1 / length), mode="valid")


def _change(values: np.ndarray, digits: int) -> str:
    first, last = _number(values[0], digits), _number(values[-1], digits)
    if first == last:
        return f"stays at {first}"
    return f"{'rises' if values[-1] > values[0] else 'falls'} from {first} to {last}"


def _span(x: Sequence[float] | None, x_label: str, length: int) -> str:
    return f"in {_count(length, x_label)}" if x is None else f"between {x_label} {x[0]:g} and {x[-1]:g}"


def _extreme_inside(values: np.ndarray, x: np.ndarray, digits: int) -> str:
    """Names a peak or a dip that the two ends do not tell of."""
    rounded = np.round(values, digits)
    ends = rounded[[0, -1]]
    found = ""
    if rounded.max() > ends.max():
        found += f", with a peak of {_number(rounded.max(), digits)} at {x[rounded.argmax()]:g}"
    if rounded.min() < ends.min():
        found += f", with a low of {_number(rounded.min(), digits)} at {x[rounded.argmin()]:g}"
    return found


def _finite_vector(values, name: str) -> np.ndarray:
    array = _array(values).astype(float)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"{name} needs finite numbers in one dimension; got shape {list(array.shape)}: {array}")
    return array


# Reshapes


def blocks(
    grids: Mapping[str, Sequence],
    *,
    colour_by: Callable[[str], str],
    block_name: str = "block",
    title: str = "",
) -> None:
    """Show where the entries of a tensor go: each grid is `[row, column]` or `[block, row, column]`.

    Entries are strings or numbers. `colour_by` names the group of an entry from its text ("features of head 0").
    A group keeps its colour in all grids, so that a right and a wrong reshape can be compared.
    """
    sentence = blocks_sentence(grids, colour_by=colour_by, block_name=block_name, title=title)
    texts = {name: _texts(grid) for name, grid in grids.items()}
    colour_of = dict(zip(_groups(texts.values(), colour_by), COLOURS, strict=False))
    cell = (0.42, 0.28)
    gap = 0.6  # between blocks, in cells
    rows = max(_height(grid, gap) for grid in texts.values())
    # A panel is as wide as its cells, or as its name.
    panels = [max(grid.shape[-1] * cell[0], _text_width(name, 10)) for name, grid in texts.items()]
    between = 0.4
    with _styled():
        width = max(sum(panels) + between * (len(panels) - 1), _key_width(colour_of) - 0.4)  # the canvas has margins
        height = rows * cell[1] + 0.3
        figure = _canvas(width, height, title, left=0.4, bottom=0.4, right=0.2)
        for number, (name, grid) in enumerate(texts.items()):
            columns = grid.shape[-1]
            x = sum(panels[:number]) + between * number + (panels[number] - columns * cell[0]) / 2
            axes = _axes(figure, x, 0.3, columns * cell[0], rows * cell[1])
            for (block, row, column), text in np.ndenumerate(_stack(grid)):
                colour = colour_of[colour_by(text)]
                top = block * (grid.shape[-2] + gap) + row
                axes.add_patch(Rectangle((column, top), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
                ink = _ink(matplotlib.colors.to_rgb(colour))
                axes.text(column + 0.5, top + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
            axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], title=name)
            middles = [block * (grid.shape[-2] + gap) + grid.shape[-2] / 2 for block in range(len(_stack(grid)))]
            names = [f"{block_name} {block}" for block in range(len(middles))] if grid.ndim == 3 else []
            axes.set_yticks(middles[: len(names)], names, rotation=90, va="center")
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        _colour_key(figure, colour_of)
        show(figure, sentence)


def _colour_key(figure: Figure, colour_of: Mapping[str, str]) -> None:
    """A patch and a name for each colour, in a row at the bottom.

    Its places hang on the number of letters alone. A legend's hang on their drawn widths, which differ from one
    version of matplotlib to the next.
    """
    width, height = figure.get_size_inches()
    x = (width - _key_width(colour_of)) / 2
    for name, colour in colour_of.items():
        figure.add_artist(Rectangle((x / width, 0.13 / height), 0.22 / width, 0.08 / height, color=colour))
        figure.text((x + 0.3) / width, 0.17 / height, name, va="center", fontsize=8)
        x += _key_width([name]) + KEY_GAP


def _key_width(names: Collection[str]) -> float:
    """In inches: a patch and a name each, letters of half their height, and the gaps between."""
    return sum(0.3 + 0.52 * 8 / 72 * len(name) for name in names) + KEY_GAP * (len(names) - 1)


def blocks_sentence(
    grids: Mapping[str, Sequence],
    *,
    colour_by: Callable[[str], str],
    block_name: str = "block",
    title: str = "",
) -> str:
    texts = {name: _texts(grid) for name, grid in grids.items()}
    if not texts:
        raise ValueError("blocks draws one grid or more; got none")
    for name, grid in texts.items():
        if grid.ndim not in (2, 3) or grid.size == 0:
            raise ValueError(f"grid {name!r} needs [row, column] or [block, row, column]; got shape {list(grid.shape)}")
    groups = _groups(texts.values(), colour_by)
    if len(groups) > len(COLOURS):
        raise ValueError(f"blocks has colours for {len(COLOURS)} groups; colour_by named {len(groups)}")
    facts = []
    for name, grid in texts.items():
        held = [_groups([block], colour_by) for block in _stack(grid)]
        held = [f"all {len(groups)}" if len(groups) > 2 and block == groups else _listed(block) for block in held]
        if grid.ndim == 2:
            facts.append(f"{name}, {grid.shape[0]} by {grid.shape[1]}, holds {held[0]}")
            continue
        each = ", ".join(f"{block_name} {number} holds {text}" for number, text in enumerate(held))
        if len(held) > 1 and len(set(held)) == 1:
            each = f"every {block_name} holds {held[0]}"
        facts.append(f"{name}, {_count(len(grid), block_name)} of {grid.shape[1]} by {grid.shape[2]}: {each}")
    lead = title or "Entries by colour"
    if any(f"holds all {len(groups)}" in fact for fact in facts):
        lead += f" ({_listed(groups)})"
    return f"{lead}: {'; '.join(facts)}."


def _texts(grid) -> np.ndarray:
    array = _array(grid)
    if np.issubdtype(array.dtype, np.floating):  # token.feature: 2.0 is feature 0 of token 2
        return np.vectorize(lambda value: f"{value:.1f}", otypes=[object])(array)
    return array.astype(str).astype(object)


def _stack(grid: np.ndarray) -> np.ndarray:
    return grid if grid.ndim == 3 else grid[None]


def _height(grid: np.ndarray, gap: float) -> float:
    number = len(_stack(grid))
    return number * grid.shape[-2] + (number - 1) * gap


def _groups(grids, colour_by: Callable[[str], str]) -> list[str]:
    return sorted({colour_by(text) for grid in grids for text in grid.flat})


# Tables


def shape_table(rows: Sequence[tuple[str, object, str]]) -> None:
    """Show a table of concept, shape and role, one row for each `(concept, tensor, role)`.

    The shapes are read from the tensors, so that the table cannot say what is not so. Without a notebook's kernel, the
    table is printed.
    """
    if not rows:
        raise ValueError("shape_table needs one row or more; got none")
    table = [("concept", "shape", "role")]
    table += [(concept, str(list(tensor.shape)), role) for concept, tensor, role in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    plain = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    if not _has_kernel():
        print("\n".join(plain))
        return
    from IPython.display import display

    marked = [(concept, f"`{shape}`", role) for concept, shape, role in table[1:]]
    marked = [table[0], ("---", "---", "---"), *marked]
    markdown = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in marked]
    display({"text/markdown": "\n".join(markdown), "text/plain": "\n".join(plain)}, raw=True)


# Words and numbers


def _array(values) -> np.ndarray:
    """A NumPy array of a tensor (on any device, with or without gradient), an array or a list."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point():  # NumPy has no bfloat16
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def _number(value: float, digits: int = 2) -> str:
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _count(number: int, noun: str) -> str:
    plural = noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def _listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]
