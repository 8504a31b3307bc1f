"""The rules of StableHLO's operations, in one table: most take a line.

Each function takes an operation's operands by position and its attributes by the names that the
specification of StableHLO gives them. Attributes that only matter to compilers are ignored.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import UsageError
from plancompiler.frontend import functions as f
from plancompiler.frontend.trace import constant
from plancompiler.importers import stablehlo_linear_algebra_rules  # noqa: F401  # fill the table
from plancompiler.importers.attention_recognition import attention
from plancompiler.importers.rules import STABLEHLO_RULES, stablehlo_rule
from plancompiler.importers.stablehlo import Sharding
from plancompiler.ir import DType, TensorType
from plancompiler.ir.operators import TensorOperators
from plancompiler.ops.registry import apply_source

__all__ = ["BROADCASTING", "ELEMENTWISE", "STABLEHLO_RULES"]

_BEFORE = frozenset(STABLEHLO_RULES)
"""Rules of linear algebra, and of a program that gave its own before it imported anything."""


def _refused(what: str, got: object, expected: str) -> UsageError:
    return UsageError(f"the importer knows no {what} like this", got=repr(got), expected=expected)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, TensorOperators)


def _named(name: str) -> Callable[..., Any]:
    """A public function that is derived from an op, which type checkers do not know."""
    function: Callable[..., Any] = getattr(f, name)
    return function


def _filled(x: Any, result: TensorType, value: Any) -> Any:
    number = float(value) if result.dtype.is_floating else value
    if result.dtype is DType.BOOL:
        number = bool(value)
    return apply_source(x, "fill", shape=result.shape, dtype=str(result.dtype), value=number)


def _as_tensor(array: Any, beside: Any) -> Any:
    if _is_tensor(array):
        return array
    return constant(array, DType.parse(array.dtype), beside.placement)


# --- elementwise ----------------------------------------------------------------------------------


def _logical(bits: Callable[..., Any], truth: Callable[..., Any]) -> Callable[..., Any]:
    """What acts on bits of whole numbers, and on truth values."""

    def rule(*operands: Any, result: TensorType) -> Any:
        if result.dtype is not DType.BOOL:
            return bits(*operands)
        tensors = [each for each in operands if _is_tensor(each)]
        return truth(
            *(each if _is_tensor(each) else _filled(tensors[0], result, each) for each in operands)
        )

    return rule


def _add(x: Any, y: Any, result: TensorType) -> Any:
    return _or(x, y, result=result) if result.dtype is DType.BOOL else f.add(x, y)


def _mul(x: Any, y: Any, result: TensorType) -> Any:
    return _and(x, y, result=result) if result.dtype is DType.BOOL else f.mul(x, y)


_and = _logical(f.bitwise_and, f.logical_and)
_or = _logical(f.bitwise_or, f.logical_or)
_xor = _logical(f.bitwise_xor, f.logical_xor)


def _extreme(
    function: Callable[..., Any], truth: Callable[..., Any], low: bool
) -> Callable[..., Any]:
    """The greater or the smaller of two; one of them may be a number."""

    def rule(x: Any, y: Any, result: TensorType) -> Any:
        if result.dtype is DType.BOOL:
            return truth(x, y, result=result)
        tensor = x if _is_tensor(x) else y
        x, y = (each if _is_tensor(each) else f.full_like(tensor, each) for each in (x, y))
        return function(x, y)

    return rule


def _divide(x: Any, y: Any, result: TensorType) -> Any:
    if result.dtype.is_floating:
        return f.div(x, y)
    quotient = f.floor_divide(x, y)
    if not result.dtype.is_signed:
        return quotient
    # Towards zero.
    rest = f.sub(x, f.mul(quotient, y))
    below = f.logical_and(f.less(quotient, 0), f.not_equal(rest, 0))
    return f.add(quotient, below.cast(result.dtype))


def _remainder(x: Any, y: Any, result: TensorType) -> Any:
    """With the sign of the dividend."""
    if result.dtype.is_floating:
        return f.fmod(x, y)
    return f.sub(x, f.mul(_divide(x, y, result), y))


def _power(x: Any, y: Any, result: TensorType) -> Any:
    if isinstance(y, (int, float)):
        if y == 2:
            return f.square(x)
        if y == 0.5:
            return f.sqrt(x)
        if y == -0.5:
            return f.rsqrt(x)
    return f.pow(x, y)


def _shift_right_logical(x: Any, y: Any, result: TensorType) -> Any:
    if not result.dtype.is_signed:
        return f.shift_right(x, y)
    bare = DType.parse(f"u{result.dtype}")
    x, y = (each.cast(bare) if _is_tensor(each) else each for each in (x, y))
    return f.shift_right(x, y).cast(result.dtype)


def _of_shift(shift: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: Any, y: Any, result: TensorType) -> Any:
        tensor = x if _is_tensor(x) else y
        x, y = (
            each
            if _is_tensor(each)
            else _filled(tensor, TensorType(tensor.shape, result.dtype), each)
            for each in (x, y)
        )
        return shift(x, y, result)

    return rule


_COMPARISONS = {
    "EQ": f.equal,
    "NE": f.not_equal,
    "LT": f.less,
    "LE": f.less_equal,
    "GT": f.greater,
    "GE": f.greater_equal,
}
_MIRRORED = {"EQ": "EQ", "NE": "NE", "LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


def _compare(x: Any, y: Any, comparison_direction: str, compare_type: str = "") -> Any:
    if not _is_tensor(x):
        x, y, comparison_direction = y, x, _MIRRORED[comparison_direction]
    if compare_type == "TOTALORDER":
        return _in_total_order(x, y, comparison_direction)
    if x.dtype is DType.BOOL:
        x = x.cast(DType.INT32)
        y = y.cast(DType.INT32) if _is_tensor(y) else int(y)
    return _COMPARISONS[comparison_direction](x, y)


def _in_total_order(x: Any, y: Any, direction: str) -> Any:
    """A comparison in IEEE 754's order of all floating numbers, in which -0 comes before 0, and
    what is not a number before or after all others, by its sign.
    """
    y = y if _is_tensor(y) else f.full_like(x, y)
    if direction in ("GT", "LE"):
        x, y = y, x
    if direction in ("EQ", "NE"):
        either = f.logical_or(_precedes(x, y), _precedes(y, x))
        return either if direction == "NE" else f.logical_not(either)
    before = _precedes(x, y)
    return before if direction in ("LT", "GT") else f.logical_not(before)


_signbit = _named("signbit")


def _precedes(x: Any, y: Any) -> Any:
    x_last, y_last = f.isnan(x), f.isnan(y)
    x_below, y_below = _signbit(x), _signbit(y)
    apart = f.logical_and(x_below, f.logical_not(y_below))
    numbers = f.logical_or(f.less(x, y), f.logical_and(f.equal(x, y), apart))
    first = f.logical_and(
        f.logical_and(x_last, x_below), f.logical_not(f.logical_and(y_last, y_below))
    )
    last = f.logical_and(
        f.logical_and(y_last, f.logical_not(y_below)),
        f.logical_not(f.logical_and(x_last, f.logical_not(x_below))),
    )
    return f.where(f.logical_or(x_last, y_last), f.logical_or(first, last), numbers)


def _select(condition: Any, x: Any, y: Any, result: TensorType) -> Any:
    if isinstance(condition, bool):
        chosen = x if condition else y
        return chosen if _is_tensor(chosen) else _filled(y if condition else x, result, chosen)
    if not _is_tensor(x):
        x = _filled(condition, result, x)
        if not _is_tensor(y):
            y = _filled(condition, result, y)
    elif not _is_tensor(y) and result.dtype is DType.BOOL:
        y = _filled(condition, result, y)
    return f.where(condition, x, y)


def _clamp(low: Any, x: Any, high: Any, result: TensorType) -> Any:
    if not _is_tensor(x):
        x = _filled(next(each for each in (low, high) if _is_tensor(each)), result, x)
    if _is_tensor(low) or _is_tensor(high):
        low, high = (
            (f.expand(each, result.shape) if each.shape != result.shape else each)
            if _is_tensor(each)
            else f.full_like(x, each)
            for each in (low, high)
        )
        return f.minimum(f.maximum(x, low), high)
    if not result.dtype.is_floating:
        return f.clip(x, low, high)
    # At the bounds the gradient is zero.
    return f.where(f.less_equal(x, low), low, f.where(f.greater_equal(x, high), high, x))


def _abs(x: Any) -> Any:
    # Of floating numbers the gradient at zero is 1.
    return f.where(f.greater_equal(x, 0), x, -x) if x.dtype.is_floating else f.abs(x)


def _convert(x: Any, result: TensorType) -> Any:
    if x.dtype is result.dtype:
        return x
    if result.dtype is DType.BOOL:
        return f.not_equal(x, 0)
    if x.dtype.is_floating and result.dtype.is_integer:
        return _whole(x, result)
    return x.cast(result.dtype)


def _whole(x: Any, result: TensorType) -> Any:
    """Whole numbers: those out of range become the nearest one, and what is no number 0."""
    limits: Any = np.iinfo(str(result.dtype))
    above = f.greater_equal(x, float(limits.max) if limits.bits > 53 else limits.max + 1.0)
    below = f.less_equal(x, float(limits.min))
    inside = f.where(f.logical_or(f.logical_or(above, below), f.isnan(x)), 0.0, x)
    whole = f.where(above, limits.max, inside.cast(result.dtype))
    return f.where(below, limits.min, whole) if limits.min else whole


def _reduce_precision(x: Any, exponent_bits: int, mantissa_bits: int) -> Any:
    shapes = {(8, 7): DType.BFLOAT16, (5, 10): DType.FLOAT16, (8, 23): DType.FLOAT32}
    dtype = shapes.get((exponent_bits, mantissa_bits))
    if (exponent_bits, mantissa_bits) == (11, 52) or dtype is x.dtype:
        return x
    if dtype is None:
        raise _refused("precision", (exponent_bits, mantissa_bits), "that of a floating dtype")
    return x.cast(dtype).cast(x.dtype)


def _float_of_bits(x: Any, result: TensorType) -> Any:
    """The number whose exponent is that of 1 and whose other bits are x."""
    limits: Any = np.finfo(str(result.dtype))
    return x.cast(result.dtype) * 2.0**-limits.nmant + 1.0


def _cbrt(x: Any) -> Any:
    return f.sign(x) * f.pow(f.abs(x), 1 / 3)


def _round_away(x: Any) -> Any:
    return f.sign(x) * f.floor(f.abs(x) + 0.5)


def _not(x: Any) -> Any:
    return f.logical_not(x) if x.dtype is DType.BOOL else f.bitwise_not(x)


for _names, _function in {
    "stablehlo.abs": _abs,
    "stablehlo.cbrt": _cbrt,
    "stablehlo.ceil": f.ceil,
    "stablehlo.cosine": f.cos,
    "stablehlo.exponential": f.exp,
    "stablehlo.exponential_minus_one": f.expm1,
    "stablehlo.floor": f.floor,
    "stablehlo.is_finite": f.isfinite,
    "stablehlo.log": f.log,
    "stablehlo.log_plus_one": f.log1p,
    "stablehlo.logistic": f.sigmoid,
    "stablehlo.negate": f.neg,
    "stablehlo.not": _not,
    "stablehlo.round_nearest_even": f.round,
    "stablehlo.round_nearest_afz": _round_away,
    "stablehlo.rsqrt": f.rsqrt,
    "stablehlo.sign": f.sign,
    "stablehlo.sine": f.sin,
    "stablehlo.sqrt": f.sqrt,
    "stablehlo.tan chlo.tan": f.tan,
    "stablehlo.tanh": f.tanh,
    "chlo.acos": f.acos,
    "chlo.acosh": f.acosh,
    "chlo.asin": f.asin,
    "chlo.asinh": f.asinh,
    "chlo.atan": f.atan,
    "chlo.atanh": f.atanh,
    "chlo.cosh": f.cosh,
    "chlo.digamma": _named("digamma"),
    "chlo.erf": f.erf,
    "chlo.erfc": _named("erfc"),
    "chlo.erf_inv": _named("erfinv"),
    "chlo.is_inf": f.isinf,
    "chlo.is_neg_inf": _named("isneginf"),
    "chlo.is_pos_inf": _named("isposinf"),
    "chlo.lgamma": _named("lgamma"),
    "chlo.sinh": f.sinh,
    "chlo.square": f.square,
    "chlo.bessel_i1e": _named("i1e"),
    "imported.relu": f.relu,
    "imported.square": f.square,
}.items():

    def _of_one(x: Any, *, function: Any = _function, **attrs: Any) -> Any:
        return function(x)

    stablehlo_rule(*_names.split())(_of_one)

_OF_TWO: dict[str, Callable[..., Any]] = {
    "stablehlo.add": _add,
    "stablehlo.subtract": lambda x, y, result: f.sub(x, y),
    "stablehlo.multiply": _mul,
    "stablehlo.divide": _divide,
    "stablehlo.remainder": _remainder,
    "stablehlo.power": _power,
    "stablehlo.atan2": lambda y, x, result: f.atan2(y, x),
    "stablehlo.maximum": _extreme(f.maximum, _or, False),
    "stablehlo.minimum": _extreme(f.minimum, _and, True),
    "stablehlo.and": _and,
    "stablehlo.or": _or,
    "stablehlo.xor": _xor,
    "stablehlo.shift_left": _of_shift(lambda x, y, result: f.shift_left(x, y)),
    "stablehlo.shift_right_arithmetic": _of_shift(lambda x, y, result: f.shift_right(x, y)),
    "stablehlo.shift_right_logical": _of_shift(_shift_right_logical),
    "chlo.next_after": lambda x, y, result: f.nextafter(x, y),
    "chlo.zeta": lambda x, y, result: f.zeta(x, y),
}
for _target, _of_two in _OF_TWO.items():
    stablehlo_rule(_target, promotes=True, typed=True)(_of_two)
stablehlo_rule("stablehlo.compare")(_compare)
stablehlo_rule("stablehlo.select", typed=True)(_select)
stablehlo_rule("stablehlo.clamp", typed=True)(_clamp)
stablehlo_rule("stablehlo.convert", typed=True)(_convert)
stablehlo_rule("stablehlo.reduce_precision")(_reduce_precision)
stablehlo_rule("imported.float_of_bits", typed=True)(_float_of_bits)

ELEMENTWISE = frozenset(STABLEHLO_RULES) - _BEFORE
"""Operations on the elements of operands of one shape: the rules of this file so far. Where an
operand is full of one number, the rule gets that number."""


def _bitcast(x: Any, result: TensorType) -> Any:
    raise _refused(
        "change of type", f"the bits of {x.dtype} as {result.dtype}", "bits that are constant"
    )


BROADCASTING = frozenset(
    {
        "stablehlo.compare",
        "stablehlo.select",
        *(target for target in ELEMENTWISE if STABLEHLO_RULES[target].promotes),
    }
)
"""Of these, those whose operands may have extents of 1 where others are longer."""


# --- shape ----------------------------------------------------------------------------------------


def _reshaped(x: Any, shape: Sequence[int]) -> Any:
    return x if tuple(shape) == x.shape else x.reshape(list(shape))


def _permuted(x: Any, permutation: Sequence[int]) -> Any:
    order = list(permutation)
    return x if order == list(range(x.ndim)) else x.transpose(order)


def _broadcast_in_dim(x: Any, broadcast_dimensions: Sequence[int], result: TensorType) -> Any:
    along = [1] * len(result.shape)
    order = sorted(range(x.ndim), key=lambda axis: broadcast_dimensions[axis])
    x = _permuted(x, order)
    for extent, axis in zip(x.shape, sorted(broadcast_dimensions), strict=True):
        along[axis] = extent
    x = _reshaped(x, along)
    return x if x.shape == result.shape else f.expand(x, result.shape)


def _sliced(
    x: Any, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Sequence[int]
) -> Any:
    starts, stops = list(start_indices), list(limit_indices)
    if any(step != 1 for step in strides):
        return f.strided_slice(x, starts, stops, list(strides))
    return x if not any(starts) and stops == list(x.shape) else f.slice(x, starts, stops)


def _padded(
    x: Any,
    value: Any,
    edge_padding_low: Sequence[int],
    edge_padding_high: Sequence[int],
    interior_padding: Sequence[int],
) -> Any:
    if _is_tensor(value) or np.size(value) != 1:
        raise _refused("padding", "a tensor", "a number that is known")
    return _pad(x, edge_padding_low, edge_padding_high, interior_padding, np.asarray(value).item())


def _pad(
    x: Any, low: Sequence[int], high: Sequence[int], interior: Sequence[int], value: float
) -> Any:
    """x with elements between its own, before and behind them; less than 0 cuts off."""
    if x.dtype is DType.BOOL:
        return _pad(x.cast(DType.INT32), low, high, interior, int(value)).not_equal(0)
    for axis, between in enumerate(interior):
        extent = x.shape[axis]
        if between and extent > 1:
            apart = x.reshape([*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]])
            none = [0] * apart.ndim
            behind = list(none)
            behind[axis + 1] = between
            whole = f.pad(apart, none, behind, value)
            merged = whole.reshape([*x.shape[:axis], extent * (between + 1), *x.shape[axis + 1 :]])
            stops = list(merged.shape)
            stops[axis] -= between
            x = f.slice(merged, [0] * x.ndim, stops)
    if min((*low, *high), default=0) < 0:
        stops = [extent + min(0, more) for extent, more in zip(x.shape, high, strict=True)]
        x = f.slice(x, [max(0, -less) for less in low], stops)
    before, behind = [max(0, each) for each in low], [max(0, each) for each in high]
    return f.pad(x, before, behind, value) if any(before) or any(behind) else x


def _index_numbers(indices: Sequence[Any]) -> list[int] | None:
    """Indices that are known."""
    if any(_is_tensor(each) for each in indices):
        return None
    return [int(np.asarray(each).item()) for each in indices]


def _window_indices(start: Any, size: int, extent: int) -> Any:
    """The indices of a window of an axis that begins at `start`, or the nearest one that fits."""
    start = f.clip(start.cast(DType.INT64), 0, extent - size)
    if size == 1:
        return start.reshape([1])
    numbers = apply_source(start, "arange", start=0, step=1, count=size, dtype="int64")
    return f.add(numbers, start.reshape([1]))


def _dynamic_slice(x: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    """The window that begins at these indices, or the nearest one that fits."""
    x, starts = _beside(x, starts)
    for axis, (start, size) in enumerate(zip(starts, slice_sizes, strict=True)):
        extent = x.shape[axis]
        if size == extent:
            continue
        if _is_tensor(start):
            x = f.index_select(x, _window_indices(start, size, extent), axis)
        else:
            first = min(max(int(np.asarray(start).item()), 0), extent - size)
            low, high = [0] * x.ndim, list(x.shape)
            low[axis], high[axis] = first, first + size
            x = f.slice(x, low, high)
    return x


def _beside(x: Any, others: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """x as a tensor."""
    if _is_tensor(x):
        return x, others
    return _as_tensor(x, next(each for each in others if _is_tensor(each))), others


def _dynamic_update_slice(x: Any, update: Any, *starts: Any) -> Any:
    """x with a window replaced that begins at these indices, or the nearest one that fits."""
    beside = next(each for each in (x, update, *starts) if _is_tensor(each))
    x, update = _as_tensor(x, beside), _as_tensor(update, beside)
    inside: Any = None
    low, high = [0] * x.ndim, list(x.shape)
    for axis, (start, size) in enumerate(zip(starts, update.shape, strict=True)):
        extent = x.shape[axis]
        if size == extent:
            continue
        if not _is_tensor(start):
            first = min(max(int(np.asarray(start).item()), 0), extent - size)
            low[axis], high[axis] = first, first + size
            continue
        start = f.clip(start.cast(DType.INT64), 0, extent - size)
        numbers = apply_source(x, "arange", start=0, step=1, count=extent, dtype="int64")
        place = f.sub(numbers, start.reshape([1]))
        update = f.index_select(update, f.clip(place, 0, size - 1), axis)
        here = f.logical_and(f.greater_equal(place, 0), f.less(place, size))
        here = here.reshape([-1 if each == axis else 1 for each in range(x.ndim)])
        inside = here if inside is None else f.logical_and(inside, here)
    window = x if inside is None else f.slice(x, low, high)
    if inside is not None:
        update = f.where(f.expand(inside, window.shape), update, window)
    return _replaced(x, update, low, high)


def _replaced(x: Any, update: Any, low: Sequence[int], high: Sequence[int]) -> Any:
    """x with the box from `low` to `high` replaced."""
    for axis in reversed(range(x.ndim)):
        if (low[axis], high[axis]) == (0, x.shape[axis]):
            continue
        # The box is widened along this axis, with what x has in the outer ones.
        first, last = list(low), list(high)
        parts = []
        for begin, end in ((0, low[axis]), (high[axis], x.shape[axis])):
            first[axis], last[axis] = begin, end
            part = f.slice(
                x,
                [*first[: axis + 1], *([0] * (x.ndim - axis - 1))],
                [*last[: axis + 1], *x.shape[axis + 1 :]],
            )
            parts.append(part)
        update = f.concat([each for each in (parts[0], update, parts[1]) if each.shape[axis]], axis)
    return update


def _concatenate(*tensors: Any, dimension: int) -> Any:
    kept = [each for each in tensors if each.shape[dimension]]
    return kept[0] if len(kept) == 1 else f.concat(kept or list(tensors[:1]), dimension)


stablehlo_rule("stablehlo.reshape", typed=True)(lambda x, result: _reshaped(x, result.shape))
stablehlo_rule("stablehlo.broadcast_in_dim", typed=True)(_broadcast_in_dim)
stablehlo_rule("stablehlo.transpose")(_permuted)
stablehlo_rule("stablehlo.slice")(_sliced)
stablehlo_rule("stablehlo.pad", arrays=True)(_padded)
stablehlo_rule("stablehlo.reverse")(
    lambda x, dimensions: f.flip(x, list(dimensions)) if dimensions else x
)
stablehlo_rule("stablehlo.concatenate")(_concatenate)
stablehlo_rule("stablehlo.dynamic_slice", arrays=True)(_dynamic_slice)
stablehlo_rule("stablehlo.dynamic_update_slice", arrays=True)(_dynamic_update_slice)
stablehlo_rule("stablehlo.bitcast_convert", typed=True)(_bitcast)
stablehlo_rule("getitem")(operator.getitem)


# --- reductions -----------------------------------------------------------------------------------

_REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], float]] = {
    "add": (f.sum, f.add, 0),
    "multiply": (f.prod, f.mul, 1),
    "maximum": (f.max, f.maximum, -math.inf),
    "minimum": (f.min, f.minimum, math.inf),
}
"""The reduction, the function of two that it repeats, and the number that changes nothing."""


def _neutral(region: str, dtype: DType) -> Any:
    """The number with which a reduction begins."""
    number = _REDUCTIONS[region][2]
    if math.isinf(number) and not dtype.is_floating:
        limits: Any = np.iinfo(str(dtype))
        return limits.min if number < 0 else limits.max
    return number


def _reduce(*operands: Any, region: str, dimensions: Sequence[int], result: TensorType) -> Any:
    axes = list(dimensions)
    if len(operands) == 4:
        return _extreme_with_index(*operands, region=region, axes=axes)
    x, initial = operands
    if not axes:
        return x
    if x.dtype is DType.BOOL:
        words = {"or": f.any, "maximum": f.any, "add": f.any, "and": f.all, "minimum": f.all}
        if region not in words:
            raise _refused("reduction of truth values", region, "and, or")
        reduced = words[region](x, axes)
        neutral: Any = words[region] is f.all
        combine: Callable[..., Any] = f.logical_and if neutral else f.logical_or
    elif region in _REDUCTIONS:
        function, combine, _ = _REDUCTIONS[region]
        reduced, neutral = function(x, axes), _neutral(region, x.dtype)
        if reduced.dtype is not x.dtype:
            reduced = reduced.cast(x.dtype)
    else:
        raise _refused("reduction of whole numbers", region, "add, multiply, maximum, minimum")
    if not _is_tensor(initial) and np.asarray(initial).item() == neutral:
        return reduced
    initial = _as_tensor(initial, x)
    return combine(reduced, f.expand(initial, reduced.shape))


def _extreme_with_index(
    x: Any, numbers: Any, worst: Any, first: Any, region: str, axes: Sequence[int]
) -> Any:
    """The extreme along an axis and its index."""
    counted = np.arange(x.shape[axes[0]]) if len(axes) == 1 else None
    wanted = [1] * x.ndim
    wanted[axes[0]] = -1
    if (
        _is_tensor(numbers)
        or counted is None
        or not np.array_equal(numbers, np.broadcast_to(counted.reshape(wanted), x.shape))
    ):
        raise _refused(
            "reduction of two tensors", region, "a tensor and the numbers of its elements"
        )
    dtype = DType.parse(numbers.dtype)
    if x.dtype is DType.BOOL:
        whole = x.cast(DType.INT32)
        extreme = f.any(x, axes) if region == "maximum" else f.all(x, axes)
        place = (f.argmax if region == "maximum" else f.argmin)(whole, axes[0])
        return extreme, place.cast(dtype)
    with_index = f.max_with_index if region == "maximum" else f.min_with_index
    extreme, place = with_index(x, axes[0])
    return extreme, place.cast(dtype)


stablehlo_rule("stablehlo.reduce", arrays=True, typed=True)(_reduce)


def _sort(*operands: Any, region: str, dimension: int, is_stable: bool = False) -> Any:
    word, key, *more = region.split()
    if more:
        # A stable sort by the last key, then by those before it.
        region = f"{word} {' '.join((key, *more[:-1]))}"
        operands = _sort(*operands, region=f"{word} {more[-1]}", dimension=dimension)
    by = operands[int(key)]
    if word == "descending" and by.dtype.is_floating:
        raise _refused("sort", "floating numbers that descend", "ascending ones")
    truth = by.dtype is DType.BOOL
    values, order = f.sort(by.cast(DType.INT32) if truth else by, dimension, word == "descending")
    values = values.not_equal(0) if truth else values
    made = []
    for at, each in enumerate(operands):
        if at == int(key):
            made.append(values)
        elif not _is_tensor(each) and np.array_equal(
            each, np.broadcast_to(_counted(each.shape, dimension), each.shape)
        ):
            made.append(order.cast(DType.parse(each.dtype)))
        else:
            made.append(f.take_along_axis(_as_tensor(each, by), order, dimension))
    return made[0] if len(made) == 1 else tuple(made)


def _counted(shape: tuple[int, ...], axis: int) -> Any:
    return np.arange(shape[axis]).reshape([-1 if each == axis else 1 for each in range(len(shape))])


def _sort_of_any(*operands: Any, **attrs: Any) -> Any:
    beside = next(each for each in operands if _is_tensor(each))
    keys = set(map(int, attrs["region"].split()[1:]))
    return _sort(
        *(_as_tensor(each, beside) if at in keys else each for at, each in enumerate(operands)),
        **attrs,
    )


stablehlo_rule("stablehlo.sort", arrays=True)(_sort_of_any)


def _top_k(x: Any, k: int) -> Any:
    if x.dtype is DType.BOOL:
        values, places = _top_k(x.cast(DType.INT32), k)
        return values.not_equal(0), places
    values, places = f.topk(x, k, -1)
    return values, places.cast(DType.INT32)


stablehlo_rule("chlo.top_k")(_top_k)
stablehlo_rule("imported.softmax")(f.softmax)
stablehlo_rule("imported.attention")(attention)
stablehlo_rule("imported.log_softmax")(f.log_softmax)
stablehlo_rule("imported.rms_norm")(f.rms_norm)


@stablehlo_rule("imported.layer_norm")
def _layer_norm(x: Any, scale: Any, bias: Any, eps: float) -> Any:
    if bias is None:
        bias = apply_source(x, "fill", shape=scale.shape, dtype=str(x.dtype), value=0.0)
    return f.layer_norm(x, scale, bias, eps)


# --- products -------------------------------------------------------------------------------------

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _dot_general(
    x: Any, y: Any, dot_dimension_numbers: Any, result: TensorType, **precision: Any
) -> Any:
    numbers = dot_dimension_numbers
    batch = numbers.get("lhs_batching_dimensions", []), numbers.get("rhs_batching_dimensions", [])
    summed = (
        numbers.get("lhs_contracting_dimensions", []),
        numbers.get("rhs_contracting_dimensions", []),
    )
    if (not x.dtype.is_floating and x.dtype is not result.dtype) or x.dtype is not y.dtype:
        x, y = x.cast(result.dtype), y.cast(result.dtype)
    wide = result.dtype
    if x.dtype.is_half and wide is DType.FLOAT32:
        x, y = x.cast(wide), y.cast(wide)
    product = _product(x, y, batch, summed)
    return product if product.dtype is result.dtype else product.cast(result.dtype)


def _product(x: Any, y: Any, batch: Any, summed: Any) -> Any:
    if batch == ([], []) and len(summed[0]) == 1 and x.ndim > 1 and y.ndim == 2:
        if summed[0] == [x.ndim - 1]:
            return f.matmul(x, y, transpose_b=summed[1] == [1])
        if x.ndim == 2:
            return f.matmul(x, y, transpose_a=True, transpose_b=summed[1] == [1])
    many = len(batch[0])
    leading = list(range(many))
    if (
        batch == (leading, leading)
        and x.ndim == y.ndim == many + 2
        and len(summed[0]) == 1
        and many
    ):
        return f.matmul(x, y, transpose_a=summed[0] == [many], transpose_b=summed[1] == [many + 1])
    letters = iter(_LETTERS)
    left = [next(letters) for _ in range(x.ndim)]
    right = [""] * y.ndim
    for pairs in (batch, summed):
        for a, b in zip(*pairs, strict=True):
            right[b] = left[a]
    right = [each or next(letters) for each in right]
    kept = [left[a] for a in batch[0]]
    kept += [each for a, each in enumerate(left) if a not in (*batch[0], *summed[0])]
    kept += [each for b, each in enumerate(right) if b not in (*batch[1], *summed[1])]
    return f.einsum(f"{''.join(left)},{''.join(right)}->{''.join(kept)}", x, y)


stablehlo_rule("stablehlo.dot_general", typed=True)(_dot_general)


# --- convolutions ---------------------------------------------------------------------------------


def _convolution(
    x: Any,
    kernel: Any,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    window_strides: Sequence[int] | None = None,
    padding: Any = None,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    window_reversal: Sequence[bool] | None = None,
    **precision: Any,
) -> Any:
    left, right, out = dimension_numbers
    axes = len(left) - 2
    if not 1 <= axes <= 3:
        raise _refused("convolution", f"{axes} spatial axes", "1, 2 or 3")
    spatial = [str(each) for each in range(axes)]
    x = _permuted(x, [left.index(each) for each in ("b", "f", *spatial)])
    kernel = _permuted(kernel, [right.index(each) for each in ("o", "i", *spatial)])
    turned = [2 + axis for axis, each in enumerate(window_reversal or ()) if each]
    if turned:
        kernel = f.flip(kernel, turned)
    between = [0, 0, *(each - 1 for each in lhs_dilation or [1] * axes)]
    pads = np.zeros((axes, 2), int) if padding is None else np.asarray(padding)
    low, high = ([0, 0, *map(int, pads[:, side])] for side in (0, 1))
    x = _pad(x, low, high, between, 0)
    groups = feature_group_count
    if batch_group_count > 1:
        # Each group of the batch has kernels of its own: the groups become those of features.
        batch = x.shape[0] // batch_group_count
        x = x.reshape([batch_group_count, batch, *x.shape[1:]])
        x = x.transpose([1, 0, *range(2, x.ndim)])
        x = x.reshape([batch, -1, *x.shape[3:]])
        groups = batch_group_count
    function = (f.conv1d, f.conv2d, f.conv3d)[axes - 1]
    made = function(
        x,
        kernel,
        None,
        list(window_strides or [1] * axes),
        0,
        list(rhs_dilation or [1] * axes),
        groups,
    )
    order = ("b", "f", *spatial)
    return _permuted(made, [order.index(each) for each in out])


stablehlo_rule("stablehlo.convolution")(_convolution)


# --- windows --------------------------------------------------------------------------------------


def _reduce_window(
    x: Any,
    initial: Any,
    region: str,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    base_dilations: Sequence[int] | None = None,
    window_dilations: Sequence[int] | None = None,
    padding: Any = None,
) -> Any:
    ones = [1] * x.ndim
    size, steps = list(window_dimensions), list(window_strides or ones)
    spread, apart = list(window_dilations or ones), list(base_dilations or ones)
    pads = np.zeros((x.ndim, 2), int) if padding is None else np.asarray(padding)
    if region not in _REDUCTIONS:
        raise _refused("window", region, "add, multiply, maximum, minimum")
    neutral = _neutral(region, x.dtype)
    if _is_tensor(initial) or np.asarray(initial).item() != neutral:
        raise _refused("window", "another beginning", f"{neutral}")
    used = [axis for axis in range(x.ndim) if size[axis] > 1 or steps[axis] > 1 or pads[axis].any()]
    if len(used) == 1 and steps == ones == spread == apart:
        (axis,) = used
        extent = x.shape[axis]
        if size[axis] == extent and sorted(pads[axis].tolist()) == [0, extent - 1]:
            return _running(x, region, axis, bool(pads[axis][1]))
    if not used:
        return x
    low, high = (pads[:, side].tolist() for side in (0, 1))
    x = _pad(x, low, high, [each - 1 for each in apart], neutral)
    if len(used) > 3:
        raise _refused("window", f"{len(used)} axes", "at most 3")
    others = [axis for axis in range(x.ndim) if axis not in used]
    order = [*others, *used]
    shape = [x.shape[axis] for axis in others]
    turned = _permuted(x, order)
    flat = turned.reshape([math.prod(shape), 1, *turned.shape[len(others) :]])
    kernel, stride = [size[axis] for axis in used], [steps[axis] for axis in used]
    dilation = [spread[axis] for axis in used]
    made = _pooled(flat, region, kernel, stride, dilation)
    made = made.reshape([*shape, *made.shape[2:]])
    return _permuted(made, [order.index(axis) for axis in range(x.ndim)])


def _pooled(x: Any, region: str, kernel: list[int], stride: list[int], dilation: list[int]) -> Any:
    at = len(kernel) - 1
    if region in ("maximum", "minimum") and x.dtype.is_floating:
        function = (f.max_pool1d, f.max_pool2d, f.max_pool3d)[at]
        if region == "maximum":
            return function(x, kernel, stride, 0, dilation)
        return -function(-x, kernel, stride, 0, dilation)
    if region == "add" and set(dilation) == {1} and x.dtype.is_floating:
        pool = (f.avg_pool1d, f.avg_pool2d, f.avg_pool3d)[at]
        return pool(x, kernel, stride, 0) * float(math.prod(kernel))
    # One slice for each place in the window.
    total = None
    combine = _REDUCTIONS[region][1]
    for place in np.ndindex(*kernel):
        starts = [0, 0, *(i * d for i, d in zip(place, dilation, strict=True))]
        counts = [
            (extent - (k - 1) * d - 1) // s + 1
            for extent, k, d, s in zip(x.shape[2:], kernel, dilation, stride, strict=True)
        ]
        stops = [
            *x.shape[:2],
            *(
                first + (count - 1) * step + 1
                for first, count, step in zip(starts[2:], counts, stride, strict=True)
            ),
        ]
        part = _sliced(x, starts, stops, [1, 1, *stride])
        total = part if total is None else combine(total, part)
    return total


def _running(x: Any, region: str, axis: int, reverse: bool) -> Any:
    if region == "add":
        dtype = x.dtype
        made = f.cumsum(x, axis, reverse)
        return made if made.dtype is dtype else made.cast(dtype)
    if reverse:
        return f.flip(_running(f.flip(x, [axis]), region, axis, False), [axis])
    if region == "multiply":
        made = f.cumprod(x, axis)
        return made if made.dtype is x.dtype else made.cast(x.dtype)
    return (f.cummax if region == "maximum" else f.cummin)(x, axis)[0]


stablehlo_rule("stablehlo.reduce_window", arrays=True)(_reduce_window)


def _select_and_scatter(
    x: Any,
    source: Any,
    initial: Any,
    region: str,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Any = None,
) -> Any:
    """The gradient of a pooling: each element of `source` goes where its window's extreme was
    first.
    """
    steps = list(window_strides or [1] * x.ndim)
    pads = np.zeros((x.ndim, 2), int) if padding is None else np.asarray(padding)
    if _is_tensor(initial) or np.asarray(initial).item() != 0:
        raise _refused("gradient of a pooling", "another beginning", "0")
    if region == "minimum":
        x = -x
    low, high = (pads[:, side].tolist() for side in (0, 1))
    padded = _pad(x, low, high, [0] * x.ndim, -math.inf)
    parts, boxes = [], []
    for place in np.ndindex(*window_dimensions):
        stops = [
            first + (count - 1) * step + 1
            for first, count, step in zip(place, source.shape, steps, strict=True)
        ]
        boxes.append((list(place), stops))
        parts.append(_sliced(padded, place, stops, steps))
    best = parts[0]
    for part in parts[1:]:
        best = f.maximum(best, part)
    total = taken = None
    for part, (starts, stops) in zip(parts, boxes, strict=True):
        here = f.equal(part, best)
        mine = here if taken is None else f.logical_and(here, f.logical_not(taken))
        taken = here if taken is None else f.logical_or(taken, here)
        given = f.where(mine, source, 0.0)
        behind = [extent - stop for extent, stop in zip(padded.shape, stops, strict=True)]
        spread = _pad(given, starts, behind, [step - 1 for step in steps], 0.0)
        total = spread if total is None else total + spread
    return _pad(total, [-each for each in low], [-each for each in high], [0] * x.ndim, 0.0)


stablehlo_rule("stablehlo.select_and_scatter", arrays=True)(_select_and_scatter)


# --- indices --------------------------------------------------------------------------------------


def _indexed(indices: Any, at: int, vector: int, beside: Any) -> Any:
    """The index along one axis, out of vectors of indices along `vector`."""
    if vector == indices.ndim:
        return indices
    if _is_tensor(indices):
        return f.squeeze(
            f.slice(
                indices,
                [at if axis == vector else 0 for axis in range(indices.ndim)],
                [at + 1 if axis == vector else n for axis, n in enumerate(indices.shape)],
            ),
            vector,
        )
    return indices.take(at, vector)


def _gather(
    x: Any,
    indices: Any,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    result: TensorType,
    indices_are_sorted: bool = False,
) -> Any:
    """Windows of x that begin at the given indices, or at the nearest ones where they fit."""
    numbers = dimension_numbers
    offset = numbers.get("offset_dims", [])
    batched = numbers.get("operand_batching_dims", [])
    batches = numbers.get("start_indices_batching_dims", [])
    collapsed = [*numbers.get("collapsed_slice_dims", []), *batched]
    axes, vector = numbers.get("start_index_map", []), numbers.get("index_vector_dim", 0)
    beside = x if _is_tensor(x) else indices
    x = _as_tensor(x, beside)
    positions = {
        axis: _starts(_indexed(indices, at, vector, x), x.shape[axis] - slice_sizes[axis])
        for at, axis in enumerate(axes)
    }
    shape = tuple(n for axis, n in enumerate(indices.shape) if axis != vector)
    batch_at = {axis: at - (at > vector) for axis, at in zip(batched, batches, strict=True)}
    along = _along_one_axis(x, positions, batch_at, collapsed, slice_sizes, shape)
    if along is not None:
        return _reshaped(along, result.shape)
    # What no index chooses is cut to size; the rest is chosen by one number.
    chosen = sorted({*axes, *batched})
    low, high = [0] * x.ndim, list(x.shape)
    for axis in range(x.ndim):
        if axis not in chosen:
            high[axis] = slice_sizes[axis]
    x = _sliced(x, low, high, [1] * x.ndim)
    rest = [axis for axis in range(x.ndim) if axis not in chosen]
    windows = [axis for axis in chosen if axis not in collapsed]
    flat: Any = 0
    for axis in chosen:
        if axis in batch_at:
            numbered = [1] * len(shape)
            numbered[batch_at[axis]] = -1
            place: Any = np.arange(x.shape[axis]).reshape(numbered)
        else:
            place = positions[axis]
        place = _with_axes(place, len(windows))
        if axis in windows:
            inner = [1] * len(windows)
            inner[windows.index(axis)] = -1
            steps = np.arange(slice_sizes[axis]).reshape(inner)
            place = _sum(place, steps, x)
        stride = math.prod(x.shape[other] for other in chosen if other > axis)
        flat = _sum(flat, _times(place, stride), x)
    turned = _permuted(x, [*chosen, *rest])
    source = turned.reshape(
        [math.prod(x.shape[axis] for axis in chosen), *(x.shape[axis] for axis in rest)]
    )
    full = (*shape, *(slice_sizes[axis] for axis in windows))
    flat = _broadcast(flat, full, x)
    if source.ndim == 2 and source.dtype.is_floating:
        taken = f.embedding(source, flat)
    else:
        taken = f.index_select(source, flat.reshape([math.prod(full)]), 0)
        taken = taken.reshape([*full, *source.shape[1:]])
    # Now the batch, the windows that indices choose, the other axes: in the order of the result.
    kept = sorted([*windows, *rest])
    made = [*range(len(shape)), *(len(shape) + [*windows, *rest].index(axis) for axis in kept)]
    batch_axes, window_axes = iter(made[: len(shape)]), iter(made[len(shape) :])
    order = [
        next(window_axes if axis in offset else batch_axes) for axis in range(len(result.shape))
    ]
    return _permuted(taken, order)


def _starts(place: Any, last: int) -> Any:
    """Indices within 0 ... last."""
    if _is_tensor(place):
        return f.clip(place.cast(DType.INT64), 0, last)
    return np.clip(place.astype(np.int64), 0, last)


def _along_one_axis(
    x: Any,
    positions: dict[int, Any],
    batch_at: dict[int, int],
    collapsed: Sequence[int],
    sizes: Sequence[int],
    shape: tuple[int, ...],
) -> Any:
    """A look-up along one axis whose other axes are batches, in the same order: it can be split
    along these. None for any other one.
    """
    if len(positions) != 1 or len(batch_at) != x.ndim - 1 or set(collapsed) != set(range(x.ndim)):
        return None
    ((axis, place),) = positions.items()
    if sizes[axis] != 1:
        return None
    order = [batch_at[other] for other in range(x.ndim) if other != axis]
    if order != sorted(order):
        return None
    free = [at for at in range(len(shape)) if at not in order]
    if len(free) > 1:
        return None
    place = _as_tensor(place, x)
    # The axis of the look-up stands where x has it.
    if free:
        wanted = list(order)
        wanted.insert(axis, free[0])
        place = _permuted(place, wanted)
    else:
        place = f.unsqueeze(place, axis)
    taken = f.take_along_axis(x, place, axis)
    if free:
        wanted = list(order)
        wanted.insert(axis, free[0])
        taken = _permuted(taken, [wanted.index(at) for at in range(len(shape))])
    return taken


def _with_axes(place: Any, count: int) -> Any:
    return place.reshape([*place.shape, *([1] * count)]) if count else place


def _times(place: Any, stride: int) -> Any:
    return place if stride == 1 else place * stride


def _sum(x: Any, y: Any, beside: Any) -> Any:
    if isinstance(x, int):
        return y if x == 0 else y + x
    if not _is_tensor(x) and not _is_tensor(y):
        return x + y
    return f.add(*(each if _is_tensor(each) else _as_tensor(each, beside) for each in (x, y)))


def _broadcast(place: Any, shape: tuple[int, ...], beside: Any) -> Any:
    if _is_tensor(place):
        return place if place.shape == shape else f.expand(place, shape)
    return _as_tensor(np.broadcast_to(np.asarray(place, np.int64), shape), beside)


stablehlo_rule("stablehlo.gather", arrays=True, typed=True)(_gather)


def _scatter(
    x: Any,
    indices: Any,
    updates: Any,
    scatter_dimension_numbers: Any,
    region: str,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
) -> Any:
    """x with windows changed that begin at the given indices; updates outside of x do not count."""
    numbers = scatter_dimension_numbers
    window_axes = numbers.get("update_window_dims", [])
    batched = numbers.get("input_batching_dims", [])
    batches = numbers.get("scatter_indices_batching_dims", [])
    inserted = [*numbers.get("inserted_window_dims", []), *batched]
    axes = numbers.get("scatter_dims_to_operand_dims", [])
    vector = numbers.get("index_vector_dim", 0)
    beside = next(each for each in (x, updates, indices) if _is_tensor(each))
    x, updates = _as_tensor(x, beside), _as_tensor(updates, beside)
    shape = tuple(n for axis, n in enumerate(indices.shape) if axis != vector)
    batch_at = {axis: at - (at > vector) for axis, at in zip(batched, batches, strict=True)}
    kept = [axis for axis in range(x.ndim) if axis not in inserted]
    sizes = dict(zip(kept, (updates.shape[axis] for axis in window_axes), strict=True))
    chosen = sorted({*axes, *batched, *(a for a in kept if sizes[a] != x.shape[a])})
    rest = [axis for axis in kept if axis not in chosen]
    windows = [axis for axis in kept if axis in chosen]
    full = (*shape, *(sizes[axis] for axis in windows))
    flat: Any = 0
    valid: Any = None
    for axis in chosen:
        if axis in batch_at:
            numbered = [1] * len(shape)
            numbered[batch_at[axis]] = -1
            place: Any = np.arange(x.shape[axis]).reshape(numbered)
        elif axis in axes:
            place = _indexed(indices, axes.index(axis), vector, x)
            place = place.cast(DType.INT64) if _is_tensor(place) else place.astype(np.int64)
            fits = _both(place, x.shape[axis] - sizes.get(axis, 1))
            fits = _with_axes(fits, len(windows))
            valid = fits if valid is None else _all_of(valid, fits, x)
        else:
            place = np.zeros((1,) * len(shape), np.int64)
        place = _with_axes(place, len(windows))
        if axis in windows:
            inner = [1] * len(windows)
            inner[windows.index(axis)] = -1
            place = _sum(place, np.arange(sizes[axis]).reshape(inner), x)
        stride = math.prod(x.shape[other] for other in chosen if other > axis)
        flat = _sum(flat, _times(place, stride), x)
    count = math.prod(x.shape[axis] for axis in chosen)
    others = [x.shape[axis] for axis in rest]
    order = [*chosen, *rest]
    source = _permuted(x, order).reshape([count, *others])
    flat = _broadcast(flat, full, x).reshape([math.prod(full)])
    placed = [axis for axis in range(updates.ndim) if axis not in window_axes]
    by_axis = dict(zip(kept, window_axes, strict=True))
    turned = [*placed, *(by_axis[axis] for axis in windows), *(by_axis[axis] for axis in rest)]
    rows = _permuted(updates, turned).reshape([math.prod(full), *others])
    known = valid is None or (not _is_tensor(valid) and bool(np.all(valid)))
    if not known:
        # Rows outside go to one more row, which is dropped.
        fit = _as_tensor(valid, x)
        fit = (fit if fit.shape == full else f.expand(fit, full)).reshape([math.prod(full)])
        flat = f.where(fit, flat, count)
        source = (
            f.pad(source, [0] * source.ndim, [1, *([0] * len(others))], 0)
            if (x.dtype is not DType.BOOL)
            else f.concat([source, f.slice(source, [0] * source.ndim, [1, *others])], 0)
        )
    made = _scattered(source, flat, rows, region)
    if not known:
        made = f.slice(made, [0] * made.ndim, [count, *others])
    made = made.reshape([*(x.shape[axis] for axis in chosen), *others])
    return _permuted(made, [order.index(axis) for axis in range(x.ndim)])


def _both(place: Any, last: int) -> Any:
    """Whether indices are within 0 ... last."""
    if _is_tensor(place):
        return f.logical_and(f.greater_equal(place, 0), f.less_equal(place, last))
    return (place >= 0) & (place <= last)


def _all_of(x: Any, y: Any, beside: Any) -> Any:
    if not _is_tensor(x) and not _is_tensor(y):
        return x & y
    return f.logical_and(_as_tensor(x, beside), _as_tensor(y, beside))


def _scattered(source: Any, places: Any, rows: Any, region: str) -> Any:
    """Rows put or added at places along the first axis."""
    if region == "add" and source.dtype is not DType.BOOL:
        return f.index_add(source, places, rows, 0)
    along = places.reshape([-1, *([1] * (source.ndim - 1))])
    along = along if along.shape == rows.shape else f.expand(along, rows.shape)
    if region == "set":
        return f.put_along_axis(source, along, rows, 0, "set")
    raise _refused("scatter", region, "set or add")


stablehlo_rule("stablehlo.scatter", arrays=True)(_scatter)


# --- layouts --------------------------------------------------------------------------------------


def _sharding_constraint(x: Any, axes: Sequence[Sequence[str]], open: bool = False) -> Any:  # noqa: A002  # the attribute's name
    """x split along the mesh axes of these names; axes that its mesh does not have do not count."""
    named = x.placement.axes
    if open or not named:
        return x
    return x.redistribute(sbp=Sharding(tuple(map(tuple, axes))).on(named))


stablehlo_rule("sdy.sharding_constraint")(_sharding_constraint)
stablehlo_rule("custom_call.plancompiler.split")(
    lambda x, backend_config: _sharding_constraint(x, [[name] for name in backend_config.split()])
)


@stablehlo_rule("custom_call.plancompiler.moving_zero")
def _moving_zero(x: Any, **attrs: Any) -> Any:
    """Zeros with the gradient of x."""
    finite = f.where(f.isfinite(x), x, 0.0)
    return finite - f.stop_gradient(finite)


stablehlo_rule("custom_call.plancompiler.stop_gradient")(lambda x, **attrs: f.stop_gradient(x))
stablehlo_rule("custom_call.Sharding", "custom_call.annotate_device_placement")(
    lambda x, **attrs: x
)
