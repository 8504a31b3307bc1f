"""Functions of elements written as formulas, each with its gradient as an op of its own.

The gradient op is what reverse accumulation makes of the formula, or a formula that is given where
that one would be inexact or infinite; both have gradients, so that derivatives of any order exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plancompiler.ops.attributes import Attribute, complete
from plancompiler.ops.elementwise_program import kernel_of
from plancompiler.ops.formula import by_formula
from plancompiler.ops.registry import (
    AttrMap,
    Formula,
    Gradient,
    Kernel,
    Precision,
    Tensors,
    apply,
    define_op,
)

Function = Callable[..., Any]
"""`(*inputs, **attributes)`: one tensor by operators and ops on tensors of one shape and dtype."""


def register_pointwise(
    kind: str,
    function: Function | None,
    doc: str,
    *,
    schema: tuple[Attribute, ...] = (),
    slope: Function | None = None,
    flows: Function | None = None,
    of_output: bool = False,
    target_gradient: Function | None = None,
    kernel: Kernel | None = None,
    grad_kernel: Kernel | None = None,
    flops: int | None = None,
    code: str | None = None,
    precision: Precision = "traced",
    portable: bool = True,
) -> None:
    """Register a function of x and the op `{kind}_grad`: (x, dy) -> dx; or one of x and a target.

    `slope` is dy / dx; with `of_output` it is a function of y, which then takes the place of x.
    Only where `flows`, a function of the same, is true a gradient flows, be it infinite.
    With `target_gradient`, `(x, target, dy, **attributes)`, there is a target. `kernel` and
    `grad_kernel` replace what is derived, where they are faster; without a function there is a
    `kernel` only, and its `code`. `flops` are those of an element.
    """
    grad_kind = f"{kind}_grad"
    count = 1 if target_gradient is None else 2

    def formula(named: AttrMap, *tensors: Any) -> Any:
        assert function is not None  # else nobody asks
        return function(*tensors, **complete(schema, named))

    def grad_formula(named: AttrMap, *tensors: Any) -> Any:
        *given, dy = tensors
        if slope is not None:
            values = complete(schema, named)
            dx = slope(*given, **values) * dy
            return dx if flows is None else apply("masked", dx, flows(*given))
        return by_formula(formula)(named, given, given[:1], (dy,))[0]

    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        dx = apply(grad_kind, *(outputs if of_output else inputs), grads[0], **attrs)
        if target_gradient is None:
            return (dx,)
        return dx, target_gradient(*inputs, grads[0], **complete(schema, attrs))

    def define(
        name: str,
        inputs: int,
        given: Kernel | None,
        how: Formula,
        back: Gradient,
    ) -> None:
        define_op(
            name,
            infer=", ".join(f"x{each} F" for each in range(inputs)) + " -> y F",
            attrs=schema,
            rule=f"{', '.join(['...'] * inputs)} -> ...",
            takes_bfloat16=given is None,
            kernel=given or kernel_of(how),
            gradient=back,
            linear=() if name == kind else ((inputs - 1,),),
            flops=flops,
            inplace=tuple((0, place) for place in range(inputs)),
            elementwise=target_gradient is None,
            precision=precision,
            portable=portable,
            code=code if name == kind else None,
            formula=None if how is formula and function is None else how,
            doc=doc if name == kind else f"The gradient of {kind}: {takes} -> dx.",
        )

    takes = "(x, dy)" if target_gradient is None else "(x, target, dloss)"
    takes = "(y, dy)" if of_output else takes
    define(kind, count, kernel, formula, gradient)
    back = by_formula(grad_formula)
    define(grad_kind, count + 1, grad_kernel, grad_formula, back)
