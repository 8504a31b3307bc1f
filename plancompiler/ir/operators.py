"""The operators and methods every tensor has, symbolic or eager, written once.

A tensor class supplies `_apply(kind, inputs, attrs)`; everything here ends in that one call. Python
scalars become attributes of the `*_scalar` ops, so that they keep the tensor's dtype.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar, cast

from plancompiler.errors import (
    AttributeValueError,
    DTypeError,
    ShapeError,
    TracingError,
    UsageError,
)
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import AttrValue
from plancompiler.ir.placement import Placement, require_placement
from plancompiler.ir.sbp import NdSbp, Sbp
from plancompiler.ir.source import user_line

Scalar = bool | int | float
SbpLike = NdSbp | Sbp | str | Iterable[Sbp | str]

TENSORS_ONLY = frozenset(
    {
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "floor_divide",
        "matmul",
        "remainder",
        "shift_left",
        "shift_right",
    }
)
"""Ops behind operators that have no form with a number as an attribute."""
_OF_BITS = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right"})
"""Ops in which truth values do not count as numbers."""
_OF_TRUTHS = {
    "add": "bitwise_or",
    "mul": "bitwise_and",
    "maximum": "bitwise_or",
    "minimum": "bitwise_and",
}
"""What arithmetic on two tensors of truth values is, as in NumPy."""
_INTERNAL = frozenset({"beside", "coerced", "counted_as"})
"""Names of methods that only tensor classes use."""
_NO_NUMBERS = "OSUMmVc"
"""Kinds of NumPy's dtypes that are no real numbers."""


def is_scalar(value: object) -> bool:
    """Whether a value is a plain number (NumPy scalars included)."""
    return isinstance(value, (bool, int, float)) or (
        hasattr(value, "item")
        and getattr(value, "shape", None) == ()
        and not hasattr(value, "_apply")
        and _is_real(getattr(value, "dtype", None))
    )


def _is_real(dtype: Any) -> bool:
    """Whether the elements of an array of this dtype are numbers: no texts, dates or objects."""
    # NumPy calls the kind of dtypes that others define, such as bfloat16, "V".
    return getattr(dtype, "kind", "f") not in _NO_NUMBERS or dtype.name == "bfloat16"


class _OfOne(Protocol):
    """A method without arguments."""

    def __get__(self, tensor: Tensor, owner: type[Tensor]) -> Callable[[], Tensor]: ...


class _OfTwo(Protocol):
    """A method of another tensor or a number."""

    def __get__(self, tensor: Tensor, owner: type[Tensor]) -> Callable[[Any], Tensor]: ...


def _of_one(kind: str) -> _OfOne:
    """The method that is an op of one tensor."""

    def method(self: TensorOperators) -> TensorOperators:
        return self._unary(kind)

    method.__name__ = kind
    return cast("_OfOne", method)


def _of_two(kind: str, *, swapped: bool = False) -> _OfTwo:
    """The method or operator that is an op of two; `swapped` where the tensor is on the right."""

    def method(self: TensorOperators, other: Any) -> TensorOperators:
        return self._binary(kind, other, swapped=swapped)

    method.__name__ = kind
    return cast("_OfTwo", method)


