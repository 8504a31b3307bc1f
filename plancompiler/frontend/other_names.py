"""Names of NumPy and PyTorch that this package does not have, and what is meant by them here.

Most answers are derived: a name that another namespace has, that a method has, or that differs in
an underscore. The tables here hold the rest: what is called otherwise, and kinds of things that do
not exist, with the reason.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from types import ModuleType

from plancompiler.errors import UnknownNameError
from plancompiler.frontend import functions, nn, optim
from plancompiler.frontend.functions import linalg
from plancompiler.frontend.methods import METHODS
from plancompiler.ir.operators import TensorOperators
from plancompiler.ir.source import user_line

_CALLED: Mapping[str, str] = {
    "abs_": "x.abs_()",
    "append": "pc.concat([x, y])",
    "array": "pc.tensor(array, placement, sbp)",
    **{
        name: f"pc.array_api.{name}"
        for name in (
            *("asarray", "can_cast", "cumulative_prod", "cumulative_sum", "expand_dims", "finfo"),
            *("iinfo", "isdtype", "permute_dims", "positive", "result_type", "unique_all"),
            *("unique_counts", "unique_inverse", "unique_values", "unstack"),
        )
    },
    "promote_types": "pc.array_api.result_type(x, y)",
    "alias": "x.detach()",
    "around": "pc.round(x)",
    "detach": "x.detach()",
    "dtype": "x.dtype",
    "shape": "x.shape",
    "index": "x[index]",
    "allclose": "pc.allclose(x, y)",
    "nonzero_static": "pc.argwhere(x, size)",
    "power": "pc.pow(x, y)",
    "segment_reduce": "pc.scatter_reduce(x, axis, indices, updates, mode)",
    "unsafe_chunk": "pc.chunk(x, chunks)",
    "unsafe_split": "pc.split(x, sizes)",
    "unsafe_split_with_sizes": "pc.split(x, sizes)",
    "zero": "x.zero_()",
    "data": "x.detach(), or x under `with pc.no_grad():`",
    "flat": "x.view(-1), or x.reshape(-1)",
    "solution": "what pc.linalg.lstsq(a, b) returns, which is the solution",
    "init": "init= of layers and of pc.nn.Parameter; p.value.uniform_(), normal_() and copy_() "
    "under `with pc.no_grad():` set what is there",
    "array_equiv": "pc.array_equal(x, y)",
    "array_split": "pc.tensor_split(x, parts, axis)",
    "as_tensor": "pc.tensor(array, placement, sbp)",
    "asanyarray": "pc.tensor(array, placement, sbp)",
    "asarray_chkfinite": "pc.tensor(array, placement, sbp)",
    "asmatrix": "pc.tensor(array, placement, sbp)",
    "ascontiguousarray": "pc.tensor(array, placement, sbp)",
    "average": "pc.sum(x * weights) / pc.sum(weights)",
    "bitwise_invert": "pc.bitwise_not(x)",
    "bmat": "pc.concat of pc.concat of rows",
    "block": "pc.concat of pc.concat of rows",
    "broadcast": "pc.broadcast_arrays(x, y)",
    "broadcast_shapes": "numpy.broadcast_shapes(*shapes)",
    "cbrt": "pc.sign(x) * pc.abs(x) ** (1 / 3)",
    "cdist": "pc.norm(x[:, None] - y, p, -1)",
    "chain_matmul": "pc.linalg.multi_dot([x, y, z])",
    "choose": "pc.where(condition, x, y)",
    "combinations": "x[pairs] with a list of pairs of places",
    "compress": "pc.masked_select(x, mask)",
    "concatenate": "pc.concat(tensors, axis)",
    "constant_pad_nd": "pc.pad(x, low, high, value)",
    "copyto": "x.copy_(y)",
    "correlate": "pc.conv1d(x, weight)",
    "convolve": "pc.conv1d(x, weight), with the weight turned around by pc.flip",
    "convolution": "pc.conv2d(x, weight)",
    "data_ptr": "x.to_local()",
    "degrees": "pc.rad2deg(x)",
    "delete": "pc.index_select(x, indices)",
    "diag_indices": "pc.diagonal(x)",
    "diag_indices_from": "pc.diagonal(x)",
    "digitize": "pc.bucketize(x, edges, right=True)",
    "dist": "pc.norm(x - y, p)",
    "divmod": "pc.floor_divide(x, y) and pc.remainder(x, y)",
    "ediff1d": "pc.diff(x.ravel())",
    "enable_grad": "x.requires_grad = True; ops are recorded outside of pc.no_grad()",
    "set_grad_enabled": "with pc.no_grad():",
    "inference_mode": "with pc.no_grad():",
    "extract": "pc.masked_select(x, mask)",
    "fabs": "pc.abs(x)",
    "fill": "pc.full_like(x, value)",
    "fill_diagonal": "pc.diagonal_scatter(x, piece)",
    "fill_diagonal_": "pc.diagonal_scatter(x, piece)",
    "fix": "pc.trunc(x)",
    "fix_": "x.trunc_()",
    "flatnonzero": "pc.nonzero(x.ravel())[0]",
    "float_power": 'pc.pow(x.to("float64"), y)',
    "float_power_": 'pc.pow(x.to("float64"), y)',
    "frac": "x - pc.trunc(x)",
    "frac_": "x.sub_(pc.trunc(x))",
    "frobenius_norm": "pc.norm(x)",
    "from_numpy": "pc.tensor(array, placement, sbp)",
    "geomspace": "pc.logspace(start, stop, count)",
    "ger": "pc.outer(x, y)",
    "get_device": "x.placement",
    "grad_fn": "x.requires_grad",
    "histogram2d": "pc.histogram(x) of each axis",
    "histogram_bin_edges": "pc.histogram(x, bins)[1]",
    "identity": "pc.eye(n, placement=placement)",
    "insert": "pc.concat([x[:at], new, x[at:]])",
    "interp": "pc.searchsorted(edges, x) and pc.lerp(low, high, share)",
    "intersect1d": "pc.masked_select(x, pc.isin(x, y))",
    "setdiff1d": "pc.masked_select(x, pc.isin(x, y, invert=True))",
    "union1d": "pc.unique(pc.concat([x, y]))",
    "setxor1d": "pc.isin(x, y, invert=True) of both",
    "invert": "pc.bitwise_not(x)",
    "is_nonzero": "bool(x)",
    "is_grad_enabled": "x.requires_grad of a result",
    "is_same_size": "x.shape == y.shape",
    "is_signed": "x.dtype.is_signed",
    "is_tensor": "isinstance(x, pc.DistTensor)",
    "isscalar": "x.ndim == 0",
    "ix_": "pc.meshgrid(*vectors)",
    "ldexp": "x * pc.exp2(y)",
    "ldexp_": "x.mul_(pc.exp2(y))",
    "left_shift": "pc.shift_left(x, y)",
    "right_shift": "pc.shift_right(x, y)",
    "load": "pc.eager.load(folder), or pc.tensor(numpy.load(file), placement)",
    "lu_unpack": "pc.linalg.lu(x)",
    "manual_seed_all": "pc.manual_seed(seed)",
    "matvec": "pc.matmul(x, y)",
    "vecmat": "pc.matmul(x, y)",
    "matrix": "pc.tensor(array, placement, sbp)",
    "mod": "pc.remainder(x, y)",
    "modf": "pc.trunc(x)",
    "msort": "pc.sort(x, 0)[0]",
    "nanargmax": "pc.argmax(pc.nan_to_num(x, low))",
    "nanargmin": "pc.argmin(pc.nan_to_num(x, high))",
    "nancumprod": "pc.cumprod(pc.where(pc.isnan(x), 1.0, x))",
    "nancumsum": "pc.cumsum(pc.where(pc.isnan(x), 0.0, x))",
    "nanpercentile": "pc.nanquantile(x, q / 100)",
    "nanprod": "pc.prod(pc.where(pc.isnan(x), 1.0, x))",
    "nanstd": "pc.nanmean of squares of x - pc.nanmean(x), and pc.sqrt",
    "nanvar": "pc.nanmean of squares of x - pc.nanmean(x)",
    "ndarray": "pc.DistTensor",
    "new": "x.new_zeros(shape)",
    "new_tensor": "pc.tensor(array, x.placement)",
    "norm_except_dim": "pc.norm(x, p, axes)",
    "nuclear_norm": 'pc.linalg.matrix_norm(x, "nuc")',
    "orgqr": "pc.linalg.householder_product(x, tau)",
    "partition": "pc.sort(x)[0]",
    "argpartition": "pc.argsort(x)",
    "percentile": "pc.quantile(x, q / 100)",
    "place": "pc.masked_scatter(x, mask, new)",
    "putmask": "pc.where(mask, y, x)",
    "ptp": "pc.max(x) - pc.min(x)",
    "radians": "pc.deg2rad(x)",
    "randperm": "pc.permutation(count, placement=placement)",
    "range": "pc.arange(start, stop, step, placement=placement)",
    "ravel_multi_index": "x.reshape((-1,)) and places in row-major order",
    "unravel_index": "pc.floor_divide and pc.remainder by the extents",
    "renorm": "pc.norm(x, p, axes, keepdims=True)",
    "retain_grad": "x.register_hook(function)",
    "rint": "pc.round(x)",
    "rollaxis": "pc.moveaxis(x, source, destination)",
    "row_stack": "pc.vstack(tensors)",
    "rsub": "pc.sub(y, x)",
    "save": "pc.eager.save(folder, state)",
    "savez": "pc.eager.save(folder, state)",
    "savez_compressed": "pc.eager.save(folder, state)",
    "scalar_tensor": "pc.tensor(number, placement)",
    "select_copy": "pc.clone(pc.select(x, axis, index))",
    "square_": "x.square_()",
    "sum_to_size": "pc.sum(x, axes, keepdims=True)",
    "svd_lowrank": "pc.linalg.svd(x)",
    "pca_lowrank": "pc.linalg.svd(x)",
    "swapdims": "pc.swapaxes(x, first, second)",
    "swapdims_": "pc.swapaxes(x, first, second)",
    "symeig": "pc.linalg.eigh(x)",
    "lobpcg": "pc.linalg.eigh(x)",
    "trapz": "pc.trapezoid(y, x)",
    "triangular_solve": "pc.linalg.solve_triangular(a, b)",
    "tri": "pc.tril(pc.ones(...))",
    "tril_indices_from": "pc.tril_indices(rows, columns, placement=placement)",
    "triu_indices_from": "pc.triu_indices(rows, columns, placement=placement)",
    "mask_indices": "pc.nonzero(mask)",
    "trim_zeros": "x[first:last]",
    "type": "x.dtype; x.to(dtype) converts",
    "unique_consecutive": "pc.unique(x)",
    "vander": "pc.linalg.vander(x)",
    "vdot": "pc.dot(x, y)",
    "seed": "pc.manual_seed(seed)",
    "initial_seed": "pc.default_generator()",
    "get_rng_state": "pc.default_generator(), whose state can be saved",
    "set_rng_state": "pc.manual_seed(seed), or a pc.Generator with a state",
    "Tensor": "pc.DistTensor",
    "device": 'pc.Placement("cpu", ranks)',
    "DataParallel": 'module.place(mesh) with inputs as "S(0)"',
    "CrossMapLRN2d": "pc.nn.functional.local_response_norm(x, size)",
    "NLLLoss2d": "pc.nll_loss(log_probabilities, labels)",
    "Container": "pc.nn.Module",
    "upsample_bilinear": 'pc.nn.functional.interpolate(x, mode="bilinear", align_corners=True)',
    "upsample_nearest": 'pc.nn.functional.interpolate(x, mode="nearest")',
    "multi_head_attention_forward": "pc.scaled_dot_product_attention(query, key, value)",
    "linear_cross_entropy": "pc.cross_entropy(pc.linear(x, weight), labels)",
    "LinearCrossEntropyLoss": "pc.cross_entropy(pc.linear(x, weight), labels)",
    "feature_dropout": "pc.nn.functional.dropout2d(x)",
    "feature_dropout_": "pc.nn.functional.dropout2d(x)",
    "affine_grid_generator": "pc.nn.functional.affine_grid(theta, size)",
    "set_printoptions": "numpy.set_printoptions and x.numpy()",
    "bitwise_count": "shifts and sums of bits",
    "autocast": "pc.Config(mixed_precision=...)",
    "require": "x.numpy()",
    "rot": "pc.rot90(x)",
    "product": "pc.prod(x)",
    "absolute_": "x.abs_()",
    "hspmm": "pc.matmul(x, y)",
}
"""What is called otherwise here, as one would type it."""

_ABSENT: Mapping[str, str] = {
    "complex numbers and Fourier transforms do not exist": "angle|conj.*|conjugate.*|imag|real.*"
    "|is_?(complex.*|conj|neg|real.*)|polar|complex.*|c(double|float|half|longdouble|single)|chalf"
    "|view_as_(real|complex).*|resolve_.*|sort_complex|.*fft.*|i?stft|eig|unwrap",
    "sparse tensors do not exist": r".*sparse.*|coalesce|c?(col|row)_indices.*|dense_dim|to_dense"
    "|h?s?(sp|sadd|s)mm|dsmm|saddmm|sspaddmm|indices.*|values.*|is_coalesced|to_padded_tensor",
    "quantised tensors do not exist": ".*quant.*|int_repr|qscheme|.*qparams.*|fused_moving_avg_.*",
    "a rank's part has no layout in memory that programs can see": "as_strided.*|stride|.*storage.*"
    "|const_data_ptr|set_|resize.*|is_set_to|(shares|may_share)_memory|byteswap|setflags|getfield"
    "|setfield|empty_(strided|permuted)|new_empty_strided|share_memory_|is_shared|pin_memory"
    "|is_pinned|dim_order|nditer|ndenumerate|ndindex|flatiter|nested_iters|asfortranarray|isfortran"
    "|as_subclass|record_stream|.*byte_bounds|slice_inverse|is_inference|module_load",
    "texts, dates and records do not exist": "bytes_|str_|character|datetime.*|timedelta64"
    "|bus_?day.*|is_busday|isnat|recarray|record|void|object_|chararray",
    "nothing in Python is called for each element: write it with functions of tensors, or as an op "
    "of your own with pc.op": "vectorize|frompyfunc|apply_.*|map2?_|piecewise|fromfunction|fromiter"
    "|iterable|ufunc|vmap|while_loop",
    "tensors are made of arrays, which NumPy reads and prints": "load.*|save.*|genfromtxt|from.*"
    "|.*printoptions|array2string|array_(repr|str)|.*_repr|format_float.*|dumps?|tofile|tobytes"
    "|memmap|info|get_include|show_.*|test|packbits|unpackbits|to_dlpack|to_mkldnn",
    'dtypes are named by texts: x.to("float32")': "(float|u?int)[0-9]*"
    "|u?(byte|short|int|long)(c|p)?|u?longlong|intc|intp|half|single|double|longdouble|float128|float96|bool_|generic|number"
    "|inexact|floating|flexible|integer|(un)?signedinteger|common_type|mintypecode|min_scalar_type"
    "|issubdtype|.*default_(dtype|tensor_type)",
    "the program has no such setting; a placement says where tensors lie, a pc.Config how jobs are "
    "compiled": ".*num_threads|.*interop_threads.*|.*autocast.*|.*_default_device|.*determinis.*"
    "|(get|set)_(device|file|float32|flush|warn|anomaly|num).*|is_(anomaly|warn|inference|grad).*"
    "|is_vulkan.*|(get|set)(err|bufsize).*|errstate|set_warn.*|compiled_with.*|.*bufsize|.*errcall"
    "|are_deterministic.*|is_distributed|prepare_multi.*|thread_safe_.*|memory_format|layout",
    "there are no windows of signals; NumPy makes them": "(bartlett|blackman|hamming|hann|hanning"
    "|kaiser)(_window)?",
    "there are no polynomials": "poly[a-z1]*|roots",
    "tensors have no compiler of this kind; pc.compile and pc.job are ours": "fork|wait|parse_.*"
    "|import_ir.*|merge_type.*|unify_type.*|read_vitals|set_vital|classproperty|jit.*|script.*",
    "kernels that PyTorch calls inside are not named here": "native_.*|batch_norm_.*"
    "|embedding_renorm_|grid_sampler.*|(lstm|gru|rnn_[a-z]+)(_cell)?|conv_tbc|.*_backward.*|.*_with_ind(ices|ex)"
    "|.*grouped_mm|scaled_mm|Lazy.*|Uninitialized.*|RNN.*Base|ScalingType|SwizzleType|Tensor"
    "|register_post.*|ipu|xpu|mtia|hpu|cuda_.*",
    "nothing here stands for it yet": "igammac?_?|polygamma_?|mvlgamma_?|binomial|poisson|pdist"
    "|hash_tensor|histogramdd|frexp|geqrf|ormqr|gradient|lexsort|spacing|einsum_path|reinforce"
    "|.*[mM]ax_?(un)?[pP]ool.*|.*MaxUnpool.*|AdaptiveLogSoftmax.*|rrelu|celu|threshold|DType",
}
"""Kinds of names, as patterns, that nothing here stands for, by the reason."""


_OF_PARAMETERS: Mapping[str, str] = {
    "data": "use p.value under `with pc.no_grad():`, or p.value.detach()",
    **dict.fromkeys(("requires_grad", "requires_grad_"), "use p.trainable, or module.freeze()"),
}
"""What is said of attributes of PyTorch's parameters that are not those of the tensor."""
_OF_MODULES: Mapping[str, str] = {
    **dict.fromkeys(
        ("to", "cuda", "cpu", "to_empty"), "use module.place(placement), with an SBP for each name"
    ),
    **dict.fromkeys(
        ("half", "float", "double", "bfloat16", "type"),
        "give dtype= to the layers; pc.Config(precision=...) says in which a job computes",
    ),
    **dict.fromkeys(
        ("buffers", "named_buffers"),
        "use named_parameters(): buffers are those that are a pc.nn.Buffer",
    ),
    **dict.fromkeys(("get_parameter", "get_buffer"), "use dict(module.named_parameters())[name]"),
    "register_buffer": "use self.name = pc.nn.Buffer(shape, init=array); self.name.value is the "
    "tensor",
    "register_parameter": "use self.name = pc.nn.Parameter(shape)",
    **dict.fromkeys(("add_module", "register_module"), "use setattr(module, name, child)"),
    "get_submodule": "use dict(module.named_modules())[name]",
    "requires_grad_": "use module.freeze(), or module.freeze(False)",
    "zero_grad": "use optimizer.zero_grad()",
    "compile": "use pc.compile(function)",
    **dict.fromkeys(
        ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
        "define forward in a class of your own; x.register_hook(function) sees gradients",
    ),
}
"""What to do about the methods of PyTorch's modules that ours do not have."""


