"""Queues of tokens: nothing is lost, whoever is when where; and how many files they open."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from plancompiler.executor import token_queue
from plancompiler.executor.token_queue import WakingQueue, token_queues

PUTS = 2000


@pytest.mark.parametrize("seed", range(6))
def test_every_token_comes_once_and_those_of_a_thread_in_order(seed: int) -> None:
    queue, _ = token_queues(2)
    assert isinstance(queue, WakingQueue)
    choices = random.Random(seed)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(choices.choice((1e-6, 1e-5, 1e-3)))

    def put(first: int, pauses: list[bool]) -> None:
        for number, pause in enumerate(pauses):
            queue.put(first + number)
            if pause:
                os.sched_yield()

    threads = [
        threading.Thread(
            target=put,
            args=(first * PUTS, [choices.random() < share for _ in range(PUTS)]),
        )
        for first, share in enumerate((0.0, 0.5, 1.0))
    ]
    try:
        for thread in threads:
            thread.start()
        came = [queue.get(timeout=60.0) for _ in range(len(threads) * PUTS)]
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    for first in range(len(threads)):
        own = range(first * PUTS, (first + 1) * PUTS)
        assert [token for token in came if token in own] == list(own)
    with pytest.raises(Empty):
        queue.get_nowait()


def test_two_streams_in_turn_wake_each_other() -> None:
    here, there = token_queues(2)

    def answer() -> None:
        for _ in range(PUTS):
            here.put(there.get(timeout=60.0) + 1)

    thread = threading.Thread(target=answer)
    thread.start()
    for token in range(PUTS):
        there.put(token)
        assert here.get(timeout=60.0) == token + 1
    thread.join()


def test_a_token_that_does_not_come_is_not_waited_for_too_long() -> None:
    queue, _ = token_queues(2)
    with pytest.raises(Empty):
        queue.get(timeout=0.01)
    queue.put(3)
    assert queue.get(timeout=0.0) == 3
    with pytest.raises(Empty):
        queue.get(timeout=0.01)


def test_files_are_few_and_given_back() -> None:
    gc.collect()
    kept = [token_queue._free.pop() for _ in range(len(token_queue._free) - 2)]
    before = set(Path("/proc/self/fd").iterdir())
    queues = token_queues(3)
    assert [type(each) for each in queues] == [WakingQueue, WakingQueue, SimpleQueue]
    del queues
    gc.collect()
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert len(token_queue._free) == 2
    token_queue._free.extend(kept)


def test_a_stream_that_is_alone_and_a_process_without_files_get_plain_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (alone,) = token_queues(1)
    assert isinstance(alone, SimpleQueue)

    def full(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(token_queue.os, "eventfd", full)
    free = len(token_queue._free)
    assert all(isinstance(each, SimpleQueue) for each in token_queues(2))
    assert len(token_queue._free) == free
