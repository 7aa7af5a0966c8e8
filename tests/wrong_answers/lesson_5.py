import torch
from einops import rearrange
from torch import nn


def unpack_by_view(flat, layers, heads, cut=("l", "kv", "h", "d")):
    sizes = {"l": layers, "kv": 2, "h": heads, "d": -1}
    viewed = flat.view(*flat.shape[:2], *(sizes[name] for name in cut))
    names = ["b", "p", *cut]
    return viewed.permute([names.index(name) for name in ("l", "kv", "b", "h", "p", "d")])


def three_calls(flat, layers, heads):
    return flat.view(*flat.shape[:2], 2 * layers, heads, -1).permute(2, 0, 3, 1, 4)


def doubled_and_split(flat, layers, heads):
    parts = flat.view(*flat.shape[:2], 2 * layers, heads, -1)
    parts = torch.cat([parts, parts], dim=2).permute(2, 0, 3, 1, 4).split(4)
    return torch.stack([torch.stack([part[0], part[1]]) for part in parts])


def pairs_at(place):
    """Key and value of each layer, from the slices of rows that hold all keys first."""

    def layout(rows, num_layers, num_heads):
        slices = three_calls(rows, num_layers, num_heads)
        return torch.stack(
            [torch.stack([slices[at] for at in place(layer, num_layers)]) for layer in range(num_layers)]
        )

    return layout


def an_encoder(
    table=lambda slots, model_dim, row_dim, mid: nn.Embedding(slots, row_dim if mid is None else model_dim),
    mlp=lambda model_dim, mid, row_dim: nn.Sequential(nn.Linear(model_dim, mid), nn.Tanh(), nn.Linear(mid, row_dim)),
    forward=lambda self, rows: rearrange(
        rows, "p (l kv h d) -> l kv 1 h p d", l=self.num_layers, kv=2, h=self.num_heads
    ),
    key_and_value=2,
):
    class PrefixEncoder(nn.Module):
        def __init__(self, prefix_length, num_layers, num_heads, head_dim, mid_dim=None):
            super().__init__()
            self.num_layers, self.num_heads = num_layers, num_heads
            model_dim = num_heads * head_dim
            row_dim = num_layers * key_and_value * model_dim
            self.embedding = table(prefix_length, model_dim, row_dim, mid_dim)
            self.mlp = nn.Identity() if mid_dim is None else mlp(model_dim, mid_dim, row_dim)

        def forward(self):
            rows = getattr(self.embedding, "weight", self.embedding)
            return forward(self, self.mlp(rows))

    return PrefixEncoder


class NeedsSlots(nn.Module):
    def __init__(self, prefix_length, num_layers, num_heads, head_dim, mid_dim=None):
        super().__init__()
        width, row = num_heads * head_dim, num_layers * 2 * num_heads * head_dim
        self.embedding = nn.Embedding(prefix_length, row if mid_dim is None else width)
        self.mlp = nn.Identity()
        if mid_dim is not None:
            self.mlp = nn.Sequential(nn.Linear(width, mid_dim), nn.Tanh(), nn.Linear(mid_dim, row))

    def forward(self, slots):
        return self.mlp(self.embedding(slots))


def with_middle(module):
    return lambda width, mid, row: nn.Sequential(nn.Linear(width, mid), module(), nn.Linear(mid, row))


