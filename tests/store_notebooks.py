"""Run notebooks and store them with their outputs: `python tests/store_notebooks.py [notebook ...]`.

Without arguments, all of them. The kernel is this Python, as in the tests; what differs from machine to machine, or
from one front end to the next, is not stored.
"""

import re
import sys
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CELL_TIMEOUT = 300
# The whole of a stored notebook's metadata: no version of Python, no state of a front end.
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}


def store(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    manager = AsyncKernelManager(kernel_name=CURRENT_ENV_KERNEL_NAME, kernel_spec_manager=NbvalKernelspecManager())
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_TIMEOUT,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    normalise(notebook)
    nbformat.write(notebook, path)


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Leave only what the lesson's text, its cells and their outputs say. In place; cell ids and tags stay."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in ("tags",) if cell.metadata.get(key)})
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                # The rest of a traceback names this machine's folders.
                output.traceback = [f"\x1b[31m{output.ename}\x1b[39m: {output.evalue}"]
    nbformat.validate(notebook)


def notebooks() -> list[Path]:
    return sorted(path for path in NOTEBOOKS.glob("*.ipynb") if re.match(r"\d", path.name))


if __name__ == "__main__":
    chosen = [Path(name) for name in sys.argv[1:]] or notebooks()
    for notebook in chosen:
        print(notebook)
        store(notebook)
