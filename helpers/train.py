"""Prefix tuning from the command line: `python -m helpers.train --help`. Needs the package's extra `train`.

One process, or several under `torchrun` or `accelerate launch`. The training loop is transformers' Seq2SeqTrainer, so
its options are options here too. Its validation loss is a mean over batches, which depends a little on their size and
on the number of processes; the exact match does not.
"""

import argparse
import copy
import csv
import inspect
import json
import math
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # what follows takes seconds to import: say so, and let Ctrl-C end that too in one sentence
    FIRST = os.environ.get("RANK", "0") == "0"  # of several processes
    AT_START = signal.getsignal(signal.SIGINT)

    def _stop_importing(*_):
        if FIRST:
            os.write(2, b"\nhelpers.train: stopped before anything was done\n")
        os._exit(130)

    if AT_START is signal.default_int_handler:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, _stop_importing)
    if FIRST:
        print("importing PyTorch and transformers", file=sys.stderr, flush=True)

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerState,
    set_seed,
)
from transformers.hf_argparser import HfArg
from transformers.trainer_callback import ProgressCallback

from helpers._shapes import Pair
from helpers.bases.load import BUNDLED_NAMES, load_base
from helpers.bases.tasks import load_task
from helpers.course.figures import curves, curves_sentence
from helpers.tuning.attach import Prefix
from helpers.tuning.continuation_trainer import ContinuationCollator, ContinuationTrainer
from helpers.tuning.continuing import check_no_form, continuations, padding_of
from helpers.tuning.engines import ModelWithPrefix
from helpers.tuning.families import SITES, sites_of
from helpers.tuning.pairs import data_set, hold_out, read_pairs
from helpers.tuning.progress import Bar
from helpers.tuning.resuming import checkpoint_to_resume, count_in_steps, settings_of
from helpers.tuning.store import replace_file
from helpers.tuning.training import exact_match, majority_baseline, one_thread_if_small

USAGE = "python -m helpers.train --base NAME --train_file PAIRS.jsonl --output_dir FOLDER [options]"
DESCRIPTION = """\
Learn a prefix for a frozen model from a file with one {"source": "...", "target": "..."} a line. To try it:
python -m helpers.train --demo writes such a file, of German dates, and learns from it; with the options you add.
The model is a T5, Llama, Qwen, Gemma, GPT-2, BART or a relative (the table in helpers/tuning/families.py).

FOLDER then holds prefix/ (for Prefix.from_pretrained), scores.json, predictions.jsonl, loss.csv, loss.png and the
last checkpoints. The same command continues a run that was stopped. On several devices, write
torchrun --nproc_per_node 2 -m helpers.train, or accelerate launch -m helpers.train, in place of python."""
DEMO = {
    "base": "dates",
    "train_file": "german-demo.jsonl",
    "output_dir": "german-demo",
    "prefix_length": 5,
    "max_steps": 150,
    "eval_steps": 50,
}


COLUMNS = {  # of loss.csv, and what the Trainer calls them
    "step": "step",
    "loss": "loss",
    "validation_loss": "eval_loss",
    "validation_exact_match": "eval_exact_match",
    "learning_rate": "learning_rate",
}


