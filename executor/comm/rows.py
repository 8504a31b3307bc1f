"""Rows sent to the ranks of their experts and brought back, as many as there happen to be.

Experts are numbered over all members of a group, equally many on each: expert e is on member
e // experts. Every member gives its rows sorted by expert, and how many are for each.
"""

from __future__ import annotations

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.executor.comm.context import CommContext
from plancompiler.executor.memory import Array


def global_scatter(context: CommContext, rows: Array, counts: Array) -> tuple[Array, Array]:
    """Send each row to the member that has its expert: an uneven all-to-all.

    `rows` is [r, ...] and `counts` int64 [members · experts], which add up to r; zeros are allowed.
    Returns this member's rows, sorted by (own expert, member that they came from), and how many
    those are: int64 [experts, members].
    """
    by_member = _by_member(context, rows, counts)
    pieces = _cut(rows, by_member)
    with context.group() as group:
        told = group.exchange(list(by_member))
        sent = group.exchange(pieces)
    experts = [len(each) for each in told.wait()]
    if any(each != by_member.shape[1] for each in experts):
        raise ShapeError(
            "members have different numbers of experts",
            got=f"{experts} by member",
            expected=f"{by_member.shape[1]} on each",
        )
    # [members, experts]: what came is sorted by (member, expert).
    came = np.stack(told.wait())
    received = np.ascontiguousarray(came.T)
    return np.concatenate(sent.wait())[context.index(_order(came))], received


def global_gather(context: CommContext, rows: Array, counts: Array, received: Array) -> Array:
    """The inverse: bring the rows back to where they came from, in the order that they had.

    `rows` are as `global_scatter` gave them (or what became of them), `counts` what it was given
    and `received` what it found.
    """
    counts = _whole_numbers(counts)
    received = _whole_numbers(received)
    if received.ndim != 2 or received.shape[1] != context.size or received.sum() != len(rows):
        raise ShapeError(
            "global_gather needs the counts that global_scatter found",
            got=f"counts of shape {received.shape} and sum {received.sum()} for {len(rows)} rows",
            expected=f"(experts, {context.size}), together the rows",
        )
    came = received.T
    back = np.empty_like(rows)
    back[context.index(_order(came))] = rows
    pieces = _cut(back, came)
    returned = context.exchange(pieces)
    wanted = counts.reshape(context.size, -1).sum(axis=1).tolist()
    if [len(piece) for piece in returned] != wanted:
        raise ShapeError(
            "other rows came back than were sent",
            got=f"{[len(piece) for piece in returned]} by member",
            expected=str(wanted),
        )
    return np.concatenate(returned)


def _cut(rows: Array, counts: Array) -> list[Array]:
    """The rows for each member, of which there are as many as its row of counts says."""
    stops = np.cumsum(counts.sum(axis=1)).tolist()
    return [rows[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _by_member(context: CommContext, rows: Array, counts: Array) -> Array:
    """Counts as [members, experts], checked."""
    numbers = _whole_numbers(counts).reshape(-1)
    if rows.ndim == 0 or numbers.size == 0 or numbers.size % context.size:
        raise ShapeError(
            "global_scatter needs a count for each expert of each member",
            got=f"{numbers.size} counts for rows of shape {rows.shape}",
            expected=f"a multiple of {context.size} counts",
        )
    if numbers.min() < 0 or numbers.sum() != len(rows):
        raise AttributeValueError(
            "the counts do not fit the rows",
            got=f"{numbers.tolist()}, together {int(numbers.sum())}",
            expected=f"counts of at least 0, together {len(rows)}",
        )
    return numbers.reshape(context.size, -1)


def _whole_numbers(counts: Array) -> Array:
    numbers = np.asarray(counts)
    if numbers.dtype.kind not in "iu":
        raise AttributeValueError("counts are whole numbers", got=str(numbers.dtype))
    return numbers.astype(np.int64, copy=False)


def _order(came: Array) -> Array:
    """Where in (member, expert) order each row of (expert, member) order stands."""
    starts = np.concatenate([[0], np.cumsum(came.reshape(-1))])[:-1].reshape(came.shape)
    runs = [
        np.arange(start, start + count)
        for start, count in zip(starts.T.reshape(-1), came.T.reshape(-1), strict=True)
    ]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)
