"""What tests are held to: none of the project's threads outlives those that started it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

PACKAGE = "plancompiler"


def is_ours(thread: threading.Thread) -> bool:
    """Whether the thread has the project's name, or does what a function of the project says."""
    target = getattr(thread, "_target", None)
    modules = type(thread).__module__, getattr(target, "__module__", None) or ""
    return any(name.split(".")[0].startswith(PACKAGE) for name in (thread.name, *modules))


def await_threads_of(name: str, seconds: float = 30.0) -> None:
    """Wait for threads that a test has left behind on purpose and that nothing keeps any longer."""
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(seconds)
            assert not thread.is_alive()


def assert_all_are_in(before: set[threading.Thread]) -> None:
    left = [each.name for each in threading.enumerate() if each not in before and is_ours(each)]
    assert not left, f"threads are left behind: {left}"


@pytest.fixture(autouse=True, scope="module")
def no_thread_outlives_its_module() -> Iterator[None]:
    """What the tests of a module and their fixtures close waits for its threads."""
    before = set(threading.enumerate())
    yield
    assert_all_are_in(before)


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """The same of each test, where no fixture of a module has threads."""
    before = set(threading.enumerate())
    yield
    assert_all_are_in(before)
