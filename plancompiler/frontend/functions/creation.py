"""Tensors made of nothing: sequences, the identity, random numbers.

`placement` is where they are made; `sbp` demands their layout, without it the compiler chooses.
Random values depend on the job's seed, the step, `key` and the element's global index, so they are
the same on every layout; by default each call of a job has its own key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.out import takes_out
from plancompiler.frontend.trace import current_recorder, demanded_sbp
from plancompiler.ir import AttrValue, DType, Placement, Value
from plancompiler.ir.operators import SbpLike, Scalar, whole_numbers

__all__ = [
    "arange",
    "bernoulli",
    "eye",
    "linspace",
    "normal",
    "permutation",
    "randint",
    "uniform",
]


def _made(
    kind: str, attrs: Mapping[str, AttrValue], placement: Placement, sbp: SbpLike | None
) -> Value:
    demanded = None if sbp is None else demanded_sbp(placement, sbp)
    tensor: Value = current_recorder().add(kind, (), attrs, placement, demanded)[0]
    return tensor


# --- sequences and the identity -------------------------------------------------------------------


@takes_out
def arange(
    start: Scalar,
    stop: Scalar,
    step: Scalar = 1,
    *,
    dtype: DType | str = "int64",
    placement: Placement,
    sbp: SbpLike | None = None,
    out: Any = None,
) -> Value:
    """Numbers from `start` on, `step` apart, below `stop` (above it where `step` is negative)."""
    if step == 0:
        raise AttributeValueError("arange needs a step other than 0", got=step)
    if all(isinstance(each, int) for each in (start, stop, step)):
        count = len(range(int(start), int(stop), int(step)))
    else:
        count = max(0, math.ceil((stop - start) / step))
    attrs: dict[str, AttrValue] = {
        "start": start,
        "step": step,
        "count": count,
        "dtype": str(DType.parse(dtype)),
    }
    return _made("arange", attrs, placement, sbp)


@takes_out
def linspace(
    start: float,
    stop: float,
    count: int,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    out: Any = None,
) -> Value:
    """`count` numbers at equal distances from `start` to `stop`, both included."""
    attrs: dict[str, AttrValue] = {
        "start": float(start),
        "stop": float(stop),
        "count": count,
        "dtype": str(DType.parse(dtype)),
    }
    return _made("linspace", attrs, placement, sbp)


@takes_out
def eye(
    rows: int,
    columns: int | None = None,
    offset: int = 0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    out: Any = None,
) -> Value:
    """A matrix of zeros with ones on a diagonal; square by default."""
    attrs: dict[str, AttrValue] = {
        "rows": rows,
        "columns": rows if columns is None else columns,
        "offset": offset,
        "dtype": str(DType.parse(dtype)),
    }
    return _made("eye", attrs, placement, sbp)


# --- random tensors -------------------------------------------------------------------------------


def _drawn(
    kind: str,
    shape: int | Sequence[int],
    dtype: DType | str,
    placement: Placement,
    sbp: SbpLike | None,
    key: int | None,
    **attrs: AttrValue,
) -> Value:
    if key is None:
        # One count for all random ops: equal keys would give related numbers.
        key = current_recorder().next_number("dropout key")
    extents = whole_numbers("extents", shape)
    return _made(
        kind,
        {"shape": extents, "dtype": str(DType.parse(dtype)), "key": key, **attrs},
        placement,
        sbp,
    )


@takes_out
def uniform(
    shape: int | Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    out: Any = None,
) -> Value:
    """Numbers from `low` to `high`, all equally likely, new ones in each step."""
    return _drawn("uniform", shape, dtype, placement, sbp, key, low=float(low), high=float(high))


@takes_out
def normal(
    shape: int | Sequence[int],
    mean: float = 0.0,
    std: float = 1.0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    out: Any = None,
) -> Value:
    """Normally distributed numbers, new ones in each step."""
    return _drawn("normal", shape, dtype, placement, sbp, key, mean=float(mean), std=float(std))


@takes_out
def bernoulli(
    shape: int | Sequence[int],
    p: float = 0.5,
    *,
    dtype: DType | str = "bool",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    out: Any = None,
) -> Value:
    """1 (or True) with probability `p`, else 0, new ones in each step."""
    return _drawn("bernoulli", shape, dtype, placement, sbp, key, p=float(p))


@takes_out
def randint(
    shape: int | Sequence[int],
    low: int,
    high: int,
    *,
    dtype: DType | str = "int64",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    out: Any = None,
) -> Value:
    """Whole numbers from `low` to `high` - 1, all equally likely, new ones in each step."""
    return _drawn("randint", shape, dtype, placement, sbp, key, low=low, high=high)


@takes_out
def permutation(
    count: int,
    *,
    dtype: DType | str = "int64",
    placement: Placement,
    sbp: SbpLike | None = None,
    key: int | None = None,
    out: Any = None,
) -> Value:
    """The numbers from 0 to `count` - 1 in a random order, a new one in each step."""
    return _drawn("permutation", (count,), dtype, placement, sbp, key)
