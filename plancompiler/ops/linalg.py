"""Factors, inverses and determinants of matrices, the last two axes; axes before them may be split.

Gradients are those of M. B. Giles: Collected Matrix Derivative Results for Forward and Reverse Mode
Algorithmic Differentiation (2008), except where another source is named. Matrices are real.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from plancompiler.errors import ExecutionError, GradientError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ops.attributes import Bool, Dtype, Float, Int
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import of_one
from plancompiler.ops.kernel import in_float32, on_host
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Kernel,
    KernelContext,
    Tensors,
    Types,
    apply,
    apply_source,
    define_op,
)

_WIDE = frozenset({DType.FLOAT32, DType.FLOAT64})
_SQUARE = "x F ... n n -> y F ... n n"
_WHOLE = "... [m] [n] -> ... [p] [q]"


# --- what gradients are written with --------------------------------------------------------------


def product(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """a @ b, either of them transposed."""
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    return apply("matmul", a, b, **{name: True for name, on in flags.items() if on})


def transposed(x: Any) -> Any:
    """The last two axes swapped."""
    ndim = len(x.shape)
    return x.transpose([*range(ndim - 2), ndim - 1, ndim - 2])


def part(x: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """A box of the last two axes."""
    lead = x.shape[:-2]
    starts = (*(0 for _ in lead), rows[0], columns[0])
    return apply("slice", x, starts=starts, stops=(*lead, rows[1], columns[1]))


def _identity(like: Any, size: int) -> Any:
    return apply_source(like, "eye", rows=size, columns=size, offset=0, dtype=str(like.dtype))


def _on_diagonal(x: Any) -> Any:
    size = x.shape[-1]
    return apply("diag_embed", x, rows=size, columns=size, offset=0)


def _lower(x: Any, diagonal: int = 0) -> Any:
    return apply("tril", x, diagonal=diagonal)


def _upper(x: Any, diagonal: int = 0) -> Any:
    return apply("triu", x, diagonal=diagonal)


def _symmetric(x: Any) -> Any:
    return (x + transposed(x)) * 0.5


def _solved(a: Any, b: Any) -> Any:
    return apply("solve", a, b)


def _matrices(number: Any) -> Any:
    """A number per matrix, to be multiplied with all its elements."""
    return number.reshape((*number.shape, 1, 1))


def _factored(compute: Callable[..., Any], *arrays: Any) -> Any:
    """What a function of `numpy.linalg` makes. ExecutionError where matrices have no such thing."""
    try:
        return compute(*arrays)
    except np.linalg.LinAlgError as error:
        raise ExecutionError(
            f"a matrix has no such factors or inverse: {error}",
            hint="add a small multiple of the identity, or use pc.linalg.pinv",
        ) from None


def _kernel(compute: Callable[..., Any]) -> Kernel:
    """A function of arrays that makes one output or a tuple of them."""

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        made = _factored(compute, *inputs)
        for output, array in zip(
            outputs, made if isinstance(made, tuple) else (made,), strict=True
        ):
            np.copyto(output, array, casting="unsafe")

    return in_float32(kernel)


def _middle(x: Array) -> Array:
    """The symmetric part of matrices."""
    middle: Array = (x + x.swapaxes(-1, -2)) * x.dtype.type(0.5)
    return middle


# --- inverses, solutions and determinants ---------------------------------------------------------

define_op(
    "inv",
    infer=_SQUARE,
    rule=_WHOLE,
    kernel=_kernel(np.linalg.inv),
    gradient=of_one(
        lambda attrs, x, y, dy: -product(product(y, dy, transpose_a=True), y, transpose_b=True)
    ),
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 2),
    doc="Inverses of square matrices [..., n, n].",
)


def _cubic(inputs: Types, factor: int) -> int:
    *batch, rows, columns = inputs[0].shape
    return factor * math.prod(batch) * rows * columns * max(1, min(rows, columns))


def _solve_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    db = _solved(transposed(inputs[0]), grads[0])
    return -product(db, outputs[0], transpose_b=True), db


define_op(
    "solve",
    infer="a F ... n n, b F ... n k -> x F ... n k",
    rule="... [n] [m], ... [n] k -> ... [m] k",
    kernel=_kernel(np.linalg.solve),
    gradient=_solve_gradient,
    linear=((1,),),
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 1),
    doc="The x with a x = b, of square matrices a [..., n, n] and b [..., n, k], whose columns may "
    "be split.",
)
define_op(
    "det",
    infer="x F ... n n -> y F ...",
    rule="... [m] [n] -> ...",
    kernel=_kernel(np.linalg.det),
    gradient=of_one(lambda attrs, x, y, dy: _matrices(dy) * apply("cofactors", x)),
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 1),
    doc="Determinants of square matrices.",
)


def _cofactors(context: KernelContext, x: Array) -> Array:
    """With x = u s v, they are det(u v) u t v, where t has the products of all other s."""
    u, s, v = np.linalg.svd(x)
    places = context.arrays.arange(s.shape[-1])
    one = context.arrays.ones((), dtype=s.dtype)
    others = np.where(places[:, None] == places, one, s[..., None, :])
    sign = np.linalg.det(u) * np.linalg.det(v)
    cofactors: Array = np.matmul(u * others.prod(axis=-1)[..., None, :], v) * sign[..., None, None]
    return cofactors


def _cofactors_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    np.copyto(outputs[0], _factored(_cofactors, context, inputs[0]))


def _cofactors_formula(attrs: AttrMap, x: Any) -> Any:
    """Where x can be inverted."""
    return _matrices(apply("det", x)) * transposed(apply("inv", x))


define_op(
    "cofactors",
    infer=_SQUARE,
    rule=_WHOLE,
    kernel=in_float32(_cofactors_kernel),
    gradient=by_formula(_cofactors_formula),
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 20),
    doc="The gradient of the determinant, also of matrices that cannot be inverted.",
)


def _slogdet_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    if grads[1] is None:
        return (None,)
    return (_matrices(grads[1]) * transposed(apply("inv", inputs[0])),)


define_op(
    "slogdet",
    infer="x F ... n n -> sign F ..., logarithm F ...",
    rule="... [m] [n] -> ..., ...",
    kernel=_kernel(lambda x: tuple(np.linalg.slogdet(x))),
    gradient=_slogdet_gradient,
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 1),
    doc="The signs of determinants, and the logarithms of their absolute values.",
)


def _pinv_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    """G. H. Golub and V. Pereyra (1973), for matrices whose rank does not change nearby."""
    x, y, dy = inputs[0], outputs[0], grads[0]
    down, across = transposed(dy), transposed(y)
    left = _identity(x, x.shape[-2]) - product(x, y)
    right = _identity(x, x.shape[-1]) - product(y, x)
    dx = -product(product(across, dy), across)
    dx = dx + product(product(left, down), product(y, across))
    return (dx + product(product(across, y), product(down, right)),)


def _pinv(context: KernelContext, x: Array) -> Array:
    rank, rtol = context.attrs["rank"], context.attrs["rtol"]
    u, s, v = np.linalg.svd(x, full_matrices=False)
    if rank < 0:
        share = rtol if rtol >= 0 else max(x.shape[-2:]) * float(np.finfo(x.dtype).eps)
        kept = s > s.max(axis=-1, keepdims=True) * share
    else:
        kept = np.broadcast_to(context.arrays.arange(s.shape[-1]) < rank, s.shape)
    inverse = kept / np.where(kept, s, context.arrays.ones((), dtype=s.dtype))
    turned: Array = np.matmul(v.swapaxes(-1, -2) * inverse[..., None, :], u.swapaxes(-1, -2))
    return turned


def _pinv_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    if inputs[0].size:
        np.copyto(outputs[0], _factored(_pinv, context, inputs[0]), casting="same_kind")
    else:
        outputs[0].fill(0)


define_op(
    "pinv",
    infer="x F ... m n -> y F ... n m",
    rule=_WHOLE,
    attrs=(Int("rank", -1, least=-1), Float("rtol", -1.0)),
    kernel=in_float32(_pinv_kernel),
    gradient=_pinv_gradient,
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 20),
    doc="Pseudoinverses (E. H. Moore, R. Penrose): of singular values up to those that rounding "
    "makes of zero, or of the `rank` greatest, or of those above `rtol` times the greatest.",
)


# --- factors --------------------------------------------------------------------------------------


def _cholesky_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    inner = product(y, _lower(dy), transpose_a=True)
    half = _lower(inner, -1) + _on_diagonal(apply("diagonal", inner, offset=0)) * 0.5
    across = transposed(y)
    # With z = y⁻ᵀ half y⁻¹.
    z = transposed(_solved(across, transposed(_solved(across, half))))
    return _symmetric(z)


define_op(
    "cholesky",
    infer=_SQUARE,
    rule=_WHOLE,
    kernel=_kernel(lambda x: np.linalg.cholesky(_middle(x))),
    gradient=of_one(_cholesky_gradient),
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 1),
    doc="The lower triangles y with y yᵀ = x, of symmetric positive definite matrices x: their "
    "symmetric part is taken.",
)


def _qr_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    """H.-J. Liao, J.-G. Liu, L. Wang, T. Xiang (2019)."""
    (x,), (q, r), (dq, dr) = inputs, outputs, grads
    rows, columns = x.shape[-2:]
    if attrs["complete"] and rows > columns:
        raise GradientError(
            "the complete factors of a tall matrix are not differentiable: more columns are chosen "
            "than the matrix determines",
            hint='use mode="reduced"',
        )
    dq = apply("zeros_like", q) if dq is None else dq
    dr = apply("zeros_like", r) if dr is None else dr
    if rows >= columns:
        return (_tall_qr_gradient(q, r, dq, dr),)
    beside, right = part(x, (0, rows), (rows, columns)), part(dr, (0, rows), (rows, columns))
    square = (0, rows), (0, rows)
    first = _tall_qr_gradient(
        q, part(r, *square), dq + product(beside, right, transpose_b=True), part(dr, *square)
    )
    return (apply("concat", first, product(q, right), axis=len(x.shape) - 1),)


def _tall_qr_gradient(q: Any, r: Any, dq: Any, dr: Any) -> Any:
    inner = product(r, dr, transpose_b=True) - product(dq, q, transpose_a=True)
    below = _lower(inner, -1)
    mirrored = below + transposed(below) + _on_diagonal(apply("diagonal", inner, offset=0))
    wanted = dq + product(q, mirrored)
    return transposed(_solved(r, transposed(wanted)))


def _qr_infer(inputs: Types, attrs: AttrMap) -> Types:
    *batch, rows, columns = inputs[0].shape
    size = rows if attrs["complete"] else min(rows, columns)
    dtype = inputs[0].dtype
    return TensorType((*batch, rows, size), dtype), TensorType((*batch, size, columns), dtype)


@in_float32
def _qr_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    complete = context.attrs["complete"]
    factors = np.linalg.qr(inputs[0], "complete" if complete else "reduced")
    for output, made in zip(outputs, factors, strict=True):
        np.copyto(output, made)


define_op(
    "qr",
    infer=_qr_infer,
    operands="x F ... m n -> q F, r F",
    rule="... [m] [n] -> ... [p] [q], ... [r] [s]",
    attrs=(Bool("complete", False),),
    kernel=_qr_kernel,
    gradient=_qr_gradient,
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 4),
    doc="q with orthonormal columns and upper triangles r with q r = x: min(m, n) columns, or m "
    "where `complete`.",
)


def _svd_infer(inputs: Types, attrs: AttrMap) -> Types:
    *batch, rows, columns = inputs[0].shape
    size, dtype = min(rows, columns), inputs[0].dtype
    down, across = (rows, columns) if attrs["full"] else (size, size)
    return (
        TensorType((*batch, rows, down), dtype),
        TensorType((*batch, size), dtype),
        TensorType((*batch, across, columns), dtype),
    )


def _svd_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    rows, columns = inputs[0].shape[-2:]
    size = min(rows, columns)
    (u, s, v), (du, ds, dv) = outputs, grads
    u, v = part(u, (0, rows), (0, size)), part(v, (0, size), (0, columns))
    inner = None if ds is None else _on_diagonal(ds)
    outside = None
    if du is not None or dv is not None:
        across = s.reshape((*s.shape[:-1], 1, size))
        down = s.reshape((*s.shape, 1))
        # The distances of squares; one where there is none, on the diagonal.
        apart = across * across - down * down + _identity(s, size)
        for own, given, turn in ((u, du, False), (v, dv, True)):
            if given is None:
                continue
            if turn:
                grad = transposed(part(given, (0, size), (0, columns)))
                own = transposed(own)
            else:
                grad = part(given, (0, rows), (0, size))
            along = product(own, grad, transpose_a=True)
            skew = (along - transposed(along)) / apart
            skew = skew * down if turn else skew * across
            inner = skew if inner is None else inner + skew
            if own.shape[-2] > size:
                rest = (grad - product(own, along)) / across
                more = product(u, rest, transpose_b=True) if turn else product(rest, v)
                outside = more if outside is None else outside + more
    if inner is None:
        return (None,)
    dx = product(product(u, inner), v)
    return (dx if outside is None else dx + outside,)


@in_float32
def _svd_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    made = _factored(np.linalg.svd, inputs[0], context.attrs["full"])
    for output, array in zip(outputs, made, strict=True):
        np.copyto(output, array)


define_op(
    "svd",
    infer=_svd_infer,
    operands="x F ... m n -> u F, s F, v F",
    rule="... [m] [n] -> ... [p] [q], ... [r], ... [s] [t]",
    attrs=(Bool("full", False),),
    kernel=_svd_kernel,
    gradient=_svd_gradient,
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 20),
    doc="u with orthonormal columns, singular values s, greatest first, and v with orthonormal "
    "rows with u diag(s) v = x: min(m, n) of each, or all where `full`. Gradients through u and v "
    "are finite where singular values differ.",
)


def _eigh_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (values, vectors), (dvalues, dvectors) = outputs, grads
    size = values.shape[-1]
    inner = None if dvalues is None else _on_diagonal(dvalues)
    if dvectors is not None:
        along = product(vectors, dvectors, transpose_a=True)
        identity = _identity(values, size)
        apart = values.reshape((*values.shape[:-1], 1, size)) - values.reshape((*values.shape, 1))
        turned = along / (apart + identity) * (1.0 - identity)
        inner = turned if inner is None else inner + turned
    if inner is None:
        return (None,)
    return (_symmetric(product(product(vectors, inner), vectors, transpose_b=True)),)


define_op(
    "eigh",
    infer="x F ... n n -> values F ... n, vectors F ... n n",
    rule="... [m] [n] -> ... [p], ... [r] [s]",
    kernel=_kernel(lambda x: tuple(np.linalg.eigh(_middle(x)))),
    gradient=_eigh_gradient,
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 10),
    doc="Eigenvalues of symmetric matrices, least first, and eigenvectors as columns; the "
    "symmetric part is taken. Gradients through vectors are finite where eigenvalues differ.",
)


# --- triangles of elimination ---------------------------------------------------------------------


def _eliminated(context: KernelContext, x: Array) -> tuple[Array, Array]:
    """Gauss's elimination with partial pivoting, of all matrices at once."""
    arrays = context.arrays
    *batch, rows, columns = x.shape
    lu = x.reshape(math.prod(batch), rows, columns).copy()
    size = min(rows, columns)
    pivots = arrays.zeros((len(lu), size), np.int32)
    each, one = arrays.arange(len(lu)), arrays.ones((), dtype=lu.dtype)
    for step in range(size):
        chosen = np.absolute(lu[:, step:, step]).argmax(axis=1) + step
        pivots[:, step] = chosen + 1
        lu[each, step], lu[each, chosen] = lu[each, chosen], lu[each, step]
        pivot = lu[:, step, step]
        lu[:, step + 1 :, step] /= np.where(pivot == 0, one, pivot)[:, None]
        lu[:, step + 1 :, step + 1 :] -= (
            lu[:, step + 1 :, step, None] * lu[:, None, step, step + 1 :]
        )
    return lu.reshape(x.shape), pivots.reshape(*batch, size)


