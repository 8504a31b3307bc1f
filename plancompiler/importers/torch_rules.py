"""The rules of PyTorch's operations, in one table: most take a line."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import UsageError
from plancompiler.frontend import functions as f
from plancompiler.frontend import nn
from plancompiler.frontend.functions import assembly
from plancompiler.frontend.trace import constant
from plancompiler.importers import (  # fill the table, too
    torch_layer_rules,  # noqa: F401
    torch_linear_algebra_rules,  # noqa: F401
    torch_random_rules,  # noqa: F401
)
from plancompiler.importers.graph import Array
from plancompiler.importers.imported_module import without_repeats
from plancompiler.importers.rules import TORCH_RULES, define, torch_rule
from plancompiler.ir import DType, TensorType
from plancompiler.ir.operators import TensorOperators
from plancompiler.ops.registry import apply_source

__all__ = ["TORCH_RULES"]

# Arguments have the names and the order that PyTorch gives them; only those that calls name matter.


def _same(x: Any, *rest: Any, **named: Any) -> Any:
    """What only changes how a tensor lies in memory, or nothing."""
    return x


def _refused(what: str, got: object, expected: str) -> UsageError:
    return UsageError(f"the importer knows no {what} like this", got=repr(got), expected=expected)


def _axes(x: Any, dim: int | Sequence[int] | None) -> int | list[int] | None:
    """Axes of a reduction; none of them means all."""
    return None if dim is None or dim == [] or dim == () else dim  # type: ignore[return-value]  # of any rule


# --- elementwise ----------------------------------------------------------------------------------


def _scaled(y: Any, alpha: float) -> Any:
    return y if alpha == 1 else y * alpha


def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return f.div(x, y)
    if rounding_mode == "floor":
        return f.floor_divide(x, y)
    return f.div(x, y, rounding_mode=rounding_mode)


def _power(x: Any, exponent: Any) -> Any:
    if exponent == 2:
        return f.square(x)
    if exponent == 3:
        return f.square(x) * x
    if exponent == 0.5:
        return f.sqrt(x)
    if exponent == -0.5:
        return f.rsqrt(x)
    return f.pow(x, exponent)


def _gelu(x: Any, approximate: str = "none") -> Any:
    return f.gelu(x) if approximate == "tanh" else f.gelu_exact(x)


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    soft = f.softplus(x) if beta == 1 else f.softplus(x * beta) * (1 / beta)
    if threshold >= 15:  # above it PyTorch takes x itself, which is the same to float32's rounding
        return soft
    return f.where(f.greater(x * beta, threshold), x, soft)


def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if scale != 1 or input_scale != 1:
        raise _refused("elu", (scale, input_scale), "scale 1")
    return f.elu(x, alpha)


def _clipped(x: Any, low: Any = None, high: Any = None) -> Any:
    if isinstance(low, TensorOperators) or isinstance(high, TensorOperators):
        # At a bound, x has the gradient.
        x = x if low is None else f.where(f.less(x, low), low, x)
        return x if high is None else f.where(f.greater(x, high), high, x)
    # Between bounds in the wrong order, PyTorch takes the upper one.
    wrong = low is not None and high is not None and low > high
    return f.full_like(x, high) if wrong else f.clip(x, low, high)


def _glu(x: Any, dim: int = -1) -> Any:
    first, second = f.split(x, x.shape[dim] // 2, dim)
    return first * f.sigmoid(second)


define(
    {
        "aten.add.Tensor aten.add.Scalar": lambda x, y, alpha=1: f.add(x, _scaled(y, alpha)),
        "aten.sub.Tensor aten.sub.Scalar": lambda x, y, alpha=1: f.sub(x, _scaled(y, alpha)),
        "aten.rsub.Scalar aten.rsub.Tensor": lambda x, y, alpha=1: f.sub(y, _scaled(x, alpha)),
        "aten.mul.Tensor aten.mul.Scalar": f.mul,
        "aten.div.Tensor aten.div.Scalar": _div,
        "aten.div.Tensor_mode aten.div.Scalar_mode": _div,
        "aten.floor_divide.default": f.floor_divide,
        "aten.remainder.Scalar aten.remainder.Tensor aten.remainder.Scalar_Tensor": f.remainder,
        "aten.fmod.Scalar aten.fmod.Tensor": f.fmod,
        "aten.pow.Tensor_Scalar": _power,
        "aten.pow.Tensor_Tensor aten.pow.Scalar": f.pow,
        "aten.minimum.default aten.min.other": f.minimum,
        "aten.maximum.default aten.max.other": f.maximum,
        "aten.atan2.default": f.atan2,
        "aten.copysign.Tensor aten.copysign.Scalar": f.copysign,
        "aten.hypot.default": f.hypot,
        "aten.heaviside.default": f.heaviside,
        "aten.fmax.default": f.fmax,
        "aten.fmin.default": f.fmin,
        "aten.logaddexp.default": f.logaddexp,
        "aten.logaddexp2.default": f.logaddexp2,
        "aten.xlogy.Tensor aten.xlogy.Scalar_Self aten.xlogy.Scalar_Other": f.xlogy,
        "aten.logit.default": f.logit,
        "aten.frac.default": lambda x: x - f.trunc(x),
        "aten.round.decimals": lambda x, decimals: f.round(x * 10**decimals) / 10**decimals,
        "aten.lerp.Scalar aten.lerp.Tensor": f.lerp,
        "aten.gelu.default": _gelu,
        "aten.softplus.default": _softplus,
        "aten.elu.default": _elu,
        "aten.silu.default": f.silu,
        "aten.leaky_relu.default": lambda x, slope=0.01: f.leaky_relu(x, slope),
        "aten.hardtanh.default": lambda x, low=-1, high=1: f.hardtanh(x, low, high),
        "aten.clamp.default aten.clip.default aten.clamp_min.default aten.clamp.Tensor": _clipped,
        "aten.clamp_min.Tensor": _clipped,
        "aten.clamp_max.default aten.clamp_max.Tensor": lambda x, high: _clipped(x, None, high),
        "aten.addcmul.default": lambda x, y, z, value=1: x + _scaled(y * z, value),
        "aten.addcdiv.default": lambda x, y, z, value=1: x + _scaled(y / z, value),
        "aten.nan_to_num.default": lambda x, nan=0.0, posinf=None, neginf=None: f.nan_to_num(
            x, nan or 0.0, posinf, neginf
        ),
    },
    promotes=True,
)
_OF_ONE = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 "
    "floor hardsigmoid hardswish lgamma log log10 log1p log2 mish neg reciprocal relu relu6 round "
    "rsqrt selu sigmoid sign sin sinc sinh sqrt square tan tanh trunc"
)
"""Functions of one tensor that have one name in both."""
for _name in _OF_ONE.split():
    torch_rule(f"aten.{_name}.default", promotes=True)(getattr(f, _name))
torch_rule("aten.log_sigmoid.default", promotes=True)(f.logsigmoid)
define({"aten.glu.default": _glu})
define({f"aten.{_name}.default": getattr(f, _name) for _name in ("deg2rad", "rad2deg", "signbit")})
define({f"aten.special_{_name}.default": getattr(f, _name) for _name in ("entr", "log_ndtr")})


def _kind(dtype: DType) -> int:
    return 0 if dtype is DType.BOOL else 2 if dtype.is_floating else 1


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison; operands of several dtypes are compared as PyTorch promotes them."""

    def rule(x: Any, y: Any) -> Any:
        if not isinstance(y, TensorOperators):
            if isinstance(y, float) and not x.dtype.is_floating:
                x = x.cast(DType.FLOAT32)
            return compare(x, y)
        if x.dtype is not y.dtype:
            # A tensor of one number has no say against others of its kind.
            low, high = sorted((x, y), key=lambda t: (_kind(t.dtype), t.ndim > 0, t.dtype.itemsize))
            x, y = x.cast(high.dtype), y.cast(high.dtype)
            del low
        return compare(x, y)

    return rule


