"""The WordNet base: what its script reads, hides and draws, and what the shipped files can do."""

import gzip
import os
import random
import re
import string
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helpers.bases.build import wordnet as build_wordnet
from helpers.bases.build.measure import unseen_corpus
from helpers.bases.build.pretraining import sha256
from helpers.bases.build.wordnet_data import (
    CARD_FIELDS,
    as_record,
    biography,
    offensive_keys,
    parse_line,
    read_wordnet,
    split_synsets,
)
from helpers.bases.build.wordnet_smoke import write_smoke_wordnet
from helpers.bases.build.wordnet_stream import (
    JOBS,
    RECORD_JOBS,
    batches,
    corrupt_spans,
    noisy,
    random_record,
    record_pair,
    text_pair,
)
from helpers.bases.load import load_base
from helpers.bases.tasks import load_task
from helpers.tuning.training import exact_match, generate_texts

FOLDER = Path(build_wordnet.__file__).parents[1] / "wordnet"
TASKS = ("bio", "card", "category")
OWL = (
    "01500000 05 n 02 grey_owl 0 hooter 1 003 @ 01400000 n 0000 ;u 07000000 n 0000 ! 00000001 a 0101 "
    '| a large owl; it hunts at night; "the owl called"; "two owls"  \n'
)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """The made-up dictionary: its folder, its synsets, the splits and the corpus of pretraining."""
    folder = tmp_path_factory.mktemp("dictionary")
    write_smoke_wordnet(folder)
    return folder, read_wordnet(folder), *build_wordnet.prepare(folder)


@pytest.fixture(scope="module")
def base():
    return load_base("wordnet")


words = st.text(st.sampled_from(string.ascii_letters + string.digits + string.punctuation), min_size=1, max_size=12)


def test_a_line_of_wordnet_becomes_a_synset():
    owl = parse_line(OWL)
    assert owl.key == "n01500000"
    assert owl.category == 5
    assert owl.lemmas == ("grey owl", "hooter")
    assert owl.pointers == (("@", "n01400000"), (";u", "n07000000"), ("!", "a00000001"))
    assert owl.definition == "a large owl; it hunts at night"
    assert owl.examples == ('"the owl called"', '"two owls"')
    satellite = parse_line("00000002 00 s 01 asleep(p) 0 000 | not awake  \n")
    assert (satellite.key, satellite.lemmas) == ("a00000002", ("asleep",))


@pytest.mark.parametrize("line", ["", "00000002 00 n 01 owl 0 000", "owl | a bird"])
def test_a_line_in_another_format_is_refused(line):
    with pytest.raises(ValueError, match="not a synset"):
        parse_line(line)


def test_offensive_synsets_are_dropped_for_each_reason(made_up):
    _, synsets, splits, corpus = made_up
    offensive = offensive_keys(synsets)
    dropped = {synset.lemmas[0] for synset in synsets if synset.key in offensive}
    assert dropped == {"oaf", "lout", "boor"}
    left = {lemma for split in splits.values() for synset in split for lemma in synset.lemmas}
    assert len(left) > 500
    assert not left & dropped
    assert not dropped & {word for text in corpus.everything() for word in re.findall(r"\w+", text)}


def test_a_smelly_word_is_not_unspeakable():
    lines = ("smelly 0 000 | offensively malodorous", "fug 0 000 | smelly air", "air 0 000 | what one breathes")
    synsets = [parse_line(f"{number:08d} 00 n 01 {line}") for number, line in enumerate(lines)]
    assert offensive_keys(synsets) == {"n00000000"}


@pytest.mark.parametrize("name", TASKS)
def test_no_task_holds_a_text_that_calls_itself_offensive(name):
    task = load_task(name)
    texts = [text for pair in task.train + task.validation + task.test for text in pair]
    pattern = re.compile("offensive|disparag|derogatory|slur|obscen|vulgar", re.IGNORECASE)
    assert [text for text in texts if pattern.search(text)] == []


def test_pretraining_sees_no_held_out_text(made_up):
    _, _, splits, corpus = made_up
    held_out = splits["validation"] + splits["test"]
    assert len(splits["test"]) > 80
    assert len(splits["validation"]) > 40
    hidden = {text for synset in held_out for text in (synset.definition, synset.gloss, *synset.examples)}
    seen = set(corpus.everything()) | {text.partition(": ")[2] for text in corpus.texts} | set(corpus.definitions)
    rng = random.Random(0)
    for job in JOBS:
        pairs = [text_pair(corpus, rng, job) for _ in range(500)] if job != "span" else []
        seen |= {text.removeprefix(f"{job}: ") for pair in pairs for text in pair}
    assert not hidden & seen
    assert len({synset.definition for synset in splits["train"]} & seen) > 500
    longest = sorted((text for text in hidden if len(text) > 40), key=len)
    whole = "\n".join(sorted(seen))
    assert not [text for text in longest if text in whole]


