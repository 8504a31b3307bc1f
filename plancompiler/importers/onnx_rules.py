"""The rules of ONNX's operators, in one table: most take a line.

A rule takes an operator's inputs by position and its attributes by keyword. Where a version of the
operator turned an attribute into an input, both have the same name, and one rule does for both.
Layers with parameters are in `onnx_layers`, changes of resolution in `onnx_resize`, recurrences in
`onnx_recurrence`, and attention in `onnx_attention`.
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from plancompiler.errors import ModelImportError
from plancompiler.frontend import functions as f
from plancompiler.frontend.functions import linalg
from plancompiler.frontend.trace import constant
from plancompiler.importers.graph import Array
from plancompiler.importers.imported_module import without_repeats
from plancompiler.importers.rules import ONNX_RULES, Rule, onnx_rule
from plancompiler.ir import DType, Placement
from plancompiler.ir.operators import TensorOperators

__all__ = ["ONNX_DTYPES", "ONNX_RULES", "as_tensor", "beside", "define", "refused"]

Function = Callable[..., Any]

ONNX_DTYPES: dict[int, DType] = {
    1: DType.FLOAT32,
    2: DType.UINT8,
    3: DType.INT8,
    4: DType.UINT16,
    5: DType.INT16,
    6: DType.INT32,
    7: DType.INT64,
    9: DType.BOOL,
    10: DType.FLOAT16,
    11: DType.FLOAT64,
    12: DType.UINT32,
    13: DType.UINT64,
    16: DType.BFLOAT16,
}
"""The dtypes by the numbers that the standard gives them."""


def refused(what: str, got: object, expected: str) -> ModelImportError:
    """The error for a form of an operator that has no rule."""
    return ModelImportError(
        f"the importer knows no {what} like this", got=str(got), expected=expected
    )


def dtype_of(number: int) -> DType:
    """The dtype with this number in the standard; ModelImportError for others than ours."""
    if number not in ONNX_DTYPES:
        raise refused("dtype", f"number {number}", ", ".join(map(str, ONNX_DTYPES.values())))
    return ONNX_DTYPES[number]


def define(
    functions: Mapping[str, Function],
    *,
    since: int = 1,
    arrays: bool = False,
    known: Sequence[int] = (),
) -> None:
    """Rules of a table: operators, several with spaces between them, and their function."""
    for names, function in functions.items():
        onnx_rule(*names.split(), since=since, arrays=arrays, known=known)(function)


# --- constants beside tensors ---------------------------------------------------------------------


def as_tensor(value: Any, near: Any, dtype: DType | None = None) -> Any:
    """A tensor of an array, where another tensor lives; a tensor as it is."""
    if isinstance(value, TensorOperators):
        return value
    placement: Placement = near.placement
    array = np.asarray(value)
    small = without_repeats(array)
    tensor = constant(small, dtype or DType.parse(array.dtype), placement)
    return tensor if small.shape == array.shape else f.expand(tensor, array.shape)


def beside(*values: Any) -> list[Any]:
    """Operands that broadcast: arrays as numbers or small tensors, as the shapes allow."""
    near: Any = next(each for each in values if isinstance(each, TensorOperators))
    shapes = [tuple(each.shape) for each in values]
    whole = np.broadcast_shapes(*shapes)
    operands = []
    numbers = 0
    for at, value in enumerate(values):
        if isinstance(value, TensorOperators):
            operands.append(value)
            continue
        small = without_repeats(value)
        others = shapes[:at] + shapes[at + 1 :]
        if np.broadcast_shapes(small.shape, *others) != whole:
            operands.append(as_tensor(value, near))
        elif (
            small.size == 1
            and np.broadcast_shapes(*others) == whole
            and value.dtype == near.dtype.numpy
            and np.isfinite(small.astype(np.float64)).all()
            and not numbers
        ):
            operands.append(small.reshape(()).item())
            numbers += 1
        else:
            operands.append(constant(small, DType.parse(small.dtype), near.placement))
    return operands


def _broadcasting(function: Function) -> Function:
    """A function of tensors that broadcast, as a rule that gets arrays."""

    def rule(*values: Any, **attributes: Any) -> Any:
        return function(*beside(*values), **attributes)

    return rule


def _variadic(function: Function) -> Function:
    """A function of two tensors, for any number of them."""

    def rule(*values: Any) -> Any:
        return reduce(function, beside(*values)) if len(values) > 1 else values[0]

    return rule


ONNX_RULES["getitem"] = Rule(operator.getitem)
# --- elementwise ----------------------------------------------------------------------------------


def _quotient(x: Any, y: Any) -> Any:
    """Whole numbers are divided towards zero."""
    if _dtype(x, y).is_floating:
        return f.div(x, y)
    if not _dtype(x, y).is_signed:
        return f.floor_divide(x, y)
    # What is left over has the sign of x, so the rest of the division has no fraction.
    return f.floor_divide(f.sub(x, f.fmod(x, y)), y)


def _dtype(*values: Any) -> DType:
    kind: DType = next(each for each in values if isinstance(each, TensorOperators)).dtype
    return kind


def _modulo(x: Any, y: Any, fmod: int = 0) -> Any:
    return f.fmod(x, y) if fmod else f.remainder(x, y)


def _power(x: Any, y: Any) -> Any:
    if not isinstance(x, TensorOperators):
        x = as_tensor(x, y)
    if isinstance(y, np.ndarray):
        if y.size == 1 and float(y.item()) == 2.0 and y.ndim <= x.ndim:
            return f.square(x)
        if y.size == 1 and float(y.item()) == 0.5 and y.ndim <= x.ndim and x.dtype.is_floating:
            return f.sqrt(x)
        y = (
            y.item()
            if y.size == 1 and y.ndim <= x.ndim and x.dtype.is_floating
            else (as_tensor(y, x))
        )
    made = f.pow(x, y)
    return made if made.dtype is x.dtype else f.cast(made, x.dtype)


def _shifted(x: Any, y: Any, direction: str) -> Any:
    return f.shift_left(x, y) if direction == "LEFT" else f.shift_right(x, y)


def _where(condition: Any, x: Any, y: Any) -> Any:
    near = next(each for each in (condition, x, y) if isinstance(each, TensorOperators))
    return f.where(*(as_tensor(each, near) for each in (condition, x, y)))


define(
    {
        "Add": _broadcasting(f.add),
        "Sub": _broadcasting(f.sub),
        "Mul": _broadcasting(f.mul),
        "Div": _broadcasting(_quotient),
        "Mod": _broadcasting(_modulo),
        "And": _broadcasting(f.logical_and),
        "Or": _broadcasting(f.logical_or),
        "Xor": _broadcasting(f.logical_xor),
        "BitwiseAnd": _broadcasting(f.bitwise_and),
        "BitwiseOr": _broadcasting(f.bitwise_or),
        "BitwiseXor": _broadcasting(f.bitwise_xor),
        "BitShift": _broadcasting(_shifted),
        "Equal": _broadcasting(f.equal),
        "Less": _broadcasting(f.less),
        "LessOrEqual": _broadcasting(f.less_equal),
        "Greater": _broadcasting(f.greater),
        "GreaterOrEqual": _broadcasting(f.greater_equal),
        "Sum": _variadic(f.add),
        "Max": _variadic(f.maximum),
        "Min": _variadic(f.minimum),
        "Mean": lambda *xs: _variadic(f.add)(*xs) * (1 / len(xs)),
        "PRelu": _broadcasting(lambda x, slope: f.where(f.less(x, 0), f.mul(x, slope), x)),
        "Pow": _power,
        "Where": _where,
    },
    arrays=True,
)
_OF_ONE = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Log Neg Reciprocal Relu Round"
    " Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh Mish HardSwish IsNaN"
)
"""Functions of one tensor that have one name in both."""
for _name in _OF_ONE.split():
    onnx_rule(_name)(getattr(f, _name.lower()))


def _is_infinite(x: Any, detect_negative: int = 1, detect_positive: int = 1) -> Any:
    if detect_negative and detect_positive:
        return f.isinf(x)
    if not detect_negative and not detect_positive:
        return f.full_like(x, 0).cast(DType.BOOL)
    return f.equal(x, math.inf if detect_positive else -math.inf)


def _hard_sigmoid(x: Any, alpha: float = 0.2, beta: float = 0.5) -> Any:
    return f.clip(x * alpha + beta, 0.0, 1.0)


def _clip(x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002  # the standard's names
    """Bounds are attributes, later inputs, which may be tensors."""
    bounds = [
        each.item() if isinstance(each, np.ndarray) and each.size == 1 else each
        for each in (min, max)
    ]
    if all(each is None for each in bounds):
        return x
    if any(isinstance(each, TensorOperators) for each in bounds):
        low, high = bounds
        x = x if low is None else f.maximum(x, low)
        return x if high is None else f.minimum(x, high)
    low, high = bounds
    if low is not None and high is not None and low > high:
        return f.full_like(x, high)
    if not x.dtype.is_floating:
        return f.clip(x, low, high)
    # A bound of infinity is none.
    low, high = (None if each is None or math.isinf(each) else each for each in (low, high))
    return x if low is None and high is None else f.clip(x, low, high)


def _selu(x: Any, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813) -> Any:
    return f.elu(x, alpha) * gamma


def _shrunk(x: Any, bias: float = 0.0, lambd: float = 0.5) -> Any:
    if not x.dtype.is_floating:
        wide = _shrunk(x.cast(DType.FLOAT64), bias, lambd)
        return f.cast(wide, x.dtype)
    above = f.where(f.greater(x, lambd), x - bias, f.zeros_like(x))
    return f.where(f.less(x, -lambd), x + bias, above)


define(
    {
        "Identity": lambda x: x,
        "Not": f.logical_not,
        "BitwiseNot": f.bitwise_not,
        "IsInf": _is_infinite,
        "Elu": lambda x, alpha=1.0: f.elu(x, alpha),
        "Celu": lambda x, alpha=1.0: (
            f.maximum(x, 0.0) + f.minimum(f.expm1(x * (1 / alpha)) * alpha, 0.0)
        ),
        "Selu": _selu,
        "LeakyRelu": lambda x, alpha=0.01: f.leaky_relu(x, alpha),
        "HardSigmoid": _hard_sigmoid,
        "ThresholdedRelu": lambda x, alpha=1.0: f.where(f.greater(x, alpha), x, f.zeros_like(x)),
        "Swish": lambda x, alpha=1.0: f.silu(x) if alpha == 1 else x * f.sigmoid(x * alpha),
        "Gelu": lambda x, approximate="none": (
            f.gelu(x) if approximate == "tanh" else f.gelu_exact(x)
        ),
        "Shrink": _shrunk,
    }
)
define({"Clip": _clip}, arrays=True)

# --- dtypes ---------------------------------------------------------------------------------------


def _cast(x: Any, to: int, saturate: int = 1, **rest: Any) -> Any:
    wanted = dtype_of(to)
    return x if x.dtype is wanted else f.cast(x, wanted)


def _cast_like(x: Any, like: Any, saturate: int = 1, **rest: Any) -> Any:
    wanted = DType.parse(like.dtype)
    return x if x.dtype is wanted else f.cast(as_tensor(x, like), wanted)


define({"Cast": _cast})
define({"CastLike": _cast_like}, arrays=True)

# --- shape ----------------------------------------------------------------------------------------


def at(x: Any, axis: int) -> int:
    """The axis counted from the front."""
    return axis + x.ndim if axis < 0 else axis


def numbers(values: Any) -> list[int]:
    """Whole numbers of an array or a list."""
    return [int(each) for each in np.asarray(values).reshape(-1)]


def _reshaped(x: Any, shape: Any, allowzero: int = 0) -> Any:
    wanted = [
        x.shape[axis] if extent == 0 and not allowzero else extent
        for axis, extent in enumerate(numbers(shape))
    ]
    if -1 in wanted:
        rest = math.prod(each for each in wanted if each != -1)
        wanted[wanted.index(-1)] = math.prod(x.shape) // rest if rest else 0
    return x if tuple(wanted) == x.shape else x.reshape(wanted)


def _flattened(x: Any, axis: int = 1) -> Any:
    axis = at(x, axis)
    return x.reshape([math.prod(x.shape[:axis]), math.prod(x.shape[axis:])])


def _squeezed(x: Any, axes: Any = None) -> Any:
    chosen = [each for each in range(x.ndim) if x.shape[each] == 1]
    if axes is not None:
        chosen = [at(x, each) for each in numbers(axes)]
    return f.squeeze(x, chosen) if chosen else x


def _unsqueezed(x: Any, axes: Any) -> Any:
    given = numbers(axes)
    ndim = x.ndim + len(given)
    new = {each + ndim if each < 0 else each for each in given}
    extents = iter(x.shape)
    return x.reshape([1 if axis in new else next(extents) for axis in range(ndim)])


def _transposed(x: Any, perm: Sequence[int] | None = None) -> Any:
    return x.transpose(list(perm) if perm is not None else list(range(x.ndim))[::-1])


def _expanded(x: Any, shape: Any) -> Any:
    wanted = np.broadcast_shapes(x.shape, tuple(numbers(shape)))
    return x if wanted == x.shape else f.expand(x, wanted)


def _tiled(x: Any, repeats: Any) -> Any:
    return f.tile(x, numbers(repeats))


def _split(x: Any, split: Any = None, axis: int = 0, num_outputs: int = 0, outputs: int = 1) -> Any:
    axis = at(x, axis)
    if split is None:
        count = num_outputs or outputs
        size = -(-x.shape[axis] // count)
        sizes = [size] * (count - 1) + [x.shape[axis] - size * (count - 1)]
    else:
        sizes = numbers(split)
    return tuple(f.split(x, sizes, axis))


def cut(x: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
    """Elements from `start` to `stop` along an axis, both counted from the front."""
    if (start, stop, step) == (0, x.shape[axis], 1):
        return x
    starts, stops, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[axis], stops[axis], steps[axis] = start, max(start, stop), step
    if step == 1:
        return f.slice(x, starts, stops)
    return f.strided_slice(x, starts, stops, steps)


def _sliced(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    starts, ends = numbers(starts), numbers(ends)
    axes = range(len(starts)) if axes is None else numbers(axes)
    steps = [1] * len(starts) if steps is None else numbers(steps)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis = at(x, axis)
        places = range(*slice(start, end, step).indices(x.shape[axis]))
        if step > 0:
            x = cut(x, axis, places.start, max(places.start, places.stop), step)
        elif places:
            x = f.flip(cut(x, axis, places[-1], places[0] + 1, -step), axis)
        else:
            x = cut(x, axis, 0, 0)
    return x


def taken(x: Any, places: Array, axis: int) -> Any:
    """The elements of an axis at known places, in their order."""
    if np.array_equal(places, np.arange(x.shape[axis])):
        return x
    first, count = int(places[0]) if places.size else 0, places.size
    if np.array_equal(places, np.arange(first, first + count)):
        return cut(x, axis, first, first + count)
    return f.index_select(x, as_tensor(places.astype(np.int64), x), axis)


def _padded(
    x: Any,
    pads: Any,
    constant_value: Any = None,
    axes: Any = None,
    mode: str = "constant",
    value: float = 0.0,
) -> Any:
    given = numbers(pads)
    chosen = list(range(x.ndim)) if axes is None else [at(x, each) for each in numbers(axes)]
    low, high = [0] * x.ndim, [0] * x.ndim
    for place, axis in enumerate(chosen):
        low[axis], high[axis] = given[place], given[place + len(chosen)]
    for axis in chosen:  # what is cut off is cut first
        x = cut(x, axis, max(0, -low[axis]), x.shape[axis] - max(0, -high[axis]))
    low, high = [max(0, each) for each in low], [max(0, each) for each in high]
    if not any(low) and not any(high):
        return x
    if mode == "constant":
        number = value if constant_value is None else np.asarray(constant_value).item()
        return f.pad(
            x, low, high, number if x.dtype.is_floating else x.dtype.numpy.type(number).item()
        )
    kind = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}[mode]
    for axis in chosen:
        if low[axis] or high[axis]:
            places = np.pad(np.arange(x.shape[axis]), (low[axis], high[axis]), kind)  # type: ignore[call-overload]
            x = taken(x, places, axis)
    return x


def _center_cut(x: Any, shape: Any, axes: Sequence[int] | None = None) -> Any:
    chosen = list(range(x.ndim)) if axes is None else [at(x, each) for each in axes]
    low, high = [0] * x.ndim, [0] * x.ndim
    for axis, extent in zip(chosen, numbers(shape), strict=True):
        more = extent - x.shape[axis]
        if more >= 0:
            low[axis], high[axis] = more // 2, more - more // 2
        else:
            x = cut(x, axis, -more // 2, -more // 2 + extent)
    return f.pad(x, low, high) if any(low) or any(high) else x


def _depth_to_space(x: Any, blocksize: int, mode: str = "DCR") -> Any:
    n, c, h, w = x.shape
    inner = c // blocksize**2
    if mode == "DCR":
        apart, order = [n, blocksize, blocksize, inner, h, w], [0, 3, 4, 1, 5, 2]
    else:
        apart, order = [n, inner, blocksize, blocksize, h, w], [0, 1, 4, 2, 5, 3]
    return x.reshape(apart).transpose(order).reshape([n, inner, h * blocksize, w * blocksize])


def _space_to_depth(x: Any, blocksize: int, mode: str = "DCR") -> Any:
    n, c, h, w = x.shape
    apart = x.reshape([n, c, h // blocksize, blocksize, w // blocksize, blocksize])
    order = [0, 3, 5, 1, 2, 4] if mode == "DCR" else [0, 1, 3, 5, 2, 4]
    shape = [n, c * blocksize**2, h // blocksize, w // blocksize]
    return apart.transpose(order).reshape(shape)


def _triangle(x: Any, k: Any = None, upper: int = 1) -> Any:
    diagonal = 0 if k is None else int(np.asarray(k).item())
    # Further diagonals than the matrix has are like its corners.
    diagonal = max(-x.shape[-2], min(x.shape[-1], diagonal))
    kind = x.dtype
    x = x.cast(DType.UINT8) if kind is DType.BOOL else x
    made = (f.triu if upper else f.tril)(x, diagonal)
    return made.cast(kind) if made.dtype is not kind else made


def _reversed_sequences(x: Any, sequence_lens: Any, batch_axis: int = 1, time_axis: int = 0) -> Any:
    """The first elements of each sequence in reverse order."""
    length, batch = x.shape[time_axis], x.shape[batch_axis]
    lengths = numbers(sequence_lens)
    steps = np.arange(length)
    places = np.stack([np.where(steps < n, n - 1 - steps, steps) for n in lengths])  # [batch, time]
    shape = [1] * x.ndim
    shape[batch_axis], shape[time_axis] = batch, length
    index = (places if batch_axis < time_axis else places.T).reshape(shape)
    whole = np.ascontiguousarray(np.broadcast_to(index, x.shape)).astype(np.int64)
    return f.gather(x, time_axis, as_tensor(whole, x))


define(
    {
        "Flatten": _flattened,
        "Transpose": _transposed,
        "Concat": lambda *xs, axis: f.concat(xs, axis) if len(xs) > 1 else xs[0],
        "DepthToSpace": _depth_to_space,
        "SpaceToDepth": _space_to_depth,
    }
)
define(
    {
        "Reshape": _reshaped,
        "Squeeze": _squeezed,
        "Unsqueeze": _unsqueezed,
        "Expand": _expanded,
        "Tile": _tiled,
        "Split": _split,
        "Trilu": _triangle,
        "CenterCropPad": _center_cut,
        "ReverseSequence": _reversed_sequences,
    },
    known=[1],
)
define({"Slice": _sliced, "Pad": _padded}, known=[1, 2, 3, 4])


def _eye(x: Any, dtype: int | None = None, k: int = 0) -> Any:
    wanted = x.dtype if dtype is None else dtype_of(dtype)
    return as_tensor(np.eye(x.shape[0], x.shape[1], k).astype(wanted.numpy), x)


define({"EyeLike": _eye})

# --- reductions -----------------------------------------------------------------------------------


def _reduction(
    function: Function, neutral: float | None = None, of_one: Function = lambda x: x
) -> Function:
    """A reduction whose axes are an attribute or an input; `of_one` is what becomes of elements
    where there are no axes, and `neutral` the result of nothing."""

    def rule(x: Any, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        chosen = [] if axes is None else sorted({at(x, each) for each in numbers(axes)})
        if not chosen:
            if noop_with_empty_axes:
                return of_one(x)
            chosen = list(range(x.ndim))
        if not chosen:  # one number
            return of_one(x)
        if any(x.shape[axis] == 0 for axis in chosen):
            return _of_nothing(x, chosen, bool(keepdims), neutral)
        kind = x.dtype
        made = function(x.cast(DType.UINT8) if kind is DType.BOOL else x, chosen, bool(keepdims))
        return made if made.dtype is kind else made.cast(kind)

    return rule


def _of_nothing(x: Any, axes: Sequence[int], keepdims: bool, neutral: float | None) -> Any:
    if neutral is None:
        raise refused("reduction", f"an empty tensor of shape {x.shape}", "at least one element")
    shape = [
        1 if axis in axes else extent
        for axis, extent in enumerate(x.shape)
        if keepdims or axis not in axes
    ]
    if math.isinf(neutral) and not x.dtype.is_floating:
        ends = (0, 1) if x.dtype is DType.BOOL else limits(x.dtype)
        neutral = ends[neutral > 0]
    return as_tensor(np.full(shape, neutral, x.dtype.numpy), x)


def limits(dtype: DType) -> tuple[int, int]:
    """The least and the greatest whole number of a dtype."""
    said = np.iinfo(dtype.value)
    return int(said.min), int(said.max)


def _mean(x: Any, axes: Any, keepdims: bool) -> Any:
    if x.dtype.is_floating:
        return f.mean(x, axes, keepdims)
    return _quotient(f.sum(x, axes, keepdims), math.prod(x.shape[axis] for axis in axes))


def _log_sum_exp(x: Any, axes: Any, keepdims: bool) -> Any:
    return f.logsumexp(x if x.dtype.is_floating else x.cast(DType.FLOAT64), axes, keepdims)


def _floating(function: Function) -> Function:
    """The function in float64 for whole numbers."""
    return lambda x: function(x if x.dtype.is_floating else x.cast(DType.FLOAT64)).cast(x.dtype)


define(
    {
        "ReduceSum": _reduction(f.sum, 0.0),
        "ReduceMean": _reduction(_mean),
        "ReduceMax": _reduction(f.max, -math.inf),
        "ReduceMin": _reduction(f.min, math.inf),
        "ReduceProd": _reduction(f.prod, 1.0),
        "ReduceL1": _reduction(lambda x, *rest: f.sum(f.abs(x), *rest), 0.0, f.abs),
        "ReduceL2": _reduction(
            lambda x, *rest: f.sqrt(
                f.sum(f.square(x if x.dtype.is_floating else x.cast(DType.FLOAT64)), *rest)
            ),
            0.0,
            f.abs,
        ),
        "ReduceSumSquare": _reduction(lambda x, *rest: f.sum(f.square(x), *rest), 0.0, f.square),
        "ReduceLogSum": _reduction(
            lambda x, *rest: f.log(f.sum(x, *rest).cast(_wide(x))), -math.inf, _floating(f.log)
        ),
        "ReduceLogSumExp": _reduction(_log_sum_exp, -math.inf),
    },
    known=[1],
)


def _wide(x: Any) -> DType:
    return x.dtype if x.dtype.is_floating else DType.FLOAT64


def _extreme_place(place: Function) -> Function:
    def rule(x: Any, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Any:
        axis = at(x, axis)
        if not select_last_index:
            return place(x, axis, bool(keepdims)).cast(DType.INT64)
        first = place(f.flip(x, axis), axis, bool(keepdims)).cast(DType.INT64)
        return f.sub(x.shape[axis] - 1, first)

    return rule


def _best(
    x: Any,
    k: Any,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,  # noqa: A002  # the standard's
) -> Any:
    count = k if isinstance(k, int) else int(np.asarray(k).item())
    values, places = f.topk(x, count, at(x, axis), bool(largest))
    return values, places.cast(DType.INT64)


def _running(accumulate: Function, neutral: int) -> Function:
    def rule(x: Any, axis: Any, exclusive: int = 0, reverse: int = 0) -> Any:
        along = at(x, int(np.asarray(axis).item()))
        kind = x.dtype
        x = f.flip(x, along) if reverse else x
        made = accumulate(x, along)
        if exclusive:
            low, high = [0] * x.ndim, [0] * x.ndim
            low[along] = 1
            made = f.pad(cut(made, along, 0, x.shape[along] - 1), low, high, neutral)
        made = f.flip(made, along) if reverse else made
        return made if made.dtype is kind else made.cast(kind)

    return rule


define({"ArgMax": _extreme_place(f.argmax), "ArgMin": _extreme_place(f.argmin)})
define(
    {"TopK": _best, "CumSum": _running(f.cumsum, 0), "CumProd": _running(f.cumprod, 1)}, known=[1]
)


def _over_one_axis(function: Function) -> Function:
    """Before opset 13, all axes from `axis` on count as one."""

    def rule(x: Any, axis: int = 1) -> Any:
        return function(_flattened(x, axis), 1).reshape(x.shape)

    return rule


def _hard(x: Any, axis: int = -1) -> Any:
    axis = at(x, axis)
    places = np.arange(x.shape[axis]).reshape([-1 if each == axis else 1 for each in range(x.ndim)])
    best = f.equal(f.argmax(x, axis, True).cast(DType.INT64), as_tensor(places, x))
    return f.cast(best, x.dtype)


for _name, _function in {
    "Softmax": f.softmax,
    "LogSoftmax": f.log_softmax,
    "Hardmax": _hard,
}.items():
    onnx_rule(_name)(_over_one_axis(_function))
    onnx_rule(_name, since=13)(lambda x, axis=-1, function=_function: function(x, axis))

# --- products -------------------------------------------------------------------------------------


def product(x: Any, y: Any) -> Any:
    """As NumPy's: a vector counts as a row on the left, as a column on the right."""
    left, right = x.ndim == 1, y.ndim == 1
    made = f.matmul(f.unsqueeze(x, 0) if left else x, f.unsqueeze(y, 1) if right else y)
    axes = [made.ndim - 2] * left + [made.ndim - 1] * right
    return f.squeeze(made, axes) if axes else made


