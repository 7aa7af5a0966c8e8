"""What lessons say of their running times agrees with what was measured on one named machine.

Nothing is timed here: tests/measure_times.py does that, on a quiet machine. That one is fast. Two plain cores (AVX-512
without bfloat16 instructions) took three to five times as long: 26 s for a lesson that takes 6 here, 176 s for one of
52. So a lesson's title gives a range from here to there, and a cell's text a time within it.
"""

import itertools
import json
import re

import nbformat
import pytest
from lessons import lessons
from measure_times import STORED

ROUNDING = 1.5  # a stated time may be as much shorter than the measured one, or as much longer
SLOWER = 3, 5  # how many times as long a lesson may take on other processors
MEASURED = json.loads(STORED.read_text(encoding="utf-8"))
WORDS = {word: number for number, word in enumerate("zero a two three four five six seven eight nine ten".split())}
TIME = re.compile(r"\b[Aa]bout (a minute and a half|half a minute|\w+\s(?:seconds?|minutes?))\b(?!\s+(?:to here|more))")


def seconds(said: str) -> float:
    if said in ("half a minute", "a minute and a half"):
        return 30 if said.startswith("half") else 90
    number, unit = said.split()
    return (WORDS[number] if number in WORDS else int(number)) * (60 if unit.startswith("minute") else 1)


def stated(notebook: nbformat.NotebookNode) -> dict[str, float]:
    """The seconds that prose says of the code cell below it, by the cell's id."""
    found = {}
    for before, cell in itertools.pairwise(notebook.cells[2:]):
        times = TIME.findall(before.source) if (before.cell_type, cell.cell_type) == ("markdown", "code") else []
        if times:
            found[cell.id] = seconds(times[-1])
    return found


@pytest.mark.parametrize("path", lessons(), ids=lambda path: path.stem)
def test_a_lesson_takes_as_long_as_it_says(path):
    notebook = nbformat.read(path, as_version=4)
    measured = MEASURED["lessons"][path.stem]
    title = "\n".join(cell.source for cell in notebook.cells[:3] if cell.cell_type == "markdown")
    whole = re.search(r"Runs in (\d+) to (\d+) (seconds|minutes) on two CPU cores", title)
    assert whole, "the title says how long the lesson runs: Runs in 5 to 20 seconds on two CPU cores"
    fast, slow = (int(number) * (60 if whole[3] == "minutes" else 1) for number in whole.groups()[:2])
    assert measured["whole"] / ROUNDING <= fast <= measured["whole"] * ROUNDING, (fast, measured["whole"])
    assert measured["whole"] * SLOWER[0] <= slow <= measured["whole"] * SLOWER[1], (slow, measured["whole"])
    said = stated(notebook)
    for cell, time in said.items():
        here = measured["cells"].get(cell, 0)
        assert here / ROUNDING <= time <= here * SLOWER[1], (cell, time, here)
    silent = {cell: time for cell, time in measured["cells"].items() if time > 4 and cell not in said}
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
