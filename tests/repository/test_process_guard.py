"""The guard of `scripts/test --quick`: a test that starts a process has the mark that says so."""

from __future__ import annotations

import pytest

from tests.process_guard import STARTS, ProcessGuard


@pytest.mark.parametrize("event", [*sorted(STARTS), "open"])
def test_a_start_is_stopped_in_a_test_without_the_mark(
    event: str, request: pytest.FixtureRequest
) -> None:
    guard = ProcessGuard()
    guard.audit(event, ())  # outside of tests nothing is stopped
    guard.test = request.node
    if event == "open":
        guard.audit(event, ())
    else:
        with pytest.raises(AssertionError, match=rf"\({event}\).*@pytest.mark.processes"):
            guard.audit(event, ())


@pytest.mark.processes
@pytest.mark.parametrize("event", sorted(STARTS))
def test_a_test_with_the_mark_may(event: str, request: pytest.FixtureRequest) -> None:
    guard = ProcessGuard()
    guard.test = request.node
    guard.audit(event, ())
