"""Every exercise, as its reader meets it: the stub, the folded solution, and wrong answers that must be named."""

import ast
import re

import nbformat
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from lessons import lessons
from torch import Tensor

from helpers import exercises
from helpers.exercises import CORRECT, NOT_DONE, WRONG, Exercise, Mistake

CHECKS = {name: check for name, check in vars(exercises).items() if isinstance(check, Exercise)}


# The notebooks' stubs and solutions


def stubs_and_solutions() -> list:
    """(check, stub, solution, imports) of every exercise, in the order of the lessons."""
    found = []
    for path in lessons():
        cells = nbformat.read(path, as_version=4).cells
        imports = "\n".join(_imports(cell.source) for cell in cells if cell.cell_type == "code")
        for number, cell in enumerate(cells):
            check = re.search(r"^(check_\w+)\(", cell.source, flags=re.MULTILINE)
            if cell.cell_type == "code" and check:
                solution = re.search(
                    r"<summary>Solution</summary>.*?```python\n(.*?)```.*?</details>",
                    cells[number + 1].source if number + 1 < len(cells) else "",
                    flags=re.DOTALL,
                )
                assert solution, f"no folded solution behind {cell.id}"
                found.append(pytest.param(check[1], cell.source, solution[1], imports, id=cell.id))
    return found


def _imports(source: str) -> str:
    """The import statements of a cell, but for what only Colab runs."""
    if "google.colab" in source:
        return ""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(map(ast.unparse, nodes))


EXERCISES = stubs_and_solutions()
of_the_notebooks = pytest.mark.parametrize(("check", "stub", "solution", "imports"), EXERCISES)


@of_the_notebooks
def test_the_stub_is_not_done_yet(check, stub, solution, imports, capsys):
    exec(imports + "\n" + stub, {})
    printed = capsys.readouterr().out
    assert printed.startswith("Not done yet: ")
    assert printed.count("\n") == 1


@of_the_notebooks
def test_the_folded_solution_is_right(check, stub, solution, imports, capsys):
    call = re.search(rf"^{check}\(.*\)$", stub, flags=re.MULTILINE)[0]
    exec(f"{imports}\n{solution}\n{call}", {})
    assert capsys.readouterr().out.startswith("Correct: ")


def test_every_check_has_its_exercise_and_wrong_answers():
    assert sorted(param.values[0] for param in EXERCISES) == sorted(CHECKS)
    assert set(WRONG_ANSWERS) == set(CHECKS)
    assert all(len(wrong) >= 3 for wrong in WRONG_ANSWERS.values())


# Wrong answers, written as a learner would, and what the sentence must say


def softmax_by_hand(scores):
    return scores.exp() / scores.exp().sum()


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


def attend(query, key, value, *, scale=None, dim=-1):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.softmax(scale * torch.einsum("bqd,bkd->bqk", query, key), dim=dim)
    return torch.einsum("bqk,bkv->bqv", weights, value), weights


WRONG_ANSWERS = {
    "check_one_query": [
        (lambda q, k, v: softmax_by_hand((k * q).sum(-1)) @ v, "not divided by the square root of head_dim"),
        (lambda q, k, v: softmax_by_hand((k * q).sum(-1) / q.numel()) @ v, "by head_dim, not by its square root"),
        (lambda q, k, v: softmax_by_hand((k * q).mean(-1)) @ v, "by head_dim, not by its square root"),
        (lambda q, k, v: softmax_by_hand(k @ q / k.shape[0] ** 0.5) @ v, "number of keys, 4; .* head_dim, 9"),
        (lambda q, k, v: v.T @ (k @ q) / q.numel() ** 0.5, "the softmax is missing"),
        (lambda q, k, v: softmax_by_hand(k @ q / q.numel() ** 0.5), "you returned the weights"),
        (
            lambda q, k, v: reduce(v, "k v -> v", "mean"),
            r"3 of 3 entries are wrong: entry \[0\] is .*q \[9\], k \[4, 9\]",
        ),
        (lambda q, k, v: q @ k, r"raised RuntimeError: .*cannot be multiplied.*were q \[9\], k \[4, 9\], v \[4, 3\]"),
    ],
    "check_self_attention": [
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=1.0), "not divided by the square root of head_dim"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=1 / q.shape[1]), "by head_dim, not by its square root"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=len(q) ** -0.5), "model_dim, 7; .* head_dim, 3"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=x.shape[1] ** -0.5), "tokens, 5; .* head_dim, 3"),
        (lambda x, q, k, v: attend(x @ k, x @ q, x @ v), "queries and keys have changed places"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, dim=1), "softmax ran over the queries"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x), "project them with w_v"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v)[0], "return the output and the weights"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v)[::-1], "return the output first"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, dim=0), "over the sentences of the batch"),
        (lambda x, q, k, v: attend(x @ q, x @ k, 2 * x @ v), "Your output 0 has the right shape.*entry .0, 0, 0. is"),
        (lambda x, q, k, v: (x @ q) @ (x @ k), r"raised RuntimeError: .*were x \[2, 5, 7\], q \[7, 3\]"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=v.shape[1] ** -0.5), "value_dim, 4; .* head_dim, 3"),
        (
            lambda x, q, k, v: (attend(x @ q, x @ k, x @ v)[0], torch.einsum("bqd,bkd->bqk", x @ q, x @ k) / 3**0.5),
            "^Your output 1 has the right shape",  # the second toy's head_dim is not 3
        ),
        (
            lambda x, q, k, v: (attend(x @ q, x @ k, x @ v)[0], (x @ q) @ (x @ k).mT * q.shape[1] ** -0.5),
            "you returned the scores",
        ),
    ],
    "check_previous_token": [
        (lambda n: (torch.eye(n), 100 * torch.eye(n).roll(1, dims=0)), "the token after it"),
        (lambda n: (torch.eye(n), 100 * torch.eye(n)), "attends to itself"),
        (lambda n: (torch.eye(n).roll(1, dims=0), torch.eye(n)), "no weight exceeds 0.99"),
        (lambda n: [torch.nn.Parameter(torch.eye(n).roll(1, dims=0)), torch.eye(n)], "no weight exceeds 0.99"),
        (lambda n: (torch.eye(n), torch.eye(n + 1)), r"w_k \[6, 6\], expected \[5, 5\] twice"),
        (lambda n: (torch.eye(n), torch.eye(n)[:, 1:]), r"^w_q has shape \[5, 5\] and w_k \[5, 4\]"),
        (lambda n: (100 * torch.diag(torch.ones(n - 1), 1), torch.eye(n)), "every token but the last .* after it"),
        (lambda n: 100 * torch.diag(torch.ones(n - 1), -1), "^Return w_q and w_k, two tensors; you returned one"),
        (lambda n: (torch.eye(n), torch.eye(n), torch.eye(n)), "^Return w_q and w_k, two .*you returned 3 results"),
        (
            lambda n: (100 * torch.eye(n).roll(2, dims=0), torch.eye(n)),
            "The map of weights .*of 20 in the wrong places",
        ),
    ],
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


