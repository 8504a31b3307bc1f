"""Basic indexing with steps."""

from __future__ import annotations

from typing import Any

from plancompiler.errors import AttributeValueError
from plancompiler.ir import AttrValue
from plancompiler.ir.operators import TensorOperators


def strided(tensor: TensorOperators, index: Any) -> TensorOperators:
    """Basic indexing with slices of any positive step."""
    entries = index if isinstance(index, tuple) else (index,)
    at = next((at for at, entry in enumerate(entries) if entry is Ellipsis), None)
    if at is not None:
        missing = tensor.ndim - len(entries) + 1
        entries = (*entries[:at], *(slice(None),) * missing, *entries[at + 1 :])
    starts, stops, steps = [], [], []
    whole: list[Any] = []
    for axis, extent in enumerate(tensor.shape):
        entry = entries[axis] if axis < len(entries) else slice(None)
        start, stop, step = 0, extent, 1
        if isinstance(entry, slice):
            start, stop, step = entry.indices(extent)
            if step < 1:
                raise AttributeValueError(
                    "a slice must have a positive step",
                    got=repr(entry),
                    hint="pc.flip walks an axis backwards",
                )
            entry = slice(None)
        starts.append(start)
        stops.append(max(start, stop))
        steps.append(step)
        whole.append(entry)
    attrs: dict[str, AttrValue] = {
        "starts": tuple(starts),
        "stops": tuple(stops),
        "steps": tuple(steps),
    }
    part = tensor._apply("strided_slice", (tensor,), attrs)[0]  # noqa: SLF001  # what every tensor has
    return part[tuple(whole)]
