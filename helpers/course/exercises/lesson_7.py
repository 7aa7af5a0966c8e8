"""Checks of lesson 7's exercises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.course.exercises.checking import (
    CORRECT,
    WRONG,
    Exercise,
    Mistake,
    Outcome,
    Prediction,
    Verdict,
    random_tensor,
)

check_count = Prediction(
    right=11_520,
    because="3 sites, 2 layers, a key and a value in each, 5 slots, and 4 * 48 numbers in one of them.",
    mistakes=[
        (3840, "this is one site; the prefix has three."),
        (2880, "this is one head; a layer has four, of 48 numbers each."),
        (5760, "a slot has a key and a value."),
        (7680, "this is with a width of 128, d_model; keys and values are num_heads * d_kv = 192 wide."),
        (2304, "this is one slot; the prefix has five."),
        (
            34_560,
            "encoder and decoder have 2 layers each; the cross-attention's are those of the decoder, so 6 in all.",
        ),
        (23_040, "this is with four layers at each site; the encoder has two, and the decoder two."),
    ],
)


# One step


class _Model(nn.Module):
    """What a training step sees of a frozen model: it has a loss, on which a prefix has an influence if attached."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.prefix: tuple[Tensor, ...] = ()

    def forward(self, inputs: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=F.mse_loss((inputs + sum(self.prefix)).tanh() @ self.weight, labels))


class _Prefix(nn.Module):
    def __init__(self, slot: Tensor):
        super().__init__()
        self.slot = nn.Parameter(slot)

    @contextmanager
    def attached(self, model: _Model) -> Iterator[_Model]:
        model.prefix = (self.slot,)
        try:
            yield model
        finally:
            model.prefix = ()


@dataclass(frozen=True)
class _Setup:
    slot: Tensor
    weight: Tensor
    inputs: Tensor
    labels: Tensor

    def __repr__(self) -> str:
        return f"a model of {len(self.slot)} features, trained for {len(self.inputs)} steps"


def _setup(draw: torch.Generator, features: int, targets: int, steps: int) -> _Setup:
    shapes = (features,), (features, targets), (steps, 7, features), (steps, 7, targets)
    return _Setup(*(random_tensor(draw, *shape) for shape in shapes))


class _StepExercise(Exercise):
    """Runs an answer for some steps, each with a new batch, and compares the losses and the prefix in the end."""

    def _outcome(self, answer: Callable, toy: tuple) -> Outcome:
        def run(setup):
            model, prefix = _Model(setup.weight.clone()), _Prefix(setup.slot.clone())
            optimizer = torch.optim.AdamW(prefix.parameters(), lr=0.1)
            losses = []
            for batch in zip(setup.inputs, setup.labels, strict=True):
                losses.append(answer(model, prefix, optimizer, dict(zip(("inputs", "labels"), batch, strict=True))))
                if losses[-1] is None:
                    return None
            return torch.stack([torch.as_tensor(loss).detach() for loss in losses]), prefix.slot.detach()

        return super()._outcome(run, toy)

    def judge(self, answer: Callable) -> Verdict:
        returned = []

        def watched(*given):
            returned.append(answer(*given))
            return returned[-1]

        verdict = super().judge(wraps(answer)(watched))
        if verdict.state == CORRECT and any(isinstance(loss, Tensor) and loss.requires_grad for loss in returned):
            return Verdict(WRONG, "return the loss as a number, loss.item(): as it is, it keeps all of its step.")
        return verdict


def _step(model, prefix, optimizer, batch) -> float:
    optimizer.zero_grad()
    with prefix.attached(model):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def _without_zero_grad(model, prefix, optimizer, batch):
    with prefix.attached(model):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def _without_step(model, prefix, optimizer, batch):
    with prefix.attached(model):
        return model(**batch).loss.item()


def _without_prefix(model, prefix, optimizer, batch):
    optimizer.zero_grad()
    model(**batch).loss.backward()


def _step_first(model, prefix, optimizer, batch):
    with prefix.attached(model):
        loss = model(**batch).loss
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()
    return loss.item()


def _step_before_all(model, prefix, optimizer, batch):
    optimizer.step()
    optimizer.zero_grad()
    with prefix.attached(model):
        loss = model(**batch).loss
    loss.backward()
    return loss.item()


def _loss_afterwards(model, prefix, optimizer, batch):
    _step(model, prefix, optimizer, batch)
    return _without_step(model, prefix, optimizer, batch)


_STEPS_FIRST = "the optimiser steps before backward, so that each step uses the gradients of the last batch."

check_training_step = _StepExercise(
    right=_step,
    toys=lambda draw: [
        (
            _Setup(
                random_tensor(draw, 5),
                random_tensor(draw, 5, 3),
                random_tensor(draw, 4, 7, 5),
                random_tensor(draw, 4, 7, 3),
            ),
        ),
        (
            _Setup(
                random_tensor(draw, 2),
                random_tensor(draw, 2, 6),
                random_tensor(draw, 3, 5, 2),
                random_tensor(draw, 3, 5, 6),
            ),
        ),
    ],
    compared="What your steps give",
    examples="small models, with a few steps each",
    mistakes=[
        Mistake(
            _without_zero_grad,
            "the gradients of earlier steps are still there and add up: call optimizer.zero_grad() before backward.",
        ),
        Mistake(
            _without_step,
            "the prefix has not moved. Is backward() missing, or optimizer.step(), or is zero_grad() between the two?",
        ),
        Mistake(
            _without_prefix,
            "nothing that is trained has reached the loss: attach the prefix while the model runs, and let gradients "
            "be recorded (no torch.no_grad()).",
        ),
        Mistake(_step_first, _STEPS_FIRST),
        Mistake(_step_before_all, _STEPS_FIRST),
        Mistake(_loss_afterwards, "you returned the loss after the step; return the one that backward started from."),
    ],
)


