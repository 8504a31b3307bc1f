"""Prune gradient scaling: a factor on each gradient, of an op each, goes where it costs nothing.

Averaging over data-parallel replicas multiplies every gradient by 1 / degree before its update. The
factor moves, in this order of preference,

    into the seed      where all that follows from the gradient of a loss is linear in it and ends
                       in updates whose gradients carry one factor: the loss's gradient starts at
                       the factor instead of 1
    into the updates   else: as the attribute `grad_scale` of all that reads the gradient, where all
                       have it: updates, and what LARS, LAMB and Adafactor compute beside them

What reads a scaled gradient otherwise (clipping, a reported norm) must see what it saw before, so
such a gradient keeps its op, and the notes say which and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from plancompiler.ir import (
    BROADCAST,
    PARTIAL_SUM,
    AttrValue,
    DType,
    Job,
    Op,
    Phase,
    Value,
    freeze_attrs,
)
from plancompiler.ops.registry import axis_signatures, op_def
from plancompiler.passes.base import (
    PassResult,
    counted,
    producers_of,
    readers_of,
    rewired,
    with_ops,
)

GRADIENT = 1
"""Which input of an update is the gradient, where the update takes no factor."""


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A gradient that is scaled by an op that only `takers` read, as their gradient."""

    takers: tuple[Op, ...]
    scale: Op
    factor: float


def prune_gradient_scaling(job: Job) -> PassResult:
    """The job with the factors of gradients in their seeds or updates."""
    readers = readers_of(job)
    scaled, notes = _find(job, readers)
    seeded = _into_seeds(job, readers, scaled, notes)
    changed: dict[str, Op] = {}
    instead: dict[str, Value] = {}
    changes: list[str] = []
    for seed, members in seeded:
        changed[seed.name] = _seed_with(seed, members[0].factor)
        changes.append(
            f"the factor {members[0].factor:g} of "
            f"{', '.join(each.scale.name for each in members)} is in the seed {seed.name}"
        )
        for each in members:
            instead[each.scale.outputs[0].name] = each.scale.inputs[0]
    in_seeds = len(instead)
    rest = {each.scale.outputs[0].name: each for each in scaled}
    rest = {name: each for name, each in rest.items() if name not in instead}
    while refused := _refused(rest):
        for name, taker in refused.items():
            notes.append(
                f"{rest.pop(name).scale.name} stays: {taker.kind} of %{taker.inputs[0].name} "
                "cannot scale its gradient"
            )
    for name, each in rest.items():
        instead[name] = each.scale.inputs[0]
        for taker in each.takers:
            changed[taker.name] = _with_factor(taker, each.factor)
            changes.append(
                f"the factor {each.factor:g} of {each.scale.name} is in {taker.name}, of "
                f"%{taker.inputs[0].name}"
            )
    ops = [
        rewired(changed.get(op.name, op), instead)
        for op in job.ops
        if not (op.outputs and op.outputs[0].name in instead)
    ]
    summary = (
        f"moved {counted(in_seeds, 'factor')} into {counted(len(seeded), 'gradient seed')} and "
        f"{len(instead) - in_seeds} into updates"
        if instead
        else "no gradient has a factor of its own to move"
    )
    return PassResult(with_ops(job, ops), summary, tuple(notes), tuple(changes))


def _factor(op: Op | None) -> float | None:
    """The number by which an op multiplies its input; None where it does something else."""
    if op is None or op.attr("swapped", False) or op.sbp is not None:
        return None
    number = op.attr("scalar")
    if not isinstance(number, (int, float)) or not number:
        return None
    factor = {"mul_scalar": float(number), "div_scalar": 1.0 / number}.get(op.kind)
    return factor if factor is not None and math.isfinite(factor) else None


def _find(job: Job, readers: dict[str, list[Op]]) -> tuple[list[_Scaled], list[str]]:
    """Updates with scaled gradients, and what is wrong with those that do not count."""
    producers = producers_of(job)
    scaled: dict[str, _Scaled] = {}
    notes: list[str] = []
    for taker in job.ops:
        for place in _gradients_of(taker):
            gradient = taker.inputs[place]
            scale = producers.get(gradient.name)
            factor = _factor(scale)
            if scale is None or factor is None:
                if op_def(taker.kind).mutates:
                    notes += _scaled_earlier(taker, scale, producers)
                continue
            takers = [each for each in readers[gradient.name] if _takes(each, gradient)]
            others = [each.name for each in readers[gradient.name] if not _takes(each, gradient)]
            if not others:
                scaled.setdefault(scale.name, _Scaled(tuple(takers), scale, factor))
            elif op_def(taker.kind).mutates:
                notes.append(
                    f"{scale.name} stays: {', '.join(others)} must see the scaled gradient of "
                    f"%{taker.inputs[0].name}"
                )
    return list(scaled.values()), notes


def _gradients_of(op: Op) -> Iterable[int]:
    """The inputs of an op that are gradients."""
    definition = op_def(op.kind)
    if op.origin.phase is not Phase.FORWARD and definition.scaled:
        return [place for place in range(len(op.inputs)) if place in definition.scaled]
    return (GRADIENT,) if definition.mutates and len(op.inputs) > GRADIENT else ()


