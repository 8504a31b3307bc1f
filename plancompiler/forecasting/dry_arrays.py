"""Arrays without elements: what is computed with them takes no time and no memory, and the bytes
that NumPy would take are added up.

They know shapes, dtypes and strides as NumPy's arrays do, and go through NumPy's own functions by
its protocols (`__array_ufunc__`, `__array_function__`). Their elements are unknown: a number that
is read of them is 0, or false; what is tested of all of them holds, as kernels test what they are
given so; and a mask chooses everything. What they cannot do raises `NotDryError`, and so does an
array of NumPy among them: it was made without being counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

_UNCOUNTED = 64
"""Bytes of NumPy's arrays that may be among the operands: a few numbers."""
_FIRST_ADDRESS = 1 << 40
"""Where the arrays are said to lie. Nothing is ever read or written there."""
_ALIGNMENT = 64


class NotDryError(Exception):
    """Something needs the elements of an array that has none, or its memory is not counted."""


class Tally:
    """Bytes of the arrays that there are."""

    def __init__(self) -> None:
        self.held = 0
        self.most = 0
        """The most that were held since this was set to what is held."""
        self._address = _FIRST_ADDRESS

    def address(self, nbytes: int) -> int:
        """A place for so many bytes, apart from all others."""
        taken = self._address
        self._address += -(-nbytes // _ALIGNMENT + 1) * _ALIGNMENT
        return taken

    def passing(self, nbytes: int) -> None:
        """Count an array that is gone before anything else is made."""
        self.most = max(self.most, self.held + nbytes)


class _Memory:
    """What an array and its views take."""

    __slots__ = ("nbytes", "tally")

    def __init__(self, tally: Tally, nbytes: int) -> None:
        self.tally = tally
        self.nbytes = nbytes
        tally.held += nbytes
        tally.most = max(tally.most, tally.held)

    def __del__(self) -> None:
        self.tally.held -= self.nbytes


class _Place:
    """What NumPy asks of memory that is not its own."""

    __slots__ = ("__array_interface__",)

    def __init__(self, shape: tuple[int, ...], itemsize: int, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": f"|V{itemsize}",
            "data": (address, False),
        }


class DryArray(NDArrayOperatorsMixin):
    """An array without elements."""

    __slots__ = ("layout", "memory")
    stands_for = np
    # `layout` is an array of NumPy at an address where there is nothing: shapes, strides and views
    # are NumPy's own. Only what touches no element may be asked of it.

    def __init__(self, memory: _Memory, view: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self.layout = view

    @property  # kernels ask whether an array is the host's
    def __class__(self) -> type:
        return np.ndarray

    @__class__.setter
    def __class__(self, given: type) -> None:
        raise TypeError("a dry array stays one")

    # --- what it looks like ---

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.layout.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        kept: np.dtype[Any] = self.layout.dtype
        return kept

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def itemsize(self) -> int:
        return self.layout.itemsize

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def strides(self) -> tuple[int, ...]:
        return self.layout.strides

    @property
    def taken(self) -> int:
        """Bytes that its memory takes."""
        return self.memory.nbytes

    @property
    def address(self) -> int:
        """Where it is said to lie."""
        return int(self.layout.__array_interface__["data"][0])

    @property
    def flags(self) -> Any:
        return self.layout.flags

    def __len__(self) -> int:
        return len(self.layout)

    def __repr__(self) -> str:
        return f"DryArray({self.dtype}{list(self.shape)})"

    # --- views ---

    def _as(self, view: np.ndarray[Any, Any]) -> DryArray:
        return DryArray(self.memory, view)

    def _like(
        self, shape: Sequence[int], dtype: Any, like: np.ndarray[Any, Any] | None = None
    ) -> DryArray:
        return made(self.memory.tally, shape, dtype, like)

    @property
    def T(self) -> DryArray:  # noqa: N802  # NumPy's name
        return self._as(self.layout.T)

    @property
    def real(self) -> DryArray:
        return self._as(self.layout.real)

    @property
    def imag(self) -> DryArray:
        if self.dtype.kind != "c":
            raise NotDryError("the imaginary part of real numbers")
        return self._as(self.layout.imag)

    def view(self, dtype: Any) -> DryArray:
        return self._as(self.layout.view(dtype))

    def transpose(self, *axes: Any) -> DryArray:
        return self._as(self.layout.transpose(*axes))

    def swapaxes(self, one: int, other: int) -> DryArray:
        return self._as(self.layout.swapaxes(one, other))

    def squeeze(self, axis: Any = None) -> DryArray:
        return self._as(self.layout.squeeze(axis))

    def diagonal(self, *args: int, **named: int) -> DryArray:
        return self._as(self.layout.diagonal(*args, **named))

    def reshape(self, *shape: Any, order: Any = "C") -> DryArray:
        if order != "C":
            raise NotDryError("reshape in another order")
        view = _reshaped(self.layout, shape[0] if len(shape) == 1 else shape)
        return self.copy("C").reshape(*shape) if view is None else self._as(view)

    def ravel(self) -> DryArray:
        return self.reshape(-1)

    def flatten(self) -> DryArray:
        return self.copy("C").reshape(-1)

    # --- elements ---

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple):
            key = (key,)
        if any(map(_is_advanced, key)):
            spread, rest, where, passing = _chosen(self.shape, key)
            self.memory.tally.passing(passing)
            made_of = self._like((*spread, *rest), self.dtype)
            if not where:
                return made_of
            # In memory what arrays choose comes first.
            count = len(spread)
            after = range(count + where, made_of.ndim)
            return made_of.transpose(*range(count, count + where), *range(count), *after)
        view = self.layout[_plain(key)]
        is_number = not view.ndim and not any(each is Ellipsis for each in key)
        return view.dtype.type(0) if is_number else self._as(view)

    def __setitem__(self, key: Any, value: Any) -> None:
        _check((value,))
        if not isinstance(key, tuple):
            key = (key,)
        if any(map(_is_advanced, key)):
            spread, rest, where, passing = _chosen(self.shape, key)
            shape = (*rest[:where], *spread, *rest[where:])
            self.memory.tally.passing(passing)
        else:
            shape = self.layout[_plain(key)].shape
        if isinstance(value, DryArray | np.ndarray):
            _spread(value.shape, shape)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def _number(self) -> Any:
        if self.size != 1:
            raise NotDryError("a number of several elements")
        return self.dtype.type(0)

    def __bool__(self) -> bool:
        return bool(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __index__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def item(self, *place: int) -> Any:
        return self.dtype.type(0).item()

    def tolist(self) -> Any:
        return np.zeros(self.shape, self.dtype).tolist()

    def __array__(self, *args: Any, **named: Any) -> Any:
        raise NotDryError("an array of NumPy is wanted")

    def fill(self, value: Any) -> None:
        """Nothing."""

    # --- new arrays ---

    def copy(self, order: str = "C") -> DryArray:
        return self._like(self.shape, self.dtype, None if order == "C" else self.layout)

    def __copy__(self) -> DryArray:
        return self.copy("K")

    def astype(self, dtype: Any, order: str = "K", copy: bool = True, **named: Any) -> DryArray:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return self._like(self.shape, dtype, self.layout)

    def take(self, *args: Any, **named: Any) -> Any:
        return _take(self, self, *args, **named)

    def repeat(self, repeats: Any, axis: int | None = None) -> Any:
        return np.repeat(self, repeats, axis)

    def nonzero(self) -> Any:
        return np.nonzero(self)

    def sort(self, axis: int = -1, kind: Any = None) -> None:
        self.memory.tally.passing(_merging(self, axis, kind, self.itemsize))

    def argsort(self, axis: int = -1, kind: Any = None) -> Any:
        return np.argsort(self, axis, kind)

    def dot(self, other: Any) -> Any:
        return np.matmul(self, other)

    def argmax(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._place(axis, out, keepdims)

    def argmin(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._place(axis, out, keepdims)

    def _place(self, axis: int | None, out: Any, keepdims: bool) -> Any:
        # NumPy searches along the last axis of contiguous memory.
        moved = self.layout if axis is None else np.moveaxis(self.layout, axis, -1)
        kept = None if moved.flags.c_contiguous else self.copy()
        result = self._result(_reduced(self.shape, axis, keepdims), np.intp, out)
        del kept
        return result

    def _result(self, shape: tuple[int, ...], dtype: Any, out: Any = None) -> Any:
        if out is not None:
            return out
        return np.dtype(dtype).type(0) if not shape else self._like(shape, dtype)

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, **named: Any) -> Any:
        return np.add.reduce(self, axis, dtype, out, **named)

    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, **named: Any) -> Any:
        return np.multiply.reduce(self, axis, dtype, out, **named)

    def max(self, axis: Any = None, out: Any = None, **named: Any) -> Any:
        return np.maximum.reduce(self, axis, None, out, **named)

    def min(self, axis: Any = None, out: Any = None, **named: Any) -> Any:
        return np.minimum.reduce(self, axis, None, out, **named)

    def all(self, axis: Any = None, out: Any = None, **named: Any) -> Any:
        return np.logical_and.reduce(self, axis, None, out, **named)

    def any(self, axis: Any = None, out: Any = None, **named: Any) -> Any:
        return np.logical_or.reduce(self, axis, None, out, **named)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, **named: Any) -> Any:
        if dtype is None and self.dtype.kind in "iub":
            dtype = np.float64
        return self.sum(axis, dtype, out, **named)

    def cumsum(self, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        flat = self.reshape(-1) if axis is None else self
        return np.add.accumulate(flat, 0 if axis is None else axis, dtype, out)

    def cumprod(self, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        flat = self.reshape(-1) if axis is None else self
        return np.multiply.accumulate(flat, 0 if axis is None else axis, dtype, out)

    def clip(self, low: Any = None, high: Any = None, out: Any = None, **named: Any) -> Any:
        given = [each for each in (low, high) if each is not None]
        return np.add(self, given[0], out=out)

    def round(self, decimals: int = 0, out: Any = None) -> Any:
        return np.rint(self, out=out)

    # --- NumPy's functions ---

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **named: Any
    ) -> Any:
        _check(inputs)
        form = _METHODS.get(method)
        if form is None:
            raise NotDryError(f"{ufunc.__name__}.{method}")
        return form(self, ufunc, inputs, out, named)

    def __array_function__(
        self, function: Any, types: Any, args: Any, named: dict[str, Any]
    ) -> Any:
        form = _FUNCTIONS.get(function)
        if form is not None:
            return form(self, *args, **named)
        # Much of NumPy is written with NumPy's functions.
        written = getattr(function, "_implementation", None)
        if written is None:
            raise NotDryError(function.__name__)
        return written(*args, **named)


def given(tally: Tally, shape: Sequence[int], dtype: Any, address: int | None = None) -> DryArray:
    """An array that is there anyway: it is not counted."""
    return _laid_out(_Memory(tally, 0), tuple(shape), np.dtype(dtype), address)


def made(
    tally: Tally, shape: Sequence[int], dtype: Any, like: np.ndarray[Any, Any] | None = None
) -> DryArray:
    """A new array, its axes in memory as those of `like`, or else in C order."""
    shape, dtype = tuple(shape), np.dtype(dtype)
    memory = _Memory(tally, math.prod(shape) * dtype.itemsize)
    if like is None or like.flags.c_contiguous or like.shape != shape:
        return _laid_out(memory, shape, dtype)
    order = sorted(range(like.ndim), key=lambda axis: -abs(like.strides[axis]))
    packed = _laid_out(memory, [shape[axis] for axis in order], dtype)
    return packed.transpose([order.index(axis) for axis in range(like.ndim)])


def _laid_out(
    memory: _Memory, shape: Sequence[int], dtype: np.dtype[Any], address: int | None = None
) -> DryArray:
    if address is None:
        address = memory.tally.address(math.prod(shape) * dtype.itemsize)
    place = _Place(tuple(shape), dtype.itemsize, address)
    return DryArray(memory, np.asarray(place).view(dtype))


def _reshaped(view: np.ndarray[Any, Any], shape: Any) -> np.ndarray[Any, Any] | None:
    """The view in another shape; None where elements would have to be copied."""
    if view.flags.c_contiguous:
        return view.reshape(shape)
    wanted = list(shape) if isinstance(shape, tuple | list) else [shape]
    if -1 in wanted:
        wanted[wanted.index(-1)] = view.size // max(1, -math.prod(wanted))
    # Groups of old axes that are as large as groups of new ones have to lie evenly in memory.
    axes = [each for each in zip(view.shape, view.strides, strict=True) if each[0] != 1]
    extents = [extent for extent in wanted if extent != 1]
    if not view.size or math.prod(wanted) != view.size:
        return view.reshape(wanted) if view.size == math.prod(wanted) else None
    while axes and extents:
        group, left = [axes.pop()], extents.pop()
        size = group[0][0]
        while size != left:
            if size < left:
                group.append(axes.pop())
                size *= group[-1][0]
            else:
                left *= extents.pop()
        if any(outer != inner * extent for (extent, inner), (_, outer) in pairwise(group)):
            return None
    return view.reshape(wanted)


def _check(operands: Sequence[Any]) -> None:
    for each in operands:
        if isinstance(each, np.ndarray) and is_uncounted(each):
            raise NotDryError("an array of NumPy among the operands")


def is_uncounted(array: Any) -> bool:
    """Whether something is an array of NumPy, and not just a few numbers or mapped from a file."""
    if type(array) is not np.ndarray or array.nbytes <= _UNCOUNTED:
        return False
    while type(array.base) is np.ndarray:
        array = array.base
    return bool(array.flags.owndata)


def _spread(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    trimmed = shape[max(0, len(shape) - len(target)) :]
    if np.broadcast_shapes(trimmed, target) != target:
        raise NotDryError(f"{shape} does not fit {target}")


def _broadcast(operands: Sequence[Any]) -> tuple[int, ...]:
    shapes = {each.shape for each in operands if isinstance(each, DryArray | np.ndarray)}
    if len(shapes) == 1:
        return next(iter(shapes))
    return np.broadcast_shapes(*shapes)


def _reduced(shape: tuple[int, ...], axis: Any, keepdims: bool) -> tuple[int, ...]:
    """The shape of a reduction along some axes; None is all."""
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    gone = {each % len(shape) for each in axes}
    if keepdims:
        return tuple(1 if place in gone else extent for place, extent in enumerate(shape))
    return tuple(extent for place, extent in enumerate(shape) if place not in gone)


# --- functions of elements ------------------------------------------------------------------------


def _kind(operand: Any) -> Any:
    """What the dtype of a result depends on."""
    return operand.dtype if hasattr(operand, "dtype") else type(operand)


@lru_cache(maxsize=4096)
def _dtypes(ufunc: np.ufunc, kinds: tuple[Any, ...], dtype: Any) -> tuple[np.dtype[Any], ...]:
    """The dtypes of results, as NumPy gives them to arrays without elements."""
    axes = (0,)
    if ufunc.signature is not None:
        cores = _cores(ufunc.signature)[0]
        operands = [
            np.zeros((0, *[1] * len(core)), kind) for core, kind in zip(cores, kinds, strict=True)
        ]
    else:
        operands = [
            np.zeros(axes, kind) if isinstance(kind, np.dtype) else kind(0) for kind in kinds
        ]
    result = ufunc(*operands, **({} if dtype is None else {"dtype": dtype}))
    return tuple(each.dtype for each in (result if isinstance(result, tuple) else (result,)))


@lru_cache(maxsize=256)
def _cores(signature: str) -> tuple[list[list[str]], list[list[str]]]:
    """The names of the axes that a function works along: of inputs and of outputs."""
    sides = signature.replace(" ", "").split("->")
    inputs, outputs = (
        [core.split(",") if core else [] for core in side.strip("()").split("),(")]
        for side in sides
    )
    return inputs, outputs


def _along(signature: str, inputs: Sequence[Any]) -> list[tuple[int, ...]]:
    """Shapes of the results of a function that works along some of the last axes."""
    cores, results = _cores(signature)
    sizes: dict[str, int] = {}
    missing: set[str] = set()
    outer = []
    for each, core in zip(inputs, cores, strict=True):
        names = list(core)
        while len(names) > each.ndim:
            name = next(name for name in names if name.endswith("?"))
            missing.add(name)
            names.remove(name)
        place = each.ndim - len(names)
        outer.append(each.shape[:place])
        for name, extent in zip(names, each.shape[place:], strict=True):
            if sizes.setdefault(name.rstrip("?"), extent) != extent:
                raise NotDryError(f"shapes {[each.shape for each in inputs]} of {signature}")
    spread = np.broadcast_shapes(*outer)
    try:
        return [
            (*spread, *(sizes[name.rstrip("?")] for name in core if name not in missing))
            for core in results
        ]
    except KeyError as error:
        raise NotDryError(signature) from error


def _call(self: DryArray, ufunc: np.ufunc, inputs: Any, out: Any, named: dict[str, Any]) -> Any:
    if ufunc.signature is None:
        shapes = [_broadcast(inputs)] * ufunc.nout
    else:
        shapes = _along(ufunc.signature, inputs)
    if out and all(each is not None for each in out):
        for each, shape in zip(out, shapes, strict=True):
            _spread(shape, each.shape)
        return out[0] if ufunc.nout == 1 else out
    dtypes = _dtypes(ufunc, tuple(map(_kind, inputs)), named.get("dtype"))
    like = None
    if ufunc.signature is None:
        views = [each.layout for each in inputs if isinstance(each, DryArray)]
        whole = [each for each in views if each.shape == shapes[0]]
        if whole and not any(each.flags.c_contiguous for each in whole):
            like = whole[0]
    results = tuple(
        each
        if each is not None
        else self._result(shape, dtype)
        if like is None
        else self._like(shape, dtype, like)
        for each, shape, dtype in zip(out or [None] * ufunc.nout, shapes, dtypes, strict=True)
    )
    return results[0] if ufunc.nout == 1 else results


@lru_cache(maxsize=4096)
def _reduced_dtype(ufunc: np.ufunc, kind: np.dtype[Any], dtype: Any) -> np.dtype[Any]:
    result: np.dtype[Any] = ufunc.reduce(np.ones(1, kind), dtype=dtype).dtype
    return result


def _reduce(self: DryArray, ufunc: np.ufunc, inputs: Any, out: Any, named: dict[str, Any]) -> Any:
    array = inputs[0]
    shape = _reduced(array.shape, named.get("axis", 0), named.get("keepdims", False))
    if out and out[0] is not None:
        _spread(shape, out[0].shape)
        return out[0]
    dtype = _reduced_dtype(ufunc, array.dtype, named.get("dtype"))
    if not shape and ufunc is np.logical_and:
        return dtype.type(True)
    return self._result(shape, dtype)


def _accumulate(
    self: DryArray, ufunc: np.ufunc, inputs: Any, out: Any, named: dict[str, Any]
) -> Any:
    if out and out[0] is not None:
        return out[0]
    dtype = _reduced_dtype(ufunc, inputs[0].dtype, named.get("dtype"))
    return self._like(inputs[0].shape, dtype)


def _reduceat(self: DryArray, ufunc: np.ufunc, inputs: Any, out: Any, named: dict[str, Any]) -> Any:
    if out and out[0] is not None:
        return out[0]
    array, places = inputs[:2]
    shape = list(array.shape)
    shape[named.get("axis", 0)] = len(places)
    return self._like(shape, _reduced_dtype(ufunc, array.dtype, named.get("dtype")))


def _outer(self: DryArray, ufunc: np.ufunc, inputs: Any, out: Any, named: dict[str, Any]) -> Any:
    if out and out[0] is not None:
        return out[0]
    shape = tuple(extent for each in inputs for extent in each.shape)
    return self._like(shape, _dtypes(ufunc, tuple(map(_kind, inputs)), None)[0])


_METHODS: dict[str, Callable[..., Any]] = {
    "__call__": _call,
    "reduce": _reduce,
    "accumulate": _accumulate,
    "reduceat": _reduceat,
    "outer": _outer,
    "at": lambda *args: None,
}


# --- places ---------------------------------------------------------------------------------------


def _is_advanced(key: Any) -> bool:
    return isinstance(key, DryArray | np.ndarray | list)


def _plain(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Places that give a view, and never a number, which would be read."""
    for each in key:
        if isinstance(each, bool | np.bool_) or not (
            each is None or isinstance(each, int | np.integer | slice | EllipsisType)
        ):
            raise NotDryError(f"an element at {each!r}")
    return key if any(each is Ellipsis for each in key) else (*key, ...)


def _chosen(
    shape: tuple[int, ...], key: tuple[Any, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Of what arrays among the places choose: their own shape, the extents of the other axes, how
    many of these come before, and bytes that NumPy takes beside.
    """
    keys = [np.asarray(each) if isinstance(each, list) else each for each in key]
    _check(keys)
    if len(keys) == 1 and keys[0].dtype == np.bool_ and keys[0].shape == shape:
        return (math.prod(shape),), (), 0, 0
    taken = sum(_axes_of(each) for each in keys)
    rest = [slice(None)] * (len(shape) - taken)
    dots = next((place for place, each in enumerate(keys) if each is Ellipsis), len(keys))
    keys[dots : dots + 1] = rest
    result: list[int] = []
    chosen: list[tuple[int, ...]] = []
    where, apart, axis, passing = -1, False, 0, 0
    for each in keys:
        count = _axes_of(each)
        if each is None:
            result.append(1)
        elif isinstance(each, slice):
            result.append(len(range(*each.indices(shape[axis]))))
        else:
            apart = apart or (where >= 0 and len(result) != where)
            where = len(result) if where < 0 else where
            if isinstance(each, DryArray | np.ndarray) and each.dtype == np.bool_:
                chosen.append((each.size,))
                passing += 8 * each.size * each.ndim
            elif isinstance(each, DryArray | np.ndarray):
                chosen.append(each.shape)
                passing += 8 * each.size if each.dtype != np.intp else 0
        axis += count
    spread = np.broadcast_shapes(*chosen)
    where = 0 if apart else where
    return spread, tuple(result), where, passing


def _axes_of(key: Any) -> int:
    """How many axes one of the places stands for."""
    if key is None or key is Ellipsis:
        return 0
    is_mask = isinstance(key, DryArray | np.ndarray) and key.dtype == np.bool_
    return key.ndim if is_mask else 1


def _merging(array: Any, axis: int, kind: Any, itemsize: int) -> int:
    """Bytes in which a stable sort merges, at most."""
    extent = array.shape[axis] if array.ndim else 1
    return extent // 2 * itemsize if kind in ("stable", "mergesort") else 0


# --- NumPy's other functions ----------------------------------------------------------------------


def _copyto(self: DryArray, target: Any, source: Any, casting: str = "", where: Any = True) -> None:
    _check((target, source))
    if isinstance(source, DryArray | np.ndarray):
        _spread(source.shape, target.shape)


def _where(self: DryArray, condition: Any, *choices: Any) -> Any:
    if not choices:
        return _nonzero(self, condition)
    _check((condition, *choices))
    dtypes = _dtypes(np.multiply, tuple(map(_kind, choices)), None)
    if all(_kind(each) is bool or _kind(each) == np.bool_ for each in choices):
        dtypes = (np.dtype(bool),)
    return self._like(_broadcast((condition, *choices)), dtypes[0])


def _nonzero(self: DryArray, array: Any) -> Any:
    _check((array,))
    places = self._like((array.size, max(1, array.ndim)), np.int64)
    if array.ndim == 1:
        return (places[:, 0],)
    return tuple(places[:, axis] for axis in range(array.ndim))


def _concatenate(
    self: DryArray, arrays: Any, axis: int | None = 0, out: Any = None, **named: Any
) -> Any:
    arrays = [
        self._like(np.shape(e), np.asarray(e).dtype) if not isinstance(e, DryArray) else e
        for e in arrays
    ]
    if axis is None:
        arrays, axis = [each.reshape(-1) for each in arrays], 0
    shape = list(arrays[0].shape)
    shape[axis] = sum(each.shape[axis] for each in arrays)
    dtype = named.get("dtype") or np.result_type(*(each.dtype for each in arrays))
    return out if out is not None else self._like(shape, dtype)


def _take(
    self: DryArray,
    array: Any,
    indices: Any,
    axis: int | None = None,
    out: Any = None,
    mode: str = "raise",
) -> Any:
    _check((array, indices))
    given_shape = array.shape if axis is not None else (array.size,)
    at = (axis or 0) % len(given_shape)
    places = indices.shape if hasattr(indices, "shape") else np.shape(indices)
    shape = (*given_shape[:at], *places, *given_shape[at + 1 :])
    passing = 8 * math.prod(places) if _kind(indices) != np.intp else 0
    if out is not None:
        if mode == "raise":
            passing += out.nbytes
        self.memory.tally.passing(passing)
        return out
    result = self._result(shape, array.dtype)
    self.memory.tally.passing(passing)
    return result


def _take_along_axis(self: DryArray, array: Any, places: Any, axis: int = -1) -> Any:
    result = self._like(places.shape, array.dtype)
    others = [extent for at, extent in enumerate(places.shape) if at != axis % places.ndim]
    self.memory.tally.passing(8 * sum(others))
    return result


def _argsort(self: DryArray, array: Any, axis: int = -1, kind: Any = None, **named: Any) -> Any:
    result = self._like(array.shape, np.intp)
    self.memory.tally.passing(_merging(array, axis, kind, np.dtype(np.intp).itemsize))
    return result


def _sort(self: DryArray, array: Any, axis: int = -1, kind: Any = None, **named: Any) -> Any:
    result = array.copy()
    result.sort(axis, kind)
    return result


def _einsum(self: DryArray, line: str, *operands: Any, out: Any = None, **named: Any) -> Any:
    if not isinstance(line, str) or "->" not in line or named.get("optimize"):
        raise NotDryError(f"einsum of {line!r}")
    _check(operands)
    names, result = line.replace(" ", "").split("->")
    sizes: dict[Any, int] = {}
    strides: dict[Any, int] = {}
    count = 0  # of axes that `...` stands for
    for axes, operand in zip(names.split(","), operands, strict=True):
        named_axes: list[Any] = list(axes.replace("...", "."))
        if "." in named_axes:
            at = named_axes.index(".")
            more = operand.ndim - len(named_axes) + 1
            count = max(count, more)
            named_axes[at : at + 1] = range(-more, 0)
        for axis, extent, stride in zip(named_axes, operand.shape, operand.strides, strict=True):
            sizes[axis] = max(extent, sizes.get(axis, 1))
            strides[axis] = strides.get(axis, 0) + stride
    kept: list[Any] = list(result.replace("...", "."))
    if "." in kept:
        at = kept.index(".")
        kept[at : at + 1] = range(-count, 0)
    if out is not None:
        return out
    shape = tuple(sizes[axis] for axis in kept)
    if len(operands) == 1 and set(kept) == set(sizes):  # nothing is summed
        return _view_by(np.lib.stride_tricks.as_strided)(
            self, operands[0], shape, tuple(strides[axis] for axis in kept)
        )
    return self._result(shape, np.result_type(*(each.dtype for each in operands)))


def _diff(self: DryArray, array: Any, n: int = 1, axis: int = -1, **ends: Any) -> Any:
    if n != 1:
        raise NotDryError("differences of differences")
    parts = [array]
    for name, place in (("prepend", 0), ("append", 2)):
        if name in ends:
            shape = list(array.shape)
            shape[axis] = 1
            parts.insert(place, self._like(shape, array.dtype))
    whole = np.concatenate(parts, axis) if len(parts) > 1 else array
    shape = list(whole.shape)
    shape[axis] -= 1
    return self._like(shape, array.dtype)


def _bincount(self: DryArray, array: Any, weights: Any = None, minlength: int = 0) -> Any:
    return self._like((max(1, minlength),), np.intp if weights is None else np.float64)


def _searchsorted(self: DryArray, array: Any, values: Any, *args: Any, **named: Any) -> Any:
    return self._result(np.shape(values) if not hasattr(values, "shape") else values.shape, np.intp)


def _repeat(self: DryArray, array: Any, repeats: Any, axis: int | None = None) -> Any:
    if not isinstance(repeats, int | np.integer):
        raise NotDryError("repeats that differ")
    whole = array.reshape(-1) if axis is None else array
    shape = list(whole.shape)
    shape[axis or 0] *= int(repeats)
    return self._like(shape, whole.dtype)


def _like_of(self: DryArray, array: Any, *value: Any, dtype: Any = None, **named: Any) -> Any:
    if value and dtype is None and np.isscalar(value[0]) is False:
        dtype = value[0]
    shape = named.get("shape")
    return self._like(
        array.shape if shape is None else shape,
        dtype or array.dtype,
        None if shape else array.layout,
    )


def _view_by(take: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives a view of its first argument."""
    return lambda self, array, *args, **named: DryArray(
        array.memory, take(array.layout, *args, **named)
    )


def _packed(self: DryArray, array: Any, dtype: Any = None, **named: Any) -> Any:
    """`ascontiguousarray`, and `asarray` as far as it has a dtype to give."""
    if not isinstance(array, DryArray):
        whole = np.asarray(array, dtype)
        is_view = whole is array and whole.flags.c_contiguous
        return (given if is_view else made)(self.memory.tally, whole.shape, whole.dtype)
    same = array.flags.c_contiguous and (dtype is None or np.dtype(dtype) == array.dtype)
    return array if same else self._like(array.shape, dtype or array.dtype)


def _asarray(self: DryArray, array: Any, dtype: Any = None, **named: Any) -> Any:
    if not isinstance(array, DryArray):
        whole = np.asarray(array, dtype)
        return self._like(whole.shape, whole.dtype)
    return array if dtype is None else array.astype(dtype, copy=False)


def _array(self: DryArray, array: Any, dtype: Any = None, **named: Any) -> Any:
    if isinstance(array, DryArray):
        return array.astype(dtype or array.dtype)
    return _asarray(self, array, dtype)


def _filled(self: DryArray, shape: Any, dtype: Any = float, **named: Any) -> Any:
    extents: Sequence[int] = (int(shape),) if isinstance(shape, int | np.integer) else shape
    return self._like(extents, dtype or float)


def _full(self: DryArray, shape: Any, value: Any, dtype: Any = None, **named: Any) -> Any:
    return _filled(self, shape, dtype or _kind(value))


def _arange(self: DryArray, *bounds: Any, dtype: Any = None, **named: Any) -> Any:
    count = len(range(*map(int, bounds)))
    kind = np.result_type(*map(_kind, bounds)) if dtype is None else dtype
    return self._like((count,), kind)


def _methods(name: str) -> Callable[..., Any]:
    return lambda self, array, *args, **named: getattr(array, name)(*args, **named)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.copyto: _copyto,
    np.where: _where,
    np.nonzero: _nonzero,
    np.concatenate: _concatenate,
    np.take: _take,
    np.argsort: _argsort,
    np.sort: _sort,
    np.einsum: _einsum,
    np.diff: _diff,
    np.outer: lambda self, one, other: np.multiply.outer(one.reshape(-1), other.reshape(-1)),
    np.dot: lambda self, *arrays, **named: np.matmul(*arrays, **named),
    np.take_along_axis: _take_along_axis,
    np.append: lambda self, array, values, axis=None: _concatenate(self, [array, values], axis),
    np.count_nonzero: lambda self, array: 0,
    np.bincount: _bincount,
    np.searchsorted: _searchsorted,
    np.repeat: _repeat,
    np.empty_like: _like_of,
    np.zeros_like: _like_of,
    np.ones_like: _like_of,
    np.full_like: lambda self, array, value, **named: _like_of(self, array, **named),
    np.may_share_memory: lambda self, *arrays, **named: _share(*arrays),
    np.shares_memory: lambda self, *arrays, **named: _share(*arrays),
    np.moveaxis: _view_by(np.moveaxis),
    np.expand_dims: _view_by(np.expand_dims),
    np.broadcast_to: _view_by(np.broadcast_to),
    np.flip: _view_by(np.flip),
    np.lib.stride_tricks.sliding_window_view: _view_by(np.lib.stride_tricks.sliding_window_view),
    np.lib.stride_tricks.as_strided: _view_by(np.lib.stride_tricks.as_strided),
    np.ascontiguousarray: _packed,
    np.asarray: _asarray,
    np.array: _array,
    np.empty: _filled,
    np.zeros: _filled,
    np.ones: _filled,
    np.full: _full,
    np.arange: _arange,
    **{
        getattr(np, name): _methods(name)
        for name in (
            "argmax",
            "argmin",
            "reshape",
            "ravel",
            "transpose",
            "swapaxes",
            "squeeze",
            "cumsum",
            "cumprod",
            "sum",
            "prod",
            "max",
            "min",
            "all",
            "any",
            "mean",
            "clip",
            "diagonal",
        )
    },
}


def _share(one: Any, other: Any) -> bool:
    views = [each.layout if isinstance(each, DryArray) else each for each in (one, other)]
    return np.may_share_memory(views[0], views[1])


class DryNamespace:
    """NumPy, for kernels that make arrays with what they are given as `context.arrays`."""

    stands_for = np

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._first = given(tally, (), np.float64)
        self.files: dict[Hashable, DryArray] = {}
        """Arrays of files, by what their readers call them."""

    def stored(
        self, key: Hashable, shape: Sequence[int], dtype: Any, is_unpacked: bool
    ) -> DryArray:
        """An array of a file, which takes memory where it is not mapped."""
        if key not in self.files:
            self.files[key] = (made if is_unpacked else given)(self._tally, shape, dtype)
        return self.files[key]

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        form = _FUNCTIONS.get(function) if name in _MAKERS else None
        if form is None:
            return function
        return lambda *args, **named: form(self._first, *args, **named)


_MAKERS = ("empty", "zeros", "ones", "full", "arange", "asarray", "array", "ascontiguousarray")
