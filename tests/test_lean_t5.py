"""LeanT5 against transformers' own loss, and the loss with a frozen head against torch's."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_t5 import difference, make_inputs, make_model, make_prefix, norms_in_float64
from torch.utils.flop_counter import FlopCounterMode
from transformers import ByT5Tokenizer

from helpers import losses
from helpers.lean_t5 import LeanT5
from helpers.losses import frozen_cross_entropy
from helpers.peft_prefix import PeftT5Prefix
from helpers.t5 import PrefixPerRow
from helpers.training import fit

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
    lean = LeanT5(model)
    for sites in (("encoder",), ("decoder",), ("cross",), ("encoder", "decoder", "cross")):
        prefix = make_prefix(model, sites=sites, std=0.5)
        ours = loss_and_gradients(prefix, lean(batch, prefix))
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
    assert abs(LeanT5(model)(batch, prefix).item() - theirs.item()) < 1e-5


def test_a_prefix_for_each_row():
    model, batch = make_model(), make_batch()
    three, two = make_prefix(model, 3, std=0.5), make_prefix(model, 2, seed=5, std=0.5, sites=("encoder", "cross"))
    rows = PrefixPerRow([three, None, two])
    ours = loss_and_gradients(rows, LeanT5(model)(batch, rows))
    with rows.attached(model):
        theirs = loss_and_gradients(rows, model(**batch).loss)
    assert_same(ours, theirs, 1e-6)


def test_bfloat16_stays_near():
    model = make_model(dtype=torch.float32, noise=0.1)
    prefix, batch = make_prefix(model, std=0.5), make_batch()
    exact = LeanT5(model)(batch, prefix).item()
    half = LeanT5(model.to(torch.bfloat16))(batch, prefix)
    half.backward()
    assert half.item() == pytest.approx(exact, rel=0.02)
    assert all(parameter.grad.dtype == torch.float32 for parameter in prefix.parameters())


def test_padding_costs_no_matrix_product_outside_attention():
    model = make_model()
    prefix, short = make_prefix(model, 3), make_batch()
    long = {name: F.pad(tensor, (0, 40), value=-100 if name == "labels" else 0) for name, tensor in short.items()}
    lean, counts = LeanT5(model), []
    for batch in (short, long):
        with FlopCounterMode(display=False) as counter:
            lean(batch, prefix).backward()
        products = counter.get_flop_counts()["Global"]
        counts.append({str(name): count for name, count in products.items() if "attention" not in str(name)})
    assert counts[0] == counts[1]
    assert {"aten.mm"} <= set(counts[0])


def test_lean_training_is_the_ordinary_training():
    model, pairs = make_model(vocab_size=384, dtype=torch.float32), [("a", "b"), ("bb", "cccc"), ("ccc", "d")]
    for sites, cached in ((("encoder", "decoder", "cross"), False), (("decoder", "cross"), True)):
        runs = []
        for lean in (False, True):
            prefix = make_prefix(model, 2, std=0.1, sites=sites)
            with prefix.attached(model):
                options = {"steps": 20, "batch_size": 4, "cache_encoder": cached, "lean": lean}
                runs.append(fit(model, prefix.parameters(), ByT5Tokenizer(), pairs, **options))
        assert runs[0] == pytest.approx(runs[1], abs=1e-3)
        assert runs[0] != runs[1], "the same computation twice"
        assert runs[1][-1] < runs[1][0]


def test_lean_training_needs_an_attached_prefix():
    model = make_model(vocab_size=384, dtype=torch.float32)
    prefix = make_prefix(model, 2)
    with pytest.raises(ValueError, match="attached to the model"):
        fit(model, prefix.parameters(), ByT5Tokenizer(), [("a", "b")], steps=1, lean=True)


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_it_refuses_what_it_would_get_wrong():
    with pytest.raises(TypeError, match="UMT5ForConditionalGeneration"):
        LeanT5(make_model("umt5"))
    with pytest.raises(TypeError, match="got Linear"):
        LeanT5(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match="training mode True, tensors to train 0"):
        LeanT5(make_model().train())
    model = make_model()
    model.lm_head.requires_grad_(True)
    with pytest.raises(ValueError, match="tensors to train 1"):
        LeanT5(model)
    with warnings.catch_warnings(action="ignore"):
        quantised = torch.ao.quantization.quantize_dynamic(make_model(dtype=torch.float32), {torch.nn.Linear})
    with pytest.raises(ValueError, match="no quantised or offloaded model"):
        LeanT5(quantised)
    with pytest.raises(ValueError, match="no quantised or offloaded model"):
        LeanT5(make_model().to("meta"))


def test_it_refuses_a_source_without_a_token():
    model, batch = make_model(), make_batch()
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match=r"every source needs a token.*\[3, 1, 1, 6\]"):
        LeanT5(model)(batch, make_prefix(model))


def test_it_refuses_a_position_bias_of_slots():
    model = make_model()
    prefix = make_prefix(model, sites=("decoder",))
    with pytest.raises(ValueError, match="the PeftT5Prefix has one"):
        LeanT5(model)(make_batch(), PeftT5Prefix(dict(prefix.encoders)))


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


def test_the_logits_are_never_all_there():
    states = torch.randn(64, 8, requires_grad=True)
    head, labels = torch.randn(1000, 8), torch.randint(1000, (64,))
    with pytest.MonkeyPatch.context() as patch, torch.profiler.profile(profile_memory=True) as profiler:
        patch.setattr(losses, "LOGIT_BYTES", 4 * 1000 * 8)
        frozen_cross_entropy(states, head, labels).backward()
    largest = max(event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    assert 4 * 1000 * 8 <= largest < 4 * 1000 * 16
