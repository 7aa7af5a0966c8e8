"""The measuring script: what it runs, how it chooses rates, what it stores, and the stored scores themselves."""

import csv
import shutil
from dataclasses import asdict, replace

import pytest
import torch

from helpers.bases.build import measure as script
from helpers.bases.build import plans
from helpers.bases.build.plans import Entry, chosen_rate, prefix_run
from helpers.bases.build.pretraining import sha256
from helpers.bases.build.wordnet_gpt import new_model as new_gpt
from helpers.bases.load import load_base
from helpers.bases.scores import BASES, COLUMNS, Run, read_scores, run_of
from helpers.bases.tasks import load_task
from helpers.tuning.attach import T5Prefix, detach_prefix

METHODS = [
    Run("german", "frozen"),
    Run("german", "majority"),
    prefix_run("german", 2, 2, learning_rate=0.1),
    prefix_run("german", 3, 2, learning_rate=0.1, sites="encoder+cross", init="activations", train_pairs=5),
    prefix_run("german", 3, 2, learning_rate=0.1, init="normal"),
    prefix_run("german", 2, 2, learning_rate=3e-3, init="mlp", mid_dim=7),
    Run("german", "full", learning_rate=1e-3, steps=2, seed=0),
    Run("german", "scratch", learning_rate=1e-3, steps=2, seed=0),
    Run("german", "prompt", prefix_length=4, init="peft", learning_rate=1.0, steps=2, seed=0),
    Run("german", "lora", rank=3, init="peft", learning_rate=1e-2, steps=2, seed=0),
]


@pytest.fixture
def small_task(monkeypatch):
    """German with a dozen pairs, so that a run takes a second."""
    german = load_task("german")
    few = replace(german, train=german.train[:12], validation=german.validation[:3], test=german.test[:4])
    monkeypatch.setattr(script, "load_task", lambda name: few)
    return few


