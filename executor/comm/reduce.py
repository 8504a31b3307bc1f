"""Elementwise reductions over arrays of several ranks, in rank order.

Every element is reduced in the order of the communicator's ranks, wherever it is computed, so that
all ranks get the same bits. float16 and bfloat16 are accumulated in float32; whole numbers are
averaged in 64 bits and rounded down; bool counts as 0 and 1 (sum is "or", prod is "and").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from plancompiler.executor.memory import Array
from plancompiler.ir import DType, Reduction

Move = Callable[[], object]
"""One prepared array operation."""

UFUNCS: dict[Reduction, np.ufunc] = {
    Reduction.SUM: np.add,
    Reduction.MAX: np.maximum,
    Reduction.MIN: np.minimum,
    Reduction.PROD: np.multiply,
    Reduction.AVG: np.add,
}

CHUNKED_BYTES = 64 << 10
"""From this size on the members of an all_reduce share the work instead of repeating it."""
TILE_BYTES = 128 << 10
"""Pieces in which several operands pass through the second-level cache."""


def identity_of(reduction: Reduction, dtype: DType) -> int | float | bool:
    """The value that does not change what it is combined with, the sign of a zero included."""
    if reduction in (Reduction.SUM, Reduction.AVG):
        return -0.0 if dtype.is_floating else 0
    if reduction is Reduction.PROD:
        return 1
    lowest = reduction is Reduction.MAX
    if dtype.is_floating:
        return -np.inf if lowest else np.inf
    if dtype is DType.BOOL:
        return not lowest
    limits = np.iinfo(dtype.value)
    return int(limits.min if lowest else limits.max)


def accumulator(reduction: Reduction, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The dtype in which a reduction is computed."""
    sums = reduction in (Reduction.SUM, Reduction.AVG, Reduction.PROD)
    if sums and DType.parse(dtype).is_half:
        return np.dtype(np.float32)
    if dtype.kind in "iub" and reduction is Reduction.AVG:
        return np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
    return dtype


def divide(array: Array, count: int | Array) -> None:
    """Turn a sum into an average, in place; whole numbers are rounded down."""
    if array.dtype.kind == "f":
        np.divide(array, count, out=array, casting="same_kind")
    else:
        np.floor_divide(array, count, out=array, casting="same_kind")


def plan_reduction(out: Array, sources: Sequence[Array], reduction: Reduction) -> list[Move]:
    """Operations that leave the reduction of `sources` in `out`, all of one shape and dtype.

    `out` may be the memory of one of the sources.
    """
    if out.size == 0:
        return []
    if len(sources) == 1:
        return [partial(np.copyto, out, sources[0])]
    wide = accumulator(reduction, out.dtype)
    # The first operation reads sources 0 and 1 and writes `out`; a later source must not be there.
    overwrites = any(np.may_share_memory(out, source) for source in sources[2:])
    moves: list[Move] = []
    if wide != out.dtype or overwrites:
        tiles = _tiles(out)
        work = np.empty(max(out[tile].size for tile in tiles), wide)
        for tile in tiles:
            target = out[tile]
            moves.append(
                partial(
                    _reduce_through,
                    work[: target.size].reshape(target.shape),
                    target,
                    [source[tile] for source in sources],
                    reduction,
                )
            )
        return moves
    ufunc = UFUNCS[reduction]
    average = reduction is Reduction.AVG
    for tile in _tiles(out) if len(sources) > 2 or average else [(slice(None),) * out.ndim]:
        target = out[tile]
        moves.append(partial(ufunc, sources[0][tile], sources[1][tile], out=target))
        moves.extend(partial(ufunc, target, source[tile], out=target) for source in sources[2:])
        if average:
            moves.append(partial(divide, target, len(sources)))
    return moves


def _reduce_through(
    work: Array, out: Array, sources: Sequence[Array], reduction: Reduction
) -> None:
    np.copyto(work, sources[0])
    for source in sources[1:]:
        UFUNCS[reduction](work, source, out=work)
    if reduction is Reduction.AVG:
        divide(work, len(sources))
    np.copyto(out, work, casting="unsafe")


def _tiles(array: Array) -> list[tuple[slice, ...]]:
    """Cuts along the first axis, each of about TILE_BYTES."""
    if array.ndim == 0:
        return [()]
    rows = max(1, TILE_BYTES * array.shape[0] // max(array.nbytes, 1))
    return [(slice(start, start + rows),) for start in range(0, array.shape[0], rows)]
