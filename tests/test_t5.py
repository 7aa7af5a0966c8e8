"""T5Prefix against an independent oracle, in every mode, and against the faults of earlier implementations."""

import copy
import gc
import inspect
import itertools
import json
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import oracle
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
    T5Model,
    UMT5Config,
    UMT5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.umt5.modeling_umt5 import UMT5LayerNorm

import helpers
from helpers.prefix import PrefixEncoder, join_prefix, with_prefix_columns
from helpers.tuning.attach import SITES, PrefixPerRow, T5Prefix, detach_prefix
from helpers.tuning.engines import T5WithPrefix
from helpers.tuning.routing import SitePrefix
from helpers.tuning.store import CONFIG_NAME

# Every size differs from every other: heads * d_kv is 15 and not d_model, the two depths differ.
SIZES = {
    "vocab_size": 41,
    "d_model": 16,
    "d_kv": 5,
    "num_heads": 3,
    "d_ff": 23,
    "num_layers": 4,
    "num_decoder_layers": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = {
    "t5": (T5Config, T5ForConditionalGeneration, {}),
    "t5 v1.1": (
        T5Config,
        T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": (MT5Config, MT5ForConditionalGeneration, {}),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration, {}),
}


@contextmanager
def norms_in_float64():
    """transformers takes the mean square of RMSNorm in float32 even in a float64 model; here it keeps the dtype."""

    def forward(self, x):
        if x.dtype == torch.float64:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return stock[type(self)](self, x)

    stock = {norm: norm.forward for norm in (T5LayerNorm, MT5LayerNorm, UMT5LayerNorm)}
    with pytest.MonkeyPatch.context() as patch:
        for norm in stock:
            patch.setattr(norm, "forward", forward)
        yield


@pytest.fixture(scope="module", autouse=True)
def float64_throughout():
    with norms_in_float64():
        yield


def make_model(family="t5", *, seed=0, dtype=torch.float64, implementation="sdpa", noise=0.3, **sizes):
    if family == "umt5" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("the oldest transformers does not mark the self-attention of UMT5's decoder as causal")
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **extra, **sizes})).eval()
    for parameter in model.parameters():  # away from the initialisation, where attention is nearly uniform
        parameter.data.add_(noise * torch.randn_like(parameter))
    model = model.to(dtype)
    set_attention(model, implementation)
    return model.requires_grad_(False)


def set_attention(model, implementation):
    for each in (model, model.encoder, model.decoder):  # transformers 5.15 did not pass it on to the stacks
        each.set_attn_implementation(implementation)


def cache_of(output):
    return output.cache if hasattr(output, "cache") else output.past_key_values


def with_cache(cache):
    """The keyword for a KV cache: transformers renamed it between 5.15 and 5.24."""
    name = "cache" if "cache" in inspect.signature(T5ForConditionalGeneration.forward).parameters else "past_key_values"
    return {name: cache}


