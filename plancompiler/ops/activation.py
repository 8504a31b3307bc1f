"""Activation functions and their gradients, each gradient an op of its own.

The functions with several steps run piece by piece in cache (see `plancompiler.ops.kernel`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.ops.check import FLOATS, expect_dtype, expect_inputs, expect_shape, only_attrs
from plancompiler.ops.elementwise import register_unary, ufunc_kernel
from plancompiler.ops.formula import by_slope
from plancompiler.ops.kernel import (
    Direct,
    blocks,
    in_float32,
    keep_where,
    scratch,
    with_direct,
)
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    Infer,
    Kernel,
    KernelContext,
    OpDef,
    Types,
    apply,
    register,
)


def _grad_infer(kind: str) -> Infer:
    def infer(inputs: Types, attrs: AttrMap) -> Types:
        expect_inputs(kind, inputs, 2)
        only_attrs(kind, attrs)
        expect_dtype(kind, inputs[0], FLOATS)
        expect_dtype(kind, inputs[1], frozenset({inputs[0].dtype}), "gradient")
        expect_shape(kind, inputs[1], inputs[0].shape, "gradient")
        return (inputs[1],)

    return infer


def _register_grad(kind: str, kernel: Kernel, slope: Callable[[Any], Any], doc: str) -> None:
    """An op `(x or y, gradient of y) -> gradient of x`: the gradient times `slope(x or y)`."""
    register(
        OpDef(
            kind,
            infer=_grad_infer(kind),
            rule="..., ... -> ...",
            kernel=kernel,
            gradient=by_slope(slope),
            linear=((1,),),
            inplace=((0, 0), (0, 1)),
            doc=doc,
        )
    )


def _through(kind: str, of_output: bool) -> Callable[[Any, Any, Any], Any]:
    """The gradient by op `kind`, from the output where that is enough, else from the input."""
    return lambda x, y, dy: apply(kind, y if of_output else x, dy)


# --- relu -----------------------------------------------------------------------------------------


def _relu_direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
    zero = np.zeros((), dtypes[0])  # NumPy makes an array of a number each time
    return lambda x: np.maximum(x, zero, order="C")


@with_direct(_relu_direct)
def _relu_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    np.maximum(inputs[0], 0, out=outputs[0])


def _relu_grad_direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
    zero, dtype = np.zeros((), dtypes[0]), dtypes[1]
    whole = np.dtype(f"i{dtype.itemsize}")  # see `keep_where`
    return lambda y, dy: np.multiply(dy.view(whole), y > zero, order="C").view(dtype)


@with_direct(_relu_grad_direct)
def _relu_grad_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    for y, dy, dx in blocks(*inputs, *outputs):
        mask = scratch(context, "mask", y.shape, np.dtype(np.bool_))
        np.greater(y, 0, out=mask)
        keep_where(dy, mask, dx)


register_unary("relu", _relu_kernel, _through("relu_grad", True), doc="max(x, 0).")
_register_grad(
    "relu_grad",
    _relu_grad_kernel,
    lambda y: (y > 0).cast(y.dtype),
    "dy where y > 0, else zero: (y, dy) -> dx.",
)


# --- tanh and sigmoid -----------------------------------------------------------------------------


def _tanh_grad_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    for y, dy, dx in blocks(*inputs, *outputs):
        work = scratch(context, "work", y.shape, y.dtype)
        np.multiply(y, y, out=work)
        np.subtract(1, work, out=work)
        np.multiply(work, dy, out=dx)


def _sigmoid_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    # (1 + tanh(x / 2)) / 2 is the same function, and never overflows.
    for x, y in blocks(*inputs, *outputs):
        np.multiply(x, 0.5, out=y)
        np.tanh(y, out=y)
        np.add(y, 1, out=y)
        np.multiply(y, 0.5, out=y)


def _sigmoid_grad_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    for y, dy, dx in blocks(*inputs, *outputs):
        work = scratch(context, "work", y.shape, y.dtype)
        np.subtract(1, y, out=work)
        np.multiply(work, y, out=work)
        np.multiply(work, dy, out=dx)


register_unary(
    "tanh", ufunc_kernel(np.tanh), _through("tanh_grad", True), doc="The hyperbolic tangent."
)
_register_grad(
    "tanh_grad", _tanh_grad_kernel, lambda y: 1.0 - y * y, "dy * (1 - y * y): (y, dy) -> dx."
)
register_unary("sigmoid", _sigmoid_kernel, _through("sigmoid_grad", True), doc="1 / (1 + exp(-x)).")
_register_grad(
    "sigmoid_grad",
    _sigmoid_grad_kernel,
    lambda y: (1.0 - y) * y,
    "dy * y * (1 - y): (y, dy) -> dx.",
)


# --- gelu -----------------------------------------------------------------------------------------

_SCALE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _gelu_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    for x, y in blocks(*inputs, *outputs):
        work = scratch(context, "work", x.shape, x.dtype)
        np.multiply(x, x, out=work)
        np.multiply(work, _SCALE * _CUBIC, out=work)
        np.add(work, _SCALE, out=work)
        np.multiply(work, x, out=work)
        np.tanh(work, out=work)
        np.add(work, 1, out=work)
        np.multiply(work, x, out=work)
        np.multiply(work, 0.5, out=y)


def _gelu_grad_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    # With u = s x (1 + c x^2) and t = tanh(u): 0.5 ((1 + t) + (1 - t^2) s (x + 3 c x^3)).
    for x, dy, dx in blocks(*inputs, *outputs):
        square = scratch(context, "square", x.shape, x.dtype)
        tanh = scratch(context, "tanh", x.shape, x.dtype)
        np.multiply(x, x, out=square)
        np.multiply(square, _SCALE * _CUBIC, out=tanh)
        np.add(tanh, _SCALE, out=tanh)
        np.multiply(tanh, x, out=tanh)
        np.tanh(tanh, out=tanh)
        np.multiply(square, 1.5 * _SCALE * _CUBIC, out=square)
        np.add(square, 0.5 * _SCALE, out=square)
        np.multiply(square, x, out=square)
        # With q = s (x + 3 c x^3): 0.5 ((1 - t^2) q + (1 + t)) = (1 + t) ((1 - t) q / 2 + 0.5)
        work = scratch(context, "work", x.shape, x.dtype)
        np.subtract(1, tanh, out=work)
        np.multiply(work, square, out=work)
        np.add(work, 0.5, out=work)
        np.add(tanh, 1, out=tanh)
        np.multiply(work, tanh, out=work)
        np.multiply(work, dy, out=dx)


def _gelu_slope(x: Any) -> Any:
    square = x * x
    tanh = ((square * (_SCALE * _CUBIC) + _SCALE) * x).tanh()
    inner = (square * (1.5 * _SCALE * _CUBIC) + 0.5 * _SCALE) * x
    return ((1.0 - tanh) * inner + 0.5) * (tanh + 1.0)


register_unary(
    "gelu",
    in_float32(_gelu_kernel),
    _through("gelu_grad", False),
    doc="The Gaussian error linear unit in its tanh form (Hendrycks & Gimpel, 2016).",
)
_register_grad(
    "gelu_grad",
    in_float32(_gelu_grad_kernel),
    _gelu_slope,
    "The gradient of gelu: (x, dy) -> dx.",
)
