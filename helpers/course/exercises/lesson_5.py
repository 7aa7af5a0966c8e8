"""Checks of lesson 5's exercises."""

from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, random_tensor


def _unpack(flat: Tensor, num_layers: int, num_heads: int, row: str = "l kv h d", to: str = "l kv b h p d") -> Tensor:
    return rearrange(flat, f"b p ({row}) -> {to}", l=num_layers, kv=2, h=num_heads)


def _unpack_with_view_alone(flat: Tensor, num_layers: int, num_heads: int) -> Tensor:
    return flat.reshape(num_layers, 2, flat.shape[0], num_heads, flat.shape[1], -1)


def _unpack_with_shared_slices(flat: Tensor, num_layers: int, num_heads: int) -> Tensor:
    slices = rearrange(_unpack(flat, num_layers, num_heads), "l kv b h p d -> (l kv) b h p d")
    return torch.stack([part[:2] for part in torch.cat([slices, slices]).split(4)])


check_unpack_prefix = Exercise(
    right=_unpack,
    toys=lambda draw: [
        (random_tensor(draw, batch, prefix, layers * 2 * heads * head_dim), layers, heads)
        for batch, prefix, layers, heads, head_dim in [(6, 3, 4, 2, 5), (1, 5, 6, 4, 3)]
    ],
    mistakes=[
        Mistake(
            partial(_unpack, row="kv l h d"),
            "a row was read as all keys, then all values: the layer comes first, (l kv h d).",
        ),
        Mistake(
            partial(_unpack, row="l h kv d"),
            "a layer's numbers were cut into heads before they were cut into key and value: (l kv h d).",
        ),
        Mistake(
            partial(_unpack, row="l kv d h"),
            "a head took every num_heads-th feature; a head owns neighbouring ones: (h d), not (d h).",
        ),
        Mistake(
            _unpack_with_view_alone,
            "this is view alone: no axis was moved, so that slots, sentences and layers are mixed.",
        ),
        Mistake(
            _unpack_with_shared_slices,
            "layers share slices: layer 1 got the key and value of layer 2, and half of the numbers reach no layer.",
        ),
        Mistake(
            partial(_unpack, to="l kv b p h d"),
            "the slots stand before the heads: the order is [layers, 2, batch, heads, prefix, head_dim].",
        ),
        Mistake(
            partial(_unpack, to="b l kv h p d"),
            "the batch stands in front: the layers come first, so that a loop gives each layer its pair.",
        ),
        Mistake(
            partial(_unpack, to="kv l b h p d"),
            "key and value stand before the layers: the layers come first, so that a loop gives each layer its pair.",
        ),
        Mistake(
            partial(_unpack, row="h l kv d"),
            "a row was cut into heads first: it is cut into layers first, and into heads last, (l kv h d).",
        ),
        Mistake(
            lambda *toy: _unpack(*toy).flip(1),
            "key and value are exchanged: in the row and in the result, the key comes first.",
        ),
    ],
)


def _prefix_size(prefix_length, num_layers, num_heads, head_dim, mid_dim, *, key_and_value=2, biases=True) -> int:
    inner_dim = num_heads * head_dim
    row_dim = num_layers * key_and_value * inner_dim
    if mid_dim is None:
        return prefix_length * row_dim
    mlp = inner_dim * mid_dim + mid_dim * row_dim + biases * (mid_dim + row_dim)
    return prefix_length * inner_dim + mlp


def _prefix_size_with_long_embedding(prefix_length, num_layers, num_heads, head_dim, mid_dim) -> int:
    row_dim = num_layers * 2 * num_heads * head_dim
    if mid_dim is None:
        return prefix_length * row_dim
    return prefix_length * row_dim + 2 * row_dim * mid_dim + mid_dim + row_dim


def _prefix_size_with_narrow_embedding(prefix_length, num_layers, num_heads, head_dim, mid_dim) -> int:
    row_dim = num_layers * 2 * num_heads * head_dim
    if mid_dim is None:
        return prefix_length * row_dim
    return prefix_length * mid_dim + mid_dim * mid_dim + mid_dim + mid_dim * row_dim + row_dim