def make_prefix(model, prefix_length=7, *, seed=1, std=1.0, **options):
    prefix = T5Prefix.for_model(model, prefix_length=prefix_length, **options).to(model.dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in prefix.parameters():
        parameter.data.copy_(std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return prefix


def by_site(prefix):
    return {site: prefix.key_values(site).detach() for site in prefix.sites}


def make_inputs(batch=3, source=6, target=5, *, left=False, seed=2):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(2, SIZES["vocab_size"], (batch, source), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, real in zip(range(1, batch), itertools.cycle([(source + 1) // 2, 1]), strict=False):
        attention_mask[row] = torch.arange(source) >= source - real if left else torch.arange(source) < real
    input_ids = input_ids * attention_mask
    decoder_input_ids = torch.randint(2, SIZES["vocab_size"], (batch, target), generator=generator)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}


def difference(a, b):
    return (a - b).abs().max().item()


# --- the forward pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_the_oracle(family, implementation):
    model = make_model(family, implementation=implementation)
    prefix = make_prefix(model)
    for left in (False, True):
        inputs = make_inputs(left=left)
        decoder_mask = torch.ones_like(inputs["decoder_input_ids"])
        decoder_mask[1, -2:] = 0
        with prefix.attached(model):
            got = model(**inputs, decoder_attention_mask=decoder_mask)
        want = oracle.t5(model, **inputs, decoder_attention_mask=decoder_mask, prefixes=by_site(prefix))
        real = inputs["attention_mask"].bool()
        assert difference(got.encoder_last_hidden_state[real], want["encoder"][real]) < 1e-10
        assert difference(got.logits, want["logits"]) < 1e-10
        without = oracle.t5(model, **inputs, decoder_attention_mask=decoder_mask)
        assert difference(got.logits, without["logits"]) > 1e-2, "the prefix had no effect"


def test_a_decoder_that_does_not_say_that_it_is_causal_is_refused():
    """UMT5 in transformers 5.15, whose tokens see later ones without a prefix too."""
    model = make_model()
    prefix = make_prefix(model)
    for block in model.decoder.block:
        block.layer[0].SelfAttention.is_causal = False
    with pytest.raises(ValueError, match="does not mark the self-attention of a T5Stack's decoder as causal"):
        prefix.attach(model)


@pytest.mark.parametrize("sites", [c for n in (1, 2, 3) for c in itertools.combinations(SITES, n)])
def test_every_choice_of_sites(sites):
    model = make_model()
    prefix = make_prefix(model, sites=sites)
    inputs = make_inputs()
    assert prefix.sites == sites
    with prefix.attached(model):
        got = model(**inputs)
    want = oracle.t5(model, **inputs, prefixes=by_site(prefix))
    assert difference(got.logits, want["logits"]) < 1e-10
    real = inputs["attention_mask"].bool()
    plain = oracle.t5(model, **inputs)["encoder"]
    assert (difference(got.encoder_last_hidden_state[real], plain[real]) > 1e-2) == ("encoder" in sites)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)], ids=["deeper decoder", "deeper encoder"])
@pytest.mark.parametrize("heads", [(6, 64, 32), (8, 16, 32), (1, 5, 16)], ids=["384 of 32", "128 of 32", "one head"])
def test_unequal_depths_and_widths(sizes, heads):
    num_heads, d_kv, d_model = heads
    model = make_model(
        num_layers=sizes[0], num_decoder_layers=sizes[1], num_heads=num_heads, d_kv=d_kv, d_model=d_model
    )
    prefix = make_prefix(model, 3, std=0.3)
    assert prefix.key_values("encoder").shape == (sizes[0], 2, 1, num_heads, 3, d_kv)
    assert (
        prefix.key_values("decoder").shape == prefix.key_values("cross").shape == (sizes[1], 2, 1, num_heads, 3, d_kv)
    )
    inputs = make_inputs()
    with prefix.attached(model):
        got = model(**inputs)
    want = oracle.t5(model, **inputs, prefixes=by_site(prefix))
    assert difference(got.logits, want["logits"]) < 1e-9


@settings(max_examples=25)
@given(
    prefix_length=st.integers(0, 64),
    batch=st.integers(1, 3),
    source=st.integers(1, 9),
    target=st.integers(1, 7),
    left=st.booleans(),
    sites=st.sets(st.sampled_from(SITES), min_size=1),
    implementation=st.sampled_from(["sdpa", "eager"]),
)
def test_any_length_equals_the_oracle(prefix_length, batch, source, target, left, sites, implementation):
    model = make_model(implementation=implementation)
    prefix = make_prefix(model, prefix_length, sites=tuple(sites))
    inputs = make_inputs(batch, source, target, left=left)
    with prefix.attached(model):
        got = model(**inputs)
    want = oracle.t5(model, **inputs, prefixes=by_site(prefix))
    assert difference(got.logits, want["logits"]) < 1e-9


def test_prefix_as_long_as_the_source():
    # An old T5 took a cache whose length equals the source for cached cross-attention.
    model = make_model()
    prefix = make_prefix(model, prefix_length=6)
    inputs = make_inputs(source=6)
    with prefix.attached(model):
        got = model(**inputs)
    assert difference(got.logits, oracle.t5(model, **inputs, prefixes=by_site(prefix))["logits"]) < 1e-10


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_fully_padded_source_stays_finite(implementation):
    model = make_model(implementation=implementation)
    prefix = make_prefix(model)
    inputs = make_inputs()
    inputs["attention_mask"][1] = 0
    with prefix.attached(model):
        got = model(**inputs)
    want = oracle.t5(model, **inputs, prefixes=by_site(prefix))
    assert got.logits.isfinite().all()
    assert difference(got.logits, want["logits"]) < 1e-10


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_length_zero_changes_nothing_and_zeros_do(implementation):
    model = make_model(implementation=implementation)
    inputs = make_inputs()
    plain = model(**inputs).logits
    with T5Prefix.for_model(model, prefix_length=0).attached(model):
        assert difference(model(**inputs).logits, plain) < 1e-10
    zeros = make_prefix(model, std=0.0)
    with zeros.attached(model):
        got = model(**inputs).logits
    assert difference(got, plain) > 1e-2
    assert difference(got, oracle.t5(model, **inputs, prefixes=by_site(zeros))["logits"]) < 1e-10


def test_the_prefix_cannot_change_relative_attention_over_content():
    """In layer 0, content columns renormalised equal the model without prefix: positions and bias are untouched."""
    model = make_model(implementation="eager")
    prefix = make_prefix(model)
    inputs = make_inputs(batch=1)
    options = {"output_attentions": True}
    plain = model(**inputs, **options)
    with prefix.attached(model):
        got = model(**inputs, **options)
    for with_prefix, without in (
        (got.encoder_attentions[0], plain.encoder_attentions[0]),
        (got.decoder_attentions[0], plain.decoder_attentions[0]),
    ):
        assert with_prefix.shape[-1] == without.shape[-1] + 7
        content = with_prefix[..., 7:]
        assert difference(content / content.sum(-1, keepdim=True), without) < 1e-10
    assert got.cross_attentions[0].shape[-1] == 6 + 7


def test_the_order_of_the_slots_means_nothing():
    model = make_model()
    prefix = make_prefix(model)
    inputs = make_inputs()
    with prefix.attached(model):
        before = model(**inputs).logits
        for encoder in prefix.encoders.values():
            encoder.embedding.data = encoder.embedding.data.flip(0)
        assert difference(model(**inputs).logits, before) < 1e-10


def test_padding_on_the_left_or_right_means_nothing():
    model = make_model()
    prefix = make_prefix(model)
    right, left = make_inputs(left=False), make_inputs(left=True)
    for row in range(3):
        real = right["input_ids"][row][right["attention_mask"][row].bool()]
        left["input_ids"][row][left["attention_mask"][row].bool()] = real
    left["decoder_input_ids"] = right["decoder_input_ids"]
    with prefix.attached(model):
        assert difference(model(**right).logits, model(**left).logits) < 1e-10


def test_four_dimensional_masks_bool_and_float():
    model = make_model()
    prefix = make_prefix(model)
    inputs = make_inputs()
    with prefix.attached(model):
        want = model(**inputs).logits
        bool_mask = inputs["attention_mask"].bool()[:, None, None, :]
        encoder = model.encoder(input_ids=inputs["input_ids"], attention_mask=bool_mask.expand(-1, -1, 6, -1))
        float_mask = torch.zeros(bool_mask.shape, dtype=model.dtype).masked_fill(~bool_mask, -torch.inf)
        again = model.encoder(input_ids=inputs["input_ids"], attention_mask=float_mask.expand(-1, -1, 6, -1))
        real = inputs["attention_mask"].bool()
        assert difference(encoder.last_hidden_state[real], again.last_hidden_state[real]) < 1e-10
        got = model(
            encoder_outputs=encoder,
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=inputs["decoder_input_ids"],
        ).logits
    assert difference(got, want) < 1e-10


WRONG_WIDTHS = pytest.mark.parametrize("width", [12, 8, 6, 1], ids=["a prefix more", "one more", "one less", "one"])


@WRONG_WIDTHS
@pytest.mark.parametrize("rows", [False, True], ids=["prefix", "rows"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_source_mask_of_another_width_is_refused(implementation, rows, width):
    """Cut or broadcast to the keys it would hide other tokens than it says, or none."""
    model, inputs = make_model(implementation=implementation), make_inputs(source=7)
    prefix, tokens = make_prefix(model, 5), {"decoder_input_ids": inputs["decoder_input_ids"]}
    mask = torch.cat([torch.ones(3, 5, dtype=torch.long), inputs["attention_mask"]], dim=1)[:, :width]
    prepared = mask.bool()[:, None, None]
    additive = torch.zeros(prepared.shape).double().masked_fill(~prepared, -1e9)
    refused = pytest.raises(
        ValueError, match=rf"attention_mask \[3,.* {width}\] must be .* \[3, 7\].*pass the tokens' own"
    )
    sites = [("encoder",), ("decoder",), ("cross",), SITES]
    for attached in [PrefixPerRow([prefix, None, prefix])] if rows else [make_prefix(model, 5, sites=s) for s in sites]:
        encoded = model.encoder(**source(inputs))
        with attached.attached(model):
            for wrong in (mask, prepared, additive):
                if "encoder" in attached.sites:
                    with refused:
                        model.encoder(input_ids=inputs["input_ids"], attention_mask=wrong)
                    with refused:
                        model(input_ids=inputs["input_ids"], attention_mask=wrong, **tokens)
                if set(attached.sites) - {"encoder"}:
                    with refused:
                        model(encoder_outputs=encoded, attention_mask=wrong, **tokens)
            if "encoder" in attached.sites:
                with refused:
                    model.encoder(inputs["input_ids"], mask)  # by position
                with refused:
                    model.generate(input_ids=inputs["input_ids"], attention_mask=mask, max_new_tokens=3)
            if set(attached.sites) - {"encoder"}:
                with refused:
                    model.generate(encoder_outputs=encoded, attention_mask=mask, max_new_tokens=3)


@WRONG_WIDTHS
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_target_mask_of_another_width_is_refused(implementation, width):
    model, inputs = make_model(implementation=implementation), make_inputs(target=7)
    mask = torch.ones(3, width, dtype=torch.long)
    prepared = mask.bool()[:, None, None].expand(-1, 1, 7, -1)
    with make_prefix(model, 5).attached(model):
        for wrong in (mask, prepared, torch.zeros(prepared.shape).double()):
            for use_cache in (False, True):
                with pytest.raises(ValueError, match=rf"decoder_attention_mask \[3,.* {width}\] must be .* \[3, 7\]"):
                    model(**inputs, decoder_attention_mask=wrong, use_cache=use_cache)


def test_a_mask_needs_a_row_for_each_example_and_two_or_four_axes():
    model, inputs = make_model(), make_inputs()
    mask = inputs.pop("attention_mask")
    with make_prefix(model).attached(model):
        for wrong in (mask[:1], torch.cat([mask, mask]), mask[:, None].expand(-1, 6, -1), mask[0]):
            with pytest.raises(ValueError, match=r"must be \[batch, keys\] = \[3, 6\]"):
                model(**inputs, attention_mask=wrong)


def test_with_a_cache_the_target_mask_counts_the_tokens_in_it():
    model, inputs = make_model(), make_inputs(target=7)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 2:4] = 0
    wide = torch.cat([mask, torch.zeros(3, 2, dtype=torch.long)], dim=1)  # of a static cache with room for 9
    with make_prefix(model).attached(model), torch.no_grad():
        whole = model(**inputs, decoder_attention_mask=mask).logits
        for room in (None, 9):
            caches = [DynamicCache(), DynamicCache()]
            if room:
                caches = [StaticCache(model.decoder.config, max_cache_len=n) for n in (room, 6)]
            cache = EncoderDecoderCache(*caches)
            parts = []
            for first, last in ((0, 3), (3, 4), (4, 7)):
                given = {**inputs, "decoder_input_ids": inputs["decoder_input_ids"][:, first:last], **with_cache(cache)}
                with pytest.raises(ValueError, match="decoder_attention_mask"):
                    model(**given, decoder_attention_mask=torch.ones(3, 10, dtype=torch.long))
                own = wide if room else mask[:, :last]
                parts.append(model(**given, decoder_attention_mask=own).logits)
            assert difference(torch.cat(parts, dim=1), whole) < 1e-10
            if room is None:
                with pytest.raises(ValueError, match=r"decoder_attention_mask \[3, 1\] must be .* \[3, 8\]"):
                    model(**given | {"decoder_input_ids": torch.ones(3, 1).long()}, decoder_attention_mask=mask[:, :1])


# --- gradients and training ------------------------------------------------------------------------------------------


def loss_of(model, inputs):
    labels = inputs["decoder_input_ids"].clone()
    labels[1, -1] = -100
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss


@pytest.mark.parametrize("mid_dim", [None, 11])
def test_every_key_and_value_has_a_gradient_and_the_base_has_none(mid_dim):
    model = make_model()
    prefix = make_prefix(model, mid_dim=mid_dim, std=0.5)
    with prefix.attached(model):
        loss_of(model, make_inputs()).backward()
    for parameter in prefix.parameters():
        assert parameter.grad.abs().sum() > 0
    if mid_dim is None:
        for site, encoder in prefix.encoders.items():
            slices = encoder.embedding.grad.view(7, encoder.num_layers, 2, 15)
            dead = (slices.abs().amax(dim=(0, 3)) == 0).sum().item()
            assert dead == 0, f"{dead} of {2 * encoder.num_layers} keys and values of {site} have no gradient"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_equal_finite_differences():
    model = make_model()
    prefix = make_prefix(model, 2)
    inputs = make_inputs()
    with prefix.attached(model):
        loss_of(model, inputs).backward()
        for site, encoder in prefix.encoders.items():
            flat, step = encoder.embedding.data.view(-1), 1e-6
            for index in range(0, len(flat), 13):
                original = flat[index].item()
                flat[index] = original + step
                above = loss_of(model, inputs).item()
                flat[index] = original - step
                below = loss_of(model, inputs).item()
                flat[index] = original
                numeric = (above - below) / (2 * step)
                assert encoder.embedding.grad.view(-1)[index].item() == pytest.approx(numeric, abs=1e-7), site


def test_the_base_is_bit_identical_after_training_and_detaching():
    model = make_model(dtype=torch.float32)
    inputs = make_inputs()
    weights, plain = copy.deepcopy(model.state_dict()), model(**inputs).logits
    classes, hooks = [type(module) for module in model.modules()], len(model.encoder._forward_pre_hooks)
    prefix = make_prefix(model, std=0.02)
    optimizer = torch.optim.AdamW(prefix.parameters(), lr=0.1)
    losses = []
    with prefix.attached(model):
        for _ in range(20):
            loss = loss_of(model, inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert torch.equal(model(**inputs).logits, plain)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert [type(module) for module in model.modules()] == classes
    assert len(model.encoder._forward_pre_hooks) == len(model.encoder._forward_pre_hooks_with_kwargs) == hooks
    assert model.encoder.config._attn_implementation == "sdpa"


def test_gradient_checkpointing_gives_the_same_loss_and_gradients():
    model = make_model()
    prefix = make_prefix(model, mid_dim=11, std=0.5)
    inputs = make_inputs()
    gradients, losses = [], []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
            model.train()  # transformers checkpoints in training mode only; dropout is 0
        with prefix.attached(model):
            prefix.zero_grad()
            loss = loss_of(model, inputs)
            loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad.clone() for parameter in prefix.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients[0])
    assert all(difference(a, b) < 1e-12 for a, b in zip(*gradients, strict=True))


def test_train_save_load_train_equals_training_through(tmp_path):
    def train(prefix, optimizer, steps):
        with prefix.attached(model):
            for _ in range(steps):
                optimizer.zero_grad()
                loss_of(model, inputs).backward()
                optimizer.step()

    model, inputs = make_model(dtype=torch.float32), make_inputs()
    through = make_prefix(model, mid_dim=11, std=0.1)
    saved = copy.deepcopy(through)
    optimizer = torch.optim.AdamW(through.parameters(), lr=0.03)
    train(through, optimizer, 6)

    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.03)
    train(saved, optimizer, 3)
    saved.save_pretrained(tmp_path)
    resumed = T5Prefix.from_pretrained(tmp_path)
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.03)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    train(resumed, resumed_optimizer, 3)
    for a, b in zip(through.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


# --- generation ------------------------------------------------------------------------------------------------------

STEPS = 9
GREEDY = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}


def source(inputs):
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def oracle_greedy(model, inputs, prefix):
    """Greedy with the oracle, without the end token, as min_new_tokens asks of generate."""
    tokens = torch.zeros(len(inputs["input_ids"]), 1, dtype=torch.long)
    for _ in range(STEPS):
        logits = oracle.t5(model, **source(inputs), decoder_input_ids=tokens, prefixes=by_site(prefix))["logits"]
        logits[..., 1] = -torch.inf
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": True},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda options: "-".join(f"{value}" for value in options.values()),
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_greedy_generation_equals_the_oracle(options, implementation):
    model = make_model(implementation=implementation)
    prefix = make_prefix(model, mid_dim=11)
    inputs = make_inputs(batch=1 if "prompt_lookup_num_tokens" in options else 3)
    with prefix.attached(model):
        got = model.generate(**source(inputs), **GREEDY, **options)
    assert torch.equal(got, oracle_greedy(model, inputs, prefix))
    assert not torch.equal(got, model.generate(**source(inputs), **GREEDY)), "the prefix had no effect"


def test_generation_from_encoder_outputs():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model)
    with prefix.attached(model):
        want = model.generate(**source(inputs), **GREEDY)
        encoded = model.encoder(**source(inputs))
        got = model.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded.last_hidden_state),
            attention_mask=inputs["attention_mask"],
            **GREEDY,
        )
    assert torch.equal(got, want)


