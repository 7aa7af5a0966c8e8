"""A day's normal use breaks no test: lessons opened and saved, a reader's own notebooks and results beside them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from lessons import ROOT, git_lines, lessons, questions
from nbformat import v4
from store_notebooks import text_of

LESSONS = [path.name for path in lessons()]
OPENED, CHANGED = LESSONS[0], LESSONS[1]
OWN_NOTEBOOKS = [
    "notebooks/Untitled.ipynb",
    "notebooks/my notes.ipynb",
    "notebooks/01_copy.ipynb",
    f"notebooks/{LESSONS[1].removesuffix('.ipynb')}-Copy1.ipynb",
    "Untitled.ipynb",
    "tests/Untitled1.ipynb",
    f"notebooks/.ipynb_checkpoints/{OPENED.removesuffix('.ipynb')}-checkpoint.ipynb",
]
# Tests that go through the project's files or its notebooks. Left out is what takes long and reads no folder.
TESTS = ["colab", "course", "exercises", "house", "notation", "notebooks", "package", "site", "store", "wheel"]
LEFT_OUT = "not ten_lines and not installed_wheel and not in_the_copy"


@pytest.fixture(scope="module")
def used(tmp_path_factory) -> Path:
    """A copy of the project, as it is at the end of such a day."""
    folder = tmp_path_factory.mktemp("day") / "course"
    for name in git_lines("ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT):
        if (ROOT / name).is_file() and (not name.endswith(".ipynb") or ROOT / name in {*lessons(), *questions()}):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name in LESSONS:
        (folder / "notebooks" / name).write_text(text_of(ROOT / "notebooks" / name), encoding="utf-8", newline="\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "the course")

    as_jupyterlab_saves(folder / "notebooks" / OPENED)
    scratch = nbformat.writes(v4.new_notebook(cells=[v4.new_code_cell("1 / 0")]))
    for name in OWN_NOTEBOOKS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(scratch, encoding="utf-8")
    for name in (
        "notebooks/figure.png",
        "notebooks/german-prefix/prefix.safetensors",
        "notebooks/german-prefix/config.json",
        "notebooks/__pycache__/conftest.cpython-311.pyc",
        "german-prefix/prefix.safetensors",
        "german/checkpoint-20/optimizer.pt",
        "german.jsonl",
        ".ipynb_checkpoints/README-checkpoint.md",
        "helpers/.ipynb_checkpoints/base-checkpoint.py",
        ".virtual_documents/notebooks/01_single_head_attention.ipynb",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\x89PNG \xff\x00")
    return folder


def git(folder: Path, *command: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.autocrlf=false"]
    return subprocess.run(
        ["git", *names, *command], cwd=folder, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout


def as_jupyterlab_saves(path: Path) -> None:
    """What JupyterLab 4.6 makes of a lesson that was opened; test_lab.py holds this to the real one."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    notebook.metadata.language_info.update(
        codemirror_mode={"name": "ipython", "version": 3}, nbconvert_exporter="python", version="3.13.1"
    )
    nbformat.write(notebook, path)


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    options = ["--color=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def test_what_goes_through_the_files_passes_in_the_copy(used):
    paths = [f"tests/test_{name}.py" for name in TESTS]
    ran = pytest_in(used, "-q", "-m", "not browser", "-k", LEFT_OUT, *paths)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    assert "passed" in ran.stdout


def test_a_readers_own_notebooks_are_not_run_in_the_copy(used):
    listed = pytest_in(used, "--collect-only", "-q", "--ignore-glob=**/test_*.py").stdout
    collected = {line.split("::")[0] for line in listed.splitlines() if ".ipynb::" in line}
    assert collected == {path.relative_to(ROOT).as_posix() for path in (*lessons(), *questions())}


def test_a_new_lesson_counts_before_its_first_commit_in_the_copy(used):
    path = used / "notebooks" / "42_one_more_head.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell("1 + 1")]), path)
    try:
        assert path in lessons(used / "notebooks")
        listed = pytest_in(used, "--collect-only", "-q", "notebooks").stdout
    finally:
        path.unlink()
    assert f"notebooks/{path.name}::" in listed


def test_a_changed_lesson_is_named_with_what_undoes_it_in_the_copy(used):
    path = used / "notebooks" / CHANGED
    before = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(before, as_version=nbformat.NO_CONVERT)
    next(cell for cell in notebook.cells if cell.cell_type == "code").execution_count = 77
    nbformat.write(notebook, path)
    ran = pytest_in(used, "-q", "tests/test_notebooks.py")
    assert ran.returncode == 1, ran.stdout
    assert f"`git checkout notebooks/{CHANGED}` gives them back as they were" in ran.stdout
    assert OPENED not in ran.stdout.splitlines()[-3:]
    git(used, "checkout", f"notebooks/{CHANGED}")
    assert path.read_text(encoding="utf-8") == before


def test_a_lesson_that_was_only_opened_is_no_changed_one(used):
    path = used / "notebooks" / OPENED
    assert path.read_text(encoding="utf-8") != text_of(path)
    assert git(used, "show", f"HEAD:notebooks/{OPENED}") == text_of(path)