def _lu_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    lu, pivots = _eliminated(context, inputs[0])
    np.copyto(outputs[0], lu, casting="same_kind")
    np.copyto(outputs[1], pivots)


def _lu_infer(inputs: Types, attrs: AttrMap) -> Types:
    *batch, rows, columns = inputs[0].shape
    return inputs[0], TensorType((*batch, min(rows, columns)), DType.INT32)


def _lu_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    lu, pivots = outputs
    rows, columns = lu.shape[-2:]
    size = min(rows, columns)
    square = (0, size), (0, size)
    head, dhead = part(lu, *square), part(grads[0], *square)
    lower, upper = _lower(head, -1) + _identity(lu, size), _upper(head)
    below = product(lower, _lower(dhead, -1), transpose_a=True)
    above = product(_upper(dhead), upper, transpose_b=True)
    if columns > rows:
        beside, dbeside = (part(each, (0, rows), (rows, columns)) for each in (lu, grads[0]))
        below = below - product(dbeside, beside, transpose_b=True)
    if rows > columns:
        under, dunder = (part(each, (columns, rows), (0, columns)) for each in (lu, grads[0]))
        above = above - product(under, dunder, transpose_a=True)
    inner = _lower(below, -1) + _upper(above)
    inner = transposed(_solved(upper, transposed(inner)))
    grad = _solved(transposed(lower), inner)
    axis = len(lu.shape)
    if columns > rows:
        grad = apply("concat", grad, _solved(transposed(lower), dbeside), axis=axis - 1)
    if rows > columns:
        rest = transposed(_solved(upper, transposed(dunder)))
        grad = apply("concat", grad, rest, axis=axis - 2)
    order = apply("pivot_matrix", pivots, rows=rows, dtype=str(lu.dtype))
    return (product(order, grad),)


