"""Pairs of texts, source and target: read from a file, divided, and made into what a Trainer reads."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from helpers._shapes import Pair
from helpers.tuning.continuing import continuations, cut_continuations


def read_pairs(path: str | Path) -> list[Pair]:
    """The (source, target) pairs of a JSONL file, one object with these two strings a line; empty lines are skipped.

    Raises FileNotFoundError for a missing file; ValueError, with file and line, for a line that is something else, or
    if there is no pair.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    pairs = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):

        def refuse(reason: str, number=number):
            raise ValueError(f"{path}:{number}: {reason}")

        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            refuse(f"not UTF-8 ({error.reason} at byte {error.start + 1})")
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
        except json.JSONDecodeError as error:
            refuse(f"not JSON ({error.msg} at column {error.colno})")
        if not isinstance(entry, dict):
            refuse(f'needs an object {{"source": ..., "target": ...}}, got a {type(entry).__name__}')
        for key in ("source", "target"):
            if key not in entry:
                refuse(f"has no {key!r}, only {', '.join(map(repr, entry)) or 'nothing'}")
            if not isinstance(entry[key], str):
                refuse(f"{key!r} needs a string, got {json.dumps(entry[key])[:40]}")
            if re.search("[\ud800-\udfff]", entry[key]):
                refuse(f"{key!r} holds half of a surrogate pair, which is no character")
        pairs.append((entry["source"], entry["target"]))
    if not pairs:
        raise ValueError(f"{path}: holds no pairs")
    return pairs


def hold_out(pairs: Sequence[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """`(kept, held out)`: a share of the pairs, rounded, chosen by the seed; both keep the order of the file.

    Raises ValueError for a share outside 0 to 1, or if one of the two would be empty (a share of 0 holds out none).
    """
    count = round(share * len(pairs))
    if not 0 <= share < 1 or count == len(pairs) or (share > 0 and count == 0):
        raise ValueError(
            f"validation_share {share} of {len(pairs)} pairs leaves nothing to learn or nothing to evaluate on: give "
            "another share, 0 for no evaluation, or a validation_file"
        )
    chosen = set(random.Random(seed).sample(range(len(pairs)), count))
    kept = [pair for index, pair in enumerate(pairs) if index not in chosen]
    return kept, [pairs[index] for index in sorted(chosen)]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], int]:
    """The tokens of each text, at most `max_length` with the end token, and how many texts were cut for that."""
    tokens = tokenizer(list(texts), verbose=False).input_ids if texts else []
    long = [index for index, each in enumerate(tokens) if len(each) > max_length]
    for index in long:
        tokens[index] = tokenizer(texts[index], truncation=True, max_length=max_length).input_ids
    return tokens, len(long)


def data_set(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    max_source_length: int,
    max_target_length: int,
    say: Callable[[str], None],
    form: dict | None = None,
) -> list[dict]:
    """The tokens of each pair; says how many texts are cut, or cannot be written with the tokenizer.

    `form` is None for an encoder-decoder, and for a decoder alone what `continuations` takes.
    """
    limits = {"sources": max_source_length, "targets": max_target_length}
    if form is None:
        columns = [
            encode(tokenizer, texts, most)
            for texts, most in zip(zip(*pairs, strict=True), limits.values(), strict=True)
        ]
    else:
        columns = cut_continuations(continuations(tokenizer, pairs, **form), *limits.values())
    for (_, cut), (name, most) in zip(columns, limits.items(), strict=True):
        if cut:
            say(f"note: {cut:,} of {len(pairs):,} {name} are longer than {most} tokens and are cut")
    sources, targets = (tokens for tokens, _ in columns)
    written = tokenizer.batch_decode(targets[:1000], skip_special_tokens=True)
    lost = sum(text.strip() != target.strip() for text, (_, target) in zip(written, pairs, strict=False))
    if lost:
        say(f"note: {lost:,} of {len(written):,} targets cannot be written exactly with this tokenizer and this length")
    return [{"input_ids": source, "labels": target} for source, target in zip(sources, targets, strict=True)]