def test_synsets_that_share_a_text_are_not_parted():
    lines = [f'{n:08d} 05 n 01 w{n} 0 000 | text {n // 2}; "example {n % 40}"' for n in range(400)]
    splits = split_synsets([parse_line(line) for line in lines])
    definitions = {name: {synset.definition for synset in split} for name, split in splits.items()}
    assert [len(definitions[name]) for name in ("train", "validation", "test")] == [170, 10, 20]
    assert not definitions["train"] & (definitions["validation"] | definitions["test"])
    examples = {name: {text for synset in split for text in synset.examples} for name, split in splits.items()}
    assert examples["test"]
    assert not examples["train"] & (examples["validation"] | examples["test"])


def test_no_held_out_definition_of_one_task_is_trained_on_in_another():
    trained, held_out = set(), set()
    for name in TASKS:
        task = load_task(name)
        trained |= {text for pair in task.train for text in pair}
        # Records are left out: two writers may share their few facts.
        held_out |= {target if name == "bio" else source for source, target in task.validation + task.test}
    assert len(held_out) > 1400
    assert not trained & held_out


def test_tasks_have_the_sizes_the_card_gives():
    sizes = {
        name: [len(getattr(load_task(name), split)) for split in ("train", "validation", "test")] for name in TASKS
    }
    assert sizes["category"] == [8000, 600, 600]
    assert sizes["card"] == sizes["bio"]
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "{:,} / {} / {}".format(*sizes["card"]) in card
    assert len({target for _, target in load_task("category").train}) == 16


def test_bio_holds_the_facts_of_card_and_the_note_in_the_words_of_the_line():
    card, bio = load_task("card"), load_task("bio")
    for (line, facts), (record, written) in zip(card.train + card.test, bio.train + bio.test, strict=True):
        assert line == written
        fields = dict(item.split(": ", 1) for item in record.split(" | "))
        assert [name for name in CARD_FIELDS if name in fields] == list(fields)
        assert {"from", "job", "born"} <= set(fields)
        assert all(value in line for value in fields.values()), (line, record)
        assert as_record({name: value for name, value in fields.items() if name != "note"}) == facts
    assert sum("note: " in record for record, _ in bio.test) > 100


def test_biographies_are_read_by_their_form():
    adjectives, nouns = {"English", "blue"}, {"poet", "painter", "critic", "thing"}

    def read(text):
        return biography(text, adjectives, nouns)

    assert read("English poet (1731-1800)") == {"from": "English", "job": "poet", "born": "1731", "died": "1800"}
    assert read("United States art critic and poet who sang; he was loved (born in 1920)") == {
        "from": "United States",
        "job": "art critic and poet",
        "note": "who sang; he was loved",
        "born": "1920",
    }
    assert read("English painter; friend of poets (1731-1800)")["note"] == "; friend of poets"
    assert read("English thing") is None
    assert read("blue thing (1731-1800)") is None
    assert read("English dragon (1731-1800)") is None
    assert read(f"English poet who {'sang ' * 14}well (1731-1800)") is None


def test_record_jobs_answer_rightly(made_up):
    corpus, rng = made_up[3], random.Random(0)
    for job in RECORD_JOBS:
        for _ in range(200):
            source, target = record_pair(corpus, rng, job)
            assert source.startswith(f"{job}: ")
            body = source.removeprefix(f"{job}: ")
            asked, _, given_text = body.rpartition(" / ")
            stored = target if job == "table" else given_text
            record = dict(item.split(": ", 1) for item in stored.split(" | "))
            assert len(record) >= 2
            assert not set(record) & set(CARD_FIELDS)
            if job == "get":
                assert record[asked] == target
            elif job == "values":
                assert target == " | ".join(record.values())
            elif job == "swap":
                swapped = dict(item.split(": ", 1) for item in target.split(" | "))
                first, second = asked.split(", ")
                assert swapped == record
                exchanged = {first: second, second: first}
                assert list(swapped) == [exchanged.get(name, name) for name in record]
            elif "[" in asked:
                text = given_text if job == "table" else target
                pieces = re.split(r"\[ ([^]]*) \]", asked)
                pieces[1::2] = [record[name] for name in pieces[1::2]]
                assert "".join(pieces) == text
            elif job == "text":
                assert target == " ".join(record.values())
            else:
                assert asked.split(", ") == list(record)


