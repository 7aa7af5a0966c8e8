"""The house: what is promised outside the code agrees with the code."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from lessons import lessons
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rattler import MatchSpec

import helpers

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def declared() -> list[Requirement]:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    every = [Requirement(text) for each in lists for text in each]
    return [requirement for requirement in every if requirement.name != PROJECT["name"]]


def pins(path: str) -> dict[str, str]:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_top_level_holds_what_the_layout_allows():
    allowed = {"notebooks", "helpers", "environment.yml", "README.md", "tests", "LICENSE", "pyproject.toml"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {path.split("/")[0] for path in tracked.splitlines()}
    assert {name for name in top if not name.startswith(".")} == allowed


def test_environment_yml_refers_to_the_extras_and_its_specs_are_valid():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *specs, pip = environment["dependencies"]
    names = [MatchSpec(spec, strict=True).name.normalized for spec in specs]
    assert names == ["python", "pip"]
    assert pip == {"pip": ["-e .[lab]"]}
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert "lab" in PROJECT["optional-dependencies"]
    python = next(spec for spec in specs if spec.startswith("python"))
    assert python.removeprefix("python ") == PROJECT["requires-python"]


def test_the_first_and_the_last_python_are_the_same_everywhere():
    first, last = re.search(r"You need Python (\d\.\d+) to (\d\.\d+)", README).groups()
    admitted = SpecifierSet(PROJECT["requires-python"])
    minors = [f"3.{minor}" for minor in range(30) if admitted.contains(f"3.{minor}.0")]
    assert (minors[0], minors[-1]) == (first, last)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["systems"]["strategy"]["matrix"]["python-version"] == [first, last]


def test_constraints_pin_every_dependency_and_satisfy_the_bounds():
    pinned = pins(".ci/constraints.txt")
    assert pinned["torch"] == "2.13.0"
    for requirement in declared():
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_the_oldest_versions_are_the_lower_bounds():
    bounds = {requirement.name: requirement.specifier for requirement in declared()}
    for name, version in pins(".ci/oldest.txt").items():
        (bound,) = bounds[name]
        assert bound.operator == ">="
        assert Version(bound.version) == Version(version), name


def test_the_distribution_is_not_called_helpers():
    assert PROJECT["name"] != "helpers"
    assert any(text.startswith("torch") for text in requires(PROJECT["name"]))


def test_continuous_integration_runs_the_readmes_test_command():
    commands = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    to_read, to_test = commands
    lesson = to_read.split("jupyter lab ")[1]
    assert ROOT / lesson == lessons()[0], "the command opens lesson 1"
    assert to_test.endswith("-m pytest -n 2 --dist loadfile")
    run = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert to_test in run.splitlines()


def test_links_in_the_readme_lead_somewhere():
    pictures = re.findall(r'src="([^"]+)"', README)
    assert not [each for each in pictures if each.startswith(".")], "JupyterLab shows nothing out of hidden folders"
    targets = [*re.findall(r"\]\(([^)]+)\)", README), *re.findall(r'href="([^"]+)"', README), *pictures]
    assert len(targets) > 5
    for target in targets:
        if target.startswith("https://colab.research.google.com/"):
            prefix = (
                f"https://colab.research.google.com/github/{REPOSITORY.removeprefix('https://github.com/')}/blob/main/"
            )
            assert target.startswith(prefix), target
            assert (ROOT / target.removeprefix(prefix)).is_file(), target
        elif not target.startswith("https://"):
            assert (ROOT / target.split("#")[0]).exists(), target


def test_the_citation_agrees_with_pyproject_and_the_licence():
    fields = dict(re.findall(r"(\w+) = \{+([^{}]+)\}+", re.search(r"```bibtex\n(.*?)```", README, flags=re.DOTALL)[1]))
    assert fields["version"] == PROJECT["version"]
    assert fields["url"] == REPOSITORY
    assert fields["title"] == README.splitlines()[0].removeprefix("# ")
    year, holder = re.search(r"Copyright \(c\) (\d+) (.+)", (ROOT / "LICENSE").read_text(encoding="utf-8")).groups()
    assert (fields["year"], fields["author"]) == (year, holder)


def test_the_commands_for_contributors_name_files_that_exist():
    section = README.split("## Contribute")[1].split("\n## ")[0]
    scripts = re.findall(r"python (\S+\.py)", section)
    assert len(scripts) >= 4
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_readmes_ten_lines_do_what_they_promise(tmp_path):
    code, for_other_models = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    imported, *calls = ast.parse(for_other_models).body  # they need the hub
    assert {name.name for name in imported.names} <= set(helpers.__all__)
    assert len(calls) == 4
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith("#")]
    assert 5 <= len(lines) <= 14
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # faster for a model this small
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=one_thread, capture_output=True, text=True, check=False
    )
    steps = "".join(f" {step}" for step in range(15, 151, 15))
    assert result.stdout == f"150 steps:{steps}\n['Freitag, 17. Mai 2030']\n", result.stderr
    assert (tmp_path / "german-prefix").is_dir()


def test_text_files_are_utf_8_on_every_system():
    """Without `encoding`, Windows reads and writes what is not ASCII otherwise."""
    folders = ("helpers", "tests", "notebooks", ".github", ".site")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("[!.]*.py"))]
    seen = 0
    for path in paths:
        if ".ipynb_checkpoints" in path.parts:
            continue
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith((".read_text", ".write_text")):
                seen += 1
                options = {keyword.arg for keyword in call.keywords}
                assert "encoding" in options, f"{path.name}, line {call.lineno}: {ast.unparse(call)}"
    assert seen > 50


def test_every_public_name_can_be_imported_and_is_documented():
    for name in helpers.__all__:
        assert getattr(helpers, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'; it has LeanT5, ModelWithPrefix"):
        _ = helpers.nothing
    assert dir(helpers) == helpers.__all__


def test_import_is_cheap():
    code = """
import sys
from helpers import MultiHeadAttention, PrefixEncoder, causal_mask, join_prefix, split_heads
print({"transformers", "matplotlib", "peft", "IPython"} & set(sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_helpers_work_without_jaxtyping():
    code = """
import sys
sys.modules["jaxtyping"] = None  # importing it fails
import torch, helpers
print(helpers.split_heads(torch.zeros(1, 8, 12), 3).shape)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "torch.Size([1, 3, 8, 4])\n"
