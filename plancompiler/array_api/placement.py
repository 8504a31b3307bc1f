"""Where the functions of the array API make tensors: their `device` is a `pc.Placement`."""

from __future__ import annotations

from plancompiler.eager.world import current_world
from plancompiler.errors import UsageError
from plancompiler.ir import Placement
from plancompiler.ir.source import user_line


def default_device() -> Placement:
    """All ranks of this program, each with the whole value."""
    return Placement("cpu", list(range(current_world().size)))


def placement_of(device: Placement | None) -> Placement:
    """A device that a function was given, or the default one."""
    if device is None:
        return default_device()
    if not isinstance(device, Placement):
        raise UsageError(
            "a device of the array API is a pc.Placement here",
            source=user_line(),
            got=type(device).__name__,
            hint='pc.Placement("cpu", [0])',
        )
    return device
