"""The notebook checks catch what they are there for: one fault planted in each of many small notebooks.

All notebooks run in one pytest, with the project's conftest.py and options; each test below looks up one outcome.
"""

import base64
import copy
import io
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from nbformat import NotebookNode, v4
from PIL import Image
from store_notebooks import store

PROJECT = Path(__file__).parents[1]
CELL_TIMEOUT = 8

TEXT, ARRAY, RAISES = range(3)  # the cells of the notebook without figures
FIGURE = 1  # the cell of the one with a figure

TEXT_CELLS = [
    "print('two heads')\nprint('of width 4')",
    "import numpy as np\nwidth = 4\nscores = np.zeros((2, width))  # [2, width]\nfloat(scores.mean() + 0.5)",
    "raise ValueError('heads do not divide the width')",
]
FIGURE_CELLS = [
    "from helpers.course.figures import heat_map\nweights = [[0.9, 0.1, 0.0], [0.2, 0.7, 0.1]]",
    "heat_map(weights);",
]


def notebook_of(sources: list[str]) -> NotebookNode:
    cells = [v4.new_code_cell(source, id=f"99-{number}") for number, source in enumerate(sources)]
    return v4.new_notebook(cells=cells)


def figure_of(cell: NotebookNode) -> NotebookNode:
    return next(output for output in cell.outputs if "image/png" in output.data)


# Faults. Each takes the cells of a stored notebook and changes them in place.


def never_run(cells):
    cells[TEXT].update(execution_count=None, outputs=[])


def wrong_number(cells):
    cells[ARRAY].outputs[0].data["text/plain"] = "0.25"


def nan_for_a_number(cells):
    cells[ARRAY].source = cells[ARRAY].source.replace("+ 0.5", "* float('nan')")


def other_line_printed(cells):
    cells[TEXT].source = "print('two heads')\nprint('of width 3')"


def output_added(cells):
    cells[TEXT].source += "\n'a value'"


def output_lost(cells):
    cells[ARRAY].source += ";"


def outputs_in_another_order(cells):
    cells[TEXT].outputs.append(v4.new_output("display_data", {"text/plain": "'shown'"}))
    cells[TEXT].source = "display('shown')\n" + cells[TEXT].source


def stored_stderr(cells):
    cells[TEXT].outputs.append(v4.new_output("stream", name="stderr", text="a warning\n"))
    cells[TEXT].source += "\nimport sys\nprint('a warning', file=sys.stderr)"


def new_stderr(cells):
    cells[TEXT].source += "\nimport warnings\nwarnings.warn('the cell is old')"


def stale_exception_tag(cells):
    cells[RAISES].update(source="width = 8", outputs=[])


def another_exception(cells):
    cells[RAISES].source = "raise TypeError('heads do not divide the width')"


def new_exception(cells):
    cells[TEXT].source += "\nwidth / 0"


def unlisted_ignore_tag(cells):
    cells[TEXT].metadata.tags = ["nbval-ignore-output"]


def unlisted_ignore_comment(cells):
    cells[TEXT].source = "# NBVAL_IGNORE_OUTPUT\n" + cells[TEXT].source


def unlisted_skip_tag(cells):
    cells[TEXT].metadata.tags = ["nbval-skip"]


def listed_ignore_tag(cells):
    cells[TEXT].update(id="99-listed", source="import time\nprint(time.time())")
    cells[TEXT].metadata.tags = ["nbval-ignore-output"]


def dead_kernel(cells):
    cells[TEXT].source = "import os\nos._exit(1)"


def endless_cell(cells):
    cells[TEXT].source = "import time\ntime.sleep(1000)"


def wrong_shape_comment(cells):
    cells[ARRAY].source = cells[ARRAY].source.replace("# [2, width]", "# [width, 2]")


def wrong_shape_comment_in_function(cells):
    cells[ARRAY].source = (
        "import numpy as np\n\n\ndef split(x, heads):\n    seq, width = x.shape\n"
        "    return x.reshape(\n        seq, heads, -1\n    )  # [heads, seq, width // heads]\n\n\n"
        "split(np.zeros((3, 4)), 2).mean() + 0.5"
    )


