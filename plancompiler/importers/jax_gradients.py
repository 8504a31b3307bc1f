"""What a JAX function says about gradients, kept in the StableHLO that it is lowered to.

StableHLO has no gradients: `jax.lax.stop_gradient` and the rules of `jax.custom_jvp` and
`jax.custom_vjp` leave no trace there. So the traced function is rewritten first. Where a gradient
stops, a call is put. A function f with a derivative of its own becomes

    stop(f(x)) + derivative(stop(x))(zero(x)),

where zero(x) is 0 and has the gradient of x: the value is that of f, and the gradient is the one
that the author wrote. The x with a x = b that somebody's `custom_linear_solve` gives becomes

    y + solve(zero(b) - zero(a y)) with y = stop(solve(stop(b))),

which has the gradient of the equation, and not that of the way in which it is solved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plancompiler.errors import ModelImportError
from plancompiler.importers.jaxpr_rewriting import Rewriting
from plancompiler.ir.source import user_line

STOP_GRADIENT = "plancompiler.stop_gradient"
"""The target of a call for what has no gradient."""
MOVING_ZERO = "plancompiler.moving_zero"
"""The target of a call for zeros with the gradient of their operand."""
_PLAIN = frozenset({"relu"})
"""Functions of JAX that the reader of StableHLO knows by their names."""


def with_gradients_marked(rewriting: Rewriting, closed: Any) -> Any:
    """A traced function, with its rules of gradients written as operations."""
    return rewriting.closed(closed, _Marking(rewriting).equation)


class _Marking:
    def __init__(self, rewriting: Rewriting) -> None:
        self._rewriting = rewriting
        self._jax = rewriting.jax
        self._core = rewriting.core
        self._call = rewriting.call
        self._own = str(Path(self._jax.__file__).parent)

    def _stop(self, x: Any) -> Any:
        return self._call(STOP_GRADIENT, x)

    def equation(self, equation: Any) -> Any:
        """What takes the place of an equation; None where it stays."""
        name = equation.primitive.name
        instead = self._rewriting.in_place_of
        if name == "stop_gradient":
            return instead(equation, self._stop)
        if name == "custom_linear_solve":
            return instead(equation, self._solved(equation))
        if name in ("custom_jvp_call", "custom_vjp_call"):
            where = str(
                getattr(equation.params["call_jaxpr"].jaxpr.debug_info, "func_src_info", "")
            )
            if self._own not in where or where.partition(" ")[0] not in _PLAIN:
                return instead(equation, self._with_own_derivative(equation, where))
        return None

    def _solved(self, equation: Any) -> Callable[..., Any]:
        core = self._core
        functions, counts = equation.params["jaxprs"], equation.params["const_lengths"]
        before = counts.matvec + counts.vecmat
        rewriting = self._rewriting
        product, solve = (
            core.jaxpr_as_fun(rewriting.closed(each, self.equation))
            for each in (functions.matvec, functions.solve)
        )

        def solved(*operands: Any) -> Any:
            of_product = operands[: counts.matvec]
            of_solve = [
                self._stop(each) if self._moves(each) else each
                for each in operands[before : before + counts.solve]
            ]
            right = operands[before + counts.solve + counts.transpose_solve :]
            known = [self._stop(x) for x in solve(*of_solve, *map(self._stop, right))]
            made = product(*of_product, *known)
            rest = [
                self._call(MOVING_ZERO, b) - self._call(MOVING_ZERO, y)
                for b, y in zip(right, made, strict=True)
            ]
            return [x + y for x, y in zip(known, solve(*of_solve, *rest), strict=True)]

        return solved

    def _moves(self, x: Any) -> bool:
        numpy = self._jax.numpy
        return bool(numpy.issubdtype(x.dtype, numpy.floating))

    def _with_own_derivative(self, equation: Any, where: str) -> Callable[..., Any]:
        jax, core = self._jax, self._core
        variables = [each for each in equation.invars if not isinstance(each, core.Literal)]
        unique = list(dict.fromkeys(variables))
        jaxpr = core.Jaxpr((), unique, equation.outvars, [equation])
        whole = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))

        def applied(*operands: Any) -> Any:
            by_variable = {
                each: x
                for each, x in zip(equation.invars, operands, strict=True)
                if not isinstance(each, core.Literal)
            }
            given = [by_variable[each] for each in unique]
            moving = [at for at, x in enumerate(given) if self._moves(x)]
            still = [self._stop(x) if at in moving else x for at, x in enumerate(given)]

            def of_moving(*some: Any) -> Any:
                every = list(still)
                for at, x in zip(moving, some, strict=True):
                    every[at] = x
                return whole(*every)

            known = [still[at] for at in moving]
            steps = [self._call(MOVING_ZERO, given[at]) for at in moving]
            values = of_moving(*known)
            if equation.primitive.name == "custom_jvp_call":
                _, slopes = jax.jvp(of_moving, known, steps)
            else:
                _, pulled = jax.vjp(of_moving, *known)
                pushed = jax.linear_transpose(
                    lambda *each: pulled(list(each)),
                    *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in values),
                )
                slopes = pushed(tuple(steps))
            return [self._stop(y) + slope for y, slope in zip(values, slopes, strict=True)]

        def guarded(*operands: Any) -> Any:
            try:
                return applied(*operands)
            except (NotImplementedError, TypeError, ValueError, AssertionError) as error:
                raise ModelImportError(
                    "a function has a derivative of its own that the importer cannot turn around",
                    source=user_line(),
                    got=f"{where or equation.primitive.name}: {type(error).__name__}: {error}"[
                        :400
                    ],
                    expected="a derivative that is linear in what is given to it",
                    hint="import the function without it, or jax.value_and_grad of the loss",
                ) from error

        return guarded
