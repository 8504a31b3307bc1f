"""Ranks that are processes, on real devices: one for each, or one that all share."""

from __future__ import annotations

import gc
from time import monotonic

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.eager.world import current_world
from plancompiler.errors import PlanCompilerError
from tests.comm import suite
from tests.eager.test_devices import LAYOUTS, changes, train
from tests.eager.test_redistribute import change_all, check_all
from tests.examples import gpt
from tests.executor.cuda.jobs import moved, rotated
from tests.executor.cuda.processes import in_processes
from tests.executor.cuda.real import on_real_devices, several
from tests.executor.cuda.test_context import OnDevices, device_context, get, put
from tests.integration import test_ring_attention as rings

pytestmark = [on_real_devices, several, pytest.mark.processes]


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"tp": 2},
        {"dp": 2, "zero": 3},
        {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
        {"dp": 2, "tp": 2},
    ],
    ids=str,
)
def test_jobs_train_to_the_hosts_losses(layout):
    job = gpt(**layout)
    losses = []
    for each, backend in ((job, "threads"), (moved(job), "processes")):
        with pc.run(each, backend=backend) as session:
            losses.append([session.step()["loss"] for _ in range(8)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_job_exchanges_values(microbatches, ranks):
    job = rotated(ranks, microbatches=microbatches)
    losses = []
    for each, backend in ((job, "threads"), (moved(job), "processes")):
        with pc.run(each, backend=backend) as session:
            x = np.ones((8, 4), np.float32)
            losses.append([session.step(x=x)["loss"] for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


def test_hosts_and_devices_in_one_job():
    mixed = gpt(pp=2, microbatches=2)
    losses = []
    for each, backend in (
        (mixed, "threads"),
        (moved(mixed, lambda rank: "cuda" if rank else "cpu"), "processes"),
    ):
        with pc.run(each, backend=backend) as session:
            losses.append([session.step()["loss"] for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


def test_a_job_sends_keys_and_values_round_a_ring():
    expected = rings.alone()
    with pc.run(moved(rings.job_of_all()), backend="processes") as session:
        for _ in range(2):
            outputs = session.step(**rings.feeds_of())
    rings.assert_same(rings.named(outputs), expected[1::2], rings.IN_JOBS)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_eager_tensors_send_keys_and_values_round_a_ring(compiled, tmp_path):
    expected = rings.alone()
    ring = pc.Placement("cuda", list(range(rings.RANKS)))
    for results in in_processes(tmp_path, rings.run_eagerly, rings.RANKS, ring, [], compiled):
        rings.assert_same([values for values, *_ in results], expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("layout", "optimizer"), [("data", "sgd"), ("sharded", "adamw")])
def test_eager_programs_train_to_the_losses_of_one_cpu(layout, optimizer, compiled, tmp_path):
    expected = spawn(train, 1, "cpu", "one", optimizer)[0]
    ranks = np.size(LAYOUTS[layout][1])
    for losses in in_processes(tmp_path, train, ranks, "cuda", layout, optimizer, compiled):
        np.testing.assert_allclose(losses, expected, 1e-4)


def test_changes_of_layout_between_devices_and_hosts(tmp_path):
    pairs = list(changes())[::3]
    value = np.random.default_rng(0).normal(size=(5, 7))
    check_all(
        pairs, value, lambda function, ranks, *args: in_processes(tmp_path, changed, ranks, *args)
    )


def changed(pairs, value, shards):
    """What this rank gets, as arrays of the host."""
    return [
        (np.asarray(local), sbp, counts) for local, sbp, counts in change_all(pairs, value, shards)
    ]


def test_every_operation_gives_what_it_gives_on_the_host(tmp_path):
    assert min(in_processes(tmp_path, communicate, suite.RANKS)) > 800


def communicate():
    world = current_world()
    return suite.run(OnDevices(world.comm, world.space("cuda")))


def test_communicators_of_several_streams_at_once(tmp_path):
    for beside, compute in in_processes(tmp_path, overlapping, 2):
        assert beside == [3.0] * 40
        assert compute == [6.0] * 40


def overlapping():
    world = current_world()
    space = world.space("cuda")
    beside = world.comm.context((0, 1), on_compute_stream=False, device_type="cuda")
    compute = world.comm.context((0, 1), device_type="cuda")
    given = space.put(np.full(1 << 18, world.rank + 1, np.float32))
    works, totals = [], []
    for _ in range(40):
        works.append(beside.all_reduce(given))
        totals.append(compute.all_reduce(given * 2))
    results = []
    for arrays in ([work.wait() for work in works], totals):
        values = [space.get(each) for each in arrays]
        assert all((each == each[0]).all() for each in values)
        results.append([float(each[0]) for each in values])
    return results


def test_a_rank_that_drops_a_function_does_not_wait_for_ranks_that_keep_it(tmp_path):
    expected = [[float(number)] * 4 for number in range(3)]
    assert in_processes(tmp_path, dropping, 2) == [expected] * 2


def dropping():
    """The first rank lets go of each function's communicators, the second at the end."""
    ring, kept, results = pc.Placement("cuda", [0, 1]), [], []
    x = pc.tensor(np.ones(4, np.float32), ring, "S(0)")
    for number in range(3):
        function = pc.compile(lambda x, number=number: (x * float(number)).redistribute(sbp="B"))
        results.append(function(x).numpy().tolist())
        if current_world().rank == 1:
            kept.append(function)
        del function
        gc.collect()
    return results


def test_a_rank_that_fails_ends_what_others_wait_for(tmp_path):
    told, _ = in_processes(tmp_path, failing, 2)
    name, seconds = told
    assert name == "AbortedError"
    assert seconds < 20


def failing():
    """The second rank gives up; the first one has launched what only both can end."""
    world = current_world()
    group = device_context(2)
    get(group.all_reduce(put(1)))
    begin = monotonic()
    try:
        if world.rank == 1:
            world.comm.abort(PlanCompilerError("this rank gives up"))
        while True:
            get(group.all_reduce(put(1)))
    except PlanCompilerError as error:
        return type(error).__name__, monotonic() - begin


def test_ranks_that_end_at_different_times(tmp_path):
    assert in_processes(tmp_path, ending_late, 2) == [[2.0], [2.0]]


def ending_late():
    total = get(device_context(2).all_reduce(put(1)))
    if current_world().rank == 1:
        x, until = put(*[1.0] * 1000), monotonic() + 3
        while monotonic() < until:
            x = x * 1.0
        get(x)
    return total