def unknown_name_in_shape_comment(cells):
    cells[ARRAY].source = cells[ARRAY].source.replace("# [2, width]", "# [2, breadth]")


def wrong_plot(cells):
    # The same axes, labels and sentence; other weights.
    cells[0].source = cells[0].source.replace("0.2, 0.7, 0.1", "0.0, 0.7, 0.3")


def upside_down_plot(cells):
    cells[FIGURE].source = (
        "from helpers.course.figures import matrices\nmatrix = matrices._draw_matrix\n"
        "matrices._draw_matrix = lambda axes, values, *rest: matrix(axes, values[::-1], *rest)\n"
        "heat_map(weights)"
    )


def junk_png(cells):
    figure_of(cells[FIGURE]).data["image/png"] = base64.b64encode(b"not a picture").decode()


def blank_png(cells):
    buffer = io.BytesIO()
    Image.new("RGB", (300, 200), "white").save(buffer, format="png")
    figure_of(cells[FIGURE]).data["image/png"] = base64.b64encode(buffer.getvalue()).decode()


def changed_sentence(cells):
    for output in cells[FIGURE].outputs:
        output.data["text/plain"] = output.data["text/plain"].replace("0.90", "0.91")


def changed_caption(cells):
    caption = cells[FIGURE].outputs[1].data
    caption["text/markdown"] = caption["text/markdown"].replace("0.90", "0.91")


def figure_lost_in_the_run(cells):
    cells[FIGURE].source = (
        "import IPython.display\nimport helpers.course.figures as figures\ndisplay = IPython.display.display\n"
        "def without_figure(data, **options):\n    data.pop('image/png', None)\n    display(data, raw=True)\n"
        "IPython.display.display = without_figure\nfigures.heat_map(weights)"
    )


def figure_not_stored(cells):
    del figure_of(cells[FIGURE]).data["image/png"]


class Fault(NamedTuple):
    plant: Callable[[list[NotebookNode]], None]
    cell: int
    message: str  # of the failure of that cell


TEXT_FAULTS = [
    Fault(never_run, TEXT, "never run"),
    Fault(wrong_number, ARRAY, "mismatch 'text/plain'(.|\n)*'0.25' == '0.5'"),
    Fault(nan_for_a_number, ARRAY, "mismatch 'text/plain'(.|\n)*'0.5' == 'nan'"),
    Fault(other_line_printed, TEXT, r"mismatch 'stdout'(.|\n)*- of width 3(.|\n)*\+ of width 4"),
    Fault(output_added, TEXT, "Unexpected output fields.*text/plain"),
    Fault(output_lost, ARRAY, "Missing output fields.*text/plain"),
    Fault(outputs_in_another_order, TEXT, r"stored outputs are \['stdout', 'display_data'\], the computed"),
    Fault(stored_stderr, TEXT, "stored cell wrote to stderr"),
    Fault(new_stderr, TEXT, "Unexpected output fields.*stderr"),
    Fault(stale_exception_tag, RAISES, "tagged raises-exception but no longer raises"),
    Fault(another_exception, RAISES, "mismatch 'ename'(.|\n)*'ValueError' == 'TypeError'"),
    Fault(new_exception, TEXT, "caused an exception(.|\n)*NameError"),
    Fault(unlisted_ignore_tag, TEXT, "not listed in UNCHECKED_CELLS"),
    Fault(unlisted_ignore_comment, TEXT, "not listed in UNCHECKED_CELLS"),
    Fault(unlisted_skip_tag, TEXT, "not listed in UNCHECKED_CELLS"),
    Fault(dead_kernel, TEXT, "The kernel died while it ran this cell"),
    Fault(endless_cell, TEXT, f"Timeout of {CELL_TIMEOUT} seconds"),
    Fault(wrong_shape_comment, ARRAY, r"scores has shape \[2, 4\], its comment says \[4, 2\]"),
    Fault(wrong_shape_comment_in_function, ARRAY, r"has shape \[3, 2, 2\], its comment says \[2, 3, 2\]"),
    Fault(unknown_name_in_shape_comment, ARRAY, "name 'breadth' is not defined"),
]
FIGURE_FAULTS = [
    Fault(wrong_plot, FIGURE, r"Figure 0 of the cell differs from the stored one by 0\.[1-9]"),
    Fault(upside_down_plot, FIGURE, r"Figure 0 of the cell differs from the stored one by 0\.[1-9]"),
    Fault(junk_png, FIGURE, "Figure 0 of the cell is not a picture"),
    Fault(blank_png, FIGURE, "Figure 0 of the cell differs from the stored one by"),
    Fault(changed_sentence, FIGURE, r"mismatch 'text/plain'(.|\n)*- .*0\.90(.|\n)*\+ .*0\.91"),
    Fault(changed_caption, FIGURE, r"mismatch 'text/markdown'(.|\n)*- .*0\.90(.|\n)*\+ .*0\.91"),
    Fault(figure_lost_in_the_run, FIGURE, r"stored outputs are \['figure', .*the computed ones \['display_data'"),
    Fault(figure_not_stored, FIGURE, r"stored outputs are \['display_data', .*the computed ones \['figure'"),
]

