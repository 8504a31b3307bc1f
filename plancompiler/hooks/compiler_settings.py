"""How to reach the class of all settings of the compiler.

A job holds the compiler's settings, but its package is below that of the passes that declare them.
So the package root registers a function that returns the class with the options of all passes.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in the package root, which must start quickly
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _not_set() -> Any:
    raise RuntimeError("the package root has not registered the compiler's settings")


_known: Callable[[], Any] = _not_set


def set_compiler_settings(known: Callable[[], Any]) -> None:
    """Register the function that returns the class."""
    global _known
    _known = known


def compiler_settings() -> Any:
    """The class of all settings."""
    return _known()
