"""One batch, many tasks: `PrefixPerRow` gives each row what its own prefix gives it alone."""

import copy

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_table import lacking
from test_t5 import FAMILIES, GREEDY, STEPS, by_site, difference, make_inputs, make_model, make_prefix, source

from helpers.prefix import join_prefix
from helpers.tuning.attach import PrefixPerRow, T5Prefix


def row_of(inputs, row):
    return {name: tensor[row : row + 1] for name, tensor in inputs.items()}


def alone(model, prefix, run):
    if prefix is None:
        return run()
    with prefix.attached(model):
        return run()


def four_prefixes(model):
    """Of different length and sites, and none."""
    return [
        make_prefix(model, 7, seed=1),
        make_prefix(model, 3, seed=2, sites=("encoder", "cross")),
        None,
        make_prefix(model, 5, seed=3, mid_dim=11, sites=("decoder",)),
    ]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_computes_what_it_computes_alone(family, implementation):
    if reason := lacking(family.upper(), "forward"):
        pytest.skip(f"transformers {transformers.__version__}: {reason}")
    model, inputs = make_model(family, implementation=implementation), make_inputs(batch=4)
    rows = four_prefixes(model)
    with PrefixPerRow(rows).attached(model):
        together = model(**inputs)
    for row, prefix in enumerate(rows):
        want = alone(model, prefix, lambda row=row: model(**row_of(inputs, row)))
        assert difference(together.logits[row : row + 1], want.logits) < 1e-11
        assert difference(together.encoder_last_hidden_state[row : row + 1], want.encoder_last_hidden_state) < 1e-11


@settings(max_examples=12)
@given(
    lengths=st.lists(st.sampled_from([None, 0, 1, 2, 6, 64]), min_size=1, max_size=5),
    padded=st.booleans(),
    left=st.booleans(),
    implementation=st.sampled_from(["sdpa", "eager"]),
)
def test_any_mixture_of_lengths(lengths, padded, left, implementation):
    if all(length is None for length in lengths):
        lengths = [*lengths, 4]
    model = make_model(implementation=implementation, num_layers=2, num_decoder_layers=1)
    inputs = make_inputs(batch=len(lengths), left=left)
    if not padded:
        del inputs["attention_mask"]
    rows = [None if n is None else make_prefix(model, n, seed=i) for i, n in enumerate(lengths)]
    with PrefixPerRow(rows).attached(model):
        together = model(**inputs).logits
    for row, prefix in enumerate(rows):
        want = alone(model, prefix, lambda row=row: model(**row_of(inputs, row)).logits)
        assert difference(together[row : row + 1], want) < 1e-11


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": True},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_generation_by_row(options):
    model, inputs = make_model(), make_inputs(batch=4)
    rows, returned = four_prefixes(model), options.get("num_return_sequences", 1)
    with PrefixPerRow(rows).attached(model):
        together = model.generate(**source(inputs), **GREEDY, **options)
    texts = set()
    for row, prefix in enumerate(rows):
        want = alone(model, prefix, lambda row=row: model.generate(**source(row_of(inputs, row)), **GREEDY, **options))
        assert torch.equal(together[returned * row : returned * (row + 1)], want)
        texts.add(tuple(want[0].tolist()))
    assert len(texts) == 4, "two rows wrote the same, so that a row with another's prefix would go unseen"


def test_sampled_returned_sequences_use_their_rows_prefix():
    model, inputs = make_model(), make_inputs(batch=2)
    rows, copies = [make_prefix(model, 7, seed=1), make_prefix(model, 3, seed=2)], 3
    with PrefixPerRow(rows).attached(model):
        output = model.generate(
            **source(inputs),
            max_new_tokens=STEPS,
            min_new_tokens=STEPS,
            do_sample=True,
            num_return_sequences=copies,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = torch.stack(output.logits, dim=1)  # [rows * copies, steps, vocabulary]
    for row, prefix in enumerate(rows):
        mine = slice(row * copies, (row + 1) * copies)
        each = {name: tensor[row : row + 1].expand(copies, -1) for name, tensor in source(inputs).items()}
        with prefix.attached(model):
            want = model(**each, decoder_input_ids=output.sequences[mine, :-1]).logits
        assert difference(logits[mine], want.float()) < 1e-4


def test_a_fully_padded_row_without_a_prefix_is_the_models_own():
    for implementation in ("sdpa", "eager"):
        model, inputs = make_model(implementation=implementation), make_inputs(batch=2)
        inputs["attention_mask"][1] = 0
        with PrefixPerRow([make_prefix(model), None]).attached(model):
            together = model(**inputs).logits
        assert together.isfinite().all()
        assert difference(together[1:], model(**row_of(inputs, 1)).logits) < 1e-11


def test_each_distinct_prefix_is_evaluated_once_and_all_are_trained_together():
    model, inputs = make_model(), make_inputs(batch=5)

    class Counting(T5Prefix):
        calls = 0

        def key_values(self, site):
            Counting.calls += 1
            return super().key_values(site)

    german, italian = Counting.for_model(model, prefix_length=3), Counting.for_model(model, prefix_length=2)
    german, italian = german.to(model.dtype), italian.to(model.dtype)
    mixed = PrefixPerRow([german, italian, german, None, german])
    assert {id(p) for p in mixed.parameters()} == {id(p) for each in (german, italian) for p in each.parameters()}
    with mixed.attached(model):
        model(**inputs).logits.pow(2).sum().backward()
    assert Counting.calls == 2 * 3, "two prefixes at three sites"
    together = {name: parameter.grad.clone() for name, parameter in mixed.named_parameters()}
    mixed.zero_grad()
    for row, prefix in enumerate([german, italian, german, None, german]):
        if prefix is not None:
            with prefix.attached(model):
                model(**row_of(inputs, row)).logits.pow(2).sum().backward()
    for name, parameter in mixed.named_parameters():
        assert parameter.grad.abs().max() > 1e-3
        assert difference(parameter.grad, together[name]) < 1e-9 * together[name].abs().max()


def test_reentrant_checkpointing_of_mixed_rows():
    model, inputs = make_model(), make_inputs(batch=3)
    mixed = PrefixPerRow([make_prefix(model, 7), make_prefix(model, 3, seed=2), None])
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": True})
            model.train()
        mixed.zero_grad()
        with mixed.attached(model):
            model(**inputs, use_cache=False).logits.pow(2).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in mixed.parameters()])
    assert all(difference(a, b) < 1e-9 * a.abs().max() for a, b in zip(*gradients, strict=True))


