"""Recurrent layers as functions of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.errors import ShapeError
from plancompiler.frontend.functions.linear import linear
from plancompiler.frontend.functions.shape import concat, stack
from plancompiler.frontend.nn.functional.activation import dropout
from plancompiler.ops.registry import apply

Weights = Sequence[Any]
"""Of one layer in one direction: by the input, by the state, and a bias of each, or None."""


def direction(
    kind: str, x: Any, states: Sequence[Any], weights: Weights, reverse: bool = False, **attrs: Any
) -> tuple[Any, ...]:
    """States of all steps of x [t, n, in] from states [n, hidden] on, [t, n, hidden]; of "lstm" the
    cells, too.
    """
    by_input, by_state, bias, inner = (*weights, None, None)[:4]
    if kind == "gru":
        if inner is None:
            inner = by_state._full(by_state.shape[:1], by_state.dtype, 0.0)  # noqa: SLF001  # what every tensor has
        gates = linear(x, by_input, bias)
        made: Any = apply("gru", gates, by_state, inner, *states, reverse=reverse)
        return (made[0],)
    gates = linear(x, by_input, None if bias is None else bias + inner)
    made = apply(kind, gates, by_state, *states, reverse=reverse, **attrs)
    return (made[0], made[1]) if kind == "lstm" else (made,)


def layers(
    kind: str,
    x: Any,
    states: Sequence[Any],
    weights: Sequence[Weights],
    directions: int = 1,
    rate: float = 0.0,
    **attrs: Any,
) -> tuple[Any, list[Any]]:
    """Outputs of the last layer for x [t, n, in], and the last states, each kind as [layers
    directions, n, hidden]. `kind` is "lstm", "gru" or "rnn"; first `states` are such, or none.
    `weights` are those of each layer and direction; outputs between layers are dropped at `rate`.
    """
    hidden = weights[0][1].shape[1]
    wanted = (len(weights), x.shape[1], hidden)
    for state in states:
        if state.shape != wanted:
            raise ShapeError("first states do not fit", got=state.shape, expected=wanted)
    kinds = 2 if kind == "lstm" else 1
    zeros = x._full(wanted[1:], x.dtype, 0.0)  # noqa: SLF001  # what every tensor has
    last: list[list[Any]] = [[] for _ in range(kinds)]
    for layer in range(len(weights) // directions):
        if layer and rate:
            x = dropout(x, rate)
        outputs = []
        for turn in range(directions):
            place = layer * directions + turn
            first = [state[place] for state in states] or [zeros] * kinds
            every = direction(kind, x, first, weights[place], turn == 1, **attrs)
            outputs.append(every[0])
            end = 0 if turn else x.shape[0] - 1
            for kept, each, begun in zip(last, every, first, strict=True):
                kept.append(each[end] if x.shape[0] else begun)
        x = outputs[0] if directions == 1 else concat(outputs, 2)
    return x, [stack(each, 0) for each in last]
