"""The operations of a communicator: what each member offers, and by which program.

An `Operation` is one call of one member, not yet run. It is run by itself, on a communicator
stream, or together with others. All reductions of arrays of the host are in rank order, so that all
members get the same bits.

Arrays of a device stay there. Of those the members tell each other dtypes and shapes, and the
device runs the program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.executor.comm.program import EACH, Program
from plancompiler.executor.comm.reduce import CHUNKED_BYTES, plan_reduction
from plancompiler.executor.memory import Array
from plancompiler.ir import DType, Reduction
from plancompiler.ir.shard import balanced_range, element_count, flat_range, flat_slice

BLOCK_BYTES = 2 << 20
"""What an all_reduce publishes at once: rendezvous between processes have room for it."""

Arrays = tuple[Array, ...]
ALL = -1
Targets = tuple[int, ...] | None
"""Which member reads each array, ALL for all of them; None: all members read all arrays."""
Result = TypeVar("Result")
PublishedArrays = Sequence[Arrays]
"""What each member publishes."""

_program = lru_cache(maxsize=256)(Program)
_BARRIER = Program(reader=ALL, giver=ALL)
"""Nobody gives or takes anything."""
_ALL_REDUCE = {reduction: f"all_reduce {reduction}" for reduction in Reduction}
_ALL_REDUCED = {reduction: Program(reduction) for reduction in Reduction}


class Rounds(Protocol):
    """How an operation that takes several rounds meets the other members."""

    def round(
        self,
        call: str,
        arrays: Arrays,
        take: Callable[[PublishedArrays], Result],
        targets: Targets = None,
    ) -> Result:
        """Publish arrays; returns what `take` makes of those of all members, when nobody reads this
        member's arrays any more.
        """


class Header(NamedTuple):
    """What a member says of an array of its device."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return element_count(self.shape)


def headers_of(arrays: Arrays) -> Array:
    """What is published of arrays of a device: dtypes and shapes."""
    text = json.dumps([[str(DType.parse(array.dtype)), array.shape] for array in arrays])
    return np.frombuffer(text.encode(), np.uint8)


def read_headers(published: Array) -> list[Header]:
    """What another member has published of its arrays."""
    return [
        Header(DType.parse(dtype).numpy, tuple(shape))
        for dtype, shape in json.loads(published.tobytes())
    ]


class Operation(Generic[Result]):
    """One call of one member."""

    given: Arrays
    """What this member publishes: its pieces, or on devices what they are."""
    on_device = False
    same_shape = False
    """Whether all members must have one dtype and shape."""
    whole: Array | None = None
    """The input of which the pieces are views, where it is one array."""
    shape: tuple[int, ...] | None = None
    """Of the result, where it is not that of what comes."""
    peer: int | None = None
    """The other rank, where only two of the group take part."""
    into: tuple[Array, Array] | None = None
    """Where the result is written, and what is then given as the result."""
    rounds: Callable[[Rounds], Result] | None = None
    """What to do instead of publishing all at once; None for what takes one round."""

    def __init__(
        self,
        op: str,
        call: str,
        pieces: Arrays,
        program: Program,
        ranks: tuple[int, ...],
        member: int,
    ) -> None:
        self.op = op
        self.call = call
        """What all members must say alike."""
        self.pieces = self.given = pieces
        """What this member gives: an array for all readers, or one for each."""
        self.program = program
        self.ranks = ranks
        """Those that take part."""
        self.member = member
        """This rank's position among them."""

    def put_on_device(self) -> None:
        """Have the device run it. Calls on arrays of the host and of devices do not meet."""
        self.on_device = True
        self.call += " on devices"
        if self.pieces:
            self.given = (headers_of(self.pieces),)

    @property
    def targets(self) -> Targets:
        """Which member reads each array that is published."""
        if self.on_device or self.peer is not None or not self.pieces:
            return None
        if self.program.cut is not None:
            return tuple(range(len(self.pieces)))
        return None if self.program.reader is None else (self.program.reader,)

    def described(self) -> Arrays:
        """The input as the user gave it."""
        return self.pieces if self.whole is None else (self.whole,)

    def header(self) -> str:
        """What all members must have alike besides the call."""
        if not self.same_shape:
            return ""
        return ", ".join(f"{array.dtype.name}{list(array.shape)}" for array in self.described())

    def finish(self, published: PublishedArrays) -> Result:
        """This member's result, which shares no memory with what the members publish."""
        result: Any = None
        reader = self.program.reader
        if reader is None or reader == self.member:
            own = 0 if self.program.cut is None else self.member
            result = self._combined([arrays[own] for arrays in published if arrays])
        return result  # type: ignore[no-any-return]  # as its maker says

    def _combined(self, parts: list[Array]) -> Array | list[Array]:
        program = self.program
        if program.how is not None:
            self.check(parts)
            return reduced(parts, program.how).reshape(parts[0].shape)
        if program.join is not None:
            whole = joined(parts, program.join)
            return whole if self.shape is None else whole.reshape(self.shape)
        if program.giver is None:
            return [part.copy() for part in parts]
        if self.into is None:
            return parts[0].copy()
        target, result = self.into
        if parts[0].dtype != target.dtype:
            raise ShapeError(
                f"{self.op} got another dtype than its array has",
                got=str(parts[0].dtype),
                expected=str(target.dtype),
            )
        np.copyto(target, parts[0])
        return result

    def check(self, parts: Sequence[Described]) -> None:
        """Raise ShapeError unless all parts that are to be reduced are of one dtype and shape."""
        whole = None if self.whole is None else self.whole.shape
        check_reducible(self.ranks, parts, whole)


