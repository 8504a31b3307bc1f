"""Fused reductions: how many are left, what closes a bucket, and that losses stay the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.fuse import MAX_MEMBERS, fuse_reductions
from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import Job
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import Primitive
from plancompiler.lower.compile import compile_plans
from tests.examples import gpt, mlp


def boxed(job: Job) -> BoxingTaskGraph:
    return build_boxing_task_graph(infer_sbp(job), job.world_size)


def reductions(graph: BoxingTaskGraph) -> list[int]:
    """Bytes of every value reduced, collective by collective."""
    return [
        sum(element_count(layout.shape) * layout.dtype.itemsize for layout in family.outputs)
        for family in graph.families
        if family.transfer is not None and family.transfer.primitive is Primitive.ALL_REDUCE
    ]


def test_all_gradients_of_a_small_model_become_one_reduction() -> None:
    graph = boxed(mlp(layout="dp", ranks=2, evaluate=False))
    fused, counts = fuse_reductions(graph)
    assert (counts.before, counts.after) == (7, 1)
    assert sum(reductions(fused)) == sum(reductions(graph))


@pytest.mark.parametrize("fuse_bytes", [1 << 10, 4 << 10, 64 << 10])
def test_the_bucket_size_predicts_the_number_of_reductions(fuse_bytes: int) -> None:
    graph = boxed(gpt(dp=2, layers=12))
    buckets, size, members = 1, 0, 0
    for nbytes in reductions(graph):
        if members and (size + nbytes > fuse_bytes or members == MAX_MEMBERS):
            buckets, size, members = buckets + 1, 0, 0
        size, members = size + nbytes, members + 1
    fused, counts = fuse_reductions(graph, fuse_bytes)
    assert counts.before > 12 * 16
    assert counts.after == len(reductions(fused)) == buckets


@pytest.mark.slow
@pytest.mark.parametrize("fuse_bytes", [0, 2 << 10, 1 << 20, "auto"])
def test_losses_do_not_change(fuse_bytes: int | str) -> None:
    job = gpt(dp=2, tp=2)
    job = replace(job, config=replace(job.config, fuse_bytes=fuse_bytes))
    reference = gpt(dp=1)
    losses = []
    for each in (job, reference):
        plans = compile_plans(each, each.world_size, "rank_per_iter").plans
        with LocalWorld(plans) as world:
            losses.append([float(outputs["loss"]) for outputs in world.run(10)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
