"""Which of our functions stands for which op of PyTorch's database.

Where a function has the name and the arguments of PyTorch's, nothing is said here. Other ops have
a line each: the function, or what turns PyTorch's arguments into ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import plancompiler as pc

Call = Callable[..., Any]

WHERE = threading.local()
"""Its `placement` is where a rank makes tensors that have no input."""

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

COMPARED = {"linalg.lstsq": 1}
"""How many outputs are compared, where ours has fewer: PyTorch's others say how it went."""

SYMMETRIC = {"linalg.eigh", "linalg.eigvalsh"}
"""Ops that read one triangle of a matrix: their gradients are compared without the antisymmetric
part, of which nothing depends."""

INEXACT = {
    "special.bessel_j0": 1e-6,
    "special.bessel_j1": 1e-6,
    "special.bessel_y0": 1e-6,
    "special.bessel_y1": 2e-6,
}
"""Ops that PyTorch computes less exactly than its dtype, with the bound that it keeps; between 5
and 30 its Bessel functions err by 4e-7, as the Wronskian shows."""

TRIANGLES = {"cholesky_inverse": 0, "cholesky_solve": 1}
"""Ops of which an input is a triangle, with the input's number: PyTorch's gradient goes beyond."""

FORWARD_ONLY = {
    "linalg.pinv/hermitian": "PyTorch's gradient does not know that one triangle is read",
    "__rpow__": "no gradient flows to the exponent of a negative base, where PyTorch has NaN",
    "pow": "no gradient flows to the exponent of a negative base, where PyTorch has NaN",
    "nextafter": "it is piecewise constant and has no gradient here",
}
"""Ops whose gradients are not compared, and why."""

NAMESPACES = ("nn.functional.", "special.")


def function_for(name: str, variant: str) -> Call | None:
    """Our function for an op variant, called with PyTorch's arguments; None if there is none."""
    if name in LEFT_OUT or name.startswith(("fft.", "masked.")):
        return CALLS.get(name)
    for key in (f"{name}/{variant}", name):
        if key in CALLS:
            return CALLS[key]
    if name.startswith("linalg."):
        return getattr(pc.linalg, name.removeprefix("linalg."), getattr(pc, name[7:], None))
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


def _of_factors(which):
    """LU with pivots as PyTorch returns them, and where it also says how it went, that it did."""

    def call(x, *, pivot=True, check_errors=False):
        return (*pc.linalg.lu_factor(x), _fine(x)) if which == "ex" else pc.linalg.lu_factor(x)

    return call


def _fine(x):
    """PyTorch's word of success for each matrix: 0."""
    return pc.cast(pc.count_nonzero(x, (-2, -1)) * 0, "int32")


def _mirrored(x, triangle):
    """The symmetric matrix of which PyTorch reads one triangle."""
    x = pc.linalg.transposed(x) if triangle == "U" else x
    return pc.tril(x) + pc.linalg.transposed(pc.tril(x, -1))


def _turned(factors):
    u, s, v = factors
    return u, s, pc.linalg.transposed(v)


def _least_squares(a, b, rcond=None, *, driver=None):
    return pc.linalg.lstsq(a, b), *(None,) * 3


def _norm(x, p=None, dim=None, keepdim=False, dtype=None):
    if dtype is not None:
        x = pc.cast(x, dtype)
    if p in ("fro", None):
        return pc.norm(x, 2.0, dim, keepdim)
    if p == "nuc":
        return pc.linalg.matrix_norm(x, p, (-2, -1) if dim is None else dim, keepdim)
    return pc.norm(x, p, dim, keepdim)


def _linalg_norm(function):
    def call(x, ord=None, dim=None, keepdim=False, *, dtype=None):
        if dtype is not None:
            x = pc.cast(x, dtype)
        return function(x, ord, dim, keepdim)

    return call


def _placed(function):
    """A function that makes a tensor of nothing, where the run is."""

    def call(*args, device=None, requires_grad=False, layout=None, dtype=None, **named):
        more = {} if dtype is None else {"dtype": dtype}
        return function(*args, placement=WHERE.placement, **more, **named)

    return call


def _filled(value):
    def call(*shape, dtype="float32", device=None, requires_grad=False, **_):
        extents = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return pc.full(extents, value, dtype, WHERE.placement)

    return call


