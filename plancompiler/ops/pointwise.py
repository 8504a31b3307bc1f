"""Functions of elements written as formulas, each with its gradient as an op of its own.

The gradient op is what reverse accumulation makes of the formula, or a formula that is given where
that one would be inexact or infinite; both have gradients, so that derivatives of any order exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plancompiler.ir.op import AttrValue
from plancompiler.ir.shard import element_count
from plancompiler.ops.check import (
    FLOATS,
    expect_dtype,
    expect_inputs,
    expect_same_dtype,
    expect_shape,
    float_attr,
    only_attrs,
)
from plancompiler.ops.elementwise_program import kernel_of
from plancompiler.ops.formula import by_formula
from plancompiler.ops.registry import (
    AttrMap,
    Formula,
    Gradient,
    Infer,
    Kernel,
    OpDef,
    Types,
    apply,
    register,
)

Function = Callable[..., Any]
"""`(*inputs, **attributes)`: one tensor by operators and ops on tensors of one shape and dtype."""
Checked = Callable[[AttrMap], Mapping[str, AttrValue]]
"""The attributes of an op with their defaults, or an AttributeValueError."""


def numbers(**defaults: float) -> Checked:
    """Attributes that are numbers."""

    def check(attrs: AttrMap) -> Mapping[str, AttrValue]:
        return {name: float_attr(attrs, name, default) for name, default in defaults.items()}

    return check


def register_pointwise(
    kind: str,
    function: Function | None,
    doc: str,
    *,
    attributes: tuple[str, ...] = (),
    check: Checked = lambda attrs: attrs,
    slope: Function | None = None,
    of_output: bool = False,
    target_gradient: Function | None = None,
    kernel: Kernel | None = None,
    grad_kernel: Kernel | None = None,
    flops: int | None = None,
) -> None:
    """Register a function of x and the op `{kind}_grad`: (x, dy) -> dx; or one of x and a target.

    `slope` is dy / dx; with `of_output` it is a function of y, which then takes the place of x.
    With `target_gradient`, `(x, target, dy, **attributes)`, there is a target. `kernel` and
    `grad_kernel` replace what is derived, where they are faster; without a function there is a
    `kernel` only. `flops` are those of an element.
    """
    grad_kind = f"{kind}_grad"
    count = 1 if target_gradient is None else 2

    def formula(attrs: AttrMap, *tensors: Any) -> Any:
        assert function is not None  # else nobody asks
        return function(*tensors, **check(attrs))

    def grad_formula(attrs: AttrMap, *tensors: Any) -> Any:
        *given, dy = tensors
        if slope is not None:
            return slope(*given, **check(attrs)) * dy
        return by_formula(formula)(attrs, given, given[:1], (dy,))[0]

    def gradient(
        attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        dx = apply(grad_kind, *(outputs if of_output else inputs), grads[0], **attrs)
        if target_gradient is None:
            return (dx,)
        return dx, target_gradient(*inputs, grads[0], **check(attrs))

    def define(name: str, inputs: int, given: Kernel | None, how: Formula, back: Gradient) -> None:
        register(
            OpDef(
                name,
                infer=_infer_of(name, inputs, attributes, check),
                rule=f"{', '.join(['...'] * inputs)} -> ...",
                takes_bfloat16=given is None,
                kernel=given or kernel_of(how),
                gradient=back,
                linear=() if name == kind else ((inputs - 1,),),
                flops=None if flops is None else _flops_of(flops),
                inplace=tuple((0, place) for place in range(inputs)),
                formula=None if how is formula and function is None else how,
                doc=doc if name == kind else f"The gradient of {kind}: {takes} -> dx.",
            )
        )

    takes = "(x, dy)" if target_gradient is None else "(x, target, dloss)"
    takes = "(y, dy)" if of_output else takes
    define(kind, count, kernel, formula, gradient)
    define(grad_kind, count + 1, grad_kernel, grad_formula, by_formula(grad_formula))


def _flops_of(each: int) -> Callable[[Types, Types, AttrMap], int]:
    return lambda inputs, outputs, attrs: each * element_count(inputs[0].shape)


def _infer_of(kind: str, count: int, attributes: tuple[str, ...], check: Checked) -> Infer:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_inputs(kind, inputs, count)
        only_attrs(kind, attrs, *attributes)
        check(attrs)
        for tensor in inputs:
            expect_dtype(kind, tensor, FLOATS)
            expect_shape(kind, tensor, inputs[0].shape, "further inputs")
        expect_same_dtype(kind, inputs)
        return inputs[:1]

    return infer
