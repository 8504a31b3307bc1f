"""The dtype that tensors of several dtypes have together: NumPy 2's, with float32 as the dtype of
plain floating numbers; and the block in which dtypes may not mix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import numpy as np

from plancompiler.ir.dtype import DType

_STRICT: ContextVar[bool] = ContextVar("plancompiler_strict_dtypes", default=False)


@lru_cache(maxsize=1024)
def result_dtype(first: DType, *others: DType) -> DType:
    """The least dtype that holds the numbers of all, as NumPy's `result_type` gives it.

    bfloat16, which NumPy does not have, stands where float16 does; the two together are float32.
    """
    dtype = first
    for other in others:
        dtype = _of_two(dtype, other)
    return dtype


def _of_two(one: DType, other: DType) -> DType:
    if one is other:
        return one
    pair = {one, other}
    if DType.BFLOAT16 not in pair:
        return DType.parse(np.promote_types(one.value, other.value))
    (beside,) = pair - {DType.BFLOAT16}
    if beside is DType.FLOAT16:
        return DType.FLOAT32
    dtype = _of_two(DType.FLOAT16, beside)
    return DType.BFLOAT16 if dtype is DType.FLOAT16 else dtype


def floating_dtype(dtype: DType) -> DType:
    """The dtype in which numbers of a dtype are divided and averaged: a floating one is its own;
    whole numbers of 32 and 64 bits have float64, shorter ones and truth values float32.
    """
    return dtype if dtype.is_floating else result_dtype(dtype, DType.FLOAT32)


def dtypes_may_mix() -> bool:
    """Whether tensors of several dtypes may meet in an op: not inside `strict_dtypes`."""
    return not _STRICT.get()


@contextmanager
def strict_dtypes() -> Iterator[None]:
    """Inside, tensors of different dtypes and numbers that would change a tensor's dtype are
    refused with a DTypeError; only truth values still count as zeros and ones.
    """
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)
