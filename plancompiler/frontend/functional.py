"""The public functions on tensors. Each ends in the `_apply` of its tensor arguments, so it records
an op on the values of a traced job and would run one on tensors that hold data.

Functions that also take plain numbers keep the tensor's dtype: `pc.maximum(x, 0.0)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from plancompiler.errors import AttributeValueError, ShapeError, TracingError, UsageError
from plancompiler.frontend.out import takes_out
from plancompiler.frontend.trace import current_recorder
from plancompiler.ir import AttrValue, DType, Placement
from plancompiler.ir.operators import (
    SbpLike,
    Scalar,
    TensorOperators,
    normalize_axes,
)
from plancompiler.ops import split_softmax
from plancompiler.ops.gradient import widened
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
    if isinstance(left, TensorOperators):
        return left._binary(kind, right)  # noqa: SLF001  # the operators' own way, and the quickest
    if isinstance(right, TensorOperators):
        mirrored = _MIRRORED.get(kind, kind if kind in _COMMUTATIVE else None)
        if mirrored is not None:
            return right._binary(mirrored, left)  # noqa: SLF001  # as above
        return right._binary(kind, left, swapped=True)  # noqa: SLF001  # as above
    raise TracingError(
        f"{kind} takes two tensors, or a tensor and a number",
        got=f"{type(left).__name__} and {type(right).__name__}",
        hint="bring arrays into a job through pc.input or pc.constant",
    )


@takes_out
def add(left: Any, right: Any, *, out: Any = None) -> Any:
    """left + right, shapes broadcast as in NumPy."""
    return _binary("add", left, right)


@takes_out
def sub(left: Any, right: Any, *, out: Any = None) -> Any:
    """left - right, shapes broadcast as in NumPy."""
    return _binary("sub", left, right)


@takes_out
def mul(left: Any, right: Any, *, out: Any = None) -> Any:
    """left * right, shapes broadcast as in NumPy."""
    return _binary("mul", left, right)


@takes_out
def div(left: Any, right: Any, *, out: Any = None) -> Any:
    """left / right, shapes broadcast as in NumPy."""
    return _binary("div", left, right)


@takes_out
def pow(left: Any, right: Any, *, out: Any = None) -> Any:
    """left to the power of right, shapes broadcast as in NumPy."""
    return _binary("pow", left, right)


@takes_out
def maximum(left: Any, right: Any, *, out: Any = None) -> Any:
    """The greater of both, elementwise."""
    return _binary("maximum", left, right)


@takes_out
def minimum(left: Any, right: Any, *, out: Any = None) -> Any:
    """The smaller of both, elementwise."""
    return _binary("minimum", left, right)


@takes_out
def less(left: Any, right: Any, *, out: Any = None) -> Any:
    """left < right as bool."""
    return _binary("less", left, right)


@takes_out
def less_equal(left: Any, right: Any, *, out: Any = None) -> Any:
    """left <= right as bool."""
    return _binary("less_equal", left, right)


@takes_out
def greater(left: Any, right: Any, *, out: Any = None) -> Any:
    """left > right as bool."""
    return _binary("greater", left, right)


@takes_out
def greater_equal(left: Any, right: Any, *, out: Any = None) -> Any:
    """left >= right as bool."""
    return _binary("greater_equal", left, right)


@takes_out
def equal(left: Any, right: Any, *, out: Any = None) -> Any:
    """left == right as bool."""
    return _binary("equal", left, right)


@takes_out
def not_equal(left: Any, right: Any, *, out: Any = None) -> Any:
    """left != right as bool."""
    return _binary("not_equal", left, right)


@takes_out
def neg(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """-x."""
    return -x


@takes_out
def abs(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Absolute values."""
    return unary("abs", x)


