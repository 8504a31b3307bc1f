"""Rewrites of imported graphs: what a person would have written in place of several operations.

    no-ops        copies, casts to the same dtype, views of the same shape
    linear        a product with a transposed weight, and one between two reshapes
    heads         products of matrices for which batch and heads were merged into one axis
    rms_norm      pow, mean, rsqrt and two multiplications
    gelu          its approximation by tanh, written with seven operations
    grouped heads keys and values copied for each head of queries that shares them

The targets are PyTorch's. A pattern that does not match in every detail is left as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from plancompiler.importers.graph import Graph, Node, Ref, filled, live_nodes
from plancompiler.ir import TensorType

_VIEWS = {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"}
_COPIES = {
    "aten.clone.default",
    "aten.alias.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
    "aten.lift_fresh.default",
}
_MAYBE_NOTHING = {
    *_VIEWS,
    "aten._to_copy.default",
    "aten.expand.default",
    "aten.slice.Tensor",
    "aten.to.device",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.other",
    "aten.type_as.default",
}
"""They change nothing where type and shape stay."""
_TRANSPOSES: dict[str, tuple[Any, ...]] = {
    "aten.t.default": (),
    "aten.permute.default": ([1, 0],),
    "aten.transpose.int": (0, 1),
}


def recognized(graph: Graph) -> Graph:
    """The graph with these patterns replaced, without nodes that nobody needs."""
    graph = _without_noops(graph)
    for rewrite in (
        _transposed_weight,
        _linear_between_reshapes,
        _merged_heads,
        _rms_norm,
        _gelu,
        _grouped_heads,
    ):
        graph = _rewritten(graph, rewrite)
    return graph


class View:
    """What rewrites ask about a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made = {node.name: node for node in graph.nodes}
        self.uses = Counter(ref.name for node in graph.nodes for ref in node.refs)
        self.uses.update(ref.name for ref in graph.results())

    def maker(self, value: Any, *targets: str) -> Node | None:
        """The node that makes a value, if it is one of these."""
        node = self.made.get(value.name) if isinstance(value, Ref) else None
        return node if node is not None and (not targets or node.target in targets) else None

    def type(self, value: Any) -> TensorType | None:
        """Type of a value of one tensor."""
        if not isinstance(value, Ref):
            return None
        node = self.made.get(value.name)
        if node is not None:
            return node.types[0] if len(node.types) == 1 else None
        return self.graph.types.get(value.name) or self.graph.inputs.get(value.name)


_HALF, _CUBIC = 0.5, 0.044715
"""Numbers of gelu's approximation."""

Rewrite = Callable[[View, Node], Node | None]


def _rewritten(graph: Graph, rewrite: Rewrite) -> Graph:
    view = View(graph)
    nodes = tuple(rewrite(view, node) or node for node in graph.nodes)
    graph = replace(graph, nodes=nodes)
    return replace(graph, nodes=live_nodes(graph))


def _without_noops(graph: Graph) -> Graph:
    view = View(graph)
    instead: dict[str, Ref] = {}

    def kept(ref: Ref) -> Ref:
        return instead.get(ref.name, ref)

    nodes = []
    for node in graph.nodes:
        args, kwargs = filled(node.args, kept), filled(dict(node.kwargs), kept)
        first = args[0] if args and isinstance(args[0], Ref) else None
        nothing = node.target in _COPIES or (
            node.target in _MAYBE_NOTHING
            and view.type(node.args[0]) == node.types[0]
            and not (node.target == "aten.slice.Tensor" and len(args) > 4 and args[4] != 1)
        )
        if nothing and first is not None:
            instead[node.name] = first
        else:
            nodes.append(replace(node, args=args, kwargs=kwargs))
    output = filled(graph.output, kept)
    mutated = {name: kept(ref) for name, ref in graph.mutated.items()}
    graph = replace(graph, nodes=tuple(nodes), output=output, mutated=mutated)
    return replace(graph, nodes=live_nodes(graph))


def _transposed_weight(view: View, node: Node) -> Node | None:
    """x @ w.T is one product."""
    if node.target not in ("aten.matmul.default", "aten.mm.default"):
        return None
    x, weight = node.args
    turned = view.maker(weight, *_TRANSPOSES)
    kind = view.type(x)
    if turned is None or kind is None or len(kind.shape) < 2:
        return None
    source = view.type(turned.args[0])
    if source is None or len(source.shape) != 2:
        return None
    order = tuple(turned.args[1:])
    if order != _TRANSPOSES[turned.target] and order not in ((1, 0), (-1, -2), (-2, -1)):
        return None
    return replace(node, target="imported.matmul.transposed", args=(x, turned.args[0]), kwargs={})


