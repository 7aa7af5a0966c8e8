"""Words and numbers of the figures' sentences."""

from collections.abc import Sequence

import numpy as np


def to_array(values) -> np.ndarray:
    """A NumPy array of a tensor (on any device, with or without gradient), an array or a list."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point():  # NumPy has no bfloat16
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def number_text(value: float, digits: int = 2) -> str:
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    return noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def finite_vector(values, name: str) -> np.ndarray:
    array = to_array(values).astype(float)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"{name} needs finite numbers in one dimension; got shape {list(array.shape)}: {array}")
    return array
