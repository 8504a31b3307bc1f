"""Changes in place: a tensor keeps its identity and layout, and takes another value.

Where a gradient is wanted, the tensor goes on as the result of the op that made the new value: what
it was before stays on the tape under a name of its own. What cannot be recorded rightly is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.eager.redistribution import Redistribution
from plancompiler.eager.tape import Leaf, Node, record
from plancompiler.eager.tensor import DistTensor
from plancompiler.errors import InplaceError, UsageError
from plancompiler.executor.space import HOST
from plancompiler.ir.source import user_line

_OWN_REFERENCES = 2
"""To an array that only its tensor holds: the tensor's, and that of who counts."""


def change(tensor: DistTensor, make: Callable[[DistTensor], DistTensor], what: str) -> DistTensor:
    """Let a tensor take the value that `make` makes of it, and return the tensor.

    InplaceError where the value has another shape, dtype or layout, where the tensor is read-only,
    and where a gradient would be lost.
    """
    begun = _Change(tensor)
    found = make(begun.before)
    begun.check(found, what)
    if begun.inner and isinstance(tensor.node, Node):
        _read_before([found], {id(tensor): begun}, tensor.node.number)
    begun.finish(found)
    return tensor


class _Change:
    """A tensor that is about to take another value."""

    __slots__ = ("alone", "before", "inner", "tensor")

    def __init__(self, tensor: DistTensor) -> None:
        spec, world = tensor.spec, tensor.spec.world
        tracing = world.tracing
        if isinstance(tensor.node, Leaf) and world.recording:
            raise InplaceError(
                "a tensor on the tape cannot be changed in place",
                source=user_line(),
                got=str(spec),
                hint="use the out-of-place form, or `with pc.no_grad():`",
            )
        self.tensor = tensor
        self.before = tensor
        """What it was, with a place of its own on the tape."""
        self.alone = _holds_alone(tensor)
        self.inner = isinstance(tensor.node, Node) and world.recording
        if world.recording:
            if tracing is not None:
                self.before = tracing.copied(tensor)
            elif self.inner and not self.alone:
                self.before = DistTensor(spec, tensor.local.copy())
            else:
                self.before = DistTensor(spec, tensor.local)
            if self.inner:
                self.before.node, self.before.slot = tensor.node, tensor.slot

    def check(self, found: DistTensor, what: str) -> None:
        """Refuse a value that the tensor cannot take."""
        tensor, spec = self.tensor, self.tensor.spec
        if found.spec is not spec:
            raise InplaceError(
                f"{what} in place would change the tensor's shape, dtype or layout",
                source=user_line(),
                got=str(found.spec),
                expected=str(spec),
                hint="write x = x + y, or redistribute the other operand first",
            )
        if (
            found.node is not None
            and spec.world.recording
            and (tensor.is_view or (tensor.node is None and not self.alone))
        ):
            raise InplaceError(
                "a tensor that shares its memory cannot take a value that wants a gradient: the "
                "others would not know of the gradient",
                source=user_line(),
                got=str(spec),
                hint="use the out-of-place form, or `with pc.no_grad():`",
            )

    def finish(self, found: DistTensor, *, shared: bool = False) -> None:
        """Let the tensor take a value, whose memory others may share."""
        tensor, world = self.tensor, self.tensor.spec.world
        tracing = world.tracing
        recorded = found.node is not None and world.recording
        moves = self.alone and (tracing is None or tracing.made(tensor))
        if (self.inner or recorded) and moves:
            # The tape keeps what the memory held: the tensor goes on in that of its new value.
            tensor.node = None
            if not shared and found.more is None:
                tensor.local = found.local
            else:
                tensor.local = (
                    found.local.copy() if tracing is None else tracing.copied(found).local
                )
            tensor.written()
        else:
            put(tensor, found)
        if recorded:
            tensor.node = found.node
            tensor.slot = found.slot if isinstance(found.node, Node) else 0
        elif world.recording:
            tensor.node = None
        if world.recording and tensor.more is not None:
            tensor.more["renamed"] = world.clock


def _holds_alone(tensor: DistTensor) -> bool:
    """Whether nobody but the tape reads a tensor's memory."""
    if tensor.is_view:
        return False
    tracing = tensor.spec.world.tracing
    if tracing is not None:
        return bool(tracing.holds_alone(tensor))
    if tensor.more is not None:
        tensor.own()
    kept = tensor.node.outputs if isinstance(tensor.node, Node) else ()
    on_tape = sum(each is tensor.local for each in kept)
    return sys.getrefcount(tensor.local) <= _OWN_REFERENCES + on_tape


