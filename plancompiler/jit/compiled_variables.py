"""The memory of a plan's variables: that of their tensors if possible, else the plan's own.

A variable that lies in the memory of its tensor is never copied, however many plans use the tensor.
Other variables lie in the plan's own memory: they are copied there before a run and, if the
function changes them, back after it. These are variables that other ranks read (which map that
memory, or receive it), partial values (which are reduced first), and arguments that are another
tensor in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.eager import DistTensor
from plancompiler.eager.materialized_view import MaterializedView
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tensor import Leaf, Node, Tensors
from plancompiler.eager.tracing import Capture
from plancompiler.errors import TracingError
from plancompiler.ir.source import user_line
from plancompiler.jit.compiled_run import CompiledRun
from plancompiler.ops.registry import Array

PATIENCE = 3
"""After how many calls in a row with changing memory a tensor is copied from then on. One is enough
for arguments, which lie in the plan's memory until the same tensor is passed twice.
"""


@dataclass(slots=True)
class LeafState:
    """A leaf whose gradient the function looks at or changes."""

    leaf: Leaf
    place: int
    """Which argument's it is, -1 for none."""
    before: TensorSpec | None
    """Spec of the gradient that the function finds."""
    read: bool
    """Whether the function depends on it."""
    after: Callable[..., Any] | None
    """What it leaves there; None for what it leaves alone."""

    def now(self, tensors: Tensors) -> Leaf:
        """The leaf in a call with these arguments."""
        leaf = self.leaf if self.place < 0 else tensors[self.place].node
        assert isinstance(leaf, Leaf)
        return leaf


@dataclass(slots=True)
class Variable:
    """A variable of the job, and the tensor that it is."""

    capture: Capture
    place: int
    """Which argument it is, -1 for none."""
    leaf: LeafState | None
    """Of which it is the gradient."""
    changed: bool
    wants: bool
    """Whether the tensor wants a gradient."""

    @property
    def name(self) -> str:
        """In the job."""
        return self.capture.name

    @property
    def spec(self) -> TensorSpec:
        """How the variable holds the tensor."""
        return self.capture.spec

    @property
    def given(self) -> bool:
        """Whether it is an argument, or a gradient: another tensor in every call, as a rule."""
        return self.place >= 0 or self.leaf is not None

    def now(self, tensors: Tensors) -> DistTensor:
        """The tensor in a call with these arguments."""
        if self.place >= 0:
            return tensors[self.place]
        if self.leaf is not None:
            grad = self.leaf.now(tensors).grad
            assert grad is not None
            return grad
        return self.capture.tensor


class _Loan:
    """A tensor's array while a plan works on its memory: the plan's only reference to the array.

    The plan itself has only arrays over the loan. So `inplace.holds_alone`, which counts references
    to the array, can subtract those of plans: as many as the world has lent the array to.
    """

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: Array) -> None:
        self.array = array
        # As bytes: it cannot name dtypes that NumPy does not have.
        self.__array_interface__ = array.reshape(-1).view(np.uint8).__array_interface__

    def memory(self) -> Array:
        """Another array of the same elements."""
        return np.asarray(self).view(self.array.dtype).reshape(self.array.shape)


class _Place:
    """Where one variable lies on this rank."""

    __slots__ = ("loan", "movable", "seen", "since", "strikes", "variable")

    def __init__(self, variable: Variable, movable: bool) -> None:
        self.variable = variable
        self.movable = movable
        self.loan: _Loan | None = None
        """The tensor's memory that the plan works on; None for the plan's own."""
        self.since = 0
        """The call in which it was last moved."""
        self.strikes = 0
        self.seen = 0
        """Which argument it was in the call before, by id."""

    def settle(self, tensor: DistTensor, call: int) -> Array | None:
        """Lie in a tensor's memory, and return that; None where the tensor has to be copied."""
        before = self.loan
        self.let_go()
        if not self._may_lie_in(tensor, before, call):
            return None
        self.loan = _Loan(tensor.local)
        self.variable.spec.world.lent[id(tensor.local)] += 1
        return self.loan.memory()

    def let_go(self) -> None:
        """Lie in no tensor's memory."""
        if self.loan is not None:
            lent, key = self.variable.spec.world.lent, id(self.loan.array)
            lent[key] -= 1
            if not lent[key]:
                del lent[key]
            self.loan = None

    def _may_lie_in(self, tensor: DistTensor, before: _Loan | None, call: int) -> bool:
        if not self.movable or isinstance(tensor, MaterializedView):
            return False
        if self.variable.given and before is None and self.seen != id(tensor):
            self.seen = id(tensor)
            return False
        if before is not None and call <= self.since + 1:
            self.strikes += 1
            if self.strikes >= (1 if self.variable.given else PATIENCE):
                self.movable = False
                return False
        self.since = call
        # Of a result the tape knows what it kept by the array; views come and go.
        if isinstance(tensor.node, Node) or (tensor.is_view and not tensor.requires_grad):
            return False
        local = tensor.local
        flags = local.flags
        return (
            tensor.spec is self.variable.spec
            and local.__class__ is np.ndarray
            and flags.c_contiguous
            and flags.aligned
            and flags.writeable
        )


