import torch
from einops import reduce


def softmax_by_hand(scores):
    return scores.exp() / scores.exp().sum()


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
}
