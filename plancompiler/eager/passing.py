"""What the kernels of eager ops pass between ranks; see `ops.ring` and `ops.exchange`."""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.eager.spec import AnyWorld, Specs
from plancompiler.ops.exchange import Exchange
from plancompiler.ops.registry import Array, OpDef


class WorldRing:
    """One rank's place in a ring of the world's ranks."""

    def __init__(self, world: AnyWorld, ranks: tuple[int, ...], device_type: str) -> None:
        self._world, self._ranks, self._device_type = world, ranks, device_type
        self.member, self.size = ranks.index(world.rank), len(ranks)
        self._given: dict[int, Array] = {}
        self._taken: dict[int, Array] = {}

    def give(self, lane: int, array: Array) -> None:
        """See `Ring.give`."""
        self._given[lane] = array.reshape(-1)

    def turn(self) -> None:
        """See `Ring.turn`."""
        context = self._world.comm.context(self._ranks, device_type=self._device_type)
        after = (self.member + 1) % self.size
        coming = {}
        with context.group() as group:
            for lane, array in sorted(self._given.items()):
                pieces = [array if member == after else array[:0] for member in range(self.size)]
                coming[lane] = group.exchange(pieces)
        self._taken = {lane: work.wait()[self.member - 1] for lane, work in coming.items()}
        self._given.clear()

    def take(self, lane: int, shape: tuple[int, ...]) -> Array:
        """See `Ring.take`."""
        return self._taken[lane].reshape(shape)


class WorldPeers:
    """One rank's place among ranks of the world that exchange rows."""

    def __init__(self, world: AnyWorld, ranks: tuple[int, ...], device_type: str) -> None:
        self._world, self._ranks, self._device_type = world, ranks, device_type
        self.member, self.size = ranks.index(world.rank), len(ranks)

    def exchange(self, rows: Sequence[Array], coming: Sequence[range]) -> Sequence[Array]:
        """See `Peers.exchange`."""
        context = self._world.comm.context(self._ranks, device_type=self._device_type)
        own = rows[self.member]
        away = [each[:0] if each is own else each for each in rows]
        came = context.exchange(away)
        came[self.member] = own
        return came


def passing_of(
    world: AnyWorld, definition: OpDef, used: Specs, made: Specs
) -> tuple[WorldRing | None, WorldPeers | None]:
    """With whom an op's kernel passes on inputs in these layouts, or exchanges rows; None twice
    where it does not.
    """
    passing = definition.passing
    if passing is None or not used[0].inside:
        return None, None
    placement = used[0].placement
    layouts = [spec.sbp for spec in used], [spec.sbp for spec in made]
    axes = passing.mesh_axes(*layouts, placement.hierarchy)
    if not axes:
        return None, None
    where = world, placement.group(world.rank, axes), placement.device_type
    return (
        (None, WorldPeers(*where)) if isinstance(passing, Exchange) else (WorldRing(*where), None)
    )
