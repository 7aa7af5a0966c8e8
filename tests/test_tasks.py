"""helpers.bases.tasks: every task that ships, and the reader's own errors."""

import gzip
import re
import subprocess
import sys
from datetime import date

import pytest

from helpers.bases import tasks
from helpers.bases.tasks import load_task, task_names

DATES_TASKS = ["german", "italian", "ordinal", "russian", "vietnamese"]
WEEKDAYS = ("Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag")
MONTHS = (
    *("Januar", "Februar", "März", "April", "Mai", "Juni"),
    *("Juli", "August", "September", "Oktober", "November", "Dezember"),
)


def write_task(bundled, base, name, rows):
    """A task file of our own under a temporary `bundled` folder."""
    folder = bundled / base / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join("\t".join(row) + "\n" for row in rows)
    (folder / f"{name}.tsv.gz").write_bytes(gzip.compress(text.encode()))
    (bundled / base / "tasks.json").write_text(
        f'{{"{name}": {{"description": "d", "licence": "l"}}}}', encoding="utf-8"
    )


def test_names_are_sorted_and_hold_the_dates_tasks():
    names = task_names()
    assert names == sorted(names)
    assert set(DATES_TASKS) <= set(names)


@pytest.mark.parametrize("name", task_names())
def test_splits_share_no_source(name):
    task = load_task(name)
    sources = [{source for source, _ in split} for split in (task.train, task.validation, task.test)]
    assert sources[0].isdisjoint(sources[1])
    assert sources[0].isdisjoint(sources[2])
    assert sources[1].isdisjoint(sources[2])


@pytest.mark.parametrize("name", task_names())
def test_every_task_is_complete(name):
    task = load_task(name)
    assert task.name == name
    assert task.base in ("dates", "wordnet")
    assert task.description.endswith(".")
    assert task.licence
    assert len(task.train) >= 1000
    assert min(len(task.validation), len(task.test)) >= 90
    for source, target in task.train + task.validation + task.test:
        assert source.strip() == source != ""
        assert target.strip() == target != ""


@pytest.mark.parametrize("name", DATES_TASKS)
def test_dates_tasks_are_disjoint_by_date_and_name_the_right_weekday(name):
    task = load_task(name)
    assert task.base == "dates"
    assert [len(task.train), len(task.validation), len(task.test)] == [4000, 386, 386]
    days = []
    for source, target in task.train + task.validation + task.test:
        day, weekday = source.split(" ")
        days.append(date.fromisoformat(day))
        assert days[-1].strftime("%w") == str(["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"].index(weekday))
        assert str(days[-1].year) in target
    assert len(set(days)) == len(days)


def test_german_is_german():
    task = load_task("german")
    for source, target in task.train + task.validation + task.test:
        day = date.fromisoformat(source.split(" ")[0])
        assert target == f"{WEEKDAYS[day.weekday()]}, {day.day}. {MONTHS[day.month - 1]} {day.year}"


def test_ordinals_have_the_right_suffix():
    task = load_task("ordinal")
    seen = {}
    for _, target in task.train:
        number, suffix = re.fullmatch(r"\w+, \w+ (\d+)(\w\w), \d{4}", target).groups()
        seen[int(number)] = suffix
    expected = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd", 31: "st"}
    assert seen == {day: expected.get(day, "th") for day in range(1, 32)}


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no task 'klingon'.*german.*ordinal"):
        load_task("klingon")


def test_quotation_marks_are_ordinary_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "_BUNDLED", tmp_path)
    row = ("train", '"a" quoted "source', "l'«été» 'n \"")
    write_task(tmp_path, "dates", "quotes", [row])
    assert load_task("quotes").train == [row[1:]]


def test_two_tasks_of_one_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "_BUNDLED", tmp_path)
    for base in ("dates", "wordnet"):
        write_task(tmp_path, base, "twin", [("train", "a", "b")])
    with pytest.raises(ValueError, match="two tasks are called 'twin'"):
        task_names()


def test_loading_a_task_needs_neither_torch_nor_transformers():
    code = "import sys, helpers; helpers.load_task('german'); print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
