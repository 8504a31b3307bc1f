"""The operators and methods every tensor has, symbolic or eager, written once.

A tensor class supplies `_apply(kind, inputs, attrs)`; everything here ends in that one call. Python
scalars become attributes of the `*_scalar` ops, so that they keep the tensor's dtype.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast, overload

from plancompiler.errors import (
    AttributeValueError,
    DTypeError,
    IndexingError,
    PlanCompilerError,
    ShapeError,
    TracingError,
    UsageError,
)
from plancompiler.hooks.array_namespace import array_namespace
from plancompiler.hooks.other_names import no_such_name
from plancompiler.ir.dtype import DType
from plancompiler.ir.indexing import taken
from plancompiler.ir.numpy_calls import function_on_tensors, ufunc_on_tensors
from plancompiler.ir.op import AttrValue
from plancompiler.ir.placement import Placement, require_placement
from plancompiler.ir.promotion import dtypes_may_mix, floating_dtype, result_dtype
from plancompiler.ir.sbp import NdSbp, Sbp
from plancompiler.ir.source import user_line
from plancompiler.ir.spelling import takes_spellings
from plancompiler.ir.tensor_methods import TensorMethods

Scalar = bool | int | float
Result_co = TypeVar("Result_co", covariant=True)
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
_TRUTHS_AS = {
    "div": DType.FLOAT32,
    **dict.fromkeys(("floor_divide", "fmod", "matmul", "pow", "remainder"), DType.INT8),
    **dict.fromkeys(("shift_left", "shift_right"), DType.INT8),
    **dict.fromkeys(("less", "less_equal", "greater", "greater_equal"), DType.UINT8),
}
"""As what two tensors of truth values count in other ops."""
_FOR_WHOLE = frozenset({"div", "logical_and", "logical_or", "logical_xor"})
"""Ops in which whole numbers of one dtype become something else."""
_LOGICAL = frozenset({"logical_and", "logical_or", "logical_xor"})
"""Ops on truth values, as which numbers count that are not zero."""
_INTERNAL = frozenset({"beside", "coerced", "counted_as", "plain", "takes_truth"})
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


Axes = int | Sequence[int] | None
"""Several axes, or one, or all."""


class _TotalOf(Protocol[Result_co]):
    """A sum or mean over axes, with keywords as we or PyTorch spell them."""

    @overload
    def __call__(
        self, axis: Axes = None, keepdims: bool = False, dtype: DType | str | None = None
    ) -> Result_co: ...

    @overload
    def __call__(
        self, *, dim: Axes = None, keepdim: bool = False, dtype: DType | str | None = None
    ) -> Result_co: ...


class _Total(Protocol):
    """A sum or mean as a method."""

    def __get__(self, tensor: Tensor, owner: type[Tensor]) -> _TotalOf[Tensor]: ...


class _ExtremeOf(Protocol[Result_co]):
    """The greatest or least element over axes, likewise."""

    @overload
    def __call__(self, axis: Axes = None, keepdims: bool = False) -> Result_co: ...

    @overload
    def __call__(self, *, dim: Axes = None, keepdim: bool = False) -> Result_co: ...


class _Extreme(Protocol):
    """The greatest or least element as a method."""

    def __get__(self, tensor: Tensor, owner: type[Tensor]) -> _ExtremeOf[Tensor]: ...


def _total(method: Callable[..., Any]) -> _Total:
    return cast("_Total", takes_spellings(method))


def _extreme(method: Callable[..., Any]) -> _Extreme:
    return cast("_Extreme", takes_spellings(method))


class ElementCount(int):
    """A number of elements that gives, when it is called, the extents that it is the product of."""

    shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> ElementCount:
        """The number of elements of a shape."""
        count = cls(math.prod(shape))
        count.shape = shape
        return count

    def __call__(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]


class TensorOperators(TensorMethods):
    """Mixin: arithmetic, comparison, shape and reduction methods on top of `_apply`."""

    __slots__ = ()
    shape: tuple[int, ...]
    dtype: DType

    def __dir__(self) -> list[str]:
        """What users may use: no internal names, such as those with one underscore in front."""
        names = (name for name in super().__dir__() if name not in _INTERNAL)
        return [name for name in names if name.startswith("__") or not name.startswith("_")]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such_name("x", name)

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
            kind, left, right = promoted(kind, *((other, self) if swapped else (self, other)))
            if kind == "matmul" and min(left.ndim, right.ndim) < 2:
                return vector_product(left, right)
            return self._apply(kind, (left, right), {})[0]
        if is_scalar(other):
            number = other.item() if hasattr(other, "item") else other
            wanted = self.counted_as(kind, number)
            if wanted is not None:
                counted = self.cast(wanted)
                return counted._binary(kind, number, swapped=swapped)  # noqa: SLF001  # of this class
            if isinstance(number, bool):
                counted_number = self.plain(number)
                if counted_number is not number:
                    return self._binary(kind, counted_number, swapped=swapped)
            if kind in TENSORS_ONLY or self.takes_truth(kind, number):
                return self._binary(kind, self.beside(kind, number), swapped=swapped)
            attrs: dict[str, AttrValue] = {"scalar": number}
            if swapped:
                attrs["swapped"] = True
            return self._apply(f"{kind}_scalar", (self,), attrs)[0]
        return self._binary(kind, self.coerced(kind, other), swapped=swapped)

    def counted_as(self, kind: str, number: Scalar) -> DType | None:
        """What the tensor becomes beside a number that its dtype cannot hold: truth values count
        as zeros and ones, whole numbers as floating ones. None where the tensor's dtype stays.
        """
        dtype, mixed = self.dtype, dtypes_may_mix()
        if dtype.is_floating or isinstance(number, bool):
            return None
        fraction = isinstance(number, float) or kind == "div"
        if dtype is DType.BOOL:
            if kind in _OF_BITS and not mixed:
                return None
            return DType.FLOAT32 if fraction else DType.INT64
        return floating_dtype(dtype) if fraction and mixed else None

    def plain(self, number: Scalar) -> Scalar:
        """True and False beside numbers, as which they count."""
        if not isinstance(number, bool) or self.dtype is DType.BOOL or not dtypes_may_mix():
            return number
        return float(number) if self.dtype.is_floating else int(number)

    def takes_truth(self, kind: str, number: Scalar) -> bool:
        """Whether True or False becomes a tensor beside this one: beside truth values, where the op
        is another one for two of them.
        """
        counts = isinstance(number, bool) and self.dtype is DType.BOOL
        return counts and (kind in _OF_TRUTHS or kind in _TRUTHS_AS)

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
        number = self.plain(number)
        dtype, truth = self.counted_as(kind, number) or self.dtype, isinstance(number, bool)
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

    @property
    def size(self) -> ElementCount:
        """The number of elements; called, the shape or the extent of an axis, as in PyTorch."""
        return ElementCount.of(self.shape)

    @property
    def mT(self) -> Self:  # noqa: N802  # as the array API names it
        """Each matrix [..., m, n] transposed: [..., n, m]."""
        if self.ndim < 2:
            raise ShapeError("a matrix has two axes", got=self.shape, expected="[..., m, n]")
        return self.transpose((*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """The functions of the Python array API: see `pc.array_api`."""
        return array_namespace(api_version)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return ufunc_on_tensors(ufunc, method, inputs, options, TensorOperators)

    def __array_function__(
        self, function: Any, types: object, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        return function_on_tensors(function, args, options)

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

    def __round__(self, ndigits: int | None = None) -> Any:
        """Every element with so many decimal places, as a tensor."""
        tensor: Any = self  # which has the method of the public function
        return tensor.round(ndigits or 0)

    # Comparison, elementwise. What tells tensors apart is `is`, and so is their hash.
    __hash__ = object.__hash__

    def __pos__(self) -> Self:
        return self._unary("cast", dtype=str(self.dtype))

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
        """Axes permuted; without arguments, reversed; two numbers exchange these axes, as in
        PyTorch.
        """
        order = _int_tuple(axes) or tuple(reversed(range(self.ndim)))
        if len(axes) == 2:
            one, other = (one_axis(each, self.ndim) for each in order)
            exchanged = list(range(self.ndim))
            exchanged[one], exchanged[other] = other, one
            order = tuple(exchanged)
        return self._unary("transpose", axes=order)

    @property
    def T(self) -> Self:  # noqa: N802  # the name every array library gives it
        return self.transpose()

    def __getitem__(self, index: Any) -> Self:
        """Elements by whole numbers (which drop their axis), slices with any step, `...`, None
        (a new axis), and lists or tensors of whole numbers or truth values, as in NumPy.
        """
        try:
            part: Self = taken(self, index)
        except PlanCompilerError as error:
            error.at(op="x[index]", source=user_line())
            raise
        return part

    def __iter__(self) -> Iterator[Self]:
        """Its rows: `self[0]`, `self[1]` and so on, each an op."""
        if not self.shape:
            raise ShapeError(
                "a scalar has no rows", source=user_line(), got="shape ()", expected="an axis"
            )
        return (self[row] for row in range(self.shape[0]))

    def __contains__(self, value: Any) -> bool:
        """Whether any element equals a value."""
        equal = self.equal(value)
        return bool(equal._unary("any", axes=tuple(range(self.ndim)), keepdims=False))  # noqa: SLF001  # of this class

    def __setitem__(self, index: Any, value: Any) -> None:
        """TracingError: only eager tensors have memory in which elements could change."""
        raise TracingError(
            f"the elements of a {type(self).__name__} cannot be changed in place: it has no memory",
            source=user_line(),
            got=f"x[{index!r}] = {type(value).__name__}",
            hint="make another value: x = pc.index_put(x, index, value)",
        )

    # Reductions. `axis` is None (all axes), one axis or several.
    @_total
    def sum(
        self, axis: Axes = None, keepdims: bool = False, dtype: DType | str | None = None
    ) -> Self:
        """The sum over axes; with `dtype` of the numbers in that."""
        if dtype is not None:
            return self.cast(dtype).sum(axis, keepdims)
        return self._unary("sum", axes=self._axes(axis), keepdims=keepdims)

    @_total
    def mean(
        self, axis: Axes = None, keepdims: bool = False, dtype: DType | str | None = None
    ) -> Self:
        """The mean over axes; of whole numbers in float64, of truth values in float32. That of no
        elements is NaN. With `dtype` it is that of the numbers in that.
        """
        if dtype is not None:
            return self.cast(dtype).mean(axis, keepdims)
        if self.dtype is DType.BOOL:
            return self.cast(DType.FLOAT32).mean(axis, keepdims)
        axes = self._axes(axis)
        count = 1
        for each in axes:
            count *= self.shape[each]
        dtype = self.dtype
        share = 1.0 / count if count else math.nan
        wide = dtype.accumulator if dtype.is_floating else DType.FLOAT64
        if wide is dtype:
            return self.sum(axes, keepdims) * share
        # The sum may leave the range of 16 bits where the mean does not.
        mean = self.cast(wide).sum(axes, keepdims) * share
        return mean.cast(dtype) if dtype.is_floating else mean

    @_extreme
    def max(self, axis: Axes = None, keepdims: bool = False) -> Self:
        """The greatest element over axes; with a tensor in their place the greater ones."""
        if isinstance(axis, TensorOperators):
            return self._binary("maximum", axis)
        return self._unary("max", axes=self._axes(axis), keepdims=keepdims)

    @_extreme
    def min(self, axis: Axes = None, keepdims: bool = False) -> Self:
        """The least element over axes; with a tensor in their place the lesser ones."""
        if isinstance(axis, TensorOperators):
            return self._binary("minimum", axis)
        return self._unary("min", axes=self._axes(axis), keepdims=keepdims)

    def redistribute(self, placement: Placement | None = None, sbp: SbpLike | None = None) -> Self:
        """The same value on another placement and/or with another SBP: the one word for it."""
        if placement is not None:
            require_placement(placement, "redistribute", "a pc.Placement first, or sbp=")
        return self._redistribute(placement, None if sbp is None else NdSbp.of(sbp))

    @abstractmethod
    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> Self:
        """The tensor in another layout."""

    def _axes(self, axis: int | Sequence[int] | None) -> tuple[int, ...]:
        if not self.shape and axis in (0, -1):
            return ()  # a scalar counts as a vector of one element, as in PyTorch
        return normalize_axes(axis, self.ndim)


def _is_operand(value: object) -> bool:
    """Whether a value can be compared element by element, or is refused. Anything else, such as
    None or a text, is unequal to a tensor, as Python's `==` says of unlike things.
    """
    return isinstance(value, (int, float, complex, list, tuple)) or hasattr(value, "shape")


Tensor = TypeVar("Tensor", bound=TensorOperators)


def filled(
    x: Tensor,
    value: Scalar = 0.0,
    shape: tuple[int, ...] | None = None,
    dtype: DType | None = None,
) -> Tensor:
    """A tensor of one value on the placement of `x`, with its shape and dtype unless others are
    given.
    """
    shape = x.shape if shape is None else shape
    dtype = x.dtype if dtype is None else dtype
    return x._full(shape, dtype, value)  # noqa: SLF001  # what every tensor has


def promoted(kind: str, left: Tensor, right: Tensor) -> tuple[str, Tensor, Tensor]:
    """An op and its two operands in one dtype, the least that holds the numbers of both.

    Truth values count as zeros and ones beside numbers; sums and products of two masks are masks.
    Whole numbers are divided as floating ones. Inside `strict_dtypes` only truth values become
    something else, and the op refuses the rest.
    """
    one, other = left.dtype, right.dtype
    truths = (one is DType.BOOL) + (other is DType.BOOL)
    if one is other and not truths and (one.is_floating or kind not in _FOR_WHOLE):
        return kind, left, right
    if not dtypes_may_mix() and (not truths or kind in _OF_BITS):
        return kind, left, right
    if kind in _LOGICAL:
        return kind, in_dtype(left, DType.BOOL), in_dtype(right, DType.BOOL)
    dtype = result_dtype(one, other)
    if truths == 2:
        dtype = _TRUTHS_AS.get(kind, dtype)
        kind = _OF_TRUTHS.get(kind, kind)
    elif kind == "div":
        dtype = floating_dtype(dtype)
    return kind, in_dtype(left, dtype), in_dtype(right, dtype)


def in_dtype(tensor: Tensor, dtype: DType) -> Tensor:
    """The tensor as another dtype, or itself."""
    return tensor if tensor.dtype is dtype else tensor.cast(dtype)


def in_one_dtype(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors in the least dtype that holds the numbers of all; inside `strict_dtypes` as they
    are, for an op to refuse.
    """
    dtypes = [tensor.dtype for tensor in tensors]
    if not dtypes_may_mix() or all(dtype is dtypes[0] for dtype in dtypes):
        return tuple(tensors)
    dtype = result_dtype(*dtypes)
    return tuple([in_dtype(tensor, dtype) for tensor in tensors])


