"""The tables of scores in the bases' cards say what their scores.csv hold."""

from statistics import mean, stdev

import pytest

from helpers.bases.build.plans import WORDNET_STEPS
from helpers.bases.scores import BASES, chosen_runs, read_scores

ALL_SITES = {"method": "prefix", "sites": "encoder+decoder+cross"}
PEERS = {
    "prompt tuning, 20 tokens": {"method": "prompt", "prefix_length": 20},
    "full fine-tuning": {"method": "full"},
    "frozen, source alone": {"method": "frozen", "steps": None},
    "majority": {"method": "majority", "steps": None},
}
# The settings of each row of a card's table.
ROWS = {
    "wordnet": PEERS
    | {f"prefix of {length}": ALL_SITES | {"prefix_length": length, "init": "normal"} for length in (1, 5, 10, 20)}
    | {
        f"prefix of 10, {start}": ALL_SITES | {"prefix_length": 10, "init": init}
        for start, init in (
            ("from small noise", "small"),
            ("from real activations", "activations"),
            ("MLP of 256", "mlp"),
        )
    }
    | {"LoRA, rank 5": {"method": "lora"}},
    "dates": PEERS
    | {f"prefix of {length}": ALL_SITES | {"prefix_length": length, "init": "small"} for length in (5, 20)}
    | {
        f"prefix of {length}, from N(0, 1)": ALL_SITES | {"prefix_length": length, "init": "normal"}
        for length in (5, 20)
    }
    | {
        f"prefix of 5, {start}": ALL_SITES | {"prefix_length": 5, "init": init}
        for start, init in (("from real activations", "activations"), ("MLP of 256", "mlp"))
    }
    | {"LoRA, rank 3": {"method": "lora"}, "prompt tuning, 90 tokens": {"method": "prompt", "prefix_length": 90}},
}
STEPS = {"wordnet": WORDNET_STEPS, "dates": dict.fromkeys(("german", "italian", "ordinal", "russian"), 300)}


def spread(values):
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def cell(runs):
    """What a card says of the runs of one setting."""
    text = spread([100 * run["test_exact"] for run in runs])
    if runs[0]["test_bleu"] is not None:
        text += " / " + spread([run["test_bleu"] for run in runs])
    if runs[0]["learning_rate"] is not None:
        text += f" ({mean(run['cpu_seconds'] for run in runs):.0f} s, rate {runs[0]['learning_rate']:g})"
    return text


def table(base):
    """`{row: {task: cell}}` of the table of scores in a card."""
    card = (BASES / base / "README.md").read_text(encoding="utf-8").split("## Scores")[1]
    lines = [line for line in card.splitlines() if line.startswith("|")]
    head, _, *rows = ([part.strip() for part in line.strip("|").split("|")] for line in lines)
    tasks = [name.split(",")[0].strip("`") for name in head[1:]]
    return {label: dict(zip(tasks, cells, strict=True)) for label, *cells in rows}


@pytest.mark.parametrize("base", ROWS)
def test_the_cards_scores_are_the_stored_ones(base):
    scores, said = read_scores(BASES / base / "scores.csv"), table(base)
    assert set(said) == set(ROWS[base])
    for label, cells in said.items():
        assert set(cells) == set(STEPS[base])
        for task, text in cells.items():
            settings = {"task": task, "steps": STEPS[base][task], **ROWS[base][label]}
            stored = [row for row in scores if settings.items() <= row.items()]
            assert text == (cell(chosen_runs(stored)) if stored else ""), (label, task)
