"""Every score that the cards and lesson 8 give: `python -m helpers.bases.build.measure --plan dates` (or another).

One run is a task, a method with its options, and a seed. It trains on the task's training pairs, generates greedily
for the held-out ones, and appends one row to `scores.csv` in the base's folder. Rows that are there already are
skipped, so that an interrupted plan goes on where it stopped. Every rate of a grid runs with every seed; the rate with
the best mean score on the validation pairs is the one that is reported.

    --plan dates --list       what the plan holds, without running it
    --plan wordnet --save-prefix       after the plan: train the shipped prefixes again, compare, store them
    --pretraining dates       what the base makes of its own pretraining jobs
    --base-folder FOLDER      measure the base in FOLDER instead of the bundled one; results go there too

Prompt tuning and LoRA are peft's (`pip install peft`), BLEU is sacrebleu's (`pip install sacrebleu`); `helpers` itself
needs neither.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from transformers import (
    ByT5Tokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5ForConditionalGeneration,
)

from helpers._shapes import Pair
from helpers.bases.build.plans import PLANS, SHIPPED, Entry, chosen_rate, runs_to_do
from helpers.bases.build.pretraining import sha256
from helpers.bases.load import load_base
from helpers.bases.scores import BASES, COLUMNS, Run, append_score, read_scores, run_of
from helpers.bases.tasks import load_task
from helpers.heads import split_heads
from helpers.prefix import PrefixEncoder
from helpers.tuning.attach import T5Prefix
from helpers.tuning.families import sites_of
from helpers.tuning.training import collate_for, exact_match, fit, generate_texts, majority_baseline

INIT_STD = {"small": None, "normal": 1.0, "mlp": None}  # None: the default, small noise, or what an MLP makes
BLEU_TASKS = ("card", "bio")  # whole texts; elsewhere a target is one word or one date


# --- one run -----------------------------------------------------------------------------------------------------


def load_measured(base: str, folder: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base of that name, bundled or from a folder, in float32 and evaluation mode."""
    if folder is None:
        return load_base(base)
    if base == "dates":  # its tokenizer has no files
        return T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval(), ByT5Tokenizer()
    if base == "gpt":  # it reads with the tokenizer of "wordnet"
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), load_base("wordnet")[1]
    return load_base(folder)


def prefix_from_activations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], prefix_length: int, sites
) -> T5Prefix:
    """A prefix that starts as the keys and values that the model computes for the first tokens of some pairs.

    The encoder reads their sources, one after another, and the decoder their targets, `prefix_length` tokens of each.
    """
    source, target = (
        tokenizer(" ".join(texts), add_special_tokens=False, return_tensors="pt").input_ids[:, :prefix_length]
        for texts in zip(*pairs, strict=True)
    )
    if min(source.shape[1], target.shape[1]) < prefix_length:
        raise ValueError(
            f"{len(pairs)} pairs have {source.shape[1]} and {target.shape[1]} tokens, too few for {prefix_length} slots"
        )
    own, found, hooks = sites_of(model), {}, []
    for site in sites:
        for layer, attention in enumerate(own[site].attentions):
            for index, projection in enumerate((attention.k, attention.v)):
                place = site, layer, index
                hooks.append(
                    projection.register_forward_hook(
                        lambda module, args, output, place=place: found.update({place: output})
                    )
                )
    try:
        with torch.no_grad():
            model(input_ids=source, decoder_input_ids=target)
    finally:
        for hook in hooks:
            hook.remove()
    prefix = T5Prefix.for_model(model, prefix_length=prefix_length, sites=sites)
    for site in sites:
        layers, num_heads, _ = own[site].shape
        key_values = [
            [split_heads(found[site, layer, index], num_heads) for index in (0, 1)] for layer in range(layers)
        ]
        prefix.encoders[site] = PrefixEncoder.from_key_values(torch.stack([torch.stack(pair) for pair in key_values]))
    return prefix


