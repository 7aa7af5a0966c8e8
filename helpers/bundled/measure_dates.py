"""The scores in the dates base's card: `python -m helpers.bundled.measure_dates [--folder FOLDER]`.

Exact match on 386 test dates by greedy generation, after 300 steps of batch 32 on a frozen model in evaluation
mode. One line of output for each run; about ten CPU minutes in all.
"""

import argparse
import random
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, T5ForConditionalGeneration

from helpers.bundled.build_dates import pretraining_pair, split_days
from helpers.t5 import T5Prefix
from helpers.tasks import load_task
from helpers.training import exact_match, fit, generate_texts, majority_baseline

STEPS = 300
# task, method, seeds
RUNS = [
    *[("german", method, (0, 1, 2)) for method in ("prefix 5", "prefix 10")],
    *[(task, "prefix 5", (0, 1, 2)) for task in ("italian", "ordinal")],
    *[(task, "prefix 10", (0,)) for task in ("italian", "ordinal", "vietnamese", "russian")],
    *[("german", method, (0,)) for method in ("prefix 1", "prefix 20", "scratch")],
    *[(task, "full", (0,)) for task in ("german", "italian", "ordinal", "vietnamese", "russian")],
    *[(task, "frozen", (0,)) for task in ("german", "italian", "ordinal", "vietnamese", "russian")],
    *[(task, "majority", (0,)) for task in ("german", "italian", "ordinal", "vietnamese", "russian")],
]


def run(folder: Path, task_name: str, method: str, seed: int) -> float:
    """Exact match on the test split, 0 to 1."""
    task, tokenizer = load_task(task_name), ByT5Tokenizer()
    sources, targets = (list(column) for column in zip(*task.test, strict=True))
    if method == "majority":
        return majority_baseline([target for _, target in task.train], targets)
    model = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def score() -> float:
        return exact_match(generate_texts(model, tokenizer, sources), targets)

    torch.manual_seed(seed)
    if method == "frozen":
        return score()
    if method in ("full", "scratch"):
        if method == "scratch":
            model = T5ForConditionalGeneration(model.config).eval()
        fit(model, model.parameters(), tokenizer, task.train, steps=STEPS, learning_rate=2e-3, seed=seed)
        return score()
    model.requires_grad_(False)
    prefix = T5Prefix.for_model(model, prefix_length=int(method.removeprefix("prefix ")))
    with prefix.attached(model):
        fit(model, prefix.parameters(), tokenizer, task.train, steps=STEPS, learning_rate=0.1, seed=seed)
        return score()


def pretraining_scores(folder: Path, count: int = 1000) -> dict[str, tuple[float, int]]:
    """Exact match and number of pairs for each pretraining job, on days that pretraining never saw."""
    rng = random.Random(1)
    days = split_days()["test"]
    pairs = [pretraining_pair(rng.choice(days), rng) for _ in range(count)]
    tokenizer = ByT5Tokenizer()
    model = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = generate_texts(model, tokenizer, [source for source, _ in pairs])
    right = defaultdict(list)
    for (source, target), output in zip(pairs, outputs, strict=True):
        prompt, text = source.split(": ", 1)
        job = {"copy": "copy", "iso": "back"}.get(prompt)
        if job is None:
            # A source in ISO form ends in an English weekday, which no localised date does.
            job = "localise" if text[4] == "-" and text[-3:].isalpha() else "locale to locale"
        right[job].append(output == target)
    return {job: (sum(hits) / len(hits), len(hits)) for job, hits in sorted(right.items())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "dates")
    parser.add_argument("--only", default="", help="measure only runs whose 'task method' contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for job, (value, count) in pretraining_scores(arguments.folder).items() if not arguments.only else ():
        print(f"pretraining, {job}: {value:.1%} of {count}", flush=True)
    for task_name, method, seeds in RUNS:
        for seed in seeds if arguments.only in f"{task_name} {method}" else ():
            start = time.process_time()
            value = run(arguments.folder, task_name, method, seed)
            seconds = time.process_time() - start
            print(f"{task_name:11} {method:10} seed {seed}: {value:6.1%} {seconds:4.0f} CPU s", flush=True)
