"""Public functions that add nothing to the definitions of their ops, and are derived from them.

What an op computes is said in its definition, which is the documentation of its function, too. The
protocols say to type checkers what such a function takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from plancompiler.errors import TracingError
from plancompiler.frontend.out import takes_out
from plancompiler.ir.operators import Scalar, TensorOperators, is_scalar
from plancompiler.ops.registry import op_def

Tensor = TypeVar("Tensor", bound=TensorOperators)
Axes = int | Sequence[int] | None


class Unary(Protocol):
    """A function of one tensor."""

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor: ...


class Binary(Protocol):
    """A function of two tensors, or of a tensor and a number, in any order."""

    def __call__(self, x: Any, y: Any, *, out: Any = None) -> Any: ...


def _named(kind: str, function: Callable[..., Any]) -> Any:
    function.__name__ = function.__qualname__ = kind
    function.__doc__ = op_def(kind).doc
    return takes_out(function)


def unary(kind: str) -> Unary:
    """The function of an op of one tensor."""

    def function(x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return x._unary(kind)  # noqa: SLF001  # the methods' own way, and the quickest

    named: Unary = _named(kind, function)
    return named


def arithmetic(kind: str) -> Binary:
    """The function of an op of two tensors that has a form with a number, too."""
    mirrored = op_def(kind).mirrored

    def function(x: Any, y: Any, *, out: Any = None) -> Any:
        if isinstance(x, TensorOperators):
            return x._binary(kind, y)  # noqa: SLF001  # the operators' own way, and the quickest
        if not isinstance(y, TensorOperators):
            raise _wanted(kind, x, y)
        if mirrored is not None:
            return y._binary(mirrored, x)  # noqa: SLF001
        return y._binary(kind, x, swapped=True)  # noqa: SLF001

    named: Binary = _named(kind, function)
    return named


def binary(kind: str) -> Binary:
    """The function of an op of two tensors; a number becomes a tensor of the other's dtype."""

    def function(x: Any, y: Any, *, out: Any = None) -> Any:
        if isinstance(x, TensorOperators) and is_scalar(y):
            y = x.beside(kind, plain_number(y))
        elif isinstance(y, TensorOperators) and is_scalar(x):
            x = y.beside(kind, plain_number(x))
        if not isinstance(x, TensorOperators) or not isinstance(y, TensorOperators):
            raise _wanted(kind, x, y)
        return x._binary(kind, y)  # noqa: SLF001

    named: Binary = _named(kind, function)
    return named


def plain_number(value: Any) -> Scalar:
    """A number of NumPy as one of Python."""
    number: Scalar = value.item() if hasattr(value, "item") else value
    return number


def _wanted(kind: str, x: object, y: object) -> TracingError:
    return TracingError(
        f"{kind} takes two tensors, or a tensor and a number",
        got=f"{type(x).__name__} and {type(y).__name__}",
        hint="bring arrays into a job through pc.input or pc.constant",
    )
