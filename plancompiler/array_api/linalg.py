"""Linear algebra of the array API, as far as it exists here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.array_api.dtypes import finfo
from plancompiler.frontend import functions
from plancompiler.frontend.functions import linalg as own
from plancompiler.ir import DType
from plancompiler.ir.operators import in_one_dtype
from plancompiler.ir.promotion import result_dtype

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
    return _product(own.vecdot, x1, x2, axis).cast(result_dtype(x1.dtype, x2.dtype))


def outer(x1: Any, x2: Any, /) -> Any:
    """All products of two vectors."""
    return _product(functions.outer, x1, x2)


def diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """The diagonal of each matrix [..., m, n]."""
    return own.diagonal(x, offset)


def trace(x: Any, /, *, offset: int = 0, dtype: DType | None = None) -> Any:
    """The sum of the diagonal of each matrix [..., m, n]."""
    total = own.trace(x if dtype is None else x.cast(dtype), offset)
    return total if dtype is None else total.cast(dtype)


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """The vector product along an axis of extent 3; the other axes broadcast."""
    return _product(own.cross, x1, x2, axis)


def vector_norm(
    x: Any,
    /,
    *,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    ord: float = 2,
) -> Any:
    """The norm of vectors along axes (all by default)."""
    sizes = abs(x)
    if ord == 0:
        return x.not_equal(0).cast(x.dtype).sum(axis, keepdims)
    if abs(ord) == math.inf:
        return sizes.max(axis, keepdims) if ord > 0 else sizes.min(axis, keepdims)
    if ord < 0:
        return (sizes**ord).sum(axis, keepdims) ** (1 / ord)
    return functions.norm(x, ord, axis, keepdims)


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: float | str | None = "fro") -> Any:
    """The norm of each matrix [..., m, n]."""
    return own.matrix_norm(x, "fro" if ord is None else ord, keepdims=keepdims)


def cholesky(x: Any, /, *, upper: bool = False) -> Any:
    """The triangular factor of each symmetric positive definite matrix."""
    return own.cholesky(x, upper)


def det(x: Any, /) -> Any:
    """The determinant of each matrix."""
    return own.det(x)


def eigh(x: Any, /) -> own.Eigh[Any]:
    """Eigenvalues and eigenvectors of each symmetric matrix."""
    return own.eigh(x)


def eigvalsh(x: Any, /) -> Any:
    """Eigenvalues of each symmetric matrix."""
    return own.eigvalsh(x)


def inv(x: Any, /) -> Any:
    """The inverse of each matrix."""
    return own.inv(x)


def matrix_power(x: Any, n: int, /) -> Any:
    """Each square matrix to a whole power."""
    return own.matrix_power(x, n)


def _above(x: Any, rtol: Any, least: float) -> Any:
    """Singular values, and which of them count: those above a share of the greatest."""
    values = own.svdvals(x)
    share = least * max(x.shape[-2:]) if rtol is None else rtol
    if hasattr(share, "shape"):
        share = functions.unsqueeze(share, -1)
    return values > values.max(-1, keepdims=True) * share


def matrix_rank(x: Any, /, *, rtol: Any = None) -> Any:
    """How many singular values of each matrix are above `rtol` times the greatest."""
    if not min(x.shape[-2:]):
        return functions.full_like(x.sum((-1, -2)).cast(DType.INT64), 0)
    return functions.count_nonzero(_above(x, rtol, finfo(x.dtype).eps), -1)


def pinv(x: Any, /, *, rtol: Any = None) -> Any:
    """The Moore-Penrose inverse of each matrix, by the singular values above `rtol` times the
    greatest.
    """
    if not min(x.shape[-2:]):
        return functions.matrix_transpose(x)
    u, s, vh = own.svd(x, full_matrices=False)
    counts = _above(x, rtol, finfo(x.dtype).eps)
    inverse = functions.where(counts, 1.0 / functions.where(counts, s, 1.0), 0.0)
    left = functions.matrix_transpose(vh) * functions.unsqueeze(inverse, -2)
    return left @ functions.matrix_transpose(u)


def qr(x: Any, /, *, mode: str = "reduced") -> own.Qr[Any]:
    """An orthogonal and a triangular factor of each matrix."""
    return own.qr(x, mode)


def slogdet(x: Any, /) -> own.Slogdet[Any]:
    """The sign and the logarithm of the absolute value of each determinant."""
    return own.slogdet(x)


def solve(x1: Any, x2: Any, /) -> Any:
    """The solution of each system of linear equations: one vector [n], or matrices [..., n, k]."""
    first, second = in_one_dtype((x1, x2))
    if second.ndim == 1:
        return functions.squeeze(own.solve(first, second.reshape((-1, 1))), -1)
    return own.solve(first, second) if second.ndim != first.ndim - 1 else _stacked(first, second)


def _stacked(first: Any, second: Any) -> Any:
    """Matrices as right-hand sides, where they could be taken for a vector for each matrix."""
    return own.solve(first, functions.unsqueeze(second, 0))


def svd(x: Any, /, *, full_matrices: bool = True) -> own.Svd[Any]:
    """The singular value decomposition of each matrix."""
    return own.svd(x, full_matrices)


def svdvals(x: Any, /) -> Any:
    """The singular values of each matrix."""
    return own.svdvals(x)
