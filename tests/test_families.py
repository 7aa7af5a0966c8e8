"""`Prefix` on every family of models in the table, against the oracle, and what the families differ in."""

import copy
import inspect
import os
import re
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import peft
import pytest
import torch
import transformers
from families_oracle import (
    LEFT_OUT,
    MODELS,
    MODES,
    by_hand,
    difference,
    make_inputs,
    make_model,
    make_prefix,
    with_targets,
)
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import StaticCache

from helpers import ModelWithPrefix, Prefix, PrefixPerRow, T5Prefix, T5WithPrefix, content_attentions, detach_prefix
from helpers.tuning.families import FAMILIES, sites_of
from helpers.tuning.hub import card, lines_that_load

BOUND = 5e-6  # the eager attention of most families computes its softmax in float32, and so do their norms


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MODELS)
def test_every_mode_equals_the_oracle(family, mode):
    if (family, mode) in LEFT_OUT:
        pytest.skip(LEFT_OUT[family, mode])
    assert MODES[mode](family) < BOUND


def test_what_fails_without_a_prefix_too():
    """If this passes one day, the table has one more entry."""
    with pytest.raises(KeyError, match="full_attention"):
        make_model("T5Gemma 2").generate(**make_inputs("T5Gemma 2"), cache_implementation="static", max_new_tokens=3)


def test_every_line_of_the_table_is_tried():
    stacks = {
        f"{type(site.stack).__module__.split('.')[2]}.{type(site.stack).__name__}"
        for family in MODELS
        for site in sites_of(make_model(family)).values()
    }
    assert stacks == set(FAMILIES)


@pytest.mark.parametrize("stack", FAMILIES)
def test_the_masks_are_those_that_the_stack_makes(stack):
    folder, name = stack.split(".")
    module = getattr(transformers.models, folder)
    source = inspect.getsource(getattr(getattr(module, f"modeling_{folder}"), name))
    made = {
        "full": "create_bidirectional_mask" in source,
        "causal": re.search("create_(sliding_window_)?causal_mask", source) is not None,
        "window": "sliding_window" in source,
    }
    assert {kind for kind, is_made in made.items() if is_made} == set(FAMILIES[stack]["masks"].split(",")) - {"none"}


@pytest.mark.parametrize(
    ("family", "sites"),
    [
        ("Llama", ("decoder",)),
        ("BERT", ("encoder",)),
        ("BART", ("encoder", "decoder", "cross")),
        ("T5Gemma 2", ("encoder", "decoder")),
    ],
)
def test_without_a_choice_the_sites_are_all_that_the_model_has(family, sites):
    assert make_prefix(make_model(family)).sites == sites


def test_the_prefix_has_as_many_heads_as_the_keys():
    """4 heads of queries share 2 of keys and values, each 10 wide, in a model that is 24 wide."""
    assert make_prefix(make_model("Llama")).key_values("decoder").shape == (3, 2, 1, 2, 3, 10)


def test_a_window_counts_tokens_and_the_prefix_stays_visible():
    """Mistral's token 6 sees the 4 nearest tokens, and all slots."""
    model = make_model("Mistral", "eager")
    prefix = make_prefix(model)
    with prefix.attached(model):
        weights = model(**make_inputs("Mistral"), output_attentions=True).attentions[0][0, :, 6]
    assert (weights[:, :3] > 0).all()
    assert (weights[:, 3:6] == 0).all()
    assert (weights[:, 6:] > 0).all()


def test_packed_sequences_see_the_prefix_and_not_each_other():
    """Positions that begin again tell transformers that another text begins; each has the prefix in front."""
    model = make_model("Llama")
    prefix = make_prefix(model)
    texts = make_inputs("Llama")["input_ids"][:1, :3], make_inputs("Llama")["input_ids"][:1, 3:]
    positions = torch.cat([torch.arange(3), torch.arange(4)])[None]
    with prefix.attached(model):
        packed = model(input_ids=torch.cat(texts, dim=1), position_ids=positions, use_cache=False).logits
    with by_hand(model, prefix):
        alone = torch.cat([model(input_ids=text).logits for text in texts], dim=1)
    assert difference(packed, alone) < BOUND


