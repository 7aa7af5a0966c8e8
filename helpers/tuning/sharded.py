"""Weights that FSDP2's `fully_shard` has spread over processes."""

from torch import Tensor, distributed, nn

if distributed.is_available():
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
else:  # a build of torch without it: nothing is sharded there
    FSDPModule = ()


def class_of(module: nn.Module) -> type:
    """The module's class, without what `fully_shard` puts in front of it."""
    classes = type(module).__mro__
    return classes[classes.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else classes[0]


def gather_for(module: nn.Module, name: str) -> None:
    """Let FSDP2 gather the module's weights for the method `name`, as it does for `forward`."""
    if isinstance(module, FSDPModule) and name not in vars(module):
        register_fsdp_forward_method(module, name)


def spread_again(module: nn.Module) -> None:
    """Free the weights that a forward pass of `module` has gathered and FSDP2 has kept, as it does with a root's."""
    if isinstance(module, FSDPModule):
        module.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this process may hold a part."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or what all processes hold of it: then all have to ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
