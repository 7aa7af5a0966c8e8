import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from helpers import merge_heads, split_heads


class Written(nn.Module):
    """The layer as a learner writes it; subclasses get one thing wrong."""

    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    bias = False

    def __init__(self, model_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        for name in self.names:
            setattr(self, name, nn.Linear(model_dim, model_dim, bias=self.bias))

    def forward(self, hidden):
        query = rearrange(self.q_proj(hidden), "b s (h d) -> b h s d", h=self.num_heads)
        key = rearrange(self.k_proj(hidden), "b s (h d) -> b h s d", h=self.num_heads)
        value = rearrange(self.v_proj(hidden), "b s (h d) -> b h s d", h=self.num_heads)
        return self.finish(*self.attend(query, key, value))

    def attend(self, query, key, value):
        weights = torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, dim=-1)
        return weights @ value, weights

    def finish(self, mixed, weights):
        return self.o_proj(rearrange(mixed, "b h s d -> b s (h d)")), weights


class WithoutScale(Written):
    def attend(self, query, key, value):
        weights = torch.softmax(query @ key.mT, dim=-1)
        return weights @ value, weights


class ScaledByTheWholeWidth(Written):
    def attend(self, query, key, value):
        weights = torch.softmax(query @ key.mT / self.q_proj.in_features**0.5, dim=-1)
        return weights @ value, weights


class ScaledTwice(Written):
    def attend(self, query, key, value):
        root = key.shape[-1] ** 0.5
        weights = torch.softmax((query / root) @ (key / root).mT, dim=-1)
        return weights @ value, weights


class SoftmaxOverQueries(Written):
    def attend(self, query, key, value):
        weights = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, dim=2)
        return weights @ value, weights


class WithoutSoftmax(Written):
    def attend(self, query, key, value):
        weights = query @ key.mT / query.shape[-1] ** 0.5
        return weights @ value, weights


class KeysAndValuesSwapped(Written):
    def attend(self, query, key, value):
        return super().attend(query, value, key)


class QueriesAndKeysSwapped(Written):
    def attend(self, query, key, value):
        return super().attend(key, query, value)


class NotProjected(Written):
    def finish(self, mixed, weights):
        return merge_heads(mixed), weights


class ProjectedTwice(Written):
    def finish(self, mixed, weights):
        return self.o_proj(self.o_proj(merge_heads(mixed))), weights


class MergedWithReshape(Written):
    def finish(self, mixed, weights):
        return self.o_proj(mixed.reshape(len(mixed), mixed.shape[2], -1)), weights


class MergedNever(Written):
    def finish(self, mixed, weights):
        return self.o_proj(mixed), weights


class WeightsFirst(Written):
    def finish(self, mixed, weights):
        return weights, self.o_proj(merge_heads(mixed))


class OutputAlone(Written):
    def finish(self, mixed, weights):
        return self.o_proj(merge_heads(mixed))


class MeanOfHeads(Written):
    def finish(self, mixed, weights):
        return self.o_proj(merge_heads(mixed)), weights.mean(dim=1)


class SplitByView(Written):
    def forward(self, hidden):
        shape = (len(hidden), self.num_heads, hidden.shape[1], -1)
        return self.finish(*self.attend(*(f(hidden).view(shape) for f in (self.q_proj, self.k_proj, self.v_proj))))


class SplitAndMergedByView(SplitByView, MergedWithReshape):
    pass


class SplitTooEarly(Written):
    def forward(self, hidden):
        heads = split_heads(hidden, self.num_heads)
        return self.finish(*self.attend(self.q_proj(heads), self.k_proj(heads), self.v_proj(heads)))


class NotSplit(Written):
    def forward(self, hidden):
        mixed, weights = self.attend(self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden))
        return self.o_proj(mixed), weights


class WithBias(Written):
    bias = True


class OtherNames(Written):
    names = ("w_q", "w_k", "w_v", "w_o")


