"""Element types, by the names NumPy gives them."""

from __future__ import annotations

import enum

import numpy as np

from plancompiler.errors import DTypeError


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

    itemsize: int
    """Bytes of one element."""
    numpy: np.dtype[np.generic]
    """The NumPy dtype."""

    def __init__(self, name: str) -> None:
        self.numpy = np.dtype(name)
        self.itemsize = self.numpy.itemsize

    @property
    def is_floating(self) -> bool:
        return self.numpy.kind == "f"

    @property
    def is_integer(self) -> bool:
        return self.numpy.kind in "iu"

    @classmethod
    def parse(cls, value: DType | str | np.dtype[np.generic] | type) -> DType:
        """The DType named by a string, a NumPy dtype or a NumPy scalar type."""
        if isinstance(value, DType):
            return value
        try:
            return _BY_NAME[value if isinstance(value, str) else np.dtype(value).name]
        except (KeyError, TypeError):
            raise DTypeError(
                "unknown dtype", got=repr(value), expected="one of " + ", ".join(_BY_NAME)
            ) from None

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return f"DType.{self.name}"


_BY_NAME = {dtype.value: dtype for dtype in DType}