define_op(
    "lu_factor",
    infer=_lu_infer,
    operands="x F ... m n -> lu F, pivots int32",
    rule="... [m] [n] -> ... [p] [q], ... [r]",
    kernel=in_float32(_lu_kernel),
    gradient=_lu_gradient,
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 1),
    doc="A unit lower triangle and an upper triangle in one matrix, whose product is x with its "
    "rows swapped: row i with row pivots[i] - 1, one after the other, as in LAPACK.",
)


def _pivot_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (pivots,), (out,) = inputs, outputs
    rows = out.shape[-1]
    *batch, count = pivots.shape
    flat = pivots.reshape(math.prod(batch), count).astype(np.int64) - 1
    arange = context.arrays.arange
    order = np.broadcast_to(arange(rows), (len(flat), rows)).copy()
    each = arange(len(flat))
    for step in range(flat.shape[-1]):
        other = flat[:, step]
        order[each, step], order[each, other] = order[each, other], order[each, step]
    np.copyto(out, arange(rows)[:, None] == order.reshape(*out.shape[:-2], 1, rows))


define_op(
    "pivot_matrix",
    infer="pivots int32 ... k -> y dtype ... rows rows",
    rule="... [k] -> ... [p] [q]",
    attrs=(Int("rows", least=0), Dtype("dtype")),
    kernel=_pivot_kernel,
    flops=0,
    doc="The permutation matrix that undoes the swaps of lu_factor: x = y l u.",
)


