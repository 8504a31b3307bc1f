"""The ring of an eager op of which inputs go round; see `ops.ring`."""

from __future__ import annotations

from plancompiler.eager.spec import AnyWorld, Specs
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


def ring_of(world: AnyWorld, definition: OpDef, used: Specs) -> WorldRing | None:
    """The ring of an op on inputs in these layouts; None where no inputs go round."""
    if definition.round is None or not used[0].inside:
        return None
    placement = used[0].placement
    axes = definition.round.mesh_axes([spec.sbp for spec in used], placement.hierarchy)
    if not axes:
        return None
    return WorldRing(world, placement.group(world.rank, axes), placement.device_type)
