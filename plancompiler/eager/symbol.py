"""`Symbol`: takes the place of a tensor's numbers while a function is compiled, and afterwards."""

from __future__ import annotations

from typing import Any, NoReturn

from plancompiler.eager.spec import PreparedOp
from plancompiler.errors import TracingError
from plancompiler.ir import SourceLine, Value
from plancompiler.ir.source import user_line


def no_numbers() -> TracingError:
    """The error for reading numbers while a function is compiled."""
    return TracingError(
        "the numbers of a tensor are not known while a function is compiled",
        source=user_line(),
        hint="read numbers (numpy, item, to_local, `if tensor:`) outside of the function, or "
        "choose by data with pc.where",
    )


class Symbol:
    """A value of the job in place of an array. Using it as an array raises a TracingError.

    After the function has been traced, the symbol only says where it was made: a tensor that the
    program has kept represents a value of every call, and has no numbers of its own.
    """

    __slots__ = ("leaked", "seen", "value", "view")

    value: Value
    view: tuple[Any, PreparedOp[Any]] | None
    """Of a view: the tensor whose memory it shares, and the op that makes it of that."""
    seen: Value | None
    """The base's value when the view was last made of it."""

    def __init__(self, value: Value) -> None:
        self.value = value
        self.view = self.seen = None
        self.leaked: tuple[str, SourceLine] | None = None
        """The function that was traced, and where in it the tensor was made."""

    def leak(self, name: str, source: SourceLine) -> None:
        """Hold nothing of the trace any more."""
        if self.leaked is None:
            self.leaked = name, source
            del self.value, self.view, self.seen

    def error(self) -> TracingError:
        """The error for reading the numbers."""
        if self.leaked is None:
            return no_numbers()
        name, source = self.leaked
        return TracingError(
            "a tensor of a compiled function was used after the function was traced: it represents "
            "a value of every call and has no numbers of its own",
            source=user_line(),
            got=f"a tensor made in {name!r} at {source}",
            expected="a tensor that the compiled function returns",
            hint=f"return the tensor from {name!r}, and use what the call gives",
        )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise self.error()

    __getattr__ = __array__ = __array_ufunc__ = __array_function__ = _refuse
    __len__ = __getitem__ = __setitem__ = _refuse