def _gemm(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803  # the standard's names
    transB: int = 0,  # noqa: N803
) -> Any:
    made = f.matmul(a, b, bool(transA), bool(transB))
    made = made if alpha == 1 else made * alpha
    if c is None:
        return made
    return f.add(made, c if beta == 1 else c * beta)


def _einsum(*xs: Any, equation: str) -> Any:
    equation = equation.replace(" ", "")
    inputs, arrow, result = equation.partition("->")
    if not arrow:
        once = sorted(
            each for each in set(inputs) if each in string.ascii_letters and inputs.count(each) == 1
        )
        result = ("..." if "..." in inputs else "") + "".join(once)
    pairs = [_diagonal(x, each) for x, each in zip(xs, inputs.split(","), strict=True)]
    letters = ",".join(each for _, each in pairs)
    return f.einsum(f"{letters}->{result}", *(x for x, _ in pairs))


def _diagonal(x: Any, term: str) -> tuple[Any, str]:
    """A tensor whose axes have a letter each, from one where some share theirs."""
    head, dots, tail = term.partition("...")
    labels = [*head, *[""] * (x.ndim - len(head) - len(tail)), *tail]
    for letter in set(head + tail):
        while labels.count(letter) > 1:
            first = labels.index(letter)
            second = labels.index(letter, first + 1)
            others = [axis for axis in range(x.ndim) if axis not in (first, second)]
            x = f.diagonal(x, 0, first, second)
            labels = [*(labels[axis] for axis in others), letter]
    if not dots:
        return x, "".join(labels)
    before = labels.index("") if "" in labels else len(head)
    return x, "".join(labels[:before]) + "..." + "".join(labels[before:])


