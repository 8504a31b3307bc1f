"""Streams of collectives: which stream each kind is on, and that no setting changes a loss."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.boxing.streams import choose_streams
from plancompiler.ir import Job
from plancompiler.ir.task import Primitive, TaskKind
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.passes import run_passes
from plancompiler.plan.plan import Stream
from plancompiler.plan.verify import verify_plans
from tests.examples import gpt
from tests.passes.worlds import configured, losses, mesh

SETTINGS = ("group", "one", "compute")


def streams_of(job: Job, streams: str = "group") -> Counter[tuple[Stream, Primitive]]:
    """The collectives of a job, by stream and primitive."""
    job, _ = run_passes(job)
    graph = choose_streams(build_boxing_task_graph(infer_sbp(job), job.world_size), streams)
    return Counter(
        (family.transfer.stream, family.transfer.primitive)
        for family in graph.families
        if family.transfer is not None and family.kind is TaskKind.COLLECTIVE_BOXING
    )


def test_gradients_are_reduced_apart_from_what_computation_waits_for() -> None:
    layers = 2
    job = gpt(dp=2, tp=2, layers=layers)
    parameters = len(job.variables) - sum("adam" in name for name in job.variables)
    counts = streams_of(job)
    # Two reductions in forward and two in backward of each block, for tensor parallelism.
    assert counts[Stream.COLLECTIVE, Primitive.ALL_REDUCE] >= 4 * layers
    gradients = counts[Stream.GRADIENT, Primitive.ALL_REDUCE]
    assert 16 * layers <= gradients <= parameters + 1  # each parameter's, and the loss
    assert {stream for stream, _ in counts} == {Stream.COLLECTIVE, Stream.GRADIENT}


def test_parameters_of_zero_are_gathered_on_their_own_stream() -> None:
    counts = streams_of(configured(gpt(dp=2, tp=2), zero=3))
    assert {stream for stream, what in counts if what is Primitive.ALL_GATHER} == {Stream.PARAMETER}
    assert {stream for stream, what in counts if what is Primitive.REDUCE_SCATTER} == {
        Stream.GRADIENT
    }


def test_gradients_that_are_accumulated_or_cast_are_gradients() -> None:
    counts = streams_of(configured(gpt(dp=2), microbatches=2, precision="float16"))
    assert counts.keys() <= {
        (Stream.GRADIENT, Primitive.ALL_REDUCE),
        (Stream.COLLECTIVE, Primitive.ALL_REDUCE),
    }
    # Of the others, backward waits for the flag of an overflow alone.
    assert counts[Stream.GRADIENT, Primitive.ALL_REDUCE] > 20
    assert counts[Stream.COLLECTIVE, Primitive.ALL_REDUCE] <= 2


@pytest.mark.parametrize("streams", SETTINGS[1:])
def test_a_setting_puts_all_on_one_stream(streams: str) -> None:
    expected = {"one": Stream.COLLECTIVE, "compute": Stream.COMPUTE}[streams]
    assert {stream for stream, _ in streams_of(gpt(dp=2, tp=2), streams)} == {expected}


def test_an_op_names_its_stream() -> None:
    with pc.job("one") as job:
        x = pc.ones((4, 4), "float32", mesh(2), ["S(1)"])
        y = x.redistribute(sbp="B").exp()
        with pc.collective_stream("compute"):
            z = pc.all_gather(y.redistribute(sbp=["S(0)"]).exp())
        pc.output("z", z)
    assert streams_of(job) == {
        (Stream.COLLECTIVE, Primitive.ALL_GATHER): 1,
        (Stream.COMPUTE, Primitive.ALL_GATHER): 1,
    }
    plans = compile_plans(job, 2, "rank_per_iter").plans
    assert {group.stream for group in (each.group for each in plans[0].communicators)} == {
        Stream.COLLECTIVE,
        Stream.COMPUTE,
    }
    refused = pytest.raises(pc.PlanCompilerError, match="one of collective, gradient, parameter")
    with refused, pc.collective_stream("copy"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"dp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"fuse_bytes": 1 << 14}),
        ({"dp": 2, "tp": 2}, {"zero": 3}),
        ({"dp": 2}, {"zero": 2, "microbatches": 2}),
    ],
    ids=str,
)
def test_losses_do_not_depend_on_streams(
    layout: dict[str, int], settings: dict[str, object]
) -> None:
    job = gpt(**layout)
    reference = losses(gpt(dp=1), 4)
    for streams in SETTINGS:
        actual = losses(job, 4, streams=streams, **settings)
        np.testing.assert_allclose(actual, reference, rtol=1e-5)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("streams", SETTINGS)
def test_all_modes_give_the_same_plans(streams: str) -> None:
    job = configured(gpt(dp=2, tp=2), streams=streams, zero=2, microbatches=2, fuse_bytes=4096)
    compiled = {mode: compile_plans(job, job.world_size, mode) for mode in MODES}
    assert len({each.digest for each in compiled.values()}) == 1


def test_the_ranks_of_a_job_agree_about_streams() -> None:
    """A rank whose plan was made with another setting is found."""
    job = gpt(dp=2, tp=2)
    plans, other = (
        compile_plans(configured(job, streams=each), 4, "rank_per_iter").plans
        for each in ("group", "one")
    )
    with pytest.raises(pc.PlanCompilerError, match="members run collectives in one order"):
        verify_plans({**plans, 3: other[3]})


def test_a_device_mesh_has_one_communicator_for_each_stream() -> None:
    plans = compile_plans(configured(gpt(dp=2), zero=2), 2, "rank_per_iter").plans
    groups = [each.group for each in plans[0].communicators]
    assert len(set(groups)) == len(groups)
    assert {group.stream for group in groups} >= {Stream.GRADIENT, Stream.PARAMETER}
    assert {group.ranks for group in groups} == {tuple(mesh(2).rank_list)}
