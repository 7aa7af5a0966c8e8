"""join_prefix and PrefixEncoder."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.attention import scaled_dot_product_attention
from helpers.masks import causal_mask
from helpers.prefix import PrefixEncoder, join_prefix, split_prefix, with_prefix_columns

BATCH, HEADS, PREFIX, KEYS, HEAD_DIM = 2, 5, 3, 7, 4


def pairs(prefix_batch=1, prefix=PREFIX, dtype=torch.float64):
    made = [torch.randn(prefix_batch, HEADS, prefix, HEAD_DIM, dtype=dtype) for _ in range(2)]
    return made + [torch.randn(BATCH, HEADS, KEYS, HEAD_DIM, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("prefix_batch", [1, BATCH])
def test_the_prefix_stands_in_front_on_the_sequence_axis(prefix_batch):
    prefix_key, prefix_value, key, value = pairs(prefix_batch)
    mask = torch.rand(BATCH, 1, 6, KEYS) > 0.5
    bias = torch.randn(1, HEADS, 6, KEYS, dtype=torch.float64)
    before = [tensor.clone() for tensor in (prefix_key, prefix_value, key, value, mask, bias)]
    long_key, long_value, long_mask, long_bias = join_prefix(prefix_key, prefix_value, key, value, mask, bias)
    for row in range(BATCH):
        own = row if prefix_batch > 1 else 0
        assert torch.equal(long_key[row], torch.cat([prefix_key[own], key[row]], dim=1))
        assert torch.equal(long_value[row], torch.cat([prefix_value[own], value[row]], dim=1))
    assert long_mask.shape == (BATCH, 1, 6, PREFIX + KEYS)
    assert long_mask[..., :PREFIX].all()
    assert torch.equal(long_mask[..., PREFIX:], mask)
    assert (long_bias[..., :PREFIX] == 0).all()
    assert torch.equal(long_bias[..., PREFIX:], bias)
    after = (prefix_key, prefix_value, key, value, mask, bias)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "something was changed in place"


def test_float_masks_get_zeros_and_none_stays_none():
    mask = torch.zeros(6, KEYS).masked_fill(~causal_mask(6, KEYS), -torch.inf)
    *_, long_mask, bias = join_prefix(*pairs(), mask)
    assert bias is None
    assert (long_mask[:, :PREFIX] == 0).all()
    assert torch.equal(long_mask[:, PREFIX:], mask)
    assert join_prefix(*pairs())[2:] == (None, None)


def test_a_mask_with_one_column_for_all_keys_is_spread_first():
    row_visible = torch.tensor([[True], [False]])
    *_, mask, _ = join_prefix(*pairs(), row_visible)
    assert mask.tolist() == [[True] * (PREFIX + KEYS), [True] * PREFIX + [False] * KEYS]


def test_length_zero_changes_nothing_and_zeros_take_their_share():
    query = torch.randn(BATCH, HEADS, 6, HEAD_DIM, dtype=torch.float64)
    prefix_key, prefix_value, key, value = pairs()
    plain, _ = scaled_dot_product_attention(query, key, value)
    empty = join_prefix(prefix_key[:, :, :0], prefix_value[:, :, :0], key, value)
    assert torch.equal(scaled_dot_product_attention(query, *empty[:2])[0], plain)
    zeros = join_prefix(torch.zeros_like(prefix_key), torch.zeros_like(prefix_value), key, value)
    output, weights = scaled_dot_product_attention(query, *zeros[:2])
    share = weights[..., :PREFIX].sum(-1, keepdim=True)
    assert (share > 0.01).all()
    assert torch.allclose(output, (1 - share) * plain)


def test_the_output_is_a_gate_between_content_and_prefix():
    """output = (1 - g) content + g prefix, with g the weight on the prefix (He et al. 2022, equation 7)."""
    query = torch.randn(BATCH, HEADS, 6, HEAD_DIM, dtype=torch.float64)
    prefix_key, prefix_value, key, value = pairs(BATCH)
    long_key, long_value, *_ = join_prefix(prefix_key, prefix_value, key, value)
    output, weights = scaled_dot_product_attention(query, long_key, long_value)
    g = weights[..., :PREFIX].sum(-1, keepdim=True)
    content, _ = scaled_dot_product_attention(query, key, value)
    prefix, _ = scaled_dot_product_attention(query, prefix_key, prefix_value)
    assert torch.allclose(output, (1 - g) * content + g * prefix)


def test_the_prefix_takes_the_dtype_of_the_keys_and_its_gradient_stays_float32():
    prefix_key, prefix_value, *_ = (tensor.float().requires_grad_() for tensor in pairs())
    key, value = (torch.randn(BATCH, HEADS, KEYS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    long_key, long_value, *_ = join_prefix(prefix_key, prefix_value, key, value)
    assert long_key.dtype == long_value.dtype == torch.bfloat16
    (long_key.sum() + long_value.sum()).backward()
    assert prefix_key.grad.dtype == torch.float32
    assert (prefix_key.grad == BATCH).all()


@pytest.mark.parametrize("keys", [5, 8, 11])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_rows_of_a_longer_mask_begin_at_multiples_of_eight(keys, dtype):
    """A GPU's fused attention otherwise copies the mask into such rows, in every layer."""
    mask = with_prefix_columns(torch.ones(2, 1, 6, keys).to(dtype), 3, keys)
    assert mask.shape == (2, 1, 6, 3 + keys)
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1])
    assert mask.stride(-1) == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({0: torch.zeros(3, HEADS, PREFIX, HEAD_DIM)}, ValueError, r"prefix key \[3, 5, 3, 4\] does not fit"),
        ({0: torch.zeros(1, 4, PREFIX, HEAD_DIM)}, ValueError, r"prefix key \[1, 4, 3, 4\] does not fit"),
        ({0: torch.zeros(1, HEADS, PREFIX, 9)}, ValueError, r"prefix key \[1, 5, 3, 9\] does not fit"),
        ({1: torch.zeros(HEADS, PREFIX, HEAD_DIM)}, ValueError, r"prefix value \[5, 3, 4\] does not fit"),
        ({1: torch.zeros(1)}, ValueError, r"prefix value \[1\] does not fit"),
        ({1: torch.zeros(1, HEADS, 2, HEAD_DIM)}, ValueError, "every key needs one value"),
        ({3: torch.zeros(BATCH, HEADS, 6, HEAD_DIM)}, ValueError, "every key needs one value"),
        ({4: torch.ones(2, 1, 1, KEYS, dtype=torch.long)}, TypeError, "got torch.int64: use `mask.bool"),
        ({4: torch.ones(2, 1, 1, PREFIX + KEYS).bool()}, ValueError, r"mask \[2, 1, 1, 10\] needs one column"),
        ({5: torch.ones(1, HEADS, 6, 8)}, ValueError, r"bias \[1, 5, 6, 8\] needs one column for each of the 7 keys"),
        ({5: torch.ones(1, HEADS, 6, KEYS).bool()}, TypeError, "bias .* must be float, got torch.bool"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(change, error, message):
    arguments = [*pairs(), None, None]
    for position, value in change.items():
        arguments[position] = value
    with pytest.raises(error, match=message):
        join_prefix(*arguments)


# --- the encoder -----------------------------------------------------------------------------------------------------


@given(
    prefix=st.integers(0, 6),
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    mid_dim=st.sampled_from([None, 1, 6]),
    batch=st.integers(0, 3),
)
def test_shape_and_counts(prefix, layers, heads, head_dim, mid_dim, batch):
    encoder = PrefixEncoder(prefix, layers, heads, head_dim, mid_dim=mid_dim)
    assert encoder(batch).shape == (layers, 2, batch, heads, prefix, head_dim)
    inner, row = heads * head_dim, layers * 2 * heads * head_dim
    want = prefix * row
    if mid_dim is not None:
        want = prefix * inner + (inner + 1) * mid_dim + (mid_dim + 1) * row
    assert sum(parameter.numel() for parameter in encoder.parameters()) == want


def test_a_row_is_layer_then_key_or_value_then_head_then_feature():
    prefix, layers, heads, head_dim = 3, 4, 5, 6
    encoder = PrefixEncoder(prefix, layers, heads, head_dim)
    row = layers * 2 * heads * head_dim
    encoder.embedding.data = torch.arange(float(prefix * row)).view(prefix, row)
    for layer, (key, value) in enumerate(encoder(batch_size=2)):
        for kind, tensor in enumerate((key, value)):
            assert tensor.shape == (2, heads, prefix, head_dim)
            for slot, head, feature in ((0, 0, 0), (2, 3, 5), (1, 4, 2)):
                want = slot * row + ((layer * 2 + kind) * heads + head) * head_dim + feature
                assert tensor[1, head, slot, feature] == want


def test_rows_of_a_batch_are_split_as_published_code_does_it():
    batch, prefix, layers, heads, head_dim = 2, 3, 4, 5, 6
    rows = torch.randn(batch, prefix, layers * 2 * heads * head_dim)
    pairs = rows.view(batch, prefix, layers * 2, heads, head_dim).permute(2, 0, 3, 1, 4).split(2)
    assert torch.equal(split_prefix(rows, layers, heads, head_dim), torch.stack(pairs))


@pytest.mark.parametrize(("init_std", "deviation"), [(None, 0.02), (0.02, 0.02), (1.0, 1.0), (0.0, 0.0)])
def test_the_first_rows_have_the_deviation_asked_for(init_std, deviation):
    torch.manual_seed(3)
    encoder = PrefixEncoder(30, 4, 5, 6, init_std=init_std)
    torch.manual_seed(3)
    assert torch.equal(encoder.embedding, deviation * torch.randn(30, 240))
    assert encoder.embedding.requires_grad


def test_the_mlp_is_linear_tanh_linear():
    encoder = PrefixEncoder(3, 2, 1, 5, mid_dim=7)
    first, _, last = encoder.mlp
    hidden = (encoder.embedding @ first.weight.T + first.bias).tanh()
    rows = hidden @ last.weight.T + last.bias
    assert torch.allclose(encoder()[1, 0, 0, 0], rows[:, 10:15])


@pytest.mark.parametrize("mid_dim", [None, 6])
def test_every_parameter_gets_a_gradient(mid_dim):
    encoder = PrefixEncoder(3, 4, 5, 6, mid_dim=mid_dim)
    output = encoder(2)
    (output * torch.randn_like(output)).sum().backward()
    assert all((parameter.grad != 0).all() for parameter in encoder.parameters())


def test_the_mlp_runs_once_and_on_the_prefix_alone():
    encoder = PrefixEncoder(3, 4, 5, 6, mid_dim=7)
    rows = []
    encoder.mlp[0].register_forward_hook(lambda module, inputs, output: rows.append(tuple(output.shape)))
    output = encoder(batch_size=64)
    assert rows == [(3, 7)]
    assert output.untyped_storage().nbytes() == 4 * 3 * 4 * 2 * 5 * 6, "the batch was copied"


@pytest.mark.parametrize("mid_dim", [None, 7])
def test_fold_changes_nothing_and_is_independent(mid_dim):
    encoder = PrefixEncoder(3, 4, 5, 6, mid_dim=mid_dim, dropout=0.5).eval()
    before = copy.deepcopy(encoder.state_dict())
    state = torch.get_rng_state()
    folded = encoder.fold()
    assert torch.equal(torch.get_rng_state(), state), "folding drew random numbers"
    want = encoder().clone()
    assert torch.equal(folded(), want)
    assert [tuple(parameter.shape) for parameter in folded.parameters()] == [(3, 240)]
    nn.init.zeros_(folded.embedding)
    assert torch.equal(encoder(), want)
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert folded.embedding.requires_grad


@pytest.mark.usefixtures("unchecked")
def test_from_key_values_copies_them_and_refuses_other_shapes():
    key_values = torch.randn(4, 2, 1, 5, 3, 6)
    encoder = PrefixEncoder.from_key_values(key_values)
    assert torch.equal(encoder(), key_values)
    assert encoder.embedding.requires_grad
    assert (encoder.prefix_length, encoder.num_layers, encoder.num_heads, encoder.head_dim) == (3, 4, 5, 6)
    with pytest.raises(ValueError, match=r"got shape \[4, 2, 2, 5, 3, 6\]"):
        PrefixEncoder.from_key_values(torch.randn(4, 2, 2, 5, 3, 6))


def test_dropout_acts_only_while_training():
    encoder = PrefixEncoder(3, 4, 5, 6, dropout=0.5)
    assert (encoder() == 0).any()
    encoder.eval()
    assert torch.equal(encoder(), encoder())
    assert (encoder() != 0).all()


@pytest.mark.parametrize("sizes", [(-1, 4, 5, 6), (3, 0, 5, 6), (3, 4, 0, 6), (3, 4, 5, 0)])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=f"positive sizes, got prefix_length={sizes[0]}"):
        PrefixEncoder(*sizes)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        PrefixEncoder(3, 4, 5, 6)(-1)
    with pytest.raises(ValueError, match="'mid_dim': 0"):
        PrefixEncoder(3, 4, 5, 6, mid_dim=0)