def _linear_between_reshapes(view: View, node: Node) -> Node | None:
    """A product of rows, which were flattened for it: one of the tensor as it was."""
    if node.target not in _VIEWS:
        return None
    product = view.maker(node.args[0], "aten.addmm.default", "aten.linear.default")
    if product is None or view.uses[product.name] != 1 or product.kwargs:
        return None
    turned = product.target == "aten.linear.default"  # its weight is [out, in]
    rows, weight, bias = (
        (*product.args, None)[:3] if turned else (*product.args[1:], product.args[0])
    )
    flattened = view.maker(rows, *_VIEWS)
    if flattened is None:
        return None
    whole, flat = view.type(flattened.args[0]), view.type(rows)
    made, result = view.type(node.args[0]), node.types[0]
    if whole is None or flat is None or made is None or result is None:
        return None
    shift = view.type(bias)
    if result.shape[-1:] != made.shape[-1:] or (
        bias is not None and (shift is None or len(shift.shape) != 1)
    ):
        return None
    target = product.target if turned else "imported.linear.untransposed"
    args = (flattened.args[0], weight, bias)
    shape = (*result.shape[:-1], flat.shape[-1])
    if whole.shape == shape:
        return replace(node, target=target, args=args, kwargs={})
    # Heads are merged in the same step.
    kwargs = {"shape": list(shape), "turned": turned}
    return replace(node, target="imported.linear.reshaped", args=args, kwargs=kwargs)


def _merged_heads(view: View, node: Node) -> Node | None:
    """Products of matrices whose leading axes were merged for them: of the tensors as they were, as
    a merged axis cannot be split by heads.
    """
    product = view.maker(node.args[0], "aten.bmm.default", "aten.baddbmm.default")
    if node.target not in _VIEWS or product is None or view.uses[product.name] != 1:
        return None
    *bias, x, y = product.args
    turned = view.maker(y, "aten.transpose.int")
    if turned is not None and sorted(axis % 3 for axis in turned.args[1:]) == [1, 2]:
        y = turned.args[0]
    else:
        turned = None
    merged = [view.maker(each, *_VIEWS) for each in (x, y)]
    if merged[0] is None or merged[1] is None:
        return None
    first, second = merged[0].args[0], merged[1].args[0]
    left, right, result = view.type(first), view.type(second), node.types[0]
    if left is None or right is None or result is None or left.shape[:-2] != right.shape[:-2]:
        return None
    count = math.prod(left.shape[:-2])
    flat = [(count, *kind.shape[-2:]) for kind in (left, right)]
    types = [view.type(each) for each in (x, y)]
    if (
        len(left.shape) < 4
        or [kind.shape for kind in types if kind is not None] != flat
        or result.shape != (*left.shape[:-1], right.shape[-2 if turned else -1])
    ):
        return None
    kwargs = {**product.kwargs, "turned": turned is not None}
    args = (first, second, *bias)
    return replace(node, target="imported.matmul.apart", args=args, kwargs=kwargs)


def _rms_norm(view: View, node: Node) -> Node | None:
    """x times the reciprocal root of its mean square, times a weight."""
    if node.target != "aten.mul.Tensor":
        return None
    for normal, weight in (node.args, node.args[::-1]):
        made = view.maker(normal, "aten.mul.Tensor")
        scale, result = view.type(weight), node.types[0]
        if made is None or scale is None or result is None or len(scale.shape) != 1:
            continue
        if scale.shape != result.shape[-1:] or scale.dtype is not result.dtype:
            continue
        for x, factor in (made.args, made.args[::-1]):
            eps = _reciprocal_root_of_mean_square(view, x, factor)
            if eps is not None and view.type(x) == result:
                args = (x, weight, eps)
                return replace(node, target="imported.rms_norm.default", args=args, kwargs={})
    return None


