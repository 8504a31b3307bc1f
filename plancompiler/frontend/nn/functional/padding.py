"""Padding of the last axes by a value, by reflection, by the edge, or around the end."""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.frontend.functions.elementwise import clone
from plancompiler.frontend.functions.shape import concat, expand, flip
from plancompiler.frontend.functions.shape import pad as pad_all
from plancompiler.frontend.nn.functional.public import public
from plancompiler.ir.operators import whole_numbers


@public
def pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """The input with `pad` = (before, after) of the last axis, then of the one before it, and so
    on; negative numbers cut off.

    `mode` says what is there: "constant" the value (default 0), "reflect" the elements mirrored at
    the edge, without it, "replicate" the edge, "circular" the elements from the other end. Such
    an axis must be split over no devices, or is gathered.
    """
    numbers = whole_numbers("pad", pad)
    if len(numbers) % 2 or len(numbers) > 2 * input.ndim:
        raise AttributeValueError(
            "padding needs two numbers for each of the last axes",
            got=pad,
            expected=f"up to {input.ndim} pairs",
        )
    if mode not in _MODES and mode != "constant":
        raise AttributeValueError(
            "unknown mode of padding",
            got=repr(mode),
            expected=", ".join(("constant", *_MODES)),
        )
    amounts = {
        input.ndim - 1 - place: (numbers[2 * place], numbers[2 * place + 1])
        for place in range(len(numbers) // 2)
    }
    x = input
    for axis, (before, after) in amounts.items():
        low, high = max(0, -before), x.shape[axis] - max(0, -after)
        if low > high:
            raise ShapeError(
                "negative padding cuts off more than there is",
                got=(before, after),
                expected=f"at most {x.shape[axis]} elements of axis {axis}",
            )
        grows = mode != "constant" and max(before, after) > 0
        if grows and mode != "circular":
            x = _grown(x, axis, max(0, before), max(0, after), mode)
            high = x.shape[axis] - max(0, -after)
        if (low, high) != (0, x.shape[axis]):
            x = _part(x, axis, low, high)
        if grows and mode == "circular":  # what was cut off does not come back around the end
            x = _grown(x, axis, max(0, before), max(0, after), mode)
    if not any(max(each) > 0 for each in amounts.values()):
        return clone(x)
    if mode != "constant":
        return x
    pairs = [amounts.get(axis, (0, 0)) for axis in range(x.ndim)]
    number = 0 if value is None else value if x.dtype.is_floating else int(value)
    return pad_all(
        x, [max(0, each[0]) for each in pairs], [max(0, each[1]) for each in pairs], number
    )


def _part(x: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return x[(*(slice(None),) * axis, slice(start, stop))]


_MODES = ("reflect", "replicate", "circular")


def _grown(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """One axis with elements before and after it."""
    extent = x.shape[axis]
    most = {"reflect": extent - 1, "circular": extent, "replicate": before + after}[mode]
    if max(before, after) > most or not extent:
        raise ShapeError(
            f"{mode} padding needs more elements",
            got=f"padding {before} and {after} of {extent} elements",
            expected=f"at most {most}",
        )
    if mode == "reflect":
        first = flip(_part(x, axis, 1, before + 1), axis)
        last = flip(_part(x, axis, extent - 1 - after, extent - 1), axis)
    elif mode == "circular":
        first, last = _part(x, axis, extent - before, extent), _part(x, axis, 0, after)
    else:
        shape = list(x.shape)
        shape[axis] = before
        first = expand(_part(x, axis, 0, 1), shape)
        shape[axis] = after
        last = expand(_part(x, axis, extent - 1, extent), shape)
    parts = [(before, first), (extent, x), (after, last)]
    return concat([part for count, part in parts if count], axis)