for _name, _compare in {
    "eq": f.equal,
    "ne": f.not_equal,
    "lt": f.less,
    "le": f.less_equal,
    "gt": f.greater,
    "ge": f.greater_equal,
}.items():
    torch_rule(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_comparison(_compare))


def _where(condition: Any, x: Any, y: Any, result: TensorType) -> Any:
    x, y = (
        each.cast(result.dtype)
        if isinstance(each, TensorOperators) and each.dtype is not result.dtype
        else each
        for each in (x, y)
    )
    if not isinstance(x, TensorOperators) and not isinstance(y, TensorOperators):
        x = f.full_like(condition.cast(result.dtype), x)
    return f.where(condition, x, y)


torch_rule(
    "aten.where.self",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
    "aten.where.Scalar",
    typed=True,
)(_where)


def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    if isinstance(value, TensorOperators):
        return f.where(mask, value.cast(x.dtype), x)
    return f.masked_fill(x, mask, value)


define(
    {
        "aten.masked_fill.Scalar aten.masked_fill.Tensor": _masked_fill,
        "aten.logical_not.default": f.logical_not,
        "aten.logical_and.default": f.logical_and,
        "aten.logical_or.default": f.logical_or,
        "aten.logical_xor.default": f.logical_xor,
        "aten.bitwise_not.default": f.bitwise_not,
        "aten.bitwise_and.Tensor aten.bitwise_and.Scalar aten.__and__.Tensor aten.__and__.Scalar": (
            f.bitwise_and
        ),
        "aten.bitwise_or.Tensor aten.bitwise_or.Scalar aten.__or__.Tensor aten.__or__.Scalar": (
            f.bitwise_or
        ),
        "aten.bitwise_xor.Tensor aten.bitwise_xor.Scalar aten.__xor__.Tensor aten.__xor__.Scalar": (
            f.bitwise_xor
        ),
        "aten.__lshift__.Scalar aten.bitwise_left_shift.Tensor_Scalar": lambda x, y: x * (1 << y),
        "aten.__rshift__.Scalar aten.bitwise_right_shift.Tensor_Scalar": lambda x, y: (
            f.floor_divide(x, 1 << y)
        ),
        "aten.isnan.default": f.isnan,
        "aten.isinf.default": f.isinf,
        "aten.isfinite.default": f.isfinite,
    }
)

# --- dtypes and copies ----------------------------------------------------------------------------


def _cast(x: Any, *rest: Any, result: TensorType, **named: Any) -> Any:
    return x if x.dtype is result.dtype else x.cast(result.dtype)


torch_rule(
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.device",
    "aten.to.dtype_layout",
    "aten.type_as.default",
    "aten.to.other",
    "aten.float.default",
    typed=True,
)(_cast)


@torch_rule("aten.dropout.default")
def _dropped(x: Any, p: float, train: bool) -> Any:
    if not train or p == 0:
        return x
    return f.full_like(x, 0.0) if p == 1 else f.dropout(x, p)


def _no(p: float) -> Any:
    raise _refused("dropout of whole features", p, "p = 0")


define(
    {
        "aten.clone.default aten.alias.default aten.contiguous.default aten.lift_fresh_copy.default"
        " aten.lift_fresh.default aten.positive.default": _same,
        "aten.detach.default aten.detach_.default": f.stop_gradient,
        "aten.native_dropout.default": lambda x, p, train: (_dropped(x, p, train), None),
        "aten.feature_dropout.default": lambda x, p, train: (
            _dropped(x, p, train) if p in (0, 1) or not train else _no(p)
        ),
    }
)


