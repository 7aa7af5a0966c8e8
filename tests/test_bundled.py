"""helpers.bundled: the files that ship, the loop and the scripts that made them."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.bases.build.pretraining import pad_batch, pretrain, save_half, sha256
from helpers.bases.load import load_base
from helpers.bases.tasks import load_task

BUNDLED = Path(__file__).parents[1] / "helpers" / "bases"
BASES = sorted(path.parent.name for path in BUNDLED.glob("*/model.safetensors"))
FRENCH_DAYS = ("lundi", "mardi", "mercredi", "jeudi", "vendredi", "samedi", "dimanche")
FRENCH_MONTHS = (
    *("janvier", "février", "mars", "avril", "mai", "juin"),
    *("juillet", "août", "septembre", "octobre", "novembre", "décembre"),
)


def test_both_bases_are_here():
    assert BASES == ["dates", "wordnet"]


@pytest.mark.parametrize("name", BASES)
def test_the_card_names_the_weights_that_ship(name):
    card = (BUNDLED / name / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\b[0-9a-f]{64}\b", card)[:1] == [sha256(BUNDLED / name / "model.safetensors")]


@pytest.mark.parametrize("name", BASES)
def test_a_licence_text_ships_and_covers_every_task(name):
    licences = sorted((BUNDLED / name).glob("LICENSE*"))
    assert licences
    assert all(len(path.read_text(encoding="utf-8")) > 500 for path in licences)
    about = json.loads((BUNDLED / name / "tasks.json").read_text(encoding="utf-8"))
    files = {path.name.removesuffix(".tsv.gz") for path in (BUNDLED / name / "tasks").iterdir()}
    assert set(about) == files


def test_the_unicode_licence_is_whole():
    text = (BUNDLED / "dates" / "LICENSE-UNICODE").read_text(encoding="utf-8")
    assert text.startswith("UNICODE LICENSE V3")
    assert "Permission is hereby granted, free of charge" in text
    assert text.strip().endswith("SPDX-License-Identifier: Unicode-3.0")


@pytest.mark.parametrize("name", BASES)
def test_weights_are_finite_fp16(name):
    for key, weight in load_file(BUNDLED / name / "model.safetensors").items():
        assert weight.dtype == torch.float16, key
        assert weight.isfinite().all(), key


def test_all_of_it_stays_small():
    size = sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert size <= 8_000_000


def generate(model, tokenizer, sources: list[str]) -> list[str]:
    batch = tokenizer(sources, padding=True, return_tensors="pt")
    return tokenizer.batch_decode(model.generate(**batch, max_new_tokens=48), skip_special_tokens=True)


def french(source: str) -> str:
    """Written here by hand, so that no other CLDR can change what is expected."""
    year, month, day = map(int, source.split(" ")[0].split("-"))
    weekday = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun").index(source.split(" ")[1])
    return f"{FRENCH_DAYS[weekday]} {day} {FRENCH_MONTHS[month - 1]} {year}"


@pytest.mark.parametrize("job", ["localise", "back", "copy"])
def test_dates_does_its_pretraining_job_on_unseen_dates(job):
    model, tokenizer = load_base("dates")
    isos = [source for source, _ in load_task("german").test[:64]]
    if job == "localise":
        pairs = [(f"fr full: {text}", french(text)) for text in isos]
    elif job == "back":
        pairs = [(f"iso: {french(text)}", text) for text in isos]
    else:
        pairs = [(f"copy: {text}", text) for text in isos]
    outputs = generate(model, tokenizer, [source for source, _ in pairs])
    right = sum(output == target for output, (_, target) in zip(outputs, pairs, strict=True))
    assert right >= 61, [(o, t) for o, (_, t) in zip(outputs, pairs, strict=True) if o != t]


@pytest.fixture(scope="module")
def stream():
    """5,000 pairs of the pretraining stream, and the builder."""
    build_dates = pytest.importorskip("helpers.bases.build.dates", reason="rebuilding needs babel")
    days = build_dates.split_days()["pretraining"]
    return build_dates, list(islice(build_dates.pretraining_pairs(days), 5000))


def skeleton(text: str) -> str:
    """The text without its numbers: 'Saturday, March 14th, 1987' is 'Saturday, March 0th, 0'."""
    return re.sub(r"\d+", "0", re.sub(r"\d+(st|nd|rd|th)\b", "0th", text))


def test_held_out_forms_are_not_in_the_pretraining_stream(stream):
    _, pairs = stream
    seen = {skeleton(target) for _, target in pairs}
    seen |= {skeleton(source.split(": ", 1)[1]) for source, _ in pairs}
    for name in ("german", "italian", "vietnamese", "russian", "ordinal"):
        task = load_task(name)
        forms = {skeleton(target) for _, target in task.train + task.validation + task.test}
        # Every weekday with every month; Vietnamese numbers its months.
        assert len(forms) == (7 if name == "vietnamese" else 7 * 12), name
        assert not seen & forms, name


def test_pretraining_prompts_name_no_held_out_locale(stream):
    build_dates, pairs = stream
    prompts = {source.split(": ", 1)[0].split(" ")[0] for source, _ in pairs}
    assert prompts == {*build_dates.LOCALES, "iso", "copy"}
    assert not prompts & {"de", "it", "vi", "ru"}


def test_held_out_days_are_not_in_the_pretraining_stream(stream):
    _, pairs = stream
    task = load_task("german")
    unseen = {source for source, _ in task.train + task.validation + task.test}
    assert not {target for _, target in pairs} & unseen
    assert not {source.split(": ", 1)[1] for source, _ in pairs} & unseen


def test_smoke_rebuild_writes_the_same_bytes_twice(stream, tmp_path):
    build_dates, _ = stream
    for folder in ("a", "b"):
        build_dates.build(tmp_path / folder, smoke=True)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 10
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_tasks_rebuild_to_what_ships(stream):
    build_dates, _ = stream
    # The shipped ones come from this release; another brings another CLDR, and may differ.
    if build_dates.babel.__version__ != "2.19.0":
        pytest.skip(f"the tasks were written by babel 2.19.0, not {build_dates.babel.__version__}")
    days = build_dates.split_days()
    for name in build_dates.DESCRIPTIONS:
        task = load_task(name)
        rows = [("train", *pair) for pair in task.train] + [("validation", *p) for p in task.validation]
        assert rows + [("test", *pair) for pair in task.test] == build_dates.task_rows(name, days)


def test_pad_batch_masks_padding_and_ignores_it_in_the_loss():
    batch = pad_batch([[5, 1], [6, 7, 1]], [[8, 9, 1], [1]])
    assert batch["input_ids"].tolist() == [[5, 1, 0], [6, 7, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[8, 9, 1], [1, -100, -100]]
    with pytest.raises(ValueError, match="2 and 1"):
        pad_batch([[1], [1]], [[1]])


def test_pretrain_learns_and_refuses_too_few_batches():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=16, d_kv=5, d_ff=16, num_heads=2, num_layers=1, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    batch = pad_batch([[5, 6, 1]] * 4, [[7, 8, 1]] * 4)
    messages = []
    losses = pretrain(model, [batch] * 60, warmup_steps=5, total_steps=60, log=messages.append)
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 4
    assert messages[-1].startswith("step 60/60: loss")
    with pytest.raises(ValueError, match="after 3 of total_steps=4"):
        pretrain(model, [batch] * 3, warmup_steps=1, total_steps=4)


def test_save_half_leaves_the_model_alone_and_refuses_overflow(tmp_path):
    model, _ = load_base("dates")
    before = model.shared.weight.clone()
    path = save_half(model, tmp_path)
    assert model.dtype == torch.float32
    assert torch.equal(model.shared.weight, before)
    assert load_file(path)["shared.weight"].dtype == torch.float16
    with torch.no_grad():
        model.shared.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"shared\.weight"):
        save_half(model, tmp_path)
