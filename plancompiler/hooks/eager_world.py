"""How to reach the eager world, which runs ops outside of jobs.

Layers and optimizers work in jobs and on eager tensors, but their package is below that of eager
tensors. So the package root registers a function that returns the eager world.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in the package root, which must start quickly
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _not_set() -> Any:
    raise RuntimeError("the package root has not registered the eager world")


_current: Callable[[], Any] = _not_set


def set_eager_world(current: Callable[[], Any]) -> None:
    """Register the function that returns the current eager world."""
    global _current
    _current = current


def eager_world() -> Any:
    """The current eager world, which has a method `add` as a job's builder has."""
    return _current()
