"""What trains beside the prefix: new heads by name; and noise on the embeddings."""

import copy
import json
import warnings

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from test_engines import TOKENIZER, features, make_model, make_prefixed, make_trainer, numbers
from transformers import (
    DataCollatorWithPadding,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
    T5ForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from helpers.tuning import store
from helpers.tuning.attach import T5Prefix, detach_prefix
from helpers.tuning.engines import T5WithPrefix

HEAD = ("classification_head",)
BATCH = {"input_ids": torch.tensor([[5, 6, 1], [7, 8, 1]]), "labels": torch.tensor([0, 2])}


def with_new_head(model_class=T5ForSequenceClassification, seed=0):
    """A base away from its initialisation, with a head that is as transformers makes it."""
    torch.manual_seed(seed)
    made = model_class(make_model(model_class, num_labels=3).config)
    model = make_model(model_class, num_labels=3)
    for name, module in made.named_children():
        if name in ("classification_head", "classifier", "qa_outputs"):
            setattr(model, name, copy.deepcopy(module))
    return model.eval()


def make_classifier(also_train=HEAD, seed=1, **options):
    model = with_new_head()
    torch.manual_seed(seed)
    return T5WithPrefix(model, T5Prefix.for_model(model, prefix_length=4, **options), also_train=also_train)


def make_head_trainer(folder, prefixed, **options):
    options = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.03,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 3,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 0,
        **options,
    }
    texts = ["a", "bb", "ccc", "dddd", "eeeee", "f", "gg", "hhh"]
    examples = [{"input_ids": TOKENIZER(text).input_ids, "labels": len(text) % 3} for text in texts]
    collator = DataCollatorWithPadding(TOKENIZER)
    return Trainer(model=prefixed, args=TrainingArguments(**options), train_dataset=examples, data_collator=collator)


# --- modules by name -------------------------------------------------------------------------------------------------


def test_a_head_trains_saves_and_loads_with_the_prefix_bit_for_bit(tmp_path):
    prefixed = make_classifier(mid_dim=11)
    base = copy.deepcopy(prefixed.model.state_dict())
    trainer = make_head_trainer(tmp_path, prefixed, max_steps=20)
    trainer.train()
    after = prefixed.model.state_dict()
    changed = {name.split(".")[0] for name in base if not torch.equal(base[name], after[name])}
    assert changed == {"classification_head"}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])

    prefixed.eval()
    prefixed.save_pretrained(tmp_path / "saved")
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "saved").iterdir()) == [
        "modules",
        "prefix",
        "prefix_config.json",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = T5WithPrefix.from_pretrained(with_new_head(seed=5), tmp_path / "saved")
    assert not again.training
    assert not again.model.classification_head.training
    assert torch.equal(again(**BATCH).logits, prefixed(**BATCH).logits)
    assert again.also_train == HEAD
    assert all(p.requires_grad for p in again.model.classification_head.parameters())
    assert sum(p.requires_grad for p in again.model.parameters()) == 4
    again.save_pretrained(tmp_path / "again")
    for path in (tmp_path / "saved").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_checkpoints_hold_the_head_and_resuming_equals_training_through(tmp_path):
    through = make_classifier()
    make_head_trainer(tmp_path / "through", through).train()
    kept = load_file(tmp_path / "through" / "checkpoint-6" / "model.safetensors")
    assert {".".join(name.split(".")[:2]) for name in kept} == {"prefix.encoders", "model.classification_head"}
    cut = make_classifier(seed=2)
    make_head_trainer(tmp_path / "through", cut).train(
        resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-3")
    )
    assert through.state_dict().keys() == cut.state_dict().keys()
    assert all(torch.equal(tensor, cut.state_dict()[name]) for name, tensor in through.state_dict().items())


def test_a_checkpoint_without_the_head_is_missed():
    prefixed = make_classifier()
    state = {name: t for name, t in prefixed.state_dict().items() if name.startswith("prefix.")}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*model\.classification_head\.dense\.weight"):
        prefixed.load_state_dict(state)
    assert len(prefixed.load_state_dict(state, strict=False).missing_keys) == 4
    prefixed.load_state_dict(make_classifier().state_dict())


def test_the_head_has_its_dropout_in_training_alone():
    prefixed = make_classifier()
    prefixed.train()
    on = {name for name, module in prefixed.named_modules() if isinstance(module, torch.nn.Dropout) and module.training}
    assert on == {
        "model.classification_head.dropout",
        *(f"prefix.encoders.{site}.dropout" for site in ("encoder", "decoder", "cross")),
    }
    prefixed.eval()
    assert not any(module.training for module in prefixed.modules())


def test_tied_weights_are_trained_and_saved_under_both_names(tmp_path):
    model = make_model()
    prefixed = T5WithPrefix(model, T5Prefix.for_model(model), also_train=("shared", "lm_head"))
    prefixed.model.shared.weight.data.add_(0.5)
    prefixed.eval().save_pretrained(tmp_path)
    again = T5WithPrefix.from_pretrained(make_model(), tmp_path)
    batch = {"input_ids": BATCH["input_ids"], "decoder_input_ids": BATCH["input_ids"]}
    assert torch.equal(again(**batch).logits, prefixed(**batch).logits)
    assert torch.equal(again.model.encoder.embed_tokens.weight, prefixed.model.shared.weight)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("classification_head", TypeError, r"must be a tuple .* got one text: \('classification_head',\)"),
        (("head",), ValueError, "has no module 'head' to train: it has transformer, classification_head"),
        (("classification_head.dropout",), ValueError, r"no module 'classification_head\.dropout' to train"),
        (("",), ValueError, "no module '' to train"),
    ],
)
def test_what_is_no_module_to_train_is_refused_and_nothing_attached(names, error, message):
    model = with_new_head()
    with pytest.raises(error, match=message):
        T5WithPrefix(model, T5Prefix.for_model(model), also_train=names)
    assert not model.transformer.encoder._forward_pre_hooks
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_modules_that_do_not_fit_are_refused_and_nothing_changed(tmp_path):
    make_classifier().save_pretrained(tmp_path)
    other = make_model(T5ForSequenceClassification, num_labels=7)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"do not fit the model: .*'classification_head\.out_proj\.weight': \[3, 16\]"):
        T5WithPrefix.from_pretrained(other, tmp_path)
    with pytest.raises(ValueError, match="has no module 'classification_head'"):
        T5WithPrefix.from_pretrained(make_model(), tmp_path)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in before.items())
    assert not other.transformer.encoder._forward_pre_hooks