@dataclass
class PrefixArguments:
    """What is trained, and on what."""

    base: str = HfArg(help=f"the frozen model: {' or '.join(BUNDLED_NAMES)} (bundled), a folder, or a name on the hub")
    train_file: str = HfArg(help="JSONL file of the pairs to learn")
    validation_file: str | None = HfArg(help="JSONL file of the pairs to evaluate on", default=None)
    validation_share: float = HfArg(
        help="without a validation_file: share of the pairs to hold out for evaluation, drawn by the seed; 0 for none",
        default=0.1,
    )
    prefix_length: int = HfArg(help="slots at each site", default=20)
    sites: list[str] | None = field(
        default=None,
        metadata={
            "help": f"attention sites with a prefix, of {' '.join(SITES)}; all that the model has without this option"
        },
    )
    separator: str | None = HfArg(
        help="of a decoder alone, what stands between source and target: a new line without this option, or nothing if "
        "the tokenizer ends each source with a token of its own",
        default=None,
    )
    chat: bool = HfArg(
        help="of a decoder alone, give it the source as the tokenizer's chat template writes what a user says",
        default=False,
    )
    mid_dim: int | None = HfArg(
        help="width of the reparameterising MLP; it wants a learning_rate of about 0.003", default=None
    )
    init_std: float | None = HfArg(
        help="standard deviation of the first prefix, 0.02 without this option; from 1.0 the slots start apart, which "
        "helped on hard tasks (lesson 8); not with mid_dim",
        default=None,
    )
    prefix_dropout: float = HfArg(help="probability of dropping a number of the prefix in training", default=0.0)
    max_source_length: int = HfArg(help="tokens of a source, the end token included; the rest is cut off", default=512)
    max_target_length: int = HfArg(help="tokens of a target, the end token included; the rest is cut off", default=128)


@dataclass
class TrainingArguments(Seq2SeqTrainingArguments):
    """transformers' arguments, with defaults for a prefix. Those with a text here are in --help."""

    output_dir: str = HfArg(help="folder for everything that is written")
    num_train_epochs: float = HfArg(help="how often each pair is seen", default=3.0)
    max_steps: int = HfArg(help="steps in all, in place of num_train_epochs", default=-1)
    per_device_train_batch_size: int = HfArg(help="pairs in a batch, on each device", default=32)
    gradient_accumulation_steps: int = HfArg(help="batches in a step", default=1)
    learning_rate: float = HfArg(help="of AdamW; after the warm-up it falls to 0 linearly", default=0.1)
    warmup_steps: float = HfArg(help="steps of warm-up; below 1, share of all steps", default=0.05)
    weight_decay: float = HfArg(help="of AdamW", default=0.0)
    max_grad_norm: float = HfArg(help="norm that gradients are clipped to", default=1.0)
    seed: int = HfArg(help="decides the first prefix, the order of the pairs and the share held out", default=0)
    bf16: bool = HfArg(help="compute in bfloat16 where that is safe; the prefix stays in float32", default=False)
    per_device_eval_batch_size: int = HfArg(help="pairs in a batch of the evaluation, on each device", default=128)
    generation_num_beams: int | None = HfArg(help="beams in the evaluation; greedy without", default=None)
    logging_steps: float = HfArg(help="steps between two rows of loss.csv; below 1, share of all steps", default=0.01)
    eval_steps: float | None = HfArg(help="steps between two evaluations; below 1, share of all steps", default=0.1)
    save_steps: float = HfArg(help="steps between two checkpoints; below 1, share of all steps", default=0.1)
    save_total_limit: int | None = HfArg(help="checkpoints to keep", default=2)
    load_best_model_at_end: bool = HfArg(
        help="end with the prefix of the lowest validation loss (or best metric_for_best_model, exact_match)",
        default=False,
    )
    resume_from_checkpoint: str | None = HfArg(
        help="checkpoint to continue from, even with other settings than it was made with", default=None
    )
    eval_strategy: str = field(default="steps")
    predict_with_generate: bool = field(default=True)
    report_to: str = field(default="none")
    logging_nan_inf_filter: bool = field(default=False)  # such a loss ends the run
    ddp_find_unused_parameters: bool = field(default=False)  # there are none
    dataloader_pin_memory: bool = field(default=torch.cuda.is_available())
    # Without it, processes without an accelerator would each train alone, and write to the same files.
    use_cpu: bool = field(default=not torch.accelerator.is_available())


class _Parser(HfArgumentParser):
    """transformers' parser; its own --help would be 600 lines long."""

    def format_help(self) -> str:
        own = inspect.get_annotations(TrainingArguments)
        options = [*fields(PrefixArguments), *(option for option in fields(TrainingArguments) if option.name in own)]
        lines = [f"usage: {USAGE}", "", DESCRIPTION, ""]
        for option in (option for option in options if option.metadata):
            default = option.default if option.default_factory is MISSING else " ".join(option.default_factory())
            remark = " (required)" if default is MISSING else "" if default is None else f" (default: {default})"
            text = option.metadata["help"] + remark
            lines += [f"  --{option.name}", textwrap.fill(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)]
        return "\n".join([*lines, "", "All other options of transformers' Seq2SeqTrainingArguments work as well.", ""])


