"""Checkpoints exchanged with peft itself, on random T5s; and files that are none."""

import json
import os
import pickle
import subprocess
import sys

import oracle
import pytest
import torch
import transformers
from accelerate import cpu_offload
from oracle_table import lacking
from packaging.version import Version
from peft import (
    AutoPeftModelForSeq2SeqLM,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from test_t5 import FAMILIES, by_site, difference, make_inputs, make_model, make_prefix
from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

from helpers.tuning.attach import PrefixPerRow, T5Prefix
from helpers.tuning.peft_prefix import CONFIG_NAME, PICKLE_NAME, WEIGHTS_NAME, PeftT5Prefix, from_peft, to_peft

# Name: sizes of the model, what peft needs to be told of it. By itself it takes d_model for the width and the
# encoder's depth for the decoder's.
FLOAT32 = 5e-4  # of logits up to 6, through layers that round as another processor might
SHAPES = {
    "an even depth": ({"d_model": 15, "num_layers": 4, "num_decoder_layers": 4}, {}),
    "an odd depth": ({"d_model": 15, "num_layers": 5, "num_decoder_layers": 5}, {}),
    "a shallower decoder": ({"d_model": 15, "num_layers": 6, "num_decoder_layers": 2}, {}),
    "a deeper decoder": ({"d_model": 15, "num_layers": 2, "num_decoder_layers": 4}, {"num_layers": 6}),
    "an inner width of its own": ({"d_model": 16, "num_layers": 4, "num_decoder_layers": 4}, {"token_dim": 15}),
}
EVEN = SHAPES["an even depth"][0]


def family_model(family, **options):
    """A model of a family that this transformers can run."""
    if reason := lacking(family.upper(), "forward"):
        pytest.skip(f"transformers {transformers.__version__}: {reason}")
    return make_model(family, **options)


def tuned_by_peft(model, seed=3, num_virtual_tokens=7, **options):
    """`model` as peft wraps it, with a prefix that is strong enough to be seen."""
    config = PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=num_virtual_tokens, **options)
    tuned = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in tuned.prompt_encoder.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return tuned


def inputs_of_many_sizes(**options):
    return make_inputs(batch=2, source=6, target=8, **options)


@pytest.fixture
def checkpoint(tmp_path):
    """A folder that peft has saved a prefix in, for a model of EVEN sizes."""
    tuned_by_peft(make_model(**EVEN)).save_pretrained(tmp_path)
    return tmp_path


def rewrite_config(folder, **changes):
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    config |= changes
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")