define({"MatMul": product, "Gemm": _gemm, "Einsum": _einsum, "Det": linalg.det})

# --- indices --------------------------------------------------------------------------------------


def _from_front(indices: Any, extent: int) -> Any:
    """Indices that count from the end, from the beginning."""
    if isinstance(indices, np.ndarray):
        return np.where(indices < 0, indices + extent, indices).astype(np.int64)
    indices = indices.cast(DType.INT64)
    return f.where(f.less(indices, 0), indices + extent, indices)


def _check_known(indices: Any, extent: int) -> None:
    if isinstance(indices, np.ndarray) and indices.size:
        low, high = int(indices.min()), int(indices.max())
        if low < -extent or high >= extent:
            raise ModelImportError(
                "an index that the model holds is outside of its axis",
                got=f"{low if low < -extent else high}",
                expected=f"from {-extent} to {extent - 1}",
            )


def _gathered(x: Any, indices: Any, axis: int = 0) -> Any:
    if not isinstance(x, TensorOperators):
        x = as_tensor(x, indices)
    axis = at(x, axis)
    _check_known(indices, x.shape[axis])
    places = _from_front(indices, x.shape[axis])
    shape = [*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]]
    if isinstance(places, np.ndarray):
        return _reshape(taken(x, places.reshape(-1), axis), shape)
    if axis == 0 and x.ndim == 2 and x.dtype.is_floating:
        return f.embedding(x, places)
    flat = places.reshape([math.prod(places.shape)])
    return _reshape(f.index_select(x, flat, axis), shape)