# --- the exponential ------------------------------------------------------------------------------

_PADE = (
    64764752532480000.0,
    32382376266240000.0,
    7771770303897600.0,
    1187353796428800.0,
    129060195264000.0,
    10559470521600.0,
    670442572800.0,
    33522128640.0,
    1323241920.0,
    40840800.0,
    960960.0,
    16380.0,
    182.0,
    1.0,
)


def _exponential(context: KernelContext, x: Array) -> Array:
    """N. J. Higham (2005): the Padé approximant of order 13, of x scaled down, then squared. A
    device is waited for to know how often.
    """
    if not x.size:
        return x
    wide = x.astype(np.float64)
    norm = float(on_host(context, np.absolute(wide).sum(axis=-2).reshape(-1)).max())
    squarings = max(0, math.ceil(math.log2(norm / 5.37))) if 0 < norm < math.inf else 0
    a = wide / 2.0**squarings
    places = context.arrays.arange(x.shape[-1])
    identity = (places[:, None] == places).astype(np.float64)
    two = a @ a
    four = two @ two
    six = two @ four
    b = _PADE
    odd = six @ (b[13] * six + b[11] * four + b[9] * two)
    odd = a @ (odd + b[7] * six + b[5] * four + b[3] * two + b[1] * identity)
    even = six @ (b[12] * six + b[10] * four + b[8] * two)
    even = even + b[6] * six + b[4] * four + b[2] * two + b[0] * identity
    y: Array = np.linalg.solve(even - odd, even + odd)
    for _ in range(squarings):
        y = y @ y
    return y


def _exponential_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    made = _factored(_exponential, context, inputs[0])
    np.copyto(outputs[0], made, casting="unsafe")


def _exponential_gradient(attrs: AttrMap, x: Any, y: Any, dy: Any) -> Any:
    """R. Mathias (1996): the upper right block of the exponential of [xᵀ dy; 0 xᵀ]."""
    size, axis = x.shape[-1], len(x.shape)
    across = transposed(x)
    top = apply("concat", across, dy, axis=axis - 1)
    bottom = apply("concat", apply("zeros_like", x), across, axis=axis - 1)
    both = apply("matrix_exp", apply("concat", top, bottom, axis=axis - 2))
    return part(both, (0, size), (size, 2 * size))


define_op(
    "matrix_exp",
    infer=_SQUARE,
    rule=_WHOLE,
    kernel=in_float32(_exponential_kernel),
    gradient=of_one(_exponential_gradient),
    flops=lambda inputs, outputs, attrs: _cubic(inputs, 20),
    doc="The exponentials of square matrices: sums of xⁿ / n!.",
)
