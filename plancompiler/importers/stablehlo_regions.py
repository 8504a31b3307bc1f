"""What the function inside a reduction, a sort or a scatter computes, as one word.

A body of a single operation is named by it. A body that only compares its arguments is named by
what it decides for every order that they can be in: it is run on arguments in all these orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.importers.graph import Array
from plancompiler.importers.stablehlo import HloBlock, HloOp
from plancompiler.ir import TensorType

_REDUCERS = {
    "stablehlo.add": "add",
    "stablehlo.multiply": "multiply",
    "stablehlo.maximum": "maximum",
    "stablehlo.minimum": "minimum",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
    "stablehlo.xor": "xor",
}


def described_region(op: HloOp) -> str | None:
    """The word for the functions inside an operation; None where there is none."""
    if op.name == "stablehlo.select_and_scatter":
        select, scatter = op.regions
        order = _of_one_op(select, "stablehlo.compare")
        added = _reducer(scatter)
        if order is None or added != "add":
            return None
        direction = order.attrs["comparison_direction"]
        return {"GE": "maximum", "LE": "minimum"}.get(direction)
    (body,) = op.regions
    if op.name == "stablehlo.sort":
        return _order(body, op.types)
    if op.name in ("stablehlo.reduce", "stablehlo.reduce_window") and len(op.operands) == 4:
        return _extreme_with_index(body)
    if op.name == "stablehlo.scatter" and len(body.ops) == 1:
        (last,) = body.ops
        return "set" if last.operands == body.arguments[1:] and len(body.arguments) == 2 else None
    return _reducer(body)


def _of_one_op(body: HloBlock, name: str | None = None) -> HloOp | None:
    """The only operation of a body on its two arguments, which it returns."""
    if len(body.ops) != 2 or len(body.arguments) != 2:
        return None
    op, last = body.ops
    if last.operands != op.results or (name is not None and op.name != name):
        return None
    if op.operands == body.arguments:
        return op
    return op if set(op.operands) == set(body.arguments) and name is None else None


def _reducer(body: HloBlock) -> str | None:
    op = _of_one_op(body)
    return None if op is None else _REDUCERS.get(op.name)


# --- comparisons ----------------------------------------------------------------------------------


def _total_order(array: Array) -> Array:
    """Whole numbers in the order of IEEE 754's totalOrder: -nan, -inf, …, -0, 0, …, inf, nan."""
    bits = array.astype(np.float64).view(np.int64)
    return np.where(bits < 0, np.int64(-(2**63)) - bits - 1, bits)


_COMPARISONS: Mapping[str, Callable[[Array, Array], Array]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_LOGICAL: Mapping[str, Callable[..., Array]] = {
    "stablehlo.and": np.logical_and,
    "stablehlo.or": np.logical_or,
    "stablehlo.xor": np.logical_xor,
    "stablehlo.not": np.logical_not,
    "stablehlo.select": np.where,
}


def _decided(body: HloBlock, arguments: list[Array]) -> list[Array] | None:
    """What a body that only compares returns; None for any other body."""
    values: dict[int, Array] = dict(zip(body.arguments, arguments, strict=True))
    *ops, last = body.ops
    for op in ops:
        operands = [values[each] for each in op.operands if each in values]
        if len(operands) != len(op.operands):
            return None
        result: Any
        if op.name == "stablehlo.constant":
            if not np.all((op.attrs["value"] == 0) | np.isnan(op.attrs["value"])):
                return None
            result = np.asarray(op.attrs["value"])
        elif op.name == "stablehlo.compare":
            if op.attrs.get("compare_type") == "TOTALORDER":
                operands = [_total_order(each) for each in operands]
            result = _COMPARISONS[op.attrs["comparison_direction"]](*operands)
        elif op.name in _LOGICAL and (op.name == "stablehlo.select" or operands[0].dtype == bool):
            result = _LOGICAL[op.name](*operands)
        else:
            return None
        values[op.results[0]] = result
    return [values[each] for each in last.operands]


def _orders(floating: bool) -> tuple[Array, Array]:
    """Two arguments in every order that they can be in, and beside zero."""
    each = np.array([-np.inf, -2, -1, -0.0, 0.0, 1, 2, np.inf, np.nan])
    if not floating:
        each = np.array([-2, -1, 0, 1, 2])
    x, y = np.meshgrid(each, each, indexing="ij")
    return x.ravel(), y.ravel()


def _order(body: HloBlock, types: Sequence[TensorType | str]) -> str | None:
    """`ascending` or `descending` and the numbers of the operands by which a sort compares, first
    those that count most. Of floating numbers, what is not a number comes behind all others where
    they ascend, and before them where they descend.
    """
    for keys in [(at,) for at in range(len(types))] + [(0, 1)] * (len(types) > 1):
        x, y = _orders(_is_floating(types[keys[0]]))
        if len(keys) == 2:
            inner = _orders(_is_floating(types[keys[1]]))
            v, w = (np.tile(each, len(x)) for each in inner)
            x, y = np.repeat(x, len(inner[0])), np.repeat(y, len(inner[0]))
            less, more = _less(x, y), _less(y, x)
            equal = ~less & ~more
            words = {
                "ascending": less | equal & _less(v, w),
                "descending": more | equal & _less(w, v),
            }
            known = {keys[0]: (x, y), keys[1]: (v, w)}
        else:
            words = {"ascending": _less(x, y), "descending": _less(y, x)}
            known = {keys[0]: (x, y)}
        # All other operands are in orders of their own, which must not matter.
        for other in (x, y):
            arguments: list[Array] = []
            for at in range(len(types)):
                arguments += known.get(at, (other, other[::-1]))
            result = _decided(body, arguments)
            if result is None:
                return None
            words = {
                word: comes for word, comes in words.items() if np.array_equal(result[0], comes)
            }
        for word in words:
            return f"{word} {' '.join(map(str, keys))}"
    return None


def _is_floating(kind: TensorType | str) -> bool:
    return isinstance(kind, TensorType) and kind.dtype.is_floating


def _less(x: Array, y: Array) -> Array:
    """Whether x comes before y, with what is not a number behind all others."""
    return (x < y) | (np.isnan(y) & ~np.isnan(x))


def _extreme_with_index(body: HloBlock) -> str | None:
    """`maximum` or `minimum` for the extreme of the first operand and where it is first; what is
    not a number counts as more extreme than all others.
    """
    x, y = _orders(True)
    first, second = (np.repeat(each, 2) for each in (x, y))
    numbers = np.tile([0, 1], len(x))
    i, j = numbers, 1 - numbers
    result = _decided(body, [first, i, second, j])
    if result is None:
        return None
    value, index = result
    for word, compare in (("maximum", np.greater), ("minimum", np.less)):
        wins = compare(first, second) | np.isnan(first)
        equal = (first == second) & (i < j)
        if np.array_equal(value, np.where(wins, first, second), equal_nan=True) and np.array_equal(
            index, np.where(wins | equal, i, j)
        ):
            return word
    return None
