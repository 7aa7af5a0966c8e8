"""Each rule of test_notebooks.py refuses the notebook it is there for: one fault at a time in a good one."""

from collections.abc import Callable

import pytest
import test_notebooks as rules
from lessons import NOTEBOOKS
from nbformat import from_dict, v4
from store_notebooks import METADATA

TITLE, COLAB, PROSE, FIGURE, MORE_PROSE, RAISES = range(6)
SENTENCE = "Query 1 attends most to key 0."


def good_notebook() -> rules.Notebook:
    cells = [
        v4.new_markdown_cell("# One head\n\nUses `helpers.course.figures.heat_map` and `helpers/course/guests.py`."),
        v4.new_code_cell("import sys", execution_count=1),
        v4.new_markdown_cell(
            "## Weights\n\nThe word `just` is code here.\n\n```\n# no heading\n```\n\n"
            "<details>\n<summary>Which shape has <code>x</code>?</summary>\n\n`[2, 3]`\n\n</details>"
        ),
        v4.new_code_cell("weights = draw()  # [seq, keys], after softmax", execution_count=2),
        v4.new_markdown_cell("### A wrong width\n\nSee [one head](conftest.py)."),
        v4.new_code_cell("raise ValueError('width')", execution_count=3, metadata={"tags": ["raises-exception"]}),
    ]
    cells[FIGURE].outputs = [
        v4.new_output(
            "display_data",
            {"image/png": "iVBORw0KGgo=", "text/plain": SENTENCE},
            metadata={"image/png": {"alt": SENTENCE}},
        ),
        v4.new_output("display_data", {"text/markdown": f"*Figure.* {SENTENCE}", "text/plain": SENTENCE}),
    ]
    cells[RAISES].outputs = [
        v4.new_output("error", ename="ValueError", evalue="width", traceback=["ValueError: width"])
    ]
    for number, cell in enumerate(cells):
        cell.id = f"42-{number:02}"
    content = v4.new_notebook(cells=cells, metadata=from_dict(METADATA))
    content.nbformat_minor = 5
    return rules.Notebook(NOTEBOOKS / "42_one_head.ipynb", content, 10_000)


RULES = [
    rules.test_name_and_size,
    rules.test_metadata_is_normalised,
    rules.test_cell_ids_are_readable,
    rules.test_every_code_cell_ran_in_order,
    rules.test_outputs_are_clean,
    rules.test_every_figure_has_its_sentence,
    rules.test_unchecked_cells_are_listed,
    rules.test_cells_are_short,
    rules.test_code_lines_are_not_cut_off,
    rules.test_prose_before_each_code_cell,
    rules.test_training_says_beforehand_how_long_it_takes,
    rules.test_headings,
    rules.test_summaries_are_html,
    rules.test_nothing_is_loaded_from_the_network,
    rules.test_code_gives_the_same_output_twice,
    rules.test_shape_comments_are_checked,
    rules.test_prose_is_plain,
    rules.test_what_prose_names_exists,
]


def output_of(notebook, kind: str = "image/png"):
    return next(output for output in notebook.cells[FIGURE].outputs if kind in output.data)


def set_source(cell: int, source: str) -> Callable[[rules.Notebook], None]:
    return lambda notebook: notebook.cells[cell].update(source=source)


def append(cell: int, text: str) -> Callable[[rules.Notebook], None]:
    return lambda notebook: notebook.cells[cell].update(source=notebook.cells[cell].source + text)


def add_output(**output) -> Callable[[rules.Notebook], None]:
    return lambda notebook: notebook.cells[COLAB].outputs.append(v4.new_output(**output))


def set_tags(cell: int, *tags: str) -> Callable[[rules.Notebook], None]:
    return lambda notebook: notebook.cells[cell].metadata.update(tags=list(tags))


def set_id(cell: int, cell_id: str) -> Callable[[rules.Notebook], None]:
    return lambda notebook: notebook.cells[cell].update(id=cell_id)


def rename(name: str) -> Callable[[rules.Notebook], None]:
    return lambda notebook: setattr(notebook, "path", NOTEBOOKS / name)