def _reshape(x: Any, shape: Sequence[int]) -> Any:
    return x if tuple(shape) == x.shape else x.reshape(list(shape))


def _both(x: Any, indices: Any) -> tuple[Any, Any]:
    near = x if isinstance(x, TensorOperators) else indices
    return as_tensor(x, near), as_tensor(indices, near)


def _gathered_elements(x: Any, indices: Any, axis: int = 0) -> Any:
    _check_known(indices, x.shape[axis])
    x, indices = _both(x, _from_front(indices, x.shape[axis]))
    axis = at(x, axis)
    for other in range(x.ndim):
        if other != axis:
            x = cut(x, other, 0, indices.shape[other])
    return f.gather(x, axis, indices)


def _flat_places(x: Any, indices: Any, first: int) -> tuple[Any, int]:
    """Tuples of indices along the last axis as indices of the axes from `first` on, made one."""
    count = indices.shape[-1]
    flat: Any = 0
    for number in range(count):
        extent = x.shape[first + number]
        stride = math.prod(x.shape[first + number + 1 : first + count])
        if isinstance(indices, np.ndarray):
            part = indices[..., number]
            _check_known(part, extent)
        else:
            last = indices.ndim - 1
            part = f.squeeze(cut(indices, last, number, number + 1), last)
        flat = flat + _from_front(part, extent) * stride
    return flat, count