class _Words(Prediction):
    """A prediction of words, whatever their capitals."""

    def judge(self, expected) -> Verdict:
        if isinstance(expected, list | tuple):
            if any(isinstance(word, bool) for word in expected):
                return Verdict(WRONG, 'write "right" or "wrong" for each, in quotation marks.')
            expected = [word.lower() if isinstance(word, str) else word for word in expected]
        return super().judge(expected)


check_months = _Words(
    right=["right", "right", "wrong", "wrong"],
    because="juli and oktober the base has written for other languages; Dezember and März are spelled so in none.",
    mistakes=[
        (["wrong", "wrong", "wrong", "wrong"], "some German months are spelled as in a language that the base knows."),
        (
            ["right", "right", "right", "right"],
            "then twenty steps would do for all; two of these the base has never seen.",
        ),
        (["wrong", "wrong", "right", "right"], "the other two: ask which spellings Dutch or Danish have too."),
    ],
    hints=[
        "Look at Juli: the month is juli in Dutch, Danish and Swedish.",
        "Look at Oktober: the month is oktober in Dutch, Danish and Swedish.",
        "Look at Dezember: Dutch and Danish write december, and only Portuguese has a z, in dezembro.",
        "Look at März: which of the 29 languages writes it like this?",
    ],
)


# What the decoder reads


def _teacher_forcing(target_ids: Tensor, attention_mask: Tensor, start_id: int) -> tuple[Tensor, Tensor]:
    decoder_input_ids = F.pad(target_ids[:, :-1], (1, 0), value=start_id)
    return decoder_input_ids, target_ids.masked_fill(attention_mask == 0, -100)


def _behind_start(ids: Tensor, start_id: int) -> Tensor:
    return F.pad(ids[:, :-1], (1, 0), value=start_id)


def _padded_targets(draw: torch.Generator, batch: int, target: int, start_id: int) -> tuple[Tensor, Tensor, int]:
    """Targets of several lengths, padded with 0; no id is the start id."""
    lengths = target - torch.arange(batch) % (target - 2)
    attention_mask = (torch.arange(target) < lengths[:, None]).long()
    return torch.randint(10, 50, (batch, target), generator=draw) * attention_mask, attention_mask, start_id


check_teacher_forcing = Exercise(
    right=_teacher_forcing,
    toys=lambda draw: [_padded_targets(draw, 3, 5, start_id=2), _padded_targets(draw, 4, 7, start_id=3)],
    mistakes=[
        Mistake(
            lambda ids, mask, start: (ids, ids.masked_fill(mask == 0, -100)),
            "the decoder reads at each position the very token that it has to write there, so that it learns to copy "
            "its input: shift it right, behind the start token.",
        ),
        Mistake(
            lambda ids, mask, start: (F.pad(ids[:, 1:], (0, 1)), ids.masked_fill(mask == 0, -100)),
            "the decoder's input was shifted to the left, so that it reads the token after the one it has to write.",
        ),
        Mistake(
            lambda ids, mask, start: (_behind_start(ids, start), ids),
            "padding counts in the loss: its labels must be -100.",
        ),
        Mistake(
            lambda ids, mask, start: (_behind_start(ids, start), ids.masked_fill(mask == 1, -100)),
            "the tokens are ignored and the padding counts: in the attention mask, 1 is a token.",
        ),
        Mistake(
            lambda ids, mask, start: (
                _behind_start(ids.masked_fill(mask == 0, -100), start),
                ids.masked_fill(mask == 0, -100),
            ),
            "the decoder's input holds -100, which is no token: shift the ids, not the labels.",
        ),
        Mistake(
            lambda ids, mask, start: (
                _behind_start(ids, start),
                _behind_start(ids.masked_fill(mask == 0, -100), start),
            ),
            "the labels were shifted too: at position 0 the decoder reads the start token and writes the first token.",
        ),
        *(
            Mistake(
                lambda ids, mask, start, first=first: (
                    ids,
                    F.pad(ids.masked_fill(mask == 0, -100)[:, :-1], (1, 0), value=start if first is None else first),
                ),
                "the labels were shifted, and not the decoder's input: place i reads token i - 1 and writes token i.",
            )
            for first in (None, -100)
        ),
        Mistake(
            lambda ids, mask, start: (
                _behind_start(ids, start),
                F.pad(ids.masked_fill(mask == 0, -100)[:, :-1], (1, 0), value=-100),
            ),
            "the labels were shifted too: at position 0 the decoder reads the start token and writes the first token.",
        ),
        Mistake(
            lambda ids, mask, start: (ids, F.pad(ids.masked_fill(mask == 0, -100)[:, 1:], (0, 1), value=-100)),
            "place i reads token i and writes token i + 1, so that nobody learns to write the first token, behind the "
            "start token.",
        ),
        Mistake(
            lambda ids, mask, start: (F.pad(ids, (1, 0), value=start), ids.masked_fill(mask == 0, -100)),
            "the decoder's input is one longer than the labels: its last token has nothing left to write.",
        ),
        Mistake(
            lambda ids, mask, start: (_behind_start(ids, 0), ids.masked_fill(mask == 0, -100)),
            "the decoder's input begins with 0 instead of start_id.",
        ),
        Mistake(
            lambda ids, mask, start: _teacher_forcing(ids, mask, start)[::-1],
            "the two are exchanged: return (decoder_input_ids, labels).",
        ),
    ],
)
