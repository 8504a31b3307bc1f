"""Changes in place: a tensor keeps its identity and layout, and takes another value.

If a gradient is wanted, the tensor becomes, on the tape, the result of the op that made the new
value; the old value stays on the tape as a tensor of its own. A change that cannot be recorded
correctly raises an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.eager.inplace_forms import check_tensor
from plancompiler.eager.materialized_view import MaterializedView, replaced
from plancompiler.eager.redistribution import Redistribution
from plancompiler.eager.spec import Mode
from plancompiler.eager.tape import retaken
from plancompiler.eager.tensor import DistTensor, Leaf, Node, Tensors, record
from plancompiler.errors import InplaceError, UsageError
from plancompiler.executor.space import HOST
from plancompiler.ir import DType
from plancompiler.ir.indexing import (
    box_of,
    broadcast,
    held_by,
    masked_value,
    number_in,
    parse_index,
    put_in_box,
)
from plancompiler.ir.operators import is_scalar
from plancompiler.ir.source import user_line
from plancompiler.ops.view import view_of

_OWN_REFERENCES = 2
"""References to an array that only its tensor holds: the tensor's, and the counting function's."""


def change(tensor: DistTensor, make: Callable[[DistTensor], DistTensor], what: str) -> DistTensor:
    """Let a tensor take the value that `make` makes of it, in its own layout; returns the tensor.

    InplaceError where the value has another shape, dtype or placement, where the tensor is
    read-only, and where a gradient would be lost.
    """
    begun = _Change(tensor)
    value = begun.fitted(make(begun.before), what)
    begun.keep_past([value])
    begun.finish(value)
    return tensor


def reform(tensor: DistTensor, make: Callable[[DistTensor], DistTensor], what: str) -> DistTensor:
    """Let a tensor take the shape and layout of the view that `make` makes of it; returns it.

    InplaceError where others share its memory, as their elements would be those of another shape,
    and for a tensor that gradients are added up at.
    """
    begun = _Change(tensor)
    if not begun.alone or isinstance(tensor.node, Leaf):
        raise InplaceError(
            f"{what} would change the shape of memory that others see"
            if not begun.alone
            else f"{what} would change the shape of a tensor whose gradient has the old one",
            source=user_line(),
            got=f"a view of {tensor.base}" if tensor.is_view else str(tensor.spec),
            hint=f"use the out-of-place form: x = x.{what.removesuffix('_')}(...)",
        )
    world = tensor.spec.world
    value = make(begun.before)
    begun.keep_past([value])
    node, tensor.node = tensor.node, None  # what made it is as valid as before
    tensor.written()  # what the tape kept of it as an operand has another shape
    tensor.local = value.local if value.__class__ is DistTensor else begun.mode.own_local(value)
    tensor.spec = value.spec
    tensor.more = {"changed": world.clock}
    if world.recording:
        tensor.follow(value)
    else:
        tensor.node = node
    return tensor


def copy(tensor: DistTensor, value: DistTensor) -> DistTensor:
    """`tensor.copy_(value)`."""
    check_tensor("copy_", value)
    value = broadcast(value, tensor.shape)
    if not value.spec.same_but_layout(tensor.spec):
        raise InplaceError(
            "a tensor can take only the value of a tensor of the same dtype and placement",
            source=user_line(),
            got=str(value.spec),
            expected=str(tensor.spec),
        )
    return change(tensor, lambda _: _fresh(value.redistribute(sbp=tensor.sbp)), "copy_")


def assign(tensor: DistTensor, index: Any, value: Any) -> None:
    """`tensor[index] = value`, a number or a tensor that is broadcast to the elements' shape."""
    if not is_scalar(value):
        value = tensor.coerced("x[index] = value", value)
    if isinstance(index, DistTensor) and index.dtype is DType.BOOL and not index.ndim:
        index = bool(index)
    if isinstance(index, (bool, np.bool_)):
        tensor, index = tensor.reshape((1, *tensor.shape)), slice(0, int(index))
    elif isinstance(index, DistTensor) and index.dtype is DType.BOOL:
        held = held_by(tensor, value)
        if masked_value(tensor, index, held) is not None:

            def masked(before: DistTensor) -> Any:
                return masked_value(before, index, held)

            change(tensor, masked, "x[mask] = value")
            return
    parsed = parse_index(tensor, index)
    if parsed.selected:
        held = held_by(tensor, value)
        change(
            box_of(tensor, parsed),
            lambda before: put_in_box(before, parsed, held),
            "x[index] = value",
        )
        return
    part = tensor[index]
    if is_scalar(value):
        part.fill_(number_in(part.dtype, value))
        return
    if _is_same_view(part, value):
        return  # of `x[index] += y`, which has changed the elements already
    part.copy_(held_by(part, value))