# --- the file --------------------------------------------------------------------------------------------------------


def test_an_older_version_refuses_a_prefix_with_modules_and_reads_one_without(tmp_path, monkeypatch):
    make_classifier().save_pretrained(tmp_path / "with")
    make_prefixed().save_pretrained(tmp_path / "without")
    assert json.loads((tmp_path / "with" / store.CONFIG_NAME).read_text(encoding="utf-8"))["format_version"] == 2
    monkeypatch.setattr(store, "FORMAT_VERSION", 1)
    with pytest.raises(ValueError, match="its format_version 2 is newer than 1"):
        T5Prefix.from_pretrained(tmp_path / "with")
    T5Prefix.from_pretrained(tmp_path / "without")


def test_the_prefix_alone_can_be_read_with_a_warning_of_what_is_missing(tmp_path):
    prefixed = make_classifier()
    prefixed.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"classification_head of the model was trained with the prefix in .* both"):
        prefix = T5Prefix.from_pretrained(tmp_path)
    assert torch.equal(prefix.key_values("cross"), prefixed.prefix.key_values("cross"))


def test_a_save_without_modules_removes_those_of_before(tmp_path):
    make_classifier().save_pretrained(tmp_path)
    make_classifier(seed=2).save_pretrained(tmp_path)
    make_prefixed().save_pretrained(tmp_path)
    names = {path.name.split("-")[0] for path in tmp_path.iterdir()}
    assert "modules" not in names or store.fcntl is None
    T5Prefix.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"names": ["classification_head"]}, "needs a 'weights' of type str"),
        ({"names": "head", "weights": "modules-x.safetensors"}, "needs a 'names' of type list"),
        ({"names": [], "weights": "../modules-x.safetensors"}, "must lie in the same folder"),
        ({"names": [], "weights": "modules-x.safetensors"}, r"modules-x\.safetensors is missing"),
        ([], "needs a 'names' of type list"),
    ],
)
def test_modules_that_cannot_be_read_are_one_clear_sentence(tmp_path, modules, message):
    make_classifier().save_pretrained(tmp_path)
    path = tmp_path / store.CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "modules": modules}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        T5WithPrefix.from_pretrained(with_new_head(), tmp_path)


