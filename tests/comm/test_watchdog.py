"""What happens when ranks do not do the same: deadlines, mismatches, and what is left to read."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from plancompiler.eager import current_world, spawn
from plancompiler.errors import (
    AbortedError,
    DeadlineError,
    PlanCompilerError,
    ShapeError,
    TransportError,
)
from plancompiler.executor.comm.context import CHECK
from plancompiler.executor.comm.flight_recorder import DIRECTORY, FlightRecorder

RANKS = 3


def errors_of(function) -> dict[int, PlanCompilerError]:
    """What each rank raises, by rank."""
    errors = {}

    def run():
        try:
            function(current_world())
        except PlanCompilerError as error:
            errors[current_world().rank] = error
            raise

    with pytest.raises(PlanCompilerError):
        spawn(run, RANKS)
    return errors


def test_a_rank_that_sleeps_is_named_and_all_are_stopped():
    """Ranks 0 and 1 wait in vain; when rank 2 comes at last, it is told that all is over."""
    called, over = threading.Event(), threading.Event()

    def run(world):
        group = world.comm.context(range(RANKS))
        group.barrier()
        if world.rank == 0:
            called.wait(60)
            world.comm.deadline = 0.5
        elif world.rank == 1:
            world.comm.observers.append(lambda record: called.set())
        else:
            over.wait(60)
        try:
            group.all_reduce(np.zeros(1000, np.float32))
        finally:
            over.set()

    errors = errors_of(run)
    text = str(errors[0])
    assert isinstance(errors[0], DeadlineError)
    assert "all_reduce sum of 4000 bytes (operation 1 of ranks [0, 1, 2])" in text
    assert "within 0.5 s" in text
    assert "entered: [0, 1]; not entered: [2]" in text
    assert "test_watchdog.py" in errors[0].report.source
    for rank in (1, 2):
        assert isinstance(errors[rank], AbortedError)
        assert errors[rank].report.rank == 0
        assert "not entered: [2]" in str(errors[rank])


def test_a_rank_that_leaves_early_is_named():
    def run(world):
        group = world.comm.context(range(RANKS))
        group.all_reduce(np.zeros(3))
        if world.rank != 1:
            group.reduce_scatter(np.zeros(3))

    errors = errors_of(run)
    assert set(errors) <= {0, 2}
    for error in errors.values():
        assert isinstance(error, (TransportError, AbortedError))
        assert "rank 1 has closed its run" in str(error)
        assert "operation 1" in str(error)


def test_the_first_failure_is_raised_and_wakes_the_others():
    seen = []

    def run():
        world = current_world()
        if world.rank == 1:
            raise ValueError("broken on purpose")
        try:
            world.comm.context((0, 1)).barrier()
        except AbortedError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="on purpose"):
        spawn(run, 2)
    assert len(seen) == 1
    assert "broken on purpose" in seen[0]


CALLS = {
    "another op": (
        lambda group: group.all_reduce(np.zeros(4)),
        lambda group: group.all_gather(np.zeros(4)),
        r"all_reduce sum float64\[4\] at .*rank 1: all_gather axis 0 at .*test_watchdog.py",
    ),
    "another reduction": (
        lambda group: group.all_reduce(np.zeros(4)),
        lambda group: group.all_reduce(np.zeros(4), "max"),
        r"rank 0: all_reduce sum .*rank 1: all_reduce max ",
    ),
    "another dtype": (
        lambda group: group.all_reduce(np.zeros(4)),
        lambda group: group.all_reduce(np.zeros(4, np.float32)),
        r"rank 0: all_reduce sum float64\[4\].*rank 1: all_reduce sum float32\[4\]",
    ),
    "another count": (
        lambda group: group.all_reduce(np.zeros(4)),
        lambda group: group.all_reduce(np.zeros(100_000)),
        r"rank 0: all_reduce sum float64\[4\].*rank 1: all_reduce sum float64\[100000\]",
    ),
    "another root": (
        lambda group: group.reduce(np.zeros(4), 0),
        lambda group: group.reduce(np.zeros(4), 1),
        r"rank 0: reduce sum to 0 .*rank 1: reduce sum to 1 ",
    ),
    "another order": (
        lambda group: (group.barrier(), group.all_reduce(np.zeros(4))),
        lambda group: (group.all_reduce(np.zeros(4)), group.barrier()),
        r"operation 0: rank 0: barrier at .*rank 1: all_reduce sum",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_mismatches_are_found_before_they_begin(name, monkeypatch):
    """All ranks get the error, with each rank's call and its line."""
    monkeypatch.setenv(CHECK, "1")
    usual, other, message = CALLS[name]

    def run(world):
        (other if world.rank == 1 else usual)(world.comm.context(range(RANKS)))

    errors = errors_of(run)
    assert set(errors) == set(range(RANKS))
    for error in errors.values():
        assert isinstance(error, TransportError)
        with pytest.raises(TransportError, match=message):
            raise error


