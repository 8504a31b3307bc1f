"""The public functions on tensors. Each ends in the `_apply` of its tensor arguments, so it records
an op on the values of a traced job and would run one on tensors that hold data.

Functions that also take plain numbers keep the tensor's dtype: `pc.maximum(x, 0.0)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from plancompiler.errors import AttributeValueError, ShapeError, TracingError, UsageError
from plancompiler.frontend.trace import current_recorder
from plancompiler.ir import DType, Placement
from plancompiler.ir.operators import (
    SbpLike,
    Scalar,
    TensorOperators,
    is_scalar,
    normalize_axes,
)
from plancompiler.ops import split_softmax
from plancompiler.ops.registry import apply, apply_source

Tensor = TypeVar("Tensor", bound=TensorOperators)
Axes = int | Sequence[int] | None

# --- elementwise ----------------------------------------------------------------------------------

_MIRRORED = {
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
}
_COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "equal", "not_equal"})


def _binary(kind: str, left: Any, right: Any) -> Any:
    if isinstance(left, TensorOperators) and isinstance(right, TensorOperators):
        return apply(kind, left, right)
    if isinstance(left, TensorOperators) and is_scalar(right):
        return apply(f"{kind}_scalar", left, scalar=_number(right))
    if isinstance(right, TensorOperators) and is_scalar(left):
        if kind in _COMMUTATIVE or kind in _MIRRORED:
            return apply(f"{_MIRRORED.get(kind, kind)}_scalar", right, scalar=_number(left))
        return apply(f"{kind}_scalar", right, scalar=_number(left), swapped=True)
    for tensor, other, swapped in ((left, right, False), (right, left, True)):
        if isinstance(tensor, TensorOperators):
            pair = (tensor, tensor.coerced(kind, other))
            return apply(kind, *(reversed(pair) if swapped else pair))
    raise TracingError(
        f"{kind} takes two tensors, or a tensor and a number",
        got=f"{type(left).__name__} and {type(right).__name__}",
        hint="bring arrays into a job through pc.input or pc.constant",
    )


def _number(value: Any) -> Scalar:
    number: Scalar = value.item() if hasattr(value, "item") else value
    return number


def add(left: Any, right: Any) -> Any:
    """left + right, shapes broadcast as in NumPy."""
    return _binary("add", left, right)


def sub(left: Any, right: Any) -> Any:
    """left - right, shapes broadcast as in NumPy."""
    return _binary("sub", left, right)


def mul(left: Any, right: Any) -> Any:
    """left * right, shapes broadcast as in NumPy."""
    return _binary("mul", left, right)


def div(left: Any, right: Any) -> Any:
    """left / right, shapes broadcast as in NumPy."""
    return _binary("div", left, right)


def pow(left: Any, right: Any) -> Any:
    """left to the power of right, shapes broadcast as in NumPy."""
    return _binary("pow", left, right)


def maximum(left: Any, right: Any) -> Any:
    """The greater of both, elementwise."""
    return _binary("maximum", left, right)


def minimum(left: Any, right: Any) -> Any:
    """The smaller of both, elementwise."""
    return _binary("minimum", left, right)


def less(left: Any, right: Any) -> Any:
    """left < right as bool."""
    return _binary("less", left, right)


def less_equal(left: Any, right: Any) -> Any:
    """left <= right as bool."""
    return _binary("less_equal", left, right)


def greater(left: Any, right: Any) -> Any:
    """left > right as bool."""
    return _binary("greater", left, right)


def greater_equal(left: Any, right: Any) -> Any:
    """left >= right as bool."""
    return _binary("greater_equal", left, right)


def equal(left: Any, right: Any) -> Any:
    """left == right as bool."""
    return _binary("equal", left, right)


def not_equal(left: Any, right: Any) -> Any:
    """left != right as bool."""
    return _binary("not_equal", left, right)


def neg(x: Tensor) -> Tensor:
    """-x."""
    return -x


def abs(x: Tensor) -> Tensor:
    """Absolute values."""
    return _unary("abs", x)


def exp(x: Tensor) -> Tensor:
    """e to the power of x."""
    return _unary("exp", x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return _unary("log", x)


def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return _unary("sqrt", x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return _unary("rsqrt", x)


def square(x: Tensor) -> Tensor:
    """x * x."""
    return _unary("square", x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return _unary("tanh", x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _unary("sigmoid", x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return _unary("relu", x)


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit in its tanh form (Hendrycks and Gimpel, 2016)."""
    return _unary("gelu", x)