# --- from peft -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_peft_saved_computes_what_it_computes_in_peft(family, shape, implementation, tmp_path):
    sizes, options = SHAPES[shape]
    model = family_model(family, implementation=implementation, **sizes)
    inputs = inputs_of_many_sizes()
    without = model(**inputs).logits
    tuned = tuned_by_peft(model, **options)
    in_peft = tuned(**inputs).logits
    tuned.save_pretrained(tmp_path)
    prefix = from_peft(tmp_path, model)
    with prefix.attached(model):
        here = model(**inputs).logits
    assert torch.equal(here, in_peft)
    with T5Prefix(dict(prefix.encoders), prefix.base).attached(model):
        assert difference(model(**inputs).logits, in_peft) > 1e-3  # no position bias
    assert difference(without, in_peft) > 0.1
    assert torch.equal(model(**inputs).logits, without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_in_the_models_precision(dtype, checkpoint):
    model, inputs = make_model(dtype=dtype, **EVEN), inputs_of_many_sizes(left=True)
    in_peft = PeftModel.from_pretrained(model, checkpoint).eval()(**inputs).logits
    with from_peft(checkpoint, model).attached(model):
        assert torch.equal(model(**inputs).logits, in_peft)


@torch.no_grad()
def test_with_masked_decoder_tokens_and_labels(checkpoint):
    model, inputs = make_model(**EVEN), inputs_of_many_sizes(left=True)
    inputs["decoder_attention_mask"] = torch.ones(2, 8, dtype=torch.long)
    inputs["decoder_attention_mask"][1, :3] = 0
    labels = {"input_ids": inputs["input_ids"], "labels": inputs["decoder_input_ids"]}
    tuned = PeftModel.from_pretrained(model, checkpoint).eval()
    logits, loss = tuned(**inputs).logits, tuned(**labels).loss
    with from_peft(checkpoint, model).attached(model):
        assert torch.equal(model(**inputs).logits, logits)
        assert torch.equal(model(**labels).loss, loss)


def test_gradients_are_pefts_and_the_layers_that_shared_a_pair_have_their_parts(tmp_path):
    model, inputs = make_model(**EVEN), inputs_of_many_sizes()
    labels = {"input_ids": inputs["input_ids"], "labels": inputs["decoder_input_ids"]}
    tuned = tuned_by_peft(model)
    tuned.save_pretrained(tmp_path)
    tuned(**labels).loss.backward()
    (in_peft,) = (p.grad.view(7, 4, 30) for p in tuned.prompt_encoder.parameters())
    prefix = from_peft(tmp_path, model)
    with prefix.attached(model):
        model(**labels).loss.backward()
    here = prefix.encoders["decoder"].embedding.grad.view(7, 4, 30)
    assert difference(here[:, [0, 1]] + here[:, [2, 3]], in_peft[:, [0, 2]]) < 1e-6  # pairs 0 2 0 2
    assert here.abs().amax(dim=(0, 2)).min() > 1e-4
    assert not in_peft[:, [1, 3]].any()


@torch.no_grad()
def test_a_reparameterised_prefix_comes_as_peft_saved_it(tmp_path):
    model, inputs = make_model(dtype=torch.float32, **EVEN), inputs_of_many_sizes()
    tuned = tuned_by_peft(model, prefix_projection=True, encoder_hidden_size=9)
    trained = tuned(**inputs).logits
    tuned.save_pretrained(tmp_path)
    assert list(load_file(tmp_path / WEIGHTS_NAME)) == ["prompt_embeddings"]
    prefix = from_peft(tmp_path, model)
    assert prefix.encoders["decoder"].mid_dim is None
    with prefix.attached(model):
        here = model(**inputs).logits
    assert torch.equal(here, PeftModel.from_pretrained(model, tmp_path).eval()(**inputs).logits)
    assert difference(here, trained) < FLOAT32


def test_an_empty_prefix_changes_nothing(tmp_path):
    model, inputs = make_model(**EVEN), inputs_of_many_sizes()
    tuned_by_peft(model, num_virtual_tokens=0).save_pretrained(tmp_path)
    want = model(**inputs).logits
    with from_peft(tmp_path, model).attached(model):
        assert difference(model(**inputs).logits, want) < FLOAT32


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_what_is_read_is_in_full_precision_in_evaluation_mode_and_draws_no_random_numbers(saved, loaded, checkpoint):
    model = make_model(**EVEN)
    tensors = {name: tensor.to(saved) for name, tensor in load_file(checkpoint / WEIGHTS_NAME).items()}
    save_file(tensors, checkpoint / WEIGHTS_NAME)
    before = torch.get_rng_state()
    prefix = from_peft(checkpoint, model)
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.dtype for p in prefix.parameters()} == {loaded}
    assert all(p.requires_grad for p in prefix.parameters())
    assert not prefix.training
    assert prefix.base == T5Prefix.for_model(model).base
    pairs = tensors["prompt_embeddings"].to(loaded).view(7, 4, 2, 3, 5)[:, [0, 2, 0, 2]]
    assert torch.equal(prefix.key_values("decoder"), pairs.permute(1, 2, 3, 0, 4)[:, :, None])


# --- to peft ---------------------------------------------------------------------------------------------------------


