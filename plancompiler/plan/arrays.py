"""Arrays by name as bytes in the safetensors format, which holds data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import deserialize
from safetensors.numpy import save

from plancompiler.ir import DType

Array = np.ndarray[Any, np.dtype[Any]]

_DTYPES = {
    "BOOL": DType.BOOL,
    "U8": DType.UINT8,
    "I8": DType.INT8,
    "I16": DType.INT16,
    "I32": DType.INT32,
    "I64": DType.INT64,
    "F16": DType.FLOAT16,
    "F32": DType.FLOAT32,
    "F64": DType.FLOAT64,
    "BF16": DType.BFLOAT16,
}
"""Dtypes by the names of the format."""


def arrays_to_bytes(
    arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Contiguous arrays, with texts beside them."""
    return save(dict(arrays), metadata=None if metadata is None else dict(metadata))


def arrays_from_bytes(data: bytes) -> dict[str, Array]:
    """The arrays in bytes.

    The library's own reader does not know bfloat16. Raises its SafetensorError for what is no such
    file, KeyError for a dtype that no tensor of ours has.
    """
    return {
        name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]].numpy).reshape(entry["shape"])
        # The library's compiled reader has no types.
        for name, entry in deserialize(data)  # type: ignore[no-untyped-call]
    }
