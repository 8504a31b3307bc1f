"""Operations of communicators on arrays of devices: what each member asks of NCCL.

Members first show each other, over the transport of the host, what they call and of which dtype and
shape their arrays are. So different calls are found before NCCL would wait for ever, and those who
receive know what. Then each makes a `Launch`: the calls, and the copies around them.

Arrays of the host are exchanged as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from plancompiler.errors import AttributeValueError, ExecutionError
from plancompiler.executor.comm.operations import (
    Arrays,
    Operation,
    Operations,
    Shown,
    flat_range,
    flat_slice,
    joined_shape,
    reduction_of,
)
from plancompiler.executor.cuda.collective import (
    BoundProgram,
    Call,
    CallKind,
    Program,
    program_of,
)
from plancompiler.executor.cuda.interface import Communicator, DeviceArray, DeviceStream
from plancompiler.executor.memory import Array
from plancompiler.ir import DType, Reduction
from plancompiler.ir.shard import balanced_range
from plancompiler.ir.task import Primitive
from plancompiler.plan.plan import CollectiveSpec

Found = TypeVar("Found")


def _nothing() -> None:
    return None


@dataclass
class Launch(Generic[Found]):
    """One operation as work for a stream: `pack`, `call` and `unpack`, in this order."""

    found: Found
    """The result, whose elements are there when the work has run."""
    call: Callable[[Communicator, DeviceStream], object]
    """Makes the calls; between `group_start` and `group_end`."""
    pack: Callable[[], object] = _nothing
    unpack: Callable[[], object] = _nothing
    held: list[DeviceArray] = field(default_factory=list)
    """Arrays that must stay until the work has run, wherever it runs."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a member says of an array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))


def header_of(array: DeviceArray) -> Array:
    """What is shown of an array: its dtype and shape."""
    text = json.dumps([str(DType.parse(array.dtype)), array.shape])
    return np.frombuffer(text.encode(), np.uint8)


def read_header(shown: Array) -> Header:
    """What another member has shown."""
    dtype, shape = json.loads(shown.tobytes())
    return Header(DType.parse(dtype).numpy, tuple(shape))


class DeviceOperation(Operation[Found]):
    """One call of one member on arrays of its device."""

    __slots__ = ("launch", "taken")

    def __init__(
        self,
        op: str,
        call: str,
        taken: Arrays,
        launch: Callable[[Shown], Launch[Found]],
        *,
        alike: bool = False,
        peer: int | None = None,
    ) -> None:
        given = tuple(header_of(array) for array in taken)
        # Arrays of the host and of devices do not meet.
        super().__init__(op, f"{call} on devices", given, _unlaunched, alike=alike, peer=peer)
        self.taken = taken
        self.launch = launch
        """From what all members show to the work."""

    def described(self) -> Arrays:
        """See `Operation.described`."""
        return self.taken


def _unlaunched(shown: Shown) -> Any:
    raise ExecutionError("an operation on devices was run by a communicator of the host")


