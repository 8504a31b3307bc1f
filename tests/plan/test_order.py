"""Happens-before against the transitive closure of all edges over two steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.errors import VerifyError
from plancompiler.plan.order import StepOrder, covers
from tests.plan.step_graphs import StepGraph, step_graphs


def closure(graph: StepGraph, *, credits_count: bool) -> list[set[int]]:
    """What has finished when each task of two steps starts; task t of step s is s * tasks + t."""
    count = len(graph.streams)
    finished: list[set[int]] = []
    for step in (0, 1):
        for task, stream in enumerate(graph.streams):
            before = {step * count + other for other in graph.predecessors[task]}
            before |= {
                other
                for other in range(step * count + task)
                if graph.streams[other % count] == stream
            }
            if credits_count and step:
                for writer, users, _ in graph.storages:
                    if writer == task:
                        before |= set(users)
            finished.append(before.union(*(finished[other] for other in before)))
    return finished


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(step_graphs(), st.booleans())
def test_clocks_are_the_closure_of_all_edges(graph: StepGraph, credits_count: bool) -> None:
    order = graph.order(credits_count=credits_count)
    known = closure(graph, credits_count=credits_count)
    count = len(graph.streams)
    for second in range(count):
        for first in range(count):
            assert order.happens_before(first, second) == (first in known[second])
            assert order.previous_step_done(first, second) == (first in known[count + second])


@settings(max_examples=50, deadline=None)
@given(step_graphs())
def test_a_clock_of_tasks_is_covered_when_all_are_done(graph: StepGraph) -> None:
    order = graph.order()
    last = len(graph.streams) - 1
    done = [task for task in range(last) if order.happens_before(task, last)]
    assert covers(order.clocks[last], order.clock_of(done))
    for task in set(range(last + 1)) - set(done):
        assert not covers(order.clocks[last], order.clock_of([*done, task]))


def test_ends_are_what_the_last_task_of_each_stream_knows() -> None:
    order = StepOrder([0, 1, 0, 1], [[], [0], [], [2]])
    assert order.positions == [0, 0, 1, 1]
    assert order.counts == (2, 2)
    assert order.clocks == [(0, 0), (1, 0), (1, 0), (2, 1)]
    assert order.end_clocks == [(2, 0), (2, 2)]


def test_the_next_step_knows_what_its_streams_did() -> None:
    """Task 0 of stream 0 knows its own stream's end; task 1 of stream 1 knows both streams'."""
    order = StepOrder([0, 1], [[], [0]])
    assert order.previous_clock(0) == (1, 0)
    assert order.previous_clock(1) == (1, 1)
    held = StepOrder([0, 1], [[], [0]], [[1], []])
    assert held.previous_clock(0) == (1, 1)


@pytest.mark.parametrize("other", [1, 2, -1])
def test_a_predecessor_must_be_earlier(other: int) -> None:
    with pytest.raises(VerifyError, match="not earlier in plan order"):
        StepOrder([0, 0, 0], [[], [other], []])


def test_no_tasks_are_an_order() -> None:
    assert StepOrder([], []).counts == ()
