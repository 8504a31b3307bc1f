"""What shape rules check: the dtypes and shapes of inputs.

The errors name the op kind; whoever records the op adds its name and the user's line (`error.at`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plancompiler.errors import AttributeValueError, DTypeError, ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType

Types = tuple[TensorType, ...]

FLOATS = frozenset(dtype for dtype in DType if dtype.is_floating)
INTEGERS = frozenset(dtype for dtype in DType if dtype.is_integer)
NUMBERS = FLOATS | INTEGERS
ANY = frozenset(DType)


def describe(inputs: Iterable[TensorType]) -> str:
    """Input types as an error shows them."""
    return ", ".join(map(str, inputs)) or "no inputs"


def same_types(inputs: Types, attrs: Mapping[str, Any]) -> Types:
    """The shape rule of ops whose outputs have the types of the inputs."""
    return inputs


def expect_dtype(
    kind: str, tensor: TensorType, accepted: frozenset[DType], what: str = "input"
) -> None:
    """A tensor's dtype is one of `accepted`."""
    if tensor.dtype not in accepted:
        raise DTypeError(
            f"{kind} does not accept this dtype for its {what}",
            got=tensor,
            expected="one of " + ", ".join(str(dtype) for dtype in DType if dtype in accepted),
            hint="convert it with cast",
        )


def check_float(kind: str, number: float) -> None:
    """A number beside a floating tensor is one that a float can hold."""
    try:
        float(number)
    except OverflowError:
        raise AttributeValueError(
            f"{kind} was given a whole number that no float can hold",
            got=f"a number of {int(number).bit_length()} bits",
            expected="less than 2**1024",
        ) from None


def expect_same_dtype(kind: str, inputs: Types) -> DType:
    """All inputs have one dtype; it is returned."""
    dtype = inputs[0].dtype
    if any(tensor.dtype is not dtype for tensor in inputs):
        raise DTypeError(
            f"{kind} needs inputs of one dtype",
            got=describe(inputs),
            expected=f"{dtype} for all",
            hint="convert one of them with cast",
        )
    return dtype


def expect_shape(kind: str, tensor: TensorType, shape: tuple[int, ...], what: str) -> None:
    """A tensor has exactly this shape."""
    if tensor.shape != shape:
        raise ShapeError(
            f"{kind} needs another shape for its {what}", got=tensor.shape, expected=shape
        )


def expect_ndim(kind: str, tensor: TensorType, least: int, what: str = "input") -> None:
    """A tensor has at least this many axes."""
    if len(tensor.shape) < least:
        raise ShapeError(
            f"{kind} needs more axes on its {what}",
            got=tensor.shape,
            expected=f"at least {least} axes",
        )


def broadcast_shapes(kind: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape to which NumPy broadcasts these, or a ShapeError that names them all."""
    ndim = max(map(len, shapes))
    broadcast = []
    for position in range(-ndim, 0):
        extents = {shape[position] for shape in shapes if len(shape) >= -position} - {1}
        if len(extents) > 1:
            raise ShapeError(
                f"the shapes given to {kind} do not broadcast together",
                got=" and ".join(map(str, shapes)),
                expected=f"equal extents or 1 along axis {position}",
            )
        broadcast.append(extents.pop() if extents else 1)
    return tuple(broadcast)