def test_several_tokens_at_once_with_a_cache():
    model, inputs = make_model(), make_inputs(target=7)
    prefix = make_prefix(model)
    with prefix.attached(model), torch.no_grad():
        whole = model(**inputs).logits
        encoded = model.encoder(**source(inputs))
        cache, logits = None, []
        for tokens in inputs["decoder_input_ids"].split([3, 1, 2, 1], dim=1):
            step = model(
                encoder_outputs=encoded,
                attention_mask=inputs["attention_mask"],
                decoder_input_ids=tokens,
                **with_cache(cache),
                use_cache=True,
            )
            cache = cache_of(step)
            logits.append(step.logits)
    assert cache.get_seq_length() == 7, "the prefix entered the cache"
    assert difference(torch.cat(logits, dim=1), whole) < 1e-10


@pytest.mark.parametrize("use_cache", [True, False])
def test_beam_search_scores_are_those_of_the_oracle(use_cache):
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model)
    with prefix.attached(model):
        got = model.generate(
            **source(inputs),
            max_new_tokens=STEPS,
            min_new_tokens=STEPS,
            num_beams=4,
            num_return_sequences=2,
            length_penalty=0.0,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_scores=True,
        )
    twice = {name: tensor.repeat_interleave(2, dim=0) for name, tensor in source(inputs).items()}
    logits = oracle.t5(model, **twice, decoder_input_ids=got.sequences[:, :-1], prefixes=by_site(prefix))["logits"]
    tokens = got.sequences[:, 1:, None]
    # generate normalises in float32, and min_new_tokens hides the end token only afterwards.
    score = logits.log_softmax(-1).gather(-1, tokens).squeeze(-1).sum(1)
    assert difference(score, got.sequences_scores) < 1e-4


