"""Statistical and utility functions of the array API."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.array_api.dtypes import dtype_of
from plancompiler.frontend import functions
from plancompiler.ir import DType
from plancompiler.ir.operators import normalize_axes
from plancompiler.ops.reduce import total_dtype

Axis = int | Sequence[int]


def _wide(x: Any, dtype: DType | None) -> Any:
    """What is added up: in the dtype that is wanted, where it is another one."""
    return x if dtype is None or dtype_of(dtype) is x.dtype else x.cast(dtype)


def _total(name: str) -> Callable[..., Any]:
    function = getattr(functions, name)

    def call(
        x: Any, /, *, axis: Axis | None = None, dtype: DType | None = None, keepdims: bool = False
    ) -> Any:
        total = function(_wide(x, dtype), axis, keepdims)
        return total if dtype is None else _wide(total, dtype)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


sum, prod = _total("sum"), _total("prod")


def _reduced(name: str) -> Callable[..., Any]:
    function = getattr(functions, name)

    def call(x: Any, /, *, axis: Axis | None = None, keepdims: bool = False) -> Any:
        return function(x, axis, keepdims)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


max, mean, min = _reduced("max"), _reduced("mean"), _reduced("min")


def _truth(name: str) -> Callable[..., Any]:
    function = getattr(functions, name)

    def call(x: Any, /, *, axis: Axis | None = None, keepdims: bool = False) -> Any:
        return function(x, axis, keepdims)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


all, any = _truth("all"), _truth("any")


def _spread(name: str) -> Callable[..., Any]:
    function = getattr(functions, name)

    def call(
        x: Any, /, *, axis: Axis | None = None, correction: float = 0.0, keepdims: bool = False
    ) -> Any:
        count = 1
        for each in normalize_axes(axis, x.ndim):
            count *= x.shape[each]
        if correction >= count:
            return function(x, axis, keepdims) * math.nan
        return function(x, axis, keepdims, correction)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


std, var = _spread("std"), _spread("var")


def _running(name: str, function: Callable[..., Any], start: int) -> Callable[..., Any]:
    def call(
        x: Any,
        /,
        *,
        axis: int | None = None,
        dtype: DType | None = None,
        include_initial: bool = False,
    ) -> Any:
        if axis is None:
            axis = 0
            if x.ndim != 1:
                raise ValueError(f"{name} of a tensor of several axes needs an axis")
        wide = _wide(x, total_dtype(x.dtype) if dtype is None else dtype)
        total = function(wide, axis)
        total = total if dtype is None else _wide(total, dtype)
        if not include_initial:
            return total
        shape = [1 if at == axis % x.ndim else extent for at, extent in enumerate(x.shape)]
        number = float(start) if total.dtype.is_floating else start
        return functions.concat([functions.full_like(total, number, shape), total], axis)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


cumulative_sum = _running("cumulative_sum", functions.cumsum, 0)
cumulative_prod = _running("cumulative_prod", functions.cumprod, 1)


def diff(
    x: Any,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Any | None = None,
    append: Any | None = None,
) -> Any:
    """The differences of neighbours along an axis, `n` times over."""
    return functions.diff(x, n, axis, prepend, append)
