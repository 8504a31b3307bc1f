"""Which of our functions stands for which op of PyTorch's database.

Where a function has the name and the arguments of PyTorch's, nothing is said here. Other ops have
a line each: the function, or what turns PyTorch's arguments into ours.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import plancompiler as pc

Call = Callable[..., Any]
F = pc.nn.functional

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

COMPARED = {"linalg.lstsq": 1, "nanmedian": 1}
"""How many outputs are compared, where ours has fewer: PyTorch's others say how it went."""

SYMMETRIC = {"linalg.eigh", "linalg.eigvalsh"}
"""Ops that read one triangle of a matrix: their gradients are compared without the antisymmetric
part, of which nothing depends."""

INEXACT = {
    "cov": 1e-4,
    "logcumsumexp": 2e-3,
    "special.bessel_j0": 1e-6,
    "special.bessel_j1": 1e-6,
    "special.bessel_y0": 1e-6,
    "special.bessel_y1": 2e-6,
}
"""Ops that PyTorch computes less exactly than its dtype, with the bound that it keeps; between 5
and 30 its Bessel functions err by 4e-7, as the Wronskian shows. The factor of `cov` is computed in
the dtype of the weights; the gradient of `logcumsumexp` beside elements of 10,000 errs by 3e-3."""

TRIANGLES = {"cholesky_inverse": 0, "cholesky_solve": 1}
"""Ops of which an input is a triangle, with the input's number: PyTorch's gradient goes beyond."""

