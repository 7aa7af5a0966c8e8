"""The lessons' data: small text-to-text tasks that ship with the package, with fixed splits."""

import csv
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

from helpers._shapes import Pair

_BUNDLED = Path(__file__).parent
_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Task:
    """A text-to-text task; each split is a list of (source, target) pairs."""

    name: str
    base: str  # the bundled base it was made for: "dates" or "wordnet"
    description: str
    licence: str
    train: list[Pair] = field(repr=False)
    validation: list[Pair] = field(repr=False)
    test: list[Pair] = field(repr=False)


def _task_files() -> dict[str, Path]:
    """Each task's name and its file, sorted by name."""
    files: dict[str, Path] = {}
    for path in sorted(_BUNDLED.glob("*/tasks/*.tsv.gz")):
        name = path.name.removesuffix(".tsv.gz")
        if name in files:
            raise ValueError(f"two tasks are called {name!r}: {files[name]} and {path}; rename one")
        files[name] = path
    return dict(sorted(files.items()))


def task_names() -> list[str]:
    """The names that `load_task` knows."""
    return list(_task_files())


def load_task(name: str) -> Task:
    """One task with its three splits. An unknown name raises ValueError, which lists the known ones."""
    files = _task_files()
    if name not in files:
        raise ValueError(f"there is no task {name!r}; the tasks are {', '.join(files)}")
    path = files[name]
    base_folder = path.parent.parent
    about = json.loads((base_folder / "tasks.json").read_text(encoding="utf-8"))
    splits: dict[str, list[Pair]] = {split: [] for split in _SPLITS}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        # A quotation mark is an ordinary character here, and a text holds neither tab nor line break.
        for split, source, target in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            splits[split].append((source, target))
    return Task(name=name, base=base_folder.name, **about[name], **splits)