@takes_out
def exp(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """e to the power of x."""
    return unary("exp", x)


@takes_out
def log(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Natural logarithm."""
    return unary("log", x)


@takes_out
def sqrt(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Square root."""
    return unary("sqrt", x)


@takes_out
def rsqrt(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / sqrt(x)."""
    return unary("rsqrt", x)


@takes_out
def square(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x * x."""
    return unary("square", x)


@takes_out
def tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Hyperbolic tangent."""
    return unary("tanh", x)


@takes_out
def sigmoid(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """1 / (1 + exp(-x))."""
    return unary("sigmoid", x)


@takes_out
def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """max(x, 0)."""
    return unary("relu", x)


@takes_out
def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gaussian error linear unit in its tanh form (Hendrycks and Gimpel, 2016)."""
    return unary("gelu", x)


@takes_out
def cast(x: Tensor, dtype: DType | str, *, out: Tensor | None = None) -> Tensor:
    """The same values as another dtype."""
    return x.cast(dtype)


@takes_out
def where(
    condition: Tensor, x: Tensor | Scalar, y: Tensor | Scalar, *, out: Tensor | None = None
) -> Tensor:
    """x where the condition holds, else y; one of them may be a number. Shapes broadcast."""
    if isinstance(x, TensorOperators) and not isinstance(y, TensorOperators):
        y = full_like(x, y, shape=())
    elif isinstance(y, TensorOperators) and not isinstance(x, TensorOperators):
        x = full_like(y, x, shape=())
    if not isinstance(x, TensorOperators) or not isinstance(y, TensorOperators):
        raise TracingError("where needs a tensor for at least one of x and y")
    found: Tensor = apply("where", condition, x, y)
    return found


@takes_out
def full_like(
    x: Tensor, value: Scalar, shape: Sequence[int] | None = None, *, out: Tensor | None = None
) -> Tensor:
    """A tensor of one number with the dtype and placement of `x` (and its shape, unless given)."""
    return x._full(x.shape if shape is None else tuple(shape), x.dtype, value)  # noqa: SLF001  # every tensor's door


def unary(kind: str, x: Tensor) -> Tensor:
    """An op of one tensor, without attributes."""
    return x._unary(kind)  # noqa: SLF001  # the methods' own way, and the quickest


# --- shapes ---------------------------------------------------------------------------------------


@takes_out
def reshape(x: Tensor, shape: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """The same elements in another shape; one extent may be -1."""
    return x.reshape(shape)


@takes_out
def transpose(x: Tensor, axes: Sequence[int] | None = None, *, out: Tensor | None = None) -> Tensor:
    """Axes permuted; without `axes`, reversed."""
    return x.transpose() if axes is None else x.transpose(axes)


@takes_out
def concat(tensors: Sequence[Tensor], axis: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along an axis; the other extents are equal."""
    if not tensors:
        raise UsageError(
            "concat needs at least one tensor", got="none", expected="a sequence of tensors"
        )
    found: Tensor = apply("concat", *tensors, axis=normalize_axes(axis, tensors[0].ndim)[0])
    return found


@takes_out
def slice(
    x: Tensor, starts: Sequence[int], stops: Sequence[int], *, out: Tensor | None = None
) -> Tensor:
    """The box `starts[i]:stops[i]` along every axis i; `x[1:, ...]` is the short form."""
    found: Tensor = apply("slice", x, starts=tuple(starts), stops=tuple(stops))
    return found


@takes_out
def redistribute(
    x: Tensor,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The same value on another placement and/or with another SBP."""
    return x.redistribute(placement, sbp)


# --- reductions -----------------------------------------------------------------------------------


@takes_out
def sum(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Sum over axes (all by default); of whole numbers and bool in int64."""
    return x.sum(axis, keepdims)


@takes_out
def mean(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Arithmetic mean over axes (all by default); of whole numbers float64, of bool float32."""
    return x.mean(axis, keepdims)


@takes_out
def max(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Greatest element over axes (all by default)."""
    return x.max(axis, keepdims)


@takes_out
def min(
    x: Tensor, axis: Axes = None, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Smallest element over axes (all by default)."""
    return x.min(axis, keepdims)


@takes_out
def argmax(
    x: Tensor, axis: int = -1, keepdims: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Index of the greatest element along an axis, as int64; the first of equal ones."""
    return x.argmax(axis, keepdims)


@takes_out
def softmax(
    x: Tensor, axis: int = -1, split_axis: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """exp(x) normalised to sum to one along an axis.

    With `split_axis` the axis may be split over devices: maxima and sums are reduced, x is not
    gathered.
    """
    if split_axis:
        found: Tensor = split_softmax.split_softmax(x, normalize_axes(axis, x.ndim)[0])
        return found
    return x.softmax(axis)


@takes_out
def log_softmax(
    x: Tensor, axis: int = -1, split_axis: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Logarithm of softmax, computed without overflow; `split_axis` as in `softmax`."""
    if split_axis:
        found: Tensor = split_softmax.split_log_softmax(x, normalize_axes(axis, x.ndim)[0])
        return found
    return x.log_softmax(axis)


# --- layers ---------------------------------------------------------------------------------------


@takes_out
def matmul(
    a: Tensor,
    b: Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """a [..., m, k] times b [..., k, n]; leading axes broadcast. `transpose_*` swaps the last two
    axes of an operand first.
    """
    attrs: dict[str, AttrValue] = {}
    if transpose_a:
        attrs["transpose_a"] = True
    if transpose_b:
        attrs["transpose_b"] = True
    return a._apply("matmul", (a, b), attrs)[0]  # noqa: SLF001  # as `apply`, and quicker


@takes_out
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]: [..., out]."""
    product: Tensor = apply("matmul", x, weight, transpose_b=True)
    return product if bias is None else product + bias


@takes_out
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    split_classes: bool = False,
    *,
    out: Tensor | None = None,
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
    return reduce_rows(losses, labels, reduction, ignore_index, logits.dtype)


def reduce_rows(
    losses: Tensor, labels: Tensor, reduction: str, ignore_index: int | None, dtype: DType
) -> Tensor:
    """Losses of rows as `reduction` says, rounded to `dtype`: their "mean" is over the rows whose
    label is not `ignore_index`. Those of 16 bits are added up and counted in float32.
    """
    found: Tensor = losses if reduction == "none" else widened(losses)
    if reduction == "sum" or (reduction == "mean" and ignore_index is None):
        found = found.sum() if reduction == "sum" else found.mean()
    elif reduction == "mean":
        counted = labels.not_equal(ignore_index).cast(found.dtype).sum()
        found = found.sum() / maximum(counted, 1.0)
    return found if found.dtype is dtype else found.cast(dtype)


@takes_out
def layer_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """x normalised to mean 0 and variance 1 along its last axis, times gamma, plus beta."""
    found: Tensor = apply("layer_norm", x, gamma, beta, eps=eps)[0]
    return found


@takes_out
def embedding(table: Tensor, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of table [count, dim] by ids [...]: [..., dim]."""
    found: Tensor = apply("embedding", table, ids)
    return found


@takes_out
def dropout(x: Tensor, rate: float, key: int | None = None, *, out: Tensor | None = None) -> Tensor:
    """Elements are zeroed with probability `rate`, the others scaled by 1 / (1 - rate).

    Which ones depends on the job's seed, the step, the element's global index and `key`; by
    default each dropout of a job has its own key. Outside of jobs the generator has seed and step.
    """
    if key is None:
        key = current_recorder().next_number("dropout key")
    found: Tensor = apply("dropout", x, rate=float(rate), key=key)
    return found


@takes_out
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v for q, k, v of shape [..., length, d]; a position sees none after
    it.

    The weights of later positions are exactly zero.
    """
    if query.ndim < 2 or key.ndim < 2 or not query.shape[-1]:
        raise ShapeError(
            "causal attention needs queries and keys of several numbers per position",
            got=f"{query.shape} and {key.shape}",
            expected="[..., length, d]",
        )
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


@takes_out
def accuracy(logits: Tensor, labels: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Share of positions whose greatest logit (last axis) is the label's: a float32 scalar."""
    found = logits.argmax(-1)
    return found.equal(labels.cast(found.dtype)).cast(DType.FLOAT32).mean()
