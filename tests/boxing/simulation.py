"""Run boxing steps and exchanges on NumPy shards, straight from their definitions.

Independent of the executor: every device's shard is computed from the global meaning of its layout.
"""

from __future__ import annotations

import numpy as np

from plancompiler.boxing.exchange import Exchange, exchange_sources
from plancompiler.boxing.planner import BoxingStep
from plancompiler.ir import NdSbp, Partial, Placement, Reduction
from plancompiler.ir.shard import rank_region, region_index, relative
from plancompiler.ir.task import Primitive

COMBINE = {
    Reduction.SUM: np.add.reduce,
    Reduction.MAX: np.maximum.reduce,
    Reduction.MIN: np.minimum.reduce,
    Reduction.PROD: np.multiply.reduce,
    Reduction.AVG: lambda parts: np.add.reduce(parts) / len(parts),
}
IDENTITY = {
    Reduction.SUM: 0.0,
    Reduction.MAX: -np.inf,
    Reduction.MIN: np.inf,
    Reduction.PROD: 1.0,
}

Shards = dict[int, np.ndarray]


def scatter(
    array: np.ndarray, placement: Placement, sbp: NdSbp, rng: np.random.Generator
) -> Shards:
    """Shards whose global value is `array`; partial ones get parts that differ on every device."""
    parts = {(): array}
    for entry, extent in zip(sbp, placement.hierarchy, strict=True):
        split: dict[tuple[int, ...], np.ndarray] = {}
        for coordinates, value in parts.items():
            for index, part in enumerate(_parts(entry, value, extent, rng)):
                split[*coordinates, index] = part
        parts = split
    return {
        rank: parts[placement.coordinates(parallel_id)][
            region_index(rank_region(array.shape, placement, sbp, rank))
        ]
        for parallel_id, rank in enumerate(placement.rank_list)
    }


def _parts(entry, value: np.ndarray, extent: int, rng: np.random.Generator) -> list[np.ndarray]:
    if not isinstance(entry, Partial):
        return [value] * extent
    noise = rng.integers(1, 4, size=(extent, *value.shape)).astype(value.dtype)
    if entry.reduction is Reduction.SUM:
        return [*noise[1:], value - noise[1:].sum(axis=0)]
    if entry.reduction is Reduction.AVG:
        return [*noise[1:], value * extent - noise[1:].sum(axis=0)]
    if entry.reduction is Reduction.PROD:
        powers = 2.0 ** noise[1:]
        return [*powers, value / powers.prod(axis=0)]
    sign = -1 if entry.reduction is Reduction.MAX else 1
    parts = [value + sign * each for each in noise]
    parts[int(rng.integers(extent))] = value
    return parts


def assemble(
    shards: Shards, shape: tuple[int, ...], placement: Placement, sbp: NdSbp
) -> np.ndarray:
    """The global value of shards, checking that replicas agree."""
    grid: dict[tuple[int, ...], np.ndarray] = {
        placement.coordinates(parallel_id): shards[rank]
        for parallel_id, rank in enumerate(placement.rank_list)
    }
    boxes = {
        placement.coordinates(parallel_id): rank_region(shape, placement, sbp, rank)
        for parallel_id, rank in enumerate(placement.rank_list)
    }
    for axis in reversed(range(placement.ndim)):
        if not isinstance(sbp[axis], Partial):
            continue
        merged: dict[tuple[int, ...], list[np.ndarray]] = {}
        for coordinates, value in sorted(grid.items()):
            merged.setdefault((*coordinates[:axis], 0, *coordinates[axis + 1 :]), []).append(value)
        grid = {
            coordinates: COMBINE[sbp[axis].reduction](np.stack(values))
            for coordinates, values in merged.items()
        }
    result = np.full(shape, np.nan)
    for coordinates, value in grid.items():
        index = region_index(boxes[coordinates])
        assert value.shape == result[index].shape
        seen = result[index]
        known = ~np.isnan(seen)
        np.testing.assert_array_equal(seen[known], value[known], err_msg="replicas differ")
        result[index] = value
    return result


def apply_step(
    step: BoxingStep, shards: Shards, shape: tuple[int, ...], placement: Placement
) -> Shards:
    """One primitive on every device, from its group's shards only."""
    return {rank: _result(step, shards, shape, placement, rank) for rank in placement.rank_list}


def _result(step, shards, shape, placement, rank):
    group = placement.group(rank, step.mesh_axes)
    before = rank_region(shape, placement, step.before, rank)
    after = rank_region(shape, placement, step.after, rank)
    if step.primitive is Primitive.SLICE:
        return shards[rank][region_index(relative(after, before))]
    if step.primitive is Primitive.PARTIALISE:
        keeps = rank == group[0] or step.reduction is Reduction.AVG
        return shards[rank] if keeps else np.full_like(shards[rank], IDENTITY[step.reduction])
    if step.primitive in (Primitive.ALL_REDUCE, Primitive.REDUCE_SCATTER):
        reduced = COMBINE[step.reduction](np.stack([shards[peer] for peer in group]))
        return reduced[region_index(relative(after, before))]
    full = np.full([stop - start for start, stop in after], np.nan)
    for peer in group:
        box = rank_region(shape, placement, step.before, peer)
        low = [max(a[0], b[0]) for a, b in zip(box, after, strict=True)]
        high = [max(start, min(a[1], b[1])) for start, a, b in zip(low, box, after, strict=True)]
        common = tuple(zip(low, high, strict=True))
        full[region_index(relative(common, after))] = shards[peer][
            region_index(relative(common, box))
        ]
    assert not np.isnan(full).any()
    return full


def apply_exchange(exchange: Exchange, shards: Shards) -> Shards:
    """Every destination's shard from the boxes it reads."""
    results = {}
    for rank in exchange.dst_placement.rank_list:
        shape = [stop - start for start, stop in exchange.region(rank)]
        sources = exchange_sources(exchange, rank)
        if not sources:
            results[rank] = np.full(shape, IDENTITY[exchange.fill(rank) or Reduction.SUM])
        elif exchange.reduction is None:
            results[rank] = np.full(shape, np.nan)
            for piece in sources:
                results[rank][region_index(piece.target)] = shards[piece.rank][
                    region_index(piece.source)
                ]
            assert not np.isnan(results[rank]).any()
        else:
            layers = []
            for piece in sources:
                layer = np.full(shape, IDENTITY[exchange.reduction])
                layer[region_index(piece.target)] = shards[piece.rank][region_index(piece.source)]
                layers.append(layer)
            results[rank] = COMBINE[exchange.reduction](np.stack(layers))
    return results