def make_peft_prefix(model, prefix_length=7, *, seed=1, **options):
    prefix = make_prefix(model, prefix_length, seed=seed, sites=("decoder",), **options)
    return PeftT5Prefix(dict(prefix.encoders), prefix.base)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_peft_reads_computes_what_it_computes_here(family, shape, tmp_path):
    model, inputs = family_model(family, **SHAPES[shape][0]), inputs_of_many_sizes()
    prefix = make_peft_prefix(model, mid_dim=11 if "depth" in shape else None, dropout=0.5)
    to_peft(prefix.train(), tmp_path)
    assert prefix.training
    with prefix.eval().attached(model):
        here = model(**inputs).logits
    in_peft = PeftModel.from_pretrained(model, tmp_path).eval()(**inputs).logits
    assert difference(here, in_peft) < FLOAT32  # peft holds prefixes in float32
    spare = load_file(tmp_path / WEIGHTS_NAME)["prompt_embeddings"].view(7, -1, 30).abs().amax(dim=(0, 2)) == 0
    assert spare.sum() == 1 - len(model.decoder.block) % 2
    again = from_peft(tmp_path, model)
    assert torch.equal(again.key_values("decoder"), prefix.key_values("decoder"))
    with again.float().attached(model):
        assert torch.equal(model(**inputs).logits, in_peft)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_in_peft_every_layer_trains_a_pair_of_its_own(layers, tmp_path):
    model, inputs = make_model(num_layers=3, num_decoder_layers=layers), inputs_of_many_sizes()
    to_peft(make_peft_prefix(model), tmp_path)
    config = PrefixTuningConfig.from_pretrained(tmp_path)
    config.inference_mode = False
    tuned = get_peft_model(model, config)
    tuned.prompt_encoder["default"].load_prompt_embeddings(load_file(tmp_path / WEIGHTS_NAME)["prompt_embeddings"])
    tuned(input_ids=inputs["input_ids"], labels=inputs["decoder_input_ids"]).loss.backward()
    (pairs,) = (p.grad.view(7, -1, 30) for p in tuned.prompt_encoder.parameters())
    assert (pairs.abs().amax(dim=(0, 2)) > 0).sum() == layers
    assert pairs.shape[1] in (layers, layers + 1)


@torch.no_grad()
def test_a_prefix_without_position_bias_is_written_with_a_warning(tmp_path):
    model, inputs = make_model(**EVEN), inputs_of_many_sizes()
    prefix = make_prefix(model, sites=("decoder",))
    with pytest.warns(UserWarning, match="peft adds T5's position bias to the scores of the prefix"):
        to_peft(prefix, tmp_path)
    in_peft = PeftModel.from_pretrained(model, tmp_path).eval()(**inputs).logits
    with prefix.attached(model):
        assert difference(model(**inputs).logits, in_peft) > 1e-2
    with PeftT5Prefix(dict(prefix.encoders), prefix.base).attached(model):
        assert difference(model(**inputs).logits, in_peft) < FLOAT32


def test_peft_finds_the_base_by_its_name(tmp_path):
    model, inputs = make_model(dtype=torch.float32, **EVEN), inputs_of_many_sizes()
    model.save_pretrained(tmp_path / "base")
    prefix = make_peft_prefix(model)
    to_peft(prefix, tmp_path / "new" / "folder", base_name=str(tmp_path / "base"))
    tuned = AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "new" / "folder").eval()
    with torch.no_grad(), prefix.attached(model):
        assert torch.equal(model(**inputs).logits, tuned(**inputs).logits)