def test_sampling_with_and_without_a_cache_draws_the_same():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model)
    samples = []
    with prefix.attached(model):
        for use_cache in (True, False):
            torch.manual_seed(5)
            samples.append(
                model.generate(
                    **source(inputs), max_new_tokens=STEPS, do_sample=True, use_cache=use_cache, num_return_sequences=2
                )
            )
    assert torch.equal(*samples)
    torch.manual_seed(5)
    plain = model.generate(**source(inputs), max_new_tokens=STEPS, do_sample=True, num_return_sequences=2)
    assert not torch.equal(samples[0], plain)


def test_assisted_decoding_equals_greedy():
    model, assistant, inputs = make_model(), make_model(seed=3, num_layers=2), make_inputs(batch=1)
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("the oldest transformers fails at this without a prefix too")
    prefix = make_prefix(model)
    with prefix.attached(model):
        want = model.generate(**source(inputs), **GREEDY)
        got = model.generate(**source(inputs), **GREEDY, assistant_model=assistant)
        own = copy.deepcopy(model)  # an assistant with the prefix agrees with every token
        assert torch.equal(model.generate(**source(inputs), **GREEDY, assistant_model=own), want)
    assert torch.equal(got, want)


def test_long_decoding_stays_exact_past_the_last_position_bucket():
    model, inputs = make_model(num_layers=1, num_decoder_layers=1), make_inputs(batch=1)
    prefix = make_prefix(model)
    with prefix.attached(model):
        got = model.generate(**source(inputs), max_new_tokens=140, min_new_tokens=140, do_sample=False)
    logits = oracle.t5(model, **source(inputs), decoder_input_ids=got[:, :-1], prefixes=by_site(prefix))["logits"]
    logits[..., 1] = -torch.inf
    assert torch.equal(logits.argmax(-1), got[:, 1:])


class Counting(T5Prefix):
    """Counts how often each site's prefix is evaluated."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.evaluations = dict.fromkeys(SITES, 0)

    def key_values(self, site):
        self.evaluations[site] += 1
        return super().key_values(site)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["greedy", "beams", "sampling", "static"],
)
def test_the_prefix_is_evaluated_once_per_step_and_once_per_generate(options):
    model, inputs = make_model(), make_inputs()
    prefix = Counting.for_model(model, prefix_length=7, mid_dim=11).to(model.dtype)
    with prefix.attached(model):
        loss_of(model, inputs).backward()
        assert set(prefix.evaluations.values()) == {1}
        for repetition in (2, 3):
            model.generate(**source(inputs), max_new_tokens=STEPS, min_new_tokens=STEPS, **options)
            assert set(prefix.evaluations.values()) == {repetition}


def change_behind_autograds_back(prefix):
    for parameter in prefix.parameters():
        parameter.data.mul_(-1.0)  # does not move the parameters' versions


def test_a_changed_prefix_is_never_served_from_memory():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model, mid_dim=11)
    with prefix.attached(model):
        before = model.generate(**source(inputs), **GREEDY, cache_implementation="static", disable_compile=True)
        change_behind_autograds_back(prefix)
        after = model.generate(**source(inputs), **GREEDY, cache_implementation="static", disable_compile=True)
    assert not torch.equal(before, after)
    assert torch.equal(after, oracle_greedy(model, inputs, prefix))


def test_continuing_another_cache_sees_a_changed_prefix():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model, mid_dim=11)
    with torch.no_grad():
        with prefix.attached(model):
            options = {"encoder_outputs": model.encoder(**source(inputs)), "use_cache": True}
            options["decoder_input_ids"] = torch.full((3, 1), 5)
            cache = cache_of(model(**options))
            another = copy.deepcopy(cache)
            reference = copy.deepcopy(cache)
            model(**options, **with_cache(cache))
            change_behind_autograds_back(prefix)
            got = model(**options, **with_cache(another)).logits
        with prefix.attached(model):  # attached anew, nothing is remembered
            want = model(**options, **with_cache(reference)).logits
    assert difference(got, want) < 1e-12


def test_a_cache_that_was_reset_sees_a_changed_prefix():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model, mid_dim=11)
    cache = EncoderDecoderCache(*(StaticCache(model.decoder.config, max_cache_len=n) for n in (5, 6)))
    logits = []
    with prefix.attached(model), torch.no_grad():
        for _ in range(2):
            logits.append(model(**inputs, **with_cache(cache)).logits)
            assert difference(logits[-1], model(**inputs).logits) < 1e-12
            cache.reset()
            change_behind_autograds_back(prefix)
    assert difference(*logits) > 1e-2


@pytest.mark.parametrize("change", ["prefix", "source mask", "rows of the cache", "nothing"])
def test_what_changes_between_two_steps_of_one_cache_is_seen(change):
    """The second step is the same as with a prefix attached anew, which remembers nothing."""
    model, inputs, results = make_model(), make_inputs(), []
    mask = inputs["attention_mask"]
    for anew in (False, True):
        prefix = make_prefix(model)
        detach = prefix.attach(model)
        with torch.no_grad():
            encoded = model.encoder(**source(inputs))
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            given = {"encoder_outputs": encoded, "use_cache": True, **with_cache(cache)}
            tokens = inputs["decoder_input_ids"]
            first = model(**given, attention_mask=mask, decoder_input_ids=tokens[:, :3]).logits
            if change == "prefix":
                for parameter in prefix.parameters():
                    parameter.mul_(0.5)
            if change == "rows of the cache":
                cache.reorder_cache(torch.tensor([2, 0, 1]))
            if anew:
                detach()
                detach = prefix.attach(model)
            later = torch.ones_like(mask) if change == "source mask" else mask
            second = model(**given, attention_mask=later, decoder_input_ids=tokens[:, 3:]).logits
        detach()
        results.append((first, second))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    with make_prefix(model).attached(model):
        unchanged = model(**inputs).logits[:, 3:]
    assert (difference(results[0][1], unchanged) < 1e-10) == (change == "nothing")


def test_cross_keys_are_joined_once_for_a_generation_and_freed_with_its_cache(monkeypatch):
    """At the encoder and the decoder's own tokens at every step; in front of the source once, whatever the length."""
    joined = []

    def counting(prefix_key, prefix_value, key, value):
        joined.append(weakref.ref(key))
        return join_prefix(prefix_key, prefix_value, key, value)

    monkeypatch.setattr("helpers.tuning.routing.join_prefix", counting)
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model)
    with prefix.attached(model):
        output = model.generate(**source(inputs), **GREEDY, return_dict_in_generate=True, use_cache=True)
        assert len(joined) == SIZES["num_layers"] + SIZES["num_decoder_layers"] * (STEPS + 1)
        gc.collect()
        assert any(key() is not None for key in joined), "the cache holds them"
        del output
        gc.collect()
        assert all(key() is None for key in joined), "the prefix holds keys of a generation that is over"


