"""Prefix tuning: learned keys and values in front of the real ones."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from helpers._checks import check_share, check_tensors, check_whole
from helpers._shapes import Bool, Float, Shaped


def join_prefix(
    prefix_key: Float[Tensor, "prefix_batch heads prefix head_dim"],
    prefix_value: Float[Tensor, "prefix_batch heads prefix value_dim"],
    key: Float[Tensor, "batch heads key head_dim"],
    value: Float[Tensor, "batch heads key value_dim"],
    mask: Shaped[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    *,
    prefix_mask: Bool[Tensor, "prefix_batch prefix"] | None = None,
):
    """Put a prefix in front of keys and values, and lengthen mask and bias by as many columns.

        key'  = [prefix_key ; key]     value' = [prefix_value ; value]     on the sequence axis (dim 2)
        mask' = [visible ; mask]       bias'  = [0 ; bias]                 on the key axis (the last)

    Nothing is changed in place. The prefix takes the dtype and device of the keys: its parameters may stay in
    float32 for the optimiser while the model runs in bfloat16.

    Args:
        prefix_key, prefix_value: `[batch or 1, heads, prefix, head_dim]`; one prefix serves a whole batch.
        key, value: `[batch, heads, key, head_dim]`.
        mask: `[..., key]`, bool (True = may attend: new columns True) or float (added to the scores: new columns 0.0).
        bias: `[..., key]`, added to the scores: new columns 0.
        prefix_mask: bool `[batch or 1, prefix]`, False for slots that an example does not have; None if it has all.

    Returns `(key, value, mask, bias)` of `prefix + key` columns; a mask or bias of None stays None, except that a
    `prefix_mask` needs a mask.

    A mask or bias may also have one column for all keys.

    Raises ValueError for shapes that do not fit; TypeError for a mask that is neither bool nor float, or a bias that is
    not float.

    Source: Li & Liang 2021, "Prefix-Tuning", section 4.2.
    """
    check_tensors(
        prefix_key=prefix_key,
        prefix_value=prefix_value,
        key=key,
        value=value,
        mask=mask,
        bias=bias,
        prefix_mask=prefix_mask,
    )
    for name, prefix, content in (("key", prefix_key, key), ("value", prefix_value, value)):
        if not (
            prefix.ndim == content.ndim == 4
            and prefix.shape[0] in (1, content.shape[0])
            and prefix.shape[1] == content.shape[1]
            and prefix.shape[3] == content.shape[3]
        ):
            raise ValueError(
                f"the prefix {name} {list(prefix.shape)} does not fit in front of the {name} {list(content.shape)}: "
                "both are [batch, heads, seq, head_dim], with the same heads and head_dim, and the prefix's batch "
                "is 1 or the same"
            )
    if prefix_key.shape[2] != prefix_value.shape[2] or key.shape[2] != value.shape[2]:
        raise ValueError(
            f"every key needs one value, got prefix {list(prefix_key.shape)} and {list(prefix_value.shape)}, "
            f"content {list(key.shape)} and {list(value.shape)}"
        )
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"the bias is added to the scores and must be float, got {bias.dtype}: pass a mask as mask")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"the mask must be bool (True = may attend) or float (added to the scores), got {mask.dtype}: "
            "use `mask.bool()` for a 0/1 mask"
        )
    prefix_length, key_length = prefix_key.shape[2], key.shape[2]
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is not None and tensor.ndim and tensor.shape[-1] not in (1, key_length):
            raise ValueError(
                f"the {name} {list(tensor.shape)} needs one column for each of the {key_length} keys "
                f"{list(key.shape)}: give it without the prefix, whose columns are added here"
            )
    slots = (prefix_key.shape[0], prefix_length)
    if prefix_mask is not None and (prefix_mask.dtype != torch.bool or prefix_mask.shape != slots):
        raise ValueError(
            f"the prefix_mask must be bool [batch, prefix] = {list(slots)}, got {prefix_mask.dtype} "
            f"{list(prefix_mask.shape)}"
        )

    def in_front(prefix, content):
        prefix = prefix.to(content).expand(content.shape[0], -1, -1, -1)
        return torch.cat([prefix, content], dim=2)

    return (
        in_front(prefix_key, key),
        in_front(prefix_value, value),
        with_prefix_columns(mask, prefix_length, key_length, prefix_mask),
        with_prefix_columns(bias, prefix_length, key_length),
    )


def with_prefix_columns(
    mask: Shaped[Tensor, "..."] | None,
    prefix_length: int,
    key_length: int,
    prefix_mask: Bool[Tensor, "prefix_batch prefix"] | None = None,
) -> Shaped[Tensor, "..."] | None:
    """A mask or bias `[..., key]` with the prefix's columns in front: True if it is bool, 0.0 if it is added.

    Where `prefix_mask` `[batch or 1, prefix]` is False, they are False, or -inf. Without it, None stays None.
    """
    if prefix_mask is not None and mask is None:
        mask = torch.ones(1, 1, 1, key_length, dtype=torch.bool, device=prefix_mask.device)
    if mask is None:
        return None
    is_bool, columns = mask.dtype == torch.bool, prefix_length + key_length
    mask = F.pad(mask.expand(*mask.shape[:-1], key_length), (prefix_length, 0), value=True if is_bool else 0.0)
    if prefix_mask is not None:
        allowed = F.pad(prefix_mask.to(mask.device), (0, key_length), value=True)[:, None, None, :]
        mask = mask & allowed if is_bool else torch.where(allowed, mask, -torch.inf)
    if is_exporting():  # lengths may be left open, and the kernel is chosen later
        return mask.contiguous()
    # A GPU's fused attention copies a mask, in every layer, unless its rows begin at multiples of 8 numbers.
    return F.pad(mask.contiguous(), (0, -columns % 8))[..., :columns]


def is_exporting() -> bool:
    """Whether torch.export is tracing. torch's own function says so under torch.compile too, before torch 2.13."""
    return torch.compiler._is_exporting_flag


