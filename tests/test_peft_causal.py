"""Checkpoints exchanged with peft itself for models that are a decoder alone; and what peft does with them."""

import json
import warnings

import pytest
import torch
from families_oracle import difference, make_inputs, make_model, make_prefix
from peft import PeftModel
from peft_report import FAMILIES, REPORT, SAME, measure, tuned_by_peft, versions

from helpers import PeftPrefix, Prefix, PrefixPerRow, from_peft, to_peft
from helpers.tuning.peft_prefix import CONFIG_NAME

STORED = json.loads(REPORT.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def make_peft_prefix(model, prefix_length=3, seed=1):
    torch.manual_seed(seed)
    return PeftPrefix.for_model(model, prefix_length=prefix_length, init_std=1.0).double()


def verdicts(found: dict) -> dict:
    """What is the same on every processor: whether a number is small, and all words."""
    return {name: each if isinstance(each, str) else each < SAME for name, each in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_peft_does(family, tmp_path):
    """The report holds where it was made; other versions are compared with it, and a warning says what changed."""
    found, stored = verdicts(measure(family, tmp_path)), verdicts(STORED["families"][family])
    assert found["forward"], "from_peft's prefix computes something else than peft's forward pass"
    if versions() == STORED["versions"]:
        assert found == stored
    elif found != stored:
        changed = {name: (stored[name], found[name]) for name in stored if found[name] != stored[name]}
        warnings.warn(f"{family}: {versions()} do otherwise than {STORED['versions']}, {changed}", stacklevel=1)


def test_the_report_says_what_the_module_says():
    """With a KV cache, generate drops the prefix in all families; without one, after the first step in most."""
    cached = [found["cached"] for found in STORED["families"].values()]
    uncached = [found["uncached"] for found in STORED["families"].values()]
    assert set(cached) == {"bare", "prefix in the first 0 of 6 steps"}
    assert uncached.count("prefix in the first 1 of 6 steps") > len(uncached) / 2
    assert {found["checkpointing"] for found in STORED["families"].values()} == {"RuntimeError"}


@pytest.mark.parametrize("prefix_projection", [False, True])
def test_a_checkpoint_of_peft_is_read(prefix_projection, tmp_path):
    tuned = tuned_by_peft("Llama", prefix_projection=prefix_projection, encoder_hidden_size=11)
    tuned.save_pretrained(tmp_path)
    model, inputs = make_model("Llama"), make_inputs("Llama")
    prefix = from_peft(tmp_path, model)
    real = inputs["attention_mask"].bool()
    with prefix.attached(model), torch.no_grad():
        assert difference(model(**inputs).logits[real], tuned(**inputs).logits[real]) < 1e-10
    assert type(prefix) is PeftPrefix
    assert not prefix.training


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "Gemma 3"])
def test_peft_reads_what_is_written(family, tmp_path):
    model, inputs = make_model(family), make_inputs(family)
    prefix = make_peft_prefix(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_peft(prefix, tmp_path)
    tuned = PeftModel.from_pretrained(make_model(family), tmp_path).eval()
    real = inputs["attention_mask"].bool()
    with prefix.attached(model), torch.no_grad():
        assert difference(model(**inputs).logits[real], tuned(**inputs).logits[real]) < 1e-10


def test_a_prefix_without_positions_is_written_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="peft adds positions to the slots of the prefix"):
        to_peft(make_prefix(make_model("Llama")), tmp_path)
    assert json.loads((tmp_path / CONFIG_NAME).read_text(encoding="utf-8"))["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "Mistral", "Gemma 2", "Qwen2"])
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 3}], ids=["cached", "uncached", "beams"])
def test_generate_writes_what_the_forward_pass_predicts(family, options):
    model = make_model(family)
    inputs = {"input_ids": make_inputs(family)["input_ids"][:1], "attention_mask": torch.ones(1, 7, dtype=torch.long)}
    with make_peft_prefix(model).attached(model), torch.no_grad():
        output = model.generate(
            **inputs,
            **options,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = model(input_ids=output.sequences[:, :-1]).logits
    if "num_beams" in options:
        chosen = output.beam_indices[0, :6].tolist()
        ours = torch.stack([step[beam] for step, beam in zip(output.logits, chosen, strict=True)])
    else:
        ours = torch.stack(output.logits)[:, 0]
    assert difference(ours, logits[0, -6:]) < 1e-5


def test_left_padding_means_nothing():
    model = make_model("GPT-2")
    text = make_inputs("GPT-2")["input_ids"][:1]
    padded = {
        "input_ids": torch.cat([torch.zeros(1, 2, dtype=torch.long), text], dim=1),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]),
    }
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    with make_peft_prefix(model).attached(model), torch.no_grad():
        alone, behind = model.generate(text, **options), model.generate(**padded, **options)
    for ours, theirs in zip(alone.logits, behind.logits, strict=True):
        assert difference(ours, theirs) < 1e-5


