"""Dtypes of the array API: their names, kinds, limits, and which of them go into which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.errors import DTypeError, UsageError
from plancompiler.ir import DType
from plancompiler.ir.operators import TensorOperators
from plancompiler.ir.promotion import floating_dtype, result_dtype

bool = DType.BOOL
int8, int16, int32, int64 = DType.INT8, DType.INT16, DType.INT32, DType.INT64
uint8, uint16, uint32, uint64 = DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64
float32, float64 = DType.FLOAT32, DType.FLOAT64

STANDARD = (
    bool,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
    float32,
    float64,
)
"""The dtypes of the standard that exist here: all but the complex ones."""
DEFAULT_FLOAT, DEFAULT_INT = float32, int64

_KINDS: dict[str, Callable[[DType], Any]] = {
    "bool": lambda dtype: dtype is bool,
    "signed integer": lambda dtype: dtype.is_integer and dtype.is_signed,
    "unsigned integer": lambda dtype: dtype.is_integer and not dtype.is_signed,
    "integral": lambda dtype: dtype.is_integer,
    "real floating": lambda dtype: dtype.is_floating,
    "complex floating": lambda dtype: False,
    "numeric": lambda dtype: dtype.is_integer or dtype.is_floating,
}


def isdtype(dtype: DType, kind: DType | str | tuple[DType | str, ...]) -> Any:
    """Whether a dtype is a kind of dtype, one dtype, or one of several of these."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, each) for each in kind)
    if isinstance(kind, str):
        if kind not in _KINDS:
            raise UsageError(
                "isdtype knows no such kind", got=repr(kind), expected=", ".join(_KINDS)
            )
        return _KINDS[kind](dtype)
    return dtype is kind


def dtype_of(value: Any) -> DType:
    """The dtype of a tensor, or the one that is given."""
    return value.dtype if isinstance(value, TensorOperators) else DType.parse(value)


@dataclass(frozen=True, slots=True)
class FloatLimits:
    """What `finfo` gives."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True, slots=True)
class IntLimits:
    """What `iinfo` gives."""

    bits: int
    max: int
    min: int
    dtype: DType


def finfo(type: Any, /) -> FloatLimits:
    """The limits of a floating dtype, or of a tensor's. DTypeError for another dtype."""
    dtype = dtype_of(type)
    if not dtype.is_floating:
        raise DTypeError("finfo describes floating dtypes", got=dtype, hint="use iinfo")
    least, greatest = dtype.range
    eps = 2.0**-7 if dtype is DType.BFLOAT16 else float(np.finfo(dtype.value).eps)
    return FloatLimits(8 * dtype.itemsize, eps, greatest, -greatest, least, dtype)


def iinfo(type: Any, /) -> IntLimits:
    """The limits of a dtype of whole numbers, or of a tensor's. DTypeError for another dtype."""
    dtype = dtype_of(type)
    if not dtype.is_integer:
        raise DTypeError("iinfo describes dtypes of whole numbers", got=dtype, hint="use finfo")
    limits = np.iinfo(dtype.value)
    return IntLimits(8 * dtype.itemsize, int(limits.max), int(limits.min), dtype)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The dtype that tensors, dtypes and plain numbers have together; the numbers are weak."""
    numbers = [each for each in arrays_and_dtypes if isinstance(each, (int, float))]
    dtypes = [dtype_of(each) for each in arrays_and_dtypes if not isinstance(each, (int, float))]
    if not dtypes:
        raise UsageError("result_type needs a tensor or a dtype", got=f"{len(numbers)} numbers")
    dtype = result_dtype(*dtypes)
    for number in numbers:
        if isinstance(number, float):
            dtype = floating_dtype(dtype)
        elif dtype is bool and type(number) is int:
            dtype = DEFAULT_INT
    return dtype


def can_cast(from_: Any, to: DType, /) -> Any:
    """Whether a dtype, or a tensor's, becomes another one by promotion."""
    return result_dtype(dtype_of(from_), to) is to
