"""Jobs under a config: compiled, run on threads, and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import plancompiler as pc
from plancompiler.errors import UsageError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import DType, Job
from plancompiler.lower.compile import Compilation, compile_plans
from plancompiler.passes import Config, run_passes
from plancompiler.passes.base import PassRecord

STEPS = 12
"""Steps in which losses are compared."""


def configured(job: Job, **settings: object) -> Job:
    """The job with these settings of the compiler; reductions are not fused unless asked for."""
    return replace(job, config=Config(**{"fuse_bytes": 0, **settings}))  # type: ignore[arg-type]


def compiled(job: Job, **settings: object) -> Compilation:
    """All plans of the job under a config."""
    return compile_plans(configured(job, **settings), job.world_size, "rank_per_iter")


def usage_error(job: Job, **settings: object) -> UsageError:
    """The error of a job that cannot be compiled like this: says all of what, where and why."""
    with pytest.raises(UsageError) as caught:
        compiled(job, **settings)
    report = caught.value.report
    assert report.op
    assert report.source
    assert report.got
    assert report.expected
    return caught.value


def refused(job: Job, **settings: object) -> str:
    """What that error says."""
    return str(usage_error(job, **settings))


def losses(job: Job, steps: int, **settings: object) -> list[float]:
    """What the job reports as `loss` in each step, a thread per rank."""
    with LocalWorld(compiled(job, **settings).plans) as world:
        return [float(outputs["loss"]) for outputs in world.run(steps)]


def collectives(compilation: Compilation) -> Counter[str]:
    """Link families by primitive."""
    families = compilation.graph.families
    return Counter(str(f.transfer.primitive) for f in families if f.transfer is not None)


def record_of(job: Job, name: str, **settings: object) -> PassRecord:
    """What a pass says of itself."""
    _, records = run_passes(configured(job, **settings))
    return next(record for record in records if record.name == name)


def float_dtypes(job: Job, *kinds: str) -> set[DType]:
    """Floating dtypes that ops of these kinds read and make; each kind is there."""
    ops = [op for op in job.ops if op.kind in kinds]
    assert {op.kind for op in ops} == set(kinds)
    values = [value for op in ops for value in (*op.inputs, *op.outputs)]
    return {value.dtype for value in values if value.dtype.is_floating}


def arena(compilation: Compilation, rank: int = 0) -> int:
    """Bytes of a rank's arena."""
    return compilation.plans[rank].arena_bytes


def variable_bytes(compilation: Compilation, rank: int = 0) -> int:
    """Bytes of a rank's variables as they are, without alignment."""
    plan = compilation.plans[rank]
    registers = plan.register_by_id
    return sum(registers[variable.register].nbytes for variable in plan.variables)


class Tower(pc.nn.Module):
    """Equal linear layers: `layers.0`, `layers.1`, ..."""

    def __init__(self, layers: int, dim: int) -> None:
        self.layers = pc.nn.ModuleList(pc.nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: pc.Value) -> pc.Value:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def mesh(*extents: int, axes: tuple[str, ...] = ("dp",), first: int = 0) -> pc.Placement:
    """A placement over consecutive ranks."""
    size = 1
    for extent in extents:
        size *= extent
    ranks = list(range(first, first + size))
    for extent in reversed(extents[1:]):
        ranks = [ranks[start : start + extent] for start in range(0, len(ranks), extent)]
    return pc.Placement("cpu", ranks, axes)


def tower_job(
    placement: pc.Placement,
    optimizer: pc.optim.Optimizer | None = None,
    layers: int = 3,
    dim: int = 16,
    batch: int = 8,
) -> Job:
    """Regression of noise on noise by a tower."""
    rows = ["S(0)"] + ["B"] * (placement.ndim - 1)
    with pc.job("tower") as job:
        model = Tower(layers, dim).place(placement)
        x = pc.normal((batch, dim), placement=placement).redistribute(sbp=rows)
        target = pc.normal((batch, dim), placement=placement).redistribute(sbp=rows)
        loss = pc.square(model(x) - target).mean()
        if optimizer is not None:
            optimizer.minimize(loss)
        pc.output("loss", loss)
    return job
