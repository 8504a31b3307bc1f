"""What optimizers keep of gradients: moving averages, and Adafactor's means of rows and columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ops.attributes import Float
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Types,
    define_op,
)
from plancompiler.ops.update import define_update

# --- moving averages ------------------------------------------------------------------------------


def _average_infer(inputs: Types, attrs: AttrMap) -> Types:
    decay, power = attrs["decay"], attrs["power"]
    if (decay is None) == (power is None):
        raise AttributeValueError(
            "moving_average_update has either a decay or a power",
            got="neither" if decay is None else "decay, power",
        )
    return inputs[:1]


def _average(state: Any, value: Any, count: Any, *, decay: Any, power: Any) -> Any:
    if decay is None:
        decay = 1.0 - count**-power
    return state * decay + value * (1.0 - decay)


define_update(
    "moving_average_update",
    "state F, value F -> state F",
    _average,
    "(state, value) -> decay * state + (1 - decay) * value, where decay is given, or is "
    "1 - (step + 1) ** -power, with which the first value replaces the state.",
    attrs=(
        Float("decay", None, least=0.0, below=1.0),
        Float("power", None, least=0.0),
    ),
    infer=_average_infer,
)


# --- Adafactor ------------------------------------------------------------------------------------


def _moments_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (g,), (rows, columns) = inputs, outputs
    height, width = context.input_shapes[0][-2:]
    squares = scratch(context, "squares", g.shape, g.dtype)
    scale = context.attrs["grad_scale"]
    np.multiply(g, g, out=squares)
    if scale != 1.0:
        np.multiply(squares, scale * scale, out=squares)
    np.add(squares, context.attrs["eps"], out=squares)
    np.add.reduce(squares, axis=-1, out=rows)
    np.add.reduce(squares, axis=-2, out=columns)
    np.multiply(rows, 1.0 / max(width, 1), out=rows)
    np.multiply(columns, 1.0 / max(height, 1), out=columns)


def _factored_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # The second moment is rows * columns / mean(rows), so g times the roots of their inverses.
    (g, rows, columns, total), (out,) = inputs, outputs
    height = context.input_shapes[0][-2]
    size = np.sqrt(total / height) * context.attrs["grad_scale"]
    np.multiply(g, size[..., None, None], out=out)
    np.multiply(out, _inverse_root(rows)[..., None], out=out)
    np.multiply(out, _inverse_root(columns)[..., None, :], out=out)


def _inverse_root(moments: Array) -> Array:
    """1 / sqrt, and 0 where nothing was ever seen."""
    empty = moments <= 0
    roots: Array = np.divide(1.0, np.sqrt(np.maximum(moments, 0.0) + empty)) * ~empty
    return roots


define_op(
    "adafactor_moments",
    infer="g F -> rows F, columns F",
    rule="... r c -> ... r, ... c",
    attrs=(Float("eps", least=0.0), Float("grad_scale", 1.0)),
    scaled=(0,),
    kernel=in_float32(contiguous(_moments_kernel)),
    flops=4,
    doc="g [..., r, c] -> the means of g² + eps of each row and of each column.",
)
define_op(
    "adafactor_direction",
    infer="g F, rows F, columns F, total F -> u F",
    rule="... r c, ... r, ... c, ... -> ... r c",
    attrs=(Float("grad_scale", 1.0),),
    scaled=(0,),
    kernel=in_float32(_factored_kernel),
    linear=((0,),),
    flops=3,
    inplace=((0, 0),),
    doc="(g [..., r, c], row moments, column moments, sum of the row moments) -> g over the "
    "root of the second moment that they stand for.",
)
