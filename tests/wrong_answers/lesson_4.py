import torch
import torch.nn.functional as F
from einops import rearrange

from helpers import scaled_dot_product_attention


def prefixed(query, key, value, prefix_key, prefix_value, mask):
    key, value = torch.cat([prefix_key, key], dim=2), torch.cat([prefix_value, value], dim=2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def pair_of_prefixed(query, key, value, prefix_key, prefix_value, mask):
    key, value = torch.cat([prefix_key, key], dim=2), torch.cat([prefix_value, value], dim=2)
    mask = F.pad(mask, (prefix_key.shape[2], 0), value=True)
    return scaled_dot_product_attention(query, key, value, mask)


def share(query, key, prefix_key, *, dim=-1, scale=True):
    scores = query @ torch.cat([prefix_key, key], dim=2).transpose(2, 3)
    return (scores / query.shape[-1] ** 0.5 if scale else scores).softmax(dim)


WRONG_ANSWERS = {
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
