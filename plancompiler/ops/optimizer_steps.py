"""Updates of variables in steps: LAMB and Adafactor, which need numbers of a whole parameter, and
Lion and moving averages, which do not.

What is needed of a whole parameter are sums of squares, which are ops of their own
(`square_sum`, `adafactor_moments`): partial where the parameter is split, reduced as scalars or
vectors, and then inputs of the elementwise rest. So every split of a parameter is legal, and none
gathers it.
"""

from __future__ import annotations

import math

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.ir.shard import element_count
from plancompiler.ops.attributes import Bool, Float
from plancompiler.ops.kernel import blocks, contiguous, in_float32, scratch
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, Types, define_op


def _betas(attrs: AttrMap) -> tuple[float, float]:
    return (
        attrs["beta1"],
        attrs["beta2"],
    )


# --- Lion -----------------------------------------------------------------------------------------


def _lion_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    *tensors, rate_tensor = inputs
    rate = float(rate_tensor)
    beta1, beta2 = _betas(context.attrs)
    kept = 1.0 - rate * context.attrs["weight_decay"]
    for w, g, m, w_next, m_next in blocks(*tensors, *outputs):
        work = scratch(context, "work", w.shape, w.dtype)
        turn = scratch(context, "turn", w.shape, w.dtype)
        np.multiply(g, 1.0 - beta1, out=turn)
        np.multiply(m, beta1, out=work)
        np.add(turn, work, out=turn)
        np.sign(turn, out=turn)
        np.multiply(turn, rate, out=turn)
        np.multiply(g, 1.0 - beta2, out=work)
        np.multiply(m, beta2, out=m_next)
        np.add(m_next, work, out=m_next)
        np.multiply(w, kept, out=w_next)
        np.subtract(w_next, turn, out=w_next)


define_op(
    "lion_update",
    infer="w F, g F, m F, rate f () -> w F, m F",
    rule="..., ..., ..., ... -> ..., ...",
    attrs=(
        Float("beta1", least=0.0, below=1.0),
        Float("beta2", least=0.0, below=1.0),
        Float("weight_decay", 0.0, least=0.0),
    ),
    kernel=_lion_kernel,
    flops=9,
    mutates=((0, 0), (1, 2)),
    skippable=True,
    doc="(w, g, m, lr) -> (w', m'): Lion (X. Chen et al., 2023), a step of lr along the signs "
    "of beta1 m + (1 - beta1) g, with decoupled weight decay.",
)


# --- moving averages ------------------------------------------------------------------------------


def _average_infer(inputs: Types, attrs: AttrMap) -> Types:
    decay, power = attrs["decay"], attrs["power"]
    if (decay is None) == (power is None):
        raise AttributeValueError(
            "moving_average_update has either a decay or a power",
            got="neither" if decay is None else "decay, power",
        )
    return inputs[:1]


def _average_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    decay = context.attrs["decay"]
    if decay is None:
        decay = 1.0 - (context.step + 1.0) ** -context.attrs["power"]
    for state, value, out in blocks(*inputs, *outputs):
        work = scratch(context, "work", state.shape, state.dtype)
        np.multiply(value, 1.0 - decay, out=work)
        np.multiply(state, decay, out=out)
        np.add(out, work, out=out)


define_op(
    "moving_average_update",
    infer=_average_infer,
    operands="state F, value F -> state F",
    rule="..., ... -> ...",
    attrs=(
        Float("decay", None, least=0.0, below=1.0),
        Float("power", None, least=0.0),
    ),
    kernel=_average_kernel,
    flops=3,
    mutates=((0, 0),),
    skippable=True,
    doc="(state, value) -> decay * state + (1 - decay) * value, where decay is given, or is "
    "1 - (step + 1) ** -power, with which the first value replaces the state.",
)


# --- LAMB -----------------------------------------------------------------------------------------


def _direction_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    attrs = context.attrs
    tensors, share, count = inputs[:4], None, context.step + 1
    if len(inputs) > len(tensors):
        share, count = float(inputs[4]), int(inputs[5])
    beta1, beta2 = _betas(attrs)
    decay = attrs["weight_decay"]
    # m' / c1 / (sqrt(v' / c2) + eps), both corrections taken out of the loop over elements.
    root = math.sqrt(1.0 - beta2**count)
    eps = attrs["eps"] * root
    factor = root / (1.0 - beta1**count)
    for w, g, m, v, u, m_next, v_next in blocks(*tensors, *outputs):
        work = scratch(context, "work", w.shape, w.dtype)
        if share is not None:
            g = np.multiply(g, share, out=scratch(context, "share", g.shape, g.dtype))
        np.multiply(g, 1.0 - beta1, out=work)
        np.multiply(m, beta1, out=m_next)
        np.add(m_next, work, out=m_next)
        np.multiply(g, g, out=work)
        np.multiply(work, 1.0 - beta2, out=work)
        np.multiply(v, beta2, out=v_next)
        np.add(v_next, work, out=v_next)
        np.sqrt(v_next, out=work)
        np.add(work, eps, out=work)
        np.divide(m_next, work, out=u)
        np.multiply(u, factor, out=u)
        if decay:
            np.multiply(w, decay, out=work)
            np.add(u, work, out=u)


