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
from plancompiler.importers.graph import Graph, Node, Ref, live_nodes
from plancompiler.importers.recognition import View
from plancompiler.ir import TensorType

_OUTPUTS = {"aten.linear.default": 0, "imported.linear.untransposed": 1}
"""Linear layers, and the axis of outputs of their weights."""
_SLICE, _CUT = "aten.slice.Tensor", "aten.split.Tensor"
_CUTS = {
    _CUT,
    "aten.split.sizes",
    "aten.split_with_sizes.default",
    "aten.chunk.default",
}


def with_parts(graph: Graph, tensors: Mapping[str, Parameter]) -> Graph:
    """The graph with such layers, whose parameters among `tensors` take the shapes with parts. A
    layer is left as it is where anything else reads its result or its parameters.
    """
    graph = _cut_where_sliced(graph)
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


def _cut_where_sliced(graph: Graph) -> Graph:
    """The graph with a cut in place of slices that take all equal parts of a layer's outputs."""
    view = View(graph)
    slices: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.target == _SLICE and view.maker(node.args[0], *_OUTPUTS) is not None:
            slices.setdefault(node.args[0].name, []).append(node)
    cuts: dict[str, Node] = {}
    parts: dict[str, Node] = {}
    for name, several in slices.items():
        kind, (first, *_) = view.type(Ref(name)), several
        begins = [_begin(node, kind) for node in several]
        if kind is None or None in begins or view.uses[name] != len(several):
            continue
        width, count = kind.shape[-1] // len(several), len(several)
        if sorted(each or 0 for each in begins) != [width * at for at in range(count)]:
            continue
        part = TensorType((*kind.shape[:-1], width), kind.dtype)
        if any(node.types != (part,) for node in several):
            continue
        cut = Ref(f"{name}_parts")
        axis = len(kind.shape) - 1
        args, types = (Ref(name), width, axis), first.types * count
        cuts[first.name] = replace(first, name=cut.name, target=_CUT, args=args, types=types)
        for node, begin in zip(several, begins, strict=True):
            at = (begin or 0) // width
            parts[node.name] = replace(node, target="getitem", args=(cut, at))
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += [cuts[node.name]] if node.name in cuts else []
        nodes.append(parts.get(node.name, node))
    return replace(graph, nodes=tuple(nodes))


def _begin(node: Node, kind: TensorType | None) -> int | None:
    """Where a slice of neighbours along the last axis begins; None for any other slice."""
    given = list(node.args[1:])
    axis, start, end, step = given + [0, None, None, 1][len(given) :]
    if kind is None or node.kwargs or step != 1 or axis not in (-1, len(kind.shape) - 1):
        return None
    return slice(start, end).indices(kind.shape[-1])[0]


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
