"""Attention that is written as two products with a softmax between them, of ONNX and StableHLO.

Whatever the system, axes are told apart by labels: those of queries, keys and values follow from
what the two products sum over and what they have in common. Scales, masks of constants and
transpositions may stand between, and keys and values that were copied for the heads that share them
are not copied. What does not match in every detail is left as it is; so are weights of attention
that something else reads, too.

Each system says in a `Dialect` what its operations are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from plancompiler.frontend import functions as f
from plancompiler.importers.graph import Array, Graph, Node, Ref, live_nodes
from plancompiler.importers.recognition import View
from plancompiler.ir import DType, TensorType

HIDDEN = -1e30
"""What is added to scores, or stands in their place, to hide a key: as in `torch_rules`."""

Labels = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two tensors: pairs of axes that they have in common, and that are summed. The
    result has the common axes, then the other axes of the first and of the second.
    """

    first: Ref
    second: Ref
    common: Sequence[tuple[int, int]]
    summed: Sequence[tuple[int, int]]


class Dialect(Protocol):
    """What the operations of a system are; each gives None for all others."""

    def product(self, view: View, node: Node) -> Product | None:
        """A product."""

    def softmax(self, view: View, node: Node) -> tuple[Ref, int] | None:
        """What has exponentials over their sum, and along which axis."""

    def scaled(self, view: View, node: Node) -> tuple[Ref, float] | None:
        """What is multiplied by a number."""

    def turned(self, view: View, node: Node) -> tuple[Ref, Sequence[int]] | None:
        """What is transposed, and the order of its axes."""

    def masked(self, view: View, node: Node) -> tuple[Ref, Array] | None:
        """To what a constant is added, and that; −inf where a constant stands in its place."""

    def copied(self, view: View, node: Node, axis: int) -> Ref | None:
        """What was copied for neighbours along an axis, which this merges with its copies."""


@dataclass(slots=True)
class _Traced:
    """A tensor that something was made of: its labels, and by what it was multiplied."""

    ref: Ref
    labels: Labels
    scale: float = 1.0
    masks: list[tuple[Array, Labels]] = field(default_factory=list)


def with_attention(graph: Graph, dialect: Dialect, target: str) -> Graph:
    """The graph with nodes of `target`, for `attention`, in place of such products."""
    view = View(graph)
    constants = dict(graph.constants)
    taken = {*constants, *view.made, *graph.inputs, *graph.parameters}
    nodes = []
    for node in graph.nodes:
        made = _attention(view, dialect, node)
        if made is None:
            nodes.append(node)
            continue
        args, kwargs, mask = made
        if mask is not None:
            name = f"{node.name}_mask"
            while name in taken:
                name += "_"
            taken.add(name)
            constants[name] = mask
            args = (*args, Ref(name))
        nodes.append(replace(node, target=target, args=args, kwargs=kwargs))
    if len(constants) == len(graph.constants) and nodes == list(graph.nodes):
        return graph
    graph = replace(graph, nodes=tuple(nodes), constants=constants)
    graph = replace(graph, nodes=live_nodes(graph))
    used = {ref.name for node in graph.nodes for ref in node.refs}
    used |= {ref.name for ref in graph.results()}
    return replace(
        graph, constants={name: each for name, each in graph.constants.items() if name in used}
    )


def are_copies(axis: int, *kinds: TensorType | None) -> bool:
    """Whether these types say that the elements along an axis are copied for neighbours: as they
    were, with an axis behind that, with copies along it, and with both axes as one.
    """
    shapes = [kind.shape for kind in kinds if kind is not None]
    if len(shapes) != len(kinds) or not axis < len(shapes[0]):
        return False
    before, after = shapes[0][: axis + 1], shapes[0][axis + 1 :]
    count = shapes[2][axis + 1] if len(shapes[2]) > axis + 1 else 1
    return shapes[1:] == [
        (*before, 1, *after),
        (*before, count, *after),
        (*before[:-1], before[-1] * count, *after),
    ]


def attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    orders: Sequence[Sequence[int]],
    shapes: Sequence[Sequence[int]],
    causal: bool | str,
    scale: float,
) -> Any:
    """The rule of such nodes: `orders` are those of the axes of query, key, value and result,
    `shapes` those of the first three and of the result, before it is turned.
    """
    query, key, value = (
        f.reshape(f.transpose(each, order), shape)
        for each, order, shape in zip((query, key, value), orders, shapes, strict=False)
    )
    made = f.scaled_dot_product_attention(query, key, value, causal=causal, scale=scale, mask=mask)
    return f.transpose(f.reshape(made, shapes[3]), orders[3])


