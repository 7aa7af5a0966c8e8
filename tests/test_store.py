"""The editor's side: what JupyterLab adds on saving is undone byte for byte, and changes of notebooks can be read."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import nbformat
import pytest
from lessons import lessons
from store_notebooks import main, normalised, text_of

ROOT = Path(__file__).parents[1]
LESSON = lessons()[0]


@pytest.mark.parametrize("path", lessons(), ids=lambda path: path.stem)
def test_lessons_are_stored_normalised(path):
    assert normalised(text_of(path)) == text_of(path), "run tests/store_notebooks.py --no-run"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """The folder of what `jupyter nbconvert --to script` makes of the lessons."""
    folder = tmp_path_factory.mktemp("scripts")
    command = [sys.executable, "-m", "nbconvert", "--to", "script", "--output-dir", folder, *lessons()]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("path", lessons(), ids=lambda path: path.stem)
def test_a_lesson_becomes_a_script(path, scripts):
    """Python, with every code cell."""
    text = (scripts / path.with_suffix(".py").name).read_text(encoding="utf-8")
    ast.parse(text)
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert len(re.findall(r"^# In\[.*\]:$", text, flags=re.MULTILINE)) == len(cells) > 10
    assert all(cell.source.splitlines()[-1] in text for cell in cells if "%pip" not in cell.source)


def saved_by_a_front_end(folder: Path) -> Path:
    """The first lesson as JupyterLab might leave it: with its own state, another kernel's name and an older format."""
    notebook = nbformat.reads(text_of(LESSON), as_version=4)
    notebook.metadata.kernelspec.display_name = ".venv"
    notebook.metadata.language_info.version = "3.12.1"
    notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    notebook.metadata.toc = {"base_numbering": 1}
    for number, cell in enumerate(notebook.cells):
        cell.metadata.update(
            collapsed=True, editable=True, slideshow={"slide_type": ""}, tags=cell.metadata.get("tags", [])
        )
        if cell.cell_type == "code":
            cell.metadata.execution = {"iopub.execute_input": f"2026-01-01T00:00:{number % 60:02}Z"}
    path = folder / LESSON.name
    nbformat.write(notebook, path)
    return path


def test_what_a_front_end_adds_is_named_and_undone(tmp_path, capsys):
    path = saved_by_a_front_end(tmp_path)
    before = path.read_text(encoding="utf-8")
    assert main(["--check", str(path)]) == 1
    assert path.read_text(encoding="utf-8") == before
    assert main(["--no-run", str(path)]) == 0
    assert path.read_bytes() == text_of(LESSON).encode()
    assert main(["--check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(path)] * 2


def test_git_shows_a_notebooks_change_by_cell(tmp_path):
    """With nbdime, as the README sets it up: the changed line, and no picture spelt out."""
    path_of_venv = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])

    def run(*command: str) -> str:
        environment = {**os.environ, "PATH": path_of_venv, "HOME": str(tmp_path), "GIT_PAGER": "cat"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, encoding="utf-8", check=True
        ).stdout

    git = partial(run, "git", "-c", "user.name=a", "-c", "user.email=a@example.org")

    git("init", "-q")
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    path = tmp_path / LESSON.name
    shutil.copy(LESSON, path)
    git("add", ".")
    git("commit", "-qm", "before")
    notebook = nbformat.read(path, as_version=4)
    pictures = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    pictures[0]["image/png"] = pictures[1]["image/png"]
    notebook.cells[-1].source += "\n\nAnother line."
    nbformat.write(notebook, path)
    assert len(git("diff")) > 10_000
    run("nbdime", "config-git", "--enable")
    shown = git("diff")
    assert "Another line." in shown
    assert len(shown) < 5_000
    outside = {
        **os.environ,
        "HOME": str(tmp_path),
        "GIT_PAGER": "cat",
        "PATH": path_without(sysconfig.get_path("scripts")),
    }
    failed = subprocess.run(["git", "diff"], cwd=tmp_path, env=outside, capture_output=True, check=False)
    assert failed.returncode != 0, "the README says that git diff fails without the venv"
    run("nbdime", "config-git", "--disable")
    subprocess.run(["git", "diff"], cwd=tmp_path, env=outside, capture_output=True, check=True)


def path_without(folder: str) -> str:
    return os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != Path(folder))
