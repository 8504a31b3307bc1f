"""Backward: the walk along the tape from a result to the tensors that it was computed from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from plancompiler.eager.inplace_forms import check_tensor
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tensor import DistTensor, Grads, Leaf, Node, Tensors
from plancompiler.errors import GradientError
from plancompiler.ir import BROADCAST, AttrValue, Broadcast, NdSbp, Partial, Phase
from plancompiler.ir.source import user_line

_NODE = attrgetter("node")
_NUMBER = attrgetter("number")


class OneToOne(ABC):
    """An op of one tensor that is on the tape without a plan; see `Recorded`."""

    kind: str

    def __init__(self, source: TensorSpec, target: TensorSpec) -> None:
        self.source = source
        self.outputs = (target,)

    def backward(
        self,
        node: Node,
        grads: Grads,
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Grads:
        """See `Recorded.backward`."""
        (grad,) = grads
        return (None if grad is None else self.back(grad, create_graph),)

    @abstractmethod
    def back(self, grad: DistTensor, create_graph: bool) -> DistTensor:
        """The gradient of the input."""


def backward(
    roots: Sequence[tuple[DistTensor, DistTensor]],
    wrt: Tensors | None = None,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> list[DistTensor | None]:
    """Walk back from tensors with their gradients.

    With `wrt` the gradients of these tensors are returned and nothing else changes; else every leaf
    on the way adds to its `grad`. GradientError for what has no gradient or cannot be walked again.
    """
    mode = roots[0][0].spec.world.mode
    with mode.phase(Phase.BACKWARD):
        return _walk_back(roots, wrt, retain_graph, create_graph)


def _walk_back(
    roots: Sequence[tuple[DistTensor, DistTensor]],
    wrt: Tensors | None,
    retain_graph: bool,
    create_graph: bool,
) -> list[DistTensor | None]:
    world = roots[0][0].spec.world
    traces = world.mode.traces
    wanted = None if wrt is None else [_place(tensor) for tensor in wrt]
    nodes = _reached([retaken(tensor) for tensor, _ in roots])
    useful = None if wanted is None else _useful(nodes, wanted)
    kept: dict[tuple[int, int], DistTensor] = {}
    grads: dict[Node | Leaf, list[DistTensor | None]] = {}
    recording, world.recording = world.recording, create_graph
    try:
        for tensor, grad in roots:
            _add(grads, tensor, grad)
        for node in nodes:
            arrived = grads.pop(node, None)
            if arrived is None:
                continue
            if node.hooks:
                _run_hooks(node, arrived)
            if wanted is not None:
                for slot, passed in enumerate(arrived):
                    if passed is not None and (id(node), slot) in wanted:
                        kept[id(node), slot] = passed
            if isinstance(node, Leaf):
                if wanted is None and arrived[0] is not None:
                    if traces:
                        world.mode.touched(node, reading=True)
                    node.grad = arrived[0] if node.grad is None else node.grad + arrived[0]
            elif useful is None or id(node) in useful:
                if traces:
                    world.mode.check_reach(node.number, node.op.kind)
                _pass_on(node, arrived, wanted, useful, grads, create_graph)
                if not (retain_graph or create_graph):
                    node.behind = tuple(map(_NODE, node.inputs or ()))
                    node.inputs, node.outputs = None, ()
    finally:
        world.recording = recording
    return [] if wanted is None else [None if key is None else kept.get(key) for key in wanted]


def _add(
    grads: dict[Node | Leaf, list[DistTensor | None]], tensor: DistTensor, grad: DistTensor
) -> None:
    """Add to what has arrived at a tensor."""
    node = tensor.node
    if node is None:
        return
    slot = tensor.slot if node.__class__ is Node else 0
    arrived = grads.get(node)
    if arrived is not None:
        earlier = arrived[slot]
        arrived[slot] = grad if earlier is None else earlier + grad
    elif node.__class__ is not Node or len(node.op.outputs) == 1:
        grads[node] = [grad]
    else:
        arrived = grads[node] = [None] * len(node.op.outputs)
        arrived[slot] = grad


def _pass_on(
    node: Node,
    arrived: Grads,
    wanted: list[tuple[int, int] | None] | None,
    useful: set[int] | None,
    grads: dict[Node | Leaf, list[DistTensor | None]],
    create_graph: bool,
) -> None:
    """Add the gradients of a node's inputs, from those of its outputs."""
    tensors = node.inputs
    if tensors is None:
        raise GradientError(
            "the tape was walked back already, and what it kept is gone",
            op=node.op.kind,
            expected="one backward, or a first one that keeps the tape",
            hint="give the first backward retain_graph=True",
        )
    stale = node.stale
    for tensor in tensors:
        if tensor.more is not None and tensor.changed > node.number:
            stale = True
    if useful is None or wanted is None:
        needed = tuple([tensor.node is not None for tensor in tensors])
    else:
        places = [_place(tensor) for tensor in tensors]
        needed = tuple([key is not None and (key[0] in useful or key in wanted) for key in places])
    if stale:
        raise GradientError(
            "a tensor that the gradient needs was changed in place after it was used",
            op=node.op.kind,
            hint="use the out-of-place form, or change it after backward",
        )
    passed = node.op.backward(node, arrived, needed, create_graph)
    for tensor, grad, wants in zip(tensors, passed, needed, strict=True):
        if wants and grad is not None:
            _add(grads, tensor, grad)


def _place(tensor: DistTensor) -> tuple[int, int] | None:
    """A tensor's place on the tape."""
    node = tensor.node if tensor.more is None else retaken(tensor)
    if node is None:
        return None
    return id(node), 0 if isinstance(node, Leaf) else tensor.slot


