"""Boxing on one placement: the cheapest path of primitives from one NdSbp to another.

States are NdSbps; an edge is one primitive along one set of mesh axes that go from the same SBP to
the same SBP together (so that `[P, P] → [B, B]` is one all-reduce). The search is Dijkstra over
α–β costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, product

import networkx as nx

from plancompiler.boxing.primitives import PrimitiveRow, primitive_between
from plancompiler.errors import BoxingError
from plancompiler.ir import BROADCAST, DType, NdSbp, Partial, Reduction, Sbp, Split
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import Primitive, TaskKind


@dataclass(frozen=True, slots=True)
class BoxingStep:
    """One primitive along some mesh axes of the placement."""

    primitive: Primitive
    kind: TaskKind
    mesh_axes: tuple[int, ...]
    before: NdSbp
    after: NdSbp
    reduction: Reduction | None
    src_axis: int
    """Tensor axis split before, or -1."""
    dst_axis: int
    """Tensor axis split after, or -1."""
    seconds: float
    """Cost by the α–β model."""


def canonical(sbp: NdSbp, hierarchy: tuple[int, ...]) -> NdSbp:
    """The NdSbp with broadcast on mesh axes of one device, where all layouts are the same."""
    return NdSbp(
        tuple(
            entry if extent > 1 else BROADCAST
            for entry, extent in zip(sbp.entries, hierarchy, strict=True)
        )
    )


@lru_cache(maxsize=65536)
def boxing_path(
    before: NdSbp,
    after: NdSbp,
    shape: tuple[int, ...],
    dtype: DType,
    hierarchy: tuple[int, ...],
) -> tuple[BoxingStep, ...]:
    """The cheapest steps from `before` to `after` for a tensor of global `shape` on a mesh."""
    before, after = canonical(before, hierarchy), canonical(after, hierarchy)
    if before == after:
        return ()
    mesh = _Mesh(shape, dtype, hierarchy)
    search = _searched_axes(before, after)
    if len(search) == 1:
        path = _single_axis_path(mesh, before, after, search[0])
        if path is not None:
            return path
    return _shortest_path(mesh, before, after, search)


def boxing_seconds(
    before: NdSbp, after: NdSbp, shape: tuple[int, ...], dtype: DType, hierarchy: tuple[int, ...]
) -> float:
    """Cost of the cheapest path, in seconds of the α–β model."""
    return sum(step.seconds for step in boxing_path(before, after, shape, dtype, hierarchy))


@dataclass(frozen=True, slots=True)
class _Mesh:
    shape: tuple[int, ...]
    dtype: DType
    hierarchy: tuple[int, ...]

    def step(self, before: NdSbp, mesh_axes: tuple[int, ...], target: Sbp) -> BoxingStep | None:
        """The step that takes all `mesh_axes` (which agree in `before`) to `target`, if legal."""
        entry = before[mesh_axes[0]]
        row = primitive_between(entry, target)
        if row is None or entry == target:
            return None
        after = before
        for axis in mesh_axes:
            after = after.replace(axis, target)
        if isinstance(entry, Partial) and _inner_partials(before, mesh_axes, entry):
            return None
        for layout, sbp in ((before, entry), (after, target)):
            if isinstance(sbp, Split) and not self._innermost(layout, mesh_axes, sbp.axis):
                return None
        return self._make(row, before, after, mesh_axes, entry, target)

    def _innermost(self, layout: NdSbp, mesh_axes: tuple[int, ...], tensor_axis: int) -> bool:
        """Whether the splits along `mesh_axes` are the last cuts of the tensor axis, as one cut.

        A later mesh axis that cuts the same tensor axis again would interleave the pieces; several
        mesh axes cut like one flat axis only if all pieces are equal.
        """
        cutting = [
            axis
            for axis, entry in enumerate(layout.entries)
            if isinstance(entry, Split) and entry.axis == tensor_axis and self.hierarchy[axis] > 1
        ]
        if cutting[len(cutting) - len(mesh_axes) :] != list(mesh_axes):
            return False
        pieces = element_count([self.hierarchy[axis] for axis in cutting])
        return len(mesh_axes) == 1 or self.shape[tensor_axis] % pieces == 0

    def _make(
        self,
        row: PrimitiveRow,
        before: NdSbp,
        after: NdSbp,
        mesh_axes: tuple[int, ...],
        entry: Sbp,
        target: Sbp,
    ) -> BoxingStep:
        devices = element_count([self.hierarchy[axis] for axis in mesh_axes])
        pieces = element_count(
            [
                extent
                for axis, extent in enumerate(self.hierarchy)
                if axis not in mesh_axes and isinstance(before[axis], Split)
            ]
        )
        nbytes = element_count(self.shape) * self.dtype.itemsize / pieces
        partial = entry if isinstance(entry, Partial) else target
        return BoxingStep(
            primitive=row.primitive,
            kind=row.kind,
            mesh_axes=mesh_axes,
            before=before,
            after=after,
            reduction=partial.reduction if isinstance(partial, Partial) else None,
            src_axis=entry.axis if isinstance(entry, Split) else -1,
            dst_axis=target.axis if isinstance(target, Split) else -1,
            seconds=row.cost(devices, nbytes),
        )


def _inner_partials(layout: NdSbp, mesh_axes: tuple[int, ...], partial: Partial) -> list[int]:
    """Later mesh axes with another reduction, which must be reduced first.

    The value of `[P, P(max)]` is the sum over the outer axis of maxima over the inner one: unlike
    reductions do not commute.
    """
    return [
        axis
        for axis in range(mesh_axes[0] + 1, len(layout))
        if axis not in mesh_axes and isinstance(layout[axis], Partial) and layout[axis] != partial
    ]


def _searched_axes(before: NdSbp, after: NdSbp) -> tuple[int, ...]:
    """Mesh axes that change, and those that changes depend on.

    That is those that cut a tensor axis which a changing one cuts too, and those that must be
    reduced before a changing one.
    """
    changing = {axis for axis in range(len(before)) if before[axis] != after[axis]}
    cut = {
        entry.axis
        for axis in changing
        for entry in (before[axis], after[axis])
        if isinstance(entry, Split)
    }
    entangled = {
        axis
        for axis, entry in enumerate(before.entries)
        if axis not in changing and isinstance(entry, Split) and entry.axis in cut
    }
    for axis in changing:
        entry = before[axis]
        if isinstance(entry, Partial):
            entangled.update(_inner_partials(before, (axis,), entry))
    return tuple(sorted(changing | entangled))


def _single_axis_path(
    mesh: _Mesh, before: NdSbp, after: NdSbp, axis: int
) -> tuple[BoxingStep, ...] | None:
    """One direct step, or two through broadcast (S → P, P → other P)."""
    direct = mesh.step(before, (axis,), after[axis])
    if direct is not None:
        return (direct,)
    whole = mesh.step(before, (axis,), BROADCAST)
    if whole is None:
        return None
    last = mesh.step(whole.after, (axis,), after[axis])
    return None if last is None else (whole, last)


def _shortest_path(
    mesh: _Mesh, before: NdSbp, after: NdSbp, search: tuple[int, ...]
) -> tuple[BoxingStep, ...]:
    graph: nx.DiGraph[NdSbp] = nx.DiGraph()
    for state in _states(mesh, before, after, search):
        for step in _steps_from(mesh, state, search):
            known = graph.get_edge_data(state, step.after)
            if known is None or step.seconds < known["seconds"]:
                graph.add_edge(state, step.after, seconds=step.seconds, step=step)
    try:
        path = nx.dijkstra_path(graph, before, after, weight="seconds")
    except nx.NetworkXException:
        raise BoxingError(
            "no way from one layout to another",
            got=f"{before} to {after} for shape {mesh.shape} on a mesh {mesh.hierarchy}",
        ) from None
    return tuple(graph.edges[left, right]["step"] for left, right in pairwise(path))


def _states(mesh: _Mesh, before: NdSbp, after: NdSbp, search: tuple[int, ...]) -> Iterator[NdSbp]:
    """Layouts a path may pass: what the two ends use, broadcast, and splits of their tensor axes.

    Splits of tensor axes that no axis outside the search cuts, so that axes outside stay
    independent.
    """
    fixed = {
        entry.axis
        for axis, entry in enumerate(before.entries)
        if axis not in search and isinstance(entry, Split)
    }
    splits = [Split(axis) for axis in range(len(mesh.shape)) if axis not in fixed]
    partials = dict.fromkeys(
        entry
        for axis in search
        for entry in (before[axis], after[axis])
        if isinstance(entry, Partial)
    )
    options: list[Sbp] = [BROADCAST, *partials, *splits]
    for choice in product(options, repeat=len(search)):
        entries = list(before.entries)
        for axis, entry in zip(search, choice, strict=True):
            entries[axis] = entry
        yield NdSbp(tuple(entries))


def _steps_from(mesh: _Mesh, state: NdSbp, search: tuple[int, ...]) -> Iterator[BoxingStep]:
    for count in range(1, len(search) + 1):
        for axes in combinations(search, count):
            entry = state[axes[0]]
            if any(state[axis] != entry for axis in axes):
                continue
            targets: list[Sbp] = [BROADCAST, *map(Split, range(len(mesh.shape)))]
            if entry == BROADCAST:
                targets += [Partial(reduction) for reduction in Reduction]
            for target in targets:
                step = mesh.step(state, axes, target)
                if step is not None:
                    yield step