FAULTS = {
    "name without a number": (rename("one_head.ipynb"), rules.test_name_and_size),
    "name in capitals": (rename("42_One_Head.ipynb"), rules.test_name_and_size),
    "too large": (lambda notebook: setattr(notebook, "size", 400_001), rules.test_name_and_size),
    "version of Python": (
        lambda notebook: notebook.content.metadata.language_info.update(version="3.13.1"),
        rules.test_metadata_is_normalised,
    ),
    "widgets": (lambda notebook: notebook.content.metadata.update(widgets={}), rules.test_metadata_is_normalised),
    "collapsed cell": (
        lambda notebook: notebook.cells[COLAB].metadata.update(collapsed=True),
        rules.test_metadata_is_normalised,
    ),
    "timed cell": (
        lambda notebook: notebook.cells[COLAB].metadata.update(ExecuteTime={}),
        rules.test_metadata_is_normalised,
    ),
    "id of another lesson": (set_id(PROSE, "41-02"), rules.test_cell_ids_are_readable),
    "id twice": (set_id(PROSE, "42-01"), rules.test_cell_ids_are_readable),
    "random id": (set_id(PROSE, "9a1f03bc"), rules.test_cell_ids_are_readable),
    "numbered random id": (set_id(PROSE, "42-9a1f03bc"), rules.test_cell_ids_are_readable),
    "cell never run": (
        lambda notebook: notebook.cells[COLAB].update(execution_count=None),
        rules.test_every_code_cell_ran_in_order,
    ),
    "cell run again": (
        lambda notebook: notebook.cells[RAISES].update(execution_count=4),
        rules.test_every_code_cell_ran_in_order,
    ),
    "stderr": (add_output(output_type="stream", name="stderr", text="late"), rules.test_outputs_are_clean),
    "error without tag": (set_tags(RAISES), rules.test_outputs_are_clean),
    "tag without error": (set_tags(COLAB, "raises-exception"), rules.test_outputs_are_clean),
    "address": (
        add_output(output_type="stream", name="stdout", text="<Head object at 0x7f1b2c3d4e50>"),
        rules.test_outputs_are_clean,
    ),
    "folder": (
        add_output(output_type="stream", name="stdout", text="saved to /home/ada/prefix.safetensors"),
        rules.test_outputs_are_clean,
    ),
    "script in an output": (
        add_output(output_type="display_data", data={"text/html": '<script src="https://cdn.test/x.js"></script>'}),
        rules.test_outputs_are_clean,
    ),
    "widget output": (
        add_output(output_type="display_data", data={"application/vnd.jupyter.widget-view+json": {}}),
        rules.test_outputs_are_clean,
    ),
    "bare figure": (
        lambda notebook: output_of(notebook).data.update({"text/plain": "<Figure size 640x480 with 1 Axes>"}),
        rules.test_every_figure_has_its_sentence,
    ),
    "figure without text": (
        lambda notebook: output_of(notebook).data.pop("text/plain"),
        rules.test_every_figure_has_its_sentence,
    ),
    "other alternative text": (
        lambda notebook: output_of(notebook).metadata["image/png"].update(alt="A heat map."),
        rules.test_every_figure_has_its_sentence,
    ),
    "no alternative text": (
        lambda notebook: output_of(notebook).metadata.clear(),
        rules.test_every_figure_has_its_sentence,
    ),
    "no caption": (
        lambda notebook: notebook.cells[FIGURE].outputs.pop(),
        rules.test_every_figure_has_its_sentence,
    ),
    "caption of another figure": (
        lambda notebook: output_of(notebook, "text/markdown").data.update({"text/plain": "Query 2."}),
        rules.test_every_figure_has_its_sentence,
    ),
    "ignore tag": (set_tags(FIGURE, "nbval-ignore-output"), rules.test_unchecked_cells_are_listed),
    "skip tag": (set_tags(FIGURE, "nbval-skip"), rules.test_unchecked_cells_are_listed),
    "ignore comment": (append(FIGURE, "\n# NBVAL_IGNORE_OUTPUT"), rules.test_unchecked_cells_are_listed),
    "cell of 26 lines": (set_source(FIGURE, "x = 1\n" * 26), rules.test_cells_are_short),
    "median of 7 lines": (
        lambda notebook: [cell.update(source="x = 1\n" * 7) for cell in notebook.code],
        rules.test_cells_are_short,
    ),
    "empty cell": (set_source(FIGURE, "\n"), rules.test_cells_are_short),
    "code line of 97 characters": (
        append(FIGURE, "\n# " + 95 * "x"),
        rules.test_code_lines_are_not_cut_off,
    ),
    "no prose": (lambda notebook: notebook.cells.pop(MORE_PROSE), rules.test_prose_before_each_code_cell),
    "empty prose": (set_source(MORE_PROSE, " "), rules.test_prose_before_each_code_cell),
    "code first": (lambda notebook: notebook.cells.pop(TITLE), rules.test_prose_before_each_code_cell),
    "training of unknown length": (
        set_source(FIGURE, "losses = helpers.tuning.training.fit(model, steps=100)"),
        rules.test_training_says_beforehand_how_long_it_takes,
    ),
    "training in a function": (
        lambda notebook: [
            set_source(COLAB + 2, "def tune():\n    return fit(model, steps=100)")(notebook),
            set_source(RAISES, "prefix = tune()")(notebook),
        ],
        rules.test_training_says_beforehand_how_long_it_takes,
    ),
    "two titles": (append(PROSE, "\n\n# Another"), rules.test_headings),
    "no title": (set_source(TITLE, "One head"), rules.test_headings),
    "skipped level": (append(MORE_PROSE, "\n\n##### Deep"), rules.test_headings),
    "underlined heading": (append(PROSE, "\n\nAnother\n======="), rules.test_headings),
    "back-ticks in a summary": (
        append(PROSE, "\n<details>\n<summary>What is\n`x`?</summary>\n</details>"),
        rules.test_summaries_are_html,
    ),
    "remote image": (
        append(PROSE, "\n![a head](https://example.org/a.png)"),
        rules.test_nothing_is_loaded_from_the_network,
    ),
    "remote HTML image": (
        append(PROSE, '\n<img alt="a" src="http://example.org/a.png">'),
        rules.test_nothing_is_loaded_from_the_network,
    ),
    "script": (
        append(PROSE, '\n<script src="//cdn.example.org/x.js"></script>'),
        rules.test_nothing_is_loaded_from_the_network,
    ),
    "tqdm": (set_source(FIGURE, "from tqdm import tqdm"), rules.test_code_gives_the_same_output_twice),
    "timeit": (set_source(FIGURE, "%timeit draw()"), rules.test_code_gives_the_same_output_twice),
    "interact": (set_source(FIGURE, "interact(draw)"), rules.test_code_gives_the_same_output_twice),
    "clear_output": (set_source(FIGURE, "clear_output()"), rules.test_code_gives_the_same_output_twice),
    "display update": (
        set_source(FIGURE, "display(x, display_id=True).update(y)"),
        rules.test_code_gives_the_same_output_twice,
    ),
    "shape comment on an expression": (
        set_source(FIGURE, "draw(x)  # [8, 12]"),
        rules.test_shape_comments_are_checked,
    ),
    "shape comment on a line of its own": (
        set_source(FIGURE, "# [heads, seq]\nx = draw()"),
        rules.test_shape_comments_are_checked,
    ),
    "filler": (append(PROSE, "\nIt is Simply a sum."), rules.test_prose_is_plain),
    "filler in a comment": (append(FIGURE, "\n# clearly the same"), rules.test_prose_is_plain),
    "helper that is not": (append(PROSE, "\nSee `helpers.split_tails(x)`."), rules.test_what_prose_names_exists),
    "name in a module that is not": (
        append(PROSE, "\nSee `helpers.course.figures.pie`."),
        rules.test_what_prose_names_exists,
    ),
    "file that is not": (append(PROSE, "\nSee `helpers/tails.py`."), rules.test_what_prose_names_exists),
    "link to nothing": (append(PROSE, "\nSee [it](43_tails.ipynb)."), rules.test_what_prose_names_exists),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_passes_a_good_notebook(rule):
    rule(good_notebook())


@pytest.mark.parametrize(("plant", "rule"), FAULTS.values(), ids=FAULTS.keys())
def test_rule_refuses_a_fault(plant, rule):
    notebook = good_notebook()
    plant(notebook)
    with pytest.raises(AssertionError):
        rule(notebook)


def test_every_rule_has_a_fault():
    defined = {value for name, value in vars(rules).items() if name.startswith("test_") and callable(value)}
    without_notebook = {
        rules.test_there_are_notebooks_each_with_its_number,
        rules.test_listed_unchecked_cells_exist_and_have_reasons,
    }
    assert set(RULES) == defined - without_notebook == {rule for _, rule in FAULTS.values()}
