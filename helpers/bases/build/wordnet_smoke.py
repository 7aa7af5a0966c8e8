"""A made-up dictionary in WordNet's file format, so that the build can be tested where WordNet is not installed."""

import random
from pathlib import Path

_HEADER = "  1 This dictionary was made up for a test; it is no part of WordNet.  \n"
_KINDS = {  # hypernym -> (lexicographer file, opening of its glosses)
    "tool": (6, "a tool"),
    "bird": (5, "a bird"),
    "herb": (20, "a plant"),
    "town": (15, "a town"),
    "soup": (13, "a dish"),
}
_SYLLABLES = ("ba", "do", "ki", "lu", "mer", "no", "pa", "ri", "sol", "ta", "ver", "zin")
_QUALITIES = ("small", "large", "old", "red", "quiet", "bright", "heavy", "rare")
_DEEDS = ("is kept near the river", "gives a clear sound", "was found in the north", "serves in winter")
_NATIONS = ("Belgian", "Chilean", "English", "French", "Greek")
_JOBS = ("painter", "poet", "chemist", "engineer", "singer")


def _line(offset: int, category: int, kind: str, word: str, pointers: list[tuple[str, str]], gloss: str) -> str:
    links = "".join(f" {symbol} {key[1:]} {key[0]} 0000" for symbol, key in pointers)
    return f"{offset:08d} {category:02d} {kind} 01 {word} 0 {len(pointers):03d}{links} | {gloss}  \n"


def write_smoke_wordnet(folder: Path, seed: int = 0) -> None:
    """data.noun and data.adj with some 900 synsets, and empty data.verb and data.adv.

    Three synsets are marked offensive, in the three ways that `offensive_keys` knows.
    """
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    nouns = [_line(1, 10, "n", "ethnic_slur", [], "a word that insults a people")]
    nouns.append(_line(2, 18, "n", "oaf", [], "(ethnic slur) a made-up insult"))
    nouns.append(_line(3, 18, "n", "lout", [(";u", "n00000001")], "a made-up rude person"))
    nouns.append(_line(4, 18, "n", "boor", [], 'someone like an oaf; "he behaved like an oaf"'))
    parents = {}
    for name, (category, gloss) in _KINDS.items():
        parents[name] = f"n{len(nouns) + 1:08d}"
        nouns.append(_line(len(nouns) + 1, category, "n", name, [], f"{gloss} of any sort"))
    for job in _JOBS:
        parents[job] = f"n{len(nouns) + 1:08d}"
        nouns.append(_line(len(nouns) + 1, 18, "n", job, [], f"a person who works as a {job}"))
    for _ in range(600):
        name = rng.choice(list(_KINDS))
        category, opening = _KINDS[name]
        word = "".join(rng.choices(_SYLLABLES, k=3))
        gloss = f"{opening} called {word} that is {rng.choice(_QUALITIES)} and {rng.choice(_DEEDS)}"
        gloss += f'; "the {word} is {rng.choice(_QUALITIES)}"'
        nouns.append(_line(len(nouns) + 1, category, "n", word, [("@", parents[name])], gloss))
    for _ in range(300):
        job, born = rng.choice(_JOBS), rng.randint(1500, 1900)
        word = "".join(rng.choices(_SYLLABLES, k=2)).title()
        note = rng.choice(["", f" who painted the town of {word}", " noted for quiet work"])
        gloss = f"{rng.choice(_NATIONS)} {job}{note} ({born}-{born + rng.randint(30, 90)})"
        nouns.append(_line(len(nouns) + 1, 18, "n", word, [("@i", parents[job])], gloss))
    words = (*_QUALITIES, *_NATIONS)
    adjectives = [_line(n, 0, "a", word, [], f"being {word}") for n, word in enumerate(words, 1)]
    for part, lines in {"noun": nouns, "adj": adjectives, "verb": [], "adv": []}.items():
        (folder / f"data.{part}").write_text(_HEADER + "".join(lines), encoding="ascii")
