"""The rules of PyTorch's linear algebra, which are functions of `pc.linalg`."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.frontend import functions as f
from plancompiler.frontend.functions import linalg
from plancompiler.importers.rules import define
from plancompiler.ir.operators import TensorOperators

# Arguments have the names and the order that PyTorch gives them; only those that calls name matter.


def from_one_triangle(x: Any, upper: bool) -> Any:
    """The symmetric matrix that one triangle says, with the gradient of a matrix that is symmetric:
    routines of LAPACK read no more of it.
    """
    half = linalg.transposed(x) if upper else x
    whole = f.tril(half) + linalg.transposed(f.tril(half, -1))
    return f.stop_gradient(whole - x) + x


def _eigh(x: Any, UPLO: str = "L", compute_v: bool = True) -> Any:  # noqa: N803  # PyTorch's name
    return linalg.eigh(from_one_triangle(x, UPLO.upper() == "U"))


def _eigvalsh(x: Any, UPLO: str = "L") -> Any:  # noqa: N803  # PyTorch's name
    return _eigh(x, UPLO)[0]


def _svdvals(x: Any, *, driver: str | None = None) -> Any:
    return linalg.svdvals(x)


def _pinv(x: Any, atol: Any = None, rtol: Any = None, hermitian: bool = False, **more: Any) -> Any:
    """Singular values count above `atol` and above `rtol` times the greatest one."""
    if atol is None and not isinstance(rtol, TensorOperators):
        return linalg.pinv(x, rtol=rtol, hermitian=hermitian)
    known = f.stop_gradient(x)
    u, values, v = linalg.svd(known, full_matrices=False)
    least: Any = 0.0 if atol is None else atol
    if rtol is None:  # by default that counts only where there is no other
        share = max(x.shape[-2:]) * float(np.finfo(str(x.dtype)).eps)
        if isinstance(least, TensorOperators):
            rtol = f.where(f.greater(least, 0), 0.0, f.full_like(least, share))
        else:
            rtol = 0.0 if least > 0 else share
    greatest = f.max(values, [-1], True)
    bounds = [
        f.unsqueeze(each, each.ndim) if isinstance(each, TensorOperators) else each
        for each in (least, rtol)
    ]
    share = greatest * bounds[1]
    counts = f.logical_and(f.greater(values, bounds[0]), f.greater(values, share))
    inverse = f.where(counts, 1 / f.where(counts, values, 1.0), 0.0)
    y = f.matmul(linalg.transposed(v) * f.unsqueeze(inverse, -2), linalg.transposed(u))
    # The derivative by G. H. Golub and V. Pereyra (1973), of a zero that has the gradient of x.
    moving = x - known
    turned, across = linalg.transposed(moving), linalg.transposed(y)
    left = turned - f.matmul(f.matmul(turned, known), y)
    right = turned - f.matmul(y, f.matmul(known, turned))
    step = f.matmul(f.matmul(y, across), left) + f.matmul(right, f.matmul(across, y))
    return y + step - f.matmul(y, f.matmul(moving, y))


define(
    {
        "aten.linalg_inv.default aten.inverse.default": linalg.inv,
        "aten.linalg_inv_ex.default": lambda x, check_errors=False: (linalg.inv(x), None),
        "aten.linalg_solve.default": lambda a, b, *, left=True: linalg.solve(a, b, left),
        "aten.linalg_solve_triangular.default": lambda a, b, *, upper, left=True, **more: (
            linalg.solve_triangular(a, b, upper, left, **more)
        ),
        "aten.linalg_det.default aten.det.default": linalg.det,
        "aten.linalg_slogdet.default aten.slogdet.default": linalg.slogdet,
        "aten.logdet.default": linalg.logdet,
        "aten.linalg_cholesky.default aten.cholesky.default": lambda x, upper=False: (
            linalg.cholesky(from_one_triangle(x, upper), upper)
        ),
        "aten.cholesky_solve.default": linalg.cholesky_solve,
        "aten.cholesky_inverse.default": linalg.cholesky_inverse,
        "aten.linalg_householder_product.default": linalg.householder_product,
        "aten.linalg_qr.default": linalg.qr,
        "aten.linalg_svd.default": lambda x, full_matrices=True, *, driver=None: linalg.svd(
            x, full_matrices
        ),
        "aten.linalg_svdvals.default": _svdvals,
        "aten.linalg_eigh.default": _eigh,
        "aten.linalg_eigvalsh.default": _eigvalsh,
        "aten.linalg_pinv.atol_rtol_float aten.linalg_pinv.atol_rtol_tensor": _pinv,
        "aten.linalg_pinv.default": _pinv,
        "aten.linalg_matrix_exp.default aten.matrix_exp.default": linalg.matrix_exp,
        "aten.linalg_matrix_power.default aten.matrix_power.default": linalg.matrix_power,
        "aten.linalg_cross.default": lambda x, y, *, dim=-1: linalg.cross(x, y, dim),
    }
)
