"""Frozen dataclasses as protobuf messages, and back, by the names of their fields.

The annotation of a field says how it crosses: numbers, flags, texts and bytes as they are, an enum
as its value, a dataclass as a message, a tuple as a repeated field, `X | None` by presence. The
annotations of a class are read once. The message may have more fields than the class.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar

from plancompiler.errors import ErrorReport, WireFormatError

Record = TypeVar("Record")
Message = TypeVar("Message")

TEXT_LIMITS: dict[type, int] = {ErrorReport: 16 << 10}
"""Characters of each text of a class that cross the wire; what is over them is cut."""
_NOTHING: Mapping[str, Any] = {}
_PLAIN = (int, float, bool, str, bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class FieldForm:
    """How the values of a field cross; None where they do as they are."""

    write: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None
    is_optional: bool = False
    is_record: bool = False


class Codec(Generic[Record]):
    """Writes and reads the records of one class."""

    def __init__(self, cls: type[Record]) -> None:
        hints = typing.get_type_hints(cls)
        names = [each.name for each in dataclasses.fields(cls)]  # type: ignore[arg-type]  # a dataclass
        self.forms = {name: _form(hints[name], TEXT_LIMITS.get(cls)) for name in names}
        self._cls: Callable[..., Record] = cls
        self._name = cls.__name__
        get = attrgetter(*names)  # of one name it gives no tuple
        self._values = get if len(names) > 1 else lambda holder: (get(holder),)
        self._writes = [(name, form.write) for name, form in self.forms.items() if form.write]
        self._reads = [
            (name, form) for name, form in self.forms.items() if form.read or form.is_optional
        ]

    def plain(self, record: Record, given: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
        """The values of a record by name as a protobuf constructor takes them, or those given."""
        values = dict(zip(self.forms, self._values(record), strict=True))
        if given:
            values.update(given)
        for name, write in self._writes:
            if name not in given and values[name] is not None:
                values[name] = write(values[name])
        return values

    def read(self, message: Any, given: Mapping[str, Any] = _NOTHING) -> Record:
        """The record in a message, with the values that are given; a WireFormatError where it
        lacks a part or holds one that this version does not know.
        """
        if not self._reads and not given:
            return self._cls(*self._values(message))
        values = dict(zip(self.forms, self._values(message), strict=True))
        values.update(given)
        for name, form in self._reads:
            if name in given:
                continue
            if (form.is_optional or form.is_record) and not message.HasField(name):
                if not form.is_optional:
                    raise WireFormatError(f"a {self._name} came without its {name}")
                values[name] = None
            elif form.read is not None:
                values[name] = form.read(values[name])
        return self._cls(**values)

    def read_bare(self, value: Any) -> Record:
        """The record whose only field has this value in its message."""
        (form,) = self.forms.values()
        return self._cls(value if form.read is None else form.read(value))


_CODECS: dict[type, Codec[Any]] = {}


def codec(cls: type[Record]) -> Codec[Record]:
    """The codec of a class."""
    known = _CODECS.get(cls)
    if known is None:
        known = _CODECS[cls] = Codec(cls)
    return known


def encode(message: type[Message], record: Any) -> Message:
    """A record as a message of this class."""
    return message(**codec(type(record)).plain(record))


def decode(cls: type[Record], message: Any) -> Record:
    """The record in a message, as `Codec.read` has it."""
    return codec(cls).read(message)


def _form(hint: Any, longest: int | None) -> FieldForm:
    arguments = typing.get_args(hint)
    if isinstance(hint, UnionType):
        (inner,) = (each for each in arguments if each is not NoneType)
        return dataclasses.replace(_form(inner, longest), is_optional=True)
    if typing.get_origin(hint) is tuple:
        return _tuple_form(_form(arguments[0], longest))
    if dataclasses.is_dataclass(hint):
        inner = codec(typing.cast("type[Any]", hint))
        return FieldForm(inner.plain, inner.read, is_record=True)
    if issubclass(hint, enum.Enum):
        return FieldForm(attrgetter("value"), functools.partial(_member, hint))
    if hint is str and longest is not None:
        cut = itemgetter(slice(longest))
        return FieldForm(cut, cut)
    if hint not in _PLAIN:
        raise TypeError(f"a field of type {hint} has no wire form")
    return FieldForm()


def _tuple_form(item: FieldForm) -> FieldForm:
    write, read = item.write, item.read
    return FieldForm(
        None if write is None else lambda rows: [write(each) for each in rows],
        tuple if read is None else lambda rows: tuple([read(each) for each in rows]),
    )


def _member(members: type[enum.Enum], value: object) -> enum.Enum:
    try:
        return members(value)
    except ValueError:
        raise WireFormatError(
            f"a message names an unknown {members.__name__}", got=repr(value)
        ) from None
