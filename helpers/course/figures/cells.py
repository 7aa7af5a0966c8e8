"""Which memory cell each entry of a tensor reads, step by step through view, transpose and reshape."""

from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib.colors import to_rgb
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
)
from helpers.course.figures.words import listed, to_array

LARGEST = 32  # cells
NOUNS = {"s": "token", "h": "head"}  # axes whose places have names; b, d and f have none
CELL, BLOCK_GAP = (0.25, 0.21), 0.1  # inches
LABEL, HEADER, BETWEEN = 0.62, 0.6, 0.25
PANELS = 5.3  # inches, the width of a row of panels


def memory_cells(
    steps: Mapping[str, tuple[object, str]],
    *,
    colour_by: str = "token",
    title: str = "",
    caption: str | None = None,
) -> None:
    """Show the cells of one piece of memory in a row, and below them which cell each entry of a tensor reads.

    `steps` holds under its name (best the code that makes it) a tensor and the pattern of its axes, of the letters b, s
    (token), h (head), d (feature of a head) and f (feature): `{"x": (x, "b s f"), "x.view(1, 4, 2, 3)": (split,
    "b s h d")}`. The first is the numbers 0, 1, 2, ... in the order of memory, as `torch.arange` makes them; the batch
    is 1. Cells are coloured by the "token" or by the "head" that they belong to. Strides are those of the tensors.
    """
    sentence = memory_cells_sentence(steps, colour_by=colour_by, title=title)
    first = to_array(next(iter(steps.values()))[0])
    sizes = _sizes(steps)
    colour_of = {number: COLOURS[number] for number in range(sizes["s" if colour_by == "token" else "h"])}
    colours = [COLOURS[_owner(cell, colour_by, sizes)] for cell in range(first.size)]
    panels = [_Panel(name, tensor, pattern) for name, (tensor, pattern) in steps.items()]
    cell = min(CELL[0], PANELS / first.size)
    rows: list[list[_Panel]] = []
    for panel in panels:
        if not rows or sum(each.width + BETWEEN for each in rows[-1]) + panel.width > PANELS + 0.1:
            rows.append([])
        rows[-1].append(panel)
    names = {f"{colour_by} {number}": colour for number, colour in colour_of.items()}
    heights = [max(panel.height for panel in row) for row in rows]
    row_widths = [sum(panel.width + BETWEEN for panel in row) - BETWEEN for row in rows]
    width = max(*row_widths, first.size * cell, key_width(names))
    height = 0.26 + CELL[1] + sum(each + 0.22 for each in heights)
    with styled():
        figure = new_canvas(width, height, title, left=0.15, bottom=0.35, right=0.15)
        axes = axes_on(figure)
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        axes.text(width / 2, 0.1, "memory, one cell behind the other", ha="center", va="center", fontsize=9)
        left = (width - first.size * cell) / 2
        for number, colour in enumerate(colours):
            _draw_cell(axes, left + number * cell, 0.24, cell, str(number), colour)
        top = 0.26 + CELL[1] + 0.22
        for row, row_width, row_height in zip(rows, row_widths, heights, strict=True):
            x = (width - row_width) / 2
            for panel in row:
                panel.draw(axes, x, top, colours)
                x += panel.width + BETWEEN
            top += row_height + 0.22
        colour_key(figure, names)
        show(figure, sentence, caption)


def memory_cells_sentence(steps: Mapping[str, tuple[object, str]], *, colour_by: str = "token", title: str = "") -> str:
    _check(steps, colour_by)
    sizes = _sizes(steps)
    first = next(iter(steps.values()))[0]
    facts = []
    for name, (tensor, pattern) in steps.items():
        fact = f"{name} is {list(tensor.shape)} with strides {tuple(tensor.stride())}"
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            fact += " in memory of its own"
        facts.append(f"{fact}; {_reading(to_array(tensor), pattern, sizes)}")
    return f"{title or 'Memory cells'}, {first.numel()} in a row, coloured by {colour_by}: {'. '.join(facts)}."


