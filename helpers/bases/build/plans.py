"""What `measure.py` measures: entries, each a run at several rates with several seeds, and the plan of each base."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Optional

from helpers.bases.scores import Run, chosen_runs, run_of
from helpers.tuning.families import SITES

ALL_SITES = "+".join(SITES)


def prefix_run(task: str, length: int, steps: int, **options) -> Run:
    """A prefix at all sites from small noise, seed 0, unless the options say otherwise."""
    defaults = {"sites": ALL_SITES, "init": "small", "seed": 0}
    return Run(task, "prefix", prefix_length=length, steps=steps, **defaults | options)


@dataclass(frozen=True)
class Entry:
    """One line of a plan: `run` at each of the rates with each of the seeds.

    like: take the rate that this other entry chose, instead of trying several.
    """

    run: Run
    rates: tuple[float | None, ...] = ()
    seeds: tuple[int | None, ...] = (0, 1, 2)
    like: Optional["Entry"] = None


def chosen_rate(rows: Sequence[dict], entry: Entry) -> float | None:
    """The rate that an entry reports: its only one, or the best on validation (see `chosen_runs`).

    Raises ValueError if one of the runs that decide is not measured yet.
    """
    if entry.like is not None:
        return chosen_rate(rows, entry.like)
    if len(entry.rates) == 1:
        return entry.rates[0]
    wanted = {replace(entry.run, learning_rate=rate, seed=seed) for rate in entry.rates for seed in entry.seeds}
    known = [row for row in rows if run_of(row) in wanted]
    missing = sorted({run.learning_rate for run in wanted - set(map(run_of, known))})
    if missing:
        raise ValueError(f"{entry.run.task}, {entry.run.method}: the rates {missing} are not measured with every seed")
    return chosen_runs(known)[0]["learning_rate"]


def runs_to_do(rows: list[dict], plan: Sequence[Entry]) -> Iterator[Run]:
    """The runs of a plan that have no row yet; `rows` must have grown by each before the next is asked for."""
    for entry in plan:
        rates = entry.rates or (chosen_rate(rows, entry),)
        for seed in entry.seeds:
            for rate in rates:
                run = replace(entry.run, learning_rate=rate, seed=seed)
                if run not in map(run_of, rows):
                    yield run


# On the dates base, 11,520 numbers are a prefix of 5, or LoRA of rank 3 on 12 matrices of 128 x 192; on WordNet's,
# 23,040 are a prefix of 10, or rank 5 on 18 of 128 x 128; on the GPT, 19,152 are a prefix of 19, or rank 6 on 7
# matrices of 120 x 144 and 7 of 120 x 72.
PREFIX_LENGTH = {"dates": 5, "wordnet": 10, "gpt": 19}
LORA_RANK = {"dates": 3, "wordnet": 5, "gpt": 6}
# From 400 steps to 800, a prefix for `category` gains three points of exact match, and full fine-tuning one.
WORDNET_STEPS = {"category": 800, "card": 400, "bio": 400}
FULL_RATES = (1e-3, 2e-3, 5e-3)
LORA_RATES = (3e-3, 1e-2, 3e-2)
PREFIX_RATES = (0.1, 0.3, 1.0)
PROMPT_RATES = (0.3, 1.0, 3.0)
SPRINT_RATES = (0.3, 1.0, 3.0)
MLP_RATES = {"dates": (3e-3, 1e-2, 3e-2), "wordnet": (1e-3, 3e-3, 1e-2)}


def prefix_entry(task: str, base: str, steps: int, **options) -> Entry:
    return Entry(prefix_run(task, PREFIX_LENGTH[base], steps, **options), PREFIX_RATES)


def full_entry(task: str, steps: int, rates: tuple[float, ...] = FULL_RATES, **options) -> Entry:
    return Entry(Run(task, "full", steps=steps, seed=0, **options), rates)


def peft_entries(task: str, base: str, steps: int) -> list[Entry]:
    """peft's two methods that a prefix is compared with."""
    options = {"init": "peft", "steps": steps, "seed": 0}
    return [
        Entry(Run(task, "lora", rank=LORA_RANK[base], **options), LORA_RATES),
        prompt_entry(task, 20, steps),
    ]


def prompt_entry(task: str, length: int, steps: int, rates: tuple[float, ...] = PROMPT_RATES) -> Entry:
    return Entry(Run(task, "prompt", prefix_length=length, init="peft", steps=steps, seed=0), rates)


def with_seeds(entry: Entry, count: int) -> Entry:
    return replace(entry, seeds=tuple(range(count)))


def untrained_entries(task: str) -> list[Entry]:
    return [Entry(Run(task, method), (None,), seeds=(None,)) for method in ("frozen", "majority")]


