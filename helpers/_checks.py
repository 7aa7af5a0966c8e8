"""The doors of the package: arguments of the wrong kind are refused with one sentence, and warnings point outside."""

import sys
import warnings
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor


def check_tensors(**arguments) -> None:
    """Raise TypeError for an argument that is neither a tensor nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got a {type(value).__name__}: torch.as_tensor makes one")


def check_whole(**arguments) -> None:
    """Raise TypeError for an argument that is neither a whole number nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Integral | torch.SymInt):
            got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(f"{name} must be a whole number, got {got}")


def check_share(**arguments) -> None:
    """Raise ValueError for an argument that is not a number from 0 to 1."""
    for name, value in arguments.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {value}")


def check_texts(**arguments) -> None:
    """Raise TypeError for one text where a list of texts is needed: a string is a sequence of strings too."""
    for name, value in arguments.items():
        if isinstance(value, str):
            raise TypeError(f"{name} must be a list of texts, got one text")


def warn_caller(message: str) -> None:
    """A warning that points at the line outside this package (and `with`) that caused it."""
    package = str(Path(__file__).parent)
    depth, frame = 1, sys._getframe()
    while frame and frame.f_code.co_filename.startswith((package, contextmanager.__code__.co_filename)):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)
