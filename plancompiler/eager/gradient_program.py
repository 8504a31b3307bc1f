"""Gradient programs: an op's gradient function, run once without numbers, as a list of local steps.

What a gradient function does depends only on attributes, shapes and layouts, as it does when a job
is traced. So it is run once per combination; afterwards, backward runs only the kernels that
lead to gradients that are needed. The layout of a value that several steps need is changed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.eager.spec import AnyWorld, AttrMap, SpecTensor, TensorSpec
from plancompiler.errors import GradientError
from plancompiler.ir import NdSbp, Placement
from plancompiler.ops.registry import Array, OpDef

Step = tuple[Callable[..., Any], tuple[int, ...], int, int]
"""A function of arrays, the places of its inputs, that of its first output, and how many it has."""


class Place(SpecTensor):
    """A tensor without numbers: a place in the program, and its spec."""

    __slots__ = ("at", "spec", "steps")

    def __init__(self, steps: _Steps, spec: TensorSpec, at: int) -> None:
        self.steps = steps
        self.spec = spec
        self.at = at

    def _apply(self, kind: str, inputs: Sequence[Place], attrs: AttrMap) -> tuple[Place, ...]:
        return self.steps.apply(kind, inputs, attrs)

    def _source(self, kind: str, attrs: AttrMap) -> tuple[Place, ...]:
        return self.steps.apply(kind, (), attrs, self.placement)

    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> Place:
        return self.steps.moved(self, self.spec.world.target(self.spec, placement, sbp))


class _Steps:
    """The program as it is recorded."""

    def __init__(self, world: AnyWorld) -> None:
        self.world = world
        self.steps: list[Step] = []
        self.places = 0
        self._moved: dict[tuple[int, TensorSpec], Place] = {}

    def place(self, spec: TensorSpec) -> Place:
        """A new place."""
        self.places += 1
        return Place(self, spec, self.places - 1)

    def apply(
        self,
        kind: str,
        inputs: Sequence[Place],
        attrs: AttrMap,
        placement: Placement | None = None,
    ) -> tuple[Place, ...]:
        """Record an op, after the changes of layout that it needs."""
        specs = tuple(place.spec for place in inputs)
        plan = self.world.mode.plan(kind, specs, attrs, placement)
        used = [self.moved(place, spec) for place, spec in zip(inputs, plan.used, strict=True)]
        outputs = tuple(self.place(spec) for spec in plan.outputs)
        places = tuple(place.at for place in used)
        self.steps.append((plan.local, places, outputs[0].at, len(outputs)))
        return outputs

    def moved(self, place: Place, spec: TensorSpec) -> Place:
        """The value in another layout."""
        if place.spec is spec:
            return place
        key = place.at, spec
        target = self._moved.get(key)
        if target is None:
            target = self._moved[key] = self.place(spec)
            move = self.world.mode.move(place.spec, spec)
            self.steps.append((move, (place.at,), target.at, 1))
        return target


class GradientProgram:
    """Steps from inputs, outputs and output gradients of an op to gradients of its inputs."""

    def __init__(self, steps: _Steps, given: int, results: Sequence[Place | None]) -> None:
        places = [each.at for each in results if each is not None]
        self.results = tuple(None if each is None else (each.spec, each.at) for each in results)
        """Specs and places of the gradients; None where there is none."""
        self.shared = tuple(
            slot
            for slot, each in enumerate(results)
            if each is not None and (each.at < given or places.count(each.at) > 1)
        )
        """Which gradients have memory that others have, too."""
        wanted = set(places)
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
    world: AnyWorld,
    definition: OpDef,
    attrs: AttrMap,
    given: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    grads: Sequence[TensorSpec | None],
    needed: tuple[bool, ...],
) -> GradientProgram:
    """The program of an op's gradients, given its inputs and outputs and the gradients of these."""
    steps = _Steps(world)
    inputs, outputs = ([steps.place(spec) for spec in specs] for specs in given)
    arrived = [None if spec is None else steps.place(spec) for spec in grads]
    places = steps.places
    passed = definition.gradients(attrs, inputs, outputs, arrived)
    results: list[Place | None] = []
    for place, grad, wants in zip(inputs, passed, needed, strict=True):
        if grad is None or not wants:
            results.append(None)
            continue
        if not grad.spec.same_but_layout(place.spec):
            raise GradientError(
                f"the gradient of {definition.kind} does not fit its input",
                op=definition.kind,
                got=str(grad.spec),
                expected=str(place.spec),
            )
        results.append(grad)
    return GradientProgram(steps, places, results)
