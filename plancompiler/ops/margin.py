"""Margins on the cosine of the right class, for losses of face recognition.

x -> cos(margin1 * acos x + margin2) - margin3 unites SphereFace (W. Liu et al., 2017), ArcFace
(J. Deng et al., 2019) and CosFace (H. Wang et al., 2018).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ops.attributes import Float, Int
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import by_op
from plancompiler.ops.kernel import contiguous, in_float32
from plancompiler.ops.loss import own_rows
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, apply, define_op
from plancompiler.ops.softmax import IGNORE_INDEX

NEAR_ONE = 1.0 - 1e-6
"""The angle is that of a cosine clamped to this: beyond, its slope grows without bound."""

_MARGINS = ("margin1", "margin2", "margin3", "scale")
_ATTRS = (*map(Float, _MARGINS), Int("ignore_index", IGNORE_INDEX))


def margins(attrs: AttrMap) -> tuple[float, float, float, float]:
    """The three margins and the scale."""
    first, second, third, scale = (attrs[name] for name in _MARGINS)
    margins = first, second, third, scale
    if not np.isfinite(margins).all():
        raise AttributeValueError("margins and scale are finite numbers", got=margins)
    return margins


def _infer(inputs: Types, attrs: AttrMap) -> Types:
    margins(attrs)
    return inputs[:1]


def _targets(context: KernelContext, labels: Array) -> tuple[Array, Array]:
    """Rows whose label is a class held here, and its column."""
    classes, held = context.input_shapes[0][-1], context.input_regions[0][-1]
    return own_rows("margin_cross_entropy", labels, context.attrs, classes, held)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (cosines, labels), (out,) = inputs, outputs
    first, second, third, scale = margins(context.attrs)
    rows, columns = _targets(context, labels)
    width = cosines.shape[-1]
    x = cosines.reshape(labels.size, width)[rows, columns]
    if first != 1.0 or second != 0.0:
        x = np.cos(np.arccos(np.clip(x, -NEAR_ONE, NEAR_ONE)) * first + second)
    np.multiply(cosines, scale, out=out)
    out.reshape(labels.size, width)[rows, columns] = (x - third) * scale


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (cosines, labels, dy), (out,) = inputs, outputs
    first, second, _, scale = margins(context.attrs)
    width = cosines.shape[-1]
    rows, columns = _targets(context, labels)
    x = cosines.reshape(labels.size, width)[rows, columns]
    slope = None
    if first != 1.0 or second != 0.0:
        # d cos(a acos x + b) / dx = a sin(a acos x + b) / sqrt(1 - x²); the clamped is constant.
        inside = np.abs(x) < NEAR_ONE
        angle = np.arccos(np.where(inside, x, 0))
        slope = inside * first * np.sin(angle * first + second) / np.sin(angle)
    np.multiply(dy, scale, out=out)
    if slope is not None:
        out.reshape(labels.size, width)[rows, columns] *= slope.astype(out.dtype, copy=False)


def _grad_formula(attrs: AttrMap, cosines: Any, labels: Any, dy: Any) -> Any:
    first, second, _, scale = margins(attrs)
    passed = dy * scale
    if first == 1.0 and second == 0.0:
        return passed
    # nll_loss picks, and its gradient places, minus the number of each row's label.
    kept = {name: value for name, value in attrs.items() if name == "ignore_index"}
    x, pulled = (-apply("nll_loss", each, labels, **kept) for each in (cosines, passed))
    inside = (abs(x) < NEAR_ONE).cast(x.dtype)
    angle = apply("acos", x * inside)
    slope = inside * apply("sin", angle * first + second) * first / apply("sin", angle)
    change = pulled * (1.0 - slope)
    return passed + apply("nll_loss_grad", labels, change, **kept, classes=cosines.shape[-1])


define_op(
    "margin_logits",
    infer=_infer,
    operands="cosines F!, labels i -> y F",
    rule="... v, ... -> ... v",
    attrs=_ATTRS,
    kernel=in_float32(contiguous(_kernel)),
    gradient=by_op("margin_logits", "margin_logits_grad"),
    flops=1,
    inplace=((0, 0),),
    portable=False,
    doc="(cosines [..., v], labels) -> `scale` * cosines, where that of the label is "
    "cos(`margin1` * acos x + `margin2`) - `margin3` first. Rows with label `ignore_index` "
    "are only scaled.",
)
define_op(
    "margin_logits_grad",
    infer=_infer,
    operands="cosines F!, labels i, dy F -> dcosines F",
    rule="... v, ..., ... v -> ... v",
    attrs=_ATTRS,
    kernel=in_float32(contiguous(_grad_kernel)),
    gradient=by_formula(_grad_formula),
    linear=((2,),),
    flops=1,
    inplace=((0, 2), (0, 0)),
    portable=False,
    doc="The gradient of margin_logits: (cosines, labels, dy) -> dcosines.",
)
