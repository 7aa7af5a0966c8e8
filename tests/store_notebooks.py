"""Run notebooks and store them with their outputs: `python tests/store_notebooks.py [notebook ...]`.

Without names, all of them. The kernel is this Python, as in the tests; what differs from machine to machine, or
from one front end to the next, is not stored. With `--no-run` the outputs stay: it undoes what JupyterLab adds when it
saves. With `--check` nothing is written: it names the notebooks that this would change, and fails if there are any.
"""

import argparse
import sys
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from lessons import held_by_git, lessons
from nbclient import NotebookClient
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager

CELL_TIMEOUT = 300
# The whole of a stored notebook's metadata: no version of Python, no state of a front end.
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",  # what `jupyter nbconvert --to script` goes by
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


def normalised(text: str) -> str:
    """A notebook's file as it is to be stored, with the outputs it has."""
    notebook = nbformat.reads(text, as_version=4)
    normalise(notebook)
    return nbformat.writes(notebook) + "\n"


def text_of(path: Path) -> str:
    """The notebook's file; what git holds of it, where the two differ in what JupyterLab adds and in nothing else.

    JupyterLab writes this Python's version into every notebook that it has open, and saves by itself after two
    minutes: a lesson that was read is not a changed lesson.
    """
    text = path.read_text(encoding="utf-8")
    held = held_by_git(path)
    return held if held is not None and normalised(text) == held else text


def changed() -> list[Path]:
    """Lessons that are other than git holds them, beyond what JupyterLab adds."""
    return [path for path in lessons() if held_by_git(path) not in (None, text_of(path))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the lessons and store them with their outputs.")
    parser.add_argument("notebook", nargs="*", type=Path, help="without any, all of them")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--no-run", action="store_true", help="only undo what a front end adds on saving")
    instead.add_argument("--check", action="store_true", help="only name what --no-run would change")
    options = parser.parse_args(arguments)
    unlike = []
    for path in options.notebook or lessons():
        if not options.no_run and not options.check:
            print(path)
            store(path)
        elif (text := normalised(before := path.read_text(encoding="utf-8"))) != before:
            unlike.append(path)
            print(path)
            if options.no_run:
                path.write_text(text, encoding="utf-8", newline="\n")
    return 1 if options.check and unlike else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
