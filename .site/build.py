"""Build the course's web page: `python .site/build.py [folder]`, by default into .site/build.

The README is its first page. Lessons are shown with their stored outputs; nothing is run and nothing is fetched.
"""

import posixpath
import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import nbformat
from sphinx.cmd.build import build_main

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from lessons import lessons, questions

SITE = Path(__file__).parent
ROOT = SITE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BLOB = f"{PROJECT['urls']['Repository']}/blob/main"
PICTURES = ("notebooks/pictures/readme_picture.png", "notebooks/pictures/cost_by_prefix_length.png")  # of the README
FIRST = "index.md"
NOTATION, QUESTIONS = "notebooks/notation.md", "notebooks/questions/README.md"


def lay_out(source: Path) -> None:
    """Put what Sphinx is to read into one folder, in the repository's own order but for the README."""
    course, books = ([path.relative_to(ROOT).as_posix() for path in each] for each in (lessons(), questions()))
    names = course + books
    pages = {"README.md": FIRST} | {name: name for name in (NOTATION, QUESTIONS, *names)}
    for name in (*PICTURES, *pages):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        shutil.copy(ROOT / name, source / name)
    for name in names:
        notebook = nbformat.read(ROOT / name, as_version=nbformat.NO_CONVERT)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = mend_links(cell.source, name, pages)
        nbformat.write(notebook, source / name)
    for name in ("README.md", NOTATION, QUESTIONS):
        text = mend_links((ROOT / name).read_text(encoding="utf-8"), name, pages)
        (source / pages[name]).write_text(text, encoding="utf-8")
    with (source / FIRST).open("a", encoding="utf-8") as file:
        for caption, contents in {"Lessons": [*course, NOTATION], "Questions": [QUESTIONS, *books]}.items():
            order = "\n".join(contents)
            file.write(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{order}\n```\n")


def mend_links(text: str, name: str, pages: dict[str, str]) -> str:
    """The text of the file called `name`: links to what has no page here lead to the repository."""
    folder = posixpath.dirname(name)

    def mend(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if target in pages:
            return f"]({posixpath.relpath(pages[target], folder or '.')}{link[2]})"
        return f"]({BLOB}/{target}{link[2]})" if (ROOT / target).exists() else link[0]

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*|)\)", mend, text)


def build(folder: Path) -> int:
    """Sphinx's exit status; a warning counts as a failure."""
    with tempfile.TemporaryDirectory() as source:
        lay_out(Path(source))
        return build_main(["-q", "-W", "--keep-going", "-n", "-E", "-a", "-c", str(SITE), source, str(folder)])


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else SITE / "build"))
