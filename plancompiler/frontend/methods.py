"""Methods of tensors: the public functions whose first argument is a tensor, in one table.

`x.permute(1, 0)` is `pc.permute(x, (1, 0))`, of eager tensors and of those of a job alike. Where
the only other argument of a function is a list of whole numbers, its method takes them one by one,
too. What is said here besides: methods under a second name, and those that are no function's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from plancompiler.frontend import functions
from plancompiler.frontend.functions import linalg
from plancompiler.frontend.functions.derived import Tensor
from plancompiler.ir import DType, Placement
from plancompiler.ir.operators import Scalar, TensorOperators, filled, whole_numbers
from plancompiler.ir.source import user_line
from plancompiler.ir.tensor_methods import TensorMethods

Method = Callable[..., Any]

_TENSOR_NAMES = ("x", "a")
"""What functions call a first argument that is any tensor; others say what theirs is for."""
_LISTS = ("Sequence[int]", "int | Sequence[int]", "Axes")


# --- what is no function's ------------------------------------------------------------------------


def view(x: Tensor, *shape: Any) -> Tensor:
    """The same elements in another shape; one extent may be -1. ShapeError where they would have to
    be copied, for which there is `reshape`.
    """
    if len(shape) == 1 and isinstance(shape[0], (str, DType)):
        raise UsageError(
            "the bytes of a tensor are not read as another dtype",
            op="view",
            source=user_line(),
            got=shape[0],
            expected="extents",
            hint="x.to(dtype) converts the numbers",
        )
    return _shared("view", x.reshape(*shape))


def view_as(x: Tensor, other: TensorOperators) -> Tensor:
    """The same elements in the shape of another tensor; see `view`."""
    return _shared("view_as", x.reshape(other.shape))


def _shared(name: str, made: Tensor) -> Tensor:
    if not getattr(made, "is_view", True):  # values of a job have no memory to share
        raise ShapeError(
            f"{name} would have to copy the elements, which do not lie in row-major order",
            op=name,
            source=user_line(),
            hint="x.reshape(...) copies where it must; so does x.contiguous() before",
        )
    return made


def reshape_as(x: Tensor, other: TensorOperators) -> Tensor:
    """The same elements in the shape of another tensor."""
    return x.reshape(other.shape)


def expand_as(x: Tensor, other: TensorOperators) -> Tensor:
    """x broadcast to the shape of another tensor."""
    return functions.expand(x, other.shape)


def repeat(x: Tensor, *repeats: Any, axis: int | None = None, total: int | None = None) -> Tensor:
    """The whole tensor, repeated so often along each axis, as in PyTorch; `tile` in NumPy.

    With `axis=` each element of that axis is repeated, as NumPy's method does. UsageError for fewer
    numbers than axes, which mean one thing in NumPy and nothing in PyTorch.
    """
    given: Any = repeats[0] if len(repeats) == 1 else repeats
    if axis is not None:
        elements: Tensor = functions.repeat(x, given, axis, total)
        return elements
    numbers = whole_numbers("repeats", given)
    if len(numbers) < x.ndim:
        raise UsageError(
            "repeat needs a number for each axis of the tensor",
            op="repeat",
            source=user_line(),
            got=numbers,
            expected=f"{x.ndim} numbers or more",
            hint="x.repeat_interleave(n) repeats each element, x.tile(n) the whole tensor",
        )
    return functions.tile(x, numbers)


def to(
    x: Tensor,
    *targets: Any,
    dtype: Any = None,
    placement: Placement | None = None,
    device: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> Tensor:
    """The tensor as another dtype, on another placement, or as another tensor is: `x.to("int64")`,
    `x.to(placement)`, `x.to(other)`; itself where it is so already, unless `copy`.

    UsageError for a device other than that of its placement: placements say where tensors lie.
    """
    for target in (*targets, device):
        if isinstance(target, TensorOperators):
            dtype, placement = target.dtype, getattr(target, "placement", None)
        elif isinstance(target, Placement):
            placement = target
        elif isinstance(target, str) and _is_device(target):
            _check_device(x, target)
        elif target is not None:
            dtype = target
    moved = x
    if dtype is not None and (wanted := DType.parse(dtype)) is not x.dtype:
        moved = moved.cast(wanted)
    if placement is not None and placement != x.placement:  # type: ignore[attr-defined]  # every tensor has one
        moved = moved.redistribute(placement)
    return functions.clone(x) if copy and moved is x else moved


def _is_device(name: str) -> bool:
    return name.partition(":")[0] in ("cpu", "cuda", "gpu")


def _check_device(x: Any, device: str) -> None:
    kind = x.placement.device_type
    wanted = device.partition(":")[0].replace("gpu", "cuda")
    if kind != wanted:
        raise UsageError(
            "a placement says on which devices a tensor lies",
            op="to",
            source=user_line(),
            got=device,
            expected=f"{kind}, where it is",
            hint=f'x.redistribute(pc.Placement("{wanted}", ranks)) moves it',
        )


def cpu(x: Tensor) -> Tensor:
    """The tensor itself, which lies on a CPU; UsageError for others."""
    return to(x, "cpu")


def cuda(x: Tensor) -> Tensor:
    """The tensor itself, which lies on a GPU; UsageError for others."""
    return to(x, "cuda")


def type_as(x: Tensor, other: TensorOperators) -> Tensor:
    """The same values in the dtype of another tensor."""
    return to(x, other.dtype)


def contiguous(x: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, else a copy."""
    either: Any = x  # eager tensors have a method of their own
    return x if either.is_contiguous() else functions.clone(x)


