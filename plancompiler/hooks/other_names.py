"""How packages say that a name does not exist, and what is called so elsewhere: the table of names
is above them.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in the package root, which must start quickly
if TYPE_CHECKING:
    from collections.abc import Callable


def _not_set(owner: str, name: str) -> AttributeError:
    return AttributeError(f"{owner} has no attribute {name!r}")


_known: Callable[[str, str], AttributeError] = _not_set


def set_other_names(known: Callable[[str, str], AttributeError]) -> None:
    """Register the function that makes the error for a name that an owner does not have."""
    global _known
    _known = known


def no_such_name(owner: str, name: str) -> AttributeError:
    """The error for a name that `pc`, a namespace of it (`pc.nn`) or a tensor (`x`) lacks."""
    special = name.startswith("_")
    return _not_set(owner, name) if special else _known(owner, name)
