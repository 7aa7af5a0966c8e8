"""What lessons and README say of their running times agrees with what was measured on one named machine.

Nothing is timed here: tests/measure_times.py does that, on a quiet machine.
"""

import itertools
import json
import re

import nbformat
import pytest
from lessons import lessons
from measure_times import STORED

FACTOR = 2  # a stated time is at least half, and at most twice, the measured one
MEASURED = json.loads(STORED.read_text(encoding="utf-8"))
WORDS = {word: number for number, word in enumerate("zero a two three four five six seven eight nine ten".split())}
TIME = re.compile(r"\b[Aa]bout (a minute and a half|half a minute|\w+ (?:seconds?|minutes?))(?!\s+(?:to here|more))")


def seconds(said: str) -> float:
    if said in ("half a minute", "a minute and a half"):
        return 30 if said.startswith("half") else 90
    number, unit = said.split()
    return (WORDS[number] if number in WORDS else int(number)) * (60 if unit.startswith("minute") else 1)


def close(said: float, measured: float) -> bool:
    return measured / FACTOR <= said <= measured * FACTOR


def stated(notebook: nbformat.NotebookNode) -> dict[str, float]:
    """The seconds that prose says of the code cell below it, by the cell's id."""
    found = {}
    for before, cell in itertools.pairwise(notebook.cells[1:]):
        times = TIME.findall(before.source) if (before.cell_type, cell.cell_type) == ("markdown", "code") else []
        if times:
            found[cell.id] = seconds(times[-1])
    return found


@pytest.mark.parametrize("path", lessons(), ids=lambda path: path.stem)
def test_a_lesson_takes_as_long_as_it_says(path):
    notebook = nbformat.read(path, as_version=4)
    measured = MEASURED["lessons"][path.stem]
    first_cells = "\n".join(cell.source for cell in notebook.cells[:3] if cell.cell_type == "markdown")
    whole = re.search(r"Runs in " + TIME.pattern.removeprefix(r"\b").replace("[Aa]", "a"), first_cells)
    assert whole, "the title says how long the lesson runs: Runs in about ..."
    assert close(seconds(whole[1]), measured["whole"]), (whole[1], measured["whole"])
    said = stated(notebook)
    for cell, time in said.items():
        assert close(time, measured["cells"].get(cell, 0)), (cell, time, measured["cells"].get(cell))
    silent = {cell: time for cell, time in measured["cells"].items() if time > 10 and cell not in said}
    assert not silent, f"these cells run long, and nothing above says so: {silent}"


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("Runs in about 20 seconds.", 20),
        ("About two minutes.", 120),
        ("It takes about a minute and a half.", 90),
        ("About half a minute", 30),
        ("About ten seconds", 10),
        ("About 10 minutes to here.", None),
    ],
)
def test_times_in_words_are_understood(text, time):
    assert [seconds(said) for said in TIME.findall(text)] == [time] * (time is not None)
