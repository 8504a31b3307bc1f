"""Which of our functions stands for which op of PyTorch's database.

Where a function has the name and the arguments of PyTorch's, nothing is said here. Other ops have
a line each: the function, or what turns PyTorch's arguments into ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plancompiler as pc

Call = Callable[..., Any]

ALONE = pc.Placement("cpu", [0])
"""Where tensors are made that have no input; the suite puts the mesh of the run in its place."""

LEFT_OUT = {
    "complex": "view_as_real view_as_complex complex conj conj_physical resolve_conj resolve_neg "
    "imag real sgn angle polar isreal cdouble cfloat chalf linalg.eig linalg.eigvals stft istft",
    "sparse": "sparse.sampled_addmm sparse.mm to_sparse",
    "compiled from PyTorch's own source": "jiterator_unary jiterator_binary "
    "jiterator_4inputs_with_extra_args jiterator_binary_return_by_ref "
    "jiterator_2inputs_2outputs",
    "strides and storage": "as_strided as_strided_copy as_strided_scatter new_empty_strided "
    "empty_strided empty_permuted resize_ resize_as_",
    "quantised": "torch._scaled_mm torch._scaled_mm_v2",
}
LEFT_OUT = {name: why for why, names in LEFT_OUT.items() for name in names.split()}
"""Ops that we leave out, and why."""

RANDOM = frozenset(
    (
        *("normal", "uniform", "randint", "bernoulli", "randn", "randn_like", "rand_like"),
        *("randint_like", "multinomial", "cauchy", "exponential", "geometric", "log_normal"),
        *("empty", "empty_like", "new_empty", "nn.functional.rrelu", "nn.functional.dropout"),
        *("nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout"),
        "nn.functional.feature_alpha_dropout",
    )
)
"""Ops whose values nothing fixes: their shapes and dtypes are compared."""

COMPARED = {"linalg.lstsq": 1}
"""How many outputs are compared, where ours has fewer: PyTorch's others say how it went."""

SYMMETRIC = {"linalg.eigh", "linalg.eigvalsh"}
"""Ops that read one triangle of a matrix: their gradients are compared without the antisymmetric
part, of which nothing depends."""

TRIANGLES = {"cholesky_inverse": 0, "cholesky_solve": 1}
"""Ops of which an input is a triangle, with the input's number: PyTorch's gradient goes beyond."""

FORWARD_ONLY = {
    "linalg.pinv/hermitian": "PyTorch's gradient does not know that one triangle is read",
    "normal": "PyTorch's gradient to the mean of what is drawn is zero",
}
"""Ops whose gradients are not compared, and why."""

NAMESPACES = ("nn.functional.", "special.")


def function_for(name: str, variant: str) -> Call | None:
    """Our function for an op variant, called with PyTorch's arguments; None if there is none."""
    if name in LEFT_OUT or name.startswith(("fft.", "masked.")):
        return CALLS.get(name)
    for key in (f"{name}/{variant}", name):
        if key in CALLS:
            return CALLS[key]
    if name.startswith("linalg."):
        return getattr(pc.linalg, name.removeprefix("linalg."), getattr(pc, name[7:], None))
    short = name
    for namespace in NAMESPACES:
        short = short.removeprefix(namespace)
    if "." in short or short not in pc.__all__:
        return None
    function: Call = getattr(pc, short)
    return function


def _variance(function: Call) -> Call:
    def call(x, dim=None, unbiased=True, keepdim=False, *, correction=None):
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        less = unbiased if correction is None else correction
        return function(x, dim, keepdim, float(less))

    return call


def _rounded(x, y, rounding_mode=None):
    quotient = pc.div(x, y)
    return {None: lambda each: each, "trunc": pc.trunc, "floor": pc.floor}[rounding_mode](quotient)


def _extreme(whole: Call, along: Call, of_two: Call) -> Call:
    def call(x, y=None, keepdim=False, *, dim=None):
        if isinstance(y, pc.DistTensor):
            return of_two(x, y)
        axis = y if dim is None else dim
        return whole(x) if axis is None else along(x, axis, keepdim)

    return call


def _of_factors(which):
    """LU with pivots as PyTorch returns them, and where it also says how it went, that it did."""

    def call(x, *, pivot=True, check_errors=False):
        return (*pc.linalg.lu_factor(x), _fine(x)) if which == "ex" else pc.linalg.lu_factor(x)

    return call


def _fine(x):
    """PyTorch's word of success for each matrix: 0."""
    return pc.cast(pc.count_nonzero(x, (-2, -1)) * 0, "int32")


def _mirrored(x, triangle):
    """The symmetric matrix of which PyTorch reads one triangle."""
    x = pc.linalg.transposed(x) if triangle == "U" else x
    return pc.tril(x) + pc.linalg.transposed(pc.tril(x, -1))


def _turned(factors):
    u, s, v = factors
    return u, s, pc.linalg.transposed(v)


def _least_squares(a, b, rcond=None, *, driver=None):
    return pc.linalg.lstsq(a, b), *(None,) * 3


def _norm(x, p=None, dim=None, keepdim=False, dtype=None):
    if dtype is not None:
        x = pc.cast(x, dtype)
    if p in ("fro", None):
        return pc.norm(x, 2.0, dim, keepdim)
    if p == "nuc":
        return pc.linalg.matrix_norm(x, p, (-2, -1) if dim is None else dim, keepdim)
    return pc.norm(x, p, dim, keepdim)


