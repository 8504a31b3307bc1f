"""Small functions of JAX, each with example arguments: what people write, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
from jax import lax

_RANDOM = np.random.default_rng(7)


def _normal(*shape: int) -> np.ndarray:
    return _RANDOM.normal(size=shape).astype(np.float32)


V = _normal(6)
X = _normal(4, 6)
Y = _normal(4, 6)
W = _normal(6, 5)
C = _normal(2, 3, 4)
POSITIVE = np.abs(X) + 0.5
SQUARE = X[:, :4]
UNIT = np.tanh(X) * 0.9
IDS = np.array([2, 0, 3, 2], np.int32)
COLUMNS = np.array([5, 0, 1], np.int32)
EACH = np.array([[1], [0], [5], [2]], np.int32)
N = np.array([[7, -3, 2, 0], [5, -9, 4, 6]], np.int32)
M = np.array([[2, 2, -5, 3], [-3, 4, 7, -1]], np.int32)
BITS = np.array([1, 7, 255, 4096], np.uint32)
T = np.array([[True, False, True], [False, False, True]])
IMAGE = _normal(2, 6, 5, 3)
KERNEL = _normal(3, 2, 3, 4)
ONE = np.int32(2)

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _unary(names: str, of: np.ndarray = X, module: Any = jnp) -> dict[str, Case]:
    kind = module.__name__.rpartition(".")[2]
    return {f"{kind}.{name}": (getattr(module, name), (of,)) for name in names.split()}


Q, K = _normal(2, 5, 4, 3), _normal(2, 5, 2, 3)
"""Queries of four heads, and keys of two."""


def _by_hand(q, k, v, bias=None, scale=0.6):
    """Of [b, h, t, d], as most programs write it."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * scale
    scores = scores if bias is None else scores + bias
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v)


_CAUSAL = np.where(np.tri(4, dtype=bool), 0, np.finfo(np.float32).min).astype(np.float32)
ATTENTION: dict[str, Case] = {
    "causal": (lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True), (Q,)),
    "grouped": (
        lambda q, k: jax.nn.dot_product_attention(q, k, jnp.sin(k), is_causal=True),
        (Q, K),
    ),
    "grouped and windowed": (
        lambda q, k: jax.nn.dot_product_attention(
            q, k, k, is_causal=True, local_window_size=(2, 0), scale=0.3
        ),
        (Q, K),
    ),
    "of copied heads": (
        lambda q, k: jax.nn.dot_product_attention(
            q, jnp.repeat(k, 2, 2), jnp.repeat(jnp.cos(k), 2, 2)
        ),
        (Q, K),
    ),
    "of some new positions": (
        lambda q, k: jax.nn.dot_product_attention(
            q, k, k, mask=jnp.arange(2)[:, None] + 3 >= jnp.arange(5)
        ),
        (Q[:, :2, :2], K),
    ),
    "by hand": (lambda q, k: _by_hand(q, k, q, _CAUSAL), (Q, Q * 0.5)),
    "by hand with a bias": (
        lambda q, k: _by_hand(q, k, q, -np.arange(4.0, dtype=np.float32) * 0.1),
        (X[None, None], X[None, None]),
    ),
    "of wide values": (lambda q, v: _by_hand(q / 2, q, v), (Q, _normal(2, 5, 4, 6))),
    "turned": (
        lambda q, k: jnp.einsum(
            "kbqh,bkhd->dqbh", jax.nn.softmax(jnp.einsum("qbhd,bkhd->kbqh", q, k), 0), k
        ),
        (Q[:2].transpose(1, 0, 2, 3), Q),
    ),
}
"""Attention that becomes one operation."""

