import math

import torch
from einops import reduce


def softmax_by_hand(scores):
    return scores.exp() / scores.exp().sum()


def attend(query, key, value, *, scale=1.0, dim=-1):
    weights = torch.softmax(scale * torch.einsum("bqd,bkd->bqk", query, key), dim=dim)
    return torch.einsum("bqk,bkv->bqv", weights, value), weights


def scaled(query, key, value, **options):
    return attend(query, key, value, scale=query.shape[-1] ** -0.5, **options)


def in_a_loop(query, keys, values):
    exponentials = [math.exp(sum(q * k for q, k in zip(query, key, strict=True))) for key in keys]
    return sum(e * value for e, value in zip(exponentials, values, strict=True))


def crooked(query, key, value):
    weights = torch.softmax(torch.einsum("bkd,bqd->bkq", key, query), dim=1)
    return weights @ value, weights


def undone_at_the_output(x, q, k, v):
    _, weights = crooked(x @ q, x @ k, x @ v)
    return weights.transpose(1, 2) @ (x @ v), weights


WRONG_ANSWERS = {
    "check_alone": [
        ([0.25, 0.25], "needs nobody else"),
        ([1, 0], "right one time in four"),
        ((0.25, 1), "have changed places"),
        ([1.0, 1 / 7], "names a gift, not a seat"),
        ([1, 1], "does not say what Dora has brought"),
        ((100, 25), "in percent"),
        ([0.9, 0.5], r"^\[0.9, 0.5\] is not what comes out"),
    ],
    "check_right_map": [
        ([4, 0, 1, 3, 6, 2, 5], "by whom each one is wanted"),
        ([0, 1, 2, 3, 4, 5, 6], "attend to itself"),
        ("Dora Emil Ada Ivo Cleo Jana Gus".split(), "write down the seat of each"),
        ([3, 4, 0, 8, 2, 9, 6], "places in NAMES"),
        ([2, 3, 6, 4, 1, 7, 5], "counted from 1"),
        ([1, 2, 5, 3, 0, 4, 6], "is not what comes out"),
        ([1, 2, 4, 3, 0, 6, 4], "^all but one are right. Look at row 2: whom does Emil want"),
    ],
    "check_crooked_rows": [
        ((1, 1), "down the columns"),
        ([0, 3], "changed places"),
        ([3 / 7, 0], "nothing is divided"),
        ([3, 1], "nobody wants Emil's"),
        ([2, 2], "is not what comes out"),
    ],
    "check_one_query": [
        (lambda q, k, v: v.T @ (k @ q), "the softmax is missing"),
        (lambda q, k, v: softmax_by_hand(k @ q), "you returned the weights"),
        (lambda q, k, v: torch.stack([q @ key for key in k]), "you returned the scores"),
        (in_a_loop, "not divided by their sum"),
        (lambda q, k, v: v.T @ (k @ q) / (k @ q).sum(), "takes the exponential of each first"),
        (lambda q, k, v: softmax_by_hand(k @ q / q.numel()) @ v, "you took their mean"),
        (lambda q, k, v: (k * q).softmax(1).sum(1) @ v, "one score for each key"),
        (lambda q, k, v: softmax_by_hand(k @ q / q.numel() ** 0.5) @ v, "the plain dot product is wanted"),
        (lambda q, k, v: k.T @ softmax_by_hand(k @ q), "you mixed the keys"),
        (
            lambda q, k, v: torch.stack([w * one for w, one in zip(softmax_by_hand(k @ q), v, strict=True)]),
            "add them up",
        ),
        (lambda q, k, v: v[max(range(len(k)), key=lambda i: q @ k[i])], "every value counts, with its weight"),
        (lambda q, k, v: reduce(v, "k v -> v", "mean"), "whatever the query asks for"),
        (
            lambda q, k, v: 2 * softmax_by_hand(k @ q) @ v,
            r"3 of 3 entries are wrong: entry \[0\] is .*q \[9\], k \[4, 9\]",
        ),
        (lambda q, k, v: q @ k, r"raised RuntimeError: .*cannot be multiplied.*were q \[9\], k \[4, 9\], v \[4, 3\]"),
    ],
    "check_attend": [
        (lambda x, q, k, v: crooked(x @ q, x @ k, x @ v), "two slips at once"),
        (lambda x, q, k, v: attend(x @ k, x @ q, x @ v), "queries and keys have changed places"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, dim=1), "softmax ran over the queries"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, dim=0), "over the tables of the batch"),
        (
            lambda x, q, k, v: ((x @ q) @ (x @ k).transpose(1, 2) @ (x @ v), (x @ q) @ (x @ k).transpose(1, 2)),
            "^the softmax is missing",
        ),
        (
            lambda x, q, k, v: (attend(x @ q, x @ k, x @ v)[0], (x @ q) @ (x @ k).transpose(1, 2)),
            "you returned the scores",
        ),
        (lambda x, q, k, v: attend(x @ q, x @ q, x @ v), "against the queries"),
        (lambda x, q, k, v: attend(x @ k, x @ k, x @ v), "against the keys"),
        (
            lambda x, q, k, v: (attend(x @ q, x @ k, x @ v)[1].transpose(1, 2) @ x @ v, attend(x @ q, x @ k, x)[1]),
            "transposed before they met the values",
        ),
        (lambda x, q, k, v: (x @ q) @ (x @ k).permute(2, 1, 0), "Write key.mT"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x), "project them with w_v"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v)[0], "return the output and the weights"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v)[::-1], "return the output first"),
        (lambda x, q, k, v: scaled(x @ q, x @ k, x @ v), "the plain product is wanted"),
        (lambda x, q, k, v: attend(x @ q, x @ k, 2 * x @ v), "Your output 0 has the right shape.*entry .0, 0, 0. is"),
        (lambda x, q, k, v: (x @ q) @ (x @ k), "rows meet columns"),
        (lambda x, q, k, v: x @ q @ v, r"raised RuntimeError: .*were x \[2, 5, 7\], q \[7, 3\]"),
    ],
    "check_mended": [
        (lambda x, q, k, v: crooked(x @ q, x @ k, x @ v), "still the crooked head"),
        (lambda x, q, k, v: attend(x @ k, x @ q, x @ v), "it is the wrong row"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, dim=1), "along which axis does the softmax run"),
        (undone_at_the_output, "undoes both slips at once"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, dim=0), "over the tables of the batch"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v)[0], "return the output and the weights"),
    ],
    "check_self_attention": [
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v), "this is the head from before"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=1 / q.shape[1]), "four times the width doubles it"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=q.shape[1] ** 0.5), "they should become smaller"),
        (
            lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=len(q) ** -0.5),
            "model_dim, 7; .* head_dim terms, here 3",
        ),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=x.shape[1] ** -0.5), "guests, 5; .* head_dim terms"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=v.shape[1] ** -0.5), "value_dim, 4; .* head_dim terms"),
        (
            lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=1 / torch.std((x @ q) @ (x @ k).transpose(1, 2))),
            "a number that depends on the width alone",
        ),
        (
            lambda x, q, k, v: [each * q.shape[1] ** -0.5 for each in attend(x @ q, x @ k, x @ v)],
            "no longer sum to 1",
        ),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=0.25), "a head_dim of 16 alone"),
        (lambda x, q, k, v: attend(x @ q, x @ k, x @ v, scale=1 / 16), "a head_dim of 256 alone"),
        (lambda x, q, k, v: scaled(x @ k, x @ q, x @ v), "queries and keys have changed places"),
        (lambda x, q, k, v: scaled(x @ q, x @ k, x @ v, dim=1), "softmax ran over the queries"),
        (lambda x, q, k, v: scaled(x @ q, x @ k, x), "project them with w_v"),
        (lambda x, q, k, v: scaled(x @ q, x @ k, x @ v)[0], "return the output and the weights"),
        (
            lambda x, q, k, v: (scaled(x @ q, x @ k, x @ v)[0], torch.einsum("bqd,bkd->bqk", x @ q, x @ k) / 3**0.5),
            "^Your output 1 has the right shape",  # the second toy's head_dim is not 3
        ),
    ],
}
