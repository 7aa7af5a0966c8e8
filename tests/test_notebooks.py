"""What every lesson's notebook looks like: stored whole, readable anywhere, in the course's manner.

That its cells still give the stored outputs is checked by running it, with nbval: see notebooks/conftest.py.
"""

import ast
import importlib
import itertools
import re
import runpy
import statistics
from pathlib import Path

import nbformat
import pytest
from lessons import LESSON_NAME, NOTEBOOKS, lessons, questions
from store_notebooks import METADATA, text_of

PROJECT = NOTEBOOKS.parent
PATHS = lessons()
HARNESS = runpy.run_path(str(NOTEBOOKS / "conftest.py"))
UNCHECKED_CELLS = HARNESS["UNCHECKED_CELLS"]

MAX_BYTES = 400_000
MAX_LINES, MAX_MEDIAN = 25, 6
MAX_WIDTH = 96  # of code; notebooks/.ruff.toml says why, and tells ruff
BANNED_CODE = {
    r"\bfrom tqdm(\.auto|\.std)? import|\bimport tqdm": "a text progress bar differs from run to run",
    r"%%?timeit|%%?time\b": "times differ from run to run",
    r"\binteract(ive)?\(": "widgets need a live kernel",
    r"\bclear_output\b|\.update_display\(|\bdisplay_id\b|display\([^)]*\)\.update": "stored outputs cannot be replaced",
}
TRAINING = {"fit", "measure"}  # of helpers: what takes more than five seconds in a lesson is a call of these
BANNED_WORDS = r"\b(simply|obviously|just|clearly|easily)\b"
IGNORE_TAGS = {"nbval-ignore-output", "nbval-skip"}
IGNORE_COMMENTS = r"#\s*(NBVAL_IGNORE_OUTPUT|NBVAL_SKIP|PYTEST_VALIDATE_IGNORE_OUTPUT)"
REMOTE = r"(?i)!\[[^\]]*\]\(\s*https?:|<(img|script|link|iframe)\b[^>]*\b(src|href)\s*=\s*[\"']?(https?:)?//"
MACHINE = (
    rf"(?i)\bat 0x[0-9a-f]{{6,}}|(?<![\w.])/(home|root|Users|tmp|content)/|[A-Z]:\\+Users|{re.escape(str(PROJECT))}"
)


class Notebook:
    def __init__(self, path: Path, content: nbformat.NotebookNode, size: int):
        self.path, self.content, self.size = path, content, size
        self.cells = content.cells
        self.code = [cell for cell in self.cells if cell.cell_type == "code"]
        self.markdown = [cell for cell in self.cells if cell.cell_type == "markdown"]


def read(path: Path) -> Notebook:
    return Notebook(path, nbformat.reads(text_of(path), as_version=nbformat.NO_CONVERT), path.stat().st_size)