class _ExactMatch:
    """Exact match of generated texts with the targets as the file has them, not as the tokenizer can write them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: Sequence[str]):
        self.tokenizer, self.targets, self.texts = tokenizer, targets, []

    def __call__(self, prediction) -> dict[str, float]:
        tokens = np.where(prediction.predictions < 0, padding_of(self.tokenizer), prediction.predictions)
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        self.texts = texts[: len(self.targets)]  # several processes fill up their last batch
        return {"exact_match": exact_match(self.texts, self.targets)}


class _Watch(TrainerCallback):
    """Ends a run whose loss is not finite; at each checkpoint, renews loss.csv and loss.png."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= control.should_save  # no row averages across a checkpoint, so that resuming changes none

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            write_history(Path(args.output_dir), state.log_history)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            raise FloatingPointError(f"the loss is {logs['loss']} at step {state.global_step}: lower the learning_rate")


def write_history(folder: Path, log_history: Sequence[dict]) -> str:
    """Write loss.csv and loss.png from what a Trainer logged; returns the sentence that says what the picture shows."""
    rows: dict[int, dict] = {}
    for entry in log_history:
        if "loss" in entry or "eval_loss" in entry:  # not the summary of the whole run
            values = {column: entry[name] for column, name in COLUMNS.items() if name in entry}
            rows[entry["step"]] = rows.get(entry["step"], {}) | values
    with (folder / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows.values())
    places, series = {}, {}
    for label, column in (("training", "loss"), ("validation", "validation_loss")):
        having = [row for row in rows.values() if column in row]
        if len(having) > 1:
            places[label], series[label] = ([row[name] for row in having] for name in ("step", column))
    if not series:
        return "Too few steps for a loss curve."
    curves(series, x=places, from_zero=True, digits=3, path=folder / "loss.png")
    return curves_sentence(series, x=places, digits=3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line with `arguments`, or with those of the process.

    Bad input ends the process with status 2, an interrupt (Ctrl-C) with status 130, both with one sentence.
    """
    parser = _Parser((PrefixArguments, TrainingArguments), prog="helpers.train", usage=USAGE)
    with _ended_by_interrupt(lambda: "before the first step; the same command begins where this one did"):
        try:
            demo, arguments = _without_demo(arguments)
            ours, args = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
            first = args.process_index == 0
            say = partial(print, flush=True) if first else lambda *_: None
            _check_engine(args)
            with args.main_process_first():
                if demo and ours.train_file == DEMO["train_file"]:
                    write_demo(Path(ours.train_file), say)
            train, validation = _read_data(ours, args)
            set_seed(args.seed)
            say(f"loading {ours.base}")
            with args.main_process_first():  # which downloads for the others
                model, tokenizer = load_base(ours.base)
            form = _form(ours)
            continues = _continues(model, tokenizer, form)
            prefix = Prefix.for_model(
                model,
                prefix_length=ours.prefix_length,
                sites=None if ours.sites is None else tuple(ours.sites),
                mid_dim=ours.mid_dim,
                dropout=ours.prefix_dropout,
                init_std=ours.init_std,
            )
            settings = settings_of(asdict(ours), args, train, validation, prefix)
            checkpoint = checkpoint_to_resume(args, settings)
        except (OSError, TypeError, ValueError) as error:
            parser.error(" ".join(str(error).split()))
        folder = Path(args.output_dir)
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            # The others may be reading it.
            replace_file(folder / "run.json", (json.dumps(settings, indent=2) + "\n").encode())
        frozen, trained = (sum(p.numel() for p in module.parameters()) for module in (model, prefix))
        say(f"{ours.base}: {frozen:,} frozen numbers, {trained:,} trained ({trained / frozen:.2%})")
        say(f"{len(train):,} pairs to learn, {len(validation):,} to evaluate on")

        if args.generation_max_length is None:
            args.generation_max_length = ours.max_target_length + (not continues)  # a T5 begins with a start token
        score = _ExactMatch(tokenizer, [target for _, target in validation])
        prefixed = ModelWithPrefix(model, prefix)
        read = partial(
            data_set,
            tokenizer,
            max_source_length=ours.max_source_length,
            max_target_length=ours.max_target_length,
            say=say,
            form=form if continues else None,
        )
        trainer = (ContinuationTrainer if continues else Seq2SeqTrainer)(
            model=prefixed,
            args=args,
            data_collator=ContinuationCollator(tokenizer) if continues else DataCollatorForSeq2Seq(tokenizer, prefixed),
            train_dataset=read(train),
            eval_dataset=read(validation) if validation else None,
            processing_class=tokenizer,
            compute_metrics=score,
            callbacks=[_Watch()],
        )
        bar = nullcontext() if args.disable_tqdm else Bar(bool(validation))
        if not args.disable_tqdm:
            trainer.remove_callback(ProgressCallback)
            trainer.add_callback(bar)
        if checkpoint:
            say(f"continuing from {checkpoint}")
            trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            count_in_steps(args, trainer.state)
    with _ended_by_interrupt(lambda: _reached(trainer.state, args, settings)), bar, one_thread_if_small(prefixed):
        if checkpoint and trainer.state.global_step >= trainer.state.max_steps and not args.resume_from_checkpoint:
            # All steps are done, and the Trainer would do one more.
            best = args.load_best_model_at_end
            kept = folder / f"checkpoint-{trainer.state.best_global_step}" if best else checkpoint
            prefixed.load_state_dict(load_file(kept / "model.safetensors"))
        else:
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            except FloatingPointError as error:
                sys.exit(f"helpers.train: {error}")
        state = copy.deepcopy(trainer.state)  # as it is before the last evaluation
        scores = {"training_pairs": len(train), "steps": state.global_step, "prefix_numbers": trained}
        if args.load_best_model_at_end:
            scores["step_of_prefix"] = state.best_global_step
        if validation:
            metrics = trainer.evaluate()
            scores["validation_pairs"] = len(validation)
            scores["validation_loss"] = metrics["eval_loss"]
            scores["exact_match"] = metrics["eval_exact_match"]
            scores["exact_match_of_most_frequent_target"] = majority_baseline([t for _, t in train], score.targets)
            say(f"exact match {scores['exact_match']:.1%} on {len(validation):,} pairs")
        if first:
            say(write_history(folder, state.log_history))
            prefix.save_pretrained(folder / "prefix")
            if ours.mid_dim:
                prefix.fold().save_pretrained(folder / "prefix_folded")
            with (folder / "predictions.jsonl").open("w", encoding="utf-8") as file:
                for (source, target), text in zip(validation, score.texts, strict=True):
                    entry = {"source": source, "target": target, "prediction": text}
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            (folder / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
            say(f"prefix, scores, predictions and loss curve are in {folder}; to use the prefix, in Python:")
            say("\n" + textwrap.indent(_use(ours, folder, validation or train), " " * 4))
        trainer.accelerator.end_training()
    if args.world_size > 1 and __name__ == "__main__":
        # Everything is written. Taking down what is left of torch's process group waits for ever in one run of ten
        # (torch 2.13, Gloo), in a process whose Python has returned: so end without it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _without_demo(arguments: Sequence[str] | None) -> tuple[bool, list[str]]:
    """Whether --demo is asked for, and the arguments without it; behind those of the demo, which they override."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--demo", action="store_true")
    demo, others = parser.parse_known_args(arguments)
    return demo.demo, [f"--{name}={value}" for name, value in DEMO.items() if demo.demo] + others


