"""LeanT5 against transformers' own loss, and the loss with a frozen head against torch's."""

import os
import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
from benchmarks.measuring import peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_t5 import difference, make_inputs, make_model, make_prefix, norms_in_float64
from torch.utils.flop_counter import FlopCounterMode
from transformers import ByT5Tokenizer

from helpers.tuning import losses
from helpers.tuning.attach import PrefixPerRow
from helpers.tuning.engines import T5WithPrefix
from helpers.tuning.lean_t5 import LeanT5
from helpers.tuning.losses import frozen_cross_entropy
from helpers.tuning.peft_prefix import PeftT5Prefix
from helpers.tuning.training import fit

FAMILIES = ("t5", "t5 v1.1", "mt5")


@pytest.fixture(scope="module", autouse=True)
def float64_throughout():
    with norms_in_float64():
        yield


def make_batch(**options):
    inputs = make_inputs(**options)
    labels = inputs.pop("decoder_input_ids")
    labels[0, 3:], labels[1, :2], labels[2, 1:4] = -100, -100, -100  # behind, in front, in the midst
    return {**inputs, "labels": labels}


def loss_and_gradients(prefix, loss):
    prefix.zero_grad()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in prefix.parameters()]


def assert_same(ours, theirs, tolerance=1e-10):
    assert abs(ours[0] - theirs[0]) < tolerance
    assert all(difference(a, b) < tolerance for a, b in zip(ours[1], theirs[1], strict=True))
    assert all(gradient.abs().max() > 1e-4 for gradient in theirs[1])


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_transformers(family, left):
    model, batch = make_model(family), make_batch(left=left)
    for sites in (("encoder",), ("decoder",), ("cross",), ("encoder", "decoder", "cross")):
        prefix = make_prefix(model, sites=sites, std=0.5)
        ours = loss_and_gradients(prefix, LeanT5(model, prefix)(batch))
        with prefix.attached(model):
            theirs = loss_and_gradients(prefix, model(**batch).loss)
        assert_same(ours, theirs, 1e-6)  # transformers' loss is in float32
        assert abs(ours[0] - model(**batch).loss.item()) > 1e-3, "the prefix had no effect"


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=4),
    slots=st.integers(0, 5),
    heads=st.sampled_from([(1, 4), (3, 5), (4, 2)]),
    depths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_any_lengths(lengths, slots, heads, depths):
    sizes = {"num_heads": heads[0], "d_kv": heads[1], "num_layers": depths[0], "num_decoder_layers": depths[1]}
    model = make_model(**sizes)
    source, target = (max(column) for column in zip(*lengths, strict=True))
    batch = {
        "input_ids": torch.randint(2, 41, (len(lengths), source)),
        "attention_mask": torch.zeros(len(lengths), source),
    }
    batch["labels"] = torch.randint(2, 41, (len(lengths), target))
    for row, (tokens, labels) in enumerate(lengths):
        batch["attention_mask"][row, :tokens] = 1
        batch["labels"][row, labels:] = -100
    prefix = make_prefix(model, slots, std=0.5)
    with prefix.attached(model):
        theirs = model(**batch).loss
    assert abs(LeanT5(model, prefix)(batch).item() - theirs.item()) < 1e-5


def test_a_prefix_for_each_row():
    model, batch = make_model(), make_batch()
    three, two = make_prefix(model, 3, std=0.5), make_prefix(model, 2, seed=5, std=0.5, sites=("encoder", "cross"))
    rows = PrefixPerRow([three, None, two])
    ours = loss_and_gradients(rows, LeanT5(model, rows)(batch))
    with rows.attached(model):
        theirs = loss_and_gradients(rows, model(**batch).loss)
    assert_same(ours, theirs, 1e-6)


