"""T5 with the three sites at which it attends, and what a prefix adds at each."""

from collections.abc import Collection, Mapping

from matplotlib.patches import Rectangle

from helpers.course.figures.canvas import BACKGROUND, PREFIX_COLOUR, PREFIX_INK, axes_on, new_canvas, show, styled
from helpers.course.figures.layer import INK, LINE, LIT, NAME_SIZE, PALE_INK, PALE_LINE, PAPER, SHAPE_SIZE
from helpers.course.figures.words import count_of, listed

SITES = {
    "encoder": "the encoder's self-attention",
    "decoder": "the decoder's self-attention",
    "cross": "cross-attention",
}
WIDTH, HEIGHT, COLUMN, SLOTS = 6.1, 3.05, 2.75, 0.62  # inches
ROW, PART = 0.42, 0.26  # the heights of a site and of a feed-forward layer


def t5_sites(
    tensors: Mapping[str, object],
    *,
    lit: Collection[str] = (),
    layers: tuple[int, int] = (2, 2),
    title: str = "",
    caption: str | None = None,
) -> None:
    """Show T5's encoder and decoder with their attentions, the sites in `lit` in strong colour.

    `tensors`: "source" `[batch, source]` and "target" `[batch, target]`, the ids; for each site with a prefix, by its
    name, `[layers, 2, 1, heads, prefix, d_kv]`; and "encoded" and "logits", if their shapes are to be written.
    `layers` are those of the encoder and of the decoder.
    """
    sentence = t5_sites_sentence(tensors, lit=lit, layers=layers, title=title)
    lit = [lit] if isinstance(lit, str) else lit
    with styled():
        figure = new_canvas(WIDTH, HEIGHT, title, left=0.12, bottom=0.12, right=0.12)
        axes = axes_on(figure)
        axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        axes.set_axis_off()
        _Drawing(axes, tensors, lit).draw(layers)
        show(figure, sentence, sentence if caption is None else caption)


def t5_sites_sentence(
    tensors: Mapping[str, object], *, lit: Collection[str] = (), layers: tuple[int, int] = (2, 2), title: str = ""
) -> str:
    """What is lit, and how many queries and keys each site has."""
    lit = [lit] if isinstance(lit, str) else lit
    strange = [name for name in (*tensors, *lit) if name not in {*SITES, "source", "target", "encoded", "logits"}]
    if strange or not {"source", "target"} <= tensors.keys():
        raise ValueError(
            f"t5_sites needs source and target, and may have {', '.join(SITES)}, encoded and logits; got "
            f"{', '.join(map(repr, (*tensors, *lit)))}"
        )
    facts = []
    if lit:
        bright = [name for site, name in SITES.items() if site in lit]
        facts.append(f"highlighted {'is' if len(bright) == 1 else 'are'} {listed(bright)}")
    for site, name in SITES.items():
        queries, keys = _lengths(tensors, site)
        facts.append(f"{name} has {count_of(queries, 'query')} and {keys} keys")
    facts.append(f"the encoder has {count_of(layers[0], 'layer')} and the decoder {layers[1]}")
    facts.append("the encoder's output goes to cross-attention in every layer of the decoder")
    return f"{title or 'T5'}: {'; '.join(facts)}."


def _lengths(tensors: Mapping[str, object], site: str) -> tuple[int, str]:
    """The number of queries, and the number of keys in words."""
    source, target = tensors["source"].shape[1], tensors["target"].shape[1]
    queries, keys = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}[site]
    return queries, f"{tensors[site].shape[-2]} + {keys}" if site in tensors else f"{keys}"