def write_demo(path: Path, say: Callable[[str], None]) -> None:
    """Write the training pairs of the task "german" to a JSONL file; one that is there already stays as it is."""
    if path.exists():
        say(f"{path} is there already, and is read as it stands")
        return
    pairs = load_task("german").train
    lines = [json.dumps({"source": source, "target": target}, ensure_ascii=False) for source, target in pairs]
    replace_file(path, ("\n".join(lines) + "\n").encode())
    say(f"wrote {path}, {len(lines):,} lines such as {lines[0]}")


@contextmanager
def _ended_by_interrupt(where: Callable[[], str]) -> Iterator[None]:
    """Within the block, an interrupt ends the process with status 130; the first of several says `where` it was."""
    try:
        yield
    except KeyboardInterrupt:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would break off the sentence
        if os.environ.get("RANK", "0") == "0":
            print(f"\nhelpers.train: stopped {where()}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, before)
        sys.exit(130)


def _reached(state: TrainerState, args: TrainingArguments, settings: dict) -> str:
    """At which step a run was stopped, and what the same command will do."""
    checkpoint = checkpoint_to_resume(args, settings)
    following = f"continues from {checkpoint}" if checkpoint else "starts again, since no checkpoint is whole yet"
    step = f"at step {state.global_step} of {state.max_steps}" if state.max_steps else "before the first step"
    return f"{step}; the same command {following}"


def _use(ours: PrefixArguments, folder: Path, pairs: Sequence[Pair]) -> str:
    """Python that loads the prefix and generates for the shortest source, so that the lines stay short."""
    source = min((source for source, _ in pairs if source.strip()), key=len, default="")
    options = "".join(f", {name}={value!r}" for name, value in _form(ours).items() if value)
    lines = f"""\
from helpers import Prefix, generate_texts, load_base
model, tokenizer = load_base({ours.base!r})
with Prefix.from_pretrained({str(folder / "prefix")!r}).attached(model):
    print(generate_texts(model, tokenizer, [{source!r}], max_new_tokens={ours.max_target_length}{options}))"""
    # In a string, Python reads what a narrow terminal cannot show from its escape just as well.
    encoding = sys.stdout.encoding or "ascii"
    return lines.encode(encoding, "backslashreplace").decode(encoding)


def _check_engine(args: TrainingArguments) -> None:
    """Raise ValueError for what would train something else than was asked for, or nothing at all."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if args.world_size != started:
        raise ValueError(
            f"{started} processes were started, but each would train alone: use torchrun, without use_cpu=False"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs: start one for each with torchrun --nproc_per_node {args.n_gpu} -m "
            "helpers.train, or show it one with CUDA_VISIBLE_DEVICES=0"
        )
    if args.fp16:
        raise ValueError("T5 overflows in float16: use bf16")
    if not args.predict_with_generate or args.prediction_loss_only:
        raise ValueError(
            "the scores come from generated texts: leave predict_with_generate and prediction_loss_only alone"
        )


def _form(ours: PrefixArguments) -> dict:
    """How a decoder alone is given a source: what `continuations` takes."""
    return {"separator": ours.separator, "chat": ours.chat}


def _continues(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, form: dict) -> bool:
    """Whether the model is a decoder alone, which writes a target behind its source.

    Raises ValueError for a model that writes no texts, and for a form of texts that it cannot have.
    """
    if model.config.is_encoder_decoder:
        check_no_form(model, **form)
        return False
    if "decoder" not in sites_of(model):
        raise ValueError(f"a {type(model).__name__} writes no texts, from which it could learn and be scored")
    continuations(tokenizer, [("source", "target")], **form)
    return True


def _read_data(ours: PrefixArguments, args: TrainingArguments) -> tuple[list[Pair], list[Pair]]:
    """The pairs to learn and those to evaluate on; without any of the latter, evaluation is switched off."""
    pairs = read_pairs(ours.train_file)
    if ours.validation_file:
        return pairs, read_pairs(ours.validation_file)
    train, validation = hold_out(pairs, ours.validation_share, args.seed)
    if not validation:
        if args.load_best_model_at_end:
            raise ValueError("load_best_model_at_end needs pairs to evaluate on")
        args.eval_strategy = "no"
    return train, validation


if __name__ == "__main__":
    signal.signal(signal.SIGINT, AT_START)
    try:
        main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would bring the traceback of a process that ends
