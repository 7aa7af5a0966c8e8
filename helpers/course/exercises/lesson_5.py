"""Checks of lesson 5's exercises, and the encoder whose bug is found in its gradients."""

from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from helpers.course.exercises.checking import (
    NOT_DONE,
    Exercise,
    Mistake,
    Prediction,
    UnreadableError,
    Verdict,
    random_tensor,
)

# The shapes in get_prompt


class Shapes(Prediction):
    """A prediction of several shapes, each a list, a tuple or a torch.Size."""

    def judge(self, expected) -> Verdict:
        if isinstance(expected, list | tuple):
            expected = [list(shape) if isinstance(shape, list | tuple) else shape for shape in expected]
            if any(isinstance(shape, list) and ... in shape for shape in expected):
                return Verdict(NOT_DONE, "there are three dots left in one of the shapes.")
        return super().judge(expected)


_SLOTS, _FLAT, _VIEWED, _MOVED, _PAIR = [5, 3], [5, 3, 18432], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [2, 5, 12, 3, 64]

check_prompt_shapes = Shapes(
    right=[_SLOTS, _FLAT, _VIEWED, _MOVED, _PAIR],
    because="24 is 12 layers times key and value, permute brings it to the front, and split(2) cuts it into 12 pairs.",
    mistakes=[
        (
            [_SLOTS, _FLAT, _VIEWED, [3, 12, 5, 24, 64], _PAIR],
            "the fourth: permute([2, 0, 3, 1, 4]) names the old axis for each new place. In front comes old axis 2.",
        ),
        (
            [_SLOTS, _FLAT, _VIEWED, [24, 3, 5, 12, 64], [2, 3, 5, 12, 64]],
            "the fourth: behind old axis 2, permute puts old axis 0, the batch, and old axis 1 comes fourth.",
        ),
        *(
            ([_SLOTS, [5, 3, width], _VIEWED, _MOVED, _PAIR], "the second: " + sentence)
            for width, sentence in (
                (9216, "a slot has a key and a value for each layer, 12 * 2 * 768 numbers."),
                (1536, "that is one layer's; a slot has a key and a value for each of 12 layers."),
                (768, "that is what goes into the MLP; what comes out is 12 * 2 * 768 wide."),
            )
        ),
        (
            [_SLOTS, [5, 3, 9216], [5, 3, 12, 12, 64], [12, 5, 12, 3, 64], _PAIR],
            "the 2 for key and value is missing: a slot has 12 * 2 * 768 numbers, and the view makes 24 of 12 and 64.",
        ),
        (
            [_SLOTS, _FLAT, [5, 3, 12, 12, 64], [12, 5, 12, 3, 64], _PAIR],
            "the view takes its sizes from line 19: num_layers * 2 = 24, for a key and a value in each layer.",
        ),
        *(
            ([_SLOTS, _FLAT, _VIEWED, _MOVED, part], "the last: " + sentence)
            for part, sentence in (
                ([12, 5, 12, 3, 64], "split(2) makes pieces of length 2, not two pieces: there are 12 of them."),
                ([5, 12, 3, 64], "a piece keeps its first axis, of length 2: entry 0 is the key, entry 1 the value."),
            )
        ),
    ],
    hints=[
        "The first: expand repeats the 3 slots for each of the 5 sentences, [batch, prefix].",
        "The second: line 8 says how wide a slot's numbers are when they come out of the MLP.",
        "The third: view keeps batch and prefix, and cuts the rest into the three sizes of line 19.",
        "The fourth: the third shape with its axes in the order 2, 0, 3, 1, 4.",
        "The last: split(2) cuts the first axis into pieces of length 2, and leaves the others as they are.",
    ],
)


# The layout step


def _unpack(rows: Tensor, num_layers: int, num_heads: int, row: str = "l kv h d", to: str = "l kv b h p d") -> Tensor:
    return rearrange(rows, f"b p ({row}) -> {to}", l=num_layers, kv=2, h=num_heads)


def _unpack_with_view_alone(rows: Tensor, num_layers: int, num_heads: int) -> Tensor:
    return rows.reshape(num_layers, 2, rows.shape[0], num_heads, rows.shape[1], -1)


def _unpack_with_shared_slices(rows: Tensor, num_layers: int, num_heads: int) -> Tensor:
    slices = _unpack(rows, num_layers, num_heads, to="(l kv) b h p d")
    return torch.stack([part[:2] for part in torch.cat([slices, slices]).split(4)])


