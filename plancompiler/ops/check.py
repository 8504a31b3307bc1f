"""What shape rules check: the number of inputs, their dtypes and shapes, and the attributes.

The errors name the op kind; whoever records the op adds its name and the user's line (`error.at`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plancompiler.errors import AttributeValueError, DTypeError, ShapeError
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import TensorType
from plancompiler.ops.registry import AttrMap, Types

FLOATS = frozenset(dtype for dtype in DType if dtype.is_floating)
INTEGERS = frozenset(dtype for dtype in DType if dtype.is_integer)
NUMBERS = FLOATS | INTEGERS
SIGNED = frozenset(dtype for dtype in NUMBERS if dtype.is_signed)
ANY = frozenset(DType)

_MISSING = object()


def describe(inputs: Iterable[TensorType]) -> str:
    """Input types as an error shows them."""
    return ", ".join(map(str, inputs)) or "no inputs"


def expect_inputs(kind: str, inputs: Types, count: int) -> None:
    """The op has exactly this many inputs."""
    if len(inputs) != count:
        raise ShapeError(
            f"{kind} has another number of inputs than it needs",
            got=f"{len(inputs)} ({describe(inputs)})",
            expected=count,
        )


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


def expect_accumulated(kind: str, tensor: TensorType, dtype: DType, what: str) -> None:
    """A tensor holds what was added up of numbers of a dtype: in that, or in its accumulator."""
    expect_dtype(kind, tensor, frozenset({dtype, dtype.accumulator}), what)


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
    found = []
    for position in range(-ndim, 0):
        extents = {shape[position] for shape in shapes if len(shape) >= -position} - {1}
        if len(extents) > 1:
            raise ShapeError(
                f"the shapes given to {kind} do not broadcast together",
                got=" and ".join(map(str, shapes)),
                expected=f"equal extents or 1 along axis {position}",
            )
        found.append(extents.pop() if extents else 1)
    return tuple(found)


def only_attrs(kind: str, attrs: AttrMap, *names: str) -> None:
    """The op has no attributes but these."""
    for name in attrs:
        if name not in names:
            raise AttributeValueError(
                f"{kind} has no attribute {name!r}",
                got=f"{name}={attrs[name]!r}",
                expected="only " + ", ".join(names) if names else "no attributes",
            )


def _read(attrs: AttrMap, name: str, default: object, expected: str) -> object:
    value = attrs.get(name, default)
    if value is _MISSING:
        raise AttributeValueError(f"attribute {name!r} is missing", expected=expected)
    return value


def _wrong(name: str, value: object, expected: str) -> AttributeValueError:
    return AttributeValueError(
        f"attribute {name!r} has a wrong value", got=repr(value), expected=expected
    )


def bool_attr(attrs: AttrMap, name: str, default: object = _MISSING) -> bool:
    """A truth value."""
    value = _read(attrs, name, default, "True or False")
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def int_attr(
    attrs: AttrMap, name: str, default: object = _MISSING, least: int | None = None
) -> int:
    """A whole number, not below `least`."""
    expected = "a whole number" if least is None else f"a whole number of at least {least}"
    value = _read(attrs, name, default, expected)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, expected)
    if least is not None and value < least:
        raise _wrong(name, value, expected)
    return value


def float_attr(
    attrs: AttrMap,
    name: str,
    default: object = _MISSING,
    *,
    least: float | None = None,
    below: float | None = None,
) -> float:
    """A number with `least <= number < below`."""
    expected = "a number"
    if least is not None:
        expected += f" of at least {least:g}"
    if below is not None:
        expected += f" below {below:g}"
    value = _read(attrs, name, default, expected)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(name, value, expected)
    # Comparisons are written so that NaN fails them.
    if (least is not None and not value >= least) or (below is not None and not value < below):
        raise _wrong(name, value, expected)
    return float(value)


def str_attr(
    attrs: AttrMap, name: str, default: object = _MISSING, among: Sequence[str] | None = None
) -> str:
    """A text, one of `among`."""
    expected = "a text" if among is None else "one of " + ", ".join(among)
    value = _read(attrs, name, default, expected)
    if not isinstance(value, str) or (among is not None and value not in among):
        raise _wrong(name, value, expected)
    return value


def ints_attr(attrs: AttrMap, name: str, default: object = _MISSING) -> tuple[int, ...]:
    """A tuple of whole numbers."""
    value = _read(attrs, name, default, "a tuple of whole numbers")
    if not isinstance(value, tuple) or not all(type(item) is int for item in value):
        raise _wrong(name, value, "a tuple of whole numbers")
    return value


def floats_attr(attrs: AttrMap, name: str, default: object = _MISSING) -> tuple[float, ...]:
    """A tuple of numbers."""
    value = _read(attrs, name, default, "a tuple of numbers")
    if not isinstance(value, tuple) or not all(type(item) in (int, float) for item in value):
        raise _wrong(name, value, "a tuple of numbers")
    return tuple(float(item) for item in value)


def strs_attr(
    attrs: AttrMap, name: str, default: object = _MISSING, least: int = 0
) -> tuple[str, ...]:
    """A tuple of at least `least` texts."""
    expected = f"a tuple of at least {least} texts" if least else "a tuple of texts"
    value = _read(attrs, name, default, expected)
    if (
        not isinstance(value, tuple)
        or len(value) < least
        or not all(isinstance(item, str) for item in value)
    ):
        raise _wrong(name, value, expected)
    return value


def shape_attr(attrs: AttrMap, name: str = "shape") -> tuple[int, ...]:
    """A tensor shape."""
    shape = ints_attr(attrs, name)
    if any(extent < 0 for extent in shape):
        raise _wrong(name, shape, "extents of at least 0")
    return shape


def dtype_attr(attrs: AttrMap, name: str = "dtype") -> DType:
    """A dtype by its name."""
    return DType.parse(str_attr(attrs, name))


def axis_attr(attrs: AttrMap, ndim: int, name: str = "axis") -> int:
    """An axis of a tensor with `ndim` axes, counted from the front."""
    axis = int_attr(attrs, name)
    if not 0 <= axis < ndim:
        raise _wrong(name, axis, f"an axis from 0 to {ndim - 1}" if ndim else "a tensor with axes")
    return axis


def axes_attr(attrs: AttrMap, ndim: int, name: str = "axes") -> tuple[int, ...]:
    """Distinct axes of a tensor with `ndim` axes, in any order."""
    axes = ints_attr(attrs, name)
    if len(set(axes)) != len(axes) or any(not 0 <= axis < ndim for axis in axes):
        raise _wrong(name, axes, f"distinct axes from 0 to {ndim - 1}")
    return axes
