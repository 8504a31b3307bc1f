"""Functions of each element, under the names and with the arguments of the array API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.frontend import functions
from plancompiler.ir.operators import TensorOperators, is_scalar

_OF_ONE = {
    "abs": "abs",
    "acos": "acos",
    "acosh": "acosh",
    "asin": "asin",
    "asinh": "asinh",
    "atan": "atan",
    "atanh": "atanh",
    "bitwise_invert": "bitwise_not",
    "ceil": "ceil",
    "cos": "cos",
    "cosh": "cosh",
    "exp": "exp",
    "expm1": "expm1",
    "floor": "floor",
    "isfinite": "isfinite",
    "isinf": "isinf",
    "isnan": "isnan",
    "log": "log",
    "log10": "log10",
    "log1p": "log1p",
    "log2": "log2",
    "logical_not": "logical_not",
    "negative": "neg",
    "reciprocal": "reciprocal",
    "round": "round",
    "sign": "sign",
    "signbit": "signbit",
    "sin": "sin",
    "sinh": "sinh",
    "sqrt": "sqrt",
    "square": "square",
    "tan": "tan",
    "tanh": "tanh",
    "trunc": "trunc",
}
"""Functions of one tensor by the names that they have here."""
_OF_TWO = {
    "add": "add",
    "atan2": "atan2",
    "bitwise_and": "bitwise_and",
    "bitwise_left_shift": "shift_left",
    "bitwise_or": "bitwise_or",
    "bitwise_right_shift": "shift_right",
    "bitwise_xor": "bitwise_xor",
    "copysign": "copysign",
    "divide": "div",
    "equal": "equal",
    "floor_divide": "floor_divide",
    "greater": "greater",
    "greater_equal": "greater_equal",
    "hypot": "hypot",
    "less": "less",
    "less_equal": "less_equal",
    "logaddexp": "logaddexp",
    "logical_and": "logical_and",
    "logical_or": "logical_or",
    "logical_xor": "logical_xor",
    "maximum": "maximum",
    "minimum": "minimum",
    "multiply": "mul",
    "nextafter": "nextafter",
    "not_equal": "not_equal",
    "pow": "pow",
    "remainder": "remainder",
    "subtract": "sub",
}
"""Functions of two tensors, or of a tensor and a number."""


def _of_one(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, /) -> Any:
        return function(x)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


def _of_two(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(x1: Any, x2: Any, /) -> Any:
        return function(x1, x2)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


def positive(x: Any, /) -> Any:
    """The tensor itself, as a copy."""
    return +x


def real(x: Any, /) -> Any:
    """The tensor itself, as a copy: there are no complex numbers."""
    return +x


conj = real


def imag(x: Any, /) -> Any:
    """Zeros: there are no complex numbers."""
    return functions.zeros_like(x)


def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """The elements, but not below `min` nor above `max`: numbers, tensors that broadcast, or None
    for no bound.
    """
    for bound in (min, max):
        if isinstance(bound, TensorOperators) or bound is None:
            continue
        if not is_scalar(bound):
            raise UsageError("a bound is a number or a tensor", got=type(bound).__name__)
    low = min if min is None else functions.maximum(x, min)
    low = x if low is None else low
    bounded = low if max is None else functions.minimum(low, max)
    return +x if bounded is x else bounded


globals().update({name: _of_one(name, getattr(functions, own)) for name, own in _OF_ONE.items()})
globals().update({name: _of_two(name, getattr(functions, own)) for name, own in _OF_TWO.items()})

__all__ = ["clip", "conj", "imag", "positive", "real"]
__all__ += [*_OF_ONE, *_OF_TWO]  # noqa: PLE0604  # the names of the tables
