"""Losses of predictions against targets, element by element, and of log-probabilities of classes.

Each gives one loss per element (or row); how they are averaged is the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import ExecutionError, ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import element_count
from plancompiler.ops.check import (
    FLOATS,
    INTEGERS,
    expect_dtype,
    expect_inputs,
    expect_ndim,
    expect_same_dtype,
    expect_shape,
    float_attr,
    int_attr,
    only_attrs,
)
from plancompiler.ops.formula import by_formula
from plancompiler.ops.kernel import blocks, contiguous, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    AttrMap,
    KernelContext,
    OpDef,
    Types,
    apply,
    register,
)
from plancompiler.ops.softmax import IGNORE_INDEX

Piece = Callable[[AttrMap, Array, Array, Array, Array], None]
"""(attributes, prediction, target, result, work buffer): a formula on pieces that fit in cache."""
Slope = Callable[[AttrMap, Any, Any], Any]
"""(attributes, prediction, target) -> d loss / d prediction, by tensor ops."""
TargetGradient = Callable[[AttrMap, Any, Any, Any], Any]
"""(attributes, prediction, target, dloss) -> the gradient of the target."""


def _register_pointwise(
    kind: str,
    loss: Piece,
    slope: Piece,
    formula: Slope,
    target_gradient: TargetGradient | None,
    doc: str,
    parameter: str | None = None,
) -> None:
    """A loss per element, and its gradient op. `slope` is d loss / d prediction; `formula`
    is the same, for second derivatives.

    Without `target_gradient` the loss depends on the difference alone.
    """
    grad_kind = f"{kind}_grad"
    names = () if parameter is None else (parameter,)

    def check(name: str, inputs: Types, attrs: AttrMap, count: int) -> Types:
        expect_inputs(name, inputs, count)
        only_attrs(name, attrs, *names)
        for each in names:
            _positive(attrs, each)
        for tensor in inputs:
            expect_dtype(name, tensor, FLOATS)
            expect_shape(name, tensor, inputs[0].shape, "target and gradient")
        expect_same_dtype(name, inputs)
        return inputs[:1]

    def kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        for x, target, out in blocks(*inputs, *outputs):
            loss(context.attrs, x, target, out, scratch(context, "work", x.shape, x.dtype))

    def grad_kernel(
        context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> None:
        for x, target, dloss, out in blocks(*inputs, *outputs):
            result = scratch(context, "slope", x.shape, x.dtype)
            slope(context.attrs, x, target, result, scratch(context, "work", x.shape, x.dtype))
            np.multiply(result, dloss, out=out)

    def gradient(
        attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        x, target = inputs
        dx = apply(grad_kind, x, target, grads[0], **attrs)
        if target_gradient is None:
            return dx, -dx
        return dx, target_gradient(attrs, x, target, grads[0])

    register(
        OpDef(
            kind,
            infer=lambda inputs, attrs: check(kind, inputs, attrs, 2),
            rule="..., ... -> ...",
            kernel=in_float32(kernel),
            gradient=gradient,
            flops=lambda inputs, outputs, attrs: 4 * element_count(inputs[0].shape),
            inplace=((0, 0), (0, 1)) if kind in _SAFE else (),
            doc=doc,
        )
    )
    register(
        OpDef(
            grad_kind,
            infer=lambda inputs, attrs: check(grad_kind, inputs, attrs, 3),
            rule="..., ..., ... -> ...",
            kernel=in_float32(grad_kernel),
            gradient=by_formula(lambda attrs, x, target, dloss: formula(attrs, x, target) * dloss),
            linear=((2,),),
            flops=lambda inputs, outputs, attrs: 4 * element_count(inputs[0].shape),
            inplace=((0, 0), (0, 1), (0, 2)),
            doc=f"The gradient of {kind} by its prediction: (x, target, dloss) -> dx.",
        )
    )


_SAFE = frozenset({"mse_loss", "l1_loss"})
"""Losses whose kernel reads its inputs once, so that it may write over them."""


_LEAST_WIDTH = 1e-30
"""Widths of a bend are positive."""


def _positive(attrs: AttrMap, name: str) -> float:
    return float_attr(attrs, name, least=_LEAST_WIDTH)


# --- distances ------------------------------------------------------------------------------------


def _mse(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    np.subtract(x, target, out=out)
    np.multiply(out, out, out=out)


def _mse_slope(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    np.subtract(x, target, out=out)
    np.multiply(out, 2.0, out=out)


def _l1(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    np.subtract(x, target, out=out)
    np.abs(out, out=out)


def _l1_slope(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    np.subtract(x, target, out=out)
    np.sign(out, out=out)


def _bend(width: float, slope: float, x: Array, target: Array, out: Array, work: Array) -> None:
    """A parabola for |x - target| below `width`, then a line of slope `slope`."""
    # With d = |x - target| and c = min(d, width): slope * c * (d - c / 2) / width.
    np.subtract(x, target, out=work)
    np.abs(work, out=work)
    np.minimum(work, width, out=out)
    np.subtract(work, np.multiply(out, 0.5), out=work)
    np.multiply(out, work, out=out)
    np.multiply(out, slope / width, out=out)


def _bend_slope(width: float, slope: float, x: Array, target: Array, out: Array) -> None:
    np.subtract(x, target, out=out)
    np.clip(out, -width, width, out=out)
    np.multiply(out, slope / width, out=out)


def _bend_formula(width: float, slope: float, difference: Any) -> Any:
    bent = apply("clip", difference, low=-width, high=width, edges=False)
    return bent * (slope / width)


def _smooth_l1(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    _bend(_positive(attrs, "beta"), 1.0, x, target, out, work)


def _smooth_l1_slope(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    _bend_slope(_positive(attrs, "beta"), 1.0, x, target, out)


def _huber(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    delta = _positive(attrs, "delta")
    _bend(delta, delta, x, target, out, work)


def _huber_slope(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    delta = _positive(attrs, "delta")
    _bend_slope(delta, delta, x, target, out)


_register_pointwise(
    "mse_loss",
    _mse,
    _mse_slope,
    lambda attrs, x, target: (x - target) * 2.0,
    None,
    "(x - target)², per element.",
)
_register_pointwise(
    "l1_loss",
    _l1,
    _l1_slope,
    lambda attrs, x, target: apply("sign", x - target),
    None,
    "|x - target|, per element.",
)
_register_pointwise(
    "smooth_l1_loss",
    _smooth_l1,
    _smooth_l1_slope,
    lambda attrs, x, target: _bend_formula(_positive(attrs, "beta"), 1.0, x - target),
    None,
    "With d = |x - target|: d² / (2 beta) below beta, d - beta / 2 above, per element.",
    "beta",
)
_register_pointwise(
    "huber_loss",
    _huber,
    _huber_slope,
    lambda attrs, x, target: _bend_formula(*(_positive(attrs, "delta"),) * 2, x - target),
    None,
    "With d = |x - target|: d² / 2 below delta, delta * (d - delta / 2) above, per element "
    "(P. J. Huber, 1964).",
    "delta",
)


# --- probabilities --------------------------------------------------------------------------------

_LEAST_LOG = -100.0
"""Logarithms of probabilities are not taken below this, so that a certain error has a loss."""


def _bce(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    # -(target * log x + (1 - target) * log(1 - x))
    with np.errstate(divide="ignore"):
        np.log(x, out=work)
        np.maximum(work, _LEAST_LOG, out=work)
        np.log1p(np.negative(x), out=out)
    np.maximum(out, _LEAST_LOG, out=out)
    np.subtract(work, out, out=work)
    np.multiply(work, target, out=work)
    np.add(out, work, out=out)
    np.negative(out, out=out)


def _bce_slope(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    # (x - target) / (x * (1 - x)), where the denominator does not vanish.
    np.subtract(1.0, x, out=work)
    np.multiply(work, x, out=work)
    np.maximum(work, 1e-12, out=work)
    np.subtract(x, target, out=out)
    np.divide(out, work, out=out)


def _bce_formula(attrs: AttrMap, x: Any, target: Any) -> Any:
    return (x - target) / apply("maximum_scalar", (1.0 - x) * x, scalar=1e-12)


def _bce_target(attrs: AttrMap, x: Any, target: Any, dloss: Any) -> Any:
    log, other = (_bounded_log(each) for each in (x, 1.0 - x))
    return (other - log) * dloss


def _bounded_log(x: Any) -> Any:
    # Of 0 too the bound is a constant, where the slope of the logarithm is infinite.
    low = x <= math.exp(_LEAST_LOG)
    safe = apply("where", low, x._full((), x.dtype, 1.0), x)  # noqa: SLF001  # every tensor's door
    least = x._full((), x.dtype, _LEAST_LOG)  # noqa: SLF001  # as above
    return apply("where", low, least, safe.log())


def _logits(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    # max(x, 0) - x * target + log(1 + exp(-|x|))
    np.abs(x, out=work)
    np.negative(work, out=work)
    np.exp(work, out=work)
    np.log1p(work, out=out)
    np.maximum(x, 0.0, out=work)
    np.add(out, work, out=out)
    np.multiply(x, target, out=work)
    np.subtract(out, work, out=out)


def _logits_slope(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    # sigmoid(x) - target, the sigmoid as 1/2 + tanh(x / 2) / 2, which cannot overflow
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    np.multiply(out, 0.5, out=out)
    np.add(out, 0.5, out=out)
    np.subtract(out, target, out=out)


def _kl(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    # target * (log target - x); zero where the target is
    np.log(np.where(target > 0, target, 1.0), out=out, casting="same_kind")
    np.subtract(out, x, out=out)
    np.multiply(out, target, out=out)


def _kl_slope(attrs: AttrMap, x: Array, target: Array, out: Array, work: Array) -> None:
    np.negative(target, out=out)


def _kl_target(attrs: AttrMap, x: Any, target: Any, dloss: Any) -> Any:
    return (target.log() + 1.0 - x) * dloss


_register_pointwise(
    "bce_loss",
    _bce,
    _bce_slope,
    _bce_formula,
    _bce_target,
    "Binary cross-entropy of probabilities x: -(t log x + (1 - t) log(1 - x)), per element, "
    "logarithms not below -100.",
)
_register_pointwise(
    "bce_with_logits",
    _logits,
    _logits_slope,
    lambda attrs, x, target: x.sigmoid() - target,
    lambda attrs, x, target, dloss: -(x * dloss),
    "Binary cross-entropy of sigmoid(x), per element, computed from x without overflow.",
)
_register_pointwise(
    "kl_div",
    _kl,
    _kl_slope,
    lambda attrs, x, target: -target,
    _kl_target,
    "Kullback-Leibler divergence target * (log target - x) of log-probabilities x, per element; "
    "zero where the target is.",
)


# --- classes --------------------------------------------------------------------------------------


def check_labels(kind: str, flat: Array, classes: int, ignored: int) -> None:
    """Every label is a class or says that its row does not count."""
    wrong = (flat != ignored) & ((flat < 0) | (flat >= classes))
    if wrong.any():
        raise ExecutionError(
            f"a label of {kind} is no class",
            got=int(flat[np.argmax(wrong)]),
            expected=f"0 to {classes - 1}, or {ignored} to leave an example out",
        )


def own_rows(
    kind: str, labels: Array, attrs: AttrMap, classes: int, held: tuple[int, int]
) -> tuple[Array, Array]:
    """Rows whose label is a class held here, of those that count, and these classes from 0.

    Raises ExecutionError where a label is neither a class nor `ignore_index`.
    """
    flat, ignored = labels.reshape(-1), _ignored(attrs)
    check_labels(kind, flat, classes, ignored)
    low, high = held
    rows = np.flatnonzero((flat >= low) & (flat < high) & (flat != ignored))
    return rows, flat[rows] - low


def _ignored(attrs: AttrMap) -> int:
    return int_attr(attrs, "ignore_index", IGNORE_INDEX)


def _nll_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("nll_loss", inputs, 2)
    only_attrs("nll_loss", attrs, "ignore_index")
    _ignored(attrs)
    logs, labels = inputs
    expect_dtype("nll_loss", logs, FLOATS, "log-probabilities")
    expect_dtype("nll_loss", labels, INTEGERS, "labels")
    expect_ndim("nll_loss", logs, 1, "log-probabilities")
    expect_shape("nll_loss", labels, logs.shape[:-1], "labels (one per row)")
    if logs.shape[-1] == 0:
        raise ShapeError("nll_loss needs at least one class", got=logs.shape)
    return (TensorType(labels.shape, logs.dtype),)


def _nll_kernel(context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    (logs, labels), (out,) = inputs, outputs
    count, held = context.input_shapes[0][-1], context.input_regions[0][-1]
    rows, classes = own_rows("nll_loss", labels, context.attrs, count, held)
    out.fill(0)
    out.reshape(-1)[rows] = -logs.reshape(labels.size, logs.shape[-1])[rows, classes]


def _nll_gradient(
    attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
) -> Sequence[Any]:
    logs, labels = inputs
    return apply("nll_loss_grad", labels, grads[0], **attrs, classes=logs.shape[-1]), None


def _nll_grad_infer(inputs: Types, attrs: AttrMap) -> Types:
    expect_inputs("nll_loss_grad", inputs, 2)
    only_attrs("nll_loss_grad", attrs, "ignore_index", "classes")
    _ignored(attrs)
    labels, dloss = inputs
    expect_dtype("nll_loss_grad", labels, INTEGERS, "labels")
    expect_dtype("nll_loss_grad", dloss, FLOATS, "gradient")
    expect_shape("nll_loss_grad", dloss, labels.shape, "gradient")
    return (TensorType((*labels.shape, int_attr(attrs, "classes", least=1)), dloss.dtype),)


def _nll_grad_kernel(
    context: KernelContext, inputs: Sequence[Array], outputs: Sequence[Array]
) -> None:
    (labels, dloss), (out,) = inputs, outputs
    count, held = context.output_shapes[0][-1], context.output_regions[0][-1]
    rows, classes = own_rows("nll_loss", labels, context.attrs, count, held)
    out.fill(0)
    out.reshape(labels.size, out.shape[-1])[rows, classes] = -dloss.reshape(-1)[rows]


def _nll_grad_gradient(
    attrs: AttrMap, inputs: Sequence[Any], outputs: Sequence[Any], grads: Sequence[Any]
) -> Sequence[Any]:
    shared = {name: value for name, value in attrs.items() if name != "classes"}
    return None, apply("nll_loss", grads[0], inputs[0], **shared)


register(
    OpDef(
        "nll_loss",
        infer=_nll_infer,
        rule="... v, ... -> ...",
        kernel=contiguous(_nll_kernel),
        gradient=_nll_gradient,
        linear=((0,),),
        flops=lambda inputs, outputs, attrs: 0,
        doc="Minus each row of log-probabilities at its label; zero where the label is "
        "`ignore_index`. With the classes split, each device has the labels that it holds.",
    )
)
register(
    OpDef(
        "nll_loss_grad",
        infer=_nll_grad_infer,
        rule="..., ... -> ... v",
        kernel=contiguous(_nll_grad_kernel),
        gradient=_nll_grad_gradient,
        linear=((1,),),
        flops=lambda inputs, outputs, attrs: 0,
        doc="The gradient of nll_loss: (labels, dloss) -> dlog-probabilities [..., classes].",
    )
)