def test_mask_and_bias_are_added_once_for_a_stack(monkeypatch):
    made = []

    def counting(*arguments):
        made.append(arguments)
        return with_prefix_columns(*arguments)

    monkeypatch.setattr("helpers.tuning.routing.with_prefix_columns", counting)
    model, inputs = make_model(), make_inputs()
    with make_prefix(model).attached(model):
        model(**inputs)
    assert len(made) == 3, "one for each site, not for each layer"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_missing_mask_is_causal_in_the_decoder_and_another_needs_a_column_for_each_key(implementation):
    """Of an attention module that is called by itself."""
    model = make_model(implementation=implementation)
    prefix = make_prefix(model)
    decoder = model.decoder.block[0].layer[0].SelfAttention
    x = torch.randn(3, 5, SIZES["d_model"], dtype=model.dtype)

    def attend(mask):
        prefixes = {"decoder": SitePrefix(prefix.key_values("decoder").unbind(0), None)}
        return decoder(x, mask=mask, prefixes=prefixes)[0]

    visible = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    with prefix.attached(model):
        got = attend(None)
        assert difference(got, attend(visible)) < 1e-12
        for wrong in (torch.ones(1, 1, 5, 9).bool(), torch.zeros(1, 1, 5, 9).double(), visible[..., :1]):
            with pytest.raises(ValueError, match=r"needs one column for each of the 5 keys \[3, 3, 5, 5\]"):
                attend(wrong)
    bias = oracle.position_bias(decoder.relative_attention_bias.weight, 5, 5, bidirectional=False, config=model.config)
    weights = {f"a.{name}": tensor for name, tensor in decoder.state_dict().items()}
    pair = prefix.key_values("decoder")[0].expand(-1, 3, -1, -1, -1)
    want, _ = oracle.attention(weights, "a", x, x, model.config, bias, visible[0].expand(3, -1, -1), pair)
    assert difference(got, want) < 1e-10


# --- one batch, several prefixes -------------------------------------------------------------------------------------


class Rows(T5Prefix):
    """Each row of the batch has its own prefix."""

    def __init__(self, prefixes):
        super().__init__(dict(prefixes[0].encoders))
        self.prefixes = prefixes

    def key_values(self, site):
        return torch.cat([prefix.key_values(site) for prefix in self.prefixes], dim=2)


def test_a_subclass_gives_each_row_its_own_prefix():
    model, inputs = make_model(), make_inputs()
    prefixes = [make_prefix(model, seed=seed) for seed in (1, 2, 3)]
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": STEPS, "min_new_tokens": STEPS}
    with Rows(prefixes).attached(model):
        together, texts = model(**inputs).logits, model.generate(**source(inputs), **beams)
    for row, prefix in enumerate(prefixes):
        alone = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        with prefix.attached(model):
            assert difference(model(**alone).logits, together[row : row + 1]) < 1e-10
            assert torch.equal(model.generate(**source(alone), **beams), texts[2 * row : 2 * row + 2])


def test_rows_that_do_not_fit_the_batch_are_refused():
    model, inputs = make_model(), make_inputs(batch=3)
    with (
        Rows([make_prefix(model), make_prefix(model)]).attached(model),
        pytest.raises(ValueError, match="2 rows cannot serve a batch of 3"),
    ):
        model(**inputs)


# --- attach, detach, copy --------------------------------------------------------------------------------------------


def test_changing_the_attention_implementation_while_attached_keeps_the_prefix():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model)
    with prefix.attached(model):
        want = model(**inputs).logits
        set_attention(model, "eager")
        got = model(**inputs, output_attentions=True)
        assert difference(got.logits, want) < 1e-10
        assert got.decoder_attentions[0].shape[-1] == 5 + 7
    assert model.decoder.config._attn_implementation == "eager"


def test_another_attention_implementation_is_refused():
    model = make_model()
    set_attention(model, "flex_attention")
    with pytest.raises(ValueError, match="flex_attention"):
        make_prefix(model).attach(model)


def test_attach_returns_a_detach_that_may_be_called_twice():
    model, inputs = make_model(), make_inputs()
    plain = model(**inputs).logits
    first, second = make_prefix(model, seed=1), make_prefix(model, seed=2)
    detach_first = first.attach(model)
    with pytest.raises(ValueError, match="already"):
        second.attach(model)
    detach_first()
    detach_first()
    with second.attached(model):
        want = model(**inputs).logits
        detach_first()  # must not touch the second
        assert torch.equal(model(**inputs).logits, want)
    assert torch.equal(model(**inputs).logits, plain)


def test_what_attach_returns_detaches_at_the_end_of_a_block():
    model, inputs = make_model(), make_inputs()
    plain, prefix = model(**inputs).logits, make_prefix(model)
    with prefix.attach(model) as attached:
        assert attached is model
        assert not torch.equal(model(**inputs).logits, plain)
    assert torch.equal(model(**inputs).logits, plain)
    detach = prefix.attach(model)
    with pytest.raises(KeyboardInterrupt), detach:
        raise KeyboardInterrupt
    assert torch.equal(model(**inputs).logits, plain)
    with pytest.raises(ValueError, match="detached already"), detach:
        pass


def test_a_cell_that_runs_twice_is_told_the_call_that_helps():
    model, inputs = make_model(), make_inputs()
    for build in (lambda prefix: prefix.attach(model), lambda prefix: T5WithPrefix(model, prefix)):
        build(make_prefix(model, seed=1))
        with pytest.raises(ValueError, match=r"detach_prefix\(model\) \(from helpers import detach_prefix\)"):
            build(make_prefix(model, seed=2))
        helpers.detach_prefix(model)
        again = make_prefix(model, seed=2)
        build(again)
        assert difference(model(**inputs).logits, oracle.t5(model, **inputs, prefixes=by_site(again))["logits"]) < 1e-10
        helpers.detach_prefix(model)


