"""Initial values of variables. Random ones follow from the variable's name and the global index of
each element, so that they are the same on every layout. Stored ones lie in a safetensors file, of
which a rank reads the part that it holds."""

from __future__ import annotations

import logging

import numpy as np

from plancompiler.errors import AttributeValueError, DataError, DTypeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.shard import Region, region_shape
from plancompiler.ops import random
from plancompiler.ops.registry import Array
from plancompiler.ops.stored import read_box, stored_place

_log = logging.getLogger(__name__)

INITIALIZERS: dict[str, tuple[str, ...]] = {
    "zeros": (),
    "ones": (),
    "constant": ("value",),
    "normal": ("mean", "std"),
    "uniform": ("low", "high"),
    "stored": (),
    "missing": (),
}
"""Names of initialisers and of their arguments. A `stored` value is named by a file and a key; a
`missing` one must come from a checkpoint."""


def check_initializer(
    init: str, init_args: tuple[float, ...], dtype: DType, file: str = ""
) -> None:
    """Raise an AttributeValueError or DTypeError unless `initialize` can make this."""
    if init not in INITIALIZERS:
        raise AttributeValueError(
            "unknown initialiser", got=repr(init), expected="one of " + ", ".join(INITIALIZERS)
        )
    names = INITIALIZERS[init]
    if len(init_args) != len(names) or not all(np.isfinite(init_args)):
        raise AttributeValueError(
            f"initialiser {init!r} has wrong arguments",
            got=init_args,
            expected=f"finite numbers for ({', '.join(names)})" if names else "no arguments",
        )
    if (init == "stored") != bool(file):
        raise AttributeValueError(
            f"initialiser {init!r} and the attribute 'file' do not go together",
            got=repr(file),
            expected="the path of a safetensors file" if init == "stored" else "no file",
        )
    if init == "normal" and init_args[1] < 0:
        raise AttributeValueError("a standard deviation is negative", got=init_args[1])
    if init == "uniform" and init_args[0] > init_args[1]:
        raise AttributeValueError(
            "the lower bound of a uniform initialiser is above the upper", got=init_args
        )
    if init in ("normal", "uniform") and not dtype.is_floating:
        raise DTypeError(f"initialiser {init!r} needs a floating dtype", got=dtype)


def initialize(
    init: str,
    init_args: tuple[float, ...],
    name: str,
    seed: int,
    shape: tuple[int, ...],
    region: Region,
    dtype: DType,
    file: str = "",
    key: str = "",
    out: Array | None = None,
    file_shape: tuple[int, ...] = (),
) -> Array:
    """The box `region` of the initial value of variable `name` with global `shape`.

    A stored value has the shape `file_shape` in its file, where that is given, and the same
    elements in the same order.
    A stored value is read into `out`, where that is given, and no byte of the file besides the box
    is copied. Random numbers are made in float64 and rounded once, so that every dtype starts from
    the same.
    Raises DataError where the file of a stored value is not there or holds another shape or kind of
    numbers, and for a missing value.
    """
    check_initializer(init, init_args, dtype, file)
    if init == "missing":
        raise DataError(
            f"variable {name!r} has no initial value",
            expected="weights from a file or a checkpoint",
            hint="give the parameter a value, or start the run with restore=FOLDER",
        )
    if init == "stored":
        return _stored(name, file, key, shape, region, dtype, out, file_shape or shape)
    if init in ("normal", "uniform"):
        if init == "normal":
            shift, scale = init_args
            values = random.normal(seed, name, 0, shape, region)
        else:
            low, high = init_args
            shift, scale = low, high - low
            values = random.uniform(seed, name, 0, shape, region)
        values *= scale
        values += shift
        return values.astype(dtype.numpy, copy=False)
    value = {"zeros": 0.0, "ones": 1.0}.get(init)
    return np.full(region_shape(region), init_args[0] if value is None else value, dtype.numpy)


def _stored(
    name: str,
    file: str,
    key: str,
    shape: tuple[int, ...],
    region: Region,
    dtype: DType,
    out: Array | None,
    file_shape: tuple[int, ...],
) -> Array:
    stored = stored_place(file, key)
    if stored.shape != file_shape or not (
        stored.dtype is dtype or (stored.dtype.is_floating and dtype.is_floating)
    ):
        raise DataError(
            f"the stored value of variable {name!r} does not fit",
            got=f"{stored.dtype}{list(stored.shape)} in {file}",
            expected=f"{dtype}{list(file_shape)}",
        )
    if out is None:
        out = np.empty(region_shape(region), dtype.numpy)
    nbytes = out.size * stored.dtype.itemsize
    _log.debug("%d bytes of variable %s are read from %s", nbytes, name, file)
    read_box(file, key, region, out, shape)
    return out
