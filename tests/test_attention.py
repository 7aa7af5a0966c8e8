"""Attention against torch's own, on sizes that are all different."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.attention import MultiHeadAttention, scaled_dot_product_attention
from helpers.masks import causal_mask, padding_mask

BATCH, HEADS, QUERIES, KEYS, HEAD_DIM, VALUE_DIM = 2, 3, 4, 5, 6, 7


def random_qkv(queries=QUERIES, keys=KEYS, value_dim=VALUE_DIM, dtype=torch.float64):
    shapes = ((queries, HEAD_DIM), (keys, HEAD_DIM), (keys, value_dim))
    return [torch.randn(BATCH, HEADS, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def by_loops(query, key, value, mask, bias, scale):
    """Attention one query at a time."""
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=query.dtype)
    for b, h, q in itertools.product(*map(range, query.shape[:3])):
        visible = [k for k in range(key.shape[2]) if mask[b, h, q, k]]
        if visible:
            scores = [scale * (query[b, h, q] * key[b, h, k]).sum() + bias[b, h, q, k] for k in visible]
            total = sum(score.exp() for score in scores)
            output[b, h, q] = sum(s.exp() / total * value[b, h, k] for s, k in zip(scores, visible, strict=True))
    return output


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_attention_equals_loops_and_torch(scale):
    query, key, value = random_qkv()
    mask = torch.rand(BATCH, HEADS, QUERIES, KEYS) > 0.4
    mask[0, 1, 2] = False  # a query with nothing to attend to
    bias = torch.randn(BATCH, HEADS, QUERIES, KEYS, dtype=torch.float64)
    output, weights = scaled_dot_product_attention(query, key, value, mask, bias, scale=scale)
    want = by_loops(query, key, value, mask, bias, HEAD_DIM**-0.5 if scale is None else scale)
    assert torch.allclose(output, want, atol=1e-12)
    assert torch.allclose(weights @ value, output, atol=1e-12)
    both = torch.where(mask, bias, -torch.inf)
    torchs = F.scaled_dot_product_attention(query, key, value, attn_mask=both, scale=scale)
    assert torch.allclose(output, torchs, atol=1e-12)
    sums = weights.sum(-1)
    assert sums[0, 1, 2] == 0
    assert torch.allclose(sums[mask.any(-1)], torch.ones(()).double())
    assert (weights[~mask] == 0).all()


@given(
    queries=st.integers(0, 4),
    keys=st.integers(0, 4),
    shape=st.sampled_from(["full", "key", "query key", "none"]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_gradients_are_finite_and_equal_torchs_for_any_mask(queries, keys, shape, with_bias, seed):
    torch.manual_seed(seed)
    inputs = random_qkv(queries, keys)
    shapes = {"full": (BATCH, HEADS, queries, keys), "key": (BATCH, 1, 1, keys), "query key": (queries, keys)}
    mask = None if shape == "none" else torch.rand(shapes[shape]) > 0.5
    bias = torch.randn(1, HEADS, queries, keys, dtype=torch.float64) if with_bias else None
    output, weights = scaled_dot_product_attention(*inputs, mask, bias)
    assert output.shape == (BATCH, HEADS, queries, VALUE_DIM)
    assert weights.shape == (BATCH, HEADS, queries, keys)
    wanted = torch.randn_like(output)
    ours = torch.autograd.grad((output * wanted).sum(), inputs)
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in ours)
    if keys and queries:
        both = mask if bias is None else bias if mask is None else torch.where(mask, bias, -torch.inf)
        torchs = torch.autograd.grad((F.scaled_dot_product_attention(*inputs, both) * wanted).sum(), inputs)
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(ours, torchs, strict=True))


def test_a_query_with_nothing_to_attend_to_gives_zeros_and_no_gradient():
    query, key, value = random_qkv()
    for mask, bias in (
        (torch.zeros(QUERIES, KEYS, dtype=torch.bool), None),
        (None, torch.full((QUERIES, KEYS), -torch.inf, dtype=torch.float64)),
    ):
        output, weights = scaled_dot_product_attention(query, key, value, mask, bias)
        assert (output == 0).all()
        assert (weights == 0).all()
        for gradient in torch.autograd.grad(output.sum(), (query, key, value)):
            assert (gradient == 0).all()


def test_nan_in_the_input_is_not_hidden():
    query, key, value = (tensor.detach() for tensor in random_qkv())
    query[0, 0, 1, 2] = torch.nan
    output, _ = scaled_dot_product_attention(query, key, value)
    assert output[0, 0, 1].isnan().all()
    assert output[1].isfinite().all()


def test_dropout_rescales_what_is_left():
    query, key, value = random_qkv(keys=500)
    _, plain = scaled_dot_product_attention(query, key, value)
    _, dropped = scaled_dot_product_attention(query, key, value, dropout=0.25)
    kept = dropped != 0
    assert torch.allclose(dropped[kept], plain[kept] / 0.75)
    assert 0.7 < kept.double().mean() < 0.8


# --- the module ------------------------------------------------------------------------------------------------------


def copied_from_torch(torchs: nn.MultiheadAttention, head_dim=None) -> MultiHeadAttention:
    ours = MultiHeadAttention(
        torchs.embed_dim, torchs.num_heads, context_dim=torchs.kdim, bias=torchs.in_proj_bias is not None
    ).double()
    with torch.no_grad():
        if torchs.in_proj_weight is not None:
            weights = torchs.in_proj_weight.chunk(3)
        else:
            weights = (torchs.q_proj_weight, torchs.k_proj_weight, torchs.v_proj_weight)
        for projection, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), weights, strict=True):
            projection.weight.copy_(weight)
        ours.o_proj.weight.copy_(torchs.out_proj.weight)
        if torchs.in_proj_bias is not None:
            for projection, bias in zip(
                (ours.q_proj, ours.k_proj, ours.v_proj), torchs.in_proj_bias.chunk(3), strict=True
            ):
                projection.bias.copy_(bias)
            ours.o_proj.bias.copy_(torchs.out_proj.bias)
    return ours


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("context_dim", [12, 10])
def test_module_equals_torchs_with_copied_weights(bias, context_dim, need_weights):
    torchs = nn.MultiheadAttention(12, 3, bias=bias, kdim=context_dim, vdim=context_dim, batch_first=True).double()
    for parameter in torchs.parameters():
        nn.init.normal_(parameter)
    ours = copied_from_torch(torchs)
    x = torch.randn(2, 4, 12, dtype=torch.float64)
    context = torch.randn(2, 5, context_dim, dtype=torch.float64)
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]])
    want, want_weights = torchs(x, context, context, key_padding_mask=keep == 0, average_attn_weights=False)
    got = ours(x, context, mask=padding_mask(keep), need_weights=need_weights)
    if need_weights:
        got, weights = got
        assert torch.allclose(weights, want_weights, atol=1e-12)
    assert torch.allclose(got, want, atol=1e-12)


@given(
    head_dim=st.sampled_from([None, 5]),
    with_context=st.booleans(),
    causal=st.booleans(),
    with_bias=st.booleans(),
    prefix_length=st.sampled_from([None, 0, 3]),
    scale=st.sampled_from([None, 1.0]),
    empty_row=st.booleans(),
)
def test_fused_and_explicit_paths_agree(head_dim, with_context, causal, with_bias, prefix_length, scale, empty_row):
    torch.manual_seed(1)
    module = MultiHeadAttention(12, 3, head_dim=head_dim, context_dim=10 if with_context else None, bias=True).double()
    x = torch.randn(2, 4, 12, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, 7, 10, dtype=torch.float64) if with_context else None
    keys = 7 if with_context else 4
    mask = causal_mask(4, keys) if causal else torch.ones(4, keys, dtype=torch.bool)
    if empty_row:
        mask[1] = False
    bias = torch.randn(1, 3, 4, keys, dtype=torch.float64) if with_bias else None
    prefix = None
    if prefix_length is not None:
        prefix = tuple(torch.randn(1, 3, prefix_length, head_dim or 4, dtype=torch.float64) for _ in range(2))
    options = {"mask": mask, "bias": bias, "scale": scale, "prefix": prefix}
    explicit, weights = module(x, context, **options, need_weights=True)
    fused = module(x, context, **options)
    assert weights.shape == (2, 3, 4, keys + (prefix_length or 0))
    assert torch.allclose(fused, explicit, atol=1e-12)
    gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in (fused, explicit)]
    assert gradients[0].isfinite().all()
    assert torch.allclose(*gradients, atol=1e-10)


def test_a_prefix_of_real_keys_is_real_left_context():
    """Keys and values of the first tokens, given as a prefix, are those tokens: an oracle for the prefix."""
    module = MultiHeadAttention(12, 3).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    whole = module(x, mask=causal_mask(9))
    left, right = x.split([3, 6], dim=1)
    key, value = (
        projection(left).unflatten(-1, (3, 4)).transpose(1, 2) for projection in (module.k_proj, module.v_proj)
    )
    assert torch.allclose(module(right, mask=causal_mask(6), prefix=(key, value)), whole[:, 3:], atol=1e-12)


def test_dropout_acts_only_while_training():
    module, x = MultiHeadAttention(12, 3, dropout=0.5), torch.randn(2, 4, 12)
    module.eval()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))
    _, weights = module(x, need_weights=True)
    assert (weights == 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_running_example_in_common_precisions(dtype):
    module, x = MultiHeadAttention(768, 12).to(dtype), torch.randn(1, 8, 768, dtype=dtype)
    prefix = torch.randn(1, 12, 3, 64), torch.randn(1, 12, 3, 64)  # float32 parameters in front of bfloat16 keys
    output, weights = module(x, prefix=prefix, need_weights=True)
    assert output.shape == (1, 8, 768)
    assert weights.shape == (1, 12, 8, 11)
    assert module(x, prefix=prefix).dtype == dtype


@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 5), (4, 1), (3, 1, 1), (2, 1, 1, 5), (1, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mask_and_bias_that_broadcasts_is_taken_by_both_paths(shape, with_prefix, dtype):
    module = MultiHeadAttention(12, 3).to(dtype)
    x, context = torch.randn(2, 4, 12, dtype=dtype), torch.randn(2, 5, 12, dtype=dtype)
    prefix = (torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2, 4)) if with_prefix else None
    for options in ({"mask": torch.rand(shape) > 0.3}, {"bias": torch.randn(shape)}):
        explicit, weights = module(x, context, prefix=prefix, need_weights=True, **options)
        assert weights.shape == (2, 3, 4, 5 + 2 * with_prefix)
        assert torch.allclose(
            module(x, context, prefix=prefix, **options), explicit, atol=1e-6 if dtype.itemsize == 4 else 0.02
        )


# --- at the door -----------------------------------------------------------------------------------------------------


def zeros(*shape):
    return torch.zeros(*shape)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((zeros(3, 4, 6), zeros(2, 3, 5, 6), zeros(2, 3, 5, 6)), ValueError, r"three times, got query \[3, 4, 6\]"),
        ((zeros(2, 3, 4, 6), zeros(2, 3, 5, 7), zeros(2, 3, 5, 6)), ValueError, "same head_dim, got query"),
        ((zeros(2, 3, 4, 6), zeros(2, 3, 5, 6), zeros(2, 3, 4, 6)), ValueError, "every key needs one value"),
        ((zeros(2, 3, 4, 6), zeros(1, 3, 5, 6), zeros(1, 3, 5, 6)), ValueError, "same batch and heads"),
        ((*[zeros(2, 3, 4, 6)] * 3, torch.ones(2, 4)), TypeError, "bool with True = may attend, got torch.float32"),
        ((*[zeros(2, 3, 4, 6)] * 3, torch.ones(2, 4, dtype=torch.bool)), ValueError, r"mask \[2, 4\] does not broad"),
        ((*[zeros(2, 3, 4, 6)] * 3, None, zeros(4, 4).bool()), TypeError, "bias .* must be float, got torch.bool"),
        ((*[zeros(2, 3, 4, 6)] * 3, None, zeros(5, 4)), ValueError, r"bias \[5, 4\] .* \[2, 3, 4, 4\]"),
    ],
)
def test_attention_refuses_what_does_not_fit(arguments, error, message):
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(*arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("need_weights", [False, True])
def test_module_refuses_what_does_not_fit(need_weights):
    module = MultiHeadAttention(12, 3, context_dim=10)
    x, context = zeros(2, 4, 12), zeros(2, 5, 10)
    with pytest.raises(ValueError, match=r"x as \[batch, seq, 12\], got shape \[4, 12\]"):
        module(x[0], context, need_weights=need_weights)
    with pytest.raises(ValueError, match=r"context as \[batch, seq, 10\], got shape \[2, 4, 12\]"):
        module(x, need_weights=need_weights)
    with pytest.raises(TypeError, match="use padding_mask"):
        module(x, context, mask=torch.ones(2, 1, 1, 5), need_weights=need_weights)
    with pytest.raises(ValueError, match=r"mask \[2, 5\] does not broadcast"):
        module(x, context, mask=torch.ones(2, 5, dtype=torch.bool), need_weights=need_weights)
    with pytest.raises(ValueError, match=r"prefix key \[1, 3, 2, 5\] does not fit"):
        module(x, context, prefix=(zeros(1, 3, 2, 5), zeros(1, 3, 2, 5)), need_weights=need_weights)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((12, 5), {}, "model_dim 12 cannot be cut into 5 equal heads"),
        ((12, 0), {}, "positive sizes.* num_heads=0"),
        ((12, 3), {"head_dim": 0}, "positive sizes.* head_dim=0"),
        ((12, 3), {"dropout": 2.0}, "dropout must be from 0 to 1, got 2.0"),
    ],
)
def test_impossible_sizes_are_refused(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*sizes, **options)
