"""Programs beside the one that a session steps, which read its variables: validation, for example.

    with pc.run(train, programs={"validation": validate}) as session:  # or client.open(train, ...)
        session.step(x=..., y=...)
        session.evaluate("validation", x=..., y=...)["loss"]

The ranks of such a program are threads of this process with memory of their own. Before it runs,
the variables that it reads are copied there, if steps were made since the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.cache.plan_cache import open_cache
from plancompiler.errors import FeedError, JobError, UsageError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.frontend.trace import as_job
from plancompiler.ir import Job
from plancompiler.ir.shard import Region, intersect, region_index, region_shape, relative
from plancompiler.lower.cached import plans_of_job
from plancompiler.ops.registry import op_def
from plancompiler.plan.plan import VariableDesc
from plancompiler.running.world_size import world_size_of

Array = np.ndarray[Any, np.dtype[Any]]
Outputs = dict[str, "Array | float"]
Boxes = Mapping[str, Sequence[tuple[Region, Array]]]
"""Boxes of variables with what is in them, by name; together they cover each variable."""


class Programs:
    """The programs of a session, by name."""

    def __init__(
        self,
        programs: Mapping[str, Job] | None,
        trained: Job,
        ranks: int,
        mode: str,
        cache: bool,
        deadline: float,
    ) -> None:
        """JobError for one that does not fit the session's job."""
        self._named = {
            name: Evaluation(name, as_job(each), trained, ranks, mode, cache, deadline)
            for name, each in (programs or {}).items()
        }

    def evaluate(
        self,
        program: str,
        feeds: Mapping[str, Any],
        steps: int,
        boxes: Callable[[Collection[str]], Boxes],
    ) -> Outputs:
        """A program's outputs after so many steps of the session, of which `boxes` gives copies of
        variables. UsageError for a program that there is not.
        """
        beside = self._named.get(program)
        if beside is None:
            raise UsageError(
                "the session has no such program",
                got=repr(program),
                expected=", ".join(map(repr, self._named)) or "none",
                hint="name it when the session starts: pc.run(job, programs={name: program})",
            )
        if not beside.current(steps):
            beside.take(boxes(beside.names), steps)
        return plain_outputs(beside.job, beside.run(feeds))

    def close(self) -> None:
        """Stop the ranks of all. May be called again."""
        for each in self._named.values():
            each.close()


def plain_outputs(job: Job, outputs: Mapping[str, Array]) -> Outputs:
    """Outputs in the job's order, scalars as Python numbers of their kind."""
    return {
        name: outputs[name].item() if outputs[name].ndim == 0 else outputs[name]
        for name in job.outputs
        if name in outputs
    }


def whole_boxes(values: Mapping[str, Array], names: Collection[str]) -> Boxes:
    """Whole variables as boxes."""
    return {
        name: [(tuple((0, extent) for extent in values[name].shape), values[name])]
        for name in names
    }


class Evaluation:
    """One such program, compiled for the ranks of a session."""

    def __init__(
        self, name: str, job: Job, trained: Job, ranks: int, mode: str, cache: bool, deadline: float
    ) -> None:
        """JobError where it has a variable that the session's job lacks or has otherwise, and where
        it changes one.
        """
        self.job = job
        _check(name, job, trained)
        self.names: Collection[str] = frozenset(job.variables)
        """The variables that it reads."""
        ranks = world_size_of(job, ranks)
        self._plans = plans_of_job(job, ranks, mode, open_cache() if cache else None).plans
        self._deadline = deadline
        self._world: LocalWorld | None = None
        self._copied: int | None = None
        """After how many steps of the session the variables were copied."""

    def current(self, steps: int) -> bool:
        """Whether the variables are those after so many steps of the session."""
        return self._world is not None and self._copied == steps

    def take(self, boxes: Boxes, steps: int) -> None:
        """Copy the variables, which are those after so many steps of the session."""
        shards: dict[int, dict[str, Array]] = {}
        for rank, plan in self._plans.items():
            for each in plan.variables:
                check_whole(each)
                value = _filled(each.region, boxes[each.name])
                shards.setdefault(rank, {})[each.name] = value
        if self._world is None:
            self._world = LocalWorld(self._plans, variables=shards, deadline=self._deadline)
        else:
            self._world.assign(shards)
        self._copied = steps

    def run(self, feeds: Mapping[str, Any]) -> Mapping[str, Array]:
        """Its outputs for these feeds. After an error other than a FeedError it starts anew."""
        assert self._world is not None
        try:
            return self._world.step(feeds)
        except FeedError:
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop its ranks and free their memory. May be called again."""
        world, self._world = self._world, None
        if world is not None:
            world.close()


def _check(name: str, job: Job, trained: Job) -> None:
    for op in job.ops:
        if op_def(op.kind).mutates:
            raise JobError(
                f"program {name!r} changes a variable, which belongs to the session's job",
                at=op,
                hint="leave out optimizers and running statistics: model.eval()",
            )
    for variable, value in job.variables.items():
        given = trained.variables.get(variable)
        if given is None or given.type != value.type:
            raise JobError(
                f"program {name!r} reads a variable that the session's job does not have so",
                got=f"{variable}: {value.type}",
                expected=f"{variable}: {given.type}"
                if given is not None
                else f"one of {', '.join(trained.variables) or 'none'}",
                hint="trace both with the same model",
            )


def check_whole(variable: VariableDesc) -> None:
    """JobError for a variable whose ranks hold parts of a sum, which are no boxes of it."""
    if variable.sbp.has_partial:
        raise JobError(
            f"variable {variable.name!r} is partial and cannot be read by another program",
            got=str(variable.sbp),
        )


def _filled(region: Region, boxes: Sequence[tuple[Region, Array]]) -> Array:
    """What lies in a region, by boxes that cover it."""
    for box, array in boxes:
        if box == region:
            return array
    target = np.empty(region_shape(region), boxes[0][1].dtype)
    for box, array in boxes:
        common = intersect(box, region)
        if common is not None:
            part = array[region_index(relative(common, box))]
            np.copyto(target[region_index(relative(common, region))], part)
    return target