class _Drawing:
    def __init__(self, axes, tensors: Mapping[str, object], lit: Collection[str]):
        self.axes, self.tensors, self.lit = axes, tensors, lit

    def draw(self, layers: tuple[int, int]) -> None:
        left, right = COLUMN / 2, WIDTH - COLUMN / 2
        self.words(left, 0.12, [f"source  {self.shape('source')}"])
        self.words(right, 0.12, [f"target so far  {self.shape('target')}"])
        for x, name, count, bottom in ((left, "encoder", layers[0], 1.5), (right, "decoder", layers[1], 2.55)):
            self.arrow((x, 0.24), (x, 0.42))
            self.box(x, 0.42, COLUMN, bottom - 0.42, BACKGROUND, PALE_LINE, behind=True)
            self.words(x, 0.53, [f"{name}, {count_of(count, 'layer')}"], PALE_INK)
        self.site("encoder", left, 0.66, "self-attention")
        self.feed_forward(left, 1.18)
        self.site("decoder", right, 0.66, "self-attention")
        self.site("cross", right, 1.5, "cross-attention")
        self.feed_forward(right, 2.22)
        self.arrow((left, 1.5), (left, 1.63), head=False)
        self.words(left, 1.71, [f"encoder output  {self.shape('encoded')}"])
        self.arrow((left + 1.22, 1.71), (right - COLUMN / 2 + 0.08, 1.71))
        self.arrow((right, 0.66 + ROW), (right, 1.5))
        self.arrow((right, 1.5 + ROW), (right, 2.22))
        self.arrow((left, 0.66 + ROW), (left, 1.18))
        self.arrow((right, 2.55), (right, 2.78))
        self.words(right, 2.9, [f"logits  {self.shape('logits')}"])

    def shape(self, name: str) -> str:
        return str(list(self.tensors[name].shape)) if name in self.tensors else ""

    def site(self, site: str, x: float, top: float, name: str) -> None:
        """The attention, and left of it, in one box, the slots of its prefix."""
        queries, keys = _lengths(self.tensors, site)
        width, slots = COLUMN - 0.16, SLOTS if site in self.tensors else 0.0
        start, is_lit = x - width / 2, site in self.lit
        fill, edge, ink = (LIT, "black", "white") if is_lit else (PAPER, LINE, INK)
        if slots:
            orange = (LIT, "black", "white") if is_lit else (PAPER, PREFIX_COLOUR, PREFIX_INK)
            self.box(start + slots / 2, top, slots, ROW, *orange[:2])
            count = self.tensors[site].shape[-2]
            self.words(start + slots / 2, top + ROW / 2, [f"{count}", "slots"], orange[2], is_lit)
        self.box(start + slots + (width - slots) / 2, top, width - slots, ROW, fill, edge)
        lengths = f"{queries} queries, {keys} keys"
        self.words(start + slots + (width - slots) / 2, top + ROW / 2, [name, lengths], ink, is_lit)

    def feed_forward(self, x: float, top: float) -> None:
        self.box(x, top, COLUMN - 0.16, PART, BACKGROUND, PALE_LINE)
        self.words(x, top + PART / 2, ["feed-forward"], PALE_INK)

    def box(
        self, x: float, top: float, width: float, height: float, fill: str, edge: str, behind: bool = False
    ) -> None:
        thickness = 2.0 if edge == "black" else 1.0
        patch = Rectangle((x - width / 2, top), width, height, facecolor=fill, edgecolor=edge, linewidth=thickness)
        patch.set(clip_on=False, zorder=0.2 if behind else 1)  # arrows are between
        self.axes.add_patch(patch)

    def words(self, x: float, y: float, lines: list[str], ink: str = INK, bold: bool = False) -> None:
        for number, line in enumerate(lines):
            height = y + (number - (len(lines) - 1) / 2) * 0.17
            size, weight = (NAME_SIZE if number == 0 else SHAPE_SIZE), "bold" if bold else "normal"
            self.axes.text(x, height, line, ha="center", va="center", fontsize=size, color=ink, weight=weight)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], head: bool = True) -> None:
        style = {"arrowstyle": "-|>,head_width=0.18,head_length=0.32" if head else "-", "color": LINE}
        style |= {"linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops=style, zorder=0.5)
