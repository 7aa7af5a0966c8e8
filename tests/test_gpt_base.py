"""The script that builds the small GPT: what it reads, and that a stopped run goes on to the same bytes."""

import random
from itertools import islice
from pathlib import Path

import pytest
import torch

from helpers.bases.build import wordnet_gpt
from helpers.bases.build.pretraining import pretrain, sha256
from helpers.bases.build.wordnet import prepare
from helpers.bases.build.wordnet_smoke import write_smoke_wordnet
from helpers.bases.load import load_base


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wordnet")
    write_smoke_wordnet(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(made_up):
    return prepare(made_up)[1]


def test_what_is_asked_stands_in_the_record(corpus):
    rng = random.Random(0)
    for _ in range(50):
        record, *asked = wordnet_gpt.asked_record(corpus, rng)
        fields = dict(field.split(": ", 1) for field in record.split(" | "))
        assert 2 <= len(fields) <= wordnet_gpt.MOST_FIELDS
        pairs = list(zip(asked[::2], asked[1::2], strict=True))
        assert 1 <= len(pairs) <= 4
        assert len({name for name, _ in pairs}) == len(pairs)
        assert all(fields[name] == value for name, value in pairs)


def test_a_batch_is_texts_of_parts_that_end(corpus):
    _, tokenizer = load_base("wordnet")
    stream = wordnet_gpt.batches(corpus, tokenizer, padded_tokens=600, pool=64)
    for batch in islice(stream, 20):
        input_ids, labels = batch["input_ids"], batch["labels"]
        assert input_ids.shape == labels.shape
        assert input_ids.numel() <= 600
        real = labels != -100
        assert torch.equal(input_ids[real], labels[real])
        assert (input_ids[~real] == tokenizer.pad_token_id).all()
        for row, length in zip(input_ids, real.sum(dim=1), strict=True):
            assert row[length - 1] == tokenizer.eos_token_id
            assert (row[:length] == tokenizer.eos_token_id).sum() >= 2  # a source and a target, or a record and more


def test_two_runs_write_the_same_bytes(made_up, tmp_path):
    for name in ("a", "b"):
        wordnet_gpt.build(made_up, tmp_path / name, smoke=True)
    assert sha256(tmp_path / "a" / "model.safetensors") == sha256(tmp_path / "b" / "model.safetensors")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "LICENSE-WORDNET",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_a_stopped_run_goes_on_to_the_same_weights(corpus, tmp_path):
    _, tokenizer = load_base("wordnet")

    def run(batches, checkpoint=None):
        model = wordnet_gpt.new_model(len(tokenizer), smoke=True)
        losses = pretrain(
            model, batches, warmup_steps=3, total_steps=260, log=lambda _: None, checkpoint=checkpoint, bf16=False
        )
        return model, losses

    few = list(islice(wordnet_gpt.batches(corpus, tokenizer, padded_tokens=100, pool=32), 260))

    def stopped():
        yield from few[:255]
        raise KeyboardInterrupt

    whole, losses = run(few)
    with pytest.raises(KeyboardInterrupt):
        run(stopped(), tmp_path / "checkpoint.pt")
    resumed, other_losses = run(few, tmp_path / "checkpoint.pt")
    assert losses == other_losses
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