# --- what holds for T5, held for a model of another kind --------------------------------------------------------------


def test_the_former_names_are_the_same_classes():
    assert T5Prefix is Prefix
    assert T5WithPrefix is ModelWithPrefix


@pytest.mark.parametrize("family", ["GPT-2", "Llama", "BERT", "BART", "Gemma 3"])
def test_after_detaching_the_model_is_as_before(family):
    model = make_model(family)
    inputs = with_targets(model, make_inputs(family))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        plain = model(**inputs).logits
        with make_prefix(model).attached(model):
            assert difference(model(**inputs).logits, plain) > 1e-2
        assert torch.equal(model(**inputs).logits, plain)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
    assert model.config._attn_implementation == "sdpa"


def test_a_deep_copy_carries_its_own_prefix():
    model = make_model("Llama")
    inputs = make_inputs("Llama")
    with make_prefix(model).attached(model), torch.no_grad():
        want = model(**inputs).logits
        copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(**inputs).logits, want)
        assert difference(model(**inputs).logits, want) > 1e-2


@pytest.mark.skipif("ROUNDING_NOISE" in os.environ, reason="torch.compile cannot see through a dispatch mode")
def test_torch_compile_fullgraph():
    """In a process of its own: the annotation checks of these tests cannot be compiled."""
    script = """
        import torch
        from families_oracle import difference, make_inputs, make_model, make_prefix, with_targets
        for family in ("Llama", "Gemma 2", "BART", "BERT"):
            model = make_model(family)
            inputs = with_targets(model, make_inputs(family))
            with make_prefix(model).attached(model), torch.no_grad():
                compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
                print(difference(compiled(**inputs).logits, model(**inputs).logits))
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    differences = [float(line) for line in run.stdout.split()]
    assert len(differences) == 4
    assert max(differences) < BOUND


def test_saved_loaded_and_known_again(tmp_path):
    model = make_model("Qwen3")
    prefix = make_prefix(model, mid_dim=None)
    prefix.save_pretrained(tmp_path)
    loaded = Prefix.from_pretrained(tmp_path)
    for ours, theirs in zip(loaded.parameters(), prefix.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.attach(model)
    detach_prefix(model)
    other = make_model("Qwen3")
    other.model.layers[1].self_attn.q_proj.weight.data.add_(0.5)
    with pytest.warns(UserWarning, match="other weights"):
        loaded.attach(other)
    with pytest.raises(ValueError, match=r"\(layers, heads, head_dim\) = \(3, 2, 10\), but the model has \(3, 2, 6\)"):
        loaded.attach(make_model("OLMo"))


def test_folding_changes_nothing():
    model = make_model("Llama")
    torch.manual_seed(1)
    prefix = Prefix.for_model(model, prefix_length=3, mid_dim=11).double()
    inputs = make_inputs("Llama")
    with torch.no_grad():
        with prefix.attached(model):
            want = model(**inputs).logits
        with prefix.fold().attached(model):
            assert difference(model(**inputs).logits, want) < 1e-12


def test_a_bfloat16_base_with_a_float32_prefix():
    model = make_model("Llama").bfloat16()
    prefix = make_prefix(model).float()
    with prefix.attached(model):
        logits = model(**make_inputs("Llama")).logits
    logits.float().sum().backward()
    assert logits.dtype == torch.bfloat16
    assert prefix.encoders["decoder"].embedding.grad.abs().min() > 0


def test_maps_without_the_slots():
    model = make_model("GPT-2", "eager")
    prefix = make_prefix(model)
    inputs = make_inputs("GPT-2")
    bare = model(**inputs, output_attentions=True).attentions
    with prefix.attached(model):
        outputs = model(**inputs, output_attentions=True)
    maps = content_attentions(outputs, prefix, renormalise=True).attentions
    assert maps[0].shape == bare[0].shape
    assert outputs.attentions[0].shape[-1] == bare[0].shape[-1] + 3
    assert difference(maps[0], bare[0]) < BOUND  # in the first layer
    model = make_model("BERT", "eager")
    prefix = make_prefix(model)
    with prefix.attached(model):
        outputs = model(**make_inputs("BERT"), output_attentions=True)
    assert content_attentions(outputs, prefix).attentions[0].shape[-1] == 7


def test_rows_of_different_lengths_without_a_mask():
    """Each step has one key more; what hides a row's missing slots is made anew for it."""
    model = make_model("Llama")
    ids = make_inputs("Llama")["input_ids"][:1].expand(2, -1)
    rows = PrefixPerRow([make_prefix(model, 3), make_prefix(model, 5, seed=2)])
    with rows.attached(model):
        together = model.generate(ids, max_new_tokens=6, output_logits=True, return_dict_in_generate=True)
    for row, prefix in enumerate(rows.prefixes):
        with prefix.attached(model):
            alone = model.generate(ids[:1], max_new_tokens=6, output_logits=True, return_dict_in_generate=True)
        assert difference(torch.stack(together.logits)[:, row], torch.stack(alone.logits)[:, 0]) < BOUND


