"""Tensors made of nothing: sequences and the identity.

`placement` is where they are made; `sbp` demands their layout, without it the compiler chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.out import takes_out
from plancompiler.frontend.trace import constant, current_recorder, demanded_sbp, zeros
from plancompiler.ir import AttrValue, DType, Placement, Value
from plancompiler.ir.operators import SbpLike, Scalar, whole_numbers

__all__ = ["arange", "empty", "eye", "linspace", "logspace", "tril_indices", "triu_indices"]


def made(
    kind: str, attrs: Mapping[str, AttrValue], placement: Placement, sbp: SbpLike | None
) -> Value:
    """A tensor out of an op without inputs."""
    demanded = None if sbp is None else demanded_sbp(placement, sbp)
    tensor: Value = current_recorder().add(kind, (), attrs, placement, demanded)[0]
    return tensor


# --- sequences and the identity -------------------------------------------------------------------


@takes_out
def arange(
    start: Scalar,
    stop: Scalar | None = None,
    step: Scalar = 1,
    *,
    dtype: DType | str | None = None,
    placement: Placement,
    sbp: SbpLike | None = None,
    out: Any = None,
) -> Value:
    """Numbers from `start` on, `step` apart, below `stop` (above it where `step` is negative); with
    one number from 0 to that. They are int64 if all three are whole, else float32, unless `dtype`
    says otherwise.
    """
    if stop is None:
        start, stop = 0, start
    if dtype is None:
        whole = all(isinstance(each, int) for each in (start, stop, step))
        dtype = "int64" if whole else "float32"
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
    return made("arange", attrs, placement, sbp)


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
    return made("linspace", attrs, placement, sbp)


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
    return made("eye", attrs, placement, sbp)


@takes_out
def logspace(
    start: float,
    stop: float,
    count: int,
    base: float = 10.0,
    *,
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    out: Any = None,
) -> Value:
    """`count` numbers from base ** start to base ** stop, with equally distant logarithms."""
    # In float64: the exponents' rounding would be magnified.
    wide = linspace(start, stop, count, dtype="float64", placement=placement, sbp=sbp)
    return (wide * math.log(base)).exp().cast(dtype)


@takes_out
def empty(
    *shape: int | Sequence[int],
    dtype: DType | str = "float32",
    placement: Placement,
    sbp: SbpLike | None = None,
    out: Any = None,
) -> Value:
    """Zeros: `pc.empty(2, 3, placement=mesh)`. No tensor has unset elements."""
    extents = whole_numbers("extents", shape[0] if len(shape) == 1 else shape)
    return zeros(extents, dtype, placement, sbp)


@takes_out
def tril_indices(
    rows: int,
    columns: int | None = None,
    offset: int = 0,
    *,
    placement: Placement,
    out: Any = None,
) -> Value:
    """Rows and columns of the elements of a matrix on and below a diagonal: int64 [2, count]."""
    triangle = np.tril_indices(rows, offset, columns)
    return constant(np.stack(triangle), "int64", placement)


@takes_out
def triu_indices(
    rows: int,
    columns: int | None = None,
    offset: int = 0,
    *,
    placement: Placement,
    out: Any = None,
) -> Value:
    """Rows and columns of the elements of a matrix on and above a diagonal: int64 [2, count]."""
    triangle = np.triu_indices(rows, offset, columns)
    return constant(np.stack(triangle), "int64", placement)
