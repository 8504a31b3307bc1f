"""Updates of variables by their gradients. Each works in place: the outputs are the variables' next
values and take their storage. The learning rate is a scalar tensor.

`grad_scale` (1 by default) is a factor on the gradient before all else.
"""

from __future__ import annotations

import math

import numpy as np

from plancompiler.ops import row_loops
from plancompiler.ops.attributes import Bool, Float
from plancompiler.ops.kernel import blocks, copy_unless_shared, once, scratch
from plancompiler.ops.numba_loops import row_loop
from plancompiler.ops.registry import Array, Arrays, AttrMap, KernelContext, define_op


def _with_decay(context: KernelContext, w: Array, g: Array, scale: float, decay: float) -> Array:
    """scale * g + decay * w of a block; g itself where that is the same."""
    if scale == 1.0 and not decay:
        return g
    total = scratch(context, "total", w.shape, w.dtype)
    if not decay:
        return np.multiply(g, scale, out=total)
    np.multiply(w, decay, out=total)
    if scale == 1.0:
        return np.add(total, g, out=total)
    scaled = scratch(context, "scaled", w.shape, w.dtype)
    np.multiply(g, scale, out=scaled)
    return np.add(total, scaled, out=total)


# --- stochastic gradient descent ------------------------------------------------------------------


def _sgd_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    *tensors, rate_tensor = inputs
    rate = float(rate_tensor)
    gradient_rate = rate * context.attrs["grad_scale"]
    decay = context.attrs["weight_decay"]
    for w, g, w_next in blocks(*tensors, *outputs):
        work = scratch(context, "work", w.shape, w.dtype)
        np.multiply(g, gradient_rate, out=work)
        if decay:
            np.multiply(w, 1.0 - rate * decay, out=w_next)
            np.subtract(w_next, work, out=w_next)
        else:
            np.subtract(w, work, out=w_next)


define_op(
    "sgd_update",
    infer="w F, g F, rate f () -> w F",
    rule="..., ..., ... -> ...",
    attrs=(
        Float("weight_decay", 0.0, least=0.0),
        Float("grad_scale", 1.0),
    ),
    kernel=_sgd_kernel,
    flops=2,
    mutates=((0, 0),),
    skippable=True,
    doc="(w, g, lr) -> w - lr * (g + weight_decay * w).",
)


# --- momentum -------------------------------------------------------------------------------------


def _momentum_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    *tensors, rate_tensor = inputs
    rate = float(rate_tensor)
    momentum = context.attrs["momentum"]
    nesterov = context.attrs["nesterov"]
    decay = context.attrs["weight_decay"]
    scale = context.attrs["grad_scale"]
    for w, g, m, w_next, m_next in blocks(*tensors, *outputs):
        work = scratch(context, "work", w.shape, w.dtype)
        total = _with_decay(context, w, g, scale, decay)
        np.multiply(m, momentum, out=m_next)
        np.add(m_next, total, out=m_next)
        if nesterov:
            np.multiply(m_next, momentum, out=work)
            np.add(work, total, out=work)
            np.multiply(work, rate, out=work)
        else:
            np.multiply(m_next, rate, out=work)
        np.subtract(w, work, out=w_next)


define_op(
    "momentum_update",
    infer="w F, g F, m F, rate f () -> w F, m F",
    rule="..., ..., ..., ... -> ..., ...",
    attrs=(
        Float("momentum", least=0.0),
        Bool("nesterov", False),
        Float("weight_decay", 0.0, least=0.0),
        Float("grad_scale", 1.0),
    ),
    kernel=_momentum_kernel,
    flops=4,
    mutates=((0, 0), (1, 2)),
    skippable=True,
    doc="(w, g, m, lr) -> (w', m') with m' = momentum * m + g + weight_decay * w and "
    "w' = w - lr * m', or w - lr * (g + weight_decay * w + momentum * m') where nesterov "
    "(Y. Nesterov, 1983; in this form I. Sutskever et al., 2013).",
)


# --- Adam -----------------------------------------------------------------------------------------


def _adam_numbers(attrs: AttrMap) -> tuple[float, float, float, float, bool, float]:
    """beta1, beta2, eps, the weight decay, whether that is decoupled, the gradient's scale."""
    return (
        attrs["beta1"],
        attrs["beta2"],
        attrs["eps"],
        attrs["weight_decay"],
        attrs["decoupled"],
        attrs["grad_scale"],
    )


def _adam_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    *tensors, rate_tensor = inputs
    rate = float(rate_tensor)
    beta1, beta2, epsilon, decay, decoupled, scale = once(context, "numbers", _adam_numbers)
    # m' / c1 / (sqrt(v' / c2) + eps) with both corrections taken out of the loop over elements.
    count = context.step + 1
    root = math.sqrt(1.0 - beta2**count)
    eps = epsilon * root
    factor = rate * root / (1.0 - beta1**count)
    loop = row_loop(row_loops.adam, *tensors, *outputs)
    if loop is not None:
        w, g, m, v = tensors
        for old, new in zip((w, m, v), outputs, strict=True):
            copy_unless_shared(old, new)
        kept = 1.0 - rate * decay if decoupled else 1.0
        added = 0.0 if decoupled else decay
        numbers = scale, added, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, factor, kept
        w, m, v = (array.reshape(-1) for array in outputs)
        loop(w, g.reshape(-1), m, v, *map(w.dtype.type, numbers))
        return
    for w, g, m, v, w_next, m_next, v_next in blocks(*tensors, *outputs):
        work = scratch(context, "work", w.shape, w.dtype)
        total = _with_decay(context, w, g, scale, 0.0 if decoupled else decay)
        np.multiply(total, 1.0 - beta1, out=work)
        np.multiply(m, beta1, out=m_next)
        np.add(m_next, work, out=m_next)
        np.multiply(total, total, out=work)
        np.multiply(work, 1.0 - beta2, out=work)
        np.multiply(v, beta2, out=v_next)
        np.add(v_next, work, out=v_next)
        np.sqrt(v_next, out=work)
        np.add(work, eps, out=work)
        np.divide(m_next, work, out=work)
        np.multiply(work, factor, out=work)
        if decay and decoupled:
            np.multiply(w, 1.0 - rate * decay, out=w_next)
            np.subtract(w_next, work, out=w_next)
        else:
            np.subtract(w, work, out=w_next)


define_op(
    "adam_update",
    infer="w F, g F, m F, v F, rate f () -> w F, m F, v F",
    rule="..., ..., ..., ..., ... -> ..., ..., ...",
    attrs=(
        Float("beta1", least=0.0, below=1.0),
        Float("beta2", least=0.0, below=1.0),
        Float("eps", least=0.0),
        Float("weight_decay", 0.0, least=0.0),
        Bool("decoupled", False),
        Float("grad_scale", 1.0),
    ),
    kernel=_adam_kernel,
    flops=12,
    mutates=((0, 0), (1, 2), (2, 3)),
    skippable=True,
    doc="(w, g, m, v, lr) -> (w', m', v'): Adam (D. P. Kingma, J. Ba, 2015) with bias "
    "correction from the step; where decoupled, weight decay acts on w alone (AdamW: "
    "I. Loshchilov, F. Hutter, 2019).",
)
