"""Thirty lines that people copy: a prefix encoder, and a frozen model that is given its numbers as a cache.

They do what the published code of P-tuning v2 (Liu et al. 2022, section 3) does, operation by operation: an embedding
looked up with `arange`, an MLP of two linear layers with a tanh between them, `view`, dropout, `permute`, `split`, and
a mask lengthened by ones. Lesson 4 shows them whole, lessons 4 to 6 explain them line by line, and lesson 6 says where
they agree with `helpers.T5Prefix` and where they do not. Use them to read; to work with, there is `helpers`.

One step is younger than that code: a model of transformers 5 takes a `DynamicCache`, not a tuple of pairs.
"""

import html
import inspect
from collections.abc import Collection

import torch
from torch import nn
from transformers import DynamicCache

from helpers.course.figures.canvas import has_kernel


class PrefixEncoder(nn.Module):
    def __init__(self, prefix_length, num_layers, model_dim, mid_dim):
        super().__init__()
        self.embedding = nn.Embedding(prefix_length, model_dim)
        self.mlp = nn.Sequential(
            nn.Linear(model_dim, mid_dim),
            nn.Tanh(),
            nn.Linear(mid_dim, num_layers * 2 * model_dim),
        )

    def forward(self, slots):
        return self.mlp(self.embedding(slots))


class PrefixModel(nn.Module):
    def __init__(self, model, encoder, prefix_length, num_layers, num_heads, head_dim):
        super().__init__()
        self.model = model.requires_grad_(False)
        self.encoder = encoder
        self.dropout = nn.Dropout(0.1)
        self.slots = torch.arange(prefix_length)
        self.shape = (num_layers * 2, num_heads, head_dim)

    def get_prompt(self, batch_size):
        slots = self.slots.expand(batch_size, -1)
        flat = self.encoder(slots)
        rows = flat.view(*slots.shape, *self.shape)
        rows = self.dropout(rows)
        return rows.permute([2, 0, 3, 1, 4]).split(2)

    def forward(self, input_ids, attention_mask, **others):
        past_key_values = DynamicCache(self.get_prompt(len(input_ids)))
        ones = torch.ones(len(input_ids), len(self.slots))
        mask = torch.cat((ones, attention_mask), dim=1)
        return self.model(input_ids, attention_mask=mask, past_key_values=past_key_values, **others)


SOURCE = inspect.getsource(PrefixEncoder) + "\n\n" + inspect.getsource(PrefixModel)
LINES = [line for line in SOURCE.splitlines() if line.strip()]
# Long lines scroll, and no line covers the underscores of the one above.
_LOOK = "font-family: monospace; white-space: pre; overflow-x: auto; line-height: 1.6"
_LIT = "background: #FFE08A; color: black"
# Which lines have been explained when a lesson ends.
AFTER_LESSON = {4: [12, 13, *range(26, 30)], 5: [*range(1, 14), *range(16, 30)], 6: [*range(1, 31)]}


def show_lines(lit: Collection[int] = (), known: Collection[int] = ()) -> None:
    """Show the thirty lines, numbered from 1, with the lines `lit` marked, and those `known` ticked.

    In a notebook the lit lines have a background; in text, and for whoever cannot see it, they begin with an arrow.

    Raises ValueError for a number that no line has.
    """
    strange = sorted({*lit, *known} - {*range(1, len(LINES) + 1)})
    if strange:
        raise ValueError(f"the lines have the numbers 1 to {len(LINES)}, got {strange}")
    plain, marked, number = [], [], 0
    for line in SOURCE.splitlines():
        if not line.strip():
            plain.append("")
            marked.append("")
            continue
        number += 1
        sign = "➜" if number in lit else "✓" if number in known else " "
        text = f"{sign} {number:2}  {line}"
        plain.append(text)
        text = html.escape(text)
        marked.append(f'<mark style="{_LIT}">{text}</mark>' if number in lit else text)
    if not has_kernel():
        print("\n".join(plain))
        return
    from IPython.display import display

    page = f'<pre tabindex="0" style="{_LOOK}">' + "\n".join(marked) + "</pre>"
    display({"text/html": page, "text/plain": "\n".join(plain)}, raw=True)
