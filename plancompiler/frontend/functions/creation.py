"""Tensors made of nothing: sequences and the identity.

`placement` is where they are made; `sbp` demands their layout, without it the compiler chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.out import takes_out
from plancompiler.frontend.trace import current_recorder, demanded_sbp
from plancompiler.ir import AttrValue, DType, Placement, Value
from plancompiler.ir.operators import SbpLike, Scalar

__all__ = ["arange", "eye", "linspace"]


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