class OneHeadWide(Written):
    def __init__(self, model_dim, num_heads):
        super().__init__(model_dim, num_heads)
        self.q_proj = nn.Linear(model_dim, model_dim // num_heads, bias=False)


def shares(query, key, scores_of=lambda scores: scores):
    return scores_of(query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)


def mix(query, key, value, mask, *, before=lambda scores, mask: scores, after=lambda weights, mask: weights):
    weights = after(shares(query, key, lambda scores: before(scores, mask)), mask)
    return weights @ value, weights


def minus_infinity(scores, mask):
    return torch.where(mask, scores, -torch.inf)


def times(numbers, mask):
    return numbers * mask


def normalised(weights, mask):
    weights = weights * mask
    return weights / weights.sum(-1, keepdim=True)


def without_scale(query, key, value, mask):
    weights = (query @ key.mT).masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    return weights @ value, weights


def some_token_changes(layer, hidden, changed, read):
    return not torch.allclose(read(layer(hidden)), read(layer(changed)))


def first_token_changes_when_a_later_one_does(layer, hidden):
    changed = hidden.clone()
    changed[:, 1:] += torch.linspace(1, 2, hidden.shape[-1])
    return some_token_changes(layer, hidden, changed, lambda output: output[:, 0])


def any_token_changes_when_an_earlier_one_does(layer, hidden):
    changed = hidden.clone()
    changed[:, 0] += 1
    return some_token_changes(layer, hidden, changed, lambda output: output[:, 1:])


def some_token_changes_when_the_last_one_does(layer, hidden):
    changed = hidden.clone()
    changed[:, -1] += torch.linspace(1, 2, hidden.shape[-1])
    return some_token_changes(layer, hidden, changed, lambda output: output[:, :-1])


def an_earlier_token_changes(layer, hidden, change=lambda now: now + 1, least=0.0, reach=0):
    for token in range(1, hidden.shape[1]):
        changed = hidden.clone()
        changed[:, token] = change(changed[:, token])
        moved = (layer(hidden) - layer(changed))[:, : token + reach].abs().max()
        if moved > max(least, 1e-9):
            return True
    return False


def replaced(now):
    return now + torch.linspace(-1, 2, now.shape[-1]).sin()


def pairs(layer, hidden, features=(slice(None), slice(None))):
    """Bool [output token, input token], of some features of the output and of the input."""
    derivatives = torch.autograd.functional.jacobian(layer, hidden)[0, :, :, 0].movedim(1, 2)
    derivatives = derivatives[:, :, features[0]][..., features[1]]
    return (derivatives != 0).flatten(2).any(-1) if derivatives.ndim > 2 else derivatives != 0


def signed_sums(layer, hidden):
    return torch.autograd.functional.jacobian(layer, hidden)[0, :, :, 0].sum(dim=(1, 3))


def attend(layer, x, keys_from, values_from, mask, last=True, scale=None):
    query = split_heads(layer.q_proj(x), layer.num_heads)
    key = split_heads(layer.k_proj(keys_from), layer.num_heads)
    value = split_heads(layer.v_proj(values_from), layer.num_heads)
    mask = torch.ones(1, 1, dtype=torch.bool) if mask is None else mask
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).nan_to_num()
    merged = merge_heads(weights @ value)
    return layer.o_proj(merged) if last else merged, weights


def other(hidden, context):
    return hidden if context is None else context


def asks_with_the_context(layer, hidden, context, mask):
    context = other(hidden, context)
    return attend(layer, context, context, context, mask)


def roles_swapped(layer, hidden, context, mask):
    return attend(layer, other(hidden, context), hidden, hidden, mask)


def masked_late(layer, hidden, context, mask):
    output, weights = attend(layer, hidden, other(hidden, context), other(hidden, context), None)
    if mask is None:
        return output, weights
    weights = weights * mask
    return layer.o_proj(
        merge_heads(weights @ split_heads(layer.v_proj(other(hidden, context)), layer.num_heads))
    ), weights


def nan_for_nobody(layer, hidden, context, mask):
    context = other(hidden, context)
    query, key, value = (
        split_heads(project(x), layer.num_heads)
        for project, x in ((layer.q_proj, hidden), (layer.k_proj, context), (layer.v_proj, context))
    )
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(dim=-1)
    return layer.o_proj(merge_heads(weights @ value)), weights


def needs_a_mask(layer, hidden, context, mask):
    context = other(hidden, context)
    query, key = split_heads(layer.q_proj(hidden), layer.num_heads), split_heads(layer.k_proj(context), layer.num_heads)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).nan_to_num()
    return layer.o_proj(merge_heads(weights @ split_heads(layer.v_proj(context), layer.num_heads))), weights


def causal(layer, hidden, context, mask):
    context = other(hidden, context)
    triangle = torch.ones(hidden.shape[1], context.shape[1]).tril().bool()
    return attend(layer, hidden, context, context, triangle)