def test_checked_calls_have_the_same_results(monkeypatch):
    monkeypatch.setenv(CHECK, "1")

    def run():
        context = current_world().comm.context(range(RANKS))
        with context.group() as group:
            work = group.all_reduce(np.ones(3))
            right, left = (context.rank + 1) % RANKS, (context.rank - 1) % RANKS
            group.send(np.array(context.rank), right)
            came = group.recv(left)
        return work.wait().tolist(), int(came.wait()), context.all_reduce(np.ones(1)).tolist()

    assert spawn(run, RANKS) == [([3.0] * 3, left, [3.0]) for left in (2, 0, 1)]


def test_groups_of_calls_that_differ():
    def run(world):
        with world.comm.context(range(RANKS)).group() as group:
            group.barrier()
            group.all_reduce(np.zeros(3), "max" if world.rank else "min")

    for error in errors_of(run).values():
        assert "rank 0: group of barrier; all_reduce min; rank 1: group of barrier" in str(error)


def test_a_stream_says_its_error_where_it_is_waited_for():
    def run(world):
        stream = world.comm.context(range(RANKS), on_compute_stream=False)
        work = stream.all_reduce(np.zeros(world.rank + 1))
        later = stream.all_reduce(np.ones(2))
        assert later.wait().tolist() == [3.0, 3.0]
        work.wait()

    errors = errors_of(run)
    assert {type(error) for error in errors.values()} == {ShapeError}


def test_a_group_that_raises_runs_nothing():
    def run():
        context = current_world().comm.context(range(RANKS))

        def block():
            with context.group() as group:
                group.all_reduce(np.zeros(3))
                raise KeyError

        with pytest.raises(KeyError):
            block()
        return context.sequence

    assert spawn(run, RANKS) == [0] * RANKS


def test_the_flight_recorder_holds_the_latest(tmp_path):
    def run():
        comm = current_world().comm
        context = comm.context(range(RANKS))
        context.all_reduce(np.zeros((2, 3), np.float16), "max")
        comm.context(range(RANKS), on_compute_stream=False).barrier().wait()
        if comm.rank == 0:
            context.send(np.zeros(2), 1)
        elif comm.rank == 1:
            context.recv(0)
        context.dump(tmp_path / f"{comm.rank}.json")

    spawn(run, RANKS)
    report = json.loads((tmp_path / "0.json").read_text())
    assert report["rank"] == 0
    reduced, barrier, sent = report["operations"]
    wanted = {
        "sequence": 0,
        "group": [0, 1, 2],
        "stream": "",
        "op": "all_reduce",
        "call": "all_reduce max",
        "dtype": "float16",
        "count": 6,
        "bytes": 12,
        "state": "done",
        "error": None,
    }
    assert {name: reduced[name] for name in wanted} == wanted
    assert "test_watchdog.py" in reduced["source"]
    assert reduced["begin"] <= reduced["end"]
    assert (barrier["op"], barrier["stream"]) == ("barrier", "communicator")
    assert (sent["op"], sent["group"]) == ("send", [0, 1])


def test_the_flight_recorder_forgets_the_oldest(tmp_path):
    def run():
        comm = current_world().comm
        comm.recorder = FlightRecorder(comm.rank, size=2)
        for _ in range(3):
            comm.context((0, 1)).barrier()
        return [record.sequence for record in comm.recorder.records()]

    assert spawn(run, 2) == [[1, 2]] * 2
    with pytest.raises(TransportError, match="cannot be written"):
        FlightRecorder(0).dump(tmp_path / "nowhere" / "file.json")


def test_every_rank_leaves_its_records_when_it_fails(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "records"))

    def run(world):
        group = world.comm.context(range(RANKS))
        group.barrier()
        if world.rank == 1:
            raise ShapeError("broken on purpose")
        group.all_reduce(np.zeros(2))

    errors_of(run)
    files = sorted((tmp_path / "records").iterdir())
    assert [path.name for path in files] == [f"rank-{rank}.json" for rank in range(RANKS)]
    last = [json.loads(path.read_text())["operations"][-1] for path in files]
    assert [each["op"] for each in last] == ["all_reduce", "barrier", "all_reduce"]
    assert [each["state"] for each in last] == ["failed", "done", "failed"]
    assert "broken on purpose" in last[0]["error"]