class _Panel:
    """One tensor as rows of cells, in blocks if it has three axes beside the batch."""

    def __init__(self, name: str, tensor, pattern: str):
        axes = [axis for axis in pattern.split() if axis != "b"]
        grid = to_array(tensor)[(0,) * (tensor.ndim - len(axes))]
        self.grid = grid if grid.ndim == 3 else grid[None]
        self.header = [name, str(list(tensor.shape)), f"strides {tuple(tensor.stride())}"]
        self.noun = NOUNS[axes[0]]
        self.by_row = grid.ndim == 2
        blocks, rows, columns = self.grid.shape
        self.height = HEADER + blocks * rows * CELL[1] + (blocks - 1) * BLOCK_GAP
        self.width = max(LABEL + columns * CELL[0], max(map(len, self.header)) * 9 * 0.58 / 72)

    def draw(self, axes, x: float, y: float, colours: list[str]) -> None:
        blocks, rows, columns = self.grid.shape
        middle = x + self.width / 2
        for line, text in enumerate(self.header):
            weight = "normal" if line else "bold"
            axes.text(middle, y + 0.08 + 0.17 * line, text, ha="center", va="center", fontsize=8.5, weight=weight)
        left = x + (self.width - columns * CELL[0] - LABEL) / 2 + LABEL
        top = y + HEADER
        for block in range(blocks):
            for row in range(rows):
                for column in range(columns):
                    number = round(float(self.grid[block, row, column]))
                    place = left + column * CELL[0], top + row * CELL[1]
                    _draw_cell(axes, *place, CELL[0], str(number), colours[number])
                if self.by_row:
                    self._label(axes, left, top + (row + 0.5) * CELL[1], row)
            if not self.by_row:
                self._label(axes, left, top + rows * CELL[1] / 2, block)
            top += rows * CELL[1] + BLOCK_GAP

    def _label(self, axes, left: float, y: float, number: int) -> None:
        axes.text(left - 0.08, y, f"{self.noun} {number}", ha="right", va="center", fontsize=8.5)


def _draw_cell(axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    axes.add_patch(Rectangle((x, y), width, CELL[1], facecolor=colour, edgecolor=BACKGROUND, linewidth=1.2))
    ink = ink_on(to_rgb(colour))
    axes.text(x + width / 2, y + CELL[1] / 2, text, ha="center", va="center", fontsize=8, color=ink)


def _check(steps, colour_by: str) -> None:
    if not steps:
        raise ValueError("memory_cells draws one tensor or more; got none")
    if colour_by not in NOUNS.values():
        raise ValueError(f"memory_cells colours by 'token' or 'head'; got {colour_by!r}")
    for number, (name, (tensor, pattern)) in enumerate(steps.items()):
        axes = pattern.split()
        named = [axis for axis in axes if axis != "b"]
        if len(axes) != tensor.ndim or len(named) not in (2, 3) or named[0] not in NOUNS or set(axes) - set("bshdf"):
            raise ValueError(
                f"step {name!r}: the pattern {pattern!r} does not name the axes of {list(tensor.shape)}: two or three "
                "of the letters s, h, d and f, with s or h in front, behind b if there is a batch"
            )
        if "b" in axes and tensor.shape[0] != 1:
            raise ValueError(f"step {name!r} needs a batch of 1; got shape {list(tensor.shape)}")
        numbers = to_array(tensor).ravel()
        in_order = number > 0 or np.array_equal(numbers, np.arange(numbers.size))
        if not in_order or not np.array_equal(np.sort(numbers), np.arange(numbers.size)) or numbers.size > LARGEST:
            raise ValueError(
                f"step {name!r} needs the numbers 0 to at most {LARGEST - 1}, each once, and the first step needs them "
                f"in order: torch.arange(24).view(1, 4, 6); got {numbers}"
            )
    sizes = _sizes(steps)
    if colour_by == "head" and "h" not in sizes:
        raise ValueError("memory_cells cannot colour by head: no pattern has an axis h")
    if sizes["s"] > len(COLOURS) or sizes.get("h", 1) > len(COLOURS):
        raise ValueError(f"memory_cells has colours for {len(COLOURS)} tokens or heads; got sizes {sizes}")


def _sizes(steps) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, (tensor, pattern) in steps.items():
        for axis, size in zip(pattern.split(), tensor.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"step {name!r} has {size} places on axis {axis}, another step has {sizes[axis]}")
    if "s" not in sizes:
        raise ValueError("memory_cells needs a pattern with an axis s, of tokens")
    return sizes


def _owner(cell: int, noun: str, sizes: Mapping[str, int]) -> int:
    """The token or head whose feature is in this cell of `[s, h, d]`."""
    features = sizes["f"] if "f" in sizes else sizes["h"] * sizes["d"]
    if noun == "token":
        return cell // features
    return cell % features // (features // sizes["h"])


def _reading(values: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> str:
    """Whose features the places of the outermost named axis read."""
    axes = [axis for axis in pattern.split() if axis != "b"]
    outer, others = axes[0], [axis for axis in NOUNS if axis in axes and axis in sizes]
    grid = values.reshape([sizes[axis] for axis in axes])
    wrong = dict.fromkeys(others, False)
    for place, cell in np.ndenumerate(grid):
        for axis in others:
            wrong[axis] |= _owner(int(cell), NOUNS[axis], sizes) != place[axes.index(axis)]
    noun = NOUNS[outer]
    if not any(wrong.values()):
        if len(others) == 1:
            return f"each {noun} reads its own cells"
        return f"each {noun} reads its own cells of every {NOUNS[next(axis for axis in others if axis != outer)]}"
    told = "token" if wrong["s"] else "head"
    each = [
        f"{noun} {number} reads {_numbered(told, {_owner(int(cell), told, sizes) for cell in block.flat})}"
        for number, block in enumerate(grid)
    ]
    return listed(each)


def _numbered(noun: str, numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed([str(number) for number in numbers])}"
