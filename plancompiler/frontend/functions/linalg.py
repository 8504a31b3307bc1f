"""Linear algebra of matrices, the last two axes. Axes before them are a batch, and may be split.

The names are those of `numpy.linalg`; where it has none, those of `torch.linalg`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions import reduction, shape
from plancompiler.frontend.functions.derived import Axes, Tensor
from plancompiler.frontend.functions.elementwise import full_like, maximum, ones_like, where
from plancompiler.frontend.functions.linear import matmul
from plancompiler.frontend.functions.shape import unsqueeze
from plancompiler.frontend.out import takes_out
from plancompiler.hooks.other_names import no_such_name
from plancompiler.ir.operators import (
    TensorOperators,
    in_dtype,
    normalize_axes,
    one_axis,
    whole_numbers,
)
from plancompiler.ops import linalg as _ops
from plancompiler.ops.check import broadcast_shapes
from plancompiler.ops.registry import apply, apply_one, apply_source

__all__ = [
    "cholesky",
    "cholesky_inverse",
    "cholesky_solve",
    "cond",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "householder_product",
    "inv",
    "logdet",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_solve",
    "matrix_exp",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "multi_dot",
    "norm",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    "svdvals",
    "tensorinv",
    "tensorsolve",
    "trace",
    "transposed",
    "vander",
    "vecdot",
    "vector_norm",
]


class Eigh(NamedTuple, Generic[Tensor]):
    """What `eigh` gives."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class Qr(NamedTuple, Generic[Tensor]):
    """What `qr` gives."""

    Q: Tensor
    R: Tensor


class Slogdet(NamedTuple, Generic[Tensor]):
    """What `slogdet` gives."""

    sign: Tensor
    logabsdet: Tensor


class Svd(NamedTuple, Generic[Tensor]):
    """What `svd` gives."""

    U: Tensor
    S: Tensor
    Vh: Tensor


