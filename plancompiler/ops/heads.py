"""From the product of a token with the weights of queries, keys and values to heads, and back.

The product [b, t, g, p, d] has for each of g groups the p - 2 heads of queries that share a head of
keys, then that head of keys, then its head of values. So it splits over devices between groups, as
attention does, and one product with one weight makes all three.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plancompiler.errors import ShapeError
from plancompiler.ir.op import TensorType
from plancompiler.ops.groups import group_split
from plancompiler.ops.kernel import contiguous
from plancompiler.ops.registry import (
    Array,
    Arrays,
    AttrMap,
    Extra,
    KernelContext,
    Legal,
    Tensors,
    Types,
    apply,
    define_op,
)

_OTHERS = 2
"""Heads of a group beside those of queries: one of keys, one of values."""


def _split_infer(inputs: Types, attrs: AttrMap) -> Types:
    product = inputs[0]
    if product.shape[3] <= _OTHERS:
        raise ShapeError(
            "split_qkv needs a product with groups of heads",
            got=product.shape,
            expected="[batch, length, groups, heads of a group, features], the heads being one of "
            "keys, one of values, and at least one of queries",
        )
    batch, length, groups, heads, width = product.shape
    queries = TensorType((batch, groups * (heads - _OTHERS), length, width), product.dtype)
    keys = TensorType((batch, groups, length, width), product.dtype)
    return queries, keys, keys


def _join_infer(inputs: Types, attrs: AttrMap) -> Types:
    query, key, _ = inputs
    (batch, heads, length, width), groups = query.shape, key.shape[1]
    if not groups or heads % groups:
        raise ShapeError(
            "join_qkv needs a multiple of the heads of keys as heads of queries",
            got=f"{heads} and {groups}",
        )
    shape = (batch, length, groups, heads // groups + _OTHERS, width)
    return (TensorType(shape, query.dtype),)


def _parts(product: Array) -> tuple[tuple[slice, ...], ...]:
    """Where queries, keys and values are among the heads of a group."""
    queries = product.shape[3] - _OTHERS
    bounds = ((0, queries), (queries, queries + 1), (queries + 1, queries + _OTHERS))
    return tuple((slice(None),) * 3 + (slice(*each),) for each in bounds)


def _as_part(heads: Array, part: Array) -> Array:
    """[batch, heads, length, features] seen as the part of the product that they are."""
    batch, length, groups, each, width = part.shape
    return heads.reshape(batch, groups, each, length, width).transpose(0, 3, 1, 2, 4)


def _split_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    product, *biases = inputs
    for part, output in zip(_parts(product), outputs, strict=True):
        target = _as_part(output, product[part])
        if biases:
            np.add(product[part], biases[0][part[2:4]], out=target)
        else:
            np.copyto(target, product[part])


def _join_kernel(context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
    (product,) = outputs
    for part, heads in zip(_parts(product), inputs, strict=True):
        np.copyto(product[part], _as_part(heads, product[part]))


def _split_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    given = [
        output * 0.0 if grad is None else grad for output, grad in zip(outputs, grads, strict=True)
    ]
    back = apply("join_qkv", *given)
    return (back, *(back.sum((0, 1)) for _ in inputs[1:]))


def _join_gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
    passed: tuple[Any, ...] = apply("split_qkv", grads[0])
    return passed


def _split_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    g, h = ("g", "g") if outputs[0].shape[1] == outputs[1].shape[1] else ("[g]", "[h]")
    bias = "".join(f", {g} [p] [d]" for _ in inputs[1:])
    return f"b t {g} [p] [d]{bias} -> b {h} t [d], b {g} t [d], b {g} t [d]"


def _join_rule(inputs: Types, outputs: Types, attrs: AttrMap) -> str:
    g, h = ("g", "g") if inputs[0].shape[1] == inputs[1].shape[1] else ("[g]", "[h]")
    return f"b {h} t [d], b {g} t [d], b {g} t [d] -> b t {g} [p] [d]"


def _split_groups(inputs: Types, attrs: AttrMap) -> int | None:
    groups, heads = inputs[0].shape[2:4]
    return None if heads == _OTHERS + 1 else groups


def _join_groups(inputs: Types, attrs: AttrMap) -> int | None:
    heads, groups = inputs[0].shape[1], inputs[1].shape[1]
    return None if heads == groups else groups


def _between_groups() -> tuple[Extra, Legal]:
    _, legal = group_split(_split_groups, (2,), (1, 1, 1))

    def extra(inputs: Types, outputs: Types, attrs: AttrMap, parts: int) -> Any:
        sources = (2, *(0 for _ in inputs[1:]))
        return group_split(_split_groups, sources, (1, 1, 1))[0](inputs, outputs, attrs, parts)

    return extra, legal


_extra, _legal = _between_groups()
define_op(
    "split_qkv",
    infer=_split_infer,
    operands="product F b t g p d, bias? F g p d -> query F, key F, value F",
    rule=_split_rule,
    kernel=contiguous(_split_kernel),
    gradient=_split_gradient,
    extra=_extra,
    legal=_legal,
    precision="following",
    doc="product [b, t, g, p, d], and a bias [g, p, d] to add first -> queries "
    "[b, g (p - 2), t, d], keys and values [b, g, t, d].",
)
_extra, _legal = group_split(_join_groups, (1, 1, 1), (2,))
define_op(
    "join_qkv",
    infer=_join_infer,
    operands="query F b h t d, key F b g t d, value F b g t d -> product F",
    rule=_join_rule,
    kernel=contiguous(_join_kernel),
    gradient=_join_gradient,
    linear=((0, 1, 2),),
    extra=_extra,
    legal=_legal,
    precision="following",
    doc="queries [b, h, t, d], keys and values [b, g, t, d] -> [b, t, g, h / g + 2, d]: the "
    "inverse of split_qkv, and its gradient.",
)
