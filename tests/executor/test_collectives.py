"""All collectives on all transports, against NumPy on whole tensors."""

from __future__ import annotations

import pytest

from plancompiler.executor.local_run import LocalWorld
from tests.executor.collectives import check_collectives, collective_feeds, collective_plans

STEPS = 2


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_local(members):
    with LocalWorld(collective_plans(members)) as world:
        for step in range(STEPS):
            feeds = collective_feeds(members, step)
            check_collectives(members, feeds, world.step(feeds))


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_host(members, host_world):
    ranks = range(members)
    host_world.open(collective_plans, members, ranks=ranks)
    feeds = [collective_feeds(members, step) for step in range(STEPS)]
    for fed, outputs in zip(feeds, host_world.step(feeds, ranks), strict=True):
        check_collectives(members, fed, outputs)
    host_world.close_run(ranks)
    for rank in ranks:
        assert host_world.ask(rank, "leaks") == ([], [])


@pytest.mark.parametrize(
    "hosts", [(0, 1), (0, 0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 3)], ids=str
)
def test_several_hosts(hosts, host_world):
    ranks = range(len(hosts))
    host_world.open(collective_plans, len(hosts), ranks=ranks, hosts=hosts)
    feeds = [collective_feeds(len(hosts), step) for step in range(STEPS)]
    for fed, outputs in zip(feeds, host_world.step(feeds, ranks), strict=True):
        check_collectives(len(hosts), fed, outputs)
    host_world.close_run(ranks)
    for rank in ranks:
        assert host_world.ask(rank, "leaks") == ([], [])