def _filled(x: Any, result: TensorType, value: Any = 0) -> Any:
    number = float(value) if result.dtype.is_floating else value
    if result.dtype is DType.BOOL:
        number = bool(value)
    return apply_source(x, "fill", shape=result.shape, dtype=str(result.dtype), value=number)


def _like(value: int | None) -> Callable[..., Any]:
    def rule(x: Any, *rest: Any, result: TensorType, **named: Any) -> Any:
        return _filled(x, result, rest[-1] if value is None else value)

    return rule


torch_rule("aten.zeros_like.default", "aten.new_zeros.default", typed=True)(_like(0))
torch_rule("aten.ones_like.default", "aten.new_ones.default", typed=True)(_like(1))
torch_rule("aten.full_like.default", "aten.new_full.default", typed=True)(_like(None))
torch_rule("aten.empty_like.default", "aten.new_empty.default", "aten.zero.default", typed=True)(
    _like(0)
)


@torch_rule("aten.fill.Tensor", "aten.fill.Scalar", "aten.copy.default", typed=True)
def _replaced(x: Any, value: Any, *rest: Any, result: TensorType) -> Any:
    """All elements of x become those of the value."""
    if not isinstance(value, TensorOperators):
        return _filled(x, result, value)
    return f.expand(value.cast(result.dtype), result.shape)


# --- shape ----------------------------------------------------------------------------------------


def _at(x: Any, dim: int) -> int:
    return dim + x.ndim if dim < 0 else dim


def _swapped(x: Any, first: int, second: int) -> Any:
    axes = list(range(x.ndim))
    first, second = _at(x, first), _at(x, second)
    axes[first], axes[second] = axes[second], axes[first]
    return x.transpose(axes)


