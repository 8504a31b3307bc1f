"""A worker whose work never ends must still end itself, some time after it should have."""

from __future__ import annotations

import pytest

from plancompiler.cluster.messages import Refused, Registered, Run
from plancompiler.errors import ClusterError
from plancompiler.worker.events import (
    Exit,
    FromMaster,
    Interrupt,
    MasterGone,
    StopAsked,
    WorkerTick,
)
from plancompiler.worker.state import LEAVE_SECONDS, WorkerState

GONE = ClusterError("the master ended the connection").report


@pytest.mark.parametrize(
    "reason",
    [StopAsked(), MasterGone(GONE), FromMaster(Refused(GONE))],
    ids=lambda each: type(each).__name__,
)
def test_it_ends_without_its_work(reason: object) -> None:
    state = WorkerState(0.0, 10.0)
    state.handle(FromMaster(Registered(0, 1, 10.0, b"")), 0.0)
    state.handle(FromMaster(Run(1, 1, 1, False)), 0.0)
    asked = state.handle(reason, 1.0)
    assert any(isinstance(each, Interrupt) for each in asked)
    early = state.handle(WorkerTick(), 1.0 + LEAVE_SECONDS - 0.1)
    assert not any(isinstance(each, Exit) for each in (*asked, *early))
    late = state.handle(WorkerTick(), 1.0 + LEAVE_SECONDS)
    leaving = [each for each in late if isinstance(each, Exit)]
    assert leaving == [Exit(None if isinstance(reason, StopAsked) else GONE)]
