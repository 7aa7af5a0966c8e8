"""Pairs for a decoder alone, which is given a source and writes the target behind it, in one text."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from helpers._shapes import Pair, Shaped

Tokens = list[int]


def continuations(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], *, separator: str | None = None, chat: bool = False
) -> list[tuple[Tokens, Tokens]]:
    """The tokens of each source, and those of the target that follow it, the last of which is the end token.

    Args:
        separator: stands between them and counts as source; None for a new line, or for nothing where the tokenizer
            ends each source with a token of its own.
        chat: write the source as the tokenizer's chat template writes what a user says; no separator then.

    Raises ValueError if the tokenizer has no end token, or with `chat` no template, and for a source of no tokens.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no eos_token, by which a model would know where a target ends")
    if chat and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: leave chat out")
    if separator is None:
        separator = "" if tokenizer("a").input_ids[-1] == end else "\n"
    found = []
    for source, target in pairs:
        if chat:
            said = [{"role": "user", "content": source}]
            given = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        else:
            given = tokenizer(source + separator).input_ids
        if not given:
            raise ValueError("an empty source, with an empty separator, leaves nothing to write behind")
        found.append((list(given), [*tokenizer(target, add_special_tokens=False).input_ids, end]))
    return found


def cut_continuations(
    texts: Sequence[tuple[Tokens, Tokens]], max_source_length: int, max_target_length: int
) -> tuple[tuple[list[Tokens], int], tuple[list[Tokens], int]]:
    """Sources and targets of at most these lengths, and how many of each were cut.

    A source loses its beginning, since the target follows its end, and a target what stands before its end token.
    """
    given, targets = zip(*texts, strict=True)
    short_targets = [
        each if len(each) <= max_target_length else [*each[: max_target_length - 1], each[-1]] for each in targets
    ]
    return (
        ([each[-max_source_length:] for each in given], sum(len(each) > max_source_length for each in given)),
        (short_targets, sum(len(each) > max_target_length for each in targets)),
    )


def collate_continuations(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[Tokens, Tokens]], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """A batch for a decoder alone, padded on the right.

    Returns `input_ids`, `attention_mask` and `labels` `[batch, source + target]`. Source and padding have the label
    -100: the loss counts the target alone. Raises ValueError without texts.
    """
    if not texts:
        raise ValueError("a batch needs at least one source and target, got 0")
    longest = max(len(given) + len(target) for given, target in texts)
    input_ids = torch.full((len(texts), longest), padding_of(tokenizer))
    attention_mask, labels = torch.zeros_like(input_ids), torch.full_like(input_ids, -100)
    for row, (given, target) in enumerate(texts):
        end = len(given) + len(target)
        input_ids[row, :end] = torch.tensor([*given, *target])
        attention_mask[row, :end] = 1
        labels[row, len(given) : end] = torch.tensor(target)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def sources_of(batch: Mapping[str, Tensor]) -> dict[str, Shaped[Tensor, "batch source"]]:
    """The sources of a batch that `collate_continuations` made, to generate from: padded on the left.

    Generation writes behind the last column, so that it has to be the end of every source.
    """
    given = batch["attention_mask"].bool() & (batch["labels"] == -100)
    lengths = given.sum(dim=1, keepdim=True)
    longest = int(lengths.max())
    attention_mask = torch.arange(longest, device=given.device) >= longest - lengths
    input_ids = torch.zeros_like(attention_mask, dtype=torch.long)  # masked, so that any token will do
    input_ids[attention_mask] = batch["input_ids"][given]
    return {"input_ids": input_ids, "attention_mask": attention_mask.long()}


def check_no_form(model: nn.Module, separator: str | None, chat: bool) -> None:
    """Raise ValueError if an encoder-decoder is to have what only a decoder alone needs."""
    if separator is not None or chat:
        raise ValueError(
            f"separator and chat are for a decoder alone: a {type(model).__name__} reads the source in its encoder"
        )


def stops_of(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict:
    """What `generate` needs to stop where a target's end token stands, and where the model's own texts end."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [] if own is None else [own]
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *own]))
    return {"eos_token_id": ends, "pad_token_id": padding_of(tokenizer)}


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or the end token where there is none: both are masked."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