def _attention(
    view: View, dialect: Dialect, node: Node
) -> tuple[tuple[Any, ...], dict[str, Any], Array | None] | None:
    last = dialect.product(view, node)
    if last is None:
        return None
    fresh = itertools.count()
    for weights, value, at in ((last.first, last.second, 0), (last.second, last.first, 1)):
        made = view.maker(weights)
        if made is None or view.uses[made.name] != 1:
            continue
        soft = dialect.softmax(view, made)
        kind = made.types[0]
        if soft is None or kind is None:
            continue
        labels = tuple(next(fresh) for _ in kind.shape)
        keys = labels[soft[1] % len(labels)]
        scores = _traced(view, dialect, soft[0], labels, through_masks=True)
        first = view.maker(scores.ref)
        product = None if first is None else dialect.product(view, first)
        if first is None or product is None or view.uses[first.name] != 1:
            continue
        sides = _sides(view, product, scores.labels, fresh)
        theirs = _labels_of_value(view, last, at, value, labels, fresh)
        if sides is None or theirs is None or theirs.count(keys) != 1:
            continue
        query, key = sides if keys in sides[1][1] else sides[::-1]
        operands = [
            _traced(view, dialect, ref, each) for ref, each in (query, key, (value, theirs))
        ]
        if [pair[at] for pair in last.summed] != [labels.index(keys)]:
            continue
        result = _result_labels(last, at, labels, theirs)
        return _fused(view, dialect, operands, keys, result, scores)
    return None


def _traced(
    view: View, dialect: Dialect, ref: Ref, labels: Labels, through_masks: bool = False
) -> _Traced:
    """What a tensor is but for scales, transpositions and, with `through_masks`, masks."""
    traced = _Traced(ref, labels)
    while True:
        node = view.maker(traced.ref)
        if node is None or (through_masks and view.uses[node.name] != 1):
            return traced
        scaled, turned = dialect.scaled(view, node), dialect.turned(view, node)
        masked = dialect.masked(view, node) if through_masks else None
        if scaled is not None:
            traced.ref, factor = scaled
            traced.scale *= factor
        elif turned is not None:
            traced.ref, order = turned
            before = [0] * len(order)
            for at, axis in enumerate(order):
                before[axis] = traced.labels[at]
            traced.labels = tuple(before)
        elif masked is not None and traced.scale == 1.0:  # else what is added is scaled, too
            traced.ref, mask = masked
            traced.masks.append((mask, traced.labels))
        else:
            return traced


def _sides(
    view: View, product: Product, labels: Labels, fresh: Any
) -> tuple[tuple[Ref, Labels], tuple[Ref, Labels]] | None:
    """The operands of a product and their labels, from those of its result."""
    kinds = view.type(product.first), view.type(product.second)
    if kinds[0] is None or kinds[1] is None or len(product.summed) != 1:
        return None
    made: tuple[list[int], list[int]] = ([-1] * len(kinds[0].shape), [-1] * len(kinds[1].shape))
    rest = iter(labels)
    for pair in product.common:
        label = next(rest)
        for side, axis in zip(made, pair, strict=True):
            side[axis] = label
    for side, axis in zip(made, product.summed[0], strict=True):
        side[axis] = -2
    for side in made:
        for axis, label in enumerate(side):
            if label == -1:
                side[axis] = next(rest)
    depth = next(fresh)
    first, second = (tuple(depth if each == -2 else each for each in side) for side in made)
    return (product.first, first), (product.second, second)


def _labels_of_value(
    view: View, last: Product, at: int, value: Ref, labels: Labels, fresh: Any
) -> Labels | None:
    kind = view.type(value)
    if kind is None:
        return None
    shared = {pair[1 - at]: labels[pair[at]] for pair in (*last.common, *last.summed)}
    return tuple(shared[axis] if axis in shared else next(fresh) for axis in range(len(kind.shape)))


def _result_labels(last: Product, at: int, weights: Labels, value: Labels) -> Labels:
    sides = (weights, value) if at == 0 else (value, weights)
    common = [sides[0][axis] for axis, _ in last.common]
    gone = {sides[0][axis] for axis, _ in last.summed}
    return (
        *common,
        *(each for side in sides for each in side if each not in common and each not in gone),
    )