@takes_out
def transposed(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Matrices with their two axes swapped."""
    turned: Tensor = _ops.transposed(x)
    return turned


@takes_out
def diagonal(
    x: Tensor, offset: int = 0, axis1: int = -2, axis2: int = -1, *, out: Tensor | None = None
) -> Tensor:
    """Diagonal of each matrix [..., m, n]: [..., d]; `pc.diagonal` takes the first two axes."""
    return shape.diagonal(x, offset, axis1, axis2)


@takes_out
def trace(x: Tensor, offset: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Sum of a diagonal of each matrix [..., m, n]: [...]; `pc.trace` takes the first two axes."""
    return shape.trace(x, offset, -2, -1)


def _identity(like: Tensor, size: int) -> Tensor:
    identity: Tensor = apply_source(
        like, "eye", rows=size, columns=size, offset=0, dtype=str(like.dtype)
    )
    return identity


def _expanded(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """The matrices for each entry of a batch."""
    shape = (*batch, *x.shape[-2:])
    return x if x.shape == shape else apply_one("expand_to", x, shape=shape)


def _matrices(function: str, x: Tensor) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(
            f"{function} needs matrices", op=function, got=x.shape, expected="at least 2 axes"
        )
    return x


# --- inverses and solutions -----------------------------------------------------------------------


@takes_out
def inv(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Inverses of square matrices. ExecutionError for one that has none."""
    return apply_one("inv", x)


@takes_out
def solve(a: Tensor, b: Tensor, left: bool = True, *, out: Tensor | None = None) -> Tensor:
    """The x with a x = b, or with x a = b unless `left`, of square matrices a [..., n, n].

    b has matrices [..., n, k], or one vector [n], or a vector [..., n] for each matrix of a. The
    batches broadcast. ExecutionError for a matrix that cannot be inverted.
    """
    _matrices("solve", a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if vector:
        b = b.reshape((*b.shape, 1))
    if not left and not vector:
        return transposed(solve(transposed(a), transposed(b)))
    if not left:
        a = transposed(a)
    batch = broadcast_shapes("solve", [a.shape[:-2], b.shape[:-2]])
    x = apply_one("solve", _expanded(a, batch), _expanded(b, batch))
    return x.reshape(x.shape[:-1]) if vector else x


@takes_out
def solve_triangular(
    a: Tensor,
    b: Tensor,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`solve` with a triangle of a: that above the diagonal, if `upper`, and ones on the diagonal,
    if `unitriangular`. What else a has is not read.
    """
    inner = 1 if unitriangular else 0
    triangle: Tensor = (
        apply("triu", a, diagonal=inner) if upper else apply("tril", a, diagonal=-inner)
    )
    if unitriangular:
        triangle = triangle + _identity(a, a.shape[-1])
    return solve(triangle, b, left)


@takes_out
def pinv(
    x: Tensor,
    rank: int | None = None,
    rtol: float | None = None,
    hermitian: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Pseudoinverses [..., n, m] of matrices [..., m, n] (E. H. Moore, R. Penrose).

    `rank` says how many singular values count, or `rtol` that those above this share of the
    greatest do; without either those that rounding does not make of zero. A `hermitian` one is the
    same, of a symmetric matrix.
    """
    if rank is not None:
        return apply_one("pinv", x, rank=rank)
    return apply_one("pinv", x) if rtol is None else apply_one("pinv", x, rtol=float(rtol))


@takes_out
def lstsq(a: Tensor, b: Tensor, rcond: float | None = None, *, out: Tensor | None = None) -> Tensor:
    """The x for which a x is closest to b, of matrices a [..., m, n] and b [..., m, k] or, of one
    vector, [m]; the shortest of several. `rcond` is `rtol` of `pinv`.
    """
    vector = b.ndim == 1
    columns = b.reshape((*b.shape, 1)) if vector else b
    x = matmul(pinv(a, rtol=rcond), columns)
    return x.reshape(x.shape[:-1]) if vector else x


@takes_out
def tensorinv(x: Tensor, ind: int = 2, *, out: Tensor | None = None) -> Tensor:
    """The inverse of x as a map from its last axes to its first `ind` ones."""
    if not 0 < ind < x.ndim or math.prod(x.shape[:ind]) != math.prod(x.shape[ind:]):
        raise ShapeError(
            "tensorinv needs as many elements in the first axes as in the others",
            got=f"ind {ind} of shape {x.shape}",
        )
    size = math.prod(x.shape[:ind])
    return inv(x.reshape((size, size))).reshape((*x.shape[ind:], *x.shape[:ind]))


@takes_out
def tensorsolve(a: Tensor, b: Tensor, axes: Axes = None, *, out: Tensor | None = None) -> Tensor:
    """The x with tensordot(a, x, x.ndim) = b; `axes` of a are moved to its end first."""
    if axes is not None:
        moved = normalize_axes(axes, a.ndim)
        a = a.transpose([*(each for each in range(a.ndim) if each not in moved), *moved])
    shape, size = a.shape[b.ndim :], math.prod(b.shape)
    return solve(a.reshape((size, math.prod(shape))), b.reshape((size,))).reshape(shape)


# --- determinants and powers ----------------------------------------------------------------------


@takes_out
def det(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Determinants of square matrices [..., n, n]: [...]."""
    return apply_one("det", x)


@takes_out
def slogdet(x: Tensor, *, out: Sequence[Tensor | None] | None = None) -> Slogdet[Tensor]:
    """The signs of determinants, and the logarithms of their absolute values, without overflow."""
    return Slogdet(*apply("slogdet", x))


@takes_out
def logdet(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Logarithms of determinants; not a number where they are negative."""
    sign, logarithm = slogdet(x)
    return where(sign < 0.0, full_like(sign, math.nan), logarithm)


@takes_out
def matrix_power(x: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    """Square matrices to the power of a whole number, by squares; negative ones of the inverse."""
    _matrices("matrix_power", x)
    if x.shape[-1] != x.shape[-2]:
        raise ShapeError("matrix_power needs square matrices", got=x.shape)
    if n == 0:
        return _expanded(_identity(x, x.shape[-1]), x.shape[:-2])
    base, left, power = (inv(x) if n < 0 else x), abs(n), None
    while True:
        if left & 1:
            power = base if power is None else matmul(power, base)
        left >>= 1
        if not left:
            break
        base = matmul(base, base)
    assert power is not None
    # Not the tensor itself, which a change in place would reach.
    return power if power is not x else x * 1.0


@takes_out
def matrix_exp(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Exponentials of square matrices: sums of xⁿ / n!."""
    return apply_one("matrix_exp", x)


@takes_out
def multi_dot(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """The product of matrices, in the order that takes the least work (the matrix chain of D. E.
    Knuth); the first and the last may be vectors.
    """
    if len(tensors) < 2:
        raise ShapeError("multi_dot needs at least two matrices", got=len(tensors))
    chain = list(tensors)
    first, last = chain[0].ndim == 1, chain[-1].ndim == 1
    if first:
        chain[0] = chain[0].reshape((1, *chain[0].shape))
    if last:
        chain[-1] = chain[-1].reshape((*chain[-1].shape, 1))
    extents = [chain[0].shape[0], *(each.shape[1] for each in chain)]
    best: dict[tuple[int, int], tuple[int, int]] = {(at, at): (0, at) for at in range(len(chain))}
    for width in range(1, len(chain)):
        for start in range(len(chain) - width):
            stop = start + width
            best[start, stop] = min(
                (
                    best[start, cut][0]
                    + best[cut + 1, stop][0]
                    + extents[start] * extents[cut + 1] * extents[stop + 1],
                    cut,
                )
                for cut in range(start, stop)
            )

    def multiplied(start: int, stop: int) -> Tensor:
        if start == stop:
            return chain[start]
        cut = best[start, stop][1]
        return matmul(multiplied(start, cut), multiplied(cut + 1, stop))

    made = multiplied(0, len(chain) - 1)
    kept = [*([] if first else [0]), *([] if last else [1])]
    return made if len(kept) == 2 else made.reshape([made.shape[axis] for axis in kept])


# --- factors --------------------------------------------------------------------------------------


@takes_out
def cholesky(x: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Lower triangles y with y yᵀ = x, or upper ones with yᵀ y = x, of symmetric matrices x.
    ExecutionError for one that is not positive definite.
    """
    lower = apply_one("cholesky", x)
    return transposed(lower) if upper else lower


@takes_out
def cholesky_solve(
    b: Tensor, factor: Tensor, upper: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """The x with a x = b, from the triangle that `cholesky` makes of a."""
    lower = transposed(factor) if upper else factor
    half = solve_triangular(lower, b, upper=False)
    return solve_triangular(transposed(lower), half, upper=True)


@takes_out
def cholesky_inverse(factor: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Tensor:
    """The inverse of a matrix, from the triangle that `cholesky` makes of it."""
    return cholesky_solve(
        _expanded(_identity(factor, factor.shape[-1]), factor.shape[:-2]), factor, upper
    )


@takes_out
def qr(
    x: Tensor, mode: str = "reduced", *, out: Sequence[Tensor | None] | None = None
) -> Qr[Tensor]:
    """q with orthonormal columns and upper triangles r with q r = x.

    `mode` is "reduced" (min(m, n) columns) or "complete" (m of them, which have no gradient where
    m > n). Signs are those of LAPACK.
    """
    if mode not in ("reduced", "complete"):
        raise AttributeValueError(
            "unknown mode of qr", got=repr(mode), expected="reduced, complete"
        )
    return Qr(*apply("qr", x, complete=mode == "complete"))


@takes_out
def svd(
    x: Tensor, full_matrices: bool = True, *, out: Sequence[Tensor | None] | None = None
) -> Svd[Tensor]:
    """u, s and v with u diag(s) v = x, singular values s greatest first; without `full_matrices`
    only min(m, n) columns of u and rows of v. Gradients through u and v are finite where singular
    values differ.
    """
    return Svd(*apply("svd", x, full=full_matrices))


@takes_out
def svdvals(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Singular values, greatest first."""
    return svd(x, full_matrices=False)[1]


@takes_out
def eigh(x: Tensor, *, out: Sequence[Tensor | None] | None = None) -> Eigh[Tensor]:
    """Eigenvalues of symmetric matrices, least first, and eigenvectors as columns. Gradients
    through vectors are finite where eigenvalues differ.
    """
    return Eigh(*apply("eigh", x))


@takes_out
def eigvalsh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Eigenvalues of symmetric matrices, least first."""
    return eigh(x)[0]


@takes_out
def lu_factor(x: Tensor, *, out: Sequence[Tensor | None] | None = None) -> tuple[Tensor, Tensor]:
    """A unit lower and an upper triangle in one matrix, whose product is x with rows swapped: row
    i with row pivots[i] - 1, one after the other, as in LAPACK.
    """
    outputs: tuple[Tensor, Tensor] = apply("lu_factor", x)
    return outputs


@takes_out
def lu(x: Tensor, *, out: Sequence[Tensor | None] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A permutation matrix p, a unit lower triangle l and an upper triangle u with p l u = x."""
    packed, pivots = lu_factor(x)
    return unpacked(packed, pivots)


def unpacked(packed: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The permutation matrix and the triangles of what `lu_factor` makes."""
    rows, columns = packed.shape[-2:]
    size = min(rows, columns)
    order: Tensor = apply("pivot_matrix", pivots, rows=rows, dtype=str(packed.dtype))
    ones: Tensor = apply_source(
        packed, "eye", rows=rows, columns=size, offset=0, dtype=str(packed.dtype)
    )
    lower: Tensor = apply("tril", _ops.part(packed, (0, rows), (0, size)), diagonal=-1) + ones
    upper: Tensor = apply("triu", _ops.part(packed, (0, size), (0, columns)), diagonal=0)
    return order, lower, upper


@takes_out
def lu_solve(
    packed: Tensor,
    pivots: Tensor,
    b: Tensor,
    left: bool = True,
    adjoint: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The x with a x = b, or x a = b unless `left`, from what `lu_factor` makes of a; with aᵀ in
    place of a where `adjoint`.
    """
    if not left:
        return transposed(lu_solve(packed, pivots, transposed(b), adjoint=not adjoint))
    order, lower, upper = unpacked(packed, pivots)
    if adjoint:
        half = solve_triangular(transposed(upper), b, upper=False)
        return matmul(
            order, solve_triangular(transposed(lower), half, upper=True, unitriangular=True)
        )
    swapped = matmul(order, b, transpose_a=True)
    half = solve_triangular(lower, swapped, upper=False, unitriangular=True)
    return solve_triangular(upper, half, upper=True)


@takes_out
def householder_product(x: Tensor, tau: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The first n columns of the product of I - tau[i] v vᵀ, where v is 0, then 1, then column i of
    x [..., m, n] below its diagonal.
    """
    rows, columns = x.shape[-2:]
    unit = apply("tril", x, diagonal=-1) + apply_source(
        x, "eye", rows=rows, columns=columns, offset=0, dtype=str(x.dtype)
    )
    made: Tensor = apply_source(x, "eye", rows=rows, columns=columns, offset=0, dtype=str(x.dtype))
    made = _expanded(made, x.shape[:-2])
    for at in reversed(range(tau.shape[-1])):
        v: Tensor = _ops.part(unit, (0, rows), (at, at + 1))
        share = tau[..., at : at + 1].reshape((*tau.shape[:-1], 1, 1))
        made = made - matmul(v, matmul(v, made, transpose_a=True)) * share
    return made


# --- norms ----------------------------------------------------------------------------------------


@takes_out
def vector_norm(
    x: Tensor,
    ord: float = 2.0,
    axis: Axes = None,
    keepdims: bool = False,
    *,
    dtype: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """sum(|x| ** ord) ** (1 / ord) over axes; the greatest |x| for infinity, the least for minus
    infinity, and for 0 how many are not zero. With `dtype` x is converted to it first.
    """
    x = x if dtype is None else x.cast(dtype)
    return reduction.norm(x, ord, axis, keepdims)


@takes_out
def matrix_norm(
    x: Tensor,
    ord: float | str = "fro",
    axis: Sequence[int] = (-2, -1),
    keepdims: bool = False,
    *,
    dtype: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Norms of matrices: "fro" the root of the sum of squares, "nuc" the sum of singular values, 2
    the greatest and -2 the least of these, 1 the greatest sum of a column's absolute values and -1
    the least, math.inf and -math.inf those of a row's. With `dtype` x is converted to it first.
    """
    x = x if dtype is None else x.cast(dtype)
    row, column = (one_axis(each, x.ndim) for each in axis)
    if row == column:
        raise AttributeValueError("matrix_norm needs two axes", got=tuple(axis))
    if ord == "fro":
        return reduction.norm(x, 2.0, (row, column), keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        first, second = (row, column) if abs(float(ord)) == 1 else (column, row)
        totals = reduction.norm(x, 1.0, first, keepdims=True)
        made = totals.max(second, True) if float(ord) > 0 else totals.min(second, True)
    elif ord in (2, -2, "nuc"):
        others = [each for each in range(x.ndim) if each not in (row, column)]
        values = svdvals(x.transpose([*others, row, column]))
        made = values.sum(-1) if ord == "nuc" else values.max(-1) if ord == 2 else values.min(-1)
        made = made.reshape([1 if at in (row, column) else n for at, n in enumerate(x.shape)])
    else:
        raise AttributeValueError(
            "unknown norm of a matrix", got=repr(ord), expected="fro, nuc, 1, -1, 2, -2, inf, -inf"
        )
    kept = [n for at, n in enumerate(x.shape) if at not in (row, column)]
    return made if keepdims else made.reshape(kept)


@takes_out
def norm(
    x: Tensor,
    ord: float | str | None = None,
    axis: Axes = None,
    keepdims: bool = False,
    *,
    dtype: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The norm of vectors along one axis or of matrices along two, as `vector_norm` and
    `matrix_norm` say; without `ord` the root of the sum of squares, over all axes by default.
    """
    x = x if dtype is None else x.cast(dtype)
    axes = normalize_axes(axis, x.ndim)
    if ord is None:
        return reduction.norm(x, 2.0, axis, keepdims)
    if len(axes) == 2:
        order = whole_numbers("axes", axis) if axis is not None else axes
        return matrix_norm(x, ord, order, keepdims)
    if isinstance(ord, str) or len(axes) != 1:
        raise AttributeValueError(
            "a norm with an order is of vectors or matrices",
            got=f"ord {ord!r} over {len(axes)} axes",
            expected="1 axis, or 2",
        )
    return vector_norm(x, ord, axes, keepdims)


@takes_out
def cond(x: Tensor, ord: float | str | None = None, *, out: Tensor | None = None) -> Tensor:
    """Condition numbers: the norm of a matrix times that of its inverse; by default by singular
    values.
    """
    if ord is None or ord in (2, -2):
        values = svdvals(x)
        greatest, least = values.max(-1), values.min(-1)
        return least / greatest if ord == -2 else greatest / least
    return matrix_norm(x, ord) * matrix_norm(inv(x), ord)


@takes_out
def matrix_rank(
    x: Tensor,
    atol: float | Tensor | None = None,
    rtol: float | Tensor | None = None,
    hermitian: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """How many singular values are above `atol` and above `rtol` times the greatest, by default
    above what rounding makes of zero. A tolerance is a number, or a tensor with one for each
    matrix. A `hermitian` one is the same, of a symmetric matrix.
    """
    values = svdvals(_matrices("matrix_rank", x))
    default = max(x.shape[-2:]) * _epsilon(x)
    least, share = (
        unsqueeze(in_dtype(each, values.dtype), -1) if isinstance(each, TensorOperators) else each
        for each in (atol, rtol)
    )
    if share is None and isinstance(least, TensorOperators):
        share = where(least > 0.0, 0.0, default * ones_like(least))
    elif share is None:
        share = 0.0 if least is not None and least > 0 else default
    if not values.shape[-1]:
        return values.sum(-1).cast("int64")
    bound = values.max(-1, True) * share
    if least is not None:
        bound = maximum(bound, least)
    return apply_one("count_nonzero", values > bound, axes=(values.ndim - 1,), keepdims=False)


def _epsilon(x: Tensor) -> float:
    return 2.0**-52 if str(x.dtype) == "float64" else 2.0**-23


# --- of vectors -----------------------------------------------------------------------------------


@takes_out
def vecdot(x: Tensor, y: Tensor, axis: int = -1, *, out: Tensor | None = None) -> Tensor:
    """Sums of products along an axis; the others broadcast."""
    return (x * y).sum(axis)


@takes_out
def cross(x: Tensor, y: Tensor, axis: int = -1, *, out: Tensor | None = None) -> Tensor:
    """Vector products of vectors of 3 along an axis; the other axes broadcast."""
    shape = broadcast_shapes("cross", [x.shape, y.shape])
    at = one_axis(axis, len(shape))
    if shape[at] != 3 or 1 in (x.shape[axis], y.shape[axis]):
        raise ShapeError("cross needs vectors of 3", got=f"{x.shape} and {y.shape} along {axis}")

    def turned(each: Tensor, shift: int) -> Tensor:
        own = at - (len(shape) - each.ndim)
        return apply_one("roll", each, shifts=(shift,), axes=(own,))

    return turned(x, -1) * turned(y, 1) - turned(x, 1) * turned(y, -1)


@takes_out
def vander(
    x: Tensor, count: int | None = None, increasing: bool = True, *, out: Tensor | None = None
) -> Tensor:
    """Powers of each number along a new last axis: 1, x, x² and so on, `count` of them (by default
    as many as there are numbers); unless `increasing`, the other way round.
    """
    if not x.ndim:
        raise ShapeError("vander needs a vector", got=x.shape, expected="at least 1 axis")
    columns = x.shape[-1] if count is None else count
    one: Tensor = apply("zeros_like", x) + (1.0 if x.dtype.is_floating else 1)
    powers = [one]
    for _ in range(1, columns):
        powers.append(powers[-1] * x)
    powers = powers[:columns] if increasing else powers[:columns][::-1]
    beside = [each.reshape((*x.shape, 1)) for each in powers]
    if not beside:
        return one.reshape((*x.shape, 1))[..., :0]
    return apply_one("concat", *beside, axis=x.ndim)


def __getattr__(name: str) -> Any:
    raise no_such_name("pc.linalg", name)
