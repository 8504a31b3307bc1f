"""Collectives as NCCL calls: a program's packing, calls and unpacking, bound to arrays.

NCCL knows flat buffers in equal parts. A part along an inner tensor axis is not contiguous, so it
is packed first; parts of unequal size go as one broadcast or reduction for each member, launched as
a group. What has another part for each reader is a group of sends and receives; what a member has
for itself is copied. Which calls those are follows from the program and from shapes that all
members know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from plancompiler.executor.comm.operations import (
    Header,
    Operation,
    PublishedArrays,
    joined_shape,
    read_headers,
)
from plancompiler.executor.comm.program import (
    EACH,
    Index,
    Program,
    Range,
    balanced,
    part_index,
    program_of,
)
from plancompiler.executor.comm.reduce import accumulator, divide
from plancompiler.executor.cuda.interface import (
    CallKind,
    Device,
    DeviceArray,
    DeviceCommunicator,
    DeviceStream,
    grouped,
)
from plancompiler.executor.memory import Slots
from plancompiler.ir import DType, Reduction
from plancompiler.plan.plan import CollectiveSpec

Result = TypeVar("Result")
WHOLE = -1
"""In place of the number of a part: all parts, one after another."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call on a part of the input, by reader, and one of the output, by giver."""

    kind: CallKind
    source: int | None
    target: int | None
    peer: int = -1
    """Root or peer."""


def calls_of(
    program: Program, own: int, members: int, sent: Sequence[int], received: Sequence[int]
) -> tuple[Call, ...]:
    """What a member calls. `sent` are the elements of its parts for each reader, `received` those
    of the parts that it takes from each giver; empty where it gives or takes nothing.
    """
    if not any(sent) and not any(received):
        return ()
    if members == 1:
        return (Call(CallKind.COPY, 0, 0),)
    reader, giver = program.reader, program.giver
    if program.how is not None:
        if program.cut is None and reader is None:
            return (Call(CallKind.ALL_REDUCE, 0, 0),)
        if program.cut is not None and _equal(sent):
            return (Call(CallKind.REDUCE_SCATTER, WHOLE, 0),)
        return tuple(
            Call(CallKind.REDUCE, root, 0 if root == own else None, root)
            for root in program.readers(members)
            if sent[root]
        )
    if program.cut is None and reader is None:
        if giver is None and _equal(received):
            return (Call(CallKind.ALL_GATHER, 0, WHOLE),)
        return tuple(
            Call(CallKind.BROADCAST, 0 if root == own else None, root, root)
            for root in program.givers(members)
            if received[root]
        )
    takers = [each for each in program.readers(members) if sent and sent[each]]
    sources = [each for each in program.givers(members) if received and received[each]]
    copied = [own] if own in takers and own in sources else []
    return (
        *(Call(CallKind.COPY, own, own) for _ in copied),
        *(Call(CallKind.SEND, peer, None, peer) for peer in takers if peer != own),
        *(Call(CallKind.RECEIVE, None, peer, peer) for peer in sources if peer != own),
    )


def _equal(sizes: Sequence[int]) -> bool:
    return len(set(sizes)) == 1


Side = Any
"""An input or output: one array, or an array for each member."""


class _Buffered:
    """The parts of an input or output where NCCL reads or writes them.

    That is the array itself, or a buffer where the parts of an array do not lie one after another,
    or it is not contiguous, or of another dtype there.
    """

    def __init__(
        self,
        arrays: Any,
        like: Side,
        axis: int | None,
        parts: Sequence[Range],
        members: int,
        wire: np.dtype[np.generic] | None,
    ) -> None:
        self.sizes: list[int]
        """Elements of each part."""
        self.moves: list[tuple[Index, int]] = []
        """What is packed, and where it begins in the buffer; empty where the whole is copied."""
        self.buffer: DeviceArray = None
        self._ranges: list[Range] = []
        if isinstance(like, Sequence):
            self.sizes = [each.size for each in like]
            return
        if axis is None:
            self.sizes = [like.size] * members
        else:
            inner = math.prod(like.shape) // max(like.shape[axis], 1)
            for low, high in parts:
                start = self._ranges[-1][1] if self._ranges else 0
                self._ranges.append((start, start + (high - low) * inner))
                if high > low and math.prod(like.shape[:axis]) > 1:
                    self.moves.append((part_index(axis, (low, high)), start))
            self.sizes = [stop - start for start, stop in self._ranges]
        if self.moves or wire not in (None, like.dtype) or not like.flags.c_contiguous:
            self.buffer = arrays.empty(like.size, wire or like.dtype)

    def part(self, side: Side, number: int) -> DeviceArray:
        """What NCCL reads or writes of one member's part."""
        if isinstance(side, Sequence):
            return side[number]
        flat = side.reshape(-1) if self.buffer is None else self.buffer
        return flat[slice(*self._ranges[number])] if self._ranges and number != WHOLE else flat

    def places(self, side: DeviceArray) -> Iterator[tuple[DeviceArray, DeviceArray]]:
        """Pieces of the array, and where they lie in the buffer."""
        if self.buffer is None:
            return
        if not self.moves:
            yield side, self.buffer.reshape(side.shape)
        for index, start in self.moves:
            piece = side[index]
            yield piece, self.buffer[start : start + piece.size].reshape(piece.shape)


