"""Curves, bars and dots."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from helpers.course.figures.canvas import (
    BACKGROUND,
    COLOURS,
    MARKERS,
    WIDTH,
    axes_on,
    new_canvas,
    png_bytes,
    show,
    styled,
    text_width,
)
from helpers.course.figures.words import count_of, finite_vector, listed, number_text, to_array, upper_first


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
    joined: bool = True,
    digits: int = 2,
    path: str | os.PathLike | None = None,
    caption: str | None = None,
) -> None:
    """Show one line for each label, over `x` or over 1, 2, 3, ...

    `x` holds the places of all lines, or those of each under its label. `smooth` is the number of values in a running
    mean, drawn over the pale line of the values themselves; the sentence then speaks of the means. `from_zero` begins
    the other axis at 0. `joined=False` draws a mark for every value and no line. With `path`, the figure is written
    there as PNG and not shown.
    """
    sentence = curves_sentence(series, x=x, x_label=x_label, y_label=y_label, title=title, smooth=smooth, digits=digits)
    with styled():
        figure = new_canvas(WIDTH - 0.85, 2.8, title, left=0.7, bottom=0.5, right=0.15)
        axes = axes_on(figure)
        for (label, values), colour, marker in zip(series.items(), COLOURS, MARKERS, strict=False):
            values = to_array(values).astype(float)
            places = np.arange(1, len(values) + 1) if x is None else to_array(_places_of(label, x))
            if smooth > 1:
                axes.plot(places, values, color=colour, alpha=0.3, linewidth=1)
            means = _running_mean(values, smooth)
            every, line = (max(1, len(means) // 8), "-") if joined else (1, "")
            style = {"color": colour, "marker": marker, "markevery": every, "linestyle": line}
            axes.plot(places[smooth - 1 :], means, **style, label=label)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.grid(alpha=0.3)
        if from_zero:
            axes.set_ylim(bottom=0)
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if x is not None and not isinstance(x, Mapping) and len(x) <= 10:
            axes.set_xticks(to_array(x), [f"{place:g}" for place in x])
            axes.minorticks_off()
        if x is None:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        if path is None:
            show(figure, sentence, caption)
        else:
            Path(path).write_bytes(png_bytes(figure))
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
        values = finite_vector(values, f"curve {label!r}")
        places = _places_of(label, x)
        if places is not None and len(places) != len(values):
            raise ValueError(f"curve {label!r} has {len(values)} values for {len(places)} places in x")
        if not 1 <= smooth < len(values):
            raise ValueError(f"smooth must be 1 to {len(values) - 1}: {label!r} has {len(values)} values; got {smooth}")
        means = _running_mean(values, smooth)
        facts.append(f"{y_label} {_change(means, digits)} {_span(places, x_label, len(values))}")
        if places is not None:
            facts[-1] += _extreme_inside(means, to_array(places)[smooth - 1 :], digits)
        facts[-1] += f" ({label})"
    lead = title or f"{upper_first(y_label)} by {x_label}"
    return f"{lead}: {'; '.join(facts)}."


def bars(
    scores: Mapping[str, float],
    *,
    score_label: str = "score",
    title: str = "",
    lower_is_better: bool = False,
    digits: int = 2,
    caption: str | None = None,
) -> None:
    """Show one horizontal bar for each label, in the order given."""
    sentence = bars_sentence(
        scores, score_label=score_label, title=title, lower_is_better=lower_is_better, digits=digits
    )
    labels = list(scores)
    values = to_array(list(scores.values())).astype(float)
    with styled():
        left = 0.2 + text_width(max(labels, key=len))
        figure = new_canvas(WIDTH - 0.15 - left, 0.36 * len(labels), title, left=left, bottom=0.5, right=0.15)
        axes = axes_on(figure)
        drawn = axes.barh(labels, values, color=COLOURS[0], height=0.65)
        axes.bar_label(drawn, [number_text(value, digits) for value in values], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel=score_label)
        show(figure, sentence, caption)


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
    values = finite_vector(list(scores.values()), "bars")
    labels = list(scores)
    rounded = np.round(values, digits) * (-1 if lower_is_better else 1)
    facts = ", ".join(f"{label} {number_text(value, digits)}" for label, value in zip(labels, values, strict=True))
    best, worst = labels[rounded.argmax()], labels[rounded.argmin()]
    verdict = "all are equal" if rounded.max() == rounded.min() else f"{best} is best, {worst} is worst"
    return f"{title or upper_first(score_label)}: {facts}; {verdict}."


def dots(
    scores: Mapping[str, Sequence[float]],
    *,
    score_label: str = "score",
    title: str = "",
    between: tuple[float, float] | None = None,
    digits: int = 2,
    caption: str | None = None,
) -> None:
    """Show one row for each label, with a dot for each of its runs (one a seed) and a line at their mean.

    `between` are the ends of the axis, (0, 1) for shares: then figures can be compared.
    """
    sentence = dots_sentence(scores, score_label=score_label, title=title, digits=digits)
    labels = list(scores)
    every = [float(value) for values in scores.values() for value in to_array(values)]
    if between is not None and not between[0] <= min(every) <= max(every) <= between[1]:
        raise ValueError(f"the axis ends at {between}, and the values go from {min(every):g} to {max(every):g}")
    with styled():
        left = 0.2 + text_width(max(labels, key=len))
        right = 0.3 + text_width(f"{1:.{digits}f}")
        figure = new_canvas(WIDTH - right - left, 0.3 * len(labels), title, left=left, bottom=0.5, right=right)
        axes = axes_on(figure)
        for row, values in enumerate(to_array(values).astype(float) for values in scores.values()):
            mean, beside = values.mean(), np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else [0]
            axes.plot([mean, mean], [row - 0.35, row + 0.35], color="black", linewidth=1.5)
            axes.plot(
                values,
                row + np.asarray(beside),
                linestyle="",
                marker="o",
                markersize=5,
                color=COLOURS[0],
                markeredgecolor=BACKGROUND,
                markeredgewidth=0.6,
            )
            axes.annotate(
                number_text(mean, digits),
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
        if between is not None:
            beyond = 0.03 * (between[1] - between[0])  # whole dots at the ends
            axes.set_xlim(between[0] - beyond, between[1] + beyond)
        axes.grid(axis="x", alpha=0.3)
        axes.set(xlabel=score_label)
        show(figure, sentence, caption)


def dots_sentence(
    scores: Mapping[str, Sequence[float]], *, score_label: str = "score", title: str = "", digits: int = 2
) -> str:
    if len(scores) < 2:
        raise ValueError(f"dots compares two labels or more; got {len(scores)}")
    facts, means = [], {}
    for label, values in scores.items():
        values = finite_vector(values, f"label {label!r}")
        means[label] = round(values.mean(), digits)
        fact = f"{label} {number_text(values.mean(), digits)}"
        if len(values) > 1:
            fact += f" ({number_text(values.min(), digits)} to {number_text(values.max(), digits)})"
        facts.append(fact)
    ends = [[label for label in means if means[label] == end] for end in (max(means.values()), min(means.values()))]
    verdict = ", ".join(
        f"{listed(labels)} {'is' if len(labels) == 1 else 'are'} {place}"
        for labels, place in zip(ends, ("highest", "lowest"), strict=True)
    )
    if ends[0] == ends[1]:
        verdict = "all means are equal"
    return f"{title or upper_first(score_label)}, mean and range of the runs: {', '.join(facts)}; {verdict}."


def _places_of(label: str, x) -> Sequence[float] | None:
    """The places of one line: `x` holds those of all, or of each under its label."""
    if isinstance(x, Mapping) and label not in x:
        raise ValueError(f"curve {label!r} has no places in x, which has {', '.join(x)}")
    return x[label] if isinstance(x, Mapping) else x


def _running_mean(values: np.ndarray, length: int) -> np.ndarray:
    return np.convolve(values, np.full(length, 1 / length), mode="valid")


def _change(values: np.ndarray, digits: int) -> str:
    first, last = number_text(values[0], digits), number_text(values[-1], digits)
    if first == last:
        return f"stays at {first}"
    return f"{'rises' if values[-1] > values[0] else 'falls'} from {first} to {last}"


def _span(x: Sequence[float] | None, x_label: str, length: int) -> str:
    return f"in {count_of(length, x_label)}" if x is None else f"between {x_label} {x[0]:g} and {x[-1]:g}"


def _extreme_inside(values: np.ndarray, x: np.ndarray, digits: int) -> str:
    """Names a peak or a dip that the two ends do not tell of."""
    rounded = np.round(values, digits)
    ends = rounded[[0, -1]]
    found = ""
    if rounded.max() > ends.max():
        found += f", with a peak of {number_text(rounded.max(), digits)} at {x[rounded.argmax()]:g}"
    if rounded.min() < ends.min():
        found += f", with a low of {number_text(rounded.min(), digits)} at {x[rounded.argmin()]:g}"
    return found
