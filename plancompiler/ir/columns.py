"""Rows of frozen dataclasses as columns of a message, and back, by the names of their fields.

A field is a column of its name, as it is or in the form that `Columns` is told: an index into the
message's tables, the number of an enum's member, counts with a flattened column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from plancompiler.ir.wire import (
    DTYPES,
    Codes,
    TableReader,
    TableWriter,
    build,
    flatten,
    pick,
    pick_optional,
    split,
)

T = TypeVar("T")


class _Written(Protocol):
    """A form of values in a message: in the column of this name, or in several."""

    def write(self, message: Any, values: list[Any], tables: Any, name: str = ..., /) -> None:
        """Fill the column."""

    def read(self, message: Any, tables: Any, name: str = ..., /) -> Sequence[Any]:
        """The values of the column."""


@dataclass(frozen=True, slots=True)
class Form:
    """One column, whose numbers follow from values and tables."""

    encode: Callable[[list[Any], TableWriter], Any]
    decode: Callable[[Any, TableReader], Sequence[Any]]

    def write(self, message: Any, values: list[Any], tables: Any, name: str = "", /) -> None:
        getattr(message, name).extend(self.encode(values, tables))

    def read(self, message: Any, tables: Any, name: str = "", /) -> Sequence[Any]:
        return self.decode(getattr(message, name)[:], tables)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Tuples: the column has their lengths, another one or another table all items."""

    items: _Written
    flat: str = ""

    def write(self, message: Any, values: list[Any], tables: Any, name: str = "", /) -> None:
        getattr(message, name).extend(list(map(len, values)))
        self.items.write(message, flatten(values), tables, self.flat)

    def read(self, message: Any, tables: Any, name: str = "", /) -> Sequence[Any]:
        items = self.items.read(message, tables, self.flat)
        return split(items, getattr(message, name)[:])


def _indexed(
    index: Callable[[TableWriter], Callable[[Any], int]], table: str, take: Any = pick
) -> Form:
    find = attrgetter(table)
    return Form(
        lambda values, tables: list(map(index(tables), values)),
        lambda column, tables: take(find(tables), column),
    )


def coded(codes: Codes[Any], *, optional: bool = False) -> Form:
    """Members of an enum as their numbers."""
    decode = codes.decode_optional if optional else codes.decode
    return Form(lambda values, _: codes.encode(values), lambda column, _: decode(column))


PLAIN = Form(lambda values, _: values, lambda column, _: column)
FLAG = Form(lambda values, _: list(map(int, values)), lambda column, _: list(map(bool, column)))
RELATIVE = Form(
    lambda values, tables: [each - tables.base for each in values],
    lambda column, tables: [each + tables.base for each in column],
)
"""Ids less the first one of a plan's rank, so that they are short."""
STRING = _indexed(lambda tables: tables.strings.__getitem__, "strings")
SHAPE = _indexed(lambda tables: tables.shapes.__getitem__, "shapes")
REGION = _indexed(lambda tables: tables.regions.__getitem__, "regions")
PLACEMENT = _indexed(lambda tables: tables.placements.__getitem__, "placements")
ORIGIN = _indexed(lambda tables: tables.origins.__getitem__, "origins")
SBP = _indexed(lambda tables: tables.sbp, "sbps")
ATTRS = _indexed(lambda tables: tables.attrs, "attr_sets")
SOURCE = _indexed(lambda tables: tables.source, "sources")
OPTIONAL_SBP = _indexed(lambda tables: tables.optional_sbp, "sbps", pick_optional)
OPTIONAL_PLACEMENT = _indexed(lambda tables: tables.optional_placement, "placements", pick_optional)
DTYPE = coded(DTYPES)
GIVEN = None
"""Written and read elsewhere."""


class Columns(Generic[T]):
    """The rows of a class as columns whose names begin with `prefix`; `forms` are those of fields
    that are not `PLAIN`, each by itself or with the name of its column.
    """

    def __init__(
        self,
        cls: Callable[..., T],
        prefix: str = "",
        **forms: _Written | tuple[str, _Written] | None,
    ) -> None:
        self._cls = cls
        self._forms: dict[str, tuple[str, _Written | None]] = {}
        for field in cls.__annotations__:
            form = forms.get(field, PLAIN)
            name, form = form if isinstance(form, tuple) else (field, form)
            self._forms[field] = prefix + name, form

    def write(
        self, message: Any, values: Sequence[T], tables: Any = None, name: str = "", /
    ) -> None:
        """Fill the columns."""
        for field, (column, form) in self._forms.items():
            if form is not None:
                form.write(message, list(map(attrgetter(field), values)), tables, column)

    def read(
        self, message: Any, tables: Any = None, name: str = "", /, **given: Sequence[Any]
    ) -> list[T]:
        """One object per row; fields whose values are neither here nor given have their default."""
        columns = [
            given[field] if form is None else form.read(message, tables, column)
            for field, (column, form) in self._forms.items()
            if form is not None or field in given
        ]
        return build(self._cls, *columns)