def unknown_name(owner: str, name: str) -> UnknownNameError:
    """The error for a name that an owner does not have: `pc`, `pc.nn`, `x` for a tensor,
    `parameter`, or a module as `a Linear`.
    """
    what = {"pc": "plancompiler", "x": "a tensor", "parameter": "a parameter"}.get(owner, owner)
    if owner == "parameter":
        meant: str | None = _OF_PARAMETERS.get(name, f"use p.value.{name}: p.value is the tensor")
    elif owner.startswith("a "):
        return UnknownNameError(
            f"{what} has no {name!r}", source=user_line(), hint=_OF_MODULES.get(name)
        )
    else:
        meant = meaning(owner, name)
    return UnknownNameError(
        f"{what} has no {name!r}",
        source=user_line(),
        hint=meant if meant is not None else _like(owner, name),
    )


def meaning(owner: str, name: str) -> str | None:
    """What to do about a name that NumPy or PyTorch has; None for one that nobody knows."""
    stem = name.removesuffix("_copy").removesuffix("_")
    if owner != "x" and name == f"{stem}_" and hasattr(TensorOperators, stem):
        return f"use x.{name}()"
    for each in dict.fromkeys((name, stem)):
        if each in _CALLED:
            return f"use {_CALLED[each]}"
        at = _where(owner, each)
        if at is not None:
            return f"use {at}"
    for each in dict.fromkeys((name, stem)):
        for reason, pattern in _ABSENT.items():
            if re.fullmatch(pattern, each):
                return f"there is none: {reason}"
    return None


