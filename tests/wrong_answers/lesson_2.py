import torch
from einops import rearrange, reduce

from helpers.course.single_head import attend


def results(hidden, heads):
    return [attend(hidden, *head) for head in heads]


def several(hidden, heads):
    outputs, maps = zip(*results(hidden, heads), strict=True)
    return torch.cat(outputs, dim=-1), torch.stack(maps, dim=1)


def returned_in_the_loop(hidden, heads):
    for head in heads:
        output, weights = attend(hidden, *head)
        return output, weights[:, None]


def one_after_the_other(hidden, heads):
    for head in heads:
        hidden, weights = attend(hidden, *head)
    return hidden, weights


WRONG_ANSWERS = {
    "check_several_heads": [
        (lambda hidden, heads: several(hidden, heads)[0], "outputs are right; return the maps as well"),
        (lambda hidden, heads: results(hidden, heads), "should be 2 results, and is 4"),
        (
            lambda hidden, heads: (torch.stack([o for o, _ in results(hidden, heads)], 1), several(hidden, heads)[1]),
            "outputs have an axis of their own",
        ),
        (
            lambda hidden, heads: (
                torch.hstack([o for o, _ in results(hidden, heads)]),
                several(hidden, heads)[1],
            ),
            "follow one another along the sequence",
        ),
        (
            lambda hidden, heads: (torch.vstack([o for o, _ in results(hidden, heads)]), several(hidden, heads)[1]),
            "tables of its own",
        ),
        (
            lambda hidden, heads: (
                torch.stack([o for o, _ in results(hidden, heads)], 3).reshape(len(hidden), hidden.shape[1], -1),
                several(hidden, heads)[1],
            ),
            "one of each head in turn",
        ),
        (lambda hidden, heads: (sum(o for o, _ in results(hidden, heads)), several(hidden, heads)[1]), "added up"),
        (
            lambda hidden, heads: (sum(o for o, _ in results(hidden, heads)) / len(heads), several(hidden, heads)[1]),
            "outputs were averaged",
        ),
        (returned_in_the_loop, "only the first head has worked"),
        (lambda hidden, heads: several(hidden, [heads[0] for _ in heads]), "every head used the matrices of head 0"),
        (
            lambda hidden, heads: (several(hidden, heads)[0], torch.stack([w for _, w in results(hidden, heads)])),
            "stacked along axis 0: the batch comes first",
        ),
        (lambda hidden, heads: (several(hidden, heads)[0], several(hidden, heads)[1].mean(1)), "maps were averaged"),
        (
            lambda hidden, heads: (several(hidden, heads)[0], [w for _, w in results(hidden, heads)]),
            r"Your output 1 is a list, expected a tensor of shape \[2, 4, 5, 5\]",
        ),
        (one_after_the_other, "raised RuntimeError"),
        (lambda hidden, heads: several(hidden, heads[:, [1, 0, 2]]), "Your output 0 has the right shape"),
    ],
    "check_other_gift": [
        (36, "a number from 0 to 1"),
        (0.25, "One time in seven they are for the same"),
        (0.14, "Otherwise it is right now and then"),
        (0.39, "six times in seven"),
        (0.04, "the two add up"),
        (0.5, "has not learned the other map"),
        (0.21, "wishes for the same guest are missing"),
        (1.0, "is not what comes out"),
    ],
    "check_split_heads": [
        (lambda x, h: x.view(len(x), h, x.shape[1], -1), "view alone: all 5 rows of head 0 come from the first 2 of 5"),
        (lambda x, h: torch.stack(x.chunk(h, 1), 1), "raised RuntimeError: stack expects each tensor to be equal size"),
        (lambda x, h: x.view(len(x) * h, x.shape[1], -1), "view alone: .*folded into the batch"),
        (lambda x, h: rearrange(x, "b s (h d) -> b s h d", h=h), "the transpose is missing"),
        (lambda x, h: rearrange(x, "b s (h d) -> h b s d", h=h), "the heads stand in front of the batch"),
        (lambda x, h: torch.stack(x.chunk(h, -1)), "the heads stand in front of the batch"),
        (lambda x, h: rearrange(x, "b s (d h) -> b h s d", h=h), "head 0 took features 0, 3, 6, ...;"),
        (
            lambda x, h: x.transpose(1, 2).reshape(len(x), h, x.shape[1], x.shape[2] // h),
            "cut the last axis first, then transpose",
        ),
        (lambda x, h: torch.cat(x.chunk(h, dim=-1)), r"shape \[6, 5, 4\], expected \[2, 3, 5, 4\]"),
        (
            lambda x, h: rearrange(x, "b s (h d) -> b h s d", h=h).flip(1),
            "right numbers, 80 of 120 in the wrong places",
        ),
        (lambda x, h: rearrange(x, "b s (h d) -> (b h) s d", h=h), "heads are folded into the batch"),
        (lambda x, h: rearrange(x, "b s (h d) -> b h d s", h=h), r"shape \[2, 3, 4, 5\], expected \[2, 3, 5, 4\]"),
        (lambda x, h: rearrange(x, "b s (h d) -> b h s d", d=h), r"shape \[2, 4, 5, 3\], expected \[2, 3, 5, 4\]"),
        (lambda x, h: x.view(len(x), x.shape[1], h, -1).transpose(1, 2).view(len(x), -1), "RuntimeError: view size"),
        (lambda x, h: x.view(len(x), x.shape[1], h, x.shape[2] / h), "raised TypeError"),
    ],
    "check_cells": [
        ([1600, 896], "^all but one are right. The second: view alone"),
        ([832, 640], "^all but one are right. The first: where does token 2 begin"),
        ([640, 1600], "in the wrong order"),
        ((1600, 1600), "view alone reads another cell"),
        ([640, 640], "view alone, twice"),
        ([896, 640], "head 2 of token 1"),
        ([1537, 640], "feature 1 of token 2"),
        ([1600, 576], "row 1 of head 1"),
        ([1600, 512], "row 0 of head 1"),
        ([1601, 641], "counted from 0"),
        ([2 * 768, 640], "The first: where does token 2 begin"),
    ],
    "check_merge_heads": [
        (lambda x: x.reshape(len(x), x.shape[2], -1), "row 0 of your output holds 3 tokens of head 0"),
        (lambda x: x.swapaxes(1, 2).view(len(x), x.shape[2], x.shape[1] * x.shape[3]), "use reshape, or contiguous"),
        (lambda x: x.transpose(2, 3).reshape(len(x), x.shape[2], -1), "the last two axes changed places"),
        (lambda x: rearrange(x, "b h s d -> b s (d h)"), "interleaved"),
        (lambda x: rearrange(x, "b h s d -> b s h d"), "still two axes"),
        (lambda x: reduce(x, "b h s d -> b s d", "mean"), "averaged"),
        (lambda x: reduce(x, "b h s d -> b s d", "sum"), "added up"),
        (lambda x: rearrange(x, "b h s d -> b h (s d)"), r"shape \[2, 3, 20\], expected \[2, 5, 12\]"),
    ],
}
