"""The scores in the WordNet base's card: `python -m helpers.bundled.measure_wordnet [--folder FOLDER] [RUN ...]`.

A run is `task/method/rate/seed`, such as `card/prefix 10/0.1/0`; without any, all those of the card. Each trains for
400 steps of batch 32 on the training split, with the model in evaluation mode, and is scored by greedy generation:
exact match and, for texts, BLEU as sacrebleu computes it (`pip install sacrebleu`; the package does not need it).
"""

import argparse
import random
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers.base import load_base
from helpers.bundled.wordnet_data import Pair
from helpers.bundled.wordnet_stream import QUALITY_FIELDS, RECORD_JOBS, Corpus, record_pair
from helpers.t5 import T5Prefix
from helpers.tasks import Task, load_task
from helpers.training import exact_match, fit, generate_texts, majority_baseline

STEPS = 400
TASKS = ("category", "card", "bio")
RUNS = [
    f"{task}/{method}" for method in ("prefix 10/0.1/0", "full/2e-3/0", "frozen/0/0", "majority/0/0") for task in TASKS
]


def unseen_corpus() -> Corpus:
    """Words of held-out definitions as values: what the base copies from here, it has not learnt by heart."""
    sources = [source for source, _ in load_task("category").test]
    vocabulary = sorted({word for text in sources for word in text.split() if word.isalpha() and len(word) > 3})
    fields = dict.fromkeys(("animal", "tool", "city", "plant", "colour", *QUALITY_FIELDS), vocabulary)
    return Corpus(sources, sources, [], [], fields)


def record_scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int) -> dict[str, float]:
    """Exact match of each record job on `count` records of held-out words, 0 to 1."""
    corpus, rng, scores = unseen_corpus(), random.Random(7), {}
    for job in RECORD_JOBS:
        sources, targets = zip(*(record_pair(corpus, rng, job) for _ in range(count)), strict=True)
        scores[job] = exact_match(generate_texts(model, tokenizer, sources, max_new_tokens=96), targets)
    return scores


def describe(task: Task, texts: list[str], pairs: list[Pair]) -> str:
    targets = [target for _, target in pairs]
    text = f"exact {100 * exact_match(texts, targets):.1f}"
    if task.name != "category":
        import sacrebleu

        text += f", BLEU {sacrebleu.corpus_bleu(texts, [targets]).score:.1f}"
    return text


def run(name: str, folder: Path | None) -> str:
    """One run; returns its scores on validation and test, and the CPU seconds of training."""
    task_name, method, rate, seed = name.split("/")
    task = load_task(task_name)
    if method == "majority":
        most_frequent = majority_baseline([target for _, target in task.train], [target for _, target in task.test])
        return f"test: exact {100 * most_frequent:.1f}"
    model, tokenizer = load_base(folder)
    torch.manual_seed(int(seed))
    options = {"steps": STEPS, "learning_rate": float(rate), "seed": int(seed)}
    start = time.process_time()
    if method == "full":
        fit(model, model.parameters(), tokenizer, task.train, **options)
    elif method != "frozen":
        model.requires_grad_(False)
        prefix = T5Prefix.for_model(model, prefix_length=int(method.removeprefix("prefix ")))
        prefix.attach(model)
        fit(model, prefix.parameters(), tokenizer, task.train, **options)
    seconds = time.process_time() - start
    scores = []
    for split, pairs in (("validation", task.validation), ("test", task.test)):
        texts = generate_texts(model, tokenizer, [source for source, _ in pairs], max_new_tokens=96)
        scores.append(f"{split}: {describe(task, texts, pairs)}")
    return "; ".join(scores) + f"; {seconds:.0f} CPU s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="another base than the bundled one")
    parser.add_argument("runs", nargs="*", default=RUNS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.runs:
        print(name, run(name, arguments.folder), sep="\t", flush=True)
    if arguments.runs is RUNS:
        print("record jobs", record_scores(*load_base(arguments.folder), 256), sep="\t")
