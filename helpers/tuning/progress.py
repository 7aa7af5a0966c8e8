"""The progress bars of `python -m helpers.train`."""

import math
import time

from transformers import TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback


class Bar(ProgressCallback):
    """transformers' progress bars, with the loss, one line for each evaluation, and the time left, evaluations and all.

    tqdm's own estimate knows of steps alone.
    """

    def __init__(self, has_validation: bool):
        super().__init__()
        self.has_validation = has_validation
        self.loss = ""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self.first_step, self.evaluations, self.evaluating = state.global_step, 0, 0.0
        self.began = self.last_step_ended = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.last_step_ended = time.perf_counter()
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(self.loss + self._time_left(state, control, args), refresh=False)
        super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, args, state, control, **kwargs):
        super().on_prediction_step(args, state, control, **kwargs)
        if self.prediction_bar is not None:
            self.prediction_bar.set_description("evaluating")

    def on_evaluate(self, args, state, control, **kwargs):
        super().on_evaluate(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.evaluations += 1
            self.evaluating += time.perf_counter() - self.last_step_ended

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None:
            return
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}, "
        if "eval_loss" in logs:
            self.training_bar.write(
                f"step {state.global_step}: validation loss {logs['eval_loss']:.4f}, "
                f"exact match {logs['eval_exact_match']:.1%}"
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Leave the line on which a bar stands."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()

    def _time_left(self, state, control, args) -> str:
        """By the mean of the steps and of the evaluations so far; before the first of these, it says how many come."""
        seconds = self.last_step_ended - self.began - self.evaluating
        left = seconds / (state.global_step - self.first_step) * (state.max_steps - state.global_step)
        evaluations = evaluations_left(args, state) + control.should_evaluate if self.has_validation else 0
        if self.evaluations:
            left += evaluations * self.evaluating / self.evaluations
        minutes, seconds = divmod(round(left), 60)
        text = f"about {minutes}:{seconds:02}"
        if evaluations and not self.evaluations:
            text += f" and {evaluations} evaluation{'s' * (evaluations > 1)}"
        return f"{text} left"


def evaluations_left(args: TrainingArguments, state: TrainerState) -> int:
    """How many evaluations come after the step reached: those of the training, and the one at its end."""
    in_training = 0
    if args.eval_strategy == "steps":
        in_training = state.max_steps // state.eval_steps - state.global_step // state.eval_steps
    elif args.eval_strategy == "epoch":
        in_training = math.ceil(state.num_train_epochs - state.epoch)
    return in_training + 1
