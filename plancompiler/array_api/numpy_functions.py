"""NumPy's functions on tensors beyond those of the array API: what they mean there, they mean here.

`np.split(x, 3)`, `np.median(x)` and `np.sum(x, 0)` come here, as the array API has no such function
or does not take such arguments. Functions of NumPy that mean something else than ours of the same
name are written out; those that mean the same are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler import eager
from plancompiler.errors import AttributeValueError
from plancompiler.frontend import functions
from plancompiler.frontend.functions import linalg
from plancompiler.ir.operators import one_axis

Tensor = Any


def _split(x: Tensor, parts: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    extent = x.shape[one_axis(axis, x.ndim)]
    if isinstance(parts, int) and (parts < 1 or extent % parts):
        raise AttributeValueError(
            "np.split makes equal pieces",
            got=f"{parts} of extent {extent}",
            expected="a number that divides the extent",
            hint="np.array_split makes pieces that differ by one",
        )
    return functions.tensor_split(x, parts, axis)


def _sort(
    x: Tensor, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None
) -> Tensor:
    """Every kind is a stable one here."""
    return _ordered(functions.sort, x, axis)[0]


def _argsort(
    x: Tensor, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None
) -> Tensor:
    return _ordered(functions.argsort, x, axis)


def _ordered(function: Callable[..., Any], x: Tensor, axis: int | None) -> Any:
    return function(x.reshape((-1,))) if axis is None else function(x, axis)


def _unique(
    x: Tensor,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
) -> Any:
    distinct = functions.unique(x, axis=axis)
    asked = (return_index, return_inverse, return_counts)
    more = [each for each, wanted in zip(distinct[1:], asked, strict=True) if wanted]
    return (distinct.values, *more) if more else distinct.values


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if not np.ndim(a) or not np.ndim(b):
        return a * b
    return functions.tensordot(a, b, ((-1,), (max(-2, -b.ndim),)))


def _einsum(equation: str, *tensors: Tensor, optimize: Any = False) -> Tensor:
    return functions.einsum(equation, *tensors)


def _percentile(
    x: Tensor, q: Any, axis: Any = None, method: str = "linear", keepdims: bool = False
) -> Tensor:
    shares = [each / 100 for each in q] if isinstance(q, (list, tuple)) else q / 100
    return functions.quantile(x, shares, axis, keepdims, method)


def _average(x: Tensor, axis: Any = None, weights: Tensor | None = None) -> Tensor:
    if weights is None:
        return functions.mean(x, axis)
    if axis is not None and weights.shape != x.shape:
        at = one_axis(axis, x.ndim)
        weights = weights.reshape([-1 if each == at else 1 for each in range(x.ndim)])
    shares = functions.broadcast_to(weights, x.shape)
    return functions.sum(x * shares, axis) / functions.sum(shares, axis)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return functions.bincount(x, None, weights, minlength)


def _cov(m: Tensor, ddof: int = 1) -> Tensor:
    return functions.cov(m, ddof)


def _ptp(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    return functions.max(x, axis, keepdims) - functions.min(x, axis, keepdims)


_SAME = (
    *("all", "any", "argmax", "argmin", "atleast_1d", "atleast_2d", "atleast_3d"),
    *("column_stack", "corrcoef", "count_nonzero", "cumprod", "cumsum", "deg2rad", "diag"),
    *("diagonal", "diff", "dstack", "exp2", "flip", "fliplr", "flipud", "fmax", "fmin"),
    *("fmod", "gcd", "heaviside", "hsplit", "hstack", "inner", "isclose", "kron", "lcm"),
    *("logaddexp2", "max", "mean", "median", "min", "moveaxis", "nan_to_num", "nanmax", "nanmean"),
    *("nanmedian", "nanmin", "nanquantile", "nansum", "outer", "prod", "quantile", "rad2deg"),
    *("ravel", "repeat", "roll", "rot90", "round", "squeeze", "stack", "std", "sum", "swapaxes"),
    *("take", "take_along_axis", "tensordot", "tile", "trace", "trapezoid", "tril", "triu", "var"),
    *("vsplit", "vstack", "where"),
)
_OTHERWISE = {
    "amax": "max",
    "amin": "min",
    "around": "round",
    "array_split": "tensor_split",
    "concatenate": "concat",
    "degrees": "rad2deg",
    "expand_dims": "unsqueeze",
    "fabs": "abs",
    "radians": "deg2rad",
    "rint": "round",
}
"""Functions of ours by NumPy's names for them."""
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(functions, name) for name in _SAME},
    **{name: getattr(functions, own) for name, own in _OTHERWISE.items()},
    "allclose": eager.allclose,
    "argsort": _argsort,
    "array_equal": eager.array_equal,
    "average": _average,
    "bincount": _bincount,
    "cov": _cov,
    "dot": _dot,
    "einsum": _einsum,
    "percentile": _percentile,
    "ptp": _ptp,
    "sort": _sort,
    "split": _split,
    "unique": _unique,
}
"""By NumPy's name."""
LINALG: Mapping[str, Callable[..., Any]] = {
    name: getattr(linalg, name) for name in ("cond", "multi_dot", "norm")
}
"""The same of `numpy.linalg`."""