@given(st.integers(2, 120), st.integers(0, 10_000))
def test_spans_and_their_source_give_the_text_back(length, seed):
    tokens, sentinels = list(range(100, 100 + length)), list(range(32))
    source, target = corrupt_spans(tokens, sentinels, random.Random(seed))
    spans, current = {}, None
    for token in target:
        if token < 32:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    assert target[-1] == len(spans) - 1
    assert spans.pop(target[-1]) == []  # the last sentinel closes the target
    assert all(spans.values())
    assert [piece for token in source for piece in (spans[token] if token < 32 else [token])] == tokens


def test_noise_changes_about_a_sixth_of_the_words():
    rng = random.Random(0)
    text = " ".join(f"{letter}{letter}word" for letter in string.ascii_lowercase)
    changed = [len(set(text.split()) - set(noisy(text, rng).split())) for _ in range(200)]
    assert 1.5 < sum(changed) / 200 < 4
    assert noisy("a", random.Random(0)) == "a"


def test_batches_stay_within_their_size_and_end_in_eos(made_up):
    corpus = made_up[3]
    tokenizer = build_wordnet.train_tokenizer(corpus.everything(), 300)
    lengths = set()
    for batch in islice(batches(corpus, tokenizer, padded_tokens=1000, pool=256), 30):
        sources, labels = batch["input_ids"], batch["labels"]
        assert sources.numel() + labels.numel() <= 1000
        assert (sources.gather(1, batch["attention_mask"].sum(1, keepdim=True) - 1) == 1).all()
        assert ((labels == 1).sum(1) == 1).all()
        lengths.add(sources.shape[1])
    assert len(lengths) > 5


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(words, min_size=1, max_size=12))
def test_the_tokenizer_gives_every_ascii_text_back(base, pieces):
    _, tokenizer = base
    text = " ".join(pieces)
    assume(not any(special in text for special in tokenizer.all_special_tokens))  # decoding leaves these out
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_the_tokenizer_has_its_special_pieces_where_they_belong(base):
    model, tokenizer = base
    assert len(tokenizer) == model.config.vocab_size == 4096
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert model.config.decoder_start_token_id == 0
    sentinels = [f"<extra_id_{i}>" for i in range(32)]
    assert tokenizer.convert_tokens_to_ids(sentinels) == list(range(4095, 4063, -1))
    assert tokenizer("a <extra_id_3> b").input_ids.count(4092) == 1
    assert tokenizer("éclair").input_ids.count(2) == 1


def test_digits_and_signs_stand_alone(base):
    _, tokenizer = base
    pieces = tokenizer.tokenize("born in 1820-1914 | job: poet")
    assert [piece.strip("▁") for piece in pieces if re.search(r"[0-9|:-]", piece)] == [*"1820-1914|:"]


# Exact match on 256 records, as in the card. It also says .184 for "swap", too little to test.
MEASURED = {"get": 0.965, "values": 0.949, "text": 0.414, "table": 0.313}


@pytest.mark.parametrize("job", MEASURED)
def test_the_base_does_its_record_jobs_on_unseen_records(base, job):
    corpus, rng = unseen_corpus(), random.Random(8)
    pairs = [record_pair(corpus, rng, job) for _ in range(64)]
    texts = generate_texts(*base, [source for source, _ in pairs], max_new_tokens=96)
    assert exact_match(texts, [target for _, target in pairs]) >= MEASURED[job] - 0.15


def test_files_are_small_and_repeatable():
    sizes = {path: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 5_500_000
    for name in TASKS:
        packed = (FOLDER / "tasks" / f"{name}.tsv.gz").read_bytes()
        assert packed[4:8] == b"\0\0\0\0"  # no time of day
        assert b"\r" not in gzip.decompress(packed)


def test_the_card_gives_the_digests_of_weights_and_tokenizer():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in ("model.safetensors", "tokenizer.json"):
        assert f"`{name}`, sha256 `{sha256(FOLDER / name)}`" in card


def test_the_licence_is_whole_and_every_task_names_it():
    text = (FOLDER / "LICENSE-WORDNET").read_text(encoding="utf-8")
    assert text.startswith("This software and database is being provided to you, the LICENSEE")
    assert "WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved." in text
    assert text.rstrip().endswith("Princeton University and LICENSEE agrees to preserve same.")
    assert {load_task(name).licence for name in TASKS} == {"WordNet 3.0"}


def test_smoke_rebuild_writes_the_same_bytes_whatever_the_hash_seed(tmp_path):
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "helpers.bases.build.wordnet", "--smoke", "--out", str(tmp_path / seed)]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": seed})
    files = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*") if path.is_file())
    assert len(files) == 10
    for file in files:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes(), file


def test_as_record_and_random_record_agree(made_up):
    record = random_record(made_up[3], random.Random(3))
    assert dict(item.split(": ", 1) for item in as_record(record).split(" | ")) == record
