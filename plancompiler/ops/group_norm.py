"""Group normalisation (Y. Wu, K. He, 2018); one channel per group is instance normalisation.

Each image is normalised over a group of channels and all of space. Images and groups split; space
and the channels of a group stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import element_count
from plancompiler.ops import kernel as blocking
from plancompiler.ops.attributes import Float, Int
from plancompiler.ops.formula import by_formula, unless_first
from plancompiler.ops.gradient import by_op
from plancompiler.ops.groups import group_split
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, apply, define_op


def _check(inputs: Types, attrs: AttrMap) -> None:
    shape, groups = inputs[0].shape, attrs["groups"]
    if shape[1] % groups or element_count(shape[1:]) == 0:
        raise ShapeError(
            "group normalisation needs channels that its groups divide, and elements in each group",
            got=f"{shape} in {groups} groups",
        )


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    _check(inputs, attrs)
    x = inputs[0]
    statistics = TensorType((x.shape[0], attrs["groups"]), x.dtype.accumulator)
    return x, statistics, statistics


def _grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    _check(inputs, attrs)
    return inputs[0], inputs[1], inputs[1]


class _Layout:
    """How the local arrays fall into groups."""

    def __init__(self, context: KernelContext, x: Array) -> None:
        shape = context.input_shapes[0]
        self.channels = shape[1] // context.attrs["groups"]
        self.space = element_count(shape[2:])
        self.groups = x.shape[1] // self.channels
        self.average = scratch(context, "average", (self.channels * self.space, 1), x.dtype)
        self.average.fill(1.0 / self.average.size)

    def wide(self, array: Array) -> Array:
        """An array like x as [images, groups, channels, space]."""
        return array.reshape(len(array), self.groups, self.channels, self.space)

    def narrow(self, array: Array) -> Array:
        """Statistics as [images, groups, 1, 1]."""
        return array.reshape(len(array), self.groups, 1, 1)

    def parameter(self, array: Array) -> Array:
        """gamma or beta as [groups, channels, 1]."""
        return array.reshape(self.groups, self.channels, 1)

    def mean(self, array: Array, out: Array | None = None) -> Array:
        """Means over the groups of a wide array, as [images, groups, 1, 1]."""
        shape = (len(array), self.groups, 1, self.channels * self.space)
        means: Array = np.matmul(array.reshape(shape), self.average, out=out)
        return means

    def pieces(self, *arrays: Array) -> Iterator[tuple[Array, ...]]:
        """Images that fit in cache."""
        size = self.groups * self.channels * self.space * arrays[0].itemsize
        step = max(1, blocking.BLOCK_BYTES // max(1, size))
        for start in range(0, len(arrays[0]), step):
            yield tuple(array[start : start + step] for array in arrays)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (x, gamma, beta), (y, mean, rstd) = inputs, outputs
    eps = context.attrs["eps"]
    layout = _Layout(context, x)
    gamma, beta = layout.parameter(gamma), layout.parameter(beta)
    arrays = (layout.wide(x), layout.wide(y), layout.narrow(mean), layout.narrow(rstd))
    for seen, made, centre, scale in layout.pieces(*arrays):
        work = scratch(context, "work", seen.shape, seen.dtype)
        layout.mean(seen, out=centre)
        np.subtract(seen, centre, out=made)
        np.multiply(made, made, out=work)
        layout.mean(work, out=scale)
        np.add(scale, eps, out=scale)
        np.sqrt(scale, out=scale)
        np.reciprocal(scale, out=scale)
        np.multiply(made, scale, out=made)
        np.multiply(made, gamma, out=made)
        np.add(made, beta, out=made)


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # With h = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - avg(g) - h * avg(g * h)).
    x, gamma, mean, rstd, dy = inputs
    dx, dgamma, dbeta = outputs
    layout = _Layout(context, x)
    gamma = layout.parameter(gamma)
    by_gamma, by_beta = dgamma.reshape(gamma.shape[:2]), dbeta.reshape(gamma.shape[:2])
    by_gamma.fill(0)
    by_beta.fill(0)
    arrays = (
        *map(layout.wide, (x, dy, dx)),
        *map(layout.narrow, (mean, rstd)),
    )
    for seen, passed, made, centre, scale in layout.pieces(*arrays):
        unit = scratch(context, "unit", seen.shape, seen.dtype)
        work = scratch(context, "work", seen.shape, seen.dtype)
        np.subtract(seen, centre, out=unit)
        np.multiply(unit, scale, out=unit)
        np.multiply(unit, passed, out=work)
        np.add(by_gamma, np.add.reduce(work, axis=(0, 3)), out=by_gamma)
        np.add(by_beta, np.add.reduce(passed, axis=(0, 3)), out=by_beta)
        np.multiply(work, gamma, out=work)
        np.multiply(unit, layout.mean(work), out=unit)
        np.multiply(passed, gamma, out=made)
        np.add(unit, layout.mean(made), out=unit)
        np.subtract(made, unit, out=made)
        np.multiply(made, scale, out=made)


def _wide(x: Any, attrs: AttrMap) -> Any:
    """x [n, c, ...] as [n, groups, elements of a group]."""
    count, groups = x.shape[0], attrs["groups"]
    return x.reshape(count, groups, element_count(x.shape[1:]) // groups)


def _over_channels(parameter: Any, x: Any) -> Any:
    """gamma or beta as what is broadcast to x."""
    return parameter.reshape((x.shape[1], *(1,) * (x.ndim - 2)))


def _formula(attrs: AttrMap, x: Any, gamma: Any, beta: Any) -> tuple[Any, ...]:
    wide = _wide(x, attrs)
    mean = wide.mean(-1, keepdims=True)
    centred = wide - mean
    spread = (centred * centred).mean(-1, keepdims=True)
    rstd = apply("rsqrt", spread + attrs["eps"])
    y = (centred * rstd).reshape(x.shape) * _over_channels(gamma, x) + _over_channels(beta, x)
    return y, mean.reshape(mean.shape[:2]), rstd.reshape(mean.shape[:2])


def _grad_formula(
    attrs: AttrMap, x: Any, gamma: Any, mean: Any, rstd: Any, dy: Any
) -> tuple[Any, ...]:
    mean, rstd = (each.reshape((*each.shape, 1)) for each in (mean, rstd))
    unit = (_wide(x, attrs) - mean) * rstd
    pulled = _wide(dy * _over_channels(gamma, x), attrs)
    shared = pulled.mean(-1, keepdims=True) + unit * (pulled * unit).mean(-1, keepdims=True)
    others = (0, *range(2, x.ndim))
    dgamma = (dy * unit.reshape(x.shape)).sum(others)
    return ((pulled - shared) * rstd).reshape(x.shape), dgamma, dy.sum(others)


def _group_count(inputs: Types, attrs: AttrMap) -> int | None:
    """The number of groups where the rule line cannot split between them."""
    groups = attrs["groups"]
    return None if groups in (1, inputs[0].shape[1]) else groups


def _line(inputs: Types, attrs: AttrMap, pattern: str) -> str:
    """`pattern` with X for x, c for parameters, T for statistics."""
    groups, channels = attrs["groups"], inputs[0].shape[1]
    space = " ".join(f"[s{axis}]" for axis in range(len(inputs[0].shape) - 2))
    one_each = groups == channels
    axis = "c" if one_each else "[c]"
    names = {
        "X": f"n {axis} {space}".strip(),
        "C": axis,
        "T": "n c" if one_each else "n [g]",
    }
    for name, text in names.items():
        pattern = pattern.replace(name, text)
    return pattern


_extra, _legal = group_split(_group_count, (1, 0, 0), (1, 1, 1))
define_op(
    "group_norm",
    infer=_infer,
    operands="x F n c ..., gamma F c, beta F c -> y F, mean A, rstd A",
    rule=lambda inputs, outputs, attrs: _line(inputs, attrs, "X, C, C -> X, T, T"),
    attrs=(
        Int("groups", least=1),
        Float("eps", least=0.0),
    ),
    kernel=in_float32(contiguous(_kernel)),
    gradient=unless_first(by_op("group_norm", "group_norm_grad"), _formula),
    extra=_extra,
    legal=_legal,
    flops=7,
    inplace=((0, 0),),
    doc="(x [n, c, ...], gamma [c], beta [c]) -> (y, mean, 1 / standard deviation) over each "
    "of `groups` groups of channels and all of space.",
)
_extra, _legal = group_split(_group_count, (1, 0, 1, 1, 1), (1, 0, 0))
define_op(
    "group_norm_grad",
    infer=_grad_infer,
    operands="x F n c ..., gamma F c, mean A n groups, rstd A n groups, dy F n c ... -> "
    "dx F, dgamma F, dbeta F",
    rule=lambda inputs, outputs, attrs: _line(inputs, attrs, "X, C, T, T, X -> X, C, C"),
    attrs=(Int("groups", least=1),),
    kernel=in_float32(contiguous(_grad_kernel)),
    gradient=by_formula(_grad_formula),
    linear=((4,),),
    extra=_extra,
    legal=_legal,
    flops=14,
    inplace=((0, 0), (0, 4)),
    doc="(x, gamma, mean, rstd, dy) -> (dx, dgamma, dbeta).",
)
