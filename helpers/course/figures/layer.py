"""The attention layer as one drawing, which grows from lesson to lesson and lights what is new."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.patches import FancyBboxPatch

from helpers.course.figures.canvas import (
    BACKGROUND,
    PREFIX_COLOUR,
    PREFIX_INK,
    axes_on,
    new_canvas,
    show,
    styled,
)
from helpers.course.figures.words import listed

# Every part and the name that the drawing and its sentence give it. The order is the drawing's, from top to bottom.
PARTS = {
    "hidden": "hidden states",
    "source": "source",
    "w_q": "W_Q",
    "w_k": "W_K",
    "w_v": "W_V",
    "split": "split into heads",
    "query": "query",
    "prefix_key": "prefix key",
    "key": "key",
    "prefix_value": "prefix value",
    "value": "value",
    "all_keys": "all keys",
    "all_values": "all values",
    "scores": "scores",
    "scale": "division by √head_dim",
    "bias": "bias",
    "mask": "mask",
    "weights": "weights",
    "mixed": "mixed values",
    "merged": "merged heads",
    "w_o": "W_O",
    "output": "output",
}
PREFIX = ("prefix_key", "prefix_value", "all_keys", "all_values")
# Drawn only from the lesson on that lights, gives or names them; all else is always there.
EXTRAS = ("source", "split", *PREFIX, "bias", "mask", "merged", "w_o")

INK, PALE_INK, LINE, PALE_LINE, PAPER = "#1A1A1A", "#5F5B53", "#4D4A44", "#A39E93", "#F3F1EB"
LIT = "#1A69A6"  # the first colour, lighter: with white letters in it, versions of matplotlib differ less
NAME_SIZE, SHAPE_SIZE = 9.5, 9  # points
BOX, ONE_LINE, TWO_LINES, STEM, ARROW = 0.28, 0.22, 0.4, 0.07, 0.17  # inches


class _Place(NamedTuple):
    """A rectangle in inches from the left and the top."""

    x: float  # of its middle
    top: float
    width: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height


def attention_layer(
    tensors: Mapping[str, object],
    *,
    lit: Collection[str] = (),
    parts: Collection[str] = (),
    names: Mapping[str, str] | None = None,
    scaled: bool = True,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Show the attention layer from its hidden states to its output, with the parts in `lit` in strong colour.

    `tensors` maps names of parts to tensors, whose shapes are written beside them; a part without a tensor that is not
    lit is pale. The parts are those of `PARTS`, and "prefix" for the four that a prefix adds.

    What a later lesson brings (`EXTRAS`: the split, the prefix, mask, bias, merged heads and W_O) is drawn once it is
    lit, has a tensor, or is named in `parts`. `names` gives parts other names ("past key" for "prefix_key").
    `scaled=False` leaves out the division by √head_dim, which T5 does without.
    """
    lit, drawn, names, shapes = _checked(tensors, lit, parts, names, scaled)
    sentence = attention_layer_sentence(
        tensors, lit=lit, parts=parts, names=names, scaled=scaled, title=title, everything=True
    )
    if caption is None:
        caption = attention_layer_sentence(tensors, lit=lit, parts=parts, names=names, scaled=scaled, title=title)
    drawing = _Drawing(lit, drawn, names, shapes)
    drawing.lay_out()
    with styled():
        figure = new_canvas(drawing.width, drawing.bottom, title, left=0.12, bottom=0.12, right=0.12)
        axes = axes_on(figure)
        axes.set(xlim=(0, drawing.width), ylim=(drawing.bottom, 0))
        axes.set_axis_off()
        drawing.draw(axes)
        show(figure, sentence, caption)


