"""The scores that `bases/build/measure.py` measured: a `scores.csv` beside each base, a row a run."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean
from typing import get_args

BASES = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """One run; None where an option has no meaning for the method.

    method: "frozen" (nothing trained), "majority" (always the commonest training target), "prefix", "prompt" (peft's
    prompt tuning), "lora" (peft's, on q and v), "full" fine-tuning, "scratch" (full, from random weights).
    prefix_length: slots of a prefix at each site, or soft tokens of a prompt. sites: joined with "+".
    init: "small" N(0, 0.02²), "normal" N(0, 1), "activations" (keys and values of training pairs), "mlp", or peft's.
    train_pairs: how many, drawn by the seed; None = all.
    """

    task: str
    method: str
    prefix_length: int | None = None
    sites: str | None = None
    mid_dim: int | None = None
    init: str | None = None
    rank: int | None = None
    learning_rate: float | None = None
    steps: int | None = None
    train_pairs: int | None = None
    seed: int | None = None


# What a row holds besides its run. base: the first digits of the SHA-256 of the weights; parameters: trained numbers;
# exact: 0 to 1; bleu: 0 to 100; cpu_seconds: of training alone, one thread.
RESULTS = {
    "base": str,
    "parameters": int,
    "validation_loss": float,
    "validation_exact": float,
    "validation_bleu": float,
    "test_exact": float,
    "test_bleu": float,
    "cpu_seconds": float,
}
RUN_TYPES = {field.name: (get_args(field.type) or (field.type,))[0] for field in fields(Run)}
COLUMNS = RUN_TYPES | RESULTS


def read_scores(path: str | Path) -> list[dict]:
    """The rows of a scores.csv: numbers as numbers, None where a cell is empty.

    Raises ValueError if the file has other columns.
    """
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(COLUMNS):
            raise ValueError(f"{path} has the columns {reader.fieldnames}, not {list(COLUMNS)}")
        return [{name: COLUMNS[name](cell) if cell else None for name, cell in row.items()} for row in reader]


def append_score(path: Path, row: dict) -> None:
    """Add one row, and the header if the file is new."""
    is_new = not path.exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def run_of(row: dict) -> Run:
    return Run(**{name: row[name] for name in RUN_TYPES})


def chosen_runs(rows: Sequence[dict], **wanted) -> list[dict]:
    """The rows with these settings, one a seed, at the rate that is best on validation.

    Best is the highest mean exact match over the seeds, and among equals the lowest mean loss. The test scores are not
    looked at.

    Raises ValueError if there is no such row, or if the rates did not run with the same seeds, once each.
    """
    by_rate = defaultdict(list)
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            by_rate[row["learning_rate"]].append(row)
    seeds = {rate: [row["seed"] for row in runs] for rate, runs in by_rate.items()}
    if not seeds:
        raise ValueError(f"no run has {wanted}")
    if any(len(set(each)) < len(each) for each in seeds.values()) or len(set(map(frozenset, seeds.values()))) > 1:
        raise ValueError(f"{wanted}: the rates need the same seeds, once each, to be compared, and have {seeds}")

    def merit(runs):
        return mean(row["validation_exact"] for row in runs), -mean(row["validation_loss"] for row in runs)

    # The majority has no loss, and no choice either.
    return max(by_rate.values(), key=merit) if len(by_rate) > 1 else next(iter(by_rate.values()))