# --- heads that stay frozen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_class", "name", "sites"),
    [
        (T5ForSequenceClassification, "classification_head", ("encoder", "decoder")),
        (T5ForTokenClassification, "classifier", ("encoder",)),
        (T5ForQuestionAnswering, "qa_outputs", ("encoder", "cross")),
    ],
)
def test_a_new_head_that_stays_frozen_is_warned_of(model_class, name, sites):
    model = with_new_head(model_class)
    prefix = T5Prefix.for_model(model, sites=sites)
    with pytest.warns(
        UserWarning, match=rf"the model's {name} .* stays frozen: .*also_train=\('{name}',\)\)"
    ) as caught:
        T5WithPrefix(model, prefix)
    assert len(caught) == 1
    detach_prefix(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        T5WithPrefix(model, prefix, also_train=(name,))
        trained = make_model(model_class)
        T5WithPrefix(trained, T5Prefix.for_model(trained, sites=sites))
        without = T5ForConditionalGeneration(make_model().config)
        T5WithPrefix(without, T5Prefix.for_model(without, sites=sites))


# --- noise on the embeddings -----------------------------------------------------------------------------------------


class Watch(TrainerCallback):
    """For each batch: whether it is trained on, how far its embeddings are from the table's rows, and their shape."""

    def __init__(self, embeddings):
        self.embeddings, self.seen = embeddings, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.embeddings.register_forward_hook(self.compare)  # after the Trainer's own

    def compare(self, module, args, output):
        far = (output - module.weight[args[0]]).abs().max().item()
        self.seen.append((torch.is_grad_enabled(), far, output.shape[1:]))


def test_neftune_noise_reaches_the_source_while_training_and_at_no_other_time(tmp_path):
    losses = {}
    for alpha in (None, 5.0):
        prefixed = make_prefixed()
        trainer = make_trainer(
            tmp_path, prefixed, neftune_noise_alpha=alpha, max_steps=3, eval_strategy="steps", eval_steps=2
        )
        watch = Watch(prefixed.model.encoder.embed_tokens)
        trainer.add_callback(watch)
        trainer.train()
        trainer.predict(features())
        training = [(far, shape) for is_training, far, shape in watch.seen if is_training]
        assert len(training) == 3
        assert len(watch.seen) > 3
        assert all(far == 0 for is_training, far, _ in watch.seen if not is_training)
        for far, shape in training:
            most = 0.0 if alpha is None else alpha / shape.numel() ** 0.5
            assert 0.9 * most <= far <= most + 1e-6
        assert not watch.embeddings.training
        assert not hasattr(watch.embeddings, "neftune_noise_alpha")
        losses[alpha] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[None] != losses[5.0]


def test_the_plain_model_gives_the_noise_to_a_module_that_is_never_called():
    """Why a T5WithPrefix answers otherwise; if transformers changes it one day, both may agree."""
    model = make_model()
    called = []
    model.get_input_embeddings().register_forward_hook(lambda *_: called.append("shared"))
    prefixed = make_prefixed(model)
    prefixed.get_input_embeddings().register_forward_hook(lambda *_: called.append("encoder"))
    prefixed(input_ids=BATCH["input_ids"], labels=BATCH["input_ids"])
    assert called == ["encoder"]


def test_accelerates_own_way_of_saving(tmp_path):
    """As its documentation has it: `save_pretrained` with the main process, a function and a gathered state."""
    accelerator = Accelerator(cpu=True)
    prefixed = accelerator.prepare(make_classifier())
    accelerator.unwrap_model(prefixed).save_pretrained(
        tmp_path,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(prefixed),
    )
    again = T5WithPrefix.from_pretrained(with_new_head(seed=5), tmp_path)
    assert torch.equal(again(**BATCH).logits, prefixed.eval()(**BATCH).logits)
    assert numbers(again.prefix).keys() == numbers(prefixed.prefix).keys()
