import torch
import torch.nn.functional as F


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


WRONG_ANSWERS = {
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
