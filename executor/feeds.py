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
    return {
        name: check_feed(name, feeds[name], value.shape, value.dtype)
        for name, value in job.inputs.items()
    }


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


_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2}
"""Kinds of NumPy's dtypes: truth values, whole numbers, floating ones."""


def check_feed(name: str, value: object, shape: tuple[int, ...], dtype: DType) -> Array:
    """What is fed to an input as an array of its shape and dtype.

    Numbers, lists of numbers and arrays are converted to another size of their kind (truth values,
    whole numbers, floating ones) or to a later kind. FeedError for an earlier kind, for numbers out
    of range, and for another shape.
    """
    array = value if isinstance(value, np.ndarray) else _array_of(value)
    if array.shape == shape and array.dtype == dtype.numpy:
        return array
    wanted = 2 if dtype.is_floating else _KINDS[dtype.numpy.kind]
    if array.shape != shape or _KINDS.get(array.dtype.kind, 3) > wanted:
        raise FeedError(
            f"the array fed to input {name!r} has a wrong shape or dtype",
            got=f"{array.dtype}{list(array.shape)}"
            if array.dtype.kind in _KINDS
            else type(value).__name__,
            expected=f"{dtype}{list(shape)}",
            hint="feed the whole global array, in the input's kind of numbers",
        )
    with np.errstate(over="ignore"):
        converted: Array = array.astype(dtype.numpy)
    if (
        (np.isinf(converted) & ~np.isinf(array)).any()
        if dtype.is_floating
        else (converted != array).any()
    ):
        raise FeedError(
            f"a number fed to input {name!r} is out of range",
            got=f"{array.min()} to {array.max()}",
            expected=f"{dtype}{list(shape)}",
        )
    return converted


def _array_of(value: object) -> Array:
    """A number, or lists of numbers, as an array; an array of another kind for what is none."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return np.asarray(None)
    # NumPy makes floating numbers of an empty list.
    return array if array.size or isinstance(value, np.generic) else array.astype(np.bool_)