class Operations:
    """Makes the operations of one member of a group.

    `devices` is the namespace of the arrays of this rank's device; None in groups of the host.
    Reductions on devices are NCCL's, in an order of its own that is the same for all members of an
    all_reduce; halves are reduced as halves.
    """

    def __init__(self, ranks: tuple[int, ...], member: int, devices: Any = None) -> None:
        self.ranks = ranks
        self.member = member
        self.size = len(ranks)
        self._devices = devices

    # --- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Array, reduction: Reduction | str = Reduction.SUM) -> Operation[Array]:
        """The reduction of all members' arrays of one shape, on every member.

        float16 and bfloat16 are accumulated in float32; averages of whole numbers are rounded down;
        of bool, sum is "or" and prod is "and".
        """
        how, x = reduction_of(reduction), self._array("all_reduce", x)
        rounds = None
        if self.size > 1 and x.nbytes >= CHUNKED_BYTES and isinstance(x, np.ndarray):
            rounds = partial(self._chunked, x, how)
        operation = self._made("all_reduce", _ALL_REDUCE[how], (x,), _ALL_REDUCED[how])
        operation.same_shape = True
        operation.rounds = rounds
        return operation

    def _chunked(self, x: Array, how: Reduction, rounds: Rounds) -> Array:
        """Each member reduces its own chunk, and collects the others' (R. Rabenseifner, 2004)."""
        flat, out = x.reshape(-1), np.empty(x.size, x.dtype)
        step = BLOCK_BYTES // x.itemsize
        own = self.member
        members = tuple(range(self.size))
        shared = self.size, x.dtype.name, list(x.shape)
        for start in range(0, x.size, step):
            block, target = flat[start : start + step], out[start : start + step]
            cuts = [slice(*balanced_range(block.size, self.size, m)) for m in members]

            def reduce_own(published: PublishedArrays) -> Array:
                parts = [arrays[own] for arrays in published]
                check_reducible(self.ranks, parts, shared)
                return reduced(parts, how)

            def collect(published: PublishedArrays, target: Array = target) -> None:
                np.concatenate([arrays[0] for arrays in published], out=target)

            pieces = tuple(block[cut] for cut in cuts)
            call = f"all_reduce {how} of {x.size}"
            chunk = rounds.round(call, pieces, reduce_own, members)
            rounds.round("all_reduce, collecting", (chunk,), collect)
        return out.reshape(x.shape)

    def reduce(
        self, x: Array, root: int, reduction: Reduction | str = Reduction.SUM
    ) -> Operation[Array | None]:
        """The reduction of all members' arrays on rank `root`; None elsewhere."""
        how, x = reduction_of(reduction), self._array("reduce", x)
        program = _program(how, reader=self.position(root))
        operation = self._made("reduce", f"reduce {how} to {root}", (x,), program)
        operation.same_shape = True
        return operation

    def reduce_scatter(
        self, x: Array, axis: int = 0, reduction: Reduction | str = Reduction.SUM
    ) -> Operation[Array]:
        """This member's balanced piece, along `axis`, of the reduction of all arrays."""
        how, x = reduction_of(reduction), self._array("reduce_scatter", x)
        # Pieces of different arrays may have one shape: the whole shape must be said.
        call = f"reduce_scatter {how} axis {axis} of {x.shape}"
        pieces = self._pieces(x, axis)
        operation = self._made("reduce_scatter", call, pieces, _program(how, cut=axis))
        operation.same_shape = True
        operation.whole = x
        return operation

    # --- copies ---------------------------------------------------------------------------------

    def broadcast(self, x: Array | None, root: int) -> Operation[Array]:
        """The array of rank `root`, on every member; the others give None."""
        at = self.position(root)
        given: Arrays = ()
        if at == self.member:
            if x is None:
                raise AttributeValueError("the root of a broadcast gave no array", rank=root)
            given = (self._array("broadcast", x),)
        return self._made("broadcast", f"broadcast from {root}", given, _program(giver=at))

    def all_gather(self, x: Array, axis: int = 0) -> Operation[Array]:
        """All members' arrays joined along `axis`, in the order of the ranks; extents along it may
        differ.
        """
        x = self._array("all_gather", x)
        return self._made("all_gather", f"all_gather axis {axis}", (x,), _program(join=axis))

    def partial_all_gather(self, x: Array) -> Operation[Array]:
        """An array of the shape of `x`, flat slice i of which comes from slice i of member i.

        Slice i of n of m elements is [i·m/n, (i+1)·m/n), rounded down.
        """
        x = self._array("partial_all_gather", x)
        own = x.reshape(-1)[slice(*flat_range(x.size, self.size, self.member))]
        call = f"partial_all_gather of {x.shape}"
        operation = self._made("partial_all_gather", call, (own,), _program(join=0))
        operation.same_shape = True
        operation.whole, operation.shape = x, x.shape
        return operation

    def gather(self, x: Array, root: int, axis: int = 0) -> Operation[Array | None]:
        """All members' arrays joined along `axis` on rank `root`; None elsewhere."""
        program = _program(join=axis, reader=self.position(root))
        call = f"gather axis {axis} to {root}"
        return self._made("gather", call, (self._array("gather", x),), program)

    def scatter(self, pieces: Sequence[Array] | None, root: int) -> Operation[Array]:
        """This member's piece of those that rank `root` gives, one for each member."""
        at = self.position(root)
        given = self._for_each("scatter", pieces or ()) if at == self.member else ()
        return self._made("scatter", f"scatter from {root}", given, _program(cut=EACH, giver=at))

    def all_to_all(self, x: Array, split_axis: int = 0, join_axis: int = 0) -> Operation[Array]:
        """Balanced pieces along `split_axis` go to the members in order; what comes is joined along
        `join_axis`.
        """
        x = self._array("all_to_all", x)
        call = f"all_to_all axes {split_axis} and {join_axis}"
        pieces, program = self._pieces(x, split_axis), _program(cut=split_axis, join=join_axis)
        operation = self._made("all_to_all", call, pieces, program)
        operation.whole = x
        return operation

    def exchange(self, pieces: Sequence[Array]) -> Operation[list[Array]]:
        """The uneven all-to-all: piece i goes to member i; returns what came, by member. Shapes may
        all differ.
        """
        given = self._for_each("an exchange", pieces)
        return self._made("exchange", "exchange", given, _program(cut=EACH))

    def barrier(self) -> Operation[None]:
        """Return when all members have called it."""
        return Operation("barrier", "barrier", (), _BARRIER, self.ranks, self.member)

    # --- between two ----------------------------------------------------------------------------

    def send(self, x: Array, to: int) -> Operation[None]:
        """Give an array to rank `to`, which calls `recv`; returns when it has it."""
        own = self.ranks[self.member]
        return self._between("send", f"send from {own} to {to}", (self._array("send", x),), to)

    def recv(self, source: int) -> Operation[Array]:
        """The array that rank `source` sends."""
        own = self.ranks[self.member]
        return self._between("recv", f"send from {source} to {own}", (), source)

    def partial_send(self, x: Array, to: int, num: int, id: int) -> Operation[None]:  # noqa: A002  # the usual name
        """Give slice `id` of `num` of the flat array to rank `to`, which calls `partial_recv`.

        Of m elements that is [id·m/num, (id+1)·m/num), rounded down.
        """
        flat = self._array("partial_send", x).reshape(-1)
        piece = flat[flat_slice("partial_send", flat.size, num, id)]
        call = f"partial_send of slice {id} of {num} of {self._counted(flat)}"
        own = self.ranks[self.member]
        return self._between("partial_send", f"{call} from {own} to {to}", (piece,), to)

    def partial_recv(
        self,
        out: Array,
        source: int,
        num: int,
        id: int,  # noqa: A002  # the usual name
    ) -> Operation[Array]:
        """Write slice `id` of `num` of the flat `out`, which rank `source` sends, and no other
        element; returns `out`. It must be contiguous.
        """
        given, out = out, self._array("partial_recv", out)
        writeable = out.__class__ is not np.ndarray or out.flags.writeable
        if not out.flags.c_contiguous or not writeable or out is not given:
            raise AttributeValueError(
                "partial_recv writes to contiguous arrays in this machine's byte order only",
                got=f"{given.dtype.str} with strides {given.strides}",
            )
        own = self.ranks[self.member]
        target = out.reshape(-1)[flat_slice("partial_recv", out.size, num, id)]
        call = f"partial_send of slice {id} of {num} of {self._counted(out)}"
        call = f"{call} from {source} to {own}"
        return self._between("partial_recv", call, (), source, into=(target, out))

    def _between(
        self,
        op: str,
        call: str,
        given: Arrays,
        peer: int,
        into: tuple[Array, Array] | None = None,
    ) -> Operation[Any]:
        """What goes from this rank to another one, or comes from it where nothing is given."""
        own = self.ranks[self.member]
        if self.position(peer) == self.member:
            raise AttributeValueError(
                f"{op} needs another rank than this one",
                got=peer,
                expected=f"one of {[each for each in self.ranks if each != peer]}",
            )
        first, second = sorted((own, peer))
        here, there = int(own > peer), int(peer > own)
        program = (
            _program(reader=there, giver=here) if given else _program(reader=here, giver=there)
        )
        operation: Operation[Any] = Operation(op, call, given, program, (first, second), here)
        operation.peer, operation.into = peer, into
        if self._is_on_device((into[1],) if into else given):
            operation.put_on_device()
        return operation

    # --- checks ---------------------------------------------------------------------------------

    def _made(self, op: str, call: str, pieces: Arrays, program: Program) -> Operation[Any]:
        operation: Operation[Any] = Operation(op, call, pieces, program, self.ranks, self.member)
        if self._devices is not None and self._is_on_device(pieces):
            operation.put_on_device()
        return operation

    def _is_on_device(self, arrays: Arrays) -> bool:
        """Whether the device runs an operation on these arrays; on none, where the group has one.

        Arrays of the host are exchanged by the host everywhere.
        """
        if self._devices is None:
            return False
        kind = self._devices.ndarray
        return all(isinstance(array, kind) for array in arrays)

    def _array(self, op: str, value: Array) -> Array:
        """What operations take: an array of the host or of this rank's device."""
        if value.__class__ is np.ndarray and value.dtype.isnative:
            return value
        on_device = self._devices is not None and isinstance(value, self._devices.ndarray)
        return value if on_device else array_of(op, value)

    def _counted(self, array: Array) -> str:
        """The size of an array; on devices with its dtype, as what does not fit on one member must
        not be launched by the other.
        """
        if not self._is_on_device((array,)):
            return str(array.size)
        return f"{array.size} {DType.parse(array.dtype)}"

    def position(self, rank: int) -> int:
        """A rank's position in the group."""
        if rank not in self.ranks:
            raise AttributeValueError(
                "this rank is no member of the group", got=rank, expected=f"one of {self.ranks}"
            )
        return self.ranks.index(rank)

    def _pieces(self, x: Array, axis: int) -> Arrays:
        """A balanced piece along an axis for each member."""
        if not 0 <= axis < x.ndim:
            raise AttributeValueError(
                "an array is cut along an axis that it does not have",
                got=axis,
                expected=f"0 to {x.ndim - 1}",
            )
        before = (slice(None),) * axis
        return tuple(
            x[(*before, slice(*balanced_range(x.shape[axis], self.size, member)))]
            for member in range(self.size)
        )

    def _for_each(self, op: str, pieces: Sequence[Array]) -> Arrays:
        """As many arrays as there are members."""
        if len(pieces) != self.size:
            raise AttributeValueError(
                f"{op} needs a piece for each member", got=len(pieces), expected=self.size
            )
        if self._is_on_device(tuple(pieces)):
            return tuple(pieces)
        return tuple(array_of(op, piece) for piece in pieces)