def split_prefix(
    rows: Float[Tensor, "batch prefix row_dim"], num_layers: int, num_heads: int, head_dim: int
) -> Float[Tensor, "layers 2 batch heads prefix head_dim"]:
    """The key and the value of each layer, from flat rows, one for each slot of a prefix.

        [batch, prefix, layers * 2 * heads * head_dim]  ->  [layers, 2, batch, heads, prefix, head_dim]

    The numbers of a row are in the order layer, key or value, head, feature; so `for key, value in split_prefix(...)`
    gives each layer its pair, `[batch, heads, prefix, head_dim]`. It is a view where the rows allow one.

    Args:
        rows: `[batch, prefix, layers * 2 * heads * head_dim]`.
        num_layers, num_heads, head_dim: of the stack that the prefix goes into.

    Raises ValueError for rows of another width or number of axes, and for sizes below 1.

    Source: Liu et al. 2022, "P-Tuning v2", section 3, whose published code says it with `view`, `permute`, `split`.
    """
    check_tensors(rows=rows)
    sizes = {"num_layers": num_layers, "num_heads": num_heads, "head_dim": head_dim}
    check_whole(**sizes)
    if min(sizes.values()) < 1:
        raise ValueError(f"the sizes must be at least 1, got {sizes}")
    width = num_layers * 2 * num_heads * head_dim
    if rows.ndim != 3 or rows.shape[-1] != width:
        raise ValueError(
            f"rows must be [batch, prefix, layers * 2 * heads * head_dim], here [batch, prefix, {num_layers} * 2 * "
            f"{num_heads} * {head_dim} = {width}], got {list(rows.shape)}"
        )
    return rearrange(rows, "b p (l kv h d) -> l kv b h p d", l=num_layers, kv=2, h=num_heads, d=head_dim)