def test_a_model_made_from_an_attached_ones_config():
    model, inputs = make_model(), source(make_inputs())
    plain = model.encoder(**inputs)[0]
    with make_prefix(model).attached(model):
        copied = T5EncoderModel(copy.deepcopy(model.encoder.config)).double().eval()
    copied.load_state_dict(model.state_dict(), strict=False)
    assert difference(copied(**inputs)[0], plain) < 1e-12
    prefix = make_prefix(copied, sites=("encoder",))
    with prefix.attached(model):
        want = model.encoder(**inputs)[0]
    with prefix.attached(copied):
        assert difference(copied(**inputs)[0], want) < 1e-12
    assert copied.encoder.config._attn_implementation == "sdpa"
    assert difference(copied(**inputs)[0], plain) < 1e-12


def test_what_is_missing_is_said_by_transformers():
    model, inputs = make_model(), make_inputs()
    inputs.pop("decoder_input_ids")
    for prefix in (None, make_prefix(model)):
        with nullcontext() if prefix is None else prefix.attached(model):
            for call in (lambda: model(**inputs), lambda: model.decoder(), lambda: model.encoder()):
                with pytest.raises(ValueError, match="specify exactly one of"):
                    call()


def test_a_stale_detach_leaves_a_later_attachment_alone():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model)
    stale = prefix.attach(model)
    stale()
    with prefix.attached(model):
        want = model(**inputs).logits
        stale()
        assert torch.equal(model(**inputs).logits, want)


def test_an_attach_that_fails_leaves_nothing_behind():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model)
    plain = model.encoder(**source(inputs)).last_hidden_state
    model.decoder.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="not 'flex_attention'"):
        prefix.attach(model)
    assert torch.equal(model.encoder(**source(inputs)).last_hidden_state, plain)
    model.decoder.set_attn_implementation("sdpa")
    with prefix.attached(model):
        assert difference(model.encoder(**source(inputs)).last_hidden_state, plain) > 1e-2


def test_an_attached_model_survives_pickling():
    model, inputs = make_model(), make_inputs()
    with make_prefix(model).attached(model), torch.no_grad():
        want = model.generate(**source(inputs), **GREEDY)  # leaves something remembered
        twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin.generate(**source(inputs), **GREEDY), want)


def test_inference_mode_throughout():
    model, inputs = make_model(dtype=torch.float32), make_inputs()
    with torch.inference_mode():
        prefix = T5Prefix.for_model(model, prefix_length=7)
        with prefix.attached(model):
            got = model.generate(**source(inputs), **GREEDY)
    assert torch.equal(got, oracle_greedy(model, inputs, prefix))


def test_an_error_inside_with_still_detaches():
    model, inputs = make_model(), make_inputs()
    plain = model(**inputs).logits
    with pytest.raises(KeyboardInterrupt), make_prefix(model).attached(model):
        raise KeyboardInterrupt
    assert torch.equal(model(**inputs).logits, plain)


def test_a_deep_copy_carries_its_own_copy_of_the_prefix():
    model, inputs = make_model(), make_inputs()
    plain = model(**inputs).logits
    prefix = make_prefix(model)
    with prefix.attached(model):
        twin = copy.deepcopy(model)
        want = model(**inputs).logits
        assert torch.equal(twin(**inputs).logits, want)
        for parameter in prefix.parameters():
            parameter.data.zero_()
        assert torch.equal(twin(**inputs).logits, want)
        assert not torch.equal(model(**inputs).logits, want)
    assert torch.equal(twin(**inputs).logits, want)
    detach_prefix(twin)
    assert torch.equal(twin(**inputs).logits, plain)


def test_a_model_saved_while_attached_is_the_plain_model(tmp_path):
    model, inputs = make_model(dtype=torch.float32), make_inputs()
    plain = model(**inputs).logits
    with make_prefix(model).attached(model):
        model.save_pretrained(tmp_path)
    assert "prefix" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    again = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert difference(again(**inputs).logits, plain) < 1e-4


@pytest.mark.parametrize(
    ("model_class", "sites"),
    [(T5Model, SITES), (T5EncoderModel, ("encoder",)), (T5ForSequenceClassification, SITES)],
)
def test_models_without_a_language_modelling_head(model_class, sites):
    torch.manual_seed(0)
    model = model_class(T5Config(**SIZES)).double().eval()
    prefix = make_prefix(model, sites=sites)
    inputs = make_inputs()
    if model_class is T5ForSequenceClassification:
        inputs["input_ids"][:, -1] = 1
        inputs = {"input_ids": inputs["input_ids"], "decoder_input_ids": inputs["input_ids"]}
    elif model_class is T5EncoderModel:
        inputs = source(inputs)
    with torch.no_grad():
        plain = model(**inputs)[0]
        with prefix.attached(model):
            got = model(**inputs)[0]
        if model_class is not T5ForSequenceClassification:
            want = oracle.t5(model, **inputs, prefixes=by_site(prefix))
            real = make_inputs()["attention_mask"].bool() if model_class is T5EncoderModel else slice(None)
            assert difference(got[real], want.get("decoder", want["encoder"])[real]) < 1e-10
        assert difference(got, plain) > 1e-2
        assert torch.equal(model(**inputs)[0], plain)


# --- at the door -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("sites", [("encoder", "middle"), (), "encoder", ("self",)])
def test_unknown_sites_are_refused(sites):
    with pytest.raises(ValueError, match="sites must be some of"):
        T5Prefix.for_model(make_model(), sites=sites)


@pytest.mark.usefixtures("unchecked")
def test_a_model_that_lacks_the_sites_or_is_no_t5_is_refused():
    model = T5EncoderModel(T5Config(**SIZES))
    with pytest.raises(ValueError, match=r"T5EncoderModel has no decoder and no cross .*sites=\('encoder',\)"):
        T5Prefix.for_model(model, sites=SITES)
    with pytest.raises(TypeError, match=r"works on these models of transformers .* T5, MT5, UMT5, .*not on a Linear"):
        make_prefix(model, sites=("encoder",)).attach(torch.nn.Linear(2, 3))