class DeviceOperations(Operations):
    """Makes the operations of one member whose arrays lie on a device.

    Reductions are NCCL's, in an order of its own that is the same for all members of an all_reduce;
    halves are reduced as halves.
    """

    def __init__(self, arrays: Any, ranks: tuple[int, ...], member: int) -> None:
        super().__init__(ranks, member)
        self._arrays = arrays

    def _mine(self, array: object) -> bool:
        return isinstance(array, self._arrays.ndarray)

    # --- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Array, reduction: Reduction | str) -> Operation[Array]:
        """See `Operations.all_reduce`."""
        if not self._mine(x):
            return super().all_reduce(x, reduction)
        how = reduction_of(reduction)
        whole = (0, x.size)
        program = Program((), (Call(CallKind.ALL_REDUCE, whole, whole),), ())

        def launch(shown: Shown) -> Launch[Array]:
            return self._reduced(shown, program, how, x, self._arrays.empty(x.shape, x.dtype))

        return DeviceOperation("all_reduce", f"all_reduce {how}", (x,), launch, alike=True)

    def reduce(self, x: Array, root: int, reduction: Reduction | str) -> Operation[Array | None]:
        """See `Operations.reduce`."""
        if not self._mine(x):
            return super().reduce(x, root, reduction)
        how, at = reduction_of(reduction), self.position(root)
        whole = (0, x.size)
        target = whole if at == self.member else None
        program = Program((), (Call(CallKind.REDUCE, whole, target, at),), ())

        def launch(shown: Shown) -> Launch[Array | None]:
            out = self._arrays.empty(x.shape, x.dtype)
            made: Launch[Any] = self._reduced(shown, program, how, x, out)
            if at != self.member:
                made.found = None
            return made

        return DeviceOperation("reduce", f"reduce {how} to {root}", (x,), launch, alike=True)

    def reduce_scatter(self, x: Array, axis: int, reduction: Reduction | str) -> Operation[Array]:
        """See `Operations.reduce_scatter`."""
        if not self._mine(x):
            return super().reduce_scatter(x, axis, reduction)
        how = reduction_of(reduction)
        piece = self.pieces(x, axis)[self.member]
        spec = CollectiveSpec(Primitive.REDUCE_SCATTER, -1, how, dst_axis=axis)
        program = program_of(spec, x.shape, piece.shape, self.size, self.member)

        def launch(shown: Shown) -> Launch[Array]:
            out = self._arrays.empty(piece.shape, x.dtype)
            return self._reduced(shown, program, how, x, out)

        call = f"reduce_scatter {how} axis {axis} of {x.shape}"
        return DeviceOperation("reduce_scatter", call, (x,), launch, alike=True)

    def _reduced(
        self, shown: Shown, program: Program, how: Reduction, x: Array, out: Array
    ) -> Launch[Array]:
        headers: Any = [(read_header(arrays[0]),) for arrays in shown]
        self.alike(headers)
        if not program.moves:
            return Launch(out, _no_calls)
        source = _contiguous(x)
        bound = BoundProgram(
            self._arrays, program, how, self.size, (source,), (out,), DType.parse(x.dtype)
        )
        return Launch(out, bound.call, lambda: bound.begin(0), bound.finish, [source, out, bound])

    # --- copies ---------------------------------------------------------------------------------

    def broadcast(self, x: Array | None, root: int) -> Operation[Array]:
        """See `Operations.broadcast`."""
        at = self.position(root)
        if at == self.member and not self._mine(x):
            return super().broadcast(x, root)

        def launch(shown: Shown) -> Launch[Array]:
            header = read_header(shown[at][0])
            out = self._arrays.empty(header.shape, header.dtype)
            return self._shared(out, [None] * at + [out], x, None)

        taken = (x,) if at == self.member and x is not None else ()
        return DeviceOperation("broadcast", f"broadcast from {root}", taken, launch)

    def all_gather(self, x: Array, axis: int) -> Operation[Array]:
        """See `Operations.all_gather`."""
        if not self._mine(x):
            return super().all_gather(x, axis)

        def launch(shown: Shown) -> Launch[Array]:
            headers = [read_header(arrays[0]) for arrays in shown]
            out = self._arrays.empty(joined_shape(headers, axis), x.dtype)
            if axis == 0:
                # Joined along the first axis, parts lie one after another.
                stops = np.cumsum([header.shape[0] for header in headers]).tolist()
                parts = [
                    out[stop - h.shape[0] : stop] for stop, h in zip(stops, headers, strict=True)
                ]
                return self._shared(out, parts, x, out if _all_equal(headers) else None)
            buffer = self._arrays.empty(out.size, x.dtype)
            parts, start = [], 0
            for header in headers:
                parts.append(buffer[start : start + header.size].reshape(header.shape))
                start += header.size
            made = self._shared(out, parts, x, buffer if _all_equal(headers) else None)
            made.unpack = lambda: np.concatenate(parts, axis=axis, out=out)
            made.held.append(buffer)
            return made

        return DeviceOperation("all_gather", f"all_gather axis {axis}", (x,), launch)

    def partial_all_gather(self, x: Array) -> Operation[Array]:
        """See `Operations.partial_all_gather`."""
        if not self._mine(x):
            return super().partial_all_gather(x)
        own = slice(*flat_range(x.size, self.size, self.member))

        def launch(shown: Shown) -> Launch[Array]:
            headers: Any = [(read_header(arrays[0]),) for arrays in shown]
            self.alike(headers)
            out = self._arrays.empty(x.shape, x.dtype)
            flat = out.reshape(-1)
            parts = [
                flat[slice(*flat_range(x.size, self.size, member))] for member in range(self.size)
            ]
            return self._shared(out, parts, _contiguous(x).reshape(-1)[own], None)

        call = f"partial_all_gather of {x.shape}"
        return DeviceOperation("partial_all_gather", call, (x,), launch, alike=True)

    def _shared(
        self,
        found: Array,
        parts: Sequence[Array | None],
        x: Array | None,
        joint: Array | None,
    ) -> Launch[Array]:
        """Contiguous part i from member i, to all; `joint` is memory of all parts, of one size."""
        own = None if x is None else _contiguous(x)

        def call(communicator: Communicator, stream: DeviceStream) -> None:
            if joint is not None:
                if joint.size:
                    communicator.all_gather(stream, own, joint)
                return
            for member, part in enumerate(parts):
                if part is not None and part.size:
                    source = own if member == self.member else part
                    communicator.broadcast(stream, source, part, member)

        return Launch(found, call, held=[own, found])

    # --- pieces for each other ------------------------------------------------------------------

    def gather(self, x: Array, root: int, axis: int) -> Operation[Array | None]:
        """See `Operations.gather`."""
        if not self._mine(x):
            return super().gather(x, root, axis)
        at = self.position(root)

        def launch(shown: Shown) -> Launch[Any]:
            headers = [read_header(arrays[0]) for arrays in shown]
            shape = joined_shape(headers, axis)
            if at != self.member:
                return self._moved(None, [(x, at)], [])
            pieces = self._empty(headers)
            made: Launch[Any] = self._moved(pieces, [(x, at)], list(enumerate(pieces)))
            self._join(made, pieces, axis, shape)
            return made

        return DeviceOperation("gather", f"gather axis {axis} to {root}", (x,), launch)

    def scatter(self, pieces: Sequence[Array] | None, root: int) -> Operation[Array]:
        """See `Operations.scatter`."""
        at = self.position(root)
        given = tuple(pieces or ()) if at == self.member else ()
        if at == self.member and not (given and all(map(self._mine, given))):
            return super().scatter(pieces, root)
        if at == self.member:
            self.check_each("scatter", given)

        def launch(shown: Shown) -> Launch[Array]:
            header = read_header(shown[at][self.member])
            out = self._arrays.empty(header.shape, header.dtype)
            return self._moved(out, [(each, to) for to, each in enumerate(given)], [(at, out)])

        return DeviceOperation("scatter", f"scatter from {root}", given, launch)

    def all_to_all(self, x: Array, split_axis: int, join_axis: int) -> Operation[Array]:
        """See `Operations.all_to_all`."""
        if not self._mine(x):
            return super().all_to_all(x, split_axis, join_axis)
        own = self.pieces(x, split_axis)

        def launch(shown: Shown) -> Launch[Any]:
            given = [read_header(arrays[0]) for arrays in shown]
            # What does not fit on one member must not be launched by the others. Pieces fit on all
            # of them where the whole arrays would.
            joined_shape(given, join_axis)
            headers = [self._cut(each, split_axis) for each in given]
            joint = joined_shape(headers, join_axis)
            pieces = self._empty(headers)
            made: Launch[Any] = self._moved(
                pieces, [(each, to) for to, each in enumerate(own)], list(enumerate(pieces))
            )
            self._join(made, pieces, join_axis, joint)
            return made

        call = f"all_to_all axes {split_axis} and {join_axis}"
        return DeviceOperation("all_to_all", call, (x,), launch)

    def exchange(self, pieces: Sequence[Array]) -> Operation[list[Array]]:
        """See `Operations.exchange`."""
        given = tuple(pieces)
        if not (given and all(map(self._mine, given))):
            return super().exchange(pieces)
        self.check_each("an exchange", given)

        def launch(shown: Shown) -> Launch[list[Array]]:
            found = self._empty([read_header(arrays[self.member]) for arrays in shown])
            return self._moved(
                found, [(each, to) for to, each in enumerate(given)], list(enumerate(found))
            )

        return DeviceOperation("exchange", "exchange", given, launch)

    def _cut(self, header: Header, axis: int) -> Header:
        """This member's balanced piece along an axis."""
        shape = list(header.shape)
        low, high = balanced_range(shape[axis], self.size, self.member)
        shape[axis] = high - low
        return Header(header.dtype, tuple(shape))

    def _empty(self, headers: Sequence[Header]) -> list[Array]:
        return [self._arrays.empty(header.shape, header.dtype) for header in headers]

    def _join(
        self, made: Launch[Any], pieces: list[Array], axis: int, shape: tuple[int, ...]
    ) -> None:
        """Let the result be the pieces, joined along an axis."""
        out = made.found = self._arrays.empty(shape, pieces[0].dtype)
        made.unpack = lambda: np.concatenate(pieces, axis=axis, out=out)
        made.held += [out, *pieces]

    def _moved(
        self,
        found: Found,
        sent: Sequence[tuple[Array, int]],
        received: Sequence[tuple[int, Array]],
    ) -> Launch[Found]:
        """Arrays to members, and from members; what a member has for itself is copied."""
        copies: list[tuple[Array, Array]] = []
        sends: list[tuple[Array, int]] = []
        for array, to in sent:
            if to != self.member:
                sends.append((_contiguous(array), to))
            else:
                copies += [(target, array) for source, target in received if source == to]

        def pack() -> None:
            for target, source in copies:
                np.copyto(target, source)

        def call(communicator: Communicator, stream: DeviceStream) -> None:
            for array, to in sends:
                if array.size:
                    communicator.send(stream, array, to)
            for source, target in received:
                if source != self.member and target.size:
                    communicator.receive(stream, target, source)

        held = [array for array, _ in (*sends, *sent)] + [target for _, target in received]
        return Launch(found, call, pack, held=held)

    # --- between two ----------------------------------------------------------------------------

    def send(self, x: Array, to: int) -> Operation[None]:
        """See `Operations.send`."""
        if not self._mine(x):
            return super().send(x, to)
        self.other("send", to)
        call = f"send from {self.ranks[self.member]} to {to}"
        return DeviceOperation("send", call, (x,), self._sending(x, to), peer=to)

    def recv(self, source: int) -> Operation[Array]:
        """See `Operations.recv`."""
        self.other("recv", source)

        def launch(shown: Shown) -> Launch[Array]:
            (arrays,) = (arrays for arrays in shown if arrays)
            header = read_header(arrays[0])
            out = self._arrays.empty(header.shape, header.dtype)
            return self._receiving(out, out, source)

        call = f"send from {source} to {self.ranks[self.member]}"
        return DeviceOperation("recv", call, (), launch, peer=source)

    def partial_send(self, x: Array, to: int, num: int, index: int) -> Operation[None]:
        """See `Operations.partial_send`."""
        if not self._mine(x):
            return super().partial_send(x, to, num, index)
        self.other("partial_send", to)
        piece = _contiguous(x).reshape(-1)[flat_slice("partial_send", x.size, num, index)]
        own = self.ranks[self.member]
        call = f"partial_send of slice {index} of {num} of {_counted(x)} from {own} to {to}"
        return DeviceOperation("partial_send", call, (piece,), self._sending(piece, to), peer=to)

    def partial_recv(self, out: Array, source: int, num: int, index: int) -> Operation[Array]:
        """See `Operations.partial_recv`."""
        if not self._mine(out):
            return super().partial_recv(out, source, num, index)
        self.other("partial_recv", source)
        if not out.flags.c_contiguous:
            raise AttributeValueError(
                "partial_recv writes to contiguous arrays only", got=f"strides {out.strides}"
            )
        target = out.reshape(-1)[flat_slice("partial_recv", out.size, num, index)]
        own = self.ranks[self.member]
        # With the dtype: what does not fit here must not be launched there.
        call = f"partial_send of slice {index} of {num} of {_counted(out)} from {source} to {own}"

        def launch(shown: Shown) -> Launch[Array]:
            return self._receiving(out, target, source)

        return DeviceOperation("partial_recv", call, (), launch, peer=source)

    def _sending(self, array: Array, to: int) -> Callable[[Shown], Launch[None]]:
        source, member = _contiguous(array), self._in_pair(to)

        def call(communicator: Communicator, stream: DeviceStream) -> None:
            if source.size:
                communicator.send(stream, source, member)

        return lambda shown: Launch(None, call, held=[source])

    def _receiving(self, found: Array, target: Array, source: int) -> Launch[Array]:
        member = self._in_pair(source)

        def call(communicator: Communicator, stream: DeviceStream) -> None:
            if target.size:
                communicator.receive(stream, target, member)

        return Launch(found, call, held=[found])

    def _in_pair(self, peer: int) -> int:
        """A rank's position in the group of this rank and itself, which are in order there."""
        return int(peer > self.ranks[self.member])


def _no_calls(communicator: Communicator, stream: DeviceStream) -> None:
    """There is nothing to move."""


def _counted(array: Array) -> str:
    return f"{array.size} {DType.parse(array.dtype)}"


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else array.copy()


def _all_equal(headers: Sequence[Header]) -> bool:
    return all(header.shape == headers[0].shape for header in headers)
