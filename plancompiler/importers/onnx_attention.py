"""Attention in ONNX, where it is what `pc.scaled_dot_product_attention` computes: the rule of the
operator, and the operators of which exporters make it.

What that function does not have, such as caches, capped scores and scores as a result, is left to
the standard's own description of the operator with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plancompiler.frontend import functions as f
from plancompiler.importers.attention_recognition import (
    HIDDEN,
    Product,
    are_copies,
    attention,
    with_attention,
)
from plancompiler.importers.graph import Array, Graph, Node, Ref
from plancompiler.importers.onnx_rules import as_tensor
from plancompiler.importers.recognition import View
from plancompiler.importers.rules import ONNX_DOMAIN, ONNX_RULES, Rule, onnx_rule
from plancompiler.ir import DType


def _heads(x: Any, count: int) -> Any:
    """[batch, length, features] as [batch, heads, length, features of a head]."""
    if x.ndim == 4:
        return x
    batch, length, features = x.shape
    return x.reshape([batch, length, count, features // count]).transpose([0, 2, 1, 3])


@onnx_rule("Attention", since=23)
def _attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    lengths: Any = None,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int = 0,
    outputs: int = 1,
    **more: Any,
) -> Any:
    if (
        more
        or softcap
        or outputs > 1
        or any(each is not None for each in (past_key, past_value, lengths))
    ):
        return NotImplemented
    flat = query.ndim == 3
    q = _heads(query, q_num_heads)
    k, v = _heads(key, kv_num_heads), _heads(value, kv_num_heads)
    if mask is not None:
        if mask.shape[-1] != k.shape[2] or mask.dtype is DType.BOOL:
            # A query that sees no key is treated as the standard says.
            return NotImplemented
        mask = as_tensor(mask, q)
        mask = mask.reshape([*[1] * (4 - mask.ndim), *mask.shape])
    made = f.scaled_dot_product_attention(q, k, v, causal=bool(is_causal), scale=scale, mask=mask)
    if not flat:
        return made
    batch, heads, length, size = made.shape
    return made.transpose([0, 2, 1, 3]).reshape([batch, length, heads * size])


# --- attention of other operators -----------------------------------------------------------------

_TARGET = "imported.attention"
ONNX_RULES[_TARGET] = Rule(attention)


def recognized(graph: Graph) -> Graph:
    """The graph with attention in place of two products with a softmax between them."""
    return with_attention(graph, _Operators(), _TARGET)


def _is(node: Node | None, *operators: str) -> bool:
    return node is not None and node.target.rpartition(".")[0] in {
        f"{ONNX_DOMAIN}.{each}" for each in operators
    }


class _Operators:
    """See `attention_recognition.Dialect`."""

    def product(self, view: View, node: Node) -> Product | None:
        if not _is(node, "MatMul"):
            return None
        kinds = [view.type(each) for each in node.args]
        if None in kinds or any(len(kind.shape) < 3 for kind in kinds if kind is not None):
            return None
        first, second = (kind.shape for kind in kinds if kind is not None)
        if first[:-2] != second[:-2]:
            return None
        last = len(first) - 1
        common = [(axis, axis) for axis in range(last - 1)]
        return Product(node.args[0], node.args[1], common, [(last, last - 1)])

    def softmax(self, view: View, node: Node) -> tuple[Ref, int] | None:
        kind = node.types[0]
        if not _is(node, "Softmax") or kind is None:
            return None
        last = len(kind.shape) - 1
        axis = node.kwargs.get("axis", -1 if node.target.endswith(".13") else 1)
        # Before opset 13 all axes from this one on were one.
        return (node.args[0], last) if axis in (-1, last) else None

    def scaled(self, view: View, node: Node) -> tuple[Ref, float] | None:
        if not _is(node, "Mul", "Div") or len(node.args) != 2:
            return None
        first, second = node.args
        number = _number(view, second)
        if number is not None and view.type(first) == node.types[0]:
            return first, number if _is(node, "Mul") else 1 / number
        number = _number(view, first) if _is(node, "Mul") else None
        return (second, number) if number and view.type(second) == node.types[0] else None

    def turned(self, view: View, node: Node) -> tuple[Ref, Sequence[int]] | None:
        kind = node.types[0]
        if kind is None:
            return None
        axes = [*range(len(kind.shape))]
        if _is(node, "Transpose"):
            return node.args[0], node.kwargs.get("perm", axes[::-1])
        # The last two axes, turned while all before them are one.
        turned = view.maker(node.args[0]) if _is(node, "Reshape") else None
        merged = view.maker(turned.args[0]) if turned is not None and turned.args else None
        if turned is None or merged is None or not _is(turned, "Transpose"):
            return None
        whole = view.type(merged.args[0]) if _is(merged, "Reshape") else None
        flat = merged.types[0]
        order = [*axes[:-2], axes[-1], axes[-2]]
        if (
            whole is None
            or flat is None
            or turned.kwargs.get("perm") != [0, 2, 1]
            or flat.shape[1:] != whole.shape[-2:]
            or kind.shape != tuple(whole.shape[axis] for axis in order if axis < len(whole.shape))
        ):
            return None
        return merged.args[0], order

    def masked(self, view: View, node: Node) -> tuple[Ref, Array] | None:
        constants = view.graph.constants
        if _is(node, "Add"):
            for x, mask in (node.args, node.args[::-1]):
                if mask.name in constants and view.type(x) == node.types[0]:
                    return x, constants[mask.name]
        kind = node.types[0]
        if _is(node, "Where") and node.args[0].name in constants and kind is not None:
            chosen, first, second = constants[node.args[0].name], *node.args[1:]
            for x, other, seen in ((first, second, chosen), (second, first, ~chosen)):
                number = _number(view, other)
                if number is not None and number < HIDDEN and view.type(x) == kind:
                    zero = np.zeros((), kind.dtype.numpy)
                    return x, np.where(seen, zero, np.array(-np.inf, zero.dtype))
        return None

    def copied(self, view: View, node: Node, axis: int) -> Ref | None:
        copies = view.maker(node.args[0]) if _is(node, "Reshape") else None
        apart = view.maker(copies.args[0]) if copies is not None and _is(copies, "Expand") else None
        if copies is None or apart is None or not _is(apart, "Unsqueeze", "Reshape"):
            return None
        kinds = view.type(apart.args[0]), apart.types[0], copies.types[0], node.types[0]
        return apart.args[0] if are_copies(axis, *kinds) else None


def _number(view: View, value: Any) -> float | None:
    array = view.graph.constants.get(value.name) if isinstance(value, Ref) else None
    return float(array.reshape(())) if array is not None and array.size == 1 else None
