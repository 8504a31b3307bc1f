"""The rules of ONNX's recurrent layers: LSTM, GRU and RNN.

The usual ones are one op for all steps. Those with peepholes, clipping, other activations or
sequences of several lengths are computed one step after the other, the product of the input with
its weights once for all of them. A sequence that is shorter than the others keeps its state after
its end, and gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from plancompiler.frontend import functions as f
from plancompiler.frontend.nn.functional.recurrence import direction as direction_of
from plancompiler.importers.onnx_rules import as_tensor, refused
from plancompiler.importers.rules import onnx_rule
from plancompiler.ir import DType

Function = Callable[[Any], Any]

_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "relu": f.relu,
    "tanh": f.tanh,
    "sigmoid": f.sigmoid,
    "affine": lambda x, alpha=1.0, beta=0.0: x * alpha + beta,
    "leakyrelu": lambda x, alpha=0.01: f.leaky_relu(x, alpha),
    "thresholdedrelu": lambda x, alpha=1.0: f.where(f.greater(x, alpha), x, f.zeros_like(x)),
    "scaledtanh": lambda x, alpha=1.0, beta=1.0: f.tanh(x * beta) * alpha,
    "hardsigmoid": lambda x, alpha=0.2, beta=0.5: f.clip(x * alpha + beta, 0.0, 1.0),
    "elu": lambda x, alpha=1.0: f.elu(x, alpha),
    "softsign": f.softsign,
    "softplus": f.softplus,
}
_NUMBERS = {
    "affine": 2,
    "leakyrelu": 1,
    "thresholdedrelu": 1,
    "scaledtanh": 2,
    "hardsigmoid": 2,
    "elu": 1,
}
"""How many of alpha and beta an activation has."""


def _activations(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]
) -> list[Function]:
    """Functions by name; the numbers of those that have some come in the order of the names."""
    made: list[Function] = []
    alphas, betas = list(alphas), list(betas)
    for name in names:
        key = name.lower()
        if key not in _ACTIVATIONS:
            raise refused("activation", name, ", ".join(_ACTIVATIONS))
        named: dict[str, float] = {}
        count = _NUMBERS.get(key, 0)
        if count and alphas:
            named["alpha"] = alphas.pop(0)
        if count == 2 and betas:
            named["beta"] = betas.pop(0)
        made.append(partial(_ACTIVATIONS[key], **named))
    return made


State = tuple[Any, ...]
Step = Callable[[Any, State], State]
"""From a step's projected input and the state to the next state. Its first part is the output."""


def _limited(x: Any, clip: float | None) -> Any:
    return x if clip is None else f.clip(x, -clip, clip)


def _parts(x: Any, count: int) -> list[Any]:
    size = x.shape[-1] // count
    return list(f.split(x, [size] * count, x.ndim - 1))


def _lstm_step(
    recurrent: Any,
    bias: Any,
    peep: Any,
    functions: Sequence[Function],
    clip: float | None,
    named: Mapping[str, Any],
) -> Step:
    gate, cell, squash = functions
    peeps = None if peep is None else _parts(peep, 3)
    coupled = bool(named.get("input_forget", 0))

    def step(x: Any, state: State) -> State:
        h, c = state
        i, o, forget, new = _parts(x + f.matmul(h, recurrent, transpose_b=True), 4)
        if peeps is not None:
            i, forget = i + peeps[0] * c, forget + peeps[2] * c
        i = gate(_limited(i, clip))
        forget = 1 - i if coupled else gate(_limited(forget, clip))
        c = forget * c + i * cell(_limited(new, clip))
        if peeps is not None:
            o = o + peeps[1] * c
        return gate(_limited(o, clip)) * squash(c), c

    return step


def _gru_step(
    recurrent: Any,
    bias: Any,
    peep: Any,
    functions: Sequence[Function],
    clip: float | None,
    named: Mapping[str, Any],
) -> Step:
    """`bias` is that of the recurrent part of the new state, if it is reset after the product."""
    gate, cell = functions
    size = recurrent.shape[1]
    gates, candidate = f.split(recurrent, [2 * size, size], 0)
    after = bool(named.get("linear_before_reset", 0))

    def step(x: Any, state: State) -> State:
        (h,) = state
        both, new = f.split(x, [2 * size, size], 1)
        update, reset = _parts(gate(_limited(both + f.matmul(h, gates, transpose_b=True), clip)), 2)
        if after:
            inner = f.matmul(h, candidate, transpose_b=True)
            new = new + reset * (inner if bias is None else inner + bias)
        else:
            new = new + f.matmul(reset * h, candidate, transpose_b=True)
        new = cell(_limited(new, clip))
        return ((1 - update) * new + update * h,)

    return step


def _rnn_step(
    recurrent: Any,
    bias: Any,
    peep: Any,
    functions: Sequence[Function],
    clip: float | None,
    named: Mapping[str, Any],
) -> Step:
    def step(x: Any, state: State) -> State:
        return (functions[0](_limited(x + f.matmul(state[0], recurrent, transpose_b=True), clip)),)

    return step


_ORDER = {"lstm": (0, 2, 3, 1), "gru": (1, 0, 2), "rnn": (0,)}
"""The standard's gates in the order of the ops."""
_USUAL = {"lstm": ["sigmoid", "tanh", "tanh"], "gru": ["sigmoid", "tanh"]}