def test_rows_serve_neighbours():
    model, batch = make_model(), make_batch(batch=4)
    rows = PrefixPerRow([make_prefix(model, 3, std=0.5), make_prefix(model, 2, seed=5, std=0.5)])
    with rows.attached(model):
        theirs = model(**batch).loss
    assert abs(LeanT5(model, rows)(batch).item() - theirs.item()) < 1e-6
    with pytest.raises(ValueError, match="2 rows cannot serve a batch of 3"):
        LeanT5(model, rows)(make_batch())


def test_an_mt5_is_never_scaled():
    model = make_model("mt5")
    model.config.scale_decoder_outputs = True  # as in a config that was written by a T5
    prefix, batch = make_prefix(model, std=0.5), make_batch()
    with prefix.attached(model):
        theirs = model(**batch).loss
    assert abs(LeanT5(model, prefix)(batch).item() - theirs.item()) < 1e-5


def test_bfloat16_stays_near():
    model = make_model(dtype=torch.float32, noise=0.1)
    prefix, batch = make_prefix(model, std=0.5), make_batch()
    exact, gradients = loss_and_gradients(prefix, LeanT5(model, prefix)(batch))
    half, half_gradients = loss_and_gradients(prefix, LeanT5(model.to(torch.bfloat16), prefix)(batch))
    assert half == pytest.approx(exact, rel=0.02)
    for gradient, half_gradient in zip(gradients, half_gradients, strict=True):
        assert half_gradient.dtype == torch.float32
        assert (gradient - half_gradient).norm() < 0.1 * gradient.norm()


@pytest.mark.parametrize("sites", [("encoder", "decoder", "cross"), ("cross",)])
def test_masks_reach_the_kernel_in_rows_of_eight(monkeypatch, sites):
    """`with_prefix_columns` says why."""
    seen = []

    def attention(query, key, value, mask, **options):
        seen.append(mask)
        return stock(query, key, value, mask, **options)

    stock = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    model, batch = make_model(), make_batch()
    rows = PrefixPerRow([make_prefix(model, 3, sites=sites), None, make_prefix(model, 2, sites=sites)])
    LeanT5(model, rows)(batch)
    assert len(seen) == 4 + 2 * 2
    for mask in seen:
        assert mask.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


def test_padding_costs_no_matrix_product_outside_attention():
    model = make_model()
    prefix, short = make_prefix(model, 3), make_batch()
    long = {name: F.pad(tensor, (0, 40), value=-100 if name == "labels" else 0) for name, tensor in short.items()}
    lean, counts = LeanT5(model, prefix), []
    for batch in (short, long):
        with FlopCounterMode(display=False) as counter:
            lean(batch).backward()
        products = counter.get_flop_counts()["Global"]
        counts.append({str(name): count for name, count in products.items() if "attention" not in str(name)})
    assert counts[0] == counts[1]
    assert {"aten.mm"} <= set(counts[0])


@pytest.mark.parametrize("side", ["right", "left"])
def test_lean_training_is_the_ordinary_training(side):
    tokenizer = ByT5Tokenizer(padding_side=side)
    model, pairs = make_model(vocab_size=384, dtype=torch.float32), [("a", "b"), ("bb", "cccc"), ("ccc", "d")]
    for sites, cached in ((("encoder", "decoder", "cross"), False), (("decoder", "cross"), True)):
        runs = []
        for options in ({}, {"cache_encoder": cached}, {"lean": True, "cache_encoder": cached}):
            prefix = make_prefix(model, 2, std=0.1, sites=sites)
            with prefix.attached(model):
                runs.append(fit(model, prefix.parameters(), tokenizer, pairs, steps=20, batch_size=4, **options))
        assert runs[1] == pytest.approx(runs[0], abs=1e-3)
        assert runs[2] == pytest.approx(runs[0], abs=1e-3)
        assert runs[0] != runs[2], "the same computation twice"
        assert runs[2][-1] < runs[2][0]


