"""Which of our functions stands for which op of PyTorch's database.

Where a function has the name and the arguments of PyTorch's, nothing is said here. Other ops have
a line each: the function, or what turns PyTorch's arguments into ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plancompiler as pc

Call = Callable[..., Any]

ALONE = pc.Placement("cpu", [0])
"""Where tensors are made that have no input; the suite puts the mesh of the run in its place."""

LEFT_OUT = {
    "complex": "view_as_real view_as_complex complex conj conj_physical resolve_conj resolve_neg "
    "imag real sgn angle polar isreal cdouble cfloat chalf linalg.eig linalg.eigvals stft istft",
    "sparse": "sparse.sampled_addmm sparse.mm to_sparse",
    "compiled from PyTorch's own source": "jiterator_unary jiterator_binary "
    "jiterator_4inputs_with_extra_args jiterator_binary_return_by_ref "
    "jiterator_2inputs_2outputs",
    "strides and storage": "as_strided as_strided_copy as_strided_scatter new_empty_strided "
    "empty_strided empty_permuted resize_ resize_as_",
    "quantised": "torch._scaled_mm torch._scaled_mm_v2",
}
LEFT_OUT = {name: why for why, names in LEFT_OUT.items() for name in names.split()}
"""Ops that we leave out, and why."""

RANDOM = frozenset(
    (
        *("normal", "uniform", "randint", "bernoulli", "randn", "randn_like", "rand_like"),
        *("randint_like", "multinomial", "cauchy", "exponential", "geometric", "log_normal"),
        *("empty", "empty_like", "new_empty", "nn.functional.rrelu", "nn.functional.dropout"),
        *("nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout"),
        "nn.functional.feature_alpha_dropout",
    )
)
"""Ops whose values nothing fixes: their shapes and dtypes are compared."""

NAMESPACES = ("nn.functional.", "linalg.", "special.")


def function_for(name: str, variant: str) -> Call | None:
    """Our function for an op variant, called with PyTorch's arguments; None if there is none."""
    if name in LEFT_OUT or name.startswith(("fft.", "masked.")):
        return CALLS.get(name)
    for key in (f"{name}/{variant}", name):
        if key in CALLS:
            return CALLS[key]
    short = name
    for namespace in NAMESPACES:
        short = short.removeprefix(namespace)
    if "." in short or short not in pc.__all__:
        return None
    function: Call = getattr(pc, short)
    return function


def _variance(function: Call) -> Call:
    def call(x, dim=None, unbiased=True, keepdim=False, *, correction=None):
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        less = unbiased if correction is None else correction
        return function(x, dim, keepdim, float(less))

    return call


def _rounded(x, y, rounding_mode=None):
    quotient = pc.div(x, y)
    return {None: lambda each: each, "trunc": pc.trunc, "floor": pc.floor}[rounding_mode](quotient)


def _extreme(whole: Call, along: Call, of_two: Call) -> Call:
    def call(x, y=None, keepdim=False, *, dim=None):
        if isinstance(y, pc.DistTensor):
            return of_two(x, y)
        axis = y if dim is None else dim
        return whole(x) if axis is None else along(x, axis, keepdim)

    return call


def _with_dtype(function: Call) -> Call:
    def call(x, *args, dtype=None, **named):
        return function(x if dtype is None else pc.cast(x, dtype), *args, **named)

    return call


CALLS: dict[str, Call] = {
    "std": _variance(pc.std),
    "var": _variance(pc.var),
    "div": _rounded,
    "softmax": _with_dtype(pc.softmax),
    "log_softmax": _with_dtype(pc.log_softmax),
    "gather": lambda x, dim, index, sparse_grad=False: pc.gather(x, dim, index),
    "index_select": lambda x, dim, index: pc.index_select(x, index, dim),
    "eq": pc.equal,
}
"""By op, or by op and variant."""
