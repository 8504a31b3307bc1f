"""Random draws of the public functions: the key that names each draw, and `generator=`.

A function that draws names `generator` in its signature and leaves the rest to `takes_generator`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from plancompiler.frontend.trace import current_recorder

Function = TypeVar("Function", bound=Callable[..., Any])

_HELP = """

With `generator` the numbers are those of that `pc.Generator`, else of the default one. TracingError
for one in a job, which draws from the seed that it is run with.
"""


def takes_generator(function: Function) -> Function:
    """Decorator: a function draws from what is given as its keyword `generator`.

    The function itself names `generator` in its signature for those who read it, and is never given
    one.
    """

    @wraps(function)
    def call(*args: Any, generator: Any = None, **named: Any) -> Any:
        if generator is None:
            return function(*args, **named)
        with current_recorder().drawing_from(generator):
            return function(*args, **named)

    call.__doc__ = (function.__doc__ or "").rstrip() + _HELP
    return cast("Function", call)


def key_of(given: int | None) -> int:
    """The key of a random op: what the user has given, else that of the next draw."""
    if given is not None:
        return given
    # One count for all random ops: equal keys would give related numbers.
    key: int = current_recorder().next_number("draw")
    return key