def test_another_shape_is_refused_and_other_weights_give_a_warning():
    prefix = make_prefix(make_model())
    with pytest.raises(ValueError, match=r"site 'encoder' is for .* = \(4, 3, 5\), but the model has \(4, 3, 6\)"):
        prefix.attach(make_model(d_kv=6))
    with pytest.raises(ValueError, match=r"site 'decoder' is for .* = \(2, 3, 5\), but the model has \(3, 3, 5\)"):
        prefix.attach(make_model(num_decoder_layers=3))
    with pytest.warns(UserWarning, match="other weights"):
        prefix.attach(make_model(seed=9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prefix.attach(make_model())
        prefix.attach(make_model(dtype=torch.bfloat16))  # the same weights, rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_base_is_recognised_in_any_precision_and_by_its_encoder_alone(dtype):
    prefix = make_prefix(make_model(), sites=("encoder",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prefix.attach(make_model(dtype=dtype))
        encoder_only = T5EncoderModel(T5Config(**SIZES))
        encoder_only.load_state_dict(make_model(dtype=torch.float32).state_dict(), strict=False)
        prefix.attach(encoder_only)


def test_a_lightly_tuned_base_is_not_taken_for_the_original():
    prefix, tuned = make_prefix(make_model()), make_model()
    for parameter in tuned.parameters():
        parameter.data.add_(1e-3 * torch.randn_like(parameter))
    with pytest.warns(UserWarning, match="other weights"):
        prefix.attach(tuned)


def test_weights_that_are_not_in_memory_are_not_compared():
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**SIZES))
    assert make_prefix(make_model()).attach(model) is not None


@pytest.mark.usefixtures("unchecked")
def test_a_module_with_two_t5s_is_refused():
    with pytest.raises(ValueError, match="more than one model"):
        T5Prefix.for_model(torch.nn.ModuleList([make_model(), make_model()]))


@pytest.mark.usefixtures("unchecked")
def test_encoders_of_unknown_sites_are_refused():
    with pytest.raises(ValueError, match="sites must be some of"):
        T5Prefix({"self": PrefixEncoder(3, 2, 3, 5)})


def test_key_values_of_a_site_without_prefix_are_refused():
    with pytest.raises(ValueError, match="no site 'cross', only encoder"):
        make_prefix(make_model(), sites=("encoder",)).key_values("cross")


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_bfloat16_base_with_a_float32_prefix(implementation):
    model, inputs = make_model(noise=0.0), make_inputs()
    prefix = make_prefix(model, std=0.3)
    want = oracle.t5(model, **inputs, prefixes=by_site(prefix))["logits"]
    half = make_model(dtype=torch.bfloat16, implementation=implementation, noise=0.0)
    prefix = prefix.float()
    with prefix.attached(half):
        got = half(**inputs).logits
        loss_of(half, inputs).backward()
        texts = half.generate(**source(inputs), **GREEDY)
    assert got.dtype == torch.bfloat16
    assert difference(got.double(), want) / want.abs().max().item() < 0.05
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in prefix.parameters())
    assert texts.shape == (3, 1 + STEPS)


def test_autocast_with_a_float32_base():
    model, inputs = make_model(dtype=torch.float32, noise=0.0), make_inputs()
    prefix = make_prefix(model, mid_dim=11, std=0.3)
    with prefix.attached(model):
        want = model(**inputs).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(**inputs).logits
            loss_of(model, inputs).backward()
    assert difference(got.float(), want) / want.abs().max().item() < 0.1
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in prefix.parameters())


def test_torch_compile_fullgraph():
    """In a process of its own: the annotation checks of these tests cannot be compiled."""
    script = """
        import torch, copy
        from transformers import T5Config, T5ForConditionalGeneration
        from helpers.tuning.attach import T5Prefix
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**{sizes})).eval().requires_grad_(False)
        prefix = T5Prefix.for_model(model, prefix_length=7, mid_dim=11)
        ids = torch.tensor([[5, 6, 7, 8], [9, 1, 0, 0]])
        batch = dict(input_ids=ids, attention_mask=(ids != 0).long(), labels=torch.tensor([[3, 4, 1], [5, 1, -100]]))
        batch["use_cache"] = False  # the oldest torch cannot compile the making of a cache
        prefix.attach(model)
        eager = model(**batch).loss
        eager.backward()
        gradients = [p.grad.clone() for p in prefix.parameters()]
        prefix.zero_grad()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        loss = compiled(**batch).loss
        loss.backward()
        assert abs(loss.item() - eager.item()) < 1e-6, (loss, eager)
        worst = max((p.grad - g).abs().max().item() for p, g in zip(prefix.parameters(), gradients, strict=True))
        assert worst < 1e-6, worst
        print("compiled")
    """.replace("{sizes}", repr(SIZES))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.stdout == "compiled\n", result.stderr[-3000:]


@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="torch 2.11 exports no module of others")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_torch_export_with_open_lengths(implementation):
    """Of the batch, the source and the target. In a process of its own, as above."""
    script = """
        import torch
        from torch.export import Dim, export
        from transformers import T5Config, T5ForConditionalGeneration
        from helpers import PrefixPerRow, T5Prefix, T5WithPrefix
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**{sizes})).eval().requires_grad_(False)
        model.set_attn_implementation({implementation})

        def make(batch, source, target):
            ids = torch.randint(2, 41, (batch, source))
            mask = (torch.arange(source) < torch.randint(1, source + 1, (batch, 1))).long()
            tokens = torch.randint(2, 41, (batch, target))
            return dict(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens, use_cache=False)

        prefix = T5Prefix.for_model(model, prefix_length=5, init_std=1.0)
        batch, source, target = (Dim(name, min=2, max=256) for name in ("batch", "source", "target"))
        of_source, of_target = {0: batch, 1: source}, {0: batch, 1: target}
        lengths = dict(zip(make(2, 2, 2), (of_source, of_source, of_target, None)))
        for each in (prefix, PrefixPerRow([prefix])):
            with each.attached(model), torch.no_grad():
                exported = export(model, (), make(4, 11, 6), dynamic_shapes=lengths).module()
                for shape in ((4, 11, 6), (7, 13, 9), (2, 32, 17), (5, 3, 2)):
                    inputs = make(*shape)
                    assert (exported(**inputs).logits - model(**inputs).logits).abs().max() < 1e-5, shape
                strict = export(model, (), inputs, strict=True).module()
                assert (strict(**inputs).logits - model(**inputs).logits).abs().max() < 1e-5
            assert (exported(**inputs).logits - model(**inputs).logits).abs().max() > 1e-2
        whole = T5WithPrefix(model, prefix)
        strict = export(whole, (), make(4, 11, 6), strict=True).module()
        inputs = make(4, 11, 6)
        assert (strict(**inputs).logits - whole(**inputs).logits).abs().max() < 1e-5
        print("exported")
    """.replace("{sizes}", repr(SIZES)).replace("{implementation}", repr(implementation))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.stdout == "exported\n", result.stderr[-3000:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.skipif("ROUNDING_NOISE" in os.environ, reason="torch.jit.trace cannot see through a dispatch mode")
def test_jit_trace_wants_a_prefix_that_it_knows():
    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, *inputs):
            names = ("input_ids", "attention_mask", "decoder_input_ids")
            return self.model(**dict(zip(names, inputs, strict=True)), use_cache=False).logits

    model, inputs = make_model(dtype=torch.float32), tuple(make_inputs().values())
    prefix = make_prefix(model)
    with prefix.attached(model):
        with pytest.raises(
            ValueError, match=r"call prefix.requires_grad_\(False\) first, or trace a ModelWithPrefix"
        ) as caught:
            torch.jit.trace(Logits(model), inputs)
        assert len(str(caught.value)) < 300
        prefix.requires_grad_(False)
        assert torch.equal(torch.jit.trace(Logits(model), inputs)(*inputs), Logits(model)(*inputs))
    prefixed = T5WithPrefix(model, prefix.requires_grad_(True))
    assert torch.equal(torch.jit.trace(Logits(prefixed), inputs)(*inputs), Logits(prefixed)(*inputs))


# --- fold, save, load ------------------------------------------------------------------------------------------------


def test_folding_changes_nothing_and_drops_the_mlp():
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model, mid_dim=11)
    folded = prefix.fold()
    for site in SITES:
        assert torch.equal(folded.key_values(site), prefix.key_values(site))
    assert sum(p.numel() for p in folded.parameters()) == 7 * 2 * 15 * (4 + 2 + 2)
    assert sum(p.numel() for p in prefix.parameters()) > sum(p.numel() for p in folded.parameters())
    with prefix.attached(model):
        want = model(**inputs).logits
    with folded.attached(model):
        assert torch.equal(model(**inputs).logits, want)