def new_prefix(run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> T5Prefix:
    """The untrained prefix of a run."""
    sites = tuple(run.sites.split("+"))
    if run.init == "activations":
        some = random.Random(run.seed).sample(list(pairs), min(len(pairs), 2 * run.prefix_length))
        return prefix_from_activations(model, tokenizer, some, run.prefix_length, sites)
    if (run.init == "mlp") != (run.mid_dim is not None):
        raise ValueError(f"init 'mlp' and a mid_dim go together, got init={run.init!r}, mid_dim={run.mid_dim}")
    if run.init not in INIT_STD:
        raise ValueError(f"init must be 'activations' or one of {', '.join(INIT_STD)}, got {run.init!r}")
    return T5Prefix.for_model(
        model, prefix_length=run.prefix_length, sites=sites, mid_dim=run.mid_dim, init_std=INIT_STD[run.init]
    )


def prepare(
    run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]
) -> tuple[nn.Module, list[nn.Parameter], T5Prefix | None]:
    """`(what to call, what to train, the prefix if there is one)`. The model is in evaluation mode, frozen or not.

    Raises ValueError for an unknown method.
    """
    if run.method == "full":
        return model, list(model.parameters()), None
    if run.method == "scratch":
        model = type(model)(model.config).eval()
        return model, list(model.parameters()), None
    model.requires_grad_(False)
    if run.method == "frozen":
        return model, [], None
    if run.method == "prefix":
        prefix = new_prefix(run, model, tokenizer, pairs)
        prefix.attach(model)
        return model, list(prefix.parameters()), prefix
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    if run.method == "prompt":
        # One "submodule": with peft's default of two, half of the soft tokens would be for a decoder that never
        # reads them.
        config = PromptTuningConfig(
            task_type="SEQ_2_SEQ_LM", num_virtual_tokens=run.prefix_length, num_transformer_submodules=1
        )
    elif run.method == "lora":
        is_t5 = model.config.is_encoder_decoder
        config = LoraConfig(
            task_type="SEQ_2_SEQ_LM" if is_t5 else "CAUSAL_LM",
            r=run.rank,
            lora_alpha=2 * run.rank,
            lora_dropout=0.0,
            target_modules=["q", "v"] if is_t5 else ["q_proj", "v_proj"],
        )
    else:
        raise ValueError(f"there is no method {run.method!r}")
    model = get_peft_model(model, config).eval()
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad], None


