"""The rooms of `helpers`: what lies where, who may import whom, and that no file outgrows its reader."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import helpers

HELPERS = Path(helpers.__file__).parent
ROOMS = {
    "front": {"front"},
    "tuning": {"front", "tuning"},
    "bases": {"front", "bases"},
    "course": {"front", "tuning", "bases", "course"},
    "build": {"front", "tuning", "bases", "build"},
    "train": {"front", "tuning", "bases", "course", "train"},
}
MODULES = {
    ".".join(path.relative_to(HELPERS.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in HELPERS.rglob("*.py")
    if path.parent.name != ".ipynb_checkpoints"  # JupyterLab's
}
LONGEST = 500


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    if parts[:2] == ["bases", "build"]:
        return "build"
    return parts[0] if parts and parts[0] in ROOMS else "front"


def imported(source: str) -> set[str]:
    """The modules of `helpers` that a source imports, at the top or within a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name.startswith("helpers")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "helpers":
            names = {f"{node.module}.{each.name}" for each in node.names}
            found |= (names & MODULES.keys()) or {node.module}
    return found


def public_home(module: str) -> str:
    """`from helpers import X` counts as importing all of helpers."""
    return "train" if module == "helpers" else room_of(module)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downwards(module):
    for other in imported(MODULES[module].read_text(encoding="utf-8")):
        assert public_home(other) in ROOMS[room_of(module)], f"{module} imports {other}"


def test_an_import_upwards_is_seen():
    (found,) = imported("def f():\n    from helpers.course.figures import heat_map\n")
    assert room_of(found) not in ROOMS["tuning"]
    assert imported("from helpers.tuning import store\nimport torch") == {"helpers.tuning.store"}
    assert public_home(*imported("from helpers import fit")) not in ROOMS["course"]


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES)
def test_no_file_is_longer_than_a_reader_stands(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("name", helpers.__all__)
def test_a_public_name_is_importable_from_helpers_and_lies_in_no_side_room(name):
    home = getattr(helpers, name).__module__
    assert home.startswith("helpers.")
    assert room_of(home) in {"front", "tuning", "bases"}


def test_importing_helpers_is_cheap():
    command = "import helpers, sys; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "matplotlib", "einops"} & set(loaded)


def test_the_front_teaches():
    front = {path.name for path in HELPERS.glob("*.py")}
    assert front == {
        "__init__.py", "_checks.py", "_shapes.py", "heads.py", "masks.py", "attention.py", "prefix.py", "train.py"
    }  # fmt: skip
