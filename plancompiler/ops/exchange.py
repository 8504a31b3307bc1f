"""Rows that devices exchange while an op runs, in numbers that only the data tell.

An op whose kernel moves rows between devices says so by an `Exchange`: in one of its signatures the
first input and the output are split along their first axes, and the second input, which says what
goes where, is whole. Both sides then know how much to expect, and nothing but rows is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from plancompiler.ir.op import TensorType
from plancompiler.ir.sbp import BROADCAST, NdSbp, Split
from plancompiler.ir.shard import Region, element_count
from plancompiler.ops.rule import NdSignature, Signature


class Peers(Protocol):
    """This device's place among those with which an op exchanges rows."""

    member: int
    size: int

    def exchange(self, rows: Sequence[Any], coming: Sequence[range]) -> Sequence[Any]:
        """Give `rows[i]` to member i; returns what each has given to this one: of all rows that
        member i gives away, one after another, those in `coming[i]`. A kernel calls it once.
        """


@dataclass(frozen=True, slots=True)
class Exchange:
    """That an op's rows are exchanged by its kernel, on hosts: on devices the host would have to
    wait for the numbers of rows.
    """

    on_devices: ClassVar[bool] = False

    rows: Callable[[tuple[TensorType, ...], int], int]
    """From the inputs' global types and the number of devices: the most rows a device sends."""

    def signature(
        self, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]
    ) -> Signature | None:
        """The layouts in which rows are exchanged; None where there is nothing to split."""
        if inputs[0].shape[0] < 2 or outputs[0].shape[0] < 2:
            return None
        return Signature((Split(0), BROADCAST), (Split(0),))

    def fits(self, signature: NdSignature) -> bool:
        """Whether the kernel has all that it needs on a whole mesh: one cut of the rows, all of
        what says where they go.
        """
        rows, places = signature.inputs
        return (
            all(entry == BROADCAST for entry in places)
            and list(rows).count(Split(0)) == list(signature.outputs[0]).count(Split(0)) == 1
        )

    def mesh_axes(
        self, inputs: Sequence[NdSbp], outputs: Sequence[NdSbp], hierarchy: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The mesh axes along which rows are exchanged, in these layouts."""
        return tuple(
            axis
            for axis, extent in enumerate(hierarchy)
            if extent > 1
            and (inputs[0][axis], inputs[1][axis], outputs[0][axis])
            == (Split(0), BROADCAST, Split(0))
        )

    def lanes(
        self, types: tuple[TensorType, ...], regions: Sequence[Region], size: int
    ) -> tuple[TensorType, ...]:
        """The memory of what a device sends, from inputs' global types and its boxes of them."""
        width = element_count([stop - start for start, stop in regions[0][2:]])
        return (TensorType((self.rows(types, size), width), types[0].dtype),)

    def seconds(
        self,
        types: tuple[TensorType, ...],
        layouts: Sequence[NdSbp],
        axes: tuple[int, ...],
        hierarchy: tuple[int, ...],
        per_message: float,
        per_byte: float,
        hidden: float,
    ) -> float:
        """What it takes that rows are exchanged, if every device sends to all alike."""
        size = element_count([hierarchy[axis] for axis in axes])
        width = element_count(types[0].shape[2:]) * types[0].dtype.itemsize
        return (size - 1) * (per_message + per_byte * self.rows(types, size) / size * width)
