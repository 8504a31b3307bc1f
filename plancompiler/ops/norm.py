"""Layer normalisation over the last axis (J. L. Ba, J. R. Kiros, G. E. Hinton, 2016)."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.ops import row_loops
from plancompiler.ops.attributes import Float
from plancompiler.ops.formula import by_formula, unless_first
from plancompiler.ops.gradient import by_op, reduce_to
from plancompiler.ops.kernel import contiguous, in_float32, row_blocks, rows_of, scratch
from plancompiler.ops.numba_loops import row_loop
from plancompiler.ops.registry import Arrays, AttrMap, KernelContext, apply, define_op


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    x, gamma, beta = inputs
    width = x.shape[-1]
    eps = context.attrs["eps"]
    loop = row_loop(row_loops.layer_norm, x, gamma, beta, *outputs)
    if loop is not None:
        y, mean, rstd = map(rows_of, outputs)
        number = x.dtype.type
        loop(rows_of(x), gamma, beta, number(1.0 / width), number(eps), y, mean, rstd)
        return
    average = scratch(context, "average", (width, 1), x.dtype)
    average.fill(1.0 / width)
    arrays = (rows_of(array) for array in (x, *outputs))
    for x, y, mean, rstd in row_blocks(width, *arrays):
        work = scratch(context, "work", y.shape, y.dtype)
        np.matmul(x, average, out=mean)
        np.subtract(x, mean, out=y)
        np.multiply(y, y, out=work)
        np.matmul(work, average, out=rstd)
        np.add(rstd, eps, out=rstd)
        np.sqrt(rstd, out=rstd)
        np.reciprocal(rstd, out=rstd)
        np.multiply(y, rstd, out=y)
        np.multiply(y, gamma, out=y)
        np.add(y, beta, out=y)


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # With h = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - avg(g) - h * avg(g * h)).
    x, gamma, mean, rstd, dy = inputs
    dx, dgamma, dbeta = outputs
    width = x.shape[-1]
    average = scratch(context, "average", (width, 1), x.dtype)
    average.fill(1.0 / width)
    dgamma.fill(0)
    dbeta.fill(0)
    loop = row_loop(row_loops.layer_norm_grad, *inputs, *outputs)
    arrays = (rows_of(array) for array in (x, mean, rstd, dy, dx))
    for x, mean, rstd, dy, dx in row_blocks(width, *arrays):
        if loop is not None:
            loop(x, gamma, mean, rstd, dy, x.dtype.type(1.0 / width), dx, dgamma, dbeta)
            continue
        unit = scratch(context, "unit", x.shape, x.dtype)
        work = scratch(context, "work", x.shape, x.dtype)
        np.subtract(x, mean, out=unit)
        np.multiply(unit, rstd, out=unit)
        np.multiply(unit, dy, out=work)
        np.add(dgamma, np.add.reduce(work, axis=0), out=dgamma)
        np.add(dbeta, np.add.reduce(dy, axis=0), out=dbeta)
        np.multiply(work, gamma, out=work)
        np.multiply(unit, np.matmul(work, average), out=unit)
        np.multiply(dy, gamma, out=dx)
        np.add(unit, np.matmul(dx, average), out=unit)
        np.subtract(dx, unit, out=dx)
        np.multiply(dx, rstd, out=dx)


def _formula(attrs: AttrMap, x: Any, gamma: Any, beta: Any) -> tuple[Any, ...]:
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    spread = (centred * centred).mean(-1, keepdims=True)
    rstd = apply("rsqrt", spread + attrs["eps"])
    return centred * rstd * gamma + beta, mean, rstd


def _grad_formula(
    attrs: AttrMap, x: Any, gamma: Any, mean: Any, rstd: Any, dy: Any
) -> tuple[Any, ...]:
    unit, pulled = (x - mean) * rstd, dy * gamma
    shared = pulled.mean(-1, keepdims=True) + unit * (pulled * unit).mean(-1, keepdims=True)
    return (pulled - shared) * rstd, reduce_to(dy * unit, gamma.shape), reduce_to(dy, gamma.shape)


define_op(
    "layer_norm",
    infer="x F!, gamma F, beta F -> y F, mean A, rstd A",
    rule="... [d], [d], [d] -> ... [d], ... 1, ... 1",
    attrs=(Float("eps", least=0.0),),
    kernel=in_float32(contiguous(_kernel)),
    gradient=unless_first(by_op("layer_norm", "layer_norm_grad"), _formula),
    flops=7,
    inplace=((0, 0),),
    doc="(x, gamma, beta) -> (y, mean, 1 / standard deviation) over the last axis, which stays "
    "whole; statistics in at least float32.",
)
define_op(
    "layer_norm_grad",
    infer="x F!, gamma F, mean A, rstd A, dy F -> dx F, dgamma F, dbeta F",
    rule="... [d], [d], ... 1, ... 1, ... [d] -> ... [d], [d], [d]",
    kernel=in_float32(contiguous(_grad_kernel)),
    gradient=by_formula(_grad_formula),
    linear=((4,),),
    flops=14,
    inplace=((0, 0), (0, 4)),
    doc="(x, gamma, mean, rstd, dy) -> (dx, dgamma, dbeta).",
)
