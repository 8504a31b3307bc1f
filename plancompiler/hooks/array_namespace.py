"""How tensors reach the namespace of the Python array API, whose package is above theirs."""

from __future__ import annotations

TYPE_CHECKING = False  # as in the package root, which must start quickly
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _not_set(version: str | None) -> Any:
    raise RuntimeError("the package root has not registered the array API")


_known: Callable[[str | None], Any] = _not_set


def set_array_namespace(known: Callable[[str | None], Any]) -> None:
    """Register the function that returns the namespace of a version of the standard."""
    global _known
    _known = known


def array_namespace(version: str | None) -> Any:
    """The namespace of the Python array API, of a version or the latest one."""
    return _known(version)
