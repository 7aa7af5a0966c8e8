"""Random tensors for the cells in which only shapes and arithmetic count."""

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals of this shape, from a generator of their own: the same ones wherever the call stands.

    A first axis can be unpacked: `query, key, value = draw(3, 1, 8, 64)`.
    """
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
