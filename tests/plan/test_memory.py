"""The memory planner against random executions, and against the verifier's own proof."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.errors import MemoryOverlapError
from plancompiler.ir import BROADCAST, DType, NdSbp
from plancompiler.ir.task import TaskKind, pack_register_id, pack_task_id
from plancompiler.lower.memory import (
    ALIGNMENT,
    MemoryPlan,
    StorageRequest,
    align,
    known_placements,
    peak_live,
    place_windows,
    plan_memory,
    storage_windows,
)
from plancompiler.plan.index import STREAMS, PlanIndex
from plancompiler.plan.order import StepOrder
from plancompiler.plan.plan import Block, Plan, RegisterDesc, Task
from plancompiler.plan.rules_overlap import check_overlap
from tests.plan.step_graphs import OverwrittenError, StepGraph, run, step_graphs


def planned(graph: StepGraph) -> MemoryPlan:
    return plan_memory(graph.order(), 0, graph.requests())


def places_of(graph: StepGraph, offsets: dict[int, int]) -> dict[int, tuple[int, int]]:
    return {request.key: (0, offsets[request.key]) for request in graph.requests()}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(step_graphs(), st.integers(0, 1 << 30))
def test_no_execution_overwrites_what_is_alive(graph: StepGraph, seed: int) -> None:
    places = places_of(graph, planned(graph).offsets)
    for turn in range(4):
        run(graph, places, seed + turn)


@settings(max_examples=100, deadline=None)
@given(step_graphs())
def test_the_verifier_proves_what_the_planner_did(graph: StepGraph) -> None:
    memory = planned(graph)
    check_overlap(PlanIndex(as_plan(graph, places_of(graph, memory.offsets))))


@settings(max_examples=150, deadline=None)
@given(step_graphs(most=12), st.integers(0, 1 << 30))
def test_what_the_verifier_lets_pass_runs(graph: StepGraph, seed: int) -> None:
    """Random placements: if the verifier finds no overlap, no execution finds one."""
    chance = random.Random(seed)
    places = {key: (0, 64 * chance.randrange(12)) for key in range(len(graph.storages))}
    try:
        check_overlap(PlanIndex(as_plan(graph, places)))
    except MemoryOverlapError:
        return
    for turn in range(4):
        run(graph, places, seed + turn)


def test_the_oracle_finds_an_overlap() -> None:
    """Two streams that do not know of each other, on the same bytes."""
    graph = StepGraph([0, 1], [[], []], [(0, [0], 64), (1, [1], 64)])
    with pytest.raises(OverwrittenError):
        run(graph, {0: (0, 0), 1: (0, 0)}, seed=0)


def as_plan(graph: StepGraph, places: dict[int, tuple[int, int]]) -> Plan:
    """A plan with the graph's streams and edges (as control) and a register per storage."""
    makes: dict[int, list[int]] = {}
    reads: dict[int, list[int]] = {}
    registers = []
    for key, (writer, users, nbytes) in enumerate(graph.storages):
        register = pack_register_id(0, writer, key)
        makes.setdefault(writer, []).append(register)
        for user in users:
            if user != writer:
                reads.setdefault(user, []).append(register)
        registers.append(
            RegisterDesc(
                id=register,
                name=f"r{key}",
                shape=(nbytes,),
                dtype=DType.UINT8,
                sbp=NdSbp((BROADCAST,)),
                producer=pack_task_id(0, writer),
                consumers=tuple(pack_task_id(0, user) for user in users if user != writer),
                block=places[key][0],
                offset=places[key][1],
                nbytes=nbytes,
            )
        )
    for task in range(len(graph.streams)):
        after = [other for other, before in enumerate(graph.predecessors) if task in before]
        registers.append(
            RegisterDesc(
                id=pack_register_id(0, task, 0, 31),
                name=f"c{task}",
                shape=(),
                dtype=DType.UINT8,
                sbp=NdSbp(()),
                producer=pack_task_id(0, task),
                consumers=tuple(pack_task_id(0, other) for other in after),
                block=-1,
                register_count=2,  # no credit: the oracle has none for plain edges
            )
        )
    tasks = tuple(
        Task(
            id=pack_task_id(0, task),
            kind=TaskKind.COMPUTE,
            stream=STREAMS[stream],
            name=f"t{task}",
            inputs=tuple(reads.get(task, ())),
            outputs=tuple(makes.get(task, ())),
            spec=None,
            controls_in=tuple(
                pack_register_id(0, other, 0, 31) for other in graph.predecessors[task]
            ),
            controls_out=(pack_register_id(0, task, 0, 31),),
        )
        for task, stream in enumerate(graph.streams)
    )
    blocks = (Block(0, "arena", False, 1 << 20), Block(1, "arena", True, 1 << 20))
    return Plan("random", 0, 1, 0, tasks, tuple(registers), (), blocks, (), (), ())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(1, 2000)), max_size=40)
)
def test_windows_alive_together_are_apart(windows: list[tuple[int, int, int]]) -> None:
    starts = [start for start, _, _ in windows]
    ends = [start + length for start, length, _ in windows]
    sizes = [align(nbytes) for _, _, nbytes in windows]
    offsets, top, peak = place_windows(starts, ends, sizes)
    assert peak == peak_live(starts, ends, sizes) == brute_peak(starts, ends, sizes)
    assert peak <= top <= sum(sizes)
    assert top == max((o + s for o, s in zip(offsets, sizes, strict=True)), default=0)
    for one in range(len(windows)):
        assert offsets[one] % ALIGNMENT == 0
        for two in range(one):
            together = starts[one] < ends[two] and starts[two] < ends[one]
            apart = (
                offsets[one] + sizes[one] <= offsets[two]
                or offsets[two] + sizes[two] <= offsets[one]
            )
            assert apart or not together