def test_writing_replaces_what_was_there_and_leaves_other_files(checkpoint):
    model = make_model(num_layers=3, num_decoder_layers=3)
    (checkpoint / "notes.txt").write_text("mine", encoding="utf-8")
    names = {path.name for path in checkpoint.iterdir()}
    prefix = make_peft_prefix(model, 2)
    to_peft(prefix, checkpoint)
    assert {path.name for path in checkpoint.iterdir()} == names
    assert (checkpoint / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert torch.equal(from_peft(checkpoint, model).key_values("decoder"), prefix.key_values("decoder"))


@pytest.mark.parametrize("sites", [("encoder",), ("cross",), ("decoder", "cross"), ("encoder", "decoder", "cross")])
def test_sites_that_peft_does_not_have_are_refused(sites, tmp_path):
    prefix = make_prefix(make_model(), sites=sites)
    with pytest.raises(ValueError, match=r"peft has a prefix at site 'decoder' alone, and this one has \("):
        to_peft(prefix, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match=r"got \(.*\): pass sites=\('decoder',\)"):
        PeftT5Prefix(dict(prefix.encoders))


def test_only_one_prefix_can_be_written(unchecked, tmp_path):
    prefix = make_peft_prefix(make_model())
    with pytest.raises(TypeError, match="writes a Prefix, not a PrefixPerRow"):
        to_peft(PrefixPerRow([prefix, None]), tmp_path)

    class Rows(PeftT5Prefix):
        def key_values(self, site):
            return super().key_values(site).expand(-1, -1, 2, -1, -1, -1)

    with pytest.raises(ValueError, match="has 2 rows; fold one prefix at a time"):
        to_peft(Rows(dict(prefix.encoders)), tmp_path)
    assert not list(tmp_path.iterdir())


# --- PeftT5Prefix ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("past", [0, 1, 30, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_have_the_bias_of_the_positions_before_the_first_token(family, past):
    model = make_model(family, num_decoder_layers=2)
    got = make_peft_prefix(model).position_bias(model.decoder, 3, past)
    assert got.shape == (2, 1, 3, 3, 7)
    for layer, block in enumerate(model.decoder.block):
        owner = block if family == "umt5" else model.decoder.block[0]
        table = owner.layer[0].SelfAttention.relative_attention_bias.weight
        for query in range(3):
            for slot in range(7):
                bucket = oracle.bucket((slot - 7) - (past + query), bidirectional=False)
                assert torch.equal(got[layer, 0, :, query, slot], table[bucket])


@pytest.mark.parametrize("family", ["t5", "umt5"])
@torch.no_grad()
def test_generate_writes_what_pefts_forward_pass_predicts(family, tmp_path):
    model, inputs = family_model(family, **EVEN), inputs_of_many_sizes()
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    tuned = tuned_by_peft(model)
    for parameter in tuned.prompt_encoder.parameters():
        parameter.data.mul_(3)
    written = torch.zeros(2, 1, dtype=torch.long)
    for _ in range(12):
        logits = tuned(**source, decoder_input_ids=written).logits[:, -1]
        logits[:, 1] = -torch.inf  # no end of sequence
        written = torch.cat([written, logits.argmax(dim=-1, keepdim=True)], dim=1)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    in_peft = tuned.generate(**source, **options)
    tuned.save_pretrained(tmp_path)
    without = model.generate(**source, **options)
    with from_peft(tmp_path, model).attached(model):
        for mode in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}):
            rows = range(2) if "prompt_lookup_num_tokens" in mode else [slice(None)]  # looks up one row at a time
            for row in rows:
                one = slice(row, row + 1) if isinstance(row, int) else row
                here = model.generate(**{name: t[one] for name, t in source.items()}, **options, **mode)
                assert torch.equal(here, written[one]), mode
    assert not torch.equal(written, without)
    if Version(transformers.__version__) >= Version("5.24"):
        assert torch.equal(in_peft, without)  # what the module's docstring and lesson 6 say of peft