def is_contiguous(x: TensorOperators) -> bool:
    """Whether the elements lie in row-major order, which only views of eager tensors may not; the
    same in every layout.
    """
    return True


def dim(x: TensorOperators) -> int:
    """The number of axes."""
    return x.ndim


def numel(x: TensorOperators) -> int:
    """The number of elements."""
    return int(x.size)


def element_size(x: TensorOperators) -> int:
    """Bytes of an element."""
    return x.dtype.itemsize


def is_floating_point(x: TensorOperators) -> bool:
    """Whether the dtype is a floating one."""
    return x.dtype.is_floating


def t(x: Tensor) -> Tensor:
    """A matrix transposed; what has fewer axes as it is."""
    if x.ndim > 2:
        raise AttributeValueError(
            "t transposes a matrix",
            op="t",
            source=user_line(),
            got=f"{x.ndim} axes",
            hint="x.mT transposes each matrix, x.permute(...) any axes",
        )
    return x.transpose()


def where(x: Any, condition: Any, other: Any) -> Any:
    """x where the condition holds, else `other`."""
    return functions.where(condition, x, other)


def new_full(x: Tensor, shape: Any, value: Scalar, *, dtype: Any = None, **options: Any) -> Tensor:
    """A tensor of one number, of this shape, on the placement of x and of its dtype by default."""
    _refuse_options("new_full", x, options)
    extents = whole_numbers("extents", shape)
    kind = x.dtype if dtype is None else DType.parse(dtype)
    if kind.is_floating:
        value = float(value)
    elif kind is DType.BOOL:
        value = bool(value)
    return filled(x, value, extents, kind)


