"""What the operations of a communicator are: what each member shows, and makes of what it sees.

An `Operation` is one call of one member, not yet run. It is run by itself, on a communicator
stream, or together with others. All reductions are in rank order, so that all get the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.executor.comm.reduce import CHUNKED_BYTES, plan_reduction
from plancompiler.executor.memory import Array
from plancompiler.ir import Reduction
from plancompiler.ir.shard import balanced_range

BLOCK_BYTES = 2 << 20
"""What an all_reduce shows at once: boards between processes have room for it."""

Arrays = tuple[Array, ...]
ALL = -1
Targets = tuple[int, ...] | None
"""Which member reads each array, ALL for all of them; None: all members read all arrays."""
Found = TypeVar("Found")
Shown = Sequence[Arrays]
"""What each member shows."""

_ALL_REDUCE = {reduction: f"all_reduce {reduction}" for reduction in Reduction}


def board_digest(ranks: tuple[int, ...], stream: str) -> bytes:
    """16 bytes by which the members of a group know its board on a stream."""
    name = f"{','.join(map(str, ranks))} {stream}"
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


class Link(Protocol):
    """How an operation that takes several rounds meets the other members."""

    def round(
        self, call: str, arrays: Arrays, take: Callable[[Shown], Found], targets: Targets = None
    ) -> Found:
        """Show arrays; returns what `take` makes of what all members show, when nobody reads this
        member's arrays any more.
        """


class Operation(Generic[Found]):
    """One call of one member."""

    __slots__ = ("alike", "call", "finish", "given", "op", "peer", "rounds", "targets", "whole")

    def __init__(
        self,
        op: str,
        call: str,
        given: Arrays,
        finish: Callable[[Shown], Found],
        *,
        targets: Targets = None,
        alike: bool = False,
        peer: int | None = None,
        rounds: Callable[[Link], Found] | None = None,
        whole: Array | None = None,
    ) -> None:
        self.op = op
        self.call = call
        """What all members must say alike."""
        self.given = given
        """What this member shows."""
        self.finish = finish
        """From what all members show to this member's result, which shares no memory with it."""
        self.targets = targets
        self.peer = peer
        """The other rank, where only two of the group take part."""
        self.rounds = rounds
        """What to do instead of showing all at once; None for what takes one round."""
        self.whole = whole
        """The input of which `given` are pieces, where it is one array."""
        self.alike = alike
        """Whether dtypes and shapes must be alike on all members."""

    def described(self) -> Arrays:
        """The input as the user gave it."""
        return self.given if self.whole is None else (self.whole,)

    def header(self) -> str:
        """What all members must have alike besides the call."""
        if not self.alike:
            return ""
        return ", ".join(f"{array.dtype.name}{list(array.shape)}" for array in self.described())


