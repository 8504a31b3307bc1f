"""Creation functions of the array API. Without a device, all ranks hold the whole value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler import frontend
from plancompiler.array_api.dtypes import DEFAULT_FLOAT, DEFAULT_INT
from plancompiler.array_api.placement import placement_of
from plancompiler.eager.creation import tensor
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.world import current_world
from plancompiler.errors import DTypeError
from plancompiler.frontend import functions
from plancompiler.ir import DType, Placement
from plancompiler.ir.operators import TensorOperators

Shape = int | Sequence[int]


def _shape(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _dtype_of_numbers(*numbers: Any) -> DType:
    """The default dtype for plain numbers."""
    if all(isinstance(number, (bool, np.bool_)) for number in numbers):
        return DType.BOOL
    whole = all(isinstance(number, (int, np.integer)) for number in numbers)
    return DEFAULT_INT if whole else DEFAULT_FLOAT


def asarray(
    obj: Any,
    /,
    *,
    dtype: DType | None = None,
    device: Placement | None = None,
    copy: bool | None = None,
) -> DistTensor:
    """A tensor of a number, nested lists, an array of another library, or a tensor.

    Floating numbers of Python become float32 by default, whole ones int64. A tensor stays itself if
    nothing about it changes and `copy` is not True.
    """
    if isinstance(obj, DistTensor):
        return _as_given(obj, dtype, device, copy)
    if copy is False:
        raise ValueError("only a tensor is one already: another value has to be copied")
    array = np.asarray(_plain(obj))
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise DTypeError(
            "a tensor holds real numbers or truth values",
            got=f"{array.dtype} of shape {array.shape}",
        )
    wanted = dtype
    if wanted is None and not hasattr(obj, "dtype") and array.dtype == np.float64:
        wanted = DEFAULT_FLOAT
    return tensor(array, placement_of(device), dtype=wanted)


def _plain(obj: Any) -> Any:
    """Nested lists with numbers in the place of tensors; arrays as NumPy's."""
    if isinstance(obj, (list, tuple)):
        return [_plain(each) for each in obj]
    if isinstance(obj, DistTensor):
        return obj.tolist()
    if hasattr(obj, "__dlpack__") and not isinstance(obj, np.ndarray):
        return np.from_dlpack(obj)
    return obj


def _as_given(
    x: DistTensor, dtype: DType | None, device: Placement | None, copy: bool | None
) -> DistTensor:
    same = x.dtype if dtype is None else dtype
    there = x.placement if device is None else placement_of(device)
    changes = same is not x.dtype or there != x.placement
    if copy is False and changes:
        raise ValueError("the tensor would have to be copied to have another dtype or device")
    if changes or copy:
        x = x.cast(same)
    return x if there == x.placement else x.redistribute(placement=there)


def from_dlpack(
    x: Any, /, *, device: Placement | None = None, copy: bool | None = None
) -> DistTensor:
    """A tensor of an array of another library, which exports it by DLPack.

    It is copied unless `copy` is False; then the tensor has its memory, and a change of one is
    seen in the other.
    """
    array = np.from_dlpack(x, copy=copy)
    if device is None and isinstance(x, DistTensor):
        device = x.placement
    placement = placement_of(device)
    if copy is not False:
        return tensor(array, placement)
    world = current_world()
    spec = world.tensor(array, placement, None).spec
    return DistTensor(spec, array)


def full(
    shape: Shape,
    fill_value: Any,
    *,
    dtype: DType | None = None,
    device: Placement | None = None,
) -> Any:
    """A tensor of one number."""
    if isinstance(fill_value, TensorOperators):
        dtype, fill_value = dtype or fill_value.dtype, fill_value.item()  # type: ignore[attr-defined]  # of eager tensors
    wanted = dtype or _dtype_of_numbers(fill_value)
    if wanted is DType.BOOL:
        fill_value = bool(fill_value)
    elif isinstance(fill_value, bool):
        fill_value = int(fill_value)
    return frontend.trace.full(_shape(shape), fill_value, wanted, placement_of(device))


def _filled(number: int) -> Callable[..., Any]:
    def function(
        shape: Shape, *, dtype: DType | None = None, device: Placement | None = None
    ) -> Any:
        return full(shape, number, dtype=dtype or DEFAULT_FLOAT, device=device)

    return function


def _filled_like(number: int) -> Callable[..., Any]:
    def function(x: Any, /, *, dtype: DType | None = None, device: Placement | None = None) -> Any:
        return full_like(x, number, dtype=dtype, device=device)

    return function


zeros, ones, empty = _filled(0), _filled(1), _filled(0)
zeros_like, ones_like, empty_like = _filled_like(0), _filled_like(1), _filled_like(0)


def full_like(
    x: Any, /, fill_value: Any, *, dtype: DType | None = None, device: Placement | None = None
) -> Any:
    """A tensor of one number in the shape of another one, by default of its dtype and device."""
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device or x.placement)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DType | None = None,
    device: Placement | None = None,
) -> Any:
    """Numbers from `start` on, `step` apart, below `stop` (above it where `step` is negative); with
    one number only, from 0 to below that.
    """
    if stop is None:
        start, stop = 0, start
    wanted = dtype or _dtype_of_numbers(start, stop, step)
    return functions.arange(start, stop, step, dtype=wanted, placement=placement_of(device))


def linspace(
    start: float,
    stop: float,
    /,
    num: int,
    *,
    dtype: DType | None = None,
    device: Placement | None = None,
    endpoint: bool = True,
) -> Any:
    """`num` numbers at equal distances from `start` to `stop`, which is the last one unless
    `endpoint` is False.
    """
    count = num if endpoint else num + 1
    made = functions.linspace(
        start, stop, count, dtype=dtype or DEFAULT_FLOAT, placement=placement_of(device)
    )
    return made if endpoint else made[:num]


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: DType | None = None,
    device: Placement | None = None,
) -> Any:
    """A matrix of zeros with ones on a diagonal; square by default."""
    return functions.eye(
        n_rows, n_cols, k, dtype=dtype or DEFAULT_FLOAT, placement=placement_of(device)
    )


def meshgrid(*arrays: Any, indexing: str = "xy") -> tuple[Any, ...]:
    """Coordinates of a grid from those along each axis."""
    return functions.meshgrid(*arrays, indexing=indexing)


def tril(x: Any, /, *, k: int = 0) -> Any:
    """Matrices with zeros above a diagonal."""
    return functions.tril(x, k)


def triu(x: Any, /, *, k: int = 0) -> Any:
    """Matrices with zeros below a diagonal."""
    return functions.triu(x, k)
