"""WordNet's database files as synsets: reading, leaving out offensive ones, splitting, and the three tasks.

The file format is described in the manual page wndb(5WN). One line is one synset:

    offset lex_filenum ss_type w_cnt word lex_id ... p_cnt symbol offset pos source/target ... | gloss
"""

import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# fmt: off
CATEGORIES = (  # the lexicographer files, numbered from 0: lexnames(5WN)
    "adjective", "pertainym", "adverb", "top", "act", "animal", "artifact", "attribute", "body", "cognition",
    "communication", "event", "feeling", "food", "group", "location", "motive", "object", "person",
    "phenomenon", "plant", "possession", "process", "quantity", "relation", "shape", "state", "substance",
    "time", "body verb", "change", "cognition verb", "communication verb", "competition", "consumption",
    "contact", "creation", "emotion", "motion", "perception", "possession verb", "social", "stative",
    "weather", "participle",
)
# fmt: on
PARTS = ("noun", "verb", "adj", "adv")
SPLITS = ("train", "validation", "test")
CARD_FIELDS = ("from", "job", "note", "born", "died")

Pair = tuple[str, str]


@dataclass(frozen=True)
class Synset:
    """One set of synonyms. Pointers hold (symbol, key of the other synset), `@` meaning hypernym."""

    key: str  # part of speech and byte offset: "n00001740"
    category: int  # index into CATEGORIES
    lemmas: tuple[str, ...]
    pointers: tuple[tuple[str, str], ...]
    definition: str
    examples: tuple[str, ...]

    def linked(self, *symbols: str) -> list[str]:
        return [key for symbol, key in self.pointers if symbol in symbols]

    @property
    def gloss(self) -> str:
        return "; ".join((self.definition, *self.examples))


def parse_line(line: str) -> Synset:
    """One line of a data file. A line in another format raises ValueError."""
    data, bar, gloss = line.partition(" | ")
    fields = data.split()
    if not bar or len(fields) < 6:
        raise ValueError(f"not a synset in WordNet's format: {line[:80]!r}")
    kind = "a" if fields[2] == "s" else fields[2]  # a satellite adjective lies in data.adj too
    words = int(fields[3], 16)
    # "(a)", "(p)" and "(ip)" after an adjective say where it may stand; they are not part of the word.
    lemmas = [re.sub(r"\((a|p|ip)\)$", "", word) for word in fields[4 : 4 + 2 * words : 2]]
    links = fields[5 + 2 * words : 5 + 2 * words + 4 * int(fields[4 + 2 * words])]
    pointers = [(links[i], links[i + 2] + links[i + 1]) for i in range(0, len(links), 4)]
    definition, *examples = re.split(r'; (?=")', " ".join(gloss.split()))
    return Synset(
        key=kind + fields[0],
        category=int(fields[1]),
        lemmas=tuple(lemma.replace("_", " ") for lemma in lemmas),
        pointers=tuple(pointers),
        definition=definition.strip("; "),
        examples=tuple(examples),
    )


def read_wordnet(folder: Path) -> list[Synset]:
    """Every synset of the four data files, in the files' order."""
    synsets = []
    for part in PARTS:
        with open(folder / f"data.{part}", encoding="ascii") as file:
            # The licence at the head of each file is indented by two spaces.
            synsets += [parse_line(line) for line in file if not line.startswith("  ")]
    return synsets


_OFFENSIVE_GLOSS = re.compile(r"\b(offensive|disparag|derogat|insulting term|slur|obscen|vulgar)", re.IGNORECASE)
_OFFENSIVE_USAGE = {"disparagement", "ethnic slur", "obscenity", "vulgarism", "dirty word"}


def offensive_keys(synsets: Iterable[Synset]) -> set[str]:
    """Keys of the synsets that must not be used, by three rules.

    The gloss says so; or the usage pointer (`;u`) leads to a synset such as "ethnic slur"; or the gloss
    contains a word all of whose senses fall under the first two rules. "Offensive" alone does not make a word
    unspeakable (smelly: "offensively malodorous"), so for the third rule it does not count.
    """
    synsets = list(synsets)
    usage = {synset.key for synset in synsets if _OFFENSIVE_USAGE & set(synset.lemmas)}
    dropped, unspeakable, spoken = set(), set(), set()
    for synset in synsets:
        words = {lemma.lower() for lemma in synset.lemmas}
        reasons = {reason.lower() for reason in _OFFENSIVE_GLOSS.findall(synset.gloss)}
        if usage & set(synset.linked(";u")):
            reasons.add("usage")
        if reasons:
            dropped.add(synset.key)
        if reasons - {"offensive"}:
            unspeakable |= words
        else:
            spoken |= words
    unspeakable -= spoken
    for synset in synsets:
        if unspeakable & set(re.findall(r"[a-z]+", synset.gloss.lower())):
            dropped.add(synset.key)
    return dropped