def vector_product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product in which one or both are vectors, as NumPy has it: a vector on the left is a
    row, one on the right a column, and the axis that this adds is dropped again.
    """
    if left.ndim == 0 or right.ndim == 0:
        raise ShapeError(
            "matmul needs an axis on either side",
            op="matmul",
            source=user_line(),
            got=f"{left.shape} @ {right.shape}",
            hint="x * y multiplies by a scalar",
        )
    rows = left.reshape((1, *left.shape)) if left.ndim == 1 else left
    columns = right.reshape((*right.shape, 1)) if right.ndim == 1 else right
    product = rows._apply("matmul", (rows, columns), {})[0]  # noqa: SLF001  # of this class
    batch = product.shape[:-2]
    kept = (*left.shape[-2:-1], *(right.shape[-1:] if right.ndim > 1 else ()))
    return product.reshape((*batch, *kept))


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
        raise IndexingError(
            "axes must be distinct and within the tensor",
            got=axes,
            expected=f"axes from {-ndim} to {ndim - 1}",
        )
    return tuple(normalized)


def one_axis(axis: int, ndim: int) -> int:
    """An axis as a non-negative number."""
    axes = normalize_axes(axis, ndim)
    if len(axes) != 1:
        raise AttributeValueError("one axis is needed here", got=axis, expected="a whole number")
    return axes[0]


def _int_tuple(values: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    return whole_numbers("extents and axes", values[0] if len(values) == 1 else values)