def _bounds(extent: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Start and end of a slice, which count from the end where negative."""
    first, last, _ = slice(start, end).indices(extent)
    return first, max(first, last)


def _sliced(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    at = _at(x, dim)
    first, last = _bounds(x.shape[at], start, end)
    starts, stops, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[at], stops[at], steps[at] = first, last, step
    if step != 1:
        return f.strided_slice(x, starts, stops, steps)
    return x if (first, last) == (0, x.shape[at]) else f.slice(x, starts, stops)


def _selected(x: Any, dim: int, index: int) -> Any:
    at = _at(x, dim)
    index = index + x.shape[at] if index < 0 else index
    return f.squeeze(_sliced(x, at, index, index + 1), at)


def _slice_scattered(
    x: Any, part: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    at = _at(x, dim)
    first, last = _bounds(x.shape[at], start, end)
    if step != 1:
        places = constant(np.arange(first, last, step), DType.INT64, x.placement)
        return f.index_copy(x, places, part, at)
    pieces = (_sliced(x, at, 0, first), part, _sliced(x, at, last, None))
    return f.concat([each for each in pieces if each.shape[at]], at)


def _squeezed(x: Any, dims: int | Sequence[int] | None = None) -> Any:
    every = range(x.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    axes = [_at(x, dim) for dim in every if x.shape[_at(x, dim)] == 1]
    return f.squeeze(x, axes) if axes else x


def _reshaped(x: Any, shape: Sequence[int]) -> Any:
    return x if tuple(shape) == x.shape else x.reshape(list(shape))


def _expanded(x: Any, shape: Sequence[int], implicit: bool = False) -> Any:
    lead = len(shape) - x.ndim
    wanted = tuple(
        x.shape[axis - lead] if extent == -1 else extent for axis, extent in enumerate(shape)
    )
    return x if wanted == x.shape else f.expand(x, wanted)


def _unflattened(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    at = _at(x, dim)
    return x.reshape([*x.shape[:at], *sizes, *x.shape[at + 1 :]])


def _cut(x: Any, sizes: int | Sequence[int], dim: int = 0) -> Any:
    return f.split(x, sizes, dim)


def _repeated(x: Any, repeats: Sequence[int]) -> Any:
    lead = len(repeats) - x.ndim
    return f.tile(x.reshape([1] * lead + list(x.shape)) if lead else x, repeats)


define(
    {
        "aten.view.default aten.reshape.default aten._unsafe_view.default": _reshaped,
        "aten.expand.default": _expanded,
        "aten.expand_as.default": lambda x, y: _expanded(x, y.shape),
        "aten.permute.default": lambda x, dims: x.transpose([_at(x, dim) for dim in dims]),
        "aten.transpose.int": _swapped,
        "aten.t.default aten.numpy_T.default": lambda x: x.transpose() if x.ndim > 1 else x,
        "aten.unsqueeze.default": f.unsqueeze,
        "aten.squeeze.default aten.squeeze.dim aten.squeeze.dims": _squeezed,
        "aten.flatten.using_ints": lambda x, start_dim=0, end_dim=-1: f.flatten(
            x, start_dim, end_dim
        ),
        "aten.unflatten.int": _unflattened,
        "aten.slice.Tensor": _sliced,
        "aten.select.int": _selected,
        "aten.slice_scatter.default": _slice_scattered,
        "aten.select_scatter.default": lambda x, part, dim, index: _slice_scattered(
            x, f.unsqueeze(part, dim), dim, index, index + 1 or None
        ),
        "aten.narrow.int": lambda x, dim, start, length: _sliced(x, dim, start, start + length),
        "aten.split.Tensor aten.split_with_sizes.default aten.split.sizes": _cut,
        "aten.chunk.default": f.chunk,
        "aten.unbind.int": lambda x, dim=0: f.unbind(x, dim),
        "aten.repeat.default": _repeated,
        "aten.repeat_interleave.self_int": lambda x, repeats, dim=None, output_size=None: (
            f.repeat_interleave(x if dim is not None else x.reshape(-1), repeats, dim or 0)
        ),
        "aten.flip.default": lambda x, dims: f.flip(x, [_at(x, dim) for dim in dims]),
        "aten.roll.default": f.roll,
        "aten.tril.default": lambda x, diagonal=0: f.tril(x, diagonal),
        "aten.triu.default": lambda x, diagonal=0: f.triu(x, diagonal),
        "aten.diagonal.default": lambda x, offset=0, dim1=0, dim2=1: f.diagonal(
            x, offset, dim1, dim2
        ),
        "getitem": operator.getitem,
    }
)


def _joined(join: Callable[..., Any]) -> Callable[..., Any]:
    def rule(tensors: Sequence[Any], dim: int = 0, *, result: TensorType) -> Any:
        # PyTorch skips empty vectors, whatever the axes of the others.
        wanted = [each for each in tensors if each.shape != (0,)] or list(tensors)[:1]
        return join([_cast(each, result=result) for each in wanted], dim)

    return rule


torch_rule("aten.cat.default", "aten.concat.default", typed=True)(_joined(f.concat))
torch_rule("aten.stack.default", typed=True)(_joined(f.stack))

# --- reductions -----------------------------------------------------------------------------------


def _reduction(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        x: Any, dim: Any = None, keepdim: bool = False, *, result: TensorType, dtype: Any = None
    ) -> Any:
        # Sums are wanted in the dtype of the result.
        if result.dtype is not x.dtype and result.dtype is not DType.BOOL:
            x = x.cast(result.dtype)
        # Whole numbers are summed in 64 bits, and may be wanted in fewer.
        return _cast(reduce(x, _axes(x, dim), keepdim), result=result)

    return rule


for _name, _reduce in {"sum": f.sum, "mean": f.mean}.items():
    _targets = (f"aten.{_name}.default", f"aten.{_name}.dim", f"aten.{_name}.dim_IntList")
    torch_rule(*_targets, typed=True)(_reduction(_reduce))
torch_rule("aten.prod.default", "aten.prod.dim_int", typed=True)(_reduction(f.prod))
for _name, _truth in {"any": f.any, "all": f.all}.items():
    _targets = (f"aten.{_name}.default", f"aten.{_name}.dim", f"aten.{_name}.dims")
    torch_rule(*_targets, typed=True)(_reduction(_truth))


def _extremes(place: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: Any, dim: int, keepdim: bool = False) -> Any:
        where = place(x, dim, True).cast(DType.INT64)
        # Of several extremes that are equal the one that is named has the gradient.
        best = f.gather(x, _at(x, dim), where)
        return (best, where) if keepdim else (f.squeeze(best, dim), f.squeeze(where, dim))

    return rule


def _placed(place: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if x.dtype is DType.BOOL:
            x = x.cast(DType.INT32)
        return place(x.reshape(-1) if dim is None else x, dim or 0, keepdim).cast(DType.INT64)

    return rule


def _spread(measure: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        x: Any, dim: Any = None, *, correction: float | None = 1, keepdim: bool = False
    ) -> Any:
        return measure(x, _axes(x, dim), keepdim, 1.0 if correction is None else float(correction))

    return rule


def _statistics(measure: Callable[..., Any]) -> Callable[..., Any]:
    """A spread, and the mean, of the same axes."""
    spread = _spread(measure)

    def rule(x: Any, dim: Any = None, **named: Any) -> Any:
        mean = f.mean(x, _axes(x, dim), named.get("keepdim", False))
        return spread(x, dim, **named), mean

    return rule


def _softmax(x: Any, dim: int, dtype: Any = None, *, result: TensorType) -> Any:
    return f.softmax(x if x.dtype is result.dtype else x.cast(result.dtype), dim)


def _log_softmax(x: Any, dim: int, dtype: Any = None, *, result: TensorType) -> Any:
    return f.log_softmax(x if x.dtype is result.dtype else x.cast(result.dtype), dim)


torch_rule("aten.softmax.int", "aten._softmax.default", typed=True)(_softmax)
torch_rule("aten.log_softmax.int", "aten._log_softmax.default", typed=True)(_log_softmax)


def _counted(x: Any, dim: int, dtype: Any = None, *, result: TensorType) -> Any:
    return f.cumsum(x if x.dtype is result.dtype else x.cast(result.dtype), dim)


torch_rule("aten.cumsum.default", typed=True)(_counted)


def _multiplied(x: Any, dim: int, dtype: Any = None, *, result: TensorType) -> Any:
    return f.cumprod(x if x.dtype is result.dtype else x.cast(result.dtype), dim)


torch_rule("aten.cumprod.default", typed=True)(_multiplied)
torch_rule("aten.nansum.default", typed=True)(_reduction(f.nansum))
define(
    {
        "aten.amax.default": lambda x, dim=None, keepdim=False: f.max(x, _axes(x, dim), keepdim),
        "aten.amin.default": lambda x, dim=None, keepdim=False: f.min(x, _axes(x, dim), keepdim),
        "aten.max.default": f.max,
        "aten.min.default": f.min,
        "aten.max.dim": _extremes(f.argmax),
        "aten.min.dim": _extremes(f.argmin),
        "aten.argmax.default": _placed(f.argmax),
        "aten.argmin.default": _placed(f.argmin),
        "aten.var.correction": _spread(f.var),
        "aten.std.correction": _spread(f.std),
        "aten.var.dim": lambda x, dim, unbiased=True, keepdim=False: f.var(
            x, _axes(x, dim), keepdim, float(unbiased)
        ),
        "aten.std.dim": lambda x, dim, unbiased=True, keepdim=False: f.std(
            x, _axes(x, dim), keepdim, float(unbiased)
        ),
        "aten.var_mean.correction": _statistics(f.var),
        "aten.std_mean.correction": _statistics(f.std),
        "aten.logcumsumexp.default": f.logcumsumexp,
        "aten.cummax.default": f.cummax,
        "aten.cummin.default": f.cummin,
        "aten.aminmax.default": lambda x, *, dim=None, keepdim=False: f.aminmax(x, dim, keepdim),
        "aten.count_nonzero.default aten.count_nonzero.dim_IntList": lambda x, dim=None: (
            f.count_nonzero(x, _axes(x, dim)).cast(DType.INT64)
        ),
        "aten.kthvalue.default": f.kthvalue,
        "aten.median.dim": lambda x, dim, keepdim=False: f.kthvalue(
            x, (x.shape[dim] + 1) // 2, dim, keepdim
        ),
        "aten.median.default": lambda x: f.kthvalue(
            x.reshape(-1), (math.prod(x.shape) + 1) // 2, 0
        )[0],
        "aten.sort.stable": lambda x, *, stable=None, dim=-1, descending=False: f.sort(
            x, dim, descending
        ),
        "aten.argsort.stable": lambda x, *, stable=None, dim=-1, descending=False: f.argsort(
            x, dim, descending
        ),
        "aten.logsumexp.default": lambda x, dim, keepdim=False: f.logsumexp(x, dim, keepdim),
        "aten.linalg_vector_norm.default": lambda x, p=2, dim=None, keepdim=False: f.norm(
            x, float(p), _axes(x, dim), keepdim
        ),
        "aten.norm.Scalar": lambda x, p=2: f.norm(x, float(p)),
        "aten.topk.default": lambda x, k, dim=-1, largest=True, *rest: f.topk(x, k, dim, largest),
        "aten.sort.default": lambda x, dim=-1, descending=False: f.sort(x, dim, descending),
        "aten.argsort.default": lambda x, dim=-1, descending=False: f.argsort(x, dim, descending),
    }
)

# --- products -------------------------------------------------------------------------------------


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return f.linear(x, weight, bias)


def _linear_of_reshaped(x: Any, weight: Any, bias: Any, *, shape: list[int], turned: bool) -> Any:
    x = f.reshape(x, shape)
    if turned:
        return _linear(x, weight, bias)
    return f.matmul(x, weight) + bias


def _linear_of_parts(x: Any, weight: Any, bias: Any = None, *, outputs: int) -> Any:
    """A tensor [..., out] of x [..., in] for each part; the weight is [in, parts, out] where its
    `outputs` were axis 1, else [parts, out, in]. See `fused_linear`.
    """
    letters = "dpe" if outputs else "ped"
    product = f.einsum(f"...d,{letters}->...pe", x, weight)
    return f.unbind(product if bias is None else product + bias, product.ndim - 2)


def _addmm(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = _scaled(f.matmul(x, weight), alpha)
    return product if beta == 0 else product + _scaled(bias, beta)


def _matmul_apart(
    x: Any, y: Any, bias: Any = None, *, turned: bool, beta: float = 1, alpha: float = 1
) -> Any:
    """Products of matrices with several axes before them, which are merged in a bias; with `turned`
    each y is transposed.
    """
    product = _scaled(f.matmul(x, y, transpose_b=turned), alpha)
    if bias is None or beta == 0:
        return product
    if bias.ndim == 3 and bias.shape[0] > 1:
        bias = bias.reshape([*product.shape[:-2], *bias.shape[1:]])
    return product + _scaled(bias, beta)


def _matmul(x: Any, y: Any) -> Any:
    """As NumPy's: a vector counts as a row on the left, as a column on the right."""
    left, right = x.ndim == 1, y.ndim == 1
    product = f.matmul(f.unsqueeze(x, 0) if left else x, f.unsqueeze(y, 1) if right else y)
    axes = [product.ndim - 2] * left + [product.ndim - 1] * right
    return f.squeeze(product, axes) if axes else product


def _complex_product(x: Any, y: Any) -> Any:
    (a, b), (c, d) = (f.unbind(each, each.ndim - 1) for each in (x, y))
    made = [a * c - b * d, a * d + b * c]
    return f.stack(made, made[0].ndim)


def _einsum(equation: str, tensors: Sequence[Any], path: Any = None) -> Any:
    """A letter that an operand has twice stands for its diagonal."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow and "..." not in left:
        output = "".join(sorted(each for each in {*left} - {","} if left.count(each) == 1))
        arrow = "->"
    letters, operands = left.split(","), list(tensors)
    for number, part in enumerate(letters):
        while "..." not in part and len({*part}) < len(part):
            twice = next(each for each in part if part.count(each) > 1)
            first = part.index(twice)
            second = part.index(twice, first + 1)
            operands[number] = f.diagonal(operands[number], 0, first, second)
            part = part[:first] + part[first + 1 : second] + part[second + 1 :] + twice
        letters[number] = part
    return f.einsum(",".join(letters) + arrow + output, *operands)


define(
    {
        "aten.linear.default": _linear,
        "aten.addmm.default aten.baddbmm.default": _addmm,
        "aten.mm.default aten.bmm.default aten.matmul.default aten.mv.default": _matmul,
        "aten.dot.default aten.vdot.default": f.dot,
        "aten.addr.default": lambda bias, x, y, *, beta=1, alpha=1: (
            _scaled(f.outer(x, y), alpha) + _scaled(bias, beta)
        ),
        "aten.addbmm.default": lambda bias, x, y, *, beta=1, alpha=1: (
            _scaled(f.sum(f.matmul(x, y), 0), alpha) + _scaled(bias, beta)
        ),
        "aten.addmv.default": lambda bias, x, y, *, beta=1, alpha=1: (
            _scaled(_matmul(x, y), alpha) + _scaled(bias, beta)
        ),
        "aten.trace.default": f.trace,
        "aten.block_diag.default": f.block_diag,
        "aten.dist.default": lambda x, y, p=2: f.norm(x - y, float(p)),
        "aten._cdist_forward.default": lambda x, y, p, mode=None: f.norm(
            f.unsqueeze(x, -2) - f.unsqueeze(y, -3), float(p), -1
        ),
        "aten.outer.default": f.outer,
        "aten.einsum.default": _einsum,
        # Complex numbers are pairs along the last axis.
        "complex.view_as_complex.default complex.view_as_real.default": lambda x: x,
        # What `recognition` makes of neighbours.
        "imported.linear.parts": _linear_of_parts,
        "imported.matmul.apart": _matmul_apart,
        "imported.matmul.transposed": lambda x, y: f.matmul(x, y, transpose_b=True),
        "imported.linear.reshaped": _linear_of_reshaped,
        "imported.linear.untransposed": lambda x, weight, bias: f.matmul(x, weight) + bias,
        "imported.rms_norm.default": f.rms_norm,
        "imported.gelu.tanh": f.gelu,
    }
)


torch_rule("complex.mul.Tensor", promotes=True)(_complex_product)


@torch_rule("aten.scaled_dot_product_attention.default", arrays=True)
def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    causal: bool | str = is_causal
    shape = query.shape
    query, key, value = (_four_axes(each, query) for each in (query, key, value))
    if attn_mask is not None:
        causal, attn_mask = _mask(attn_mask, query, key, causal)
    result = f.scaled_dot_product_attention(
        query, key, value, causal=causal, scale=scale, mask=attn_mask, dropout=dropout_p
    )
    return _reshaped(result, (*shape[:-1], value.shape[-1]))


def _four_axes(x: Any, query: Any) -> Any:
    """Batches, heads, length, features."""
    if not isinstance(x, TensorOperators):  # an array, which is the same for all
        x = _as_tensor(x, query)
    if x.ndim == 4:
        return x
    lead = (1,) * (4 - x.ndim) if x.ndim < 4 else (math.prod(x.shape[:-3]),)
    return x.reshape([*lead, *(x.shape if x.ndim < 4 else x.shape[-3:])])


def _as_tensor(array: Array, beside: Any, dtype: DType | None = None) -> Any:
    return constant(array, dtype or DType.parse(array.dtype), beside.placement)


def _mask(mask: Any, query: Any, key: Any, causal: bool | str) -> tuple[bool | str, Any]:
    """What a mask says: which form of causal attention it is, or what is added to the scores."""
    length, keys = query.shape[-2], key.shape[-2]
    if isinstance(mask, np.ndarray):
        mask = without_repeats(mask)  # it may be the same for all examples of a large batch
        if mask.dtype == bool or bool(((mask == 0) | np.isneginf(mask) | (mask < -1e30)).all()):
            seen = np.broadcast_to(
                mask if mask.dtype == bool else mask == 0,
                (
                    *mask.shape[:-2],
                    length,
                    keys,
                ),
            )
            if seen.all():
                return causal, None
            for form, offset in ((True, 0), ("lower_right", keys - length)):
                if offset >= 0 and (seen == np.tri(length, keys, offset, dtype=bool)).all():
                    return form, None
        if mask.dtype == bool:
            lowest = np.array(-np.inf, query.dtype.numpy)
            mask = np.where(mask, np.zeros((), query.dtype.numpy), lowest)
        mask = _as_tensor(mask, query, query.dtype)
    elif mask.dtype is DType.BOOL:
        zeros = f.full_like(mask.cast(query.dtype), 0.0)
        mask = f.where(mask, zeros, -math.inf)
    elif mask.dtype is not query.dtype:
        mask = mask.cast(query.dtype)
    if mask.ndim > 4:
        mask = mask.reshape([math.prod(mask.shape[:-3]), *mask.shape[-3:]])
    return causal, mask


# --- layers ---------------------------------------------------------------------------------------


@torch_rule("aten.embedding.default", arrays=True)
def _embedding(
    weight: Any,
    ids: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if scale_grad_by_freq:
        raise _refused("embedding", "scale_grad_by_freq=True", "False")
    if isinstance(weight, np.ndarray):
        weight = constant(weight, DType.parse(weight.dtype), ids.placement)
    if isinstance(ids, np.ndarray):
        first = _first_of_run(ids)
        if first is not None and not first <= padding_idx < first + ids.shape[-1]:
            run = _sliced(weight, 0, first, first + ids.shape[-1])
            return _expanded(_unsqueezed_to(run, ids.ndim + 1), (*ids.shape, weight.shape[1]))
        ids = constant(ids, DType.parse(ids.dtype), weight.placement)
    rows = f.embedding(weight, ids)
    if padding_idx < 0:
        return rows
    # The row of the padding is read, and its gradient is zero.
    padding = f.unsqueeze(f.equal(ids, padding_idx), ids.ndim)
    return f.where(padding, f.stop_gradient(rows), rows)


def _first_of_run(ids: Array) -> int | None:
    """The first of ids that follow one another along the last axis, and repeat along the others, as
    positions do; None for other ids.
    """
    if not ids.size or ids.ndim == 0:
        return None
    rows = ids.reshape(-1, ids.shape[-1])
    first = int(rows[0, 0])
    run = np.arange(first, first + ids.shape[-1])
    return first if first >= 0 and bool((rows == run).all()) else None


def _unsqueezed_to(x: Any, axes: int) -> Any:
    """x with axes of extent 1 before its own."""
    return x.reshape([1] * (axes - x.ndim) + list(x.shape))


@torch_rule("aten._native_batch_norm_legit_no_training.default")
def _batch_norm_eval(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> Any:
    return f.batch_norm(x, weight, bias, mean, variance, eps), None, None


@torch_rule("aten._native_batch_norm_legit_functional.default")
def _batch_norm_train(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The result, the statistics of the batch (which nobody reads), and the new running ones."""
    if not training:
        normal = f.batch_norm(x, weight, bias, running_mean, running_variance, eps)
        return normal, None, None, running_mean, running_variance
    mean, variance = f.batch_statistics(x)
    count = math.prod(x.shape) // x.shape[1]
    unbiased = f.stop_gradient(variance) * (count / max(1, count - 1))
    return (
        f.batch_norm(x, weight, bias, mean, variance, eps),
        None,
        None,
        running_mean * (1 - momentum) + f.stop_gradient(mean).cast(running_mean.dtype) * momentum,
        running_variance * (1 - momentum) + unbiased.cast(running_variance.dtype) * momentum,
    )


@torch_rule("aten._native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    mean, variance = f.batch_statistics(x)
    return f.batch_norm(x, weight, bias, mean, variance, eps), None, None


@torch_rule("aten.batch_norm.default")
def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = True,
) -> Any:
    if training:
        raise _refused("batch norm", "training, and running statistics changed in place", "eval")
    return f.batch_norm(x, weight, bias, mean, variance, eps)


def _one_or_all(sizes: Any, count: int) -> list[int]:
    """Sizes per axis; one stands for all."""
    given = [sizes] if isinstance(sizes, int) else list(sizes)
    return given * count if len(given) == 1 else given


def _conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    axes = weight.ndim - 2
    function = (f.conv1d, f.conv2d, f.conv3d)[axes - 1]
    stride, dilation = _one_or_all(stride, axes), _one_or_all(dilation, axes)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        wide = [each * (size - 1) for each, size in zip(dilation, weight.shape[2:], strict=True)]
        if any(each % 2 for each in wide):
            pads = [part for each in reversed(wide) for part in (each // 2, each - each // 2)]
            return function(nn.functional.pad(x, pads), weight, bias, stride, 0, dilation, groups)
        padding = [each // 2 for each in wide]
    pads = _one_or_all(padding, axes)
    batched = x.ndim == weight.ndim
    made = function(
        x if batched else f.unsqueeze(x, 0), weight, bias, stride, pads, dilation, groups
    )
    return made if batched else f.squeeze(made, 0)


def _conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    axes = weight.ndim - 2
    function = (f.conv_transpose1d, f.conv_transpose2d, f.conv_transpose3d)[axes - 1]
    stride, padding, output_padding, dilation = (
        _one_or_all(each, axes) for each in (stride, padding, output_padding, dilation)
    )
    return function(x, weight, bias, stride, padding, output_padding, dilation, groups)


for _number in (1, 2, 3):
    torch_rule(f"aten.conv{_number}d.default", f"aten.conv{_number}d.padding")(_conv)
    torch_rule(f"aten.conv_transpose{_number}d.default", f"aten.conv_transpose{_number}d.input")(
        _conv_transpose
    )


@torch_rule("aten._weight_norm_interface.default")
def _weight_norm(direction: Any, length: Any, dim: int = 0) -> Any:
    """A weight of this direction, its rows along `dim` of these lengths; and their old lengths."""
    others = [axis for axis in range(direction.ndim) if axis != _at(direction, dim)]
    old = f.norm(direction, 2.0, others, True)
    return direction * (length / old), old


# --- indices --------------------------------------------------------------------------------------


def _not_negative(indices: Any, extent: int) -> Any:
    """Indices that count from the end, from the beginning."""
    if isinstance(indices, np.ndarray):
        return np.where(indices < 0, indices + extent, indices)
    return f.where(f.less(indices, 0), indices + extent, indices)


@torch_rule("aten.index.Tensor", arrays=True)
def _index(x: Any, indices: Sequence[Any]) -> Any:
    """Elements at several index tensors, which broadcast: one look-up in the axes that they index,
    merged into one."""
    given = [axis for axis, each in enumerate(indices) if each is not None]
    first, last = given[0], given[-1]
    every = [each for each in indices if each is not None]
    if any(each.dtype in (bool, DType.BOOL) for each in every):
        raise _refused("indexing", "a mask", "whole numbers: how many are true is not known")
    beside = (
        x
        if isinstance(x, TensorOperators)
        else next(each for each in every if isinstance(each, TensorOperators))
    )
    if not isinstance(x, TensorOperators):
        x = _as_tensor(x, beside)
    if len(given) != last - first + 1:
        # Axes that come of indices which are not neighbours are the first of the result.
        others = [axis for axis in range(x.ndim) if axis not in given]
        return _index(x.transpose([*given, *others]), every)
    flat: Any = 0
    for axis, each in zip(given, every, strict=True):
        stride = math.prod(x.shape[axis + 1 : last + 1])
        step = _not_negative(each, x.shape[axis])
        step = step * stride if stride != 1 else step
        flat = step if axis == first else _sum_of_indices(flat, step, beside)
    shape = tuple(flat.shape)
    merged = math.prod(x.shape[first : last + 1])
    if isinstance(flat, np.ndarray):
        if np.array_equal(flat.reshape(-1), np.arange(merged)):
            return _reshaped(x, [*x.shape[:first], *shape, *x.shape[last + 1 :]])
        flat = _as_tensor(flat.astype(np.int64), beside)
    source = _reshaped(x, [*x.shape[:first], merged, *x.shape[last + 1 :]])
    if first == 0 and source.ndim == 2:
        return f.embedding(source, flat)
    taken = f.index_select(source, _reshaped(flat, [math.prod(shape)]), first)
    return _reshaped(taken, [*x.shape[:first], *shape, *x.shape[last + 1 :]])


def _sum_of_indices(x: Any, y: Any, beside: Any) -> Any:
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x + y
    x, y = (_as_tensor(each, beside) if isinstance(each, np.ndarray) else each for each in (x, y))
    return f.add(x.cast(DType.INT64), y.cast(DType.INT64))


def _sorted_places(
    edges: Any,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    places = f.searchsorted(edges, x, side or ("right" if right else "left"), sorter)
    return places.cast(DType.INT32 if out_int32 else DType.INT64)


def _places_in_memory(size: Sequence[int], stride: Sequence[int], offset: int | None) -> Array:
    """Where the elements of such a view lie."""
    steps = np.indices(tuple(size)).reshape(len(size), -1)
    places: Array = (offset or 0) + np.tensordot(np.array(stride, np.int64), steps, 1)
    return places


def _strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Elements by their places in memory; the reader refuses tensors that do not lie in order."""
    places = constant(_places_in_memory(size, stride, offset), DType.INT64, x.placement)
    return f.index_select(x.reshape(-1), places, 0).reshape(list(size))


def _strided_scatter(
    x: Any, part: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    places = _places_in_memory(size, stride, offset)
    if len(np.unique(places)) < len(places):
        raise _refused("as_strided_scatter", list(stride), "a view without overlaps")
    at = constant(places, DType.INT64, x.placement)
    return f.index_copy(x.reshape(-1), at, part.reshape(-1), 0).reshape(x.shape)


def _diagonals(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    if (dim1, dim2) not in ((-2, -1), (x.ndim - 1, x.ndim)):
        raise _refused("diag_embed", (dim1, dim2), "the last two axes")
    return f.diag_embed(x, offset)


define(
    {
        "aten.gather.default": lambda x, dim, index, sparse_grad=False: _gathered(x, dim, index),
        "aten.index_select.default": lambda x, dim, index: f.index_select(x, index, dim),
        "aten.scatter.src aten.scatter.value": f.scatter,
        "aten.index_add.default": lambda x, dim, index, source, *, alpha=1: f.index_add(
            x, index, source, dim, alpha
        ),
        "aten.scatter.reduce aten.scatter.value_reduce": (
            lambda x, dim, index, source, *, reduce: f.scatter(x, dim, index, source, reduce)
        ),
        "aten.scatter_reduce.two": lambda x, dim, index, source, reduce, *, include_self=True: (
            f.scatter_reduce(x, dim, index, source, reduce, include_self)
        ),
        "aten.index_reduce.default": lambda x, dim, index, source, reduce, *, include_self=True: (
            f.index_reduce(x, index, source, dim, reduce, include_self)
        ),
        "aten.put.default": f.put,
        "aten.diagonal_scatter.default": assembly.diagonal_scatter,
        "aten.as_strided.default": _strided,
        "aten.as_strided_scatter.default": _strided_scatter,
        "aten.index_copy.default": lambda x, dim, index, source: f.index_copy(
            x, index, source, dim
        ),
        "aten.index_fill.int_Scalar aten.index_fill.int_Tensor": lambda x, dim, index, value: (
            f.index_fill(x, index, value, dim)
        ),
        "aten.take.default": f.take,
        "aten.masked_scatter.default": f.masked_scatter,
        "aten.diag_embed.default": _diagonals,
        "aten.unfold.default": f.unfold_axis,
        "aten.rot90.default": f.rot90,
        "aten.scatter_add.default": f.scatter_add,
        "aten.searchsorted.Tensor": _sorted_places,
        "aten.bucketize.Tensor": lambda x, edges, out_int32=False, right=False: f.bucketize(
            x, edges, right
        ).cast(DType.INT32 if out_int32 else DType.INT64),
        "aten.isin.Tensor_Tensor": lambda x, y, assume_unique=False, invert=False: f.isin(
            x, y, invert
        ),
        "aten.histc.default": f.histc,
        "aten.one_hot.default": lambda ids, classes=-1: (
            f.one_hot(ids, classes, "int64") if classes > 0 else _no_classes()
        ),
    }
)


@torch_rule("aten.index_put.default", arrays=True)
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """x with other values at the indices, which may be masks."""
    beside = next(each for each in (x, values, *indices) if isinstance(each, TensorOperators))
    x, values = (_as_tensor(e, beside) if isinstance(e, np.ndarray) else e for e in (x, values))
    mask = indices[0]
    if len(indices) == 1 and mask.dtype in (bool, DType.BOOL) and math.prod(values.shape) == 1:
        # The same value wherever the mask is true.
        mask = _as_tensor(mask, beside) if isinstance(mask, np.ndarray) else mask
        mask = f.expand(_reshaped(mask, [*mask.shape, *[1] * (x.ndim - mask.ndim)]), x.shape)
        number = f.expand(values.reshape([1] * x.ndim), x.shape)
        return f.where(mask, x + number if accumulate else number, x)
    places = tuple(
        slice(None)
        if each is None
        else _as_tensor(each, beside)
        if isinstance(each, np.ndarray)
        else each
        for each in indices
    )
    return f.index_put(x, places, values, accumulate)


def _gathered(x: Any, dim: int, index: Any) -> Any:
    """The elements at the indices, whose other axes may be shorter."""
    at = _at(x, dim)
    for axis in range(x.ndim):
        if axis != at and index.shape[axis] != x.shape[axis]:
            x = _sliced(x, axis, 0, index.shape[axis])
    return f.gather(x, at, index)


def _no_classes() -> Any:
    raise _refused("one_hot", "num_classes=-1", "a number of classes")