WRONG_ANSWERS = {
    "check_multi_head_attention": [
        (WithoutScale, "not divided by the root of head_dim"),
        (ScaledByTheWholeWidth, "root of model_dim; each head has head_dim"),
        (ScaledTwice, "by head_dim, or twice by its root"),
        (SoftmaxOverQueries, "runs over the queries"),
        (WithoutSoftmax, "entries are wrong"),
        (KeysAndValuesSwapped, "k_proj and v_proj have changed places"),
        (QueriesAndKeysSwapped, "q_proj and k_proj have changed places"),
        (NotProjected, "the output projection, o_proj, is missing"),
        (ProjectedTwice, "o_proj was applied twice"),
        (MergedWithReshape, "merged with reshape alone"),
        (MergedNever, "a matrix met single heads: .*o_proj after merge_heads"),
        (WeightsFirst, "the pair is in the wrong order"),
        (OutputAlone, "the weights are missing: return both"),
        (MeanOfHeads, r"returns 1 has shape \[2, 5, 5\], expected \[2, 3, 5, 5\].*model_dim 12, num_heads 3"),
        (SplitByView, "split with view alone"),
        (SplitAndMergedByView, "split and merged with view alone"),
        (SplitTooEarly, "a matrix met single heads"),
        (NotSplit, "there is one head"),
        (WithBias, "q_proj adds a bias vector: give nn.Linear bias=False"),
        (OtherNames, "no nn.Linear named q_proj"),
        (OneHeadWide, r"the matrix of q_proj is \[4, 12\], expected \[12, 12\]"),
        (lambda model_dim, num_heads: torch.zeros(model_dim), "should give an nn.Module, and gives one Tensor"),
    ],
    "check_masked_mix": [
        (lambda *toy: mix(*toy, after=times), "still add up to less than 1"),
        (mix, "there is no mask"),
        (lambda *toy: mix(*toy, before=minus_infinity), "gets NaN, .*end with masked_fill"),
        (lambda *toy: mix(*toy, after=normalised), "gets NaN, since 0 is divided by 0, and it should get zeros: "),
        (lambda *toy: mix(*toy, before=lambda scores, mask: torch.where(mask, scores, -1e9)), "the mean of all values"),
        (lambda *toy: mix(*toy, before=times), "a hidden score was set to 0"),
        (lambda *toy: mix(*toy, before=times, after=times), "a hidden score was set to 0"),
        (lambda *toy: mix(*toy, before=torch.add), "added to the scores"),
        (lambda *toy: mix(*toy, before=torch.add, after=times), "added to the scores"),
        (lambda q, k, v, mask: mix(q, k, v, ~mask, before=minus_infinity), "True and False are swapped"),
        (lambda q, k, v, mask: mix(q, k, v, ~mask, before=minus_infinity, after=times), "True and False are swapped"),
        (
            lambda *toy: mix(*toy, before=lambda scores, mask: scores.masked_fill(mask, -torch.inf), after=times),
            "True and False are swapped",
        ),
        (without_scale, "not divided by the root of head_dim"),
        (lambda *toy: mix(*toy, before=minus_infinity, after=times)[1], "should be 2 results, and is one Tensor"),
        (
            lambda *toy: mix(*toy, before=minus_infinity, after=lambda weights, mask: weights.nan_to_num())[0],
            "return the weights as well",
        ),
        (
            lambda *toy: mix(*toy, before=lambda scores, mask: scores.masked_fill(mask == 0, float("inf"))),
            "entries are wrong",
        ),
    ],
    "check_sees_future": [
        (lambda layer, hidden: True, "every layer leaky"),
        (lambda layer, hidden: pairs(layer, hidden).triu().any(), "every layer leaky"),
        (lambda *toy: an_earlier_token_changes(*toy, change=replaced, reach=1), "every layer leaky"),
        (lambda layer, hidden: pairs(layer, hidden).triu(1), r"one True or False, and returns a tensor \[5, 5\]: .any"),
        (lambda layer, hidden: pairs(layer, hidden).diagonal(1).any(), "watches the next token alone"),
        (some_token_changes_when_the_last_one_does, "comes from the last token alone"),
        (lambda layer, hidden: pairs(layer, hidden, (0, 0)).triu(1).any(), "looks at some features alone"),
        (lambda layer, hidden: pairs(layer, hidden, (slice(None), 0)).triu(1).any(), "looks at some features alone"),
        (lambda layer, hidden: pairs(layer, hidden, (0, slice(None))).triu(1).any(), "looks at some features alone"),
        (lambda layer, hidden: (signed_sums(layer, hidden) != 0).triu(1).any(), r"abs\(\) of the derivatives"),
        (lambda layer, hidden: (signed_sums(layer, hidden) > 0).triu(1).any(), r"abs\(\) of the derivatives"),
        (an_earlier_token_changes, "replace the tokens by random ones"),
        (lambda *toy: an_earlier_token_changes(*toy, change=replaced, least=0.1), "misses weak leaks"),
        (lambda *toy: an_earlier_token_changes(*toy, change=replaced, least=0.03), "misses weak leaks"),
        (lambda *toy: an_earlier_token_changes(*toy, change=replaced, least=0.005), "misses weak leaks"),
        (lambda *toy: an_earlier_token_changes(*toy, change=replaced, least=0.001), "misses weak leaks"),
        (lambda layer, hidden: not layer(hidden).isfinite().all(), "no leak anywhere"),
        (lambda *toy: not an_earlier_token_changes(*toy, change=replaced), "opposite of the right one on every layer"),
        (first_token_changes_when_a_later_one_does, "watches output token 0 alone"),
        (any_token_changes_when_an_earlier_one_does, "it looks for the past"),
        (
            lambda layer, hidden: not first_token_changes_when_a_later_one_does(layer, hidden),
            "is True, expected False.*layer causal_attention, hidden .1, 5, 6.",
        ),
        (lambda layer, hidden: layer(hidden) > 0, r"returns a tensor \[1, 5, 6\]"),
    ],
    "check_mask_shape": [
        ([1000, 7], "taken for 1000 queries"),
        ((1000, 1, 7), "one axis is missing"),
        ([1000, 1, 7, 1], "hides who asks"),
        ([1000, 7, 1, 1], "keys are the last axis"),
        ([1000, 2, 7, 7], "written 14 times"),
        ([1000, 2, 1, 7], "for both heads"),
        ([1000, 1, 7, 7], "written 7 times"),
        ([1, 1, 1, 7], "one mask for all tables"),
        ([7, 1, 1, 1000], "is not what comes out"),
    ],
    "check_step": [
        ([1, 12, 6, 6], "the whole map, as without a cache"),
        ([1, 12, 1, 5], "also looks at itself"),
        ((1, 12, 6, 1), "rows are queries and columns are keys"),
        ([1, 12, 1, 64], "those are the mixed values"),
        ([1, 1, 6], "each head has weights of its own"),
        ([1, 1, 12, 6], "heads come before queries"),
        ([1, 12, 1, 1], "five before it as well"),
        ([1, 12, 5, 1], "five keys with its own make six"),
        ([1, 12, 8, 64], "is not what comes out"),
    ],
    "check_forward": [
        (lambda layer, hidden, context, mask: attend(layer, hidden, hidden, hidden, mask), "context is not used"),
        (roles_swapped, "the roles are swapped"),
        (asks_with_the_context, "the queries come from context as well"),
        (
            lambda layer, x, c, mask: attend(layer, x, other(x, c), x, mask),
            "the keys come from context, but the values",
        ),
        (lambda layer, x, c, mask: attend(layer, x, c or x, c or x, mask), "`or` asks whether a tensor is true"),
        (lambda layer, x, c, mask: attend(layer, x, c, c, mask), "context may be None"),
        (needs_a_mask, "mask may be None"),
        (lambda layer, x, c, mask: attend(layer, x, other(x, c), other(x, c), None), "the mask is not used"),
        (causal, "a causal mask whatever was given"),
        (masked_late, "the mask comes after the softmax"),
        (nan_for_nobody, "gets NaN, .*use masked_mix"),
        (lambda layer, x, c, mask: attend(layer, x, other(x, c), other(x, c), mask, last=False), "o_proj, is missing"),
        (
            lambda layer, x, c, mask: attend(
                layer, x, other(x, c), other(x, c), mask, scale=layer.num_heads / layer.q_proj.in_features
            ),
            "the root of head_dim twice",
        ),
        (lambda layer, x, c, mask: attend(layer, x, other(x, c), other(x, c), mask)[0], "the weights are missing"),
        (lambda layer, x, c, mask: (F.relu(x), x), "right shape|has shape"),
    ],
}