@pytest.fixture
def folder(tmp_path):
    """A copy of the dates base, to write results into."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(BASES / "dates" / name, tmp_path)
    return tmp_path


def row(run, validation=0.0, loss=1.0, test=0.0):
    scores = {"validation_exact": validation, "validation_loss": loss, "test_exact": test}
    return dict.fromkeys(COLUMNS) | asdict(run) | scores


def plan_of(runs):
    return [Entry(run, (run.learning_rate,), seeds=(run.seed,)) for run in runs]


def test_every_method_runs_and_gives_a_row_that_is_read_back(small_task, folder):
    script.run_plan("dates", folder, plan_of(METHODS))
    rows = read_scores(folder / "scores.csv")
    assert [run_of(row) for row in rows] == METHODS
    by_hand = {"frozen": 0, "majority": 0, "full": 1_033_984, "scratch": 1_033_984, "prompt": 4 * 128, "lora": 11_520}
    for row in rows:
        assert row["base"] == sha256(folder / "model.safetensors")[:12]
        assert 0 <= row["test_exact"] <= 1
        if row["method"] in by_hand:
            assert row["parameters"] == by_hand[row["method"]]
        if row["method"] != "majority":
            assert 0.1 < row["validation_loss"] < 40
    assert [row["parameters"] for row in rows if row["method"] == "prefix"][:3] == [4608, 4608, 6912]


def test_rows_that_exist_are_skipped_unless_the_weights_are_others(small_task, folder, monkeypatch):
    plan = plan_of(METHODS[1:3])
    script.run_plan("dates", folder, plan[:1])
    script.run_plan("dates", folder, plan)
    script.run_plan("dates", folder, plan)
    assert [run_of(row) for row in read_scores(folder / "scores.csv")] == METHODS[1:3]
    monkeypatch.setattr(script, "sha256", lambda path: "0" * 64)
    script.run_plan("dates", folder, plan)
    assert [row["base"][:4] for row in read_scores(folder / "scores.csv")].count("0000") == 2


def test_a_run_repeats_itself_and_the_seed_changes_it(small_task, folder):
    run = prefix_run("german", 3, 3, learning_rate=0.3, train_pairs=5)
    first, again, other = (script.measure(each, folder)[0] for each in (run, run, replace(run, seed=1)))
    assert first["validation_loss"] == again["validation_loss"] != other["validation_loss"]


def test_the_seed_decides_the_pairs_and_the_first_prefix(monkeypatch, folder):
    monkeypatch.setattr(script, "generate_texts", lambda model, tokenizer, sources, **options: sources)
    drawn, prefixes = [], []
    monkeypatch.setattr(script, "fit", lambda model, parameters, tokenizer, pairs, **options: drawn.append(pairs))
    for seed in (0, 1, 0):
        run = prefix_run("german", 2, 1, learning_rate=0.1, train_pairs=16, seed=seed)
        prefixes.append(script.measure(run, folder)[1].key_values("cross"))
    assert drawn[0] == drawn[2] != drawn[1]
    assert len(set(drawn[1])) == 16
    assert set(drawn[0]) | set(drawn[1]) <= set(load_task("german").train)
    assert torch.equal(prefixes[0], prefixes[2])
    assert not torch.equal(prefixes[0], prefixes[1])


@pytest.mark.parametrize(("init", "deviation"), [("small", 0.02), ("normal", 1.0)])
def test_a_prefix_starts_as_its_run_says_on_a_frozen_model(init, deviation):
    model, tokenizer = load_base("dates")
    called, parameters, prefix = script.prepare(prefix_run("german", 20, 1, init=init), model, tokenizer, [])
    assert called is model
    assert [id(parameter) for parameter in parameters] == [id(parameter) for parameter in prefix.parameters()]
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for parameter in parameters:
        assert parameter.std().item() == pytest.approx(deviation, rel=0.1)


def grid_of_rows(scores, **options):
    """A row for each `{(rate, seed): (validation exact, validation loss, test exact)}`."""
    return [
        row(prefix_run("german", 5, 60, learning_rate=rate, seed=seed, **options), *each)
        for (rate, seed), each in scores.items()
    ]


# Seed 0 alone prefers 0.1, and the luckiest run, and the test, 3; on average 0.3 and 1 are equal, but for the loss.
GRID = {
    (0.1, 0): (0.9, 0.1, 0.5),
    (0.1, 1): (0.5, 0.1, 0.5),
    (0.3, 0): (0.7, 0.8, 0.6),
    (0.3, 1): (0.8, 0.9, 0.6),
    (1.0, 0): (0.8, 0.6, 0.4),
    (1.0, 1): (0.7, 0.9, 0.4),
    (3.0, 0): (0.4, 0.1, 0.9),
    (3.0, 1): (1.0, 0.1, 0.9),
}


def test_the_rate_is_chosen_by_the_mean_on_validation_then_by_loss_and_never_on_test():
    entry = Entry(prefix_run("german", 5, 60), (0.1, 0.3, 1.0, 3.0), seeds=(0, 1))
    rows = grid_of_rows(GRID)
    assert chosen_rate(rows, entry) == 1.0
    assert chosen_rate(rows[::-1], entry) == 1.0
    assert plans.chosen_runs(rows, task="german", steps=60) == rows[4:6]
    assert chosen_rate(rows, Entry(prefix_run("german", 2, 60), like=entry)) == 1.0
    others = grid_of_rows({(3.0, 0): (1.0, 0.0, 0.0), (3.0, 1): (1.0, 0.0, 0.0)}, train_pairs=7)
    assert chosen_rate(rows + others, entry) == 1.0  # another setting has no say
    assert chosen_rate([], replace(entry, rates=(0.3,))) == 0.3
    with pytest.raises(ValueError, match=r"rates \[3.0\] are not measured with every seed"):
        chosen_rate(rows[:-1], entry)


def test_every_rate_runs_with_every_seed_and_a_like_entry_takes_the_chosen_one():
    entry = Entry(prefix_run("german", 5, 60), (0.1, 0.3))
    like = Entry(prefix_run("german", 2, 60), like=entry, seeds=(0, 1))
    rows = []
    for run in plans.runs_to_do(rows, [entry, like]):
        rows.append(row(run, validation=run.learning_rate))
    done = [(each["prefix_length"], each["learning_rate"], each["seed"]) for each in rows]
    grid = [(5, rate, seed) for seed in (0, 1, 2) for rate in (0.1, 0.3)]
    assert done == [*grid, (2, 0.3, 0), (2, 0.3, 1)]
    assert not list(plans.runs_to_do(rows, [entry, like]))
    assert list(plans.runs_to_do(rows[:3] + rows[4:], [entry])) == [run_of(rows[3])]


def test_runs_that_cannot_be_compared_are_refused():
    rows = grid_of_rows(GRID)
    one_rate = [*rows[:2], row(replace(run_of(rows[0]), task="italian"))]
    assert plans.chosen_runs(one_rate, task="italian") == one_rate[2:]
    untrained = [row(Run("german", "frozen"), 0.0, None)]
    assert plans.chosen_runs(untrained, method="frozen") == untrained
    for wrong in (rows[:3], rows[:1] + rows[3:4], rows + rows[:1], rows[:2] + grid_of_rows(GRID, train_pairs=7)[:2]):
        with pytest.raises(ValueError, match="need the same seeds, once each, to be compared, and have"):
            plans.chosen_runs(wrong, task="german")
    with pytest.raises(ValueError, match=r"no run has \{'task': 'russian'\}"):
        plans.chosen_runs(rows, task="russian")


@pytest.mark.parametrize("base", plans.PLANS)
def test_compared_methods_have_about_as_many_numbers_as_the_prefix(base):
    task = {"dates": "german", "wordnet": "card", "gpt": "card"}[base]
    if base == "gpt":  # not bundled yet: of its shape
        model, tokenizer, sites = new_gpt(4096), load_base("wordnet")[1], {"sites": "decoder"}
    else:
        (model, tokenizer), sites = load_base(base), {}
    runs = (prefix_run(task, plans.PREFIX_LENGTH[base], 1, **sites), Run(task, "lora", rank=plans.LORA_RANK[base]))
    sizes = []
    for run in runs:
        _, parameters, prefix = script.prepare(run, model, tokenizer, [])
        sizes.append(sum(parameter.numel() for parameter in parameters))
        if prefix is not None:
            detach_prefix(model)
    assert sizes[0] == sizes[1]


def test_activations_are_the_keys_and_values_that_the_model_computes():
    model, tokenizer = load_base("dates")
    pairs = load_task("german").train[:2]
    prefix = script.prefix_from_activations(model, tokenizer, pairs, 7, ("decoder", "cross"))
    assert isinstance(prefix, T5Prefix)
    assert prefix.sites == ("decoder", "cross")
    source, target = (tokenizer(text, return_tensors="pt").input_ids[:, :7] for text in pairs[0])
    with torch.no_grad():
        caches = model(input_ids=source, decoder_input_ids=target, use_cache=True).past_key_values
    for site, cache in (("decoder", caches.self_attention_cache), ("cross", caches.cross_attention_cache)):
        for layer, stored in enumerate(cache.layers):
            torch.testing.assert_close(prefix.key_values(site)[layer, 0], stored.keys)
            torch.testing.assert_close(prefix.key_values(site)[layer, 1], stored.values)
    with pytest.raises(ValueError, match="too few for 99 slots"):
        script.prefix_from_activations(model, tokenizer, pairs, 99, ("decoder",))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("german", "magic", steps=1, seed=0), "no method 'magic'"),
        (prefix_run("german", 2, 1, init="large"), "init must be"),
        (prefix_run("german", 2, 1, mid_dim=4), "go together"),
        (prefix_run("german", 2, 1, init="mlp"), "go together"),
        (prefix_run("german", 2, 1, sites="decoder+roof"), "sites must be"),
    ],
)
def test_an_impossible_run_is_refused(run, message):
    model, tokenizer = load_base("dates")
    with pytest.raises(ValueError, match=message):
        script.prepare(run, model, tokenizer, load_task("german").train)


def test_a_prefix_is_saved_if_it_scores_what_its_row_says(small_task, folder):
    entry = Entry(prefix_run("german", 2, 2), (0.1, 0.3), seeds=(0,))
    script.run_plan("dates", folder, [entry])
    script.save_prefixes("dates", folder, [entry])
    saved = T5Prefix.from_pretrained(folder / "prefixes" / "german")
    best = replace(entry.run, learning_rate=chosen_rate(read_scores(folder / "scores.csv"), entry))
    _, trained = script.measure(best, folder)
    assert torch.equal(saved.key_values("cross"), trained.key_values("cross"))

    text = (folder / "scores.csv").read_text(encoding="utf-8")
    rows = read_scores(folder / "scores.csv")
    (folder / "scores.csv").unlink()
    for each in rows:
        script.append_score(folder / "scores.csv", each | {"test_exact": 0.5})
    with pytest.raises(ValueError, match="before: not saved"):
        script.save_prefixes("dates", folder, [entry])
    assert text != (folder / "scores.csv").read_text(encoding="utf-8")


def test_a_file_with_other_columns_is_refused(tmp_path):
    (tmp_path / "scores.csv").write_text("task,score\ngerman,1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has the columns"):
        read_scores(tmp_path / "scores.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either"),
        (["--plan", "dates", "--pretraining", "dates"], "give either"),
        (["--plan", "roof"], "invalid choice"),
        (["--pretraining", "dates", "--save-prefix"], "goes with --plan"),
    ],
)
def test_the_command_line_says_what_it_needs(arguments, message, capsys):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert message in capsys.readouterr().err


def test_the_plan_is_listed_without_running(capsys):
    script.main(["--plan", "wordnet", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(plans.wordnet_plan())
    assert "'category', 'method': 'prefix', 'prefix_length': 10" in lines[0]


def test_the_smallest_plan_runs_from_the_command_line(small_task, folder, monkeypatch):
    monkeypatch.setitem(plans.PLANS, "dates", lambda: plan_of(METHODS[1:2]))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    script.main(["--plan", "dates", "--base-folder", str(folder)])
    assert len(read_scores(folder / "scores.csv")) == 1


STORED = sorted(BASES.glob("*/scores.csv"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
def test_the_stored_prefixes_fit_their_base_and_write_what_their_scores_say(path):
    entries = [entry for entry in plans.SHIPPED[path.parent.name] if (path.parent / "prefixes").exists()]
    for entry in entries:
        prefix = T5Prefix.from_pretrained(script.prefix_folder(path.parent, entry.run))
        model, tokenizer = load_base(path.parent.name)
        sources, targets = zip(*load_task(entry.run.task).test[:64], strict=True)
        chosen = replace(entry.run, learning_rate=chosen_rate(read_scores(path), entry))
        stored = next(row for row in read_scores(path) if run_of(row) == chosen)
        with prefix.attached(model):
            texts = script.generate_texts(model, tokenizer, sources, max_new_tokens=96)
        assert abs(script.exact_match(texts, targets) - stored["test_exact"]) < 0.15


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
def test_the_stored_scores_are_of_the_shipped_weights_and_each_run_is_there_once(path):
    rows = read_scores(path)
    runs = [run_of(row) for row in rows]
    assert len(set(runs)) == len(runs)
    assert {row["base"] for row in rows} == {sha256(path.parent / "model.safetensors")[:12]}
    assert {load_task(row["task"]).base for row in rows} == {path.parent.name}
    plan = plans.PLANS[path.parent.name]()
    assert not list(plans.runs_to_do(rows, plan))
    planned = {replace(entry.run, learning_rate=None, seed=None) for entry in plan}
    assert {replace(run, learning_rate=None, seed=None) for run in runs} == planned
    with open(path, encoding="utf-8", newline="") as file:
        assert "\r" not in file.read()
        file.seek(0)
        assert next(csv.reader(file)) == list(COLUMNS)
