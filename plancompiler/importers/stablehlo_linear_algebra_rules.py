"""The rules of linear algebra of JAX functions, and of StableHLO's operations of the kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plancompiler.frontend import functions as f
from plancompiler.frontend.functions import linalg
from plancompiler.importers.rules import stablehlo_rule
from plancompiler.importers.torch_linear_algebra_rules import from_one_triangle
from plancompiler.ir import DType


def _swapped(upper: bool) -> Callable[..., Any]:
    def rule(x: Any, **attrs: Any) -> Any:
        """Eigenvectors come first."""
        values, vectors = linalg.eigh(from_one_triangle(x, upper))
        return vectors, values

    return rule


def _qr(mode: str) -> Callable[..., Any]:
    return lambda x, **attrs: linalg.qr(x, mode)


def _svd(full: bool) -> Callable[..., Any]:
    def rule(x: Any, **attrs: Any) -> Any:
        """Values come first."""
        u, values, v = linalg.svd(x, full)
        return values, u, v

    return rule


def _lu(x: Any, **attrs: Any) -> Any:
    """The triangles in one matrix, the rows swapped, and the order of rows that this gives."""
    packed, pivots = linalg.lu_factor(x)
    order, _, _ = linalg.unpacked(packed, pivots)
    rows = f.argmax(order, order.ndim - 2)
    return packed, (pivots - 1).cast(DType.INT32), rows.cast(DType.INT32)


def _solve(upper: bool, unit: bool) -> Callable[..., Any]:
    return lambda a, b, **attrs: linalg.solve_triangular(a, b, upper, unitriangular=unit)


for _name, _rule in {
    "cholesky": lambda x, **attrs: linalg.cholesky(from_one_triangle(x, upper=False)),
    "lu": _lu,
    "eigh.lower": _swapped(upper=False),
    "eigh.upper": _swapped(upper=True),
    "qr.reduced": _qr("reduced"),
    "qr.complete": _qr("complete"),
    "svd.values": lambda x, **attrs: linalg.svdvals(x),
    "svd.full": _svd(full=True),
    "svd.reduced": _svd(full=False),
    "triangular_solve.lower": _solve(upper=False, unit=False),
    "triangular_solve.lower.unit": _solve(upper=False, unit=True),
    "triangular_solve.upper": _solve(upper=True, unit=False),
    "triangular_solve.upper.unit": _solve(upper=True, unit=True),
}.items():
    stablehlo_rule(f"custom_call.plancompiler.{_name}")(_rule)


@stablehlo_rule("stablehlo.cholesky")
def _cholesky(x: Any, lower: bool = False) -> Any:
    return linalg.cholesky(from_one_triangle(x, not lower), not lower)


@stablehlo_rule("stablehlo.triangular_solve")
def _triangular_solve(
    a: Any, b: Any, left_side: bool, lower: bool, unit_diagonal: bool, transpose_a: Any
) -> Any:
    turned = "NO_TRANSPOSE" not in str(transpose_a)
    a = linalg.transposed(a) if turned else a
    upper = lower if turned else not lower
    return linalg.solve_triangular(a, b, upper, left_side, unitriangular=unit_diagonal)
