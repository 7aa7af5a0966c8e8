import torch
import torch.nn.functional as F


def rms(x, weight, eps, dim=-1):
    return torch.einsum("bsd,d->bsd", x * torch.rsqrt((x * x).mean(dim, keepdim=True) + eps), weight)


def joined(q, k, v, pk, pv):
    return (torch.cat([p.repeat(len(q), 1, 1, 1), t], dim=2) for p, t in ((pk, k), (pv, v)))


def masked_with_zero(q, k, v, bias, mask, pk, pv):
    keys, values = joined(q, k, v, pk, pv)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, keys) + F.pad(bias, (pk.shape[2], 0))
    return torch.where(F.pad(mask, (pk.shape[2], 0), value=True), scores, 0).softmax(-1) @ values


def with_last_columns(q, k, v, bias, mask, pk, pv):
    keys, values = joined(q, k, v, pk, pv)
    bias = torch.cat([bias[..., -pk.shape[2] :], bias], dim=-1)
    added = bias.masked_fill(~F.pad(mask, (pk.shape[2], 0), value=True), -torch.inf)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=added, scale=1.0)


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
        (lambda x, w, eps: w * x * torch.rsqrt((x * x).mean(-1) + eps), "keepdim"),
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
    "check_t5_prefix_attention": [
        (masked_with_zero, "hidden keys are heard"),
        (lambda q, k, v, bias, mask, pk, pv: t5_with_prefix(q, k, v, bias, ~mask, pk, pv), "turned round"),
        (with_last_columns, "the bias of the last keys"),
        (
            lambda q, k, v, bias, mask, pk, pv: t5_with_prefix(
                q, k, v, bias / q.shape[-1] ** 0.5, mask, pk, pv, scale=None
            ),
            "T5 divides neither",
        ),
        (lambda q, k, v, bias, mask, pk, pv: torch.cat([pk, k], dim=2), "expand it"),
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
    ],
    "check_key_lengths": [
        ([15, 10, 15], "comes as a cache"),
        ([18, 10, 10], "come from the source"),
        ([15, 7, 15], "three slots besides"),
        ((18, 10, 21), "no row of its output"),
        ([18, 10, 25], "reads the source alone"),
        ([3, 3, 3], "not what comes out"),
    ],
    "check_blind": [
        (["pass", "pass", "fail"], "write it as passes"),
        (["fails"] * 3, "cut off before"),
        (["passes", "fails", "fails"], "louder for all"),
        (("fails", "passes", "fails"), "the slots' columns alone"),
        (["passes"] * 3, "distances among tokens"),
        (["fails", "fails", "passes"], "exactly reversed"),
        (["yes", "yes", "no"], "not what comes out"),
    ],
    "check_longer_bias": [
        (
            lambda bias, length: torch.cat([bias, torch.zeros(*bias.shape[:3], length)], dim=-1),
            "the prefix is in front",
        ),
        (lambda bias, length: torch.cat([torch.ones(*bias.shape[:3], length), bias], dim=-1), "louder"),
        (lambda bias, length: torch.cat([torch.full((*bias.shape[:3], length), -torch.inf), bias], dim=-1), "hides"),
        (lambda bias, length: torch.cat([bias[..., :1]] * length + [bias], dim=-1), "changes with the query"),
        (lambda bias, length: F.pad(bias, (length, 0, length, 0)), "no queries"),
        (lambda bias, length: bias.clone(), "as it was"),
        (lambda bias, length: F.pad(bias, (length + 1, 0)), "has shape"),
    ],
}
