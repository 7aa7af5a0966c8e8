"""The lessons are a course: short enough to be read, written by the reader early and often, numbers instead of True.

Reading time is counted, not guessed: 150 words of prose or 6 lines of code a minute, folded text included; the time to
do the exercises is not.
"""

import re

import pytest
from lessons import lessons
from nbformat import v4
from test_notebooks import PROJECT, lines, read

WORDS_A_MINUTE, LINES_A_MINUTE = 150, 6
BUDGET = {1: 40, 2: 40, 3: 40, 4: 40, 5: 40, 6: 40, 7: 50, 8: 50, 9: 50}
MOST_TRUTHS, MOST_LINKS = 5, 8
LONGEST_WAIT = 10  # minutes of reading before the reader writes something

LESSONS = {int(path.name[:2]): read(path) for path in lessons()}
every_lesson = pytest.mark.parametrize("number", LESSONS)


def minutes(cells) -> float:
    """How long these cells take to read."""
    text = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    prose = re.sub(r"<[^>]+>", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    code = sum(lines(cell) for cell in cells if cell.cell_type == "code")
    return len(prose.split()) / WORDS_A_MINUTE + code / LINES_A_MINUTE


def exercise(cell) -> str | None:
    """Which kind of exercise a cell holds: something to build, to predict or to debug."""
    if cell.cell_type != "code" or not re.search(r"^(\w+ = )?check_\w+(\.or_ours)?\(", cell.source, re.MULTILINE):
        return None
    if re.search(r"^\w+ = .*\.\.\.", cell.source, re.MULTILINE):
        return "predict"
    return "debug" if re.search(r"^(def|class) mended", cell.source, re.MULTILINE) else "build"


@every_lesson
def test_a_lesson_fits_its_budget(number):
    assert minutes(LESSONS[number].cells) <= BUDGET[number]


@every_lesson
def test_the_title_says_how_long_reading_takes(number):
    title = "\n".join(cell.source for cell in LESSONS[number].cells[:2])
    said = int(re.search(r"reading\s+takes\s+about\s+(\d+)\s+minutes", title)[1])
    assert abs(said - minutes(LESSONS[number].cells)) <= 2


def test_the_readme_says_the_same():
    rows = re.findall(
        r"^\| (\d) \| \[.*?\| (\d+) min \|", (PROJECT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    titles = {number: "\n".join(cell.source for cell in lesson.cells[:2]) for number, lesson in LESSONS.items()}
    said = {number: re.search(r"takes\s+about\s+(\d+)\s+minutes", title)[1] for number, title in titles.items()}
    assert {int(number): time for number, time in rows} == said


@every_lesson
def test_a_lesson_prints_numbers(number):
    printed = [output.get("text", "") for cell in LESSONS[number].code for output in cell.outputs]
    assert len(re.findall(r"\b(True|False)\b", "\n".join(printed))) <= MOST_TRUTHS


@every_lesson
def test_a_lesson_links_to_few_questions(number):
    links = re.findall(r"\]\(questions/", "\n".join(cell.source for cell in LESSONS[number].markdown))
    assert len(links) <= MOST_LINKS


@every_lesson
def test_the_reader_writes_early_and_often(number):
    cells = LESSONS[number].cells
    places = [place for place, cell in enumerate(cells) if exercise(cell)]
    waits = [minutes(cells[start:end]) for start, end in zip([0, *places], places, strict=False)]
    assert max(waits) <= LONGEST_WAIT, [f"{wait:.1f}" for wait in waits]


@every_lesson
def test_a_lesson_has_something_to_build_to_predict_and_to_debug(number):
    kinds = {exercise(cell) for cell in LESSONS[number].cells}
    assert {"build", "predict", "debug"} <= kinds


def test_the_kinds_are_told_apart():
    found = [
        exercise(v4.new_code_cell(source))
        for source in (
            "x = 1",
            "def f():\n    raise NotImplementedError\n\n\nf = check_f.or_ours(f)",
            "expected = [..., ...]\ncheck_map(expected)",
            "def mended():\n    raise NotImplementedError\n\n\ncheck_mended(mended)",
        )
    ]
    assert found == [None, "build", "predict", "debug"]
