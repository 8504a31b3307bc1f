"""Public functions that add nothing to the definitions of their ops, and are derived from them.

What an op computes is said in its definition, which is the documentation of its function, too. The
protocols say to type checkers what such a function takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from plancompiler.errors import AttributeValueError, DTypeError, TracingError
from plancompiler.frontend.out import takes_out
from plancompiler.ir import AttrValue
from plancompiler.ir.operators import Scalar, TensorOperators, in_one_dtype, is_scalar
from plancompiler.ir.promotion import dtypes_may_mix, floating_dtype, result_dtype
from plancompiler.ops.registry import op_def

Tensor = TypeVar("Tensor", bound=TensorOperators)
Axes = int | Sequence[int] | None


class Unary(Protocol):
    """A function of one tensor."""

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor: ...


class Binary(Protocol):
    """A function of two tensors, or of a tensor and a number, in any order."""

    def __call__(self, x: Any, y: Any, *, out: Any = None) -> Any: ...


class Scaled(Protocol):
    """A function of two tensors, of which the second counts `alpha` times."""

    def __call__(self, x: Any, y: Any, *, alpha: Scalar | None = None, out: Any = None) -> Any: ...


class Quotient(Protocol):
    """Division, whose result may be rounded: `rounding_mode` is "trunc", "floor" or None."""

    def __call__(
        self, x: Any, y: Any, *, rounding_mode: str | None = None, out: Any = None
    ) -> Any: ...


def _counts_as_floating(x: TensorOperators) -> bool:
    return isinstance(x, TensorOperators) and not x.dtype.is_floating and dtypes_may_mix()


_KEEP_WHOLE = frozenset({"ceil", "floor", "round", "trunc"})
"""Functions whose results are whole numbers, which so stay as they are."""


def _of_whole(kind: str, x: Tensor) -> Tensor:
    """A function of floating numbers of whole numbers or truth values."""
    if x.dtype.is_integer:
        if kind in _KEEP_WHOLE:
            return x.cast(x.dtype)
        if kind == "signbit":
            return x < 0
        if kind in ("isinf", "isnan"):
            return x.not_equal(x)
        if kind == "isfinite":
            return x.equal(x)
    return x.cast(floating_dtype(x.dtype))._unary(kind)  # noqa: SLF001  # as above


def joined(kind: str, tensors: Sequence[Tensor], first: int = 0, **attrs: AttrValue) -> Tensor:
    """An op whose inputs from `first` on have one dtype, the least that holds the numbers of all
    that are given.
    """
    try:
        return tensors[0]._apply(kind, tuple(tensors), attrs)[0]  # noqa: SLF001  # as `apply_one`, and quicker
    except DTypeError:
        mixed = in_one_dtype(tensors[first:])
        if all(new is old for new, old in zip(mixed, tensors[first:], strict=True)):
            raise
    every = (*tensors[:first], *mixed)
    return every[0]._apply(kind, every, attrs)[0]  # noqa: SLF001  # as above


def _named(kind: str, function: Callable[..., Any]) -> Any:
    function.__name__ = function.__qualname__ = kind
    function.__doc__ = op_def(kind).doc
    return takes_out(function)


def unary(kind: str) -> Unary:
    """The function of an op of one tensor. Where the op takes floating numbers only, whole numbers
    and truth values count as such.
    """

    def function(x: Tensor, *, out: Tensor | None = None) -> Tensor:
        try:
            return x._unary(kind)  # noqa: SLF001  # the methods' own way, and the quickest
        except DTypeError:
            if not _counts_as_floating(x):
                raise
        return _of_whole(kind, x)

    named: Unary = _named(kind, function)
    return named


def arithmetic(kind: str) -> Binary:
    """The function of an op of two tensors that has a form with a number, too."""
    named: Binary = _named(kind, _operation(kind))
    return named


def scaled(kind: str) -> Scaled:
    """The same for a sum or difference, whose second operand may count several times."""
    operate = _operation(kind)

    def function(x: Any, y: Any, *, alpha: Scalar | None = None, out: Any = None) -> Any:
        return operate(x, y if alpha is None else y * alpha)

    named: Scaled = _named(kind, function)
    return named


def quotient(kind: str) -> Quotient:
    """The same for division."""
    operate = _operation(kind)

    def function(x: Any, y: Any, *, rounding_mode: str | None = None, out: Any = None) -> Any:
        if rounding_mode is None:
            return operate(x, y)
        if rounding_mode not in ("trunc", "floor"):
            raise AttributeValueError(
                "a quotient is rounded in another way",
                got=repr(rounding_mode),
                expected="'trunc', 'floor' or None",
            )
        if rounding_mode == "trunc" and not (_is_whole(x) and _is_whole(y)):
            return operate(x, y)._unary("trunc")  # noqa: SLF001
        below = _operation("floor_divide")(x, y)
        if rounding_mode == "floor":
            return below
        # Exact for whole numbers of any size: the next one above a negative quotient with a rest.
        above = (x - below * y).not_equal(0) & (below < 0)
        return below + above.cast(below.dtype)

    named: Quotient = _named(kind, function)
    return named


def _is_whole(value: Any) -> bool:
    if isinstance(value, TensorOperators):
        return not value.dtype.is_floating
    return not isinstance(plain_number(value), float)


def _operation(kind: str) -> Callable[[Any, Any], Any]:
    mirrored = op_def(kind).mirrored

    def function(x: Any, y: Any, *, out: Any = None) -> Any:
        if isinstance(x, TensorOperators):
            return x._binary(kind, y)  # noqa: SLF001  # the operators' own way, and the quickest
        if not isinstance(y, TensorOperators):
            raise _wanted(kind, x, y)
        if mirrored is not None:
            return y._binary(mirrored, x)  # noqa: SLF001
        return y._binary(kind, x, swapped=True)  # noqa: SLF001

    return function


def binary(kind: str) -> Binary:
    """The function of an op of two tensors; a number becomes a tensor of the other's dtype."""

    def function(x: Any, y: Any, *, out: Any = None) -> Any:
        if isinstance(x, TensorOperators) and is_scalar(y):
            y = x.beside(kind, plain_number(y))
        elif isinstance(y, TensorOperators) and is_scalar(x):
            x = y.beside(kind, plain_number(x))
        if not isinstance(x, TensorOperators) or not isinstance(y, TensorOperators):
            raise _wanted(kind, x, y)
        try:
            return x._binary(kind, y)  # noqa: SLF001
        except DTypeError:
            if not (_counts_as_floating(x) and _counts_as_floating(y)):
                raise
        dtype = floating_dtype(result_dtype(x.dtype, y.dtype))
        return x.cast(dtype)._binary(kind, y.cast(dtype))  # noqa: SLF001

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