def test_equal_rows_are_one_prefix_and_need_no_mask():
    model, inputs = make_model(), make_inputs(batch=3)
    prefix = make_prefix(model)
    mixed = PrefixPerRow([prefix] * 3)
    assert all(mixed.visible(site) is None for site in mixed.sites)
    assert all(
        torch.equal(mixed.key_values(site), pair.expand(-1, -1, 3, -1, -1, -1))
        for site, pair in by_site(prefix).items()
    )
    with mixed.attached(model):
        together = model(**inputs).logits
    with prefix.attached(model):
        assert difference(model(**inputs).logits, together) < 1e-12


def test_what_is_refused(unchecked):
    model = make_model()
    prefix = make_prefix(model)
    with pytest.raises(ValueError, match="at least one of the 2 rows needs a prefix"):
        PrefixPerRow([None, None])
    with pytest.raises(ValueError, match="at least one of the 0 rows"):
        PrefixPerRow([])
    with pytest.raises(TypeError, match="needs a Prefix or None, got a Tensor"):
        PrefixPerRow([prefix, torch.zeros(3)])
    with pytest.raises(TypeError, match="got a PrefixPerRow"):
        PrefixPerRow([prefix, PrefixPerRow([prefix])])
    with pytest.raises(TypeError, match="a sequence of prefixes, got a Prefix"):
        PrefixPerRow(prefix)
    other = make_prefix(make_model(num_heads=2))
    with pytest.raises(ValueError, match=r"site 'encoder' are for models of different .*\(4, 2, 5\), \(4, 3, 5\)"):
        PrefixPerRow([prefix, other])
    with pytest.raises(ValueError, match="but the model has"):
        PrefixPerRow([other]).attach(model)
    with (
        PrefixPerRow([prefix, None]).attached(model),
        pytest.raises(ValueError, match="2 rows cannot serve a batch of 3"),
    ):
        model(**make_inputs(batch=3))
    stranger = make_prefix(make_model(seed=9))
    with pytest.warns(UserWarning, match="other weights"):
        PrefixPerRow([prefix, stranger]).attach(model)


def test_a_deep_copy_is_independent():
    model, inputs = make_model(), make_inputs(batch=2)
    mixed = PrefixPerRow([make_prefix(model), None])
    with mixed.attached(model):
        want = model(**inputs).logits
        copied = copy.deepcopy(model)
    for parameter in mixed.parameters():
        parameter.data.zero_()
    assert torch.equal(copied(**inputs).logits, want)


# --- join_prefix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_slots_that_an_example_lacks_get_no_attention(mask):
    batch, heads, prefix, seq, dim = 2, 3, 4, 5, 7
    torch.manual_seed(0)
    pair = torch.randn(2, batch, heads, prefix, dim, dtype=torch.float64)
    query, key, value = torch.randn(3, batch, heads, seq, dim, dtype=torch.float64)
    has = torch.tensor([[True, True, False, False], [True] * 4])
    visible = torch.rand(batch, 1, seq, seq) < 0.7
    content = {
        None: None,
        "bool": visible,
        "float": torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf),
    }[mask]
    long_key, long_value, long_mask, _ = join_prefix(*pair, key, value, content, prefix_mask=has)
    assert long_mask.shape[-1] == prefix + seq
    assert (long_mask.dtype == torch.bool) == (mask != "float")
    attend = torch.nn.functional.scaled_dot_product_attention
    got = attend(query, long_key, long_value, long_mask)
    cut_key, cut_value, cut_mask, _ = join_prefix(
        *pair[:, :1, :, :2], key[:1], value[:1], None if content is None else content[:1]
    )
    assert difference(got[:1], attend(query[:1], cut_key, cut_value, cut_mask)) < 1e-14
    full_key, full_value, full_mask, _ = join_prefix(
        *pair[:, 1:], key[1:], value[1:], None if content is None else content[1:]
    )
    assert difference(got[1:], attend(query[1:], full_key, full_value, full_mask)) < 1e-14


def test_a_prefix_mask_of_another_shape_or_type_is_refused(unchecked):
    pair, content = torch.zeros(2, 1, 3, 4, 7), torch.zeros(2, 2, 3, 5, 7)
    for wrong in (torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 4), torch.ones(2, 4, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"must be bool \[batch, prefix\] = \[1, 4\], got"):
            join_prefix(*pair, *content, prefix_mask=wrong)
