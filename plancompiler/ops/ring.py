"""Inputs that go round a ring of devices while an op runs.

Where an op needs all of an input, but not all at once, a device that holds a piece can pass it on
to the next device and take that of the one before, until it has seen all. No device ever holds
more than two pieces, and what a device computes with one piece hides the way of the next (H. Liu,
M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers", 2023; the rotation of blocks is
that of L. Cannon's matrix product, 1969).

A signature says so by the layout: along the mesh axes where an input that can go round is split by
the axis of its `Round`, it does. Everything else follows: who talks to whom, and the memory that it
takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import BROADCAST, NdSbp, Sbp, Split
from plancompiler.ir.shard import Region, balanced_range, element_count
from plancompiler.ops.rule import NdSignature, Signature


class Ring(Protocol):
    """This device's place among those that pass inputs on, for one run of a kernel.

    A turn is: `give` what the next device is to have, `turn`, then `take` what the one before has
    given. All devices make the same turns.
    """

    member: int
    """This device's place in the ring; pieces of the inputs are in this order."""
    size: int

    def give(self, lane: int, array: Any) -> None:
        """Pass an array on in a lane; it may be changed afterwards."""

    def turn(self) -> None:
        """Meet the other devices."""

    def take(self, lane: int, shape: tuple[int, ...]) -> Any:
        """What the device before gave in the last turn, an array of this shape: to be read until
        the next turn but one is begun with `give`.
        """


@dataclass(frozen=True, slots=True)
class Round:
    """Which inputs of an op go round, and what goes with them.

    Each of them has a lane; then, with `sums`, each has a second one, for its gradient.
    """

    on_devices: ClassVar[bool] = True

    inputs: tuple[int, ...]
    axis: int
    """By which all operands are then split, as far as they have more than one element there."""
    sums: bool = False
    """Whether sums go with the inputs, to which each device adds its part: of the inputs' shapes,
    in float32 where these are narrower. They end where they belong."""

    def signature(
        self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]
    ) -> Signature | None:
        """The layouts in which inputs go round; None where there is nothing to split."""
        if any(tensor.shape[self.axis] < 2 for tensor in (*inputs[: max(self.inputs) + 1],)):
            return None
        return Signature(tuple(map(self._entry, inputs)), tuple(map(self._entry, outputs)))

    def _entry(self, tensor: TensorType) -> Sbp:
        return Split(self.axis) if tensor.shape[self.axis] > 1 else BROADCAST

    def fits(self, signature: NdSignature) -> bool:
        """Whether the kernel can have inputs go round in a signature of a whole mesh: in any."""
        return True

    def mesh_axes(
        self, inputs: Sequence[NdSbp], outputs: Sequence[NdSbp], hierarchy: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The mesh axes along which inputs go round, in these layouts."""
        first = inputs[self.inputs[0]]
        return tuple(
            axis
            for axis, (entry, extent) in enumerate(zip(first.entries, hierarchy, strict=True))
            if extent > 1 and entry == Split(self.axis)
        )

    def lanes(
        self, types: Sequence[TensorType], regions: Sequence[Region], size: int
    ) -> tuple[TensorType, ...]:
        """The memory of each lane in a ring of this size, from inputs' global types and from this
        device's boxes of them: two flat pieces, each with room for the largest.
        """
        pieces = []
        for number in self.inputs:
            shape = [stop - start for start, stop in regions[number]]
            extent = types[number].shape[self.axis]
            first, last = balanced_range(extent, size, 0)
            shape[self.axis] = last - first
            pieces.append((element_count(shape), types[number].dtype))
        if self.sums:
            pieces += [(count, sum_dtype(dtype)) for count, dtype in tuple(pieces)]
        return tuple(TensorType((2, count), dtype) for count, dtype in pieces)

    def seconds(
        self,
        types: Sequence[TensorType],
        layouts: Sequence[NdSbp],
        axes: tuple[int, ...],
        hierarchy: tuple[int, ...],
        per_message: float,
        per_byte: float,
        hidden: float,
    ) -> float:
        """What the turns take: each a message, and as much of its bytes as takes longer than
        computing with the piece before, `hidden` seconds.
        """
        nbytes = 0
        for number in self.inputs:
            shape, dtype = types[number]
            parts = element_count(
                [
                    extent
                    for entry, extent in zip(layouts[number].entries, hierarchy, strict=True)
                    if isinstance(entry, Split)
                ]
            )
            size = dtype.itemsize + (sum_dtype(dtype).itemsize if self.sums else 0)
            nbytes += element_count(shape) // parts * size
        turns = element_count([hierarchy[axis] for axis in axes]) - 1
        return turns * (per_message + max(0.0, per_byte * nbytes - hidden))


def sum_dtype(dtype: DType) -> DType:
    """In which gradients of tensors of this dtype are added up on their way."""
    return DType.FLOAT32 if dtype.is_half else dtype
