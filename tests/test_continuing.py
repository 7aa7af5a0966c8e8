"""Pairs for a decoder alone: batches, generation, `fit`, and the command line."""

import csv
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from families_oracle import make_model as make_family
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from helpers import ModelWithPrefix, Prefix, fit, generate_texts, load_base, train
from helpers.tuning.continuing import collate_continuations, continuations, cut_continuations, sources_of
from helpers.tuning.losses import has_labelled_loss, labelled_loss
from helpers.tuning.pairs import data_set

LETTERS = "abcdefg"
PAIRS = [(LETTERS[number % 3 : 3 + number % 4], LETTERS[number % 5] * (1 + number % 2)) for number in range(24)]
TEMPLATE = (
    "{% for said in messages %}<{{ said.role }}>{{ said.content }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


def tokenizer_of_letters(**tokens) -> PreTrainedTokenizerFast:
    """One token a letter, no end token of its own, as GPT's tokenizers are."""
    known = ["<end>", *LETTERS, "\n", *"<>wnsru"]
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(known)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"eos_token": "<end>"} | tokens))


def make_llama(seed=0, **options) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=16, num_key_value_heads=2, head_dim=10, bos_token_id=None, **sizes | options)
    return LlamaForCausalLM(config).eval()


# --- texts and batches -----------------------------------------------------------------------------------------------


def test_the_target_stands_behind_the_source_and_its_separator():
    tokenizer = tokenizer_of_letters()
    end, a, b, c, line = tokenizer.convert_tokens_to_ids(["<end>", "a", "b", "c", "\n"])
    assert continuations(tokenizer, [("ab", "c")]) == [([a, b, line], [c, end])]
    assert continuations(tokenizer, [("ab", "c")], separator="") == [([a, b], [c, end])]


def test_no_separator_where_each_source_ends_with_a_token_of_its_own():
    tokenizer = ByT5Tokenizer()
    (given, target) = continuations(tokenizer, [("ab", "c")])[0]
    assert given == tokenizer("ab").input_ids
    assert given[-1] == target[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(target[:-1]) == "c"


def test_the_chat_template_writes_the_source():
    tokenizer = tokenizer_of_letters(chat_template=TEMPLATE)
    ((given, _),) = continuations(tokenizer, [("ab", "c")], chat=True)
    assert given == tokenizer("<user>ab<answer>").input_ids


@pytest.mark.parametrize(
    ("tokens", "form", "message"),
    [
        ({"eos_token": None}, {}, "the tokenizer has no eos_token"),
        ({}, {"chat": True}, "the tokenizer has no chat template: leave chat out"),
        ({}, {"separator": ""}, "an empty source, with an empty separator"),
    ],
)
def test_what_cannot_be_written_is_refused(tokens, form, message):
    with pytest.raises(ValueError, match=message):
        continuations(tokenizer_of_letters(**tokens), [("", "a")], **form)


def test_a_batch_has_labels_for_the_target_alone_and_gives_its_sources_back():
    texts = [([5, 6, 7], [8, 9]), ([4], [3, 2, 1])]
    batch = collate_continuations(ByT5Tokenizer(), texts)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 8, 9], [-100, 3, 2, 1, -100]]
    sources = sources_of(batch)
    assert sources["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert sources["input_ids"][0].tolist() == [5, 6, 7]
    assert sources["input_ids"][1, 2] == 4
    with pytest.raises(ValueError, match="at least one source and target, got 0"):
        collate_continuations(ByT5Tokenizer(), [])


def test_a_source_is_cut_at_its_beginning_and_a_target_keeps_its_end():
    cut = cut_continuations([([1, 2, 3], [4, 5, 6, 0]), ([1], [4, 0])], 2, 3)
    assert cut == (([[2, 3], [1]], 1), ([[4, 5, 0], [4, 0]], 1))
    said = []
    rows = data_set(tokenizer_of_letters(), [("abc", "ab"), ("a", "b")], 3, 2, said.append, form={})
    assert [len(row["input_ids"]) for row in rows] == [3, 2]
    assert said == [
        "note: 1 of 2 sources are longer than 3 tokens and are cut",
        "note: 1 of 2 targets are longer than 2 tokens and are cut",
        "note: 1 of 2 targets cannot be written exactly with this tokenizer and this length",
    ]


# --- training and generating -----------------------------------------------------------------------------------------


def test_fit_learns_the_targets_and_generation_writes_them():
    model, tokenizer = make_llama().requires_grad_(False), tokenizer_of_letters()
    nn.init.normal_(model.lm_head.weight)  # a random model hardly listens to its layers
    prefix = Prefix.for_model(model, prefix_length=4, init_std=1.0)
    pairs = [("ab", "cd"), ("g", "cd"), ("abcdef", "cd")]
    with prefix.attached(model):
        before = generate_texts(model, tokenizer, ["ab", "g", "abcdef"], max_new_tokens=4)
        losses = fit(model, prefix.parameters(), tokenizer, pairs, steps=60, batch_size=3, learning_rate=0.3)
        written = [text.replace(" ", "") for text in generate_texts(model, tokenizer, ["ab", "g", "abcdef"])]
    assert losses[-1] < 0.2 < losses[0]
    assert written == ["cd"] * 3
    assert [text.replace(" ", "") for text in before] != written


def test_the_loss_counts_each_token_of_the_targets_and_nothing_else():
    model, tokenizer = make_llama(), tokenizer_of_letters()
    texts = continuations(tokenizer, PAIRS[:4])
    with torch.no_grad():
        got = model(**collate_continuations(tokenizer, texts)).loss
        by_hand = []
        for given, target in texts:
            shares = model(torch.tensor([[*given, *target]])).logits[0].log_softmax(dim=-1)
            by_hand += [-shares[len(given) + place - 1, token] for place, token in enumerate(target)]
    torch.testing.assert_close(got, torch.stack(by_hand).mean())


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Gemma 2", "GPT-OSS", "Phi-3"])
def test_the_labelled_loss_is_the_models_own(family):
    """With the logits of the labelled tokens alone; Gemma's are capped behind its head."""
    model = make_family(family)
    prefix = Prefix.for_model(model, init_std=1.0).double()
    batch = collate_continuations(ByT5Tokenizer(), [([5, 6, 7], [8, 9]), ([4], [3, 2, 1]), ([9] * 6, [30, 7])])
    widths, hook = [], lambda *given: widths.append(given[2].shape[:-1].numel())
    with prefix.attached(model):
        found = []
        for loss_of in (lambda: model(**batch).loss, lambda: labelled_loss(model, batch)):
            with model.get_output_embeddings().register_forward_hook(hook):
                loss = loss_of()
            found.append((loss.detach(), *torch.autograd.grad(loss, list(prefix.parameters()))))
    assert has_labelled_loss(model)
    for own, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), own.double(), rtol=1e-5, atol=1e-6)
    assert widths == [3 * 8, 2 + 3 + 2]
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_each_text_is_what_is_written_alone():
    model, tokenizer = make_llama(), tokenizer_of_letters()
    sources = ["a", "bcdefg", "cd"]
    with Prefix.for_model(model, init_std=1.0).attached(model):
        together = generate_texts(model, tokenizer, sources, max_new_tokens=5)
        alone = [generate_texts(model, tokenizer, [source], max_new_tokens=5)[0] for source in sources]
    assert together == alone
    assert len(set(together)) > 1


