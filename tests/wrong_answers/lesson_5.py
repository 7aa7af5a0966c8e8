import torch


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


WRONG_ANSWERS = {
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
