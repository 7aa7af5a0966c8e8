"""What all figures share: colours, letters, margins in whole pixels, and how a figure is shown."""

import base64
import io
import re
import sys
from collections.abc import Collection, Mapping

import numpy as np
from matplotlib import pyplot as plt
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

DPI = 110
WIDTH = 6.4  # inches: what a notebook column shows without scaling
# A page may be white or almost black: a soft grey is calm on both. It is opaque, so that letters never meet a page's
# own colour.
BACKGROUND = "#E2DED5"
# Okabe and Ito's hues in the order of use, without their yellow, darkened until each has a contrast of 3 to the
# background, and some further, so that neighbours differ in lightness too.
COLOURS = ["#00508A", "#CA5500", "#008A64", "#AE5A96", "#6E5200", "#3583B9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
PREFIX_COLOUR = COLOURS[1]
PREFIX_INK = "#9A4100"  # the same hue for letters, darker: a contrast of 4.9 instead of 3.2
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that figures are alike on every system
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.facecolor": BACKGROUND,
    "figure.facecolor": BACKGROUND,
    "grid.color": "#8A877F",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 6,
}
KEY_GAP = 0.15  # inches between the entries of a colour key
# Above this size the numbers inside a matrix no longer fit.
LARGEST_WITH_NUMBERS = 12


def show(figure: Figure, sentence: str, caption: str | None = None) -> None:
    """Display a figure with its sentence as alternative text, and under it the caption, and close it.

    Without a caption, the sentence is written there. A caption says what to notice, where the sentence says all.

    The caption is an output of its own: JupyterLab does not render an image's alternative text, and text can
    be selected, enlarged and read in a dark theme. Without a notebook's kernel, the sentence is printed instead.
    """
    caption = sentence if caption is None else caption
    if not sentence.strip() or not caption.strip():
        raise ValueError("a figure needs a sentence that says what it shows; got an empty one")
    if not has_kernel():
        plt.close(figure)
        print(sentence)
        return
    from IPython.display import display  # not at the top: drawing to a file needs no IPython

    png = base64.b64encode(png_bytes(figure)).decode()
    plt.close(figure)
    display({"image/png": png, "text/plain": sentence}, metadata={"image/png": {"alt": sentence}}, raw=True)
    markdown = re.sub(r"([\\`*_{}\[\]<>#|$~&])", r"\\\1", caption)
    display({"text/markdown": f"*Figure.* {markdown}", "text/plain": sentence}, raw=True)


def has_kernel() -> bool:
    """Whether a notebook's front end is there to show what is displayed: not in a script, nor in a terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def png_bytes(figure: Figure) -> bytes:
    """Opaque, of 256 colours, and without the version note that would make two installations differ."""
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, facecolor=BACKGROUND, transparent=False)
    # A palette halves the size of the numbers' soft edges.
    palette = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    palette.save(buffer, format="png", optimize=True, dpi=(DPI, DPI))
    return buffer.getvalue()


def styled():
    return style.context(["default", STYLE])


def new_canvas(width: float, height: float, title: str, *, left: float, bottom: float, right: float) -> Figure:
    """A figure with room in inches for a title above, and margins around, an area of width by height.

    Margins are reckoned in whole pixels, not fitted to the drawn text, so that another version of matplotlib, which
    draws letters and fractions of pixels otherwise, moves nothing: the tests compare figures.
    """
    lacking = max(0.0, text_width(title, 10) + 0.2 - (left + width + right))
    top = 0.4 if title else 0.12
    left, right, top, bottom = map(whole_pixels, (left + lacking / 2, right + lacking / 2, top, bottom))
    size = (left + whole_pixels(width) + right, bottom + whole_pixels(height) + top)
    figure = plt.figure(figsize=size)
    figure.subplots_adjust(left / size[0], bottom / size[1], 1 - right / size[0], 1 - top / size[1])
    if title:
        figure.text(0.5, 1 - 0.2 / size[1], title, ha="center", va="center", fontsize=10)
    return figure


def axes_on(figure: Figure, x: float = 0, y: float = 0, width: float | None = None, height: float | None = None):
    """Axes over the canvas's area, or over a part of it: inches from its left and its top."""
    area = figure.subplotpars
    across, down = figure.get_size_inches()
    width = (area.right - area.left) * across if width is None else width
    height = (area.top - area.bottom) * down if height is None else height
    x, y, width, height = map(whole_pixels, (x, y, width, height))
    return figure.add_axes((area.left + x / across, area.top - (y + height) / down, width / across, height / down))


def whole_pixels(inches: float) -> float:
    return round(inches * DPI) / DPI


def text_width(text: str, points: float = 8) -> float:
    return len(text) * points * 0.63 / 72


def ink_on(rgba) -> str:
    """Black or white, whichever has the larger contrast to the cell, as WCAG reckons it: 4.5 at least."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgba[:3]]
    return "black" if np.dot([0.2126, 0.7152, 0.0722], linear) > 0.179 else "white"


def colour_key(figure: Figure, colour_of: Mapping[str, str]) -> None:
    """A patch and a name for each colour, in a row at the bottom.

    Its places hang on the number of letters alone. A legend's hang on their drawn widths, which differ from one
    version of matplotlib to the next.
    """
    width, height = figure.get_size_inches()
    x = (width - key_width(colour_of)) / 2
    for name, colour in colour_of.items():
        figure.add_artist(Rectangle((x / width, 0.13 / height), 0.22 / width, 0.08 / height, color=colour))
        figure.text((x + 0.3) / width, 0.17 / height, name, va="center", fontsize=8)
        x += key_width([name]) + KEY_GAP


def key_width(names: Collection[str]) -> float:
    """In inches: a patch and a name each, letters of half their height, and the gaps between."""
    return sum(0.3 + 0.52 * 8 / 72 * len(name) for name in names) + KEY_GAP * (len(names) - 1)