class DeviceProgram:
    """One value's part of a collective: a program on arrays, by slot.

    `sources` are None on a member that gives nothing, `targets` on one that takes nothing; `joined`
    are the parts of an output along its axis, balanced ones unless said otherwise.
    """

    def __init__(
        self,
        arrays: Any,
        program: Program,
        own: int,
        members: int,
        sources: Sequence[Side] | None,
        targets: Sequence[Side] | None,
        dtype: DType | None = None,
        joined: Sequence[Range] | None = None,
    ) -> None:
        """`arrays` is the device's namespace; `dtype` that of what is reduced."""
        self._how = how = program.how
        self._members = members
        self._sources, self._targets = sources or (None,), targets or (None,)
        wire = None if how is None or dtype is None else wire_dtype(dtype, how)
        self._send = self._receive = None
        if sources:
            axis = None if program.cut == EACH else program.cut
            parts: Sequence[Range] = ()
            if axis is not None:
                parts = balanced(sources[0].shape[axis], members)
            self._send = _Buffered(arrays, sources[0], axis, parts, members, wire)
        if targets:
            parts = joined or ()
            if program.join is not None and joined is None:
                parts = balanced(targets[0].shape[program.join], members)
            self._receive = _Buffered(arrays, targets[0], program.join, parts, members, wire)
        self.calls = calls_of(
            program,
            own,
            members,
            self._send.sizes if self._send else (),
            self._receive.sizes if self._receive else (),
        )
        self._source: Side = None
        self._target: Side = None

    def begin(self, version: int) -> None:
        """Bring the input where NCCL reads it."""
        self._source = self._sources[version % len(self._sources)]
        self._target = self._targets[version % len(self._targets)]
        if self._send is not None:
            for piece, place in self._send.places(self._source):
                np.copyto(place, piece, casting="unsafe")
        for call in self.calls:
            if call.kind is CallKind.COPY:
                source, target = self._parts(call)
                np.copyto(target.reshape(-1), source.reshape(-1))

    def _parts(self, call: Call) -> tuple[DeviceArray, DeviceArray]:
        source = target = None
        if call.source is not None and self._send is not None:
            source = self._send.part(self._source, call.source)
        if call.target is not None and self._receive is not None:
            target = self._receive.part(self._target, call.target)
        return source, target

    def call(self, communicator: DeviceCommunicator, stream: DeviceStream) -> None:
        """Make the calls."""
        how = Reduction.SUM if self._how is Reduction.AVG else self._how
        for call in self.calls:
            if call.kind is CallKind.COPY:
                continue
            source, target = self._parts(call)
            if call.kind is CallKind.REDUCE and target is None:
                target = source
            elif call.kind is CallKind.BROADCAST and source is None:
                source = target
            communicator.call(call.kind, stream, source, target, how, call.peer)

    def finish(self) -> None:
        """Bring the result where its readers look for it."""
        if self._receive is None or not self.calls:
            return
        if self._how is Reduction.AVG:
            divide(self._receive.part(self._target, WHOLE), self._members)
        for piece, place in self._receive.places(self._target):
            np.copyto(piece, place, casting="unsafe")


def run_programs(
    programs: Sequence[DeviceProgram],
    communicator: DeviceCommunicator | None,
    stream: DeviceStream,
    version: int = 0,
) -> None:
    """Run programs together, on the stream on which this is launched; there is no communicator
    where a member is alone.
    """
    for program in programs:
        program.begin(version)
    if communicator is not None:
        with grouped(communicator):
            for program in programs:
                program.call(communicator, stream)
    for program in programs:
        program.finish()


