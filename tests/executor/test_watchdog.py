"""The watchdog on every transport: who does not get on is named, who is slow is waited for."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from plancompiler.errors import AbortedError, DeadlineError, PlanCompilerError
from plancompiler.executor import runtime as runtime_module
from plancompiler.executor import watchdog as watchdog_module
from plancompiler.executor.runtime import Runtime
from tests.executor.kernels import GATES, Gate, burn
from tests.executor.plans import Sketch, data_parallel, with_op
from tests.executor.test_failures import KINDS, Ranks, servers_end
from tests.threads import await_threads_of

X = np.ones((5, 3), np.float32)
PATIENCE = 60.0
RANKS = 3
NUMBERS = itertools.count()

__all__ = ["servers_end"]  # a fixture


@pytest.fixture(autouse=True)
def leave_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stream in a task that does not end is left behind at once, and ends as the task does."""
    monkeypatch.setattr(runtime_module, "LEAVE_SECONDS", 0.2)
    yield
    for rank in range(RANKS):
        await_threads_of(f"plancompiler-{rank}-")


@pytest.fixture
def gate(test_ops: None) -> Iterator[tuple[int, Gate]]:
    """Where `test_block` waits until the end of the test, and its number."""
    number = next(NUMBERS)
    GATES[number] = Gate()
    yield number, GATES[number]
    GATES.pop(number).opened.set()


def stages(ranks: int, kind: str, on_rank: int, attrs: dict, tasks: int = 1):
    """x on rank 0, handed from rank to rank; on one of them it goes through ops on its way."""
    sketch = Sketch(ranks)
    value = sketch.input(0, 0, "x", X.shape)
    family = 1
    for rank in range(ranks):
        if rank:
            value = sketch.copy(rank, family, value)
        for _ in range(tasks if rank == on_rank else 1):
            family += 1
            chosen = (kind, [value]) if rank == on_rank else ("maximum", [value, value])
            (value,) = sketch.compute(
                rank,
                family,
                *chosen,
                [(X.shape, "float32")],
                attrs=attrs if rank == on_rank else None,
                name=f"op_{family}",
            )
        family += 1
    sketch.output(ranks - 1, family, "y", value)
    for rank in range(ranks):
        sketch.step_end(rank, family + 1)
    return sketch.build()


class Patience(Ranks):
    """Ranks that wait for others with different patience."""

    def __init__(self, plans, kind: str, deadlines: Sequence[float]) -> None:
        super().__init__(plans, kind)
        for runtime, deadline in zip(self.runtimes, deadlines, strict=True):
            runtime._deadline = deadline


