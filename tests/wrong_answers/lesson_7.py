from contextlib import nullcontext
from functools import partial

import torch


def shifted_right(ids, start):
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)


def labels_of(ids, mask):
    return torch.where(mask == 1, ids, -100)


def step(model, prefix, optimizer, batch, *, clear=True, move=True, attach=True, record=True, clear_again=False):
    if clear:
        optimizer.zero_grad()
    with prefix.attached(model) if attach else nullcontext(), torch.set_grad_enabled(record):
        loss = model(**batch).loss
    loss.backward()
    if clear_again:
        prefix.zero_grad()
    if move:
        optimizer.step()
    return loss


def step_first(model, prefix, optimizer, batch):
    optimizer.step()
    return step(model, prefix, optimizer, batch, move=False)


def loss_behind_the_step(model, prefix, optimizer, batch):
    step(model, prefix, optimizer, batch)
    with prefix.attached(model):
        return model(**batch).loss.item()


def base_moves_too(model, prefix, optimizer, batch):
    model.weight.data += 0.01
    return step(model, prefix, optimizer, batch)


WRONG_ANSWERS = {
    "check_teacher_forcing": [
        (lambda ids, mask, start: (ids, labels_of(ids, mask)), "the very token that it has to write"),
        (
            lambda ids, mask, start: (torch.cat([ids[:, 1:], 0 * ids[:, :1]], dim=1), labels_of(ids, mask)),
            "to the left",
        ),
        (lambda ids, mask, start: (shifted_right(ids, start), ids), "padding counts in the loss"),
        (lambda ids, mask, start: (shifted_right(ids, start), labels_of(ids, 1 - mask)), "1 is a token"),
        (lambda ids, mask, start: (shifted_right(labels_of(ids, mask), start), labels_of(ids, mask)), "holds -100"),
        (
            lambda ids, mask, start: (shifted_right(ids, start), shifted_right(labels_of(ids, mask), start)),
            "labels were shifted too",
        ),
        (
            lambda ids, mask, start: (ids, shifted_right(labels_of(ids, mask), start)),
            "the labels were shifted, and not",
        ),
        (
            lambda ids, mask, start: (ids, shifted_right(labels_of(ids, mask), -100)),
            "the labels were shifted, and not",
        ),
        (
            lambda ids, mask, start: (shifted_right(ids, start), shifted_right(labels_of(ids, mask), -100)),
            "the labels were shifted too",
        ),
        (
            lambda ids, mask, start: (
                ids,
                torch.cat([labels_of(ids, mask)[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1),
            ),
            "nobody learns to write the first token",
        ),
        (
            lambda ids, mask, start: (torch.cat([0 * ids[:, :1] + start, ids], dim=1), labels_of(ids, mask)),
            "one longer than the labels",
        ),
        (lambda ids, mask, start: (shifted_right(ids, 0), labels_of(ids, mask)), "begins with 0"),
        (lambda ids, mask, start: (labels_of(ids, mask), shifted_right(ids, start)), "exchanged"),
        (lambda ids, mask, start: labels_of(ids, mask), "should be 2 results, and is one Tensor"),
        (lambda ids, mask, start: (shifted_right(ids, start), torch.where(mask, ids, -100)), "raised RuntimeError"),
    ],
    "check_count": [
        (3 * 2 * 5 * 192, "a key and a value"),
        (2 * 2 * 5 * 192, "this is one site"),
        (3 * 2 * 2 * 192, "this is one slot"),
        (3 * 2 * 2 * 5 * 48, "this is one head"),
        (3 * 2 * 2 * 5 * 128, "d_model"),
        (3 * 4 * 2 * 5 * 192, "four layers at each site"),
        (1000, "not what comes out"),
    ],
    "check_training_step": [
        (partial(step, clear=False), "add up"),
        (partial(step, move=False), "has not moved"),
        (partial(step, clear_again=True), "has not moved"),
        (partial(step, attach=False), "nothing that is trained has reached the loss"),
        (partial(step, record=False), "nothing that is trained has reached the loss"),
        (step_first, "steps before backward"),
        (loss_behind_the_step, "you returned the loss after the step"),
        (base_moves_too, "What your steps give 0 has the right shape"),
        (step, "return the loss as a number"),
        (lambda model, prefix, optimizer, batch: prefix(model), "raised NotImplementedError: Module"),
    ],
    "check_months": [
        (["wrong"] * 4, "as in a language that the base knows"),
        (["right"] * 4, "never seen"),
        (["wrong", "wrong", "right", "right"], "the other two"),
        (("right", "wrong", "wrong", "wrong"), "Look at Oktober"),
        (["Right", "right", "right", "wrong"], "Look at Dezember"),
        ([True, True, False, False], "in quotation marks"),
        (["wrong", "right", "right", "wrong"], "not what comes out"),
    ],
}