def test_label_smoothing_shifts_the_labels(tmp_path):
    """transformers' Trainer shifts them where the model's class is known to be a causal one."""
    tokenizer, prefixed = tokenizer_of_letters(), ModelWithPrefix(make_llama(), Prefix.for_model(make_llama()))
    args = TrainingArguments(tmp_path, label_smoothing_factor=1e-9, report_to="none", use_cpu=True)
    trainer = Trainer(prefixed, args, processing_class=tokenizer)
    batch = collate_continuations(tokenizer, continuations(tokenizer, PAIRS[:5]))
    wanted = prefixed(**batch).loss
    got = trainer.compute_loss(prefixed, dict(batch))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("form", [{"separator": " "}, {"chat": True}])
def test_an_encoder_decoder_has_no_separator_and_no_chat(form):
    model, tokenizer = load_base("dates")
    prefix = Prefix.for_model(model)
    with prefix.attached(model), pytest.raises(ValueError, match="a T5ForConditionalGeneration reads the source in"):
        generate_texts(model, tokenizer, ["a"], **form)
    with prefix.attached(model), pytest.raises(ValueError, match="separator and chat are for a decoder alone"):
        fit(model, prefix.parameters(), tokenizer, [("a", "b")], steps=1, **form)


def test_what_a_decoder_alone_has_not():
    model = make_llama()
    prefix = Prefix.for_model(model)
    with prefix.attached(model), pytest.raises(ValueError, match="has no encoder whose output could be cached"):
        fit(model, prefix.parameters(), tokenizer_of_letters(), PAIRS, steps=1, cache_encoder=True)
    with prefix.attached(model), pytest.raises(TypeError, match="LeanT5 needs a T5ForConditionalGeneration"):
        fit(model, prefix.parameters(), tokenizer_of_letters(), PAIRS, steps=1, lean=True)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With pairs.jsonl, and a Llama and its tokenizer in base/, in chat/ with a template."""
    folder = tmp_path_factory.mktemp("continuing")
    for name, tokens in {"base": {}, "chat": {"chat_template": TEMPLATE}}.items():
        make_llama().save_pretrained(folder / name)
        tokenizer_of_letters(**tokens).save_pretrained(folder / name)
    lines = [json.dumps({"source": source, "target": target}) for source, target in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def command(folder, output, base="base", **options):
    given = {"base": folder / base, "train_file": folder / "pairs.jsonl", "output_dir": output, "max_steps": 8}
    given |= {"per_device_train_batch_size": 4, "prefix_length": 3, "max_target_length": 5, "save_steps": 4, **options}
    return [f"--{name}={value}" for name, value in given.items()]


@pytest.mark.parametrize(("base", "form"), [("base", {}), ("base", {"separator": "w"}), ("chat", {"chat": True})])
def test_the_command_scores_what_is_written_with_the_prefix(folder, tmp_path, capsys, base, form):
    train.main(command(folder, tmp_path, base, **form))
    scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    lines = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    predictions = [json.loads(line) for line in lines]
    model, tokenizer = load_base(folder / base)
    prefix = Prefix.from_pretrained(tmp_path / "prefix")
    assert prefix.sites == ("decoder",)
    sources = [entry["source"] for entry in predictions]
    with prefix.attached(model):
        texts = generate_texts(model, tokenizer, sources, max_new_tokens=5, **form)
        held_out = [(entry["source"], entry["target"]) for entry in predictions]
        texts_of = continuations(tokenizer, held_out, **form)
        loss = model(**collate_continuations(tokenizer, texts_of)).loss.item()
    assert [entry["prediction"] for entry in predictions] == texts
    assert scores["validation_loss"] == pytest.approx(loss, rel=1e-5)
    shown = capsys.readouterr().out
    assert all(f", {name}={value!r})" in shown for name, value in form.items())


def test_the_command_goes_on_where_it_stopped(folder, tmp_path):
    train.main(command(folder, tmp_path / "whole"))
    train.main(command(folder, tmp_path / "stopped"))
    for name in ("checkpoint-8", "prefix"):
        (tmp_path / "stopped" / name).rename(tmp_path / f"hidden-{name}")
    train.main(command(folder, tmp_path / "stopped"))
    (whole, stopped) = (load_file(next((tmp_path / n / "prefix").glob("*.safetensors"))) for n in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_a_run_is_not_continued_in_another_form(folder, tmp_path, capsys):
    train.main(command(folder, tmp_path, "chat", chat=True))
    assert "holds checkpoints of a run with chat True" in refused(capsys, command(folder, tmp_path, "chat"))


def test_two_processes_learn_and_score_what_one_does(folder, tmp_path):
    """Each pads its own batches, and each writes behind its own sources."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = {"optim": "sgd", "learning_rate": 3.0, "max_steps": 2, "validation_share": 0.3}
    two = command(folder, tmp_path / "two", **options, per_device_eval_batch_size=2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": os.devnull}
    subprocess.run([*launch, "-m", "helpers.train", *two], env=environment, check=True, capture_output=True)
    train.main(command(folder, tmp_path / "one", **{**options, "per_device_train_batch_size": 8}))
    losses = []
    for name in ("one", "two"):
        with (tmp_path / name / "loss.csv").open(encoding="utf-8", newline="") as file:
            losses.append([float(row["loss"]) for row in csv.DictReader(file)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 2
    predictions = [(tmp_path / name / "predictions.jsonl").read_text(encoding="utf-8") for name in ("one", "two")]
    assert predictions[0] == predictions[1]
    assert len(predictions[0].splitlines()) == 7


def refused(capsys, arguments) -> str:
    with pytest.raises(SystemExit) as exit_:
        train.main(arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_the_command_refuses(folder, tmp_path, capsys):
    assert "the tokenizer has no chat template" in refused(capsys, command(folder, tmp_path, chat=True))
    assert "has no encoder and no cross attention" in refused(
        capsys, [*command(folder, tmp_path), "--sites", "encoder", "cross"]
    )
    assert "are for a decoder alone" in refused(capsys, ["--base=dates", *command(folder, tmp_path, chat=True)[1:]])
    bert = BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9)
    BertLMHeadModel(bert).save_pretrained(tmp_path / "bert")
    tokenizer_of_letters().save_pretrained(tmp_path / "bert")
    sentence = refused(capsys, [f"--base={tmp_path / 'bert'}", *command(folder, tmp_path)[1:]])
    assert re.search("a BertLMHeadModel writes no texts", sentence)