class Operations:
    """Makes the operations of one member of a group."""

    def __init__(self, ranks: tuple[int, ...], member: int) -> None:
        self.ranks = ranks
        self.member = member
        self.size = len(ranks)

    # --- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Array, reduction: Reduction | str) -> Operation[Array]:
        """The reduction of all members' arrays of one shape, on every member."""
        how, x = reduction_of(reduction), array_of("all_reduce", x)
        call = _ALL_REDUCE[how]
        if self.size > 1 and x.nbytes >= CHUNKED_BYTES:
            rounds = partial(self._chunked, x, how)
            return Operation("all_reduce", call, (x,), _nothing, alike=True, rounds=rounds)
        return Operation("all_reduce", call, (x,), partial(self._whole, how, x.shape), alike=True)

    def _whole(self, how: Reduction, shape: tuple[int, ...], shown: Shown) -> Array:
        return reduced(self.alike(shown), how).reshape(shape)

    def _chunked(self, x: Array, how: Reduction, link: Link) -> Array:
        """Each member reduces its own chunk, and collects the others' (R. Rabenseifner, 2004)."""
        flat, out = x.reshape(-1), np.empty(x.size, x.dtype)
        step = BLOCK_BYTES // x.itemsize
        own = self.member
        members = tuple(range(self.size))
        shared = self.size, x.dtype.name, list(x.shape)
        for start in range(0, x.size, step):
            block, target = flat[start : start + step], out[start : start + step]
            cuts = [slice(*balanced_range(block.size, self.size, m)) for m in members]

            def reduce_own(shown: Shown) -> Array:
                return reduced(self.alike([(arrays[own],) for arrays in shown], shared), how)

            def collect(shown: Shown, target: Array = target) -> None:
                np.concatenate([arrays[0] for arrays in shown], out=target)

            pieces = tuple(block[cut] for cut in cuts)
            call = f"all_reduce {how} of {x.size}"
            chunk = link.round(call, pieces, reduce_own, members)
            link.round("all_reduce, collecting", (chunk,), collect)
        return out.reshape(x.shape)

    def reduce(self, x: Array, root: int, reduction: Reduction | str) -> Operation[Array | None]:
        """The reduction of all members' arrays on rank `root`; None elsewhere."""
        how, at, x = reduction_of(reduction), self.position(root), array_of("reduce", x)

        def finish(shown: Shown) -> Array | None:
            if at != self.member:
                return None
            return reduced(self.alike(shown), how).reshape(x.shape)

        call = f"reduce {how} to {root}"
        return Operation("reduce", call, (x,), finish, alike=True, targets=(at,))

    def reduce_scatter(self, x: Array, axis: int, reduction: Reduction | str) -> Operation[Array]:
        """This member's balanced piece, along `axis`, of the reduction of all arrays."""
        how, x = reduction_of(reduction), array_of("reduce_scatter", x)
        pieces = self.pieces(x, axis)

        def finish(shown: Shown) -> Array:
            own = pieces[self.member]
            found = self.alike([(arrays[self.member],) for arrays in shown], x.shape)
            return reduced(found, how).reshape(own.shape)

        return Operation(
            "reduce_scatter",
            # Pieces of different arrays may have one shape: the whole shape must be said.
            f"reduce_scatter {how} axis {axis} of {x.shape}",
            pieces,
            finish,
            targets=tuple(range(self.size)),
            alike=True,
            whole=x,
        )

    # --- copies ---------------------------------------------------------------------------------

    def broadcast(self, x: Array | None, root: int) -> Operation[Array]:
        """The array of rank `root`, on every member; the others give None."""
        at = self.position(root)
        given: Arrays = ()
        if at == self.member:
            if x is None:
                raise AttributeValueError("the root of a broadcast gave no array", rank=root)
            given = (array_of("broadcast", x),)

        def finish(shown: Shown) -> Array:
            return shown[at][0].copy()

        return Operation("broadcast", f"broadcast from {root}", given, finish)

    def all_gather(self, x: Array, axis: int) -> Operation[Array]:
        """All members' arrays joined along `axis`, in the order of the ranks."""
        x = array_of("all_gather", x)

        def finish(shown: Shown) -> Array:
            return joined([arrays[0] for arrays in shown], axis)

        return Operation("all_gather", f"all_gather axis {axis}", (x,), finish)

    def partial_all_gather(self, x: Array) -> Operation[Array]:
        """Flat slice i of the result is slice i of member i; all arrays have one shape."""
        x = array_of("partial_all_gather", x)
        pieces = self.pieces(x.reshape(-1), 0, flat_range)

        def finish(shown: Shown) -> Array:
            return joined([arrays[0] for arrays in shown], 0).reshape(x.shape)

        call = f"partial_all_gather of {x.shape}"
        given = (pieces[self.member],)
        return Operation("partial_all_gather", call, given, finish, alike=True, whole=x)

    def gather(self, x: Array, root: int, axis: int) -> Operation[Array | None]:
        """All members' arrays joined along `axis` on rank `root`; None elsewhere."""
        at, x = self.position(root), array_of("gather", x)

        def finish(shown: Shown) -> Array | None:
            if at != self.member:
                return None
            return joined([arrays[0] for arrays in shown], axis)

        call = f"gather axis {axis} to {root}"
        return Operation("gather", call, (x,), finish, targets=(at,))

    def scatter(self, pieces: Sequence[Array] | None, root: int) -> Operation[Array]:
        """This member's piece of those that rank `root` gives, one for each member."""
        at = self.position(root)
        given: Arrays = ()
        if at == self.member:
            given = self.for_each("scatter", pieces or ())

        def finish(shown: Shown) -> Array:
            return shown[at][self.member].copy()

        targets = tuple(range(len(given)))
        return Operation("scatter", f"scatter from {root}", given, finish, targets=targets)

    def all_to_all(self, x: Array, split_axis: int, join_axis: int) -> Operation[Array]:
        """Balanced pieces along `split_axis` go to the members in order; what comes is joined along
        `join_axis`.
        """
        x = array_of("all_to_all", x)
        pieces = self.pieces(x, split_axis)

        def finish(shown: Shown) -> Array:
            return joined([arrays[self.member] for arrays in shown], join_axis)

        return Operation(
            "all_to_all",
            f"all_to_all axes {split_axis} and {join_axis}",
            pieces,
            finish,
            targets=tuple(range(self.size)),
            whole=x,
        )

    def exchange(self, pieces: Sequence[Array]) -> Operation[list[Array]]:
        """Piece i goes to member i; returns what came, by member. Shapes may all differ."""
        given = self.for_each("an exchange", pieces)

        def finish(shown: Shown) -> list[Array]:
            return [arrays[self.member].copy() for arrays in shown]

        targets = tuple(range(self.size))
        return Operation("exchange", "exchange", given, finish, targets=targets)

    def barrier(self) -> Operation[None]:
        """Return when all members have called it."""
        return Operation("barrier", "barrier", (), _nothing)

    # --- between two ----------------------------------------------------------------------------

    def send(self, x: Array, to: int) -> Operation[None]:
        """Give an array to rank `to`, which calls `recv`."""
        self.other("send", to)
        own = self.ranks[self.member]
        x = array_of("send", x)
        return Operation("send", f"send from {own} to {to}", (x,), _nothing, peer=to)

    def recv(self, source: int) -> Operation[Array]:
        """The array that rank `source` sends."""
        self.other("recv", source)
        own = self.ranks[self.member]

        def finish(shown: Shown) -> Array:
            (found,) = (arrays for arrays in shown if arrays)
            return found[0].copy()

        return Operation("recv", f"send from {source} to {own}", (), finish, peer=source)

    def partial_send(self, x: Array, to: int, num: int, index: int) -> Operation[None]:
        """Give flat slice `index` of `num` of an array to rank `to`, which calls `partial_recv`."""
        self.other("partial_send", to)
        flat = array_of("partial_send", x).reshape(-1)
        own = self.ranks[self.member]
        piece = flat[flat_slice("partial_send", flat.size, num, index)]
        call = f"partial_send of slice {index} of {num} of {flat.size} from {own} to {to}"
        return Operation("partial_send", call, (piece,), _nothing, peer=to)

    def partial_recv(self, out: Array, source: int, num: int, index: int) -> Operation[Array]:
        """Write flat slice `index` of `num` of `out`, and no other element; returns `out`."""
        self.other("partial_recv", source)
        given, out = out, array_of("partial_recv", out)
        if not out.flags.c_contiguous or not out.flags.writeable or out is not given:
            raise AttributeValueError(
                "partial_recv writes to contiguous arrays in this machine's byte order only",
                got=f"{given.dtype.str} with strides {given.strides}",
            )
        own = self.ranks[self.member]
        target = out.reshape(-1)[flat_slice("partial_recv", out.size, num, index)]
        call = f"partial_send of slice {index} of {num} of {out.size} from {source} to {own}"

        def finish(shown: Shown) -> Array:
            (found,) = (arrays[0] for arrays in shown if arrays)
            if found.dtype != target.dtype:
                raise ShapeError(
                    "partial_recv got another dtype than its array has",
                    got=str(found.dtype),
                    expected=str(target.dtype),
                )
            np.copyto(target, found)
            return out

        return Operation("partial_recv", call, (), finish, peer=source)

    # --- checks ---------------------------------------------------------------------------------

    def position(self, rank: int) -> int:
        """A rank's position in the group."""
        if rank not in self.ranks:
            raise AttributeValueError(
                "this rank is no member of the group", got=rank, expected=f"one of {self.ranks}"
            )
        return self.ranks.index(rank)

    def other(self, op: str, rank: int) -> None:
        """Another member than this one."""
        if self.position(rank) == self.member:
            raise AttributeValueError(
                f"{op} needs another rank than this one",
                got=rank,
                expected=f"one of {[each for each in self.ranks if each != rank]}",
            )

    def pieces(
        self,
        x: Array,
        axis: int,
        cut: Callable[[int, int, int], tuple[int, int]] = balanced_range,
    ) -> Arrays:
        """A piece along an axis for each member."""
        if not 0 <= axis < x.ndim:
            raise AttributeValueError(
                "an array is cut along an axis that it does not have",
                got=axis,
                expected=f"0 to {x.ndim - 1}",
            )
        before = (slice(None),) * axis
        return tuple(
            x[(*before, slice(*cut(x.shape[axis], self.size, member)))]
            for member in range(self.size)
        )

    def for_each(self, op: str, pieces: Sequence[Array]) -> Arrays:
        """As many arrays as there are members."""
        self.check_each(op, pieces)
        return tuple(array_of(op, piece) for piece in pieces)

    def check_each(self, op: str, pieces: Sequence[Array]) -> None:
        """Raise AttributeValueError unless there are as many as members."""
        if len(pieces) != self.size:
            raise AttributeValueError(
                f"{op} needs a piece for each member", got=len(pieces), expected=self.size
            )

    def alike(self, shown: Shown, of: Any = None) -> list[Array]:
        """One array of each member, all of one shape and dtype; `of` says what of in errors."""
        found = [arrays[0] for arrays in shown]
        first = found[0]
        if any(one.shape != first.shape or one.dtype != first.dtype for one in found):
            each = "; ".join(
                f"rank {rank}: {one.dtype}{list(one.shape)}"
                for rank, one in zip(self.ranks, found, strict=True)
            )
            raise ShapeError(
                "a reduction needs arrays of one shape and dtype on all members",
                got=each if of is None else f"pieces {each}, here of {of}",
                expected=f"{first.dtype}{list(first.shape)} on all, as rank {self.ranks[0]} has it",
            )
        return found


