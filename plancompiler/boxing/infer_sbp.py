"""SBP inference: give every op of a job the signature that is cheapest to feed.

Ops are visited in order. Of an op's legal signatures the one with the least boxing cost for its
inputs wins; ties go to the first in rule order. What the user demands (inputs, variables,
redistribute) is kept. Where a partial value would have to be split, the cost counted is that of
reducing it whole: a split chosen only because a reduce-scatter costs half an all-reduce would be
gathered again by the next op (sequence parallelism is a decision of its own, not an accident of
this walk).
"""

from __future__ import annotations

import logging

from plancompiler.boxing.graph import OpGraph
from plancompiler.boxing.planner import boxing_seconds, canonical
from plancompiler.errors import PlanCompilerError, ShapeError
from plancompiler.ir import BROADCAST, Job, NdSbp, Op, Partial, Split
from plancompiler.ops.registry import mesh_signatures, op_def
from plancompiler.ops.rule import NdSignature

logger = logging.getLogger("plancompiler.boxing")


def infer_sbp(job: Job) -> OpGraph:
    """The job with a signature per op."""
    layouts = _Layouts()
    signatures = []
    for op in job.ops:
        try:
            signature = _signature_of(op, layouts)
        except PlanCompilerError as error:
            raise error.at(op=op.name, source=op.source) from None
        layouts.record(op, signature)
        signatures.append(signature)
    return OpGraph(job, tuple(signatures))


class _Layouts:
    """Layouts known so far: where each value was made, and what it was boxed to."""

    def __init__(self) -> None:
        self.made: dict[str, NdSbp] = {}
        self.boxed: set[tuple[str, NdSbp]] = set()

    def record(self, op: Op, signature: NdSignature) -> None:
        for value, sbp in zip(op.inputs, signature.inputs, strict=True):
            if value.placement == op.placement:
                self.boxed.add((value.name, sbp))
        for value, sbp in zip(op.outputs, signature.outputs, strict=True):
            self.made[value.name] = sbp

    def seconds(self, op: Op, position: int, wanted: NdSbp) -> float:
        """What it costs to have an input in the wanted layout."""
        value = op.inputs[position]
        hierarchy = op.placement.hierarchy
        got = canonical(self.made[value.name], hierarchy)
        wanted = canonical(wanted, hierarchy)
        if got == wanted or (value.name, wanted) in self.boxed:
            return 0.0
        whole = NdSbp(
            tuple(
                BROADCAST if isinstance(before, Partial) and isinstance(after, Split) else after
                for before, after in zip(got, wanted, strict=True)
            )
        )
        first = boxing_seconds(got, whole, value.shape, value.dtype, hierarchy)
        return first + boxing_seconds(whole, wanted, value.shape, value.dtype, hierarchy)


def _signature_of(op: Op, layouts: _Layouts) -> NdSignature:
    ndim = op.placement.ndim
    whole = NdSbp.broadcast(ndim)
    if op.kind in ("input", "variable"):
        demanded = op.sbp or whole
        demanded.check(ndim, len(op.outputs[0].shape))
        return NdSignature((), (canonical(demanded, op.placement.hierarchy),))
    if op.kind == "output":
        return NdSignature((whole,), ())
    if op.kind == "redistribute":
        target = canonical(_redistributed(op, layouts), op.placement.hierarchy)
        return NdSignature((target,), (target,))
    return _cheapest(op, layouts)


def _redistributed(op: Op, layouts: _Layouts) -> NdSbp:
    """The demanded layout; else the input's own, reduced, if the new mesh has as many axes."""
    if op.sbp is not None:
        return op.sbp.check(op.placement.ndim, len(op.outputs[0].shape))
    value = op.inputs[0]
    got = layouts.made[value.name]
    if value.placement.ndim != op.placement.ndim:
        return NdSbp.broadcast(op.placement.ndim)
    return NdSbp(tuple(BROADCAST if isinstance(entry, Partial) else entry for entry in got))


def _cheapest(op: Op, layouts: _Layouts) -> NdSignature:
    input_types = tuple(value.type for value in op.inputs)
    output_types = tuple(value.type for value in op.outputs)
    hierarchy = op.placement.hierarchy
    candidates = mesh_signatures(op.kind, input_types, output_types, op.attrs, hierarchy)
    mutates = op_def(op.kind).mutates
    best: NdSignature | None = None
    best_seconds = 0.0
    costs: dict[tuple[int, NdSbp], float] = {}
    for candidate in candidates:
        if op.sbp is not None and any(
            canonical(op.sbp, hierarchy) != sbp for sbp in candidate.outputs
        ):
            continue
        if any(
            candidate.inputs[source] != layouts.made[op.inputs[source].name]
            or candidate.outputs[target] != candidate.inputs[source]
            for target, source in mutates
        ):
            continue
        seconds = 0.0
        for position, wanted in enumerate(candidate.inputs):
            key = (position, wanted)
            if key not in costs:
                costs[key] = layouts.seconds(op, position, wanted)
            seconds += costs[key]
            if best is not None and seconds >= best_seconds:
                break
        else:
            best, best_seconds = candidate, seconds
    if best is None:
        raise ShapeError(
            f"no sharding of {op.kind} fits the layouts demanded of it",
            got=", ".join(str(layouts.made[value.name]) for value in op.inputs),
            expected=f"outputs {op.sbp}" if op.sbp is not None else "the layout of its variables",
            hint="redistribute an input, or place the parameter with another SBP",
        )
    _report_redistribution(op, layouts, best)
    return best


def _report_redistribution(op: Op, layouts: _Layouts, signature: NdSignature) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    hierarchy = op.placement.hierarchy
    for value, used in zip(op.inputs, signature.inputs, strict=True):
        got = canonical(layouts.made[value.name], hierarchy)
        if got != used:
            logger.info("%s (%s): %%%s %s -> %s", op.name, op.source, value.name, got, used)
