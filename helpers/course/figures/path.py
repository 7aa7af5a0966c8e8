"""One query's path through attention: scores, weights, and the mix of the values."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps

from helpers.course.figures.canvas import (
    COLOURS,
    PREFIX_COLOUR,
    PREFIX_INK,
    axes_on,
    ink_on,
    new_canvas,
    show,
    styled,
    text_width,
)
from helpers.course.figures.matrix_words import digits_of, key_names
from helpers.course.figures.words import number_text, to_array

LARGEST = 16  # keys: a row for each
MOST_NUMBERS = 4  # of a value that fit into its row
ROW, TOP, LAST = 0.3, 0.42, 0.36  # inches: a key's row, the columns' names, the row of the sum


def query_path(
    query,
    keys,
    values,
    *,
    labels: Sequence[str] | None = None,
    query_label: str = "",
    prefix_length: int = 0,
    scaled: bool = True,
    value_labels: Sequence[str] | None = None,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Show what one query does: a row for each key, with its score, its weight, its value and weight × value.

    `query` is `[head_dim]`, `keys` are `[keys, head_dim]`, `values` `[keys, value_dim]`. The last row is the sum of the
    column above it, which is the mixed value. The first `prefix_length` keys are the prefix, named p0, p1, ...;
    `labels` name the others, `value_labels` the columns of the values; a sum of at most four is written out.
    With `scaled`, scores are divided by √head_dim.
    """
    sentence = query_path_sentence(
        query,
        keys,
        values,
        labels=labels,
        query_label=query_label,
        prefix_length=prefix_length,
        scaled=scaled,
        title=title,
    )
    scores, weights, values = _steps(query, keys, values, scaled)
    names = key_names(len(scores), labels, prefix_length)
    height = len(scores) * ROW
    left = 0.2 + text_width(max(names, key=len))
    widths, gap = (1.45, 1.05, 1.05, 1.05), 0.14
    places = [sum(widths[:number]) + gap * number for number in range(4)]
    below = 0.0 if value_labels is None else 0.12 + max(text_width(_last_word(label)) for label in value_labels)
    bottom = TOP + height + 0.06 + below
    parts = weights[:, None] * values
    mixed = parts.sum(axis=0)
    colours = [PREFIX_COLOUR if number < prefix_length else COLOURS[0] for number in range(len(scores))]
    with styled():
        figure = new_canvas(sum(widths) + 3 * gap, bottom + LAST, title, left=left, bottom=0.1, right=0.12)
        asks = f"{query_label}'s query · key" if query_label else "query · key"
        heads = (("score", asks), ("weight", "softmax"), ("value", ""), ("weight × value", ""))
        panels = [axes_on(figure, x, TOP, width, height) for x, width in zip(places, widths, strict=True)]
        for x, width, (name, how) in zip(places, widths, heads, strict=True):
            _sign(figure, (x, 0, width, TOP), name, height=0.72, weight="bold")
            _sign(figure, (x, 0, width, TOP), how, height=0.28)
        _bars(panels[0], scores, colours)
        _bars(panels[1], weights, colours, smallest_end=1.0)
        panels[0].set_yticks(range(len(names)), names)
        for tick, _ in zip(panels[0].get_yticklabels(), range(prefix_length), strict=False):
            tick.set_color(PREFIX_INK)
        largest = max(np.abs(values).max(), 1e-9)
        _strips(panels[2], values, largest)
        _strips(panels[3], parts, largest)
        if value_labels is not None:
            for panel in panels[2:]:
                panel.set_xticks(range(values.shape[1]), [_last_word(label) for label in value_labels], rotation=90)
                panel.tick_params(axis="x", labelsize=8.5, length=0, pad=2)
        _sign(figure, (places[1], bottom, widths[1], LAST), f"sum {number_text(weights.sum(), 0)}")
        _sign(figure, (places[2], bottom, widths[2] + gap, LAST), "sum = mixed", weight="bold")
        total = axes_on(figure, places[3], bottom + 0.03, widths[3], ROW)
        _strips(total, mixed[None], largest, numbers=len(mixed) <= MOST_NUMBERS)
        total.spines[:].set(visible=True, color="black", linewidth=1.8)
        show(figure, sentence, caption)