@pytest.fixture(scope="module", params=[*PATHS, *questions()], ids=lambda path: f"{path.parent.name}/{path.stem}")
def notebook(request) -> Notebook:
    return read(request.param)


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def lines(cell) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def prose(cell) -> str:
    """The text of a Markdown cell without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", cell.source, flags=re.DOTALL)


def comments(cell) -> str:
    return "\n".join(re.findall(r"(?:^|\s)#\s(.*)$", cell.source, flags=re.MULTILINE))


def test_there_are_notebooks_each_with_its_number():
    assert PATHS, f"no notebook in {NOTEBOOKS}"
    numbers = [path.name[:2] for path in PATHS]
    assert len(set(numbers)) == len(numbers)


def test_name_and_size(notebook):
    assert re.fullmatch(LESSON_NAME, notebook.path.name)
    assert notebook.size <= MAX_BYTES


def test_metadata_is_normalised(notebook):
    assert notebook.content.metadata == METADATA, "store the notebook with tests/store_notebooks.py"
    assert (notebook.content.nbformat, notebook.content.nbformat_minor) == (4, 5)
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}, f"{cell.id}: {dict(cell.metadata)}"


def test_cell_ids_are_readable(notebook):
    number = notebook.path.name[:2]
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell_id in ids:
        assert re.fullmatch(rf"{number}(-[a-z0-9]+)+", cell_id), f"{cell_id} is not of the form {number}-some-words"
    # nbformat's own random ids are eight hexadecimal digits.
    assert not [cell_id for cell_id in ids if re.fullmatch(r"\d\d-[0-9a-f]{8}", cell_id)]


def test_every_code_cell_ran_in_order(notebook):
    counts = [cell.execution_count for cell in notebook.code]
    assert counts, "a lesson has code"
    assert counts == list(range(1, len(counts) + 1))


def test_outputs_are_clean(notebook):
    for cell in notebook.code:
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert bool(errors) == ("raises-exception" in tags(cell)), f"{cell.id}: an error and its tag go together"
        for output in cell.outputs:
            assert output.get("name") != "stderr", f"{cell.id} wrote to stderr: {output.text}"
            assert not re.search(MACHINE, str(output)), f"{cell.id}: an output names an address or folder"
            assert not re.search(REMOTE, str(output)), f"{cell.id}: an output loads something from the network"
            widget = [kind for kind in output.get("data", {}) if "widget" in kind]
            assert not widget, f"{cell.id}: {widget}"


def test_every_figure_has_its_sentence(notebook):
    for cell in notebook.code:
        for number, output in enumerate(cell.outputs):
            data = output.get("data", {})
            images = [kind for kind in data if kind.startswith("image/")]
            if not images:
                continue
            assert images == ["image/png"], f"{cell.id}: {images}"
            sentence = data.get("text/plain", "")
            assert re.search(r"\w+ \w+", sentence), f"{cell.id}: a figure without a sentence"
            assert not sentence.startswith("<"), (
                f"{cell.id}: show the figure with helpers.course.figures, got {sentence}"
            )
            alternative = output.metadata.get("image/png", {}).get("alt")
            assert alternative == sentence, f"{cell.id}: the alternative text is not the sentence"
            caption = cell.outputs[number + 1] if number + 1 < len(cell.outputs) else {}
            assert caption.get("data", {}).get("text/plain") == sentence, f"{cell.id}: no caption under the figure"
            assert "text/markdown" in caption["data"], f"{cell.id}: the caption is not rendered"


def test_unchecked_cells_are_listed(notebook):
    for cell in notebook.code:
        if tags(cell) & IGNORE_TAGS or re.search(IGNORE_COMMENTS, cell.source):
            assert cell.id in UNCHECKED_CELLS, f"{cell.id} is not listed in notebooks/conftest.py"


def test_listed_unchecked_cells_exist_and_have_reasons():
    ids = {cell.id for path in PATHS for cell in read(path).code if tags(cell) & IGNORE_TAGS}
    assert set(UNCHECKED_CELLS) <= ids
    assert all(len(reason.split()) >= 3 for reason in UNCHECKED_CELLS.values())


def test_cells_are_short(notebook):
    for cell in notebook.code:
        assert 1 <= lines(cell) <= MAX_LINES, f"{cell.id} has {lines(cell)} lines"
    median = statistics.median(map(lines, notebook.code))
    if notebook.path.parent == NOTEBOOKS:  # the proof of an answer is one cell, setup and all
        assert median <= MAX_MEDIAN, f"the median code cell has {median} lines"


def test_code_lines_are_not_cut_off(notebook):
    for cell in notebook.code:
        for line in cell.source.splitlines():
            assert len(line) <= MAX_WIDTH, f"{cell.id}: {len(line)} characters in {line!r}"


def test_prose_before_each_code_cell(notebook):
    assert notebook.cells[0].cell_type == "markdown"
    first = notebook.code[0].id  # the cell that fetches the package on Colab
    for before, cell in itertools.pairwise(notebook.cells):
        if cell.cell_type == "code" and cell.id != first:
            assert before.cell_type == "markdown", f"no prose before {cell.id}"
            assert before.source.strip(), f"an empty cell before {cell.id}"


def test_training_says_beforehand_how_long_it_takes(notebook):
    training, first = set(TRAINING), notebook.code[0]
    for before, cell in itertools.pairwise(notebook.cells):
        if cell.cell_type != "code" or cell is first:
            continue
        for statement in ast.parse(cell.source).body:
            if not called(statement) & training:
                continue
            if isinstance(statement, ast.FunctionDef):
                training.add(statement.name)
            else:
                assert re.search(r"\b(seconds|minutes?)\b", before.source), f"{cell.id} trains: say how long it takes"


def called(node: ast.AST) -> set[str]:
    """The last part of each name that is called: `fit` of `helpers.tuning.training.fit(...)`."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {ast.unparse(each.func).rsplit(".")[-1] for each in calls}