def brute_peak(starts: list[int], ends: list[int], sizes: list[int]) -> int:
    return max(
        (
            sum(size for s, e, size in zip(starts, ends, sizes, strict=True) if s <= point < e)
            for point in range(max(ends, default=0))
        ),
        default=0,
    )


def chain(count: int) -> StepOrder:
    """Tasks one after another on the compute stream."""
    return StepOrder([0] * count, [[task - 1] if task else [] for task in range(count)])


def test_a_chain_needs_two_buffers() -> None:
    requests = [StorageRequest(task, 100, (task, task + 1), (task,)) for task in range(9)]
    memory = plan_memory(chain(10), 0, requests)
    assert memory.nbytes == memory.peak_live_bytes == 256
    assert set(memory.offsets.values()) == {0, 128}


def test_dedicated_storage_lies_behind_what_is_shared() -> None:
    requests = [
        StorageRequest(0, 100, (0, 1), (0,), dedicated=True),
        StorageRequest(1, 64, (1, 2), (1,)),
        StorageRequest(2, 0, (2, 3), (2,)),
        StorageRequest(3, 64, (3, 4), (3,)),
    ]
    memory = plan_memory(chain(5), 0, requests)
    assert memory.offsets == {0: 64, 1: 0, 2: 0, 3: 0}
    assert memory.nbytes == memory.peak_live_bytes == 192


def test_windows_of_other_streams_are_what_compute_knows() -> None:
    """Compute 0, collective after it, compute 2 apart, compute 3 after the collective."""
    order = StepOrder([0, 1, 0, 0], [[], [0], [], [1]])
    whole = StorageRequest(0, 64, (1, 3), (1,))
    assert storage_windows(order, 0, [whole]) == [(1, 5)]
    read = StorageRequest(1, 64, (0, 1), (0,))
    assert storage_windows(order, 0, [read]) == [(0, 4)]
    unknown_end = StepOrder([0, 1], [[], [0]])
    assert storage_windows(unknown_end, 0, [read]) == [None]
    unknown_start = StepOrder([1, 0], [[], [0]])
    assert storage_windows(unknown_start, 0, [StorageRequest(0, 64, (0, 1), (0,))]) == [None]
    none = replace(read, producers=())
    assert storage_windows(order, 0, [none, replace(read, dedicated=True)]) == [None, None]


def test_the_result_depends_on_the_requests_alone() -> None:
    chance = random.Random(3)
    starts = [chance.randrange(200) for _ in range(300)]
    ends = [start + chance.randrange(1, 40) for start in starts]
    sizes = [align(chance.randrange(1, 100_000)) for _ in starts]
    first = place_windows(starts, ends, sizes)
    assert first == place_windows(list(starts), list(ends), list(sizes))
    assert first[1] <= first[2] * 1.1


def test_the_same_windows_are_placed_once() -> None:
    """As those of ranks that do the same work."""
    order = StepOrder([0, 0, 0], [(), (0,), (1,)])
    requests = [StorageRequest(key, 4096, (key, key + 1), (key,)) for key in range(2)]
    known_placements.cache_clear()
    first = plan_memory(order, 0, requests)
    assert plan_memory(order, 0, requests).offsets == first.offsets
    assert known_placements.cache_info()[:2] == (1, 1)


def test_forward_and_backward_lifetimes_meet_the_lower_bound() -> None:
    """Activations live from the forward to the mirrored backward pass: nested, as in training."""
    chance = random.Random(1)
    layers = 400
    starts, ends, sizes = [], [], []
    for layer in range(layers):
        backward = 2 * layers - layer
        for start, end in (
            (2 * layer, 2 * backward + 1),
            (2 * layer, 2 * layer + 2 * chance.randint(1, 4) + 1),
            (2 * backward, 2 * backward + 2 * chance.randint(1, 3) + 1),
        ):
            starts.append(start)
            ends.append(end)
            sizes.append(align(chance.choice([64, 1000, 4096, 65536, 1 << 20, 3 << 20])))
    _, top, peak = place_windows(starts, ends, sizes)
    assert top <= peak * 1.001
