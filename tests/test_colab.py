"""Colab: its versions are admitted, the lessons' first cell leaves them alone, and the address stands in one place."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import nbformat
import pytest
from lessons import lessons, questions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"]["Repository"]
LESSONS = lessons()
BOOKS = [*LESSONS, *questions()]
stamp = runpy.run_path(str(ROOT / ".github" / "stamp_address.py"))

COLAB = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "tests/colab_versions.txt").read_text(encoding="utf-8")))
COLABS_PYTHON = "3.13.0"
# What else Colab has: imported name -> the package of its list that requires it.
BROUGHT = {"safetensors": "transformers", "huggingface_hub": "transformers", "PIL": "matplotlib"}
# What it may lack: jaxtyping is left out where it is missing; lesson 6 says how to install peft.
OPTIONAL = {"jaxtyping", "peft"}
INDIRECT = {"numpy", "ipython"}  # what the lessons use and pyproject.toml leaves to torch and to ipykernel

# Runs a cell three times, with and without Colab's module and `helpers`, and records what it asks of pip.
REHEARSE = """
import json, sys, types
from IPython.core.interactiveshell import InteractiveShell

calls = []
shell = InteractiveShell.instance()
shell.register_magic_function(calls.append, magic_name="pip")

def rehearse(colab, installed):
    for name, present in (("google.colab", colab), ("helpers", installed)):
        sys.modules.pop(name, None)
        if present:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = types.SimpleNamespace(name=name)
        elif name == "helpers":
            sys.modules[name] = None  # importing it fails
    calls.clear()
    before = set(sys.modules)
    result = shell.run_cell(sys.argv[1])
    result.raise_error()
    return {"pip": list(calls), "result": repr(result.result), "imported": sorted(set(sys.modules) - before)}

print(json.dumps([rehearse(True, False), rehearse(True, True), rehearse(False, False)]))
"""


@pytest.fixture(scope="module")
def rehearsals() -> dict[str, dict]:
    cell = stamp["FIRST_CELL"].format(address=ADDRESS)
    result = subprocess.run([sys.executable, "-c", REHEARSE, cell], capture_output=True, text=True, check=True)
    return dict(zip(("fresh", "again", "elsewhere"), json.loads(result.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", COLAB)
def test_colabs_versions_are_admitted(name):
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    requirements = [Requirement(text) for each in lists for text in each]
    bounds = [each.specifier for each in requirements if canonicalize_name(each.name) == name]
    assert bool(bounds) != (name in INDIRECT), name
    for bound in bounds:
        assert bound.contains(COLAB[name]), f"Colab would have to reinstall {name}"


def test_colabs_python_is_admitted():
    assert Requirement(f"course{PROJECT['requires-python']}").specifier.contains(Version(COLABS_PYTHON))


def imported(source: str) -> set[str]:
    """The first part of each module's name that is imported anywhere in the source."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_colab_has_what_helpers_and_the_lessons_import():
    left_out = {"build", ".ipynb_checkpoints"}  # what made the bases, and what JupyterLab leaves
    used = (path for path in (ROOT / "helpers").rglob("*.py") if path.parent.name not in left_out)
    names = set().union(*(imported(path.read_text(encoding="utf-8")) for path in used))
    for path in LESSONS:
        _, *cells = [cell for cell in nbformat.read(path, nbformat.NO_CONVERT).cells if cell.cell_type == "code"]
        names |= set().union(*(imported(cell.source) for cell in cells))
    wanted = names - sys.stdlib_module_names - {"helpers"} - OPTIONAL
    assert {"torch", "einops", "transformers", "IPython"} <= wanted
    assert {name for name in wanted if name.lower() not in COLAB} == set(BROUGHT)
    for name, bringer in BROUGHT.items():
        distribution = {"PIL": "pillow"}.get(name, canonicalize_name(name))
        assert distribution in {canonicalize_name(Requirement(each).name) for each in requires(bringer)}


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_lesson_starts_with_the_same_cell_and_a_link_to_itself(path):
    cells = nbformat.read(path, as_version=nbformat.NO_CONVERT).cells
    address = stamp["colab_url"](ADDRESS, path.relative_to(ROOT).as_posix())
    assert cells[0].source.splitlines()[2] == f"[Open in Colab]({address})"
    first = next(cell for cell in cells if cell.cell_type == "code")
    assert cells.index(first) == 1
    assert first.source == stamp["FIRST_CELL"].format(address=ADDRESS)
    assert first.outputs == []


def test_on_colab_the_first_cell_installs_helpers_and_nothing_else(rehearsals):
    (call,) = rehearsals["fresh"]["pip"]
    options = [word for word in call.split() if word.startswith("-")]
    wanted = [word.strip('"') for word in call.split()[1:] if not word.startswith("-")]
    assert call.split()[0] == "install"
    assert set(options) == {"-q", "--no-deps"}, "without --no-deps pip may replace what Colab has loaded"
    assert wanted == [f"git+{ADDRESS}"]


def test_on_colab_the_first_cell_does_nothing_the_second_time(rehearsals):
    assert rehearsals["again"]["pip"] == []


def test_elsewhere_the_first_cell_does_nothing(rehearsals):
    assert rehearsals["elsewhere"] == {"pip": [], "result": "None", "imported": []}


def test_the_address_stands_where_pyproject_says():
    for path, text in stamp["stamped_files"](ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run .github/stamp_address.py"


def test_a_fork_changes_one_line_and_stamps(tmp_path):
    (tmp_path / "notebooks" / "questions").mkdir(parents=True)
    for path in (ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "notebooks" / "notation.md", *BOOKS):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    fork = ADDRESS.rsplit("/", 2)[0] + "/somebody/attention-lessons"
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(pyproject.read_text(encoding="utf-8").replace(ADDRESS, fork), encoding="utf-8")
    assert len(stamp["write"](tmp_path)) == len(BOOKS) + 1
    assert stamp["write"](tmp_path) == []
    owner_and_name = ADDRESS.removeprefix("https://github.com/")
    for path in (tmp_path / "README.md", *(tmp_path / "notebooks").rglob("*.*")):
        assert owner_and_name not in path.read_text(encoding="utf-8"), path.name
    assert "git clone https://github.com/somebody/attention-lessons && cd attention-lessons" in (
        tmp_path / "README.md"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize("address", ["https://gitlab.com/somebody/course", "git@github.com:somebody/course", ""])
def test_an_address_that_colab_cannot_open_is_refused(tmp_path, address):
    (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nRepository = "{address}"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"has to read https://github.com/owner/name"):
        stamp["read_address"](tmp_path)


def test_a_lesson_without_its_places_is_named(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# One head")])
    nbformat.write(notebook, tmp_path / "09_more.ipynb")
    with pytest.raises(ValueError, match=r"09_more.ipynb needs a line '\[Open in Colab\]\(\)'"):
        stamp["stamped_notebook"](tmp_path / "09_more.ipynb", ADDRESS, tmp_path)