def test_lean_training_encodes_each_source_once(monkeypatch):
    calls, stock = [], LeanT5.encode
    monkeypatch.setattr(LeanT5, "encode", lambda *inputs: calls.append(1) or stock(*inputs))
    model, pairs = make_model(vocab_size=384, dtype=torch.float32), [("a", "b"), ("bb", "cccc")]
    prefix = make_prefix(model, 2, sites=("cross",))
    with prefix.attached(model):
        options = {"steps": 3, "batch_size": 2, "cache_encoder": True, "lean": True}
        fit(model, prefix.parameters(), ByT5Tokenizer(), pairs, **options)
    assert len(calls) == 1


def test_lean_training_needs_an_attached_prefix():
    model = make_model(vocab_size=384, dtype=torch.float32)
    prefix = make_prefix(model, 2)
    with pytest.raises(ValueError, match="attached to the model"):
        fit(model, prefix.parameters(), ByT5Tokenizer(), [("a", "b")], steps=1, lean=True)


# --- what it refuses -------------------------------------------------------------------------------------------------


def in_wrapper(model):
    return T5WithPrefix(model, make_prefix(model))


def with_bias(model):
    model.lm_head = torch.nn.Linear(16, 41, dtype=model.dtype).requires_grad_(False)
    return model


def quantised(model):
    with warnings.catch_warnings(action="ignore"):
        return torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear})


def with_lora(model):
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q"]), model)
    return model.requires_grad_(False)


def decoder_training(model):
    model.decoder.train()
    return model


def one_dropout_on(model):
    model.encoder.block[1].layer[-1].dropout.train()
    return model


def head_trained(model):
    model.lm_head.requires_grad_(True)
    return model


def half_of_it(model):
    model.encoder.to(torch.bfloat16)
    return model


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda model: make_model("umt5"), TypeError, "got a UMT5ForConditionalGeneration"),
        (lambda model: torch.nn.Linear(2, 3), TypeError, "got a Linear"),
        (in_wrapper, TypeError, "got a ModelWithPrefix: of a wrapper, give the model inside"),
        (lambda model: model.train(), ValueError, "dropout on True, tensors to train 0"),
        (decoder_training, ValueError, "dropout on True, tensors to train 0"),
        (one_dropout_on, ValueError, "dropout on True, tensors to train 0"),
        (head_trained, ValueError, "dropout on False, tensors to train 1"),
        (with_bias, ValueError, "lm_head is Linear.*bias=True"),
        (quantised, ValueError, "DynamicQuantizedLinear.*unquantised"),
        (with_lora, ValueError, "merge or remove adapters"),
        (lambda model: model.to("meta"), ValueError, "not offloaded"),
        (lambda model: model.half(), ValueError, "throughout, got torch.float16"),
        (half_of_it, ValueError, "throughout, got torch.bfloat16, torch.float64"),
        (lambda model: make_model(num_layers=6), ValueError, r"= \(4, 3, 5\), but the model has \(6, 3, 5\)"),
    ],
)
def test_it_refuses_a_model_that_it_would_get_wrong(change, error, sentence):
    model = make_model()
    prefix = make_prefix(model)
    with warnings.catch_warnings(action="ignore"), pytest.raises(error, match=sentence):
        LeanT5(change(model), prefix)