class Variables:
    """The variables of one rank's plan, which are tensors outside of it."""

    def __init__(self, run: CompiledRun, variables: Sequence[Variable]) -> None:
        self._run = run
        shards, movable = run.shards, run.movable
        self._places = [
            (at, _Place(each, each.name in movable))
            for at, each in enumerate(variables)
            if each.name in shards
        ]
        self._changes = any(each.changed for each in variables)
        self._owners: dict[int, _Place] = {}
        """Of the memory of tensors in which variables lie, by id."""
        self._call = 0
        self._copied: list[tuple[_Place, DistTensor]] = []
        """What lies in the plan's own memory in this call."""

    def enter(self, tensors: Tensors) -> None:
        """Let the plan have these tensors, aligned with the variables, in its next run.

        TracingError where one that the function changes shares memory with another.
        """
        self._call += 1
        elsewhere = []
        for at, place in self._places:
            tensor = tensors[at]
            if place.loan is None or tensor.local is not place.loan.array:
                elsewhere.append((place, tensor))
        self._copied = self._settled(elsewhere) if elsewhere else elsewhere
        shards = self._run.shards
        for place, tensor in self._copied:
            np.copyto(shards[place.variable.name], tensor.part(place.variable.spec))

    def leave(self) -> None:
        """Give the tensors their new values after a run."""
        for place, tensor in self._copied:
            if place.variable.changed:
                spec, array = place.variable.spec, self._run.shards[place.variable.name]
                if tensor.spec is not spec:
                    array = spec.world.mode.move(spec, tensor.spec)(array)
                np.copyto(tensor.local, array)

    def close(self) -> None:
        """Return the memory of all tensors."""
        for _, place in self._places:
            place.let_go()

    def _settled(
        self, elsewhere: Sequence[tuple[_Place, DistTensor]]
    ) -> list[tuple[_Place, DistTensor]]:
        """Work on the memory of those tensors where that can be; the others are returned."""
        moves: dict[str, Array | None] = {}
        copied = []
        for place, tensor in elsewhere:
            if place.variable.changed:
                tensor.own()
            before = place.loan
            settled = place.settle(tensor, self._call)
            if settled is None:
                copied.append((place, tensor))
            if settled is not None or before is not None:
                moves[place.variable.name] = settled
        if moves and self._changes:
            self._owners = self._owners_of_places()
        if copied and self._changes:
            self._check_apart(copied)
        if moves:
            self._run.place(moves)
        return copied

    def _owners_of_places(self) -> dict[int, _Place]:
        owners: dict[int, _Place] = {}
        for _, place in self._places:
            if place.loan is not None:
                _add(owners, place.loan.array, place)
        return owners

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
    if other is None or other is place or not (place.variable.changed or other.variable.changed):
        return
    raise TracingError(
        "a compiled function changes a tensor whose memory it also reads as another tensor",
        source=user_line(),
        got=f"{other.variable.spec} and {place.variable.spec}",
        hint="use views inside of the function only, or copy one of the tensors",
    )


def _owner(array: Any) -> int:
    """What tells apart arrays that own their memory."""
    while isinstance(array.base, (np.ndarray, array.__class__)):
        array = array.base
    return id(array)
