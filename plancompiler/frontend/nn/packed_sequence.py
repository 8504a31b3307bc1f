"""Batches of sequences of several lengths, for recurrent layers.

PyTorch's functions of the same names put the steps of all sequences side by side, as many as there
are. Here such a batch stays padded and knows its lengths, so that its shape does not depend on
what is in it: the same program runs eagerly, compiled and in jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from plancompiler.errors import AttributeValueError, ShapeError, TracingError, UsageError
from plancompiler.frontend.functions.shape import pad, stack
from plancompiler.frontend.nn.functional.recurrence import Lengths
from plancompiler.frontend.trace import constant
from plancompiler.ir.operators import TensorOperators, whole_numbers
from plancompiler.ir.source import user_line


class PackedSequence(NamedTuple):
    """Sequences of several lengths, which recurrent layers take and give."""

    padded: Any
    """All of them, [t, n, ...]; what lies after an end counts for nothing."""
    lengths: Any
    """How many steps each has: int64 [n]."""


def pack_padded_sequence(
    input: Any,  # noqa: A002  # PyTorch's name
    lengths: Any,
    batch_first: bool = False,
    enforce_sorted: bool = True,
) -> PackedSequence:
    """Sequences [t, n, ...] (with `batch_first` [n, t, ...]) of these lengths, from 1 to t each: a
    list, or a tensor of whole numbers [n]. They may stand in any order, whatever `enforce_sorted`.

    Steps that no sequence has are left out where the lengths are known. Eager, a tensor of lengths
    is read for that, which is a collective; in jobs and compiled functions it is not known.
    """
    x = _times_first(input) if batch_first else input
    if x.ndim < 2:
        raise ShapeError("a batch of sequences has two axes", got=x.shape, expected="[t, n, ...]")
    steps, count = x.shape[:2]
    if isinstance(lengths, TensorOperators):
        if not lengths.dtype.is_integer or lengths.shape != (count,):
            raise ShapeError(
                "each sequence needs a length",
                got=f"{lengths.dtype} of shape {lengths.shape}",
                expected=f"whole numbers of shape ({count},)",
            )
        numbers: Any = lengths
        known: tuple[int, ...] | None
        try:
            known = (int(numbers.min()), int(numbers.max())) if count else ()
        except TracingError:
            known = None
        held = numbers.cast("int64")
    else:
        known = whole_numbers("lengths", lengths)
        if len(known) != count:
            raise ShapeError(
                "each sequence needs a length", got=f"{len(known)} lengths", expected=count
            )
        held = constant(known, "int64", x.placement)
    if known is not None:
        if any(not 1 <= each <= steps for each in known):
            raise AttributeValueError(
                "a sequence has another length than its batch has steps for",
                op="pack_padded_sequence",
                source=user_line(),
                got=f"{min(known)} to {max(known)}",
                expected=f"1 to {steps}",
            )
        x = x[: max(known, default=steps)]
    return PackedSequence(x, held)


def pad_packed_sequence(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Any, Any]:
    """The sequences as [t, n, ...] (with `batch_first` [n, t, ...]), with `padding_value` after
    their ends, and their lengths int64 [n]; of `total_length` steps, if that is given.
    """
    if not isinstance(sequence, PackedSequence):
        raise UsageError(
            "pad_packed_sequence takes what pack_padded_sequence gives",
            op="pad_packed_sequence",
            source=user_line(),
            got=type(sequence).__name__,
        )
    x, lengths = sequence
    steps, count = x.shape[:2]
    flat = x.reshape((steps, count, -1)) if x.size else x.reshape((steps, count, 0))
    x = Lengths(flat, lengths).kept(flat, padding_value).reshape(x.shape)
    if total_length is not None:
        if total_length < steps:
            raise ShapeError(
                "there are longer sequences than the total length", got=total_length, expected=steps
            )
        rest = (0,) * (x.ndim - 1)
        number = padding_value if x.dtype.is_floating else int(padding_value)
        x = pad(x, (0, *rest), (total_length - steps, *rest), number)
    return _times_first(x) if batch_first else x, lengths


def pad_sequence(
    sequences: Sequence[Any],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    """Sequences [t, ...] of several lengths as one batch [t, n, ...] (with `batch_first`
    [n, t, ...]), with `padding_value` after the shorter ones, or before them on the "left" side.
    """
    if not sequences:
        raise UsageError("pad_sequence needs at least one sequence", got="none")
    if padding_side not in ("right", "left"):
        raise AttributeValueError(
            "padding stands on one side", got=repr(padding_side), expected="right or left"
        )
    steps = max(each.shape[0] for each in sequences)
    rows = []
    for each in sequences:
        missing, rest = steps - each.shape[0], (0,) * (each.ndim - 1)
        low, high = (0, missing) if padding_side == "right" else (missing, 0)
        number = padding_value if each.dtype.is_floating else int(padding_value)
        rows.append(pad(each, (low, *rest), (high, *rest), number) if missing else each)
    return stack(rows, 0 if batch_first else 1)


def pack_sequence(sequences: Sequence[Any], enforce_sorted: bool = True) -> PackedSequence:
    """Sequences [t, ...] of several lengths, in any order; see `pack_padded_sequence`."""
    lengths = [each.shape[0] for each in sequences]
    return pack_padded_sequence(pad_sequence(sequences), lengths)


def _times_first(x: Any) -> Any:
    return x.transpose((1, 0, *range(2, x.ndim)))
