"""Linear algebra of the array API, as far as it exists here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.frontend import functions
from plancompiler.ir import DType
from plancompiler.ir.operators import in_one_dtype

Axes = int | Sequence[Sequence[int]]


def _product(function: Callable[..., Any], x1: Any, x2: Any, *how: Any) -> Any:
    """A product of two tensors in the dtype that both have together."""
    return function(*in_one_dtype((x1, x2)), *how)


def matmul(x1: Any, x2: Any, /) -> Any:
    """The matrix product over the last two axes; leading axes broadcast."""
    return x1 @ x2


def matrix_transpose(x: Any, /) -> Any:
    """Each matrix [..., m, n] transposed."""
    return functions.matrix_transpose(x)


def tensordot(x1: Any, x2: Any, /, *, axes: Axes = 2) -> Any:
    """Sums of products over pairs of axes."""
    return _product(functions.tensordot, x1, x2, axes)


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Sums of products along an axis of two tensors, whose other axes broadcast."""
    return functions.vecdot(x1, x2, axis)


def outer(x1: Any, x2: Any, /) -> Any:
    """All products of two vectors."""
    return _product(functions.outer, x1, x2)


def diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """The diagonal of each matrix [..., m, n]."""
    return functions.diagonal(x, offset)


def trace(x: Any, /, *, offset: int = 0, dtype: DType | None = None) -> Any:
    """The sum of the diagonal of each matrix [..., m, n]."""
    total = functions.trace(x if dtype is None else x.cast(dtype), offset)
    return total if dtype is None else total.cast(dtype)


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """The vector product along an axis of extent 3; the other axes broadcast."""
    return functions.cross(x1, x2, axis)


def vector_norm(
    x: Any,
    /,
    *,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    ord: float = 2,
) -> Any:
    """The norm of vectors along axes (all by default)."""
    if axis is None and not x.ndim:
        x, axis, keepdims = x.reshape((1,)), 0, False
    sizes = abs(x)
    if ord == 0:
        return x.not_equal(0).cast(x.dtype).sum(axis, keepdims)
    if ord == math.inf or ord == -math.inf:
        return sizes.max(axis, keepdims) if ord > 0 else sizes.min(axis, keepdims)
    if ord < 0:
        return (sizes**ord).sum(axis, keepdims) ** (1 / ord)
    return functions.norm(x, ord, axis, keepdims)