_AFTER = 2.0**-20
"""Between a node and one that is put right behind it, before all that was recorded later."""


def retaken(tensor: DistTensor) -> Node | Leaf | None:
    """What reaches a tensor on the tape. A view that was taken before its base was changed in place
    is taken anew: of what the base has become.
    """
    node, more = tensor.node, tensor.more
    if more is None or not isinstance(node, Node) or "base" not in more:
        return node
    changed = more["base"].renamed
    if node.number >= changed:
        return node
    source: DistTensor = more.get("source", more["base"])
    behind, plan = retaken(source), more["by"]
    if plan is None and (node.inputs is None or node.inputs[0] is not source):
        tensor.follow(source)  # the same tensor once more
    elif behind is None:
        tensor.node = None
    else:
        number = max(changed, behind.number) + _AFTER
        tensor.node = Node(node.op if plan is None else plan, (source,), node.outputs, number)
        tensor.slot = 0
    return tensor.node


def _reached(starts: Sequence[Node | Leaf | None]) -> list[Node | Leaf]:
    """All nodes behind these, the newest first."""
    seen: dict[Node | Leaf, None] = {}  # in an order that is the same on all ranks
    pending = [node for node in starts if node is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen[node] = None
        if node.__class__ is Node:
            if node.inputs is None:
                pending.extend([each for each in node.behind if each is not None])
                continue
            for tensor in node.inputs:
                behind = tensor.node if tensor.more is None else retaken(tensor)
                if behind is not None and behind not in seen:
                    pending.append(behind)
    return sorted(seen, key=_NUMBER, reverse=True)


def _useful(nodes: Sequence[Node | Leaf], wanted: list[tuple[int, int] | None]) -> set[int]:
    """Ids of the nodes that lead to something wanted."""
    places = {key for key in wanted if key is not None}
    ends = {number for number, _ in places}
    useful: set[int] = set()
    for node in reversed(nodes):
        if not isinstance(node, Node):
            continue
        inputs = node.inputs
        if inputs is None:
            # Walked back already: a gradient that comes here is refused.
            leads = any(id(each) in useful or id(each) in ends for each in node.behind)
        else:
            keys = [_place(tensor) for tensor in inputs]
            leads = any(
                key is not None and (key in places or key[0] in useful) for key in keys
            ) or _lost(node, inputs)
        if leads:
            useful.add(id(node))
    return useful


def _lost(node: Node, tensors: Tensors) -> bool:
    """Whether a change in place has given an input another place on the tape, so that nobody knows
    what is behind the node; a gradient that comes to it is refused.
    """
    return any(tensor.renamed > node.number for tensor in tensors)


def _run_hooks(node: Node | Leaf, grads: list[DistTensor | None]) -> None:
    hooks = [(0, hook) for hook in node.hooks] if isinstance(node, Leaf) else list(node.hooks or ())
    for slot, hook in hooks:
        grad = grads[slot]
        if grad is not None:
            replaced = hook(grad)
            if replaced is not None:
                grads[slot] = _checked(replaced, grad)


def _checked(replaced: Any, grad: DistTensor) -> DistTensor:
    """What a hook gives in place of a gradient; GradientError where it cannot be one."""
    checked: DistTensor = replaced
    spec = getattr(replaced, "spec", None)
    if not isinstance(spec, TensorSpec) or not spec.same_but_layout(grad.spec):
        raise GradientError(
            "a hook gave what cannot take the place of the gradient",
            op="hook",
            source=user_line(),
            got=type(replaced).__name__ if spec is None else str(spec),
            expected=f"None, or a tensor like {grad.spec}, in any layout",
        )
    return checked


def gradient_layout(layout: NdSbp, grad: NdSbp) -> NdSbp:
    """The layout in which a change of layout hands on a gradient.

    Of a partial value it is broadcast, of a split value it is split likewise, and of a broadcast
    value it stays as it came: a partial one is reduced when it is needed whole.
    """
    return NdSbp(
        tuple(
            BROADCAST
            if isinstance(entry, Partial)
            else got
            if isinstance(entry, Broadcast)
            else entry
            for entry, got in zip(layout, grad, strict=True)
        )
    )


def seed(tensor: DistTensor, grad: DistTensor | None) -> DistTensor:
    """The gradient to walk back from a tensor with, checked; one for a scalar."""
    spec, world = tensor.spec, tensor.spec.world
    if tensor.node is None:
        np.shape(tensor.local)  # a tensor kept from a compiled function says so
        raise GradientError(
            "the tensor was made of nothing that wants a gradient",
            source=user_line(),
            got=str(spec),
            hint="set requires_grad on what to differentiate by, outside of pc.no_grad()",
        )
    if grad is None:
        if math.prod(spec.shape) != 1:
            raise GradientError(
                "backward from a tensor that is no scalar needs a gradient",
                source=user_line(),
                got=f"shape {spec.shape}",
                hint="reduce it first, for example with .mean(), or give backward(grad)",
            )
        whole = world.whole(spec)
        if world.mode.traces:
            attrs: dict[str, AttrValue] = {
                "shape": spec.shape,
                "dtype": str(spec.dtype),
                "value": 1.0,
            }
            made: DistTensor = world.source(spec.placement, "fill", attrs)[0]
            return made
        return DistTensor(whole, whole.space.full(whole.local_shape, 1, whole.numpy_dtype))
    check_tensor("backward", grad)
    if not grad.spec.same_but_layout(spec):
        raise GradientError(
            "the gradient given to backward does not fit the tensor",
            source=user_line(),
            got=str(grad.spec),
            expected=str(spec),
        )
    return grad