def _linalg_norm(function):
    def call(x, ord=None, dim=None, keepdim=False, *, dtype=None):
        if dtype is not None:
            x = pc.cast(x, dtype)
        return function(x, ord, dim, keepdim)

    return call


def _with_dtype(function: Call) -> Call:
    def call(x, *args, dtype=None, **named):
        return function(x if dtype is None else pc.cast(x, dtype), *args, **named)

    return call


CALLS: dict[str, Call] = {
    "std": _variance(pc.std),
    "var": _variance(pc.var),
    "div": _rounded,
    "softmax": _with_dtype(pc.softmax),
    "log_softmax": _with_dtype(pc.log_softmax),
    "gather": lambda x, dim, index, sparse_grad=False: pc.gather(x, dim, index),
    "index_select": lambda x, dim, index: pc.index_select(x, index, dim),
    "eq": pc.equal,
    "norm": _norm,
    "cholesky": pc.linalg.cholesky,
    "cholesky_inverse": pc.linalg.cholesky_inverse,
    "cholesky_solve": pc.linalg.cholesky_solve,
    "cross": lambda x, y, dim=None: pc.linalg.cross(
        x, y, next(at for at, n in enumerate(x.shape) if n == 3) if dim is None else dim
    ),
    "linalg.cholesky_ex": lambda x, *, upper=False, check_errors=False: (
        pc.linalg.cholesky(x, upper),
        _fine(x),
    ),
    "linalg.eigh": lambda x, UPLO="L": pc.linalg.eigh(_mirrored(x, UPLO)),
    "linalg.eigvalsh": lambda x, UPLO="L": pc.linalg.eigvalsh(_mirrored(x, UPLO)),
    "linalg.inv_ex": lambda x, *, check_errors=False: (pc.linalg.inv(x), _fine(x)),
    "linalg.solve_ex": lambda a, b, *, left=True, check_errors=False: (
        pc.linalg.solve(a, b, left),
        _fine(a),
    ),
    "linalg.lstsq": _least_squares,
    "linalg.lu": lambda x, *, pivot=True: pc.linalg.lu(x),  # noqa: PLW0108  # drops `pivot`
    "linalg.lu_factor": _of_factors(""),
    "linalg.lu_factor_ex": _of_factors("ex"),
    "linalg.lu_solve": lambda lu, pivots, b, *, left=True, adjoint=False: pc.linalg.lu_solve(
        lu, pivots, b, left, adjoint
    ),
    "lu": lambda x, pivot=True, get_infos=False: _of_factors("ex")(x)[: 3 if get_infos else 2],
    "lu_solve": lambda b, lu, pivots: pc.linalg.lu_solve(lu, pivots, b),
    "lu_unpack": lambda lu, pivots, unpack_data=True, unpack_pivots=True: pc.linalg.unpacked(
        lu, pivots
    ),
    "linalg.norm": _linalg_norm(pc.linalg.norm),
    "linalg.vector_norm": _linalg_norm(
        lambda x, ord, dim, keepdim: pc.linalg.vector_norm(
            x, 2.0 if ord is None else ord, dim, keepdim
        )
    ),
    "linalg.matrix_norm": lambda x, ord="fro", dim=(-2, -1), keepdim=False, *, dtype=None: (
        pc.linalg.matrix_norm(x if dtype is None else pc.cast(x, dtype), ord, dim, keepdim)
    ),
    "linalg.cond": lambda x, p=None: pc.linalg.cond(x, p),
    "linalg.matrix_rank": lambda x, tol=None, *, atol=None, rtol=None, hermitian=False: (
        pc.linalg.matrix_rank(x, tol if atol is None else atol, rtol, hermitian)
    ),
    "linalg.pinv/singular": lambda a, b: pc.linalg.pinv(
        pc.matmul(a, pc.linalg.transposed(b)), a.shape[-1]
    ),
    "linalg.pinv/hermitian": lambda x, *, hermitian=True: pc.linalg.pinv(_mirrored(x, "L")),
    "linalg.pinv": lambda x, *, rtol=None: pc.linalg.pinv(x, rtol=rtol),
    "linalg.tensorsolve": lambda a, b, dims=None: pc.linalg.tensorsolve(a, b, dims),
    "linalg.vander": lambda x, *, N=None: pc.linalg.vander(x, N),
    "logdet": pc.linalg.logdet,
    "matrix_exp": pc.linalg.matrix_exp,
    "pinverse": lambda x, rcond=1e-15: pc.linalg.pinv(x),
    "qr": lambda x, some=True: pc.linalg.qr(x, "reduced" if some else "complete"),
    "linalg.qr": pc.linalg.qr,
    "svd": lambda x, some=True, compute_uv=True: _turned(pc.linalg.svd(x, not some)),
    "triangular_solve": lambda b, a, upper=True, transpose=False, unitriangular=False: (
        pc.linalg.solve_triangular(
            pc.linalg.transposed(a) if transpose else a,
            b,
            upper != transpose,
            unitriangular=unitriangular,
        ),
        a * 1.0,
    ),
}
"""By op, or by op and variant."""
