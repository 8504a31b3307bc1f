"""Rewrites of graphs of StableHLO: what a person would have written in place of several operations.

    attention       two products with a softmax between them
    random numbers  a floating number that is put together out of its bits
    softmax         exponentials over their sum, and the logarithm of that
    layer norm      differences from the mean, over the root of their mean square; so RMSNorm
    broadcasts      an operand that was made as large as others only to be combined with them

Softmax and norms are wanted whole because a gradient of theirs is one operation: of the pieces,
each has partial sums of its own where a model is split. A pattern that does not match in every
detail is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from plancompiler.importers.attention_recognition import (
    HIDDEN,
    Product,
    are_copies,
    with_attention,
)
from plancompiler.importers.graph import Array, Graph, Node, Ref, live_nodes
from plancompiler.importers.imported_module import without_repeats
from plancompiler.importers.recognition import View
from plancompiler.importers.stablehlo_rules import BROADCASTING
from plancompiler.ir import TensorType

Rewrite = Callable[["_View", Node], Node | None]


def recognized(graph: Graph) -> Graph:
    """The graph with these patterns replaced, without nodes that nobody needs."""
    for rewrite in (_float_of_bits, _softmax, _log_softmax, _layer_norm):
        view = _View(graph)
        nodes = tuple(rewrite(view, node) or node for node in graph.nodes)
        graph = replace(graph, nodes=nodes)
        graph = replace(graph, nodes=live_nodes(graph))
    return _without_broadcasts(with_attention(graph, _Operations(), "imported.attention"))


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


# --- statistics of rows ---------------------------------------------------------------------------


def _statistic(view: _View, value: Any, whole: TensorType, axis: int) -> Any:
    """What a value is along all axes but one, along which it is repeated for a tensor of type
    `whole`; None if it is not like this.
    """
    wanted = tuple(extent for at, extent in enumerate(whole.shape) if at != axis)
    others = [at for at in range(len(whole.shape)) if at != axis]
    every = [*range(len(whole.shape))]
    while True:
        kind = view.type(value)
        if kind is None:
            return None
        if kind.shape == wanted and len(wanted) < len(whole.shape):
            return value
        node = view.maker(value, "stablehlo.broadcast_in_dim", "stablehlo.reshape")
        if node is None:
            return None
        dims = node.kwargs.get("broadcast_dimensions")
        source = view.type(node.args[0])
        apart = (*wanted[:axis], 1, *wanted[axis:])
        if source is None or kind.shape not in (whole.shape, apart):
            return None
        if dims == every:
            fits = source.shape == apart
        else:
            fits = source.shape == wanted and (
                dims == others or (dims is None and kind.shape == apart)
            )
        if not fits:
            return None
        value = node.args[0]


def _column(view: _View, value: Any, whole: TensorType) -> Any:
    """A vector that is repeated along all axes but the last; None for anything else."""
    last = len(whole.shape) - 1
    while True:
        kind = view.type(value)
        if kind is None:
            return None
        if kind.shape == whole.shape[-1:]:
            return value
        node = view.maker(value, "stablehlo.broadcast_in_dim", "stablehlo.reshape")
        source = view.type(node.args[0]) if node is not None else None
        if node is None or source is None or source.shape[-1:] != whole.shape[-1:]:
            return None
        dims = node.kwargs.get("broadcast_dimensions")
        if (dims is not None and dims[-1:] != [last]) or kind.shape[-1:] != whole.shape[-1:]:
            return None
        value = node.args[0]


def _reduced(view: _View, value: Any, region: str, axis: int) -> Any:
    """What is reduced along one axis, from the number that changes nothing."""
    node = view.maker(value, "stablehlo.reduce")
    if node is None or node.kwargs.get("region") != region:
        return None
    first = view.graph.constants.get(node.args[1].name) if isinstance(node.args[1], Ref) else None
    neutral = {"add": 0.0, "maximum": -np.inf}[region]
    if len(node.args) != 2 or node.kwargs["dimensions"] != [axis] or first is None:
        return None
    return node.args[0] if first.size == 1 and first.item() == neutral else None


def _mean(view: _View, value: Any, whole: TensorType) -> Any:
    """What has this mean along the last axis of a tensor of type `whole`."""
    last = len(whole.shape) - 1
    count = whole.shape[last]

    def divided(node: Node | None) -> Any:
        if node is None:
            return None
        if node.target == "stablehlo.divide" and node.args[1] == float(count):
            return node.args[0]
        if node.target == "stablehlo.multiply" and (
            node.args[1] == float(np.float32(1 / count)) or node.args[1] == 1 / count
        ):
            return node.args[0]
        return None

    # The division may come before the mean is repeated, or after.
    inner = _statistic(view, value, whole, last)
    if inner is not None:
        before = divided(view.maker(inner))
        if before is not None:
            return _reduced(view, before, "add", last)
    after = divided(view.maker(value))
    if after is None:
        node = view.maker(value, "stablehlo.broadcast_in_dim")
        if node is None or node.kwargs["broadcast_dimensions"] != [*range(last + 1)]:
            return None
        after = divided(view.maker(node.args[0]))
    total = None if after is None else _statistic(view, after, whole, last)
    return None if total is None else _reduced(view, total, "add", last)


# --- softmax --------------------------------------------------------------------------------------


def _shifted(view: _View, value: Any) -> tuple[Any, int] | None:
    """x and the axis, of x minus its maximum along the axis."""
    node = view.maker(value, "stablehlo.subtract")
    whole = None if node is None else view.type(node.args[0])
    if node is None or whole is None:
        return None
    for axis in range(len(whole.shape)):
        top = node.args[1]
        while True:
            inner = _statistic(view, top, whole, axis)
            passing = view.maker(
                top if inner is None else inner, "custom_call.plancompiler.stop_gradient"
            )
            if passing is None:
                break
            top = passing.args[0]
        if inner is None:
            # The gradient is stopped between two broadcasts.
            step = view.maker(top, "stablehlo.broadcast_in_dim")
            stop = (
                None
                if step is None
                else view.maker(step.args[0], "custom_call.plancompiler.stop_gradient")
            )
            if (
                step is None
                or stop is None
                or step.kwargs["broadcast_dimensions"] != [*range(len(whole.shape))]
            ):
                continue
            inner = _statistic(view, stop.args[0], whole, axis)
        if inner is not None and _greatest(view, inner, node.args[0], axis):
            return node.args[0], axis
    return None


def _greatest(view: _View, value: Any, x: Any, axis: int) -> bool:
    """Whether a value is the maximum of x along an axis, or was before both were transposed."""
    if _reduced(view, value, "maximum", axis) == x:
        return True
    turned = [view.maker(each, "stablehlo.transpose") for each in (value, x)]
    if turned[0] is None or turned[1] is None:
        return False
    order = list(turned[1].kwargs["permutation"])
    before = order.pop(axis)
    same = turned[0].kwargs["permutation"] == [each - (each > before) for each in order]
    greatest = _reduced(view, turned[0].args[0], "maximum", before)
    return same and bool(greatest == turned[1].args[0])


def _softmax(view: _View, node: Node) -> Node | None:
    """exp(x - max) over its sum."""
    whole = node.types[0]
    if node.target != "stablehlo.divide" or whole is None:
        return None
    powers = view.maker(node.args[0], "stablehlo.exponential")
    shifted = None if powers is None else _shifted(view, powers.args[0])
    if shifted is None:
        return None
    x, axis = shifted
    total = _statistic(view, node.args[1], whole, axis)
    if total is None or _reduced(view, total, "add", axis) != node.args[0]:
        return None
    return replace(node, target="imported.softmax", args=(x,), kwargs={"axis": axis})


def _log_softmax(view: _View, node: Node) -> Node | None:
    """x - max, minus the logarithm of the sum of its exponentials."""
    whole = node.types[0]
    if node.target != "stablehlo.subtract" or whole is None:
        return None
    shifted = _shifted(view, node.args[0])
    if shifted is None:
        return None
    x, axis = shifted
    value = node.args[1]
    step = view.maker(value, "stablehlo.broadcast_in_dim")
    if step is not None and view.maker(step.args[0], "stablehlo.log") is not None:
        value = step.args[0]
    logarithm = view.maker(value, "stablehlo.log")
    if logarithm is None:
        inner = _statistic(view, node.args[1], whole, axis)
        logarithm = view.maker(inner, "stablehlo.log")
    if logarithm is None:
        return None
    total = _statistic(view, logarithm.args[0], whole, axis)
    powers = view.maker(_reduced(view, total, "add", axis), "stablehlo.exponential")
    if powers is None or powers.args[0] != node.args[0]:
        return None
    return replace(node, target="imported.log_softmax", args=(x,), kwargs={"axis": axis})


# --- norms ----------------------------------------------------------------------------------------


def _layer_norm(view: _View, node: Node) -> Node | None:
    """Centred or not, over the root of the mean square, times a vector, plus a vector."""
    whole = node.types[0]
    if node.target not in ("stablehlo.add", "stablehlo.multiply") or whole is None:
        return None
    bias: Any = None
    product: Any = Ref(node.name)
    if node.target == "stablehlo.add":
        columns = [_column(view, each, whole) for each in node.args]
        if columns.count(None) != 1:
            return None
        at = columns.index(None)
        product, bias = node.args[at], columns[1 - at]
    factors = _factors(view, product, whole)
    scales = [each for each, below in factors if _column(view, each, whole) and not below]
    if len(factors) != 3 or len(scales) != 1:
        return None
    scale = _column(view, scales[0], whole)
    first, second = (each for each in factors if each[0] is not scales[0])
    for (x, below), (root, divides) in ((first, second), (second, first)):
        matched = None if below else _normalized(view, x, root, divides, whole)
        if matched is None:
            continue
        source, eps, centred = matched
        types = [view.type(each) for each in (source, scale, bias) if each is not None]
        if any(kind is None or kind.dtype is not whole.dtype for kind in types):
            return None
        if not centred and bias is not None:
            return None
        args = (source, scale, bias, eps) if centred else (source, scale, eps)
        target = "imported.layer_norm" if centred else "imported.rms_norm"
        return replace(node, target=target, args=args, kwargs={})
    return None


def _factors(view: _View, value: Any, whole: TensorType) -> list[tuple[Any, bool]]:
    """The factors of a product, and whether each divides it."""
    node = view.maker(value, "stablehlo.multiply", "stablehlo.divide")
    if node is None or view.type(value) != whole:
        return [(value, False)]
    first, second = node.args
    if node.target == "stablehlo.divide":
        return [*_factors(view, first, whole), (second, True)]
    return [*_factors(view, first, whole), *_factors(view, second, whole)]


def _spread(view: _View, value: Any) -> Any:
    """What a value was before it was repeated."""
    node = view.maker(value, "stablehlo.broadcast_in_dim", "stablehlo.reshape")
    while node is not None:
        value = node.args[0]
        node = view.maker(value, "stablehlo.broadcast_in_dim", "stablehlo.reshape")
    return value


def _normalized(
    view: _View, x: Any, root: Any, divides: bool, whole: TensorType
) -> tuple[Any, float, bool] | None:
    """x, eps and whether it was centred, of a tensor and the reciprocal root of its mean square and
    eps along the last axis, or the root if that divides it.
    """
    last = len(whole.shape) - 1
    inner = root
    if _statistic(view, root, whole, last) is None:
        # All steps between are repetitions along the last axis, as their sources have extent 1.
        step = view.maker(root, "stablehlo.broadcast_in_dim")
        if step is None or step.kwargs["broadcast_dimensions"] != [*range(last + 1)]:
            return None
        source = view.type(step.args[0])
        if source is None or source.shape != (*whole.shape[:-1], 1):
            return None
        inner = step.args[0]
    else:
        inner = _statistic(view, root, whole, last)
    made = view.maker(inner, "stablehlo.sqrt" if divides else "stablehlo.rsqrt")
    added = None if made is None else view.maker(made.args[0], "stablehlo.add")
    if added is None or not isinstance(added.args[1], float):
        return None
    eps, square = added.args[1], added.args[0]
    centred = view.maker(x, "stablehlo.subtract")
    if centred is not None and _mean(view, centred.args[1], whole) == centred.args[0]:
        source = centred.args[0]
        return (source, eps, True) if _is_variance(view, square, source, whole) else None
    return (x, eps, False) if _squared(view, _mean(view, square, whole)) == x else None


def _squared(view: _View, value: Any) -> Any:
    """What is squared."""
    node = view.maker(value, "chlo.square", "imported.square", "stablehlo.multiply")
    if node is None or (node.target == "stablehlo.multiply" and node.args[0] != node.args[1]):
        return None
    return node.args[0]


def _is_variance(view: _View, value: Any, x: Any, whole: TensorType) -> bool:
    """Whether a value is the mean square of x less its mean, or the mean square less the square of
    the mean, and then at least 0.
    """
    inner = _squared(view, _mean(view, value, whole))
    less = view.maker(inner, "stablehlo.subtract")
    if less is not None and less.args[0] == x and _mean(view, less.args[1], whole) == x:
        return True
    bound = view.maker(_spread(view, value), "stablehlo.maximum")
    if bound is None or 0.0 not in bound.args:
        return False
    if _statistic(view, value, whole, len(whole.shape) - 1) != Ref(bound.name):
        return False
    rest = next((each for each in bound.args if each != 0.0), None)
    less = view.maker(rest, "stablehlo.subtract")
    if less is None:
        return False
    mean = _squared(view, less.args[1])
    squares = _squared(view, _mean(view, less.args[0], whole))
    return bool(squares == x and _mean(view, mean, whole) == x)


# --- attention ------------------------------------------------------------------------------------


class _Operations:
    """See `attention_recognition.Dialect`."""

    def product(self, view: View, node: Node) -> Product | None:
        if node.target != "stablehlo.dot_general":
            return None
        numbers = node.kwargs["dot_dimension_numbers"]
        common, summed = (
            [
                *zip(
                    *(numbers.get(f"{side}_{kind}_dimensions", []) for side in ("lhs", "rhs")),
                    strict=True,
                )
            ]
            for kind in ("batching", "contracting")
        )
        kinds = [view.type(each) for each in node.args]
        if any(
            kind is None or node.types[0] is None or kind.dtype is not node.types[0].dtype
            for kind in kinds
        ):
            return None
        return Product(node.args[0], node.args[1], common, summed)

    def softmax(self, view: View, node: Node) -> tuple[Ref, int] | None:
        if node.target != "imported.softmax":
            return None
        return node.args[0], node.kwargs["axis"]

    def scaled(self, view: View, node: Node) -> tuple[Ref, float] | None:
        if node.target not in ("stablehlo.multiply", "stablehlo.divide"):
            return None
        first, second = node.args
        if isinstance(second, float) and isinstance(first, Ref):
            return first, second if node.target == "stablehlo.multiply" else 1 / second
        if isinstance(first, float) and node.target == "stablehlo.multiply":
            return second, first
        return None

    def turned(self, view: View, node: Node) -> tuple[Ref, Sequence[int]] | None:
        if node.target != "stablehlo.transpose":
            return None
        return node.args[0], node.kwargs["permutation"]

    def masked(self, view: View, node: Node) -> tuple[Ref, Array] | None:
        kind, constants = node.types[0], view.graph.constants
        if kind is None:
            return None
        if node.target == "stablehlo.add":
            for x, mask in (node.args, node.args[::-1]):
                if isinstance(mask, Ref) and mask.name in constants and view.type(x) is not None:
                    return x, constants[mask.name]
        if node.target == "stablehlo.select" and isinstance(node.args[0], Ref):
            chosen = constants.get(node.args[0].name)
            for x, other, turned in ((*node.args[1:], False), (*node.args[:0:-1], True)):
                hides = isinstance(other, float) and other < HIDDEN
                if chosen is not None and hides and view.type(x) == kind:
                    zero = np.zeros((), kind.dtype.numpy)
                    small = without_repeats(chosen) != turned
                    return x, np.where(small, zero, np.array(-np.inf, zero.dtype))
        return None

    def copied(self, view: View, node: Node, axis: int) -> Ref | None:
        copies = view.maker(node.args[0]) if node.target == "stablehlo.reshape" else None
        if copies is None or copies.target != "stablehlo.broadcast_in_dim":
            return None
        source, many, merged = view.type(copies.args[0]), copies.types[0], node.types[0]
        if source is None or many is None:
            return None
        dims = copies.kwargs["broadcast_dimensions"]
        if dims == [each for each in range(len(many.shape)) if each != axis + 1]:
            ref: Ref = copies.args[0]
        else:  # it had an axis for the copies before
            apart = view.maker(copies.args[0], "stablehlo.reshape", "stablehlo.broadcast_in_dim")
            if apart is None or dims != [*range(len(many.shape))]:
                return None
            ref = apart.args[0]
            inner = apart.kwargs.get("broadcast_dimensions")
            if inner not in (None, [each for each in dims if each != axis + 1]):
                return None
        source = view.type(ref)
        if source is None:
            return None
        shape = (*source.shape[: axis + 1], 1, *source.shape[axis + 1 :])
        return (
            ref if are_copies(axis, source, TensorType(shape, source.dtype), many, merged) else None
        )


# --- broadcasts -----------------------------------------------------------------------------------


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
