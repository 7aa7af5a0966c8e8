"""What pip builds and installs: the sdist, the wheel made from it, and the wheel in a venv away from the project.

The venv borrows the dependencies that are installed here, so that torch is not fetched once more, and the wheel is
then used with everything hidden that it does not ask for. That an index holds what it asks for is left to
.github/workflows/tests.yml, which installs the wheel in an empty venv.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import Distribution, PackageNotFoundError, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from helpers import load_base, load_task
from helpers.tuning.training import generate_texts

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LICENCES = ["LICENSE", "helpers/bases/dates/LICENSE-UNICODE", "helpers/bases/wordnet/LICENSE-WORDNET"]
OPTIONAL = {"IPython", "PIL", "accelerate", "matplotlib"}  # what a module of helpers may lack: the extras' business

USE = """
import json, pkgutil, socket, sys
from importlib import import_module

for name in json.loads(sys.argv[1]):
    sys.modules[name] = None  # importing it fails

def refuse(*_):
    raise OSError("a bundled base asked for the network")

socket.socket.connect = refuse

import helpers
for name in ("MultiHeadAttention", "PrefixEncoder", "causal_mask", "join_prefix", "split_heads"):
    getattr(helpers, name)
heavy = sorted({"transformers", "matplotlib", "peft", "IPython"} & {name for name, m in sys.modules.items() if m})

from helpers import T5Prefix, load_base, load_task, task_names
from helpers.tuning.training import generate_texts

texts = {}
for base, task in (("dates", "german"), ("wordnet", "card")):
    model, tokenizer = load_base(base)
    sources = [source for source, _ in load_task(task).test[:2]]
    texts[base] = generate_texts(model, tokenizer, sources)
    with T5Prefix.for_model(model, prefix_length=3).attached(model):
        generate_texts(model, tokenizer, sources)

missing = {}
for module in pkgutil.walk_packages(helpers.__path__, "helpers."):
    if module.name.startswith("helpers.bases.build."):  # what made the bases needs more, and no reader runs it
        continue
    try:
        import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
public = [name for name in helpers.__all__ if getattr(helpers, name) is not None]
print(json.dumps({"file": helpers.__file__, "heavy": heavy, "texts": texts, "missing": missing, "public": public}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def build(folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def used(built, tmp_path_factory) -> dict:
    """What `USE` reports from a venv that holds the wheel and sees its dependencies."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    where = {name: str(folder) for name in ("base", "platbase", "installed_base", "installed_platbase")}
    python = Path(sysconfig.get_path("scripts", "venv", where)) / Path(sys.executable).name
    site_packages = Path(sysconfig.get_path("purelib", "venv", where))
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", built[1]], check=True, capture_output=True)

    needed = closure(PROJECT["dependencies"])
    borrowed = {str(Distribution.from_name(name).locate_file("")) for name in needed}
    # A folder named in a .pth file is searched, but its own .pth files are not read: no editable install gets in.
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)), encoding="utf-8")
    hidden = [
        name
        for name, distributions in packages_distributions().items()
        if not {canonicalize_name(each) for each in distributions} & {*needed, PROJECT["name"]}
    ]
    # -I: neither the current folder nor PYTHONPATH is searched.
    result = subprocess.run(
        [python, "-I", "-c", USE, json.dumps(hidden)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return {**json.loads(result.stdout.splitlines()[-1]), "site_packages": site_packages, "hidden": hidden}


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the installed distributions that satisfy the requirements, their own requirements included."""
    found, waiting = set(), [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if (name, "") in found and not requirement.extras - {each for known, each in found if known == name}:
            continue
        try:
            distribution = Distribution.from_name(name)
        except PackageNotFoundError:
            continue  # wanted by another extra, or not on this platform
        for each in ("", *requirement.extras):
            found.add((name, each))
            waiting += [(Requirement(text), each) for text in distribution.requires or []]
    return {name for name, _ in found}


def tracked(*folders: str) -> list[str]:
    command = ["git", "ls-files", "-z", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def digests(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_the_wheel_holds_every_file_of_helpers_unchanged(built):
    held = digests(built[1])
    package = {name for name in held if ".dist-info/" not in name}
    assert package >= set(tracked("helpers"))
    assert all(name.startswith("helpers/") for name in package)
    assert not [name for name in package if "__pycache__" in name]
    for name in package:
        assert held[name] == hashlib.sha256((ROOT / name).read_bytes()).hexdigest(), name


def test_the_wheel_names_its_licences_and_holds_their_texts(built):
    with zipfile.ZipFile(built[1]) as archive:
        (metadata_name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(metadata_name))
        assert sorted(metadata.get_all("License-File")) == sorted(LICENCES)
        assert metadata["License-Expression"] == PROJECT["license"]
        for path in LICENCES:
            text = archive.read(metadata_name.replace("METADATA", f"licenses/{path}")).decode()
            assert text == (ROOT / path).read_text(encoding="utf-8")
        assert "Copyright" in text


def test_the_wheel_asks_for_what_pyproject_declares(built):
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    asked = {str(Requirement(text)) for text in metadata.get_all("Requires-Dist") if "extra ==" not in text}
    assert asked == {str(Requirement(text)) for text in PROJECT["dependencies"]}
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(PROJECT["requires-python"])


def test_the_sdist_holds_every_tracked_file(built):
    with tarfile.open(built[0]) as archive:
        members = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    top = {path.split("/")[0] for path in members}
    assert top <= {path.split("/")[0] for path in tracked()} | {"PKG-INFO"}
    assert set(members) >= set(tracked())
    assert not [path for path in members if "__pycache__" in path or ".ipynb_checkpoints" in path]


def test_the_wheel_is_the_same_without_the_sdist(built, tmp_path):
    build(tmp_path, "--wheel")
    (direct,) = tmp_path.glob("*.whl")
    assert digests(direct) == digests(built[1])


def test_the_installed_wheel_works_with_its_dependencies_alone(used):
    assert Path(used["file"]).is_relative_to(used["site_packages"])
    assert {"matplotlib", "jaxtyping", "pytest", "peft"} <= set(used["hidden"])
    assert set(used["missing"].values()) <= OPTIONAL, used["missing"]
    assert len(used["public"]) > 10


def test_the_installed_wheel_loads_both_bases_and_generates(used):
    for base, task in (("dates", "german"), ("wordnet", "card")):
        model, tokenizer = load_base(base)
        sources = [source for source, _ in load_task(task).test[:2]]
        texts = generate_texts(model, tokenizer, sources)
        assert all(texts)
        assert used["texts"][base] == texts


def test_the_installed_wheel_is_light_until_a_t5_is_wanted(used):
    assert used["heavy"] == []
