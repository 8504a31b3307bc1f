"""Collectives as NCCL calls: a program of packing, calls and unpacking, bound to arrays.

NCCL knows flat buffers in equal parts. A piece along an inner tensor axis is not contiguous, so it
is packed first; parts of unequal size go as one broadcast or reduction for each member, launched as
a group. all_to_all is a group of sends and receives. What a program does follows from shapes alone
and is the same on all members.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.errors import TransportError
from plancompiler.executor.comm.reduce import accumulator, divide
from plancompiler.executor.cuda.interface import (
    Communicator,
    Device,
    DeviceArray,
    DeviceStream,
    grouped,
)
from plancompiler.executor.memory import Slots
from plancompiler.ir import DType, Reduction
from plancompiler.ir.shard import balanced_range
from plancompiler.ir.task import Primitive
from plancompiler.plan.plan import CollectiveSpec

Index = tuple[slice, ...]


class CallKind(enum.Enum):
    """A call of `Communicator`."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Call:
    """One call on elements of the flat send and receive buffers, (start, stop)."""

    kind: CallKind
    source: tuple[int, int] | None
    target: tuple[int, int] | None
    peer: int = -1
    """Root or peer."""


@dataclass(frozen=True, slots=True)
class Program:
    """How one member takes part in a collective of one value."""

    pack: tuple[tuple[Index, int], ...]
    """Pieces of the input and where they begin in the send buffer; empty where the input is it."""
    calls: tuple[Call, ...]
    unpack: tuple[tuple[Index, int], ...]
    """Pieces of the output and where they begin in the receive buffer; empty where it is that."""

    @property
    def moves(self) -> bool:
        """Whether any call has elements to move."""
        return any(
            start < stop
            for call in self.calls
            for start, stop in (part for part in (call.source, call.target) if part is not None)
        )


def program_of(
    spec: CollectiveSpec,
    source_shape: tuple[int, ...],
    target_shape: tuple[int, ...],
    members: int,
    own: int,
) -> Program:
    """What a member calls. Shapes are those of its input and output."""
    size = math.prod(target_shape)
    if spec.primitive is Primitive.ALL_REDUCE:
        return Program((), (Call(CallKind.ALL_REDUCE, (0, size), (0, size)),), ())
    if spec.primitive is Primitive.REDUCE_SCATTER:
        pack, parts = _pieces(source_shape, spec.dst_axis, members)
        mine = parts[own]
        target = (0, mine[1] - mine[0])
        if _equal(parts):
            whole = (0, math.prod(source_shape))
            calls: tuple[Call, ...] = (Call(CallKind.REDUCE_SCATTER, whole, target),)
        else:
            calls = tuple(
                Call(CallKind.REDUCE, part, target if root == own else None, root)
                for root, part in enumerate(parts)
                if part[0] < part[1]
            )
        return Program(pack, calls, ())
    if spec.primitive is Primitive.ALL_GATHER:
        unpack, parts = _pieces(target_shape, spec.src_axis, members)
        source = (0, math.prod(source_shape))
        if _equal(parts):
            calls = (Call(CallKind.ALL_GATHER, source, (0, size)),)
        else:
            calls = tuple(
                Call(CallKind.BROADCAST, source if root == own else None, part, root)
                for root, part in enumerate(parts)
                if part[0] < part[1]
            )
        return Program((), calls, unpack)
    if spec.primitive is Primitive.ALL_TO_ALL:
        pack, sent = _pieces(source_shape, spec.dst_axis, members)
        unpack, received = _pieces(target_shape, spec.src_axis, members)
        calls = (
            *(
                Call(CallKind.SEND, part, None, peer)
                for peer, part in enumerate(sent)
                if part[0] < part[1]
            ),
            *(
                Call(CallKind.RECEIVE, None, part, peer)
                for peer, part in enumerate(received)
                if part[0] < part[1]
            ),
        )
        return Program(pack, calls, unpack)
    raise TransportError("not a collective", got=str(spec.primitive))


def _pieces(
    shape: tuple[int, ...], axis: int, members: int
) -> tuple[tuple[tuple[Index, int], ...], list[tuple[int, int]]]:
    """Balanced pieces along an axis: where they go when packed, and their ranges there.

    Where the pieces lie one after another as it is, there is nothing to pack.
    """
    inner = math.prod(shape) // max(shape[axis], 1)
    moves, parts, start = [], [], 0
    for member in range(members):
        low, high = balanced_range(shape[axis], members, member)
        stop = start + (high - low) * inner
        if start < stop:
            moves.append(((*(slice(None),) * axis, slice(low, high)), start))
        parts.append((start, stop))
        start = stop
    return (() if math.prod(shape[:axis]) <= 1 else tuple(moves)), parts


def _equal(parts: Sequence[tuple[int, int]]) -> bool:
    sizes = {stop - start for start, stop in parts}
    return len(sizes) == 1


