"""`pc.profile`: what ran, how often and for how long, on which rank, and for whom it waited."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import eager
from plancompiler.eager.profile import ProfileRow
from plancompiler.executor.comm.flight_recorder import CALLED, CommRecord

PAIR = pc.Placement("cpu", [0, 1])


def of(p: eager.Profile, what: str, name: str) -> ProfileRow:
    (row,) = [row for row in p.rows if (row.what, row.name) == (what, name)]
    return row


@pytest.mark.processes
def test_ops_kernels_collectives_and_compiled_functions_are_counted() -> None:
    def program() -> tuple[eager.Profile, int]:
        w = pc.tensor(np.ones((6, 4)), PAIR, requires_grad=True)
        x = pc.tensor(np.ones((8, 6)), PAIR, "S(0)")

        def loss(x: pc.DistTensor) -> pc.DistTensor:
            return (x @ w).relu().sum()

        compiled = pc.compile(loss)
        with pc.profile() as p:
            for _ in range(3):
                loss(x).backward()
                assert w.grad is not None
                w.grad.redistribute(sbp="B")
                compiled(x)
        p.compare_ranks()
        loss(x)  # after the block: not counted
        return p, len(p.rows)

    for p, count in eager.spawn(program, ranks=2):
        assert len(p.rows) == count
        product = of(p, "op", "matmul")
        assert product.calls == 3
        assert product.shapes == "float64[4, 6], float64[6, 4], float64[4, 4]"
        kernel = of(p, "kernel", "matmul")
        assert kernel.calls == 3
        assert kernel.nbytes == product.nbytes == 3 * 8 * (24 + 24 + 16)
        assert 0 < kernel.seconds == kernel.kernel_seconds <= product.seconds < p.seconds
        assert of(p, "op", "matmul backward").calls == of(p, "op", "redistribute").calls == 3
        (reduction,) = [row for row in p.rows if row.name == "all_reduce sum"]
        assert (reduction.calls, reduction.nbytes) == (3, 3 * 6 * 4 * 8)
        assert "test_profile.py" in reduction.source
        assert of(p, "task", "loss: matmul").calls == 3
        assert of(p, "task", "loss: all_reduce").kernel_seconds == 0
        assert {line.split()[0] for line in str(p).splitlines()[2:] if line} >= {"matmul", "ops"}


def test_who_was_waited_for_is_named() -> None:
    """Rank 1 begins only after rank 0 has been seen to wait."""
    calls: list[CommRecord] = []
    is_called = threading.Event()

    def note(record: CommRecord) -> None:
        calls.append(record)
        is_called.set()

    def program() -> eager.Profile:
        world = eager.current_world()
        x = pc.tensor(np.ones((4, 4)), PAIR, "P")
        with pc.profile() as p:
            if world.rank == 0:
                world.comm.observers.append(note)
            else:
                assert is_called.wait(60)
                while calls[0].state == CALLED:  # the few instructions until it waits
                    os.sched_yield()
            x.redistribute(sbp="B")
        p.compare_ranks()
        return p

    first, second = eager.spawn(program, ranks=2)
    (early,), (late,) = (
        [row for row in p.rows if row.what == "collective"] for p in (first, second)
    )
    assert set(early.waited) == {1}
    assert 0 < early.waited[1] <= early.seconds
    assert "for rank 1" in str(first)
    assert late.waited == {}


@pytest.mark.processes
def test_a_trace_is_written(tmp_path: Path) -> None:
    mesh = pc.Placement("cpu", [0])
    x = pc.tensor(np.ones((4, 4)), mesh)
    double = pc.compile(lambda x: x * 2)
    with pc.profile() as p:
        (x + x).relu()
        double(x)
    p.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    runs = [event for event in events if event["ph"] == "X"]
    assert {"op", "kernel", "Compute"} <= {event["cat"] for event in runs}
    begins = [event["ts"] for event in runs]
    assert max(begins) - min(begins) < p.seconds * 1e6
    calls, kernels = ({e["name"]: e for e in runs if e["cat"] == what} for what in ("op", "kernel"))
    for name in ("add", "relu"):
        call, kernel = calls[name], kernels[name]
        assert call["ts"] <= kernel["ts"]
        assert kernel["ts"] + kernel["dur"] <= call["ts"] + call["dur"] + 0.01


def test_nothing_is_left_outside_of_the_block_and_blocks_do_not_nest() -> None:
    mesh = pc.Placement("cpu", [0])
    x = pc.tensor(np.ones(3), mesh)
    x.relu()
    prepared = x.spec.runs["relu"]
    with pc.profile():
        x.relu()
        assert x.spec.runs["relu"] is not prepared
        with pytest.raises(pc.UsageError, match="by itself"), pc.profile():
            pass
    assert x.spec.runs["relu"] is prepared

    @pc.compile
    def inside(x: pc.DistTensor) -> pc.DistTensor:
        with pc.profile():
            return x.relu()

    with pytest.raises(pc.UsageError, match="around compiled functions"):
        inside(x)