class _Past:
    """Tensors as they were before a change of the memory that they share, for the tape.

    They share it still until `settle` is called.
    """

    def __init__(self, mode: Mode[DistTensor]) -> None:
        self._mode = mode
        self._earlier: dict[int, tuple[DistTensor, DistTensor]] = {}

    def of(self, tensor: DistTensor, *, recorded: bool = False) -> DistTensor:
        """A tensor as it was. What it was made of as a view was so, too; with `recorded`, the tape
        reaches it even where it was made while nothing was recorded.
        """
        known = self._earlier.get(id(tensor))
        if known is not None:
            return known[1]
        node = retaken(tensor)
        earlier = self._mode.copied(tensor)
        self._earlier[id(tensor)] = tensor, earlier
        source = tensor.source if self._mode.made(tensor) else None
        plan = tensor.by
        if source is None or plan is None:
            earlier.follow(tensor)
        elif plan.recorded and (recorded or node is not None):
            before = self.of(source, recorded=recorded)
            if before.node is not None:
                number = node.number if isinstance(node, Node) else tensor.spec.world.tick()
                earlier.node = Node(plan, (before,), (earlier.local,), number)
                earlier.slot = 0
        return earlier

    def settle(self) -> None:
        """Give them memory of their own, and the tape what it keeps of the changed memory."""
        for tensor, earlier in self._earlier.values():
            earlier.local = self._mode.own_local(earlier)
            node = tensor.node
            if isinstance(node, Node) and node is earlier.node:
                node.outputs = tuple(
                    earlier.local if out is tensor.local else out for out in node.outputs
                )
        self._earlier.clear()


class _Change:
    """A tensor that is about to take another value."""

    def __init__(self, tensor: DistTensor) -> None:
        spec, world = tensor.spec, tensor.spec.world
        self.mode = mode = world.mode
        self.tensor = tensor
        self.owner = owner = tensor
        """What is changed where a view is: its base, as far as the tape sees."""
        self.lineage: list[DistTensor] = []
        """The views from the owner to the tensor."""
        while owner.source is not None and mode.made(owner):
            self.lineage.insert(0, owner)
            owner = self.owner = owner.source
        self.recordable = all(each.by is not None for each in self.lineage)
        """Whether changes of a view are recorded: not through what was taken off the tape."""
        changed = owner if self.recordable else tensor
        if isinstance(changed.node, Leaf) and world.recording:
            raise InplaceError(
                "a tensor on the tape cannot be changed in place",
                source=user_line(),
                got=str(spec),
                hint="use the out-of-place form, or `with pc.no_grad():`",
            )
        self.past = _Past(mode)
        self.before = tensor
        """What it was, with a place of its own on the tape."""
        self.alone = not self.lineage and _holds_alone(tensor, ())
        self.inner = isinstance(changed.node, Node) and world.recording
        if world.recording:
            if self.inner and not self.alone:
                self.before = self.past.of(tensor, recorded=self.recordable)
            else:
                self.before = mode.copied(tensor)
            if self.inner and self.alone:
                self.before.follow(tensor)

    def fitted(self, value: DistTensor, what: str) -> DistTensor:
        """A value in the tensor's layout; refuses one that the tensor cannot take."""
        spec, owner = self.tensor.spec, self.owner
        if value.spec is not spec:
            if not value.spec.same_but_layout(spec):
                raise InplaceError(
                    f"{what} in place would change the tensor's shape, dtype or placement",
                    source=user_line(),
                    got=str(value.spec),
                    expected=str(spec),
                    hint="write x = x + y, or cast the other operand first",
                )
            value = value.redistribute(sbp=spec.sbp)
        if (
            value.node is not None
            and spec.world.recording
            and (
                not self.recordable
                or owner.is_view
                or (owner.node is None and not (self.alone or _holds_alone(owner, self.lineage)))
            )
        ):
            raise InplaceError(
                "a tensor that shares its memory cannot take a value that requires a gradient: the "
                "tensors that share it would not be part of the gradient",
                source=user_line(),
                got=str(spec),
                hint="use the out-of-place form, or `with pc.no_grad():`",
            )
        return value

    def keep_past(self, values: Tensors) -> None:
        """Let the ops that were recorded for these values keep the changed tensors' old values."""
        if not self.inner and not (
            self.lineage and any(value.node is not None for value in values)
        ):
            return
        node = self.owner.node
        _read_before(values, self.as_before, node.number if isinstance(node, Node) else 0)

    def as_before(self, tensor: DistTensor) -> DistTensor:
        """The tensor with its value before the change; itself, if the change does not affect it."""
        if tensor is self.tensor:
            return self.before
        root = self.tensor.root
        if tensor is root or tensor.base is root:
            return self.past.of(tensor)
        return tensor

    def settle(self) -> None:
        """Copy the memory that the tape keeps of the tensor, before it is changed."""
        if self.lineage and not self.inner and self.before is not self.tensor:
            self.before.local = self.mode.own_local(self.before)
        self.past.settle()

    def finish(self, value: DistTensor, *, shared: bool = False) -> None:
        """Let the tensor take a value, whose memory others may share."""
        tensor, world = self.tensor, self.tensor.spec.world
        recorded = value.node is not None and world.recording
        if self.lineage and self.recordable and (self.inner or recorded):
            self._finish_view(value)
            return
        moves = self.alone and self.mode.made(tensor)
        if (self.inner or recorded) and moves:
            # The tape keeps what the memory held: the tensor goes on in that of its new value.
            tensor.node = None
            keeps = not shared and value.more is None
            tensor.local = value.local if keeps else self.mode.own_local(value)
            tensor.written()
        else:
            self.past.settle()
            put(tensor, value)
        if recorded:
            tensor.follow(value)
        elif world.recording:
            tensor.node = None
        if world.recording:
            tensor.renamed = world.clock

    def _finish_view(self, value: DistTensor) -> None:
        """The owner becomes what it was, with the value in the view's place; then the views of the
        lineage are taken of it anew.
        """
        _check_writable(self.tensor)
        owner, world = self.owner, self.owner.spec.world
        for view in reversed(self.lineage):
            source = view.source
            assert source is not None
            value = replaced(self.past.of(source, recorded=True), value, view.by)
        self.settle()
        put(owner, value)
        owner.follow(value)
        renamed = world.clock
        for tensor in (owner, *self.lineage):
            tensor.renamed = renamed
        for view in self.lineage:
            source, plan = view.source, view.by
            assert plan is not None
            if source is not None and source.node is not None and plan.recorded:
                view.node = Node(plan, (source,), (view.local,), world.tick())
                view.slot = 0


