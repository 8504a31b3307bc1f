"""A dense reference: runs a job op by op on whole arrays, in one process, without a plan.

Placements, SBP and boxing play no part here, so what it computes is what every layout of the job
must compute. It is the oracle of the tests that run jobs on several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.ir import Job, Op, TensorType
from plancompiler.ops.kernel import kernel_for
from plancompiler.ops.registry import KernelContext, op_def

Array = np.ndarray[Any, np.dtype[Any]]
Feeds = Mapping[str, Any]


class DenseRun:
    """A job with its variables. `step(**feeds)` runs it once and returns the outputs by name."""

    def __init__(self, job: Job, variables: Mapping[str, Array] | None = None) -> None:
        self.job = job
        self.steps_done = 0
        self.variables: dict[str, Array] = {}
        self._contexts = {op.name: _context(job, op) for op in job.ops}
        for op in job.ops:
            if op.kind == "variable":
                name = str(op.attr("name"))
                if variables is not None and name in variables:
                    self.variables[name] = np.array(variables[name], op.outputs[0].dtype.numpy)
                else:
                    (self.variables[name],) = self._run(op, [])

    def step(self, **feeds: Any) -> dict[str, Any]:
        """Outputs of the next step: scalars as Python numbers, tensors as arrays."""
        values: dict[str, Array] = {}
        updates: dict[str, Array] = {}
        results: dict[str, Any] = {}
        variable_of: dict[str, str] = {}
        for op in self.job.ops:
            inputs = [values[value.name] for value in op.inputs]
            if op.kind == "variable":
                name = str(op.attr("name"))
                outputs = [self.variables[name]]
                variable_of[op.outputs[0].name] = name
            elif op.kind == "input":
                outputs = [_fed(op, feeds)]
            else:
                outputs = self._run(op, inputs)
                if op.kind == "output":
                    array = inputs[0]
                    results[str(op.attr("name"))] = (
                        array.item() if array.ndim == 0 else array.copy()
                    )
            for produced, read in op_def(op.kind).mutates:
                updates[variable_of[op.inputs[read].name]] = outputs[produced]
            values.update(
                (value.name, array) for value, array in zip(op.outputs, outputs, strict=True)
            )
        # Everything reads the values from before the step; the updates hold from the next one.
        self.variables.update(updates)
        self.steps_done += 1
        return results

    def _run(self, op: Op, inputs: Sequence[Array]) -> list[Array]:
        context = self._contexts[op.name]
        context.step = self.steps_done
        outputs = [_unset(value.type) for value in op.outputs]
        dtypes = [array.dtype for array in (*inputs, *outputs)]
        kernel_for(op_def(op.kind), dtypes)(context, inputs, outputs)
        return outputs


def run_dense(
    job: Job,
    steps: int,
    feeds: Feeds | Sequence[Feeds] | None = None,
    variables: dict[str, Array] | None = None,
) -> list[dict[str, Any]]:
    """Outputs of each of `steps` steps.

    `feeds` is one mapping for all steps, or one per step. `variables` gives initial values by
    name (the others start as the job says); after the run it holds the final values of all.
    """
    run = DenseRun(job, variables)
    results = []
    for step in range(steps):
        given = feeds[step] if isinstance(feeds, Sequence) else feeds
        results.append(run.step(**(given or {})))
    if variables is not None:
        variables.update(run.variables)
    return results


def _context(job: Job, op: Op) -> KernelContext:
    input_shapes = tuple(value.shape for value in op.inputs)
    output_shapes = tuple(value.shape for value in op.outputs)
    return KernelContext(
        attrs=op_def(op.kind).complete(dict(op.attrs)),
        input_shapes=input_shapes,
        output_shapes=output_shapes,
        input_regions=tuple(map(_whole, input_shapes)),
        output_regions=tuple(map(_whole, output_shapes)),
        seed=job.seed,
    )


def _whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, extent) for extent in shape)


def _unset(tensor: TensorType) -> Array:
    """An output array that shows at once if a kernel leaves elements unwritten."""
    array = np.empty(tensor.shape, tensor.dtype.numpy)
    if tensor.dtype.is_floating:
        array.fill(np.nan)
    return array


def _fed(op: Op, feeds: Feeds) -> Array:
    name, value = str(op.attr("name")), op.outputs[0]
    array = np.asarray(feeds[name])
    assert (array.shape, array.dtype) == (value.shape, value.dtype.numpy), (
        f"input {name!r} is fed {array.dtype}{array.shape}, but it is {value.type}"
    )
    return array
