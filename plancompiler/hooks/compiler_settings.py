"""How to reach the class of all settings of the compiler.

A job carries its settings to wherever it is compiled, and lies below the passes that declare them.
The package root says how to reach the class that holds the options of all of them.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in the package root, which must start quickly
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _not_set() -> Any:
    raise RuntimeError("the package root has not said how to reach the compiler's settings")


_known: Callable[[], Any] = _not_set


def set_compiler_settings(known: Callable[[], Any]) -> None:
    """Say what returns the class."""
    global _known
    _known = known


def compiler_settings() -> Any:
    """The class of all settings."""
    return _known()