def new_zeros(x: Tensor, *shape: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Zeros of this shape, on the placement of x and of its dtype by default."""
    return new_full(x, _extents(shape), 0, dtype=dtype, **options)


def new_ones(x: Tensor, *shape: Any, dtype: Any = None, **options: Any) -> Tensor:
    """Ones of this shape, on the placement of x and of its dtype by default."""
    return new_full(x, _extents(shape), 1, dtype=dtype, **options)


def new_empty(x: Tensor, *shape: Any, dtype: Any = None, **options: Any) -> Tensor:
    """`new_zeros`: no tensor has unset elements."""
    return new_full(x, _extents(shape), 0, dtype=dtype, **options)


def _extents(shape: tuple[Any, ...]) -> Any:
    return shape[0] if len(shape) == 1 else shape


def _refuse_options(name: str, x: TensorOperators, options: Mapping[str, Any]) -> None:
    """PyTorch's options for where and how: None and False, which are its defaults, are left out,
    and a device where x is.
    """
    for option, value in options.items():
        known = option in ("device", "layout", "requires_grad", "pin_memory")
        if option == "device" and isinstance(value, str):
            _check_device(x, value)
            continue
        if not known or value not in (None, False):
            raise UsageError(
                f"{name} does not know this keyword",
                op=name,
                source=user_line(),
                got=f"{option}={value!r}",
                hint="tensors lie where x does; x.requires_grad = True asks for a gradient",
            )


def _cast(dtype: str) -> Method:
    def method(x: Tensor) -> Tensor:
        return x if str(x.dtype) == dtype else x.cast(dtype)

    method.__doc__ = f"The same values as {dtype}; itself where it is {dtype}."
    return method


_CASTS = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
    "bool": "bool",
}

_OWN: Mapping[str, Method] = {
    **{name: _cast(dtype) for name, dtype in _CASTS.items()},
    **{
        each.__name__: each
        for each in (
            *(contiguous, cpu, cuda, dim, element_size, expand_as, is_contiguous, new_empty),
            *(new_full, new_ones, new_zeros, numel, repeat, t, to, type_as, view, view_as, where),
            *(is_floating_point, reshape_as),
        )
    },
    "ndimension": dim,
    "nelement": numel,
}
"""Methods that are no public functions."""

_SYNONYMS: Mapping[str, Method] = {
    "absolute": functions.abs,
    "adjoint": functions.matrix_transpose,
    "amax": functions.max,
    "amin": functions.min,
    "astype": functions.cast,
    "arccos": functions.acos,
    "arccosh": functions.acosh,
    "arcsin": functions.asin,
    "arcsinh": functions.asinh,
    "arctan": functions.atan,
    "arctan2": functions.atan2,
    "arctanh": functions.atanh,
    "bitwise_left_shift": functions.shift_left,
    "bitwise_right_shift": functions.shift_right,
    "clamp": functions.clip,
    "clamp_max": functions.minimum,
    "clamp_min": functions.maximum,
    "copy": functions.clone,
    "divide": functions.div,
    "eq": functions.equal,
    "ge": functions.greater_equal,
    "gt": functions.greater,
    "le": functions.less_equal,
    "lt": functions.less,
    "mm": functions.matmul,
    "multiply": functions.mul,
    "mv": functions.matmul,
    "ne": functions.not_equal,
    "negative": functions.neg,
    "searchsorted": functions.searchsorted,
    "sgn": functions.sign,
    "split_with_sizes": functions.split,
    "subtract": functions.sub,
    "take_along_dim": functions.take_along_axis,
    "true_divide": functions.div,
    "unfold": functions.unfold_axis,
    **{
        name: getattr(linalg, name)
        for name in ("cholesky", "det", "logdet", "matrix_exp", "matrix_power", "pinv", "slogdet")
    },
    "inverse": linalg.inv,
    "pinverse": linalg.pinv,
    "qr": linalg.qr,
    "svd": linalg.svd,
}
"""Second names of functions, by which both communities call them."""


# --- from functions to methods --------------------------------------------------------------------


def takes_a_tensor_first(function: object) -> bool:
    """Whether the first argument of a public function is a tensor of any meaning."""
    if not inspect.isfunction(function):
        return False
    parameters = list(inspect.signature(function).parameters.values())
    return (
        bool(parameters)
        and parameters[0].name in _TENSOR_NAMES
        and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and "out" in {each.name for each in parameters}
    )


def _method_of(function: Method) -> Method:
    """The function as a method: itself, unless numbers may be given one by one."""
    others = [
        each
        for each in list(inspect.signature(function).parameters.values())[1:]
        if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(others) != 1 or others[0].annotation not in _LISTS:
        return function

    @wraps(function)
    def method(x: Any, *numbers: Any, **named: Any) -> Any:
        if len(numbers) > 1:
            numbers = (numbers,)
        return function(x, *numbers, **named)

    vars(method)["one_by_one"] = True  # for `scripts/generate_methods`
    method.__doc__ = f"{function.__doc__}\n\nAs a method it takes the numbers one by one, too."
    return method


FUNCTION_METHODS: Mapping[str, Method] = {
    name: _method_of(function)
    for name in functions.__all__
    if takes_a_tensor_first(function := getattr(functions, name))
}
"""Methods that are public functions of the same name."""

METHODS: Mapping[str, Method] = {
    **{name: _method_of(function) for name, function in _SYNONYMS.items()},
    **FUNCTION_METHODS,
    **_OWN,
}
"""All methods that tensors get from here; those that their classes define take precedence."""

for _name, _each in METHODS.items():
    setattr(TensorMethods, _name, _each)
