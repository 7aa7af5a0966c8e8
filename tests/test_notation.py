"""Every symbol of the lessons' formulas stands on the notation page, and the page holds no others."""

import re
from pathlib import Path

import nbformat
import pytest
from lessons import NOTEBOOKS, lessons

PATHS = lessons()
PAGE = (NOTEBOOKS / "notation.md").read_text(encoding="utf-8")

FORMULA = r"\$\$(.+?)\$\$|(?<![\\$])\$(?!\$)(.+?)(?<!\\)\$"
# Commands that are no symbols: roots, fractions, brackets, signs, spaces.
LAYOUT = {
    *("sqrt", "frac", "left", "right", "top", "qquad", "quad", "cdot", "times", "dots", "ldots", "in", "sum", "exp"),
    *("le", "ge", "lt", "gt", "approx", "to", "max", "min", "log", "tanh", "big", "Big", "bigl", "bigr", "mid"),
}
NAME = r"\\[A-Za-z]+|[A-Za-z]"
SUBSCRIPT = rf"_(?:\{{[^{{}}]*\}}|{NAME}|\d)"


def formulas(text: str) -> list[str]:
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [block or inline for block, inline in re.findall(FORMULA, without_code, flags=re.DOTALL)]


def symbols(formula: str) -> set[str]:
    r"""{"X", "W_Q", "d_k"} of `\sqrt{d_k} X W_Q`: letters with their subscripts, without words and layout."""
    formula = re.sub(r"\\(?:text|operatorname|mathrm|mathbb)\{[^{}]*\}", " ", formula)
    found = re.findall(rf"(?:{NAME})(?:{SUBSCRIPT})?", formula)
    return {name.replace("{", "").replace("}", "") for name in found if name.lstrip("\\") not in LAYOUT}


def cells(path: Path, kind: str) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def used_in(path: Path) -> set[str]:
    return set().union(*(symbols(f) for cell in cells(path, "markdown") for f in formulas(cell.source)))


def rows(heading: str) -> list[list[str]]:
    """The body of the table under a heading of the page."""
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)[1]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in lines[2:]]


def defined() -> list[str]:
    return [symbol for row in rows("Symbols") for formula in formulas(row[0]) for symbol in symbols(formula)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_symbol_of_a_lesson_is_on_the_page(path):
    assert used_in(path) <= set(defined())


def test_every_symbol_on_the_page_is_used_and_stands_there_once():
    assert sorted(defined()) == sorted(set().union(*map(used_in, PATHS)))


def test_the_code_names_on_the_page_are_the_lessons_own():
    code = "\n".join(cell.source for path in PATHS for cell in cells(path, "code"))
    names = [row[1].strip("`") for row in rows("Symbols")]
    of_code = [row[0] for heading in ("Sizes", "Names") for row in rows(heading)]
    names += re.findall(r"`(\w+)`", " ".join(of_code))
    assert {"hidden", "batch", "past_value"} <= set(names)
    for name in names:
        assert re.search(rf"\b{re.escape(name)}\b", code), f"no lesson has {name!r} in its code"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"take $X W_Q$ and $d_k$", {"X", "W_Q", "d_k"}),
        (r"$$\text{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$", {"Q", "K", "V", "d_k"}),
        (r"$\sigma_{max} \cdot P_1 h$", {r"\sigma_max", "P_1", "h"}),
        ("`$HOME` and ```\n$x$\n``` and \\$5 or \\$6", set()),
    ],
)
def test_symbols_are_found(text, found):
    assert set().union(*map(symbols, formulas(text))) == found
