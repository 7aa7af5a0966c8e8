"""Which notebooks are the course's: the tests, the web page and the stamping of addresses go through these.

A reader's own notebooks may lie beside them: copies, notes, `Untitled.ipynb`. They are nobody's business here.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
LESSON_NAME = r"\d\d(_[a-z0-9]+)+\.ipynb"
QUESTION_NAME = r"(\d\d_)?[a-z0-9]+(_[a-z0-9]+)*\.ipynb"


def lessons(folder: Path = NOTEBOOKS) -> list[Path]:
    """The numbered lessons in their order: what git tracks, and new ones that it does not track yet.

    New is `09_some_words.ipynb` with a number that no tracked lesson has: `01_copy.ipynb` is a reader's copy.
    """
    return _of_the_course(folder, LESSON_NAME)


def questions(folder: Path = NOTEBOOKS / "questions") -> list[Path]:
    """The notebooks beside the lessons' road, held to the same rules; their names need no number."""
    return _of_the_course(folder, QUESTION_NAME)


def _of_the_course(folder: Path, name: str) -> list[Path]:
    if not folder.is_dir():
        return []
    found = sorted(folder.glob("*.ipynb"))
    tracked = set(git_lines("ls-files", "-z", folder=folder))
    numbers = {each[:2] for each in tracked if re.match(r"\d\d_", each)}
    return [
        path
        for path in found
        if path.name in tracked or (re.fullmatch(name, path.name) and path.name[:2] not in numbers)
    ]


def git_lines(*arguments: str, folder: Path) -> list[str]:
    """What git prints, split at NUL bytes; nothing where the folder is no repository of its own, as in a download."""
    try:
        command = ["git", *arguments]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False)
    except FileNotFoundError:  # no git is installed
        return []
    return [line for line in ran.stdout.split("\0") if line] if ran.returncode == 0 else []


def held_by_git(path: Path) -> str | None:
    """The file as git's index holds it, or None for one that is not tracked."""
    held = git_lines("show", f":./{path.name}", folder=path.parent)
    return "\0".join(held) if held else None
