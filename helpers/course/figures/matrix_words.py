"""The sentences of attention maps and other matrices, and the names of their rows and columns."""

from collections.abc import Mapping, Sequence

import numpy as np

from helpers.course.figures.canvas import LARGEST_WITH_NUMBERS
from helpers.course.figures.words import count_of, number_text, plural, to_array, upper_first


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
    check_matrix(values, 2, "[query, key]", prefix_length)
    _check_choice(of_each_query)
    facts = _facts(values, query_labels, key_labels, prefix_length, quantity, axes_names, relation, of_each_query)
    return f"{title or _kind_of(values, quantity, relation)}, {_size_of(values, axes_names)}: {facts}."


def heat_maps_sentence(
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
    _check_choice(of_each_query)
    if isinstance(weights, Mapping):
        panels = panels_of(weights, prefix_length)
        options = (query_labels, key_labels, prefix_length, quantity, axes_names, relation, of_each_query)
        each = [f"{name}: {_facts(values, *options)}" for name, values in panels.items()]
        first = next(iter(panels.values()))
        lead = title or _kind_of(first, quantity, relation)
        return f"{lead}, {count_of(len(panels), 'map')} of {_size_of(first, axes_names)}. {'. '.join(each)}."
    values = np.stack([*panels_of(weights, prefix_length).values()]).astype(float)
    heads, num_queries, num_keys = values.shape
    row, column = axes_names
    queries = _phrases(row, query_names(num_queries, None), query_names(num_queries, query_labels))
    texts = key_names(num_keys, key_labels, prefix_length)
    keys = _phrases(column, key_names(num_keys, None, prefix_length), texts)
    lead = f"{title or upper_first(quantity)}, {count_of(heads, 'head')}, {_size_of(values[0], axes_names)}"
    digits = digits_of(values)
    largest = np.round(values.max(axis=(1, 2)), 2)
    sharp = int(largest.argmax())
    query, key = np.unravel_index(np.round(values[sharp], 2).argmax(), (num_queries, num_keys))
    facts = (
        f"the largest {quantity}, {number_text(largest[sharp], digits)}, is head {sharp}'s, "
        f"from {queries[query]} to {keys[key]}"
    )
    if heads > 1:
        each = ", ".join(number_text(one, digits) for one in largest)
        facts += f"; the largest of heads 0 to {heads - 1} are {each}"
    if prefix_length and quantity == "weight":
        shares = ", ".join(_prefix_share(head, prefix_length) for head in values)
        facts += (
            f"; the prefix's shares of the weight are {shares}" if heads > 1 else f"; the prefix's share is {shares}"
        )
    return f"{lead}: {facts}."


def matrix_product_sentence(
    left, right, *, names: Sequence[str] = ("left", "right", "product"), title: str = ""
) -> str:
    left, right = to_array(left), to_array(right)
    for matrix in (left, right):
        check_matrix(matrix, 2, "[row, column]", 0)
    if left.shape[1] != right.shape[0] or max(*left.shape, *right.shape) > LARGEST_WITH_NUMBERS:
        raise ValueError(
            f"matrix_product shows [rows, n] @ [n, columns] of at most {LARGEST_WITH_NUMBERS} each; "
            f"got {list(left.shape)} and {list(right.shape)}"
        )
    product = left @ right
    rounded = np.round(product, 2)
    row, column = np.unravel_index(rounded.argmax(), rounded.shape)
    largest = number_text(product[row, column], digits_of(product))
    sizes = [f"{name} {list(matrix.shape)}" for name, matrix in zip(names, (left, right, product), strict=True)]
    return (
        f"{title or 'Matrix product'}: {sizes[0]} times {sizes[1]} gives {sizes[2]}; "
        f"the largest entry of {names[2]} is {largest}, in row {row} and column {column}."
    )


def _facts(
    values: np.ndarray,
    query_labels: Sequence[str] | None,
    key_labels: Sequence[str] | None,
    prefix_length: int,
    quantity: str,
    axes_names: tuple[str, str],
    relation: str,
    of_each_query: str,
) -> str:
    """What one matrix shows."""
    num_queries, num_keys = values.shape
    row, column = axes_names
    queries = _phrases(row, query_names(num_queries, None), query_names(num_queries, query_labels))
    names = key_names(num_keys, None, prefix_length)
    texts = key_names(num_keys, key_labels, prefix_length)
    keys = _phrases(column, names, texts)
    if values.dtype == np.bool_ and relation != "may attend":
        return (
            f"{values.sum()} of {values.size} pairs {relation}, {np.triu(values, 1).sum()} of them above the diagonal"
        )
    if values.dtype == np.bool_:
        seen = ", ".join(map(str, values.sum(axis=1)))
        return (
            f"{values.sum()} of {values.size} pairs may attend; "
            f"{plural(column)} that {plural(row)} 0 to {num_queries - 1} may attend to, in turn: {seen}"
        )
    digits = digits_of(values)
    rounded = np.round(values, 2)  # ties of what the figure shows go to the first, whatever the last bits say
    query, key = np.unravel_index(rounded.argmax(), rounded.shape)
    largest = number_text(values[query, key], digits)
    if quantity != "weight":
        low = np.unravel_index(np.where(np.isfinite(rounded), rounded, np.inf).argmin(), rounded.shape)
        return (
            f"the largest {quantity} is {largest}, of {queries[query]} and {keys[key]}; "
            f"the smallest is {number_text(values[low], digits)}, of {queries[low[0]]} and {keys[low[1]]}"
        )
    facts = f"{queries[query]} attends most to {keys[key]}, weight {largest}"
    if 1 < num_queries <= LARGEST_WITH_NUMBERS:
        told = texts if len(set(texts)) == num_keys else names
        if of_each_query == "favourite key":
            each = [told[k] for k in rounded.argmax(axis=1)]
        else:
            each = [number_text(weight, digits) for weight in rounded.max(axis=1)]
        facts += f"; the {of_each_query}s of {plural(row)} 0 to {num_queries - 1} are {', '.join(each)}"
    if prefix_length:
        facts += f"; {_prefix_share(values, prefix_length)} of the weight is on the prefix"
    return facts


def panels_of(weights, prefix_length: int) -> dict[str, np.ndarray]:
    """The maps under their names: those of a mapping, or head 0, head 1, ... of `[heads, query, key]`."""
    if not isinstance(weights, Mapping):
        values = to_array(weights)
        check_matrix(values, 3, "[heads, query, key]", prefix_length)
        return {f"head {head}": matrix for head, matrix in enumerate(values)}
    panels = {name: to_array(matrix) for name, matrix in weights.items()}
    if not panels:
        raise ValueError("heat_maps draws one map or more; got none")
    for values in panels.values():
        check_matrix(values, 2, "[query, key]", prefix_length)
    if len({(values.shape, values.dtype == np.bool_) for values in panels.values()}) > 1:
        found = ", ".join(f"{name} {list(values.shape)} of {values.dtype}" for name, values in panels.items())
        raise ValueError(f"heat_maps draws maps of one shape, all bool or none; got {found}")
    return panels


def query_names(length: int, labels: Sequence[str] | None) -> list[str]:
    if labels is None:
        return [str(i) for i in range(length)]
    if len(labels) != length:
        raise ValueError(f"{length} queries need {length} query_labels; got {len(labels)}")
    return [_visible(label) for label in labels]


def key_names(length: int, labels: Sequence[str] | None, prefix_length: int) -> list[str]:
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


def _kind_of(values: np.ndarray, quantity: str, relation: str) -> str:
    if values.dtype != np.bool_:
        return upper_first(quantity)
    return "Mask" if relation == "may attend" else upper_first(relation)


def _size_of(values: np.ndarray, axes_names: tuple[str, str]) -> str:
    return " by ".join(count_of(size, name) for size, name in zip(values.shape, axes_names, strict=True))


def digits_of(values: np.ndarray) -> int:
    """Two decimals, but none where all numbers are whole, whatever their last bits say."""
    finite = values[np.isfinite(values)].astype(float)
    return 0 if np.abs(finite - np.round(finite)).max() < 1e-6 else 2


def check_matrix(values: np.ndarray, dims: int, layout: str, prefix_length: int) -> None:
    if values.ndim != dims or values.size == 0:
        raise ValueError(f"a heat map needs {layout}, none of them empty; got shape {list(values.shape)}")
    if np.isnan(values).any():
        raise ValueError(f"{np.isnan(values).sum()} of the {values.size} numbers of shape {list(values.shape)} are NaN")
    if not np.isfinite(values).any():
        raise ValueError(f"no number of shape {list(values.shape)} is finite, so there is nothing to colour")
    if not 0 <= prefix_length <= values.shape[-1]:
        raise ValueError(f"prefix_length must be 0 to {values.shape[-1]}, the number of keys; got {prefix_length}")


def _check_choice(of_each_query: str) -> None:
    if of_each_query not in ("favourite key", "largest weight"):
        raise ValueError(f"of_each_query is 'favourite key' or 'largest weight'; got {of_each_query!r}")
