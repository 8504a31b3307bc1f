"""How to reach what runs ops at once, outside of all jobs.

Layers and optimizers work in jobs and on eager tensors, and lie below both. The package root says
how to reach the eager world.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in the package root, which must start quickly
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _not_set() -> Any:
    raise RuntimeError("the package root has not said how to reach the eager world")


_current: Callable[[], Any] = _not_set


def set_eager_world(current: Callable[[], Any]) -> None:
    """Say what returns the current eager world."""
    global _current
    _current = current


def eager_world() -> Any:
    """What runs ops at once: the eager world, which has `add` as a job's builder does."""
    return _current()
