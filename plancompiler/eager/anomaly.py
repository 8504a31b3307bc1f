"""`detect_anomaly()`: eager ops that say when they make the first value that is not finite.

Plans made inside check what they make, forward and backward. Ops outside run as ever: plans and
prepared ops are others inside of the block, and those from before come back when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from plancompiler.eager.dispatch import OpPlan
from plancompiler.eager.layout import Change
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tape import Node
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.world import World, current_world
from plancompiler.errors import NonFiniteError, UsageError
from plancompiler.executor.finite_check import check, says_non_finite, state_of
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array

_QUIET = partial(np.errstate, all="ignore")
"""An error says more than NumPy's warning."""


@contextmanager
def detect_anomaly() -> Iterator[None]:
    """Check what every op inside makes, and every gradient of an op that ran inside.

    NonFiniteError for the first that makes an infinite value, or one that is no number, out of
    inputs that are better: it names the op, the source line (of the forward op, for a gradient) and
    the rank. Compiled functions are compiled anew, with the same checks. For tensors on CPUs.
    """
    world = current_world()
    if world.tracing is not None:
        raise UsageError(
            "anomalies are looked for around a compiled function, not inside",
            source=user_line(),
            hint="put `with pc.detect_anomaly():` around the call",
        )
    if world.anomaly:
        yield
        return
    runs = {spec: spec.runs for spec in world.specs()}
    for spec in runs:
        spec.runs = {}
    before = world.dispatcher
    world.dispatcher = dispatcher = type(before)(world)
    dispatcher.plan_class = CheckedPlan
    shadows: dict[str, Any] = {
        "fast_run": lambda plan: None,
        "move": _CheckedMoves(world).move,
    }
    vars(world).update(shadows)
    world.anomaly = True
    try:
        yield
    finally:
        world.anomaly = False
        for name in shadows:
            del vars(world)[name]
        world.dispatcher = before
        for spec in world.specs():
            spec.runs = runs.get(spec, {})


class _CheckedMoves:
    """Changes of layout that check what a reduction makes."""

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._move = world.move

    def move(self, source: TensorSpec, target: TensorSpec) -> Change:
        """See `World.move`."""
        change = self._move(source, target)
        if not source.sbp.has_partial or target.sbp.has_partial:
            return change

        def run(array: Array) -> Array:
            before = state_of([array])
            with _QUIET():
                found = change(array)
            try:
                check(before, [found], "the reduction of a partial value", "")
            except NonFiniteError as error:
                error.at(op="redistribute", source=user_line(), rank=self._rank)
                raise
            return found

        return run


class CheckedPlan(OpPlan):
    """An op whose outputs and gradients are checked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.joinable = False
        self._excused = says_non_finite(self.attrs)

    def call(self, tensors: Sequence[DistTensor]) -> tuple[DistTensor, ...]:
        """See `OpPlan.call`."""
        inputs = [each.local for each in tensors]
        before = state_of(inputs)
        with _QUIET():
            found = super().call(tensors)
        line = user_line()
        for each in found:
            if isinstance(each.node, Node) and each.node.op is self:
                each.node.source = line
        self._check(before, inputs, [each.local for each in found], self.kind, line)
        return found

    def update(self, tensors: Sequence[DistTensor]) -> None:
        """See `OpPlan.update`."""
        inputs = [each.local for each in tensors]
        before = state_of(inputs)
        with _QUIET():
            super().update(tensors)
        if not any(self.moves):  # else `call` has checked
            made = [tensors[source].local for _, source in self.mutates]
            self._check(before, inputs, made, self.kind, user_line())

    def backward(
        self,
        node: Node,
        grads: Sequence[DistTensor | None],
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Sequence[DistTensor | None]:
        """See `OpPlan.backward`."""
        inputs = [each.local for each in (*(node.inputs or ()), *grads) if each is not None]
        before = state_of((*inputs, *node.outputs))
        with _QUIET():
            found = super().backward(node, grads, needed, create_graph)
        made = [each.local for each in found if each is not None]
        line = getattr(node, "source", None) or user_line()
        self._check(before, inputs, made, f"the gradient of {self.kind}", line)
        return found

    def _check(
        self,
        before: int,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        what: str,
        line: object,
    ) -> None:
        if self._excused or (inputs and not any(array.size for array in inputs)):
            return
        try:
            check(before, outputs, what, "")
        except NonFiniteError as error:
            error.at(op=self.kind, source=line, rank=self.world.rank)
            raise