def _reciprocal_root_of_mean_square(view: View, x: Any, factor: Any) -> float | None:
    """The eps of rsqrt(mean(x²) + eps) over the last axis; None for anything else."""
    root = view.maker(factor, "aten.rsqrt.default", "aten.pow.Tensor_Scalar")
    if root is None or (root.target == "aten.pow.Tensor_Scalar" and root.args[1] != -0.5):
        return None
    shifted = view.maker(root.args[0], "aten.add.Tensor", "aten.add.Scalar")
    if shifted is None or shifted.kwargs or not isinstance(shifted.args[1], float):
        return None
    mean = view.maker(shifted.args[0], "aten.mean.dim")
    kind = view.type(x)
    if (
        mean is None
        or kind is None
        or len(mean.args) != 3
        or mean.kwargs
        or mean.args[2] is not True
    ):
        return None
    if mean.args[1] not in ([-1], [len(kind.shape) - 1]):
        return None
    squares = view.maker(mean.args[0], "aten.pow.Tensor_Scalar", "aten.mul.Tensor")
    if squares is None or squares.args[0] != x:
        return None
    return shifted.args[1] if squares.args[1] in (2, x) else None


def _gelu(view: View, node: Node) -> Node | None:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³)))."""
    for half, rest in _operands(view, node, "aten.mul.Tensor"):
        x = next((each for each, number in _scaled(view, half) if number == _HALF), None)
        shifted = view.maker(rest, "aten.add.Tensor", "aten.add.Scalar")
        if x is None or shifted is None or shifted.kwargs or shifted.args[1] != 1:
            continue
        tanh = view.maker(shifted.args[0], "aten.tanh.default")
        if tanh is None:
            continue
        for inner, factor in _scaled(view, tanh.args[0]):
            if math.isclose(factor, math.sqrt(2 / math.pi), rel_tol=1e-6) and _has_cube(
                view, inner, x
            ):
                return replace(node, target="imported.gelu.tanh", args=(x,), kwargs={})
    return None


def _has_cube(view: View, value: Any, x: Any) -> bool:
    """Whether a value is x + 0.044715 x³."""
    added = view.maker(value, "aten.add.Tensor")
    for first, second in _operands(view, added, "aten.add.Tensor"):
        for cube, factor in _scaled(view, second):
            power = view.maker(cube, "aten.pow.Tensor_Scalar")
            if (
                first == x
                and math.isclose(factor, _CUBIC, rel_tol=1e-6)
                and power is not None
                and power.args == (x, 3)
            ):
                return True
    return False


def _operands(view: View, node: Node | None, target: str) -> list[tuple[Any, Any]]:
    """The two operands of a node of this target, in both orders; none for another node."""
    if node is None or node.target != target or node.kwargs or len(node.args) != 2:
        return []
    first, second = node.args
    return [(first, second), (second, first)]


def _scaled(view: View, value: Any) -> list[tuple[Any, float]]:
    """What a product with a number has: the other factor, and the number."""
    made = view.maker(value, "aten.mul.Tensor", "aten.mul.Scalar")
    if made is None or made.kwargs or not isinstance(made.args[1], (int, float)):
        return []
    return [(made.args[0], float(made.args[1]))]


def _grouped_heads(view: View, node: Node) -> Node | None:
    """Attention whose keys and values were copied for neighbouring heads of queries."""
    if node.target != "aten.scaled_dot_product_attention.default":
        return None
    query, key, value, *more = node.args
    shared = [_before_copies(view, each) for each in (key, value)]
    if None in shared or view.type(shared[0]) is None:
        return None
    kwargs = {name: each for name, each in node.kwargs.items() if name != "enable_gqa"}
    return replace(node, args=(query, *shared, *more), kwargs=kwargs)


def _before_copies(view: View, value: Any) -> Ref | None:
    """x [b, g, t, d] of x[:, :, None].expand(b, g, n, t, d).reshape(b, g * n, t, d)."""
    merged = view.maker(value, *_VIEWS)
    copied = view.maker(merged.args[0], "aten.expand.default") if merged is not None else None
    apart = view.maker(copied.args[0], "aten.unsqueeze.default") if copied is not None else None
    if merged is None or copied is None or apart is None or apart.args[1] not in (2, -3):
        return None
    source, many, result = view.type(apart.args[0]), copied.types[0], merged.types[0]
    if source is None or many is None or result is None or len(source.shape) != 4:
        return None
    b, g, t, d = source.shape
    fits = many.shape == (b, g, many.shape[2], t, d) and result.shape == (
        b,
        g * many.shape[2],
        t,
        d,
    )
    source_ref: Ref = apart.args[0]
    return source_ref if fits else None
