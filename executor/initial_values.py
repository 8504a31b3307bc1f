"""Initial values of a rank's variables.

A box of a file that several ranks of a host hold is copied out of the file by one of them: the
first reads it, piece by piece, into a little memory that all of them see, and each copies the
pieces from there. Two halves of that memory take turns, so that the next pieces are read while the
others copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from plancompiler.errors import TransportError
from plancompiler.executor.comm.link import GroupDesc, GroupKey, Link, MemoryRegion, Publication
from plancompiler.executor.memory import ALIGNMENT, Array, Memory
from plancompiler.ir import DType, NdSbp, Placement, Split
from plancompiler.ir.shard import Region, element_count, region_shape
from plancompiler.ops.initializer import initialize
from plancompiler.plan.plan import Plan, VariableDesc

_HALF = 4 << 20
"""Bytes that are read at once into memory that others see."""
_REGION = (1 << 63) - 1
"""What ranks call that memory; no register has this number."""
_STREAM = "initial values"


def initial_value(variable: VariableDesc, seed: int, place: Array | None) -> Array:
    """This rank's part of a variable before the first step; what a file holds is read to its place,
    where that is given.
    """
    attrs: dict[str, Any] = dict(variable.attrs)
    return initialize(
        attrs["init"],
        attrs["init_args"],
        attrs.get("name", variable.name),
        seed,
        variable.shape,
        variable.region,
        variable.dtype,
        attrs.get("file", ""),
        attrs.get("key", ""),
        place,
        attrs.get("file_shape", ()),
    )


class _Piece(NamedTuple):
    """A box of a variable, and where it is in the memory that all see."""

    variable: VariableDesc
    region: Region
    offset: int

    @property
    def nbytes(self) -> int:
        return element_count(region_shape(self.region)) * self.variable.dtype.itemsize

    def shown(self, half: Array) -> Array:
        """Its elements in that memory."""
        data = half[self.offset : self.offset + self.nbytes].view(self.variable.dtype.numpy)
        return data.reshape(region_shape(self.region))

    def of(self, shard: Array) -> Array:
        """Its elements in the rank's shard."""
        corner = (start for start, _ in self.variable.region)
        box: list[Any] = [
            slice(start - first, stop - first)
            for (start, stop), first in zip(self.region, corner, strict=True)
        ]
        return shard[(*box, ...)]


class SharedReads:
    """What one rank reads of files together with other ranks of its host."""

    def __init__(self, plan: Plan, link: Link, given: Collection[str]) -> None:
        """`given` are variables that are not read."""
        self._plan, self._link = plan, link
        groups: dict[tuple[int, ...], list[VariableDesc]] = {}
        holders = cache(_holders)
        # Memory of devices is not shared like this: each reads for itself.
        variables = plan.variables if plan.device == "cpu" else ()
        for variable in sorted(variables, key=lambda each: each.name):
            stored = dict(variable.attrs)["init"] == "stored" and variable.name not in given
            if stored and element_count(region_shape(variable.region)):
                ranks = link.near(holders(variable.placement, variable.sbp, plan.rank))
                if len(ranks) > 1:
                    groups.setdefault(ranks, []).append(variable)
        self._groups = {ranks: groups[ranks] for ranks in sorted(groups)}
        self.names = {each.name for some in groups.values() for each in some}
        """Variables that `read` fills."""

    def published(self, publication: Publication) -> Publication:
        """What the rank publishes, with what these reads need; takes memory."""
        if not self._groups:
            return publication
        regions = publication.regions
        leads = any(ranks[0] == self._plan.rank for ranks in self._groups)
        if leads:
            block = 1 + max((each.index for each in self._plan.blocks), default=0)
            self._link.allocate(block, 2 * _HALF, True, "reading")
            half = (_HALF,)
            regions += (
                MemoryRegion(_REGION, block, 0, _HALF, 2, DType.UINT8, half, "initial values"),
            )
        groups = tuple(
            GroupDesc(_key(ranks), hashlib.sha256(repr([*map(_terms, some)]).encode()).hexdigest())
            for ranks, some in self._groups.items()
        )
        peers = {*publication.peers, *(rank for ranks in self._groups for rank in ranks)}
        return replace(
            publication,
            regions=regions,
            groups=(*publication.groups, *groups),
            peers=tuple(sorted(peers - {self._plan.rank})),
        )

    def read(self, memory: Memory, peers: Collection[int]) -> None:
        """Fill the variables; called by all ranks, once they have met. `peers` are all that this
        one has met.
        """
        for ranks, some in self._groups.items():  # in one order on all ranks
            group = self._link.group(_key(ranks))
            halves = self._link.peer_slots(ranks[0], _REGION)
            if halves is None:
                raise TransportError(
                    f"rank {ranks[0]} does not show what it reads for others of its host",
                    rank=self._plan.rank,
                )
            for number, pieces in enumerate(_batches(some)):
                half = halves[number % 2]
                if ranks[0] == self._plan.rank:
                    for piece in pieces:
                        part = replace(piece.variable, region=piece.region)
                        initial_value(part, self._plan.seed, piece.shown(half))
                group.barrier("a read of initial values")
                for piece in pieces:
                    (shard, *_) = memory.slots(piece.variable.register)
                    np.copyto(piece.of(shard), piece.shown(half))
            group.barrier("the end of the initial values")
        for rank in self._link.near({*peers, self._plan.rank}):
            self._link.free(rank, _REGION)


def _holders(placement: Placement, sbp: NdSbp, rank: int) -> tuple[int, ...]:
    """The ranks that hold the box of a tensor that `rank` holds."""
    own = placement.coordinates(placement.parallel_id(rank))
    split = [axis for axis, entry in enumerate(sbp) if isinstance(entry, Split)]
    return tuple(
        sorted(
            other
            for at, other in enumerate(placement.rank_list)
            if all(placement.coordinates(at)[axis] == own[axis] for axis in split)
        )
    )


def _key(ranks: tuple[int, ...]) -> GroupKey:
    return GroupKey(ranks, 0, _STREAM)


def _terms(variable: VariableDesc) -> tuple[object, ...]:
    """What ranks must agree on to read a variable together."""
    return variable.name, variable.region, str(variable.dtype)


def _batches(variables: Sequence[VariableDesc]) -> Iterator[list[_Piece]]:
    """Pieces of the variables' boxes, as many at once as fit into the memory that all see."""
    batch: list[_Piece] = []
    end = 0
    for variable in variables:
        for region in _cut(variable.region, _HALF // variable.dtype.itemsize):
            piece = _Piece(variable, region, end)
            if end + piece.nbytes > _HALF:
                yield batch
                batch, end, piece = [], 0, piece._replace(offset=0)
            batch.append(piece)
            end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    if batch:
        yield batch


def _cut(region: Region, most: int) -> Iterator[Region]:
    """Boxes of at most so many elements that make up a box, in the order of their elements."""
    axis = next((at for at, (start, stop) in enumerate(region) if stop - start > 1), None)
    count = element_count(region_shape(region))
    if axis is None or count <= most:
        yield region
        return
    start, stop = region[axis]
    step = max(1, most * (stop - start) // count)
    for begin in range(start, stop, step):
        cut = begin, min(begin + step, stop)
        yield from _cut((*region[:axis], cut, *region[axis + 1 :]), most)
