"""JSON from files and peers, read without trust: bounded in size, depth and number of parts before
anything is built, and typed when it is looked at.

`parse_json` gives plain values; `JsonObject` hands out an object's fields as what they must be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from plancompiler.errors import PlanCompilerError, WireFormatError

MAX_BYTES = 64 << 20
MAX_PARTS = 4 << 20
"""Values in a text, nested ones included: a short text may stand for many small objects."""
MAX_DEPTH = 16
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEEPER = frozenset(b"[{")


def parse_json(
    text: bytes,
    what: str,
    *,
    error: type[PlanCompilerError] = WireFormatError,
    max_bytes: int = MAX_BYTES,
    max_parts: int = MAX_PARTS,
    max_depth: int = MAX_DEPTH,
) -> Any:
    """The value of a JSON text; else an `error` that names `what`.

    Stricter than the standard library: no NaN or Infinity, no name twice in an object.
    """
    if len(text) > max_bytes:
        raise error(
            f"{what} is too large", got=f"{len(text)} bytes", expected=f"at most {max_bytes} bytes"
        )
    parts = text.count(b",") + text.count(b"[") + text.count(b"{")
    if parts > max_parts:
        raise error(f"{what} has too many parts", got=parts, expected=f"at most {max_parts}")
    depth = 0
    for bracket in _TEXT.sub(b"", text).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in _DEEPER else -1
        if depth > max_depth:
            raise error(f"{what} is nested too deeply", expected=f"at most {max_depth} levels")
    try:
        return json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as cause:
        raise error(f"{what} is no JSON text that can be read", got=str(cause)) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class JsonObject:
    """A JSON object whose fields are asked for by name and type.

    What is missing or of another type is an `error` that names the field and shows what was there.
    """

    __slots__ = ("_error", "_fields", "where")

    def __init__(
        self, value: Any, where: str, error: type[PlanCompilerError] = WireFormatError
    ) -> None:
        self._error = error
        self.where = where
        """What the object is, for errors: `the index of a checkpoint`."""
        if type(value) is not dict:
            raise error(f"{where} is no JSON object", got=shown(value), expected="an object")
        self._fields: dict[str, Any] = value

    @property
    def names(self) -> frozenset[str]:
        """Of all fields."""
        return frozenset(self._fields)

    def refused(self, name: str, got: Any, expected: str) -> PlanCompilerError:
        """The error for a field that cannot be what it is."""
        return self._error(f"{self.where} has no valid {name!r}", got=shown(got), expected=expected)

    def get(self, name: str) -> Any:
        """A field as it is; None where it is missing."""
        return self._fields.get(name)

    def number(self, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
        """A whole number between bounds."""
        value = self._fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.refused(name, value, f"a whole number of {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self._fields.get(name)
        if type(value) is not bool:
            raise self.refused(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """A text of characters that every output can write; no NUL."""
        value = self._fields.get(name)
        if type(value) is not str or _UNWRITABLE.search(value):
            raise self.refused(name, value, "a text")
        return value

    def numbers(self, name: str, least: int = 0, most: int = (1 << 63) - 1) -> tuple[int, ...]:
        """A list of whole numbers between bounds."""
        value = self._fields.get(name)
        if type(value) is not list or any(
            type(each) is not int or not least <= each <= most for each in value
        ):
            raise self.refused(name, value, f"a list of whole numbers of {least} to {most}")
        return tuple(value)

    def items(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self._fields.get(name)
        if type(value) is not list:
            raise self.refused(name, value, "a list")
        return value

    def objects(self, name: str) -> Iterator[JsonObject]:
        """A list of objects."""
        for place, each in enumerate(self.items(name)):
            yield JsonObject(each, f"{self.where}: {name}[{place}]", self._error)

    def inner(self, name: str) -> JsonObject:
        """A field that is an object."""
        return JsonObject(self._fields.get(name), f"{self.where}: {name}", self._error)


def shown(value: Any) -> str:
    """A value from elsewhere, cut to what fits into an error."""
    if type(value) in (dict, list):
        return f"{'an object' if type(value) is dict else 'a list'} of {len(value)}"
    if type(value) is int and not -(1 << 64) < value < 1 << 64:
        return "a huge number"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
