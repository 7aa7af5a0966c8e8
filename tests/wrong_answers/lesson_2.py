import torch
from einops import rearrange, reduce


def first_token_changes_when_a_later_one_does(layer, hidden):
    changed = hidden.clone()
    changed[:, 1:] += torch.linspace(1, 2, hidden.shape[-1])
    return not torch.equal(layer(hidden)[:, 0], layer(changed)[:, 0])


def any_token_changes_when_an_earlier_one_does(layer, hidden):
    changed = hidden.clone()
    changed[:, 0] += 1
    return not torch.equal(layer(hidden)[:, 1:], layer(changed)[:, 1:])


def some_token_changes_when_the_last_one_does(layer, hidden):
    changed = hidden.clone()
    changed[:, -1] += torch.linspace(1, 2, hidden.shape[-1])
    return not torch.equal(layer(hidden)[:, :-1], layer(changed)[:, :-1])


def an_earlier_token_changes_when_all_features_of_one_do(layer, hidden):
    for token in range(1, hidden.shape[1]):
        changed = hidden.clone()
        changed[:, token] += 1
        if not torch.allclose(layer(hidden)[:, :token], layer(changed)[:, :token]):
            return True
    return False


def pairs(layer, hidden, features=(slice(None), slice(None))):
    """Bool [output token, input token], of some features of the output and of the input."""
    derivatives = torch.autograd.functional.jacobian(layer, hidden)[0, :, :, 0].movedim(1, 2)
    derivatives = derivatives[:, :, features[0]][..., features[1]]
    return (derivatives != 0).flatten(2).any(-1) if derivatives.ndim > 2 else derivatives != 0


def signed_sums(layer, hidden):
    return torch.autograd.functional.jacobian(layer, hidden)[0, :, :, 0].sum(dim=(1, 3))


WRONG_ANSWERS = {
    "check_split_heads": [
        (lambda x, h: x.view(len(x), h, x.shape[1], -1), "view alone: all 5 rows of head 0 come from the first 2 of 5"),
        (lambda x, h: torch.stack(x.chunk(h, 1), 1), "raised RuntimeError: stack expects each tensor to be equal size"),
        (lambda x, h: x.view(len(x) * h, x.shape[1], -1), "view alone: .*folded into the batch"),
        (lambda x, h: rearrange(x, "b s (h d) -> b s h d", h=h), "the transpose is missing"),
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
    ],
    "check_merge_heads": [
        (lambda x: x.reshape(len(x), x.shape[2], -1), "row 0 of your output holds 3 tokens of head 0"),
        (lambda x: x.swapaxes(1, 2).view(len(x), x.shape[2], x.shape[1] * x.shape[3]), "use reshape, or contiguous"),
        (lambda x: rearrange(x, "b h s d -> b s (d h)"), "interleaved"),
        (lambda x: rearrange(x, "b h s d -> b s h d"), "still two axes"),
        (lambda x: reduce(x, "b h s d -> b s d", "mean"), "averaged"),
        (lambda x: rearrange(x, "b h s d -> b h (s d)"), r"shape \[2, 3, 20\], expected \[2, 5, 12\]"),
    ],
    "check_sees_future": [
        (lambda layer, hidden: True, "every layer leaky: .*above the diagonal, without the diagonal"),
        (lambda layer, hidden: pairs(layer, hidden).triu().any(), "every layer leaky"),
        (lambda layer, hidden: pairs(layer, hidden).diagonal(1).any(), "watches the next token alone"),
        (some_token_changes_when_the_last_one_does, "watches the last input token alone"),
        (lambda layer, hidden: pairs(layer, hidden, (0, 0)).triu(1).any(), "looks at some features alone"),
        (lambda layer, hidden: pairs(layer, hidden, (slice(None), 0)).triu(1).any(), "looks at some features alone"),
        (lambda layer, hidden: pairs(layer, hidden, (0, slice(None))).triu(1).any(), "looks at some features alone"),
        (lambda layer, hidden: (signed_sums(layer, hidden) != 0).triu(1).any(), r"abs\(\) of the derivatives"),
        (lambda layer, hidden: (signed_sums(layer, hidden) > 0).triu(1).any(), r"abs\(\) of the derivatives"),
        (an_earlier_token_changes_when_all_features_of_one_do, "change one feature at a time"),
        (lambda layer, hidden: not layer(hidden).isfinite().all(), "no leak anywhere"),
        (first_token_changes_when_a_later_one_does, "watches output token 0 alone"),
        (any_token_changes_when_an_earlier_one_does, "it looks for the past"),
        (
            lambda layer, hidden: not first_token_changes_when_a_later_one_does(layer, hidden),
            "is True, expected False.*layer causal_attention, hidden .1, 5, 6.",
        ),
        (lambda layer, hidden: layer(hidden) > 0, "raised RuntimeError: Boolean value of Tensor"),
    ],
}
