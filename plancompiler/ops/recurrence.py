"""Recurrent layers over time: each step takes the state that the step before has left.

One op is a whole layer in one direction, so that a plan has one task for it, whatever the length.
What the inputs add to the gates of all steps is one matrix product, made before; a step adds what
the state adds. The batch splits; the state meets itself in every step, so hidden units do not.

Gates lie beside each other as in PyTorch: of `lstm` (S. Hochreiter and J. Schmidhuber, 1997; F.
Gers et al., 2000) input, forget, cell, output; of `gru` (K. Cho et al., 2014) reset, update, new.

A recurrence is written once, as a generator over steps in the operators that arrays and tensors
share: on arrays it is the kernel, on tensors the formula of second derivatives.
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
from plancompiler.ops.kernel import in_float32
from plancompiler.ops.registry import (
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
"""`(functions, attributes, *inputs)`, the functions being those of arrays or of tensors."""


class _OfArrays:
    tanh = staticmethod(np.tanh)

    @staticmethod
    def sigmoid(x: Any) -> Any:
        # By the hyperbolic tangent, which never overflows.
        return np.tanh(x * 0.5) * 0.5 + 0.5

    @staticmethod
    def positive(x: Any) -> Any:
        return (x > 0).astype(x.dtype)

    @staticmethod
    def joined(parts: Sequence[Any]) -> Any:
        return np.concatenate(parts, axis=-1)


class _OfTensors:
    @staticmethod
    def tanh(x: Any) -> Any:
        return x.tanh()

    @staticmethod
    def sigmoid(x: Any) -> Any:
        return x.sigmoid()

    @staticmethod
    def positive(x: Any) -> Any:
        return (x > 0.0).cast(x.dtype)

    @staticmethod
    def joined(parts: Sequence[Any]) -> Any:
        return apply("concat", *parts, axis=parts[0].ndim - 1)


def _times(length: int, attrs: AttrMap) -> range:
    """The steps in the order of the recurrence."""
    return range(length - 1, -1, -1) if attrs["reverse"] else range(length)


def _gates(x: Any, count: int) -> list[Any]:
    width = x.shape[-1] // count
    return [x[:, width * each : width * (each + 1)] for each in range(count)]


def _stacked(by_time: dict[int, Any], like: Any) -> Any:
    """The values of all times as one tensor; without any, an empty one."""
    rows = [by_time[time].reshape((1, *by_time[time].shape)) for time in sorted(by_time)]
    return apply("concat", *rows, axis=0) if rows else like


# --- the recurrences and their gradients ----------------------------------------------------------


def _lstm(m: Any, attrs: AttrMap, gates: Any, weight: Any, h: Any, c: Any) -> Iterator[Step]:
    turned = weight.T
    for time in _times(gates.shape[0], attrs):
        i, f, g, o = _gates(gates[time] + h @ turned, 4)
        i, f, g, o = m.sigmoid(i), m.sigmoid(f), m.tanh(g), m.sigmoid(o)
        c = f * c + i * g
        h = o * m.tanh(c)
        yield time, (h, c, m.joined([i, f, g, o]))


def _lstm_back(
    m: Any,
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
        level = m.tanh(cells[time])
        dc = dc + dcells[time] + dh * o * (1.0 - level * level)
        passed = m.joined(
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


def _gru(m: Any, attrs: AttrMap, gates: Any, weight: Any, bias: Any, h: Any) -> Iterator[Step]:
    turned = weight.T
    for time in _times(gates.shape[0], attrs):
        (ri, zi, ni), (rh, zh, nh) = _gates(gates[time], 3), _gates(h @ turned + bias, 3)
        r, z = m.sigmoid(ri + rh), m.sigmoid(zi + zh)
        n = m.tanh(ni + r * nh)
        h = n + z * (h - n)
        yield time, (h, m.joined([r, z, n]), nh)


def _gru_back(
    m: Any,
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
        by_state = m.joined([dr, dz, dn * r])
        yield time, (m.joined([dr, dz, dn]), by_state)
        dh = dh * z + by_state @ weight
    yield None, (dh,)


def _rnn(m: Any, attrs: AttrMap, gates: Any, weight: Any, h: Any) -> Iterator[Step]:
    turned = weight.T
    for time in _times(gates.shape[0], attrs):
        h = gates[time] + h @ turned
        h = m.tanh(h) if attrs["nonlinearity"] == "tanh" else h * m.positive(h)
        yield time, (h,)


def _rnn_back(m: Any, attrs: AttrMap, weight: Any, h0: Any, y: Any, dy: Any) -> Iterator[Step]:
    dh = h0 * 0.0
    for time in reversed(_times(dy.shape[0], attrs)):
        level, dh = y[time], dh + dy[time]
        slope = 1.0 - level * level if attrs["nonlinearity"] == "tanh" else m.positive(level)
        passed = dh * slope
        yield time, (passed,)
        dh = passed @ weight
    yield None, (dh,)


# --- the ops --------------------------------------------------------------------------------------


def _kernel_of(recurrence: Recurrence, timed: int) -> Kernel:
    def kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        for time, values in recurrence(_OfArrays, context.attrs, *inputs):
            targets = outputs[timed:] if time is None else [each[time] for each in outputs[:timed]]
            for target, value in zip(targets, values, strict=True):
                target[...] = value

    return in_float32(kernel)


def _formula_of(recurrence: Recurrence, timed: int) -> Formula:
    def formula(attrs: AttrMap, *inputs: Any) -> tuple[Any, ...]:
        by_time: list[dict[int, Any]] = [{} for _ in range(timed)]
        last: tuple[Any, ...] = ()
        for time, values in recurrence(_OfTensors, attrs, *inputs):
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
    (_, weight, h0, c0), (y, cells, active) = inputs, outputs
    dy, dcells = (_or_zeros(grad, y) for grad in grads[:2])
    dgates, dh0, dc0 = apply("lstm_grad", weight, c0, cells, active, dy, dcells, **attrs)
    return dgates, apply("contract_leading", dgates, _before(h0, y, attrs)), dh0, dc0


def _gru_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (_, weight, _, h0), (y, active, inner) = inputs, outputs
    dy = _or_zeros(grads[0], y)
    dgates, by_state, dh0 = apply("gru_grad", weight, h0, y, active, inner, dy, **attrs)
    dweight = apply("contract_leading", by_state, _before(h0, y, attrs))
    return dgates, dweight, by_state.sum((0, 1)), dh0


def _rnn_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (_, weight, h0), (y,) = inputs, outputs
    dgates, dh0 = apply("rnn_grad", weight, h0, y, grads[0], **attrs)
    return dgates, apply("contract_leading", dgates, _before(h0, y, attrs)), dh0


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
    forward: tuple[Recurrence, str],
    backward: tuple[Recurrence, str],
    gradient: Gradient,
    doc: str,
    more: tuple[Attribute, ...] = (),
    plain: int = 1,
) -> None:
    """An op and its gradient, each a recurrence and its operands (see `_described`). `gradient` is
    that by the first `plain` outputs.
    """
    attrs = (Bool("reverse", False), *more)
    recurrence, operands = forward
    line, rule, words, timed = _described(operands)
    define_op(
        kind,
        infer=_infer(kind, gates, words),
        operands=line,
        rule=rule,
        attrs=attrs,
        kernel=_kernel_of(recurrence, timed),
        gradient=_unless(plain, gradient, _formula_of(recurrence, timed)),
        flops=_flops,
        doc=doc,
    )
    recurrence, operands = backward
    line, rule, _, timed = _described(operands)
    given = [each.partition(":")[0] for each in operands.partition("->")[0].split()]
    define_op(
        f"{kind}_grad",
        infer=line,
        rule=rule,
        attrs=attrs,
        kernel=_kernel_of(recurrence, timed),
        gradient=by_formula(_formula_of(recurrence, timed)),
        linear=(tuple(at for at, name in enumerate(given) if name.startswith("d")),),
        flops=_flops,
        doc=f"The gradient of {kind} by the gates and the first states, from ({', '.join(given)}).",
    )


_register(
    "lstm",
    4,
    (_lstm, "gates:tng weight:gh h0:nh c0:nh -> y:tnh cells:tnh active:tng"),
    (
        _lstm_back,
        "weight:gh c0:nh cells:tnh active:tng dy:tnh dcells:tnh -> dgates:tng dh0:nh dc0:nh",
    ),
    _lstm_gradient,
    "A layer of long short-term memory: what the inputs add to the gates [t, n, 4 h], the weight "
    "of the state [4 h, h], and first states [n, h] -> states and cells of all steps [t, n, h], "
    "and the gates. With `reverse` time runs backwards.",
    plain=2,
)
_register(
    "gru",
    3,
    (_gru, "gates:tng weight:gh bias:g h0:nh -> y:tnh active:tng inner:tnh"),
    (
        _gru_back,
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
    (_rnn, "gates:tng weight:gh h0:nh -> y:tnh"),
    (_rnn_back, "weight:gh h0:nh y:tnh dy:tnh -> dgates:tnh dh0:nh"),
    _rnn_gradient,
    "A plain recurrent layer: what the inputs add [t, n, h], the weight of the state [h, h], and "
    "the first state [n, h] -> states of all steps [t, n, h], tanh or relu of the sum. With "
    "`reverse` time runs backwards.",
    (Text("nonlinearity", "tanh", ("tanh", "relu")),),
)