def bind_collective(
    device: Device,
    communicator: DeviceCommunicator | None,
    stream: DeviceStream,
    spec: CollectiveSpec,
    own: int,
    members: int,
    values: Sequence[tuple[Slots, Slots]],
    dtype: DType,
) -> Callable[[int], object] | None:
    """A callable that launches a plan's collective of several values, by version.

    `values` are the slots of inputs and outputs. Returns None where there is nothing to move.
    """
    program = program_of(spec)
    bound = [
        DeviceProgram(device.arrays, program, own, members, sources, targets, dtype)
        for sources, targets in values
    ]
    return launcher_of(bound, communicator, stream)


def launcher_of(
    programs: Sequence[DeviceProgram], communicator: DeviceCommunicator | None, stream: DeviceStream
) -> Callable[[int], object] | None:
    """What runs programs together, by version; None where there is nothing to move."""
    moving = [each for each in programs if each.calls]
    if not moving:
        return None
    return lambda version: run_programs(moving, communicator, stream, version)


# --- operations of communicators ------------------------------------------------------------------


@dataclass
class Launch(Generic[Result]):
    """One operation as work for a stream."""

    result: Result
    """Its elements are there when the work has run."""
    program: DeviceProgram
    """Holds the arrays that must stay until then."""


def launch_of(
    arrays: Any, operation: Operation[Result], published: PublishedArrays
) -> Launch[Result]:
    """The work of an operation on arrays of a device, from what all members publish.

    What does not fit on one member must not be launched by the others, so each looks at all.
    """
    program, own, members = operation.program, operation.member, len(operation.ranks)
    headers = [read_headers(each[0]) for each in published if each]
    given = {
        reader: [each[0 if program.cut is None else reader] for each in headers]
        for reader in program.readers(members)
    }
    for parts in given.values():
        if program.how is not None:
            operation.check(parts)
        elif program.join is not None:
            joined_shape(parts, program.join)
    result: Any = None
    targets: list[Side] | None = None
    joined: list[Range] | None = None
    if headers and own in given:
        targets, result, joined = _output(arrays, operation, given[own])
    sources: list[Side] | None = None
    if operation.pieces:
        source: Side = operation.pieces[0]
        if program.cut == EACH:
            source = [_contiguous(piece) for piece in operation.pieces]
        elif program.cut is not None:
            source = operation.whole
        sources = [source]
    dtype = DType.parse(headers[0][0].dtype) if headers and program.how is not None else None
    bound = DeviceProgram(arrays, program, own, members, sources, targets, dtype, joined)
    return Launch(result, bound)


def _output(
    arrays: Any, operation: Operation[Any], parts: Sequence[Header]
) -> tuple[list[Side], Any, list[Range] | None]:
    """Where a member takes what comes: for its program, for its caller, and cut how."""
    program, first = operation.program, parts[0]
    if operation.into is not None:
        target, result = operation.into
        return [target], result, None
    if program.join is not None:
        axis = program.join
        out = arrays.empty(joined_shape(parts, axis), first.dtype)
        stops = np.cumsum([part.shape[axis] for part in parts]).tolist()
        ranges = list(zip([0, *stops[:-1]], stops, strict=True))
        shape = operation.shape
        return [out], out if shape is None else out.reshape(shape), ranges
    if program.how is None and program.giver is None:
        outs = [arrays.empty(part.shape, part.dtype) for part in parts]
        return [outs], outs, None
    out = arrays.empty(first.shape, first.dtype)
    return [out], out, None


def _contiguous(array: DeviceArray) -> DeviceArray:
    return array if array.flags.c_contiguous else array.copy()


def wire_dtype(dtype: DType, how: Reduction) -> np.dtype[np.generic]:
    """The dtype in which NCCL reduces.

    Halves stay as they are, as they would be twice the bytes in float32. bool, which NCCL does not
    know, goes as whole numbers 0 and 1 (a sum is "or"), those of 16 bits as int32; averages of
    whole numbers have 64 bits, as on the CPU.
    """
    if dtype is DType.BOOL:
        return np.dtype(np.int32)
    if dtype.is_half:
        return dtype.numpy
    wide = accumulator(how, dtype.numpy)
    return np.dtype(np.int32) if wide in (np.int16, np.uint16) else wide
