"""Where the variables of a plan lie: in the memory of the tensors that they are, where that can be.

Nothing of what lies so is copied in a call, however many plans use the tensor. Other variables have
a place in the plan's own memory, and are copied there before a run and, where the function changes
them, back after it: what peers read (they map that memory, or have it sent), partial values (they
are reduced first), and tensors that are others in every call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.eager import DistTensor
from plancompiler.eager.materialized_view import MaterializedView
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tape import Node
from plancompiler.errors import TracingError
from plancompiler.ir.source import user_line
from plancompiler.jit.compiled_run import CompiledRun
from plancompiler.ops.registry import Array

PATIENCE = 3
"""In how many calls in a row a tensor's memory may be another than in the call before; from then on
it is copied. One is enough for arguments, which lie in the plan's memory until one comes twice.
"""

_NATIVE = "biufc"
"""Kinds of dtypes that the array interface can name."""
_OWN_REFERENCES = 2
"""To an array that only its tensor holds: the tensor's, and that of who counts."""


class _Memory:
    """What a tensor's array lies in while plans work on it.

    Plans hold the memory, and the tensor an array of its own over it, of which views are views. So
    who counts the references to the tensor's array, to find out whether others share it, finds
    everybody but the plans.
    """

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


_NOWHERE: Any = object()


@dataclass(frozen=True, slots=True)
class VariableUse:
    """A variable of a job, and what the function does with it."""

    name: str
    spec: TensorSpec
    """How the variable holds the tensor."""
    changed: bool
    given: bool
    """Whether it is an argument, or a gradient: another tensor in every call, as a rule."""


class _Place:
    """Where one variable lies on this rank."""

    __slots__ = ("array", "memory", "movable", "seen", "since", "strikes", "use")

    def __init__(self, use: VariableUse, movable: bool) -> None:
        self.use = use
        self.movable = movable
        self.array: Array = _NOWHERE
        """The array that the plan works on; nowhere for the plan's own."""
        self.memory: object = _NOWHERE
        """What the tensor's array lies in, where it has one of its own."""
        self.since = 0
        """The call in which it was last moved."""
        self.strikes = 0
        self.seen = 0
        """Which argument it was in the call before, by id."""

    def found(self, tensor: DistTensor, call: int) -> Array | None:
        """The array of a tensor for the plan to work on; None where it has to be copied."""
        before, self.array, self.memory = self.array, _NOWHERE, _NOWHERE
        if not self.movable or isinstance(tensor, MaterializedView):
            return None
        if self.use.given and before is _NOWHERE and self.seen != id(tensor):
            self.seen = id(tensor)
            return None
        if before is not _NOWHERE and call <= self.since + 1:
            self.strikes += 1
            if self.strikes >= (1 if self.use.given else PATIENCE):
                self.movable = False
                return None
        self.since = call
        if tensor.spec is not self.use.spec:
            return None
        if isinstance(tensor.node, Node):
            return None  # the tape knows what it kept by the array
        alone = not tensor.is_view and sys.getrefcount(tensor.local) <= _OWN_REFERENCES
        local = tensor.local
        flags = local.flags
        if local.__class__ is not np.ndarray or not (
            flags.c_contiguous and flags.aligned and flags.writeable
        ):
            return None
        memory: Any = local.base
        if memory.__class__ is _Memory:  # another plan works on it, too
            self.memory = memory
            self.array = memory.array
        elif alone and local.dtype.kind in _NATIVE:
            self.memory = memory = _Memory(local)
            self.array = local
            tensor.local = np.asarray(memory)
        elif tensor.requires_grad:  # nobody counts who shares a leaf's memory
            self.array = local
        else:
            return None
        return self.array