def test_threads_share_a_decoder_alone():
    """Four threads, each with one of two prefixes or with the bare model, give what each gives alone."""
    model = make_model("Mistral")
    inputs = make_inputs("Mistral", side="left")
    prefixes = [make_prefix(model, seed=1), make_prefix(model, seed=2), None]

    def answer(prefix):
        with prefix.attached(model) if prefix else nullcontext(), torch.no_grad():
            return model.generate(**inputs, max_new_tokens=5), model(**inputs).logits

    alone = [answer(prefix) for prefix in prefixes]
    assert difference(alone[0][1], alone[1][1]) > 1e-2
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, prefixes * 8))
    for place, found in enumerate(together):
        assert all(map(torch.equal, found, alone[place % 3]))


@pytest.mark.parametrize("family", ["Llama", "BART"])
def test_low_rank_adapters_and_a_prefix_together(family):
    model = make_model(family)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), model)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    for parameter in adapters:
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    model.double()
    prefix, inputs = make_prefix(model), with_targets(model, make_inputs(family))
    trained = [*prefix.parameters(), *(parameter.requires_grad_() for parameter in adapters)]
    found = []
    for attached in (prefix.attached(model), by_hand(model, prefix)):
        with attached:
            logits = model(**inputs).logits
        found.append([logits.detach(), *torch.autograd.grad(logits.square().mean(), trained)])
    for ours, theirs in zip(*found, strict=True):
        assert difference(ours, theirs) < BOUND * max(1, theirs.abs().max().item())
        assert theirs.abs().max() > 0


def test_the_card_of_a_decoder_alone_loads_it():
    prefix = make_prefix(make_model("Llama"))
    loading = lines_that_load(Prefix, "meta/llama", "user/mine")
    text = card(prefix, "user/mine", loading, base_model="meta/llama", tags=())
    assert "- llama\n" in text
    assert "- t5\n" not in text
    assert "from helpers import Prefix, load_base" in text


# --- one module for engines -------------------------------------------------------------------------------------------


def test_a_decoder_alone_in_a_module_for_engines():
    """Two batches of unequal length, their gradients added up as the Trainer does, are one large batch."""
    model = make_model("Llama")
    prefixed = ModelWithPrefix(model, make_prefix(model))
    inputs = make_inputs("Llama")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    whole = prefixed(**inputs, labels=labels).loss
    count = labels[:, 1:].ne(-100).sum()
    parts = [
        prefixed(
            **{name: each[row : row + 1] for name, each in inputs.items()},
            labels=labels[row : row + 1],
            num_items_in_batch=count,
        ).loss
        for row in (0, 1)
    ]
    assert difference(sum(parts), whole) < 1e-12
    assert prefixed.loss_type == "ForCausalLM"
    assert prefixed.get_input_embeddings() is model.model.embed_tokens
    trained = [name for name, parameter in prefixed.named_parameters() if parameter.requires_grad]
    assert trained == ["prefix.encoders.decoder.embedding"]


@pytest.mark.parametrize(
    ("family", "embeddings"), [("GPT-2", "transformer.wte"), ("BERT", "bert.embeddings.word_embeddings")]
)
def test_the_module_that_tokens_pass(family, embeddings):
    model = make_model(family)
    assert ModelWithPrefix(model, make_prefix(model)).get_input_embeddings() is model.get_submodule(embeddings)


