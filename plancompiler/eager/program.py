"""Gradient programs: an op's gradient function, run once on symbols, as a list of local steps.

What a gradient function does depends on attributes, shapes and layouts only, as it does when a job
is traced. So it is run once per combination; afterwards the walk back runs the kernels that lead to
the gradients somebody needs, and no others. A value that several steps want in another layout is
changed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plancompiler.eager.spec import TensorSpec
from plancompiler.errors import GradientError
from plancompiler.ir import AttrValue, DType, NdSbp, Placement
from plancompiler.ir.operators import Scalar, TensorOperators
from plancompiler.ops.registry import Array

if TYPE_CHECKING:
    from plancompiler.eager.dispatch import OpPlan
    from plancompiler.eager.world import World

Step = tuple[Callable[..., Any], tuple[int, ...], int, int]
"""A function of arrays, the places of its inputs, that of its first output, and how many it has."""


class Symbol(TensorOperators):
    """A tensor without numbers: a place in the program, and its spec."""

    __slots__ = ("at", "spec", "steps")

    def __init__(self, steps: _Steps, spec: TensorSpec, at: int) -> None:
        self.steps = steps
        self.spec = spec
        self.at = at

    # The mixin declares attributes; here they are read off the spec.
    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.spec.shape

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.spec.dtype

    @property
    def placement(self) -> Placement:
        return self.spec.placement

    def _apply(
        self, kind: str, inputs: Sequence[Symbol], attrs: Mapping[str, AttrValue]
    ) -> tuple[Symbol, ...]:
        return self.steps.apply(kind, inputs, attrs)

    def _full(self, shape: tuple[int, ...], dtype: DType, value: Scalar) -> Symbol:
        return self._source("fill", {"shape": shape, "dtype": str(dtype), "value": value})[0]

    def _source(self, kind: str, attrs: Mapping[str, AttrValue]) -> tuple[Symbol, ...]:
        return self.steps.apply(kind, (), attrs, self.placement)

    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> Symbol:
        spec = self.spec
        where = spec.placement if placement is None else placement
        return self.steps.moved(self, spec.world.target(spec, where, sbp))


class _Steps:
    """The program as it is recorded."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps: list[Step] = []
        self.places = 0
        self._moved: dict[tuple[int, TensorSpec], Symbol] = {}

    def symbol(self, spec: TensorSpec) -> Symbol:
        """A new place."""
        self.places += 1
        return Symbol(self, spec, self.places - 1)

    def apply(
        self,
        kind: str,
        inputs: Sequence[Symbol],
        attrs: Mapping[str, AttrValue],
        placement: Placement | None = None,
    ) -> tuple[Symbol, ...]:
        """Record an op, after the changes of layout that it needs."""
        specs = tuple(symbol.spec for symbol in inputs)
        plan = self.world.dispatcher.plan(kind, specs, attrs, placement)
        used = [self.moved(symbol, spec) for symbol, spec in zip(inputs, plan.used, strict=True)]
        outputs = tuple(self.symbol(spec) for spec in plan.outputs)
        places = tuple(symbol.at for symbol in used)
        self.steps.append((plan.local, places, outputs[0].at, len(outputs)))
        return outputs

    def moved(self, symbol: Symbol, spec: TensorSpec) -> Symbol:
        """The value in another layout."""
        if symbol.spec is spec:
            return symbol
        key = symbol.at, spec
        found = self._moved.get(key)
        if found is None:
            found = self._moved[key] = self.symbol(spec)
            move = self.world.move(symbol.spec, spec)
            self.steps.append((move, (symbol.at,), found.at, 1))
        return found


class Program:
    """Steps from inputs, outputs and output gradients of an op to gradients of its inputs."""

    def __init__(self, steps: _Steps, given: int, results: Sequence[Symbol | None]) -> None:
        self.results = tuple(None if each is None else (each.spec, each.at) for each in results)
        """Specs and places of the gradients; None where there is none."""
        wanted = {each.at for each in results if each is not None}
        kept: list[Step] = []
        for step in reversed(steps.steps):
            _, inputs, first, count = step
            if any(place in wanted for place in range(first, first + count)):
                kept.append(step)
                wanted.update(inputs)
        self._steps = tuple(reversed(kept))
        self._made = [None] * (steps.places - given)

    def run(self, arrays: list[Array]) -> list[Any]:
        """This rank's part of what is at each place, given those of the first places."""
        held: list[Any] = arrays + self._made
        at = held.__getitem__
        for function, places, first, count in self._steps:
            if count == 1:
                held[first] = function(*map(at, places))
            else:
                held[first : first + count] = function(*map(at, places))
        return held


def trace_gradient(
    plan: OpPlan,
    attrs: Mapping[str, AttrValue],
    grads: Sequence[TensorSpec | None],
    needed: tuple[bool, ...],
) -> Program:
    """The program of an op's gradients, for output gradients of these specs."""
    steps = _Steps(plan.world)
    inputs = [steps.symbol(spec) for spec in plan.kept]
    outputs = [steps.symbol(spec) for spec in plan.outputs]
    arrived = [None if spec is None else steps.symbol(spec) for spec in grads]
    given = steps.places
    if plan.gradient is None:
        raise GradientError(f"{plan.kind} has no gradient", op=plan.kind)
    passed = plan.gradient(attrs, inputs, outputs, arrived)
    if len(passed) != len(inputs):
        raise GradientError(
            f"the gradient of {plan.kind} has another number of entries than the op has inputs",
            op=plan.kind,
            got=len(passed),
            expected=len(inputs),
        )
    results: list[Symbol | None] = []
    for symbol, grad, wants in zip(inputs, passed, needed, strict=True):
        if grad is None or not wants:
            results.append(None)
            continue
        if grad.spec.type != symbol.spec.type or grad.placement != symbol.placement:
            raise GradientError(
                f"the gradient of {plan.kind} does not fit its input",
                op=plan.kind,
                got=str(grad.spec),
                expected=str(symbol.spec),
            )
        results.append(grad)
    return Program(steps, given, results)