FUNCTIONS: dict[str, Case] = {
    # --- elementwise ---
    **_unary("abs ceil cos cosh exp exp2 expm1 floor negative rint round sign sin sinh square"),
    **_unary(
        "tan tanh arctan arcsinh isfinite isnan isinf positive signbit sinc deg2rad cbrt trunc"
    ),
    **_unary("log log10 log1p log2 sqrt reciprocal", of=POSITIVE),
    **_unary("arccos arcsin arctanh", of=UNIT),
    **_unary("arccosh", of=POSITIVE + 1),
    **_unary(
        "relu relu6 sigmoid silu softplus elu selu celu gelu leaky_relu hard_tanh",
        module=jax.nn,
    ),
    **_unary("log_sigmoid soft_sign hard_sigmoid hard_silu squareplus mish", module=jax.nn),
    **_unary("softmax log_softmax logsumexp standardize glu", module=jax.nn),
    **_unary("erf erfc", module=lax),
    **_unary("rsqrt lgamma digamma", of=POSITIVE, module=lax),
    **_unary("erf_inv", of=UNIT, module=lax),
    **_unary("logistic is_finite", module=lax),
    "gelu exact": (lambda x: jax.nn.gelu(x, approximate=False), (X,)),
    "add": (jnp.add, (X, Y)),
    "subtract a row": (jnp.subtract, (X, V)),
    "multiply a column": (lambda x, y: x * y[:, :1], (X, Y)),
    "divide": (jnp.divide, (X, POSITIVE)),
    "power": (jnp.power, (POSITIVE, X)),
    "integer power": (lambda x: x**3, (X,)),
    "float power": (lambda x: x**2.5, (POSITIVE,)),
    "maximum": (jnp.maximum, (X, Y)),
    "maximum of a number": (lambda x: jnp.maximum(x, 0.3), (X,)),
    "minimum": (jnp.minimum, (X, Y)),
    "arctan2": (jnp.arctan2, (X, Y)),
    "hypot": (jnp.hypot, (X, Y)),
    "logaddexp": (jnp.logaddexp, (X, Y)),
    "remainder": (jnp.remainder, (X, POSITIVE)),
    "fmod": (jnp.fmod, (X, POSITIVE)),
    "floor_divide": (jnp.floor_divide, (X, POSITIVE)),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.5), (X,)),
    "clip by tensors": (jnp.clip, (X, -POSITIVE, POSITIVE)),
    "where": (lambda x, y: jnp.where(x > y, x, y * 2), (X, Y)),
    "where numbers": (lambda x: jnp.where(x > 0, 1.0, -1.0), (X,)),
    "nan_to_num": (lambda x: jnp.nan_to_num(1 / x), (X,)),
    "heaviside": (jnp.heaviside, (X, Y)),
    "copysign": (jnp.copysign, (X, Y)),
    "compare": (lambda x, y: (x < y) & (x != y) | ~(x >= 0), (X, Y)),
    "xor": (jnp.logical_xor, (T, ~T)),
    "float16": (lambda x: (x.astype(jnp.float16) * 2).astype(jnp.float32), (X,)),
    "bfloat16": (lambda x: (x.astype(jnp.bfloat16) * 2 + 1).astype(jnp.float32), (X,)),
    "to whole numbers": (lambda x: (x * 3).astype(jnp.int32), (X,)),
    "to whole numbers out of range": (
        lambda x: ((x * 1e12).astype(jnp.int32), (x / 0).astype(jnp.uint8), x.astype(jnp.int8)),
        (X,),
    ),
    "whole relu": (jax.nn.relu, (N,)),
    "rows of whole numbers": (lambda x, i: x[:, i], (N, COLUMNS % 3)),
    "sort truth values": (lambda x: (jnp.sort(x, 1), lax.top_k(x, 2)), (T,)),
    "whole max pool": (
        lambda x: lax.reduce_window(x, jnp.int32(-(2**31)), lax.max, (1, 2), (1, 2), "VALID"),
        (N,),
    ),
    "indices outside": (lambda x: x.at[:, jnp.array([-1, -9, 9])].set(5), (N,)),
    "not a number": (lambda x: (jnp.sort(1 / (x - x[0]), 1), jnp.argmax(x / 0 * 0, 1)), (N,)),
    "to truth values": (lambda x: x.astype(bool), (N,)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), (X,)),
    "lerp": (lambda x, y: x + 0.25 * (y - x), (X, Y)),
    "stop_gradient": (lambda x: lax.stop_gradient(x) * x, (X,)),
    "round to 2 places": (lambda x: jnp.round(x, 2), (X,)),
    # --- whole numbers ---
    "whole add": (lambda x, y: x * y - x + 3, (N, M)),
    "whole divide": (lax.div, (N, M)),
    "whole floor divide": (jnp.floor_divide, (N, M)),
    "whole remainder": (jnp.remainder, (N, M)),
    "whole rem": (lax.rem, (N, M)),
    "whole true divide": (jnp.true_divide, (N, M)),
    "whole power": (lambda x: x**2, (N,)),
    "whole bits": (lambda x, y: (x & y) | (x ^ 3), (N, M)),
    "invert": (jnp.invert, (N,)),
    "shift left": (lambda x: x << 3, (BITS,)),
    "shift right": (lambda x: x >> 1, (BITS,)),
    "shift right of signed": (lambda x: x >> 1, (N,)),
    "logical shift of signed": (lambda x: lax.shift_right_logical(x, jnp.int32(1)), (N,)),
    "whole clip": (lambda x: jnp.clip(x, -2, 4), (N,)),
    "whole sign": (jnp.sign, (N,)),
    "whole abs": (jnp.abs, (N,)),
    "unsigned overflow": (lambda x: x * jnp.uint32(4000000000), (BITS,)),
    "popcount": (lax.population_count, (BITS,)),
    "gcd": (jnp.gcd, (N, M)),
    # --- shapes ---
    "reshape": (lambda x: x.reshape(3, 8), (X,)),
    "ravel": (jnp.ravel, (C,)),
    "transpose": (lambda x: x.transpose(2, 0, 1), (C,)),
    "swapaxes": (lambda x: jnp.swapaxes(x, 0, 2), (C,)),
    "moveaxis": (lambda x: jnp.moveaxis(x, 0, -1), (C,)),
    "expand_dims": (lambda x: jnp.expand_dims(x, 1), (X,)),
    "squeeze": (lambda x: x[None, :, None].squeeze(), (X,)),
    "broadcast_to": (lambda x: jnp.broadcast_to(x, (3, 6)), (V,)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y, x], 1), (X, Y)),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (X, Y)),
    "split": (lambda x: jnp.split(x, 3, 1), (X,)),
    "tile": (lambda x: jnp.tile(x, (2, 3)), (X,)),
    "repeat": (lambda x: jnp.repeat(x, 3, axis=1), (X,)),
    "flip": (lambda x: jnp.flip(x, (0, 1)), (X,)),
    "roll": (lambda x: jnp.roll(x, 2, axis=1), (X,)),
    "rot90": (jnp.rot90, (X,)),
    "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 3)), constant_values=1.5), (X,)),
    "pad edge": (lambda x: jnp.pad(x, 1, mode="edge"), (X,)),
    "pad reflect": (lambda x: jnp.pad(x, 2, mode="reflect"), (X,)),
    "pad negative": (lambda x: lax.pad(x, 0.0, ((-1, 2, 0), (1, -2, 1))), (X,)),
    "tril": (jnp.tril, (X,)),
    "triu": (lambda x: jnp.triu(x, 1), (X,)),
    "diag": (jnp.diag, (V,)),
    "diagonal": (jnp.diagonal, (X,)),
    "trace": (jnp.trace, (X,)),
    "slice": (lambda x: x[1:3, ::2], (X,)),
    "slice backwards": (lambda x: x[::-1, 4:0:-2], (X,)),
    "meshgrid": (jnp.meshgrid, (V, V)),
    "arange": (lambda x: x + jnp.arange(6.0), (X,)),
    "linspace": (lambda x: x * jnp.linspace(0, 1, 6), (X,)),
    "eye": (lambda x: x @ jnp.eye(6, 3), (X,)),
    "outer": (jnp.outer, (V, V)),
    "kron": (jnp.kron, (X[:2, :2], Y[:2, :3])),
    # --- reductions ---
    "sum": (jnp.sum, (X,)),
    "sum of an axis": (lambda x: x.sum(1, keepdims=True), (C,)),
    "whole sum": (lambda x: x.sum(0), (N,)),
    "count": (lambda x: (x > 0).sum(1), (X,)),
    "mean": (lambda x: x.mean((0, 2)), (C,)),
    "var": (lambda x: x.var(1), (X,)),
    "std": (lambda x: x.std(0, ddof=1), (X,)),
    "max": (lambda x: x.max(1), (X,)),
    "min": (lambda x: x.min(), (X,)),
    "max with a beginning": (lambda x: jnp.max(x, axis=1, initial=0.5), (X,)),
    "prod": (lambda x: x.prod(1), (X,)),
    "any": (lambda x: x.any(1), (T,)),
    "all": (lambda x: x.all(0), (T,)),
    "argmax": (lambda x: x.argmax(1), (X,)),
    "argmin": (lambda x: x.argmin(0), (X,)),
    "argmax of all": (jnp.argmax, (X,)),
    "whole argmax": (lambda x: x.argmax(1), (N,)),
    "norm": (lambda x: jnp.linalg.norm(x, axis=1), (X,)),
    "ptp": (lambda x: jnp.ptp(x, 1), (X,)),
    "median": (lambda x: jnp.median(x, 1), (X,)),
    "quantile": (lambda x: jnp.quantile(x, 0.3, axis=1), (X,)),
    "average": (lambda x, y: jnp.average(x, weights=y), (X, POSITIVE)),
    "count_nonzero": (lambda x: jnp.count_nonzero(x, axis=1), (N,)),
    "nansum": (lambda x: jnp.nansum(jnp.log(x)), (X,)),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (X,)),
    "cumsum backwards": (lambda x: lax.cumsum(x, 0, reverse=True), (X,)),
    "cumprod": (lambda x: jnp.cumprod(x, 1), (X,)),
    "cummax": (lambda x: lax.cummax(x, 1), (X,)),
    "cummin": (lambda x: lax.cummin(x, 0), (X,)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), (X,)),
    "diff": (lambda x: jnp.diff(x, axis=1), (X,)),
    "logsumexp of an axis": (lambda x: jax.scipy.special.logsumexp(x, axis=0), (X,)),
    # --- sorting ---
    "sort": (lambda x: jnp.sort(x, 1), (X,)),
    "sort descending": (lambda x: jnp.sort(x, 0, descending=True), (X,)),
    "argsort": (lambda x: jnp.argsort(x, 1), (X,)),
    "whole argsort descending": (lambda x: jnp.argsort(x, 1, descending=True), (N,)),
    "sort pairs": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (X, Y)),
    "sort by two keys": (
        lambda x, y: lax.sort((x, y, y + 1), dimension=1, num_keys=2),
        (N // 4, M),
    ),
    "top_k": (lambda x: lax.top_k(x, 3), (X,)),
    "searchsorted": (lambda x, y: jnp.searchsorted(jnp.sort(x), y), (V, X)),
    "one_hot": (lambda x: jax.nn.one_hot(x, 5), (IDS,)),
    # --- products ---
    "matmul": (jnp.matmul, (X, W)),
    "matmul of a vector": (lambda x, v: x @ v, (X, V)),
    "dot": (jnp.dot, (V, V)),
    "batched matmul": (lambda x: jnp.matmul(x, x.transpose(0, 2, 1)), (C,)),
    "einsum": (lambda x, y: jnp.einsum("bij,jk->kbi", x, y), (C, W[:4])),
    "einsum of heads": (lambda x, y: jnp.einsum("bqd,bkd->bqk", x, y), (C, C * 2)),
    "tensordot": (lambda x, y: jnp.tensordot(x, y, ((1, 2), (0, 1))), (C, C[0])),
    "vdot": (jnp.vdot, (X, Y)),
    "inner": (jnp.inner, (X, Y)),
    "whole matmul": (jnp.matmul, (N, M.T)),
    "bfloat16 matmul": (
        lambda x, y: jnp.dot(
            x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        ),
        (X, W),
    ),
    "vmapped": (jax.vmap(lambda x, w: x @ w, (0, None)), (X, W)),
    # --- indices ---
    "take": (lambda x, i: jnp.take(x, i, axis=0), (X, IDS)),
    "take of columns": (lambda x, i: jnp.take(x, i, axis=1), (X, COLUMNS)),
    "index": (lambda x, i: x[i], (X, IDS)),
    "index from the end": (lambda x, i: x[-1 - i], (X, IDS)),
    "index outside": (lambda x, i: x[i + 2], (X, IDS)),
    "take outside": (lambda x, i: jnp.take(x, i + 2, axis=0), (X, IDS)),
    "index of columns": (lambda x, i: x[:, i], (X, COLUMNS)),
    "index of both": (lambda x, i, j: x[i, j], (X, IDS, EACH[:, 0])),
    "index of a middle axis": (lambda x, i: x[:, i], (C, np.array([2, 0], np.int32))),
    "index grid": (lambda x, i, j: x[i[:, None], j], (X, IDS, COLUMNS)),
    "index by a number": (lambda x, i: x[i], (X, ONE)),
    "index of a column by a number": (lambda x, i: x[:, i], (X, ONE)),
    "index apart": (lambda x, i: x[i, :, i], (C, np.array([1, 0, 1], np.int32))),
    "constant indices": (lambda x: x[jnp.array([3, 1]), 2:4], (X,)),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, 1), (X, EACH)),
    "take_along_axis of rows": (lambda x, i: jnp.take_along_axis(x, i, 0), (X, EACH % 4)),
    "embedding": (lambda x, i: x[i], (X, EACH.reshape(2, 2) % 4)),
    "set rows": (lambda x, i: x.at[i].set(1.5), (X, IDS[:3])),
    "add rows": (lambda x, i, y: x.at[i].add(y), (X, IDS, Y)),
    "add outside": (lambda x, i, y: x.at[i + 2].add(y), (X, IDS, Y)),
    "set elements": (lambda x, i, j: x.at[i, j].set(0.0), (X, IDS[:3], COLUMNS)),
    "add elements": (lambda x, i, j: x.at[i, j].add(2.0), (X, IDS[:3], COLUMNS)),
    "set columns": (lambda x, i, y: x.at[:, i].set(y[:, :3]), (X, COLUMNS, Y)),
    "multiply rows": (lambda x, i: x.at[i].multiply(2.0), (X, IDS)),
    "max rows": (lambda x, i, y: x.at[i].max(y), (X, IDS, Y)),
    "set a slice": (lambda x: x.at[1:3, 2].set(7.0), (X,)),
    "set a row by a number": (lambda x, i, y: x.at[i].set(y), (X, ONE, V)),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 5), (X, IDS)),
    "bincount": (lambda i: jnp.bincount(i, length=5), (IDS,)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 1), (2, 3)), (X, ONE)),
    "dynamic_slice at the end": (lambda x, i: lax.dynamic_slice(x, (i + 3, i), (2, 3)), (X, ONE)),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y[:2, :3], (i, i)),
        (X, Y, ONE),
    ),
    "dynamic_update constant": (
        lambda x, y: lax.dynamic_update_slice(x, y[:2, :3], (1, 2)),
        (X, Y),
    ),
    "vmapped dynamic_slice": (
        jax.vmap(lambda r, j: lax.dynamic_slice(r, (j,), (2,))),
        (X, IDS),
    ),
    "vmapped update": (jax.vmap(lambda r, j: r.at[j].set(9.0)), (X, IDS)),
    "nonzero": (lambda x: jnp.nonzero(x, size=5), (N,)),
    "unique": (lambda x: jnp.unique(x, size=8), (N,)),
    # --- windows ---
    "conv": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (IMAGE, KERNEL),
    ),
    "conv strided": (
        lambda x, w: lax.conv_general_dilated(
            x,
            w,
            (2, 1),
            ((1, 2), (0, 1)),
            rhs_dilation=(1, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
        (IMAGE, KERNEL),
    ),
    "conv depthwise": (
        lambda x, w: lax.conv_general_dilated(
            x,
            w.reshape(3, 2, 1, 12),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        ),
        (IMAGE, KERNEL),
    ),
    "conv_transpose": (
        lambda x, w: lax.conv_transpose(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (IMAGE, KERNEL),
    ),
    "conv 1-D": (lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME"), (C, _normal(5, 3, 3))),
    "convolve": (lambda x, y: jnp.convolve(x, y, mode="same"), (V, V[:3])),
    "max pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
        (IMAGE,),
    ),
    "sum pool": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 2, 1), (1, 1, 2, 1), "VALID"),
        (IMAGE,),
    ),
    "min pool": (
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 1, 1, 1), "VALID"),
        (IMAGE,),
    ),
    # --- gradients inside ---
    "grad of tanh": (jax.grad(lambda x: jnp.tanh(x).sum()), (X,)),
    "grad of softmax": (jax.grad(lambda x: (jax.nn.softmax(x)[:, 0] ** 2).sum()), (X,)),
    "grad of conv": (
        jax.grad(
            lambda x, w: (
                lax.conv_general_dilated(
                    x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                ** 2
            ).sum(),
            (0, 1),
        ),
        (IMAGE, KERNEL),
    ),
    "grad of depthwise": (
        jax.grad(
            lambda x, w: (
                lax.conv_general_dilated(
                    x,
                    w.reshape(3, 2, 1, 12),
                    (1, 1),
                    "VALID",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                    feature_group_count=3,
                )
                ** 2
            ).sum(),
            (0, 1),
        ),
        (IMAGE, KERNEL),
    ),
    "grad of max pool": (
        jax.grad(
            lambda x: (
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") ** 2
            ).sum()
        ),
        (IMAGE,),
    ),
    "grad of embedding": (jax.grad(lambda x, i: (x[i] ** 2).sum()), (X, IDS)),
    "grad of sort": (jax.grad(lambda x: (jnp.sort(x, 1)[:, :2] ** 2).sum()), (X,)),
    "grad of cumsum": (jax.grad(lambda x: (jnp.cumsum(x, 1) ** 2).sum()), (X,)),
    "hessian": (jax.hessian(lambda x: (x**3).sum()), (V,)),
    "jvp": (lambda x, y: jax.jvp(jnp.sin, (x,), (y,)), (X, Y)),
    "linearize": (jax.checkpoint(lambda z: jnp.sin(jnp.sin(z))), (X,)),
    # --- control flow ---
    "scan": (lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c), jnp.zeros(6), x), (X,)),
    "fori_loop": (lambda x: lax.fori_loop(0, 4, lambda i, c: jnp.sin(c) + i, x), (X,)),
    "map": (lambda x: lax.map(lambda r: r.sum() * r, x), (X,)),
    "associative_scan": (lambda x: lax.associative_scan(jnp.add, x, axis=1), (X,)),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1],
        (X,),
    ),
    "while on data": (lambda x: lax.while_loop(lambda c: c.sum() < 30, lambda c: c + 1, x), (X,)),
    "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), (X,)),
    "switch known": (lambda x: lax.switch(1, [jnp.sin, jnp.cos], x), (X,)),
    "select": (lambda x, y: lax.select(x > 0, x, y), (X, Y)),
    "grad of scan": (
        jax.grad(lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), c), jnp.zeros(6), x)[0].sum()),
        (X,),
    ),
    # --- random numbers ---
    "uniform": (lambda x: x + jax.random.uniform(jax.random.key(3), (4, 6)), (X,)),
    "normal": (lambda x: x * jax.random.normal(jax.random.key(3), (6,)), (X,)),
    "permutation": (lambda x: x[jax.random.permutation(jax.random.key(1), 4)], (X,)),
    "uniform of a key": (
        lambda k: jax.random.uniform(jax.random.wrap_key_data(k), (5,)),
        (np.array([1, 2], np.uint32),),
    ),
    "bernoulli of a key": (
        lambda k: jax.random.bernoulli(
            jax.random.fold_in(jax.random.wrap_key_data(k), 3), 0.5, (9,)
        ),
        (np.array([1, 2], np.uint32),),
    ),
    "randint of a key": (
        lambda k: jax.random.randint(jax.random.wrap_key_data(k), (5,), 0, 9),
        (np.array([1, 2], np.uint32),),
    ),
    # --- linear algebra, others ---
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.T + 4 * jnp.eye(4)), (X,)),
    "solve_triangular": (
        lambda x: jax.scipy.linalg.solve_triangular(
            jnp.tril(x) + 3 * jnp.eye(4), x[:, :2], lower=True
        ),
        (X[:, :4],),
    ),
    "solve_triangular from the right": (
        lambda x, y: lax.linalg.triangular_solve(
            jnp.triu(x) + 3 * jnp.eye(4), y, transpose_a=True, unit_diagonal=True
        ),
        (SQUARE, X[:3, :4]),
    ),
    "solve": (lambda x, y: jnp.linalg.solve(x + 3 * jnp.eye(4), y), (SQUARE, X[:4])),
    "solve a vector": (lambda x, y: jnp.linalg.solve(x, y[0]), (SQUARE, X[:, :4])),
    "solve batches": (lambda x: jnp.linalg.solve(x + 4 * jnp.eye(3), x), (_normal(2, 3, 3),)),
    "cho_solve": (
        lambda x, y: jax.scipy.linalg.cho_solve(
            jax.scipy.linalg.cho_factor(x @ x.T + jnp.eye(4)), y
        ),
        (SQUARE, X[:4]),
    ),
    "inv": (lambda x: jnp.linalg.inv(x + 3 * jnp.eye(4)), (SQUARE,)),
    "slogdet": (lambda x: tuple(jnp.linalg.slogdet(x)), (SQUARE,)),
    "qr": (lambda x: tuple(jnp.linalg.qr(x)), (_normal(5, 3),)),
    "complete qr": (lambda x: jnp.linalg.qr(x, "complete")[1], (_normal(3, 3),)),
    "eigh": (lambda x: (jnp.linalg.eigh(x + x.T)[0], abs(jnp.linalg.eigh(x + x.T)[1])), (SQUARE,)),
    "whole svd": (lambda x: [abs(each) for each in jnp.linalg.svd(x, False)], (_normal(4, 3),)),
    "eigh of the upper triangle": (
        lambda x: [
            abs(each) for each in lax.linalg.eigh(x + x.T, lower=False, symmetrize_input=False)
        ],
        (SQUARE,),
    ),
    "svd with all vectors": (
        lambda x: [abs(each) for each in jnp.linalg.svd(x, True)][:2],
        (_normal(4, 3),),
    ),
    "svd with all vectors on the right": (
        lambda x: [abs(each) for each in jnp.linalg.svd(x, True)][1:],
        (_normal(3, 4),),
    ),
    "pinv": (jnp.linalg.pinv, (_normal(4, 3),)),
    "lstsq": (lambda x, y: jnp.linalg.lstsq(x, y)[0], (_normal(5, 3), _normal(5, 2))),
    "lu": (jax.scipy.linalg.lu, (SQUARE,)),
    "lu of rows": (lambda x: lax.linalg.lu(x)[::2], (_normal(2, 4, 3),)),
    "matrix_power": (lambda x: jnp.linalg.matrix_power(x, -2), (SQUARE,)),
    "multivariate normal": (
        lambda x, m: jax.scipy.stats.multivariate_normal.logpdf(x, m, jnp.eye(4) + 0.1),
        (SQUARE, V[:4]),
    ),
    "solved by hand": (
        lambda x, b: lax.custom_linear_solve(
            lambda y: x * y, b, lambda f, c: c / x, symmetric=True
        ),
        (POSITIVE, X),
    ),
    "eigenvalues": (lambda x: abs(jnp.linalg.eigvals(x)), (SQUARE,)),
    "fft": (lambda x: jnp.fft.fft(x).real, (V,)),
    "complex": (lambda x: jnp.abs(x + 1j * x), (V,)),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), (X,)),
    "det": (jnp.linalg.det, (X[:, :4],)),
    "polyval": (lambda x: jnp.polyval(jnp.array([1.0, 2.0, 3.0]), x), (X,)),
    "interp": (
        lambda x: jnp.interp(x, jnp.array([-1.0, 0.0, 1.0]), jnp.array([2.0, 3.0, 5.0])),
        (X,),
    ),
    "layer norm": (
        lambda x, g: (
            (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g
        ),
        (X, V),
    ),
    "attention": (
        lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True),
        (_normal(2, 4, 2, 3),),
    ),
    **{f"attention {name}": case for name, case in ATTENTION.items()},
    "attention that returns its weights": (
        lambda q: [w := jax.nn.softmax(q @ q.transpose(0, 1, 3, 2)), w @ q],
        (_normal(2, 2, 4, 3),),
    ),
    "attention with a row that sees nothing": (
        lambda q: jax.nn.dot_product_attention(
            q, q, q, mask=jnp.arange(4)[:, None] > jnp.arange(4)
        ),
        (_normal(2, 4, 2, 3),),
    ),
    "resize": (lambda x: jax.image.resize(x, (2, 12, 10, 3), "nearest"), (IMAGE,)),
    "resize linear": (lambda x: jax.image.resize(x, (2, 9, 7, 3), "linear"), (IMAGE,)),
}

REFUSED = {
    "eigenvalues": "complex",
    "numpy.signbit": "bits",
    "copysign": "bits",
    "popcount": "stablehlo.popcnt",
    "gcd": "how often a loop turns",
    "while on data": "how often a loop turns",
    "cond": "which branch is taken",
    "cumlogsumexp": "a function of its own",
    "multiply rows": "set or add",
    "max rows": "set or add",
    "fft": "complex",
    "complex": "complex",
}
"""Those that cannot be imported, and a part of what the error says."""
UNLIKE = {
    "bfloat16": 1e-2,  # XLA rounds once, at the end
    "index outside": 2e-5,  # JAX clamps the index and drops the gradient
}
"""Those whose results differ by rounding, or whose gradients differ, and their tolerance."""