def _gathered_nd(x: Any, indices: Any, batch_dims: int = 0) -> Any:
    if not isinstance(x, TensorOperators):
        x = as_tensor(x, indices)
    flat, count = _flat_places(x, indices, batch_dims)
    merged = math.prod(x.shape[batch_dims : batch_dims + count])
    rest = x.shape[batch_dims + count :]
    batch = x.shape[:batch_dims]
    shape = [*indices.shape[:-1], *rest]
    groups = math.prod(batch)
    source = x.reshape([groups * merged, math.prod(rest)])
    if batch_dims:
        starts = (np.arange(groups) * merged).reshape(
            *batch, *(1,) * (len(flat.shape) - batch_dims)
        )
        flat = flat + (starts if isinstance(flat, np.ndarray) else as_tensor(starts, x))
    places = as_tensor(flat, x).reshape([math.prod(flat.shape)])
    return f.index_select(source, places, 0).reshape(shape)


def _scatter_mode(reduction: str) -> str:
    modes = {"none": "set", "add": "add", "mul": "mul", "max": "max", "min": "min"}
    if reduction not in modes:
        raise refused("scatter", f"reduction {reduction!r}", ", ".join(modes))
    return modes[reduction]


def _scattered_elements(
    x: Any, indices: Any, updates: Any, axis: int = 0, reduction: str = "none"
) -> Any:
    near = next(each for each in (x, indices, updates) if isinstance(each, TensorOperators))
    mode = _scatter_mode(reduction)
    _check_known(indices, x.shape[axis])
    places = as_tensor(_from_front(indices, x.shape[axis]), near)
    x, updates = as_tensor(x, near), as_tensor(updates, near)
    axis = at(x, axis)
    whole = x
    for other in range(x.ndim):  # the part that the indices reach
        if other != axis:
            x = cut(x, other, 0, places.shape[other])
    made = f.scatter(x, axis, places, updates, mode)
    return _put_back(whole, made)