def query_path_sentence(
    query,
    keys,
    values,
    *,
    labels: Sequence[str] | None = None,
    query_label: str = "",
    prefix_length: int = 0,
    scaled: bool = True,
    title: str = "",
) -> str:
    scores, weights, values = _steps(query, keys, values, scaled)
    names = key_names(len(scores), labels, prefix_length)
    mixed = weights @ values
    each = [
        f"{name} {number_text(score, digits_of(scores))} and {number_text(weight)}"
        for name, score, weight in zip(names, scores, weights, strict=True)
    ]
    best = int(np.round(weights, 2).argmax())
    lead = title or f"The path of {f'the query of {query_label}' if query_label else 'one query'}"
    sentence = (
        f"{lead}: scores against the keys and weights after the softmax are {', '.join(each)}; "
        f"the largest weight, {number_text(weights[best])}, is on key {names[best]}"
    )
    if values.shape[1] <= 8:
        sentence += f"; the mixed value is [{', '.join(map(number_text, mixed))}]"
        sentence += f", that of key {names[best]} alone [{', '.join(map(number_text, values[best]))}]"
    return sentence + "."


def _steps(query, keys, values, scaled: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    query, keys, values = (to_array(array).astype(float) for array in (query, keys, values))
    if query.ndim != 1 or keys.ndim != 2 or values.ndim != 2 or keys.shape != (len(values), len(query)):
        raise ValueError(
            "query_path needs a query [head_dim], keys [keys, head_dim] and values [keys, value_dim]; "
            f"got {list(query.shape)}, {list(keys.shape)} and {list(values.shape)}"
        )
    if not 1 <= len(keys) <= LARGEST:
        raise ValueError(f"query_path has room for 1 to {LARGEST} keys; got {len(keys)}")
    if not all(np.isfinite(array).all() for array in (query, keys, values)):
        raise ValueError("query_path needs finite numbers; the query, the keys or the values have others")
    scores = keys @ query / (len(query) ** 0.5 if scaled else 1.0)
    weights = np.exp(scores - scores.max())
    return scores, weights / weights.sum(), values


def _sign(figure, place: tuple[float, float, float, float], text: str, height: float = 0.5, weight: str = "normal"):
    axes = axes_on(figure, *place)
    axes.set_axis_off()
    axes.text(0.5, height, text, ha="center", va="center", fontsize=9, weight=weight)


def _bars(axes, values: np.ndarray, colours: Sequence[str], smallest_end: float = 0.0) -> None:
    """Horizontal bars from zero, each with its number at the side that is free."""
    values = np.where(np.abs(values) < 1e-6, 0.0, values)  # a zero is one whatever its last bits say
    axes.barh(range(len(values)), values, color=colours, height=0.62)
    low, high = min(values.min(), 0.0), max(values.max(), 0.0, smallest_end)
    sides = 0.66 if low < 0 < high else 0.33  # of the width, for the numbers beyond the bars
    room = (high - low or 1.0) / (1 - sides) * 0.33
    axes.set(
        xlim=(low - (room if low < 0 else 0), high + (room if high > 0 else 0)),
        ylim=(len(values) - 0.5, -0.5),
        xticks=[],
    )
    for row, value in enumerate(values):
        axes.annotate(
            number_text(value, digits_of(values)),
            (value, row),
            xytext=(-3 if value < 0 else 3, 0),
            textcoords="offset points",
            ha="right" if value < 0 else "left",
            va="center",
            fontsize=8.5,
        )
    axes.axvline(0, color="black", linewidth=0.9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])


def _last_word(label: str) -> str:
    return label.split()[-1]


def _strips(axes, values: np.ndarray, largest: float, numbers: bool = False) -> None:
    """A row of cells for each vector; with numbers in them if asked for, or where there are few."""
    image = axes.imshow(
        values, cmap=colormaps["PuOr"], vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest"
    )
    for row in range(1, len(values)):
        axes.axhline(row - 0.5, color="white", linewidth=1.5)
    if numbers or values.shape[1] <= 3:
        for (row, column), value in np.ndenumerate(values):
            axes.text(
                column,
                row,
                number_text(value, 1),
                ha="center",
                va="center",
                fontsize=8.5,
                color=ink_on(image.to_rgba(value)),
            )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