def test_positions_that_are_given_are_moved_too():
    model = make_model("GPT-2")
    ids = make_inputs("GPT-2")["input_ids"][:1]
    positions = torch.arange(7)[None]
    with make_peft_prefix(model).attached(model), torch.no_grad():
        want = model(ids).logits
        assert torch.equal(model(ids, position_ids=positions).logits, want)
        assert torch.equal(model.transformer(ids, None, None, None, positions)[0], model.transformer(ids)[0])
        assert difference(model(ids, position_ids=positions + 2).logits, want) > 1e-2


@pytest.mark.parametrize("family", ["GPT-2", "Gemma 3"])
def test_each_row_has_its_own_positions(family):
    model, inputs = make_model(family), make_inputs(family)
    inputs = {name: torch.cat([each, each[:1]]) for name, each in inputs.items()}
    chosen = [make_peft_prefix(model, 3), make_peft_prefix(model, 5, seed=2), None]
    with torch.no_grad():
        with PrefixPerRow(chosen).attached(model):
            together = model(**inputs).logits
        for row, prefix in enumerate(chosen):
            alone = {name: each[row : row + 1] for name, each in inputs.items()}
            if prefix is None:
                want = model(**alone).logits
            else:
                with prefix.attached(model):
                    want = model(**alone).logits
            real = alone["attention_mask"][0].bool()
            assert difference(together[row, real], want[0, real]) < 1e-5


def test_folded_saved_and_loaded_it_stays_what_it_is(tmp_path):
    model, inputs = make_model("Llama"), make_inputs("Llama")
    torch.manual_seed(1)
    prefix = PeftPrefix.for_model(model, prefix_length=3, mid_dim=11).double()
    with prefix.attached(model), torch.no_grad():
        want = model(**inputs).logits
    folded = prefix.fold()
    folded.save_pretrained(tmp_path)
    for each in (folded, PeftPrefix.from_pretrained(tmp_path)):
        assert type(each) is PeftPrefix
        with each.attached(model), torch.no_grad():
            assert difference(model(**inputs).logits, want) < 1e-12
    with pytest.raises(ValueError, match="was saved by PeftPrefix"):
        Prefix.from_pretrained(tmp_path)


def test_what_is_refused(tmp_path, unchecked):
    tuned_by_peft("Llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a prefix for a T5 has SEQ_2_SEQ_LM and 2"):
        from_peft(tmp_path, make_model("T5"))
    with pytest.raises(ValueError, match="a BertForMaskedLM has no decoder attention"):
        from_peft(tmp_path, make_model("BERT"))
    with pytest.raises(ValueError, match=r"has 2 heads and token_dim 20, but the model has 3 heads of 8"):
        from_peft(tmp_path, make_model("GPT-2"))
    config = json.loads((tmp_path / CONFIG_NAME).read_text(encoding="utf-8"))
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config | {"task_type": "SEQ_2_SEQ_LM"}), encoding="utf-8")
    with pytest.raises(ValueError, match="a prefix for a decoder alone has CAUSAL_LM and 1"):
        from_peft(tmp_path, make_model("Llama"))
    bart = make_model("BART")
    prefix = PeftPrefix.for_model(bart, sites=("decoder",))
    with pytest.raises(ValueError, match="a BartForConditionalGeneration has an encoder"):
        prefix.attach(bart)
    with pytest.raises(ValueError, match=r"pass sites=\('decoder',\)"):
        PeftPrefix.for_model(make_model("T5"))
    layers = make_model("Llama")
    del layers.model.layers[2]
    tuned_by_peft("Llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has num_layers 3, but the model's decoder has 2 layers"):
        from_peft(tmp_path, layers)
