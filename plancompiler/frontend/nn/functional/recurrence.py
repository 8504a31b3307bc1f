"""Recurrent layers as functions of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.errors import ShapeError
from plancompiler.frontend.functions.elementwise import where
from plancompiler.frontend.functions.indexing import take_along_axis
from plancompiler.frontend.functions.linear import linear, matmul
from plancompiler.frontend.functions.shape import concat, pad, stack
from plancompiler.frontend.nn.functional.activation import dropout
from plancompiler.ir.operators import filled
from plancompiler.ops.registry import apply, apply_source

Weights = Sequence[Any]
"""Of one layer in one direction: by the input, by the state, a bias of each, or None, and the
projection of an LSTM's state, if there is one."""


class Lengths:
    """Which steps of a batch [t, n, ...] belong to its sequences, which begin at the first step and
    are of several lengths, int64 [n].
    """

    def __init__(self, x: Any, lengths: Any) -> None:
        times = apply_source(x, "arange", start=0, step=1, count=x.shape[0], dtype="int64")
        times, row = times.reshape((x.shape[0], 1)), lengths.reshape((1, lengths.shape[0]))
        inside = times < row
        self._inside = inside.reshape((*inside.shape, 1))
        turned = where(inside, row - 1 - times, times)
        self._turned = turned.reshape((*turned.shape, 1))
        self._ends = (row - (row > 0).cast(row.dtype)).reshape((1, row.shape[1], 1))
        self._empty = (row == 0).reshape((row.shape[1], 1))

    def kept(self, x: Any, value: float = 0.0) -> Any:
        """x [t, n, features], with `value` in the steps that belong to no sequence."""
        return where(self._inside, x, value)

    def turned(self, x: Any) -> Any:
        """x [t, n, features] with each sequence backwards."""
        return take_along_axis(x, self._turned, 0)

    def last(self, x: Any, first: Any) -> Any:
        """The last steps of the sequences in x, [n, features]; of an empty one that in `first`."""
        return where(self._empty, first, take_along_axis(x, self._ends, 0)[0])


def direction(
    kind: str, x: Any, states: Sequence[Any], weights: Weights, reverse: bool = False, **attrs: Any
) -> tuple[Any, ...]:
    """States of all steps of x [t, n, in] from states [n, hidden] on, [t, n, hidden]; of "lstm" the
    cells, too.
    """
    by_input, by_state, bias, inner, projection = (*weights, None, None, None)[:5]
    if kind == "gru":
        if inner is None:
            inner = filled(by_state, 0.0, by_state.shape[:1])
        gates = linear(x, by_input, bias)
        made: Any = apply("gru", gates, by_state, inner, *states, reverse=reverse)
        return (made[0],)
    total = None if bias is None else bias + inner
    if kind == "rnn":
        gates = linear(x, by_input, total)
        return (apply(kind, gates, by_state, *states, reverse=reverse, **attrs),)
    gates = linear(x, by_input)
    if total is None:
        total = filled(by_state, 0.0, by_state.shape[:1])
    if projection is not None:
        return _projected(gates, by_state, total, projection, states, reverse)
    made = apply(kind, gates, by_state, total, *states, reverse=reverse, **attrs)
    return (made[0], made[1])


def _projected(
    gates: Any, by_state: Any, bias: Any, projection: Any, states: Sequence[Any], reverse: bool
) -> tuple[Any, Any]:
    """An LSTM whose state is its output times `projection` [state, hidden] (H. Sak et al., 2014).

    What such a state adds to the gates is what the output adds by the product of both weights: the
    recurrence is that of an LSTM without projection. Only the first state comes from no output; it
    is added to the gates of the first step.
    """
    first, cell = states
    added = linear(first, by_state).reshape((1, *gates.shape[1:]))
    others = max(0, gates.shape[0] - 1)
    before, after = (others, 0) if reverse else (0, others)
    if gates.shape[0]:
        gates = gates + pad(added, (before, 0, 0), (after, 0, 0))
    weight = matmul(by_state, projection)
    outputs, cells, _ = apply("lstm", gates, weight, bias, filled(cell), cell, reverse=reverse)
    return linear(outputs, projection), cells


def layers(
    kind: str,
    x: Any,
    states: Sequence[Any],
    weights: Sequence[Weights],
    directions: int = 1,
    rate: float = 0.0,
    lengths: Any = None,
    **attrs: Any,
) -> tuple[Any, list[Any]]:
    """Outputs of the last layer for x [t, n, in], and the last states, each kind as [layers
    directions, n, state]. `kind` is "lstm", "gru" or "rnn"; first `states` are such, or none.
    `weights` are those of each layer and direction; outputs between layers are dropped at `rate`.

    With `lengths` int64 [n] each sequence ends there: outputs after its end are zero, states are
    those at its end, and backwards it is read from there.
    """
    rows, size = weights[0][1].shape
    sizes = (size, rows // 4) if kind == "lstm" else (size,)
    shapes = [(len(weights), x.shape[1], each) for each in sizes]
    for state, wanted in zip(states, shapes, strict=False):
        if state.shape != wanted:
            raise ShapeError("first states do not fit", got=state.shape, expected=wanted)
    within = None if lengths is None else Lengths(x, lengths)
    zeros = [filled(x, 0.0, wanted[1:]) for wanted in shapes]
    last: list[list[Any]] = [[] for _ in sizes]
    for layer in range(len(weights) // directions):
        if layer and rate:
            x = dropout(x, rate)
        outputs = []
        for turn in range(directions):
            place = layer * directions + turn
            first = [state[place] for state in states] or zeros
            if within is None:
                every = direction(kind, x, first, weights[place], turn == 1, **attrs)
                outputs.append(every[0])
                end = 0 if turn else x.shape[0] - 1
                ends = [each[end] for each in every] if x.shape[0] else first
            else:
                read = within.turned(x) if turn else x
                every = direction(kind, read, first, weights[place], **attrs)
                made = within.turned(every[0]) if turn else every[0]
                outputs.append(within.kept(made))
                ends = [within.last(*each) for each in zip(every, first, strict=True)]
            for kept, each in zip(last, ends, strict=True):
                kept.append(each)
        x = outputs[0] if directions == 1 else concat(outputs, 2)
    return x, [stack(each, 0) for each in last]