def attention_layer_sentence(
    tensors: Mapping[str, object],
    *,
    lit: Collection[str] = (),
    parts: Collection[str] = (),
    names: Mapping[str, str] | None = None,
    scaled: bool = True,
    title: str = "",
    everything: bool = False,
) -> str:
    """What is lit, what goes in and what comes out; `everything` adds all other shapes."""
    lit, drawn, names, shapes = _checked(tensors, lit, parts, names, scaled)
    ways_in = ("hidden", "source", "prefix_key", "prefix_value", "bias", "mask")

    def phrases(chosen: Iterable[str]) -> list[str]:
        return [f"{names[part]} {shapes[part]}" for part in chosen]

    into, inside = [part for part in ways_in if part in shapes], [part for part in shapes if part not in ways_in]
    facts = [f"highlighted {'is' if len(lit) == 1 else 'are'} {listed([names[part] for part in lit])}"] if lit else []
    if into:
        facts.append(f"{listed(phrases(into))} {'goes' if len(into) == 1 and into != ['hidden'] else 'go'} in")
    out = [part for part in inside if part not in ("w_q", "w_k", "w_v", "w_o")][-1:]  # matrices stay where they are
    on_the_way = [part for part in inside if part not in out]
    if out:
        facts.append(f"{phrases(out)[0]} {'come' if names[out[0]].endswith('s') else 'comes'} out")
    if everything and on_the_way:
        facts.append(f"on the way {'is' if len(on_the_way) == 1 else 'are'} {listed(phrases(on_the_way))}")
    if everything:
        facts.append(f"drawn from top to bottom are {listed([names[part] for part in drawn])}")
    return f"{title or 'The attention layer'}: {'; '.join(facts) or 'nothing is highlighted'}."


def _checked(tensors, lit, parts, names, scaled):
    """Lit parts and drawn parts in the drawing's order, all names, and the shapes as text."""
    names = names or {}
    lit, parts = ([lit] if isinstance(lit, str) else lit), ([parts] if isinstance(parts, str) else parts)
    for part in (*tensors, *lit, *parts, *names):
        if (part not in PARTS and part != "prefix") or (part == "prefix" and part in (*tensors, *names)):
            raise ValueError(f"attention_layer has no part {part!r}; its parts are {', '.join(PARTS)}")
    for part, tensor in tensors.items():
        if not hasattr(tensor, "shape"):
            raise ValueError(f"part {part!r} needs a tensor, whose shape is shown; got {type(tensor).__name__}")
    lit, parts = ({one for part in given for one in (PREFIX if part == "prefix" else [part])} for given in (lit, parts))
    wanted = {*tensors, *lit, *parts}
    if wanted & set(PREFIX):
        wanted |= set(PREFIX)
    if "w_o" in wanted:
        wanted |= {"merged"}
    if "merged" in wanted:
        wanted |= {"split"} | ({"w_o"} if "output" in tensors else set())
    wanted |= PARTS.keys() - {*EXTRAS, "scale", "mixed", "output"} | ({"scale"} if scaled else set())
    wanted |= {"mixed"} if "merged" in wanted or "output" not in wanted else set()
    wanted |= {"output"} if "w_o" in wanted else set()
    return (
        [part for part in PARTS if part in lit],
        [part for part in PARTS if part in wanted],
        PARTS | names,
        {part: str(list(tensors[part].shape)) for part in PARTS if part in tensors},
    )


