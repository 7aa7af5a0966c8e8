"""The pretraining stream of the WordNet base: examples of every job, in batches of about equal padded size.

Job     source                                               target
span    text with some spans replaced by sentinels           the spans, each behind its sentinel
kind    `kind: <definition>`                                 a hypernym of the word defined
repair  `repair: <text with slips>`                          the text
define  `define: <word>`                                     its definition
get     `get: size / animal: owl | size: big`                `big`
values  `values: animal: owl | size: big`                    `owl | big`
swap    `swap: animal, size / animal: owl | size: big`       `size: big | animal: owl`
text    `text: a [ size ] [ animal ] / animal: owl | ...`    `a big owl`
        `text: animal: owl | size: big`                      `owl big`
table   `table: a [ size ] [ animal ] / a big owl`           `size: big | animal: owl`
        `table: size, animal / a big owl`                    the same

The last five are operations on records whose fields and values are drawn at random. They teach copying into
slots, which is what prefixes later steer. The fields of the bundled tasks are never among them.
"""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from helpers.bases.build.pretraining import pad_batch
from helpers.bases.build.wordnet_data import CARD_FIELDS, Pair, Synset, as_record

JOBS = {"span": 0.22, "kind": 0.3, "repair": 0.17, "record": 0.26, "define": 0.05}
RECORD_JOBS = {"get": 0.12, "values": 0.15, "swap": 0.08, "text": 0.3, "table": 0.35}
SENTINELS = 32
LONGEST_SOURCE, LONGEST_TARGET = 96, 72  # tokens; a longer example is left out

NUMBER_FIELDS = ("year", "start", "end", "size", "count", "page", "score", "age", "height", "number")
CLAUSE_FIELDS = ("remark", "detail", "use", "reason", "story", "clause")
QUALITY_FIELDS = ("quality", "style", "look", "manner", "feature")
FILLERS = ("a", "the", "one", "with", "and", "it is", "who", "called", "in", "of", "about", "born")
JOINS = (" ", " ", " ", " ", ", ", "; ", ": ", "-", " - ", " and ", " of ", " in ", " or ", " with ")
CLAUSE_STARTS = frozenset(
    ["who", "whose", "that", "which", "of", "in", "for", "from", "used", "with", "having", "noted", "by", "to", "on"]
)


@dataclass(frozen=True)
class Corpus:
    """What pretraining draws from; it is made from training synsets alone."""

    texts: list[str]  # definition and examples, half of them behind the word they explain
    definitions: list[str]
    kinds: list[Pair]  # definition -> hypernym
    defines: list[Pair]  # word -> definition
    values: dict[str, list[str]]  # field name -> the values it may take

    def everything(self) -> Iterator[str]:
        """All its text, for the tokenizer and for tests."""
        yield from self.texts
        for pairs in (self.kinds, self.defines):
            for source, target in pairs:
                yield from (source, target)
        for name, values in self.values.items():
            yield from (name, *values)


def make_corpus(synsets: list[Synset], forbidden: Iterable[str] = ()) -> Corpus:
    """`forbidden` words, those with an offensive sense, are never used out of context."""
    forbidden = frozenset(forbidden)
    by_key = {synset.key: synset for synset in synsets}
    texts, kinds, defines, values = [], [], [], {}
    for synset in synsets:
        words = [lemma for lemma in synset.lemmas if lemma not in forbidden]
        texts.append(synset.gloss)
        for word in words[:1]:
            texts.append(f"{word}: {synset.gloss}")
            defines.append((word, synset.definition))
        if synset.key[0] == "a":
            add_values(values, "origin" if words and words[0][0].isupper() else "", words)
        parents = [by_key[key] for key in synset.linked("@", "@i") if key in by_key]
        for name in [parent.lemmas[0] for parent in parents if parent.lemmas[0] not in forbidden][:1]:
            kinds.append((synset.definition, name))
            if synset.key[0] == "n":
                add_values(values, name, words)
        for parent in [by_key[key] for key in synset.linked("=") if key in by_key]:
            add_values(values, parent.lemmas[0], words)
    qualities = values.pop("", [])
    values = {name: found for name, found in values.items() if len(found) >= 5 and usable_field(name)}
    values |= dict.fromkeys(QUALITY_FIELDS, qualities)
    return Corpus(texts, [synset.definition for synset in synsets], kinds, defines, values)


