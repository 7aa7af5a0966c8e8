"""Checks of lesson 2's exercises."""

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.course.exercises.checking import Exercise, Mistake, Prediction, random_tensor
from helpers.course.single_head import attend

# Several heads


def _several_heads(
    hidden: Tensor,
    heads: Tensor,
    join_outputs: Callable = lambda outputs: torch.cat(outputs, dim=-1),
    join_maps: Callable = lambda maps: torch.stack(maps, dim=1),
) -> tuple[Tensor, Tensor]:
    outputs, maps = zip(*(attend(hidden, *head) for head in heads), strict=True)
    return join_outputs(outputs), join_maps(maps)


check_several_heads = Exercise(
    right=_several_heads,
    # The heads come as one tensor, which is walked through like the lesson's list and described by its shape.
    toys=lambda draw: [
        (random_tensor(draw, batch, seq, model_dim), random_tensor(draw, num_heads, 3, model_dim, head_dim))
        for batch, seq, model_dim, num_heads, head_dim in [(2, 5, 7, 4, 3), (3, 4, 6, 2, 5)]
    ],
    mistakes=[
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads)[0],
            "the outputs are right; return the maps as well, stacked along a new axis 1.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads, lambda outputs: torch.stack(outputs, dim=1)),
            "the outputs have an axis of their own for the heads: put them side by side along the last axis, with "
            "torch.cat.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads, lambda outputs: torch.cat(outputs, dim=1)),
            "the outputs of the heads follow one another along the sequence: they belong side by side in the last "
            "axis, dim=-1.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads, torch.cat),
            "the outputs are joined along axis 0, as if each head had tables of its own: join the last axis, dim=-1.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads, lambda outputs: torch.stack(outputs, -1).flatten(-2)),
            "the heads' features are mixed, one of each head in turn: first all of head 0, then all of head 1.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads, sum),
            "the heads' outputs were added up: side by side, each head keeps features of its own.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads, lambda outputs: sum(outputs) / len(outputs)),
            "the heads' outputs were averaged: side by side, each head keeps features of its own.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads[:1]),
            "only the first head has worked: go through all of `heads`.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads[:1].expand_as(heads)),
            "every head used the matrices of head 0, so there is one map, several times.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads, join_maps=torch.stack),
            "the maps are stacked along axis 0: the batch comes first, so the heads are axis 1.",
        ),
        Mistake(
            lambda hidden, heads: _several_heads(hidden, heads, join_maps=lambda maps: sum(maps) / len(maps)),
            "the maps were averaged, which hides who looks where: stack them along a new axis 1.",
        ),
    ],
)


# One map for two wishes

check_other_gift = Prediction(
    right=0.36,
    because="1/7 + 6/7 * 1/4 = 0.357: the same guest, or else another guest with the same gift.",
    mistakes=[
        (36, "as a share, please: a number from 0 to 1."),
        (0.25, "one in four is right if the wishes are for different guests. One time in seven they are for the same."),
        (0.14, "that is how often both wishes are for the same guest. Otherwise it is right now and then, too."),
        (0.39, "the one in four counts for the other six times in seven only, when the guests are different."),
        (0.04, "the two add up: the same guest, or another one with the same gift."),
        (0.5, "it answers both times with the same gift, and has not learned the other map at all."),
        (0.21, "that is the share of different guests with the same gift; the wishes for the same guest are missing."),
    ],
)


# The split


