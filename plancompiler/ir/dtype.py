"""Element types, by the names NumPy gives them; bfloat16 by that of `ml_dtypes`."""

from __future__ import annotations

import enum

import numpy as np

from plancompiler.errors import DTypeError
from plancompiler.ir.bfloat16 import bfloat16


class DType(enum.Enum):
    """An element type. `DType.parse("float32")`; `str(dtype)` is the name."""

    BOOL = "bool"
    UINT8 = "uint8"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"

    itemsize: int
    """Bytes of one element."""
    is_floating: bool
    is_integer: bool
    is_signed: bool
    """Whether it has negative numbers."""

    def __init__(self, name: str) -> None:
        self._numpy = None if name == "bfloat16" else np.dtype(name)
        kind = "f" if self._numpy is None else self._numpy.kind
        self.itemsize = 2 if self._numpy is None else self._numpy.itemsize
        self.is_floating = kind == "f"
        self.is_integer = kind in "iu"
        self.is_signed = kind in "if"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype. DTypeError for bfloat16 where the package for it is missing."""
        return bfloat16() if self._numpy is None else self._numpy

    @property
    def is_half(self) -> bool:
        """Whether it is a floating dtype of 16 bits, on which arithmetic is done in float32."""
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @property
    def accumulator(self) -> DType:
        """The dtype in which its numbers are added up: float32 for 16 bits, else its own."""
        return DType.FLOAT32 if self.is_half else self

    @property
    def range(self) -> tuple[float, float]:
        """The least positive normal number and the greatest finite one, of a floating dtype."""
        if self is DType.BFLOAT16:
            return 2.0**-126, (2.0 - 2.0**-7) * 2.0**127
        limits = np.finfo(self.value)
        return float(limits.tiny), float(limits.max)

    @classmethod
    def parse(cls, value: DType | str | np.dtype[np.generic] | type) -> DType:
        """The DType named by a string, a NumPy dtype or a NumPy scalar type.

        DTypeError for what is none, and for bfloat16 where the package for it is missing.
        """
        if isinstance(value, DType):
            return value
        try:
            dtype = _BY_NAME[value if isinstance(value, str) else np.dtype(value).name]
        except (KeyError, TypeError, ValueError):
            raise DTypeError(
                "unknown dtype", got=repr(value), expected="one of " + ", ".join(_BY_NAME)
            ) from None
        if dtype is DType.BFLOAT16:
            bfloat16()
        return dtype

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return f"DType.{self.name}"


_BY_NAME = {dtype.value: dtype for dtype in DType}
