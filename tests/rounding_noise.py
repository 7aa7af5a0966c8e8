"""Another processor in disguise: what hangs on the last digits of a sum shows itself here.

Processors add the terms of a sum in different orders, and have their own code for exponentials. `RoundingNoise` is a
machine that computes what this one does, but for a relative error of at most 8 units in the last place (1e-6 in
float32) on each result of a matrix product, a sum, a softmax and the like:

    ROUNDING_NOISE=1 python -m pytest -n 2 --dist loadfile notebooks  # names every cell whose output moves

The number is the machine's seed. Like a real machine, it gives the same result when it computes the same thing again:

- an elementwise function errs by its result alone: `exp(x)` is the same wherever x stands;
- a sum or a softmax errs by its result and its number of terms: a row's is the same in any batch;
- a matrix product errs by all that it is given, since its code differs with the shapes.

Whole numbers are left alone: they are counts, copies, or the softmax of one score, and exact everywhere.
"""

import os
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

UNITS_IN_THE_LAST_PLACE = 8
ELEMENTWISE = set(
    """
    exp expm1 log log1p tanh sigmoid rsqrt pow erf gelu silu softplus logaddexp sin cos
    tanh_backward sigmoid_backward gelu_backward silu_backward
    """.split()
)
REDUCTIONS = set(
    """
    sum mean var var_mean std std_mean prod cumsum logsumexp norm linalg_vector_norm
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data nll_loss_forward
    """.split()
)
PRODUCTS = set(
    """
    mm bmm addmm baddbmm addmv mv dot vdot embedding_dense_backward native_layer_norm native_layer_norm_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    """.split()
)
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}  # half precision rounds once, after a float32 sum


class RoundingNoise(TorchDispatchMode):
    """The machine of the given seed, while it is entered."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name not in ELEMENTWISE | REDUCTIONS | PRODUCTS or not {Tensor, torch.nn.Parameter}.issuperset(types):
            return result
        key = crc32(f"{self.seed} {name}".encode())
        if name in PRODUCTS:
            key = _checksum((args, kwargs), key)
        given = args[0].numel() if name in REDUCTIONS else 1
        return tree_map(lambda part: _moved(part, key, given, name in PRODUCTS), result)


def _checksum(values, key: int) -> int:
    for value in tree_flatten(values)[0]:
        if isinstance(value, Tensor) and value.device.type == "cpu":
            key = crc32(str(value.shape).encode(), key)
            key = crc32(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy(), key)
        else:
            key = crc32(str(value).encode(), key)
    return key


def _moved(result, key: int, given: int, by_place: bool):
    """`result` times 1 + its relative errors; they depend on `key`, the value, the terms of each sum, and the place."""
    if not isinstance(result, Tensor) or result.dtype not in _BITS or result.device.type != "cpu" or not result.numel():
        return result
    words = result.detach().contiguous().view(_BITS[result.dtype]).to(torch.int64)
    words = words + (key + 2**32 * (given // result.numel()))
    if by_place:
        words += torch.arange(result.numel()).view(result.shape) * 0x9E3779B9
    for _ in range(2):  # the mixing of MurmurHash3's end, whose products wrap around
        words = (words ^ (words >> 31)) * -0x4B47D0C5A3C6F2B3
    relative = ((words >> 32) & 0xFFFFFF).to(result.dtype) / 0x800000 - 1  # from -1 to 1
    relative = relative.masked_fill(result.detach() == result.detach().round(), 0)
    return result.mul_(relative.mul_(UNITS_IN_THE_LAST_PLACE * torch.finfo(result.dtype).eps).add_(1))


def enter_if_asked_for() -> None:
    """Become the machine that the environment variable ROUNDING_NOISE names, in this thread, for good."""
    if "ROUNDING_NOISE" in os.environ:
        RoundingNoise(int(os.environ["ROUNDING_NOISE"])).__enter__()