FORWARD_ONLY = {
    "linalg.pinv/hermitian": "PyTorch's gradient does not know that one triangle is read",
    "__rpow__": "no gradient flows to the exponent of a negative base, where PyTorch has NaN",
    "pow": "no gradient flows to the exponent of a negative base, where PyTorch has NaN",
    "nn.functional.ctc_loss": "PyTorch's gradient is that of the logits of a softmax before",
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
    if name.startswith("nn.functional.") and name[14:] in F.__all__:
        return getattr(F, name[14:])
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


def _arange(start=0, stop=None, step=1, dtype="int64", placement=None, end=None):
    stop = end if stop is None else stop
    start, stop = (0, start) if stop is None else (start, stop)
    start, stop, step = (int(e) if isinstance(e, bool) else e for e in (start, stop, step))
    return pc.arange(start, stop, step, dtype=dtype, placement=placement)


def _extreme_at(values, places):
    return lambda x, dim, keepdim=False: (values(x, dim, keepdim), places(x, dim, keepdim))


def _like(function):
    return lambda x, dtype=None, device=None, **_: function(
        x if dtype is None else pc.cast(x, dtype)
    )


def _truths(function):
    """A function of truth values, of numbers too, which are true unless zero."""

    def truth(x):
        return x if str(x.dtype) == "bool" else pc.not_equal(x, 0)

    def call(*args, **named):
        return function(
            *(truth(each) if isinstance(each, pc.DistTensor) else each for each in args), **named
        )

    return call


def _swapped(function):
    return lambda x, y: function(y, x)


def _both(mean, spread):
    return lambda x, *args, **named: (spread(x, *args, **named), mean(x, *args, **named))


def _mean(x, dim=None, unbiased=True, keepdim=False, *, correction=None):
    return pc.mean(x, None if isinstance(dim, bool) else dim, keepdim)


def _distance(x, y, p):
    return pc.norm(x - y, p)


def _windowed(x, axis, size, step):
    return pc.unfold_axis(x, axis, size, step)


def _normal(mean, std=1.0, size=None, *, dtype="float32", **_):
    """Of tensors, or of numbers and a shape."""
    of = next((each for each in (mean, std) if isinstance(each, pc.DistTensor)), None)
    if of is None:
        return pc.normal(size, mean, std, dtype=dtype, placement=WHERE.placement)
    return pc.randn_like(of) * std + mean


def _whole_numbers(*args, device=None, dtype="int64", **_):
    (low, high, size) = args if len(args) == 3 else (0, *args)
    return pc.randint(size, low, high, dtype=dtype, placement=WHERE.placement)


def _triangle(function):
    return lambda rows, columns, offset=0, dtype="int64", **_: function(
        rows, columns, offset, placement=WHERE.placement
    ).to(dtype)


def _unique(x, sorted=True, return_inverse=False, return_counts=False, dim=None):
    distinct = pc.unique(x, axis=dim)
    more = ((return_inverse, distinct.inverse), (return_counts, distinct.counts))
    made = (distinct.values, *(each for wanted, each in more if wanted))
    return made if len(made) > 1 else made[0]


def _median(without_nan):
    """The lower one of two in the middle, with its place."""

    def call(x, dim=None, keepdim=False):
        if without_nan:
            value = pc.nanquantile(x, 0.5, dim, keepdim, "lower")
            return value if dim is None else (value, None)
        if dim is None:
            x, dim = x.ravel(), None
            return x.kthvalue((x.shape[0] + 1) // 2)[0]
        extent = x.shape[dim] if x.ndim else 1
        return x.kthvalue((extent + 1) // 2, dim, keepdim)

    return call


def _squeezed(x, dim=None):
    if dim is None:
        return pc.squeeze(x)
    dims = (dim,) if isinstance(dim, int) else dim
    return pc.squeeze(x, [each for each in dims if x.ndim and x.shape[each] == 1])


def _summed_to(x, *shape):
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    lead = x.ndim - len(shape)
    at = [axis for axis, extent in enumerate(shape) if extent == 1 != x.shape[axis + lead]]
    return x.sum([*range(lead), *(axis + lead for axis in at)]).reshape(shape)


def _renormed(x, p, dim, maxnorm):
    others = [axis for axis in range(x.ndim) if axis != dim % x.ndim]
    norms = pc.norm(x, p, others, True)
    return x * pc.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1.0)


def _combinations(x, r=2, with_replacement=False):
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(choose(range(x.shape[0]), r))
    if not rows:
        raise TypeError("unexpected argument 'r': there are none")
    return x[[list(row) for row in rows]]


def _triplet(*args, distance_function=None, **named):
    """PyTorch's own function of distance is what ours takes without one."""
    return F.triplet_margin_with_distance_loss(*args, **named)


def _with_dtype(function: Call) -> Call:
    def call(x, *args, dtype=None, **named):
        return function(x if dtype is None else pc.cast(x, dtype), *args, **named)

    return call


CALLS: dict[str, Call] = {
    "std": _variance(pc.std),
    "var": _variance(pc.var),
    "softmax": _with_dtype(pc.softmax),
    "log_softmax": _with_dtype(pc.log_softmax),
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
    **{
        name: lambda x, *args, name=name, **named: getattr(x, f"{name}_")(*args, **named)
        for name in ("uniform", "exponential", "cauchy", "geometric", "log_normal")
    },
    "normal/in_place": lambda x, mean=0.0, std=1.0: x.normal_(mean, std),
    "normal": _normal,
    "bernoulli": lambda x, p=None: (pc.rand_like(x) < x).to(x.dtype),
    "randint": _whole_numbers,
    "randint_like": lambda x, low, high=None, *, dtype=None, **_: pc.randint_like(
        x if dtype is None else x.to(dtype), *((0, low) if high is None else (low, high))
    ),
    "empty": _filled(0.0),
    "empty_like": _like(pc.empty_like),
    "scalar_tensor": lambda value, **named: _filled(value)((), **named),
    "tril_indices": _triangle(pc.tril_indices),
    "triu_indices": _triangle(pc.triu_indices),
    "logspace": _placed(pc.logspace),
    **{
        name: lambda x, *args, name=name, layout=None, **named: getattr(x, name)(*args, **named)
        for name in ("new_zeros", "new_ones", "new_full", "new_empty")
    },
    "zero_": pc.zeros_like,
    "randn": _placed(pc.randn),
    "__getitem__": lambda x, index: x[index],
    "slice": lambda x, dim=0, start=None, end=None, step=1: x[
        (*(slice(None),) * dim, slice(start, end, step))
    ],
    "to": lambda x, *args, non_blocking=False, copy=False, memory_format=None: x.to(
        *(each for each in args if not isinstance(each, bool)), copy=copy
    ),
    "unique": _unique,
    "median": _median(False),
    "nanmedian": _median(True),
    "histogram": lambda x, bins, *, range=None, weight=None, density=False: tuple(
        each.to(x.dtype) for each in pc.histogram(x, bins, range, weight, density)
    ),
    "bincount": lambda x, weights=None, minlength=0: pc.bincount(x, None, weights, minlength),
    "nonzero_static": lambda x, *, size, fill_value=-1: pc.argwhere(x, size, fill_value),
    "trapz": pc.trapezoid,
    "squeeze": _squeezed,
    "squeeze_copy": _squeezed,
    "repeat_interleave": lambda x, repeats, dim=None, output_size=None: pc.repeat_interleave(
        x, repeats, dim, output_size
    ),
    "H": pc.transpose,
    "mH": pc.matrix_transpose,
    "unsafe_chunk": pc.chunk,
    "sum_to_size": _summed_to,
    "renorm": _renormed,
    "combinations": _combinations,
    "mvlgamma": lambda x, p: (
        sum(pc.lgamma(x - 0.5 * i) for i in range(p)) + 0.25 * p * (p - 1) * math.log(math.pi)
    ),
    "tensor_split": pc.tensor_split,
    **{
        name: lambda x, dtype=dtype, **_: x.to(dtype)
        for name, dtype in (
            ("byte", "uint8"),
            ("char", "int8"),
            ("short", "int16"),
        )
    },
    "searchsorted": lambda edges, x, *, out_int32=False, right=False, side=None, sorter=None: (
        pc.searchsorted(edges, x, side, sorter, right=right).to("int32" if out_int32 else "int64")
    ),
    "bucketize": lambda x, edges, *, out_int32=False, right=False: pc.bucketize(x, edges, right).to(
        "int32" if out_int32 else "int64"
    ),
    "max/reduction_with_dim": _extreme_at(pc.max, pc.argmax),
    "min/reduction_with_dim": _extreme_at(pc.min, pc.argmin),
    "ne": pc.not_equal,
    "lt": pc.less,
    "le": pc.less_equal,
    "gt": pc.greater,
    "ge": pc.greater_equal,
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
    "clamp": pc.clip,
    "clamp_min": pc.maximum,
    "clamp_max": pc.minimum,
    "positive": lambda x: x,
    "contiguous": lambda x, **_: x,
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
    "std_mean": _both(_mean, _variance(pc.std)),
    "var_mean": _both(_mean, _variance(pc.var)),
    "dist": lambda x, y, p=2: _distance(x, y, p),
    "frac": lambda x: x - pc.trunc(x),
    "ldexp": lambda x, y: x * pc.exp2(y),
    "where": lambda x, condition, y: pc.where(condition, x, y),
    "einsum": lambda tensors, equation: pc.einsum(equation, *tensors),
    "mm": pc.matmul,
    "mv": lambda a, x: pc.einsum("ij,j->i", a, x),
    "vdot": pc.dot,
    "msort": lambda x: pc.sort(x, 0)[0],
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
    "diagonal": lambda x, offset=0, dim1=0, dim2=1: pc.diagonal(x, offset, dim1, dim2),
    "diagonal_copy": lambda x, offset=0, dim1=0, dim2=1: pc.diagonal(x, offset, dim1, dim2),
    "linalg.diagonal": lambda x, *, offset=0, dim1=-2, dim2=-1: pc.diagonal(x, offset, dim1, dim2),
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
    "scatter": lambda x, dim, index, src, reduce=None: pc.scatter(
        x, dim, index, src, reduce or "set"
    ),
    "take_along_dim": lambda x, index, dim=None: pc.take_along_axis(
        x if dim is not None else x.ravel(), index if dim is not None else index.ravel(), dim
    ),
    "special.modified_bessel_i0": pc.i0,
    "special.modified_bessel_i1": pc.i1,
    "constant_pad_nd": lambda x, pad, value=0.0: F.pad(x, pad, value=value),
    "norm": _norm,
    "nn.functional.embedding": lambda weight, ids, **named: F.embedding(ids, weight, **named),
    "nn.functional.embedding_bag": lambda weight, ids, *args, **named: F.embedding_bag(
        ids, weight, *args, **named
    ),
    "nn.functional.triplet_margin_with_distance_loss": _triplet,
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
        pc.linalg.matrix_rank(x, atol, rtol, hermitian)
        if tol is None
        else pc.linalg.matrix_rank(x, tol, 0.0, hermitian)
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