# Lessons 3 and 4: written with torch's own functions


def triangle(mask):
    return torch.ones(mask.shape[1], mask.shape[1]).tril().bool()


def cross(
    x, context, w_q, w_k, w_v, w_o, heads, *, split="b s (h d) -> b h s d", merge="b h s d -> b s (h d)", **options
):
    query, key, value = (
        rearrange(states @ w.T, split, h=heads) for states, w in ((x, w_q), (context, w_k), (context, w_v))
    )
    return rearrange(F.scaled_dot_product_attention(query, key, value, **options), merge) @ w_o.T


def cross_by_view(x, context, w_q, w_k, w_v, w_o, heads, merge=None):
    query, key, value = (
        (states @ w.T).view(len(states), heads, states.shape[1], -1)
        for states, w in ((x, w_q), (context, w_k), (context, w_v))
    )
    mixed = F.scaled_dot_product_attention(query, key, value)
    return (mixed.reshape(len(x), x.shape[1], -1) if merge == "view" else mixed.transpose(1, 2).flatten(2)) @ w_o.T


def pair_not_unpacked(x, context, w_q, w_k, w_v, w_o, heads):
    query = exercises.split_heads(x @ w_q.T, heads)
    key, value = exercises.split_heads(context @ w_k.T, heads), exercises.split_heads(context @ w_v.T, heads)
    both = exercises.scaled_dot_product_attention(query, key, value)
    return exercises.merge_heads(both) @ w_o.T


def unmerged(x, context, w_q, w_k, w_v, w_o, heads):
    mixed = cross(x, context, w_q, w_k, w_v, torch.eye(len(w_q)).double(), heads)
    return rearrange(mixed, "b s (h d) -> b h s d", h=heads).reshape(mixed.shape) @ w_o.T


def bottom_right(query, past_key):
    new, past = query.shape[2], past_key.shape[2]
    return torch.ones(new, past + new).tril(past).bool()


def step(query, key, value, past_key, past_value, **options):
    key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
    return F.scaled_dot_product_attention(query, key, value, **options), key, value


