"""Records of a master as JSON text and back, by the annotations of their fields.

Numbers, flags and texts are themselves; bytes are hexadecimal text; sets, tuples, lists and deques
are lists; dicts are lists of pairs, so that their keys keep their types; a dataclass is an object
of its fields, which says under "is" of which class it is.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import typing
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar

Record = TypeVar("Record")
_IS = "is"


def to_json(record: object, leave_out: frozenset[str] = frozenset()) -> str:
    """A dataclass as text, without the fields that are to be left out."""
    return json.dumps(_fields(record, leave_out))


def from_json(cls: type[Record], text: str) -> Record:
    """What `to_json` has written; fields that it left out have their defaults. ValueError,
    TypeError or KeyError where the text is none of this class.
    """
    return typing.cast("Record", _reader(typing.cast("Hashable", cls))(json.loads(text)))


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    if isinstance(value, (tuple, list, set, frozenset, deque)):
        return [_plain(each) for each in value]
    return _fields(value)


def _fields(record: Any, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    names = (each.name for each in dataclasses.fields(record) if each.name not in leave_out)
    return {_IS: type(record).__name__} | {name: _plain(getattr(record, name)) for name in names}


@functools.cache
def _reader(hint: Hashable) -> Callable[[Any], Any]:
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (UnionType, typing.Union):
        return _union_reader([each for each in arguments if each is not NoneType])
    if origin in (tuple, set, deque, list):
        items = [_reader(each) for each in arguments if each is not Ellipsis]
        if origin is tuple and Ellipsis not in arguments:
            return lambda rows: tuple(read(row) for read, row in zip(items, rows, strict=True))
        (item,) = items
        return lambda rows: origin(map(item, rows))
    if origin is dict:
        key, value = map(_reader, arguments)
        return lambda rows: {key(name): value(each) for name, each in rows}
    if dataclasses.is_dataclass(origin):
        return functools.partial(_read_fields, origin, typing.get_type_hints(origin))
    if origin is bytes:
        return bytes.fromhex
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return origin
    if origin in (int, float, str, bool):
        return functools.partial(_checked, origin)
    raise TypeError(f"a field of type {hint} has no text form")


def _checked(cls: type, value: Any) -> Any:
    if not isinstance(value, (int, float) if cls is float else cls):
        raise TypeError(f"{value!r} is no {cls.__name__}")
    return value


def _read_fields(cls: Any, hints: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    given = {name: _reader(hints[name])(value) for name, value in values.items() if name != _IS}
    return cls(**given)


def _union_reader(members: list[Any]) -> Callable[[Any], Any]:
    records: list[Any] = [each for each in members if dataclasses.is_dataclass(each)]
    by_name = {each.__name__: each for each in records}
    (other,) = [each for each in members if each not in records] or [None]

    def read(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, dict):
            return _reader(by_name[value[_IS]])(value)
        return _reader(other)(value)

    return read