def _fused(
    view: View,
    dialect: Dialect,
    operands: Sequence[_Traced],
    keys: int,
    result: Labels,
    scores: _Traced,
) -> tuple[tuple[Any, ...], dict[str, Any], Array | None] | None:
    """Arguments of `attention`, and its mask."""
    query, key, value = operands
    kinds = [view.type(each.ref) for each in operands]
    common = [each for each in query.labels if each in key.labels and each in value.labels]
    depth = [each for each in query.labels if each in key.labels and each not in common]
    own = [each for each in query.labels if each not in key.labels]
    features = [each for each in value.labels if each not in key.labels]
    if (
        len(common) not in (1, 2)
        or len(depth) != 1
        or len(own) not in (1, 2)
        or len(features) != 1
        or {*key.labels} != {*common, *depth, keys}
        or {*value.labels} != {*common, *features, keys}
        or value.scale != 1.0
    ):
        return None
    sizes: dict[int, int] = {}
    for each, kind in zip(operands, kinds, strict=True):
        if kind is None or kind.dtype not in (DType.FLOAT32, DType.FLOAT64):
            return None
        sizes |= dict(zip(each.labels, kind.shape, strict=True))
    # With two axes of its own, queries come in groups: the other one is that of positions.
    group = [] if len(own) == 1 else [min(own, key=lambda each: _is_position(each, scores, sizes))]
    (position,) = [each for each in own if each not in group]
    lead = [*common, *([] if len(common) == 2 else [None])]
    mask = _mask(scores, [*common, *group, position, keys], sizes)
    if mask is None:
        return None
    causal, added = mask
    heads = 1 if lead[1] is None else sizes[lead[1]]
    batch, groups = sizes[common[0]], math.prod(sizes[each] for each in group)
    if len(common) == 2 and groups == 1:
        key, value = _uncopied(view, dialect, key, value, common[1])
    fewer = _shared_heads(view, key, common[-1]) if len(common) == 2 else heads
    t, s = sizes[position], sizes[keys]
    orders = [
        _order(query.labels, [*common, *group, position, *depth]),
        _order(key.labels, [*common, keys, *depth]),
        _order(value.labels, [*common, keys, *features]),
        _order([*common, *group, position, *features], result),
    ]
    shapes = [
        [batch, heads * groups, t, sizes[depth[0]]],
        [batch, fewer, s, sizes[depth[0]]],
        [batch, fewer, s, sizes[features[0]]],
        [sizes[each] for each in (*common, *group, position, *features)],
    ]
    scale = scores.scale * query.scale * key.scale
    kwargs = {"orders": orders, "shapes": shapes, "causal": causal, "scale": scale}
    return (query.ref, key.ref, value.ref), kwargs, added


def _is_position(label: int, scores: _Traced, sizes: Mapping[int, int]) -> tuple[bool, int]:
    """Whether masks differ along an axis; of two alike the longer one is that of positions."""
    differs = any(
        label in labels and _spread(mask, labels).shape[labels.index(label)] > 1
        for mask, labels in scores.masks
    )
    return differs, sizes[label]


def _spread(mask: Array, labels: Labels) -> Array:
    """A mask with all axes, of extent 1 where it repeats."""
    mask = mask.reshape((1,) * (len(labels) - mask.ndim) + mask.shape)
    for axis, extent in enumerate(mask.shape):
        first = mask[(slice(None),) * axis + (slice(1),)]
        if extent > 1 and (mask.strides[axis] == 0 or bool((mask == first).all())):
            mask = first
    return mask


def _mask(
    scores: _Traced, order: Sequence[int], sizes: Mapping[int, int]
) -> tuple[bool | str, Array | None] | None:
    """Which form of causal attention the masks are, or what is added to scores [b, h, t, s]; None
    where a query may see no key, which the systems treat otherwise.
    """
    added: Any = None
    for mask, labels in scores.masks:
        part = _spread(mask, labels).transpose(_order(labels, order))
        added = part if added is None else added + part
    if added is None:
        return False, None
    hidden = added < HIDDEN
    if hidden.all(axis=-1).any():
        return None
    length, keys = (sizes[each] for each in order[-2:])
    seen = np.broadcast_to(~hidden, (*added.shape[:-2], length, keys))
    if bool(((added == 0) | hidden).all()):
        if seen.all():
            return False, None
        for form, offset in ((True, 0), ("lower_right", keys - length)):
            if offset >= 0 and bool((seen == np.tri(length, keys, offset, dtype=bool)).all()):
                return form, None
    added = np.where(hidden, np.array(-np.inf, added.dtype), added)
    if added.ndim == 5:  # heads and their groups are one axis
        wide = max(added.shape[1:3]) > 1
        heads = [sizes[each] for each in order[1:3]] if wide else [1, 1]
        added = np.broadcast_to(added, (added.shape[0], *heads, *added.shape[3:]))
        added = added.reshape(added.shape[0], -1, *added.shape[3:])
    elif added.ndim == 3:
        added = added[:, None]
    return False, np.ascontiguousarray(added)


def _order(labels: Sequence[int], wanted: Sequence[int]) -> list[int]:
    return [labels.index(each) for each in wanted]


def _uncopied(
    view: View, dialect: Dialect, key: _Traced, value: _Traced, heads: int
) -> tuple[_Traced, _Traced]:
    """Keys and values before they were copied for heads that share them, if both were."""
    before = []
    for each in (key, value):
        node = view.maker(each.ref)
        source = None if node is None else dialect.copied(view, node, each.labels.index(heads))
        if source is None:
            return key, value
        before.append(replace(each, ref=source))
    kinds = [view.type(each.ref) for each in before]
    counts = {
        kind.shape[each.labels.index(heads)]
        for kind, each in zip(kinds, before, strict=True)
        if kind is not None
    }
    return (before[0], before[1]) if len(counts) == 1 else (key, value)


def _shared_heads(view: View, key: _Traced, heads: int) -> int:
    kind = view.type(key.ref)
    assert kind is not None
    return kind.shape[key.labels.index(heads)]
