"""Boxing on one placement: the cheapest path of primitives from one NdSbp to another.

States are NdSbps; an edge is one primitive along one set of mesh axes that go from the same SBP to
the same SBP together (so that `[P, P] → [B, B]` is one all-reduce). The search is Dijkstra over
α–β costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, Any

from plancompiler.boxing.primitives import PrimitiveRow, primitive_between
from plancompiler.costs import Cost, MeshLinks, generic_machine
from plancompiler.costs.links import uniform_links
from plancompiler.errors import BoxingError
from plancompiler.ir import (
    BROADCAST,
    PARTIAL_SUM,
    DType,
    NdSbp,
    Partial,
    Reduction,
    Sbp,
    Split,
)
from plancompiler.ir.halo import Halo
from plancompiler.ir.shard import element_count, lie_apart
from plancompiler.ir.task import Primitive, TaskKind

if TYPE_CHECKING:
    import networkx as nx


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
    cost: Cost
    """By bytes of the whole global tensor."""
    seconds: float = 0.0
    """Cost for the tensor at hand."""


def canonical(sbp: NdSbp, hierarchy: tuple[int, ...]) -> NdSbp:
    """The NdSbp with broadcast on mesh axes of one device, where all layouts are the same."""
    if 1 not in hierarchy:
        return sbp
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
    links: MeshLinks | None = None,
) -> tuple[BoxingStep, ...]:
    """The cheapest steps from `before` to `after` for a tensor of global `shape` on a mesh, whose
    links are those of the generic machine where none are given.
    """
    before, after = canonical(before, hierarchy), canonical(after, hierarchy)
    if before == after:
        return ()
    if after.has_halo and not keeps_halo(before, after):
        raise BoxingError("a halo comes by an exchange", got=f"{before} to {after}")
    # What decides which steps are legal, besides the layouts: tensor axes whose pieces are all
    # equal, however many mesh axes cut them.
    even = tuple(extent % element_count(hierarchy) == 0 for extent in shape)
    nbytes = element_count(shape) * dtype.itemsize
    mesh = _Mesh(
        hierarchy, even, apart_axes(shape, dtype), links or uniform_links(generic_machine())
    )
    path = _direct_path(mesh, before, after)
    if path is None:
        partials = {entry for sbp in (before, after) for entry in sbp if isinstance(entry, Partial)}
        graph = _state_graph(mesh, tuple(sorted(partials | {PARTIAL_SUM}, key=str)))
        path = _paths_from(graph, before, nbytes).get(after)
    if path is None:
        raise BoxingError(
            "no way from one layout to another",
            got=f"{before} to {after} for shape {shape} on a mesh {hierarchy}",
        )
    return tuple(replace(step, seconds=step.cost.seconds(nbytes)) for step in path)


def keeps_halo(before: NdSbp, after: NdSbp) -> bool:
    """Whether every device has all that it needs of a value in a layout with halos."""
    return all(
        own == wanted or (own == BROADCAST and isinstance(wanted, Halo))
        for own, wanted in zip(before, after, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Mesh:
    """All that decides which steps are legal."""

    hierarchy: tuple[int, ...]
    even: tuple[bool, ...]
    """Per tensor axis, whether all pieces are equal."""
    apart: tuple[bool, ...]
    """Per tensor axis, whether the parts of a piece along it lie apart in memory."""
    links: MeshLinks

    def step(self, before: NdSbp, mesh_axes: tuple[int, ...], target: Sbp) -> BoxingStep | None:
        """The step that takes all `mesh_axes` (which agree in `before`) to `target`, if legal."""
        entry = before[mesh_axes[0]]
        row = primitive_between(entry, target)
        if row is None or entry == target:
            return None
        after = before
        for axis in mesh_axes:
            after = after.replace(axis, target)
        for layout, sbp in ((before, entry), (after, target)):
            if isinstance(sbp, Partial) and _inner_partials(layout, mesh_axes, sbp):
                return None
        for layout, sbp in ((before, entry), (after, target)):
            if isinstance(sbp, Split) and not self._innermost(layout, mesh_axes, sbp.axis):
                return None
        return self.make(row, before, after, mesh_axes, entry, target)

    def _innermost(self, layout: NdSbp, mesh_axes: tuple[int, ...], tensor_axis: int) -> bool:
        """Whether the splits along `mesh_axes` are the last cuts of the tensor axis, as one cut.

        A later mesh axis that cuts the same tensor axis again would interleave the pieces; several
        mesh axes cut like one flat axis only if all pieces are equal.
        """
        cutting = [
            axis
            for axis, entry in enumerate(layout.entries)
            if isinstance(entry, Split) and entry.axis == tensor_axis
        ]
        if cutting[len(cutting) - len(mesh_axes) :] != list(mesh_axes):
            return False
        return len(mesh_axes) == 1 or self.even[tensor_axis]

    def make(
        self,
        row: PrimitiveRow,
        before: NdSbp,
        after: NdSbp,
        mesh_axes: tuple[int, ...],
        entry: Sbp,
        target: Sbp,
    ) -> BoxingStep:
        """A step, and what it costs."""
        devices = element_count([self.hierarchy[axis] for axis in mesh_axes])
        pieces = element_count(
            [
                extent
                for axis, extent in enumerate(self.hierarchy)
                if axis not in mesh_axes and isinstance(before[axis], (Split, Halo))
            ]
        )
        sent, received = (
            isinstance(sbp, Split) and self.apart[sbp.axis] for sbp in (target, entry)
        )
        cost = row.cost(devices, self.links.along(mesh_axes), sent, received)
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
            cost=Cost(cost.start, cost.per_byte / pieces, cost.share / pieces),
        )


def apart_axes(shape: Sequence[int], dtype: DType) -> tuple[bool, ...]:
    """Per tensor axis, whether the parts of a tensor along it lie apart in memory."""
    return tuple(lie_apart(shape, axis, dtype.itemsize) for axis in range(len(shape)))


def _inner_partials(layout: NdSbp, mesh_axes: tuple[int, ...], partial: Partial) -> list[int]:
    """Later mesh axes with another reduction, which must be reduced before and made after.

    The value of `[P, P(max)]` is the sum over the outer axis of maxima over the inner one: unlike
    reductions do not commute.
    """
    return [
        axis
        for axis in range(mesh_axes[0] + 1, len(layout))
        if axis not in mesh_axes and isinstance(layout[axis], Partial) and layout[axis] != partial
    ]


def _whole(sbp: NdSbp) -> bool:
    """Whether every device has all of the value."""
    return all(entry == BROADCAST for entry in sbp.entries)


def _direct_path(mesh: _Mesh, before: NdSbp, after: NdSbp) -> tuple[BoxingStep, ...] | None:
    """Where one mesh axis changes and nothing else cuts the same tensor axis: a step, or two.

    Two go through broadcast (S → P, P → other P). Also where one reduction over the whole mesh is
    all that is left to do: in one step it takes the fewest messages, and none sends fewer bytes.
    None where a search is needed.
    """
    changing = tuple(axis for axis in range(len(before)) if before[axis] != after[axis])
    if after.has_halo:
        row = primitive_between(BROADCAST, after[changing[0]])
        assert row is not None
        return (mesh.make(row, before, after, changing, BROADCAST, after[changing[0]]),)
    if len(changing) > 1:
        used = [axis for axis, extent in enumerate(mesh.hierarchy) if extent > 1]
        agree = len(changing) == len(used) and len({before[axis] for axis in used}) == 1
        if not (agree and isinstance(before[used[0]], Partial) and _whole(after)):
            return None
        reduced = mesh.step(before, changing, BROADCAST)
        return None if reduced is None else (reduced,)
    (axis,) = changing
    cut = {entry for entry in (before[axis], after[axis]) if isinstance(entry, Split)}
    if any(entry in cut for other, entry in enumerate(before.entries) if other != axis):
        return None
    direct = mesh.step(before, (axis,), after[axis])
    if direct is not None:
        return (direct,)
    whole = mesh.step(before, (axis,), BROADCAST)
    if whole is None:
        return None
    last = mesh.step(whole.after, (axis,), after[axis])
    return None if last is None else (whole, last)


@lru_cache(maxsize=256)
def _state_graph(mesh: _Mesh, partials: tuple[Partial, ...]) -> nx.DiGraph[NdSbp]:
    """All layouts of a tensor on a mesh and the legal steps between them, the cheapest per pair.

    It does not depend on sizes, so one graph serves all tensors with as many axes.
    """
    # It takes a tenth of a second to import, and what comes from the plan cache needs no search.
    import networkx as nx  # noqa: PLC0415  # see above

    splits = [Split(axis) for axis in range(len(mesh.even))]
    targets: list[Sbp] = [BROADCAST, *splits, *partials]
    options = [targets if extent > 1 else [BROADCAST] for extent in mesh.hierarchy]
    graph: nx.DiGraph[NdSbp] = nx.DiGraph()
    for entries in product(*options):
        state = NdSbp(entries)
        for axes in _agreeing_axes(mesh, state):
            for target in targets:
                step = mesh.step(state, axes, target)
                if step is not None:
                    graph.add_edge(state, step.after, step=step)
    return graph


def layout_steps(
    hierarchy: tuple[int, ...],
    even: tuple[bool, ...],
    apart: tuple[bool, ...],
    partials: tuple[Partial, ...],
    links: MeshLinks,
) -> list[BoxingStep]:
    """All legal steps between layouts of a tensor with as many axes as `even` says; `apart` as
    `apart_axes` has it.
    """
    graph = _state_graph(_Mesh(hierarchy, even, apart, links), partials)
    steps: list[BoxingStep] = [edge["step"] for _, _, edge in graph.edges(data=True)]
    return steps


def _agreeing_axes(mesh: _Mesh, state: NdSbp) -> Iterator[tuple[int, ...]]:
    """Sets of mesh axes that are in the same SBP, and can be changed in one step."""
    used = [axis for axis, extent in enumerate(mesh.hierarchy) if extent > 1]
    for count in range(1, len(used) + 1):
        for axes in combinations(used, count):
            if all(state[axis] == state[axes[0]] for axis in axes):
                yield axes


@lru_cache(maxsize=4096)
def _paths_from(
    graph: nx.DiGraph[NdSbp], before: NdSbp, nbytes: int
) -> dict[NdSbp, tuple[BoxingStep, ...]]:
    """The cheapest path to every other layout, for a tensor of this size (Dijkstra 1959)."""
    import networkx as nx  # noqa: PLC0415  # as in `_state_graph`

    def seconds(_before: NdSbp, _after: NdSbp, edge: dict[str, Any]) -> float:
        return float(edge["step"].cost.seconds(nbytes))

    paths = nx.single_source_dijkstra_path(graph, before, weight=seconds)
    return {
        after: tuple(graph.edges[pair]["step"] for pair in pairwise(path))
        for after, path in paths.items()
    }