def _arange(start, stop=None, step=1, dtype="int64", placement=None):
    start, stop = (0, start) if stop is None else (start, stop)
    return pc.arange(start, stop, step, dtype=dtype, placement=placement)


def _extreme_at(values, places):
    return lambda x, dim, keepdim=False: (values(x, dim, keepdim), places(x, dim, keepdim))


def _place(function):
    def call(x, dim=None, keepdim=False):
        if dim is None:
            return function(pc.ravel(x), 0) if not keepdim else _refuse_argument("keepdim")
        return function(x, dim, keepdim)

    return call


def _refuse_argument(name):
    raise TypeError(f"unexpected argument {name!r}")


def _rounded_to(x, *, decimals=0):
    return pc.round(x) if decimals == 0 else pc.round(x * 10.0**decimals) / 10.0**decimals


def _batch_norm(x, mean, variance, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    if training:
        return pc.batch_norm(x, weight, bias, eps=eps)
    return pc.batch_norm(x, weight, bias, mean, variance, eps)


def _divergence(x, target, reduction="mean", log_target=False):
    return pc.kl_div(x, pc.exp(target) if log_target else target, reduction)


def _like(function):
    return lambda x, dtype=None, device=None, **_: function(
        x if dtype is None else pc.cast(x, dtype)
    )


def _scaled(function):
    """`add` and the like, whose second operand PyTorch takes `alpha` times."""

    def call(x, y, *, alpha=1):
        return function(x, y if alpha == 1 else pc.mul(y, alpha))

    return call


def _truths(function):
    """A function of truth values, of numbers too, which are true unless zero."""

    def truth(x):
        return x if str(x.dtype) == "bool" else pc.not_equal(x, 0)

    def call(*args, **named):
        return function(
            *(truth(each) if isinstance(each, pc.DistTensor) else each for each in args), **named
        )

    return call


def _clamp(x, min=None, max=None):
    for bound, function in ((min, pc.maximum), (max, pc.minimum)):
        x = x if bound is None else function(x, bound)
    return x


def _padded(x, pad, mode="constant", value=None):
    if mode != "constant":
        raise TypeError(f"unexpected argument 'mode': {mode}")
    low, high = [0] * x.ndim, [0] * x.ndim
    for at in range(len(pad) // 2):
        low[-1 - at], high[-1 - at] = pad[2 * at], pad[2 * at + 1]
    return pc.pad(x, low, high, 0.0 if value is None else value)


def _swapped(function):
    return lambda x, y: function(y, x)


def _both(mean, spread):
    return lambda x, *args, **named: (spread(x, *args, **named), mean(x, *args, **named))


def _mean(x, dim=None, unbiased=True, keepdim=False, *, correction=None):
    return pc.mean(x, None if isinstance(dim, bool) else dim, keepdim)


def _max_pool(function):
    def call(
        x, kernel_size, stride=None, padding=0, dilation=1, *, ceil_mode=False, return_indices=False
    ):
        if ceil_mode or return_indices:
            raise TypeError("unexpected argument 'ceil_mode' or 'return_indices'")
        return function(x, kernel_size, stride, padding, dilation)

    return call


def _avg_pool(function):
    def call(
        x,
        kernel_size,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    ):
        if ceil_mode or divisor_override is not None:
            raise TypeError("unexpected argument 'ceil_mode' or 'divisor_override'")
        return function(x, kernel_size, stride, padding, count_include_pad)

    return call


def _normalized_last(x, shape, weight=None, bias=None, eps=1e-5):
    if len(shape) != 1:
        raise TypeError("unexpected argument 'normalized_shape': the last axis alone is normalised")
    one = pc.full_like(x, 1.0, shape) if weight is None else weight
    return pc.layer_norm(x, one, pc.full_like(x, 0.0, shape) if bias is None else bias, eps)


def _scaled_last(x, shape, weight=None, eps=None):
    if len(shape) != 1:
        raise TypeError("unexpected argument 'normalized_shape': the last axis alone is normalised")
    least = {"float32": 2.0**-23, "float64": 2.0**-52}[str(x.dtype)]
    one = pc.full_like(x, 1.0, shape) if weight is None else weight
    return pc.rms_norm(x, one, least if eps is None else eps)


def _logit(x, eps=None):
    share = x if eps is None else pc.clip(x, eps, 1 - eps)
    return pc.log(share / (1.0 - share))


def _gated(x, dim=-1):
    left, right = pc.chunk(x, 2, dim)
    return left * pc.sigmoid(right)


def _attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    return pc.scaled_dot_product_attention(q, k, v, is_causal, scale, attn_mask, dropout_p)


def _shrunk(x, lambd=0.5):
    return x - pc.clip(x, -lambd, lambd)


def _labels(function):
    def call(x, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
        if weight is not None or label_smoothing:
            raise TypeError("unexpected argument 'weight' or 'label_smoothing'")
        return function(pc.movedim(x, 1, -1) if x.ndim > 1 else x, target, reduction, ignore_index)

    return call


def _distance(x, y, p):
    return pc.norm(x - y, p)


def _windowed(x, axis, size, step):
    return pc.unfold_axis(x, axis, size, step)


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
    "arange": _placed(_arange),
    "linspace": _placed(pc.linspace),
    "eye": _placed(pc.eye),
    "zeros": _filled(0.0),
    "ones": _filled(1.0),
    "full": lambda shape, value, *, dtype="float32", **_: pc.full(
        shape, value, dtype, WHERE.placement
    ),
    "zeros_like": _like(pc.zeros_like),
    "ones_like": _like(pc.ones_like),
    "full_like": lambda x, value, dtype=None, **_: pc.full_like(
        x if dtype is None else pc.cast(x, dtype), value
    ),
    "equal": pc.array_equal,
    "meshgrid": lambda *tensors, indexing="ij": pc.meshgrid(
        *(tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors), indexing=indexing
    ),
    "nonzero": lambda x, *, as_tuple=False: pc.nonzero(x) if as_tuple else pc.argwhere(x),
    "rand_like": lambda x, dtype=None, **_: _like(pc.rand_like)(x, dtype),
    "randn_like": lambda x, dtype=None, **_: _like(pc.randn_like)(x, dtype),
    "uniform": lambda x, low=0.0, high=1.0: x.uniform_(low, high),
    "normal/in_place": lambda x, mean=0.0, std=1.0: x.normal_(mean, std),
    "exponential": lambda x, rate=1.0: x.exponential_(rate),
    "searchsorted": lambda edges, x, *, out_int32=False, right=False, side="left": pc.cast(
        pc.searchsorted(edges, x, side="right" if right else side),
        "int32" if out_int32 else "int64",
    ),
    "max/reduction_with_dim": _extreme_at(pc.max, pc.argmax),
    "min/reduction_with_dim": _extreme_at(pc.min, pc.argmin),
    "argmax": _place(pc.argmax),
    "argmin": _place(pc.argmin),
    "round": _rounded_to,
    "nn.functional.batch_norm": _batch_norm,
    "nn.functional.kl_div": _divergence,
    "ne": pc.not_equal,
    "lt": pc.less,
    "le": pc.less_equal,
    "gt": pc.greater,
    "ge": pc.greater_equal,
    "add": _scaled(pc.add),
    "sub": _scaled(pc.sub),
    "rsub": lambda x, y, *, alpha=1: pc.sub(y, x if alpha == 1 else x * alpha),
    "__radd__": _swapped(pc.add),
    "__rmul__": _swapped(pc.mul),
    "__rsub__": _swapped(pc.sub),
    "__rdiv__": _swapped(pc.div),
    "__rmod__": _swapped(pc.remainder),
    "__rpow__": _swapped(pc.pow),
    "__rmatmul__": _swapped(pc.matmul),
    "__rand__": _swapped(pc.bitwise_and),
    "__ror__": _swapped(pc.bitwise_or),
    "__rxor__": _swapped(pc.bitwise_xor),
    "bitwise_left_shift": pc.shift_left,
    "bitwise_right_shift": pc.shift_right,
    "true_divide": pc.div,
    "clamp": _clamp,
    "clamp_min": pc.maximum,
    "clamp_max": pc.minimum,
    "positive": lambda x: x,
    "contiguous": lambda x, **_: x,
    "clone": lambda x, **_: pc.reshape(x, x.shape),
    "alias_copy": lambda x: pc.reshape(x, x.shape),
    "resolve_neg": lambda x: x,
    "item": lambda x: x.item(),
    "max/reduction_no_dim": pc.max,
    "min/reduction_no_dim": pc.min,
    "max/binary": pc.maximum,
    "min/binary": pc.minimum,
    "amax": pc.max,
    "amin": pc.min,
    "all": _truths(pc.all),
    "any": _truths(pc.any),
    "logical_and": _truths(pc.logical_and),
    "logical_or": _truths(pc.logical_or),
    "logical_xor": _truths(pc.logical_xor),
    "logical_not": _truths(pc.logical_not),
    "aminmax": lambda x, *, dim=None, keepdim=False: (
        pc.min(x, dim, keepdim),
        pc.max(x, dim, keepdim),
    ),
    "std_mean": _both(_mean, _variance(pc.std)),
    "var_mean": _both(_mean, _variance(pc.var)),
    "nansum": lambda x, dim=None, keepdim=False: pc.sum(pc.nan_to_num(x, 0.0), dim, keepdim),
    "dist": lambda x, y, p=2: _distance(x, y, p),
    "frac": lambda x: x - pc.trunc(x),
    "ldexp": lambda x, y: x * pc.exp2(y),
    "where": lambda x, condition, y: pc.where(condition, x, y),
    "einsum": lambda tensors, equation: pc.einsum(equation, *tensors),
    "mm": pc.matmul,
    "mv": lambda a, x: pc.einsum("ij,j->i", a, x),
    "vdot": pc.dot,
    "addmm": lambda x, a, b, *, beta=1, alpha=1: x * beta + pc.matmul(a, b) * alpha,
    "addmv": lambda x, a, v, *, beta=1, alpha=1: x * beta + pc.einsum("ij,j->i", a, v) * alpha,
    "addr": lambda x, a, b, *, beta=1, alpha=1: x * beta + pc.outer(a, b) * alpha,
    "baddbmm": lambda x, a, b, *, beta=1, alpha=1: x * beta + pc.bmm(a, b) * alpha,
    "addbmm": lambda x, a, b, *, beta=1, alpha=1: x * beta + pc.sum(pc.bmm(a, b), 0) * alpha,
    "addcmul": lambda x, a, b, *, value=1: x + a * b * value,
    "addcdiv": lambda x, a, b, *, value=1: x + a / b * value,
    "sort": lambda x, dim=-1, descending=False, stable=None: pc.sort(x, dim, descending),
    "argsort": lambda x, dim=-1, descending=False, stable=None: pc.argsort(x, dim, descending),
    "msort": lambda x: pc.sort(x, 0)[0],
    "topk": lambda x, k, dim=-1, largest=True, sorted=True: pc.topk(x, k, dim, largest),
    "flatten": lambda x, start_dim=0, end_dim=-1: pc.flatten(x, start_dim, end_dim),
    "transpose": pc.swapaxes,
    "transpose_copy": pc.swapaxes,
    "t": pc.transpose,
    "t_copy": pc.transpose,
    "T": pc.transpose,
    "mT": lambda x: pc.swapaxes(x, -1, -2),
    "permute_copy": pc.permute,
    "expand_copy": pc.expand,
    "unsqueeze_copy": pc.unsqueeze,
    "unbind_copy": pc.unbind,
    "diagonal": lambda x, offset=0, dim1=0, dim2=1: pc.diagonal(
        pc.movedim(x, (dim1, dim2), (-2, -1)), offset
    ),
    "diagonal_copy": lambda x, offset=0, dim1=0, dim2=1: pc.diagonal(
        pc.movedim(x, (dim1, dim2), (-2, -1)), offset
    ),
    "linalg.diagonal": lambda x, *, offset=0, dim1=-2, dim2=-1: pc.diagonal(
        pc.movedim(x, (dim1, dim2), (-2, -1)), offset
    ),
    "diagonal_scatter": pc.diagonal_scatter,
    "broadcast_tensors": pc.broadcast_tensors,
    "block_diag": lambda *tensors: pc.block_diag(tensors),
    "cartesian_prod": lambda *tensors: pc.cartesian_prod(tensors),
    "narrow_copy": pc.narrow,
    "split_with_sizes": pc.split,
    "split_with_sizes_copy": pc.split,
    "unsafe_split": pc.split,
    "repeat": pc.tile,
    "unfold": _windowed,
    "unfold_copy": _windowed,
    "view": lambda x, *shape: pc.reshape(x, shape[0] if len(shape) == 1 else shape),
    "view_copy": pc.reshape,
    "view_as": lambda x, other: pc.reshape(x, other.shape),
    "reshape_as": lambda x, other: pc.reshape(x, other.shape),
    "expand_as": lambda x, other: pc.expand(x, other.shape),
    "fill": lambda x, value: pc.full_like(x, float(value)),
    "double": lambda x, **_: pc.cast(x, "float64"),
    "float": lambda x, **_: pc.cast(x, "float32"),
    "half": lambda x, **_: pc.cast(x, "float16"),
    "long": lambda x, **_: pc.cast(x, "int64"),
    "int": lambda x, **_: pc.cast(x, "int32"),
    "bool": _truths(lambda x, **_: x),
    "float_power": lambda x, y: pc.pow(
        *(pc.cast(e, "float64") if isinstance(e, pc.DistTensor) else e for e in (x, y))
    ),
    "logit": _logit,
    "scatter": lambda x, dim, index, src, reduce=None: pc.scatter(
        x, dim, index, src, reduce or "set"
    ),
    "index_add": lambda x, dim, index, source, *, alpha=1: pc.index_add(
        x, index, source * alpha, dim
    ),
    "take_along_dim": lambda x, index, dim=None: (
        pc.take_along_axis(x, index, dim)
        if dim is not None
        else pc.take_along_axis(pc.ravel(x), pc.ravel(index), 0)
    ),
    "special.modified_bessel_i0": pc.i0,
    "special.modified_bessel_i1": pc.i1,
    "nn.functional.pad": _padded,
    "constant_pad_nd": lambda x, pad, value=0.0: _padded(x, pad, "constant", value),
    "nn.functional.linear": pc.linear,
    "nn.functional.layer_norm": _normalized_last,
    "nn.functional.rms_norm": _scaled_last,
    "nn.functional.group_norm": lambda x, groups, weight=None, bias=None, eps=1e-5: pc.group_norm(
        x, groups, weight, bias, eps
    ),
    "nn.functional.gelu": lambda x, approximate="none": (
        pc.gelu(x) if approximate == "tanh" else pc.gelu_exact(x)
    ),
    "nn.functional.hardtanh": lambda x, min_val=-1.0, max_val=1.0: pc.hardtanh(x, min_val, max_val),
    "nn.functional.softmin": lambda x, dim=None, dtype=None: pc.softmax(
        -(x if dtype is None else pc.cast(x, dtype)), dim
    ),
    "nn.functional.tanhshrink": lambda x: x - pc.tanh(x),
    "nn.functional.softshrink": _shrunk,
    "nn.functional.hardshrink": lambda x, lambd=0.5: pc.where(pc.abs(x) > lambd, x, x * 0.0),
    "nn.functional.threshold": lambda x, threshold, value: pc.where(x > threshold, x, value),
    "nn.functional.celu": lambda x, alpha=1.0: pc.elu(x / alpha) * alpha,
    "nn.functional.glu": _gated,
    "nn.functional.softplus": lambda x, beta=1, threshold=20: pc.where(
        x * beta > float(threshold), x, pc.softplus(x * beta) / float(beta)
    ),
    "nn.functional.one_hot": lambda x, num_classes=-1: pc.one_hot(x, num_classes, "int64"),
    "nn.functional.dropout": lambda x, p=0.5, training=True: pc.dropout(x, p) if training else x,
    "nn.functional.max_pool1d": _max_pool(pc.max_pool1d),
    "nn.functional.max_pool2d": _max_pool(pc.max_pool2d),
    "nn.functional.max_pool3d": _max_pool(pc.max_pool3d),
    "nn.functional.avg_pool1d": _avg_pool(pc.avg_pool1d),
    "nn.functional.avg_pool2d": _avg_pool(pc.avg_pool2d),
    "nn.functional.avg_pool3d": _avg_pool(pc.avg_pool3d),
    "nn.functional.cross_entropy": _labels(pc.cross_entropy),
    "nn.functional.nll_loss": lambda x, target, weight=None, ignore_index=-100, reduction="mean": (
        _labels(pc.nll_loss)(x, target, weight, ignore_index, reduction)
    ),
    "nn.functional.scaled_dot_product_attention": _attention,
    "nn.functional.pairwise_distance": lambda x, y, p=2.0, eps=1e-6, keepdim=False: pc.norm(
        x - y + eps, p, -1, keepdim
    ),
    "norm": _norm,
    "cholesky": pc.linalg.cholesky,
    "cholesky_inverse": pc.linalg.cholesky_inverse,
    "cholesky_solve": pc.linalg.cholesky_solve,
    "cross": lambda x, y, dim=None: pc.linalg.cross(
        x, y, next(at for at, n in enumerate(x.shape) if n == 3) if dim is None else dim
    ),
    "linalg.cholesky_ex": lambda x, *, upper=False, check_errors=False: (
        pc.linalg.cholesky(x, upper),
        _fine(x),
    ),
    "linalg.eigh": lambda x, UPLO="L": pc.linalg.eigh(_mirrored(x, UPLO)),
    "linalg.eigvalsh": lambda x, UPLO="L": pc.linalg.eigvalsh(_mirrored(x, UPLO)),
    "linalg.inv_ex": lambda x, *, check_errors=False: (pc.linalg.inv(x), _fine(x)),
    "linalg.solve_ex": lambda a, b, *, left=True, check_errors=False: (
        pc.linalg.solve(a, b, left),
        _fine(a),
    ),
    "linalg.lstsq": _least_squares,
    "linalg.lu": lambda x, *, pivot=True: pc.linalg.lu(x),  # noqa: PLW0108  # drops `pivot`
    "linalg.lu_factor": _of_factors(""),
    "linalg.lu_factor_ex": _of_factors("ex"),
    "linalg.lu_solve": lambda lu, pivots, b, *, left=True, adjoint=False: pc.linalg.lu_solve(
        lu, pivots, b, left, adjoint
    ),
    "lu": lambda x, pivot=True, get_infos=False: _of_factors("ex")(x)[: 3 if get_infos else 2],
    "lu_solve": lambda b, lu, pivots: pc.linalg.lu_solve(lu, pivots, b),
    "lu_unpack": lambda lu, pivots, unpack_data=True, unpack_pivots=True: pc.linalg.unpacked(
        lu, pivots
    ),
    "linalg.norm": _linalg_norm(pc.linalg.norm),
    "linalg.vector_norm": _linalg_norm(
        lambda x, ord, dim, keepdim: pc.linalg.vector_norm(
            x, 2.0 if ord is None else ord, dim, keepdim
        )
    ),
    "linalg.matrix_norm": lambda x, ord="fro", dim=(-2, -1), keepdim=False, *, dtype=None: (
        pc.linalg.matrix_norm(x if dtype is None else pc.cast(x, dtype), ord, dim, keepdim)
    ),
    "linalg.cond": lambda x, p=None: pc.linalg.cond(x, p),
    "linalg.matrix_rank": lambda x, tol=None, *, atol=None, rtol=None, hermitian=False: (
        pc.linalg.matrix_rank(x, tol if atol is None else atol, rtol, hermitian)
    ),
    "linalg.pinv/singular": lambda a, b: pc.linalg.pinv(
        pc.matmul(a, pc.linalg.transposed(b)), a.shape[-1]
    ),
    "linalg.pinv/hermitian": lambda x, *, hermitian=True: pc.linalg.pinv(_mirrored(x, "L")),
    "linalg.pinv": lambda x, *, rtol=None: pc.linalg.pinv(x, rtol=rtol),
    "linalg.tensorsolve": lambda a, b, dims=None: pc.linalg.tensorsolve(a, b, dims),
    "linalg.vander": lambda x, *, N=None: pc.linalg.vander(x, N),
    "logdet": pc.linalg.logdet,
    "matrix_exp": pc.linalg.matrix_exp,
    "pinverse": lambda x, rcond=1e-15: pc.linalg.pinv(x),
    "qr": lambda x, some=True: pc.linalg.qr(x, "reduced" if some else "complete"),
    "linalg.qr": pc.linalg.qr,
    "svd": lambda x, some=True, compute_uv=True: _turned(pc.linalg.svd(x, not some)),
    "triangular_solve": lambda b, a, upper=True, transpose=False, unitriangular=False: (
        pc.linalg.solve_triangular(
            pc.linalg.transposed(a) if transpose else a,
            b,
            upper != transpose,
            unitriangular=unitriangular,
        ),
        a * 1.0,
    ),
}
"""By op, or by op and variant."""
