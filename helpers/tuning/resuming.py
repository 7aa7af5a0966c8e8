"""Whether and where a run of `python -m helpers.train` goes on: what it was made with, and its checkpoints."""

import hashlib
import json
import zipfile
from pathlib import Path

from transformers import Seq2SeqTrainingArguments, TrainerState

from helpers._shapes import Pair
from helpers.tuning.attach import Prefix


def settings_of(
    own: dict, args: Seq2SeqTrainingArguments, train: list[Pair], validation: list[Pair], prefix: Prefix
) -> dict:
    """What decides the numbers of a run, of the command's own arguments and of the Trainer's.

    With the same, a run may be continued.
    """
    ignored = {"train_file", "validation_file", "validation_share"}  # their content counts, below
    settings = {name: value for name, value in own.items() if name not in ignored}
    settings |= {
        "sites": list(prefix.sites),
        "chat": own["chat"] or None,
    }  # as runs before there was a choice have them
    for name in """
        num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps learning_rate warmup_steps
        lr_scheduler_type lr_scheduler_kwargs optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
        max_grad_norm label_smoothing_factor seed data_seed bf16 world_size dataloader_drop_last
        train_sampling_strategy neftune_noise_alpha
    """.split():
        settings[name] = getattr(args, name, None)
    weights = {name: numbers for name, numbers in prefix.base.items() if name != "name"}
    for name, content in {"training_pairs": train, "validation_pairs": validation, "base_weights": weights}.items():
        settings[name] = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return json.loads(json.dumps(settings))  # as it will be read


def is_complete(checkpoint: Path, processes: int) -> bool:
    """Whether the checkpoint was written to its end: each process its random numbers, the first then its state."""
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{index}.pth" for index in range(processes)]
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return all(zipfile.is_zipfile(checkpoint / name) for name in names)


def checkpoint_to_resume(args: Seq2SeqTrainingArguments, settings: dict) -> Path | None:
    """The one asked for, or else the last whole one in output_dir, if it was made with the same settings.

    Raises ValueError if it was not, or if the one asked for is not whole.
    """
    folder = Path(args.output_dir)
    if args.resume_from_checkpoint:
        asked_for = Path(args.resume_from_checkpoint)
        if not is_complete(asked_for, args.world_size):
            raise ValueError(f"{asked_for} is no whole checkpoint of {args.world_size} process(es)")
        return asked_for
    numbered = {int(path.name.split("-")[1]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()}
    if not numbered:
        return None
    try:
        made_with = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        raise ValueError(
            f"{folder} holds checkpoints of something else, for it has no readable run.json: give another output_dir"
        ) from None
    other = [f"{name} {made_with.get(name)!r}" for name in settings if made_with.get(name) != settings[name]]
    if other:
        raise ValueError(
            f"{folder} holds checkpoints of a run with {', '.join(other)[:300]}: give another output_dir, delete this "
            "one to start again, or name a checkpoint as resume_from_checkpoint to continue it with other settings"
        )
    latest_first = (numbered[step] for step in sorted(numbered, reverse=True))
    return next((checkpoint for checkpoint in latest_first if is_complete(checkpoint, args.world_size)), None)


def count_in_steps(args: Seq2SeqTrainingArguments, state: TrainerState) -> None:
    """Turn shares of all steps into steps, as a checkpoint holds them; the Trainer would call the two a mismatch."""
    counted = TrainerState()
    counted.compute_steps(args, args.max_steps if args.max_steps > 0 else state.max_steps)
    args.logging_steps, args.eval_steps, args.save_steps = counted.logging_steps, counted.eval_steps, counted.save_steps
