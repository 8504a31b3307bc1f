"""Softmax and cross-entropy with the classes split over devices, without gathering them.

Each is a composition: the greatest logit (partial maxima), then sums of exponentials below it
(partial sums), as in tensor-parallel training of language models (M. Shoeybi et al., 2019). Only
one number per row crosses between devices at a time, and gradients stay where their logits are.
The greatest logit only guards against overflow: it cancels out, so nothing is differentiated
through it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.ir.operators import filled
from plancompiler.ops.attributes import Int
from plancompiler.ops.formula import by_formula
from plancompiler.ops.gradient import widened
from plancompiler.ops.kernel import (
    contiguous,
    copy_unless_shared,
    in_float32,
    row_blocks,
    scratch,
)
from plancompiler.ops.loss import own_rows
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    apply,
    define_op,
    stops,
)
from plancompiler.ops.softmax import IGNORE_INDEX

# --- stop_gradient --------------------------------------------------------------------------------


define_op(
    "stop_gradient",
    infer="x X -> y X",
    rule="... -> ...",
    kernel=lambda context, inputs, outputs: copy_unless_shared(inputs[0], outputs[0]),
    gradient=stops,
    linear=((0,),),
    flops=0,
    view=((0, 0),),
    inplace=((0, 0),),
    moves=True,
    doc="The same values, as a constant to differentiation.",
)


# --- sums over classes ----------------------------------------------------------------------------


def _rows(context: KernelContext, labels: Array) -> tuple[Array, Array]:
    """Rows whose label is a class held here, and its column."""
    classes, held = context.input_shapes[0][-1], context.input_regions[0][-1]
    return own_rows("cross_entropy", labels, context.attrs, classes, held)


def _kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    logits, labels, shift = inputs
    total, target = (array.reshape(-1) for array in outputs)
    width = logits.shape[-1]
    flat, offset = logits.reshape(labels.size, width), shift.reshape(-1)
    rows, columns = _rows(context, labels)
    target.fill(0)
    target[rows] = flat[rows, columns] - offset[rows]
    if width == 0:
        total.fill(0)
        return
    for x, low, out in row_blocks(width, flat, offset, total):
        work = scratch(context, "work", x.shape, x.dtype)
        np.subtract(x, low[:, None], out=work)
        np.exp(work, out=work)
        np.add.reduce(work, axis=-1, out=out)


def _gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    logits, labels, shift = inputs
    wide = outputs[0].dtype
    dtotal, dtarget = (filled(shift, 0.0, dtype=wide) if grad is None else grad for grad in grads)
    dlogits = apply("class_sums_grad", logits, labels, shift, dtotal, dtarget, **attrs)
    counted = labels.not_equal(attrs["ignore_index"]).cast(wide)
    dshift = -(outputs[0] * dtotal) - counted * dtarget
    return dlogits, None, dshift if wide is shift.dtype else dshift.cast(shift.dtype)


def _grad_formula(
    attrs: AttrMap, logits: Any, labels: Any, shift: Any, dtotal: Any, dtarget: Any
) -> Any:
    column = (*labels.shape, 1)
    powers = (logits - shift.reshape(column)).exp()
    own = apply("nll_loss_grad", labels, -dtarget, **attrs, classes=logits.shape[-1])
    return powers * dtotal.reshape(column) + own


def _grad_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    logits, labels, shift, dtotal, dtarget = inputs
    width = logits.shape[-1]
    flat, made = (array.reshape(labels.size, width) for array in (logits, outputs[0]))
    rows, columns = _rows(context, labels)
    if width:
        for x, low, factor, out in row_blocks(
            width, flat, shift.reshape(-1), dtotal.reshape(-1), made
        ):
            np.subtract(x, low[:, None], out=out)
            np.exp(out, out=out)
            np.multiply(out, factor[:, None], out=out)
    made[rows, columns] += dtarget.reshape(-1)[rows]


define_op(
    "class_sums",
    infer="logits F!, labels i, shift F -> total A, target A",
    rule="... v, ..., ... -> ..., ...",
    attrs=(Int("ignore_index", IGNORE_INDEX),),
    kernel=in_float32(contiguous(_kernel)),
    gradient=_gradient,
    flops=3,
    portable=False,
    doc="(logits [..., v], labels, shift) -> per row the sum of exp(logits - shift), and the "
    "logit of the label minus shift (zero where the label is `ignore_index`), in at least "
    "float32. Both are partial with the classes split.",
)
define_op(
    "class_sums_grad",
    infer="logits F!, labels i, shift F, dtotal A, dtarget A -> dlogits F",
    rule="... v, ..., ..., ..., ... -> ... v",
    attrs=(Int("ignore_index", IGNORE_INDEX),),
    kernel=in_float32(contiguous(_grad_kernel)),
    gradient=by_formula(_grad_formula),
    linear=((3, 4),),
    flops=4,
    inplace=((0, 0),),
    portable=False,
    doc="The gradient of class_sums by the logits: (logits, labels, shift, dsum, dtarget) -> "
    "dlogits.",
)


# --- compositions ---------------------------------------------------------------------------------


def split_cross_entropy(logits: Any, labels: Any, ignore_index: int = IGNORE_INDEX) -> Any:
    """One loss per row, as the op `cross_entropy`, for logits whose classes may be split over
    devices.

    Three numbers per row are reduced over the devices; the logits and their gradients are not.
    """
    return _with_level(logits, labels, ignore_index)[0]


def split_softmax_with_cross_entropy(
    logits: Any, labels: Any, ignore_index: int = IGNORE_INDEX
) -> tuple[Any, Any]:
    """(losses, softmax): the same, and the softmax in the layout of the logits, which takes no
    further reduction.
    """
    losses, level = _with_level(logits, labels, ignore_index)
    shares = (widened(logits) - level.reshape((*labels.shape, 1))).exp()
    return losses, _as(logits, shares)


def _with_level(logits: Any, labels: Any, ignore_index: int) -> tuple[Any, Any]:
    """Losses, and the logarithm of each row's sum of exponentials."""
    shift = apply("stop_gradient", logits.max(-1))
    total, target = apply("class_sums", logits, labels, shift, ignore_index=ignore_index)
    counted = labels.not_equal(ignore_index).cast(total.dtype)
    lifted = total.log()
    return (lifted - target) * counted, lifted + widened(shift)


def _as(like: Any, tensor: Any) -> Any:
    return tensor if tensor.dtype is like.dtype else tensor.cast(like.dtype)


def split_softmax(x: Any, axis: int) -> Any:
    """Softmax along an axis that may be split over devices."""
    wide = widened(x)
    powers = (wide - apply("stop_gradient", wide.max(axis, keepdims=True))).exp()
    return _as(x, powers / powers.sum(axis, keepdims=True))


def split_log_softmax(x: Any, axis: int) -> Any:
    """The logarithm of softmax along an axis that may be split over devices."""
    wide = widened(x)
    lowered = wide - apply("stop_gradient", wide.max(axis, keepdims=True))
    return _as(x, lowered - lowered.exp().sum(axis, keepdims=True).log())