def test_layers_that_drop_by_themselves_are_not_put_in_training_mode():
    model = make_model("BART")
    for layer in model.model.encoder.layers:
        layer.dropout = 0.5
    prefixed = ModelWithPrefix(model, make_prefix(model))
    inputs = with_targets(model, make_inputs("BART"))
    prefixed.train()
    assert torch.equal(prefixed(**inputs).logits, prefixed(**inputs).logits)
    prefixed.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.warns(UserWarning, match="gradient checkpointing is off for BartEncoderLayer"):
        prefixed.train()
    assert torch.equal(prefixed(**inputs).logits, prefixed(**inputs).logits)
    assert model.model.decoder.layers[0].training
    assert not model.model.encoder.layers[0].training


# --- at the door ------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_in_the_table_is_refused():
    model = BloomForCausalLM(BloomConfig(vocab_size=20, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(TypeError, match=r"helpers\.tuning\.families.*Llama.*not on a BloomForCausalLM"):
        Prefix.for_model(model)


def test_a_subclass_is_its_parents_family():
    class Mine(type(make_model("Llama").model)):
        pass

    model = make_model("Llama")
    model.model = Mine(model.config)
    assert list(sites_of(model)) == ["decoder"]


def test_gpt2s_own_way_around_the_attention_function_is_refused():
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, reorder_and_upcast_attn=True)
    model = GPT2LMHeadModel(config)
    model.set_attn_implementation("eager")
    prefix = Prefix.for_model(model)
    with pytest.raises(ValueError, match="reorder_and_upcast_attn goes around"):
        prefix.attach(model)
    model.set_attn_implementation("sdpa")
    prefix.attach(model)


def test_an_attention_module_that_came_later_is_refused():
    model = make_model("Llama")
    prefix = make_prefix(model)
    with prefix.attached(model):
        model.model.layers[1].self_attn = type(model.model.layers[1].self_attn)(model.config, 1).double()
        with pytest.raises(ValueError, match="this LlamaAttention came into the model after the prefix was attached"):
            model(**make_inputs("Llama"))


def test_a_copied_layer_with_a_config_of_its_own_is_refused():
    model = make_model("Llama")
    model.model.layers[2] = copy.deepcopy(model.model.layers[1])
    with pytest.raises(ValueError, match="the LlamaAttention of layer 2 has a config of its own"):
        make_prefix(model).attach(model)
    assert model.config._attn_implementation == "sdpa"
    model.model.layers[2].self_attn.config = model.config
    make_prefix(model).attach(model)


def test_layers_of_different_shape_are_refused():
    model = make_model("Llama")
    model.model.layers[1].self_attn.head_dim = 5
    with pytest.raises(ValueError, match=r"different \(heads, head_dim\): \[\(2, 5\), \(2, 10\)\]"):
        Prefix.for_model(model)


@pytest.mark.parametrize("width", [8, 6])
def test_a_mask_of_another_width_is_refused(width):
    model = make_model("Llama")
    with (
        make_prefix(model).attached(model),
        pytest.raises(ValueError, match=rf"attention_mask \[2, {width}\] must be \[batch, keys\] = \[2, 7\]"),
    ):
        model(input_ids=make_inputs("Llama")["input_ids"], attention_mask=torch.ones(2, width))


def test_a_static_cache_of_windows_takes_a_mask_of_the_whole_text():
    """Gemma 2's first layer keeps 4 tokens, its second all: a mask of 7 fits the second."""
    model, inputs = make_model("Gemma 2"), make_inputs("Gemma 2")
    first, mask = inputs["input_ids"][:, :6], torch.ones(2, 7, dtype=torch.long)
    assert model.config.layer_types[0] == "sliding_attention"
    with make_prefix(model).attached(model):
        wanted = model(input_ids=inputs["input_ids"], attention_mask=mask).logits[:, -1]
        cache = StaticCache(config=model.config, max_cache_len=9)
        model(input_ids=first, attention_mask=mask[:, :6], past_key_values=cache)
        got = model(input_ids=inputs["input_ids"][:, 6:], attention_mask=mask, past_key_values=cache).logits[:, -1]
    assert difference(got, wanted) < BOUND
