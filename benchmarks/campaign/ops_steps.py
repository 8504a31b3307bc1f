"""Functions that random programs are made of, each beside NumPy's, and a random step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import plancompiler as pc

Array = np.ndarray[Any, np.dtype[Any]]
Ours = Callable[..., Any]
Reference = Callable[..., Any]


def sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), 1 - 1 / (1 + np.exp(-np.abs(x))))


def softplus(x: Array) -> Array:
    return np.logaddexp(x, 0.0)


def softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


ERF = np.vectorize(math.erf, otypes=[float])

PLAIN: dict[str, tuple[Ours, Reference]] = {
    "neg": (pc.neg, np.negative),
    "abs": (pc.abs, np.abs),
    "sign": (pc.sign, np.sign),
    "square": (pc.square, np.square),
    "exp": (pc.exp, np.exp),
    "exp2": (pc.exp2, np.exp2),
    "expm1": (pc.expm1, np.expm1),
    "sin": (pc.sin, np.sin),
    "cos": (pc.cos, np.cos),
    "tanh": (pc.tanh, np.tanh),
    "sinh": (pc.sinh, np.sinh),
    "cosh": (pc.cosh, np.cosh),
    "atan": (pc.atan, np.arctan),
    "asinh": (pc.asinh, np.arcsinh),
    "erf": (pc.erf, ERF),
    "floor": (pc.floor, np.floor),
    "ceil": (pc.ceil, np.ceil),
    "trunc": (pc.trunc, np.trunc),
    "round": (pc.round, np.round),
    "relu": (pc.relu, lambda x: np.maximum(x, 0)),
    "relu6": (pc.relu6, lambda x: np.clip(x, 0, 6)),
    "leaky_relu": (pc.leaky_relu, lambda x: np.where(x > 0, x, 0.01 * x)),
    "sigmoid": (pc.sigmoid, sigmoid),
    "softplus": (pc.softplus, softplus),
    "logsigmoid": (pc.logsigmoid, lambda x: -softplus(-x)),
    "elu": (pc.elu, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
    "softsign": (pc.softsign, lambda x: x / (1 + np.abs(x))),
    "clip": (lambda x: pc.clip(x, -0.5, 1.5), lambda x: np.clip(x, -0.5, 1.5)),
}
"""Functions of any number, without a pole."""
SMOOTH_ONLY = {"silu": (pc.silu, lambda x: x * sigmoid(x))}
"""Their references are nan at the edges where the function is not."""
PARTLY: dict[str, tuple[Ours, Reference]] = {
    "log": (pc.log, np.log),
    "log1p": (pc.log1p, np.log1p),
    "log2": (pc.log2, np.log2),
    "log10": (pc.log10, np.log10),
    "sqrt": (pc.sqrt, np.sqrt),
    "rsqrt": (pc.rsqrt, lambda x: 1 / np.sqrt(x)),
    "reciprocal": (pc.reciprocal, lambda x: 1 / x),
    "asin": (pc.asin, np.arcsin),
    "acos": (pc.acos, np.arccos),
    "acosh": (pc.acosh, np.arccosh),
    "atanh": (pc.atanh, np.arctanh),
    "tan": (pc.tan, np.tan),
}
"""Functions with poles, or of a part of the numbers."""
INSIDE = {"asin": 0.0, "acos": 0.0, "atanh": 0.0, "acosh": 1.5}
"""Where to shift their argument, which is brought within (0.1, 0.9) first; others take 0.5 more."""
BINARY: dict[str, tuple[Ours, Reference]] = {
    "add": (pc.add, np.add),
    "sub": (pc.sub, np.subtract),
    "mul": (pc.mul, np.multiply),
    "maximum": (pc.maximum, np.maximum),
    "minimum": (pc.minimum, np.minimum),
    "atan2": (pc.atan2, np.arctan2),
    "hypot": (pc.hypot, np.hypot),
    "logaddexp": (pc.logaddexp, np.logaddexp),
    "copysign": (pc.copysign, np.copysign),
}
BINARY_EDGES: dict[str, tuple[Ours, Reference]] = {
    **BINARY,
    "div": (pc.div, np.divide),
    "pow": (pc.pow, np.power),
    "fmod": (pc.fmod, np.fmod),
}
COMPARISONS: dict[str, tuple[Ours, Reference]] = {
    "less": (pc.less, np.less),
    "less_equal": (pc.less_equal, np.less_equal),
    "greater": (pc.greater, np.greater),
    "equal": (pc.equal, np.equal),
    "not_equal": (pc.not_equal, np.not_equal),
    "isnan": (lambda x, _: pc.isnan(x), lambda x, _: np.broadcast_to(np.isnan(x), x.shape)),
    "isinf": (lambda x, _: pc.isinf(x), lambda x, _: np.isinf(x)),
}
REDUCTIONS: dict[str, tuple[Ours, Reference]] = {
    "sum": (pc.sum, np.sum),
    "mean": (pc.mean, np.mean),
    "max": (pc.max, np.max),
    "min": (pc.min, np.min),
    "prod": (pc.prod, np.prod),
}
MORE_REDUCTIONS: dict[str, tuple[Ours, Reference]] = {
    "var": (pc.var, np.var),
    "logsumexp": (
        pc.logsumexp,
        lambda x, axis, keepdims: np.logaddexp.reduce(x, axis, keepdims=keepdims),
    ),
}
TENSOR_FACTORS = {"mul", "div"}
"""Linear, with a tensor as factor: of a partial value and an infinity they may be nan."""


@dataclass(frozen=True)
class Step:
    """One function on some of the values that a program has made so far."""

    name: str
    inputs: tuple[int, ...]
    ours: Ours
    reference: Reference

    def __str__(self) -> str:
        return f"{self.name}{list(self.inputs)}"


def quiet(reference: Reference, *arrays: Array) -> Array:
    """A reference in float64, without warnings."""
    with np.errstate(all="ignore"):
        return np.asarray(reference(*arrays))


def random_layout(
    choices: random.Random, shape: Sequence[int], mesh: pc.Placement, partial: bool
) -> list[str]:
    """One SBP per mesh axis."""
    options = ["B", *(f"S({axis})" for axis in range(len(shape)))] + (["P"] if partial else [])
    return [choices.choice(options) for _ in mesh.hierarchy]


def random_step(choices: random.Random, values: Sequence[Array], mesh: pc.Placement) -> Step:
    """A function that can take some of these values, all of real numbers."""
    index = choices.randrange(len(values)) if choices.random() < 0.5 else len(values) - 1
    x = values[index]
    kind = choices.choice(
        ("plain", "plain", "partly", "binary", "binary", "reduce", "shape", "lay")
    )
    if kind == "partly":
        return _partly(choices, index)
    if kind == "binary":
        return _binary(choices, index, values)
    if kind == "reduce" and x.ndim:
        return _reduction(choices, index, x)
    if kind == "shape" and x.ndim:
        return _shape(choices, index, x)
    if kind == "lay":
        sbp = random_layout(choices, x.shape, mesh, partial=True)
        return Step(
            f"redistribute {' '.join(sbp)}",
            (index,),
            lambda x: x.redistribute(sbp=sbp),
            lambda x: x,
        )
    name, (ours, reference) = choices.choice(list({**PLAIN, **SMOOTH_ONLY}.items()))
    if np.max(np.abs(x), initial=0.0) > 4:  # so that nothing grows beyond float16
        return Step("tanh", (index,), pc.tanh, np.tanh)
    return Step(name, (index,), ours, reference)


def _partly(choices: random.Random, index: int) -> Step:
    name, (ours, reference) = choices.choice(list(PARTLY.items()))
    if name in INSIDE:
        shift = INSIDE[name]
        return Step(
            name,
            (index,),
            lambda x: ours(pc.sigmoid(x) * 0.8 + (0.1 + shift)),
            lambda x: reference(sigmoid(x) * 0.8 + (0.1 + shift)),
        )
    if name == "tan":
        return Step(name, (index,), lambda x: ours(pc.tanh(x)), lambda x: reference(np.tanh(x)))
    return Step(
        name,
        (index,),
        lambda x: ours(pc.abs(x) + 0.5),
        lambda x: reference(np.abs(x) + 0.5),
    )


def _binary(choices: random.Random, index: int, values: Sequence[Array]) -> Step:
    x = values[index]
    fitting = [
        other
        for other, y in enumerate(values)
        if _broadcast_size(x, y) <= 64 and np.max(np.abs(x), initial=0) * 4 < 60
    ]
    if not fitting:
        return Step("tanh", (index,), pc.tanh, np.tanh)
    other = choices.choice(fitting)
    name, (ours, reference) = choices.choice(list(BINARY.items()))
    if name == "mul" and np.max(np.abs(values[other]), initial=0) > 8:
        name, (ours, reference) = "add", BINARY["add"]
    if choices.random() < 0.15:
        return Step(
            "div",
            (index, other),
            lambda x, y: x / (pc.abs(y) + 0.5),
            lambda x, y: x / (np.abs(y) + 0.5),
        )
    return Step(name, (index, other), ours, reference)


def _broadcast_size(x: Array, y: Array) -> float:
    try:
        return math.prod(np.broadcast_shapes(x.shape, y.shape))
    except ValueError:
        return math.inf


def _reduction(choices: random.Random, index: int, x: Array) -> Step:
    name, (ours, reference) = choices.choice(list({**REDUCTIONS, **MORE_REDUCTIONS}.items()))
    axis = choices.randrange(x.ndim)
    keepdims = choices.random() < 0.5
    if name == "prod" and np.max(np.abs(x), initial=0) > 2:
        name, (ours, reference) = "sum", REDUCTIONS["sum"]
    return Step(
        f"{name} axis {axis}{' kept' if keepdims else ''}",
        (index,),
        lambda x: ours(x, axis=axis, keepdims=keepdims),
        lambda x: reference(x, axis=axis, keepdims=keepdims),
    )


def _shape(choices: random.Random, index: int, x: Array) -> Step:
    axis = choices.randrange(x.ndim)
    order = tuple(choices.sample(range(x.ndim), x.ndim))
    n = x.shape[axis]
    start = choices.randrange(n + 1)
    cut = tuple(slice(start, None) if each == axis else slice(None) for each in range(x.ndim))
    shift = choices.randrange(-3, 4)
    low, high = ([choices.randrange(2) for _ in x.shape] for _ in range(2))
    options: dict[str, tuple[Ours, Reference]] = {
        f"transpose {order}": (
            lambda x: pc.transpose(x, order),
            lambda x: np.transpose(x, order),
        ),
        "flatten": (lambda x: pc.reshape(x, (-1,)), lambda x: np.reshape(x, (-1,))),
        f"flip {axis}": (lambda x: pc.flip(x, axis), lambda x: np.flip(x, axis)),
        f"roll {shift} {axis}": (
            lambda x: pc.roll(x, shift, axis),
            lambda x: np.roll(x, shift, axis),
        ),
        f"cumsum {axis}": (lambda x: pc.cumsum(x, axis), lambda x: np.cumsum(x, axis)),
        f"softmax {axis}": (lambda x: pc.softmax(x, axis), lambda x: softmax(x, axis)),
        f"log_softmax {axis}": (
            lambda x: pc.log_softmax(x, axis),
            lambda x: np.log(softmax(x, axis)),
        ),
        f"sort {axis}": (lambda x: pc.sort(x, axis)[0], lambda x: np.sort(x, axis)),
        f"concat {axis}": (
            lambda x: pc.concat([x, x], axis),
            lambda x: np.concatenate([x, x], axis),
        ),
        f"pad {low} {high}": (
            lambda x: pc.pad(x, low, high),
            lambda x: np.pad(x, list(zip(low, high, strict=True))),
        ),
        f"where {axis}": (
            lambda x: pc.where(x > 0.0, x, -0.5),
            lambda x: np.where(x > 0.0, x, -0.5),
        ),
    }
    if start < n:
        options[f"slice {start}: of axis {axis}"] = (lambda x: x[cut], lambda x: x[cut])
    if x.ndim == 2 and x.size <= 24:
        options["product with itself"] = (
            lambda x: pc.matmul(x, x, transpose_b=True) * 0.25,
            lambda x: (x @ x.T) * 0.25,
        )
    name, (ours, reference) = choices.choice(list(options.items()))
    return Step(name, (index,), ours, reference)