@torch.no_grad()
def test_beams_have_the_scores_of_the_forward_pass():
    model, inputs = make_model(**EVEN), inputs_of_many_sizes()
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with make_peft_prefix(model).attached(model):
        options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "min_new_tokens": 6}
        out = model.generate(**source, **options, length_penalty=0.0, return_dict_in_generate=True, output_scores=True)
        repeated = {name: tensor.repeat_interleave(3, dim=0) for name, tensor in source.items()}
        logits = model(**repeated, decoder_input_ids=out.sequences[:, :-1]).logits
    assert not (out.sequences == 1).any()
    scores = logits.log_softmax(-1).gather(2, out.sequences[:, 1:, None]).sum(dim=(1, 2))
    assert difference(scores, out.sequences_scores) < 1e-5


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_of_a_batch_may_mix_prefixes_with_position_bias_and_without(family, implementation):
    model, inputs = family_model(family, implementation=implementation, **EVEN), make_inputs(batch=5, target=8)
    rows = [
        make_peft_prefix(model, 4),
        make_prefix(model, 9, seed=2, sites=("encoder", "decoder")),
        None,
        make_peft_prefix(model, 6, seed=3),
        make_prefix(model, 2, seed=4, sites=("cross",)),
    ]
    with PrefixPerRow(rows).attached(model):
        together = model(**inputs).logits
    for row, prefix in enumerate(rows):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        if prefix is None:
            alone = model(**one).logits
        else:
            with prefix.attached(model):
                alone = model(**one).logits
        assert difference(together[row : row + 1], alone) < 1e-11


@torch.no_grad()
def test_rows_with_position_bias_keep_to_their_beams():
    model, inputs = make_model(**EVEN), inputs_of_many_sizes()
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    options = {"num_beams": 3, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    rows = [make_peft_prefix(model, 4, std=3.0), make_peft_prefix(model, 6, seed=2, std=3.0)]
    with PrefixPerRow(rows).attached(model):
        together = model.generate(**source, **options)
    for row, prefix in enumerate(rows):
        with prefix.attached(model):
            alone = model.generate(**{name: tensor[row : row + 1] for name, tensor in source.items()}, **options)
        assert torch.equal(together[row : row + 1], alone)
    assert not torch.equal(together[0], together[1])


def test_a_model_whose_weights_are_offloaded(checkpoint):
    model, inputs = make_model(**EVEN), inputs_of_many_sizes()
    with from_peft(checkpoint, model).attached(model):
        want = model(**inputs).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.is_meta
    with from_peft(checkpoint, model).attached(model):
        assert torch.equal(model(**inputs).logits, want)


def test_new_ones_train_fold_save_and_load_as_any_t5prefix(tmp_path):
    model, inputs = make_model(dtype=torch.float32, **EVEN), inputs_of_many_sizes()
    prefix = PeftT5Prefix.for_model(model, prefix_length=7, sites=("decoder",), mid_dim=11)
    assert type(prefix) is PeftT5Prefix
    with prefix.attached(model):
        model(input_ids=inputs["input_ids"], labels=inputs["decoder_input_ids"]).loss.backward()
        want = model(**inputs).logits
    assert all(p.grad.abs().max() > 0 for p in prefix.parameters())
    folded = prefix.fold()
    assert type(folded) is PeftT5Prefix
    assert folded.encoders["decoder"].mid_dim is None
    assert folded.base == prefix.base
    prefix.save_pretrained(tmp_path)
    for other in (folded, PeftT5Prefix.from_pretrained(tmp_path)):
        with other.attached(model):
            assert difference(model(**inputs).logits, want) < 1e-5
    with pytest.raises(ValueError, match="was saved by PeftT5Prefix: load it with that class"):
        T5Prefix.from_pretrained(tmp_path)


def test_gradient_checkpointing_and_embedded_decoder_tokens():
    model, inputs = make_model(**EVEN), inputs_of_many_sizes()
    prefix = make_peft_prefix(model)
    embedded = {**inputs, "decoder_inputs_embeds": model.shared(inputs["decoder_input_ids"])}
    del embedded["decoder_input_ids"]
    with prefix.attached(model):
        model(**inputs).logits.square().sum().backward()
        plain, prefix.encoders["decoder"].embedding.grad = prefix.encoders["decoder"].embedding.grad, None
        assert torch.equal(model(**embedded).logits, model(**inputs).logits)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        model(**inputs).logits.square().sum().backward()
        assert model.decoder.block[0].gradient_checkpointing
    assert difference(prefix.encoders["decoder"].embedding.grad, plain) < 1e-9 * plain.abs().max()


# --- files that are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": ...}, "is not a config of peft: it has no 'peft_type'"),
        ({"peft_type": "LORA"}, "is of peft type LORA: only PREFIX_TUNING is a prefix"),
        ({"task_type": "CAUSAL_LM"}, "has task_type CAUSAL_LM and num_transformer_submodules 2"),
        ({"task_type": ...}, "has task_type None"),
        (
            {"num_transformer_submodules": 1},
            "and num_transformer_submodules 1: a prefix for a T5 has SEQ_2_SEQ_LM and 2",
        ),
        ({"num_layers": ...}, "needs a whole number 'num_layers' of at least 1, got None"),
        ({"num_layers": 0}, "needs a whole number 'num_layers' of at least 1, got 0"),
        ({"num_virtual_tokens": -1}, "needs a whole number 'num_virtual_tokens' of at least 0, got -1"),
        ({"num_attention_heads": "3"}, "needs a whole number 'num_attention_heads' of at least 1, got '3'"),
        ({"token_dim": True}, "needs a whole number 'token_dim' of at least 1, got True"),
        ({"num_virtual_tokens": 8}, r"torch.float32 \[7, 120\], but its adapter_config.json .* = \[8, 120\]"),
        ({"num_layers": 5}, r"torch.float32 \[7, 120\], but its adapter_config.json .* = \[7, 150\]"),
        ({"num_attention_heads": 5}, "has 5 heads and token_dim 15, but the model has 3 heads of 5"),
        (
            {"num_layers": 2, "token_dim": 30},
            "has 3 heads and token_dim 30, but the model has 3 heads of 5, which need token_dim 15",
        ),
        (
            {"num_layers": 2, "num_virtual_tokens": 14},
            "has num_layers 2, but the model's decoder has 4 layers: with fewer pairs than layers peft cannot run",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message, checkpoint):
    rewrite_config(checkpoint, **changes)
    if changes.get("num_virtual_tokens") == 14:
        rows = load_file(checkpoint / WEIGHTS_NAME)["prompt_embeddings"]
        save_file({"prompt_embeddings": rows.view(14, 60)}, checkpoint / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=message) as caught:
        from_peft(checkpoint, make_model(**EVEN))
    assert str(checkpoint) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b'"peft_type"'])
