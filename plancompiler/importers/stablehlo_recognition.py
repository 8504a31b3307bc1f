"""Rewrites of graphs of StableHLO: what a person would have written in place of several operations.

    random numbers  a floating number that is put together out of its bits
    broadcasts      an operand that was made as large as others only to be combined with them

A pattern that does not match in every detail is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from plancompiler.importers.graph import Graph, Node, Ref, live_nodes
from plancompiler.importers.stablehlo_rules import BROADCASTING
from plancompiler.ir import TensorType

Rewrite = Callable[["_View", Node], Node | None]


def recognized(graph: Graph) -> Graph:
    """The graph with these patterns replaced, without nodes that nobody needs."""
    for rewrite in (_float_of_bits,):
        view = _View(graph)
        nodes = tuple(rewrite(view, node) or node for node in graph.nodes)
        graph = replace(graph, nodes=nodes)
        graph = replace(graph, nodes=live_nodes(graph))
    return _without_broadcasts(graph)


class _View:
    """What rewrites ask about a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made = {node.name: node for node in graph.nodes}

    def maker(self, value: Any, *targets: str) -> Node | None:
        """The node that makes a value, if it is one of these."""
        node = self.made.get(value.name) if isinstance(value, Ref) else None
        return node if node is not None and (not targets or node.target in targets) else None

    def type(self, value: Any) -> TensorType | None:
        """Type of a value of one tensor."""
        if not isinstance(value, Ref):
            return None
        graph, node = self.graph, self.made.get(value.name)
        if node is not None:
            return node.types[0] if len(node.types) == 1 else None
        return graph.types.get(value.name) or graph.inputs.get(value.name)


def _float_of_bits(view: _View, node: Node) -> Node | None:
    """The bits of 1 with random ones behind the exponent: a number between 1 and 2."""
    kind = node.types[0]
    if node.target != "stablehlo.bitcast_convert" or kind is None or not kind.dtype.is_floating:
        return None
    joined = view.maker(node.args[0], "stablehlo.or")
    if joined is None or kind.dtype.is_half:
        return None
    limits: Any = np.finfo(str(kind.dtype))
    one = int(np.ones((), kind.dtype.numpy).view(f"u{kind.dtype.itemsize}"))
    for bits, exponent in (joined.args, joined.args[::-1]):
        shifted = view.maker(bits, "stablehlo.shift_right_logical")
        if (
            shifted is not None
            and exponent == one
            and shifted.args[1] == limits.bits - limits.nmant
        ):
            return replace(node, target="imported.float_of_bits", args=(bits,), kwargs={})
    return None


def _without_broadcasts(graph: Graph) -> Graph:
    """Operands are broadcast by the operations themselves, where that gives the same shape."""
    view = _View(graph)
    small: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        if node.target == "stablehlo.broadcast_in_dim":
            source, kind = view.type(node.args[0]), node.types[0]
            if source is None or kind is None:
                continue
            shape = [1] * len(kind.shape)
            for extent, axis in zip(source.shape, node.kwargs["broadcast_dimensions"], strict=True):
                shape[axis] = extent
            small[node.name] = tuple(shape)
    for ref in graph.results():
        small.pop(ref.name, None)
    while True:
        kept = {
            ref.name
            for node in graph.nodes
            if not _is_as_large(view, node, small)
            for ref in node.refs
            if ref.name in small
        }
        if not kept:
            break
        for name in kept:
            del small[name]
    nodes = []
    for node in graph.nodes:
        kind = node.types[0]
        if node.name in small and kind is not None:
            types = (TensorType(small[node.name], kind.dtype),)
            node = replace(node, types=types)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _is_as_large(view: _View, node: Node, small: dict[str, tuple[int, ...]]) -> bool:
    """Whether a node's result keeps its shape with these small operands."""
    if not any(ref.name in small for ref in node.refs):
        return True
    (result, *_) = node.types
    if node.target not in BROADCASTING or result is None:
        return False
    shapes = []
    for each in node.args:
        if isinstance(each, Ref):
            kind = view.type(each)
            array = view.graph.constants.get(each.name)
            if kind is None and array is None:
                return False
            large = array.shape if array is not None else kind.shape if kind is not None else ()
            shapes.append(small.get(each.name, large))
    return np.broadcast_shapes(*shapes) == result.shape
