"""Where the entries of a tensor go when it is reshaped."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.patches import Rectangle

from helpers.course.figures.canvas import (
    BACKGROUND,
    COLOURS,
    axes_on,
    colour_key,
    ink_on,
    key_width,
    new_canvas,
    show,
    styled,
    text_width,
)
from helpers.course.figures.words import count_of, listed, to_array


def blocks(
    grids: Mapping[str, Sequence],
    *,
    colour_by: Callable[[str], str],
    block_name: str = "block",
    title: str = "",
    caption: str | None = None,
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
    panels = [max(grid.shape[-1] * cell[0], text_width(name, 10)) for name, grid in texts.items()]
    between = 0.4
    with styled():
        width = max(sum(panels) + between * (len(panels) - 1), key_width(colour_of) - 0.4)  # the canvas has margins
        height = rows * cell[1] + 0.3
        figure = new_canvas(width, height, title, left=0.4, bottom=0.4, right=0.2)
        for number, (name, grid) in enumerate(texts.items()):
            columns = grid.shape[-1]
            x = sum(panels[:number]) + between * number + (panels[number] - columns * cell[0]) / 2
            axes = axes_on(figure, x, 0.3, columns * cell[0], rows * cell[1])
            for (block, row, column), text in np.ndenumerate(_stack(grid)):
                colour = colour_of[colour_by(text)]
                top = block * (grid.shape[-2] + gap) + row
                axes.add_patch(Rectangle((column, top), 1, 1, facecolor=colour, edgecolor=BACKGROUND, linewidth=1.5))
                ink = ink_on(matplotlib.colors.to_rgb(colour))
                axes.text(column + 0.5, top + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
            axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], title=name)
            middles = [block * (grid.shape[-2] + gap) + grid.shape[-2] / 2 for block in range(len(_stack(grid)))]
            names = [f"{block_name} {block}" for block in range(len(middles))] if grid.ndim == 3 else []
            axes.set_yticks(middles[: len(names)], names, rotation=90, va="center")
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        colour_key(figure, colour_of)
        show(figure, sentence, caption)


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
        held = [f"all {len(groups)}" if len(groups) > 2 and block == groups else listed(block) for block in held]
        if grid.ndim == 2:
            facts.append(f"{name}, {grid.shape[0]} by {grid.shape[1]}, holds {held[0]}")
            continue
        each = ", ".join(f"{block_name} {number} holds {text}" for number, text in enumerate(held))
        if len(held) > 1 and len(set(held)) == 1:
            each = f"every {block_name} holds {held[0]}"
        facts.append(f"{name}, {count_of(len(grid), block_name)} of {grid.shape[1]} by {grid.shape[2]}: {each}")
    lead = title or "Entries by colour"
    if any(f"holds all {len(groups)}" in fact for fact in facts):
        lead += f" ({listed(groups)})"
    return f"{lead}: {'; '.join(facts)}."


def _texts(grid) -> np.ndarray:
    array = to_array(grid)
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