def _takes(op: Op, gradient: Value) -> bool:
    """Whether an op reads a value as its gradient alone."""
    places = {place for place, value in enumerate(op.inputs) if value.name == gradient.name}
    return places <= set(_gradients_of(op))


def _scaled_earlier(update: Op, maker: Op | None, producers: dict[str, Op]) -> Iterator[str]:
    """A gradient that is scaled, and then changed by something that sees the factor."""
    for value in () if maker is None else maker.inputs:
        scale = producers[value.name]
        if maker is not None and _factor(scale) is not None and not _takes(maker, value):
            yield (
                f"{scale.name} stays: {maker.name} must see the scaled gradient of "
                f"%{update.inputs[0].name}"
            )


# --- into the seed --------------------------------------------------------------------------------


def _into_seeds(
    job: Job, readers: dict[str, list[Op]], scaled: list[_Scaled], notes: list[str]
) -> list[tuple[Op, list[_Scaled]]]:
    """Seeds that can carry the factor of all that follows from them, with the scale ops they free.

    A seed need not be known as such: any fill of the backward pass will do in which the scaled
    gradients are linear.
    """
    by_scale = {each.scale.name: each for each in scaled}
    if not by_scale:
        return []
    taken: set[str] = set()
    seeds = []
    for op in job.ops:
        if (
            op.kind != "fill"
            or op.origin.phase is not Phase.BACKWARD
            or not op.outputs[0].dtype.is_floating
        ):
            continue
        reached = _Reach(op, job, readers, by_scale)
        members = [each for each in reached.members if each.scale.name not in taken]
        if not reached.members or len(members) < len(reached.members):
            continue
        factors = {each.factor for each in members}
        reason = reached.obstacle
        if reason is None and len(factors) > 1:
            reason = f"its gradients have {len(factors)} different factors"
        if reason is None and not _holds(op, members[0].factor):
            reason = "the factor leaves the range of its dtype"
        if reason is not None:
            notes.append(f"not into {op.name}: {reason}")
            continue
        taken.update(each.scale.name for each in members)
        seeds.append((op, members))
    return seeds


class _Reach:
    """What follows from a fill, up to the scale ops of gradients."""

    def __init__(
        self, seed: Op, job: Job, readers: dict[str, list[Op]], by_scale: dict[str, _Scaled]
    ) -> None:
        self.members: list[_Scaled] = []
        self.obstacle: str | None = None
        """Why the seed cannot be scaled; None where it can."""
        follows = {seed.outputs[0].name}
        waiting = {op.name for op in readers.get(seed.outputs[0].name, ())}
        # Readers come after what they read, so that each op is looked at with all its inputs known.
        for op in job.ops:
            if op.name not in waiting:
                continue
            if op.name in by_scale:
                self.members.append(by_scale[op.name])
                continue
            reason = _not_linear(op, follows)
            if reason is not None:
                self.obstacle = self.obstacle or reason
            for value in op.outputs:
                follows.add(value.name)
                waiting.update(each.name for each in readers.get(value.name, ()))


def _not_linear(op: Op, follows: set[str]) -> str | None:
    """Why an op's outputs are not in proportion to its inputs in `follows`; None where they are."""
    if op.kind == "output":
        return f"output {op.attr('name')!r} reports what follows from it"
    if op_def(op.kind).mutates:
        return f"{op.name} takes a gradient without a factor"
    if any(value.dtype is DType.FLOAT16 for value in op.inputs + op.outputs):
        return f"{op.name} works in float16, whose range the factor may leave"
    if op.kind == "redistribute":
        return None
    # Where a partial sum passes through, so does a factor.
    wanted = tuple(PARTIAL_SUM if value.name in follows else BROADCAST for value in op.inputs)
    known = axis_signatures(op.kind, op.input_types, op.output_types, op.attrs, 2)
    linear = any(
        each.inputs == wanted and all(entry == PARTIAL_SUM for entry in each.outputs)
        for each in known
    )
    return None if linear else f"{op.name} is not linear in it"


def _holds(seed: Op, factor: float) -> bool:
    return seed.outputs[0].dtype is not DType.FLOAT16 and math.isfinite(_seed_value(seed) * factor)


def _seed_value(seed: Op) -> float:
    value = seed.attr("value")
    assert isinstance(value, (int, float))
    return float(value)


def _seed_with(seed: Op, factor: float) -> Op:
    attrs: dict[str, AttrValue] = {**dict(seed.attrs), "value": _seed_value(seed) * factor}
    return replace(seed, attrs=freeze_attrs(attrs))


# --- into the updates -----------------------------------------------------------------------------


def _refused(scaled: Mapping[str, _Scaled]) -> dict[str, Op]:
    """Of the gradients those that a taker cannot scale: it takes no factor, or has another gradient
    that is none of these with the same factor.
    """
    refused = {}
    for name, each in scaled.items():
        for taker in each.takers:
            others = [scaled.get(taker.inputs[place].name) for place in _gradients_of(taker)]
            if not op_def(taker.kind).scaled or any(
                other is None or other.factor != each.factor for other in others
            ):
                refused[name] = taker
    return refused


def _with_factor(taker: Op, factor: float) -> Op:
    before = taker.attr("grad_scale", 1.0)
    assert isinstance(before, float)
    return replace(taker, attrs=freeze_attrs({**dict(taker.attrs), "grad_scale": before * factor}))
