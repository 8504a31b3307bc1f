"""Communicators for code that decides at run time what to exchange.

A `CommContext` is one rank's member of a group. Its collectives are written once, over a `Board`:
a place where the members show each other arrays. Each member reads what it needs straight from what
the others show, and reduces in rank order, so that all get the same bits.

Every call carries its name. Members that make different calls, or the same call with different
reductions or axes, get a TransportError that says what each of them called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError, TransportError
from plancompiler.executor.comm.reduce import plan_reduction
from plancompiler.executor.memory import Array
from plancompiler.ir import Reduction
from plancompiler.ir.shard import balanced_range

CHUNKED_BYTES = 64 << 10
"""From this size on the members of an all_reduce share the work instead of repeating it."""
BLOCK_BYTES = 2 << 20
"""What an all_reduce shows at once: boards between processes have room for it."""

Arrays = tuple[Array, ...]
Found = TypeVar("Found")


class Board(Protocol):
    """Where the members of one group show each other arrays."""

    ranks: tuple[int, ...]
    member: int
    """This rank's position in `ranks`."""

    def show(self, call: str, arrays: Arrays, label: str) -> list[tuple[str, Arrays]]:
        """Show arrays to all members; returns what each member called and shows, when all have.

        What is returned may be read until `leave`. `label` says what for in errors. Raises
        DeadlineError where a member does not come in time, AbortedError where one has failed.
        """

    def leave(self, label: str) -> None:
        """Return when nobody reads this rank's arrays any more."""


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective of this rank."""

    op: str
    nbytes: int
    """Of this rank's input."""
    group: tuple[int, ...]
    sequence: int
    """How many collectives the group had run before."""