def reduction_of(value: Reduction | str) -> Reduction:
    """A reduction by its name."""
    if value.__class__ is Reduction:
        return value
    try:
        return Reduction(value)
    except ValueError:
        raise AttributeValueError(
            "unknown reduction",
            got=repr(value),
            expected="one of " + ", ".join(map(str, Reduction)),
        ) from None


def array_of(op: str, value: Array) -> Array:
    """What operations on the host take: an array."""
    if not isinstance(value, np.ndarray):
        raise AttributeValueError(
            f"{op} takes an array", got=type(value).__name__, expected="a NumPy array"
        )
    if not value.dtype.isnative:  # its bytes would be read in this machine's order
        return value.astype(value.dtype.newbyteorder("="))
    return value


def reduced(sources: Sequence[Array], how: Reduction) -> Array:
    """A new flat array with the reduction of arrays of one shape."""
    # A reduction is planned over axes that can be cut, which a scalar has none of.
    given = [np.ascontiguousarray(one).reshape(-1) for one in sources]
    out = np.empty(given[0].shape, given[0].dtype)
    for move in plan_reduction(out, given, how):
        move()
    return out


def joined(pieces: Sequence[Array], axis: int) -> Array:
    """A new array of pieces along an axis."""
    check_joint(pieces, axis)
    try:
        return np.concatenate(pieces, axis=axis)
    except ValueError:
        raise unlike(pieces, axis) from None


