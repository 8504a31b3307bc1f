"""Matrix products: batched matmul with transpose flags, and the contraction its gradients need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ir.shard import element_count
from plancompiler.ops.attributes import Bool
from plancompiler.ops.check import (
    NUMBERS,
    broadcast_shapes,
    expect_dtype,
    expect_ndim,
    expect_same_dtype,
)
from plancompiler.ops.gradient import reduce_to
from plancompiler.ops.kernel import Direct, in_float32, rows_of, with_direct
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    KernelContext,
    Tensors,
    Types,
    apply,
    define_op,
)


def _flags(attrs: AttrMap) -> tuple[bool, bool]:
    return attrs["transpose_a"], attrs["transpose_b"]


def _matmul_infer(inputs: Types, attrs: AttrMap) -> Types:
    a, b = inputs
    for tensor in inputs:
        expect_dtype("matmul", tensor, NUMBERS)
        expect_ndim("matmul", tensor, 2)
    dtype = expect_same_dtype("matmul", inputs)
    transpose_a, transpose_b = _flags(attrs)
    rows, inner = reversed(a.shape[-2:]) if transpose_a else a.shape[-2:]
    inner_b, columns = reversed(b.shape[-2:]) if transpose_b else b.shape[-2:]
    if inner != inner_b:
        flags = [name for name, on in (("a", transpose_a), ("b", transpose_b)) if on]
        raise ShapeError(
            "the inner extents of a matmul differ",
            got=f"{a.shape} @ {b.shape}"
            + (f" with {' and '.join(flags)} transposed" if flags else ""),
            expected=f"{inner} on both sides, for example",
        )
    batch = broadcast_shapes("matmul", [a.shape[:-2], b.shape[:-2]])
    return (TensorType((*batch, rows, columns), dtype),)


def _matmul_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    transpose_a, transpose_b = _flags(attrs)
    a = "k m" if transpose_a else "m k"
    b = "n k" if transpose_b else "k n"
    return f"... {a}, ... {b} -> ... m n"


def _matmul_direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
    if any(len(shape) != 2 for shape in context.input_shapes):
        return None
    # On matrices `dot` is the same product, without a generalised ufunc's overhead.
    match context.attrs["transpose_a"], context.attrs["transpose_b"]:
        case False, False:
            return lambda a, b: a.dot(b)
        case False, True:
            return lambda a, b: a.dot(b.T)
        case True, False:
            return lambda a, b: a.T.dot(b)
    return None


def matmul_operands(
    context: KernelContext, inputs: Arrays, outputs: Arrays
) -> tuple[Array, Array, Array]:
    """The operands of the op, and its output, as they are multiplied."""
    (a, b), (out,) = inputs, outputs
    if context.attrs["transpose_b"]:
        b = b.swapaxes(-1, -2)
    if context.attrs["transpose_a"]:
        a = a.swapaxes(-1, -2)
    elif a.ndim > 2 and b.ndim == 2 and a.flags.c_contiguous and out.flags.c_contiguous:
        # One product instead of one per batch entry.
        a, out = rows_of(a), rows_of(out)
    return a, b, out


@with_direct(_matmul_direct)
def _matmul_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    a, b, out = matmul_operands(context, inputs, outputs)
    np.matmul(a, b, out=out)


def _matmul_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    (a, b), (dc,) = inputs, grads
    transpose_a, transpose_b = _flags(attrs)
    if transpose_a:
        da = _product(b, dc, transpose_b, True)
    else:
        da = _product(dc, b, False, not transpose_b)
    if b.ndim == 2 and not transpose_a:
        # The weight of a linear layer: sum over all leading axes in one product.
        pair = (dc, a) if transpose_b else (a, dc)
        db = apply("contract_leading", *pair)
    elif transpose_b:
        db = _product(dc, a, True, transpose_a)
    else:
        db = _product(a, dc, not transpose_a, False)
    return reduce_to(da, a.shape), reduce_to(db, b.shape)


def _product(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> Any:
    """matmul, with the flags only where they are set."""
    flags: dict[str, bool] = {}
    if transpose_a:
        flags["transpose_a"] = True
    if transpose_b:
        flags["transpose_b"] = True
    return apply("matmul", a, b, **flags)


def _matmul_flops(inputs: Types, outputs: Types, attrs: AttrMap) -> int:
    inner = inputs[0].shape[-2 if attrs["transpose_a"] else -1]
    return 2 * inner * element_count(outputs[0].shape)


define_op(
    "matmul",
    infer=_matmul_infer,
    rule=_matmul_rule,
    inputs=2,
    attrs=(
        Bool("transpose_a", False),
        Bool("transpose_b", False),
    ),
    kernel=in_float32(_matmul_kernel),
    gradient=_matmul_gradient,
    linear=((0,), (1,)),
    flops=_matmul_flops,
    precision="low",
    doc="The matrix product over the last two axes, each side transposed first where its flag "
    "is set; leading axes broadcast.",
)


def _contract_direct(context: KernelContext, dtypes: Sequence[np.dtype[Any]]) -> Direct | None:
    if any(len(shape) != 2 for shape in context.input_shapes):
        return None
    return lambda a, b: a.T.dot(b)


@with_direct(_contract_direct)
def _contract_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    a, b = inputs
    rows = element_count(a.shape[:-1])
    np.matmul(a.reshape(rows, a.shape[-1]).T, b.reshape(rows, b.shape[-1]), out=outputs[0])


def _contract_gradient(
    attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors
) -> Tensors:
    (a, b), (dc,) = inputs, grads
    return apply("matmul", b, dc, transpose_b=True), apply("matmul", a, dc)


define_op(
    "contract_leading",
    infer="a N ... r i, b N ... r j -> c N i j",
    rule="... i, ... j -> i j",
    kernel=in_float32(_contract_kernel),
    gradient=_contract_gradient,
    linear=((0,), (1,)),
    flops=lambda inputs, outputs, attrs: 2 * element_count(inputs[0].shape) * inputs[1].shape[-1],
    precision="low",
    doc="The sum over all leading axes of a[..., i] * b[..., j]: the gradient of the weight of "
    "a linear layer, whatever batch axes are split.",
)
