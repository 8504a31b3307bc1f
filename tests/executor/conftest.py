"""Processes for the `host` transport, started once for all tests that need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plancompiler.ops import registry
from tests.executor.host_world import HostWorld, own_threads, shared_mappings
from tests.executor.kernels import TEST_OPS


@pytest.fixture(scope="session")
def host_world() -> Iterator[HostWorld]:
    """Four rank processes."""
    world = HostWorld(4)
    yield world
    world.shut_down()


@pytest.fixture
def test_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops of `kernels.py`, for one test."""
    for kind, definition in TEST_OPS.items():
        monkeypatch.setitem(registry._TABLE, kind, definition)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test may leave a thread of the executor or shared memory behind."""
    yield
    assert own_threads() == []
    assert shared_mappings() == []