def _holds_alone(tensor: DistTensor, views: Tensors) -> bool:
    """Whether nobody but the tape and these views of it reads a tensor's memory."""
    if tensor.is_view:
        return False
    return tensor.spec.world.mode.holds_alone(tensor, views)


def holds_alone(tensor: DistTensor, views: Tensors) -> bool:
    """See `Mode.holds_alone`. Views and arrays of users hold the tensor's array, and are counted by
    their references to it. Compiled plans that work on its memory hold it, too, and count as none.
    """
    tensor.own()
    local = tensor.local
    references = sys.getrefcount(local) - 1 - tensor.spec.world.lent[id(local)]
    kept = tensor.node.outputs if isinstance(tensor.node, Node) else ()
    references -= sum(each is local for each in kept)
    for view in views:
        if isinstance(view, MaterializedView):
            references -= 1
        else:
            references -= view.local.base is local
    return references <= _OWN_REFERENCES


def put(tensor: DistTensor, value: DistTensor) -> None:
    """Write a value of the same spec into a tensor's memory, off the tape."""
    _check_writable(tensor)
    tensor.spec.world.mode.put(tensor, value)
    tensor.written()


def write(tensor: DistTensor, value: DistTensor) -> None:
    """See `Mode.put`."""
    source = value.local
    if tensor.spec.space is not HOST and np.may_share_memory(tensor.local, source):
        source = source.copy()  # on devices, copies within one memory have no order
    np.copyto(tensor.local, source)


def _check_writable(tensor: DistTensor) -> None:
    if not tensor.spec.world.mode.traces:
        tensor.own()
    if not all(
        each.by is None or view_of(each.by.kind).writable(each.by.attrs)
        for each in tensor.lineage()
    ):
        raise InplaceError(
            "a view cannot be changed in place where its elements share memory",
            source=user_line(),
            got=str(tensor.spec),
            hint="write into a copy: x * 1",
        )


def _is_same_view(one: DistTensor, other: DistTensor) -> bool:
    """Whether two tensors are the same elements of one tensor, taken by the same ops."""
    while one is not other:
        left, right = one.source, other.source
        if left is None or right is None or one.by is not other.by:
            return False
        one, other = left, right
    return True


