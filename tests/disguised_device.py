"""A second device for machines without one: the CPU in disguise, under the name "accel".

Tensors on it are plain tensors on another device, as those of a GPU: modules move there with `.to`, autograd and the
optimisers take the paths that they take on a GPU, numpy cannot read them. What is computed is computed by the CPU's
kernels, on the same memory. An operation that is given tensors of both devices is refused, with torch's own sentence.
As on a GPU, three things are admitted: a CPU tensor without axes where numbers are combined one by one, CPU indices
inside of square brackets, and copies from one device to the other.

How: torch lets Python register a backend ("PrivateUse1"). A tensor's storage there is given the address of the CPU's
memory and keeps it alive. Operations that only look at the same memory in another way run as they are. For any other
one without a composite kernel there is a fallback: it hands the operation CPU tensors on the same memory.

A process cannot take it back, and torch then counts an accelerator. So only a process of its own may call
`register()`: see test_second_device.py.
"""

import contextlib
import functools

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "accel"
# torch says of this part that it may change without notice.
WANTING = (
    ""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and hasattr(torch._C, "_acc")
    else f"torch {torch.__version__} cannot register a backend that is written in Python"
)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten
# They make another view of the same memory, by kernels that ask for no device.
VIEWS = (
    aten.as_strided.default,
    aten.view.default,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
)
FILLING = ("aten::fill_", "aten::masked_fill", "aten::masked_fill_")
INDEXING = ("aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")


class _Module:
    """What `torch.accel` answers. There is one generator of random numbers, the CPU's."""

    def is_available(self):
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self):
        return False

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def manual_seed_all(self, seed):
        pass

    def device(self, device):
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)


@functools.cache
def register() -> torch.device:
    """Make the device known to this process, for good."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for view in VIEWS:
        library.impl(view, functools.partial(view.redispatch, _CPU))
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    library.impl("_copy_from", _copy_from)
    library.impl("_fused_sdp_choice", lambda *args, **kwargs: 0)  # torch's plain one: there is no fused kernel
    anything = torch.library.Library("_", "IMPL")
    anything.fallback(_compute, "PrivateUse1")
    register.libraries = library, anything  # with a library go its kernels
    torch.UntypedStorage.__new__ = staticmethod(_new_storage)
    # A GPU's parameters keep their identity when a module moves, so that shared ones stay shared. Here torch would
    # make new ones.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return torch.device(NAME, 0)


def _tensors(arguments) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _is_ours(tensor: torch.Tensor) -> bool:
    return tensor.device.type == NAME


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as that of a CPU tensor, on the device."""
    ours = torch._C._acc.create_empty_tensor([0], tensor.dtype)
    _take_memory(ours, tensor)
    return ours


def _take_memory(ours: torch.Tensor, tensor: torch.Tensor) -> None:
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    aten.set_.source_Storage_storage_offset.redispatch(_CPU, ours, _storage(tensor.untyped_storage()), *layout)


def _storage(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device at the address of the CPU's, which lives as long."""
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), memory.nbytes())
    storage.on_cpu = memory
    return storage


def _new_storage(cls, *args, device=None, **kwargs) -> torch.UntypedStorage:
    """What copy.deepcopy and pickle make storages with: torch itself finds no allocator for this device."""
    if device is not None and torch.device(device).type == NAME:
        return _storage(torch.UntypedStorage(*args))
    return torch._C.StorageBase.__new__(cls, *args, device=device, **kwargs)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as that of a tensor on the device, on the CPU."""
    storage = tensor.untyped_storage()
    if not hasattr(storage, "on_cpu"):  # one that torch made itself for a moment, to write a file
        memory = storage.data_ptr(), torch.device("cpu"), storage.nbytes()
        storage.on_cpu = torch._C._construct_storage_from_data_pointer(*memory)
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage.on_cpu, *layout)


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return _on_device(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return _on_device(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    source, to = (_on_cpu(tensor) if _is_ours(tensor) else tensor for tensor in (source, target))
    to.copy_(source)
    return target


def _check_devices(operation, arguments) -> None:
    schema = operation._schema
    takes_numbers = torch.Tag.pointwise in operation.tags or schema.name in FILLING + INDEXING
    args, kwargs = arguments
    if schema.name in INDEXING:
        args = args[:1] + args[2:]  # without the indices
    for tensor in _tensors((args, kwargs)):
        if not _is_ours(tensor) and not (tensor.ndim == 0 and takes_numbers):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {tensor.device}! (when calling {schema.name}, with a tensor {list(tensor.shape)})"
            )
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.Generator):
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{leaf.device.type}'")


def _compute(operation, *args, **kwargs):
    """The fallback: the CPU's kernel on the tensors' memory, once they are known to lie on this device."""
    _check_devices(operation, (args, kwargs))
    ours = [tensor for tensor in _tensors((args, kwargs)) if _is_ours(tensor)]
    on_cpu = {id(tensor): _on_cpu(tensor) for tensor in ours}
    known = {id(on_cpu[id(tensor)]): tensor for tensor in ours}
    before = {key: _layout(there) for key, there in on_cpu.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = "cpu"
    args = _with_tensors_for_numbers(operation, args, ours)
    args, kwargs = tree_map(lambda leaf: on_cpu.get(id(leaf), leaf), (args, kwargs))
    results = operation(*args, **kwargs)
    for tensor in ours:
        if _layout(on_cpu[id(tensor)]) != before[id(tensor)]:  # resized, or turned, in place
            _take_memory(tensor, on_cpu[id(tensor)])

    def back(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else _on_device(leaf)

    return tree_map(back, results)


def _with_tensors_for_numbers(operation, args, ours) -> list:
    """A Python number that stands for a tensor arrives as a number, which the operation would not take again."""
    dtype = torch.float64 if any(tensor.is_floating_point() for tensor in ours) else torch.float32
    return [
        torch.tensor(value, dtype=dtype if isinstance(value, float) else None)
        if isinstance(value, bool | int | float) and isinstance(wanted.type, torch.TensorType)
        else value
        for value, wanted in zip(args, operation._schema.arguments, strict=False)
    ]


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride(), tensor.storage_offset()
