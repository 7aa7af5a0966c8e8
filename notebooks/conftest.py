"""What strict nbval lets through, refused.

nbval runs every code cell and compares its text with the stored one. It never compares a cell
that was stored without having run, nor a figure, nor the order of outputs; it accepts an
exception tag on a cell that no longer raises; and it notices a dead kernel only when the cell's
time is up. The hooks below close these holes, and check every shape comment: `query =
split_heads(x, 12) # [1, 12, 8, 64]`.
"""

import ast
import base64
import io
import os
import re
import time
from collections import defaultdict
from pathlib import Path
from queue import Empty

import nbval.plugin
import numpy as np
import pytest
from lessons import lessons, questions
from nbval.kernel import RunningKernel
from PIL import Image

# Kernels start with this environment. The lessons' tensors are too small to share between
# threads, and two notebooks that run side by side with two threads each take many times as
# long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Cells whose output may differ from run to run: cell id -> why. An ignore or skip tag on any
# other is refused.
UNCHECKED_CELLS: dict[str, str] = {}

# With the environment variable ROUNDING_NOISE, kernels compute as another processor might.
ROUNDING_NOISE = Path(__file__).parents[1] / "tests" / "rounding_noise.py"

THUMBNAIL = 16
# The largest difference of a thumbnail's pixel; black to white is 1. Measured on the lessons'
# figures: matplotlib 3.10 against 3.11 at most 0.05, letters hinted otherwise 0.03; other
# data from 0.07 upwards, but for a change in one of many small heat maps, which their
# sentence must tell.
FIGURE_TOLERANCE = 0.06


class WatchedKernel(RunningKernel):
    """nbval's kernel, which also notices its own death and runs a cell as a front end does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if "ROUNDING_NOISE" in os.environ:
            start = (
                f"import runpy; runpy.run_path({str(ROUNDING_NOISE)!r})['enter_if_asked_for']()"
            )
            self.await_idle(self.kc.execute(start, silent=True), timeout=60)

    def execute_cell_input(self, cell_input: str, allow_stdin=None) -> str:
        # With history, as in a front end: without it, IPython ignores a trailing semicolon.
        return self.kc.execute(
            check_shape_comments(cell_input),
            store_history=True,
            allow_stdin=allow_stdin,
            stop_on_error=False,
        )

    def await_reply(self, msg_id: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            try:
                return super().await_reply(
                    msg_id, timeout=min(1.0, max(0.0, end - time.monotonic()))
                )
            except Empty:
                if not self.is_alive():
                    raise RuntimeError("The kernel died while it ran this cell") from None
                if time.monotonic() >= end:
                    raise


nbval.plugin.RunningKernel = WatchedKernel  # nbval has no option for its kernel class


def check_shape_comments(source: str) -> str:
    """The cell with an assertion behind each assignment or return that ends in a shape comment.

    Entries of the comment are Python: numbers, or names and sums of whole numbers that the cell
    can see. The assertion joins the line it checks, so that line numbers stay.
    """
    if not re.search(r"# \[.+\]", source):
        return source
    lines = source.encode().split(b"\n")  # ast counts columns in bytes
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign | ast.Return)
    ]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        line = lines[node.end_lineno - 1]
        comment = re.fullmatch(rb"\s*# (\[.+?\])(?:[,;:. ].*)?", line[node.end_col_offset :])
        if comment is None:
            continue
        names, after = _assigned_names(node), b""
        if isinstance(node, ast.Return):
            names, after = ["_returned"], b"; return _returned"
        shape = comment[1].decode()
        checks = "".join(
            f"; assert list({name}.shape) == {shape}, "
            f"f'{name} has shape {{list({name}.shape)}}, its comment says {{{shape}}}'"
            for name in names
        )
        lines[node.end_lineno - 1] = line[: node.end_col_offset] + checks.encode() + after
        if isinstance(node, ast.Return):
            start = lines[node.lineno - 1]
            lines[node.lineno - 1] = start[: node.col_offset] + start[
                node.col_offset :
            ].replace(b"return", b"_returned =", 1)
    return b"\n".join(lines).decode()


def _assigned_names(node: ast.Assign | ast.Return) -> list[str]:
    if isinstance(node, ast.Return):
        return []
    targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
    return [ast.unparse(target) for target in targets]


def thumbnail(png: str) -> np.ndarray:
    """`[16, 16, 3]` from 0 to 1, each entry the mean colour of its part of the figure."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    return np.asarray(picture.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)) / 255


def figure_difference(stored: str, computed: str) -> float:
    return float(np.abs(thumbnail(stored) - thumbnail(computed)).max())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A reader's own notebooks are not run: theirs to write as they like."""
    if collection_path.suffix == ".ipynb" and collection_path not in {*lessons(), *questions()}:
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not isinstance(item, nbval.plugin.IPyNbCell):
        return (yield)
    item.user_properties.append(("cell", item.cell.get("id")))
    _refuse_stored_cell(item)
    result = yield
    _compare_run(item)
    return result


def _refuse_stored_cell(item) -> None:
    cell = item.cell
    if cell.execution_count is None:
        item.raise_cell_error(
            "The stored cell was never run: store it with tests/store_notebooks.py"
        )
    if any(output.get("name") == "stderr" for output in cell.outputs):
        item.raise_cell_error("The stored cell wrote to stderr")
    unchecked = item.options["skip"] or not item.options["check"]
    if unchecked and cell.get("id") not in UNCHECKED_CELLS:
        item.raise_cell_error(
            "The cell is tagged as unchecked but is not listed in UNCHECKED_CELLS"
        )


def _compare_run(item) -> None:
    stored, computed = item.cell.outputs, item.test_outputs
    if item.options["check_exception"] and all(
        output.output_type != "error" for output in computed
    ):
        item.raise_cell_error("The cell is tagged raises-exception but no longer raises")
    if not item.options["check"]:
        return
    kinds = [
        [_kind(o) for o in nbval.plugin.coalesce_streams(outputs)]
        for outputs in (stored, computed)
    ]
    if kinds[0] != kinds[1]:
        item.raise_cell_error(
            f"The stored outputs are {kinds[0]}, the computed ones {kinds[1]}"
        )
    figures = [
        [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
        for outputs in (stored, computed)
    ]
    for number, pair in enumerate(zip(*figures, strict=True)):
        try:
            difference = figure_difference(*pair)
        except (OSError, ValueError) as error:
            item.raise_cell_error(f"Figure {number} of the cell is not a picture: {error}")
        if difference > FIGURE_TOLERANCE:
            item.raise_cell_error(
                f"Figure {number} of the cell differs from the stored one by {difference:.3f}, "
                f"more than {FIGURE_TOLERANCE}"
            )


def _kind(output) -> str:
    """The kind of an output, which nbval does not compare: "figure", "stdout" and others."""
    if "image/png" in output.get("data", {}):
        return "figure"
    return output.get("name", output.output_type)


def pytest_terminal_summary(terminalreporter) -> None:
    """The failing cells by their ids: numbers move with every cell that is added."""
    failed = defaultdict(list)
    for report in terminalreporter.stats.get("failed", []):
        cell = dict(report.user_properties).get("cell")
        if cell:
            failed[report.nodeid.split("::")[0]].append(cell)
    if failed:
        terminalreporter.section("cells that failed")
        for notebook, cells in failed.items():
            terminalreporter.write_line(f"{notebook}: {' '.join(cells)}")