@pytest.mark.parametrize("options", [{}, {"mid_dim": 11, "dropout": 0.25}, {"sites": ("cross",)}, {"prefix_length": 0}])
def test_save_and_load_are_bit_exact(tmp_path, options):
    model, inputs = make_model(dtype=torch.float32), make_inputs()
    prefix = make_prefix(model, **options).eval()
    prefix.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    again = T5Prefix.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state), "loading drew random numbers"
    assert not again.training
    assert again.sites == prefix.sites
    assert all(torch.equal(a, b) for a, b in zip(prefix.parameters(), again.parameters(), strict=True))
    assert [encoder.dropout.p for encoder in again.encoders.values()] == [
        encoder.dropout.p for encoder in prefix.encoders.values()
    ]
    with prefix.attached(model):
        want = model(**inputs).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with again.attached(model):
            assert torch.equal(model(**inputs).logits, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_kept_whatever_the_default(tmp_path, dtype):
    prefix = make_prefix(make_model()).to(dtype)
    prefix.save_pretrained(tmp_path)
    torch.set_default_dtype(torch.float16)
    try:
        again = T5Prefix.from_pretrained(tmp_path)
        fresh = T5Prefix.for_model(make_model())
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(prefix.parameters(), again.parameters(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in fresh.parameters())


class Tripled(T5Prefix):
    def key_values(self, site):
        return 3 * super().key_values(site)


def test_fold_and_load_respect_a_subclass(tmp_path):
    prefix = Tripled.for_model(make_model(), prefix_length=7, mid_dim=11, dropout=0.5)
    folded = prefix.fold()
    assert prefix.training
    prefix.eval()
    folded.eval()
    for site in SITES:
        assert torch.equal(folded.key_values(site), prefix.key_values(site))
    prefix.save_pretrained(tmp_path)
    assert torch.equal(Tripled.from_pretrained(tmp_path).key_values("cross"), prefix.key_values("cross"))
    with pytest.raises(ValueError, match="saved by Tripled"):
        T5Prefix.from_pretrained(tmp_path)
    rows = Rows([make_prefix(make_model())] * 2)
    with pytest.raises(ValueError, match="has 2 rows"):
        rows.fold()
    assert rows.training


def test_saving_touches_no_other_file(tmp_path):
    mine = tmp_path / "prefix-german.safetensors"
    mine.write_bytes(b"mine")
    for seed in (1, 2):
        make_prefix(make_model(), seed=seed).save_pretrained(tmp_path)
    assert mine.read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 3


def test_saving_from_several_threads_leaves_a_whole_prefix(tmp_path):
    model = make_model()
    prefixes = [make_prefix(model, seed=seed) for seed in range(4)]

    def save_often(prefix):
        for _ in range(10):
            prefix.save_pretrained(tmp_path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save_often, prefixes))
    for prefix in prefixes:
        prefix.save_pretrained(tmp_path)
        assert torch.equal(T5Prefix.from_pretrained(tmp_path).key_values("cross"), prefix.key_values("cross"))
    assert not list(tmp_path.glob(".unfinished*"))


def test_saving_again_replaces_and_an_interrupted_save_leaves_the_old_prefix_whole(tmp_path, monkeypatch):
    model = make_model(dtype=torch.float32)
    first, second = make_prefix(model, seed=1), make_prefix(model, seed=2)
    first.save_pretrained(tmp_path)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", interrupted)  # between the two files
    with pytest.raises(KeyboardInterrupt):
        second.save_pretrained(tmp_path)
    monkeypatch.undo()
    assert torch.equal(T5Prefix.from_pretrained(tmp_path).key_values("cross"), first.key_values("cross"))
    second.save_pretrained(tmp_path)
    assert torch.equal(T5Prefix.from_pretrained(tmp_path).key_values("cross"), second.key_values("cross"))
    assert len(list(tmp_path.iterdir())) == 2


def test_files_that_cannot_be_read_are_one_clear_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no saved prefix"):
        T5Prefix.from_pretrained(tmp_path)
    make_prefix(make_model()).save_pretrained(tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        T5Prefix.from_pretrained(tmp_path)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / CONFIG_NAME).read_text(encoding="utf-8"))
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**config, "format_version": 99}), encoding="utf-8")
    with pytest.raises(ValueError, match="newer than"):
        T5Prefix.from_pretrained(tmp_path)
    for change, message in (
        ({"weights": f"../{weights.name}"}, "must lie in the same folder"),
        ({"weights": None}, "needs a 'weights' of type str"),
        ({"base": "abc"}, "needs a 'base' of type dict"),
        ({"sites": {"middle": config["sites"]["cross"]}}, "sites must be some of"),
        ({"weights": "missing.safetensors"}, "cannot be read"),
    ):
        (tmp_path / CONFIG_NAME).write_text(json.dumps({**config, **change}), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            T5Prefix.from_pretrained(tmp_path)
    (tmp_path / CONFIG_NAME).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read"):
        T5Prefix.from_pretrained(tmp_path)


def test_prefixes_of_one_site_are_independent():
    model = make_model()
    prefix = T5Prefix.for_model(model, prefix_length=7)
    assert not torch.equal(prefix.key_values("decoder"), prefix.key_values("cross"))
    assert all(isinstance(encoder, PrefixEncoder) for encoder in prefix.encoders.values())
    assert sum(p.numel() for p in prefix.parameters()) == 7 * 2 * 15 * (4 + 2 + 2)


def test_the_first_prefix_is_as_wide_as_asked():
    model = make_model()
    for options, deviation in (({}, 0.02), ({"init_std": 1.0}, 1.0)):
        prefix = T5Prefix.for_model(model, prefix_length=50, **options)
        for parameter in prefix.parameters():
            assert parameter.std().item() == pytest.approx(deviation, rel=0.1)
    with pytest.raises(ValueError, match=r"init_std=1\.0, mid_dim=7"):
        T5Prefix.for_model(model, mid_dim=7, init_std=1.0)


def test_parameter_counts_of_t5_small():
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config())

    def count(mid_dim):
        return 3 * sum(p.numel() for p in PrefixEncoder(20, 6, 8, 64, mid_dim=mid_dim).parameters())

    assert sum(p.numel() for p in model.parameters()) == 60_506_624
    assert count(None) == 368_640
    assert count(512) == 10_274_304


def test_a_file_of_format_1_keeps_loading(tmp_path):
    """Saved by version 0.1.0; its n-th parameter holds n + (0, 1, ... 6, 0, 1, ... - 3) / 8."""
    stored = Path(__file__).parent / "stored" / "prefix_format_1"
    prefix = T5Prefix.from_pretrained(stored)
    assert prefix.sites == ("encoder", "cross")
    for n, parameter in enumerate(prefix.parameters()):
        assert torch.equal(parameter, n + (torch.arange(parameter.numel()) % 7 - 3).view(parameter.shape) / 8)
    encoder = prefix.encoders["cross"]
    assert (encoder.prefix_length, encoder.shape, encoder.mid_dim, encoder.dropout.p) == (2, (2, 3, 5), 3, 0.25)
    assert not prefix.training
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the base is recognised
        prefix.attach(make_model(dtype=torch.float32))
    prefix.save_pretrained(tmp_path)
    for file in stored.iterdir():  # as long as this version writes format 1
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
