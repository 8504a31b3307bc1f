"""Recurrent layers over time: each step takes the state that the step before has left.

One op is a whole layer in one direction, so that a plan has one task for it, whatever the length.
What the inputs add to the gates of all steps is one matrix product, made before; a step adds what
the state adds. The batch splits; the state meets itself in every step, so hidden units do not.

Gates lie beside each other as in PyTorch: of `lstm` (S. Hochreiter and J. Schmidhuber, 1997; F.
Gers et al., 2000) input, forget, cell, output; of `gru` (K. Cho et al., 2014) reset, update, new.

Each recurrence is written twice: as a kernel that works in the memory of its outputs, and as a
generator over steps in the operators of tensors, which is the formula of second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.operators import filled
from plancompiler.ir.shard import element_count
from plancompiler.ops.attributes import Attribute, Bool, Text
from plancompiler.ops.formula import by_formula
from plancompiler.ops.kernel import contiguous, in_float32, scratch
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Formula,
    Gradient,
    Infer,
    Kernel,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
)

Step = tuple[int | None, tuple[Any, ...]]
"""The results at a time; those that have no time come last, with None."""
Recurrence = Callable[..., Iterator[Step]]
"""`(attributes, *inputs)`, all of them tensors."""


def _times(length: int, attrs: AttrMap) -> range:
    """The steps in the order of the recurrence."""
    return range(length - 1, -1, -1) if attrs["reverse"] else range(length)


def _gates(x: Any, count: int) -> list[Any]:
    width = x.shape[-1] // count
    return [x[:, width * each : width * (each + 1)] for each in range(count)]


def _joined(parts: Sequence[Any]) -> Any:
    return apply("concat", *parts, axis=parts[0].ndim - 1)


def _positive(x: Any) -> Any:
    return (x > 0.0).cast(x.dtype)


def _stacked(by_time: dict[int, Any], like: Any) -> Any:
    """The values of all times as one tensor; without any, an empty one."""
    rows = [by_time[time].reshape((1, *by_time[time].shape)) for time in sorted(by_time)]
    return apply("concat", *rows, axis=0) if rows else like


# --- the recurrences and their gradients, as formulas ---------------------------------------------


def _lstm(attrs: AttrMap, gates: Any, weight: Any, bias: Any, h: Any, c: Any) -> Iterator[Step]:
    turned = weight.T
    for time in _times(gates.shape[0], attrs):
        i, f, g, o = _gates(gates[time] + h @ turned + bias, 4)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        yield time, (h, c, _joined([i, f, g, o]))


def _lstm_back(
    attrs: AttrMap,
    weight: Any,
    c0: Any,
    cells: Any,
    active: Any,
    dy: Any,
    dcells: Any,
) -> Iterator[Step]:
    times = _times(dy.shape[0], attrs)
    dh = dc = c0 * 0.0
    for place in range(len(times) - 1, -1, -1):
        time = times[place]
        i, f, g, o = _gates(active[time], 4)
        before = cells[times[place - 1]] if place else c0
        dh = dh + dy[time]
        level = cells[time].tanh()
        dc = dc + dcells[time] + dh * o * (1.0 - level * level)
        passed = _joined(
            [
                dc * g * i * (1.0 - i),
                dc * before * f * (1.0 - f),
                dc * i * (1.0 - g * g),
                dh * level * o * (1.0 - o),
            ]
        )
        yield time, (passed,)
        dc = dc * f
        dh = passed @ weight
    yield None, (dh, dc)


def _gru(attrs: AttrMap, gates: Any, weight: Any, bias: Any, h: Any) -> Iterator[Step]:
    turned = weight.T
    for time in _times(gates.shape[0], attrs):
        (ri, zi, ni), (rh, zh, nh) = _gates(gates[time], 3), _gates(h @ turned + bias, 3)
        r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
        n = (ni + r * nh).tanh()
        h = n + z * (h - n)
        yield time, (h, _joined([r, z, n]), nh)


def _gru_back(
    attrs: AttrMap,
    weight: Any,
    h0: Any,
    y: Any,
    active: Any,
    inner: Any,
    dy: Any,
) -> Iterator[Step]:
    times = _times(dy.shape[0], attrs)
    dh = h0 * 0.0
    for place in range(len(times) - 1, -1, -1):
        time = times[place]
        r, z, n = _gates(active[time], 3)
        before = y[times[place - 1]] if place else h0
        dh = dh + dy[time]
        dn = dh * (1.0 - z) * (1.0 - n * n)
        dr = dn * inner[time] * r * (1.0 - r)
        dz = dh * (before - n) * z * (1.0 - z)
        by_state = _joined([dr, dz, dn * r])
        yield time, (_joined([dr, dz, dn]), by_state)
        dh = dh * z + by_state @ weight
    yield None, (dh,)


def _rnn(attrs: AttrMap, gates: Any, weight: Any, h: Any) -> Iterator[Step]:
    turned = weight.T
    for time in _times(gates.shape[0], attrs):
        h = gates[time] + h @ turned
        h = h.tanh() if attrs["nonlinearity"] == "tanh" else h * _positive(h)
        yield time, (h,)


def _rnn_back(attrs: AttrMap, weight: Any, h0: Any, y: Any, dy: Any) -> Iterator[Step]:
    dh = h0 * 0.0
    for time in reversed(_times(dy.shape[0], attrs)):
        level, dh = y[time], dh + dy[time]
        slope = 1.0 - level * level if attrs["nonlinearity"] == "tanh" else _positive(level)
        passed = dh * slope
        yield time, (passed,)
        dh = passed @ weight
    yield None, (dh,)


# --- kernels --------------------------------------------------------------------------------------


def _turned(weight: Array, length: int) -> Array:
    """The weight transposed; copied where many steps read it, as products of few rows with a matrix
    that lies the other way take half as long again.
    """
    turned: Array = weight.T
    return turned.copy() if length >= _MANY_STEPS else turned


_MANY_STEPS = 8


def _sigmoid(x: Array) -> None:
    """In place, by the hyperbolic tangent, which never overflows."""
    x *= 0.5
    np.tanh(x, out=x)
    x *= 0.5
    x += 0.5


def _times_slope(x: Array, level: Array, one: Array) -> None:
    """x times the slope of the sigmoid that is at this level; `one` is memory to work in."""
    np.subtract(1.0, level, out=one)
    one *= level
    x *= one


def _lstm_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """`_lstm` in the memory of its outputs."""
    (gates, weight, bias, h, c), (y, cells, active) = inputs, outputs
    turned, product = _turned(weight, len(gates)), scratch(context, "product", c.shape, c.dtype)
    for time in _times(len(gates), context.attrs):
        row = active[time]
        np.matmul(h, turned, out=row)
        row += gates[time]
        row += bias
        i, f, g, o = _gates(row, 4)
        _sigmoid(row[:, : 2 * c.shape[1]])
        np.tanh(g, out=g)
        _sigmoid(o)
        np.multiply(f, c, out=cells[time])
        c, h = cells[time], y[time]
        c += np.multiply(i, g, out=product)
        np.tanh(c, out=h)
        h *= o


def _lstm_back_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """`_lstm_back` in the memory of its outputs."""
    (weight, c0, cells, active, dy, dcells), (dgates, dh, dc) = inputs, outputs
    level, work = (scratch(context, name, c0.shape, c0.dtype) for name in ("level", "work"))
    dh.fill(0)
    dc.fill(0)
    times = _times(len(dy), context.attrs)
    for place in range(len(times) - 1, -1, -1):
        time = times[place]
        (i, f, g, o), (di, df, dg, do) = _gates(active[time], 4), _gates(dgates[time], 4)
        dh += dy[time]
        np.tanh(cells[time], out=level)
        np.multiply(dh, level, out=do)
        _times_slope(do, o, work)
        # By the cell: dc + dcells + dh o (1 - level^2).
        level *= level
        np.subtract(1.0, level, out=level)
        level *= o
        level *= dh
        dc += level
        dc += dcells[time]
        np.multiply(dc, g, out=di)
        _times_slope(di, i, work)
        np.multiply(dc, cells[times[place - 1]] if place else c0, out=df)
        _times_slope(df, f, work)
        np.multiply(g, g, out=work)
        np.subtract(1.0, work, out=work)
        np.multiply(dc, i, out=dg)
        dg *= work
        dc *= f
        np.matmul(dgates[time], weight, out=dh)


def _gru_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """`_gru` in the memory of its outputs."""
    (gates, weight, bias, h), (y, active, inner) = inputs, outputs
    turned, by_state = (
        _turned(weight, len(gates)),
        scratch(context, "by_state", gates.shape[1:], h.dtype),
    )
    both = 2 * h.shape[1]
    for time in _times(len(gates), context.attrs):
        np.matmul(h, turned, out=by_state)
        by_state += bias
        inner[time] = by_state[:, both:]
        row = active[time]
        np.add(gates[time, :, :both], by_state[:, :both], out=row[:, :both])
        _sigmoid(row[:, :both])
        r, z, n = _gates(row, 3)
        np.multiply(r, inner[time], out=n)
        n += gates[time, :, both:]
        np.tanh(n, out=n)
        np.subtract(h, n, out=y[time])
        h = y[time]
        h *= z
        h += n


def _gru_back_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """`_gru_back` in the memory of its outputs."""
    (weight, h0, y, active, inner, dy), (dgates, dstate, dh) = inputs, outputs
    both, work = 2 * h0.shape[1], scratch(context, "work", h0.shape, h0.dtype)
    passed = scratch(context, "passed", h0.shape, h0.dtype)
    dh.fill(0)
    times = _times(len(dy), context.attrs)
    for place in range(len(times) - 1, -1, -1):
        time = times[place]
        (r, z, n), (dr, dz, dn) = _gates(active[time], 3), _gates(dgates[time], 3)
        dh += dy[time]
        np.multiply(n, n, out=work)
        np.subtract(1.0, work, out=work)
        np.subtract(1.0, z, out=dn)
        dn *= dh
        dn *= work
        np.multiply(dn, inner[time], out=dr)
        _times_slope(dr, r, work)
        np.subtract(y[times[place - 1]] if place else h0, n, out=dz)
        dz *= dh
        _times_slope(dz, z, work)
        dstate[time, :, :both] = dgates[time, :, :both]
        np.multiply(dn, r, out=dstate[time, :, both:])
        dh *= z
        dh += np.matmul(dstate[time], weight, out=passed)


def _rnn_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """`_rnn` in the memory of its output."""
    (gates, weight, h), (y,) = inputs, outputs
    turned, bounded = _turned(weight, len(gates)), context.attrs["nonlinearity"] == "tanh"
    for time in _times(len(gates), context.attrs):
        row = y[time]
        np.matmul(h, turned, out=row)
        row += gates[time]
        if bounded:
            np.tanh(row, out=row)
        else:
            np.maximum(row, 0.0, out=row)
        h = row


def _rnn_back_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """`_rnn_back` in the memory of its outputs."""
    (weight, _, y, dy), (dgates, dh) = inputs, outputs
    bounded = context.attrs["nonlinearity"] == "tanh"
    dh.fill(0)
    for time in reversed(_times(len(dy), context.attrs)):
        level, passed = y[time], dgates[time]
        dh += dy[time]
        if bounded:
            np.multiply(level, level, out=passed)
            np.subtract(1.0, passed, out=passed)
            passed *= dh
        else:
            np.multiply(dh, level > 0.0, out=passed)
        np.matmul(passed, weight, out=dh)


def _weight_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    """One product for all steps that follow another, and one for the first."""
    (dgates, h0, y), (dweight,) = inputs, outputs
    first, following, before = 0, dgates[1:], y[:-1]
    if context.attrs["reverse"]:
        first, following, before = -1, dgates[:-1], y[1:]
    np.matmul(_rows(following).T, _rows(before), out=dweight)
    if len(dgates):
        dweight += np.matmul(dgates[first].T, h0)


def _rows(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


# --- the ops --------------------------------------------------------------------------------------


def _formula_of(recurrence: Recurrence, timed: int) -> Formula:
    def formula(attrs: AttrMap, *inputs: Any) -> tuple[Any, ...]:
        by_time: list[dict[int, Any]] = [{} for _ in range(timed)]
        last: tuple[Any, ...] = ()
        for time, values in recurrence(attrs, *inputs):
            if time is None:
                last = values
                continue
            for each, value in zip(by_time, values, strict=True):
                each[time] = value
        return (*(_stacked(each, inputs[-1]) for each in by_time), *last)

    return formula


def _infer(kind: str, gates: int, outputs: str) -> Infer:
    """The shape rule; `outputs` are words of t (time), n (batch), g (gates) and h (hidden)."""

    def infer(inputs: Types, attrs: AttrMap) -> Types:
        (length, batch, width), (_, hidden) = inputs[0].shape, inputs[1].shape
        if width != gates * hidden:
            raise ShapeError(
                f"{kind} needs {gates} gates for each hidden unit",
                got=f"{width} gates for {hidden} hidden units",
                expected=gates * hidden,
            )
        extents = {"t": length, "n": batch, "g": width, "h": hidden}
        return tuple(
            TensorType(tuple(extents[axis] for axis in word), inputs[0].dtype)
            for word in outputs.split()
        )

    return infer


def _flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    hidden = inputs[1].shape[-1]
    return 2 * element_count(inputs[0].shape) * hidden


def _before(h0: Any, y: Any, attrs: AttrMap) -> Any:
    """The state before each step, [t, n, h]."""
    length = y.shape[0]
    if not length:
        return y
    first = h0.reshape((1, *h0.shape))
    rest = y[1:] if attrs["reverse"] else y[: length - 1]
    return apply("concat", *((rest, first) if attrs["reverse"] else (first, rest)), axis=0)


def _by_weight(dgates: Any, h0: Any, y: Any, attrs: AttrMap) -> Any:
    return apply("recurrent_weight_grad", dgates, h0, y, reverse=attrs["reverse"])


def _or_zeros(grad: Any, like: Any) -> Any:
    return filled(like) if grad is None else grad


def _unless(side: int, usual: Gradient, formula: Formula) -> Gradient:
    """`usual`, unless outputs from `side` on have gradients, which only second derivatives give."""
    general = by_formula(formula)

    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        chosen = usual if all(grad is None for grad in grads[side:]) else general
        return chosen(attrs, inputs, outputs, grads)

    return gradient


def _lstm_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (_, weight, _, h0, c0), (y, cells, active) = inputs, outputs
    dy, dcells = (_or_zeros(grad, y) for grad in grads[:2])
    dgates, dh0, dc0 = apply("lstm_grad", weight, c0, cells, active, dy, dcells, **attrs)
    return dgates, _by_weight(dgates, h0, y, attrs), dgates.sum((0, 1)), dh0, dc0


def _gru_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (_, weight, _, h0), (y, active, inner) = inputs, outputs
    dy = _or_zeros(grads[0], y)
    dgates, by_state, dh0 = apply("gru_grad", weight, h0, y, active, inner, dy, **attrs)
    return dgates, _by_weight(by_state, h0, y, attrs), by_state.sum((0, 1)), dh0


def _rnn_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (_, weight, h0), (y,) = inputs, outputs
    dgates, dh0 = apply("rnn_grad", weight, h0, y, grads[0], **attrs)
    return dgates, _by_weight(dgates, h0, y, attrs), dh0


def _described(operands: str) -> tuple[str, str, str, int]:
    """Of operands, each a name with a word of t, n, g and h: the line of operands, the sharding
    rule, the words of the outputs, and how many of these have a time.
    """

    def written(word: str) -> str:
        return " ".join(axis if axis == "n" else f"[{axis}]" for axis in word)

    sides = [[each.split(":") for each in side.split()] for side in operands.split("->")]
    line = (", ".join(f"{name} F {' '.join(word)}" for name, word in side) for side in sides)
    rule = (", ".join(written(word) for _, word in side) for side in sides)
    words = [word for _, word in sides[1]]
    return " -> ".join(line), " -> ".join(rule), " ".join(words), sum("t" in each for each in words)


def _register(
    kind: str,
    gates: int,
    forward: tuple[Recurrence, Kernel, str],
    backward: tuple[Recurrence, Kernel, str],
    gradient: Gradient,
    doc: str,
    more: tuple[Attribute, ...] = (),
    plain: int = 1,
) -> None:
    """An op and its gradient, each a recurrence, its kernel and its operands (see `_described`).
    `gradient` is that by the first `plain` outputs.
    """
    attrs = (Bool("reverse", False), *more)
    recurrence, kernel, operands = forward
    line, rule, words, timed = _described(operands)
    define_op(
        kind,
        infer=_infer(kind, gates, words),
        operands=line,
        rule=rule,
        attrs=attrs,
        kernel=in_float32(contiguous(kernel)),
        gradient=_unless(plain, gradient, _formula_of(recurrence, timed)),
        flops=_flops,
        doc=doc,
    )
    recurrence, kernel, operands = backward
    line, rule, _, timed = _described(operands)
    given = [each.partition(":")[0] for each in operands.partition("->")[0].split()]
    define_op(
        f"{kind}_grad",
        infer=line,
        rule=rule,
        attrs=attrs,
        kernel=in_float32(contiguous(kernel)),
        gradient=by_formula(_formula_of(recurrence, timed)),
        linear=(tuple(at for at, name in enumerate(given) if name.startswith("d")),),
        flops=_flops,
        doc=f"The gradient of {kind} by the gates and the first states, from ({', '.join(given)}).",
    )


_register(
    "lstm",
    4,
    (_lstm, _lstm_kernel, "gates:tng weight:gh bias:g h0:nh c0:nh -> y:tnh cells:tnh active:tng"),
    (
        _lstm_back,
        _lstm_back_kernel,
        "weight:gh c0:nh cells:tnh active:tng dy:tnh dcells:tnh -> dgates:tng dh0:nh dc0:nh",
    ),
    _lstm_gradient,
    "A layer of long short-term memory: what the inputs add to the gates [t, n, 4 h], the weight "
    "of the state [4 h, h], a bias [4 h], and first states [n, h] -> states and cells of all steps "
    "[t, n, h], and the gates. With `reverse` time runs backwards.",
    plain=2,
)
_register(
    "gru",
    3,
    (_gru, _gru_kernel, "gates:tng weight:gh bias:g h0:nh -> y:tnh active:tng inner:tnh"),
    (
        _gru_back,
        _gru_back_kernel,
        "weight:gh h0:nh y:tnh active:tng inner:tnh dy:tnh -> dgates:tng dstate:tng dh0:nh",
    ),
    _gru_gradient,
    "A layer of gated recurrent units: what the inputs add to the gates [t, n, 3 h], weight "
    "[3 h, h] and bias [3 h] of the state, and the first state [n, h] -> states of all steps "
    "[t, n, h], the gates, and what the state adds to the new gate before it is reset. With "
    "`reverse` time runs backwards.",
)
_register(
    "rnn",
    1,
    (_rnn, _rnn_kernel, "gates:tng weight:gh h0:nh -> y:tnh"),
    (_rnn_back, _rnn_back_kernel, "weight:gh h0:nh y:tnh dy:tnh -> dgates:tnh dh0:nh"),
    _rnn_gradient,
    "A plain recurrent layer: what the inputs add [t, n, h], the weight of the state [h, h], and "
    "the first state [n, h] -> states of all steps [t, n, h], tanh or relu of the sum. With "
    "`reverse` time runs backwards.",
    (Text("nonlinearity", "tanh", ("tanh", "relu")),),
)
define_op(
    "recurrent_weight_grad",
    infer="dgates F t n g, h0 F n h, y F t n h -> dweight F g h",
    rule="[t] n g, n h, [t] n h -> g h",
    attrs=(Bool("reverse", False),),
    kernel=in_float32(contiguous(_weight_kernel)),
    gradient=by_formula(
        lambda attrs, dgates, h0, y: apply("contract_leading", dgates, _before(h0, y, attrs))
    ),
    linear=((0,), (1, 2)),
    flops=lambda inputs, outputs, attrs: 2 * element_count(inputs[0].shape) * inputs[1].shape[-1],
    precision="low",
    doc="The gradient of a recurrent layer by the weight of the state: the sum over steps and "
    "batch of dgates [t, n, g] times the state before the step, h0 [n, h] or one of y [t, n, h].",
)
