"""Arrays by name as bytes in the safetensors format, which holds data only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import deserialize
from safetensors.numpy import save

from plancompiler.errors import CheckpointError, PlanCompilerError
from plancompiler.ir import DType
from plancompiler.ir.shard import element_count
from plancompiler.ir.strict_json import JsonObject, parse_json

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = {
    "BOOL": DType.BOOL,
    "U8": DType.UINT8,
    "U16": DType.UINT16,
    "U32": DType.UINT32,
    "U64": DType.UINT64,
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
_NAMES = {dtype.value: name for name, dtype in DTYPES.items()}
_PIECE_BYTES = 8 << 20
MAX_HEADER = 256 << 20
"""Bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where an array lies in a file."""

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    """In the file."""

    @property
    def nbytes(self) -> int:
        return element_count(self.shape) * self.dtype.itemsize


def parse_header(
    text: bytes,
    where: str,
    begin: int,
    end: int,
    error: type[PlanCompilerError] = CheckpointError,
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """What a safetensors header lists, and the texts beside it; data lie between two offsets.
    An `error` for what is no such header.
    """
    what = f"the header of {where}"
    header = JsonObject(parse_json(text, what, error=error, max_bytes=MAX_HEADER), what, error)
    beside = JsonObject(header.get("__metadata__") or {}, what, error)
    tensors = {}
    for name in header.names - {"__metadata__"}:
        entry = header.inner(name)
        dtype = DTYPES.get(entry.text("dtype"))
        if dtype is None:
            raise entry.refused("dtype", entry.get("dtype"), "a dtype of tensors")
        offsets = entry.numbers("data_offsets")
        tensor = StoredTensor(dtype, entry.numbers("shape"), begin + offsets[0] if offsets else 0)
        if (
            len(offsets) != 2
            or offsets[1] - offsets[0] != tensor.nbytes
            or begin + offsets[1] > end
        ):
            raise entry.refused("data_offsets", entry.get("data_offsets"), "a place in the file")
        tensors[name] = tensor
    return tensors, {name: beside.text(name) for name in beside.names}


def arrays_to_bytes(
    arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Contiguous arrays, with texts beside them."""
    return save(dict(arrays), metadata=None if metadata is None else dict(metadata))


def array_pieces(
    arrays: Mapping[str, Array], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The same, piece by piece of at most 8 MiB, for files: no second copy of all arrays is made.

    The arrays must be contiguous, and must not change until the last piece was taken.
    """
    # Large elements first, so that each array begins at a multiple of its element's size.
    ordered = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        array = arrays[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        # As plain bytes: buffers of bfloat16 have no form that Python knows.
        data = arrays[name].reshape(-1).view(np.uint8).data
        for at in range(0, len(data), _PIECE_BYTES):
            yield data[at : at + _PIECE_BYTES]


def arrays_from_bytes(data: bytes) -> dict[str, Array]:
    """The arrays in bytes.

    The library's own reader does not know bfloat16. Raises its SafetensorError for what is no such
    file, KeyError for a dtype that no tensor of ours has.
    """
    return {
        name: np.frombuffer(entry["data"], DTYPES[entry["dtype"]].numpy).reshape(entry["shape"])
        # The library's compiled reader has no types.
        for name, entry in deserialize(data)  # type: ignore[no-untyped-call]
    }