def put(tensor: DistTensor, value: DistTensor) -> None:
    """Write a value of the same spec into a tensor's memory, off the tape."""
    tracing = tensor.spec.world.tracing
    if tracing is not None:
        tracing.store(tensor, tracing.value(value))
    else:
        _check_writable(tensor)
        source = value.local
        if tensor.spec.space is not HOST and np.may_share_memory(tensor.local, source):
            source = source.copy()  # on devices, copies within one memory have no order
        np.copyto(tensor.local, source)
    tensor.written()


def _check_writable(tensor: DistTensor) -> None:
    if tensor.more is not None:
        tensor.own()
    if not tensor.spec.space.writable(tensor.local):
        raise InplaceError(
            "an expanded tensor cannot be changed in place: elements share memory",
            source=user_line(),
            got=str(tensor.spec),
            hint="write into a copy: x * 1",
        )


def into(out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` with its results in existing tensors, which take their places.

    `out` is a tensor, or a list or tuple of tensors like what the function returns; None there
    leaves a result as it is. Returns `out`, or where None is in it what the function returns, with
    the tensors in their places. The tensors may be among the function's arguments. InplaceError for
    a result of another shape, dtype or layout than its tensor, and where a gradient would be lost;
    UsageError where results and tensors do not pair up. Then no tensor has changed.
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
    found = function(*args, **kwargs)
    pairs: list[tuple[_Change, DistTensor]] = []
    result = _paired(out, found, name, changes, pairs)
    for begun, value in pairs:
        begun.check(value, name)
        if world.tracing is None:
            _check_writable(begun.tensor)
    values = [_fresh(_own(value) if len(pairs) > 1 else value) for _, value in pairs]
    if world.recording:
        _read_before(values, changes, began)
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
    found: Any,
    name: str,
    changes: Mapping[int, _Change],
    pairs: list[tuple[_Change, DistTensor]],
) -> Any:
    """What `into` returns; `pairs` gets what becomes what."""
    if out is None:
        return found
    if isinstance(out, DistTensor) and isinstance(found, DistTensor):
        pairs.append((changes[id(out)], found))
        return out
    several = isinstance(out, (list, tuple)) and isinstance(found, (list, tuple))
    if not several or len(out) != len(found):
        raise UsageError(
            f"the results of {name} do not pair up with the tensors given for them",
            source=user_line(),
            got=_described(found),
            expected=_described(out),
        )
    made = [_paired(*each, name, changes, pairs) for each in zip(out, found, strict=True)]
    if all(new is old for new, old in zip(made, out, strict=True)):
        return out
    return found.__class__(*made) if hasattr(found, "_fields") else found.__class__(made)


def _read_before(values: Sequence[DistTensor], changes: Mapping[int, _Change], began: int) -> None:
    """Let what was recorded since then have read the tensors as they were before the change."""
    pending = [value.node for value in values]
    seen = set()
    while pending:
        node = pending.pop()
        if not isinstance(node, Node) or node in seen or node.number <= began:
            continue
        seen.add(node)
        if node.inputs is not None:
            node.inputs = tuple(
                changes[id(each)].before if id(each) in changes else each for each in node.inputs
            )
            pending += [each.node for each in node.inputs]


def _own(value: DistTensor) -> DistTensor:
    """A value that stays when another tensor is written, on the same place of the tape."""
    tracing = value.spec.world.tracing
    if tracing is not None:
        found: DistTensor = tracing.copied(value)
    elif value.is_view:
        found = DistTensor(value.spec, value.local.copy())
    else:
        return value
    found.node = value.node
    found.slot = value.slot if isinstance(value.node, Node) else 0
    return found


def _fresh(value: DistTensor) -> DistTensor:
    """A value with a place of its own on the tape, if it is there at all."""
    spec, world = value.spec, value.spec.world
    if value.node is None or not world.recording:
        return value
    if world.tracing is not None:
        return value.reshape(spec.shape).redistribute(sbp=spec.sbp)
    found = DistTensor(spec, value.local)
    found.view_of(value)
    record(found, Redistribution(spec, spec), value)
    return found


def copied(value: DistTensor, tensor: DistTensor) -> DistTensor:
    """A value in a tensor's layout, to be put there."""
    return _fresh(value.redistribute(sbp=tensor.sbp))


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} of them"
    return str(value.spec) if isinstance(value, DistTensor) else type(value).__name__