class PrefixEncoder(nn.Module):
    """The learned keys and values of one prefix, for every layer of a stack.

    Each of the `prefix_length` slots is one row of `num_layers * 2 * num_heads * head_dim` numbers, in the order
    layer, key or value, head, feature. Without `mid_dim` these rows are the parameters. With `mid_dim`, a smaller
    embedding goes through an MLP that makes them (the reparameterisation):

        rows = Linear_2(tanh(Linear_1(embedding)))      embedding [prefix, num_heads * head_dim]

    The MLP is needed only while training: `fold` returns the same prefix without it.

    Args:
        prefix_length: number of slots; 0 is a prefix that changes nothing.
        num_layers, num_heads, head_dim: of the stack that the prefix goes into.
        mid_dim: width of the MLP, or None for none.
        dropout: probability of dropping a number of the prefix while training.
        init_std: standard deviation of the first rows, None for 0.02: small, so that the untrained prefix starts near
            the frozen model. But slots that start nearly equal stay alike; from 1.0 they start apart (lesson 5). Only
            without an MLP, whose embedding starts from N(0, 1).

    Raises ValueError if a size is below 1 (prefix_length: below 0), for a negative init_std, or one with an MLP.

    Source: Li & Liang 2021, sections 4.2 (the prefix) and 4.3 (the MLP).
    """

    def __init__(
        self,
        prefix_length: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        *,
        mid_dim: int | None = None,
        dropout: float = 0.0,
        init_std: float | None = None,
    ):
        super().__init__()
        sizes = {"num_layers": num_layers, "num_heads": num_heads, "head_dim": head_dim}
        if mid_dim is not None:
            sizes["mid_dim"] = mid_dim
        check_whole(prefix_length=prefix_length, **sizes)
        check_share(dropout=dropout)
        if prefix_length < 0 or min(sizes.values()) < 1:
            raise ValueError(f"a prefix needs positive sizes, got prefix_length={prefix_length}, {sizes}")
        if init_std is not None and mid_dim is not None:
            raise ValueError(f"init_std is for a prefix without an MLP, got init_std={init_std}, mid_dim={mid_dim}")
        init_std = 0.02 if init_std is None else init_std
        if not 0 <= init_std < float("inf"):
            raise ValueError(f"init_std must be a finite number of at least 0, got {init_std}")
        self.prefix_length = prefix_length
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.mid_dim = mid_dim
        inner_dim = num_heads * head_dim
        row_dim = num_layers * 2 * inner_dim
        self.dropout = nn.Dropout(dropout)
        if mid_dim is None:
            self.embedding = nn.Parameter(init_std * torch.randn(prefix_length, row_dim))
            self.mlp = nn.Identity()
        else:
            self.embedding = nn.Parameter(torch.randn(prefix_length, inner_dim))
            self.mlp = nn.Sequential(nn.Linear(inner_dim, mid_dim), nn.Tanh(), nn.Linear(mid_dim, row_dim))

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(num_layers, num_heads, head_dim)`: what a stack must have to take this prefix."""
        return self.num_layers, self.num_heads, self.head_dim

    def forward(self, batch_size: int = 1) -> Float[Tensor, "layers 2 batch heads prefix head_dim"]:
        """`[layers, 2, batch, heads, prefix, head_dim]`, so that a loop gives each layer its pair:

            for key, value in encoder(): ...        each [batch, heads, prefix, head_dim]

        The rows are computed once and shared by the batch without a copy. Raises ValueError for a negative batch_size.
        """
        check_whole(batch_size=batch_size)
        if batch_size < 0:
            raise ValueError(f"batch_size must be at least 0, got {batch_size}")
        rows = self.dropout(self.mlp(self.embedding))[None]
        return split_prefix(rows, *self.shape).expand(-1, -1, batch_size, -1, -1, -1)

    @classmethod
    def from_key_values(
        cls, key_values: Float[Tensor, "layers 2 1 heads prefix head_dim"], *, dropout: float = 0.0
    ) -> "PrefixEncoder":
        """An encoder without MLP whose prefix is a copy of `key_values`, `[layers, 2, 1, heads, prefix, head_dim]`.

        Use it to start from real activations: the keys and values that a frozen model computes for some words.

        Raises ValueError for another shape.
        """
        check_tensors(key_values=key_values)
        if key_values.ndim != 6 or key_values.shape[1:3] != (2, 1):
            raise ValueError(
                f"key_values must be [layers, 2, 1, heads, prefix, head_dim], got shape {list(key_values.shape)}"
            )
        num_layers, _, _, num_heads, prefix_length, head_dim = key_values.shape
        with torch.device("meta"):  # draws no random numbers
            encoder = cls(prefix_length, num_layers, num_heads, head_dim, dropout=dropout)
        encoder.embedding = nn.Parameter(rearrange(key_values.detach().clone(), "l kv 1 h p d -> p (l kv h d)"))
        return encoder

    def fold(self) -> "PrefixEncoder":
        """A new encoder without MLP that holds the prefix as it is now."""
        rows = self.mlp(self.embedding)[None]
        folded = self.from_key_values(split_prefix(rows, *self.shape), dropout=self.dropout.p)
        return folded.train(self.training)

    def extra_repr(self) -> str:
        return (
            f"prefix_length={self.prefix_length}, num_layers={self.num_layers}, num_heads={self.num_heads}, "
            f"head_dim={self.head_dim}, mid_dim={self.mid_dim}"
        )
