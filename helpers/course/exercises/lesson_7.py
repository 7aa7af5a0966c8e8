"""Checks of lesson 7's exercises."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, UnreadableError, random_tensor


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


def _training_bytes(base: int, prefix: int, number: int = 4, moments: int = 2) -> tuple[int, int, int]:
    return number * (base + prefix), number * prefix, number * moments * prefix


check_training_bytes = Exercise(
    right=_training_bytes,
    toys=lambda draw: [(1000, 30), (12_345, 678)],
    examples="pairs of sizes",
    mistakes=[
        Mistake(
            lambda base, prefix: (4 * (base + prefix), 4 * (base + prefix), 8 * (base + prefix)),
            "this is full fine-tuning: a frozen weight has neither a gradient nor moments.",
        ),
        Mistake(
            lambda base, prefix: (4 * (base + prefix), 4 * (base + prefix), 8 * prefix),
            "the frozen weights have no gradients.",
        ),
        Mistake(
            lambda base, prefix: (4 * (base + prefix), 4 * prefix, 8 * (base + prefix)),
            "the optimiser keeps moments for what it trains, the prefix alone.",
        ),
        Mistake(partial(_training_bytes, moments=1), "AdamW keeps two numbers for each that it trains, not one."),
        Mistake(
            partial(_training_bytes, moments=3),
            "the optimiser's part is counted three times: it has two moments; the number itself is a weight.",
        ),
        Mistake(partial(_training_bytes, number=1), "these are numbers; a number in float32 takes 4 bytes."),
        Mistake(partial(_training_bytes, number=2), "these are the bytes of float16; float32 takes 4 for each number."),
        Mistake(
            lambda base, prefix: (4 * base, 4 * prefix, 8 * prefix),
            "the prefix itself is missing among the weights.",
        ),
        Mistake(
            lambda base, prefix: (4 * prefix, 4 * prefix, 8 * prefix),
            "the frozen weights lie in memory too: they need no gradient, but the model still runs on them.",
        ),
    ],
)


def _stack_prefixes(prefixes: list[Tensor], rows: list[int | None]) -> tuple[Tensor, Tensor]:
    longest = max(prefix.shape[1] for prefix in prefixes)
    padded = [F.pad(prefix, (0, 0, 0, longest - prefix.shape[1])) for prefix in prefixes]
    empty = torch.zeros_like(padded[0])
    lengths = torch.tensor([0 if row is None else prefixes[row].shape[1] for row in rows])
    keys = torch.stack([empty if row is None else padded[row] for row in rows])
    return keys, torch.arange(longest) < lengths[:, None]


def _visible_slots(result, prefixes: list[Tensor], rows: list[int | None]) -> tuple[Tensor, Tensor]:
    """The keys with zeros where nobody looks: what stands there does not matter."""
    wanted = [len(rows), max(prefix.shape[1] for prefix in prefixes)]
    if not isinstance(result, tuple | list) or len(result) != 2:
        given = f"{len(result)} results" if isinstance(result, tuple | list) else f"one {type(result).__name__}"
        raise UnreadableError(f"Return two tensors, the keys and which slots are visible; yours is {given}.")
    keys, visible = result
    for name, part in (("keys", keys), ("mask", visible)):
        if not isinstance(part, Tensor):
            raise UnreadableError(f"Your {name} should be a tensor, and is a {type(part).__name__}.")
    if visible.dtype != torch.bool or list(visible.shape) != wanted:
        raise UnreadableError(
            f"Your mask should be bool [batch, longest] = {wanted}, and is {visible.dtype} {list(visible.shape)}."
        )
    if keys.ndim != 4 or [keys.shape[0], keys.shape[2]] != wanted:
        raise UnreadableError(
            f"Your keys should be [batch, heads, longest, d_kv] with {wanted[0]} rows and {wanted[1]} slots, and are "
            f"{list(keys.shape)}."
        )
    return keys.masked_fill(~visible[:, None, :, None], 0.0), visible


def _stack_with_none_as(index: int, prefixes: list[Tensor], rows: list[int | None]) -> tuple[Tensor, Tensor]:
    return _stack_prefixes(prefixes, [index if row is None else row for row in rows])


def _stack_padded_in_front(prefixes: list[Tensor], rows: list[int | None]) -> tuple[Tensor, Tensor]:
    keys, visible = _stack_prefixes(prefixes, rows)
    lengths = visible.sum(dim=1).tolist()
    rolled = [key.roll(visible.shape[1] - length, dims=1) for key, length in zip(keys, lengths, strict=True)]
    return torch.stack(rolled), visible.flip(1)


check_stack_prefixes = Exercise(
    right=_stack_prefixes,
    toys=lambda draw: [
        ([random_tensor(draw, 4, 2, 5), random_tensor(draw, 4, 3, 5)], [1, None, 0, 1, 0, 1]),
        (
            [random_tensor(draw, 2, 4, 3), random_tensor(draw, 2, 1, 3), random_tensor(draw, 2, 6, 3)],
            [2, 1, None, 0, 2],
        ),
    ],
    read=_visible_slots,
    compared="Your result",
    examples="batches",
    mistakes=[
        Mistake(
            lambda prefixes, rows: (
                _stack_prefixes(prefixes, rows)[0],
                torch.ones_like(_stack_prefixes(prefixes, rows)[1]),
            ),
            "every slot is visible: a slot of zeros still takes weight, as lesson 4 showed, so it must be masked.",
        ),
        Mistake(
            lambda prefixes, rows: (_stack_prefixes(prefixes, rows)[0], ~_stack_prefixes(prefixes, rows)[1]),
            "the mask is upside down: True is a slot that the row has.",
        ),
        Mistake(
            partial(_stack_with_none_as, 0),
            "a row of None got the first prefix: it has no visible slot.",
        ),
        Mistake(
            partial(_stack_with_none_as, -1),
            "a row of None got the last prefix: it has no visible slot.",
        ),
        Mistake(
            _stack_padded_in_front,
            "the shorter prefixes were padded in front: the attention would be the same, but put the padding behind.",
        ),
        Mistake(
            lambda prefixes, rows: _stack_prefixes(prefixes, [None if row == 0 else row for row in rows]),
            "rows of prefix 0 have no visible slot: `if row` is false for 0 too; ask `row is None`.",
        ),
    ],
)
