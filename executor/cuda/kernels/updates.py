"""Kernels of optimizers' updates on devices.

What the host's kernels read of a tensor to go by it (a rate, a scale, whether gradients are finite)
the device goes by here, so that the host does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.ops.kernel import copy_unless_shared
from plancompiler.ops.loss_scale import LARGEST_SCALE, SKIPPABLE, guarded_kind
from plancompiler.ops.registry import Kernel, KernelContext, op_def

Array = Any
Arrays = Sequence[Array]


def _decayed(context: KernelContext, w: Array, g: Array) -> Array:
    scale, decay = context.attrs["grad_scale"], context.attrs["weight_decay"]
    total = g * scale if scale != 1.0 else g
    return total + w * decay if decay and not context.attrs.get("decoupled") else total


def _averaged(mean: Array, value: Array, share: float, out: Array) -> None:
    """The moving average of which the mean so far has this share."""
    np.multiply(mean, share, out=out)
    np.add(out, value * (1.0 - share), out=out)


def _sgd(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (w, g, rate), (w_next,) = inputs, outputs
    np.subtract(w, _decayed(context, w, g) * rate, out=w_next)


def _momentum(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (w, g, m, rate), (w_next, m_next) = inputs, outputs
    attrs = context.attrs
    momentum = attrs["momentum"]
    total = _decayed(context, w, g)
    np.multiply(m, momentum, out=m_next)
    np.add(m_next, total, out=m_next)
    step = m_next * momentum + total if attrs["nesterov"] else m_next
    np.subtract(w, step * rate, out=w_next)


def _adam(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (w, g, m, v, rate), (w_next, m_next, v_next) = inputs, outputs
    attrs = context.attrs
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    decay = attrs["weight_decay"]
    total = _decayed(context, w, g)
    count = context.step + 1
    root = math.sqrt(1.0 - beta2**count)
    _averaged(m, total, beta1, m_next)
    _averaged(v, np.square(total), beta2, v_next)
    step = m_next / (np.sqrt(v_next) + attrs["eps"] * root)
    np.multiply(step, rate * (root / (1.0 - beta1**count)), out=step)
    kept = w * (1.0 - rate * decay) if decay and attrs["decoupled"] else w
    np.subtract(kept, step, out=w_next)


def _lion(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (w, g, m, rate), (w_next, m_next) = inputs, outputs
    attrs = context.attrs
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    turn = np.sign(g * (1.0 - beta1) + m * beta1) * rate
    _averaged(m, g, beta2, m_next)
    kept = w * (1.0 - rate * attrs["weight_decay"])
    np.subtract(kept, turn, out=w_next)


def _lamb_direction(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (w, g, m, v, *rest), (u, m_next, v_next) = inputs, outputs
    attrs = context.attrs
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    root: Any
    if rest:
        # The number of the step is a tensor, as skipped steps do not count.
        share, count = rest
        g = g * share
        number = count.astype(np.float64)
        exact = np.sqrt(1.0 - np.power(beta2, number))
        root = exact.astype(w.dtype)
        factor = (exact / (1.0 - np.power(beta1, number))).astype(w.dtype)
    else:
        root = math.sqrt(1.0 - beta2 ** (context.step + 1))
        factor = root / (1.0 - beta1 ** (context.step + 1))
    _averaged(m, g, beta1, m_next)
    _averaged(v, np.square(g), beta2, v_next)
    np.divide(m_next, np.sqrt(v_next) + root * attrs["eps"], out=u)
    np.multiply(u, factor, out=u)
    decay = attrs["weight_decay"]
    if decay:
        np.add(u, w * decay, out=u)


def _lamb(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (w, u, size, length, rate), (w_next,) = inputs, outputs
    known = (size > 0) & (length > 0)
    trust = np.where(known, np.sqrt(size / np.where(known, length, 1)), 1)
    np.subtract(w, u * (rate * trust).astype(w.dtype), out=w_next)


def _loss_scale(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    scale, steps, broken = inputs
    factor = context.attrs["factor"]
    good = steps + 1
    wrong = broken != 0
    grown = ~wrong & (good >= context.attrs["interval"])
    lower = np.maximum(scale / factor, 1.0)
    higher = np.minimum(scale * factor, LARGEST_SCALE)
    changed = np.where(wrong, lower, np.where(grown, higher, scale))
    np.copyto(outputs[0], changed, casting="same_kind")
    np.copyto(outputs[1], np.where(wrong | grown, 0, good), casting="same_kind")


def _guarded(kind: str, plain: Kernel) -> Kernel:
    """An update with found_inf as one input more; the device decides."""
    kept = dict(op_def(kind).mutates)

    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        *operands, broken = inputs
        made = [np.empty_like(output) for output in outputs]
        plain(context, operands, made)
        for target, (new, output) in enumerate(zip(made, outputs, strict=True)):
            if target in kept:
                copy_unless_shared(operands[kept[target]], output)
            else:
                output.fill(0)
            np.copyto(output, new, where=broken == 0)

    return kernel


_PLAIN: dict[str, Kernel] = {
    "adam_update": _adam,
    "lamb_direction": _lamb_direction,
    "lamb_update": _lamb,
    "lion_update": _lion,
    "momentum_update": _momentum,
    "sgd_update": _sgd,
}
_GUARDED: dict[str, Kernel] = {
    guarded: _guarded(kind, _PLAIN.get(kind, op_def(kind).kernel))
    for kind in SKIPPABLE
    if (kind in _PLAIN or op_def(kind).portable) and (guarded := guarded_kind(kind)) is not None
}

UPDATE_KERNELS: dict[str, Kernel] = {**_PLAIN, **_GUARDED, "loss_scale_update": _loss_scale}
"""By op kind, in place of the host's kernels."""
