"""What inputs are fed, held against what a job or a rank's plan says of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plancompiler.errors import ExecutionError, FeedError
from plancompiler.executor.memory import Array
from plancompiler.ir import DType, Job
from plancompiler.ir.shard import region_shape
from plancompiler.ir.task import TaskKind
from plancompiler.plan.plan import ComputeSpec, Plan


def check_feeds(job: Job, feeds: Mapping[str, object]) -> dict[str, Array]:
    """The feeds as arrays, one per input of the job; FeedError where one does not fit."""
    missing = sorted(job.inputs.keys() - feeds.keys())
    unknown = sorted(feeds.keys() - job.inputs.keys())
    if missing or unknown:
        parts = [f"input {name!r} is not fed" for name in missing]
        parts += [f"{name!r} is no input" for name in unknown]
        raise FeedError(
            f"the feeds do not fit job {job.name!r}: {'; '.join(parts)}",
            got=", ".join(map(repr, sorted(feeds))) or "nothing",
            expected=", ".join(map(repr, sorted(job.inputs))) or "nothing",
        )
    arrays = {}
    for name, value in job.inputs.items():
        given = feeds[name]
        dtype = value.dtype.numpy
        is_number = type(given) in (bool, int, float) and value.shape == ()
        array = np.asarray(given, dtype) if is_number else np.asarray(given)
        if array.shape != value.shape or array.dtype != dtype:
            raise FeedError(
                f"the array fed to input {name!r} has a wrong shape or dtype",
                got=f"{array.dtype}{list(array.shape)}",
                expected=f"{value.dtype}{list(value.shape)}",
                hint="feed the whole global array, in the input's dtype",
            )
        arrays[name] = array
    return arrays


def check_feed_names(given: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise FeedError unless exactly the expected names are fed."""
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys())
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"input {', '.join(map(repr, missing))} is not fed")
        if unknown:
            parts.append(f"{', '.join(map(repr, unknown))} is no input")
        raise FeedError(
            "; ".join(parts),
            got=", ".join(map(repr, sorted(given))) or "nothing",
            expected=", ".join(map(repr, sorted(expected))) or "no inputs",
        )


def input_specs(plan: Plan) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Name → global shape and dtype of this rank's inputs."""
    specs = {}
    for task in plan.tasks:
        if task.kind is TaskKind.INPUT and isinstance(task.spec, ComputeSpec):
            name = str(dict(task.spec.attrs)["name"])
            register = plan.register_by_id[task.outputs[0]]
            if region_shape(task.spec.output_regions[0]) != register.shape:
                raise ExecutionError(
                    f"the part of input {name!r} does not fit its register",
                    op=task.name,
                    rank=plan.rank,
                    got=str(task.spec.output_regions[0]),
                    expected=str(list(register.shape)),
                )
            specs[name] = task.spec.output_shapes[0], register.dtype
    return specs


def check_feed(name: str, value: object, shape: tuple[int, ...], dtype: DType) -> Array:
    expected = f"{dtype}{list(shape)}"
    if type(value) in (bool, int, float):
        fits = type(value) is bool or dtype.is_floating or (type(value) is int and dtype.is_integer)
        if shape != () or not fits:
            raise FeedError(
                f"the value fed to input {name!r} does not fit",
                got=f"the Python {type(value).__name__} {value!r}",
                expected=expected,
            )
        try:
            return np.asarray(value, dtype.numpy)
        except OverflowError:
            raise FeedError(
                f"the number fed to input {name!r} is out of range", got=value, expected=expected
            ) from None
    if not isinstance(value, (np.ndarray, np.generic)):
        raise FeedError(
            f"the value fed to input {name!r} is not a NumPy array",
            got=type(value).__name__,
            expected=expected,
        )
    array = np.asarray(value)
    if array.shape != shape or array.dtype != dtype.numpy:
        raise FeedError(
            f"the array fed to input {name!r} has a wrong shape or dtype",
            got=f"{array.dtype}{list(array.shape)}",
            expected=expected,
            hint="feed the whole global array, in the input's dtype",
        )
    return array