WRONG_ANSWERS = {
    "check_prompt_shapes": [
        ([[3], [5, 3, 18432], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [2, 5, 12, 3, 64]], "The first: expand repeats"),
        ([[5, 3], [5, 3, 9216], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [2, 5, 12, 3, 64]], "a key and a value for"),
        ([[5, 3], [5, 3, 768], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [2, 5, 12, 3, 64]], "what goes into the MLP"),
        ([[5, 3], [5, 3, 1536], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [2, 5, 12, 3, 64]], "that is one layer's"),
        ([[5, 3], [3, 18432], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [2, 5, 12, 3, 64]], "The second: line 8"),
        ([[5, 3], [5, 3, 18432], [5, 3, 64, 12, 24], [24, 5, 12, 3, 64], [2, 5, 12, 3, 64]], "The third: view keeps"),
        ([[5, 3], [5, 3, 18432], [5, 3, 24, 12, 64], [3, 12, 5, 24, 64], [2, 5, 12, 3, 64]], "names the old axis"),
        (
            [(5, 3), (5, 3, 18432), (5, 3, 24, 12, 64), (24, 12, 5, 3, 64), (2, 5, 12, 3, 64)],
            "in the order 2, 0, 3, 1, 4",
        ),
        ([[5, 3], [5, 3, 18432], [5, 3, 12, 12, 64], [12, 5, 12, 3, 64], [2, 5, 12, 3, 64]], "num_layers \\* 2 = 24"),
        ([[5, 3], [5, 3, 9216], [5, 3, 12, 12, 64], [12, 5, 12, 3, 64], [2, 5, 12, 3, 64]], "and the view makes 24"),
        ([[5, 3], [5, 3, 18432], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [12, 5, 12, 3, 64]], "not two pieces"),
        ([[5, 3], [5, 3, 18432], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [5, 12, 3, 64]], "keeps its first axis"),
        ([[5, 3], [5, 3, 18432], [5, 3, 24, 12, 64], [24, 5, 12, 3, 64], [2, 5, 3, 12, 64]], "leaves the others"),
        ([[5, 3], [5, 3, 18432], [5, 3, 24, 12, 64], [24, 3, 5, 12, 64], [2, 3, 5, 12, 64]], "old axis 0, the batch"),
        ([[5, 3]], "is not what comes out"),
        (5, "is not what comes out"),
    ],
    "check_unpack_prefix": [
        (lambda f, n, h: three_calls(f, n, h).split(2), "the right pairs, in a tuple"),
        (lambda f, n, h: list(three_calls(f, n, h).split(2)), "the right pairs, in a tuple"),
        (three_calls, "layers and key or value are still one axis"),
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
        (lambda f, n, h: f.view(*f.shape[:2], n, 2, h, -1), r"\[6, 3, 4, 2, 2, 5\], expected"),
        (lambda f, n, h: f.view(n, h), r"raised RuntimeError: shape '\[4, 2\]' is invalid"),
        (
            lambda f, n, h: rearrange(f, "b p (l kv h d) -> l kv b h p d", l=n, h=h),
            r"l kv b h p d\": Could not infer sizes for .*: it can find one length in a bracket",
        ),
        (
            lambda f, n, h: rearrange(f, "b p (l 2 h d) -> l 2 b h p d", l=n, h=h),
            r"give each number a name and a length, as kv with kv=2",
        ),
        (
            lambda f, n, h: rearrange(f[0], "b p (l kv h d) -> l kv b h p d", l=n, kv=2, h=h),
            r"expected 3 dims. Received 2-dim tensor",
        ),
    ],
    "check_mended_layout": [
        (pairs_at(lambda layer, layers: (layer, layer + 1)), "still is the slice behind the key"),
        (pairs_at(lambda layer, layers: (2 * layer, 2 * layer + 1)), "as key, value, key, value"),
        (lambda f, n, h: three_calls(f, n, h).split(2), "make one tensor|makes one tensor"),
        (
            lambda f, n, h: list(unpack_by_view(f, n, h, cut=("kv", "l", "h", "d"))),
            "the right pairs, in a tuple or list",
        ),
        (pairs_at(lambda layer, layers: (layers + layer, layer)), "key and value are exchanged"),
        (pairs_at(lambda layer, layers: (layer, -1 - layer)), "in the opposite order"),
        (lambda f, n, h: unpack_by_view(f, n, h, cut=("kv", "l", "h", "d")).transpose(0, 1), "stand before the layers"),
        (lambda f, n, h: f.view(n, 2, len(f), h, f.shape[1], -1), "this is view alone"),
        (pairs_at(lambda layer, layers: (layer, layer + layers - 1)), "Your output has the right shape"),
    ],
    "check_prefix_encoder": [
        (an_encoder(forward=lambda self, rows: rows), "these are the flat rows"),
        (an_encoder(forward=lambda self, rows: rows[None]), "these are the flat rows"),
        (
            an_encoder(
                forward=lambda self, rows: rearrange(
                    rows, "p (l kv h d) -> l kv h p d", l=self.num_layers, kv=2, h=self.num_heads
                )
            ),
            "batch axis is missing",
        ),
        (
            an_encoder(
                forward=lambda self, rows: rearrange(
                    rows, "b p (l kv h d) -> l kv b h p d", l=self.num_layers, kv=2, h=self.num_heads
                )
            ),
            "the rows lack a batch axis",
        ),
        (
            an_encoder(
                forward=lambda self, rows: unpack_by_view(rows[:, None], self.num_layers, self.num_heads),
            ),
            "slots are on the batch axis",
        ),
        (
            an_encoder(
                forward=lambda self, rows: rows.view(self.num_layers, 2, 1, self.num_heads, len(rows), -1),
            ),
            "cut with view alone: unpack_prefix",
        ),
        (
            an_encoder(
                forward=lambda self, rows: rows.view(self.num_layers, 2, self.num_heads, len(rows), -1),
            ),
            "cut with view alone, and without a batch axis",
        ),
        (
            an_encoder(
                forward=lambda self, rows: unpack_by_view(rows.detach()[None], self.num_layers, self.num_heads),
            ),
            "no gradient reaches embedding.weight: detach",
        ),
        (
            an_encoder(mlp=lambda width, mid, row: nn.Sequential(nn.Linear(width, mid), nn.Linear(mid, row))),
            "the tanh between",
        ),
        (
            an_encoder(
                mlp=lambda width, mid, row: nn.Sequential(
                    nn.Linear(width, mid), nn.Tanh(), nn.Linear(mid, row), nn.Tanh()
                )
            ),
            "between -1 and 1",
        ),
        (an_encoder(mlp=with_middle(nn.ReLU)), "is a ReLU: the thirty lines have a Tanh"),
        (an_encoder(mlp=with_middle(nn.GELU)), "is a GELU"),
        (an_encoder(table=lambda slots, width, row, mid: nn.Embedding(slots, width)), "nothing makes the rows longer"),
        (
            an_encoder(
                table=lambda slots, width, row, mid: nn.Embedding(slots, row),
                mlp=lambda width, mid, row: nn.Sequential(nn.Linear(row, mid), nn.Tanh(), nn.Linear(mid, row)),
            ),
            "with an MLP the embedding is short",
        ),
        (an_encoder(key_and_value=1), "the 2 for key and value is missing"),
        (
            an_encoder(
                table=lambda slots, width, row, mid: nn.Parameter(torch.randn(slots, row if mid is None else width))
            ),
            "make embedding an nn.Embedding",
        ),
        (NeedsSlots, "missing 1 required positional argument: 'slots'"),
        (lambda *sizes: torch.zeros(3), "should give an nn.Module, and gives one Tensor"),
        (
            an_encoder(mlp=lambda width, mid, row: nn.Linear(width, row)),
            r"mid_dim=7\) should be embedding.weight \[3, 10\], mlp.0.weight \[7, 10\].*and are embedding.weight",
        ),
    ],
    "check_published_count": [
        ([3840, 393216, 9437184, 6912], "have biases, too"),
        ([3840, 12 * 393728, 9455616, 6921], "once for each layer"),
        ([3840, 5 * 393728, 5 * 9455616, 6921], "once for each slot"),
        ([92160, 393728, 9455616, 6921], "the first is what the MLP makes"),
        ([2304, 393728, 9455616, 6921], "the lesson's 3 slots"),
        ([3840, 393728, 4727808, 6921], "the 2 for key and value is missing"),
        ([3840, 393728, 787968, 6921], "that is one layer's key and value"),
        ([3840, 393728, 393984, 6921], "for 12 layers, 12 \\* 2 \\* 768"),
        ([3840, 393216, 9455616, 6921], "adds 512 biases"),
        ([3840, 393728, 9437184, 6921], "adds as many biases"),
        ([3840, 393728, 9455616, 6912], "and adds 9 biases"),
        ([768, 393728, 9455616, 6921], "5 rows of 768"),
        (9860105, "that is their sum"),
        ([1, 2, 3, 4], "is not what comes out"),
    ],
    "check_alike": [
        (0.02, "nothing tells the slots apart"),
        (1.0, "nothing tells the slots apart"),
        (9.0, "one slot further than another"),
        (3, "nothing tells the slots apart"),
        (3.7, "is not what comes out"),
        ("small", "a number, please: 'small'"),
    ],
}
