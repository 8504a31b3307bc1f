"""Losses of predictions against targets, element by element, and of log-probabilities of classes.

Each gives one loss per element (or row); how they are averaged is the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from plancompiler.errors import ExecutionError
from plancompiler.ir.operators import filled
from plancompiler.ops.attributes import Float, Int
from plancompiler.ops.gradient import by_op
from plancompiler.ops.kernel import contiguous
from plancompiler.ops.pointwise import register_pointwise
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, apply, define_op
from plancompiler.ops.softmax import IGNORE_INDEX

# --- distances ------------------------------------------------------------------------------------


_LEAST_WIDTH = 1e-30
"""Widths of a bend are positive."""


def _bend(difference: Any, width: float, slope: float) -> Any:
    """A parabola for |difference| below `width`, then a line of slope `slope`."""
    # With d = |difference| and c = min(d, width): slope * c * (d - c / 2) / width.
    distance = abs(difference)
    near = apply("minimum_scalar", distance, scalar=width)
    return near * (distance - near * 0.5) * (slope / width)


def _bend_slope(difference: Any, width: float, slope: float) -> Any:
    bent = apply("clip", difference, low=-width, high=width, edges=False)
    return bent * (slope / width)


def _minus_slope(kind: str) -> Callable[..., Any]:
    """The target's gradient of a loss that depends on the difference alone."""
    return lambda x, target, dloss, **attrs: -apply(f"{kind}_grad", x, target, dloss, **attrs)


register_pointwise(
    "mse_loss",
    lambda x, target: apply("square", x - target),
    "(x - target)², per element.",
    slope=lambda x, target: (x - target) * 2.0,
    target_gradient=_minus_slope("mse_loss"),
    flops=4,
)
register_pointwise(
    "l1_loss",
    lambda x, target: abs(x - target),
    "|x - target|, per element.",
    slope=lambda x, target: apply("sign", x - target),
    target_gradient=_minus_slope("l1_loss"),
    flops=4,
)
register_pointwise(
    "smooth_l1_loss",
    lambda x, target, beta: _bend(x - target, beta, 1.0),
    "With d = |x - target|: d² / (2 beta) below beta, d - beta / 2 above, per element.",
    schema=(Float("beta", least=_LEAST_WIDTH),),
    slope=lambda x, target, beta: _bend_slope(x - target, beta, 1.0),
    target_gradient=_minus_slope("smooth_l1_loss"),
    flops=4,
)
register_pointwise(
    "huber_loss",
    lambda x, target, delta: _bend(x - target, delta, delta),
    "With d = |x - target|: d² / 2 below delta, delta * (d - delta / 2) above, per element "
    "(P. J. Huber, 1964).",
    schema=(Float("delta", least=_LEAST_WIDTH),),
    slope=lambda x, target, delta: _bend_slope(x - target, delta, delta),
    target_gradient=_minus_slope("huber_loss"),
    flops=4,
)


# --- probabilities --------------------------------------------------------------------------------

_LEAST_LOG = -100.0
"""Logarithms of probabilities are not taken below this, so that a certain error has a loss."""


def _bounded_log(x: Any) -> Any:
    # Of 0 too the bound is a constant, where the slope of the logarithm is infinite.
    low = x <= math.exp(_LEAST_LOG)
    safe = apply("where", low, filled(x, 1.0, ()), x)
    least = filled(x, _LEAST_LOG, ())
    return apply("where", low, least, safe.log())


def _bce(x: Any, target: Any) -> Any:
    log = apply("maximum_scalar", x.log(), scalar=_LEAST_LOG)
    other = apply("maximum_scalar", apply("log1p", -x), scalar=_LEAST_LOG)
    return -((log - other) * target + other)


register_pointwise(
    "bce_loss",
    _bce,
    "Binary cross-entropy of probabilities x: -(t log x + (1 - t) log(1 - x)), per element, "
    "logarithms not below -100.",
    # The denominator does not vanish.
    slope=lambda x, target: (x - target) / apply("maximum_scalar", (1.0 - x) * x, scalar=1e-12),
    target_gradient=lambda x, target, dloss: (_bounded_log(1.0 - x) - _bounded_log(x)) * dloss,
    flops=4,
)
register_pointwise(
    "bce_with_logits",
    # max(x, 0) - x * target + log(1 + exp(-|x|))
    lambda x, target: (
        apply("log1p", (-abs(x)).exp()) + apply("maximum_scalar", x, scalar=0.0) - x * target
    ),
    "Binary cross-entropy of sigmoid(x), per element, computed from x without overflow.",
    slope=lambda x, target: x.sigmoid() - target,
    target_gradient=lambda x, target, dloss: -(x * dloss),
    flops=4,
)
register_pointwise(
    "kl_div",
    lambda x, target: (
        (apply("where", target > 0, target, filled(target, 1.0, ())).log() - x) * target
    ),
    "Kullback-Leibler divergence target * (log target - x) of log-probabilities x, per element; "
    "zero where the target is.",
    slope=lambda x, target: -target,
    target_gradient=lambda x, target, dloss: (target.log() + 1.0 - x) * dloss,
    flops=4,
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
    flat, ignored = labels.reshape(-1), attrs["ignore_index"]
    check_labels(kind, flat, classes, ignored)
    low, high = held
    rows = np.flatnonzero((flat >= low) & (flat < high) & (flat != ignored))
    return rows, flat[rows] - low


def _nll_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (logs, labels), (out,) = inputs, outputs
    count, held = context.input_shapes[0][-1], context.input_regions[0][-1]
    rows, classes = own_rows("nll_loss", labels, context.attrs, count, held)
    out.fill(0)
    out.reshape(-1)[rows] = -logs.reshape(labels.size, logs.shape[-1])[rows, classes]


def _nll_grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (labels, dloss), (out,) = inputs, outputs
    count, held = context.output_shapes[0][-1], context.output_regions[0][-1]
    rows, classes = own_rows("nll_loss", labels, context.attrs, count, held)
    out.fill(0)
    out.reshape(labels.size, out.shape[-1])[rows, classes] = -dloss.reshape(-1)[rows]


define_op(
    "nll_loss",
    infer="logs F! ... classes, labels i ... -> loss F ...",
    rule="... v, ... -> ...",
    attrs=(Int("ignore_index", IGNORE_INDEX),),
    kernel=contiguous(_nll_kernel),
    gradient=by_op("nll_loss", "nll_loss_grad"),
    linear=((0,),),
    flops=0,
    doc="Minus each row of log-probabilities at its label; zero where the label is "
    "`ignore_index`. With the classes split, each device has the labels that it holds.",
)
define_op(
    "nll_loss_grad",
    infer="labels i, dloss F -> dlogs F",
    rule="..., ... -> ... classes",
    attrs=(
        Int("ignore_index", IGNORE_INDEX),
        Int("classes", least=1),
    ),
    kernel=contiguous(_nll_grad_kernel),
    gradient=by_op("nll_loss_grad", "nll_loss"),
    linear=((1,),),
    flops=0,
    doc="The gradient of nll_loss: (labels, dloss) -> dlog-probabilities [..., classes].",
)