class CommContext:
    """One rank's member of a group of ranks; made by `CommContextManager`.

    All members call the same methods in the same order. Arrays may be empty, and of any dtype that
    the system knows. Inputs are left alone; results are new arrays.
    """

    def __init__(
        self,
        board: Board,
        observe: Callable[[CommRecord], None],
        pair: Callable[[int], CommContext],
    ) -> None:
        self.ranks = board.ranks
        self.member = board.member
        self.sequence = 0
        self._board = board
        self._observe = observe
        self._pair = pair

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This member's rank."""
        return self.ranks[self.member]

    # --- reductions -----------------------------------------------------------------------------

    def all_reduce(self, x: Array, reduction: Reduction | str = Reduction.SUM) -> Array:
        """The reduction of all members' arrays of one shape, on every member."""
        how = _reduction(reduction)
        if self.size > 1 and x.nbytes >= CHUNKED_BYTES:
            return self._chunked_all_reduce(x, how)
        shown = self.show("all_reduce", f"all_reduce {how}", (x,))
        return self.left(_reduced(self._alike(shown), how, x.shape))

    def _chunked_all_reduce(self, x: Array, how: Reduction) -> Array:
        """Each member reduces its own chunk, and collects the others' (R. Rabenseifner, 2004)."""
        self._record("all_reduce", x.nbytes)
        flat, out = x.reshape(-1), np.empty(x.shape, x.dtype)
        step = BLOCK_BYTES // x.itemsize
        for start in range(0, x.size, step):
            block = flat[start : start + step]
            shown = self._shown(f"all_reduce {how} of {x.size}", (block,))
            mine = slice(*balanced_range(block.size, self.size, self.member))
            chunk = _reduced([one[mine] for one in self._alike(shown)], how, None)
            self._board.leave(self._label("all_reduce"))
            shown = self._shown("all_reduce, collecting", (chunk,))
            np.concatenate(
                [arrays[0] for arrays in shown], out=out.reshape(-1)[start : start + step]
            )
            self._board.leave(self._label("all_reduce"))
        self.sequence += 1
        return out

    def reduce(
        self, x: Array, root: int, reduction: Reduction | str = Reduction.SUM
    ) -> Array | None:
        """The reduction of all members' arrays on rank `root`; None elsewhere."""
        how, at = _reduction(reduction), self._position(root)
        shown = self.show("reduce", f"reduce {how} to {root}", (x,))
        sources = self._alike(shown)
        return self.left(_reduced(sources, how, x.shape) if at == self.member else None)

    def reduce_scatter(
        self, x: Array, axis: int = 0, reduction: Reduction | str = Reduction.SUM
    ) -> Array:
        """This member's balanced piece, along `axis`, of the reduction of all arrays."""
        how = _reduction(reduction)
        shown = self.show("reduce_scatter", f"reduce_scatter {how} axis {axis}", (x,))
        cut = _cut(x, axis, self.size, self.member)
        pieces = [one[cut] for one in self._alike(shown)]
        return self.left(_reduced(pieces, how, None))

    # --- copies ---------------------------------------------------------------------------------

    def broadcast(self, x: Array | None, root: int) -> Array:
        """The array of rank `root`, on every member; the others give None."""
        at = self._position(root)
        given: Arrays = () if x is None or at != self.member else (x,)
        if at == self.member and not given:
            raise AttributeValueError("the root of a broadcast gave no array", rank=root)
        shown = self.show("broadcast", f"broadcast from {root}", given)
        return self.left(shown[at][0].copy())

    def all_gather(self, x: Array, axis: int = 0) -> Array:
        """All members' arrays joined along `axis`, in the order of the ranks; extents along it may
        differ.
        """
        shown = self.show("all_gather", f"all_gather axis {axis}", (x,))
        return self.left(_joined([arrays[0] for arrays in shown], axis))

    def gather(self, x: Array, root: int, axis: int = 0) -> Array | None:
        """All members' arrays joined along `axis` on rank `root`; None elsewhere."""
        at = self._position(root)
        shown = self.show("gather", f"gather axis {axis} to {root}", (x,))
        pieces = [arrays[0] for arrays in shown]
        return self.left(_joined(pieces, axis) if at == self.member else None)

    def scatter(self, pieces: Sequence[Array] | None, root: int) -> Array:
        """This member's piece of those that rank `root` gives, one for each member."""
        at = self._position(root)
        given = tuple(pieces or ()) if at == self.member else ()
        if at == self.member and len(given) != self.size:
            raise AttributeValueError(
                "scatter needs a piece for each member", got=len(given), expected=self.size
            )
        shown = self.show("scatter", f"scatter from {root}", given)
        return self.left(shown[at][self.member].copy())

    def all_to_all(self, x: Array, split_axis: int = 0, join_axis: int = 0) -> Array:
        """Balanced pieces along `split_axis` go to the members in order; what comes is joined along
        `join_axis`.
        """
        call = f"all_to_all axes {split_axis} and {join_axis}"
        shown = self.show("all_to_all", call, (x,))
        pieces = [
            arrays[0][_cut(arrays[0], split_axis, self.size, self.member)] for arrays in shown
        ]
        return self.left(_joined(pieces, join_axis))

    def exchange(self, pieces: Sequence[Array]) -> list[Array]:
        """Piece i goes to member i; returns what came, by member. Shapes may all differ."""
        if len(pieces) != self.size:
            raise AttributeValueError(
                "an exchange needs a piece for each member", got=len(pieces), expected=self.size
            )
        shown = self.show("exchange", "exchange", tuple(pieces))
        return self.left([arrays[self.member].copy() for arrays in shown])

    def send(self, x: Array, to: int) -> None:
        """Give an array to rank `to`, which calls `recv`; returns when it has it."""
        self._position(to)
        pair = self._pair(to)
        pair.show("send", f"from {self.rank} to {to}", (x,))
        pair.left(None)

    def recv(self, source: int) -> Array:
        """The array that rank `source` sends."""
        at = self._position(source)
        pair = self._pair(source)
        shown = pair.show("recv", f"from {self.ranks[at]} to {self.rank}", ())
        return pair.left(shown[pair.ranks.index(source)][0].copy())

    def barrier(self) -> None:
        """Return when all members have called it."""
        self.show("barrier", "barrier", ())
        self._board.leave(self._label("barrier"))

    # --- what they share ------------------------------------------------------------------------

    def show(self, op: str, call: str, arrays: Arrays) -> list[Arrays]:
        """Show arrays and see those of all members; all must have made the same call."""
        self._record(op, sum(array.nbytes for array in arrays))
        shown = self._shown(call, arrays)
        self.sequence += 1
        return shown

    def _record(self, op: str, nbytes: int) -> None:
        self._observe(CommRecord(op, nbytes, self.ranks, self.sequence))

    def _shown(self, call: str, arrays: Arrays) -> list[Arrays]:
        found = self._board.show(call, arrays, self._label(call))
        calls = [name for name, _ in found]
        if any(name != call for name in calls):
            each = "; ".join(
                f"rank {rank}: {name}" for rank, name in zip(self.ranks, calls, strict=True)
            )
            raise TransportError(
                f"the members of ranks {list(self.ranks)} made different calls",
                got=f"collective {self.sequence}: {each}",
                expected="the same calls in the same order on all ranks",
            )
        return [arrays for _, arrays in found]

    def left(self, found: Found) -> Found:
        """A result, when nobody reads this rank's input any more."""
        self._board.leave(self._label("leaving"))
        return found

    def _label(self, what: str) -> str:
        return f"{what} (collective {self.sequence} of ranks {list(self.ranks)})"

    def _alike(self, shown: Sequence[Arrays]) -> list[Array]:
        """One array of each member, all of one shape and dtype."""
        found = [arrays[0] for arrays in shown]
        if any(one.shape != found[0].shape or one.dtype != found[0].dtype for one in found):
            raise ShapeError(
                "a reduction needs arrays of one shape and dtype on all members",
                got="; ".join(
                    f"rank {rank}: {one.dtype}{list(one.shape)}"
                    for rank, one in zip(self.ranks, found, strict=True)
                ),
            )
        return found

    def _position(self, rank: int) -> int:
        if rank not in self.ranks:
            raise AttributeValueError(
                "the root is no member of the group", got=rank, expected=f"one of {self.ranks}"
            )
        return self.ranks.index(rank)


