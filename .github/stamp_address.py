"""Write the repository's address, which stands in pyproject.toml, into the lessons, the questions and the README.

`python .github/stamp_address.py` after a change of `Repository` under [project.urls], in a fork for instance. Each
notebook gets it twice, in the link to Colab under its title and in the cell that fetches `helpers` there.
"""

import re
import sys
import tomllib
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from lessons import lessons, questions

ROOT = Path(__file__).parents[1]
BRANCH = "main"

# With --no-deps pip cannot replace what Colab has already loaded: a new torch or numpy would need a new session.
FIRST_CELL = """\
# On Colab this fetches the package `helpers`; anywhere else it does nothing.
import importlib.util
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("helpers") is None:
    %pip install -q --no-deps "git+{address}\""""


def read_address(root: Path = ROOT) -> str:
    """The repository's address; ValueError where Colab could not open it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project["urls"]["Repository"]
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address):
        raise ValueError(f"Repository has to read https://github.com/owner/name, for Colab's sake; it is {address!r}")
    return address


def colab_url(address: str, path: str = "") -> str:
    """What opens the notebook at `path`, written from the repository's top, in Colab."""
    return address.replace("https://github.com", "https://colab.research.google.com/github") + f"/blob/{BRANCH}/{path}"


def stamped_notebook(path: Path, address: str, root: Path = ROOT) -> str:
    """The notebook's file with the address in its two places; ValueError where a place is missing."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    link = f"[Open in Colab]({colab_url(address, path.relative_to(root).as_posix())})"
    title = notebook.cells[0]
    title.source, count = re.subn(r"(?m)^\[Open in Colab\]\(\S*\)$", lambda _: link, title.source)
    code = next((cell for cell in notebook.cells if cell.cell_type == "code"), None)
    if count != 1 or code is None or not code.source.startswith(FIRST_CELL.splitlines()[0]):
        raise ValueError(
            f"{path.name} needs a line '[Open in Colab]()' in its first cell, and as its first code cell one that "
            f"begins with {FIRST_CELL.splitlines()[0]!r}"
        )
    code.source = FIRST_CELL.format(address=address)
    return nbformat.writes(notebook) + "\n"


def stamped_readme(path: Path, address: str) -> str:
    text = path.read_text(encoding="utf-8")
    text = re.sub(
        r"https://colab\.research\.google\.com/github/[^/\s]+/[^/\s]+/blob/[^/\s]+/", colab_url(address), text
    )
    text = re.sub(r"git\+https://github\.com/[\w./-]+", f"git+{address}", text)
    text = re.sub(r"url = \{https://github\.com/[\w./-]+\}", f"url = {{{address}}}", text)
    return re.sub(r"git clone \S+ && cd \S+", f"git clone {address} && cd {address.split('/')[-1]}", text)


def stamped_files(root: Path = ROOT) -> dict[Path, str]:
    """Each file that holds the address, as it should read."""
    address = read_address(root)
    paths = [*lessons(root / "notebooks"), *questions(root / "notebooks" / "questions")]
    files = {path: stamped_notebook(path, address, root) for path in paths}
    return {**files, root / "README.md": stamped_readme(root / "README.md", address)}


def write(root: Path = ROOT) -> list[Path]:
    """Stamp the files of the repository at `root`; return those that changed."""
    changed = [(path, text) for path, text in stamped_files(root).items() if text != path.read_text(encoding="utf-8")]
    for path, text in changed:
        path.write_text(text, encoding="utf-8", newline="\n")
    return [path for path, _ in changed]


if __name__ == "__main__":
    for path in write():
        print(path.relative_to(ROOT))
