"""Searching, sorting and set functions of the array API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from plancompiler.frontend import functions
from plancompiler.ir import DType
from plancompiler.ir.operators import TensorOperators

Axis = int | Sequence[int]


class UniqueAll(NamedTuple):
    """What `unique_all` gives."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """What `unique_counts` gives."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """What `unique_inverse` gives."""

    values: Any
    inverse_indices: Any


def unique_all(x: Any, /) -> UniqueAll:
    """Distinct elements, the place of the first of each, the place of each element's value, and how
    often each occurs.
    """
    return UniqueAll(*functions.unique(x))


def unique_counts(x: Any, /) -> UniqueCounts:
    """Distinct elements and how often each occurs."""
    distinct = functions.unique(x)
    return UniqueCounts(distinct.values, distinct.counts)


def unique_inverse(x: Any, /) -> UniqueInverse:
    """Distinct elements and for each element the place of its value."""
    distinct = functions.unique(x)
    return UniqueInverse(distinct.values, distinct.inverse)


def unique_values(x: Any, /) -> Any:
    """The distinct elements in order."""
    return functions.unique(x).values


def _beside(value: Any, other: Any) -> Any:
    """A number as a tensor beside another one."""
    return value if isinstance(value, TensorOperators) else other.beside("isin", value)


def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Any:
    """Whether each element of the first is one of the second."""
    return functions.isin(_beside(x1, x2), _beside(x2, x1), invert)


def _extreme(name: str) -> Any:
    function = getattr(functions, name)

    def call(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
        if axis is not None:
            return function(x, axis, keepdims)
        place = function(x.reshape((-1,)), 0)
        return place.reshape((1,) * x.ndim) if keepdims else place

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


argmax, argmin = _extreme("argmax"), _extreme("argmin")


def count_nonzero(x: Any, /, *, axis: Axis | None = None, keepdims: bool = False) -> Any:
    """How many elements are not zero (or True) over axes, as int64."""
    return functions.count_nonzero(x, axis, keepdims)


def nonzero(x: Any, /) -> tuple[Any, ...]:
    """Places of the elements that are not zero (or True): for each axis a vector."""
    places: tuple[Any, ...] = functions.nonzero(x)
    return places


def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any | None = None) -> Any:
    """For each value of x2 the place at which it would be put into the sorted vector x1."""
    return functions.searchsorted(x1, _beside(x2, x1), side, sorter)


def where(condition: Any, x1: Any, x2: Any, /) -> Any:
    """x1 where the condition holds, else x2; tensors or numbers."""
    return functions.where(condition, x1, x2)


def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Indices that put the elements in order along an axis; equal ones keep theirs."""
    return functions.argsort(_sortable(x), axis, descending)


def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Elements in order along an axis."""
    return functions.sort(_sortable(x), axis, descending)[0].cast(x.dtype)


def _sortable(x: Any) -> Any:
    return x.cast(DType.UINT8) if x.dtype is DType.BOOL else x