def split_synsets(synsets: Iterable[Synset], seed: int = 0) -> dict[str, list[Synset]]:
    """10 % of the definitions for test, 5 % for validation, the rest for training.

    Synsets with the same definition go to the same split, and a training synset loses the example sentences
    that a held-out synset has too: no held-out text is ever trained on.
    """
    synsets = list(synsets)
    definitions = sorted({synset.definition for synset in synsets})
    random.Random(seed).shuffle(definitions)
    tests, held_out = len(definitions) // 10, len(definitions) * 15 // 100
    split_of = dict.fromkeys(definitions[held_out:], "train")
    split_of |= dict.fromkeys(definitions[tests:held_out], "validation")
    split_of |= dict.fromkeys(definitions[:tests], "test")
    splits: dict[str, list[Synset]] = {split: [] for split in SPLITS}
    for synset in synsets:
        splits[split_of[synset.definition]].append(synset)
    hidden = {text for split in ("validation", "test") for synset in splits[split] for text in synset.examples}
    splits["train"] = [
        Synset(**(vars(synset) | {"examples": tuple(text for text in synset.examples if text not in hidden)}))
        for synset in splits["train"]
    ]
    return splits


_LIFE = re.compile(r"^(?P<head>.+?) \((?:(?P<born>\d{3,4})-(?P<died>\d{3,4})|born in (?P<alive>\d{4}))\)$")
# fmt: off
_NOTE_WORDS = (
    "who", "whose", "noted", "known", "well known", "best known", "remembered", "famous", "considered",
    "regarded", "credited", "celebrated", "concerned", "influenced", "appointed", "said", "born", "about", "of",
    "in", "for", "from", "that",
)
# fmt: on
_JOB = re.compile(rf"^(?P<job>[a-z][a-z -]*?)(?P<note>(?: (?:{'|'.join(_NOTE_WORDS)}) |; | \(born in ).*)?$")
LONGEST_NOTE = 14  # words


def biography(definition: str, adjectives: set[str], nouns: set[str]) -> dict[str, str] | None:
    """The fields of a regular one-line biography, or None for any other definition.

    "English poet who wrote hymns (1731-1800)" has `from`, `job`, `note`, `born` and `died`; `note` and `died`
    may be missing. `adjectives` and `nouns` are WordNet's lemmas: they decide what a nationality and a job are.
    """
    life = _LIFE.match(definition)
    if not life:
        return None
    nation, _, rest = life["head"].partition(" ")
    if life["head"].startswith("United States "):
        nation, rest = "United States", life["head"].removeprefix("United States ")
    elif not nation[0].isupper() or nation not in adjectives:
        return None
    parts = _JOB.match(rest)
    if not parts or any(job.split(" ")[-1] not in nouns for job in parts["job"].split(" and ")):
        return None
    note = (parts["note"] or "").strip()
    if len(note.split()) > LONGEST_NOTE or "|" in note or ": " in note:
        return None
    fields = {"from": nation, "job": parts["job"], "note": note, "born": life["born"] or life["alive"]}
    fields["died"] = life["died"] or ""
    return {name: fields[name] for name in CARD_FIELDS if fields[name]}


def as_record(fields: dict[str, str]) -> str:
    """`{"from": "English", "born": "1820"}` as `from: English | born: 1820`."""
    return " | ".join(f"{name}: {value}" for name, value in fields.items())


def category_rows(
    splits: dict[str, list[Synset]], sizes: dict[str, int], categories: int = 16, seed: int = 0
) -> list[tuple[str, str, str]]:
    """(split, definition, category) for the most frequent noun categories, each split in random order."""
    nouns = {split: [s for s in splits[split] if s.key[0] == "n" and len(s.definition) <= 200] for split in SPLITS}
    counts = Counter(CATEGORIES[synset.category] for synset in nouns["train"])
    kept = {name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:categories]}
    rows = []
    for split in SPLITS:
        answers: dict[str, set[str]] = {}
        for synset in nouns[split]:
            answers.setdefault(synset.definition, set()).add(CATEGORIES[synset.category])
        # A definition shared by two categories has no right answer.
        pairs = [(text, *names) for text, names in answers.items() if len(names) == 1 and names <= kept]
        chosen = random.Random(seed).sample(pairs, min(sizes[split], len(pairs)))
        rows += [(split, text, name) for text, name in chosen]
    return rows


def biography_rows(splits: dict[str, list[Synset]]) -> dict[str, list[tuple[str, str, str]]]:
    """Rows of the tasks "card" and "bio", from the same biographies.

    "card" (line -> record) leaves out the note: the facts are to be picked from the sentence. "bio" (record ->
    line) has it, or the line could not be known.
    """
    everything = [synset for split in SPLITS for synset in splits[split]]
    adjectives = {lemma for synset in everything if synset.key[0] == "a" for lemma in synset.lemmas}
    nouns = {lemma for synset in everything if synset.key[0] == "n" for lemma in synset.lemmas}
    rows, seen = {"card": [], "bio": []}, set()
    for split in SPLITS:
        for synset in splits[split]:
            line, fields = synset.definition, biography(synset.definition, adjectives, nouns)
            if fields and line not in seen:
                seen.add(line)
                facts = {name: value for name, value in fields.items() if name != "note"}
                rows["card"].append((split, line, as_record(facts)))
                rows["bio"].append((split, as_record(fields), line))
    return rows