# Their prefixes lie beside the base.
SHIPPED = {
    # Three seeds at the best rate of 30 steps; after 300, any rate is at 100 %.
    "dates": [Entry(prefix_run("german", 5, 300, seed=seed), (1.0,), (seed,)) for seed in (0, 1, 2)],
    "wordnet": [prefix_entry(task, "wordnet", steps, init="normal") for task, steps in WORDNET_STEPS.items()],
    "gpt": [prefix_entry(task, "gpt", steps, init="normal", sites="decoder") for task, steps in WORDNET_STEPS.items()],
}


def wordnet_plan() -> list[Entry]:
    """The shipped prefixes and full fine-tuning first, then other starts and lengths, then peft's methods."""
    shipped = SHIPPED["wordnet"]
    category, card = shipped[:2]
    starts = [replace(entry, run=replace(entry.run, init="small")) for entry in shipped]
    starts += [replace(category, run=replace(category.run, init="activations"))]
    starts += [Entry(replace(category.run, init="mlp", mid_dim=256), MLP_RATES["wordnet"])]
    lengths = [Entry(replace(card.run, prefix_length=length), like=card) for length in (1, 5, 20)]
    lengths += [Entry(replace(category.run, prefix_length=length), like=category) for length in (1, 5)]
    lengths += [Entry(replace(category.run, prefix_length=20), PREFIX_RATES)]
    return [
        *shipped,
        *(full_entry(task, steps) for task, steps in WORDNET_STEPS.items()),
        *(entry for task in WORDNET_STEPS for entry in untrained_entries(task)),
        *(*starts, *lengths),
        *(entry for task, steps in WORDNET_STEPS.items() for entry in peft_entries(task, "wordnet", steps)),
    ]


def dates_plan() -> list[Entry]:
    """German with one option of the prefix changed at a time, in 30 steps; little data; methods on five tasks.

    Thirty steps, because after 300 nearly everything is at 100 %. They are cheap: each setting has rates of its own and
    five seeds, and the best rate is at no edge of its grid.
    """
    subsets = ("encoder", "decoder", "cross", "encoder+decoder", "encoder+cross", "decoder+cross")
    sprint = [
        Entry(prefix_run("german", 5, 30), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
        *(Entry(prefix_run("german", length, 30), SPRINT_RATES) for length in (1, 2, 10, 20)),
        *(Entry(prefix_run("german", 5, 30, sites=sites), SPRINT_RATES) for sites in subsets),
        *(Entry(prefix_run("german", 5, 30, init=init), PREFIX_RATES) for init in ("normal", "activations")),
        Entry(prefix_run("german", 5, 30, init="mlp", mid_dim=256), MLP_RATES["dates"]),
        full_entry("german", 30, (5e-4, *FULL_RATES)),  # to set beside the prefix's 30 steps
        *peft_entries("german", "dates", 30),
    ]
    plan = [with_seeds(entry, 5) for entry in sprint]
    few = [
        prefix_entry("german", "dates", 100, train_pairs=64),
        full_entry("german", 100, (2e-4, 5e-4, *FULL_RATES), train_pairs=64),
    ]
    plan += few
    for pairs in (16, 256, 1024):  # at the rates chosen with 64
        plan += [Entry(replace(entry.run, train_pairs=pairs), like=entry) for entry in few]

    prefix, full = prefix_entry("german", "dates", 300), full_entry("german", 300)
    plan += [*untrained_entries("german"), prefix, full, *peft_entries("german", "dates", 300)]
    plan += [*untrained_entries("russian"), full_entry("russian", 300), peft_entries("russian", "dates", 300)[0]]
    for init in ("small", "normal"):
        cyrillic = prefix_entry("russian", "dates", 300, init=init)
        plan += [cyrillic, replace(cyrillic, run=replace(cyrillic.run, prefix_length=20))]
    plan += [prefix_entry("russian", "dates", 300, init="activations")]
    plan += [Entry(prefix_run("russian", 5, 300, init="mlp", mid_dim=256), (1e-3, *MLP_RATES["dates"]))]
    for task in ("italian", "ordinal"):  # like German: at the rates chosen there
        plan += untrained_entries(task)
        plan += [Entry(replace(entry.run, task=task), like=entry) for entry in (prefix, full)]
    # A prompt of 90 tokens has as many numbers as a prefix of 5.
    plan += [with_seeds(prompt_entry("german", 90, 30, (0.1, *PROMPT_RATES)), 5), prompt_entry("german", 90, 300)]
    return plan


def gpt_plan() -> list[Entry]:
    """WordNet's tasks: the shipped prefixes and what they are compared with, then prefixes from small noise."""
    shipped = SHIPPED["gpt"]
    return [
        *shipped,
        *(full_entry(task, steps) for task, steps in WORDNET_STEPS.items()),
        *(peft_entries(task, "gpt", steps)[0] for task, steps in WORDNET_STEPS.items()),
        *(entry for task in WORDNET_STEPS for entry in untrained_entries(task)),
        *(replace(entry, run=replace(entry.run, init="small")) for entry in shipped),
    ]


PLANS = {"dates": dates_plan, "wordnet": wordnet_plan, "gpt": gpt_plan}