def _step_along(context: KernelContext, rate: float, inputs: Arrays, outputs: Arrays) -> None:
    """w - rate * u."""
    for w, u, out in blocks(*inputs[:2], *outputs):
        work = scratch(context, "work", w.shape, w.dtype)
        np.multiply(u, rate, out=work)
        np.subtract(w, work, out=out)


def _lamb_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    size, length, rate = map(float, inputs[2:])
    trust = math.sqrt(size / length) if size > 0 and length > 0 else 1.0
    _step_along(context, rate * trust, inputs, outputs)


define_op(
    "lamb_direction",
    inputs=(4, 6),
    infer="w F ..., g F ..., m F ..., v F ..., factor? f (), count? int32 () -> "
    "u F ..., m F ..., v F ...",
    rule=lambda inputs, outputs, attrs: f"{', '.join('...' for _ in inputs)} -> ..., ..., ...",
    attrs=(
        Float("beta1", least=0.0, below=1.0),
        Float("beta2", least=0.0, below=1.0),
        Float("eps", least=0.0),
        Float("weight_decay", 0.0, least=0.0),
    ),
    kernel=_direction_kernel,
    flops=13,
    mutates=((1, 2), (2, 3)),
    counts_steps=True,
    skippable=True,
    doc="(w, g, m, v) -> (u, m', v'): the step of LAMB (Y. You et al., 2020) before it is "
    "scaled: Adam's with bias correction, plus weight_decay * w. Two scalars more, factor and "
    "count: g is multiplied with the factor, and the correction is that of the count-th "
    "update (else of the step).",
)
define_op(
    "lamb_update",
    infer="w F, u F, size f (), length f (), rate f () -> w F",
    rule="..., ..., ..., ..., ... -> ...",
    kernel=_lamb_kernel,
    flops=2,
    mutates=((0, 0),),
    skippable=True,
    doc="(w, u, sum of squares of w, of u, lr) -> w - lr * trust * u, where the trust ratio is "
    "the norm of w over that of u, or 1 where either is zero.",
)


# --- Adafactor ------------------------------------------------------------------------------------


def _moments_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (g,), (rows, columns) = inputs, outputs
    height, width = context.input_shapes[0][-2:]
    squares = scratch(context, "squares", g.shape, g.dtype)
    np.multiply(g, g, out=squares)
    np.add(squares, context.attrs["eps"], out=squares)
    np.add.reduce(squares, axis=-1, out=rows)
    np.add.reduce(squares, axis=-2, out=columns)
    np.multiply(rows, 1.0 / max(width, 1), out=rows)
    np.multiply(columns, 1.0 / max(height, 1), out=columns)


def _factored_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    # The second moment is rows * columns / mean(rows), so g times the roots of their inverses.
    (g, rows, columns, total), (out,) = inputs, outputs
    height = context.input_shapes[0][-2]
    np.multiply(g, np.sqrt(total / height)[..., None, None], out=out)
    np.multiply(out, _inverse_root(rows)[..., None], out=out)
    np.multiply(out, _inverse_root(columns)[..., None, :], out=out)


def _inverse_root(moments: Array) -> Array:
    """1 / sqrt, and 0 where nothing was ever seen."""
    roots: Array = np.zeros_like(moments)
    np.divide(1.0, np.sqrt(moments), out=roots, where=moments > 0)
    return roots


def _adafactor_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    attrs = context.attrs
    size, length, rate = map(float, inputs[2:])
    count = max(1, element_count(context.input_shapes[0]))
    if attrs["relative"]:
        rate *= max(attrs["eps"], math.sqrt(size / count))
    step = rate / max(1.0, math.sqrt(length / count) / attrs["clip"])
    kept = 1.0 - rate * attrs["weight_decay"]
    for w, u, out in blocks(*inputs[:2], *outputs):
        work = scratch(context, "work", w.shape, w.dtype)
        np.multiply(u, step, out=work)
        np.multiply(w, kept, out=out)
        np.subtract(out, work, out=out)


define_op(
    "adafactor_moments",
    infer="g F -> rows F, columns F",
    rule="... r c -> ... r, ... c",
    attrs=(Float("eps", least=0.0),),
    kernel=in_float32(contiguous(_moments_kernel)),
    flops=4,
    counts_steps=True,
    doc="g [..., r, c] -> the means of g² + eps of each row and of each column.",
)
define_op(
    "adafactor_direction",
    infer="g F, rows F, columns F, total F -> u F",
    rule="... r c, ... r, ... c, ... -> ... r c",
    kernel=in_float32(_factored_kernel),
    linear=((0,),),
    flops=3,
    inplace=((0, 0),),
    portable=False,
    doc="(g [..., r, c], row moments, column moments, sum of the row moments) -> g over the "
    "root of the second moment that they stand for.",
)
define_op(
    "adafactor_update",
    infer="w F, u F, size f (), length f (), rate f () -> w F",
    rule="..., ..., ..., ..., ... -> ...",
    attrs=(
        Float("clip", least=1e-30),
        Bool("relative"),
        Float("eps", least=0.0),
        Float("weight_decay", 0.0, least=0.0),
    ),
    kernel=_adafactor_kernel,
    flops=3,
    mutates=((0, 0),),
    skippable=True,
    portable=False,
    doc="(w, u, sum of squares of w, of u, lr) -> w': Adafactor (N. Shazeer, M. Stern, 2018): "
    "w - rate * u / max(1, rms(u) / clip), where the rate is lr, times max(eps, rms(w)) if "
    "`relative`; weight decay is decoupled.",
)