def _split(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _view_alone(x: Tensor, num_heads: int, seq: int | None = None) -> Tensor:
    return x.reshape(len(x), num_heads, x.shape[1] if seq is None else seq, -1)


def _tokens_of_head_0(x: Tensor, num_heads: int) -> str:
    return (
        f"heads were split with view alone: all {x.shape[1]} rows of head 0 come from the first "
        f"{-(-x.shape[1] // num_heads)} of {x.shape[1]} tokens."
    )


check_split_heads = Exercise(
    right=_split,
    toys=lambda draw: [
        (random_tensor(draw, 2, 5, 3 * 4), 3),
        (random_tensor(draw, 1, 4, 2 * 3), 2),
        (random_tensor(draw, 5, 3, 28), 7),
    ],
    mistakes=[
        Mistake(_view_alone, _tokens_of_head_0),
        Mistake(
            lambda x, num_heads: _view_alone(x, num_heads).flatten(0, 1),
            lambda x, num_heads: _tokens_of_head_0(x, num_heads) + " Also, the heads are folded into the batch.",
        ),
        Mistake(
            lambda x, num_heads: x.unflatten(-1, (num_heads, -1)),
            "the transpose is missing: the axes are batch, seq, heads, head_dim, and the head has to come before seq.",
        ),
        Mistake(
            lambda x, num_heads: _split(x, num_heads).transpose(0, 1),
            "the heads stand in front of the batch: the axes are batch, heads, seq, head_dim.",
        ),
        Mistake(
            lambda x, num_heads: x.unflatten(-1, (-1, num_heads)).movedim(-1, 1),
            lambda x, num_heads: (
                f"head 0 took features 0, {num_heads}, {2 * num_heads}, ...; a head owns neighbouring ones: "
                "(h d), not (d h)."
            ),
        ),
        Mistake(
            lambda x, num_heads: _view_alone(x.transpose(1, 2), num_heads, x.shape[1]),
            "tokens and features were transposed before the cut: cut the last axis first, then transpose.",
        ),
        Mistake(
            lambda x, num_heads: _split(x, num_heads).flatten(0, 1),
            "the numbers are right, but heads are folded into the batch: return four axes.",
        ),
    ],
)


# Memory cells

check_cells = Prediction(
    right=[1600, 640],
    because="token 2 begins at cell 2 * 768 = 1536, and head 1 is 64 cells further on. With view alone, head 1 begins "
    "at cell 8 * 64 = 512, and row 2 of it is 2 * 64 cells further on: feature 640 of token 0.",
    mistakes=[
        ([640, 1600], "the right cells in the wrong order: first view and transpose, then view alone."),
        ([1600, 1600], "view alone reads another cell: it counts 8 rows of 64 for head 0 before head 1 begins."),
        ([640, 640], "that is view alone, twice. After view and transpose, token 2 still begins at cell 2 * 768."),
        (
            [896, 640],
            "the first is head 2 of token 1: the indices are batch, head, token, feature, so head 1, token 2.",
        ),
        ([1537, 640], "the first is feature 1 of token 2: head 1 owns features 64 to 127, so it begins 64 cells on."),
        ([1600, 576], "the second is row 1 of head 1: row 2 begins 2 * 64 cells behind the beginning of the head."),
        ([1600, 512], "the second is row 0 of head 1: row 2 begins 2 * 64 cells behind the beginning of the head."),
        ([1601, 641], "each is one too far: cells, like everything in Python, are counted from 0."),
    ],
    hints=[
        "The first: where does token 2 begin, and how many cells further on does head 1 begin?",
        "The second: view alone gives head 1 the cells from 8 * 64 on, in rows of 64.",
    ],
)


# The merge


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


check_merge_heads = Exercise(
    right=_merge,
    toys=lambda draw: [(random_tensor(draw, 2, 3, 5, 4),), (random_tensor(draw, 3, 2, 4, 5),)],
    mistakes=[
        Mistake(
            lambda x: x.reshape(x.shape[0], x.shape[2], -1),
            lambda x: (
                f"the transpose is missing: row 0 of your output holds {x.shape[1]} tokens of head 0, and should hold "
                f"token 0 of all {x.shape[1]} heads."
            ),
        ),
        Mistake(
            lambda x: x.transpose(1, 2).view(x.shape[0], x.shape[2], -1),
            "view cannot join heads and features here, which lie apart in memory after the transpose: use reshape, "
            "or contiguous() before view.",
        ),
        Mistake(
            lambda x: x.mT.reshape(x.shape[0], x.shape[2], -1),
            "the last two axes changed places: it is heads and seq, axes 1 and 2, that have to.",
        ),
        Mistake(
            lambda x: x.permute(0, 2, 3, 1).flatten(2),
            "the features of all heads are interleaved: heads stand side by side, (h d) and not (d h).",
        ),
        Mistake(
            lambda x: x.transpose(1, 2),
            "the last step is missing: heads and head_dim are still two axes.",
        ),
        Mistake(
            lambda x: x.mean(dim=1),
            "the heads were averaged: they have to stand side by side, each with its own features.",
        ),
        Mistake(
            lambda x: x.sum(dim=1),
            "the heads were added up: they have to stand side by side, each with its own features.",
        ),
    ],
)
