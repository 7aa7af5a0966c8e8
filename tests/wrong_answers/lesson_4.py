import torch
from einops import rearrange
from torch import Tensor


def attention(query, key, value, *, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.softmax(scale * torch.einsum("bqd,bkd->bqk", query, key), dim=-1)
    return torch.einsum("bqk,bkv->bqv", weights, value), weights


def joined(*parts, dim=1):
    return torch.cat(parts, dim)


WRONG_ANSWERS = {
    "check_attend_with": [
        (lambda q, k, v, pk, pv: attention(q, k, v), "are not joined"),
        (lambda q, k, v, pk, pv: attention(q, pk, pv), "not in their place"),
        (lambda q, k, v, pk, pv: attention(q, joined(k, pk), joined(v, pv)), "behind the others"),
        (lambda q, k, v, pk, pv: attention(q, joined(pk, k), joined(v, pv)), "its own value in the same place"),
        (lambda q, k, v, pk, pv: attention(q, joined(pk, k), joined(pv, v), scale=1), "not divided"),
        (lambda q, k, v, pk, pv: attention(q, joined(pk, k), joined(pv, v))[0], "return the output and the weights"),
        (lambda q, k, v, pk, pv: attention(q, joined(pk, k), joined(pv, v))[::-1], "return the output first"),
        (lambda q, k, v, pk, pv: attention(joined(pk, q), joined(pk, k), joined(pv, v)), "leave the queries"),
        (lambda q, k, v, pk, pv: q @ joined(pk, k, dim=0).mT, "guests are axis 1"),
        (lambda q, k, v, pk, pv: joined(pk, k, dim=2), "wider and not more"),
        (lambda q, k, v, pk, pv: attention(q, joined(pk, k), 2 * joined(pv, v)), "Your output 0 has the right shape"),
    ],
    "check_hosts_wishes": [
        ([True, False], "write it as yes or no"),
        (["no", "yes"], "changed places"),
        (["yes", "yes"], "it does not know"),
        (("no", "no"), "training can look for it"),
        (["perhaps", "no"], "not what comes out"),
    ],
    "check_zero_slots": [
        ("3/11", "quotation marks"),
        (0, "not a weight of 0"),
        (0.375, "over all keys"),
        (0.73, "left for the tokens"),
        (1 / 11, "there are three"),
        (0.333, "prefix's share of all"),
        (0.5, "not what comes out"),
    ],
    "check_address": [
        (
            lambda query, key, number: 8 * query[number] / query[number].norm(),
            r"too, and should give it less than 0.05",
        ),
        (lambda query, key, number: 0 * query[number], "more than 0.95"),
        (lambda query, key, number: query, r"\[head_dim\] = \[64\], and is \[8, 64\]"),
        (lambda query, key, number: query[number].tolist(), "and is list"),
        (
            lambda query, key, number: torch.linalg.pinv(query) @ (40 * torch.eye(len(query))[number].double() - 20),
            "larger by it",
        ),
    ],
    "check_split_prefix": [
        (
            lambda prefix, heads: rearrange(prefix, "b p (kv h d) -> kv b h p d", kv=2, h=heads).flip(0),
            "changed places",
        ),
        (lambda prefix, heads: rearrange(prefix, "b p (h d kv) -> kv b h p d", kv=2, h=heads), "in turn"),
        (lambda prefix, heads: rearrange(prefix, "b p (h kv d) -> kv b h p d", kv=2, h=heads), "cut into heads before"),
        (
            lambda prefix, heads: [half.reshape(len(half), heads, half.shape[1], -1) for half in prefix.chunk(2, -1)],
            "with view alone",
        ),
        (lambda prefix, heads: rearrange(prefix, "b p (kv h d) -> kv b p h d", kv=2, h=heads), "behind the slots"),
        (lambda prefix, heads: prefix.split(prefix.shape[-1] // 2, -1), "not split into heads yet"),
        (lambda prefix, heads: prefix, "should be 2 results|Your output"),
    ],
    "check_longer_mask": [
        (lambda mask, length: joined(mask, torch.zeros(3, length).bool()), "still the broken one"),
        (lambda mask, length: joined(mask, torch.ones(3, length).bool()), "they are behind"),
        (lambda mask, length: joined(torch.zeros(3, length).bool(), mask), "the prefix is hidden"),
        (lambda mask, length: joined(torch.ones(3, length), mask.float()).int(), "True means may attend is bool|dtype"),
        (lambda mask, length: joined(mask, mask).new_ones(3, length + mask.shape[1]), "those of cards too"),
        (lambda mask, length: mask.new_ones(3, length), "join them to the old mask"),
        (lambda mask, length: Tensor.clone(mask), r"has shape \[3, 7\], expected \[3, 10\]"),
    ],
}