def into(out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` with its results in existing tensors, which take their places.

    `out` is a tensor, or a list or tuple of tensors like what the function returns; None there
    leaves a result as it is. The others are redistributed to their tensors' layouts. Returns `out`,
    or where None is in it what the function returns, with the tensors in their places. The tensors
    may be among the function's arguments. InplaceError for a result of another shape, dtype or
    placement than its tensor, and where a gradient would be lost; UsageError where results and
    tensors do not pair up. Then no tensor has changed.
    """
    name = getattr(function, "__name__", "a function")
    targets = _targets(out)
    if not callable(function):
        raise UsageError(
            "into takes a function after the tensors for its results",
            op="into",
            source=user_line(),
            got=type(function).__name__,
            expected="pc.eager.into(out, function, *args)",
        )
    if not targets or len(set(map(id, targets))) < len(targets):
        raise UsageError(
            f"{name} needs a tensor of its own for each result",
            source=user_line(),
            got=f"{len(targets)} places, some for one tensor" if targets else _described(out),
            expected="a DistTensor, or a list or tuple of them for several results",
        )
    changes = {id(tensor): _Change(tensor) for tensor in targets}
    world = targets[0].spec.world
    began = world.clock
    results = function(*args, **kwargs)
    pairs: list[tuple[_Change, DistTensor]] = []
    result = _paired(out, results, name, changes, pairs)
    for at, (begun, value) in enumerate(pairs):
        pairs[at] = begun, begun.fitted(value, name)
        _check_writable(begun.tensor)
    values = [_fresh(_own(value) if len(pairs) > 1 else value) for _, value in pairs]
    if world.recording:
        _read_before(values, _as_before(list(changes.values())), began)
    if len(pairs) > 1:
        for begun, _ in pairs:
            begun.settle()
    for (begun, _), value in zip(pairs, values, strict=True):
        begun.finish(value, shared=True)
    return result


def _targets(out: Any) -> list[DistTensor]:
    """The tensors that take results."""
    if isinstance(out, (list, tuple)):
        return [tensor for each in out for tensor in _targets(each)]
    return [out] if isinstance(out, DistTensor) else []


def _paired(
    out: Any,
    results: Any,
    name: str,
    changes: Mapping[int, _Change],
    pairs: list[tuple[_Change, DistTensor]],
) -> Any:
    """What `into` returns; `pairs` gets what becomes what."""
    if out is None:
        return results
    if isinstance(out, DistTensor) and isinstance(results, DistTensor):
        pairs.append((changes[id(out)], results))
        return out
    several = isinstance(out, (list, tuple)) and isinstance(results, (list, tuple))
    if not several or len(out) != len(results):
        raise UsageError(
            f"the results of {name} do not pair up with the tensors given for them",
            source=user_line(),
            got=_described(results),
            expected=_described(out),
        )
    made = [_paired(*each, name, changes, pairs) for each in zip(out, results, strict=True)]
    if all(new is old for new, old in zip(made, out, strict=True)):
        return out
    return results.__class__(*made) if hasattr(results, "_fields") else results.__class__(made)


def _as_before(changes: Sequence[_Change]) -> Callable[[DistTensor], DistTensor]:
    """What tensors were before several changes."""

    def as_before(tensor: DistTensor) -> DistTensor:
        for change in changes:
            earlier = change.as_before(tensor)
            if earlier is not tensor:
                return earlier
        return tensor

    return as_before


def _read_before(
    values: Tensors, as_before: Callable[[DistTensor], DistTensor], began: float
) -> None:
    """Let what was recorded since then have read the tensors as they were before the change."""
    pending = [value.node for value in values]
    seen = set()
    while pending:
        node = pending.pop()
        if not isinstance(node, Node) or node in seen or node.number <= began:
            continue
        seen.add(node)
        if node.inputs is not None:
            node.inputs = tuple([as_before(each) for each in node.inputs])
            pending += [each.node for each in node.inputs]


def _own(value: DistTensor) -> DistTensor:
    """A value that stays when another tensor is written, on the same place of the tape."""
    mode: Mode[DistTensor] = value.spec.world.mode
    if not (mode.traces or value.is_view):
        return value
    owned = mode.note(DistTensor(value.spec, mode.own_local(value)))
    owned.follow(value)
    return owned


def _fresh(value: DistTensor) -> DistTensor:
    """A value with a place of its own on the tape, if it is there at all."""
    spec, world = value.spec, value.spec.world
    if value.node is None or not world.recording:
        return value
    if world.mode.traces:
        return value.reshape(spec.shape).redistribute(sbp=spec.sbp)
    fresh = DistTensor(spec, value.local)
    fresh.view_of(value)
    record(fresh, Redistribution(spec, spec), value)
    return fresh


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} of them"
    return str(value.spec) if isinstance(value, DistTensor) else type(value).__name__