def prefixed(query, key, value, prefix_key, prefix_value, mask):
    key, value = torch.cat([prefix_key, key], dim=2), torch.cat([prefix_value, value], dim=2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def pair_of_prefixed(query, key, value, prefix_key, prefix_value, mask):
    key, value = torch.cat([prefix_key, key], dim=2), torch.cat([prefix_value, value], dim=2)
    mask = F.pad(mask, (prefix_key.shape[2], 0), value=True)
    return exercises.scaled_dot_product_attention(query, key, value, mask)


def share(query, key, prefix_key, *, dim=-1, scale=True):
    scores = query @ torch.cat([prefix_key, key], dim=2).transpose(2, 3)
    return (scores / query.shape[-1] ** 0.5 if scale else scores).softmax(dim)


WRONG_ANSWERS |= {
    "check_decoder_mask": [
        (lambda m: m.bool()[:, None, None, :] & ~triangle(m).tril(-1), "the triangle is upside down"),
        (lambda m: m.bool()[:, None, None, :] & triangle(m).tril(-1), "no token sees itself"),
        (lambda m: m.bool().unsqueeze(1).unsqueeze(3) & triangle(m), "padding hides queries"),
        (lambda m: ~(m.bool()[:, None, None, :] & triangle(m)), "True and False are swapped"),
        (lambda m: m.bool()[:, None, None, :] | triangle(m), 'joined with "or"'),
        (lambda m: m.bool()[:, None, None, :], "there is no triangle"),
        (lambda m: m.bool()[:, None, None, :].repeat(1, 1, m.shape[1], 1), "there is no triangle"),
        (lambda m: triangle(m), "the padding is visible"),
        (lambda m: triangle(m).repeat(len(m), 1, 1, 1), "the padding is visible"),
        (lambda m: m[:, None, None, :] * triangle(m), "Your output has dtype torch.int64, expected torch.bool"),
        (lambda m: m.bool()[:, None, None, :] & m.bool()[:, None, :, None] & triangle(m), "padded queries .* too"),
        (lambda m: m.bool()[:, None, None, :] & torch.ones(m.shape[1], m.shape[1]).tril(), "one of yours is float"),
        (lambda m: m[:, None, None, :].float() & triangle(m), "one of yours is float"),
        (lambda m: m[:, None, None, :].float() | triangle(m), "raised NotImplementedError: .*not implemented for"),
        (lambda m: m.bool()[:, None, :] & triangle(m), r"shape \[2, 5, 5\], expected \[2, 1, 5, 5\]"),
    ],
    "check_cross_attention": [
        (cross_by_view, "split with view alone: head 0 got whole tokens"),
        (lambda *toy: cross_by_view(*toy, merge="view"), "split and merged with view alone"),
        (unmerged, "merged with reshape alone"),
        (lambda x, context, *weights: cross(x, x, *weights), "this is self-attention"),
        (lambda x, context, *weights: cross(context, x, *weights), "the roles are swapped"),
        (lambda x, context, *weights: cross(context, context, *weights), "queries were made from context"),
        (lambda x, c, q, k, v, o, heads: cross(x, c, q, v, k, o, heads), "w_k and w_v have changed places"),
        (lambda x, c, q, k, v, o, heads: cross(x, c, q, k, v, o, 1), "there is one head"),
        (lambda x, c, q, k, v, o, heads: cross(x, c, q, k, v, torch.eye(len(q)).double(), heads), "w_o is missing"),
        (lambda *toy: cross(*toy, scale=len(toy[2]) ** -0.5), "all features together; head_dim belongs there"),
        (lambda *toy: cross(*toy, scale=1.0), "not divided by the square root of head_dim"),
        (lambda *toy: cross(*toy, split="b s (d h) -> b h s d"), "right shape .*entries are wrong"),
        (lambda x, c, q, k, v, o, heads: cross(x, c, q.T, k, v, o, heads), "a matrix was used as it is stored"),
        (lambda x, c, q, k, v, o, heads: cross(x, c, q.T, k.T, v.T, o.T, heads), r"stores .out, in., so use \.T"),
        (lambda x, c, q, k, v, o, heads: cross(x, c, q, k, v.T, o, heads), "a matrix was used as it is stored"),
        (lambda x, c, q, k, v, o, heads: cross(x, c, q, k, v, o.T, heads), "a matrix was used as it is stored"),
        (pair_not_unpacked, "returns a pair, output and weights"),
        (lambda x, c, q, k, v, o, heads: x @ x, "raised RuntimeError: .*were"),
    ],
    "check_cached_step": [
        (lambda *toy: step(*toy, is_causal=True), "top-left corner"),
        (step, "there is no mask"),
        (
            lambda *toy: step(*toy, attn_mask=bottom_right(toy[0], toy[3]).tril(toy[3].shape[2] - 1)),
            "does not see itself",
        ),
        (lambda q, k, v, pk, pv: step(q, pk, pv, k, v, attn_mask=bottom_right(q, pk)), "the past comes first"),
        (
            lambda q, k, v, pk, pv: (
                F.scaled_dot_product_attention(q, k, v, is_causal=True),
                *step(q, k, v, pk, pv)[1:],
            ),
            "not to the past",
        ),
        (lambda q, k, v, pk, pv: (step(q, k, v, pk, pv, attn_mask=bottom_right(q, pk))[0], k, v), "returned alone"),
        (lambda q, k, v, pk, pv: step(q, k, v, pk, pv, attn_mask=bottom_right(q, pk))[0], "should be 3 results"),
        (lambda q, k, v, pk, pv: torch.cat([pk, k], dim=1), "raised RuntimeError: Sizes of tensors must match"),
    ],
    "check_split_prefix": [
        (lambda p, h: rearrange(p, "b p (kv h d) -> kv b h p d", kv=2, h=h).flip(0).unbind(), "changed places"),
        (lambda p, h: rearrange(p, "b p (h d kv) -> kv b h p d", kv=2, h=h).unbind(), "taken in turn"),
        (lambda p, h: rearrange(p, "b p (h d kv) -> kv b h p d", kv=2, h=h), "taken in turn"),
        (lambda p, h: rearrange(p, "b p (h d) -> b h p d", h=h).chunk(2, dim=-1), "before they were cut in half"),
        (lambda p, h: tuple(t.reshape(len(p), h, p.shape[1], -1) for t in p.split(p.shape[2] // 2, 2)), "view alone"),
        (lambda p, h: p.split(p.shape[2] // 2, dim=2), "not split into heads yet"),
        (
            lambda p, h: rearrange(p, "b p (kv h d) -> b h p (kv d)", kv=2, h=h),
            "should be 2 results, and is one Tensor",
        ),
        (
            lambda p, h: rearrange(p, "b p (kv h d) -> kv b p h d", kv=2, h=h).unbind(),
            r"\[1, 4, 3, 5\], expected \[1, 3, 4, 5\]",
        ),
    ],
    "check_prefix_attention": [
        (lambda q, k, v, pk, pv, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), "without a prefix"),
        (lambda *toy: prefixed(*toy[:-1], F.pad(toy[-1], (toy[3].shape[2], 0))), "without a prefix"),
        (lambda *toy: prefixed(*toy[:-1], None), "the mask was dropped"),
        (lambda *toy: prefixed(*toy[:-1], F.pad(toy[-1], (0, toy[3].shape[2]), value=True)), "grew at the other end"),
        (lambda *toy: prefixed(*toy[:-1], F.pad(toy[-1], (0, toy[3].shape[2]))), "other end .* columns of False"),
        (pair_of_prefixed, "the pair of output and weights"),
        (
            lambda q, k, v, pk, pv, m: prefixed(q, pk, pv, k, v, F.pad(m, (pk.shape[2], 0), value=True)),
            "stands behind the keys, but the new columns of the mask in front",
        ),
        (
            lambda q, k, v, pk, pv, m: prefixed(q, k, v, pk, pk, F.pad(m, (pk.shape[2], 0), value=True)),
            "prefix_value is not used",
        ),
        (
            lambda q, k, v, pk, pv, m: prefixed(
                torch.cat([pk, q], dim=2), k, v, pk, pv, F.pad(m, (pk.shape[2], 0, pk.shape[2], 0), value=True)
            ),
            "the prefix got queries",
        ),
        (
            lambda q, k, v, pk, pv, m: prefixed(
                q, k, v, pk, pv, torch.ones(len(m), m.shape[1] + pk.shape[2]).tril().bool()
            ),
            "over the prefix too",
        ),
        (prefixed, "raised RuntimeError"),
        (lambda q, k, v, pk, pv, m: torch.cat([pk, k], dim=1), "raised RuntimeError: Sizes of tensors must match"),
    ],
    "check_prefix_share": [
        (lambda q, k, p: share(q, k, p)[..., p.shape[2] :].sum(-1, keepdim=True), "left for the content"),
        (lambda q, k, p: share(q, k, p)[..., : p.shape[2]].mean(-1, keepdim=True), "averaged: the share is their sum"),
        (lambda q, k, p: (q @ p.mT).softmax(-1).sum(-1, keepdim=True), "the softmax ran over the prefix alone"),
        (
            lambda q, k, p: torch.full((*q.shape[:3], 1), p.shape[2] / (p.shape[2] + k.shape[2])),
            "if all scores were equal",
        ),
        (lambda q, k, p: share(q, k, p, scale=False)[..., : p.shape[2]].sum(-1, keepdim=True), "not divided by"),
        (
            lambda q, k, p: share(q, k, p, dim=2)[..., : p.shape[2]].sum(-1, keepdim=True),
            "softmax ran over the queries",
        ),
        (lambda q, k, p: share(q, k, p)[..., -p.shape[2] :].sum(-1, keepdim=True), "the prefix stands in front"),
        (
            lambda q, k, p: share(q, torch.cat([k, p], 2), p[:, :, :0])[..., : p.shape[2]].sum(-1, keepdim=True),
            "not the prefix's: they belong to the first tokens",
        ),
        (lambda q, k, p: share(q, k, p)[..., :1], "one column was summed"),
        (lambda q, k, p: share(q, k, p)[..., : p.shape[2]].sum(-1), r"\[2, 3, 5\], expected \[2, 3, 5, 1\]"),
    ],
}


# Lesson 5: written with view and permute


def unpack_by_view(flat, layers, heads, cut=("l", "kv", "h", "d"), order="lkvbhpd"):
    sizes = {"l": layers, "kv": 2, "h": heads, "d": -1}
    viewed = flat.view(*flat.shape[:2], *(sizes[name] for name in cut))
    names = ["b", "p", *cut]
    return viewed.permute([names.index(name) for name in ("l", "kv", "b", "h", "p", "d")])


def doubled_and_split(flat, layers, heads):
    parts = flat.view(*flat.shape[:2], 2 * layers, heads, -1)
    parts = torch.cat([parts, parts], dim=2).permute(2, 0, 3, 1, 4).split(4)
    return torch.stack([torch.stack([part[0], part[1]]) for part in parts])


def count_linears(inner, mid, row, bias=True):
    with torch.device("meta"):
        mlp = torch.nn.Sequential(torch.nn.Linear(inner, mid, bias=bias), torch.nn.Linear(mid, row, bias=bias))
    return sum(parameter.numel() for parameter in mlp.parameters())


WRONG_ANSWERS |= {
    "check_unpack_prefix": [
        (lambda f, n, h: unpack_by_view(f, n, h, cut=("kv", "l", "h", "d")), "all keys, then all values"),
        (lambda f, n, h: unpack_by_view(f, n, h, cut=("l", "h", "kv", "d")), "into heads before"),
        (lambda f, n, h: f.view(*f.shape[:2], n, 2, -1, h).permute(2, 3, 0, 5, 1, 4), "every num_heads-th feature"),
        (lambda f, n, h: f.view(n, 2, len(f), h, f.shape[1], -1), "this is view alone"),
        (doubled_and_split, "layers share slices"),
        (lambda f, n, h: f.view(*f.shape[:2], n, 2, h, -1).permute(2, 3, 0, 1, 4, 5), "slots stand before the heads"),
        (lambda f, n, h: f.view(*f.shape[:2], n, 2, h, -1).permute(0, 2, 3, 4, 1, 5), "the batch stands in front"),
        (lambda f, n, h: unpack_by_view(f, n, h).transpose(0, 1), "key and value stand before the layers"),
        (lambda f, n, h: unpack_by_view(f, n, h, cut=("h", "l", "kv", "d")), "cut into heads first"),
        (lambda f, n, h: unpack_by_view(f, n, h)[:, [1, 0]], "key and value are exchanged"),
        (lambda f, n, h: f.view(*f.shape[:2], 2 * n, h, -1).permute(2, 0, 3, 1, 4), r"\[8, 6, 2, 3, 5\], expected"),
        (lambda f, n, h: f.view(n, h), r"raised RuntimeError: shape '\[4, 2\]' is invalid"),
    ],
    "check_prefix_size": [
        (
            lambda p, n, h, d, mid: p * n * h * d if mid is None else p * h * d + count_linears(h * d, mid, n * h * d),
            "2 for key",
        ),
        (
            lambda p, n, h, d, mid: (
                p * n * 2 * h * d if mid is None else p * h * d + count_linears(h * d, mid, n * 2 * h * d, False)
            ),
            "biases",
        ),
        (lambda p, n, h, d, mid: 2 * p * n * h * d, "kept after folding"),
        (
            lambda p, n, h, d, mid: 2 * p * n * h * d if mid is None else count_linears(h * d, mid, n * 2 * h * d),
            "embedding that goes into it",
        ),
        (
            lambda p, n, h, d, mid: (
                2 * p * n * h * d + (0 if mid is None else p * h * d + count_linears(h * d, mid, n * 2 * h * d))
            ),
            "long rows are not parameters",
        ),
        (
            lambda p, n, h, d, mid: (
                2 * p * n * h * d + (0 if mid is None else count_linears(2 * n * h * d, mid, n * 2 * h * d))
            ),
            "row of the embedding has",
        ),
        (
            lambda p, n, h, d, mid: (
                p * (2 * n * h * d if mid is None else h * d + count_linears(h * d, mid, n * 2 * h * d))
            ),
            "once for each slot",
        ),
        (
            lambda p, n, h, d, mid: (
                2 * p * n * h * d + (0 if mid is None else count_linears(h * d, mid, n * 2 * h * d))
            ),
            "MLP is right, but with mid_dim a row",
        ),
        (
            lambda p, n, h, d, mid: (
                2 * p * n * h * d if mid is None else p * mid + count_linears(mid, mid, n * 2 * h * d)
            ),
            "mid_dim lies between",
        ),
        (lambda p, n, h, d, mid: p * n, "Your number is 12, expected 240"),
    ],
    "check_pack_prefix": [
        (lambda kv: kv.reshape(kv.shape[4], kv.numel() // kv.shape[4]), "this is reshape alone"),
        (lambda kv: kv[:, :, 0].permute(3, 1, 0, 2, 4).flatten(1), "all keys, then all values"),
        (lambda kv: kv[:, :, 0].permute(3, 0, 1, 4, 2).flatten(1), "interleaved"),
        (lambda kv: kv[:, :, 0].permute(3, 0, 2, 1, 4).flatten(1), "alternate head by head"),
        (lambda kv: kv[:, :, 0].permute(3, 2, 0, 1, 4).flatten(1), "begins with all of head 0"),
        (lambda kv: kv[:, :, 0].permute(3, 1, 2, 0, 4).flatten(1), "changed places with the layers'"),
        (lambda kv: kv[:, :, 0].permute(3, 0, 1, 2, 4).flatten(1).T, "rows and columns are exchanged"),
        (lambda kv: kv.permute(2, 4, 0, 1, 3, 5).flatten(2), "there is a batch axis"),
        (lambda kv: kv.flatten(), r"shape \[720\], expected \[6, 120\]"),
    ],
}


# Lesson 6: written with torch's own functions


def rms(x, weight, eps, dim=-1):
    return torch.einsum("bsd,d->bsd", x * torch.rsqrt((x * x).mean(dim, keepdim=True) + eps), weight)


def row_of_bias(table, distances):
    return torch.stack([table[distance] for distance in distances]).T[None, :, None]


def t5_with_prefix(q, k, v, bias, mask, pk, pv, *, new_bias=0.0, behind=(False, False), scale=1.0):
    length = pk.shape[2]
    pad = [(0, length) if each else (length, 0) for each in behind]
    k, v = (torch.cat([p.repeat(len(q), 1, 1, 1), t], dim=2) for p, t in ((pk, k), (pv, v)))
    added = F.pad(bias, pad[0], value=new_bias).masked_fill(~F.pad(mask, pad[1], value=True), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)


WRONG_ANSWERS |= {
    "check_rms_norm": [
        (
            lambda x, w, eps: (
                (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps) ** 0.5 * w
            ),
            "LayerNorm",
        ),
        (lambda x, w, eps: w * x / ((x * x).sum(-1, keepdim=True) + eps) ** 0.5, "were summed"),
        (lambda x, w, eps: w * F.normalize(x, dim=-1), "divided by its length"),
        (
            lambda x, w, eps: w * x / (((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True) + eps) ** 0.5,
            "deviat",
        ),
        (lambda x, w, eps: w * x / (x.var(-1, keepdim=True).sqrt() + eps), "subtracts the mean first"),
        (lambda x, w, eps: w * x / ((x * x).mean(-1, keepdim=True) + eps), "root is missing"),
        (lambda x, w, eps: w * x / ((x * x).mean(-1, keepdim=True) ** 0.5 + eps), "behind the root"),
        (lambda x, w, eps: rms(x, w, 0), "eps is missing"),
        (lambda x, w, eps: F.rms_norm(x, w.shape, eps=eps), "weight is missing"),
        (lambda x, w, eps: F.rms_norm(x, w.shape, eps=eps) + w, "weight was added"),
        (lambda x, w, eps: w * x / ((x * x).mean() + eps) ** 0.5, "over everything"),
        (lambda x, w, eps: rms(x, w, eps, dim=1), "ran over the tokens"),
        (lambda x, w, eps: F.normalize(x, dim=0), "right shape .*entries are wrong"),
    ],
    "check_cached_bias": [
        (lambda t, n: row_of_bias(t, range(n + 1)), "reversed"),
        (lambda t, n: row_of_bias(t, [0] * (n + 1)), "position 0"),
        (lambda t, n: row_of_bias(t, range(n + 1, 0, -1)), "one too large"),
        (lambda t, n: row_of_bias(t, range(n - 1, -2, -1)), "one too small"),
        (lambda t, n: row_of_bias(t, range(-n, 1)), "wrong sign"),
        (lambda t, n: row_of_bias(t, range(0, -n - 1, -1)), "position 0"),
        (lambda t, n: row_of_bias(t, range(n, 0, -1)), "own key is missing"),
        (lambda t, n: row_of_bias(t, range(n, -1, -1))[0, :, 0], "two axes are missing"),
        (lambda t, n: t[: n + 1].flip(0), "heads come before the keys"),
        (lambda t, n: row_of_bias(t, range(n, -1, -1)).transpose(1, 2), r"\[1, 1, 3, 5\], expected \[1, 3, 1, 5\]"),
        (lambda t, n: t[n - torch.arange(2 * n + 30)], "raised IndexError"),
    ],
    "check_t5_prefix_attention": [
        (lambda *toy: t5_with_prefix(*toy, scale=None), "T5 does not"),
        (lambda q, k, v, bias, *others: t5_with_prefix(q, k, v, 0 * bias, *others), "bias was not added"),
        (lambda *toy: t5_with_prefix(*toy, behind=(True, False)), "its zeros belong in front"),
        (lambda *toy: t5_with_prefix(*toy, behind=(True, True)), "bias and mask grew"),
        (
            lambda q, k, v, bias, mask, pk, pv: t5_with_prefix(
                q,
                k,
                v,
                bias - bias[..., :1],
                mask,
                pk,
                pv,
            ),
            "bias of the first key",
        ),
        (lambda *toy: t5_with_prefix(*toy, new_bias=1.0), "which favours it"),
        (
            lambda q, k, v, bias, mask, pk, pv: F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias.masked_fill(~mask, -torch.inf), scale=1.0
            ),
            "without a prefix",
        ),
        (lambda q, k, v, bias, mask, *p: t5_with_prefix(q, k, v, bias, mask | True, *p), "mask was dropped"),
        (lambda q, k, v, bias, mask, pk, pv: t5_with_prefix(q, k, v, bias, mask, pk, pk), "prefix_value is not used"),
        (lambda q, k, v, bias, mask, pk, pv: t5_with_prefix(q, k, v, bias, mask, pv, pk), "are exchanged"),
        (
            lambda q, k, v, bias, mask, pk, pv: F.scaled_dot_product_attention(
                q,
                *(torch.cat([t, p.repeat(len(q), 1, 1, 1)], dim=2) for t, p in ((k, pk), (v, pv))),
                attn_mask=F.pad(bias.masked_fill(~mask, -torch.inf), (pk.shape[2], 0)),
                scale=1.0,
            ),
            "was joined behind",
        ),
        (
            lambda q, k, v, bias, mask, *p: (
                t5_with_prefix(q, k, v, 0 * bias, mask, *p) + torch.einsum("ihqk,bhkd->bhqd", bias, v)
            ),
            "added to the shares",
        ),
        (
            lambda q, k, v, bias, mask, pk, pv: F.scaled_dot_product_attention(
                q,
                *(torch.cat([p.repeat(len(q), 1, 1, 1), t], dim=2) for t, p in ((k, pk), (v, pv))),
                attn_mask=F.pad(bias, (pk.shape[2], 0)).masked_fill(
                    torch.ones(q.shape[2], pk.shape[2] + k.shape[2]).triu(1).bool(), -torch.inf
                ),
                scale=1.0,
            ),
            "triangle begins over the prefix",
        ),
        (lambda q, k, v, bias, mask, pk, pv: torch.cat([pk, k], dim=2), "raised RuntimeError: Sizes of tensors"),
    ],
}


# Lesson 7: written with torch.cat, torch.where and loops


def shifted_right(ids, start):
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)


def labels_of(ids, mask):
    return torch.where(mask == 1, ids, -100)


def stacked(prefixes, rows, mask=lambda visible: visible):
    heads, _, d_kv = prefixes[0].shape
    longest = max(prefix.shape[1] for prefix in prefixes)
    keys = torch.zeros(len(rows), heads, longest, d_kv, dtype=prefixes[0].dtype)
    visible = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        if row is not None:
            length = prefixes[row].shape[1]
            keys[number, :, :length] = prefixes[row]
            visible[number, :length] = True
    return keys, mask(visible)


WRONG_ANSWERS |= {
    "check_teacher_forcing": [
        (lambda ids, mask, start: (ids, labels_of(ids, mask)), "the very token that it has to write"),
        (
            lambda ids, mask, start: (torch.cat([ids[:, 1:], 0 * ids[:, :1]], dim=1), labels_of(ids, mask)),
            "to the left",
        ),
        (lambda ids, mask, start: (shifted_right(ids, start), ids), "padding counts in the loss"),
        (lambda ids, mask, start: (shifted_right(ids, start), labels_of(ids, 1 - mask)), "1 is a token"),
        (lambda ids, mask, start: (shifted_right(labels_of(ids, mask), start), labels_of(ids, mask)), "holds -100"),
        (
            lambda ids, mask, start: (shifted_right(ids, start), shifted_right(labels_of(ids, mask), start)),
            "labels were shifted too",
        ),
        (
            lambda ids, mask, start: (torch.cat([0 * ids[:, :1] + start, ids], dim=1), labels_of(ids, mask)),
            "one longer than the labels",
        ),
        (lambda ids, mask, start: (shifted_right(ids, 0), labels_of(ids, mask)), "begins with 0"),
        (lambda ids, mask, start: (labels_of(ids, mask), shifted_right(ids, start)), "exchanged"),
        (lambda ids, mask, start: labels_of(ids, mask), "should be 2 results, and is one Tensor"),
        (lambda ids, mask, start: (shifted_right(ids, start), torch.where(mask, ids, -100)), "raised RuntimeError"),
    ],
    "check_training_bytes": [
        (lambda base, prefix: tuple((base + prefix) * times for times in (4, 4, 8)), "full fine-tuning"),
        (lambda base, prefix: (4 * base + 4 * prefix, 4 * base + 4 * prefix, 2 * 4 * prefix), "have no gradients"),
        (lambda base, prefix: (4 * base + 4 * prefix, 4 * prefix, 2 * 4 * (base + prefix)), "what it trains"),
        (lambda base, prefix: (4 * base + 4 * prefix, 4 * prefix, 4 * prefix), "two numbers for each"),
        (lambda base, prefix: (4 * base + 4 * prefix, 4 * prefix, 12 * prefix), "two moments"),
        (lambda base, prefix: (base + prefix, prefix, prefix + prefix), "float32 takes 4 bytes"),
        (lambda base, prefix: (2 * base + 2 * prefix, 2 * prefix, 4 * prefix), "the bytes of float16"),
        (lambda base, prefix: (4 * base, 4 * prefix, 8 * prefix), "missing among the weights"),
        (lambda base, prefix: (4 * prefix, 4 * prefix, 8 * prefix), "lie in memory too"),
        (lambda base, prefix: (4.0 * (base + prefix), 4 * prefix, 8 * prefix), "is 4120.0, expected 4120"),
        (lambda base, prefix: 4 * (base + prefix) + 12 * prefix, "should be 3 results, and is one int"),
    ],
    "check_stack_prefixes": [
        (lambda prefixes, rows: stacked(prefixes, rows, mask=lambda visible: visible | True), "every slot is visible"),
        (lambda prefixes, rows: stacked(prefixes, rows, mask=torch.logical_not), "upside down"),
        (lambda prefixes, rows: stacked(prefixes, [row or 0 for row in rows]), "got the first prefix"),
        (
            lambda prefixes, rows: stacked(prefixes, [len(prefixes) - 1 if row is None else row for row in rows]),
            "got the last prefix",
        ),
        (
            lambda prefixes, rows: tuple(part.flip(-1 if part.ndim == 2 else -2) for part in stacked(prefixes, rows)),
            "Your result 0",
        ),
        (
            lambda prefixes, rows: tuple(
                part.flip(-1 if part.ndim == 2 else -2)
                for part in stacked([prefix.flip(1) for prefix in prefixes], rows)
            ),
            "padded in front",
        ),
        (lambda prefixes, rows: stacked(prefixes, [row or None for row in rows]), "false for 0 too"),
        (lambda prefixes, rows: stacked(prefixes, sorted(rows, key=str)), "Your result 0"),
        (lambda prefixes, rows: stacked(prefixes, rows)[0], "yours is one Tensor"),
        (lambda prefixes, rows: (stacked(prefixes, rows)[0], rows), "mask should be a tensor, and is a list"),
        (lambda prefixes, rows: stacked(prefixes, rows, mask=Tensor.long), r"bool \[batch, longest\] = \[6, 3\]"),
        (
            lambda prefixes, rows: (stacked(prefixes, rows)[0][:, :, :1], stacked(prefixes, rows)[1]),
            r"\[batch, heads, longest, d_kv\] with 6 rows and 3 slots, and are \[6, 4, 1, 5\]",
        ),
        (lambda prefixes, rows: torch.stack([prefixes[row] for row in rows]), "raised TypeError"),
    ],
}


def chosen_row(scores, row, spread=None):
    return row, scores[row].mean(), scores[row].max() - scores[row].min() if spread is None else spread


WRONG_ANSWERS |= {
    "check_content_weights": [
        (lambda w, p: w[..., p:], "the rows do not sum to one"),
        (lambda w, p: torch.softmax(w[..., p:], -1), "a second softmax flattens"),
        (lambda w, p: w[..., p:] / w[..., :p].sum(-1)[..., None], "divides by the share of the prefix"),
        (lambda w, p: w[:, :, :, p:] / w[:, :, :, p:].sum(2, keepdim=True), "the sum ran over the queries"),
        (lambda w, p: w[..., p:] / w[..., p:].sum(), "one sum was taken over everything"),
        (lambda w, p: w[..., p:] / w[..., p:].max(-1, keepdim=True)[0], "divided by its largest weight"),
        (lambda w, p: w[..., :-p] / w[..., :-p].sum(-1, keepdim=True), "the last columns were dropped"),
        (lambda w, p: w[..., :p] / w[..., :p].sum(-1, keepdim=True), "columns of the prefix"),
        (lambda w, p: w[:, p:] / w[:, p:].sum(-1, keepdim=True), r"Your output has shape \[2, 0, 5, 10\]"),
        (lambda w, p: w[..., p:] / w[..., p:].sum(-1), "raised RuntimeError"),
        (lambda w, p: w[..., p:] / (1 + w[..., :p].sum(-1, keepdim=True)), "entries are wrong"),
    ],
    "check_lora_rank": [
        (lambda p, h, d, m: max(1, round(p * h * d / (2 * (m + h * d)))), "half of the prefix is missing"),
        (lambda p, h, d, m: max(1, round(2 * p * h * d / (m + h * d))), "LoRA changes two matrices"),
        (lambda p, h, d, m: max(1, round(p * h * d / (2 * m))), "taken for d_model by d_model"),
        (lambda p, h, d, m: max(1, round(p / m)), "the whole matrix was counted"),
        (lambda p, h, d, m: max(1, int(p * h * d / (m + h * d))), "rounded down"),
        (lambda p, h, d, m: round(p * h * d / (m + h * d)), "a rank of 0 trains nothing"),
        (lambda p, h, d, m: p * h * d / (m + h * d), "a rank is a whole number"),
        (lambda p, h, d, m: max(1, round(p * d / (m + d))), "the width of one head"),
        (lambda p, h, d, m: p, "Your output is 5, expected 3"),
    ],
    "check_honest_score": [
        (lambda v, t: chosen_row(t, int(t[:, 0].argmax())), "chosen on the test scores"),
        (lambda v, t: chosen_row(t, t.mean(1).argmax().item()), "chosen on the test scores"),
        (lambda v, t: chosen_row(t, v[:, 0].argmax().item()), "chosen with seed 0 alone"),
        (lambda v, t: chosen_row(t, v.amax(1).argmax().item()), "the luckiest run"),
        (lambda v, t: chosen_row(v, v.mean(1).argmax().item()), "these are validation scores"),
        (
            lambda v, t: (v.mean(1).argmax().item(), t[v.mean(1).argmax()].max(), chosen_row(t, v.mean(1).argmax())[2]),
            "the best seed was reported",
        ),
        (
            lambda v, t: (v.mean(1).argmax().item(), t[v.mean(1).argmax()][0], chosen_row(t, v.mean(1).argmax())[2]),
            "seed 0 alone was reported",
        ),
        (
            lambda v, t: chosen_row(t, v.mean(1).argmax().item(), t[v.mean(1).argmax()].std()),
            "not the standard deviation",
        ),
        (lambda v, t: chosen_row(t, v.mean(1).argmax().item(), t.max() - t.min()), "taken over all rates"),
        (lambda v, t: t[v.mean(1).argmax()].mean(), "should be 3 results, and is one Tensor"),
        (lambda v, t: chosen_row(t, v[0].argmax().item()), "Your output 0 is 0, expected 2"),
    ],
}


@pytest.mark.parametrize(
    ("check", "answer", "message"), [(check, *wrong) for check, every in WRONG_ANSWERS.items() for wrong in every]
)
def test_a_wrong_answer_is_named(check, answer, message):
    verdict = CHECKS[check].judge(answer)
    assert verdict.state == WRONG
    assert re.search(message, verdict.sentence), verdict.sentence


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_each_known_mistake_is_wrong_and_told_apart_from_the_others(check):
    toys = list(check.toys(torch.Generator().manual_seed(0)))
    for mistake in check.mistakes:
        verdict = check.judge(mistake.answer)
        assert verdict.state == WRONG
        if isinstance(mistake.sentence, str):
            assert verdict.sentence == mistake.sentence
        else:
            assert verdict.sentence in [mistake.sentence(*toy) for toy in toys]


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_no_answer_is_not_done_yet(check):
    def stub(*arguments):
        raise NotImplementedError

    def forgetful(*arguments):
        arguments = arguments[::-1]

    assert str(check.judge(stub)) == "Not done yet: fill in stub and run this cell again."
    assert check.judge(forgetful).state == NOT_DONE
    assert str(check.judge(forgetful)) == "Not done yet: forgetful returned None. Is a return missing?"


# The comparison itself


def exercise(right, *arguments, **options) -> Exercise:
    return Exercise(right=right, toys=lambda draw: [arguments], **options)


ROW = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("right", "answer", "sentence"),
    [
        (lambda x: x, lambda x: x[:2], "Your output has shape [2], expected [3]."),
        (lambda x: x, lambda x: x[None], "Your output has shape [1, 3], expected [3]."),
        (lambda x: x, lambda x: x.tolist(), "Your output is a list, expected a tensor of shape [3]."),
        (lambda x: x, lambda x: x.flip(0), "Your output holds the right numbers, 2 of 3 in the wrong places."),
        (lambda x: x, lambda x: x / 0, "3 of 3 entries are wrong: entry [0] is inf, expected 1.000."),
        (lambda x: x, lambda x: x * torch.nan, "3 of 3 entries are wrong: entry [0] is nan, expected 1.000."),
        (lambda x: x > 1, lambda x: (x > 1).float(), "Your output has dtype torch.float32, expected torch.bool."),
        (lambda x: (x, x), lambda x: x, "Your output should be 2 results, and is one Tensor."),
        (lambda x: (x, x), lambda x: (x,), "Your output should be 2 results, and is 1."),
        (lambda x: (x, x), lambda x: (x, x[1:]), "Your output 1 has shape [2], expected [3]."),
        (lambda x: 3, lambda x: 4, "Your output is 4, expected 3."),
        (lambda x: x, lambda x: x[7], "Your code raised IndexError: index 7 is out of bounds"),
    ],
)
def test_what_differs_is_said(right, answer, sentence):
    verdict = exercise(right, ROW).judge(answer)
    assert verdict.state == WRONG
    assert sentence in verdict.sentence
    assert verdict.sentence.endswith("The arguments were x [3].")


def test_arguments_without_names_are_said_by_shape():
    for answer in (torch.rsqrt, lambda *arguments: arguments[0] + 1):
        assert exercise(lambda x: x, ROW).judge(answer).sentence.endswith("The arguments were [3].")


def test_not_implemented_with_a_message_is_an_error_and_no_stub():
    def answer(x):
        raise NotImplementedError("'bitwise_and_cpu' not implemented for 'Float'")

    verdict = exercise(lambda x: x, ROW).judge(answer)
    assert verdict.state == WRONG
    assert "Your code raised NotImplementedError: 'bitwise_and_cpu' not implemented for 'Float'." in verdict.sentence


def test_a_pair_may_come_as_one_tensor():
    pair = exercise(lambda x: (x, 2 * x), ROW)
    assert pair.judge(lambda x: torch.stack([x, 2 * x])).state == CORRECT
    assert "Your output 1 has the right shape" in pair.judge(lambda x: torch.stack([x, x])).sentence
    assert "should be 2 results" in pair.judge(lambda x: torch.stack([x, x, x])).sentence
    assert "should be 2 results" in pair.judge(lambda x: x[:2]).sentence
    split = CHECKS["check_split_prefix"]
    assert split.judge(lambda p, h: rearrange(p, "b p (kv h d) -> kv b h p d", kv=2, h=h)).state == CORRECT


@pytest.mark.parametrize(
    ("right", "answer"),
    [
        (lambda x: x, lambda x: x.double() + 1e-7),
        (lambda x: (x, x > 1), lambda x: [x, x > 1]),
        (lambda x: 3, lambda x: 3),
        (lambda x: x, lambda x: x.clone().requires_grad_()),
    ],
)
def test_what_is_right_is_correct(right, answer):
    assert exercise(right, ROW).judge(answer).state == CORRECT


def test_an_answer_that_is_right_on_one_toy_alone_is_wrong():
    check = Exercise(right=lambda n: 2 * n, toys=lambda draw: [(2,), (3,)])
    verdict = check.judge(lambda n: n**2)
    assert verdict.sentence == "Your output is 9, expected 6. The arguments were n 3."


def test_an_answer_may_write_into_its_arguments():
    def answer(x):
        return x.mul_(2)

    assert exercise(lambda x: 2 * x, ROW).judge(answer).state == CORRECT
    assert ROW.tolist() == [1, 2, 3]


def test_a_mistake_that_raises_is_recognised_by_its_error():
    known = Mistake(lambda x: x.t().view(6), "transpose leaves no view.")
    check = exercise(lambda x: x.t().reshape(6), torch.zeros(2, 3), mistakes=[known])
    assert check.judge(lambda x: rearrange(x, "a b -> b a").view(6)).sentence == "transpose leaves no view."
    assert "IndexError" in check.judge(lambda x: x[9]).sentence
    assert "RuntimeError: shape '[5]'" in check.judge(lambda x: x.view(5)).sentence


def test_an_exercise_may_read_its_result_before_comparing():
    check = exercise(lambda x: x, ROW, read=lambda result, x: result.argmax().item())
    assert check.judge(lambda x: 5 * x).state == CORRECT
    assert check.judge(lambda x: -x).sentence == "Your output is 0, expected 2. The arguments were x [3]."


def test_a_verdict_is_printed_as_one_line_and_draws_no_random_number(capsys):
    before = torch.get_rng_state()
    CHECKS["check_one_query"](lambda query, keys, values: query)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out.startswith("Not right yet: Your output has shape [9], expected [3].")