def test_a_config_that_is_none_is_refused(content, checkpoint):
    (checkpoint / CONFIG_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=r"adapter_config.json is not (json|a config of peft): "):
        from_peft(checkpoint, make_model(**EVEN))


def test_a_missing_file_is_named(checkpoint):
    (checkpoint / WEIGHTS_NAME).unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no weights: adapter_model.safetensors is missing"):
        from_peft(checkpoint, make_model(**EVEN))
    (checkpoint / CONFIG_NAME).unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no peft checkpoint: adapter_config.json is missing"):
        from_peft(str(checkpoint), make_model(**EVEN))


def test_a_pickle_is_refused_and_never_opened(checkpoint):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(checkpoint / "sprung"),)

    (checkpoint / WEIGHTS_NAME).unlink()
    (checkpoint / PICKLE_NAME).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"adapter_model.bin is a pickle, .* with safe_serialization=True"):
        from_peft(checkpoint, make_model(**EVEN))
    (checkpoint / PICKLE_NAME).rename(checkpoint / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read: "):
        from_peft(checkpoint, make_model(**EVEN))
    (checkpoint / WEIGHTS_NAME).rename(checkpoint / PICKLE_NAME)
    to_peft(make_peft_prefix(make_model(**EVEN)), checkpoint)
    from_peft(checkpoint, make_model(**EVEN))  # reads what is beside it
    assert not (checkpoint / "sprung").exists()


def test_corrupted_weights_are_refused(checkpoint):
    weights = (checkpoint / WEIGHTS_NAME).read_bytes()
    for damaged in (b"", weights[:5], weights[: len(weights) // 2], weights[:-1], b"\xff" * 64, weights[8:]):
        (checkpoint / WEIGHTS_NAME).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read: "):
            from_peft(checkpoint, make_model(**EVEN))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"must hold 'prompt_embeddings' alone, but holds \[\]"),
        ({"embedding": torch.zeros(7, 120)}, r"but holds \['embedding'\]"),
        ({"prompt_embeddings": torch.zeros(7, 120), "more": torch.zeros(2)}, r"\['more', 'prompt_embeddings'\]"),
        ({"prompt_embeddings": torch.zeros(120, 7)}, r"holds torch.float32 \[120, 7\], .* = \[7, 120\]"),
        ({"prompt_embeddings": torch.zeros(1, 7, 120)}, r"holds torch.float32 \[1, 7, 120\]"),
        ({"prompt_embeddings": torch.zeros(7, 120, dtype=torch.int64)}, r"holds torch.int64 \[7, 120\]"),
    ],
)
def test_foreign_tensors_are_refused(tensors, message, checkpoint):
    save_file(tensors, checkpoint / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=message):
        from_peft(checkpoint, make_model(**EVEN))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"]), "LORA"),
        (PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=7), "PROMPT_TUNING"),
    ],
)
def test_other_methods_of_peft_are_refused(config, name, tmp_path):
    get_peft_model(make_model(**EVEN), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"is of peft type {name}: only PREFIX_TUNING is a prefix"):
        from_peft(tmp_path, make_model(**EVEN))


