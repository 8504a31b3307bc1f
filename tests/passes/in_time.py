"""Runs a job with micro-batches on whole placements, in one process, without a plan.

Devices play no part: only the axis of micro-batches is cut. Kernels get pieces with the regions
that they have in the global tensor, parts are added up by the job's own ops, and nothing is put
together that the job does not put together. It is how the tests of the pass know what a job with
micro-batches means; `tests/dense.py` knows what the job meant before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from plancompiler.errors import MicrobatchError
from plancompiler.ir import Job, Op, Sbp, Split, Value
from plancompiler.ir.pipeline import Pipeline, Segment, SegmentKind
from plancompiler.ir.shard import Region, piece_region, piece_shape, region_index
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import KernelContext, op_def
from plancompiler.passes import run_passes
from plancompiler.passes.recompute import AGAIN
from tests.dense import run_dense

Array = np.ndarray[Any, np.dtype[Any]]
Feeds = Sequence[Mapping[str, Any]]
STEPS = 3

ORDERS = ("segments", "microbatches")
"""Orders of the slots of a step: a segment for all micro-batches, or a micro-batch through all
segments. Every schedule lies between the two, and none may make a difference."""


@dataclass(frozen=True)
class _Slot:
    segment: int
    microbatch: int
    each_time: bool


class TimedRun:
    """A job with a pipeline and its variables; `step(**feeds)` runs it once."""

    def __init__(self, job: Job, order: str = ORDERS[0]) -> None:
        assert job.pipeline is not None
        self.job, self.pipeline = job, job.pipeline
        self.slots = _slots(self.pipeline, order)
        self.steps_done = 0
        self.variables: dict[str, Array] = {}
        self._ops: dict[int, list[Op]] = {}
        self._contexts: dict[tuple[str, int], KernelContext] = {}
        for op in job.ops:
            assert op.micro is not None
            self._ops.setdefault(op.micro.segment, []).append(op)
            if op.kind == "variable":
                (self.variables[str(op.attr("name"))],) = self._run(op, 0, [], None)

    def step(self, **feeds: Any) -> dict[str, Any]:
        """Outputs of the next step by name."""
        per_step: dict[str, Array] = {}
        pieces: list[dict[str, Array]] = [{} for _ in range(self.pipeline.microbatches)]
        updates: dict[str, Array] = {}
        results: dict[str, Any] = {}
        variable_of: dict[str, str] = {}
        for slot in self.slots:
            own = pieces[slot.microbatch] if slot.each_time else per_step
            for op in self._ops.get(slot.segment, ()):
                inputs = [
                    own[value.name] if value.name in own else per_step[value.name]
                    for value in op.inputs
                ]
                collects = op_def(op.kind).collects
                if op.kind == "variable":
                    name = str(op.attr("name"))
                    outputs = [self.variables[name]]
                    variable_of[op.outputs[0].name] = name
                elif op.kind == "input":
                    outputs = [self._fed(op, slot.microbatch, feeds)]
                else:
                    made = None
                    if collects and slot.microbatch > 0:
                        made = [per_step[value.name] for value in op.outputs]
                    outputs = self._run(op, slot.microbatch, inputs, made)
                if op.kind == "output":
                    array = inputs[0]
                    results[str(op.attr("name"))] = (
                        array.item() if array.ndim == 0 else array.copy()
                    )
                for produced, read in op_def(op.kind).mutates:
                    updates[variable_of[op.inputs[read].name]] = outputs[produced]
                for value, array in zip(op.outputs, outputs, strict=True):
                    (per_step if collects else own)[value.name] = array
        self.variables.update(updates)
        self.steps_done += 1
        return results

    def _run(
        self, op: Op, microbatch: int, inputs: Sequence[Array], made: list[Array] | None
    ) -> list[Array]:
        key = (op.name, microbatch)
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = self._context(op, microbatch)
        context.step = self.steps_done
        for array, region in zip(inputs, context.input_regions, strict=True):
            assert array.shape == tuple(stop - start for start, stop in region), op.name
        if made is None:
            made = [
                _unset(value, region)
                for value, region in zip(op.outputs, context.output_regions, strict=True)
            ]
        kernel = kernel_for(op_def(op.kind), [array.dtype for array in (*inputs, *made)])
        kernel(context, inputs, made)
        return made

    def _context(self, op: Op, microbatch: int) -> KernelContext:
        assert op.micro is not None
        return KernelContext(
            attrs=op_def(op.kind).complete(dict(op.attrs)),
            input_shapes=tuple(value.shape for value in op.inputs),
            output_shapes=tuple(value.shape for value in op.outputs),
            input_regions=self._regions(op.inputs, op.micro.inputs, microbatch),
            output_regions=self._regions(op.outputs, op.micro.outputs, microbatch),
            seed=self.job.seed,
            microbatch=microbatch,
        )

    def _regions(
        self, values: Sequence[Value], layouts: Sequence[Sbp], microbatch: int
    ) -> tuple[Region, ...]:
        regions = []
        for value, sbp in zip(values, layouts, strict=True):
            axis = sbp.axis if isinstance(sbp, Split) else -1
            parts = self.pipeline.microbatches
            first = tuple((0, extent) for extent in piece_shape(value.shape, axis, parts))
            extent = value.shape[axis] if axis >= 0 else 0
            regions.append(piece_region(first, axis, extent, parts, microbatch))
        return tuple(regions)

    def _fed(self, op: Op, microbatch: int, feeds: Mapping[str, Any]) -> Array:
        assert op.micro is not None
        (region,) = self._regions(op.outputs, op.micro.outputs, microbatch)
        array = np.asarray(feeds[str(op.attr("name"))])
        assert array.shape == op.outputs[0].shape
        return array[region_index(region)]


def run_in_time(
    job: Job,
    steps: int,
    feeds: Feeds | None = None,
    variables: dict[str, Array] | None = None,
    order: str = ORDERS[0],
) -> list[dict[str, Any]]:
    """Outputs of each of `steps` steps; `variables` is filled with the final values of all."""
    run = TimedRun(job, order)
    outputs = [run.step(**(feeds[step] if feeds else {})) for step in range(steps)]
    if variables is not None:
        variables.update(run.variables)
    return outputs


def _slots(pipeline: Pipeline, order: str) -> list[_Slot]:
    last = len(pipeline.segments) - 1
    between = [
        _Slot(segment, microbatch, True)
        for segment in range(1, last)
        for microbatch in range(pipeline.microbatches)
    ]
    if order == "microbatches":
        between.sort(key=lambda slot: slot.microbatch)
    return [_Slot(0, 0, False), *between, _Slot(last, 0, False)]


def _unset(value: Value, region: Region) -> Array:
    """An output array that shows at once if a kernel leaves elements unwritten."""
    array = np.empty(tuple(stop - start for start, stop in region), value.dtype.numpy)
    if value.dtype.is_floating:
        array.fill(np.nan)
    return array


# --- checks -------------------------------------------------------------------------------------


def cut(job: Job, microbatches: int, **settings: Any) -> Job:
    """The job after its passes, in micro-batches."""
    config = replace(job.config, microbatches=microbatches, **settings)
    return run_passes(replace(job, config=config))[0]


def assert_same(
    job: Job,
    microbatches: int,
    feeds: Feeds | None = None,
    *,
    rtol: float = 2e-5,
    atol: float = 2e-6,
    variables_atol: float = 1e-5,
    **settings: Any,
) -> Job:
    """What the job reports and what its variables become is the same whole and in micro-batches,
    whatever the order of these. Returns the job in micro-batches.
    """
    config = replace(job.config, **settings)
    whole, _ = run_passes(replace(job, config=config))
    pieces = cut(job, microbatches, **settings)
    wanted_variables: dict[str, Any] = {}
    wanted = run_dense(whole, STEPS, feeds, wanted_variables)
    for order in ORDERS:
        variables: dict[str, Any] = {}
        actual = run_in_time(pieces, STEPS, feeds, variables, order)
        for step, (got, expected) in enumerate(zip(actual, wanted, strict=True)):
            assert got.keys() == expected.keys()
            for name in expected:
                np.testing.assert_allclose(
                    got[name], expected[name], rtol, atol, err_msg=f"{order} step {step} {name}"
                )
        assert variables.keys() == wanted_variables.keys()
        for name, array in wanted_variables.items():
            np.testing.assert_allclose(
                variables[name], array, rtol, variables_atol, err_msg=f"{order} {name}"
            )
    return pieces


def segment_of(job: Job, op: Op) -> Segment:
    assert job.pipeline is not None
    assert op.micro is not None
    return job.pipeline.segments[op.micro.segment]


def in_segments(job: Job, kind: SegmentKind) -> list[Op]:
    return [op for op in job.ops if segment_of(job, op).kind is kind]


def fed(shapes: dict[str, tuple[int, ...]], classes: int = 0) -> Feeds:
    """Random feeds for each step; labels are whole numbers below `classes`."""
    rng = np.random.default_rng(7)
    return [
        {
            name: rng.integers(0, classes, shape)
            if name == "labels"
            else rng.normal(size=shape).astype("float32")
            for name, shape in shapes.items()
        }
        for _ in range(STEPS)
    ]


def microbatch_error(build: Callable[[], Job], microbatches: int = 4, **settings: Any) -> str:
    """The error of a job that cannot be cut; it names an op and its line."""
    job = build()
    with pytest.raises(MicrobatchError) as caught:
        cut(job, microbatches, **settings)
    assert str(caught.value.report.op).removesuffix(AGAIN) in {op.name for op in job.ops}
    assert "tests/passes" in str(caught.value.report.source)
    return str(caught.value)
