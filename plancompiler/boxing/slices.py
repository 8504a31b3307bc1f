"""`slice_for_rank`: what one rank must know of the boxing task graph."""

from __future__ import annotations

from plancompiler.boxing.graph import BoxingTaskGraph, FamilyOutput, RankSlice
from plancompiler.errors import RankError
from plancompiler.ir.task import CROSSING


class Slicer:
    """Slices of one graph; ranks with the same placements share one slice object."""

    def __init__(self, graph: BoxingTaskGraph) -> None:
        self._graph = graph
        self._placements = tuple(
            dict.fromkeys(
                [
                    *(placed.op.placement for placed in graph.ops),
                    *(family.placement for family in graph.families),
                ]
            )
        )
        self._copies = [family for family in graph.families if family.kind in CROSSING]
        self._known: dict[tuple[bool, ...], RankSlice] = {}

    def for_rank(self, rank: int) -> RankSlice:
        """Ops and families with a member on the rank and, for registers that cross ranks, their
        ends.

        A register that crosses ranks is known by the greatest candidate of *all* its CopyCommNet
        consumers, so its producer and each consumer must see the same full set; nothing further
        away is needed.
        """
        graph = self._graph
        if not 0 <= rank < graph.world_size:
            raise RankError(
                "no such rank", got=rank, expected=f"0 to {graph.world_size - 1}", rank=rank
            )
        key = tuple(rank in placement for placement in self._placements)
        if key not in self._known:
            self._known[key] = self._cut(rank)
        return self._known[key]

    def _cut(self, rank: int) -> RankSlice:
        graph = self._graph
        kept = {family.number: family for family in graph.families if rank in family.placement}
        crossing: set[FamilyOutput] = set()
        for family in self._copies:
            producer = graph.family_by_number[family.inputs[0].family]
            if rank in family.placement or rank in producer.placement:
                crossing.add(family.inputs[0])
        for family in self._copies:
            source = family.inputs[0]
            if source in crossing:
                kept[family.number] = family
                kept[source.family] = graph.family_by_number[source.family]
        return RankSlice(
            job_name=graph.job_name,
            seed=graph.seed,
            world_size=graph.world_size,
            ops=tuple(placed for placed in graph.ops if rank in placed.op.placement),
            families=tuple(kept[number] for number in sorted(kept)),
            pipeline=graph.pipeline,
        )


def slice_for_rank(graph: BoxingTaskGraph, rank: int) -> RankSlice:
    """What one rank must know of the graph; use a Slicer for many ranks of one graph."""
    return Slicer(graph).for_rank(rank)
