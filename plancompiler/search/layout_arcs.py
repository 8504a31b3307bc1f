"""The layouts of a tensor as a graph: its nodes are layouts, its arcs boxing primitives with their
prices, as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from plancompiler.boxing.exchange import halo_seconds
from plancompiler.boxing.fuse import FUSED
from plancompiler.boxing.planner import apart_axes, layout_steps
from plancompiler.costs import MeshLinks
from plancompiler.ir import BROADCAST, DType, NdSbp, Partial
from plancompiler.ir.halo import Halo
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import TaskKind


@dataclass(frozen=True)
class LayoutArcs:
    """Layouts of a tensor and the steps between them, with prices for this tensor."""

    number_of: Mapping[NdSbp, int]
    tails: np.ndarray
    heads: np.ndarray
    seconds: np.ndarray

    @property
    def count(self) -> int:
        return len(self.number_of)

    def distances(self) -> np.ndarray:
        """Seconds of the cheapest way between any two layouts (R. Floyd, S. Warshall, 1962)."""
        ways = np.full((self.count, self.count), np.inf)
        np.fill_diagonal(ways, 0.0)
        np.minimum.at(ways, (self.tails, self.heads), self.seconds)
        for middle in range(self.count):
            np.minimum(ways, ways[:, middle, None] + ways[middle], out=ways)
        return ways


@lru_cache(maxsize=16384)
def layout_arcs(
    shape: tuple[int, ...],
    dtype: DType,
    hierarchy: tuple[int, ...],
    partials: tuple[Partial, ...],
    halos: tuple[NdSbp, ...],
    starting: float,
    links: MeshLinks,
) -> LayoutArcs:
    """The layouts of a tensor that a search needs. `starting` is the part that its reductions pay
    of starting one: 1, or less where they are done together with others, in buckets.
    """
    nbytes = element_count(shape) * dtype.itemsize
    even = tuple(extent % element_count(hierarchy) == 0 for extent in shape)
    number_of, tails, heads, start, per_byte = _steps(
        hierarchy, even, apart_axes(shape, dtype), partials, links, starting
    )
    seconds = start + per_byte * nbytes
    if not halos:
        return LayoutArcs(number_of, tails, heads, seconds)
    number_of = dict(number_of)
    more: list[tuple[int, int, float]] = []
    for layout in halos:
        number = number_of.setdefault(layout, len(number_of))
        split = layout.without_halos()
        whole = NdSbp(tuple(BROADCAST if isinstance(each, Halo) else each for each in layout))
        for source in dict.fromkeys((split, whole)):
            steps, spent = halo_seconds(source, layout, shape, dtype, hierarchy, links)
            spent += sum(step.seconds for step in steps)
            more.append((number_of[source], number, spent))
    extra = np.array(more)
    return LayoutArcs(
        number_of,
        np.concatenate([tails, extra[:, 0].astype(int)]),
        np.concatenate([heads, extra[:, 1].astype(int)]),
        np.concatenate([seconds, extra[:, 2]]),
    )


@lru_cache(maxsize=1024)
def _steps(
    hierarchy: tuple[int, ...],
    even: tuple[bool, ...],
    apart: tuple[bool, ...],
    partials: tuple[Partial, ...],
    links: MeshLinks,
    starting: float,
) -> tuple[Mapping[NdSbp, int], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    steps = layout_steps(hierarchy, even, apart, partials, links)
    # Each step is a task of its own, also where it copies next to nothing. A collective runs on
    # another stream, which waits for what it is given, as others do for what it makes.
    host = links.machine.host
    turn = {TaskKind.COLLECTIVE_BOXING: host.task_seconds + 2 * host.wake_seconds}
    # Where that was measured, so was what it takes to call a kernel, even one that only copies.
    call = host.task_seconds + (links.machine.device.launch_seconds if host.wake_seconds else 0.0)
    number_of: dict[NdSbp, int] = {}
    for step in steps:
        number_of.setdefault(step.before, len(number_of))
        number_of.setdefault(step.after, len(number_of))
    number_of.setdefault(NdSbp.broadcast(len(hierarchy)), len(number_of))
    return (
        number_of,
        np.array([number_of[step.before] for step in steps], int),
        np.array([number_of[step.after] for step in steps], int),
        np.array(
            [
                (step.cost.start + turn.get(step.kind, call))
                * (starting if step.primitive in FUSED else 1.0)
                for step in steps
            ]
        ),
        np.array([step.cost.per_byte for step in steps]),
    )


def least_seconds(distances: np.ndarray, made: int, wanted: Sequence[int]) -> float:
    """Seconds of the cheapest steps that give a value in all wanted layouts: a directed Steiner
    tree (S. Dreyfus and R. Wagner, 1972).
    """
    terminals = sorted(set(wanted) - {made})
    if len(terminals) < 2:
        return float(distances[made, terminals[0]]) if terminals else 0.0
    best = {1 << place: distances[:, at] for place, at in enumerate(terminals)}
    for subset in range(1, 1 << len(terminals)):
        if subset in best:
            continue
        split = np.full(len(distances), np.inf)
        part = (subset - 1) & subset
        while part:
            np.minimum(split, best[part] + best[subset ^ part], out=split)
            part = (part - 1) & subset
        best[subset] = (distances + split).min(axis=1)
    return float(best[(1 << len(terminals)) - 1][made])
