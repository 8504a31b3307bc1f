"""The Python array API standard (2025.12) on tensors: `pc.array_api`, without complex numbers and
Fourier transforms. See docs/compatibility.md.

Functions of the standard that make tensors take a `pc.Placement` as their device; by default all
ranks of the program hold the whole value.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

from plancompiler.array_api import linalg, numpy_functions  # noqa: F401  # `ir.numpy_calls` takes it from here
from plancompiler.array_api.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from plancompiler.array_api.dtypes import (
    bool,
    can_cast,
    finfo,
    float32,
    float64,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    isdtype,
    result_type,
    uint8,
    uint16,
    uint32,
    uint64,
)
from plancompiler.array_api.elementwise import *  # noqa: F403  # its __all__ is part of ours
from plancompiler.array_api.elementwise import __all__ as _elementwise
from plancompiler.array_api.info import __array_namespace_info__
from plancompiler.array_api.linalg import matmul, matrix_transpose, tensordot, vecdot
from plancompiler.array_api.manipulation import (
    astype,
    broadcast_arrays,
    broadcast_shapes,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    moveaxis,
    permute_dims,
    repeat,
    reshape,
    roll,
    squeeze,
    stack,
    take,
    take_along_axis,
    tile,
    unstack,
)
from plancompiler.array_api.reduction import (
    all,
    any,
    cumulative_prod,
    cumulative_sum,
    diff,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from plancompiler.array_api.searching import (
    argmax,
    argmin,
    argsort,
    count_nonzero,
    isin,
    nonzero,
    searchsorted,
    sort,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
    where,
)
from plancompiler.errors import UsageError

__array_api_version__ = "2025.12"
VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")
"""Versions of the standard; each adds to the one before."""

e, inf, nan, newaxis, pi = math.e, math.inf, math.nan, None, math.pi

__all__ = [  # noqa: PLE0604  # the rest are texts, too
    "__array_api_version__",
    "__array_namespace_info__",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "asarray",
    "astype",
    "bool",
    "broadcast_arrays",
    "broadcast_shapes",
    "broadcast_to",
    "can_cast",
    "concat",
    "count_nonzero",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "e",
    "empty",
    "empty_like",
    "expand_dims",
    "eye",
    "finfo",
    "flip",
    "float32",
    "float64",
    "from_dlpack",
    "full",
    "full_like",
    "iinfo",
    "inf",
    "int16",
    "int32",
    "int64",
    "int8",
    "isdtype",
    "isin",
    "linalg",
    "linspace",
    "matmul",
    "matrix_transpose",
    "max",
    "mean",
    "meshgrid",
    "min",
    "moveaxis",
    "nan",
    "newaxis",
    "nonzero",
    "ones",
    "ones_like",
    "permute_dims",
    "pi",
    "prod",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "searchsorted",
    "sort",
    "squeeze",
    "stack",
    "std",
    "sum",
    "take",
    "take_along_axis",
    "tensordot",
    "tile",
    "tril",
    "triu",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "var",
    "vecdot",
    "where",
    "zeros",
    "zeros_like",
    *_elementwise,
]


def namespace_of(version: str | None = None) -> ModuleType:
    """This module, which `x.__array_namespace__()` gives; UsageError for another version."""
    if version is not None and version not in VERSIONS:
        raise UsageError(
            "this is no version of the array API", got=repr(version), expected=", ".join(VERSIONS)
        )
    return sys.modules[__name__]