def cast(x: Tensor, dtype: DType | str) -> Tensor:
    """The same values as another dtype."""
    return x.cast(dtype)


def where(condition: Tensor, x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
    """x where the condition holds, else y; one of them may be a number. Shapes broadcast."""
    if isinstance(x, TensorOperators) and not isinstance(y, TensorOperators):
        y = full_like(x, y, shape=())
    elif isinstance(y, TensorOperators) and not isinstance(x, TensorOperators):
        x = full_like(y, x, shape=())
    if not isinstance(x, TensorOperators) or not isinstance(y, TensorOperators):
        raise TracingError("where needs a tensor for at least one of x and y")
    found: Tensor = apply("where", condition, x, y)
    return found


def full_like(x: Tensor, value: Scalar, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor of one number with the dtype and placement of `x` (and its shape, unless given)."""
    return x._full(x.shape if shape is None else tuple(shape), x.dtype, value)  # noqa: SLF001


def _unary(kind: str, x: Tensor) -> Tensor:
    found: Tensor = apply(kind, x)
    return found


# --- shapes ---------------------------------------------------------------------------------------


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape; one extent may be -1."""
    return x.reshape(shape)


def transpose(x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Axes permuted; without `axes`, reversed."""
    return x.transpose() if axes is None else x.transpose(axes)


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors joined along an axis; the other extents are equal."""
    if not tensors:
        raise UsageError("concat needs at least one tensor")
    found: Tensor = apply("concat", *tensors, axis=normalize_axes(axis, tensors[0].ndim)[0])
    return found


def slice(x: Tensor, starts: Sequence[int], stops: Sequence[int]) -> Tensor:
    """The box `starts[i]:stops[i]` along every axis i; `x[1:, ...]` is the short form."""
    found: Tensor = apply("slice", x, starts=tuple(starts), stops=tuple(stops))
    return found


def redistribute(
    x: Tensor, placement: Placement | None = None, sbp: SbpLike | None = None
) -> Tensor:
    """The same value on another placement and/or with another SBP."""
    return x.redistribute(placement, sbp)


# --- reductions -----------------------------------------------------------------------------------


def sum(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Sum over axes (all by default)."""
    return x.sum(axis, keepdims)


def mean(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Arithmetic mean over axes (all by default)."""
    return x.mean(axis, keepdims)


def max(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Greatest element over axes (all by default)."""
    return x.max(axis, keepdims)


def min(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Smallest element over axes (all by default)."""
    return x.min(axis, keepdims)


def argmax(x: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
    """Index of the greatest element along an axis, as int64; the first of equal ones."""
    return x.argmax(axis, keepdims)


def softmax(x: Tensor, axis: int = -1, split_axis: bool = False) -> Tensor:
    """exp(x) normalised to sum to one along an axis.

    With `split_axis` the axis may be split over devices: maxima and sums are reduced, x is not
    gathered.
    """
    if split_axis:
        found: Tensor = split_softmax.split_softmax(x, normalize_axes(axis, x.ndim)[0])
        return found
    return x.softmax(axis)


def log_softmax(x: Tensor, axis: int = -1, split_axis: bool = False) -> Tensor:
    """Logarithm of softmax, computed without overflow; `split_axis` as in `softmax`."""
    if split_axis:
        found: Tensor = split_softmax.split_log_softmax(x, normalize_axes(axis, x.ndim)[0])
        return found
    return x.log_softmax(axis)


# --- layers ---------------------------------------------------------------------------------------


def matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """a [..., m, k] times b [..., k, n]; leading axes broadcast. `transpose_*` swaps the last two
    axes of an operand first.
    """
    attrs = {}
    if transpose_a:
        attrs["transpose_a"] = True
    if transpose_b:
        attrs["transpose_b"] = True
    found: Tensor = apply("matmul", a, b, **attrs)
    return found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]: [..., out]."""
    product = matmul(x, weight, transpose_b=True)
    return product if bias is None else product + bias


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    split_classes: bool = False,
) -> Tensor:
    """-log softmax(logits)[label], of logits [..., classes] and integer labels [...].

    Positions whose label is `ignore_index` have no loss and do not count; None says that every
    position counts, which saves counting. `reduction` is "mean" (over the positions that count),
    "sum" or "none" (one loss per position). Any other label that is no class fails the run.

    With `split_classes` the classes may be split over devices, as a tensor-parallel last layer
    leaves them: three numbers per position are reduced, and neither logits nor their gradients are
    gathered.
    """
    if reduction not in ("mean", "sum", "none"):
        raise AttributeValueError(
            "unknown reduction of cross_entropy", got=repr(reduction), expected="mean, sum or none"
        )
    losses: Tensor
    if split_classes:
        attrs = {} if ignore_index is None else {"ignore_index": ignore_index}
        losses = split_softmax.split_cross_entropy(logits, labels, **attrs)
    elif ignore_index is None:
        losses = apply("cross_entropy", logits, labels)
    else:
        losses = apply("cross_entropy", logits, labels, ignore_index=ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if ignore_index is None:
        return losses.mean()
    counted = labels.not_equal(ignore_index).cast(losses.dtype).sum()
    found: Tensor = losses.sum() / maximum(counted, 1.0)
    return found


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-5) -> Tensor:
    """x normalised to mean 0 and variance 1 along its last axis, times gamma, plus beta."""
    found: Tensor = apply("layer_norm", x, gamma, beta, eps=eps)[0]
    return found


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of table [count, dim] by ids [...]: [..., dim]."""
    found: Tensor = apply("embedding", table, ids)
    return found


def dropout(x: Tensor, rate: float, key: int | None = None) -> Tensor:
    """Elements are zeroed with probability `rate`, the others scaled by 1 / (1 - rate).

    Which ones depends on the job's seed, the step, the element's global index and `key`; by
    default each dropout of a job has its own key. Outside of jobs the generator has seed and step.
    """
    if key is None:
        key = current_recorder().next_number("dropout key")
    found: Tensor = apply("dropout", x, rate=float(rate), key=key)
    return found


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v for q, k, v of shape [..., length, d]; a position sees none after
    it.

    The weights of later positions are exactly zero.
    """
    length = query.shape[-2]
    if key.shape[-2] != length:
        raise ShapeError(
            "causal attention needs queries and keys of one length",
            got=f"{query.shape} and {key.shape}",
        )
    # Scaling the queries costs length * d multiplications where scaling the scores costs length².
    scores = matmul(query * (1.0 / math.sqrt(query.shape[-1])), key, transpose_b=True)
    mask = apply_source(query, "causal_mask", size=length)
    weights: Tensor = where(mask, scores, _FAR_BELOW[scores.dtype]).softmax(-1)
    return matmul(weights, value)


_FAR_BELOW = {
    DType.FLOAT16: -6e4,
    DType.BFLOAT16: -1e30,
    DType.FLOAT32: -1e30,
    DType.FLOAT64: -1e30,
}
"""Scores of hidden positions, per dtype: exp of them is zero, and differences do not overflow."""


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of positions whose greatest logit (last axis) is the label's: a float32 scalar."""
    found = logits.argmax(-1)
    return found.equal(labels.cast(found.dtype)).cast(DType.FLOAT32).mean()
