"""What a JAX function says about gradients, kept in the StableHLO that it is lowered to.

StableHLO has no gradients: `jax.lax.stop_gradient` and the rules of `jax.custom_jvp` and
`jax.custom_vjp` leave no trace there. So the traced function is rewritten first. Where a gradient
stops, a call is put. A function f with a derivative of its own becomes

    stop(f(x)) + derivative(stop(x))(zero(x)),

where zero(x) is 0 and has the gradient of x: the value is that of f, and the gradient is the one
that the author wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plancompiler.errors import ModelImportError
from plancompiler.ir.source import user_line

STOP_GRADIENT = "plancompiler.stop_gradient"
"""The target of a call for what has no gradient."""
MOVING_ZERO = "plancompiler.moving_zero"
"""The target of a call for zeros with the gradient of their operand."""
_PLAIN = frozenset({"relu"})
"""Functions of JAX that the reader of StableHLO knows by their names."""


def with_gradients_marked(
    jax: Any, core: Any, call: Callable[[str, Any], Any], closed: Any
) -> Callable[..., Any]:
    """A traced function, with its rules of gradients written as operations.

    `jax` and `core` are JAX and its module `jax.extend.core`; `call` applies a custom call, by its
    target, to an array.
    """
    return _Marking(jax, core, call).function(closed)


class _Marking:
    def __init__(self, jax: Any, core: Any, call: Callable[[str, Any], Any]) -> None:
        self._jax = jax
        self._core = core
        self._call = call
        self._own = str(Path(self._jax.__file__).parent)

    def function(self, closed: Any) -> Callable[..., Any]:
        marked: Callable[..., Any] = self._core.jaxpr_as_fun(self._closed(closed))
        return marked

    def _stop(self, x: Any) -> Any:
        return self._call(STOP_GRADIENT, x)

    def _closed(self, closed: Any) -> Any:
        return self._core.ClosedJaxpr(self._jaxpr(closed.jaxpr), closed.consts)

    def _jaxpr(self, jaxpr: Any) -> Any:
        return jaxpr.replace(eqns=[self._equation(each) for each in jaxpr.eqns])

    def _equation(self, equation: Any) -> Any:
        name = equation.primitive.name
        if name == "stop_gradient":
            return self._in_place_of(equation, self._stop)
        if name in ("custom_jvp_call", "custom_vjp_call"):
            where = str(
                getattr(equation.params["call_jaxpr"].jaxpr.debug_info, "func_src_info", "")
            )
            if self._own not in where or where.partition(" ")[0] not in _PLAIN:
                return self._in_place_of(equation, self._with_own_derivative(equation, where))
        params = {key: self._parameter(each) for key, each in equation.params.items()}
        return equation.replace(params=params)

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, self._core.ClosedJaxpr):
            return self._closed(value)
        if isinstance(value, self._core.Jaxpr):
            return self._jaxpr(value)
        if isinstance(value, (tuple, list)) and any(
            isinstance(each, (self._core.ClosedJaxpr, self._core.Jaxpr)) for each in value
        ):
            return type(value)(self._parameter(each) for each in value)
        return value

    def _in_place_of(self, equation: Any, function: Callable[..., Any]) -> Any:
        """An equation that applies a function to the same operands."""
        jax = self._jax
        kinds = [
            jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=_sharding(each, jax))
            for each in (variable.aval for variable in equation.invars)
        ]
        traced = jax.make_jaxpr(jax.jit(function))(*kinds)
        (made,) = traced.jaxpr.eqns
        if traced.consts or len(made.outvars) != len(equation.outvars):
            raise ModelImportError(
                "a function with a derivative of its own uses arrays that are no arguments of it",
                source=user_line(),
                got=str(equation.primitive.name),
                hint="give these arrays to it as arguments",
            )
        return made.replace(
            invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info
        )

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
            moving = [
                at
                for at, x in enumerate(given)
                if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
            ]
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


def _sharding(kind: Any, jax: Any) -> Any:
    """The sharding of a type, where its mesh has axes whose shardings are part of types."""
    sharding = getattr(kind, "sharding", None)
    if sharding is None or getattr(sharding.mesh, "empty", True):
        return None
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding if explicit else None
