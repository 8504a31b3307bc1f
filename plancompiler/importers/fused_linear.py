"""Linear layers whose outputs are several things in one, such as query, key and value, held with an
axis for these parts.

The columns of a shard of such a weight [in, parts * out] would cross the parts' borders. As
[in, parts, out] it splits each part, and no rank needs columns of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from plancompiler.frontend.nn.module import Parameter
from plancompiler.importers.graph import Graph, Node, live_nodes
from plancompiler.importers.recognition import View
from plancompiler.ir import TensorType

_OUTPUTS = {"aten.linear.default": 0, "imported.linear.untransposed": 1}
"""Linear layers, and the axis of outputs of their weights."""
_CUTS = {
    "aten.split.Tensor",
    "aten.split.sizes",
    "aten.split_with_sizes.default",
    "aten.chunk.default",
}


def with_parts(graph: Graph, tensors: Mapping[str, Parameter]) -> Graph:
    """The graph with such layers, whose parameters among `tensors` take the shapes with parts. A
    layer is left as it is where anything else reads its result or its parameters.
    """
    view = View(graph)
    tied = Counter(tensors.values())
    types = dict(graph.types)
    nodes = []
    for node in graph.nodes:
        layer = _cut_layer(view, node)
        own = [] if layer is None else [each.name for each in layer.args[1:] if each is not None]
        if layer is None or not all(
            view.uses[value] == 1
            and value in graph.parameters
            and tied[tensors[graph.parameters[value]]] == 1
            for value in own
        ):
            nodes.append(node)
            continue
        outputs, parts = _OUTPUTS[layer.target], len(node.types)
        for value, axis in zip(own, (outputs, 0), strict=False):
            shape, dtype = list(types[value].shape), types[value].dtype
            shape[axis : axis + 1] = [parts, shape[axis] // parts]
            types[value] = TensorType(tuple(shape), dtype)
            tensors[graph.parameters[value]].hold_as(shape)
        kwargs = {"outputs": outputs}
        nodes.append(replace(node, target="imported.linear.parts", args=layer.args, kwargs=kwargs))
    graph = replace(graph, nodes=tuple(nodes), types=types)
    return replace(graph, nodes=live_nodes(graph))


def _cut_layer(view: View, node: Node) -> Node | None:
    """The linear layer whose outputs a node cuts into equal parts, if that is all that reads it."""
    if node.target not in _CUTS:
        return None
    layer, kind = view.maker(node.args[0], *_OUTPUTS), view.type(node.args[0])
    if layer is None or kind is None or layer.kwargs or view.uses[layer.name] != 1:
        return None
    axis = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    widths = {each.shape[-1] for each in node.types if each is not None}
    parts = len(node.types)
    fits = (
        axis in (-1, len(kind.shape) - 1)
        and len(kind.shape) > 1
        and parts > 1
        and len(widths) == 1
        and 1 not in widths
    )
    return layer if fits else None
