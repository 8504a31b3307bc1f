"""Rewriting of traced JAX functions: other equations in the place of some, at every depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.errors import ModelImportError
from plancompiler.ir.source import user_line

CustomCall = Callable[..., Any]
"""`call(target, *operands)` is a custom call that gives an array like its only operand;
`call(target, *operands, kinds=...)` one that gives a list of arrays of these shapes and dtypes.
`config` is a text that its rule gets as `backend_config`."""

Rule = Callable[[Any], Any]
"""What takes the place of an equation (one, or a list of them), or of a variable."""


class Rewriting:
    """What a rule is made with: `jax`, and its module `core`, which is `jax.extend.core`."""

    def __init__(self, jax: Any, core: Any, call: CustomCall) -> None:
        self.jax = jax
        self.core = core
        self.call = call
        self.meshes: dict[str, dict[str, int]] = {}
        """Meshes of what was rewritten and is not named any more: sizes of their axes."""

    def closed(self, closed: Any, rule: Rule, variable: Rule = lambda each: each) -> Any:
        """A traced function with what `rule` makes of its equations; where it gives None, the
        functions inside of the equation are rewritten. `variable` gives a function's own variables,
        where the rule gives equations others.
        """
        inner = self.jaxpr(closed.jaxpr, rule, variable)
        return self.core.ClosedJaxpr(inner, closed.consts)

    def jaxpr(self, jaxpr: Any, rule: Rule, variable: Rule = lambda each: each) -> Any:
        """The same of a function without its constants."""
        equations = []
        for equation in jaxpr.eqns:
            made = rule(equation)
            made = self.within(equation, rule, variable) if made is None else made
            equations += made if isinstance(made, list) else [made]
        ends = {
            name: [variable(each) for each in getattr(jaxpr, name)]
            for name in ("invars", "outvars", "constvars")
        }
        return jaxpr.replace(eqns=equations, **ends)

    def within(self, equation: Any, rule: Rule, variable: Rule = lambda each: each) -> Any:
        """An equation with the functions inside of it rewritten."""

        def parameter(value: Any) -> Any:
            if isinstance(value, self.core.ClosedJaxpr):
                return self.closed(value, rule, variable)
            if isinstance(value, self.core.Jaxpr):
                return self.jaxpr(value, rule, variable)
            if isinstance(value, (tuple, list)) and any(
                isinstance(each, (self.core.ClosedJaxpr, self.core.Jaxpr)) for each in value
            ):
                every = map(parameter, value)
                return value._make(every) if hasattr(value, "_make") else type(value)(every)
            return value

        params = {key: parameter(each) for key, each in equation.params.items()}
        return equation.replace(params=params)

    def in_place_of(self, equation: Any, function: Callable[..., Any]) -> Any:
        """An equation that applies a function to the same operands."""
        jax = self.jax
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


def kinds_of(jax: Any, variables: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes and dtypes of variables of a traced function."""
    return tuple(jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in variables)


def _sharding(kind: Any, jax: Any) -> Any:
    """The sharding of a type, where its mesh has axes whose shardings are part of types."""
    sharding = getattr(kind, "sharding", None)
    if sharding is None or getattr(sharding.mesh, "empty", True):
        return None
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding if explicit else None