def bind_collective(
    device: Device,
    communicator: Communicator | None,
    stream: DeviceStream,
    spec: CollectiveSpec,
    own: int,
    members: int,
    values: Sequence[tuple[Slots, Slots]],
    dtype: DType,
) -> Callable[[int], object] | None:
    """A callable that launches a collective of several values, by version.

    `values` are the slots of inputs and outputs. Returns None where there is nothing to move.
    """
    if communicator is None:
        # Alone in its group: what every member reads of all is its own.
        alone = [_alone(sources, targets) for sources, targets in values]
        return lambda version: [each(version) for each in alone]
    bound = []
    reduces = spec.primitive in (Primitive.ALL_REDUCE, Primitive.REDUCE_SCATTER)
    how = (spec.reduction or Reduction.SUM) if reduces else None
    for sources, targets in values:
        program = program_of(spec, sources[0].shape, targets[0].shape, members, own)
        if program.moves:
            bound.append(
                BoundProgram(device.arrays, program, how, members, sources, targets, dtype)
            )
    if not bound:
        return None

    def run(version: int) -> None:
        for each in bound:
            each.begin(version)
        with grouped(communicator):
            for each in bound:
                each.call(communicator, stream)
        for each in bound:
            each.finish()

    return run


def _alone(sources: Slots, targets: Slots) -> Callable[[int], object]:
    return lambda version: np.copyto(
        targets[version % len(targets)], sources[version % len(sources)]
    )


class BoundProgram:
    """One value's part of a collective: a program on arrays, by slot."""

    def __init__(
        self,
        arrays: Any,
        program: Program,
        how: Reduction | None,
        members: int,
        sources: Slots,
        targets: Slots,
        dtype: DType,
    ) -> None:
        """`how` it reduces; None where it only moves. `arrays` is the device's namespace."""
        self._program = program
        self._how = how
        self._members = members
        self._sources, self._targets = sources, targets
        wire = dtype.numpy if how is None else wire_dtype(dtype, how)
        # Buffers of the collective's own, where what NCCL reads or writes is no register.
        converted = wire != sources[0].dtype
        self._send = arrays.empty(sources[0].size, wire) if program.pack or converted else None
        self._receive = arrays.empty(targets[0].size, wire) if program.unpack or converted else None
        self._from: DeviceArray = None
        self._to: DeviceArray = None
        self._target: DeviceArray = None

    def begin(self, version: int) -> None:
        """Bring the input where NCCL reads it."""
        source = self._sources[version % len(self._sources)]
        self._target = self._targets[version % len(self._targets)]
        self._from, self._to = source.reshape(-1), self._target.reshape(-1)
        if self._send is not None:
            if self._program.pack:
                for index, start in self._program.pack:
                    piece = source[index]
                    np.copyto(
                        self._send[start : start + piece.size].reshape(piece.shape),
                        piece,
                        casting="unsafe",
                    )
            else:
                np.copyto(self._send, self._from, casting="unsafe")
            self._from = self._send
        if self._receive is not None:
            self._to = self._receive

    def call(self, communicator: Communicator, stream: DeviceStream) -> None:
        """Make the calls."""
        how = Reduction.SUM if self._how in (None, Reduction.AVG) else self._how
        for call in self._program.calls:
            source = self._from[slice(*call.source)] if call.source is not None else None
            target = self._to[slice(*call.target)] if call.target is not None else None
            kind = call.kind
            if kind is CallKind.ALL_REDUCE:
                communicator.all_reduce(stream, source, target, how)
            elif kind is CallKind.REDUCE_SCATTER:
                communicator.reduce_scatter(stream, source, target, how)
            elif kind is CallKind.REDUCE:
                communicator.reduce(
                    stream, source, source if target is None else target, how, call.peer
                )
            elif kind is CallKind.ALL_GATHER:
                communicator.all_gather(stream, source, target)
            elif kind is CallKind.BROADCAST:
                communicator.broadcast(
                    stream, target if source is None else source, target, call.peer
                )
            elif kind is CallKind.SEND:
                communicator.send(stream, source, call.peer)
            else:
                communicator.receive(stream, target, call.peer)

    def finish(self) -> None:
        """Bring the result where its readers look for it."""
        if self._how is Reduction.AVG:
            divide(self._to, self._members)
        if self._receive is None:
            return
        if not self._program.unpack:
            np.copyto(self._target.reshape(-1), self._receive, casting="unsafe")
        for index, start in self._program.unpack:
            piece = self._target[index]
            np.copyto(
                piece,
                self._receive[start : start + piece.size].reshape(piece.shape),
                casting="unsafe",
            )


def wire_dtype(dtype: DType, how: Reduction) -> np.dtype[np.generic]:
    """The dtype in which NCCL reduces.

    Halves stay as they are, as they would be twice the bytes in float32. bool, which NCCL does not
    know, goes as whole numbers 0 and 1 (a sum is "or"), int16 as int32; averages of whole numbers
    have 64 bits, as on the CPU.
    """
    if dtype is DType.BOOL:
        return np.dtype(np.int32)
    if dtype.is_half:
        return dtype.numpy
    wide = accumulator(how, dtype.numpy)
    return np.dtype(np.int32) if wide == np.int16 else wide
