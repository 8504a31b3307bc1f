"""Root mean square normalisation over the last axis (B. Zhang, R. Sennrich, 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.ops.attributes import Float
from plancompiler.ops.formula import by_formula, unless_first
from plancompiler.ops.gradient import by_op, reduce_to
from plancompiler.ops.kernel import contiguous, in_float32, row_blocks, rows_of, scratch
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, apply, define_op


def _average(context: KernelContext, width: int, dtype: np.dtype[Any]) -> Array:
    """A column whose product with rows is their mean: three times faster than a reduction."""
    column = scratch(context, "average", (width, 1), dtype)
    column.fill(1.0 / width)
    return column


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    x, gamma = inputs
    width = x.shape[-1]
    eps = context.attrs["eps"]
    average = _average(context, width, x.dtype)
    for rows, y, rstd in row_blocks(width, *map(rows_of, (x, *outputs))):
        work = scratch(context, "work", rows.shape, rows.dtype)
        np.multiply(rows, rows, out=work)
        np.matmul(work, average, out=rstd)
        np.add(rstd, eps, out=rstd)
        np.sqrt(rstd, out=rstd)
        np.reciprocal(rstd, out=rstd)
        np.multiply(rows, rstd, out=y)
        np.multiply(y, gamma, out=y)


def _formula(attrs: AttrMap, x: Any, gamma: Any) -> tuple[Any, Any]:
    square = (x * x).mean(-1, keepdims=True)
    rstd = apply("rsqrt", square + attrs["eps"])
    return x * rstd * gamma, rstd


def _grad_formula(attrs: AttrMap, x: Any, gamma: Any, rstd: Any, dy: Any) -> tuple[Any, Any]:
    unit, pulled = x * rstd, dy * gamma
    dx = (pulled - unit * (pulled * unit).mean(-1, keepdims=True)) * rstd
    return dx, reduce_to(dy * unit, gamma.shape)


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # With h = x * rstd and g = dy * gamma: dx = rstd * (g - h * avg(g * h)).
    x, gamma, rstd, dy = inputs
    dx, dgamma = outputs
    width = x.shape[-1]
    average = _average(context, width, x.dtype)
    dgamma.fill(0)
    for rows, scale, passed, made in row_blocks(width, *map(rows_of, (x, rstd, dy, dx))):
        unit = scratch(context, "unit", rows.shape, rows.dtype)
        work = scratch(context, "work", rows.shape, rows.dtype)
        np.multiply(rows, scale, out=unit)
        np.multiply(unit, passed, out=work)
        np.add(dgamma, np.add.reduce(work, axis=0), out=dgamma)
        np.multiply(work, gamma, out=work)
        np.multiply(unit, np.matmul(work, average), out=unit)
        np.multiply(passed, gamma, out=made)
        np.subtract(made, unit, out=made)
        np.multiply(made, scale, out=made)


define_op(
    "rms_norm",
    infer="x F!, gamma F -> y F, rstd A",
    rule="... [d], [d] -> ... [d], ... 1",
    attrs=(Float("eps", least=0.0),),
    kernel=in_float32(contiguous(_kernel)),
    gradient=unless_first(by_op("rms_norm", "rms_norm_grad"), _formula),
    flops=4,
    inplace=((0, 0),),
    doc="(x, gamma) -> (x / sqrt(mean x² + eps) * gamma, 1 / root mean square) over the last "
    "axis, which stays whole; the latter in at least float32.",
)
define_op(
    "rms_norm_grad",
    infer="x F!, gamma F, rstd A, dy F -> dx F, dgamma F",
    rule="... [d], [d], ... 1, ... [d] -> ... [d], [d]",
    kernel=in_float32(contiguous(_grad_kernel)),
    gradient=by_formula(_grad_formula),
    linear=((3,),),
    flops=9,
    inplace=((0, 0), (0, 3)),
    doc="(x, gamma, rstd, dy) -> (dx, dgamma).",
)