GOOD = {"good_text": TEXT_CELLS, "good_figure": FIGURE_CELLS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The notebooks, with the project's checks and its pytest options, but for the time a cell may take."""
    folder = tmp_path_factory.mktemp("notebooks")
    options = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"][
        "addopts"
    ]
    options = [re.sub(r"(?<=^--nbval-cell-timeout=).*", str(CELL_TIMEOUT), option) for option in options]
    (folder / "pytest.ini").write_text(
        f"[pytest]\naddopts = {' '.join(options)}\npythonpath = {PROJECT / 'tests'}\n", encoding="utf-8"
    )
    shutil.copy(PROJECT / "notebooks" / "conftest.py", folder)
    with (folder / "conftest.py").open("a", encoding="utf-8") as conftest:
        conftest.write("del pytest_ignore_collect  # these are no lessons, and are run\n")
        conftest.write('UNCHECKED_CELLS["99-listed"] = "prints the time"\n')
    for name, sources in GOOD.items():
        notebook = notebook_of(sources)
        if name == "good_text":
            notebook.cells[RAISES].metadata.tags = ["raises-exception"]
        nbformat.write(notebook, folder / f"{name}.ipynb")
        store(folder / f"{name}.ipynb")
    for good, faults in (("good_text", TEXT_FAULTS), ("good_figure", FIGURE_FAULTS)):
        stored = nbformat.read(folder / f"{good}.ipynb", as_version=4)
        for plant in [fault.plant for fault in faults] + [listed_ignore_tag] * (good == "good_text"):
            notebook = copy.deepcopy(stored)
            plant(notebook.cells)
            nbformat.write(notebook, folder / f"{plant.__name__}.ipynb")
    return folder


@pytest.fixture(scope="module")
def outcomes(folder) -> dict[str, list[str]]:
    """Of each notebook, the failure message of each code cell; "" for one that passed."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", f"--junitxml={report}"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child.get("message", "") + "\n" + (child.text or "") for child in case if child.tag != "properties"]
        found.setdefault(case.get("classname").removesuffix(".ipynb"), []).append("\n".join(bad))
    return found


@pytest.mark.parametrize(("name", "cells"), [("good_text", 3), ("good_figure", 2), ("listed_ignore_tag", 3)])
def test_good_notebook_passes(outcomes, name, cells):
    assert outcomes[name] == [""] * cells


@pytest.mark.parametrize("fault", TEXT_FAULTS + FIGURE_FAULTS, ids=lambda fault: fault.plant.__name__)
def test_fault_is_caught_and_named(outcomes, fault):
    cells = outcomes[fault.plant.__name__]
    assert cells[: fault.cell] == [""] * fault.cell
    message = re.sub(r"(#x1B|\x1b)\[[0-9;]*m", "", cells[fault.cell])
    assert re.search(fault.message, message), message


def test_storing_again_changes_nothing(folder):
    path = folder / "good_figure.ipynb"
    before = path.read_bytes()
    store(path)
    assert path.read_bytes() == before


def test_project_options_run_the_notebooks(pytestconfig):
    options = pytestconfig.getini("addopts")
    assert {"--nbval", "--nbval-current-env", "--nbval-cell-timeout=300"} <= set(options)
    assert "notebooks" in pytestconfig.getini("testpaths")