def _put_back(whole: Any, part: Any) -> Any:
    """The tensor with another corner at its beginning."""
    for axis in reversed(range(whole.ndim)):
        if part.shape[axis] != whole.shape[axis]:
            rest = whole
            for other in range(axis):
                rest = cut(rest, other, 0, part.shape[other])
            rest = cut(rest, axis, part.shape[axis], whole.shape[axis])
            part = f.concat([part, rest], axis)
    return part


def _scattered_nd(x: Any, indices: Any, updates: Any, reduction: str = "none") -> Any:
    near = next(each for each in (x, indices, updates) if isinstance(each, TensorOperators))
    x, updates = as_tensor(x, near), as_tensor(updates, near)
    mode = _scatter_mode(reduction)
    flat, count = _flat_places(x, indices, 0)
    merged, rest = math.prod(x.shape[:count]), math.prod(x.shape[count:])
    rows = math.prod(flat.shape)
    places = f.expand(as_tensor(flat, near).reshape([rows, 1]), [rows, rest])
    source, new = x.reshape([merged, rest]), updates.reshape([rows, rest])
    return f.scatter(source, 0, places, new, mode).reshape(x.shape)


def _one_hot(indices: Any, depth: Any, values: Any, axis: int = -1) -> Any:
    near = next(each for each in (indices, values) if isinstance(each, TensorOperators))
    count = int(np.asarray(depth).item())
    indices = as_tensor(indices, near)
    axis = axis + indices.ndim + 1 if axis < 0 else axis
    places = f.unsqueeze(
        _from_front(f.trunc(indices) if indices.dtype.is_floating else indices, count), axis
    )
    classes = np.arange(count).reshape([-1 if each == axis else 1 for each in range(places.ndim)])
    hit = f.equal(places, as_tensor(classes, near))
    if isinstance(values, np.ndarray):
        off, on = (as_tensor(each, near) for each in values)
    else:
        off, on = (f.select(values, 0, number) for number in (0, 1))
    return f.where(hit, on, off)


def _compressed(x: Any, condition: Any, axis: int | None = None) -> Any:
    if axis is None:
        x, axis = x.reshape([math.prod(x.shape)]), 0
    axis = at(x, axis)
    return taken(x, np.flatnonzero(np.asarray(condition)[: x.shape[axis]]), axis)


define(
    {
        "Gather": _gathered,
        "GatherElements": _gathered_elements,
        "GatherND": _gathered_nd,
        "ScatterElements Scatter": _scattered_elements,
        "ScatterND": _scattered_nd,
    },
    arrays=True,
)
onnx_rule("OneHot", known=[1], arrays=True)(_one_hot)
define({"Compress": _compressed}, known=[1])
