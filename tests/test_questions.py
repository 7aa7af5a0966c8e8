"""The questions book: a question a section, an answer, a cell that proves it; each section stands alone."""

import random

import nbformat
import pytest
from lessons import questions
from list_questions import PAGE, VOCABULARY, holds, page, sections
from nbclient import NotebookClient
from nbformat import NotebookNode

of_a_book = pytest.mark.parametrize("path", questions(), ids=lambda path: path.stem)


def divided(notebook: NotebookNode) -> tuple[list, list[list]]:
    """The cells in front of the first question, and the cells of each question."""
    front, sections = [], []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            sections.append([])
        (sections[-1] if sections else front).append(cell)
    return front, sections


def printed(cell: NotebookNode) -> list[str]:
    """The texts that a cell gives, figures' sentences among them."""
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]


@of_a_book
def test_a_question_is_answered_and_proved(path):
    _, sections = divided(nbformat.read(path, as_version=4))
    for question, *rest in sections:
        heading, _, answer = question.source.partition("\n")
        assert heading.endswith("?"), heading
        assert len(answer.split()) >= 10, f"{heading}: the answer comes first, under the question"
        assert any(cell.cell_type == "code" for cell in rest), f"{heading}: no cell proves it"


@of_a_book
def test_sections_in_another_order_give_the_same(path):
    notebook = nbformat.read(path, as_version=4)
    front, sections = divided(notebook)
    stored = {cell.id: printed(cell) for cell in notebook.cells if cell.cell_type == "code"}
    random.Random(path.stem).shuffle(sections)
    notebook.cells = front + [cell for section in sections for cell in section]
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, coalesce_streams=True, resources=resources).execute()  # as stored
    again = {cell.id: printed(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert again == stored


def test_the_list_names_every_question():
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/list_questions.py writes it anew"


def test_every_question_is_under_a_word():
    asked = [question for path in questions() for question, _ in sections(path)]
    alone = [each for each in asked if not any(holds(each, [word, *also]) for word, also in VOCABULARY.items())]
    assert not alone, "give VOCABULARY in tests/list_questions.py a word by which people will look for these"


def test_a_word_is_found_by_what_people_call_it():
    assert holds("Why `view` and then `transpose`?", VOCABULARY["reshape"])
    assert holds("Does the 8 mean 8 attention layers?", ["layers"])
    assert not holds("Does a mask hide keys?", ["key"])