check_prefix_size = Exercise(
    right=_prefix_size,
    toys=lambda draw: [(3, 4, 2, 5, None), (3, 4, 2, 5, 7), (20, 6, 8, 64, 512)],
    compared="Your number",
    mistakes=[
        Mistake(
            partial(_prefix_size, key_and_value=1),
            "the 2 for key and value is missing.",
        ),
        Mistake(
            partial(_prefix_size, biases=False),
            "the biases of the two linear layers are missing.",
        ),
        Mistake(
            lambda *sizes: _prefix_size(*sizes[:-1], None),
            "this is what is kept after folding: with mid_dim, the embedding and the MLP are trained.",
        ),
        Mistake(
            lambda *sizes: _prefix_size(*sizes) - (sizes[-1] is not None) * sizes[0] * sizes[2] * sizes[3],
            "the MLP is right, but the embedding that goes into it is trained too.",
        ),
        Mistake(
            lambda *sizes: _prefix_size(*sizes) + (sizes[-1] is not None) * _prefix_size(*sizes[:-1], None),
            "with mid_dim, the long rows are not parameters: the MLP makes them.",
        ),
        Mistake(
            _prefix_size_with_long_embedding,
            "with mid_dim, a row of the embedding has num_heads * head_dim numbers, and not those of all layers.",
        ),
        Mistake(
            lambda *sizes: _prefix_size(*sizes[:-1], None) + (sizes[-1] is not None) * _prefix_size(0, *sizes[1:]),
            "the MLP is right, but with mid_dim a row of the embedding has num_heads * head_dim numbers.",
        ),
        Mistake(
            _prefix_size_with_narrow_embedding,
            "the embedding and the MLP's input have num_heads * head_dim features; mid_dim lies between the layers.",
        ),
        Mistake(
            lambda *sizes: (
                _prefix_size(*sizes)
                if sizes[-1] is None
                else sizes[0] * (_prefix_size(0, *sizes[1:]) + sizes[2] * sizes[3])
            ),
            "the MLP was counted once for each slot: it is one MLP, whatever the prefix length.",
        ),
    ],
)


def _pack(key_values: Tensor, row: str = "l kv h d") -> Tensor:
    return rearrange(key_values, f"l kv 1 h p d -> p ({row})")


check_pack_prefix = Exercise(
    right=_pack,
    toys=lambda draw: [
        (random_tensor(draw, layers, 2, 1, heads, prefix, head_dim),)
        for layers, heads, prefix, head_dim in [(4, 3, 6, 5), (3, 4, 5, 7)]
    ],
    mistakes=[
        Mistake(
            lambda key_values: key_values.reshape(key_values.shape[4], -1),
            "this is reshape alone: a row must hold one slot, so the prefix axis has to come to the front first.",
        ),
        Mistake(partial(_pack, row="kv l h d"), "the rows hold all keys, then all values: the layer comes first."),
        Mistake(partial(_pack, row="l kv d h"), "the features of all heads are interleaved: (h d), not (d h)."),
        Mistake(
            partial(_pack, row="l h kv d"),
            "key and value alternate head by head: a layer's whole key comes first, then its value.",
        ),
        Mistake(
            partial(_pack, row="h l kv d"),
            "each row begins with all of head 0: the layer comes first, then key or value, and then the head.",
        ),
        Mistake(
            lambda key_values: key_values.transpose(0, 4).reshape(key_values.shape[4], -1),
            "the prefix axis changed places with the layers': move it to the front and leave the others in order.",
        ),
        Mistake(
            lambda key_values: _pack(key_values).T,
            "rows and columns are exchanged: a row for each slot.",
        ),
        Mistake(
            lambda key_values: _pack(key_values)[None],
            "the numbers are right, but there is a batch axis: the parameter is [prefix, row].",
        ),
    ],
)
