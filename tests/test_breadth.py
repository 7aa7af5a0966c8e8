"""T5Prefix on every kind of T5 and in every mode: exact where it can be, one clear sentence where it cannot."""

import math
import warnings

import oracle
import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_table import MODELS, MODES, lacking, measure, works
from test_t5 import by_site, difference, make_inputs, make_model, make_prefix, source
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from helpers.tuning.attach import PrefixPerRow, T5Prefix


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_equals_the_oracle(model, mode):
    if reason := lacking(model, mode):
        pytest.skip(f"transformers {transformers.__version__}: {reason}")
    if not works(model, mode):
        with pytest.raises(ValueError, match="the KV cache has 2 layers and the decoder 4: transformers sizes it by"):
            measure(model, mode)
        return
    in_float32 = mode in ("greedy", "greedy, no cache", "greedy, static", "encoder_outputs", "sampling")
    assert measure(model, mode) < (1e-5 if in_float32 or mode in ("beams", "prompt lookup") else 1e-10)


def test_a_deeper_decoder_generates_with_either_way_of_the_message():
    model, inputs = make_model(num_layers=2, num_decoder_layers=4), make_inputs()
    prefix = make_prefix(model)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with prefix.attached(model):
        plain = model.generate(**source(inputs), **options, use_cache=False)
        grows = EncoderDecoderCache(DynamicCache(), DynamicCache())
        assert torch.equal(model.generate(**source(inputs), **options, past_key_values=grows), plain)


# --- other precisions and places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_half_precision_base(dtype, implementation):
    """The prefix stays in float32; what differs from float64 is the base's own rounding."""
    exact = make_model(noise=0.05)
    prefix, inputs = make_prefix(exact, std=0.5), make_inputs()
    want = oracle.t5(exact, **inputs, prefixes=by_site(prefix))["logits"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the same weights, rounded: no warning that they are others
        half = make_model(noise=0.05, implementation=implementation).to(dtype)
        with prefix.float().attached(half):
            got = half(**inputs).logits
            half.generate(**source(inputs), max_new_tokens=3)
    assert got.dtype == dtype
    assert difference(got.double(), want) < 32 * torch.finfo(dtype).eps * want.abs().max()


def quantised(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.ao is to move to torchao
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def test_a_base_quantised_to_int8():
    model, inputs = make_model(dtype=torch.float32, noise=0.05), make_inputs()
    prefix = make_prefix(model, std=0.5)
    small = quantised(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # quantised weights are not compared with the original's
        with prefix.attached(small):
            got = small(**inputs).logits
            texts = small.generate(**source(inputs), max_new_tokens=5, use_cache=True)
            again = small.generate(**source(inputs), max_new_tokens=5, use_cache=False)
    with prefix.attached(model):
        want = model(**inputs).logits
    assert torch.equal(texts, again)
    assert 0 < difference(got, want) < 0.2 * want.abs().max()
    assert difference(got, small(**inputs).logits) > 1e-2 * want.abs().max(), "the prefix had no effect"
    assert not T5Prefix.for_model(small).base


@pytest.mark.parametrize("place", ["cpu offload", "disk offload", "device map"])
def test_weights_that_lie_elsewhere(place, tmp_path):
    model, inputs = make_model(), make_inputs()
    prefix = make_prefix(model)
    with prefix.attached(model):
        want = model(**inputs).logits
        texts = model.generate(**source(inputs), max_new_tokens=5)
    if place == "cpu offload":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif place == "disk offload":
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        parts = dict.fromkeys(["shared", "encoder", "decoder", "lm_head"], "cpu") | {"decoder": "disk"}
        dispatch_model(model, parts, main_device="cpu", offload_dir=tmp_path)
    with prefix.attached(model):
        assert difference(model(**inputs).logits, want) < 1e-12
        assert torch.equal(model.generate(**source(inputs), max_new_tokens=5), texts)
    with PrefixPerRow([prefix, None, make_prefix(make_model(), 2)]).attached(model):
        assert difference(model(**inputs).logits[:1], want[:1]) < 1e-12
    fresh = T5Prefix.for_model(model, prefix_length=2)
    assert all(parameter.device.type == "cpu" for parameter in fresh.parameters())
    loss = 0.0
    with fresh.attached(model):
        loss = model(**inputs).logits.double().pow(2).sum()
        loss.backward()
    assert math.isfinite(loss.item())
    assert all(parameter.grad.abs().max() > 0 for parameter in fresh.parameters())


@settings(max_examples=15)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    prefix_dtype=st.sampled_from([torch.float32, torch.float64]),
    prefix_length=st.integers(0, 64),
    batch=st.integers(1, 4),
    left=st.booleans(),
    implementation=st.sampled_from(["sdpa", "eager"]),
)
def test_any_precision_of_base_and_prefix(dtype, prefix_dtype, prefix_length, batch, left, implementation):
    exact, inputs = make_model(noise=0.05), make_inputs(batch=batch, left=left)
    prefix = make_prefix(exact, prefix_length, std=0.5)
    want = oracle.t5(exact, **inputs, prefixes=by_site(prefix))["logits"]
    model = make_model(noise=0.05, implementation=implementation).to(dtype)
    prefix = prefix.to(prefix_dtype)
    with prefix.attached(model):
        logits = model(**inputs).logits
        logits.float().pow(2).sum().backward()
    assert logits.dtype == dtype
    assert difference(logits.double(), want) < 32 * torch.finfo(dtype).eps * want.abs().max()
    for parameter in prefix.parameters():
        assert parameter.grad.dtype == prefix_dtype
        assert parameter.grad.isfinite().all()