class Variables:
    """The variables of one rank's plan, which are tensors outside of it."""

    def __init__(self, run: CompiledRun, uses: Sequence[VariableUse]) -> None:
        self._run = run
        shards, movable = run.shards, run.movable
        self._places = [
            (at, _Place(use, use.name in movable))
            for at, use in enumerate(uses)
            if use.name in shards
        ]
        self._changes = any(use.changed for use in uses)
        self._owners: dict[int, _Place] = {}
        """Of the memory of tensors in which variables lie, by id."""
        self._call = 0
        self._copied: list[tuple[_Place, DistTensor]] = []
        """What lies in the plan's own memory in this call."""

    def enter(self, tensors: Sequence[DistTensor]) -> None:
        """Let the plan have these tensors, aligned with the uses, in its next run.

        TracingError where one that the function changes shares memory with another.
        """
        self._call += 1
        elsewhere = []
        for at, place in self._places:
            tensor = tensors[at]
            if tensor.local is not place.array and tensor.local.base is not place.memory:
                elsewhere.append((place, tensor))
        self._copied = self._settled(elsewhere) if elsewhere else elsewhere
        shards = self._run.shards
        for place, tensor in self._copied:
            np.copyto(shards[place.use.name], _whole(tensor, place.use.spec))

    def leave(self) -> None:
        """Give the tensors what the run has made of them."""
        for place, tensor in self._copied:
            if place.use.changed:
                spec, array = place.use.spec, self._run.shards[place.use.name]
                if tensor.spec is not spec:
                    array = spec.world.move(spec, tensor.spec)(array)
                np.copyto(tensor.local, array)

    def _settled(
        self, elsewhere: Sequence[tuple[_Place, DistTensor]]
    ) -> list[tuple[_Place, DistTensor]]:
        """Work on the memory of those tensors where that can be; the others are returned."""
        moves: dict[str, Array | None] = {}
        copied = []
        for place, tensor in elsewhere:
            if place.use.changed and tensor.more is not None:
                tensor.own()
            before = place.array
            found = place.found(tensor, self._call)
            if found is None:
                copied.append((place, tensor))
            if found is not None or before is not _NOWHERE:
                moves[place.use.name] = found
        if moves and self._changes:
            self._owners = self._owners_of_places()
        if copied and self._changes:
            self._check_apart(copied)
        if moves:
            self._run.place(moves)
        return copied

    def _owners_of_places(self) -> dict[int, _Place]:
        found: dict[int, _Place] = {}
        for _, place in self._places:
            if place.array is not _NOWHERE:
                _add(found, place.array, place)
        return found

    def _check_apart(self, copied: Sequence[tuple[_Place, DistTensor]]) -> None:
        here: dict[int, _Place] = {}
        for place, tensor in copied:
            shared = tensor.root if isinstance(tensor, MaterializedView) else tensor
            _refuse_both(place, self._owners.get(_owner(shared.local)))
            _add(here, shared.local, place)


def _add(owners: dict[int, _Place], array: Array, place: _Place) -> None:
    _refuse_both(place, owners.setdefault(_owner(array), place))


def _refuse_both(place: _Place, other: _Place | None) -> None:
    """Refuse two variables with one memory, if the function changes one of them."""
    if other is None or other is place or not (place.use.changed or other.use.changed):
        return
    raise TracingError(
        "a compiled function changes a tensor whose memory it also reads as another tensor",
        source=user_line(),
        got=f"{other.use.spec} and {place.use.spec}",
        hint="use views inside of the function only, or copy one of the tensors",
    )


def _owner(array: Any) -> int:
    """What tells apart arrays that own their memory."""
    while True:
        base = array.base
        if base.__class__ is _Memory:
            base = base.array
        if not isinstance(base, (np.ndarray, array.__class__)):
            return id(array)
        array = base


def _whole(tensor: DistTensor, spec: TensorSpec) -> Any:
    """This rank's part as the variable holds it: partial values are reduced, once."""
    if tensor.spec is spec:
        return tensor.local
    return tensor.moved(spec, spec.world.move(tensor.spec, spec))
