import torch
import torch.nn.functional as F
from einops import rearrange

from helpers import merge_heads, scaled_dot_product_attention, split_heads


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
    query = split_heads(x @ w_q.T, heads)
    key, value = split_heads(context @ w_k.T, heads), split_heads(context @ w_v.T, heads)
    both = scaled_dot_product_attention(query, key, value)
    return merge_heads(both) @ w_o.T


def unmerged(x, context, w_q, w_k, w_v, w_o, heads):
    mixed = cross(x, context, w_q, w_k, w_v, torch.eye(len(w_q)).double(), heads)
    return rearrange(mixed, "b s (h d) -> b h s d", h=heads).reshape(mixed.shape) @ w_o.T


def bottom_right(query, past_key):
    new, past = query.shape[2], past_key.shape[2]
    return torch.ones(new, past + new).tril(past).bool()


def step(query, key, value, past_key, past_value, **options):
    key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
    return F.scaled_dot_product_attention(query, key, value, **options), key, value


WRONG_ANSWERS = {
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
}