@torch.no_grad()
def mean_loss(model: nn.Module, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> float:
    """The mean loss of a target token over all pairs."""
    total = count = 0
    for start in range(0, len(pairs), 128):
        batch = collate_for(model, tokenizer, pairs[start : start + 128])
        tokens = (batch["labels"] != -100).sum().item()
        total, count = total + tokens * model(**batch).loss.item(), count + tokens
    return total / count


def measure(run: Run, folder: Path | None = None, base: str | None = None) -> tuple[dict, T5Prefix | None]:
    """Train and score one run: its row, and the trained prefix if there is one.

    Args:
        folder: where the base lies, if it is not the bundled one of that name.
        base: the base's name; None for the one that the task was made for.
    """
    task = load_task(run.task)
    base = base or task.base
    row = dict.fromkeys(COLUMNS) | asdict(run)
    row["base"] = sha256((folder or BASES / base) / "model.safetensors")[:12]
    splits = {"validation": task.validation, "test": task.test}
    if run.method == "majority":
        for split, pairs in splits.items():
            targets = ([target for _, target in part] for part in (task.train, pairs))
            row[f"{split}_exact"] = round(majority_baseline(*targets), 4)
        return row | {"parameters": 0}, None
    if run.task in BLEU_TASKS:
        from sacrebleu import corpus_bleu
    model, tokenizer = load_measured(base, folder)
    train = task.train
    if run.train_pairs is not None:
        train = random.Random(run.seed).sample(train, run.train_pairs)
    torch.manual_seed(run.seed or 0)
    model, parameters, prefix = prepare(run, model, tokenizer, train)
    row["parameters"] = sum(parameter.numel() for parameter in parameters)
    start = time.process_time()
    if parameters:
        fit(model, parameters, tokenizer, train, steps=run.steps, learning_rate=run.learning_rate, seed=run.seed)
        row["cpu_seconds"] = round(time.process_time() - start, 1)
    row["validation_loss"] = round(mean_loss(model, tokenizer, task.validation), 4)
    for split, pairs in splits.items():
        sources, targets = (list(column) for column in zip(*pairs, strict=True))
        texts = generate_texts(model, tokenizer, sources, max_new_tokens=96)
        row[f"{split}_exact"] = round(exact_match(texts, targets), 4)
        if run.task in BLEU_TASKS:
            row[f"{split}_bleu"] = round(corpus_bleu(texts, [targets]).score, 2)
    return row, prefix


def run_plan(base: str, folder: Path | None, plan: Sequence[Entry] | None = None) -> None:
    """Run what has no row for these weights yet, and store each row at once."""
    path = (folder or BASES / base) / "scores.csv"
    weights = sha256(path.parent / "model.safetensors")[:12]
    rows = [row for row in (read_scores(path) if path.exists() else ()) if row["base"] == weights]
    for run in runs_to_do(rows, PLANS[base]() if plan is None else plan):
        row, _ = measure(run, folder, base)
        append_score(path, row)
        rows.append(row)
        print(", ".join(f"{name} {cell}" for name, cell in row.items() if cell is not None), flush=True)


def prefix_folder(home: Path, run: Run) -> Path:
    """Where the stored prefix of a run lies: `prefixes/<task>`, and `prefixes/<task>_<seed>` for other seeds than 0."""
    return home / "prefixes" / (f"{run.task}_{run.seed}" if run.seed else run.task)


def save_prefixes(base: str, folder: Path | None, entries: Sequence[Entry]) -> None:
    """Train the prefix of each entry again at its chosen rate and store it (see `prefix_folder`).

    Raises ValueError if it does not score what its row says.
    """
    home = folder or BASES / base
    weights = sha256(home / "model.safetensors")[:12]
    rows = [row for row in read_scores(home / "scores.csv") if row["base"] == weights]
    for entry in entries:
        run = replace(entry.run, learning_rate=chosen_rate(rows, entry))
        stored = next(row for row in rows if run_of(row) == run)
        row, prefix = measure(run, folder, base)
        if row["test_exact"] != stored["test_exact"]:
            raise ValueError(f"{run} gave {row['test_exact']} exact now, and {stored['test_exact']} before: not saved")
        prefix.eval().save_pretrained(prefix_folder(home, run))
        print(
            f"{run.task}, seed {run.seed}: rate {run.learning_rate:g}, test exact {row['test_exact']:.1%}, saved",
            flush=True,
        )


# --- the bases' own pretraining jobs -------------------------------------------------------------------------------


def unseen_corpus():
    """Words of held-out definitions as values: what the base copies from here, it has not learnt by heart."""
    from helpers.bases.build.wordnet_stream import QUALITY_FIELDS, Corpus

    sources = [source for source, _ in load_task("category").test]
    vocabulary = sorted({word for text in sources for word in text.split() if word.isalpha() and len(word) > 3})
    values = dict.fromkeys(("animal", "tool", "city", "plant", "colour", *QUALITY_FIELDS), vocabulary)
    return Corpus(sources, sources, [], [], values)


def wordnet_jobs(count: int = 256) -> dict[str, list[Pair]]:
    """`count` records of held-out words for each record job."""
    from helpers.bases.build.wordnet_stream import RECORD_JOBS, record_pair

    corpus, rng = unseen_corpus(), random.Random(7)
    return {job: [record_pair(corpus, rng, job) for _ in range(count)] for job in RECORD_JOBS}


def dates_jobs(count: int = 1000) -> dict[str, list[Pair]]:
    """`count` pairs on days that pretraining never saw, by job (needs babel)."""
    from helpers.bases.build.dates import pretraining_pair, split_days

    rng, days, jobs = random.Random(1), split_days()["test"], defaultdict(list)
    for _ in range(count):
        source, target = pretraining_pair(rng.choice(days), rng)
        prompt, text = source.split(": ", 1)
        job = {"copy": "copy", "iso": "back"}.get(prompt)
        if job is None:
            # A source in ISO form ends in an English weekday, which no localised date does.
            job = "localise" if text[4] == "-" and text[-3:].isalpha() else "locale to locale"
        jobs[job].append((source, target))
    return jobs


JOBS = {"dates": dates_jobs, "wordnet": wordnet_jobs}


def print_pretraining(base: str, folder: Path | None) -> None:
    """Exact match of each pretraining job."""
    model, tokenizer = load_measured(base, folder)
    for job, pairs in sorted(JOBS[base]().items()):
        sources, targets = zip(*pairs, strict=True)
        texts = generate_texts(model, tokenizer, sources, max_new_tokens=96)
        print(f"{job}: {exact_match(texts, targets):.1%} of {len(pairs)}", flush=True)


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", choices=PLANS, help="run this base's plan")
    parser.add_argument("--list", action="store_true", help="print the plan instead of running it")
    parser.add_argument("--save-prefix", action="store_true", help="store the shipped prefixes, when the plan is done")
    parser.add_argument("--pretraining", choices=JOBS, help="score this base's own pretraining jobs")
    parser.add_argument("--base-folder", type=Path, help="measure the base in this folder instead of the bundled one")
    arguments = parser.parse_args(command_line)
    if (arguments.plan is None) == (arguments.pretraining is None):
        parser.error("give either --plan or --pretraining")
    if arguments.save_prefix and arguments.plan is None:
        parser.error("--save-prefix goes with --plan")
    torch.set_num_threads(1)
    if arguments.pretraining:
        print_pretraining(arguments.pretraining, arguments.base_folder)
    elif arguments.list:
        for entry in PLANS[arguments.plan]():
            options = {name: cell for name, cell in asdict(entry.run).items() if cell is not None}
            print(options | {"learning_rate": entry.rates, "seed": entry.seeds})
    else:
        run_plan(arguments.plan, arguments.base_folder)
        if arguments.save_prefix:
            save_prefixes(arguments.plan, arguments.base_folder, SHIPPED[arguments.plan])


if __name__ == "__main__":
    main()
