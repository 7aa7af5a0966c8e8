"""Another processor in disguise: what hangs on the last digits of a sum shows itself here.

Processors add the terms of a sum in different orders, and have their own code for exponentials. `RoundingNoise` is a
machine that computes what this one does, but for a relative error of at most 8 units in the last place (1e-6 in
float32) on each result of a matrix product, a sum, a softmax and the like:

    ROUNDING_NOISE=1 python -m pytest -n 2 --dist loadfile notebooks     # names every cell whose output moves
    ROUNDING_NOISE=1 python -m pytest -n 2 --dist loadfile tests

The number is the machine's seed. Like a real machine, it gives the same result when it computes the same thing again.
"""

import os
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

UNITS_IN_THE_LAST_PLACE = 8
# Of these operations' results, float32 and float64 alone: half precision rounds once, at the end of a float32 sum.
NOISY = set(
    """
    mm bmm addmm baddbmm addmv mv dot vdot
    sum mean var var_mean std std_mean cumsum logsumexp linalg_vector_norm norm prod
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    exp log tanh sigmoid rsqrt pow erf gelu silu logaddexp softplus sin cos
    tanh_backward sigmoid_backward gelu_backward silu_backward
    native_layer_norm native_layer_norm_backward _fused_rms_norm embedding_dense_backward nll_loss_forward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    """.split()
)
_PLAIN = (Tensor, torch.nn.Parameter)


class RoundingNoise(TorchDispatchMode):
    """The machine of the given seed, while it is entered."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.generator = torch.Generator()  # of its own: the lesson's random numbers stay what they are

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name.removeprefix("aten::") not in NOISY or not all(kind in _PLAIN for kind in types):
            return result
        key = self.key(function, args, kwargs or {})
        return tree_map(lambda part: self.moved(part, key) if isinstance(part, Tensor) else part, result)

    def moved(self, tensor: Tensor, key: int) -> Tensor:
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.device.type != "cpu":
            return tensor
        self.generator.manual_seed(key)
        relative = torch.rand(tensor.shape, generator=self.generator, dtype=tensor.dtype).mul_(2).sub_(1)
        return tensor.mul_(relative.mul_(UNITS_IN_THE_LAST_PLACE * torch.finfo(tensor.dtype).eps).add_(1))

    def key(self, function, args: tuple, kwargs: dict) -> int:
        """A number that depends on the machine, the operation and what it is given, and on nothing else."""
        number = crc32(f"{self.seed} {function}".encode())
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, Tensor) and value.device.type == "cpu":
                number = crc32(str(value.shape).encode(), number)
                number = crc32(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy(), number)
            else:
                number = crc32(str(value).encode(), number)
        return number


def enter_if_asked_for() -> None:
    """Become the machine that the environment variable ROUNDING_NOISE names, in this thread, for good."""
    if "ROUNDING_NOISE" in os.environ:
        RoundingNoise(int(os.environ["ROUNDING_NOISE"])).__enter__()