class TensorOperators:
    """Mixin: arithmetic, comparison, shape and reduction methods on top of `_apply`."""

    __slots__ = ()
    __array_ufunc__ = None  # NumPy scalars on the left hand side must defer to us
    __iter__ = None  # else Python would walk rows by __getitem__, one op each

    shape: tuple[int, ...]
    dtype: DType

    def __dir__(self) -> list[str]:
        """What users may use: no internal names, such as those with one underscore in front."""
        names = (name for name in super().__dir__() if name not in _INTERNAL)
        return [name for name in names if name.startswith("__") or not name.startswith("_")]

    @abstractmethod
    def _apply(
        self, kind: str, inputs: Sequence[Self], attrs: Mapping[str, AttrValue]
    ) -> tuple[Self, ...]:
        """Outputs of one op."""

    @abstractmethod
    def _full(self, shape: tuple[int, ...], dtype: DType, value: Scalar) -> Self:
        """A constant tensor on the same placement."""

    @abstractmethod
    def _source(self, kind: str, attrs: Mapping[str, AttrValue]) -> tuple[Self, ...]:
        """Outputs of an op without inputs, on the same placement."""

    def _unary(self, kind: str, **attrs: AttrValue) -> Self:
        return self._apply(kind, (self,), attrs)[0]

    def _binary(self, kind: str, other: Any, *, swapped: bool = False) -> Self:
        if isinstance(other, type(self)):
            kind, *pair = promoted(kind, *((other, self) if swapped else (self, other)))
            return self._apply(kind, pair, {})[0]
        if is_scalar(other):
            number = other.item() if hasattr(other, "item") else other
            wanted = self.counted_as(kind, number)
            if wanted is not None:
                counted = self.cast(wanted)
                return counted._binary(kind, number, swapped=swapped)  # noqa: SLF001  # of this class
            if kind in TENSORS_ONLY:
                return self._binary(kind, self.beside(kind, number), swapped=swapped)
            attrs: dict[str, AttrValue] = {"scalar": number}
            if swapped:
                attrs["swapped"] = True
            return self._apply(f"{kind}_scalar", (self,), attrs)[0]
        return self._binary(kind, self.coerced(kind, other), swapped=swapped)

    def counted_as(self, kind: str, number: Scalar) -> DType | None:
        """What truth values become beside a number, as which they count as zeros and ones; None
        where the tensor's dtype stays.
        """
        if self.dtype is not DType.BOOL or isinstance(number, bool) or kind in _OF_BITS:
            return None
        whole = isinstance(number, int) and kind != "div"
        return DType.INT64 if whole else DType.FLOAT32

    def beside(self, kind: str, number: Scalar) -> Self:
        """A number as a tensor beside this one, for an op that takes tensors only."""
        if kind == "matmul":
            raise UsageError(
                "matmul takes two tensors",
                op=kind,
                source=user_line(),
                got=repr(number),
                expected="a tensor of one axis or more",
                hint="x * number multiplies every element",
            )
        dtype, truth = self.dtype, isinstance(number, bool)
        if dtype.is_floating:
            if not truth:
                return self._full((), dtype, number)
        elif isinstance(number, int) and truth is not dtype.is_integer:
            return self._full((), dtype, number)
        raise DTypeError(
            f"{kind} cannot combine this number with a tensor of {dtype}",
            op=kind,
            source=user_line(),
            got=repr(number),
            expected="a number of the tensor's kind, so that its dtype stays",
            hint="convert the tensor with cast first",
        )

    def coerced(self, kind: str, value: object) -> Self:
        """Another operand as a tensor beside this one. TracingError: only eager tensors may."""
        raise TracingError(
            f"{kind} cannot combine a {type(self).__name__} with this",
            op=kind,
            source=user_line(),
            got=type(value).__name__,
            expected=f"a {type(self).__name__} or a plain number",
            hint="feed arrays through pc.input or pc.constant",
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    # Arithmetic. Commutative ops need no swapped form.
    __add__ = _of_two("add")
    __radd__ = __add__
    __sub__ = _of_two("sub")
    __rsub__ = _of_two("sub", swapped=True)
    __mul__ = _of_two("mul")
    __rmul__ = __mul__
    __truediv__ = _of_two("div")
    __rtruediv__ = _of_two("div", swapped=True)
    __pow__ = _of_two("pow")
    __rpow__ = _of_two("pow", swapped=True)
    __floordiv__ = _of_two("floor_divide")
    __rfloordiv__ = _of_two("floor_divide", swapped=True)
    __mod__ = _of_two("remainder")
    __rmod__ = _of_two("remainder", swapped=True)
    __neg__ = _of_one("neg")
    __abs__ = _of_one("abs")
    __matmul__ = _of_two("matmul")
    __rmatmul__ = _of_two("matmul", swapped=True)

    # Bits of whole numbers; of bool, the truth values.
    __and__ = _of_two("bitwise_and")
    __rand__ = __and__
    __or__ = _of_two("bitwise_or")
    __ror__ = __or__
    __xor__ = _of_two("bitwise_xor")
    __rxor__ = __xor__
    __invert__ = _of_one("bitwise_not")
    __lshift__ = _of_two("shift_left")
    __rlshift__ = _of_two("shift_left", swapped=True)
    __rshift__ = _of_two("shift_right")
    __rrshift__ = _of_two("shift_right", swapped=True)

    # Comparison, elementwise. What tells tensors apart is `is`, and so is their hash.
    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> Any:
        return self._binary("equal", other) if _is_operand(other) else NotImplemented

    def __ne__(self, other: Any) -> Any:
        return self._binary("not_equal", other) if _is_operand(other) else NotImplemented

    __lt__ = _of_two("less")
    __le__ = _of_two("less_equal")
    __gt__ = _of_two("greater")
    __ge__ = _of_two("greater_equal")
    equal = _of_two("equal")
    not_equal = _of_two("not_equal")

    # Elementwise.
    exp = _of_one("exp")
    log = _of_one("log")
    sqrt = _of_one("sqrt")
    tanh = _of_one("tanh")
    sigmoid = _of_one("sigmoid")
    relu = _of_one("relu")
    gelu = _of_one("gelu")

    def cast(self, dtype: DType | str) -> Self:
        """The same values as another dtype."""
        return self._unary("cast", dtype=str(DType.parse(dtype)))

    # Shape.
    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """The same elements in another shape; one extent may be -1."""
        return self._unary("reshape", shape=_int_tuple(shape))

    def transpose(self, *axes: int | Sequence[int]) -> Self:
        """Axes permuted; without arguments, reversed."""
        order = _int_tuple(axes) or tuple(reversed(range(self.ndim)))
        return self._unary("transpose", axes=order)

    @property
    def T(self) -> Self:  # noqa: N802  # the name every array library gives it
        return self.transpose()

    def __getitem__(self, index: Any) -> Self:
        """Basic indexing: whole numbers (which drop their axis), slices of step 1, and `...`."""
        starts, stops, kept = _slice_bounds(index, self.shape)
        part = self
        if starts != (0,) * self.ndim or stops != self.shape:
            part = self._unary("slice", starts=starts, stops=stops)
        shape = tuple(part.shape[axis] for axis in kept)
        return part if len(kept) == self.ndim else part.reshape(shape)

    def __setitem__(self, index: Any, value: Any) -> None:
        """TracingError: only eager tensors have memory in which elements could change."""
        raise TracingError(
            f"the elements of a {type(self).__name__} cannot be changed in place: it has no memory",
            source=user_line(),
            got=f"x[{index!r}] = {type(value).__name__}",
            hint="make another value, for example with pc.where or pc.concat",
        )

    # Reductions. `axis` is None (all axes), one axis or several.
    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        return self._unary("sum", axes=self._axes(axis), keepdims=keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        """The mean over axes; of whole numbers in float64, of truth values in float32."""
        if self.dtype is DType.BOOL:
            return self.cast(DType.FLOAT32).mean(axis, keepdims)
        axes = self._axes(axis)
        count = 1
        for each in axes:
            count *= self.shape[each]
        if not count:
            raise ShapeError("the mean of no elements is not a number", got=f"shape {self.shape}")
        dtype = self.dtype
        wide = dtype.accumulator if dtype.is_floating else DType.FLOAT64
        if wide is dtype:
            return self.sum(axes, keepdims) * (1.0 / count)
        # The sum may leave the range of 16 bits where the mean does not.
        mean = self.cast(wide).sum(axes, keepdims) * (1.0 / count)
        return mean.cast(dtype) if dtype.is_floating else mean

    def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        return self._unary("max", axes=self._axes(axis), keepdims=keepdims)

    def min(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Self:
        return self._unary("min", axes=self._axes(axis), keepdims=keepdims)

    def argmax(self, axis: int = -1, keepdims: bool = False) -> Self:
        return self._unary("argmax", axis=self._axis(axis), keepdims=keepdims)

    def softmax(self, axis: int = -1) -> Self:
        return self._unary("softmax", axis=self._axis(axis))

    def log_softmax(self, axis: int = -1) -> Self:
        return self._unary("log_softmax", axis=self._axis(axis))

    def redistribute(self, placement: Placement | None = None, sbp: SbpLike | None = None) -> Self:
        """The same value on another placement and/or with another SBP: the one word for it."""
        if placement is not None:
            require_placement(placement, "redistribute", "a pc.Placement first, or sbp=")
        return self._redistribute(placement, None if sbp is None else NdSbp.of(sbp))

    @abstractmethod
    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> Self:
        """The tensor in another layout."""

    def _axis(self, axis: int) -> int:
        axes = normalize_axes(axis, self.ndim)
        if len(axes) != 1:
            raise AttributeValueError(
                "one axis is needed here", got=axis, expected="a whole number"
            )
        return axes[0]

    def _axes(self, axis: int | Sequence[int] | None) -> tuple[int, ...]:
        return normalize_axes(axis, self.ndim)


def _is_operand(value: object) -> bool:
    """Whether a value can be compared element by element, or is refused. Anything else, such as
    None or a text, is unequal to a tensor, as Python's `==` says of unlike things.
    """
    return isinstance(value, (int, float, complex, list, tuple)) or hasattr(value, "shape")


Tensor = TypeVar("Tensor", bound=TensorOperators)


def promoted(kind: str, left: Tensor, right: Tensor) -> tuple[str, Tensor, Tensor]:
    """An op and its two operands where one or both are truth values.

    Beside numbers they count as zeros and ones of that dtype, so that masks can be multiplied with;
    sums and products of two masks are masks, and quotients float32.
    """
    truths = (left.dtype is DType.BOOL) + (right.dtype is DType.BOOL)
    if not truths or kind in _OF_BITS:
        return kind, left, right
    if truths == 2:
        if kind == "div":
            return kind, left.cast(DType.FLOAT32), right.cast(DType.FLOAT32)
        return _OF_TRUTHS.get(kind, kind), left, right
    if left.dtype is DType.BOOL:
        return kind, left.cast(right.dtype), right
    return kind, left, right.cast(left.dtype)


def whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """One whole number of any integer type, or several, as a tuple; else an AttributeValueError."""
    if value.__class__ is int:
        return (value,)
    try:
        if hasattr(value, "__index__") and getattr(value, "shape", ()) == ():
            return (operator.index(value),)
        return tuple([operator.index(each) for each in value])
    except TypeError:
        raise AttributeValueError(
            f"{name} must be whole numbers",
            got=f"{type(value).__name__} {value}"[:80],
            expected="a whole number, or a list or tuple of them",
        ) from None


def normalize_axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Axes as sorted, distinct, non-negative numbers; None means all."""
    if axis is None:
        return tuple(range(ndim))
    axes = whole_numbers("axes", axis)
    normalized = sorted({each + ndim if each < 0 else each for each in axes})
    if len(normalized) != len(axes) or any(not 0 <= each < ndim for each in normalized):
        raise AttributeValueError(
            "axes must be distinct and within the tensor",
            got=axes,
            expected=f"axes from {-ndim} to {ndim - 1}",
        )
    return tuple(normalized)


def _slice_bounds(
    index: Any, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Starts and stops per axis of a basic index, and the axes that stay."""
    entries = list(index) if isinstance(index, tuple) else [index]
    # Not `in`: an array would be compared element by element.
    dots = sum(entry is Ellipsis for entry in entries)
    if dots > 1 or len(entries) > len(shape) + dots:
        raise AttributeValueError(
            "an index has too many entries", got=repr(index), expected=f"at most {len(shape)}"
        )
    at = next((at for at, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    rest = len(entries) - at - 1
    entries[at : at + 1] = [slice(None)] * (len(shape) - at - max(rest, 0))
    starts, stops, kept = [], [], []
    for axis, (entry, extent) in enumerate(zip(entries, shape, strict=True)):
        if isinstance(entry, slice):
            start, stop, step = entry.indices(extent)
            if step != 1:
                raise AttributeValueError("a slice must have step 1", got=repr(entry))
            kept.append(axis)
            starts.append(start)
            stops.append(max(start, stop))
            continue
        if isinstance(entry, bool) or not is_scalar(entry) or entry % 1 != 0:
            raise AttributeValueError(
                "an index is not a whole number, a slice or `...`",
                got=type(entry).__name__,
                hint="use pc.where or pc.embedding to select by data",
            )
        position = int(entry) + extent if entry < 0 else int(entry)
        if not 0 <= position < extent:
            raise AttributeValueError(
                f"an index is outside axis {axis}",
                got=int(entry),
                expected=f"{-extent} to {extent - 1}",
            )
        starts.append(position)
        stops.append(position + 1)
    return tuple(starts), tuple(stops), tuple(kept)


def _int_tuple(values: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    return whole_numbers("extents and axes", values[0] if len(values) == 1 else values)