def test_a_width_that_peft_itself_cannot_run_is_refused(tmp_path):
    model, inputs = make_model(d_model=16), inputs_of_many_sizes()  # 3 heads of 5
    tuned = tuned_by_peft(model)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        tuned(**inputs)
    tuned.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="token_dim 16, but the model has 3 heads of 5, which need token_dim 15"):
        from_peft(tmp_path, model)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 5, "d_kv": 3}, "has 3 heads and token_dim 15, but the model has 5 heads of 3"),
        ({"d_kv": 4}, "but the model has 3 heads of 4, which need token_dim 12"),
        ({"num_decoder_layers": 5}, "has num_layers 4, but the model's decoder has 5 layers"),
    ],
)
def test_a_model_of_another_shape_is_refused(sizes, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        from_peft(checkpoint, make_model(**{**EVEN, **sizes}))


def test_models_without_a_t5_decoder_are_refused(checkpoint):
    with pytest.raises(ValueError, match="a BertModel has no decoder attention"):
        from_peft(
            checkpoint, BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        )
    sizes = {"vocab_size": 9, "d_model": 15, "d_kv": 5, "num_heads": 3, "d_ff": 7, "num_layers": 1}
    with pytest.raises(ValueError, match="a T5EncoderModel has no decoder attention"):
        from_peft(checkpoint, T5EncoderModel(T5Config(**sizes)))


def test_other_weights_of_the_same_shape_are_seen_when_the_prefix_is_used(checkpoint):
    prefix = from_peft(checkpoint, make_model(**EVEN))
    other = make_model(seed=9, **EVEN)
    with pytest.warns(UserWarning, match="made for a model of the same shape with other weights"):
        prefix.attach(other)


def test_peft_is_not_needed(checkpoint, tmp_path):
    make_model(**EVEN).save_pretrained(tmp_path / "base")
    code = f"""
import sys
sys.modules["peft"] = None  # importing it fails
from transformers import T5ForConditionalGeneration
from helpers import from_peft, to_peft
prefix = from_peft({str(checkpoint)!r}, T5ForConditionalGeneration.from_pretrained({str(tmp_path / "base")!r}))
to_peft(prefix, {str(tmp_path / "again")!r})
print(prefix.sites)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "('decoder',)\n", result.stderr
    again = from_peft(tmp_path / "again", make_model(**EVEN))
    want = from_peft(checkpoint, make_model(**EVEN))
    assert all(torch.equal(a, b) for a, b in zip(by_site(again).values(), by_site(want).values(), strict=True))