def _nothing(shown: Shown) -> Any:
    return None


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
    """What operations take: an array."""
    if not isinstance(value, np.ndarray):
        raise AttributeValueError(
            f"{op} takes an array", got=type(value).__name__, expected="a NumPy array"
        )
    if not value.dtype.isnative:  # its bytes would be read in this machine's order
        return value.astype(value.dtype.newbyteorder("="))
    return value


def flat_range(extent: int, parts: int, part: int) -> tuple[int, int]:
    """Slice `part` of `parts` of a flat array: from part·extent/parts, rounded down."""
    return part * extent // parts, (part + 1) * extent // parts


def flat_slice(op: str, extent: int, num: int, index: int) -> slice:
    """The same, with checked numbers."""
    if num < 1 or not 0 <= index < num:
        raise AttributeValueError(
            f"{op} needs the number of a slice",
            got=f"slice {index} of {num}",
            expected="0 <= id < num",
        )
    return slice(*flat_range(extent, num, index))


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


def joined_shape(pieces: Sequence[Described], axis: int) -> tuple[int, ...]:
    """The shape of pieces joined along an axis."""
    check_joint(pieces, axis)
    first = pieces[0].shape
    rest = first[:axis], first[axis + 1 :]
    if any((each.shape[:axis], each.shape[axis + 1 :]) != rest for each in pieces):
        raise unlike(pieces, axis)
    return (*rest[0], sum(each.shape[axis] for each in pieces), *rest[1])


class Described(Protocol):
    """What has a dtype and a shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""


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


def unlike(pieces: Sequence[Described], axis: int) -> ShapeError:
    """The error of pieces that do not fit together."""
    return ShapeError(
        f"pieces cannot be joined along axis {axis}",
        got="; ".join(f"{piece.dtype}{list(piece.shape)}" for piece in pieces),
        expected="one shape except along that axis",
    )