_UNPACK_TOYS = [(6, 3, 4, 2, 5), (1, 5, 6, 4, 3)]  # batch, prefix, layers, heads, head_dim


def _unpack_toys(draw: torch.Generator) -> list[tuple]:
    return [
        (random_tensor(draw, batch, prefix, layers * 2 * heads * head_dim), layers, heads)
        for batch, prefix, layers, heads, head_dim in _UNPACK_TOYS
    ]


check_unpack_prefix = Exercise(
    right=_unpack,
    toys=_unpack_toys,
    mistakes=[
        Mistake(
            lambda *toy: _unpack(*toy).unbind(),
            "the right pairs, in a tuple: return one tensor, torch.stack(pairs), or say it all in one rearrange.",
        ),
        Mistake(
            partial(_unpack, to="(l kv) b h p d"),
            "the right numbers, but layers and key or value are still one axis: l and kv without brackets.",
        ),
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


# The encoder


class PrefixEncoder(nn.Module):
    """The right answer, with a place for each thing that can go wrong in it."""

    def __init__(self, prefix_length: int, num_layers: int, num_heads: int, head_dim: int, mid_dim: int | None = None):
        super().__init__()
        self.num_layers, self.num_heads = num_layers, num_heads
        model_dim = num_heads * head_dim
        width, row_dim = self.widths(model_dim, num_layers * 2 * model_dim, mid_dim)
        self.embedding = nn.Embedding(prefix_length, width)
        self.mlp = nn.Identity() if mid_dim is None else nn.Sequential(*self.layers(width, mid_dim, row_dim))

    def widths(self, model_dim: int, row_dim: int, mid_dim: int | None) -> tuple[int, int]:
        return (row_dim if mid_dim is None else model_dim), row_dim

    def layers(self, width: int, mid_dim: int, row_dim: int) -> list[nn.Module]:
        return [nn.Linear(width, mid_dim), nn.Tanh(), nn.Linear(mid_dim, row_dim)]

    def forward(self) -> Tensor:
        return self.unpack(self.mlp(self.embedding.weight)[None])

    def unpack(self, rows: Tensor) -> Tensor:
        return _unpack(rows, self.num_layers, self.num_heads)


def _variant(**methods: Callable) -> type[PrefixEncoder]:
    return type("PrefixEncoder", (PrefixEncoder,), methods)


class _ParameterEncoder(PrefixEncoder):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.embedding = nn.Parameter(self.embedding.weight.detach())


def _said(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"


def _given_numbers(encoder: nn.Module, prefix_length, num_layers, num_heads, head_dim, mid_dim) -> Tensor:
    """What the encoder gives with parameters that all answers share; UnreadableError if these do not fit."""
    if not isinstance(encoder, nn.Module):
        raise UnreadableError(f"PrefixEncoder(...) should give an nn.Module, and gives one {type(encoder).__name__}.")
    right = PrefixEncoder(prefix_length, num_layers, num_heads, head_dim, mid_dim)
    wanted, own = (
        {name: list(parameter.shape) for name, parameter in each.named_parameters()} for each in (right, encoder)
    )
    if own != wanted:
        raise UnreadableError(
            f"the parameters of PrefixEncoder({prefix_length}, {num_layers}, {num_heads}, {head_dim}, "
            f"mid_dim={mid_dim}) should be {_said(wanted)}, and are {_said(own)}."
        )
    draw = torch.Generator().manual_seed(1)
    encoder.double().load_state_dict(
        {name: random_tensor(draw, *shape) / shape[-1] ** 0.5 for name, shape in wanted.items()}, strict=False
    )
    given = encoder.eval()()
    if isinstance(given, Tensor) and (missed := _without_gradient(encoder, given)):
        raise UnreadableError(
            f"no gradient reaches {', '.join(missed)}: detach(), .data or no_grad on the way would leave those numbers "
            "untrained."
        )
    return given


def _without_gradient(module: nn.Module, output: Tensor) -> list[str]:
    """The names of the parameters that a loss on the output would not train."""
    if not output.requires_grad:
        return [name for name, _ in module.named_parameters()]
    gradients = torch.autograd.grad(output.sum(), list(module.parameters()), allow_unused=True)
    return [name for (name, _), gradient in zip(module.named_parameters(), gradients, strict=True) if gradient is None]


check_prefix_encoder = Exercise(
    right=PrefixEncoder,
    toys=lambda draw: [(3, 4, 2, 5, None), (3, 4, 2, 5, 7), (6, 2, 3, 4, 9)],
    read=_given_numbers,
    compared="What the encoder returns",
    examples="encoders of different sizes",
    mistakes=[
        Mistake(
            _variant(unpack=lambda self, rows: rows[0]),
            "these are the flat rows: unpack_prefix makes keys and values of them.",
        ),
        Mistake(
            _variant(unpack=lambda self, rows: rows),
            "these are the flat rows: unpack_prefix makes keys and values of them.",
        ),
        Mistake(
            _variant(unpack=lambda self, rows: _unpack(rows, self.num_layers, self.num_heads)[:, :, 0]),
            "the batch axis is missing: keep it, with a length of 1.",
        ),
        Mistake(
            _variant(unpack=lambda self, rows: _unpack(rows[0], self.num_layers, self.num_heads)),
            "the rows lack a batch axis, which unpack_prefix expects in front: rows[None].",
        ),
        Mistake(
            _variant(unpack=lambda self, rows: _unpack(rows[0][:, None], self.num_layers, self.num_heads)),
            "the slots are on the batch axis: the rows need a batch axis in front, rows[None], and not in the middle.",
        ),
        Mistake(
            _variant(unpack=lambda self, rows: _unpack_with_view_alone(rows, self.num_layers, self.num_heads)),
            "the rows were cut with view alone: unpack_prefix moves the slots behind the layers and heads.",
        ),
        Mistake(
            _variant(unpack=lambda self, rows: _unpack_with_view_alone(rows, self.num_layers, self.num_heads)[:, :, 0]),
            "the rows were cut with view alone, and without a batch axis: unpack_prefix(rows[None], ...) does both.",
        ),
        Mistake(
            _variant(layers=lambda self, *widths: PrefixEncoder.layers(self, *widths)[::2]),
            "the tanh between the two linear layers is missing, and with it the third place in nn.Sequential.",
        ),
        Mistake(
            _variant(layers=lambda self, *widths: [*PrefixEncoder.layers(self, *widths), nn.Tanh()]),
            "a tanh follows the second linear layer as well: it would hold all keys and values between -1 and 1.",
        ),
        *(
            Mistake(
                _variant(
                    layers=lambda self, width, mid, row, middle=middle: [
                        nn.Linear(width, mid),
                        middle(),
                        nn.Linear(mid, row),
                    ]
                ),
                f"between the linear layers is a {middle.__name__}: the thirty lines have a Tanh there.",
            )
            for middle in (nn.ReLU, nn.GELU, nn.Sigmoid)
        ),
        Mistake(
            _variant(widths=lambda self, model_dim, row_dim, mid_dim: (model_dim, row_dim)),
            "without an MLP nothing makes the rows longer: the embedding has to be num_layers * 2 * model_dim wide.",
        ),
        Mistake(
            _variant(widths=lambda self, model_dim, row_dim, mid_dim: (row_dim, row_dim)),
            "with an MLP the embedding is short, num_heads * head_dim: it is the MLP that makes the long rows.",
        ),
        Mistake(
            _variant(
                widths=lambda self, model_dim, row_dim, mid_dim: (
                    (row_dim // 2 if mid_dim is None else model_dim),
                    row_dim // 2,
                )
            ),
            "the 2 for key and value is missing in the width of a row.",
        ),
        Mistake(
            _ParameterEncoder,
            "a parameter does it, too; but make embedding an nn.Embedding, so that the thirty lines' numbers fit into "
            "yours.",
        ),
    ],
)


# The published count

_EMBEDDING, _FIRST, _SECOND, _CLASSIFIER = 5 * 768, 768 * 512 + 512, 512 * 18432 + 18432, 768 * 9 + 9

check_published_count = Prediction(
    right=[_EMBEDDING, _FIRST, _SECOND, _CLASSIFIER],
    because="3,840 + 393,728 + 9,455,616 + 6,921 = 9,860,105, the number in the published code.",
    mistakes=[
        (
            [_EMBEDDING, 768 * 512, 512 * 18432, 768 * 9],
            "the linear layers have biases, too: one number for each feature that comes out.",
        ),
        (
            [_EMBEDDING, 12 * _FIRST, _SECOND, _CLASSIFIER],
            "the MLP was counted once for each layer of the model: it is one MLP, which makes the rows of all layers.",
        ),
        *(
            (
                [_EMBEDDING, 5 * _FIRST, 5 * second, _CLASSIFIER],
                "the MLP was counted once for each slot: it is one MLP, whatever the number of slots.",
            )
            for second in (_SECOND, 12 * _SECOND)
        ),
        (
            [5 * 18432, _FIRST, _SECOND, _CLASSIFIER],
            "the first is what the MLP makes, and what is kept in the end: the embedding has 768 numbers a slot.",
        ),
        (
            [3 * 768, _FIRST, _SECOND, _CLASSIFIER],
            "the first has the lesson's 3 slots: the published code was counted with 5.",
        ),
        *(
            ([_EMBEDDING, _FIRST, second, _CLASSIFIER], "the second linear layer: " + sentence)
            for second, sentence in (
                (512 * 9216 + 9216, "the 2 for key and value is missing in its width."),
                (512 * 1536 + 1536, "that is one layer's key and value; it makes those of all 12."),
                (512 * 768 + 768, "it makes a key and a value for 12 layers, 12 * 2 * 768 features."),
            )
        ),
        (9_860_105, "that is their sum, which is known: find its four parts."),
    ],
    hints=[
        "The embedding has 5 rows of 768 numbers.",
        "The first linear layer goes from 768 features to 512, and adds 512 biases.",
        "The second linear layer goes from 512 features to 12 * 2 * 768, and adds as many biases.",
        "The classifier goes from 768 features to 9 classes, and adds 9 biases.",
    ],
)


# Slots that start alike

check_alike = Prediction(
    right=0,
    because="slots that hold the same numbers get the same weights and the same gradients, so each step moves all of "
    "them alike.",
    mistakes=[
        *(
            (number, "nothing tells the slots apart: what would give one of them another gradient than the others?")
            for number in (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5)
        ),
        (9, "30 steps of 0.3 each may move a number by 9; but do they move one slot further than another?"),
    ],
)


# An encoder with a bug


def unknown_layout(rows: Tensor, num_layers: int, num_heads: int) -> Tensor:
    """Each row holds the keys of all layers, then the values of all layers."""
    slices = rearrange(rows, "b p (s h d) -> s b h p d", s=2 * num_layers, h=num_heads)
    pairs = [torch.stack([slices[layer], slices[layer + 1]]) for layer in range(num_layers)]
    return torch.stack(pairs)


class UnknownEncoder(nn.Module):
    """A prefix encoder without an MLP, whose bug shows in no shape and in no loss."""

    def __init__(self, prefix_length: int, num_layers: int, num_heads: int, head_dim: int):
        super().__init__()
        self.num_layers, self.num_heads = num_layers, num_heads
        self.embedding = nn.Embedding(prefix_length, 2 * num_layers * num_heads * head_dim)

    def forward(self) -> Tensor:
        return unknown_layout(self.embedding.weight[None], self.num_layers, self.num_heads)


_keys_then_values = partial(_unpack, row="kv l h d")

check_mended_layout = Exercise(
    right=_keys_then_values,
    toys=_unpack_toys,
    mistakes=[
        Mistake(
            unknown_layout,
            "the value still is the slice behind the key, which is the next layer's key. Where do the values begin?",
        ),
        Mistake(
            _unpack,
            "now all slices are read, but as key, value, key, value: these rows hold all keys first, then all values.",
        ),
        *(
            Mistake(
                lambda *toy, mistake=mistake: mistake(*toy).unbind(),
                "a tuple or list of pairs: torch.stack makes one tensor of them. Then look at the numbers.",
            )
            for mistake in (_unpack, unknown_layout)
        ),
        Mistake(
            lambda *toy: _keys_then_values(*toy).unbind(),
            "the right pairs, in a tuple or list: torch.stack makes one tensor of them.",
        ),
        Mistake(
            lambda *toy: _keys_then_values(*toy).flip(1),
            "key and value are exchanged: the first half of the slices are the keys.",
        ),
        Mistake(
            lambda *toy: torch.stack([_keys_then_values(*toy)[:, 0], _keys_then_values(*toy)[:, 1].flip(0)], dim=1),
            "the values are in the opposite order: layer 0's is the first of them, slice num_layers.",
        ),
        Mistake(
            partial(_unpack, row="kv l h d", to="kv l b h p d"),
            "key and value stand before the layers: the layers come first, so that a loop gives each layer its pair.",
        ),
        Mistake(
            _unpack_with_view_alone,
            "this is view alone: no axis was moved, so that slots, sentences and layers are mixed.",
        ),
    ],
)
