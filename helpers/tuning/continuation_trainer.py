"""transformers' Trainer for a decoder alone: it learns to write targets behind sources, and is scored by what it wrote.

The Seq2SeqTrainer would have it write behind source and target.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Seq2SeqTrainer

from helpers.tuning.continuing import collate_continuations, sources_of, stops_of


@dataclass
class ContinuationCollator:
    """Batches of what a data set of tokens holds, `input_ids` for the source and `labels` for the target."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        return collate_continuations(self.tokenizer, [(row["input_ids"], row["labels"]) for row in rows])


class ContinuationTrainer(Seq2SeqTrainer):
    """A Seq2SeqTrainer that evaluates what is written behind the sources; `generation_max_length` counts that alone."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **options):
        """The loss of a batch, the tokens written `[batch, written]`, and the labels."""
        inputs = self._prepare_inputs(inputs)
        options = {name: value for name, value in (options or self._gen_kwargs).items() if value is not None}
        options["max_new_tokens"] = options.pop("max_length")
        sources = sources_of(inputs)
        written = self.model.generate(**sources, **stops_of(self.model, self.processing_class), **options)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**inputs).loss
        return loss.detach(), written[:, sources["input_ids"].shape[1] :], inputs["labels"]
