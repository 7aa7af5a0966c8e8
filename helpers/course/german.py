"""German dates for a frozen T5 that has never seen one: the task on which lesson 5 tries its prefix encoders.

What lies around the encoder, a T5 with three sites and the training loop, is opened in lessons 6 and 7.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn

from helpers.bases.load import load_base
from helpers.bases.tasks import load_task
from helpers.tuning.attach import T5Prefix
from helpers.tuning.families import SITES
from helpers.tuning.training import collate, fit, generate_texts

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 6, 4, 48  # two layers in the encoder, two in the decoder, two that connect them
ASKED = 64  # dates whose loss is measured; none of them is trained on


def german_loss(encoder: Callable[[], Tensor] | None = None) -> float:
    """The loss on German dates: of the frozen T5 alone, or with the keys and values that `encoder()` gives.

    `encoder()` is `[6, 2, 1, 4, slots, 48]`: a key and a value for each of the T5's six attention layers.
    """
    model, _, asked = _base()
    with _attached(model, encoder), torch.no_grad():
        return model(**asked).loss.item()


def write_date(date: str, encoder: Callable[[], Tensor] | None = None) -> str:
    """What the T5 makes of a date such as "2030-05-17 Fri", alone or with the keys and values of `encoder()`."""
    model, tokenizer, _ = _base()
    with _attached(model, encoder):
        return generate_texts(model, tokenizer, [date])[0]


def learn_german(encoder: nn.Module, rate: float, seed: int = 0, steps: int = 30) -> list[float]:
    """Train the encoder, and nothing of the T5, on German dates, 16 a step; the loss of each step."""
    model, tokenizer, _ = _base()
    with _attached(model, encoder):
        return fit(
            model,
            encoder.parameters(),
            tokenizer,
            load_task("german").train,
            steps=steps,
            batch_size=16,
            learning_rate=rate,
            seed=seed,
            lean=True,
        )


class _Given(T5Prefix):
    """A T5Prefix whose keys and values come from one call, those of its sites one behind the other."""

    def __init__(self, model: nn.Module, encoder: Callable[[], Tensor]):
        shell = T5Prefix.for_model(model, prefix_length=1)
        super().__init__(dict(shell.encoders), shell.base)
        self._encoder = [encoder]  # in a list, since it is no part of the prefix

    def key_values(self, site: str) -> Tensor:
        return self._encoder[0]().unflatten(0, (len(SITES), -1))[SITES.index(site)]


def _attached(model: nn.Module, encoder: Callable[[], Tensor] | None) -> AbstractContextManager:
    return nullcontext() if encoder is None else _Given(model, encoder).attached(model)


@cache
def _base():
    model, tokenizer = load_base("dates")
    pairs = load_task("german").validation[:ASKED]
    return model.requires_grad_(False), tokenizer, collate(tokenizer, pairs)