class _Drawing:
    """Boxes (what is done), labels (what there is, with its shape) and arrows, all in inches."""

    def __init__(self, lit: Sequence[str], parts: Sequence[str], names: Mapping[str, str], shapes: Mapping[str, str]):
        self.lit, self.parts, self.names, self.shapes = lit, parts, names, shapes
        self.boxes: list[tuple[_Place, str, str]] = []  # place, text, part
        self.labels: list[tuple[_Place, list[str], str]] = []
        self.arrows: list[tuple[float, float, float, bool]] = []  # x, from top, to bottom, with a head
        self.bars: list[tuple[float, float, float]] = []  # from x, to x, at a height
        self.width = self.bottom = 0.0

    def lay_out(self) -> None:
        has, shapes = self.parts.__contains__, self.shapes
        prefixed = has("prefix_key")
        slot = 0.08 + max(
            _width_of([self.names[part], shapes.get(part, "")])
            for part in ("w_q", "w_k", "w_v", "query", "key", "value", *PREFIX[: 2 if prefixed else 0])
        )
        slot, gap = (max(slot, 0.9), 0.09) if prefixed else (max(slot, 1.35), 0.3)
        middles = [slot / 2 + number * (slot + gap) for number in range(5 if prefixed else 3)]
        q, k, v = (middles[number] for number in ((0, 2, 4) if prefixed else (0, 1, 2)))
        self.width = middles[-1] + slot / 2
        middle = self.width / 2

        # What comes in, spread to the three matrices.
        if has("source"):
            self._label("hidden", q, 0.02, slot, 2)
            self._label("source", (k + v) / 2, 0.02, v - k + slot, 2)
            y = self.labels[-1][0].bottom
            self._spread((k + v) / 2, [k, v], y)
            self.arrows.append((q, y, y + 0.3, True))
        else:
            self._label("hidden", middle, 0.02, self.width, 1)
            y = self.labels[-1][0].bottom
            self._spread(middle, [q, k, v], y)
        y += 0.3
        lines = 2 if {"w_q", "w_k", "w_v"} & shapes.keys() else 1
        for part, x in (("w_q", q), ("w_k", k), ("w_v", v)):
            text = self.names[part] + (f"\n{shapes[part]}" if part in shapes else "")
            self._box(part, text, x, y, slot, TWO_LINES if lines == 2 else BOX)
        y = self.boxes[-1][0].bottom
        if has("split"):
            self.arrows += [(x, y, y + ARROW, True) for x in (q, k, v)]
            y += ARROW
            self._box("split", self.names["split"], middle, y, self.width)
            y = self.boxes[-1][0].bottom
        self.arrows += [(x, y, y + STEM, False) for x in (q, k, v)]
        y += STEM
        for part, x in (("query", q), ("key", k), ("value", v)):
            self._label(part, x, y, slot, 2)
        if prefixed:
            for part, x in (("prefix_key", middles[1]), ("prefix_value", middles[3])):
                self._label(part, x, y, slot, 2)
        y = self.labels[-1][0].bottom
        if prefixed:
            y = self._join(y, middles, slot)
            k, v = (middles[1] + k) / 2, (middles[3] + v) / 2
        after = y + ARROW

        # Scores, from query and keys.
        left, right = q - slot / 2, k + (slot + gap / 2 if prefixed else slot / 2)
        query_bottom = next(place.bottom for place, _, part in self.labels if part == "query")
        self.arrows += [(q, query_bottom, after, True), (k, y, after, True)]
        centre, wide = (left + right) / 2, right - left
        steps = {"scores": "query × keyᵀ", "scale": "÷ √head_dim", "bias": "+ bias", "mask": "mask"}
        value_bottom, y = y, after
        for part in (part for part in steps if has(part)):
            text = steps[part] if part in ("scores", "scale") else steps[part].replace(part, self.names[part])
            text += f"  {shapes[part]}" if part in ("bias", "mask") and part in shapes else ""
            self._box(part, text, centre, y, wide)
            y = self.boxes[-1][0].bottom
        y = self._result("scores", centre, y, wide)
        self._box("weights", "softmax over the keys", centre, y, wide)
        y = self._result("weights", centre, self.boxes[-1][0].bottom, wide)

        # The mix, from weights and values, and what follows it.
        self.arrows.append((v, value_bottom, y, True))
        last = [part for part in ("mixed", "merged", "output") if has(part)]
        ways = {"mixed": "weights × value", "merged": "merge heads", "output": self.names["w_o"]}
        if "mixed" not in last:
            ways["output"] = ways["mixed"]
        for part in last:
            through = "w_o" if part == "output" and has("w_o") else part
            text = ways[part] + (f"  {shapes['w_o']}" if through == "w_o" and "w_o" in shapes else "")
            self._box(through, text, middle, y, self.width)
            y = self._result(part, middle, self.boxes[-1][0].bottom, self.width, ends=part == last[-1])
        self.bottom = y + 0.03

    def _box(self, part: str, text: str, x: float, top: float, width: float, height: float = BOX) -> None:
        self.boxes.append((_Place(x, top, width, height), text, part))

    def _label(self, part: str, x: float, top: float, width: float, lines: int) -> None:
        texts = [self.names[part], *([self.shapes[part]] if part in self.shapes else [])]
        if lines == 1:
            texts = ["  ".join(texts)]
        width = min(width, _width_of(texts) + 0.14)
        self.labels.append((_Place(x, top, width, ONE_LINE if lines == 1 else TWO_LINES), texts, part))

    def _result(self, part: str, x: float, top: float, width: float, ends: bool = False) -> float:
        """A label below a box and an arrow to the next one, whose top is returned."""
        self.arrows.append((x, top, top + STEM, False))
        self._label(part, x, top + STEM, width, 1)
        bottom = self.labels[-1][0].bottom
        if ends:
            return bottom
        self.arrows.append((x, bottom, bottom + ARROW, True))
        return bottom + ARROW

    def _spread(self, x: float, targets: Sequence[float], top: float) -> None:
        """From one point to several, square-cornered: down, along, and down."""
        along = top + 0.11
        self.arrows.append((x, top, along, False))
        self.bars.append((min(targets), max(targets), along))
        self.arrows += [(target, along, top + 0.3, True) for target in targets]

    def _join(self, y: float, middles: Sequence[float], slot: float) -> float:
        """Prefix and tokens side by side in one box: on the sequence axis the prefix is first."""
        for number, (prefix, own, joined) in enumerate(
            (("prefix_key", "key", "all_keys"), ("prefix_value", "value", "all_values"))
        ):
            left, right = middles[1 + 2 * number : 3 + 2 * number]
            width = right - left
            self.arrows += [(x, y, y + ARROW, True) for x in (left, right)]
            for part, x, noun in ((prefix, left, "slots"), (own, right, "tokens")):
                length = self.shapes[part].strip("[]").split(", ")[-2] + " " if part in self.shapes else ""
                inner = (width + slot) / 2
                middle = (left + right) / 2 + (inner / 2 if x == right else -inner / 2)
                self._box(joined, length + noun, middle, y + ARROW, inner)
            bottom = self.boxes[-1][0].bottom
            self.arrows.append(((left + right) / 2, bottom, bottom + STEM, False))
            self._label(joined, (left + right) / 2, bottom + STEM, width + slot, 1)
        return self.labels[-1][0].bottom

    def _look(self, part: str) -> tuple[str, str, float, str, str]:
        """Fill, edge, its width, ink and weight."""
        if part in self.lit:
            return LIT, "black", 2.2, "white", "bold"
        if part.startswith("prefix"):
            return PAPER, PREFIX_COLOUR, 1.6, PREFIX_INK, "normal"
        results = {"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "output", "split": "query", "scale": "scores"}
        if part in self.shapes or results.get(part) in self.shapes:
            return PAPER, LINE, 1.0, INK, "normal"
        return BACKGROUND, PALE_LINE, 1.0, PALE_INK, "normal"

    def draw(self, axes) -> None:
        for x, top, bottom, head in self.arrows:
            style = {"arrowstyle": "-|>,head_width=0.18,head_length=0.32" if head else "-", "color": LINE}
            style |= {"linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (x, bottom), (x, top), arrowprops=style, zorder=0.5)  # below the boxes
        for left, right, y in self.bars:
            axes.plot([left, right], [y, y], color=LINE, linewidth=1.1, solid_capstyle="projecting", zorder=0.5)
        for place, text, part in sorted(self.boxes, key=lambda box: box[2] in self.lit):  # bold edges are above others
            fill, edge, thickness, ink, weight = self._look(part)
            self._rectangle(axes, place, fill, edge, thickness, 0.0)
            self._write(axes, place, text.split("\n"), ink, weight)
        for place, texts, part in self.labels:
            fill, edge, thickness, ink, weight = self._look(part)
            if part in self.lit or part.startswith("prefix"):
                self._rectangle(axes, place, fill, edge, thickness, 0.06)
            self._write(axes, place, texts, ink, weight)

    def _rectangle(self, axes, place: _Place, fill: str, edge: str, thickness: float, rounding: float) -> None:
        box = f"round,pad=0,rounding_size={rounding}" if rounding else "square,pad=0"
        corner = (place.x - place.width / 2, place.top)
        patch = FancyBboxPatch(corner, place.width, place.height, boxstyle=box, facecolor=fill, edgecolor=edge)
        patch.set(linewidth=thickness, clip_on=False)
        axes.add_patch(patch)

    def _write(self, axes, place: _Place, texts: Sequence[str], ink: str, weight: str) -> None:
        for number, text in enumerate(texts):
            y = place.top + place.height * (number + 0.5) / len(texts) + (0.02 - 0.03 * number) * (len(texts) - 1)
            size = NAME_SIZE if number == 0 else SHAPE_SIZE
            axes.text(place.x, y, text, ha="center", va="center", fontsize=size, color=ink, weight=weight)


def _width_of(texts: Sequence[str]) -> float:
    """The widest of the texts in inches, bold, reckoned from its letters, so that no version of matplotlib moves it."""
    ems = dict.fromkeys("[](), ilj", 0.4)
    return max(sum(ems.get(letter, 0.68) for letter in text) for text in texts) * NAME_SIZE / 72