class Described(Protocol):
    """What has a dtype and a shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""


def check_reducible(ranks: tuple[int, ...], parts: Sequence[Described], of: Any = None) -> None:
    """Raise ShapeError unless the members' parts are of one shape and dtype; `of` says what of."""
    first = parts[0]
    if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
        each = "; ".join(
            f"rank {rank}: {part.dtype}{list(part.shape)}"
            for rank, part in zip(ranks, parts, strict=True)
        )
        raise ShapeError(
            "a reduction needs arrays of one shape and dtype on all members",
            got=each if of is None else f"pieces {each}, here of {of}",
            expected=f"{first.dtype}{list(first.shape)} on all, as rank {ranks[0]} has it",
        )


def check_joint(pieces: Sequence[Described], axis: int) -> None:
    """Raise ShapeError or AttributeValueError unless pieces have one dtype, and such an axis."""
    if any(piece.dtype != pieces[0].dtype for piece in pieces):
        raise ShapeError(
            "pieces of different dtypes cannot be joined",
            got=", ".join(str(piece.dtype) for piece in pieces),
        )
    if not 0 <= axis < len(pieces[0].shape):
        raise AttributeValueError(
            "arrays are joined along an axis that they do not have",
            got=axis,
            expected=f"0 to {len(pieces[0].shape) - 1}",
        )


def joined_shape(pieces: Sequence[Described], axis: int) -> tuple[int, ...]:
    """The shape of pieces joined along an axis."""
    check_joint(pieces, axis)
    first = pieces[0].shape
    rest = first[:axis], first[axis + 1 :]
    if any((each.shape[:axis], each.shape[axis + 1 :]) != rest for each in pieces):
        raise unlike(pieces, axis)
    return (*rest[0], sum(each.shape[axis] for each in pieces), *rest[1])


def unlike(pieces: Sequence[Described], axis: int) -> ShapeError:
    """The error of pieces that do not fit together."""
    return ShapeError(
        f"pieces cannot be joined along axis {axis}",
        got="; ".join(f"{piece.dtype}{list(piece.shape)}" for piece in pieces),
        expected="one shape except along that axis",
    )
