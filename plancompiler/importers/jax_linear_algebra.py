"""Linear algebra of JAX functions, as calls that `stablehlo_linear_algebra_rules` has rules for.

JAX lowers it to routines of LAPACK, whose results have no gradients of their own (a packed matrix
of reflections, for one). In a traced function it still is one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plancompiler.importers.jaxpr_rewriting import Rewriting, kinds_of


def with_linear_algebra_called(rewriting: Rewriting, closed: Any) -> Any:
    """A traced function, with a call for each operation of linear algebra that has a rule."""

    def instead(equation: Any) -> Any:
        target = _target(equation.primitive.name, equation.params)
        if target is None:
            return None
        kinds = kinds_of(rewriting.jax, equation.outvars)

        def called(*operands: Any) -> Any:
            return rewriting.call(f"plancompiler.{target}", *operands, kinds=kinds)

        if target.startswith("triangular"):
            return rewriting.in_place_of(equation, _triangular(rewriting, equation, target))
        return rewriting.in_place_of(equation, called)

    return rewriting.closed(closed, instead)


def _target(name: str, params: dict[str, Any]) -> str | None:
    """The name of an operation's rule, which says what its parameters do."""
    if params.get("subset_by_index") is not None or params.get("pivoting"):
        return None
    match name:
        case "cholesky" | "lu":
            return name
        case "eigh":
            return "eigh.lower" if params["lower"] else "eigh.upper"
        case "qr":
            return "qr.complete" if params["full_matrices"] else "qr.reduced"
        case "svd" if not params["compute_uv"]:
            return "svd.values"
        case "svd":
            return "svd.full" if params["full_matrices"] else "svd.reduced"
        case "triangular_solve":
            upper = params["lower"] is params["transpose_a"]
            unit = ".unit" if params["unit_diagonal"] else ""
            return f"triangular_solve.{'upper' if upper else 'lower'}{unit}"
    return None


def _triangular(rewriting: Rewriting, equation: Any, target: str) -> Callable[..., Any]:
    params = equation.params
    numpy = rewriting.jax.numpy

    def solved(a: Any, b: Any) -> Any:
        left = params["left_side"]
        of = numpy.matrix_transpose(a) if params["transpose_a"] else a
        if left:
            name, right = target, b
        else:  # x a = b is aᵀ xᵀ = bᵀ
            turned = {"upper": "lower", "lower": "upper"}
            name = ".".join(turned.get(each, each) for each in target.split("."))
            of, right = numpy.matrix_transpose(of), numpy.matrix_transpose(b)
        kind = rewriting.jax.ShapeDtypeStruct(right.shape, right.dtype)
        (made,) = rewriting.call(f"plancompiler.{name}", of, right, kinds=(kind,))
        return [made if left else numpy.matrix_transpose(made)]

    return solved