def _reduction(value: Reduction | str) -> Reduction:
    try:
        return Reduction(value)
    except ValueError:
        raise AttributeValueError(
            "unknown reduction",
            got=repr(value),
            expected="one of " + ", ".join(map(str, Reduction)),
        ) from None


def _reduced(sources: Sequence[Array], how: Reduction, shape: tuple[int, ...] | None) -> Array:
    """A new array with the reduction of arrays of one shape."""
    out = np.empty(sources[0].shape, sources[0].dtype)
    # A reduction is planned over axes that can be cut, which a scalar has none of.
    flat = out.reshape(-1)
    given = [np.ascontiguousarray(one).reshape(-1) for one in sources]
    for move in plan_reduction(flat, given, how):
        move()
    return out if shape is None else out.reshape(shape)


def _joined(pieces: Sequence[Array], axis: int) -> Array:
    if any(piece.dtype != pieces[0].dtype for piece in pieces):
        raise ShapeError(
            "pieces of different dtypes cannot be joined",
            got=", ".join(str(piece.dtype) for piece in pieces),
        )
    if not 0 <= axis < pieces[0].ndim:
        raise AttributeValueError(
            "arrays are joined along an axis that they do not have",
            got=axis,
            expected=f"0 to {pieces[0].ndim - 1}",
        )
    try:
        return np.concatenate(pieces, axis=axis)
    except ValueError:
        raise ShapeError(
            f"pieces cannot be joined along axis {axis}",
            got="; ".join(f"{piece.dtype}{list(piece.shape)}" for piece in pieces),
            expected="one shape except along that axis",
        ) from None


def _cut(array: Array, axis: int, members: int, member: int) -> tuple[slice, ...]:
    """Index of a member's balanced piece along an axis."""
    if not 0 <= axis < array.ndim:
        raise AttributeValueError(
            "an array is cut along an axis that it does not have",
            got=axis,
            expected=f"0 to {array.ndim - 1}",
        )
    piece = slice(*balanced_range(array.shape[axis], members, member))
    return (*(slice(None),) * axis, piece)
