import torch
from torch import Tensor


def shifted_right(ids, start):
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)


def labels_of(ids, mask):
    return torch.where(mask == 1, ids, -100)


def stacked(prefixes, rows, mask=lambda visible: visible):
    heads, _, d_kv = prefixes[0].shape
    longest = max(prefix.shape[1] for prefix in prefixes)
    keys = torch.zeros(len(rows), heads, longest, d_kv, dtype=prefixes[0].dtype)
    visible = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        if row is not None:
            length = prefixes[row].shape[1]
            keys[number, :, :length] = prefixes[row]
            visible[number, :length] = True
    return keys, mask(visible)


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
            lambda ids, mask, start: (torch.cat([0 * ids[:, :1] + start, ids], dim=1), labels_of(ids, mask)),
            "one longer than the labels",
        ),
        (lambda ids, mask, start: (shifted_right(ids, 0), labels_of(ids, mask)), "begins with 0"),
        (lambda ids, mask, start: (labels_of(ids, mask), shifted_right(ids, start)), "exchanged"),
        (lambda ids, mask, start: labels_of(ids, mask), "should be 2 results, and is one Tensor"),
        (lambda ids, mask, start: (shifted_right(ids, start), torch.where(mask, ids, -100)), "raised RuntimeError"),
    ],
    "check_training_bytes": [
        (lambda base, prefix: tuple((base + prefix) * times for times in (4, 4, 8)), "full fine-tuning"),
        (lambda base, prefix: (4 * base + 4 * prefix, 4 * base + 4 * prefix, 2 * 4 * prefix), "have no gradients"),
        (lambda base, prefix: (4 * base + 4 * prefix, 4 * prefix, 2 * 4 * (base + prefix)), "what it trains"),
        (lambda base, prefix: (4 * base + 4 * prefix, 4 * prefix, 4 * prefix), "two numbers for each"),
        (lambda base, prefix: (4 * base + 4 * prefix, 4 * prefix, 12 * prefix), "two moments"),
        (lambda base, prefix: (base + prefix, prefix, prefix + prefix), "float32 takes 4 bytes"),
        (lambda base, prefix: (2 * base + 2 * prefix, 2 * prefix, 4 * prefix), "the bytes of float16"),
        (lambda base, prefix: (4 * base, 4 * prefix, 8 * prefix), "missing among the weights"),
        (lambda base, prefix: (4 * prefix, 4 * prefix, 8 * prefix), "lie in memory too"),
        (lambda base, prefix: (4.0 * (base + prefix), 4 * prefix, 8 * prefix), "is 4120.0, expected 4120"),
        (lambda base, prefix: 4 * (base + prefix) + 12 * prefix, "should be 3 results, and is one int"),
    ],
    "check_stack_prefixes": [
        (lambda prefixes, rows: stacked(prefixes, rows, mask=lambda visible: visible | True), "every slot is visible"),
        (lambda prefixes, rows: stacked(prefixes, rows, mask=torch.logical_not), "upside down"),
        (lambda prefixes, rows: stacked(prefixes, [row or 0 for row in rows]), "got the first prefix"),
        (
            lambda prefixes, rows: stacked(prefixes, [len(prefixes) - 1 if row is None else row for row in rows]),
            "got the last prefix",
        ),
        (
            lambda prefixes, rows: tuple(part.flip(-1 if part.ndim == 2 else -2) for part in stacked(prefixes, rows)),
            "Your result 0",
        ),
        (
            lambda prefixes, rows: tuple(
                part.flip(-1 if part.ndim == 2 else -2)
                for part in stacked([prefix.flip(1) for prefix in prefixes], rows)
            ),
            "padded in front",
        ),
        (lambda prefixes, rows: stacked(prefixes, [row or None for row in rows]), "false for 0 too"),
        (lambda prefixes, rows: stacked(prefixes, sorted(rows, key=str)), "Your result 0"),
        (lambda prefixes, rows: stacked(prefixes, rows)[0], "yours is one Tensor"),
        (lambda prefixes, rows: (stacked(prefixes, rows)[0], rows), "mask should be a tensor, and is a list"),
        (lambda prefixes, rows: stacked(prefixes, rows, mask=Tensor.long), r"bool \[batch, longest\] = \[6, 3\]"),
        (
            lambda prefixes, rows: (stacked(prefixes, rows)[0][:, :, :1], stacked(prefixes, rows)[1]),
            r"\[batch, heads, longest, d_kv\] with 6 rows and 3 slots, and are \[6, 4, 1, 5\]",
        ),
        (lambda prefixes, rows: torch.stack([prefixes[row] for row in rows]), "raised TypeError"),
    ],
}