def errors_of(futures) -> list[PlanCompilerError]:
    errors = [future.exception() for future in futures]
    assert all(isinstance(each, PlanCompilerError) for each in errors)
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_blocks(kind, gate) -> None:
    number, held = gate
    plans = with_op("test_block", 3, 1, {"step": 1, "gate": number})
    with Ranks(plans, kind, deadline=0.4) as ranks:
        futures = [ranks.start(rank, {"x": np.ones(3, np.float32)}, 3) for rank in range(3)]
        errors = errors_of(futures)
        assert held.entered.is_set()
        for rank, error in enumerate(errors):
            assert isinstance(error, (DeadlineError, AbortedError)), rank
            assert "rank 1 has been in 'the_op' (family 1, step 1) for" in str(error)
        first = next(each for each in errors if isinstance(each, DeadlineError)).report
        assert (first.rank, first.op, first.source) == (1, "the_op", "sketch.py:2")
        assert re.search(r"rank [02] has waited for rank 1 for .* s: to come to the", first.got)
        assert "(family 2, step 1)" in first.got
        assert "longer deadline" in first.hint
        held.opened.set()


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_chain_of_registers_is_named(kind, gate) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0, which is in its kernel."""
    number, held = gate
    plans = stages(3, "test_block", 0, {"step": 0, "gate": number})
    with Patience(plans, kind, [PATIENCE, PATIENCE, 0.4]) as ranks:
        futures = [ranks.start(0, {"x": X}), ranks.start(1, {}), ranks.start(2, {})]
        error = futures[2].exception()
        assert isinstance(error, DeadlineError)
        assert error.report.rank == 0
        assert error.report.what.startswith("rank 0 has been in 'op_2' (family 2, step 0) for")
        first, second = error.report.got.split("; ")
        assert first.startswith("rank 2 has waited for rank 1 for")
        assert second.startswith("rank 1 has waited for rank 0 for")
        assert re.search(r"register 'r0\.2\.0\.0' \(.*\) to arrive", second)
        for other in errors_of(futures[:2]):
            assert "rank 0 has been in 'op_2'" in str(other)
        held.opened.set()


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_chain_of_credits_is_named(kind, gate) -> None:
    """Rank 0 waits for room at rank 1, which waits for room at rank 2, which is in its kernel."""
    number, held = gate
    plans = stages(3, "test_block", 2, {"step": 0, "gate": number})
    with Patience(plans, kind, [0.4, PATIENCE, PATIENCE]) as ranks:
        futures = [ranks.start(0, {"x": X}, 9), ranks.start(1, {}, 9), ranks.start(2, {}, 9)]
        error = futures[0].exception()
        assert isinstance(error, DeadlineError)
        assert error.report.rank == 2
        assert "(family 6, step 0)" in error.report.what
        first, second = error.report.got.split("; ")
        assert re.match(r"rank 0 has waited for rank 1 .*register .* to come back", first)
        assert re.match(r"rank 1 has waited for rank 2 .*register .* to come back", second)
        for other in errors_of(futures[1:]):
            assert "rank 2 has been in" in str(other)
        held.opened.set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_not_told_to_run(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    # All of them answer, however late a loaded machine lets them.
    monkeypatch.setattr(watchdog_module, "SHORTEST_ANSWER", PATIENCE)
    monkeypatch.setattr(watchdog_module, "LONGEST_ANSWER", PATIENCE)
    with Ranks(data_parallel(3), kind, deadline=0.4) as ranks:
        future = ranks.start(0, {"x": np.ones((6, 4), np.float32)})
        error = future.exception()
        assert isinstance(error, DeadlineError)
        # One of both may have stood still for some of the time, which does not count.
        idle = "rank {} was not told to run step 0"
        both = f"{idle.format(1)}(; {idle.format(2)})?|{idle.format(2)}"
        assert re.match(rf"({both}), and others wait", error.report.what), error
        assert "in 'collectiveboxing_3' (family 3, step 0)" in error.report.got


@pytest.mark.parametrize("tasks", [30, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_rank_is_waited_for(kind, tasks, test_ops) -> None:
    """The other rank waits for longer than its deadline, for short tasks or for one long one."""
    deadline = 0.5
    burn(100)
    begin = time.perf_counter()
    burn(100)
    count = round(1.5 * deadline / tasks * 100 / (time.perf_counter() - begin)) + 1
    asked = 0
    while not asked:  # else the machine is faster now
        plans = stages(2, "test_burn", 0, {"count": count}, tasks)
        with Ranks(plans, kind, deadline) as ranks:
            futures = [ranks.start(0, {"x": X}), ranks.start(1, {})]
            for future in futures:
                future.result()
            asked = ranks.runtimes[1]._watchdog._number
        count *= 2


@pytest.mark.parametrize(
    ("victim", "hosts"), [(0, ()), (1, (0, 1, 2)), (0, (0, 0, 1)), (1, (0, 0, 1))], ids=str
)
def test_a_stopped_process(victim, hosts, host_world) -> None:
    process = host_world.processes[victim].pid
    host_world.open(data_parallel, 3, ranks=range(3), hosts=hosts, deadline=1.0)
    feeds = [{"x": np.ones((6, 4), np.float32)}] * 20_000
    try:
        for rank in range(3):
            host_world.tell(rank, "step", feeds)
        os.kill(process, signal.SIGSTOP)
        for rank in {0, 1, 2} - {victim}:
            with pytest.raises(PlanCompilerError) as caught:
                host_world.answer(rank)
            assert isinstance(caught.value, (DeadlineError, AbortedError))
            assert f"rank {victim} does not answer" in str(caught.value)
            assert "family 3, step" in str(caught.value)
    finally:
        os.kill(process, signal.SIGCONT)
    with pytest.raises(PlanCompilerError):
        host_world.answer(victim)
    host_world.close_run(range(3))
    for rank in range(3):
        assert host_world.ask(rank, "leaks") == ([], [])


def test_nobody_watches_over_a_rank_without_peers() -> None:
    with Ranks(data_parallel(1), "local") as ranks:
        ranks.start(0, {"x": np.ones((6, 4), np.float32)}).result()
        assert isinstance(ranks.runtimes[0], Runtime)
        assert ranks.runtimes[0]._watchdog is None
