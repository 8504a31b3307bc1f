"""Changes in place: a tensor keeps its identity and layout, and takes another value.

Where a gradient is wanted, the tensor goes on as the result of the op that made the new value: what
it was before stays on the tape under a name of its own. What cannot be recorded rightly is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from plancompiler.eager.tape import Leaf, Node
from plancompiler.eager.tensor import DistTensor
from plancompiler.errors import InplaceError, UsageError
from plancompiler.ir.source import user_line

_OWN_REFERENCES = 2
"""To an array that only its tensor holds: the tensor's, and that of who counts."""


def change(tensor: DistTensor, make: Callable[[DistTensor], DistTensor], what: str) -> DistTensor:
    """Let a tensor take the value that `make` makes of it, and return the tensor.

    InplaceError where the value has another shape, dtype or layout, where the tensor is read-only,
    and where a gradient would be lost.
    """
    spec, world = tensor.spec, tensor.spec.world
    tracing = world.tracing
    if isinstance(tensor.node, Leaf) and world.recording:
        raise InplaceError(
            "a tensor on the tape cannot be changed in place",
            source=user_line(),
            got=str(spec),
            hint="use the out-of-place form, or `with pc.no_grad():`",
        )
    before = tensor
    alone = _holds_alone(tensor)
    moves = alone and (tracing is None or tracing.made(tensor))
    inner = isinstance(tensor.node, Node) and world.recording
    if world.recording:
        if tracing is not None:
            before = tracing.copied(tensor)
        elif inner and not alone:
            before = DistTensor(spec, tensor.local.copy())
        else:
            before = DistTensor(spec, tensor.local)
        if inner:
            before.node, before.slot = tensor.node, tensor.slot
    found = make(before)
    if found.spec is not spec:
        raise InplaceError(
            f"{what} in place would change the tensor's shape, dtype or layout",
            source=user_line(),
            got=str(found.spec),
            expected=str(spec),
            hint="write x = x + y, or redistribute the other operand first",
        )
    recorded = found.node is not None and world.recording
    if recorded and (tensor.is_view or (tensor.node is None and not alone)):
        raise InplaceError(
            "a tensor that shares its memory cannot take a value that wants a gradient: the others "
            "would not know of the gradient",
            source=user_line(),
            got=str(spec),
            hint="use the out-of-place form, or `with pc.no_grad():`",
        )
    if (inner or recorded) and moves:
        # The tape keeps what the memory held: the tensor goes on in that of its new value.
        tensor.node = None
        if found.more is None:
            tensor.local = found.local
        else:
            tensor.local = found.local.copy() if tracing is None else tracing.copied(found).local
        tensor.written()
    else:
        put(tensor, found)
    if recorded:
        tensor.node = found.node
        tensor.slot = found.slot if isinstance(found.node, Node) else 0
    elif world.recording:
        tensor.node = None
    return tensor


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
        if tensor.more is not None:
            tensor.own()
        if not tensor.local.flags.writeable:
            raise InplaceError(
                "an expanded tensor cannot be changed in place: elements share memory",
                source=user_line(),
                got=str(tensor.spec),
                hint="write into a copy: x * 1",
            )
        np.copyto(tensor.local, value.local)
    tensor.written()


def into(out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` with its results in existing tensors, which are returned.

    `out` is a tensor, or a list or tuple of tensors like what the function returns; None there
    leaves a result out. InplaceError for a result of another shape, dtype or layout than its
    tensor, and where a gradient would be lost; UsageError where results and tensors do not pair up.
    """
    found = function(*args, **kwargs)
    name = getattr(function, "__name__", "a function")
    if isinstance(out, DistTensor) and isinstance(found, DistTensor):
        return change(out, partial(_given, found), name)
    pairs = isinstance(out, (list, tuple)) and isinstance(found, (list, tuple))
    if not pairs or len(out) != len(found):
        raise UsageError(
            f"the results of {name} do not pair up with the tensors given for them",
            source=user_line(),
            got=_described(found),
            expected=_described(out),
        )
    for target, value in zip(out, found, strict=True):
        if target is None or value is None:
            continue
        change(target, partial(_given, value), name)
    return out


def _fresh(value: DistTensor) -> DistTensor:
    """A value with a place of its own on the tape, if it is there at all."""
    if value.node is None or not value.spec.world.recording:
        return value
    return value.reshape(value.shape)


def _given(value: DistTensor, before: DistTensor) -> DistTensor:
    """A value that does not depend on what was there before."""
    return _fresh(value)


def copied(value: DistTensor, tensor: DistTensor) -> DistTensor:
    """A value in a tensor's layout, to be put there."""
    return _fresh(value.redistribute(sbp=tensor.sbp))


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} of them"
    return str(value.spec) if isinstance(value, DistTensor) else type(value).__name__
