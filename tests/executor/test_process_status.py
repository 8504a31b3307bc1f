"""What is read of processes in /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from plancompiler.executor import process_status
from plancompiler.worker.quiet_work import QuietWork


@pytest.mark.parametrize(("states", "waits"), [("SS", False), ("SD", True), ("", False)])
def test_a_thread_that_waits_for_a_disk_is_seen(
    states: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, state in enumerate(states):
        folder = tmp_path / "7/task" / str(number)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{number} (a) D name) {state} 1 7 7")
    monkeypatch.setattr(process_status, "_PROC", tmp_path)
    assert process_status.waits_for_disk(7) is waits


def test_a_worker_that_transfers_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, now = 0, 0.0
    monkeypatch.setattr("plancompiler.worker.quiet_work.waits_for_disk", lambda _: False)
    monkeypatch.setattr("plancompiler.worker.quiet_work.time.monotonic", lambda: now)
    work = QuietWork(lambda: pieces)
    now = 1.0
    assert not work.was_seen()
    pieces, now = 1, 2.0
    assert work.was_seen()
    now = 3.0
    assert not work.was_seen()
