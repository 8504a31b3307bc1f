"""What all tests of some folders hold: no thread of the project's is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """No test may leave a thread behind that carries the project's name."""
    before = set(threading.enumerate())
    yield
    left = [each.name for each in threading.enumerate() if each not in before]
    assert not [name for name in left if name.startswith("plancompiler")]