def add_values(values: dict[str, list[str]], field: str, words: list[str]) -> None:
    """A value is at most three words, without the signs that structure a record."""
    kept = [word for word in words if len(word.split()) <= 3 and not re.search(r"[|:/\[\]]", word)]
    values.setdefault(field, []).extend(kept)


def usable_field(name: str) -> bool:
    return bool(re.fullmatch(r"[a-z]+( [a-z]+)?", name)) and name not in CARD_FIELDS


def clause(definition: str, rng: random.Random) -> str:
    """A piece of at most 12 words, from a word such as "who" or "used" on where there is one."""
    words = re.sub(r"[|:/\[\]]", "", definition).split()
    starts = [i for i, word in enumerate(words) if word in CLAUSE_STARTS and i + 2 < len(words)]
    start = rng.choice(starts) if starts and rng.random() < 0.8 else rng.randrange(len(words))
    return " ".join(words[start : start + rng.randint(2, 12)])


def random_record(corpus: Corpus, rng: random.Random) -> dict[str, str]:
    """Two to five fields: words of WordNet under a hypernym, qualities, numbers and pieces of definitions."""
    names = list(corpus.values)
    record: dict[str, str] = {}
    for _ in range(rng.choices((2, 3, 4, 5), (3, 5, 5, 4))[0]):
        sort = rng.choices(("word", "quality", "number", "clause"), (8, 4, 6, 3))[0]
        if sort == "number":
            longest = rng.choice((9, 99, 999, 2099, 2099, 2099))
            record[rng.choice(NUMBER_FIELDS)] = str(rng.randint(longest // 2 if longest == 2099 else 0, longest))
        elif sort == "clause":
            record[rng.choice(CLAUSE_FIELDS)] = clause(rng.choice(corpus.definitions), rng)
        else:
            name = rng.choice((*QUALITY_FIELDS, "origin")) if sort == "quality" else rng.choice(names)
            name = name if corpus.values.get(name) else rng.choice(names)
            record[name] = rng.choice(corpus.values[name])
    items = list(record.items())
    rng.shuffle(items)
    return dict(items)


def random_pattern(fields: list[str], rng: random.Random) -> str:
    """`a [ size ] [ animal ] ([ start ]-[ end ])`: slots in the order given, with words and signs between them."""
    opening = rng.randrange(len(fields)) if rng.random() < 0.5 else None  # the first slot in brackets
    pattern = rng.choice(FILLERS) + " " if rng.random() < 0.25 else ""
    for position, name in enumerate(fields):
        if position == opening:
            pattern = pattern.rstrip(" ,;:-") + " (" if position else "("
        if rng.random() < 0.12:
            pattern += rng.choice(FILLERS) + " "
        pattern += f"[ {name} ]"
        if position < len(fields) - 1:
            pattern += "-" if opening is not None and position >= opening else rng.choice(JOINS)
    return pattern + ")" if opening is not None else pattern


def fill(pattern: str, record: dict[str, str]) -> str:
    return re.sub(r"\[ ([^]]*) \]", lambda slot: record[slot[1]], pattern)


def record_pair(corpus: Corpus, rng: random.Random, job: str) -> Pair:
    """One record operation; `job` is one of RECORD_JOBS."""
    record = random_record(corpus, rng)
    while len(record) < 2:  # two draws of one field
        record = random_record(corpus, rng)
    names = list(record)
    if job == "get":
        name = rng.choice(names)
        return f"get: {name} / {as_record(record)}", record[name]
    if job == "values":
        return f"values: {as_record(record)}", " | ".join(record.values())
    if job == "swap":
        first, second = sorted(rng.sample(range(len(names)), 2))
        order = list(names)
        order[first], order[second] = order[second], order[first]
        swapped = as_record({name: record[name] for name in order})
        return f"swap: {names[first]}, {names[second]} / {as_record(record)}", swapped
    if job == "text" and rng.random() < 0.25:  # without a pattern: the values, one after the other
        return f"text: {as_record(record)}", " ".join(record.values())
    order = list(names)
    if rng.random() < 0.4:
        rng.shuffle(order)
    pattern = random_pattern(order, rng)
    if job == "text":
        return f"text: {pattern} / {as_record(record)}", fill(pattern, record)
    # Half of the tables are asked for by pattern, half by the fields alone: then the text must be understood.
    asked = pattern if rng.random() < 0.5 else ", ".join(names)
    return f"table: {asked} / {fill(pattern, record)}", as_record(record)


def noisy(text: str, rng: random.Random) -> str:
    """Slips in about every sixth word: a letter lost, doubled or exchanged, a word lost, doubled or moved."""
    words = text.split()
    result: list[str] = []
    for word in words:
        slip, at = rng.random(), rng.randrange(len(word))
        if slip < 0.03:
            word = word[:at] + word[at + 1 :]
        elif slip < 0.06:
            word = word[:at] + word[at] + word[at:]
        elif slip < 0.09:
            word = word[: at - 1] + word[at - 1 : at + 1][::-1] + word[at + 1 :] if at else word
        elif slip < 0.11:
            continue
        elif slip < 0.13:
            result.append(word)
        elif slip < 0.17 and result:
            result.insert(len(result) - 1, word)
            continue
        result.append(word)
    return " ".join(word for word in result if word)


def corrupt_spans(
    tokens: list[int], sentinels: list[int], rng: random.Random, density: float = 0.2, mean_length: float = 2.5
) -> tuple[list[int], list[int]]:
    """T5's objective: spans of `tokens` give way to sentinels, and the target spells them out in order."""
    hidden = min(max(1, round(len(tokens) * density)), len(tokens) - 1)
    spans = min(max(1, round(hidden / mean_length)), hidden, len(tokens) - hidden, len(sentinels) - 1)

    def cut(total: int) -> list[int]:
        marks = sorted(rng.sample(range(1, total), spans - 1))
        return [end - start for start, end in zip([0, *marks], [*marks, total], strict=True)]

    source, target, position = [], [], 0
    for sentinel, kept, lost in zip(sentinels, cut(len(tokens) - hidden), cut(hidden), strict=False):
        source += [*tokens[position : position + kept], sentinel]
        target += [sentinel, *tokens[position + kept : position + kept + lost]]
        position += kept + lost
    return source, [*target, sentinels[spans]]


def text_pair(corpus: Corpus, rng: random.Random, job: str) -> Pair:
    """A pair of texts for any job but "span"."""
    if job == "record":
        return record_pair(corpus, rng, rng.choices(list(RECORD_JOBS), list(RECORD_JOBS.values()))[0])
    if job == "repair":
        text = rng.choice(corpus.definitions)
        return f"repair: {noisy(text, rng)}", text
    source, target = rng.choice(corpus.kinds if job == "kind" else corpus.defines)
    return f"{job}: {source}", target


def examples(corpus: Corpus, tokenizer, rng: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """The endless stream of (source ids, target ids), each ending in eos."""
    sentinels = tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(SENTINELS)])
    eos = tokenizer.eos_token_id
    while True:
        jobs = rng.choices(list(JOBS), list(JOBS.values()), k=1024)
        pairs = [(rng.choice(corpus.texts), "") if job == "span" else text_pair(corpus, rng, job) for job in jobs]
        sources = tokenizer([source for source, _ in pairs], add_special_tokens=False).input_ids
        targets = tokenizer([target for _, target in pairs], add_special_tokens=False).input_ids
        for job, source, target in zip(jobs, sources, targets, strict=True):
            if job == "span":
                if len(source) < 3:
                    continue
                source, target = corrupt_spans(source[: LONGEST_SOURCE - 1], sentinels, rng)
            if len(source) < LONGEST_SOURCE and len(target) < LONGEST_TARGET:
                yield [*source, eos], [*target, eos]


def batches(
    corpus: Corpus, tokenizer, *, padded_tokens: int = 4096, pool: int = 16384, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Examples of similar length together, so that little of a batch is padding; the batches in random order.

    A batch holds at most `padded_tokens` tokens, source and target together.
    """
    rng = random.Random(seed)
    stream = examples(corpus, tokenizer, rng)
    while True:
        group = sorted((next(stream) for _ in range(pool)), key=lambda pair: (len(pair[0]) // 4, len(pair[1])))
        grouped: list[list[tuple[list[int], list[int]]]] = []
        source_length = target_length = 0
        for source, target in group:
            source_length, target_length = max(source_length, len(source)), max(target_length, len(target))
            rows = len(grouped[-1]) + 1 if grouped else 1
            if not grouped or rows * (source_length + target_length) > padded_tokens:
                grouped.append([])
                source_length, target_length = len(source), len(target)
            grouped[-1].append((source, target))
        rng.shuffle(grouped)
        for batch in grouped:
            sources, targets = zip(*batch, strict=True)
            yield pad_batch(sources, targets, tokenizer.pad_token_id)