@pytest.mark.usefixtures("unchecked")
def test_it_refuses_a_prefix_that_it_would_get_wrong():
    model = make_model()
    with pytest.raises(TypeError, match="a T5Prefix or PrefixPerRow, got a PrefixEncoder"):
        LeanT5(model, make_prefix(model).encoders["cross"])
    prefix = make_prefix(model, sites=("decoder",))
    with pytest.raises(ValueError, match="the PeftT5Prefix has one"):
        LeanT5(model, PeftT5Prefix(dict(prefix.encoders)))
    with pytest.warns(UserWarning, match="other weights"):
        LeanT5(make_model(seed=5), prefix)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"attention_mask": torch.tensor([[1] * 6, [0] * 6, [1] * 6])}, r"needs a token.*\[3, 1, 1, 6\]"),
        ({"decoder_input_ids": torch.ones(3, 5, dtype=torch.long)}, "got input_ids, attention_mask, labels, decoder_"),
        ({"labels": torch.ones(2, 5, dtype=torch.long)}, r"as many rows, got .*'labels': \[2, 5\]"),
        ({"attention_mask": torch.ones(3, 8, dtype=torch.long)}, r"of one shape, .* needs no columns in the mask"),
        ({"input_ids": torch.ones(3, 5, dtype=torch.long)}, r"as many rows, got .*'input_ids': \[3, 5\]"),
    ],
)
def test_it_refuses_a_batch_that_it_would_get_wrong(change, sentence):
    model = make_model()
    with pytest.raises(ValueError, match=sentence):
        LeanT5(model, make_prefix(model))(make_batch() | change)


def test_a_loss_without_labels_is_refused():
    model, batch = make_model(), make_batch()
    del batch["labels"]
    with pytest.raises(ValueError, match="needs labels, and the batch has only input_ids, attention_mask"):
        LeanT5(model, make_prefix(model))(batch)


def test_encoded_states_must_be_of_this_batch_and_this_prefix():
    model, batch = make_model(), make_batch()
    whole, decoder = LeanT5(model, make_prefix(model)), LeanT5(model, make_prefix(model, sites=("decoder",)))
    encoded = decoder.encode(batch)
    assert torch.equal(decoder(batch, encoded=encoded), decoder(batch))
    with pytest.raises(ValueError, match="has the sites encoder, decoder, cross"):
        whole(batch, encoded=encoded)
    with pytest.raises(ValueError, match=r"encoded \[9, 16\] must have a row for each of the 10 source tokens"):
        decoder(batch, encoded=encoded[1:])


# --- the loss with a frozen head -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 9), classes=st.integers(2, 11), features=st.integers(1, 6), at_a_time=st.integers(1, 9))
def test_the_frozen_loss_is_torchs(tokens, classes, features, at_a_time):
    generator = torch.Generator().manual_seed(tokens)
    states = 30 * torch.randn(tokens, features, generator=generator, dtype=torch.float64)
    head = torch.randn(classes, features, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (tokens,), generator=generator)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "LOGIT_BYTES", 4 * classes * at_a_time)
        for loss_of in (frozen_cross_entropy, lambda *x: F.cross_entropy(x[0] @ x[1].T, x[2])):
            leaf = states.clone().requires_grad_(True)
            (3 * loss_of(leaf, head, labels)).backward()
            with torch.no_grad():
                results.append((loss_of(leaf, head, labels), leaf.grad))
    assert torch.allclose(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-10)


@pytest.mark.skipif("ROUNDING_NOISE" in os.environ, reason="the noise takes memory too")
def test_the_logits_are_never_all_there(monkeypatch):
    tokens, classes, at_a_time = 64, 1000, 8
    states = torch.randn(tokens, 8, requires_grad=True)
    head, labels = torch.randn(classes, 8), torch.randint(classes, (tokens,))
    monkeypatch.setattr(losses, "LOGIT_BYTES", 4 * classes * at_a_time)
    peak = peak_bytes(lambda: frozen_cross_entropy(states, head, labels).backward())
    assert peak < 3 * 4 * classes * at_a_time < 4 * classes * tokens / 2


def test_a_small_loss_keeps_its_gradient_in_bfloat16():
    """Taken as a difference of two products, it would be their rounding alone."""
    torch.manual_seed(0)
    head = torch.randn(50, 16)
    labels = torch.arange(9)
    states = 1.5 * head[labels]  # each nearest to its own class by far
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = states.bfloat16().to(dtype).requires_grad_(True)
        loss = frozen_cross_entropy(leaf, head.bfloat16().to(dtype), labels)
        loss.backward()
        gradients.append(leaf.grad.float())
    assert loss < 0.01
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[0].norm()
