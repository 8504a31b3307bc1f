"""`detect_anomaly()`: eager ops that report the first value that is not finite.

Plans made inside the block check their results, forward and backward. Ops outside are not affected:
the block has plans and prepared ops of its own, and the earlier ones are used again when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from plancompiler.eager.dispatch import RunMode
from plancompiler.eager.op_plan import OpPlan
from plancompiler.eager.spec import Change, TensorSpec
from plancompiler.eager.tensor import DistTensor, Grads, Node, Tensors
from plancompiler.eager.world import World, current_world
from plancompiler.errors import NonFiniteError, UsageError
from plancompiler.executor.finite_check import check, says_non_finite, state_of
from plancompiler.ir import SourceLine
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array

_QUIET = partial(np.errstate, all="ignore")
"""An error says more than NumPy's warning."""


@contextmanager
def detect_anomaly() -> Iterator[None]:
    """Check the results of every op inside, and every gradient of an op that ran inside.

    The first op that makes an infinite value or a NaN from finite inputs raises a NonFiniteError,
    which names the op, its source line (for a gradient, that of the forward op) and the rank.
    Compiled functions are compiled once more, with the same checks. For tensors on CPUs.
    """
    world = current_world()
    if world.mode.traces:
        raise UsageError(
            "anomalies are looked for around a compiled function, not inside",
            source=user_line(),
            hint="put `with pc.detect_anomaly():` around the call",
        )
    if world.anomaly:
        yield
        return
    world.anomaly = True
    try:
        with world.using(CheckMode(world)):
            yield
    finally:
        world.anomaly = False


class CheckedPlan(OpPlan):
    """An op whose outputs and gradients are checked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.joinable = False
        self._excused = says_non_finite(self.attrs)

    def call(self, tensors: Tensors) -> tuple[DistTensor, ...]:
        """See `OpPlan.call`."""
        inputs = [each.local for each in tensors]
        with self._checked(inputs, self.kind) as made:
            outputs = super().call(tensors)
            for each in outputs:
                if isinstance(each.node, Node) and each.node.op is self:
                    each.node.source = user_line()
            made += [each.local for each in outputs]
        return outputs

    def update(self, tensors: Tensors) -> None:
        """See `OpPlan.update`."""
        with self._checked([each.local for each in tensors], self.kind) as made:
            super().update(tensors)
            if not any(self.moves):  # else `call` has checked
                made += [tensors[source].local for _, source in self.mutates]

    def backward(
        self,
        node: Node,
        grads: Grads,
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Grads:
        """See `OpPlan.backward`."""
        inputs = [each.local for each in (*(node.inputs or ()), *grads) if each is not None]
        line = getattr(node, "source", None)
        with self._checked(inputs, f"the gradient of {self.kind}", node.outputs, line) as made:
            passed = super().backward(node, grads, needed, create_graph)
            made += [each.local for each in passed if each is not None]
        return passed

    @contextmanager
    def _checked(
        self,
        inputs: Sequence[Array],
        what: str,
        others: Sequence[Array] = (),
        line: SourceLine | None = None,
    ) -> Iterator[list[Array]]:
        """Check what the block has added to the list, unless earlier values were not finite."""
        made: list[Array] = []
        before = state_of((*inputs, *others))
        with _QUIET():
            yield made
        if self._excused or (inputs and not any(array.size for array in inputs)):
            return
        try:
            check(before, made, what, "")
        except NonFiniteError as error:
            error.at(op=self.kind, source=line or user_line(), rank=self.world.rank)
            raise


class CheckMode(RunMode):
    """Ops check their results, and changes of layout check the results of reductions."""

    plan_class = CheckedPlan
    prepares = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._change = world.mode.move

    def move(self, source: TensorSpec, target: TensorSpec) -> Change:
        """See `Mode.move`."""
        change = self._change(source, target)
        if not source.sbp.has_partial or target.sbp.has_partial:
            return change

        def run(array: Array) -> Array:
            before = state_of([array])
            with _QUIET():
                changed = change(array)
            try:
                check(before, [changed], "the reduction of a partial value", "")
            except NonFiniteError as error:
                error.at(op="redistribute", source=user_line(), rank=self.world.rank)
                raise
            return changed

        return run