def test_headings(notebook):
    text = "\n\n".join(re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL) for cell in notebook.markdown)
    assert not re.search(r"(?m)^\S.*\n(=+|-+)$(?!.*\|)|<h\d", text), "write headings with #"
    levels = [len(marks) for marks in re.findall(r"^(#{1,6}) ", text, flags=re.MULTILINE)]
    assert levels[:1] == [1], "the first heading is not the title"
    assert levels.count(1) == 1, f"{levels.count(1)} titles"
    for above, level in itertools.pairwise(levels):
        assert level <= above + 1, f"a heading of level {level} under one of level {above}"


def test_summaries_are_html(notebook):
    for cell in notebook.markdown:
        for summary in re.findall(r"<summary>.*?</summary>", cell.source, flags=re.DOTALL):
            assert "`" not in summary, f"{cell.id}: in {summary} the back-ticks show, write <code>...</code>"


def test_nothing_is_loaded_from_the_network(notebook):
    for cell in notebook.cells:
        assert not re.search(REMOTE, cell.source), cell.id


def test_code_gives_the_same_output_twice(notebook):
    for cell in notebook.code:
        for pattern, reason in BANNED_CODE.items():
            assert not re.search(pattern, cell.source), f"{cell.id}: {reason}"


def test_shape_comments_are_checked(notebook):
    for cell in notebook.code:
        left = re.search(r"# \[.*", HARNESS["check_shape_comments"](cell.source))
        assert not left, f"{cell.id}: {left[0]!r} stands on no assignment or return, so that nothing checks it"


def test_prose_is_plain(notebook):
    for cell in notebook.cells:
        text = comments(cell) if cell.cell_type == "code" else prose(cell)
        found = re.search(BANNED_WORDS, text, flags=re.IGNORECASE)
        assert not found, f"{cell.id}: {found[0]!r}"


def test_what_prose_names_exists(notebook):
    for cell in notebook.markdown:
        for name in re.findall(r"`helpers\.([A-Za-z_][\w.]*)", cell.source):
            assert exists(name.rstrip(".")), f"{cell.id}: there is no helpers.{name}"
        for name in re.findall(r"`((?:helpers|notebooks|tests)/[\w./-]*)`", cell.source):
            assert (PROJECT / name).exists(), f"{cell.id}: there is no {name}"
        for target in re.findall(r"\]\((?!https?:|#|attachment:|mailto:)([^)#\s]+)", cell.source):
            assert (notebook.path.parent / target).exists(), f"{cell.id}: a link to {target}, which does not exist"


def exists(name: str) -> bool:
    """Whether helpers.name is a module, or something in one."""
    found, parts = importlib.import_module("helpers"), name.split(".")
    for position, part in enumerate(parts):
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(f"helpers.{'.'.join(parts[: position + 1])}")
        except ModuleNotFoundError:
            return False
    return True
