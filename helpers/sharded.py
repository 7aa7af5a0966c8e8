"""Weights that FSDP2's `fully_shard` has spread over processes."""

from torch import Tensor, nn


def class_of(module: nn.Module) -> type:
    """The module's class, without what FSDP2's `fully_shard` puts in front of it."""
    classes = type(module).__mro__
    names = [each.__name__ for each in classes]
    return classes[names.index("FSDPModule") + 1] if "FSDPModule" in names else classes[0]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this process may hold a part."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or what all processes hold of it: then all have to ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