def _plain_kind(kind: str, names: Sequence[str], unusual: bool, named: Mapping[str, Any]) -> bool:
    """Whether the op of a kind computes a direction with these activations."""
    if unusual or named.get("input_forget", 0):
        return False
    if kind == "gru" and not named.get("linear_before_reset", 0):
        return False
    lower = [each.lower() for each in names]
    return lower == _USUAL[kind] if kind in _USUAL else lower[0] in ("tanh", "relu")


def _ordered(x: Any, kind: str) -> Any:
    """Gates along the first axis in the order of the op."""
    order = _ORDER[kind]
    if len(order) == 1:
        return x
    parts = f.split(x, [x.shape[0] // len(order)] * len(order), 0)
    return f.concat([parts[each] for each in order], 0)


def _at_once(
    kind: str, x: Any, w: Any, r: Any, bias: Any, start: State, backwards: bool, name: str
) -> tuple[Any, State]:
    """The outputs of all steps [time, batch, size], and the last state."""
    halves = (None, None) if bias is None else _parts(bias, 2)
    weights = [None if e is None else _ordered(e, kind) for e in (w, r, *halves)]
    attrs = {"nonlinearity": name.lower()} if kind == "rnn" else {}
    every = direction_of(kind, x, start, weights, backwards, **attrs)
    return every[0], tuple(f.select(e, 0, 0 if backwards else x.shape[0] - 1) for e in every)


def _layer(
    kind: str, states: int, defaults: Sequence[str], make: Callable[..., Step]
) -> Callable[..., Any]:
    """The rule of a kind of layer with this many tensors of state."""

    def rule(
        x: Any,
        weight: Any,
        recurrent: Any,
        bias: Any = None,
        sequence_lens: Any = None,
        initial_h: Any = None,
        initial_c: Any = None,
        peepholes: Any = None,
        activation_alpha: Sequence[float] = (),
        activation_beta: Sequence[float] = (),
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int = 0,
        layout: int = 0,
        outputs: int = 1,
        **named: Any,
    ) -> Any:
        directions = weight.shape[0]
        names = list(activations or list(defaults) * directions)
        functions = _activations(names, activation_alpha, activation_beta)
        unusual = clip is not None or sequence_lens is not None or peepholes is not None
        if layout:
            x = x.transpose([1, 0, 2])
            initial_h, initial_c = (
                None if each is None else each.transpose([1, 0, 2])
                for each in (initial_h, initial_c)
            )
        ways = []
        for way in range(directions):
            w, r = f.select(weight, 0, way), f.select(recurrent, 0, way)
            size = r.shape[1]
            backwards = direction == "reverse" or way == 1
            given = (initial_h, initial_c)[:states]
            empty = f.full_like(x, 0.0, [x.shape[1], size])
            start = tuple(empty if each is None else f.select(each, 0, way) for each in given)
            own_names = names[way * len(defaults) : (way + 1) * len(defaults)]
            if x.shape[0] and _plain_kind(kind, own_names, unusual, named):
                both = None if bias is None else f.select(bias, 0, way)
                ways.append(_at_once(kind, x, w, r, both, start, backwards, own_names[0]))
                continue
            projected = f.matmul(x, w, transpose_b=True)
            inner = None
            if bias is not None:
                first, second = _parts(f.select(bias, 0, way), 2)
                if named.get("linear_before_reset", 0):
                    inner = f.split(second, [2 * size, size], 0)[1]
                    kept = f.split(second, [2 * size, size], 0)[0]
                    second = f.pad(kept, [0], [size])
                projected = projected + (first + second)
            peep = None if peepholes is None else f.select(peepholes, 0, way)
            own = functions[way * len(defaults) : (way + 1) * len(defaults)]
            step = make(r, inner, peep, own, clip, named)
            ways.append(_run(projected, start, step, sequence_lens, backwards))
        y = f.stack([rows for rows, _ in ways], 1)
        last = [f.stack([state[number] for _, state in ways], 0) for number in range(states)]
        if layout:
            y = y.transpose([2, 0, 1, 3])
            last = [each.transpose([1, 0, 2]) for each in last]
        return y, *last

    return rule


def _run(
    projected: Any, state: State, step: Step, lengths: Any, backwards: bool
) -> tuple[Any, State]:
    """The outputs of all steps [time, batch, size], and the last state."""
    time = projected.shape[0]
    rows: list[Any] = [None] * time
    order = range(time)
    for number in reversed(order) if backwards else order:
        new = step(f.select(projected, 0, number), state)
        if lengths is None:
            state, rows[number] = new, new[0]
            continue
        count = math.prod(lengths.shape)
        alive = f.greater(
            as_tensor(lengths, projected).reshape([count, 1]).cast(DType.INT64), number
        )
        state = tuple(f.where(alive, now, old) for now, old in zip(new, state, strict=True))
        rows[number] = f.where(alive, new[0], f.zeros_like(new[0]))
    return f.stack(rows, 0), state


for _name, _rule in {
    "LSTM": _layer("lstm", 2, ("Sigmoid", "Tanh", "Tanh"), _lstm_step),
    "GRU": _layer("gru", 1, ("Sigmoid", "Tanh"), _gru_step),
    "RNN": _layer("rnn", 1, ("Tanh",), _rnn_step),
}.items():
    onnx_rule(_name)(_rule)
