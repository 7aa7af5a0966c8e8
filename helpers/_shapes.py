"""Annotations of shapes: jaxtyping where it is installed, plain tensors where it is not.

The annotations document shapes; only the tests check them (`tests/conftest.py` switches jaxtyping's import hook on).
"""

try:
    from jaxtyping import Bool, Float, Shaped
except ModuleNotFoundError:
    from torch import Tensor

    class _Unchecked:
        def __class_getitem__(cls, _):
            return Tensor

    Bool = Float = Shaped = _Unchecked

Pair = tuple[str, str]  # a source and its target

__all__ = ["Bool", "Float", "Pair", "Shaped"]