def _namespaces() -> Iterator[tuple[str, ModuleType]]:
    yield from (
        ("pc", functions),
        ("pc.nn", nn),
        ("pc.nn.functional", nn.functional),
        ("pc.linalg", linalg),
        ("pc.optim", optim),
    )


def _where(owner: str, name: str) -> str | None:
    """Which other namespace has a name."""
    method = METHODS.get(name)
    if owner != "x" and method is not None and name not in functions.__all__:
        named = getattr(method, "__name__", "")
        return f"pc.{named}(x)" if named in functions.__all__ else f"x.{name}(...)"
    for title, namespace in _namespaces():
        if title != owner and name in namespace.__all__:
            return f"{title}.{name}"
    if owner != "x" and hasattr(TensorOperators, name):
        return f"x.{name}"
    return None


def _like(owner: str, name: str) -> str:
    """Names that are spelled nearly so."""
    if owner == "x":
        known = [each for each in dir(TensorOperators) if not each.startswith("_")]
    else:
        known = [
            each
            for title, namespace in _namespaces()
            if title == owner
            for each in namespace.__all__
        ]
    near = difflib.get_close_matches(name, known, 3)
    if near:
        return "did you mean " + " or ".join(f"{owner}.{each}" for each in near)
    return "docs/compatibility.md says what there is of NumPy and PyTorch"
